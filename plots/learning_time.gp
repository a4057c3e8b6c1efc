# Wrong answers over seconds of training, log x, a line a variant, log y. Needs what lines.gp needs, and x_name.
load 'plots/common.gp'
set xlabel x_name
load 'plots/lines.gp'
