/* Tests the facts about the machine: processors, memory and its limits, clocks, the Slurm job, and GPUs (with
 * a fake NVML library). */
#include "core/timer.h"
#include "machine/host.h"
#include "machine/nvml.h"

#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <math.h>
#include <sched.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake_nvml.h"

static char folder[] = "/tmp/fdsl-env-XXXXXX";

static void make_folder(void)
{
    cr_assert(mkdtemp(folder) != NULL);
}

static void remove_folder(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_assert(system(command) == 0);
}

TestSuite(env, .timeout = 60);
TestSuite(cgroup, .init = make_folder, .fini = remove_folder, .timeout = 60);
TestSuite(nvml, .init = make_folder, .fini = remove_folder, .timeout = 60);

Test(env, has_host_and_time)
{
    struct env env;
    char host[256];
    struct tm utc = {0};
    cr_assert(gethostname(host, sizeof host) == 0);
    time_t before = time(NULL);
    env_capture(&env);

    cr_expect(eq(str, env.host, host));
    cr_expect(strncmp(env.kernel, "Linux ", 6) == 0, "%s", env.kernel);
    cr_expect(ne(str, env.revision, ""));
    cr_expect(strpbrk(env.compiler, "0123456789") != NULL, "%s", env.compiler);
    const char *end = strptime(env.time_utc, "%Y-%m-%dT%H:%M:%SZ", &utc);
    cr_assert(end && *end == '\0', "%s", env.time_utc);
    cr_expect(timegm(&utc) >= before && timegm(&utc) <= time(NULL), "%s", env.time_utc);
}

Test(env, does_not_depend_on_the_time_zone)
{
    struct env env;
    struct tm utc = {0};
    setenv("TZ", "XYZ-9", 1);
    tzset();
    env_capture(&env);
    cr_assert(strptime(env.time_utc, "%Y-%m-%dT%H:%M:%SZ", &utc) != NULL);
    cr_expect(labs((long)(timegm(&utc) - time(NULL))) < 30, "%s", env.time_utc);
}

Test(env, names_the_slurm_job)
{
    struct env env;
    unsetenv("SLURM_JOB_ID");
    unsetenv("SLURM_ARRAY_JOB_ID");
    unsetenv("SLURM_ARRAY_TASK_ID");
    env_capture(&env);
    cr_expect(eq(str, env.job_id, ""));

    setenv("SLURM_JOB_ID", "127", 1);
    env_capture(&env);
    cr_expect(eq(str, env.job_id, "127"));

    /* Each task of an array also has its own job id. Users know only the id of the array. */
    setenv("SLURM_ARRAY_JOB_ID", "123", 1);
    setenv("SLURM_ARRAY_TASK_ID", "4", 1);
    env_capture(&env);
    cr_expect(eq(str, env.job_id, "123_4"));
}

Test(env, has_the_processors)
{
    struct env env;
    cpu_set_t allowed;
    cr_assert(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    env_capture(&env);
    cr_expect(eq(int, env.allowed_threads, CPU_COUNT(&allowed)));
    cr_expect(eq(int, env.threads, (int)sysconf(_SC_NPROCESSORS_ONLN)));
    cr_expect(env.cores >= 1 && env.cores <= env.threads, "%d cores, %d threads", env.cores, env.threads);
    cr_expect(env.allowed_cores >= 1 && env.allowed_cores <= env.cores, "%d cores", env.allowed_cores);
    cr_expect(env.allowed_cores <= env.allowed_threads, "%d cores", env.allowed_cores);
#ifdef __x86_64__
    cr_expect(ne(str, env.cpu_model, ""));
    cr_expect(ne(str, env.simd, ""));
#endif
}

Test(env, counts_the_cores_of_the_affinity_mask)
{
    struct env whole, bound;
    cpu_set_t allowed, one;
    char number[16];
    int last = -1;
    env_capture(&whole);
    cr_assert(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed))
            last = cpu;
    CPU_ZERO(&one);
    CPU_SET(last, &one);
    cr_assert(sched_setaffinity(0, sizeof one, &one) == 0);

    env_capture(&bound);
    snprintf(number, sizeof number, "%d", last);
    cr_expect(eq(str, bound.affinity, number));
    cr_expect(eq(int, bound.allowed_threads, 1));
    cr_expect(eq(int, bound.allowed_cores, 1));
    cr_expect(eq(int, bound.threads, whole.threads));
    cr_expect(eq(int, bound.cores, whole.cores));
}

