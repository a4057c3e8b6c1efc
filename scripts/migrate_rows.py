#!/usr/bin/env python3
"""Converts CSV files of an older fdsl-bench to the current columns. The current fdsl-bench can then append to them, and the
scripts for figures and reports can read them.

  scripts/migrate_rows.py [--check] [--output DIR] FILE...

  --check           change nothing; exit with status 3 if a file must be converted
  --output DIR      write DIR/NAME and do not change FILE; an existing DIR/NAME is an error
  --lock-timeout S  wait up to S seconds for a process that is writing to a file (default: 60)

Examples:
  scripts/migrate_rows.py results/*.csv                  convert old files in place; leave current files unchanged
  scripts/migrate_rows.py --check results/*.csv          report which files are old
  scripts/migrate_rows.py --output converted old/*.csv   keep the old files

Renamed columns get their new names. New columns are empty, or have the value that older programs implied. All other values
keep their text and quotes. The rows keep their order and line ends, and the columns get the current order. Rows of --samples-out,
--monitor and --log are converted too. Files of the current schema are not changed. Files without rows of fdsl-bench are skipped with a
note. The script takes the lock under which fdsl-bench appends rows, and replaces the file atomically. The file keeps its mode.

The meaning of a few columns has changed: roofline_share in rows without `bound`, digest in rows without `scaling`, and a spread
of 0 (time_sd_s, time_cv) in rows of a single sample. Such values are left empty. Without --output, an old
file with such values is also kept in the same folder, for example as rows.csv.load-4 if its rows were load/4. docs/schemas.md
has all changes.

Exit status: 0 done, 1 a file could not be converted (the others were), 2 usage, 3 --check found an older file, 128 + N
interrupted by signal N (each file is then either converted or unchanged).
"""

import argparse
import collections
import fcntl
import os
import re
import secrets
import shlex
import signal
import sys
import time

IDENTITY = "schema time_utc host job_id revision workload variant device driver cuda ranks rank threads scaling ranks_per_device"
TIMES = """warmups samples settled median_error time_min_s time_median_s time_mean_s time_p95_s time_p99_s time_sd_s wall_s
    items items_per_s bytes_per_s flops bytes peak_flops_per_s peak_bytes_per_s bound roofline_share time_cv outliers throttled
    sm_clock_mhz memory_clock_mhz energy_j_per_item instruction_set speedup baseline imbalance efficiency timed_stages"""
COMPUTE = "compute_ms steps stall_share first_batch_s step_s busy_share slowdown bus_share bus_slowdown loss"
END = "cache verified wrong"
SAMPLE = ["sample", "wall_s", "device_s"]  # columns of --samples-out after the parameters

