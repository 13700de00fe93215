#!/usr/bin/env bash
# One call of the next session's GPU time for the training part. Nothing is built here.
#
#   STAGES="tests bench peers" GPU_TESTS=.carry/gpu CLI=.carry/sigmascale PYTHONPATH=.carry/site bash .carry/gpu-train.sh
#
# Run in the repository root. GPU_TESTS: binary of tests/gpu; CLI: the sigmascale command (features cuda, cli); PYTHONPATH: the unpacked
# wheel. Logs go to $OUT, a short table is printed last. Stages and about how long they take (one H200):
#   tests    30 s   the new GPU tests, each with a limit of its own (a wait for ever shows as "124")
#   bench    60 s   backward plain, in parts, in a ring, with dQ in FP8: ms and memory
#   fixed    40 s   fixed costs of a call by a fit over lengths, for the hypotheses beside it
#   peers    90 s   32q 32kv and d 64 beside cuDNN BF16 from Python, in parts of 16, 32, 64 MiB
#   profile 120 s   train_gpt at 125M and 1B, BF16 and FP8: tokens a second, kernels of five steps
#   seeds   220 s   300 steps of 125M on real text, BF16 and FP8, 3 seeds
#   bias    220 s   300 steps of 125M on repeated text, BF16, FP8 and 0.1.0's sums, 2 seeds
#   random  240 s   5,000 random backward calls over 8 processes
#   sanitize 180 s  memcheck, racecheck, synccheck, initcheck of small backward calls
set -uo pipefail
: "${OUT:=/tmp/out}" "${STAGES:=tests bench peers}" "${PYTHON:=python3}" "${TEXT:=src}"
mkdir -p "$OUT"
table=$OUT/table.txt
: > "$table"
say() { echo "$*" | tee -a "$table" >/dev/null; }
has() { [[ " $STAGES " == *" $1 "* ]]; }
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader | head -1 | sed 's/^/device: /' >> "$table"

if has tests; then
    for t in sequences_out_of_order_end the_largest_p_of_each_row_is_kept parts_have_the_gradients_of_the_whole_call \
        dq_in_fp8_is_the_cpus sums_in_a_ring_are_those_of_all gradients_are_the_cpus sequences_may_change_between_replays; do
        timeout 60 "$GPU_TESTS" "attention::$t" > "$OUT/test-$t.log" 2>&1
        rc=$?
        say "test $t: rc $rc $(grep -m1 -E 'panicked|assert|error' "$OUT/test-$t.log" | cut -c1-160)"
    done
fi

if has bench; then
    : > "$OUT/bench.csv"
    shapes=${SHAPES:-32x32x128,32x8x128,32x32x64}
    # Variants take turns, three rounds, so that a clock that drifts moves all alike.
    for round in 1 2 3; do
        for way in "" "--sums 16" "--sums 32" "--sums 64" "--ring" "--dq-fp8" "--dq-fp8 --sums 32"; do
            timeout 60 "$CLI" bench attention --backward --shapes "$shapes" --seqlens "${SEQLENS:-2048,8192}" --reps 8 $way 2>>"$OUT/bench.err" |
                grep -v '^#' | sed "s/^/${round},${way:-plain},/" >> "$OUT/bench.csv"
        done
    done
    "$PYTHON" - "$OUT/bench.csv" >> "$table" <<'P'
import statistics, sys
rows = {}
for line in open(sys.argv[1]):
    c = line.strip().split(",")
    if len(c) < 13 or c[2] == "kernel" or c[3] not in ("bwd", "fwd_bwd"): continue
    rows.setdefault((c[2], c[3], "x".join(c[4:7]), c[7], c[9]), {}).setdefault(c[1], []).append((float(c[10]), float(c[12])))
