"""The figure of rooflines: the minimum possible time of each variant's work divided by its measured time, from rows of the
workloads synth, load, train and infer. scripts/figures/draw.py documents the return value."""

from devices import Devices, Missing, device_of
from plot import HEIGHT, Plot, micros_words, short_device, shortened

# A bound's colour (plots/common.gp), its name in the legend, and the unit of its peak rate.
BOUNDS = {"compute": (6, "FLOPs", "FLOP/s"), "memory": (5, "memory bandwidth", "B/s"), "bus": (3, "bus bandwidth", "B/s")}
WORKLOADS = ("synth", "load", "train", "infer")
ROW_PX = 22
INSIDE = 55  # from this percentage on, the text is inside the bar


def figure(measured):
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
    plot = Plot("Share of the roofline by variant")
    bars, names, headings, y = {bound: [] for bound in BOUNDS}, [], [], 0
    for device, _, whose in devices.names():
        headings.append((y, f"{shortened(short_device(device[2]), 60)} ({whose})"))
        for row in sorted((row for (at, _), row in best.items() if at == device), key=order):
            y -= 1
            bars[row["bound"]].append(bar(row, y))
            names.append((y, row["variant"]))
        y -= 1.3
    kinds = [bound for bound in BOUNDS if bars[bound]]
    plot.blocks = [bars[bound] for bound in kinds] + [names, headings]
    plot.legend = [(0, "limited by")] + [(-BOUNDS[bound][0], BOUNDS[bound][1]) for bound in kinds]
    plot.left = 150
    plot.height = max(HEIGHT, int(200 - ROW_PX * y))
    plot.variables = {"y_low": y + 0.5, "y_high": 0.7, "inside": INSIDE, "kinds": len(kinds),
                      "kind_slot": [BOUNDS[bound][0] for bound in kinds]}
    plot.caption = ["Minimum time of a run's work at peak rates, divided by the run's median time; 100 % is the upper bound "
                    "(docs/roofline.md). Each bar shows the variant's row with the largest share, the peak rate that limits "
                    "it, and the minimum time per item."] + devices.caption()
    return plot


def order(row):
    """Sort key of bars: by workload, then by decreasing share."""
    workload = row["schema"].split("/")[0]
    return WORKLOADS.index(workload), -row["roofline_share"]


def bar(row, y):
    """Returns (share in %, y, text)."""
    unit = BOUNDS[row["bound"]][2]
    share = 100 * row["roofline_share"]
    peak = row["peak_flops_per_s"] if row["bound"] == "compute" else row["peak_bytes_per_s"]
    least_us = row["roofline_share"] * row.micros("time_median_s")
    settled = ", not settled" if row.unsettled else ""
    return share, y, f"{share:.3g} % of {rate_words(peak)}{unit}, {micros_words(least_us)}{settled}"


def rate_words(value):
    for limit, prefix, scale in ((1e9, " M", 1e6), (1e12, " G", 1e9), (1e15, " T", 1e12), (float("inf"), " P", 1e15)):
        if value < 0.9995 * limit:
            return f"{value / scale:.3g}{prefix}"
    return ""
