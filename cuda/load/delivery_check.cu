/* For --verify: compares batches on the device with the data set. The plain reader (data/plain_reader.h)
 * reads the samples again, and the host converts them. */
#include <stdlib.h>
#include <string.h>

#include "common/check.cuh"
#include "data/random_draws.h"
#include "data/members.h"
#include "load/delivery.cuh"

/* Slots are copied in groups of about this size, because even a small copy takes 10 to 20 µs. */
#define GROUP_BYTES (4u << 20)

/* Returns the number of slots in a group: at least 1, and at most the batch size. */
static uint32_t group_slots(const struct delivery *delivery)
{
    uint64_t slots = GROUP_BYTES / delivery->stride;
    return slots < 1 ? 1 : slots < delivery->load->batch ? (uint32_t)slots : delivery->load->batch;
}

/* Allocates a queue's buffers for the check, unless they exist. If memory runs out, frees all of them. */
static enum status room_to_verify(struct output_queue *queue)
{
    const struct delivery *delivery = queue->delivery;
    struct delivery_check *check = &queue->check;
    if (check->read)
        return STATUS_OK;
    const size_t slots = group_slots(delivery);
    check->wanted = static_cast<uint8_t *>(malloc(delivery->slot_bytes));
    check->tensor = static_cast<uint8_t *>(malloc(slots * delivery->stride));
    check->labels = static_cast<int32_t *>(malloc(slots * sizeof *check->labels));
    check->hashes = static_cast<uint64_t *>(malloc(slots * sizeof *check->hashes));
    check->read = static_cast<uint8_t *>(malloc(delivery->arrays.bytes_max));
    if (check->wanted && check->tensor && check->labels && check->hashes && check->read)
        return STATUS_OK;
    delivery_check_free(check);
    return status_set(STATUS_EXHAUSTED, "out of memory to verify");
}

void delivery_check_free(struct delivery_check *check)
{
    free(check->wanted);
    free(check->tensor);
    free(check->labels);
    free(check->hashes);
    free(check->read);
    image_scratch_close(&check->scratch);
    *check = {};
}

/* Reads the image file of a sample to check.read. Sets `*image` to the file's entry in the data set. */
static enum status read_image(struct output_queue *queue, uint32_t number,
                              const struct dataset_member **image)
{
    const struct dataset *dataset = queue->delivery->load->dataset;
    const struct dataset_sample *sample = &dataset->samples[number];
    *image = &dataset->members[sample->member + sample->image];
    return plain_bytes(&queue->plain, *image, (*image)->size, queue->check.read);
}

/* Compares a slot with the converted values of an array. */
static enum status check_array(struct output_queue *queue, uint32_t number, const uint8_t *slot, bool *right)
{
    const struct delivery *delivery = queue->delivery;
    const struct array_sample *array = &delivery->arrays.samples[number];
    const struct dataset_member *image;
    TRY(read_image(queue, number, &image));
    const uint8_t *values = queue->check.read + (array->values_offset -
                                                 array->at[delivery->load->dataset->samples[number].image]);
    for (uint64_t i = 0; i < delivery->arrays.value_count; i++)
        convert_one(&delivery->convert, values, i, queue->check.wanted);
    *right = memcmp(slot, queue->check.wanted, delivery->slot_bytes) == 0;
    return STATUS_OK;
}

/* Returns whether value `i` of a slot is the conversion of a byte that differs from `pixel` by at most
 * `tolerance`. */
static bool is_near(const struct convert *convert, const uint8_t *slot, uint64_t i, uint8_t pixel,
                    uint32_t tolerance)
{
    uint32_t bytes = convert_value_bytes(convert);
    int from = (int)pixel - (int)tolerance, to = (int)pixel + (int)tolerance;
    for (int value = from < 0 ? 0 : from; value <= (to > 255 ? 255 : to); value++) {
        uint8_t stored[sizeof(float)] = {(uint8_t)value}, converted[sizeof(float)];
        convert_one(convert, stored, 0, converted);
        if (memcmp(slot + i * bytes, converted, bytes) == 0)
            return true;
    }
    return false;
}

