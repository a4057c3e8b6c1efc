# Time an image over its side; log both. Needs besides (lines.gp): ticks, tick_at[], tick_text[].
load 'plots/common.gp'
set xlabel 'side of the image (pixels)'
set logscale x 2
set xtics ()
do for [i = 1:ticks] { set xtics add (tick_text[i] tick_at[i] tick_text[i] eq '') }
load 'plots/lines.gp'
