#!/usr/bin/env python3
"""Draws the figures: reads rows, selects what each figure shows, and has gnuplot draw it.

  scripts/figures.py [NAME ...]    all figures, or these

  --results DIR     the user's rows: DIR/*.csv (default: results)
  --reference DIR   the shipped ones and the published points (default: results/reference)
  --out DIR         where figures go: NAME.png, NAME.svg, NAME.pdf (default: plots under --results)
  --work DIR        where the numbers behind them go: NAME.dat and NAME.vars (default: build/plots)
  --commands        print the gnuplot commands instead of running them
  --list            print the names and what they show

A figure whose data is missing is skipped, with the command that measures it. Exit status: 0 done, 1 gnuplot
failed or a file could not be written, 2 usage or a file that cannot be used, 4 gnuplot is missing.
"""

import argparse
import collections
import difflib
import math
import pathlib
import signal
import sys

sys.dont_write_bytecode = True
from plot import (FORMATS, HEIGHT, ROOT, WIDTH, Failed, Plot, count_words, draw, log_range, log_ticks,  # noqa: E402
                  micros_tick, micros_words, need_gnuplot, nice_above, short_device, shortened, shown_path, text_px,
                  wrap)
from rows import DEFAULTS, BadInput, Measured  # noqa: E402

# Slots of plots/common.gp: the colour and point of a variant.
SLOTS = {"naive": 1, "omp": 2, "gbase": 3, "mem": 4, "rng": 5, "bat": 6, "fused": 7}
PUBLISHED_SLOTS = {"Python-CPU": 1, "CUDA-Baseline": 3, "CUDA-Batched": 6}
LADDER = ("gbase", "mem", "rng", "bat", "fused")
IN_FIGURES = ("naive", "omp", "gbase", "bat", "fused")
PUBLISHED_GROUP, PUBLISHED_CODE_GROUP = 5, 6
DEVICES_MAX = 4  # of a kind in one figure: as many dashes as plots/common.gp has
PAPER = "published: PDP 2026"

# The paper's job: one class, gray images as drawn. What figures vary is left open, and some options are empty where
# they do not apply.
VARIED = ("batch", "res", "vertices", "out_res", "seed", "instance")
APPLIES_NOT = ("preset", "preset_file", "fit", "mean", "std")
ERROR_BARS = "Median time of a run over its images; bars from the least to the 95th percentile."


class Missing(Exception):
    """No data for a figure; the text is the command that measures it."""


# ---- Selection -------------------------------------------------------------------------------------------------


def is_paper_job(row):
    """One class, that of the paper, in gray as drawn: what all figures but the monitor show."""
    return row.texts["out_res"] == row.texts["res"] and all(
        row.texts[column] == default or (column in APPLIES_NOT and not row.texts[column])
        for column, default in DEFAULTS.items() if column not in VARIED)


def paper_rows(measured, variants, **fixed):
    """Rows of one rank of the paper's job of these variants, with numeric columns of these values."""
    return [row for row in measured.rows
            if row["ranks"] == 1 and row["variant"] in variants and is_paper_job(row)
            and all(row[column] == value for column, value in fixed.items())]


def preferred(row):
    """For max(): of rows that differ in the batch alone, the one at 256, or the largest below, or the least above;
    then the most threads, then the newest."""
    batch = row["batch"]
    return (batch <= 256, batch if batch <= 256 else -batch, row["threads"], row["time_utc"])


def series_over(rows, x, free):
    """Lists of rows by rising x, one a device and variant: of the combinations of the `free` columns the one with
    most points, and among equals the preferred. Where any list has several points, those of one are left out."""
    groups = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row in rows:
        combination = tuple(row[column] for column in free)
        points = groups[device_of(row), row["variant"]][combination]
        if row[x] not in points or points[row[x]]["time_utc"] <= row["time_utc"]:
            points[row[x]] = row
    series = []
    for combinations in groups.values():
        best = max(combinations.values(), key=lambda points: (len(points), max(map(preferred, points.values()))))
        series.append([best[value] for value in sorted(best)])
    longest = max(map(len, series), default=0)
    return [points for points in series if len(points) > 1 or longest == 1]


def device_of(row):
    return row.source, row["host"], row["device"], row.on_gpu


