# Time a sample over many epochs, a bar a variant of a device, log y. Needs what loading_cold.gp needs.
load 'plots/loading_cold.gp'
