"""Centers of keys and values in calls: exact for any values, and each form that is not is told apart."""

import functools
import types

import pytest

torch = pytest.importorskip("torch")

import plain  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402
from sigmascale.torch import _centers, _e4m3, _terms  # noqa: E402

HEADS, D = (4, 2), 32
BACKENDS = ["native", "emulated"]


def operands(length=48, shift=4.0, seed=0, batch=2):
    """q, k and v whose keys and values have a direction in common, and the centers that take it off."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator)
    q, k, v = (make(batch, length, n, D) for n in (HEADS[0], HEADS[1], HEADS[1]))
    c, m = shift * make(HEADS[1], D), shift * make(HEADS[1], D)
    return tuple((x + y).requires_grad_(True) for x, y in ((q, 0.0), (k, c), (v, m))), (c, m)


def covering(q, k, v, c=None, m=None):
    """Descales of what is cast."""
    sub = lambda x, center: x if center is None else x - center
    largest = lambda x: x.detach().abs().amax(dim=(0, 1, 3)) / 448.0 * 1.001
    group = lambda x: x.unflatten(0, (HEADS[1], -1)).amax(dim=1)
    return [group(largest(q)), largest(sub(k, c)), largest(sub(v, m))]


def error(a, b):
    return float((a.float() - b.float()).detach().norm() / b.detach().float().norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("terms", [{}, {"causal": False}, {"window": (7, 0)}])
def test_centers_change_rounding_errors_alone(backend, terms):
    (q, k, v), (c, m) = operands()
    exact, lse = plain.attention(q, k, v, **terms)
    run = functools.partial(fp8.attention, q, k, v, backend=backend, return_lse=True, **terms)
    without, _ = run(covering(q, k, v))
    out, out_lse = run(covering(q, k, v, c, m), centers=(c, m))
    assert error(out, exact) < 0.5 * error(without, exact)
    # Queries are rounded, and what c takes from a row's logits is that of the rounded ones.
    assert float((out_lse - lse).detach().abs().max()) < 0.05 * float(lse.detach().abs().max())
    # The kernel's own sum lacks it, and its output m.
    centered = fp8.attention(q, k - c, v - m, covering(q, k, v, c, m), backend=backend, return_lse=True, **terms)
    assert float((centered[1] - lse).detach().abs().max()) > 1.0, "LSE' is off by the shift"
    assert error(centered[0], exact) > 0.5, "O' lacks m"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gradients", [None, "rounded-delta"])
def test_gradients_are_those_without_centers(backend, gradients):
    (q, k, v), centers = operands()
    exact, _ = plain.attention(q, k, v)
    direction = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    theirs = torch.autograd.grad(exact, (q, k, v), direction.float())
    of = lambda rows, **options: torch.autograd.grad(
        fp8.attention(q, k, v, rows, backend=backend, gradients=gradients, **options), (q, k, v), direction
    )
    without, ours = of(covering(q, k, v)), of(covering(q, k, v, *centers), centers=centers)
    for name, a, b, exact in zip("qkv", ours, without, theirs):
        assert a.dtype == torch.float32 and error(a, exact) < 0.08, (name, error(a, exact))
        assert name == "v" or error(a, exact) < error(b, exact), name


def test_delta_is_of_one_kind_with_the_values():
    (q, k, v), (c, m) = operands()
    rows = [d.expand(2, -1) for d in covering(q, k, v, c, m)]
    terms = _terms.Terms(True, D**-0.5, k_center=c, v_center=m, accumulator="f16", keeps=_terms.OPERANDS)
    from sigmascale.torch import _cpu

    q, k, v = (x.detach() for x in (q, k, v))
    out, lse, kept = _cpu.forward(q, k, v, rows, terms, None)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    right = _cpu.backward(grad, kept, rows, out, lse, terms)[0]
    mixed = _cpu.backward(grad, kept, rows, out, lse, _terms.Terms(True, D**-0.5, accumulator="f16", keeps=_terms.OPERANDS))[0]
    exact = torch.autograd.grad(plain.attention(*(x.requires_grad_(True) for x in (q, k, v)))[0], q, grad)[0]
    assert error(right, exact) < 0.08
    assert error(mixed, exact) > 0.5, "O with m beside V without"


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_a_sequence_merge_with_one_center(backend):
    (q, k, v), (c, m) = operands()
    exact, _ = plain.attention(q, k, v, causal=False)
    rows = covering(q, k, v, c, m)
    part = lambda keys, centers: fp8.attention(
        q, k[:, keys], v[:, keys], rows, causal=False, backend=backend, return_lse=True, centers=centers
    )
    halves = slice(20), slice(20, None)

    def merged(parts):
        total = functools.reduce(torch.logaddexp, [lse for _, lse in parts])
        weight = lambda lse: torch.exp(lse - total).transpose(1, 2)[..., None]
        return sum(weight(lse) * out.float() for out, lse in parts)

    # Relative to what the output is beside m.
    off = lambda out: error(out - m.repeat_interleave(2, dim=0), exact - m.repeat_interleave(2, dim=0))
    assert off(merged([part(keys, (c, m)) for keys in halves])) < 0.1
    # Parts with a center of their own merge by the log-sum-exp of the model, which is what a caller reads; not by the kernel's.
    rows = covering(q, k, v, -0.5 * c, m)
    own = list(zip(halves, (c, -0.5 * c)))
    assert off(merged([part(keys, (center, m)) for keys, center in own])) < 0.25
    as_it_is = [
        fp8.attention(q, k[:, keys] - center, v[:, keys] - m, rows, causal=False, backend=backend, return_lse=True)
        for keys, center in own
    ]
    assert off(merged(as_it_is) + m.repeat_interleave(2, dim=0)) > 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_have_one_center(backend):
    (q, k, v), centers = operands(batch=1)
    cu = torch.tensor([0, 11, 11, 30], dtype=torch.int32)
    rows = covering(q, k, v, *centers)
    plan = _Planned(rows, centers)
    q, k, v = (x.detach()[0, :30] for x in (q, k, v))
    out = fp8.flash_attn_varlen_func(q, k, v, cu, cu, 19, 19, causal=True, plan=plan.plan(), backend=backend)
    for a, b in ((0, 11), (11, 30)):
        exact, _ = plain.attention(*(x[None, a:b] for x in (q, k, v)))
        assert error(out[a:b], exact[0]) < 0.02


class _Planned:
    """A runtime as far as a plan needs it, of one layer."""

    policy, backend, fallback, reporting = "geometry", "auto", None, True
    logit_descales = None

    def _model(self):
        return None

    def __init__(self, rows, centers):
        class policy:
            per_call = remembers = False

        self._policy = policy
        self.descales = torch.ones(1, 4, HEADS[1])
        self.descales[0, :3] = torch.stack(rows)
        self.words = torch.zeros(1, 2 * sum(HEADS), 4, dtype=torch.int32)
        self._centers = centers

    def plan(self):
        from planned import layer
        from sigmascale.torch._plan import LayerPlan

        plan = LayerPlan(self, 0, layer(HEADS, D))
        plan.kept = types.SimpleNamespace(of=[self._centers], learns=lambda index: False)
        return plan


@pytest.mark.parametrize("kind", ["rows", "pages"])
def test_an_e4m3_cache_holds_centered_keys(kind):
    (q, k, v), (c, m) = operands(length=40)
    q, k, v = (x.detach() for x in (q, k, v))
    runtime = _Planned(covering(q, k, v, c, m), (c, m))
    plan = runtime.plan()
    exact, lse = plain.attention(q[:, 32:], k, v)
    pages = {"block_table": torch.tensor([[2, 0, 1], [5, 3, 4]], dtype=torch.int32)} if kind == "pages" else {}
    shape = (6, 16, 2, D) if pages else (2, 48, 2, D)
    caches = [torch.zeros(shape, dtype=torch.uint8).view(_e4m3.E4M3) for _ in range(2)]
    append = lambda plan, a, b: fp8.flash_attn_with_kvcache(
        q[:, a:b], *caches, k[:, a:b], v[:, a:b], cache_seqlens=a, causal=True, plan=plan, return_softmax_lse=True, **pages
    )
    append(plan, 0, 32)
    out, out_lse = append(plan, 32, 40)
    wide = m.repeat_interleave(2, dim=0)
    assert error(out - wide, exact - wide) < 0.15
    assert float((out_lse - lse).abs().max()) < 0.05 * float(lse.abs().max())
    # Tokens that are written with another center belong to another cache.
    other = _Planned(covering(q, k, v, c, m), (-c, m))
    out, _ = append(other.plan(), 32, 40)
    assert error(out - wide, exact - wide) > 0.5


def test_what_is_not_exact_is_refused():
    (q, k, v), (c, m) = operands()
    rows = covering(q, k, v)
    sinks = torch.zeros(HEADS[0])
    for centers in ((c, None), (None, m)):
        with pytest.raises(sigmascale.UnsupportedError, match="sinks"):
            fp8.attention(q, k, v, rows, sinks=sinks, centers=centers)
    with pytest.raises(sigmascale.UnsupportedError, match="soft-cap"):
        fp8.attention(q, k, v, rows, softcap=5.0, centers=(c, None))
    # m is exact under a soft-cap, and a plan's centers are left out where they are not.
    exact, _ = plain.attention(q, k, v, softcap=5.0)
    assert error(fp8.attention(q, k, v, covering(q, k, v, None, m), softcap=5.0, centers=(None, m)), exact) < 0.2
    plan = (held := _Planned(rows, (c, m))).plan()
    with_sinks = fp8.attention(q, k, v, plan, sinks=sinks)
    assert torch.equal(with_sinks, fp8.attention(q, k, v, rows, sinks=sinks)) and held is not None
    with pytest.raises(sigmascale.MismatchError, match="c of centers has shape"):
        fp8.attention(q, k, v, rows, centers=(c[:1], None))
    with pytest.raises(sigmascale.ArgumentError, match="m of centers is torch.float64"):
        fp8.attention(q, k, v, rows, centers=(None, m.double()))
    with pytest.raises(TypeError, match="centers must be"):
        fp8.attention(q, k, v, rows, centers=c)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_center_far_off_costs_accuracy_alone(backend):
    (q, k, v), _ = operands(shift=0.0)
    for seed in range(20):
        far = 1000.0 * torch.randn(HEADS[1], D, generator=torch.Generator().manual_seed(seed))
        rows = covering(q, k, v, far)
        ones = torch.ones_like(v)
        rows[2] = torch.full_like(rows[2], 1 / 256)
        sums, lse = fp8.attention(q, k, ones, rows, backend=backend, centers=(far, None), return_lse=True)
        assert bool((sums.float() - 1).abs().max() < 0.07) and bool(lse.isfinite().all())


def test_rows_without_keys_have_no_center():
    (q, k, v), (c, m) = operands()
    rows = covering(q, k, v, c, m)
    for backend in BACKENDS:
        out, lse = fp8.attention(q, k[:, :9], v[:, :9], rows, backend=backend, centers=(c, m), return_lse=True)
        assert not out[:, :39].any() and bool(out[:, 39:].any()) and bool((lse[:, :, :39] == -torch.inf).all())


def test_compiled_calls_take_centers():
    (q, k, v), centers = operands()
    rows = covering(q, k, v, *centers)
    call = lambda q, k, v: fp8.attention(q, k, v, rows, centers=centers)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), call(q, k, v))


def test_joined_and_subtracted_are_inverse():
    (_, k, v), (c, m) = operands()
    terms = _terms.Terms(True, 1.0, k_center=c, v_center=m)
    out, lse = torch.randn(2, 5, 4, D), torch.zeros(2, 4, 5)
    lse[0, 1, 2] = -torch.inf
    there = _centers.joined(out, lse, terms)
    assert torch.equal(there[0, 2, 1], out[0, 2, 1]) and error(_centers.joined(there, lse, terms, -1), out) < 1e-6
    minus = _centers.subtracted(k, v, (c, m))
    assert all(error(a, b) < 1e-6 for a, b in zip(_centers.restored(*minus, terms), (k, v)))


def qwen():
    """A small model whose keys have a bias, in pairs that are far from a turn within its positions."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    sizes |= {"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    torch.manual_seed(3)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, intermediate_size=128)).eval()
    for layer in model.model.layers:
        with torch.no_grad():
            bias = layer.self_attn.k_proj.bias.zero_()
            bias.view(2, 2, 16)[:, :, 8:] = torch.randn(2, 2, 8) * 2 + 12
            layer.self_attn.v_proj.bias.normal_(0, 2)
    model.set_attn_implementation(fp8.register())
    return model


