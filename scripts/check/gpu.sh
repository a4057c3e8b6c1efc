#!/usr/bin/env bash
# Verifies every synth variant over a grid of sizes on a machine with a GPU. With --sanitize, runs the CUDA variants
# at a few small sizes under compute-sanitizer. Without --sanitize, every variant runs all sizes of the grid, except that
# naive runs only small ones. The grid omits most combinations of the largest values, because the reference runs on one
# CPU thread.
#
#   scripts/check/gpu.sh [--sanitize] [--variant NAMES]
#
# Prints one line per check, then "N passed, N failed". Exit status 1 if a check failed, 4 if no CUDA variant is
# available. ONLY=REGEX: run only the checks whose names match. JOBS=N: parallel checks (default: half of the
# processors, at most 8). LIMIT=N: time limit per check in seconds (default 600).
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/check/parallel.sh
source scripts/check/parallel.sh

bench=${FDSL_BENCH:-./fdsl-bench}
need_variant bat
# Selects all available variants except naive. The grid below adds naive for sizes at which it takes less than a second.
variants=$(awk '/^[a-z]/ { synth = /^synth:/ } synth && $2 == "available" && $1 != "naive" { print $1 }' <<<"$list" | paste -sd,)
read_options 0 "$@"

exact=naive,$(tr , '\n' <<<"$variants" | { grep -E '^(omp|fused)' || true; } | paste -sd,)

# Each line: vertices, orbits, res, batch, further options. Lines with --classes have dashes instead of vertices and orbits,
# which the classes define.
grid='3 1 224 1
3 200 1024 256
3 1500 224 256
64 1 1024 1024
64 200 512 256
64 1500 512 7
1000 1 512 1024
1000 200 224 256
1000 200 512 1
1000 200 512 7
1000 200 512 256
1000 200 512 1024
1000 200 1024 7
1000 200 1023 3
1000 200 1024 1024
1000 1500 512 7
1500 1 224 7
1500 200 512 256
1500 1500 1024 1
1500 1500 512 256
4096 1 512 256
4096 200 1024 7
4096 200 1024 256
4096 1500 1024 7
1 1 1 1
1 5 3 2
2 3 31 5
257 33 225 129
997 201 512 31
1000 200 512 7 --formula visualatom
1500 200 225 33 --formula visualatom
3 1500 1024 7 --formula visualatom
4096 20 224 7 --formula visualatom
- - 512 256 --classes 256
- - 512 100 --classes 37 --formula visualatom --instance 1000003 --seed 18446744073709551615
- - 224 64 --classes 64 --preset lowercompute
997 201 136 5
997 201 137 5
31 4 97 64
32 5 97 64
62 7 512 33 --noise 0
1000 30 512 7 --noise 300 --line-width 3
200 2000 4096 2
300 77 16384 1
- - 512 1500 --classes 3'

# Output formats, for the variants that support them; at the default --res 512 unless a line gives another.
outputs='--dtype f16 --channels 3
--dtype bf16 --channels 3 --layout nhwc --mean 0.5,0.4,0.3 --std 0.2,0.3,0.4
--dtype f32 --out-res 224
--dtype u8 --out-res 224
--dtype u8 --channels 3 --layout nhwc --res 137
--dtype f16 --channels 3 --layout nhwc --out-res 224 --fit crop
--dtype f16 --out-res 223 --fit crop --classes 17
--dtype u8 --out-res 511
--dtype f32 --out-res 1 --channels 3
--dtype u8 --out-res 3 --classes 5 --formula visualatom
--dtype f16 --res 100 --out-res 333
--dtype u8 --res 4500 --out-res 301 --orbits 40
--dtype bf16 --res 1000 --out-res 7 --channels 3'

