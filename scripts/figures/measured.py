#!/usr/bin/env python3
"""Writes and checks the measured numbers of the documentation, from rows in results/reference.

  scripts/figures/measured.py [PAGE ...]   prints each number and table that differs from its rows, and each rate without a row
  scripts/figures/measured.py --fix        writes the numbers and tables into the pages

  --root DIR        the project (default: this one)
  --reference DIR   the rows (default: results/reference in that project)

A number in a sentence is followed by a comment with its expression:

  about 2.07<!-- us(fused res=512 batch=256 @h200_synth) --> µs per image

A table is generated between the comment that defines it and the next `<!-- end -->`:

  <!-- table h200_synth vertices=1000 dtype=u8     the file of rows, and filters for all rows of the table
  by res "image size", batch                       one row per combination of these columns, with a heading if it is not the name
  row two GPUs | variant=fused ranks=2             or: rows with a label and filters; @FILE selects another file
  head set-up                                      heading of these labels
  column `fused` (µs) | us(fused)                  heading and expression of a column
  command TEXT                                     replaces the command of the caption
  plain                                            no caption
  -->
  <!-- end -->

A figure of scripts/figures/draw.py is stored beside the page, with a hash of the data that it shows, which --fix writes:

  ![Time per image](ladder.svg)<!-- figure 0123456789ab -->

The caption of a table has the file, device, revision, dates and clocks of the rows, and the command and conditions that the tables of
results/reference/README.md give for this file.

An expression is arithmetic over FUNCTION(FILTER …). A filter is COLUMN=VALUE (or >=), or a variant. @FILE selects another file;
filters of `table` do not apply to it. A FUNCTION is the name of a column or one of: us and ms (time per item), rate (items per
second), images (images per second while a training step runs). If several rows match, a prefix selects one value: min.us,
max.us, median.us, first.us or last.us; count.us is the number of values. text.COLUMN(FILTER …) alone prints a word. Values are
rounded to three significant digits. After a value, ~2 means two digits, ~.1 means one decimal, and ~% means one decimal below ten
and none above. crossing(FILTER …) is a time of the training step in ms: from this time on, generating with fused is at most 2 %
faster than reading with the variant in the filter. A line `<!-- rows FILE FILTERS -->` sets the file and the filters of the
numbers after it on its page. A rate that is no measurement of ours is followed by `<!-- stated -->`. Comments in code are text.
--fix replaces a page as a whole, and in it only numbers and the lines of tables.

Exit status: 0 the pages agree with the rows, 1 they differ or a rate has no row, 2 usage or an invalid definition.
"""

import argparse
import fnmatch
import hashlib
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

sys.pycache_prefix = f"{sys.path[0]}/../../build/pycache"
import break_even  # noqa: E402
from plot import ROOT, Failed, exit_status, need_gnuplot, short_device, write_whole  # noqa: E402
from rows import Row, read_csv, read_file, read_text, stands_for_run  # noqa: E402

MANUALS, MEASURED = ("README.md", "docs/*.md"), "docs/measured/*.md"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
CODE = r"^ *(?P<fence>```+|~~~+).*?^ *(?P=fence)|(?P<ticks>`+)[^`\n]*(?P=ticks)"
RATE = re.compile(rf"(?<![\w.^])(?<!\D-){NUMBER}(?:e\d+)?(?P<note> ?<!--.*?-->)?\**(?:\s*(?:million|billion|k\b))?\s*(?:(?:images|samples)"
                  r"(?:/s|\s(?:a|per)\s+second)|[kMGT]i?B/s|[GTP]FLOP/s|(?:times|×|x)\s+(?:as\s+(?:fast|many|slow)|faster|slower)"
                  r"|%\s+(?:faster|slower|of\s+the\s+(?:roofline|bound)))", re.S)
STATISTICS = {"min": min, "max": max, "median": statistics.median, "first": lambda values: values[0],
              "last": lambda values: values[-1], "count": len}
COMPUTED = {"us": lambda row: 1e6 * row["time_median_s"] / row["items"],
            "ms": lambda row: 1e3 * row["time_median_s"] / row["items"],
            "rate": lambda row: row["items"] / row["time_median_s"], "images": break_even.rate}


