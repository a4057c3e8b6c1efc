#!/usr/bin/env bash
# Verifies the GPU variants of load for odd sizes, on a machine with a GPU. Checks every byte on the device, every
# tensor value and every label, and that each sample is delivered once. Repeats these checks while a training
# step consumes the batches. With --sanitize, runs the program under compute-sanitizer; this needs
# build/tests/gpu_product from `make tests`.
#
#   scripts/check/load_gpu.sh [--sanitize] [--variant NAMES] [DIR]
#
# DIR: folder for small data sets, about 300 MB (default: a temporary folder). Prints one line per check, then "N
# passed, N failed". Exit status 1 if a check failed, 4 if no GPU variant is available. ONLY=REGEX: run only the
# checks whose names match. JOBS=N: parallel checks (default: half of the processors, at most 8). LIMIT=N: time limit
# per check in seconds (default 600).
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/check/parallel.sh
source scripts/check/parallel.sh # checks run in parallel, because CUDA initialisation dominates each check

bench=${FDSL_BENCH:-./fdsl-bench}
product=${FDSL_GPU_PRODUCT:-build/tests/gpu_product}
list=$("$bench" --list --format csv) # workload, variant, platform ("" if it is not built), available, ...
variants=$(awk -F, '$1 == "load" && $2 ~ /^(shards-gpu|gds|gpu-resident|files-gpu)$/ && $4 == "yes" { print $2 }' <<<"$list")
read_options 1 "$@"
variants=$(tr , '\n' <<<"$variants")
[[ -n $variants ]] || { echo 'check/load_gpu.sh: no GPU variant of load runs here; see fdsl-bench --list' >&2 && exit 4; }
if [[ -z $dir ]]; then
    dir=$(mktemp -d)
    trap 'rm -rf "$dir"' EXIT
fi

if grep -q '^load,gds,[^,]' <<<"$list" && python3 -c 'import ctypes; ctypes.CDLL("libcufile.so.0")' 2>/dev/null; then
    check 'gds is available where cuFile is' test "${variants/gds/}" != "$variants"
