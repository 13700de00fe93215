#!/usr/bin/env bash
# Calls beside FlashAttention-3, on one H100 or H200: at most LIMIT (120) seconds in all, rows are kept as they come.
#
#   VLLM_FA3=<carried>/vllm-fa3-site.tar.xz PYTHONPATH=<unpacked wheel>:<peers> bash gpu-calls.sh    # STAGES="warm calls paged"
#   STAGES=random RANDOM_CALLS=10000 PYTHONPATH=... bash gpu-calls.sh   # random calls against f64, 8 processes, not in the 120 s
#
# fa3-fwd 0.0.3 is built without windows and pages. VLLM_FA3 (vllm-fa3-site.tar.xz, 15.7 MB: vLLM 0.24.0's FlashAttention-3,
# for torch 2.11 and CUDA 13) has both; left out, the rows of windows and pages have no FlashAttention-3.
# Run in the repository root. Logs go to $OUT; a short table is printed last. Stages and about how long they take:
#   warm   25 s  compiles the kernels of the calls, one process for each call, into SIGMASCALE_CACHE; no figure is kept
#   calls  45 s  $OUT/peers-calls.csv: becomes benches/records/<date>-peers-calls-h200.csv, then benches/tables.py
#   paged  20 s  $OUT/paged.csv, 64 query and 8 KV heads, then 32 and 8
set -uo pipefail
: "${OUT:=/tmp/out}" "${STAGES:=warm calls paged}" "${PYTHON:=python3}" "${LIMIT:=120}" "${RANDOM_CALLS:=10000}"
export SIGMASCALE_CACHE=${SIGMASCALE_CACHE:-/tmp/sigmascale-kernels}
mkdir -p "$OUT"
start=$(date +%s)
if [ -n "${VLLM_FA3:-}" ]; then
    "$PYTHON" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall("/tmp/vllm-fa3")' "$VLLM_FA3" 2> "$OUT/vllm-fa3.err"
    vllm=:/tmp/vllm-fa3
fi
run() { PYTHONPATH=${PYTHONPATH:-}${vllm:-} timeout "$(left "$1")" "$PYTHON" "${@:2}"; } # at most so many seconds
left() { local n=$((LIMIT - 3 - $(date +%s) + start)); echo $((n > $1 ? $1 : n > 1 ? n : 1)); } # seconds, at most $1
has() { [[ " $STAGES " == *" $1 "* ]]; }
done_() { echo "$1: rc $2 at $(($(date +%s) - start)) s"; }
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader

if has warm; then
    pids=()
    for call in packed-8x2048 window-1024 d-96 d-256 d-192/128; do
        run 45 benches/peers.py calls --calls "$call" --seqlens 2048 --rounds 1 --milliseconds 1 --sets 1 \
            --kernels sigmascale sigmascale+reorder > "$OUT/warm-${call//\//-}.log" 2>&1 &
        pids+=($!)
    done
    run 45 benches/paged_attention.py --rows decode-256x512 chunk512-1x8k --reps 1 > "$OUT/warm-paged.log" 2>&1 &
    pids+=($!)
    wait "${pids[@]}"
    done_ warm $?
fi
if has calls; then
    run 70 benches/peers.py calls --rounds 3 --milliseconds 25 > "$OUT/peers-calls.csv" 2> "$OUT/peers-calls.err"
    done_ calls $?
    tail -2 "$OUT/peers-calls.err"
fi
if has paged; then
    run 40 benches/paged_attention.py --reps 7 > "$OUT/paged.csv" 2> "$OUT/paged.err"
    done_ "paged 64,8" $?
    run 30 benches/paged_attention.py --heads 32,8 --reps 7 > "$OUT/paged-32.csv" 2>> "$OUT/paged.err"
    done_ "paged 32,8" $?
    tail -2 "$OUT/paged.err"
fi
if has random; then
    each=$((RANDOM_CALLS / 8)) pids=()
    for part in 0 1 2 3 4 5 6 7; do
        timeout 500 "$PYTHON" python/tests/random_calls.py --device cuda --first $((part * each)) --count "$each" > "$OUT/random-$part.log" 2>&1 &
        pids+=($!)
    done
    wait "${pids[@]}"
    done_ random $?
    grep -h "calls passed" "$OUT"/random-*.log
    grep -h "^--seed" "$OUT"/random-*.log | cut -c1-300 | head -20
fi

"$PYTHON" - "$OUT" <<'P'
import csv, os, sys
rows = {}
path = f"{sys.argv[1]}/peers-calls.csv"
lines = [line for line in open(path) if not line.startswith("#")] if os.path.exists(path) else []
reasons = {}
for row in csv.DictReader(lines):
    key = row["call"], row["heads_q"], row["heads_kv"], row["seqlen"], row["batch"], "causal" if row["causal"] == "1" else "full"
    rows.setdefault(key, {})[row["kernel"]] = row
    if not row["ms"]:
        reasons.setdefault((row["kernel"], (row["mib"] or "").strip()), key)
print("call,heads_q,heads_kv,seqlen,batch,mask,ms,fa3/ours,fa3-vllm/ours,fa3/ours with reorder,fa3-vllm/ours with reorder,fa3-bf16/ours,watts,mhz")
for key, of in rows.items():
    ms = lambda kernel: float(of[kernel]["ms"]) if kernel in of and of[kernel]["ms"] else None
    speed = lambda a, b: f"{ms(b) / ms(a):.3f}" if ms(a) and ms(b) else "-"
    ours = of.get("sigmascale", {})
    cells = [speed(a, b) for a in ("sigmascale", "sigmascale+reorder") for b in ("fa3", "fa3-vllm")] + [speed("sigmascale", "fa3-bf16")]
    print(*key, ours.get("ms", ""), *cells, ours.get("watts", ""), ours.get("mhz", ""), sep=",")
for (kernel, reason), key in reasons.items():
    print(f"no time of {kernel}, first in {key}: {reason}")
for name in ("paged", "paged-32"):
    if os.path.exists(f"{sys.argv[1]}/{name}.csv"):
        print(open(f"{sys.argv[1]}/{name}.csv").read(), end="")
P
echo "done at $(($(date +%s) - start)) s"
