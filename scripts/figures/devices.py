"""The devices of a figure: their colours, dashes, names and captions, and notes on the user's rows."""

import collections

from plot import HEIGHT, micros_words, short_device, wrap

# Slots of plots/common.gp: the colour and point of a variant. Loaders and generators are in different figures, so they may
# share slots. files-omp looks like files, and shards-omp like shards-mmap. Third-party loaders are gray or have slot 4. In
# training figures, variants on GPUs also use slots 1, 2 and 5 of variants on CPUs. Slot 0 looks like slot 2 with an open
# point. The eager modes of PyTorch share a slot, and so do autotuned PyTorch and train-cudnn-tf32.
SLOTS = {"naive": 1, "omp": 2, "gbase": 3, "mem": 4, "rng": 5, "bat": 6, "fused": 7,
         "files": 1, "files-omp": 1, "files-uring": 2, "shards": 6, "shards-mmap": 5, "shards-omp": 5,
         "shards-uring": 7, "stream": 2, "files-gpu": 8, "shards-gpu": 4, "gds": 3, "torch-files": 8,
         "train-naive": 1, "train-omp": 2, "train-omp-blas": 5, "train-cuda": 3, "train-tf32": 4, "train-bf16": 5, "train-amp": 6,
         "train-graph": 7, "train-cudnn": 2, "train-cudnn-tf32": 0,
         "mpi": 1, "nccl": 8, "peer": 7, "peer-one-shot": 5, "peer-two-shot": 6,
         "peer-two-shot-adam": 2, "peer-fused-adam": 3,
         "torch-cpu": 8, "torch-cuda": 8, "torch-loader": 8, "torch-graph": 9, "torch-best": 1, "torch-autotuned": 0,
         "torch-shards": 8, "webdataset": 4,
         "published-python": 1, "published-numpy": 8, "published-gbase": 3, "published-bat": 6}
PUBLISHED = ("published-python", "published-numpy", "published-gbase", "published-bat")  # measured by scripts/compare/published.py
PUBLISHED_GROUP_HERE = 8  # group of line styles for PUBLISHED: open points and thin lines
DEVICES_MAX = 4  # maximum number of GPUs, and of CPUs, in one figure: plots/common.gp has this many dash patterns
NO_SLOT = 8  # gray: variants that are not in the table


class Missing(Exception):
    """A figure has no data. `command` measures the data. `known`: all rows of the workload. `needs`: the hardware that the command
    needs, in words. `why`: why there is none; by default, that the user's rows have other parameters."""

    def __init__(self, command, known=(), needs="", why=""):
        super().__init__(f"{command} (needs {needs})" if needs else command)
        self.command, self.needs = command, needs
        yours = yours_of(known)
        self.why = why or (f"none of your {counted(yours)} has suitable parameters" if yours else "no data")


def yours_of(rows):
    return [row for row in rows if row.source == "yours"]


def counted(rows):
    """Returns '1 row of synth', '12 rows of synth, load and train'."""
    *first, last = dict.fromkeys(row.workload for row in rows)
    names = f"{', '.join(first)} and {last}" if first else last
    return f"{len(rows)} row{'s' if rows[1:] else ''} of {names}"


COLUMNS_NAMED, VALUES_NAMED = 3, 4  # maximum, in notes on rows that are not drawn


def setting(row, column):
    """Returns the text of a column. An empty parameter has its default, or "none"."""
    return row.settings.get(column, row.texts.get(column, "")) or "none"


def differences(rows, drawn):
    """Returns the parameter values in `rows` that no row of `drawn` has, such as 'res 224; batch 8, 16'."""
    values = collections.defaultdict(list)
    for column in ("variant", "ranks", *rows[0].settings):
        known = {setting(row, column) for row in drawn}
        values[column] = [setting(row, column) for row in rows if setting(row, column) not in known]
    named = sorted((column for column in values if values[column]), key=lambda column: -len(values[column]))
    def words(column):
        found = sorted(dict.fromkeys(values[column]), key=lambda text: (len(text), text))
        return f"{column} {', '.join(found[:VALUES_NAMED])}{' …' if found[VALUES_NAMED:] else ''}"
    return "; ".join(map(words, named[:COLUMNS_NAMED])) or "no other point has the same remaining parameters"


