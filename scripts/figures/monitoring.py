"""Figures of GPU and CPU load during runs, from files written by --monitor. scripts/figures/draw.py documents the return values."""

import collections
import datetime
import itertools
import math
import os
import statistics

import break_even
from devices import SLOTS, Missing
from plot import HEIGHT, WIDTH, Plot, micros_words, nice_above, shortened, text_px

PHASES = ("setup", "verify", "warm-up", "timed", "measure", "teardown", "idle")
SHADES = {"setup": 1, "verify": 2, "warm-up": 3, "timed": 4, "measure": 5, "teardown": 6, "idle": 7}
COLOURS = (6, 3, 5, 2, 4, 7, 1, 9)  # slots of plots/common.gp for GPUs; the limit of GPUs in the figure
NEUTRAL = 8  # slot of lines that do not belong to one GPU
PROCESS = ("rss_bytes", "cpu_cores", "read_bytes_per_s", "write_bytes_per_s")
PANELS = (  # title, scale, columns with their names, minimum height of the axis
    ("GPU use (%)", 1, (("gpu_utilisation_percent", "GPU"),), 100),
    ("power (W)", 1, (("power_w", "board"),), 0),
    ("temperature (°C)", 1, (("temperature_c", "GPU"),), 0),
    ("clocks (GHz)", 1e-3, (("sm_clock_mhz", "SM"), ("memory_clock_mhz", "memory")), 0),
    ("PCIe (GB/s)", 1e-9, (("pcie_rx_bytes_per_s", "to the GPU"), ("pcie_tx_bytes_per_s", "from the GPU")), 0),
    ("memory (GB)", 1e-9, (("gpu_memory_bytes", "GPU"), ("rss_bytes", "process")), 0),
    ("CPU (cores)", 1, (("cpu_cores", "process"),), 1),
    ("storage (GB/s)", 1e-9, (("read_bytes_per_s", "read"), ("write_bytes_per_s", "written")), 0),
)


def runs_of(samples):
    """Splits the samples of one rank into its runs. A new run begins where the time restarts."""
    starts = [i for i, sample in enumerate(samples) if i == 0 or sample["time_s"] < samples[i - 1]["time_s"]]
    return [samples[start:end] for start, end in zip(starts, [*starts[1:], len(samples)])]


def clock_span(run):
    """Returns the first and the last second of a run, in s since 1970."""
    try:
        begin = datetime.datetime.strptime(run[0]["time_utc"], "%Y-%m-%dT%H:%M:%SZ").timestamp()
    except ValueError:
        begin = 0
    return begin, begin + run[-1]["time_s"] + 1


def last_run(samples):
    """Returns ({(rank, gpu): samples}, number of runs): all GPUs of all ranks in the last run of the lowest rank. Another rank
    takes part with its last run if this overlaps in time. The number of runs is that of the lowest rank."""
    ranks = collections.defaultdict(list)
    for sample in samples:
        ranks[sample["rank"]].append(sample)
    runs = {rank: runs_of(ranks[rank]) for rank in sorted(ranks, key=lambda rank: (len(rank), rank))}
    lowest = next(iter(runs.values()))
    begin, end = clock_span(lowest[-1])
    series = collections.defaultdict(list)
    for rank, (first, last) in {rank: clock_span(of_rank[-1]) for rank, of_rank in runs.items()}.items():
        if first <= end and begin <= last:
            for sample in runs[rank][-1]:
                series[rank, sample["gpu"]].append(sample)
    return dict(series), len(lowest)


def series_names(series):
    """Returns the name of each (rank, gpu): the parts that differ."""
    ranks = {rank for rank, _ in series}
    return [", ".join([f"rank {rank}"] * (len(ranks) > 1) + [f"GPU {gpu}"] * (gpu != "")) for rank, gpu in series]


def left_out(measured, chosen, runs):
    """Returns a note that names the file and the run that are drawn; None if there is no other file or run."""
    name, files = chosen["file"].name, sum(monitor["source"] == chosen["source"] for monitor in measured.monitors)
    parts = [f"the last of its {runs} runs ({runs - 1} left out)"] * (runs > 1)
    parts += [f"the newest of {files} monitor files ({files - 1} left out)"] * (files > 1)
    return f"drawn: {name}, {'; '.join(parts)}" if parts else None


def spans(samples, key, end):
    """Returns (key, from, to) for each series of consecutive samples with the same key. Each series ends where the next one begins."""
    found = []
    for sample in samples:
        if not found or found[-1][0] != key(sample):
            found.append([key(sample), sample["time_s"], end])
            if found[:-1]:
                found[-2][2] = sample["time_s"]
    return found


def wide_enough(bands, px_s):
    """Joins bands that are narrower than half a px to the band before them."""
    kept = []
    for name, begin, end in bands:
        if kept and (end - begin) * px_s < 0.5:
            kept[-1][2] = end
        else:
            kept.append([name, begin, end])
    return kept


