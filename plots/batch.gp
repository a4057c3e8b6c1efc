# Time per image over the images per batch; log2 x, log y.
load 'plots/common.gp'
set xlabel 'images per batch'
y_name = 'time per image'
load 'plots/lines.gp'
