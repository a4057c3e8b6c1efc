# Files and shards of one set of clips: GPU and CPU load vs. the time since the timed runs began. Variables: those that
# monitor_loading.gp lists.
load 'plots/monitor_loading.gp'
