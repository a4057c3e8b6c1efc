# Time per image over its side; log both.
load 'plots/common.gp'
set xlabel 'side of the image (pixels)'
y_name = 'time per image'
load 'plots/lines.gp'
