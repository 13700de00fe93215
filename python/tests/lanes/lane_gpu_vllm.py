"""vLLM on a Hopper GPU with real models: exports, the plugin, and what an engine does with weights while it runs.

    python python/tests/lanes/lane_gpu_vllm.py MODELS --work FOLDER [--only WORD ...] [--jobs 6] [--gpus 1]

MODELS holds one folder of Hugging Face transformers a model, with tokenizer. A process runs the cases of one environment in turn, each
with an engine of its own; several processes run at a time. A line a check: passed, failed, or not run with the reason. `FOLDER/table.json` has all values; the exit status is 1 if a check
failed. Needs vLLM 0.26 or later and this package, installed, so that vLLM finds the plugin.

The text is Python's own language reference as `pydoc_data.topics` holds it: the same for everyone who has that version of Python.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import csv
import functools
import gc
import hashlib
import io
import json
import logging
import math
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback

TOKENS, CHUNK = 12288, 1536
# Long sequences: lengths, and depths of what is to be found in them.
LONG, LENGTHS, DEPTHS = 32768, (4096, 8192, 16384, 32768), (0.1, 0.4, 0.7, 0.95)
CITIES = "Lisbon Oslo Vienna Prague Dublin Madrid Athens Warsaw Berlin Paris Rome Bern Sofia Riga Tallinn Vilnius Zagreb Helsinki Budapest London".split()
# Chunks whose logits are kept for the KL divergence.
KEPT = 4
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Attention is", "Water boils at", "import numpy as np\n", "The largest planet is"]
ONES = {operand: 1.0 for operand in "qkv"}
# Seconds that a process has for its imports, and for each of its cases.
START, LIMIT = 150, 75
SHAPES = {
    "llama-3-8b": dict(kind="LlamaConfig", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, vocab_size=128256, rope_theta=500000.0),
    "qwen2.5-7b": dict(kind="Qwen2Config", hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18944, vocab_size=152064, rope_theta=1000000.0),
    "qwen3-8b": dict(kind="Qwen3Config", hidden_size=4096, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=12288, vocab_size=151936),
    "mistral-7b": dict(kind="MistralConfig", hidden_size=4096, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=14336, vocab_size=32768, sliding_window=None),
}


# What runs inside an engine. vLLM sends these functions to its workers, so they take what they need as arguments.
def held(model):
    """The scales of each attention layer: device tensors, which must agree with the host's floats."""
    rows = {}
    for module in model.modules():
        if hasattr(module, "_k_scale") and hasattr(module, "impl"):
            number = next(int(part) for part in module.layer_name.split(".") if part.isdigit())
            rows[number] = {x: getattr(module, f"_{x}_scale").float().max().item() for x in "qkv"}
            rows[number]["host"] = {x: float(getattr(module, f"_{x}_scale_float")) for x in "qkv"}
    return rows


def fill(model, rows):
    for module in model.modules():
        if hasattr(module, "_k_scale") and hasattr(module, "impl"):
            number = next(int(part) for part in module.layer_name.split(".") if part.isdigit())
            for operand, value in rows[number].items():
                getattr(module, f"_{operand}_scale").fill_(value)
                setattr(module, f"_{operand}_scale_float", value)


def grow(model, factor):
    """Multiplies the projections' weights in place, behind the engine's back, and refreshes."""
    import sigmascale.vllm

    for name, module in model.named_modules():
        if name.endswith("qkv_proj"):
            module.weight.data.mul_(factor)
            if getattr(module, "bias", None) is not None:
                module.bias.data.mul_(factor)
    sigmascale.vllm.refresh(model)


def shrink(model):
    """Scales of keys that are far too small: attention that reads them answers otherwise."""
    for module in model.modules():
        if hasattr(module, "_k_scale") and hasattr(module, "impl"):
            module._k_scale.mul_(2.0**-9)


def displace(model):
    """Centers of keys that are far off: exact in real numbers, but nothing of a key is left in FP8."""
    for module in model.modules():
        if getattr(module, "_sigmascale_center", None) is not None:
            module._sigmascale_center.add_(2.0**20)


def refreshed(model):
    import sigmascale.vllm

    sigmascale.vllm.refresh(model)


def projections(model, config):
    """Weights of the fused projections by the names of a checkpoint, cut here by the config's own numbers."""
    tensors, heads, kv = {}, config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    for name, module in model.named_modules():
        if name.endswith("qkv_proj"):
            stem = name.removesuffix("qkv_proj")
            for kind in ("weight", "bias"):
                if getattr(module, kind, None) is not None:
                    parts = getattr(module, kind).data.split([heads * dim, kv * dim, kv * dim])
                    tensors |= {f"{stem}{x}_proj.{kind}": part.cpu() for x, part in zip("qkv", parts)}
        elif name.endswith(("input_layernorm", "q_norm", "k_norm")):
            tensors[f"{name}.weight"] = module.weight.data.cpu()
    return tensors