class Devices:
    """The devices of a figure: the user's first, then the reference's; GPUs and CPUs apart, as their variants are.
    Each has a group of line styles of its own; of more than `most` of a kind the oldest are left
    out, but never all of the reference."""

    def __init__(self, rows, most=DEVICES_MAX):
        self.rows = collections.defaultdict(list)
        for row in rows:
            self.rows[device_of(row)].append(row)
        def order(device):
            newest = max(row["time_utc"] for row in self.rows[device])
            return device[0] == "yours", newest
        ranked = sorted(self.rows, key=order, reverse=True)
        self.groups, self.dropped = {}, 0
        for on_gpu in (True, False):
            of_kind = [device for device in ranked if device[3] == on_gpu]
            kept, rest = of_kind[:most], of_kind[most:]
            shipped = [device for device in rest if device[0] == "reference"]
            if shipped and kept[-1][0] == "yours":
                kept[-1] = shipped[0]
            self.dropped += len(rest)
            self.groups.update({device: 1 + i for i, device in enumerate(kept)})

    def style(self, row):
        return 10 * self.groups[device_of(row)] + SLOTS[row["variant"]]

    def names(self):
        """(device, heading lines): whose it is, and the host where the same device is there twice."""
        count = collections.Counter(device[2] for device in self.groups)
        for device in self.groups:
            source, host, name, _ = device
            whose = "yours" if source == "yours" else "reference"
            yield device, wrap(short_device(name), 190, 11), whose + (f", {host}" if count[name] > 1 else "")

    def caption(self):
        """Sentences: full names, revisions, and whether images were verified."""
        texts = []
        for device, rows in ((device, self.rows[device]) for device in self.groups):
            source, host, name, on_gpu = device
            revisions = sorted({row["revision"] for row in rows})
            threads = sorted({int(row["threads"] / (row["ranks"] if row["rank"] == "all" else 1)) for row in rows
                              if not on_gpu})
            texts.append(f"{name}{', ' + threads_words(threads) if threads else ''} "
                         f"({'rows of yours' if source == 'yours' else 'reference rows'}, host {host}, "
                         f"revision {', '.join(revisions[:3])}{' …' if revisions[3:] else ''})")
        shown = [row for device in self.groups for row in self.rows[device]]
        unverified = sorted({row["variant"] for row in shown if row["verified"] != "yes"})
        texts = ["; ".join(texts) + "."] if texts else []
        if shown:
            texts[0] += " All images verified." if not unverified else f" Not verified: {', '.join(unverified)}."
        if self.dropped:
            texts[0] += f" Not shown: {self.dropped} more device{'s' if self.dropped > 1 else ''}."
        throttled = sorted({row["variant"] for row in shown if row.get("throttled")})
        if throttled:
            texts[0] += f" Clocks were held down: {', '.join(throttled)}."
        return texts


def threads_words(threads):
    return " and ".join(map(str, threads)) + (" thread" if threads == [1] else " threads")


# ---- The paper's figures: time over a parameter ----------------------------------------------------------------


def published_series(measured, figure):
    series = collections.defaultdict(list)
    for point in measured.published:
        if point["figure"] == figure:
            series[point["series"]].append((point["x"], point["y"]))
    return {name: sorted(points) for name, points in series.items()}


def lines_plot(measured, title, figure, x, fixed, free, command, caption):
    """Time an image over column x: ours by device, the published points, and the published code where it was timed
    over batches."""
    plot = Plot(title)
    ours = series_over(paper_rows(measured, IN_FIGURES, **fixed), x, free)
    devices = Devices([row for points in ours for row in points])
    add_ours(plot, devices, ours, x)
    add_published(measured, plot, figure)
    if figure == "batchsize":
        add_published_code(measured, plot)
    if not plot.blocks:
        raise Missing(command)
    low, high = log_range([value for points in plot.blocks for _, *values in points for value in values])
    plot.variables = {"series": len(plot.blocks), "series_style": plot.styles, **log_ticks(low, high, micros_tick),
                      **x_range([at for points in plot.blocks for at, *_ in points], x)}
    plot.caption = [f"{caption} {ERROR_BARS}"] + devices.caption()
    if not ours:
        plot.caption.append("No row of ours: the published points alone.")
    if not any(points[0].source == "yours" for points in ours):
        plot.notes.append(f"no rows of yours; to measure them: {command}")
    return plot


def add_ours(plot, devices, ours, x):
    """Series and legend, device by device."""
    for device, name, whose in devices.names():
        plot.legend += [(0, line) for line in name] + [(0.5, whose)]
        for points in sorted((points for points in ours if device_of(points[0]) == device),
                             key=lambda points: SLOTS[points[0]["variant"]]):
            label = points[0]["variant"] + (f", batch {points[0]['batch']:.0f}" if x != "batch" else "")
            plot.add_series(devices.style(points[0]), label,
                            [(row[x], *map(row.micros, ("time_median_s", "time_min_s", "time_p95_s")))
                             for row in points])


