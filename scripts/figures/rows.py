"""Reads rows of fdsl-bench from CSV files, for scripts/figures/draw.py and scripts/figures/report.py.

An invalid file raises BadInput. Its message gives the path, the line if one line is at fault, and a remedy.
"""

import collections
import csv
import fcntl
import functools
import io
import json
import os
import pathlib
import subprocess
import sys


def read_columns():
    """Returns what `fdsl-bench --columns` prints: one dict per column of each workload, in the order of the rows."""
    bench = os.environ.get("FDSL_BENCH") or str(pathlib.Path(__file__).resolve().parents[2] / "fdsl-bench")
    try:
        printed = subprocess.run([bench, "--columns", "--format", "csv"], check=True, capture_output=True,
                                 encoding="utf-8").stdout
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"the columns of rows are unknown, because {bench} cannot be run ({error}); build it with: make, or name "
                 "another fdsl-bench with the environment variable FDSL_BENCH")
    return list(csv.DictReader(io.StringIO(printed)))


LINES = read_columns()
SCHEMAS = {line["workload"]: line["schema"] for line in LINES if line["workload"]}
FILES = {line["schema"].split("/")[0]: line["schema"] for line in LINES if not line["workload"]}  # --log: steps; --monitor
for line in LINES:
    line["workload"] = line["schema"].split("/")[0]
COLUMNS = {workload: tuple(line["column"] for line in LINES if line["workload"] == workload) for workload in SCHEMAS | FILES}

# PARAMETERS: {workload: {column: Parameter}}, the options that have a column, in the order of the columns.
Parameter = collections.namedtuple("Parameter", "option default flag")
PARAMETERS = {workload: {line["column"]: Parameter("--" + line["option"], line["default"], line["argument"] == "no")
                         for line in LINES if line["workload"] == workload and line["option"]} for workload in SCHEMAS}
DEFAULTS = {workload: {column: parameter.default for column, parameter in columns.items()}
            for workload, columns in PARAMETERS.items()}

# Numeric columns of each workload. Of the options, only those that figures calculate with are numbers; the others stay text,
# to be compared with defaults.
OPTION_NUMBERS = ("batch", "vertices", "orbits", "array_bytes", "stages", "microbatches")
NUMBERS = {workload: tuple(line["column"] for line in LINES
                           if line["workload"] == workload and line["type"] in ("integer", "real") and line["column"] not in ("rank", "gpu")
                           and (not line["option"] or line["column"] in OPTION_NUMBERS
                                or (workload, line["column"]) == ("synth", "res"))) for workload in SCHEMAS | FILES}

# Numeric columns that must not be empty, for the figures.
TIMES = ("time_min_s", "time_median_s", "time_p95_s")
RATES = ("items_per_s", "bytes_per_s")
NEEDED = {workload: ("ranks", "threads", "items") + columns for workload, columns in {
    "synth": (*TIMES, *RATES, "batch", "res"), "load": (*TIMES, *RATES, "batch", "sample_bytes"),
    "train": ("batch", "time_median_s", "items_per_s", "epoch", "train_samples", "test_samples", "trained_s"),
    "infer": ("batch", "time_median_s", "time_p99_s", "items_per_s"), "exchange": ("array_bytes", *TIMES),
    "ops": TIMES}.items()}

LOG_TEXTS = ("time_utc", "host", "revision", "variant", "device", "seed", "model")
LOG_NUMBERS = ("ranks", "step", "samples_seen", "loss", "test_loss", "test_acc")
LOG_NEEDED = ("ranks", "step", "samples_seen")


ITEMS = {"synth": "images", "load": "samples", "exchange": "values", "ops": "rows"}  # what is counted as wrong; else steps


class BadInput(Exception):
    """An invalid file. The message is one line with the path, the line number if one line is at fault, and a remedy."""