class Missing(Exception):
    """No row fits, or its value is empty."""


# ---- Rows ------------------------------------------------------------------------------------------------------


class Reference:
    """The rows of a folder, by file name, and the commands that measured them."""

    def __init__(self, folder):
        self.folder, self.files = folder, {}
        readme = folder / "README.md"
        lines = re.findall(r"^\| (`[^|]*) \| (.*) \|$", read_text(readme), re.M) if readme.exists() else []
        self.commands = [(pattern, text) for cell, text in lines for pattern in re.findall(r"`([^`]+)`", cell)]

    def rows(self, name):
        if name not in self.files:
            path = self.folder / f"{name}.csv"
            if not path.exists():
                raise Failed(f"no file {path.name} in {path.parent}", 2)
            kind, rows = read_file(path) if path.parent == self.folder else ("other", [])
            if kind != "rows":  # points from publications, rows of other programs, of steps and of the monitor
                header, records = read_csv(path)
                rows = [Row(zip(header, map(number_or_text, fields))) for _, fields in records]
                for row, (_, fields) in zip(rows, records):
                    row.texts = dict(zip(header, fields))
            self.files[name] = [row for row in rows if kind != "rows" or (stands_for_run(row) and not row["wrong"])]
            for row in self.files[name]:
                row.file = name
        return self.files[name]

    def command(self, name, page):
        """Returns the command and conditions of a file, with links relative to a page; None if there is no entry."""
        text = next((text for pattern, text in self.commands if fnmatch.fnmatch(f"{name}.csv", pattern)), None)
        return text and re.sub(r"\]\((?!http)([^)]*)\)", lambda link: f"]({os.path.relpath(self.folder / link[1], page.parent)})", text)


def short_revision(text):
    return text[:8] if re.fullmatch(r"[0-9a-f]{8,}", text) else text


def number_or_text(text):
    try:
        return float(text)
    except ValueError:
        return text


def split_filters(words, known=True):
    """Splits 'FILE-or-@FILE FILTER …' into (file or None, filters). A single word is a variant; `known`: a file needs its @."""
    file, filters = None, []
    for i, word in enumerate(words):
        if word.startswith("@") or (i == 0 and not known):
            file = word.lstrip("@")
        else:
            filters.append(word if "=" in word else f"variant={word}")
    return file, filters


def column_of(word):
    return re.split("[>=]", word, maxsplit=1)[0]


def fits(row, wanted):
    match = re.fullmatch(r"(\w+)(>=|=)(.*)", wanted, re.S)
    if not match or match[1] not in row.texts:
        raise Failed(f"no column '{match[1] if match else wanted}' in {row.file}.csv", 2)
    text = row.texts[match[1]]
    if match[2] == ">=" and isinstance(number_or_text(match[3]), str):
        raise Failed(f"'{wanted}' needs a number", 2)
    try:
        return float(text) == float(match[3]) if match[2] == "=" else float(text) >= float(match[3])
    except ValueError:
        return text == match[3]


