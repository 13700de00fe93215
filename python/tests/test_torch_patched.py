"""Modules that call ``F.scaled_dot_product_attention`` by its name, inside ``patched``, on the CPU."""

import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402


def error(a, b):
    return float((a - b).detach().double().norm() / b.detach().double().norm())


class Block(torch.nn.Module):
    """A norm, and PyTorch's attention module."""

    def __init__(self, **call):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.attention = torch.nn.LayerNorm(64), torch.nn.MultiheadAttention(64, 4, batch_first=True)
        self.call = call

    def forward(self, x):
        x = self.norm(x)
        return self.attention(x, x, x, **self.call)[0]


def of_multihead(attention, norm):
    q, k, v = attention.in_proj_weight.chunk(3)
    biases = dict(zip(("q_bias", "k_bias", "v_bias"), attention.in_proj_bias.chunk(3)))
    heads = attention.num_heads
    return fp8.Layer(q, k, v, heads, heads, norm="layer", gain=norm.weight, shift=norm.bias, module=attention, **biases)


PADDING = torch.arange(10)[None] >= torch.tensor([[7], [10]])
CAUSAL = torch.ones(10, 10, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    "call",
    [{}, {"key_padding_mask": PADDING}, {"attn_mask": CAUSAL}, {"attn_mask": CAUSAL, "key_padding_mask": PADDING}],
    ids=lambda call: "+".join(call) or "plain",
)
@pytest.mark.parametrize("trains", [True, False])
def test_multihead_attention_runs_in_fp8(call, trains):
    """Its masks are copied for each head. Without gradients it has a fast path, which makes no call."""
    block = Block(need_weights=False, **call).train(trains)
    runtime = fp8.attach(block, layers=[of_multihead(block.attention, block.norm)])
    x = torch.randn(2, 10, 64)
    with torch.set_grad_enabled(trains):
        expected, before = block(x), torch.backends.mha.get_fastpath_enabled()
        with fp8.patched(runtime):
            ours = block(x)
    assert 0.001 < error(ours, expected) < 0.06 and runtime.stats()["calls"].keys() == {"native"}
    assert torch.backends.mha.get_fastpath_enabled() == before


@torch.no_grad()
def test_an_encoder_layer_takes_no_fast_path():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True, norm_first=True).eval()
    runtime = fp8.attach(layer, layers=[of_multihead(layer.self_attn, layer.norm1)])
    x = torch.randn(2, 10, 64)
    with fp8.patched(runtime):
        ours = layer(x)
    assert not torch.equal(ours, layer(x)) and runtime.stats()["calls"].keys() == {"native"}


def test_a_module_that_makes_no_call_is_named():
    block = Block()
    runtime = fp8.attach(block, layers=[of_multihead(block.attention, block.norm)])
    x = torch.randn(2, 10, 64)
    with fp8.patched(runtime), pytest.warns(RuntimeWarning, match="MultiheadAttention .*FP8"):
        block(x)
    assert runtime.stats()["calls"] == {}
    with fp8.patched(runtime), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="shape"):
            block(torch.randn(2, 10, 64, 1))


def test_a_module_that_the_compiler_takes_whole_is_named():
    block = Block(need_weights=False)
    runtime = fp8.attach(block, layers=[of_multihead(block.attention, block.norm)])
    torch._dynamo.reset()
    compiled, x = torch.compile(block, backend="aot_eager"), torch.randn(2, 10, 64)
    with fp8.patched(runtime), pytest.warns(RuntimeWarning, match="MultiheadAttention .*torch.compile"):
        compiled(x)
    assert runtime.stats()["calls"] == {}


@pytest.mark.parametrize(
    "heads",
    [{"multi_query": True}, {"multi_query": False}, {"new_decoder_architecture": True, "num_kv_heads": 2}],
    ids=str,
)
@torch.no_grad()
def test_falcon_spreads_its_kv_heads_over_the_queries(heads):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.FalconConfig(**sizes, alibi=False, **heads)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.1)
    runtime, ids = fp8.attach(model), torch.randint(0, 64, (2, 12))
    expected = model(ids).logits
    with fp8.patched(runtime):
        ours = model(ids).logits
    assert 0.001 < error(ours, expected) < 0.06
    assert runtime.stats()["calls"].keys() == {"native"}


def test_heads_that_differ_are_no_repetition():
    torch.manual_seed(0)
    q, k, v = (torch.nn.Linear(64, n, bias=False).weight for n in (64, 32, 32))
    runtime = fp8.attach(torch.nn.Module(), layers=[fp8.Layer(q, k, v, 4, 2)])
    plan, x = runtime.layers[0], torch.randn(2, 4, 12, 16)
    once = x[:, :2]
    grouped = fp8.scaled_dot_product_attention(x, once, once, is_causal=True, enable_gqa=True, plan=plan)
    repeated = once.repeat_interleave(2, dim=1)
    assert torch.equal(fp8.scaled_dot_product_attention(x, repeated, repeated, is_causal=True, plan=plan), grouped)
    with pytest.raises(sigmascale.MismatchError, match="key has 4 heads.* 2 KV heads"):
        fp8.scaled_dot_product_attention(x, x, x, is_causal=True, plan=plan)
