"""This package's kernels on Hopper: the cast and the attention, forward and backward."""

import torch

from .. import _native
from ._casts import E4M3


class Native:
    """Forward in two launches with telemetry, backward in three; workspaces are PyTorch's memory."""

    name, per_tensor = "native", False

    def __init__(self):
        self._engines = {}

    @staticmethod
    def takes(q):
        """Whether the kernels offer this call."""
        return q.is_cuda and q.shape[3] in (64, 128) and torch.cuda.get_device_capability(q.device) == (9, 0)

    def forward(self, q, k, v, descales, causal, scale, words=None, accumulator="fp8-256", save=False):
        given = [_aligned(x) for x in (q, k, v)]
        make = lambda shape, dtype: torch.empty(shape, device=q.device, dtype=dtype)
        saved = [make(x.shape, E4M3) for x in given] if save and q.dtype != E4M3 else None
        out = make(q.shape, torch.bfloat16)
        lse = make((q.shape[0], q.shape[2], q.shape[1]), torch.float32)
        call = dict(zip("qkv", given)) | {"out": out, "lse": lse, "stats": None if words is None else words.view(-1)}
        call |= {"descales": list(descales[:3]), "saved": saved, "accumulator": accumulator}
        self._run("forward", call, causal, scale)
        return out, lse, saved or given

    def backward(self, grad, operands, descales, out, lse, causal, scale):
        """Gradients of q, k and v before their casts, BF16. ``out`` must be that of the accumulator ``f16``."""
        wide = [torch.empty(x.shape, device=x.device, dtype=torch.bfloat16) for x in operands]
        call = dict(zip("qkv", (_aligned(x) for x in operands))) | dict(zip(("dq", "dk", "dv"), wide))
        call |= {"out": _aligned(out), "d_out": _aligned(grad.to(torch.bfloat16)), "lse": lse.contiguous()}
        call |= {"descales": list(descales[:3]), "deterministic": torch.are_deterministic_algorithms_enabled()}
        self._run("backward", call, causal, scale)
        return wide

    def _run(self, direction, call, causal, scale):
        device = call["q"].device
        engine = self._engines.get(device)
        if engine is None:
            engine = self._engines.setdefault(device, _native.Attention(device.index))
        call = {name: _described(value) for name, value in call.items()}
        call |= {"causal": causal, "softmax_scale": scale}
        size = getattr(engine, f"{direction}_bytes")(call)
        space = torch.empty(size, device=device, dtype=torch.uint8)
        stream = torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(device):
            getattr(engine, direction)(call, _described(space), stream)


def _aligned(x):
    """The kernels want 16-byte rows; anything else is copied."""
    step = 16 // x.element_size() if x.element_size() < 4 else 8
    fits = x.stride(3) == 1 and all(s % step == 0 for s in x.stride()[:3]) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()


def _described(x):
    """A tensor as the kernels are told of it: address, type, shape and strides."""
    if isinstance(x, list):
        return [_described(y) for y in x]
    if not isinstance(x, torch.Tensor):
        return x
    return x.data_ptr(), str(x.dtype).removeprefix("torch."), list(x.shape), list(x.stride())
