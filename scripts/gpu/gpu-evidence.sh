#!/usr/bin/env bash
# Evidence at size on one GPU. Run in the repository root of the device machine, with the package (native module included) on PYTHONPATH:
#   PYTHONPATH=$PWD/.gpu/t/python bash .gpu/gpu-evidence.sh 125m 0      # seed 0; 4 to 5 minutes (estimate); then seeds 1 and 2
#   PYTHONPATH=$PWD/.gpu/t/python bash .gpu/gpu-evidence.sh gpt2 0      # GPT-2 style, 4 minutes
#   PYTHONPATH=$PWD/.gpu/t/python bash .gpu/gpu-evidence.sh 1b 0        # geometry and BF16, ${SECONDS_1B:-200} s each
#   PYTHONPATH=$PWD/.gpu/t/python bash .gpu/gpu-evidence.sh finetune 0  # tiny-llama, 3000 steps, 3 minutes
#   PYTHONPATH=$PWD/.gpu/t/python bash .gpu/gpu-evidence.sh monitor     # the cost of Monitor at 125M, 2 minutes
# Several may follow each other in one call: bash .gpu/gpu-evidence.sh 125m 0 && bash .gpu/gpu-evidence.sh 125m 1.
# Every run ends within the limit: a policy is started only if the longest so far would still fit (--seconds). Logs lie in $OUT.
set -uo pipefail
export PYTHONUNBUFFERED=1
OUT=${OUT:-/tmp/gpu-evidence}; mkdir -p "$OUT"
PY=${PYTHON:-python3}
S=$(date +%s); el() { echo $(($(date +%s) - S)); }
TEXT=${TEXT:-$("$PY" -c "import asyncio, pathlib; print(pathlib.Path(asyncio.__file__).parents[1])")}
what=${1:?125m, gpt2, 1b or finetune} seed=${2:-0}
run() { # limit name options..; MORE: a trial's own sizes
  local t=$1 name=$2; shift 2
  timeout "$((t + 60))" "$PY" python/examples/evidence.py --text "$TEXT" --to "$OUT" --seeds "$seed" --seconds "$t" "$@" ${MORE:-} > "$OUT/$name.log" 2>&1
  echo "$name rc $? at $(el): $(tail -1 "$OUT/$name.log" | cut -c1-200)"
}
case $what in
125m) run 280 "125m-$seed" --size 125m --policies bf16,geometry,delayed-te,current,auto-c --steps 300 --branch 100 --lr 6e-4 ;;
gpt2) run 280 "gpt2-$seed" --size 125m --style gpt2 --policies bf16,geometry,delayed-te,current --steps 300 --branch 100 --lr 6e-4 ;;
1b)
  # 4096 tokens a step: some 80 ms.
  steps=$((${SECONDS_1B:-200} * 12))
  run 600 "1b-$seed" --size 1b --policies bf16,geometry --scenarios "" --branch 0 --steps "${STEPS:-$steps}" --batch 2 --seq-len 2048 --lr 3e-4
  ;;
finetune) run 240 "finetune-$seed" --finetune data/tiny-llama --policies bf16,geometry,auto-c,delayed-te --steps "${STEPS:-3000}" --batch 4 --seq-len 1024 --lr 1e-5 --branch 0 ;;
monitor) # tokens a second of the same run with and without its record, in turn
  for turn in 1 2; do for monitor in "" "--monitor $OUT/run-$turn.jsonl"; do
    rm -f "$OUT/run-$turn.jsonl"
    timeout 90 "$PY" python/examples/train_gpt.py --text "$TEXT" --size 125m --steps 160 --every 10 --lr 6e-4 --log "$OUT/monitor.log" $monitor ${MORE:-} 2>> "$OUT/monitor.err"
    echo "turn $turn ${monitor:-without} rc $? at $(el): $(tail -1 "$OUT/monitor.log")"
  done; done
  "$PY" -m sigmascale diagnose "$OUT/run-2.jsonl" | head -5
  exit ;;
*) echo "125m, gpt2, 1b, finetune or monitor" >&2; exit 2 ;;
esac
"$PY" python/examples/evidence.py --table "$OUT"/*.jsonl
tar czf "$OUT/logs.tgz" -C "$OUT" $(cd "$OUT" && ls | grep -v tgz)
echo "done at $(el)"
