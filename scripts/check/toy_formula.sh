#!/usr/bin/env bash
# Adds a formula to a copy of the source tree: one file and one line. Checks that the program then draws it with naive and
# omp, and that options, class files, help and the table of the page know it without any other change.
#
#   scripts/check/toy_formula.sh [FOLDER]     builds in FOLDER (default: a temporary folder, which is removed)
#
# Exit status 1 if a check fails. The build takes a few minutes; CC and MAKEFLAGS apply.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."
folder=${1:-$(mktemp -d)}
[[ ${1:-} ]] || trap 'rm -r "$folder"' EXIT
mkdir -p "$folder"
git ls-files -coz --exclude-standard | xargs -0 cp --parents -t "$folder"

cat >"$folder/src/synth/toy.c" <<'END'
/* The formula `toy`: three black shapes on light gray. */
#include "core/portable.h"
#include "synth/lines.h"

static const struct formula_parameter parameters[] = {
    {"orbits", PARAMETER_INTEGER, 1, 1000, LAW_UNIFORM, "norbits_min", "norbits_max", .low = 1, .turn = 1},
    {"vertices", PARAMETER_INTEGER, 3, 1000, LAW_UNIFORM, "nvertex_min", "nvertex_max", .low = 3, .turn = 0},
    {"noise", PARAMETER_DOUBLE, 0, 100, LAW_UNIFORM, "noisecoef_min", NULL, .span = 1, .turn = 2},
};

const struct formula formula_toy = {
    .name = "toy",
    .summary = "draws three black shapes on light gray",
    .id = FORMULA_TOY,
    .family = FAMILY_LINES,
    .targets = TARGET_LABEL | TARGET_MASK,
    .parameters = parameters,
    .parameter_count = COUNT_OF(parameters),
    .id_least = 1,
    .id_most = 255,
    .classes = 2,
    .check = lines_check,
    .canvas = 96,
    .unpublished = "nobody has published it",
};
END
echo 'FORMULA(TOY, toy, LINES, 77, 200, 1, 0, 256, 0, 3, 1, 1, 30, 3, 1)' >>"$folder/src/synth/formulas.def"

cd "$folder"
printf 'class,orbits,vertices,noise\n5,40,9,0.5\n9,3,333,2.25\n' >classes.csv
make CUDA=0 BUILD=build fdsl-bench build/tests/test_formulas >make.log 2>&1 || { tail -20 make.log && exit 1; }
grep -i warning make.log && exit 1
./fdsl-bench --help --workload synth | grep 'segrcdb, toy' >help.log
for threads in 1 7; do
    ./fdsl-bench --variant naive,omp --formula toy --class classes.csv --batch 3 --res 130 --threads $threads --verify --max-time 0.1 \
        --write-classes written.csv --png pictures --out rows.csv >run.log 2>&1 || { tail run.log && exit 1; }
    rm -r pictures
done
cmp classes.csv written.csv
python3 - <<'END'
import csv

rows = list(csv.DictReader(open("rows.csv")))
assert len(rows) == 4 and {row["formula"] for row in rows} == {"toy"}, rows
assert len({row["digest"] for row in rows}) == 1 and {row["wrong"] for row in rows} == {"0"}, [(row["digest"], row["wrong"]) for row in rows]
END
./fdsl-bench --variant omp --formula toy --classes 300 >run.log 2>&1 && { echo 'classes beyond the masks are accepted' && exit 1; }
# The suite that checks the description of every formula, in which only the page lacks the new row
build/tests/test_formulas --filter 'formulas/{every_formula*,the_ladder*}' >test.log 2>&1 || { tail -20 test.log && exit 1; }
build/tests/test_formulas --filter 'formulas/the_page*' >test.log 2>&1 && { echo 'the page does not need a row' && exit 1; }
grep -q 'draws three black shapes' test.log
echo "a formula of one file and one line: drawn, verified, and known to options and class files"
