/* What ranks do together, whatever joins them. */
#include "machine/comm.h"

/* Ranks with different options would deadlock; the results of ranks with different data would not fit
 * together. */
enum status comm_check_same(uint64_t mine, const char *what, const char *remedy)
{
    uint64_t first = mine;
    TRY(comm_spread(&first, sizeof first));
    return comm_agree(mine == first
                          ? STATUS_OK
                          : status_set(STATUS_USAGE, "its %s are not those of rank 0; %s", what, remedy));
}
