/* --verify: batches on the device against what the plain reader reads and the reference converts. */
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "load/delivery.cuh"

static enum status room_to_verify(struct outlet *outlet)
{
    const struct delivery *delivery = outlet->delivery;
    if (outlet->read)
        return STATUS_OK;
    outlet->wanted = static_cast<uint8_t *>(malloc(delivery->slot_bytes));
    outlet->found = static_cast<uint8_t *>(malloc(delivery->slot_bytes));
    outlet->read = static_cast<uint8_t *>(malloc(delivery->arrays.bytes_max));
    return outlet->wanted && outlet->found && outlet->read
               ? STATUS_OK
               : status_set(STATUS_FAILED, "out of memory to verify");
}

/* What the slot and the label must be, from the plain reader and the reference conversion. */
static enum status want(struct outlet *outlet, uint32_t number, int32_t *label)
{
    const struct delivery *delivery = outlet->delivery;
    const struct dataset *dataset = delivery->load->dataset;
    const struct array_sample *array = &delivery->arrays.samples[number];
    const struct dataset_member *members = &dataset->members[dataset->samples[number].member];
    *label = LABEL_NONE;
    for (uint32_t m = 0; m < array->members; m++) {
        TRY(plain_bytes(&outlet->plain, &members[m], members[m].size, outlet->read));
        if (m == array->label) {
            (void)convert_label(outlet->read, members[m].size, label);
            continue;
        }
        for (uint64_t i = 0; i < delivery->arrays.values; i++)
            convert_one(&delivery->convert, outlet->read + (array->values - array->at[m]), i, outlet->wanted);
    }
    return STATUS_OK;
}

static enum status check_slot(struct outlet *outlet, uint32_t slot)
{
    const struct delivery *delivery = outlet->delivery;
    uint32_t number = outlet->held[slot];
    int32_t label, wanted_label;
    uint64_t hash;
    CUDA_TRY(cudaMemcpy(outlet->found, outlet->tensor + slot * delivery->stride, delivery->slot_bytes,
                        cudaMemcpyDeviceToHost));
    CUDA_TRY(cudaMemcpy(&label, &outlet->labels[slot], sizeof label, cudaMemcpyDeviceToHost));
    CUDA_TRY(cudaMemcpy(&hash, &outlet->hashes[slot], sizeof hash, cudaMemcpyDeviceToHost));
    TRY(want(outlet, number, &wanted_label));
    bool right = hash == delivery->load->dataset->samples[number].whole && label == wanted_label &&
                 memcmp(outlet->found, outlet->wanted, delivery->slot_bytes) == 0;
    uint8_t *seen = &delivery->load->control->seen[number];
    if (right && __atomic_load_n(seen, __ATOMIC_RELAXED) < 255)
        __atomic_fetch_add(seen, 1, __ATOMIC_RELAXED);
    return STATUS_OK;
}

enum status outlet_check(struct outlet *outlet, uint32_t slot, uint32_t count)
{
    TRY(room_to_verify(outlet));
    CUDA_TRY(cudaEventSynchronize(outlet->berths[slot / outlet->delivery->load->batch].ready));
    for (uint32_t i = slot; i < slot + count; i++)
        if (outlet->held[i] != DELIVERY_LOST)
            TRY(check_slot(outlet, i));
    return STATUS_OK;
}
