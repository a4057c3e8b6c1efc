# Time per sample with a cold and a warm page cache, log y. Variables: device_lines, and those that dots.gp lists,
# with one group per variant and device, and one dot per state of the page cache. After the blocks of dots.gp,
# device_lines blocks have the lines of the devices' names (x, text).
load 'plots/common.gp'
y_name = 'time per sample'
load 'plots/dots.gp'
plot @grouped_dots, for [i = 1:device_lines] data index dots + i using 1:(y_low):2 with labels font 'DejaVu Sans,10' \
    offset 0, character -2.4 - 1.2 * i
