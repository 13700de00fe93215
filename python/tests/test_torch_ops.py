"""The operators under autograd, the compiler, the exporter and checkpoints, on the CPU."""

import functools

import pytest

torch = pytest.importorskip("torch")

from planned import Planned, layer  # noqa: E402
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402
from sigmascale.torch import _casts, _ops, _terms  # noqa: E402

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


def exact(q, k, v, row, causal):
    """Attention in f64 of the operands that E4M3 holds; casts hand gradients through."""

    def seen(x, descale):
        descale = descale.expand(x.shape[0], -1)
        value = _casts.cast(x, descale).double() * _casts.spread(descale, x.shape[2])
        return x.double() + (value - x.double()).detach()

    q, k, v = (seen(x, d).transpose(1, 2) for x, d in zip((q, k, v), row))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if causal:
        logits = logits.masked_fill(_casts.hidden(q.shape[2], k.shape[2], "cpu"), -torch.inf)
    weights = torch.softmax(logits, dim=3).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


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
    reference = exact(q, k, v, row, causal)
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
    out, reference = fp8.attention(q, k, v, row), exact(q, k, v, row, True)
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
    plain, ours = run(), run(dq_fp8=True)
    assert 1e-2 < error(ours[0], plain[0]) < 4e-2, error(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1]) and torch.equal(ours[2], plain[2])
    assert torch.equal(fp8.attention(q, k, v, rows(), dq_fp8=True), fp8.attention(q, k, v, rows()))
    with pytest.raises(sigmascale.UnsupportedError, match="dq_fp8 is for this package's kernels, and emulated"):
        fp8.attention(q, k, v, rows(), backend="emulated", dq_fp8=True)


def test_bytes_and_two_outputs_are_all_that_is_saved():
    q, k, v = (x.detach().bfloat16().requires_grad_(True) for x in operands())
    kept = []
    pack = lambda x: kept.append((x.dtype, tuple(x.shape))) or x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fp8.attention(q, k, v, rows())
    shapes = [tuple(x.shape) for x in (q, k, v)]
    descales = [(torch.float32, (2, 2))] * 3
    rest = [(torch.bfloat16, shapes[0]), (torch.float32, (2, 4, 33))]
    assert sorted(map(str, kept)) == sorted(map(str, [(torch.uint8, x) for x in shapes] + descales + rest))
    with torch.no_grad():
        _, _, *kept = OP(q, k, v, *(x.expand(2, -1) for x in rows()), None, False, *how(), False)
    assert len(kept) == 6 and all(x.numel() == 0 for x in kept)


def how(causal=True, dq_fp8=False, stabilise=False, **terms):
    """The operators' arguments behind ``report``."""
    return _ops.arguments(_terms.Terms(causal, 0.2, **terms), "auto", "f16", dq_fp8=dq_fp8, stabilise=stabilise)


def spans(*rows):
    """Sequences by (first query, end, first key, end)."""
    longest = [max(row[i + 1] - row[i] for row in rows) for i in (0, 2)]
    return _terms.Sequences(*torch.tensor(rows, dtype=torch.int32).t().contiguous(), *longest)


# Two rows of 33 tokens: one padded on the left, one on the right.
PADDED = spans((4, 33, 4, 33), (33, 60, 33, 60))
KINDS = {
    "dense": {},
    "window": {"window": (5, -1)},
    "two sides": {"causal": False, "window": (3, 7)},
    "soft-cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "padded": {"sequences": PADDED},
    "all": {"window": (5, -1), "soft_cap": 1.5, "sinks": True, "sequences": PADDED},
}


def made(kind):
    """The terms of a kind, with sinks made anew."""
    terms = dict(KINDS[kind])
    if terms.get("sinks"):
        terms["sinks"] = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)
    return terms


