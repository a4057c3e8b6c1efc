#!/usr/bin/env python3
"""Draws figures with gnuplot from the rows in CSV files.

  scripts/figures/draw.py [NAME ...]    draw the named figures (default: all)

  --results DIR     your rows: DIR/*.csv (default: results)
  --reference DIR   reference rows and published points (default: results/reference)
  --out DIR         write NAME.png, NAME.svg and NAME.pdf to DIR (default: plots under --results)
  --work DIR        write the plotted data, NAME.dat and NAME.vars, to DIR (default: build/plots)
  --commands        print the gnuplot commands instead of running them
  --list            list the figures

If a figure has no data, the program skips it and prints the command that measures the data. Exit status: 0 done,
1 gnuplot failed or a file could not be written, 2 usage or invalid input file, 4 gnuplot is missing.
"""

import contextlib
import difflib
import sys

sys.pycache_prefix = f"{sys.path[0]}/../../build/pycache"
import bars  # noqa: E402  (in this folder)
import break_even  # noqa: E402
import exchange  # noqa: E402
import feeding  # noqa: E402
import fine_tuning  # noqa: E402
import generating  # noqa: E402
import learning  # noqa: E402
import loading  # noqa: E402
import monitoring  # noqa: E402
import pipeline  # noqa: E402
import pretraining  # noqa: E402
import scaling  # noqa: E402
from devices import Missing  # noqa: E402
from plot import FORMATS, Failed, draw, exit_status, folder_arguments, need_gnuplot, shown_path, with_folders  # noqa: E402
from rows import Measured  # noqa: E402

# A figure is a function that takes all rows (Measured, in rows.py) and returns a Plot (plot.py). Without
# suitable rows it raises Missing (devices.py) with the command that measures them.
FIGURES = {
    "vertices": (generating.vertices, "time per image vs. vertices, with published points"),
    "resolution": (generating.resolution, "time per image vs. resolution, with published points"),
    "batch": (generating.batch, "time per image vs. batch size, with published points"),
    "training_time": (feeding.training_time, "training time vs. images: generated live or loaded"),
    "training": (feeding.training, "training throughput of vit-tiny vs. number of GPUs: constant, generated and read images"),
    "training_base": (feeding.training_base, "training throughput of vit-base vs. number of GPUs"),
    "pretraining_tiny": (pretraining.tiny, "training throughput of DeiT-Tiny vs. number of GPUs, with published points"),
    "pretraining_base": (pretraining.base, "training throughput of DeiT-Base vs. number of GPUs, with published points"),
    "pretraining_loss": (pretraining.loss, "held-out loss vs. images seen: generated or loaded"),
    "pretraining_accuracy": (pretraining.accuracy, "held-out accuracy vs. images seen: generated or loaded"),
    "ladder": (generating.ladder, "time per image of the paper's variants and fused, with speed-ups"),
    "formulas": (generating.formulas, "time per image of all formulas, beside the published scripts"),
    "stages": (generating.stages, "time per image by stage: noise, vertices, painting"),
    "scaling": (scaling.generating, "images per second vs. ranks, with ideal scaling and efficiency"),
    "monitor": (monitoring.over_time, "utilisation, power, clocks, memory and CPU load during a run"),
    "monitor_loading": (monitoring.while_loading, "GPU utilisation, CPU cores and throughput of loaders: files vs. shards"),
    "clips": (monitoring.clips, "clips as files and in shards: loaders over time, and training of cnn3d"),
    "roofline": (bars.roofline, "share of the roofline by variant"),
    "loading": (loading.sizes, "time per sample vs. sample size: files, shards and memcpy"),
    "loading_threads": (loading.threads, "loading throughput vs. threads: files, shards and memcpy"),
    "loading_cold": (loading.cold, "time per sample with a cold and a warm page cache"),
    "loading_latency": (loading.latency, "latency quantiles of open, read and close"),
    "loading_loops": (loading.loops, "500 epochs over 1000 video samples, by variant"),
    "loading_ranks": (scaling.loading, "samples per second in loading vs. ranks, with ideal scaling and efficiency"),
    "decoding": (bars.decoding, "images per second that loaders decode and resize"),
    "break_even": (break_even.figure, "images per second during a training step: generated or read"),
    "pipeline": (pipeline.figure, "bubble of a pipeline vs. micro-batches per step, measured and by formula"),
    "exchange": (exchange.figure, "time per all-reduce vs. size of the array, by variant"),
    "ops": (bars.ops, "speed of steps on embedding sets as a share of the measured bandwidth"),
    "training_ranks": (scaling.training, "samples per second in training vs. ranks, with PyTorch DDP, and efficiency"),
    "balance": (bars.balance, "speed of uneven ranks as a share of the sum of their speeds, by --balance"),
    "learning_loss": (learning.loss, "training loss vs. epoch, by variant"),
    "learning_accuracy": (learning.accuracy, "test error vs. epoch, by variant"),
    "learning_time": (learning.to_accuracy, "test error vs. training time, by variant"),
    "learning_steps": (learning.steps, "training loss vs. samples seen, from rows within epochs, by run"),
    "fine_tuning": (fine_tuning.figure, "test error vs. samples seen: pre-trained or from scratch"),
    "fine_tuning_sets": (fine_tuning.sets_figure, "test error after fine-tuning, by the images of the pre-training"),
}

