"""Figures of training, from rows of the workload train. scripts/figures/draw.py documents the return values."""

import collections
import operator

from devices import NO_SLOT, SLOTS, Devices, Missing, about_yours, device_of
from plot import Plot, linear_ticks, linear_y_axis, log_range, log_ticks, number_words, ranks_words, short_device, ticks_125, x_axis
from rows import DEFAULTS, NAMED, PARAMETERS, newest, option_words

COMMAND = "./fdsl-bench --workload train --variant all --model lenet --out results/train.csv"
LOG_COMMAND = "./fdsl-bench --workload train --variant train-omp --model lenet --log results/steps.csv"
RUNS_MAX, DASHES = 10, 4  # runs in the figure learning_steps; dash patterns of plots/common.gp
LOSSES = {"bce": "binary cross-entropy"}  # names for the axis
LINEAR_BELOW = 4  # if the losses in learning_steps differ by a smaller factor, their axis is linear
OF_RANKS = ("sync", "lr_scale", "balance")  # parameters that may differ between lines, because they do not apply to one rank
# Parameters that are equal in all lines of a figure. `data` may differ, because it may be a path.
JOB = tuple(column for column in DEFAULTS["train"] if column not in ("epochs", "data", *OF_RANKS))
settings_of_job = operator.itemgetter(*JOB)


def data_name(row):
    """Returns the last part of the path of the data set: the same data set may be in other folders on other machines."""
    return row["data"].rstrip("/").split("/")[-1]


def job_of(row):
    return (data_name(row), *settings_of_job(row.settings), row["train_samples"], row["test_samples"])


def line_of(row):
    return device_of(row), row["variant"], row["threads"], row["ranks"], *(row.settings[column] for column in OF_RANKS)


def curves(rows):
    """Returns lists of rows in order of epochs, one list per value of line_of(), for the best job. Prefers
    the user's jobs, then most lines, then most rows, then the newest. Skips jobs that also have runs from pre-trained parameters
    (--init), which the figure fine_tuning shows. Also skips runs on one constant batch, whose loss is meaningless."""
    fine_tuned = {job_of(row) for row in rows if row["init"]}
    rows = [row for row in rows if job_of(row) not in fine_tuned and row["feed"] != "constant"]
    jobs = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row in sorted(rows, key=lambda row: row["time_utc"]):
        jobs[job_of(row)][line_of(row)][row["epoch"]] = row
    def worth(lines):
        measured = [row for line in lines.values() for row in line.values()]
        return (any(row.source == "yours" for row in measured), len(lines), len(measured),
                max(row["time_utc"] for row in measured))
    best = max(jobs.values(), key=worth, default={})
    return [[line[epoch] for epoch in sorted(line)] for line in best.values()]


def about_job(row, without=()):
    """Describes a job, with all its options that differ from their defaults, except those of the columns `without`."""
    apart = NAMED + tuple(PARAMETERS["train"][column].option for column in ("epochs", *OF_RANKS, *without))
    options = ", ".join([f"{row['optimizer']} at {row['lr']}"] + option_words(row.given(), apart))
    return (f"{row['model']} with {number_words(row['parameters'])} parameters, {data_name(row)}: "
            f"{number_words(row['train_samples'])} training samples, {number_words(row['test_samples'])} test samples; batch "
            f"{row['batch']:.0f}, {options}.")


def curves_plot(measured, title, y_name, value, x, about):
    """Plots value(row) vs. x(row), one line per value of line_of(): device, variant, threads, ranks, and options of
    several ranks. In `y_name`, {loss} is replaced by the loss of the job."""
    plot = Plot(title)
    lines = [line for line in curves(measured.trains) if any(value(row) is not None for row in line)]
    devices = Devices([row for line in lines for row in line], item="first steps")
    lines = [line for line in lines if device_of(line[0]) in devices.groups]
    if not lines:
        raise Missing(COMMAND, measured.trains)
    devices.add_lines(plot, [[row for row in line if value(row) is not None] for line in lines],
                      lambda row: row["variant"] + (f", {ranks_words(row['ranks'])}" if row["ranks"] > 1 else ""),
                      lambda row: (x(row), *[value(row)] * 3), devices.order)
    low, high = log_range([point[1] for points in plot.blocks for point in points])
    high = min(high, 100) if value is error_percent else high
    shown = [row for line in lines for row in line]
    plot.variables = {"y_name": y_name.format(loss=LOSSES.get(*[shown[0].settings["loss"]] * 2)), **log_ticks(low, high, number_words)}
    plot.caption = [f"{about_job(shown[0])} {about}"] + devices.caption()
    candidates = newest(measured.trains, lambda row: (row.source, job_of(row), line_of(row), row["epoch"], row["init"]))
    plot.notes += about_yours(measured.trains, candidates, shown, JOB, COMMAND)
    return plot


