#!/usr/bin/env bash
# Compares one file per sample with tar shards, on one set of video clips: reading the set 500 times, feeding a training step on
# the GPU, and training a 3D network on the same set. `make plots` draws the rows as the figure `clips`.
#
#   scripts/compare/clips.sh DIR OUT     DIR: folder for the clips (25 MB), on a disk or in memory; OUT: folder for the rows
#
# The set has float16 clips of shape (1, 8, 16, 16), so a batch has five dimensions: N x C x T x H x W. The script measures:
#
#   1. reading: each loader reads the set LOOPS times, verified
#   2. feeding: the same while a step of STEP ms on the GPU consumes each batch (--compute); the monitor samples the use of the GPU.
#      The loaders on the CPU feed it through pinned memory. Without a GPU, the monitor samples the CPU during part 1
#   3. training: cnn3d from files, from shards (--feed load) and on one constant batch
#
# Rows go to OUT/clips_load.csv, OUT/clips_monitor.csv and OUT/clips_train.csv; OUT/clips keeps those of each run. The same command
# continues, and repeats only runs that are not complete; a program with other columns is refused. A run that fails does not end the
# others. Takes about two minutes on one H200 with 16 cores.
#
# Environment (defaults in parentheses):
#   CLIPS (1000)     samples of the set
#   LOOPS (500)      times that a loader reads the set
#   STEP (2)         milliseconds of a training step
#   EPOCHS (50)      epochs of training; the table has the median of the second half
#   BATCH (64)       clips per batch: with more, 16 threads would have fewer than a batch each
#   VARIANT          trains cnn3d (train-bf16; train-omp without a GPU)
#   LIMIT_S          seconds after which no run begins, and the running one is stopped; the same command continues
#   FDSL_BENCH (./fdsl-bench)  the program
#
# Exit status: 0 done, 1 runs failed or are missing, 2 usage, 4 no program.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bench=$(command -v -- "${FDSL_BENCH:-$root/fdsl-bench}") || { echo 'compare/clips.sh: fdsl-bench is not built; run make first' >&2 && exit 4; }
(($# == 2)) || { echo 'usage: scripts/compare/clips.sh DIR OUT' >&2 && exit 2; }
dir=$1 out=$2
limit_s=${LIMIT_S:-86400}
clips=${CLIPS:-1000} loops=${LOOPS:-500} step=${STEP:-2} epochs=${EPOCHS:-50} batch=${BATCH:-64}
for given in "CLIPS=$clips" "LOOPS=$loops" "EPOCHS=$epochs" "BATCH=$batch" "LIMIT_S=$limit_s"; do
    [[ ${given#*=} =~ ^[1-9][0-9]*$ ]] || { echo "compare/clips.sh: $given: give a whole number from 1" >&2 && exit 2; }
done

list=$("$bench" --list)
available() { [[ $list =~ (^|$'\n')\ *$1\ +available ]]; } # variant
readers='files-omp shards-omp'
variant=${VARIANT:-train-omp}
if available shards-gpu; then
    readers+=' files-gpu shards-gpu'
    variant=${VARIANT:-train-bf16}
fi
"$bench" --variant "$variant" --data clips --model cnn3d --dry-run >/dev/null

columns=$("$bench" --columns | cksum) # rows of two versions of the program cannot be joined
settings="clips $clips loops $loops step $step epochs $epochs batch $batch variant $variant columns ${columns%% *}"
mkdir -p "$out/clips"
[[ -e $out/clips/settings ]] || echo "$settings" >"$out/clips/settings"
[[ $(<"$out/clips/settings") == "$settings" ]] || {
    echo "compare/clips.sh: $out/clips has runs of other settings ($(<"$out/clips/settings")); name another OUT" >&2
    exit 2
}

# The index of a set is written last.
[[ -e $dir/files/clips.index ]] || "$bench" --prepare "$dir/files" --from clips --store files --samples "$clips" >&2
[[ -e $dir/shards/clips.index ]] || "$bench" --prepare "$dir/shards" --from clips --store shards --shards 10 --samples "$clips" >&2

missing=
measure() { # name, options ...: one run, unless its rows exist; they appear after the file of --monitor
    local rows=$out/clips/$1
    [[ ! -e $rows.csv ]] || return 0
    ((SECONDS < limit_s)) || { missing+=" $1" && return 0; }
    rm -f "$rows.part"
    [[ " $* " != *' --monitor '* ]] || rm -f "$out/clips/monitor-${1#*-}.csv"
    echo "$1" >&2
    if timeout -s INT -k 10 $((limit_s - SECONDS)) "$bench" "${@:2}" --batch "$batch" --out "$rows.part" --format csv >/dev/null; then
        mv "$rows.part" "$rows.csv"
    else
        missing+=" $1"
    fi
}

for reader in $readers; do
    watch=()
    available shards-gpu || watch=(--monitor "$out/clips/monitor-$reader.csv:50")
    measure "read-$reader" --variant "$reader" --data "$dir/${reader%-*}" --loops "$loops" --verify "${watch[@]}"
done
if available shards-gpu; then
    for reader in $readers; do
        measure "feed-$reader" --variant "$reader" --data "$dir/${reader%-*}" --loops "$loops" --compute "$step" \
            --monitor "$out/clips/monitor-$reader.csv:50"
    done
fi
for feed in files shards constant; do
    data=$dir/$feed feeding=load
    [[ $feed != constant ]] || data=$dir/shards feeding=constant
    measure "train-$feed" --variant "$variant" --model cnn3d --data "$data" --feed "$feeding" --epochs "$epochs"
done

join() { # FILE PART ...: one header, then the rows of all parts
    (($# > 1)) || return 0
    awk 'FNR == 1 && NR > 1 { next } { print }' "${@:2}" >"$1.part" && mv "$1.part" "$1"
}
shopt -s nullglob # without a GPU, nothing is fed
join "$out/clips_load.csv" "$out"/clips/read-*.csv "$out"/clips/feed-*.csv
join "$out/clips_train.csv" "$out"/clips/train-*.csv
join "$out/clips_monitor.csv" "$out"/clips/monitor-*.csv

python3 - "$out" "$dir" <<'END'
import csv, os, statistics, sys
out, folder = sys.argv[1], os.path.abspath(sys.argv[2])
def rows(name):
    path = f"{out}/clips_{name}.csv"
    with open(path if os.path.exists(path) else os.devnull, encoding="utf-8") as file:
        return list(csv.DictReader(file))
loads, samples = rows("load"), rows("monitor")
def number(text, form):
    return format(float(text), form) if text else "-"
print(f"{'reader':<12}{'clips/s':>12}{'GB/s':>8}{(loads[0]['samples'] if loads else '') + ' loops s':>14}"
      f"{'fed clips/s':>14}{'stall share':>13}{'GPU use %':>11}{'CPU cores':>11}")
for row in (row for row in loads if not row["compute"]):
    fed = next((other for other in loads if other["compute"] and other["variant"] == row["variant"]), None)
    seen = [sample for sample in samples if sample["variant"] == row["variant"] and sample["phase"] == "timed"]
    def mean(column):
        values = [float(sample[column]) for sample in seen if sample[column]]
        return format(statistics.mean(values), ".1f") if values else "-"
    print(f"{row['variant']:<12}{float(row['items_per_s']):>12,.0f}{1e-9 * float(row['bytes_per_s']):>8.2f}"
          f"{float(row['time_mean_s']) * float(row['samples']):>14.2f}{number(fed and fed['items_per_s'], ',.0f'):>14}"
          f"{number(fed and fed['stall_share'], '.3f'):>13}{mean('gpu_utilisation_percent'):>11}{mean('cpu_cores'):>11}")
trained = {}
for row in rows("train"):
    name = "one constant batch" if row["feed"] == "constant" else os.path.basename(row["data"])
    trained.setdefault(name, []).append(row)
print(f"\n{'cnn3d from':<20}{'clips/s':>12}{'stall share':>13}{'test accuracy':>15}")
for name, epochs in trained.items():
    half = epochs[len(epochs) // 2:]
    print(f"{name:<20}{statistics.median(float(row['items_per_s']) for row in half):>12,.0f}"
          f"{number(half[-1]['stall_share'], '.3f'):>13}{float(epochs[-1]['test_acc']):>15.3f}")
END
[[ -z $missing ]] || { echo "compare/clips.sh: missing:$missing; the same command continues" >&2 && exit 1; }