/* Compares a slot with an image that the CPU decodes. */
static enum status check_picture(struct output_queue *queue, uint32_t number, uint32_t epoch,
                                 const uint8_t *slot, bool *right)
{
    const struct delivery *delivery = queue->delivery;
    const struct load *load = delivery->load;
    uint32_t tolerance = delivery->arrays.pictures[number].on_device ? delivery->tolerance : 0;
    const struct dataset_member *member;
    struct image image;
    bool is_image;
    TRY(read_image(queue, number, &member));
    enum status status = image_fit(&delivery->fit, members_format(member->extension), queue->check.read,
                                   member->size, epoch, number, &queue->check.scratch, &image, &is_image);
    if (status != STATUS_OK)
        return status_prefix(status, "--verify: %s/%s: offset %llu: sample '%s'", load->dataset->path,
                             load->dataset->files[member->file].name, (unsigned long long)member->offset,
                             load->dataset->samples[number].key);
    bool flip =
        load->augment && draw_move(&load->augmentation.move, load->augmentation.seed, epoch, number).flip;
    uint64_t res = delivery->fit.res, channels = delivery->fit.channels;
    *right = true;
    for (uint32_t c = 0; c < channels; c++) {
        const struct convert convert = delivery_convert(delivery, c);
        for (uint64_t y = 0; y < res; y++)
            for (uint64_t x = 0; x < res; x++) {
                uint64_t i = load->interleaved ? (y * res + x) * channels + c : (c * res + y) * res + x;
                uint8_t pixel = image.pixels[(y * res + (flip ? res - 1 - x : x)) * channels + c];
                *right &= is_near(&convert, slot, i, pixel, tolerance);
            }
    }
    return STATUS_OK;
}

/* Copies a group of consecutive slots from the device. */
static enum status copy_group(struct output_queue *queue, uint32_t first, uint32_t count)
{
    const uint64_t stride = queue->delivery->stride;
    struct delivery_check *check = &queue->check;
    CUDA_TRY(cudaMemcpy(check->tensor, queue->tensor + first * stride,
                        (count - 1) * stride + queue->delivery->slot_bytes, cudaMemcpyDeviceToHost));
    CUDA_TRY(cudaMemcpy(check->labels, &queue->labels[first], count * sizeof *check->labels,
                        cudaMemcpyDeviceToHost));
    CUDA_TRY(cudaMemcpy(check->hashes, &queue->hashes[first], count * sizeof *check->hashes,
                        cudaMemcpyDeviceToHost));
    return STATUS_OK;
}

/* Checks slot `first + i`, which is slot i of the copied group. Its values, its label, and the hash that the
 * kernel computed must equal the expected ones. */
static enum status check_slot(struct output_queue *queue, uint32_t first, uint32_t i, bool *right)
{
    const struct delivery *delivery = queue->delivery;
    const struct delivery_check *check = &queue->check;
    const uint32_t number = queue->held[first + i];
    const struct dataset_sample *sample = &delivery->load->dataset->samples[number];
    const uint8_t *slot = check->tensor + i * delivery->stride;
    int32_t label = LABEL_NONE;
    if (sample->rule)
        TRY(plain_label(&queue->plain, sample, 0, &label));
    TRY(delivery->load->decode ? check_picture(queue, number, queue->held_epoch[first + i], slot, right)
                               : check_array(queue, number, slot, right));
    *right &= check->hashes[i] == (delivery->load->control->whole ? sample->whole : sample->edges) &&
              check->labels[i] == label;
    return STATUS_OK;
}

/* Checks a group of slots. Counts correct samples in load->control->seen. */
static enum status check_group(struct output_queue *queue, uint32_t first, uint32_t count)
{
    TRY(copy_group(queue, first, count));
    for (uint32_t i = 0; i < count; i++)
        if (queue->held[first + i] != DELIVERY_LOST) {
            uint8_t *seen = &queue->delivery->load->control->seen[queue->held[first + i]];
            bool right;
            TRY(check_slot(queue, first, i, &right));
            if (right && __atomic_load_n(seen, __ATOMIC_RELAXED) < 255)
                __atomic_fetch_add(seen, 1, __ATOMIC_RELAXED);
        }
    return STATUS_OK;
}

enum status queue_check(struct output_queue *queue, uint32_t slot, uint32_t count)
{
    TRY(room_to_verify(queue));
    CUDA_TRY(cudaEventSynchronize(queue->buffers[slot / queue->delivery->load->batch].ready));
    const uint32_t group = group_slots(queue->delivery);
    for (uint32_t done = 0; done < count; done += group)
        TRY(check_group(queue, slot + done, group < count - done ? group : count - done));
    return STATUS_OK;
}

#define LOOKED_AT 4096 /* maximum number of slots to check per worker; checking one takes about 50 µs */

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
            if (queue->held[i] != DELIVERY_LOST) {
                TRY(copy_group(queue, i, 1));
                TRY(check_slot(queue, i, 0, &right));
            }
            *wrong += !right;
        }
    }
    return STATUS_OK;
}
