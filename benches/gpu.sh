#!/usr/bin/env bash
# What a machine with NVIDIA GPUs shows, which may have neither network nor Rust: that kernels and training on the GPU
# are right, how fast they are, and what NCCL does. It needs the program and this repository, and ends within 8 minutes.
#
#   benches/gpu.sh [RESULTS]     results (default $OUT, else .) get gpu.txt, checks.json, kernels.json, metrics.jsonl
#
# CARAVAN is the program, by default target/release/caravan; to be carried to the machine it is best stripped, which makes it
# much smaller, and built without MPI, which it would need there. CUDA's libraries are found in the loader's path, in Python
# environments with NVIDIA's wheels, in /usr/local/cuda, or in the folders of CARAVAN_CUDA_LIBRARIES. With a PyTorch that
# sees the GPU (PYTHON, else the Pythons of the path, of the environment, and beside those libraries) the same model is
# timed in PyTorch too. MODEL, ROWS, LENGTH, SMALL, SMALL_LENGTH and LARGE choose other models (an empty LARGE leaves it
# out), ONLY some of the parts: check train speed kernels wgmma nccl graphs torch large torch-bf16. What the time does not
# suffice for is skipped. CARAVAN_CACHE keeps compiled kernels.
# Exit codes: 0 all was right, 1 something was not, 2 wrong usage, 3 there is no GPU.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=${MODEL:-llama-3.2-1b} rows=${ROWS:-} length=${LENGTH:-2048} large=${LARGE-llama-2-7b}
# What is shown comes before what is compared, which may take all the time that is left.
parts="check train speed kernels wgmma nccl graphs torch large torch-bf16"
wire=${WIRE:-nccl}
budget=455 failed=0 hung= child= torch= verdicts=()

# verdict TEXT: a line of the list at the end.
verdict() {
    verdicts+=("$1")
    echo "$1"
}

# wrong TEXT: the same, and the run has failed.
wrong() {
    failed=1
    verdict "WRONG  $1"
}

# limited SECONDS COMMAND...: with a limit, and so that what stops this script stops the command too.
limited() {
    local limit=$1
    shift
    # What does not end when it is asked to is killed.
    timeout -k 15 "$limit" "$@" &
    child=$!
    wait "$child"
}

# stop STATUS: ends the command that runs, and then this script.
stop() {
    trap - INT TERM
    [ -n "$child" ] && kill "$child" 2>/dev/null && wait "$child"
    exit "$1"
}

# step SECONDS COMMAND...: runs it with a limit, whatever came before.
step() {
    local limit=$1 left=$((budget - SECONDS)) status
    shift
    printf '\n== %s (%s s so far)\n' "${*//$caravan/caravan}" "$SECONDS"
    if [ "$left" -lt 10 ]; then
        verdict "skip   no time is left for ${*//$caravan/caravan}"
        return 1
    fi
    local most=$((limit < left ? limit : left)) began=$SECONDS
    limited "$most" "$@" && return
    status=$?
    # What had to be killed did not end when it was asked to.
    [ "$status" = 137 ] && [ $((SECONDS - began)) -ge "$most" ] && status=124
    if [ "$status" = 124 ] && [ "$left" -lt "$limit" ]; then
        verdict "skip   the time did not suffice for ${*//$caravan/caravan}"
        return 1
    fi
    if [ "$status" = 2 ] && [ -n "${refusable:-}" ]; then
        verdict "skip   this machine is refused, as said above: ${*//$caravan/caravan}"
        return 1
    fi
    [ "$status" = 124 ] && hung=yes status="longer than $limit s"
    wrong "failed ($status): ${*//$caravan/caravan}"
    return 1
}

# train SECONDS NAME FLAGS...: trains on random tokens; the metrics go to NAME.jsonl.
train() {
    local limit=$1 name=$2
    shift 2
    step "$limit" "$caravan" train --data random --val-fraction 0 --sample 0 --quiet \
        --metrics "$work/$name.jsonl" "$@"
}

# field NAME KEY: the values of a number in the lines of steps.
field() {
    [ -f "$work/$1.jsonl" ] && grep '"step":' "$work/$1.jsonl" | sed -n "s/.*\"$2\":\([^,}]*\).*/\1/p"
}

