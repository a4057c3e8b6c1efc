# Training loss vs. samples seen, one line per run. A few points on each line have the point shape that the legend
# shows. Variables: series, series_style[], x_name, y_name, and those of axes.gp. Blocks of data: one per run
# (samples, loss).
load 'plots/common.gp'
load 'plots/axes.gp'
set xlabel x_name
set ylabel y_name offset character 0.5, 0
plot for [i = 1:series] data index i - 1 using 1:2 with linespoints ls series_style[i] pointnumber 8
