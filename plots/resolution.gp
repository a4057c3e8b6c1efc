# Time per image vs. resolution, both log.
load 'plots/common.gp'
set xlabel 'resolution (pixels per side)'
y_name = 'time per image'
load 'plots/lines.gp'