def shades_of(bands):
    """Returns {phase: shade} of the phases in the figure. Phases that a program named get the shades that are left; further
    ones are white."""
    present = list(dict.fromkeys(name for name, _, _ in bands))
    shades = {name: SHADES[name] for name in PHASES if name in present}
    left = [shade for shade in range(1, SHADES["idle"]) if shade not in shades.values()]
    named = [name for name in present if name not in shades]
    return {**shades, **dict(itertools.zip_longest(named, left[:len(named)], fillvalue=SHADES["idle"]))}


def key_places(names, left, top):
    """Returns ([(x, y) in px of each name of a key], y of what follows). The rows of the key begin at `left` and `top`."""
    places, x, y = [], left, top
    for name in names:
        width = text_px(name, 10) + 36
        if x > left and x + width > WIDTH - 16:
            x, y = left, y + 18
        places.append((x, y))
        x += width
    return places, y + 22 * bool(names)


def panel_lines(series):
    """Returns the variables that describe the panels and their lines: one line per column and GPU that has values. Colours are
    those of the GPU; the second column of a panel is dashed. If there is one rank, the lines of its process are gray."""
    alone, ranks = len(series) == 1, {rank for rank, _ in series}
    variables, number = collections.defaultdict(list), 1
    for title, scale, columns, least in PANELS:
        values = {column: [[scale * sample[column] for sample in samples if sample[column] is not None]
                           for samples in series.values()] for column, _ in columns}
        present = [(number + 1 + n, column, name) for n, (column, name) in enumerate(columns) if any(values[column])]
        number += len(columns)
        if not present:
            continue
        variables["panel_from"].append(len(variables["line_block"]) + 1)
        for dash, (place, column, _) in enumerate(present):
            for block, found in enumerate(values[column]):
                if found:
                    slot = NEUTRAL if column in PROCESS and len(ranks) == 1 else COLOURS[block]
                    variables["line_block"].append(block)
                    variables["line_column"].append(place)
                    variables["line_style"].append((16, 23)[dash] if alone else 10 * (1 + dash) + slot)
        variables["panel_to"].append(len(variables["line_block"]))
        high = max(value for _, column, _ in present for found in values[column] for value in found)
        variables["panel_title"].append(title)
        variables["panel_high"].append(nice_above(1.04 * high) if high > least else least or 1)
        variables["names_first"].append(present[0][2])
        variables["names_second"].append(present[1][2] if len(present) > 1 else "")
    key = (16, 23) if alone else (10 + NEUTRAL, 20 + NEUTRAL)
    return {"panels": len(variables["panel_title"]), "key_first": key[0], "key_second": key[1], **variables}


def over_time(measured):
    if not measured.monitors:
        raise Missing("./fdsl-bench --variant omp --batch 64 --min-time 11 --monitor results/monitor.csv")
    chosen = measured.monitors[0]
    found, runs = last_run(chosen["samples"])
    series = dict(itertools.islice(found.items(), len(COLOURS)))
    first = next(iter(series.values()))
    plot = Plot("GPU and CPU load during a run", height=0)
    plot.left, plot.right = 84, 140
    end = max(samples[-1]["time_s"] for samples in series.values()) * 1.002 or 1
    px_s = (WIDTH - plot.left - plot.right) / end
    bands = wide_enough(spans(first, lambda sample: sample["phase"], end), px_s)
    shades, names = shades_of(bands), series_names(series) if len(series) > 1 else []
    shown = [phase for phase, shade in shades.items() if shade < SHADES["idle"] or phase == "idle"]
    phase_names = [shortened(phase, 40) for phase in shown]
    phase_places, below = key_places(phase_names, plot.left, 50)
    gpu_places, plot.top = key_places(names, plot.left, below)
    columns = [(column, scale) for _, scale, lines, _ in PANELS for column, _ in lines]
    plot.blocks = [[(sample["time_s"], *(None if sample[column] is None else scale * sample[column] for column, scale in columns))
                    for sample in samples] for samples in series.values()]
    plot.blocks += [fitting_names(spans(first, lambda sample: sample["variant"], end), px_s, 10.5),
                    fitting_names(bands, px_s, 9.5)]
    lines = panel_lines(series)
    plot.variables = {**lines, "x_high": end, "series": len(series), "bands": len(bands),
                      "band_from": [band[1] for band in bands], "band_to": [band[2] for band in bands],
                      "band_slot": [shades[band[0]] for band in bands],
                      "phases": len(shown), "phase_name": phase_names, "phase_slot": [shades[phase] for phase in shown],
                      "phase_x": [x for x, _ in phase_places], "phase_y": [y for _, y in phase_places],
                      "gpus": len(names), "gpu_name": names, "gpu_style": [10 + COLOURS[i] for i in range(len(names))],
                      "gpu_x": [x for x, _ in gpu_places], "gpu_y": [y for _, y in gpu_places]}
    plot.height = plot.top + 40 + 88 * lines["panels"] + 100
    period_ms = 1e3 * (first[-1]["time_s"] - first[0]["time_s"]) / max(1, len(first) - 1)
    several = len({rank for rank, _ in series}) > 1
    parts = "GPUs" if any(gpu for _, gpu in found) else "ranks"
    plot.caption = [f"{len(first)} samples{f' per {parts[:-1]}' * bool(names)} at {period_ms:.0f} ms intervals"
                    + (f"; {len(series)} of {len(found)} {parts}" if len(found) > len(series) else "")
                    + f". {device_names([sample for samples in series.values() for sample in samples])} "
                    + f"({'yours' if chosen['source'] == 'yours' else 'reference'}, "
                    + f"host {first[0]['host']}, revision {first[0]['revision']})."
                    + (" Phases are those of the first rank; the time of each rank begins at its own start." if several else "")
                    + (" GPU use is the driver's average over up to one second."
                       if lines["panel_title"][:1] == [PANELS[0][0]] else "")
                    + (" The driver samples PCIe for 20 ms per interval and may miss short bursts."
                       if any(title.startswith("PCIe") for title in lines["panel_title"]) else "")]
    note = left_out(measured, chosen, runs)
    plot.notes += [note] * (note is not None)
    if len(found) > len(series):
        plot.notes.append(f"drawn: {', '.join(names)}; {len(found) - len(series)} further {parts} left out")
    if chosen["source"] != "yours":
        plot.notes.append("no monitor file of yours; to record one: "
                          "./fdsl-bench --variant omp --batch 64 --min-time 11 --monitor results/monitor.csv")
    return plot


