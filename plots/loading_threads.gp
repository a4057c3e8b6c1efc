# Bytes per second vs. threads, both log.
load 'plots/common.gp'
set xlabel 'threads'
y_name = 'bytes per second'
load 'plots/lines.gp'
