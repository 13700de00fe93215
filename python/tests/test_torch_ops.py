"""The operators under autograd, the compiler, the exporter and checkpoints, on the CPU."""

import dataclasses
import functools

import pytest

torch = pytest.importorskip("torch")

import plain  # noqa: E402
from planned import Planned, layer  # noqa: E402
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402
from sigmascale.torch import _e4m3, _residual, _terms  # noqa: E402

OP, OP_BACKWARD = torch.ops.sigmascale.attention.default, torch.ops.sigmascale.attention_backward.default


def operands(batch=2, length=33, heads=(4, 2), d=32, keys=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda n, length: torch.randn(batch, length, n, d, generator=generator).requires_grad_(True)
    keys = keys or length
    return make(heads[0], length), make(heads[1], keys), make(heads[1], keys)


def rows(n_kv=2, value=0.02):
    return [torch.full((n_kv,), value * (1 + i)) for i in range(3)]


def error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def exact(q, k, v, row, **terms):
    """Attention in f64 of the operands that E4M3 holds; casts hand gradients through."""
    return plain.attention(*(plain.held(x, d) for x, d in zip((q, k, v), row)), **terms)[0]


@pytest.mark.parametrize("seed", range(24))
def test_gradients_are_those_of_f64_through_the_casts(seed):
    generator = torch.Generator().manual_seed(seed)
    one = lambda low, high: int(torch.randint(low, high, (), generator=generator))
    group, n_kv, causal = one(1, 4), one(1, 3), seed % 2 == 0
    length, keys = one(1, 70), one(1, 70)
    keys = max(keys, length) if causal else keys
    q, k, v = operands(one(1, 3), length, (group * n_kv, n_kv), 16 * one(1, 5), keys, seed)
    row = rows(n_kv)
    out = fp8.attention(q, k, v, row, causal=causal)
    reference = exact(q, k, v, row, causal=causal)
    direction = torch.randn(out.shape, generator=generator).bfloat16()
    ours = torch.autograd.grad(out, (q, k, v), direction)
    theirs = torch.autograd.grad(reference, (q, k, v), direction.double())
    assert error(out, reference) < 3e-3
    for a, b in zip(ours, theirs):
        assert error(a, b) < 6e-3 or float(b.norm()) < 1e-6


def test_sums_of_one_sign_are_not_shrunk_where_gradients_are_needed():
    q, k, v = operands(1, 256, (1, 1), 64)
    v = (v.detach() + 3).requires_grad_(True)
    row = [torch.full((1,), value) for value in (0.01, 0.01, 0.02)]
    out, reference = fp8.attention(q, k, v, row), exact(q, k, v, row)
    assert abs(float((out - reference).mean() / reference.abs().mean())) < 1e-4
    # P in E4M3 is rounded to a sixteenth, P in F16 to a two-thousandth; the rest is the output's own BF16.
    with torch.no_grad():
        inference = fp8.attention(q, k, v, row)
    assert error(inference, reference) > 2 * error(out, reference)
    assert torch.equal(inference, fp8.attention(q, k, v, row, accumulator="fp8-256"))
    assert torch.equal(out, fp8.attention(*(x.detach() for x in (q, k, v)), row, accumulator="f16"))


def test_dq_by_a_product_in_fp8_is_off_by_its_rounding():
    q, k, v = operands(1, 200, (4, 2), 64)
    direction = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    run = lambda **how: torch.autograd.grad(fp8.attention(q, k, v, rows(), **how), (q, k, v), direction)
    usual, ours = run(gradients="rounded-delta"), run(gradients="fp8-dq")
    assert 1e-2 < error(ours[0], usual[0]) < 4e-2, error(ours[0], usual[0])
    assert torch.equal(ours[1], usual[1]) and torch.equal(ours[2], usual[2])
    assert torch.equal(fp8.attention(q, k, v, rows(), gradients="fp8-dq"), fp8.attention(q, k, v, rows()))
    with pytest.raises(sigmascale.UnsupportedError, match="gradients='fp8-dq' is for .* emulated"):
        fp8.attention(q, k, v, rows(), backend="emulated", gradients="fp8-dq")


def test_bytes_and_two_outputs_are_all_that_is_saved():
    q, k, v = (x.detach().bfloat16().requires_grad_(True) for x in operands())
    kept = []
    pack = lambda x: kept.append((x.dtype, tuple(x.shape))) or x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fp8.attention(q, k, v, rows())
    shapes = [tuple(x.shape) for x in (q, k, v)]
    descales = [(torch.float32, (2, 2))] * 3
    rest = [(torch.bfloat16, shapes[0]), (torch.int8, shapes[0]), (torch.float32, (2, 4, 33))]
    assert sorted(map(str, kept)) == sorted(map(str, [(torch.uint8, x) for x in shapes] + descales + rest))
    with torch.no_grad():
        _, _, *kept = called(q, k, v, _terms.Terms(True, 0.2))
    assert len(kept) == 6 and all(x.numel() == 0 for x in kept)


def called(q, k, v, terms, backend="auto", report=False):
    """The operator's results."""
    return OP(q, k, v, *(x.expand(2, -1) for x in rows()), None, *terms.flat(), backend, None, report)


def kept(**terms):
    """Terms of a call with a backward."""
    return _terms.Terms(**({"causal": True, "scale": 0.2, "accumulator": "f16", "keeps": _terms.OPERANDS} | terms))


def spans(*rows):
    """Sequences by (first query, end, first key, end)."""
    longest = [max(row[i + 1] - row[i] for row in rows) for i in (0, 2)]
    return _terms.Sequences(*torch.tensor(rows, dtype=torch.int32).t().contiguous(), *longest)


# Two rows of 33 tokens: one padded on the left, one on the right.
PADDED = spans((4, 33, 4, 33), (33, 60, 33, 60))
KINDS = {
    "dense": {},
    "window": {"window_left": 5},
    "two sides": {"causal": False, "window_left": 3, "window_right": 7},
    "soft-cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "padded": {"sequences": PADDED},
    "all": {"window_left": 5, "soft_cap": 1.5, "sinks": True, "sequences": PADDED},
}


def made(kind):
    """The terms of a kind, with sinks made anew."""
    terms = dict(KINDS[kind])
    if terms.get("sinks"):
        terms["sinks"] = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)
    return terms