def test_centers_of_weights_are_those_of_an_export(tmp_path):
    model = qwen()
    model.save_pretrained(tmp_path)
    runtime = fp8.attach(model, center="weights")
    own = sigmascale.centers(tmp_path)
    assert [layer["layer"] for layer in own["layers"]] == [0, 1] and len(own["hash"]) == 16
    for plan, layer in zip(runtime.layers, own["layers"]):
        c, m = plan.centers
        assert m is None and torch.equal(c, torch.tensor(layer["k"])) and bool(c.any())
    given = fp8.attach(model, center=own)
    assert torch.equal(given.layers[1].centers[0], runtime.layers[1].centers[0])
    # Descales cover keys with the center and without.
    plain_rows = fp8.attach(model).descales
    grown = runtime.descales - plain_rows
    largest = runtime.layers[0].centers[0].abs().amax(dim=1) / 448
    assert bool((grown[0, 1] >= largest).all()) and bool((grown[0, 1] <= 1.001 * largest).all())
    assert not grown[:, 0].any() and not grown[:, 2:].any()
    before = runtime.descales.clone()
    runtime.refresh()
    assert torch.equal(runtime.descales, before), "a refresh adds nothing twice"


def test_a_models_output_is_nearer_with_centers():
    model = qwen()
    tokens = torch.arange(60)[None] % 64
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        exact = model(tokens).logits
        model.set_attn_implementation(fp8.register())
        errors = {}
        for center in ("none", "weights", "mean"):
            runtime = fp8.attach(model, center=center)
            for _ in range(9 if center == "mean" else 1):
                out = model(tokens).logits
            runtime.refresh()
            out = model(tokens).logits
            errors[center] = error(out, exact)
    assert errors["weights"] < 0.6 * errors["none"] and errors["mean"] < 0.6 * errors["none"], errors