# Parameters and measures of each workload, in the order in which fdsl-bench writes them.
PARAMETERS = {
    "synth": """batch res vertices orbits formula seed instance classes preset preset_file class noise line_width radius oval_x
        oval_y freq1 freq2 dtype channels layout out_res fit mean std compute""",
    "load": """data image label member batch shuffle seed epochs iodepth block prefetch on_error decode
        out_res fit channels layout decoder augment shift mean std dtype ring chunk resident_bytes compute""",
    "train": """data image label on_error train_size test_size classes preset res out_res fit channels model batch drop_last epochs optimizer lr momentum beta1 beta2 epsilon weight_decay
        lr_schedule lr_warmup lr_step lr_milestones lr_gamma lr_power lr_min lr_cycles label_smoothing loss clip_norm accumulate ema layer_decay drop_path
        checkpoint_activations feed generator fresh shift flip interpolation rand_augment rand_augment_ops erasing mixup cutmix
        repeats raw mean std cudnn_benchmark seed sync lr_scale balance
        parallel stages microbatches schedule""",
    "infer": "checkpoint data image label on_error train_size test_size classes preset res out_res fit channels batch",
    "exchange": "array_bytes dtype",
    "ops": "data tensor rows columns dtype bad duplicates seed steps norm_min norm_max to fp8 dedup sample resident ring chunk async "
           "pool gpu_memory_limit",
}
MEASURES = {
    "synth": f"noise_s vertices_s painting_s digest {COMPUTE}",
    "load": f"""store shards sample_bytes skipped jpeg_warnings displacement shards_per_batch resident_share_before
        resident_share_after storage_read_bytes copy_bytes_per_s copy_share gds decoded_by resident_share jpeg_engine_share cpu_cores open_p50_s open_p99_s open_p999_s read_p50_s read_p99_s read_p999_s
        close_p50_s close_p99_s close_p999_s decode_s augment_s peak_memory_bytes memory_efficiency checksum {COMPUTE}""",
    "train": """epoch steps parameters train_samples test_samples skipped train_loss train_acc test_loss test_acc last_lr trained_s
        to_98_s to_99_s data_share memory_bytes generate_share generated_per_s opening_s init skipped_steps loss_scale
        exchange exchange_share samples_per_step layers bubble bubble_ideal bubble_formula batch_probes
        gradient_norm ema_test_loss ema_test_acc""",
    "infer": "model epoch parameters test_samples skipped test_loss test_acc memory_bytes batch_probes",
    "exchange": "count redop calls time_us algbw_gbs busbw_gbs checksum memory_bytes nccl_version",
    "ops": """load_s rows_in rows_kept duplicate_rows mask_s dedup_s compact_s permute_s convert_s hash_s least_bytes stream_bytes_per_s
        stream_share peak_memory_bytes memory_efficiency error_max error_mean digest""",
}
MONITOR = """schema time_utc host job_id revision rank gpu device variant phase time_s gpu_utilisation_percent gpu_memory_bytes
    temperature_c power_w sm_clock_mhz memory_clock_mhz pcie_rx_bytes_per_s pcie_tx_bytes_per_s throttled cpu_cores rss_bytes
    read_bytes_per_s write_bytes_per_s"""
COLUMNS = {name: f"{IDENTITY} {PARAMETERS[name]} {TIMES} {MEASURES[name]} {END}".split() for name in PARAMETERS}
STEPS_LOG = """schema time_utc host job_id revision workload variant device ranks seed model epoch step samples_seen loss accuracy lr
    gradient_norm items_per_s gpu_utilisation_percent gpu_memory_bytes test_loss test_acc"""
COLUMNS["monitor"], COLUMNS["steps"] = MONITOR.split(), STEPS_LOG.split()
CURRENT = {"synth": 7, "load": 12, "train": 10, "infer": 7, "exchange": 1, "ops": 1, "monitor": 2, "steps": 1}

# Former names of columns.
RENAMED_EVERYWHERE = {"peak_flops": "peak_flops_per_s", "mem_clock_mhz": "memory_clock_mhz", "timed": "timed_stages"}
RENAMED_COMPUTE = {"wait_share": "stall_share", "first_wait_s": "first_batch_s", "utilisation": "busy_share"}
RENAMED = {
    "synth": {**RENAMED_EVERYWHERE, **RENAMED_COMPUTE, "output": "dtype"},
    "load": {**RENAMED_EVERYWHERE, **RENAMED_COMPUTE, "tensor": "dtype", "depth": "iodepth", "layout": "store",
             "tally": "checksum", "shards_a_batch": "shards_per_batch", "resident_before": "resident_share_before",
             "resident_after": "resident_share_after", "device_bytes": "storage_read_bytes"},
    "train": {**RENAMED_EVERYWHERE, "loss": "train_loss"},
    "infer": RENAMED_EVERYWHERE,
    "exchange": {},
    "ops": {},
    "monitor": {},
    "steps": {},
}

# {(workload, former name): last version with the former meaning}, for former names that a newer column uses with another meaning.
REUSED = {("load", "layout"): 6, ("train", "loss"): 3}

# ADDED_AFTER: {workload: {version: columns that rows of this version or an older one may lack}}.
ROOFLINE = """settled median_error flops bytes peak_flops_per_s peak_bytes_per_s bound sm_clock_mhz memory_clock_mhz
    energy_j_per_item instruction_set speedup baseline"""
