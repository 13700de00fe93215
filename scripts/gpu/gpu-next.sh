#!/usr/bin/env bash
# What is left for one GPU, by stages; run in the repository root on the device machine, with GPU_TESTS (binary of tests/gpu), CLI (release command) and
# PYTHONPATH (unpacked wheel, then peers). Nothing is built. STAGES="threads bias random sanitize telemetry monitor evidence sharded large"
#   threads    10 s  attention::parts_of_several_threads_are_apart, attention::random_shapes (never finished within 170 s beside other tests)
#   bias      200 s  300 steps on repeated text, bf16, fp8, fp8-2048, seeds 0, 1, 2 (three processes)
#   random    300 s  10,000 random Python calls in 8 processes, 2,000 random shapes in 6
#   sanitize  120 s  memcheck, initcheck, synccheck, racecheck of small::
#   telemetry  30 s  what telemetry costs
#   monitor   100 s  gpu-evidence.sh monitor
#   evidence  290 s  gpu-evidence.sh 125m 0
#   sharded    60 s  gpu-lanes.sh one
set -uo pipefail
: "${OUT:=/tmp/out}" "${STAGES:=threads bias}" "${PYTHON:=python3}" "${HERE:=$(dirname "$0")}"
export PYTHONUNBUFFERED=1 SIGMASCALE_CACHE=${SIGMASCALE_CACHE:-/tmp/kernels}
mkdir -p "$OUT"; S=$(date +%s); el() { echo $(($(date +%s) - S)); }
has() { [[ " $STAGES " == *" $1 "* ]]; }
test_() { timeout "$1" "$GPU_TESTS" "$2" > "$OUT/${2//::/__}.log" 2>&1; echo "$2 rc $? at $(el): $(grep -aE 'panicked|test result' "$OUT/${2//::/__}.log" | head -2 | tr '\n' ' ' | cut -c1-300)"; }
if has threads; then test_ 60 attention::parts_of_several_threads_are_apart; SIGMASCALE_RANDOM_SHAPES=200 test_ 250 attention::random_shapes; fi
if has bias; then
  for seed in 0 1 2; do
    PYTHONPATH=$PYTHONPATH:python/examples "$PYTHON" python/examples/train_seeds.py --text src --out "$OUT/seeds" --texts repeated --ways bf16,fp8,fp8-2048 --seeds $seed \
      --steps 300 --size 125m --seq-len 4096 --batch 4 --lr 6e-4 > "$OUT/bias-$seed.txt" 2> "$OUT/bias-$seed.err" &
  done; wait; cat "$OUT"/bias-?.txt; echo "bias at $(el)"
fi
if has random; then
  for p in 0 1 2 3 4 5 6 7; do timeout 300 "$PYTHON" python/tests/random_calls.py --device cuda --first $((p * 1250)) --count 1250 > "$OUT/calls-$p.log" 2>&1 & done
  for p in 1 2 3 4 5 6; do SIGMASCALE_RANDOM_SHAPES=330 SIGMASCALE_RANDOM_SEED=$((500 + p)) timeout 300 "$GPU_TESTS" attention::random_shapes > "$OUT/shapes-$p.log" 2>&1 & done
  wait; tail -qn 1 "$OUT"/calls-?.log; grep -ah "failures\|test result" "$OUT"/shapes-?.log; echo "random at $(el)"
fi
if has sanitize; then
  for tool in memcheck initcheck synccheck racecheck; do SIGMASCALE_EVERY_LANE=1 timeout 120 compute-sanitizer --tool $tool --error-exitcode 1 "$GPU_TESTS" small:: > "$OUT/san-$tool.log" 2>&1; echo "$tool rc $? at $(el): $(tail -1 "$OUT/san-$tool.log")"; done
fi
if has telemetry; then "$CLI" bench attention --shapes 64x8x128,32x32x64 --seqlens 1024,4096,16384 --kernels fp8,fp8+telemetry --reps 8 | tee "$OUT/telemetry.csv" | cut -c1-70; fi
has monitor && bash "$HERE/gpu-evidence.sh" monitor
has evidence && bash "$HERE/gpu-evidence.sh" 125m 0
has sharded && bash "$HERE/gpu-lanes.sh" one
echo "done at $(el)"