Test(env, has_the_memory)
{
    struct env env;
    env_capture(&env);
    double physical = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    cr_expect(epsilon_eq(dbl, (double)env.memory_bytes / physical, 1.0, 0.01));
    cr_expect(env.memory_available_bytes > 0 && env.memory_available_bytes < env.memory_bytes);
    cr_expect(memory_available_bytes() > 0);
    cr_expect(eq(int, memory_check(UINT64_MAX, "all", "lower it"), STATUS_TOO_LARGE));
    cr_expect(eq(int, memory_check(1, "a byte", "lower it"), STATUS_OK));
}

static void put(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    cr_assert(file && fputs(text, file) >= 0 && fclose(file) == 0, "%s", path);
}

static void make_groups(void)
{
    char path[256];
    snprintf(path, sizeof path, "%s/job", folder);
    cr_assert(mkdir(path, 0700) == 0);
    snprintf(path, sizeof path, "%s/job/step", folder);
    cr_assert(mkdir(path, 0700) == 0);
}

Test(cgroup, without_a_limit_the_headroom_is_unlimited)
{
    make_groups();
    put("job/step/memory.max", "max\n");
    put("job/step/memory.current", "4096\n");
    cr_expect(eq(u64, memory_cgroup_headroom_bytes(folder, "/job/step"), UINT64_MAX));
    cr_expect(eq(u64, memory_cgroup_headroom_bytes(folder, "/"), UINT64_MAX));
    cr_expect(eq(u64, memory_cgroup_headroom_bytes(folder, "/gone"), UINT64_MAX));
}

Test(cgroup, limits_of_parent_groups_apply)
{
    make_groups();
    put("job/step/memory.max", "max\n");
    put("job/memory.max", "1000000\n");
    put("job/memory.current", "400000\n");
    cr_expect(eq(u64, memory_cgroup_headroom_bytes(folder, "/job/step"), 600000));
    put("job/step/memory.max", "500000\n");
    put("job/step/memory.current", "450000\n");
    cr_expect(eq(u64, memory_cgroup_headroom_bytes(folder, "/job/step"), 50000));
    put("memory.max", "30000\n"); /* in a container, the root group may have a limit */
    put("memory.current", "10000\n");
    cr_expect(eq(u64, memory_cgroup_headroom_bytes(folder, "/job/step"), 20000));
    cr_expect(eq(u64, memory_cgroup_headroom_bytes(folder, "/"), 20000));
}

Test(cgroup, file_cache_counts_as_free)
{
    make_groups();
    put("job/memory.max", "1000000\n");
    put("job/memory.current", "990000\n");
    put("job/memory.stat", "anon 90000\nfile 900000\ninactive_anon 90000\nactive_anon 0\n"
                           "inactive_file 700000\nactive_file 200000\n");
    cr_expect(eq(u64, memory_cgroup_headroom_bytes(folder, "/job"), 910000));
    put("job/memory.current", "1500000\n"); /* usage above the limit, as after a lower limit was set */
    put("job/memory.stat", "inactive_file 0\nactive_file 0\n");
    cr_expect(eq(u64, memory_cgroup_headroom_bytes(folder, "/job"), 0));
}

/* Writes the cpufreq files of a CPU under the folder. NULL omits the file. */
static void put_frequency(int cpu, const char *driver, const char *khz)
{
    char path[64], command[128];
    snprintf(command, sizeof command, "mkdir -p '%s/cpu%d/cpufreq'", folder, cpu);
    cr_assert(system(command) == 0);
    snprintf(path, sizeof path, "cpu%d/cpufreq/scaling_driver", cpu);
    if (driver)
        put(path, driver);
    snprintf(path, sizeof path, "cpu%d/cpufreq/cpuinfo_max_freq", cpu);
    if (khz)
        put(path, khz);
}

