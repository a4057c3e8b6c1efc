#!/usr/bin/env bash
# Runs the threads of streams under ThreadSanitizer: training with --feed load from class folders, shards and a server, and
# the seeds of the fuzz target "stream".
#
#   scripts/check/threads.sh
#
# Criterion does not run under ThreadSanitizer, so the script runs the program and a program of the fuzz target. It builds
# both in build/tsan/, without OpenMP and MPI, which are not instrumented: the first time, this takes some minutes. CI does
# not call it. Exit status 1 if there is a data race, or if a run fails.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."

build=build/tsan
make CUDA=0 OMP=0 MPI=0 BUILD=$build PROGRAM=$build/fdsl-bench CFLAGS='-O1 -g -fsanitize=thread' \
    $build/fdsl-bench $build/fuzz-files >$build.log 2>&1 || { tail -n 20 $build.log && exit 1; }
root=$PWD program=$PWD/$build/fdsl-bench
export TSAN_OPTIONS=exitcode=66:halt_on_error=1
folder=$(mktemp -d)
server=''
trap '[[ ! $server ]] || kill "$server"; rm -rf "$folder"' EXIT

check() { # what, command ...: runs a command, and shows its output if it fails
    local what=$1
    shift
    # Without randomised addresses, the sanitizer finds its memory on all kernels.
    if setarch -R "$@" >"$folder/log" 2>&1; then
        printf '  ok      %s\n' "$what"
    else
        printf '  FAILED  %s\n' "$what"
        tail -n 60 "$folder/log"
        exit 1
    fi
}

check 'requests and calls' env FUZZ_TARGET=stream "$build/fuzz-files" tests/fuzz/stream/*
cd "$folder"
"$program" --prepare all --from digits --samples 120 --store imagefolder >/dev/null
mkdir set && cp -r all/*/ set && cp -r set intact
"$program" --prepare shards --from dataset --source set --shards 3 --name s >/dev/null
train=("$program" --variant train-naive --model logreg --feed load --batch 16 --lanes 4 --shuffle 40 --threads 3
    --test-data intact --epochs 2 --ema 0.9)
check 'class folders' "${train[@]}" --data set --out-res 20 --channels 3 --fit random-resized-crop --mixup 0.5
check 'shards' "${train[@]}" --data shards --checkpoint k --checkpoint-steps 3 --keep 9
rm k/epoch-00000[12].ckpt
check 'shards, resumed' "${train[@]}" --data shards --checkpoint k --checkpoint-steps 3 --keep 9 --resume
if command -v python3 >/dev/null; then
    python3 "$root/tests/remote_server.py" . < <(exec sleep 300) >port 2>/dev/null &
    server=$!
    until [[ -s port ]]; do sleep 0.05; done
    export no_proxy=127.0.0.1
    check 'a server that fails' "${train[@]}" --data "http://127.0.0.1:$(cut -d' ' -f1 port)/faulty/shards/s.index"
fi
cd set
for file in */*0.png; do head -c 90 "$file" >../cut && cp ../cut "$file"; done
cd ..
check 'broken samples' "${train[@]}" --data set --on-error mask
