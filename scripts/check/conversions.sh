#!/usr/bin/env bash
# Compares the conversions from float to f16, bf16 and fp8 with the nearest value in a table of the type's values, for all
# 2^32 floats. The script takes several minutes on few cores. It is not part of make check.
#
#   scripts/check/conversions.sh
#
# CC names the compiler (default cc). Exit status 1 if any value differs.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

${CC:-cc} -std=gnu11 -O3 -fopenmp -ffp-contract=off -Wall -Wextra -Isrc -Itests -o "$work/conversions" \
    tests/exhaustive_conversions.c -lm
"$work/conversions" | tee "$work/lines" && status=0 || status=1
passed=$(grep -c ' 0 of ' "$work/lines" || true)
echo "$passed passed, $(($(wc -l <"$work/lines") - passed)) failed"
exit "$status"
