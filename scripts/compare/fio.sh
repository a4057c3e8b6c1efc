#!/usr/bin/env bash
# Compares cold reads of `fdsl-bench --variant shards-uring` with fio, the standard storage benchmark. Both read the
# same shards, each from its beginning to its end, with O_DIRECT, io_uring, registered buffers, and the same block
# size and I/O depth. Each round measures both programs, in alternating order. A measurement is four runs of a
# program. The first run does not count, because a hypervisor may cache the data and speed up the later runs. The
# result is the median of the other three. The page cache is empty at the start of each run. Each program measures its
# own bandwidth over the same bytes, including tar headers.
#
# Both use huge pages for buffers if available. For fio, this needs glibc 2.35 or newer, because GLIBC_TUNABLES enables
# them. With small pages, requests of 1 MiB are split before they reach the device, and fio is slower.
#
#   scripts/compare/fio.sh DIR [ROUNDS]     DIR: shards from --prepare; ROUNDS: default 5. Needs root.
#
# Environment (defaults in parentheses):
#   BLOCK (1024)    KiB per read
#   IODEPTH (32)    reads in flight
#   CPU (0)         the core for both programs
#   SHARE (0.90)    minimum of (bandwidth of fdsl-bench) / (bandwidth of fio)
#
# In every measurement, the counters of Linux must show that the bytes were read from the device. The counters are those of
# the process and, if the file system has its own block device, of that device.
#
# Exit status: 0 the median share reaches SHARE; 1 it does not, or bytes were not read from the device; 2 usage; 4 the
# user is not root, or fio is not installed.
set -euo pipefail

fail() { # status, message
    echo "compare/fio.sh: $2" >&2
    exit "$1"
}

[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
dir=${1:-}
rounds=${2:-5}
[[ $dir && $rounds =~ ^[1-9][0-9]*$ ]] || fail 2 'usage: scripts/compare/fio.sh DIR [ROUNDS]'
shopt -s nullglob inherit_errexit
shards=("$dir"/*.tar)
((${#shards[@]})) || fail 2 "$dir contains no shards; fdsl-bench --prepare $dir --store shards writes some"
[[ $dir != *:* ]] || fail 2 "$dir: fio splits names at colons; give a path without a colon"
command -v fio >/dev/null || fail 4 'fio is not installed (Debian: apt install fio)'
((EUID == 0)) || fail 4 'only root can drop the page cache; run this script as root'

bench=${FDSL_BENCH:-$(dirname "$0")/../../fdsl-bench}
block=${BLOCK:-1024} iodepth=${IODEPTH:-32} cpu=${CPU:-0} share=${SHARE:-0.90}
device=/sys/dev/block/$(stat -c %d "$dir" | awk '{ printf "%d:%d", int($1 / 256) % 4096, $1 % 256 + int($1 / 1048576) * 256 }')/stat
bytes=$(stat -c %s "${shards[@]}" | awk '{ sum += $1 } END { printf "%.0f", sum }')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

drop() {
    sync
    echo 3 >/proc/sys/vm/drop_caches
}
device_bytes() { # prints the number of bytes read from the device so far; nothing if unknown
    [[ ! -r $device ]] || awk '{ printf "%.0f", 512 * $3 }' "$device"
}

# run_fio and run_ours print "bytes per second, bytes read by the process in a run, bytes read from the device in a run".
fio_once() {
    local before files
    files=$(IFS=: && echo "${shards[*]}")
    drop
    before=$(device_bytes)
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 taskset -c "$cpu" python3 - "$work/fio.json" fio --name=cold --filename="$files" --file_service_type=sequential \
        --rw=read --bs="${block}k" --iodepth="$iodepth" --ioengine=io_uring --fixedbufs=1 --direct=1 --output-format=json \
        >"$work/fio.io" <<'END'
import resource, subprocess, sys
with open(sys.argv[1], "w") as out:
    subprocess.run(sys.argv[2:], stdout=out, check=True)
print(512 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock)
END
    python3 -c 'import json, sys
read = json.load(open(sys.argv[1]))["jobs"][0]["read"]
if not int(sys.argv[2]) <= read["io_bytes"] <= int(sys.argv[3]): # fio skips a partial last block of each shard
    sys.exit("compare/fio.sh: fio read %d of %s bytes" % (read["io_bytes"], sys.argv[3]))
print(read["bw_bytes"], end=" ")' "$work/fio.json" $((bytes - ${#shards[@]} * 1024 * block)) "$bytes"
    echo "$(<"$work/fio.io") $(($(device_bytes) - ${before:-0}))"
}
run_fio() {
    fio_once >/dev/null
    for _ in 1 2 3; do fio_once; done | sort -n | sed -n 2p
}
run_ours() {
    local before
    drop
    before=$(device_bytes)
    taskset -c "$cpu" "$bench" --variant shards-uring --data "$dir" --cache cold --shuffle 0 --block "$block" \
        --iodepth "$iodepth" --loops 3 --warmups 0 --warmup-time 0 --format csv >"$work/ours.csv" 2>"$work/ours.err" ||
        fail 1 "$(tail -n 1 "$work/ours.err")"
    python3 -c 'import csv, sys
row = next(csv.DictReader(open(sys.argv[1])))
read = int(row["storage_read_bytes"])
print("%.0f %d" % (read / float(row["time_median_s"]), read), end=" ")' "$work/ours.csv"
    echo "$((($(device_bytes) - ${before:-0}) / 4))" # mean of its four runs
}

for ((round = 0; round < rounds; round++)); do
    first=fio second=ours
    ((round % 2 == 0)) || first=ours second=fio
    for who in $first $second; do
        turn=$("run_$who")
        echo "$round $who $turn" >>"$work/turns"
    done
done

[[ -r $device ]] && known=1 || known=0
python3 - "$work/turns" "$bytes" "$known" "$share" <<END
import collections, statistics, sys
turns, total, known, least = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
blocks = ${#shards[@]} * 1024 * $block  # fio skips a partial last block of each shard
rounds, missing = collections.defaultdict(dict), []
for line in open(turns):
    number, who, rate, process, device = line.split()
    rounds[int(number)][who] = float(rate)
    # fdsl-bench reads slightly less than all bytes, because the zero blocks at the end of a shard belong to no sample.
    if min([int(process)] + [int(device)] * known) < total - blocks:
        missing.append("round %s: %s read %s bytes from devices, this device delivered %s, and the shards contain %d"
                       % (number, who, process, device, total))
print("%d bytes in ${#shards[@]} shards of $dir, blocks of $block KiB, iodepth $iodepth, one core\n" % total)
print("%-8s %12s %20s %8s" % ("round", "fio GB/s", "shards-uring GB/s", "share"))
def show(name, fio, ours, share):
    print("%-8s %12.3f %20.3f %8.3f" % (name, 1e-9 * fio, 1e-9 * ours, share))
for number, rates in sorted(rounds.items()):
    show(number + 1, rates["fio"], rates["ours"], rates["ours"] / rates["fio"])
share = statistics.median(rates["ours"] / rates["fio"] for rates in rounds.values())
show("median", *(statistics.median(rates[who] for rates in rounds.values()) for who in ("fio", "ours")), share)
for line in missing:
    print("not from the device: " + line)
sys.exit(bool(missing) or share < least)
END
