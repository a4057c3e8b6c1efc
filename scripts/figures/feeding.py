"""Figures that compare training on generated samples with training on loaded samples, from rows of the workload train.
scripts/figures/draw.py documents the return values."""

import collections
import os
import statistics

import pretraining
from devices import Missing, about_yours, counted, device_of, yours_of
from plot import Plot, linear_ticks, nice_above, number_words, short_device, x_axis
from rows import DEFAULTS, sweep_of

COMMAND = "scripts/compare/live_training.sh DIR results/live_training.csv"
# OF_DATA: columns that may differ between the lines of the figure.
OF_DATA = ("data", "image", "label", "train_size", "test_size", "classes", "preset", "res", "out_res", "fit", "channels",
           "feed", "generator", "fresh", "epochs")
JOB = tuple(column for column in DEFAULTS["train"] if column not in OF_DATA)
MADE_HERE = ("synth", "digits", "clips")
LIVE, CONSTANT, STORED = "generated live", "one constant batch", "generated in advance"
STYLES = {CONSTANT: 18, LIVE: 17, STORED: 15, "loaded from shards": 12, "loaded from files": 13}


def fed_with(row):
    if row["feed"] == "constant":
        return CONSTANT
    if row["data"] == "synth":
        return LIVE if row["feed"] == "live" else STORED
    return f"loaded from {os.path.basename(row['data'].rstrip('/'))}"


def job_of(row):
    return device_of(row) + (row["variant"], row["threads"]) + tuple(row.settings[column] for column in JOB) + (
        row["train_samples"], row["test_samples"])


def is_loaded(name):
    return name.startswith("loaded")


def feeds(rows):
    """Returns {feed: rows in order of epochs} for the best job (job_of()) that has both live and loaded samples. Prefers the user's jobs,
    then the job with the most feeds, then the newest."""
    jobs = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row in sorted(rows, key=lambda row: row["time_utc"]):
        if row["opening_s"] is not None and row["data"] not in MADE_HERE[1:]:
            jobs[job_of(row)][fed_with(row)][row["epoch"]] = row
    jobs = [lines for lines in jobs.values() if LIVE in lines and any(map(is_loaded, lines))]
    def worth(lines):
        rows = [row for line in lines.values() for row in line.values()]
        return rows[0].source == "yours", len(lines), max(row["time_utc"] for row in rows)
    best = max(jobs, key=worth, default={})
    return {name: [best[name][epoch] for epoch in sorted(best[name])]
            for name in sorted(best, key=lambda name: (list(STYLES) + [name]).index(name))}


def seconds(row):
    """Returns the seconds from opening the data to the end of an epoch, without tests."""
    return row["opening_s"] + row["trained_s"]


def images(row):
    return row["epoch"] * row["items"]


def same_training(lines):
    """Returns whether live and loaded samples gave exactly the same losses in all epochs that both have."""
    live = {row["epoch"]: row["train_loss"] for row in lines[LIVE]}
    return all(row["train_loss"] == live.get(row["epoch"], row["train_loss"])
               for name, line in lines.items() if is_loaded(name) for row in line)


def about(lines):
    row = lines[LIVE][-1]
    return (f"{row['variant']}, {row['model']} with {number_words(row['parameters'])} parameters, batch {row['batch']:.0f}, "
            f"{number_words(row['train_samples'])} images of {row['res']}² pixels per epoch, {row['classes']} classes. "
            f"{row['device']} ({'your rows' if row.source == 'yours' else 'reference rows'}, host {row['host']}, "
            f"revision {row['revision']}).")


def notes(measured, lines):
    """Returns a note if none of these rows are the user's."""
    return about_yours(measured.trains, [], [row for line in lines.values() for row in line], JOB, COMMAND)


def training_time(measured):
    lines = feeds(measured.trains)
    if not lines:
        raise Missing(COMMAND, measured.trains, needs="an NVIDIA GPU")
    plot = Plot("Training time vs. images: generated or loaded")
    live = lines[LIVE][-1]
    plot.legend += [(0, short_device(live["device"])), (0.5, "yours" if live.source == "yours" else "reference")]
    for name, line in lines.items():
        points = [(0, line[0]["opening_s"])] + [(1e-3 * images(row), seconds(row)) for row in line]
        plot.add_series(STYLES.get(name, 14), name, points)
        plot.legend.append((0.75, f"{images(line[-1]) / line[-1]['trained_s']:,.0f} images/s after opening"))
    points = [point for block in plot.blocks for point in block]
    x_high = 1.02 * max(x for x, _ in points)
    plot.variables = {"y_high": nice_above(max(y for _, y in points)), **x_axis(0, x_high, linear_ticks(0, x_high), log=False)}
    share = live["generate_share"]
    plot.caption = [
        f"Time from opening the data (including initial reading or generation) to the end of each epoch, without tests. "
        f"{about(lines)}"
        + (f" Generating takes {100 * share:.2g} % of the training time{', concurrently with the steps' if live.on_gpu else ''}."
           if share is not None else "")
        + (" Losses with live and loaded images are identical." if same_training(lines) else "")]
    plot.notes += notes(measured, lines)
    return plot


# ---- The figure `training`: images per second vs. GPUs ----

COMMAND_RATES = "GPUS='1 2' scripts/compare/training.sh DIR results/training.csv"
# Line styles of the sources of rows that scripts/compare/training.sh measures.
RATES = {"one constant batch": 91, "generated live": 17, "raw shards in memory": 15, "JPEG shards in memory": 12,
         "JPEG shards on a disk": 13, "raw shards on a disk": 14, "JPEG shards over HTTP": 16, "raw shards over HTTP": 11}