fi
breaks() { # variant, state of the page cache, command that breaks a shard, options ...
    local set shard
    set=$(mktemp -d "$dir/gone-XXXXXX") && cp "$dir/${broken:-odd}"-shards/* "$set"
    shard=$(find "$set" -name '*.tar' | sort | sed -n 2p)
    (sleep "${delay_s:-3}" && $3 "$shard") &
    fails_with 1 "$set/" "${runner[@]}" "$bench" --variant "$1" --data "$set" --cache "$2" --threads 4 --epochs 100 \
        --min-time 60 --max-time 90 "${@:4}"
}
# Most bytes of the shards must be copied to the GPU from the page cache, or none.
pins() { # yes or no, options ...
    local rows
    rows=$(mktemp -d "$dir/pins-XXXXXX")/rows.csv
    "$bench" --variant shards-gpu --data "$dir/middle-shards" --out "$rows" "${@:2}" &&
        columns "$rows" pinned_share | awk -v wanted="$1" '{ if ((wanted == "yes") != ($1 > 0.5)) wrong = 1 } END { exit wrong || NR == 0 }'
}
make_set() { # layout, name, shards, options of --prepare ...
    local shards=(--shards "$3")
    [[ $1 == shards ]] || shards=()
    [[ -e $dir/$2-$1 ]] || "$bench" --prepare "$dir/$2-$1" --store "$1" "${shards[@]}" "${@:4}" >/dev/null
}
layouts_of() { # variant
    case $1 in files-gpu) echo files ;; gpu-resident) echo files shards ;; *) echo shards ;; esac
}
quick=(--loops 2 --warmups 0 --warmup-time 0 --cache any --verify)
runner=()

verify() { # variant, set, options ...
    local layout
    for layout in $(layouts_of "$1"); do
        check "${tool:+$tool: }$1 $2-$layout ${*:3}" "${runner[@]}" "$bench" --variant "$1" --data "$dir/$2-$layout" \
            "${quick[@]}" "${@:3}"
    done
}

make_sets() {
    local layout
    for layout in files shards; do
        make_set $layout one 1 --samples 1 --sample-shape 7 --dtype u8 --classes 0
        make_set $layout three 2 --samples 3 --sample-shape 3,5,7 --dtype f16 --classes 0
        make_set $layout odd 5 --samples 257 --sample-shape 3,31,33 --dtype u8 --classes 0
        make_set $layout half 1 --samples 101 --sample-shape 1,1001 --dtype f16 --classes 0
        make_set $layout float 7 --samples 97 --sample-shape 129 --dtype f32 --classes 0
        # Samples of 64 KiB: a copy of this size from pageable memory may return before the data has arrived.
        make_set $layout middle 3 --samples 500 --sample-shape 65408 --dtype u8 --classes 0
        make_set $layout large 2 --samples 5 --sample-shape 3,1024,1025 --dtype u8 --classes 0
        make_set $layout several 200 --samples 200 --sample-shape 40 --dtype u8 --classes 0
    done
    # Each of 5 threads has more shards than a chunk can have.
    make_set shards many 2000 --samples 2000 --sample-shape 40 --dtype u8 --classes 0
    # With --dtype f32, gpu-resident needs more than two launches for this set, and therefore reuses slots.
    [[ $variants != *gpu-resident* ]] || make_set shards wide 3 --samples 2200 --sample-shape 65408 --dtype u8 --classes 0
    make_set shards photos 8 --from synth --classes 4 --res 64 --samples 2048 --encode jpeg
    make_pictures mixed
    make_pictures torn broken
}
# Two shards of images of different sizes. The GPU decodes some of the JPEG files; a thread decodes the PNG files, and the JPEG
# files of at most 7 x 7 pixels. With `broken`, the JPEG files with numbers divisible by 5 lack their last 100 bytes.
make_pictures() { # name, broken?
    local set=$dir/$1-shards from=$dir/$1-files res encode file
    [[ ! -e $set ]] || return 0
    mkdir -p "$set" "$from"
    for encode in jpeg png; do
        for res in 1 3 7 8 17 33 64 65 200 401; do
            "$bench" --prepare "$from/$encode-$res" --store files --from synth --classes 5 --res $res --samples 11 \
                --encode $encode >/dev/null
            for file in "$from/$encode-$res"/not-imagefolder/000/*; do
                mv "$file" "$from/$encode-$res-${file##*/}"
            done
            rm -r "$from/$encode-$res"
        done
    done
    [[ -z ${2:-} ]] || for file in "$from"/jpeg-*[05].jpg; do truncate -s -100 "$file"; done
    (cd "$from" && tar --format=ustar -cf "$set/a.tar" jpeg-1* jpeg-2* png-[36]* &&
        tar --format=ustar -cf "$set/b.tar" jpeg-[34678]* png-[12478]*)
    rm -r "$from"
}
check_decoding() { # decoder: compares every pixel with a decoding on the CPU
    local options=(--variant shards-gpu --decode --decoder "$1" "${quick[@]}") fit res dtype turn=()
    # Several processes that use the JPEG engines at the same time block each other for seconds or for ever.
    [[ $1 != hardware ]] || turn=(alone)
    for fit in resize random-resized-crop; do
        for res in 1 7 33 224; do
            "${turn[@]}" check "$1: $fit to $res" "$bench" "${options[@]}" --data "$dir/mixed-shards" --fit $fit --out-res $res --threads 3
        done
    done
    "${turn[@]}" check "$1: crop" "$bench" "${options[@]}" --data "$dir/mixed-shards" --fit crop --out-res 17 --on-error skip
    for dtype in raw f32 f16 bf16; do
        "${turn[@]}" check "$1: $dtype, nhwc" "$bench" "${options[@]}" --data "$dir/mixed-shards" --out-res 65 --dtype $dtype --layout nhwc
    done
    "${turn[@]}" check "$1: one value per channel" "$bench" "${options[@]}" --data "$dir/mixed-shards" --out-res 65 \
        --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225
    "${turn[@]}" check "$1: gray, flipped, 16 threads" "$bench" "${options[@]}" --data "$dir/mixed-shards" --out-res 65 --channels 1 --augment \
        --epochs 3 --threads 16
    # Small chunks: the pixels of a chunk soon overwrite those of an earlier chunk.
    "${turn[@]}" check "$1: small chunks" "$bench" "${options[@]}" --data "$dir/mixed-shards" --out-res 65 --augment --epochs 3 --chunk 16 \
        --ring 2 --batch 7 --shuffle 5 --threads 5
    # Chunks as large as they get
    "${turn[@]}" check "$1: large chunks, 1 thread" "$bench" "${options[@]}" --data "$dir/photos-shards" --out-res 33 --threads 1 --epochs 2
    "${turn[@]}" check "$1: large chunks, 3 threads" "$bench" "${options[@]}" --data "$dir/photos-shards" --out-res 33 --threads 3 --shuffle 1000
    alone check "$1: while a training step runs" "$bench" "${options[@]}" --data "$dir/mixed-shards" --out-res 65 --epochs 2 --batch 31 \
        --compute 1 --threads 3
    "${turn[@]}" check "$1: broken images are skipped" "$bench" "${options[@]}" --data "$dir/torn-shards" --out-res 33 --on-error skip
    "${turn[@]}" check "$1: a broken image ends the run" fails_with 1 'torn-shards/.*sample .*libjpeg: ' "$bench" "${options[@]}" \
        --data "$dir/torn-shards" --out-res 33
}
check_streams() { # the variant stream-gpu: compares every value with a decoding on the CPU
    local options=(--variant stream-gpu "${quick[@]}") set layout threads batch prefetch decoder fit res turn
    for layout in files shards; do
        for set in three odd large; do
            for batch in 1 31 1000; do
                check "stream-gpu: $set-$layout, batch $batch" "$bench" "${options[@]}" --data "$dir/$set-$layout" --batch $batch \
                    --epochs 3 --threads 2
            done
        done
    done
    for threads in 1 3 16; do
        for prefetch in 1 2 9; do
            check "stream-gpu: $threads threads, $prefetch batches ahead" "$bench" "${options[@]}" --data "$dir/odd-shards" \
                --threads $threads --prefetch $prefetch --lanes 4 --shuffle 40 --batch 31 --epochs 3
        done
        check "stream-gpu: $threads threads, files in memory" "$bench" "${options[@]}" --data "$dir/mixed-shards" --out-res 33 \
            --threads $threads --resident-bytes all --batch 31 --epochs 3
        for bytes in 1 4K 60K 1G; do
            check "stream-gpu: $threads threads, $bytes of samples on the GPU" "$bench" "${options[@]}" --data "$dir/odd-shards" \
                --threads $threads --resident-device-bytes $bytes --batch 31 --epochs 3
        done
        alone check "stream-gpu: $threads threads, while a training step runs" "$bench" "${options[@]}" --data "$dir/odd-shards" \
            --threads $threads --batch 31 --epochs 3 --compute 1
    done
    for decoder in $(decoders_here); do
        turn=()
        [[ $decoder != hardware ]] || turn=(alone)
        for fit in resize random-resized-crop; do
            for res in 7 33 224; do
                "${turn[@]}" check "stream-gpu: $decoder: $fit to $res" "$bench" "${options[@]}" --data "$dir/mixed-shards" \
                    --decoder "$decoder" --fit $fit --out-res $res --threads 3 --batch 31 --epochs 2
            done
            for bytes in 1 300K 200M; do
                "${turn[@]}" check "stream-gpu: $decoder: $fit, $bytes of images on the GPU" "$bench" "${options[@]}" \
                    --data "$dir/mixed-shards" --decoder "$decoder" --fit $fit --out-res 33 --threads 3 --batch 31 --epochs 3 \
                    --resident-device-bytes $bytes
            done
        done
        "${turn[@]}" check "stream-gpu: $decoder: gray, broken images masked" "$bench" "${options[@]}" --data "$dir/torn-shards" \
            --decoder "$decoder" --out-res 33 --channels 1 --on-error mask --threads 3 --epochs 2 --resident-device-bytes 1G
        "${turn[@]}" check "stream-gpu: $decoder: a broken image ends the run" fails_with 1 'torn-shards/' "$bench" "${options[@]}" \
            --data "$dir/torn-shards" --decoder "$decoder" --out-res 33
        alone check "stream-gpu: $decoder: while a training step runs" "$bench" "${options[@]}" --data "$dir/mixed-shards" \
            --decoder "$decoder" --out-res 65 --epochs 3 --batch 31 --compute 1 --threads 3
        [[ $decoder == cpu ]] || "${turn[@]}" check "stream-gpu: $decoder: all JPEG files" "$bench" "${options[@]}" \
            --data "$dir/mixed-shards" --decoder "$decoder" --device-share 1 --out-res 65 --batch 7 --threads 2
    done
    check 'stream-gpu: images of their own size' "$bench" "${options[@]}" --data "$dir/photos-shards" --decode --batch 100 --threads 3
    check 'stream-gpu: more samples on the GPU than it has memory' fails_with 2 'lower --resident-device-bytes' "$bench" "${options[@]}" \
        --data "$dir/mixed-shards" --fit random-resized-crop --out-res 33 --resident-device-bytes 900G
    make_set shards masks 2 --from synth --preset segrcdb --classes 9 --res 96 --samples 50 --encode jpeg
    for decoder in cpu auto; do
        check "stream-gpu: $decoder: masks" "$bench" "${options[@]}" --data "$dir/masks-shards" --decoder "$decoder" --out-res 40 \
            --fit random-resized-crop --batch 20 --epochs 2 --threads 3
    done
    check 'stream-gpu: a share without a decoder' fails_with 2 'device-share' "$bench" "${options[@]}" --data "$dir/mixed-shards" \
        --decoder cpu --device-share 0.5 --out-res 33
    check 'stream-gpu: a shard disappears' breaks stream-gpu any rm
    check 'stream-gpu: a shard shrinks' breaks stream-gpu warm 'truncate -s 5000'
}
decoders_here() { # the values of --decoder that work on this machine
    local decoder
    ! grep -qx shards-gpu <<<"$variants" || for decoder in hardware hybrid cpu; do
        if "$bench" --variant shards-gpu --decoder $decoder --data "$dir/mixed-shards" --out-res 8 --cache any --loops 1 >/dev/null; then
            echo $decoder
        else
            echo "check/load_gpu.sh: --decoder $decoder is skipped" >&2
        fi
    done
}
# Measures a step of a network with the trainer, and compares generating and reading. The way that needs least is within the
# margin, so the verdict is certain. The command in the answer must train.
advises() { # network, engine
    local out
    out=$(mktemp -d "$dir/advice-XXXXXX")
    "$bench" advise --data "$dir/photos-shards" --compute "train:$1" --batch 64 --out-res 64 --margin 1000 --time 100 --out "$out" \
        --format json >"$out/advice.json" || return
    python3 - "$out" "$1" "$2" <<'END' >"$out/command" || return
import csv, json, sys
out, model, engine = sys.argv[1:]
answer = json.load(open(f"{out}/advice.json"))
about, ways = answer["advice"], {way["way"]: way for way in answer["rows"]}
rows = list(csv.DictReader(open(f"{out}/train.csv")))
assert (about["model"], about["engine"]) == (model, engine), about
assert {(row["variant"], row["model"], row["batch"], row["out_res"], row["channels"]) for row in rows} == {(engine, model, "64", "64", "3")}
for way in "the step without input", "generating", "a prepared set, memory", "shards from memory", "files in host memory", "the set in GPU memory":
    assert not ways[way]["reason"] and ways[way]["reached_per_s"] > 0, ways[way]
assert abs(about["step_s"] * ways["the step without input"]["reached_per_s"] / 64 - 1) < 1e-5, about
assert max(way["limit_share"] or 0 for way in answer["rows"]) < 1.1, ways
resident = [row for row in rows if row["resident_device_bytes"]]
assert resident and all(row["resident_device_samples"] == row["train_samples"] for row in resident), resident
assert about["prepare_s_per_image"] > 0 and about["prepare_pays"] in ("yes", "no", "unknown"), about
assert about["decided"] and about["command"].startswith("fdsl-bench --workload train --variant " + engine), about
print(about["command"].removeprefix("fdsl-bench"))
END
    # shellcheck disable=SC2046  # options without blanks
    "$bench" $(<"$out/command") --train-size 256 --test-size 64 --epochs 1
}
sets=(one three odd half float middle large)
make_sets
share_processors
# cuFile supports only some file systems.
if [[ $variants == *gds* ]] && ! "$bench" --variant gds --data "$dir/one-shards" --cache any --dry-run; then
    echo "check/load_gpu.sh: gds is skipped: give a DIR on a file system that cuFile supports" >&2
    variants=$(grep -v '^gds$' <<<"$variants")
