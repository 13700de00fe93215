"""Attention calls as people make them, on small models with random weights: what runs them, and their error against
PyTorch's attention beside that of descales from exact maxima.

    python calls.py          # prints CSV; benches/tables.py makes the table of docs/attention-calls.md from its record
    python calls.py TEXT     # the calls with TEXT in their name; -x raises the first exception

Native calls run in the kernels on a Hopper GPU, and in the crate's CPU implementation on a CPU.
"""

import contextlib
import csv
import dataclasses
import functools
import sys
import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers

import sigmascale
import sigmascale.torch as fp8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Text enough that errors of two runs can be compared.
BATCH, LENGTH, WINDOW = (4, 512, 96) if DEVICE.type == "cuda" else (3, 40, 12)
SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
WINDOWED = GROUPED | {"head_dim": 64, "sliding_window": WINDOW}
LATENT = GROUPED | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
VISION = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 16,
}
# The token in whose places an image stands.
IMAGE = 2
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "llama d 80": lambda: transformers.LlamaConfig(**(GROUPED | {"hidden_size": 320})),
    "llama d 256": lambda: transformers.LlamaConfig(**(GROUPED | {"hidden_size": 512, "num_attention_heads": 2})),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=64),
    "phi3": lambda: transformers.Phi3Config(**(GROUPED | {"hidden_size": 384})),
    "mistral": lambda: transformers.MistralConfig(**WINDOWED),
    "gemma2": lambda: transformers.Gemma2Config(**WINDOWED, query_pre_attn_scalar=64, attn_logit_softcapping=5.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **WINDOWED, query_pre_attn_scalar=64, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**WINDOWED, num_local_experts=2, num_experts_per_tok=1),
    "qwen2_vl": lambda: transformers.Qwen2VLTextConfig(
        **GROUPED, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
    ),
    "bert": lambda: transformers.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "modernbert": lambda: transformers.ModernBertConfig(
        **SMALL, local_attention=WINDOW, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
    ),
    "bart": lambda: transformers.BartConfig(
        d_model=256,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        vocab_size=128,
        dropout=0.0,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        **{name: SMALL[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**LATENT, q_lora_rank=64),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**(LATENT | {"topk_method": "greedy"}), q_lora_rank=None),
    "minicpm3": lambda: transformers.MiniCPM3Config(
        **(GROUPED | {"num_key_value_heads": 4}),
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
    ),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(**LATENT, q_lora_rank=64),
    "kimi_linear": lambda: transformers.KimiLinearConfig(
        **(LATENT | {"num_hidden_layers": 4}), head_dim=64, layer_types=["linear_attention", "full_attention"] * 2
    ),
    "longcat_flash": lambda: transformers.LongcatFlashConfig(
        **{key: SMALL[key] for key in ("hidden_size", "num_attention_heads", "vocab_size")},
        num_layers=1,
        ffn_hidden_size=256,
        head_dim=64,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_topk=2,
        n_routed_experts=4,
        zero_expert_num=2,
        expert_ffn_hidden_size=64,
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **GROUPED,
        head_dim=64,
        max_position_embeddings=1024,
        intermediate_size_mlp=256,
        moe_layers=[],
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 0],
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **GROUPED,
        head_dim=64,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        mlp_only_layers=[0, 1],
    ),
    "falcon": lambda: transformers.FalconConfig(**SMALL, alibi=False),
    "roberta": lambda: transformers.RobertaConfig(
        **SMALL, max_position_embeddings=1024, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "whisper": lambda: transformers.WhisperConfig(
        d_model=256,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        vocab_size=128,
        num_mel_bins=16,
        max_source_positions=50,
        dropout=0.0,
        decoder_start_token_id=1,
        **{name: SMALL[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    ),
    "llava": lambda: transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**GROUPED),
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=IMAGE,
        image_seq_length=4,
    ),
    "gemma3_image": lambda: transformers.Gemma3Config(
        text_config=CONFIGS["gemma3"](),
        vision_config=transformers.SiglipVisionConfig(**VISION),
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
    ),
    "qwen2_5_vl": lambda: transformers.Qwen2_5_VLConfig(
        text_config={
            **GROUPED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": 256,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
        image_token_id=IMAGE,
    ),
    "t5": lambda: transformers.T5Config(
        d_model=256,
        d_kv=64,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        vocab_size=128,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
}
AUTO = {
    "bert": transformers.AutoModel,
    "modernbert": transformers.AutoModel,
    "qwen2_vl": transformers.AutoModel,
    "bart": transformers.AutoModelForSeq2SeqLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
    "roberta": transformers.AutoModel,
    "whisper": transformers.AutoModelForSpeechSeq2Seq,
    "llava": transformers.AutoModelForImageTextToText,
    "gemma3_image": transformers.AutoModelForImageTextToText,
    "qwen2_5_vl": transformers.AutoModelForImageTextToText,
}


def model(kind):
    """A model with random weights whose attention is not flat."""
    torch.manual_seed(0)
    made = AUTO.get(kind, transformers.AutoModelForCausalLM).from_config(CONFIGS[kind]())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "sinks" in name:
                parameter.normal_(std=1.0)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.08)
    return made.to(DEVICE, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32).eval()


def attached(made, kind, policy):
    """Plans: of the weights, or from the exact maxima of each call. Several runtimes where layers are named by hand."""
    named = {"bart": bart_layers, "modernbert": modernbert_layers, "whisper": whisper_layers}.get(kind)
    if named is None:
        return [fp8.attach(made, policy=policy)]
    bounded, others = named(made)
    runtimes = [fp8.attach(made, policy=policy, layers=bounded)]
    # Queries and keys of cross-attention read two norms, which no layer of one norm bounds: they have the maxima of
    # each call.
    return runtimes + ([fp8.attach(made, policy="current", layers=others)] if others else [])


def modernbert_layers(made):
    """The layers of a family that the table does not have, by name: one weight for q, k and v, and a LayerNorm
    without a shift."""
    body = getattr(made, "model", made)
    layers = []
    for number, block in enumerate(body.layers):
        q, k, v = block.attn.Wqkv.weight.chunk(3)
        norm = body.embeddings.norm if number == 0 else block.attn_norm
        heads = made.config.num_attention_heads
        layers.append(
            fp8.Layer(q=q, k=k, v=v, n_q_heads=heads, n_kv_heads=heads, norm="layer", gain=norm.weight, rotary=q.shape[0] // heads,
                      module=block.attn, name=f"layer {number}")
        )  # fmt: skip
    return layers, []


def bart_layers(made):
    """Norms stand behind each block, so that a layer reads the norm of the one before it."""
    layers, crossed = [], []
    for side in ("encoder", "decoder"):
        part = getattr(made.model, side)
        before = part.layernorm_embedding
        for number, block in enumerate(part.layers):
            layers.append(behind(before, block.self_attn, f"{side} layer {number}"))
            if side == "decoder":
                crossed.append(behind(block.self_attn_layer_norm, block.encoder_attn, f"cross-attention {number}"))
            before = block.final_layer_norm
    return layers, crossed


def whisper_layers(made):
    """Norms stand in front of each block."""
    blocks = [(side, i, b) for side in ("encoder", "decoder") for i, b in enumerate(getattr(made.model, side).layers)]
    layers = [behind(b.self_attn_layer_norm, b.self_attn, f"{side} layer {i}") for side, i, b in blocks]
    crossed = [(i, b) for side, i, b in blocks if side == "decoder"]
    return layers, [behind(b.encoder_attn_layer_norm, b.encoder_attn, f"cross-attention {i}") for i, b in crossed]


def behind(norm, module, name):
    """A layer with projections of their own that reads a LayerNorm."""
    linear = {key: getattr(module, f"{key}_proj") for key in "qkv"}
    biases = {f"{key}_bias": part.bias for key, part in linear.items()}
    weights, heads = {key: part.weight for key, part in linear.items()}, module.num_heads
    return fp8.Layer(**weights, **biases, n_q_heads=heads, n_kv_heads=heads, norm="layer", gain=norm.weight,
                     shift=norm.bias, module=module, name=name)  # fmt: skip


def tokens(batch=BATCH, length=LENGTH, seed=0):
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def padding(side, length=LENGTH):
    """Half of the rows are shorter."""
    mask = torch.ones(BATCH, length, dtype=torch.int64, device=DEVICE)
    mask[0, length - length // 4 :] = mask[2, length // 2 :] = 0
    return mask if side == "right" else mask.flip(1)


def logits(made, **given):
    out = made(**given)
    return out[0]


def hidden(made, mask=None, **given):
    """What the text gives, without gradients."""
    with torch.no_grad():
        out = logits(made, attention_mask=mask, **({"input_ids": tokens()} | given))
    return [out if mask is None or mask.dim() != 2 else out[mask.bool()]]


def step(made, mask=None, compiled=False, checkpointed=False, **given):
    """Loss and gradients of a step."""
    made.zero_grad()
    made.train()
    if checkpointed:
        made.gradient_checkpointing_enable()
    given = {"input_ids": tokens(), "use_cache": False} | given
    labels = given["input_ids"] if "labels" not in given else given.pop("labels")
    if mask is not None and mask.shape == labels.shape:
        labels = labels.masked_fill(mask == 0, -100)
    run = torch.compile(made, fullgraph=True, backend=BACKEND) if compiled else made
    if compiled:
        torch._dynamo.reset()
    run(attention_mask=mask, labels=labels, **given).loss.backward()
    made.eval()
    if checkpointed:
        made.gradient_checkpointing_disable()
    return [torch.cat([p.grad.flatten().float() for p in made.parameters() if p.grad is not None])]


BACKEND = "inductor" if DEVICE.type == "cuda" else "aot_eager"


def generate(made, mask=None, cache=None, length=24, compiled=False, **options):
    """Logits of the first new token, and of the second where all chose the same first."""
    prompt = tokens(length=length)
    mask = torch.ones_like(prompt) if mask is None else mask
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    } | options
    if cache is not None and made.config._attn_implementation == NAME:
        options["past_key_values"] = cache(made)
    if not compiled:
        options["disable_compile"] = True
    torch._dynamo.reset()
    out = made.generate(prompt, attention_mask=mask, **options)
    return [out.logits[0].float()]


def behind_padding(made):
    """A token behind prompts that are padded on the right."""
    prompt, mask = tokens(length=24), padding("right", 24)
    with torch.no_grad():
        cache = made(prompt, attention_mask=mask, use_cache=True).past_key_values
        mask, token = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1), tokens(length=1, seed=1)
        place = mask.cumsum(dim=1)[:, -1:] - 1
        return [made(token, attention_mask=mask, position_ids=place, past_key_values=cache).logits.float()]


