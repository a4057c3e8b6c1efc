"""The figures of horizontal bars: rooflines, decoding, embedding sets and uneven ranks. scripts/figures/draw.py documents the return
values."""

import collections
import statistics

from devices import Devices, Missing, about_yours, device_of
from learning import JOB as TRAINING_JOB
from plot import HEIGHT, Plot, count_words, micros_words, scaled, short_device, shortened, text_px
from rows import DEFAULTS, newest, of_one_job, sweep_of

ROW_PX = 22  # height of a bar


class Bars(Plot):
    """Bars in groups (plots/bars.gp). The kind of a bar begins with its colour (plots/common.gp) and its name in the legend."""

    def __init__(self, title):
        super().__init__(title)
        self.bars, self.names, self.headings, self.y = collections.defaultdict(list), [], [], 0

    def add_group(self, heading):
        self.y -= 1.3 * bool(self.names)
        self.headings.append((self.y, heading))

    def add_bar(self, kind, value, words, name):
        self.y -= 1
        self.bars[kind].append((value, self.y, words))
        self.names.append((self.y, name))

    def finish(self, kinds, legend, inside, x_high=None, wide=False):
        """Fills the blocks, the legend and the variables. The text of a bar is inside it from the value `inside` on. `wide`: makes room
        for long names."""
        kinds = [kind for kind in kinds if self.bars[kind]]
        self.blocks = [*(self.bars[kind] for kind in kinds), self.names, self.headings or [(0, "")]]
        self.legend = [(0, legend)] + [(-kind[0], kind[1]) for kind in kinds]
        self.left = int(30 + max(text_px(name, 10.5) for _, name in self.names)) if wide else 150
        self.width += self.left * wide
        self.height = max(HEIGHT, int(200 - ROW_PX * (self.y - 1.3 * (not wide))))
        self.variables = {"y_low": self.y - 0.8, "y_high": 0.7 if self.headings else -0.3, "inside": inside, "kinds": len(kinds),
                          "kind_slot": [kind[0] for kind in kinds], **({"x_high": x_high} if x_high else {})}


def of_device(row):
    """Returns a bar's variant and device."""
    return f"{row['variant']}, {shortened(short_device(row['device']), 30)}{' (yours)' * (row.source == 'yours')}"


# ---- The minimum possible time of each variant's work divided by its measured time, from rows of several workloads ----

# A bound's colour, its name in the legend, and the unit of its peak rate.
BOUNDS = {"compute": (6, "FLOPs", "FLOP/s"), "memory": (5, "memory bandwidth", "B/s"), "bus": (3, "bus bandwidth", "B/s")}
PEAKS = ((1e9, " M", 1e6), (1e12, " G", 1e9), (1e15, " T", 1e12), (float("inf"), " P", 1e15))
WORKLOADS = ("synth", "load", "train", "infer")


def roofline(measured):
    candidates = measured.rows + measured.loads + measured.trains + measured.infers
    rows = [row for row in candidates if row["bound"] in BOUNDS and row["roofline_share"] and row["ranks"] == 1]
    if not rows:
        raise Missing("./fdsl-bench --workload train --variant all --epochs 3 --verify --out results/train.csv",
                      candidates, needs="an NVIDIA GPU, or a CPU whose highest clock is known")
    best = {}
    for row in rows:
        key = device_of(row), row["variant"]
        if key not in best or row["roofline_share"] > best[key]["roofline_share"]:
            best[key] = row
    devices = Devices(list(best.values()), 2, item="items")
    plot = Bars("Share of the roofline by variant")
    for device, _, whose in devices.names():
        plot.add_group(f"{shortened(short_device(device[2]), 60)} ({whose})")
        for row in sorted((row for (at, _), row in best.items() if at == device),
                          key=lambda row: (WORKLOADS.index(row.workload), -row["roofline_share"])):
            plot.add_bar(BOUNDS[row["bound"]], 100 * row["roofline_share"], roofline_words(row), row["variant"])
    plot.finish(BOUNDS.values(), "limited by", 55)
    plot.caption = ["Minimum time of a run's work at peak rates, divided by the run's median time; 100 % is the upper bound "
                    "(docs/timing.md). Each bar shows the variant's row with the largest share, the peak rate that limits "
                    "it, and the minimum time per item."] + devices.caption()
    return plot


