# A quantity vs. a parameter, one line per series; the scripts of several figures load this file. Variables: y_name,
# series, series_style[], and those of axes.gp. If series_crossed[] exists, points of a series whose element is 1
# have a cross. Blocks of data: one per series (x, median, low, high). Block ring_block has the points that get a
# ring.
load 'plots/axes.gp'
set ylabel y_name offset character 0.5, 0
if (!exists('series_crossed')) { array series_crossed[series]; do for [i = 1:series] { series_crossed[i] = 0 } }
plot for [i = 1:series] data index i - 1 using 1:2 with lines ls series_style[i], \
     for [i = 1:series] data index i - 1 using 1:3:(0):($4 - $3) with vectors @error_bar lc rgb colour[slot_of_colour(series_style[i])], \
     for [i = 1:series] data index i - 1 using 1:2 with points ls series_style[i], \
     for [i = 1:series] data index i - 1 using 1:(series_crossed[i] == 1 ? $2 : NaN) with points pt 1 ps 1.6 * dot lw 1 lc rgb '#000000', \
     for [i = 1:(ring_block > 0)] data index ring_block using 1:2 with points ls 95
