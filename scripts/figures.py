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
import sys

sys.dont_write_bytecode = True
from devices import (SLOTS, Devices, Missing, about_yours, add_bar_devices, device_of, threads_a_rank,  # noqa: E402
                     threads_words)
import break_even  # noqa: E402
import feeding  # noqa: E402
import fine_tuning  # noqa: E402
import learning  # noqa: E402
import loading  # noqa: E402
from plot import (FORMATS, HEIGHT, INNER_PX, ROOT, WIDTH, Failed, Plot, count_words, draw, exit_status,  # noqa: E402
                  linear_ticks, log_range, log_ticks, micros_tick, micros_words, need_gnuplot, nice_above,
                  short_device, shortened, shown_path, text_px, ticks_125, wrap, x_axis)
from rows import DEFAULTS, Measured  # noqa: E402

PUBLISHED_SLOTS = {"Python-CPU": 1, "CUDA-Baseline": 3, "CUDA-Batched": 6}
LADDER = ("gbase", "mem", "rng", "bat", "fused")
IN_FIGURES = ("naive", "omp", "gbase", "bat", "fused")
PUBLISHED_GROUP, PUBLISHED_CODE_GROUP = 5, 6
PAPER = "published: PDP 2026"

# The paper's job: one class, gray images as drawn. What figures vary is left open, and some options are empty where
# they do not apply.
VARIED = ("batch", "res", "vertices", "out_res", "seed", "instance")
APPLIES_NOT = ("preset", "preset_file", "fit", "mean", "std")
ERROR_BARS = "Median time of a run over its images; whiskers from the least to the 95th percentile."


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
    most points, and among equals the preferred."""
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
    return series


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
    candidates = paper_rows(measured, IN_FIGURES, **fixed)
    ours = series_over(candidates, x, free)
    devices = Devices([row for points in ours for row in points])
    add_ours(plot, devices, ours, x)
    add_published(measured, plot, figure)
    if figure == "batchsize":
        add_published_code(measured, plot)
    if not plot.blocks:
        raise Missing(command)
    low, high = log_range([value for points in plot.blocks for _, *values in points for value in values])
    plot.variables = {"series": len(plot.blocks), "series_style": plot.styles, **log_ticks(low, high, micros_tick),
                      **axis_of([at for points in plot.blocks for at, *_ in points], x)}
    plot.caption = [f"{caption} {ERROR_BARS}"] + devices.caption()
    if not ours:
        plot.caption.append("No row of ours: the published points alone.")
    shown = [row for points in ours for row in points if device_of(row) in devices.groups]
    plot.notes += about_yours(candidates, shown, free, command)
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


def axis_of(xs, x):
    """The x axis of a parameter: log, with ticks at the sides measured or at powers of two; of vertices linear with
    round steps, unless they span more than a factor 20."""
    low, high = min(xs) / 1.3, max(xs) * 1.3
    if x == "res":
        return x_axis(low, high, sorted(set(xs)))
    if x == "batch":
        return x_axis(low, high, [2.0**e for e in range(64) if low <= 2.0**e <= high])
    if max(xs) > 20 * min(xs):
        return x_axis(low, high, ticks_125(low, high))
    room = 0.05 * (max(xs) - min(xs)) or 0.5 * max(xs)
    low, high = max(0, min(xs) - room), max(xs) + room
    return x_axis(low, high, linear_ticks(low, high), log=False)


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
    styles = {"LOAD+Base": 71, "BAT+Base": 72, "LOAD+Tiny": 73, "BAT+Tiny": 74}
    series = published_series(measured, "training")
    if not series:
        raise Missing("git checkout results/reference/published_figures.csv")
    plot.legend = [(0, PAPER)]
    for name, points in series.items():
        plot.add_series(styles.get(name, 58), name, points)
    ours, about_ours, notes = feeding.training_rates(measured)
    if ours:
        plot.legend.append((0, "ours, another network"))
    for name, rate in ours:
        plot.add_series(feeding.STYLES.get(name, 14), name, [(1, rate)])
    xs = [at for points in plot.blocks for at, _ in points]
    plot.variables = {"series": len(plot.blocks), "series_style": plot.styles,
                      **x_axis(min(xs) / 1.15, max(xs) * 1.15, sorted(set(xs)))}
    ys = [y for points in plot.blocks for _, y in points]
    if max((rate for _, rate in ours), default=0) > 2 * max(y for points in series.values() for _, y in points):
        plot.variables.update(log_ticks(*log_range(ys), lambda tick: f"{tick:.9g}"))
    else:
        plot.variables["y_high"] = nice_above(1.05 * max(ys))
    plot.caption = ["Images a second in training: LOAD reads them, BAT makes them. "
                    + (f"Ours, with the time that the data took to open: {about_ours}" if ours else
                       f"The published points alone; to measure ours: {feeding.COMMAND}")]
    plot.notes += notes
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
    published = [(1.46 + i, 1e6 * min(point["published_s_per_image"] for point in measured.published_code
                                   if point["variant"] == step))
                 for i, step in enumerate(LADDER) if any(p["variant"] == step for p in measured.published_code)]
    bar_slots = [6, 2, 5]
    for d, (device, name, whose) in enumerate(names):
        plot.legend += [(-bar_slots[d], line) if i == 0 else (0.75, line) for i, line in enumerate(name + [whose])]
        plot.blocks.append(ladder_bars(chosen, device, (d - (len(names) - 1) / 2) * box))
    plot.blocks += [[(1 + i, step, batches_words(chosen, step)) for i, step in enumerate(LADDER)], published]
    plot.legend += [(61.1, "published code"), (0.75, "on an NVIDIA H200")]
    values = [value for bars in plot.blocks[:-2] for bar in bars for value in bar[1:4]]
    values += [us for _, us in published]
    low, high = log_range(values, 1.6)
    plot.width = max(WIDTH, 240 + len(LADDER) * (68 * len(names) + 24))
    plot.variables = {"groups": len(LADDER), "bars": len(names), "box": box,
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
    plot.blocks += [[(1 + b, at, words) for b, (_, row) in enumerate(bars) for at, words in thin_parts(row, names)]]
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


THIN = 6  # percent of a bar: too low for a number inside


def stage_parts(row, names):
    """(from %, to %, words) a stage; words where they fit."""
    times = [row.micros(name) or 0 for name in names]
    parts, at = [], 0
    for us in times:
        share = 100 * us / sum(times)
        parts.append((at, at + share, micros_words(us) if share >= THIN else ""))
        at += share
    return parts


def thin_parts(row, names):
    """(height %, words) of the parts that are too thin for words inside: beside them, each above the one below."""
    beside = []
    for (low, high, _), name in zip(stage_parts(row, names), names):
        if 0 < high - low < THIN:
            beside.append([(low + high) / 2, micros_words(row.micros(name))])
    for lower, upper in zip(beside, beside[1:]):
        upper[0] = max(upper[0], lower[0] + 5)
    return beside


# ---- Scaling ---------------------------------------------------------------------------------------------------


KINDS = {"weak": "weak: each rank has a batch", "strong": "strong: the ranks share a batch"}


def scaling_key(row, kind):
    """What the points of one line share, the kind of scaling (weak, strong) among it: with weak scaling the batch of
    a rank, with strong that of all; on a CPU the threads a rank, last."""
    batch_size = row["batch"] / (row["ranks"] if kind == "weak" else 1)
    return (*device_of(row), row["variant"], kind, batch_size,
            *(row.texts[column] for column in DEFAULTS if column != "batch"),
            None if row.on_gpu else threads_a_rank(row))


def scaling(measured):
    command = "scripts/sweep.sh configs/sweep_scaling.tsv"
    lines = collections.defaultdict(dict)
    candidates = [row for row in measured.rows if row["rank"] == "all" and row["efficiency"]
                  and row["variant"] in SLOTS and row["scaling"] in KINDS]
    for row in candidates:
        lines[scaling_key(row, row["scaling"])].setdefault(row["ranks"], row)
    if not lines:
        raise Missing(command)
    add_one_rank(measured, lines)
    lines = scaling_chosen(lines)
    devices = Devices([row for points in lines for row in points])
    lines = [points for points in lines if device_of(points[0]) in devices.groups]
    plot = Plot("Images a second over ranks")
    scaling_legend(plot, devices, lines)
    kinds = [kind for kind in KINDS if any(points[-1]["scaling"] == kind for points in lines)]
    places = list(devices.groups)
    lines.sort(key=lambda points: (kinds.index(points[-1]["scaling"]), places.index(device_of(points[0])),
                                   SLOTS[points[0]["variant"]]))
    plot.blocks = [[scaling_point(row) for row in points] for points in lines] + list(map(ideal, lines))
    plot.variables = {"series": len(lines), "series_style": [devices.style(points[-1]) for points in lines],
                      "joined": [int(same_threads(points)) for points in lines],
                      **scaling_panels(plot, lines, kinds)}
    plot.caption = ["Gray: no loss. Percent: the efficiency that the run measured, against one rank alone. Whiskers "
                    "from the 95th percentile to the least time of the slowest rank." + shared_devices(lines)]
    plot.caption += devices.caption()
    plot.notes += about_yours(candidates, [row for points in lines for row in points],
                              ("ranks", "scaling", "batch", "threads"), command)
    return plot


def add_one_rank(measured, lines):
    """The row of one rank joins the lines with which it shares what each rank had."""
    for row in measured.rows:
        if row["ranks"] == 1:
            for kind in KINDS:
                points = lines.get(scaling_key(row, kind))
                if points:
                    points.setdefault(1, row)


def scaling_chosen(lines):
    """A line a device, variant and kind of scaling: that with most points, then the newest. On a CPU that gave each
    rank its part of the cores no two points share their threads; then all of that job are taken, and not joined."""
    groups = collections.defaultdict(list)
    for key, points in lines.items():
        groups[key[:6]].append((len(points), max(row["time_utc"] for row in points.values()), key))
    chosen = []
    for group in groups.values():
        most, _, best = max(group, key=lambda entry: entry[:2])
        points = dict(lines[best])
        if most == 1:
            for _, _, key in sorted(group, key=lambda entry: entry[1], reverse=True):
                if key[:-1] == best[:-1]:
                    points = {**lines[key], **points}
        chosen.append([points[n] for n in sorted(points)])
    return chosen


def same_threads(points):
    return points[0].on_gpu or len(set(map(threads_a_rank, points))) == 1


def scaling_legend(plot, devices, lines):
    """Device by device its variants, with what each line keeps fixed."""
    for device, name, whose in devices.names():
        plot.legend += [(0, line) for line in name] + [(0.5, whose)]
        for variant in SLOTS:
            mine = [points for points in lines if device_of(points[0]) == device
                    and points[-1]["variant"] == variant]
            notes = [f"weak: batch {points[-1]['batch'] / points[-1]['ranks']:.0f} a rank"
                     if points[-1]["scaling"] == "weak" else f"strong: batch {points[-1]['batch']:.0f} in all"
                     for points in mine]
            notes += dict.fromkeys(rank_threads(points) for points in mine if not device[3])
            if mine:
                joined = any(same_threads(points) and len(points) > 1 for points in mine)
                plot.legend += [(devices.style(mine[0][0]) + (0 if joined else 0.1), variant)]
                plot.legend += [(0.75, line) for note in notes for line in wrap(note, 180, 11)]


def rank_threads(points):
    """'8 threads a rank', or where they differ '8 threads a rank at 2, 4 at 4'."""
    threads = [f"{threads_a_rank(row):.3g}" for row in points]
    first = f"{threads[0]} thread{'' if threads[0] == '1' else 's'} a rank"
    return first if same_threads(points) else f"{first} at {points[0]['ranks']:.0f}, " + ", ".join(
        f"{number} at {row['ranks']:.0f}" for number, row in zip(threads[1:], points[1:]))


def scaling_point(row):
    rate = row["items_per_s"]
    return row["ranks"], rate, row["items"] / row["time_p95_s"], row["items"] / row["time_min_s"]


def ideal(points):
    """The rates that no loss would give, as steps (x, y, dx, dy): joined from one rank on where all points had the
    same threads, else a dash at each point. That of a row is its rate over its efficiency."""
    at = [(row["ranks"], row["items_per_s"] / row["efficiency"]) for row in points if row["efficiency"]]
    if not same_threads(points):
        return [(n / 1.12, rate, n * 1.12 - n / 1.12, 0) for n, rate in at]
    at = [(1, at[0][1] / at[0][0])] + at + [(at[-1][0] * 1.15, at[-1][1] * 1.15)]
    return [(x, y, to_x - x, to_y - y) for (x, y), (to_x, to_y) in zip(at, at[1:])]


def scaling_panels(plot, lines, kinds):
    """Variables of the panels, one a kind of scaling; and of the table below each, a row a line, a column at each of
    its ranks."""
    of_kind = [[i for i, points in enumerate(lines) if points[-1]["scaling"] == kind] for kind in kinds]
    ranks = sorted({row["ranks"] for points in lines for row in points} | {1})
    rates = [value for block in plot.blocks[:len(lines)] for _, *values in block for value in values]
    rates += [y for block in plot.blocks[len(lines):] for _, y, _, _ in block]
    gap = 70
    plot.width += max(0, len(kinds) * 58 * len(ranks) + gap * (len(kinds) - 1) - INNER_PX)
    panel_px = (INNER_PX + plot.width - WIDTH - gap * (len(kinds) - 1)) / len(kinds)
    cells = [(1 + p, 1 + row, point["ranks"], f"{100 * point['efficiency']:.1f} %") for p, members in enumerate(of_kind)
             for row, i in enumerate(members) for point in lines[i] if point["efficiency"]]
    most = max(map(len, of_kind))
    plot.axis_px, plot.height, plot.top = 84 + 17 * most, HEIGHT + 17 * most, 72
    return {**log_ticks(min(rates) / 1.4, max(rates) * 1.4, count_words),
            **x_axis(1 / 1.35, max(ranks) * 1.35, ranks, panel_px),
            "panels": len(kinds), "gap": gap, "panel_title": [KINDS[kind] for kind in kinds],
            "panel_first": [1 + members[0] for members in of_kind],
            "panel_last": [1 + members[-1] for members in of_kind],
            "cells": len(cells), "cell_panel": [p for p, *_ in cells],
            "cell_row": [row for _, row, *_ in cells],
            "cell_x": [x for _, _, x, _ in cells], "cell_text": [words for *_, words in cells]}


def shared_devices(lines):
    shared = any((row["ranks_per_device"] or 0) > 1 for points in lines for row in points)
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
    roofs = find_roofs(measured, rows)
    ridges = [roof["operations_per_s"] / roof["bytes_per_s"] for roof in roofs.values() if roof["bytes_per_s"]]
    # Room on the left for the slopes of memory, on the right for the ceilings' names.
    x_low, x_high = log_range(xs + [ridge / 4 for ridge in ridges], 1.5)[0], log_range(xs, 8)[1]
    lines = [roof_line(roof, x_low, x_high) for roof in roofs.values()]
    low, high = log_range([y for points in series + lines for _, y in points], 2)
    plot.blocks = series + lines + [roof_names(roofs, x_low, x_high, low, high)]
    slopes = sorted((roof for roof in roofs.values() if roof["bytes_per_s"]
                     and roof["operations_per_s"] / roof["bytes_per_s"] > 3 * x_low),
                    key=lambda roof: -roof["bytes_per_s"])
    plot.variables = {"series": len(series), "series_style": styles, "roofs": len(lines),
                      **x_axis(x_low, x_high, ticks_125(x_low, x_high)), **log_ticks(low, high, count_words),
                      "slopes": len(slopes), "slope_rate": [roof["bytes_per_s"] for roof in slopes],
                      "slope_text": [f"{count_words(roof['bytes_per_s'])}B/s" for roof in slopes],
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


def roof_names(roofs, x_low, x_high, y_low, y_high):
    """(x, y, words, side) of the ceilings' names, right-aligned and above their line (side 1), or below it (-1) or
    further left where they would touch another name or line."""
    px_x, px_y = INNER_PX / math.log(x_high / x_low), 320 / math.log(y_high / y_low)
    lines = sorted({px_y * math.log(roof["operations_per_s"]) for roof in roofs.values()}, reverse=True)
    names, taken = [], []
    for (device, threads), roof in sorted(roofs.items(), key=lambda item: -item[1]["operations_per_s"]):
        whose = shortened(short_device(device[2]), 30) + ("" if device[3] else f", {threads_words([threads])}")
        words = f"{whose}: {count_words(roof['operations_per_s'])}/s"
        at = px_y * math.log(roof["operations_per_s"])
        places = [(right, side) for right in range(4, int(INNER_PX / 2), 20) for side in (1, -1)]
        def touches(place):
            right, middle = place[0], at + 9 * place[1]
            return any(abs(middle - other) < 15 and right < end + 8 and begin - 8 < right + text_px(words, 10)
                       for begin, end, other in taken)
        def crossed(place):
            return any(line != at and abs(line - at - 9 * place[1]) < 8 for line in lines)
        right, side = min(places, key=lambda place: (touches(place), crossed(place)))
        taken.append((right, right + text_px(words, 10), at + 9 * side))
        names.append((x_high * math.exp(-right / px_x), roof["operations_per_s"], words, side))
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
        variables["panel_high"].append(nice_above(1.04 * high) if high > least else least or 1)
        variables["panel_second"].append(1 + len(columns) if len(present) > 1 else 0)
        variables["panel_first"].append(1 + len(columns) - (len(present) > 1))
        variables["names_first"].append(present[0][1])
        variables["names_second"].append(present[1][1] if len(present) > 1 else "")
    return columns, {"panels": len(panels), **variables}


def fitting_names(found, px_s, size):
    return [((begin + end) / 2, name) for name, begin, end in found if text_px(name, size) < (end - begin) * px_s - 4]


# Loaders over time: what each keeps busy, files against shards.
LOADERS = {"files-gpu": 1, "shards-gpu": 6, "gds": 5, "files-omp": 2, "shards-omp": 7}  # and their slots
LOADER_PANELS = (("GPU use (%)", 1, "gpu_utilisation_percent"), ("PCIe to the GPU (GB/s)", 1e-9, "pcie_rx_bytes_per_s"),
                 ("CPU (cores)", 1, "cpu_cores"))


def timed_loaders(measured):
    """{variant: the samples of its newest timed runs}, of one host, the user's before the reference's."""
    for source in ("yours", "reference"):
        runs = collections.defaultdict(list)
        for chosen in (chosen for chosen in measured.monitors if chosen["source"] == source):
            for sample in chosen["samples"]:
                if sample["phase"] == "timed" and sample["variant"] in LOADERS:
                    runs[sample["host"], sample["variant"], sample["time_utc"], sample["rank"]].append(sample)
        newest = {key[:2]: runs[key] for key in sorted(runs, key=lambda key: (key[2], key[3]))}
        for host in sorted({host for host, _ in newest}):
            mine = {variant: newest[host, variant] for variant in LOADERS if (host, variant) in newest}
            if {"files-gpu", "shards-gpu"} <= set(mine):
                return source, mine
    raise Missing(f"{break_even.COMMAND} (needs an NVIDIA GPU)")


def monitor_loading(measured):
    source, found = timed_loaders(measured)
    plot = Plot("Loading to the GPU, over time", height=HEIGHT + 110)
    panels = [panel for panel in LOADER_PANELS
              if any(sample[panel[2]] is not None for samples in found.values() for sample in samples)]
    for variant, samples in found.items():
        points = [(sample["time_s"] - samples[0]["time_s"],
                   *(None if sample[column] is None else scale * sample[column] for _, scale, column in panels))
                  for sample in samples]
        plot.add_series(10 + LOADERS[variant], variant, points)
        row = next((row for row in measured.loads if row["wait_share"] is not None and all(
            row[column] == samples[0][column] for column in ("host", "variant", "time_utc"))), None)
        plot.legend += [(0.75, f"waits {100 * row['wait_share']:.3g} % of the time")] if row \
            else []
    high = [max(points[1 + p] or 0 for block in plot.blocks for points in block) for p in range(len(panels))]
    plot.variables = {"series": len(plot.blocks), "series_style": plot.styles, "panels": len(panels),
                      "panel_title": [title for title, _, _ in panels],
                      "panel_high": [100 if title == "GPU use (%)" else nice_above(1.04 * top)
                                     for (title, _, _), top in zip(panels, high)],
                      "x_high": max(points[-1][0] for points in plot.blocks) or 1}
    samples = [sample for mine in found.values() for sample in mine]
    few = [variant for variant, mine in found.items() if len(mine) < 20]
    plot.caption = [f"Looks during the timed runs of each, which ran one after the other. {monitor_devices(samples)} "
                    f"({'yours' if source == 'yours' else 'reference'}, host {samples[0]['host']}, revision "
                    f"{', '.join(dict.fromkeys(sample['revision'] for sample in samples))}). GPU use is the driver's mean "
                    "over up to a second: any kernel counts, the step's and those that unpack."
                    + (f" Fewer than 20 looks: {', '.join(few)}." if few else "")]
    return plot


# ---- Drawing ---------------------------------------------------------------------------------------------------

FIGURES = {
    "vertices": (vertices, "time an image over its vertices, beside the published points"),
    "resolution": (resolution, "time an image over its side, beside the published points"),
    "batch": (batch, "time an image over the batch, beside the published points"),
    "training": (training, "published training throughput over GPUs, and ours on one"),
    "training_time": (feeding.training_time, "seconds of training over images: generated live against loaded"),
    "ladder": (ladder, "the paper's steps as bars, with the speed-up of each"),
    "stages": (stages, "noise, vertices and painting as shares of an image's time"),
    "scaling": (scaling, "images a second over ranks, with the ideal line and the efficiency"),
    "monitor": (monitor, "utilisation, power, clocks, memory and CPU over a run, by phase"),
    "monitor_loading": (monitor_loading, "GPU use, PCIe and cores while samples are loaded: files against shards"),
    "roofline": (roofline, "arithmetic done under each device's ceilings"),
    "loading": (loading.sizes, "time a sample over its size: a file each against shards, beside a copy"),
    "loading_threads": (loading.threads, "bytes a second over threads, files against shards, under that of copies"),
    "loading_cold": (loading.cold, "time a sample with nothing in the page cache and with everything"),
    "loading_latency": (loading.latency, "quantiles of opening, reading and closing a file"),
    "loading_loops": (loading.loops, "500 epochs over 1000 samples of video, by variant"),
    "break_even": (break_even.figure, "images a second beside a training step: made against read"),
    "learning_loss": (learning.loss, "the loss over epochs, by variant"),
    "learning_accuracy": (learning.accuracy, "wrong answers over epochs, by variant"),
    "learning_time": (learning.to_accuracy, "wrong answers over seconds of training, by variant"),
    "fine_tuning": (fine_tuning.figure, "wrong answers over samples seen: pre-trained against from scratch"),
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


def program(arguments):
    given = read_arguments(arguments)
    if given.help:
        print(__doc__.strip())
    elif given.list:
        print("\n".join(f"{name:<16} {text}" for name, (_, text) in FIGURES.items()))
    else:
        draw_all(given)


if __name__ == "__main__":
    sys.exit(exit_status("figures", lambda: program(sys.argv[1:])))
