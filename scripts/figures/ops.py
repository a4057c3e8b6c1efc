"""The figure of embedding sets: bytes per second of the steps as a share of the measured bandwidth, by steps, variant and device,
from rows of the workload ops. scripts/figures/draw.py documents the return value."""

from devices import Devices, Missing, about_yours, device_of
from plot import HEIGHT, Plot, count_words, short_device, shortened, text_px
from rows import DEFAULTS, newest, of_one_job

COMMAND = "scripts/sweep/run.sh configs/sweep_ops.tsv"
JOB = ("data", "tensor", "columns", "bad", "duplicates", "norm_min", "norm_max")  # equal in all bars
STEPS = ("mask", "compact", "permute", "convert", "hash")
# A reference bandwidth: its colour (plots/common.gp) and its name in the legend.
IN_GPU, TO_GPU, ON_CPU = (6, "a copy in GPU memory"), (3, "copies to the GPU"), (5, "STREAM triad on the CPU")
ROW_PX, INSIDE = 22, 0.5  # height of a bar; from this share of the axis on, the text is inside the bar


def compared_with(row):
    return ON_CPU if not row.on_gpu else IN_GPU if row["resident"] == "1" else TO_GPU


def steps_of(row):
    """Returns the sort key of a group of bars: the positions of its steps in STEPS, the type of the rows, and the options of the steps."""
    return ([(*STEPS, step).index(step) for step in row["steps"].split(",")], row["steps"], row["dtype"] != DEFAULTS["ops"]["dtype"],
            row["dtype"], row["to"], row["fp8"], row["dedup"], row["sample"])


def heading(row):
    words = [f"convert to {row['to']}" if step == "convert" else step for step in row["steps"].split(",")]
    words += [f"--fp8 {row['fp8']}"] * (row["fp8"] == "nan") + ["--dedup"] * (row["dedup"] == "1")
    words += [f"--sample {row['sample']}"] * bool(row["sample"])
    return ", ".join(words) + (f"; {row['dtype']} rows" if row["dtype"] != DEFAULTS["ops"]["dtype"] else "")


def job_of(row):
    return tuple(row.settings[column] for column in JOB)  # norm_min and norm_max are empty without mask


def best_rows(rows):
    """Returns one row per bar: the row of the largest set; if there are several such rows, the newest."""
    best = {}
    for row in sorted(rows, key=lambda row: (row["items"], row["time_utc"])):
        best[device_of(row), row["variant"], compared_with(row), row["async"], *map(str, steps_of(row))] = row
    return list(best.values())


def bar(row, y):
    """Returns (share in %, y, text)."""
    share = 100 * row["stream_share"]
    return share, y, (f"{share:.3g} % of {count_words(row['stream_bytes_per_s'])}B/s, {count_words(row['items'])} rows"
                      + ", --async off" * (row["async"] == "off") + ", not settled" * row.unsettled)


def figure(measured):
    rows = best_rows(of_one_job((row for row in measured.embeddings if row["ranks"] == 1 and row["stream_share"]
                                 and row["stream_bytes_per_s"]), job_of))
    if not rows:
        raise Missing(COMMAND, measured.embeddings)
    devices = Devices(rows, 2, item="rows")
    shown = [row for row in rows if device_of(row) in devices.groups]
    def order(row):
        return (steps_of(row), not row.on_gpu, devices.groups[device_of(row)], compared_with(row) == TO_GPU, row["async"] == "off",
                row["variant"])
    plot = Plot("Embedding sets: share of the measured bandwidth by steps")
    bars, names, headings, y, last = {kind: [] for kind in (IN_GPU, TO_GPU, ON_CPU)}, [], [], 1.3, None
    for row in sorted(shown, key=order):
        if steps_of(row) != last:
            last, y = steps_of(row), y - 1.3
            headings.append((y, heading(row)))
        y -= 1
        bars[compared_with(row)].append(bar(row, y))
        names.append((y, f"{row['variant']}, {shortened(short_device(row['device']), 30)}{' (yours)' * (row.source == 'yours')}"))
    kinds = [kind for kind in bars if bars[kind]]
    plot.blocks = [*(bars[kind] for kind in kinds), names, headings]
    plot.legend = [(0, "100 % is the speed of")] + [(-slot, name) for slot, name in kinds]
    plot.left = int(30 + max(text_px(name, 10.5) for _, name in names))
    plot.width += plot.left
    plot.height = max(HEIGHT, int(200 - ROW_PX * y))
    x_high = max(100, 20 * -(-max(100 * row["stream_share"] for row in shown) // 20))
    plot.variables = {"y_low": y - 0.8, "y_high": 0.7, "inside": INSIDE * x_high, "x_high": x_high, "kinds": len(kinds),
                      "kind_slot": [slot for slot, _ in kinds]}
    first = shown[0]
    plot.caption = [f"{'Rows of files' if first['data'] else 'Generated rows'} of {first['columns']} values, "
                    f"{DEFAULTS['ops']['dtype']} unless stated. Bytes that any program must move (with copies to the GPU: bytes of "
                    "the rows) per second, as a share of the bandwidth that the same run measured (docs/ops.md)."]
    plot.caption += devices.caption()
    plot.notes += about_yours(measured.embeddings, newest(measured.embeddings), shown,
                              ("ranks", "rows", "columns", "threads", "bad", "duplicates", "seed"), COMMAND)
    return plot