@pytest.mark.parametrize("kind", [*KINDS, "dq in fp8", "unrounded delta"])
@pytest.mark.parametrize("report", [False, True])
def test_the_operators_pass_the_checks_of_pytorch(report, kind):
    q, k, v = operands()
    descales = [x.expand(2, -1) for x in rows()]
    keeps = {"dq in fp8": _terms.FP8_DQ, "unrounded delta": _terms.UNROUNDED_DELTA}
    terms = kept(**made(kind)) if kind in KINDS else kept(keeps=keeps[kind])
    alone = terms if terms.sinks is None else dataclasses.replace(terms, sinks=terms.sinks.detach())
    for saves in (True, False):
        given = (q, k, v) if saves else tuple(x.detach() for x in (q, k, v))
        each = terms if saves else dataclasses.replace(alone, keeps=_terms.NOTHING)
        torch.library.opcheck(OP, (*given, *descales, None, *each.flat(), "auto", None, report))
    out, lse, *saved, _ = (x.detach() for x in called(q, k, v, terms))
    torch.library.opcheck(OP_BACKWARD, (torch.randn_like(out), *saved, *descales, out, lse, *alone.flat(), "auto"))


def reference(q, k, v, terms, row=None):
    """Output and log-sum-exp in f64 of the operands that E4M3 holds."""
    q, k, v = (plain.held(x, d) for x, d in zip((q, k, v), row or rows(k.shape[2])))
    given = {"causal": terms.causal, "scale": terms.scale, "window": terms.window, "softcap": terms.soft_cap, "sinks": terms.sinks}
    if terms.sequences is None:
        return plain.attention(q, k, v, **given)
    return plain.packed(q, k, v, zip(*(x.tolist() for x in terms.sequences.places)), **given)


