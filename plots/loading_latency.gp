# Call latency vs. quantile, one line per call, log y; x is 1 / (1 - quantile), log.
load 'plots/common.gp'
set xlabel 'quantile'
y_name = 'time per call'
load 'plots/lines.gp'
