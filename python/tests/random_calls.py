"""Random attention calls against a plain attention in f64 that shares no code with the package.

    python random_calls.py --count 2000 --seed 0 --device cpu
    python random_calls.py --first 1234 --count 1            # one call again

A call is drawn from its number: an interface (dense, packed, a cache with lengths, pages, a mask), shapes with
lengths of 0 and 1, masks, windows down to a single key, soft-caps, sinks, strides, types, E4M3 operands, an
accumulator, gradients. NaN stands wherever nothing may be read: in padding, behind the filled part of a cache, in
free pages, and in all of one sequence beside others.

What is compared, element by element: the output within what rounding P (E4M3 or F16) and the output (BF16) can do,
the log-sum-exp, and that rows which see nothing are zero with a log-sum-exp of -inf or of the sink. Gradients are
compared by their norms. One line is printed for each call that fails, and a summary; the exit status is 1 if any
failed.
"""

import argparse
import collections
import dataclasses
import math
import sys
import traceback
import warnings

import plain
import torch

import sigmascale.torch as fp8

E4M3 = torch.float8_e4m3fn
# Relative rounding of P and of the output, and what P under the smallest normal number loses, over P's largest.
ROUNDING = {"f16": 2**-11, "fp8": 2**-4}
SUBNORMAL = {"f16": 2**-33, "fp8": 2**-18}
BF16 = 2**-8
# How far the tensor core's FP8 accumulator is off in q . k, of sum |q k|: 1.2e-3 is the most that was ever seen
# (docs/attention-kernel.md), 2.5e-4 the most in 4,800 random calls.
ACCUMULATOR = 2**-11
# Steps of outputs under the smallest normal number of their type.
LEAST = {torch.float16: 2**-24}


class Draw:
    """Random choices from one number."""

    def __init__(self, seed, device):
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def whole(self, low, high):
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def one(self, *choices):
        return choices[self.whole(0, len(choices) - 1)]

    def chance(self, share):
        return float(torch.rand((), generator=self.generator)) < share

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def length(self, most):
        """0 and 1 more often than others."""
        return self.one(0, 1, self.whole(0, most), self.whole(0, most), self.whole(0, most))


@dataclasses.dataclass
class Call:
    """What is computed, in the reference's terms: each sequence by its own tensors."""

    interface: str
    # Of each sequence q (len, heads, d), k and v, as given, before any cast.
    parts: list
    # Of each sequence f32 (n_kv,) for q, k and v.
    descales: list
    causal: bool
    window: tuple
    softcap: float
    sinks: torch.Tensor | None
    scale: float
    accumulator: str
    # Sequences whose results do not count, since NaN was put in them.
    spoiled: set
    gives_lse: bool = True
    # Runs it: outputs and LSEs (heads, len) by sequence, and q, k, v to differentiate by with the whole output, or
    # None.
    run: object = None
    wants_gradients: bool = False
    # The rows of a sequence (its number) in an operand (0, 1, 2) or its gradient.
    take: object = None
    # Output of rows that no sequence has.
    tokens_outside: object = None

    def words(self):
        lengths = [(q.shape[0], k.shape[0]) for q, k, _ in self.parts]
        q, k, v = self.parts[0]
        return (
            f"{self.interface} heads {q.shape[1]}/{k.shape[1]} d {q.shape[2]}/{v.shape[2]} {str(q.dtype)[6:]} lengths {lengths} causal "
            f"{self.causal} window {self.window} softcap {self.softcap} sinks {self.sinks is not None} {self.accumulator}"
        )