class Engine:
    """One engine, and what a case notes about it."""

    def __init__(self, job, folder, **arguments):
        from vllm import LLM

        # vLLM's import takes handlers away.
        job.listen()
        self.job, start = job, time.monotonic()
        own = {
            "kv_cache_dtype": "fp8", "enforce_eager": True, "enable_prefix_caching": False, "max_num_batched_tokens": 4096, "max_model_len": 2048,
            # No measurement of memory, which other engines on this GPU would disturb.
            "kv_cache_memory_bytes": 2**30,
        }
        self.llm = LLM(
            str(folder), dtype="bfloat16", seed=0, max_num_seqs=16, gpu_memory_utilization=0.1, disable_log_stats=True, **(own | arguments)
        )
        job.values["load_s"] = time.monotonic() - start

    def scales(self):
        rows = {}
        for part in self.llm.apply_model(held):
            for number, row in part.items():
                # The ranks of one layer have scales of their own.
                rows.setdefault(int(number), []).append(row)
        apart = [number for number, part in rows.items() for row in part if any(row[x] != row["host"][x] for x in "qkv")]
        if apart:
            self.job.check("device tensors and host floats agree", False, f"layers {apart}")
        return [{x: max(row[x] for row in rows[number]) for x in "qkv"} for number in sorted(rows)]

    def perplexity(self, against=None, keep=None):
        """Perplexity of the text; with a file of logits, the mean KL divergence from them."""
        import torch
        from vllm import SamplingParams

        seen = []
        if against or keep:
            self.llm.apply_model(functools.partial(_watch_logits, seen=seen))
        logprobs, kl = [], []
        kept = torch.load(against, mmap=True) if against else None
        for place, chunk in enumerate(self.job.chunks):
            seen.clear()
            (answer,) = self.llm.generate([{"prompt_token_ids": chunk}], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1), use_tqdm=False)
            logprobs += [row[token].logprob for token, row in zip(chunk, answer.prompt_logprobs) if row]
            if place < KEPT and (against or keep):
                logits = torch.cat([x for x in seen if len(x) > 1])[: len(chunk) - 1]
                if keep:
                    self.job.logits.append(logits.cpu())
                else:
                    for at in range(0, len(logits), 512):
                        one = torch.log_softmax(kept[place][at : at + 512].to(logits.device).float(), -1)
                        two = torch.log_softmax(logits[at : at + 512].float(), -1)
                        kl += (one.exp() * (one - two)).sum(-1).tolist()
        if keep:
            torch.save(self.job.logits, keep)
        self.llm.apply_model(_forget_logits)
        found = {"perplexity": math.exp(-sum(logprobs) / len(logprobs)), "tokens": len(logprobs), "logprobs": logprobs}
        return found | ({"kl": sum(kl) / len(kl), "kl_tokens": len(kl)} if kl else {})

    def time_refresh(self):
        """Seconds that scales of unchanged weights take: the second time, when engines of scales are there."""
        for _ in range(2):
            start = time.monotonic()
            self.llm.apply_model(refreshed)
            self.job.values["refresh_s"] = time.monotonic() - start
        self.job.check("seconds of a refresh", True, f"{self.job.values['refresh_s']:.3f}")

    def prefill(self, chunks):
        from vllm import SamplingParams

        self.llm.generate([{"prompt_token_ids": chunk} for chunk in chunks], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)

    def greedy(self, prompts=PROMPTS, tokens=64):
        from vllm import SamplingParams

        answers = self.llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0), use_tqdm=False)
        self.job.values.setdefault("texts", [answer.outputs[0].text for answer in answers])
        return [list(answer.outputs[0].token_ids) for answer in answers]


def _watch_logits(model, seen):
    compute = type(model).compute_logits

    def watched(hidden, *args, **kwargs):
        logits = compute(model, hidden, *args, **kwargs)
        if len(logits) > 1:
            seen.append(logits.clone())
        return logits

    model.__dict__["compute_logits"] = watched


def _forget_logits(model):
    model.__dict__.pop("compute_logits", None)


def _watch_amax(model):
    """Notes the largest magnitudes of q, k and v that attention is given."""
    import torch

    for module in model.modules():
        if hasattr(module, "_k_scale") and hasattr(module, "impl"):
            first = not hasattr(module, "_lane_amax")
            module._lane_amax = torch.zeros(3, dtype=torch.float32, device=module._k_scale.device)
            if not first:
                continue

            def noted(query, key, value, *args, _own=module, _forward=module.forward, **kwargs):
                _own._lane_amax = torch.maximum(_own._lane_amax, torch.stack([x.abs().max().float() for x in (query, key, value)]))
                return _forward(query, key, value, *args, **kwargs)

            module.forward = noted


def _amax(model):
    rows = {}
    for module in model.modules():
        if hasattr(module, "_lane_amax"):
            rows[next(int(part) for part in module.layer_name.split(".") if part.isdigit())] = module._lane_amax.tolist()
    return [rows[number] for number in sorted(rows)]


class Job:
    """What a process gives back: checks and values."""

    def __init__(self, model, work):
        self.model, self.work = model, work
        self.checks, self.values, self.logits, self.log = [], {}, [], []
        self._start = time.monotonic()

    def check(self, name, passed, note=""):
        now = time.monotonic()
        self.checks.append({"check": name, "state": "passed" if passed else "failed", "note": str(note), "seconds": round(now - self._start, 2)})
        self._start = now
        print("  ", self.checks[-1], flush=True)

    def not_run(self, name, reason):
        self.checks.append({"check": name, "state": "not run", "note": reason, "seconds": 0.0})

    def equal(self, name, found, wanted):
        """Scales, layer by layer, bit for bit."""
        differ = [i for i, (one, two) in enumerate(zip(found, wanted)) if one != two]
        ones = sum(row == ONES for row in found)
        note = f"{len(found)} layers" + (f", {len(differ)} differ, first {differ[0]}: {found[differ[0]]} for {wanted[differ[0]]}" if differ else "")
        self.check(name, len(found) == len(wanted) and not differ, note + (f", {ones} at 1.0" if ones else ""))

    @functools.cached_property
    def reference(self):
        return json.loads((self.work / f"{self.model.name}.json").read_text())

    @functools.cached_property
    def chunks(self):
        return text(self.model)

    @functools.cached_property
    def others(self):
        """As many tokens of the text behind those, to calibrate on."""
        return text(self.model, TOKENS)

    def wait(self, name):
        """For what another process writes."""
        end = time.monotonic() + START
        while not (self.work / name).exists():
            if time.monotonic() > end:
                raise TimeoutError(f"{name} was not written within {START} s")
            time.sleep(0.1)

    def listen(self):
        """Collects what the plugin says."""
        handler = logging.Handler()
        handler.emit = lambda record: self.log.append((record.levelno, record.getMessage()))
        logging.getLogger("vllm.plugins.sigmascale").addHandler(handler)

    def said(self, level, *words):
        return any(at == level and all(word in line for word in words) for at, line in self.log)


