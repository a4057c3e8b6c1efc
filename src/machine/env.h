/* What machine, build and job a measurement was made on. */
#ifndef FDSL_MACHINE_ENV_H
#define FDSL_MACHINE_ENV_H

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
    int allowed_cores;   /* physical cores with at least one of them; 0 where unknown */
    double max_clock_hz; /* of the fastest core with boost; 0 where no driver tells: a virtual machine, as a
                            rule */
    char affinity[256];  /* these, as a list: "0-3,8" */
    char simd[16];       /* the widest vector set: "avx512", "avx2", "sse2" */
    uint64_t memory_bytes, memory_available_bytes;
    char kernel[128], compiler[128];
};

#define ENV_THREADS_MAX 8192 /* the most that Linux can be configured for on x86-64 */

FDSL_C_BEGIN

/* The time now, as env.time_utc has it. */
void env_time(char text[ENV_TIME_MAX]);

/* Fills what can be known; what cannot stays empty or 0. hwloc where built in, else /proc and sysconf. */
void env_capture(struct env *env);

/* The number of CPU threads that OMP_NUM_THREADS asks for: the default of --threads. Of a list ("4,2") the
 * first number counts; the others are for nested levels. 0 if the variable is unset or empty; also 0, after a
 * warning, if it holds anything else. */
uint64_t env_openmp_threads(void);

/* The highest clock of any core by the frequency drivers' files under `root` (/sys/devices/system/cpu); 0
 * where a core has none, or one of a driver that leaves out boost. */
double env_max_clock_hz(const char *root);

/* Memory that a new allocation can count on, now: MemAvailable, or the cgroup's head-room if smaller, over
 * the number of processes that share it. */
uint64_t env_memory_available_bytes(void);

/* Checks that a new allocation of `bytes` for `what` ("the batch") can be had. STATUS_USAGE names both sizes
 * and the `remedy` ("lower --batch"). STATUS_OK where the available memory is unknown. */
enum status env_check_memory(uint64_t bytes, const char *what, const char *remedy);

/* So many processes of this machine, this one among them, are about to take memory alike. */
void env_share_memory(int processes);

/* The least head-room under the memory limits (cgroup v2) of `group` ("/job_7/step_0") and the groups above
 * it, read under `root` (/sys/fs/cgroup); file cache counts as free. UINT64_MAX where none has a limit. */
uint64_t env_cgroup_headroom_bytes(const char *root, const char *group);

FDSL_C_END

#endif
