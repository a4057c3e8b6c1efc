# Groups of dots for times on a log y axis, where the length of a bar would be meaningless. A figure's script
# loads this file, then runs `plot @grouped_dots, ...`. Variables: y_name, groups, dots (number per group), dot_slot[],
# and the y axis of axes.gp. Blocks of data: one per dot of a group (x, median, low, high in µs, time, bold text),
# then the groups (x, name, text).
set xrange [0.45:groups + 0.55]
set logscale y
set yrange [y_low / (1 + 1e-9):y_high * (1 + 1e-9)] # rounding must not clip the labels and ticks at the ends
set ytics ()
do for [i = 1:y_ticks] { set ytics add (y_tick_text[i] y_tick_at[i] y_tick_text[i] eq '') }
set ylabel y_name offset character 0.5, 0
unset xtics
do for [i = 1:groups - 1] { set arrow 700 + i from first i + 0.5, graph 0 to first i + 0.5, graph 1 nohead back lw 0.6 lc rgb '#D4D4D4' }
small = dots > 1 ? 'DejaVu Sans,8.5' : 'DejaVu Sans,10'
strong = dots > 1 ? 'DejaVu Sans:Bold,9' : 'DejaVu Sans:Bold,10.5'
grouped_dots = "for [i = 1:dots] data index i - 1 using 1:3:(0):($4 - $3) with vectors @error_bar lc rgb '#000000', ".\
    "for [i = 1:dots] data index i - 1 using 1:2 with points ls 10 + dot_slot[i] ps 1.3 * dot, ".\
    "for [i = 1:(ring_block > 0)] data index ring_block using 1:2 with points ls 95, ".\
    "for [i = 1:dots] data index i - 1 using 1:4:5 with labels font small offset 0, character 0.9, ".\
    "for [i = 1:dots] data index i - 1 using 1:4:6 with labels font strong offset 0, character 1.9, ".\
    "data index dots using 1:(y_low):2 with labels font 'DejaVu Sans:Bold,11' offset 0, character -1, ".\
    "data index dots using 1:(y_low):3 with labels font 'DejaVu Sans,9.5' offset 0, character -2.1"
