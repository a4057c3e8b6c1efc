"""Figures of loading, from rows of the workload load. scripts/figures/draw.py documents the return values."""

import collections
import math
import statistics

from devices import SLOTS, Devices, Missing, about_yours, add_bar_devices, device_of, dot, series_over
from plot import INNER_PX, WIDTH, Plot, count_words, log_range, log_ticks, micros_tick, x_axis
from rows import newest, sweep_of

COMMAND = "scripts/sweep/reference_load.sh DIR results/load.csv"
ONE_THREAD = ("files", "files-uring", "shards", "shards-mmap", "shards-uring")
ALL_THREADS = ("files-omp", "shards-omp", "stream")
OTHERS = ("torch-files", "torch-shards", "webdataset")  # from scripts/compare/loading.py
OTHERS_TO_GPU = ("torch-files-gpu", "torch-shards-gpu")  # from scripts/compare/loading.py --gpu
NOT_OURS = OTHERS + tuple(f"{name}-inline" for name in OTHERS) + ("dali",) + OTHERS_TO_GPU
IN_ORDER, SHUFFLED = "in order", "shuffled"
COPIES = 90  # the line style of memcpy on a device is this number plus the device's group
NEAREST_BYTES = 1 << 14  # figures that show one sample size prefer the size nearest to this one
DEVICES = 2  # at most, per figure, because the other dashes show the order or the page cache
SHIFT = 0.13  # between the points of neighbouring variants in the figure loading, in powers of two
# Columns that are constant along a line. The field of an option that does not apply to a loader can be empty.
FREE = ("batch", "seed", "epochs", "iodepth", "block", "readahead", "prefetch", "lanes", "shuffle", "shards")
ERROR_BARS = "Median epoch time divided by the number of samples; whiskers: minimum to 95th percentile."


# ---- Selection -------------------------------------------------------------------------------------------------


def plain_rows(measured, variants, cache, threads=None):
    """Returns rows of one rank that load whole sets and do nothing else (no decoding, no training step). They are the newest of
    each measurement per file and revision. Third-party loaders count as warm: they do not set the state of the page cache, but
    read all data once before the timing."""
    return [row for row in measured.load_sweeps
            if row["variant"] in variants and row["ranks"] == 1 and threads in (None, row["threads"])
            and (row["cache"] == cache or (cache == "warm" and row["variant"] in OTHERS))
            and not row["skipped"] and row["decode"] != "1" and row["augment"] != "1" and not row["compute_ms"]]


def order_of(row):
    """Returns the order of the samples. Files are always shuffled globally. Shards are always shuffled, but the samples of a
    shard only with --shuffle."""
    return IN_ORDER if row["store"] == "shards" and row["shuffle"] in ("", "0") else SHUFFLED


def kept_fixed(row):
    return sweep_of(row) + tuple(row[column] for column in FREE if column != "shuffle" or row["store"] == "shards")


def preferred(row):
    """Key for max(): the row with the most default options, then the newest."""
    return -len(row.given()), row["time_utc"]


def line_of(row):
    return device_of(row), row["variant"], order_of(row)


def of_one_size(rows):
    """Returns the rows of one sample size for all devices. Prefers a size that the user's rows have, then the size with most
    devices, then the size with the most rows, then the size nearest to NEAREST_BYTES."""
    found = collections.defaultdict(set)
    for row in rows:
        found[row["sample_bytes"]].add((*line_of(row), row["threads"], row["cache"]))
    def worth(size):
        devices = {device for device, *_ in found[size]}
        return (any(device[0] == "yours" for device in devices), len(devices), len(found[size]),
                -abs(math.log(size / NEAREST_BYTES)))
    best = max(found, key=worth, default=None)
    return [row for row in rows if row["sample_bytes"] == best]


def need(measured, rows):
    if not rows:
        raise Missing(COMMAND, measured.loads)
    return Devices(rows, DEVICES, "samples")


# ---- Words -----------------------------------------------------------------------------------------------------