# same NAME NAME: losses and norms that agree to the last digit.
same() {
    local steps
    steps=$(field "$1" loss | wc -l)
    if [ "$steps" -gt 0 ] && diff <(field "$1" loss) <(field "$2" loss) >/dev/null &&
        diff <(field "$1" grad_norm) <(field "$2" grad_norm) >/dev/null; then
        verdict "ok     losses and gradient norms of $1 and $2 are the same bits in $steps steps"
    else
        wrong "losses or gradient norms of $1 and $2 differ, or there are none"
    fi
}

# close NAME NAME LIMIT LIMIT: losses whose relative difference is below the first limit at every step, and gradient norms
# whose is below the second one in the first five: nothing can be learned from random tokens, so that losses say little of
# gradients, and later roundings have led to other weights, with norms of their own.
close() {
    local text
    if text=$(paste <(field "$1" loss) <(field "$2" loss) <(field "$1" grad_norm) <(field "$2" grad_norm) |
        awk -v limit="$3" -v norm_limit="$4" -v what="$1 and $2" '
        function apart(x, y) { return y == 0 ? 1 : x < y ? (y - x) / y : (x - y) / y }
        NF == 4 { n++; d = apart($1, $2); if (d > most) most = d
                  if (n <= 5) { d = apart($3, $4); if (d > norm) norm = d } }
        NF != 4 { uneven = 1 }
        END { printf "losses of %s: %d steps, largest relative difference %.2e, below %s; ", what, n, most, limit
              printf "gradient norms of the first: %.2e, below %s\n", norm, norm_limit
              exit !(n > 0 && !uneven && most < limit && norm < norm_limit) }'); then
        verdict "ok     $text"
    else
        wrong "not so: $text"
    fi
}

# speed NAME: tokens/s and MFU of the median step after the first five, or of the last if there are no more.
speed() {
    local flops text
    flops=$(sed -n '1s/.*"flops_per_token":\([^,}]*\).*/\1/p' "$work/$1.jsonl")
    if text=$(field "$1" tokens_per_second | awk -v flops="$flops" -v name="$1" -v peak="$peak" '
        { rate[NR] = $1 }
        END { if (!NR || !flops) { print name ": no step was timed, or flops_per_token is not told"; exit 1 }
              first = NR > 5 ? 6 : NR
              for (i = first; i <= NR; i++) { j = i; x = rate[i]
                  while (j > first && rate[j - 1] > x) { rate[j] = rate[j - 1]; j-- }; rate[j] = x }
              median = rate[first + int((NR - first) / 2)]
              printf "%s: %.0f tokens/s, %.1f TFLOP/s (6 N + attention)", name, median, median * flops / 1e12
              if (peak) printf ", MFU %.1f%% of %.0f TFLOP/s", 100 * median * flops / peak, peak / 1e12
              print "" }'); then
        verdict "       $text"
    else
        wrong "$text"
    fi
}

# memory NAME: what the device held against what was predicted, class by class.
memory() {
    local text
    if text=$(tail -1 "$work/$1.jsonl" | awk '{
        match($0, /"predicted_memory":\{[^}]*\}/); p = substr($0, RSTART + 19, RLENGTH - 19)
        match($0, /"memory":\{[^}]*\}/); m = substr($0, RSTART + 9, RLENGTH - 9)
        print p == m ? m : p " was predicted, held was " m; exit p != m || p == "" }'); then
        verdict "ok     memory of $1 is what was predicted: $text"
    else
        wrong "memory of $1: $text"
    fi
}

# evaluated: the mean loss of the saved model on the GPU and on the processor, which agree to four digits.
evaluated() {
    local device text losses=()
    head -c 4000 "$here/../README.md" >"$work/text.txt"
    for device in cpu cuda; do
        step 60 "$caravan" eval --model "$work/model" --data "$work/text.txt" --seq "${SMALL_LENGTH:-128}" \
            --tokenizer bytes --dtype f32 --ranks 1 --device "$device" --json >"$work/eval.json" || return
        cat "$work/eval.json"
        losses+=("$(sed -n 's/.*"loss": *\([^,}]*\).*/\1/p' "$work/eval.json")")
    done
    if text=$(awk -v a="${losses[0]}" -v b="${losses[1]}" 'BEGIN {
        d = (a - b) / a; d = d < 0 ? -d : d
        printf "evaluation on the processor %s, on the GPU %s, relative difference %.2e", a, b, d
        exit !(a > 0 && d < 1e-4) }'); then
        verdict "ok     $text"
    else
        wrong "not so: $text"
    fi
}

