"""Small models for the tests: a Hugging Face Llama whose heads lie across shard boundaries, a DeepSeek-V3, and a plain module."""

import functools

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

import sigmascale.torch as fp8  # noqa: E402

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def randomise(model, seed=0):
    """Weights, gains and biases that matter, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if gain else (0.3 if parameter.dim() == 1 else 0.1) * noise)
    return model


def llama(heads=(6, 3), d_head=16, layers=2, **options):
    """Of 32-bit weights."""
    config = transformers.LlamaConfig(
        hidden_size=heads[0] * d_head, num_attention_heads=heads[0], num_key_value_heads=heads[1], vocab_size=64,
        intermediate_size=96, num_hidden_layers=layers, max_position_embeddings=64, **options,
    )  # fmt: skip
    return randomise(transformers.LlamaForCausalLM(config))


def latent():
    """Latent attention, of 32-bit weights and without experts."""
    config = transformers.DeepseekV3Config(
        hidden_size=96, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=40, kv_lora_rank=24, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, vocab_size=64, intermediate_size=96, num_hidden_layers=2, first_k_dense_replace=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return randomise(transformers.DeepseekV3ForCausalLM(config))


class Attention(nn.Module):
    """One fused projection or three, and FP8 attention by a plan where there is one."""

    def __init__(self, width, heads, kv_heads, fused):
        super().__init__()
        self.d, self.heads, self.kv_heads, self.fused = width // heads, heads, kv_heads, fused
        self.sizes = [heads * self.d, kv_heads * self.d, kv_heads * self.d]
        if fused:
            self.qkv = nn.Linear(width, sum(self.sizes))
        else:
            self.q, self.k, self.v = (nn.Linear(width, rows) for rows in self.sizes)
        self.out = nn.Linear(width, width)
        self.plan = None

    def parts(self, name):
        """Weights or biases of q, k and v."""
        if self.fused:
            return getattr(self.qkv, name).split(self.sizes)
        return [getattr(projection, name) for projection in (self.q, self.k, self.v)]

    def forward(self, x):
        projected = self.qkv(x).split(self.sizes, dim=2) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (y.unflatten(2, (-1, self.d)) for y in projected)
        if self.plan is None:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        else:
            y = fp8.attention(q, k, v, self.plan)
        return self.out(y.flatten(2).to(x.dtype))


class Block(nn.Module):
    def __init__(self, width, heads, kv_heads, fused):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads, kv_heads, fused)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Plain(nn.Module):
    """A model that no table knows."""

    def __init__(self, width=96, heads=6, kv_heads=3, layers=2, fused=True):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, fused) for _ in range(layers))
        randomise(self)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def describe(block):
    """What the package has to know of a block's attention."""
    a = block.attention
    (q, k, v), biases = a.parts("weight"), a.parts("bias")
    return fp8.Layer(
        q=q, k=k, v=v, n_q_heads=a.heads, n_kv_heads=a.kv_heads, norm="layer", gain=block.norm.weight, shift=block.norm.bias,
        q_bias=biases[0], k_bias=biases[1], v_bias=biases[2], module=a,
    )  # fmt: skip


def described(model):
    """The same as functions, for weights that are whole in a forward alone."""
    return [functools.partial(describe, block) for block in model.blocks]


def attach(model, **options):
    """A runtime whose plans the model's attention takes."""
    if isinstance(model, Plain):
        runtime = fp8.attach(model, layers=described(model), backend="emulated", **options)
        for block, plan in zip(model.blocks, runtime.layers):
            # A checkpoint's wrapper passes reads on, and no writes.
            getattr(block.attention, "_checkpoint_wrapped_module", block.attention).plan = plan
        return runtime
    runtime = fp8.attach(model, backend="emulated", **options)
    inside = getattr(model, "module", model)
    inside.set_attn_implementation(fp8.register())
    return runtime


def inputs(model, rank=0, length=12):
    generator = torch.Generator().manual_seed(100 + rank)
    if isinstance(model, Plain):
        return torch.randn(2, length, model.blocks[0].norm.normalized_shape[0], generator=generator)
    return torch.randint(0, 64, (2, length), generator=generator)


def run(model, x):
    """The loss of a forward."""
    out = model(x)
    out = getattr(out, "logits", out)
    return out.float().square().mean()


def blocks(model):
    return model.blocks if isinstance(model, Plain) else model.model.layers


def shard(model, mesh, mp=BF16, **options):
    """fully_shard on every block and on the whole."""
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=mp, **options)
    return fully_shard(model, mesh=mesh, mp_policy=mp, **options)


def mesh_of(*shape, names=None):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def expected(model, dtype=torch.bfloat16, **options):
    """Descales of the same weights in one process."""
    return attach(model.to(dtype), **options)
