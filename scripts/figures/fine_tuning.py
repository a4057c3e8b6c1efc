#!/usr/bin/env python3
"""The figures of fine-tuning: training from pre-trained parameters (--init) and from scratch. scripts/figures/draw.py documents the
return values.

  scripts/figures/fine_tuning.py FILE.csv    prints the rows of scripts/compare/pretrain_formulas.py as a table, in Markdown
"""

import collections
import statistics
import sys

sys.pycache_prefix = f"{sys.path[0]}/../../build/pycache"
from devices import Devices, Missing, about_yours, device_of  # noqa: E402
from learning import JOB, data_name, error_percent  # noqa: E402
from plot import Plot, count_words, exit_status, log_range, log_ticks, number_words, ticks_125, x_axis  # noqa: E402
from rows import BadInput, measured_row, need_columns, option_words, read_csv, read_subfolders  # noqa: E402

COMMAND = "scripts/compare/fine_tuning.sh DIR results/fine_tuning.csv"
SIZES_MAX = 4
SLOTS = (3, 7, 5, 1)  # colours (plots/common.gp) by size of the training set, smallest first
SCRATCH = 50  # the line style of training from scratch is this number plus a slot: dashed, with open points
# These columns may differ within a job.
FREE = ("train_size", "seed")

COMMAND_SETS = "scripts/compare/pretrain_formulas.py --data data/mnist --out results/formulas/rows.csv"
NO_SET = "scratch"  # the value of `set` of training from scratch
SET_NAMES = {"fractaldb-1k": "FractalDB-1k", "rcdb-1k": "RCDB-1k", "visualatom": "VisualAtom", "ofdb-1k": "OFDB-1k"}


def job_of(row):
    return (device_of(row), row["variant"], data_name(row), row["test_samples"]) + tuple(
        row.settings[column] for column in JOB if column not in FREE)


def lines_of(rows):
    """Returns {(training samples, --init): rows} for the best job (job_of()). Prefers the user's jobs, then the job with most
    sizes that were trained both from scratch and from pre-trained parameters, then the newest. All pre-trained rows have the
    same --init."""
    jobs = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        jobs[job_of(row)][row["train_samples"], row["init"]].append(row)
    best = (False,), {}
    for lines in jobs.values():
        for init in {init for _, init in lines} - {""}:
            sizes = [size for size, other in lines if other == init and (size, "") in lines]
            begun = [row for size in sizes for row in lines[size, init]]
            newest = max((row["time_utc"] for row in begun), default="")
            rank = sizes != [], any(row.source == "yours" for row in begun), len(sizes), newest
            chosen = {(size, other): lines[size, other] for size in sizes for other in ("", init)}
            best = max(best, (rank, chosen), key=lambda pair: pair[0])
    return best[1]


def by_epoch(rows):
    """Returns (samples seen, median error, minimum error, maximum error) per epoch, over the newest row of each seed."""
    seeds = {(row["epoch"], row["seed"]): row for row in sorted(rows, key=lambda row: row["time_utc"])}
    epochs = collections.defaultdict(list)
    for (epoch, _), row in seeds.items():
        epochs[epoch].append(error_percent(row))
    size = rows[0]["train_samples"]
    return [(epoch * size, statistics.median(errors), min(errors), max(errors)) for epoch, errors in sorted(epochs.items())]


