# shellcheck shell=bash
# Runs checks in parallel. Scripts with many checks source this file. Prints one line per check, the output of
# failed checks, and finally "N passed, N failed". JOBS: parallel checks (default: half of the processors, at most 8).
# ONLY=REGEX: run only the checks whose names match. LIMIT: time limit per check in seconds (default 600); a check that
# hangs fails, and the others continue.

refuse() { # reason
    rm -f "${checks_log:-}"
    echo "${0##*scripts/}: $1" >&2
    exit 2
}

# Sets `list` to the list of variants. Exits with status 4 if this one cannot run here.
# shellcheck disable=SC2154  # the script that sources this file sets bench
need_variant() { # name
    list=$("$bench" --list)
    [[ ! $list =~ (^|$'\n')\ *$1\ +available ]] || return 0
    echo "${0##*scripts/}: $1 does not run here:$(grep " $1 " <<<"$list")" >&2
    rm -f "$checks_log"
    exit 4
}

# Reads [--sanitize] [--variant NAMES] [DIR]: sets `sanitize`, and, if they are given, `variants` and `dir`.
# shellcheck disable=SC2034  # the script uses these variables
read_options() { # 1 if the script takes a folder, else 0; arguments ...
    local operands=$1
    sanitize=0 dir=
    while shift && (($#)); do
        case $1 in
        --sanitize) sanitize=1 ;;
        --variant)
            [[ -n ${2:-} ]] || refuse '--variant: give names, separated by commas'
            variants=$2 && shift
            ;;
        -*) refuse "unknown option '$1'; see --help" ;;
        *)
            ((operands)) || refuse "unknown option '$1'; see --help"
            dir=$1
            ;;
        esac
    done
}

[[ ${JOBS:-1} =~ ^[1-9][0-9]{0,3}$ ]] || refuse "JOBS=$JOBS: give a whole number from 1 to 9999, the number of parallel checks"
[[ ${LIMIT:-1} =~ ^[1-9][0-9]{0,3}$ ]] || refuse "LIMIT=$LIMIT: give a whole number from 1 to 9999, the seconds per check"
matches=0 # status of =~; 2: not a regular expression
[[ x =~ ${ONLY:-} ]] 2>/dev/null || matches=$?
((matches < 2)) || refuse "ONLY=$ONLY is not a regular expression"
checks_at_once=${JOBS:-$(($(nproc) < 16 ? ($(nproc) + 1) / 2 : 8))}
check_limit_s=${LIMIT:-600}
checks_log=$(mktemp)

# Gives each check its share of the processors, unless OMP_NUM_THREADS is set. OpenMP threads spin at barriers. Parallel
# checks with more threads than processors would therefore take minutes.
share_processors() {
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + checks_at_once - 1) / checks_at_once))}
}

# Kills a process, then its descendants. Checks have no process groups of their own, because those would outlive an
# interrupted script.
kill_tree() { # pid
    local children=() child
    read -rd '' -a children < <(cat "/proc/$1/task/"*/children 2>/dev/null) || true # ends without a NUL
    kill -KILL "$1" 2>/dev/null || true                                             # it may have ended
    for child in "${children[@]}"; do kill_tree "$child"; done
}

# Checks are background processes, which ignore interrupts, so this trap kills them.
trap 'exec 2>/dev/null; for pid in $(jobs -rp); do kill_tree "$pid"; done; exit 130' INT TERM

limited() { # command ...: fails if the command fails or takes longer than the limit
    local pid status=0
    "$@" &
    pid=$!
    timeout "$check_limit_s" tail -s 0.05 -f /dev/null --pid="$pid" ||
        {
            kill_tree "$pid"
            echo "did not end within $check_limit_s s; if it is only slow, give it more time: LIMIT=$((check_limit_s < 5000 ? check_limit_s * 2 : 9999))"
            ! declare -F at_limit >/dev/null || at_limit "$@"
        }
    wait "$pid" || status=$?
    return "$status"
}

check() { # name, command ...
    [[ $1 =~ ${ONLY:-} ]] || return 0
    while (($(jobs -rp | wc -l) >= checks_at_once)); do wait -n || true; done
    (
        # The output goes to a file, because a process that a command leaves behind could keep a pipe open.
        name=$1 begin=$SECONDS verdict=ok output='' said=$(mktemp)
        shift
        limited "$@" >"$said" 2>&1 || verdict=FAILED
        [[ $verdict == ok ]] || output=$(<"$said")
        rm -f "$said"
        # Checks that end together are counted one by one. The lock is released at the end of this subshell.
        exec {lock}<"$checks_log"
        flock "$lock"
        printf '%-7s %3d s  %s\n%s' $verdict $((SECONDS - begin)) "$name" "${output:+$output$'\n'}" | tee -a "$checks_log"
        ended=$(grep -cE '^(ok|FAILED) +[0-9]+ s  ' "$checks_log")
        [[ ! ${checks_total:-} ]] || ((ended % 10 && ended != checks_total)) || echo "        $ended of $checks_total suites have ended"
    ) &
}

alone() { # command: runs it while no other check runs, because it is timed
    wait
    "$@"
    wait
}

fails_with() { # exit status, words of the message, command ...
    local wanted=$1 words=$2 output status=0
    shift 2
    output=$(timeout 120 "$@" 2>&1) || status=$?
    ((status == wanted)) && grep -q "$words" <<<"$output" && return
    printf 'exit status %d, expected %d:\n%s\n' "$status" "$wanted" "$output"
    return 1
}

count_gpus() { # prints the number of GPUs that programs see
    if [[ ${CUDA_VISIBLE_DEVICES:-} ]]; then tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .; else nvidia-smi -L | grep -c ^GPU; fi
}

columns() { # file, names: prints these columns of a CSV file
    awk -F, -v names="$2" 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; count = split(names, name, " "); next }
        { for (i = 1; i <= count; i++) printf "%s ", $at[name[i]]; print "" }' "$1"
}

# Sends a signal to the last rank of a job under Open MPI. The job must then end in time, and its output must name the rank.
kill_last_rank() { # file with the output, pid of mpirun, words of the command line of the ranks, number of ranks, signal (KILL), seconds (15)
    local last=$(($4 - 1)) victim status=0 begin=$SECONDS
    victim=$(pgrep -f "$3" | while read -r candidate; do
        grep -qz "OMPI_COMM_WORLD_RANK=$last$" "/proc/$candidate/environ" 2>/dev/null && echo "$candidate" && break
    done)
    [[ $victim ]] || { cat "$1" && kill "$2" && return 1; }
    kill -"${5:-KILL}" "$victim"
    wait "$2" || status=$?
    cat "$1"
    ((status != 0 && SECONDS - begin <= ${6:-15})) && grep -qi "rank $last" "$1"
}

conclude() { # returns 1 if a check failed or none ran; exits with 2 if ONLY matches no check
    local passed failed
    wait
    passed=$(grep -cE '^ok +[0-9]+ s  ' "$checks_log") || true
    failed=$(grep -cE '^FAILED +[0-9]+ s  ' "$checks_log") || true
    ((passed + failed > 0)) || [[ -z ${ONLY:-} ]] || refuse "ONLY=$ONLY matches no check"
    rm -f "$checks_log"
    echo "$passed passed, $failed failed"
    ((failed == 0 && passed > 0))
}
