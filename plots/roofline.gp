# Arithmetic a second over arithmetic a byte, under the ceilings of each device, log both.
# Needs besides (common.gp, axes.gp): series, series_style[], roofs, roof_dash[]; slopes, slope_rate[] (bytes a second),
# slope_text[]. Blocks of data: one a series (operations a byte, operations a second), then one a ceiling (the same),
# then the names of the ceilings (x, y, words, 1 above the line or -1 below).
load 'plots/common.gp'
load 'plots/axes.gp'
set xlabel 'arithmetic intensity (operations a byte of finished image)'
set ylabel 'operations a second' offset character 0.5, 0
# A ceiling of memory rises one decade a decade; its name lies along it, of the highest above, of others below.
decade_x = (width - left - right) / log10(x_high / x_low)
decade_y = (height - top - bottom) / log10(y_high / y_low)
rise = atan2(decade_y, decade_x) * 180 / pi
do for [i = 1:slopes] {
    set label 500 + i slope_text[i] at first 1.25 * x_low, slope_rate[i] * 1.25 * x_low rotate by rise font 'DejaVu Sans,10' \
        offset character (i == 1 ? 0 : 0.8), character (i == 1 ? 0.8 : -0.8)
}
plot for [i = 1:roofs] data index series + i - 1 using 1:2 with lines lc rgb '#000000' lw 1.8 dt roof_dash[i], \
     for [i = 1:series] data index i - 1 using 1:2 with points ls series_style[i] ps 1.3 * dot, \
     for [side = -1:1:2] data index series + roofs using 1:($4 == side ? $2 : 1e300):3 with labels right font 'DejaVu Sans,10' \
         offset 0, character 0.6 * side