def figure(measured):
    lines = lines_of(measured.trains)
    if not lines:
        raise Missing(COMMAND, measured.trains)
    plot = Plot("Fine-tuning: test error vs. samples seen")
    sizes = sorted({size for size, _ in lines})[-SIZES_MAX:]
    shown = [row for (size, _), rows in lines.items() if size in sizes for row in rows]
    devices = Devices(shown, item="first steps")
    for _, name, whose in devices.names():
        plot.legend += [(0, text) for text in name] + [(0.5, whose)]
    for slot, size in zip(SLOTS, sizes):
        plot.legend.append((0, f"{number_words(size)} samples"))
        for (_, init), rows in sorted(item for item in lines.items() if item[0][0] == size):
            plot.add_series(slot + (10 if init else SCRATCH), "pre-trained" if init else "from scratch", by_epoch(rows))
    points = [point for points in plot.blocks for point in points]
    low, high = log_range([value for point in points for value in point[2:]])
    x_low, x_high = min(point[0] for point in points) / 1.3, max(point[0] for point in points) * 1.3
    plot.variables = {"y_name": "test error (%)", "x_name": "samples seen (training samples × epochs)",
                      **x_axis(x_low, x_high, ticks_125(x_low, x_high)),
                      **log_ticks(low, min(high, 100), number_words)}
    row, counts = shown[0], sorted({len({row["seed"] for row in rows}) for rows in lines.values()})
    seeds = "One seed" if counts[-1] == 1 else f"Median, minimum and maximum of {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds"
    inits = {row["init"] for row in shown if row["init"]}
    plot.caption = [f"{row['model']}, {data_name(row)}, {row['variant']}: "
                    f"{number_words(row['test_samples'])} test samples; batch {row['batch']:.0f}, {row['optimizer']} "
                    f"at {row['lr']}. Pre-trained: initial parameters from {', '.join(sorted(inits))}. {seeds} per line."] + devices.caption()
    alone = [row for row in measured.trains if row.source == "yours" and row["model"] == shown[0]["model"]]
    if alone and not any(row.source == "yours" for row in shown):
        plot.notes.append(f"your {len(alone)} row{'s do' if alone[1:] else ' does'} not include pre-trained and from-scratch runs of "
                          f"the same size; to measure them: {COMMAND}")
    else:
        plot.notes += about_yours(measured.trains, [row for row in measured.trains if row["init"]], shown, JOB, COMMAND)
    return plot


# ---- Pre-training on the sets of several formulas ----------------------------------------------------------------


def read_sets(path, source):
    """Returns the rows of a file of scripts/compare/pretrain_formulas.py, with the column `set`."""
    header, records = read_csv(path)
    need_columns(path, header or [], ("schema", "set", "epoch", "seed"), "pretrain_formulas.py")
    rows = []
    for line, fields in records:
        fields = dict(zip(header, fields))
        if not fields["schema"].startswith("train/"):
            raise BadInput(f"{path}, line {line}: schema '{fields['schema'][:40]}' is not of training; move this file away")
        row = measured_row(path, line, fields, "train")
        row.source, row.file, row["set"] = source, str(path), fields["set"]
        rows.append(row)
    return rows


class Sets:
    """The rows of one file: `pretrained` has {set: rows of pre-training, in order of epochs}, `tuned` has {(set, training samples):
    rows of the last epochs, one per seed}."""

    def __init__(self, rows):
        self.pretrained, self.tuned = collections.defaultdict(list), collections.defaultdict(list)
        for row in sorted(rows, key=lambda row: (row["epoch"], int(row["seed"]))):
            if row["data"] == "synth":
                self.pretrained[row["set"]].append(row)
            else:
                self.tuned[row["set"], int(row["train_samples"])].append(row)
        self.sizes = sorted({size for _, size in self.tuned})
        found = {name for name, _ in self.tuned} | set(self.pretrained)
        known = [NO_SET, *SET_NAMES]
        self.names = [name for name in known if name in found] + sorted(found - set(known))

    @staticmethod
    def heading(name):
        return "from scratch" if name == NO_SET else SET_NAMES.get(name, name)

    def images(self, name):
        """Returns the number of images that the pre-training saw."""
        return sum(row["steps"] * row["batch"] for row in self.pretrained[name])

    def table(self):
        """Returns the lines of the table. Accuracies are means over seeds, with the minimum and the maximum. A cell states the
        number of seeds if some are missing."""
        seeds = max((len(rows) for rows in self.tuned.values()), default=0)
        lines = ["| pre-training | images | time | training loss | held-out accuracy | "
                 + "".join(f"{number_words(size)} samples | " for size in self.sizes).rstrip(),
                 "|---" + "|--:" * (4 + len(self.sizes)) + "|"]
        for name in self.names:
            cells = [self.heading(name)] + [""] * 4
            if self.pretrained[name]:
                last = self.pretrained[name][-1]
                cells[1:] = [f"{self.images(name):,.0f}", f"{last['trained_s']:.0f} s", f"{last['train_loss']:.2f}",
                             f"{100 * last['test_acc']:.1f} %"]
            for size in self.sizes:
                values = [100 * row["test_acc"] for row in self.tuned[name, size]]
                cells.append(f"{statistics.mean(values):.2f} % ({min(values):.2f} to {max(values):.2f})"
                             + (f", {len(values)} of {seeds} seeds" if len(values) < seeds else "") if values else "")
            lines.append("| " + " | ".join(cells) + " |")
        return lines


