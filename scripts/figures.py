#!/usr/bin/env python3
"""Draws the figures: reads rows, selects what each figure shows, and has gnuplot draw it.

  scripts/figures.py [NAME ...]    all figures, or these

  --results DIR     the user's rows: DIR/*.csv (default: results)
  --reference DIR   the shipped ones and the published points (default: results/reference)
  --out DIR         where figures go: NAME.png, NAME.svg, NAME.pdf (default: plots under --results)
  --work DIR        where the numbers behind them go: NAME.dat and NAME.vars (default: build/plots)
  --commands        print the gnuplot commands instead of running them
  --list            print the names and what they show

A figure whose data is missing is skipped, with the command that measures it. Exit status: 0 done, 1 gnuplot
failed or a file could not be written, 2 usage or a file that cannot be used, 4 gnuplot is missing.
"""

import argparse
import difflib
import pathlib
import sys

sys.dont_write_bytecode = True
import break_even  # noqa: E402  (in this folder)
import feeding  # noqa: E402
import fine_tuning  # noqa: E402
import generating  # noqa: E402
import learning  # noqa: E402
import loading  # noqa: E402
import monitoring  # noqa: E402
import roofline  # noqa: E402
import scaling  # noqa: E402
from devices import Missing  # noqa: E402
from plot import FORMATS, ROOT, Failed, draw, exit_status, need_gnuplot, shown_path  # noqa: E402
from rows import Measured  # noqa: E402

# A figure is a function of all that was measured (Measured, in rows.py) that returns what is drawn (Plot, in plot.py) or,
# without rows for it, raises Missing (in devices.py) with the command that measures them.
FIGURES = {
    "vertices": (generating.vertices, "time an image over its vertices, beside the published points"),
    "resolution": (generating.resolution, "time an image over its side, beside the published points"),
    "batch": (generating.batch, "time an image over the batch, beside the published points"),
    "training": (feeding.training, "published training throughput over GPUs"),
    "training_time": (feeding.training_time, "seconds of training over images: generated live against loaded"),
    "ladder": (generating.ladder, "the paper's steps, with the speed-up of each"),
    "stages": (generating.stages, "noise, vertices and painting as shares of an image's time"),
    "scaling": (scaling.figure, "images a second over ranks, with the ideal line and the efficiency"),
    "monitor": (monitoring.over_time, "utilisation, power, clocks, memory and CPU over a run, by phase"),
    "monitor_loading": (monitoring.while_loading, "GPU use, PCIe and cores while samples are loaded: files against shards"),
    "roofline": (roofline.figure, "how much of the least possible time of its work each variant reaches"),
    "loading": (loading.sizes, "time a sample over its size: a file each against shards, beside a copy"),
    "loading_threads": (loading.threads, "bytes a second over threads, files against shards, under that of copies"),
    "loading_cold": (loading.cold, "time a sample with nothing in the page cache and with everything"),
    "loading_latency": (loading.latency, "quantiles of opening, reading and closing a file"),
    "loading_loops": (loading.loops, "500 epochs over 1000 samples of video, by variant"),
    "break_even": (break_even.figure, "images a second beside a training step: made against read"),
    "learning_loss": (learning.loss, "the loss over epochs, by variant"),
    "learning_accuracy": (learning.accuracy, "wrong answers over epochs, by variant"),
    "learning_time": (learning.to_accuracy, "wrong answers over seconds of training, by variant"),
    "fine_tuning": (fine_tuning.figure, "wrong answers over samples seen: pre-trained against from scratch"),
}


def read_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS, add_help=False)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "results")
    parser.add_argument("--reference", type=pathlib.Path, default=ROOT / "results/reference")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/plots")
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    given = parser.parse_args(arguments)
    given.out = (given.out or given.results / "plots").resolve()
    given.work = given.work.resolve()
    for name in given.names:
        if name not in FIGURES:
            near = difflib.get_close_matches(name, FIGURES, 1)
            raise Failed(f"no figure '{name}'" + (f"; did you mean {near[0]}?" if near else
                         f"; there are {', '.join(FIGURES)}"), 2)
    return given


def draw_all(given):
    need_gnuplot()
    measured = Measured(given.results, given.reference)
    for note in measured.notes:
        print(f"figures: {note}", file=sys.stderr)
    for name in given.names or FIGURES:
        try:
            plot = FIGURES[name][0](measured)
        except Missing as missing:
            print(f"  skipped {name}: {missing.why}; to measure it: {missing}")
            continue
        draw(name, plot, given.out, given.work, commands=given.commands)
        if not given.commands:
            note = f" ({'; '.join(plot.notes)})" if plot.notes else ""
            print(f"  drawn   {shown_path(given.out / name)}.{{{','.join(FORMATS)}}}{note}")


def program(arguments):
    given = read_arguments(arguments)
    if given.help:
        print(__doc__.strip())
    elif given.list:
        print("\n".join(f"{name:<16} {text}" for name, (_, text) in FIGURES.items()))
    else:
        draw_all(given)


if __name__ == "__main__":
    sys.exit(exit_status("figures", lambda: program(sys.argv[1:])))
