#include "train/job.h"

#include <inttypes.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum status job_open_data(const struct job_parameters *parameters, struct data *data)
{
    if (parameters->channels == 2)
        return status_set(STATUS_USAGE, "--channels: '2' is neither 1 nor 3");
    struct data_request request = {.name = parameters->data,
                                   .image = parameters->image,
                                   .label = parameters->label,
                                   .train_size = parameters->train_size,
                                   .test_size = parameters->test_size,
                                   .classes = parameters->classes,
                                   .preset = parameters->preset,
                                   .res = parameters->res,
                                   .fit = {.how = (enum fit_how)parameters->fit,
                                           .res = (uint32_t)parameters->out_res,
                                           .channels = (uint32_t)parameters->channels},
                                   .batch = parameters->batch,
                                   .feed = parameters->feed,
                                   .fresh = parameters->fresh,
                                   .resources = {.threads = 1}};
#ifdef _OPENMP
    request.resources.threads = omp_get_max_threads();
#endif
    *data = (struct data){0};
    return data_open(&request, data);
}

const char *job_lacking(const struct job_parameters *parameters, const char *option)
{
    if ((strcmp(option, "fit") == 0 || strcmp(option, "channels") == 0) && !parameters->out_res)
        return "--out-res PIXELS";
    if (strcmp(option, "preset") == 0 && strcmp(parameters->data, "synth") != 0)
        return "--data synth";
    return NULL;
}

enum status job_check_batch(const struct job_parameters *parameters, enum data_part part,
                            const struct data *data)
{
    uint32_t count = data->sets[part].count;
    if (parameters->batch > count)
        return status_set(STATUS_USAGE,
                          "--batch %" PRIu64 " is more than the %" PRIu32 " samples to %s; lower --batch",
                          parameters->batch, count, part == DATA_TRAIN ? "train on" : "test with");
    return STATUS_OK;
}

enum status job_stay(void *input, void *parameters, const struct partition *partition)
{
    (void)input, (void)parameters, (void)partition;
    return STATUS_OK;
}

uint64_t job_batch(const void *parameters)
{
    return ((const struct job_parameters *)parameters)->batch;
}