class Scope:
    """A file and filters for expressions. `always` are filters that apply to rows of any file that has their column."""

    def __init__(self, reference, file, filters, always=()):
        self.reference, self.file, self.filters, self.always, self.used = reference, file, filters, always, []

    def select(self, words):
        file, filters = split_filters(words)
        if not (file or self.file):
            raise Failed(f"'{' '.join(words)}' names no file with @FILE", 2)
        named = {column_of(word) for word in filters}
        rows = [row for name in (file or self.file).split(",") for row in self.reference.rows(name)]
        if file in (None, self.file):
            filters += [word for word in self.filters if column_of(word) not in named]
        filters += [word for word in self.always if column_of(word) not in named and rows and column_of(word) in rows[0].texts]
        return file or self.file, filters, [row for row in rows if all(fits(row, word) for word in filters)]

    def look_up(self, function, arguments):
        """Returns the value of FUNCTION(FILTER …)."""
        file, filters, rows = self.select(arguments.split())
        which, _, column = function.rpartition(".")
        if not rows:
            raise Missing(f"no row of {file} fits '{' '.join(filters)}'")
        if column not in COMPUTED and column not in rows[0].texts:
            raise Failed(f"no column '{column}' in {file}.csv", 2)
        if which not in ("", "text", *STATISTICS):
            raise Failed(f"no prefix '{which}'; prefixes are text, {', '.join(STATISTICS)}", 2)
        if which == "text":
            words = {row.texts[column] for row in rows}
            if len(words) > 1:
                raise Failed(f"rows of {file} that fit '{' '.join(filters)}' differ in {column}: {', '.join(sorted(words))}", 2)
            self.used += rows
            return words.pop()
        if len(rows) > 1 and not which:
            raise Failed(f"{len(rows)} rows of {file} fit '{' '.join(filters)}'; select one with min, max, median, first or last, "
                         "as in min.us", 2)
        values = [COMPUTED[column](row) if column in COMPUTED else row[column] for row in rows]
        values = [float(value) for value in values if value not in (None, "")]
        if not values:
            raise Missing(f"column '{column}' is empty in {file} for '{' '.join(filters)}'")
        self.used += rows
        return STATISTICS[which or "first"](values)

    def crossing(self, arguments):
        """Returns the step time in ms from which fused is faster than a reader by at most TIE, as in break_even.py."""
        def by_step(name, words):
            file, filters = split_filters(words)
            rows = [row for row in self.reference.rows(file or name) if row["compute_ms"] and all(fits(row, w) for w in filters)]
            if len({break_even.step_of(row) for row in rows}) < len(rows):
                raise Failed(f"several rows of {file or name} with the same step fit '{' '.join(filters)}'", 2)
            self.used += rows
            return {break_even.step_of(row): break_even.rate(row) for row in rows}
        generating = by_step("h200_break_even_synth", ["fused"])
        reading = by_step("h200_break_even_load", arguments.split())
        at = break_even.crossing([(step, generating[step] / reading[step]) for step in sorted(generating) if step in reading],
                                 1 + break_even.TIE)
        if at is None:
            raise Missing(f"crossing({arguments}): one of the two is faster at every step")
        return at

    def evaluate(self, expression):
        """Returns the value of an expression as text. Raises Missing if it has no row."""
        word = re.fullmatch(r"(text\.\w+)\(([^()]*)\)", expression.strip())
        if word:
            return one_cell(self.look_up(*word.groups())) or "–"
        expression, _, digits = expression.partition("~")
        try:
            arithmetic, count = re.subn(r"([a-z][\w.]*)\(([^()]*)\)", lambda match: repr(float(
                self.crossing(match[2]) if match[1] == "crossing" else self.look_up(*match.groups()))), expression)
            if not count or not re.fullmatch(r"(?!.*\*\*)[-+*/(). \de]+", arithmetic) or not re.fullmatch(r"\s*(|%|\.\d|[1-9])\s*", digits):
                raise Failed(f"'{expression.strip()}' is not arithmetic over FUNCTION(FILTER …)", 2)
            return rounded(eval(arithmetic, {"__builtins__": {}}), digits.strip() or "3")  # numbers and operators only
        except (ArithmeticError, KeyError, SyntaxError, TypeError, ValueError) as error:  # such as text, or a column that `us` needs
            raise Failed(f"'{expression.strip()}' has no value: {error}", 2) from None


def one_cell(text):
    """Returns a text of a row as a cell of a table that neither ends it nor is HTML."""
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "\\|")


def rounded(value, digits):
    """Rounds to significant digits ('3') or decimals ('.1'), with thousands separators; '%': one decimal below ten, none above."""
    if digits == "%":
        digits = ".1" if abs(value) < 9.95 else ".0"
    if digits.startswith("."):
        return f"{round(value, int(digits[1:])) + 0.0:,.{int(digits[1:])}f}"  # + 0.0: without the sign of -0
    if value == 0:
        return "0"
    decimals = int(digits) - 1 - math.floor(math.log10(abs(float(f"{value:.{int(digits) - 1}e}"))))
    return f"{round(value, decimals):,.{max(0, decimals)}f}"


