"""Attention calls on a Hopper GPU, against the real libraries."""

import pytest
from gpu import libraries, random_model, raw, relative, sdpa, tensors, torch

import sigmascale
import sigmascale.torch as fp8


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", libraries())
def test_errors_are_those_of_exact_amax_scales(name, d, causal):
    q, k, v = tensors(d=d)
    reference = sdpa(q.double(), k.double(), v.double(), causal)
    amax = [x.abs().amax(dim=(0, 1, 3)).float() for x in (q.unflatten(2, (2, 4)).flatten(2, 3), k, v)]
    amax[0] = q.abs().amax(dim=(0, 1, 3)).view(2, 4).amax(dim=1).float()
    exact = [a * (1 + 2**-22) / 448 for a in amax]
    # As loose as certain bounds of trained models are.
    ours = [1.3 * exact[0], 2.7 * exact[1], 3.2 * exact[2]]
    error = [relative(fp8.attention(q, k, v, row, causal=causal, backend=name), reference) for row in (exact, ours)]
    assert error[0] < 0.08 and error[1] < 1.05 * error[0], error


@pytest.mark.parametrize("name", libraries())
def test_a_call_runs_on_the_current_stream(name):
    """Operands that another kernel of the stream is still about to write."""
    plan, late = [torch.full((2,), 0.02, device="cuda")] * 3, tensors(d=64)
    want = fp8.attention(*late, plan, backend=name)
    early = [torch.full_like(x, float("nan")) for x in late]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        for x, y in zip(early, late):
            x.copy_(y)
        out = fp8.attention(*early, plan, backend=name)
    torch.cuda.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("name", libraries())
def test_large_weights_overflow_stale_scales_and_not_ours(name):
    """Weights of q and v times 512: scale 1 and a plan from before overflow, the plan of the new weights does not. Those of k
    are divided by it, so that the softmax stays what it was and errors are those of the casts."""
    model = random_model("llama")
    geometry = fp8.attach(model)
    stale = geometry.descales.clone()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(512)
            layer.self_attn.k_proj.weight.div_(512)
            layer.self_attn.v_proj.weight.mul_(512)
    geometry.refresh()
    x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16)
    layer = model.model.layers[0]
    h = layer.input_layernorm(x)
    heads = lambda y: y.unflatten(2, (-1, 64))
    q, k, v = (heads(p(h)) for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj))
    reference = sdpa(q.double(), k.double(), v.double())
    out = fp8.attention(q, k, v, geometry.layers[0], backend=name)
    seen = geometry.stats()
    assert (seen["overflow"] == 0).all() and (seen["peak"][0] <= 448).all() and (seen["peak"][0] > 10).all()
    ones = fp8.attention(q, k, v, [torch.ones(2, device="cuda")] * 3, backend=name)
    old = fp8.attention(q, k, v, list(stale[0, :3]), backend=name)
    errors = [relative(y, reference) for y in (out, ones, old)]
    assert errors[0] < 0.1 and errors[1] > 2 * errors[0] and errors[2] > 2 * errors[0], errors
    # The same by the counts.
    delayed = fp8.attach(model, policy="delayed-te")
    fp8.attention(q, k, v, delayed.layers[0], backend=name)
    assert delayed.stats()["overflow"][0].sum() > 0


@pytest.mark.parametrize("name", libraries())
def test_the_probe_passes_the_library_and_finds_six_planted_faults(name):
    call, per_tensor = raw(name), name == "cudnn"
    settings = {"per_tensor": per_tensor, "d_head": 128, "n_q_heads": 8, "seq_len": 256}
    report = sigmascale.probe(call, **settings)
    assert report.ok, report
    ones = torch.ones_like
    faults = [
        ("q", "dropped", lambda q, k, v, a, b, c: call(q, k, v, ones(a), b, c)),
        ("k", "dropped", lambda q, k, v, a, b, c: call(q, k, v, a, ones(b), c)),
        ("v", "dropped", lambda q, k, v, a, b, c: call(q, k, v, a, b, ones(c))),
        ("k", "inverted", lambda q, k, v, a, b, c: call(q, k, v, a, 1 / b, c)),
    ]
    if not per_tensor:
        faults.append(("v", "permuted", lambda q, k, v, a, b, c: call(q, k, v, a, b, c.flip(1))))
    kept = []

    def stale(q, k, v, a, b, c):
        kept.append(a)
        return call(q, k, v, kept[0], b, c)

    for operand, fault, broken in [*faults, ("q", "stale", stale)]:
        report = sigmascale.probe(broken, **settings)
        found = {key: getattr(report, key) for key in "qkv"}
        assert found == {key: "applied" for key in "qkv"} | {operand: fault}, (operand, fault, found)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("name", libraries())
def test_gradients_follow_those_of_the_seen_operands(name, heads):
    from sigmascale.torch import _backends, _terms

    q, k, v = (x.requires_grad_(True) for x in tensors(heads=heads, length=192))
    row = [torch.full((heads[1],), 0.02, device="cuda") for _ in range(3)]
    out = fp8.attention(q, k, v, row, backend=name)
    direction = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), direction)
    descales = [d.expand(2, -1) for d in row]
    plain = _backends.backend("emulated")
    with torch.no_grad():
        _, lse, seen = plain.forward(q, k, v, descales, _terms.Terms(True, 128**-0.5, accumulator="f16"))
        plain = plain.backward(direction, seen, descales, None, lse, _terms.Terms(True, 128**-0.5))[:3]
    errors = [relative(a, b) for a, b in zip(ours, plain)]
    assert max(errors) < 0.01, errors
    exact = torch.autograd.grad(sdpa(q, k, v), (q, k, v), direction)
    errors = [relative(a, b) for a, b in zip(ours, exact)]
    assert max(errors) < 0.08, errors


