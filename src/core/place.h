/* A rank's place among all, and its share of a batch. */
#ifndef FDSL_CORE_PLACE_H
#define FDSL_CORE_PLACE_H

#include <stdbool.h>
#include <stdint.h>

struct place {
    uint64_t rank, ranks; /* ranks >= 1 */
    bool strong;          /* a batch is shared out among the ranks; else each rank makes one */
};

/* Items [first, first + count) of `total`. */
struct share {
    uint64_t first, count, total;
};

/* The share of a batch of `batch` items: all of it (weak), or an equal part (strong), where lower ranks take
 * one more each if it does not come out even; 0 items for the last ranks where there are more than items. */
static inline struct share place_share(const struct place *place, uint64_t batch)
{
    if (!place->strong)
        return (struct share){place->rank * batch, batch, place->ranks * batch};
    uint64_t least = batch / place->ranks, larger = batch % place->ranks;
    uint64_t before = place->rank < larger ? place->rank : larger;
    return (struct share){place->rank * least + before, least + (place->rank < larger), batch};
}

#endif
