"""NeMo-RL: the scales of an FP8 KV cache from the weights that a refit sends, without a calibration forward.

    python python/examples/sync_nemo_rl.py

In GRPO, where ``policy.calibrate_qkv_fp8_scales(data, include_q=True)["layers"]`` stands, put ``nemo_rl(weights, config)["layers"]``;
``sync_weights(kv_scales=...)`` takes it as it is. It needs the exported weights alone. DTensor workers refuse ``kv_scales``: there
the vLLM plugin sets them in the engine. The sync itself is simulated here.
"""

import pathlib
import sys

try:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
except NameError:
    sys.path.insert(0, "python/examples")

from _sync import MODEL, weights  # noqa: E402

from sigmascale import rl  # noqa: E402


def received(pairs, kv_scales):
    """What the worker sends: every weight, then every scale, 1.0 where there is none, as f32 of one element."""
    engine = dict(pairs)
    for i in range(6):
        for name in ("attn.q_scale", "k_scale", "v_scale"):
            key = f"model.layers.{i}.self_attn.{name}"
            engine[key] = kv_scales.get(key, 1.0)
    return engine


for step in range(3):
    kv_scales = rl.nemo_rl(weights(step), MODEL)["layers"]
    engine = received(weights(step), kv_scales)
    scales = [value for name, value in engine.items() if name.endswith("_scale")]
    assert len(scales) == 18 and 1.0 not in scales
    print(f"step {step}: k_scale of layer 0 {engine['model.layers.0.self_attn.k_scale']:.5f}, largest scale {max(scales):.5f}")
