#!/usr/bin/env python3
"""This package's attention beside cuDNN's and FlashAttention-3's: one process, CUDA graphs for all, taking turns.

    peers.py forward     E4M3 operands in, attention alone
    peers.py from-bf16   BF16 operands in, casts included; with --rope also RoPE of q and k
    peers.py training    BF16 operands in, forward and backward; peak memory
    peers.py calls       as forward, FlashAttention-3 alone: packed sequences, windows, head dimensions 96, 192/128, 256
    peers.py bias        mean signed error of the output where V has a mean

Needs a Hopper GPU, the wheel of this package, and for the peers `pip install nvidia-cudnn-frontend fa3-fwd`, for
windows also vLLM, whose build of FlashAttention-3 has them. A peer that is not installed or does not take a shape is a
row with its reason.

How times are taken: each contender is captured in a CUDA graph with one launch per set of inputs, so that launches from Python
cost nothing and inputs do not stay in the L2 cache. In a round every contender replays its graph for --milliseconds; every second
round goes in reverse order. `ms` is the median over rounds, `low` and `high` are the smallest and the largest. Watts and MHz are
medians of what nvidia-smi reports meanwhile.

Output: CSV, after comment lines with the machine and the versions. benches/tables.py makes the tables of the guides from it.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.metadata
import itertools
import math
import statistics
import subprocess
import sys
import threading

import torch

E4M3 = torch.float8_e4m3fn
DEFAULTS = {
    "forward": ("64x8x128,32x8x128,32x32x128,64x8x64,32x32x64", "1024,2048,4096,8192,16384"),
    "from-bf16": ("64x8x128,32x8x128,32x32x128,32x32x64", "2048,4096,8192,16384"),
    "training": ("64x8x128,32x8x128,32x32x128,32x32x64", "2048,4096,8192,16384"),
    "bias": ("8x8x128", "1024,4096,16384,65536"),
    # Lengths of the dense calls; shapes are those of `calls`.
    "calls": ("", "2048,16384"),
}

# Most bytes of the sums of dQ, for contenders that run where --kernels names them.
PARTS = {"sigmascale+whole": sys.maxsize, "sigmascale+parts32": 32 << 20}

# Lengths of 16384 packed tokens by the name of the call.
PACKED = {
    "packed-8x2048": (2048,) * 8,
    "packed-long-tail": (8192, 4096, 2048, 1024, 512, 256, 128, 64, 64),
}
WINDOWS = (1024, 4096)
# Query and KV heads by the dimensions of a head of q and k, and of v. 192/128 is latent attention in its expanded
# form, with a KV head for each query head.
DIMS = {
    (96, 96): ((32, 8), (64, 8)),
    (256, 256): ((32, 8), (64, 8)),
    (192, 128): ((16, 16), (128, 128)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Self-attention of one shape.

    `call`: its name, if it is one of `calls`. `dim_v`: the dimension of V's heads, if not that of q and k. `lengths`:
    of packed sequences, with `seqlen` tokens in all. `window`: how many keys a query sees, its own included.
    """

    heads_q: int
    heads_kv: int
    dim: int
    seqlen: int
    batch: int
    causal: bool
    call: str = ""
    dim_v: int | None = None
    lengths: tuple[int, ...] = ()
    window: int | None = None

    @property
    def scale(self):
        return self.dim**-0.5

    @property
    def row(self):
        sizes = f"{self.heads_q},{self.heads_kv},{self.dim},{self.seqlen},{self.batch},{int(self.causal)}"
        return f"{self.call},{sizes}" if self.call else sizes

    @property
    def sequences(self):
        return self.lengths or (self.seqlen,) * self.batch

    @property
    def sides(self):
        """Keys that a query sees before its own and after it; -1: all."""
        return (self.window - 1, 0) if self.window else (-1, -1)

    def flops(self):
        """Of the forward; half of a square counts where the call is causal."""
        seen = sum(n**2 for n in self.sequences) / (2 if self.causal else 1)
        if self.window:
            seen = self.batch * self.window * (self.seqlen - self.window / 2)
        return 2 * self.heads_q * (self.dim + (self.dim_v or self.dim)) * seen

    def tensor(self, heads, dtype=torch.bfloat16, dim=None):
        shape = self.batch, self.seqlen, heads, dim or self.dim
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)

    def operands(self, sets, dtype=torch.bfloat16):
        shapes = (self.heads_q, None), (self.heads_kv, None), (self.heads_kv, self.dim_v)
        return [tuple(self.tensor(heads, dtype, dim) for heads, dim in shapes) for _ in range(sets)]

    def ones(self, count=None):
        """Unit descales, of each entry of the batch or of `count` sequences."""
        return torch.ones(count or self.batch, self.heads_kv, device="cuda")

    def cu_seqlens(self):
        return torch.tensor([0, *itertools.accumulate(self.sequences)], device="cuda", dtype=torch.int32)


