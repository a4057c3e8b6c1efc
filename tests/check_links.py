#!/usr/bin/env python3
"""Checks that links of the documentation, and names of its pages in code and help texts, lead to files and headings.

  tests/check_links.py          checks the files that git tracks, or all files if this is no git checkout

Prints FILE:LINE and each broken link, and exits with status 1 if there is one.
"""

import os
import pathlib
import re
import subprocess
import sys
import urllib.parse

LINK = re.compile(r"(?:\]\(|^\[[^]]+\]: +|\b(?:href|src)=\")<?(?![a-z]+:)([^)#\s>\"]*)(?:#([^)\s>\"]*))?", re.M)
CODE = re.compile(r"^ *(```+|~~~+).*?^ *\1|(`+)[^`\n]*\2", re.S | re.M)
NAMED = re.compile(r"\b(docs/[\w/]+\.md)(?:#([\w-]+))?")
TEXT = {".md", ".c", ".h", ".cu", ".cuh", ".py", ".sh", ".def", ".cfg", ".gp", ".tsv", ".toml", ".yml"}


def anchors(path, known={}):
    """Returns the anchors of the headings of a page, as GitHub makes them."""
    if path not in known:
        text = re.sub(r"^(```+|~~~+).*?^\1", "", path.read_text("utf-8"), flags=re.S | re.M)
        names, known[path] = {}, set()
        for heading in re.findall(r"^#+ (.+?)(?: +#+)?\s*$", text, re.M):
            heading = re.sub(r"<!--.*?-->|\[([^]]*)\]\([^)]*\)", r"\1", heading)
            name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            names[name] = names.get(name, -1) + 1
            known[path].add(f"{name}-{names[name]}" if names[name] else name)
        known[path].update(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    return known[path]


def tracked(root):
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=root, capture_output=True, text=True)
    if listed.returncode == 0:
        return [root / name for name in listed.stdout.split("\0") if name]
    return [path for path in root.rglob("*") if path.is_file() and "build" not in path.relative_to(root).parts]


def broken(path, root, known):
    """Yields (line, link) of each link of a file that leads nowhere. `known` has the files and folders of the project."""
    text = path.read_text("utf-8", errors="replace")
    if path.suffix == ".md":
        text = CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for link in (LINK if path.suffix == ".md" else NAMED).finditer(text):
        name = urllib.parse.unquote(link[1])
        file = root / name if link.re is NAMED else pathlib.Path(os.path.normpath(path.parent / name)) if name else path
        if not file.exists() or file not in known or (link[2] and file.suffix == ".md" and link[2] not in anchors(file)):
            yield text.count("\n", 0, link.start()) + 1, link[0].strip("]()<")


def main():
    root, found = pathlib.Path(__file__).resolve().parents[1], 0
    files = tracked(root)
    known = {known for file in files for known in (file, *file.parents)}
    for path in files:
        if path.exists() and (path.suffix in TEXT or path.name == "Makefile") and root / "tests" not in path.parents:
            for line, link in broken(path, root, known):
                print(f"{os.path.relpath(path, root)}:{line}: {link}: no such file or heading")
                found += 1
    return found > 0


sys.exit(main())
