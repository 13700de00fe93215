#!/usr/bin/env python3
"""Whether the scaling policy matters to the loss: scenarios that branch from one calm training, per policy and seed.

    evidence.py --text DIR --to FOLDER --size 125m --policies bf16,geometry,delayed-te,current,auto-c
    evidence.py --text DIR --to FOLDER --size 1b --seeds 0 --policies bf16,geometry --scenarios "" --branch 0
    evidence.py --text DIR --to FOLDER --finetune data/tiny-llama --steps 3000 --policies bf16,geometry,auto-c
    evidence.py --table FOLDER/*.jsonl

A calm run has --steps steps of `train_gpt.py`'s model and schedule. Weights, optimizer and scaling state are kept at
step --steps minus --branch, and from there each scenario takes the same batches to the end again:

    spike    the learning rate times 8 for 15 steps
    resume   the policy begins anew: what it remembered is lost
    nan      the same where casts make NaN of what overflows: such steps are skipped
    swap     a job of 10 steps from the first weights is given these weights, and keeps its scaling state
    blown    the scaling state of a run that blew up: 20 steps at the rate times 64 were taken before

`--finetune` trains a Hugging Face checkpoint on bytes instead, at a constant rate, and reports the slack of auto-c.
`--seconds` starts no run that would not end in time, judged by the longest so far.
"""

import argparse
import copy
import itertools
import json
import pathlib
import statistics
import sys
import time

import torch
import train_gpt

import sigmascale
import sigmascale.torch as fp8

SCENARIOS = ("spike", "resume", "nan", "swap", "blown")
BF16 = "bf16"


