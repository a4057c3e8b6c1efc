"""The figure of all-reduces: time vs. size of the array, from rows of the workload exchange. scripts/figures/draw.py documents
the return value."""

import collections

from devices import Devices, Missing, about_yours, device_of
from plot import Plot, log_range, log_ticks, micros_tick, ranks_words, x_axis
from rows import newest, sweep_of

COMMAND = "mpirun -n 2 ./fdsl-bench --workload exchange --variant all --bytes 1K:256M:2x --verify --out results/exchange.csv"
TICKS_MAX = 9


def size_words(size):
    for limit, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= limit:
            return f"{size / limit:.4g} {unit}"
    return f"{size:.0f} B"


def of_one_job(rows):
    """Returns the rows of one job, that is, of one number of ranks and one element type. Prefers the user's rows, then the job with
    most rows, then the newest. A single rank exchanges nothing, so its rows are not drawn."""
    jobs = collections.defaultdict(list)
    for row in rows:
        if row["ranks"] > 1:
            jobs[row["ranks"], row["dtype"]].append(row)
    def worth(job):
        return (any(row.source == "yours" for row in job), len(job), max(row["time_utc"] for row in job))
    return max(jobs.values(), key=worth, default=[])


def best_lines(rows):
    """Returns one line per device and variant, in order of size. Prefers the sweep with the most points, then the newest."""
    sweeps = collections.defaultdict(dict)
    for row in sorted(rows, key=lambda row: row["time_utc"]):
        sweeps[device_of(row), row["variant"], sweep_of(row)][row["array_bytes"]] = row
    def worth(points):
        return len(points), max(row["time_utc"] for row in points.values())
    lines = {}
    for (device, variant, _), points in sweeps.items():
        if worth(points) >= worth(lines.get((device, variant), points)):
            lines[device, variant] = points
    return [[points[size] for size in sorted(points)] for points in lines.values()]


def size_axis(sizes):
    """Returns a log axis with ticks at powers of two."""
    low, high = min(sizes) / 1.4, max(sizes) * 1.4
    powers = [e for e in range(41) if low <= 2.0**e <= high] or [0]
    at = [2.0**e for e in powers[::-(-len(powers) // TICKS_MAX)]]
    return {**x_axis(low, high, at), "x_tick_text": list(map(size_words, at))}


def figure(measured):
    lines = best_lines(of_one_job(measured.exchanges))
    if not lines:
        raise Missing(COMMAND, measured.exchanges)
    devices = Devices([row for points in lines for row in points], item="sums")
    lines = [points for points in lines if device_of(points[0]) in devices.groups]
    plot = Plot("Time per all-reduce vs. size of the array")
    for device, name, whose in devices.names():
        plot.legend += [(0, line) for line in name] + [(0.5, whose)]
        for points in sorted((points for points in lines if device_of(points[0]) == device),
                             key=lambda points: devices.order(points[0])):
            plot.add_series(devices.style(points[0]), points[0]["variant"],
                            [(row["array_bytes"], *map(row.micros, ("time_median_s", "time_min_s", "time_p95_s")))
                             for row in points])
            plot.rings += [(row["array_bytes"], row.micros("time_median_s")) for row in points if row.unsettled]
    shown = [row for points in lines for row in points]
    low, high = log_range([value for points in plot.blocks for _, *values in points for value in values])
    plot.variables = {"series": len(plot.blocks), "series_style": plot.styles, **log_ticks(low, high, micros_tick),
                      **size_axis([row["array_bytes"] for row in shown])}
    chooses = " peer uses peer-one-shot or peer-two-shot, so its points can be hidden by theirs."
    plot.caption = [f"{ranks_words(shown[0]['ranks'])}, {shown[0]['dtype']}. Median time of the slowest rank's runs, divided by the "
                    "number of all-reduces per run; whiskers: minimum to 95th percentile."
                    + chooses * any(row["variant"] == "peer" for row in shown)] + devices.caption()
    plot.notes += about_yours(measured.exchanges, newest(measured.exchanges), shown, ("ranks", "dtype", "array_bytes"),
                              COMMAND)
    plot.add_rings()
    return plot