@pytest.mark.parametrize("backend", ["native", "emulated"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_term_has_the_values_and_the_gradients_of_f64(kind, backend):
    q, k, v = operands()
    terms = kept(**made(kind))
    out, lse, *_ = called(q, k, v, terms, backend)
    expected, expected_lse = reference(q, k, v, terms)
    assert error(out, expected) < 3e-3
    outside = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, outside) and not out.transpose(1, 2)[outside].any()
    assert torch.allclose(lse[~outside].double(), expected_lse[~outside], atol=1e-3)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    leaves = [q, k, v] + ([terms.sinks] if terms.sinks is not None else [])
    ours = torch.autograd.grad(out, leaves, direction)
    theirs = torch.autograd.grad(expected, leaves, direction.double())
    assert all(error(a, b) < 6e-3 for a, b in zip(ours, theirs)), [error(a, b) for a, b in zip(ours, theirs)]
    # Nothing of padding reaches a result, NaN neither.
    if terms.sequences is not None:
        with torch.no_grad():
            hidden = [x.clone() for x in (q, k, v)]
            for x in hidden:
                x[0, :4] = x[1, 27:] = torch.nan
            inference = dataclasses.replace(terms, keeps=_terms.NOTHING)
            again, again_lse, *_, words = called(*hidden, inference, backend, report=True)
        assert torch.equal(again, out) and torch.equal(again_lse, lse) and not words[4:, 3].any()


def repeated(copies=3, tokens=16):
    """Keys that repeat and share a part, values of one sign, and a gradient along the output: dQ is what delta leaves of it."""
    generator = torch.Generator().manual_seed(3)
    code = torch.randint(0, 2, (1, tokens, 4, 24), generator=generator) * 2.0 - 1.0
    every = lambda x: x.repeat(1, copies, 1, 1).contiguous()
    q = torch.cat([3.0 * code, torch.zeros(1, tokens, 4, 8)], 3)
    k = torch.cat([code, torch.ones(1, tokens, 4, 8)], 3)[:, :, :2]
    v = -(0.5 * torch.randn(1, tokens, 2, 32, generator=generator)).exp()
    return [every(x).requires_grad_(True) for x in (q, k, v)]


@pytest.mark.parametrize("sinks", [False, True])
def test_delta_is_that_of_the_output_before_its_rounding(sinks):
    q, k, v = repeated()
    row = [x.detach().abs().amax(dim=(0, 1, 3))[:2] / 448 for x in (q, k, v)]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True) if sinks else None
    terms = _terms.Terms(False, 32**-0.5, sinks=sinks)
    leaves = [q, k, v] + ([sinks] if sinks is not None else [])

    def off(gradients):
        return error(gradients[0], theirs[0])

    call = lambda **how: fp8.attention(q, k, v, row, causal=False, sinks=sinks, **how)
    rounded, unrounded = call(gradients="rounded-delta"), call()
    assert torch.equal(rounded, unrounded), "the output itself does not change"
    want, _ = reference(q, k, v, terms, row)
    direction = rounded.detach()
    theirs = torch.autograd.grad(want, leaves, direction.double())
    ours = {
        name: torch.autograd.grad(out, leaves, direction)
        for name, out in (("rounded", rounded), ("unrounded", unrounded), ("emulated", call(backend="emulated")))
    }
    assert off(ours["unrounded"]) < 0.3 * off(ours["rounded"]), {name: off(x) for name, x in ours.items()}
    assert off(ours["emulated"]) < 0.3 * off(ours["rounded"]), "its delta is that of P and dP"
    if sinks is not None:
        assert error(ours["unrounded"][3], theirs[3]) <= error(ours["rounded"][3], theirs[3])


def test_a_code_is_what_the_rounding_took():
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(200_000, generator=generator) * torch.exp2(torch.randint(-140, 120, (200_000,), generator=generator).float())
    out = wide.bfloat16()
    codes = _residual.code(wide, out)
    again, least = _residual.value(out, codes), 2.0**-111
    # A step is 2^-15 of a power of two, and the largest code is one short of half a step of bfloat16.
    assert ((again - wide).abs() <= 2.0**-15 * wide.abs().clamp_min(least)).all()
    assert ((again - wide).abs() <= 2.0**-16 * (1 + 2**-7) * wide.abs().clamp_min(least))[codes.abs() < 127].all()
    assert codes.min() <= -127 and codes.max() == 127
    plain = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
    assert (_residual.code(plain, plain.bfloat16()) == 0).all()


