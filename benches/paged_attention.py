#!/usr/bin/env python3
"""Attention over paged KV caches in E4M3, beside FlashAttention-3 (package fa3-fwd) on the same operands, in CUDA
graphs.

    paged_attention.py [--rows NAME ...] [--heads 64,8] [--dim 128] [--reps 20]
    paged_attention.py --llama [--sequences 64] [--length 8192] [--layers 32]

Rows are decoding, four drafted queries, and chunks of a prefill. ``tiled`` has values in the order that the tensor
cores take, ``rows`` in FlashAttention-3's layout; both include the kernel that plans a call. ``fa3`` reads the same
keys without pages, which is less work. ``fa3_paged`` reads the same pages: FlashAttention-3 as vLLM builds it, if
fa3-fwd is built without pages; empty if vLLM is not installed. ``error`` is the relative RMS difference of the tiled
output from FlashAttention-3's.

--llama times a decode step of Llama-3-8B's shape with random weights: pages in E4M3 by this package beside pages in
BF16 by FlashAttention-3, both with rotation and append. A build of FlashAttention-3 without pages attends to caches
without pages, and leaves rotation and append out.

Output: CSV on stdout.
"""

import argparse

import torch
import torch.nn.functional as F

E4M3 = torch.float8_e4m3fn

# name: sequences, keys, queries of a sequence
ROWS = {
    "decode-64x8k": (64, 8192, 1),
    "decode-8x64k": (8, 65536, 1),
    "decode-256x512": (256, 512, 1),
    "draft4-64x8k": (64, 8192, 4),
    "chunk512-8x8k": (8, 8192, 512),
    "chunk512-1x8k": (1, 8192, 512),
}