STEPS = "compute_ms steps stall_share first_batch_s step_s busy_share slowdown"
ADDED_AFTER = {
    "synth": {1: "dtype channels layout out_res fit mean std", 2: "scaling ranks_per_device imbalance efficiency", 3: STEPS,
              4: "compute bus_share bus_slowdown loss", 5: ROOFLINE},
    "load": {3: STEPS, 4: "dtype ring chunk gds compute bus_share bus_slowdown loss", 5: ROOFLINE,
             7: "peak_memory_bytes memory_efficiency",
             8: "image label member out_res fit channels", 9: "layout decoder decoded_by resident_bytes resident_share",
             10: "jpeg_engine_share cpu_cores", 11: "jpeg_warnings"},
    "train": {2: f"feed fresh generate_share generated_per_s opening_s init skipped_steps loss_scale {ROOFLINE}",
              4: "sync lr_scale exchange exchange_share",
              5: "drop_last balance samples_per_step parallel stages microbatches schedule layers bubble bubble_ideal "
                 "bubble_formula", 6: "batch_probes", 7: "out_res fit channels",
              8: "lr_milestones lr_power lr_min lr_cycles loss clip_norm accumulate ema layer_decay drop_path "
                 "checkpoint_activations generator interpolation rand_augment rand_augment_ops erasing mixup cutmix repeats "
                 "mean std cudnn_benchmark gradient_norm ema_test_loss ema_test_acc image label preset", 9: "on_error skipped"},
    "infer": {1: ROOFLINE, 3: "batch_probes", 4: "out_res fit channels", 5: "image label preset", 6: "on_error skipped"},
    "exchange": {},
    "ops": {},
    "monitor": {1: "gpu read_bytes_per_s write_bytes_per_s"},
    "steps": {},
}

# Values that older programs implied for missing columns: a constant (IMPLIED), or the value of another column (SAME_AS).
IMPLIED = {"synth": {"dtype": "u8", "channels": "1", "layout": "nchw"}, "train": {"feed": "stored", "drop_last": "0"}}
SAME_AS = {"synth": {"out_res": "res", "compute": "compute_ms"}, "load": {"compute": "compute_ms"}}

# Values that older programs implied for missing columns, in rows of several ranks (rows with a value in the column `scaling`).
ON_RANKS = {"train": lambda cells: {"balance": "equal", "samples_per_step": cells["batch"]}}

# {column whose meaning changed: the column that was added at the same time}.
CHANGED_WITH = {"roofline_share": "bound", "digest": "scaling"}

FIELD = re.compile(r'((?:[^",\n]|"[^"]*")*)(,|\n|\Z)')
POLL_S = 0.02
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class Refused(Exception):
    """A file cannot be converted. The message is one line with the file, the line number and a remedy."""


class Interrupted(BaseException):
    """A signal requests the end of the program. The argument is the signal's number."""


class NotRows(Exception):
    """A file without rows of fdsl-bench."""


# A record is (line number, raw fields, line end); an empty line has no fields.
Table = collections.namedtuple("Table", "header ending records")
Examined = collections.namedtuple("Examined", "data table workload version schema")  # a file that has been read


def plain(field):
    """Returns the value of a raw field, without quotes."""
    return field[1:-1].replace('""', '"') if len(field) > 1 and field[0] == field[-1] == '"' else field


# ---- Reading ---------------------------------------------------------------------------------------------------


def split(path, text):
    """Splits CSV text into a Table of raw fields, which keep their quotes."""
    records, fields, line, begin, at = [], [], 1, 1, 0
    while at < len(text):
        match = FIELD.match(text, at)
        if not match:
            raise Refused(f"{path}, line {begin}: a quote is not closed; close or remove it, or delete this row")
        if not match[2]:
            raise Refused(f"{path}, line {begin}: the last row has no line end and may be incomplete; complete or delete it")
        fields.append(match[1])
        at, line = match.end(), line + match[0].count("\n")
        if match[2] == "\n":
            ending = "\r\n" if fields[-1].endswith("\r") else "\n"
            fields[-1] = fields[-1][:len(fields[-1]) - len(ending) + 1]
            records.append((begin, fields if fields != [""] else [], ending))
            fields, begin = [], line
    if fields:  # the text ends with a comma
        raise Refused(f"{path}, line {begin}: the last row has no line end and may be incomplete; complete or delete it")
    if not records:
        raise NotRows(f"{path}: empty")
    return Table([plain(field) for field in records[0][1]], records[0][2], records[1:])


