"""The figures of scaling: rate vs. ranks when generating (synth), loading (load) and training (train). scripts/figures/draw.py
documents the return values."""

import collections
import statistics

from devices import SLOTS, Devices, Missing, about_yours, best_lines, device_of, threads_per_rank
from learning import JOB, about_job
from loading import size_words
from plot import HEIGHT, INNER_PX, WIDTH, Plot, count_words, log_ticks, wrap, x_axis
from rows import Row, newest, sweep_of

LOADING = ("for n in 1 2; do mpirun --bind-to none -n $n ./fdsl-bench --variant shards --data DIR --verify "
           "--out results/load_ranks.csv; done")
TRAINING = ("scripts/compare/pytorch.py --ranks 1,2 --variant train-omp --model lenet --batch 64 --epochs 3 "
            "--out results/ranks.csv")
ABOUT_RATES = ("Gray: ideal scaling. Percentages: measured efficiency relative to one rank alone. Whiskers: rates at the "
               "95th percentile and the minimum of the slowest rank's times.")
KINDS = {"weak": "weak scaling: one batch per rank", "strong": "strong scaling: ranks share a batch"}


def line_key(row, kind):
    """Returns the values that the points of one line share: device, variant, kind of scaling, batch size, sweep and parameters.
    The batch size is per rank for weak scaling, and of all ranks for strong scaling. The last element is the number of threads
    per rank on a CPU, or None on a GPU."""
    batch_size = row["batch"] / (row["ranks"] if kind == "weak" else 1)
    return (*device_of(row), row["variant"], kind, batch_size, *sweep_of(row),
            *(value for column, value in row.settings.items() if column != "batch"),
            None if row.on_gpu else threads_per_rank(row))


def generating(measured):
    command = "scripts/sweep/run.sh configs/sweep_scaling.tsv"
    lines = collections.defaultdict(dict)
    candidates = [row for row in measured.sweeps if row["rank"] == "all" and row["efficiency"]
                  and row["variant"] in SLOTS and row["scaling"] in KINDS and not row["compute"]]
    for row in candidates:
        lines[line_key(row, row["scaling"])].setdefault(row["ranks"], row)
    if not lines:
        raise Missing(command, measured.rows)
    add_one_rank(measured, lines)
    lines = best_of_kind(lines)
    devices = Devices([row for points in lines for row in points])
    lines = [points for points in lines if device_of(points[0]) in devices.groups]
    plot = Plot("Throughput vs. ranks")
    add_legend(plot, devices, lines)
    kinds = [kind for kind in KINDS if any(points[-1]["scaling"] == kind for points in lines)]
    shown_devices = list(devices.groups)
    lines.sort(key=lambda points: (kinds.index(points[-1]["scaling"]), shown_devices.index(device_of(points[0])),
                                   SLOTS[points[0]["variant"]]))
    plot.blocks = [[point_of(row) for row in points] for points in lines] + list(map(ideal, lines))
    plot.variables = {"series": len(lines), "series_style": [devices.style(points[-1]) for points in lines],
                      "y_name": "images per second", "joined": [int(same_threads(points)) for points in lines],
                      **panel_variables(plot, lines, kinds)}
    shared = any((row["ranks_per_device"] or 0) > 1 for points in lines for row in points)
    plot.caption = [ABOUT_RATES + " Some ranks shared a GPU." * shared] + devices.caption()
    plot.notes += about_yours(measured.rows, newest(candidates), [row for points in lines for row in points],
                              ("ranks", "scaling", "batch", "threads"), command)
    return plot


def add_one_rank(measured, lines):
    """Adds each row of a single rank to the lines of its sweep that have the same batch and threads per rank."""
    for row in measured.sweeps:
        if row["ranks"] == 1:
            for kind in KINDS:
                points = lines.get(line_key(row, kind))
                if points:
                    points.setdefault(1, row)


def best_of_kind(lines):
    """Returns one line per device, variant and kind of scaling. Prefers the line with the most points, then the newest line. If ranks
    share the cores of a CPU, every point has a different number of threads per rank. In this case, the points that differ only in
    this number are returned together, and the figure does not join them by a line."""
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
    return points[0].on_gpu or len(set(map(threads_per_rank, points))) == 1


