/* The roofline: the least time that the work of a run needs on a machine.
 *
 * It follows from the work that no right program can leave out and from the peak rates of the units that do
 * it. Where either is not known there is no bound. docs/roofline.md says what is counted, and where the peaks
 * come from. */
#ifndef FDSL_CORE_ROOFLINE_H
#define FDSL_CORE_ROOFLINE_H

#include "core/portable.h"

/* A kind of arithmetic that has a peak rate of its own. */
enum unit {
    UNIT_FP32, /* scalar lanes of a GPU, vectors of a CPU */
    UNIT_TF32, /* tensor cores */
    UNIT_HALF, /* tensor cores in fp16 or bf16 with sums in fp32 */
    UNIT_COUNT
};

/* The least work of a run; 0 where nothing is known to be necessary. */
struct least_work {
    double flops;               /* floating-point operations: a fused multiply-add counts as two */
    enum unit unit;             /* the fastest that the variant uses for any of them */
    double once_bytes;          /* distinct bytes of memory that the run must read or write */
    double round_bytes, rounds; /* distinct bytes that it must transfer again in each of its rounds */
    double bus_bytes;           /* bytes that must cross the bus from the host to the device */
};

/* Peak rates of a machine; 0 where unknown. */
struct machine_peaks {
    double flops_per_s[UNIT_COUNT];
    double memory_bytes_per_s;
    double cache_bytes; /* of memory's contents that may stay in a cache between two runs */
    double chip_bytes;  /* the same within a run, with registers and shared memory */
    double bus_bytes_per_s;
};

/* What the driver tells of a GPU. */
struct gpu_facts {
    int major, minor; /* compute capability */
    int multiprocessors;
    double clock_hz, memory_clock_hz; /* the highest */
    int memory_bus_bits;
    double cache_bytes;     /* the second level's */
    double registers_bytes; /* of a multiprocessor */
    double bus_bytes_per_s; /* from the host, in one direction */
};

enum bound { BOUND_UNKNOWN, BOUND_COMPUTE, BOUND_MEMORY, BOUND_BUS };

/* A run's work over a machine's peaks: floor_s is the larger of flops / peak_flops and bytes /
 * peak_bytes_per_s. */
struct roofline {
    double flops, peak_flops; /* 0 where unknown */
    double bytes,
        peak_bytes_per_s; /* of the memory that caches cannot replace, or of the bus; 0 where unknown */
    enum bound bound;
    double floor_s; /* 0 where unknown */
};

FDSL_C_BEGIN

struct roofline roofline_of(const struct least_work *work, const struct machine_peaks *peaks);

/* Adds a rank to `all` ranks that run at the same time, which begins as zeros: work adds up, and so do peaks,
 * of which a rank has its part where `sharers` ranks (at least 1) share a device. The bound and the floor are
 * those of the rank with the largest floor. */
void roofline_add(struct roofline *all, const struct roofline *rank, int sharers);

/* "compute", "memory", "bus", or "" where there is no bound. */
const char *roofline_bound_name(enum bound bound);

/* The peaks of a GPU, without those of sparse matrices. Arithmetic stays 0 where the compute capability is
 * not in the table, and a rate where its clock or width is 0. */
struct machine_peaks roofline_gpu_peaks(const struct gpu_facts *gpu);

/* The FLOPs of products that a core starts per cycle at most with these instructions (struct variant); 0
 * where unknown. */
double roofline_cpu_flops_per_cycle(const char *instruction_set);

FDSL_C_END

#endif
