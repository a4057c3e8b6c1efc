#!/usr/bin/env bash
# Runs the test suites in BUILD/tests and, unless SAN is 1, lint.sh, cross.sh and python.sh of this folder. `make check`
# calls this script.
#
#   scripts/check/run.sh BUILD SAN           SAN=1: a build with ASan and UBSan
#   scripts/check/run.sh --list BUILD SAN    only prints the paths of the suites that it would run
#
#   JOBS=N        number of parallel suites; default: three per two cores
#   ONLY=REGEX    runs only the suites whose names match (the scripts are the suites lint, cross and python)
#   SKIP=REGEX    leaves out the test_* suites whose names match
#   LIMIT=N       time limit per suite in seconds; default: 600
#   MEMORY=1      gives most suites a /tmp of their own in memory, which needs root. Otherwise, files are on the disk.
#
# Prints one line per suite, the output of failed suites, and finally "N passed, N failed" over all tests. On a terminal,
# also prints now and then how many suites have ended. Exit status 1 if anything failed.
set -uo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.." || exit

list=''
[[ ${1:-} != --list ]] || { list=yes && shift; }
build=$1 san=${2:-0}
# Suites often wait for files, signals and other processes. More suites than cores keep the cores busy.
JOBS=${JOBS:-$((($(env -u OMP_NUM_THREADS nproc) * 3 + 1) / 2))}
# shellcheck source=scripts/check/parallel.sh
source scripts/check/parallel.sh
counts=$(mktemp) # one line per suite: tests that passed, tests that failed
logs=$(mktemp -d) # output of suites and scripts
trap 'rm -rf "$counts" "$counts.checks" "$logs"' EXIT

# Memory that libraries keep for the lifetime of the process is not a leak.
export LSAN_OPTIONS="suppressions=$PWD/tests/lsan.supp:print_suppressions=0"
export UBSAN_OPTIONS=print_stacktrace=1
export CRITERION_VERBOSITY_LEVEL=1 # prints the name of each test that begins; see at_limit()

# After a rank has failed, mpirun waits a second for the others to end. Tests of failures do not need this wait.
export OMPI_MCA_odls_base_sigkill_timeout=0

# The longest suites start first, so that no long suite runs alone at the end.
longest_first=(test_memory test_remote test_docs test_prepare_killed test_train_cli test_figures test_choice test_mpi_train
    test_stream test_prepare test_train_load test_variants test_advise test_mpi test_train_data test_load_others test_break_even
    test_hostile test_fractal_classes test_pretrain test_report test_train_optim test_sweep test_command test_mpi_shares test_mpi_pipeline
    test_lib test_cli_runs test_output_variants test_output test_ops test_train_omp test_compare_ratio
    test_figures_load test_figures_train test_train_net test_lib_process test_interrupt test_cli test_lib_stream
    test_stream_files test_load_stream test_load test_train_verify test_train_steps test_checks test_compare
    test_mpi_sums test_mpi_heartbeat test_mpi_load test_live)

# Suites run in parallel, so there are more threads than processors. Threads that spin at barriers of OpenMP would take
# processor time from other suites.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

# The python3 of pyenv is a shell script, which takes longer than Python to start. Suites start Python hundreds of times.
if python=$(python3 -c 'import sys; print(sys.executable)' 2>/dev/null) && [[ $python == */python3 ]]; then
    PATH=${python%/*}:$PATH
fi

# Suites start the same scripts hundreds of times, so Python keeps what it compiles, outside of the source folders.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$PWD/build/pycache

# Suites that test only scripts. Sanitizers find nothing in them.
only_scripts='test_figures|test_figures_load|test_report|test_docs|test_checks|test_setup|test_make|test_sweep|test_sweep_slurm|test_break_even|test_submit|test_reference|test_pretrain'

# Suites send signals to programs that they start, so these must not ignore SIGINT or SIGHUP. Background processes ignore
# SIGINT, and processes that nohup starts ignore SIGHUP. coreutils before 8.31 cannot restore them.
restored=(env '--default-signal=INT,HUP')
"${restored[@]}" true 2>/dev/null || restored=()

# Suites create and remove many thousands of small files in /tmp. Some file systems need more processor time for that than
# the tests. These suites stay on the disk: those of `load` drop files from the page cache and read with O_DIRECT, and
# others kill a program while it writes.
on_disk='test_(load.*|mpi_load|memory|advise.*|figures_load|bench|compute|prepare_killed|interrupt|file_sync|live|remote|docs'
on_disk+='|variants|combinations|hostile|profile|timed|config)'
in_memory=()
# A /tmp in memory would hide a build in /tmp.
if [[ ${MEMORY:-} == 1 && $(realpath "$build")/ != /tmp/* ]]; then
    # shellcheck disable=SC2016 # the inner shell replaces $@
    in_memory=(unshare --mount sh -c 'mount -t tmpfs -o mode=1777 tmpfs /tmp && exec "$@"' sh)
    "${in_memory[@]}" true 2>/dev/null || { in_memory=() && echo '  note    MEMORY=1: /tmp stays on the disk, because mounting is not allowed'; }
fi
unset MEMORY # suites test this script

add_ticks() # pid ...: adds the processor time of the processes and their descendants to `ticks`, in clock ticks
{
    local pid stat fields=() children=()
    for pid; do
        read -r stat <"/proc/$pid/stat" || continue
        read -ra fields <<<"${stat##*) }"
        ((ticks += fields[11] + fields[12] + fields[13] + fields[14])) || true
        read -rd '' -a children < <(cat "/proc/$pid/task/"*/children) || true # ends without a NUL
        add_ticks "${children[@]}"
    done
} 2>/dev/null

