#!/usr/bin/env bash
# What is left for one GPU, by stages; run in the repository root on the device machine, with GPU_TESTS (binary of tests/gpu), CLI (release command) and
# PYTHONPATH (unpacked wheel; peers behind it where named). Nothing is built. At most 8 files come back from $OUT: everything is packed into logs.tgz.
# STAGES="compile stab stabtests random racecheck monitor sharded engine large"
#   compile   150 s  gpu-compile.sh: compiled calls with telemetry as an output of the operator; CUDA graph trees
#   stab      170 s  gpu-stab.sh tests effect python (stabilise=True: effect on dQ, Python tests; test of the residual mended for ties)
#   random    200 s  10,000 random Python calls in 12 processes of 100 calls each (2,400 take 150 s beside other work)
#   shapes    210 s  attention::random_shapes, 2,000 in 6 processes, alone
#   racecheck  90 s  compute-sanitizer racecheck of small::
#   monitor   100 s  gpu-evidence.sh monitor
#   sharded    60 s  gpu-lanes.sh one
#   gpt2      150 s  gpu-evidence.sh gpt2 0, beside others
#   1b        560 s  gpu-evidence.sh 1b 0 with SECONDS_1B=250
# The engine (branch w33-engine, d7a1ee5: measured as switches, never as the default): binaries of that branch, commands in MERGE-engine33.
set -uo pipefail
: "${OUT:=/tmp/out}" "${STAGES:=compile stab random}" "${PYTHON:=python3}" "${HERE:=$(dirname "$0")}"
export PYTHONUNBUFFERED=1 SIGMASCALE_CACHE=${SIGMASCALE_CACHE:-/tmp/kernels}
L=/tmp/logs; mkdir -p "$OUT" $L; S=$(date +%s); el() { echo $(($(date +%s) - S)); }
has() { [[ " $STAGES " == *" $1 "* ]]; }
has compile && OUT=$L bash "$HERE/gpu-compile.sh"
has stab && OUT=$L STAGES="tests effect python" bash "$HERE/gpu-stab.sh"
if has random; then
  one() { for k in 0 1 2 3 4 5 6 7 8; do timeout 300 "$PYTHON" python/tests/random_calls.py --device cuda --first $((200000 + $1 * 10000 + k * 100)) --count 100 >> $L/calls-$1.log 2>&1; done; }
  for p in 0 1 2 3 4 5 6 7 8 9 10 11; do one $p & done; wait
  grep -h "calls passed" $L/calls-*.log | awk '{a += $2; b += $4} END {print "random calls passed " a " of " b}'; grep -h "^--seed" $L/calls-*.log | cut -c1-300; echo "random at $(el)"
fi
if has shapes; then
  for p in 1 2 3 4 5 6; do SIGMASCALE_RANDOM_SHAPES=330 SIGMASCALE_RANDOM_SEED=$((500 + p)) timeout 300 "$GPU_TESTS" attention::random_shapes > $L/shapes-$p.log 2>&1 & done; wait
  grep -ah "failures\|test result" $L/shapes-?.log; echo "shapes at $(el)"
fi
if has racecheck; then SIGMASCALE_EVERY_LANE=1 timeout 200 compute-sanitizer --tool racecheck --error-exitcode 1 "$GPU_TESTS" small:: > $L/racecheck.log 2>&1; echo "racecheck rc $? at $(el): $(tail -1 $L/racecheck.log)"; fi
has monitor && OUT=$L bash "$HERE/gpu-evidence.sh" monitor
has sharded && OUT=$L bash "$HERE/gpu-lanes.sh" one
has gpt2 && OUT=$L bash "$HERE/gpu-evidence.sh" gpt2 0
has 1b && OUT=$L SECONDS_1B=250 bash "$HERE/gpu-evidence.sh" 1b 0
tar czf "$OUT/logs.tgz" -C /tmp logs; echo "done at $(el)"
