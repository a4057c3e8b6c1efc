# Time an image over the images a batch; log2 x, log y.
load 'plots/common.gp'
set xlabel 'images a batch'
y_name = 'time an image'
load 'plots/lines.gp'
