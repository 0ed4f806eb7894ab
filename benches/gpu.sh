#!/usr/bin/env bash
# What a machine with NVIDIA GPUs shows, which may have neither network nor Rust: that kernels and training on the GPU
# are right, how fast they are, and what NCCL does. It needs the program and this repository, and ends within 8 minutes.
#
#   benches/gpu.sh [RESULTS]     results (default $OUT, else .) get gpu.txt, checks.json, kernels.json, metrics.jsonl, each of
#                                which is true at any moment, as nobody knows how long the machine is there, and at the end
#                                gpu_NAME_DATE.md, for benches/results
#
# These are all but memcheck.txt (below), as from a machine that is lent only a few files may come back. What a kernel that
# fails leaves to other processes is "not run" in checks.json, which is of the first, and in gpu.txt as they run it.
#
# CARAVAN is the program, by default target/release/caravan; to be carried to the machine it is best stripped, which makes it
# much smaller, and built without MPI, which it would need there. CUDA's libraries are found in the loader's path, in Python
# environments with NVIDIA's wheels, in /usr/local/cuda, or in the folders of CARAVAN_CUDA_LIBRARIES. With a PyTorch that
# sees the GPU (PYTHON, else the Pythons of the path, of the environment, and beside those libraries) the same model is
# timed in PyTorch too. MODEL, ROWS, LENGTH, SMALL, SMALL_LENGTH, LARGE and LARGE_ROWS choose other models (an empty LARGE
# leaves it out), STEPS how many of the small one are compared (20), TEXT how many bytes of README it is trained and evaluated on
# where tokens are not random (32 sequences, or 4000), ONLY some of the parts:
#
#   check train more speed kernels torch nccl graphs mma large torch-bf16
#
# of which train is of bf16 and the stages, and more of other types, of losses that are scaled until steps are skipped, and of
# trainings that evaluate, stop and go on. BUDGET is the time in seconds (455); what it does not suffice for is skipped.
# WIRE and TYPE are the transport and the elements of what is measured between ranks (nccl, bfloat16), PATIENCE after how many
# seconds a check counts as hanging (60), PEAK the FLOP/s of a GPU that is not known here, COMMIT the version of a copy without
# git.
# CARAVAN_CACHE keeps compiled kernels. Where compute-sanitizer is in the path or in /usr/local/cuda*/bin, the first check
# that fails is repeated under it (memcheck.txt).
# Of several GPUs one is taken: the first of CUDA_VISIBLE_DEVICES, else CUDA's first.
# Exit codes: 0 all was right, 1 something was not, 2 wrong usage, 3 there is no GPU, or none that is new enough.
set -uo pipefail
# What a launcher left in this shell is of no rank that is started here: a step of Slurm's with one task has no second.
for each in $(compgen -e); do
    case $each in
    SLURM_STEP_ID | SLURM_STEPID | OMPI_* | PMI_* | PMIX_* | MPI_LOCAL* | MV2_COMM_WORLD_* | TORCHELASTIC_* | CARAVAN_RANK | \
        CARAVAN_WORLD | CARAVAN_LOCAL_* | CARAVAN_JOB | CARAVAN_TOKEN | CARAVAN_RENDEZVOUS | CARAVAN_BOARD_FD) unset "$each" ;;
    esac
done
visible=${CUDA_VISIBLE_DEVICES-0}
export CUDA_VISIBLE_DEVICES=${visible%%,*}
here=$(cd "$(dirname "$0")" && pwd)
model=${MODEL:-llama-3.2-1b} rows=${ROWS:-} length=${LENGTH:-2048} large=${LARGE-llama-2-7b}
large_rows=${LARGE_ROWS:-8} steps=${STEPS:-20}
# What matters most comes first.
parts="check train more speed kernels torch nccl graphs mma large torch-bf16"
wire=${WIRE:-nccl}
# Seconds for all, and after which a check of one kernel counts as hanging.
budget=${BUDGET:-455} patience=${PATIENCE:-60}
# All processors that this may use, whatever OpenMP is to do with them.
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
failed=0 child='' warming='' running='' outcome='' stalled='' stuck='' blocked=0 hangs=0 sanitized='' verdicts=()
# shellcheck source=benches/gpu_steps.sh
. "$here/gpu_steps.sh"
# shellcheck source=benches/gpu_metrics.sh
. "$here/gpu_metrics.sh"

