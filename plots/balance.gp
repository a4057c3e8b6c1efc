# Speed of uneven ranks together, divided by the sum of the speeds at which each rank runs alone: one bar
# per value of --balance.
x_name = 'share of the sum of the speeds of the ranks alone (%)'
load 'plots/bars.gp'