class Row(dict):
    """A row by column name. Numeric columns are numbers (None if empty), other columns are text. `texts` has all fields as
    text."""

    source = ""  # "yours" or "reference"
    file = ""
    texts = {}

    is_load, is_train, is_infer, is_exchange = (
        property(lambda self, workload=workload: self.workload == workload) for workload in ("load", "train", "infer", "exchange"))

    @property
    def unsettled(self):
        """True if sampling ended before the median was known to the requested precision (--max-error)."""
        return self.texts["settled"] == "no"

    @property
    def workload(self):
        return self["schema"].split("/")[0]

    @property
    def defaults(self):
        """The default of each parameter by column. Two defaults depend on other parameters."""
        defaults = dict(DEFAULTS.get(self.workload, {}))
        if self.workload == "synth":
            defaults["out_res"] = self.texts["res"]
        if self.is_train:
            defaults["feed"] = "live" if self["data"] == "synth" else "stored"
        return defaults

    @functools.cached_property
    def settings(self):
        """The value of each parameter by column, as text. An empty field means the default, because the option does not
        apply."""
        return {column: self.texts[column] or default for column, default in self.defaults.items()}

    def given(self, **replaced):
        """Returns the options whose values differ from their defaults, as (option, value), in the order of the columns. The value
        of a flag is empty. Values in `replaced` replace those of the row."""
        table, defaults = PARAMETERS[self.workload], self.defaults
        return [(table[column].option, "" if table[column].flag else value)
                for column, value in {**self.settings, **replaced}.items() if value != defaults[column]]

    @property
    def on_gpu(self):
        return bool(self["cuda"])

    def micros(self, column):
        """Returns the value of a column in seconds per run, converted to microseconds per item; None if it is empty."""
        return None if self[column] is None else 1e6 * self[column] / self["items"]


def read_text(path):
    """Reads a file under a shared lock, because fdsl-bench may be appending to it."""
    try:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH)
            except OSError:  # a file system without locks
                pass
            raw = file.read()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}; repair or move it") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{path}, line {line}: not UTF-8 text; repair or move this file") from None


def read_csv(path):
    """Returns the header and a list of (line number, fields) of an RFC 4180 file; (None, []) for an empty file."""
    text = read_text(path)
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise BadInput(f"{path}, line {line}: a NUL byte; repair or delete this row")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header, records, line = None, [], 1
    try:
        for fields in reader:
            if header is None:
                header = fields
            elif fields[:1] == ["schema"]:
                raise BadInput(f"{path}, line {line}: a second header; "
                               + ("delete this line" if fields == header else
                                  "its columns differ, so split the file in two"))
            elif fields and len(fields) != len(header):
                raise BadInput(f"{path}, line {line}: {len(fields)} fields where the header has {len(header)}; "
                               "repair or delete this row")
            elif fields:
                records.append((line, fields))
            line = reader.line_num + 1
    except csv.Error as error:
        raise BadInput(f"{path}, line {line}: {error}; repair or delete this row") from None
    if text and not text.endswith("\n"):
        last = records[-1][0] if records else 1
        raise BadInput(f"{path}, line {last}: the last row has no newline and may be incomplete; complete or delete it")
    return header, records


def number(path, line, column, text, needed=False):
    """Parses a finite number; returns None for an empty field unless it is needed."""
    try:
        if not text and not needed:
            return None
        value = float(text)
        if value - value == 0:
            return value
    except ValueError:
        pass
    raise BadInput(f"{path}, line {line}: {column} is '{text}', not a number; repair or delete this row")


def need_columns(path, header, columns, schema):
    missing = [column for column in columns if column not in header]
    if missing:
        raise BadInput(f"{path}, line 1: rows of {schema} have a column '{missing[0]}', but this file does not; "
                       "delete it and measure again")


def numbered(path, line, fields, columns, needed):
    values = dict(fields)
    for column in columns:
        text = fields.get(column, "")
        values[column] = number(path, line, column, text, column in needed) if text or column in needed else None
    return values


def measured_row(path, line, fields, workload):
    """Returns a row of the program. A column that the file lacks is empty; a column that the program lacks is left out."""
    texts = {column: fields.get(column, "") for column in COLUMNS[workload]}
    row = Row(numbered(path, line, texts, NUMBERS[workload], NEEDED[workload]))
    row.texts = texts
    for column in NEEDED[workload]:
        if row[column] <= 0:
            raise BadInput(f"{path}, line {line}: {column} is {texts[column]}; repair or delete this row")
    return row


