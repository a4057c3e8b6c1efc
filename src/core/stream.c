#include "core/stream.h"

#include <string.h>

/* Copies a batch in host memory. */
static enum status copy_batch(const struct stream_batch *batch, void *values, int32_t *labels)
{
    const struct batch *samples = &batch->samples;
    if (batch->ready)
        return status_set(STATUS_UNAVAILABLE, "batches in device memory cannot be copied by the host");
    if (labels && samples->count > 0 && !samples->labels)
        return status_set(STATUS_UNAVAILABLE, "the stream has no labels");
    if (samples->count == 0)
        return STATUS_OK;
    memcpy(values, samples->values, samples->bytes);
    if (labels)
        memcpy(labels, samples->labels, samples->count * sizeof *labels);
    return STATUS_OK;
}

enum status stream_fill(struct stream *stream, void *values, int32_t *labels, uint32_t *count)
{
    struct stream_batch batch;
    *count = 0;
    TRY(stream_next(stream, &batch));
    const enum status status = copy_batch(&batch, values, labels);
    *count = status == STATUS_OK ? batch.samples.count : 0;
    const struct failure failure = status_save(status);
    TRY(stream_release(stream, &batch, NULL));
    return status == STATUS_OK ? STATUS_OK : status_restore(&failure);
}
