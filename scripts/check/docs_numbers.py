#!/usr/bin/env python3
"""Compares the numbers in the documentation with the rows that they were computed from, as listed in docs/numbers.txt.

  scripts/check/docs_numbers.py [PAGE ...]   prints each number that differs from its row, and each measurement without a row
  scripts/check/docs_numbers.py --fix        updates the numbers in the pages

  --root DIR        the project to check (default: this one)
  --reference DIR   the rows (default: results/reference in that project)

Lines of docs/numbers.txt:

  page README.md                      the following lines are about this page
  rows h200_synth res=512 dtype=u8    the following values are computed from this file of rows; the filters apply to all values
  | `omp` | 16 threads | {} | {} |    part of a line of the page: {} is a number from a row, {_} any other number. If this
                                      file lists a part twice, the second entry is for its second occurrence on the page.
      us(omp batch=32); rate(omp batch=32)     the values for {}, in the same order; indented
  other ## Floors: computed           no number of this section, up to the next heading, is from a row; the text after the
                                      colon is the reason
  other FLOPs are counted: computed   no number in lines that begin with these words is from a row
  other: no rows are kept             no number of the whole page is from a row

A value is an arithmetic expression over FUNCTION(FILTER …). A filter is COLUMN=VALUE (or >=), or a variant. @FILE[,FILE] selects
other files; the filters of the `rows` line do not apply to them. A FUNCTION is the name of a column or one of: us and ms (time per
item), rate (items per second), images (images per second while a training step runs). If several rows match, a prefix selects
one value: min.us, max.us, median.us, first.us or last.us; count.us is the number of values. Values are rounded to three
significant digits. After a value, ~2 means two digits, ~.1 means one decimal, and ~% means one decimal below ten and none above.
crossing(FILTER …) is a time of the training step in ms. From this time on, generating with fused is at most 2 % faster than
reading with the variant in the filter (scripts/compare/break_even.sh).

Exit status: 0 all numbers agree, 1 some numbers differ or have no row, 2 usage or an invalid file.
"""

import argparse
import difflib
import math
import pathlib
import re
import statistics
import sys

sys.pycache_prefix = f"{sys.path[0]}/../../build/pycache"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "figures"))
import break_even  # noqa: E402
from plot import ROOT, Failed, exit_status  # noqa: E402
from rows import Row, read_csv, read_file, stands_for_run  # noqa: E402

PAGES = ("README.md", "docs/*.md", "results/README.md", "results/reference/README.md")
NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = r"(?:[µmn]?s|%|×(?!\s*\d)|[GMTk]B(?:/s)?|W|[GT]FLOP/s|million|times|(?:samples|images)(?:/s| a second| per second))(?![\w/])"
STATISTICS = {"min": min, "max": max, "median": statistics.median, "first": lambda values: values[0],
              "last": lambda values: values[-1], "count": len}
COMPUTED = {"us": lambda row: 1e6 * row["time_median_s"] / row["items"],
            "ms": lambda row: 1e3 * row["time_median_s"] / row["items"],
            "rate": lambda row: row["items"] / row["time_median_s"], "images": break_even.rate}


# ---- Rows ------------------------------------------------------------------------------------------------------


class Reference:
    """The rows of a folder, by file name."""

    def __init__(self, folder):
        self.folder, self.files = folder, {}

    def rows(self, name):
        if name not in self.files:
            path = self.folder / f"{name}.csv"
            kind, rows = read_file(path) if path.parent == self.folder else ("other", [])
            if kind == "other":  # points from publications, and rows of scripts/compare/pretrain.py: not of fdsl-bench
                header, records = read_csv(path)
                rows = [Row(zip(header, fields)) for _, fields in records]
                for row in rows:
                    row.texts = row
            self.files[name] = [row for row in rows if kind == "other" or stands_for_run(row)]
        return self.files[name]


def filters_of(words):
    """Returns the filters in full: a single word becomes variant=WORD. Skips @FILE, which is not a filter."""
    return [word if "=" in word else f"variant={word}" for word in words if not word.startswith("@")]


def fits(row, wanted):
    column, operator, value = re.fullmatch(r"(\w*)(>=|=)(.*)", wanted).groups()
    if column not in row.texts:
        raise Failed(f"no column '{column}' in these rows", 2)
    text = row.texts[column]
    try:
        return float(text) == float(value) if operator == "=" else float(text) >= float(value)
    except ValueError:
        return text == value


def look_up(reference, scope, function, arguments):
    """Returns the value of FUNCTION(FILTER …) for the file and filters of a `rows` line."""
    filters = filters_of(arguments.split())
    named = {word.split("=")[0] for word in filters}
    files = next((word[1:] for word in arguments.split() if word[0] == "@"), scope[0])
    filters += [word for word in filters_of(scope[1:]) if word.split("=")[0] not in named and scope[0] in files.split(",")]
    rows = [row for file in files.split(",") for row in reference.rows(file) if all(fits(row, word) for word in filters)]
    which, _, column = function.rpartition(".")
    if not rows or (len(rows) > 1 and not which):
        raise Failed(f"{len(rows)} rows of {files} fit '{' '.join(filters)}'"
                     + ("; select one with min, max, median, first or last, as in min.us" if rows else ""), 2)
    def value(row):
        return COMPUTED[column](row) if column in COMPUTED else row[column] if row.get(column) not in (None, "") else None
    values = [float(found) for found in map(value, rows) if found is not None]
    if not values:
        raise Failed(f"column '{column}' is empty in {files} for '{' '.join(filters)}'", 2)
    return STATISTICS[which or "first"](values)


