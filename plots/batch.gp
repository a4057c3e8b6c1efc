# Time per image vs. batch size, both log; x ticks are powers of two.
load 'plots/common.gp'
set xlabel 'batch size (images)'
y_name = 'time per image'
load 'plots/lines.gp'
