#!/usr/bin/env bash
# Repeats the measurements of results/reference/epyc_load.csv on this machine. Reads the same samples as files and as shards, for
# several sizes, orders, numbers of threads and states of the page cache. Then reads 1000 video samples for 500 epochs.
# Takes about ten minutes, and 2.5 GB of disk space.
#
#   scripts/sweep/reference_load.sh DIR FILE.csv      DIR: folder for samples, on the disk to measure
#
# Environment (defaults in parentheses): TIME (2): minimum seconds per row. SIZES ("2048 16384 65536"): bytes of one
# sample's file or tar member, including the .npy header. Rows with a cold page cache are measured only as root, because
# only root can empty the cache of directory entries.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."

bench=${FDSL_BENCH:-./fdsl-bench}
dir=${1:?name a folder for the samples}
out=${2:?name the file for the rows}
time=${TIME:-2}
npy_header=128
[[ $time =~ ^[1-9][0-9]*$ ]] || { echo "reference_load.sh: TIME=$time: give whole seconds" >&2 && exit 2; }
mkdir -p "$dir"

make_set() { # name, samples, options ...
    "$bench" --prepare "$dir/$1-files" --store files --samples "$2" "${@:3}"
    "$bench" --prepare "$dir/$1-shards" --store shards --shards 10 --samples "$2" "${@:3}"
}
run() { # cores, variant, set, options ...
    echo "$2 $3 ${*:4}" >&2
    taskset -c "$1" "$bench" --variant "$2" --data "$dir/$3" --min-time "$time" --max-time "$((3 * time))" --out "$out" \
        --format csv "${@:4}" >/dev/null
}

cores=$(nproc)
all=0-$((cores - 1))
for bytes in ${SIZES:-2048 16384 65536}; do
    samples=$((bytes <= 2048 ? 50000 : 400000000 / bytes))
    make_set "$bytes" "$samples" --sample-shape $((bytes - npy_header)) --dtype u8 --classes 0
    # One core, warm page cache. Every variant runs twice, in alternation. The table at the end shows the faster of the
    # two runs.
    for _ in 1 2; do
        run 0 files "$bytes-files" --verify
        for shuffle in 0 1000; do
            run 0 shards "$bytes-shards" --shuffle $shuffle --verify
            run 0 shards-mmap "$bytes-shards" --shuffle $shuffle --verify
            run 0 shards-uring "$bytes-shards" --shuffle $shuffle --verify
        done
        run 0 files-uring "$bytes-files" --verify
    done
    for ((threads = 1; threads <= cores; threads *= 2)); do
        run "$all" files-omp "$bytes-files" --threads $threads --verify
        run "$all" shards-omp "$bytes-shards" --threads $threads --shuffle 0 --verify
        run "$all" stream "$bytes-shards" --threads $threads --shuffle 0 --verify
    done
    ((EUID == 0)) || continue
    # --cache cold also evicts the data that --verify reads. A run that does not begin with a cold cache fails.
    for variant in files files-uring; do
        run "$all" $variant "$bytes-files" --cache cold --min-samples 5 --verify
    done
    for variant in shards shards-mmap shards-uring; do
        run "$all" $variant "$bytes-shards" --cache cold --block 1024 --min-samples 5 --verify
    done
done

# A typical video set, read for 500 epochs: 1000 float16 samples of shape (3, 8, 64, 64), as files and in 10 shards.
make_set video 1000 --sample-shape 3,8,64,64 --dtype f16 --classes 0
for variant in files shards shards-mmap shards-omp shards-uring; do
    set=video-shards
    [[ $variant == files ]] && set=video-files
    echo "$variant $set 500 epochs" >&2
    taskset -c 0 "$bench" --variant $variant --data "$dir/$set" --threads 1 --loops 500 --verify --out "$out" --format csv >/dev/null
done

python3 - "$out" <<'END'
import collections, csv, sys
best = collections.defaultdict(dict)
for row in csv.DictReader(open(sys.argv[1])):
    if row["cache"] == "warm" and row["threads"] == "1" and not row["variant"].endswith("omp"):
        size, name = float(row["sample_bytes"]), row["variant"]
        if row["store"] == "shards":
            name += " shuffled" if row["shuffle"] != "0" else " in order"
        value = float(row["time_median_s"]) / float(row["items"])
        if value < best[size].get(name, (1e9,))[0]:
            best[size][name] = value, float(row["copy_share"] or "nan")
for size, names in sorted(best.items()):
    print(f"\n{size:.0f} bytes per sample, warm, one core{'':12}us   vs. files  copy share")
    for name, (value, share) in sorted(names.items(), key=lambda item: -item[1][0]):
        print(f"  {name:32}{1e6 * value:12.3f}{names['files'][0] / value:12.1f}{share:12.2f}")
END
