#include "machine/cores.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#ifdef HAVE_HWLOC
#include <hwloc.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/partition.h"
#include "machine/comm.h"

#define WORDS (sizeof((struct cores_mask *)0)->words / sizeof(unsigned long))

/* ---- Sets ---- */

static struct cores_mask united(struct cores_mask a, const struct cores_mask *b)
{
    for (size_t i = 0; i < WORDS; i++)
        a.words[i] |= b->words[i];
    return a;
}

static struct cores_mask common(struct cores_mask a, const struct cores_mask *b)
{
    for (size_t i = 0; i < WORDS; i++)
        a.words[i] &= b->words[i];
    return a;
}

static int count_of(const struct cores_mask *mask)
{
    int count = 0;
    for (size_t i = 0; i < WORDS; i++)
        count += __builtin_popcountl(mask->words[i]);
    return count;
}

/* ---- The plan ---- */

/* Returns a rank's share of the cores in `usable`: whole cores, or one shared core if there are more ranks
 * than cores. */
static struct cores_mask share_of(const struct cores_mask *usable, int count, int rank,
                                  const struct cores_mask *cores, int core_count, bool *crowded)
{
    struct cores_mask mine = {{0}};
    uint64_t total = 0, number = 0;
    for (int i = 0; i < core_count; i++) {
        struct cores_mask part = common(cores[i], usable);
        total += count_of(&part) > 0;
    }
    const struct partition partition = {(uint64_t)rank, (uint64_t)count, true};
    struct share share = partition_share(&partition, total);
    *crowded = total < (uint64_t)count;
    if (*crowded)
        share = (struct share){total ? (uint64_t)rank % total : 0, 1, total};
    for (int i = 0; i < core_count; i++) {
        struct cores_mask part = common(cores[i], usable);
        if (count_of(&part) == 0)
            continue;
        if (number >= share.first && number < share.first + share.count)
            mine = united(mine, &part);
        number++;
    }
    return mine;
}

struct cores_plan cores_share_out(const struct cores_mask *ranks, int count, int rank,
                                  const struct cores_mask *allowed, const struct cores_mask *cores,
                                  int core_count)
{
    struct cores_plan plan = {CORES_KEPT, ranks[rank]};
    struct cores_mask usable = {{0}};
    int claims = 0;
    for (int i = 0; i < count; i++) {
        usable = united(usable, &ranks[i]);
        claims += count_of(&ranks[i]);
    }
    if (claims == count_of(&usable)) { /* no two ranks share a hardware thread */
        if (count_of(&usable) < count_of(allowed))
            plan.outcome = CORES_IDLE;
        return plan;
    }
    bool crowded;
    plan.mine = share_of(&usable, count, rank, cores, core_count, &crowded);
    plan.outcome = crowded ? CORES_CROWDED : CORES_SPLIT;
    return plan;
}

/* ---- This machine ---- */

static bool get_mask(struct cores_mask *mask)
{
    *mask = (struct cores_mask){{0}};
    return sched_getaffinity(0, sizeof *mask, (cpu_set_t *)mask->words) == 0;
}

static bool set_mask(const struct cores_mask *mask)
{
    return sched_setaffinity(0, sizeof *mask, (const cpu_set_t *)mask->words) == 0;
}

/* Returns all hardware threads that this process may use. Requests every hardware thread; Linux reduces the
 * request to the allowed ones. */
static struct cores_mask allowed_now(const struct cores_mask *current)
{
    struct cores_mask allowed;
    memset(&allowed, 0xff, sizeof allowed);
    if (!set_mask(&allowed) || !get_mask(&allowed))
        allowed = *current;
    (void)set_mask(current);
    return allowed;
}

/* Treats each hardware thread as a core. Used if the topology is unknown. */
static int singles(const struct cores_mask *allowed, struct cores_mask *cores)
{
    int count = 0;
    for (size_t i = 0; i < CORES_MAX; i++)
        if (allowed->words[i / CORES_WORD_BITS] >> i % CORES_WORD_BITS & 1)
            cores[count++].words[i / CORES_WORD_BITS] = 1ul << i % CORES_WORD_BITS;
    return count;
}

#ifdef HAVE_HWLOC
/* Lists up to `room` cores in hwloc's logical order, which groups them by socket and shared cache. Returns
 * their number; 0 if hwloc finds none. */
static int find_cores(struct cores_mask *cores, int room)
{
    hwloc_topology_t topology;
    (void)setenv("HWLOC_HIDE_ERRORS", "2", 0); /* no messages on stderr about a missing /sys */
    if (hwloc_topology_init(&topology) != 0)
        return 0;
    int count = 0;
    if (hwloc_topology_load(topology) == 0)
        count = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE);
    count = count < 0 ? 0 : count > room ? room : count;
    for (int i = 0; i < count; i++) {
        hwloc_obj_t core = hwloc_get_obj_by_type(topology, HWLOC_OBJ_CORE, (unsigned)i);
        for (size_t w = 0; w < WORDS; w++)
            cores[i].words[w] = hwloc_bitmap_to_ith_ulong(core->cpuset, (unsigned)w);
    }
    hwloc_topology_destroy(topology);
    return count;
}
#else
static int find_cores(struct cores_mask *cores, int room)
{
    (void)cores, (void)room;
    return 0;
}
#endif

static enum status plan_with(const struct cores_mask *masks, const struct cores_mask *allowed,
                             struct cores_plan *plan)
{
    int room = count_of(allowed);
    struct cores_mask *cores = calloc((size_t)room + 1, sizeof *cores);
    if (!cores)
        return status_set(STATUS_FAILED, "out of memory for a list of %d cores", room);
    int count = find_cores(cores, room);
    if (count == 0)
        count = singles(allowed, cores);
    *plan = cores_share_out(masks, comm_local_size(), comm_local_rank(), allowed, cores, count);
    free(cores);
    return STATUS_OK;
}

bool cores_bound_by_openmp(void)
{
#ifdef _OPENMP
    return omp_get_proc_bind() != omp_proc_bind_false;
#else
    return false;
#endif
}

enum status cores_take(enum cores_outcome *outcome)
{
    *outcome = CORES_KEPT;
    if (comm_size() == 1)
        return STATUS_OK;
    struct cores_mask mine;
    struct cores_mask *masks = calloc((size_t)comm_local_size(), sizeof *masks);
    struct cores_plan plan = {CORES_KEPT, {{0}}};
    enum status status = STATUS_OK;
    if (!masks || !get_mask(&mine))
        status = status_set(STATUS_FAILED, "the cores of this process cannot be read: %s; try --bind none",
                            masks ? strerror(errno) : "out of memory");
    status = comm_agree(status);
    if (status == STATUS_OK)
        status = comm_gather_local(&mine, sizeof mine, masks);
    if (status == STATUS_OK) {
        struct cores_mask allowed = allowed_now(&mine);
        status = plan_with(masks, &allowed, &plan);
    }
    free(masks);
    TRY(status);
    *outcome = plan.outcome;
    if (count_of(&plan.mine) > 0 && !set_mask(&plan.mine))
        return status_set(STATUS_FAILED, "the cores of this process cannot be set: %s; try --bind none",
                          strerror(errno));
    return STATUS_OK;
}
