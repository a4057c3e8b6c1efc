#!/usr/bin/env python3
"""Checks that reports (.html) and figures (.svg) are well-formed and refer to nothing outside the file.

  tests/check_page.py FILE...

Prints the first error and its file, and exits with status 1 if there is one.
"""

import html.parser
import re
import sys
import xml.etree.ElementTree

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(html.parser.HTMLParser):
    """Elements must close in order, each id must occur once, and each link must refer to an id."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links = [], set(), set()

    def handle_starttag(self, tag, attrs):
        self.look_at(tag, dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.look_at(tag, dict(attrs))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            sys.exit(f"line {self.getpos()[0]}: </{tag}> does not close the innermost open element")

    def look_at(self, tag, attrs):
        line = self.getpos()[0]
        if tag in ("script", "link", "img", "iframe", "object"):
            sys.exit(f"line {line}: <{tag}> is not allowed")
        for name, value in attrs.items():
            if name in ("href", "src", "xlink:href", "action", "data"):
                if not value.startswith("#"):
                    sys.exit(f"line {line}: {name}={value} refers to something outside the file")
                self.links.add(value[1:])
        if "id" in attrs:
            if attrs["id"] in self.ids:
                sys.exit(f"line {line}: id {attrs['id']} occurs twice")
            self.ids.add(attrs["id"])


def main(path):
    text = open(path, encoding="utf-8").read()
    svgs = [text] if path.endswith(".svg") else re.findall(r"<svg.*?</svg>", text, flags=re.S)
    for svg in svgs:
        xml.etree.ElementTree.fromstring(svg)
    if path.endswith(".html"):
        page = Page()
        page.feed(text)
        if page.open or page.links - page.ids:
            sys.exit(f"elements that are not closed: {page.open}; links to missing ids: {page.links - page.ids}")
    if re.search(r"url\((?!['\"]?#)|@import|[\"'(=]\s*https?://(?!www\.w3\.org/)", text):
        sys.exit("a style or a URL refers to something outside the file")


for argument in sys.argv[1:]:
    try:
        main(argument)
    except BaseException:
        print(argument, flush=True)
        raise
