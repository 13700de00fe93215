#!/usr/bin/env bash
# Queries cast inside the attention kernel (branch w33-castq), beside the cast in front of it. Run in the repository root on the device
# machine, with GPU_TESTS (binary of tests/gpu), CLI (release command) and PYTHONPATH (unpacked wheel, then peers). Nothing is built.
# STAGES="check bench peers rope"
#   check   90 s  the same bits as of the cast, at d 64 and 128, with and without rotation; random shapes, of which half the engines cast
#                 queries inside; the same from Python
#   bench  200 s  cast alone (GB/s), e2e, e2e+serial (without PDL), e2e+castq, the same with rope; two rounds
#   peers  120 s  benches/peers.py from-bf16 with sigmascale+castq
#   rope   120 s  the same with --rope
set -uo pipefail
: "${OUT:=/tmp/out}" "${STAGES:=check bench peers rope}" "${PYTHON:=python3}" "${ROUNDS:=2}"
: "${SHAPES:=64x8x128,32x8x128,32x32x128,32x32x64}"
export PYTHONUNBUFFERED=1 SIGMASCALE_CACHE=${SIGMASCALE_CACHE:-/tmp/kernels}
mkdir -p "$OUT"; S=$(date +%s); el() { echo $(($(date +%s) - S)); }
has() { [[ " $STAGES " == *" $1 "* ]]; }
test_() { timeout "$1" "$GPU_TESTS" "$2" > "$OUT/${2//::/__}.log" 2>&1; local rc=$?; echo "$2 rc $rc at $(el): $(grep -aE 'panicked|test result' -A1 "$OUT/${2//::/__}.log" | head -3 | tr '\n' ' ' | cut -c1-400)"; return $rc; }
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
if has check; then
  # A hang is a wrong barrier: nothing is timed then
  test_ 120 attention::queries_cast_inside_are_those_of_the_cast || { echo "castq is wrong or hangs: stopping"; exit 1; }
  SIGMASCALE_RANDOM_SHAPES=100 test_ 90 attention::random_shapes
  timeout 90 "$PYTHON" - > "$OUT/python.log" 2>&1 <<'P'
import torch
from sigmascale.torch import Rope
from sigmascale.torch._hopper import Native
from sigmascale.torch._terms import Terms
torch.manual_seed(0)
for heads, kv, d in (64, 8, 128), (32, 32, 64):
    q, k, v = (torch.randn(2, 2048, n, d, device="cuda", dtype=torch.bfloat16) for n in (heads, kv, kv))
    plan = tuple(torch.full((2, kv), x, device="cuda") for x in (0.013, 0.017, 0.011))
    turns = torch.outer(torch.arange(2048, device="cuda"), torch.rand(d // 2, device="cuda"))
    for rope in None, Rope(turns.cos(), turns.sin()), Rope(turns.cos(), turns.sin(), True):
        for causal in False, True:
            a, b = (Native(cast_queries=x).forward(q, k, v, plan, Terms(causal, d**-0.5), rope=rope) for x in (False, True))
            same = torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
            print(heads, kv, d, rope is not None, causal, "same" if same else "DIFFERENT")
            assert same and not a[0].isnan().any()
P
  echo "python rc $? at $(el): $(tail -1 "$OUT/python.log" | cut -c1-200)"
fi
if has bench; then
  rm -f "$OUT/castq-bench.csv"
  for round in $(seq "$ROUNDS"); do
    # Every second round in reverse order
    kernels=cast,cast+castq,e2e+serial,e2e,e2e+castq,cast+rope,e2e+rope,e2e+rope+castq
    [ $((round % 2)) = 0 ] && kernels=$(tr , '\n' <<<"$kernels" | tac | paste -sd,)
    timeout 200 "$CLI" bench attention --shapes "$SHAPES" --seqlens 2048,8192 --kernels "$kernels" --sets 2 --reps 10 --warmup 3 \
      >> "$OUT/castq-bench.csv" 2>> "$OUT/castq-bench.err"
    echo "bench round $round rc $? at $(el)"
  done
fi
peers() { # NAME ARGUMENTS
  local name=$1; shift
  timeout 240 "$PYTHON" benches/peers.py from-bf16 --rounds 3 --milliseconds 25 --shapes 64x8x128,32x8x128,32x32x64 --seqlens 2048,8192 "$@" \
    > "$OUT/$name.csv" 2> "$OUT/$name.err"
  echo "$name rc $? at $(el)"; tail -n 2 "$OUT/$name.err"
}
names="sigmascale sigmascale+castq cudnn+cast fa3+cast cudnn-bf16"
has peers && peers castq-peers --kernels $names
has rope && peers castq-rope --rope --kernels $names
"$PYTHON" - "$OUT" <<'P'
import collections, pathlib, statistics, sys
out = pathlib.Path(sys.argv[1])
def rows(name, ms):
    times = collections.defaultdict(lambda: collections.defaultdict(list))
    path = out / name
    for line in path.read_text().splitlines() if path.exists() else []:
        part = line.split(",")
        if line.startswith(("#", "kernel")) or len(part) <= ms or not part[ms]:
            continue
        times[tuple(part[1:7])][part[0]].append(float(part[ms]))
    return times
bench = rows("castq-bench.csv", 7)
if bench:
    print("\nheads_q,heads_kv,d,len,batch,causal | e2e ms (lo-hi) | castq ms (lo-hi) | gain | PDL | rope ms | rope+castq | gain | cast us GB/s | k,v alone us")
for case, t in bench.items():
    m = lambda k: statistics.median(t[k]) if t.get(k) else float("nan")
    span = lambda k: f"{m(k):.4f} ({min(t[k]):.4f}-{max(t[k]):.4f})" if t.get(k) else "-"
    hq, hkv, d, n, b, _ = map(int, case)
    gbs = 3 * b * n * d * (hq + 2 * hkv) / m("cast") / 1e6
    print(",".join(case), "|", span("e2e"), "|", span("e2e+castq"), f"| {m('e2e') / m('e2e+castq'):.3f} | {m('e2e+serial') / m('e2e'):.3f} |"
          f" {m('e2e+rope'):.4f} | {m('e2e+rope+castq'):.4f} | {m('e2e+rope') / m('e2e+rope+castq'):.3f} | {1e3 * m('cast'):.1f} {gbs:.0f} | {1e3 * m('cast+castq'):.1f}")
for name in ("castq-peers.csv", "castq-rope.csv"):
    peers = rows(name, 7)
    if peers:
        print(f"\n{name}: times of each peer over ours, cast in front / inside")
    for case, t in peers.items():
        ours, inside = t.get("sigmascale", [float("nan")])[0], t.get("sigmascale+castq", [float("nan")])[0]
        print(",".join(case), f"| ours {ours:.4f} inside {inside:.4f} |", " | ".join(f"{k} {v[0] / ours:.3f} / {v[0] / inside:.3f}" for k, v in t.items() if not k.startswith("sigma")))
P
echo "done at $(el)"
