"""Ring and Ulysses attention are attention over the whole sequence."""

import functools
import sys
import types

import pytest
from models import Plain, attach, describe, torch
from ranks import distributed

import sigmascale
import sigmascale.torch as fp8
from sigmascale.torch import _context_parallel as cp
from sigmascale.torch import _distributed


def operands(heads=(4, 2), length=48, d=16, batch=2):
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, length, n, d, generator=generator) for n in (heads[0], heads[1], heads[1])]


def rows(n_kv):
    """Descales that differ by head."""
    return [torch.linspace(low, 2 * low, n_kv) for low in (0.01, 0.012, 0.014)]


def whole(q, k, v, descales, causal, grad):
    """Output and gradients of plain attention over everything, from the same E4M3 operands."""
    spread = [d.expand(q.shape[0], -1) for d in descales]
    call = cp._e4m3.cast_all(q, k, v, spread, None)
    out, lse = cp.plain_forward(*call, spread, causal, q.shape[3] ** -0.5)
    out = out.to(torch.bfloat16)
    return out, cp.plain_backward(grad, *call, spread, out, lse, causal, q.shape[3] ** -0.5)


def check(function, heads, causal, zigzag, ranks):
    group = torch.distributed.group.WORLD
    tensors, descales = operands(heads, length=12 * ranks), rows(heads[1])
    grad = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected, expected_grads = whole(*tensors, descales, causal, grad)
    part = lambda x: cp.shard_sequence(x, group, zigzag=zigzag)
    own = [part(x).requires_grad_(True) for x in tensors]
    out = function(*own, descales, group, causal=causal)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), part(expected).float(), rtol=2**-7, atol=1e-3)
    grads = torch.autograd.grad(out, own, part(grad))
    for a, b in zip(grads, expected_grads):
        torch.testing.assert_close(a, part(b), rtol=0.02, atol=2e-3)
    assert torch.equal(cp.gather_sequence(own[0], group, zigzag=zigzag), tensors[0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (2, 1)])
@distributed(2)
def test_a_ring_of_two(heads, causal):
    check(fp8.ring_attention, heads, causal, causal, 2)


@pytest.mark.parametrize("causal", [True, False])
@distributed(4)
def test_a_ring_of_four(causal):
    check(fp8.ring_attention, (4, 2), causal, causal, 4)


@pytest.mark.parametrize("causal", [True, False])
@distributed(1)
def test_one_rank_alone(causal):
    check(fp8.ring_attention, (4, 2), causal, causal, 1)
    check(fp8.ulysses_attention, (4, 2), causal, False, 1)


@distributed(4)
def test_groups_of_two_beside_each_other():
    """Ranks of a mesh's dimension, which are not neighbours in the world."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    group, descales = mesh["cp"].get_group(), rows(2)
    tensors = [x * (1 + mesh.get_local_rank("dp")) for x in operands(length=8)]
    expected, _ = whole(*tensors, descales, True, torch.zeros_like(tensors[0]))
    for function, zigzag in ((fp8.ring_attention, True), (fp8.ulysses_attention, False)):
        out = function(*(cp.shard_sequence(x, group, zigzag=zigzag) for x in tensors), descales, group)
        assert (cp.gather_sequence(out, group, zigzag=zigzag).float() - expected.float()).norm() < 0.01 * expected.norm()


@distributed(2)
def test_autocast_rounds_operands_and_nothing_else():
    group, descales = torch.distributed.group.WORLD, rows(2)
    for function, zigzag in ((fp8.ring_attention, True), (fp8.ulysses_attention, False)):
        tensors = [cp.shard_sequence(x, group, zigzag=zigzag) for x in operands()]
        expected = function(*(x.bfloat16() for x in tensors), descales, group)
        own = [x.clone().requires_grad_(True) for x in tensors]
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*own, descales, group)
            out.sum().backward()
        assert torch.equal(out, expected) and all(x.grad.dtype == torch.float32 for x in own)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (4, 1)])
@distributed(2)
def test_ulysses_on_two_ranks(heads, causal):
    check(fp8.ulysses_attention, heads, causal, False, 2)


@pytest.mark.parametrize("heads", [(8, 2), (8, 4), (4, 1)])
@distributed(4)
def test_ulysses_with_repeated_heads(heads):
    check(fp8.ulysses_attention, heads, True, False, 4)


def against_attention(function, heads, length, ranks):
    """A model's own plan, and `fp8.attention` over the whole sequence: outputs and gradients."""
    group, zigzag = torch.distributed.group.WORLD, function is fp8.ring_attention
    model = Plain(width=16 * heads[0], heads=heads[0], kv_heads=heads[1])
    runtime = attach(model)
    tensors = [x.requires_grad_(True) for x in operands(heads, length=length * ranks)]
    out = fp8.attention(*tensors, runtime.layers[0])
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    expected = out, *torch.autograd.grad(out, tensors, grad)
    part = lambda x: cp.shard_sequence(x, group, zigzag=zigzag)
    own = [part(x.detach()).requires_grad_(True) for x in tensors]
    out = function(*own, runtime.layers[0], group)
    for a, b in zip((out, *torch.autograd.grad(out, own, part(grad))), expected):
        b = part(b).float()
        # The emulation rounds P to E4M3, in the forward and in the backward.
        assert (a.float() - b).norm() < 0.05 * b.norm()


