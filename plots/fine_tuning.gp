# Wrong answers over samples seen, log x, a line a size of the training set and a beginning, log y. Needs what
# lines.gp needs, and x_name.
load 'plots/common.gp'
set xlabel x_name
load 'plots/lines.gp'
