#!/usr/bin/env bash
# Runs the tests that were built into BUILD/tests, then the linters. Called by make check.
#
#   scripts/check.sh BUILD SAN      SAN=1: the build is under ASan and UBSan
#
# Prints a line a suite and, last, "N passed, N failed" over all tests. Exit status 1 when anything failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

build=$1 san=${2:-0}
limit_s=600
passed=0 failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# What libraries keep for the whole process is their own, not ours.
export LSAN_OPTIONS="suppressions=$PWD/tests/lsan.supp:print_suppressions=0"
export UBSAN_OPTIONS=print_stacktrace=1

for suite in "$build"/tests/test_*; do
    [[ -x $suite && $suite != *.* ]] || continue
    timeout "$limit_s" "$suite" >"$log" 2>&1
    status=$?
    # [====] Synthesis: Tested: 12 | Passing: 12 | Failing: 0 | Crashing: 0
    read -r ok bad <<<"$(sed -n 's/.*Tested: \([0-9]*\) | Passing: \([0-9]*\) .*/\2 \1/p' "$log" | tail -n 1 | awk '{print $1, $2 - $1}')"
    # Criterion passes a test whose process leaked: the sanitizer's report does not.
    if ((san)) && grep -q 'ERROR: .*Sanitizer\|runtime error:' "$log"; then status=1 && bad=$((${bad:-0} + 1)); fi
    ((status == 0)) || { ((${bad:-0} > 0)) || bad=1; }
    passed=$((passed + ${ok:-0}))
    failed=$((failed + ${bad:-0}))
    if ((status == 0)); then
        printf '  ok      %4s tests  %s\n' "${ok:-0}" "${suite##*/}"
    else
        printf '  FAILED  exit %s  %s\n' "$status" "${suite##*/}"
        cat "$log"
    fi
done

if ((!san)); then
    if scripts/lint.sh; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
fi
printf '%d passed, %d failed\n' "$passed" "$failed"
((failed == 0 && passed > 0))
