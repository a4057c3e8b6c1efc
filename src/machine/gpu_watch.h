/* Watches a GPU during a variant's timed runs: clocks, power, and reasons for throttled clocks.
 *
 * A separate thread queries NVML every 50 ms, so runs do not wait for it. The repeated calls take about 1 us
 * each on an H200. */
#ifndef FDSL_MACHINE_GPU_WATCH_H
#define FDSL_MACHINE_GPU_WATCH_H

#include <stdint.h>

#include "core/status.h"

/* Readings taken while phase_now() was PHASE_TIMED. */
struct gpu_watched {
    int sm_clock_mhz, mem_clock_mhz; /* medians; negative if unknown */
    double power_w; /* mean of the whole board; NaN if unknown or if the runs were too short for NVML, which
                       updates its energy counter every 100 ms */
    uint64_t throttle_reasons; /* NVML's bits, ORed over all readings; 0: none */
};

struct gpu_watch;

/* Starts watching the GPU with this PCI bus id ("0000:01:00.0"). If the id is empty or NVML cannot read this
 * GPU, `*watch` becomes NULL. The caller ends the watch with gpu_watch_end(). STATUS_EXHAUSTED if
 * memory runs out, STATUS_FAILED if the thread cannot be started. */
enum status gpu_watch_begin(const char *pci_bus_id, struct gpu_watch **watch);

/* Stops watching, fills `*watched` and frees the watch. Call right after the timed runs, while phase_now() is
 * still PHASE_TIMED. If `watch` is NULL, all values are unknown. */
void gpu_watch_end(struct gpu_watch *watch, struct gpu_watched *watched);

#endif