def tokenized(model, characters):
    import pydoc_data.topics

    import transformers

    whole = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return transformers.AutoTokenizer.from_pretrained(model)(whole[:characters])["input_ids"]


def text(model, first=0):
    ids = tokenized(model, 12 * (first + TOKENS))[first : first + TOKENS]
    return [ids[at : at + CHUNK] for at in range(0, TOKENS, CHUNK)]


def rows_of(found):
    """Scales of `calibrate`, rounded up, as vLLM's layers hold them."""
    from sigmascale._loaded import up_to_bf16

    return [{x: up_to_bf16(max(layer[f"{x}_descale"])) for x in "qkv"} for layer in found["layers"]]


def served(folder, rows):
    """The same where the plugin centers keys, as it does by itself; and the hash of the centers."""
    import sigmascale
    from sigmascale._loaded import up_to_bf16

    found = sigmascale.centers(folder)
    if found is None:
        return rows, None
    keys = {layer["layer"]: up_to_bf16(max(layer["k_scale"])) for layer in found["layers"]}
    return [row | {"k": keys.get(number, row["k"])} for number, row in enumerate(rows)], found["hash"]


# The cases.
def prepare(job):
    """References, exports and other checkpoints, without a GPU."""
    import torch
    from safetensors.torch import load_file, save_file

    import sigmascale

    plain = rows_of(sigmascale.calibrate(job.model))
    reference = {"plain": plain}
    reference["scales"], reference["centers"] = served(job.model, plain)
    exported = job.work / f"{job.model.name}-export"
    shutil.rmtree(exported, ignore_errors=True)
    sigmascale.export(job.model, exported, "vllm")
    weights = load_file(job.model / "model.safetensors")
    other = job.work / f"{job.model.name}-other"
    shutil.copytree(job.model, other, dirs_exist_ok=True)
    save_file({name: tensor * 2 if name.endswith(("k_proj.weight", "v_proj.weight")) else tensor for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    reference["other"] = rows_of(sigmascale.calibrate(other))
    quantized = job.work / f"{job.model.name}-fp8"
    shutil.copytree(job.model, quantized, dirs_exist_ok=True)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = (weights[name].float().abs().amax(1, keepdim=True) / 448).clamp(min=1e-12)
        weights[name + "_scale"] = scale
        weights[name] = (weights[name].float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    save_file(weights, quantized / "model.safetensors", {"format": "pt"})
    arguments = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": arguments | {"strategy": "channel", "dynamic": False},
        "input_activations": arguments | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    (quantized / "config.json").write_text(json.dumps(config))
    reference["fp8"], _ = served(quantized, rows_of(sigmascale.calibrate(quantized)))
    biases = {}
    for name, tensor in load_file(job.model / "model.safetensors").items():
        if name.endswith("k_proj.bias"):
            biases[name.split(".")[2]] = tensor.abs().max().item()
    job.values["key_bias"] = biases
    # Cases wait for it.
    partial = job.work / f"{job.model.name}.part"
    partial.write_text(json.dumps(reference))
    partial.rename(job.work / f"{job.model.name}.json")
    job.check("prepared", True, f"{len(reference['scales'])} layers")


def bf16(job):
    engine = Engine(job, job.model, kv_cache_dtype="auto")
    job.check("a BF16 cache is left alone", engine.scales() == [ONES] * len(job.reference["scales"]) and not job.log, f"{len(job.log)} lines")
    engine.llm.apply_model(_watch_amax)
    job.values |= engine.perplexity(keep=job.work / f"{job.model.name}.logits")
    job.values["amax"] = engine.llm.apply_model(_amax)[0]
    engine.llm.apply_model(_watch_amax)
    engine.prefill(job.others)
    job.values["calibrated"] = engine.llm.apply_model(_amax)[0]
    job.values["greedy"] = engine.greedy()
    job.check("perplexity", math.isfinite(job.values["perplexity"]), f"{job.values['perplexity']:.4f} over {job.values['tokens']} tokens")


def fixed(job):
    """1.0 without the plugin, and maxima over 448: of other text, as a calibration gives them, and of this text."""
    engine, logits = Engine(job, job.model), job.work / f"{job.model.name}.logits"
    job.equal("without the plugin scales are 1.0", engine.scales(), [ONES] * len(job.reference["scales"]))
    job.values |= engine.perplexity(against=logits)
    job.values["greedy"] = engine.greedy()
    job.check("perplexity at 1.0", True, f"{job.values['perplexity']:.4f} KL {job.values['kl']:.5f}")
    seen = json.loads((job.work / f"bf16.{job.model.name}.json").read_text())["values"]
    for way, maxima in [("calibrated", seen["calibrated"]), ("maxima", seen["amax"])]:
        rows = {number: dict(zip("qkv", (value / 448 for value in row))) for number, row in enumerate(maxima)}
        engine.llm.apply_model(functools.partial(fill, rows=rows))
        job.values[way] = own = engine.perplexity(against=logits)
        clipped = sum(x > y for one, other in zip(seen["amax"], maxima) for x, y in zip(one, other))
        job.check(f"perplexity, {way}", True, f"{own['perplexity']:.4f} KL {own['kl']:.5f}; {clipped} of {3 * len(maxima)} operands of this text pass their maximum")


def export(job):
    engine = Engine(job, job.work / f"{job.model.name}-export")
    job.equal("an export's scales, without the plugin", engine.scales(), job.reference["plain"])
    job.values |= engine.perplexity(against=job.work / f"{job.model.name}.logits")
    job.values["greedy"] = engine.greedy()
    job.check("perplexity", True, f"{job.values['perplexity']:.4f} KL {job.values['kl']:.5f}")


def plugin(job):
    """Keys as they are."""
    os.environ["SIGMASCALE_CENTER"] = "off"
    wanted, other = job.reference["plain"], job.reference["other"]
    engine = Engine(job, job.model)
    del os.environ["SIGMASCALE_CENTER"]
    job.equal("the plugin's scales", engine.scales(), wanted)
    job.check("the plugin says so", job.said(logging.INFO, f"of {len(wanted)} layers from the weights"), job.log)
    job.values |= engine.perplexity(against=job.work / f"{job.model.name}.logits")
    job.values["greedy"] = engine.greedy()
    job.check("perplexity", True, f"{job.values['perplexity']:.4f} KL {job.values['kl']:.5f}")
    engine.time_refresh()
    normed = "gemma3" in job.model.name
    engine.llm.apply_model(functools.partial(grow, factor=4.0))
    job.equal("weights times 4 in place, then refresh", engine.scales(), [{x: row[x] * (1.0 if normed and x != "v" else 4.0) for x in "qkv"} for row in wanted])
    engine.llm.apply_model(functools.partial(grow, factor=0.25))
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(job.work / f"{job.model.name}-other")})
    job.equal("reload_weights from another folder", engine.scales(), other)
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(job.model)})
    job.equal("reload_weights from the first", engine.scales(), wanted)
    job.check("greedy text as before", engine.greedy() == job.values["greedy"])


