#!/usr/bin/env python3
"""Prints two tables from a profiler's report: one of kernels, one of ranges. Columns: name, calls, total, median, share.

    scripts/sweep/profile_tables.py nsys KERNELS.csv RANGES.csv    `nsys stats` of cuda_gpu_kern_sum and nvtx_sum
    scripts/sweep/profile_tables.py ncu KERNELS.csv                `ncu --page raw --csv --nvtx` with gpu__time_duration.sum

scripts/sweep/profile.sh calls this script. Exit status: 0 done, 1 nothing to show, 2 usage.
"""

import collections
import csv
import re
import statistics
import sys

# Untimed phases of a run, with their names in src/core/phase.c.
UNTIMED = {"setup", "verify", "warm-up", "measure", "teardown"}
TIME = "gpu__time_duration.sum"
NANOSECONDS = {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}


def rows_of(path):
    """Returns the rows of a CSV table as dictionaries. Skips lines before the header, and the tool's notes."""
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        lines = [line for line in file if line.strip() and not line.startswith("==")]
    while lines and not re.match(r'"?(ID|Time \(%\))"?,', lines[0]):
        lines.pop(0)
    return list(csv.DictReader(lines))


def number(text):
    return float(text.replace(",", ""))


def short(kernel):
    """Returns a kernel's name without parameters and template arguments."""
    name, plain = kernel, re.sub(r"\(anonymous namespace\)::|^void ", "", kernel)
    while name != plain:
        name, plain = plain, re.sub(r"<[^<>]*>", "", plain)
    return re.sub(r"\(.*$", "", name).strip() or kernel


def shown(nanoseconds):
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.4g} {unit}"
    return f"{nanoseconds:.4g} ns"


def table(title, entries, whole):
    """Prints a table. Entries are (name, calls, total ns, median ns); `whole` is the time in ns that counts as 100 %."""
    width = max([len(title)] + [len(entry[0]) for entry in entries])
    print(f"{title:{width}}  {'calls':>8}  {'total':>10}  {'median':>10}  {'share':>7}")
    for name, calls, total, median in sorted(entries, key=lambda entry: -entry[2]):
        share = f"{100 * total / whole:.1f} %" if whole else "-"
        print(f"{name:{width}}  {calls:8.0f}  {shown(total):>10}  {shown(median):>10}  {share:>7}")


def merged(pairs):
    """Summarises (name, ns) pairs as entries."""
    times = collections.defaultdict(list)
    for name, nanoseconds in pairs:
        times[name].append(nanoseconds)
    return [(name, len(all_), sum(all_), statistics.median(all_)) for name, all_ in times.items()]


def stack_of(row):
    """Returns the names of the open ranges at a kernel's launch, outermost first."""
    return [name for column, text in row.items() if column and "Push/Pop_Range" in column and text
            for name in re.findall(r'"[^":]*:([^":]*):', text)]


def ncu(kernels):
    rows = rows_of(kernels)
    unit = "ns"
    timed = []
    for row in rows:
        if not row.get("ID"):  # the line of units
            unit = row.get(TIME) or unit
            continue
        stack = stack_of(row)
        if row.get(TIME) and not UNTIMED.intersection(stack):
            timed.append((short(row["Kernel Name"]), number(row[TIME]) * NANOSECONDS[unit], stack))
    if not timed:
        raise SystemExit("profile_tables.py: ncu saw no kernel of a timed run; raise --launches to reach one. ncu does not see "
                         "variants on the CPU or kernels launched by kernels")
    whole = sum(nanoseconds for _, nanoseconds, _ in timed)
    table("kernel", merged((name, nanoseconds) for name, nanoseconds, _ in timed), whole)
    print()
    table("range (its kernels)", merged((name, nanoseconds) for _, nanoseconds, stack in timed for name in set(stack)), whole)


def nsys_entries(path, name):
    return [(row[name].lstrip(":"), number(row["Instances"]), number(row["Total Time (ns)"]), number(row["Med (ns)"]))
            for row in rows_of(path)]


def nsys(kernels, ranges):
    entries = nsys_entries(kernels, "Name")
    on_host = nsys_entries(ranges, "Range")
    if not entries and not on_host:
        raise SystemExit("profile_tables.py: nsys recorded neither kernels nor ranges")
    if entries:
        table("kernel", [(short(entry[0]), *entry[1:]) for entry in entries], sum(entry[2] for entry in entries))
        print()
    # Ranges nest. Shares are relative to the longest range, which contains the others of its thread.
    table("range (on the host)", on_host, max((entry[2] for entry in on_host), default=0))


def main(arguments):
    tools = {"ncu": (ncu, 1), "nsys": (nsys, 2)}
    if {"-h", "--help"}.intersection(arguments):
        print(__doc__.strip())
        return
    if not arguments or arguments[0] not in tools or len(arguments) - 1 != tools[arguments[0]][1]:
        print("profile_tables.py: give nsys and two files, or ncu and one; see --help", file=sys.stderr)
        sys.exit(2)
    tools[arguments[0]][0](*arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
