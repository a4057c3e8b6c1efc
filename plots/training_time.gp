# Seconds of training over images, a line a way to come by them. Needs besides (common.gp, axes.gp): series,
# series_style[], y_high. Blocks of data: thousands of images, seconds.
load 'plots/common.gp'
load 'plots/axes.gp'
set xlabel 'thousand images trained on'
set ylabel 'seconds' offset character 0.5, 0
set yrange [0:y_high]
plot for [i = 1:series] data index i - 1 using 1:2 with linespoints ls series_style[i]
