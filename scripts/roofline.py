"""The roofline: arithmetic done under each device's ceilings, of rows of the workload synth. scripts/figures.py says what
it is that it returns."""

import collections
import math

from devices import SLOTS, Devices, Missing, device_of, threads_words
from generating import PUBLISHED_GROUP, paper_rows, preferred
from plot import (INNER_PX, Plot, count_words, log_range, log_ticks, short_device, shortened, text_px, ticks_125,
                  x_axis)

OPERATIONS_PER_VERTEX = 76  # an orbit; docs/timing.md


def operations_per_s(row):
    return OPERATIONS_PER_VERTEX * row["vertices"] * row["orbits"] * row["items_per_s"]


def figure(measured):
    rows = [row for row in paper_rows(measured, tuple(SLOTS)) if row["roofline_share"] and row["bytes_per_s"]]
    if not rows:
        raise Missing("./fdsl-bench --variant all --verify --out results/synth.csv", measured.rows)
    groups = collections.defaultdict(list)
    for row in rows:
        groups[device_of(row), row["variant"], row["res"], row["vertices"], row["orbits"]].append(row)
    rows = [max(group, key=preferred) for group in groups.values()]
    devices = Devices(rows, 2)
    rows = [row for row in rows if device_of(row) in devices.groups]
    plot = Plot("Arithmetic done, under each device's ceilings")
    series, styles = [], []
    for device, name, whose in devices.names():
        plot.legend += [(0, line) for line in name] + [(0.5, whose)]
        for variant in SLOTS:
            mine = [row for row in rows if device_of(row) == device and row["variant"] == variant]
            if mine:
                hollow = devices.groups[device] > 1
                styles.append(10 * PUBLISHED_GROUP * hollow + 10 * (not hollow) + SLOTS[variant])
                plot.legend.append((styles[-1] + 0.1, variant))
                series.append([(operations_per_s(row) / row["bytes_per_s"], operations_per_s(row)) for row in mine])
    xs = [x for points in series for x, _ in points]
    roofs = find_roofs(measured, rows)
    ridges = [roof["operations_per_s"] / roof["bytes_per_s"] for roof in roofs.values() if roof["bytes_per_s"]]
    # Room on the left for the slopes of memory, on the right for the ceilings' names.
    x_low, x_high = log_range(xs + [ridge / 4 for ridge in ridges], 1.5)[0], log_range(xs, 8)[1]
    lines = [roof_line(roof, x_low, x_high) for roof in roofs.values()]
    low, high = log_range([y for points in series + lines for _, y in points], 2)
    plot.blocks = series + lines + [roof_names(roofs, x_low, x_high, low, high)]
    slopes = sorted((roof for roof in roofs.values() if roof["bytes_per_s"]
                     and roof["operations_per_s"] / roof["bytes_per_s"] > 3 * x_low),
                    key=lambda roof: -roof["bytes_per_s"])
    plot.variables = {"series": len(series), "series_style": styles, "roofs": len(lines),
                      **x_axis(x_low, x_high, ticks_125(x_low, x_high)), **log_ticks(low, high, count_words),
                      "slopes": len(slopes), "slope_rate": [roof["bytes_per_s"] for roof in slopes],
                      "slope_text": [f"{count_words(roof['bytes_per_s'])}B/s" for roof in slopes],
                      "roof_dash": [devices.groups[device] for device, _ in roofs]}
    plot.caption = ["One point a size: 76 operations a vertex and orbit over the bytes of the finished images. "
                    "Ceilings are peak rates by clock and lanes (docs/timing.md)."
                    + ("" if all(roof["bytes_per_s"] for roof in roofs.values()) else
                       " The ceiling of memory is drawn where a row or the machine's file tells it.")
                    + (" Dashed ceilings: devices with open points." if max(devices.groups.values()) > 1 else "")]
    plot.caption += devices.caption()
    return plot


def find_roofs(measured, rows):
    """{(device, threads): peaks}. roofline_share says how far a row is from the least of its ceilings; the highest
    that any row has is that of arithmetic, and a lower one is that of memory at the row's intensity. env.json of the
    same machine tells both."""
    roofs = {}
    for key in sorted({(device_of(row), int(row["threads"])) for row in rows}):
        mine = [row for row in rows if (device_of(row), int(row["threads"])) == key]
        attainable = {id(row): operations_per_s(row) / row["roofline_share"] for row in mine}
        peak = max(attainable.values())
        bound = [row["bytes_per_s"] / row["roofline_share"] for row in mine if attainable[id(row)] < 0.99 * peak]
        roofs[key] = {"operations_per_s": peak, "bytes_per_s": max(bound, default=None)}
        for machine in (machine["values"] for machine in measured.machines if machine["source"] == key[0][0]):
            if key[0][3] and machine.get("gpu") == key[0][2] and machine.get("gpu_peak_operations_per_s") \
                    and machine.get("gpu_peak_bytes_per_s"):
                roofs[key] = {"operations_per_s": float(machine["gpu_peak_operations_per_s"]),
                              "bytes_per_s": float(machine["gpu_peak_bytes_per_s"])}
    return roofs


def roof_names(roofs, x_low, x_high, y_low, y_high):
    """(x, y, words, side) of the ceilings' names, right-aligned and above their line (side 1), or below it (-1) or
    further left where they would touch another name or line."""
    px_x, px_y = INNER_PX / math.log(x_high / x_low), 320 / math.log(y_high / y_low)
    lines = sorted({px_y * math.log(roof["operations_per_s"]) for roof in roofs.values()}, reverse=True)
    names, taken = [], []
    for (device, threads), roof in sorted(roofs.items(), key=lambda item: -item[1]["operations_per_s"]):
        whose = shortened(short_device(device[2]), 30) + ("" if device[3] else f", {threads_words([threads])}")
        words = f"{whose}: {count_words(roof['operations_per_s'])}/s"
        at = px_y * math.log(roof["operations_per_s"])
        places = [(right, side) for right in range(4, int(INNER_PX / 2), 20) for side in (1, -1)]
        def touches(place):
            right, middle = place[0], at + 9 * place[1]
            return any(abs(middle - other) < 15 and right < end + 8 and begin - 8 < right + text_px(words, 10)
                       for begin, end, other in taken)
        def crossed(place):
            return any(line != at and abs(line - at - 9 * place[1]) < 8 for line in lines)
        right, side = min(places, key=lambda place: (touches(place), crossed(place)))
        taken.append((right, right + text_px(words, 10), at + 9 * side))
        names.append((x_high * math.exp(-right / px_x), roof["operations_per_s"], words, side))
    return names


def roof_line(roof, x_low, x_high):
    peak, memory = roof["operations_per_s"], roof["bytes_per_s"]
    if not memory:
        return [(x_low, peak), (x_high, peak)]
    ridge = peak / memory
    slope = [(x_low, x_low * memory)] if ridge > x_low else []
    if ridge >= x_high:
        return slope + [(x_high, x_high * memory)]
    return slope + [(max(ridge, x_low), peak), (x_high, peak)]