def device_names(samples):
    return ", ".join(dict.fromkeys(sample["device"] for sample in samples if sample["device"])) or "unnamed device"


def fitting_names(found, px_s, size):
    return [((begin + end) / 2, name) for name, begin, end in found if text_px(name, size) < (end - begin) * px_s - 4]


# Figure monitor_loading.
LOADERS = ("files-gpu", "shards-gpu", "gds", "files-omp", "shards-omp")
LOADER_PANELS = (("GPU use (%)", 1, "gpu_utilisation_percent"), ("CPU (cores)", 1, "cpu_cores"))
RATE_PANEL = "throughput (GB/s)"
OFF = 1e300  # in place of a missing rate: outside the axis, because gnuplot warns about lines without points


def timed_runs(measured, of_clips):
    """Returns {(source, host): {variant: samples of its newest timed run}}, the user's first: runs on clips that cnn3d also trains
    on, or all other runs."""
    runs = collections.defaultdict(list)
    for chosen in measured.monitors:
        for sample in chosen["samples"]:
            if sample["phase"] == "timed" and sample["variant"] in LOADERS:
                runs[chosen["source"], sample["host"], sample["variant"], sample["time_utc"], sample["rank"]].append(sample)
    newest = {key[:3]: runs[key] for key in sorted(runs, key=lambda key: (key[3], key[4]))
              if bool(trained_on(measured, row_of_run(measured, runs[key][0], False))) == of_clips}
    hosts = sorted({key[:2] for key in newest}, key=lambda key: (key[0] != "yours", key[1]))
    return {host: {variant: newest[host + (variant,)] for variant in LOADERS if host + (variant,) in newest} for host in hosts}


def timed_loaders(measured):
    """Returns (source, {variant: samples of its newest timed run}) of one host."""
    for (source, _), mine in timed_runs(measured, False).items():
        if {"files-gpu", "shards-gpu"} <= set(mine):
            return source, mine
    raise Missing(break_even.COMMAND, measured.loads, needs="an NVIDIA GPU")


def row_of_run(measured, sample, with_step=True):
    """Returns the row of the run that a sample belongs to, or None."""
    return next((row for row in measured.load_sweeps if (row["stall_share"] is not None or not with_step) and all(
        row[column] == sample[column] for column in ("host", "variant", "time_utc"))), None)


def while_loading(measured):
    source, found = timed_loaders(measured)
    return loaders_over_time("GPU and CPU load during loading", source, found,
                             {variant: row_of_run(measured, samples[0]) for variant, samples in found.items()})


