#!/usr/bin/env bash
# Runs the linters: include rules, prose, clang-format, cppcheck, python3, shellcheck. `make lint` calls this script.
#
#   scripts/check/lint.sh
#
# Tools that are not installed are skipped with a message. clang-format is also skipped if its version is not 14, because
# other versions format differently. Exit status 1 if a linter complains.
set -uo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.." || exit

status=0
verdict() { # name, exit status
    if (($2 == 0)); then printf '  ok      %s\n' "$1"; else printf '  FAILED  %s\n' "$1" && status=1; fi
}
skip() { printf '  skipped %s\n' "$1"; }

list() { git ls-files -co --exclude-standard -- "$@" 2>/dev/null || find . -name "${1##*/}" -not -path './build/*'; }
mapfile -t c_files < <(list '*.c' '*.h')
mapfile -t cuda_files < <(list '*.cu' '*.cuh')
mapfile -t python_files < <(list '*.py')
mapfile -t shell_files < <(list 'scripts/*.sh' '.ci/run' 'tests/*.sh' 'slurm/*')

tests/check_includes.sh
verdict 'include rules' $?

if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    scripts/check/prose.sh
    verdict 'prose' $?
else
    skip 'prose: not a git checkout'
fi

if clang-format --version 2>/dev/null | grep -q 'version 14\.'; then
    clang-format --dry-run -Werror "${c_files[@]}" "${cuda_files[@]}"
    verdict 'clang-format' $?
else
    skip 'clang-format: version 14 is not installed'
fi

if command -v cppcheck >/dev/null; then
    cppcheck --quiet --error-exitcode=1 --enable=warning,performance,portability --inline-suppr --std=c11 \
        --suppress=missingInclude --suppress=unknownMacro -D__linux__ -D__x86_64__ -DHAVE_PNG -DPNG_eXIf_SUPPORTED -DHAVE_INIH -DHAVE_EXPAT -DHAVE_JANSSON \
        -DHAVE_XXHASH -DHAVE_ZLIB -DHAVE_ZSTD -DHAVE_CRYPTO -DHAVE_URING -DHAVE_HWLOC -Isrc -Icuda -Impi src cpu mpi
    verdict 'cppcheck' $?
else
    skip 'cppcheck: not installed'
fi

if command -v python3 >/dev/null; then
    PYTHONPYCACHEPREFIX=$(mktemp -d) && export PYTHONPYCACHEPREFIX
    python3 -m py_compile "${python_files[@]}"
    verdict 'python3 compiles' $?
    rm -rf "$PYTHONPYCACHEPREFIX"
else
    skip 'python3: not installed'
fi

if command -v shellcheck >/dev/null; then
    shellcheck "${shell_files[@]}"
    verdict 'shellcheck' $?
else
    skip 'shellcheck: not installed'
fi
exit $status
