#!/usr/bin/env python3
"""Checks the roofline columns of rows: tests/check_rooflines.py FILE...

roofline_share must be at most 1. It must equal the larger of flops / peak_flops_per_s and bytes / peak_bytes_per_s, divided
by time_median_s. The column `bound` must name the larger of the two. In a row of all ranks, the other columns are sums,
so its share cannot be recomputed from them. Skips rows without the column `bound`, which are older, and files of single
samples. Prints each wrong row and the number of checked rows. Exit status 1 if a row is wrong."""

import csv
import sys


def number(text):
    return float(text) if text else 0.0


def quotient(row, amount, peak):
    return number(row[amount]) / number(row[peak]) if number(row[peak]) else 0.0


def fault(row):
    """Returns a description of the error in a row, or "" if the row is correct."""
    share = number(row["roofline_share"])
    compute_s, transfer_s = quotient(row, "flops", "peak_flops_per_s"), quotient(row, "bytes", "peak_bytes_per_s")
    wanted = max(compute_s, transfer_s) / float(row["time_median_s"])
    bounds = ("compute",) if compute_s >= transfer_s else ("memory", "bus")
    if not 0 <= share <= 1:
        return f"roofline_share is {share}"
    if bool(row["bound"]) != (share > 0):
        return f"bound is '{row['bound']}' with a roofline_share of {share}"
    if row["rank"] == "all":
        return ""
    if abs(share - wanted) > 1e-6 * wanted:
        return f"roofline_share is {share}, but the other columns give {wanted}"
    return "" if not row["bound"] or row["bound"] in bounds else f"bound is '{row['bound']}', not one of {bounds}"


def main(paths):
    checked = faults = 0
    for path in paths:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("bound") is not None and "sample" not in row]
        for row in rows:
            words = fault(row)
            if words:
                faults += 1
                print(f"{path}: {row['variant']}, {row['time_utc']}: {words}")
        checked += len(rows)
    print(f"{checked} rows checked, {faults} wrong")
    return faults > 0


sys.exit(main(sys.argv[1:]))
