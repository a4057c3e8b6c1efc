# Time per image by stage: noise, vertices and painting as parts of a bar, with their times. Variables: bars, stages,
# stage_slot[], device_lines. Blocks of data: one per stage (x, from %, to %, text), the texts next to thin parts
# (x, height %, text), the totals (x, text), the names (x, name, batch), and device_lines blocks with the lines of
# the devices' names (x, text).
load 'plots/common.gp'
set xrange [0.4:bars + 0.6]
set yrange [0:112]
set ytics 0, 20, 100
set ylabel 'share of time (%)' offset character 0.5, 0
unset xtics
box = 0.56
plot for [i = 1:stages] data index i - 1 using 1:2:($1 - box / 2):($1 + box / 2):2:3 \
         with boxxyerror fs solid 1 border lc rgb '#000000' fc rgb colour[stage_slot[i]], \
     for [i = 1:stages] data index i - 1 using 1:(($2 + $3) / 2):4 \
         with labels font 'DejaVu Sans,10' tc rgb (stage_slot[i] == 6 ? '#FFFFFF' : '#000001'), \
     data index stages using ($1 + box / 2):2:3 with labels left font 'DejaVu Sans,9' offset character 0.5, 0, \
     data index stages + 1 using 1:(100):2 with labels font 'DejaVu Sans:Bold,10.5' offset 0, character 0.7, \
     data index stages + 2 using 1:(0):2 with labels font 'DejaVu Sans:Bold,11' offset 0, character -1, \
     data index stages + 2 using 1:(0):3 with labels font 'DejaVu Sans,9.5' offset 0, character -2.1, \
     for [i = 1:device_lines] data index stages + 2 + i using 1:(0):2 with labels font 'DejaVu Sans,10' \
         offset 0, character -2.4 - 1.2 * i
