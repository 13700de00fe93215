"""Text parts of vision-language models, on the CPU: small models with random weights against PyTorch's attention."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402

TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"intermediate_size": 64, "vocab_size": 64}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
VISION |= {"image_size": 32, "patch_size": 16}
IMAGE = 60


def llava():
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=IMAGE,
        image_seq_length=4,
    )


def smolvlm():
    return transformers.SmolVLMConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=VISION, image_token_id=IMAGE, scale_factor=1
    )


def gemma3():
    text = transformers.Gemma3TextConfig(
        **TEXT, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**VISION),
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
    )


def made(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08)
    return model.eval()


def given(kind):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (2, 20), generator=generator)
    ids[:, 3:7] = IMAGE
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    inputs = {"input_ids": ids, "pixel_values": pixels[:, None] if kind is smolvlm else pixels}
    # Tokens of an image see each other.
    return inputs | ({"token_type_ids": (ids == IMAGE).long()} if kind is gemma3 else {})


@pytest.mark.parametrize("kind", [llava, smolvlm, gemma3])
@torch.no_grad()
def test_the_text_part_runs_in_fp8_and_the_rest_in_pytorch(kind):
    model = made(kind())
    model.set_attn_implementation("eager")
    expected = model(**given(kind)).logits
    model.set_attn_implementation({"text_config": fp8.register()})
    runtime = fp8.attach(model)
    ours = model(**given(kind)).logits
    assert 0.001 < float((ours - expected).norm() / expected.norm()) < 0.06
    counts = runtime.stats()["calls"]
    assert counts.keys() == {"native"} and (counts["native"] > 0).all()


@torch.no_grad()
def test_a_vision_tower_without_plans_says_how_to_leave_it_out():
    model = made(llava())
    model.set_attn_implementation(fp8.register())
    runtime = fp8.attach(model)
    with pytest.raises(sigmascale.ArgumentError, match=r"CLIPAttention.*\{'text_config': "):
        model(**given(llava))
    assert runtime.stats()["calls"] == {}


def test_a_text_part_that_has_no_bounds_is_refused_by_its_own_type():
    config = llava()
    config.text_config = transformers.BloomConfig(hidden_size=64, n_head=4, n_layer=1, vocab_size=64)
    with pytest.raises(sigmascale.UnsupportedError, match="model type `bloom` is refused: ALiBi"):
        fp8.attach(made(config))
