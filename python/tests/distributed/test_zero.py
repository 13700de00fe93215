"""DeepSpeed's own ZeRO-3: scales are those of the whole tensors that it gathers for a module's forward, bit for bit."""

import os

import pytest
from models import Attention, Plain, described, expected, inputs, torch
from ranks import distributed, processes_of_their_own  # noqa: F401

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip("deepspeed", reason="deepspeed is not installed")

from deepspeed.utils import set_z3_leaf_modules  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402

pytestmark = pytest.mark.usefixtures("processes_of_their_own")


def started(model, stage=3, persistent=0, leaf=True):
    """The engine around a model whose attention modules are gathered whole."""
    # It compiles an operator for shared memory otherwise.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    if leaf:
        set_z3_leaf_modules(model, [Attention])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": persistent},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def attach(engine, model, **options):
    runtime = fp8.attach(engine, layers=described(model), backend="emulated", **options)
    for block, plan in zip(model.blocks, runtime.layers):
        block.attention.plan = plan
    return runtime


def whole(model):
    copy = Plain(fused=model.blocks[0].attention.fused)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        copy.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})
    return expected(copy)


@pytest.mark.parametrize("persistent", [0, 100_000])
@pytest.mark.parametrize("fused", [True, False])
@distributed(2)
def test_three_steps(fused, persistent):
    """`persistent`: below it a parameter is never partitioned, as the gains of a model are by default."""
    model = Plain(fused=fused)
    engine = started(model, persistent=persistent)
    assert model.blocks[0].norm.weight.ds_persist == bool(persistent)
    runtime, first = attach(engine, model), None
    x = inputs(model, torch.distributed.get_rank()).bfloat16()
    for step in range(3):
        y = engine(x)
        assert not any(plan.stale for plan in runtime.layers) and torch.equal(runtime.descales, whole(model).descales)
        first = runtime.descales.clone() if step == 0 else first
        engine.backward(y.float().square().mean())
        engine.step()
        runtime.refresh()
        assert all(plan.stale for plan in runtime.layers)
    runtime.refresh(now=True)
    assert torch.equal(runtime.descales, whole(model).descales) and not torch.equal(runtime.descales, first)
    assert (runtime.stats()["overflow"] == 0).all()


@distributed(2)
def test_projections_that_are_gathered_apart_are_refused():
    model = Plain(fused=False)
    engine = started(model, leaf=False)
    with pytest.raises(sigmascale.UnsupportedError, match="set_z3_leaf_modules"):
        attach(engine, model)


@distributed(2)
def test_layers_that_are_given_as_tensors_are_refused():
    from models import describe

    model = Plain(fused=False)
    engine = started(model)
    with pytest.raises(
        sigmascale.UnsupportedError, match="layer.q .*ZeRO-3"
    ):
        fp8.attach(engine, layers=[describe(block) for block in model.blocks])


@distributed(2)
def test_stages_that_keep_weights_whole_need_no_hooks():
    model = Plain()
    engine = started(model, stage=2)
    runtime = attach(engine, model)
    assert not any(plan.stale for plan in runtime.layers)
    assert torch.equal(runtime.descales, expected(Plain()).descales)
    x = inputs(model, torch.distributed.get_rank()).bfloat16()
    engine.backward(engine(x).float().square().mean())
    engine.step()
    runtime.refresh()
    copy = Plain()
    copy.load_state_dict(model.state_dict())
    assert torch.equal(runtime.descales, expected(copy).descales)


@pytest.mark.parametrize("stage", [2, 3])
@distributed(2)
def test_steps_of_an_engine_are_followed(stage):
    model = Plain()
    engine = started(model, stage=stage)
    runtime = attach(engine, model, optimizer=engine, strict=True)
    x = inputs(model, torch.distributed.get_rank()).bfloat16()
    for step in range(3):
        y = engine(x)
        assert torch.equal(runtime.descales, whole(model).descales)
        engine.backward(y.float().square().mean())
        engine.step()
    engine(x)
    assert torch.equal(runtime.descales, whole(model).descales)
    runtime.check()
