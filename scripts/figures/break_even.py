#!/usr/bin/env python3
"""Compares generating images with reading them, with and without a concurrent training step (--compute). Prints whether generating
or reading is faster for each step time, and the disk space that generating saves. scripts/figures/draw.py draws the figure
break_even.

  scripts/figures/break_even.py SYNTH.csv LOAD.csv ...     files written by scripts/compare/break_even.sh

Exit status: 0 done, 2 an invalid file, or rows that cannot be compared.
"""

import collections
import glob
import math
import os
import socket
import sys

sys.pycache_prefix = f"{sys.path[0]}/../../build/pycache"
from devices import SLOTS as SHARED_SLOTS, Missing, caveats  # noqa: E402
from plot import Failed, Plot, exit_status, number_words, short_device, x_axis, y_axis_from_zero  # noqa: E402
from rows import read_file, stands_for_run, sweep_of  # noqa: E402

COMMAND = "scripts/compare/break_even.sh DIR results/break_even"
IDLE = 0.01  # the total idle share is shown only if it exceeds the stall share by more than this
TIE = 0.02  # rates whose relative difference is at most this count as equal
GENERATED = "generated"
READ = {"warm": "read, page cache warm", "cold": "read, page cache cold", "any": "read, page cache as it was"}
GROUPS = (GENERATED,) + tuple(READ.values())
LOADERS_FILE = "_loaders.csv"  # end of the name of the file with runs that were made only for the monitor
READERS = ("files", "files-omp", "files-gpu", "shards", "shards-omp", "shards-gpu", "gpu-resident")

Source = collections.namedtuple("Source", "group name")  # where images come from: one of GROUPS, and a variant


# ---- Selection -------------------------------------------------------------------------------------------------


def step_of(row):
    """Returns the duration of the training step in ms; 0 without a step."""
    return float(row["compute_ms"] or 0)


def source_of(row):
    if not row.is_load:
        return Source(GENERATED, row["variant"])
    decoded = "" if row["decode"] != "1" else " jpeg" if row["data"].rstrip("/").endswith("jpeg") else " png"
    return Source(READ[row["cache"]], row["variant"] + decoded)


def job_of(row):
    """Returns the job of a row: origin (yours or reference), machine and batch size. Only rows of one job are comparable."""
    return row.source, row["host"], row["batch"]


def kept_fixed(row):
    """Returns the values that the rows of one line share: file, revision, all parameters except the step, and the size of the
    data."""
    return sweep_of(row) + tuple(value for column, value in row.settings.items() if column != "compute") + (
        row["threads"], *((row["items"], row["sample_bytes"]) if row.is_load else ()))


def images_per_step(row):
    """Returns the mean number of images per step. A step takes as long for a partial batch as for a full one, so rates are
    comparable only for full batches."""
    return row["batch"] if not row.is_load or not row["steps"] else row["items"] * row["samples"] / row["steps"]


def is_comparable(row):
    """Returns whether a row of a run can be compared: one rank, no augmentation, no skipped samples, and full batches (within
    TIE)."""
    if row["ranks"] != 1 or not row.is_load:
        return row["ranks"] == 1
    return (row["variant"] in READERS and row["augment"] != "1" and not row["skipped"]
            and not row.file.endswith(LOADERS_FILE) and images_per_step(row) >= (1 - TIE) * row["batch"])


def sources(rows):
    """Returns {source: {step: row}} of one job (job_of()). Prefers jobs with a step, then the user's jobs, then the newest. If a source has
    several sets of parameters, takes the set with the most steps, then the newest."""
    rows = [row for row in rows if is_comparable(row)]
    if not rows:
        return {}
    newest = max(rows, key=lambda row: (step_of(row) > 0, row.source == "yours", row["time_utc"]))
    groups = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row in sorted(rows, key=lambda row: row["time_utc"]):
        if job_of(row) == job_of(newest):
            groups[source_of(row)][kept_fixed(row)][step_of(row)] = row
    def steps_then_age(points):
        return sum(step > 0 for step in points), max(row["time_utc"] for row in points.values())
    best = {source: max(lines.values(), key=steps_then_age) for source, lines in groups.items()}
    return {source: best[source] for source in sorted(best, key=lambda source: (GROUPS.index(source.group), source.name))}


