#!/usr/bin/env bash
# Measures the overhead of NVTX ranges when no profiler is attached. Builds the program a second time without NVTX,
# runs both programs alternately, and prints each variant's time with and without ranges. A time is the minimum of the
# medians of all rounds.
#
#   scripts/compare/ranges.sh [VARIANT ...]        default: the variants named in the script, if available
#
# Environment (defaults in parentheses): ROUNDS (5), runs of each program per variant; JOBS (all cores), parallel jobs
# of the build. make also reads CUDA_ARCHS and NAME=0 from the environment.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."
rounds=${ROUNDS:-5}
[[ $rounds =~ ^[1-9][0-9]?$ ]] || { echo "compare/ranges.sh: ROUNDS=$rounds: give a whole number from 1 to 99" >&2 && exit 2; }

with=${FDSL_BENCH:-./fdsl-bench}
without=build/no-ranges/fdsl-bench
make -s -j"${JOBS:-$(nproc)}" NVTX=0 BUILD=build/no-ranges PROGRAM=$without $without >&2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

options_of() { # variant: prints the options of a run with short stages, so that ranges are frequent
    case $1 in
    train-graph) echo --model cnn --data digits --epochs 3 ;;
    train-*) echo --model lenet --data digits --train-size 12800 --test-size 100 --batch 64 --epochs 3 ;;
    naive | omp) echo --res 64 --batch 4 --vertices 100 --max-time 3 ;;
    *) echo --res 224 --batch 16 --max-time 3 ;;
    esac
}
variants=("$@")
if ((${#variants[@]} == 0)); then
    list=$("$with" --list)
    for variant in naive omp gbase rng bat fused train-naive train-omp train-cuda train-graph; do
        ! grep -q "^  $variant  *available" <<<"$list" || variants+=("$variant")
    done
fi
for ((round = 0; round < rounds; round++)); do
    for variant in "${variants[@]}"; do
        read -ra options < <(options_of "$variant")
        for program in with without; do
            "${!program}" --variant "$variant" "${options[@]}" --out "$work/$program-$variant.csv" --format csv >/dev/null 2>>"$work/said"
        done
    done
done
python3 - "$work" "${variants[@]}" <<'END'
import csv, statistics, sys
print(f"{'variant':14}{'with ranges':>16}{'without':>16}{'difference':>12}   spread of the medians with and without ranges")
for variant in sys.argv[2:]:
    times = [[float(row["time_median_s"]) for row in csv.DictReader(open(f"{sys.argv[1]}/{program}-{variant}.csv"))]
             for program in ("with", "without")]
    own, other = map(min, times)
    spread = [100 * (max(runs) - min(runs)) / statistics.median(runs) for runs in times]
    print(f"{variant:14}{1e6 * own:13.2f} us{1e6 * other:13.2f} us{100 * (own / other - 1):11.2f} %   {spread[0]:.1f} %, {spread[1]:.1f} %")
END
