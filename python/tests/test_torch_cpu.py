"""What of the PyTorch part needs no GPU: finding layers, the emulated call and its gradients, refusals."""

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch")

import plain  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402
from sigmascale.torch import _layers, _terms  # noqa: E402
from sigmascale.torch._plan import LayerPlan  # noqa: E402


def operands(batch=2, length=33, heads=(4, 2), d=32, **options):
    generator = torch.Generator().manual_seed(0)
    make = lambda n: torch.randn(batch, length, n, d, generator=generator).requires_grad_(True)
    return make(heads[0]), make(heads[1]), make(heads[1])


def rows(k, value=0.02):
    return [torch.full((k.shape[2],), value) for _ in range(3)]


@pytest.mark.parametrize("causal", [True, False])
def test_forward_and_gradients_follow_exact_attention(causal):
    q, k, v = operands()
    out, lse = fp8.attention(q, k, v, rows(k), causal=causal, return_lse=True)
    reference, _ = plain.attention(q, k, v, causal=causal)
    error = lambda a, b: float((a - b).detach().norm() / b.detach().norm())
    assert out.dtype == torch.bfloat16 and lse.shape == (2, 4, 33)
    assert error(out, reference) < 0.06
    direction = torch.randn_like(reference)
    ours = torch.autograd.grad(out, (q, k, v), direction.bfloat16())
    theirs = torch.autograd.grad(reference, (q, k, v), direction)
    assert all(error(a, b) < 0.07 for a, b in zip(ours, theirs))
    assert all(a.dtype == x.dtype for a, x in zip(ours, (q, k, v)))


def test_the_backward_softmax_sums_to_one():
    q, k, v = operands()
    _, lse = fp8.attention(q, k, v, rows(k), return_lse=True)
    from sigmascale.torch import _e4m3

    seen = [_e4m3.cast(x, torch.full((2, 2), 0.02)).float() * 0.02 for x in (q, k)]
    logits = seen[0].transpose(1, 2) @ seen[1].repeat_interleave(2, dim=2).permute(0, 2, 3, 1) * 32**-0.5
    logits = logits.masked_fill(_terms.hidden(33, 33, "cpu"), float("-inf"))
    assert torch.allclose(torch.exp(logits - lse[..., None]).sum(dim=3), torch.ones(2, 4, 33), atol=1e-3)


def test_a_descale_that_is_too_small_saturates_and_is_counted():
    from sigmascale.torch import _e4m3

    words = torch.zeros(2, 4, dtype=torch.int32)
    x = torch.tensor([[1.0, -449.0, 448.0], [470.0, float("nan"), float("-inf")]]).view(1, 1, 2, 3)
    eight = _e4m3.cast(x, torch.ones(1, 2), words).float()
    assert eight[0, 0, 0].tolist() == [1.0, -448.0, 448.0] and eight[0, 0, 1, 0] == 448.0
    assert words[:, 1:].tolist() == [[1, 0, 0], [1, 1, 2]]
    assert words[0, 0].view(torch.float32) == 449.0


def test_counts_stop_at_the_largest_that_a_word_holds():
    from sigmascale.torch import _e4m3, _telemetry

    words = torch.zeros(1, 4, 4, dtype=torch.int32)
    x = torch.full((1, 4, 1, 8), 500.0)
    # 32 of them overflow; one head stands 31 in front of the end, which reads as a negative int32.
    words[0, 1, 1:] = torch.tensor([-32, -33, 0])
    _e4m3.cast(x, torch.ones(1, 1), words[0, 1:2])
    _e4m3.cast(x, torch.ones(1, 1), words[0, 2:3])
    assert words[0, 1, 1:].tolist() == [-1, -1, 0]
    _, counts = _telemetry.folded(words, 1, 1)
    assert counts[0, :, 0].tolist() == [[2**32 - 1, 2**32 - 1, 0], [32, 32, 0], [0, 0, 0]]


def test_layers_have_short_reprs():
    weight = torch.zeros(64, 64)
    layer = fp8.Layer(q=weight, k=weight[:32], v=weight[:32], n_q_heads=4, n_kv_heads=2, name="layer 3")
    assert repr(layer) == "<sigmascale Layer layer 3: 4 query and 2 KV heads of 16>"


