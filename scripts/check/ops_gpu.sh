#!/usr/bin/env bash
# Verifies the GPU variants of ops on a machine with a GPU. Checks every result of every step, for odd sizes and all types,
# with the rows in GPU memory or in chunks. With --sanitize, runs small cases under compute-sanitizer. Needs
# build/tests/gpu_ops and build/tests/gpu_rows from `make tests`: the former checks conversions, hashes and permutations
# separately, the latter sets of rows in GPU memory.
#
#   scripts/check/ops_gpu.sh [--sanitize] [--variant NAMES]
#
# Prints one line per check, then "N passed, N failed". Exit status 1 if a check failed, 4 if no GPU variant is
# available. ONLY=REGEX: run only the checks whose names match. JOBS=N: parallel checks (default: half of the processors,
# at most 8). LIMIT=N: time limit per check in seconds (default 600).
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/check/parallel.sh
source scripts/check/parallel.sh # checks run in parallel, because CUDA initialisation dominates most of them

bench=${FDSL_BENCH:-./fdsl-bench}
own=${FDSL_GPU_OPS:-build/tests/gpu_ops}
sets=${FDSL_GPU_ROWS:-build/tests/gpu_rows}
variants=$("$bench" --list | awk '$1 ~ /^ops-(cuda|fused)$/ && $2 == "available" { print $1 }' | paste -sd,)
read_options 0 "$@"
[[ -n $variants ]] || { echo 'check/ops_gpu.sh: no GPU variant of ops runs here; see fdsl-bench --list' >&2 && exit 4; }

share_processors
runner=()
verify() { # options ...
    check "${tool:+$tool: }$*" "${runner[@]}" "$bench" --workload ops --variant "$variants" --verify --loops 2 --warmups 0 \
        --warmup-time 0 --threads 3 "$@"
}
types=(--to 'f32,f16,bf16,fp8,nvfp4,mxfp4')
whole=mask,compact,convert,hash permuted=mask,compact,permute,convert,hash
modes=(--resident '--resident --pool off' '--chunk 64' '--chunk 64 --ring 2 --async off' '--chunk 16 --ring 3 --pool off')

# Rows for --prepare, and files of numpy and of other programs whose rows are decoded. Random rows have norms near 16.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
files=(tests/data/embeddings/{f64_source.npy,f16.npz,fp8.safetensors,mxfp4.safetensors,nvfp4.safetensors})
make_rows() { # dim
    "$bench" --prepare "$work/rows$1" --from counter --store files --samples 3 --sample-shape "1021,$1" --dtype f32 --classes 0 >/dev/null
}

