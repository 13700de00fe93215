"""FP8 attention of other libraries, forward: FlashAttention-3, PyTorch's quantized SDPA, cuDNN."""

import contextlib
import functools
import threading

import torch

from .._errors import UnsupportedError
from ._e4m3 import E4M3, P_SCALE, cast_all


class Fa3:
    """FlashAttention-3 (``flash_attn_interface``, ``flash_attn_3`` or ``fa3_fwd_interface``)."""

    name, per_tensor = "fa3", False

    def __init__(self):
        self._function = _first_import(
            ["flash_attn_interface", "flash_attn_3.flash_attn_interface", "fa3_fwd_interface"],
            "flash_attn_func",
            "FlashAttention-3 is not installed: build flash-attention/hopper, or pip install fa3-fwd",
        )

    @staticmethod
    def takes(q):
        """Whether the library offers this call in FP8, if it is there."""
        return q.is_cuda and q.shape[3] in (64, 128, 256) and torch.cuda.get_device_capability(q.device) == (9, 0)

    def forward(self, q, k, v, descales, terms, words=None):
        causal, scale = terms.causal, terms.scale
        q8, k8, v8 = operands = cast_all(q, k, v, descales, words)
        q_descale, k_descale, v_descale = (d.contiguous() for d in descales[:3])
        out, lse = self._function(
            q8,
            k8,
            v8,
            softmax_scale=scale,
            causal=causal,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            return_attn_probs=True,
        )[:2]
        return out, lse, operands


class TorchQuantised:
    """PyTorch's own FP8 SDPA, where the installed version has it (experimental there); needs FlashAttention-3."""

    name, per_tensor = "torch", False

    def __init__(self):
        self._function = _first_import(
            ["torch.nn.attention.experimental._scaled_dot_product_attention_quantized"],
            "_scaled_dot_product_attention_quantized",
            f"PyTorch {torch.__version__} has no quantized SDPA",
        )
        import torch.nn.attention as switch

        if not hasattr(switch, "activate_flash_attention_impl"):
            raise UnsupportedError(f"PyTorch {torch.__version__} cannot switch its flash attention to FA3")
        self._switch = switch
        with self._active():
            pass

    @contextlib.contextmanager
    def _active(self):
        """FA3 in PyTorch's dispatcher, for this call alone: the switch is one for the whole process."""
        before = self._switch.current_flash_attention_impl()
        try:
            self._switch.activate_flash_attention_impl("FA3")
        except Exception as error:
            raise UnsupportedError(f"PyTorch could not switch to FlashAttention-3: {error}") from error
        try:
            yield
        finally:
            self._switch.restore_flash_attention_impl(_raise_warn=False)
            if before is not None:
                self._switch.activate_flash_attention_impl(before)

    def forward(self, q, k, v, descales, terms, words=None):
        causal, scale = terms.causal, terms.scale
        q8, k8, v8 = operands = cast_all(q, k, v, descales, words)
        if causal and q.shape[1] != k.shape[1]:
            raise UnsupportedError(
                "PyTorch's quantized SDPA aligns a causal mask of unequal lengths otherwise: use fa3"
            )
        q_descale, k_descale, v_descale = (d.contiguous() for d in descales[:3])
        with self._active():
            result = torch.ops.aten._scaled_dot_product_flash_attention.quantized(
                *(x.transpose(1, 2) for x in (q8, k8, v8)),
                q_descale,
                k_descale,
                v_descale,
                0.0,
                causal,
                False,
                scale=scale,
            )
        return result[0].transpose(1, 2), result[1], operands


