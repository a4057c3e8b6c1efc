#!/usr/bin/env python3
"""Writes pages of S3's and Azure's lists of objects, valid ones and mutations of them, with the results that Python's own
XML parser gives. tests/test_remote.c compares them with those of s3_list().

  tests/s3_lists.py COUNT SEED

Per page: the number of its bytes, the number of bytes of its result, the page, and the result: REFUSED, or a line
"KEY SIZE TAG" per object and a line "TOKEN".
"""
import random
import re
import sys
import xml.etree.ElementTree as tree
from xml.sax import saxutils

FORMS = {  # root: container of the objects, object, key, size, tag, token
    "ListBucketResult": ((), "Contents", ("Key",), ("Size",), ("ETag",), "NextContinuationToken"),
    "EnumerationResults": (("Blobs",), "Blob", ("Name",), ("Properties", "Content-Length"), ("Properties", "Etag"),
                           "NextMarker"),
}
NAME_MAX, TAG_MAX, SIZE_DIGITS_MAX = 4095, 255, 31


class Refused(Exception):
    pass


class Builder(tree.TreeBuilder):
    def doctype(self, *_):
        raise Refused


def local(element):
    return element.tag.rpartition("}")[2]


def children(elements, *path):
    """Returns the elements that are reached from some elements by names."""
    for name in path:
        elements = [child for element in elements for child in element if local(child) == name]
    return elements


def text(elements, most):
    """Returns the text of the only element, or ""."""
    if len(elements) > 1 or any(len(element) or element.attrib for element in elements):
        raise Refused
    value = elements[0].text or "" if elements else ""
    if len(value.encode()) > most:
        raise Refused
    return value


def read(page):
    """Returns the lines of the result."""
    parser = tree.XMLParser(target=Builder())
    parser.feed(page)
    root = parser.close()
    if local(root) not in FORMS:
        raise Refused
    outer, name, key, size, tag, token = FORMS[local(root)]
    lines = []
    items = children([root], *outer, name)
    if [local(element) in ("Contents", "Blob") for element in root.iter()].count(True) != len(items):
        raise Refused
    for item in items:
        found = text(children([item], *key), NAME_MAX), text(children([item], *size), SIZE_DIGITS_MAX), text(
            children([item], *tag), TAG_MAX)
        if not found[0] or not re.fullmatch("[0-9]+", found[1]) or int(found[1]) >= 1 << 64:
            raise Refused
        lines.append("%s %d %s\n" % (found[0], int(found[1]), found[2]))
    following = text(children([root], token), NAME_MAX)
    if local(root) == "ListBucketResult":
        truncated = text(children([root], "IsTruncated"), 7)
        if truncated not in ("", "true", "false") or (truncated == "true" and not following):
            raise Refused
        if text(children([root], "EncodingType"), 7):
            raise Refused
    return lines + [following + "\n"]


def valid(chance):
    """Returns a page as a list of parts: tags and texts."""
    word = lambda: saxutils.escape("".join(chance.choice("ab/&<>\"'é😀% ") for _ in range(chance.randrange(1, 9))))
    element = lambda name, *inside: ["<%s>" % name, *inside, "</%s>" % name]
    root = chance.choice(list(FORMS))
    outer, name, _, _, _, token = FORMS[root]
    body = []
    for _ in range(chance.randrange(5)):
        size, tag = str(chance.randrange(1 << chance.randrange(1, 65))), word()
        body += element(name, *(element("Key", word()) + element("Size", size) + element("ETag", tag) if not outer else
                                element("Name", word()) + element("Properties", *element("Content-Length", size),
                                                                  *element("Etag", tag))))
    more = element(token, word()) if chance.random() < 0.5 else []
    if not outer and chance.random() < 0.5:
        more += element("IsTruncated", chance.choice(["true", "false", "false", "maybe"]))
    parts = element(root, *(element(outer[0], *body) if outer else body), *more)
    if chance.random() < 0.3:
        parts[0] = parts[0].replace(">", " xmlns='http://s3'>")
    return parts


def mutate(parts, chance):
    """Changes a page: deletes, repeats, moves or replaces a part, or changes a byte."""
    at, to = chance.randrange(len(parts)), chance.randrange(len(parts))
    kind = chance.randrange(9)
    if kind == 0:
        del parts[at]
    elif kind == 1:
        parts.insert(to, parts[at])
    elif kind == 2:
        parts[at], parts[to] = parts[to], parts[at]
    elif kind == 3:
        parts[at] = chance.choice(["<!-- <Key> -->", "<![CDATA[<&]]>", "<b/>", "&#x41;", "&#0;", "&b;", "", "1" * 40, "x" * 300])
    elif kind == 4 and parts[at].startswith("<"):
        parts[at] = parts[at].replace(">", " a='b'>")
    elif kind == 5:  # repeats a part of the structure
        low, high = sorted((at, to))
        parts[high:high] = parts[low:high]
    elif kind == 8:  # puts a part of the structure into another element
        low, high = sorted((at, to))
        name = chance.choice(["X", "Contents", "Blob", "Blobs"])
        parts[low:high] = ["<%s>" % name, *parts[low:high], "</%s>" % name]
    elif kind == 6:
        parts.insert(0, "<!DOCTYPE a [<!ENTITY b 'c'>]>")
    elif parts[at]:
        where = chance.randrange(len(parts[at]))
        parts[at] = parts[at][:where] + chance.choice("<>&/a\"\x01 ") + parts[at][where + 1:]


chance = random.Random(int(sys.argv[2]))
for _ in range(int(sys.argv[1])):
    parts = valid(chance)
    for _ in range(chance.choice([0, 0, 1, 1, 2])):
        if parts:
            mutate(parts, chance)
    page = "".join(parts).encode()
    if chance.random() < 0.1:
        page = page[:chance.randrange(len(page) + 1)]
    try:
        result = "".join(read(page)).encode()
    except (Refused, tree.ParseError):
        result = b"REFUSED"
    sys.stdout.buffer.write(b"%d %d\n%s%s" % (len(page), len(result), page, result))
