"""Figures of image generation, from rows of the workload synth. They show the time vs. a parameter, beside published points;
the paper's variants beside `fused`; and the share of each stage in the time of an image. scripts/figures/draw.py documents the
return values."""

import collections

from devices import PUBLISHED, SLOTS, Devices, Missing, about_yours, add_bar_devices, device_of, dot, series_over
from plot import (WIDTH, Plot, count_words, linear_ticks, log_range, log_ticks, micros_tick, micros_words, ticks_125, x_axis)
from rows import DEFAULTS, newest, sweep_of

PUBLISHED_SLOTS = {"Python-CPU": 1, "CUDA-Baseline": 3, "CUDA-Batched": 6}
LADDER = ("gbase", "mem", "rng", "bat", "fused")
IN_FIGURES = ("naive", "omp", "gbase", "bat", "fused") + PUBLISHED
PUBLISHED_GROUP, PUBLISHED_CODE_GROUP = 5, 6
PAPER = "published: PDP 2026"

# The paper's job: one class, unscaled gray images. Columns in VARIED may have any value.
VARIED = ("batch", "res", "vertices", "out_res", "seed", "instance")
ERROR_BARS = "Median run time divided by the number of images; whiskers: minimum to 95th percentile."


# ---- Selection -------------------------------------------------------------------------------------------------


def is_paper_job(row):
    """Returns whether a row has the paper's class and unscaled gray images. The figures of this module show such rows."""
    return row.texts["out_res"] == row.texts["res"] and all(
        row.settings[column] == default for column, default in DEFAULTS["synth"].items() if column not in VARIED)


def paper_rows(measured, variants, rows=None, **fixed):
    """Returns the rows of the paper's job on one rank with these variants and these values of numeric columns. They are chosen
    from `rows` (default: the newest row of each measurement)."""
    return [row for row in (measured.rows if rows is None else rows)
            if row["ranks"] == 1 and row["variant"] in variants and is_paper_job(row)
            and all(row[column] == value for column, value in fixed.items())]


def preferred(row):
    """Key for max() over rows of one variant. Prefers the largest batch up to 256, otherwise the smallest above 256; then most
    threads, then the newest."""
    batch = row["batch"]
    return (batch <= 256, batch if batch <= 256 else -batch, row["threads"], row["time_utc"])


def one_reference(series):
    """Returns the lines without those of further GPUs and CPUs of the reference. Keeps one of each kind: a model of which the
    user has rows, too, or else the one with the most points."""
    yours = {row["device"] for points in series for row in points if row.source == "yours"}
    count = collections.Counter(device_of(row) for points in series for row in points if row.source == "reference")
    kept = {on_gpu: max((device for device in count if device[3] == on_gpu), default=None,
                        key=lambda device: (device[2] in yours, count[device])) for on_gpu in (True, False)}
    return [points for points in series if points[0].source == "yours" or device_of(points[0]) in kept.values()]


