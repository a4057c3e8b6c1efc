# Bytes per second over threads, log both.
load 'plots/common.gp'
set xlabel 'threads'
y_name = 'bytes per second'
load 'plots/lines.gp'
