"""The guard of models that several processes share: all decide alike, and a restore has the bits of a run that did not fail."""

import math

import pytest
from models import attach, inputs, llama, mesh_of, run, shard, torch
from ranks import distributed
from test_fsdp import tensor_parallel
from torch.distributed.tensor import DTensor

import sigmascale.torch as fp8


class Run:
    """A sharded model and its loop."""

    def __init__(self, policy):
        group = torch.distributed.group.WORLD
        self.model = shard(llama(), mesh_of(2), reshard_after_forward=False)
        self.runtime = attach(self.model, policy=policy, bound="worst-case", group=None if policy == "geometry" else group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def backward(self, number):
        """The loss, before the optimizer's step."""
        loss = run(self.model, inputs(self.model, torch.distributed.get_rank() + 2 * number))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss.detach()

    def end(self):
        self.optimizer.zero_grad()
        self.runtime.refresh()

    def bits(self):
        """Weights and moments that lie here."""
        own = [x for p in self.model.parameters() for x in (p, *self.optimizer.state.get(p, {}).values())]
        return [(x.to_local() if isinstance(x, DTensor) else x).clone() for x in own]


@pytest.mark.parametrize("policy", ["geometry", "delayed-te", "auto-c"])
@distributed(2)
def test_a_restore_of_shards_has_the_bits_of_a_run_that_skipped_that_step(policy):
    failing, calm = Run(policy), Run(policy)
    group = torch.distributed.group.WORLD
    guard = fp8.Guard(failing.runtime, failing.optimizer, every=1, points=1, patience=1, group=group)
    for number in range(4):
        loss = failing.backward(number)
        # One rank alone sees it.
        bad = number == 3 and torch.distributed.get_rank() == 1
        assert guard.step(loss * (math.nan if bad else 1.0)) == (number < 3)
        if number < 3:
            failing.optimizer.step()
        failing.end()
    for number in range(3):
        calm.backward(number)
        # The point is from before the step of the last one.
        if number < 2:
            calm.optimizer.step()
        calm.end()
    assert guard.restored == 1
    assert all(torch.equal(a, b) for a, b in zip(failing.bits(), calm.bits(), strict=True))
    assert torch.equal(failing.backward(9), calm.backward(9))
    assert torch.equal(failing.runtime.descales, calm.runtime.descales)


@distributed(2)
def test_gradients_of_several_kinds_are_looked_at_where_no_norm_is_given():
    """Under tensor parallelism some are DTensors."""
    model = tensor_parallel(llama(heads=(8, 4)), mesh_of(2))
    runtime = attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    guard = fp8.Guard(runtime, optimizer)
    loss = run(model, inputs(None))
    loss.backward()
    assert guard.step(loss)
    one = model.model.layers[0].self_attn.q_proj.weight.grad
    if torch.distributed.get_rank() == 1:
        one.to_local()[0, 0] = math.inf
    assert not guard.step(loss) and guard.skipped
