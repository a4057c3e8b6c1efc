/* Other processes on the GPU that a run is timed on. */
#ifndef FDSL_RUN_GPU_OTHERS_H
#define FDSL_RUN_GPU_OTHERS_H

#include <stdbool.h>
#include <stddef.h>

#include "core/status.h"
#include "machine/nvml.h"

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
