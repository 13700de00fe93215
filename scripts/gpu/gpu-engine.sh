#!/usr/bin/env bash
# The first GPU call of branch w30-engine, on one H100 or H200 (about 5 minutes; ONLY=old,shapes,latent,once,python,sanitize picks).
# Run in the repository root of branch w30-engine on the device machine, with what was built before:
#   cargo test --no-run --test gpu                 -> GPU_TESTS (target/debug/deps/gpu-*)
#   the wheel of python/, installed for an interpreter with PyTorch, transformers and pytest -> PYTHON (left out: no Python tests)
# NVRTC must be found (docs/gpus.md). Nothing else may use the GPU. Logs lie in $OUT; a line a step here.
#   GPU_TESTS=.gpu/gpu PYTHON=.gpu/venv/bin/python bash .gpu/gpu-engine.sh
set -uo pipefail
OUT=${OUT:-/tmp/gpu-engine}; mkdir -p "$OUT"
only=,${ONLY:-shapes,latent,once,old,python,sanitize},
S=$(date +%s); el() { echo $(($(date +%s) - S))s; }
has() { [[ $only == *,$1,* ]]; }
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
step() { # name seconds command...
  local name=$1 limit=$2; shift 2
  timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
  echo "$name: rc $? at $(el): $(grep -hE '^test result|panicked|failed|passed|error' "$OUT/$name.log" | tail -3 | tr '\n' ' ' | cut -c1-400)"
}
# 1. Addresses by value: bits of an engine over the same weights, graphs, refusals; then the figures
has shapes && step shapes 90 "$GPU_TESTS" shapes:: --nocapture && grep "us a layer" "$OUT/shapes.log"
# 2. Latent attention against f64
has latent && step latent 90 "$GPU_TESTS" latent:: --nocapture && grep "us a layer" "$OUT/latent.log"
# 3. Descales in one launch against two, and whole models of 0.5B to 8B against one read
has once && step once 120 "$GPU_TESTS" at_once:: --nocapture && grep -E "two launches" "$OUT/once.log"
# 4. Everything of the engine that passed before, since its host side changed
if has old; then
  step small 60 "$GPU_TESTS" small::
  step norms 60 "$GPU_TESTS" norms::
  step qk_norm 60 "$GPU_TESTS" qk_norm::
  step engine 150 "$GPU_TESTS" engine::
  step mixed 60 "$GPU_TESTS" mixed::
fi
# 5. Python: sharded by FSDP2 (one rank), captures, latent attention; then what refreshed before
if has python && [ -n "${PYTHON:-}" ]; then
  step py-shapes 120 "$PYTHON" -m pytest -q -rs -s -p no:cacheprovider python/tests/test_gpu_shapes.py python/tests/test_gpu_latent.py
  step py-refresh 150 "$PYTHON" -m pytest -q -rs -p no:cacheprovider python/tests/test_gpu_refresh.py python/tests/test_gpu_plans.py
fi
# 6. The new kernels under the sanitizer
if has sanitize && command -v compute-sanitizer >/dev/null; then
  for tool in memcheck initcheck; do
    step "$tool" 90 compute-sanitizer --tool $tool --error-exitcode 1 "$GPU_TESTS" shapes::a_graph
    step "$tool-latent" 90 compute-sanitizer --tool $tool --error-exitcode 1 "$GPU_TESTS" latent::weights_written
    step "$tool-once" 90 compute-sanitizer --tool $tool --error-exitcode 1 "$GPU_TESTS" at_once::what_is_not_finite
  done
fi
echo "done at $(el)"
