#!/usr/bin/env bash
# Checks that an export of VisualAtom images is bit-identical on 1 and on 4 ranks, and after repeated kills
# and restarts.
#
#   scripts/check/prepare.sh DIR        DIR: a new or empty folder with 1 GB of space; it is empty again at the end
#
# Exports 10,000 images of 224 x 224 as PNG in 25 shards. Sends SIGKILL to all ranks at ten random times between the
# first finished shard and the end, and restarts the same command each time. Prints a table. Exit status 1 if a
# byte differs or a kill came too late, 4 without mpirun. Takes a few minutes. Environment: SAMPLES, SHARDS, RES,
# KILLS and RANKS replace these numbers. SEED is the seed of the kill times; the output names it.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."

bench=$(realpath "${FDSL_BENCH:-./fdsl-bench}")
dir=${1:?name a folder for the images}
samples=${SAMPLES:-10000} shards=${SHARDS:-25} res=${RES:-224} kills=${KILLS:-10} several=${RANKS:-4}
SEED=${SEED:-$RANDOM}
RANDOM=$SEED
options=(--from synth --classes 100 --samples "$samples" --shards "$shards" --res "$res")
# Allows root, and more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
command -v mpirun >/dev/null || { echo "check/prepare.sh: mpirun is not installed (Debian: openmpi-bin)" >&2 && exit 4; }
((shards > 2 * several + 1)) || { echo "check/prepare.sh: SHARDS=$shards: give at least $((2 * several + 2)), which is 2 x RANKS + 2" >&2 && exit 2; }
mkdir -p "$dir"
[[ -z $(ls -A "$dir") ]] || { echo "check/prepare.sh: $dir is not empty" >&2 && exit 2; }
failed=0

start() { # ranks, name: starts an export; sets $pid
    local launcher=()
    (($1 == 1)) || launcher=(mpirun --bind-to none -n "$1")
    "${launcher[@]}" "$bench" --prepare "$dir/$2" "${options[@]}" >"$dir/$2.log" 2>&1 &
    pid=$!
}
finished() { # name: prints the number of finished shards
    find "$dir/$1/.prepare" -name '*.part' 2>/dev/null | wc -l
}
run_to_end() { # ranks, name
    start "$@"
    wait "$pid" || { cat "$dir/$2.log" >&2 && exit 1; }
}
row() { # ranks, killed at, kept, bytes
    printf '%5s  %-44s %-6s %s\n' "$@"
}
compare() { # name: sets $verdict
    verdict=identical
    diff -r "$dir/whole" "$dir/$1" >&2 || { verdict=DIFFERENT && failed=1; }
    rm -r "${dir:?}/$1"
}

echo "$samples images of $res x $res in $shards shards, SEED=$SEED"
row ranks "finished shards at each kill" kept bytes
begin=$EPOCHREALTIME
run_to_end 1 whole
shard_us=$(((${EPOCHREALTIME/./} - ${begin/./}) / shards))
row 1 never - "$(du -sb "$dir/whole" | cut -f 1)"
run_to_end "$several" ranks
compare ranks
row "$several" never - "$verdict"

for ranks in 1 "$several"; do
    moments='' kept=0
    # Each kill waits for a number of finished shards, then for a random part of the time per shard. No kill
    # waits for the last shards, because the export could end before the kill.
    goals=$(for ((i = 0; i < kills; i++)); do echo $((1 + RANDOM % (shards - 2 * ranks))); done | sort -n)
    for goal in $goals; do
        start "$ranks" killed
        while (($(finished killed) < goal)) && kill -0 "$pid" 2>/dev/null; do sleep 0.01; done
        delay_us=$((RANDOM * shard_us / 32768))
        sleep "$((delay_us / 1000000)).$(printf %06d $((delay_us % 1000000)))"
        read -r -a children <"/proc/$pid/task/$pid/children" || true
        kill -9 "$pid" "${children[@]}" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
        flock -w 60 "$dir/killed" true # wait until all ranks have exited
        kept=$(finished killed)
        moments+="$kept "
        ((kept > 0 && kept < shards)) || { echo "check/prepare.sh: a kill came too late; try another SEED" >&2 && failed=1; }
    done
    run_to_end "$ranks" killed
    grep -q "($kept of them w" "$dir/killed.log" || { cat "$dir/killed.log" >&2 && failed=1; }
    compare killed
    row "$ranks" "$moments" "$kept" "$verdict"
done
rm -r "${dir:?}/whole" "$dir"/*.log
exit $failed
