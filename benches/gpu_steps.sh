# How gpu.sh runs commands within its time, and what becomes of those that fail, hang or are stopped; it reads this file, and has
# $caravan, $budget, $patience, and the folders $work and $results.
# shellcheck shell=bash disable=SC2034,SC2154

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

# remaining [SECONDS]: how many of the budget's seconds are left, at most so many, for what need not be complete.
remaining() {
    local left=$((budget - SECONDS))
    left=$((left < ${1:-$left} ? left : ${1:-$left}))
    echo $((left > 1 ? left : 1))
}

# gone PROCESS SECONDS: waits so long for its end. What a driver holds does not end even when it is killed.
gone() {
    local until=$((SECONDS + $2))
    while kill -0 "$1" 2>/dev/null; do
        [ "$SECONDS" -lt "$until" ] || return 1
        sleep 0.1
    done
}

# limited SECONDS COMMAND...: with a limit, and so that what stops this script stops the command too. A command that keeps the
# file $watched true at any moment is also stopped when that has not changed for long. What cannot even be killed is left alone.
limited() {
    local limit=$1 until=$((SECONDS + $1 + 17)) process
    shift
    stalled='' stuck=''
    # What does not end when it is asked to is killed.
    timeout -k 15 "$limit" "$@" &
    child=$!
    while ! gone "$child" 0; do
        if [ "$SECONDS" -ge "$until" ]; then
            echo "== it does not end, though it was killed, and is left alone: $*" >&2
            disown "$child" 2>/dev/null
            child='' stuck=yes
            return 137
        fi
        if [ -z "$stalled" ] && [ -n "${watched:-}" ] &&
            [ -n "$(find "$watched" -not -newermt "-$patience seconds" 2>/dev/null)" ]; then
            stalled=yes until=$((SECONDS + 17))
            kill "$child" 2>/dev/null
        fi
        sleep 0.1
    done
    # Its number may be another's by now, which nothing here may end.
    process=$child child=
    wait "$process"
}

# stop STATUS: ends the command that runs, and then this script. What has been shown is kept first: who stops this may not wait
# long, and may have ended already what it writes to.
stop() {
    trap '' INT TERM HUP PIPE
    collect
    [ ! -s "$work/words" ] || cat "$work/words" >>"$results/gpu.txt"
    { printf '\n== stopped after %s s; what was shown\n' "$SECONDS"; printf '%s\n' "${verdicts[@]}"; } >>"$results/gpu.txt"
    exec >/dev/null 2>&1
    [ -n "$child" ] && kill "$child" && gone "$child" 20
    exit "$1"
}

# collect: adds the metrics of the run that has ended to all.
collect() {
    [ -n "$running" ] && [ -f "$work/$running.jsonl" ] && {
        printf '{"file": "%s"}\n' "$running.jsonl"
        cat "$work/$running.jsonl"
    } >>"$results/metrics.jsonl"
    running=
}

# step SECONDS COMMAND...: runs it with a limit, whatever came before; $outcome is ok, skip, hung or wrong. With $refusable, what
# this machine has not is no failure; $spare seconds are left for others; the command writes to $into, if that is a file.
step() {
    local limit=$1 left=$((budget - SECONDS - ${spare:-0})) status
    shift
    printf '\n== %s (%s s so far)\n' "${*//$caravan/caravan}" "$SECONDS"
    outcome=skip
    if [ "$left" -lt 10 ]; then
        verdict "skip   no time is left for ${*//$caravan/caravan}"
        return 1
    fi
    local most=$((limit < left ? limit : left)) began=$SECONDS
    if [ -n "${refusable:-}" ]; then
        limited "$most" "$@" 2>"$work/words"
        status=$?
        cat "$work/words" >&2
    elif [ -n "${into:-}" ]; then
        limited "$most" "$@" >"$into"
        status=$?
        cat "$into"
    else
        limited "$most" "$@"
        status=$?
    fi
    [ "$status" = 0 ] && outcome=ok && return
    if [ -n "$stuck" ]; then
        outcome=hung
        wrong "failed (it does not end even when it is killed): ${*//$caravan/caravan}"
        return 1
    fi
    if [ -n "$stalled" ]; then
        outcome=hung
        wrong "failed (nothing new for $patience s): ${*//$caravan/caravan}"
        return 1
    fi
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
    if [ -n "${refusable:-}" ] && { [ "$status" = 137 ] || grep -qE "$no_memory" "$work/words"; }; then
        verdict "skip   the host has too little memory ($status): ${*//$caravan/caravan}"
        return 1
    fi
    outcome=wrong
    [ "$status" = 124 ] && outcome=hung status="longer than $limit s"
    wrong "failed ($status): ${*//$caravan/caravan}"
    return 1
}

# How each training ended.
declare -A ended=()

# What programs say that get no memory of the host.
no_memory='the system has no more|page-locking .*OUT_OF_MEMORY|memory allocation of|signal 9|SIGKILL'

# train SECONDS NAME FLAGS...: trains, on random tokens unless FLAGS name data; the metrics go to NAME.jsonl. What fails on a GPU
# is told by whoever waits for it, long after: once more, with every launch awaited, whoever gave the work says so.
train() {
    local limit=$1 name=$2 left
    shift 2
    local all=(--sample 0 --quiet "$@")
    [[ " $* " == *" --data "* ]] || all=(--data random --val-fraction 0 "${all[@]}")
    ended[$name]=skip
    if [[ " $* " == *" --device cuda "* ]] && [ "$hangs" -ge 2 ]; then
        verdict "skip   two runs on the GPU hung before $name"
        return 1
    fi
    running=$name
    step "$limit" "$caravan" train --metrics "$work/$name.jsonl" "${all[@]}"
    collect
    ended[$name]=$outcome
    [ "$outcome" = ok ] && return
    [ "$outcome" = hung ] && hangs=$((hangs + 1))
    left=$((budget - SECONDS))
    if [ "$outcome" = wrong ] && [[ " $* " == *" --device cuda "* ]] && [ "$blocked" -lt 3 ] && [ "$left" -gt 30 ]; then
        blocked=$((blocked + 1))
        echo "== the same with CUDA_LAUNCH_BLOCKING=1"
        CUDA_LAUNCH_BLOCKING=1 limited $((left < 60 ? left : 60)) "$caravan" train "${all[@]}" >"$work/blocking.txt" 2>&1
        cat "$work/blocking.txt"
        # What was refused is said before what came of it.
        verdict "       $name with CUDA_LAUNCH_BLOCKING=1: $(grep -m 1 '(GPU ' "$work/blocking.txt" || tail -n 1 "$work/blocking.txt")"
    fi
    return 1
}
