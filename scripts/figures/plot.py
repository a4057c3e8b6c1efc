"""The class Plot (a figure before gnuplot draws it), helpers for its text and axes, and the calls of gnuplot.

plots/common.gp documents the variables.
"""

import argparse
import contextlib
import errno
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

from rows import BadInput

ROOT = pathlib.Path(__file__).resolve().parents[2]
FORMATS = ("png", "svg", "pdf")
WIDTH, HEIGHT = 800, 470
INNER_PX = WIDTH - 84 - 190  # minimum width of the plot area
RING = 95  # line style of plots/common.gp that marks unsettled points


# ---- Text ------------------------------------------------------------------------------------------------------


def text_px(text, size=12.0):
    """Estimates the width of a text in DejaVu Sans in px, with a safety margin."""
    widths = {**dict.fromkeys("iljI'|.,:;!()[]ft/ ", 0.38), **dict.fromkeys("mwMW@%&", 0.95)}
    return size * sum(widths.get(c, 0.71 if c.isupper() else 0.64) for c in text)


def wrap(text, px, size):
    """Wraps a text at a width; breaks words that are too long for a line."""
    lines = [""]
    for word in text.split():
        while text_px(word, size) > px:
            cut = max(1, next(n for n in range(len(word), 0, -1) if n == 1 or text_px(word[:n], size) <= px))
            lines += [word[:cut]]
            word = word[cut:]
        joined = f"{lines[-1]} {word}".strip()
        if text_px(joined, size) <= px:
            lines[-1] = joined
        else:
            lines.append(word)
    return [line for line in lines if line]


def short_device(name):
    """Strips marketing words from a device name: 'Intel(R) Xeon(R) Processor' becomes 'Intel Xeon'."""
    name = re.sub(r"\((R|TM|C)\)|\bProcessor\b|\bCPU\b|@.*|\b\d+-Core\b|\bwith Radeon.*", " ", name)
    return " ".join(name.split()) or "unnamed device"


def shortened(text, length):
    return text if len(text) <= length else text[:length - 1].rstrip() + "…"


def one_line(text):
    return "".join(c if c.isprintable() else " " for c in str(text))


def quoted(text):
    """Quotes a text for gnuplot: on one line, with quotes doubled. gnuplot reads two quotes at the beginning as an empty string, so
    these are in double quotes."""
    line = one_line(text)
    rest = line.lstrip("'")
    first = line[:len(line) - len(rest)]
    return f'"{first}" . ' * bool(first) + "'" + rest.replace("'", "''") + "'"


def number_words(value):
    """Formats a number, with thousands separators from 10,000 on."""
    return f"{value:,.9g}" if abs(value) >= 1e4 else f"{value:.9g}"


def ranks_words(ranks):
    return f"{ranks:.0f} rank{'s' * (ranks != 1)}"


# (limit, unit, scale): a value below the limit is divided by the scale, and followed by the unit.
MICROS = ((1, " ns", 1e-3), (1e3, " µs", 1), (1e6, " ms", 1e3), (math.inf, " s", 1e6))
COUNTS = ((1e3, "", 1), (1e6, " k", 1e3), (1e9, " M", 1e6), (1e12, " G", 1e9), (math.inf, " T", 1e12))


def scaled(value, units, form="{:.3g}".format):
    """Formats a value with the first of the units whose limit is larger."""
    return next((form(value / scale) + unit for limit, unit, scale in units if value < 0.9995 * limit), "")


def micros_words(us):
    """Formats a time given in µs with three significant digits and a unit."""
    return scaled(us, MICROS, lambda value: f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}")


def micros_tick(us):
    """Formats a time given in µs for a tick, without trailing zeros."""
    return scaled(us, MICROS)


def count_words(value):
    return scaled(value, COUNTS)


# ---- Axes ------------------------------------------------------------------------------------------------------


def log_range(values, room=1.25):
    """Returns a range around the values for a log axis. Both ends are ticks: multiples of a power of ten."""
    low, high = min(values) / room, max(values) * room
    steps = [m * 10.0**e for e in range(-12, 20) for m in range(1, 10)]
    return max(step for step in steps if step <= low), min(step for step in steps if step >= high)


def nice_above(value):
    """Rounds up to 1, 2, 4, 5, 6 or 8 times a power of ten."""
    if value <= 0:
        return 1
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 4, 5, 6, 8, 10) if m * power >= value * 0.9999)


def x_axis(low, high, at, px=INNER_PX, log=True):
    """Returns the variables of an x axis: range and ticks. A tick has no number if its number would touch the previous
    number."""
    scale = (lambda x: math.log(x / low) / math.log(high / low)) if log else lambda x: (x - low) / (high - low)
    text, end = [], -math.inf
    for value in at:
        words = number_words(value)
        half = text_px(words, 12) / 2
        fits = scale(value) * px - half > end + 4
        text.append(words if fits else "")
        end = scale(value) * px + half if fits else end
    return {"x_low": low, "x_high": high, "x_log": int(log), "x_ticks": len(at), "x_tick_at": list(at),
            "x_tick_text": text}


