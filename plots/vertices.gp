# Time per image over the vertices of its class; log y, and log x where they span much.
load 'plots/common.gp'
set xlabel 'vertices'
y_name = 'time per image'
load 'plots/lines.gp'
