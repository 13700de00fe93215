"""Mistakes that would go unnoticed, on a Hopper GPU: nothing waits for it, and graphs and fused optimizers are followed."""

import contextlib
import warnings

import pytest
from gpu import random_model, torch

import sigmascale
import sigmascale.torch as fp8

STALE = "the weights of layer 0, layer 1, layer 2 have changed since their FP8 scales were computed"
ADAMW = torch.optim.AdamW
OPTIMIZERS = {
    "fused": lambda p: ADAMW(p, lr=0.05, fused=True),
    "foreach": lambda p: ADAMW(p, lr=0.05, foreach=True),
    "one by one": lambda p: ADAMW(p, lr=0.05, foreach=False),
    "capturable": lambda p: ADAMW(p, lr=0.05, capturable=True),
}


@contextlib.contextmanager
def without_waiting():
    """A synchronization in this block is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tokens(step=0, length=128):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 128, (2, length), generator=generator).cuda()


def loss_of(model, step=0):
    return model(tokens(step)).logits.float().square().mean()


@pytest.fixture
def trained():
    model = random_model("llama")
    model.set_attn_implementation(fp8.register())
    return model.train()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_followed_without_waiting(kind, trained):
    optimizer = OPTIMIZERS[kind](trained.parameters())
    runtime = fp8.attach(trained, optimizer=optimizer, strict=True)
    for step in range(12):
        loss_of(trained, step).backward()
        before = runtime.descales.clone()
        with without_waiting():
            # What the first layer's call does in the forward, whose masks transformers reads.
            runtime._look_at_weights()
            optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(runtime.descales, before)
    runtime.check()
    assert torch.equal(runtime.descales, fp8.attach(trained).descales)


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "data"])
def test_a_forgotten_refresh_is_said_by_a_later_forward(kind, trained):
    runtime = fp8.attach(trained)
    optimizer = OPTIMIZERS.get(kind, OPTIMIZERS["fused"])(trained.parameters())
    loss_of(trained).backward()
    if kind == "data":
        for parameter in trained.parameters():
            parameter.data.mul_(8)
    else:
        optimizer.step()
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            with torch.no_grad():
                trained(tokens(step))
            torch.cuda.synchronize()
            found.append(sum(STALE in str(each.message) for each in caught))
    # The first compares, the second reads what that found.
    assert found == [0, 1, 1, 1], [str(each.message) for each in caught]
    with pytest.raises(sigmascale.SigmascaleError, match=STALE):
        runtime.check()
    runtime.refresh()
    runtime.check()


def test_a_captured_step_follows_its_optimizer(trained):
    optimizer = ADAMW(trained.parameters(), lr=0.05, capturable=True)
    runtime = fp8.attach(trained, optimizer=optimizer, strict=True)
    given = tokens()

    def step():
        trained(given).logits.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for number in range(4):
        before = runtime.descales.clone()
        graph.replay()
        torch.cuda.synchronize()
        assert not torch.equal(runtime.descales, before)
    assert torch.equal(runtime.descales, fp8.attach(trained).descales)


def test_a_captured_forward_tells_of_other_weights_outside_of_it(trained):
    runtime = fp8.attach(trained)
    trained.eval()
    given, stream = tokens(), torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            trained(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        trained(given)
    graph.replay()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            trained(given)
            torch.cuda.synchronize()
            trained(given)
            torch.cuda.synchronize()
    for parameter in trained.parameters():
        parameter.data.mul_(8)
    graph.replay()
    # The weights are put back: only what the replay found is left to be told.
    for parameter in trained.parameters():
        parameter.data.div_(8)
    with pytest.warns(RuntimeWarning, match="have changed since their FP8 scales"), torch.no_grad():
        for _ in range(3):
            trained(given)
            torch.cuda.synchronize()
    runtime.check()


def test_compiled_models_are_followed(trained):
    optimizer = OPTIMIZERS["fused"](trained.parameters())
    runtime = fp8.attach(trained, optimizer=optimizer, strict=True)
    torch._dynamo.reset()
    compiled = torch.compile(trained, fullgraph=True)
    for step in range(4):
        compiled(tokens(step)).logits.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    runtime.check()
    assert torch.equal(runtime.descales, fp8.attach(trained).descales)


def test_graphs_of_compiled_code_are_followed(trained):
    """`mode="reduce-overhead"`: the compiler captures graphs of the forward and of the backward by itself."""
    optimizer = OPTIMIZERS["fused"](trained.parameters())
    runtime = fp8.attach(trained, optimizer=optimizer, strict=True)
    torch._dynamo.reset()
    compiled = torch.compile(trained, mode="reduce-overhead")
    for step in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(tokens(step)).logits.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    runtime.check()
    assert torch.equal(runtime.descales, fp8.attach(trained).descales)


def test_a_model_that_has_moved_is_named(trained):
    runtime = fp8.attach(trained, strict=True)
    trained.cpu()
    with pytest.raises(sigmascale.ArgumentError, match="q is on cpu and the plan of layer 0 on cuda:0: attach to the model again"):
        trained(tokens().cpu())
    with pytest.raises(sigmascale.ArgumentError, match="the model has left cuda:0: attach again on its new device"):
        runtime.refresh()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_give_the_same_bits(reentrant, trained):
    runtime = fp8.attach(trained, strict=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        loss = loss_of(trained)
        loss.backward()
        expected = [p.grad.clone() for p in trained.parameters()]
        trained.zero_grad()
        trained.gradient_checkpointing_enable({"use_reentrant": reentrant})
        trained.enable_input_require_grads()
        again = loss_of(trained)
        again.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(loss, again)
    attention = [name for name, _ in trained.named_parameters() if "self_attn" in name]
    named = dict(trained.named_parameters())
    before = dict(zip(named, expected))
    assert attention and all(torch.equal(before[name], named[name].grad) for name in attention)
    runtime.check()


def test_autocast_to_half(trained):
    trained.float()
    runtime = fp8.attach(trained, strict=True)
    with torch.autocast("cuda", torch.float16):
        loss = loss_of(trained)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in trained.parameters())
    assert runtime.stats()["non_finite"].sum() == 0