@pytest.mark.parametrize("kind", [*KINDS, "dq in fp8", "stabilised"])
@pytest.mark.parametrize("report", [False, True])
def test_the_operators_pass_the_checks_of_pytorch(report, kind):
    q, k, v = operands()
    descales = [x.expand(2, -1) for x in rows()]
    terms = how(**made(kind)) if kind in KINDS else how(dq_fp8=kind == "dq in fp8", stabilise=kind == "stabilised")
    for saves in (True, False):
        given = (q, k, v) if saves else tuple(x.detach() for x in (q, k, v))
        sinks = terms[:1] if saves or terms[0] is None else (terms[0].detach(),)
        torch.library.opcheck(OP, (*given, *descales, None, report, *sinks, *terms[1:], saves))
    out, lse, *saved, _ = (x.detach() for x in OP(q, k, v, *descales, None, False, *terms, True))
    terms = (None if terms[0] is None else terms[0].detach(), *terms[1:])
    torch.library.opcheck(OP_BACKWARD, (torch.randn_like(out), *saved, *descales, out, lse, *terms))


def reference(q, k, v, terms, row=None):
    """Output, log-sum-exp and gradients in f64 of the operands that E4M3 holds, with logits and mask in full."""

    def seen(x, descale):
        descale = descale.expand(x.shape[0], -1)
        value = _casts.cast(x, descale).double() * _casts.spread(descale, x.shape[2])
        return (x.double() + (value - x.double()).detach()).transpose(1, 2)

    q, k, v = (seen(x, d) for x, d in zip((q, k, v), row or rows(k.shape[2])))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = q @ k.transpose(2, 3) * terms.scale
    if terms.soft_cap:
        logits = terms.soft_cap * torch.tanh(logits / terms.soft_cap)
    batch, len_q, len_k = q.shape[0], q.shape[2], k.shape[2]
    mask = torch.zeros(batch * len_q, batch * len_k, dtype=torch.bool)
    whole = [(i * len_q, (i + 1) * len_q, i * len_k, (i + 1) * len_k) for i in range(batch)]
    inside = torch.zeros(batch * len_q, dtype=torch.bool)
    places = whole if terms.sequences is None else zip(*(x.tolist() for x in terms.sequences.places))
    for q_start, q_end, k_start, k_end in places:
        inside[q_start:q_end] = True
        for row in range(q_start, q_end):
            at = k_start + row - q_start + (k_end - k_start) - (q_end - q_start)
            first = k_start if terms.window[0] < 0 else max(k_start, at - terms.window[0])
            right = 0 if terms.causal else terms.window[1]
            last = k_end if right < 0 else min(k_end, at + right + 1)
            mask[row, first : max(first, last)] = True
    mask = torch.stack([mask[i * len_q : (i + 1) * len_q, i * len_k : (i + 1) * len_k] for i in range(batch)])[:, None]
    inside = inside.view(batch, 1, len_q)
    logits = logits.masked_fill(~mask, -torch.inf)
    if terms.sinks is not None:
        column = terms.sinks.double().view(1, -1, 1, 1).expand(batch, -1, len_q, 1)
        logits = torch.cat([logits, column.masked_fill(~inside[..., None], -torch.inf)], dim=3)
    weights = torch.where(inside[..., None], torch.softmax(logits, dim=3).nan_to_num(0.0), 0.0)[..., :len_k]
    return (weights @ v).transpose(1, 2), torch.logsumexp(logits, dim=3)


