/* The environment of a measurement: machine, build and job. */
#ifndef FDSL_MACHINE_ENV_H
#define FDSL_MACHINE_ENV_H

#include <stdint.h>

#define ENV_TIME_MAX 32

struct env {
    char
        time_utc[ENV_TIME_MAX]; /* when env_capture() was called, ISO 8601 in seconds: 2026-01-31T12:34:56Z */
    char host[128];
    char revision[64]; /* git describe at build time, with "-dirty" if modified; "unknown" without git */
    char job_id[64];   /* Slurm: "123", or "123_4" for task 4 of array job 123; empty outside Slurm */

    /* The CPU */
    char cpu_model[128];
    int cores, threads;  /* physical cores and hardware threads of this machine; 0 if unknown */
    int allowed_threads; /* hardware threads that this process may run on (affinity, cgroup masks) */
    int allowed_cores;   /* physical cores with at least one allowed thread; 0 if unknown */
    double max_clock_hz; /* boost clock of the fastest core; 0 if unknown, as in most virtual machines */
    char affinity[256];  /* the allowed threads as a list: "0-3,8" */
    char simd[16];       /* the widest vector instruction set: "avx512", "avx2", "sse2" */
    uint64_t memory_bytes, memory_available_bytes;
    char kernel[128], compiler[128];
};

/* Writes the current time in the format of env.time_utc. */
void env_time(char text[ENV_TIME_MAX]);

/* Sets time_utc, host, revision, job_id and cpu_model. Needs no hwloc, so libfdsl can use it. */
void env_identify(struct env *env);

/* Fills `env`; unknown fields are empty or 0. Counts cores and threads with hwloc if built in, else
 * with sysconf, the affinity mask and /sys. */
void env_capture(struct env *env);

/* Returns the source revision of this build, in the format of env.revision. */
const char *env_revision(void);

/* Returns the number of CPU threads that OMP_NUM_THREADS requests, the default of --threads. Returns 0 if the
 * variable is unset, empty or invalid; warns if it is invalid. */
uint64_t env_openmp_threads(void);

/* Returns the highest maximum clock of all cores in Hz, read from the cpufreq files under `root`
 * (/sys/devices/system/cpu). Returns 0 if a core has no such file or its driver does not report boost
 * clocks. */
double env_max_clock_hz(const char *root);

/* Measures the clock of `threads` CPU threads at the same time, in 0.2 ms. Returns the median in Hz; 0 if the
 * processor is not an x86, or if memory runs out. Call right after work, whose clock the cores then still
 * have. */
double env_clock_hz(int threads);

#endif
