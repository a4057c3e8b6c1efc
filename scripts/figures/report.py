#!/usr/bin/env python3
"""Writes an HTML report: your rows and the commands that measure them again, figures, reference rows, and the machine.
The page is self-contained: it needs no other files, network or scripts.

  scripts/figures/report.py

  --results DIR     your rows: DIR/*.csv (default: results)
  --reference DIR   reference rows and published points (default: results/reference)
  --out FILE        the page (default: report.html under --results)
  --work DIR        write the data of figures to DIR (default: build/plots)

Exit status: 0 done, 1 gnuplot failed or a file could not be written, 2 usage or invalid input file, 4 gnuplot is missing.
"""

import collections
import datetime
import html
import pathlib
import re
import shlex
import sys

sys.pycache_prefix = f"{sys.path[0]}/../../build/pycache"
from devices import PUBLISHED, Missing, threads_per_rank  # noqa: E402  (in this folder)
from draw import FIGURES  # noqa: E402
from exchange import size_words  # noqa: E402
import loading  # noqa: E402
import report_train  # noqa: E402
from plot import ROOT, draw, exit_status, folder_arguments, make_folder, micros_words, need_gnuplot, ranks_words  # noqa: E402
from plot import shown_path, with_folders, write_whole  # noqa: E402
from report_train import option_list, options, trainings  # noqa: E402
from rows import Measured, newest, option_words  # noqa: E402

STYLE = """
:root { color-scheme: light dark; --ink: #1a1c20; --soft: #5c6370; --paper: #ffffff; --card: #f5f6f8; --line: #d6dae0;
        --mark: #0072b2;
        --blue: #0072b2 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7e9ee; --soft: #a2a9b6; --paper: #15171b; --card: #1d2025; --line: #363b44; --mark: #56b4e9;
          --blue: #3f9fdf } }
* { box-sizing: border-box }
body { margin: 0; padding: 2rem 2.5rem 4rem; background: var(--paper); color: var(--ink);
       font: 15px/1.55 "DejaVu Sans", Verdana, system-ui, sans-serif }
h1 { font-size: 1.7rem; margin: 0 0 .2rem } h2 { font-size: 1.2rem; margin: 2.8rem 0 .8rem;
     padding-bottom: .3rem; border-bottom: 2px solid var(--mark) } h3 { font-size: 1rem; margin: 1.8rem 0 .4rem }
p { margin: .4rem 0 } .soft, figcaption { color: var(--soft); font-size: .87rem }
nav a { margin-right: 1.2rem } a { color: var(--mark) }
svg [stroke="#0072b2"] { stroke: var(--blue) } svg [color="#0072b2"] { color: var(--blue) }
figure { margin: 1.4rem 0 2rem } figcaption { margin: .5rem 0 0 1.1rem }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(44rem, 100%), 1fr)); gap: 0 2.5rem }
figure { overflow-x: auto; min-width: 0 } figure svg { display: block; width: 100%; height: auto; min-width: 36rem; max-width: 68rem }
pre, code { font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .82rem }
pre { margin: .3rem 0 .6rem; padding: .6rem .8rem; background: var(--card); border-left: 3px solid var(--mark);
      white-space: pre-wrap; overflow-wrap: anywhere; max-width: 120rem }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; max-width: 120rem; font-size: .82rem;
        font-variant-numeric: tabular-nums }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid var(--line) } td { white-space: nowrap }
td.device { white-space: normal; min-width: 6rem } th { vertical-align: bottom; color: var(--soft); font-weight: 600 } th.text, td.text, td.device { text-align: left } td.name { font-weight: 600 }
td.bad { color: #d55e00; font-weight: 600 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.4rem; margin: 0; font-size: .87rem }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
@media print { :root { --ink: #000; --soft: #444; --paper: #fff; --card: #f2f2f2; --line: #bbb; --mark: #0072b2;
                --blue: #0072b2 }
  body { padding: 0; max-width: none; font-size: 10pt } nav { display: none }
  figure { break-inside: avoid; overflow: visible; margin: .6rem 0 } figure svg { min-width: 0; max-height: 11cm }
  .figures { display: block } figure.tall svg { max-height: 20cm }
  tr, pre { break-inside: avoid } h2, h3, pre, thead { break-after: avoid } .wide { overflow: visible }
  .soft, figcaption { font-size: 7.5pt } h3 { font-size: 9pt; margin-top: .8rem }
  pre { padding: .3rem .6rem; margin: .2rem 0 } pre, code { font-size: 7.5pt }
  table { font-size: 7.5pt } th, td { padding: .2rem .35rem } }
"""

