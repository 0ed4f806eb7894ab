# What the metrics of gpu.sh's runs show; it reads this file, and has `verdict`, `wrong`, the folders $work, $results and $here,
# how runs $ended, the $facts of the machine and the $peak of its GPU.
# shellcheck shell=bash disable=SC2154

# field NAME KEY: the values of a number in the lines of steps; with a third word in those of evaluations.
field() {
    local which='/"step":/{/"grad_norm":/'
    [ -z "${3:-}" ] || which='/"step":/{/"evaluation":/'
    [ -f "$work/$1.jsonl" ] && sed -n "${which}s/.*\"$2\":\([^,}]*\).*/\1/p}" "$work/$1.jsonl"
}

# numbers NAME FIRST: the number, loss and norm of each step from this one on, and behind them number and loss of each evaluation
# from before it on.
numbers() {
    paste <(field "$1" step) <(field "$1" loss) <(field "$1" grad_norm) | awk -v first="$2" '$1 >= first'
    paste <(field "$1" step evaluation) <(field "$1" loss evaluation) | awk -v first="$2" '$1 >= first - 1'
}

# ran NAME...: whether these runs went through; if one did not, it has said why, and there is nothing to compare.
ran() {
    local name
    for name; do
        [ "${ended[$name]:-}" = ok ] && continue
        verdict "skip   nothing is compared with $name, which did not go through"
        return 1
    done
}

# same NAME NAME [FIRST]: losses, of evaluations too, and norms that agree to the last digit, of the second from this step on.
same() {
    local steps
    ran "$1" "$2" || return
    steps=$(field "$1" loss | wc -l)
    if [ "$steps" -gt 0 ] && diff <(numbers "$1" 1) <(numbers "$2" "${3:-1}") >/dev/null; then
        verdict "ok     losses and gradient norms of $1 and $2 are the same bits in $steps steps"
    else
        wrong "losses or gradient norms of $1 and $2 differ, or there are none"
    fi
}