def test_means_are_taken_once_and_saved():
    model = qwen()
    tokens = lambda seed: torch.randint(64, (4, 70), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        runtime = fp8.attach(model, center="mean")
        c, m = runtime.layers[1].centers
        assert not c.any() and runtime.layers[1].learns_centers
        model(tokens(0))
        runtime.refresh()
        assert not c.any(), "280 tokens are too few"
        model(tokens(1))
        runtime.refresh()
        assert bool(c.any() and m.any()) and not runtime.layers[1].learns_centers
        first = c.clone()
        model(tokens(2))
        runtime.refresh()
        assert torch.equal(c, first)
        state = runtime.state_dict()
        other = fp8.attach(model, center="mean")
        pointer = other.layers[1].centers[0].data_ptr()
        other.load_state_dict(state)
        assert torch.equal(other.layers[1].centers[0], first) and other.layers[1].centers[0].data_ptr() == pointer
        assert torch.allclose(other.descales, runtime.descales, rtol=1e-6)
        merged = fp8.merge_states([state, state])
        assert len(merged["centers"]["rows"]) == 4
        with pytest.raises(sigmascale.MismatchError, match="center 'mean', this runtime 'none'"):
            fp8.attach(model).load_state_dict(state)


def test_what_no_center_can_come_from_is_refused():
    model = qwen()
    with pytest.raises(sigmascale.ArgumentError, match="must be 'none', 'weights', 'mean'"):
        fp8.attach(model, center="median")
    layers = fp8.find_layers(model)
    with pytest.raises(sigmascale.UnsupportedError, match="center=sigmascale.centers"):
        fp8.attach(torch.nn.ModuleList([model]), layers=layers, center="weights")


def test_a_cache_of_generate_holds_centered_keys():
    model = qwen()
    tokens = torch.arange(24)[None] % 64
    with torch.no_grad():
        out = {}
        for center in ("none", "weights"):
            runtime = fp8.attach(model, center=center)
            whole = model(tokens).logits[:, -4:]
            cache = fp8.fp8_cache(runtime)
            model(tokens[:, :20], past_key_values=cache)
            out[center] = error(model(tokens[:, 20:], past_key_values=cache).logits, whole)
    assert out["weights"] < 0.02 and out["none"] < 0.02, out