text = html.escape


# ---- Commands --------------------------------------------------------------------------------------------------


def command_options(row):
    """Returns the options that the rows of one command share. Rows of exchange differ in the size of the array."""
    return [(name, value) for name, value in options(row) if name != "--bytes" or not row.is_exchange]


def threads_option(row):
    """Returns the value of --threads, the number per rank, for a row. Returns None for GPU variants, single-threaded variants and
    programs other than fdsl-bench. Also returns None if ranks have different numbers of threads, because then --threads was not given."""
    threads = threads_per_rank(row)
    one_thread = row["variant"].endswith("naive") or row["variant"] in loading.ONE_THREAD + loading.NOT_OURS + PUBLISHED
    return None if row.on_gpu or one_thread or threads != int(threads) else threads


def command(rows):
    """Returns the command line that measures these rows, which differ only in variants and devices."""
    first = rows[0]
    if first.is_train or first.is_infer:
        return report_train.command(rows)
    if first["variant"] in PUBLISHED:
        return "scripts/compare/published.sh CLONE"
    if first["variant"] in loading.NOT_OURS:
        return others_command(first)
    launcher = ["mpirun", "--bind-to", "none", "-n", f"{first['ranks']:.0f}"] if first["ranks"] > 1 else []
    words = launcher + ["./fdsl-bench"] + ["--workload", "exchange"] * first.is_exchange
    words += ["--variant", ",".join(dict.fromkeys(row["variant"] for row in rows))] + option_list(command_options(first))
    if first.is_exchange:
        words += ["--bytes", ",".join(f"{size:.0f}" for size in sorted({row["array_bytes"] for row in rows}))]
    threads = max(filter(None, map(threads_option, rows)), default=None)
    if threads:
        words += ["--threads", f"{threads:.0f}"]
    if first["verified"] == "yes":
        words += ["--verify"]
    return shlex.join(words)


GENERATED = ("digits", "synth", "clips")  # values of --data that are no folder


def is_there(data):
    """Returns whether the value of --data or --checkpoint can be used here: generated data, a URL, or an existing path, relative to
    the repository. For a list of shards, only the first is checked."""
    return not data or data in GENERATED or "://" in data or (ROOT / data.split(",")[0]).exists()


def preparation(rows):
    """Returns (commands, note) for a group of rows whose data or network is not here, as after `make bench`, which deletes its
    data sets. The commands write samples of the same number and size, or a network of the same kind. The note says what differs, or
    that the user has to name other data. The commands can be repeated."""
    first = rows[0]
    data, network = first.texts.get("data", ""), first.texts.get("checkpoint", "") if first.is_infer else ""
    if not is_there(data):
        if not first.is_load or not can_prepare(first):
            return [], f"{data} does not exist here: replace it by the path of your copy."
        words = ["./fdsl-bench", "--prepare", data, "--store", first["store"]]
        words += ["--shards", f"{first['shards']:.0f}"] if first["shards"] else []
        words += ["--samples", f"{first['items'] / float(first['epochs'] or 1):.0f}", "--sample-shape",
                  f"{first['sample_bytes'] - loading.NPY_HEADER_BYTES:.0f}", "--dtype", "u8", "--classes", "0"]
        return [unless_there(data, words)], (f"{data} does not exist here. The first command writes samples of the same number and "
                                             "size, with other contents.")
    if not is_there(network):
        fastest = max(rows, key=lambda row: row["items_per_s"])
        words = ["./fdsl-bench", "--variant", fastest["variant"].replace("infer", "train"), "--model", first.texts["model"]]
        of_data = {name: value for name, value in options(first) if name not in ("--checkpoint", "--batch", "--on-error")}
        words += option_list({"--train-size": "64", "--test-size": first.texts["test_samples"], **of_data}.items())
        words += ["--epochs", "1", "--checkpoint", network]
        folder = shlex.join(["mkdir", "-p", str(pathlib.PurePath(network).parent)])  # --checkpoint creates only the last folder
        return [folder, unless_there(network, words)], (f"{network} does not exist here. The first two commands train a network of the same "
                                                                "kind for one epoch, so its accuracy differs.")
    return [], "CHECKPOINT is the file of initial parameters, of which the rows have only a hash." if first.texts.get("init") else ""


