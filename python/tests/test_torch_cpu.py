"""What of the PyTorch part needs no GPU: finding layers, the emulated call and its gradients, refusals."""

import pytest

torch = pytest.importorskip("torch")

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402
from sigmascale.torch import _layers  # noqa: E402


def operands(batch=2, length=33, heads=(4, 2), d=32, **options):
    generator = torch.Generator().manual_seed(0)
    make = lambda n: torch.randn(batch, length, n, d, generator=generator).requires_grad_(True)
    return make(heads[0]), make(heads[1]), make(heads[1])


def exact(q, k, v, causal):
    heads = lambda x: x.transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(
        heads(q), heads(k), heads(v), is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2)


def rows(k, value=0.02):
    return [torch.full((k.shape[2],), value) for _ in range(3)]


@pytest.mark.parametrize("causal", [True, False])
def test_forward_and_gradients_follow_exact_attention(causal):
    q, k, v = operands()
    out, lse = fp8.attention(q, k, v, rows(k), causal=causal, return_lse=True)
    reference = exact(q, k, v, causal)
    error = lambda a, b: float((a - b).norm() / b.norm())
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
    from sigmascale.torch import _backends

    seen = [_backends.cast(x, torch.full((2, 2), 0.02)).float() * 0.02 for x in (q, k)]
    logits = seen[0].transpose(1, 2) @ seen[1].repeat_interleave(2, dim=2).permute(0, 2, 3, 1) * 32**-0.5
    logits = logits.masked_fill(_backends.hidden(33, 33, "cpu"), float("-inf"))
    assert torch.allclose(torch.exp(logits - lse[..., None]).sum(dim=3), torch.ones(2, 4, 33), atol=1e-5)


def test_a_descale_that_is_too_small_saturates_and_is_counted():
    from sigmascale.torch import _backends

    words = torch.zeros(2, 4, dtype=torch.int32)
    x = torch.tensor([1.0, -449.0, 470.0, float("nan")]).view(1, 1, 2, 2)
    eight = _backends.cast(x, torch.ones(1, 2), words)
    assert eight.float()[0, 0, 0].tolist() == [1.0, -448.0] and eight.float()[0, 0, 1, 0] == 448.0
    assert words[:, 1:].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert words[0, 0].view(torch.float32) == 449.0


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
        ("do not fit", lambda q, k, v: (q, k, v[:, :-1])),
        ("no multiple", lambda q, k, v: (q[:, :, :3], k, v)),
        ("it is cast here", lambda q, k, v: (q.to(torch.float8_e4m3fn), k, v)),
    ],
)
def test_bad_operands_are_refused_by_what_to_do(message, change):
    q, k, v = operands()
    with pytest.raises(ValueError, match=message):
        fp8.attention(*(x.detach() for x in change(q, k, v)), rows(k))


def test_the_probe_passes_the_emulated_call():
    def call(q, k, v, q_descale, k_descale, v_descale):
        backend = fp8.backend("emulated")
        return backend.forward(q, k, v, (q_descale, k_descale, v_descale), False, 64**-0.5, operands=(q, k, v))[0]

    assert sigmascale.probe(call, device="cpu").ok
    assert sigmascale.probe(lambda q, k, v, a, b, c: call(q, k, v, a, 1 / b, c), device="cpu").k == "inverted"


def test_unknown_words_are_refused():
    model = torch.nn.Linear(3, 3)
    with pytest.raises(sigmascale.UnsupportedError, match="no Hugging Face config"):
        fp8.attach(model)
    with pytest.raises(ValueError, match="policy 'magic'"):
        fp8.attach(model, policy="magic")
    with pytest.raises(ValueError, match="bound 'rank-aware'"):
        fp8.attach(model, bound="rank-aware")
    with pytest.raises(ValueError, match="no attention layers"):
        fp8.attach(model, layers=[])
    weight = torch.zeros(64, 64)
    layer = fp8.Layer(q=weight, k=weight, v=weight, n_q_heads=2, n_kv_heads=2)
    with pytest.raises(ValueError, match="move the model to a GPU"):
        fp8.attach(model, layers=[layer])
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
    # Conv1D is read through its transpose.
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_head=4, n_layer=1, vocab_size=100))
    (entry,) = _layers.entries(_layers.find(gpt2)[0])
    assert (entry["v"].row_stride, entry["v"].col_stride, entry["mean_removed"]) == (1, 192, True)
