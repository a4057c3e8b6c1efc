#!/usr/bin/env python3
"""Writes the man page fdsl.3 from the comments and declarations of src/lib/fdsl.h.

  scripts/packaging/man_library.py VERSION > fdsl.3
"""
import os
import re
import sys

HEADER = os.path.join(os.path.dirname(os.path.abspath(__file__)), '../../src/lib/fdsl.h')


def escape(text):
    text = text.replace('\\', '\\e').replace('-', '\\-')
    return re.sub(r"^([.'])", r'\\&\1', text, flags=re.M)


def comment_text(comment):
    """Returns the text between /* and */, without the leading stars."""
    return re.sub(r'^ \* ?', '', comment.strip()[2:-2].strip(), flags=re.M)


def paragraphs(text):
    """Converts a comment to man(7) paragraphs. Keeps the line breaks of indented blocks."""
    lines = []
    for block in re.split(r'\n\s*\n', text):
        if block.startswith('    '):
            lines += ['.PP', '.nf', escape(re.sub(r'^    ', '', block, flags=re.M)), '.fi']
        else:
            lines += ['.PP', escape(' '.join(block.split()))]
    return lines


def split(source):
    """Returns the documented declarations of the header: [(comment, declaration)]."""
    parts = []
    for match in re.finditer(r'(/\*(?:[^*]|\*(?!/))*\*/)\n((?:FDSL_API|struct|enum)[^{;]*(?:\{[^}]*\})?;)', source):
        parts.append((comment_text(match.group(1)), match.group(2).replace('FDSL_API ', '')))
    return parts


def main():
    if {'-h', '--help'}.intersection(sys.argv):
        print(__doc__.strip())
        return
    if len(sys.argv) != 2:
        sys.exit('man_library.py: give the version; see --help')
    with open(HEADER) as file:
        source = file.read()
    title = comment_text(source[:source.index('*/') + 2])
    name, _, description = title.partition('\n')
    page = [f'.TH FDSL 3 "" "fdsl {sys.argv[1]}" "Library functions"', '.SH NAME',
            escape(name.replace('libfdsl: ', 'fdsl - ', 1).rstrip('.')), '.SH SYNOPSIS', '.nf', '#include <fdsl.h>', '',
            '\\&cc ... \\-lfdsl', '.fi', '.SH DESCRIPTION', *paragraphs(description.strip('\n'))]
    page += ['.SH CONSTANTS', '.nf', *(escape(line) for line in re.findall(r'^#define (FDSL_(?!API|H)\w+ .*)', source, re.M)), '.fi']
    for heading, kinds in (('TYPES', ('struct', 'enum')), ('FUNCTIONS', ())):
        page.append(f'.SH {heading}')
        for text, declaration in split(source):
            is_type = '{' in declaration
            if is_type == bool(kinds):
                page += ['.PP', '.nf', '.B', escape(declaration) if is_type else '.B ' + escape(' '.join(declaration.split())), '.fi',
                         *paragraphs(text)]
    page += ['.SH SEE ALSO', '.BR fdsl-bench (1)']
    print('\n'.join(page))


main()
