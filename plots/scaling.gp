# Images a second of all ranks together, with the line that no loss would give, log both.
# Needs besides (common.gp): series, series_style[], x_low, x_high, y_low, y_high, y_ticks, y_tick_at[], y_tick_text[].
# cells, cell_row[], cell_x[], cell_text[] (the efficiencies). Blocks of data: one a series (ranks, images a second,
# low, high), then one a series with its ideal line (ranks, images a second).
load 'plots/common.gp'
set xlabel 'ranks'
set logscale y
set yrange [y_low:y_high]
set ytics ()
do for [i = 1:y_ticks] { set ytics add (y_tick_text[i] y_tick_at[i] y_tick_text[i] eq '') }
set ylabel 'images a second' offset character 0.5, 0
set logscale x 2
set xtics 2
set xrange [x_low:x_high]

# The table of efficiencies, below the ticks that its columns belong to.
row_y(row) = height - bottom + 72 + 17 * row
set label 500 'efficiency' at screen x_at(left - 12), y_at(row_y(0)) right font 'DejaVu Sans:Bold,9.5'
do for [i = 1:series] {
    set arrow 500 + i from screen x_at(left - 50), y_at(row_y(i)) to screen x_at(left - 16), y_at(row_y(i)) nohead ls series_style[i]
    set label 500 + i '' at screen x_at(left - 33), y_at(row_y(i)) point ls series_style[i]
}
do for [i = 1:cells] {
    set label 600 + i cell_text[i] at first cell_x[i], screen y_at(row_y(cell_row[i])) center font 'DejaVu Sans,10'
}

plot for [i = 1:series] data index series + i - 1 using 1:2 with lines lc rgb '#7F7F7F' dt (7, 4) lw 1.3, \
     for [i = 1:series] data index i - 1 using 1:2 with lines ls series_style[i], \
     for [i = 1:series] data index i - 1 using 1:3:(0):($4 - $3) with vectors @error_bar lc rgb colour[int(series_style[i]) % 10], \
     for [i = 1:series] data index i - 1 using 1:2 with points ls series_style[i]
