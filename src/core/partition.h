/* How work is divided among ranks. */
#ifndef FDSL_CORE_PARTITION_H
#define FDSL_CORE_PARTITION_H

#include <stdbool.h>
#include <stdint.h>

struct partition {
    uint64_t rank, ranks; /* ranks >= 1 */
    bool strong;          /* strong scaling: the ranks divide one batch; weak: each rank has a whole batch */
};

/* Items [first, first + count) of `total`. */
struct share {
    uint64_t first, count, total;
};

/* Returns the rank's share of a batch. Weak scaling: `batch` items per rank. Strong scaling: batch / ranks
 * items. If there is a remainder, each of the lowest ranks gets one more item. With more ranks than items,
 * the last ranks get 0 items. */
static inline struct share partition_share(const struct partition *partition, uint64_t batch)
{
    if (!partition->strong)
        return (struct share){partition->rank * batch, batch, partition->ranks * batch};
    uint64_t least = batch / partition->ranks, larger = batch % partition->ranks;
    uint64_t before = partition->rank < larger ? partition->rank : larger;
    return (struct share){partition->rank * least + before, least + (partition->rank < larger), batch};
}

#endif
