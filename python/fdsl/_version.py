"""The version of libfdsl that the package requires. scripts/packaging/wheel.py sets it to that of the Makefile."""

VERSION = ""  # in a source tree: any, because the library is built from the same tree
