"""Figures of pre-training with PyTorch, from rows of scripts/compare/pretrain.py. scripts/figures/draw.py documents the return
values."""

import collections
import statistics

from devices import Missing
from generating import PAPER
from plot import Plot, linear_ticks, nice_above, number_words, short_device, x_axis, y_axis_from_zero
from rows import BadInput, Row, need_columns, numbered, read_csv, read_subfolders, sweep_of

ROWS, CURVE = "pretrain/1", "pretrain-curve/1"
TEXTS = ("schema", "time_utc", "host", "revision", "model", "source", "device", "augment", "amp", "compile", "settings",
         "out_res", "classes", "seed")
NUMBERS = {ROWS: ("ranks", "batch", "images_per_s", "stall_share", "constant_share"),
           CURVE: ("ranks", "batch", "images", "train_loss", "held_out_loss", "top1", "seconds")}
NEEDED = {ROWS: ("ranks", "batch", "images_per_s"),
          CURVE: ("ranks", "batch", "images", "held_out_loss", "top1", "seconds")}
# Columns that are equal on all lines of a figure
SETTINGS = ("host", "device", "batch", "augment", "amp", "compile", "settings", "res", "out_res", "classes", "torch")
JOB = ("host", "device", "model", "ranks", "batch", "augment", "amp", "compile", "settings", "out_res", "classes", "seed")
STYLES = {"constant": 91, "live": 17, "bat": 16, "gbase": 13, "omp": 12, "folder": 11, "shards": 15}
NAMES = {"constant": "one constant batch", "live": "generated: fused", "bat": "generated: bat", "gbase": "generated: gbase",
         "omp": "generated: omp", "folder": "loaded from PNG files", "shards": "loaded from shards"}
COMMAND = "scripts/compare/pretrain.py --source live --out results/pretrain/rows.csv"
NEEDS = "an NVIDIA GPU"
COMMAND_CURVE = "scripts/compare/pretrain.py --source live --evaluate --steps 20000 --curve results/pretrain/curve.csv"


# ---- Rows ----


def read_file(path, source):
    header, records = read_csv(path)
    rows = []
    for line, fields in records:
        fields = dict(zip(header, fields))
        schema = fields.get("schema", "")
        if schema not in NUMBERS:
            raise BadInput(f"{path}, line {line}: unknown schema '{schema[:40]}' (known: {ROWS}, {CURVE}); move this file away")
        need_columns(path, header, TEXTS + NUMBERS[schema] + (SETTINGS if schema == ROWS else ()), schema)
        row = Row(numbered(path, line, fields, NUMBERS[schema], NEEDED[schema]))
        row.texts, row.source, row.file = fields, source, str(path)
        rows.append(row)
    return rows


def rows_of(measured, schema):
    """Returns the rows of a schema. Reads the files at the first call, because the other figures do not need them."""
    if measured.pretrains is None:
        files = read_subfolders(measured.results, measured.reference, "pretrain", read_file)
        measured.pretrains = [row for _, rows in files for row in rows]
    return [row for row in measured.pretrains if row["schema"] == schema]