for key, ways in rows.items():
    base = statistics.median(ms for ms, _ in ways["plain"]) if "plain" in ways else None
    each = "; ".join(f"{w} {statistics.median(m for m, _ in r):.3f} ms ({statistics.median(m for m, _ in r) / base:.3f}) {r[0][1]:.0f} MiB" for w, r in ways.items() if base)
    print("bench", *key, "causal" if key[4] == "1" else "full", "|", each)
P
fi

if has fixed; then
    # What a call costs beside its tiles: the intercept of milliseconds over tiles of keys, of 16384 tokens. Hypotheses for 32 KV heads at 2k,
    # where 0.37 ms are cuDNN's intercept and 0.74 ours (fit of the record of 2026-11-23): A sums of dQ through DRAM, 0.13 (--ring removes them);
    # B blocks that begin and end, 31 a multiprocessor (bwd of 32 KV heads less bwd of 8); C the cast, 11 B an element (e2e,fwd less fp8,fwd).
    for round in 1 2; do
        timeout 100 "$CLI" bench attention --backward --shapes 32x32x128,32x8x128 --seqlens 1024,2048,4096,8192 --reps 8 2>>"$OUT/fixed.err" |
            grep -v '^#' >> "$OUT/fixed.csv"
    done
    "$PYTHON" - "$OUT/fixed.csv" >> "$table" <<'P'
import statistics, sys
rows = {}
for line in open(sys.argv[1]):
    c = line.strip().split(",")
    if len(c) < 11 or c[0] == "kernel": continue
    rows.setdefault((c[0], c[1], c[3], c[7]), {}).setdefault(int(c[5]), []).append(float(c[8]))
