"""What a runtime keeps, follows and refuses on a Hopper GPU."""

import gc
import json
import threading

import numpy as np
import pytest
from gpu import delayed, random_model, tensors, torch

import sigmascale
import sigmascale.torch as fp8


def test_refresh_follows_the_weights_at_the_same_addresses(llama):
    runtime = fp8.attach(llama)
    before, address = runtime.descales.clone(), runtime.descales.data_ptr()
    held = runtime.layers[1].descales(3)
    with torch.no_grad():
        for layer in llama.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.weight.mul_(4)
    runtime.refresh()
    assert torch.allclose(runtime.descales, 4 * before, rtol=1e-5)
    assert runtime.descales.data_ptr() == address
    assert all(torch.equal(held[i][2], runtime.layers[1].descales(3)[i][0]) for i in range(3))


@pytest.mark.parametrize("policy", fp8.POLICIES)
def test_refresh_is_captured_and_replayed_without_the_host(policy, llama):
    bound = "worst-case" if policy == "geometry" else None
    runtime = fp8.attach(llama, policy=policy, bound=bound)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        runtime.refresh()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A synchronisation or an allocation by the driver ends a capture in an error.
    with torch.cuda.graph(graph, stream=stream):
        runtime.refresh()
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    replayed = runtime.descales.clone()
    if policy.startswith("geometry"):
        eager = fp8.attach(llama, policy=policy, bound=bound)
        assert torch.equal(replayed, eager.descales)
    assert torch.isfinite(replayed).all()


@pytest.mark.parametrize("policy", fp8.POLICIES)
def test_a_captured_refresh_outlives_weights_that_move(policy, llama):
    """It goes on with the weights that it was captured with, whose memory stays, and policies with their one memory."""
    q, k, v = tensors(heads=(4, 2), d=64, length=64)
    runtime = fp8.attach(llama, policy=policy, bound="worst-case")
    with torch.cuda.stream(torch.cuda.Stream()):
        runtime.refresh()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        runtime.refresh()
    graph.replay()
    torch.cuda.synchronize()
    before = runtime.logits[..., 2].clone()
    with torch.no_grad():
        llama.load_state_dict({name: 2 * value for name, value in llama.state_dict().items()}, assign=True)
    with pytest.warns(RuntimeWarning, match="capture again"):
        runtime.refresh()
    moved = runtime.logits[..., 2].clone()
    assert (moved > 3 * before).all()
    # What the old engine and weights lay in would be given away here.
    gc.collect()
    torch.cuda.empty_cache()
    rubbish = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(32)]
    fp8.attention(q, k, v, runtime.layers[0])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(runtime.logits[..., 2], before, rtol=0.02)
    if policy.startswith("delayed"):
        # The replay observed the call, into the state that is saved.
        assert (runtime.descales[0] != runtime.descales[1]).any()
        history = json.dumps(runtime.state_dict()["state"])
        resumed = fp8.attach(llama, policy=policy)
        resumed.load_state_dict(runtime.state_dict())
        assert json.dumps(resumed.state_dict()["state"]) == history
        assert torch.equal(resumed.descales, runtime.descales)
    runtime.refresh()
    assert torch.allclose(runtime.logits[..., 2], moved, rtol=0.02) and len(rubbish) == 32


