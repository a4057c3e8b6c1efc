# Time per all-reduce vs. size of the array, both log; x ticks are powers of two.
load 'plots/common.gp'
set xlabel 'size of the array of one rank'
y_name = 'time per all-reduce'
load 'plots/lines.gp'
