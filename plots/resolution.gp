# Time an image over its side; log both.
load 'plots/common.gp'
set xlabel 'side of the image (pixels)'
y_name = 'time an image'
load 'plots/lines.gp'
