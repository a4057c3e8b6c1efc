#!/usr/bin/env bash
# Runs the lines of a table through fdsl-bench, one task per line, and merges their rows.
#
#   scripts/sweep/run.sh TABLE               runs unfinished tasks, then merges
#   scripts/sweep/run.sh TABLE --task N      runs only task N and does not merge (for job arrays)
#   scripts/sweep/run.sh TABLE --collect     merges finished tasks, runs nothing
#   scripts/sweep/run.sh TABLE --dry-run     checks the table and lists its tasks, runs nothing
#   scripts/sweep/run.sh TABLE --todo        checks the table and prints the numbers of its unfinished tasks, one per line
#   --scale N                                runs every line on 1, 2, 4, ... and N ranks; the column ranks is ignored;
#                                            can be combined with any mode above
#   --redo                                   deletes the rows of finished tasks first, and repeats these tasks
#   --out DIR                                folder for results (default: results/ in the repository)
#
# TABLE is a table for fdsl-bench --table, which reads and checks it: tab-separated or CSV, a header with options
# (docs/sweeps.md), one task per line. Nothing runs unless the whole table is valid.
#
# For configs/sweep_NAME.tsv, task 3 writes DIR/sweep/NAME/task_3.csv (atomically) and task_3.command, the command line
# that produced these rows. Merged rows go to DIR/sweep_NAME.csv. With --scale N, NAME becomes NAME_N.
#
# Tasks that cannot run on this machine are skipped; a failed task does not stop the others. FDSL_BENCH: the program
# (./fdsl-bench). MPIRUN: the launcher and its options; the number of ranks follows (mpirun --bind-to none -n).
#
# Exit status: 0 done, 1 a task failed, 2 usage or an error in the table, 4 no task can run here (with --task: this task
# cannot), 128 + n after signal n.
set -uo pipefail
trap '' XFSZ # writes beyond the file-size limit then fail, and the failure is reported

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd) || exit
read -ra launcher <<<"${MPIRUN:-mpirun --bind-to none -n}"
lock_wait_s=5

# Arrays with one entry per task, from index 1: line of the table, ranks, command without and with the launcher, and the
# reason why the task cannot run here.
line_of=('') ranks_of=('') run_of=('') command_of=('') lacks=('')

part='' messages='' # temporary files to delete if interrupted

say() { # text; clears a progress line first
    clear_progress
    printf '%s\n' "$1" 2>/dev/null || die 1 'stdout cannot be written; finished tasks are kept'
}

clear_progress() { [[ ! -t 2 ]] || printf '\r\033[K' >&2; }

complain() {
    clear_progress
    printf 'sweep/run.sh: %s\n' "$1" >&2
}

die() { # exit status, text
    complain "$2"
    exit "$1"
}

usage() {
    complain "$1; see --help"
    exit 2
}

help() {
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit
}

# ---- The command line ----

mode=run table='' only='' redo='' most='' out=$root/results

set_mode() {
    [[ $mode == run ]] || usage "--$mode and --$1 exclude each other"
    mode=$1
}

