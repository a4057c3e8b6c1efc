# Time per image vs. batch size; log2 x, log y.
load 'plots/common.gp'
set xlabel 'batch size (images)'
y_name = 'time per image'
load 'plots/lines.gp'