fi

if ((sanitize)); then
    # racecheck checks shared memory, initcheck uninitialised memory, synccheck barriers. All tools except
    # memcheck slow down the matrix product of --compute too much to calibrate a step. The last check of each
    # tool therefore runs the product without calibration.
    for tool in memcheck racecheck initcheck synccheck; do
        runner=(compute-sanitizer --tool "$tool" --error-exitcode 9)
        [[ $tool != memcheck ]] || runner+=(--leak-check full)
        for variant in $variants; do
            [[ $variant != gds ]] || continue # the tools would also check cuFile's own CUDA kernels and copies
            for set in one odd half large several; do
                verify "$variant" "$set" --batch 32 --threads 2 --chunk 64 --ring 2 --dtype f16
            done
            verify "$variant" float --batch 7 --threads 3 --dtype raw --epochs 2
            [[ $tool != memcheck ]] || alone verify "$variant" odd --batch 31 --threads 3 --epochs 2 --compute 20
        done
        ! grep -qx gpu-resident <<<"$variants" || verify gpu-resident odd --resident-bytes 400K --threads 2 --batch 31
        # initcheck would also check memory that nvJPEG's own kernels write.
        for decoder in $([[ $tool == initcheck ]] || decoders_here); do
            alone check "$tool: --decoder $decoder" "${runner[@]}" "$bench" --variant shards-gpu --decoder "$decoder" "${quick[@]}" \
                --data "$dir/mixed-shards" --fit random-resized-crop --out-res 65 --augment --dtype f16 --threads 2
        done
        if grep -q '^load,stream-gpu,[^,]*,yes' <<<"$list"; then
            alone check "$tool: stream-gpu" "${runner[@]}" "$bench" --variant stream-gpu "${quick[@]}" --data "$dir/mixed-shards" \
                --decoder cpu --out-res 65 --batch 31 --epochs 2 --threads 2 --resident-device-bytes 300K
        fi
        ! grep -qx shards-gpu <<<"$variants" || check "$tool: shards-gpu, pinned shards" "${runner[@]}" "$bench" --variant shards-gpu \
            --data "$dir/middle-shards" "${quick[@]/any/warm}" --threads 2 --chunk 1000
        check "$tool: a step of a given length" "${runner[@]}" "$product"
    done
    # Looks for leaks and invalid accesses after a failure.
    runner=(compute-sanitizer --tool memcheck --leak-check full --error-exitcode 9)
    if grep -qx shards-gpu <<<"$variants"; then
        delay_s=10 alone check 'memcheck: shards-gpu: a shard shrinks during a step' breaks shards-gpu any \
            'truncate -s 5000' --compute 20
    fi
