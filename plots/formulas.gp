# Time per image of each formula, log y, beside the published script, with speed-ups. Variables: those that dots.gp lists,
# with one group per set and one dot per device. The next block has the points of the scripts (x, µs, time).
load 'plots/common.gp'
y_name = 'time per image'
load 'plots/dots.gp'
plot @grouped_dots, data index dots + 1 using 1:2 with points ls 61, \
     data index dots + 1 using 1:2:3 with labels font small offset 0, character 0.9
