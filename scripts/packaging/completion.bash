# bash completion for fdsl-bench. Reads the options and most values from the --help of the program on the command line.

# Prints the help of all options that fit the command line. These are the options of advise, compare or --prepare, or
# those of a workload. --workload or --variant selects the workload; the default is synth.
_fdsl_bench_help()
{
    local words=" ${COMP_WORDS[*]} " chosen=(--workload synth) i
    for ((i = 1; i + 1 < ${#COMP_WORDS[@]}; i++)); do
        [[ ${COMP_WORDS[i]} != --workload && ${COMP_WORDS[i]} != --variant ]] || chosen=("${COMP_WORDS[i]}" "${COMP_WORDS[i + 1]}")
    done
    if [[ ${COMP_WORDS[1]} == @(advise|compare) ]] && ((COMP_CWORD > 1)); then
        "$1" "${COMP_WORDS[1]}" --help
    elif [[ $words == *' --prepare '* ]]; then
        "$1" --prepare --help
        [[ $words != *' --from synth '* ]] || "$1" --workload synth --help
    else
        "$1" "${chosen[@]}" --help
    fi 2>/dev/null
}

# Reads a help text and prints the values of option $1. The option's description ends with them: "...: nchw, nhwc
# (default nchw)".
_fdsl_bench_values()
{
    awk -v option="$1" '
        function done() { sub(/ \(default [^)]*\)$/, "", text)
                          if (match(text, /: [a-z0-9-]+(, [a-z0-9-]+)+$/)) { text = substr(text, RSTART + 2); gsub(/,/, "", text); print text }
                          text = "" }
        /^  (-[a-z], )?--/     { done(); on = $1 == option || $2 == option; if (on) text = $0; next }
        on && /^          /    { sub(/^ +/, ""); text = text " " $0; next }
                               { done(); on = 0 }
        END                    { done() }'
}

# Prints the measures that "$1 compare" accepts: the ones in its help, and the columns of file $2 that end with _s.
_fdsl_bench_measures()
{
    "$1" compare --help 2>/dev/null | awk '/^measures:/ { print "time_per_item"; on = 1; next } on && /^$/ { exit } on { gsub(/,/, ""); print }'
    head -n 1 -- "${2/#\~/$HOME}" 2>/dev/null | tr -d '\r' | tr ',' '\n' | grep '_s$'
}

# Completes the command after "--", which --monitor watches. The command's name is word $1 of the command line.
_fdsl_bench_command()
{
    local kind=-f
    if declare -F _command_offset >/dev/null; then
        _command_offset "$1"
    else
        ((COMP_CWORD > $1)) || kind=-c
        mapfile -t COMPREPLY < <(compgen "$kind" -- "${COMP_WORDS[COMP_CWORD]}")
    fi
}

_fdsl_bench()
{
    local i
    for ((i = 1; i < COMP_CWORD; i++)); do
        [[ ${COMP_WORDS[i]} != -- ]] || { _fdsl_bench_command $((i + 1)) && return; }
    done
    local program=${COMP_WORDS[0]} current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} words='' before=''
    program=${program/#\~/$HOME}
    if ((COMP_CWORD > 1)) && [[ ${COMP_WORDS[1]} == compare && $current != -* && $previous != --* ]]; then
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
        return
    fi
    case $previous in
    --variant | --baseline)
        words=$("$program" --list 2>/dev/null | awk '/^  / { print $1 }')
        if [[ $previous == --variant ]]; then # complete the last element of a comma-separated list
            words="all $words" before=${current%"${current##*,}"}
        fi
        ;;
    --workload) words=$("$program" --help 2>/dev/null | awk '/^workloads/ { on = 1; next } on && /^$/ { exit } on { print $1 }') ;;
    --from) words=$("$program" --prepare --help 2>/dev/null | awk '/^options of the source/ { print $5 }') ;;
    --channels) words='1 3' ;;
    --measure) words=$(_fdsl_bench_measures "$program" "${COMP_WORDS[2]}") ;;
    --preset) words='uji visualatom lowercompute paper-1000 lowercompute-1000' ;;
    --compute) words="train $("$program" --workload train --help 2>/dev/null | _fdsl_bench_values --model | sed 's/[^ ]*/train:&/g')" ;;
    --data)
        mapfile -t COMPREPLY < <(compgen -W 'digits clips synth' -- "$current"; compgen -d -- "$current")
        return
        ;;
    --out | --samples-out | --config | --monitor | --class | --preset-file | --write-classes | --sheet | --npy | --source | --labels | --init | --checkpoint | \
        --export | --export-step | --export-data)
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
        return
        ;;
    --png | --prepare | --verify-set)
        mapfile -t COMPREPLY < <(compgen -d -- "$current")
        return
        ;;
    --*)
        words=$(_fdsl_bench_help "$program" | _fdsl_bench_values "$previous")
        [[ $words ]] || words=$("$program" --help --verbose 2>/dev/null | _fdsl_bench_values "$previous") # an option of another workload
        ;;
    esac
    [[ $words ]] || words=$(_fdsl_bench_help "$program" | grep -oE '^  (-[a-z], )?--[a-z0-9-]+' | grep -oE -- '--.*' | sort -u)
    ((COMP_CWORD > 1)) || words+=' advise compare'
    mapfile -t COMPREPLY < <(compgen -P "$before" -W "$words" -- "${current#"$before"}")
}
complete -F _fdsl_bench fdsl-bench