def test_every_head_is_cast_by_its_own_descale():
    q, k, v = operands()
    even, own = rows(k), [torch.tensor([0.01, 0.05]), torch.tensor([0.08, 0.02]), torch.tensor([0.03, 0.2])]
    out, reference = (fp8.attention(q, k, v, row).float() for row in (own, even))
    assert float((out - reference).detach().norm() / reference.detach().norm()) < 0.08
    by_sequence = [torch.stack([row, row.flip(0)]) for row in own]
    assert torch.equal(fp8.attention(q, k, v, by_sequence)[0], fp8.attention(q, k, v, own)[0])


def test_the_weights_of_the_softmax_are_rounded_to_e4m3():
    q, v = torch.ones(1, 1, 1, 16), torch.zeros(1, 2, 1, 16)
    k = torch.stack([torch.full((1, 1, 16), 0.25), torch.full((1, 1, 16), 0.25 - 0.0625)], dim=1)
    v[:, 1] = 1.0
    out = fp8.attention(q, k, v, [torch.tensor([2.0**-6])] * 3, causal=False).float()
    p = torch.exp(torch.tensor(-0.25))
    exact, rounded = p / (1 + p), (256 * p).to(torch.float8_e4m3fn).float() / 256 / (1 + p)
    assert torch.equal(out[0, 0, 0, 0], rounded.bfloat16().float()) and abs(rounded - exact) > 0.01


def test_rows_that_see_no_key_are_zero_and_give_no_gradient():
    q, k, v = (x.detach() for x in operands())
    k, v = k[:, :20].requires_grad_(True), v[:, :20].requires_grad_(True)
    q.requires_grad_(True)
    out, lse = fp8.attention(q, k, v, rows(k), return_lse=True)
    assert (out[:, :13] == 0).all() and (lse[:, :, :13] == -torch.inf).all() and torch.isfinite(lse[:, :, 13:]).all()
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(torch.isfinite(grad).all() for grad in grads) and (grads[0][:, :13] == 0).all()
    assert (grads[0][:, 14:] != 0).any()


def test_unequal_lengths_align_to_the_last_key():
    q, k, v = operands()
    whole = fp8.attention(q, k, v, rows(k))
    last = fp8.attention(q[:, -1:], k, v, rows(k))
    assert torch.allclose(whole[:, -1:].float(), last.float(), atol=1e-2)


def test_the_drop_in_has_the_arguments_of_pytorch():
    q, k, v = operands()
    heads = lambda x: x.transpose(1, 2)
    out = fp8.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True, enable_gqa=True, plan=rows(k))
    assert torch.equal(out, heads(fp8.attention(q, k, v, rows(k))).float())
    with pytest.raises(ValueError, match="enable_gqa"):
        fp8.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True, plan=rows(k))
    with pytest.raises(sigmascale.UnsupportedError, match="mask"):
        fp8.scaled_dot_product_attention(heads(q), heads(q), heads(q), attn_mask=torch.ones(33, 33), plan=rows(q))
    with pytest.raises(sigmascale.UnsupportedError, match="dropout"):
        fp8.scaled_dot_product_attention(heads(q), heads(q), heads(q), dropout_p=0.1, plan=rows(q))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (r"\.contiguous\(\)", lambda q, k, v: (q.transpose(2, 3).contiguous().transpose(2, 3), k, v)),
        ("batch, seq, heads", lambda q, k, v: (q[0], k, v)),
        ("one type", lambda q, k, v: (q, k.double().half(), v)),
        ("same length", lambda q, k, v: (q, k, v[:, :-1])),
        ("not a multiple", lambda q, k, v: (q[:, :, :3], k, v)),
        ("give it as bfloat16", lambda q, k, v: (q.double(), k, v)),
    ],
)
def test_bad_operands_are_refused_by_what_to_do(message, change):
    q, k, v = operands()
    with pytest.raises(ValueError, match=message):
        fp8.attention(*(x.detach() for x in change(q, k, v)), rows(k))


def test_the_probe_passes_the_emulated_call():
    def call(q, k, v, q_descale, k_descale, v_descale):
        backend = fp8.backend("emulated")
        return backend.forward(q, k, v, (q_descale, k_descale, v_descale), _terms.Terms(False, 64**-0.5))[0]

    assert sigmascale.probe(call, device="cpu").ok
    assert sigmascale.probe(lambda q, k, v, a, b, c: call(q, k, v, a, 1 / b, c), device="cpu").k == "inverted"