def read_file(path, notes=None):
    """Returns (kind, rows) of a CSV file. `kind` is "rows", "monitor", "log" (train --log), or "other" for files without
    measurements. Appends to `notes` which columns are unknown and ignored."""
    header, records = read_csv(path)
    if not header or header[0] != "schema" or ("sample" in header and "samples" not in header):  # env.csv, classes, samples
        return "other", []
    kind, rows = "rows", []
    for line, fields in records:
        fields = dict(zip(header, fields))
        schema = fields["schema"]
        if schema != records[0][1][0]:
            raise BadInput(f"{path}, line {line}: schema '{schema}' after rows of '{records[0][1][0]}'; "
                           "split the file in two")
        if schema == FILES["monitor"]:
            kind = "monitor"
            need_columns(path, fields, COLUMNS["monitor"], schema)
            rows.append(numbered(path, line, fields, NUMBERS["monitor"], ("time_s",)))
        elif schema == FILES["steps"]:
            kind = "log"
            need_columns(path, fields, LOG_TEXTS + LOG_NUMBERS, schema)
            rows.append(numbered(path, line, fields, LOG_NUMBERS, LOG_NEEDED))
        elif schema in SCHEMAS.values():
            rows.append(measured_row(path, line, fields, schema.split("/")[0]))
        else:
            raise BadInput(f"{path}, line {line}: unknown schema '{schema[:40]}' (known: "
                           f"{', '.join((SCHEMAS | FILES).values())}); move this file away, or use the "
                           "revision of the project that wrote it")
    unknown = [column for column in header if column not in COLUMNS[rows[0].workload]] if kind == "rows" and rows else []
    if unknown and notes is not None:
        notes.append(f"{path}: ignored columns that fdsl-bench does not know: {', '.join(unknown)}")
    return kind, rows


def read_subfolders(results, reference, name, read):
    """Returns [(source, read(path, source))] of the CSV files in a subfolder of both folders: yours, then those of the reference."""
    return [(source, read(path, source)) for source, folder in (("yours", results), ("reference", reference))
            for path in sorted((pathlib.Path(folder) / name).glob("*.csv"))]


def read_published(path, columns):
    """Reads a file of published points as dicts. `columns` is {name: whether it is a number}."""
    header, records = read_csv(path)
    need_columns(path, header or [], columns, "published points")
    points = []
    for line, fields in records:
        point = dict(zip(header, fields))
        for column, is_number in columns.items():
            if is_number:
                point[column] = number(path, line, column, point[column], True)
        points.append(point)
    return points


# Options that headings and captions of training describe in other words.
NAMED = ("--data", "--model", "--batch", "--optimizer", "--lr", "--train-size", "--test-size")


def option_words(options, without=()):
    """Returns options for a heading or a caption, such as ["flip", "mixup 0.8"]. Leaves out the options in `without`."""
    return [f"{name[2:]} {value}".strip() for name, value in options if name not in without]


def stands_for_run(row):
    """Returns whether a row represents a complete run: a run of a single rank, or the sum over all ranks."""
    return row["rank"] == "all" or (row["rank"] == "0" and row["ranks"] == 1)


def identity(row):
    """Returns the key of a row; a newer row replaces an older row with the same key. For loading, the key includes the size of
    the data, because a different data set may have the same path later."""
    columns = ("host", "device", "variant", "ranks", "threads", "scaling", "ranks_per_device")
    columns += ("items", "sample_bytes") if row.is_load else ()
    return (row.source, row.is_load) + tuple(row[column] for column in columns) + tuple(row.settings.values())


def name_devices(loads):
    """Fills in the device in rows of third-party loaders on the CPU, which do not record it. Takes the device of the newest row of the same file,
    otherwise of the newest row of the same host. The file comes first because different machines may share a host name."""
    devices = {}
    for row in sorted(loads, key=lambda row: row["time_utc"]):
        if row["device"]:
            devices[row.source, row.file] = devices[row.source, row["host"]] = row["device"]
    for row in loads:
        row["device"] = (row["device"] or devices.get((row.source, row.file))
                         or devices.get((row.source, row["host"]), ""))


def sweep_of(row):
    """Returns the sweep of a row: its file and revision. All points of a line must be of one sweep."""
    return row.file, row["revision"]


def newest(rows, key_of=identity):
    """Returns the newest row for each key. If two rows are equally old, the later one in the list counts."""
    kept = {}
    for row in rows:
        key = key_of(row)
        if key not in kept or row["time_utc"] >= kept[key]["time_utc"]:
            kept.pop(key, None)
            kept[key] = row
    return list(kept.values())


def of_one_job(rows, job_of, points_of=len):
    """Returns the rows of one job, for which job_of() returns the same. Prefers the user's rows, then the job with the most points (by
    default, rows), then the newest."""
    jobs = collections.defaultdict(list)
    for row in rows:
        jobs[job_of(row)].append(row)
    def worth(job):
        return any(row.source == "yours" for row in job), points_of(job), max(row["time_utc"] for row in job)
    return max(jobs.values(), key=worth, default=[])


