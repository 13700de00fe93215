#!/usr/bin/env python3
"""Scales of sharded models: whether they are those of one GPU, and what they cost.

    torchrun --nproc-per-node 2 benches/sharded.py scales addresses collectives graph overhead ring
    torchrun --nproc-per-node 1 benches/sharded.py overhead

    scales       after three AdamW steps, FSDP and tensor parallelism: descales equal to one device's, bit for bit;
                 sigma within 1 % of the host's in f64, and not below the norm of W_Q^T W_K without rotation
    addresses    how often weights were gathered at a new address in 50 steps; a digest of all scales of ten steps
                 whose all-gathers are delayed, to be compared with that of a run under CUDA_LAUNCH_BLOCKING=1
    collectives  collective calls of a training step without a runtime, with one, and with delayed scaling's
                 all-reduce; on which stream scales are computed, and between which kernels
    graph        forward and backward in one CUDA graph, replayed over three optimizer steps: descales equal to one
                 device's
    forward      the same of a forward without gradients, over three changes of the weights
    overhead     time of a BF16 training step with and without refresh(), which computes all scales; and with an
                 all-reduce of 3 KB per microbatch
    ring         attention over a sequence on all ranks: keys and values in E4M3, beside PyTorch's ring in BF16: time
                 and error

On GPUs over NCCL; without one on the CPU over gloo, with small sizes, which tries the script and measures nothing.
Each test prints a line of JSON, with `failed` in place of `found` where something is not equal or raises an exception; the tests
after it run all the same. What hangs ends after a minute.
"""

import argparse
import datetime
import functools
import gc
import hashlib
import json
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sigmascale.torch as fp8

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "python" / "tests"))
import plain  # noqa: E402

CUDA = torch.cuda.is_available()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Width, query heads, KV heads, inner width, layers.
SMALL = (1024, 8, 4, 2816, 4) if CUDA else (64, 4, 2, 96, 2)
LLAMA_8B = (4096, 32, 8, 14336) if CUDA else (64, 4, 2, 96)


