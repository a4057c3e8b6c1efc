#!/usr/bin/env bash
# Checks that the C code compiles for aarch64, that is, without x86 intrinsics. If qemu is installed, also generates images with
# libfdsl for aarch64 and compares them with the images of this machine's build/lib/libfdsl.so.
#
#   scripts/check/cross.sh
#
# Needs gcc-aarch64-linux-gnu; prints "skipped" if it is not installed. The comparison needs qemu-user or
# qemu-user-static.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."

target=aarch64-linux-gnu
command -v $target-gcc >/dev/null || { echo "  skipped cross: $target-gcc is not installed" && exit 0; }

# Builds without libraries, because they are not installed for aarch64.
parts=(CUDA MPI PNG WEBP EXPAT JANSSON XXHASH ZLIB ZSTD CRYPTO URING INIH HWLOC ARCHIVE NVTX CUBLAS CUDNN NCCL)
build=build/aarch64
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) || true
# Without the comparison, the code need only compile, and -O1 takes less time. -O0 would give fewer warnings.
level=$([[ $qemu ]] && echo -O2 || echo -O1)
make --no-print-directory "${parts[@]/%/=0}" CC=$target-gcc LD=$target-ld AR=$target-ar OBJCOPY=$target-objcopy CFLAGS="$level -Werror" \
    BUILD=$build PROGRAM=$build/fdsl-bench all lib >$build.log 2>&1 || { cat $build.log && exit 1; }

[[ $qemu ]] || { echo "  ok      cross: compiles for $target" && exit 0; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
draw() { (cd "$folder" && "$@" && mv images.pgm "$name.pgm"); }
for name in qemu native; do
    compiler=$target-gcc library=$build/lib run=("$qemu" -L "/usr/$target" -E LD_LIBRARY_PATH="$PWD/$build/lib")
    [[ $name == qemu ]] || compiler=cc library=build/lib run=(env LD_LIBRARY_PATH="$PWD/build/lib")
    "$compiler" -Isrc/lib docs/examples/generate.c -L"$library" -lfdsl -o "$folder/$name"
    draw "${run[@]}" "./$name"
done
cmp "$folder/qemu.pgm" "$folder/native.pgm"
echo "  ok      cross: compiles for $target, and libfdsl draws the same images under qemu"