def fp8_cache(made, length=None):
    return fp8.fp8_cache(LATEST[0], length)


# The runtimes of the run, for caches.
LATEST = []
NAME = "sigmascale_fp8"


def packed(made, lengths=True, run=None):
    """One row of several texts, by their positions, and their lengths where a collator gives them."""
    parts = [LENGTH // 3, LENGTH // 6, LENGTH - LENGTH // 3 - LENGTH // 6]
    positions = torch.cat([torch.arange(n) for n in parts])[None].to(DEVICE)
    given = {"position_ids": positions, "input_ids": tokens(1)}
    if lengths and made.config._attn_implementation == NAME:
        ends = torch.tensor([0, *parts], device=DEVICE).cumsum(0).int()
        given |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(parts), "max_length_k": max(parts)}
    return step(made, **given) if run is None else run(made, use_cache=False, **given)


def change(made, train):
    """The change of the weights by one step of ``train(folder)``, which is then taken back."""
    flat = lambda: torch.cat([p.detach().flatten().float() for p in made.parameters()])
    before = flat()
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
    after, at = flat(), 0
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(before[at : at + p.numel()].view_as(p))
            at += p.numel()
    made.eval()
    return [after - before]


# One step by a rate of 1, so that the change is the gradient.
ONE_STEP = {
    "max_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "optim": "sgd",
    "learning_rate": 1.0,
    "use_cpu": DEVICE.type == "cpu",
}


