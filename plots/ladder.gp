# The steps of the paper as bars of time an image, log y, with the speed-up over the first written on each.
# Needs besides what bars.gp needs, a group being a step and a bar a device: a last block with the published code's
# points (x, µs).
load 'plots/common.gp'
y_name = 'time an image'
load 'plots/bars.gp'
plot @grouped_bars, data index bars + 1 using 1:2 with points ls 61