def can_prepare(row):
    """Returns whether samples of --prepare's default source can replace those of a row: any bytes of the same size, so neither
    images to decode, nor members that options choose, nor labels to train on."""
    return (row["decode"] != "1" and not any(row.texts[column] for column in ("image", "label", "member"))
            and row["sample_bytes"] > loading.NPY_HEADER_BYTES
            and row["sample_bytes"] == int(row["sample_bytes"]) and row["augment"] != "1")


def unless_there(path, words):
    return f"test -e {shlex.quote(path)} || {shlex.join(words)}"


def workers(row):
    """Returns the number of worker processes of a third-party loader. If it is 0, the main process reads."""
    return 0 if row["variant"].endswith("-inline") else row["threads"]


def others_command(row):
    """Returns the command line for rows of third-party loaders. In these rows, threads are worker processes."""
    words = ["scripts/compare/loading.py", f"--{row['store']}", row["data"], "--batch", row.texts["batch"]]
    words += ["--gpu"] if row["variant"] in loading.OTHERS_TO_GPU else []
    usual = 16 if row["variant"] in loading.OTHERS_TO_GPU else 1
    return shlex.join(words + (["--workers", f"{workers(row):.0f}"] if workers(row) != usual else []))


# ---- Rows ------------------------------------------------------------------------------------------------------


def group_key(row):
    """Returns the values that the rows of one command share: everything except the variant and the device."""
    others = row["variant"] in loading.NOT_OURS + PUBLISHED or report_train.is_pytorch(row)
    return (row.file, row["host"], row["ranks"], row["scaling"], row["verified"], row.workload,
            tuple(command_options(row)),
            (row["items"], row["sample_bytes"]) if row.is_load else None, others, others and workers(row),
            threads_option(row))


def grouped(rows):
    """Returns lists of rows, one list per command. Rows without a --threads option join a group that has one."""
    groups = collections.defaultdict(list)
    for row in rows:
        key = group_key(row)
        threaded = next((other for other in groups if other[:-1] == key[:-1] and None in (other[-1], key[-1])), None)
        if threaded and threaded[-1] is None and key[-1] is not None:
            groups[key] = groups.pop(threaded)
        groups[key if threaded is None or key in groups else threaded].append(row)
    return list(groups.values())


def heading(row):
    """Returns a heading that describes the run."""
    if row.is_train or row.is_infer:
        return report_train.heading(row)
    if row.is_exchange:
        return f"all-reduces, {row['dtype']}, {ranks_words(row['ranks'])}"
    if row.is_load:
        return load_heading(row)
    if row["vertices"]:
        what = f"{row['vertices']:.0f} vertices, {row['orbits']:.0f} orbits"
    else:
        what = f"classes of {row['class']}" if row["class"] else f"{row['classes']} classes"
    words = [f"{row['res']:.0f} × {row['res']:.0f}", what, f"batch {row['batch']:.0f}"]
    known = ("--batch", "--res", "--vertices", "--orbits", "--classes", "--class", "--scaling")
    words += option_words(options(row), known)
    if row["ranks"] > 1:
        words.append(f"{ranks_words(row['ranks'])}, {row['scaling']} scaling")
    return ", ".join(words)


def load_heading(row):
    samples = row["items"] / float(row["epochs"] or 1)
    words = [f"{samples:.0f} samples of {loading.size_words(row['sample_bytes'])}",
             f"{row['shards']:.0f} shards" if row["shards"] else "files", f"samples {loading.order_of(row)}",
             f"cache {row['cache']}", f"batch {dict(options(row)).get('--batch', row.defaults['batch'])}"]
    words += option_words(options(row), ("--data", "--batch", "--cache", "--scaling"))
    return ", ".join(words + [ranks_words(row["ranks"])] * (row["ranks"] > 1))


def percent(value):
    return "" if value is None else f"{100 * value:.3g} %"


def time_cells(row):
    """Returns the cells of the median time per item, its relative error ("" if the row has none), and the range of times."""
    median, low, high = (micros_words(row.micros(column)) for column in ("time_median_s", "time_min_s", "time_p95_s"))
    return [("", median), ("", "" if row["median_error"] is None else f"± {100 * row['median_error']:.2g} %"), ("", f"{low} to {high}")]


def settled_words(row):
    """Returns the second cell of a row as (class, text): whether the row was verified, and caveats. It is beside the name, so that
    no narrow window hides it."""
    care = (["not settled"] if row.unsettled else []) + (
        [f"throttled: {row['throttled']}"] if row.get("throttled") else [])
    return ("text" if row["verified"] == "yes" and not care else "text bad",
            row["verified"] + (f" ({', '.join(care)})" if care else ""))