def size_words(size):
    return f"{size / 1024:.4g} KiB" if size >= 1024 else f"{size:.0f} bytes"


def range_words(values, words=lambda value: f"{value:.0f}"):
    """Returns '32', or '32 to 64' if values differ."""
    return " to ".join(dict.fromkeys(map(words, (min(values), max(values)))))


def about_sets(rows):
    """Returns a sentence on the data set, batches and shuffling."""
    total = range_words([row["items"] / float(row["epochs"] or 1) * row["sample_bytes"] / 1e6 for row in rows],
                        lambda mb: f"{float(f'{mb:.3g}'):.10g}")
    shards = [row["shards"] for row in rows if row["shards"]]
    buffers = [float(row["shuffle"]) for row in rows if row["store"] == "shards" and order_of(row) == SHUFFLED]
    return (f"Sets of {total} MB" + (f", {range_words(shards)} shards" if shards else "")
            + f"; batch size {range_words([row['batch'] for row in rows])}. Files are shuffled globally"
            + (f", shards with a buffer of {range_words(buffers)} samples." if buffers else "."))


def about_others(rows):
    names = [name for name in OTHERS if any(row["variant"] == name for row in rows)]
    return (f" {', '.join(names)}: PyTorch's DataLoader after a warm-up epoch; its number of threads is the number of worker processes."
            if names else "")


# ---- Lines -----------------------------------------------------------------------------------------------------


def style_of(devices, row):
    """Returns a line style: filled points for samples in order, open points for shuffled samples, dashes by device."""
    return 10 * (devices.groups[device_of(row)] + 4 * (order_of(row) == SHUFFLED)) + SLOTS[row["variant"]]


def add_lines(plot, devices, lines, x, point, copied, note):
    """Adds series and legend, device by device: memcpy, then samples in order, then shuffled samples. `point` returns (median,
    low, high) of a row. `copied` returns the same quantity for its memcpy. `note` returns a suffix for the line below the
    device's name."""
    both = len({device[0] for device in devices.groups}) > 1
    for device, name, whose in devices.names():
        crossed = int(both and device[0] == "yours")  # a cross distinguishes the user's points, even where a point has no line
        before = len(plot.blocks)
        mine = [points for points in lines if device_of(points[0]) == device]
        plot.legend += [(0, line) for line in name] + [(0.5, whose + note(mine[0][0]))] + [(0.5, "points with a cross")] * crossed
        copies = collections.defaultdict(list)
        for row in (row for points in mine for row in points if row["copy_bytes_per_s"]):
            copies[x(row)].append(copied(row))
        if copies:
            plot.add_series(COPIES + devices.groups[device], "memcpy alone",
                            [(at, *[statistics.median(copies[at])] * 3) for at in sorted(copies)])
        for order in (IN_ORDER, SHUFFLED):
            of_order = sorted((points for points in mine if order_of(points[0]) == order),
                              key=lambda points: list(SLOTS).index(points[0]["variant"]))
            plot.legend += [(0.5, f"samples {order}")] * bool(of_order)
            for points in of_order:
                plot.add_series(style_of(devices, points[0]), points[0]["variant"],
                                [(x(row), *point(row)) for row in points])
                plot.rings += [(x(row), point(row)[0]) for row in points if row.unsettled]
        plot.crossed += [crossed] * (len(plot.blocks) - before)


def lines_plot(measured, plot, devices, lines, candidates, words, axis):
    """Fills in the common parts of line figures. `words` formats the y ticks. `axis` returns the x axis for a list of x values."""
    shown = [row for points in lines for row in points]
    low, high = log_range([value for points in plot.blocks for _, *values in points for value in values])
    plot.variables = {**({"series_crossed": plot.crossed} if plot.crossed else {}),
                      **log_ticks(low, high, words), **axis(sorted({at for points in plot.blocks for at, *_ in points}))}
    plot.caption += devices.caption()
    plot.notes += about_yours(measured.loads, newest(candidates), shown, ("data", "sample_bytes", "threads") + FREE, COMMAND)
    plot.add_rings()
    return plot


