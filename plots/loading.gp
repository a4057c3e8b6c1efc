# Time per sample vs. sample size, both log.
load 'plots/common.gp'
set xlabel 'sample size (KiB)'
y_name = 'time per sample'
load 'plots/lines.gp'
