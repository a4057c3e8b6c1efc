/* Tests how a GPU is watched during timed runs, with a fake NVML library. */
#include <math.h>
#include <time.h>

#include "core/phase.h"
#include "core/timer.h"
#include "machine/nvml.h"
#include "fake_nvml.h"
#include "folder.h"

static char folder[] = "/tmp/fdsl-watch-XXXXXX";
#define GPU "0000:17:00.0"

static void start(void)
{
    enter_folder(folder);
}

static void stop(void)
{
    leave_folder(folder);
}

TestSuite(gpu_watch, .init = start, .fini = stop, .timeout = 60);

static void nap(double seconds)
{
    struct timespec left = {(time_t)seconds, (long)(1e9 * (seconds - floor(seconds)))};
    while (nanosleep(&left, &left) != 0)
        ;
}

static struct gpu_watched watch_for(double seconds, enum phase phase)
{
    struct gpu_watch *watch;
    struct gpu_watched watched;
    cr_assert_eq(gpu_watch_begin(GPU, &watch), STATUS_OK);
    cr_assert_not_null(watch);
    phase_enter(phase);
    nap(seconds);
    gpu_watch_end(watch, &watched);
    return watched;
}

Test(gpu_watch, has_clocks_power_and_throttle_reasons)
{
    load_fake_nvml(folder, "-DUNSTEADY");
    struct gpu_watched watched = watch_for(1.2, PHASE_TIMED);
    cr_expect_eq(watched.sm_clock_mhz, 1410, "not the median of the clocks: %d", watched.sm_clock_mhz);
    cr_expect_eq(watched.mem_clock_mhz, 3201);
    cr_expect_eq(watched.throttle_reasons, 0x24);
    cr_expect(fabs(watched.power_w - 250) <= 30, "%g W", watched.power_w);
}

Test(gpu_watch, short_runs_have_clocks_but_no_power)
{
    load_fake_nvml(folder, "");
    struct gpu_watched watched = watch_for(0.001, PHASE_TIMED);
    cr_expect_eq(watched.sm_clock_mhz, 1410);
    cr_expect_eq(watched.mem_clock_mhz, 3201);
    cr_expect(isnan(watched.power_w));
}

Test(gpu_watch, other_phases_are_ignored)
{
    load_fake_nvml(folder, "");
    struct gpu_watched watched = watch_for(0.12, PHASE_WARM_UP);
    cr_expect_lt(watched.sm_clock_mhz, 0);
    cr_expect_lt(watched.mem_clock_mhz, 0);
    cr_expect_eq(watched.throttle_reasons, 0);
}

Test(gpu_watch, an_older_driver_has_no_energy)
{
    load_fake_nvml(folder, "-DOLD");
    struct gpu_watched watched = watch_for(1, PHASE_TIMED);
    cr_expect_eq(watched.sm_clock_mhz, 1410);
    cr_expect(isnan(watched.power_w), "the power must be unknown without an energy counter, but is %g W",
              watched.power_w);
}

Test(gpu_watch, a_gpu_that_refuses_readings_leaves_them_unknown)
{
    load_fake_nvml(folder, "-DMUTE");
    struct gpu_watched watched = watch_for(1, PHASE_TIMED);
    cr_expect_lt(watched.sm_clock_mhz, 0);
    cr_expect_lt(watched.mem_clock_mhz, 0);
    cr_expect(isnan(watched.power_w));
    cr_expect_eq(watched.throttle_reasons, 0);
    cr_expect(isnan(nvml_gpu_energy_j(GPU)));
}

Test(gpu_watch, without_a_gpu_nothing_is_known)
{
    struct gpu_watch *watch;
    struct gpu_watched watched;
    cr_assert_eq(gpu_watch_begin("", &watch), STATUS_OK);
    cr_expect_null(watch);
    gpu_watch_end(NULL, &watched);
    cr_expect(watched.sm_clock_mhz < 0 && watched.mem_clock_mhz < 0 && isnan(watched.power_w));
    load_fake_nvml(folder, "");
    cr_assert_eq(gpu_watch_begin("0000:ff:00.0", &watch), STATUS_OK);
    cr_expect_null(watch, "a GPU that NVML does not know is watched");
}

Test(gpu_watch, ends_without_waiting_for_the_next_sample)
{
    struct gpu_watch *watch;
    struct gpu_watched watched;
    load_fake_nvml(folder, "");
    double begin_s = timer_now_s();
    for (int i = 0; i < 20; i++) {
        cr_assert_eq(gpu_watch_begin(GPU, &watch), STATUS_OK);
        gpu_watch_end(watch, &watched);
    }
    cr_expect_lt(timer_now_s() - begin_s, 20 * 0.05, "gpu_watch_end() waits for the next sample");
}
