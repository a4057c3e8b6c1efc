# Items per second, summed over the ranks, vs. number of ranks, with ideal scaling, both log; one panel per kind of scaling. Variables:
# those of axes.gp, y_name, and
#
#   series, series_style[], joined[]                         joined: 1 with a line, 0 points only
#   panels, panel_title[], gap                               gap: distance between panels in px
#   panel_first[], panel_last[]                              the first and the last series of a panel
#   cells, cell_panel[], cell_row[], cell_x[], cell_text[]   the table of efficiencies
#
# Blocks of data: one per series (ranks, items per second, low, high), then the ideal scaling of each series as
# segments (x, y, dx, dy).
load 'plots/common.gp'
load 'plots/axes.gp'
panel_px = (width - left - right - gap * (panels - 1)) / (1.0 * panels)
row_y(row) = height - bottom + 72 + 17 * row # y of a row of the table; columns are below the ticks of the x axis

set multiplot
do for [p = 1:panels] {
    begin = left + (p - 1) * (panel_px + gap)
    set lmargin at screen x_at(begin)
    set rmargin at screen x_at(begin + panel_px)
    set xlabel 'ranks'
    if (p == 1) {
        set ylabel y_name offset character 0.5, 0
        set label 500 'efficiency' at screen x_at(begin - 12), y_at(row_y(0)) right font 'DejaVu Sans:Bold,9.5'
    } else { # repeats the scale of the first panel, without numbers
        unset ylabel
        set ytics ()
        do for [i = 1:y_ticks] { set ytics add ('' y_tick_at[i] y_tick_text[i] eq '') }
    }
    set label 499 panel_title[p] at screen x_at(begin), y_at(top - 16) font 'DejaVu Sans,11'
    do for [i = panel_first[p]:panel_last[p]] {
        y = y_at(row_y(i - panel_first[p] + 1))
        if (joined[i]) { set arrow 500 + i from screen x_at(begin - 50), y to screen x_at(begin - 16), y nohead ls series_style[i] }
        set label 500 + i '' at screen x_at(begin - 33), y point ls series_style[i]
    }
    do for [i = 1:cells] {
        if (cell_panel[i] == p) {
            set label 600 + i cell_text[i] at first cell_x[i], screen y_at(row_y(cell_row[i])) center font 'DejaVu Sans,10'
        }
    }
    plot for [i = panel_first[p]:panel_last[p]] data index series + i - 1 using 1:2:3:4 with vectors nohead lc rgb '#7F7F7F' dt (7, 4) lw 1.3, \
         for [i = panel_first[p]:panel_last[p]] data index i - 1 using 1:(joined[i] ? $2 : 1e300) with lines ls series_style[i], \
         for [i = panel_first[p]:panel_last[p]] data index i - 1 using 1:3:(0):($4 - $3) with vectors @error_bar lc rgb colour[slot_of_colour(series_style[i])], \
         for [i = panel_first[p]:panel_last[p]] data index i - 1 using 1:2 with points ls series_style[i]
    # The title, the legend and the caption are drawn once.
    unset label
    unset arrow
    unset object
}
unset multiplot
