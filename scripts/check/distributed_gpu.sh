#!/usr/bin/env bash
# Verifies training over several ranks on a machine with GPUs, for every method of --sync. Compares steps with the
# reference. Tests odd batches, short last steps in which a rank has no samples, repeated runs, live samples, and ranks that
# are killed or stopped. Tests shares of the batch that differ between ranks or change (--balance). With peer-fused, the
# results must be bit-identical to those with peer, and runs must resume on another number of ranks. Verifies the variants
# of the workload exchange. With fewer GPUs than ranks, ranks share GPUs, and nccl is skipped.
#
#   scripts/check/distributed_gpu.sh [RANKS]     (default: 2)
#
# Prints one line per check, then "N passed, N failed". Exit status 1 if a check failed, 4 if training does not run on
# a GPU here. ONLY=REGEX: run only the checks whose names match. JOBS=N: parallel checks (default: half of the
# processors, at most 8). LIMIT=N: time limit per check in seconds (default 600).
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/check/parallel.sh
source scripts/check/parallel.sh

bench=$(realpath "${FDSL_BENCH:-./fdsl-bench}")
ranks=${1:-2}
[[ $ranks =~ ^[1-9][0-9]?$ ]] || refuse "'$ranks': give a number of ranks from 1 to 99"
need_variant train-cuda
uneven=$(seq -s : "$ranks")
zero=$(seq -s : 0 $((ranks - 1)))
all_layers=$(awk '$1 ~ /^train-(cuda|tf32|bf16|amp|cudnn)$/ && $2 == "available" { print $1 }' <<<"$list" | paste -sd,)
gpus=$(count_gpus)
methods='mpi peer peer-bf16 peer-fused'
((gpus < ranks)) || methods+=' nccl'
resnet=$(awk '$1 == "train-resnet" && $2 == "available" { print $1 }' <<<"$list")
vit=$(awk '$1 == "train-vit" && $2 == "available" { print $1 }' <<<"$list")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
share_processors

on_ranks() { # number, options ...
    local count=$1
    shift
    mpirun --bind-to none -n "$count" "$bench" --test-size 50 "$@"
}

# Two runs with weak scaling and one with strong scaling must export the same bits. --batch is per rank with weak
# scaling, and the global batch with strong scaling.
same_bits() { # variant, method
    local name=$work/$1-$2
    on_ranks "$ranks" --data digits --variant "$1" --sync "$2" --train-size 500 --batch 16 --epochs 2 --shift 2 --export "$name-1" &&
        on_ranks "$ranks" --data digits --variant "$1" --sync "$2" --train-size 500 --batch 16 --epochs 2 --shift 2 --export "$name-2" &&
        on_ranks "$ranks" --data digits --variant "$1" --sync "$2" --train-size 500 --batch $((16 * ranks)) --scaling strong \
            --epochs 2 --shift 2 --export "$name-3" &&
        cmp "$name-1" "$name-2" && cmp "$name-1" "$name-3"
}

# Two runs with shares 1:2:3... must export the same bits. The ranks then have different numbers of samples.
same_bits_uneven() { # variant, method
    local name=$work/uneven-$1-$2 run
    for run in 1 2; do
        on_ranks "$ranks" --data digits --variant "$1" --sync "$2" --train-size 500 --batch 16 --epochs 2 --balance "$uneven" --export "$name-$run"
    done
    cmp "$name-1" "$name-2"
}

# In each of three epochs, the loss must equal that of one rank, up to rounding errors, which training amplifies.
same_loss() { # variant, method
    local name=$work/loss-$1-$2
    on_ranks 1 --data digits --variant "$1" --train-size 2000 --batch 48 --epochs 3 --out "$name-1.csv" >/dev/null
    on_ranks "$ranks" --data digits --variant "$1" --sync "$2" --train-size 2000 --batch 48 --scaling strong --epochs 3 --out "$name-n.csv" >/dev/null
    python3 - "$name-1.csv" "$name-n.csv" <<'END'
import csv, sys
one, many = ([row for row in csv.DictReader(open(path)) if row["rank"] in ("all", "0")] for path in sys.argv[1:])
many = [row for row in many if row["rank"] == "all"]
for a, b in zip(one, many):
    loss = float(a["train_loss"]), float(b["train_loss"])
    print("epoch", a["epoch"], "loss", *loss)
    assert abs(loss[0] - loss[1]) < 0.05 * loss[0] + 0.01, loss
assert len(many) == 3 and len(one) == 3, (len(one), len(many))
END
}

