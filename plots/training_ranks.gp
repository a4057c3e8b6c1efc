# Samples per second of all ranks in training vs. ranks, with ideal scaling, both log.
load 'plots/scaling.gp'