def sets_figure(measured):
    """Plots the test error after fine-tuning: one group per set, one dot per size of the training set."""
    files = [(source == "yours", rows) for source, rows in
             read_subfolders(measured.results, measured.reference, "formulas", read_sets) if Sets(rows).tuned]
    if not files:
        raise Missing(COMMAND_SETS, needs="an NVIDIA GPU")
    rows = max(files, key=lambda file: (file[0], max(row["time_utc"] for row in file[1])))[1]
    sets = Sets(rows)
    plot = Plot("Test error after fine-tuning vs. the images of the pre-training")
    tuned = [row for rows in sets.tuned.values() for row in rows]
    devices = Devices(tuned, item="first steps")
    for _, name, whose in devices.names():
        plot.legend += [(0, text) for text in name] + [(0.5, whose)]
    sizes, shift = sets.sizes[-SIZES_MAX:], 0.7 / len(sets.sizes[-SIZES_MAX:])
    for i, (slot, size) in enumerate(zip(SLOTS, sizes)):
        plot.legend.append((10 + slot + 0.1, f"{number_words(size)} samples"))
        plot.blocks.append([])
        for x, name in enumerate(sets.names, 1):
            errors = [error_percent(row) for row in sets.tuned[name, size]]
            if errors:
                mean = statistics.mean(errors)
                plot.blocks[-1].append((x - 0.35 + (i + 0.5) * shift, mean, min(errors), max(errors), f"{mean:.3g} %", ""))
    values = [value for dots in plot.blocks for dot in dots for value in dot[1:4]]
    plot.blocks.append([(x, sets.heading(name), f"{count_words(sets.images(name))} images" if sets.images(name) else "")
                        for x, name in enumerate(sets.names, 1)])
    low, high = log_range(values, 1.5)
    plot.variables = {"groups": len(sets.names), "dots": len(sizes), "dot_slot": list(SLOTS[:len(sizes)]),
                      "y_name": "test error (%)", **log_ticks(low, min(high, 100), number_words)}
    row, seeds = tuned[0], sorted({len(rows) for rows in sets.tuned.values() if rows})
    begun = next((rows[-1] for rows in sets.pretrained.values() if rows), None)
    recipe = ", ".join(option_words(begun.given(), (
        "--data", "--model", "--preset", "--formula", "--res", "--test-size", "--epochs"))) if begun else ""
    plot.caption = [f"{row['model']}, {data_name(row)}, {row['variant']}: {number_words(row['test_samples'])} test samples; batch "
                    f"{row['batch']:.0f}, {row['optimizer']} at {row['lr']}. Mean, minimum and maximum of "
                    f"{' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} seeds, after the last epoch."]
    plot.caption += [f"Pre-training: {recipe}."] * bool(recipe) + devices.caption()
    if row.source != "yours":
        plot.notes.append(f"reference rows only; to measure your own: {COMMAND_SETS} (needs an NVIDIA GPU)")
    return plot


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__.strip())
        sys.exit(0 if "--help" in sys.argv or "-h" in sys.argv else 2)
    sys.exit(exit_status("fine_tuning", lambda: print("\n".join(Sets(read_sets(sys.argv[1], "yours")).table()))))