Test(env, maximum_clock_is_that_of_the_fastest_core, .init = make_folder, .fini = remove_folder)
{
    cr_expect(zero(dbl, env_max_clock_hz(folder)));
    put_frequency(0, "intel_pstate\n", "3700000\n");
    put_frequency(1, "amd-pstate-epp\n", "4100000\n");
    put_frequency(2, "intel_cpufreq\n", "3900000\n");
    cr_expect(epsilon_eq(dbl, env_max_clock_hz(folder), 4.1e9, 1));
}

Test(env, maximum_clock_is_unknown_if_a_core_has_no_driver, .init = make_folder, .fini = remove_folder)
{
    put_frequency(0, "amd-pstate\n", "3700000\n");
    put_frequency(1, NULL, "3700000\n");
    cr_expect(zero(dbl, env_max_clock_hz(folder)));
}

Test(env, maximum_clock_is_unknown_if_the_driver_omits_boost, .init = make_folder, .fini = remove_folder)
{
    put_frequency(0, "acpi-cpufreq\n", "2450000\n");
    cr_expect(zero(dbl, env_max_clock_hz(folder)));
}

Test(env, maximum_clock_is_unknown_without_a_number, .init = make_folder, .fini = remove_folder)
{
    put_frequency(0, "amd-pstate\n", NULL);
    cr_expect(zero(dbl, env_max_clock_hz(folder)));
}

#ifdef __x86_64__
/* Measures the clock with rotations, which take one cycle each, in place of multiplications. */
static double rotation_clock_hz(void)
{
    double clock_hz = 0;
    for (int round = 0; round < 200; round++) {
        uint32_t value = 3, left = 1000;
        const double begin_s = timer_now_s();
        __asm__ volatile("1: .rept 32\n rorl $1, %0\n .endr\n decl %1\n jnz 1b"
                         : "+r"(value), "+r"(left)
                         :
                         : "cc");
        clock_hz = fmax(clock_hz, 32e3 / (timer_now_s() - begin_s));
    }
    return clock_hz;
}

Test(env, measures_the_clock_of_all_threads)
{
    double closest = HUGE_VAL; /* clocks change, and other processes may disturb an attempt */
    for (int attempt = 0; attempt < 10 && closest > 0.03; attempt++) {
        const double clock_hz = env_clock_hz(1 + attempt % 2), expected_hz = rotation_clock_hz();
        closest = fmin(closest, fabs(clock_hz / expected_hz - 1));
    }
    cr_expect_lt(closest, 0.03, "differs by %.3g from the clock that rotations show", closest);
}
#endif

Test(nvml, reads_a_gpu)
{
    struct gpu_state state;
    char driver[80], tiny[4] = "???";
    load_fake_nvml(folder, "");
    cr_assert(nvml_gpu_state("0000:17:00.0", &state) == STATUS_OK, "%s", status_text());
    cr_expect(eq(int, state.sm_clock_mhz, 1410));
    cr_expect(eq(int, state.sm_clock_max_mhz, 1980));
    cr_expect(eq(int, state.memory_clock_mhz, 3201));
    cr_expect(eq(int, state.temperature_c, 61));
    cr_expect(epsilon_eq(dbl, state.power_w, 312.5, 1e-9));
    cr_expect(eq(u64, state.throttle_reasons, 0x24));
    cr_expect(eq(int, state.utilisation_percent, 97));
    cr_expect(eq(i64, state.memory_used_bytes, 50754820095));
    cr_expect(eq(i64, state.memory_free_bytes, 100000000001));
    nvml_driver_version(driver, sizeof driver);
    cr_expect(eq(str, driver, "580.159.04"));
    nvml_driver_version(tiny, sizeof tiny);
    cr_expect(eq(str, tiny, ""));
}

