#include "machine/gpu_watch.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/phase.h"
#include "core/text.h"
#include "core/timer.h"
#include "machine/comm.h"
#include "machine/device.h"
#include "machine/ticker.h"

#define PERIOD_S      0.05
#define CLOCKS_MAX    8192 /* MHz; higher clocks count as this value */
#define ENERGY_SPAN_S 0.8  /* minimum time for a mean power; the energy counter changes every 100 ms */

/* A histogram of clocks in MHz, so that the median needs no list of samples. */
struct clocks {
    uint32_t seen[CLOCKS_MAX + 1];
    uint32_t total;
};

struct gpu_watch {
    char pci_bus_id[32];
    struct ticker *ticker; /* its thread updates the members below until gpu_watch_end() */
    struct clocks sm, mem;
    uint64_t throttle_reasons;
    double begin_s, begin_j; /* time and energy at the first energy reading; NaN before */
};

static void note_clock(struct clocks *clocks, int mhz)
{
    if (mhz < 0)
        return;
    clocks->seen[mhz < CLOCKS_MAX ? mhz : CLOCKS_MAX]++;
    clocks->total++;
}

/* Returns the median clock; for an even count, the lower of the middle two. Returns -1 if there was no
 * reading. */
static int median_clock(const struct clocks *clocks)
{
    uint32_t passed = 0;
    for (int mhz = 0; mhz <= CLOCKS_MAX; mhz++) {
        passed += clocks->seen[mhz];
        if (passed > 0 && 2 * (uint64_t)passed >= clocks->total)
            return mhz;
    }
    return -1;
}

static void look(struct gpu_watch *watch)
{
    struct gpu_clocks clocks;
    if (phase_now() != PHASE_TIMED || nvml_gpu_clocks(watch->pci_bus_id, &clocks) != STATUS_OK)
        return;
    note_clock(&watch->sm, clocks.sm_clock_mhz);
    note_clock(&watch->mem, clocks.memory_clock_mhz);
    watch->throttle_reasons |= clocks.throttle_reasons;
    if (isnan(watch->begin_s)) { /* only once: the query takes 4 ms on an H200 */
        watch->begin_j = nvml_gpu_energy_j(watch->pci_bus_id);
        watch->begin_s = timer_now_s();
    }
}

static void tick(void *context, uint64_t missed)
{
    (void)missed;
    look(context);
}

enum status gpu_watch_begin(const char *pci_bus_id, struct gpu_watch **watch)
{
    struct gpu_clocks unused;
    *watch = NULL;
    if (!*pci_bus_id || nvml_gpu_clocks(pci_bus_id, &unused) != STATUS_OK)
        return STATUS_OK;
    struct gpu_watch *self = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    snprintf(self->pci_bus_id, sizeof self->pci_bus_id, "%s", pci_bus_id);
    self->begin_s = self->begin_j = NAN;
    if (ticker_open(PERIOD_S, tick, self, &self->ticker) != 0) {
        free(self);
        return status_set(STATUS_FAILED, "cannot start a thread that watches the GPU; raise ulimit -u");
    }
    *watch = self;
    return STATUS_OK;
}

/* Returns the mean power from the first energy reading until now. */
static double mean_power_w(const struct gpu_watch *watch)
{
    double span_s = timer_now_s() - watch->begin_s;
    if (!(span_s >= ENERGY_SPAN_S) || isnan(watch->begin_j))
        return NAN;
    return (nvml_gpu_energy_j(watch->pci_bus_id) - watch->begin_j) / span_s;
}

void gpu_watch_end(struct gpu_watch *watch, struct gpu_watched *watched)
{
    *watched = (struct gpu_watched){.sm_clock_mhz = -1, .mem_clock_mhz = -1, .power_w = NAN};
    if (!watch)
        return;
    ticker_close(watch->ticker);
    watched->power_w = mean_power_w(watch);
    /* If the runs took less than one period, the thread may have no reading. A reading now still shows the
     * clocks of the runs, because clocks do not drop immediately. */
    look(watch);
    watched->sm_clock_mhz = median_clock(&watch->sm);
    watched->mem_clock_mhz = median_clock(&watch->mem);
    watched->throttle_reasons = watch->throttle_reasons;
    free(watch);
}

/* ---- Other processes ---- */

const char *const gpu_others_words[] = {"warn", "refuse", "ignore", NULL}; /* by enum gpu_others_action */

void gpu_others_text(const struct gpu_process *processes, size_t count, char *text, size_t size)
{
    *text = '\0';
    for (size_t i = 0; i < count && i < GPU_PROCESSES_MAX; i++) {
        char memory[32] = "";
        if (processes[i].memory_bytes >= 0)
            snprintf(memory, sizeof memory, ", %.1f GB", 1e-9 * (double)processes[i].memory_bytes);
        text_join(text, size, ", ", "pid %u (%s%s)", processes[i].pid,
                  *processes[i].name ? processes[i].name : "name unknown", memory);
    }
    if (count > GPU_PROCESSES_MAX)
        text_append(text, size, " and %zu more", count - GPU_PROCESSES_MAX);
}

/* Removes this process, which has used the GPU if it ran something before. */
static void drop_own(struct gpu_others *others)
{
    size_t kept = 0;
    const size_t listed = others->count < GPU_PROCESSES_MAX ? others->count : GPU_PROCESSES_MAX;
    for (size_t i = 0; i < listed; i++)
        if (others->processes[i].pid != (unsigned)getpid())
            others->processes[kept++] = others->processes[i];
    others->count -= listed - kept;
}

/* Returns whether a lower rank of this machine uses the same GPU, and has therefore named its processes. */
static enum status is_named(const char *pci_bus_id, bool *named)
{
    char ids[COMM_LOCAL_IDS][GPU_ID_BYTES];
    *named = false;
    if (comm_local_size() > COMM_LOCAL_IDS)
        return STATUS_OK;
    char own[GPU_ID_BYTES] = "";
    snprintf(own, sizeof own, "%s", pci_bus_id);
    TRY(comm_gather_local(own, sizeof own, ids));
    for (int i = 0; i < comm_local_rank(); i++)
        *named |= strcmp(ids[i], own) == 0;
    return STATUS_OK;
}

enum status gpu_others_look(int device, enum gpu_others_action action, struct gpu_others *others)
{
    char id[GPU_ID_BYTES] = "", text[1024];
    bool named;
    *others = (struct gpu_others){0};
    others->known = device >= 0 && action != GPU_OTHERS_IGNORE &&
                    device_pci_bus_id(device, id, sizeof id) == STATUS_OK &&
                    nvml_gpu_processes(id, others->processes, GPU_PROCESSES_MAX, &others->count) == STATUS_OK;
    drop_own(others);
    TRY(is_named(id, &named)); /* collective: from here on, ranks may begin to use their GPUs */
    if (!others->known || others->count == 0 || named)
        return comm_agree(STATUS_OK);
    gpu_others_text(others->processes, others->count, text, sizeof text);
    if (action == GPU_OTHERS_REFUSE)
        return comm_agree(status_set(STATUS_UNAVAILABLE,
                                     "GPU %d (%s) is in use by %s; end %s, choose another GPU with --device "
                                     "or --best-gpu, or allow it with --gpu-others warn",
                                     device, id, text, others->count == 1 ? "it" : "them"));
    status_warn_own("GPU %d (%s) is also used by %s, which can slow down the timed runs; end %s, choose "
                    "another GPU with --device or --best-gpu, or accept it with --gpu-others ignore",
                    device, id, text, others->count == 1 ? "it" : "them");
    return comm_agree(STATUS_OK);
}