def crossing(reference, arguments):
    """Returns the step time in ms from which fused is faster than a reader by at most TIE, as in scripts/figures/break_even.py."""
    def by_step(name, words):
        return {break_even.step_of(row): break_even.rate(row) for row in reference.rows(name)
                if row["compute_ms"] and all(fits(row, word) for word in filters_of(words))}
    generating, reading = by_step("h200_break_even_synth", ["fused"]), by_step("h200_break_even_load", arguments.split())
    ratios = [(step, generating[step] / reading[step]) for step in sorted(generating) if step in reading]
    at = break_even.crossing(ratios, 1 + break_even.TIE)
    if at is None:
        raise Failed(f"crossing({arguments}): no crossing: one of the two is faster at every step", 2)
    return at


def evaluate(reference, scope, expression):
    """Evaluates an expression of docs/numbers.txt. Returns its value as the text for a page."""
    expression, _, digits = expression.partition("~")
    arithmetic = re.sub(r"([a-z][\w.]*)\(([^()]*)\)",
                        lambda match: repr(float(crossing(reference, match[2]) if match[1] == "crossing" else
                                                 look_up(reference, scope, *match.groups()))), expression)
    if not re.fullmatch(r"[-+*/(). \de]+", arithmetic) or not re.fullmatch(r"\s*(|%|\.?\d)\s*", digits):
        raise Failed(f"'{expression.strip()}' is not arithmetic over FUNCTION(FILTER …)", 2)
    return rounded(eval(arithmetic, {"__builtins__": {}}), digits.strip() or "3")  # numbers and operators only


def rounded(value, digits):
    """Rounds to significant digits ('3') or decimals ('.1'), with thousands separators; '%': one decimal below ten, none above."""
    if digits == "%":
        digits = ".1" if value < 9.95 else ".0"
    if digits.startswith("."):
        return f"{value:,.{int(digits[1:])}f}"
    if value == 0:
        return "0"
    decimals = int(digits) - 1 - math.floor(math.log10(abs(float(f"{value:.{int(digits) - 1}e}"))))
    return f"{round(value, decimals):,.{max(0, decimals)}f}"


# ---- docs/numbers.txt ------------------------------------------------------------------------------------------


class Binding:
    """Part of a line of a page, with the expressions for its numbers."""

    def __init__(self, where, pattern, scope):
        self.where, self.pattern, self.scope, self.values = where, pattern, scope, []

    def regex(self):
        parts = re.split(r"(\{_?\})", self.pattern)
        return "".join(f"(?P<n{i}>{NUMBER})" if part == "{}" else f"(?P<o{i}>{NUMBER})" if part == "{_}" else re.escape(part)
                       for i, part in enumerate(parts))


def read_bindings(path):
    """Returns {page: (bindings, [(beginning of a section or line, reason)])}."""
    pages, page, scope, binding = {}, None, None, None
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        word, _, rest = line.partition(" ")
        if not line.strip() or line.startswith("# "):
            continue
        if word == "page":
            if rest.strip() in pages:
                raise Failed(f"{path}:{number}: a second list of {rest.strip()}; merge it with the first", 2)
            page = pages[rest.strip()] = ([], [])
        elif word == "rows":
            scope = rest.split()
        elif word == "other" or line.startswith("other:"):
            what, _, reason = line[len("other"):].rpartition(": ")
            if not reason.strip():
                raise Failed(f"{path}:{number}: give the reason after a colon", 2)
            page[1].append((what.lstrip(": ").strip(), reason))
        elif line.startswith("    "):
            binding.values += [value.strip() for value in line.split(";") if value.strip()]
        else:
            binding = Binding(f"{path.name}:{number}", line, scope)
            page[0].append(binding)
    return pages


# ---- Pages -----------------------------------------------------------------------------------------------------


