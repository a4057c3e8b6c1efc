# Images per second vs. step time, both log. The first series, a gray line, is the upper limit: batch size / step time.
load 'plots/common.gp'
set xlabel 'training step time (ms)'
set ylabel 'images per second' offset character 0.5, 0
load 'plots/axes.gp'
plot for [i = 1:series] data index i - 1 using 1:2 with lines ls series_style[i], \
     for [i = 2:series] data index i - 1 using 1:2 with points ls series_style[i]