def ticks_125(low, high):
    """Returns 1, 2 and 5 times powers of ten within a range."""
    return [m * 10.0**e for e in range(-12, 20) for m in (1, 2, 5) if 0.999 * low <= m * 10.0**e <= 1.001 * high]


def linear_y_axis(values, words):
    """Returns the variables of a linear y axis around the values, whose ends are ticks."""
    low, high = min(values), max(values)
    step = next(step for step in ticks_125(1e-9, 1e18) if (high - low) / step <= 6)
    first, last = math.floor(low / step), math.floor(high / step) + 1
    at = [step * i for i in range(first, last + 1)]
    return {"y_linear": 1, "y_low": at[0], "y_high": at[-1], "y_ticks": len(at), "y_tick_at": at,
            "y_tick_text": [words(round(value, 12)) for value in at]}


def y_axis_from_zero(values, words):
    """Returns the variables of a linear y axis from 0 to just above the values."""
    high = 1.04 * max(values)
    at = linear_ticks(0, high)
    return {"y_linear": 1, "y_low": 0, "y_high": high, "y_ticks": len(at), "y_tick_at": at, "y_tick_text": list(map(words, at))}


def linear_ticks(low, high):
    """Returns at most seven ticks in a range, at multiples of 1, 2 or 5 times a power of ten."""
    step = next(step for step in ticks_125(1e-9, 1e18) if (high - low) / step <= 6)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low, high, words):
    """Returns the variables of a log y axis. Labels are at powers of ten and, if these are few, also at 2 and 5 times powers
    of ten, or at all multiples."""
    named = (1,) if high / low > 300 else (1, 2, 5) if high / low > 5 else range(1, 10)
    ticks = [(m * 10.0**e, words(m * 10.0**e) if m in named else "") for e in range(-12, 20) for m in range(1, 10)
             if 0.999 * low <= m * 10.0**e <= 1.001 * high]
    return {"y_low": low, "y_high": high, "y_ticks": len(ticks), "y_tick_at": [at for at, _ in ticks],
            "y_tick_text": [text for _, text in ticks]}


# ---- A figure --------------------------------------------------------------------------------------------------


class Plot:
    """One figure: the input of its plots/NAME.gp. `legend` has pairs (style, text); see common.gp."""

    def __init__(self, title, width=WIDTH, height=HEIGHT):
        self.title, self.width, self.height = title, width, height
        self.left, self.top, self.right = 84, 48, 24
        self.axis_px = 58  # height of the tick labels and the axis label
        self.caption, self.legend, self.blocks, self.styles, self.variables = [], [], [], [], {}
        self.notes = []
        self.crossed = []  # per series: 1 if its points have a cross (plots/lines.gp)
        self.rings = []  # (x, y) of unsettled points

    def add_series(self, style, label, points):
        """Adds a block of data, its line style and its row in the legend. A single point has no line."""
        self.legend.append((style if len(points) > 1 else style + 0.1, label))
        self.styles.append(style)
        self.blocks.append(points)

    def add_rings(self):
        """Adds a block with a ring around each unsettled point, and its row in the legend. Call it after all other blocks."""
        if self.rings:
            self.variables["ring_block"] = len(self.blocks)
            self.blocks.append(self.rings)
            self.legend += [(0, ""), (RING + 0.1, "did not settle")]

    def variables_text(self):
        lines = [line for text in self.caption for line in wrap(text, self.width - 32, 9.5 * 1.02)]
        if self.legend:
            widest = max(text_px(text, 11 if style else 11.5) + (0 if style in (0, 0.5) else 42) for style, text in self.legend)
            self.right = int(24 + widest + 16)
        bottom = self.axis_px + 15 * len(lines) + 14
        height = max(self.height + 15 * max(0, len(lines) - 2), max(self.legend_ys(), default=0) + 30 + bottom)
        values = {"title": self.title, "width": self.width + max(0, self.right - 190), "height": height,
                  "left": self.left, "right": self.right, "top": self.top, "bottom": bottom, "captions": len(lines),
                  "caption": lines, "legends": len(self.legend), "legend_text": [text for _, text in self.legend],
                  "legend_style": [style for style, _ in self.legend], "legend_y": self.legend_ys(), "ring_block": 0,
                  **({"series": len(self.styles), "series_style": self.styles} if self.styles else {}),
                  **self.variables}
        return "".join(assignment(name, value) for name, value in values.items())

    def legend_ys(self):
        """Returns the position of each legend row in px from the top, with extra space above headings."""
        ys, y = [], self.top + 8
        for i, (style, _) in enumerate(self.legend):
            if i > 0:
                y += 19 + (7 if style == 0 and self.legend[i - 1][0] != 0 else -3 if 0 < style < 1 else 0)
            ys.append(y)
        return ys

    def data_text(self):
        def cell(value):
            return "" if value is None else one_line(value) if isinstance(value, str) \
                else f"{value:.9g}"
        blocks = ["\n".join("\t".join(map(cell, row)) for row in rows or [(math.nan,)]) for rows in self.blocks]
        return "\n\n\n".join(blocks) + "\n"


