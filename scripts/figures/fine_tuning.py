"""The figure of fine-tuning: training from pre-trained parameters (--init) and from scratch. scripts/figures/draw.py documents the
return value."""

import collections
import statistics

from devices import Devices, Missing, about_yours, device_of
from learning import JOB, data_name, error_percent
from plot import Plot, log_range, log_ticks, number_words, ticks_125, x_axis

COMMAND = "scripts/compare/fine_tuning.sh DIR results/fine_tuning.csv"
SIZES_MAX = 4
SLOTS = (3, 7, 5, 1)  # colours (plots/common.gp) by size of the training set, smallest first
SCRATCH = 50  # the line style of training from scratch is this number plus a slot: dashed, with open points
# These columns may differ within a job.
FREE = ("train_size", "seed")


def job_of(row):
    return (device_of(row), row["variant"], data_name(row), row["test_samples"]) + tuple(
        row.settings[column] for column in JOB if column not in FREE)


def lines_of(rows):
    """Returns {(training samples, --init): rows} for the best job (job_of()). Prefers the user's jobs, then the job with most
    sizes that were trained both from scratch and from pre-trained parameters, then the newest. All pre-trained rows have the
    same --init."""
    jobs = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        jobs[job_of(row)][row["train_samples"], row["init"]].append(row)
    best = (False,), {}
    for lines in jobs.values():
        for init in {init for _, init in lines} - {""}:
            sizes = [size for size, other in lines if other == init and (size, "") in lines]
            begun = [row for size in sizes for row in lines[size, init]]
            newest = max((row["time_utc"] for row in begun), default="")
            rank = sizes != [], any(row.source == "yours" for row in begun), len(sizes), newest
            chosen = {(size, other): lines[size, other] for size in sizes for other in ("", init)}
            best = max(best, (rank, chosen), key=lambda pair: pair[0])
    return best[1]


def by_epoch(rows):
    """Returns (samples seen, median error, minimum error, maximum error) per epoch, over the newest row of each seed."""
    seeds = {(row["epoch"], row["seed"]): row for row in sorted(rows, key=lambda row: row["time_utc"])}
    epochs = collections.defaultdict(list)
    for (epoch, _), row in seeds.items():
        epochs[epoch].append(error_percent(row))
    size = rows[0]["train_samples"]
    return [(epoch * size, statistics.median(errors), min(errors), max(errors)) for epoch, errors in sorted(epochs.items())]


def figure(measured):
    lines = lines_of(measured.trains)
    if not lines:
        raise Missing(COMMAND, measured.trains)
    plot = Plot("Fine-tuning: test error vs. samples seen")
    sizes = sorted({size for size, _ in lines})[-SIZES_MAX:]
    shown = [row for (size, _), rows in lines.items() if size in sizes for row in rows]
    devices = Devices(shown, item="first steps")
    for _, name, whose in devices.names():
        plot.legend += [(0, text) for text in name] + [(0.5, whose)]
    for slot, size in zip(SLOTS, sizes):
        plot.legend.append((0, f"{number_words(size)} samples"))
        for (_, init), rows in sorted(item for item in lines.items() if item[0][0] == size):
            plot.add_series(slot + (10 if init else SCRATCH), "pre-trained" if init else "from scratch", by_epoch(rows))
    points = [point for points in plot.blocks for point in points]
    low, high = log_range([value for point in points for value in point[2:]])
    x_low, x_high = min(point[0] for point in points) / 1.3, max(point[0] for point in points) * 1.3
    plot.variables = {"series": len(plot.blocks), "series_style": plot.styles, "y_name": "test error (%)",
                      "x_name": "samples seen (training samples × epochs)",
                      **x_axis(x_low, x_high, ticks_125(x_low, x_high)),
                      **log_ticks(low, min(high, 100), number_words)}
    row, counts = shown[0], sorted({len({row["seed"] for row in rows}) for rows in lines.values()})
    seeds = "One seed" if counts[-1] == 1 else f"Median, minimum and maximum of {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds"
    inits = {row["init"] for row in shown if row["init"]}
    plot.caption = [f"{row['model']}, {data_name(row)}, {row['variant']}: "
                    f"{number_words(row['test_samples'])} test samples; batch {row['batch']:.0f}, {row['optimizer']} "
                    f"at {row['lr']}. Pre-trained: initial parameters from {', '.join(sorted(inits))}. {seeds} per line."] + devices.caption()
    alone = [row for row in measured.trains if row.source == "yours" and row["model"] == shown[0]["model"]]
    if alone and not any(row.source == "yours" for row in shown):
        plot.notes.append(f"your {len(alone)} row{'s do' if alone[1:] else ' does'} not include pre-trained and from-scratch runs of "
                          f"the same size; to measure them: {COMMAND}")
    else:
        plot.notes += about_yours(measured.trains, [row for row in measured.trains if row["init"]], shown, JOB, COMMAND)
    return plot
