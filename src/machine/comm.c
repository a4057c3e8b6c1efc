/* Communication built on the functions of comm_mpi.c or comm_serial.c. */
#include "machine/comm.h"

/* If this check were missing, ranks with different options could deadlock, and the program would combine
 * results from different data. */
enum status comm_check_same(uint64_t mine, const char *what, const char *remedy)
{
    uint64_t first = mine;
    TRY(comm_spread(&first, sizeof first));
    return comm_agree(mine == first
                          ? STATUS_OK
                          : status_set(STATUS_USAGE, "its %s differ from those of rank 0; %s", what, remedy));
}
