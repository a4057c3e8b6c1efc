/* What the methods of allreduce.cuh share: the machine and GPU of each rank, and gathering data of all ranks.
 */
#ifndef FDSL_CUDA_TRAIN_ALLREDUCE_PARTS_CUH
#define FDSL_CUDA_TRAIN_ALLREDUCE_PARTS_CUH

#include <stddef.h>

#include "core/status.h"

struct rank_location {
    char host[64], boot_id[40]; /* the boot id differs between machines that have the same host name */
    unsigned char uuid[16];     /* of the GPU */
    char bus_id[32];            /* PCI bus id of the GPU: "0000:01:00.0" */
};

enum status rank_location_find(int device, struct rank_location *location);

bool rank_locations_same_machine(const struct rank_location *a, const struct rank_location *b);
bool rank_locations_same_gpu(const struct rank_location *a, const struct rank_location *b);

/* Collective: gathers `bytes` bytes from each rank, in rank order, into `all` of every rank. */
enum status allreduce_gather(const void *mine, size_t bytes, void *all);

#endif
