#include "core/roofline.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

/* Returns the least DRAM traffic in bytes. Subtracts what needs no traffic: caches may hold part of
 * `once_bytes` since the previous run, and the chip may keep part of `round_bytes` between rounds. */
static double memory_bytes(const struct least_work *work, const struct machine_peaks *peaks)
{
    return fmax(work->once_bytes - peaks->cache_bytes, 0) +
           work->rounds * fmax(work->round_bytes - peaks->chip_bytes, 0);
}

static double time_s(double amount, double peak_per_s)
{
    return peak_per_s > 0 ? amount / peak_per_s : 0;
}

struct roofline roofline_of(const struct least_work *work, const struct machine_peaks *peaks)
{
    struct roofline roof = {.flops = work->flops};
    bool by_bus = work->bus_bytes > 0;
    if (work->flops > 0)
        roof.peak_flops = peaks->flops_per_s[work->unit];
    if (by_bus) {
        roof.bytes = work->bus_bytes;
        roof.peak_bytes_per_s = peaks->bus_bytes_per_s;
    } else if (peaks->memory_bytes_per_s > 0) {
        roof.bytes = memory_bytes(work, peaks);
        roof.peak_bytes_per_s = peaks->memory_bytes_per_s;
    }
    double compute_s = time_s(roof.flops, roof.peak_flops);
    double transfer_s = time_s(roof.bytes, roof.peak_bytes_per_s);
    roof.floor_s = fmax(compute_s, transfer_s);
    if (roof.floor_s > 0)
        roof.bound = compute_s >= transfer_s ? BOUND_COMPUTE : by_bus ? BOUND_BUS : BOUND_MEMORY;
    return roof;
}

void roofline_add(struct roofline *all, const struct roofline *rank, int sharers)
{
    all->flops += rank->flops;
    all->bytes += rank->bytes;
    all->peak_flops += rank->peak_flops / sharers;
    all->peak_bytes_per_s += rank->peak_bytes_per_s / sharers;
    if (rank->floor_s > all->floor_s) {
        all->floor_s = rank->floor_s;
        all->bound = rank->bound;
    }
}

const char *roofline_bound_name(enum bound bound)
{
    static const char *const names[] = {
        [BOUND_UNKNOWN] = "", [BOUND_COMPUTE] = "compute", [BOUND_MEMORY] = "memory", [BOUND_BUS] = "bus"};
    return names[bound];
}

/* FLOPs per cycle per multiprocessor: the dense peak rates in NVIDIA's white papers (docs/timing.md),
 * divided by the number of multiprocessors and the clock. */
static const struct {
    int major, minor;
    double flops[UNIT_COUNT]; /* fp32, TF32, fp16 or bf16 */
} architectures[] = {
    {8, 0, {128, 1024, 2048}},  /* A100 */
    {8, 6, {256, 512, 1024}},   /* A40, RTX 30 */
    {8, 9, {256, 512, 1024}},   /* L40, RTX 40 */
    {9, 0, {256, 2048, 4096}},  /* H100, H200 */
    {10, 0, {256, 4096, 8192}}, /* B200 */
    {12, 0, {256, 512, 1024}},  /* RTX 50, RTX PRO */
};

/* Upper bound of the bytes of shared memory and L1 cache per multiprocessor, for all architectures in the
 * table. */
#define LOCAL_BYTES (256.0 * 1024)

struct machine_peaks roofline_gpu_peaks(const struct gpu_facts *gpu)
{
    struct machine_peaks peaks = {
        .memory_bytes_per_s =
            2 * gpu->memory_clock_hz * gpu->memory_bus_bits / 8, /* two transfers per clock */
        .cache_bytes = gpu->cache_bytes,
        .chip_bytes = gpu->cache_bytes + gpu->multiprocessors * (gpu->registers_bytes + LOCAL_BYTES),
        .bus_bytes_per_s = gpu->bus_bytes_per_s};
    for (size_t i = 0; i < COUNT_OF(architectures); i++)
        if (architectures[i].major == gpu->major && architectures[i].minor == gpu->minor)
            for (int unit = 0; unit < UNIT_COUNT; unit++)
                peaks.flops_per_s[unit] = architectures[i].flops[unit] * gpu->multiprocessors * gpu->clock_hz;
    return peaks;
}

/* Assumes two vector FMAs per cycle: no x86-64 core issues more. Plain loops ("scalar") may use the widest
 * vectors that the compiler's flags allow. */
double roofline_cpu_flops_per_cycle(const char *instruction_set)
{
#if defined(__AVX512F__)
    const double loop_lanes = 16;
#elif defined(__AVX__)
    const double loop_lanes = 8;
#else
    const double loop_lanes = 4;
#endif
    const double flops_per_lane = 2 * 2;
#if defined(__x86_64__)
    if (strcmp(instruction_set, "avx512") == 0)
        return flops_per_lane * 16;
    if (strcmp(instruction_set, "avx2") == 0)
        return flops_per_lane * 8;
    if (strcmp(instruction_set, "scalar") == 0)
        return flops_per_lane * loop_lanes;
#else
    (void)instruction_set, (void)loop_lanes, (void)flops_per_lane;
#endif
    return 0;
}