read_arguments() {
    while (($#)); do
        case $1 in
        --task)
            only=${2-}
            [[ $only =~ ^[1-9][0-9]{0,8}$ ]] || usage "--task '$only': give the number of a task, from 1"
            shift
            ;;
        --out)
            out=${2-}
            [[ $out ]] || usage '--out needs a folder'
            shift
            ;;
        --scale)
            most=${2-}
            [[ $most =~ ^[1-9][0-9]{0,5}$ ]] || usage "--scale '$most': give a number of ranks"
            shift
            ;;
        --redo) redo=yes ;;
        --collect | --dry-run | --todo) set_mode "${1#--}" ;;
        -h | --help) help ;;
        -*) usage "unknown option '$1'" ;;
        *)
            [[ ! $table ]] || usage "one table at a time, not '$table' and '$1'"
            table=$1
            ;;
        esac
        shift
    done
    [[ $table ]] || usage 'name a table, such as configs/sweep_cpu.tsv'
    [[ $mode == run || $mode == todo || ! $redo ]] || usage "--$mode and --redo exclude each other"
    [[ $mode == run || $mode == dry-run || ! $only ]] || usage "--$mode and --task exclude each other"
    [[ -f $table && -r $table ]] || die 2 "$table is missing, unreadable or not a regular file; see configs/ for tables"
    bench=${FDSL_BENCH:-$root/fdsl-bench}
    bench=$(command -v -- "$bench") ||
        die 4 "${FDSL_BENCH:-$root/fdsl-bench} does not exist; run make first, or name the program in FDSL_BENCH"
    name=${table##*/} name=${name%.[ct]sv} name=${name#sweep_}
    [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || die 2 "$table: rename it; use only letters, digits, '.', '-' and '_'"
    name+=${most:+_$most} folder=$out/sweep/$name
    check_owner
}

# Refuses two tables with the same name in different folders, which would use each other's results. If the earlier table
# does not exist any more, assumes that this is the same table and was moved.
check_owner() {
    local owner
    owner=$(cat "$folder/table" 2>/dev/null) || return 0
    [[ $owner == /* ]] || owner=$root/$owner
    [[ ! -e $owner || $owner -ef $table ]] ||
        die 2 "$folder has the tasks of $owner, not of $table; rename one of the tables, or choose another folder with --out"
}

# ---- The table ----

quoted_field='^"(([^"]|"")*)"(,|$)(.*)' plain_field='^(([^,])*)(,|$)(.*)'

# Moves the first field of the CSV line in $rest into a variable.
take() { # variable
    [[ $rest =~ $quoted_field || $rest =~ $plain_field ]]
    printf -v "$1" %s "${BASH_REMATCH[1]//\"\"/\"}"
    rest=${BASH_REMATCH[4]}
}

# Calls the program to list the tasks of the table, or with --dry-run to check them.
each_task() { # options of the program, then a function, which is called for each task with $n, $line, $ranks ... set
    local rest rows field status n line ranks state reason command
    rows=$("$bench" --table "$table" ${most:+--scale "$most"} --format csv "${@:1:$#-1}") || {
        status=$?
        ((status == 2)) && exit 2
        die $((status == 126 || status == 127 ? 4 : 1)) "$table: fdsl-bench --table ended with status $status"
    }
    while IFS= read -r rest; do
        for field in n line ranks state reason command; do take "$field"; done
        "${@: -1}"
    done <<<"${rows#*$'\n'}"
}

note_task() {
    run_of+=("$command")
    ((ranks == 1)) || command="${launcher[*]} $ranks $command"
    line_of+=("$line") ranks_of+=("$ranks") command_of+=("$command") lacks+=('')
}

read_table() {
    each_task --list note_task
    task_count=$((${#line_of[@]} - 1))
    [[ ! $only ]] || ((only <= task_count)) || die 2 "$table: there is no task $only; the last task is $task_count"
    tasks=("${only:-1}")
    [[ $only ]] || mapfile -t tasks < <(seq "$task_count")
}

note_reason() {
    lacks[n]=$reason
    [[ ! $reason && $ranks != 1 && ! $have_launcher ]] || return 0
    [[ ! ${MPIRUN-} ]] || die 2 "MPIRUN: there is no program '${launcher[0]}'"
    lacks[n]="${launcher[0]} is not installed"
}

# Asks the program, in one call, whether it can run each task.
check_tasks() {
    local have_launcher=yes
    command -v "${launcher[0]}" >/dev/null || have_launcher=''
    each_task --dry-run ${only:+--task "$only"} note_reason
}

# ---- The launcher ----

# Runs a program in the background and waits for it, because traps would not run during a foreground program. Writes the
# program's messages to the file $messages. If the program outlives this script, it keeps the lock of its task.
attend() { # command ...
    "$@" >/dev/null 2>"$messages" &
    wait "$!"
}

# If the launcher refused to start for one of two known reasons, prints the reason and the setting that permits the
# start. Otherwise prints nothing. The launcher's own message would fill a screen.
forbidden() { # ranks
    case $(<"$messages") in
    *'not enough slots'*) echo "${launcher[0]} has fewer slots than $1 ranks; to oversubscribe: export \
OMPI_MCA_rmaps_base_oversubscribe=1 (Open MPI 5: PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe)" ;;
    *'run as root'*) echo "${launcher[0]} refuses to run as root; to allow it: export \
OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" ;;
    esac
}

# Tests the launcher for each number of ranks, before the first task, with a program that does nothing.
try_launcher() {
    local n ranks asked=() reason_of=()
    for n in "${tasks[@]}"; do
        ranks=${ranks_of[n]}
        [[ ! ${lacks[n]} && $ranks != 1 ]] || continue
        [[ $redo ]] || ! finished "$n" || continue
        if [[ ! ${asked[ranks]-} ]]; then
            asked[ranks]=yes
            attend "${launcher[@]}" "$ranks" true || reason_of[ranks]=$(forbidden "$ranks")
            [[ ! ${reason_of[ranks]-} ]] || complain "tasks of $ranks ranks are skipped: ${reason_of[ranks]}"
        fi
        lacks[n]=${reason_of[ranks]-}
    done
}

# ---- One task ----

# Succeeds if the task's rows exist and the task's command wrote them. The launcher in that command may differ.
finished() { # task
    local command
    [[ -f $folder/task_$1.csv && -f $folder/task_$1.command ]] && IFS= read -r command <"$folder/task_$1.command" || return
    [[ $command == "${command_of[$1]}" ]] ||
        [[ ${ranks_of[$1]} != 1 && $command == *" ${command_of[$1]#"${launcher[*]} "}" ]]
}

# Runs a task. On failure, sets $why and leaves the messages in the file $messages. Writes the rows to a temporary file
# and renames it when they are complete. Deletes old rows before it changes task_N.command, so that rows and command
# always match.
make_rows() { # task
    local rows=$folder/task_$1.csv command=$folder/task_$1.command words program=("$bench") status
    eval "words=(${run_of[$1]#fdsl-bench})" # the program has quoted them for a shell
    ((ranks_of[$1] == 1)) || program=("${launcher[@]}" "${ranks_of[$1]}" "$bench")
    part=$rows.part
    why="cannot write to $folder"
    { rm -f "$rows" "$part" && printf '%s\n' "${command_of[$1]}" >"$command"; } 2>"$messages" || return 1
    attend "${program[@]}" "${words[@]}" --out="$part"
    status=$?
    why="exit $status"
    ((status == 0)) && why="cannot rename $part" && mv "$part" "$rows" 2>>"$messages" && return
    rm -f "$part"
    return $((status ? status : 1))
}

finished_before() { # task
    [[ ! $redo ]] && finished "$1" && say "task $1 of $task_count: finished before: ${command_of[$1]}"
}

# Returns 0 if the task finished, 1 if it failed, 2 if it had finished before, 4 if it cannot run here. Takes a lock, so
# that only one process runs a task.
run_task() { # task
    local lock status=0 began_s=$SECONDS label="task $1 of $task_count"
    finished_before "$1" && return 2
    if [[ ${lacks[$1]} ]]; then
        say "$label: skipped: ${lacks[$1]}"
        return 4
    fi
    if ! { exec {lock}>>"$folder/task_$1.command"; } 2>"$messages"; then
        complain "$label: cannot write to $folder: $(sed 's/.*: //' "$messages")"
        return 1
    fi
    flock --wait "$lock_wait_s" --conflict-exit-code 75 "$lock" 2>/dev/null
    if (($? == 75)); then # any other failure means that the file system has no locks
        complain "$label: another process is running it"
        status=1
    elif finished_before "$1"; then
        status=2
    elif make_rows "$1"; then
        say "$label: $((SECONDS - began_s)) s: ${command_of[$1]}"
        sed -E "s/^(fdsl-bench: )?/$label: /" "$messages" >&2 # warnings
    elif (($? == 4)); then # show fdsl-bench's line, not the launcher's
        say "$label: skipped: $(sed -n 's/^fdsl-bench: //p' "$messages" | head -n 1)"
        status=4
    else
        complain "$label failed ($why): ${command_of[$1]}"
        cat "$messages" >&2
        status=1
    fi
    exec {lock}>&-
    return "$status"
}

# ---- All tasks ----

show_progress() { # task, how many ran, how many are left
    local left=''
    [[ -t 2 ]] || return
    (($2 == 0)) || left=", about $((SECONDS * $3 / $2)) s left"
    printf '\r\033[Ktask %d of %d%s' "$1" "$task_count" "$left" >&2
}

# shellcheck disable=SC2317  # called by traps
stop() { # signal, its number
    local running
    trap - INT TERM HUP
    read -ra running <<<"$(jobs -pr)" # there is at most one
    ((${#running[@]} == 0)) || { kill -TERM "${running[@]}" 2>/dev/null && wait "${running[@]}"; }
    complain "ended by SIG$1; finished tasks are kept; to continue, repeat the command${redo:+ without --redo}"
    exit $((128 + $2))
}

prepare_folder() {
    local message
    message=$(mkdir -p "$folder" 2>&1)
    [[ -d $folder && -w $folder ]] ||
        die 2 "cannot write to $folder${message:+ ($message)}; choose another folder with --out"
    messages=$(mktemp -t fdsl-sweep.XXXXXX) # not in $folder, because its disk may be full
    [[ $messages ]] || die 1 'cannot create a temporary file; name a writable folder in TMPDIR'
    # A failure here is not reported, because writing the first rows will then also fail, and that is reported.
    part=$folder/table.part.$$
    { realpath --relative-base="$root" -- "$table" >"$part" && mv "$part" "$folder/table"; } 2>/dev/null ||
        rm -f "$part"
}

run_tasks() {
    local n status ran=0 finished_count=0 before=0 skipped=() failed=()
    prepare_folder
    try_launcher
    # With --redo, deletes all rows that will be repeated. After an interruption, the same command without --redo continues.
    for n in ${redo:+"${tasks[@]}"}; do [[ ${lacks[n]} ]] || rm -f "$folder/task_$n.csv"; done
    for n in "${tasks[@]}"; do
        show_progress "$n" "$ran" $((${#tasks[@]} - finished_count - before - ${#skipped[@]} - ${#failed[@]}))
        run_task "$n"
        status=$?
        case $status in
        0) ((ran += 1, finished_count += 1)) ;;
        2) ((before += 1)) ;;
        4) skipped+=("$n") ;;
        *) ((ran += 1)) && failed+=("$n") ;;
        esac
    done
    if [[ $only ]]; then
        ((status == 2)) && status=0
        return "$status"
    fi
    say "$name: $finished_count finished, $before finished before, ${#skipped[@]} skipped${skipped[*]:+ (${skipped[*]})}, \
${#failed[@]} failed${failed[*]:+ (${failed[*]})}"
    ((finished_count + before == 0)) || collect || return
    ((${#failed[@]} == 0)) || return 1
    ((${#skipped[@]} < task_count)) || return 4
}

# Merges the files of finished tasks, in the order of the table. One process reads all of them.
merge_rows() {
    local files=("${have[@]/#/$folder/task_}")
    clear_progress
    awk 'FNR > 1 { print; next }
        NR == 1 { header = $0; print }
        $0 != header { print "sweep/run.sh: " FILENAME " and " first " have different columns, because two versions of fdsl-bench wrote them; " \
            "rerun with --redo" >"/dev/stderr"; exit 1 }
        NR == 1 { first = FILENAME }' "${files[@]/%/.csv}"
}

collect() {
    local n have=() without=() merged=$out/sweep_$name.csv
    for n in $(seq "$task_count"); do
        if finished "$n"; then have+=("$n"); else without+=("$n"); fi
    done
    ((${#have[@]})) || die 1 "no task of $name is finished; run the table without --collect first"
    part=$merged.part.$$
    if ! { merge_rows >"$part" && sync "$part" && mv "$part" "$merged"; }; then
        rm -f "$part"
        die 1 "$merged could not be written; an earlier file is unchanged"
    fi
    say "rows of ${#have[@]} task$( ((${#have[@]} == 1)) || echo s): $merged${without[*]:+ (without ${without[*]})}"
}

list_tasks() {
    local n state
    for n in "${tasks[@]}"; do
        state='to run'
        [[ ! ${lacks[n]} ]] || state="cannot run here: ${lacks[n]}"
        ! finished "$n" || state=finished
        say "task $n, line ${line_of[n]}, $state: ${command_of[n]}"
    done
}

list_unfinished() {
    local n
    for n in "${tasks[@]}"; do
        { [[ ! $redo ]] && finished "$n"; } || say "$n"
    done
}

read_arguments "$@"
read_table
trap 'rm -f ${part:+"$part"} ${messages:+"$messages"}' EXIT
trap 'stop INT 2' INT
trap 'stop TERM 15' TERM
trap 'stop HUP 1' HUP
case $mode in
run) check_tasks && run_tasks ;;
dry-run) check_tasks && list_tasks ;;
collect) collect ;;
todo) check_tasks && list_unfinished ;;
esac