# A test is a process that Criterion forks. The ASan of gcc 12 does not lock its allocator for the fork. If another thread
# holds a lock of the allocator then, the test waits for this lock for ever, whatever it tests. Therefore a suite that
# uses no processor time for 30 s under the sanitizers runs a second time. A suite that is only slow continues.
first_run() # program, or a command that becomes the program
{
    ((san)) || { "$@"; return; }
    local pid ticks before=0 idle_s=$((check_limit_s / 20)) status=0
    "$@" &
    pid=$!
    until timeout "$((idle_s + 1))" tail -s 0.05 -f /dev/null --pid="$pid"; do
        ticks=0
        add_ticks "$pid"
        # The sum decreases if a process ends and no other process waits for it.
        ((ticks < before || ticks > before + 5)) || { kill_tree "$pid" && echo 'used no processor time'; }
        before=$ticks
    done
    wait "$pid" || status=$?
    return "$status"
}

run_suite() # program
{
    local log=$logs/${1##*/} status=0 passed failed command=("${restored[@]}" "$1")
    [[ ${1##*/} =~ ^($on_disk)$ ]] || command=("${in_memory[@]}" "${command[@]}")
    first_run "${command[@]}" >"$log" 2>&1 || status=$?
    if ((san)) && grep -q '^used no processor time' "$log"; then
        status=0
        "${command[@]}" >"$log" 2>&1 || status=$?
    fi
    # [====] Synthesis: Tested: 12 | Passing: 12 | Failing: 0 | Crashing: 0
    read -r passed failed < <(sed -n 's/.*Tested: \([0-9]*\) | Passing: \([0-9]*\) .*/\1 \2/p' "$log" |
        awk 'END { print $2, $1 - $2 }')
    # Criterion counts a test as passed even if its process leaks, so look for reports of the sanitizers.
    if ((san)) && grep -q 'ERROR: .*Sanitizer\|runtime error:' "$log"; then status=1 failed=$((${failed:-0} + 1)); fi
    ((status == 0)) || { ((${failed:-0} > 0)) || failed=1; }
    echo "${passed:-0} ${failed:-0}" >>"$counts"
    grep -v '^\[\(RUN \|PASS\)\]' "$log"
    return "$status"
}

at_limit() # run_suite, program: names the tests that had begun but not ended when the suite reached its limit
{
    local log=$logs/${2##*/}
    sed -n 's/^\[\(RUN \|PASS\|FAIL\|SKIP\)\] \([^ ]*::[^ :]*\).*/\1 \2/p' "$log" | awk '
        $1 == "RUN" { began[$2] = 1; next }
        { delete began[$2] }
        END { for (test in began) print "still running: " test }'
    grep -v '^\[\(RUN \|PASS\)\]' "$log"
}

run_script() # program; counts as one test
{
    local log=$logs/${1##*/}
    "$1" >"$log" 2>&1 && echo '1 0' >>"$counts" && return
    echo '0 1' >>"$counts"
    cat "$log"
    return 1
}

list_suites() # prints each suite once, the longest first
{
    printf '%s\n' "${longest_first[@]}"
    (cd "$build/tests" && printf '%s\n' test_* | grep -v '[.]' | grep -vxF "$(printf '%s\n' "${longest_first[@]}")")
}

is_chosen() # suite
{
    ((san == 0)) || [[ ! $1 =~ ^($only_scripts)$ ]] || return 1
    [[ -z ${SKIP:-} || ! $1 =~ $SKIP ]]
}

if [[ $list ]]; then
    for source in tests/test_*.c; do
        suite=${source#tests/} suite=${suite%.c}
        ! is_chosen "$suite" || printf '%s\n' "$build/tests/$suite"
    done
    rm -f "$checks_log"
    exit 0
fi

suites=()
((san)) || suites=(lint cross python)
for suite in $(list_suites); do
    ! is_chosen "$suite" || [[ ! -x $build/tests/$suite ]] || suites+=("$suite")
done
# shellcheck disable=SC2034 # check() reports how many of them have ended
[[ ! -t 1 ]] || checks_total=$(printf '%s\n' "${suites[@]}" | grep -cE "${ONLY:-}")
for suite in "${suites[@]}"; do
    case $suite in
    test_*) check "$suite" run_suite "$build/tests/$suite" ;;
    *) check "$suite" run_script "scripts/check/$suite.sh" ;;
    esac
done
conclude >"$counts.checks" || true
grep -hs '^  skipped' "$logs"/*.sh
# A suite that was killed has written no counts. It counts as one failure.
awk 'FILENAME ~ /checks$/ { unended = $3; next }
    { passed += $1; failed += $2; unended -= $2 > 0 }
    END { failed += unended; printf "%d passed, %d failed\n", passed, failed; exit failed || !passed }' \
    "$counts.checks" "$counts"