def schema_of(path, table):
    """Returns (workload, version) of all rows, which must be the same."""
    if table.header[:1] != ["schema"]:
        raise NotRows(f"{path}: no rows of fdsl-bench")
    found = None
    for line, fields, _ in table.records:
        if not fields:
            continue
        schema = plain(fields[0])
        if schema == "schema":
            raise Refused(f"{path}, line {line}: a second header; split the file in two there")
        if len(fields) != len(table.header):
            raise Refused(f"{path}, line {line}: {len(fields)} fields where the header has {len(table.header)}; "
                          "repair or delete this row")
        if found and schema != found:
            raise Refused(f"{path}, line {line}: schema '{schema}' after rows of '{found}'; split the file in two")
        found = schema
    if not found:
        raise Refused(f"{path}: no rows after the header, so its schema is unknown; delete it")
    workload, _, version = found.partition("/")
    if workload not in CURRENT or not re.fullmatch("[1-9][0-9]{0,3}", version):
        raise Refused(f"{path}, line {table.records[0][0]}: unknown schema '{found[:40]}' (known: "
                      f"{', '.join(f'{name}/{number}' for name, number in CURRENT.items())} and older); move this file away")
    if int(version) > CURRENT[workload]:
        raise Refused(f"{path}: rows of {found}, newer than {workload}/{CURRENT[workload]}, which this script writes; use the "
                      "script of the revision that wrote them")
    return workload, int(version)


def examine(path, data):
    """Parses the bytes of a file. Each byte becomes one character, so that no byte is changed."""
    table = split(path, data.decode("latin-1"))
    workload, version = schema_of(path, table)
    if version == CURRENT[workload] and table.header != new_columns(workload, table.header):
        raise Refused(f"{path}, line 1: the columns are not those of {workload}/{version}; restore the header")
    return Examined(data, table, workload, version, f"{workload}/{version}")


# ---- Converting ------------------------------------------------------------------------------------------------


def is_of_samples(header):
    """Returns whether a file was written by --samples-out. Files of --out of the workload ops have a column `sample`, too."""
    return "sample" in header and "samples" not in header


def new_columns(workload, header):
    """Returns the columns that a file has after the conversion. Files of --samples-out have fewer columns than files of --out."""
    columns = COLUMNS[workload]
    return columns[:columns.index("warmups")] + SAMPLE if is_of_samples(header) else columns


def names_of(path, workload, version, header):
    """Returns the current name of each column of an older file. Refuses unknown, repeated and missing columns."""
    columns, schema = new_columns(workload, header), f"{workload}/{version}"
    former = {old: new for old, new in RENAMED[workload].items() if version <= REUSED.get((workload, old), version)}
    names = [former.get(name, name) for name in header]
    if is_of_samples(header) and "compute" not in names:  # in files of --samples-out, compute_ms has the value of --compute
        names = ["compute" if name == "compute_ms" else name for name in names]
    for old, name in zip(header, names):
        if name not in columns:
            raise Refused(f"{path}, line 1: unknown column '{old}' in rows of {schema}, and its values would be lost; "
                          "remove this column first, or convert a copy without it")
        if names.count(name) > 1:
            raise Refused(f"{path}, line 1: two columns for '{name}'; remove one of them")
    may_miss = set(" ".join(added for last, added in ADDED_AFTER[workload].items() if version <= last).split())
    missing = [name for name in columns if name not in names and name not in may_miss]
    if missing:
        raise Refused(f"{path}, line 1: rows of {schema} have a column '{missing[0]}', but this file does not; "
                      "restore this column, or measure again")
    return names


