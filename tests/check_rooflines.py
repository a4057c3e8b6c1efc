#!/usr/bin/env python3
"""Checks the roofline columns of rows: tests/check_rooflines.py FILE...

A share must not exceed 1 and must be the larger of flops / peak_flops_per_s and bytes / peak_bytes_per_s, over the median time; the
column `bound` must name that one. Rows of all ranks hold sums, from which no share follows. Rows without the column
`bound` are older and are left out. Prints what is wrong, and how many rows were checked; exit status 1 then."""

import csv
import sys


def number(text):
    return float(text) if text else 0.0


def quotient(row, amount, peak):
    return number(row[amount]) / number(row[peak]) if number(row[peak]) else 0.0


def fault(row):
    """What is wrong with a row; "" where nothing is."""
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
        return f"roofline_share is {share}, and work over peaks gives {wanted}"
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