# Prepares a set with ops-omp and with a GPU variant. The files must be equal.
same_set() { # variant, options of --prepare ...
    local variant=$1 folder status=0
    shift
    folder=$(mktemp -d -p "$work")
    "$bench" --prepare "$folder/cpu" --from embeddings --variant ops-omp "$@" &&
        "${runner[@]}" "$bench" --prepare "$folder/gpu" --from embeddings --variant "$variant" "$@" &&
        diff -r "$folder/cpu" "$folder/gpu" || status=1
    rm -rf "$folder"
    return $status
}
prepare() { # options of --prepare ...
    local variant
    for variant in ${variants//,/ }; do
        check "${tool:+$tool: }--prepare --variant $variant $*" same_set "$variant" "$@"
    done
}
prepared() {
    local to source
    for to in f32 f16 bf16 fp8 nvfp4 mxfp4; do
        prepare --source "$work/rows31" --to $to --rows-per-file 500
        prepare --source "$work/rows768" --to $to --norm-max 16 --rows-per-file 500
        prepare --source "$work/rows31" --to $to --norm-max 3.2 --dedup --align 16
        for source in "${files[@]}"; do
            prepare --source "$source" --to $to --norm-min 0 --norm-max 1e19 --rows-per-file 7
        done
    done
    prepare --source "$work/rows31" --fp8 nan --to fp8
}

sanitized() {
    for tool in memcheck racecheck initcheck synccheck; do
        runner=(compute-sanitizer --tool "$tool" --error-exitcode 9)
        [[ $tool != memcheck ]] || runner+=(--leak-check full)
        # initcheck does not see what bulk copies (cp.async.bulk) write. It would report results when --verify copies
        # them to the host. So it checks only accesses of kernels.
        [[ $tool != initcheck ]] || runner+=(--check-api-memory-access no)
        # A block of ops-fused has 91 barriers. By default, synccheck tracks fewer barriers than all blocks have
        # together. It allocates memory for each launch, and runs out of memory if many launches wait in streams.
        [[ $tool != synccheck ]] || runner+=(--num-cuda-barriers 16384 --force-blocking-launches)
        for mode in --resident '--chunk 16 --ring 2'; do
            # shellcheck disable=SC2086  # a mode is a list of options
            for steps in $whole $permuted; do
                verify $mode --steps $steps --rows 301 --dim 31,768 "${types[@]}" --bad 0.3
            done
            # shellcheck disable=SC2086
            verify $mode --steps $permuted --rows 301 --dim 768 --dedup --duplicates 0.3 --to nvfp4
            # shellcheck disable=SC2086
            verify $mode --steps permute --rows 301 --dim 768 --sample 100
        done
        verify --resident --steps $whole --rows 5 --dim 65536 --to fp8
        # With this many rows, each block reuses the slots of its ring of output tiles.
        [[ $tool != racecheck ]] || verify --resident --steps $whole --rows 50021 --dim 31 --to f16
        prepare --source "$work/rows31" --to nvfp4 --norm-max 3.2 --dedup --align 16
        # shellcheck disable=SC2043
        [[ $tool != memcheck ]] || check "$tool: gpu_ops" "${runner[@]}" "$own" --quick
        # shellcheck disable=SC2043
        [[ $tool != memcheck ]] || check "$tool: gpu_rows" "${runner[@]}" "$sets" --quick
    done
}

everything() {
    local mode steps file
    check 'gpu_ops: conversions of all floats, hashes, permutations' "$own"
    check 'gpu_ops --fault fails' fails_with 1 '0 passed' "$own" --fault
    check 'gpu_rows: sets of rows in GPU memory' "$sets" --quick
    check 'gpu_rows --fault fails' fails_with 1 '0 passed' "$sets" --fault
    for mode in "${modes[@]}"; do
        for steps in $whole $permuted; do
            # shellcheck disable=SC2086  # a mode is a list of options
            {
                verify $mode --steps $steps --rows 257 --dim 31,768 --dtype f32,f16,bf16 "${types[@]}" --bad 0.3
                verify $mode --steps $steps --rows 1,67 --dim 1,3,96,4096 "${types[@]}" --bad 0.3
            }
        done
        for steps in mask mask,compact compact convert hash permute mask,convert compact,permute,hash mask,permute,convert; do
            # shellcheck disable=SC2086
            verify $mode --steps $steps --rows 0,1,1021 --dim 3,96
        done
        # shellcheck disable=SC2086
        {
            verify $mode --steps $whole --rows 0,1,999 --dim 768 --bad 0,1 "${types[@]}"
            verify $mode --steps $whole --rows 2,1021 --dim 5,768 --dedup --duplicates 0,0.4 --to f16,nvfp4
            verify $mode --steps $permuted --rows 1,1021 --dim 768 --dedup --duplicates 0.4 --to bf16,nvfp4
            verify $mode --steps compact,hash --rows 1021 --dim 768 --dedup --duplicates 1
            verify $mode --steps mask,compact,permute --rows 1,1021 --dim 31,768 --sample 1
            verify $mode --steps mask,compact,permute --rows 1021 --dim 31,768 --sample 100,970
            verify $mode --steps permute,convert --rows 1021 --dim 31,768 --sample 100 "${types[@]}"
            verify $mode --steps $whole --to fp8 --fp8 nan --rows 1021 --dim 31,768 --norm-max 1e19
        }
        # shellcheck disable=SC2086
        [[ $mode == *--ring\ 2* ]] || verify $mode --steps $whole --rows 1000001 --dim 1,3,31 --to f16
        # Rows of up to 49,024 bytes are gathered with bulk copies, several per block if they are short.
        # shellcheck disable=SC2086
        [[ $mode != --resident* ]] || verify $mode --steps permute --rows 1021 --dim 4,1532,1536,6144,12256,12260 --sample 1,100
    done
    prepared
    for file in "${files[@]}"; do # rows that the host decodes before the runs
        for mode in --resident '--chunk 4 --ring 2'; do
            # shellcheck disable=SC2086
            verify $mode --steps $permuted --data "$file" --norm-min 0 --norm-max 1e19 "${types[@]}"
        done
    done
    # Tests rows that do not fit into the stages, tiles of several megabytes, and many tiles.
    for steps in $whole $permuted; do
        verify --resident --steps "$steps" --rows 37 --dim 9000,16384,20001,65536 --to f16,mxfp4
        verify --chunk 4 --steps "$steps" --rows 37 --dim 16384,65535 --dtype f16 --to fp8
    done
    verify --resident --steps $whole --rows 1000001 --dim 768 --to fp8
    verify --steps $whole --rows 300007 --dim 768 --to f16
    verify --resident --steps permute --rows 300007 --dim 768 --sample 8192
    if command -v mpirun >/dev/null; then
        for mode in --resident '--chunk 64'; do
            # shellcheck disable=SC2086
            check "3 ranks: $mode" mpirun -n 3 --oversubscribe "$bench" --workload ops --variant "$variants" --verify --loops 2 --warmups 0 \
                --warmup-time 0 --threads 2 $mode --steps $permuted --rows 2,10007 --dim 31,768 --to f16,mxfp4
        done
    fi
    check 'a set that does not fit is refused' fails_with 2 'gpu-memory-limit allows 0.001049 GB; drop --resident' \
        "$bench" --variant ops-fused --resident --gpu-memory-limit 1M
    check 'results that do not fit are refused' fails_with 2 'use --sample' "$bench" --variant ops-cuda --gpu-memory-limit 100M --rows 100000
}

make_rows 31
make_rows 768
if ((sanitize)); then sanitized; else everything; fi
conclude
