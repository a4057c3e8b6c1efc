# Time per image of the paper's variants and fused, log y, with speed-ups. Variables: those that dots.gp lists, with one
# group per variant and one dot per device. The next block has the points of the published code (x, µs).
load 'plots/common.gp'
y_name = 'time per image'
load 'plots/dots.gp'
plot @grouped_dots, data index dots + 1 using 1:2 with points ls 61