share_processors
quick=(--min-samples 1 --min-time 0 --max-time 0 --warmups 0 --warmup-time 0)
if ((sanitize)); then
    # Uses small sizes, because the tools slow CUDA kernels down a hundredfold. Omits CPU variants, because the tools
    # check only CUDA kernels.
    variants=$(tr , '\n' <<<"$variants" | grep -v '^omp$' | paste -sd,)
    # Only memcheck supports kernels that launch kernels. The other tools skip bat, bat-reuse and
    # gbase-device; they run rng and gbase, which have the same kernels. Of the variants' kernels, only those of
    # fused and fused-graph use shared memory, which racecheck checks.
    for tool in memcheck racecheck initcheck synccheck; do
        [[ $tool == memcheck ]] || variants=$(tr , '\n' <<<"$variants" | grep -Ev '^(bat|gbase-device)' | paste -sd,)
        sizes=('3 5 31 2' '257 33 225 7' '64 3 64 40') # vertices orbits res batch
        [[ $tool == memcheck ]] && sizes+=('1500 3 64 2' '3 1100 64 2' '3 2 16 1100')
        for size in "${sizes[@]}"; do
            read -r q k res batch <<<"$size"
            check "$tool: $q vertices, $k orbits, $res^2, batch $batch" \
                compute-sanitizer --tool "$tool" --error-exitcode 9 \
                "$bench" --variant "$variants" --verify "${quick[@]}" --vertices "$q" --orbits "$k" --res "$res" --batch "$batch"
        done
        # The step is long, because memcheck slows down launches more than the step's matrix product. The other tools slow down
        # the matrix product too much to calibrate the duration of the step.
        [[ $tool != memcheck ]] || alone check "$tool: consumed" compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$bench" --variant "$variants" --verify "${quick[@]}" --res 64 --batch 5 --vertices 64 --orbits 3 --compute 50
        check "$tool: outputs" compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$bench" --variant fused,fused-graph --verify "${quick[@]}" --classes 5 --batch 60 --res 150 --out-res 64 --dtype f16 --channels 3
        for test in formulas fractal color; do
            check "$tool: $test" compute-sanitizer --tool "$tool" --error-exitcode 9 "build/tests/gpu_$test" --short
        done
    done
