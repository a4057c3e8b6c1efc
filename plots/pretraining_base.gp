# Images per second during training vs. number of GPUs, DeiT-Base.
load 'plots/pretraining_tiny.gp'