def html_table(head, rows):
    """Returns an HTML table. Headings are (name, is text), and cells are (class, text)."""
    names = "".join(f"<th{' class=text' if left else ''}>{name}</th>" for name, left in head)
    lines = ["<tr>" + "".join(f'<td class="{kind}">{text(cell)}</td>' if kind else f"<td>{text(cell)}</td>"
                              for kind, cell in cells) + "</tr>" for cells in rows]
    return "\n".join([f"<div class=wide><table><thead><tr>{names}</tr></thead><tbody>"] + lines + ["</tbody></table></div>"])


FIRST_COLUMNS = [("variant", 1), ("verified", 1), ("device", 1)]


def first_cells(row):
    return [("text name", row["variant"]), settled_words(row), ("device", row["device"])]


def exchange_table(rows):
    """Returns a table of all-reduces, smallest array first. Bandwidths are in GB/s, as nccl-tests defines them."""
    head = FIRST_COLUMNS + [("size", 0), ("per all-reduce", 0), ("median ±", 0), ("minimum to 95th perc.", 0),
                            ("algbw GB/s", 0), ("busbw GB/s", 0), ("samples", 0)]
    return html_table(head, [
        first_cells(row) + [("", size_words(row["array_bytes"])), *time_cells(row),
                            *(("", row.texts[column]) for column in ("algbw_gbs", "busbw_gbs", "samples"))]
        for row in sorted(rows, key=lambda row: (row["array_bytes"], row["variant"]))])


def table(rows):
    """Returns a table of the rows of one command, slowest variant first."""
    if rows[0].is_train or rows[0].is_infer:
        head = FIRST_COLUMNS + [("threads", 0)] + [(name, 0) for name, _ in report_train.cells(rows[0])]
        return html_table(head, [
            first_cells(row) + [("", f"{row['threads']:.0f}")] + [("", cell) for _, cell in report_train.cells(row)]
            for row in sorted(rows, key=lambda row: row["items_per_s"])])
    if rows[0].is_exchange:
        return exchange_table(rows)
    several = any(row["ranks"] > 1 for row in rows)
    load = rows[0].is_load
    head = FIRST_COLUMNS + [("threads", 0), ("per sample" if load else "per image", 0),
            ("median ±", 0), ("minimum to 95th perc.", 0), ("samples/s" if load else "images/s", 0)] + \
        ([("efficiency", 0)] if several else []) + \
        ([("GB/s", 0), ("share of memcpy", 0)] if load else [("roofline", 0)]) + \
        [("runs" if load else "samples", 0)]
    lines = []
    for row in sorted(rows, key=lambda row: row["time_median_s"] / row["items"], reverse=True):
        cells = first_cells(row) + [("", f"{row['threads']:.0f}"), *time_cells(row),
                                    ("", f"{row['items_per_s']:,.{0 if row['items_per_s'] >= 100 else 2}f}")]
        cells += [("", percent(row["efficiency"]))] if several else []
        cells += [("", f"{row['bytes_per_s'] / 1e9:.3g}"), ("", percent(row["copy_share"]))] if load else \
            [("", report_train.roofline_words(row))]
        cells += [("", "" if row["samples"] is None else f"{row['samples']:.0f}")]
        lines.append(cells)
    return html_table(head, lines)


def rows_section(title, rows):
    parts = [f'<h2 id="{title.split()[0].lower()}">{title}</h2>']
    if not rows:
        parts.append("<p class=soft>None. <code>make bench</code> measures rows.</p>")
    for group in grouped(rows):
        before, note = preparation(group)
        parts.append(f"<section class=group><h3>{text(heading(group[0]))}</h3>\n"
                     f"<pre>{text(chr(10).join(before + [command(group)]))}</pre>\n{table(group)}\n"
                     f"<p class=soft>{text(' '.join(filter(None, (note, origin(group)))))}</p></section>")
    return "\n".join(parts)


def origin(rows):
    """Returns the origin of rows: file, host, revisions and time."""
    revisions = ", ".join(dict.fromkeys(row["revision"] for row in rows))
    times = sorted(row["time_utc"] for row in rows)
    when = times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"
    return f"{shown_path(pathlib.Path(rows[0].file).resolve())}, host {rows[0]['host']}, revision {revisions}, {when}"


# ---- Machines --------------------------------------------------------------------------------------------------


