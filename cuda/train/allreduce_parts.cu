#include "train/allreduce_parts.cuh"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/check.cuh"
#include "machine/comm.h"

enum status rank_location_find(int device, struct rank_location *location)
{
    cudaDeviceProp properties;
    memset(location, 0, sizeof *location);
    CUDA_TRY(cudaGetDeviceProperties(&properties, device));
    CUDA_TRY(cudaDeviceGetPCIBusId(location->bus_id, sizeof location->bus_id, device));
    memcpy(location->uuid, &properties.uuid, sizeof location->uuid);
    if (gethostname(location->host, sizeof location->host - 1) != 0)
        return status_set(STATUS_FAILED, "cannot get the name of this machine");
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file) { /* without this file, host names alone tell machines apart */
        if (!fgets(location->boot_id, sizeof location->boot_id, file))
            location->boot_id[0] = '\0';
        fclose(file);
    }
    return STATUS_OK;
}

bool rank_locations_same_machine(const struct rank_location *a, const struct rank_location *b)
{
    return strcmp(a->host, b->host) == 0 && strcmp(a->boot_id, b->boot_id) == 0;
}

bool rank_locations_same_gpu(const struct rank_location *a, const struct rank_location *b)
{
    return rank_locations_same_machine(a, b) && memcmp(a->uuid, b->uuid, sizeof a->uuid) == 0;
}

enum status allreduce_gather(const void *mine, size_t bytes, void *all)
{
    TRY(comm_gather(mine, bytes, all));
    return comm_spread(all, bytes * (size_t)comm_size());
}
