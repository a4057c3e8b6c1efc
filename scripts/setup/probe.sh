#!/usr/bin/env bash
# Prints the available libraries and GPU architectures as variables for make. The Makefile keeps the output in
# build/found.mk until the compiler, the flags or the installed packages change.
#
#   scripts/setup/probe.sh
#
# Environment:
#   CC, FLAGS   C compiler and the flags for it, quoted as for a shell
#   MPICC       compiler wrapper of MPI
#   NVCC        CUDA compiler; empty if there is none
#
# Exit status 4 if there is no C compiler, or no C library for it.
set -u
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }

# found NAME HEADER LINK_FLAGS COMPILER_FLAGS: prints found_NAME if a program with this header compiles and links.
found()
{
    printf '#include <stddef.h>\n#include <stdio.h>\n#include <%s>\nint main(void) { return 0; }\n' "$2" |
        eval "$CC $FLAGS $4 -x c - -o /dev/null $3" 2>/dev/null && echo "found_$1 := 1"
}

find_mpi()
{
    # Both Open MPI and MPICH print: gcc -I... -L... -lmpi
    local show flag compile=() link=()
    show=$($MPICC -show 2>/dev/null) || return
    for flag in ${show#* }; do
        case $flag in
        -I* | -D*) compile+=("$flag") ;;
        -L* | -l* | -Wl,*) link+=("$flag") ;;
        esac
    done
    found MPI mpi.h "${link[*]}" "${compile[*]}" || return
    echo "MPI_CFLAGS := ${compile[*]}"
    echo "MPI_LIBS := ${link[*]}"
}

find_architectures()
{
    local known gpus
    [[ $NVCC ]] || return
    known=$(eval "$NVCC --list-gpu-code" 2>/dev/null | sed -n 's/^sm_//p' | tr '\n' ' ')
    gpus=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9.]+$' | tr -d . |
        sort -nu | tr '\n' ' ')
    echo "nvcc_archs := $known"
    echo "gpu_archs := $gpus"
}

[[ $(found CC stdio.h '' '') ]] || {
    echo "setup: '$CC' compiles no C program: install a compiler and the C library (Debian: apt install gcc libc6-dev)," \
        'or run make bench, which installs them' >&2
    exit 4
}
# The probes run in parallel. Each line is a single write, so lines do not mix. Their order does not matter.
found OMP omp.h '' -fopenmp &
found PNG png.h -lpng '' &
found JPEG jpeglib.h -ljpeg '' &
found WEBP webp/decode.h -lwebp '' &
found CURL curl/curl.h -lcurl '' &
found EXPAT expat.h -lexpat '' &
found JANSSON jansson.h -ljansson '' &
found XXHASH xxhash.h -lxxhash '' &
found ZLIB zlib.h -lz '' &
found ZSTD zstd.h -lzstd '' &
found CRYPTO openssl/evp.h -lcrypto '' &
found URING liburing.h -luring '' &
found INIH ini.h -linih '' &
found HWLOC hwloc.h -lhwloc '' &
found ARCHIVE archive.h -larchive '' &
find_mpi &
find_architectures &
wait
