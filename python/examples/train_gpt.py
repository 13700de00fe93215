#!/usr/bin/env python3
"""Trains a GPT on local text with FP8 attention under any scaling policy, on one GPU or on many.

    python train_gpt.py --text DIR --policy geometry --log geometry.jsonl
    python train_gpt.py --text DIR --attention bf16 --log bf16.jsonl       # the control: no FP8
    python train_gpt.py --text DIR --attention flash --only-layer 1        # one layer in the BF16 of bf16_attention.py
    python train_gpt.py --text DIR --size 1b --seq-len 4096 --batch 2 --steps 30 --attention fp8   # tokens a second, memory
    python train_gpt.py --plot losses.svg geometry.jsonl bf16.jsonl
    python train_gpt.py --table geometry.jsonl bf16.jsonl
    torchrun --nproc-per-node 8 -- train_gpt.py --text DIR --tp 2 --cp 2 --save DIR2     # and --load DIR2 with any other number

The model reads bytes; `--size` names its dimensions, `--width`, `--layers`, `--heads` and `--kv-heads` change them. Weights are f32, the rest runs in BF16 autocast; attention is cast to E4M3 by the policy's descales
and runs in the package's kernels, forward and backward; `--attention bf16` is the control, PyTorch's own; `flash` and `shifted`
are those of `bf16_attention.py`, with `--only-layer N` in one layer alone and PyTorch's standard attention, which keeps the matrix of
weights, in the others. `--compile` compiles the model. `--spike 200:8:15` multiplies the learning rate by 8 from step 200
for 15 steps; `--resume 300` drops the policy's memory at step 300, as a resume from weights alone does
(`--resume 300:state` keeps it).
`--profile FILE` writes what the GPU did in five steps after the warm-up, by kernel, and the time that the host took
for them, of the first rank.
`--monitor run.jsonl` records the run for `sigmascale diagnose`; `--guard` skips steps that are not finite and restores a run that fails.

Each logged step is a line of JSON: loss, learning rate, and since the last line the number of values that overflowed
(|x / descale| > 448) and the peak of |x / descale| for q, k and v. The last line has the loss on held-out text, tokens a second
from the tenth step on, and the most memory that PyTorch held at a time.
"""

import argparse
import functools
import gc
import itertools
import json
import math
import pathlib
import sys
import time

import bf16_attention
import torch
import torch.nn.functional as F
from sharding import Ranks, clip
from torch import nn

import sigmascale.torch as fp8

SIZES = {
    "5m": dict(width=256, layers=6, heads=4, kv_heads=2),
    "125m": dict(width=768, layers=18, heads=12, kv_heads=12),
    "1b": dict(width=2048, layers=22, heads=16, kv_heads=8),
}
# Steps before time is taken: kernels are compiled and memory is found.
WARM = 10
# Steps that are profiled.
PROFILED = 5
SUFFIXES = {".txt", ".md", ".py", ".rs", ".rst", ".c", ".h", ".html", ".json", ".toml"}


class Attention(nn.Module):
    """Causal attention; `plan` is set by `attach`, or None for BF16."""

    def __init__(self, width, heads, kv_heads, llama):
        super().__init__()
        self.d, self.heads, self.kv_heads, self.llama = width // heads, heads, kv_heads if llama else heads, llama
        rows = (heads + 2 * self.kv_heads) * self.d
        self.qkv = nn.Linear(width, rows, bias=not llama)
        self.out = nn.Linear(heads * self.d, width, bias=not llama)
        # The plan of FP8 attention, and the process group that shares the sequence.
        self.plan = self.context = None
        # Without a plan: attention of q, k and v by head.
        self.causal = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        # Whether FP8 attention turns q and k in its cast, and how it computes dQ.
        self.turns, self.gradients = False, None
        # Where a list: takes q, k, v and the output of the last forward.
        self.seen = None
        self.sizes = [self.heads * self.d, self.kv_heads * self.d, self.kv_heads * self.d]

    def parts(self, name):
        """Weights or biases of q, k and v."""
        if self.qkv is None:
            return [getattr(projection, name) for projection in (self.q, self.k, self.v)]
        return getattr(self.qkv, name).split(self.sizes)

    def separate(self):
        """A projection each for q, k and v, which tensor parallelism can share out."""
        self.q, self.k, self.v = separated(self.qkv, self.sizes)
        self.qkv = None

    def forward(self, x, rotation):
        projected = (self.q(x), self.k(x), self.v(x)) if self.qkv is None else self.qkv(x).split(self.sizes, dim=2)
        q, k, v = (y.unflatten(2, (-1, self.d)) for y in projected)
        if self.llama and not self.turns:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if self.plan is None:
            heads_first = (y.transpose(1, 2) for y in (q, k, v))
            y = self.causal(*heads_first).transpose(1, 2)
        elif self.context is not None:
            y = fp8.ring_attention(q, k, v, self.plan, self.context)
        else:
            rope = tuple(table[0, :, 0] for table in rotation) if self.llama and self.turns else None
            y = fp8.attention(q, k, v, self.plan, rope=rope, gradients=self.gradients)
        if self.seen is not None:
            self.seen[:] = q, k, v, y
        return self.out(y.flatten(2))


