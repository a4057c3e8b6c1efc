# The steps of the paper as bars of time an image, log y, with the speed-up over the first written on each.
# Needs besides (common.gp): steps, bars (devices), bar_slot[], box (width of a bar), its y axis (y_low … y_tick_text[]).
# Blocks of data: one a device (x, median, low, high in µs, time, speed-up), the published code's
# points (x, µs), and the steps (x, name, batch).
load 'plots/common.gp'
set xrange [0.45:steps + 0.55]
set logscale y
set yrange [y_low:y_high]
set ytics ()
do for [i = 1:y_ticks] { set ytics add (y_tick_text[i] y_tick_at[i] y_tick_text[i] eq '') }
set ylabel 'time an image' offset character 0.5, 0
unset xtics
small = box > 0.4 ? 'DejaVu Sans,10' : 'DejaVu Sans,8.5'
strong = box > 0.4 ? 'DejaVu Sans:Bold,10.5' : 'DejaVu Sans:Bold,9'
plot for [i = 1:bars] data index i - 1 using 1:2:($1 - box / 2):($1 + box / 2):(y_low):2 \
         with boxxyerror fs solid 1 border lc rgb '#000000' fc rgb colour[bar_slot[i]], \
     for [i = 1:bars] data index i - 1 using 1:3:(0):($4 - $3) with vectors @error_bar lc rgb '#000000', \
     for [i = 1:bars] data index i - 1 using 1:4:5 with labels font small offset 0, character 0.6, \
     for [i = 1:bars] data index i - 1 using 1:4:6 with labels font strong offset 0, character 1.6, \
     data index bars using 1:2 with points ls 61, \
     data index bars + 1 using 1:(y_low):2 with labels font 'DejaVu Sans:Bold,11' offset 0, character -1, \
     data index bars + 1 using 1:(y_low):3 with labels font 'DejaVu Sans,9.5' offset 0, character -2.1
