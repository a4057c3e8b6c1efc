# shellcheck shell=bash
# Completion for fdsl-bench in bash, zsh and fish. Reads the options and most values from the --help and --list of the
# program on the command line. bash sources this file. `bash FILE zsh` and `bash FILE fish` print completions for these
# shells; those call `bash FILE words WORD...` to complete the last word.

# Prints the last value of option $1 on the command line.
_fdsl_bench_given()
{
    local i value=''
    for ((i = 1; i + 1 < ${#COMP_WORDS[@]}; i++)); do
        [[ ${COMP_WORDS[i]} != "$1" ]] || value=${COMP_WORDS[i + 1]}
    done
    echo "$value"
}

# Prints the help of all options that fit the command line. These are the options of advise, compare, verify-published or --prepare, or
# those of a workload. --workload or --variant selects the workload; the default is synth.
_fdsl_bench_help()
{
    local words=" ${COMP_WORDS[*]} " variant workload
    variant=$(_fdsl_bench_given --variant) workload=$(_fdsl_bench_given --workload)
    [[ $variant || $workload ]] || workload=synth
    if [[ ${COMP_WORDS[1]} == @(advise|compare|verify-published) ]] && ((COMP_CWORD > 1)); then
        "$1" "${COMP_WORDS[1]}" --help
    elif [[ $words == *' --prepare '* ]]; then
        "$1" --prepare --help
        [[ $words != *' --from synth '* ]] || "$1" --workload synth --help --verbose
    else
        "$1" ${variant:+--variant "$variant"} ${workload:+--workload "$workload"} --help --verbose
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

# Prints the variants that can be appended to the list $2: those of the workload of its variants, else of workload $3 if it
# is given. Variants that $2 already has are left out.
_fdsl_bench_variants()
{
    "$1" --list 2>/dev/null | awk -v list=",$2," -v workload="$3" '
        /^[a-z]+: / { section = substr($1, 1, length($1) - 1); next }
        /^  / { of[++count] = section; name[count] = $1; if (index(list, "," $1 ",")) workload = section }
        END { for (i = 1; i <= count; i++)
                  if ((!workload || of[i] == workload) && !index(list, "," name[i] ",")) print name[i] }'
}

# Completes the word COMP_WORDS[COMP_CWORD]. Sets `words` to suggestions, which follow the text `before`, and `kind` to what
# can also stand here: words (nothing else), files, folders, or command N (the words from number N on are a command).
_fdsl_bench_suggest()
{
    local i program=${COMP_WORDS[0]} current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
    kind=words words='' before=''
    for ((i = 1; i < COMP_CWORD; i++)); do
        [[ ${COMP_WORDS[i]} != -- ]] || { kind="command $((i + 1))" && return; }
    done
    program=${program/#\~/$HOME}
    if ((COMP_CWORD > 1)) && [[ ${COMP_WORDS[1]} == compare && $current != -* && $previous != --* ]]; then
        kind=files
        return
    fi
    case $previous in
    --variant) # complete the last element of a comma-separated list
        before=${current%"${current##*,}"}
        words=$(_fdsl_bench_variants "$program" "$before" "$(_fdsl_bench_given --workload)")
        [[ $before ]] || words="all auto $words"
        [[ $words ]] || return
        ;;
    --baseline) words=$(_fdsl_bench_variants "$program" '' "$(_fdsl_bench_given --workload)") ;;
    --workload) words=$("$program" --help 2>/dev/null | awk '/^workloads/ { on = 1; next } on && /^$/ { exit } on { print $1 }') ;;
    --from) words=$("$program" --prepare --help 2>/dev/null | awk '/^options of the source/ { print $5 }') ;;
    --channels) words='1 3' ;;
    --measure) words=$(_fdsl_bench_measures "$program" "${COMP_WORDS[2]}") ;;
    --preset)
        if [[ ${COMP_WORDS[1]} == verify-published ]]; then
            words='rcdb-1k rcdb-21k segrcdb visualatom-script-1k'
        else
            words='uji visualatom lowercompute paper-1000 lowercompute-1000'
        fi
        ;;
    --compute)
        [[ ${COMP_WORDS[1]} == advise ]] || return
        words=$("$program" --workload train --help --verbose 2>/dev/null | _fdsl_bench_values --model | sed 's/[^ ]*/train:&/g')
        ;;
    --data)
        kind=folders words='digits clips synth'
        return
        ;;
    --out | --samples-out | --config | --table | --monitor | --class | --preset-file | --write-classes | --sheet | --npy | --source | --labels | \
        --init | --checkpoint | --export | --export-step | --export-data)
        kind=files
        return
        ;;
    --png | --prepare | --verify-set)
        kind=folders
        return
        ;;
    --*)
        words=$(_fdsl_bench_help "$program" | _fdsl_bench_values "$previous")
        [[ $words ]] || words=$("$program" --help --verbose 2>/dev/null | _fdsl_bench_values "$previous") # an option of another workload
        ;;
    esac
    [[ $words ]] || words=$(_fdsl_bench_help "$program" | grep -oE '^  (-[a-z], )?--[a-z0-9-]+' | grep -oE -- '--.*' | sort -u)
    ((COMP_CWORD > 1)) || words+=' advise compare verify-published'
}

