# Training throughput vs. number of GPUs, DeiT-Base. Variables and data: those of training.gp.
load 'plots/training.gp'
