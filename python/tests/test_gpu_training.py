"""The backward on a Hopper GPU: gradients, bias, memory, graphs, compilers, fixed order."""

import functools

import pytest
from gpu import libraries, relative, tensors, torch  # skips this file where PyTorch is missing

import plain  # isort: skip
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import sigmascale
import sigmascale.torch as fp8
from sigmascale.torch import _rope, _terms

OP = torch.ops.sigmascale.attention.default


def rows(n_kv=2, value=0.02):
    return [torch.full((n_kv,), value * (1 + i / 4), device="cuda") for i in range(3)]


def exact(q, k, v, row, causal, direction):
    """Output and gradients in f64 from the operands that E4M3 holds."""
    held = [plain.held(x, d).detach().requires_grad_(True) for x, d in zip((q, k, v), row)]
    out, _ = plain.attention(*held, causal=causal)
    return out, torch.autograd.grad(out, held, direction.double())


def leaves(*given):
    return [x.detach().requires_grad_(True) for x in given]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("heads", "d", "length", "keys"),
    [
        ((8, 2), 128, 512, 512),
        ((4, 4), 64, 333, 333),
        ((6, 2), 64, 100, 257),
        ((4, 1), 128, 1, 129),
        ((2, 2), 128, 65, 40),
        ((4, 2), 256, 200, 300),
        ((2, 2), 192, 333, 333),
    ],
)
def test_gradients_are_those_of_f64(heads, d, length, keys, causal):
    q, *_ = tensors(length=length, heads=heads, d=d)
    _, k, v = tensors(length=keys, heads=heads, d=d, seed=1)
    q, k, v = leaves(q, k, v)
    row, direction = rows(heads[1]), tensors(length=length, heads=heads, d=d, seed=2)[0]
    out = fp8.attention(q, k, v, row, causal=causal)
    reference, theirs = exact(q, k, v, row, causal, direction)
    ours = torch.autograd.grad(out, (q, k, v), direction)
    assert relative(out, reference) < 4e-3
    errors = [relative(a, b) for a, b in zip(ours, theirs)]
    assert max(errors) < 6e-3, errors
    assert all(a.dtype == torch.bfloat16 and torch.isfinite(a).all() for a in ours)


@pytest.mark.parametrize("name", libraries())
def test_outputs_with_a_mean_do_not_bias_gradients(name):
    """Sums of P V in FP8 shrink where V has a mean: delta of such an output moved dQ by 40 % here."""
    generator = torch.Generator("cuda").manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")
    with_mean = lambda heads: (randn(1, 4096, heads, 128) + randn(128)).bfloat16()
    q, k, v, direction = randn(1, 4096, 4, 128).bfloat16(), with_mean(2), with_mean(2), with_mean(4)
    q, k, v = leaves(q, k, v)
    row = [torch.full((2,), float(x.detach().abs().max()) / 440, device="cuda") for x in (q, k, v)]
    out = fp8.attention(q, k, v, row, backend=name)
    ours = torch.autograd.grad(out, (q, k, v), direction)
    reference, theirs = exact(q, k, v, row, True, direction)
    # What the rounding of the exact output to BF16 does to delta and dQ: dQ_i is off by tau error_i sum_j P_ij k_j.
    mean_key = exact(q, k, k, [row[0], row[1], row[1]], True, direction)[0]
    lost = ((reference.bfloat16().double() - reference) * direction).sum(dim=3, keepdim=True) * mean_key * 128**-0.5
    intrinsic = float(lost.norm() / theirs[0].norm())
    errors = [relative(a, b) for a, b in zip(ours, theirs)]
    assert errors[0] < 1.5 * intrinsic + 0.005 and errors[1] < 1.5 * intrinsic + 0.005 and errors[2] < 0.005, (
        errors,
        intrinsic,
    )
    # An output that is 2 % too small, as that of long FP8 sums is, would be seen.
    lost = (-0.02 * reference * direction).sum(dim=3, keepdim=True) * mean_key * 128**-0.5
    assert float(lost.norm() / theirs[0].norm()) > 3 * (1.5 * intrinsic + 0.005)