# Completes the command after "--", which --monitor watches. The command's name is word $1 of the command line.
_fdsl_bench_command()
{
    local action=-f
    if declare -F _command_offset >/dev/null; then
        _command_offset "$1"
    else
        ((COMP_CWORD > $1)) || action=-c
        mapfile -t COMPREPLY < <(compgen "$action" -- "${COMP_WORDS[COMP_CWORD]}")
    fi
}

_fdsl_bench()
{
    local kind words before current=${COMP_WORDS[COMP_CWORD]}
    _fdsl_bench_suggest
    mapfile -t COMPREPLY < <(
        compgen -P "$before" -W "$words" -- "${current#"$before"}"
        [[ $kind != files ]] || compgen -f -- "$current"
        [[ $kind != folders ]] || compgen -d -- "$current"
    )
    [[ $kind != command* ]] || _fdsl_bench_command "${kind#* }"
}

case $0:${1-} in
"${BASH_SOURCE[0]}:words") # prints the kind, then one suggestion per line
    COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
    _fdsl_bench_suggest
    printf '%s\n' "$kind"
    for word in $words; do printf '%s\n' "$before$word"; done
    ;;
"${BASH_SOURCE[0]}:zsh")
    cat <<'END'
#compdef fdsl-bench
# zsh completion for fdsl-bench. The suggestions come from bash's completion, which is installed in the same share/.
_fdsl-bench()
{
    local share=${functions_source[_fdsl-bench]:A:h:h:h}
    local -a said
    said=("${(@f)$(bash "$share/bash-completion/completions/fdsl-bench" words "${(@Q)words[1,CURRENT - 1]}" "${(Q)PREFIX}")}")
    local kind=$said[1]
    shift said
    compadd -- $said
    case $kind in
    files) _files ;;
    folders) _files -/ ;;
    command*)
        shift ${kind#* } words
        ((CURRENT -= ${kind#* }))
        _normal
        ;;
    esac
}
_fdsl-bench "$@"
END
    ;;
"${BASH_SOURCE[0]}:fish")
    cat <<'END'
# fish completion for fdsl-bench. The suggestions come from bash's completion, which is installed in the same share/.
set -g __fdsl_bench_file (status dirname)/../../bash-completion/completions/fdsl-bench
function __fdsl_bench
    set -l before (commandline -opc)
    set -l token (commandline -ct)
    set -l said (bash $__fdsl_bench_file words $before "$token")
    set -l kind (string split ' ' -- $said[1])
    printf '%s\n' $said[2..-1]
    switch $kind[1]
        case files
            __fish_complete_path "$token"
        case folders
            __fish_complete_directories "$token"
        case command
            set -l first (math $kind[2] + 1)
            complete -C (string join ' ' -- (string escape -- $before[$first..-1]) "$token")
    end
end
complete -c fdsl-bench -f -a '(__fdsl_bench)'
END
    ;;
*) complete -F _fdsl_bench fdsl-bench ;;
esac