def llama(width, heads, kv_heads, inner, layers, seed=0):
    """The same on every rank, 32-bit weights."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=width, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=inner,
        num_hidden_layers=layers, vocab_size=1024, max_position_embeddings=131072, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device()):
        return transformers.LlamaForCausalLM(config)


@functools.cache
def device():
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")


@functools.cache
def mesh():
    return init_device_mesh(device().type, (dist.get_world_size(),))


def shard(model):
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh(), mp_policy=BF16)
    return model


def split(model):
    """Tensor parallelism."""
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh(), plan)
    return model


def attach(model, **options):
    runtime = fp8.attach(model, backend="native" if model.device.type == "cuda" else "emulated", **options)
    # Nothing is padded or packed, which a capture cannot look for.
    model.set_attn_implementation(fp8.register(padding="right"))
    return runtime


def adamw(model):
    # Parameters of tensor parallel models are partly DTensors, which one fused step does not take together.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def tokens(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1024, (batch, length), generator=generator).to(device())


def backward(model, batch):
    loss = model(batch, labels=batch).loss
    loss.backward()
    return loss


def whole_of(model, make, dtype):
    """A model of the whole weights, on one device."""
    state = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.state_dict().items()}
    whole = make()
    whole.load_state_dict(state)
    return whole.to(dtype)


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def equal(a, b, what):
    if not torch.equal(a, b):
        worst = ((a - b).abs() / b.abs()).max().item()
        raise SystemExit(f"rank {dist.get_rank()}: {what} differ, by up to {worst:.2e} of the value")


def norms_in_f64(whole):
    """Largest singular value of W_Q^T W_K of each head without rotation, gains included, in f64: no bound for all
    rotations is smaller."""
    rows = []
    for layer in whole.model.layers:
        a, gain = layer.self_attn, layer.input_layernorm.weight.double()
        q = (a.q_proj.weight.double() * gain).unflatten(0, (-1, a.head_dim))
        k = (a.k_proj.weight.double() * gain).unflatten(0, (-1, a.head_dim))
        k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
        product = (q @ q.mT) @ (k @ k.mT)
        # On the CPU: not every build of PyTorch has these eigenvalues on a GPU.
        rows.append(torch.linalg.eigvals(product.cpu()).real.amax(dim=1).sqrt().to(product.device))
    return torch.stack(rows)


# Logit bounds: W_Q and W_K are then read in shares of a block each, which depend on the layers of a launch, and sums of f32 on the shares.
LAST_BIT = 2**-22


def test_scales():
    kinds = (("fsdp", shard, torch.bfloat16), ("tp", split, torch.float32))
    return {f"{of[0]}, bound={bound}": scales(*of, bound) for bound in (None, "worst-case") for of in kinds}


def scales(kind, wrap, dtype, bound):
    """Scales after three steps, beside those of one device with the whole weights."""
    make = functools.partial(llama, *SMALL)
    model = wrap(make())
    runtime = attach(model, bound=bound)
    optimizer, batch = adamw(model), tokens(2, 128, dist.get_rank() if kind == "fsdp" else 0)
    for _ in range(3):
        with torch.autocast(device().type, torch.bfloat16, enabled=kind == "tp"):
            backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        runtime.refresh()
    with torch.autocast(device().type, torch.bfloat16, enabled=kind == "tp"):
        backward(model, batch)
    whole = whole_of(model, make, dtype)
    alone = attach(whole, bound=bound)
    heads = runtime.n_kv_heads
    place = dist.get_rank() if kind == "tp" else 0
    own = alone.descales[..., place * heads : (place + 1) * heads]
    if kind == "fsdp":
        everywhere = [torch.empty_like(runtime.descales) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, runtime.descales)
        equal(everywhere[0], everywhere[-1], "fsdp: descales of the ranks")
    what = f"{kind}: descales and those of one device"
    if bound is None:
        equal(runtime.descales, own, what)
        return {"descales": runtime.descales.numel(), "equal": True}
    off = (runtime.descales / own - 1).abs().amax(dim=(0, 2))
    if off.max() > LAST_BIT:
        raise SystemExit(f"rank {dist.get_rank()}: {what} differ by {off.tolist()} of q's, k's, v's and o's")
    own = slice(place * runtime.n_q_heads, (place + 1) * runtime.n_q_heads)
    sigma, least = runtime.logits[..., 0].double(), norms_in_f64(whole)[:, own]
    beside_one = (runtime.logits / alone.logits[:, own] - 1).abs().max().item()
    host = attach(whole.cpu(), bound=bound).logits[:, own, 0].double()
    beside_host = (sigma.cpu() / host - 1).abs().max().item()
    if beside_host > 0.01 or not (sigma >= least).all():
        raise SystemExit(f"{kind}: sigma is off the host's by {beside_host:.2e}; over its least {(sigma / least).min():.6f}")
    return {
        "descales": runtime.descales.numel(),
        "equal": not off.any().item(),
        "descales_beside_one_device": off.tolist(),
        "sigma_beside_host": beside_host,
        "sigma_over_least": (sigma / least).min().item(),
        "bounds_beside_one_device": beside_one,
    }


def delayed(model):
    """Hooks that hold the all-gathers' stream up ahead of each unit, so that what does not wait for them is wrong."""
    shared = model._get_fsdp_state()._comm_ctx

    def hold(*_):
        for name in ("all_gather_copy_in_stream", "all_gather_stream"):
            with torch.cuda.stream(getattr(shared, name)):
                torch.cuda._sleep(2_000_000)

    for part in (*model.model.layers, model):
        part.register_forward_pre_hook(hold, prepend=True)