@pytest.mark.parametrize("backend", ["native", "emulated"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_term_has_the_values_and_the_gradients_of_f64(kind, backend):
    q, k, v = operands()
    terms = _terms.Terms(**({"causal": True, "scale": 0.2} | made(kind)))
    descales = [x.expand(2, -1) for x in rows()]
    out, lse, *_ = OP(q, k, v, *descales, None, False, *_ops.arguments(terms, backend, "f16"), True)
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
            how = _ops.arguments(terms, backend, "f16")
            again, again_lse, *_, words = OP(*hidden, *descales, None, True, *how, False)
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
def test_stabilised_calls_take_delta_from_the_output_before_its_rounding(sinks):
    q, k, v = repeated()
    row = [x.detach().abs().amax(dim=(0, 1, 3))[:2] / 448 for x in (q, k, v)]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True) if sinks else None
    terms = _terms.Terms(False, 32**-0.5, sinks=sinks)
    leaves = [q, k, v] + ([sinks] if sinks is not None else [])

    def off(gradients):
        return error(gradients[0], theirs[0])

    call = lambda **how: fp8.attention(q, k, v, row, causal=False, sinks=sinks, **how)
    plain, stabilised = call(), call(stabilise=True)
    assert torch.equal(plain, stabilised), "the output itself does not change"
    want, _ = reference(q, k, v, terms, row)
    direction = plain.detach()
    theirs = torch.autograd.grad(want, leaves, direction.double())
    ours = {
        name: torch.autograd.grad(out, leaves, direction)
        for name, out in (("plain", plain), ("stabilised", stabilised), ("emulated", call(backend="emulated")))
    }
    assert off(ours["stabilised"]) < 0.3 * off(ours["plain"]), {name: off(x) for name, x in ours.items()}
    assert off(ours["emulated"]) < 0.3 * off(ours["plain"]), "its delta is that of P and dP"
    if sinks is not None:
        assert error(ours["stabilised"][3], theirs[3]) <= error(ours["plain"][3], theirs[3])


def test_a_plan_may_ask_for_it_and_calls_that_cannot_say_so():
    runtime = Planned([layer()] * 2)
    q, k, v = operands()
    plan = runtime.layers[0]
    grads = lambda **how: torch.autograd.grad(fp8.attention(q, k, v, plan, **how).float().square().sum(), q)[0]
    plain, asked = grads(), grads(stabilise=True)
    assert not torch.equal(plain, asked)
    plan.stabilise = True
    assert torch.equal(grads(), asked)
    with pytest.raises(sigmascale.ArgumentError, match="leave one of the two out"):
        grads(dq_fp8=True)
    with pytest.raises(sigmascale.ArgumentError, match="stabilise is for the accumulator 'f16', not 'fp8-256'"):
        grads(accumulator="fp8-256")
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    with pytest.raises(sigmascale.UnsupportedError, match="stabilise is for this package's attention, .* dropout 0.1"):
        fp8.scaled_dot_product_attention(*heads, dropout_p=0.1, enable_gqa=True, plan=plan, fallback="bf16")
    # Without gradients nothing changes, and nothing is refused.
    with torch.no_grad():
        assert torch.isfinite(fp8.attention(q, k, v, plan)).all()


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
    plain = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    runs = lambda: sum(sum(counter.values()) for counter in runtime.calls)
    contexts = functools.partial(create_selective_checkpoint_contexts, [OP])
    for options, extra in [({}, 4), ({"context_fn": contexts}, 2)]:
        before = runs()
        out = checkpoint(call, q, k, v, use_reentrant=False, **options)
        again = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(again, plain)) and runs() - before == extra


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
    eight = [_casts.cast(x, d.expand(2, -1)) for x, d in zip((q, k, v), row)]
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
        ("dq_fp8 is for the accumulator 'f16'", {"accumulator": "fp8-256", "dq_fp8": True}),
    ],
)
def test_choices_that_are_none_are_refused(message, options):
    q, k, v = (x.detach() for x in operands())
    with pytest.raises(sigmascale.ArgumentError, match=message):
        fp8.attention(q, k, v, rows(), **options)


def test_the_operator_without_saved_operands_says_why_it_has_no_gradient():
    q, k, v = operands()
    out, *_ = OP(q, k, v, *(x.expand(2, -1) for x in rows()), None, False, *how(), False)
    with pytest.raises(RuntimeError, match="save=True"):
        out.sum().backward()


@pytest.mark.parametrize("d", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str)
def test_the_kernels_offer_every_term(d):
    from sigmascale import _native

    for terms in range(16):
        given = [bool(terms >> i & 1) for i in range(4)]
        assert _native.Attention.offers(*d, True, *given) and _native.Attention.offers(*d, False, *given)
    assert not _native.Attention.offers(264, 264, True, False, False, False, False)
