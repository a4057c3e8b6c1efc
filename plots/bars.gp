# Bars of time, log y, in groups with a name below each. A figure's script loads this and then says plot @grouped_bars,
# and what else it has.
# Needs besides (common.gp): y_name, groups, bars (in a group), bar_slot[], box (width of a bar), its y axis (y_low …
# y_tick_text[]). Blocks of data: one a bar of the groups (x, median, low, high in µs, time, words in bold), then the
# groups (x, name, words).
set xrange [0.45:groups + 0.55]
set logscale y
set yrange [y_low:y_high]
set ytics ()
do for [i = 1:y_ticks] { set ytics add (y_tick_text[i] y_tick_at[i] y_tick_text[i] eq '') }
set ylabel y_name offset character 0.5, 0
unset xtics
small = box > 0.4 ? 'DejaVu Sans,10' : 'DejaVu Sans,8.5'
strong = box > 0.4 ? 'DejaVu Sans:Bold,10.5' : 'DejaVu Sans:Bold,9'
grouped_bars = "for [i = 1:bars] data index i - 1 using 1:2:($1 - box / 2):($1 + box / 2):(y_low):2 ".\
    "with boxxyerror fs solid 1 border lc rgb '#000000' fc rgb colour[bar_slot[i]], ".\
    "for [i = 1:bars] data index i - 1 using 1:3:(0):($4 - $3) with vectors @error_bar lc rgb '#000000', ".\
    "for [i = 1:bars] data index i - 1 using 1:4:5 with labels font small offset 0, character 0.6, ".\
    "for [i = 1:bars] data index i - 1 using 1:4:6 with labels font strong offset 0, character 1.6, ".\
    "data index bars using 1:(y_low):2 with labels font 'DejaVu Sans:Bold,11' offset 0, character -1, ".\
    "data index bars using 1:(y_low):3 with labels font 'DejaVu Sans,9.5' offset 0, character -2.1"