def assignment(name, value):
    """Returns a gnuplot assignment. A list becomes an array of at least one element, because gnuplot has no empty arrays."""
    def literal(item):
        return quoted(item) if isinstance(item, str) else f"{item:.9g}"
    if isinstance(value, list):
        items = value or [0]
        return f"array {name}[{len(items)}] = [{', '.join(map(literal, items))}]\n"
    return f"{name} = {literal(value)}\n"


# ---- Drawing ---------------------------------------------------------------------------------------------------


class Failed(Exception):
    """Drawing failed: a message of one line, and the exit status."""

    def __init__(self, text, status=1):
        super().__init__(text)
        self.status = status


@contextlib.contextmanager
def appears_whole(path, temporary):
    """Renames `temporary`, which the `with` block writes, to `path` if the block succeeds; removes it otherwise."""
    try:
        yield
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise Failed(f"{path} cannot be written: {error.strerror}; free some space, or choose another folder") from None
    finally:
        with contextlib.suppress(OSError):  # report the first error only
            temporary.unlink(missing_ok=True)


def write_whole(path, text):
    """Writes a file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with appears_whole(path, temporary):
        temporary.write_text(text, encoding="utf-8")


def make_folder(path):
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failed(f"{path} cannot be created: {error.strerror}; choose another folder") from None


def gnuplot_command(name, kind, work, output):
    settings = f"format = {quoted(kind)}; output = {quoted(output)}; id = {quoted(name)}; " \
               f"data = {quoted(work / f'{name}.dat')}"
    return ["gnuplot", "-e", settings, str(work / f"{name}.vars"), f"plots/{name}.gp"]


def svg_fonts(svg):
    """Returns the SVG with bold text as a font weight instead of a font name, and with fallback fonts of similar width."""
    family = 'font-family="DejaVu Sans, Verdana, sans-serif"'
    svg = svg.replace('font-family="DejaVu Sans:Bold"', family + ' font-weight="bold"')
    return svg.replace('font-family="DejaVu Sans"', family)


ENDS = {"png": b"IEND\xaeB`\x82", "svg": b"</svg>", "pdf": b"%%EOF"}


def is_whole(kind, path):
    """Returns whether a figure's file exists and is complete."""
    return path.is_file() and path.read_bytes()[-16:].rstrip().endswith(ENDS[kind])


def need_room(path):
    """Raises OSError if the disk is full, because gnuplot does not report this error."""
    with open(path, "ab") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())


def run_gnuplot(name, kind, work, path):
    temporary = path.with_name(f".{name}.{os.getpid()}.{kind}")
    with appears_whole(path, temporary):
        done = subprocess.run(gnuplot_command(name, kind, work, temporary), cwd=ROOT, capture_output=True, text=True,
                              check=False)
        said = [line for line in done.stderr.splitlines() if line.strip()]
        if done.returncode or said or not is_whole(kind, temporary):
            need_room(temporary)
            raise Failed(f"{path}: gnuplot failed: {said[-1].strip() if said else f'status {done.returncode}'}; "
                         f"see scripts/figures/draw.py --commands {name}")
        if kind == "svg":
            temporary.write_text(svg_fonts(temporary.read_text("utf-8")), "utf-8")


def draw(name, plot, out, work, formats=FORMATS, commands=False):
    make_folder(work)
    write_whole(work / f"{name}.vars", plot.variables_text())
    write_whole(work / f"{name}.dat", plot.data_text())
    if commands:
        for kind in formats:
            print(shlex.join(gnuplot_command(name, kind, work, out / f"{name}.{kind}")))
        return
    make_folder(out)
    for kind in formats:
        run_gnuplot(name, kind, work, out / f"{name}.{kind}")


def folder_arguments():
    """Returns a parser of the options of folders and of --help, which draw.py and report.py share."""
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "results")
    parser.add_argument("--reference", type=pathlib.Path, default=ROOT / "results/reference")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build/plots")
    parser.add_argument("-h", "--help", action="store_true")
    return parser


def with_folders(given, out):
    """Completes parsed options: `out` is the default of --out, below --results."""
    given.out, given.work = (given.out or given.results / out).resolve(), given.work.resolve()
    return given


def need_gnuplot():
    if not shutil.which("gnuplot"):
        raise Failed("gnuplot is not installed; install it with: scripts/setup/packages.sh plots", 4)


def shown_path(path):
    """Returns a path relative to the repository if possible."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


# ---- The program -----------------------------------------------------------------------------------------------


def exit_status(program, work):
    """Runs `work`, the main function of a script, and returns the exit status. Prints an error as one line on stderr."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        work()
        sys.stdout.flush()
    except BadInput as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except Failed as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        print(f"{program}: stdout cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more at exit
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