def test_unknown_words_are_refused():
    model = torch.nn.Linear(3, 3)
    with pytest.raises(sigmascale.UnsupportedError, match="no Hugging Face config"):
        fp8.attach(model)
    with pytest.raises(ValueError, match="policy 'magic'"):
        fp8.attach(model, policy="magic")
    with pytest.raises(TypeError, match="a policy must be a name or AutoC"):
        fp8.attach(model, policy=sigmascale.AutoC)
    with pytest.raises(ValueError, match="kappa 0.5 must be"):
        fp8.attach(model, policy=sigmascale.AutoC(kappa=0.5))
    with pytest.raises(ValueError, match="margin 1.5 must be"):
        fp8.attach(model, policy=sigmascale.DelayedPaper(margin=1.5))
    with pytest.raises(ValueError, match="delta 2"):
        fp8.attach(model, policy="geometry-c-star", tail=sigmascale.Tail(delta=2.0))
    with pytest.raises(ValueError, match="eta 1.5 must be"):
        fp8.attach(model, tail=sigmascale.Tail(eta=1.5))
    with pytest.raises(TypeError, match="tail .*sigmascale.Tail.* {}"):
        fp8.attach(model, tail={})
    with pytest.raises(ValueError, match="bound 'rank-aware'"):
        fp8.attach(model, bound="rank-aware")
    with pytest.raises(ValueError, match="no attention layers"):
        fp8.attach(model, layers=[])
    weight = torch.zeros(64, 64)
    layer = fp8.Layer(q=weight, k=weight, v=weight, n_q_heads=2, n_kv_heads=2)
    layer.q = torch.zeros(64, 64, device="meta")
    with pytest.raises(ValueError, match="meta device"):
        fp8.attach(model, layers=[layer])
    with pytest.raises(ValueError, match="backend 'magic'"):
        fp8.backend("magic")


def test_layers_are_found_by_the_family_table():
    transformers = pytest.importorskip("transformers")
    common = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 100,
    }
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, num_key_value_heads=2))
    found = _layers.find(llama)
    assert (
        found[1].q is llama.model.layers[1].self_attn.q_proj.weight
        and found[1].module is llama.model.layers[1].self_attn
    )
    assert found[0].gain is llama.model.layers[0].input_layernorm.weight and found[0].rotary == 16
    # Query, key and value interleaved by head in one weight: one entry a head.
    neox = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**common))
    entries = _layers.entries(_layers.find(neox)[0])
    start = neox.gpt_neox.layers[0].attention.query_key_value.weight.data_ptr()
    assert [(e["k"].ptr - start) // 4 for e in entries] == [(48 * head + 16) * 64 for head in range(4)]
    # The same with two query heads for each key and value.
    config = transformers.FalconConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=100,
        new_decoder_architecture=True,
        num_kv_heads=2,
    )
    falcon = transformers.FalconForCausalLM(config)
    entries = _layers.entries(_layers.find(falcon)[0])
    start = falcon.transformer.h[0].self_attention.query_key_value.weight.data_ptr()
    places = [[(e[key].ptr - start) // (4 * 64 * 16) for e in entries] for key in "qkv"]
    assert places == [[0, 4], [2, 6], [3, 7]] and [(e["n_q"], e["n_kv"]) for e in entries] == [(2, 1)] * 2
    # Conv1D is read through its transpose.
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_head=4, n_layer=1, vocab_size=100))
    (entry,) = _layers.entries(_layers.find(gpt2)[0])
    assert (entry["v"].row_stride, entry["v"].col_stride, entry["mean_removed"]) == (1, 192, True)


def small(kind="Llama", **options):
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**common, vocab_size=100, **options)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize(
    ("kind", "what", "more"),
    [
        ("Persimmon", "a shift", {}),
        ("StableLm", "a tensor for each head", {"qk_layernorm": True, "num_key_value_heads": 2}),
    ],
)
def test_norms_of_q_and_k_that_are_not_read_are_named(kind, what, more):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = getattr(transformers, f"{kind}Config")(**sizes, vocab_size=32, **more)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(sigmascale.UnsupportedError, match=f"family {kind.lower()} .* with {what}, .*calibrate"):
        fp8.attach(model)