def test_addresses():
    model = shard(llama(*SMALL))
    runtime = attach(model)
    optimizer, batch = adamw(model), tokens(2, 128, dist.get_rank())

    def step():
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        runtime.refresh()

    for _ in range(50):
        step()
    layers = model.model.layers
    digest = hashlib.sha256()
    for first, then in zip(layers, layers[1:]):
        first.set_modules_to_forward_prefetch([then])
    if CUDA:
        delayed(model)
    for seed in range(10):
        batch = tokens(2, 128, 100 * seed + dist.get_rank())
        backward(model, batch)
        digest.update(runtime.descales.cpu().numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
        runtime.refresh()
    return {
        "computations": 50 * len(runtime),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
        "blocking": os.environ.get("CUDA_LAUNCH_BLOCKING", "0"),
        "digest_of_scales": digest.hexdigest()[:16],
    }


def collectives(policy):
    """Calls of one training step, attach() included, and the kernels of the stream on which scales are computed."""
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * CUDA
    model = shard(llama(*SMALL))
    batch = tokens(2, 128, dist.get_rank())
    backward(model, batch)
    synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        if policy is not None:
            options = {"group": dist.group.WORLD} if policy.startswith("delayed") else {}
            runtime = attach(model, policy=policy, **options)
        backward(model, batch)
        if policy is not None:
            runtime.refresh()
        synchronize()
    events = profile.events()
    names = [event.name for event in events if event.name.startswith("c10d::")]
    kernels = [e for e in events if CUDA and e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda event: event.time_range.start)
    # NCCL names its kernels ncclDevKernel_..; nccl:.. are the ranges around them.
    nccl = sum("ncclDevKernel" in event.name for event in kernels)
    scales = [event for event in kernels if event.name.startswith("scale_")]
    if CUDA and policy == "geometry" and not scales:
        raise SystemExit(f"no kernel of scales among {sorted({event.name for event in kernels})}")
    between = None
    if scales:
        (stream,) = {event.device_resource_id for event in scales}
        same = [event.name for event in kernels if event.device_resource_id == stream]
        at = same.index(scales[0].name)
        copied = max((i for i, name in enumerate(same[:at]) if "split_with_sizes_copy" in name), default=None)
        attended = next((i for i, name in enumerate(same[at:], at) if "attention" in name), None)
        between = None not in (copied, attended) and copied < at < attended
    return {
        "calls": {name: names.count(name) for name in sorted(set(names))},
        "nccl_kernels": nccl,
        "in_order": between,
    }


def test_collectives():
    found = {str(policy): collectives(policy) for policy in (None, "geometry", "delayed-te")}
    alone, geometry, observing = (found[name]["calls"] for name in ("None", "geometry", "delayed-te"))
    reduced = lambda calls: sum(count for name, count in calls.items() if "allreduce" in name)
    if alone != geometry or reduced(observing) != reduced(alone) + 1:
        raise SystemExit(f"calls: {found}")
    if CUDA and not found["geometry"]["in_order"]:
        raise SystemExit(f"scales are not computed between the copy of the gathered weights and attention: {found}")
    return found


def join(model):
    """Has the current stream wait for those of FSDP that its capture has reached."""
    shared, current = model._get_fsdp_state()._comm_ctx, torch.cuda.current_stream()
    for stream in (x for x in vars(shared).values() if isinstance(x, torch.cuda.Stream)):
        with torch.cuda.stream(stream):
            reached = torch.cuda.is_current_stream_capturing()
        if reached and stream != current:
            current.wait_stream(stream)


def test_graph():
    return replayed(True)


def test_forward():
    return replayed(False)


def replayed(gradients):
    """Descales of three replays of a captured step, or of its forward alone, each after a change of the weights."""
    if not CUDA:
        return "needs a GPU"
    make = functools.partial(llama, *SMALL)
    model = shard(make())
    runtime = attach(model)
    optimizer, batch, side = adamw(model), tokens(2, 128, dist.get_rank()), torch.cuda.Stream()

    def step():
        with torch.set_grad_enabled(gradients):
            loss = model(batch, labels=batch).loss
        if gradients:
            loss.backward()

    def change():
        if gradients:
            return optimizer.step()
        # Without a backward the root of the model keeps its gathered weights.
        model.reshard()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().mul_(1.01)

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
            change()
            optimizer.zero_grad()
            runtime.refresh()
    torch.cuda.current_stream().wait_stream(side)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    # Of one thread: NCCL's watchdog asks for events in another.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        step()
        join(model)
    seen = set()
    try:
        for _ in range(3):
            graph.replay()
            synchronize()
            equal(runtime.descales, attach(whole_of(model, make, torch.bfloat16)).descales, "descales of a replay")
            seen.add(hashlib.sha256(runtime.descales.cpu().numpy().tobytes()).hexdigest())
            change()
    finally:
        # Before the process group, whose communicators the graph uses.
        graph.reset()
    if len(seen) != 3:
        raise SystemExit("three states of the weights gave the same descales")
    return {"replays": 3, "equal": True}


def median_of(step, rounds):
    """Median, smallest and largest milliseconds of a step, and of each of several ways that take turns."""
    taken = {way: [] for way in step}
    for turn in range(rounds + 2):
        for way, run in step.items() if turn % 2 else reversed(step.items()):
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            if turn > 1:
                taken[way].append(1e3 * (time.perf_counter() - start))
    return {way: [statistics.median(ms), min(ms), max(ms)] for way, ms in taken.items()}


def test_overhead():
    sharded, length = dist.get_world_size() > 1, 8192 if CUDA else 32
    # 1.7 billion parameters: with f32 weights, gradients and moments on two ranks, and activations, 45 GB a GPU.
    layers = 8 if CUDA else 2
    model = llama(*LLAMA_8B, layers)
    model = shard(model) if sharded else model.bfloat16()
    # Attention stays PyTorch's in BF16: what is measured is the scales alone.
    runtime = fp8.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=CUDA)
    batch, words = tokens(1, length, dist.get_rank()), torch.zeros(768, dtype=torch.int32, device=device())
    rows = {}
    for microbatches in (1, 8):

        def step(refresh=False, reduce=False):
            # Ahead of the forwards, which compute the scales of sharded layers: after them the next step would pay.
            if refresh:
                runtime.refresh()
            for index in range(microbatches):
                if sharded:
                    model.set_requires_gradient_sync(index + 1 == microbatches)
                backward(model, batch)
                if reduce:
                    dist.all_reduce(words, op=dist.ReduceOp.MAX)
            optimizer.step()
            optimizer.zero_grad()

        ways = {
            "bf16": step,
            "refresh": functools.partial(step, refresh=True),
            "all_reduce": functools.partial(step, reduce=True),
        }
        ms = median_of(ways, (20 if microbatches == 1 else 6) if CUDA else 2)
        share = lambda way: 100 * (ms[way][0] / ms["bf16"][0] - 1)
        rows[f"{microbatches} microbatches"] = {"ms": ms, "percent": {w: share(w) for w in ("refresh", "all_reduce")}}
    memory = torch.cuda.max_memory_allocated() / 2**30 if CUDA else None
    return {"layers": layers, "tokens": length, "sharded": sharded, "peak_gib": memory} | rows