Test(nvml, names_the_processes_on_a_gpu)
{
    struct gpu_process processes[2];
    size_t count;
    char text[256];
    load_fake_nvml(folder, "-DBUSY_GPU");
    cr_assert(nvml_gpu_processes("0000:17:00.0", processes, 2, &count) == STATUS_OK, "%s", status_text());
    cr_expect(eq(sz, count, 2));
    gpu_others_text(processes, count, text, sizeof text);
    cr_expect(eq(str, text, "pid 4711 (python3, 2.3 GB), pid 4712 (name unknown)"));
    cr_assert(nvml_gpu_processes("0000:17:00.0", processes, 1, &count) == STATUS_OK);
    cr_expect(eq(sz, count, 2));
    cr_expect(nvml_gpu_processes("0000:18:00.0", processes, 2, &count) == STATUS_UNAVAILABLE && count == 0);
}

Test(nvml, reads_the_traffic_on_the_bus)
{
    struct gpu_traffic traffic;
    load_fake_nvml(folder, "");
    cr_assert(nvml_gpu_traffic("0000:17:00.0", &traffic) == STATUS_OK, "%s", status_text());
    cr_expect(epsilon_eq(dbl, traffic.rx_bytes_per_s, 2.5e9, 1));
    cr_expect(epsilon_eq(dbl, traffic.tx_bytes_per_s, 1.25e6, 1));
    cr_expect(nvml_gpu_traffic("0000:18:00.0", &traffic) == STATUS_UNAVAILABLE);
    cr_expect(traffic.rx_bytes_per_s < 0 && traffic.tx_bytes_per_s < 0);
}

static void expect_link(const char *flags, double bytes_per_s)
{
    load_fake_nvml(folder, flags);
    double peak = nvml_pcie_peak_bytes_per_s("0000:17:00.0");
    cr_expect(epsilon_eq(dbl, peak, bytes_per_s, 1), "%s: %.9g", flags, peak);
    cr_expect(zero(dbl, nvml_pcie_peak_bytes_per_s("0000:18:00.0")));
}

/* 16 lanes of 32 GT/s carry 63.0 GB/s, because 128 of every 130 bits are data. */
Test(nvml, pcie_generation_5_has_a_peak_of_63_gb_per_s)
{
    expect_link("", 63015384615.4);
}

Test(nvml, the_pcie_peak_is_known_with_an_older_driver)
{
    expect_link("-DOLD -DGENERATION=3", 15753846153.8);
}

Test(nvml, pcie_generation_1_has_a_peak_of_4_gb_per_s)
{
    expect_link("-DGENERATION=1", 4e9);
}

Test(nvml, pcie_generation_6_has_a_peak_of_121_gb_per_s)
{
    expect_link("-DGENERATION=6", 121e9);
}

Test(nvml, pcie_generation_7_has_an_unknown_peak)
{
    expect_link("-DGENERATION=7", 0);
}

static void expect_nothing_known(void)
{
    cr_expect(zero(dbl, nvml_pcie_peak_bytes_per_s("0000:17:00.0")));
    struct gpu_state state;
    struct gpu_traffic traffic;
    cr_assert(nvml_gpu_state("0000:17:00.0", &state) == STATUS_OK, "%s", status_text());
    cr_expect(state.sm_clock_mhz < 0 && state.sm_clock_max_mhz < 0 && state.memory_clock_mhz < 0);
    cr_expect(state.temperature_c < 0 && state.power_w < 0 && state.utilisation_percent < 0);
    cr_expect(state.memory_used_bytes < 0 && state.memory_free_bytes < 0 && state.throttle_reasons == 0);
    cr_assert(nvml_gpu_traffic("0000:17:00.0", &traffic) == STATUS_OK, "%s", status_text());
    cr_expect(traffic.rx_bytes_per_s < 0 && traffic.tx_bytes_per_s < 0);
}

Test(nvml, accepts_a_driver_without_readings)
{
    load_fake_nvml(folder, "-DBARE");
    expect_nothing_known();
}

Test(nvml, accepts_a_gpu_that_refuses_readings)
{
    load_fake_nvml(folder, "-DMUTE");
    size_t processes;
    cr_expect(nvml_gpu_processes("0000:17:00.0", NULL, 0, &processes) == STATUS_UNAVAILABLE);
    expect_nothing_known();
}

