# Speed of steps on embedding sets as a share of the measured bandwidth: one bar per variant and device, grouped by steps.
x_name = 'share of the measured bandwidth (%)'
set arrow 1 from 100, graph 0 to 100, graph 1 nohead back lw 1.4 dt (6, 4) lc rgb '#000000'
load 'plots/bars.gp'