def trainer(made, **how):
    """A step of Trainer on texts that are padded on the right."""
    mask = padding("right").cpu()
    rows = [
        {"input_ids": t, "attention_mask": m, "labels": t.masked_fill(m == 0, -100)}
        for t, m in zip(tokens().cpu(), mask)
    ]

    def train(folder):
        arguments = transformers.TrainingArguments(folder, per_device_train_batch_size=BATCH, **ONE_STEP, **how)
        training = transformers.Trainer(made, arguments, train_dataset=rows)
        training.remove_callback(transformers.PrinterCallback)
        training.train()

    return change(made, train)


def sft(made, **how):
    """A step of TRL's SFTTrainer, which packs texts of unequal lengths into rows."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import SFTConfig, SFTTrainer

    lengths = [LENGTH // 3, LENGTH // 6, LENGTH - LENGTH // 3 - LENGTH // 6]
    rows = {"input_ids": [tokens(1, n, seed=i)[0].tolist() for i, n in enumerate(lengths)]}
    # Named, since not every release of pyarrow can be hashed.
    texts = Dataset(InMemoryTable.from_pydict(rows), fingerprint="texts")

    def train(folder):
        options = {"packing": True, "max_length": LENGTH, "per_device_train_batch_size": 1} | how
        settings = SFTConfig(folder, gradient_checkpointing=False, bf16=False, **options, **ONE_STEP)
        training = SFTTrainer(made, settings, train_dataset=texts, processing_class=words())
        training.remove_callback(transformers.PrinterCallback)
        training.train()

    return change(made, train)


def dpo(made):
    """A step of TRL's DPOTrainer, which loads a reference model with the same attention: it takes plans of its own."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import DPOConfig, DPOTrainer

    rows = {"prompt": ["5 6 7", "8 9 10 11"], "chosen": ["12 13 14 15", "16 17"], "rejected": ["20 21", "22 23 24"]}
    pairs = Dataset(InMemoryTable.from_pydict(rows), fingerprint="pairs")

    def train(folder):
        made.save_pretrained(folder)
        made.config._name_or_path = folder
        settings = DPOConfig(
            folder, gradient_checkpointing=False, bf16=False, per_device_train_batch_size=2, **ONE_STEP
        )
        training = DPOTrainer(made, args=settings, train_dataset=pairs, processing_class=words())
        training.remove_callback(transformers.PrinterCallback)
        LATEST.extend([fp8.attach(training.ref_model)] if LATEST else [])
        training.train()

    return change(made, train)