# cases FILE STATE: the names of the checks in this state.
cases() {
    [ -f "$1" ] && awk -F'"' -v state="$2" '$2 == "case" { name = $4 } $2 == "state" && $4 == state { print name }' "$1"
}

# checks NAME SECONDS WORDS...: every kernel that the words choose against its definition. A kernel that fails may leave a process
# without its GPU, and one that hangs has to be ended with its process: the others are for another one.
checks() {
    local name=$1 limit=$2 fine=yes file rest known=-1 each suspect hung=0 patience=$patience
    shift 2
    file=$results/$name.json
    while :; do
        rm -f "$file"
        watched=$file step "$limit" "$caravan" bench kernels --check "$@" --json "$file" || fine=
        [ -n "$fine" ] && return
        for each in $(cases "$file" wrong); do
            wrong "check of $each: $(awk -F'"' -v each="$each" \
                '$2 == "case" { here = $4 == each } here && list { print $2; exit } here && $2 == "wrong" { list = 1 }' "$file")"
        done
        [ "$outcome" = skip ] && return 1
        for each in $(cases "$file" "not ended"); do wrong "check of $each: it did not end"; done
        mapfile -t rest < <(cases "$file" "not run")
        # After the one that took the GPU away there was no other.
        suspect=$(cases "$file" "not ended")
        [ -n "$suspect" ] || suspect=$(cases "$file" wrong | if [ ${#rest[@]} = 0 ]; then head -n 1; else tail -n 1; fi)
        memcheck "$suspect"
        [ "$outcome" = hung ] && hung=$((hung + 1))
        # Each process gets further than the one before it; what hangs takes the time of all else.
        if [ ${#rest[@]} = 0 ] || [ ${#rest[@]} = "$known" ] || [ "$hung" -ge 3 ]; then return 1; fi
        known=${#rest[@]}
        # Kernels have been compiled once any check has begun.
        grep -qE '"state": "(ok|wrong|not ended)"' "$file" && patience=$((patience < 20 ? patience : 20))
        set -- "${rest[@]}"
        # What is lent only a few files for keeps those of the first process.
        file=$work/$name-rest.json
    done
}

# memcheck CASE: this check under compute-sanitizer, where that is, once.
memcheck() {
    local tool tools=(/usr/local/cuda*/bin/compute-sanitizer) left=$((budget - SECONDS))
    tool=$(command -v compute-sanitizer || command -v "${tools[-1]}")
    if [ -z "$1" ] || [ -z "$tool" ] || [ -n "$sanitized" ] || [ "$left" -lt 90 ]; then return; fi
    sanitized=yes
    printf '\n== compute-sanitizer of %s (%s s so far)\n' "$1" "$SECONDS"
    limited 60 "$tool" --tool memcheck "$caravan" bench kernels --check "$1" >"$results/memcheck.txt" 2>&1
    head -n 40 "$results/memcheck.txt"
    verdict "       memcheck.txt has what compute-sanitizer says of $1: $(tail -n 1 "$results/memcheck.txt")"
}

# evaluated TYPE LIMIT: the mean loss of the saved model, computed in this type on the GPU and on the processor; their relative
# difference is below the limit.
evaluated() {
    local device text losses=()
    for device in cpu cuda; do
        into=$work/eval.json step 60 "$caravan" eval --model "$work/model" --data "$work/text.txt" \
            --seq "${SMALL_LENGTH:-128}" --tokenizer bytes --dtype "$1" --ranks 1 --device "$device" --json || return
        losses+=("$(sed -n 's/.*"loss": *\([^,}]*\).*/\1/p' "$work/eval.json")")
    done
    if text=$(awk -v type="$1" -v limit="$2" -v a="${losses[0]}" -v b="${losses[1]}" 'BEGIN {
        d = (a - b) / a; d = d < 0 ? -d : d
        printf "evaluation in %s on the processor %s, on the GPU %s, relative difference %.2e, below %s", type, a, b, d, limit
        exit !(a > 0 && d < limit) }'); then
        verdict "ok     $text"
    else
        wrong "not so: $text"
    fi
}

# torch_python: the first one whose PyTorch sees a GPU. Read for the first time, it takes long to start; $work/hurried is there
# when some had no time to say so.
torch_python() {
    local file each tried=: until=$((SECONDS + 120))
    for each in "${PYTHON:-}" python3 python "${VIRTUAL_ENV:-}/bin/python3" "${CONDA_PREFIX:-}/bin/python3" \
        $(grep -o '"[^"]*/lib/python3[^"]*"' <<<"$facts" | sed 's/^"//; s/\/lib\/python3.*/\/bin\/python3/' | sort -u); do
        file=$(command -v "$each" 2>/dev/null) || continue
        # The same by another name; links to one program may be different environments.
        [[ $tried != *":$file:"* ]] || continue
        [ "$SECONDS" -lt "$until" ] || { : >"$work/hurried"; break; }
        tried=$tried$file:
        limited 60 "$file" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
        case $? in
        0) echo "$file" && return ;;
        124 | 137) : >"$work/hurried" ;;
        esac
    done
    return 1
}

# against_torch WEIGHTS: the same model in PyTorch, in the same call on the same GPU.
against_torch() {
    local with ours theirs mode limit status weights=$1 until
    if ! grep -q "\"$model\":" "$here/gpu_torch.py"; then
        verdict "skip   PyTorch: gpu_torch.py does not know $model"
        return
    fi
    if [ $((budget - SECONDS)) -lt 40 ]; then
        verdict "skip   no time is left for PyTorch with weights in $weights"
        return
    fi
    # At most as long as it looks for one.
    [ -z "$warming" ] || gone "$warming" "$(remaining 200)" || { : >"$work/hurried"; kill "$warming"; }
    warming='' with=$(cat "$work/python") until=$((SECONDS + 170))
    if [ -z "$with" ]; then
        verdict "skip   PyTorch: no Python here has one that sees a GPU$([ ! -f "$work/hurried" ] || echo ', or none said so in time')"
        return
    fi
    # What does not fit the memory does so with half of the sequences; what takes too long to compile may run as it is.
    for mode in "" --eager "--rows $(((rows + 1) / 2))" "--eager --rows $(((rows + 1) / 2))"; do
        limit=$(((until < budget ? until : budget) - SECONDS))
        [ "$limit" -gt 10 ] || break
        [[ $mode != *--rows* ]] || grep -qi 'out of \?memory' "$work/torch.err" || continue
        # No mode is no word, and of two flags the last counts.
        # shellcheck disable=SC2086
        limited "$((limit < 120 ? limit : 120))" "$with" "$here/gpu_torch.py" --model "$model" --rows "$rows" \
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

# Other types than bf16, losses that are scaled, and trainings that evaluate on their way and go on from a state.
more() {
    local one="$small --ranks 1 --stage 0" text=(--data "$work/text.txt" --tokenizer bytes --val-fraction 0.1 --eval-every 3) scale bytes
    # A tenth is held out, which has to hold a sequence.
    bytes=$((32 * ${SMALL_LENGTH:-128}))
    head -c "${TEXT:-$((bytes > 4000 ? bytes : 4000))}" "$here/../README.md" >"$work/text.txt"
    # Flags are words.
    # shellcheck disable=SC2086
    train 60 f32-cpu $one --steps 5 --dtype f32
    # shellcheck disable=SC2086
    train 60 f32 $one --steps 5 --dtype f32 --device cuda --save "$work/model" && close f32 f32-cpu 1e-4 1e-3 &&
        evaluated f32 1e-4 && evaluated bf16 1e-2
    # As TF32, which has 11 bits of f32's 24.
    # shellcheck disable=SC2086
    train 60 high $one --steps 5 --dtype f32 --matmul-precision high --device cuda && close high f32-cpu 1e-3 5e-3
    # Three bits more than bf16 has.
    # shellcheck disable=SC2086
    train 60 f16-cpu $one --steps 5 --dtype f16
    # shellcheck disable=SC2086
    train 60 f16 $one --steps 5 --dtype f16 --device cuda && close f16 f16-cpu 2e-3 5e-3
    # From a scale of about 2^12 for each token of a step on (2^14 in the smallest model) some gradient has no room in f16.
    scale=initial=$((2 ** 16 * 4 * ${SMALL_LENGTH:-128})),hysteresis=1
    # shellcheck disable=SC2086
    train 60 scaled-cpu $one --steps 8 --dtype f16 --loss-scale "$scale"
    # shellcheck disable=SC2086
    train 60 scaled $one --steps 8 --dtype f16 --loss-scale "$scale" --device cuda && skips scaled scaled-cpu &&
        close scaled scaled-cpu 2e-3 5e-3 8
    # Of text something is learned, by which roundings lead apart sooner than by random tokens.
    # shellcheck disable=SC2086
    train 60 text-cpu $one "${text[@]}" --steps 6
    # shellcheck disable=SC2086
    train 60 text $one "${text[@]}" --steps 6 --device cuda && close text text-cpu 1e-2 1e-2 3 && evaluations text text-cpu 1e-2
    # shellcheck disable=SC2086
    train 60 half $one "${text[@]}" --steps 3 --schedule-steps 6 --device cuda --checkpoint "$work/state" &&
        train 60 resumed $one "${text[@]}" --steps 6 --device cuda --checkpoint "$work/state" --resume && same resumed text 4
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
        refusable=$little train 60 "graphs-$switch" --model "$model" --seq "$length" --micro-batch "$rows" --steps 10 --ranks 1 --stage 0 \
            --threads "$cores" --device cuda --cuda-graphs $switch && speed "graphs-$switch"
    done
    same graphs-on graphs-off
}

# Two ranks on one GPU show that NCCL is called rightly; their times mean little. First what NCCL does itself, then what only
# moves data, at the end what sums with our kernels. What fails or hangs once would do so every time, and take all the time
# that there is: the first failure is the last.
over_nccl() {
    local each operation algo most found way
    limited "$(remaining 60)" "$caravan" doctor >"$work/doctor"
    found=$(sed -n 's/^  \(yes\|no \) nccl */\1/p' "$work/doctor")
    if [ "${found:0:3}" != yes ]; then
        verdict "skip   NCCL: ${found#no }"
        return
    fi
    way=${found##*--share-gpus sets }
    for each in all_reduce:native:16M reduce_scatter:native:16M all_gather:auto:16M broadcast:auto:1M gather:auto:1M \
        scatter:auto:1M all_to_all:auto:1M send_recv:auto:1M reduce:auto:1M all_reduce:auto:16M reduce_scatter:auto:16M; do
        IFS=: read -r operation algo most <<<"$each"
        step 30 "$caravan" bench "$operation" -b 64K -e "$most" -f 16 -n 10 -d "${TYPE:-bfloat16}" --ranks 2 --share-gpus \
            --transport "$wire" --algo "$algo" || { verdict "       NCCL on one GPU by $way ends here"; return; }
        verdict "ok     $operation ($algo) of 2 ranks over NCCL on one GPU by $way"
    done
    [ "$wire" = nccl ] || return
    # Flags are words.
    # shellcheck disable=SC2086
    train 40 shm $small --steps 20 --ranks 2 --stage 3 --device cuda --share-gpus --transport shm &&
        train 40 nccl $small --steps 20 --ranks 2 --stage 3 --device cuda --share-gpus --transport nccl && same nccl shm
}

# Attention by products of warps, which every GPU has, beside what was timed: on Hopper that has products of warpgroups.
with_mma() {
    refusable=$little train 60 mma --model "$model" --seq "$length" --micro-batch "$rows" --steps 20 --ranks 1 --stage 0 \
        --threads "$cores" --device cuda --attention mma || return
    speed mma
    [ ! -f "$work/timed.jsonl" ] || close mma timed 1e-2 1e-2 3
}

run() {
    local stage part
    date -u
    uname -srm
    command -v nvidia-smi >/dev/null && limited 20 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    limited "$(remaining 60)" "$caravan" doctor
    case " ${ONLY:-$parts} " in *" torch"*)
        (trap '[ -z "$child" ] || kill "$child"; exit' TERM; torch_python) >"$work/python" 2>/dev/null 3>&- &
        warming=$! ;;
    esac
    small="--model ${SMALL:-32m} --seq ${SMALL_LENGTH:-128} --micro-batch 4 --threads $cores"
    for part in ${ONLY:-$parts}; do
        case $part in
        check)
            checks checks 150 && verdict "ok     every kernel agrees with its definition"
            ;;
        train)
            # shellcheck disable=SC2086
            train 60 cpu $small --steps "$steps" --ranks 1 --stage 0
            for stage in 0 1 2 3; do
                # shellcheck disable=SC2086
                train 60 "stage-$stage" $small --steps "$steps" --ranks 1 --stage "$stage" --device cuda
            done
            close stage-0 cpu 1e-2 1e-2
            for stage in 1 2 3; do same "stage-$stage" stage-0; done
            for stage in 0 3; do memory "stage-$stage"; done
            # One rank shards nothing, so these are the same program. Two ranks do, here with what goes through the host.
            for stage in 0 1 2 3; do
                # shellcheck disable=SC2086
                train 40 "two-$stage" $small --steps $((steps / 2)) --ranks 2 --stage "$stage" --device cuda --share-gpus --transport shm
            done
            for stage in 1 2 3; do same "two-$stage" two-0; done
            for stage in 0 3; do memory "two-$stage"; done
            # What saves memory leaves the bits as they are, in sums over micro-batches too.
            # shellcheck disable=SC2086
            train 60 twice $small --steps 5 --accumulate 2 --ranks 1 --stage 0 --device cuda
            # shellcheck disable=SC2086
            train 60 saving $small --steps 5 --accumulate 2 --ranks 1 --stage 3 --device cuda --recompute full \
                --offload optimizer && same saving twice && memory saving
            ;;
        more) more ;;
        speed)
            refusable=$little train 90 timed --model "$model" --seq "$length" --micro-batch "$rows" --steps 20 --ranks 1 --stage 0 \
                --threads "$cores" --device cuda && speed timed && memory timed
            ;;
        torch) against_torch f32 ;;
        # Less work and less precise than ours, and faster than the other.
        torch-bf16) against_torch bf16 ;;
        kernels)
            refusable=$little step 60 "$caravan" bench kernels --model "$model" --micro-batch "$rows" --seq "$length" \
                --json "$results/kernels.json"
            ;;
        large)
            [ -n "$large" ] || continue
            # A machine may have too little memory for the optimizer's state, and be slow to lock so much of it.
            refusable=yes spare=100 train "$budget" large --model "$large" --seq "$length" --micro-batch "$large_rows" --steps 4 --ranks 1 --stage 0 \
                --threads "$cores" --device cuda --recompute full --offload optimizer && speed large && memory large
            ;;
        graphs) with_graphs ;;
        nccl) over_nccl ;;
        mma) with_mma ;;
        *)
            echo "gpu.sh: ONLY names parts of: $parts" >&2
            return 2
            ;;
        esac
    done
    printf '\n== what was shown\n'
    printf '%s\n' "${verdicts[@]}"
    printf '\nall done in %s s, %s\n' "$SECONDS" "$([ $failed = 0 ] && echo 'nothing failed' || echo 'SOMETHING FAILED')"
    return $failed
}

