"""Time of a weight sync's scales: the attention weights of a 7B-shaped model with 8 KV heads, layer by layer.

    RAYON_NUM_THREADS=1 python benches/scale_stream.py [LAYERS]
    python benches/scale_stream.py bookkeeping

Prints CSV. Needs NumPy, ml_dtypes and the package, built with ``maturin build --release``. ``bookkeeping`` needs
PyTorch: it measures what Python and the crate do on the host for the 291 tensors of a 7B model whose scales are
computed on a device. Tensors are small, and the launch of the scale engine is left out.
"""

import sys
import time

import ml_dtypes
import numpy as np

import sigmascale


def bookkeeping():
    import torch

    from sigmascale import _serving
    from sigmascale.torch import _host

    torch.set_num_threads(1)
    _serving._DEVICES = ("cpu",)
    d, layers = 64, 32
    config = {
        "model_type": "llama",
        "hidden_size": d,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    names = ["self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.q_proj"]
    shapes = dict.fromkeys(names, (d, d)) | {"self_attn.k_proj": (d // 2, d), "self_attn.v_proj": (d // 2, d)}
    shapes |= {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
    of_layer = lambda i: [
        (f"model.layers.{i}.{name}.weight", torch.randn(shape).bfloat16()) for name, shape in shapes.items()
    ]
    weights = [pair for i in range(layers) for pair in of_layer(i)]
    weights += [
        (f"{name}.weight", torch.randn(8, d).bfloat16()) for name in ("model.embed_tokens", "model.norm", "lm_head")
    ]
    stream = sigmascale.ScaleStream(config)
    list(stream.through(weights))
    # The first pass made the engine.
    _host.ScaleEngine.launch = lambda self, stream: None
    print("run,tensors,layers,wall_s,cpu_s")
    for run in range(20):
        wall, cpu = time.perf_counter(), time.process_time()
        for name, tensor in weights:
            stream.push(name, tensor)
        stream.finish()
        print(f"{run},{len(weights)},{layers},{time.perf_counter() - wall:.5f},{time.process_time() - cpu:.5f}")


if sys.argv[1:] == ["bookkeeping"]:
    bookkeeping()
    raise SystemExit

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