class Measured:
    """All measurements.

    rows, loads           complete runs of synth and of load: the newest row of each measurement
    sweeps, load_sweeps   complete runs of synth and of load: the newest row of each measurement per file and revision
    trains, infers        rows of train (every epoch) and of infer
    exchanges             complete runs of exchange
    embeddings            complete runs of ops
    pipelines             rows of train with --parallel pipeline (every epoch), which are not in trains
    pretrains             rows of scripts/compare/pretrain.py; None until a figure needs them (pretraining.py)
    monitors              monitor files with their samples: the user's first, newest first
    logs                  files of train --log with their rows: the user's first
    published             points of the paper's figures
    published_code        times of the published code
    published_scripts     times of the scripts that draw published sets
    machines              contents of env.json
    """

    def __init__(self, results, reference):
        self.results, self.reference, self.pretrains = results, reference, None
        self.rows, self.loads, self.trains, self.infers, self.exchanges, self.pipelines = [], [], [], [], [], []
        self.embeddings = []
        self.of_workload = {"synth": self.rows, "load": self.loads, "train": self.trains, "infer": self.infers,
                            "exchange": self.exchanges, "ops": self.embeddings}
        self.monitors, self.logs, self.machines, self.notes = [], [], [], []
        for source, folder in (("yours", pathlib.Path(results)), ("reference", pathlib.Path(reference))):
            if not folder.is_dir():
                raise BadInput(f"{folder}: no such folder; {'--results' if source == 'yours' else '--reference'} "
                               "must name a folder of CSV files")
            self.read_folder(source, folder)
        name_devices(self.loads)
        self.sweeps, self.load_sweeps = (newest(rows, lambda row: identity(row) + sweep_of(row))
                                         for rows in (self.rows, self.loads))
        self.rows, self.loads = newest(self.rows), newest(self.loads)
        reference = pathlib.Path(reference)
        self.published = read_published(
            reference / "published_figures.csv",
            {"figure": False, "series": False, "x_name": False, "x": True, "y_name": False, "y": True})
        self.published_code = read_published(
            reference / "published_h200.csv", {"variant": False, "batch": True, "published_s_per_image": True})
        scripts = reference / "published_scripts.csv"
        self.published_scripts = read_published(
            scripts, {"preset": False, "published_s_per_image": True}) if scripts.is_file() else []

    def published_series(self, figure):
        """Returns the published points of a figure as {series: [(x, y), ...]}, in order of x."""
        series = collections.defaultdict(list)
        for point in self.published:
            if point["figure"] == figure:
                series[point["series"]].append((point["x"], point["y"]))
        return {name: sorted(points) for name, points in series.items()}

    def read_folder(self, source, folder):
        monitors = []
        for path in sorted(folder.glob("*.csv")) + sorted(folder.glob("ops/*.csv")):
            if path.name.startswith("published_"):
                continue
            kind, rows = read_file(path, self.notes)
            if kind == "other":
                if path.name != "env.csv" and path.parent == folder:  # rows of scripts/compare/ops.py are in ops/
                    self.notes.append(f"{path}: no rows of a run; skipped")
            elif not rows:
                self.notes.append(f"{path}: no rows after the header")
            elif kind == "monitor":
                monitors.append({"source": source, "file": path, "samples": rows})
            elif kind == "log":
                self.logs.append({"source": source, "file": path, "rows": rows})
            else:
                self.add_rows(source, path, rows)
        self.monitors += sorted(monitors, key=lambda monitor: monitor["samples"][0]["time_utc"], reverse=True)
        for path in sorted(folder.glob("*env.json")):
            self.read_machine(source, path)

    def add_rows(self, source, path, rows):
        for row in rows:
            row.source, row.file = source, str(path)
            if row["wrong"]:
                self.notes.append(f"{path}: a row of {row['variant']} with wrong {ITEMS.get(row.workload, 'steps')} is skipped")
            elif stands_for_run(row):
                is_pipeline = row.is_train and row["parallel"] == "pipeline"
                (self.pipelines if is_pipeline else self.of_workload[row.workload]).append(row)

    def read_machine(self, source, path):
        try:
            machine = json.loads(read_text(path))
        except ValueError as error:
            raise BadInput(f"{path}: {error}; delete it, or write it again with: "
                           f"./fdsl-bench --env --format json > {path}") from None
        if not isinstance(machine, dict):
            raise BadInput(f"{path}: not a JSON object; write it again with: "
                           f"./fdsl-bench --env --format json > {path}")
        self.machines.append({"source": source, "file": path, "values": machine})