BOTH = {"ring": fp8.ring_attention, "ulysses": fp8.ulysses_attention}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("length", [2, 22])
@pytest.mark.parametrize("heads", [(4, 2), (4, 1)])
@distributed(2)
def test_two_ranks_attend_as_one(kind, length, heads):
    against_attention(BOTH[kind], heads, length, 2)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("heads", [(8, 4), (4, 2), (4, 1)])
@distributed(4)
def test_four_ranks_attend_as_one(kind, heads):
    """KV heads as many as ranks, and fewer."""
    against_attention(BOTH[kind], heads, 14, 4)


@distributed(4)
def test_kv_heads_that_four_ranks_cannot_share_are_refused():
    q, k, v = operands(heads=(12, 3))
    with pytest.raises(
        sigmascale.UnsupportedError, match="4 ranks .*12 query .*3 KV heads.* ring"
    ):
        fp8.ulysses_attention(q, k, v, rows(3), torch.distributed.group.WORLD)
    against_attention(fp8.ring_attention, (12, 3), 4, 4)


@distributed(2)
def test_keys_and_values_travel_in_one_byte():
    group = torch.distributed.group.WORLD
    sent, original = [], cp.dist.batch_isend_irecv

    def watched(operations):
        sent.extend((o.tensor.dtype, o.tensor.numel()) for o in operations if o.op is torch.distributed.isend)
        return original(operations)

    q, k, v = (cp.shard_sequence(x, group, zigzag=True) for x in operands())
    cp.dist.batch_isend_irecv = watched
    try:
        fp8.ring_attention(q, k, v, rows(2), group)
    finally:
        cp.dist.batch_isend_irecv = original
    assert sent == [(torch.uint8, 2 * k.numel())]


@distributed(2)
def test_plans_serve_both_and_take_the_statistics():
    group = torch.distributed.group.WORLD
    model = Plain(width=64, heads=4, kv_heads=2)
    runtime = attach(model)
    tensors = operands(d=16)
    expected, _ = whole(*tensors, list(runtime.layers[0]._descales[:3]), True, torch.zeros_like(tensors[0]))
    for function, zigzag in ((fp8.ring_attention, True), (fp8.ulysses_attention, False)):
        own = [cp.shard_sequence(x, group, zigzag=zigzag) for x in tensors]
        runtime.words.zero_()
        out = function(*own, runtime.layers[0], group)
        assert (
            cp.gather_sequence(out, group, zigzag=zigzag).float() - expected.float()
        ).norm() < 0.01 * expected.norm()
        assert runtime.stats()["amax"][0, 1].tolist() == own[1].abs().amax(dim=(0, 1, 3)).tolist()


