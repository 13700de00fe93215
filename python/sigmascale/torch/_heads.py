"""Where each layer's values lie in an engine's results and in a runtime's tensors, whose layers may have unequal heads."""

import dataclasses

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
