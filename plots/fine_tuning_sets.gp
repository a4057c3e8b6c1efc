# Test error after fine-tuning, log y: one group per set of images of the pre-training, one dot per size of the training set.
# Variables: those that dots.gp lists.
load 'plots/common.gp'
load 'plots/dots.gp'
plot @grouped_dots