def machine_value(name, value):
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def machines_section(machines):
    if not machines:
        return ('<h2 id="machine">Machine</h2>\n<p class=soft>No env.json. To write it: '
                "<code>./fdsl-bench --env --format json &gt; results/env.json</code></p>")
    parts = ['<h2 id="machine">Machine</h2>']
    for machine in machines:
        whose = "yours" if machine["source"] == "yours" else "reference"
        pairs = "".join(f"<dt>{text(name.replace('_', ' ').removesuffix(' bytes'))}</dt>"
                        f"<dd>{text(machine_value(name, value))}</dd>"
                        for name, value in machine["values"].items() if value not in (None, ""))
        parts.append(f"<section class=group><h3>{whose}</h3>\n<dl>{pairs}</dl></section>")
    return "\n".join(parts)


# ---- Figures ---------------------------------------------------------------------------------------------------


def inline_svg(name, svg):
    """Returns gnuplot's SVG as an element of the page: scalable, with the page's text colour and unique ids."""
    svg = svg[svg.index("<svg"):]
    svg = re.sub(r"<title>.*?</title>|<desc>.*?</desc>", "", svg, flags=re.S)
    svg = re.sub(r'\s(width|height)="\d+"', "", svg, count=2)
    svg = svg.replace('xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href", "href")
    svg = re.sub(r"""(?<=[='"#])(gp\w+|gnuplot\w*|textbox|greybox|hypertext\w*)(?=['")])""", rf"{name}-\1", svg)
    svg = re.sub(r"rgb\(\s*0,\s*114,\s*178\)", "#0072b2", svg)
    svg = re.sub(r"""(?<=["'])(black|rgb\(\s*0,\s*0,\s*0\))(?=["'])""", "currentColor", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{text(FIGURES[name][1])}"', 1).strip()


def figures_section(measured, work):
    parts = ['<h2 id="figures">Figures</h2>', "<div class=figures>"]
    for name, (_, what) in FIGURES.items():
        try:
            plot = FIGURES[name][0](measured)
        except Missing as missing:
            needs = f" (needs {text(missing.needs)})" if missing.needs else ""
            parts.append(f"<div><p class=soft><b>{name}</b> ({what}): {missing.why}. To measure it{needs}:"
                         f"</p>\n<pre>{text(missing.command)}</pre></div>")
            continue
        draw(name, plot, work, work, formats=("svg",))
        svg = (work / f"{name}.svg").read_text("utf-8")
        notes = "".join(f"<br>{text(note)}" for note in plot.notes)
        tall = " class=tall" if plot.height > 600 else ""
        parts.append(f"<figure{tall}>{inline_svg(name, svg)}\n<figcaption>To draw only this figure: "
                     f"<code>scripts/figures/draw.py {name}</code>{notes}</figcaption></figure>")
    return "\n".join(parts + ["</div>"])


# ---- The page --------------------------------------------------------------------------------------------------


def page(measured, work):
    rows = measured.rows + measured.loads + trainings(measured.trains + measured.pipelines) + measured.infers + newest(measured.exchanges)
    yours = [row for row in rows if row.source == "yours"]
    reference = [row for row in rows if row.source == "reference"]
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    devices = ", ".join(dict.fromkeys(row["device"] for row in yours or reference)) or "no device"
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>fdsl-bench: {text(devices)}</title>", f"<style>{STYLE}</style></head><body>",
        "<header><h1>fdsl-bench</h1>",
        f"<p>{text(devices)}</p><p class=soft>{len(yours)} of your rows, {len(reference)} reference rows; "
        f"written {now}</p>",
        '<nav><a href="#your">Your rows</a><a href="#figures">Figures</a><a href="#reference">Reference rows</a>'
        '<a href="#machine">Machine</a></nav></header>',
        "<main>", rows_section("Your rows", yours), figures_section(measured, work),
        rows_section("Reference rows", reference),
        "<p class=soft>Times are medians over the samples. Each command measures its rows again, with the default sampling options. "
        "docs/timing.md describes the time measurement, docs/figures.md the figures.</p>",
        machines_section(measured.machines), "</main></body></html>", ""])


def write_report(arguments):
    given = with_folders(folder_arguments().parse_args(arguments), "report.html")
    if given.help:
        print(__doc__.strip())
        return
    need_gnuplot()
    measured = Measured(given.results, given.reference)
    for note in measured.notes:
        print(f"report: {note}", file=sys.stderr)
    contents = page(measured, given.work)
    make_folder(given.out.parent)
    write_whole(given.out, contents)
    print(f"  written {shown_path(given.out)}")


if __name__ == "__main__":
    sys.exit(exit_status("report", lambda: write_report(sys.argv[1:])))
