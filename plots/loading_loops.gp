# Time per sample over many epochs, one dot per variant and device, log y. Variables: those that loading_cold.gp
# lists.
load 'plots/loading_cold.gp'
