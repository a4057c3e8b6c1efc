# Settings that all figures share: terminal, fonts, line styles, and positions of title, legend and caption. The script
# of each figure loads this file first. scripts/figures/draw.py runs that script and defines
#
#   format, output            'png', 'svg' or 'pdf', and the file to write
#   data                      the data file: blocks of tab-separated columns, separated by two blank lines
#   width, height             of the figure in px, at 96 px per inch
#   left, right, top, bottom  the margins of the plot in px
#   title                     a line above the plot
#   captions, caption[]       lines below the plot
#   legends, legend_text[], legend_style[], legend_y[]
#                             rows to the right of the plot, with y in px from the top. Styles: n > 0 is line style n with
#                             its point, n + 0.1 only the point, n < 0 a box in colour[-n], 0 a heading, 0.5 a note below a
#                             heading, 0.75 a note below a series
#   ring_block                the block of data with the unsettled points (x, y), whose median is not precise enough; 0: none
#
# and the variables that the figure's script lists. To draw a figure manually: scripts/figures/draw.py --commands NAME.

if (format eq 'png') {
    set terminal pngcairo size 2 * width, 2 * height font 'DejaVu Sans,12' fontscale 1.5 linewidth 2 pointscale 2 dashlength 1.8 noenhanced
}
if (format eq 'svg') {
    set terminal svg size width, height font 'DejaVu Sans,12' linewidth 1 name id background rgb 'white' noenhanced
}
if (format eq 'pdf') {
    set terminal pdfcairo size width / 96.0 in, height / 96.0 in font 'DejaVu Sans,12' fontscale 0.5625 linewidth 1.4 pointscale 0.75 dashlength 1.4 noenhanced
}
set encoding utf8
set output output
set datafile separator tab
set datafile missing ''

x_at(px) = px / (1.0 * width)
y_at(px) = 1 - px / (1.0 * height)

# --- Line styles: 10 * group + slot --------------------------------------------------------------------------------
# The slot represents the variant and selects colour and point shape. The group usually represents the device and
# selects dashes. Groups 1 to 4 are for devices with rows of fdsl-bench, and have filled points. The other groups have
# open points: 5 is for published points, 6 for the published code on an H200, and 8 for the published code on a device
# with rows. In figures of loading, 5 and 6 are for shuffled samples or a cold page cache. In break_even, the group
# represents the page cache or decoding. Slots 1 to 7 have colours of Okabe and Ito; 8 and 9 are gray. No two slots have
# both the same gray level and the same point shape.
# Styles 71 to 74 are for published training, with one point shape per model: gray if images are read, blue if they
# are generated.
array colour[9] = ['#000000', '#E69F00', '#D55E00', '#CC79A7', '#009E73', '#0072B2', '#56B4E9', '#7F7F7F', '#B4B4B4']
array filled[9] = [5, 9, 7, 2, 11, 13, 15, 7, 5]
dot = format eq 'svg' ? 0.6 : 1.0 # point sizes differ between terminals
array hollow[9] = [4, 8, 6, 2, 10, 12, 14, 6, 4]
do for [slot = 1:9] {
    set linetype 100 + slot lc rgb colour[slot]
    set style line 10 + slot lc rgb colour[slot] lw 2.0 dt solid pt filled[slot] ps 1.05 * dot
    set style line 20 + slot lc rgb colour[slot] lw 1.6 dt (14, 5) pt filled[slot] ps 0.84 * dot
    set style line 30 + slot lc rgb colour[slot] lw 1.6 dt (12, 4, 2, 4) pt filled[slot] ps 0.84 * dot
    set style line 40 + slot lc rgb colour[slot] lw 1.6 dt (8, 3, 2, 3, 2, 3) pt filled[slot] ps 0.84 * dot
    set style line 50 + slot lc rgb colour[slot] lw 1.4 dt (5, 4) pt hollow[slot] ps 1.19 * dot
    set style line 60 + slot lc rgb colour[slot] lw 1.4 dt (2, 3) pt hollow[slot] ps 1.19 * dot
    set style line 80 + slot lc rgb colour[slot] lw 1.0 dt solid pt hollow[slot] ps 1.19 * dot
}
# Slot 0 is slot 2 with an open point. Styles above 90 are gray, except for those of break_even, which has no whiskers.
slot_of_colour(style) = style > 90 ? 8 : int(style) % 10 ? int(style) % 10 : 2
set style line 10 lc rgb colour[2] lw 2.0 dt solid pt hollow[2] ps 1.19 * dot
set style line 20 lc rgb colour[2] lw 1.6 dt (14, 5) pt hollow[2] ps 0.95 * dot
set style line 30 lc rgb colour[2] lw 1.6 dt (12, 4, 2, 4) pt hollow[2] ps 0.95 * dot
set style line 40 lc rgb colour[2] lw 1.6 dt (8, 3, 2, 3, 2, 3) pt hollow[2] ps 0.95 * dot
set style line 71 lc rgb colour[8] lw 1.4 dt (5, 4) pt 4 ps 1.19 * dot
set style line 72 lc rgb colour[6] lw 1.4 dt (5, 4) pt 4 ps 1.19 * dot
set style line 73 lc rgb colour[8] lw 1.4 dt (2, 3) pt 12 ps 1.19 * dot
set style line 74 lc rgb colour[6] lw 1.4 dt (2, 3) pt 12 ps 1.19 * dot
# Styles 91 and 92 are for memcpy in figures of loading, on the first and on the second device. break_even uses 91
# for the limit of the step, and the figures of pre-training use it for a constant batch.
set style line 91 lc rgb '#7F7F7F' lw 1.6 dt (7, 4) pt 1 ps 1.2 * dot
set style line 92 lc rgb '#7F7F7F' lw 1.6 dt (2, 4) pt 1 ps 1.2 * dot
# Styles 93 and 94 are only for break_even, which has more sources than there are slots. Style 95 is a ring around an
# unsettled point.
set style line 93 lc rgb '#882255' lw 1.6 dt (14, 5) pt 3 ps 1.1 * dot
set style line 94 lc rgb '#999933' lw 2.0 dt solid pt 12 ps 1.1 * dot
set style line 95 lc rgb '#D55E00' lw 1.2 pt 6 ps 2.4 * dot