class Page:
    """A page; `spans` has, per line, the positions of the numbers that a binding covers."""

    def __init__(self, path, name):
        self.path, self.name = path, name
        self.lines = path.read_text("utf-8").split("\n")
        self.spans = [[] for _ in self.lines]
        self.wrong, self.faults = [], []

    def check(self, binding, reference, turn, turns):
        """Checks the numbers of a binding in match number `turn` (from 0) of its pattern. `turns`: number of bindings with this
        pattern."""
        regex = re.compile(binding.regex())
        found = [(i, match) for i, line in enumerate(self.lines) for match in regex.finditer(line)]
        if len(found) != turns:
            self.faults.append(f"{binding.where}: {len(found)} lines of {self.name} contain '{binding.pattern}', expected {turns}")
            return
        i, match = found[turn]
        names = [name for name in match.groupdict() if name.startswith("n")]
        self.spans[i] += [match.span(name) for name in match.groupdict()]
        if len(names) != len(binding.values):
            self.faults.append(f"{binding.where}: the line has {len(names)} {{}}, but {len(binding.values)} values follow")
            return
        for name, expression in zip(names, binding.values):
            try:
                right = evaluate(reference, binding.scope, expression)
            except (Failed, ZeroDivisionError) as error:
                self.faults.append(f"{binding.where}: {expression}: {error}")
                continue
            if match[name].replace(",", "") != right.replace(",", ""):
                if "," not in match[name] and len(match[name].partition(".")[0]) > 3:  # the page writes this number without separators
                    right = right.replace(",", "")
                self.wrong.append((i, match.span(name), right, expression))

    def fix(self):
        for i, (begin, end), right, _ in sorted(self.wrong, reverse=True):
            self.lines[i] = self.lines[i][:begin] + right + self.lines[i][end:]
        self.path.write_text("\n".join(self.lines), "utf-8")

    def unbound(self, others):
        """Returns (line, number) of each measurement without a binding or an `other` line, and the `other` lines that match nothing."""
        found, used, excuse, code = [], set(), None, False
        whole = [what for what, _ in others if not what]
        for i, line in enumerate(self.lines):
            code ^= line.startswith("```")
            if line.startswith("#"):
                excuse = next((what for what, _ in others if what and line.startswith(what)), None)
            here = excuse or next((what for what, _ in others if what and line.strip().startswith(what)), None)
            if here:
                used.add(here)
            elif not (whole or code or line.startswith(("    ", "#")) or self.is_heading(i)):
                found += [(i, text) for text in self.measurements(i)]
        return found, [what for what, _ in others if what and what not in used]

    def is_heading(self, i):
        """Returns whether a line is the header row of a table."""
        return self.lines[i].startswith("|") and self.lines[i + 1:] and self.lines[i + 1].startswith("|--")

    def measurements(self, i):
        """Yields the numbers of a line that are probably measurements: those with a unit and, in tables, those with three or more
        digits or a decimal point."""
        line = re.sub(r"`[^`]*`|\]\([^)]*\)", lambda match: " " * len(match[0]), self.lines[i])
        in_table = line.startswith("|")
        label = line.index("|", 1) if in_table and "|" in line[1:] else 0  # skip the first cell, which names the row
        for match in re.finditer(rf"(?<![\w.\-^≤≥]){NUMBER}(?P<unit>\s?{UNIT})?(?!²| × \d|× \d)", line[label:]):
            begin, end = label + match.start(), label + match.end() - len(match["unit"] or "")
            cell = in_table and re.fullmatch(r"[\d,]*(\d{3}|\d\.\d+)", line[begin:end])
            aim = re.search(r"[≤≥] $|× $|^× ", line[max(0, begin - 2):begin])
            if (match["unit"] or cell) and not aim and not any(low < end and begin < high for low, high in self.spans[i]):
                yield match[0]


def check(given):
    reference = Reference(given.reference or given.root / "results/reference")
    pages = read_bindings(given.root / "docs/numbers.txt")
    for name in given.pages:
        if name not in pages:
            near = difflib.get_close_matches(name, pages, 1)
            raise Failed(f"no page '{name}' in docs/numbers.txt; " + (f"did you mean '{near[0]}'?" if near else
                         f"choose from {', '.join(pages)}"), 2)
    missing = sorted({str(path.relative_to(given.root)) for pattern in PAGES for path in given.root.glob(pattern)} - set(pages))
    print("".join(f"{name} is not a page of docs/numbers.txt\n" for name in missing), end="")
    bad = len(missing)
    for name, (bindings, others) in ((name, pages[name]) for name in given.pages or pages):
        page = Page(given.root / name, name)
        patterns = [binding.pattern for binding in bindings]
        for n, binding in enumerate(bindings):
            page.check(binding, reference, patterns[:n].count(binding.pattern), patterns.count(binding.pattern))
        found, unused = page.unbound(others)
        texts = page.faults + [f"{name}:{i + 1}: {text} has no row in docs/numbers.txt" for i, text in found]
        texts += [f"docs/numbers.txt: no line of {name} begins with '{what}'" for what in unused]
        for i, (begin, end), right, expression in page.wrong:
            texts.append(f"{name}:{i + 1}: {page.lines[i][begin:end]} should be {right}, from {expression}" + given.fix * "; corrected")
        bad += len(texts) - given.fix * len(page.wrong)
        print("".join(text + "\n" for text in texts), end="")
        if given.fix and page.wrong:
            page.fix()
    if bad:
        raise Failed(f"{bad} problems; see scripts/check/docs_numbers.py --help", 1)


def main():
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    parser.add_argument("--reference", type=pathlib.Path)
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    given = parser.parse_args()
    if given.help:
        print(__doc__.strip())
    else:
        check(given)


if __name__ == "__main__":
    sys.exit(exit_status("check/docs_numbers.py", main))
