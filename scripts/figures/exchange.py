"""The figure of all-reduces: time vs. size of the array, from rows of the workload exchange. scripts/figures/draw.py documents
the return value."""

from devices import Devices, Missing, about_yours, best_lines, device_of
from plot import Plot, log_range, log_ticks, micros_tick, ranks_words, x_axis
from rows import newest, of_one_job, sweep_of

COMMAND = "mpirun -n 2 ./fdsl-bench --workload exchange --variant all --bytes 1K:256M:2x --verify --out results/exchange.csv"
TICKS_MAX = 9


def size_words(size):
    for limit, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= limit:
            return f"{size / limit:.4g} {unit}"
    return f"{size:.0f} B"


def size_axis(sizes):
    """Returns a log axis with ticks at powers of two."""
    low, high = min(sizes) / 1.4, max(sizes) * 1.4
    powers = [e for e in range(41) if low <= 2.0**e <= high] or [0]
    at = [2.0**e for e in powers[::-(-len(powers) // TICKS_MAX)]]
    return {**x_axis(low, high, at), "x_tick_text": list(map(size_words, at))}


def figure(measured):
    several = [row for row in measured.exchanges if row["ranks"] > 1]  # a single rank exchanges nothing
    lines = best_lines(of_one_job(several, lambda row: (row["ranks"], row["dtype"])),
                       lambda row: (device_of(row), row["variant"], sweep_of(row)), "array_bytes")
    if not lines:
        raise Missing(COMMAND, measured.exchanges)
    devices = Devices([row for points in lines for row in points], item="sums")
    lines = [points for points in lines if device_of(points[0]) in devices.groups]
    plot = Plot("Time per all-reduce vs. size of the array")
    devices.add_lines(plot, lines, lambda row: row["variant"],
                      lambda row: (row["array_bytes"], *map(row.micros, ("time_median_s", "time_min_s", "time_p95_s"))), devices.order)
    shown = [row for points in lines for row in points]
    low, high = log_range([value for points in plot.blocks for _, *values in points for value in values])
    plot.variables = {**log_ticks(low, high, micros_tick), **size_axis([row["array_bytes"] for row in shown])}
    chooses = " peer uses peer-one-shot or peer-two-shot, so its points can be hidden by theirs."
    plot.caption = [f"{ranks_words(shown[0]['ranks'])}, {shown[0]['dtype']}. Median time of the slowest rank's runs, divided by the "
                    "number of all-reduces per run; whiskers: minimum to 95th percentile."
                    + chooses * any(row["variant"] == "peer" for row in shown)] + devices.caption()
    plot.notes += about_yours(measured.exchanges, newest(measured.exchanges), shown, ("ranks", "dtype", "array_bytes"),
                              COMMAND)
    plot.add_rings()
    return plot