def pytorchs_ring(parts, heads, grad, backend):
    """PyTorch's own in BF16, with its own order of the sequence: what it took and gave, or why it does not take the call."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import sdpa_kernel

    def run(gradients, repeated):
        q, k, v = own = [x.detach().clone().requires_grad_(gradients) for x in parts]
        if repeated:
            k, v = (x.repeat_interleave(heads[0] // heads[1], dim=1) for x in (k, v))
        with sdpa_kernel([backend]):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeated)
        if gradients:
            out.backward(grad)
            assert all(x.grad is not None for x in own)
        return out

    # Within the context buffers are shared out in place: a dummy is, the parts are this rank's already.
    dummy = torch.zeros(4 * dist.get_world_size(), device=device())
    for repeated in (False, True):
        try:
            with context_parallel(mesh(), buffers=[dummy], buffer_seq_dims=[0]):
                run(True, repeated)
                ways = {"forward": lambda: run(False, repeated), "both": lambda: run(True, repeated)}
                return median_of(ways, 10) | {"kv_heads_repeated": repeated}, run(False, repeated).detach()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return {"refused": reason}, None


def test_ring():
    length, heads, d = (65536, (32, 8), 128) if CUDA else (64, (4, 2), 16)
    group, ranks = dist.group.WORLD, dist.get_world_size()
    generator = torch.Generator(device()).manual_seed(0)
    make = lambda n: torch.randn(1, length, n, d, generator=generator, device=device()).to(torch.bfloat16)
    whole = [make(n) for n in (heads[0], heads[1], heads[1])]
    # Values with a mean, which sums in FP8 would lose.
    whole[2] += 0.5
    descales = [x.float().abs().amax(dim=(0, 1, 3)).view(heads[1], -1).amax(dim=1) / 448 for x in whole]
    part = functools.partial(fp8.shard_sequence, group=group, zigzag=True)
    own = [part(x).contiguous() for x in whole]
    grad = torch.randn(own[0].shape, generator=generator, device=device()).to(torch.bfloat16)

    def run(gradients):
        tensors = [x.detach().requires_grad_(gradients) for x in own]
        out = fp8.ring_attention(*tensors, descales, group)
        if gradients:
            out.backward(grad)
        return out

    found = {"tokens": length, "heads": heads, "d_head": d, "ranks": ranks}
    ours = median_of({"forward": lambda: run(False), "both": lambda: run(True)}, 10 if CUDA else 1)
    out = run(False)
    places = part(torch.arange(length, device=device())[None])[0]
    rows = torch.linspace(0, len(places) - 1, 64 if CUDA else 16, device=device()).long()
    exact = plain.attention(*whole, rows=places[rows])[0][0]
    error = lambda x: ((x[0, rows].double() - exact).norm() / exact.norm()).item()
    found["e4m3"] = ours | {"error": error(out), "bytes_sent_forward": (ranks - 1) * 2 * own[1].numel()}
    if CUDA:
        from torch.nn.attention import SDPBackend

        # Heads before the sequence; rank r has chunks r and 2n - 1 - r there as well.
        parts, grads = [x.transpose(1, 2).contiguous() for x in own], grad.transpose(1, 2).contiguous()
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            theirs, other = pytorchs_ring(parts, heads, grads, backend)
            if other is not None:
                theirs |= {"error": error(other.transpose(1, 2)), "bytes_sent_forward": (ranks - 1) * 4 * own[1].numel()}
            found["bf16_pytorch_" + backend.name.removesuffix("_ATTENTION").lower()] = theirs
    if error(out) > 0.1:
        raise SystemExit(f"ring attention is not attention over the whole sequence: {found}")
    return found


TESTS = {name.removeprefix("test_"): function for name, function in list(globals().items()) if name.startswith("test_")}


def tried(name):
    """What a test found, or how it failed here."""
    try:
        return {"found": TESTS[name]()}
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        print(f"rank {dist.get_rank()}: {name}: {reason}", file=sys.stderr, flush=True)
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        return {"failed": reason}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="+", choices=list(TESTS), metavar="TEST", help=", ".join(TESTS))
    tests = parser.parse_args().tests
    if CUDA:
        torch.cuda.set_device(device())
    minute = datetime.timedelta(seconds=60)
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=device() if CUDA else None, timeout=minute)
    # Ranks agree over the CPU, also after a test that left some of them in a collective of NCCL.
    control, failures = dist.new_group(backend="gloo", timeout=minute), 0
    for name in tests:
        start, every = time.time(), [None] * dist.get_world_size()
        dist.all_gather_object(every, tried(name), group=control)
        failed = [one for one in every if "failed" in one]
        failures += bool(failed)
        row = {"test": name, "ranks": dist.get_world_size()} | (failed or every)[0]
        row |= {"device": torch.cuda.get_device_name() if CUDA else "cpu", "torch": torch.__version__}
        if dist.get_rank() == 0:
            print(json.dumps(row | {"seconds": round(time.time() - start, 1)}), flush=True)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    dist.barrier(group=control)
    dist.destroy_process_group()
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