def loaders_over_time(title, source, found, rows):
    """Returns the plot of the timed runs `found` ({variant: samples}), with their rows ({variant: row or None})."""
    plot = Plot(title, height=HEIGHT + 110)
    panels = [panel for panel in LOADER_PANELS
              if any(sample[panel[2]] is not None for samples in found.values() for sample in samples)]
    rated = any(rows.values())
    for variant, samples in found.items():
        row = rows[variant]
        rate = [1e-9 * row["bytes_per_s"] if row else OFF] * rated
        plot.add_series(10 + SLOTS[variant], variant, [
            (sample["time_s"] - samples[0]["time_s"],
             *(None if sample[column] is None else scale * sample[column] for _, scale, column in panels), *rate)
            for sample in samples])
        if row:
            if row["stall_share"] is not None:
                plot.legend.append((0.75, f"GPU waits {100 * row['stall_share']:.3g} % of the time"))
            plot.legend.append((0.75, f"loads {1e-9 * row['bytes_per_s']:.3g} GB/s"))
    titles = [title for title, _, _ in panels] + [RATE_PANEL] * rated
    high = [max(points[1 + p] or 0 for block in plot.blocks for points in block if points[1 + p] != OFF)
            for p in range(len(titles))]
    plot.variables = {"panels": len(titles), "sampled": len(panels), "panel_title": titles,
                      "panel_high": [100 if title == "GPU use (%)" else nice_above(1.04 * top)
                                     for title, top in zip(titles, high)],
                      "x_high": max(points[-1][0] for points in plot.blocks) or 1}
    samples = [sample for mine in found.values() for sample in mine]
    few = [variant for variant, mine in found.items() if len(mine) < 20]
    plot.caption = [f"Monitor samples during the timed runs of each variant; the variants ran consecutively. {device_names(samples)} "
                    f"({'yours' if source == 'yours' else 'reference'}, host {samples[0]['host']}, revision "
                    f"{', '.join(dict.fromkeys(sample['revision'] for sample in samples))})."
                    + (" GPU use is the driver's average over up to one second and counts any kernel, including those that unpack "
                       "samples." if LOADER_PANELS[0] in panels else "")
                    + (" Throughput is the mean over the whole run, counted by the loader: the driver's PCIe counter samples "
                       "20 ms at a time and misses bursts." if rated else "")
                    + (f" Fewer than 20 samples: {', '.join(few)}." if few else "")]
    return plot


# Figure clips: files and shards of one set of clips, which loaders read and a 3D network trains on.
CLIPS_COMMAND = "scripts/compare/clips.sh DIR results"
TRAINED = {"files": "from files", "shards": "from shards", "constant": "one constant batch"}


def folder_of(row):
    """Returns the host and the folder that contains the stores of a set."""
    return row["host"], os.path.dirname(row["data"].rstrip("/"))


def trained_on(measured, row):
    """Returns the rows of cnn3d on the set of a row of load; [] if there are none."""
    return [] if row is None else [train for train in measured.trains if train["model"] == "cnn3d"
                                   and train.source == row.source and folder_of(train) == folder_of(row)]


def rates_of_training(trains):
    """Returns {key of TRAINED: samples per second}: the median of the second half of the newest run."""
    runs = collections.defaultdict(list)
    for row in sorted(trains, key=lambda row: row["time_utc"]):
        feed = "constant" if row["feed"] == "constant" else os.path.basename(row["data"].rstrip("/"))
        if 2 * row["epoch"] > float(row["epochs"]):
            runs[feed].append(row)
    return {feed: statistics.median(row["items_per_s"] for row in runs[feed][-math.ceil(float(runs[feed][-1]["epochs"]) / 2):])
            for feed in TRAINED if feed in runs}


def clips(measured):
    found = timed_runs(measured, True)
    if not found:
        raise Missing(CLIPS_COMMAND, measured.loads)
    (source, _), samples = next(iter(found.items()))
    rows = {variant: row_of_run(measured, of_run[0], False) for variant, of_run in samples.items()}
    plot = loaders_over_time("Clips as files and in shards: reading, feeding a GPU, training", source, samples, rows)
    first = next(iter(rows.values()))
    alone = [row for row in measured.load_sweeps if row["compute"] == "" and row.source == source and folder_of(row) == folder_of(first)]
    plot.legend.append((0, f"{first['samples']:.0f} loops without a step"))
    plot.legend += [(0.5, f"{row['variant']}: {micros_words(1e6 * row['time_mean_s'] * row['samples'])}") for row in alone]
    trains = trained_on(measured, first)
    plot.legend.append((0, f"cnn3d trains ({trains[0]['variant']})"))
    plot.legend += [(0.5, f"{TRAINED[feed]}: {rate:,.0f} clips/s") for feed, rate in rates_of_training(trains).items()]
    step = f" while a step of {first['compute']} ms consumes each batch" if first["compute"] else ""
    plot.caption.insert(0, f"{first['items']:,.0f} clips of {first['sample_bytes']:,.0f} bytes, batches of {first['batch']:.0f}, read "
                           f"{first['samples']:.0f} times{step}. Training: median of the second half of the epochs.")
    return plot
