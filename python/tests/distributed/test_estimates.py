"""Power iteration where ranks share the heads of a layer."""

import functools

import pytest
from models import attach, expected, inputs, llama, mesh_of, run, shard, torch
from ranks import distributed
from test_fsdp import tensor_parallel

make = functools.partial(llama, heads=(8, 4))


def agree(runtime, whole, rank):
    """Estimates and scales are those of one process with all heads."""
    own = slice(4 * rank, 4 * rank + 4)
    ours, theirs = (torch.from_numpy(each.estimates()["sigma"]) for each in (runtime, whole))
    torch.testing.assert_close(ours, theirs[:, own], rtol=2e-5, atol=0)
    torch.testing.assert_close(runtime.logit_descales, whole.logit_descales[:, own], rtol=2e-5, atol=0)
    assert runtime.estimates()["steps"].tolist() == whole.estimates()["steps"].tolist()


@pytest.mark.parametrize("estimator", ["power", "power-summed"])
@distributed(2)
def test_heads_shared_by_tensor_parallelism_have_the_estimates_of_the_whole(estimator):
    rank, options = torch.distributed.get_rank(), {"policy": "geometry-c-star", "estimator": estimator}
    model = tensor_parallel(make().bfloat16(), mesh_of(2))
    runtime, whole = attach(model, **options), expected(make(), **options)
    agree(runtime, whole, rank)
    for _ in range(20):
        runtime.refresh()
        whole.refresh()
    agree(runtime, whole, rank)
    resumed = attach(model, **options)
    resumed.load_state_dict(runtime.state_dict())
    for each in (runtime, resumed):
        each.refresh()
    assert torch.equal(resumed.logit_descales, runtime.logit_descales)


@distributed(4)
def test_a_sum_over_ranks_in_the_forward_of_sharded_layers():
    mesh, options = mesh_of(2, 2, names=("dp", "tp")), {"policy": "geometry-c-star", "estimator": "power-summed"}
    model = shard(tensor_parallel(make(), mesh["tp"]), mesh["dp"])
    runtime, whole = attach(model, **options), expected(make(), **options)
    run(model, inputs(model))
    agree(runtime, whole, mesh.get_local_rank("tp"))
    for each in (runtime, whole):
        each.refresh()
    run(model, inputs(model))
    agree(runtime, whole, mesh.get_local_rank("tp"))