results=${1:-${OUT:-.}}
caravan=${CARAVAN:-$here/../target/release/caravan}
[ -x "$caravan" ] || { echo "gpu.sh: there is no program $caravan: set CARAVAN to it" >&2; exit 2; }
caravan=$(cd "$(dirname "$caravan")" && pwd)/$(basename "$caravan")
timeout -k 5 20 "$caravan" --version >/dev/null || { echo "gpu.sh: $caravan does not run on this machine" >&2; exit 2; }
work=$(mktemp -d) || exit 2
keeper=
trap '[ -z "$keeper$warming" ] || kill $keeper $warming 2>/dev/null; rm -rf "$work"' EXIT
limited 60 "$caravan" doctor --json >"$work/facts"
facts=$(cat "$work/facts")
if [ -z "${CARAVAN_EMULATED_DEVICE:-}" ] && ! grep -q '"gpus":\[{' <<<"$facts"; then
    echo "gpu.sh: this machine has no GPU that can be used: 'caravan doctor' says" >&2
    limited 60 "$caravan" doctor >"$work/doctor"
    sed -n '/^GPUs/,$p' "$work/doctor" >&2
    exit 3
fi
# That of the GPU that is taken, the first.
gpu=$(sed -n 's/.*"gpus":\[{\([^}]*\)}.*/\1/p' <<<"$facts")
capability=$(sed -n 's/.*"capability":\([0-9]*\).*/\1/p' <<<"$gpu")
if [ "${capability:-80}" -lt 80 ]; then
    echo "gpu.sh: the kernels need a GPU of sm_80 or newer, and this one is of sm_$capability" >&2
    exit 3