def outdated(names, cells):
    """Returns the columns of a row whose values have an older meaning."""
    found = [name for name, marker in CHANGED_WITH.items() if marker not in names and cells.get(name)]
    if "settled" not in names and plain(cells.get("samples", "")) == "1":  # older versions wrote a spread of 0 for a single sample
        found += [name for name in ("time_sd_s", "time_cv") if plain(cells[name]) == "0"]
    return found


def converted(path, table, workload, version):
    """Returns the text of the converted file, and the number of values that were left empty, by column."""
    names, columns = names_of(path, workload, version, table.header), new_columns(workload, table.header)
    constants, copies = IMPLIED.get(workload, {}), SAME_AS.get(workload, {})
    lines, emptied = [",".join(columns) + table.ending], collections.Counter()
    for _, fields, ending in table.records:
        if not fields:
            lines.append(ending)
            continue
        cells = dict(zip(names, fields))
        old = outdated(names, cells)
        emptied.update(old)
        implied = {name: cells.get(copies.get(name), constants.get(name, "")) for name in columns if name not in cells}
        if workload in ON_RANKS and plain(cells.get("scaling", "")):
            implied.update((name, value) for name, value in ON_RANKS[workload](cells).items() if name in implied)
        cells.update({**implied, **dict.fromkeys(old, ""), "schema": f"{workload}/{CURRENT[workload]}"})
        lines.append(",".join(cells[name] for name in columns) + ending)
    return "".join(lines), emptied


# ---- Files -----------------------------------------------------------------------------------------------------


def why(error):
    return error.strerror or str(error)


