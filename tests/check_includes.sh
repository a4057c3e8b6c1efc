#!/usr/bin/env bash
# Checks that each folder includes only what docs/architecture.md allows. Prints every line that breaks a rule. Exit
# status 1 if there is such a line.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

broken=0
# forbid WHAT FILES PATTERN: no #include in FILES may match PATTERN (an extended regular expression)
forbid() {
    local what=$1 pattern=$3 files
    # shellcheck disable=SC2086  # a list of globs on purpose
    files=$(ls -d $2 2>/dev/null) || return 0
    # shellcheck disable=SC2086
    if grep -nE "^[[:space:]]*#[[:space:]]*include[[:space:]]+[<\"]($pattern)" $files /dev/null; then
        echo "  ^ $what"
        broken=1
    fi
}
# only WHAT FILES PATTERN: every #include in FILES must match PATTERN
only() {
    local what=$1 pattern=$3 lines
    # shellcheck disable=SC2086
    lines=$(grep -nE '^[[:space:]]*#[[:space:]]*include' $2 /dev/null | grep -vE "include[[:space:]]+[<\"]($pattern)")
    [[ -z $lines ]] && return 0
    printf '%s\n  ^ %s\n' "$lines" "$what"
    broken=1
}

libc='(assert|ctype|errno|fcntl|float|inttypes|limits|math|pthread|stdarg|stdatomic|stdbool|stddef|stdint|stdio|stdlib|strings?|time|unistd)\.h'
cuda='(cuda[a-z_]*|curand[a-z_]*|cub/.*|nvml|cufile|device_[a-z_]*)\.(h|cuh)'
mpi='mpi(-ext)?\.h'

# Layers of src/, from top to bottom: a folder includes its own headers and those of lower layers.
floor() { # folder of src/, folders in lower layers
    only "src/$1/ includes only its own headers and those of lower layers" "src/$1/*.[ch]" "($1|${2// /|})/.*\.(h|c|def)|[a-z0-9_]+(/[a-z0-9_]+)?\.h>|hwloc.*|nvtx3/.*"
}
floor run 'synth load ops train data machine core'
for room in synth load ops train; do floor $room 'data machine core'; done
floor lib 'synth ops train data machine core'
floor data 'machine core'
floor machine core
floor core core

forbid 'src/ is host C: it uses CUDA only through variant.h and machine/device.h' 'src/*.[ch] src/*/*.[ch]' "$cuda|.*\.cuh"
forbid 'the program does not use the library' 'src/*.[ch] src/[!l]*/*.[ch] src/load/*.[ch] cpu/*/* cuda/*/*.* mpi/*' 'lib/.*'
forbid 'only mpi/comm_mpi.c uses MPI' 'src/*.[ch] src/*/*.[ch] cpu/*/*.[ch] cuda/*/*.* cuda/*/*/* mpi/launcher* mpi/comm_serial.c' "$mpi"
only 'status, text, portable, timer and philox include only libc and each other' \
    'src/core/status.h src/core/status.c src/core/text.h src/core/text.c src/core/portable.h src/core/timer.h src/core/philox.h' \
    "$libc|core/(status|portable|text|timer)\.h"
forbid 'cpu/ and cuda/ do not use options, workloads, rows or runs' 'cpu/*/* cuda/*/*.* cuda/*/*/*' 'core/(options|workload|record)\.h|run/.*'
forbid 'in cpu/ and cuda/, only the exchanges between ranks include machine/comm.h' \
    "$(find cpu cuda -type f | grep -vE '/train/(exchange|allreduce)[a-z_]*\.(c|cu)$')" 'machine/comm\.h'
forbid 'includes name the folder under src/, and never use a parent folder' 'src/*.[ch] src/*/* cpu/*/* cuda/*/*.* cuda/*/*/* mpi/*' '\.\./'
forbid 'cpu/ does not include cuda/' 'cpu/*/*' "common/.*|.*\.cuh|$cuda"
forbid 'cuda/ does not include cpu/' 'cuda/*/*.* cuda/*/*/*' 'omp.*|cpu/.*'
for room in synth load ops train; do
    others=$(printf '%s|' synth load ops train | sed "s/$room|//; s/|\$//")
    forbid "the folder $room does not include other workloads" "src/$room/* cpu/$room/* cuda/$room/*.* cuda/$room/*/*" "($others)/.*"
done

# A header of a circle cannot be understood without the others. tsort names the headers of each circle on stderr.
circles=$(grep -rHE --include='*.h' --include='*.cuh' '^[[:space:]]*#[[:space:]]*include[[:space:]]+"' src cpu cuda mpi |
    sed -E 's,^(src|cuda)/,,; s,^(([^:]*/)?[^/:]*):.*"([^"/]*)".*,\1 \2\3,; s,^([^: ]*):.*"([^"]*)".*,\1 \2,' | tsort 2>&1 >/dev/null)
if [[ $circles ]]; then
    printf '%s\n  ^ headers include each other\n' "$circles"
    broken=1
fi
exit $broken
