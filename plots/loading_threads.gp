# Bytes a second over threads, log both.
load 'plots/common.gp'
set xlabel 'threads'
y_name = 'bytes a second'
load 'plots/lines.gp'
