# Share of the highest rate that the training step allows (%) vs. step time, log x. The first series is that limit, 100 %.
load 'plots/common.gp'
set xlabel 'training step time (ms)'
set ylabel 'share of the limit (%)' offset character 0.5, 0
load 'plots/axes.gp'
plot for [i = 1:series] data index i - 1 using 1:2 with lines ls series_style[i], \
     for [i = 2:series] data index i - 1 using 1:2 with points ls series_style[i]
