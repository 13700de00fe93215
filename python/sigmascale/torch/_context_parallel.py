"""Attention over a sequence that the ranks of a process group share (context parallelism).

All ranks have the same weights and hence the same scales, so q, k and v are cast before they travel and E4M3 crosses
the network, half the bytes of BF16. Ring: keys and values go round, and what each rank gets from one block is merged by
its log-sum-exp. Ulysses: heads are exchanged for the sequence, and each rank runs its heads over all of it.

Both are written over two functions on operands in E4M3, ``(batch, seq, heads, d_head)`` with descales ``(batch,
n_kv)``:

    forward(q8, k8, v8, descales, causal, scale) -> out, lse (batch, n_q, seq) in nats
    backward(grad, q8, k8, v8, descales, out, lse, causal, scale) -> dq, dk, dv

The backward may get only some of a row's keys; its ``out`` and ``lse`` are always those of all keys of the row.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .._errors import ArgumentError, MismatchError, UnsupportedError
from . import _attention, _backends, _centers, _e4m3, _ops
from ._plan import LayerPlan
from ._terms import Terms, hidden

if TYPE_CHECKING:
    from ._typing import Group, Kernels, Plan


def _in_f32(function):
    """Without autocast, whose products are rounded: a log-sum-exp has to be that of the backward's logits."""

    @functools.wraps(function)
    def run(first, *arguments):
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *arguments)

    return run


@_in_f32
def plain_forward(q8, k8, v8, descales, causal, scale):
    """In f32, P not rounded."""
    logits, (_, _, v) = _logits(q8, k8, v8, descales, causal, scale)
    lse = logits.logsumexp(dim=3)
    return (torch.exp(logits - lse[..., None]) @ v).transpose(1, 2), lse


@_in_f32
def plain_backward(grad, q8, k8, v8, descales, out, lse, causal, scale):
    """dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = tau dS K, dK = tau dS^T Q in f32."""
    logits, (q, k, v) = _logits(q8, k8, v8, descales, causal, scale)
    grad, out = (x.float().transpose(1, 2) for x in (grad, out))
    weights = torch.exp(logits - lse[..., None])
    scores = weights * (grad @ v.transpose(2, 3) - (grad * out).sum(dim=3, keepdim=True)) * scale
    fold = lambda g: g.unflatten(1, (k8.shape[2], -1)).sum(dim=2)
    grads = scores @ k, fold(scores.transpose(2, 3) @ q), fold(weights.transpose(2, 3) @ grad)
    return tuple(g.transpose(1, 2) for g in grads)