# After a rank is killed or stopped, the job must end in time, and the message must name the rank.
lost_rank() { # signal, seconds, variant, method
    local signal=$1 limit=$2 log=$work/lost-$1-$3-$4 size=10000 pid
    [[ $signal == KILL ]] || size=10001 # pgrep tells the processes of parallel checks apart by this option
    shift 2
    on_ranks "$ranks" --data digits --variant "$1" --sync "$2" --train-size "$size" --batch 16 --epochs 1000 >"$log" 2>&1 &
    pid=$!
    for _ in $(seq 100); do
        grep -q . "$log" && break
        sleep 0.1
    done
    sleep 8
    kill_last_rank "$log" "$pid" "variant $1 --sync $2 --train-size $size " "$ranks" "$signal" "$limit"
}

# With peer-fused, the parameters must be bit-identical to those with peer, because both add up in rank order.
same_as_peer() { # variant, options ...
    local name method variant=$1
    name=$(mktemp -d "$work/fused-XXXXXX")/parameters # checks with the same variant run at the same time
    shift
    for method in peer peer-fused; do
        on_ranks "$ranks" --data digits --variant "$variant" --sync "$method" --train-size 500 --batch 16 --epochs 2 \
            --export "$name-$method" "$@"
    done
    cmp "$name-peer" "$name-peer-fused"
}

# A run that resumes on the same number of ranks must be bit-identical to an uninterrupted run. A run with peer-fused
# must resume on one rank, and a run on one rank must resume with peer-fused.
resumes() { # variant, options ...
    local name=$work/resumes-$1 variant=$1 step=$((16 * ranks))
    local training=(--data digits --variant "$variant" --train-size 500 --batch "$step" --scaling strong --checkpoint)
    shift
    on_ranks "$ranks" "${training[@]}" "$name-whole" --sync peer-fused --epochs 2 --export "$name-1" "$@" &&
        on_ranks "$ranks" "${training[@]}" "$name-parts" --sync peer-fused --epochs 1 "$@" &&
        cp -r "$name-parts" "$name-one" &&
        on_ranks "$ranks" "${training[@]}" "$name-parts" --sync peer-fused --epochs 2 --resume --export "$name-2" "$@" &&
        cmp "$name-1" "$name-2" &&
        on_ranks 1 "${training[@]}" "$name-one" --epochs 2 --resume "$@" &&
        on_ranks "$ranks" "${training[@]}" "$name-one" --sync peer-fused --epochs 3 --resume "$@"
}

# With peer-fused, a rank keeps only its part, 1 / ranks, of Adam's two moments. The memory saved must be that of the other parts.
less_memory() {
    local name=$work/memory method
    for method in peer peer-fused; do
        on_ranks "$ranks" --data digits --variant train-cuda --sync "$method" --train-size 500 --batch 16 --epochs 1 \
            --model cnn --out "$name-$method.csv"
    done
    python3 - "$name-peer.csv" "$name-peer-fused.csv" "$ranks" <<'END'
import csv, sys
rows = [[row for row in csv.DictReader(open(path)) if row["rank"] == "0"][0] for path in sys.argv[1:3]]
whole, shared = (int(row["memory_bytes"]) for row in rows)
moments = 8 * int(rows[0]["parameters"])
saved, wanted = whole - shared, moments * (1 - 1 / int(sys.argv[3]))
print("saved", saved, "bytes, wanted", wanted)
assert abs(saved - wanted) < 0.02 * wanted + 4096, (saved, wanted)
END
}

# With mpi-cuda, MPI gets the addresses of the gradients in GPU memory. tests/mpi_cuda.c stands in for an MPI that takes them.
# On two ranks, a sum has only one order, so the parameters must be bit-identical to those with mpi.
device_addresses() { # variant, model
    local name=$work/device-$1
    on_ranks 2 --data digits --variant "$1" --model "$2" --sync mpi --train-size 500 --batch 16 --epochs 2 --export "$name-1" || return
    LD_PRELOAD=$work/mpi_cuda.so on_ranks 2 --data digits --variant "$1" --model "$2" --sync mpi-cuda --train-size 500 --batch 16 \
        --epochs 2 --export "$name-2" 2>"$name.err" || { cat "$name.err" && return 1; }
    cat "$name.err" &&
        grep -q 'mpi_cuda: [1-9][0-9]* sums of [1-9][0-9]* bytes in device memory' "$name.err" && cmp "$name-1" "$name-2"
}