def test_setting_up_inside_a_capture_is_no_part_of_it(llama):
    """Kernels that are loaded, and memory that is allocated and copied to, while this thread captures."""
    from sigmascale.torch import _backends, _terms

    q, k, v = tensors()
    row = tuple(torch.full((2, 2), 0.02, device="cuda") for _ in range(3))
    expected, *_ = _backends.backend("native").forward(q, k, v, row, _terms.Terms(True, 128**-0.5))
    runtime, fresh, graph = fp8.attach(llama), _backends.Native(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        out, *_ = fresh.forward(q, k, v, row, _terms.Terms(True, 128**-0.5))
        made = delayed(0)
        runtime.refresh()
        del made
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


def test_a_captured_call_clears_no_more_than_its_counter():
    """Its workspace, of many megabytes, is written by the call itself."""
    from sigmascale.torch import _backends, _terms

    q, k, v = tensors(batch=4, length=4096, heads=(16, 4))
    row = tuple(torch.full((4, 4), 0.02, device="cuda") for _ in range(3))
    native = _backends.backend("native")
    expected, *_ = native.forward(q, k, v, row, _terms.Terms(True, 128**-0.5))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        out, *_ = native.forward(q, k, v, row, _terms.Terms(True, 128**-0.5))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    if not names:
        pytest.skip("the profiler sees no kernels here")
    assert any("attention" in name for name in names), names
    assert not any("memset" in name.lower() or "fill" in name.lower() for name in names), names


def test_statistics_are_those_since_the_last_refresh(llama):
    q, k, v = tensors(heads=(4, 2), d=64, length=64)
    runtime = fp8.attach(llama)
    fp8.attention(8 * q, k, v, runtime.layers[0])
    runtime.refresh()
    assert (runtime.stats()["amax"] == 0).all() and np.isnan(runtime.stats()["logit_max"]).all()
    fp8.attention(q, k, v, runtime.layers[0])
    stats = runtime.stats()
    assert stats["amax"][0, 0].max() == float(q.abs().max()) and (stats["amax"][1:] == 0).all()
    logits = (q.float().transpose(1, 2) @ k.float().repeat_interleave(2, dim=2).permute(0, 2, 3, 1)) / 8
    seen = logits.masked_fill(torch.ones(64, 64, device="cuda").triu(1).bool(), float("nan"))
    largest, least = np.nanmax(seen.cpu().numpy(), axis=(0, 2, 3)), np.nanmin(seen.cpu().numpy(), axis=(0, 2, 3))
    # The kernel's logits come from E4M3 operands.
    assert np.allclose(stats["logit_max"][0], largest, rtol=0.15) and np.allclose(
        stats["logit_min"][0], least, rtol=0.15
    )


def test_moved_weights_are_found_again(llama):
    runtime = fp8.attach(llama)
    address, before = runtime.descales.data_ptr(), runtime.descales.clone()
    with torch.no_grad():
        llama.model.layers[0].self_attn.k_proj.weight.data = 2 * llama.model.layers[0].self_attn.k_proj.weight.data
        llama.load_state_dict({name: value.clone() for name, value in llama.state_dict().items()}, assign=True)
    runtime.refresh()
    assert (
        torch.allclose(runtime.descales[0, 1], 2 * before[0, 1], rtol=1e-5) and runtime.descales.data_ptr() == address
    )


def test_a_transposed_weight_at_the_same_address_is_seen(llama):
    with torch.no_grad():
        llama.model.layers[0].self_attn.q_proj.weight[:64].mul_(5)
    runtime = fp8.attach(llama)
    weight = llama.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()
    runtime.refresh()
    assert torch.equal(runtime.descales, fp8.attach(llama).descales)


def test_a_projection_that_was_wrapped_is_seen(llama):
    runtime = fp8.attach(llama)

    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer, self.lora_A = base, torch.nn.Linear(256, 4, device="cuda")

        def forward(self, x):
            return self.base_layer(x)

    attention = llama.model.layers[1].self_attn
    attention.v_proj = Adapter(attention.v_proj)
    with pytest.raises(sigmascale.UnsupportedError, match="merge them first"):
        runtime.refresh()
    attention.v_proj = attention.v_proj.base_layer
    runtime.refresh()


def test_other_heads_or_types_than_at_attach(llama):
    runtime = fp8.attach(llama)
    before = runtime.descales.clone()
    llama.float()
    runtime.refresh()
    # Weights of 32 bits may be run in BF16: a rounding more is counted.
    grown = runtime.descales / before
    assert (grown >= 1 - 1e-6).all() and (grown < 1.01).all() and (grown > 1 + 1e-6).any()
    llama.double()
    with pytest.raises(sigmascale.UnsupportedError, match="float64.*cast the model"):
        runtime.refresh()
    llama.bfloat16()
    runtime.refresh()
    assert torch.allclose(runtime.descales, before, rtol=1e-6)
    llama.config.num_hidden_layers = 2
    llama.model.layers[0].self_attn.q_proj.weight.data = llama.model.layers[0].self_attn.q_proj.weight.data.clone()
    with pytest.raises(sigmascale.SigmascaleError, match="other layers or heads"):
        runtime.refresh()


def test_the_default_dtype_and_inference_mode_change_nothing(llama):
    q, k, v = tensors(heads=(4, 2), d=64, length=128)
    runtime = fp8.attach(llama, bound="worst-case")
    expected = runtime.descales.clone(), fp8.attention(q, k, v, runtime.layers[0], return_lse=True)
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            for policy in fp8.POLICIES:
                again = fp8.attach(llama, policy=policy, bound="worst-case")
                again.refresh()
                assert again.descales.dtype == again.logits.dtype == again.logit_descales.dtype == torch.float32
                for name in ("native", "emulated", "fa3", "cudnn"):
                    try:
                        out, lse = fp8.attention(q, k, v, again.layers[0], return_lse=True, backend=name)
                    except sigmascale.UnsupportedError:
                        continue
                    assert lse.dtype == torch.float32 and torch.isfinite(lse).all() and torch.isfinite(out).all()
            again = fp8.attach(llama, bound="worst-case")
            out, lse = fp8.attention(q, k, v, again.layers[0], return_lse=True)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(again.descales, expected[0])
        assert torch.equal(out, expected[1][0]) and torch.equal(lse, expected[1][1])
    with torch.inference_mode():
        inside = fp8.attach(llama, policy="delayed-te")
        fp8.attention(q, k, v, inside.layers[0])
    inside.refresh()
    fp8.attention(q.requires_grad_(True), k, v, inside.layers[0]).sum().backward()
    with torch.inference_mode():
        inside.refresh()
    assert (inside.descales[0] != 1).any()


def test_damaged_states_are_refused_and_change_nothing(llama):
    runtime = fp8.attach(llama, policy="delayed-te")
    good = runtime.state_dict()
    with pytest.raises(TypeError, match="what state_dict.. returned"):
        runtime.load_state_dict(None)
    for key in good:
        with pytest.raises(sigmascale.MismatchError, match=key):
            runtime.load_state_dict({name: value for name, value in good.items() if name != key})
    damage = [
        {"version": 99},
        {"shape": [1, 2, 3]},
        {"descales": None},
        {"descales": good["descales"][:1]},
        {"descales": good["descales"].half()},
        {"descales": good["descales"] * float("nan")},
        {"descales": -good["descales"]},
        {"state": None},
        {"state": {}},
        {"state": good["state"] | {"version": 77}},
        {"state": {name: value for name, value in good["state"].items() if name != "memory"}},
    ]
    for change in damage:
        with pytest.raises(sigmascale.MismatchError):
            runtime.load_state_dict(good | change)
    again = runtime.state_dict()
    assert torch.equal(again["descales"], good["descales"]) and again["state"] == good["state"]


def test_plans_from_weights_stay_those_of_the_present_weights(llama):
    runtime = fp8.attach(llama)
    state = runtime.state_dict()
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.mul_(2)
    resumed = fp8.attach(llama)
    before = resumed.descales.clone()
    resumed.load_state_dict(state)
    assert torch.equal(resumed.descales, before)


def test_runtimes_are_neither_copied_nor_pickled(llama):
    import copy
    import pickle

    runtime = fp8.attach(llama)
    for one in (runtime, runtime.layers[0]):
        for work in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="state_dict"):
                work(one)
    # A copied model is another one.
    model = copy.deepcopy(llama)
    model.set_attn_implementation(fp8.register())
    with pytest.raises(ValueError, match="has no plan"):
        model(torch.zeros(1, 8, dtype=torch.long, device="cuda"))


