#!/usr/bin/env bash
# Compares generating images with reading them. Generates images as fast as possible, and reads the same images
# from files and from shards, while training steps of several durations run on the GPU. Prints whether generating or
# reading is faster for each step time, and the disk space that generating saves.
#
#   scripts/compare/break_even.sh DIR FILE [TABLE]
#
# DIR is a folder on the disk to measure. The images are written there: 1.6 GB by default. DIR also keeps finished
# rows, so that the same command continues an interrupted run.
#
# Rows go to FILE_synth.csv and FILE_load.csv. If FILE is results/break_even, `make plots` draws them. If files-gpu
# and shards-gpu are among the readers, the monitor records a separate run of each, which is not part of the comparison.
# The monitor samples of these runs go to FILE_monitor.csv, and their rows go to FILE_loaders.csv.
#
# TABLE (configs/sweep_break_even.tsv) is a table for scripts/sweep/run.sh with the columns variant, batch, res,
# classes and compute. It lists the generators, and the durations of steps in milliseconds (-: no step). Readers use
# the same batch, res and classes. Cold reads need root. Without a GPU, only rates without a step are compared.
#
# Readers and generators do equal work: both deliver images as bytes, and all batches are full. A step on a partial
# batch takes as long as on a full one, so partial batches would make readers seem slower. The number of images is
# therefore a multiple of threads x batch. The shuffle buffer is an eighth of a thread's images, so that the first
# batch does not wait until a thread has read all its images. The script takes about fifteen minutes.
#
# Environment (defaults in parentheses):
#   SAMPLES (10000)             minimum number of images to read
#   TIME (3)                    maximum seconds per row of reading, unless MIN_SAMPLES runs take longer
#   MIN_SAMPLES (6)             minimum number of runs per row; a warm run has four epochs
#   READERS (all)               any of files, files-omp, files-gpu, shards, shards-omp, shards-gpu, gpu-resident, png, jpeg
#   CACHES (both if possible)   warm, cold
#   WATCH (yes)                 if empty, the monitor records nothing
#   FDSL_BENCH (./fdsl-bench)   the program
#
# Exit status: 0 done, 1 something failed, 2 usage, 4 no generator or no reader can run here.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
samples=${SAMPLES:-10000}
shards=16 # also the maximum number of threads that can read shards
max_time_s=${TIME:-3}
min_samples=${MIN_SAMPLES:-6}
read -ra wanted <<<"${READERS:-files files-omp files-gpu shards shards-omp shards-gpu gpu-resident png jpeg}"
read -ra wanted_caches <<<"${CACHES:-warm cold}"
watched=${WATCH-yes}
epochs=4 # per warm run, so that the wait for the first batch is a small part of the run

note() { printf 'break_even.sh: %s\n' "$1" >&2; }
die() { # exit status, text
    note "$2"
    exit "$1"
}

