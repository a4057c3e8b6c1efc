/* The machine: what this process may use of it, and the environment of a measurement (env.c). libfdsl uses
 * these functions, too; only env_capture() needs another library, hwloc, if the program is built with it. */
#ifndef FDSL_MACHINE_HOST_H
#define FDSL_MACHINE_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

FDSL_C_BEGIN

/* ---- Fields of the files under /proc and /sys that describe the machine ---- */

/* Finds the first line of `path` that begins with `key`, and copies the text after the key, without leading
 * blanks and colons, to `value`. Many files under /proc and cgroup files have this format. If there is no
 * such line, `value` becomes empty and the result is false. */
bool system_field(const char *path, const char *key, char *value, size_t size);

/* Reads a field as a number. Returns false if it is missing or not a number ("max" in a control group). */
bool system_number(const char *path, const char *key, uint64_t *number);

/* Returns the size at `key` in /proc/meminfo; 0 if it is missing. */
uint64_t system_memory_bytes(const char *key);

/* ---- The memory that this process can allocate ---- */

/* Returns the memory in bytes that this process can still allocate. Takes MemAvailable or the bytes left
 * under the cgroup's limits, whichever is smaller, and divides this number by the number of processes that
 * share the memory (memory_share()). */
uint64_t memory_available_bytes(void);

/* Checks that `bytes` bytes for `what` ("the batch") can be allocated. STATUS_TOO_LARGE names both sizes and
 * the `remedy` ("lower --batch"). STATUS_OK if the available memory is unknown. */
enum status memory_check(uint64_t bytes, const char *what, const char *remedy);

/* Sets how many processes on this machine, including this one, will allocate the same amount of memory. 0:
 * unknown; the available memory is then unknown (0) as well. */
void memory_share(int processes);

/* Returns the smallest headroom in bytes under the memory limits (cgroup v2) of `group` ("/job_7/step_0") and
 * its ancestors, read under `root` (/sys/fs/cgroup). File cache counts as free. UINT64_MAX without limits. */
uint64_t memory_cgroup_headroom_bytes(const char *root, const char *group);

/* ---- The number of CPU threads that the environment asks for ---- */

#define THREADS_MAX 8192 /* maximum number of hardware threads that Linux supports on x86-64 */

/* Gets the number of CPU threads that OMP_NUM_THREADS requests. In a list ("4,2"), only the first number
 * counts; the others are for nested levels. `*threads` is 0 if the variable is unset or empty. Returns false
 * if the variable is invalid. */
bool threads_requested(uint64_t *threads);

/* ---- The instruction sets for which variants with OpenMP have their own code ---- */

enum isa {
    ISA_SCALAR,
    ISA_AVX2,   /* AVX2, FMA, F16C and POPCNT */
    ISA_AVX512, /* AVX-512 F, BW, DQ and VL, in addition to ISA_AVX2 */
    ISAS
};

/* Returns the best instruction set of this machine. */
enum isa isa_best(void);

/* Implement instruction_set() of struct variant. They return the name of isa_best(), or "scalar". */
const char *isa_best_name(void);
const char *isa_scalar_name(void);

/* For tests: makes isa_best() return the instruction set with this name; NULL restores the default. Returns
 * false if there is no such instruction set or this machine lacks it. Not thread-safe. */
bool isa_force(const char *name);

/* ---- The lock of the process ---- */

/* A lock that fork() takes, too: no child begins while another thread holds it. It protects state that a
 * child uses further, such as whether libcurl is initialised. Take no other lock while holding it. */
void process_lock(void);
void process_unlock(void);

FDSL_C_END

/* ---- The environment of a measurement: machine, build and job ---- */

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
