/* What machine, build and job a measurement was made on. */
#ifndef FDSL_CORE_ENV_H
#define FDSL_CORE_ENV_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define ENV_TIME_MAX 32

struct env {
    char time_utc[ENV_TIME_MAX]; /* ISO 8601, seconds: 2026-01-31T12:34:56Z; the start of the program */
    char host[128];
    char revision[64]; /* git describe at build time, "-dirty" where the tree was; "unknown" without git */
    char job_id[64];   /* Slurm: "123", or "123_4" for task 4 of array job 123; empty outside */

    /* The CPU */
    char cpu_model[128];
    int cores, threads;  /* physical cores and hardware threads of this machine; 0 where unknown */
    int allowed_threads; /* hardware threads that this process may run on (affinity, cgroup masks) */
    char affinity[256];  /* these, as a list: "0-3,8" */
    char simd[16];       /* the widest vector set: "avx512", "avx2", "sse2" */
    uint64_t memory_bytes, memory_available_bytes;
    char kernel[128], compiler[128];
};

/* A CUDA device as NVML sees it at one moment; a field is negative or empty where NVML does not tell. */
struct gpu_state {
    int sm_clock_mhz, sm_clock_max_mhz, memory_clock_mhz, temperature_c;
    double power_w;
    int utilisation_percent;                      /* of a past period: the time that any kernel ran */
    int64_t memory_used_bytes, memory_free_bytes; /* by and for all processes */
    uint64_t throttle_reasons;                    /* NVML's bits; 0: none */
};

/* Bytes on its PCIe bus, towards the device and away from it; negative where NVML does not tell. */
struct gpu_traffic {
    double rx_bytes_per_s, tx_bytes_per_s;
};

FDSL_C_BEGIN

/* The time now, as env.time_utc has it. */
void env_time(char text[ENV_TIME_MAX]);

/* Fills what can be known; what cannot stays empty or 0. hwloc where built in, else /proc and sysconf. */
void env_capture(struct env *env);

/* 32-bit vector operations a second that `threads` cores of this CPU can start at most: lanes of the widest
 * vector set, two ports, the highest clock that the system tells; 0 where it tells none. */
double env_cpu_peak_operations_per_s(const struct env *env, int threads);

/* Memory that a new allocation can count on, now: MemAvailable, or the cgroup's head-room if smaller, over
 * the number of processes that share it. */
uint64_t env_memory_available_bytes(void);

/* So many processes of this machine, this one among them, are about to take memory alike. */
void env_share_memory(int processes);

/* The least head-room under the memory limits (cgroup v2) of `group` ("/job_7/step_0") and the groups above
 * it, read under `root` (/sys/fs/cgroup); file cache counts as free. UINT64_MAX where none has a limit. */
uint64_t env_cgroup_headroom_bytes(const char *root, const char *group);

/* NVML, opened with dlopen on first use. STATUS_UNAVAILABLE with the reason where there is none. `pci_bus_id`
 * ("0000:01:00.0") names the device, as CUDA numbers may differ from NVML's. Any thread may ask. */
enum status nvml_gpu_state(const char *pci_bus_id, struct gpu_state *state);

/* The same for the traffic, on its own as NVML counts for 20 ms in each direction before it answers. */
enum status nvml_gpu_traffic(const char *pci_bus_id, struct gpu_traffic *traffic);

/* The driver's version ("580.159.04") into `text`, empty without NVML. */
void nvml_driver_version(char *text, size_t size);

/* The reasons among `bits` that slow clocks down under load, in words: "power cap, thermal"; empty when
 * there is none (idle and user-set clocks do not count). Returns `text`. */
const char *nvml_throttle_words(uint64_t bits, char *text, size_t size);

FDSL_C_END

#endif
