"""Two GPUs in one process: a plan belongs to its device, whichever one is current."""

import gc
import threading

import pytest
from gpu import delayed, random_model, relative, torch

import sigmascale
import sigmascale.torch as fp8
from sigmascale import _native

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)


def twins(kind="llama"):
    return random_model(kind).to("cuda:0"), random_model(kind).to("cuda:1")


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("policy", ["geometry", "auto-c", "delayed-te", "current"])
def test_either_device_gives_the_same_bits_and_the_current_one_stays(policy, current):
    bound = "worst-case" if policy == "geometry" else None
    with torch.cuda.device(current):
        kept = []
        for model in twins():
            runtime = fp8.attach(model, policy=policy, bound=bound)
            assert torch.cuda.current_device() == current and runtime.descales.device == model.device
            model.set_attn_implementation(fp8.register())
            tokens = torch.arange(96, device=model.device).reshape(1, 96)
            logits = model(tokens).logits
            runtime.refresh()
            assert torch.cuda.current_device() == current and torch.empty(0, device="cuda").device.index == current
            state = runtime.state_dict()
            runtime.load_state_dict(state)
            assert torch.cuda.current_device() == current
            kept.append((logits.cpu(), runtime.descales.cpu(), state))
            del runtime, model
            gc.collect()
            assert torch.cuda.current_device() == current
        (logits, descales, state), (other_logits, other_descales, other_state) = kept
        assert torch.equal(logits, other_logits) and torch.equal(descales, other_descales)
        assert state["state"] == other_state["state"]


def test_a_model_over_two_devices_has_a_runtime_on_each():
    whole = random_model("llama")
    tokens = torch.arange(96, device="cuda:0").reshape(1, 96)
    reference = fp8.attach(whole)
    whole.set_attn_implementation(fp8.register())
    expected = whole(tokens).logits
    split = random_model("llama")
    split.model.layers[1:].to("cuda:1")
    split.model.norm.to("cuda:1")
    split.lm_head = torch.nn.Linear(256, 128, bias=False, device="cuda:1", dtype=torch.bfloat16)
    with torch.no_grad():
        split.lm_head.weight.copy_(whole.lm_head.weight)

    def move(module, arguments, named):
        there = next(module.parameters()).device
        to = lambda x: x.to(there) if isinstance(x, torch.Tensor) else tuple(map(to, x)) if isinstance(x, tuple) else x
        return tuple(map(to, arguments)), {name: to(x) for name, x in named.items()}

    for layer in split.model.layers[1:]:
        layer.register_forward_pre_hook(move, with_kwargs=True)
    with pytest.raises(sigmascale.ArgumentError, match="one runtime for each device"):
        fp8.attach(split)
    layers = fp8.find_layers(split)
    runtimes = [
        fp8.attach(split, layers=[layer for layer in layers if layer.q.device.index == device]) for device in (0, 1)
    ]
    split.set_attn_implementation(fp8.register())
    logits = split(tokens).logits
    assert torch.cuda.current_device() == 0 and relative(logits.cpu(), expected.cpu()) < 1e-2
    planned = torch.cat([runtime.descales.cpu() for runtime in runtimes])
    assert torch.equal(planned, reference.descales.cpu())
    assert all((runtime.stats()["overflow"] == 0).all() for runtime in runtimes)


def test_two_threads_refresh_and_capture_on_their_devices():
    models = twins()
    runtimes = [fp8.attach(model, bound="worst-case") for model in models]
    expected, failures = runtimes[0].descales.cpu(), []

    def work(runtime):
        try:
            with torch.cuda.device(runtime.device):
                # Without a stream of its own a capture takes PyTorch's default one, which all threads and devices share.
                stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
                with torch.cuda.stream(stream):
                    runtime.refresh()
                stream.synchronize()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    runtime.refresh()
                runtime.descales.zero_()
                for _ in range(50):
                    graph.replay()
                torch.cuda.synchronize()
                assert torch.equal(runtime.descales.cpu(), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(runtime,)) for runtime in runtimes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_setting_up_on_one_device_leaves_a_capture_on_the_other_whole():
    """Captured in PyTorch's default mode, which a plain allocation, copy or module load of any thread would break."""
    model, other = twins()
    runtime = fp8.attach(model, bound="worst-case")
    expected, made = runtime.descales.cpu(), []

    def work():
        made.append(_native.Attention(other.device.index))
        made.append(delayed(other.device.index))
        made.clear()

    with torch.cuda.device(model.device):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            runtime.refresh()
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            runtime.refresh()
        runtime.descales.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(runtime.descales.cpu(), expected)
