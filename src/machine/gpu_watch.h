/* Watches a GPU while a variant's timed runs use it: clocks, power, and what held the clocks down.
 *
 * A thread of its own asks NVML every 50 ms, so runs neither wait for it nor differ in length. The calls that
 * it repeats take about a microsecond on an H200. */
#ifndef FDSL_MACHINE_GPU_WATCH_H
#define FDSL_MACHINE_GPU_WATCH_H

#include <stdint.h>

#include "core/status.h"

/* Readings taken while phase_now() was PHASE_TIMED. */
struct gpu_watched {
    int sm_clock_mhz, mem_clock_mhz; /* medians; negative where unknown */
    double power_w; /* mean of the whole board; NaN where unknown, or where the runs were too short for NVML,
                       which counts energy every 100 ms */
    uint64_t throttle_reasons; /* NVML's bits; 0: none */
};

struct gpu_watch;

/* Starts watching the GPU at this PCI bus id ("0000:01:00.0"); does nothing, and `*watch` is NULL, where it
 * is empty or there is no NVML. The caller ends it with gpu_watch_end(). STATUS_FAILED where memory or
 * threads run out. */
enum status gpu_watch_begin(const char *pci_bus_id, struct gpu_watch **watch);

/* Right after the timed runs, in their phase still: stops watching, fills `*watched` and frees the watch.
 * NULL is allowed: then nothing is known. */
void gpu_watch_end(struct gpu_watch *watch, struct gpu_watched *watched);

#endif
