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

#include "core/parallel.h"
#include "machine/comm.h"

#define WORDS (sizeof((struct cores_mask *)0)->words / sizeof(unsigned long))

/* ---- Masks ---- */

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

/* Returns which of the `total` cores belong to a rank; see cores_share_out(). If there are more ranks than
 * cores, each rank gets one core: rank r gets core r mod `total`. */
static struct share part_of(const uint32_t *extra, int count, int rank, uint64_t total)
{
    const struct partition partition = {
        .rank = (uint64_t)rank, .ranks = (uint64_t)count, .strong = true, .weights = extra};
    if (total < (uint64_t)count)
        return (struct share){total ? (uint64_t)rank % total : 0, 1, total};
    if (!extra)
        return partition_share(&partition, total);
    const struct share others = partition_share(&partition, total - (uint64_t)count);
    return (struct share){(uint64_t)rank + others.first, 1 + others.count, total};
}

/* Returns a rank's share of the cores in `usable`: whole cores, or one shared core if there are more ranks
 * than cores. */
static struct cores_mask share_of(const struct cores_mask *usable, const uint32_t *extra, int count, int rank,
                                  const struct cores_mask *cores, int core_count, bool *crowded)
{
    struct cores_mask mine = {{0}};
    uint64_t total = 0, number = 0;
    for (int i = 0; i < core_count; i++) {
        struct cores_mask part = common(cores[i], usable);
        total += count_of(&part) > 0;
    }
    const struct share share = part_of(extra, count, rank, total);
    *crowded = total < (uint64_t)count;
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

struct cores_plan cores_share_out(const struct cores_mask *ranks, const uint32_t *extra, int count, int rank,
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
    plan.mine = share_of(&usable, extra, count, rank, cores, core_count, &crowded);
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

/* The values that each rank sends to the other ranks of its machine. */
struct claim {
    struct cores_mask mask;
    uint32_t threads;
};

/* Room for the claims of all ranks of a machine, in the form that cores_share_out() expects. */
struct claims {
    struct claim *all;
    struct cores_mask *masks;
    uint32_t *extra;
};

static bool claims_open(struct claims *claims, size_t count)
{
    claims->all = calloc(count, sizeof *claims->all);
    claims->masks = calloc(count, sizeof *claims->masks);
    claims->extra = calloc(count, sizeof *claims->extra);
    return claims->all && claims->masks && claims->extra;
}

static void claims_close(struct claims *claims)
{
    free(claims->all);
    free(claims->masks);
    free(claims->extra);
}

/* Splits the claims into arrays. Returns whether the ranks chose different numbers of threads. */
static bool claims_split(struct claims *claims, int count)
{
    bool chosen = true, differ = false;
    for (int i = 0; i < count; i++) {
        const struct claim *claim = &claims->all[i];
        claims->masks[i] = claim->mask;
        claims->extra[i] = claim->threads ? claim->threads - 1 : 0;
        chosen &= claim->threads > 0;
        differ |= claim->threads != claims->all[0].threads;
    }
    return chosen && differ;
}

static enum status plan_with(struct claims *claims, const struct cores_mask *allowed, struct cores_plan *plan)
{
    int room = count_of(allowed);
    bool differ = claims_split(claims, comm_local_size());
    FREED struct cores_mask *cores = calloc((size_t)room + 1, sizeof *cores);
    TRY(ALLOCATED(cores, "out of memory for a list of %d cores", room));
    int count = find_cores(cores, room);
    if (count == 0)
        count = singles(allowed, cores);
    *plan = cores_share_out(claims->masks, differ ? claims->extra : NULL, comm_local_size(),
                            comm_local_rank(), allowed, cores, count);
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

/* Collective: gathers the claims (struct claim) of the ranks of this machine, and plans which cores this rank
 * uses. */
static enum status plan_together(struct claims *claims, uint32_t threads, struct cores_plan *plan)
{
    struct claim mine = {.threads = threads};
    bool room = claims_open(claims, (size_t)comm_local_size());
    enum status status = STATUS_OK;
    if (!room || !get_mask(&mine.mask))
        status = status_set(STATUS_FAILED, "the cores of this process cannot be read: %s; try --bind none",
                            room ? strerror(errno) : "out of memory");
    TRY(comm_agree(status));
    TRY(comm_gather_local(&mine, sizeof mine, claims->all));
    struct cores_mask allowed = allowed_now(&mine.mask);
    return plan_with(claims, &allowed, plan);
}

enum status cores_take(uint32_t threads, enum cores_outcome *outcome)
{
    struct cores_plan plan = {CORES_KEPT, {{0}}};
    struct claims claims = {0};
    *outcome = CORES_KEPT;
    if (comm_size() == 1)
        return STATUS_OK;
    enum status status = plan_together(&claims, threads, &plan);
    claims_close(&claims);
    TRY(status);
    *outcome = plan.outcome;
    if (count_of(&plan.mine) > 0 && !set_mask(&plan.mine))
        return status_set(STATUS_FAILED, "the cores of this process cannot be set: %s; try --bind none",
                          strerror(errno));
    return STATUS_OK;
}
