/* The environment of a measurement (host.h). libfdsl compiles this file without hwloc (src/lib/fdsl.c). */
#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>
#ifdef HAVE_HWLOC
#include <hwloc.h>
#endif

#include "core/array.h"
#include "core/parallel.h"
#include "core/status.h"
#include "core/text.h"
#include "core/timer.h"
#include "machine/host.h"

#ifdef __clang__
#define COMPILER __VERSION__
#else
#define COMPILER "gcc " __VERSION__
#endif

#ifdef HAVE_HWLOC

static int count_allowed_cores(hwloc_topology_t topology, hwloc_const_bitmap_t allowed)
{
    int count = 0;
    hwloc_obj_t core = NULL;
    while ((core = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_CORE, core)))
        count += hwloc_bitmap_intersects(core->cpuset, allowed);
    return count;
}

/* Returns the processors of this machine, or NULL. They are read once, because hwloc takes milliseconds. */
static hwloc_topology_t machine_topology(void)
{
    static hwloc_topology_t topology;
    if (topology)
        return topology;
    /* Some containers have no /sys; hwloc still counts cores then, but prints an error on stderr. */
    (void)setenv("HWLOC_HIDE_ERRORS", "2", 0);
    if (hwloc_topology_init(&topology) != 0)
        return topology = NULL;
    /* Without this flag, hwloc counts only the cores of the job's control group, not all cores of the
     * machine. */
    hwloc_topology_set_flags(topology, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
    if (hwloc_topology_load(topology) == 0)
        return topology;
    hwloc_topology_destroy(topology);
    return topology = NULL;
}

static void capture_processors(struct env *env)
{
    hwloc_topology_t topology = machine_topology();
    hwloc_bitmap_t allowed = hwloc_bitmap_alloc();
    if (allowed && topology) {
        env->cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE);
        env->threads = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_PU);
        if (hwloc_get_cpubind(topology, allowed, HWLOC_CPUBIND_THREAD) == 0) {
            env->allowed_threads = hwloc_bitmap_weight(allowed);
            env->allowed_cores = count_allowed_cores(topology, allowed);
            hwloc_bitmap_list_snprintf(env->affinity, sizeof env->affinity, allowed);
        }
    }
    hwloc_bitmap_free(allowed);
}

#else

enum { CPUS_MAX = 8192 }; /* maximum number of hardware threads that Linux supports on x86-64 */

static void write_cpu_list(const cpu_set_t *set, size_t set_bytes, char *text, size_t size)
{
    text[0] = '\0';
    for (int first = 0; first < CPUS_MAX; first++) {
        if (!CPU_ISSET_S(first, set_bytes, set))
            continue;
        int last = first;
        while (last + 1 < CPUS_MAX && CPU_ISSET_S(last + 1, set_bytes, set))
            last++;
        text_join(text, size, ",", "%d", first);
        if (last > first)
            text_append(text, size, "-%d", last);
        first = last;
    }
}

/* Returns the first hardware thread of the core that `cpu` belongs to; -1 if unknown. */
static int first_sibling_of(int cpu)
{
    char path[96];
    uint64_t first_sibling;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    return system_number(path, "", &first_sibling) && first_sibling < CPUS_MAX ? (int)first_sibling : -1;
}

/* Returns the number of cores: counts the hardware threads that are the first of their core. */
static int count_cores(void)
{
    int cores = 0;
    for (int cpu = 0; cpu < sysconf(_SC_NPROCESSORS_CONF); cpu++)
        cores += first_sibling_of(cpu) == cpu;
    return cores;
}

static int count_allowed_cores(const cpu_set_t *allowed, size_t set_bytes)
{
    bool counted[CPUS_MAX] = {false};
    int cores = 0;
    for (int cpu = 0; cpu < CPUS_MAX; cpu++) {
        int core = CPU_ISSET_S(cpu, set_bytes, allowed) ? first_sibling_of(cpu) : -1;
        cores += core >= 0 && !counted[core];
        if (core >= 0)
            counted[core] = true;
    }
    return cores;
}

static void capture_processors(struct env *env)
{
    long threads = sysconf(_SC_NPROCESSORS_ONLN);
    env->threads = threads > 0 ? (int)threads : 0;
    env->cores = count_cores();

    size_t set_bytes = CPU_ALLOC_SIZE(CPUS_MAX);
    cpu_set_t *set = CPU_ALLOC(CPUS_MAX);
    if (set && sched_getaffinity(0, set_bytes, set) == 0) {
        env->allowed_threads = CPU_COUNT_S(set_bytes, set);
        env->allowed_cores = count_allowed_cores(set, set_bytes);
        write_cpu_list(set, set_bytes, env->affinity, sizeof env->affinity);
    }
    CPU_FREE(set);
}