else
    for variant in $variants; do
        for set in "${sets[@]}"; do
            for dtype in raw f32 f16 bf16; do
                verify "$variant" "$set" --dtype $dtype --threads 1
            done
            verify "$variant" "$set" --batch 1 --threads 2
            verify "$variant" "$set" --batch 1000 --threads 1 --epochs 3
        done
        for shuffle in 0 1 2 7 100 1000; do
            for threads in 1 3 16; do
                verify "$variant" odd --shuffle $shuffle --threads $threads --batch 31 --seed 9
            done
        done
        verify "$variant" odd --mean 0.5 --std 0.25 --dtype bf16
        verify "$variant" float --mean -3 --std 7 --dtype f32
        # --verify checks each batch after a step has consumed it.
        for threads in 1 3 16; do
            alone verify "$variant" odd --compute 1 --threads $threads --epochs 3 --batch 31
        done
        # With small shuffle buffers, batch buffers are reused within and across epochs, and a reader may hand over
        # batches that other readers have filled.
        alone verify "$variant" odd --compute 1 --threads 3 --epochs 3 --batch 31 --shuffle 7 --chunk 8
        # This run has more batch buffers than the consumer has events.
        alone verify "$variant" odd --compute 0.5 --threads 16 --epochs 3 --batch 1
        read -ra layouts < <(layouts_of "$variant")
        layout=${layouts[-1]}
        alone check "$variant: steps and waits add up to the time" scripts/check/steps.py "$bench" --variant "$variant" \
            --data "$dir/middle-$layout" --cache any --batch 32 --threads 4 --loops 20 --compute 1
        if [[ $variant != files-gpu ]]; then
            for threads in 1 5; do
                check "$variant many-shards, $threads threads" "$bench" --variant "$variant" --data "$dir/many-shards" \
                    "${quick[@]}" --threads $threads --batch 129
            done
        fi
        if [[ $variant == gpu-resident ]]; then
            # With these sizes, 0 samples, 1 sample, half of the samples, nearly all and all stay in device memory.
            for bytes in 1 4096 400K 788K 100M; do
                for threads in 1 3; do
                    verify gpu-resident odd --resident-bytes $bytes --threads $threads --epochs 3 --batch 31
                done
                verify gpu-resident half --resident-bytes $bytes --dtype bf16
                alone verify gpu-resident odd --resident-bytes $bytes --compute 1 --epochs 3 --batch 31
            done
            check "$variant wide-shards --resident-bytes 50M" "$bench" --variant "$variant" --data "$dir/wide-shards" "${quick[@]}" \
                --resident-bytes 50M --dtype f32 --epochs 2 --threads 4
            check "$variant wide-shards" "$bench" --variant "$variant" --data "$dir/wide-shards" "${quick[@]}" --dtype f32
        fi
        [[ $variant == gpu-resident || $variant == files-gpu ]] && continue
        for chunk in 4 64 1024; do
            verify "$variant" odd --chunk $chunk --ring 2 --threads 2 --shuffle 7
            verify "$variant" large --chunk $chunk --ring 3 --threads 2
        done
    done
    if grep -qx shards-gpu <<<"$variants"; then
        # Pinned shards: whole chunks, chunks of two shards, and pieces that are copied to the buffer.
        for options in '--threads 1' '--threads 2 --chunk 1000' '--threads 3 --chunk 600 --shuffle 7' \
            '--threads 16 --ring 3 --dtype raw --batch 31' '--threads 2 --epochs 3 --compute 1'; do
            read -ra words <<<"$options"
            alone check "shards-gpu middle-shards, pinned, $options" pins yes "${quick[@]/any/warm}" "${words[@]}"
        done
        alone check 'shards-gpu middle-shards, --cache any, not pinned' pins no "${quick[@]}" --threads 2
        for decoder in $(decoders_here); do
            check_decoding "$decoder"
        done
        alone check 'advice about a step of a transformer' advises vit-micro train-vit
        alone check 'advice about a step of another network' advises cnn-fdsl train-bf16
    fi
    ! grep -q '^load,stream-gpu,[^,]*,yes' <<<"$list" || check_streams
    # Faults
    for variant in $variants; do
        [[ $variant == files-gpu ]] && continue
        check "$variant: batches that do not fit are refused" fails_with 2 'GB of device memory, but' "$bench" --variant "$variant" \
            --data "$dir/large-shards" --batch 1000000 --dtype f32 --cache any
        [[ $variant == gpu-resident ]] && continue
        # A shard disappears or shrinks during a run.
        check "$variant: a shard disappears" breaks "$variant" any rm
        for cache in any warm; do
            check "$variant: a shard shrinks, $cache" breaks "$variant" $cache 'truncate -s 5000'
        done
        broken=middle check "$variant: a shard with large pieces shrinks" breaks "$variant" warm 'truncate -s 5000'
        alone check "$variant: a shard disappears during a step" breaks "$variant" any rm --compute 1
        alone check "$variant: a shard shrinks during a step" breaks "$variant" any 'truncate -s 5000' --compute 1
    done
fi
conclude