# Networks of the program, and the same ones of the paper and of scripts/compare/pretrain.py.
NETWORKS = {"vit-tiny": ("Tiny", "deit_tiny_patch16_224", 73, 74), "vit-base": ("Base", "deit_base_patch16_224", 71, 72)}
PYTORCH = {"constant": 92, "live": 27, "shards": 25}
SAME = tuple(column for column in JOB if column not in ("batch", "test_data", "lanes", "shuffle", "prefetch", "on_error",
                                                        "decoder", "device_share"))


def source_of(row):
    """Returns the name of a row's source of images, a key of RATES."""
    if row["feed"] != "load":
        return "one constant batch" if row["feed"] == "constant" else "generated live"
    place = "over HTTP" if "://" in row["data"] else "in memory" if row["data"].startswith("/dev/shm/") else "on a disk"
    return f"{'JPEG' if row['out_res'] else 'raw'} shards {place}"


def rates_job(row):
    """Returns what all points of the figure share. The batch is that of a GPU."""
    return (*device_of(row), row["batch"] / row["ranks"], *sweep_of(row), *(row.settings[column] for column in SAME))


def why_not(row, model):
    """Returns why a row has no point in the figure; '' if it may have one."""
    if row["variant"] != "train-vit":
        return "not of train-vit"
    if row["model"] != model:
        return f"not of {model}"
    if row["feed"] not in ("constant", "live", "load"):
        return "of stored or mixed samples"
    if (row["ranks_per_device"] or 0) > 1:
        return "of ranks that share a GPU"
    return "" if 2 * row["epoch"] > float(row["epochs"]) else "of the first half of a run"


def rates(rows, model):
    """Returns {source: {GPUs: rows of the epochs}}. Chooses your rows, then those with the most GPUs, then the rows with the most points,
    then the newest. The first half of a run is left out: nvJPEG's engines reach their full rate only after about 200 batches."""
    jobs = collections.defaultdict(lambda: collections.defaultdict(lambda: collections.defaultdict(list)))
    for row in rows:
        if not why_not(row, model):
            jobs[rates_job(row)][source_of(row)][row["ranks"]].append(row)
    def worth(lines):
        of_job = [row for line in lines.values() for point in line.values() for row in point]
        return of_job[0].source == "yours", max(row["ranks"] for row in of_job), sum(map(len, lines.values())), max(row["time_utc"] for row in of_job)
    best = max((lines for lines in jobs.values() if len(lines) > 1), key=worth, default={})
    return {name: best[name] for name in RATES if name in best}


def left_out(rows, model, lines):
    """Returns a note on how many of your rows have no point, and why; '' if all have one."""
    drawn = {id(row) for line in lines.values() for point in line.values() for row in point}
    mine = yours_of(rows)
    why = collections.Counter(why_not(row, model) or "of another job, or of one with a single source" for row in mine if id(row) not in drawn)
    return (f"{sum(why.values())} of your {counted(mine)} left out: "
            + ", ".join(f"{count} {reason}" for reason, count in why.items())) if why else ""


def add_pytorch(plot, measured, network, device):
    """Adds the rows of PyTorch on the same kind of GPU, if there are any."""
    rows = pretraining.best_group([row for row in pretraining.rows_of(measured, pretraining.ROWS)
                                   if row["model"] == network and row["device"] == device and row["source"] in PYTORCH],
                                  pretraining.SETTINGS, pretraining.breadth)
    if rows:
        plot.legend.append((0, f"PyTorch{', compiled' if rows[0]['compile'] == 'yes' else ''}"))
    for source in (source for source in PYTORCH if any(row["source"] == source for row in rows)):
        plot.add_series(PYTORCH[source], pretraining.NAMES[source],
                        [(gpus, statistics.median(of), min(of), max(of))
                         for gpus, of in pretraining.repeated(rows, source).items()])


def training_rates(measured, model):
    lines = rates(measured.trains, model)
    paper, network, loaded, generated = NETWORKS[model]
    note = left_out(measured.trains, model, lines)
    if not lines:
        raise Missing(COMMAND_RATES, measured.trains, needs="an NVIDIA GPU", why=note)
    row = next(iter(next(iter(lines.values())).values()))[0]
    plot = Plot(f"Training throughput vs. number of GPUs: {model}")
    plot.legend += [(0, short_device(row["device"])), (0.5, "yours" if row.source == "yours" else "reference")]
    for name, line in lines.items():
        plot.add_series(RATES[name], name, [
            (ranks, *(of([row["items_per_s"] for row in line[ranks]]) for of in (statistics.median, min, max)))
            for ranks in sorted(line)])
    add_pytorch(plot, measured, network, row["device"])
    pretraining.add_published(plot, measured, {f"LOAD+{paper}": loaded, f"BAT+{paper}": generated})
    plot.caption = [
        f"{row['variant']}, batch {row['batch'] / row['ranks']:.0f} per GPU, images of 224² pixels. JPEG images are decoded and cut out "
        f"anew in each epoch. {row['device']} ({'your rows' if row.source == 'yours' else 'reference rows'}, host {row['host']}, revision "
        f"{row['revision']}). Points: median of the epochs in the second half of each run; whiskers: slowest and fastest of them.",
        "PyTorch's rows have their own augmentation (see pretraining_tiny); published points were measured on other GPUs with the "
        "paper's program."]
    if row.source != "yours":
        plot.notes.append(f"reference rows only; to measure your own: {COMMAND_RATES} (needs an NVIDIA GPU)")
    if note:
        plot.notes.append(note)
    return plot


def training(measured):
    return training_rates(measured, "vit-tiny")


def training_base(measured):
    return training_rates(measured, "vit-base")