def add_published(measured, plot, figure):
    plot.legend.append((0, PAPER))
    for name, points in published_series(measured, figure).items():
        plot.add_series(10 * PUBLISHED_GROUP + PUBLISHED_SLOTS.get(name, 8), name,
                        [(at, *[1e3 * ms] * 3) for at, ms in points])


def x_range(xs, x):
    """The range of the x axis: linear for vertices, a factor around the others."""
    if x == "vertices":
        room = 0.05 * (max(xs) - min(xs)) or 1
        return {"x_low": max(0, min(xs) - room), "x_high": max(xs) + room}
    low, high = min(xs) / 1.3, max(xs) * 1.3
    return {"x_low": low, "x_high": high, **(side_ticks(xs, low, high) if x == "res" else {})}


def side_ticks(sides, low, high):
    """Ticks at the sides measured; a label that would touch the one before it stays empty."""
    px = (WIDTH - 84 - 190) / math.log(high / low)
    at, text, last = sorted(set(sides)), [], -math.inf
    for side in at:
        fits = math.log(side) * px - last > 34
        text.append(f"{side:.0f}" if fits else "")
        last = math.log(side) * px if fits else last
    return {"ticks": len(at), "tick_at": at, "tick_text": text}


def add_published_code(measured, plot):
    points = [(point["batch"], *[1e6 * point["published_s_per_image"]] * 3) for point in measured.published_code
              if point["variant"] == "bat"]
    if points:
        plot.legend += [(0, "published code"), (0.5, "on an NVIDIA H200")]
        plot.add_series(10 * PUBLISHED_CODE_GROUP + SLOTS["bat"], "CUDA-Batched", sorted(points))


def vertices(measured):
    return lines_plot(measured, "Time an image over its vertices", "nvertex", "vertices", {"res": 512},
                      ("batch", "threads", "seed", "instance"), "scripts/sweep.sh configs/sweep_vertices.tsv",
                      "512 × 512 pixels, 200 orbits.")


def resolution(measured):
    return lines_plot(measured, "Time an image over its side", "res", "res", {"vertices": 1000},
                      ("batch", "threads", "seed", "instance"), "scripts/sweep.sh configs/sweep_resolution.tsv",
                      "1000 vertices, 200 orbits.")


def batch(measured):
    return lines_plot(measured, "Time an image over the batch", "batchsize", "batch",
                      {"res": 512, "vertices": 1000}, ("threads", "seed", "instance"),
                      "scripts/sweep.sh configs/sweep_batch.tsv", "512 × 512 pixels, 1000 vertices, 200 orbits.")


def training(measured):
    plot = Plot("Training throughput over GPUs")
    slots = {"LOAD+Base": 2, "BAT+Base": 6, "LOAD+Tiny": 3, "BAT+Tiny": 7}
    series = published_series(measured, "training")
    if not series:
        raise Missing("git checkout results/reference/published_figures.csv")
    plot.legend = [(0, PAPER)]
    for name, points in series.items():
        plot.add_series(10 * PUBLISHED_GROUP + slots.get(name, 8), name, points)
    xs = [at for points in plot.blocks for at, _ in points]
    plot.variables = {"series": len(series), "series_style": plot.styles,
                      "x_low": min(xs) / 1.15, "x_high": max(xs) * 1.15,
                      "y_high": nice_above(1.05 * max(y for points in plot.blocks for _, y in points))}
    plot.caption = ["Images a second in training: LOAD reads them, BAT makes them. The published points alone: "
                    "there are no rows of training of ours."]
    return plot


# ---- The ladder and its stages ---------------------------------------------------------------------------------


