# Images per second during training vs. number of GPUs. Variables: those of axes.gp, series, series_style[], and
# y_high if y is linear. Blocks of data: one per series (GPUs, images per second).
load 'plots/common.gp'
load 'plots/axes.gp'
set xlabel 'GPUs'
set ylabel 'images per second' offset character 0.5, 0
if (!exists('y_ticks')) {
    set yrange [0:y_high]
}
plot for [i = 1:series] data index i - 1 using 1:2 with linespoints ls series_style[i]