# ---- Tables ----------------------------------------------------------------------------------------------------


class Table:
    """A table of a page. The definition's lines are those of the page's comment."""

    def __init__(self, reference, lines):
        self.reference = reference
        self.file, self.filters = split_filters(lines[0].split()[1:], known=False)
        self.by, self.labels, self.columns, self.head, self.plain, self.command = [], [], [], "", False, None
        for line in lines[1:]:
            word, _, rest = line.strip().partition(" ")
            left, bar, right = (part.strip() for part in rest.rpartition(" | "))
            left = re.sub(r"(?<!\\)\|", r"\\|", left)
            if word == "by":
                self.by = re.findall(r'(\w+)(?: "([^"]*)")?', rest)
            elif word == "row" and bar:
                self.labels.append((left, right.split()))
            elif word == "column" and bar:
                self.columns.append((left, right))
            elif word == "head":
                self.head = rest
            elif word == "command":
                self.command = rest
            elif word == "plain" and not rest:
                self.plain = True
            else:
                raise Failed(f"'{line.strip()}' is no line of a table; see scripts/figures/measured.py --help", 2)
        if not self.columns or bool(self.by) == bool(self.labels):
            raise Failed(f"the table of {self.file} needs lines `column`, and either `by` or lines `row`", 2)

    def scopes(self):
        """Yields (labels, scope) of each row of the table."""
        for label, words in self.labels:
            file, filters = split_filters(words)
            named = {column_of(word) for word in filters}
            inherited = [] if file not in (None, self.file) else [word for word in self.filters if column_of(word) not in named]
            yield [label], Scope(self.reference, file or self.file, inherited + filters)
        if self.by:
            rows = Scope(self.reference, self.file, self.filters).select([])[2]
            names = [name for name, _ in self.by]
            for row in rows:
                if not set(names) <= set(row.texts):
                    raise Failed(f"'by {', '.join(names)}': no such column in {self.file}.csv", 2)
            for values in dict.fromkeys(tuple(row.texts[name] for name in names) for row in rows):
                labels = [f"{int(value):,}" if re.fullmatch(r"[1-9]\d{4,}", value) else one_cell(value) or "–" for value in values]
                labels = [f"`{label}`" if name in ("variant", "model", "formula", "feed") and label != "–" else label
                          for label, name in zip(labels, names)]
                yield labels, Scope(self.reference, self.file, self.filters, [f"{n}={v}" for n, v in zip(names, values)])

    def text(self, page):
        """Returns the lines of the table and its caption."""
        used, lines, columns = [], [], []
        for labels, scope in self.scopes():
            cells = []
            for _, expression in self.columns:
                try:
                    cells.append(scope.evaluate(expression))
                except Missing:
                    cells.append("–")
            if any(cell != "–" for cell in cells):
                lines.append(f"| {' | '.join(labels + cells)} |")
                columns.append(cells)
            elif self.labels:
                raise Failed(f"row '{labels[0]}' of the table of {self.file}: no row fits", 2)
            used += scope.used
        if not lines:
            raise Failed(f"the table of {self.file} is empty: no row fits '{' '.join(self.filters)}'", 2)
        heads = [heading or name for name, heading in self.by] or [self.head]
        for (heading, _), cells in zip(self.columns, zip(*columns)):
            if set(cells) == {"–"}:
                raise Failed(f"column '{heading}' of the table of {self.file}: no row fits", 2)
        numeric = ["--:" if re.search(r"\d", "".join(cells)) else "---" for cells in zip(*columns)]
        lines = [f"| {' | '.join(heads + [heading for heading, _ in self.columns])} |",
                 f"|{'|'.join(['---'] * len(heads) + numeric)}|", *lines]
        captions = [] if self.plain else list(self.caption(used, page))
        return lines + [line for caption in captions for line in ("", caption)]

    def caption(self, used, page):
        for name in dict.fromkeys(row.file for row in used):
            texts = [row.texts for row in used if row.file == name]
            def distinct(column, texts=texts):
                return list(dict.fromkeys(one_cell(text[column]) for text in texts if text.get(column)))
            days = sorted({text[:10] for text in distinct("time_utc")})
            clocks = sorted(float(text) for text in distinct("sm_clock_mhz") if not isinstance(number_or_text(text), str))
            facts = [" and ".join(short_device(device) for device in distinct("device")),
                     f"revision {', '.join(short_revision(text) for text in distinct('revision'))}" if distinct("revision") else "",
                     "–".join(dict.fromkeys((days[0], days[-1]))) if days else "",
                     f"SM clock {'–'.join(dict.fromkeys(rounded(clock, '.0') for clock in (clocks[0], clocks[-1])))} MHz" if clocks else ""]
            command = self.command or self.reference.command(name, page)
            link = os.path.relpath(self.reference.folder / f"{name}.csv", page.parent)
            if not command:
                raise Failed(f"results/reference/README.md has no command for {name}.csv", 2)
            yield f"Rows: [{name}.csv]({link}); {'; '.join(fact for fact in facts if fact) or 'see there'}. Command: {command.rstrip('.')}."


