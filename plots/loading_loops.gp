# Time per sample over many epochs, one dot per variant and device, log y. Variables: those of
# loading_cold.gp.
load 'plots/loading_cold.gp'