def lock(file, path, operation, timeout_s):
    """Takes the lock that fdsl-bench takes to append. Waits up to `timeout_s` seconds for it."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise Refused(f"{path}: another process has had it locked for {timeout_s:g} s; wait until that process ends, or "
                              "raise --lock-timeout") from None
            time.sleep(POLL_S)
        except OSError:  # a file system without locks
            print(f"migrate_rows: {path}: this file system has no locks; let no process append to it now", file=sys.stderr)
            return


def open_locked(path, change, timeout_s):
    """Opens and locks a file. If another process replaces the file before it is locked, opens the new file."""
    while True:
        try:
            file = open(path, "r+b" if change else "rb")
        except OSError as error:
            remedy = "; write the result elsewhere with --output DIR" if change and os.access(path, os.R_OK) else ""
            raise Refused(f"{path} cannot be opened: {why(error)}{remedy}") from None
        try:
            lock(file, path, fcntl.LOCK_EX if change else fcntl.LOCK_SH, timeout_s)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except BaseException as error:
            file.close()
            if isinstance(error, FileNotFoundError):
                raise Refused(f"{path}: another process has just removed it") from None
            raise
        file.close()


def sync_folder(folder):
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some file systems do not support this
        pass
    finally:
        os.close(handle)


def write_whole(path, data, status):
    """Writes a file atomically, with the mode and owner of `status`. If this fails, an existing file stays unchanged."""
    folder, name = os.path.split(os.path.abspath(path))
    part = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            handle = file.fileno()
            file.write(data)
            try:
                os.fchown(handle, status.st_uid, status.st_gid)
            except OSError:  # only root may change the owner of a file
                pass
            os.fchmod(handle, status.st_mode & 0o7777)
            file.flush()
            os.fsync(handle)
        os.rename(part, path)
    except BaseException as error:
        if os.path.exists(part):
            os.unlink(part)
        if not isinstance(error, OSError):
            raise
        raise Refused(f"{path} cannot be written: {why(error)}; free space or allow writing to {folder}, or write elsewhere "
                      "with --output DIR") from None
    sync_folder(folder)


def keep(path, data, schema):
    """Keeps the old file under another name. Returns that name."""
    kept = f"{path}.{schema.replace('/', '-')}"
    try:
        if os.path.lexists(kept):
            with open(kept, "rb") as file:
                if file.read() == data:
                    return kept
            raise Refused(f"{path}: the old file would be kept as {kept}, which exists; move that file away")
        try:
            os.link(path, kept)
        except OSError:  # a file system without hard links
            write_whole(kept, data, os.stat(path))
    except OSError as error:
        raise Refused(f"{path}: the old file cannot be kept as {kept}: {why(error)}; use --output DIR") from None
    return kept


def write_elsewhere(path, folder, data, status):
    """Writes the result to a folder. Returns its path."""
    target = os.path.join(folder, os.path.basename(path))
    if os.path.lexists(target):
        raise Refused(f"{target} exists; choose another folder with --output, or remove this file")
    write_whole(target, data, status)
    return target


def is_current(file):
    return file.version == CURRENT[file.workload]


def check(path, file):
    converted(path, file.table, file.workload, file.version)
    print(f"{path}: has rows of {file.schema}; convert them to {file.workload}/{CURRENT[file.workload]} with: "
          f"scripts/migrate_rows.py {shlex.quote(path)}")


def replace(path, file, status, output):
    """Writes the converted file to the folder `output`. If that is None, replaces the old file, which the caller has locked."""
    text, emptied = converted(path, file.table, file.workload, file.version)
    target, notes = path, ""
    if emptied:
        notes = "; left empty, because their meaning has changed: " + ", ".join(
            f"{name} in {count} row{'s' * (count != 1)}" for name, count in emptied.items())
    if output:
        target = write_elsewhere(path, output, text.encode("latin-1"), status)
    else:
        notes += f"; the old file is {keep(path, file.data, file.schema)}" if emptied else ""
        write_whole(path, text.encode("latin-1"), status)
    rows = sum(bool(fields) for _, fields, _ in file.table.records)
    print(f"{target}: {rows} row{'s' * (rows != 1)} of {file.schema} converted to {file.workload}/{CURRENT[file.workload]}"
          f"{notes}")


def migrate(path, options):
    """Converts a file. Returns whether the file had an older schema."""
    path = os.path.realpath(path) if os.path.islink(path) else path
    if not os.path.isfile(path):
        raise Refused(f"{path}: {'not a regular file' if os.path.exists(path) else 'no such file'}; name CSV files")
    with open_locked(path, False, options.lock_timeout) as stream:
        file = examine(path, stream.read())
        if options.check and not is_current(file):
            check(path, file)
            return True
    if not is_current(file):  # opens the file again, for writing; another process may have changed it
        with open_locked(path, not options.output, options.lock_timeout) as stream:
            file = examine(path, stream.read())
            if not is_current(file):
                replace(path, file, os.fstat(stream.fileno()), options.output)
                return True
    if options.output:
        write_elsewhere(path, options.output, file.data, os.stat(path))
    print(f"{path}: has the current schema, {file.schema}")
    return False


def catch(signals, handler):
    for number in signals:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def interrupt(number, _):
    catch(SIGNALS, signal.SIG_IGN)  # a second signal must not interrupt the removal of temporary files
    raise Interrupted(number)


def main(arguments):
    parser = argparse.ArgumentParser(prog="scripts/migrate_rows.py", add_help=False)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--output")
    parser.add_argument("--lock-timeout", type=float, default=60)
    parser.add_argument("-h", "--help", action="store_true")
    options = parser.parse_args(arguments)
    if options.help:
        print(__doc__.strip())
        return 0
    if not options.files:
        parser.error("name at least one CSV file; --help has examples")
    if options.check and options.output:
        parser.error("--check writes nothing; leave out --output or --check")
    if options.output and not os.path.isdir(options.output):
        parser.error(f"--output {options.output}: no such folder; create it first")
    catch(SIGNALS, interrupt)
    failed, older = False, False
    for path in options.files:
        try:
            older |= migrate(path, options)
        except NotRows as note:
            print(f"migrate_rows: {note}; left as it is", file=sys.stderr)
        except Refused as error:
            print(f"migrate_rows: {error}", file=sys.stderr)
            failed = True
    return 1 if failed else 3 if options.check and older else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Interrupted as interrupted:
        print("migrate_rows: interrupted; each file is either converted or unchanged: run the command again for the rest",
              file=sys.stderr)
        sys.exit(128 + interrupted.args[0])
