"""The paper's runtime on the CPU: norms from power iteration, and logits in E4M3."""

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch")

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402

POWER = ("power", "power-summed")
D, HEADS, KV, R = 96, 4, 2, 16


class Small(torch.nn.Module):
    """Two layers of projections of one width, without rotation unless it is asked for."""

    def __init__(self, seed=0, rotary=0):
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        make = lambda rows: torch.nn.Parameter(0.3 * torch.randn(rows, D, generator=made))
        self.q, self.k, self.v = (
            torch.nn.ParameterList([make(heads * R) for _ in range(2)]) for heads in (HEADS, KV, KV)
        )
        self.gain = torch.nn.Parameter(1 + 0.1 * torch.randn(D, generator=made))
        self.rotary = rotary

    def layers(self):
        return [
            fp8.Layer(
                q=self.q[i], k=self.k[i], v=self.v[i], n_q_heads=HEADS, n_kv_heads=KV, norm="rms", gain=self.gain,
                rotary=self.rotary,
            )
            for i in range(2)
        ]


def attach(model, policy="geometry", **options):
    return fp8.attach(model, policy, layers=model.layers(), **options)


def exact(model, layer, head, summed=False):
    """The norm of a head's interaction with the gain, or of the raw sum over the heads."""
    q, k = (x[layer].detach().double().view(-1, R, D) for x in (model.q, model.k))
    if summed:
        return float(torch.linalg.matrix_norm(sum(q[h].T @ k[h * KV // HEADS] for h in range(HEADS)), 2))
    q, k = q * model.gain.detach(), k * model.gain.detach()
    return float(torch.linalg.matrix_norm(q[head].T @ k[head * KV // HEADS], 2))


@pytest.mark.parametrize("estimator", POWER)
def test_estimates_rise_to_the_norm_with_every_refresh(estimator):
    model = Small()
    runtime = attach(model, "geometry-c-star", estimator=estimator)
    first = runtime.estimates()
    assert first["steps"].tolist() == [5, 5] and first["guarantee"] == "none"
    last = first["sigma"]
    for _ in range(60):
        runtime.refresh()
        now = runtime.estimates()["sigma"]
        assert (now >= last * (1 - 1e-5)).all()
        last = now
    assert runtime.estimates()["steps"].tolist() == [65, 65]
    for layer in range(2):
        for head in range(HEADS):
            norm = exact(model, layer, head, estimator == "power-summed")
            assert first["sigma"][layer, head] < norm * (1 + 1e-5)
            assert last[layer, head] == pytest.approx(norm, rel=2e-3)


@pytest.mark.parametrize("estimator", POWER)
def test_the_numbers_of_iterations_are_options(estimator):
    model = Small()
    runtimes = [attach(model, "geometry-c-star", estimator=estimator, iterations=each) for each in ((1, 1), (4, 2), (9, 1))]
    for runtime in runtimes[1:]:
        assert (runtime.estimates()["sigma"] > runtimes[0].estimates()["sigma"]).all()
    runtimes[1].refresh()
    assert runtimes[1].estimates()["steps"].tolist() == [6, 6]
    # As many iterations from the same vectors, in one launch or in several.
    several = attach(model, "geometry-c-star", estimator=estimator, iterations=(3, 3))
    several.refresh()
    assert several.estimates()["sigma"] == pytest.approx(runtimes[1].estimates()["sigma"], rel=1e-5)


@pytest.mark.parametrize("estimator", POWER)
def test_a_poor_start_heals_where_the_weights_stay(estimator):
    """From vectors nearly orthogonal to the largest singular vector the estimate starts far too low; refreshes bring it to the norm."""
    model = Small()
    runtime = attach(model, "geometry-c-star", estimator=estimator)
    q, k = (x[0].detach().double().view(-1, R, D) for x in (model.q, model.k))
    summed = estimator == "power-summed"
    gain = 1 if summed else model.gain.detach().double()
    matrix = sum(q[h].T @ k[h * KV // HEADS] for h in range(HEADS)) if summed else (q[0] * gain).T @ (k[0] * gain)
    _, values, vectors = torch.linalg.svd(matrix)
    poor = vectors[5] + 1e-3 * vectors[0]
    state = runtime.state_dict()
    own = torch.cat([k[head] @ poor for head in range(KV)]) if summed else (k[0] * gain) @ poor
    state["estimates"]["vectors"][: len(own)] = own.float()
    runtime.load_state_dict(state)
    first = runtime.estimates()
    seen = [first["sigma"][0, 0]]
    assert first["residual"][0, 0] > 1e-3 * seen[0]
    # Near some singular value, though not near the largest.
    assert float((values - seen[0]).abs().min()) <= 1.01 * first["residual"][0, 0]
    assert seen[0] < 0.9 * float(values[0])
    for _ in range(60):
        runtime.refresh()
        seen.append(runtime.estimates()["sigma"][0, 0])
    assert all(b >= a * (1 - 1e-5) for a, b in zip(seen, seen[1:]))
    assert seen[-1] == pytest.approx(float(values[0]), rel=5e-3)
    assert runtime.estimates()["residual"][0, 0] < 0.1 * seen[-1]


def test_geometry_covers_sigma_at_a_cold_start_and_no_longer():
    model = Small()
    runtime, certified = attach(model, estimator="power"), attach(model, bound="worst-case")
    cold = runtime.estimates()
    norms = torch.tensor([[exact(model, layer, head) for head in range(HEADS)] for layer in range(2)])
    assert (torch.from_numpy(cold["upper"]) >= norms).all() and (runtime.logits[..., 0] >= norms).all()
    assert (runtime.logits[..., 1] >= certified.logits[..., 1] * 0.999).all()
    runtime.refresh()
    warm = runtime.estimates()
    assert all(map(math.isnan, warm["upper"].flatten()))
    assert (runtime.logits[..., 0] <= norms * (1 + 1e-5)).all()
    # Nothing covers what rotates, or the sum.
    for other in (attach(Small(rotary=R), estimator="power"), attach(model, estimator="power-summed")):
        assert all(map(math.isnan, other.estimates()["upper"].flatten()))


@pytest.mark.parametrize("estimator", ["gram", *POWER])
def test_the_factor_on_rotated_channels_is_in_both_sides_of_a_logit(estimator):
    model = Small(rotary=R)
    plain, turned = (
        fp8.attach(model, "geometry-c-star", "worst-case", layers=layers, estimator=estimator)
        for layers in (model.layers(), [dataclasses.replace(layer, rope_factor=1.25) for layer in model.layers()])
    )
    assert torch.allclose(turned.logits, plain.logits * 1.25**2, rtol=1e-4)
    assert torch.allclose(turned.logit_descales, plain.logit_descales * 1.25**2, rtol=1e-4)
    rotated = turned.descales[:, :2] / plain.descales[:, :2]
    assert torch.allclose(rotated, torch.full_like(rotated, 1.25), rtol=1e-4)
    assert torch.equal(turned.descales[:, 2], plain.descales[:, 2])


@pytest.mark.parametrize("estimator", POWER)
@pytest.mark.parametrize("policy", ["geometry", "geometry-c-star", "auto-c", "delayed-paper"])
def test_descales_of_operands_do_not_depend_on_the_estimator(estimator, policy):
    model = Small()
    runtimes = [attach(model, policy, estimator=e, bound="worst-case") for e in ("gram", estimator)]
    assert torch.equal(*(runtime.descales for runtime in runtimes))
    assert not torch.equal(*(runtime.logits[..., 2] for runtime in runtimes))
    if policy == "delayed-paper":
        # The baseline is one word away: without bounds nothing is estimated.
        baseline = attach(model, policy, estimator=estimator, logits="e4m3")
        assert baseline.logits is None and baseline.logit_descales is not None
        with pytest.raises(sigmascale.UnsupportedError, match="exact"):
            baseline.estimates()


@pytest.mark.parametrize("estimator", POWER)
@pytest.mark.parametrize("policy", ["geometry", "geometry-c-star", sigmascale.AutoC(burn_in=2)])
def test_a_resumed_run_has_the_same_bits(estimator, policy, tmp_path):
    model = Small()
    runtime = attach(model, policy, estimator=estimator, logits="e4m3")
    operands = lambda step: [torch.randn(1, 9, n, R, generator=torch.Generator().manual_seed(step)) for n in (HEADS, KV, KV)]

    def step(runtime, number):
        with torch.no_grad():
            outs = [fp8.attention(*operands(number), plan) for plan in runtime.layers]
            for parameter in model.parameters():
                parameter.mul_(1.01)
        runtime.refresh()
        return outs, runtime.logit_descales.clone(), runtime.descales.clone()

    for number in range(4):
        step(runtime, number)
    torch.save({"model": model.state_dict(), "runtime": runtime.state_dict()}, tmp_path / "state")
    through = [step(runtime, number) for number in range(4, 8)]
    saved = torch.load(tmp_path / "state", weights_only=False)
    model.load_state_dict(saved["model"])
    resumed = attach(model, policy, estimator=estimator, logits="e4m3")
    resumed.load_state_dict(saved["runtime"])
    assert resumed.estimates()["steps"].tolist() == [9, 9]
    for number, (outs, logits, descales) in zip(range(4, 8), through):
        again = step(resumed, number)
        assert all(map(torch.equal, again[0], outs))
        assert torch.equal(again[1], logits) and torch.equal(again[2], descales)


def test_foreign_states_and_wrong_options_are_refused():
    model = Small()
    power, gram = attach(model, estimator="power"), attach(model)
    with pytest.raises(sigmascale.MismatchError, match="estimator"):
        gram.load_state_dict(power.state_dict())
    with pytest.raises(sigmascale.MismatchError, match="estimator 'gram'"):
        power.load_state_dict(gram.state_dict())
    with pytest.raises(sigmascale.MismatchError, match="vectors"):
        power.load_state_dict(power.state_dict() | {"estimates": power.state_dict()["estimates"] | {"vectors": torch.zeros(3)}})
    with pytest.raises(sigmascale.MismatchError, match=r"iterations \(5, 1\), this runtime \(5, 2\)"):
        attach(model, estimator="power", iterations=(5, 2)).load_state_dict(power.state_dict())
    with pytest.raises(sigmascale.ArgumentError, match="iterations 0 must be at least 1"):
        attach(model, estimator="power", iterations=(5, 0))
    with pytest.raises(TypeError, match="iterations must be two integers"):
        attach(model, estimator="power", iterations=5)
    with pytest.raises(sigmascale.ArgumentError, match="estimator 'lanczos'"):
        attach(model, estimator="lanczos")
    with pytest.raises(sigmascale.ArgumentError, match="logits"):
        attach(model, logits="e5m2")
    with pytest.raises(sigmascale.UnsupportedError, match="current"):
        attach(model, "current", logits="e4m3")


def rounded(x, unit):
    return (x / unit).clamp(-448, 448).to(torch.float8_e4m3fn).float() * unit


@pytest.mark.parametrize("backend", ["native", "emulated"])
def test_logits_pass_through_e4m3(backend):
    """Against attention that is written out, with operands that E4M3 holds exactly."""
    made = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(-4, 5, (2, 12, n, R), generator=made).float().requires_grad_(True)
    q, k, v = draw(HEADS), draw(KV), draw(KV)
    one, unit = torch.ones(KV), torch.tensor([0.002, 0.01, 0.05, 0.1])
    out = fp8.attention(q, k, v, (one, one, one, unit), logits="e4m3", backend=backend, accumulator="f16")
    every = [x.repeat_interleave(HEADS // n, dim=2).transpose(1, 2) for x, n in ((q, HEADS), (k, KV), (v, KV))]
    s = every[0] @ every[1].transpose(2, 3) * R**-0.5
    cast = s + (rounded(s, unit.view(-1, 1, 1)) - s).detach()
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    expected = (torch.softmax(cast.masked_fill(hidden, -torch.inf), dim=3) @ every[2]).transpose(1, 2)
    error = lambda a, b: float((a.float() - b).detach().norm() / b.detach().norm())
    assert error(out, expected) < 4e-3
    direction = torch.randn(expected.shape, generator=made)
    ours = torch.autograd.grad(out, (q, k, v), direction.bfloat16())
    theirs = torch.autograd.grad(expected, (q, k, v), direction)
    assert all(error(a, b) < 0.02 for a, b in zip(ours, theirs))
    # The cast is there: 0.002 saturates at 0.9, so that head's softmax is another.
    smooth = fp8.attention(q, k, v, (one, one, one), backend=backend, accumulator="f16")
    assert error(smooth[:, :, 0], expected[:, :, 0]) > 0.1


@pytest.mark.parametrize("backend", ["native", "emulated"])
def test_overflow_of_logits_is_counted(backend):
    model = Small()
    runtime = attach(model, "geometry", logits="e4m3", backend=backend)
    made = torch.Generator().manual_seed(1)
    x = torch.randn(1, 20, D, generator=made)
    x = x * (x.square().mean(dim=2, keepdim=True) + 1e-6).rsqrt() * model.gain.detach()
    project = lambda w: (x @ w[0].detach().T).unflatten(2, (-1, R))
    q, k, v = project(model.q), project(model.k), project(model.v)
    fp8.attention(q, k, v, runtime.layers[0])
    stats = runtime.stats()
    assert (stats["logit_overflow"] == 0).all() and not math.isnan(stats["logit_max"][0, 0])
    runtime.logit_descales.mul_(1e-3)
    fp8.attention(q, k, v, runtime.layers[0])
    after = runtime.stats()
    logits = plain_logits(q, k)
    unit = runtime.logit_descales[0].view(-1, 1, 1)
    assert after["logit_overflow"][0].tolist() == pytest.approx(
        ((logits.abs() > 448 * unit) & torch.isfinite(logits)).sum(dim=(0, 2, 3)).tolist(), rel=0.02
    )
    assert after["logit_overflow"][0].sum() > 100
    seen = logits.masked_fill(~torch.isfinite(logits), -torch.inf).amax(dim=(0, 2, 3))
    assert after["logit_max"][0].tolist() == pytest.approx(seen.tolist(), rel=0.05)


def plain_logits(q, k):
    every = [x.repeat_interleave(HEADS // x.shape[2], dim=2).transpose(1, 2) for x in (q, k)]
    s = every[0] @ every[1].transpose(2, 3) * R**-0.5
    return s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(1), -torch.inf)


def test_calls_without_scales_for_logits_are_refused():
    model = Small()
    q, k, v = (torch.randn(1, 5, n, R) for n in (HEADS, KV, KV))
    plain, cast = attach(model), attach(model, "geometry-c-star", logits="e4m3")
    with pytest.raises(sigmascale.UnsupportedError, match="no descales of logits"):
        fp8.attention(q, k, v, plain.layers[0], logits="e4m3")
    with pytest.raises(TypeError, match="four descales"):
        fp8.attention(q, k, v, [torch.ones(KV)] * 3, logits="e4m3")
    with pytest.raises(sigmascale.MismatchError, match="one for each query head"):
        fp8.attention(q, k, v, [torch.ones(KV)] * 4, logits="e4m3")
    with pytest.raises(sigmascale.UnsupportedError, match="center"):
        fp8.attention(q, k, v, cast.layers[0], centers=(torch.zeros(KV, R), None))
    plan = cast.layers[0]
    with pytest.raises(sigmascale.UnsupportedError, match="dropout"):
        fp8.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), plan=plan, dropout_p=0.5, enable_gqa=True, fallback="bf16"
        )


@pytest.mark.parametrize("scenario", ["checkpoint-load", "weight-spike"])
def test_transients_of_a_model_that_is_trained_first(scenario):
    run = sigmascale.stress(
        scenario, "tiny-llama-train", mode="logit", policies="geometry-c-star,delayed-paper", estimator="power-summed",
        seq_len=32, steps=None if scenario == "checkpoint-load" else 12,
    )
    assert run["estimator"] == "power-summed" and any("no guarantee" in note for note in run["notes"])
    assert {summary["policy"] for summary in run["policies"]} == {"geometry-c-star", "delayed-paper"}
