"""Time of a weight sync's scales on the host: the attention weights of a 7B-shaped model with 8 KV heads, layer by layer.

    RAYON_NUM_THREADS=1 python benches/scale_stream.py [LAYERS]

Prints CSV. Needs NumPy, ml_dtypes and the package, built with ``maturin build --release``.
"""

import sys
import time

import ml_dtypes
import numpy as np

import sigmascale

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
