# Time of a call over its quantile, a line a call, log y; x is 1 / (1 - quantile), log.
load 'plots/common.gp'
set xlabel 'quantile of the calls'
y_name = 'time per call'
load 'plots/lines.gp'
