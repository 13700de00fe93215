"""A policy that is trained and sent: the carried checkpoint, changed a little at each step, as the iterators of a sync give it."""

import json
import pathlib

import ml_dtypes
import numpy as np

MODEL = pathlib.Path(__file__).resolve().parents[2] / "data" / "tiny-llama"


def weights(step=0, growth=0.0):
    """Pairs of a name and a full tensor, as ``export_hf_weights``, ``get_per_tensor_param`` or ``extract_weights`` yield them."""
    random = np.random.default_rng(step)
    for file in sorted(MODEL.glob("model-0*.safetensors")):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        for name, info in header.items():
            if name == "__metadata__":
                continue
            start, end = (8 + length + offset for offset in info["data_offsets"])
            tensor = np.frombuffer(data[start:end], ml_dtypes.bfloat16).reshape(info["shape"]).astype(np.float32)
            noise = 1e-3 * step * random.standard_normal(tensor.shape)
            yield name, (tensor * (1 + growth * step + noise)).astype(ml_dtypes.bfloat16)


def buckets(pairs, size):
    """The same in buckets, as slime, miles and verl send them."""
    bucket = []
    for pair in pairs:
        bucket.append(pair)
        if len(bucket) == size:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
