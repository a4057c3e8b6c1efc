# Latency of system calls vs. quantile, one line per call, both log; x is 1 / (1 - quantile).
load 'plots/common.gp'
set xlabel 'quantile'
y_name = 'time per call'
load 'plots/lines.gp'
