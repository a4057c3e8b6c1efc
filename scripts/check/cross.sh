#!/usr/bin/env bash
# Checks that the C code compiles for aarch64, that is, without x86 intrinsics. If qemu is installed, also compares the images of
# the aarch64 program with the images of this machine's program.
#
#   scripts/check/cross.sh
#
# Needs gcc-aarch64-linux-gnu; without it, prints "skipped". The comparison of images needs qemu-user-static.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."

target=aarch64-linux-gnu
command -v $target-gcc >/dev/null || { echo "  skipped cross: $target-gcc is not installed" && exit 0; }

# Builds without libraries, because they are not installed for aarch64.
parts=(CUDA MPI PNG JANSSON XXHASH ZLIB CRYPTO URING INIH HWLOC ARCHIVE NVTX CUDNN)
build=build/aarch64
make --no-print-directory "${parts[@]/%/=0}" CC=$target-gcc LD=$target-ld AR=$target-ar OBJCOPY=$target-objcopy CFLAGS='-O2 -Werror' \
    BUILD=$build PROGRAM=$build/fdsl-bench all lib >$build.log 2>&1 || { cat $build.log && exit 1; }

qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) || { echo "  ok      cross: compiles for $target" && exit 0; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
options=(--variant naive --batch 5 --res 160 --out-res 97 --channels 3 --dtype f16 --vertices 101 --orbits 30 --min-samples 6 --max-time 0
    --min-time 0 --warmups 0 --warmup-time 0)
"${FDSL_BENCH:-./fdsl-bench}" "${options[@]}" --npy "$folder/here.npy" >/dev/null 2>&1
"$qemu" -L /usr/$target $build/fdsl-bench "${options[@]}" --npy "$folder/there.npy" >/dev/null 2>&1
cmp "$folder/here.npy" "$folder/there.npy"
echo "  ok      cross: compiles for $target, and draws the same images under qemu"
