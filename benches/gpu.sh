#!/usr/bin/env bash
# What a machine with NVIDIA GPUs shows, which may have neither network nor Rust: that training on the GPU is right, how
# fast it is, and what NCCL does. Everything ends within 8 minutes.
#
#   CARAVAN=path/to/caravan benches/gpu.sh [RESULTS]   results (default $OUT, else .) get gpu.txt and the metrics
#   benches/gpu.sh build FOLDER                        with Rust: puts the program, the tests of kernels and their
#                                                      timings into FOLDER, which CARAVAN may then name instead
#
# CUDA's libraries are found in the loader's path, in Python environments with NVIDIA's wheels, in /usr/local/cuda, or in
# the folders of CARAVAN_CUDA_LIBRARIES. With a PyTorch that sees the GPU the same model is timed in PyTorch too.
# MODEL, ROWS, LENGTH, SMALL, SMALL_LENGTH and LARGE choose other models (an empty LARGE leaves it out). Exit codes: 0 all was right, 1 something was not, 3 there is no GPU.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=${MODEL:-llama-3.2-1b} rows=${ROWS:-8} length=${LENGTH:-2048}
budget=470 failed=0

build() {
    local folder=$1
    mkdir -p "$folder" && folder=$(cd "$folder" && pwd)
    cd "$here/.." || exit 1
    cargo build --release -p caravan || exit 1
    cargo build --release -p caravan-models --example gpu --test cuda_kernels --message-format json |
        sed -n 's/.*"name":"\(gpu\|cuda_kernels\)".*"executable":"\([^"]*\)".*/\1 \2/p' |
        while read -r name path; do install -m 755 "$path" "$folder/$name"; done
    install -m 755 "${CARGO_TARGET_DIR:-target}/release/caravan" "$folder/caravan"
    for name in caravan gpu cuda_kernels; do
        [ -x "$folder/$name" ] || { echo "gpu.sh: $name was not built" >&2; exit 1; }
    done
    echo "built in $folder: on the machine with a GPU run CARAVAN=$folder benches/gpu.sh"
}

# step SECONDS COMMAND...: runs it with a limit, whatever came before; remembers whether anything failed.
step() {
    local limit=$1 left=$((budget - SECONDS))
    shift
    printf '\n== %s (%s s so far)\n' "$*" "$SECONDS"
    if [ "$left" -lt 10 ]; then
        echo "left out: the time is over"
        failed=1
        return 1
    fi
    timeout "$((limit < left ? limit : left))" "$@" && return
    echo "FAILED, or longer than $limit s: $*"
    failed=1
    return 1
}

# train NAME FLAGS...: trains on random tokens; the metrics go to NAME.jsonl.
train() {
    local name=$1
    shift
    step 150 "$caravan" train --data random --quiet --metrics "$results/$name.jsonl" "$@"
}

# field FILE KEY: the values of a number in the lines of steps.
field() {
    grep '"step":' "$results/$1.jsonl" | sed -n "s/.*\"$2\":\([^,}]*\).*/\1/p"
}

# same NAME NAME: losses that agree to the last digit.
same() {
    if [ -s "$results/$1.jsonl" ] && diff <(field "$1" loss) <(field "$2" loss) >/dev/null; then
        echo "losses of $1 and $2 are the same bits"
    else
        echo "WRONG: losses of $1 and $2 differ"
        failed=1
    fi
}

# close NAME NAME LIMIT: losses whose relative difference is below the limit at every step.
close() {
    paste <(field "$1" loss) <(field "$2" loss) | awk -v limit="$3" -v what="$1 and $2" '
        { d = ($1 - $2) / $2; d = d < 0 ? -d : d; if (d > most) most = d; n++ }
        END { printf "losses of %s: %d steps, largest relative difference %.2e\n", what, n, most
              exit !(n > 0 && most < limit) }' && return
    echo "WRONG: more than $3, or no steps"
    failed=1
}

# speed NAME: tokens/s and MFU of the median step after the first five.
speed() {
    local shape
    shape=$(head -1 "$results/$1.jsonl" | tr ',{' '\n\n' | sed -n 's/^"\(parameters\|layers\|heads\|head_dim\|seq\)":/\1 /p' | tr '\n' ' ')
    field "$1" tokens_per_second | tail -n +6 | sort -g | awk -v shape="$shape" -v name="$1" '
        { rate[NR] = $1 }
        END { n = split(shape, w, " "); for (i = 1; i < n; i += 2) of[w[i]] = w[i + 1]
              if (!NR) { print name ": no step was timed"; exit 1 }
              median = rate[int((NR + 1) / 2)]
              flops = 6 * of["parameters"] + 12 * of["layers"] * of["heads"] * of["head_dim"] * of["seq"]
              printf "%s: %.0f tokens/s, %.0f TFLOP/s (6 N + attention), %.1f%% of 989 TFLOP/s\n",
                     name, median, median * flops / 1e12, 100 * median * flops / 989e12 }' || failed=1
}

