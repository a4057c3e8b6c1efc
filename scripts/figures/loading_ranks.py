"""The figure of loading on several ranks: samples per second vs. ranks, from rows of the workload load.
scripts/figures/draw.py documents the return value."""

import collections

from devices import Devices, Missing, about_yours, device_of
from loading import size_words
from plot import Plot
from rows import newest, sweep_of
from scaling import ideal, panel_variables, point_of, same_threads

COMMAND = ("for n in 1 2; do mpirun --bind-to none -n $n ./fdsl-bench --variant shards --data DIR --verify "
           "--out results/load_ranks.csv; done")


def line_key(row):
    """Returns the values that the points of one line share: data, options and sweep. The batch is per rank; ranks divide the
    samples."""
    options = (value for column, value in row.settings.items() if column != "batch")
    return (device_of(row), row["variant"], sweep_of(row), row["items"], row["sample_bytes"], row["batch"] / row["ranks"], *options)


def best_lines(rows):
    """Returns one line of several ranks per device and variant. Prefers the line with the most points, then the newest line."""
    lines = collections.defaultdict(dict)
    for row in sorted(rows, key=lambda row: row["time_utc"]):
        lines[line_key(row)][row["ranks"]] = row
    best = {}
    def worth(points):
        return len(points), max(row["time_utc"] for row in points.values())
    for (device, variant, *_), points in lines.items():
        if max(points) > 1 and worth(points) >= worth(best.get((device, variant), points)):
            best[device, variant] = points
    return [[points[ranks] for ranks in sorted(points)] for points in best.values() if any(row["efficiency"] for row in points.values())]


def figure(measured):
    candidates = [row for row in measured.load_sweeps if not row["compute"]]
    lines = best_lines(candidates)
    if not lines:
        raise Missing(COMMAND, measured.loads)
    devices = Devices([row for points in lines for row in points], item="samples")
    lines = [points for points in lines if device_of(points[0]) in devices.groups]
    shown_devices = list(devices.groups)
    lines.sort(key=lambda points: (shown_devices.index(device_of(points[0])), devices.order(points[0])))
    plot = Plot("Loading throughput vs. ranks")
    for device, name, whose in devices.names():
        plot.legend += [(0, line) for line in name] + [(0.5, whose)]
        for points in lines:
            if device_of(points[0]) == device:
                row = points[-1]
                joined = 0 if same_threads(points) and len(points) > 1 else 0.1
                plot.legend += [(devices.style(row) + joined, row["variant"]),
                                (0.75, f"{size_words(row['sample_bytes'])} per sample"), (0.75, f"cache {row['cache']}")]
    plot.blocks = [[point_of(row) for row in points] for points in lines] + list(map(ideal, lines))
    plot.variables = {"series": len(lines), "series_style": [devices.style(points[-1]) for points in lines],
                      "joined": [int(same_threads(points)) for points in lines],
                      **panel_variables(plot, lines, ["strong"]), "y_name": "samples per second",
                      "panel_title": ["strong scaling: ranks divide the samples"]}
    plot.caption = ["Gray: ideal scaling. Percentages: measured efficiency relative to one rank alone. Whiskers: rates at the "
                    "95th percentile and the minimum of the slowest rank's times."] + devices.caption()
    shown = [row for points in lines for row in points]
    of_ranks = [row for row in newest(candidates) if row["ranks"] > 1]
    plot.notes += about_yours(of_ranks, of_ranks, shown, ("ranks", "threads", "batch", "data"), COMMAND)
    return plot
