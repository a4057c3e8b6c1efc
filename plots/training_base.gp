# Images per second during training vs. number of GPUs, vit-base.
load 'plots/pretraining_tiny.gp'
