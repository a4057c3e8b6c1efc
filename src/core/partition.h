/* How work is divided among ranks. */
#ifndef FDSL_CORE_PARTITION_H
#define FDSL_CORE_PARTITION_H

#include <stdbool.h>
#include <stdint.h>

struct partition {
    uint64_t rank, ranks; /* ranks >= 1 */
    bool strong;          /* a batch is shared out among the ranks; else each rank makes one */
};

/* Items [first, first + count) of `total`. */
struct share {
    uint64_t first, count, total;
};

/* The share of a batch of `batch` items: all of it (weak), or an equal part (strong), where lower ranks take
 * one more each if it does not come out even; 0 items for the last ranks where there are more than items. */
static inline struct share partition_share(const struct partition *partition, uint64_t batch)
{
    if (!partition->strong)
        return (struct share){partition->rank * batch, batch, partition->ranks * batch};
    uint64_t least = batch / partition->ranks, larger = batch % partition->ranks;
    uint64_t before = partition->rank < larger ? partition->rank : larger;
    return (struct share){partition->rank * least + before, least + (partition->rank < larger), batch};
}

#endif
