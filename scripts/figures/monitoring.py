"""Figures of GPU and CPU load during runs, from files written by --monitor. scripts/figures/draw.py documents the return values."""

import collections

import break_even
from devices import SLOTS, Missing
from plot import HEIGHT, WIDTH, Plot, nice_above, text_px

PHASES = ("setup", "verify", "warm-up", "timed", "measure", "teardown", "idle")
SHADES = {"setup": 1, "verify": 2, "warm-up": 3, "timed": 4, "measure": 5, "teardown": 6, "idle": 7}
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


def last_run(samples):
    """Returns (samples, ranks, gpus, number of runs). The samples are from the last run of the lowest rank, on its first GPU.
    `ranks` names all ranks in the file. `gpus` names all GPUs of the lowest rank in its last run. The number of runs is that of
    the lowest rank. A new run begins where the time restarts."""
    ranks = sorted({sample["rank"] for sample in samples}, key=lambda rank: (len(rank), rank))
    samples = [sample for sample in samples if sample["rank"] == ranks[0]]
    starts = [i for i, sample in enumerate(samples) if i == 0 or sample["time_s"] < samples[i - 1]["time_s"]]
    last = samples[starts[-1]:]
    gpus = list(dict.fromkeys(sample["gpu"] for sample in last))
    return [sample for sample in last if sample["gpu"] == gpus[0]], ranks, gpus, len(starts)


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


def over_time(measured):
    if not measured.monitors:
        raise Missing("./fdsl-bench --variant omp --batch 64 --min-time 11 --monitor results/monitor.csv")
    chosen = measured.monitors[0]
    samples, ranks, gpus, runs = last_run(chosen["samples"])
    plot = Plot("GPU and CPU load during a run", height=0)
    end = samples[-1]["time_s"] * 1.002 or 1
    panels = [panel for panel in PANELS
              if any(sample[column] is not None for sample in samples for column, _ in panel[2])]
    plot.left, plot.right, plot.top = 84, 140, 72
    columns, variables = panel_variables(samples, panels)
    plot.blocks = [[(sample["time_s"], *(scale * sample[column] if sample[column] is not None else None
                                         for column, scale in columns)) for sample in samples]]
    px_s = (WIDTH - plot.left - plot.right) / end
    plot.blocks += [fitting_names(spans(samples, lambda sample: sample["variant"], end), px_s, 10.5),
                    fitting_names(spans(samples, lambda sample: sample["phase"], end), px_s, 9.5)]
    bands = spans(samples, lambda sample: sample["phase"], end)
    shown = [phase for phase in PHASES if phase in {band[0] for band in bands}]
    plot.variables = {**variables, "x_high": end, "bands": len(bands), "band_from": [band[1] for band in bands],
                      "band_to": [band[2] for band in bands], "band_slot": [SHADES.get(band[0], 7) for band in bands],
                      "phases": len(shown), "phase_name": shown, "phase_slot": [SHADES[phase] for phase in shown],
                      "phase_x": [plot.left + sum(text_px(name, 10) + 36 for name in shown[:i])
                                  for i in range(len(shown))]}
    plot.height = plot.top + 40 + 88 * len(panels) + 100
    first = samples[0]
    period_ms = 1e3 * (samples[-1]["time_s"] - first["time_s"]) / max(1, len(samples) - 1)
    plot.caption = [f"{len(samples)} samples at {period_ms:.0f} ms intervals"
                    + (f"; rank {ranks[0]} of {len(ranks)}" if len(ranks) > 1 else "")
                    + (f"; GPU {gpus[0]} of {len(gpus)}" if len(gpus) > 1 else "")
                    + f". {device_names(samples)} ({'yours' if chosen['source'] == 'yours' else 'reference'}, "
                    f"host {first['host']}, revision {first['revision']})."
                    + (" GPU use is the driver's average over up to one second." if panels[0] is PANELS[0] else "")
                    + (" The driver samples PCIe for 20 ms per interval and may miss short bursts."
                       if any(panel[0].startswith("PCIe") for panel in panels) else "")]
    note = left_out(measured, chosen, runs)
    plot.notes += [note] * (note is not None)
    if chosen["source"] != "yours":
        plot.notes.append("no monitor file of yours; to record one: "
                          "./fdsl-bench --variant omp --batch 64 --min-time 11 --monitor results/monitor.csv")
    return plot


def device_names(samples):
    return ", ".join(dict.fromkeys(sample["device"] for sample in samples if sample["device"])) or "unnamed device"