def best_rows(rows):
    """{(device, variant): row}, each at the preferred batch."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[device_of(row), row["variant"]].append(row)
    return {key: max(group, key=preferred) for key, group in groups.items()}


def ladder(measured):
    chosen = best_rows(paper_rows(measured, LADDER, res=512, vertices=1000))
    if not chosen:
        raise Missing("./fdsl-bench --variant gbase,mem,rng,bat,fused --batch 256 --verify --out results/synth.csv "
                      "(needs an NVIDIA GPU)")
    plot = Plot("The ladder: time an image, step by step")
    devices = Devices(list(chosen.values()), 3)
    names = list(devices.names())
    box = 0.74 / len(names)
    published = [(1.42 + i, 1e6 * min(point["published_s_per_image"] for point in measured.published_code
                                   if point["variant"] == step))
                 for i, step in enumerate(LADDER) if any(p["variant"] == step for p in measured.published_code)]
    bar_slots = [6, 2, 5]
    for d, (device, name, whose) in enumerate(names):
        plot.legend += [(-bar_slots[d], line) if i == 0 else (0.75, line) for i, line in enumerate(name + [whose])]
        plot.blocks.append(ladder_bars(chosen, device, (d - (len(names) - 1) / 2) * box - 0.04))
    plot.blocks += [published, [(1 + i, step, batches_words(chosen, step)) for i, step in enumerate(LADDER)]]
    plot.legend += [(61.1, "published code"), (0.75, "on an NVIDIA H200")]
    values = [value for bars in plot.blocks[:-2] for bar in bars for value in bar[1:4]]
    values += [us for _, us in published]
    low, high = log_range(values, 1.6)
    plot.width = max(WIDTH, 240 + len(LADDER) * (68 * len(names) + 24))
    plot.variables = {"steps": len(LADDER), "bars": len(names), "box": box,
                      **log_ticks(low, log_range([high * 1.3], 1)[1], micros_tick),
                      "bar_slot": bar_slots[:len(names)]}
    plot.caption = ["512 × 512 pixels, 1000 vertices, 200 orbits. Bold: times as fast as gbase on the same device. "
                    + ERROR_BARS] + devices.caption()
    return plot


def ladder_bars(chosen, device, shift):
    """(x, median, low, high, time, speed-up) a step."""
    base = chosen.get((device, "gbase"))
    bars = []
    for i, step in enumerate(LADDER):
        row = chosen.get((device, step))
        if row:
            median, p95 = row.micros("time_median_s"), row.micros("time_p95_s")
            speed_up = base.micros("time_median_s") / median if base else None
            bars.append((1 + i + shift, median, row.micros("time_min_s"), p95, micros_words(median),
                         f"× {speed_up:.3g}" if speed_up else ""))
    return bars


def batches_words(chosen, variant):
    batches = sorted({int(row["batch"]) for (_, name), row in chosen.items() if name == variant})
    return "batch " + ", ".join(map(str, batches)) if batches else "no row"


def stages(measured):
    names = ("noise_s", "vertices_s", "painting_s")
    rows = [row for row in paper_rows(measured, LADDER + ("omp",), res=512, vertices=1000)
            if any(row[name] for name in names)]
    if not rows:
        raise Missing("./fdsl-bench --variant gbase,mem,rng,omp --verify --out results/synth.csv "
                      "(without an NVIDIA GPU: --variant omp)")
    plot = Plot("Where the time of an image goes")
    chosen = best_rows(rows)
    devices = Devices(list(chosen.values()), 3)
    order = list(SLOTS)
    bars = [(device, row) for device in devices.groups
            for (at, _), row in sorted(chosen.items(), key=lambda item: order.index(item[0][1])) if at == device]
    parts = [stage_parts(row, names) for _, row in bars]
    plot.blocks = [[(1 + b, *part[s]) for b, part in enumerate(parts) if part[s][1] > part[s][0]] for s in range(3)]
    plot.blocks += [[(1 + b, micros_words(sum(row.micros(name) or 0 for name in names)))
                     for b, (_, row) in enumerate(bars)],
                    [(1 + b, row["variant"], f"batch {row['batch']:.0f}") for b, (_, row) in enumerate(bars)]]
    plot.width = max(WIDTH, 250 + 110 * len(bars))
    device_lines = add_bar_devices(plot, devices, bars)
    plot.legend = [(-9, "painting"), (-2, "vertices"), (-6, "noise")]
    plot.variables = {"bars": len(bars), "stages": 3, "stage_slot": [6, 2, 9], "device_lines": device_lines}
    plot.caption = ["512 × 512 pixels, 1000 vertices, 200 orbits. Stages are timed in a run of their own, one by one; "
                    "above the bars their sum an image. omp makes noise and vertices in one stage."] + devices.caption()
    return plot


def add_bar_devices(plot, devices, bars):
    """The last blocks, one a line: below the names of the bars, the device that each run of neighbours is of.
    Returns their number."""
    bar_px = (plot.width - 84 - 190) / (len(bars) + 0.2)
    labels, lines_max = [], 1
    for device, name, whose in devices.names():
        at = [1 + b for b, (other, _) in enumerate(bars) if other == device]
        if at:
            lines = wrap(f"{short_device(device[2])} ({whose})", bar_px * len(at) - 8, 10)
            lines_max = max(lines_max, len(lines))
            labels += [(i, ((at[0] + at[-1]) / 2, line)) for i, line in enumerate(lines)]
    plot.axis_px = 62 + 16 * lines_max
    plot.height = HEIGHT + 16 * lines_max
    plot.blocks += [[label for i, label in labels if i == line] for line in range(lines_max)]
    return lines_max


def stage_parts(row, names):
    """(from %, to %, words) a stage; words where they fit."""
    times = [row.micros(name) or 0 for name in names]
    parts, at = [], 0
    for us in times:
        share = 100 * us / sum(times)
        parts.append((at, at + share, micros_words(us) if share >= 6 else ""))
        at += share
    return parts


# ---- Scaling ---------------------------------------------------------------------------------------------------


def scaling_key(row, kind):
    """What the points of one series share, the kind of scaling (weak, strong) among it: with weak scaling the batch
    of a rank, with strong that of all."""
    batch_size = row["batch"] / (row["ranks"] if kind == "weak" else 1)
    return (*device_of(row), row["variant"], kind, batch_size,
            *(row.texts[column] for column in DEFAULTS if column != "batch"))


def scaling(measured):
    command = "scripts/sweep.sh configs/sweep_scaling.tsv"
    series = collections.defaultdict(dict)
    for row in measured.rows:
        if row["rank"] == "all" and row["efficiency"] and row["variant"] in SLOTS:
            series[scaling_key(row, row["scaling"])].setdefault(row["ranks"], row)
    if not series:
        raise Missing(command)
    plot = Plot("Images a second over ranks")
    add_one_rank(measured, series)
    series = scaling_chosen(series)
    devices = Devices([row for points in series for row in points])
    series = [points for points in series if device_of(points[0]) in devices.groups]
    ideals, styles, drawn = [], [], []
    for device, name, whose in devices.names():
        plot.legend += [(0, line) for line in name] + [(0.5, whose)]
        for points in (points for points in series if device_of(points[0]) == device):
            many = points[-1]
            drawn.append(points)
            styles.append(devices.style(many) + (40 if many["scaling"] == "strong" else 0))
            per_rank = many["batch"] / many["ranks"]
            plot.legend += [(styles[-1], f"{many['variant']}, {many['scaling']}"),
                            (0.75, f"batch {per_rank:.0f} a rank" if many["scaling"] == "weak"
                             else f"batch {many['batch']:.0f} in all")]
            plot.blocks.append([scaling_point(row) for row in points])
            alone = many["items_per_s"] / (many["ranks"] * many["efficiency"])
            ideals.append([(n, n * alone) for n in (1, many["ranks"] * 1.15)])
    rows = [[row["efficiency"] for row in points] for points in drawn]
    plot.blocks += ideals
    xs = [point[0] for block in plot.blocks for point in block]
    low, high = log_range([value for block in plot.blocks for point in block for value in point[1:4]])
    plot.variables = {"series": len(ideals), "series_style": styles, **log_ticks(low, high, count_words),
                      "x_low": min(xs) / 1.2, "x_high": max(xs) * 1.12, **efficiency_cells(plot.blocks, rows)}
    plot.axis_px = 84 + 17 * len(ideals)
    plot.height = HEIGHT + 17 * len(ideals)
    plot.caption = ["Gray: no loss. Percent: the efficiency that the run measured, against one rank alone. Bars from "
                    "the 95th percentile to the least time of the slowest rank." + shared_devices(series)]
    plot.caption += devices.caption()
    return plot


def scaling_chosen(series):
    """A series a device, variant and kind of scaling: that with most points, then the newest."""
    best = {}
    for key, points in series.items():
        rows = [points[n] for n in sorted(points)]
        rank = (len(rows), max(row["time_utc"] for row in rows))
        if key[:6] not in best or rank > best[key[:6]][0]:
            best[key[:6]] = rank, rows
    return [rows for _, rows in best.values()]


def add_one_rank(measured, series):
    """The row of one rank joins where it had what each of the ranks had: on a GPU always, on a CPU with as many
    threads."""
    for row in measured.rows:
        if row["ranks"] == 1:
            for kind in ("weak", "strong"):
                points = series.get(scaling_key(row, kind))
                first = points[min(points)] if points else None
                if first and (row.on_gpu or row["threads"] * first["ranks"] == first["threads"]):
                    points.setdefault(1, row)


def scaling_point(row):
    rate = row["items_per_s"]
    return row["ranks"], rate, row["items"] / row["time_p95_s"], row["items"] / row["time_min_s"]


def efficiency_cells(blocks, efficiencies):
    """The table below the plot, as arrays: a row a series, a column at each of its ranks."""
    cells = [(1 + i, point[0], f"{100 * efficiency:.1f} %") for i, row in enumerate(efficiencies)
             for point, efficiency in zip(blocks[i], row) if efficiency]
    return {"cells": len(cells), "cell_row": [row for row, _, _ in cells], "cell_x": [x for _, x, _ in cells],
            "cell_text": [text for _, _, text in cells]}


def shared_devices(series):
    shared = any((row["ranks_per_device"] or 0) > 1 for points in series for row in points)
    return " Some ranks shared a GPU." if shared else ""


# ---- Roofline --------------------------------------------------------------------------------------------------

OPERATIONS_PER_VERTEX = 76  # an orbit; docs/timing.md


def operations_per_s(row):
    return OPERATIONS_PER_VERTEX * row["vertices"] * row["orbits"] * row["items_per_s"]


def roofline(measured):
    rows = [row for row in paper_rows(measured, tuple(SLOTS)) if row["roofline_share"] and row["bytes_per_s"]]
    if not rows:
        raise Missing("./fdsl-bench --variant all --verify --out results/synth.csv")
    groups = collections.defaultdict(list)
    for row in rows:
        groups[device_of(row), row["variant"], row["res"], row["vertices"], row["orbits"]].append(row)
    rows = [max(group, key=preferred) for group in groups.values()]
    devices = Devices(rows, 2)
    rows = [row for row in rows if device_of(row) in devices.groups]
    plot = Plot("Arithmetic done, under each device's ceilings")
    series, styles = [], []
    for device, name, whose in devices.names():
        plot.legend += [(0, line) for line in name] + [(0.5, whose)]
        for variant in SLOTS:
            mine = [row for row in rows if device_of(row) == device and row["variant"] == variant]
            if mine:
                hollow = devices.groups[device] > 1
                styles.append(10 * PUBLISHED_GROUP * hollow + 10 * (not hollow) + SLOTS[variant])
                plot.legend.append((styles[-1] + 0.1, variant))
                series.append([(operations_per_s(row) / row["bytes_per_s"], operations_per_s(row)) for row in mine])
    xs = [x for points in series for x, _ in points]
    x_low, x_high = log_range(xs, 2)[0], log_range(xs, 8)[1]  # room on the right for the ceilings' names
    roofs = find_roofs(measured, rows)
    lines = [roof_line(roof, x_low, x_high) for roof in roofs.values()]
    plot.blocks = series + lines + [[(x_high / 1.03, *name) for name in roof_names(roofs)]]
    low, high = log_range([y for points in series + lines for _, y in points], 2)
    plot.variables = {"series": len(series), "series_style": styles, "roofs": len(lines), "x_low": x_low,
                      "x_high": x_high, **log_ticks(low, high, count_words),
                      "roof_dash": [devices.groups[device] for device, _ in roofs]}
    plot.caption = ["One point a size: 76 operations a vertex and orbit over the bytes of the finished images. "
                    "Ceilings are peak rates by clock and lanes (docs/timing.md)."
                    + ("" if all(roof["bytes_per_s"] for roof in roofs.values()) else
                       " The ceiling of memory is drawn where a row or the machine's file tells it.")
                    + (" Dashed ceilings: devices with open points." if max(devices.groups.values()) > 1 else "")]
    plot.caption += devices.caption()
    return plot


def find_roofs(measured, rows):
    """{(device, threads): peaks}. roofline_share says how far a row is from the least of its ceilings; the highest
    that any row has is that of arithmetic, and a lower one is that of memory at the row's intensity. env.json of the
    same machine tells both."""
    roofs = {}
    for key in sorted({(device_of(row), int(row["threads"])) for row in rows}):
        mine = [row for row in rows if (device_of(row), int(row["threads"])) == key]
        attainable = {id(row): operations_per_s(row) / row["roofline_share"] for row in mine}
        peak = max(attainable.values())
        bound = [row["bytes_per_s"] / row["roofline_share"] for row in mine if attainable[id(row)] < 0.99 * peak]
        roofs[key] = {"operations_per_s": peak, "bytes_per_s": max(bound, default=None)}
        for machine in (machine["values"] for machine in measured.machines if machine["source"] == key[0][0]):
            if key[0][3] and machine.get("gpu") == key[0][2] and machine.get("gpu_peak_operations_per_s") \
                    and machine.get("gpu_peak_bytes_per_s"):
                roofs[key] = {"operations_per_s": float(machine["gpu_peak_operations_per_s"]),
                              "bytes_per_s": float(machine["gpu_peak_bytes_per_s"])}
    return roofs


def roof_names(roofs):
    """(y, words) above the ceilings; of those that lie together the user's alone is named, above the highest."""
    names = []
    for (device, threads), roof in sorted(roofs.items(), key=lambda item: item[0][0][0] != "yours"):
        peak = roof["operations_per_s"]
        near = next((name for name in names if abs(math.log(peak / name[0])) < 0.5), None)
        if near:
            near[0] = max(near[0], peak)
        else:
            whose = shortened(short_device(device[2]), 30) + ("" if device[3] else f", {threads_words([threads])}")
            names.append([peak, f"{whose}: {count_words(peak)}/s"])
    return names


