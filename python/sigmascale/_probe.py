""":func:`probe`: is each descale of an FP8 attention call applied, in the right direction and to the right head?

How it finds out. In every sequence and head, key 0 scores ``s = tau q . k0 > 0`` and all others 0, and key 0 alone has a value, v0. So the
last row of the output is ``v0 v_descale / (1 + (n - 1) exp(-s q_descale k_descale))``. Key 0 has the largest logit, hence
the P = 1 that E4M3 holds exactly: the output tells the effective descales to its own precision, and v0 runs through the
mantissas of E4M3 over the channels and is large, so that even an FP8 output does on average. Descales differ between
sequences, heads and calls and lie in [1.2, 2.8], so that 1, their inverses and each other are all far apart.

And how much smaller than it should be is the output over a long context? An FP8 accumulator loses the low bits of what it
adds to a large sum, so an output whose V has a mean shrinks with the number of keys (``docs/attention-numerics.md``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ._arguments import positive, pytorch, whole
from ._errors import ArgumentError, CudaError

_TOLERANCE = 0.02
_LOWEST, _HIGHEST = 1.2, 2.8
_BIAS_KEYS = 4096


@dataclass(frozen=True)
class ProbeReport:
    """What a probe found for the descales of q, k and v:

    - ``applied``: as it should be.
    - ``dropped``: not multiplied. ``inverted``: divided by. ``squared``: multiplied twice.
    - ``permuted``: that of another head or sequence. ``stale``: that of an earlier call.
    - ``per-tensor``: one descale for all heads, where each has its own.
    - ``unexplained``: none of these.

    ``output_bias`` is the mean error of the output in the direction of the exact one, over its mean magnitude, with
    ``bias_seq_len`` keys and V ~ N(1, 1): -0.02 is an output that is 2 % too small. None where it was not measured."""

    q: str
    k: str
    v: str
    worst_error: float
    details: tuple[str, ...] = field(default=())
    output_bias: float | None = None
    bias_seq_len: int | None = None

    @property
    def ok(self) -> bool:
        """True if every descale is applied as it should be."""
        return self.q == self.k == self.v == "applied"

    def __str__(self) -> str:
        head = "every descale is applied" if self.ok else f"q descale {self.q}, k descale {self.k}, v descale {self.v}"
        lines = [f"{head} (largest relative error {self.worst_error:.2g})", *self.details]
        if self.output_bias is not None:
            lines.append(f"output bias {100 * self.output_bias:+.2f} % with {self.bias_seq_len} keys and V ~ N(1, 1)")
        return "\n".join(lines)


def _ladder(count, shift, per_tensor):
    """``count`` values from the range in a fixed order that moves with ``shift``: no place keeps its value."""
    steps = max(count, 9)
    ladder = np.geomspace(_LOWEST, _HIGHEST, steps)
    stride = next(s for s in range(steps // 2 + 1, 2 * steps) if math.gcd(s, steps) == 1)
    places = (np.arange(count) * stride + 2 * shift + 1) % steps
    return np.full(count, ladder[places[0]]) if per_tensor else ladder[places]


def probe(
    call: Callable[..., Any],
    *,
    batch: int = 2,
    seq_len: int = 128,
    n_q_heads: int = 4,
    n_kv_heads: int = 2,
    d_head: int = 64,
    softmax_scale: float | None = None,
    per_tensor: bool = False,
    framework: Literal["torch", "numpy"] = "torch",
    device: Any = "cuda",
    bias_seq_len: int | None = None,
) -> ProbeReport:
    """Feed ``call`` inputs that reveal which descales it applies, and how.

    ``call(q, k, v, q_descale, k_descale, v_descale)`` gets E4M3 operands (``float8_e4m3fn``) in the layout ``(batch, seq,
    heads, d_head)`` and float32 descales ``(batch, n_kv_heads)``, and returns the output in the same layout as q. Causal
    or not makes no difference. ``per_tensor=True`` gives all heads the same descale, for calls that take one per tensor.
    With ``framework="numpy"`` operands are float32 arrays of E4M3 values. ``softmax_scale`` is what the call multiplies
    logits by, ``d_head ** -0.5`` where it is None. It is called six times; a call that remembers descales of an earlier
    one is found.

    A seventh call of ``bias_seq_len`` tokens, with descales of 1, measures ``output_bias``. By default it has 4096 tokens
    where the call runs on a GPU and is left out elsewhere; ``bias_seq_len=0`` leaves it out everywhere.

    Returns a :class:`ProbeReport`; ``report.ok`` is True if every descale is applied. One whose effective value is more than
    about 2 % off does not count as applied. Raises :class:`ArgumentError` if the call returns another shape than q's, and :class:`CudaError` if
    there is no GPU for ``device``; what the call raises
    goes through. Only the product of the q and k descales of a head reaches the output, so swapping those two is no fault.
    """
    batch, n_q_heads, n_kv_heads, d_head = (
        whole(name, value, least=1)
        for name, value in [
            ("batch", batch),
            ("n_q_heads", n_q_heads),
            ("n_kv_heads", n_kv_heads),
            ("d_head", d_head),
        ]
    )
    seq_len = whole("seq_len", seq_len, least=8)
    if n_q_heads % n_kv_heads:
        raise ArgumentError(f"n_q_heads {n_q_heads} must be a multiple of n_kv_heads {n_kv_heads}")
    if framework not in ("torch", "numpy"):
        raise ArgumentError(f"framework {framework!r} is neither 'torch' nor 'numpy'")
    if framework == "torch":
        torch = pytorch("probe() without framework='numpy'")
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            raise CudaError(f"device {str(device)!r}: PyTorch finds no GPU; device='cpu' probes a call that runs there")
    if not callable(call):
        raise TypeError(f"call must be a function of (q, k, v, q_descale, k_descale, v_descale), not {call!r}")
    tau = d_head**-0.5 if softmax_scale is None else positive("softmax_scale", softmax_scale)
    # q0 and k0 are powers of two that E4M3 holds and that bring s nearest to 1/2.
    exponent = round(math.log2(0.5 / (tau * d_head)))
    if not -12 <= exponent <= 16:
        raise ArgumentError(f"softmax_scale {tau} with d_head {d_head} needs logits that E4M3 operands cannot give")
    q0, k0 = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)
    s = tau * d_head * q0 * k0
    if bias_seq_len is None:
        bias_seq_len = _BIAS_KEYS if framework == "torch" and not str(device).startswith("cpu") else 0
    bias_seq_len = whole("bias_seq_len", bias_seq_len, least=0)
    group = n_q_heads // n_kv_heads
    q = np.full((batch, seq_len, n_q_heads, d_head), q0, np.float32)
    k = np.zeros((batch, seq_len, n_kv_heads, d_head), np.float32)
    v = np.zeros_like(k)
    v0 = (128.0 + 16 * (np.arange(d_head) % 8)).astype(np.float32)
    k[:, 0], v[:, 0] = k0, v0

    count = batch * n_kv_heads
    ladder = lambda shift: _ladder(count, shift, per_tensor).reshape(batch, n_kv_heads)
    ones = np.ones((batch, n_kv_heads))
    # First all at once, so that a call that keeps its first descales is caught; then one at a time; then all anew.
    calls = [
        (ladder(0), ladder(1), ladder(2)),
        (ladder(3), ones, ones),
        (ones, ladder(1), ones),
        (ones, ones, ladder(3)),
        (ladder(1), ladder(2), ladder(0)),
        (ladder(2), ladder(0), ladder(1)),
    ]
    # All inputs live until the end: memory that is used again would hide a call that kept the address of an earlier one.
    alive = []
    seen = np.stack([_run(call, (q, k, v), descales, framework, device, alive).mean(axis=-1) for descales in calls])
    seen /= v0.mean()

    spread = lambda row: np.repeat(row, group, axis=1)
    asked = [np.stack([spread(descales[i]) for descales in calls]) for i in range(3)]
    softmax = lambda product: 1.0 / (1.0 + (seq_len - 1) * np.exp(-s * product))
    # Estimates: v where q and k are 1, then the logits with that.
    v_of_call = seen / softmax(asked[0] * asked[1])
    with np.errstate(all="ignore"):
        product_alone = {i: -np.log((1.0 / seen[i] - 1.0) / (seq_len - 1)) / s for i in (1, 2)}
    guesses = [
        _hypotheses(asked[0], product_alone[1], 1),
        _hypotheses(asked[1], product_alone[2], 2),
        _hypotheses(asked[2], v_of_call[3], 3),
    ]
    error, names = math.inf, ("unexplained",) * 3
    for (q_name, q_row), (k_name, k_row), (v_name, v_row) in itertools.product(*guesses):
        with np.errstate(all="ignore"):
            off = np.max(np.abs(seen / (v_row * softmax(q_row * k_row)) - 1.0))
        # The plainest explanation comes first and wins ties.
        if off < error * (1 - 1e-3):
            error, names = float(off), (q_name, k_name, v_name)
    if not error <= _TOLERANCE:
        names = ("unexplained",) * 3
        error = float(np.max(np.abs(seen / (asked[2] * softmax(asked[0] * asked[1])) - 1.0)))
        if not math.isfinite(error):
            error = math.inf
    bias = None
    if bias_seq_len:
        bias = _output_bias(call, (batch, bias_seq_len, n_q_heads, n_kv_heads, d_head), tau, framework, device)
    return ProbeReport(*names, error, tuple(_advice(names)), bias, bias_seq_len or None)


def _output_bias(call, sizes, tau, framework, device):
    """The mean error of the output's last row in the direction of the exact one, over the mean size of that."""
    batch, keys, n_q_heads, n_kv_heads, d_head = sizes
    random = np.random.default_rng(1)
    draw = lambda heads: random.standard_normal((batch, keys, heads, d_head))
    # Logits vary by about 1, whatever the softmax scale.
    exponent = round(-math.log2(tau * math.sqrt(d_head)))
    q = _e4m3(draw(n_q_heads) * 2.0 ** (exponent // 2))
    k = _e4m3(draw(n_kv_heads) * 2.0 ** (exponent - exponent // 2))
    v = _e4m3(draw(n_kv_heads) + 1.0)
    out = _run(call, (q, k, v), [np.ones((batch, n_kv_heads))] * 3, framework, device, [])
    per_kv_head = q[:, -1].astype(np.float64).reshape(batch, n_kv_heads, -1, d_head)
    logits = tau * np.einsum("bhgd,bkhd->bhgk", per_kv_head, k.astype(np.float64))
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    exact = np.einsum("bhgk,bkhd->bhgd", weights, v.astype(np.float64)).reshape(out.shape)
    return float(np.sum(np.sign(exact) * (out - exact)) / np.sum(np.abs(exact)))


def _e4m3(x):
    """The nearest E4M3 values of numbers in its range, as float32."""
    _, exponent = np.frexp(x)
    step = np.exp2(np.maximum(exponent, -5) - 4.0)
    return (np.round(x / step) * step).astype(np.float32)


def _hypotheses(asked, alone, index):
    """What could have been applied instead of ``asked`` (calls, batch, heads), the plainest first.

    ``alone`` is the estimate of call ``index``, in which this descale alone is not one.
    """
    yield "applied", asked
    yield "dropped", np.ones_like(asked)
    yield "inverted", 1.0 / asked
    first = np.broadcast_to(asked[:1], asked.shape)
    yield "stale", first
    yield "stale", np.concatenate([asked[:1], asked[:-1]])
    yield "squared", asked**2
    yield "per-tensor", np.broadcast_to(asked.max(axis=(1, 2), keepdims=True), asked.shape)
    yield "per-tensor", np.broadcast_to(asked[:, :1, :1], asked.shape)
    # Each place with the value that it seems to have had, by place.
    flat = asked[index].reshape(-1)
    with np.errstate(all="ignore"):
        distance = np.abs(np.log(np.maximum(alone.reshape(-1, 1), 1e-30) / flat[None, :]))
    places = np.argmin(np.where(np.isnan(distance), np.inf, distance), axis=1)
    yield "permuted", asked.reshape(len(asked), -1)[:, places].reshape(asked.shape)


def _advice(names):
    words = {
        "dropped": "is not applied at all: pass it to the kernel, and check that this path of the kernel reads it",
        "inverted": "is applied as its inverse: the kernel multiplies by it, so pass value / code, not code / value",
        "permuted": "reaches the wrong head or sequence: check its layout (batch, n_kv_heads) and strides",
        "stale": "is that of an earlier call: keep its address and write the new values into it, or pass it again",
        "per-tensor": "of one head is used for all: the kernel takes one a tensor",
        "squared": "is applied twice",
        "unexplained": "does not explain the output together with the others: is the layout (batch, seq, heads, d_head)?",
    }
    return [f"{operand} descale {words[name]}" for operand, name in zip("qkv", names) if name in words]


def _run(call, operands, descales, framework, device, alive):
    """The last row of the output, ``(batch, n_q_heads, d_head)``, as float64."""
    rows = [np.ascontiguousarray(descale, np.float32) for descale in descales]
    if framework == "numpy":
        given = [*(x.copy() for x in operands), *rows]
    else:
        import torch

        given = [torch.from_numpy(x).to(device).to(torch.float8_e4m3fn) for x in operands]
        given += [torch.from_numpy(row).to(device) for row in rows]
    alive.append(given)
    out = call(*given)
    if framework == "numpy":
        out = np.asarray(out, np.float64)
    elif isinstance(out, torch.Tensor):
        out = out.detach().float().cpu().double().numpy()
    else:
        raise ArgumentError(f"the call must return the output tensor, not {type(out).__name__}")
    if out.shape != operands[0].shape:
        raise ArgumentError(f"expected an output of shape {operands[0].shape}, but the call returned shape {out.shape}")
    return out[:, -1]