# ---- Figures ---------------------------------------------------------------------------------------------------

FIGURE = re.compile(r"\]\((\w+)\.svg\)<!-- figure (\w*) ?-->")


def own_rows(work):
    """Returns a folder without rows."""
    os.makedirs(f"{work}/none")
    return f"{work}/none"


def hash_figures(names, reference):
    """Returns {name: hash of the data of this figure}, drawn from the reference rows alone."""
    if not names:
        return {}
    with tempfile.TemporaryDirectory() as work:
        call_draw(["--commands", "--work", work, "--results", own_rows(work), "--reference", str(reference), *names])
        data = {name: [pathlib.Path(work, f"{name}.{end}") for end in ("dat", "vars")] for name in names}
        return {name: hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12] for name, paths in data.items()
                if all(path.exists() for path in paths)}


def draw_figure(name, folder, reference):
    """Draws a figure into the folder of its page."""
    need_gnuplot()
    with tempfile.TemporaryDirectory() as work:
        call_draw(["--out", work, "--work", work, "--results", own_rows(work), "--reference", str(reference), name])
        write_whole(folder / f"{name}.svg", pathlib.Path(work, f"{name}.svg").read_text("utf-8"))


def call_draw(arguments):
    done = subprocess.run([sys.executable, pathlib.Path(__file__).with_name("draw.py"), *arguments], capture_output=True,
                          encoding="utf-8", check=False)
    if done.returncode != 0:
        raise Failed(done.stderr.strip() or f"draw.py: exit status {done.returncode}", 2)


# ---- Pages -----------------------------------------------------------------------------------------------------


# Code is text, also if it shows a comment. The lines of a table are generated; other lines between its comments are not replaced.
MARK = re.compile(rf"{CODE}|{FIGURE.pattern}|<!--(?P<table> table (?:(?!-->).)*)-->\n(?:(?:\|[^\n]*|Rows: [^\n]*)?\n)*?<!-- end -->"
                  rf"|(?P<before>(?:(?<![\w.,])[-−])?(?<![\w.,]){NUMBER})?<!--(?P<note>.*?)(?:-->|\Z)", re.S | re.M)


