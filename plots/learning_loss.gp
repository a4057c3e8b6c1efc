# Training loss vs. epoch, one line per variant and device, log y. Variables: those that lines.gp lists, and x_name.
load 'plots/common.gp'
set xlabel x_name
load 'plots/lines.gp'
