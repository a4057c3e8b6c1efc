/* Watches for causes of slow runs on a GPU: other processes before the timed runs; clocks, power, and reasons
 * for throttled clocks during them.
 *
 * A separate thread queries NVML every 50 ms, so runs do not wait for it. The repeated calls take about 1 us
 * each on an H200. */
#ifndef FDSL_MACHINE_GPU_WATCH_H
#define FDSL_MACHINE_GPU_WATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "machine/nvml.h"

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

/* ---- Other processes ---- */

#define GPU_PROCESSES_MAX 8   /* processes that are named */
#define GPU_ID_BYTES      32  /* "0000:01:00.0" */
#define COMM_LOCAL_IDS    256 /* with more ranks on a machine, each one names the processes */

enum gpu_others_action { GPU_OTHERS_WARN, GPU_OTHERS_REFUSE, GPU_OTHERS_IGNORE };

/* The words of --gpu-others, NULL-terminated. */
extern const char *const gpu_others_words[];

struct gpu_others {
    bool known; /* NVML listed them */
    size_t count;
    struct gpu_process processes[GPU_PROCESSES_MAX];
};

/* Collective: lists the processes that use a GPU besides this program, and names them in one line on stderr
 * (GPU_OTHERS_WARN), or in the message of STATUS_UNAVAILABLE (GPU_OTHERS_REFUSE). Ranks that share a GPU
 * print one line. `device` is negative for a rank without a GPU. Call before any rank uses its GPU: in a
 * container, NVML may list this process under a number that the process does not know. */
enum status gpu_others_look(int device, enum gpu_others_action action, struct gpu_others *others);

/* Writes "pid 12 (python3, 1.5 GB), pid 13 (name unknown) and 2 more". `count` may exceed the number of
 * `processes`, which is at most GPU_PROCESSES_MAX. */
void gpu_others_text(const struct gpu_process *processes, size_t count, char *text, size_t size);

#endif