MODELS = {"pretraining_tiny": "deit_tiny_patch16_224", "pretraining_base": "deit_base_patch16_224"}  # model of a figure


def read_arguments(arguments):
    parser = folder_arguments()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--list", action="store_true")
    given = with_folders(parser.parse_args(arguments), "plots")
    for name in given.names:
        if name not in FIGURES:
            near = difflib.get_close_matches(name, FIGURES, 1)
            raise Failed(f"no figure '{name}'" + (f"; did you mean {near[0]}?" if near else
                         f"; choose from {', '.join(FIGURES)}"), 2)
    return given


def refuse_pretraining(folder):
    """Refuses rows of pretrain in the folder of the other rows."""
    for path in sorted(folder.glob("*.csv")):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            if file.readline() and file.readline().startswith(("pretrain/", "pretrain-curve/")):
                raise Failed(f"{path}: rows of scripts/compare/pretrain.py must be in a subfolder pretrain of --results; "
                             + (f"give --results {folder.parent}" if folder.name == "pretrain" else
                                f"move this file to {folder / 'pretrain'}"), 2)


def left_out(name, measured):
    """Returns a note on your rows of pretrain that a figure leaves out because of their model or device; '' if there are none."""
    rows = [row for row in pretraining.rows_of(measured, pretraining.ROWS) if row.source == "yours"] if name in MODELS else []
    why = [row["model"] if row["model"] != MODELS[name] else "cpu" for row in rows
           if row["model"] != MODELS[name] or row["device"] == "cpu"]
    return (f"{len(why)} of your {len(rows)} rows of pretrain left out: they are of {', '.join(sorted(set(why)))}, but this "
            f"figure shows {MODELS[name]} on GPUs") if why else ""


def draw_all(given):
    if not given.commands:
        need_gnuplot()
    for folder in (given.results, given.reference):
        refuse_pretraining(folder)
    measured = Measured(given.results, given.reference)
    for note in measured.notes:
        print(f"figures: {note}", file=sys.stderr)
    for name in given.names or FIGURES:
        try:
            plot = FIGURES[name][0](measured)
        except Missing as missing:
            why = left_out(name, measured) or missing.why
            print(f"  skipped {name}: {why}; to measure it: {missing}")
            continue
        draw(name, plot, given.out, given.work, commands=given.commands)
        if not given.commands:
            notes = list(filter(None, [left_out(name, measured), *plot.notes]))
            note = f" ({'; '.join(notes)})" if notes else ""
            print(f"  drawn   {shown_path(given.out / name)}.{{{','.join(FORMATS)}}}{note}")


def program(arguments):
    given = read_arguments(arguments)
    if given.help:
        print(__doc__.strip())
    elif given.list:
        print("\n".join(f"{name:<20} {text}" for name, (_, text) in FIGURES.items()))
    else:
        draw_all(given)


if __name__ == "__main__":
    sys.exit(exit_status("figures", lambda: program(sys.argv[1:])))
