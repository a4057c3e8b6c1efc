#!/usr/bin/env bash
# Times our variants of the paper's steps, and prints the ratios to the times of the published code. The published times
# (one H200, 512 x 512, 1000 vertices, 200 orbits) are in results/reference/published_h200.csv. Variants that process one image
# at a time have one published time; this script times them at several batch sizes. Our times include clearing the
# images; the published times do not.
#
#   scripts/compare/published.sh [CSV]                       CSV: append the rows to this file
#   scripts/compare/published.sh CLONE [CSV [PROGRAM ...]]   first times the published code on this machine, then our variants
#
# CLONE is a clone of hpca-uji/fdsl-gpu-pipeline. scripts/compare/published.py times its Python code (original and NumPy, one
# core), and CUDA programs that you built in it, each given as VARIANT:SIDE:VERTICES:BATCH=PATH (see its --help). The rows go
# to CSV (default: results/published.csv), and `make plots` draws them. Without a GPU, our variants are not timed.
#
# Exit status: 0 done, 1 a variant is slower than its published time. With CLONE, failures have the exit status of
# scripts/compare/published.py.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."

bench=${FDSL_BENCH:-./fdsl-bench}
reference=results/reference/published_h200.csv
rows=$(mktemp)
trap 'rm -f "$rows"' EXIT

time_variants() { # names batch
    "$bench" --variant "$1" --batch "$2" --format csv ${out:+--out "$out"} >"$rows.new"
    if [[ -s $rows ]]; then tail -n +2 "$rows.new" >>"$rows"; else cat "$rows.new" >"$rows"; fi
    rm -f "$rows.new"
}

if [[ -d ${1-} ]]; then
    scripts/compare/published.py "$1" "${2:-results/published.csv}" "${@:3}" --bench "$bench"
    "$bench" --variant gbase --dry-run >/dev/null 2>&1 || exit 0
    shift
fi
out=${1:-}
for batch in 1 32 512; do
    time_variants "$(awk -F, 'NR > 1 && $1 != "bat" { print $1 }' $reference | paste -sd,)" "$batch"
done
while read -r batch; do
    time_variants bat "$batch"
done < <(awk -F, '$1 == "bat" { print $2 }' $reference)

awk -F, '
    FNR == 1 && NR != 1 { for (i = 1; i <= NF; i++) column[$i] = i }
    NR == FNR { if (FNR > 1) published[$1, $1 == "bat" ? $2 : "any"] = $3; next }
    FNR == 1 { printf "%-18s %6s %14s %14s %8s\n", "variant", "batch", "published us", "ours us", "ratio"; next }
    {
        variant = $column["variant"]; batch = $column["batch"]
        ours = $column["time_median_s"] / $column["items"]; theirs = published[variant, variant == "bat" ? batch : "any"]
        printf "%-18s %6d %14.2f %14.2f %7.2fx%s\n", variant, batch, 1e6 * theirs, 1e6 * ours, theirs / ours,
            (ours > theirs ? "  SLOWER" : "")
        slower += ours > theirs
    }
    END { exit (slower > 0) }
' "$reference" "$rows"