def test_a_model_in_memory_is_calibrated_from_its_state_dict(tmp_path):
    model = small(num_key_value_heads=2).bfloat16()
    model.save_pretrained(tmp_path)
    assert (
        sigmascale.calibrate(model.config, weights=model.state_dict())["layers"]
        == sigmascale.calibrate(tmp_path)["layers"]
    )


def test_autocast_gives_operands_one_type():
    q, k, v = operands()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = fp8.attention(q, k, v.bfloat16(), rows(k), return_lse=True)
    plain, plain_lse = fp8.attention(*(x.bfloat16() for x in (q, k, v)), rows(k), return_lse=True)
    # Inside, nothing is lowered further.
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    with torch.autocast("cpu", torch.bfloat16):
        ours = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    theirs = torch.autograd.grad(plain.float().square().sum(), (q, k, v))
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(ours, theirs))


def test_the_default_dtype_of_pytorch_changes_nothing():
    q, k, v = operands()
    out, lse = fp8.attention(q, k, v, rows(k), return_lse=True)
    descales = rows(k)
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            again, again_lse = fp8.attention(q, k, v, descales, return_lse=True)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(out, again) and torch.equal(lse, again_lse) and again_lse.dtype == torch.float32


def test_gradients_of_gradients_are_refused():
    q, k, v = operands()
    (grad,) = torch.autograd.grad(fp8.attention(q, k, v, rows(k)).float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        grad.sum().backward()


def test_a_plan_that_changes_before_the_backward_is_noticed():
    q, k, v = operands()
    plan = rows(k)
    out = fp8.attention(q, k, v, plan)
    plan[1].mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        out.float().sum().backward()


@pytest.mark.parametrize(
    ("kind", "message", "plan", "options"),
    [
        (TypeError, "three descales", None, {}),
        (TypeError, "three descales", [torch.ones(2)] * 2, {}),
        (TypeError, "must be a tensor, not float", [0.1, 0.1, 0.1], {}),
        (sigmascale.MismatchError, r"\(3,\)", [torch.ones(3)] * 3, {}),
        (ValueError, "float32 on", [torch.ones(2, dtype=torch.float64)] * 3, {}),
        (ValueError, "softmax_scale 0", [torch.ones(2)] * 3, {"softmax_scale": 0}),
        (ValueError, "softmax_scale nan", [torch.ones(2)] * 3, {"softmax_scale": float("nan")}),
        (TypeError, "softmax_scale must be a number", [torch.ones(2)] * 3, {"softmax_scale": "1"}),
        (ValueError, "backend 'magic'", [torch.ones(2)] * 3, {"backend": "magic"}),
    ],
)
def test_bad_plans_and_options_are_refused(kind, message, plan, options):
    q, k, v = (x.detach() for x in operands())
    with pytest.raises(kind, match=message):
        fp8.attention(q, k, v, plan, **options)


def test_operands_that_are_no_tensors_or_without_keys_are_refused():
    q, k, v = (x.detach() for x in operands())
    with pytest.raises(ValueError, match="not NoneType"):
        fp8.attention(None, k, v, rows(k))
    with pytest.raises(ValueError, match="nothing to attend"):
        fp8.attention(q, k[:, :0], v[:, :0], rows(k))
    # No sequences and no queries are calls with an empty result.
    assert fp8.attention(q[:0], k[:0], v[:0], rows(k)).shape == q[:0].shape
    assert fp8.attention(q[:, :0], k, v, rows(k)).shape == q[:, :0].shape
    with pytest.raises(ValueError, match="dimensions in front of the heads must agree"):
        fp8.scaled_dot_product_attention(q[0], k, v, plan=rows(k))
    with pytest.raises(ValueError, match="value must be .* not NoneType"):
        fp8.scaled_dot_product_attention(q, k, None, plan=rows(k))


@pytest.mark.parametrize(
    ("kind", "message", "change"),
    [
        (TypeError, "must be the weight, a tensor, not Linear", {"k": torch.nn.Linear(8, 8)}),
        (ValueError, "shape", {"v": torch.zeros(64)}),
        (TypeError, "n_q_heads must be an integer", {"n_q_heads": "4"}),
        (ValueError, "n_kv_heads 0", {"n_kv_heads": 0}),
        (ValueError, "not a multiple", {"n_kv_heads": 3}),
        (ValueError, "rotary 5", {"rotary": 5}),
        (ValueError, "rotary 64", {"rotary": 64}),
        (ValueError, "softmax_scale 0.0", {"softmax_scale": 0.0}),
        (ValueError, "rope_factor nan", {"rope_factor": float("nan")}),
        (ValueError, "together or not at all", {"q_norm": torch.ones(16)}),
        (TypeError, "gain must be a tensor or None", {"gain": torch.nn.LayerNorm(64)}),
        (sigmascale.UnsupportedError, "float64.*cast the model", {"q": torch.zeros(64, 64, dtype=torch.float64)}),
    ],
)
def test_layers_that_cannot_be_are_refused(kind, message, change):
    weight = torch.zeros(64, 64)
    named = {"q": weight, "k": weight, "v": weight, "n_q_heads": 4, "n_kv_heads": 4} | change
    with pytest.raises(kind, match=message):
        _layers.check([fp8.Layer(**named)])


def test_what_is_no_model_or_layer_is_refused():
    for model in (None, "gpt2", torch.zeros(3)):
        with pytest.raises(TypeError, match="must be a torch.nn.Module"):
            fp8.attach(model)
    with pytest.raises(TypeError, match="sigmascale.torch.Layer"):
        fp8.attach(torch.nn.Linear(3, 3), layers=[torch.zeros(3, 3)])
    with pytest.raises(TypeError, match="sigmascale.torch.Layer.* Linear"):
        fp8.attach(torch.nn.Linear(3, 3), layers=[torch.nn.Linear(3, 3)])
    with pytest.raises(ValueError, match="backend 'magic'"):
        fp8.attach(small(), backend="magic")
    with pytest.raises(TypeError, match="what attach.. returned"):
        fp8.patched(None)


def test_names_of_wrappers_are_seen_through():
    model = small(num_key_value_heads=2)
    bare = [layer.q for layer in _layers.find(model)]

    class Wrapper(torch.nn.Module):
        def __init__(self, inside):
            super().__init__()
            self._checkpoint_wrapped_module = inside

    model.model.layers[1].self_attn = Wrapper(model.model.layers[1].self_attn)
    found = _layers.find(model)
    assert all(layer.q is weight for layer, weight in zip(found, bare))
    assert found[1].module is model.model.layers[1].self_attn._checkpoint_wrapped_module


def test_the_package_gives_its_pytorch_part_when_asked():
    assert sigmascale.torch is fp8 and fp8.te.recipe
    with pytest.raises(sigmascale.UnsupportedError, match="TransformerEngine"):
        fp8.te.recipe(None, {})


def test_layers_without_rotation_may_have_no_norm_of_q_and_k():
    transformers = pytest.importorskip("transformers")
    config = transformers.Llama4TextConfig(
        hidden_size=64, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=50, max_position_embeddings=64, moe_layers=[], pad_token_id=0,
        use_qk_norm=True, attn_temperature_tuning=False, no_rope_layer_interval=2,
    )  # fmt: skip
    rotated, fixed = _layers.find(transformers.Llama4ForCausalLM(config))
    assert rotated.q_norm is not None and rotated.k_norm is not None
    assert fixed.q_norm is None and fixed.k_norm is None and fixed.rotary == 0
    assert (rotated.query_factor, fixed.query_factor, rotated.positions, fixed.positions) == (1.0, 1.0, None, None)


def llama4():
    transformers = pytest.importorskip("transformers")
    config = transformers.Llama4TextConfig(
        hidden_size=64, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=50, max_position_embeddings=64, moe_layers=[], pad_token_id=0,
        use_qk_norm=True, no_rope_layer_interval=2, attn_temperature_tuning=True, attn_scale=0.5, floor_scale=13,
    )  # fmt: skip
    return transformers.Llama4ForCausalLM(config)


def ministral3():
    transformers = pytest.importorskip("transformers")
    settings = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.3}
    config = transformers.Ministral3Config(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=50, max_position_embeddings=64, pad_token_id=0,
        rope_parameters=settings | {"original_max_position_embeddings": 8},
    )  # fmt: skip
    return transformers.Ministral3ForCausalLM(config)


