# Arithmetic a second over arithmetic a byte, under the ceilings of each device, log both.
# Needs besides (common.gp): series, series_style[], roofs, roof_style[], x_low, x_high, y_low, y_high, y_ticks, y_tick_at[], y_tick_text[].
# Blocks of data: one a series (operations a byte, operations a second), then one a ceiling (the same), then the
# names of the ceilings (x, y, words).
load 'plots/common.gp'
set xlabel 'arithmetic intensity (operations a byte of finished image)'
set logscale y
set yrange [y_low:y_high]
set ytics ()
do for [i = 1:y_ticks] { set ytics add (y_tick_text[i] y_tick_at[i] y_tick_text[i] eq '') }
set ylabel 'operations a second' offset character 0.5, 0
set logscale x
set xrange [x_low:x_high]
set xtics add ('0.5' 0.5, '1' 1, '2' 2, '5' 5, '10' 10, '20' 20, '50' 50, '100' 100, '200' 200, '500' 500, '1000' 1000, '2000' 2000, '5000' 5000, '10 000' 1e4)
plot for [i = 1:roofs] data index series + i - 1 using 1:2 with lines lc rgb '#000000' lw 1.8 dt roof_dash[i], \
     for [i = 1:series] data index i - 1 using 1:2 with points ls series_style[i] ps 1.3 * dot, \
     data index series + roofs using 1:2:3 with labels right font 'DejaVu Sans,10' offset 0, character 0.6