def test_the_native_kernel_reports_what_plain_casts_count():
    q, k, v = tensors(scale=3.0)
    row = [torch.full((2,), descale, device="cuda") for descale in (0.01, 0.005, 0.015)]
    from sigmascale.torch import _backends, _terms

    words = [torch.zeros(2 * (8 + 2), 4, dtype=torch.int32, device="cuda") for _ in range(2)]
    for backend, word in zip(("native", "emulated"), words):
        descales = tuple(r.expand(2, -1) for r in row)
        _backends.backend(backend).forward(q, k, v, descales, _terms.Terms(True, 128**-0.5), word)
    assert torch.equal(words[0][8:], words[1][8:]) and words[0][8:, 1].sum() > 0


def test_counts_of_both_casts_stop_at_the_largest_that_a_word_holds():
    from sigmascale.torch import _e4m3

    x = torch.full((2, 75, 3, 64), 500.0, device="cuda")
    for cast in (_e4m3.cast, _e4m3.plain_cast):
        words = torch.tensor([[0, 0, 0, 0], [0, -9600, -9601, 0], [0, -9599, -5, -1]], dtype=torch.int32, device="cuda")
        cast(x, torch.ones(2, 3, device="cuda"), words)
        assert words[:, 1:].tolist() == [[9600, 9600, 0], [-1, -1, 0], [-1, -1, -1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("d", [64, 80, 128])
def test_the_fused_cast_gives_the_bits_and_counts_of_plain_pytorch(d, dtype):
    from sigmascale.torch import _e4m3

    x = (8 * torch.randn(2, 75, 6, d, device="cuda")).to(dtype)
    x[0, 3, 2, 5], x[1, 70, 4, 1] = float("nan"), float("-inf")
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    # By 0.02 and its like many values of BF16 fall between two of E4M3, to the last bit of the reciprocal.
    row = torch.tensor([[0.02, 0.025, 1.0]], device="cuda").expand(2, 3)
    words = [torch.zeros(6, 4, dtype=torch.int32, device="cuda") for _ in range(2)]
    ours, plain = (cast(x, row, word) for cast, word in zip((_e4m3.cast, _e4m3.plain_cast), words))
    assert torch.equal(ours.view(torch.uint8) & 0x7F, plain.view(torch.uint8) & 0x7F)
    assert torch.equal(words[0][:, 1:], words[1][:, 1:]) and words[0][:, 1].sum() > 0 and words[0][:, 3].sum() == 2
    finite = [0, 1, 3, 5]
    assert (
        torch.equal(words[0][finite, 0], words[1][finite, 0])
        and not torch.isfinite(words[0][[2, 4], 0].view(torch.float32)).any()
    )


def test_strides_of_the_layout_batch_heads_seq_need_no_copy():
    q, k, v = tensors()
    row = [torch.full((2,), 0.02, device="cuda") for _ in range(3)]
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(fp8.attention(q, k, v, row), fp8.attention(*swapped, row))


def test_rows_that_lie_on_each_other_are_read_as_they_are():
    q, k, v = tensors()
    row = [torch.full((2,), 0.02, device="cuda") for _ in range(3)]
    spread = [x[:1].expand(2, -1, -1, -1) for x in (q, k, v)]
    whole = [x.contiguous() for x in spread]
    for name in ("native", "emulated"):
        assert torch.equal(fp8.attention(*spread, row, backend=name), fp8.attention(*whole, row, backend=name))
    # Heads of a fused projection.
    fused = torch.cat([x.flatten(2) for x in (q, k, v)], dim=2)
    views = [y.unflatten(2, (-1, 128)) for y in fused.split([1024, 256, 256], dim=2)]
    assert torch.equal(fp8.attention(*views, row), fp8.attention(q, k, v, row))
    # Off the kernel's alignment by its first address, and by its strides alone.
    wide = torch.randn(2, 100, 8, 129, device="cuda", dtype=torch.bfloat16)
    for odd in (wide[..., 1:], wide[..., :128]):
        assert torch.equal(fp8.attention(odd, k, v, row), fp8.attention(odd.contiguous(), k, v, row))


def test_head_dimensions_beyond_the_kernel_are_emulated():
    row = [torch.full((2,), 0.02, device="cuda") for _ in range(3)]
    for d in (80, 256):
        q, k, v = tensors(d=d, length=128)
        assert torch.equal(fp8.attention(q, k, v, row), fp8.attention(q, k, v, row, backend="native"))
    q, k, v = tensors(d=264, length=64)
    with pytest.warns(RuntimeWarning, match="emulated"):
        out = fp8.attention(q, k, v, row)
    assert torch.equal(out, fp8.attention(q, k, v, row, backend="emulated"))


def test_a_captured_step_reads_the_refreshed_plan(llama):
    runtime = fp8.attach(llama)
    q, k, v = tensors(heads=(4, 2), d=64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fp8.attention(q, k, v, runtime.layers[0])
        runtime.refresh()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        runtime.refresh()
        out = fp8.attention(q, k, v, runtime.layers[0])
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.mul_(3)
    graph.replay()
    torch.cuda.synchronize()
    again = fp8.attach(llama)
    assert torch.equal(out, fp8.attention(q, k, v, again.layers[0]))