(($# == 2 || $# == 3)) || die 2 'usage: scripts/compare/break_even.sh DIR FILE [TABLE]'
[[ $samples =~ ^[1-9][0-9]{0,8}$ ]] || die 2 "SAMPLES=$samples: give a whole number from 1"
[[ $max_time_s =~ ^[0-9]*\.?[0-9]+$ ]] || die 2 "TIME=$max_time_s: give seconds"
[[ $min_samples =~ ^[1-9][0-9]{0,5}$ ]] || die 2 "MIN_SAMPLES=$min_samples: give a whole number from 1"
for name in "${wanted[@]}"; do
    [[ $name =~ ^((files|shards)(-omp|-gpu)?|gpu-resident|png|jpeg)$ ]] || die 2 "READERS: unknown reader '$name'"
done
for name in "${wanted_caches[@]}"; do [[ $name =~ ^(warm|cold)$ ]] || die 2 "CACHES: '$name' is neither warm nor cold"; done
bench=$(command -v -- "${FDSL_BENCH:-$root/fdsl-bench}") || die 4 'fdsl-bench is not built; run make first'
bench=$(realpath "$bench")
mkdir -p "$1" || die 2 "$1: not a folder; give a folder for the images"
dir=$(realpath "$1")
out=${2%.csv}
table=${3:-$root/configs/sweep_break_even.tsv}
[[ -f $table ]] || die 2 "$table: no such file"
[[ -d $(dirname "$out") ]] || die 2 "$(dirname "$out"): no such folder"

# ---- The table ----

is_one_of() { # word, words: succeeds if `word` is one of `words`
    local word
    for word in "${@:2}"; do [[ $word != "$1" ]] || return 0; done
    return 1
}

column() { # name: prints the distinct values of this column
    awk -F'\t' -v name="$1" '/^[[:blank:]]*(#|$)/ { next }
        !at { for (i = 1; i <= NF; i++) if ($i == name) at = i; if (!at) exit; next }
        !seen[$at]++ { print $at }' "$table"
}

one_value() { # name: prints the value of this column, which all lines must share
    local values
    mapfile -t values < <(column "$1")
    ((${#values[@]} == 1)) || die 2 "$table: column '$1' has ${#values[@]} values; give all lines the same value, so that all variants deliver the same images"
    printf '%s' "${values[0]}"
}

batch=$(one_value batch) res=$(one_value res) classes=$(one_value classes)
mapfile -t variants < <(column variant)
mapfile -t steps < <(column compute)
((${#variants[@]} && ${#steps[@]})) || die 2 "$table: columns variant, batch, res, classes and compute are needed"

# ---- Available variants ----

list=$("$bench" --list)
available() { # variant: succeeds if it is available, otherwise prints the reason
    local state
    state=$(awk -v name="$1" '$1 == name { $1 = ""; print substr($0, 2) }' <<<"$list")
    [[ $state != available ]] || return 0
    state=${state#unavailable: }
    note "$1 is skipped: ${state:-unknown to this program}"
    return 1
}

choose() { # variants: prints the available ones
    local variant
    for variant in "$@"; do ! available "$variant" || printf '%s\n' "$variant"; done
}

mapfile -t generators < <(choose "${variants[@]}")
((${#generators[@]})) || die 4 'no generator of the table is available here'
names=() # of the variants for these readers
for name in "${wanted[@]}"; do
    case $name in
    png) names+=(shards-omp) ;;
    jpeg) names+=(shards-omp shards-gpu) ;;
    *) names+=("$name") ;;
    esac
done
mapfile -t readers < <(choose "${names[@]}" | awk '!seen[$0]++')
((${#readers[@]})) || die 4 'no reader is available: this build has no xxHash'
if ! lacks=$("$bench" --variant "${generators[0]}" --compute 1 --dry-run 2>&1); then
    note "no training step is available, so only rates without a step are compared: ${lacks#fdsl-bench: }"
    is_one_of - "${steps[@]}" || die 4 "$table has no line without a step (- in the column compute)"
    steps=(-)
fi

# ---- Images to read ----

threads=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # all cores that this process may use, like --threads 0
whole=$((threads * batch))
asked=$samples
samples=$(((samples + whole - 1) / whole * whole))
((samples == asked)) || note "$samples images instead of $asked, so that all batches are full: a multiple of $threads threads x $batch"
shuffle=$((samples / threads / 8))
((shuffle > 1)) || shuffle=2

prepare() { # name, options ...
    "$bench" --prepare "$dir/$1" --from synth --samples "$samples" --res "$res" --classes "$classes" "${@:2}" >&2
}

prepare files --store files --encode npy
prepare shards --store shards --shards $shards --encode npy
# PNG and JPEG images are compressed once and decoded in every epoch. This needs libpng and libjpeg-turbo.
coded=()
for format in png jpeg; do
    is_one_of $format "${wanted[@]}" || continue
    if prepare $format --store shards --shards $shards --encode $format; then coded+=("$format"); else note "${format^^} is skipped"; fi
done

caches=()
! is_one_of warm "${wanted_caches[@]}" || caches+=(warm)
if ! is_one_of cold "${wanted_caches[@]}"; then
    :
elif ((EUID != 0)); then
    note 'cold reads are skipped: only root can drop cached directory entries'
elif ! lacks=$("$bench" --variant shards --data "$dir/shards" --cache cold --loops 1 --warmups 0 --warmup-time 0 2>&1); then
    note "cold reads are skipped: $(grep -m 1 -o -- '--cache.*' <<<"$lacks" || printf '%s' "${lacks##*$'\n'}")"
else
    caches+=(cold)
fi
((${#caches[@]})) || die 4 'nothing to read: cold reads are not possible here'

# ---- Two tables for scripts/sweep/run.sh ----

# Prints the lines of the table that this machine can run.
generating_table() {
    local line fields at=() i kept
    while IFS= read -r line; do
        [[ ! $line =~ ^[[:blank:]]*(#|$) ]] || continue
        IFS=$'\t' read -ra fields <<<"$line"
        kept=yes
        for i in "${!at[@]}"; do
            [[ ${at[i]} != variant ]] || is_one_of "${fields[i]}" "${generators[@]}" || kept=''
            [[ ${at[i]} != compute ]] || is_one_of "${fields[i]}" "${steps[@]}" || kept=''
        done
        ((${#at[@]})) || at=("${fields[@]}")
        [[ ! $kept ]] || printf '%s\n' "$line"
    done <"$table"
}

reading_lines() { # variant, set, cache, decode
    local step dtype=- window=$shuffle runs=$epochs warmups=1 size=- channels=-
    [[ $1:$4 != shards-gpu:yes ]] || size=$res channels=1 # a GPU decodes into images of one size
    [[ $1 != *gpu* ]] || dtype=raw
    [[ $1 != files* && $1 != gpu-resident ]] || window=- # these loaders shuffle globally
    [[ $3 == warm ]] || runs=- warmups=0 # the page cache is emptied before each run, so a warm-up has no effect
    for step in "${steps[@]}"; do
        printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\tyes\t%s\t%s\t%s\n' "$1" "$dir/$2" "$3" "$batch" "$threads" \
            "$window" "$runs" "$dtype" "$4" "$size" "$channels" "$step" "$warmups" "$min_samples" "$max_time_s"
    done
}

reading_table() {
    local variant cache format
    printf 'variant\tdata\tcache\tbatch\tthreads\tshuffle\tepochs\tdtype\tdecode\tout-res\tchannels\tcompute\tverify\twarmups\tmin-samples\tmax-time\n'
    for variant in "${readers[@]}"; do
        for cache in "${caches[@]}"; do
            is_one_of "$variant" "${wanted[@]}" || continue # shards-omp and shards-gpu may be needed for PNG and JPEG only
            case $variant:$cache in
            gpu-resident:cold) ;; # gpu-resident reads the files only once, before the timing
            files*) reading_lines "$variant" files "$cache" - ;;
            *) reading_lines "$variant" shards "$cache" - ;;
            esac
        done
        [[ ${caches[0]} == warm ]] || continue
        for format in "${coded[@]}"; do
            [[ $variant != shards-omp && $variant:$format != shards-gpu:jpeg ]] || reading_lines "$variant" "$format" warm yes
        done
    done
}

sweep() { # name of the table, destination of its rows
    local status=0
    FDSL_BENCH=$bench "$root/scripts/sweep/run.sh" "$dir/sweep_$1.tsv" --out "$dir/rows" >&2 || status=$?
    ((status == 0)) || die 1 "a run failed; finished rows are in $dir/rows. Run the same command again to continue"
    cp "$dir/rows/sweep_$1.csv" "$2.part" && mv "$2.part" "$2"
}

# Monitors files-gpu and shards-gpu with a step of 5 ms, long enough for a figure. The rows go to a separate file,
# because they are not part of the comparison.
watch() {
    local variant
    is_one_of files-gpu "${readers[@]}" && is_one_of shards-gpu "${readers[@]}" || return 0
    rm -f "${out}_monitor.csv" "${out}_loaders.csv"
    for variant in files-gpu shards-gpu; do
        "$bench" --variant $variant --data "$dir/${variant%-gpu}" --batch "$batch" --threads "$threads" \
            --shuffle "$shuffle" --dtype raw --compute 5 --min-time 11 --verify --monitor "${out}_monitor.csv" \
            --out "${out}_loaders.csv" >&2
    done
}

generating_table >"$dir/sweep_generating.tsv"
reading_table >"$dir/sweep_reading.tsv"
sweep generating "${out}_synth.csv"
sweep reading "${out}_load.csv"
[[ ! $watched || ${#steps[@]} == 1 ]] || watch
"$root/scripts/figures/break_even.py" "${out}_synth.csv" "${out}_load.csv"