def test_the_training_output_is_unbiased_and_accumulators_can_be_chosen():
    q, k, v = tensors(1, 8192, (2, 1))
    v = v + 1
    row = [torch.full((1,), 0.02, device="cuda") for _ in range(3)]
    reference = exact(q[:, -256:], k, v, row, True, torch.zeros_like(q[:, -256:]))[0].detach()
    bias = {}
    for name in ("f16", "fp8-256", "fp8-2048"):
        out = fp8.attention(q, k, v, row, accumulator=name)[:, -256:]
        bias[name] = abs(float((out - reference).mean() / reference.abs().mean()))
    assert bias["f16"] < 1e-3 and bias["fp8-256"] < 5e-3 and bias["fp8-2048"] > bias["fp8-256"], bias
    assert torch.equal(fp8.attention(q, k, v, row), fp8.attention(q, k, v, row, accumulator="fp8-256"))
    q.requires_grad_(True)
    assert torch.equal(fp8.attention(q, k, v, row), fp8.attention(q, k, v, row, accumulator="f16"))
    # A forward of another accumulator has the same gradients: its output is not what delta is taken from.
    direction = torch.randn_like(q)
    grads = [
        torch.autograd.grad(fp8.attention(q, k, v, row, accumulator=name), q, direction)[0]
        for name in ("f16", "fp8-2048")
    ]
    assert relative(*grads) < 1e-3
    with pytest.raises(sigmascale.UnsupportedError, match="128 keys"):
        fp8.attention(q, k, v, row, accumulator="fp8-64")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["f16", "f32"])
