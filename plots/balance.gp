# Speed of uneven ranks as a share of the sum of their speeds when each runs alone: one bar per value of --balance.
x_name = 'share of the sum of the speeds of the ranks alone (%)'
load 'plots/bars.gp'