augmented=(--data synth --classes 5 --res 40 --out-res 32 --train-size 90 --fit random-resized-crop --flip
    --rand-augment 28 --erasing 0.25 --repeats 2 --mixup 0.8 --cutmix 1)
for method in $methods; do
    layers=$all_layers stopped_s=45 # kernels of peer wait for up to 20 s; blocks that start later may wait for another 20 s
    [[ $method != nccl ]] || stopped_s=15
    [[ $method != peer-fused ]] || layers=$(tr , '\n' <<<"$all_layers" | grep -v '^train-amp$' | paste -sd,)
    variants=$layers
    [[ $method == mpi || $method == peer-fused ]] || variants+=,train-graph
    check "$method: compared with the reference" on_ranks "$ranks" --data digits --epochs 1 --variant "$variants" --sync "$method" --verify --verify-steps 12 \
        --train-size 203 --batch 11 --shift 2
    check "$method: a last step with one sample" on_ranks "$ranks" --data digits --epochs 1 --variant "$variants" --sync "$method" --verify --verify-steps 12 \
        --train-size 190 --batch 21 --scaling strong
    check "$method: without the last batch" on_ranks "$ranks" --data digits --epochs 2 --variant "$variants" --sync "$method" --verify \
        --verify-steps 12 --train-size 203 --batch 11 --drop-last
    check "$method: one sample per rank" on_ranks "$ranks" --data digits --epochs 1 --variant "${variants/,train-amp/}" --sync "$method" --verify --verify-steps 5 \
        --train-size $((7 * ranks)) --batch 1 --optimizer sgd
    check "$method: live samples" on_ranks "$ranks" --epochs 1 --variant "$layers" --sync "$method" --verify --data synth --classes 5 \
        --model cnn-fdsl --res 32 --train-size 90 --batch 8
    ((ranks == 1)) || check "$method: uneven shares" on_ranks "$ranks" --data digits --epochs 1 --variant "$variants" --sync "$method" \
        --verify --verify-steps 12 --train-size 203 --batch 11 --shift 2 --balance "$uneven"
    ((ranks == 1)) || check "$method: a rank without a share" on_ranks "$ranks" --data digits --epochs 1 --variant "$variants" \
        --sync "$method" --verify --verify-steps 12 --train-size 203 --batch 11 --balance "$zero"
    # A sample may be mixed with a partner of another rank or of another part of the step. Both ranks, or both parts,
    # then augment the partner.
    for feed in live stored; do
        check "$method: augmented and mixed samples, $feed" on_ranks "$ranks" --epochs 1 --variant "$layers" --sync "$method" \
            --verify --feed $feed --model lenet --batch 8 "${augmented[@]}"
        check "$method: augmented and mixed samples in parts, $feed" on_ranks "$ranks" --epochs 1 --variant "$layers" \
            --sync "$method" --verify --feed $feed --model lenet --batch 8 --accumulate 3 "${augmented[@]}"
    done
    # With measured shares, a rank generates live samples before it knows how many it needs.
    check "$method: live samples with measured shares" on_ranks "$ranks" --epochs 4 --variant "$layers" --sync "$method" --verify \
        --data synth --classes 5 --model cnn-fdsl --res 32 --train-size 90 --batch 8 --balance measured
    for variant in ${variants//,/ }; do
        check "$method: repeated runs of $variant" same_bits "$variant" "$method"
        check "$method: repeated runs of $variant, uneven shares" same_bits_uneven "$variant" "$method"
    done
    check "$method: same loss as one rank, train-cuda" same_loss train-cuda "$method"
    [[ $variants != *train-graph* ]] || check "$method: same loss as one rank, train-graph" same_loss train-graph "$method"
    check "$method: a killed rank" lost_rank KILL 15 train-cuda "$method"
    ((ranks == 1)) || [[ $method == mpi ]] || check "$method: a stopped rank" lost_rank STOP "$stopped_s" train-cuda "$method"
    [[ $method == mpi || ! $vit ]] || check "$method: train-vit compared with the reference" on_ranks "$ranks" --data digits --epochs 1 \
        --variant train-vit --model vit-micro --sync "$method" --verify --verify-steps 12 --train-size 203 --batch 11 --optimizer adamw
    [[ $method == mpi || ! $vit ]] || check "$method: train-vit, a last step with one sample, in parts" on_ranks "$ranks" --data digits \
        --epochs 1 --variant train-vit --model vit-micro --sync "$method" --verify --verify-steps 12 --train-size 190 --batch 21 \
        --scaling strong --accumulate 2 --optimizer adamw
    [[ $method == mpi || ! $vit ]] || check "$method: train-vit, augmented and mixed samples" on_ranks "$ranks" --epochs 1 \
        --variant train-vit --model vit-micro --sync "$method" --verify --batch 8 --optimizer adamw "${augmented[@]}"
done
if mpicc -shared -fPIC -o "$work/mpi_cuda.so" tests/mpi_cuda.c -ldl 2>/dev/null; then
    check 'mpi-cuda: MPI gets addresses in GPU memory, train-cuda' device_addresses train-cuda cnn
    check 'mpi-cuda: MPI gets addresses in GPU memory, train-bf16' device_addresses train-bf16 lenet
fi
# Residual networks normalise over the samples of all ranks, as the reference does, or of each rank.
normed=(--data digits --epochs 1 --variant train-resnet --model resnet-micro --optimizer sgd --lr 0.01 --train-size 203)
for method in $methods; do
    [[ $resnet && $method != mpi ]] || continue
    check "$method: train-resnet, each rank normalises" on_ranks "$ranks" "${normed[@]}" --sync "$method" --batch 16
    if [[ $method =~ ^(peer|nccl)$ ]]; then
        check "$method: train-resnet normalises over all ranks" on_ranks "$ranks" "${normed[@]}" --sync "$method" --batch 16 \
            --sync-batch-norm --verify --verify-steps 6 --drop-last
        ((ranks == 1)) || check "$method: train-resnet, a rank without a share" on_ranks "$ranks" "${normed[@]}" --sync "$method" \
            --batch 16 --sync-batch-norm --verify --verify-steps 6 --drop-last --balance "$zero"
    else
        check "$method refuses --sync-batch-norm" fails_with 2 'needs exact sums' mpirun --bind-to none -n 2 "$bench" \
            "${normed[@]}" --test-size 50 --sync "$method" --batch 16 --sync-batch-norm
    fi
done
[[ ! $resnet ]] || check 'peer-fused: train-resnet is bit-identical to peer' same_as_peer train-resnet --model resnet-micro \
    --optimizer sgd --lr 0.01
for variant in train-cuda train-bf16; do
    check "peer-fused: $variant is bit-identical to peer" same_as_peer "$variant"
    check "peer-fused: $variant resumes" resumes "$variant"
done
check 'peer-fused: SGD is bit-identical to peer' same_as_peer train-tf32 --optimizer sgd --lr 0.01
[[ ! $vit ]] || check 'peer-fused: train-vit is bit-identical to peer' same_as_peer train-vit --model vit-micro --optimizer adamw
[[ ! $vit ]] || check 'peer-fused: train-vit with --layer-decay is bit-identical to peer' same_as_peer train-vit --model vit-micro \
    --optimizer adamw --layer-decay 0.75
[[ ! $vit ]] || check 'peer-fused: train-vit with --accumulate is bit-identical to peer' same_as_peer train-vit --model vit-micro \
    --optimizer adamw --accumulate 2
check 'peer-fused: train-tf32 with --accumulate is bit-identical to peer' same_as_peer train-tf32 --accumulate 2
[[ ! $vit ]] || check 'peer-fused: train-vit resumes' resumes train-vit --model vit-micro --optimizer adamw
check 'peer-fused: moments take less memory' less_memory
check 'train-amp refuses peer-fused' fails_with 4 'scales the loss, so it needs all sums before the update; use --sync peer' \
    mpirun --bind-to none -n 2 "$bench" --variant train-amp --sync peer-fused --data digits --batch 8 --train-size 100 --epochs 1
[[ ! $vit ]] || check 'train-vit-amp: compared with the reference, with overflows' on_ranks "$ranks" --data digits --epochs 1 \
    --variant train-vit-amp --model vit-micro --verify --verify-steps 12 --train-size 203 --batch 11 --loss-scale 16777216
[[ ! $vit ]] || check 'train-vit-amp: gradients in bf16, with overflows' on_ranks "$ranks" --data digits --epochs 1 \
    --variant train-vit-amp --model vit-micro --verify --sync peer-bf16 --train-size 203 --batch 11 --loss-scale 16777216
check 'train-graph refuses peer-fused' fails_with 4 'updates the parameters in its own kernels; use --sync peer' \
    mpirun --bind-to none -n 2 "$bench" --variant train-graph --sync peer-fused --data digits --batch 8 --train-size 100 --epochs 1
for option in --clip-norm --ema; do
    check "peer-fused refuses $option" fails_with 2 "use --sync peer, or drop $option" mpirun --bind-to none -n 2 "$bench" \
        --variant train-cuda --sync peer-fused --data digits --batch 8 --train-size 100 --epochs 1 "$option" 0.9
done
check 'exchange: all variants' mpirun --bind-to none -n "$ranks" "$bench" --workload exchange --variant all --verify --loops 3 \
    --warmups 1 --warmup-time 0 --bytes 4,12,508,512,516,4084,262148,1200004,23000004
check 'train-graph refuses mpi' fails_with 4 'cannot add up gradients between kernels of a CUDA graph' \
    mpirun --bind-to none -n 2 "$bench" --variant train-graph --sync mpi --data digits --batch 8 --train-size 100 --epochs 1
# The last rank trains on the CPU. All ranks compare the hashes of their parameters after each epoch.
if ((ranks > 1)); then
    cpu=$((ranks - 1)):cpu
    mixed=train-cuda,train-tf32,train-bf16
    check 'a CPU rank: compared with the reference' on_ranks "$ranks" --data digits --epochs 2 --variant "$mixed" --rank-device "$cpu" \
        --verify --verify-steps 12 --train-size 203 --batch 11 --shift 2 --threads 2
    check 'a CPU rank: all parts of the gradients' on_ranks "$ranks" --data digits --epochs 1 --variant "$mixed" --rank-device "$cpu" \
        --verify --verify-steps 5 --model cnn --train-size 203 --batch 21 --scaling strong --balance "$uneven" --threads 2
    check 'a CPU rank: measured shares' on_ranks "$ranks" --data digits --epochs 4 --variant train-cuda --rank-device "$cpu" \
        --verify --model cnn --train-size 2000 --batch 64 --balance measured --threads 2
    check 'a CPU rank: live samples' on_ranks "$ranks" --epochs 1 --variant "$mixed" --rank-device "$cpu" --verify --data synth \
        --classes 5 --model cnn-fdsl --res 32 --train-size 90 --batch 8 --threads 2
    check 'a CPU rank: augmented and mixed samples' on_ranks "$ranks" --epochs 1 --variant "$mixed" --rank-device "$cpu" --verify \
        --model lenet --batch 8 --threads 2 "${augmented[@]}"
    check 'a CPU rank refuses peer' fails_with 4 'use --sync mpi' \
        mpirun --bind-to none -n "$ranks" "$bench" --variant train-cuda --rank-device "$cpu" --sync peer --data digits --batch 8 --train-size 100
    check 'a CPU rank refuses train-amp' fails_with 2 'scales the loss' \
        mpirun --bind-to none -n "$ranks" "$bench" --variant train-amp --rank-device "$cpu" --data digits --batch 8 --train-size 100
    check 'a CPU rank refuses train-graph' fails_with 4 'cannot add up gradients between kernels of a CUDA graph' \
        mpirun --bind-to none -n "$ranks" "$bench" --variant train-graph --rank-device "$cpu" --data digits --batch 8 --train-size 100
    check 'ranks choose their GPUs' on_ranks "$ranks" --data digits --epochs 1 --variant train-cuda --verify --train-size 203 --batch 11 \
        --rank-device "0:cuda:$((gpus - 1)),1:cuda:0"
    check 'a GPU that does not exist' fails_with 2 "there is no GPU $gpus" \
        mpirun --bind-to none -n "$ranks" "$bench" --variant train-cuda --rank-device "1:cuda:$gpus" --data digits --batch 8 --train-size 100
fi
check 'train-graph refuses measured shares' fails_with 2 'CUDA graph contains the shares' \
    mpirun --bind-to none -n 2 "$bench" --variant train-graph --balance measured --data digits --batch 8 --train-size 100 --epochs 1
((gpus >= ranks)) || check 'nccl refuses ranks that share a GPU' fails_with 4 'nccl' \
    mpirun --bind-to none -n "$ranks" "$bench" --variant train-cuda --sync nccl --data digits --batch 8 --train-size 100 --epochs 1
conclude
