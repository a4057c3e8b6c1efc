# Test error vs. epoch, one line per variant, log y. Variables: those of lines.gp, and x_name.
load 'plots/common.gp'
set xlabel x_name
load 'plots/lines.gp'
