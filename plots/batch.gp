# Time an image over the images a batch; log2 x, log y.
load 'plots/common.gp'
set xlabel 'images a batch'
set logscale x 2
set xtics 2
load 'plots/lines.gp'