def panel_variables(samples, panels):
    """Returns the columns of the first block as (column, scale), and the arrays that describe the panels."""
    columns, variables = [], collections.defaultdict(list)
    for title, scale, lines, least in panels:
        present = [(column, name) for column, name in lines if any(s[column] is not None for s in samples)]
        columns += [(column, scale) for column, _ in present]
        high = max(s[column] * scale for s in samples for column, _ in present if s[column] is not None)
        variables["panel_title"].append(title)
        variables["panel_high"].append(nice_above(1.04 * high) if high > least else least or 1)
        variables["panel_second"].append(1 + len(columns) if len(present) > 1 else 0)
        variables["panel_first"].append(1 + len(columns) - (len(present) > 1))
        variables["names_first"].append(present[0][1])
        variables["names_second"].append(present[1][1] if len(present) > 1 else "")
    return columns, {"panels": len(panels), **variables}


def fitting_names(found, px_s, size):
    return [((begin + end) / 2, name) for name, begin, end in found if text_px(name, size) < (end - begin) * px_s - 4]


# Figure monitor_loading.
LOADERS = ("files-gpu", "shards-gpu", "gds", "files-omp", "shards-omp")
LOADER_PANELS = (("GPU use (%)", 1, "gpu_utilisation_percent"), ("CPU (cores)", 1, "cpu_cores"))
RATE_PANEL = "throughput (GB/s)"
OFF = 1e300  # in place of a missing rate: outside the axis, because gnuplot warns about lines without points


def timed_loaders(measured):
    """Returns (source, {variant: samples of its newest timed run}) of one host. Prefers the user's files."""
    for source in ("yours", "reference"):
        runs = collections.defaultdict(list)
        for chosen in (chosen for chosen in measured.monitors if chosen["source"] == source):
            for sample in chosen["samples"]:
                if sample["phase"] == "timed" and sample["variant"] in LOADERS:
                    runs[sample["host"], sample["variant"], sample["time_utc"], sample["rank"]].append(sample)
        newest = {key[:2]: runs[key] for key in sorted(runs, key=lambda key: (key[2], key[3]))}
        for host in sorted({host for host, _ in newest}):
            mine = {variant: newest[host, variant] for variant in LOADERS if (host, variant) in newest}
            if {"files-gpu", "shards-gpu"} <= set(mine):
                return source, mine
    raise Missing(break_even.COMMAND, measured.loads, needs="an NVIDIA GPU")


def row_of_run(measured, sample):
    """Returns the row of the run that a sample belongs to, or None."""
    return next((row for row in measured.load_sweeps if row["stall_share"] is not None and all(
        row[column] == sample[column] for column in ("host", "variant", "time_utc"))), None)


def while_loading(measured):
    source, found = timed_loaders(measured)
    plot = Plot("GPU and CPU load during loading", height=HEIGHT + 110)
    rows = {variant: row_of_run(measured, samples[0]) for variant, samples in found.items()}
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
            plot.legend += [(0.75, f"GPU waits {100 * row['stall_share']:.3g} % of the time"),
                            (0.75, f"loads {1e-9 * row['bytes_per_s']:.3g} GB/s")]
    titles = [title for title, _, _ in panels] + [RATE_PANEL] * rated
    high = [max(points[1 + p] or 0 for block in plot.blocks for points in block if points[1 + p] != OFF)
            for p in range(len(titles))]
    plot.variables = {"series": len(plot.blocks), "series_style": plot.styles, "panels": len(titles), "sampled": len(panels),
                      "panel_title": titles,
                      "panel_high": [100 if title == "GPU use (%)" else nice_above(1.04 * top)
                                     for title, top in zip(titles, high)],
                      "x_high": max(points[-1][0] for points in plot.blocks) or 1}
    samples = [sample for mine in found.values() for sample in mine]
    few = [variant for variant, mine in found.items() if len(mine) < 20]
    plot.caption = [f"Monitor samples during the timed runs of each variant; the variants ran consecutively. {device_names(samples)} "
                    f"({'yours' if source == 'yours' else 'reference'}, host {samples[0]['host']}, revision "
                    f"{', '.join(dict.fromkeys(sample['revision'] for sample in samples))}). GPU use is the driver's "
                    "average over up to one second and counts any kernel, including those that unpack samples."
                    + (" Throughput is the mean over the whole run, counted by the loader: the driver's PCIe counter samples "
                       "20 ms at a time and misses bursts." if rated else "")
                    + (f" Fewer than 20 samples: {', '.join(few)}." if few else "")]
    return plot
