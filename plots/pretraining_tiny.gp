# Images per second during training vs. number of GPUs, DeiT-Tiny; whiskers show repeated runs.
load 'plots/common.gp'
set xlabel 'GPUs'
y_name = 'images per second'
load 'plots/lines.gp'
