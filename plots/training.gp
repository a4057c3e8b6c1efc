# Images a second in training over GPUs. Needs besides (common.gp): series, series_style[], x_low, x_high, y_high.
# Blocks of data: GPUs, images a second.
load 'plots/common.gp'
set xlabel 'GPUs'
set ylabel 'images a second' offset character 0.5, 0
set logscale x 2
set xtics 2
set xrange [x_low:x_high]
set yrange [0:y_high]
plot for [i = 1:series] data index i - 1 using 1:2 with linespoints ls series_style[i]
