# Speed of uneven ranks together / sum of their speeds when each runs alone: one bar per value of --balance.
x_name = 'share of the sum of the speeds of the ranks alone (%)'
load 'plots/bars.gp'
