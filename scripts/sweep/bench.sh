#!/usr/bin/env bash
# Verifies and times every available variant of synth, load, train and infer at small sizes: about a minute on two cores.
# Prints one table for generating, two for loading, two for training and one for inference, and then a summary: the fastest
# variants, and whether to generate images or to read them. Appends rows to synth.csv, load.csv, train.csv and infer.csv in
# results/, and writes a description of the machine to results/env.json (env.csv without jansson). `make bench` calls this
# script.
#
#   scripts/sweep/bench.sh
#
# Environment: SIZES="224 512", the image sides; BATCH=16, the images per batch; SECONDS_PER_ROW, the longest measurement
# (default: 2, or 0.4 where GPU variants run).
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."

(($# == 0)) || { echo "bench.sh: unexpected argument '$1'; see --help" >&2 && exit 2; }

# Common image sizes, with a batch that a laptop generates in seconds. Formula and class keep their
# defaults: the paper's formula and its benchmark class (1000 vertices, 200 orbits).
sizes=${SIZES:-224 512}
batch=${BATCH:-16}
bench=./fdsl-bench

every() # variants, other options; hides messages about unavailable variants, which --list has shown
{
    echo
    $bench --variant "$1" --verify "${@:2}" 2> >(grep -v ': skipping ' >&2)
}

fastest() # workload, unit of the rate, column=value: prints the fastest variant among the new rows of the workload
{
    local file=results/$1.csv
    [[ -f $file ]] || return 0
    awk -v workload="$1" -v unit="$2" -v only="${3:-}" -v before="${rows_before[$1]}" '
        function split_row(line, fields,    count, quoted, part, parts, i) { # a quoted field may contain commas
            split("", fields)
            parts = split(line, part, ",")
            for (i = 1; i <= parts; i++) {
                if (quoted) fields[count] = fields[count] "," part[i]
                else fields[++count] = part[i]
                if (gsub(/"/, "\"", part[i]) % 2) quoted = !quoted
            }
        }
        NR == 1 { split_row($0, names); for (i in names) at[names[i]] = i; split(only, wanted, "="); next }
        NR > before {
            split_row($0, row)
            if (only != "" && row[at[wanted[1]]] != wanted[2]) next
            name = row[at["variant"]]
            rates[name, ++count[name]] = row[at["items_per_s"]] + 0
        }
        END {
            for (name in count) { # the median of its rows, for example of the epochs of a training run
                for (i = 2; i <= count[name]; i++)
                    for (j = i; j > 1 && rates[name, j] < rates[name, j - 1]; j--) {
                        swapped = rates[name, j]; rates[name, j] = rates[name, j - 1]; rates[name, j - 1] = swapped
                    }
                n = int((count[name] + 1) / 2)
                if (rates[name, n] > best) { best = rates[name, n]; variant = name }
            }
            if (best) printf "  %-6s %-17s %.0f %s\n", workload, variant, best, unit
        }' "$file"
}

mkdir -p results
declare -A rows_before
for workload in synth load train infer; do
    rows_before[$workload]=$(($(wc -l 2>/dev/null <"results/$workload.csv" || echo 0)))
done
machine=results/env.json
samples=results/.bench_samples
trap 'rm -rf "$samples"' EXIT
if ! $bench --env --format json >"$machine.tmp" 2>/dev/null; then # a build without jansson
    machine=results/env.csv
    $bench --env --format csv >"$machine.tmp"
fi
mv "$machine.tmp" "$machine"
list=$($bench --list --format csv)
echo 'Runs here:'
awk -F, '$4 == "yes" { if ($1 != last) printf "%s  %-8s", last == "" ? "" : "\n", last = $1; printf " %s", $2 }
    $4 == "no" { missing++ }
    END { printf "\n%d other variants do not; ./fdsl-bench --list says why\n", missing }' <<<"$list"
variants=$(awk -F, '$4 == "yes" { print $2 }' <<<"$list")
runs() { grep -qx "$1" <<<"$variants"; }

# Where GPU variants run, there are four times as many rows.
seconds=2 epochs=3 cnn=train-
if runs fused; then seconds=0.4 epochs=1 cnn='train-(cuda|tf32|bf16|amp|cudnn|graph)'; fi
limit=(--max-time "${SECONDS_PER_ROW:-$seconds}")
every all --batch "$batch" --res "${sizes// /,}" "${limit[@]}" --out results/synth.csv

# Reads the same samples (33 MB) as files and as shards, from the page cache.
rm -rf "$samples" && mkdir "$samples"
if runs files; then
    shape=(--samples 2000 --sample-shape '3,74,74' --dtype u8 --classes 0)
    $bench --prepare "$samples/files" --store files "${shape[@]}" >/dev/null
    $bench --prepare "$samples/shards" --store shards --shards 10 "${shape[@]}" >/dev/null
    for layout in files shards; do
        every all --workload load --data "$samples/$layout" "${limit[@]}" --out results/load.csv
    done
fi

# Three epochs over generated digits are enough for the curves in the figures. train-naive would take minutes with cnn,
# train-graph supports only cnn, and train-vit only transformers.
digits=(--lr 0.002 --train-size 3000 --test-size 1000 --epochs "$epochs")
every all --workload train --model lenet "${digits[@]}" --out results/train.csv
model=lenet
others=$(grep -E "^$cnn" <<<"$variants" | grep -vE -- '-(naive|vit)$' | paste -sd,) || true
if [[ $others ]]; then
    model=cnn
    every "$others" --model cnn "${digits[@]}" --verify-steps 1 --out results/train.csv
fi
# Inference needs a trained network. A small test set is enough to measure it.
$bench --workload train --variant auto --model "$model" --lr 0.002 --train-size 3000 --test-size 100 --epochs 2 \
    --checkpoint "$samples/network" >/dev/null
every all --workload infer --checkpoint "$samples/network" "${limit[@]}" --out results/infer.csv

echo
echo 'Fastest here:'
fastest synth "images/s of ${sizes##* } x ${sizes##* } pixels" "res=${sizes##* }"
fastest load 'samples/s from the page cache'
fastest train "samples/s with $model" "model=$model"
fastest infer "samples/s with $model"
# Generates images and reads them again, with a training step whose time fits the machine.
if [[ -d $samples/shards ]]; then
    step_ms=100
    ! runs fused || step_ms=5
    images=(--from synth --classes 10 --samples 1000 --res 224 --shards 4)
    $bench --prepare "$samples/atoms" "${images[@]}" >/dev/null
    echo
    echo "Generate or read? With 1000 PNG images of 224 x 224 and a training step of $step_ms ms per 64 images:"
    advice=(--compute "$step_ms" --batch 64)
    if answer=$($bench advise --data "$samples/atoms" "${advice[@]}" --time 12); then
        tail -n 1 <<<"$answer"
        echo "  (again, and for longer: $bench --prepare atoms ${images[*]} &&"
        echo "  $bench advise --data atoms ${advice[*]} --time 60)"
    fi
fi
echo
echo "Rows: results/{synth,load,train,infer}.csv; this machine: $machine"
echo 'Next: make report (figures of these rows), ./fdsl-bench advise --data FOLDER --compute MS (your images and your'
echo '      training step), ./fdsl-bench --list --verbose (every variant, and what it needs)'