def separated(linear, sizes):
    """A layer for each part of the outputs of one."""
    parts = []
    for at, size in enumerate(sizes):
        part = nn.Linear(linear.in_features, size, bias=linear.bias is not None, device=linear.weight.device)
        with torch.no_grad():
            part.weight.copy_(linear.weight.split(sizes)[at])
            if linear.bias is not None:
                part.bias.copy_(linear.bias.split(sizes)[at])
        parts.append(part)
    return parts


def rotate(x, rotation):
    """Rotary embedding, half-split pairs."""
    cosine, sine = rotation
    a, b = x.float().chunk(2, dim=3)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=3).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width, heads, kv_heads, llama):
        super().__init__()
        make_norm = (lambda: nn.RMSNorm(width, eps=1e-6)) if llama else (lambda: nn.LayerNorm(width))
        self.norm, self.norm2, self.llama = make_norm(), make_norm(), llama
        self.attention = Attention(width, heads, kv_heads, llama)
        inner = width * 8 // 3 // 64 * 64 if llama else 4 * width
        self.up = nn.Linear(width, 2 * inner if llama else inner, bias=not llama)
        self.down = nn.Linear(inner, width, bias=not llama)
        self.gate = None

    def separate(self):
        """Projections that tensor parallelism can share out."""
        self.attention.separate()
        if self.llama:
            self.gate, self.up = separated(self.up, [self.up.out_features // 2] * 2)

    def forward(self, x, rotation):
        x = x + self.attention(self.norm(x), rotation)
        z = self.norm2(x)
        y = self.up(z)
        if self.llama:
            gate, y = y.chunk(2, dim=2) if self.gate is None else (self.gate(z), y)
            return x + self.down(F.silu(gate) * y)
        return x + self.down(F.gelu(y))


class Gpt(nn.Module):
    """Pre-norm decoder over bytes: Llama style (RMSNorm, RoPE, SwiGLU, grouped heads) or GPT-2 style."""

    def __init__(self, style, length, width, layers, heads, kv_heads):
        super().__init__()
        self.llama = style == "llama"
        self.tokens = nn.Embedding(256, width)
        self.positions = None if self.llama else nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, self.llama) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6) if self.llama else nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                shrink = (2 * layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        d = width // heads
        angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, d, 2) / d)
        self.register_buffer("cosine", angles.cos()[None, :, None], persistent=False)
        self.register_buffer("sine", angles.sin()[None, :, None], persistent=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, (self.cosine, self.sine))
        return self.head(self.norm(x))

    def attention_layer(self, block):
        """What the package has to know of a layer."""
        a = block.attention
        q, k, v = a.parts("weight")
        biases = {} if self.llama else dict(zip(("q_bias", "k_bias", "v_bias"), a.parts("bias")))
        return fp8.Layer(
            q=q,
            k=k,
            v=v,
            **biases,
            n_q_heads=a.heads,
            n_kv_heads=a.kv_heads,
            norm="rms" if self.llama else "layer",
            gain=block.norm.weight,
            shift=None if self.llama else block.norm.bias,
            rotary=a.d if self.llama else 0,
            module=a,
        )


