# A measure over a parameter, a line a series: vertices.gp, resolution.gp, batch.gp and figures of loading load this.
# Needs besides (common.gp, axes.gp): y_name, series, series_style[]. Blocks of data: x, median, low, high. Where there is a
# series_crossed[], the points of those series that are 1 there have a cross. Points of the block ring_block have a ring.
load 'plots/axes.gp'
set ylabel y_name offset character 0.5, 0
if (!exists('series_crossed')) { array series_crossed[series]; do for [i = 1:series] { series_crossed[i] = 0 } }
plot for [i = 1:series] data index i - 1 using 1:2 with lines ls series_style[i], \
     for [i = 1:series] data index i - 1 using 1:3:(0):($4 - $3) with vectors @error_bar lc rgb colour[slot_of_colour(series_style[i])], \
     for [i = 1:series] data index i - 1 using 1:2 with points ls series_style[i], \
     for [i = 1:series] data index i - 1 using 1:(series_crossed[i] == 1 ? $2 : NaN) with points pt 1 ps 1.6 * dot lw 1 lc rgb '#000000', \
     for [i = 1:(ring_block > 0)] data index ring_block using 1:2 with points ls 95
