#!/usr/bin/env bash
# Makes the rows of results/reference/*_load_gpu.csv on the machine that it runs on: the same samples by size, straight to
# the GPU in four ways, and by threads. Some ten minutes, 5 GB in DIR at a time.
#
#   scripts/reference_load_gpu.sh DIR FILE.csv      DIR: where samples are made: a disk, or a file system in memory
#
# Sizes are of a sample's member in bytes, the .npy header among them. TIME (2): seconds a row; SIZES ("2048 … 1048576");
# BYTES (2000000000): of a set of shards. Files are a fifth of that, as they are read one by one.
set -euo pipefail
cd "$(dirname "$0")/.."

bench=${FDSL_BENCH:-./fdsl-bench}
dir=${1:?name a folder for the samples}
out=${2:?name the file for the rows}
time=${TIME:-2}
set_bytes=${BYTES:-2000000000}
npy_header=128
[[ $time =~ ^[1-9][0-9]*$ ]] || { echo "reference_load_gpu.sh: TIME=$time: give whole seconds" >&2 && exit 2; }
mkdir -p "$dir"

run() { # variant, set, options ...
    echo "$1 $2 ${*:3}" >&2
    "$bench" --variant "$1" --data "$dir/$2" --batch 256 --min-time "$time" --max-time "$((3 * time))" --out "$out" \
        --format csv "${@:3}" >/dev/null
}
available() { # variant, set
    "$bench" --variant "$1" --data "$dir/$2" --cache any --dry-run
}

cores=$(nproc)
for bytes in ${SIZES:-2048 4096 16384 65536 262144 1048576}; do
    samples=$((set_bytes / bytes))
    shape=$((bytes - npy_header))
    "$bench" --prepare "$dir/$bytes-shards" --layout shards --shards 32 --samples "$samples" --sample-shape $shape --dtype u8
    "$bench" --prepare "$dir/$bytes-files" --layout files --samples $((samples / 5)) --sample-shape $shape --dtype u8
    run files-gpu "$bytes-files" --verify
    run shards-gpu "$bytes-shards" --verify
    run gpu-resident "$bytes-shards" --verify
    if available gds "$bytes-shards"; then run gds "$bytes-shards" --ring 8 --verify; fi
    # What it would be on the CPU
    run shards-omp "$bytes-shards"
    if ((bytes == 65536)); then
        for ((threads = 1; threads < cores; threads *= 2)); do
            run shards-gpu "$bytes-shards" --threads $threads
        done
        for tensor in raw f32; do
            run shards-gpu "$bytes-shards" --tensor $tensor
            run gpu-resident "$bytes-shards" --tensor $tensor
        done
    fi
    rm -rf "$dir/$bytes-shards" "$dir/$bytes-files"
done

python3 - "$out" <<'END'
import csv, sys
print(f"{'bytes':>8} {'variant':14}{'threads':>8}{'samples/s':>14}{'GB/s':>8}{'of copying':>12}  gds")
for row in csv.DictReader(open(sys.argv[1])):
    print(f"{float(row['sample_bytes']):8.0f} {row['variant']:14}{row['threads']:>8}{float(row['items_per_s']):14.0f}"
          f"{1e-9 * float(row['bytes_per_s']):8.2f}{float(row['copy_share'] or 'nan'):12.3f}  {row['gds']}")
END
