"""Figures of what a training is fed with, of rows of the workload train: samples generated while training against samples
that are loaded. scripts/figures.py says what it is that they return."""

import collections
import os

from devices import Missing, about_yours, device_of
from generating import PAPER
from plot import Plot, linear_ticks, nice_above, number_words, short_device, x_axis
from rows import TRAIN_PARAMETERS

COMMAND = "scripts/live_training.sh DIR results/live_training.csv"
OF_DATA = ("data", "train_size", "test_size", "classes", "res", "feed", "fresh", "epochs")  # what lines differ in
JOB = tuple(column for column in TRAIN_PARAMETERS if column not in OF_DATA)
MADE_HERE = ("synth", "digits", "clips")
LIVE, CONSTANT, STORED = "generated live", "one constant batch", "generated before"
STYLES = {CONSTANT: 18, LIVE: 17, STORED: 15, "loaded from shards": 12, "loaded from files": 13}


def fed_with(row):
    if row["feed"] == "constant":
        return CONSTANT
    if row["data"] == "synth":
        return LIVE if row["feed"] == "live" else STORED
    return f"loaded from {os.path.basename(row['data'].rstrip('/'))}"


def job_of(row):
    return device_of(row) + (row["variant"], row["threads"]) + tuple(row[column] for column in JOB) + (
        row["train_samples"], row["test_samples"])


def is_loaded(name):
    return name.startswith("loaded")


def feeds(rows):
    """{what it was fed with: its rows by epoch, the newest of each} of the job that was both generated live and loaded:
    the user's before the reference's, then that in most ways, then the newest."""
    jobs = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row in sorted(rows, key=lambda row: row["time_utc"]):
        if row["opening_s"] is not None and row["data"] not in MADE_HERE[1:]:
            jobs[job_of(row)][fed_with(row)][row["epoch"]] = row
    jobs = [lines for lines in jobs.values() if LIVE in lines and any(map(is_loaded, lines))]
    def worth(lines):
        rows = [row for line in lines.values() for row in line.values()]
        return rows[0].source == "yours", len(lines), max(row["time_utc"] for row in rows)
    best = max(jobs, key=worth, default={})
    return {name: [best[name][epoch] for epoch in sorted(best[name])]
            for name in sorted(best, key=lambda name: (list(STYLES) + [name]).index(name))}


def seconds(row):
    """From the opening of the data to the end of an epoch, without tests."""
    return row["opening_s"] + row["trained_s"]


def images(row):
    return row["epoch"] * row["items"]


def same_training(lines):
    """Whether live and loaded samples gave the same losses, digit by digit, in all epochs that they share."""
    live = {row["epoch"]: row["loss"] for row in lines[LIVE]}
    return all(row["loss"] == live.get(row["epoch"], row["loss"])
               for name, line in lines.items() if is_loaded(name) for row in line)


def about(lines):
    row = lines[LIVE][-1]
    return (f"{row['variant']}, {row['model']} with {number_words(row['parameters'])} parameters, batch {row['batch']:.0f}, "
            f"{number_words(row['train_samples'])} images of {row['res']}² an epoch, {row['classes']} classes. "
            f"{row['device']} ({'rows of yours' if row.source == 'yours' else 'reference rows'}, host {row['host']}, "
            f"revision {row['revision']}).")


def notes(measured, lines):
    """That none of these are the user's."""
    return about_yours(measured.trains, [], [row for line in lines.values() for row in line], JOB, COMMAND)


def training_time(measured):
    lines = feeds(measured.trains)
    if not lines:
        raise Missing(f"{COMMAND} (needs an NVIDIA GPU)", measured.trains)
    plot = Plot("Training on so many images: generated against loaded")
    live = lines[LIVE][-1]
    plot.legend += [(0, short_device(live["device"])), (0.5, "yours" if live.source == "yours" else "reference")]
    for name, line in lines.items():
        points = [(0, line[0]["opening_s"])] + [(1e-3 * images(row), seconds(row)) for row in line]
        plot.add_series(STYLES.get(name, 14), name, points)
        plot.legend.append((0.75, f"{images(line[-1]) / line[-1]['trained_s']:,.0f} images/s once open"))
    points = [point for block in plot.blocks for point in block]
    x_high = 1.02 * max(x for x, _ in points)
    plot.variables = {"series": len(plot.blocks), "series_style": plot.styles, "y_high": nice_above(max(y for _, y in points)),
                      **x_axis(0, x_high, linear_ticks(0, x_high), log=False)}
    share = live["generate_share"]
    plot.caption = [
        f"Seconds from the opening of the data, its reading or what little is generated then, to the end of each epoch; tests "
        f"are not in them. {about(lines)}"
        + (f" Generating takes {100 * share:.2g} % of the time of the steps{', beside them' if live.on_gpu else ''}."
           if share is not None else "")
        + (" Live and loaded, the losses are the same in every digit." if same_training(lines) else "")]
    plot.notes += notes(measured, lines)
    return plot


def training(measured):
    """The published points alone: ours train other networks, so a figure of both would compare networks."""
    plot = Plot("Training throughput over GPUs, as published")
    styles = {"LOAD+Base": 71, "BAT+Base": 72, "LOAD+Tiny": 73, "BAT+Tiny": 74}
    series = measured.published_series("training")
    if not series:
        raise Missing("git checkout results/reference/published_figures.csv")
    plot.legend = [(0, PAPER)]
    for name, points in series.items():
        plot.add_series(styles.get(name, 58), name, points)
    xs, ys = zip(*[point for points in plot.blocks for point in points])
    plot.variables = {"series": len(plot.blocks), "series_style": plot.styles, "y_high": nice_above(1.05 * max(ys)),
                      **x_axis(min(xs) / 1.15, max(xs) * 1.15, sorted(set(xs)))}
    plot.caption = ["Images per second while DeiT-Base and DeiT-Tiny are trained: LOAD reads them, BAT generates them. No row of "
                    "ours: we train other, smaller networks, whose rates do not compare. Figure training_time shows those."]
    return plot
