# Training throughput vs. number of GPUs, DeiT-Tiny. Variables and data: those of training.gp.
load 'plots/training.gp'