def test_gradients_have_the_types_and_any_strides(dtype):
    q, k, v = leaves(*(x.to(dtype) for x in tensors()))
    row = rows()
    out = fp8.attention(q, k, v, row)
    direction = torch.randn(2, 8, 256, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    ours = torch.autograd.grad(out, (q, k, v), direction)
    _, theirs = exact(q, k, v, row, True, direction)
    assert all(a.dtype == dtype and relative(a, b) < 6e-3 for a, b in zip(ours, theirs))
    # The gradient of a sum has no strides at all.
    (ours,) = torch.autograd.grad(fp8.attention(q, k, v, row).sum(), v)
    _, theirs = exact(q, k, v, row, True, torch.ones_like(out))
    assert relative(ours, theirs[2]) < 6e-3


@pytest.mark.parametrize(("gradients", "bytes_of_out"), [(None, 3), ("rounded-delta", 2)])
def test_what_a_backward_keeps(gradients, bytes_of_out):
    """Operands in E4M3, the output, by default what its rounding took, and a log-sum-exp for each row."""
    q, k, v = leaves(*tensors(2, 4096, (32, 8)))
    row = [torch.full((8,), 0.02, device="cuda") for _ in range(3)]
    fp8.attention(q, k, v, row, gradients=gradients).sum().backward()
    torch.cuda.synchronize()
    # Operands that nobody else holds.
    q, k, v = (x.detach().requires_grad_(True) for x in (q, k, v))
    before = torch.cuda.memory_allocated()
    out = fp8.attention(q * 1, k * 1, v * 1, row, gradients=gradients)
    kept = torch.cuda.memory_allocated() - before
    elements = q.numel() + k.numel() + v.numel()
    assert kept < 1.02 * (elements + bytes_of_out * q.numel() + 4 * q.numel() / 128)
    del out


def test_a_fixed_order_gives_equal_bits():
    q, k, v = leaves(*tensors(2, 2048, (8, 2)))
    direction = torch.randn_like(q)
    run = lambda: torch.autograd.grad(fp8.attention(q, k, v, rows()), (q, k, v), direction)
    any_order = run()
    torch.use_deterministic_algorithms(True)
    try:
        first = run()
        assert all(all(torch.equal(a, b) for a, b in zip(first, run())) for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(relative(a, b) < 2e-3 for a, b in zip(first, any_order))


@pytest.mark.parametrize(("heads", "d"), [((8, 2), 128), ((4, 4), 64)])
def test_dq_by_a_product_in_fp8_is_off_by_its_rounding(heads, d):
    q, k, v = leaves(*tensors(2, 1024, heads, d))
    direction, row = torch.randn_like(q), rows(heads[1])
    run = lambda step: torch.autograd.grad(step(q, k, v), (q, k, v), direction)
    plain = run(lambda q, k, v: fp8.attention(q, k, v, row))
    step = lambda q, k, v: fp8.attention(q, k, v, row, gradients="fp8-dq")
    for ours in (run(step), run(torch.compile(step, fullgraph=True))):
        assert 5e-3 < relative(ours[0], plain[0]) < 8e-2, relative(ours[0], plain[0])
        assert all(relative(a, b) < 1e-3 for a, b in zip(ours[1:], plain[1:]))
    q, k, v = leaves(*tensors(1, 64, (2, 2), 136))
    with pytest.raises(sigmascale.UnsupportedError, match="gradients='fp8-dq' .*128.*136"):
        fp8.attention(q, k, v, rows(2), gradients="fp8-dq")


@pytest.mark.parametrize(("heads", "d", "d_v"), [((8, 2), 128, 128), ((4, 4), 64, 64), ((2, 1), 128, 72)])
def test_delta_is_that_of_the_output_before_its_rounding(heads, d, d_v):
    # Keys share a part, and dO has the sign of the output, so that dQ is what delta's error leaves of it.
    q, k, v = tensors(2, 512, heads, d)
    k[..., :8] += 4.0
    q, k, v = leaves(q, k, v[..., :d_v].contiguous())
    row = rows(heads[1])
    calls = {
        "emulated": lambda q, k, v: fp8.attention(q, k, v, row, backend="emulated", accumulator="f16"),
        "rounded": lambda q, k, v: fp8.attention(q, k, v, row, gradients="rounded-delta"),
        "unrounded": lambda q, k, v: fp8.attention(q, k, v, row),
    }
    outs = {name: call(q, k, v) for name, call in calls.items()}
    assert torch.equal(outs["rounded"], outs["unrounded"])
    direction = outs["rounded"].detach()
    found = {name: torch.autograd.grad(out, (q, k, v), direction) for name, out in outs.items()}
    off = {name: relative(found[name][0], found["emulated"][0]) for name in ("rounded", "unrounded")}
    # The rest of the error is that of products, which are summed up in another order.
    assert off["unrounded"] < 0.9 * off["rounded"], off
    assert relative(found["unrounded"][2], found["rounded"][2]) < 1e-3
    compiled = torch.compile(calls["unrounded"], fullgraph=True)(q, k, v)
    again = torch.autograd.grad(compiled, (q, k, v), direction)
    assert all(relative(a, b) < 2e-3 for a, b in zip(again, found["unrounded"]))


@pytest.mark.parametrize(("heads", "d", "d_v"), [((8, 2), 128, 128), ((4, 4), 64, 64), ((2, 1), 128, 72), ((2, 1), 256, 256)])
@pytest.mark.parametrize("how", [{"causal": True}, {"causal": False, "window": (0, 0)}])
def test_a_row_that_sees_one_key_has_no_gradient_of_its_logit(heads, d, d_v, how):
    q, k, v = (4 * x for x in tensors(2, 512, heads, d))
    q, k, v = leaves(q, k, v[..., :d_v].contiguous())
    grads = lambda **more: torch.autograd.grad(fp8.attention(q, k, v, rows(heads[1]), **how, **more).float().square().sum(), (q, k, v))
    found, rounded = grads(), grads(gradients="rounded-delta")
    own = slice(1) if how["causal"] else slice(None)
    one, other = (x[0][:, own].float().abs().max() for x in (found, rounded))
    # dP and delta are sums of the same products in f32, in other orders.
    assert one < 0.01 * other, (one, other)
    assert torch.equal(found[2], rounded[2])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("length", "keys", "rotary"), [(333, 333, 128), (70, 333, 128), (333, 333, 64)])
def test_the_cast_turns_q_and_k(length, keys, rotary, interleaved, monkeypatch):
    """As PyTorch does in front of it, up to the rounding to BF16 that it saves."""
    _, k, v = tensors(length=keys, heads=(8, 2), d=128, seed=1)
    q, *_ = tensors(length=length, heads=(8, 2), d=128)
    angles = torch.arange(400, device="cuda")[:, None] * 100.0 ** (-torch.arange(0, rotary, 2, device="cuda") / rotary)
    rope = fp8.Rope(angles.cos(), angles.sin(), interleaved)
    direction = tensors(length=length, heads=(8, 2), d=128, seed=2)[0]
    asked = []
    monkeypatch.setattr(_rope, "turned", lambda *given: asked.append(given))
    q, k, v = leaves(q, k, v)
    out = fp8.attention(q, k, v, rows(), rope=rope)
    ours = out.detach(), *torch.autograd.grad(out, (q, k, v), direction)
    inference = fp8.attention(q.detach(), k.detach(), v.detach(), rows(), rope=rope)
    assert not asked and relative(inference, ours[0]) < 0.06
    monkeypatch.undo()
    turned = _rope.turned(rope, q, k)
    want = fp8.attention(*turned, v, rows())
    theirs = want.detach(), *torch.autograd.grad(want, (q, k, v), direction)
    for a, b in zip(ours, theirs):
        assert relative(a, b) < 0.03


def test_a_captured_step_replays_with_the_descales_of_the_moment():
    q, k, v = leaves(*tensors(length=512))
    row, direction, stream = rows(), torch.randn_like(q), torch.cuda.Stream()
    run = lambda: torch.autograd.grad(fp8.attention(q, k, v, row), (q, k, v), direction)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
        for descale in row:
            descale.mul_(1.5)
        expected = run()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected))
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_waits_for_the_device():
    q, k, v = leaves(*tensors())
    row, direction = rows(), torch.randn_like(q)
    run = lambda: torch.autograd.grad(fp8.attention(q, k, v, row), (q, k, v), direction)
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_operators_pass_the_checks_of_pytorch():
    q, k, v = leaves(*tensors(length=64, heads=(4, 2), d=64))
    descales = [x.expand(2, -1) for x in rows()]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    terms = _terms.Terms(True, 0.2, accumulator="f16", keeps=_terms.OPERANDS).flat()
    torch.library.opcheck(OP, (q, k, v, *descales, None, *terms, "native", None, True), test_utils=checks)
    out, lse, *saved, _ = (x.detach() for x in OP(q, k, v, *descales, None, *terms, "native", None, False))
    given = (torch.randn_like(out), *saved, *descales, out, lse, *terms, "native")
    torch.library.opcheck(torch.ops.sigmascale.attention_backward.default, given, test_utils=checks[:1] + checks[2:])