def dense(options):
    """The cases of --shapes and --seqlens."""
    for heads_q, heads_kv, dim in shapes(options.shapes):
        for seqlen in options.seqlens:
            for causal in options.causal:
                yield Case(heads_q, heads_kv, dim, seqlen, max(1, options.tokens // seqlen), causal)


def calls(options):
    """Calls that are not dense, and head dimensions other than 64 and 128. Windows are causal."""
    for heads in ((32, 8), (64, 8)):
        for name, lengths in PACKED.items():
            for causal in options.causal:
                yield Case(*heads, 128, sum(lengths), 1, causal, name, lengths=lengths)
        for window in WINDOWS:
            yield Case(*heads, 128, 32768, 1, True, f"window-{window}", window=window)
    for (dim, dim_v), sizes in DIMS.items():
        name = f"d-{dim}" if dim == dim_v else f"d-{dim}/{dim_v}"
        for heads in sizes:
            for seqlen in options.seqlens:
                for causal in options.causal:
                    yield Case(*heads, dim, seqlen, max(1, options.tokens // seqlen), causal, name, dim_v)


# Contenders. A maker takes a case and a number of sets and returns `launch(i)` for set i.


def ours(case, sets, *, dtype, alone=False, telemetry=False, rotated=False):
    """This package's forward. `alone`: without the cast or, for E4M3 operands, the reordering of V, done beforehand.
    `rotated`: with RoPE in the cast."""
    from sigmascale import _native
    from sigmascale.torch import Rope
    from sigmascale.torch._hopper import Native
    from sigmascale.torch._terms import Call

    if not alone:
        native, plan = Native(), (case.ones(),) * 3
        words = torch.zeros(2 * (case.heads_q + case.heads_kv), 4, device="cuda", dtype=torch.int32)
        inputs, terms = case.operands(sets, dtype), _terms(case)
        rope = Rope(*angles(case)) if rotated else None
        return lambda i: native.forward(*inputs[i], plan, terms, words if telemetry else None, rope=rope)
    engine, calls = _native.Attention(torch.cuda.current_device()), []
    for q, k, v in case.operands(sets, dtype):
        out = torch.empty(*q.shape[:3], v.shape[3], device="cuda", dtype=torch.bfloat16)
        lse = torch.empty(case.batch, case.heads_q, case.seqlen, device="cuda")
        call = Call(q=q, k=k, v=v, descales=(case.ones(),) * 3, terms=_terms(case), out=out, lse=lse)
        space = torch.empty(engine.forward_bytes(call), device="cuda", dtype=torch.uint8)
        engine.forward(call, space, torch.cuda.current_stream().cuda_stream)
        calls.append((call, space))
    return lambda i: engine.attend(*calls[i], torch.cuda.current_stream().cuda_stream)


def angles(case):
    """Cosines and sines of every position, f32 (positions, dim / 2)."""
    steps = 10000.0 ** (torch.arange(0, case.dim, 2, device="cuda") / -case.dim)
    turns = torch.outer(torch.arange(case.seqlen, device="cuda"), steps)
    return turns.cos(), turns.sin()


def _terms(case):
    from sigmascale.torch._flash import packed
    from sigmascale.torch._terms import Terms

    sequences = None
    if case.lengths:
        cu_seqlens, longest = case.cu_seqlens(), max(case.lengths)
        sequences = packed(cu_seqlens, cu_seqlens, longest, longest)
    return Terms(case.causal, case.scale).masked(case.causal, (case.sides[0], -1), sequences)


class CudnnGraph:
    """One graph of cuDNN: `add` declares tensors, `build` plans, `launch` runs it on tensors of the same shapes."""

    def __init__(self, fp8):
        import cudnn

        self.cudnn, self.handle = cudnn, _cudnn_handle()
        self.io = cudnn.data_type.FP8_E4M3 if fp8 else cudnn.data_type.BFLOAT16
        f32 = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            io_data_type=self.io, intermediate_data_type=f32, compute_data_type=f32, handle=self.handle
        )

    def input(self, x):
        return self.graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=self._type(x))

    def output(self, node, x):
        node.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(self._type(x))
        return node

    def _type(self, x):
        return self.cudnn.data_type.FLOAT if x.dtype == torch.float32 else self.io

    def mask(self, case):
        return {
            "attn_scale": case.scale,
            "diagonal_alignment": self.cudnn.diagonal_alignment.TOP_LEFT,
        }

    def build(self):
        modes = self.cudnn.heur_mode
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([modes.A, modes.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        self.space = torch.empty(max(1, self.graph.get_workspace_size()), device="cuda", dtype=torch.uint8)
        return self

    def launch(self, pack):
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph.execute(pack, self.space, handle=self.handle)


@functools.cache
def _cudnn_handle():
    import cudnn

    return cudnn.create_handle()


def _heads_first(x):
    return x.transpose(1, 2)


def _number(value):
    return torch.full((1, 1, 1, 1), float(value), device="cuda")


def cudnn_fp8(case, sets):
    """cuDNN's FP8 forward with unit descales. P is multiplied by 256, as a user has to choose."""
    g = CudnnGraph(True)
    inputs = [tuple(map(_heads_first, s)) for s in case.operands(sets, E4M3)]
    out = _heads_first(torch.empty(case.batch, case.seqlen, case.heads_q, case.dim, device="cuda", dtype=E4M3))
    lse = torch.empty(case.batch, case.heads_q, case.seqlen, 1, device="cuda")
    numbers = {f"descale_{x}": _number(1) for x in "qkv"}
    numbers |= {"scale_s": _number(256), "descale_s": _number(1 / 256), "scale_o": _number(1)}
    q, k, v = (g.input(x) for x in inputs[0])
    places = {name: g.input(x) for name, x in numbers.items()}
    o, stats, *maxima = g.graph.sdpa_fp8(
        q=q, k=k, v=v, **places, is_inference=False, right_bound=0 if case.causal else None, **g.mask(case)
    )
    pack = {g.output(o, out): out, g.output(stats, lse): lse}
    pack |= {g.output(node, x): x for node, x in ((m, _number(0)) for m in maxima)}
    pack |= {places[name]: x for name, x in numbers.items()}
    g.build()
    packs = [pack | dict(zip((q, k, v), s)) for s in inputs]
    return lambda i: g.launch(packs[i])


def fa3(case, sets, dtype=E4M3):
    """FlashAttention-3's forward."""
    library, inputs = _fa3(), case.operands(sets, dtype)
    how = {"causal": case.causal, "window_size": case.sides}
    if dtype == E4M3:
        how |= dict.fromkeys(("q_descale", "k_descale", "v_descale"), case.ones(len(case.lengths)))
    if not case.lengths:
        return lambda i: library.flash_attn_func(*inputs[i], **how)
    return _varlen(case, library.flash_attn_varlen_func, inputs, how)


def fa3_vllm(case, sets):
    """The same as vLLM builds it, with windows and packed sequences alone."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    how = {"causal": case.causal, "window_size": case.sides, "num_splits": 1, "fa_version": 3}
    how |= dict.fromkeys(("q_descale", "k_descale", "v_descale"), case.ones(len(case.sequences)))
    return _varlen(case, flash_attn_varlen_func, case.operands(sets, E4M3), how)


def _varlen(case, attend, inputs, how):
    packed, cu_seqlens, longest = [[x.flatten(0, 1) for x in s] for s in inputs], case.cu_seqlens(), max(case.sequences)
    how = how | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens)
    how |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), longest)
    return lambda i: attend(*packed[i], **how)


def _fa3():
    with contextlib.suppress(ImportError):
        return importlib.import_module("flash_attn_interface")
    return importlib.import_module("fa3_fwd_interface")


class CudnnBf16:
    """cuDNN's BF16 graphs, forward and backward, on buffers of their own."""

    def __init__(self, case, sets, backward):
        self.inputs = [(*s, case.tensor(case.heads_q)) for s in case.operands(sets)]
        q, k, v, d_out = first = tuple(map(_heads_first, self.inputs[0]))
        self.out, self.lse = torch.empty_like(q), torch.empty(*q.shape[:3], 1, device="cuda")
        bound = {"diagonal_band_right_bound": 0 if case.causal else None}
        f = self.forward = CudnnGraph(False)
        places = [f.input(x) for x in first[:3]]
        o, stats = f.graph.sdpa(**dict(zip("qkv", places)), generate_stats=True, **bound, **f.mask(case))
        self.forward_pack = {f.output(o, self.out): self.out, f.output(stats, self.lse): self.lse}
        self.forward_places = places
        f.build()
        if not backward:
            return
        self.grads = [torch.empty_like(x) for x in (q, k, v)]
        b = self.backward = CudnnGraph(False)
        self.backward_places = [b.input(x) for x in (q, k, v, d_out)]
        o, stats = b.input(self.out), b.input(self.lse)
        named = dict(zip(("q", "k", "v", "dO"), self.backward_places))
        nodes = b.graph.sdpa_backward(**named, o=o, stats=stats, **bound, **b.mask(case))
        self.backward_pack = {o: self.out, stats: self.lse}
        self.backward_pack |= {b.output(node, x): x for node, x in zip(nodes, self.grads)}
        b.build()

    def run_forward(self, i):
        given = map(_heads_first, self.inputs[i][:3])
        self.forward.launch(self.forward_pack | dict(zip(self.forward_places, given)))

    def run_both(self, i):
        self.run_forward(i)
        given = map(_heads_first, self.inputs[i])
        self.backward.launch(self.backward_pack | dict(zip(self.backward_places, given)))

    def bytes(self):
        """Memory beside q, k, v and dO."""
        kept = [self.out, self.lse, *self.grads]
        space = max(self.forward.space.numel(), self.backward.space.numel())
        return sum(x.numel() * x.element_size() for x in kept) + space


def cast_then(maker, how, rotated=False):
    """An FP8 peer from BF16: casts by torch.compile, by given scales (`cast`) or by each tensor's own maximum
    (`current`). `rotated`: q and k are turned in the same compiled function. `how` none: a peer in BF16, with nothing
    but the turn."""

    def make(case, sets):
        inputs, one, tables = case.operands(sets), torch.ones((), device="cuda"), ()
        kernel = maker(case, 1) if how else maker(case, 1).run_forward
        if rotated:
            # As models have them: in the type of q and k.
            tables = tuple(x[None, :, None].to(torch.bfloat16) for x in angles(case))
        compiled = _e4m3()

        def launch(i):
            q, k, v = inputs[i]
            for x in (q, k):
                compiled[how](x, one, *tables)
            if how:
                compiled[how](v, one)
            # On operands of its own: which numbers they are makes no difference to its time.
            kernel(0)

        return launch

    return make


@functools.cache
def _e4m3():
    """Compiled casts by name; with cosines and sines x is turned first, in pairs (i, i + dim / 2)."""

    def turn(x, _=None, cosine=None, sine=None):
        if cosine is None:
            return x
        a, b = x.chunk(2, -1)
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)

    def cast(x, scale, *tables):
        return (turn(x, None, *tables) * scale).clamp(-448.0, 448.0).to(E4M3)

    def current(x, _, *tables):
        x = turn(x, None, *tables)
        amax = x.abs().amax().float()
        return (x * (448.0 / amax)).clamp(-448.0, 448.0).to(E4M3), amax

    # Each shape compiles them anew. Past the default limit of 8, PyTorch would run them uncompiled.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    makers = {"cast": cast, "current": current, None: turn}
    return {how: torch.compile(f, dynamic=False) for how, f in makers.items()}


def our_training(case, sets, sums_limit=None, gradients=None):
    """Forward and backward of `sigmascale.torch.attention` through autograd, in parts whose sums of dQ take at most
    `sums_limit` bytes, or by default; `gradients`: how dQ is computed."""
    from sigmascale.torch import _hopper, attention

    leaves = [tuple(x.requires_grad_() for x in s) for s in case.operands(sets)]
    grads, plan = [case.tensor(case.heads_q) for _ in range(sets)], (case.ones(),) * 3

    def launch(i):
        _hopper.SUMS.update(sums_limit=sums_limit)
        out = attention(*leaves[i], plan, causal=case.causal, gradients=gradients)
        return torch.autograd.grad(out, leaves[i], grads[i])

    return launch


def contenders(table, rotated=False):
    """Makers by name. `rotated`: from BF16 before RoPE."""
    if table == "forward":
        return {
            "sigmascale": functools.partial(ours, dtype=E4M3, alone=True),
            "sigmascale+reorder": functools.partial(ours, dtype=E4M3),
            "sigmascale+reorder+telemetry": functools.partial(ours, dtype=E4M3, telemetry=True),
            "cudnn": cudnn_fp8,
            "fa3": fa3,
        }
    if table == "calls":
        return {
            "sigmascale": functools.partial(ours, dtype=E4M3, alone=True),
            "sigmascale+reorder": functools.partial(ours, dtype=E4M3),
            "fa3": fa3,
            "fa3-vllm": fa3_vllm,
            "fa3-bf16": functools.partial(fa3, dtype=torch.bfloat16),
        }
    if table == "from-bf16":
        peers = {"cudnn": cudnn_fp8, "fa3": fa3}
        hows = [(name, how) for name in peers for how in ("cast", "current")]
        cast = {f"{name}+{how}": cast_then(peers[name], how, rotated) for name, how in hows}
        bf16 = lambda case, sets: CudnnBf16(case, sets, False).run_forward
        if rotated:
            bf16 = cast_then(functools.partial(CudnnBf16, backward=False), None, rotated)
        own = functools.partial(ours, dtype=torch.bfloat16, rotated=rotated)
        return {"sigmascale": own, **cast, "cudnn-bf16": bf16}
    others = {name: functools.partial(our_training, sums_limit=limit) for name, limit in PARTS.items()}
    others |= {f"sigmascale+{how}": functools.partial(our_training, gradients=how) for how in ("rounded-delta", "fp8-dq")}
    return {"sigmascale": our_training, **others, "cudnn-bf16": lambda case, sets: CudnnBf16(case, sets, True).run_both}


# Timing.


def capture(launch, sets):
    """A graph of one launch per set, and what it runs on: replays use the memory of the launches."""
    for i in range(sets):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Autograd runs a node on the stream of its forward: everything is on one stream, captures too.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for i in range(sets):
            launch(i)
    return graph, launch


def replay_ms(graph, sets, milliseconds):
    """Mean time of a launch while the graph replays for about so long."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(count):
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count / sets

    return timed(max(1, round(milliseconds / sets / max(timed(1), 1e-4))))


class Smi:
    """Power and clock of the device, as nvidia-smi reports them every 20 ms; nothing where it cannot run."""

    def __init__(self):
        self.name, self.seen, self._lock = None, {}, threading.Lock()
        query = ["nvidia-smi", "-i", "0", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits", "-lms", "20"]
        try:
            self._process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self._process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._process.stdout:
            with contextlib.suppress(ValueError), self._lock:
                if self.name is not None:
                    self.seen.setdefault(self.name, []).append([float(x) for x in line.split(",")])

    @contextlib.contextmanager
    def of(self, name):
        with self._lock:
            self.name = name
        yield
        with self._lock:
            self.name = None

    def medians(self, name):
        """Watts and MHz as text, empty where nothing was seen."""
        with self._lock:
            seen = self.seen.pop(name, None)
        return [f"{statistics.median(column):.0f}" for column in zip(*seen)] if seen else ["", ""]

    def close(self):
        if self._process is not None:
            self._process.terminate()


def compare(table, case, options, smi):
    """Rows of one case: every contender, taking turns."""
    graphs, reasons, memory = {}, {}, {}
    for name, maker in contenders(table, options.rope).items():
        if name not in options.kernels if options.kernels else name in PARTS:
            continue
        try:
            launch = maker(case, options.sets)
            if table == "training":
                memory[name] = peak_mib(launch)
            graphs[name] = capture(launch, options.sets)
        except Exception as problem:  # A peer that lacks a shape is a row, not the end.
            reasons[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]}"
    times = {name: [] for name in graphs}
    for turn in range(options.rounds):
        for name in list(graphs)[:: -1 if turn % 2 else 1]:
            with smi.of(name):
                times[name].append(replay_ms(graphs[name][0], options.sets, options.milliseconds))
    for name in {**graphs, **reasons}:
        if name in reasons:
            print(f"{name},{case.row},,,,,,,  # {reasons[name]}", flush=True)
            continue
        ms, low, high = (f(times[name]) for f in (statistics.median, min, max))
        watts, mhz = smi.medians(name)
        tflops = case.flops() * (3.5 if table == "training" else 1) / ms / 1e9
        mib = f"{memory[name]:.0f}" if name in memory else ""
        print(f"{name},{case.row},{ms:.4f},{low:.4f},{high:.4f},{tflops:.0f},{watts},{mhz},{mib}", flush=True)


def peak_mib(launch):
    """Memory of one forward and backward beside q, k, v and dO."""
    if isinstance(getattr(launch, "__self__", None), CudnnBf16):
        return launch.__self__.bytes() / 2**20
    launch(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = launch(0)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak / 2**20


# Bias.


def bias(options):
    """Mean signed error of O in the direction of the exact output, relative to its mean size, of the last 128 queries."""
    from sigmascale.torch import attention

    print("kernel,heads,head_dim,keys,mean_of_v,signed_error,relative_rmse")
    for shape in shapes(options.shapes):
        heads, _, dim = shape
        for keys in options.seqlens:
            for mean in (0.1, 0.3, 1.0, 3.0):
                torch.manual_seed(1)
                draw = lambda n: torch.randn(1, n, heads, dim, device="cuda")
                q, k, v = (x.clamp(-448, 448).to(E4M3) for x in (draw(128), draw(keys), draw(keys) + mean))
                exact = exact_output(q, k, v)
                one = torch.ones(1, heads, device="cuda")
                given = {"q_descale": one, "k_descale": one, "v_descale": one}
                kernels = {f"sigmascale {a}": functools.partial(attention, plan=(one,) * 3, causal=False, accumulator=a)
                           for a in ("f16", "fp8-256", "fp8-2048")}  # fmt: skip
                kernels["fa3"] = lambda q, k, v: _fa3().flash_attn_func(q, k, v, **given)
                kernels["cudnn"] = cudnn_output
                for name, kernel in kernels.items():
                    try:
                        error = kernel(q, k, v).double() - exact
                    except Exception as problem:
                        print(f"{name},{heads},{dim},{keys},{mean},,  # {type(problem).__name__}: {str(problem)[:120]!r}")
                        continue
                    signed = (error * exact.sign()).mean() / exact.abs().mean()
                    rmse = error.norm() / exact.norm()
                    print(f"{name},{heads},{dim},{keys},{mean},{signed.item():.3e},{rmse.item():.3e}", flush=True)


def exact_output(q, k, v):
    q, k, v = (x.to(torch.float64).transpose(1, 2) for x in (q, k, v))
    return (torch.softmax(q @ k.mT / math.sqrt(q.shape[3]), -1) @ v).transpose(1, 2)


def cudnn_output(q, k, v):
    """cuDNN's FP8 output, which this package dequantizes."""
    from sigmascale.torch import attention

    one = torch.ones(k.shape[0], k.shape[2], device="cuda")
    return attention(*(x.to(torch.bfloat16) for x in (q, k, v)), (one,) * 3, causal=False, backend="cudnn")


# Command line.


def shapes(text):
    return [tuple(int(n) for n in shape.split("x")) for shape in text.split(",")]


def header(table):
    named = "call," if table == "calls" else ""
    return f"kernel,{named}heads_q,heads_kv,head_dim,seqlen,batch,causal,ms,low,high,tflops,watts,mhz,mib"


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=DEFAULTS)
    parser.add_argument("--shapes", help="heads_q x heads_kv x head_dim, comma separated; not of calls")
    parser.add_argument("--calls", nargs="*", help="these alone: packed-8x2048, window-1024, d-96, ..")
    parser.add_argument("--seqlens", help="comma separated")
    parser.add_argument("--tokens", type=int, default=16384, help="batch = max(1, tokens / seqlen)")
    parser.add_argument("--causal", default="0,1", help="0: full, 1: causal")
    parser.add_argument("--rope", action="store_true", help="of from-bf16: q and k come before RoPE")
    parser.add_argument("--kernels", nargs="*", help="these contenders alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=60.0, help="of each contender in each round")
    parser.add_argument("--sets", type=int, default=3)
    options = parser.parse_args()
    options.shapes, seqlens = options.shapes or DEFAULTS[options.table][0], options.seqlens or DEFAULTS[options.table][1]
    options.seqlens = [int(n) for n in seqlens.split(",")]
    options.causal = [causal == "1" for causal in options.causal.split(",")]
    if options.rope and options.table != "from-bf16":
        parser.error(f"--rope is of from-bf16, not of {options.table}")
    if not torch.cuda.is_available():
        sys.exit("peers.py needs a CUDA device: PyTorch finds none")
    torch.cuda.set_stream(torch.cuda.Stream())
    packages = ", ".join(f"{p} {version(p)}" for p in ("sigmascale", "nvidia-cudnn-frontend", "fa3-fwd", "vllm"))
    print(f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {packages}")
    print(f"# Command: benches/peers.py {' '.join(sys.argv[1:])}")
    if options.table == "bias":
        return bias(options)
    torch.manual_seed(0)
    print(header(options.table))
    smi = Smi()
    for case in calls(options) if options.table == "calls" else dense(options):
        if options.calls and case.call not in options.calls:
            continue
        compare(options.table, case, options, smi)
        # Old graphs must not be destroyed while a new one is captured.
        gc.collect()
        torch.cuda.empty_cache()
    smi.close()


if __name__ == "__main__":
    main()
