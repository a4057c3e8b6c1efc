"""Rows of scripts/compare/pretrain.py: the columns, the CSV files and the table. Needs only the standard library."""

import contextlib
import csv
import fcntl
import io
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time

SCHEMA, CURVE_SCHEMA, STEP_SCHEMA = "pretrain/1", "pretrain-curve/1", "steps/1"
COLUMNS = ("schema,time_utc,host,job_id,revision,workload,model,source,device,ranks,batch,steps,warmup_steps,seconds,"
           "images_per_s,step_median_s,step_p95_s,constant_share,stall_share,peak_memory_bytes,loss,top1,augment,amp,compile,"
           "settings,workers,dtype,res,out_res,classes,seed,torch,timm,fdsl").split(",")
CURVE_COLUMNS = ("schema,time_utc,host,job_id,revision,workload,model,source,device,ranks,batch,augment,amp,compile,settings,"
                 "out_res,classes,seed,images,train_loss,held_out_loss,top1,seconds").split(",")
# The columns of fdsl-bench --log (src/train/train_measures.c).
STEP_COLUMNS = ("schema,time_utc,host,job_id,revision,workload,variant,device,ranks,seed,model,epoch,step,samples_seen,loss,accuracy,"
                "lr,gradient_norm,items_per_s,gpu_utilisation_percent,gpu_memory_bytes,test_loss,test_acc").split(",")
SCHEMAS = {tuple(COLUMNS): SCHEMA, tuple(CURVE_COLUMNS): CURVE_SCHEMA, tuple(STEP_COLUMNS): STEP_SCHEMA}
# Columns in which a row must equal the row of `constant` that it is compared with.
SAME = ("host", "model", "device", "ranks", "batch", "augment", "amp", "compile", "settings", "res", "out_res", "classes", "torch",
        "timm")
AGAIN = "write the data set again with --make-data"  # a remedy
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Refused(Exception):
    """An error with a message of one line, and the exit status."""

    def __init__(self, text, status=2):
        super().__init__(text)
        self.status = status


def number(value):
    return "" if value is None else f"{value:.9g}"


def revision():
    """Returns the revision of the project as git describes it; outside a checkout, an empty string."""
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True,
                              check=False)
        return done.stdout.strip()
    return ""


def now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def identity(options, device, ranks):
    """Returns the columns that a run's row, the points of its curve and its rows of --step-log share. Call it at the start of the
    run, because the column time_utc gets the current time."""
    return {"time_utc": now(), "host": socket.gethostname(),
            "job_id": os.environ.get("SLURM_JOB_ID", ""), "revision": revision(), "workload": "pretrain", "model": options.model,
            "source": options.source, "device": device, "ranks": ranks, "batch": options.batch, "augment": options.augment,
            "amp": options.amp, "compile": "yes" if options.compile else "no", "settings": options.settings,
            "out_res": options.out_res, "classes": options.classes, "seed": options.seed}


def read(path, columns):
    """Returns the rows of a file; none if it does not exist or is empty. Refuses a file with other columns."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return rows_of(path, file.read(), columns)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}; choose another file",
                      2) from None


def rows_of(path, text, columns):
    lines = text.splitlines()
    if lines and lines[0] != ",".join(columns):
        raise Refused(f"{path}: its header is not that of {SCHEMAS[tuple(columns)]}; choose another file")
    return list(csv.DictReader(lines))


def check_writable(path, columns):
    """Refuses a file to which rows cannot be appended, before anything is measured."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise Refused(f"{path} is a device, a pipe or a folder; name a regular file")
    read(path, columns)
    folder = pathlib.Path(path).resolve().parent
    if not os.access(path if os.path.exists(path) else folder, os.W_OK) or not folder.is_dir():
        raise Refused(f"{path} cannot be written; create its folder, or choose another file")


def append(path, rows, columns):
    """Appends rows in one write, under a lock. Writes the header first if the file is empty."""
    with open(path, "a+", newline="", encoding="utf-8") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        old = file.read()
        rows_of(path, old, columns)
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        if not old:
            writer.writeheader()
        writer.writerows(rows)
        data = ("" if old.endswith("\n") or not old else "\n") + text.getvalue()
        os.write(file.fileno(), data.encode())
        os.fsync(file.fileno())


def constant_share(row, known):
    """Returns images per second relative to the newest row of `constant` with the same settings, or None."""
    if row["source"] == "constant":
        return 1.0
    limits = [other for other in known
              if other["source"] == "constant" and all(other[column] == row[column] for column in SAME)]
    limit = max(limits, key=lambda other: other["time_utc"], default=None)
    return float(row["images_per_s"]) / float(limit["images_per_s"]) if limit else None


def p95(values):
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def row_of(result, options, versions):
    """Returns the row of a run. `result` is a pretrain_training.Result. All values are text."""
    images = result.identity["ranks"] * options.batch * result.steps
    row = {"schema": SCHEMA, **result.identity, "steps": result.steps, "warmup_steps": options.warmup_steps,
           "seconds": number(result.seconds), "images_per_s": number(images / result.seconds),
           "step_median_s": number(statistics.median(result.step_s)), "step_p95_s": number(p95(result.step_s)),
           "stall_share": number(result.stall_share), "peak_memory_bytes": result.peak_memory_bytes or "",
           "loss": number(result.loss), "top1": number(result.top1), "dtype": "u8", "res": options.res,
           "workers": options.workers if options.source in ("folder", "shards") else "", **versions}
    row = {column: str(row.get(column, "")) for column in COLUMNS}
    row["constant_share"] = number(constant_share(row, read(options.out, COLUMNS) if options.out else []))
    return row


def curve_row(identity, point):
    """Returns a point of a learning curve as a row."""
    return {**{column: str(value) for column, value in identity.items()}, "schema": CURVE_SCHEMA,
            **{column: number(value) for column, value in point.items()}}


def step_row(identity, point):
    """Returns a row about the steps since the previous row, as text. `point` has the columns from `epoch` on."""
    known = {**identity, "time_utc": now(), "schema": STEP_SCHEMA, "workload": "train", "variant": "pytorch"}
    whole = {column: str(value) for column, value in point.items() if isinstance(value, int)}
    return {**{column: str(known.get(column, "")) for column in STEP_COLUMNS},
            **{column: number(value) for column, value in point.items()}, **whole}


def print_table(row):
    """Prints the row as a table of one line. It has no colours, so NO_COLOR changes nothing."""
    def percent(text):
        return f"{100 * float(text):.1f} %" if text else "-"
    memory = f"{float(row['peak_memory_bytes']) / 2**30:.2f}" if row["peak_memory_bytes"] else "-"
    print(f"{'model':24} {'source':8} {'ranks':>5} {'images/s':>10} {'step ms':>9} {'p95 ms':>9} {'stalled':>8} "
          f"{'of constant':>11} {'GiB':>6} {'loss':>7} {'top-1':>7}\n"
          f"{row['model']:24} {row['source']:8} {row['ranks']:>5} {float(row['images_per_s']):10,.1f} "
          f"{1e3 * float(row['step_median_s']):9.2f} {1e3 * float(row['step_p95_s']):9.2f} {percent(row['stall_share']):>8} "
          f"{percent(row['constant_share']):>11} {memory:>6} {float(row['loss']):7.4f} {percent(row['top1']):>7}")


def progress(text):
    """Shows the state of the run, only on the first rank and only if stderr is a terminal."""
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
