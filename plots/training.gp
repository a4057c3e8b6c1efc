# Images per second during training vs. number of GPUs, vit-tiny; whiskers show the slowest and the fastest epoch.
load 'plots/pretraining_tiny.gp'
