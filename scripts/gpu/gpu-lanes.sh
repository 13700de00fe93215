#!/usr/bin/env bash
# Sharded models on GPUs. Run in the repository root of the device machine, with the package (native module included) on PYTHONPATH:
#   PYTHONPATH=$PWD/.gpu/t/python bash .gpu/gpu-lanes.sh one   # any one GPU, 3 minutes: overhead of the scales at 8B shapes
#   PYTHONPATH=$PWD/.gpu/t/python bash .gpu/gpu-lanes.sh two   # nvidia-h200-x2, 9 minutes: tests 8 to 12, ring, training
# Rows (JSON lines) and logs lie in $OUT. LAUNCH and TRAIN change how processes are started and the training's size (a trial on the CPU).
set -uo pipefail
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
OUT=${OUT:-/tmp/gpu-lanes}; mkdir -p "$OUT"
S=$(date +%s); el() { echo $(($(date +%s) - S)); }
PY=${PYTHON:-python3}
TEXT=${TEXT:-$("$PY" -c "import asyncio, pathlib; print(pathlib.Path(asyncio.__file__).parents[1])")}
# 16 x 1024 tokens a step, 125M.
TRAIN=${TRAIN:---size 125m --seq-len 1024 --batch 16 --steps 200 --warmup 20 --lr 6e-4}

bench() { # seconds name ranks tests..
  local t=$1 name=$2 n=$3; shift 3
  timeout "$t" "$PY" -m torch.distributed.run --standalone --nproc-per-node "$n" -- benches/sharded.py "$@" > "$OUT/$name.jsonl" 2> "$OUT/$name.err"
  echo "$name rc $? at $(el): $(cut -c1-1500 "$OUT/$name.jsonl")"
  grep -E "^[a-z]+: |^rank [0-9]|Error" "$OUT/$name.err" | sort | uniq | head -5
}
train() { # seconds name ranks options..
  local t=$1 name=$2 n=$3; shift 3
  timeout "$t" "$PY" -m torch.distributed.run --standalone --nproc-per-node "$n" -- python/examples/train_gpt.py --text "$TEXT" $TRAIN --every 1 --log "$OUT/$name.jsonl" "$@" > "$OUT/$name.log" 2>&1
  echo "$name rc $? at $(el): $(tail -1 "$OUT/$name.jsonl" | cut -c1-300)"
}

case ${1:?one or two} in
one)
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  bench 240 overhead-1gpu 1 overhead
  bench 60 scales-1gpu 1 scales addresses graph   # FSDP on a mesh of one
  ;;
two)
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null
  bench 60 scales 2 scales collectives graph                                                        # tests 8, 10, 11
  bench 45 addresses 2 addresses                                                                    # test 9
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True bench 45 addresses-expandable 2 addresses
  CUDA_LAUNCH_BLOCKING=1 bench 60 addresses-blocking 2 addresses
  grep -ho '"digest_of_scales": "[0-9a-f]*"' "$OUT"/addresses*.jsonl | sort | uniq -c               # one line with 3: no race
  bench 60 ring 2 ring
  bench 100 overhead 2 overhead                                                                     # test 12
  for seed in 0 1 2; do train 60 train-bf16-$seed 2 --policy bf16 --seed $seed; done
  train 60 train-geometry 2 --policy geometry
  train 60 train-geometry-tp 2 --policy geometry --tp 2
  train 60 train-delayed 2 --policy delayed-te
  train 60 train-geometry-1gpu 1 --policy geometry
  OUT="$OUT" "$PY" - <<'P'
import json, os, pathlib
def losses(name):
    file = pathlib.Path(os.environ["OUT"], name + ".jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row["step"]: row["loss"] for row in rows if "step" in row and "loss" in row}, rows[-1] if rows else {}
mean = lambda run: sum(list(run.values())[-50:]) / max(len(list(run.values())[-50:]), 1)
bf16 = [mean(losses(f"train-bf16-{seed}")[0]) for seed in range(3)]
print("bf16, mean loss of the last 50 steps, 3 seeds:", bf16)
one, _ = losses("train-geometry-1gpu")
for name in ("train-geometry", "train-geometry-tp", "train-delayed", "train-geometry-1gpu"):
    run, end = losses(name)
    if not run:
        print(name, "has no log"); continue
    print(name, "mean", mean(run), "within bf16's:", min(bf16) <= mean(run) <= max(bf16), "equal to one GPU:", run == one,
          "largest difference:", max(abs(run[s] - one[s]) for s in run.keys() & one.keys()) if one else None, "tokens/s", end.get("tokens_per_second"))
print("bf16 tokens/s", [losses(f"train-bf16-{seed}")[1].get("tokens_per_second") for seed in range(3)])
P
  ;;
*) echo "one or two" >&2; exit 2 ;;
esac
echo "done at $(el)"
