#!/usr/bin/env python3
"""Checks a report (a .html) or a figure (a .svg): well-formed, and nothing in it refers to anything outside.

  tests/check_page.py FILE

Exit status 1, and a line that says what is wrong.
"""

import html.parser
import re
import sys
import xml.etree.ElementTree

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(html.parser.HTMLParser):
    """Open elements must close in order, ids must differ, and links must lead to them."""

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
            sys.exit(f"line {self.getpos()[0]}: </{tag}> closes nothing")

    def look_at(self, tag, attrs):
        line = self.getpos()[0]
        if tag in ("script", "link", "img", "iframe", "object"):
            sys.exit(f"line {line}: <{tag}>")
        for name, value in attrs.items():
            if name in ("href", "src", "xlink:href", "action", "data"):
                if not value.startswith("#"):
                    sys.exit(f"line {line}: {name}={value} leads outside")
                self.links.add(value[1:])
        if "id" in attrs:
            if attrs["id"] in self.ids:
                sys.exit(f"line {line}: id {attrs['id']} is there twice")
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
            sys.exit(f"left open: {page.open}; links to nothing: {page.links - page.ids}")
    if re.search(r"url\((?!['\"]?#)|@import|https?://(?!www\.w3\.org/)", text):
        sys.exit("refers to something outside")


main(sys.argv[1])
