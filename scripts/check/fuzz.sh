#!/usr/bin/env bash
# Fuzzes the file parsers with libFuzzer and ASan. `make fuzz` calls this script.
#
#   scripts/check/fuzz.sh PROGRAM [TARGET...]     all targets by default
#   FUZZ_TIME=60                                  seconds per target
#
# The target "folders" is tests/fuzz_folders.py, which compares the program FDSL_BENCH with ImageFolder's rule.
# Seeds are in tests/fuzz/TARGET/. Inputs that crash, hang or exhaust memory are stored there (crash-..., timeout-...,
# oom-...); from then on, the tests run them, too. Other inputs that libFuzzer finds are stored in build/fuzz/. Exit
# status 1 if a target failed.
set -uo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.." || exit

program=$1
shift
targets=("$@")
((${#targets[@]})) || mapfile -t targets < <({ echo folders; find tests/fuzz -mindepth 1 -type d -printf '%f\n'; } | sort)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0
for target in "${targets[@]}"; do
    if [[ $target == folders ]]; then
        if tests/fuzz_folders.py "${FDSL_BENCH:-./fdsl-bench}" --time "${FUZZ_TIME:-60}" --seed "$RANDOM$RANDOM" >"$log" 2>&1; then
            printf '  ok      %-6s %s\n' "$target" "$(<"$log")"
        else
            printf '  FAILED  %s\n' "$target"
            tail -n 40 "$log"
            failed=1
        fi
        continue
    fi
    found=build/fuzz/$target
    mkdir -p "$found"
    if FUZZ_TARGET=$target "$program" -max_total_time="${FUZZ_TIME:-60}" -timeout=10 -max_len=16384 -rss_limit_mb=4096 \
        -print_final_stats=1 -artifact_prefix="tests/fuzz/$target/" "$found" "tests/fuzz/$target" >"$log" 2>&1; then
        printf '  ok      %-6s %s inputs, %s kept\n' "$target" \
            "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")" "$(find "$found" -type f | wc -l)"
    else
        printf '  FAILED  %s\n' "$target"
        tail -n 40 "$log"
        failed=1
    fi
done
exit $failed