@distributed(2)
def test_means_of_each_rank_are_no_common_center():
    group, model = torch.distributed.group.WORLD, Plain(width=64, heads=4, kv_heads=2)
    own = [cp.shard_sequence(x, group) for x in operands(d=16)]
    alone = attach(model, center="mean")
    for function in (fp8.ring_attention, fp8.ulysses_attention):
        with pytest.raises(sigmascale.ArgumentError, match="center='mean'"):
            function(*own, alone.layers[0], group)
    together = attach(Plain(width=64, heads=4, kv_heads=2), center="mean", group=group)
    fp8.ring_attention(*own, together.layers[0], group)


@distributed(2)
def test_calls_that_cannot_be_are_refused():
    group = torch.distributed.group.WORLD
    q, k, v = operands(heads=(3, 3))
    with pytest.raises(sigmascale.UnsupportedError, match="2 ranks .*3 query .*3 KV heads"):
        fp8.ulysses_attention(q, k, v, rows(3), group)
    with pytest.raises(sigmascale.MismatchError, match="4 query .*3 KV heads"):
        fp8.ring_attention(*operands(heads=(4, 3)), rows(3), group)
    with pytest.raises(sigmascale.MismatchError, match=r"the q descale has shape \(2,\): \(3,\)"):
        fp8.ring_attention(q, k, v, rows(2), group)
    with pytest.raises(TypeError, match="descales .*list of 2"):
        fp8.ulysses_attention(q, k, v, rows(3)[:2], group)
    with pytest.raises(sigmascale.ArgumentError, match="k .*torch.float32.*q torch.bfloat16"):
        fp8.ring_attention(q.bfloat16(), k, v, rows(3), group)
    with pytest.raises(TypeError, match="not DeviceMesh: that of a mesh is"):
        fp8.ring_attention(q, k, v, rows(3), torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    # The other rank has the group, and is alone in it.
    first = torch.distributed.new_group([0])
    if torch.distributed.get_rank() == 1:
        for refused in (lambda: fp8.ring_attention(q, k, v, rows(3), first), lambda: cp.shard_sequence(q, first)):
            with pytest.raises(sigmascale.ArgumentError, match="this process is not in the group"):
                refused()
    with pytest.raises(sigmascale.ArgumentError, match="47 queries"):
        fp8.ring_attention(q[:, 1:], k[:, 1:], v[:, 1:], rows(3), group)
    with pytest.raises(sigmascale.MismatchError, match="as many keys as queries"):
        fp8.ring_attention(q, k[:, 1:], v[:, 1:], rows(3), group)
    with pytest.raises(sigmascale.ArgumentError, match="47 is not a multiple of 4"):
        cp.shard_sequence(q[:, 1:], group, zigzag=True)
    model = Plain(width=48, heads=3, kv_heads=3)
    layers = [functools.partial(describe, block) for block in model.blocks]
    runtime = fp8.attach(model, policy="current", layers=layers)
    with pytest.raises(sigmascale.UnsupportedError, match="'current'"):
        fp8.ring_attention(q, k, v, runtime.layers[0], group)


@distributed(2)
def test_pytorchs_context_parallel_is_refused():
    """It would give a call the keys of one rank; afterwards calls are as before."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = Plain()
    runtime = attach(model)
    q, k, v = operands(heads=(6, 3))
    before = fp8.attention(q, k, v, runtime.layers[0])
    with context_parallel(mesh, buffers=[q.clone()], buffer_seq_dims=[1]):
        with pytest.raises(sigmascale.UnsupportedError, match="sigmascale.torch.ring"):
            fp8.attention(q, k, v, runtime.layers[0])
    assert torch.equal(fp8.attention(q, k, v, runtime.layers[0]), before)


def test_the_context_parallel_of_older_releases_is_refused(monkeypatch):
    """They keep what they replace in another module."""
    older = types.ModuleType("torch.distributed.tensor.experimental._attention")
    older._replaced_functions = {}
    monkeypatch.setitem(sys.modules, older.__name__, older)
    _distributed.refuse_context_parallel()
    older._replaced_functions[torch.nn.functional.scaled_dot_product_attention] = "scaled_dot_product_attention", None
    with pytest.raises(sigmascale.UnsupportedError, match="outside of context_parallel"):
        _distributed.refuse_context_parallel()
