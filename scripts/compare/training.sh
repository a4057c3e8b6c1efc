#!/usr/bin/env bash
# Measures how fast a transformer trains on images from each source: one constant batch, images generated during training, and
# images that --feed load reads: JPEG and raw shards in memory, JPEG shards on a disk, and JPEG shards over HTTP from a
# server on this machine. `make plots` draws the rows as the figure `training`.
#
#   scripts/compare/training.sh DIR FILE.csv     DIR: a folder on the disk to measure, for about 4 GB
#
# Environment (defaults in parentheses):
#   MODELS (vit-tiny vit-base)  networks; `none`: only prepare the sets
#   GPUS (1)                    numbers of GPUs, for example "1 2"; more than one need mpirun
#   SAMPLES (16384)             training images per epoch and GPU, the same from every source; several numbers, such as
#                               "16384 4096": one per network
#   EPOCHS (8)                  epochs of each run, or one number per network; the figure shows the median of the second half
#   IMAGES                      images of the sets (default: the largest of SAMPLES x the largest of GPUS)
#   MEMORY (/dev/shm/training)  folder in memory, for as many bytes as DIR
#   SOURCES (all)               some of: constant live raw jpeg disk http; and mixed, which is not one of all: generated images
#                               and jpeg, with the share of --mix synth:auto,load that the first run chooses
#   ROUNDS (1)                  times that all sources are measured, in turn
#   MPIRUN (mpirun --bind-to none -n)  launcher of the ranks
#   FDSL_BENCH (./fdsl-bench)   the program
#
# JPEG images are cut out anew in each epoch (--fit random-resized-crop), and decoded by the GPU's engines and by CPU
# threads (--decoder auto). While shards are read from the disk, their pages are dropped from the page cache every 50 ms,
# as if the set were larger than the memory. Images stay in DIR and MEMORY, and are used again: remove them for more IMAGES.
#
# Exit status: 0 done, 1 something failed, 2 usage, 4 no GPU or no nginx.
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bench=${FDSL_BENCH:-$root/fdsl-bench}
(($# == 2)) || { echo 'usage: scripts/compare/training.sh DIR FILE.csv' >&2 && exit 2; }
dir=$1 out=$2 memory=${MEMORY:-/dev/shm/training}
read -ra models <<<"${MODELS:-vit-tiny vit-base}"
read -ra gpus <<<"${GPUS:-1}"
read -ra samples <<<"${SAMPLES:-16384}"
read -ra epochs <<<"${EPOCHS:-8}"
rounds=${ROUNDS:-1}
read -ra launcher <<<"${MPIRUN:-mpirun --bind-to none -n}"
sources=${SOURCES:-constant live raw jpeg disk http}
[[ $sources != all ]] || sources='constant live raw jpeg disk http'
for list in gpus samples epochs rounds; do
    declare -n numbers=$list
    for number in "${numbers[@]}"; do
        [[ $number =~ ^[1-9][0-9]*$ ]] || { echo "compare/training.sh: ${list^^}: '$number' is not a whole number from 1" >&2 && exit 2; }
    done
    [[ $list == gpus || $list == rounds ]] || ((${#numbers[@]} == 1 || ${#numbers[@]} == ${#models[@]})) ||
        { echo "compare/training.sh: ${list^^}: give one number, or one per network of MODELS" >&2 && exit 2; }
done
most() { printf '%s\n' "$@" | sort -n | tail -1; } # numbers
images=${IMAGES:-$(($(most "${samples[@]}") * $(most "${gpus[@]}")))}

if [[ ${models[0]} != none ]]; then
    "$bench" --variant train-vit --model "${models[0]}" --data synth --dry-run >/dev/null || exit
fi
if [[ $sources == *http* ]] && ! command -v nginx >/dev/null; then
    echo 'compare/training.sh: nginx is not installed (Debian: apt install nginx-light); or leave http out of SOURCES' >&2
    exit 4
fi

# Photographs would be better, but these images are available everywhere. Quality 55 gives files of 39 KB at 431 pixels.
# The index of a set is written last.
prepare() { # raw or jpeg
    local part count form=(--encode jpeg --quality 55 --out-res 431)
    [[ $1 == jpeg ]] || form=(--encode npy --channels 3 --out-res 224)
    [[ ! -e $memory/$1/test/dataset.index ]] || return 0
    for part in train test; do
        count=512 && [[ $part == test ]] || count=$images
        "$bench" --prepare "$memory/source/$part" --store shards --shards $(((count + 511) / 512)) --from synth --classes 16 \
            --res 432 --samples "$count" --encode jpeg >&2
        "$bench" --prepare "$memory/$1/$part" --store shards --shards $(((count + 511) / 512)) --from dataset \
            --source "$memory/source/$part" "${form[@]}" >&2
    done
}

train() { # options ...: one run on $n GPUs
    local run=() size=$((samples[at] * n))
    ((n == 1)) || run=("${launcher[@]}" "$n")
    [[ " $* " == *' synth '* ]] && set -- "$@" --res 224 --classes 16 --test-size 512
    "${run[@]}" "$bench" --variant train-vit --model "${models[at]}" --batch 256 --epochs "${epochs[at]}" \
        --train-size "$size" --out "$out" "$@" >/dev/null
}

load() { # folder, options ...
    train --feed load --data "$1/train" --test-data "$1/test" "${@:2}"
}

crop=(--out-res 224 --fit random-resized-crop)

report() { # share MODEL RANKS: prints the --mix that a run has chosen; rates: prints the rates of all runs of this start
    python3 - "$out" "$rows_before" "$@" <<'END'
import csv, os, statistics, sys
path, before, what, *key = sys.argv[1:]
runs, shares = {}, {}
with open(path if os.path.exists(path) else os.devnull, encoding="utf-8") as file:
    for row in list(csv.DictReader(file))[int(before):]:
        if row["rank"] != ("all" if int(row["ranks"]) > 1 else "0"):
            continue
        place = "http" if "://" in row["data"] else os.path.basename(os.path.dirname(row["data"]))
        source, network = row["feed"] if row["feed"] != "load" else place, (row["model"], row["ranks"])
        of_source = runs.setdefault(network, {}).setdefault(source, [])
        if row["epoch"] == "1":
            of_source.append([])
        of_source[-1].append(float(row["items_per_s"]))
        shares[network] = row["mix_shares"] or shares.get(network, "")
if what == "share":
    print(shares.get(tuple(key), "").replace("=", ":").replace(" ", ","))
    sys.exit()
for (model, ranks), sources in runs.items():
    print(f"{model}, {ranks} GPU; shares of mixed: {shares[model, ranks] or '-'}")
    rates = {source: [statistics.median(rates[len(rates) // 2:]) for rates in of_source] for source, of_source in sources.items()}
    best = statistics.median(rates["constant"]) if "constant" in rates else None
    for source, of_runs in rates.items():
        rate = statistics.median(of_runs)
        share = f", {rate / best:.3f} of constant" if best else ""
        print(f"  {source:10}{rate:10.0f} images/s, {min(of_runs):.0f} to {max(of_runs):.0f} in {len(of_runs)} runs{share}")
END
}

mix() { # the first run chooses the share, the others keep it
    local chosen
    chosen=$(report share "${models[at]}" "$n")
    train --feed mixed --mix "${chosen:-synth:auto,load}" --data "$memory/jpeg/train" --test-data "$memory/jpeg/test" \
        --classes 16 "${crop[@]}"
}

serve() { # starts nginx on a free port, and sets `url`
    local port
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    cat >"$work/nginx.conf" <<CONF
daemon off; pid $work/pid; error_log $work/error.log; worker_processes 4; $([[ $EUID -ne 0 ]] || echo 'user root;')
events { worker_connections 1024; }
http { access_log off; sendfile on; keepalive_requests 1000000;
  client_body_temp_path $work; proxy_temp_path $work; fastcgi_temp_path $work; uwsgi_temp_path $work; scgi_temp_path $work;
  server { listen 127.0.0.1:$port; root $memory; autoindex on; } }
CONF
    nginx -c "$work/nginx.conf" 2>/dev/null &
    url=http://127.0.0.1:$port
    for _ in {1..50}; do ! (: >"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break; sleep 0.1; done
}

forget() { # folder: drops the pages of its shards from the page cache, again and again
    exec python3 - "$1" <<'END'
import os, pathlib, sys, time
files = [os.open(path, os.O_RDONLY) for path in pathlib.Path(sys.argv[1]).glob("*.tar")]
while True:
    for file in files:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(0.05)
END
}

from_disk() {
    local forgets
    sync
    forget "$dir/jpeg/train" &
    forgets=$!
    load "$dir/jpeg" "${crop[@]}" && kill $forgets
}

work=$(mktemp -d)
stop_all() { # ends nginx and the process that drops pages
    local jobs_left
    read -ra jobs_left <<<"$(jobs -p | tr "\n" " ")"
    ((${#jobs_left[@]} == 0)) || kill "${jobs_left[@]}" 2>/dev/null || true
    wait
    rm -rf "$work"
}
trap stop_all EXIT
[[ $sources != *raw* ]] || prepare raw
[[ ! $sources =~ jpeg|disk|http|mixed ]] || prepare jpeg
rm -rf "$memory/source"
[[ $sources != *disk* || -e $dir/jpeg/test ]] || { mkdir -p "$dir" && cp -r "$memory/jpeg" "$dir/"; }
[[ ${models[0]} != none ]] || exit 0
[[ $sources != *http* ]] || serve
read -ra samples <<<"$(printf "${samples[*]} %.0s" "${!models[@]}")" # a single number is repeated for each network
read -ra epochs <<<"$(printf "${epochs[*]} %.0s" "${!models[@]}")"
rows_before=0
[[ ! -e $out ]] || rows_before=$(($(wc -l <"$out") - 1))
measure() { # source
    case $1 in
    constant | live) train --data synth --feed "$1" ;;
    raw) load "$memory/raw" ;;
    jpeg) load "$memory/jpeg" "${crop[@]}" ;;
    disk) from_disk ;;
    http) # a web server has no list of files, so the indexes name the shards
        train --feed load --data "$url/jpeg/train/dataset.index" --test-data "$url/jpeg/test/dataset.index" "${crop[@]}"
        ;;
    mixed) mix ;;
    *) echo "compare/training.sh: SOURCES: unknown source '$1'" >&2 && exit 2 ;;
    esac
}
for at in "${!models[@]}"; do
    for n in "${gpus[@]}"; do
        for ((round = 0; round < rounds; round++)); do
            for source in $sources; do
                measure "$source"
            done
        done
    done
done
report rates
