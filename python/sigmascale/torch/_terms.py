"""What one attention call computes besides its operands, and which keys its queries see."""

import dataclasses
import operator
import os
import types

import torch

# What a forward keeps for a backward: nothing; q, k and v in E4M3; beside them the logarithm of each row's largest P, for dQ by a
# product in FP8; or what the rounding of the output took, for delta of the output before it.
NOTHING, OPERANDS, FP8_DQ, UNROUNDED_DELTA = "nothing", "operands", "fp8-dq", "unrounded-delta"
# What a caller asks for to have delta of the stored output, with OPERANDS.
ROUNDED_DELTA = "rounded-delta"

_CHECK = os.environ.get("SIGMASCALE_CHECK", "0") == "1"


def readable(x):
    """Whether the host may read a tensor's values here."""
    return not torch.compiler.is_compiling() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def checked(x):
    """Whether lengths or page numbers are checked before a call: on a CPU, and with ``SIGMASCALE_CHECK=1`` on a GPU, which the host
    then waits for."""
    return (x.is_cpu or _CHECK) and readable(x)


def _term(kind, **default):
    """A field of the list below, with its type in the schema of operators."""
    return dataclasses.field(metadata={"kind": kind}, **default)


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Where the sequences of a padded or packed batch lie: int32 ``(count,)`` on the operands' device, never read by the host.

    Rows are counted over the whole ``batch * len`` axis of q and of k, in order; no two sequences share any. Rows of no sequence
    are not read, and get zeros.
    """

    q_starts: torch.Tensor = _term("Tensor?")
    q_ends: torch.Tensor = _term("Tensor?")
    k_starts: torch.Tensor = _term("Tensor?")
    k_ends: torch.Tensor = _term("Tensor?")
    # At least as long as the longest.
    max_len_q: int = _term("SymInt?")
    max_len_k: int = _term("SymInt?")

    @property
    def places(self):
        """Starts and ends of queries and keys."""
        return self.q_starts, self.q_ends, self.k_starts, self.k_ends


# Not frozen, which would take longer to make than the rest of a call.
@dataclasses.dataclass
class Terms:
    """What a call computes besides its operands: the one list of it, whose values do not change once it is made.

    Schemas and fake implementations of the operators, what autograd saves, and keys of caches are made from these fields, and the
    native half reads them by name (``Terms`` in ``python/src/call.rs``). A new term is a field here and one there.

    Query i of a sequence has position i + len_k - len_q, and sees ``window_left`` keys before it and ``window_right`` after it (None:
    all), none after it where the call is causal. Logits become ``soft_cap * tanh(S / soft_cap)``; a sink, f32 ``(n_q_heads,)``, joins its
    head's row sums. Behind the soft-cap logits are rounded to E4M3 in units of ``logit_descale``; gradients pass through.
    """

    causal: bool = _term("bool")
    scale: float = _term("float")
    window_left: int | None = _term("int?", default=None)
    window_right: int | None = _term("int?", default=None)
    soft_cap: float | None = _term("float?", default=None)
    sinks: torch.Tensor | None = _term("Tensor?", default=None)
    # What is subtracted from keys, after their rotation, and values before their cast, f32 (n_kv_heads, d). That of values comes back
    # with the output; operators return the log-sum-exp of centered keys.
    k_center: torch.Tensor | None = _term("Tensor?", default=None)
    v_center: torch.Tensor | None = _term("Tensor?", default=None)
    # How P V is summed: "f16", or "fp8-N", promoted to f32 every N keys.
    accumulator: str = _term("str", default="fp8-256")
    # What the forward keeps for a backward.
    keeps: str = _term("str", default=NOTHING)
    # Parts that keys are split into, whose sums are joined; 0: as is fastest. On rows 0 or 1.
    splits: int = _term("int", default=0)
    # Descales of logits in E4M3, f32 `(n_q_heads,)`; None: they stay in f32.
    logit_descale: torch.Tensor | None = _term("Tensor?", default=None)
    # Of the operators it is all the fields of `Sequences`, or None for each.
    sequences: Sequences | None = None

    @classmethod
    def of(cls, flat):
        """Terms from the arguments of an operator, :meth:`flat` again."""
        own, places = flat[:_OWN_COUNT], flat[_OWN_COUNT:]
        return cls(*own, sequences=None if places[0] is None else Sequences(*places))

    def flat(self):
        """All values, as the operators take them."""
        sequences = self.sequences
        own = [getattr(self, name) for name in _OWN]
        return own + ([None] * len(_PLACES) if sequences is None else [getattr(sequences, name) for name in _PLACES])

    def key(self):
        """What sizes and choices of kernels may depend on: values, and shapes of tensors."""
        tensors = [getattr(getattr(self, name), "shape", None) for name in _TENSORS]
        places = self.sequences
        return *_values(self), *tensors, places and (places.q_starts.shape, places.max_len_q, places.max_len_k)

    def masked(self, causal, window, sequences):
        """The same under another mask."""
        left, right = (keys if keys >= 0 else None for keys in window)
        return dataclasses.replace(self, causal=causal, window_left=left, window_right=right, sequences=sequences)

    @property
    def window(self):
        """Keys seen to the left and to the right, -1 for all."""
        return tuple(-1 if keys is None else keys for keys in (self.window_left, self.window_right))

    @property
    def dense(self):
        """Whether there is nothing but causality and the scale."""
        return all([getattr(self, name) is None for name in _BEYOND_DENSE])

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


class Call(types.SimpleNamespace):
    """A call as the native half reads it (``Call`` in ``python/src/call.rs``): terms, operands, and results to write."""

    k = v = pages = stats = saved = row_max = residual = rope = None
    # Of a backward.
    d_out = dq = dk = dv = d_sinks = sums_limit = None
    deterministic = False


def _kinds(described):
    return {f.name: f.metadata["kind"] for f in dataclasses.fields(described) if f.metadata}


# Types in a schema by name, in the order of `Terms.flat`.
KINDS = _kinds(Terms) | _kinds(Sequences)
_OWN, _PLACES = tuple(_kinds(Terms)), tuple(_kinds(Sequences))
_OWN_COUNT = len(_OWN)
_BEYOND_DENSE = [f.name for f in dataclasses.fields(Terms) if f.default is None]
_values = operator.attrgetter(*(name for name, kind in _kinds(Terms).items() if kind != "Tensor?"))
_TENSORS = [name for name, kind in _kinds(Terms).items() if kind == "Tensor?"]


def _in_window(ahead, left, right):
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        seen = seen & (ahead >= -left)
    return seen & (ahead <= right) if right >= 0 else seen


def _sequence_of(starts, ends, row):
    """The sequence of each row, and whether it is in one at all."""
    of = torch.bucketize(row, ends, right=True).clamp_max(starts.shape[0] - 1)
    return of, (row >= starts[of]) & (row < ends[of])


def within(x, starts, ends):
    """``x`` ``(batch, len, heads, d)`` with zeros in the rows of no sequence."""
    rows = torch.arange(x.shape[0] * x.shape[1], dtype=torch.int64, device=x.device)
    _, inside = _sequence_of(starts.long(), ends.long(), rows)
    return torch.where(inside.view(*x.shape[:2], 1, 1), x, torch.zeros((), dtype=x.dtype, device=x.device))


def seen_rows(q, k, v, terms):
    """The operands with zeros outside of sequences."""
    if terms.sequences is None:
        return q, k, v
    q_starts, q_ends, k_starts, k_ends = terms.sequences.places
    return within(q, q_starts, q_ends), within(k, k_starts, k_ends), within(v, k_starts, k_ends)


def hidden(len_q, len_k, device):
    """True where a causal query does not see a key; the last query sees all keys."""
    rows = torch.arange(len_q, dtype=torch.int64, device=device)[:, None] + (len_k - len_q)
    return torch.arange(len_k, dtype=torch.int64, device=device)[None, :] > rows
