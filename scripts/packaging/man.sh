#!/usr/bin/env bash
# Writes the man page of fdsl-bench to stdout. Generates it from --help, so that man page and help agree.
#
#   scripts/packaging/man.sh ./fdsl-bench VERSION
set -euo pipefail
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }
program=$1 version=$2

cat <<HEAD
.TH FDSL-BENCH 1 "" "fdsl-bench $version" "User Commands"
.SH NAME
fdsl-bench \- benchmarks generating, loading and training on formula-driven images
.SH SYNOPSIS
.B fdsl-bench
.B \-\-variant
.IR NAME [, NAME ...]
.RI [ options ]
.br
.B fdsl-bench \-\-prepare
.I DIR
.RI [ options ]
.br
.B fdsl-bench advise \-\-data
.I DIR
.B \-\-compute
.I MS
.RI [ options ]
.br
.B fdsl-bench compare
.I A.csv B.csv
.RI [ options ]
.br
.B fdsl-bench verify\-published
.I DIR
.B \-\-preset
.I SET
.RI [ options ]
.br
.B fdsl-bench
.B \-\-monitor
.IR FILE [: MS ]
.B \-\-
.I COMMAND
.RI [ ARGUMENT ...]
.SH DESCRIPTION
Runs the same job through many implementations (variants), verifies each against a reference, times it, and writes CSV.
A workload is a kind of job: generating images, loading samples, converting embeddings, training, inference or all-reduces.
The options of each workload follow the options that all workloads share.
.SH EXAMPLES
HEAD
# awk reads to the end of its input. Otherwise SIGPIPE would end the program, and pipefail would end this script.
"$program" --help | awk '/^examples:/ && !on++ { print ".nf"; next } on == 1 && /^$/ { print ".fi"; on++ } on == 1 { gsub(/-/, "\\-"); print }'
{
    "$program" --help --verbose | sed '/^lists and ranges/,$d'
    echo 'options of --prepare:'
    "$program" --prepare --help | sed -n '/^options:/d; /^options of\|^  -\|^    /p'
    for command in advise compare verify-published; do
        echo "options of $command:"
        "$program" $command --help | sed -n '/^options:/,/^$/{/^options:/d; p}'
    done
    "$program" --help --verbose | sed -n '/^lists and ranges/,$p'
} | awk '
    function escape(text) { gsub(/\\/, "\\e", text); gsub(/-/, "\\-", text); sub(/^\./, "\\\\\\&.", text); return text }
    /^options/      { sub(/:$/, ""); print ".SH " toupper($0); sections = 1; next }
    sections && /^[a-zA-Z ]+:$/ { sub(/:$/, ""); print ".SS " $0; next }
    /^lists and/    { print ".SH LISTS AND RANGES"; sub(/^lists and ranges: /, ""); print escape($0); last = 1; next }
    /^exit status:/ { print ".SH EXIT STATUS"; sub(/^exit status: /, ""); print escape($0); last = 1; next }
    last            { if (sub(/^ +/, "")) print escape($0); next }
    /^  -/          { option = $0; sub(/^  /, "", option)
                      at = match(option, /  +/); text = ""
                      if (at) { text = substr(option, at + RLENGTH); option = substr(option, 1, at - 1) }
                      print ".TP\n.B " escape(option)
                      if (text != "") print escape(text); inside = 1; next }
    inside && /^ +/ { sub(/^ +/, ""); print escape($0); next }
'
cat <<'TAIL'
.SH FILES
.TP
.I results/*.csv
rows that
.B make bench
appends; one file per workload.
.SH ENVIRONMENT
.TP
.B OMP_NUM_THREADS
number of CPU threads if
.B --threads
is not given. In a list, only the first number counts.
.TP
.B FDSL_PROGRESS_S
seconds between two progress lines of
.B --prepare
if stderr is not a terminal (default 10).
.TP
.B NO_COLOR
disables colours if it is not empty.
.TP
.B TERM
disables colours if it is
.BR dumb .
TAIL
