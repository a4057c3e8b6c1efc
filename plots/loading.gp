# Time per sample over its size, log both.
load 'plots/common.gp'
set xlabel 'size of a sample (KiB)'
y_name = 'time per sample'
load 'plots/lines.gp'