#endif

/* Replaces the last entry of a truncated list with "...". A list was truncated, perhaps inside a number, if
 * it fills its buffer. */
static void mark_cut_list(char *list, size_t size)
{
    if (strlen(list) + 1 < size)
        return;
    list[size - 4] = '\0';
    char *comma = strrchr(list, ',');
    strcpy(comma ? comma + 1 : list, "...");
}

static const char *widest_simd(void)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f"))
        return "avx512";
    return __builtin_cpu_supports("avx2") ? "avx2" : "sse2";
#else
    return "";
#endif
}

uint64_t env_openmp_threads(void)
{
    uint64_t threads;
    if (!threads_requested(&threads))
        status_warn("OMP_NUM_THREADS='%s' is ignored: it is not a number from 1 to %d; correct it, or use "
                    "--threads N",
                    getenv("OMP_NUM_THREADS"), THREADS_MAX);
    return threads;
}

/* Returns whether cpuinfo_max_freq of this cpufreq driver includes boost clocks. */
static bool tells_boost(const char *driver)
{
    static const char *const drivers[] = {"intel_pstate", "intel_cpufreq", "amd-pstate", "amd-pstate-epp",
                                          NULL};
    return is_one_of(driver, drivers);
}

double env_max_clock_hz(const char *root)
{
    double highest_hz = 0;
    for (int cpu = 0;; cpu++) {
        char folder[PATH_MAX], path[PATH_MAX + 64], driver[64];
        uint64_t khz;
        snprintf(folder, sizeof folder, "%s/cpu%d", root, cpu);
        if (access(folder, F_OK) != 0)
            return highest_hz;
        snprintf(path, sizeof path, "%s/cpufreq/scaling_driver", folder);
        if (!system_field(path, "", driver, sizeof driver) || !tells_boost(driver))
            return 0;
        snprintf(path, sizeof path, "%s/cpufreq/cpuinfo_max_freq", folder);
        if (!system_number(path, "", &khz))
            return 0;
        highest_hz = 1e3 * (double)khz > highest_hz ? 1e3 * (double)khz : highest_hz;
    }
}

/* Each multiplication needs the result of the one before. A multiplication of 32 bits has taken 3 cycles on
 * all x86 processors of Intel since 2006 and of AMD since 2003 (Fog, "Instruction tables"). The time does not
 * depend on other threads of the core, which use it alternately. */
#define CLOCK_LOOPS  1000
#define CLOCK_CYCLES (CLOCK_LOOPS * 16.0 * 3)
#define CLOCK_ROUNDS 10

static void measure_clock(void *context, uint64_t task, int thread)
{
    double *clocks_hz = context;
    (void)thread;
#ifdef __x86_64__
    for (int round = 0; round < CLOCK_ROUNDS; round++) { /* the highest: other processes prolong a round */
        uint32_t value = 3, left = CLOCK_LOOPS;
        double begin_s = timer_now_s();
        __asm__ volatile("1: .rept 16\n imull %0, %0\n .endr\n decl %1\n jnz 1b"
                         : "+r"(value), "+r"(left)
                         :
                         : "cc");
        double hz = CLOCK_CYCLES / (timer_now_s() - begin_s);
        clocks_hz[task] = hz > clocks_hz[task] ? hz : clocks_hz[task];
    }
#else
    clocks_hz[task] = 0;
#endif
}

double env_clock_hz(int threads)
{
    double *clocks_hz = calloc((size_t)threads, sizeof *clocks_hz);
    if (!clocks_hz)
        return 0;
    parallel_for(threads, (uint64_t)threads, measure_clock, clocks_hz);
    qsort(clocks_hz, (size_t)threads, sizeof *clocks_hz, compare_reals);
    double median_hz = clocks_hz[threads / 2];
    free(clocks_hz);
    return median_hz;
}

void env_capture(struct env *env)
{
    memset(env, 0, sizeof *env);

    env_identify(env);
    struct utsname system;
    if (uname(&system) == 0)
        snprintf(env->kernel, sizeof env->kernel, "%.60s %.60s", system.sysname, system.release);
    snprintf(env->compiler, sizeof env->compiler, "%s", COMPILER);
    snprintf(env->simd, sizeof env->simd, "%s", widest_simd());
    capture_processors(env);
    env->max_clock_hz = env_max_clock_hz("/sys/devices/system/cpu");
    mark_cut_list(env->affinity, sizeof env->affinity);
    env->memory_bytes = system_memory_bytes("MemTotal:");
    env->memory_available_bytes = memory_available_bytes();
}