# torch_python: the first one whose PyTorch sees a GPU.
torch_python() {
    local file each
    for each in "${PYTHON:-}" python3 python "${VIRTUAL_ENV:-}/bin/python3" "${CONDA_PREFIX:-}/bin/python3" \
        $("$caravan" doctor --json | grep -o '"[^"]*/lib/python3[^"]*"' | sed 's/^"//; s/\/lib\/python3.*/\/bin\/python3/' | sort -u); do
        file=$(command -v "$each" 2>/dev/null) || continue
        timeout -k 5 30 "$file" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null && echo "$file" && return
    done
    return 1
}

# against_torch WEIGHTS: the same model in PyTorch, in the same call on the same GPU.
against_torch() {
    local with ours theirs mode limit weights=$1
    if ! grep -q "\"$model\":" "$here/gpu_torch.py"; then
        verdict "skip   PyTorch: gpu_torch.py does not know $model"
        return
    fi
    if [ $((budget - SECONDS)) -lt 40 ]; then
        verdict "skip   no time is left for PyTorch with weights in $weights"
        return
    fi
    with=${torch:-$(torch_python)}
    [ -n "$with" ] || { verdict "skip   PyTorch: no Python here has one that sees a GPU"; return; }
    torch=$with
    # What does not fit the memory does so with half of the sequences.
    for mode in "" --eager "--rows $(((rows + 1) / 2))" "--eager --rows $(((rows + 1) / 2))"; do
        limit=$((budget - SECONDS))
        [ "$limit" -gt 10 ] || break
        # No mode is no word, and of two flags the last counts.
        # shellcheck disable=SC2086
        limited "$((limit < 140 ? limit : 140))" "$with" "$here/gpu_torch.py" --model "$model" --rows "$rows" \
            --length "$length" --weights "$weights" ${peak:+--peak "$peak"} $mode >"$work/torch.txt" 2>"$work/torch.err" && break
        echo "PyTorch failed${mode:+ also with $mode}: $(tail -1 "$work/torch.err")"
    done
    cat "$work/torch.txt"
    ours=$(printf '%s\n' "${verdicts[@]}" | sed -n 's/.*timed: \([0-9]*\) tokens.*/\1/p')
    theirs=$(sed -n 's/.* \([0-9]*\) tokens\/s.*/\1/p' "$work/torch.txt")
    if [ -n "$ours" ] && [ -n "$theirs" ]; then
        verdict "       PyTorch${mode:+ ($mode)}, weights in $weights: $(awk -v a="$ours" -v b="$theirs" 'BEGIN { printf "%d tokens/s; ours are %.2f times as many", b, a / b }')"
        verdict "       $(tail -1 "$work/torch.txt")"
    else
        verdict "skip   PyTorch: it did not end well, or there is nothing to compare it with"
    fi
}

# A small model, whose kernels are short, and the one that is timed, with CUDA graphs and without: the same bits, and which
# is faster.
with_graphs() {
    local switch
    if [ -n "${CARAVAN_EMULATED_DEVICE:-}" ]; then
        verdict "skip   CUDA graphs: emulated GPUs have none"
        return
    fi
    for switch in off on; do
        # shellcheck disable=SC2086
        train 40 "small-graphs-$switch" $small --steps 40 --ranks 1 --stage 0 --device cuda --cuda-graphs $switch &&
            speed "small-graphs-$switch"
    done
    same small-graphs-on small-graphs-off
    for switch in off on; do
        train 60 "graphs-$switch" --model "$model" --seq "$length" --micro-batch "$rows" --steps 10 --ranks 1 --stage 0 \
            --threads "$(nproc)" --device cuda --cuda-graphs $switch && speed "graphs-$switch"
    done
    same graphs-on graphs-off
}

