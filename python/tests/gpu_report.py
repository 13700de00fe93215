#!/usr/bin/env python3
"""What refreshing costs on a model of 7B shape, and what FP8 calls cost beside BF16. One Hopper GPU; prints CSV.

Times are medians of events. `refresh` is timed from the launch of its first kernel to the end of its last, eager and
replayed from a CUDA graph; `share` is that over the BF16 forward of the whole model at 4096 tokens, in the same run.
"""

import statistics

import torch
import transformers

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
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=n_kv, intermediate_size=11008
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval()


@torch.no_grad()
def main():
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    print("model,what,ms,share")
    for name, n_kv in [("7B, 32 KV heads", 32), ("7B, 8 KV heads", 8)]:
        model = model_of(n_kv)
        tokens = torch.randint(0, 32000, (1, 4096), device="cuda")
        model.set_attn_implementation("sdpa")
        forward = median_ms(lambda: model.model(tokens, use_cache=False), 5, 2)
        print(f"{name},forward bf16,{forward:.3f},1")
        for bound in (None, "certain"):
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
        del model, runtime, graph
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
