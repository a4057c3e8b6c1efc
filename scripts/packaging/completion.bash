# bash completion for fdsl-bench. It takes options and values from the program itself.
_fdsl_bench()
{
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} words prepare=() chosen=() i
    [[ " ${COMP_WORDS[*]} " == *' --prepare '* ]] && prepare=(--prepare x)
    for ((i = 1; i + 1 < ${#COMP_WORDS[@]}; i++)); do # the workload that the command line means
        [[ ${COMP_WORDS[i]} != --workload && ${COMP_WORDS[i]} != --variant ]] || chosen=("${COMP_WORDS[i]}" "${COMP_WORDS[i + 1]}")
    done
    case $previous in
    --variant)
        # Complete the last element of a comma-separated list.
        local before=${current%"${current##*,}"}
        words="all $(fdsl-bench --list 2>/dev/null | awk '/^  / { print $1 }')"
        mapfile -t COMPREPLY < <(compgen -P "$before" -W "$words" -- "${current##*,}")
        ;;
    --workload)
        words=$(fdsl-bench --help 2>/dev/null | awk '/^workloads/ { on = 1; next } on && /^$/ { exit } on { print $1 }')
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
        ;;
    --format) mapfile -t COMPREPLY < <(compgen -W 'table csv json' -- "$current") ;;
    --scaling) mapfile -t COMPREPLY < <(compgen -W 'weak strong' -- "$current") ;;
    --bind) mapfile -t COMPREPLY < <(compgen -W 'auto none' -- "$current") ;;
    --formula) mapfile -t COMPREPLY < <(compgen -W 'uji visualatom' -- "$current") ;;
    --output) mapfile -t COMPREPLY < <(compgen -W 'u8 f16 bf16 f32' -- "$current") ;;
    --channels) mapfile -t COMPREPLY < <(compgen -W '1 3' -- "$current") ;;
    --layout)
        words='nchw nhwc'
        ((${#prepare[@]})) && words='files shards'
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
        ;;
    --from) mapfile -t COMPREPLY < <(compgen -W 'counter synth idx cifar digits clips dataset' -- "$current") ;;
    --encode) mapfile -t COMPREPLY < <(compgen -W 'png npy' -- "$current") ;;
    --dtype) mapfile -t COMPREPLY < <(compgen -W 'f16 u8 f32' -- "$current") ;;
    --model) mapfile -t COMPREPLY < <(compgen -W 'logreg lenet cnn cnn3d cnn-fdsl' -- "$current") ;;
    --optimizer) mapfile -t COMPREPLY < <(compgen -W 'sgd adam adamw' -- "$current") ;;
    --lr-schedule) mapfile -t COMPREPLY < <(compgen -W 'constant step cosine' -- "$current") ;;
    --data) mapfile -t COMPREPLY < <(compgen -W 'digits clips synth' -- "$current"; compgen -d -- "$current") ;;
    --fit) mapfile -t COMPREPLY < <(compgen -W 'resize crop' -- "$current") ;;
    --out | --samples-out | --config | --monitor | --class | --preset-file | --write-classes | --sheet | --npy | --source | --labels | --init | --checkpoint | \
        --export | --export-step | --export-data)
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
        ;;
    --png | --prepare) mapfile -t COMPREPLY < <(compgen -d -- "$current") ;;
    *)
        words=$({
            fdsl-bench "${prepare[@]}" --help
            ((${#prepare[@]} || !${#chosen[@]})) || fdsl-bench "${chosen[@]}" --help
        } 2>/dev/null | grep -oE '^  (-[a-z], )?--[a-z0-9-]+' | grep -oE -- '--.*' | sort -u)
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
        ;;
    esac
}
complete -F _fdsl_bench fdsl-bench