def roof_line(roof, x_low, x_high):
    peak, memory = roof["operations_per_s"], roof["bytes_per_s"]
    if not memory:
        return [(x_low, peak), (x_high, peak)]
    ridge = peak / memory
    slope = [(x_low, x_low * memory)] if ridge > x_low else []
    if ridge >= x_high:
        return slope + [(x_high, x_high * memory)]
    return slope + [(max(ridge, x_low), peak), (x_high, peak)]


# ---- The monitor -----------------------------------------------------------------------------------------------

PHASES = ("setup", "verify", "warm-up", "timed", "measure", "teardown", "idle")
SHADES = {"setup": 1, "verify": 2, "warm-up": 3, "timed": 4, "measure": 5, "teardown": 6, "idle": 7}
PANELS = (  # title, scale, columns with their names, the least height of the axis
    ("GPU use (%)", 1, (("gpu_utilisation_percent", "GPU"),), 100),
    ("power (W)", 1, (("power_w", "board"),), 0),
    ("temperature (°C)", 1, (("temperature_c", "GPU"),), 0),
    ("clocks (GHz)", 1e-3, (("sm_clock_mhz", "SM"), ("memory_clock_mhz", "memory")), 0),
    ("PCIe (MB/s)", 1e-6, (("pcie_rx_bytes_per_s", "to the GPU"), ("pcie_tx_bytes_per_s", "from it")), 0),
    ("memory (GB)", 1e-9, (("gpu_memory_bytes", "GPU"), ("rss_bytes", "process")), 0),
    ("CPU (cores)", 1, (("cpu_cores", "process"),), 1),
)


