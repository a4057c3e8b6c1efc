# Time per image vs. vertices per orbit; log y, and log x if the range is wide.
load 'plots/common.gp'
set xlabel 'vertices'
y_name = 'time per image'
load 'plots/lines.gp'
