"""What observing policies remember, by the model's own layers and heads: resumes at other world sizes."""

import tempfile

import pytest
from models import attach as attach_held
from models import expected, inputs, llama, mesh_of, run, shard, torch
from ranks import distributed
from test_fsdp import tensor_parallel
from test_parallel import Stage

import sigmascale
import sigmascale.torch as fp8

OBSERVING = ["delayed-te", "delayed-paper", "auto-c"]


def attach(model, **options):
    """A runtime that keeps its model, which nothing else here does."""
    runtime = attach_held(model, **options)
    runtime.model = model
    return runtime


def observed(runtime, steps=3):
    """Calls with operands that are the same whoever has the layer or head."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        q, k = torch.randn(1, 6, 64, 16, generator=generator), torch.randn(1, 6, 64, 16, generator=generator)
        for place, plan in zip(runtime._places, runtime.layers):
            number, first, n_kv, n_q = place
            group, scale = n_q // n_kv, 1 + number + torch.arange(first, first + n_kv)[:, None]
            own_k = scale * k[:, :, first : first + n_kv]
            own_q = scale.repeat_interleave(group, 0) * q[:, :, group * first : group * (first + n_kv)]
            fp8.attention(own_q, own_k, own_k, plan)
        runtime.refresh()


def gathered(runtime):
    states = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, runtime.state_dict())
    return fp8.merge_states(states)


def stages(rank, ranks, policy):
    """A pipeline stage of four layers."""
    whole = llama(layers=4).bfloat16()
    per = 4 // ranks
    stage = Stage(whole, range(per * rank, per * (rank + 1)))
    runtime = fp8.attach(stage, policy=policy, backend="emulated")
    runtime.model = stage
    return runtime


@pytest.mark.parametrize("policy", OBSERVING)
@distributed(2)
def test_a_state_of_two_stages_goes_on_in_one_and_in_four(policy):
    rank = torch.distributed.get_rank()
    runtime = stages(rank, 2, policy)
    observed(runtime)
    state = gathered(runtime)
    assert [place[0] for place in state["places"]] == [0, 1, 2, 3]
    for ranks in (1, 2, 4):
        for part in range(ranks):
            resumed = stages(part, ranks, policy)
            resumed.load_state_dict(state)
            observed(resumed, 2)
            alone = stages(0, 1, policy)
            observed(alone)
            alone.load_state_dict(alone.state_dict())
            observed(alone, 2)
            own = slice(part * (4 // ranks), (part + 1) * (4 // ranks))
            assert torch.equal(resumed.descales, alone.descales[own])
            assert torch.equal(resumed.logit_descales, alone.logit_descales[own])
    if rank:
        with pytest.raises(sigmascale.MismatchError, match="no layer 0: merge the states"):
            stages(0, 2, policy).load_state_dict(runtime.state_dict())


@pytest.mark.parametrize("policy", OBSERVING)
@distributed(2)
def test_the_same_degree_of_tensor_parallelism_goes_on(policy):
    mesh = mesh_of(2)
    make = lambda: attach(tensor_parallel(llama(heads=(8, 4)).bfloat16(), mesh), policy=policy)
    runtime = make()
    observed(runtime)
    resumed = make()
    resumed.load_state_dict(gathered(runtime))
    assert torch.equal(resumed.descales, runtime.descales)
    for one in (runtime, resumed):
        observed(one, 2)
    assert torch.equal(resumed.descales, runtime.descales)


@pytest.mark.parametrize("policy", OBSERVING)
@distributed(2)
def test_another_degree_is_refused_where_heads_share_a_scale(policy):
    mesh = mesh_of(2)
    runtime = attach(tensor_parallel(llama(heads=(8, 4)).bfloat16(), mesh), policy=policy)
    observed(runtime)
    alone = attach(llama(heads=(8, 4)).bfloat16(), policy=policy)
    before = alone.state_dict()
    with pytest.raises(sigmascale.MismatchError, match="one scale for KV heads 0 to 1, 2 to 3 of layer 0.*0 to 3"):
        alone.load_state_dict(gathered(runtime))
    assert alone.state_dict()["state"] == before["state"]


@distributed(2)
def test_another_degree_goes_on_where_each_head_has_its_own():
    mesh, rank = mesh_of(2), torch.distributed.get_rank()
    policy = sigmascale.AutoC(burn_in=4, pooling="head")
    sharded = lambda: attach(tensor_parallel(llama(heads=(8, 4)).bfloat16(), mesh), policy=policy)
    whole = lambda: attach(llama(heads=(8, 4)).bfloat16(), policy=policy)
    runtime, alone = sharded(), whole()
    for one in (runtime, alone):
        observed(one)
    state = gathered(runtime)
    resumed, back = whole(), sharded()
    resumed.load_state_dict(state)
    back.load_state_dict(alone.state_dict())
    for one in (runtime, alone, resumed, back):
        observed(one, 3)
    own = slice(2 * rank, 2 * rank + 2)
    assert torch.equal(resumed.descales, alone.descales) and torch.equal(back.descales, runtime.descales)
    assert torch.equal(runtime.descales, alone.descales[..., own])
    # The burn-in is over: constants of what was observed on both sides of the resume.
    assert not torch.equal(alone.descales, expected(llama(heads=(8, 4))).descales)
    with pytest.raises(sigmascale.MismatchError, match=r"no KV heads \[(0, 1|2, 3)\] of layer 0"):
        whole().load_state_dict(runtime.state_dict())


@distributed(1)
def test_damaged_states_of_other_places_are_refused():
    runtime = stages(0, 2, "delayed-te")
    good = runtime.state_dict()
    other = [[number + 1, *rest] for number, *rest in good["places"]]
    for change in ({"state": None}, {"state": {}}, {"descales": None}, {"places": None}, {"places": other[:1]}):
        with pytest.raises(sigmascale.MismatchError):
            runtime.load_state_dict(good | {"places": other} | change)
    with pytest.raises(sigmascale.MismatchError, match="no states"):
        fp8.merge_states([])
    with pytest.raises(sigmascale.MismatchError, match="'delayed-te' and 'auto-c'"):
        fp8.merge_states([good, stages(1, 2, "auto-c").state_dict()])
    assert runtime.state_dict()["state"] == good["state"]


@distributed(2)
def test_one_pool_for_all_is_not_merged():
    rank = torch.distributed.get_rank()
    policy = sigmascale.AutoC(burn_in=4, pooling="model")
    runtime = stages(rank, 2, policy)
    observed(runtime)
    with pytest.raises(sigmascale.MismatchError, match="pooling='model'"):
        gathered(runtime)
    again = stages(rank, 2, policy)
    again.load_state_dict(runtime.state_dict())
    assert torch.equal(again.descales, runtime.descales)
    with pytest.raises(sigmascale.MismatchError, match="pools the ratios of all its layers"):
        stages(2 * rank, 4, policy).load_state_dict(runtime.state_dict())


@distributed(4)
def test_policies_without_a_memory_resume_at_any_size():
    rank, states = torch.distributed.get_rank(), []
    for ranks in (2, 1, 4):
        mesh = torch.distributed.device_mesh.DeviceMesh("cpu", list(range(ranks)))
        if rank >= ranks:
            continue
        model = shard(llama(), mesh)
        runtime = attach(model)
        for state in states:
            runtime.load_state_dict(state)
        run(model, inputs(None)).backward()
        states.append(runtime.state_dict())
        assert torch.equal(runtime.descales, expected(llama()).descales)


@pytest.mark.parametrize("policy", OBSERVING)
@distributed(4)
def test_a_state_of_two_shards_goes_on_in_one_and_in_four(policy):
    rank = torch.distributed.get_rank()

    def trained(ranks, steps, state=None):
        """Scales and state after some steps on so many ranks, all with the same tokens; None on the others."""
        mesh = torch.distributed.device_mesh.DeviceMesh("cpu", list(range(ranks)))
        if rank >= ranks:
            return None
        model = shard(llama(), mesh)
        runtime = attach(model, policy=policy)
        if state is not None:
            runtime.load_state_dict(state)
        for step in range(steps):
            run(model, inputs(None, step)).backward()
            runtime.refresh()
        run(model, inputs(None))
        return runtime.descales.clone(), runtime.state_dict()

    saved = [trained(2, 3)]
    torch.distributed.broadcast_object_list(saved)
    descales, state = saved[0]
    went_on = [trained(ranks, 2, state) for ranks in (1, 2, 4)]
    torch.distributed.broadcast_object_list(went_on)
    assert all(torch.equal(went_on[0][0], other[0]) for other in went_on[1:])
    assert all(went_on[0][1]["state"] == other[1]["state"] for other in went_on[1:])
    # What it remembers counts: without it the same steps end elsewhere.
    assert went_on[0][1]["state"] != (trained(4, 2))[1]["state"]


@distributed(2)
def test_a_distributed_checkpoint_holds_the_merged_state():
    import torch.distributed.checkpoint as dcp

    rank = torch.distributed.get_rank()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    runtime = stages(rank, 2, "delayed-te")
    observed(runtime)
    saved = gathered(runtime)
    dcp.save({"scales": saved}, checkpoint_id=folder[0])
    template = {"scales": gathered(stages(rank, 2, "delayed-te"))}
    dcp.load(template, checkpoint_id=folder[0])
    resumed = stages(0, 1, "delayed-te")
    resumed.load_state_dict(template["scales"])
    again = resumed.state_dict()
    assert again["state"] == saved["state"] and torch.equal(again["descales"], saved["descales"])


@pytest.mark.parametrize("policy", OBSERVING)
@distributed(2)
def test_maxima_are_reduced_over_ranks_that_have_the_same_heads(policy):
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    runtime, apart = (attach(llama().bfloat16(), policy=policy, group=g) for g in (group, None))
    alone = attach(llama().bfloat16(), policy=policy)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        parts = [torch.randn(1, 16, 6, 16, generator=generator) * (1 + 40 * (part == 1)) for part in range(2)]
        for one in (runtime, apart):
            for plan in one.layers:
                fp8.attention(parts[rank], parts[rank][:, :, :3], parts[rank][:, :, :3], plan)
        for plan in alone.layers:
            for part in parts:
                fp8.attention(part, part[:, :, :3], part[:, :, :3], plan)
        for one in (runtime, apart, alone):
            one.refresh()
    everywhere = [torch.empty_like(runtime.descales) for _ in range(2)]
    torch.distributed.all_gather(everywhere, runtime.descales)
    assert torch.equal(*everywhere) and torch.equal(runtime.descales, alone.descales)
    assert (runtime.words == 0).all()
    if policy != "auto-c":
        assert rank or not torch.equal(apart.descales, runtime.descales)


@distributed(2)
def test_policies_that_observe_nothing_do_not_communicate():
    model = llama().bfloat16()
    runtime = attach(model, group=torch.distributed.group.WORLD)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        runtime.refresh()
    assert not any(event.name.startswith("c10d") for event in profile.events())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        other = attach(model, policy="delayed-te", group=torch.distributed.group.WORLD)
    assert not any(event.name.startswith("c10d") for event in profile.events())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        other.refresh()
    assert sum(event.name.startswith("c10d::allreduce") for event in profile.events()) == 1


@pytest.mark.parametrize("policy", OBSERVING)
@distributed(2)
def test_a_reduction_beside_the_optimizer_step(policy):
    """It is the one of refresh(), begun earlier; what calls report after it began is not planned from."""
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    late, early = (attach(llama().bfloat16(), policy=policy, group=group) for _ in range(2))
    generator = torch.Generator().manual_seed(3 + rank)
    for _ in range(3):
        part = torch.randn(1, 16, 6, 16, generator=generator) * (1 + 40 * rank)
        for one in (late, early):
            for plan in one.layers:
                fp8.attention(part, part[:, :, :3], part[:, :, :3], plan)
        late.refresh()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            early.start_reduction()
            early.start_reduction()
            fp8.attention(3 * part, part[:, :, :3], part[:, :, :3], early.layers[0])
            early.refresh()
        assert sum(event.name.startswith("c10d::allreduce") for event in profile.events()) == 1
        assert torch.equal(late.descales, early.descales) and late.state_dict()["state"] == early.state_dict()["state"]
    other = attach(llama().bfloat16(), group=group)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        other.start_reduction()
    assert not any(event.name.startswith("c10d") for event in profile.events())


@pytest.mark.parametrize("policy", OBSERVING)
@distributed(2)
def test_a_restore_drops_a_reduction_that_is_under_way(policy):
    """It is of the step that failed: the next plan is that of a run without it."""
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    late, early = (attach(llama().bfloat16(), policy=policy, group=group) for _ in range(2))
    part = torch.randn(1, 16, 6, 16, generator=torch.Generator().manual_seed(3 + rank))
    for one in (late, early):
        guard = fp8.Guard(one, torch.optim.SGD(one.model.parameters(), lr=0.1), group=group)
        fp8.attention(part, part[:, :, :3], part[:, :, :3], one.layers[0])
        assert guard.step(1.0, 1.0)  # takes a restore point
        one.refresh()
        fp8.attention(100 * part, 100 * part[:, :, :3], part[:, :, :3], one.layers[0])
        if one is early:
            one.start_reduction()
        guard.restore()
        one.refresh()
    assert torch.equal(late.descales, early.descales) and late.state_dict()["state"] == early.state_dict()["state"]