def last_run(samples):
    """The samples of the last run in a file and of its lowest rank; each run's time begins anew."""
    ranks = sorted({sample["rank"] for sample in samples}, key=lambda rank: (len(rank), rank))
    samples = [sample for sample in samples if sample["rank"] == ranks[0]]
    start = max((i for i in range(1, len(samples)) if samples[i]["time_s"] < samples[i - 1]["time_s"]), default=0)
    return samples[start:], ranks


def spans(samples, key, end):
    """(key, from, to) of neighbours that share it; each lasts until the next begins."""
    found = []
    for sample in samples:
        if not found or found[-1][0] != key(sample):
            found.append([key(sample), sample["time_s"], end])
            if found[:-1]:
                found[-2][2] = sample["time_s"]
    return found


def monitor(measured):
    if not measured.monitors:
        raise Missing("./fdsl-bench --variant omp --batch 64 --min-time 11 --monitor results/monitor.csv")
    chosen = measured.monitors[0]
    samples, ranks = last_run(chosen["samples"])
    plot = Plot("A run over time", height=0)
    end = samples[-1]["time_s"] * 1.002 or 1
    panels = [panel for panel in PANELS
              if any(sample[column] is not None for sample in samples for column, _ in panel[2])]
    plot.left, plot.right, plot.top = 84, 140, 72
    columns, variables = monitor_panels(samples, panels)
    plot.blocks = [[(sample["time_s"], *(scale * sample[column] if sample[column] is not None else None
                                         for column, scale in columns)) for sample in samples]]
    px_s = (WIDTH - plot.left - plot.right) / end
    plot.blocks += [fitting_names(spans(samples, lambda sample: sample["variant"], end), px_s, 10.5),
                    fitting_names(spans(samples, lambda sample: sample["phase"], end), px_s, 9.5)]
    bands = spans(samples, lambda sample: sample["phase"], end)
    shown = [phase for phase in PHASES if phase in {band[0] for band in bands}]
    plot.variables = {**variables, "x_high": end, "bands": len(bands), "band_from": [band[1] for band in bands],
                      "band_to": [band[2] for band in bands], "band_slot": [SHADES.get(band[0], 7) for band in bands],
                      "phases": len(shown), "phase_name": shown, "phase_slot": [SHADES[phase] for phase in shown],
                      "phase_x": [plot.left + sum(text_px(name, 10) + 36 for name in shown[:i])
                                  for i in range(len(shown))]}
    plot.height = plot.top + 40 + 88 * len(panels) + 100
    first = samples[0]
    period_ms = 1e3 * (samples[-1]["time_s"] - first["time_s"]) / max(1, len(samples) - 1)
    plot.caption = [f"{len(samples)} samples, {period_ms:.0f} ms apart"
                    + (f"; rank {ranks[0]} of {len(ranks)}" if len(ranks) > 1 else "")
                    + f". {monitor_devices(samples)} ({'yours' if chosen['source'] == 'yours' else 'reference'}, "
                    f"host {first['host']}, revision {first['revision']})."
                    + (" GPU use is the driver's mean over up to a second." if panels[0] is PANELS[0] else "")]
    if chosen["source"] != "yours":
        plot.notes.append("no file of yours; to make one: "
                          "./fdsl-bench --variant omp --batch 64 --min-time 11 --monitor results/monitor.csv")
    return plot