class Run:
    """A model under a policy, whose state can be kept and put back."""

    def __init__(self, args, policy, seed):
        torch.manual_seed(seed)
        self.args, self.policy, self.device = args, policy, torch.device(args.device)
        with self.device:
            self.model = train_gpt.Gpt(args.style, args.seq_len, **train_gpt.SIZES[args.size] | args.dimensions)
        if args.biases:
            with torch.no_grad():
                for block in self.model.blocks:
                    for bias in block.attention.parts("bias")[:2]:
                        bias.normal_(std=args.biases)
        self.runtime = self._attached()
        decay = [p for p in self.model.parameters() if p.dim() == 2]
        other = [p for p in self.model.parameters() if p.dim() != 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)

    def _attached(self):
        policy = sigmascale.AutoC(burn_in=min(100, self.args.steps // 4)) if self.policy == "auto-c" else self.policy
        return train_gpt.attach(self.model, policy)

    def forget(self):
        """A new policy, which remembers nothing."""
        self.runtime = self._attached()

    def keep(self):
        """Everything that later steps depend on, on the host."""
        state = [self.model.state_dict(), self.optimizer.state_dict(), self.runtime and self.runtime.state_dict()]
        move = lambda x: x.detach().cpu().clone() if isinstance(x, torch.Tensor) else copy.copy(x)
        return torch.utils._pytree.tree_map(move, state)

    def put_back(self, kept):
        self.put_weights(kept)
        if self.runtime:
            # Last: a refresh in which no call reported would be a step of zeros in the histories.
            self.runtime.load_state_dict(kept[2])

    def put_weights(self, kept):
        self.model.load_state_dict(kept[0])
        self.optimizer.load_state_dict(copy.deepcopy(kept[1]))
        if self.runtime:
            self.runtime.refresh()

    def loss(self, window):
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(window[:, :-1])
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())

    def step(self, window, rate, nan=False):
        """Loss and the number of values that overflowed, as device tensors, and whether the step was skipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(window)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        over = self.runtime.observed()[1][..., 0].sum() if self.runtime else torch.zeros((), device=self.device)
        skipped = nan and bool(over)
        if not skipped:
            self.optimizer.step()
        if self.runtime:
            self.runtime.refresh()
        return loss.detach(), over, skipped

    def held_out(self, tokens):
        windows = train_gpt.batches(tokens, self.args.batch, self.args.seq_len, 1234, self.device)
        with torch.no_grad():
            return sum(self.loss(next(windows)).item() for _ in range(10)) / 10

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def steps(run, windows, first, last, rate_of, nan=False):
    """Rows of some steps, which are read from the device at the end."""
    taken = [run.step(window, rate_of(step), nan) for step, window in zip(range(first, last), windows)]
    return [
        {"step": first + at, "loss": loss.item(), "overflow": int(over), "skipped": skipped}
        for at, (loss, over, skipped) in enumerate(taken)
    ]


def scenarios_of(args, policy, seed, text, held_out, write):
    """The calm run of a policy and a seed, and what branches from it."""
    run, cut = Run(args, policy, seed), args.steps - args.branch
    windows = lambda first: itertools.islice(
        train_gpt.batches(text, args.batch, args.seq_len, seed, run.device), first, None
    )
    rate = lambda step: train_gpt.learning_rate(args, step)
    warm = min(train_gpt.WARM, cut)
    begin = run.keep() if "swap" in args.scenarios else None
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    stream = windows(0)
    rows = steps(run, stream, 0, warm, rate)
    run.synchronize()
    start = time.perf_counter()
    rows += steps(run, stream, warm, cut, rate)
    run.synchronize()
    seconds = time.perf_counter() - start
    speed = {"tokens_per_second": round(args.batch * args.seq_len * (cut - warm) / seconds)} if cut > warm else {}
    if run.device.type == "cuda":
        speed["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    kept = run.keep() if args.branch else None
    rows += steps(run, stream, cut, args.steps, rate)
    if policy == "auto-c":
        slack = {name: {k: v.tolist() for k, v in rows.items()} for name, rows in run.runtime.slack().items()}
        speed["slack"] = slack
    write("calm", rows, run.held_out(held_out), speed)
    for scenario in args.scenarios if args.branch else ():
        nan, factor = scenario == "nan", lambda step: 1.0
        run.put_back(kept)
        if scenario == "spike":
            factor = lambda step: 8.0 if cut <= step < cut + 15 else 1.0
        if policy == BF16 and scenario != "spike":
            # It has no scales: the calm run is all of these.
            continue
        if scenario in ("resume", "nan"):
            run.forget()
        if scenario == "swap":
            run.put_back(begin)
            run.forget()
            steps(run, windows(0), 0, 10, rate)
            run.put_weights(kept)
        if scenario == "blown":
            steps(run, windows(0), 0, 20, lambda step: 64 * args.lr)
            run.put_weights(kept)
        rows = steps(run, windows(cut), cut, args.steps, lambda step: factor(step) * rate(step), nan)
        write(scenario, rows, run.held_out(held_out), {})


def finetune(args, policy, seed, text, held_out, write):
    """A checkpoint of Hugging Face on bytes, at a constant rate."""
    import transformers

    torch.manual_seed(seed)
    device = torch.device(args.device)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.finetune, dtype=torch.float32).to(device)
    runtime = None
    if policy != BF16:
        chosen = sigmascale.AutoC(burn_in=100) if policy == "auto-c" else policy
        runtime = fp8.attach(model, policy=chosen, backend="auto" if device.type == "cuda" else "emulated")
        model.set_attn_implementation(fp8.register())
    optimizer, rows, start = (
        torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0),
        [],
        time.perf_counter(),
    )
    stream = train_gpt.batches(text, args.batch, args.seq_len, seed, device)

    def loss_of(window):
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(window[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())

    used = torch.zeros((), device=device)
    for window in itertools.islice(stream, args.steps):
        loss = loss_of(window)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        over = torch.zeros((), device=device)
        if runtime:
            amax, counts = runtime.observed()
            over = counts[..., 0].sum()
            used += (amax / (448 * runtime.descales[:, :3])).amax(dim=2).mean()
        optimizer.step()
        if runtime:
            runtime.refresh()
        rows.append((loss.detach(), over))
    rows = [
        {"step": step, "loss": loss.item(), "overflow": int(over), "skipped": False}
        for step, (loss, over) in enumerate(rows)
    ]
    end = {"tokens_per_second": round(args.batch * args.seq_len * args.steps / (time.perf_counter() - start))}
    if runtime:
        end["range_used"] = used.item() / args.steps
    if policy == "auto-c":
        end["slack"] = {name: {k: v.tolist() for k, v in rows.items()} for name, rows in runtime.slack().items()}
    windows = train_gpt.batches(held_out, args.batch, args.seq_len, 1234, device)
    with torch.no_grad():
        loss = sum(loss_of(next(windows)).item() for _ in range(10)) / 10
    write("finetune", rows, loss, end)


def train(args):
    device, folder = torch.device(args.device), pathlib.Path(args.to)
    folder.mkdir(parents=True, exist_ok=True)
    text, held_out = train_gpt.read(args.text)
    about = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "text": args.text,
        "bytes": [len(text), len(held_out)],
    }
    begin, longest = time.perf_counter(), 0.0
    for seed, policy in itertools.product(args.seeds, args.policies):
        start = time.perf_counter()
        if args.seconds and start - begin + longest > args.seconds:
            print(f"no time is left for seed {seed} of {policy}", file=sys.stderr)
            continue
        file = folder / f"{'finetune' if args.finetune else args.size}-{args.style}-{policy}-seed{seed}.jsonl"
        with file.open("w", encoding="utf-8") as out:
            options = {name: value for name, value in vars(args).items() if name not in ("seeds", "policies", "table")}
            print(json.dumps(options | about | {"policy": policy, "seed": seed}), file=out)

            def write(scenario, rows, loss, more):
                for row in rows:
                    print(json.dumps({"scenario": scenario} | row), file=out)
                print(json.dumps({"scenario": scenario, "held_out_loss": loss} | more), file=out, flush=True)

            (finetune if args.finetune else scenarios_of)(args, policy, seed, text, held_out, write)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        longest = max(longest, time.perf_counter() - start)


def table(logs):
    """A row of Markdown for each policy and scenario: over seeds, median (smallest to largest)."""
    found, speeds = {}, {}
    for log in logs:
        head, *rows = [json.loads(line) for line in pathlib.Path(log).read_text().splitlines()]
        for scenario in dict.fromkeys(row["scenario"] for row in rows):
            own = [row for row in rows if row["scenario"] == scenario]
            if "held_out_loss" not in own[-1]:
                sys.exit(f"{log}: {scenario} did not come to its end")
            taken, end = own[:-1], own[-1]
            branch = taken[-(head["branch"] or len(taken)) :]
            last = [row["loss"] for row in taken[-min(50, head["branch"] or 50) :]]
            found.setdefault((head["policy"], scenario), {})[head["seed"]] = {
                "loss": sum(last) / len(last),
                "held": end["held_out_loss"],
                "over": sum(row["overflow"] > 0 for row in branch),
                "of": len(branch),
                "skipped": sum(row["skipped"] for row in branch),
            }
            if "tokens_per_second" in end:
                speeds.setdefault(head["policy"], []).append(end["tokens_per_second"])

    def spread(values):
        values = list(values)
        middle = f"{statistics.median(values):.4f}"
        return middle if len(values) == 1 else f"{middle} ({min(values):.4f} to {max(values):.4f})"

    heads = "scenario", "policy", "seeds", "mean loss of the last 50 steps", "minus BF16's", "held-out loss"
    heads += "steps with overflow", "skipped", "tokens/s"
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for scenario in dict.fromkeys(scenario for _, scenario in found):
        for policy in dict.fromkeys(policy for policy, one in found if one == scenario):
            seeds = found[policy, scenario]
            control = found.get((BF16, scenario)) or found.get((BF16, "calm"), {})
            minus = [one["loss"] - control[seed]["loss"] for seed, one in seeds.items() if seed in control]
            rate = statistics.median(speeds[policy]) if scenario in ("calm", "finetune") and policy in speeds else None
            cells = [scenario, policy, len(seeds), spread(one["loss"] for one in seeds.values())]
            cells += [spread(minus) if minus and policy != BF16 else "-", spread(one["held"] for one in seeds.values())]
            cells += [", ".join(f"{one['over']} of {one['of']}" for one in seeds.values())]
            cells += [", ".join(str(one["skipped"]) for one in seeds.values()), "-" if rate is None else f"{rate:.0f}"]
            print("| " + " | ".join(map(str, cells)) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: [word for word in text.split(",") if word]
    parser.add_argument("--text", metavar="DIR", help="folder of text; its last tenth is held out")
    parser.add_argument("--to", metavar="FOLDER", help="where the logs go")
    parser.add_argument("--size", default="125m", choices=list(train_gpt.SIZES))
    parser.add_argument("--style", default="llama", choices=["llama", "gpt2"])
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in words(text)], default=[0])
    parser.add_argument("--policies", type=words, default=["bf16", "geometry", "delayed-te", "current"])
    parser.add_argument("--scenarios", type=words, default=list(SCENARIOS), help=", ".join(SCENARIOS))
    parser.add_argument("--steps", type=train_gpt.positive, default=400, help="of the calm run, or of --finetune")
    parser.add_argument("--branch", type=int, default=100, help="steps that scenarios take again; 0: none")
    parser.add_argument("--batch", type=train_gpt.positive, default=16)
    parser.add_argument("--seq-len", type=train_gpt.positive, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=train_gpt.positive, default=50)
    parser.add_argument(
        "--biases", type=float, default=0.0, help="deviation of the biases of q and k, for --style gpt2"
    )
    parser.add_argument("--finetune", metavar="CHECKPOINT")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, help="start no run that would end later")
    for name in ("--width", "--layers", "--heads", "--kv-heads"):
        parser.add_argument(name, type=train_gpt.positive, help="in place of the size's")
    parser.add_argument("--table", action="store_true", help="print the logs that follow as a table, and train nothing")
    parser.add_argument("logs", nargs="*", help="logs for --table")
    args = parser.parse_args()
    if args.table:
        return table(args.logs)
    if args.finetune:
        # Nothing branches from it: the table counts all of its steps.
        args.branch = 0
    unknown = [name for name in args.scenarios if name not in SCENARIOS]
    if not args.text or not args.to or args.logs or unknown or not 0 <= args.branch < args.steps:
        parser.error(
            "--text and --to are needed, logs are for --table, --branch is from 0 to below --steps, scenarios are "
            + ", ".join(SCENARIOS)
        )
    if args.biases and args.style != "gpt2":
        parser.error("--biases is for --style gpt2: the other has none")
    args.dimensions = {
        name: getattr(args, name) for name in ("width", "layers", "heads", "kv_heads") if getattr(args, name)
    }
    args.spike = None
    return train(args)


if __name__ == "__main__":
    main()