# close NAME NAME LIMIT LIMIT [STEPS]: losses whose relative difference is below the first limit at every step, and gradient norms
# whose is below the second one in the first five or so many: nothing can be learned from random tokens, so that losses say little
# of gradients, and later roundings have led to other weights, with norms of their own.
close() {
    local text
    ran "$1" "$2" || return
    if text=$(paste <(field "$1" loss) <(field "$2" loss) <(field "$1" grad_norm) <(field "$2" grad_norm) |
        awk -v limit="$3" -v norm_limit="$4" -v first="${5:-5}" -v what="$1 and $2" '
        function apart(x, y) { return y == 0 ? 1 : x < y ? (y - x) / y : (x - y) / y }
        NF == 4 { n++; d = apart($1, $2); if (d > most) most = d
                  # Both are null where a step was skipped.
                  if (n <= first && $3 $4 != "nullnull") { d = apart($3 + 0, $4 + 0); if (d > norm) norm = d } }
        NF != 4 { uneven = 1 }
        END { printf "losses of %s: %d steps, largest relative difference %.2e, below %s; ", what, n, most, limit
              printf "gradient norms of the first: %.2e, below %s\n", norm, norm_limit
              exit !(n > 0 && !uneven && most < limit && norm < norm_limit) }'); then
        verdict "ok     $text"
    else
        wrong "not so: $text"
    fi
}

# skips NAME NAME: of steps with a scaled loss the same are skipped, the first among them, and the last is not.
skips() {
    local first second
    ran "$1" "$2" || return
    first=$(field "$1" skipped | paste -sd ' ')
    second=$(field "$2" skipped | paste -sd ' ')
    if [[ $first == true*false ]] && [ "$first" = "$second" ]; then
        verdict "ok     $1 and $2 skip the same $(field "$1" skipped | grep -c true) of $(wc -w <<<"$first") steps"
    else
        wrong "$1 and $2 do not skip the same steps, the first and not the last: $first; $second"
    fi
}

# evaluations NAME NAME LIMIT: losses of what is held out whose relative difference is below the limit each time.
evaluations() {
    local text
    ran "$1" "$2" || return
    if text=$(paste <(field "$1" loss evaluation) <(field "$2" loss evaluation) | awk -v limit="$3" -v what="$1 and $2" '
        NF == 2 && $2 > 0 { n++; d = ($1 - $2) / $2; d = d < 0 ? -d : d; if (d > most) most = d; next }
        { bad = 1 }
        END { printf "evaluations within %s: %d, largest relative difference %.2e, below %s\n", what, n, most, limit
              exit !(n > 0 && !bad && most < limit) }'); then
        verdict "ok     $text"
    else
        wrong "not so: $text"
    fi
}

# speed NAME: tokens/s and MFU of the median step after the first five, or after the first one where there are less than ten.
speed() {
    local flops text
    flops=$(sed -n '1s/.*"flops_per_token":\([^,}]*\).*/\1/p' "$work/$1.jsonl")
    if text=$(field "$1" tokens_per_second | awk -v flops="$flops" -v name="$1" -v peak="$peak" '
        { rate[NR] = $1 }
        END { if (!NR || !flops) { print name ": no step was timed, or flops_per_token is not told"; exit 1 }
              first = NR > 9 ? 6 : NR > 1 ? 2 : 1
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

# memory NAME: what each rank's device held against what was predicted, class by class.
memory() {
    local text
    ran "$1" || return
    # Of the first rank all classes were predicted, of each the sum.
    if text=$(tail -1 "$work/$1.jsonl" | awk '
        function number(text, key) {
            return match(text, "\"" key "\":[0-9]+") ? substr(text, RSTART + length(key) + 3, RLENGTH - length(key) - 3) : "" }
        { match($0, /"predicted_memory":\{[^}]*\}/); p = substr($0, RSTART + 19, RLENGTH - 19)
          for (rest = $0; match(rest, /"memory":\{[^}]*\}/); ranks++) {
              m = substr(rest, RSTART + 9, RLENGTH - 9); rest = substr(rest, RSTART + RLENGTH)
              if (!ranks && p == m) printf "%s", m
              if (!ranks && p != m) { printf "%s was predicted, held was %s", p, m; bad = 1 }
              held = number(m, "total"); said = number(rest, "predicted_bytes")
              if (held == "" || held != said) { printf "; %s was predicted, rank %d held %s", said, ranks, held; bad = 1 } }
          if (!ranks) printf "none is told"
          print (ranks > 1 && !bad ? "; so are the sums of all " ranks " ranks" : "") }
        END { exit bad || p == "" || !ranks }'); then
        verdict "ok     memory of $1 is what was predicted: $text"
    else
        wrong "memory of $1: $text"
    fi
}

# made_by: which program this was, as far as that is known, and which scripts.
made_by() {
    local scripts
    scripts=$(git -C "$here" describe --always --dirty 2>/dev/null) || scripts='no known commit'
    if [ -n "${COMMIT:-}" ]; then
        echo "the program of $COMMIT"
    elif [ -n "${CARAVAN:-}" ]; then
        echo "a program that CARAVAN named, of which nothing says how it was built, and the scripts of $scripts"
    else
        echo "the program that lay in target/release of $scripts"
    fi
}

# record: what was shown as a file for benches/results, with what it was made by and all of it.
record() {
    local name text shown
    name=$(sed -n 's/.*"gpus":\[{[^}]*"name":"\([^"]*\)".*/\1/p' <<<"$facts" | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9\n' '-')
    text=$results/gpu_${name:-emulated}_$(date -u +%F).md
    {
        # The backticks are Markdown's.
        # shellcheck disable=SC2016
        printf '# What one GPU shows\n\nMade by `%sbenches/gpu.sh`' "${ONLY:+ONLY=\"$ONLY\" }"
        printf ' with %s.\n\n```\n' "$(made_by)"
        # Where things lay says nothing to others. The folder of results may have the other one in it.
        shown=$(cat "$results/gpu.txt")
        shown=${shown//"$work"/WORK}
        printf '%s\n' "${shown//"$results"/RESULTS}" | sed 's|(/[^ )]*/site-packages/|(site-packages/|'
        printf '```\n\n## Each step of training\n\n'
        printf '| run | step | loss | norm of the gradient | seconds | tokens/s |\n|---|---|---|---|---|---|\n'
        awk '/^{"file"/ { split($0, word, "\""); run = word[4]; sub(/\.jsonl$/, "", run) }
            /"step":/ && /"grad_norm":/ {
                line = $0
                for (i = split("step loss grad_norm seconds tokens_per_second", keys, " "); i > 0; i--) {
                    match(line, "\"" keys[i] "\":[^,}]*"); value[keys[i]] = substr(line, RSTART, RLENGTH); sub(/.*:/, "", value[keys[i]])
                }
                printf "| %s | %s | %s | %s | %s | %.0f |\n", run, value["step"], value["loss"], value["grad_norm"], value["seconds"], value["tokens_per_second"]
            }' "$results/metrics.jsonl"
    } >"$text"
}