def monitor_devices(samples):
    return ", ".join(dict.fromkeys(sample["device"] for sample in samples if sample["device"])) or "no device named"


def monitor_panels(samples, panels):
    """The columns of the first block as (column, scale), and the arrays that describe the panels."""
    columns, variables = [], collections.defaultdict(list)
    for title, scale, lines, least in panels:
        present = [(column, name) for column, name in lines if any(s[column] is not None for s in samples)]
        columns += [(column, scale) for column, _ in present]
        high = max(s[column] * scale for s in samples for column, _ in present if s[column] is not None)
        variables["panel_title"].append(title)
        variables["panel_high"].append(max(least, nice_above(high)))
        variables["panel_second"].append(1 + len(columns) if len(present) > 1 else 0)
        variables["panel_first"].append(1 + len(columns) - (len(present) > 1))
        variables["names_first"].append(present[0][1])
        variables["names_second"].append(present[1][1] if len(present) > 1 else "")
    return columns, {"panels": len(panels), **variables}


def fitting_names(found, px_s, size):
    return [((begin + end) / 2, name) for name, begin, end in found if text_px(name, size) < (end - begin) * px_s - 4]


# ---- Drawing ---------------------------------------------------------------------------------------------------

FIGURES = {
    "vertices": (vertices, "time an image over its vertices, beside the published points"),
    "resolution": (resolution, "time an image over its side, likewise"),
    "batch": (batch, "time an image over the batch, likewise"),
    "training": (training, "published training throughput over GPUs"),
    "ladder": (ladder, "the paper's steps as bars, with the speed-up of each"),
    "stages": (stages, "noise, vertices and painting as shares of an image's time"),
    "scaling": (scaling, "images a second over ranks, with the ideal line and the efficiency"),
    "monitor": (monitor, "utilisation, power, clocks, memory and CPU over a run, by phase"),
    "roofline": (roofline, "arithmetic done under each device's ceilings"),
}


