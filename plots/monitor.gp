# GPU and CPU load during a run: panels with a common time axis, and phases as background bands. Variables:
#
#   panels, panel_title[], panel_high[], x_high
#   panel_from[], panel_to[]                   the lines of a panel, counted from 1
#   line_block[], line_column[], line_style[]  the block, column and style of each line
#   names_first[], names_second[]              the names of the solid and of the dashed lines of a panel
#   key_first, key_second                      the styles of these names
#   bands, band_from[], band_to[], band_slot[]
#   phases, phase_name[], phase_slot[], phase_x[], phase_y[]  the key of the bands; x and y in px
#   gpus, gpu_name[], gpu_style[], gpu_x[], gpu_y[]           the key of the colours; 0: there is one GPU
#   series                                     the number of blocks with samples
#
# Blocks of data: the samples of each GPU (time, columns), then the names of variants (x, name) and of phases (x, name)
# for the strip at the top.
load 'plots/common.gp'
array shade[7] = ['#7F7F7F', '#F0E442', '#E69F00', '#0072B2', '#009E73', '#CC79A7', '#FFFFFF']
array strength[7] = [0.25, 0.45, 0.45, 0.13, 0.30, 0.30, 0]
strip = 40
gap = 12
tall = (height - top - bottom - strip) / (1.0 * panels)

do for [i = 1:phases] {
    set object 400 + i rectangle from screen x_at(phase_x[i]), y_at(phase_y[i] - 6) to screen x_at(phase_x[i] + 18), y_at(phase_y[i] + 6) \
        fc rgb shade[phase_slot[i]] fs transparent solid strength[phase_slot[i]] border lc rgb '#000000'
    set label 400 + i phase_name[i] at screen x_at(phase_x[i] + 24), y_at(phase_y[i]) font 'DejaVu Sans,10'
}
do for [i = 1:gpus] {
    set arrow 600 + i from screen x_at(gpu_x[i]), y_at(gpu_y[i]) to screen x_at(gpu_x[i] + 18), y_at(gpu_y[i]) nohead ls gpu_style[i]
    set label 600 + i gpu_name[i] at screen x_at(gpu_x[i] + 24), y_at(gpu_y[i]) font 'DejaVu Sans,10'
}

set multiplot
set xrange [0:x_high]
do for [i = 1:bands] {
    set object 1000 + i rectangle from first band_from[i], graph 0 to first band_to[i], graph 1 behind \
        fc rgb shade[band_slot[i]] fs transparent solid strength[band_slot[i]] noborder
}

# The strip at the top: variant and phase.
set tmargin at screen y_at(top)
set bmargin at screen y_at(top + strip - gap / 2)
set yrange [0:1]
unset border
unset tics
plot data index series using 1:(0.72):2 with labels font 'DejaVu Sans:Bold,10', \
     data index series + 1 using 1:(0.26):2 with labels font 'DejaVu Sans,9'
do for [i = 1:phases] { unset label 400 + i; unset object 400 + i }
do for [i = 1:gpus] { unset label 600 + i; unset arrow 600 + i }
unset label 1
do for [i = 1:captions] { unset label 100 + i }

set border 3
set tics nomirror out
do for [i = 1:panels] {
    set tmargin at screen y_at(top + strip + (i - 1) * tall)
    set bmargin at screen y_at(top + strip + i * tall - gap)
    set yrange [0:panel_high[i]]
    set ytics nomirror panel_high[i] / 2.0 font 'DejaVu Sans,9.5'
    set label 1 panel_title[i] at screen x_at(left - 56), y_at(top + strip + (i - 0.5) * tall - gap / 2) center rotate by 90 \
        font 'DejaVu Sans,10'
    middle = top + strip + (i - 0.5) * tall - gap / 2
    do for [j = 1:2] {
        y = middle + (j == 1 ? -9 : 9)
        name = j == 1 ? names_first[i] : names_second[i]
        set label 1 + j name at screen x_at(width - right + 44), y_at(y) font 'DejaVu Sans,10'
        unset arrow j
        if (name ne '') {
            set arrow j from screen x_at(width - right + 12), y_at(y) to screen x_at(width - right + 38), y_at(y) nohead ls (j == 1 ? key_first : key_second)
        }
    }
    numbers = i == panels ? '%g' : ''
    below = i == panels ? 'time (s)' : ''
    set format x numbers
    set xlabel below
    set xtics nomirror autofreq
    plot for [k = panel_from[i]:panel_to[i]] data index line_block[k] using 1:(column(line_column[k])) with lines ls line_style[k]
}
unset multiplot
