"""States of policies by the model's own layers and heads, so that processes with other layers or heads can go on from them.

A saved state holds ``places``, one for each of its layers: the layer's number in the model, its first KV head, and how many KV and
query heads of the layer it has. Here a state is taken apart into records, one a place, and put together for other places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._errors import MismatchError

_POOLED = ("logit", "q", "k", "v")


@dataclasses.dataclass
class _Record:
    number: int
    first: int
    n_kv: int
    n_q: int
    descales: torch.Tensor
    # The native state without its layers.
    frame: dict
    # Of delayed policies: slots of the five tensors.
    slots: list | None = None
    # Of auto-c: steps seen, and pools of the four tensors.
    seen: int = 0
    pools: list | None = None

    @property
    def place(self):
        return [self.number, self.first, self.n_kv, self.n_q]

    @property
    def pooling(self):
        return self.frame["config"].get("pooling")

    def heads(self):
        """A record for each KV head, or None where heads share what is remembered."""
        if self.pooling != "head":
            return None
        group = self.n_q // self.n_kv
        one = lambda head: dataclasses.replace(
            self,
            first=self.first + head,
            n_kv=1,
            n_q=group,
            descales=self.descales[:, head : head + 1],
            pools=[self.pools[0][head * group : (head + 1) * group], *([p[head]] for p in self.pools[1:])],
        )
        return [one(head) for head in range(self.n_kv)]


def _joined(records):
    """One record of consecutive heads."""
    first = records[0]
    return dataclasses.replace(
        first,
        n_kv=sum(record.n_kv for record in records),
        n_q=sum(record.n_q for record in records),
        descales=torch.cat([record.descales for record in records], dim=1),
        pools=[sum((record.pools[tensor] for record in records), []) for tensor in range(len(_POOLED))],
    )


def _groups(places):
    """Rows by their heads, as policies have them: those with as many are one part."""
    groups = {}
    for row, (_, _, n_kv, n_q) in enumerate(places):
        groups.setdefault((n_q, n_kv), []).append(row)
    return list(groups.values())


def _records(state):
    """A state taken apart."""
    places = state["places"]
    groups = _groups(places)
    parts = [state["state"]] if len(groups) == 1 else state["state"]
    records = [None] * len(places)
    for part, rows in zip(parts, groups, strict=True):
        memory = part["memory"]
        frame = {key: part[key] for key in ("version", "config")} | {"kind": memory["kind"]}
        for at, row in enumerate(rows):
            number, first, n_kv, n_q = places[row]
            record = _Record(number, first, n_kv, n_q, state["descales"][row, :, :n_kv], frame)
            if "pools" in memory:
                widths = [n_q, n_kv, n_kv, n_kv]
                cut = {"head": lambda pools, n: pools[at * n : (at + 1) * n], "layer": lambda pools, _: [pools[at]]}
                take = cut.get(record.pooling, lambda pools, _: pools)
                record.frame = frame | {"restarts": memory["restarts"], "all": sorted(map(list, places))}
                record.seen = memory["seen"][at]
                record.pools = [take(pools, n) for pools, n in zip(memory["pools"], widths)]
            else:
                record.slots = memory["layers"][at]
            records[row] = record
    return records


def _sound(state):
    """The same, with one exception for whatever is damaged."""
    try:
        return _records(state)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise MismatchError(
            f"the saved state is damaged: its layers and heads do not fit its memory ({error!r})"
        ) from None


def _state(records, head):
    """A state of these records; ``head``: what does not depend on them."""
    places = [record.place for record in records]
    groups = _groups(places)
    parts = []
    for rows in groups:
        own = [records[row] for row in rows]
        frame = own[0].frame
        if own[0].pools is None:
            memory = {"layers": [record.slots for record in own]}
        elif own[0].pooling == "model":
            if sorted(places) != frame["all"]:
                raise MismatchError(
                    "the saved state pools the ratios of all its layers and heads, and this process has others: resume with the "
                    "same pipeline and tensor-parallel degrees, or pool by layer or head"
                )
            memory = {"pools": own[0].pools}
        else:
            memory = {"pools": [sum((record.pools[tensor] for record in own), []) for tensor in range(len(_POOLED))]}
        if own[0].pools is not None:
            memory |= {"seen": [record.seen for record in own], "restarts": max(r.frame["restarts"] for r in own)}
        shape = {"layers": len(own), "n_q_heads": own[0].n_q, "n_kv_heads": own[0].n_kv}
        parts.append(
            {
                "version": frame["version"],
                "config": frame["config"],
                "shape": shape,
                "memory": {"kind": frame["kind"]} | memory,
            }
        )
    width = max(record.n_kv for record in records)
    tiny = torch.finfo(torch.float32).tiny
    descales = torch.full((len(records), 4, width), tiny, dtype=torch.float32, device="cpu")
    for row, record in enumerate(records):
        descales[row, :, : record.n_kv] = record.descales
    unequal = [] if len(groups) == 1 else [[record.n_q, record.n_kv] for record in records]
    return head | {
        "shape": [*descales.shape, *unequal],
        "places": places,
        "descales": descales,
        "state": parts[0] if len(parts) == 1 else parts,
    }


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a whole model from those of its processes (``state_dict()`` of each runtime, say by ``all_gather_object``):
    any process loads its part, whatever its pipeline stage and tensor-parallel rank. The same place may come from several."""
    states = list(states)
    if not states:
        raise MismatchError("there are no states to merge")
    head = {key: states[0].get(key) for key in ("version", "policy")}
    for state in states:
        for key, value in head.items():
            if state.get(key) != value:
                raise MismatchError(f"states to merge have {key} {value!r} and {state.get(key)!r}")
    centers = _merged_centers([state.get("centers") for state in states])
    if states[0]["state"] is None:
        return states[0] | {"centers": centers}
    found = {tuple(record.place): record for state in states for record in _sound(state)}
    records = [found[place] for place in sorted(found)]
    if records[0].pooling == "model" and len({str(record.frame["all"]) for record in records}) > 1:
        raise MismatchError(
            "auto-c with pooling='model' pools the layers and heads of a process: its states cannot be merged"
        )
    return _state(records, head) | {"centers": centers}