def revised(path, text, reference, faults):
    """Returns the text of a page with the values of its rows. Appends what cannot be evaluated to `faults`."""
    scope = Scope(reference, None, [])

    def mark(match):
        try:
            if match["table"]:
                lines = Table(reference, match["table"].strip().split("\n")).text(path)
                return "\n".join([f"<!--{match['table']}-->", *lines, "<!-- end -->"])
            return match[0] if match["note"] is None else number(match["before"], match["note"].strip(), match)
        except (Failed, Missing) as error:
            faults.append(f"{line_of(text, match.start())}: {error}")
            return match[0]

    def number(before, note, match):
        nonlocal scope
        word = note.split()[0] if note else ""
        if not match[0].endswith("-->"):
            raise Failed("a comment has no '-->'")
        if word in ("table", "end"):
            raise Failed("a table has no '<!-- end -->', or other lines before it")
        if word == "figure":
            raise Failed("a figure is ](NAME.svg)<!-- figure HASH -->, in the folder of its page")
        if word == "rows" and not before:
            scope = Scope(reference, *split_filters(note.split()[1:], known=False))
        elif note != "stated":
            if not before:
                raise Failed(f"no number before '<!-- {note} -->'")
            try:
                value = scope.evaluate(note)
            except (Failed, Missing) as error:
                raise Failed(f"{note}: {error}") from None
            if "," not in before and len(before.lstrip("-−").partition(".")[0]) > 3:  # this page writes the number without separators
                value = value.replace(",", "")
            return f"{value.replace('-', '−') if before[0] == '−' else value}<!--{match['note']}-->"
        return match[0]

    return MARK.sub(mark, text)


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def unmarked(text):
    """Yields (line, words) of each rate in prose that has no mark. Code and tables are not prose."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match[0])
    prose = re.sub(CODE + r"|^    .*?$|^\|.*?$|<!-- table .*?<!-- end -->", blank, text, flags=re.S | re.M)
    for match in RATE.finditer(prose):
        if not match["note"] and not re.match(r"\**\s?<!-- stated -->", prose[match.end():]):
            yield line_of(text, match.start()), " ".join(match[0].split())


def check(given):
    reference = Reference(given.reference or given.root / "results/reference")
    hashes = hash_figures(sorted({match[1] for path in given.root.glob(MEASURED) for match in FIGURE.finditer(read_text(path))}),
                          reference.folder)
    names = given.pages or sorted(str(path.relative_to(given.root)) for pattern in (*MANUALS, MEASURED) for path in given.root.glob(pattern))
    if not names:
        raise Failed(f"no pages in {given.root}", 2)
    bad = 0
    for name in names:
        path, faults = given.root / name, []
        name = os.path.relpath(path, given.root)
        if not path.exists():
            raise Failed(f"no page {name}; pages are README.md, docs/*.md and docs/measured/*.md", 2)
        old = read_text(path)
        if "\r" in old:
            raise Failed(f"{name} has carriage returns; remove them", 2)
        new = revised(path, old, reference, faults)
        for figure in FIGURE.finditer(new):
            if figure[1] not in hashes:
                faults.append(f"{line_of(new, figure.start())}: no such figure, or it has no data: {figure[1]}")
            elif hashes[figure[1]] != figure[2] or not (path.parent / f"{figure[1]}.svg").exists():
                if given.fix:
                    draw_figure(figure[1], path.parent, reference.folder)
                else:
                    faults.append(f"{line_of(new, figure.start())}: {figure[1]}.svg differs from the rows")
        if given.fix:
            new = FIGURE.sub(lambda figure: f"]({figure[1]}.svg)<!-- figure {hashes.get(figure[1], figure[2])} -->", new)
        bad += len(faults)
        print("".join(f"{name}:{fault}\n" for fault in faults), end="")
        if not name.startswith("docs/measured/") and path.name != "columns.md":
            for line, words in unmarked(new):
                print(f"{name}:{line}: '{words}' has no row; add <!-- EXPRESSION --> or <!-- stated --> after the number")
                bad += 1
        if given.fix and old != new:
            if not os.access(path, os.W_OK):
                raise Failed(f"{name} is read-only; change its permissions, or check without --fix", 1)
            write_whole(path.resolve(), new)
        elif old != new:
            was, now = old.split("\n"), new.split("\n")
            at = next((i for i, (a, b) in enumerate(zip(was, now)) if a != b), min(len(was), len(now)))
            print(f"{name}:{at + 1}: differs from the rows; they give: {now[at] if at < len(now) else ''}")
            bad += 1
    if bad:
        raise Failed(f"{bad} problems; --fix writes numbers and tables; see scripts/figures/measured.py --help", 1)


def main():
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    parser.add_argument("--reference", type=pathlib.Path)
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    given = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # a locale without UTF-8
    if given.help:
        print(__doc__.strip())
    else:
        given.root = given.root.resolve()
        check(given)


if __name__ == "__main__":
    sys.exit(exit_status("figures/measured.py", main))
