# Time an image over the vertices of its class; log y.
load 'plots/common.gp'
set xlabel 'vertices'
set xtics 200
load 'plots/lines.gp'
