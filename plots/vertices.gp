# Time an image over the vertices of its class; log y, and log x where they span much.
load 'plots/common.gp'
set xlabel 'vertices'
load 'plots/lines.gp'
