# Time per image of the paper's variants, log y, with speed-ups. Needs besides what dots.gp needs, a group
# being a step and a dot a device: a last block with the published code's points (x, µs).
load 'plots/common.gp'
y_name = 'time per image'
load 'plots/dots.gp'
plot @grouped_dots, data index dots + 1 using 1:2 with points ls 61