def test_factors_of_queries_that_grow_are_those_of_the_last_position():
    rotated, fixed = _layers.find(llama4())
    assert (rotated.query_factor, rotated.positions, fixed.positions) == (1.0, None, 64)
    assert fixed.query_factor == 1 + 0.5 * math.log(1 + 64 // 13)
    for layer in _layers.find(ministral3()):
        assert layer.query_factor == 1 + 0.3 * math.log(1 + 63 // 8) and layer.positions == 64
    for key, value in [("query_factor", 0.0), ("query_factor", math.nan), ("positions", 0)]:
        with pytest.raises(sigmascale.ArgumentError, match=key):
            _layers._check_values(dataclasses.replace(fixed, **{key: value}))


@pytest.mark.parametrize("make", [llama4, ministral3])
def test_queries_reach_an_attention_call_with_their_factor(make):
    """The bounds are of such queries, and casts do not multiply."""
    model, seen = make().eval(), []
    layers = _layers.find(model)

    def spy(module, query, key, value, mask, **kwargs):
        seen.append((module, query))
        return torch.zeros_like(query).transpose(1, 2), None

    transformers = pytest.importorskip("transformers")
    transformers.AttentionInterface.register("spy", spy)
    transformers.masking_utils.AttentionMaskInterface.register("spy", transformers.masking_utils.sdpa_mask)
    model.set_attn_implementation("spy")
    # Attention that gives nothing leaves every position with the same token, and norms of q alike but for the factor.
    with torch.no_grad():
        model(torch.full((1, 64), 7))
    for layer, (module, query) in zip(layers, seen, strict=True):
        assert module is layer.module
        norms = query.norm(dim=3)[0]
        growth = norms[:, -1] / norms[:, 0]
        torch.testing.assert_close(growth, torch.full_like(growth, layer.query_factor), rtol=1e-3, atol=0)


def test_more_keys_than_queries_are_bounded_for_are_refused():
    class Plan(LayerPlan):
        def __init__(self):
            self.name, self.positions = "layer 3", 16
            self.n_q_heads, self.n_kv_heads, self.d_head = 2, 1, 16

    q, k = torch.zeros(1, 17, 2, 16), torch.zeros(1, 17, 1, 16)
    with pytest.raises(sigmascale.MismatchError, match="17 keys.*layer 3 .*16"):
        fp8.attention(q, k, k, Plan())


def test_packed_sequences_may_have_more_keys_together():
    runtime = fp8.attach(ministral3())
    plan = runtime.layers[0]
    q, k = (torch.randn(100, n, plan.d_head) for n in (plan.n_q_heads, plan.n_kv_heads))
    pack = lambda *ends: torch.tensor([0, *ends], dtype=torch.int32)
    fp8.flash_attn_varlen_func(q, k, k, pack(50, 100), pack(50, 100), 50, 50, causal=True, plan=plan)
    with pytest.raises(sigmascale.MismatchError, match="70 keys.*bounds for 64"):
        fp8.flash_attn_varlen_func(q, k, k, pack(70, 100), pack(70, 100), 70, 70, causal=True, plan=plan)


def test_weights_on_the_cpu_get_the_scales_of_their_checkpoint(tmp_path):
    for kind, options in [("Llama", {"num_key_value_heads": 2}), ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16})]:
        model = small(kind, **options).bfloat16()
        model.save_pretrained(tmp_path / kind)
        rows = sigmascale.descales(sigmascale.calibrate(tmp_path / kind))
        runtime = fp8.attach(model, bound="worst-case")
        assert runtime.bound == "worst-case"
        for place, name in enumerate("qkvo"):
            assert runtime.descales[:, place].tolist() == rows[name].tolist()
        assert runtime.logit_descales.tolist() == rows["logit"].tolist()
        runtime.check()


