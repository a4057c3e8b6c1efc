# Images per second that loaders decode and resize: one bar per loader, device and decoder.
x_name = 'thousands of images per second'
load 'plots/bars.gp'