# ---- Comparison ------------------------------------------------------------------------------------------------


def rate(row):
    """Returns images per second. With a step, this is the mean over all runs, including the wait for the first batch. The median
    run may return before its step ends, so its rate could exceed the limit of the step."""
    if not row["busy_share"] or not row["step_s"]:
        return row["items_per_s"]
    return row["busy_share"] * images_per_step(row) / row["step_s"]


def winners(found, step):
    """Returns the sources with the best rate at this step, including ties, best first."""
    rates = {source: rate(points[step]) for source, points in found.items() if step in points}
    best = max(rates.values(), default=0)
    return sorted((source for source, rate in rates.items() if rate >= best * (1 - TIE)), key=lambda source: -rates[source])


def crossing(points, level):
    """Returns the last step time at which the ratio crosses a level, interpolated on log axes; None if it does not. `points` are
    (step, ratio) in order of steps."""
    for (low, before), (high, after) in reversed(list(zip(points, points[1:]))):
        if (before - level) * (after - level) < 0:
            share = math.log(level / before) / math.log(after / before)
            return low * (high / low) ** share
    return None


def verdict(generating, reading):
    """Returns a text that states for which steps generating or reading is faster. Both arguments are {step: row}."""
    ratios = [(step, rate(generating[step]) / rate(reading[step]))
              for step in sorted(generating) if step > 0 and step in reading]
    if not ratios:
        if 0 in generating and 0 in reading:
            ratio = rate(generating[0]) / rate(reading[0])
            return f"without a step {'generating' if ratio >= 1 else 'reading'} is {max(ratio, 1 / ratio):.3g} times as fast"
        return "no step in common"
    first, last = ratios[0][1], ratios[-1][1]
    ends = f"{first:.3g} times as fast at {ratios[0][0]:g} ms, {last:.3g} at {ratios[-1][0]:g} ms"
    if all(ratio > 1 + TIE for _, ratio in ratios):
        return f"generating wins at every step ({ends})"
    if all(ratio < 1 - TIE for _, ratio in ratios):
        return f"reading wins at every step ({ends})"
    if all(abs(ratio - 1) <= TIE for _, ratio in ratios):
        return f"equal at every step: the step limits both ({ends})"
    wins, level = ("generating", 1 + TIE) if first > 1 + TIE else ("reading", 1 - TIE)
    at = crossing(ratios, level)
    if abs(last - 1) <= TIE and at:
        return f"{wins} wins for steps below {at:.2g} ms; equal for longer steps ({ends})"
    return f"depends on the step ({ends})"


def generator_against(found):
    """Returns the generator to compare with readers: the one with the highest rate without a step, or else at its shortest step."""
    generators = {source: points for source, points in found.items() if source.group == GENERATED}
    return max(generators, key=lambda source: rate(generators[source][min(generators[source])]), default=None)


# ---- The table -------------------------------------------------------------------------------------------------


def cell(row):
    if row is None:
        return "-"
    wait, used = row["stall_share"], row["busy_share"]
    if wait is None:
        return f"{rate(row):,.0f}"
    idle = 1 - used if used is not None and 1 - used > wait + IDLE else None  # includes the wait for the first batch
    return f"{rate(row):,.0f} {100 * wait:4.1f} %" + ("" if idle is None else f" ({100 * idle:.0f})")