def roofline_words(row):
    peak = row["peak_flops_per_s"] if row["bound"] == "compute" else row["peak_bytes_per_s"]
    least_us = row["roofline_share"] * row.micros("time_median_s")
    return (f"{100 * row['roofline_share']:.3g} % of {scaled(peak, PEAKS)}{BOUNDS[row['bound']][2]}, {micros_words(least_us)}"
            + ", not settled" * row.unsettled)


# ---- Images per second that loaders decode and resize, from rows of load and of scripts/compare/loading.py --decode ----

DECODING = "scripts/compare/loading.py --decode 224 --files DIR --shards DIR --bench ./fdsl-bench --out results/decode.csv"
# The decoders: the colour of their bars (plots/common.gp) and their names in the legend.
DECODERS = {"hardware": (7, "the GPU's JPEG engines"), "hybrid": (3, "CUDA kernels of nvJPEG"), "cpu": (5, "CPU threads")}
WORKERS = (8, "PyTorch's workers")
OTHERS = {"torch": WORKERS, "webdataset": WORKERS, "dali": (6, "NVIDIA DALI")}


def decoder_of(row):
    return OTHERS.get(row["variant"].split("-")[0]) or DECODERS[row["decoded_by"] or "cpu"]


def fastest(rows):
    """Returns one row per device, variant and decoder: the fastest of its numbers of threads."""
    best = {}
    for row in sorted(rows, key=lambda row: row["items_per_s"]):
        best[device_of(row), row["variant"], decoder_of(row)] = row
    return list(best.values())


def decoding(measured):
    decoded = [row for row in measured.loads if row["out_res"] and row["ranks"] == 1 and not row["skipped"] and not row["compute_ms"]]
    rows = fastest(of_one_job(decoded, lambda row: (row["out_res"], row["fit"])))
    if not rows:
        raise Missing(DECODING, measured.loads)
    devices = Devices(rows, 2, "samples")
    shown = sorted((row for row in rows if device_of(row) in devices.groups), key=lambda row: -row["items_per_s"])
    plot = Bars("Decoding: images per second by loader")
    for row in shown:
        rate, threads = row["items_per_s"], f"{row['threads']:.0f} thread{'s' * (row['threads'] != 1)}"
        plot.add_bar(decoder_of(row), rate / 1e3, f"{count_words(rate)} images/s, {threads}" + ", not settled" * row.unsettled, of_device(row))
    x_high = 1.05 * max(row["items_per_s"] for row in shown) / 1e3
    plot.finish((*DECODERS.values(), WORKERS, OTHERS["dali"]), "decoded by", 0.55 * x_high, x_high, wide=True)
    first = shown[0]
    plot.caption = [f"Images of {first['sample_bytes'] / 1e3:.3g} kB, resized to {first['out_res']} × {first['out_res']} pixels (--fit "
                    f"{first['fit']}). Each loader uses its fastest number of threads. Loaders on a GPU deliver batches in GPU "
                    "memory. For PyTorch's DataLoader, the number of threads is the number of worker processes."]
    plot.caption += devices.caption()
    plot.notes += about_yours(measured.loads, newest(decoded), shown, ("data", "threads", "batch", "chunk", "out_res", "fit"), DECODING)
    return plot


# ---- Embedding sets: bytes per second as a share of the measured bandwidth, from rows of the workload ops ----

STEPPING = "scripts/sweep/run.sh configs/sweep_ops.tsv"
SET = ("data", "tensor", "dim", "bad", "duplicates", "norm_min", "norm_max")  # equal in all bars
STEPS = ("mask", "compact", "permute", "convert", "hash")
# A reference bandwidth: its colour (plots/common.gp) and its name in the legend.
IN_GPU, TO_GPU, ON_CPU = (6, "a copy in GPU memory"), (3, "copies to the GPU"), (5, "STREAM triad on the CPU")