def _logits(q8, k8, v8, descales, causal, scale):
    every = lambda x: x.repeat_interleave(q8.shape[2] // k8.shape[2], dim=2)
    values = (x.float() * _e4m3.spread(d, x.shape[2]) for x, d in zip((q8, k8, v8), descales))
    q, k, v = (x.transpose(1, 2) for x in (next(values), every(next(values)), every(next(values))))
    logits = (q @ k.transpose(2, 3)) * scale
    if causal:
        logits = logits.masked_fill(hidden(q.shape[2], k.shape[2], q.device), float("-inf"))
    return logits, (q, k, v)


PLAIN = plain_forward, plain_backward


def _place(group):
    """How many ranks a group has, and which of them this is."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("this process is not in the group: each rank passes the group that it shares a sequence with")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed.ProcessGroup or None, not {type(group).__name__}: that of a mesh is "
            "mesh[dimension].get_group()"
        )
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ArgumentError("this process is not in the group: each rank passes the group that it shares a sequence with")
    return ranks, rank


def shard_sequence(x: torch.Tensor, group: Group, dim: int = 1, zigzag: bool = False) -> torch.Tensor:
    """This rank's chunk of the sequence, split into ``world_size`` chunks. With ``zigzag``, chunks r and 2n - 1 - r of
    2n, which gives all n ranks the same work under a causal mask."""
    ranks, rank = _place(group)
    chunks = ranks * (2 if zigzag else 1)
    if x.shape[dim] % chunks:
        raise ArgumentError(
            f"a sequence of {x.shape[dim]} is not a multiple of {chunks}, which {ranks} ranks share: pad it"
        )
    parts = x.chunk(chunks, dim)
    return torch.cat([parts[rank], parts[2 * ranks - 1 - rank]], dim) if zigzag else parts[rank].contiguous()


def gather_sequence(x: torch.Tensor, group: Group, dim: int = 1, zigzag: bool = False) -> torch.Tensor:
    """Inverse of :func:`shard_sequence`: the full sequence on all ranks, without gradients."""
    ranks, _ = _place(group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    if not zigzag:
        return torch.cat(parts, dim)
    first, second = zip(*(part.chunk(2, dim) for part in parts))
    return torch.cat([*first, *reversed(second)], dim)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    group: Group,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """FP8 attention of this rank's queries to the keys of all ranks: ``(batch, seq / ranks, heads, d_head)``,
    differentiable.

    ``plan``: a layer of a :class:`Runtime`, or descales of q, k, v f32 ``(n_kv_heads,)``. With ``causal`` each rank
    holds chunks r and 2n - 1 - r of the sequence, as ``shard_sequence(..., zigzag=True)`` gives them; otherwise any
    part. The output is BF16.
    """
    q, k, v = _attention.lowered(q, k, v)
    call = _Call(q, k, v, plan, group, softmax_scale, kernels)
    if causal and q.shape[1] % 2:
        raise ArgumentError(
            f"{q.shape[1]} queries are no two chunks: shard_sequence(..., zigzag=True) gives an even number"
        )
    return call.joined(_Ring.apply(q, *call.centered(k, v), call, bool(causal)))


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    group: Group,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """The same by an exchange of heads for the sequence: rank r holds chunk r, as ``shard_sequence`` returns it. The
    number of query heads must be a multiple of the number of ranks. If there are fewer KV heads than ranks, they are
    repeated."""
    q, k, v = _attention.lowered(q, k, v)
    call = _Call(q, k, v, plan, group, softmax_scale, kernels)
    n_q, n_kv = q.shape[2], k.shape[2]
    if n_q % call.ranks or (n_kv % call.ranks and call.ranks % n_kv):
        raise UnsupportedError(
            f"{call.ranks} ranks do not share {n_q} query and {n_kv} KV heads evenly: use ring_attention, or fewer ranks"
        )
    return call.joined(_Ulysses.apply(q, *call.centered(k, v), call, bool(causal)))


class _Call:
    """What both need of a call."""

    def __init__(self, q, k, v, plan, group, softmax_scale, kernels):
        (self.ranks, self.rank), self.group = _place(group), group
        _attention.check(q, k, v)
        if k.shape != v.shape or q.shape[1] != k.shape[1]:
            raise MismatchError(
                f"q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}: (batch, seq / ranks, heads, d_head) "
                "is needed, as many keys as queries"
            )
        known = _attention.resolve(q, k, v, plan, softmax_scale, _attention.How(), k.shape[1])
        if known.descales is None:
            raise UnsupportedError("policy 'current' has other descales on each rank: context parallelism needs a plan")
        if isinstance(plan, LayerPlan):
            keys = self.ranks * k.shape[1]
            if plan.positions is not None and keys > plan.positions:
                raise MismatchError(
                    f"the call has {keys} keys, and queries of {plan.name} grow with the position: its descales are bounds for "
                    f"{plan.positions}"
                )
        self.words, self.scale, self.descales = known.words, known.scale, known.rows(q.shape[0])[:3]
        self._c, self._m = _attention.centers_of(None, q, k, v, plan, None, None)
        self.forward, self.backward = kernels or _kernels(q)

    def centered(self, k, v):
        """Keys and values without the plan's centers; all ranks have the same."""
        return _centers.subtracted(k, v, (self._c, self._m))

    def joined(self, out):
        """The output with m, once, behind the merge."""
        if self._m is None:
            return out
        return (out.float() + self._m.repeat_interleave(out.shape[2] // self._m.shape[0], dim=0)).to(out.dtype)

    def cast(self, q, k, v):
        """q, k and v in E4M3, with their statistics."""
        operands = _e4m3.cast_all(q.detach(), k.detach(), v.detach(), self.descales, self.words)
        return tuple(x.contiguous() for x in operands)

    def next(self, tensor):
        """Starts to send a tensor to the next rank and to receive the previous one's; wait for the works before it is
        read."""
        received = torch.empty_like(tensor)
        to, source = ((self.rank + step) % self.ranks for step in (1, -1))
        peers = [dist.get_global_rank(self.group, peer) if self.group else peer for peer in (to, source)]
        operations = [
            dist.P2POp(dist.isend, tensor, peers[0], self.group),
            dist.P2POp(dist.irecv, received, peers[1], self.group),
        ]
        return received, dist.batch_isend_irecv(operations)


def _kernels(q):
    """The package's kernels where they take the call: P V is summed in F16, as a backward needs it."""
    if not (q.is_cuda and _backends.Native.takes(q, q, Terms(True, 1.0))):
        return PLAIN
    native = _backends.backend("native")

    def forward(q8, k8, v8, descales, causal, scale):
        return native.forward(q8, k8, v8, descales, Terms(causal, scale, accumulator="f16"))[:2]

    def backward(grad, q8, k8, v8, descales, out, lse, causal, scale):
        return native.backward(grad, (q8, k8, v8), descales, out, lse, Terms(causal, scale))[:3]

    return forward, backward


def _blocks(rank, source, length, causal):
    """Queries and keys of a block that see each other, and whether under a mask; None where none do.

    Under a causal mask a rank has chunks r and 2n - 1 - r. Of an earlier rank's keys all queries see the first chunk
    and none the second; of a later one's, the second chunk of queries sees both.
    """
    whole, half = slice(None), length // 2
    if not causal or source == rank:
        return whole, whole, causal
    return (whole, slice(half), False) if source < rank else (slice(half, None), whole, False)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call, causal):
        q8, k8, v8 = call.cast(q, k, v)
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, device=q.device, dtype=torch.float32)
        moving = torch.stack([k8.view(torch.uint8), v8.view(torch.uint8)])
        for step in range(call.ranks):
            following, works = call.next(moving) if step + 1 < call.ranks else (None, ())
            k8_there, v8_there = moving.view(_e4m3.E4M3)
            queries, keys, masked = _blocks(call.rank, (call.rank - step) % call.ranks, q.shape[1], causal)
            part, part_lse = call.forward(
                q8[:, queries], k8_there[:, keys], v8_there[:, keys], call.descales, masked, call.scale
            )
            _merge(out[:, queries], lse[:, :, queries], part, part_lse)
            for work in works:
                work.wait()
            moving = following
        out = out.to(torch.bfloat16)
        ctx.save_for_backward(*(x.view(torch.uint8) for x in (q8, k8, v8)), out, lse, *call.descales)
        ctx.call, ctx.causal, ctx.types = call, causal, (q.dtype, k.dtype, v.dtype)
        return out

    @staticmethod
    @_ops.without_second
    def backward(ctx, grad):
        call = ctx.call
        q8, k8, v8, out, lse, *descales = ctx.saved_tensors
        q8 = q8.view(_e4m3.E4M3)
        moving = torch.stack([k8, v8])
        q_grad = torch.zeros(q8.shape, dtype=torch.float32, device=q8.device)
        # Gradients of keys and values go round with them, and one step more, home.
        sums = torch.zeros(moving.shape, dtype=torch.float32, device=q8.device)
        for step in range(call.ranks):
            following, works = call.next(moving) if step + 1 < call.ranks else (None, ())
            k8_there, v8_there = moving.view(_e4m3.E4M3)
            queries, keys, masked = _blocks(call.rank, (call.rank - step) % call.ranks, q8.shape[1], ctx.causal)
            operands = q8[:, queries], k8_there[:, keys], v8_there[:, keys]
            rows = out[:, queries], lse[:, :, queries].contiguous()
            grads = call.backward(grad[:, queries], *operands, descales, *rows, masked, call.scale)
            for total, part in zip((q_grad[:, queries], sums[0][:, keys], sums[1][:, keys]), grads):
                total += part
            for work in works:
                work.wait()
            if call.ranks > 1:
                sums, works = call.next(sums)
                for work in works:
                    work.wait()
            moving = following
        return (*(x.to(kind) for x, kind in zip((q_grad, *sums), ctx.types)), None, None)


def _merge(out, lse, part, part_lse):
    """Takes a part of the keys in, by log-sum-exp, in place."""
    both = torch.logaddexp(lse, part_lse)
    weight = lambda one: torch.exp(one - both).transpose(1, 2)[..., None]
    out.mul_(weight(lse)).add_(part * weight(part_lse))
    lse.copy_(both)


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call, causal):
        repeat = max(call.ranks // k.shape[2], 1)
        q8, k8, v8 = (x.view(torch.uint8) for x in call.cast(q, k, v))
        k8, v8 = (x.repeat_interleave(repeat, dim=2) for x in (k8, v8))
        operands = [_to_heads(x, call) for x in (q8, k8, v8)]
        own = [row.repeat_interleave(repeat, dim=1).chunk(call.ranks, dim=1)[call.rank] for row in call.descales]
        out, lse = call.forward(*(x.view(_e4m3.E4M3) for x in operands), own, causal, call.scale)
        out = out.to(torch.bfloat16)
        ctx.save_for_backward(*operands, out, lse, *own)
        ctx.call, ctx.causal, ctx.repeat, ctx.types = call, causal, repeat, (q.dtype, k.dtype, v.dtype)
        return _to_sequence(out, call)

    @staticmethod
    @_ops.without_second
    def backward(ctx, grad):
        call = ctx.call
        *operands, out, lse, q_descale, k_descale, v_descale = ctx.saved_tensors
        grad = _to_heads(grad.to(torch.bfloat16), call)
        own, operands = (q_descale, k_descale, v_descale), [x.view(_e4m3.E4M3) for x in operands]
        grads = call.backward(grad, *operands, own, out, lse, ctx.causal, call.scale)
        # Repeated heads lie on several ranks: they are summed after the exchange, in f32.
        q_grad, k_grad, v_grad = (_to_sequence(g.float(), call) for g in grads)
        k_grad, v_grad = (g.unflatten(2, (-1, ctx.repeat)).sum(dim=3) for g in (k_grad, v_grad))
        return (*(g.to(kind) for g, kind in zip((q_grad, k_grad, v_grad), ctx.types)), None, None)


def _to_heads(x, call):
    """``(batch, seq / ranks, heads, d)`` of all heads to ``(batch, seq, heads / ranks, d)`` of this rank's."""
    return torch.cat(_exchange(x.chunk(call.ranks, dim=2), call), dim=1)


def _to_sequence(x, call):
    """The inverse."""
    return torch.cat(_exchange(x.chunk(call.ranks, dim=1), call), dim=2)


def _exchange(parts, call):
    """The part that each rank has for this one."""
    sent = torch.stack(parts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=call.group)
    return received.unbind()