def centered(job):
    wanted, logits = job.reference["scales"], job.work / f"{job.model.name}.logits"
    if job.reference["centers"] is None:
        job.not_run("centered keys", "no layer's keys have a bias that is rotated")
        return
    engine = Engine(job, job.model)
    job.equal("scales of centered keys", engine.scales(), wanted)
    job.check("the plugin names the centers", job.said(logging.INFO, f"centers {job.reference['centers']}"), job.log)
    job.values |= engine.perplexity(against=logits)
    job.values["greedy"] = engine.greedy()
    engine.time_refresh()
    engine.llm.apply_model(functools.partial(fill, rows=[ONES] * len(wanted)))
    job.values["centered-fixed"] = engine.perplexity(against=logits)
    own = job.values["centered-fixed"]
    job.check("perplexity", True, f"{job.values['perplexity']:.4f} KL {job.values['kl']:.5f}; at 1.0 {own['perplexity']:.4f} KL {own['kl']:.5f}")
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(job.work / f"{job.model.name}-other")})
    job.check("scales follow other weights", all(new["v"] > old["v"] for new, old in zip(engine.scales(), wanted)))
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(job.model)})
    job.equal("reload_weights from the first", engine.scales(), wanted)
    job.check("greedy text as before", engine.greedy() == job.values["greedy"])


def long(job, cache, center):
    """Perplexity by position, and codes to be found at several depths of sequences."""
    from vllm import SamplingParams

    if json.loads((job.model / "config.json").read_text())["max_position_embeddings"] < LONG:
        job.not_run("long sequences", f"the model takes fewer than {LONG} tokens")
        return
    os.environ["SIGMASCALE_CENTER"] = center
    engine = Engine(job, job.model, kv_cache_dtype=cache, max_model_len=LONG, enable_prefix_caching=True, kv_cache_memory_bytes=2**32)
    ids, sums = tokenized(job.model, 24 * LONG), collections.defaultdict(list)
    for at in (0, LONG):
        window = ids[at : at + LONG - 1]
        (answer,) = engine.llm.generate([{"prompt_token_ids": window}], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1), use_tqdm=False)
        for place, (token, row) in enumerate(zip(window, answer.prompt_logprobs)):
            if row:
                sums[next(end for end in LENGTHS if place < end)].append(row[token].logprob)
    rows = [["perplexity", end, "", math.exp(-sum(values) / len(values)), len(values)] for end, values in sorted(sums.items())]
    tokenize, draw = engine.llm.get_tokenizer(), random.Random(0)
    encode = lambda words: tokenize(words, add_special_tokens=False)["input_ids"]
    for length in LENGTHS:
        for depth in DEPTHS:
            codes = {city: str(draw.randrange(10**5, 10**6)) for city in CITIES}
            told = encode("\n" + "\n".join(f"The access code of {city} is {code}." for city, code in codes.items()) + "\n")
            hay = ids[: length - len(told) - 128]
            cut = int(depth * len(hay))
            whole = hay[:cut] + told + hay[cut:]
            asked = [whole + encode(f"\n\nQuestion: What is the access code of {city}?\nAnswer: The access code of {city} is") for city in codes]
            answers = engine.llm.generate([{"prompt_token_ids": x} for x in asked], SamplingParams(max_tokens=10, temperature=0), use_tqdm=False)
            found = sum(code in answer.outputs[0].text for code, answer in zip(codes.values(), answers))
            rows.append(["found", length, depth, found / len(codes), len(codes)])
    job.values["long"] = rows
    words = [f"below {end}: {value:.3f}" for kind, end, _, value, _ in rows if kind == "perplexity"]
    shares = [value for kind, *_, value, _ in rows if kind == "found"]
    job.check("long sequences", True, f"perplexity {', '.join(words)}; codes found {100 * sum(shares) / len(shares):.1f} %")


