#!/usr/bin/env python3
"""What refreshing costs on a model of 7B shape, what FP8 calls cost beside BF16, and what their outputs lose on real text. One
Hopper GPU; prints CSV.

Times are medians of events. `refresh` is timed from the launch of its first kernel to the end of its last, eager and
replayed from a CUDA graph; `share` is that over the BF16 forward of the whole model at 4096 tokens, in the same run. Errors are
relative RMS of the attention output against f64 attention on the unrounded operands of the carried checkpoint, the largest of
its layers: with the plan's descales, with descales from the exact maxima of each head, and of BF16 SDPA.
"""

import pathlib
import statistics

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import sigmascale.torch as fp8


def median_ms(work, repeat=15, warm=3):
    for _ in range(warm):
        work()
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def model_of(n_kv):
    config = transformers.LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=n_kv,
        intermediate_size=11008,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval()


def recorded():
    """q, k and v of every layer of the carried checkpoint on real text, with its runtime."""
    root = pathlib.Path(__file__).resolve().parents[2]
    model = (
        transformers.AutoModelForCausalLM.from_pretrained(root / "data" / "tiny-llama", dtype=torch.bfloat16)
        .cuda()
        .eval()
    )
    runtime, seen = fp8.attach(model), []

    def record(module, query, key, value, mask, scaling=None, **kwargs):
        seen.append([x.transpose(1, 2) for x in (query, key, value)])
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling)

    transformers.AttentionInterface.register("record", record)
    model.set_attn_implementation("record")
    text = (root / "README.md").read_bytes()[:8192]
    model(torch.tensor(list(text), device="cuda").view(16, 512))
    return runtime, seen


def errors():
    print("backend,with the plan,with exact maxima,ratio,bf16 sdpa")
    runtime, seen = recorded()
    for name in ("native", "fa3", "cudnn", "emulated"):
        rows = []
        for plan, (q, k, v) in zip(runtime.layers, seen):
            heads = [x.transpose(1, 2) for x in (q, k, v)]
            sdpa = lambda xs: torch.nn.functional.scaled_dot_product_attention(
                *xs, is_causal=True, enable_gqa=True
            ).transpose(1, 2)
            exact = sdpa([x.double() for x in heads])
            error = lambda out: ((out.double() - exact).norm() / exact.norm()).item()
            amax = [x.abs().amax(dim=(0, 1, 3)).float().view(k.shape[2], -1).amax(dim=1) for x in (q, k, v)]
            maxima = [a * (1 + 2**-22) / 448 for a in amax]
            try:
                ours, best = (error(fp8.attention(q, k, v, by, backend=name)) for by in (plan, maxima))
            except ValueError as refusal:
                print(f"{name},{refusal}")
                break
            rows.append((ours, best, ours / best, error(sdpa(heads))))
        else:
            print(name + "," + ",".join(f"{max(column):.5f}" for column in zip(*rows)))
    assert (runtime.stats()["overflow"] == 0).all()


@torch.no_grad()
def main():
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    errors()
    print("model,what,ms,share")
    for name, n_kv in [("7B, 32 KV heads", 32), ("7B, 8 KV heads", 8)]:
        model = model_of(n_kv)
        tokens = torch.randint(0, 32000, (1, 4096), device="cuda")
        model.set_attn_implementation("sdpa")
        forward = median_ms(lambda: model.model(tokens, use_cache=False), 5, 2)
        print(f"{name},forward bf16,{forward:.3f},1")
        for bound in (None, "worst-case"):
            runtime = fp8.attach(model, bound=bound)
            addresses = runtime.descales.data_ptr()
            eager = median_ms(runtime.refresh)
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                runtime.refresh()
            replayed = median_ms(graph.replay)
            assert runtime.descales.data_ptr() == addresses
            what = "operand descales" if bound is None else "with logit bounds"
            print(f"{name},refresh {what} eager,{eager:.3f},{eager / forward:.4f}")
            print(f"{name},refresh {what} graph,{replayed:.3f},{replayed / forward:.4f}")
        model.set_attn_implementation(fp8.register())
        eight = median_ms(lambda: model.model(tokens, use_cache=False), 5, 2)
        print(f"{name},forward fp8 attention,{eight:.3f},{eight / forward:.4f}")
        model = runtime = graph = None
        torch.cuda.empty_cache()
    print("call,backend,ms,over bf16 sdpa")
    for batch, length in [(2, 2048), (2, 8192)]:
        make = lambda heads: torch.randn(batch, length, heads, 128, device="cuda", dtype=torch.bfloat16)
        q, k, v = make(32), make(8), make(8)
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        sdpa = lambda: torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        reference = median_ms(sdpa)
        print(f"{batch}x{length} 32q 8kv d128 causal,bf16 sdpa,{reference:.3f},1")
        row = [torch.full((8,), 0.02, device="cuda") for _ in range(3)]
        for backend in ("native", "fa3", "cudnn"):
            try:
                fp8.backend(backend)
            except ValueError:
                continue
            time = median_ms(lambda: fp8.attention(q, k, v, row, backend=backend))
            print(f"{batch}x{length} 32q 8kv d128 causal,{backend} with cast,{time:.3f},{time / reference:.3f}")


if __name__ == "__main__":
    main()