else
    # Prints three names per line. One check verifies the variants of one line, because at large sizes the reference takes a
    # minute or two per variant.
    by_three() { # names
        tr , '\n' <<<"$1" | paste -sd ',,\n'
    }
    # These checks start first, because they take longest.
    for name in ${exact//,/ }; do
        [[ $name == naive ]] || check "rounding errors that add up, $name" "$bench" --variant "$name" --verify "${quick[@]}" --vertices 16 \
            --orbits 16165 --noise 0 --line-width 0.0053791 --radius 0 --freq1 1 --freq2 1 --res 128 --instance 5200 --batch 256
    done
    while read -r q k res batch extra; do
        options=(--res "$res" --batch "$batch")
        parts=naive,$variants
        if [[ $q == - ]]; then
            parts=$variants
        else
            options+=(--vertices "$q" --orbits "$k")
            ((q * k * batch <= 10000000)) || parts=$(by_three "$variants")
        fi
        for names in $parts; do
            # shellcheck disable=SC2086  # several words on purpose
            check "${options[*]} $extra $names" "$bench" --variant "$names" --verify "${quick[@]}" "${options[@]}" $extra
        done
    done <<<"$grid"
    while read -r options; do
        # shellcheck disable=SC2086
        check "$options" "$bench" --variant "$exact" --verify "${quick[@]}" --batch 9 $options
    done <<<"$outputs"
    # In these classes, vertices leave the image and come back, or positions accumulate rounding errors.
    classes=$(mktemp)
    trap 'rm -f "$classes"' EXIT
    cat >"$classes" <<'END'
class,vertices,orbits,oval_x,oval_y,freq1,freq2,noise,radius,line_width
1,300,200,1,1,5,8,0.5,400,-4
2,300,201,1.2,1.8,5,8,-2,300,0
3,128,400,1,2,3,4,3,40,-3
4,333,150,2,1,1,2,10,20,-10
5,77,150,1,1,0,0,-8,25,8
6,500,97,1,1,0,7,0,90,-2
7,5,66000,1,1,0,0,-0.01,60,0.01
8,16,16165,1.2,1.8,1,1,0,0,0.0053791
9,40000,3,1,1,3,5,2,9,0
END
    for res in 1 61 128 200; do
        for formula in uji visualatom; do
            check "vertices that leave the image and come back, $res^2, $formula" "$bench" --variant "${exact#naive,}" --verify "${quick[@]}" \
                --class "$classes" --batch 45 --res $res --formula $formula
        done
    done
    for formula in rcdb segrcdb; do
        for options in '--batch 256' '--batch 3 --res 1000' '--batch 40 --out-res 224 --fit crop --dtype f16 --channels 3' '--batch 40 --out-res 100'; do
            # shellcheck disable=SC2086
            check "$formula $options" "$bench" --variant fused,fused-graph --verify "${quick[@]}" --formula $formula $options
        done
    done
    for draw in patches points; do
        for options in '--batch 256' '--batch 3 --res 1000 --instance 45000' '--batch 40 --out-res 224 --dtype f16 --channels 3'; do
            # shellcheck disable=SC2086
            check "fractaldb-1k $draw $options" "$bench" --variant fused,fused-graph --verify "${quick[@]}" --preset fractaldb-1k --draw $draw $options
        done
    done
    for options in '--preset exfractaldb-1k --batch 256' '--preset mv-fractaldb-1k --classes 3 --batch 50 --res 97' \
        '--preset 3d-ofdb-1k --classes 7 --batch 40 --res 300 --out-res 224 --dtype f16 --channels 3' \
        '--preset exfractaldb-1k --classes 5 --batch 60 --out-res 50 --fit crop --instance 45000' \
        '--preset pc-fractaldb-1k --classes 9 --batch 30'; do
        # shellcheck disable=SC2086
        check "$options" "$bench" --variant fused,fused-graph --verify "${quick[@]}" $options
    done
    check 'bat refuses other formulas by name' fails_with 2 'does not draw the formula rcdb' "$bench" --variant bat --formula rcdb --batch 1
    check 'weights of dark images of fractals are replaced' "$bench" --variant fused,omp --verify "${quick[@]}" \
        --preset fractaldb-1k --classes 8 --min-lit 0.01 --batch 200 --instance 800
    check 'classes of 1p-frac' "$bench" --variant fused,omp --verify "${quick[@]}" --preset 1p-frac --batch 60
    # The weights of an output pixel add up to res^2, so at this size the sums of bright pixels exceed 32 bits.
    check 'sums of bright pixels exceed 32 bits' "$bench" --variant "${exact#naive,}" --verify "${quick[@]}" --batch 1 \
        --res 8192 --vertices 4096 --orbits 2000 --line-width 2 --out-res 4096
    check 'closed forms compared with the definitions' build/tests/gpu_exact
    check 'all formulas and masks compared with the references' build/tests/gpu_formulas
    check 'orbits and images of fractals compared with the references' build/tests/gpu_fractal
    check 'fractals in colour compared with the reference' build/tests/gpu_color
    check 'fractals in colour and their labels' "$bench" --variant fused,fused-graph,omp --verify "${quick[@]}" --preset multifractal-1k --batch 40
    check 'the matrix product of a training step' build/tests/gpu_product
    shards=$(mktemp -d)
    trap 'rm -rf "$classes" "$shards"' EXIT
    "$bench" --prepare "$shards/set" --store shards --shards 3 --samples 300 --sample-shape 3,8,8 --dtype u8 --classes 0 >/dev/null ||
        (($? == 4)) # a build without xxHash cannot prepare a set
    check 'variants that stop working in timed runs are detected' build/tests/gpu_timed "$shards/set"
    for step_ms in 0.1 0.5 5 100; do
        alone check "consumed by a step of $step_ms ms" "$bench" --variant "$variants" --verify "${quick[@]}" --batch 9 --res 96 --compute $step_ms
    done
    check 'a batch that does not fit is refused' fails_with 2 'needs .* GB of device memory, but .* GB are free' \
        "$bench" --variant bat --batch 1000000 --res 2048
fi
conclude