def reference(q, k, v, descales, call):
    """Output (len, heads, d_v), LSE (heads, len), the sum of P |v|, that of |v| times the largest P, and how far a
    logit may be off, (heads, len), of one sequence in f64."""
    q, k, v = (plain.held(x, d) for x, d in zip((q, k, v), descales))
    terms = {"scale": call.scale, "softcap": call.softcap}
    out, lse = plain.attention(q, k, v, causal=call.causal, window=call.window, sinks=call.sinks, **terms)
    group, seen = q.shape[1] // k.shape[1], plain.visible(q.shape[0], k.shape[0], call.causal, call.window)
    sizes, bends = [], []
    for head in range(q.shape[1]):
        one, keys, values = q[:, head].detach(), k[:, head // group].detach(), v[:, head // group].detach().abs()
        # Tensor cores keep 14 bits of the largest product as they add; tanh on the device is off by up to 5e-4 of the
        # cap.
        steps = call.scale * one.abs() @ keys.abs().T
        bends.append(ACCUMULATOR * (steps.amax(dim=1) if k.shape[0] else steps.new_zeros(q.shape[0])) + 1e-3 * call.softcap)
        weights, _ = plain.probabilities(one, keys, call.scale, seen, call.softcap, None if call.sinks is None else call.sinks[head])
        # The largest P is that of the keys alone: P is rounded before a sink joins.
        top = weights.amax(dim=1, keepdim=True) if k.shape[0] else weights.new_zeros(q.shape[0], 1)
        sizes.append((weights @ values, top * values.sum(dim=0)))
    size, top = (torch.stack(parts, dim=1) for parts in zip(*sizes))
    return out, lse, size, top, torch.stack(bends)


def strided(draw, x):
    """The same values with other strides; channels stay together."""
    kind = draw.whole(0, 3)
    if kind == 1:
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if kind == 2:
        wide = torch.zeros(*x.shape[:-2], x.shape[-2] + 2, x.shape[-1], device=x.device).to(x.dtype)
        wide[..., 1:-1, :] = x
        return wide[..., 1:-1, :]
    if kind == 3:
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + draw.one(3, 8, 16), device=x.device).to(x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    return x


def terms(draw, most):
    """Mask, window, soft-cap, scale and accumulator. On a GPU FP8 sums are promoted every 128 keys at the least, and
    ``fp8-64`` is refused there."""
    shortest = "fp8-64" if torch.device(draw.device).type == "cpu" else "fp8-128"
    side = lambda: draw.one(-1, -1, 0, 1, draw.whole(0, most))
    return {
        "causal": draw.chance(0.5),
        "window": (side(), side()) if draw.chance(0.4) else (-1, -1),
        "softcap": draw.one(0.0, 0.0, 1.0, 30.0),
        # The standard deviation of logits, once the operands are known.
        "scale": draw.one(0.3, 1.0, 3.0),
        "accumulator": draw.one("f16", "fp8-256", shortest),
    }


def scaled(how, q, k):
    """The softmax scale with which logits are as large as was drawn."""
    sizes = (x.float().square().mean().sqrt().item() for x in (q, k))
    return float(how["scale"] / (math.prod(sizes) * math.sqrt(q.shape[-1])))


def heads(draw, cuda):
    n_kv = draw.whole(1, 3)
    d = draw.one(64, 128, 96, 80) if cuda else 8 * draw.whole(2, 12)
    d_v = draw.one(d, d, d, 64 if cuda else 8 * draw.whole(2, 12))
    return n_kv, n_kv * draw.one(1, 2, 4), d, d_v


def operands(draw, shape_q, shape_k, shape_v, dtype):
    make = lambda shape: (draw.normal(*shape) * draw.one(0.5, 1.0, 3.0)).to(dtype)
    return make(shape_q), make(shape_k), make(shape_v)


def rows(draw, n_kv, batch=None):
    """Descales with which some values saturate, one for each KV head, or for each sequence too."""
    shape = (n_kv,) if batch is None else (batch, n_kv)
    return [
        (draw.one(0.004, 0.02) * (1 + torch.rand(shape, generator=draw.generator))).to(draw.device) for _ in range(3)
    ]


def eight(x, descale):
    """E4M3 that the caller made: ``x`` (batch, len, heads, d) by ``descale`` (batch or 1, n_kv)."""
    each = descale.view(-1, descale.shape[-1]).repeat_interleave(x.shape[2] // descale.shape[-1], dim=1)
    return (x.float() / each[:, None, :, None]).clamp(-448, 448).to(E4M3)


def nan(x):
    """Fills with NaN, E4M3 too."""
    (x.view(torch.uint8).fill_(0x7F) if x.dtype == E4M3 else x.fill_(math.nan)) if x.numel() else None


def dense(draw, cuda):
    n_kv, n_q, d, d_v = heads(draw, cuda)
    batch, len_q, len_k = draw.whole(1, 3), draw.whole(1, 40), draw.one(1, draw.whole(1, 60), draw.whole(1, 60))
    how, dtype = terms(draw, 60), draw.one(torch.bfloat16, torch.float16, torch.float32)
    q, k, v = operands(draw, (batch, len_q, n_q, d), (batch, len_k, n_kv, d), (batch, len_k, n_kv, d_v), dtype)
    how["scale"], given = scaled(how, q, k), rows(draw, n_kv, batch if draw.chance(0.3) else None)
    if draw.chance(0.2):
        q, k, v = (eight(x, row) for x, row in zip((q, k, v), given))
    q, k, v = (strided(draw, x) for x in (q, k, v))
    sinks = draw.normal(n_q) * 2 if draw.chance(0.3) else None
    spoiled = {draw.whole(0, batch - 1)} if batch > 1 and draw.chance(0.3) else set()
    for i in spoiled:
        for x in (q, k, v):
            nan(x[i])
    call = Call("dense", list(zip(q, k, v)), [[d if d.dim() == 1 else d[i] for d in given] for i in range(batch)],
                how["causal"], how["window"], how["softcap"], sinks, how["scale"], how["accumulator"], spoiled)  # fmt: skip
    call.wants_gradients = q.dtype != E4M3 and not spoiled and draw.chance(0.4)
    call.take = lambda which, i, x: x[i]

    def run():
        leaves = [x.detach().requires_grad_(call.wants_gradients) for x in (q, k, v)]
        out, lse = fp8.attention(*leaves, given, causal=call.causal, window=call.window, softcap=call.softcap or None, sinks=sinks,
                                 softmax_scale=call.scale, accumulator=call.accumulator, return_lse=True)  # fmt: skip
        return list(out), list(lse), leaves

    call.run = run
    return call


def packed(draw, cuda):
    n_kv, n_q, d, d_v = heads(draw, cuda)
    count = draw.whole(1, 5)
    lengths_q, lengths_k = ([draw.length(30) for _ in range(count)] for _ in range(2))
    # Keys that a sequence has and does not use.
    unused = [draw.length(6) if draw.chance(0.5) else 0 for _ in range(count)] if draw.chance(0.4) else None
    stored = [n + m for n, m in zip(lengths_k, unused)] if unused else lengths_k
    tail_q, tail_k = draw.whole(0, 4), draw.whole(0, 4)
    if sum(lengths_q) + tail_q == 0:
        tail_q = 1
    if sum(stored) + tail_k == 0:
        tail_k = 1
    how, dtype = terms(draw, 30), draw.one(torch.bfloat16, torch.float16, torch.float32)
    shapes = (sum(lengths_q) + tail_q, n_q, d), (sum(stored) + tail_k, n_kv, d), (sum(stored) + tail_k, n_kv, d_v)
    q, k, v = (strided(draw, x) for x in operands(draw, *shapes, dtype))
    how["scale"], given = scaled(how, q, k), rows(draw, n_kv)
    if draw.chance(0.2):
        q, k, v = (eight(x[None], row)[0] for x, row in zip((q, k, v), given))
    starts = lambda lengths: torch.tensor([0, *lengths]).cumsum(0).int().to(q.device)
    cu_q, cu_k = starts(lengths_q), starts(stored)
    nan(q[sum(lengths_q) :])
    for x in (k, v):
        nan(x[sum(stored) :])
        for begin, kept, all_ in zip(cu_k.tolist(), lengths_k, stored):
            nan(x[begin + kept : begin + all_])
    spoiled = {draw.whole(0, count - 1)} if count > 1 and draw.chance(0.3) else set()
    parts = [
        (q[a : a + n], k[b : b + m], v[b : b + m])
        for a, n, b, m in zip(cu_q.tolist(), lengths_q, cu_k.tolist(), lengths_k)
    ]
    for i in spoiled:
        for x in parts[i]:
            nan(x)
    sinks = draw.normal(n_q) * 2 if draw.chance(0.3) else None
    call = Call("packed", parts, [given] * count, how["causal"], how["window"], how["softcap"], sinks, how["scale"],
                how["accumulator"], spoiled)  # fmt: skip
    call.wants_gradients = q.dtype != E4M3 and not spoiled and draw.chance(0.4)
    longest = draw.one(True, False)
    spans = [list(zip(cu_q.tolist(), lengths_q))] + 2 * [list(zip(cu_k.tolist(), lengths_k))]
    call.take = lambda which, i, x: x[spans[which][i][0] :][: spans[which][i][1]]

    def run():
        leaves = [x.detach().requires_grad_(call.wants_gradients) for x in (q, k, v)]
        most = (max(lengths_q), max(lengths_k)) if longest else (q.shape[0], k.shape[0])
        used = torch.tensor(lengths_k, dtype=torch.int32, device=q.device) if unused else None
        out, lse, _ = fp8.flash_attn_varlen_func(*leaves, cu_q, cu_k, *most,
            softmax_scale=call.scale, causal=call.causal, window_size=call.window, softcap=call.softcap, return_attn_probs=True,
            plan=given, seqused_k=used, sinks=sinks, accumulator=call.accumulator)  # fmt: skip
        call.tokens_outside = out[sum(lengths_q) :]
        return [out[a : a + n] for a, n in spans[0]], [lse[:, a : a + n] for a, n in spans[0]], leaves

    call.run = run
    return call


def cached(draw, cuda, paged):
    n_kv, n_q, d, _ = heads(draw, cuda)
    if cuda and paged:
        d = draw.one(64, 128)
    batch, page = draw.whole(1, 4), draw.one(16, 32, 64) if paged else None
    pages = draw.whole(1, 3)
    capacity = pages * page if paged else draw.whole(8, 60)
    new = draw.one(0, 0, 1, draw.whole(1, 5))
    len_q = new if new and draw.chance(0.7) else draw.whole(1, 4)
    lengths = [min(draw.length(capacity), capacity - new) for _ in range(batch)]
    how, dtype = terms(draw, 30), draw.one(torch.bfloat16, torch.float16)
    given = rows(draw, n_kv)
    q, k_new, v_new = operands(draw, (batch, len_q, n_q, d), (batch, new, n_kv, d), (batch, new, n_kv, d), dtype)
    _, k, v = operands(draw, (1, 1, 1, d), (batch, capacity, n_kv, d), (batch, capacity, n_kv, d), dtype)
    how["scale"], in_e4m3 = scaled(how, q, k), draw.chance(0.5)
    if in_e4m3:
        k, v = (eight(x, row) for x, row in zip((k, v), given[1:]))
    leftpad = None
    if not paged and draw.chance(0.2):
        leftpad = torch.tensor([draw.whole(0, n) for n in lengths], dtype=torch.int32, device=q.device)
    first = [0] * batch if leftpad is None else leftpad.tolist()
    for x in (k, v):
        for i, n in enumerate(lengths):
            nan(x[i, n:])
            nan(x[i, : first[i]])
    # Both are cast where the cache is E4M3, by the plan.
    cast = lambda x, row: eight_by_reciprocal(x, row) if in_e4m3 else x
    joined = lambda old, fresh, row: [
        torch.cat([bits(old[i, first[i] : n]), bits(cast(fresh[i : i + 1], row)[0])]).view(old.dtype)
        for i, n in enumerate(lengths)
    ]
    keys, values = joined(k, k_new, given[1]), joined(v, v_new, given[2])
    parts = list(zip(q, keys, values))
    sinks = draw.normal(n_q) * 2 if draw.chance(0.2) and not (cuda and paged) else None
    window, softcap = (how["window"], how["softcap"]) if not (cuda and paged) else ((-1, -1), 0.0)
    call = Call(("pages" if paged else "cache") + (" e4m3" if in_e4m3 else ""), parts, [given] * batch, how["causal"], window,
                softcap, sinks, how["scale"], "fp8-256", set())  # fmt: skip
    caches, table = [k, v], None
    if paged:
        free = draw.whole(0, 3)
        order = torch.randperm(batch * pages + free, generator=draw.generator)[: batch * pages]
        table = order.view(batch, pages).int().to(q.device)
        caches = []
        for x in (k, v):
            store = torch.empty(batch * pages + free, page, n_kv, d, dtype=x.dtype, device=q.device)
            nan(store)
            bits(store)[table.long()] = bits(x.unflatten(1, (pages, page)))
            caches.append(store)
        # Entries behind a sequence's last page may hold anything.
        used = -(-(torch.tensor(lengths) + new) // page)
        unused = torch.arange(pages)[None] >= used[:, None]
        table[unused.to(q.device)] = draw.one(-1, 0, 1_000_000)
    as_int = not paged and leftpad is None and len(set(lengths)) == 1 and draw.chance(0.5)

    def run():
        held = lengths[0] if as_int else torch.tensor(lengths, dtype=torch.int32, device=q.device)
        fresh = {"k": k_new, "v": v_new} if new else {}
        own = [bits(x).clone().view(x.dtype) for x in caches]
        out, lse = fp8.flash_attn_with_kvcache(q, *own, **fresh, cache_seqlens=held, cache_leftpad=leftpad, block_table=table,
            softmax_scale=call.scale, causal=call.causal, window_size=window, softcap=softcap, return_softmax_lse=True, plan=given,
            sinks=sinks)  # fmt: skip
        return list(out), list(lse), None

    call.run = run
    return call


def bits(x):
    """E4M3 as bytes, which PyTorch can copy and index."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x


def eight_by_reciprocal(x, descale):
    """The package's own cast is a product with the reciprocal."""
    each = (1 / descale).repeat_interleave(x.shape[2] // descale.shape[0])
    return (x.float() * each[None, None, :, None]).clamp(-448, 448).to(E4M3)


def masked(draw, cuda):
    """``scaled_dot_product_attention`` with a mask: padding on either side, causal or not, with a window or without."""
    n_kv, n_q, d, _ = heads(draw, cuda)
    batch, length = draw.whole(1, 3), draw.whole(1, 40)
    how, dtype = terms(draw, 40), draw.one(torch.bfloat16, torch.float16, torch.float32)
    q, k, v = operands(draw, (batch, n_q, length, d), (batch, n_kv, length, d), (batch, n_kv, length, d), dtype)
    how["scale"], given, left = scaled(how, q, k), rows(draw, n_kv), draw.chance(0.5)
    kept = [draw.one(0, length, draw.whole(0, length)) for _ in range(batch)]
    spans = [(length - n, length) if left else (0, n) for n in kept]
    row, key = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (key <= row) if how["causal"] else torch.ones(length, length, dtype=torch.bool)
    back = how["window"][0] if how["causal"] else -1
    if back >= 0:
        seen &= key >= row - back
    inside = torch.stack([((key >= a) & (key < b)) & ((row >= a) & (row < b)) for a, b in spans])
    mask = (inside & seen)[:, None].to(q.device)
    if draw.chance(0.3):
        mask = torch.zeros(mask.shape, dtype=dtype, device=q.device).masked_fill(~mask, torch.finfo(dtype).min)
    for x in (q, k, v):
        for i, (a, b) in enumerate(spans):
            nan(x[i, :, :a])
            nan(x[i, :, b:])
    parts = [tuple(x[i, :, a:b].transpose(0, 1) for x in (q, k, v)) for i, (a, b) in enumerate(spans)]
    call = Call(
        "mask",
        parts,
        [given] * batch,
        how["causal"],
        (back, -1),
        0.0,
        None,
        how["scale"],
        how["accumulator"],
        set(),
        False,
    )

    def run():
        out = fp8.scaled_dot_product_attention(
            q, k, v, mask, scale=call.scale, enable_gqa=True, plan=given, accumulator=call.accumulator
        )
        call.tokens_outside = torch.cat(
            [part for i, (a, b) in enumerate(spans) for part in (out[i, :, :a], out[i, :, b:])], dim=1
        )
        return [out[i, :, a:b].transpose(0, 1) for i, (a, b) in enumerate(spans)], None, None

    call.run = run
    return call


INTERFACES = {
    "dense": dense,
    "packed": packed,
    "cache": lambda draw, cuda: cached(draw, cuda, False),
    "pages": lambda draw, cuda: cached(draw, cuda, True),
    "mask": masked,
}


def drawn(number, device):
    """Call number ``number``."""
    draw = Draw(number, device)
    return INTERFACES[draw.one(*INTERFACES)](draw, torch.device(device).type == "cuda")


def faults(call):
    """What is wrong with a call's results, as a list of sentences; empty where nothing is."""
    found = []
    outs, lses, leaves = call.run()
    counted = [i for i in range(len(call.parts)) if i not in call.spoiled]
    kind = "f16" if call.accumulator == "f16" else "fp8"
    expected = []
    for i in counted:
        parts = call.parts[i]
        if leaves is not None and call.wants_gradients:
            parts = [x.detach().requires_grad_(True) for x in parts]
        out, lse, size, top, bend = reference(*parts, call.descales[i], call)
        expected.append((parts, out))
        ours, out = outs[i].double(), out.detach()
        # A logit that is off moves its P and the sum.
        most = (
            (ROUNDING[kind] + 2 * bend.T[..., None]) * 1.05 * size
            + SUBNORMAL[kind] * top
            + BF16 * out.abs()
            + 1e-5 * size
            + LEAST.get(outs[i].dtype, 1e-30)
        )
        if ours.shape != out.shape:
            found.append(f"sequence {i}: the output has shape {tuple(ours.shape)}, not {tuple(out.shape)}")
        elif not bool(((ours - out).abs() <= most.detach()).all()):
            worst = ((ours - out).abs() / most.detach()).nan_to_num(math.inf)
            found.append(f"sequence {i}: the output is off by {float(worst.max()):.3g} times what rounding can do")
        if call.gives_lse and lses is not None:
            lse, ours = lse.detach(), lses[i].double()
            same = torch.where(lse == -math.inf, ours == -math.inf, (ours - lse).abs() <= 1e-4 + bend)
            if not bool(same.all()):
                worst = torch.where(ours == lse, 0.0, (ours - lse).abs()).nan_to_num(math.inf).max()
                found.append(f"sequence {i}: the log-sum-exp is off by {float(worst):.3g}")
    outside = call.tokens_outside
    if outside is not None and outside.numel() and not bool((outside == 0).all()):
        found.append("rows of no sequence are not zero")
    if call.wants_gradients and leaves is not None and leaves[0].requires_grad:
        weight = lambda out: torch.cos(torch.arange(out.numel(), device=out.device)).view(out.shape).to(out.dtype)
        total = sum((outs[i].double() * weight(outs[i]).double()).sum() for i in range(len(outs)))
        ours = torch.autograd.grad(total, leaves)
        for which, name in enumerate("qkv"):
            parts = [parts[which] for parts, _ in expected]
            against = sum((out * weight(out)).sum() for _, out in expected)
            theirs = torch.autograd.grad(against, parts, retain_graph=True, allow_unused=True, materialize_grads=True)
            # Rows of no sequence have no gradient.
            rest = ours[which].clone()
            for i, grad in enumerate(theirs):
                call.take(which, i, rest)[...] -= grad.to(rest.dtype)
            # The output in BF16 makes delta, its product with the gradient, inexact.
            noise = BF16 * math.sqrt(sum(float(weight(out).square().sum()) for _, out in expected))
            if name != "v":
                deltas = [(out.detach().norm(dim=2) * weight(out).norm(dim=2)).norm() for _, out in expected]
                longest = [
                    x.detach().double().norm(dim=2).max() for p, _ in expected for x in (p[1 - which],) if x.numel()
                ]
                noise = float(
                    BF16 * call.scale * math.sqrt(sum(float(x) ** 2 for x in deltas)) * max(longest, default=0.0)
                )
            norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in theirs))
            error = float(rest.double().norm())
            if not error <= 0.015 * norm + noise + 1e-6:
                found.append(f"the gradient of {name} is off by {error:.3g} of {norm:.3g}")
    return found


def main():
    """Runs calls by number."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of a series of a million numbers")
    parser.add_argument("--first", type=int, default=0, help="the first number of the series")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-x", action="store_true", help="raise the first exception")
    given = parser.parse_args()
    ran, failed = collections.Counter(), collections.Counter()
    for number in range(given.first, given.first + given.count):
        interface, words, found = "not drawn", "", []
        try:
            call = drawn(1_000_000 * given.seed + number, given.device)
            interface, words = call.interface, call.words()
            found = faults(call)
        except Exception as error:
            if given.x:
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            found = [f"{type(error).__name__}: {' '.join(str(error).split())} ({place.name})"]
        ran[interface] += 1
        if found:
            failed[interface] += 1
            print(f"--seed {given.seed} --first {number} --count 1: {words}: {'; '.join(found)}", flush=True)
    counts = ", ".join(f"{name} {count - failed[name]}/{count}" for name, count in sorted(ran.items()))
    print(f"{given.device}: {sum(ran.values()) - sum(failed.values())} of {sum(ran.values())} calls passed ({counts})")
    sys.exit(bool(failed))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
