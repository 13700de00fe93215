"""Norms from power iteration in place of certified ones: the vectors of a runtime, and how far they have come.

A vector is that of a head, ``W_K^T v`` of the right singular vector v up to its length, or with ``power-summed`` that of a KV head
for the sum over a layer's query heads. Vectors lie in one tensor, layer after layer, which engines copy from and to: they stay when
weights move and engines are made anew, and depend on no address.
"""

import numpy as np
import torch

from .. import _native
from .._arguments import counts
from .._errors import ArgumentError, MismatchError, UnsupportedError
from . import _norms

GRAM, POWER, SUMMED = "gram", "power", "power-summed"
NAMES = (GRAM, POWER, SUMMED)


class Estimates:
    """The vectors of every layer, and what is known of them."""

    def __init__(self, runtime, known, estimator, iterations):
        """``iterations``: from random vectors, and of every later refresh."""
        self.estimator, self._counts = estimator, runtime._heads.counts
        self.iterations = counts("iterations", iterations)
        found, ranks = known.at_rest, known.head_ranks()
        for layer in found:
            if layer.latent is not None or layer.q_norm is not None:
                what = "has latent attention (MLA)" if layer.latent is not None else "normalizes q and k after the projection"
                raise UnsupportedError(
                    f"{layer.name} {what}, so no norm of its projections bounds its logits: leave estimator at 'gram'"
                )
        if estimator == SUMMED and sum(n_q * of for (n_q, _), (of, _) in zip(self._counts, ranks)) != runtime._q_heads:
            raise UnsupportedError(
                "estimator='power-summed' sums over all heads of a layer, and other processes have some of them: shard the model "
                "with parallelize_module, or take 'power'"
            )
        # Where ranks share a layer's heads: over whom its sums go.
        self._groups = known.head_groups() if estimator == SUMMED else [None] * len(found)
        self._ranks = [layer.d_head for layer in found]
        self._rotates = [layer.rotary > 0 for layer in found]
        # `geometry` covers sigma from a cold start on: with the share of the failure probability that is a head's.
        covers = estimator == POWER and runtime.policy == "geometry"
        self.cover = runtime.tail.delta / runtime._q_heads if covers else None
        self._share = runtime.tail.delta / runtime._q_heads
        owners = [n_kv if estimator == SUMMED else n_q for n_q, n_kv in self._counts]
        ends = np.cumsum([0, *(count * rank for count, rank in zip(owners, self._ranks))]).tolist()
        self._rows = [slice(start, end) for start, end in zip(ends, ends[1:])]
        made = torch.Generator(device="cpu").manual_seed(0)
        drawn = []
        for count, rank, (of, own) in zip(owners, self._ranks, ranks):
            # Those of the whole layer, so that heads have the same ones whoever has the heads.
            vectors = torch.randn((of * count, rank), generator=made, dtype=torch.float64, device="cpu")
            vectors = vectors[own * count : (own + 1) * count]
            drawn.append((vectors / vectors.norm(dim=1, keepdim=True)).float().flatten())
        self.vectors = torch.cat(drawn).to(runtime.device)
        # Those that the present plans were computed from: a resumed run computes them again.
        self.before = self.vectors.clone()
        self.steps, self._steps_before = [0] * len(found), [0] * len(found)
        # What the estimates of a layer were multiplied by.
        self._factors = [1.0] * len(found)

    def check_entries(self, entries):
        """Raises an exception for layers whose heads an engine takes in parts, where the sum needs all of them."""
        if self.estimator == SUMMED and any(len(each) > 1 for each in entries):
            raise UnsupportedError("estimator='power-summed' needs the heads of a layer in one tensor: take 'power'")

    def launch(self, engine, results, stream, indices, found, layers=None):
        """Runs an engine on layers, with the iterations of one forward. ``results``: its tensors; ``found``: the layers as they
        are now, ``layers`` as the engine takes them, if they are not those that it was made with."""
        cold = self.steps[indices[0]] == 0
        count = self.iterations[0 if cold else 1]
        places = list(self._places(indices))
        for mine, its in places:
            self.before[mine].copy_(self.vectors[mine])
            results.vectors[its].copy_(self.vectors[mine])
        if all(self._groups[index] is None for index in indices):
            engine.launch(stream, layers, count, cold)
            for mine, its in places:
                self.vectors[mine].copy_(results.vectors[its])
        else:
            results.sigma.copy_(self._iterate_together(found, indices, count))
            engine.launch(stream, layers, 0, cold)
        for index in indices:
            self._steps_before[index] = self.steps[index]
            self.steps[index] += count
            covered = cold and self.cover is not None and not self._rotates[index]
            self._factors[index] = _native.certified_inflation(count, self._ranks[index], self.cover) if covered else 1.0

    def _iterate_together(self, found, indices, count):
        """Estimates of the norm of each layer's sum over heads, where the heads are split among ranks. The product of the sum with a
        vector is the sum of what each rank's heads give, so each iteration reduces two vectors of d_model values."""
        estimates = []
        for index, layer in zip(indices, found):
            rows = self._rows[index]
            (n_q, n_kv), rank = self._counts[index], self._ranks[index]
            # Raw weights, as the paper has them.
            q, k = layer.q.detach().float(), layer.k.detach().float()
            keys, sigma = self.vectors[rows].view(n_kv, rank), None
            for _ in range(count):
                u = self._summed(index, q.t() @ keys.repeat_interleave(n_q // n_kv, dim=0).flatten())
                u = u / u.norm()
                own = (q @ u).view(n_kv, n_q // n_kv, rank).sum(dim=1)
                v = self._summed(index, k.t() @ own.flatten())
                sigma = v.norm()
                # A vector that is mapped to zero stays as it is.
                keys = torch.where(sigma > 0, (k @ (v / sigma)).view(n_kv, rank), keys)
            self.vectors[rows].copy_(keys.flatten())
            estimates.append(sigma)
        return torch.stack(estimates)

    def _summed(self, index, vector):
        """The sum over the ranks that share a layer's heads."""
        if self._groups[index] is not None:
            torch.distributed.all_reduce(vector, group=self._groups[index])
        return vector

    def _places(self, indices):
        """Slices of consecutive layers here, and where they lie in an engine's vectors."""
        at, first = 0, 0
        for position, index in enumerate(indices):
            last = position + 1 == len(indices)
            if last or indices[position + 1] != index + 1:
                mine = slice(self._rows[indices[first]].start, self._rows[index].stop)
                yield mine, slice(at, at + mine.stop - mine.start)
                at, first = at + mine.stop - mine.start, position + 1

    def report(self, logits, resident):
        """What ``Runtime.estimates`` returns, from the runtime's bounds of logits. ``resident``: layers by their numbers, whose
        weights are here."""
        used = logits[..., 0].double().cpu().numpy()
        sigma, upper, residual = (np.full(used.shape, np.nan) for _ in range(3))
        for index, layer in resident:
            if self._groups[index] is None:
                n_q, n_kv = self._counts[index]
                own = self.vectors[self._rows[index]].view(-1, self._ranks[index])
                residual[index, :n_q] = _residual(layer, own, n_q, n_kv, self.estimator == SUMMED).cpu().numpy()
        for index, (n_q, _) in enumerate(self._counts):
            sigma[index, :n_q] = used[index, :n_q] / self._factors[index]
            cold = self.iterations[0]
            if self.estimator == POWER and self.steps[index] == cold and not self._rotates[index]:
                inflation = _native.certified_inflation(cold, self._ranks[index], self._share)
                upper[index, :n_q] = sigma[index, :n_q] * inflation
        steps = np.array(self.steps)
        return {"sigma": sigma, "upper": upper, "residual": residual, "steps": steps, "guarantee": "none"}

    def state(self, due):
        """What a resume needs: the vectors that each layer's plan came from, or will come from where it is ``due``."""
        vectors, steps = self.before.cpu().clone(), list(self._steps_before)
        for index in due:
            vectors[self._rows[index]] = self.vectors[self._rows[index]].cpu()
            steps[index] = self.steps[index]
        return {"estimator": self.estimator, "iterations": self.iterations, "vectors": vectors, "steps": steps}

    def check(self, state):
        """Raises an exception if a saved state does not fit."""
        if not isinstance(state, dict) or state.get("estimator") != self.estimator:
            found = state.get("estimator") if isinstance(state, dict) else GRAM
            raise MismatchError(f"the saved state has estimator {found!r}, this runtime {self.estimator!r}")
        if state.get("iterations") != self.iterations:
            raise MismatchError(f"the saved state has iterations {state.get('iterations')}, this runtime {self.iterations}")
        vectors, steps = state.get("vectors"), state.get("steps")
        fits = isinstance(vectors, torch.Tensor) and vectors.dtype == torch.float32 and vectors.shape == self.vectors.shape
        if not fits or not bool(torch.isfinite(vectors).all()):
            raise MismatchError(f"the vectors of the saved state are no {self.vectors.numel()} finite float32 values")
        sound = isinstance(steps, list) and len(steps) == len(self.steps)
        if not sound or not all(isinstance(step, int) and step >= 0 for step in steps):
            raise MismatchError(f"the saved state has no count of iterations for each of {len(self.steps)} layers")

    def load(self, state):
        """Goes on from a state that fits; the plans have to be computed anew."""
        self.vectors.copy_(state["vectors"])
        self.steps = list(state["steps"])


def _residual(layer, vectors, n_q, n_kv, summed):
    """Of the vectors that the next iteration begins with: v of a head, u = M v / |M v|, and the length of M^T u - |M v| v."""
    q, k = (_heads_of(layer, which, summed) for which in (0, 1))
    k, y = k.repeat_interleave(n_q // n_kv, dim=0), vectors.float()
    y = y.repeat_interleave(n_q // n_kv, dim=0) if summed else y
    # Matrices of heads times vectors, either way; of the sum there is one vector for all heads.
    up = lambda w, x: torch.einsum("hrd,hr->d" if summed else "hrd,hr->hd", w, x)
    down = lambda w, x: torch.einsum("hrd,d->hr" if summed else "hrd,hd->hr", w, x)
    unit = lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    v = unit(up(k, down(q, up(q, y))))
    image = up(q, down(k, v))
    length = image.norm(dim=-1, keepdim=True)
    residual = (up(k, down(q, unit(image))) - length * v).norm(dim=-1)
    factor = max(1.0, layer.rope_factor) if layer.rotary else 1.0
    return (residual * factor**2).expand(n_q)


def _heads_of(layer, which, raw):
    """Rows of heads of q (0) or k (1), raw or with what the norm does to them: ``(heads, d_head, d_model)``."""
    rows = _norms.by_head(layer, which).float()
    if not raw and layer.gain is not None:
        rows = rows * (layer.gain_offset + layer.gain.detach().float())
    return rows - rows.mean(dim=2, keepdim=True) if not raw and layer.norm == "layer" else rows


def checked(estimator):
    """An estimator by its name."""
    if estimator not in NAMES:
        raise ArgumentError(f"estimator {estimator!r} is not one of {', '.join(NAMES)}")
    return estimator
