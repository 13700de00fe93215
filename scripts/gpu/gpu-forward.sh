#!/usr/bin/env bash
# Forms of the attention forward, in one call on one H100 or H200 (9 minutes with everything; ONLY=check,time,probe,ncu picks).
# Run in the repository root of branch w30-forward-measure on the device machine, with two release binaries built before:
#   cargo build --release                        -> SIGMASCALE (target/release/sigmascale)
#   cargo test --release --no-run --test gpu     -> GPU_TESTS  (target/release/deps/gpu-*)
# BASE is a release binary of 44c333c (before e97aed3), timed in turn with the others as `main`; left out, it is not. NVRTC must be found (docs/gpus.md).
#   SIGMASCALE=.gpu/sigmascale BASE=.gpu/sigmascale-main GPU_TESTS=.gpu/gpu bash .gpu/gpu-forward.sh
# Rows, logs and ncu's reports lie in $OUT; the tables come last.
set -uo pipefail
OUT=${OUT:-/tmp/gpu-forward}; mkdir -p "$OUT"; rm -f "$OUT/rows.csv"
only=,${ONLY:-check,time,probe,ncu},
bin=${SIGMASCALE:-target/release/sigmascale}
S=$(date +%s); el() { echo $(($(date +%s) - S))s; }
has() { [[ $only == *,$1,* ]]; }
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw --format=csv,noheader,nounits -lms 200 >"$OUT/clock.csv" & monitor=$!
trap 'kill $monitor 2>/dev/null || true' EXIT

