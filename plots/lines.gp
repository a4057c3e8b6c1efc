# A measure over a parameter, a line a series: vertices.gp, resolution.gp, batch.gp and figures of loading load this.
# Needs besides (common.gp, axes.gp): y_name, series, series_style[]. Blocks of data: x, median, low, high.
load 'plots/axes.gp'
set ylabel y_name offset character 0.5, 0
plot for [i = 1:series] data index i - 1 using 1:2 with lines ls series_style[i], \
     for [i = 1:series] data index i - 1 using 1:3:(0):($4 - $3) with vectors @error_bar lc rgb colour[slot_of_colour(series_style[i])], \
     for [i = 1:series] data index i - 1 using 1:2 with points ls series_style[i]
