"""Figures that compare training on generated samples with training on loaded samples, from rows of the workload train.
scripts/figures/draw.py documents the return values."""

import collections
import os

from devices import Missing, about_yours, device_of
from plot import Plot, linear_ticks, nice_above, number_words, short_device, x_axis
from rows import DEFAULTS

COMMAND = "scripts/compare/live_training.sh DIR results/live_training.csv"
# OF_DATA: columns that may differ between the lines of the figure.
OF_DATA = ("data", "image", "label", "train_size", "test_size", "classes", "preset", "res", "out_res", "fit", "channels",
           "feed", "generator", "fresh", "epochs")
JOB = tuple(column for column in DEFAULTS["train"] if column not in OF_DATA)
MADE_HERE = ("synth", "digits", "clips")
LIVE, CONSTANT, STORED = "generated live", "one constant batch", "generated in advance"
STYLES = {CONSTANT: 18, LIVE: 17, STORED: 15, "loaded from shards": 12, "loaded from files": 13}


def fed_with(row):
    if row["feed"] == "constant":
        return CONSTANT
    if row["data"] == "synth":
        return LIVE if row["feed"] == "live" else STORED
    return f"loaded from {os.path.basename(row['data'].rstrip('/'))}"


def job_of(row):
    return device_of(row) + (row["variant"], row["threads"]) + tuple(row.settings[column] for column in JOB) + (
        row["train_samples"], row["test_samples"])


def is_loaded(name):
    return name.startswith("loaded")


def feeds(rows):
    """Returns {feed: rows in order of epochs} for the best job (job_of()) that has both live and loaded samples. Prefers the user's jobs,
    then the job with the most feeds, then the newest."""
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
    """Returns the seconds from opening the data to the end of an epoch, without tests."""
    return row["opening_s"] + row["trained_s"]


def images(row):
    return row["epoch"] * row["items"]


def same_training(lines):
    """Returns whether live and loaded samples gave exactly the same losses in all epochs that both have."""
    live = {row["epoch"]: row["train_loss"] for row in lines[LIVE]}
    return all(row["train_loss"] == live.get(row["epoch"], row["train_loss"])
               for name, line in lines.items() if is_loaded(name) for row in line)


def about(lines):
    row = lines[LIVE][-1]
    return (f"{row['variant']}, {row['model']} with {number_words(row['parameters'])} parameters, batch {row['batch']:.0f}, "
            f"{number_words(row['train_samples'])} images of {row['res']}² pixels per epoch, {row['classes']} classes. "
            f"{row['device']} ({'your rows' if row.source == 'yours' else 'reference rows'}, host {row['host']}, "
            f"revision {row['revision']}).")


def notes(measured, lines):
    """Returns a note if none of these rows are the user's."""
    return about_yours(measured.trains, [], [row for line in lines.values() for row in line], JOB, COMMAND)


def training_time(measured):
    lines = feeds(measured.trains)
    if not lines:
        raise Missing(COMMAND, measured.trains, needs="an NVIDIA GPU")
    plot = Plot("Training time vs. images: generated or loaded")
    live = lines[LIVE][-1]
    plot.legend += [(0, short_device(live["device"])), (0.5, "yours" if live.source == "yours" else "reference")]
    for name, line in lines.items():
        points = [(0, line[0]["opening_s"])] + [(1e-3 * images(row), seconds(row)) for row in line]
        plot.add_series(STYLES.get(name, 14), name, points)
        plot.legend.append((0.75, f"{images(line[-1]) / line[-1]['trained_s']:,.0f} images/s after opening"))
    points = [point for block in plot.blocks for point in block]
    x_high = 1.02 * max(x for x, _ in points)
    plot.variables = {"series": len(plot.blocks), "series_style": plot.styles, "y_high": nice_above(max(y for _, y in points)),
                      **x_axis(0, x_high, linear_ticks(0, x_high), log=False)}
    share = live["generate_share"]
    plot.caption = [
        f"Time from opening the data (including initial reading or generation) to the end of each epoch, without tests. "
        f"{about(lines)}"
        + (f" Generating takes {100 * share:.2g} % of the training time{', concurrently with the steps' if live.on_gpu else ''}."
           if share is not None else "")
        + (" Losses with live and loaded images are identical." if same_training(lines) else "")]
    plot.notes += notes(measured, lines)
    return plot