def add_legend(plot, devices, lines):
    """Adds the variants of each device to the legend, with the batch size and threads per rank of each line."""
    for device, name, whose in devices.names():
        plot.legend += [(0, line) for line in name] + [(0.5, whose)]
        for variant in SLOTS:
            mine = [points for points in lines if device_of(points[0]) == device
                    and points[-1]["variant"] == variant]
            notes = [f"weak: batch {points[-1]['batch'] / points[-1]['ranks']:.0f} per rank"
                     if points[-1]["scaling"] == "weak" else f"strong: batch {points[-1]['batch']:.0f} in total"
                     for points in mine]
            notes += dict.fromkeys(rank_threads(points) for points in mine if not device[3])
            if mine:
                joined = any(same_threads(points) and len(points) > 1 for points in mine)
                plot.legend += [(devices.style(mine[0][0]) + (0 if joined else 0.1), variant)]
                plot.legend += [(0.75, line) for note in notes for line in wrap(note, 200, 11)]


def rank_threads(points):
    """Returns '8 threads per rank'. If points differ, returns for example '8 threads per rank at 2, 4 at 4': 8 threads at
    2 ranks, 4 threads at 4 ranks."""
    threads = [f"{threads_per_rank(row):.3g}" for row in points]
    first = f"{threads[0]} thread{'' if threads[0] == '1' else 's'} per rank"
    return first if same_threads(points) else f"{first} at {points[0]['ranks']:.0f}, " + ", ".join(
        f"{number} at {row['ranks']:.0f}" for number, row in zip(threads[1:], points[1:]))


def point_of(row):
    rate = row["items_per_s"]
    return row["ranks"], rate, row["items"] / row["time_p95_s"], row["items"] / row["time_min_s"]


def ideal(points):
    """Returns the rates of ideal scaling as segments (x, y, dx, dy): a line if all points have the same number of threads per
    rank, otherwise a dash at each point. The ideal rate of a row is its rate divided by its efficiency."""
    at = [(row["ranks"], row["items_per_s"] / row["efficiency"]) for row in points if row["efficiency"]]
    if not same_threads(points):
        return [(n / 1.12, rate, n * 1.12 - n / 1.12, 0) for n, rate in at]
    at = [(1, at[0][1] / at[0][0])] + at + [(at[-1][0] * 1.15, at[-1][1] * 1.15)]
    return [(x, y, to_x - x, to_y - y) for (x, y), (to_x, to_y) in zip(at, at[1:])]


def panel_variables(plot, lines, kinds):
    """Returns the variables of the panels, one per kind of scaling. Below each panel is a table of efficiencies, with one row
    per line and one column per number of ranks."""
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


# ---- Loading and training: one panel -------------------------------------------------------------------------------


def one_panel(title, lines, item, notes_of):
    """Returns (plot, lines, devices) for lines of one kind of scaling, whose blocks are not filled yet. Leaves out the lines of
    devices that the figure does not show. `notes_of` returns the texts below a line's variant in the legend."""
    devices = Devices([row for points in lines for row in points], item=item)
    shown = list(devices.groups)
    lines = sorted((points for points in lines if device_of(points[0]) in shown),
                   key=lambda points: (shown.index(device_of(points[0])), devices.order(points[0])))
    plot = Plot(title)
    for device, name, whose in devices.names():
        plot.legend += [(0, line) for line in name] + [(0.5, whose)]
        for points in (points for points in lines if device_of(points[0]) == device):
            joined = 0 if same_threads(points) and len(points) > 1 else 0.1
            plot.legend += [(devices.style(points[-1]) + joined, points[-1]["variant"]), *((0.75, text) for text in notes_of(points[-1]))]
    return plot, lines, devices


def fill_panel(plot, devices, lines, kind, panel_title):
    plot.variables = {"series": len(lines), "series_style": [devices.style(points[-1]) for points in lines],
                      "joined": [int(same_threads(points)) for points in lines], **panel_variables(plot, lines, [kind]),
                      "y_name": "samples per second", "panel_title": [panel_title]}


def loading_key(row):
    """Returns the values that the points of one line share: data, options and sweep. The batch is per rank; ranks divide the
    samples."""
    options = (value for column, value in row.settings.items() if column != "batch")
    return (device_of(row), row["variant"], sweep_of(row), row["items"], row["sample_bytes"], row["batch"] / row["ranks"], *options)


def loading(measured):
    candidates = [row for row in measured.load_sweeps if not row["compute"]]
    lines = [points for points in best_lines(candidates, loading_key, "ranks", 1) if any(row["efficiency"] for row in points)]
    if not lines:
        raise Missing(LOADING, measured.loads)
    plot, lines, devices = one_panel("Loading throughput vs. ranks", lines, "samples", lambda row: (
        f"{size_words(row['sample_bytes'])} per sample", f"cache {row['cache']}"))
    plot.blocks = [[point_of(row) for row in points] for points in lines] + list(map(ideal, lines))
    fill_panel(plot, devices, lines, "strong", "strong scaling: ranks divide the samples")
    plot.caption = [ABOUT_RATES] + devices.caption()
    shown = [row for points in lines for row in points]
    of_ranks = [row for row in newest(candidates) if row["ranks"] > 1]
    plot.notes += about_yours(of_ranks, of_ranks, shown, ("ranks", "threads", "batch", "data"), LOADING)
    return plot