class Cudnn:
    """cuDNN's ``sdpa_fp8`` through its Python front end: one descale per tensor, FP8 output by the o descale."""

    name, per_tensor = "cudnn", True

    def __init__(self):
        try:
            import cudnn
        except ImportError as error:
            raise UnsupportedError("cuDNN's front end is not installed: pip install nvidia-cudnn-frontend") from error
        self._cudnn = cudnn
        self._graph = functools.lru_cache(maxsize=64)(self._build)
        self._handle = functools.cache(lambda device: cudnn.create_handle())
        # A handle has one stream at a time.
        self._lock = threading.Lock()

    def _build(self, shapes, strides, causal, scale, device):
        cudnn = self._cudnn
        fp8, f32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            io_data_type=fp8, intermediate_data_type=f32, compute_data_type=f32, handle=self._handle(device)
        )
        operands = [graph.tensor(dim=list(d), stride=list(s), data_type=fp8) for d, s in zip(shapes, strides)]
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        scalars = {name: graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=f32) for name in names}
        q, k, v = operands
        out, stats, amax_s, amax_o = graph.sdpa_fp8(
            q=q,
            k=k,
            v=v,
            **scalars,
            is_inference=False,
            attn_scale=scale,
            # On Hopper the other alignment is refused; for equal lengths both are the same.
            diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT,
            left_bound=None,
            right_bound=0 if causal else None,
        )
        batch, heads, length, d = shapes[0]
        out.set_output(True).set_dim([batch, heads, length, d]).set_stride(
            [length * heads * d, d, heads * d, 1]
        ).set_data_type(fp8)
        stats.set_output(True).set_dim([batch, heads, length, 1]).set_stride(
            [heads * length, length, 1, 1]
        ).set_data_type(f32)
        for amax in (amax_s, amax_o):
            amax.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(f32)
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
        except Exception as error:
            raise UnsupportedError(
                f"cuDNN does not offer this FP8 attention (q {shapes[0]}, k {shapes[1]}): {error}"
            ) from error
        # P's scale and its inverse.
        fixed = [
            torch.full((1, 1, 1, 1), value, device=device, dtype=torch.float32) for value in (P_SCALE, 1 / P_SCALE)
        ]
        return graph, operands, scalars, (out, stats, amax_s, amax_o), fixed

    def forward(self, q, k, v, descales, terms, words=None):
        causal, scale = terms.causal, terms.scale
        if causal and q.shape[1] != k.shape[1]:
            raise UnsupportedError(
                "cuDNN's FP8 attention aligns a causal mask of unequal lengths otherwise: use fa3 or native"
            )
        # One a tensor: the largest of all heads, so that none can overflow.
        descales = tuple(d.amax().expand_as(d) for d in descales)
        operands = cast_all(q, k, v, descales, words)
        q8, k8, v8 = (x.transpose(1, 2) for x in operands)
        shapes, strides = (tuple(tuple(f(x)) for x in (q8, k8, v8)) for f in (lambda x: x.shape, lambda x: x.stride()))
        with torch.cuda.device(q.device), self._lock:
            graph, places, scalars, outputs, fixed = self._graph(shapes, strides, causal, float(scale), q.device)
        one = lambda d: d.reshape(-1)[:1].contiguous().view(1, 1, 1, 1)
        o_descale = one(descales[3]) if len(descales) > 3 else one(descales[2]) * 2
        values = {
            "descale_q": one(descales[0]),
            "descale_k": one(descales[1]),
            "descale_v": one(descales[2]),
            "descale_s": fixed[1],
            "scale_s": fixed[0],
            "scale_o": o_descale.reciprocal(),
        }
        out = torch.empty(q.shape, device=q.device, dtype=E4M3).transpose(1, 2)
        stats = torch.empty(*out.shape[:3], 1, device=q.device, dtype=torch.float32)
        # Maxima of P and of the output, which are not read.
        results = (out, stats, *torch.empty(2, 1, 1, 1, 1, device=q.device, dtype=torch.float32))
        pack = (
            dict(zip(places, (q8, k8, v8))) | {scalars[n]: x for n, x in values.items()} | dict(zip(outputs, results))
        )
        space = torch.empty(max(1, graph.get_workspace_size()), device=q.device, dtype=torch.uint8)
        with torch.cuda.device(q.device), self._lock:
            handle, stream = self._handle(q.device), torch.cuda.current_stream(q.device).cuda_stream
            self._cudnn.set_stream(handle=handle, stream=stream)
            graph.execute(pack, space, handle=handle)
        return (out.transpose(1, 2).float() * o_descale).to(torch.bfloat16), stats.squeeze(3), operands


def _first_import(modules, name, missing):
    import importlib

    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise UnsupportedError(missing)
