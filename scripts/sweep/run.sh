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
# TABLE is tab-separated. Its first line has option names of fdsl-bench without dashes. The additional column ranks is
# the number of MPI ranks. Each further line is a task: `-` omits an option, `yes` gives an option without a value.
# Blank lines and lines that begin with # are ignored. Nothing runs unless the whole table is valid.
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

# Options that a table may not have. With the options listed here, the program would run nothing. check_columns() adds
# the options whose value is a file or a folder, except those in `inputs`, because all tasks would write to the same
# file. It also adds `config`, because an INI file may contain any option.
refused='dry-run list env verbose version help'
inputs='checkpoint class data init preset-file'
byte_order_mark=$'\xef\xbb\xbf'

# Arrays with one entry per task, from index 1: line of the table, ranks, options (one per line), complete
# command, and the reason why the task cannot run here.
line_of=('') ranks_of=('') options_of=('') command_of=('') lacks=('')

part='' messages='' child='' # if interrupted: temporary files to delete, and the process to stop

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
    name=${table##*/} name=${name%.tsv} name=${name#sweep_}
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

refuse() { die 2 "$table:$number: ${1//[^[:print:]]/?}"; } # text; adds the name of the table and the number of its current line

check_columns() {
    local column message known
    known=$("$bench" --help --verbose) || die 4 "cannot start $bench; see $bench --help"
    refused+=" $(sed -nE 's/^  --([a-z0-9-]+) (FILE|DIR).*/\1/p' <<<"$known" | grep -vxF "${inputs// /$'\n'}" | paste -sd' ')"
    known=$'\n'ranks$'\n'$(sed -nE 's/^  (-[a-z], )?--([a-z0-9-]+).*/\2/p' <<<"$known")$'\n'
    for column in "${columns[@]}"; do
        [[ " $refused " != *" $column "* ]] || refuse "column '$column' cannot be used in a sweep"
        [[ $(printf '%s\n' "${columns[@]}" | grep -cxF -e "$column") == 1 ]] || refuse "column '$column' occurs twice"
        [[ $known != *$'\n'"$column"$'\n'* ]] || continue
        [[ $column != *[[:blank:]]* ]] || refuse "unknown column '$column'; separate columns by tabs, not spaces"
        [[ $column != -* ]] || refuse "unknown column '$column'; write it without dashes"
        message=$("$bench" --dry-run "--$column" 2>&1 >/dev/null)
        message=${message##*;}
        [[ $message != *'did you mean'* ]] || refuse "unknown column '$column';${message/--/}"
        refuse "unknown column '$column'; columns are ranks and the options of fdsl-bench --help -v, in full"
    done
}

declare -A line_with # the line of the task with this command

# Adds a task for line $number. Starts no process, because a table may have thousands of lines.
add_task() { # ranks, options ...
    local command IFS=$'\n'
    printf -v command '%q ' fdsl-bench "${@:2}"
    (($1 == 1)) || { IFS=' ' && command="${launcher[*]} $1 $command" && IFS=$'\n'; }
    [[ ! ${line_with[$command]-} ]] || refuse "the same task as line ${line_with[$command]}"
    line_with[$command]=$number
    line_of+=("$number") ranks_of+=("$1") command_of+=("${command% }") lacks+=('') options_of+=("${*:2}")
}

# For --scale, lines of the table that differ only in ranks and scaling form a case. case_line has the first line of each case.
# case_kinds has the kinds of scaling in the lines of each case. A line with one rank and no scaling adds no kind, because one
# rank is the baseline of every kind.
declare -A case_line case_kinds
cases=()

note_case() { # ranks, scaling, options ...
    local key
    printf -v key '%s\n' "${@:3}"
    [[ ${case_line[$key]-} ]] || { cases+=("$key") && case_line[$key]=$number; }
    [[ $1 == 1 && ! $2 ]] || [[ ${case_kinds[$key]-} == *" ${2:-weak}"* ]] || case_kinds[$key]+=" ${2:-weak}"
}

add_scaled_tasks() {
    local key kind ranks number options
    for key in "${cases[@]}"; do
        number=${case_line[$key]}
        mapfile -t options <<<"${key%$'\n'}"
        add_task 1 "${options[@]}"
        ((most > 1)) || continue
        for kind in ${case_kinds[$key]:-weak}; do
            for ((ranks = 2; ranks < most; ranks *= 2)); do add_task "$ranks" "${options[@]}" --scaling="$kind"; done
            add_task "$most" "${options[@]}" --scaling="$kind"
        done
    done
}

add_line() { # fields
    local i value ranks=1 scaling='' options=()
    (($# == ${#columns[@]})) || refuse "$# fields, but the header has ${#columns[@]}; separate fields by tabs, and use - for omitted options"
    for i in "${!columns[@]}"; do
        value=$1 && shift
        case ${columns[i]}:$value in
        *:) refuse "column '${columns[i]}' is empty; write - to omit the option" ;;
        *:-) ;;
        ranks:*)
            [[ $value =~ ^[1-9][0-9]{0,6}$ ]] || refuse "ranks is '$value', not a number from 1"
            ranks=$value
            ;;
        scaling:?*) if [[ $most ]]; then scaling=$value; else options+=("--scaling=$value"); fi ;;
        *:yes) options+=("--${columns[i]}") ;;
        *) options+=("--${columns[i]}=$value") ;;
        esac
    done
    ((${#options[@]})) || refuse 'no option is given'
    [[ ! "${options[*]}" =~ --checkpoint= || "${options[*]}" =~ --(variant|workload)=infer ]] ||
        refuse "column 'checkpoint' can be used in a sweep only with infer, which reads it"
    if [[ $most ]]; then note_case "$ranks" "$scaling" "${options[@]}"; else add_task "$ranks" "${options[@]}"; fi
}

read_table() {
    local line columns=() fields number=0
    while IFS= read -r line || [[ $line ]]; do
        ((number += 1))
        line=${line%$'\r'}
        ((number > 1)) || line=${line#"$byte_order_mark"}
        [[ ! $line =~ ^[[:blank:]]*(#|$) ]] || continue
        mapfile -d $'\t' -t fields <<<"$line"$'\t'
        unset 'fields[-1]' # the line end
        if ((${#columns[@]})); then
            add_line "${fields[@]}"
        else
            columns=("${fields[@]}")
            check_columns
        fi
    done <"$table"
    add_scaled_tasks
    task_count=$((${#line_of[@]} - 1))
    ((task_count > 0)) || die 2 "$table: no tasks; give a line of option names, then one line per task"
    [[ ! $only ]] || ((only <= task_count)) || die 2 "$table: there is no task $only; the last task is $task_count"
    tasks=("${only:-1}")
    [[ $only ]] || mapfile -t tasks < <(seq "$task_count")
}

# Asks the program, in one call, whether it can run each task.
check_tasks() {
    local n i=0 status reasons have_launcher=yes
    reasons=$(for n in "${tasks[@]}"; do
        printf '%s:%d\t--ranks=%d\t%s\n' "$table" "${line_of[n]}" "${ranks_of[n]}" "${options_of[n]//$'\n'/$'\t'}"
    done | "$bench" --check /dev/stdin)
    status=$?
    ((status == 0)) || { ((status <= 2)) && exit "$status"; } || die 1 "$table: fdsl-bench --check ended with status $status"
    mapfile -t reasons <<<"$reasons"
    command -v "${launcher[0]}" >/dev/null || have_launcher=''
    for n in "${tasks[@]}"; do
        lacks[n]=${reasons[i++]-}
        [[ ! ${lacks[n]} && ${ranks_of[n]} != 1 && ! $have_launcher ]] || continue
        [[ ! ${MPIRUN-} ]] || die 2 "MPIRUN: there is no program '${launcher[0]}'"
        lacks[n]="${launcher[0]} is not installed"
    done
}

# ---- The launcher ----

# Runs a program in the background and waits for it, because traps would not run during a foreground program. Writes the
# program's messages to the file $messages. If the program outlives this script, it keeps the lock of its task.
attend() { # command ...
    local status
    "$@" >/dev/null 2>"$messages" &
    child=$!
    wait "$child"
    status=$?
    child=''
    return "$status"
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
    local rows=$folder/task_$1.csv command=$folder/task_$1.command program=("$bench") options status
    mapfile -t options <<<"${options_of[$1]}"
    ((ranks_of[$1] == 1)) || program=("${launcher[@]}" "${ranks_of[$1]}" "$bench")
    part=$rows.part
    why="cannot write to $folder"
    { rm -f "$rows" "$part" && printf '%s\n' "${command_of[$1]}" >"$command"; } 2>"$messages" || return 1
    attend "${program[@]}" "${options[@]}" --out="$part"
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
    trap - INT TERM HUP
    [[ ! $child ]] || { kill -TERM "$child" 2>/dev/null && wait "$child"; }
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