fi
# Dense 16-bit FLOP/s of the GPU, given or by its data sheet, if that is known.
peak=${PEAK:-}
[ -n "$peak" ] || peak=$(sed -n 's/.*"dense_16_bit_flops":\([0-9.e+]*\).*/\1/p' <<<"$gpu")
# Sixteen sequences at once, so that what does not grow with them, as the optimizer's work, is little of a step. With less
# memory than an H200's, PyTorch, whose logits are f32 in its loss, needs a smaller micro-batch; with less than half an
# H100's it needs one here, too, and the model's state alone may be too much: then a refusal is no failure.
little=
if [ -z "$rows" ]; then
    memory=$(sed -n 's/.*"memory":\([0-9]*\).*/\1/p' <<<"$gpu")
    case $((${memory:-0} / 10000000000)) in
    0 | 1 | 2 | 3) rows=1 little=yes ;;
    4 | 5) rows=4 little=yes ;;
    6 | 7 | 8 | 9 | 10 | 11 | 12) rows=8 ;;
    *) rows=16 ;;
    esac
fi
mkdir -p "$results" && results=$(cd "$results" && pwd) || exit 2
# Without anybody who uses it a driver lets go of its GPUs, and takes seconds to get them again for every program.
command -v nvidia-smi >/dev/null && { nvidia-smi --loop=600 >/dev/null 2>&1 & keeper=$!; }
: >"$results/metrics.jsonl" || exit 2
# What an earlier run left there would pass for this one's.
rm -f "$results"/checks.json "$results"/checks-*.json "$results"/{kernels.json,memcheck.txt}
# What Python knows and the program may not find by itself.
for each in "${PYTHON:-}" python3 python; do
    found=$(timeout -k 5 20 "$each" -c 'import glob, nvidia; print(":".join(lib for path in nvidia.__path__ for lib in glob.glob(path + "/*/lib")))' \
        2>/dev/null) && CARAVAN_CUDA_LIBRARIES=${CARAVAN_CUDA_LIBRARIES:+$CARAVAN_CUDA_LIBRARIES:}$found
done
export CARAVAN_CUDA_LIBRARIES=${CARAVAN_CUDA_LIBRARIES:-}
# Kernels are compiled once for all parts.
export CARAVAN_CACHE=${CARAVAN_CACHE:-$work/cache}
# What `run` prints is in the file when this ends: `$!` after `run` would be a process of its own.
: >"$results/gpu.txt" || exit 2
# Whoever reads what it shows may go.
tee --output-error=warn /dev/null </dev/null >/dev/null 2>&1 && goes_on=--output-error=warn || goes_on=
# Nothing is no word.
# shellcheck disable=SC2086
exec 3> >(trap '' INT TERM HUP PIPE; exec tee -a $goes_on "$results/gpu.txt")
tee=$!
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 141' PIPE
trap 'stop 143' TERM
run >&3 2>&1
status=$?
# What it has started would keep the file open.
[ -z "$warming" ] || kill "$warming" 2>/dev/null
exec 3>&-
# Something that does not end may keep it from that.
gone "$tee" 5
record
exit $status
