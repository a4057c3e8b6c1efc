# Test error vs. training time, one line per variant and device, both log. Variables: those that lines.gp lists, and x_name.
load 'plots/common.gp'
set xlabel x_name
load 'plots/lines.gp'