# 1. Right? The default first: its loop is e97aed3, which no GPU has met. Then each form against the plain kernel (90 s)
if has check && [ -n "${GPU_TESTS:-}" ]; then
  check() { # seconds option shapes test
    SIGMASCALE_KERNEL_OPTION=$2 SIGMASCALE_RANDOM_SHAPES=$3 timeout "$1" "$GPU_TESTS" "$4" >"$OUT/check-${2:-default}-${4##*:}.log" 2>&1
    echo "check ${2:-default} $4: rc $? at $(el): $(grep -hE '^test result|panicked|failed' "$OUT/check-${2:-default}-${4##*:}.log" | tail -2 | tr '\n' ' ' | cut -c1-300)"
  }
  check 90 "" 400 attention::random_shapes
  check 60 "" 0 attention::needles_and_sinks
  check 60 "" 0 attention::nan_and_infinity_are_never_silent
  for option in sums inplace turns bulk narrow narrow-bulk; do
    check 40 $option 100 attention::random_dense_128

  done
fi

row() { # NAME BINARY ARGUMENTS...
  local name=$1 with=$2 start; shift 2
  start=$(date +%s.%N)
  timeout 100 "$with" bench attention --sets 2 --reps "${REPS:-8}" --warmup 3 "$@" 2>>"$OUT/bench.err" | grep -v '^#' | tail -n +2 | sed "s/^/$name,$start,/" >>"$OUT/rows.csv"
}
# 2. Time, in turn (4 minutes)
forms=fp8,fp8+sums,fp8+inplace,fp8+turns,fp8+bulk,fp8+narrow,fp8+narrow-bulk
if has time; then
  for round in 1 2 3; do
    for shape in 64x8x128 32x32x128; do
      [ -n "${BASE:-}" ] && row main "$BASE" --shapes $shape --seqlens 1024,4096,16384 --kernels fp8
      row form "$bin" --shapes $shape --seqlens 1024,4096,16384 --kernels $forms
    done
    # What else becomes uniform: training's forward, packed sequences
    for with in ${BASE:+main,$BASE} form,$bin; do
      row "${with%%,*}-f16" "${with#*,}" --shapes 64x8x128 --seqlens 4096 --kernels fp8,fp8+packed,fp8+telemetry --accumulator f16
      row "${with%%,*}-packed" "${with#*,}" --shapes 32x8x128 --seqlens 2048 --causal --kernels fp8,fp8+packed
    done
    echo "round $round at $(el)"
  done
fi
# 3. Where the clocks of the products go (20 s)
if has probe; then
  row probe "$bin" --shapes 64x8x128 --seqlens 16384 --kernels fp8,fp8+probe-1,fp8+probe-2,fp8+probe-3,fp8+probe-4,fp8+probe-5,fp8+probe-6,fp8+probe-7
fi
kill $monitor
# 4. Counters of one launch of each form (60 s)
if has ncu; then
  m=sm__cycles_elapsed.max,sm__inst_executed.sum,sm__inst_issued.avg.pct_of_peak_sustained_active,sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active
  m=$m,smsp__inst_executed_pipe_xu.sum,smsp__inst_executed_pipe_alu.sum,smsp__inst_executed_pipe_fma.sum,l1tex__data_pipe_lsu_wavefronts_mem_shared.sum
  for s in gmma wait math_pipe_throttle barrier short_scoreboard long_scoreboard branch_resolving dispatch_stall no_instruction not_selected selected; do
    m=$m,smsp__average_warps_issue_stalled_${s}_per_issue_active.ratio
  done
  for form in main fp8 fp8+sums fp8+inplace fp8+narrow; do
    with=$bin kernel=$form
    [ $form = main ] && with=${BASE:-} kernel=fp8
    [ -z "$with" ] && continue
    timeout 60 ncu --clock-control none -k regex:attention_forward -s 2 -c 1 --metrics "$m" --csv "$with" bench attention --no-graph --sets 1 --reps 2 --warmup 1 \
      --shapes 64x8x128 --seqlens 4096 --kernels $kernel >"$OUT/ncu-$form.csv" 2>"$OUT/ncu-$form.err"
    echo "ncu $form rc $? at $(el)"
  done
  # Source view of default and narrow: which instruction waits
  for form in fp8 fp8+narrow; do
    timeout 60 ncu --clock-control none -k regex:attention_forward -s 2 -c 1 --section SourceCounters --import-source no -f -o "$OUT/source-$form" \
      "$bin" bench attention --no-graph --sets 1 --reps 2 --warmup 1 --shapes 64x8x128 --seqlens 4096 --kernels $form >/dev/null 2>>"$OUT/ncu.err"
    ncu -i "$OUT/source-$form.ncu-rep" --page source --csv --print-source sass >"$OUT/source-$form.csv" 2>>"$OUT/ncu.err"
    echo "source $form: $(wc -l <"$OUT/source-$form.csv") lines at $(el)"
  done
fi
python3 - "$OUT" <<'PY'
import csv, datetime, glob, math, os, statistics, sys
from collections import defaultdict
out = sys.argv[1]
clock = []
for line in csv.reader(open(f"{out}/clock.csv")):
    try: clock.append((datetime.datetime.strptime(line[0].strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp(), float(line[1]), float(line[2])))
    except (ValueError, IndexError): pass
hot = [(mhz, w) for _, mhz, w in clock if w > 400]
mhz = statistics.median(m for m, _ in hot) if hot else 1755
print(f"SM clock {mhz:.0f} MHz, {statistics.median(w for _, w in hot) if hot else 0:.0f} W (medians over 400 W)")
rows, probes = defaultdict(lambda: defaultdict(list)), {}
if os.path.exists(f"{out}/rows.csv"):
    for name, start, kernel, hq, hkv, d, keys, batch, causal, ms, *_ in csv.reader(open(f"{out}/rows.csv")):
        if name == "probe":
            if causal == "0": probes[kernel] = float(ms) * mhz * 1e3 / (int(batch) * int(hq) * (int(keys) / 128) ** 2 / 132)
            continue
        group, who = name.replace("main", "").replace("form", ""), "main:" + kernel if name.startswith("main") else kernel
        rows[(group, hq, hkv, int(keys), causal)][who].append(float(ms))
print("heads,keys,causal,kernel,ms,spread,against main (or fp8)")
gains = defaultdict(list)
for key, kernels in sorted(rows.items()):
    for kernel, times in kernels.items():
        if kernel.startswith("main:"): continue
        base = kernels.get("main:" + kernel) or kernels.get("main:fp8") or kernels["fp8"]
        ratio = statistics.median(base) / statistics.median(times)
        gains[kernel + key[0], key[4]].append(ratio)
        print(f"{key[1]}q{key[2]}kv{key[0]},{key[3]},{key[4]},{kernel},{statistics.median(times):.4f},{(max(times) - min(times)) / min(times):.3f},{ratio:.3f}")
for (kernel, causal), ratios in sorted(gains.items()):
    print(f"geometric mean {kernel} causal {causal}: {math.exp(statistics.fmean(map(math.log, ratios))):.3f}")
for kernel, clocks in probes.items():
    print(f"clocks of a tile of 128 x 128: {kernel} {clocks:.0f}")
for path in sorted(glob.glob(f"{out}/ncu-*.csv")):
    lines = [l for l in open(path) if l.startswith('"')]
    print(os.path.basename(path)[4:-4], "; ".join(f"{r['Metric Name'].replace('smsp__average_warps_issue_stalled_', '').replace('_per_issue_active.ratio', '')} {r['Metric Value']}" for r in csv.DictReader(lines)) if lines else "no counters")
PY
