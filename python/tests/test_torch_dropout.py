"""Dropout and the bounds: behind a norm it enlarges what the projections read, in front of one it changes nothing."""

import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import sigmascale.torch as fp8  # noqa: E402

WIDTH, P = 64, 0.1
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def bert(p):
    config = transformers.BertConfig(**SIZES, vocab_size=32, hidden_dropout_prob=p, attention_probs_dropout_prob=0.0)
    model = transformers.BertModel(config)
    return model, model.embeddings, [layer.attention.self.query for layer in model.encoder.layer]


def modernbert(p):
    config = transformers.ModernBertDecoderConfig(
        **SIZES, vocab_size=32, embedding_dropout=p, attention_dropout=0.0, mlp_dropout=0.0, pad_token_id=0
    )
    model = transformers.ModernBertDecoderForCausalLM(config)
    return model, model.model.embeddings, [layer.attn.q_proj for layer in model.model.layers]


def gpt2(p):
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_layer=2, n_head=4, vocab_size=32, n_positions=32, embd_pdrop=p, resid_pdrop=p, attn_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config)
    return model, model.transformer.wte, [block.attn.c_attn for block in model.transformer.h]


def largest(model, runtime, projections):
    """The largest q over its bound, by layer: for inputs of one channel, which the first row of each head reads."""
    found = [0.0] * len(projections)

    def note(place):
        def hook(module, args, out):
            q = out[..., :WIDTH].abs().amax((0, 1)).view(4, -1).amax(1)
            bound = 448 * runtime.layers[place].q_descale.flatten()
            found[place] = max(found[place], (q / bound).max().item())

        return hook

    handles = [projection.register_forward_hook(note(place)) for place, projection in enumerate(projections)]
    with torch.no_grad():
        for _ in range(20):
            model(inputs_embeds=1000.0 * torch.eye(WIDTH)[None, :8])
    [handle.remove() for handle in handles]
    return found


def attached(make, p):
    torch.manual_seed(0)
    model, _, projections = make(p)
    with torch.no_grad():
        for projection in projections:
            weight = projection.weight if isinstance(projection, torch.nn.Linear) else projection.weight.t()
            weight[:WIDTH] = 0.0
            weight[:WIDTH:16, 0] = 1.0
            weight[1:WIDTH:16, 1] = 1.0
    return model.eval(), fp8.attach(model), projections


@pytest.mark.parametrize("make", [bert, modernbert])
def test_dropout_behind_the_norm_of_the_embeddings_is_named(make):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*dropout")
        model, runtime, projections = attached(make, P)
        runtime.refresh()
        assert max(largest(model, runtime, projections)) <= 1.0
    model.train()
    with pytest.warns(RuntimeWarning, match=r"layer 0: a dropout of 0\.1 .* model\.eval\(\)") as said:
        runtime.refresh()
    assert said[0].filename == __file__
    # 1 / (1 - p) of the bound without its share for rounding, in the first layer alone.
    first, second = largest(model, runtime, projections)
    assert 1.0 < first <= 1.0 / (1.0 - P) and second <= 1.0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*dropout")
        runtime.refresh()  # It is said once.


@pytest.mark.parametrize(("make", "p"), [(bert, 0.0), (modernbert, 0.0), (gpt2, P)])
def test_other_dropout_is_covered(make, p):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*dropout")
        model, runtime, projections = attached(make, p)
        model.train()
        runtime.refresh()
        assert 0.5 < max(largest(model, runtime, projections)) <= 1.0


def test_policies_that_observe_need_no_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*dropout")
        model, _, _ = bert(P)
        fp8.attach(model.train(), policy="delayed-te")
    with pytest.warns(RuntimeWarning, match="layer 0: a dropout"):
        fp8.attach(model, policy="delayed-te", bound="worst-case")


def test_dropout_of_a_layer_that_is_named():
    model, _, _ = bert(P)
    (layer, *_) = fp8.find_layers(model)
    assert isinstance(layer.dropout, torch.nn.Dropout)
    layer.dropout = P
    with pytest.raises(TypeError, match="layer 0.dropout .*nn.Dropout.* float"):
        fp8.attach(model, layers=[layer])
