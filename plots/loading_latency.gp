# Latency of system calls vs. quantile, both log; x is 1 / (1 - quantile). One line per call, device and state of the
# page cache.
load 'plots/common.gp'
set xlabel 'quantile'
y_name = 'time per call'
load 'plots/lines.gp'
