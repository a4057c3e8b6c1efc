# Time per sample vs. sample size, both log, with one panel per order of the samples. Variables: those of lines.gp, and
#
#   panels, panel_title[], gap   gap: distance between panels in px
#   series_panel[]               the panel of a series; 0: all panels
#   series_shift[]               factor on the x of a series, so that points of equal size do not cover each other
#
# The points in the block ring_block have their panel and their shift, too (x, median, panel, shift).
load 'plots/common.gp'
load 'plots/axes.gp'
panel_px = (width - left - right - gap * (panels - 1)) / (1.0 * panels)
set multiplot
do for [p = 1:panels] {
    set lmargin at screen x_at(left + (p - 1) * (panel_px + gap))
    set rmargin at screen x_at(left + (p - 1) * (panel_px + gap) + panel_px)
    set label 499 panel_title[p] at screen x_at(left + (p - 1) * (panel_px + gap)), y_at(top - 10) font 'DejaVu Sans,11'
    set xlabel 'sample size (KiB)'
    if (p == 1) {
        set ylabel 'time per sample' offset character 0.5, 0
    } else { # repeats the scale of the first panel, without numbers
        unset ylabel
        set ytics ()
        do for [i = 1:y_ticks] { set ytics add ('' y_tick_at[i] y_tick_text[i] eq '') }
    }
    here(i) = series_panel[i] == 0 || series_panel[i] == p
    plot for [i = 1:series] data index i - 1 using ($1 * series_shift[i]):(here(i) ? $2 : NaN) with lines ls series_style[i], \
         for [i = 1:series] data index i - 1 using ($1 * series_shift[i]):(here(i) ? $3 : NaN):(0):($4 - $3) \
             with vectors @error_bar lc rgb colour[slot_of_colour(series_style[i])], \
         for [i = 1:series] data index i - 1 using ($1 * series_shift[i]):(here(i) ? $2 : NaN) with points ls series_style[i], \
         for [i = 1:series] data index i - 1 using ($1 * series_shift[i]):(here(i) && series_crossed[i] == 1 ? $2 : NaN) \
             with points pt 1 ps 1.6 * dot lw 1 lc rgb '#000000', \
         for [i = 1:(ring_block > 0)] data index ring_block using ($1 * $4):($3 == p ? $2 : NaN) with points ls 95
    # The title, the legend and the caption are drawn once.
    unset label
    unset arrow
    unset object
}
unset multiplot
