# Samples per second of all ranks in loading vs. ranks, with ideal scaling, both log.
load 'plots/scaling.gp'
