# Held-out loss vs. images seen, one line per source of images. Variables: those of axes.gp, series, series_style[], y_high.
# Blocks of data: one per series (thousands of images, nats).
load 'plots/common.gp'
load 'plots/axes.gp'
set xlabel 'images seen (thousands)'
set ylabel 'cross-entropy (nats)' offset character 0.5, 0
set yrange [0:y_high]
plot for [i = 1:series] data index i - 1 using 1:2 with linespoints ls series_style[i]