def attach(model, policy, group=None, bound=None, rope_in_cast=False, estimator="gram", logits=None, center="none", gradients=None):
    """FP8 attention under a policy; None for the control. `bound`: also logit bounds. `rope_in_cast`: its cast turns q and k.
    `estimator`: where norms come from. `logits`: "e4m3" casts them too. `center`: what is subtracted from keys and values.
    `gradients`: how dQ is computed."""
    if policy == "bf16":
        return None
    # Functions, since weights may be sharded: they are called when they are whole.
    layers = [functools.partial(model.attention_layer, block) for block in model.blocks]
    runtime = fp8.attach(model, policy, bound, layers=layers, group=group, estimator=estimator, logits=logits, center=center)
    for block, plan in zip(model.blocks, runtime.layers):
        block.attention.plan, block.attention.turns, block.attention.gradients = plan, rope_in_cast, gradients
    return runtime


def standard(q, k, v):
    """PyTorch's attention that keeps the matrix of weights."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def substitute(model, attention, only):
    """The attention of `bf16_attention.py` in all layers, or in one with the standard attention in the others."""
    for index, block in enumerate(model.blocks):
        here = only is None or index == only
        block.attention.causal = functools.partial(bf16_attention.flash, shifted=attention == "shifted") if here else standard


class Watch:
    """Overflow counts and peaks of |x / descale| over many steps, kept on the device."""

    def __init__(self, runtime):
        self.overflow = torch.zeros(3, dtype=torch.int64, device=runtime.device)
        # Of logits, where they are cast.
        self.logits = torch.zeros((), dtype=torch.int64, device=runtime.device)
        self.peak = torch.zeros(3, device=runtime.device)
        self.steps = torch.zeros((), dtype=torch.int64, device=runtime.device)

    def add(self, runtime):
        amax, counts = runtime.observed()
        over = counts[..., 0].sum(dim=(0, 2))
        self.overflow += over
        logits = runtime.words[:, : runtime.n_q_heads, 3].sum()
        self.logits += logits
        self.steps += over.sum() + logits > 0
        if runtime.policy != "current":
            peak = (amax / runtime.descales[:, :3]).amax(dim=(0, 2))
            self.peak = torch.maximum(self.peak, peak)

    def take(self):
        row = {"overflow": self.overflow.tolist(), "logit_overflow": self.logits.item(), "peak": self.peak.tolist()}
        self.overflow.zero_()
        self.logits.zero_()
        self.peak.zero_()
        return row


class Probe:
    """Of the first, middle and last layer's dQ on a batch, the relative error and the bias factor: the norm of the mean row error over
    what independent row errors of its size would leave; 1 is unbiased. Against f64 on the operands that the attention reads. The
    largest of the heads of one sequence."""

    def __init__(self, model):
        self.model, count = model, len(model.blocks)
        self.places = sorted({0, count // 2, count - 1})

    def take(self, window, ranks):
        attentions = [self.model.blocks[place].attention for place in self.places]
        for attention in attentions:
            attention.seen = []
        loss = loss_of(self.model, window, ranks)
        seen = [attention.seen for attention in attentions]
        for attention in attentions:
            attention.seen = None
        grads = torch.autograd.grad(loss, [y for *_, y in seen])
        rows = [self.of(a, *each, grad) for a, each, grad in zip(attentions, seen, grads)]
        errors, factors = zip(*rows)
        return {"dq_layers": self.places, "dq_error": errors, "dq_bias_factor": factors}

    def of(self, attention, q, k, v, _, grad):
        q, k, v, grad = (x[:1].detach() for x in (q, k, v, grad))
        leaf, grad = q.clone().requires_grad_(), grad.to(torch.bfloat16)
        plan, heads_first = attention.plan, lambda x: x.transpose(1, 2)
        if plan is None:
            operands = [x.to(torch.bfloat16) for x in (leaf, k, v)]
            y = heads_first(attention.causal(*map(heads_first, operands)))
            held = operands
        else:
            y = fp8.attention(leaf, k, v, plan, gradients=attention.gradients)
            c, m = (0.0 if x is None else x for x in plan.centers)
            held = [_held(x, d) for x, d in zip((q, k.float() - c, v.float() - m), plan.descales(1))]
        (dq,) = torch.autograd.grad(y, leaf, grad.to(y.dtype))
        group, error, factor = q.shape[2] // k.shape[2], 0.0, 0.0
        for head in range(q.shape[2]):
            one = [x[0, :, at].detach().double() for x, at in zip((*held, grad), (head, head // group, head // group, head))]
            exact = _exact_dq(*one)
            off = dq[0, :, head].double() - exact
            error = max(error, (off.norm() / exact.norm()).item())
            factor = max(factor, (off.sum(dim=0).norm() / off.norm()).item())
        return round(error, 5), round(factor, 3)


def _held(x, descale):
    """What the cast to E4M3 keeps."""
    d = descale.repeat_interleave(x.shape[2] // descale.shape[1], dim=1)[:, None, :, None]
    return (x.float() * (1 / d)).clamp(-448, 448).to(torch.float8_e4m3fn).double() * d.double()


def _exact_dq(q, k, v, grad):
    """Of one head under a causal mask, f64."""
    scale = q.shape[1] ** -0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
    p = (scale * q @ k.T).masked_fill_(hidden, -math.inf).softmax(dim=1)
    dp = grad @ v.T
    return scale * (p * (dp - (p * dp).sum(dim=1, keepdim=True))) @ k


def read(folder):
    """All text under a folder as bytes on the CPU; the last tenth is held out."""
    files = sorted(p for p in pathlib.Path(folder).rglob("*") if p.suffix in SUFFIXES and p.is_file())
    data = b"\n".join(p.read_bytes() for p in files)
    if len(data) < 100_000:
        sys.exit(f"{folder}: {len(data)} bytes of text in {len(files)} files are too few: at least 100 000 are needed")
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]


def batches(tokens, batch, length, seed, device):
    """Endless random windows."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - length - 1, (batch,), generator=generator)
        window = torch.stack([tokens[s : s + length + 1] for s in starts])
        yield (window.pin_memory() if device.type == "cuda" else window).to(device, non_blocking=True).long()