def powers_axis(xs, px=INNER_PX):
    """Returns an axis with ticks at powers of two, at least two of them."""
    def ticks(margin):
        low, high = min(xs) / margin, max(xs) * margin
        return low, high, [2.0**e for e in range(-10, 64) if low <= 2.0**e <= high]
    low, high, at = ticks(1.3)
    return x_axis(low, high, at, px) if at[1:] else x_axis(*ticks(2.2), px)


def threads_axis(xs):
    """Returns an axis with ticks at the measured values; a single value gets a second tick at its double."""
    at = xs if xs[1:] else [xs[0], 2 * xs[0]]
    return x_axis(min(at) / 1.3, max(at) * 1.3, at)


def sizes(measured):
    rows = plain_rows(measured, ONE_THREAD + OTHERS, "warm", 1)
    lines = series_over(rows, "sample_bytes", line_of, kept_fixed, preferred)
    devices = need(measured, [row for points in lines for row in points])
    lines = [points for points in lines if device_of(points[0]) in devices.groups]
    plot = Plot("Loading: time per sample vs. sample size")
    add_lines(plot, devices, lines, lambda row: row["sample_bytes"] / 1024,
              lambda row: tuple(map(row.micros, ("time_median_s", "time_min_s", "time_p95_s"))),
              lambda row: 1e6 * row["sample_bytes"] / row["copy_bytes_per_s"], lambda row: "")
    panels = panels_by_order(plot)
    shown = [row for points in lines for row in points]
    plot.caption = [f"Warm page cache, one thread. {about_sets(shown)}{about_others(shown)} {ERROR_BARS} memcpy: a copy of the "
                    "same bytes, measured alternately with the runs; median over variants. Points of one size are shifted sideways, by variant."]
    shifts = panels["series_shift"]
    lines_plot(measured, plot, devices, lines, rows, micros_tick,
               lambda xs: powers_axis([min(xs) * min(shifts), max(xs) * max(shifts)], panels["panel_px"]))
    plot.variables.update(panels)
    return plot


