"""Where each layer's values lie in an engine's results and in a runtime's tensors, whose layers may have unequal heads."""

import dataclasses
import math

import numpy as np
import torch

# Entries past a layer's own heads: no maximum takes it, and it can be divided by.
PADDING = torch.finfo(torch.float32).tiny


class Heads:
    """Query and KV heads of each layer; ``n_q`` and ``n_kv`` are the largest."""

    def __init__(self, layers):
        self.counts = [(layer.n_q_heads, layer.n_kv_heads) for layer in layers]
        self.n_q, self.n_kv = (max(count[which] for count in self.counts) for which in range(2))

    def groups(self):
        """Layers by their heads: lists of numbers, by ``(n_q, n_kv)``."""
        groups = {}
        for index, count in enumerate(self.counts):
            groups.setdefault(count, []).append(index)
        return groups

    @property
    def equal(self):
        """Whether every layer has as many."""
        return len(set(self.counts)) == 1

    def pad(self, tensor, which):
        """Fills what lies past each layer's query (0) or KV heads (1) in the last axis of ``(layers, .., heads)``."""
        for index, count in enumerate(self.counts):
            tensor[index][..., count[which] :] = PADDING
        return tensor


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive layers of as many heads, in ``parts`` engine entries each, and the heads of the layers before them."""

    first: int
    count: int
    n_q: int
    n_kv: int
    parts: int
    q: int
    kv: int


def runs(counts, parts, layers=None):
    """The runs of layers with these heads and engine entries; ``layers``: their numbers, by default all from 0 on."""
    layers = range(len(counts)) if layers is None else layers
    found, q, kv = [], 0, 0
    for index, (n_q, n_kv), entries in zip(layers, counts, parts):
        last = found[-1] if found else None
        alike = last is not None and (last.n_q, last.n_kv, last.parts) == (n_q, n_kv, entries)
        if alike and index == last.first + last.count:
            found[-1] = dataclasses.replace(last, count=last.count + 1)
        else:
            found.append(Run(index, 1, n_q, n_kv, entries, q, kv))
        q, kv = q + n_q, kv + n_kv
    return found


class Target:
    """A tensor with a row for each layer, or for each of ``layers`` in order."""

    def __init__(self, tensor, layers=None):
        self._tensor = tensor
        self._rows = None if layers is None else {layer: row for row, layer in enumerate(layers)}

    def rows(self, run):
        """The rows of a run, or None where it has none."""
        first = run.first if self._rows is None else self._rows.get(run.first)
        return None if first is None else self._tensor[first : first + run.count]


def copies(results, targets, every):
    """Pairs of views, from an engine's flat results to the targets of each name: what a refresh has to copy."""

    def by_head(values, run, rows):
        # (layer, part, tensor, head of the part) -> (layer, tensor, part, head of the part)
        own = values[rows * run.kv :][: rows * run.n_kv * run.count]
        return own.view(run.count, run.parts, rows, run.n_kv // run.parts).transpose(1, 2)

    pairs = []
    for name, places in targets.items():
        if name not in results:
            continue
        values = results[name]
        for run in every:
            for place in places:
                rows = place.rows(run)
                if rows is None:
                    continue
                if name == "bounds":
                    width = values.numel() // sum(r.n_q * r.count for r in every)
                    own = values.view(-1, width)[run.q :][: run.n_q * run.count].view(run.count, run.n_q, width)
                    pairs.append((own[..., : rows.shape[-1]], rows[:, : run.n_q]))
                else:
                    source = by_head(values, run, {"heads": 4, "operands": 3}[name])
                    pairs.append((source, rows[:, :, : run.n_kv].unflatten(2, source.shape[2:])))
    return pairs


def folded(words, n_q, n_kv):
    """amax ``(layers, 3, n_kv)`` and counts ``(layers, 3, n_kv, 3)`` from the words of layers with as many heads."""
    rows = words[:, n_q : 2 * (n_q + n_kv)].reshape(words.shape[0], -1, 4)
    # Bits of numbers that are not negative keep their order as integers.
    q, k, v = rows[..., 0].split([n_q, n_kv, n_kv], dim=1)
    amax = torch.stack([q.unflatten(1, (n_kv, -1)).amax(dim=2), k, v], dim=1).view(torch.float32)
    q, k, v = unsigned(rows[..., 1:]).split([n_q, n_kv, n_kv], dim=1)
    return amax, torch.stack([q.unflatten(1, (n_kv, -1)).sum(dim=2), k, v], dim=1)


U32_MAX = 0xFFFFFFFF


def unsigned(words):
    """Words of 32 bits, which PyTorch has as int32, as int64."""
    return words.long() & U32_MAX


def add_counts(words, counts):
    """Adds int64 counts to words in place; they stop at the largest that 32 bits hold, as the kernels' do."""
    words.copy_(_signed((unsigned(words) + counts).clamp_max(U32_MAX)))


def add(words, called, n_q):
    """Takes the words of a call into a layer's: largest values, and counts."""
    before, new = unsigned(words), unsigned(called)
    largest, total = torch.maximum(before, new), (before + new).clamp_max(U32_MAX)
    # Of the words of a row of logits the first three are largest values, of the others the first.
    places = (slice(n_q), 3), (slice(n_q, None), 1)
    rows = [torch.cat([largest[rows, :n], total[rows, n:]], dim=1) for rows, n in places]
    words.copy_(_signed(torch.cat(rows)))


def _signed(numbers):
    """int64 of 32 bits as PyTorch's int32 has them."""
    return torch.where(numbers > U32_MAX // 2, numbers - (U32_MAX + 1), numbers)


def observed(words, heads):
    """The same of every layer of a runtime, zero past the heads of each."""
    if heads.equal:
        return folded(words, heads.n_q, heads.n_kv)
    shape = (len(heads.counts), 3, heads.n_kv)
    amax = words.new_zeros(shape, dtype=torch.float32)
    counts = words.new_zeros((*shape, 3), dtype=torch.int64)
    for index, (n_q, n_kv) in enumerate(heads.counts):
        one = folded(words[index : index + 1], n_q, n_kv)
        amax[index : index + 1, :, :n_kv], counts[index : index + 1, :, :n_kv] = one
    return amax, counts


def extremes(ordered):
    """Largest and smallest logit from words in the order of unsigned integers, int64 ``(.., 2)``; NaN where there was none."""
    low = ordered.clone()
    low[..., 1] ^= U32_MAX
    bits = torch.where(low & 0x80000000 != 0, low & 0x7FFFFFFF, ~low & U32_MAX)
    return torch.where(ordered == 0, math.nan, bits.to(torch.int64).to(torch.uint32).view(torch.float32).double())


def _extremes(words, heads):
    """Largest and smallest logits ``(layers, n_q, 2)``, which are stored as integers of the same order; NaN where there are none."""
    ordered = unsigned(words[:, : heads.n_q, :2])
    for index, (n_q, _) in enumerate(heads.counts):
        ordered[index, n_q:] = 0
    return extremes(ordered)


def stats(words, heads, descales, counted, reported):
    """What ``Runtime.stats`` returns. ``descales``: what was multiplied with, or None; ``counted``: counters of each
    layer's calls by what ran them, and by that and why."""
    amax, counts = observed(words, heads)
    logits, why = _extremes(words, heads), {}
    for (name, reason), row in _by_layer([reasons for _, reasons in counted]).items():
        why.setdefault(name, {})[reason] = row
    return {
        "amax": amax.numpy(),
        "overflow": counts[..., 0].numpy(),
        "beyond": counts[..., 1].numpy(),
        "non_finite": counts[..., 2].numpy(),
        "peak": np.full(amax.shape, np.nan, np.float32) if descales is None else (amax / descales[:, :3]).numpy(),
        "logit_max": logits[..., 0].numpy(),
        "logit_min": logits[..., 1].numpy(),
        "calls": _by_layer([calls for calls, _ in counted]),
        "why": why,
        "reported": reported,
    }


def _by_layer(counters):
    """Counts ``(layers,)`` by what was counted."""
    return {key: np.array([counter[key] for counter in counters]) for key in sorted(set().union(*counters))}


def memory(engine, place, dtype, device):
    """What an engine writes, as a tensor that keeps it alive: on the CPU it is one, on a device a pointer and a length."""
    if isinstance(place, torch.Tensor):
        return place
    return torch.as_tensor(_Memory(engine, *place, _KINDS[dtype]), dtype=dtype, device=device)


_KINDS = {torch.float32: "<f4", torch.int32: "<i4"}


class _Memory:
    """Device memory in the form that ``torch.as_tensor`` takes."""

    def __init__(self, engine, pointer, length, kind):
        self._engine = engine
        self.__cuda_array_interface__ = {"shape": (length,), "typestr": kind, "data": (pointer, False), "version": 2}