def graph_ms(run, reps, launches=4):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    times = []
    for i in range(reps + 3):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / launches)
    times = sorted(times[3:])
    return times[len(times) // 2]


def random_e4m3(*shape):
    out = torch.empty(shape, device="cuda", dtype=E4M3)
    flat = out.view(-1)
    for i in range(0, flat.numel(), 1 << 28):
        n = min(1 << 28, flat.numel() - i)
        flat[i : i + n] = torch.randn(n, device="cuda", dtype=torch.bfloat16).to(E4M3)
    return out


def tile(v):
    """Rows of values in the order that the tensor cores take."""
    pages, size, heads, d = v.shape
    x = v.view(torch.uint8).view(pages, size // 16, 2, 4, 2, heads, d // 8, 8)
    # Token 8 a + 2 t + b of a group is byte 4 t + 2 a + b.
    return x.permute(0, 5, 1, 6, 7, 3, 2, 4).reshape(pages, heads, size // 16, d // 8, 8, 16).view(E4M3)


def supports_pages(call):
    """Whether this build of FlashAttention-3 reads pages."""
    try:
        call()
    except ImportError:
        return False
    except RuntimeError as problem:
        if "paged KV" not in str(problem):
            raise
        return False
    return True


def attention_rows(options):
    from fa3_fwd_interface import flash_attn_with_kvcache

    from sigmascale.torch._paged import paged_attention

    hq, hkv = (int(x) for x in options.heads.split(","))
    d = options.dim
    times = "tiled_us,rows_us,fa3_us,fa3_paged_us"
    print(f"row,page,heads_q,heads_kv,head_dim,{times},tiled_ratio,rows_ratio,tbps,error", flush=True)
    for name in options.rows or ROWS:
        sequences, keys, queries = ROWS[name]
        for page in (64, 256):
            per = keys // page
            count = sequences * per
            torch.manual_seed(0)
            k, v = random_e4m3(count, page, hkv, d), random_e4m3(count, page, hkv, d)
            q = random_e4m3(sequences, queries, hq, d)
            table = torch.randperm(count, device="cuda").to(torch.int32).view(sequences, per)
            lengths = torch.full((sequences,), keys, device="cuda", dtype=torch.int32)
            one = torch.ones(sequences, hkv, device="cuda")
            scale, cu_seqlens = d**-0.5, torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * queries

            def ours(values):
                given = None, None, one, one, one, None, None, False, None, True, scale
                return paged_attention(q, k, values, table, lengths, *given)[0]

            def theirs(paged):
                given = (k, v) if paged else (x.view(sequences, keys, hkv, d) for x in (k, v))
                return flash_attn_with_kvcache(
                    q, *given, cache_seqlens=lengths, page_table=table if paged else None, causal=True,
                    softmax_scale=scale, q_descale=one, k_descale=one, v_descale=one,
                )  # fmt: skip

            def theirs_of_vllm():
                from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

                out = flash_attn_varlen_func(
                    q.flatten(0, 1), k, v, max_seqlen_q=queries, cu_seqlens_q=cu_seqlens, max_seqlen_k=keys,
                    seqused_k=lengths, block_table=table, causal=True, softmax_scale=scale,
                    q_descale=one, k_descale=one, v_descale=one, fa_version=3,
                )  # fmt: skip
                return out.view(q.shape)

            tiled = tile(v)
            ours_ms, rows_ms = graph_ms(lambda: ours(tiled), options.reps), graph_ms(lambda: ours(v), options.reps)
            fa3_ms = graph_ms(lambda: theirs(False), options.reps)
            builds = [paged for paged in (lambda: theirs(True), theirs_of_vllm) if supports_pages(paged)]
            paged_us = f"{1e3 * graph_ms(builds[0], options.reps):.1f}" if builds else ""
            # Pages in order are the cache without pages.
            table.copy_(torch.arange(count, device="cuda").view(sequences, per))
            want = (builds[0] if builds else lambda: theirs(False))().float()
            error = ((ours(tiled).float() - want).norm() / want.norm()).item()
            times = f"{ours_ms * 1e3:.1f},{rows_ms * 1e3:.1f},{fa3_ms * 1e3:.1f},{paged_us}"
            ratios = f"{fa3_ms / ours_ms:.3f},{fa3_ms / rows_ms:.3f}"
            tbps = sequences * keys * hkv * d * 2 / ours_ms / 1e9
            print(f"{name},{page},{hq},{hkv},{d},{times},{ratios},{tbps:.2f},{error:.4f}", flush=True)
            del k, v, tiled, q


def llama(options):
    from fa3_fwd_interface import flash_attn_with_kvcache

    from sigmascale.torch._paged import paged_attention, value_pages

    n, length, layers, page = options.sequences, options.length, options.layers, 64
    width, hq, hkv, d, inner, vocabulary = 4096, 32, 8, 128, 14336, 128256
    half = torch.bfloat16
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=half).mul_(shape[-1] ** -0.5)
    weights = [
        dict(qkv=make((hq + 2 * hkv) * d, width), o=make(width, hq * d), up=make(2 * inner, width), down=make(width, inner))
        for _ in range(layers)
    ]
    head, gain = make(vocabulary, width), torch.ones(width, device="cuda", dtype=half)
    per = length // page
    table = torch.randperm(n * per, device="cuda").to(torch.int32).view(n, per)
    lengths = torch.full((n,), length - 1, device="cuda", dtype=torch.int32)
    angles = torch.outer(torch.arange(length, device="cuda").float(), 500000.0 ** (-torch.arange(0, d, 2, device="cuda").float() / d))
    cosine, sine = angles.cos(), angles.sin()
    cosine16, sine16 = cosine.to(half), sine.to(half)
    one = torch.ones(n, hkv, device="cuda")
    x0 = torch.randn(n, width, device="cuda", dtype=half)

    def step(attend):
        x = x0
        for i, w in enumerate(weights):
            q, k, v = F.linear(F.rms_norm(x, (width,), gain), w["qkv"]).view(n, 1, -1, d).split((hq, hkv, hkv), 2)
            x = x + F.linear(attend(i, q, k, v).reshape(n, -1).to(half), w["o"])
            gate, up = F.linear(F.rms_norm(x, (width,), gain), w["up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        return F.linear(F.rms_norm(x, (width,), gain), head).argmax(-1)

    def timed(name, attend):
        ms = graph_ms(lambda: step(attend), options.reps, 1)
        print(f"{name},{n},{length},{layers},{ms:.3f},{n / ms * 1e3:.0f}", flush=True)
        return ms

    print("pages,sequences,length,layers,ms,tokens_per_second")
    k8 = [random_e4m3(n * per, page, hkv, d) for _ in range(layers)]
    v8 = [value_pages(n * per, page, hkv, d, "cuda") for _ in range(layers)]
    ours = timed(
        "e4m3-tiled",
        lambda i, q, k, v: paged_attention(
            q, k8[i], v8[i], table, lengths, k, v, one, one, one, cosine, sine, False, None, True, d**-0.5
        )[0],
    )
    v8 = [v.view(n * per, page, hkv, d) for v in v8]
    timed(
        "e4m3-rows",
        lambda i, q, k, v: paged_attention(
            q, k8[i], v8[i], table, lengths, k, v, one, one, one, cosine, sine, False, None, True, d**-0.5
        )[0],
    )
    del k8, v8
    k16 = [torch.zeros(n * per, page, hkv, d, device="cuda", dtype=half) for _ in range(layers)]
    v16 = [torch.zeros_like(k) for k in k16]

    def paged(i, q, k, v):
        return flash_attn_with_kvcache(
            q, k16[i], v16[i], k, v, rotary_cos=cosine16, rotary_sin=sine16, cache_seqlens=lengths, page_table=table,
            causal=True, rotary_interleaved=False,
        )

    def without_pages(i, q, k, v):
        given = (x.view(n, length, hkv, d) for x in (k16[i], v16[i]))
        return flash_attn_with_kvcache(q, *given, cache_seqlens=lengths, causal=True)

    some = torch.randn(n, 1, hq, d, device="cuda", dtype=half)
    pages = supports_pages(lambda: paged(0, some, some[:, :, :hkv], some[:, :, :hkv]))
    theirs = timed("bf16-fa3" if pages else "bf16-fa3-no-pages", paged if pages else without_pages)
    print(f"# {theirs / ours:.3f} times the tokens a second of BF16 pages")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", nargs="*", choices=ROWS)
    options.add_argument("--heads", default="64,8")
    options.add_argument("--dim", type=int, default=128)
    options.add_argument("--reps", type=int, default=20)
    options.add_argument("--llama", action="store_true")
    options.add_argument("--sequences", type=int, default=64)
    options.add_argument("--length", type=int, default=8192)
    options.add_argument("--layers", type=int, default=32)
    options = options.parse_args()
    llama(options) if options.llama else attention_rows(options)


if __name__ == "__main__":
    main()