Test(nvml, finds_a_gpu_again_after_an_unknown_one)
{
    struct gpu_state state;
    load_fake_nvml(folder, "");
    for (int again = 0; again < 2; again++) {
        cr_expect(nvml_gpu_state("0000:17:00.0", &state) == STATUS_OK, "%s", status_text());
        cr_expect(nvml_gpu_state("0000:18:00.0", &state) == STATUS_UNAVAILABLE);
    }
}

Test(nvml, accepts_an_older_driver)
{
    struct gpu_state state;
    load_fake_nvml(folder, "-DOLD");
    cr_assert(nvml_gpu_state("0000:17:00.0", &state) == STATUS_OK, "%s", status_text());
    cr_expect(lt(dbl, state.power_w, 0.0));
    cr_expect(eq(int, state.sm_clock_mhz, 1410));
    cr_expect(eq(u64, state.throttle_reasons, 0x24));
}

Test(nvml, says_which_gpu_is_unknown)
{
    struct gpu_state state;
    load_fake_nvml(folder, "");
    cr_expect(nvml_gpu_state("0000:18:00.0", &state) == STATUS_UNAVAILABLE);
    cr_expect(strstr(status_text(), "0000:18:00.0") && strstr(status_text(), "Not Found"), "%s",
              status_text());
    cr_expect(state.sm_clock_mhz < 0 && state.temperature_c < 0 && state.power_w < 0);
}

Test(nvml, reports_why_nvml_does_not_start)
{
    struct gpu_state state;
    char driver[80] = "???";
    load_fake_nvml(folder, "-DBROKEN");
    for (int again = 0; again < 2; again++) {
        status_set(STATUS_FAILED, "something else");
        cr_expect(nvml_gpu_state("0000:17:00.0", &state) == STATUS_UNAVAILABLE);
        cr_expect(strstr(status_text(), "Driver Not Loaded") != NULL, "%s", status_text());
    }
    nvml_driver_version(driver, sizeof driver);
    cr_expect(eq(str, driver, ""));
}

Test(nvml, reports_a_driver_that_is_too_old)
{
    struct gpu_state state;
    load_fake_nvml(folder, "-DnvmlInit_v2=nvmlInit");
    cr_expect(nvml_gpu_state("0000:17:00.0", &state) == STATUS_UNAVAILABLE);
    cr_expect(strstr(status_text(), "nvmlInit_v2") != NULL, "%s", status_text());
}

/* With a driver, no GPU has this address. Without a driver, the library is missing. Both messages contain
 * "NVML". */
Test(nvml, is_unavailable_for_an_impossible_gpu)
{
    struct gpu_state state;
    status_set(STATUS_FAILED, "something else");
    cr_expect(nvml_gpu_state("ffff:ff:1f.7", &state) == STATUS_UNAVAILABLE);
    cr_expect(strstr(status_text(), "NVML") != NULL, "%s", status_text());
}

Test(nvml, names_the_reasons_of_throttling)
{
    char text[80], tiny[6];
    cr_expect(eq(str, (char *)nvml_throttle_words(0, text, sizeof text), ""));
    cr_expect(eq(str, (char *)nvml_throttle_words(0x1 | 0x2 | 0x100, text, sizeof text), ""));
    cr_expect(eq(str, (char *)nvml_throttle_words(0x4 | 0x1, text, sizeof text), "power cap"));
    cr_expect(eq(str, (char *)nvml_throttle_words(0x20, text, sizeof text), "thermal"));
    cr_expect(
        eq(str, (char *)nvml_throttle_words(0x4 | 0x20 | 0x40, text, sizeof text), "power cap, thermal"));
    cr_expect(eq(str, (char *)nvml_throttle_words(0x98, text, sizeof text),
                 "hardware slowdown, sync boost, power brake"));
    cr_expect(eq(str, (char *)nvml_throttle_words(0xff, tiny, sizeof tiny), "power"));
}