@pytest.mark.parametrize("how", ["causal", "window", "one key"])
@pytest.mark.parametrize("backend", ["native", "emulated"])
def test_a_row_that_sees_one_key_has_no_gradient_of_its_logit(how, backend):
    """Its softmax is 1 whatever the logit is, so dQ is exactly zero; the rounded output made it up to 2^-9 of dO V K."""
    q, k, v = (50 * x.detach() for x in operands())
    if how == "one key":
        k, v = k[:, :1], v[:, :1]
    row = [x.abs().amax(dim=(0, 1, 3))[:2] / 448 for x in (q, k, v)]
    options = {"causal": {"causal": True}, "window": {"causal": False, "window": (0, 0)}, "one key": {"causal": False}}[how]
    rows = slice(1) if how == "causal" else slice(None)

    def grads(**more):
        leaves = [x.clone().requires_grad_(True) for x in (q, k, v)]
        out = fp8.attention(*leaves, row, backend=backend, **options, **more)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    dq, dk, dv = grads()
    # Against what a row of the rounded output can have: dO V K of the row, 2^-9 of it.
    scale = v.abs().sum(dim=3).max() * k.abs().max() * q.shape[3] ** -0.5
    assert dq[:, rows].abs().max() <= 2**-16 * scale
    if how != "causal":
        assert dk.abs().max() <= 2**-16 * q.shape[1] * v.abs().sum(dim=3).max() * q.abs().max() * q.shape[3] ** -0.5
    if backend == "native":
        rounded = grads(gradients="rounded-delta")
        assert rounded[0][:, rows].abs().max() > 10 * dq[:, rows].abs().max()
        assert torch.equal(rounded[2], dv)


def test_what_a_call_keeps_for_its_gradients_may_be_chosen():
    runtime = Planned([layer()] * 2)
    q, k, v = operands()
    plan = runtime.layers[0]
    grads = lambda **how: torch.autograd.grad(fp8.attention(q, k, v, plan, **how).float().square().sum(), q)[0]
    usual, rounded = grads(), grads(gradients="rounded-delta")
    assert not torch.equal(usual, rounded)
    # Of sums in FP8 the backward computes the output again, and rounds it.
    assert torch.equal(grads(accumulator="fp8-256"), grads(accumulator="fp8-256", gradients="rounded-delta"))
    with pytest.raises(sigmascale.ArgumentError, match="gradients='fp8-dq' is for the accumulator 'f16', not 'fp8-256'"):
        grads(accumulator="fp8-256", gradients="fp8-dq")
    with torch.no_grad():
        assert torch.isfinite(fp8.attention(q, k, v, plan, gradients="rounded-delta")).all()


def two_layers(plans):
    def call(q, k, v):
        for plan in plans:
            q = fp8.attention(q * 2, k, v, plan).float()
        return q

    return call


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_have_no_graph_break_and_report(backend):
    runtime = Planned([layer()] * 2)
    call, (q, k, v) = two_layers(runtime.layers), operands()
    expected = call(q, k, v)
    words = runtime.words.clone()
    runtime.words.zero_()
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    try:
        out = compiled(q, k, v)
    except torch._inductor.exc.InductorError as missing:
        pytest.skip(f"no compiler for the CPU: {missing}")
    assert torch.equal(out, expected) and torch.equal(runtime.words, words) and words[:, 4:, 0].all()
    ours, theirs = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
    # Plans are read where they lie, not built in.
    runtime.descales.mul_(1.5)
    assert torch.equal(compiled(q, k, v), call(q, k, v)) and not torch.equal(compiled(q, k, v), expected)


def test_shapes_may_be_dynamic_in_compiled_calls():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: fp8.attention(q, k, v, row), fullgraph=True, backend="aot_eager", dynamic=True
    )
    row = rows()
    for length in (33, 40, 57):
        q, k, v = operands(length=length)
        assert torch.equal(compiled(q, k, v), fp8.attention(q, k, v, row))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_calls_run_without_their_runtime(strict):
    runtime = Planned([layer()] * 2)

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return two_layers(runtime.layers)(q, k, v)

    q, k, v = (x.detach() for x in operands())
    expected = Model()(q, k, v)
    program = torch.export.export(Model(), (q, k, v), strict=strict)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(OP) == 2
    runtime.words.zero_()
    assert torch.equal(program.module()(q, k, v), expected) and not runtime.words.any()


