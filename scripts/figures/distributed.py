"""The figure of training on several ranks: samples per second vs. ranks, from rows of the workload train.
scripts/figures/draw.py documents the return value."""

import collections
import statistics

from devices import Devices, Missing, about_yours, device_of
from learning import JOB, about_job
from plot import Plot, wrap
from rows import Row, sweep_of
from scaling import KINDS, ideal, panel_variables, same_threads

COMMAND = ("scripts/compare/pytorch.py --ranks 1,2 --variant train-omp --model lenet --batch 64 --epochs 3 "
           "--out results/ranks.csv")


def job_over_ranks(row, kind):
    """Returns the values that all points of the figure share. The batch is that of one rank for weak scaling, and the global batch
    for strong scaling."""
    batch = row["batch"] / (row["ranks"] if kind == "weak" else 1)
    return kind, batch, row["train_samples"], row["test_samples"], *(row.settings[column] for column in JOB if column != "batch")


def point_of(rows):
    """Returns a copy of the last row. Its rate is the median over the epochs; rate_low and rate_high are the extremes."""
    rates = sorted(row["items_per_s"] for row in rows)
    point = Row(rows[-1], items_per_s=statistics.median(rates), rate_low=rates[0], rate_high=rates[-1], efficiency=None)
    point.texts, point.source, point.file = rows[-1].texts, rows[-1].source, rows[-1].file
    return point


def lines_of(rows, kind):
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
            jobs[job][line][ranks] = point_of(epochs)
            alone = trainings.get((job, (*line[:-1], ""), 1))
            if alone:
                jobs[job][line][1] = point_of(alone)
    return jobs


def best_lines(lines):
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
    jobs = [(best_lines(lines), kind) for kind in KINDS for lines in lines_of(rows, kind).values()]
    return max(jobs, key=lambda job: worth(job[0]), default=([], ""))


def figure(measured):
    candidates = [row for row in measured.trains if row["feed"] != "constant" and not row["init"]]
    lines, kind = best_job(candidates)
    if not lines:
        raise Missing(COMMAND, measured.trains)
    devices = Devices([row for points in lines for row in points], item="first steps")
    lines = [points for points in lines if device_of(points[0]) in devices.groups]
    shown_devices = list(devices.groups)
    lines.sort(key=lambda points: (shown_devices.index(device_of(points[0])), devices.order(points[0])))
    plot = Plot("Training throughput vs. ranks")
    add_legend(plot, devices, lines)
    plot.blocks = [[(row["ranks"], row["items_per_s"], row["rate_low"], row["rate_high"]) for row in points] for points in lines]
    plot.blocks += [ideal(points) if points[0]["efficiency"] else [(points[0]["ranks"], points[0]["items_per_s"], 0, 0)]
                    for points in lines]  # without a point on one rank, the ideal is unknown
    plot.variables = {"series": len(lines), "series_style": [devices.style(points[-1]) for points in lines],
                      "joined": [int(same_threads(points)) for points in lines],
                      **panel_variables(plot, lines, [kind]), "y_name": "samples per second",
                      "panel_title": [KINDS[kind]]}
    plot.caption = [f"{about_job(lines[0][0])} Median of the epochs; whiskers: slowest and fastest epoch. Gray: ideal scaling. "
                    "Percentages: efficiency relative to one rank."] + devices.caption()
    shown = [row for points in lines for row in points]
    plot.notes += about_yours(measured.trains, [], shown, ("ranks", "batch"), COMMAND)
    return plot


def add_legend(plot, devices, lines):
    for device, name, whose in devices.names():
        plot.legend += [(0, line) for line in name] + [(0.5, whose)]
        for points in lines:
            if device_of(points[0]) == device:
                joined = 0 if same_threads(points) and len(points) > 1 else 0.1
                plot.legend.append((devices.style(points[0]) + joined, points[0]["variant"]))
                if points[-1].get("exchange"):
                    plot.legend += [(0.75, line) for line in wrap(f"exchange: {points[-1]['exchange']}", 200, 11)]
