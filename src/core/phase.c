#include "core/phase.h"

#include <stdatomic.h>

#ifdef HAVE_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

static _Atomic int current = PHASE_IDLE;

void phase_enter(enum phase phase)
{
    if (current != PHASE_IDLE)
        range_pop();
    if (phase != PHASE_IDLE)
        range_push(phase_name(phase));
    current = (int)phase;
}

enum phase phase_now(void)
{
    return (enum phase)current;
}

const char *phase_name(enum phase phase)
{
    static const char *const names[] = {"idle", "setup", "verify", "warm-up", "timed", "measure", "teardown"};
    return names[phase];
}

#ifdef HAVE_NVTX
void range_push(const char *name)
{
    nvtxRangePushA(name);
}

void range_pop(void)
{
    nvtxRangePop();
}
#endif