def print_table(found):
    steps = sorted({step for points in found.values() for step in points})
    some = next(iter(next(iter(found.values())).values()))
    wide = 2 + max(16, *(len(cell(points.get(step))) for points in found.values() for step in steps))
    print(f"Images per second by step duration, batch {some['batch']:.0f}. Percentage: share of time that the GPU waits for batches, after "
          f"its first step. In parentheses: total share of idle time in %, if it is larger by more than 1 percentage point")
    print(f"\n{'':26}" + "".join(f"{'no step' if step == 0 else f'{step:g} ms':>{wide}}" for step in steps))
    group = ""
    for source, points in found.items():
        if source.group != group:
            group = source.group
            print(group)
        print(f"  {source.name:24}" + "".join(f"{cell(points.get(step)):>{wide}}" for step in steps))
    print("\nFastest (rates within 2 % count as equal):")
    for step in steps:
        names = [f"{source.name}" + ("" if source.group == GENERATED else f" ({source.group.split()[-1]})")
                 for source in winners(found, step)]
        print(f"  {'no step' if step == 0 else f'{step:g} ms':>8}  {', '.join(names)}")


def print_verdicts(found):
    generator = generator_against(found)
    if not generator:
        return
    print(f"\nBreak-even of generating with {generator.name} vs. reading:")
    for source, points in found.items():
        if source.group != GENERATED:
            print(f"  {source.name + ', ' + source.group.split(' cache ')[-1]:28} {verdict(found[generator], points)}")


def allocated_bytes(folder):
    """Returns the disk space of the files in a folder."""
    return sum(os.lstat(os.path.join(root, name)).st_blocks * 512
               for root, _, names in os.walk(folder) for name in names)


def indexed(folder):
    """Returns (samples, their bytes) from the index that fdsl-bench --prepare wrote into a folder; (0, 0) if there is none."""
    paths = glob.glob(os.path.join(glob.escape(folder), "*.index"))
    if len(paths) != 1:
        return 0, 0
    with open(paths[0], encoding="utf-8", errors="replace") as lines:
        # sample KEY, then EXTENSION OFFSET SIZE HASH of each member
        sizes = [sum(map(int, line.split("\t")[4::4])) for line in lines if line.startswith("sample\t")]
    return len(sizes), sum(sizes)


def is_the_set(folder, row, images):
    """Returns whether a folder still has the data set that a row read. On another host, or after a new --prepare, the folder may
    have a different data set."""
    if row["host"] != socket.gethostname():
        return False
    try:
        count, total = indexed(folder)
    except (OSError, ValueError):
        return False
    return count == images and math.isclose(total, images * row["sample_bytes"], rel_tol=1e-3)


def print_disk(found):
    """Prints the disk space of each data set, which generating saves."""
    seen = {}
    for points in found.values():
        row = next(iter(points.values()))
        if row.is_load and row["data"] not in seen:
            images = row["items"] / float(row["epochs"])
            there = is_the_set(row["data"], row, images)
            seen[row["data"]] = allocated_bytes(row["data"]) if there else images * row["sample_bytes"], images, there
    if seen:
        print("\nDisk space that generating saves:")
    for folder, (total, images, there) in seen.items():
        print(f"  {os.path.basename(folder):10} {1e-9 * total:.3g} GB for these {images:,.0f} images; "
              f"{1e-6 * total / images * 1e3:.3g} GB per million"
              + ("" if there else " (sum of the sample sizes, because their folder is missing or has changed)"))


def say(paths):
    rows = []
    for path in paths:
        kind, more = read_file(path)
        if kind != "rows":
            raise Failed(f"{path}: no rows of a run; use files written by scripts/compare/break_even.sh", 2)
        for row in more:
            row.source, row.file = "yours", path
        rows += [row for row in more if stands_for_run(row) and not row["wrong"]]
    for row in rows:
        if images_per_step(row) < (1 - TIE) * row["batch"]:
            print(f"break_even: {row['variant']} with a step of {step_of(row):g} ms is skipped: its steps had {images_per_step(row):.0f} "
                  f"images, not {row['batch']:.0f}; read a multiple of threads x batch", file=sys.stderr)
    found = sources(rows)
    if not any(source.group == GENERATED for source in found) or all(source.group == GENERATED for source in found):
        raise Failed("no rows of both generating and reading on one host with one batch; scripts/compare/break_even.sh measures them", 2)
    print_table(found)
    print_verdicts(found)
    print_disk(found)