def best_rows(rows):
    """Returns {(device, variant): row} at the preferred batch, of one_reference()."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[device_of(row), row["variant"]].append(row)
    kept = one_reference([[max(group, key=preferred)] for group in groups.values()])
    return {(device_of(row), row["variant"]): row for row, in kept}


# ---- Time vs. a parameter --------------------------------------------------------------------------------------


def lines_plot(measured, title, figure, x, fixed, free, command, caption):
    """Plots time per image vs. column x: the rows of each device, and the published points. If x is the batch, also plots the times of the
    published code on an H200."""
    plot = Plot(title)
    candidates = paper_rows(measured, IN_FIGURES, measured.sweeps, **fixed)
    ours = one_reference(series_over(candidates, x, lambda row: (device_of(row), row["variant"]),
                                     lambda row: sweep_of(row) + tuple(row[column] for column in free), preferred))
    devices = Devices([row for points in ours for row in points])
    devices.add_lines(plot, ours, lambda row: row["variant"] + (f", batch {row['batch']:.0f}" if x != "batch" else ""),
                      lambda row: (row[x], *map(row.micros, ("time_median_s", "time_min_s", "time_p95_s"))),
                      lambda row: SLOTS[row["variant"]])
    add_published(measured, plot, figure)
    if figure == "batchsize":
        add_published_code(measured, plot)
    if not plot.blocks:
        raise Missing(command, measured.rows)
    low, high = log_range([value for points in plot.blocks for _, *values in points for value in values])
    plot.variables = {**log_ticks(low, high, micros_tick), **axis_of([at for points in plot.blocks for at, *_ in points], x)}
    plot.caption = [f"{caption} {ERROR_BARS}"] + devices.caption()
    if not ours:
        plot.caption.append("Published points only; there are no rows.")
    shown = [row for points in ours for row in points if device_of(row) in devices.groups]
    plot.notes += about_yours(measured.rows, newest(candidates), shown, free, command)
    plot.add_rings()
    return plot


def add_published(measured, plot, figure):
    plot.legend.append((0, PAPER))
    for name, points in measured.published_series(figure).items():
        plot.add_series(10 * PUBLISHED_GROUP + PUBLISHED_SLOTS.get(name, 8), name,
                        [(at, *[1e3 * ms] * 3) for at, ms in points])


def axis_of(xs, x):
    """Returns the x axis of a parameter. Axes of resolutions are logarithmic, with ticks at the measured values; axes of batches
    are logarithmic, with ticks at powers of two. Other axes are linear unless the values span more than a factor of 20."""
    low, high = min(xs) / 1.3, max(xs) * 1.3
    if x == "res":
        return x_axis(low, high, sorted(set(xs)))
    if x == "batch":
        return x_axis(low, high, [2.0**e for e in range(64) if low <= 2.0**e <= high])
    if max(xs) > 20 * min(xs):
        return x_axis(low, high, ticks_125(low, high))
    room = 0.05 * (max(xs) - min(xs)) or 0.5 * max(xs)
    low, high = max(0, min(xs) - room), max(xs) + room
    return x_axis(low, high, linear_ticks(low, high), log=False)


def add_published_code(measured, plot):
    points = [(point["batch"], *[1e6 * point["published_s_per_image"]] * 3) for point in measured.published_code
              if point["variant"] == "bat"]
    if points:
        plot.legend += [(0, "published code"), (0.5, "on an NVIDIA H200")]
        plot.add_series(10 * PUBLISHED_CODE_GROUP + SLOTS["bat"], "CUDA-Batched", sorted(points))


def vertices(measured):
    return lines_plot(measured, "Time per image vs. vertices", "nvertex", "vertices", {"res": 512},
                      ("batch", "threads", "seed", "instance"), "scripts/sweep/run.sh configs/sweep_vertices.tsv",
                      "512 × 512 pixels, 200 orbits.")


def resolution(measured):
    return lines_plot(measured, "Time per image vs. resolution", "res", "res", {"vertices": 1000},
                      ("batch", "threads", "seed", "instance"), "scripts/sweep/run.sh configs/sweep_resolution.tsv",
                      "1000 vertices, 200 orbits.")


def batch(measured):
    return lines_plot(measured, "Time per image vs. batch size", "batchsize", "batch",
                      {"res": 512, "vertices": 1000}, ("threads", "seed", "instance"),
                      "scripts/sweep/run.sh configs/sweep_batch.tsv", "512 × 512 pixels, 1000 vertices, 200 orbits.")


# ---- The variants of the paper, and the stages of an image ------------------------------------------------------


LADDER_COMMAND = "./fdsl-bench --variant gbase,mem,rng,bat,fused --batch 256 --verify --out results/synth.csv"
LADDER_NEEDS = "an NVIDIA GPU"
STAGES_COMMAND = "./fdsl-bench --variant gbase,mem,rng,bat,fused,omp --verify --out results/synth.csv"
STAGES_NEEDS = "an NVIDIA GPU; without one, use --variant omp"


def add_dots(plot, names, slots, chosen, columns, places, faster, heading=lambda device: []):
    """Adds a block of dots and legend rows per device of `names` (Devices.names()), with the rows of `chosen` ({(device, column): row})
    at 1, 2, ... for the columns. `faster` returns the bold text of a row. A group has `places` places. Returns the width of one."""
    box = 0.74 / places
    first = -0.37 + box / 2
    for d, (device, name, whose) in enumerate(names):
        head, *rest = heading(device) + name + [whose]
        plot.legend += [(10 + slots[d] + 0.1, head)] + [(0.75, line) for line in rest]
        rows = [(i, column, chosen[device, column]) for i, column in enumerate(columns) if (device, column) in chosen]
        plot.blocks.append([dot(1 + i + first + d * box, row, faster(device, column, row)) for i, column, row in rows])
        plot.rings += [point[:2] for point, (_, _, row) in zip(plot.blocks[-1], rows) if row.unsettled]
    return box


def ladder(measured):
    chosen = best_rows(paper_rows(measured, LADDER, res=512, vertices=1000))
    if not chosen:
        raise Missing(LADDER_COMMAND, measured.rows, LADDER_NEEDS)
    plot = Plot("Time per image of the paper's variants and fused")
    devices = Devices(list(chosen.values()), 3)
    names = list(devices.names())
    dot_slots = [6, 2, 5]

    def faster(device, _, row):
        base = chosen.get((device, "gbase"))
        return f"× {base.micros('time_median_s') / row.micros('time_median_s'):.3g}" if base else ""

    # the last place of a group is for the published code
    box = add_dots(plot, names, dot_slots, chosen, LADDER, len(names) + bool(measured.published_code), faster)
    published = [(1.37 + i - box / 2, 1e6 * min(point["published_s_per_image"] for point in measured.published_code
                                   if point["variant"] == step))
                 for i, step in enumerate(LADDER) if any(p["variant"] == step for p in measured.published_code)]
    plot.blocks += [[(1 + i, step, batches_words(chosen, step)) for i, step in enumerate(LADDER)], published]
    plot.legend += [(61.1, "published code"), (0.75, "on an NVIDIA H200")]
    values = [value for dots in plot.blocks[:-2] for dot in dots for value in dot[1:4]]
    values += [us for _, us in published]
    low, high = log_range(values, 1.6)
    plot.width = max(WIDTH, 240 + len(LADDER) * (68 * len(names) + 24))
    plot.variables = {"groups": len(LADDER), "dots": len(names),
                      **log_ticks(low, log_range([high * 1.3], 1)[1], micros_tick),
                      "dot_slot": dot_slots[:len(names)]}
    plot.add_rings()
    plot.caption = ["512 × 512 pixels, 1000 vertices, 200 orbits. Bold: speed relative to gbase on the same device. "
                    + ERROR_BARS] + devices.caption()
    plot.notes += about_yours(measured.rows, [], list(chosen.values()), (), f"{LADDER_COMMAND} (needs {LADDER_NEEDS})")
    return plot


def batches_words(chosen, variant):
    batches = sorted({int(row["batch"]) for (_, name), row in chosen.items() if name == variant})
    return "batch " + ", ".join(map(str, batches)) if batches else "no row"


FORMULAS_COMMAND = "scripts/sweep/reference.sh results/formulas --section formulas && cp results/formulas/*_formulas.csv results/"
COLORED = ("colorfractal", "multifractal")
FORMULAS_NEEDS = "an NVIDIA GPU; without one, it measures omp"


def is_set_row(row, published):
    """Returns whether a row has u8 images of a set at the size of the canvas, on a GPU or on one core. Other presets with the name
    of a formula are ranges."""
    settings = row.settings
    channels = "3" if settings["formula"] in COLORED else "1"
    is_set = settings["preset"] in published or settings["preset"] not in ("", settings["formula"])
    return (row["ranks"] == 1 and is_set and settings["out_res"] == row.texts["res"] and settings["dtype"] == "u8"
            and settings["channels"] == channels and settings["draw"] == "patches" and settings["random"] == "philox"
            and not row["compute_ms"]
            and (row["variant"] == "fused" or (row["variant"] == "omp" and row["threads"] == 1)))


def formulas(measured):
    """Plots the time per image of each formula, with the classes of a set, beside the script that draws the published set."""
    scripts = {point["preset"]: 1e6 * point["published_s_per_image"] for point in measured.published_scripts}
    groups = collections.defaultdict(list)
    for row in measured.rows:
        if is_set_row(row, scripts):
            groups[device_of(row), row.settings["preset"]].append(row)
    chosen = {key: max(rows, key=preferred) for key, rows in groups.items()}
    if not chosen:
        raise Missing(FORMULAS_COMMAND, measured.rows, FORMULAS_NEEDS)
    devices = Devices(list(chosen.values()), 2)
    chosen = {key: row for key, row in chosen.items() if key[0] in devices.groups}
    formula_of = {preset: row.settings["formula"] for (_, preset), row in chosen.items()}
    known = list(scripts) + sorted(set(formula_of) - set(scripts))
    presets = sorted(known, key=lambda preset: (preset not in scripts, known.index(preset)))
    plot = Plot("Time per image of all formulas, beside the published scripts")
    names = list(devices.names())
    spare = {True: [6, 3], False: [2, 5]}  # of two GPUs, and of two CPUs
    slots = [spare[device[3]].pop(0) for device, _, _ in names]

    def faster(_, preset, row):
        return f"× {count_words(scripts[preset] / row.micros('time_median_s'))}" if preset in scripts else ""

    box = add_dots(plot, names, slots, chosen, presets, len(names) + 1, faster,  # the last place of a group is for the script
                   lambda device: ["fused" if device[3] else "omp, one core"])
    published = [(1.37 + i - box / 2, scripts[preset], micros_words(scripts[preset]))
                 for i, preset in enumerate(presets) if preset in scripts]
    plot.blocks += [[(1 + i, formula_of.get(preset, "no row"), preset) for i, preset in enumerate(presets)], published]
    plot.legend += [(61.1, "published script"), (0.75, "one core")]
    values = [value for dots in plot.blocks[:len(names)] for dot in dots for value in dot[1:4]] + [us for _, us, _ in published]
    low, high = log_range(values, 1.6)
    plot.width = max(WIDTH, 240 + len(presets) * (68 * (len(names) + 1) + 24))
    plot.variables = {"groups": len(presets), "dots": len(names),
                      **log_ticks(low, log_range([high * 2], 1)[1], micros_tick), "dot_slot": slots}
    plot.add_rings()
    plot.caption = ["u8 images at the size of the canvas, with the classes of each set; segrcdb with its mask. Bold: speed relative to "
                    "the script. Times of scripts include writing a PNG file; they were measured on another machine. "
                    + ERROR_BARS] + devices.caption()
    lacking = [f"{preset} ({'fused' if device[3] else 'omp'})" for device, _, _ in names for preset in presets
               if (device, preset) not in chosen]
    if not any(device[3] for device, _, _ in names):
        lacking.append("fused")
    if lacking:
        plot.notes.append(f"no rows of {', '.join(lacking)}; to measure them: {FORMULAS_COMMAND} (needs {FORMULAS_NEEDS})")
    return plot


def stages(measured):
    names = ("noise_s", "vertices_s", "painting_s")
    candidates = paper_rows(measured, LADDER + ("omp",), res=512, vertices=1000)
    rows = [row for row in candidates if any(row[name] for name in names)]
    if not rows:
        raise Missing(STAGES_COMMAND, measured.rows, STAGES_NEEDS)
    plot = Plot("Time per image by stage")
    chosen = best_rows(rows)
    devices = Devices(list(chosen.values()), 3)
    order = list(SLOTS)
    bars = [(device, row) for device in devices.groups
            for (at, _), row in sorted(chosen.items(), key=lambda item: order.index(item[0][1])) if at == device]
    parts = [stage_parts(row, names) for _, row in bars]
    plot.blocks = [[(1 + b, *part[s]) for b, part in enumerate(parts) if part[s][1] > part[s][0]] for s in range(3)]
    plot.blocks += [[(1 + b, at, words) for b, (_, row) in enumerate(bars) for at, words in thin_parts(row, names)]]
    plot.blocks += [[(1 + b, micros_words(sum(row.micros(name) or 0 for name in names)))
                     for b, (_, row) in enumerate(bars)],
                    [(1 + b, row["variant"], f"batch {row['batch']:.0f}") for b, (_, row) in enumerate(bars)]]
    plot.width = max(WIDTH, 250 + 110 * len(bars))
    device_lines = add_bar_devices(plot, devices, bars)
    plot.legend = [(-9, "painting"), (-2, "vertices"), (-6, "noise")]
    plot.variables = {"bars": len(bars), "stages": 3, "stage_slot": [6, 2, 9], "device_lines": device_lines}
    joined = [name for name in dict.fromkeys(row["variant"] for _, row in bars)
              if not any(row["noise_s"] and row["vertices_s"] for _, row in bars if row["variant"] == name)]
    without = [name for name in LADDER if name not in {row["variant"] for _, row in bars}]
    plot.caption = ["512 × 512 pixels, 1000 vertices, 200 orbits. Stages are timed separately, in an extra run; the number "
                    "above a bar is their sum per image."
                    + (f" Noise and vertices are one stage in {' and '.join(joined)}." if joined else "")
                    + (f" No stages measured for {' and '.join(without)}." if without else "")] + devices.caption()
    plot.notes += about_yours(measured.rows, [], [row for _, row in bars], (), f"{STAGES_COMMAND} (needs {STAGES_NEEDS})")
    return plot


THIN = 6  # in percent of a bar: the number does not fit into thinner parts


def stage_parts(row, names):
    """Returns (from %, to %, text) per stage. The text is empty if it does not fit into that part of the bar."""
    times = [row.micros(name) or 0 for name in names]
    parts, at = [], 0
    for us in times:
        share = 100 * us / sum(times)
        parts.append((at, at + share, micros_words(us) if share >= THIN else ""))
        at += share
    return parts


def thin_parts(row, names):
    """Returns (height %, label) of the parts that are too thin for a label. Their labels are next to the bar and do not
    overlap."""
    beside = []
    for (low, high, _), name in zip(stage_parts(row, names), names):
        if 0 < high - low < THIN:
            beside.append([(low + high) / 2, micros_words(row.micros(name))])
    for lower, upper in zip(beside, beside[1:]):
        upper[0] = max(upper[0], lower[0] + 5)
    return beside
