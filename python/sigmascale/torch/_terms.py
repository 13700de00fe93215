"""What one attention call computes beside its tensors, and which keys its queries see."""

import dataclasses
import os

import torch

_CHECK = os.environ.get("SIGMASCALE_CHECK", "0") == "1"


def readable(x):
    """Whether the host may read a tensor's values here."""
    return not torch.compiler.is_compiling() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def checked(x):
    """Whether lengths or page numbers are checked before a call: on a CPU, and with ``SIGMASCALE_CHECK=1`` on a GPU, which the host
    then waits for."""
    return (x.is_cpu or _CHECK) and readable(x)


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Where the sequences of a padded or packed batch lie: int32 ``(count,)`` on the operands' device, never read by the host.

    Rows are counted over the whole ``batch * len`` axis of q and of k, in order; no two sequences share any. Rows of no sequence
    are not read, and get zeros.
    """

    q_starts: torch.Tensor
    q_ends: torch.Tensor
    k_starts: torch.Tensor
    k_ends: torch.Tensor
    # At least as long as the longest.
    max_len_q: int
    max_len_k: int

    @property
    def places(self):
        """Starts and ends of queries and keys."""
        return self.q_starts, self.q_ends, self.k_starts, self.k_ends


@dataclasses.dataclass(frozen=True)
class Terms:
    """Mask, softmax scale, soft-cap, sinks and sequences of a call.

    Query i of a sequence stands at i + len_k - len_q, and sees ``window`` keys before it and after it (-1: all), none after it where
    the call is causal. Logits become ``soft_cap * tanh(S / soft_cap)``; a sink, f32 ``(n_q_heads,)``, joins its head's row sums.
    """

    causal: bool
    scale: float
    window: tuple[int, int] = (-1, -1)
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    sequences: Sequences | None = None

    @property
    def dense(self):
        """Whether there is nothing but causality and the scale."""
        return self.window == (-1, -1) and self.soft_cap is None and self.sinks is None and self.sequences is None

    def visible(self, batch, len_q, len_k, device):
        """True where a query sees a key, ``(batch or 1, 1, len_q, len_k)``; None where every query sees all."""
        left, right = self.window
        right = 0 if self.causal else right
        if self.sequences is None:
            if left < 0 and right < 0:
                return None
            key, row = (torch.arange(count, dtype=torch.int64, device=device) for count in (len_k, len_q))
            ahead = key - row[:, None] - (len_k - len_q)
            return _in_window(ahead, left, right)[None, None]
        rows = torch.arange(batch * len_q, dtype=torch.int64, device=device)
        return self._in_sequences(rows, len_q, len_k).view(batch, len_q, len_k)[:, None]

    def visible_to(self, rows, entry, len_q, len_k):
        """The same of the queries ``rows`` of one entry of the batch, ``(rows, len_k)``."""
        if self.sequences is not None:
            return self._in_sequences(entry * len_q + rows, len_q, len_k)
        left, right = self.window
        right = 0 if self.causal else right
        if left < 0 and right < 0:
            return None
        key = torch.arange(len_k, dtype=torch.int64, device=rows.device)
        return _in_window(key - rows[:, None] - (len_k - len_q), left, right)

    def _in_sequences(self, rows, len_q, len_k):
        """The same of queries that are counted over the whole batch."""
        left, right = self.window
        q_starts, q_ends, k_starts, k_ends = (x.long() for x in self.sequences.places)
        of, inside = _sequence_of(q_starts, q_ends, rows)
        # From the first key of the sequence.
        first = rows // len_q * len_k - k_starts[of]
        key = first[:, None] + torch.arange(len_k, dtype=torch.int64, device=rows.device)
        count = (k_ends - k_starts)[of][:, None]
        row = (rows - q_starts[of] - (q_ends - q_starts)[of])[:, None]
        seen = (key >= 0) & (key < count) & inside[:, None]
        return seen & _in_window(key - count - row, left, 0 if self.causal else right)


def _in_window(ahead, left, right):
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        seen = seen & (ahead >= -left)
    return seen & (ahead <= right) if right >= 0 else seen


def _sequence_of(starts, ends, row):
    """The sequence of each row, and whether it lies in one at all."""
    of = torch.bucketize(row, ends, right=True).clamp_max(starts.shape[0] - 1)
    return of, (row >= starts[of]) & (row < ends[of])


def within(x, starts, ends):
    """``x`` ``(batch, len, heads, d)`` with zeros in the rows of no sequence."""
    rows = torch.arange(x.shape[0] * x.shape[1], dtype=torch.int64, device=x.device)
    _, inside = _sequence_of(starts.long(), ends.long(), rows)
    return torch.where(inside.view(*x.shape[:2], 1, 1), x, torch.zeros((), dtype=x.dtype, device=x.device))
