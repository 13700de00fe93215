"""Syncs into vLLM and SGLang: scales with every one, and a cache that is kept while no bound grows.

    python python/examples/sync_engines.py

Syncs and engines are simulated: the iterators have the shapes of the frameworks' own, the engines hold what theirs hold.
"""

import pathlib
import sys
import types

try:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
except NameError:
    sys.path.insert(0, "python/examples")

from _sync import MODEL, buckets, weights  # noqa: E402

import sigmascale  # noqa: E402
from sigmascale import rl  # noqa: E402

# vLLM's start_weight_update, update_weights, finish_weight_update load scales that come with the weights. SkyRL announces
# names before it sends: `rl.skyrl` wraps its weight extractor.
update = list(rl.with_scales(weights(), MODEL))
print(f"layerwise update: {len(update)} tensors, {sum(name.endswith('_scale') for name, _ in update)} of them scales")

# slime and miles: buckets into SGLang, q has no scale there.
chunks = list(rl.chunks_with_scales(buckets(weights(), 16), MODEL))
print(f"slime, miles: {len(chunks)} buckets, {sum(name.endswith('_scale') for chunk in chunks for name, _ in chunk)} scales")


class Scale:
    """A buffer of one value, which kernels read at a fixed address."""

    value = 1.0

    def fill_(self, value):
        self.value = value


class Engine:
    """The attention layers of a loaded vLLM model."""

    def __init__(self, layers):
        fields = ("_q_scale", "_k_scale", "_v_scale")
        self.layers = [types.SimpleNamespace(**{field: Scale() for field in fields}) for _ in range(layers)]

    def named_modules(self):
        return ((f"model.layers.{i}.self_attn.attn", layer) for i, layer in enumerate(self.layers))


# An engine that drops scales, without the plugin: they are set behind process_weights_after_loading, as verl calls it.
engine, in_use = Engine(6), None
for step, growth in enumerate([0.0, 0.0, -0.02, 0.05]):
    stream = sigmascale.ScaleStream(MODEL)
    for _ in stream.through(weights(step, growth)):
        pass  # the bucket goes to the engine
    flush = in_use is None or rl.must_flush(in_use, stream.layers)
    if flush:
        rl.fill_vllm(engine, stream.layers)
        in_use = stream.layers
    print(f"step {step}: {'new scales, cache flushed' if flush else 'cache and its scales kept'}")
