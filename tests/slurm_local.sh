#!/usr/bin/env bash
# Runs sweeps as job arrays, and a training run, under a real Slurm cluster on this machine: munged, slurmctld and two nodes.
# The cluster uses a temporary folder, needs no systemd or accounting, and is removed at the end. make check-slurm calls
# this script, as root.
#
#   tests/slurm_local.sh [--keep]     --keep keeps the folder, which has all logs
#
# Prints one line per check and ends with "N passed, N failed". Exit status 1 if a check failed or the cluster did not
# start, 4 if Slurm or the program is missing or the user is not root.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export PATH=$PATH:/usr/sbin:/sbin

keep=''
[[ ${1-} != --keep ]] || keep=yes
port=${SLURM_TEST_PORT:-26817} # first of three consecutive ports
limit_s=120                    # longest wait for a job
passed=0 failed=0
tasks='' collect='' # numbers of the latest jobs

die() {
    printf 'slurm_local.sh: %s\n' "$2" >&2
    exit "$1"
}

for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || die 4 "no $program; scripts/setup/packages.sh check-slurm installs Slurm"
done
((EUID == 0)) || die 4 'slurmd must run as root to start jobs'
bench=$(realpath "${FDSL_BENCH:-./fdsl-bench}")
[[ -x $bench ]] || die 4 'no fdsl-bench; run make first'
home=$(mktemp -d) || exit

# ---- The cluster ----

pid_of() { # pid file, program: prints the process id in the file if that process still runs this program
    local pid
    pid=$(cat "$1" 2>/dev/null) && [[ $(cat "/proc/$pid/comm" 2>/dev/null) == "$2" ]] && echo "$pid"
}

end_process() { # pid file, program
    local pid
    pid=$(pid_of "$1" "$2") || return 0
    kill -TERM "$pid"
    for _ in {1..50}; do
        pid_of "$1" "$2" >/dev/null || return 0
        sleep 0.1
    done
    kill -KILL "$pid"
}

# Ends all daemons and jobs, and removes the folder.
# shellcheck disable=SC2317  # called by a trap
stop_cluster() {
    local node process
    if pid_of "$home/slurmctld.pid" slurmctld >/dev/null; then
        scancel --user=root 2>/dev/null
        wait_until 20 no_jobs
    fi
    for node in n1 n2; do end_process "$home/$node.pid" slurmd; done
    # Processes that slurmd started for a job may outlive slurmd. Kills those whose working directory is below $home:
    # they belong to this script.
    for process in /proc/[0-9]*; do
        [[ $(cat "$process/comm" 2>/dev/null) == slurmstepd ]] || continue
        [[ $(readlink "$process/cwd") == "$home"* ]] && kill -KILL "${process#/proc/}"
    done
    end_process "$home/slurmctld.pid" slurmctld
    end_process "$home/munged.pid" munged
    if [[ $keep ]]; then echo "logs: $home"; else rm -rf "$home"; fi
}

configure() {
    local host
    host=$(hostname -s)
    cat >"$home/slurm.conf" <<END
ClusterName=check
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$home/munge.socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/%n
SlurmctldPidFile=$home/slurmctld.pid
SlurmdPidFile=$home/%n.pid
SlurmctldLogFile=$home/slurmctld.log
SlurmdLogFile=$home/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=2
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=2
PartitionName=check Nodes=n1,n2 Default=YES MaxTime=10 State=UP
END
}

both_idle() { [[ $(sinfo --noheader --Node --states=idle --format=%N 2>/dev/null | sort -u) == $'n1\nn2' ]]; }
no_jobs() { [[ -z $(squeue --noheader 2>/dev/null) ]]; }

wait_until() { # seconds, command ...
    local end_s=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < end_s)) || return 1
        sleep 0.2
    done
}

