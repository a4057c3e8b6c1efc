/* --verify: compares batches on the device with the reference, samples of the plain reader converted by the
 * reference conversion. */
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "data/label.h"
#include "load/delivery.cuh"

static enum status room_to_verify(struct output_queue *queue)
{
    const struct delivery *delivery = queue->delivery;
    if (queue->read)
        return STATUS_OK;
    queue->wanted = static_cast<uint8_t *>(malloc(delivery->slot_bytes));
    queue->found = static_cast<uint8_t *>(malloc(delivery->slot_bytes));
    queue->read = static_cast<uint8_t *>(malloc(delivery->arrays.bytes_max));
    return queue->wanted && queue->found && queue->read
               ? STATUS_OK
               : status_set(STATUS_FAILED, "out of memory to verify");
}

/* Computes the expected values and label of a slot. */
static enum status want(struct output_queue *queue, uint32_t number, int32_t *label)
{
    const struct delivery *delivery = queue->delivery;
    const struct dataset *dataset = delivery->load->dataset;
    const struct array_sample *array = &delivery->arrays.samples[number];
    const struct dataset_member *members = &dataset->members[dataset->samples[number].member];
    *label = LABEL_NONE;
    for (uint32_t m = 0; m < array->members; m++) {
        TRY(plain_bytes(&queue->plain, &members[m], members[m].size, queue->read));
        if (m == array->label) {
            (void)label_parse(queue->read, members[m].size, label);
            continue;
        }
        for (uint64_t i = 0; i < delivery->arrays.values; i++)
            convert_one(&delivery->convert, queue->read + (array->values - array->at[m]), i, queue->wanted);
    }
    return STATUS_OK;
}

/* Compares a slot with the expected values, label, and hash computed during unpacking. */
static enum status check_slot(struct output_queue *queue, uint32_t slot, bool *right)
{
    const struct delivery *delivery = queue->delivery;
    const struct dataset_sample *sample = &delivery->load->dataset->samples[queue->held[slot]];
    int32_t label, wanted_label;
    uint64_t hash;
    CUDA_TRY(cudaMemcpy(queue->found, queue->tensor + slot * delivery->stride, delivery->slot_bytes,
                        cudaMemcpyDeviceToHost));
    CUDA_TRY(cudaMemcpy(&label, &queue->labels[slot], sizeof label, cudaMemcpyDeviceToHost));
    CUDA_TRY(cudaMemcpy(&hash, &queue->hashes[slot], sizeof hash, cudaMemcpyDeviceToHost));
    TRY(want(queue, queue->held[slot], &wanted_label));
    *right = hash == (delivery->load->control->whole ? sample->whole : sample->edges) &&
             label == wanted_label && memcmp(queue->found, queue->wanted, delivery->slot_bytes) == 0;
    return STATUS_OK;
}

enum status queue_check(struct output_queue *queue, uint32_t slot, uint32_t count)
{
    TRY(room_to_verify(queue));
    CUDA_TRY(cudaEventSynchronize(queue->buffers[slot / queue->delivery->load->batch].ready));
    for (uint32_t i = slot; i < slot + count; i++)
        if (queue->held[i] != DELIVERY_LOST) {
            uint8_t *seen = &queue->delivery->load->control->seen[queue->held[i]];
            bool right;
            TRY(check_slot(queue, i, &right));
            if (right && __atomic_load_n(seen, __ATOMIC_RELAXED) < 255)
                __atomic_fetch_add(seen, 1, __ATOMIC_RELAXED);
        }
    return STATUS_OK;
}

#define LOOKED_AT 4096 /* maximum slots per worker; each takes about 50 us */

enum status delivery_verify_slots(void *state, uint64_t *wrong)
{
    struct delivery *delivery = static_cast<struct delivery *>(state);
    uint32_t step = (delivery->slots + LOOKED_AT - 1) / LOOKED_AT;
    *wrong = 0;
    CUDA_TRY(cudaSetDevice(delivery->device));
    for (uint32_t w = 0; w < delivery->workers; w++) {
        struct output_queue *queue = &delivery->queues[w];
        TRY(room_to_verify(queue));
        for (uint32_t i = 0; i < delivery->slots; i += step) {
            bool right = true;
            if (queue->held[i] != DELIVERY_LOST)
                TRY(check_slot(queue, i, &right));
            *wrong += !right;
        }
    }
    return STATUS_OK;
}