def job_over_ranks(row, kind):
    """Returns the values that all points of the figure share. The batch is that of one rank for weak scaling, and the global batch
    for strong scaling."""
    batch = row["batch"] / (row["ranks"] if kind == "weak" else 1)
    return kind, batch, row["train_samples"], row["test_samples"], *(row.settings[column] for column in JOB if column != "batch")


def median_point(rows):
    """Returns a copy of the last row. Its rate is the median over the epochs; rate_low and rate_high are the extremes."""
    rates = sorted(row["items_per_s"] for row in rows)
    point = Row(rows[-1], items_per_s=statistics.median(rates), rate_low=rates[0], rate_high=rates[-1], efficiency=None)
    point.texts, point.source, point.file = rows[-1].texts, rows[-1].source, rows[-1].file
    return point


def trainings_of(rows, kind):
    """Returns {job: {(device, variant, threads per rank, exchange, sweep): {ranks: point}}} of runs on several ranks. Adds the point
    of the same sweep on one rank to each line, if there is one."""
    trainings = collections.defaultdict(list)
    for row in sorted(rows, key=lambda row: row["time_utc"]):
        if row["ranks"] == 1 or row["scaling"] == kind:
            threads = None if row.on_gpu else row["threads"] / row["ranks"]
            line = (device_of(row), row["variant"], threads, sweep_of(row), row.get("exchange", ""))
            trainings[job_over_ranks(row, kind), line, row["ranks"]].append(row)
    jobs = collections.defaultdict(lambda: collections.defaultdict(dict))
    for (job, line, ranks), epochs in trainings.items():
        if ranks > 1:
            jobs[job][line][ranks] = median_point(epochs)
            alone = trainings.get((job, (*line[:-1], ""), 1))
            if alone:
                jobs[job][line][1] = median_point(alone)
    return jobs


def best_trainings(lines):
    """Returns one line per device and variant. Prefers the exchange with the most points, then the one with the highest rate on the
    largest number of ranks."""
    best = {}
    def worth(points):
        return len(points), points[max(points)]["items_per_s"]
    for (device, variant, *_), points in lines.items():
        if (device, variant) not in best or worth(points) > worth(best[device, variant]):
            best[device, variant] = points
    for points in best.values():
        for ranks, point in points.items():
            if 1 in points:
                point["efficiency"] = point["items_per_s"] / (ranks * points[1]["items_per_s"])
    return [[points[ranks] for ranks in sorted(points)] for points in best.values()]


def best_job(rows):
    """Returns the lines of one job. Prefers the user's jobs, then the job with the most lines and points, then the newest."""
    def worth(lines):
        points = [point for line in lines for point in line]
        return (any(point.source == "yours" for point in points), len(lines), len(points),
                max(point["time_utc"] for point in points))
    jobs = [(best_trainings(lines), kind) for kind in KINDS for lines in trainings_of(rows, kind).values()]
    return max(jobs, key=lambda job: worth(job[0]), default=([], ""))


def training(measured):
    candidates = [row for row in measured.trains if row["feed"] != "constant" and not row["init"]]
    lines, kind = best_job(candidates)
    if not lines:
        raise Missing(TRAINING, measured.trains)
    plot, lines, devices = one_panel("Training throughput vs. ranks", lines, "first steps", lambda row: wrap(
        f"exchange: {row['exchange']}", 200, 11) if row.get("exchange") else [])
    plot.blocks = [[(row["ranks"], row["items_per_s"], row["rate_low"], row["rate_high"]) for row in points] for points in lines]
    plot.blocks += [ideal(points) if points[0]["efficiency"] else [(points[0]["ranks"], points[0]["items_per_s"], 0, 0)]
                    for points in lines]  # without a point on one rank, the ideal is unknown
    fill_panel(plot, devices, lines, kind, KINDS[kind])
    plot.caption = [f"{about_job(lines[0][0])} Median of the epochs; whiskers: slowest and fastest epoch. Gray: ideal scaling. "
                    "Percentages: efficiency relative to one rank."] + devices.caption()
    shown = [row for points in lines for row in points]
    plot.notes += about_yours(measured.trains, [], shown, ("ranks", "batch"), TRAINING)
    return plot
