"""One step of reinforcement learning's weight sync on a GPU: a trainer's weights into a running vLLM, and the scales that follow.

    python python/tests/lanes/lane_gpu_sync.py MODELS --work FOLDER [--model NAME ...]

The trainer (transformers, AdamW on Python's language reference) and two engines share one GPU; each engine has a process of its own.
Weights go by CUDA IPC through vLLM's layerwise reload, as its own IPC weight transfer does it. One engine has the plugin. The other
has none: it is synced bare, and with `sigmascale.rl`. Then keys grow by 8 between two requests with a shared prefix.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

from lane_gpu_vllm import ONES, held, rows_of, text

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_WORKER_MULTIPROC_METHOD="spawn", VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0", TOKENIZERS_PARALLELISM="false",
    # Centers are those of the first weights, which `calibrate` does not know of the trained ones.
    SIGMASCALE_CENTER="off",
)
ROUNDS = 9


def receive(worker, handles, folder, how):
    """In the engine's process: weights from the trainer's memory, and seconds."""
    import time

    import torch
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.model_runner.get_model()
    torch.cuda.synchronize()
    start = time.perf_counter()
    weights = ((name, rebuild(*arguments)) for name, (rebuild, arguments) in handles)
    if how == "rl":
        import sigmascale
        from sigmascale import rl

        # Kept for all syncs, as a trainer's would be: its engines and copies are made by the first.
        stream = worker.__dict__.setdefault("_lane_stream", None) or sigmascale.ScaleStream(folder)
        worker._lane_stream = stream
        weights = stream.through(weights)
    with torch.no_grad():
        initialize_layerwise_reload(model)
        model.load_weights(weights)
        finalize_layerwise_reload(model, worker.model_runner.model_config)
        if how == "rl":
            rl.fill_vllm(model, stream.layers)
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Run:
    def __init__(self, model, work):
        self.model, self.work, self.failed, self.values = model, work, 0, {"model": model.name}
        self._start = time.monotonic()

    def check(self, name, passed, note=""):
        now = time.monotonic()
        self.failed += not passed
        print(f"{'passed' if passed else 'failed':8} {self.model.name:14} {now - self._start:6.1f} s  {name}: {note}"[:240], flush=True)
        self.values.setdefault("checks", []).append({"check": name, "state": "passed" if passed else "failed", "note": str(note), "seconds": round(now - self._start, 2)})
        self._start = now


def serve(model, plugin):
    from vllm import LLM

    os.environ["SIGMASCALE_PLUGIN"] = plugin
    return LLM(
        str(model), dtype="bfloat16", kv_cache_dtype="fp8", enforce_eager=True, seed=0, max_model_len=2048, max_num_seqs=16, disable_log_stats=True,
        gpu_memory_utilization=0.1, kv_cache_memory_bytes=2**30, enable_prefix_caching=True,
    )


def scales(llm):
    (rows,) = llm.apply_model(held)
    return [{x: rows[key][x] for x in "qkv"} for key in sorted(rows, key=int)]


def ask(llm, prompt, tokens=48):
    from vllm import SamplingParams

    return llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=tokens, temperature=0), use_tqdm=False)[0]


def one(model, work):
    import sigmascale
    from sigmascale import rl

    run, chunks = Run(model, work), text(model)
    with_plugin = serve(model, "1")
    without = serve(model, "0")
    wanted = rows_of(sigmascale.calibrate(model))
    run.check("before: the plugin's scales", scales(with_plugin) == wanted, f"{len(wanted)} layers")
    run.check("before: without it, 1.0", scales(without) == [ONES] * len(wanted))

    import torch
    import transformers
    from torch.multiprocessing.reductions import reduce_tensor

    torch.manual_seed(0)
    trainer = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).cuda()
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        batch = torch.tensor(chunks[step], device="cuda").view(3, -1)
        loss = trainer(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    run.check("four steps of AdamW", all(map(torch.isfinite, map(torch.tensor, losses))), [round(x, 3) for x in losses])
    trained = work / f"{model.name}-trained"
    sent = {name: tensor.detach().to(torch.bfloat16) for name, tensor in trainer.named_parameters()}
    del optimizer, loss

    def save(tensors, folder):
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text((model / "config.json").read_text())
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
        return rows_of(sigmascale.calibrate(folder))

    def sync(llm, tensors, how):
        torch.cuda.synchronize()
        handles = [(name, reduce_tensor(tensor)) for name, tensor in tensors.items()]
        start = time.perf_counter()
        (inside,) = llm.collective_rpc(receive, args=(handles, str(model), how))
        return inside, time.perf_counter() - start

    after = save(sent, trained)
    run.check("training changes scales", after != wanted, f"{sum(a != b for a, b in zip(after, wanted))} of {len(wanted)} layers")
    prompt = chunks[0][:600]
    first = list(ask(with_plugin, prompt).outputs[0].token_ids)
    times = {"bare": [], "plugin": [], "rl": []}
    for _ in range(ROUNDS):
        times["bare"].append(sync(without, sent, "bare"))
        times["plugin"].append(sync(with_plugin, sent, "bare"))
        times["rl"].append(sync(without, sent, "rl"))
    run.check("after the sync: the plugin's scales equal those of calibrate", scales(with_plugin) == after, f"{len(after)} layers")
    run.check("after the sync: those of sigmascale.rl", scales(without) == after, f"{len(after)} layers")
    middle = {way: statistics.median(inside for inside, _ in pairs[1:]) for way, pairs in times.items()}
    run.values["sync_s"] = {way: [list(pair) for pair in pairs] for way, pairs in times.items()}
    for way in ("plugin", "rl"):
        share = 100 * (middle[way] / middle["bare"] - 1)
        run.check(f"time of a sync, {way}: at most 2 % more", share <= 2.0, f"{1e3 * middle[way]:.1f} ms for {1e3 * middle['bare']:.1f} ms without scales, {share:+.1f} %")
    for llm in (with_plugin, without):
        llm.reset_prefix_cache()
    answers = [list(ask(llm, prompt).outputs[0].token_ids) for llm in (with_plugin, without)]
    run.check("after the sync both engines answer alike", answers[0] == answers[1], f"{sum(a == b for a, b in zip(*answers))} of 48 tokens")
    run.values["before"], run.values["after"] = first, answers[0]

    # Keys that grow by 8 between two requests.
    grown = {name: tensor * 8 if ".k_proj." in name else tensor for name, tensor in sent.items()}
    stream = sigmascale.ScaleStream(str(model))
    in_use = dict(_pushed(stream, sent))
    new = dict(_pushed(stream, grown))
    must = rl.must_flush(in_use, new)
    run.check("must_flush: larger keys", must or "gemma3" in model.name, must)
    run.check("must_flush: the same weights", not rl.must_flush(in_use, in_use))
    expected = save(grown, work / f"{model.name}-grown")
    sync(with_plugin, grown, "bare"), sync(without, grown, "rl")
    run.check("scales of larger keys, plugin and rl", scales(with_plugin) == scales(without) == expected)
    stale = ask(with_plugin, prompt)
    with_plugin.reset_prefix_cache(), without.reset_prefix_cache()
    fresh, other = ask(with_plugin, prompt), ask(without, prompt)
    run.check("without a reset, the request reads cached keys of the old weights", stale.num_cached_tokens > 0, f"{stale.num_cached_tokens} of 600 tokens")
    run.check("after reset_prefix_cache none", not fresh.num_cached_tokens, f"{fresh.num_cached_tokens}; both engines alike: {list(fresh.outputs[0].token_ids) == list(other.outputs[0].token_ids)}; stale answer differs: {list(fresh.outputs[0].token_ids) != list(stale.outputs[0].token_ids)}")
    (work / f"sync.{model.name}.json").write_text(json.dumps(run.values))
    return run.failed


def _pushed(stream, tensors):
    for name, tensor in tensors.items():
        stream.push(name, tensor)
    return stream.finish()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=pathlib.Path), parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--model", nargs="*", default=[])
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    models = [path for path in sorted(args.models.iterdir()) if (path / "config.json").exists() and (not args.model or path.name in args.model)]
    failed = sum(one(model, args.work) for model in models)
    sys.stdout.flush()
    os._exit(failed > 0)


if __name__ == "__main__":
    main()