def test_a_second_runtime_that_is_gone_leaves_the_first(llama):
    runtime = fp8.attach(llama)
    second = fp8.attach(llama, policy="current")
    llama.set_attn_implementation(fp8.register())
    tokens = torch.randint(0, 128, (2, 64), device="cuda")
    llama(tokens)
    assert (runtime.stats()["amax"] == 0).all() and (second.stats()["amax"] > 0).all()
    del second
    gc.collect()
    llama(tokens)
    assert (runtime.stats()["amax"] > 0).all()


@pytest.mark.parametrize("policy", fp8.POLICIES)
def test_a_saved_state_goes_on_with_the_same_bits(policy, llama):
    q, k, v = tensors(heads=(4, 2), d=64, length=64)
    runtime = fp8.attach(llama, policy=policy)
    for step in range(5):
        for plan in runtime.layers:
            fp8.attention((1 + step) * q, k, v, plan)
        runtime.refresh()
    state = json.loads(json.dumps(runtime.state_dict(), default=lambda x: x.tolist()))
    if state["descales"] is not None:
        state["descales"] = torch.tensor(state["descales"])
    resumed = fp8.attach(llama, policy=policy)
    resumed.load_state_dict(state)
    for one in (runtime, resumed):
        for plan in one.layers:
            fp8.attention(9 * q, k, v, plan)
        one.refresh()
    assert torch.equal(runtime.descales, resumed.descales)
    if policy == "delayed-te":
        assert not torch.equal(runtime.descales, fp8.attach(llama, policy=policy).descales)
    other = "delayed-te" if policy != "delayed-te" else "geometry"
    with pytest.raises(sigmascale.MismatchError, match="policy"):
        fp8.attach(llama, policy=other).load_state_dict(state)


def test_a_second_thread_is_told_to_wait(llama):
    runtime = fp8.attach(llama)
    raised = []

    def work():
        try:
            runtime.refresh()
        except sigmascale.SigmascaleError as error:
            raised.append(str(error))

    with runtime._lock:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "one thread at a time" in raised[0]
    # One after the other is fine.
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(raised) == 1


def test_a_deleted_model_is_let_go_and_refused(llama):
    runtime = fp8.attach(random_model("llama"))
    gc.collect()
    with pytest.raises(sigmascale.SigmascaleError, match="model was deleted"):
        runtime.refresh()
    assert runtime._tensors is None


def test_weights_that_cannot_be_read_say_what_to_do(llama):
    llama.model.layers[1].self_attn.k_proj.to(torch.float32)
    with pytest.raises(ValueError, match="cast q, k and v of a layer to one type"):
        fp8.attach(llama)
    llama.to(torch.bfloat16)
    llama.model.layers[2].self_attn.v_proj.cpu()
    with pytest.raises(ValueError, match="one runtime for each device"):
        fp8.attach(llama)
    llama.cuda()
    runtime = fp8.attach(llama)
    llama.cpu()
    with pytest.raises(ValueError, match="has left cuda:0"):
        runtime.refresh()


def test_weights_that_are_not_finite_are_found(llama):
    runtime = fp8.attach(llama)
    with torch.no_grad():
        llama.model.layers[1].self_attn.q_proj.weight[3, 4] = float("nan")
    runtime.refresh()
    with pytest.raises(sigmascale.NonFiniteError, match="layers \\[1\\]"):
        runtime.check()