def seq2seq(made, run):
    mask = padding("right")
    given = {"input_ids": tokens(), "decoder_input_ids": tokens(length=LENGTH // 2, seed=1)}
    if run == "step":
        return step(made, mask, labels=tokens(length=LENGTH // 2, seed=2), **given)
    if run == "generate":
        return generate(made, padding("right", 24))
    with torch.no_grad():
        return [logits(made, attention_mask=mask, **given)]


def explicit(made):
    hidden_keys = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).triu(1)
    mask = torch.zeros(LENGTH, LENGTH, device=DEVICE, dtype=made.dtype).masked_fill(
        hidden_keys, torch.finfo(made.dtype).min
    )
    return hidden(made, mask[None, None].expand(BATCH, 1, -1, -1))


def exported(made):
    with torch.no_grad():
        text = {"input_ids": tokens(), "attention_mask": padding("left"), "use_cache": False}
        program = torch.export.export(made, (), text, strict=False)
        return [program.module()(**text)[0][padding("left").bool()]]


def graph(made):
    """A captured forward with padding, replayed with another."""
    if DEVICE.type == "cpu" or made.config._attn_implementation != NAME:
        return hidden(made, padding("left"))
    text, mask = tokens(), torch.ones_like(padding("left"))
    mask[0, :3] = 0
    call = lambda: logits(made, input_ids=text, attention_mask=mask, use_cache=False)
    with torch.no_grad():
        call()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = call()
        mask.copy_(padding("left"))
        captured.replay()
    return [out[mask.bool()]]


def two_lengths(made):
    """Decoding by FlashAttention's function, each row of the cache filled to a length of its own."""
    generator = torch.Generator().manual_seed(0)
    make = lambda n, h: torch.randn(BATCH, n, h, 64, generator=generator).to(DEVICE, torch.bfloat16)
    q, k, v = make(2, 4), make(LENGTH, 2), make(LENGTH, 2)
    lengths = (torch.arange(BATCH, device=DEVICE, dtype=torch.int32) + 1) * (LENGTH // (BATCH + 1))
    if made.config._attn_implementation == NAME:
        return [fp8.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, plan=descales(k, q, k, v))]
    key, row = torch.arange(LENGTH, device=DEVICE), torch.arange(2, device=DEVICE)[:, None]
    mask = (key <= lengths[:, None, None] - 2 + row)[:, None]
    return [
        F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask, enable_gqa=True).transpose(1, 2)
    ]


def descales(k, *operands):
    """Twice what the largest values need: bounds are above what is met."""
    factor = 1.0 if LATEST[0].policy == "current" else 2.0
    return [(x.abs().amax().float() * factor / 448).expand(k.shape[-2]).contiguous() for x in operands]


def flash(made, **options):
    """FlashAttention's function of packed texts."""
    generator = torch.Generator().manual_seed(0)
    make = lambda h: torch.randn(LENGTH, h, 64, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_()
    q, k, v = make(4), make(2), make(2)
    parts = [LENGTH // 3, LENGTH - LENGTH // 3]
    ends = torch.tensor([0, *parts], device=DEVICE).cumsum(0).int()
    if made.config._attn_implementation == NAME:
        given = {"causal": True, "plan": descales(k, q.detach(), k.detach(), v.detach())} | options
        out = fp8.flash_attn_varlen_func(q, k, v, ends, ends, max(parts), max(parts), **given)
    else:
        from sigmascale.torch import _fallback, _terms

        places = _terms.Sequences(ends[:-1], ends[1:], ends[:-1], ends[1:], max(parts), max(parts))
        terms = _terms.Terms(True, 64**-0.5, soft_cap=options.get("softcap"))
        terms = terms.masked(True, options.get("window_size", (-1, -1)), places)
        out = _fallback.attend(q[None], k[None], v[None], terms)[0][0]
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    return [out.detach(), *grads]


def assisted(made, **how):
    """Several queries a step: of a draft's tokens, from the prompt or from a smaller model."""
    prompt = tokens(1, 24)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = made.generate(prompt, attention_mask=torch.ones_like(prompt), **how, **options)
    return [out.logits[0].float()]


def draft():
    """A small model that proposes tokens, in PyTorch's own attention."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**(GROUPED | {"num_hidden_layers": 1}))
    return transformers.AutoModelForCausalLM.from_config(config).to(
        DEVICE, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    )


def decoded(made, compiled=False):
    """A token behind a padded prompt in a static cache, by the model called or compiled."""
    prompt, mask = tokens(length=24), padding("left", 24)
    cache = transformers.StaticCache(config=made.config, max_cache_len=32)
    torch._dynamo.reset()
    run = torch.compile(made, backend=BACKEND) if compiled else made
    with torch.no_grad():
        made(prompt, attention_mask=mask, past_key_values=cache, use_cache=True)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        place = {"position_ids": mask.cumsum(dim=1)[:, -1:] - 1, "cache_position": torch.tensor([24], device=DEVICE)}
        return [run(tokens(length=1, seed=1), attention_mask=mask, past_key_values=cache, **place).logits.float()]


def in_chunks(made):
    """A prompt that goes into the cache by parts."""
    return generate(made, padding("left", 24), prefill_chunk_size=7)


def with_prefix(made):
    """A prompt whose first tokens are in a cache already."""
    cache = transformers.DynamicCache(config=made.config)
    with torch.no_grad():
        made(tokens(length=16), past_key_values=cache, use_cache=True)
    return generate(made, past_key_values=cache)


def continuous(made):
    """Continuous batching of prompts that are longer than a step."""
    if made.config._attn_implementation == NAME:
        made.set_attn_implementation(f"paged|{NAME}")
    sizes = {"block_size": 16, "num_blocks": 64, "max_batch_tokens": 32, "max_requests_per_batch": 4}
    results = made.generate_batch(
        [tokens(1, n, seed=n)[0].tolist() for n in (5, 40, 17)],
        transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0),
        transformers.ContinuousBatchingConfig(**sizes, return_logprobs=True, use_cuda_graph=False),
    ).values()
    failed = [result.error for result in results if result.error]
    if failed:
        raise RuntimeError(failed[0])
    return [torch.tensor([result.logprobs[0] for result in results])]


def words():
    """A tokenizer whose words are numbers."""
    import tokenizers

    split = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(128)}, unk_token="0"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "0", "bos_token": "1", "eos_token": "2", "padding_side": "left"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=split, **names)


def chats(made):
    """Chats of unequal lengths through a pipeline, which pads them on the left."""
    tokenizer = words()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    run = transformers.pipeline("text-generation", model=made, tokenizer=tokenizer, device=made.device)
    chats = [[{"role": "user", "content": " ".join(map(str, tokens(1, n, seed=n)[0].tolist()))}] for n in (20, 5, 9)]
    first = []
    hook = made.register_forward_hook(lambda _, given, out: first.append(out.logits[:, -1].float()))
    run(chats, batch_size=len(chats), max_new_tokens=4, do_sample=False)
    hook.remove()
    return [first[0]]


def autocast(made):
    with torch.autocast(DEVICE.type, torch.bfloat16):
        return step(made, padding("right"))


def trainer_padding_free(made):
    """A step of Trainer on texts in one row, whose collator gives their lengths."""
    lengths = made.config._attn_implementation == NAME
    rows = [{"input_ids": tokens(1, n, seed=n)[0].tolist()} for n in (LENGTH // 3, LENGTH // 6, LENGTH // 2)]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)

    def train(folder):
        arguments = transformers.TrainingArguments(folder, per_device_train_batch_size=len(rows), **ONE_STEP)
        training = transformers.Trainer(made, arguments, train_dataset=rows, data_collator=collator)
        training.remove_callback(transformers.PrinterCallback)
        training.train()

    return change(made, train)


def falcon(made):
    """A model that calls F.scaled_dot_product_attention by its name."""
    with fp8.patched(LATEST[0]) if LATEST else contextlib.nullcontext():
        return hidden(made, padding("left"))


def whisper(made):
    generator = torch.Generator().manual_seed(0)
    sound = torch.randn(BATCH, 16, 100, generator=generator).to(DEVICE, made.dtype)
    with torch.no_grad():
        return [logits(made, input_features=sound, decoder_input_ids=tokens(length=24))]


def picture(made, kind):
    """Text with an image in it, whose part of the model stays in PyTorch's attention."""
    generator = torch.Generator().manual_seed(0)
    ids = tokens(2, 24)
    ids[:, 3:7] = IMAGE
    given = {"input_ids": ids}
    if kind == "qwen2_5_vl":
        given |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2, device=DEVICE)}
        given |= {"mm_token_type_ids": (ids == IMAGE).int()}
        pixels = torch.randn(32, 3 * 2 * 14 * 14, generator=generator)
    else:
        pixels = torch.randn(2, 3, 32, 32, generator=generator)
    if kind == "gemma3_image":
        given |= {"token_type_ids": (ids == IMAGE).long()}
    with torch.no_grad():
        return [logits(made, pixel_values=pixels.to(DEVICE, made.dtype), **given)]


def flattened(made):
    """Texts of unequal lengths in one row as a collator without padding makes them (as TRL packs): positions begin
    anew."""
    lengths = [LENGTH // 3, LENGTH // 6, LENGTH - LENGTH // 3 - LENGTH // 6]
    texts = [{"input_ids": tokens(1, n, seed=i)[0].tolist()} for i, n in enumerate(lengths)]
    batch = transformers.DataCollatorWithFlattening()(texts)
    given = {key: value.to(DEVICE) for key, value in batch.items() if isinstance(value, torch.Tensor)}
    return step(made, **given)


def odd_mask(made):
    """A mask that is neither causal nor a window: every third key is hidden."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).tril()
    seen[:, 1::3] = False
    return hidden(made, seen[None, None].expand(BATCH, 1, -1, -1))


@dataclasses.dataclass
class Call:
    """A call on a kind of model."""

    name: str
    kind: str
    run: Callable
    # Whether it takes a compiler or a device that is not there on the CPU.
    gpu: bool = False
    # What the exception says where it is refused.
    refused: str | None = None


CALLS = [
    Call("generate", "llama", generate),
    Call("generate, padded left", "llama", lambda m: generate(m, padding("left", 24))),
    Call("generate, padded right", "llama", behind_padding),
    Call("generate, static cache", "llama", lambda m: generate(m, padding("left", 24), cache_implementation="static")),
    Call(
        "generate, static cache, compiled",
        "llama",
        lambda m: generate(m, padding("left", 24), cache_implementation="static", compiled=True),
        gpu=True,
    ),
    Call("generate, beams", "llama", lambda m: generate(m, num_beams=3)),
    Call("generate, assisted by prompt lookup", "llama", lambda m: assisted(m, prompt_lookup_num_tokens=3)),
    Call("generate, assisted by a smaller model", "llama", lambda m: assisted(m, assistant_model=draft())),
    Call("generate, beams, padded left", "llama", lambda m: generate(m, padding("left", 24), num_beams=2)),
    Call("generate, prompt in chunks", "llama", in_chunks),
    Call("generate, prefix in a cache", "llama", with_prefix),
    Call("generate, offloaded cache", "llama", lambda m: generate(m, cache_implementation="offloaded"), gpu=True),
    Call("generate_batch", "llama", continuous),
    Call("pipeline, batch of chats", "llama", chats),
    Call("decoding step, static cache", "llama", decoded),
    Call("decoding step, static cache, compiled", "llama", lambda m: decoded(m, compiled=True)),
    Call("generate, E4M3 cache", "llama", lambda m: generate(m, padding("left", 24), cache=fp8_cache)),
    Call("generate, E4M3 static cache", "llama", lambda m: generate(m, cache=lambda m: fp8_cache(m, 32))),
    Call("generate, sliding cache", "mistral", lambda m: generate(m, length=2 * WINDOW)),
    Call("generate, sliding cache in E4M3", "mistral", lambda m: generate(m, length=2 * WINDOW, cache=fp8_cache)),
    Call("training step", "llama", step),
    Call("training step, padded right", "llama", lambda m: step(m, padding("right"))),
    Call("training step, padded left", "llama", lambda m: step(m, padding("left"))),
    Call("training step, packed by position_ids", "llama", lambda m: packed(m, lengths=False)),
    Call("training step, packed by cu_seqlens", "llama", packed),
    Call("training step, packed by a collator", "llama", flattened),
    Call("training step, checkpointed", "llama", lambda m: step(m, padding("right"), checkpointed=True)),
    Call("training step, autocast to BF16", "llama", autocast),
    Call("training step, compiled", "llama", lambda m: step(m, padding("right"), compiled=True)),
    Call(
        "training step, packed and compiled", "llama", lambda m: packed(m, run=functools.partial(step, compiled=True))
    ),
    Call("Trainer", "llama", trainer),
    Call("Trainer, BF16 and checkpoints", "llama", lambda m: trainer(m, bf16=True, gradient_checkpointing=True)),
    Call("Trainer, padding-free", "llama", trainer_padding_free),
    Call("TRL, packed", "llama", sft),
    Call(
        "TRL, padding-free",
        "llama",
        lambda m: sft(m, packing=False, padding_free=True, max_length=None, per_device_train_batch_size=3),
    ),
    Call("TRL, DPO with a reference model", "llama", dpo),
    Call("explicit causal mask", "llama", explicit),
    Call("torch.export", "llama", exported),
    Call("CUDA graph, other padding at the replay", "llama", graph, gpu=True),
    Call("Llama, d 80", "llama d 80", step),
    Call("Llama, d 256", "llama d 256", step),
    Call("Phi-3, d 96", "phi3", step),
    Call("Qwen2", "qwen2", step),
    Call("Qwen3", "qwen3", step),
    Call("Mistral, window", "mistral", lambda m: step(m, padding("right"))),
    Call("Gemma 2, window and soft-cap", "gemma2", step),
    Call("Gemma 3, window", "gemma3", step),
    Call("gpt-oss, window and sinks", "gpt_oss", step),
    Call("Llama 4, chunks", "llama4", step),
    Call("GPT-NeoX", "gpt_neox", step),
    Call("Qwen3-Next, hybrid", "qwen3_next", step),
    Call("Falcon, one KV head, patched", "falcon", falcon),
    Call("OLMo 2, no norm in front", "olmo2", step, refused="v has no bound"),
    Call("DeepSeek-V3, d 192 and 128", "deepseek_v3", hidden),
    Call("DeepSeek-V3, training step", "deepseek_v3", lambda m: step(m, padding("right"))),
    Call("DeepSeek-V3, generate", "deepseek_v3", lambda m: generate(m, padding("left", 24))),
    Call("DeepSeek-V3, E4M3 cache", "deepseek_v3", lambda m: generate(m, cache=fp8_cache), refused="caches latents"),
    Call("DeepSeek-V2, no query latent", "deepseek_v2", hidden),
    Call("MiniCPM3, d 96 and 64", "minicpm3", hidden),
    Call("Qwen2-VL, text part", "qwen2_vl", lambda m: hidden(m, padding("left"))),
    Call("LLaVA, image and text", "llava", lambda m: picture(m, "llava")),
    Call("Gemma 3, image and text", "gemma3_image", lambda m: picture(m, "gemma3_image")),
    Call("Qwen2.5-VL, image and text", "qwen2_5_vl", lambda m: picture(m, "qwen2_5_vl")),
    Call("BERT", "bert", hidden),
    Call("BERT, padded", "bert", lambda m: hidden(m, padding("right"))),
    Call("RoBERTa, padded", "roberta", lambda m: hidden(m, padding("right"))),
    Call("ModernBERT, window on both sides", "modernbert", lambda m: hidden(m, padding("right"))),
    Call("BART, encoder and decoder", "bart", lambda m: seq2seq(m, "step")),
    Call("BART, generate", "bart", lambda m: seq2seq(m, "generate")),
    Call("Whisper, encoder and decoder", "whisper", whisper),
    Call("T5", "t5", lambda m: seq2seq(m, "forward"), refused="relative position"),
    Call("mask of another kind", "llama", odd_mask, refused="another kind than causal"),
    Call(
        "flash_attn_varlen_func, window and soft-cap", "llama", lambda m: flash(m, window_size=(WINDOW, 0), softcap=3.0)
    ),
    Call("flash_attn_with_kvcache, lengths on the device", "llama", two_lengths),
]


def relative(ours, theirs):
    """The largest error of the results."""
    one = lambda a, b: float((a.double() - b.double()).norm() / b.double().norm())
    return max(one(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True))


def measured(call):
    """What ran the call, its error, and that with exact maxima."""
    made, errors, ran = model(call.kind), [], None
    made.set_attn_implementation("eager")
    LATEST.clear()
    theirs = call.run(made)
    for policy in ("geometry", "current"):
        made.set_attn_implementation(in_fp8(made))
        if policy == "current" and "E4M3" in call.name:
            errors.append(None)
            continue
        LATEST[:] = attached(made, call.kind, policy)
        errors.append(relative(call.run(made), theirs))
        if ran is None:
            ran = sorted(set().union(*(runtime.stats()["calls"] for runtime in LATEST)))
    return ran, errors


def in_fp8(made):
    """The attention of the model, or of its text part."""
    name = fp8.register()
    return {"text_config": name} if hasattr(made.config, "vision_config") else name


def refusal(call):
    """The sentence with which a call is refused, that says what was expected of it."""
    made = model(call.kind)
    try:
        made.set_attn_implementation(fp8.register())
        LATEST[:] = attached(made, call.kind, "geometry")
        call.run(made)
    except (sigmascale.UnsupportedError, ValueError) as error:
        sentence = " ".join(str(error).split())
        if call.refused in sentence:
            return sentence
        raise
    raise AssertionError(f"{call.name} was not refused")


def main():
    sys.stdout.reconfigure(line_buffering=True)
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(["call", "ran_in", "error", "error_exact_maxima", "refused"])
    bad = 0
    for call in CALLS:
        if (call.gpu and DEVICE.type == "cpu") or not all(text in call.name for text in sys.argv[1:] if text != "-x"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if call.refused:
                    rows.writerow([call.name, "", "", "", refusal(call)])
                    continue
                ran, (ours, exact) = measured(call)
        except ImportError as error:
            rows.writerow([call.name, "", "", "", f"not run: {' '.join(str(error).split())[:60]}"])
            continue
        except Exception as error:
            if "-x" in sys.argv:
                raise
            bad += 1
            rows.writerow([call.name, "", "", "", f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"])
            continue
        cell = "" if exact is None else f"{exact:.4f}"
        rows.writerow([call.name, ", ".join(ran), f"{ours:.4f}", cell, ""])
    sys.exit(bool(bad))


if __name__ == "__main__":
    with contextlib.suppress(AttributeError):
        transformers.logging.set_verbosity_error()
    main()