def test_layers_by_hand_on_the_cpu_are_those_of_the_table():
    """A fused weight stored by its inputs, biases, and the largest factor on queries."""
    model = small("Qwen2", num_key_value_heads=2)
    found = fp8.attach(model)
    layers = []
    for block in model.model.layers:
        a = block.self_attn
        fused = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]).detach()
        biases = {f"{key}_bias": getattr(a, f"{key}_proj").bias for key in "qkv"}
        q, k, v = fused.t().contiguous().t().split([64, 32, 32])
        layers.append(
            fp8.Layer(q=q, k=k, v=v, **biases, n_q_heads=4, n_kv_heads=2, gain=block.input_layernorm.weight, rotary=16)
        )
    assert torch.equal(fp8.attach(model, layers=layers).descales, found.descales)
    grown = [dataclasses.replace(layer, query_factor=1.5, positions=9) for layer in layers]
    ratio = fp8.attach(model, layers=grown).descales / found.descales
    assert (ratio[:, 0] > 1.49).all() and (ratio[:, 1:] == 1).all()


@pytest.mark.parametrize("policy", fp8.POLICIES)
def test_runtimes_on_the_cpu_go_through_steps(policy):
    model = small(num_key_value_heads=2)
    runtime = fp8.attach(model, policy=policy, bound="worst-case", backend="emulated")
    model.set_attn_implementation(fp8.register())
    tokens, optimizer = torch.arange(48).view(2, 24), torch.optim.SGD(model.parameters(), lr=1.0)
    address, before = runtime.descales.data_ptr(), runtime.descales.clone()
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        assert (runtime.stats()["amax"] > 0).all()
        optimizer.step()
        runtime.refresh()
    assert runtime.descales.data_ptr() == address and (runtime.stats()["amax"] == 0).all()
    assert policy == "current" or not torch.equal(runtime.descales, before)
    again = fp8.attach(model, policy=policy, bound="worst-case", backend="emulated")
    again.load_state_dict(runtime.state_dict())
    assert torch.equal(again.descales, runtime.descales) and torch.equal(again.logits, runtime.logits)
    if policy == "auto-c":
        assert (runtime.slack()["q"]["min"] > 1).all()


