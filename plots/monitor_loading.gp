# GPU and CPU load during loading vs. the time since the timed runs began: one panel per quantity, one line per
# loader. Variables: panels, sampled, panel_title[], panel_high[], series, series_style[], x_high. The first
# `sampled` panels have points. The lines of other panels are means over the whole run. Blocks of data: one per
# series, with time and one column per panel.
load 'plots/common.gp'
gap = 16
tall = (height - top - bottom) / (1.0 * panels)
set xrange [0:x_high]
set multiplot
do for [p = 1:panels] {
    set tmargin at screen y_at(top + (p - 1) * tall)
    set bmargin at screen y_at(top + p * tall - gap)
    set yrange [0:panel_high[p]]
    set ytics nomirror panel_high[p] / 2.0
    set label 2 panel_title[p] at screen x_at(left - 58), y_at(top + (p - 0.5) * tall - gap / 2) center rotate by 90
    numbers = p == panels ? '%g' : ''
    below = p == panels ? 'time since the start of the timed runs (s)' : ''
    set format x numbers
    set xlabel below
    plot for [i = 1:series] data index i - 1 using 1:(column(p + 1)) with lines ls series_style[i], \
         for [i = 1:series] data index i - 1 using 1:(p <= sampled ? column(p + 1) : 1e300) with points ls series_style[i]
    # The title, the legend and the caption are drawn once.
    unset label 1
    do for [i = 1:captions] { unset label 100 + i }
    do for [i = 1:legends] { unset label 200 + i; unset label 300 + i; unset arrow 200 + i; unset object 200 + i }
}
unset multiplot