def test_checkpoints_recompute_by_the_same_descales_or_not_at_all():
    runtime = Planned([layer()] * 2)
    call, (q, k, v) = two_layers(runtime.layers), operands()
    usual = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    runs = lambda: sum(sum(counter.values()) for counter in runtime.calls)
    contexts = functools.partial(create_selective_checkpoint_contexts, [OP])
    for options, extra in [({}, 4), ({"context_fn": contexts}, 2)]:
        before = runs()
        out = checkpoint(call, q, k, v, use_reentrant=False, **options)
        again = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(again, usual)) and runs() - before == extra


def test_what_a_selective_checkpoint_keeps_is_counted_once():
    # Operands far out of the range of their descales: maxima would not show it.
    runtime = Planned([layer()] * 2, descale=1e-4)
    call, (q, k, v) = two_layers(runtime.layers), operands()
    contexts = functools.partial(create_selective_checkpoint_contexts, [OP])
    found = []
    for options in ({}, {"context_fn": contexts}):
        runtime.words.zero_()
        out = checkpoint(call, q, k, v, use_reentrant=False, **options) if options else call(q, k, v)
        torch.autograd.grad(out.square().sum(), (q, k, v))
        found.append(runtime.words.clone())
    assert torch.equal(*found) and found[0][:, 4:, 1].all()


def test_operands_in_e4m3_are_taken_as_they_are():
    q, k, v = (x.detach() for x in operands())
    row = rows()
    eight = [_e4m3.cast(x, d.expand(2, -1)) for x, d in zip((q, k, v), row)]
    assert torch.equal(fp8.attention(*eight, row), fp8.attention(q, k, v, row))
    with pytest.raises(ValueError, match="one type"):
        fp8.attention(q, *eight[1:], row)
    with pytest.raises(sigmascale.UnsupportedError, match="one descale a head"):
        fp8.attention(*eight, row, backend="cudnn")


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("accumulator 'fp8-100' must be", {"accumulator": "fp8-100"}),
        ("accumulator 'f32' must be", {"accumulator": "f32"}),
        ("accumulator 256 must be", {"accumulator": 256}),
        ("fallback 'fp32' must be", {"fallback": "fp32"}),
        ("has an accumulator of its own", {"accumulator": "f16", "backend": "fa3"}),
        ("gradients='fp8-dq' is for the accumulator 'f16'", {"accumulator": "fp8-256", "gradients": "fp8-dq"}),
        ("gradients 'fp8' must be 'fp8-dq', 'rounded-delta' or None", {"gradients": "fp8"}),
    ],
)
def test_choices_that_are_none_are_refused(message, options):
    q, k, v = (x.detach() for x in operands())
    with pytest.raises(sigmascale.ArgumentError, match=message):
        fp8.attention(q, k, v, rows(), **options)


def test_the_operator_without_saved_operands_says_why_it_has_no_gradient():
    q, k, v = operands()
    out, *_ = called(q, k, v, _terms.Terms(True, 0.2))
    with pytest.raises(RuntimeError, match="keeps='operands'"):
        out.sum().backward()


def test_the_kernels_offer_heads_up_to_256():
    from sigmascale import _native

    for d in ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256)):
        assert _native.Attention.offers(*d)
    assert not _native.Attention.offers(264, 264) and not _native.Attention.offers(64, 60)


@pytest.mark.parametrize("lead", [(), (2, 3)], ids=["no batch", "two dimensions"])
def test_sdpa_takes_any_number_of_batch_dimensions(lead):
    make = lambda heads, seed: torch.randn(*lead, heads, 6, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
    q, k, v = make(4, 1), make(2, 2), make(2, 3)
    plan = [torch.full((2,), 0.02) for _ in range(3)]
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    flat = [x.reshape(-1, *x.shape[-3:]) for x in (q, k, v)]
    expected = fp8.scaled_dot_product_attention(*flat, is_causal=True, enable_gqa=True, plan=plan)
    for mask in ({"is_causal": True}, {"attn_mask": seen}, {"attn_mask": seen.expand(*lead, 1, 6, 6)}):
        out = fp8.scaled_dot_product_attention(q, k, v, enable_gqa=True, plan=plan, **mask)
        assert out.shape == q.shape and torch.equal(out.reshape_as(expected), expected)
    with pytest.raises(sigmascale.MismatchError, match="in front of the heads"):
        fp8.scaled_dot_product_attention(q[None], k, v, plan=plan)