def best_group(rows, columns, worth):
    """Groups the rows that are equal in these columns. Returns the group with the highest worth(group), from your rows if
    there are any, otherwise from the reference."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[(row.source, *(row[column] for column in columns))].append(row)
    return max(groups.values(), key=lambda group: (group[0].source == "yours", worth(group)), default=[])


def breadth(group):
    """Sort key of a group: most sources of images, then most points, then the newest rows."""
    points = {(row["source"], row["ranks"]) for row in group}
    return len({source for source, _ in points}), len(points), max(row["time_utc"] for row in group)


def length(group):
    """Sort key of a group: most images seen, then the newest rows."""
    return max(row["images"] for row in group), max(row["time_utc"] for row in group)


def in_order(names):
    return sorted(names, key=lambda name: (list(NAMES) + [name]).index(name))


def settings_of(row):
    return f", {row['settings']}" if row["settings"] else ""


def about(rows):
    """Describes the newest of the rows, and names the revisions of all."""
    row, revisions = max(rows, key=lambda row: row["time_utc"]), sorted({row["revision"] for row in rows})
    augment = {"recipe": "RandAugment, random erasing, MixUp and CutMix", "none": "no augmentation"}.get(
        row["augment"], row["augment"].replace("+", ", "))
    precision = "bf16 autocast" if row["amp"] == "bf16" else "fp32"
    whose = "your rows" if row.source == "yours" else "reference rows"
    return (f"{row['model']}, batch {row['batch']:.0f} per GPU, images of {row['res']}² pixels, resized to {row['out_res']}², "
            f"{precision}{', compiled' if row['compile'] == 'yes' else ''}{settings_of(row)}; {augment} on the GPU. "
            f"{row['device']} ({whose}, host "
            f"{row['host']}, {'revisions' if len(revisions) > 1 else 'revision'} {', '.join(revisions)}).")


def heading(row):
    return [(0, short_device(row["device"])), (0.5, "yours" if row.source == "yours" else "reference")]


# ---- Throughput ----


def repeated(rows, source):
    """Returns {GPUs: images/s of the runs} of a source of images. The runs on one number of GPUs are those of the newest file and
    revision."""
    rates = {}
    for ranks in sorted({row["ranks"] for row in rows if row["source"] == source}):
        runs = [row for row in rows if row["source"] == source and row["ranks"] == ranks]
        newest = max(runs, key=lambda row: row["time_utc"])
        rates[ranks] = [row["images_per_s"] for row in runs if sweep_of(row) == sweep_of(newest)]
    return rates


def about_spread(runs):
    """Returns a sentence on the sources that are faster than the constant batch, which should be the upper bound. Every source runs
    in a process of its own, so a difference means something only if it exceeds the spread of repeated runs on the same GPUs."""
    above = []
    for source, of_source in runs.items():
        name = f"'{NAMES.get(source, source)}'"
        for ranks, rates in of_source.items():
            bound = runs.get("constant", {}).get(ranks, rates)
            if statistics.median(rates) <= statistics.median(bound):
                continue
            if len(rates) == len(bound) == 1:
                why = "these are single runs, so their spread is unknown"
            elif min(rates) > max(bound):
                why = f"every run of {name} was faster (runs: {len(rates)}; of the constant batch: {len(bound)}), and the cause is unknown"
            else:
                why = f"equal runs differ by up to {100 * max(max(of) / min(of) - 1 for of in (rates, bound)):.0f} %"
            above.append(f"{name} on {ranks:.0f} GPU{'s' * (ranks != 1)}: {why}.")
    return "The constant batch needs less work, but is slower than " + " It is also slower than ".join(above) if above else ""


def add_published(plot, measured, styles):
    """Adds the published points of the series in `styles` ({name: line style}), then the axes of a figure of rates vs. GPUs."""
    plot.legend.append((0, PAPER))
    for series, style in styles.items():
        plot.add_series(style, "loaded (LOAD)" if series.startswith("LOAD") else "generated (BAT)",
                        [(gpus, rate, rate, rate) for gpus, rate in measured.published_series("training")[series]])
    xs = [x for block in plot.blocks for x, *_ in block]
    plot.variables = {**y_axis_from_zero([high for block in plot.blocks for *_, high in block], number_words),
                      **x_axis(min(xs) / 1.15, max(xs) * 1.15, sorted(set(xs)))}


def throughput(measured, model, name, published_styles):
    """Plots images per second vs. GPUs: one line per source of images, and the published points of the same model."""
    rows = best_group([row for row in rows_of(measured, ROWS) if row["model"] == model and row["device"] != "cpu"],
                      SETTINGS, breadth)
    if not rows:
        raise Missing(COMMAND.replace("--source", f"--model {model} --source"), rows_of(measured, ROWS), NEEDS)
    plot = Plot(f"Training throughput vs. number of GPUs: {name}")
    plot.legend += heading(rows[0])
    runs = {source: repeated(rows, source) for source in in_order({row["source"] for row in rows})}
    for source, of_source in runs.items():
        plot.add_series(STYLES.get(source, 14), NAMES.get(source, source),
                        [(ranks, statistics.median(rates), min(rates), max(rates)) for ranks, rates in of_source.items()])
    add_published(plot, measured, published_styles)
    plot.caption = [f"{about(rows)} Filled points are measured: median of the runs; whiskers: slowest and fastest run. "
                    f"{about_spread(runs)}",
                    "Published points were measured on other GPUs with the paper's training program: compare generated with "
                    "loaded images only within one machine."]
    if rows[0].source != "yours":
        plot.notes.append(f"reference rows only; to measure your own: {COMMAND} (needs {NEEDS})")
    return plot


def tiny(measured):
    return throughput(measured, "deit_tiny_patch16_224", "DeiT-Tiny", {"LOAD+Tiny": 73, "BAT+Tiny": 74})


def base(measured):
    return throughput(measured, "deit_base_patch16_224", "DeiT-Base", {"LOAD+Base": 71, "BAT+Base": 72})


# ---- Learning ----


def curves(measured, title, value):
    """Plots a value of held-out images vs. images seen: the newest run of each source in the job that saw the most images."""
    points = best_group(rows_of(measured, CURVE), JOB, length)
    if not points:
        raise Missing(COMMAND_CURVE, rows_of(measured, CURVE), NEEDS)
    plot = Plot(f"{title} vs. images seen")
    plot.legend += heading(points[0])
    for source in in_order({row["source"] for row in points}):
        newest = max(row["time_utc"] for row in points if row["source"] == source)
        line = sorted((row for row in points if row["source"] == source and row["time_utc"] == newest),
                      key=lambda row: row["images"])
        plot.add_series(STYLES.get(source, 14), NAMES.get(source, source),
                        [(1e-3 * row["images"], value(row)) for row in line])
        plot.legend.append((0.75, f"{line[-1]['images'] / line[-1]['seconds']:,.0f} images/s"))
    xs, ys = zip(*[point for block in plot.blocks for point in block])
    x_high = 1.02 * max(xs)
    plot.variables = {"y_high": nice_above(1.05 * max(ys)), **x_axis(0, x_high, linear_ticks(0, x_high), log=False)}
    row = max(points, key=lambda row: row["time_utc"])
    plot.caption = [f"Measured on held-out images of the same {row['classes']} classes. {row['model']}, "
                    f"ranks: {row['ranks']:.0f}, batch {row['batch']:.0f} per rank, augmentation: {row['augment']}"
                    f"{settings_of(row)}. "
                    f"{row['device']} (host {row['host']}, revision {row['revision']}). Images/s: without evaluations, "
                    "but with the time to compile the network."]
    return plot


def accuracy(measured):
    return curves(measured, "Held-out accuracy", lambda row: 100 * row["top1"])


def loss(measured):
    return curves(measured, "Held-out loss", lambda row: row["held_out_loss"])
