# Training: samples per second, summed over the ranks, vs. number of ranks, with ideal scaling, both log.
load 'plots/scaling.gp'
