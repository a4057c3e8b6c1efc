#!/usr/bin/env python3
"""Writes DIR/metadata.parquet from the samples.csv of a data set created by fdsl-bench --prepare.

    scripts/packaging/metadata_parquet.py DIR...

Needs pyarrow. Columns keep their names and order. class, instance, seed and number become 64-bit integers; all other
columns stay text, because integers would lose the leading zeros of keys. The file is written under a temporary name and
renamed when it is complete.

Exit status: 0 done, 1 a file cannot be converted, 2 usage, 4 no pyarrow.
"""
import csv
import os
import sys

INTEGERS = {"class": "int64", "instance": "uint64", "seed": "uint64", "number": "uint64"}


def convert(folder):
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    source, target = os.path.join(folder, "samples.csv"), os.path.join(folder, "metadata.parquet")
    with open(source, encoding="utf-8", newline="") as stream:
        columns = next(csv.reader(stream))
    types = {name: getattr(pyarrow, INTEGERS[name])() if name in INTEGERS else pyarrow.string() for name in columns}
    table = pyarrow.csv.read_csv(source, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
                                 convert_options=pyarrow.csv.ConvertOptions(column_types=types))
    temporary = f"{target}.{os.getpid()}-0.tmp"
    try:
        pyarrow.parquet.write_table(table, temporary, compression="zstd")
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.rename(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    print(f"{target}: {table.num_rows} samples, {table.num_columns} columns")


def main():
    folders = sys.argv[1:]
    if {"-h", "--help"}.intersection(folders):
        print(__doc__.strip())
        return 0
    if not folders or any(folder.startswith("-") for folder in folders):
        print("metadata_parquet.py: give folders; see --help", file=sys.stderr)
        return 2
    try:
        for folder in folders:
            convert(folder)
    except ImportError:
        print("metadata_parquet.py: pyarrow is missing: python3 -m pip install pyarrow", file=sys.stderr)
        return 4
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        print(f"metadata_parquet.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
