#!/usr/bin/env bash
# Profiles a variant with Nsight Systems (nsys) or Nsight Compute (ncu), and prints two tables: one of CUDA kernels
# and one of named ranges. Columns: calls, total time, median time, share. docs/monitor.md lists the ranges.
#
#   scripts/sweep/profile.sh [--tool nsys|ncu] [--launches N] [--keep DIR] VARIANT [OPTION ...]
#
#   --tool      the profiler; default: nsys if it is installed and works here, else ncu
#   --launches  ncu measures the first N kernels of the run (default 200)
#   --keep      folder for the tool's report; by default the report is deleted
#   OPTION ...  options of fdsl-bench. Defaults: one epoch of 2048 samples for trainers (--epochs, --train-size); 3 samples
#               for other variants (--loops).
#
# Examples:
#   scripts/sweep/profile.sh fused --batch 256 --res 512
#   scripts/sweep/profile.sh --tool ncu --launches 60 train-cuda --model cnn --data digits
#   scripts/sweep/profile.sh shards-gpu --data /data/shards --cache any
#   scripts/sweep/profile.sh --tool nsys train-omp --model lenet
#
# nsys measures kernels on the device and ranges on the host. ncu measures kernels one at a time, without overlap; the
# time of a range is the sum of its kernels. Neither tool sees kernels launched by kernels (bat, bat-reuse, gbase-device).
# Profilers slow everything down. Use only the shares from these tables; take times from rows of a run without a
# profiler. Exit status 4 if fdsl-bench is not built, the tool named by --tool is not installed, or (without --tool)
# neither tool is installed.
set -euo pipefail
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; }
refuse() { # reason
    echo "profile.sh: $1; see --help" >&2
    exit 2
}
tool='' launches=200 keep=''
while (($#)); do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --tool)
        [[ ${2:-} =~ ^(nsys|ncu)$ ]] || refuse "--tool '${2:-}': the tools are nsys and ncu"
        tool=$2 && shift
        ;;
    --launches)
        [[ ${2:-} =~ ^[1-9][0-9]{0,5}$ ]] || refuse "--launches '${2:-}': give a whole number from 1 to 999999"
        launches=$2 && shift
        ;;
    --keep)
        [[ -n ${2:-} ]] || refuse '--keep: give a folder'
        keep=$2 && shift
        ;;
    -*) refuse "unknown option '$1' (options of fdsl-bench follow the variant)" ;;
    *) break ;;
    esac
    shift
done
(($#)) || refuse 'give a variant'
variant=$1 && shift
tables=$(dirname "$0")/profile_tables.py
bench=${FDSL_BENCH:-$(dirname "$0")/../../fdsl-bench}
[[ -x $bench ]] || { echo "profile.sh: $bench is not built: run make" >&2 && exit 4; }

installed() { # tool, other paths: prints the tool's path in PATH, else the newest version among the other paths
    command -v "$1" || for path in $2; do [[ ! -x $path ]] || echo "$path"; done | sort -V | tail -n 1
}
nsys=$(installed nsys '/opt/nvidia/nsight-systems/*/bin/nsys')
ncu=$(installed ncu '/opt/nvidia/nsight-compute/*/ncu /usr/local/cuda/bin/ncu')
if [[ -z ${nsys}${ncu} || ($tool == nsys && -z $nsys) || ($tool == ncu && -z $ncu) ]]; then
    missing="${tool:+$tool is not}"
    echo "profile.sh: ${missing:-neither nsys nor ncu is} installed: get Nsight Systems (nsight-systems-cli) or Nsight Compute" \
        "(nsight-compute) from NVIDIA's package repository, or the CUDA toolkit, which has both" >&2
    exit 4
fi

defaults=()
default() { # option, value, options of the user ...
    local option=$1 value=$2
    shift 2
    for given; do [[ $given != "$option" && $given != "$option="* ]] || return 0; done
    defaults+=("$option" "$value")
}
if [[ $variant == train-* ]]; then
    default --epochs 1 "$@"
    default --train-size 2048 "$@"
else
    default --loops 3 "$@"
    default --warmups 1 "$@"
    default --warmup-time 0 "$@"
fi
command=("$bench" --variant "$variant" ${defaults[@]+"${defaults[@]}"} "$@")

work=${keep:-$(mktemp -d)}
mkdir -p "$work"
[[ -n $keep ]] || trap 'rm -rf "$work"' EXIT
said=$work/output.txt
failed() { # tool, its exit status
    cat "$said" >&2
    echo "profile.sh: $1 ended with status $2; the output of $1 and of the program is above" >&2
    exit 1
}

by_nsys() {
    "$nsys" profile --trace=cuda,nvtx --cuda-graph-trace=node --sample=none --cpuctxsw=none --force-overwrite=true \
        --output "$work/report" "${command[@]}" >"$said" 2>&1 || return
    [[ -s $work/report.nsys-rep ]] || return
    "$nsys" stats --force-export=true --format csv --output - --report cuda_gpu_kern_sum "$work/report.nsys-rep" \
        >"$work/kernels.csv" 2>>"$said" || return
    "$nsys" stats --format csv --output - --report nvtx_sum "$work/report.nsys-rep" >"$work/ranges.csv" 2>>"$said" || return
    python3 "$tables" nsys "$work/kernels.csv" "$work/ranges.csv"
}
by_ncu() {
    # Clocks stay unlocked, as in normal runs.
    "$ncu" --clock-control none --nvtx --launch-count "$launches" --metrics gpu__time_duration.sum --print-units base \
        --page raw --csv --log-file "$work/kernels.csv" "${command[@]}" >"$said" 2>&1 || return
    python3 "$tables" ncu "$work/kernels.csv"
}

if [[ -n $nsys && $tool != ncu ]]; then
    status=0
    by_nsys || status=$?
    ((status == 0)) && exit
    [[ -z $tool && -n $ncu ]] || failed nsys $status
    echo 'profile.sh: nsys did not produce a report here; using ncu' >&2
fi
by_ncu || failed ncu $?
