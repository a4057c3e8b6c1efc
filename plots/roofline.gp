# Shares of the roofline: one bar per variant, grouped by device.
x_name = 'share of the roofline (%)'
x_high = 100
load 'plots/bars.gp'