def loss_of(model, window, ranks):
    tokens, targets = ranks.split(window)
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def positive(text):
    """A whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def spike(text):
    """First step, factor, and number of steps."""
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not STEP:FACTOR:STEPS")
    return tuple(int(part) for part in parts)


def resume(text):
    """A step, and whether the state goes along."""
    step, colon, word = text.partition(":")
    if not step.isdecimal() or (colon and word != "state"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither STEP nor STEP:state")
    return int(step), bool(colon)


def dimensions(args):
    """The model's dimensions: those of the named size, with what the arguments change."""
    given = {name: getattr(args, name) for name in ("width", "layers", "heads", "kv_heads")}
    size = SIZES[args.size] | {name: value for name, value in given.items() if value is not None}
    if size["width"] % (2 * size["heads"]) or size["heads"] % size["kv_heads"]:
        sys.exit(f"{size}: the width must be a multiple of twice the heads, and the heads one of the KV heads")
    return size


class Watched:
    """The record of a run and its guard, where they are asked for; both are made anew with the runtime."""

    def __init__(self, args, ranks):
        self.file = args.monitor if ranks.first else None
        self.every, self.guarded = args.every, args.guard
        self.monitor = self.guard = None

    def begin(self, runtime, optimizer, step):
        self.close()
        if self.file:
            self.monitor = fp8.Monitor(runtime, self.file, self.every, resume=step > 0, first_step=step)
        if self.guarded:
            self.guard = fp8.Guard(runtime, optimizer, monitor=self.monitor)

    def allows(self, loss, norm):
        """Whether the optimizer may step."""
        return self.guard is None or self.guard.step(loss.detach(), norm)

    def step(self, loss, norm, rate):
        if self.monitor:
            skipped, factor = (self.guard.skipped, self.guard.rate) if self.guard else (False, 1.0)
            self.monitor.step(loss=loss, grad_norm=norm, lr=rate * factor, skipped=skipped)

    def close(self):
        for held in (self.guard, self.monitor):
            if held:
                held.close()