# memory NAME: what the device held against what was predicted.
memory() {
    tail -1 "$results/$1.jsonl" | grep -o '"predicted_bytes":[0-9]*' | head -1
    if tail -1 "$results/$1.jsonl" | awk '{
        match($0, /"predicted_memory":\{[^}]*\}/); p = substr($0, RSTART + 19, RLENGTH - 19)
        match($0, /"memory":\{[^}]*\}/); m = substr($0, RSTART + 9, RLENGTH - 9); exit p != m || p == "" }'; then
        echo "memory of $1 is what was predicted, class by class"
    else
        echo "WRONG: memory of $1 is not what was predicted"
        failed=1
    fi
}

run() {
    local program stage
    date -u
    uname -srm
    command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    "$caravan" doctor
    if program="$programs/cuda_kernels" && [ -x "$program" ]; then
        step 120 "$program" --test-threads 4
    fi
    if program="$programs/gpu" && [ -x "$program" ]; then
        step 90 "$program" "$model" "$rows" "$length"
    fi

    small="--model ${SMALL:-32m} --seq ${SMALL_LENGTH:-128} --micro-batch 4 --steps 20 --ranks 1 --threads $(nproc)"
    # Flags are words.
    # shellcheck disable=SC2086
    {
        train cpu $small --stage 0
        for stage in 0 1 2 3; do train "stage-$stage" $small --stage "$stage" --device cuda; done
    }
    close stage-0 cpu 1e-2
    for stage in 1 2 3; do same "stage-$stage" stage-0; done
    memory stage-3

    train timed --model "$model" --seq "$length" --micro-batch "$rows" --steps 20 --ranks 1 --stage 0 --device cuda &&
        { speed timed; memory timed; }
    if [ -n "${LARGE-8b}" ]; then
        train large --model "${LARGE:-llama-3.1-8b}" --seq "$length" --micro-batch 1 --steps 7 --ranks 1 --stage 0 \
            --device cuda --recompute full --offload optimizer && speed large
    fi
    if python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        step 120 python3 "$here/gpu_torch.py" --model "$model" --rows "$rows" --length "$length"
    else
        printf '\nno PyTorch that sees a GPU: no comparison\n'
    fi

    # Two ranks on one GPU show that NCCL is called rightly; their times mean little.
    if "$caravan" doctor | grep -q '^  yes nccl'; then
        for algo in auto native; do
            for operation in all_reduce reduce_scatter all_gather; do
                step 40 "$caravan" bench "$operation" -b 64K -e 16M -f 16 -n 10 -d bfloat16 --ranks 2 --share-gpus \
                    --transport nccl --algo "$algo"
            done
        done
        # shellcheck disable=SC2086
        {
            train shm $small --ranks 2 --stage 3 --device cuda --share-gpus --transport shm
            train nccl $small --ranks 2 --stage 3 --device cuda --share-gpus --transport nccl
        }
        same nccl shm
    else
        printf '\nno NCCL: nothing between ranks\n'
    fi
    printf '\nall done in %s s, %s\n' "$SECONDS" "$([ $failed = 0 ] && echo 'nothing failed' || echo 'SOMETHING FAILED')"
    return $failed
}

if [ "${1:-}" = build ]; then
    [ $# = 2 ] || { echo "gpu.sh build FOLDER" >&2; exit 2; }
    build "$2"
    exit
fi
results=${1:-${OUT:-.}}
caravan=${CARAVAN:-$here/../target/release/caravan}
[ -d "$caravan" ] && caravan=$caravan/caravan
[ -x "$caravan" ] || { echo "gpu.sh: there is no program $caravan: set CARAVAN to it" >&2; exit 2; }
caravan=$(cd "$(dirname "$caravan")" && pwd)/$(basename "$caravan")
programs=$(dirname "$caravan")
if [ -z "${CARAVAN_EMULATED_DEVICE:-}" ] && ! "$caravan" doctor --json | grep -q '"gpus":\[{'; then
    echo "gpu.sh: this machine has no GPU that can be used: 'caravan doctor' says" >&2
    "$caravan" doctor | sed -n '/^GPUs/,$p' >&2
    exit 3
fi
mkdir -p "$results" && results=$(cd "$results" && pwd)
# Kernels that are compiled here stay here.
export CARAVAN_CACHE=${CARAVAN_CACHE:-$results/cache}
run 2>&1 | tee "$results/gpu.txt"
