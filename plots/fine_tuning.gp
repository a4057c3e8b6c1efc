# Test error vs. samples seen, both log; one line per training-set size and initialisation. Variables: those
# that lines.gp lists, and x_name.
load 'plots/common.gp'
set xlabel x_name
load 'plots/lines.gp'
