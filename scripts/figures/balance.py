"""The figure of uneven ranks, from rows of the workload train. For each value of --balance, it shows the speed of all ranks
together, divided by the sum of the speeds at which each rank trains alone. scripts/figures/draw.py documents the return value."""

import collections
import statistics

from devices import Devices, Missing, about_yours
from learning import JOB
from plot import HEIGHT, Plot, short_device, shortened
from rows import sweep_of

COMMAND = "scripts/compare/balance.py --threads 3,1 --out results/balance.csv -- --model lenet --batch 256 --epochs 8"
FIRST_COUNTED = 3  # epoch: `measured` begins with equal shares, and changes them after the first epoch
SLOTS = {"equal": (8, "equal"), "measured": (6, "measured"), "memory": (5, "memory")}  # colours of plots/common.gp
ON_CPU = "train-omp"  # the variant of ranks on CPUs that train together with GPUs
OTHER = (3, "a list of shares")
ROW_PX, INSIDE = 22, 55  # height of a bar; from this percentage on, the text is inside the bar


def job_of(row):
    """Returns the values that all training runs of one comparison share. The batch is per rank."""
    return (sweep_of(row), row["host"], row["batch"] / row["ranks"], row["train_samples"], row["test_samples"],
            *(row.settings[column] for column in JOB if column != "batch"))


def speed(rows):
    """Returns the median of samples per second over the counted epochs; None without such an epoch."""
    rates = [row["items_per_s"] for row in rows if row["epoch"] >= FIRST_COUNTED]
    return statistics.median(rates) if rates else None


def comparisons(rows):
    """Returns [(rows of the ranks alone, {balance: rows of all ranks together})]. A run of all ranks is compared with runs
    on single ranks that have the same job and the same variant (on CPUs: train-omp). There must be one such run per rank, and
    the sum of their threads must equal the threads of the run of all ranks."""
    alone, together = (collections.defaultdict(lambda: collections.defaultdict(list)) for _ in range(2))
    for row in rows:
        if row["ranks"] == 1:
            alone[job_of(row)][row["variant"], row["device"], row["threads"]].append(row)
        elif row["scaling"] == "weak":
            together[job_of(row), row["variant"], row["ranks"], row["threads"]][row["balance"]].append(row)
    found = []
    for (job, variant, ranks, threads), by_balance in together.items():
        members = [epochs for (name, *_), epochs in alone[job].items() if name in (variant, ON_CPU) and speed(epochs)]
        by_balance = {balance: epochs for balance, epochs in by_balance.items() if speed(epochs)}
        if by_balance and len(members) == ranks and sum(epochs[0]["threads"] for epochs in members) == threads:
            found.append((sorted(members, key=speed, reverse=True), by_balance))
    return found


def rank_words(row):
    where = short_device(row["device"]) if row.on_gpu else f"{row['threads']:.0f} CPU thread{'s' * (row['threads'] != 1)}"
    return f"{row['variant']} on {where}"


def heading(members, epochs):
    row = epochs[-1]
    return shortened(f"{' and '.join(rank_words(member[0]) for member in members)}, {row['batch']:.0f} samples per step", 100)


def figure(measured):
    candidates = [row for row in measured.trains if row["feed"] != "constant" and not row["init"]]
    found = comparisons(candidates)
    if not found:
        raise Missing(COMMAND, measured.trains)
    found.sort(key=lambda pair: (any(row.source != "yours" for row in pair[0][0]), not pair[0][0][0].on_gpu,
                                 heading(pair[0], next(iter(pair[1].values())))))
    titles = [heading(members, next(iter(by_balance.values()))) for members, by_balance in found]
    plot = Plot("Speed of uneven ranks by --balance")
    kinds, names, headings, y = collections.defaultdict(list), [], [], 0
    for (members, by_balance), title in zip(found, titles):
        total = sum(map(speed, members))
        headings.append((y, title + f" ({members[0][0]['revision']})" * (titles.count(title) > 1)))
        for balance in sorted(by_balance, key=lambda name: (list(SLOTS) + [name]).index(name)):
            y -= 1
            share = 100 * speed(by_balance[balance]) / total
            kinds[SLOTS.get(balance, OTHER)].append((share, y, f"{share:.0f} % of {total:,.0f} samples/s"))
            names.append((y, balance))
        y -= 1.3
    shown = [row for members, by_balance in found for epochs in (*members, *by_balance.values()) for row in epochs]
    plot.blocks = [*kinds.values(), names, headings]
    plot.legend = [(0, "--balance")] + [(-slot, name) for slot, name in kinds]
    plot.left = 150
    plot.height = max(HEIGHT, int(200 - ROW_PX * y))
    plot.variables = {"y_low": y + 0.5, "y_high": 0.7, "inside": INSIDE, "kinds": len(kinds),
                      "x_high": max(100, 5 * -(-max(share for bars in kinds.values() for share, *_ in bars) // 5)),
                      "kind_slot": [slot for slot, _ in kinds]}
    plot.caption = [f"Samples per second of all ranks together, divided by the sum of the speeds at which each rank trains alone. "
                    f"Medians of the epochs from epoch {FIRST_COUNTED} on, because --balance measured begins with equal shares."]
    plot.caption += Devices(shown, item="first steps").caption()
    plot.notes += about_yours([row for row in candidates if row["balance"]], [], shown, ("ranks", "balance"), COMMAND)
    return plot
