# Bars, one per row, grouped under headings; the scripts of several figures load this file. Variables: x_name, x_high,
# y_low, y_high, kinds, kind_slot[], and inside: a bar of at least this percentage has its text inside the bar. Blocks
# of data: one per kind of bar (share in %, y, text), then the names of bars (y, name) and the headings (y, text).
load 'plots/common.gp'
set xrange [0:x_high]
set xtics 0, (x_high > 20 ? 20 * ceil(x_high / 140.0) : x_high > 2 ? 2 : 0.2)
set xlabel x_name
set yrange [y_low:y_high]
unset ytics
set format x '%g'
array ink[9] = ['#FFFFFF', '#000001', '#FFFFFF', '#000001', '#FFFFFF', '#FFFFFF', '#000001', '#FFFFFF', '#000001'] # on colour[]
box = 0.36
plot for [i = 1:kinds] data index i - 1 using 1:2:(0):1:($2 - box):($2 + box) \
         with boxxyerror fs solid 1 border lc rgb '#000000' fc rgb colour[kind_slot[i]], \
     for [i = 1:kinds] data index i - 1 using ($1 < inside ? $1 : 1e300):2:3 \
         with labels left font 'DejaVu Sans,9.5' offset character 0.6, 0, \
     for [i = 1:kinds] data index i - 1 using ($1 < inside ? 1e300 : $1):2:3 \
         with labels right font 'DejaVu Sans,9.5' tc rgb ink[kind_slot[i]] offset character -0.6, 0, \
     data index kinds using (0):1:2 with labels right font 'DejaVu Sans:Bold,10' offset character -0.6, 0, \
     data index kinds + 1 using (0):1:2 with labels left font 'DejaVu Sans:Bold,10.5' offset character 0.3, 0