def sleep(job):
    engine = Engine(job, job.model, enable_sleep_mode=True)
    wanted = job.reference["scales"]
    job.equal("with sleep mode", engine.scales(), wanted)
    first = engine.greedy()
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    job.equal("sleep 1, wake", engine.scales(), wanted)
    job.check("greedy text as before, sleep 1", engine.greedy() == first)
    engine.llm.sleep(level=2)
    engine.llm.wake_up(tags=["weights"])
    engine.llm.collective_rpc("reload_weights")
    engine.llm.wake_up(tags=["kv_cache"])
    job.equal("sleep 2, wake and reload", engine.scales(), wanted)
    job.check("greedy text as before, sleep 2", engine.greedy() == first)


def graphs(job, mode="FULL_AND_PIECEWISE", compiled=3):
    engine = Engine(job, job.model, enforce_eager=False, compilation_config={"mode": compiled, "cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]})
    job.equal(f"scales, graphs {mode}", engine.scales(), job.reference["scales"])
    job.values["greedy"] = engine.greedy()
    job.check("greedy text", all(job.values["greedy"]))
    # Prompts of one token: every step is that of a captured graph.
    single = [{"prompt_token_ids": [token]} for token in job.chunks[0][100:108]]
    first = engine.greedy(single, 32)
    engine.llm.apply_model(shrink)
    small = engine.greedy(single, 32)
    job.check("graphs read the scales in their place", small != first, f"{sum(a != b for a, b in zip(small, first))} of 8 texts change with key scales times 2^-9")
    engine.llm.apply_model(refreshed)
    job.check("texts after refresh", engine.greedy(single, 32) == first)
    if job.reference["centers"] is not None:
        engine.llm.apply_model(displace)
        job.check("graphs read the centers in their place", engine.greedy(single, 32) != first)
        engine.llm.apply_model(refreshed)
        job.check("texts after another refresh", engine.greedy(single, 32) == first)
    job.values |= engine.perplexity()
    job.check("perplexity", True, f"{job.values['perplexity']:.4f}")


def graphs_off(job):
    """Eager and captured without the plugin: how many greedy texts part where the scales are 1.0 in both."""
    engine = Engine(job, job.model)
    eager = engine.greedy()
    del engine.llm
    gc.collect()
    captured = Engine(
        job, job.model, enforce_eager=False, compilation_config={"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    )
    job.values["greedy"], job.values["greedy_eager"] = captured.greedy(), eager
    job.values |= captured.perplexity()
    same = sum(a == b for a, b in zip(job.values["greedy"], eager))
    job.check("without the plugin: greedy texts of graphs and of eager", True, f"{same} of {len(eager)} equal, perplexity {job.values['perplexity']:.4f}")


def graphs_piecewise(job):
    graphs(job, "PIECEWISE")


def graphs_full(job):
    graphs(job, "FULL_DECODE_ONLY", 0)


def prefix(job):
    """Prefix caching and chunked prefill together: a second request reads the cached keys of the first."""
    from vllm import SamplingParams

    engine = Engine(job, job.model, enable_prefix_caching=True, max_num_batched_tokens=256, enable_chunked_prefill=True)
    job.equal("scales", engine.scales(), job.reference["scales"])
    prompt = {"prompt_token_ids": job.chunks[0][:1200]}
    ask = lambda: engine.llm.generate([prompt], SamplingParams(max_tokens=48, temperature=0), use_tqdm=False)[0]
    one, two = ask(), ask()
    job.check("the second request is served from the cache", two.num_cached_tokens >= 1000, f"{two.num_cached_tokens} of 1200 tokens")
    same = sum(a == b for a, b in zip(one.outputs[0].token_ids, two.outputs[0].token_ids))
    job.check("greedy text from the cache", same == 48, f"{same} of 48 tokens")
    job.values |= engine.perplexity()
    job.check("perplexity in chunks of 256", True, f"{job.values['perplexity']:.4f}")


def fp8_weights(job):
    engine = Engine(job, job.work / f"{job.model.name}-fp8")
    job.equal("E4M3 weights of a checkpoint", engine.scales(), job.reference["fp8"])
    job.values |= engine.perplexity()
    job.check("perplexity", True, f"{job.values['perplexity']:.4f}")


def fp8_online(job):
    """Weights that vLLM quantizes itself: how it rounds is not known to the plugin, which says so."""
    engine = Engine(job, job.model, quantization="fp8")
    scales = engine.scales()
    left = scales == [ONES] * len(scales)
    job.check("quantization='fp8': scales, or refused aloud", (left and job.said(logging.ERROR, "1.0")) or scales == job.reference["scales"], job.log)


def ngram(job):
    engine = Engine(job, job.model, speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4})
    job.equal("scales", engine.scales(), job.reference["scales"])
    job.values["greedy"] = engine.greedy()
    job.check("greedy text", all(job.values["greedy"]))


def lora(job):
    engine = Engine(job, job.model, enable_lora=True)
    job.equal("with LoRA scales stay 1.0", engine.scales(), [ONES] * len(job.reference["scales"]))
    job.check("and an error says why", job.said(logging.ERROR, "LoRA", "1.0"), job.log)


def strict(job):
    try:
        Engine(job, job.model, enable_lora=True)
    except Exception as error:
        job.check("strict stops the engine", "strict" in str(error), f"{type(error).__name__}: {error}"[:200])
    else:
        job.check("strict stops the engine", False, "it serves")


def separate(job):
    """The engine in a process of its own, under a parent that used this package and PyTorch before. Only a parent whose engine is
    spawned has run a backward pass: that opens CUDA's driver, even on the CPU, and a forked engine cannot open it again. A parent
    whose engine is forked keeps to one thread: PyTorch's thread pool does not survive a fork, and a forked process waits for it
    forever in its first large operation on the CPU.
    """
    import torch

    import sigmascale

    if os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork":
        torch.set_num_threads(1)
    sigmascale.calibrate(job.model)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
    loss = model(torch.randn(64, 512)).sum()
    if os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn":
        loss.backward()
    torch.save(model.state_dict(), io.BytesIO())
    engine = Engine(job, job.model)
    job.equal(f"an engine that was {os.environ['VLLM_WORKER_MULTIPROC_METHOD']}ed", engine.scales(), job.reference["scales"])
    job.values["greedy"] = engine.greedy()


def dummy(job):
    """A large shape with random weights: scales against those that the host computes from the engine's own weights."""
    import transformers

    import sigmascale
    from sigmascale._loaded import up_to_bf16

    shape = dict(SHAPES[job.model.name])
    config = getattr(transformers, shape.pop("kind"))(**shape, max_position_embeddings=8192, tie_word_embeddings=True)
    config.architectures, config.dtype = [type(config).__name__.replace("Config", "ForCausalLM")], "bfloat16"
    folder = job.work / job.model.name
    config.save_pretrained(folder)
    engine = Engine(job, folder, load_format="dummy", skip_tokenizer_init=True)
    found = engine.scales()
    (weights,) = engine.llm.apply_model(functools.partial(projections, config=json.loads((folder / "config.json").read_text())))
    layers = sigmascale.ScaleStream(config)
    for name, tensor in weights.items():
        layers.push(name, tensor)
    rows = [{x: up_to_bf16(max(layer[x])) for x in "qkv"} for _, layer in sorted(layers.finish().items())]
    job.equal("scales of random weights", found, rows)


def plant(job, kind):
    """Faults, planted into the plugin: each must be seen in the scales."""
    import torch

    import sigmascale.vllm
    from sigmascale import _loaded
    from sigmascale.torch import _stream

    if kind == "dtype":
        begin = _stream.DeviceStream.__init__

        def broken(self, *args):
            begin(self, *args)
            self._results = self._results.to(torch.bfloat16)
            self._targets = [self._results[row].split([row.stop - row.start - 1, 1]) for row in self._rows]

        _stream.DeviceStream.__init__ = broken
    elif kind == "layer":
        own = sigmascale.vllm._fill
        sigmascale.vllm._fill = lambda layers: own({module: layer for module, layer in layers.items() if ".3." not in module.layer_name})
    engine = Engine(job, job.model)
    if kind == "reload":
        _loaded.Followed.refresh = lambda self, touched=None: None
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(job.work / f"{job.model.name}-other")})
    wanted = job.reference["other" if kind == "reload" else "scales"]
    differ = sum(one != two for one, two in zip(engine.scales(), wanted))
    job.check(f"a planted fault is seen: {kind}", differ, f"{differ} of {len(wanted)} layers differ")


def parallel(job, kind):
    engine = Engine(job, job.model, **{f"{kind}_parallel_size": 2}, distributed_executor_backend="mp")
    job.equal(f"{kind} parallelism 2: the largest scale of the ranks", engine.scales(), job.reference["scales"])
    job.values |= engine.perplexity()
    job.values["greedy"] = engine.greedy()
    job.check("perplexity", True, f"{job.values['perplexity']:.4f}")


OFF, OWN = {"SIGMASCALE_PLUGIN": "0"}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
# Processes: an environment and its cases, in turn. An engine that is to sleep comes last: its memory is a pool of the process.
REAL = [
    ({}, ["bf16", "plugin", "centered", "prefix", "ngram", "sleep"]),
    (OFF, ["export", "fixed"]),
    ({}, ["fp8-weights", "fp8-online", "lora", "plant-reload"]),
    ({}, ["long-bf16", "long-plugin", "long-centered"]),
    (OFF, ["graphs-off"]),
    ({}, ["graphs"]),
    ({}, ["graphs-piecewise", "graphs-full"]),
    ({"SIGMASCALE_PLUGIN": "strict"}, ["strict"]),
    (OWN | {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, ["process-fork"]),
    (OWN | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, ["process-spawn"]),
    # These stay in their process.
    ({}, ["plant-layer"]),
    ({}, ["plant-dtype"]),
]
TWO = [(OWN, ["tensor-parallel"]), (OWN, ["pipeline-parallel"])]
# What a case reads of another, beside what `prepare` makes.
AFTER = {"plugin": "bf16", "centered": "bf16", "export": "bf16", "fixed": "bf16"}
FUNCTIONS = {
    "prepare": prepare, "bf16": bf16, "plugin": plugin, "centered": centered, "export": export, "fixed": fixed, "graphs": graphs, "graphs-off": graphs_off, "graphs-piecewise": graphs_piecewise,
    "graphs-full": graphs_full, "prefix": prefix, "fp8-weights": fp8_weights, "fp8-online": fp8_online, "sleep": sleep, "ngram": ngram, "lora": lora,
    "long-bf16": functools.partial(long, cache="auto", center="off"), "long-plugin": functools.partial(long, cache="fp8", center="off"),
    "long-centered": functools.partial(long, cache="fp8", center="auto"), "strict": strict, "process-fork": separate, "process-spawn": separate, "dummy": dummy,
    "tensor-parallel": functools.partial(parallel, kind="tensor"), "pipeline-parallel": functools.partial(parallel, kind="pipeline"),
} | {f"plant-{kind}": functools.partial(plant, kind=kind) for kind in ("dtype", "layer", "reload")}


def inside(names, model, work):
    """Cases, one after another, in a process of their own."""
    for name in names:
        job = Job(pathlib.Path(model), pathlib.Path(work))
        out = job.work / f"{name}.{job.model.name}.json"
        try:
            if name != "prepare" and name != "dummy":
                job.wait(f"{job.model.name}.json")
            if name in AFTER:
                job.wait(f"{AFTER[name]}.{job.model.name}.json")
            start = time.monotonic()
            FUNCTIONS[name](job)
        except BaseException as error:
            traceback.print_exc()
            job.check("ends", False, f"{type(error).__name__}: {error}"[:300])
        found = {"checks": job.checks, "values": job.values, "log": job.log, "seconds": round(time.monotonic() - start, 1)}
        partial = out.with_suffix(".part")
        partial.write_text(json.dumps(found))
        partial.rename(out)
        gc.collect()
    sys.stdout.flush()
    # Engines that end in order take seconds.
    os._exit(0)


def run(names, environment, model, work, end):
    """Starts a process of cases, which is ended at a time of the clock; gives what each noted."""
    start, place = time.monotonic(), f"{names[0]}.{model.name}.log"
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "SIGMASCALE_PLUGIN": "1",
        "VLLM_CACHE_ROOT": str(work / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH")])),
    }
    with open(work / place, "w") as log:
        # By the module's name, since vLLM sends its functions to processes of other workers.
        begin = "import sys, lane_gpu_vllm as lane; lane.inside(sys.argv[1].split(','), *sys.argv[2:])"
        command = [sys.executable, "-c", begin, ",".join(names), str(model), str(work)]
        process = subprocess.Popen(command, env=os.environ | own | environment, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(max(0.0, min(START + LIMIT * len(names), end - start)))
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    found = {}
    for name in names:
        out = work / f"{name}.{model.name}.json"
        if out.exists():
            found[name] = json.loads(out.read_text())
        else:
            lines = (work / place).read_text().splitlines()[-1:] or [""]
            note = f"no result after {time.monotonic() - start:.0f} s: {lines[0]}"[:300]
            found[name] = {"checks": [{"check": "ends", "state": "failed", "note": note, "seconds": 0.0}], "values": {}, "log": [], "seconds": 0.0}
    return found


def across(results):
    """What engines of one model must have in common."""
    rows = []

    def say(model, name, passed, note):
        rows.append((f"across {model}", {"check": name, "state": "passed" if passed else "failed", "note": note, "seconds": 0.0}))

    models = dict.fromkeys(model for _, model in results)
    for model in models:
        of = lambda case: results.get((case, model), {}).get("values", {})
        one, two, base = of("export"), of("plugin"), of("bf16")
        if "logprobs" in one and "logprobs" in two:
            say(model, "plugin and export: every token's log-probability, bit for bit", one["logprobs"] == two["logprobs"], f"{len(one['logprobs'])} tokens")
            say(model, "plugin and export: greedy text", one["greedy"] == two["greedy"], f"{sum(map(len, one['greedy']))} tokens")
        for case in ("graphs", "graphs-piecewise", "graphs-full", "prefix", "tensor-parallel", "pipeline-parallel"):
            eager = of("centered") if "perplexity" in of("centered") else two
            if "perplexity" in of(case) and "perplexity" in eager:
                ratio = of(case)["perplexity"] / eager["perplexity"]
                say(model, f"{case}: perplexity within 1 % of eager", abs(ratio - 1) < 0.01, f"{of(case)['perplexity']:.4f} for {eager['perplexity']:.4f}")
        for case in ("ngram", "process-fork", "process-spawn"):
            eager = of("centered") if "greedy" in of("centered") else two
            if "greedy" in of(case) and "greedy" in eager:
                same = sum(a == b for a, b in zip(of(case)["greedy"], eager["greedy"]))
                # Other shapes round otherwise, so that greedy text may part where two tokens are as likely.
                least = 6 if case.startswith("process") else 3
                say(model, f"{case}: greedy texts equal to eager's", same >= least, f"{same} of {len(eager['greedy'])}")
        off = of("graphs-off")
        if "greedy" in off and "greedy" in of("graphs"):
            eager = of("centered") if "greedy" in of("centered") else two
            if "greedy" in eager:
                parted = lambda one, two: sum(a != b for a, b in zip(one, two))
                bare, own = parted(off["greedy"], off["greedy_eager"]), parted(of("graphs")["greedy"], eager["greedy"])
                # Compiled code rounds otherwise, whatever the scales are.
                say(model, "graphs: greedy texts that part from eager's, beside those without the plugin", own <= bare + 2, f"{own}, and {bare} without, of {len(eager['greedy'])}")
        if "perplexity" in base:
            for case in ("fixed", "export", "plugin", "centered"):
                if "perplexity" in of(case):
                    ratio = of(case)["perplexity"] / base["perplexity"]
                    say(model, f"{case}: perplexity within 5 % of BF16", ratio < 1.05, f"{100 * (ratio - 1):+.2f} %")
    return rows


def write_tables(results, shared, work):
    """checks.csv, cache.csv (what each way to cache costs) and layers.csv (magnitudes and scales)."""

    def write(name, columns, rows):
        with open(work / name, "w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(columns)
            table.writerows(rows)

    checks = [(model, case, row) for (case, model), found in results.items() for row in found["checks"]]
    checks += [(place.removeprefix("across "), "across", row) for place, row in shared]
    write("checks.csv", ["model", "case", "check", "state", "seconds", "note"], [[m, c, r["check"], r["state"], r["seconds"], r["note"]] for m, c, r in checks])
    cache, layers = [], []
    for (case, model), found in results.items():
        values = found["values"]
        ways = [(case, values), *((way, values[way]) for way in ("calibrated", "maxima", "centered-fixed") if way in values)]
        base = results.get(("bf16", model), {}).get("values", {})
        for way, one in ways:
            if "perplexity" not in one:
                continue
            change = error = spread = ""
            if "perplexity" in base:
                change = round(100 * (one["perplexity"] / base["perplexity"] - 1), 3)
                # Of the mean over the tokens' own differences.
                apart, tokens = [a - b for a, b in zip(base["logprobs"], one["logprobs"])], one["tokens"]
                error = round(100 * statistics.stdev(apart) / math.sqrt(tokens), 3)
                spread = round(math.sqrt(sum(x * x for x in apart) / tokens), 4)
            cache.append([model, way, one["tokens"], round(one["perplexity"], 4), change, error, spread, round(one["kl"], 5) if "kl" in one else "", one.get("kl_tokens", "")])
        if case == "bf16":
            reference = json.loads((work / f"{model}.json").read_text())
            biases = results["prepare", model]["values"]["key_bias"]
            for number, (amax, scale, own) in enumerate(zip(values.get("amax", []), reference["plain"], reference["scales"])):
                layers.append([model, number, *amax, *(scale[x] for x in "qkv"), own["k"], biases.get(str(number), 0.0)])
    sequences = [[model, case, *row] for (case, model), found in results.items() for row in found["values"].get("long", [])]
    write("long.csv", ["model", "case", "kind", "tokens", "depth", "value", "count"], sequences)
    write("cache.csv", ["model", "case", "tokens", "perplexity", "change_percent", "standard_error_percent", "rms_logprob", "kl", "kl_tokens"], cache)
    write("layers.csv", ["model", "layer", "max_q", "max_k", "max_v", "scale_q", "scale_k", "scale_v", "scale_k_centered", "max_key_bias"], layers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=pathlib.Path), parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="cases or models: a case runs if its name, or its model's, has one of these words")
    parser.add_argument("--jobs", type=int, default=6), parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which what still runs is ended, and the tables are written")
    parser.add_argument("--model", nargs="*", default=[])
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    models = [path for path in sorted(args.models.iterdir()) if (path / "config.json").exists() and (not args.model or path.name in args.model)]
    plan = []
    for model in models:
        picked = [(environment, [name for name in names if not args.only or any(word in f"{name} {model.name}" for word in args.only)]) for environment, names in (TWO if args.gpus == 2 else REAL)]
        wanted = {name for _, names in picked for name in names}
        needed = [name for name in dict.fromkeys(AFTER[name] for name in wanted if name in AFTER) if name not in wanted]
        plan += [({}, ["prepare"], model), *((environment, names, model) for environment, names in [({}, needed), *picked] if names)]
    if args.gpus == 1:
        for shape in SHAPES:
            if not args.only or any(word in f"dummy {shape}" for word in args.only):
                plan.append(({}, ["dummy"], pathlib.Path(shape)))
    for _, names, model in plan:
        for name in names:
            (args.work / f"{name}.{model.name}.json").unlink(missing_ok=True)
    for model in models:
        (args.work / f"{model.name}.json").unlink(missing_ok=True)
    results, start = {}, time.monotonic()
    print(f"text: pydoc_data.topics of Python {sys.version.split()[0]}, {TOKENS} tokens in chunks of {CHUNK}; {len(plan)} processes", flush=True)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        # Those that others wait for were put in first.
        running = {pool.submit(run, names, environment, model, args.work, start + args.limit): model for environment, names, model in plan}
        for future in concurrent.futures.as_completed(running):
            model = running[future]
            for case, found in future.result().items():
                results[case, model.name] = found
                for row in found["checks"]:
                    print(f"{row['state']:8} {case:18} {model.name:14} {row['seconds']:6.1f} s  {row['check']}: {row['note']}"[:260], flush=True)
                print(f"         {case:18} {model.name:14} {found['seconds']:6.1f} s in all, loaded in {found['values'].get('load_s', 0):.1f} s", flush=True)
    shared = across(results)
    for place, row in shared:
        print(f"{row['state']:8} {place:33}           {row['check']}: {row['note']}", flush=True)
    checks = [row for found in results.values() for row in found["checks"]] + [row for _, row in shared]
    for name in FUNCTIONS:
        if not any(name in names for _, names, _ in plan):
            print(f"not run  {name:18} {'needs --gpus 2' if name.endswith('parallel') and args.gpus == 1 else 'not selected by these options'}")
    states = collections.Counter(row["state"] for row in checks)
    about = {"python": sys.version.split()[0], "tokens": TOKENS, "chunk": CHUNK, "models": {path.name: hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest() for path in models}}
    table = {"about": about, "cases": [{"case": case, "model": model} | found for (case, model), found in results.items()], "across": shared}
    (args.work / "table.json").write_text(json.dumps(table))
    write_tables(results, shared, args.work)
    print(f"{dict(states)} in {time.monotonic() - start:.0f} s")
    sys.exit(states["failed"] > 0)


if __name__ == "__main__":
    main()