def compared_with(row):
    return ON_CPU if not row.on_gpu else IN_GPU if row["resident"] == "1" else TO_GPU


def steps_of(row):
    """Returns the sort key of a group of bars: the positions of its steps in STEPS, the type of the rows, and the options of the steps."""
    return ([(*STEPS, step).index(step) for step in row["steps"].split(",")], row["steps"], row["dtype"] != DEFAULTS["ops"]["dtype"],
            row["dtype"], row["to"], row["fp8"], row["dedup"], row["sample"])


def steps_words(row):
    words = [f"convert to {row['to']}" if step == "convert" else step for step in row["steps"].split(",")]
    words += [f"--fp8 {row['fp8']}"] * (row["fp8"] == "nan") + ["--dedup"] * (row["dedup"] == "1")
    words += [f"--sample {row['sample']}"] * bool(row["sample"])
    return ", ".join(words) + (f"; {row['dtype']} rows" if row["dtype"] != DEFAULTS["ops"]["dtype"] else "")


def best_rows(rows):
    """Returns one row per bar: the row of the largest set; if there are several such rows, the newest."""
    best = {}
    for row in sorted(rows, key=lambda row: (row["items"], row["time_utc"])):
        best[device_of(row), row["variant"], compared_with(row), row["async"], *map(str, steps_of(row))] = row
    return list(best.values())


def share_words(row):
    return (f"{100 * row['stream_share']:.3g} % of {count_words(row['stream_bytes_per_s'])}B/s, {count_words(row['items'])} rows"
            + ", --async off" * (row["async"] == "off") + ", not settled" * row.unsettled)


