"""The figure of pipelines, from rows of the workload train: the bubble (the share of a step in which a stage waits) vs.
micro-batches per step, as measured and by formula.
scripts/figures/draw.py documents the return value."""

import collections
import statistics

from devices import Missing, about_yours, device_of
from learning import about_job
from plot import Plot, nice_above, short_device, x_axis
from rows import DEFAULTS, of_one_job

COMMAND = ("for m in 1 2 4 8 16; do for s in gpipe 1f1b zb-h1; do mpirun --bind-to none -n 2 ./fdsl-bench --variant train-omp "
           "--model cnn-deep --train-size 4096 --batch 1024 --scaling strong --epochs 3 --threads 1 --parallel pipeline "
           "--microbatches $m --schedule $s --out results/pipeline.csv; done; done")
JOB = tuple(column for column in DEFAULTS["train"] if column not in ("epochs", "data", "sync", "lr_scale", "schedule", "microbatches"))
OF_PIPELINE = ("parallel", "stages", "microbatches", "schedule")
SLOTS = {"gpipe": 2, "1f1b": 5, "zb-h1": 6}  # colours and point shapes of plots/common.gp
MEASURED, FORMULA = 10, 80  # groups of line styles: filled and open points


def best_job(rows):
    """Returns the rows of one job on one device with one number of stages. Prefers the user's rows, then the job with most
    points, then the newest."""
    def job_of(row):
        return (device_of(row), row["variant"], row["threads"], row["stages"], *(row.settings[column] for column in JOB))
    return of_one_job(rows, job_of, lambda job: len({(row["schedule"], row["microbatches"]) for row in job}))


def points_of(rows, schedule, column):
    """Returns (micro-batches, median, minimum, maximum) over the epochs, in percent."""
    values = collections.defaultdict(list)
    for row in rows:
        if row["schedule"] == schedule:
            values[row["microbatches"]].append(100 * row[column])
    return [(micros, statistics.median(of), min(of), max(of)) for micros, of in sorted(values.items())]


def figure(measured):
    rows = best_job([row for row in measured.pipelines if row["stages"] > 1])
    if not rows:
        raise Missing(COMMAND, measured.pipelines)
    row = rows[0]
    plot = Plot("Bubble of a pipeline vs. micro-batches per step")
    plot.legend += [(0, short_device(row["device"])), (0.5, f"{row['variant']}, {row['stages']:.0f} stages")]
    for group, column, word in ((MEASURED, "bubble", "measured"), (FORMULA, "bubble_formula", "formula")):
        lines = collections.defaultdict(list)  # schedules by points, because two schedules can have the same formula
        for schedule in sorted({row["schedule"] for row in rows}, key=list(SLOTS).index):
            lines[tuple(points_of(rows, schedule, column))].append(schedule)
        for points, schedules in lines.items():
            plot.add_series(group + SLOTS[schedules[-1]], f"{' and '.join(schedules)}, {word}", list(points))
    micros = sorted({row["microbatches"] for row in rows})
    plot.variables = {"percent_high": nice_above(max(value for points in plot.blocks for _, *values in points for value in values)),
                      **x_axis(micros[0] / 1.2, micros[-1] * 1.2, micros)}
    plot.caption = [f"{about_job(row, OF_PIPELINE)} Measured: median of the epochs, mean over the stages; whiskers: minimum and maximum. "
                    "Formula: for stages of equal cost and messages that take no time."]
    plot.notes += about_yours(measured.pipelines, measured.pipelines, rows, JOB, COMMAND)
    return plot