# Two ranks on one GPU show that NCCL is called rightly; their times mean little.
over_nccl() {
    local algo operation found hung=
    found=$("$caravan" doctor | sed -n 's/^  \(yes\|no \) nccl */\1/p')
    if [ "${found:0:3}" != yes ]; then
        verdict "skip   NCCL: ${found#no }"
        return
    fi
    for algo in auto native; do
        for operation in all_reduce reduce_scatter all_gather; do
            [ "$algo-$operation" = native-all_gather ] && continue # the same
            step 30 "$caravan" bench "$operation" -b 64K -e 16M -f 16 -n 10 -d "${TYPE:-bfloat16}" --ranks 2 --share-gpus \
                --transport "$wire" --algo "$algo" && verdict "ok     $operation ($algo) of 2 ranks over NCCL on one GPU"
            # What hangs once would hang every time, and take all the time that there is.
            [ -z "$hung" ] || return
        done
    done
    if [ "$wire" = nccl ]; then
        # Flags are words.
        # shellcheck disable=SC2086
        train 40 shm $small --steps 20 --ranks 2 --stage 3 --device cuda --share-gpus --transport shm &&
            train 40 nccl $small --steps 20 --ranks 2 --stage 3 --device cuda --share-gpus --transport nccl && same nccl shm
        [ -z "$hung" ] || return
    fi
    for operation in broadcast reduce gather scatter all_to_all send_recv; do
        step 30 "$caravan" bench "$operation" -b 64K -e 1M -f 16 -n 10 -d "${TYPE:-bfloat16}" --ranks 2 --share-gpus \
            --transport "$wire" && verdict "ok     $operation of 2 ranks over NCCL on one GPU"
        [ -z "$hung" ] || return
    done
}

run() {
    local stage part
    date -u
    uname -srm
    command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    "$caravan" doctor
    small="--model ${SMALL:-32m} --seq ${SMALL_LENGTH:-128} --micro-batch 4 --threads $(nproc)"
    for part in ${ONLY:-$parts}; do
        case $part in
        check)
            step 150 "$caravan" bench kernels --check --json "$results/checks.json" &&
                verdict "ok     every kernel agrees with its definition"
            ;;
        train)
            # shellcheck disable=SC2086
            train 60 cpu $small --steps 20 --ranks 1 --stage 0
            for stage in 0 1 2 3; do
                # shellcheck disable=SC2086
                train 60 "stage-$stage" $small --steps 20 --ranks 1 --stage "$stage" --device cuda
            done
            close stage-0 cpu 1e-2 1e-2
            for stage in 1 2 3; do same "stage-$stage" stage-0; done
            for stage in 0 3; do memory "stage-$stage"; done
            # One rank shards nothing, so these are the same program. Two ranks do, here with what goes through the host.
            for stage in 0 1 2 3; do
                # shellcheck disable=SC2086
                train 40 "two-$stage" $small --steps 10 --ranks 2 --stage "$stage" --device cuda --share-gpus --transport shm
            done
            for stage in 1 2 3; do same "two-$stage" two-0; done
            for stage in 0 3; do memory "two-$stage"; done
            # What saves memory leaves the bits as they are, in sums over micro-batches too.
            # shellcheck disable=SC2086
            train 60 twice $small --steps 5 --accumulate 2 --ranks 1 --stage 0 --device cuda
            # shellcheck disable=SC2086
            train 60 saving $small --steps 5 --accumulate 2 --ranks 1 --stage 3 --device cuda --recompute full \
                --offload optimizer && same saving twice && memory saving
            # shellcheck disable=SC2086
            train 60 f32-cpu $small --steps 5 --ranks 1 --stage 0 --dtype f32
            # shellcheck disable=SC2086
            train 60 f32 $small --steps 5 --ranks 1 --stage 0 --dtype f32 --device cuda --save "$work/model" &&
                close f32 f32-cpu 1e-4 1e-3 && evaluated
            ;;
        speed)
            train 90 timed --model "$model" --seq "$length" --micro-batch "$rows" --steps 20 --ranks 1 --stage 0 \
                --threads "$(nproc)" --device cuda && speed timed && memory timed
            ;;
        torch) against_torch f32 ;;
        # Less work and less precise than ours: the fastest that PyTorch can be.
        torch-bf16) against_torch bf16 ;;
        kernels)
            step 60 "$caravan" bench kernels --model "$model" --micro-batch "$rows" --seq "$length" \
                --json "$results/kernels.json"
            ;;
        wgmma)
            # Only Hopper has these instructions, and not every model the heads for them.
            if refusable=yes train 90 wgmma --model "$model" --seq "$length" --micro-batch "$rows" --steps 20 --ranks 1 \
                --stage 0 --threads "$(nproc)" --device cuda --attention wgmma; then
                speed wgmma
                [ ! -f "$work/timed.jsonl" ] || close wgmma timed 1e-2 1e-2
            fi
            ;;
        large)
            [ -n "$large" ] || continue
            # A machine may have too little memory for the optimizer's state, and be slow to lock so much of it.
            refusable=yes train "$budget" large --model "$large" --seq "$length" --micro-batch 1 --steps 4 --ranks 1 --stage 0 \
                --threads "$(nproc)" --device cuda --recompute full --offload optimizer && speed large && memory large
            ;;
        graphs) with_graphs ;;
        nccl) over_nccl ;;
        *)
            echo "gpu.sh: ONLY names parts of: $parts" >&2
            return 2
            ;;
        esac
    done
    for part in "$work"/*.jsonl; do
        [ -f "$part" ] && printf '{"file": "%s"}\n' "$(basename "$part")" && cat "$part"
    done >"$results/metrics.jsonl"
    printf '\n== what was shown\n'
    printf '%s\n' "${verdicts[@]}"
    printf '\nall done in %s s, %s\n' "$SECONDS" "$([ $failed = 0 ] && echo 'nothing failed' || echo 'SOMETHING FAILED')"
    return $failed
}

results=${1:-${OUT:-.}}
caravan=${CARAVAN:-$here/../target/release/caravan}
[ -x "$caravan" ] || { echo "gpu.sh: there is no program $caravan: set CARAVAN to it" >&2; exit 2; }
caravan=$(cd "$(dirname "$caravan")" && pwd)/$(basename "$caravan")
"$caravan" --version >/dev/null || { echo "gpu.sh: $caravan does not run on this machine" >&2; exit 2; }
if [ -z "${CARAVAN_EMULATED_DEVICE:-}" ] && ! "$caravan" doctor --json | grep -q '"gpus":\[{'; then
    echo "gpu.sh: this machine has no GPU that can be used: 'caravan doctor' says" >&2
    "$caravan" doctor | sed -n '/^GPUs/,$p' >&2
    exit 3
fi
# Dense 16-bit FLOP/s of the GPU, given or by its data sheet, if that is known.
peak=${PEAK:-}
[ -n "$peak" ] || peak=$("$caravan" doctor --json | sed -n 's/.*"dense_16_bit_flops":\([0-9.e+]*\).*/\1/p')
# Sixteen sequences at once, so that what does not grow with them, as the optimizer's work, is little of a step. With less
# memory than an H200's, PyTorch, whose logits are f32 in its loss, needs a smaller micro-batch.
if [ -z "$rows" ]; then
    memory=$("$caravan" doctor --json | sed -n 's/.*"memory":\([0-9]*\),"multiprocessors".*/\1/p')
    rows=$((${memory:-0} > 130000000000 ? 16 : 8))
