# Time per sample over many epochs, a dot for each variant of a device, log y. Needs what loading_cold.gp needs.
load 'plots/loading_cold.gp'
