# Sets the axes from variables of scripts/figures/draw.py: x_low, x_high, x_log, x_ticks, x_tick_at[], x_tick_text[]. A
# y axis with its own ticks also has y_low, y_high, y_ticks, y_tick_at[], y_tick_text[]. It is logarithmic, unless
# y_linear exists. A tick without text is minor.
if (x_log) {
    set logscale x
}
set xrange [x_low:x_high]
set xtics ()
do for [i = 1:x_ticks] { set xtics add (x_tick_text[i] x_tick_at[i] x_tick_text[i] eq '') }
if (exists('y_ticks')) {
    if (!exists('y_linear')) { set logscale y }
    wider = exists('y_linear') ? 1 : 1 + 1e-9 # rounding must not clip the ticks at the ends
    set yrange [y_low / wider:y_high * wider]
    set ytics ()
    do for [i = 1:y_ticks] { set ytics add (y_tick_text[i] y_tick_at[i] y_tick_text[i] eq '') }
}