fi
mkdir -p "$results" && results=$(cd "$results" && pwd) || exit 2
work=$(mktemp -d) || exit 2
# Without anybody who uses it a driver lets go of its GPUs, and takes seconds to get them again for every program.
keeper=
command -v nvidia-smi >/dev/null && { nvidia-smi --loop=600 >/dev/null 2>&1 & keeper=$!; }
trap '[ -z "$keeper" ] || kill "$keeper"; rm -rf "$work"' EXIT
# What Python knows and the program may not find by itself.
for each in "${PYTHON:-}" python3 python; do
    found=$("$each" -c 'import glob, nvidia; print(":".join(lib for path in nvidia.__path__ for lib in glob.glob(path + "/*/lib")))' \
        2>/dev/null) && CARAVAN_CUDA_LIBRARIES=${CARAVAN_CUDA_LIBRARIES:+$CARAVAN_CUDA_LIBRARIES:}$found
done
export CARAVAN_CUDA_LIBRARIES=${CARAVAN_CUDA_LIBRARIES:-}
# Kernels are compiled once for all parts.
export CARAVAN_CACHE=${CARAVAN_CACHE:-$work/cache}
# What `run` prints is in the file when this ends: `$!` after `run` would be a process of its own.
exec 3> >(exec tee -i "$results/gpu.txt")
tee=$!
trap 'stop 130' INT
trap 'stop 143' TERM
run >&3 2>&1
status=$?
exec 3>&-
wait "$tee"
exit $status
