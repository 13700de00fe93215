"""The paper's runtime on a Hopper GPU: power iteration in device memory, and logits in E4M3 in the kernel."""

import dataclasses

import gpu  # noqa: F401
import torch
from test_torch_estimates import HEADS, KV, POWER, R, Small, attach, exact

import sigmascale.torch as fp8


def on_gpu(model):
    return model.to("cuda")


def test_vectors_and_estimates_are_those_of_the_cpu():
    for estimator in POWER:
        for policy in ("geometry", "geometry-c-star"):
            for rotary in (0, R):
                here, there = Small(rotary=rotary), on_gpu(Small(rotary=rotary))
                cpu, cuda = (attach(model, policy, estimator=estimator, bound="worst-case") for model in (here, there))
                for step in range(6):
                    for which in range(4):
                        # Last of what the kernel rounds up.
                        assert torch.allclose(cpu.logits[..., which], cuda.logits[..., which].cpu(), rtol=2e-3), (step, which)
                    assert torch.allclose(cpu.logit_descales, cuda.logit_descales.cpu(), rtol=2e-3)
                    for runtime in (cpu, cuda):
                        runtime.refresh()


def test_a_captured_refresh_iterates_in_every_replay():
    for estimator in POWER:
        model = on_gpu(Small())
        eager, graphed = (attach(model, "geometry-c-star", estimator=estimator) for _ in range(2))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graphed.refresh()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            graphed.refresh()
        eager.refresh()
        for step in range(4):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            graph.replay()
            eager.refresh()
            torch.cuda.synchronize()
            assert torch.equal(eager.logit_descales, graphed.logit_descales), step
            assert torch.equal(eager._estimates.vectors, graphed._estimates.vectors), step
        rows = range(2)
        assert all(
            float(eager.estimates()["sigma"][layer, 0]) <= exact(model.to("cpu"), layer, 0, estimator == "power-summed") * 1.001
            for layer in rows
        )


def test_a_resumed_run_has_the_same_bits():
    for estimator in POWER:
        for policy in ("geometry", "geometry-c-star", "auto-c"):
            model = on_gpu(Small())
            runtime = attach(model, policy, estimator=estimator, logits="e4m3")
            for number in range(3):
                step(model, runtime, number)
            saved, weights = runtime.state_dict(), {name: x.clone() for name, x in model.state_dict().items()}
            through = [step(model, runtime, number) for number in range(3, 6)]
            model.load_state_dict(weights)
            resumed = attach(model, policy, estimator=estimator, logits="e4m3")
            resumed.load_state_dict(saved)
            for number, (out, logits) in zip(range(3, 6), through):
                again, own = step(model, resumed, number)
                assert torch.equal(again, out) and torch.equal(own, logits), (estimator, policy, number)


def step(model, runtime, number):
    made = torch.Generator(device="cuda").manual_seed(number)
    q, k, v = (
        torch.randn(2, 40, n, R, generator=made, device="cuda", dtype=torch.bfloat16) for n in (HEADS, KV, KV)
    )
    with torch.no_grad():
        out = fp8.attention(q, k, v, runtime.layers[0])
        for parameter in model.parameters():
            parameter.mul_(1.01)
    runtime.refresh()
    return out, runtime.logit_descales.clone()


def test_logits_in_e4m3_are_those_of_the_cpu():
    """In the kernel without gradients, in the emulation with them."""
    made = torch.Generator().manual_seed(0)
    for d, heads, kv in ((16, 4, 2), (64, 8, 8), (128, 8, 2)):
        draw = lambda n: torch.randn(2, 200, n, d, generator=made)
        q, k, v = draw(heads), draw(kv), draw(kv)
        row, unit = torch.full((kv,), 0.01), torch.logspace(-3, -1, heads)
        descales = (row, row, row, unit)
        reference = fp8.attention(q, k, v, descales, logits="e4m3").float()
        there = [x.cuda() for x in (q, k, v)]
        moved = tuple(x.cuda() for x in descales)
        error = lambda a: float((a.float().cpu() - reference).detach().norm() / reference.norm())
        assert error(fp8.attention(*there, moved, logits="e4m3")) < 0.02, d
        assert error(fp8.attention(*there, moved[:3])) > 0.03, d
        with_gradients = [x.requires_grad_(True) for x in there]
        out = fp8.attention(*with_gradients, moved, logits="e4m3")
        assert error(out) < 0.02, d
        grads = torch.autograd.grad(out.float().square().sum(), with_gradients)
        plain = [x.clone().requires_grad_(True) for x in (q, k, v)]
        expected = torch.autograd.grad(
            fp8.attention(*plain, descales, logits="e4m3").float().square().sum(), plain
        )
        for a, b in zip(grads, expected):
            assert float((a.cpu() - b).norm() / b.norm()) < 0.05, d


def test_overflow_of_logits_is_counted_by_the_kernel_as_on_the_cpu():
    made = torch.Generator().manual_seed(1)
    here, there = Small(), on_gpu(Small())
    q, k, v = (torch.randn(1, 60, n, R, generator=made).bfloat16() for n in (HEADS, KV, KV))
    found = []
    for model in (here, there):
        runtime = attach(model, "geometry-c-star", logits="e4m3")
        runtime.descales.fill_(0.02)
        runtime.logit_descales.fill_(0.002)
        with torch.no_grad():
            fp8.attention(*(x.to(runtime.device) for x in (q, k, v)), runtime.layers[0])
        found.append(runtime.stats())
    cpu, cuda = found
    assert cpu["logit_overflow"][0].sum() > 100
    assert abs(cpu["logit_overflow"][0] - cuda["logit_overflow"][0]).max() <= 0.02 * cpu["logit_overflow"][0].max()
    assert abs(cpu["logit_max"][0] - cuda["logit_max"][0]).max() < 0.01


def test_the_factor_on_rotated_channels_is_that_of_the_cpu():
    for estimator in ("gram", *POWER):
        runtimes = []
        for place in ("cpu", "cuda"):
            model = Small(rotary=R).to(place)
            layers = [dataclasses.replace(layer, rope_factor=1.25) for layer in model.layers()]
            runtimes.append(fp8.attach(model, "geometry-c-star", "worst-case", layers=layers, estimator=estimator))
        cpu, cuda = runtimes
        assert torch.allclose(cpu.logits, cuda.logits.cpu(), rtol=5e-3)
        assert torch.allclose(cpu.descales, cuda.descales.cpu(), rtol=1e-3)


def test_a_sum_that_ranks_make_together_is_the_kernels(tmp_path):
    """A group of one rank: its sum is the whole, iterated in PyTorch's operations, and the kernel only takes the estimates."""
    model = on_gpu(Small())
    kernel, together = (attach(model, "geometry-c-star", bound="worst-case", estimator="power-summed") for _ in range(2))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        together._estimates._groups = [torch.distributed.group.WORLD] * 2
        for _ in range(5):
            kernel.refresh()
            together.refresh()
            assert torch.allclose(kernel.logits, together.logits, rtol=1e-3)
            assert torch.allclose(kernel.logit_descales, together.logit_descales, rtol=1e-3)
    finally:
        torch.distributed.destroy_process_group()