# ---- The figure ------------------------------------------------------------------------------------------------

# The colour and point of each source, whatever the state of the page cache. Values above 9 are complete line styles: naive
# needs one because it shares a slot with files-omp.
SLOTS = {**{name: SHARED_SLOTS[name.split()[0]] for name in ("fused", "bat", "gbase", "omp", "files-omp", "files-gpu", "shards-omp",
                                                              "shards-omp png", "shards-omp jpeg", "shards-gpu", "shards-gpu jpeg")},
         "gpu-resident": 93, "naive": 94}
STYLE_GROUPS = {GENERATED: 1, READ["warm"]: 2, READ["cold"]: 5, READ["any"]: 3}


def style_of(source):
    """Returns a line style. The variant decides colour and point; the page cache or decoding decides the dashes."""
    if SLOTS[source.name] > 9:
        return SLOTS[source.name]
    group = 4 if source.name.endswith(" png") else 6 if source.name.endswith(" jpeg") else STYLE_GROUPS[source.group]
    return 10 * group + SLOTS[source.name]


def device_words(rows):
    """Returns the names of the GPUs and CPUs in these rows, without duplicates."""
    return ", ".join(dict.fromkeys(short_device(row["device"]) for row in rows if row["device"]))


def share_of_limit(row):
    """Returns the rate of a row in percent of the highest rate that its step allows."""
    return 100 * rate(row) * step_of(row) * 1e-3 / row["batch"]


def figure(measured):
    rows = [row for row in measured.sweeps + measured.load_sweeps if row["compute_ms"]]
    found = sources(rows)
    if not any(source.group == GENERATED for source in found):
        raise Missing(COMMAND, measured.rows + measured.loads, needs="an NVIDIA GPU")
    plot = Plot("Generating vs. reading: share of the limit that the training step sets")
    shown = [row for points in found.values() for row in points.values()]
    steps = sorted({step_of(row) for row in shown})
    batch = shown[0]["batch"]
    plot.legend.append((0, "the GPU never waits"))
    plot.add_series(91, "limit: batch / step time", [(step, 100) for step in steps])
    for group in GROUPS:
        mine = {source: points for source, points in found.items() if source.group == group and source.name in SLOTS}
        plot.legend += [(0, group)] * bool(mine)
        for source, points in sorted(mine.items(), key=lambda item: -max(map(rate, item[1].values()))):
            plot.add_series(style_of(source), source.name, [(step, share_of_limit(points[step])) for step in sorted(points)])
    plot.variables = {**y_axis_from_zero([y for points in plot.blocks for _, y in points], number_words),
                      **x_axis(min(steps) / 1.3, max(steps) * 1.3, steps)}
    plot.caption = [f"Batch {batch:.0f}. A step of calibrated duration on the GPU consumes each batch while the next ones are "
                    "generated or read. Share: mean images per second, divided by batch / step time. At 100 % the GPU never waits, "
                    "and the source of the images makes no difference.",
                    f"{device_words(shown)} ({'your rows' if shown[0].source == 'yours' else 'reference rows'}, "
                    f"host {shown[0]['host']}, revision {', '.join(sorted({row['revision'] for row in shown} - {''}))})."
                    + "".join(f" {text.capitalize()}: {', '.join(names)}." for text, names in caveats(shown) if names)]
    return plot


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        print(__doc__.strip())
        sys.exit(0 if "--help" in sys.argv or "-h" in sys.argv else 2)
    sys.exit(exit_status("break_even", lambda: say(sys.argv[1:])))
