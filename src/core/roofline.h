/* The roofline model: a lower bound of the time that a run needs on a machine.
 *
 * The bound is computed from the least work that any correct program must do and from the peak rates of the
 * machine. Arithmetic or traffic whose amount or peak rate is unknown sets no bound. docs/timing.md says
 * what is counted and where the peaks come from. */
#ifndef FDSL_CORE_ROOFLINE_H
#define FDSL_CORE_ROOFLINE_H

#include "core/portable.h"

/* Kinds of arithmetic, each with its own peak rate. */
enum unit {
    UNIT_FP32, /* CUDA cores, or CPU vector units */
    UNIT_TF32, /* tensor cores */
    UNIT_HALF, /* tensor cores, fp16 or bf16 with fp32 accumulation */
    UNIT_COUNT
};

/* The least work of a run; 0 if unknown. A round is a step or an epoch within the run. */
struct least_work {
    double flops;               /* floating-point operations; a fused multiply-add counts as two */
    enum unit unit;             /* the fastest unit that the variant uses for any of these operations */
    double once_bytes;          /* distinct bytes of memory that the run must read or write */
    double round_bytes, rounds; /* distinct bytes that each round must transfer again; number of rounds */
    double bus_bytes;           /* bytes that must cross the bus from the host to the device */
};

/* Peak rates of a machine; 0 if unknown. */
struct machine_peaks {
    double flops_per_s[UNIT_COUNT];
    double memory_bytes_per_s;
    double cache_bytes; /* maximum amount of data that can stay in caches between two runs */
    double chip_bytes;  /* maximum amount of data that can stay on chip within a run, including registers and
                         * shared memory */
    double bus_bytes_per_s;
};

/* Properties of a GPU that the driver reports. */
struct gpu_facts {
    int major, minor; /* compute capability */
    int multiprocessors;
    double clock_hz, memory_clock_hz; /* maximum clocks */
    int memory_bus_bits;
    double cache_bytes;     /* L2 cache */
    double registers_bytes; /* per multiprocessor */
    double bus_bytes_per_s; /* PCIe, in one direction */
};

enum bound { BOUND_UNKNOWN, BOUND_COMPUTE, BOUND_MEMORY, BOUND_BUS };

/* The lower bound of a run: floor_s is the larger of flops / peak_flops and bytes / peak_bytes_per_s. */
struct roofline {
    double flops, peak_flops;       /* peak_flops: per second; 0 if unknown */
    double bytes, peak_bytes_per_s; /* memory traffic in spite of caches, or bus traffic; 0 if unknown */
    enum bound bound;
    double floor_s; /* 0 if unknown */
};

FDSL_C_BEGIN

/* Returns the lower bound of `work` on a machine with these peaks. */
struct roofline roofline_of(const struct least_work *work, const struct machine_peaks *peaks);

/* Adds one rank to `all`, the total of ranks that run concurrently. The first call needs a zeroed `all`.
 * Adds the work and the peaks. `sharers` >= 1 ranks share the rank's device, so the rank adds 1/sharers of
 * the device's peaks. The bound and the floor are those of the rank with the largest floor. */
void roofline_add(struct roofline *all, const struct roofline *rank, int sharers);

/* Returns "compute", "memory", "bus", or "" if there is no bound. */
const char *roofline_bound_name(enum bound bound);

/* Returns the dense peak rates of a GPU. A FLOP rate is 0 if the compute capability is not in the table. Any
 * rate is 0 if its clock or bus width is 0. */
struct machine_peaks roofline_gpu_peaks(const struct gpu_facts *gpu);

/* Returns the peak fp32 FLOPs per cycle per core with this instruction set (variant.instruction_set); 0 if
 * unknown. */
double roofline_cpu_flops_per_cycle(const char *instruction_set);

FDSL_C_END

#endif