def epochs_axis(plot):
    last = max(point[0] for points in plot.blocks for point in points)
    plot.variables.update(x_axis(0, last + 0.5, linear_ticks(0, last + 0.5), log=False), x_name="epoch")
    return plot


def error_percent(row):
    """Returns the test error in percent. If no sample is wrong, returns the error of half a sample, because the axis is
    logarithmic."""
    return 100 * max(1 - row["test_acc"], 0.5 / row["test_samples"])


def loss(measured):
    return epochs_axis(curves_plot(measured, "Training loss vs. epoch", "training loss ({loss}, mean over the epoch)",
                                   lambda row: row["train_loss"] or None, lambda row: row["epoch"], "Loss of the training samples, before each step's update."))


def accuracy(measured):
    return epochs_axis(curves_plot(measured, "Test error vs. epoch", "test error (%)", error_percent,
                                   lambda row: row["epoch"], "Tested after every epoch."))


def to_accuracy(measured):
    plot = curves_plot(measured, "Test error vs. training time", "test error (%)", error_percent,
                       lambda row: row["trained_s"], "Time of the training steps only, without tests and checkpoints.")
    xs = [point[0] for points in plot.blocks for point in points]
    plot.variables.update(x_axis(min(xs) / 1.3, max(xs) * 1.3, ticks_125(min(xs) / 1.3, max(xs) * 1.3)), x_name="training time (s)")
    return plot


def logged_runs(measured):
    """Returns the runs in files of train --log: pairs of a key and rows in order of steps. If the user has such files, leaves out
    those of the reference. The key is (variant, model, device, ranks, seed, file, number of the run in the file). If the step
    does not increase from one row to the next, the run continues if the next rows repeat the losses of earlier steps, as a
    resumed run does. Otherwise a new run begins."""
    yours = [log for log in measured.logs if log["source"] == "yours"]
    parts = collections.defaultdict(list)  # parts of runs in which the step increases
    for log in yours or measured.logs:
        for row in log["rows"]:
            if row["loss"] is not None and row["loss"] > 0:
                of_key = parts[row["variant"], row["model"], row["device"], row["ranks"], row["seed"], log["file"].stem]
                if not of_key or row["step"] <= max(of_key[-1]):
                    of_key.append({})
                of_key[-1][row["step"]] = row
    runs = []
    for key, (first, *later) in parts.items():
        of_key = [first]
        for part in later:
            repeated = [part[step]["loss"] == of_key[-1][step]["loss"] for step in part if step in of_key[-1]]
            if repeated and all(repeated):
                of_key[-1].update(part)
            else:
                of_key.append(part)
        runs += [((*key, number), [rows[step] for step in sorted(rows)]) for number, rows in enumerate(of_key, 1)]
    return runs


def steps(measured):
    """Plots the loss over the training samples seen, one line per run."""
    runs = logged_runs(measured)
    if not runs:
        raise Missing(LOG_COMMAND)
    runs.sort(key=lambda run: run[1][-1]["time_utc"], reverse=True)
    plot, shown, used = Plot("Training loss vs. samples seen"), runs[:RUNS_MAX], collections.Counter()
    free = {}  # slots of variants that are not in SLOTS
    words = {1: "{}".format, 2: short_device, 3: ranks_words, 4: "seed {}".format, 5: "{}".format, 6: "run {}".format}
    def label_of(key):
        """Returns the variant, and what differs between its runs."""
        runs_of = [other for other, _ in shown if other[0] == key[0]]
        differs = [i for i in words if len({other[i] for other in runs_of}) > 1]
        return ", ".join([key[0]] + [words[i](key[i]) for i in differs])
    for key, rows in sorted(shown, key=lambda run: run[0]):
        slot = SLOTS.get(key[0]) or free.setdefault(key[0], 1 + (4 + len(free)) % (NO_SLOT - 1))
        style = 10 * (1 + used[slot] % DASHES) + slot
        used[slot] += 1
        plot.add_series(style, label_of(key), [(row["samples_seen"], row["loss"]) for row in rows])
    losses = [point[1] for points in plot.blocks for point in points]
    y_axis = (linear_y_axis(losses, number_words) if max(losses) < LINEAR_BELOW * min(losses) else
              log_ticks(*log_range(losses), number_words))
    last = max(point[0] for points in plot.blocks for point in points)
    plot.variables = {"x_name": "training samples seen", "y_name": "training loss (mean over the steps of a row)", **y_axis,
                      **x_axis(0, last * 1.02, linear_ticks(0, last * 1.02), log=False)}
    models = sorted({key[1] for key, _ in shown})
    hosts = sorted({f"{row['device']} (host {row['host']}, revision {row['revision']})" for _, rows in shown for row in rows[-1:]})
    plot.caption = [f"{', '.join(models)}. Loss of the training samples, before each step's update. {'; '.join(hosts)}."]
    if runs[RUNS_MAX:]:
        plot.notes.append(f"the newest {RUNS_MAX} of {len(runs)} runs")
    return plot