for key, times in sorted(rows.items()):
    # Tiles of 64 queries that a block of 128 keys sees, on average, times blocks: what the time is linear in.
    x = [(n // 64 + 2) / 2 if key[3] == "1" else n // 64 for n in times]
    y = [statistics.median(t) for t in times.values()]
    mx, my = statistics.mean(x), statistics.mean(y)
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)
    print("fixed", *key[:2], key[2], "KV heads", "causal" if key[3] == "1" else "full", f"{my - slope * mx:.3f} ms + {slope:.4f} ms a tile;", "ms:", *(f"{n}: {b:.3f}" for n, b in zip(times, y)))
P
fi

if has peers; then
    timeout 200 "$PYTHON" benches/peers.py training --shapes 32x32x128,32x32x64 --seqlens ${SEQLENS:-2048,8192} --rounds 4 --milliseconds 40 \
        --kernels sigmascale sigmascale+parts16 sigmascale+parts32 sigmascale+parts64 sigmascale+ring cudnn-bf16 > "$OUT/peers.csv" 2> "$OUT/peers.err"
    timeout 60 "$PYTHON" benches/peers.py training --shapes 32x32x128 --seqlens 16384 --rounds 3 >> "$OUT/peers.csv" 2>> "$OUT/peers.err"
    grep -v '^#\|^kernel' "$OUT/peers.csv" | awk -F, '{print "peers", $1, $2"x"$3"x"$4, $5, ($7 ? "causal" : "full"), $8 " ms", $14 " MiB"}' >> "$table"
fi

if has profile; then
    for size in 125m:4:60 1b:2:40; do
        IFS=: read -r name batch steps <<< "$size"
        for way in bf16 fp8 bf16 fp8; do
            timeout 100 "$PYTHON" python/examples/train_gpt.py --text "$TEXT" --size "$name" --seq-len 4096 --batch "$batch" --steps "$steps" --every 50 \
                --attention "$way" --log "$OUT/$name-$way.jsonl" > "$OUT/$name-$way.log" 2>&1
            say "train $name $way: $(tail -1 "$OUT/$name-$way.jsonl" 2>/dev/null | grep -o '"tokens_per_second.*' | cut -c1-80)"
        done
        for way in bf16 fp8; do
            timeout 60 "$PYTHON" python/examples/train_gpt.py --text "$TEXT" --size "$name" --seq-len 4096 --batch "$batch" --steps 30 --every 50 \
                --attention "$way" --log /dev/null --profile "$OUT/profile-$name-$way.csv" > "$OUT/profile-$name-$way.log" 2>&1
            say "profile $name $way: $(head -1 "$OUT/profile-$name-$way.csv" 2>/dev/null)"
        done
        # What FP8 has and BF16 has not, and the other way round: kernels by name, milliseconds a step.
        "$PYTHON" - "$OUT/profile-$name-bf16.csv" "$OUT/profile-$name-fp8.csv" >> "$table" <<'P'
import csv, sys
def read(f):
    rows = csv.reader((l for l in open(f) if not l.startswith("#")), quotechar="'")
    next(rows)
    return {r[2][:90]: (float(r[0]), float(r[1])) for r in rows}
a, b = (read(f) for f in sys.argv[1:])
diff = sorted(((b.get(k, (0, 0))[0] - a.get(k, (0, 0))[0], b.get(k, (0, 0))[1] - a.get(k, (0, 0))[1], k) for k in {*a, *b}), key=lambda r: -abs(r[0]))
for ms, n, k in diff[:14]: print(f"  fp8 - bf16: {ms:+8.3f} ms {n:+6.1f} launches a step  {k}")
P
    done
fi

seeds() { # name, texts, ways, seeds
    "$PYTHON" python/examples/train_seeds.py --text "$TEXT" --out "$OUT/../seeds" --texts "$2" --ways "$3" --seeds "$4" --steps 300 \
        --size 125m --seq-len 4096 --batch 4 --lr 6e-4 > "$OUT/$1.txt" 2> "$OUT/$1.err"
    sed -n '/^| text/,$p' "$OUT/$1.txt" >> "$table"
}
has seeds && PYTHONPATH=${PYTHONPATH:-}:python/examples seeds seeds text bf16,fp8 0,1,2
has bias && PYTHONPATH=${PYTHONPATH:-}:python/examples seeds bias repeated bf16,fp8,fp8-2048 0,1

if has random; then
    for p in 0 1 2 3 4 5 6 7; do
        SIGMASCALE_RANDOM_BACKWARD=625 SIGMASCALE_RANDOM_SEED=$((100000 + 625 * p)) timeout 400 "$GPU_TESTS" attention::random_backward_calls \
            > "$OUT/random-$p.log" 2>&1 &
        pids[p]=$!
    done
    bad=0
    for p in 0 1 2 3 4 5 6 7; do wait "${pids[p]}" || { bad=$((bad + 1)); say "random $p: $(grep -m1 panicked -A1 "$OUT/random-$p.log" | tr '\n' ' ' | cut -c1-300)"; }; done
    say "random: 8 x 625 backward calls, $bad processes failed"
fi

if has sanitize; then
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
    [ -z "$sanitizer" ] && say "sanitize: no compute-sanitizer on this machine"
    for tool in memcheck initcheck synccheck racecheck; do
        [ -z "$sanitizer" ] && break
        for t in random_backward_calls sequences_out_of_order_end; do
            SIGMASCALE_EVERY_LANE=1 SIGMASCALE_RANDOM_BACKWARD=3 timeout 45 "$sanitizer" --tool $tool --error-exitcode 1 "$GPU_TESTS" "attention::$t" \
                > "$OUT/sanitize-$tool-$t.log" 2>&1
            say "sanitize $tool $t: rc $? $(tail -1 "$OUT/sanitize-$tool-$t.log" | cut -c1-100)"
        done
    done
fi
# At most 8 files come back: one archive of the logs beside the table.
tar -C "$OUT" --exclude=logs.tgz --exclude=table.txt -czf "$OUT/../logs.tgz" . && find "$OUT" -mindepth 1 ! -name table.txt -delete; mv "$OUT/../logs.tgz" "$OUT/logs.tgz"
cat "$table"