# --- Frame, title, legend, caption ---------------------------------------------------------------------------------
set lmargin at screen x_at(left)
set rmargin at screen x_at(width - right)
set tmargin at screen y_at(top)
set bmargin at screen y_at(height - bottom)
set border 3 lw 1
set tics nomirror out scale 0.7, 0.35
unset key
unset grid

set label 1 title at screen x_at(16), y_at(22) font 'DejaVu Sans:Bold,13'
do for [i = 1:captions] {
    set label 100 + i caption[i] at screen x_at(16), y_at(height - 12 - 15 * (captions - i)) font 'DejaVu Sans,9.5'
}

legend_x = width - right + 24
# Error bars are drawn by `with vectors @error_bar`, using x:low:(0):(high - low), because the style yerrorbars
# paints a white disc first.
error_bar = 'heads nofilled size screen x_at(3), 90 lw 1.3'

do for [i = 1:legends] {
    style = legend_style[i]
    if (style == 0) {
        set label 200 + i legend_text[i] at screen x_at(legend_x), y_at(legend_y[i]) font 'DejaVu Sans:Bold,10.5'
    } else { if (style < 1 && style > 0) {
        set label 200 + i legend_text[i] at screen x_at(legend_x + (style == 0.5 ? 0 : 42)), y_at(legend_y[i]) font 'DejaVu Sans,10'
    } else {
        set label 200 + i legend_text[i] at screen x_at(legend_x + 42), y_at(legend_y[i]) font 'DejaVu Sans,11'
        if (style > 0 && style - int(style) < 0.05) {
            set arrow 200 + i from screen x_at(legend_x), y_at(legend_y[i]) to screen x_at(legend_x + 34), y_at(legend_y[i]) \
                nohead ls style
        }
        if (style > 0) {
            set label 300 + i '' at screen x_at(legend_x + 17), y_at(legend_y[i]) point ls int(style)
        } else {
            set object 200 + i rectangle from screen x_at(legend_x + 4), y_at(legend_y[i] - 6) \
                to screen x_at(legend_x + 30), y_at(legend_y[i] + 6) fs solid 1 border lc rgb '#000000' fc rgb colour[-style]
        }
    } }
}