def ops(measured):
    rows = best_rows(of_one_job((row for row in measured.embeddings if row["ranks"] == 1 and row["stream_share"]
                                 and row["stream_bytes_per_s"]),
                                lambda row: tuple(row.settings[column] for column in SET)))  # norm_min and norm_max are empty without mask
    if not rows:
        raise Missing(STEPPING, measured.embeddings)
    devices = Devices(rows, 2, item="rows")
    shown = [row for row in rows if device_of(row) in devices.groups]
    def order(row):
        return (steps_of(row), not row.on_gpu, devices.groups[device_of(row)], compared_with(row) == TO_GPU, row["async"] == "off",
                row["variant"])
    plot, last = Bars("Embedding sets: share of the measured bandwidth by steps"), None
    for row in sorted(shown, key=order):
        if steps_of(row) != last:
            last = steps_of(row)
            plot.add_group(steps_words(row))
        plot.add_bar(compared_with(row), 100 * row["stream_share"], share_words(row), of_device(row))
    x_high = max(100, 20 * -(-max(100 * row["stream_share"] for row in shown) // 20))
    plot.finish((IN_GPU, TO_GPU, ON_CPU), "100 % is the speed of", 0.5 * x_high, x_high, wide=True)
    first = shown[0]
    plot.caption = [f"{'Rows of files' if first['data'] else 'Generated rows'} of {first['dim']} values, "
                    f"{DEFAULTS['ops']['dtype']} unless stated. Bytes that any program must move (with copies to the GPU: bytes of "
                    "the rows) per second, as a share of the bandwidth that the same run measured (docs/ops.md)."]
    plot.caption += devices.caption()
    plot.notes += about_yours(measured.embeddings, newest(measured.embeddings), shown,
                              ("ranks", "rows", "dim", "threads", "bad", "duplicates", "seed"), STEPPING)
    return plot


# ---- Uneven ranks: their speed together, divided by the sum of their speeds alone, from rows of the workload train ----

BALANCING = "scripts/compare/balance.py --threads 3,1 --out results/balance.csv -- --model lenet --batch 256 --epochs 8"
FIRST_COUNTED = 3  # epoch: `measured` begins with equal shares, and changes them after the first epoch
BALANCES = {"equal": (8, "equal"), "measured": (6, "measured"), "memory": (5, "memory")}  # colours, and names in the legend
RANK_ON_CPU = "train-omp"  # the variant of ranks on CPUs that train together with GPUs
OTHER_BALANCE = (3, "a list of shares")


def training_of(row):
    """Returns the values that all training runs of one comparison share. The batch is per rank."""
    return (sweep_of(row), row["host"], row["batch"] / row["ranks"], row["train_samples"], row["test_samples"],
            *(row.settings[column] for column in TRAINING_JOB if column != "batch"))


def speed(rows):
    """Returns the median of samples per second over the counted epochs; None without such an epoch."""
    rates = [row["items_per_s"] for row in rows if row["epoch"] >= FIRST_COUNTED]
    return statistics.median(rates) if rates else None


def comparisons(rows):
    """Returns [(rows of the ranks alone, {balance: rows of all ranks together})]. A run of all ranks is compared with runs
    on single ranks that have the same job and the same variant (on CPUs: train-omp). There must be one such run per rank, and
    the sum of their threads must equal the threads of the run of all ranks."""
    alone, together = (collections.defaultdict(lambda: collections.defaultdict(list)) for _ in range(2))
    for row in rows:
        if row["ranks"] == 1:
            alone[training_of(row)][row["variant"], row["device"], row["threads"]].append(row)
        elif row["scaling"] == "weak":
            together[training_of(row), row["variant"], row["ranks"], row["threads"]][row["balance"]].append(row)
    found = []
    for (job, variant, ranks, threads), by_balance in together.items():
        members = [epochs for (name, *_), epochs in alone[job].items() if name in (variant, RANK_ON_CPU) and speed(epochs)]
        by_balance = {balance: epochs for balance, epochs in by_balance.items() if speed(epochs)}
        if by_balance and len(members) == ranks and sum(epochs[0]["threads"] for epochs in members) == threads:
            found.append((sorted(members, key=speed, reverse=True), by_balance))
    return found


def rank_words(row):
    where = short_device(row["device"]) if row.on_gpu else f"{row['threads']:.0f} CPU thread{'s' * (row['threads'] != 1)}"
    return f"{row['variant']} on {where}"


def ranks_heading(members, epochs):
    row = epochs[-1]
    return shortened(f"{' and '.join(rank_words(member[0]) for member in members)}, {row['batch']:.0f} samples per step", 100)


def balance(measured):
    candidates = [row for row in measured.trains if row["feed"] != "constant" and not row["init"]]
    found = comparisons(candidates)
    if not found:
        raise Missing(BALANCING, measured.trains)
    found.sort(key=lambda pair: (any(row.source != "yours" for row in pair[0][0]), not pair[0][0][0].on_gpu,
                                 ranks_heading(pair[0], next(iter(pair[1].values())))))
    titles = [ranks_heading(members, next(iter(by_balance.values()))) for members, by_balance in found]
    plot = Bars("Speed of uneven ranks by --balance")
    for (members, by_balance), title in zip(found, titles):
        total = sum(map(speed, members))
        plot.add_group(title + f" ({members[0][0]['revision']})" * (titles.count(title) > 1))
        for name in sorted(by_balance, key=lambda name: (list(BALANCES) + [name]).index(name)):
            share = 100 * speed(by_balance[name]) / total
            plot.add_bar(BALANCES.get(name, OTHER_BALANCE), share, f"{share:.0f} % of {total:,.0f} samples/s", name)
    shown = [row for members, by_balance in found for epochs in (*members, *by_balance.values()) for row in epochs]
    widest = max(value for bars in plot.bars.values() for value, *_ in bars)
    plot.finish(list(plot.bars), "--balance", 55, max(100, 5 * -(-widest // 5)))
    plot.caption = [f"Samples per second of all ranks together, divided by the sum of the speeds at which each rank trains alone. "
                    f"Medians of the epochs from epoch {FIRST_COUNTED} on, because --balance measured begins with equal shares."]
    plot.caption += Devices(shown, item="first steps").caption()
    plot.notes += about_yours([row for row in candidates if row["balance"]], [], shown, ("ranks", "balance"), BALANCING)
    return plot