def test_a_compiled_step_has_no_graph_break(llama):
    runtime = fp8.attach(llama)
    q, k, v = leaves(*tensors(heads=(4, 2), d=64))

    def step(q, k, v):
        for plan in runtime.layers:
            q = torch.tanh(fp8.attention(q * 2, k, v, plan))
        return q

    expected, direction = step(q, k, v), torch.randn_like(q)
    theirs = torch.autograd.grad(expected, (q, k, v), direction)
    seen = runtime.stats()
    runtime.refresh()
    compiled = torch.compile(step, fullgraph=True)
    out = compiled(q, k, v)
    ours = torch.autograd.grad(out, (q, k, v), direction)
    assert relative(out, expected) < 0.02 and all(relative(a, b) < 0.05 for a, b in zip(ours, theirs))
    after = runtime.stats()
    assert after["calls"].keys() == {"native"} and (after["calls"]["native"] == 1).all()
    assert (after["amax"][0] == seen["amax"][0]).all() and (after["amax"] > 0).all()


def test_checkpoints_run_or_keep_the_operator(llama):
    runtime = fp8.attach(llama)
    q, k, v = leaves(*tensors(heads=(4, 2), d=64))
    direction = torch.randn_like(q)
    step = lambda q, k, v: fp8.attention(q * 2, k, v, runtime.layers[0])
    torch.use_deterministic_algorithms(True)
    try:
        plain = torch.autograd.grad(step(q, k, v), (q, k, v), direction)
        contexts = functools.partial(create_selective_checkpoint_contexts, [OP])
        for options, runs in [({}, 2), ({"context_fn": contexts}, 1)]:
            runtime.refresh()
            out = checkpoint(step, q, k, v, use_reentrant=False, **options)
            again = torch.autograd.grad(out, (q, k, v), direction)
            assert all(torch.equal(a, b) for a, b in zip(again, plain))
            assert runtime.stats()["calls"]["native"].tolist() == [runs, 0, 0]
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_backward_on_another_stream_waits_for_its_forward():
    q, k, v = leaves(*tensors(2, 2048, (8, 2)))
    row, direction, stream = rows(), torch.randn_like(q), torch.cuda.Stream()
    expected = torch.autograd.grad(fp8.attention(q, k, v, row), (q, k, v), direction)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = fp8.attention(q, k, v, row)
        ours = torch.autograd.grad(out, (q, k, v), direction)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert all(relative(a, b) < 2e-3 for a, b in zip(ours, expected))