def test_weights_that_are_not_finite_are_named_on_the_cpu():
    model = small(num_key_value_heads=2)
    runtime = fp8.attach(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 4] = float("nan")
    with pytest.raises(sigmascale.NonFiniteError, match="k head 0 channel 3"):
        runtime.refresh()


def test_functions_that_return_a_layer_are_read_again_when_weights_move():
    weight = torch.nn.Linear(64, 64, bias=False)
    layer = lambda: fp8.Layer(q=weight.weight, k=weight.weight[:32], v=weight.weight[32:], n_q_heads=4, n_kv_heads=2)
    runtime = fp8.attach(weight, layers=[layer])
    before = runtime.descales.clone()
    weight.weight = torch.nn.Parameter(2 * weight.weight.detach())
    runtime.refresh()
    torch.testing.assert_close(runtime.descales, 2 * before)
    with pytest.raises(TypeError, match="sigmascale.torch.Layer.* Linear"):
        fp8.attach(weight, layers=[lambda: weight])
    narrow = lambda: fp8.Layer(q=weight.weight, k=weight.weight, v=weight.weight, n_q_heads=32, n_kv_heads=32)
    with pytest.raises(ValueError, match="d_head 2 must be a multiple of 8"):
        fp8.attach(weight, layers=[narrow])


def test_a_runtime_does_not_keep_its_model_alive():
    import gc

    model = small(num_key_value_heads=2)
    runtime = fp8.attach(model)
    del model
    gc.collect()
    with pytest.raises(sigmascale.SigmascaleError, match="model was deleted"):
        runtime.refresh()
    assert runtime._tensors is None


def test_models_and_meta_tensors_say_what_to_pass():
    with pytest.raises(TypeError, match="Linear: pass model.config, and weights=model.state_dict"):
        sigmascale.calibrate(torch.nn.Linear(3, 3))
    with pytest.raises(sigmascale.ArgumentError, match="weights: x is on the meta device"):
        sigmascale.calibrate({}, weights={"x": torch.zeros(3, device="meta")})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_probe_without_a_gpu_says_so():
    with pytest.raises(sigmascale.CudaError, match="device 'cuda': PyTorch finds no GPU"):
        sigmascale.probe(lambda *_: None)


def test_a_mean_of_residual_streams_is_left_to_the_cpu_functions():
    transformers = pytest.importorskip("transformers")
    if "qwen4_exp_text" not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no Qwen4-Exp")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "vocab_size": 32}
    sizes |= {"layer_types": ["qwen_sparse_attention"], "num_experts": 2, "num_experts_per_tok": 1, "hc_lowrank": 8}
    sizes |= {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
    config = transformers.CONFIG_MAPPING["qwen4_exp_text"](**sizes, indexer_compress_ratio=2, moe_intermediate_size=32)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(sigmascale.UnsupportedError, match="mean of residual streams are bounded on the CPU only"):
        fp8.find_layers(model)
