# Bubble of a pipeline vs. micro-batches per step, log x; x ticks are the measured numbers. Variables: those that
# lines.gp lists, and percent_high.
load 'plots/common.gp'
set xlabel 'micro-batches per step'
set yrange [0:percent_high]
y_name = 'bubble: share of a step in which a stage waits (%)'
load 'plots/lines.gp'
