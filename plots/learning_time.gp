# Test error vs. training time, one line per variant, both log. Variables: those of lines.gp, and x_name.
load 'plots/common.gp'
set xlabel x_name
load 'plots/lines.gp'