def read_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS, add_help=False)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "results")
    parser.add_argument("--reference", type=pathlib.Path, default=ROOT / "results/reference")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/plots")
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    given = parser.parse_args(arguments)
    given.out = (given.out or given.results / "plots").resolve()
    given.work = given.work.resolve()
    for name in given.names:
        if name not in FIGURES:
            near = difflib.get_close_matches(name, FIGURES, 1)
            raise Failed(f"no figure '{name}'" + (f"; did you mean {near[0]}?" if near else
                         f"; there are {', '.join(FIGURES)}"), 2)
    return given


def draw_all(given):
    need_gnuplot()
    measured = Measured(given.results, given.reference)
    for note in measured.notes:
        print(f"figures: {note}", file=sys.stderr)
    for name in given.names or FIGURES:
        try:
            plot = FIGURES[name][0](measured)
        except Missing as missing:
            print(f"  skipped {name}: no data; to measure it: {missing}")
            continue
        draw(name, plot, given.out, given.work, commands=given.commands)
        if not given.commands:
            note = f" ({'; '.join(plot.notes)})" if plot.notes else ""
            print(f"  drawn   {shown_path(given.out / name)}.{{{','.join(FORMATS)}}}{note}")


def main(arguments):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        given = read_arguments(arguments)
        if given.help:
            print(__doc__.strip())
        elif given.list:
            print("\n".join(f"{name:<11} {text}" for name, (_, text) in FIGURES.items()))
        else:
            draw_all(given)
    except BadInput as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    except Failed as error:
        print(f"figures: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
