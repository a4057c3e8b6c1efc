#include "machine/host.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>

/* ---- Fields of files ---- */

bool system_field(const char *path, const char *key, char *value, size_t size)
{
    FREED char *line = NULL; /* small stacks have no room for paths */
    size_t room = 0;
    bool found = false;
    value[0] = '\0';
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    while (!found && getline(&line, &room, file) > 0)
        found = strncmp(line, key, strlen(key)) == 0;
    fclose(file);
    if (!found)
        return false;
    const char *text = line + strlen(key);
    text += strspn(text, " \t:");
    snprintf(value, size, "%.*s", (int)strcspn(text, "\n"), text);
    return true;
}

bool system_number(const char *path, const char *key, uint64_t *number)
{
    char text[64], *end;
    if (!system_field(path, key, text, sizeof text))
        return false;
    *number = strtoull(text, &end, 10);
    return end != text;
}

uint64_t system_memory_bytes(const char *key)
{
    uint64_t kib = 0;
    return system_number("/proc/meminfo", key, &kib) ? kib * 1024 : 0;
}

/* ---- Memory ---- */

static bool read_group(const char *directory, const char *file, const char *key, uint64_t *number)
{
    char *path = NULL;
    const bool found = asprintf(&path, "%s/%s", directory, file) >= 0 && system_number(path, key, number);
    free(path);
    return found;
}

/* Returns the bytes that can still be allocated under the limit of one cgroup, ignoring its ancestors.
 * memory.current includes the file cache, which a program fills by reading a large data set. Linux drops this
 * cache before it refuses an allocation, so the cache counts as free. */
static uint64_t group_headroom_bytes(const char *directory)
{
    uint64_t limit, used = 0, active = 0, inactive = 0;
    if (!read_group(directory, "memory.max", "", &limit))
        return UINT64_MAX;
    read_group(directory, "memory.current", "", &used);
    read_group(directory, "memory.stat", "active_file", &active);
    read_group(directory, "memory.stat", "inactive_file", &inactive);
    uint64_t cache = active + inactive;
    used = used > cache ? used - cache : 0;
    return limit > used ? limit - used : 0;
}

uint64_t memory_cgroup_headroom_bytes(const char *root, const char *group)
{
    uint64_t least = UINT64_MAX;
    FREED char *directory = NULL;
    if (asprintf(&directory, "%s%s", root, group) < 0) {
        directory = NULL;
        return least;
    }
    for (;;) {
        uint64_t headroom = group_headroom_bytes(directory);
        least = headroom < least ? headroom : least;
        char *last = strrchr(directory + strlen(root), '/');
        if (!last)
            return least;
        *last = '\0';
    }
}

static int memory_sharers = 1;

void memory_share(int processes)
{
    memory_sharers = processes;
}

uint64_t memory_available_bytes(void)
{
    char group[PATH_MAX];
    uint64_t available = system_memory_bytes("MemAvailable:");
    uint64_t headroom = UINT64_MAX;
    if (system_field("/proc/self/cgroup", "0::", group, sizeof group))
        headroom = memory_cgroup_headroom_bytes("/sys/fs/cgroup", group);
    if (memory_sharers == 0)
        return 0;
    return (headroom < available ? headroom : available) / (uint64_t)memory_sharers;
}

enum status memory_check(uint64_t bytes, const char *what, const char *remedy)
{
    uint64_t available = memory_available_bytes();
    if (available == 0 || bytes <= available)
        return STATUS_OK;
    return status_set(STATUS_TOO_LARGE, "%s: %.2f GB of memory needed, %.2f GB available; %s", what,
                      1e-9 * (double)bytes, 1e-9 * (double)available, remedy);
}

/* ---- Threads ---- */

/* Returns the first of the comma-separated numbers in `text`; 0 if any is not a valid number of threads. */
static uint64_t first_of_list(const char *text)
{
    uint64_t first = 0;
    for (;; text++) {
        text += strspn(text, " \t");
        char *end;
        unsigned long value = *text >= '0' && *text <= '9' ? strtoul(text, &end, 10) : 0;
        if (value < 1 || value > THREADS_MAX)
            return 0;
        first = first ? first : value;
        text = end + strspn(end, " \t");
        if (*text != ',')
            return *text ? 0 : first;
    }
}

bool threads_requested(uint64_t *threads)
{
    const char *text = getenv("OMP_NUM_THREADS");
    *threads = text && *text ? first_of_list(text) : 0;
    return *threads > 0 || !text || !*text;
}

/* ---- Instruction sets ---- */

static const char *const names[ISAS] = {"scalar", "avx2", "avx512"};

static enum isa forced = ISAS; /* ISAS: isa_force() has no effect */

#if defined(__x86_64__)
/* __builtin_cpu_supports() of clang 14 does not know F16C. */
static bool has_f16c(void)
{
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static enum isa best_of_machine(void)
{
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c() ||
        !__builtin_cpu_supports("popcnt"))
        return ISA_SCALAR;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? ISA_AVX512
               : ISA_AVX2;
#else
    return ISA_SCALAR;
#endif
}

enum isa isa_best(void)
{
    return forced < ISAS ? forced : best_of_machine();
}

const char *isa_best_name(void)
{
    return names[isa_best()];
}

const char *isa_scalar_name(void)
{
    return names[ISA_SCALAR];
}

bool isa_force(const char *name)
{
    forced = ISAS;
    for (enum isa isa = ISA_SCALAR; name && isa <= best_of_machine(); isa++)
        if (strcmp(name, names[isa]) == 0)
            forced = isa;
    return !name || forced < ISAS;
}

/* ---- The lock of the process ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void take(void)
{
    pthread_mutex_lock(&lock);
}

void process_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

static void protect_children(void)
{
    pthread_atfork(take, process_unlock, process_unlock);
}

void process_lock(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, protect_children);
    take();
}

/* ---- The identity of a measurement (env.c has the rest) ---- */

#ifndef FDSL_REVISION
#define FDSL_REVISION "unknown"
#endif

void env_time(char text[ENV_TIME_MAX])
{
    time_t now = time(NULL);
    struct tm utc;
    *text = '\0';
    if (gmtime_r(&now, &utc))
        strftime(text, ENV_TIME_MAX, "%Y-%m-%dT%H:%M:%SZ", &utc);
}

const char *env_revision(void)
{
    return FDSL_REVISION;
}

static void capture_job(char *job_id, size_t size)
{
    const char *job = getenv("SLURM_JOB_ID");
    const char *array = getenv("SLURM_ARRAY_JOB_ID"), *task = getenv("SLURM_ARRAY_TASK_ID");
    if (array && *array && task && *task)
        snprintf(job_id, size, "%s_%s", array, task);
    else
        snprintf(job_id, size, "%s", job ? job : "");
}

void env_identify(struct env *env)
{
    struct utsname system;
    env_time(env->time_utc);
    if (uname(&system) == 0)
        snprintf(env->host, sizeof env->host, "%s", system.nodename);
    snprintf(env->revision, sizeof env->revision, "%s", env_revision());
    capture_job(env->job_id, sizeof env->job_id);
    system_field("/proc/cpuinfo", "model name", env->cpu_model, sizeof env->cpu_model);
}
