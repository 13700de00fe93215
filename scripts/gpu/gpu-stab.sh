#!/usr/bin/env bash
# Delta from the output before its rounding (`attention(.., stabilise=True)`, BackwardOptions::residual), on one GPU. Nothing is built here.
#   STAGES="tests bench effect python" GPU_TESTS=.gpu/gpu CLI=.gpu/sigmascale PYTHONPATH=.gpu/site bash .gpu/gpu-stab.sh
# Run in the repository root with the tree of branch w33-stab. Logs and CSV in $OUT; a short table is printed last. On one H100, about
#   tests   60 s  new and touched GPU tests (kernels compile first)
#   bench  110 s  forward, backward and both, plain against --stabilise in turn, 3 rounds, CUDA graphs
#   effect  40 s  errors of O and dQ on repeated maxima, by kernel (benches/delta_bias.py), 2 seeds
#   python  60 s  the Python tests of training on the GPU
#   random 100 s  600 random backward calls (a quarter of them with the residual) in 4 processes; not run unless named
set -uo pipefail
: "${OUT:=/tmp/out}" "${STAGES:=tests bench effect python}" "${PYTHON:=python3}"
export PYTHONUNBUFFERED=1 SIGMASCALE_CACHE=${SIGMASCALE_CACHE:-/tmp/kernels}
mkdir -p "$OUT"; S=$(date +%s); el() { echo $(($(date +%s) - S)); }
has() { [[ " $STAGES " == *" $1 "* ]]; }
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader | head -1
if has tests; then
  for t in what_rounding_took_from_the_output_is_kept delta_of_the_unrounded_output_is_the_exact_one the_largest_p_of_each_row_is_kept \
      operands_are_saved_for_a_backward dq_in_fp8_is_the_cpus gradients_are_the_cpus parts_have_the_gradients_of_the_whole_call random_backward_calls; do
    SIGMASCALE_RANDOM_BACKWARD=${RANDOM_CALLS:-80} timeout 90 "$GPU_TESTS" "attention::$t" > "$OUT/$t.log" 2>&1
    rc=$?; echo "$t rc $rc at $(el): $(grep -aE -A1 'panicked|test result' "$OUT/$t.log" | head -3 | tr '\n' ' ' | cut -c1-400)"
  done
fi
if has bench; then
  : > "$OUT/bench.csv"
  for round in 1 2 3; do for way in "" "--stabilise"; do
    echo "# round $round ${way:-plain}" >> "$OUT/bench.csv"
    timeout 120 "$CLI" bench attention --backward $way --shapes ${SHAPES:-64x8x128,32x32x64} --seqlens ${LENGTHS:-1024,4096,16384} --reps 8 >> "$OUT/bench.csv" 2>> "$OUT/bench.err"
  done; done
  echo "bench at $(el)"
  "$PYTHON" - "$OUT/bench.csv" <<'P' | tee "$OUT/bench.txt"
import statistics, sys
found, way = {}, None
for line in open(sys.argv[1]):
    line = line.strip()
    if line.startswith("# round"): way = line.split()[3]; continue
    cells = line.split(",")
    if line.startswith("#") or len(cells) < 11 or cells[0] == "kernel": continue
    found.setdefault(tuple(cells[:8]), {}).setdefault(way, []).append((float(cells[8]), float(cells[10])))
print("kernel pass heads_q heads_kv d seqlen batch causal | plain ms (least-most) stabilise ms | ratio of medians | MiB plain stabilise")
for key, ways in found.items():
    if len(ways) < 2: continue
    ms = {way: [x[0] for x in rows] for way, rows in ways.items()}
    med = {way: statistics.median(x) for way, x in ms.items()}
    show = lambda way: f"{med[way]:.4f} ({min(ms[way]):.4f}-{max(ms[way]):.4f})"
    print(*key, "|", show("plain"), show("--stabilise"), "|", f"{med['--stabilise'] / med['plain']:.4f}", "|", ways["plain"][0][1], ways["--stabilise"][0][1])
P
fi
if has effect; then
  for seed in 0 1; do timeout 120 "$PYTHON" benches/delta_bias.py --seed $seed > "$OUT/effect-$seed.csv" 2> "$OUT/effect-$seed.err"; echo "effect $seed rc $? at $(el)"; done
  timeout 60 "$PYTHON" benches/delta_bias.py --seed 0 --d 64 > "$OUT/effect-d64.csv" 2>> "$OUT/effect-0.err"; echo "effect d64 rc $? at $(el)"
fi
if has python; then
  timeout 200 "$PYTHON" -m pytest -q -x python/tests/test_gpu_training.py > "$OUT/pytest.log" 2>&1; echo "pytest rc $? at $(el): $(tail -1 "$OUT/pytest.log")"
fi
if has random; then
  for p in 1 2 3 4; do SIGMASCALE_RANDOM_SEED=$((p * 1000)) SIGMASCALE_RANDOM_BACKWARD=150 timeout 200 "$GPU_TESTS" attention::random_backward_calls > "$OUT/random-$p.log" 2>&1 & done
  wait; grep -ah "test result\|panicked" "$OUT"/random-?.log; echo "random at $(el)"
fi
has effect && cat "$OUT"/effect-0.csv
echo "done at $(el)"
