"""What the GPU tests share: models with random weights, operands, and the libraries that are there.

Importing it skips the importing file, by name, where there is no Hopper GPU.
"""

import dataclasses
import pathlib

import pytest

torch = pytest.importorskip("torch")
if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402
from sigmascale import _native  # noqa: E402
from sigmascale.torch import _terms  # noqa: E402

transformers = pytest.importorskip("transformers")
MODEL = pathlib.Path(__file__).resolve().parents[2] / "data" / "tiny-llama"
SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 128,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "gpt2": lambda: transformers.GPT2Config(n_embd=256, n_head=4, n_layer=3, vocab_size=128),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=64),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=64),
    "hunyuan_v1_dense": lambda: transformers.HunYuanDenseV1Config(**SMALL, num_key_value_heads=2, head_dim=64),
    "smollm3": lambda: transformers.SmolLM3Config(
        **(SMALL | {"num_hidden_layers": 5}), num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2
    ),
    "phi3": lambda: transformers.Phi3Config(**SMALL, num_key_value_heads=2, pad_token_id=0),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=64),
    "cohere": lambda: transformers.CohereConfig(**SMALL, num_key_value_heads=2),
    "stablelm": lambda: transformers.StableLmConfig(**SMALL, num_key_value_heads=4),
    "starcoder2": lambda: transformers.Starcoder2Config(**SMALL, num_key_value_heads=2),
    # Queries that grow with the position; of Llama 4 in layers without rotation, the others normalise q and k.
    "ministral3": lambda: transformers.Ministral3Config(
        **SMALL,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        pad_token_id=0,
        sliding_window=None,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 16,
        },
    ),  # fmt: skip
    "llama4_text": lambda: transformers.Llama4TextConfig(
        **(SMALL | {"num_hidden_layers": 4}),
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        pad_token_id=0,
        intermediate_size_mlp=256,
        moe_layers=[],
        use_qk_norm=True,
        no_rope_layer_interval=2,
        attn_temperature_tuning=True,
        attn_scale=0.5,
        floor_scale=13,
    ),  # fmt: skip
    "falcon": lambda: transformers.FalconConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=128, alibi=False
    ),
}


def random_model(kind, dtype=torch.bfloat16):
    """Random weights, with gains, shifts and biases that matter."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.05)
    return model.to(dtype).cuda().eval()


def stored_plan(model, folder):
    """The plan of the CPU, from a saved checkpoint."""
    model.save_pretrained(folder)
    return sigmascale.descales(sigmascale.calibrate(folder))


def relative(a, b):
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


def tensors(batch=2, length=256, heads=(8, 2), d=128, scale=1.0, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    make = lambda n: (scale * torch.randn(batch, length, n, d, generator=generator, device="cuda")).to(torch.bfloat16)
    return make(heads[0]), make(heads[1]), make(heads[1])


def sdpa(q, k, v, causal=True):
    """PyTorch's attention, causal from the last query and the last key backwards, as FlashAttention's is."""
    heads = lambda x: x.transpose(1, 2)
    mask = None
    if causal:
        mask = torch.ones(q.shape[1], k.shape[1], device=q.device, dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    return heads(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), attn_mask=mask, enable_gqa=True))


def delayed(device):
    """A native policy that needs no weights, made anew: it loads kernels, allocates and copies."""
    weight, tail = torch.zeros(256, 256), dataclasses.asdict(sigmascale.Tail())
    layer = fp8.Layer(q=weight, k=weight[:128], v=weight[:128], n_q_heads=4, n_kv_heads=2)
    config = _native.policy("delayed-te", None, tail)
    return _native.DevicePolicy(device, _native.attention_spec([layer, layer]), config, tail, False)


def libraries():
    names = ["native", "emulated"]
    for name in ("fa3", "cudnn", "torch"):
        try:
            fp8.backend(name)
            names.append(name)
        except sigmascale.UnsupportedError as error:
            names.append(pytest.param(name, marks=pytest.mark.skip(reason=str(error))))
    return names


def raw(name):
    """A backend as the probe calls it: E4M3 in, descales (batch, n_kv)."""
    backend = fp8.backend(name)
    return lambda q, k, v, *descales: backend.forward(q, k, v, descales, _terms.Terms(False, q.shape[3] ** -0.5))[0]