def about_yours(known, candidates, drawn, columns, command):
    """Returns notes on the user's rows of a workload (`known`). If none is drawn, the note says why. Otherwise it names the
    `candidates` that are not drawn, with the values in `columns` that differ from the line of their variant."""
    shown = yours_of(drawn)
    left = [row for row in yours_of(candidates) if not any(row is other for other in shown)]
    if not shown and yours_of(known):
        yours = yours_of(known)
        return [f"your {counted(yours)} {'are' if yours[1:] else 'is'} not drawn, because the figure has no points with "
                f"{differences(yours, drawn)}; to measure the figure's rows: {command}"]
    if not shown:
        return [f"reference rows only; to measure your own: {command}"]
    if not left:
        return []
    texts = []
    for variant in dict.fromkeys(row["variant"] for row in left):
        mine = [row for row in left if row["variant"] == variant]
        drawn_too = [row for row in shown if row["variant"] == variant] or shown
        others = {column: {setting(row, column) for row in mine} - {setting(row, column) for row in drawn_too}
                  for column in columns}
        texts.append(variant + "".join(f", {column} {', '.join(sorted(values, key=lambda text: (len(text), text)))}"
                                       for column, values in others.items() if values))
    return [f"{len(left)} of your rows {'are' if left[1:] else 'is'} on no line, because other parameters differ: "
            f"{'; '.join(texts)}"]


def device_of(row):
    return row.source, row["host"], row["device"], row.on_gpu


class Devices:
    """The devices of a figure, each with its own group of line styles. The user's devices come before those of the reference.
    GPUs and CPUs have separate groups. Keeps at most `most` GPUs and `most` CPUs, the newest ones, but always at least one device
    of the reference. Prefers reference devices of which the user also has rows, so that both can be compared."""

    def __init__(self, rows, most=DEVICES_MAX, item="images"):
        self.item = item
        self.rows = collections.defaultdict(list)
        for row in rows:
            self.rows[device_of(row)].append(row)
        names = {device[2] for device in self.rows if device[0] == "yours"}
        def order(device):
            newest = max(row["time_utc"] for row in self.rows[device])
            return device[0] == "yours", device[2] in names, newest
        ranked = sorted(self.rows, key=order, reverse=True)
        self.groups, self.dropped = {}, 0
        for on_gpu in (True, False):
            of_kind = [device for device in ranked if device[3] == on_gpu]
            kept, rest = of_kind[:most], of_kind[most:]
            shipped = [device for device in rest if device[0] == "reference"]
            if shipped and kept[-1][0] == "yours":
                kept[-1] = shipped[0]
            self.dropped += len(rest)
            self.groups.update({device: 1 + i for i, device in enumerate(kept)})

    def order(self, row):
        """Returns the position of a row's line among the lines of its device: the order of SLOTS, then unknown variants."""
        return (list(SLOTS) + [row["variant"]]).index(row["variant"])

    def style(self, row):
        if row["variant"] in PUBLISHED:
            return 10 * PUBLISHED_GROUP_HERE + SLOTS[row["variant"]]
        return 10 * self.groups[device_of(row)] + SLOTS.get(row["variant"], NO_SLOT)

    def names(self):
        """Yields (device, heading lines, origin). The origin is "yours" or "reference", with the host if two devices have the
        same name."""
        count = collections.Counter(device[2] for device in self.groups)
        for device in self.groups:
            source, host, name, _ = device
            whose = "yours" if source == "yours" else "reference"
            yield device, wrap(short_device(name), 190, 11), whose + (f", {host}" if count[name] > 1 else "")

    def add_lines(self, plot, lines, label_of, point_of, order):
        """Adds the lines (lists of rows) of each device, in the order of order(first row), below the names of the device."""
        for device, name, whose in self.names():
            plot.legend += [(0, text) for text in name] + [(0.5, whose)]
            for rows in sorted((rows for rows in lines if device_of(rows[0]) == device), key=lambda rows: order(rows[0])):
                plot.add_series(self.style(rows[0]), label_of(rows[0]), list(map(point_of, rows)))
                plot.rings += [point_of(row)[:2] for row in rows if row.unsettled]

    def caption(self):
        """Returns sentences with full device names, revisions and caveats."""
        texts = [self.about(device) for device in self.groups]
        shown = [row for device in self.groups for row in self.rows[device]]
        if not texts:
            return []
        more = f" Not shown: {self.dropped} more device{'s' if self.dropped > 1 else ''}." if self.dropped else ""
        return ["; ".join(texts) + "." + more
                + (f" All {self.item} verified." if all(row["verified"] == "yes" for row in shown) else "")]

    def about(self, device):
        """Returns a description of a device: threads, origin of its rows, and variants that are not verified, not settled or
        throttled."""
        source, host, name, on_gpu = device
        rows = self.rows[device]
        threads = sorted({int(threads_per_rank(row)) for row in rows if not on_gpu})
        revisions = sorted({row["revision"] for row in rows} - {""})
        throttled = sorted({row["variant"] for row in rows if row.get("throttled")})
        return (f"{name}{', ' + threads_words(threads) if threads else ''} "
                f"({'your rows' if source == 'yours' else 'reference rows'}, host {host}, "
                f"revision {', '.join(revisions[:3]) or 'unknown'}{' …' if revisions[3:] else ''}"
                + "".join(f", {text}: {', '.join(names)}" for text, names in [*caveats(rows), ("throttled", throttled)] if names) + ")")


