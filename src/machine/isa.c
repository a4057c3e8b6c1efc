#include "machine/isa.h"

#include <string.h>

static const char *const names[ISAS] = {"scalar", "avx2", "avx512"};

static enum isa forced = ISAS; /* ISAS: isa_force() has no effect */

static enum isa best_of_machine(void)
{
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c") || !__builtin_cpu_supports("popcnt"))
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
