"""The report's tables of training and inference: one line per training run, and the command that repeats it."""

import collections
import shlex
import statistics

from devices import threads_per_rank
from plot import micros_words, number_words, ranks_words
from rows import NAMED, option_words


def is_pytorch(row):
    """Returns whether a row is from scripts/compare/pytorch.py, whose variants are named torch-MODE."""
    return row["variant"].startswith("torch-")


def trainings(rows):
    """Returns the row of each training run's last epoch. Its attribute `line` has the newest row of every epoch."""
    lines = collections.defaultdict(dict)
    for row in sorted(rows, key=lambda row: row["time_utc"]):
        key = (row.source, row.file, row["host"], row["device"], row["variant"], row["revision"], row["threads"],
               row["ranks"], row["init"], *row.settings.values())
        lines[key][row["epoch"]] = row
    last = []
    for line in lines.values():
        row = line[max(line)]
        row.line = [line[epoch] for epoch in sorted(line)]
        last.append(row)
    return last


def options(row):
    """Returns the options of a row's command that differ from their defaults, as (option, value). In a row with rank=all, the
    column `batch` is the sum over ranks. --batch is per rank with weak scaling. In the workload load it is always per rank, because
    ranks divide the samples, not the batches. The value of --init is a placeholder, because a row has only a hash of the file."""
    per_rank = row["rank"] == "all" and (row.texts.get("scaling") == "weak" or row.is_load)
    found = row.given(**{"batch": f"{row['batch'] / (row['ranks'] if per_rank else 1):.0f}"} if "batch" in row.settings else {})
    found += [("--scaling", row["scaling"])] * bool(row.texts.get("scaling"))
    return found + [("--init", "CHECKPOINT")] * bool(row.texts.get("init"))


def option_list(options):
    """Returns options as words of a command line."""
    return [word for option in options for word in option if word]


def command(rows):
    """Returns the command line for rows of one training run or of inference."""
    first = rows[0]
    variants = ",".join(dict.fromkeys(row["variant"] for row in rows))
    if is_pytorch(first):
        words = ["scripts/compare/pytorch.py", "--device", "cuda" if first.on_gpu else "cpu"]
        words += ["--modes", variants.replace("torch-cuda", "resident").replace("torch-cpu", "resident").replace("torch-", "")]
        words += ["--ranks", f"{first['ranks']:.0f}"] if first["ranks"] > 1 else []
    else:
        words = (["mpirun", "--bind-to", "none", "-n", f"{first['ranks']:.0f}"] if first["ranks"] > 1 else [])
        words += ["./fdsl-bench", "--variant", variants]
    words += option_list(options(first))
    threads = {threads_per_rank(row) for row in rows if not row.on_gpu and not row["variant"].endswith("-naive")}
    words += ["--threads", f"{max(threads):.0f}"] if len(threads) == 1 else []
    return shlex.join(words + ["--verify"] * (first["verified"] == "yes"))


def heading(row):
    if row.is_infer:
        return f"inference, {row.texts.get('model') or 'a network'}, batch {row['batch']:.0f}, {row['data'] or 'data as in training'}"
    words = [f"training, {row['model']} on {number_words(row['train_samples'])} samples of {row['data']}",
             f"batch {row['batch']:.0f}", f"{row['optimizer']} at {row['lr']}"]
    words += option_words(options(row), NAMED)
    return ", ".join(words + [ranks_words(row["ranks"])] * (row["ranks"] > 1))


def seconds(value):
    return "" if value is None else f"{value:.3g} s"


def share(value):
    return "" if value is None else f"{100 * value:.2f} %"


def train_cells(row):
    """Returns (heading, text) for the numbers of a training run."""
    line = getattr(row, "line", [row])
    return [("epochs", f"{row['epoch']:.0f}"),
            ("per epoch", seconds(statistics.median(epoch["time_median_s"] for epoch in line))),
            ("samples/s", number_words(round(statistics.median(epoch["items_per_s"] for epoch in line)))),
            ("loss", "" if row["train_loss"] is None else f"{row['train_loss']:.3g}"), ("test accuracy", share(row["test_acc"])), ("98 % after", seconds(row["to_98_s"])), ("99 % after", seconds(row["to_99_s"])),
            ("roofline", roofline_words(row))]


def infer_cells(row):
    return [("per batch", micros_words(1e6 * row["time_median_s"])), ("99th perc.", micros_words(1e6 * row["time_p99_s"])),
            ("samples/s", number_words(round(row["items_per_s"]))), ("test accuracy", share(row["test_acc"])),
            ("roofline", roofline_words(row))]


def roofline_words(row):
    """Returns the share of the roofline and its bound; "" if the row has no share."""
    return "" if row["roofline_share"] is None else f"{100 * row['roofline_share']:.3g} % {row['bound']}"


def cells(row):
    return infer_cells(row) if row.is_infer else train_cells(row)