class Profile:
    """Kernels of some steps, by the time that each took on the GPU, and the host's time to launch them."""

    def __init__(self, file, first):
        self.file, self.first, self.profiler, self.host = file, first, None, 0.0

    def step(self, step):
        """At the beginning of each step."""
        if not self.file or step not in (self.first, self.first + PROFILED):
            return
        if step == self.first:
            torch.cuda.synchronize()
            activities = torch.profiler.ProfilerActivity
            self.profiler = torch.profiler.profile(activities=[activities.CPU, activities.CUDA])
            self.profiler.start()
            self.host = time.time()
            return
        launched = time.time() - self.host
        torch.cuda.synchronize()
        whole = time.time() - self.host
        self.profiler.stop()
        rows = [(e.self_device_time_total / 1e3, e.count, e.key) for e in self.profiler.key_averages()]
        rows = sorted((row for row in rows if row[0] > 0), reverse=True)
        with open(self.file, "w", encoding="utf-8") as out:
            print(f"# {PROFILED} steps: {1e3 * whole:.1f} ms, launched in {1e3 * launched:.1f} ms, "
                  f"kernels {sum(row[0] for row in rows):.1f} ms", file=out)  # fmt: skip
            print("ms_a_step,launches_a_step,kernel", file=out)
            for ms, count, name in rows:
                print(f"{ms / PROFILED:.4f},{count / PROFILED:g},{name!r}", file=out)


def learning_rate(args, step):
    warm = min(1.0, (step + 1) / args.warmup)
    rate = args.lr * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / args.steps)))
    first, factor, steps = args.spike or (0, 1, 0)
    return rate * (factor if first <= step < first + steps else 1.0)


