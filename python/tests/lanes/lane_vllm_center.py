"""Centered keys in vLLM on the CPU: a small model with a large key bias, whose FP8 cache is read by vLLM's own kernels.

    pytest python/tests/lanes/lane_vllm_center.py

needs vLLM 0.26 or later for CPUs with AVX-512, and this package installed, since vLLM finds the plugin by its entry point.
"""

import functools
import json
import math
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

TOKENS = 192
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "SIGMASCALE_PLUGIN": "strict",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import torch
    import transformers

    out = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512, vocab_size=512,
        max_position_embeddings=512, initializer_range=0.06, tie_word_embeddings=True,
    )
    model = transformers.Qwen2ForCausalLM(config).bfloat16()
    for layer in model.model.layers[:2]:
        # In slow pairs, which turn little.
        layer.self_attn.k_proj.bias.data.view(2, 2, 32)[:, :, 20:] = 150 * torch.randn(2, 2, 12)
    model.save_pretrained(out)
    return out


def inside(folder, how):
    """One engine: the log-probability of each token of a prompt, what the plugin said, the centers that its layers hold."""
    import logging

    import torch
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers import utils

    # The CPU build drops weights when it has packed them; a GPU keeps them, and a refresh reads them.
    pack = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, remove_weight=False)
    lines = []
    # A filter, since vLLM drops handlers when it configures logging for an engine.
    logging.getLogger("vllm.plugins.sigmascale").addFilter(lambda record: lines.append(record.getMessage()) or True)
    llm = LLM(
        folder, dtype="bfloat16", kv_cache_dtype="auto" if how["cache"] == "bf16" else "fp8", enforce_eager=not how["compiled"], seed=0,
        skip_tokenizer_init=True, max_model_len=256, max_num_seqs=2, enable_prefix_caching=False, disable_log_stats=True,
        **({"compilation_config": {"mode": 3}} if how["compiled"] else {}),
    )
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 512, (TOKENS,), generator=draw).tolist()

    def logprobs():
        answer = llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False), use_tqdm=False)[0]
        return [row[token].logprob for token, row in zip(tokens, answer.prompt_logprobs) if row]

    out = {"logprobs": logprobs(), "log": lines, "centers": llm.apply_model(centers)[0], "keys": keys(llm.llm_engine.vllm_config)}
    llm.apply_model(displace)
    out["displaced"] = logprobs()
    llm.apply_model(refreshed)
    out["refreshed"] = logprobs()
    return out


def centers(model):
    return [float(module._sigmascale_center.abs().max()) for module in model.modules() if getattr(module, "_sigmascale_center", None) is not None]


def keys(config):
    """What names the entries of shared stores, and what NIXL compares."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.v1.core import kv_cache_utils

    import sigmascale.vllm

    assert sigmascale.vllm._salt_transfers("NixlConnector") and sigmascale.vllm._salt_transfers("OffloadingConnector")
    assert not sigmascale.vllm._salt_transfers("LMCacheConnectorV1")
    return [kv_cache_utils.resolve_none_hash_seed(len), base_worker.compute_nixl_compatibility_hash(config, "CPU_ATTN")]


def displace(model):
    for module in model.modules():
        if getattr(module, "_sigmascale_center", None) is not None:
            module._sigmascale_center.add_(2.0**10)


def refreshed(model):
    import sigmascale.vllm

    sigmascale.vllm.refresh(model)


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory):
    """Engines in processes of their own, with one cache of compiled code."""
    work = tmp_path_factory.mktemp("engines")

    @functools.cache
    def run(cache="fp8", center="auto", compiled=False):
        how = {"cache": cache, "compiled": compiled}
        own = QUIET | {"SIGMASCALE_CENTER": center, "VLLM_CACHE_ROOT": str(work / "cache")}
        out = work / "out.json"
        done = subprocess.run(
            [sys.executable, __file__, str(folder), json.dumps(how), str(out)], env=os.environ | own, capture_output=True, text=True, timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(out.read_text())

    return run


def apart(one, other):
    """Root mean square of the differences of log-probabilities."""
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(one))


def test_centered_keys_are_closer_to_a_bf16_cache(engine):
    base, plain, centered = engine("bf16"), engine(center="off"), engine()
    assert not base["centers"] and not plain["centers"] and len(centered["centers"]) == 3
    assert min(centered["centers"][:2]) > 100 and centered["centers"][2] == 0
    assert any("in 2 of 3 layers" in line for line in centered["log"]) and not any("constant" in line for line in plain["log"])
    without, with_centers = (apart(base["logprobs"], x["logprobs"]) for x in (plain, centered))
    print(f"rms of the change of a log-probability: {without:.4f}, with centers {with_centers:.4f}")
    assert with_centers < 0.5 * without


def test_engines_with_other_centers_share_no_cache(engine):
    plain, centered = engine(center="off"), engine()
    assert centered["keys"] == engine(compiled=True)["keys"] and not set(centered["keys"]) & set(plain["keys"])


def test_the_center_is_read_at_each_call(engine):
    centered = engine()
    assert apart(centered["displaced"], centered["logprobs"]) > 10 * apart(centered["refreshed"], centered["logprobs"])
    assert centered["refreshed"] == centered["logprobs"]


def test_compiled_code_centers_too(engine):
    """Also where the code of an engine without centers is in the cache of compiled code."""
    base, plain, compiled = engine("bf16"), engine(center="off", compiled=True), engine(compiled=True)
    assert apart(compiled["logprobs"], engine()["logprobs"]) < 0.5 * apart(plain["logprobs"], engine()["logprobs"])
    assert apart(base["logprobs"], compiled["logprobs"]) < 0.5 * apart(base["logprobs"], plain["logprobs"])
    assert compiled["refreshed"] == compiled["logprobs"] != compiled["displaced"]


if __name__ == "__main__":
    folder, how, out = sys.argv[1:]
    result = inside(folder, json.loads(how))
    with open(out, "w") as file:
        json.dump(result, file)
    sys.stdout.flush()
    os._exit(0)
