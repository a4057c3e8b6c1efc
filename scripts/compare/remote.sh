#!/usr/bin/env bash
# Compares reading shards over HTTP with curl, on the loopback interface. nginx serves the shards. Each round measures
#
#   curl     curl --parallel, which discards what it reads
#   http     fdsl-bench --variant shards: reads, parses and copies samples, and computes a checksum
#   s3       the same program through S3's interface: signed requests, whose signatures nginx ignores
#
# and the script prints the median bandwidths, and their ratios to those of curl and of http. curl, nginx and the program
# share the cores of this machine.
#
#   scripts/compare/remote.sh DIR [ROUNDS]     DIR: shards from --prepare; ROUNDS: default 5
#
# Environment: CONNECTIONS (16) connections; BENCH (./fdsl-bench) the program.
#
# Exit status: 0 done; 1 a measurement failed; 2 usage; 4 no nginx or no curl.
set -euo pipefail

fail() { # status, message
    echo "compare/remote.sh: $2" >&2
    exit "$1"
}

[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
dir=${1:-}
rounds=${2:-5}
connections=${CONNECTIONS:-16}
bench=$(realpath "${BENCH:-./fdsl-bench}")
[[ $dir && $rounds =~ ^[1-9][0-9]*$ ]] || fail 2 'usage: scripts/compare/remote.sh DIR [ROUNDS]'
dir=$(realpath "$dir")
shopt -s nullglob inherit_errexit
shards=("$dir"/*.tar)
((${#shards[@]})) || fail 2 "$dir contains no shards; fdsl-bench --prepare $dir --store shards writes some"
for tool in nginx curl; do command -v $tool >/dev/null || fail 4 "$tool is not installed (Debian: apt install $tool)"; done
bytes=$(cat "${shards[@]}" | wc -c) # also reads them into the page cache

work=$(mktemp -d)
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
cat >"$work/nginx.conf" <<CONF
daemon off; pid $work/pid; error_log $work/error.log; worker_processes auto; $([[ $EUID -ne 0 ]] || echo 'user root;')
events { worker_connections 1024; }
http { access_log off; sendfile on; keepalive_requests 1000000;
  client_body_temp_path $work; proxy_temp_path $work; fastcgi_temp_path $work; uwsgi_temp_path $work; scgi_temp_path $work;
  server { listen 127.0.0.1:$port; root $(dirname "$dir"); } }
CONF
nginx -c "$work/nginx.conf" &
server=$!
trap 'kill $server 2>/dev/null; wait; rm -rf "$work"' EXIT
for _ in {1..50}; do ! curl -s -o /dev/null "http://127.0.0.1:$port/" || break; sleep 0.1; done

names=$(printf '%s,' "${shards[@]##*/}")
url=http://127.0.0.1:$port/${dir##*/}
export AWS_ENDPOINT_URL=http://127.0.0.1:$port AWS_ACCESS_KEY_ID=unused AWS_SECRET_ACCESS_KEY=unused

by_curl() { # prints MB per second
    local arguments=() shard begin end
    for shard in "${shards[@]##*/}"; do arguments+=(-o /dev/null "$url/$shard"); done
    begin=$(date +%s%N)
    curl -s -f --parallel --parallel-max "$connections" "${arguments[@]}" 2>/dev/null || fail 1 'curl failed'
    end=$(date +%s%N)
    awk "BEGIN { print $bytes * 1e3 / ($end - $begin) }"
}

by_bench() { # URL; prints MB per second, of samples
    "$bench" --variant shards --data "$1/{${names%,}}" --iodepth "$connections" --loops 5 --format csv 2>/dev/null |
        python3 -c 'import csv, sys; print(float(next(csv.DictReader(sys.stdin))["bytes_per_s"]) / 1e6)' ||
        fail 1 "fdsl-bench failed: $bench --variant shards --data '$1/{${names%,}}'"
}

for ((round = 0; round < rounds; round++)); do
    echo "curl $(by_curl)"
    echo "http $(by_bench "$url")"
    echo "s3 $(by_bench "s3://${dir##*/}")"
done | sort -k1,1 -k2,2g | awk '
    { values[$1, ++count[$1]] = $2 }
    function median(name) { return (values[name, int((count[name] + 1) / 2)] + values[name, int((count[name] + 2) / 2)]) / 2 }
    END {
        printf "%-6s %10s %10s %10s\n", "", "MB/s", "of curl", "of http"
        printf "%-6s %10.0f %10s %10s\n", "curl", median("curl"), "", ""
        printf "%-6s %10.0f %10.2f %10s\n", "http", median("http"), median("http") / median("curl"), ""
        printf "%-6s %10.0f %10.2f %10.2f\n", "s3", median("s3"), median("s3") / median("curl"), median("s3") / median("http")
    }'