def train(args):
    began = time.time()
    torch.manual_seed(args.seed)
    resume_at, with_state = args.resume or (None, False)
    size, (text, held_out) = dimensions(args), read(args.text)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("training needs a CUDA GPU, and PyTorch finds none: --device cpu is for small trials")
    if args.cp > 1 and (args.style != "llama" or args.policy in ("bf16", "current")):
        sys.exit("--cp is for --style llama and FP8 attention by a plan")
    if (args.monitor or args.guard) and args.policy == "bf16":
        sys.exit("--monitor and --guard are for FP8 attention: they read the runtime of a policy")
    ranks = Ranks(args.device, args.tp, args.cp)
    if args.guard and ranks.size > 1:
        sys.exit("--guard is for one process here; of several, all have to decide alike (Guard(group=..))")
    device, cuda = ranks.device, ranks.device.type == "cuda"
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    with device:
        model = Gpt(args.style, args.seq_len, **size)
    if args.attention in ("flash", "shifted"):
        if args.only_layer is not None and args.only_layer >= len(model.blocks):
            sys.exit(f"--only-layer {args.only_layer}: the model has layers 0 to {len(model.blocks) - 1}")
        substitute(model, args.attention, args.only_layer)
    parameters = sum(p.numel() for p in model.parameters())
    ranks.shard(model, args.load)
    bound = "worst-case" if args.monitor else None
    how = ranks.maxima(), bound, args.rope_in_cast, args.estimator, args.logits, args.center, args.gradients
    runtime = attach(model, args.policy, *how)
    run = torch.compile(model) if args.compile else model
    watch = Watch(runtime) if runtime else None
    if args.seconds and (ranks.size > 1 or not args.save):
        sys.exit("--seconds is for one process, with --save DIR for what it has by then")
    if args.probe and (ranks.size > 1 or args.rope_in_cast):
        sys.exit("--probe is for one process and rotated queries: leave --rope-in-cast out")
    probe = Probe(model) if args.probe else None
    decay = [p for p in model.parameters() if p.dim() == 2]
    other = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    first = ranks.load(args.load, model, optimizer, runtime) if args.load else 0
    last = min(args.steps, args.stop or args.steps)
    if args.profile and (not cuda or last - first <= 2 * WARM + PROFILED):
        sys.exit(f"--profile needs --device cuda and more than {2 * WARM + PROFILED} steps to take")
    watched = Watched(args, ranks)
    if runtime:
        watched.begin(runtime, optimizer, first)
    out = open(args.log, "a" if first else "w", encoding="utf-8") if args.log and ranks.first else sys.stdout
    write = lambda row: print(json.dumps(row), file=out, flush=True) if ranks.first else None
    write(
        vars(args)
        | size
        | {"parameters": parameters, "device": torch.cuda.get_device_name() if cuda else "cpu", "ranks": ranks.size}
        | {"torch": torch.__version__}
    )
    start = warm = time.time()
    windows = itertools.islice(batches(text, args.batch, args.seq_len, args.seed, device), first, None)
    profile = Profile(args.profile if ranks.first else None, first + 2 * WARM)
    for step, window in zip(range(first, last), windows):
        profile.step(step)
        renewed = args.center_every and step > first and step % args.center_every == 0
        if (step == resume_at or renewed) and runtime:
            state = runtime.state_dict() if with_state and step == resume_at else None
            runtime = attach(model, args.policy, *how)
            if state:
                runtime.load_state_dict(state)
            watched.begin(runtime, optimizer, step)
        if step == first + WARM:
            synchronize()
            warm = time.time()
        rate = learning_rate(args, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        probed = probe.take(window, ranks) if probe and step % args.probe == 0 else {}
        loss = loss_of(run, window, ranks)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = clip(model.parameters(), 1.0)
        if runtime:
            runtime.start_reduction()
        if watched.allows(loss, norm):
            optimizer.step()
        if runtime:
            watch.add(runtime)
            watched.step(loss, norm, rate)
            runtime.refresh()
        if step % args.every == 0 or step + 1 == last or probed:
            write({"step": step, "loss": ranks.mean(loss).item(), "lr": rate} | (watch.take() if watch else {}) | probed)
        if args.seconds and time.time() - began > args.seconds:
            last = step + 1
            break
    synchronize()
    watched.close()
    if args.save:
        ranks.save(args.save, last, model, optimizer, runtime)
    if args.seconds and last < args.steps:
        return ranks.end()
    tokens = args.batch * args.seq_len * (last - first - (WARM if last - first > WARM else 0))
    speed = {"tokens_per_second": round(tokens / (time.time() - warm))}
    if cuda:
        speed["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    with torch.no_grad():
        windows = batches(held_out, args.batch, args.seq_len, 1234, device)
        loss = sum(ranks.mean(loss_of(model, next(windows), ranks)).item() for _ in range(20)) / 20
    end = {"overflow_steps": watch.steps.item()} if watch else {}
    write({"held_out_loss": loss, "seconds": round(time.time() - start, 1)} | speed | end)
    ranks.end()


def plot(file, logs):
    """Training losses of several logs, and where values overflowed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=(2, 1))
    for log in logs:
        head, *rows = [json.loads(line) for line in pathlib.Path(log).read_text().splitlines()]
        steps = [row for row in rows if "step" in row]
        label = f"{head['policy']}, seed {head['seed']}"
        (line,) = top.plot([r["step"] for r in steps], [r["loss"] for r in steps], label=label, linewidth=1)
        counted = [r for r in steps if "overflow" in r]
        bottom.plot(
            [r["step"] for r in counted], [sum(r["overflow"]) for r in counted], color=line.get_color(), linewidth=1
        )
    top.set_ylabel("loss, nats a byte")
    top.legend(fontsize=7)
    bottom.set_yscale("symlog")
    bottom.set_ylabel("values that overflowed")
    bottom.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(file)


def table(logs):
    """A line of Markdown for each log."""
    print(
        "| size | policy | seed | last loss | held-out loss | values that overflowed | steps with any | peak of q, k, v |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for log in logs:
        head, *rows = [json.loads(line) for line in pathlib.Path(log).read_text().splitlines()]
        if not rows or "held_out_loss" not in rows[-1]:
            sys.exit(f"{log}: this run did not come to its end")
        steps, end = [row for row in rows if "step" in row], rows[-1]
        last = sum(row["loss"] for row in steps[-5:]) / len(steps[-5:])
        cells = [head["size"], head["policy"], head["seed"], f"{last:.4f}", f"{end['held_out_loss']:.4f}"]
        if "overflow" in steps[0]:
            over = sum(sum(row["overflow"]) for row in steps)
            # Counts are those of `every` steps together.
            peaks = [max(row["peak"][i] for row in steps) for i in range(3)]
            peak = "448 by definition" if head["policy"] == "current" else ", ".join(f"{p:.0f}" for p in peaks)
            cells += [f"{over}", f"{end['overflow_steps']} of {head['steps']}", peak]
        else:
            cells += ["-", "-", "-"]
        print("| " + " | ".join(map(str, cells)) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", metavar="DIR", help="folder of text to train on")
    parser.add_argument("--policy", default="geometry", choices=["bf16", *fp8.POLICIES])
    parser.add_argument(
        "--attention", default="fp8", choices=["fp8", "bf16", "flash", "shifted"], help="all but fp8: as --policy bf16"
    )
    parser.add_argument("--only-layer", type=int, metavar="N", help="flash or shifted in this layer, standard in the others")
    parser.add_argument(
        "--estimator", default="gram", choices=["gram", "power", "power-summed"], help="where norms of logit bounds come from"
    )
    parser.add_argument("--logits", choices=["e4m3"], help="cast the logits too, as the spectral-bounds paper does")
    parser.add_argument("--center", default="none", choices=["none", "weights", "mean"], help="what is subtracted from keys and values")
    parser.add_argument("--center-every", type=positive, metavar="STEPS", help="take new means so often, for --center mean")
    parser.add_argument("--probe", type=positive, metavar="STEPS", help="log error and bias factor of dQ so often")
    parser.add_argument("--gradients", choices=["rounded-delta", "fp8-dq"], help="how FP8 attention computes dQ")
    parser.add_argument("--rope-in-cast", action="store_true", help="FP8 attention turns q and k (llama), in its cast")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--style", default="llama", choices=["llama", "gpt2"])
    parser.add_argument("--size", default="5m", choices=list(SIZES))
    for name in ("--width", "--layers", "--heads", "--kv-heads"):
        parser.add_argument(name, type=positive, help="in place of the size's")
    parser.add_argument("--steps", type=positive, default=600)
    parser.add_argument("--batch", type=positive, default=16)
    parser.add_argument("--seq-len", type=positive, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=positive, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--spike", type=spike, metavar="STEP:FACTOR:STEPS", help="multiply the learning rate for a while"
    )
    parser.add_argument(
        "--resume", type=resume, metavar="STEP[:state]", help="start the policy anew at this step, or with its state"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tp", type=positive, default=1, help="tensor parallel ranks, under torchrun")
    parser.add_argument(
        "--cp", type=positive, default=1, help="ranks that share a sequence; the others share the batch"
    )
    parser.add_argument("--save", metavar="DIR", help="write a checkpoint at the end")
    parser.add_argument("--load", metavar="DIR", help="go on from a checkpoint, of any number of ranks")
    parser.add_argument("--stop", type=positive, metavar="STEP", help="end here, with the schedule of --steps")
    parser.add_argument(
        "--seconds", type=positive, help="save and end in the first step after so long, without the held-out loss; go on with --load"
    )
    parser.add_argument("--every", type=positive, default=10, help="steps between lines of the log")
    parser.add_argument("--log", metavar="FILE", help="where the lines go; stdout without it")
    parser.add_argument("--monitor", metavar="FILE", help="record the run for `sigmascale diagnose`: the first rank's layers and heads")
    parser.add_argument("--profile", metavar="FILE", help="write kernels of five steps and their times; needs a GPU")
    parser.add_argument("--guard", action="store_true", help="skip steps that are not finite, restore a run that fails")
    parser.add_argument("--plot", metavar="FILE", help="draw the logs that follow, and train nothing")
    parser.add_argument("--table", action="store_true", help="print the logs that follow as a table, and train nothing")
    parser.add_argument("logs", nargs="*", help="logs to draw or print")
    args = parser.parse_args()
    if args.plot or args.table:
        return plot(args.plot, args.logs) if args.plot else table(args.logs)
    if not args.text:
        parser.error("--text DIR is needed: any folder of text, source code will do")
    if args.logs:
        parser.error("logs are for --plot and --table")
    if args.attention != "fp8":
        args.policy = "bf16"
    if args.only_layer is not None and (args.attention not in ("flash", "shifted") or args.only_layer < 0):
        parser.error("--only-layer N, from 0 on, is for --attention flash and shifted")
    del args.logs, args.plot, args.table
    train(args)
    # A process group that is left to the end of the interpreter can abort it: its threads hold tensors.
    gc.collect()


if __name__ == "__main__":
    main()