def panels_by_order(plot):
    """Divides the lines into one panel per order of the samples, next to each other. Returns the variables of plots/loading.gp."""
    open_points = [style // 10 > DEVICES + 2 and style < COPIES for style in plot.styles]
    orders = sorted({at for at, style in zip(open_points, plot.styles) if style < COPIES})
    series_panel = [0 if style > COPIES else 1 + orders.index(at) for at, style in zip(open_points, plot.styles)]
    shifts = [1.0] * len(plot.styles)
    for panel in range(1, 1 + len(orders)):
        slots = sorted({style % 10 for style, at in zip(plot.styles, series_panel) if at == panel})
        step = min(SHIFT, 4 * SHIFT / max(1, len(slots) - 1))
        for i, style in enumerate(plot.styles):
            if series_panel[i] == panel:
                shifts[i] = 2 ** (step * (slots.index(style % 10) - (len(slots) - 1) / 2))
    plot.rings = [(x, y, series_panel[i], shifts[i]) for x, y in plot.rings
                  for i, points in enumerate(plot.blocks) if series_panel[i] and (x, y) in [point[:2] for point in points]]
    plot.width += 240 * (len(orders) - 1)
    plot.top = 64
    gap = 40
    return {"panels": len(orders), "panel_title": [f"samples {(IN_ORDER, SHUFFLED)[order]}" for order in orders], "gap": gap,
            "panel_px": (INNER_PX + plot.width - WIDTH - gap * (len(orders) - 1)) / len(orders),
            "series_panel": series_panel, "series_shift": shifts,
            "series_crossed": plot.crossed}


def threads(measured):
    rows = plain_rows(measured, ALL_THREADS + OTHERS, "warm")
    rows_of_ours = [row for row in rows if row["variant"] in ALL_THREADS]
    chosen = {(device_of(row), row["sample_bytes"]) for row in of_one_size(rows_of_ours)}
    lines = series_over([row for row in rows if (device_of(row), row["sample_bytes"]) in chosen], "threads", line_of, kept_fixed, preferred)
    devices = need(measured, [row for points in lines for row in points])
    lines = [points for points in lines if device_of(points[0]) in devices.groups]
    plot = Plot("Loading: throughput vs. threads")
    add_lines(plot, devices, lines, lambda row: row["threads"], rates, lambda row: row["copy_bytes_per_s"],
              lambda row: f", {size_words(row['sample_bytes'])} per sample")
    shown = [row for points in lines for row in points]
    plot.caption = [f"Warm page cache. {about_sets(shown)}{about_others(shown)} Median of epochs; whiskers: rates at the "
                    "95th percentile and the minimum of the times. memcpy: a copy of the same bytes with the same number "
                    "of threads, measured alternately with the runs; median over variants."]
    return lines_plot(measured, plot, devices, lines, rows, count_words, threads_axis)


def rates(row):
    """Returns bytes per second at the median, the 95th percentile and the minimum time."""
    return tuple(row["items"] * row["sample_bytes"] / row[column]
                 for column in ("time_median_s", "time_p95_s", "time_min_s"))


CALLS = {"open": 6, "read": 2, "close": 5}  # each system call and its slot (plots/common.gp)
QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


def latency(measured):
    rows = [row for cache in ("warm", "cold") for row in plain_rows(measured, ("files",), cache, 1)
            if row["open_p50_s"]]
    chosen = {}
    for row in sorted(of_one_size(rows), key=preferred):
        chosen[device_of(row), row["cache"]] = row
    devices = need(measured, list(chosen.values()))
    plot = Plot("Loading: latency of file system calls")
    for device, name, whose in devices.names():
        size = next(row["sample_bytes"] for (other, _), row in chosen.items() if other == device)
        plot.legend += [(0, line) for line in name] + [(0.5, f"{whose}, {size_words(size)} per sample")]
        for cache in ("warm", "cold"):
            row = chosen.get((device, cache))
            plot.legend += [(0.5, f"page cache {cache}")] * bool(row)
            for call, slot in CALLS.items() if row else ():
                points = [(1 / (1 - at), *[1e6 * row[f"{call}_{name}_s"]] * 3) for name, at in QUANTILES.items()
                          if row[f"{call}_{name}_s"]]
                plot.add_series(10 * (devices.groups[device] + 4 * (cache == "cold")) + slot, call, points)
    shown = [row for row in chosen.values() if device_of(row) in devices.groups]
    plot.caption = [f"Latency quantiles over all calls of an epoch of files, one thread. {about_sets(shown)}"]
    lines_plot(measured, plot, devices, [shown], rows, micros_tick,
               lambda _: x_axis(1.6, 1250, [1 / (1 - at) for at in QUANTILES.values()]))
    plot.variables["x_tick_text"] = ["p50", "p99", "p99.9"]
    return plot


# ---- Dots ------------------------------------------------------------------------------------------------------


def dots_plot(plot, devices, groups, slots):
    """Fills in a figure of dots. `groups` has pairs (device, rows), with one row or None per slot. The bold text above a
    dot is its speed relative to the variant files in the same slot on the same device."""
    box = 0.8 / len(slots)
    plot.width = max(WIDTH, 240 + len(groups) * max(108, 56 * len(slots) + 12))
    names = [next(row for row in rows if row) for _, rows in groups]
    for b in range(len(slots)):
        plot.blocks.append([])
        for g, (device, rows) in enumerate(groups):
            if rows[b]:
                files = next((other[b] for at, other in groups if at == device and other[b]
                              and other[b]["variant"] == "files"), None)
                words = f"× {files.micros('time_median_s') / rows[b].micros('time_median_s'):.3g}" if files else ""
                plot.blocks[b].append(dot(1 + g + (b - (len(slots) - 1) / 2) * box, rows[b], words))
                plot.rings += [plot.blocks[b][-1][:2]] * rows[b].unsettled
    low, high = log_range([value for dots in plot.blocks for _, *values, _, _ in dots for value in values], 1.6)
    plot.blocks += [[(1 + g, row["variant"], order_of(row)) for g, row in enumerate(names)]]
    device_lines = add_bar_devices(plot, devices, groups)
    plot.variables = {"groups": len(groups), "dots": len(slots), "dot_slot": slots,
                      "device_lines": device_lines,
                      **log_ticks(low, log_range([high * 1.3], 1)[1], micros_tick)}
    plot.add_rings()
    return plot


def by_variant(devices, chosen):
    """Returns the keys (device, variant, order) of rows in the order in which they are drawn: by device, files first."""
    shown_devices = list(devices.groups)
    return sorted((key for key in chosen if key[0] in shown_devices),
                  key=lambda key: (shown_devices.index(key[0]), list(SLOTS).index(key[1]), key[2]))


def best_rows(rows):
    return {line_of(row): row for row in sorted(rows, key=preferred)}


TIMES_FILES = "Bold: speed relative to the variant files on the same device"


def cold(measured):
    cold_rows = plain_rows(measured, ONE_THREAD, "cold", 1)
    warm_rows = plain_rows(measured, ONE_THREAD, "warm", 1)
    chosen = best_rows(of_one_size(cold_rows))
    devices = need(measured, list(chosen.values()))
    size = next(row["sample_bytes"] for row in chosen.values())
    beside = best_rows(row for row in warm_rows if row["sample_bytes"] == size)
    plot = Plot("Loading: time per sample with a cold and a warm page cache")
    keys = by_variant(devices, chosen)
    shown = [chosen[key] for key in keys]
    warm = [beside[key] for key in keys if key in beside]
    slots = {6: "cold page cache", 2: "warm page cache"} if warm else {6: "cold page cache"}
    plot.legend = [(10 + slot + 0.1, state) for slot, state in slots.items()]
    dots_plot(plot, devices, [(key[0], (chosen[key], beside.get(key))[:len(slots)]) for key in keys], list(slots))
    blocks = [f"{range_words(read)} KiB {state}" for state, rows in (("cold", shown), ("warm", warm))
              if (read := [float(row["block"]) for row in rows if row["variant"] in ("shards", "shards-uring")])]
    plot.caption = [f"Samples of {size_words(size)}, one thread. "
                    f"{about_sets(shown + warm)}"
                    + (f" Reads of shards and shards-uring: {', '.join(blocks)}." if blocks else "")
                    + f" {TIMES_FILES} in the same cache state. {ERROR_BARS}"] + devices.caption()
    plot.notes += about_yours(measured.loads, newest(cold_rows), shown, ("data", "sample_bytes") + FREE, COMMAND)
    return plot


VIDEO_BYTES = 3 * 8 * 64 * 64 * 2  # bytes of a float16 sample of shape (3, 8, 64, 64)
NPY_HEADER_BYTES = 128


def is_video_job(row):
    return (row["sample_bytes"] in (VIDEO_BYTES, VIDEO_BYTES + NPY_HEADER_BYTES)
            and row["items"] / float(row["epochs"] or 1) == 1000 and row["shards"] in (None, 10))


def loops(measured):
    rows = list(filter(is_video_job, plain_rows(measured, ONE_THREAD, "warm", 1)))
    chosen = best_rows(rows)
    devices = need(measured, list(chosen.values()))
    plot = Plot("Loading: many epochs over 1000 samples of video")
    keys = by_variant(devices, chosen)
    dots_plot(plot, devices, [(key[0], (chosen[key],)) for key in keys], [6])
    shown = [chosen[key] for key in keys]
    plot.caption = [f"1000 samples of float16 (3, 8, 64, 64), {range_words([row['samples'] for row in shown])} loops, "
                    f"all in the page cache, one thread. {about_sets(shown)} {TIMES_FILES}. {ERROR_BARS}"] + devices.caption()
    plot.notes += about_yours(measured.loads, newest(rows), shown, ("data",) + FREE, COMMAND)
    return plot
