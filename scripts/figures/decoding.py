"""The figure of decoding: images per second that loaders decode and resize, from rows of the workload load and of
scripts/compare/loading.py --decode. scripts/figures/draw.py documents the return value."""

import collections

from devices import Devices, Missing, about_yours, device_of
from plot import HEIGHT, Plot, count_words, short_device, shortened, text_px
from rows import newest, of_one_job

COMMAND = "scripts/compare/loading.py --decode 224 --files DIR --shards DIR --bench ./fdsl-bench --out results/decode.csv"
# The decoders: the colour of their bars (plots/common.gp) and their names in the legend.
DECODERS = {"hardware": (7, "the GPU's JPEG engines"), "hybrid": (3, "CUDA kernels of nvJPEG"), "cpu": (5, "CPU threads")}
WORKERS = (8, "PyTorch's workers")
OTHERS = {"torch": WORKERS, "webdataset": WORKERS, "dali": (6, "NVIDIA DALI")}
ROW_PX, INSIDE = 22, 0.55  # height of a bar; from this share of the axis on, the text is inside the bar


def decoder_of(row):
    return OTHERS.get(row["variant"].split("-")[0]) or DECODERS[row["decoded_by"] or "cpu"]


def job_of(row):
    return row["out_res"], row["fit"]


def best_rows(rows):
    """Returns one row per device, variant and decoder: the fastest of its numbers of threads."""
    best = {}
    for row in sorted(rows, key=lambda row: row["items_per_s"]):
        best[device_of(row), row["variant"], decoder_of(row)] = row
    return list(best.values())


def figure(measured):
    decoded = [row for row in measured.loads if row["out_res"] and row["ranks"] == 1 and not row["skipped"] and not row["compute_ms"]]
    rows = best_rows(of_one_job(decoded, job_of))
    if not rows:
        raise Missing(COMMAND, measured.loads)
    devices = Devices(rows, 2, "samples")
    shown = sorted((row for row in rows if device_of(row) in devices.groups), key=lambda row: -row["items_per_s"])
    plot = Plot("Decoding: images per second by loader")
    bars, names, y = collections.defaultdict(list), [], 0
    for row in shown:
        y -= 1
        rate = row["items_per_s"]
        bars[decoder_of(row)].append((rate / 1e3, y, f"{count_words(rate)} images/s, {row['threads']:.0f} thread{'s' * (row['threads'] != 1)}"
                                      + ", not settled" * row.unsettled))
        where = shortened(short_device(row["device"]), 30)
        names.append((y, f"{row['variant']}, {where}{' (yours)' * (row.source == 'yours')}"))
    kinds = [kind for kind in (*DECODERS.values(), WORKERS, OTHERS["dali"]) if bars[kind]]
    plot.blocks = [*(bars[kind] for kind in kinds), names, [(0, "")]]
    plot.legend = [(0, "decoded by")] + [(-slot, name) for slot, name in kinds]
    plot.left = int(30 + max(text_px(name, 10.5) for _, name in names))
    plot.width += plot.left
    plot.height = max(HEIGHT, int(200 - ROW_PX * y))
    x_high = 1.05 * max(row["items_per_s"] for row in shown) / 1e3
    plot.variables = {"y_low": y - 0.8, "y_high": -0.3, "inside": INSIDE * x_high, "x_high": x_high, "kinds": len(kinds),
                      "kind_slot": [slot for slot, _ in kinds]}
    first = shown[0]
    plot.caption = [f"Images of {first['sample_bytes'] / 1e3:.3g} kB, resized to {first['out_res']} × {first['out_res']} pixels (--fit "
                    f"{first['fit']}). Each loader uses its fastest number of threads. Loaders on a GPU deliver batches in GPU "
                    "memory. For PyTorch's DataLoader, the number of threads is the number of worker processes."]
    plot.caption += devices.caption()
    plot.notes += about_yours(measured.loads, newest(decoded), shown, ("data", "threads", "batch", "chunk", "out_res", "fit"), COMMAND)
    return plot
