"""Time of a weight sync's scales: the attention weights of a 7B-shaped model with 8 KV heads, layer by layer.

    RAYON_NUM_THREADS=1 python benches/scale_stream.py [LAYERS]
    python benches/scale_stream.py cuda

Prints CSV. Needs NumPy, ml_dtypes and the package, built with ``maturin build --release``. ``cuda`` needs PyTorch and a
GPU: it measures a whole sync of the 291 tensors of the model, beside copies of all of them from pinned memory and on
the device: scales that are read at the end (one wait), and scales that are read after each layer (32 waits).
"""

import sys
import time

import sigmascale


def cuda():
    import torch

    shapes = {"self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096)}
    shapes |= {"self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096)}
    shapes |= {"mlp.down_proj": (4096, 14336), "input_layernorm": (4096,), "post_attention_layernorm": (4096,)}
    layers, outside = 32, {"model.embed_tokens": (32000, 4096), "lm_head": (32000, 4096), "model.norm": (4096,)}
    make = lambda shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    weights = [(f"model.layers.{i}.{name}.weight", make(s)) for i in range(layers) for name, s in shapes.items()]
    weights += [(f"{name}.weight", make(shape)) for name, shape in outside.items()]
    # Pinned memory for each shape, and one place for copies: where a copy comes from and goes to does not change its time.
    pinned = {shape: torch.empty(shape, dtype=torch.bfloat16, pin_memory=True) for shape in {x.shape for _, x in weights}}
    place = {shape: torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in pinned}
    config = {"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": layers, "num_attention_heads": 32}
    stream = sigmascale.ScaleStream(config | {"num_key_value_heads": 8, "rope_theta": 10000.0})

    def scales(look=lambda layers: None):
        for name, tensor in weights:
            look(stream.push(name, tensor))
        stream.finish()

    ways = {
        "copy from the host": lambda: [place[x.shape].copy_(pinned[x.shape], non_blocking=True) for _, x in weights],
        "copy on the device": lambda: [place[x.shape].copy_(x) for _, x in weights],
        "scales": scales,
        "scales after each layer": lambda: scales(list),
    }
    print("run,tensors,gigabytes,way,wall_s,cpu_s")
    # The first pass makes the engine.
    for run in range(-1, 7):
        for way, work in ways.items():
            torch.cuda.synchronize()
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            torch.cuda.synchronize()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            size = sum(tensor.nbytes for _, tensor in weights) / 1e9
            if run >= 0:
                print(f"{run},{len(weights)},{size:.3f},{way},{wall:.5f},{cpu:.5f}")


if sys.argv[1:] == ["cuda"]:
    cuda()
    raise SystemExit

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

D, QUERY, KV = 4096, 4096, 1024
layers = int(sys.argv[1]) if len(sys.argv) > 1 else 8
config = {
    "model_type": "mistral",
    "hidden_size": D,
    "num_hidden_layers": layers,
    "num_attention_heads": QUERY // 128,
    "num_key_value_heads": KV // 128,
    "rope_theta": 10000.0,
}
random = np.random.default_rng(0)
weight = lambda rows: (0.02 * random.standard_normal((rows, D), dtype=np.float32)).astype(ml_dtypes.bfloat16)
tensors = {f"self_attn.{name}_proj.weight": weight(rows) for name, rows in [("q", QUERY), ("k", KV), ("v", KV)]}
tensors["input_layernorm.weight"] = np.ones(D, ml_dtypes.bfloat16)
gigabytes = layers * sum(tensor.nbytes for tensor in tensors.values()) / 1e9
print("run,layers,gigabytes,wall_s,cpu_s,gigabytes_per_wall_s")
for run in range(5):
    stream = sigmascale.ScaleStream(config)
    wall, cpu = time.perf_counter(), time.process_time()
    for layer in range(layers):
        for name, tensor in tensors.items():
            stream.push(f"model.layers.{layer}.{name}", tensor)
    stream.finish()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{run},{layers},{gigabytes:.4f},{wall:.4f},{cpu:.4f},{gigabytes / wall:.3f}")
