/* The instruction sets for which variants with OpenMP have their own code. */
#ifndef FDSL_MACHINE_ISA_H
#define FDSL_MACHINE_ISA_H

#include <stdbool.h>

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

#endif
