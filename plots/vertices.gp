# Time per image vs. vertices per orbit; log y, and log x for a wide range.
load 'plots/common.gp'
set xlabel 'vertices'
y_name = 'time per image'
load 'plots/lines.gp'