def best_lines(rows, key_of, x, above=0):
    """Returns one line per device and variant, in order of the column x. key_of(row) returns what the points of a line share, and
    begins with device and variant. Leaves out lines without an x above `above`. Prefers the line with the most points, then the newest."""
    lines, best = collections.defaultdict(dict), {}
    for row in sorted(rows, key=lambda row: row["time_utc"]):
        lines[key_of(row)][row[x]] = row
    def worth(points):
        return len(points), max(row["time_utc"] for row in points.values())
    for (device, variant, *_), points in lines.items():
        if max(points) > above and worth(points) >= worth(best.get((device, variant), points)):
            best[device, variant] = points
    return [[points[at] for at in sorted(points)] for points in best.values()]


def series_over(rows, x, line_of, combination_of, preferred):
    """Returns lists of rows in order of column x, one list per value of line_of(row). If the rows of a line have several values of
    combination_of(row), takes the one with the most points, then the one with the row that has the highest preferred(row)."""
    groups = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row in rows:
        points = groups[line_of(row)][combination_of(row)]
        if row[x] not in points or points[row[x]]["time_utc"] <= row["time_utc"]:
            points[row[x]] = row
    best = [max(lines.values(), key=lambda points: (len(points), max(map(preferred, points.values()))))
            for lines in groups.values()]
    return [[points[at] for at in sorted(points)] for points in best]


def dot(x, row, words):
    """Returns a point of a figure of dots: position, median, minimum and 95th percentile, the median as text, and `words`."""
    median = row.micros("time_median_s")
    return x, median, row.micros("time_min_s"), row.micros("time_p95_s"), micros_words(median), words


def caveats(rows):
    """Returns [(text, names of variants)]: those that are not verified, and those that did not settle."""
    return [(text, sorted({row["variant"] for row in rows if applies(row)})) for text, applies in (
        ("not verified", lambda row: row["verified"] != "yes"), ("not settled", lambda row: row.unsettled))]


def threads_per_rank(row):
    """Returns the mean number of threads per rank. The column of a row with rank=all is the sum over ranks."""
    return row["threads"] / (row["ranks"] if row["rank"] == "all" else 1)


def threads_words(threads):
    *first, last = map(str, threads)
    return f"{', '.join(first)} and {last} threads" if first else f"{last} thread{'s' * (last != '1')}"


def add_bar_devices(plot, devices, bars):
    """Adds the last blocks, which write the names of the devices below the names of the bars. Adjacent bars of one device share
    its name. There is one block per line of text. Returns the number of blocks."""
    bar_px = (plot.width - 84 - 190) / (len(bars) + 0.2)
    labels, lines_max = [], 1
    for device, name, whose in devices.names():
        at = [1 + b for b, (other, _) in enumerate(bars) if other == device]
        if at:
            lines = wrap(f"{short_device(device[2])} ({whose})", bar_px * len(at) - 8, 10)
            lines_max = max(lines_max, len(lines))
            labels += [(i, ((at[0] + at[-1]) / 2, line)) for i, line in enumerate(lines)]
    plot.axis_px = 62 + 16 * lines_max
    plot.height = HEIGHT + 16 * lines_max
    plot.blocks += [[label for i, label in labels if i == line] for line in range(lines_max)]
    return lines_max