def _merged_centers(parts):
    """Rows of all processes; the first that has a layer and head gives them."""
    if len({part and part["source"] for part in parts}) != 1:
        raise MismatchError("states to merge have centers from different sources")
    if parts[0] is None:
        return None
    rows = {}
    for part in reversed(parts):
        rows |= part["rows"]
    return {"source": parts[0]["source"], "rows": rows}


def taken(state, places):
    """The part of a state that belongs to these places."""
    if state["places"] == places:
        return state
    by_layer = {}
    for record in _sound(state):
        by_layer.setdefault(record.number, []).append(record)
    return _state([_place(by_layer, place) for place in places], {key: state[key] for key in ("version", "policy")})


def _place(by_layer, place):
    number, first, n_kv, n_q = place
    saved = by_layer.get(number, [])
    for record in saved:
        if record.place == place:
            return record
    if not saved:
        raise MismatchError(
            f"the saved state has no layer {number}: merge the states of all pipeline stages (merge_states)"
        )
    heads = {head.first: head for record in saved for head in record.heads() or ()}
    if not heads:
        have = ", ".join(f"{r.first} to {r.first + r.n_kv - 1}" for r in saved)
        raise MismatchError(
            f"the saved state has one scale for KV heads {have} of layer {number}, and this process has {first} to "
            f"{first + n_kv - 1}: resume with the same tensor-parallel degree, or start the policy anew"
        )
    wanted = range(first, first + n_kv)
    missing = [head for head in wanted if head not in heads]
    if missing or n_kv * heads[next(iter(heads))].n_q != n_q:
        raise MismatchError(
            f"the saved state has no KV heads {missing} of layer {number}: merge the states of all tensor-parallel ranks "
            "(merge_states)"
        )
    return _joined([heads[head] for head in wanted])
