#!/bin/sh
# Replaces a published CUDA program in tests. Prints a time, in the words of the published programs.
echo "Average main_kernel time: ${STUB_TIME_MS-0.1054} ms"