start_cluster() {
    local i
    for i in 0 1 2; do
        ! (exec 3<>"/dev/tcp/127.0.0.1/$((port + i))") 2>/dev/null ||
            die 1 "port $((port + i)) is taken; set SLURM_TEST_PORT to the first of three free ports"
    done
    chmod 755 "$home" && mkdir -p "$home"/{state,n1,n2}
    (umask 077 && head -c 1024 /dev/urandom >"$home/munge.key")
    configure
    export SLURM_CONF=$home/slurm.conf
    munged --force --key-file="$home/munge.key" --socket="$home/munge.socket" --pid-file="$home/munged.pid" \
        --log-file="$home/munged.log" --seed-file="$home/munged.seed" 2>"$home/munged.err" &&
        slurmctld -c && slurmd -N n1 && slurmd -N n2 && wait_until 30 both_idle && return
    tail -n 5 "$home"/*.log "$home/munged.err" >&2
    die 1 'Slurm does not start; the last lines of its logs are above'
}

# Copies the tree, so that the user's results and figures do not change.
make_tree() {
    mkdir "$home/tree" && cp -r --parents Makefile configs scripts slurm results/reference "$home/tree" || exit
    [[ ! -d plots ]] || cp -r plots "$home/tree" || exit
    cp "$bench" "$home/tree/fdsl-bench" && cd "$home/tree" || exit
}

# ---- Checks ----

check() { # name, command ...: runs one check and prints whether it passed
    local name=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
        printf 'ok      %s\n' "$name"
    else
        failed=$((failed + 1))
        printf 'FAILED  %s\n' "$name"
        squeue --states=all --noheader --format='        %i %T %N %r' | grep -v COMPLETED >&2
    fi
}

# Prints each distinct state of a job, or of the tasks of an array, once.
states() { squeue --noheader --states=all --job="$1" --format=%T | sort -u; }
ended() { [[ $(states "$1") =~ ^((COMPLETED|FAILED|CANCELLED|TIMEOUT)[[:space:]]*)+$ ]]; }
exit_code() { scontrol show job "$1" | sed -n 's/.* ExitCode=\([0-9:]*\).*/\1/p'; }

submit() { # arguments of submit.sh; sets $tasks and $collect, the numbers of both jobs
    local said
    said=$(slurm/submit.sh "$@") || return
    read -r tasks collect <<<"$(sed -n 's/^[a-z]*: *job \([0-9]*\).*/\1/p' <<<"$said" | paste -sd ' ')"
    [[ $tasks && $collect ]]
}

finish() { wait_until "$limit_s" ended "$1"; } # job
ends() { finish "$1" && [[ $(states "$1") == "$2" ]]; } # job, expected final state

# Prints the cells of these columns, one line per row, sorted. For a row whose number of fields differs from that of the
# header, prints "torn: " and the row.
cells() { # file, columns ...
    awk -F , -v names="${*:2}" '
        NR == 1      { for (i = 1; i <= NF; i++) at[$i] = i; width = NF; count = split(names, name, " "); next }
        NF != width  { print "torn: " $0; next }
                     { line = $at[name[1]]; for (i = 2; i <= count; i++) line = line " " $at[name[i]]; print line }
    ' "$1" | sort
}

holds() { # file, lines "variant vertices": whether the file has exactly these rows, each once and complete
    [[ $(cells "$1" variant vertices) == "$(sort <<<"$2")" ]]
}

no_leftovers() { [[ -z $(find results -name '*.part*') ]]; }

check_array() {
    local rows=results/sweep_cpu.csv wanted before said
    wanted=$(printf '%s\n' {naive,omp}' '{50,100,150,200,250})
    check 'an array of 10 tasks is submitted' submit configs/sweep_cpu.tsv
    check 'all tasks of the array complete' ends "$tasks" COMPLETED
    check 'the job that merges the rows completes' ends "$collect" COMPLETED
    check 'tasks ran on both nodes' test "$(cut -d ' ' -f 2 results/sweep/cpu/log/task_*.log | grep -o '^n[12]:' | sort -u | paste -sd ' ')" = 'n1: n2:'
    check 'the merged file has each row complete and exactly once' holds $rows "$wanted"
    check 'each row has the number of its job' test "$(cells $rows job_id | uniq | grep -c "$tasks")" = 10
    check 'the array leaves no partial files' no_leftovers
    if command -v gnuplot >/dev/null && [[ -f scripts/figures/draw.py ]]; then
        check 'figures are drawn' test -s "$(find results/plots -name '*.png' | head -n 1)"
    fi
    before=$(sha256sum <$rows)
    said=$(slurm/submit.sh configs/sweep_cpu.tsv)
    check 'a finished table is submitted without tasks' test "${said%%$'\n'*}" = 'tasks:  all are finished'
    check 'the job that merges its rows completes' ends "$(sed -n 's/^rows: *job \([0-9]*\).*/\1/p' <<<"$said")" COMPLETED
    check 'merging again does not change the rows' test "$(sha256sum <$rows)" = "$before"
}

check_failure() {
    local table=$home/tree/sweep_failing.tsv quick=$'0\t0\t1\t0\t0'
    printf '%s\n' $'variant\tclass\tvertices\twarmups\twarmup-time\tmin-samples\tmin-time\tmax-time' \
        $'naive\t-\t7\t'"$quick" $'naive\tclasses.csv\t-\t'"$quick" $'naive\t-\t9\t'"$quick" >"$table"
    ./fdsl-bench --variant naive --classes 2 --batch 2 --res 32 --write-classes classes.csv --max-time 0 >/dev/null 2>&1
    check 'a sweep is submitted on hold' submit "$table" --hold
    mv classes.csv away.csv # the file exists at submission but not when the task starts
    scontrol release "$tasks"
    check 'the released sweep ends' finish "$tasks"
    check 'the task without its input file fails with exit status 2' test "$(exit_code "${tasks}_2")" = 2:0
    check 'the log of the failed task names the missing file' grep -q 'classes.csv' results/sweep/failing/log/task_2.log
    check 'the other tasks complete' test "$(exit_code "${tasks}_1") $(exit_code "${tasks}_3")" = '0:0 0:0'
    check 'after a failed task, the merging job is cancelled' ends "$collect" CANCELLED
    check 'after a failed task, no merged file exists' test ! -e results/sweep_failing.csv
    mv away.csv classes.csv
    check 'the failed sweep is submitted again' submit "$table"
    check 'the repeated sweep completes' ends "$collect" COMPLETED
    check 'the merged file of the repeated sweep has each row exactly once' holds results/sweep_failing.csv $'naive 7\nnaive \nnaive 9'
    printf 'variant\nnaiv\n' >sweep_bad.tsv
    check 'a table with an unknown variant is not submitted' refuses_bad_table
}

refuses_bad_table() {
    local message
    message=$(slurm/submit.sh sweep_bad.tsv 2>&1)
    (($? == 2)) && [[ $message == *'sweep_bad.tsv, line 2: '*"did you mean 'naive'?" ]] && no_jobs
}

half_made() { [[ $(wc -l <results/sweep/slow/task_1.csv.part) -ge 2 ]]; } 2>/dev/null
submit_half_way() { submit "$1" && wait_until "$limit_s" half_made; } # table
# A job that starts again in the second in which it was requeued fails with "Job credential revoked".
requeue() { scontrol requeue "$1" && sleep 2; } # job
# Slurm delays a requeued job until its node is clean.
hurry() { # job, its log: shortens the delay; returns whether the job has started again
    grep -q 'start 2$' "$2" && return
    scontrol update JobId="$1" StartTime=now 2>/dev/null
    false
}
# Kills the script and the program with SIGKILL, so that they cannot clean up.
kill_all() {
    local process
    for process in /proc/[0-9]*; do
        [[ $(readlink "$process/cwd") == "$PWD" && $(cat "$process/comm") =~ ^(run.sh|fdsl-bench)$ ]] &&
            kill -KILL "${process#/proc/}"
    done
} 2>/dev/null

check_kill() {
    local table=$home/tree/sweep_slow.tsv rows=results/sweep/slow/task_1.csv
    # The first variant's row is written while the second variant runs.
    printf 'variant\tvertices\tres\tbatch\tmin-time\tmax-time\nnaive,omp\t100\t64\t2\t1.5\t1.5\n' >"$table"
    check 'a task writes its first row' submit_half_way "$table"
    requeue "${tasks}_1"
    check 'the requeued task starts again' wait_until "$limit_s" hurry "${tasks}_1" results/sweep/slow/log/task_1.log
    check 'the requeued task completes' ends "$tasks" COMPLETED
    check 'the merging job of the requeued task completes' ends "$collect" COMPLETED
    check 'the requeued task has each row complete and exactly once' holds $rows $'naive 100\nomp 100'
    rm -r results/sweep/slow
    check 'another task writes its first row' submit_half_way "$table"
    kill_all
    check 'a task that gets SIGKILL fails' ends "$tasks" FAILED
    check 'a killed task has no finished file' test ! -e $rows
    check 'the killed sweep is submitted again' submit "$table"
    check 'the sweep completes after SIGKILL' ends "$collect" COMPLETED
    check 'after SIGKILL, the repeated task has each row complete and exactly once' holds $rows $'naive 100\nomp 100'
    check 'requeue and SIGKILL leave no partial files' no_leftovers
}

trained() { [[ $(wc -l <runs/net/train.csv) -gt $1 ]]; } 2>/dev/null # number: whether the file has at least this many rows
submit_training() { submit_training_on '' "$@"; }
submit_training_on() { # options of sbatch in one word, options of fdsl-bench
    # shellcheck disable=SC2086  # the word is divided into options
    job=$(sbatch --parsable --output=train.log $1 slurm/train.sbatch runs/net "${@:2}")
}

run_whole() { ./fdsl-bench "$@" --out whole.csv --export whole.safetensors >/dev/null 2>&1; }

check_training() {
    local job rows before options=(--variant train-naive --model lenet --train-size 1500 --test-size 50 --batch 16 --epochs 10)
    check 'a training run completes without Slurm' run_whole "${options[@]}"
    check 'the same training run is submitted to Slurm' submit_training "${options[@]}"
    check 'the job trains two epochs' wait_until "$limit_s" trained 2
    requeue "$job"
    check 'the requeued job starts again' wait_until "$limit_s" hurry "$job" train.log
    check 'the requeued job trains until epoch 5' wait_until "$limit_s" trained 5
    kill_all
    check 'a training run that gets SIGKILL fails' ends "$job" FAILED
    check 'a killed training run exports no parameters' test ! -e runs/net/model.safetensors
    check 'the killed training run is submitted again' submit_training "${options[@]}"
    check 'the resumed training run completes' ends "$job" COMPLETED
    rows=$(cells runs/net/train.csv epoch train_loss test_acc)
    check 'each epoch has one row, with the loss of the uninterrupted training run' \
        test "$rows" = "$(cells whole.csv epoch train_loss test_acc)"
    check 'the parameters are bit-identical to those of the uninterrupted training run' cmp whole.safetensors runs/net/model.safetensors
    before=$(cat runs/net/{train.csv,model.safetensors} | sha256sum)
    check 'a finished training run is submitted again' submit_training "${options[@]}"
    check 'the job of the finished training run completes' ends "$job" COMPLETED
    check 'the log of the finished training run says that all epochs are done' grep -q '10 of 10 epochs are done' train.log
    check 'the finished training run does not change' test "$(cat runs/net/{train.csv,model.safetensors} | sha256sum)" = "$before"
}

# Runs a sweep on one rank, and then on two ranks, one per node. Called only if the build has MPI.
check_ranks() {
    local table=$home/tree/sweep_ranks.tsv job rows=results/sweep_ranks_2.csv
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl=self,vader,tcp
    printf 'variant\tranks\tscaling\tres\tbatch\tmin-time\tmax-time\nomp\t1\tstrong\t64\t6\t0.1\t0.2\n' >"$table"
    job=$(sbatch --parsable --nodes=2 --ntasks-per-node=1 --output=scale.log slurm/scale.sbatch "$table")
    check 'runs of one rank and of two ranks on two nodes complete' ends "$job" COMPLETED
    check 'the file has the rows of both runs' test "$(cells $rows ranks rank | paste -sd,)" = '1 0,2 0,2 1,2 all'
    check 'both runs generate the same images' test "$(cells $rows rank digest | sed -n 's/^0 //p;s/^all //p' | sort | uniq -c | awk '$1 == 2' | wc -l)" = 1
}

# Repeats check_training() on two ranks, one per node.
check_training_ranks() {
    local job options=(--variant train-naive --model lenet --train-size 1500 --test-size 50 --batch 16 --epochs 6)
    local place=(--nodes=2 --ntasks-per-node=1)
    rm -rf runs whole.csv whole.safetensors
    check 'a training run on two ranks completes without Slurm' mpirun --oversubscribe --bind-to none -n 2 ./fdsl-bench \
        --out whole.csv --export whole.safetensors "${options[@]}" >/dev/null 2>&1
    check 'the same training run is submitted to two nodes' submit_training_on "${place[*]}" "${options[@]}"
    check 'the job on two nodes trains two epochs' wait_until "$limit_s" trained 6
    kill_all
    check 'a training run on two nodes that gets SIGKILL fails' ends "$job" FAILED
    check 'the killed training run on two nodes is submitted again' submit_training_on "${place[*]}" "${options[@]}"
    check 'the resumed training run on two nodes completes' ends "$job" COMPLETED
    check 'each epoch has one row per rank and one of all ranks, with the loss of the uninterrupted training run' \
        test "$(cells runs/net/train.csv epoch rank train_loss)" = "$(cells whole.csv epoch rank train_loss)"
    check 'the parameters of both training runs on two ranks are bit-identical' cmp whole.safetensors runs/net/model.safetensors
    check 'a training run with --sync peer on two nodes is submitted' submit_training_on "${place[*]}" --sync peer "${options[@]}"
    check 'the job with --sync peer fails, because peer needs GPUs of one machine' ends "$job" FAILED
    check 'the log of the job with --sync peer names the reason' grep -q -e '--sync peer: it cannot train on several ranks here' train.log
}

trap stop_cluster EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
start_cluster
make_tree
check_array
check_failure
check_kill
check_training
if mpirun --version >/dev/null 2>&1 && ./fdsl-bench --help | grep -q -e --scaling; then check_ranks; check_training_ranks; fi
printf '%d passed, %d failed\n' "$passed" "$failed"
((failed == 0))
