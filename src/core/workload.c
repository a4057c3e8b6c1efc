#include "core/workload.h"

#include <string.h>

extern const struct workload workload_synth, workload_load, workload_ops, workload_train, workload_infer,
    workload_exchange;

const struct workload *const workload_table[] = {
    &workload_synth, &workload_load,     &workload_ops, &workload_train,
    &workload_infer, &workload_exchange, NULL};

const struct workload *workload_find(const char *name)
{
    for (size_t i = 0; workload_table[i]; i++)
        if (strcmp(workload_table[i]->name, name) == 0)
            return workload_table[i];
    return NULL;
}

enum status workload_refuse_max(uint64_t batch)
{
    return batch != OPTION_MAX ? STATUS_OK
                               : status_set(STATUS_USAGE, "only the workloads train and infer can search for "
                                                          "the largest batch (--batch max); give a number");
}
