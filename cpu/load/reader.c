#include "reader.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/timer.h"
#include "machine/guard.h"
#include "machine/host.h"

/* ---- Copies to measure the bandwidth of memory ---- */

#define COPY_MAX_BYTES ((size_t)2 << 30) /* largest working set that copier_measure() copies */

void copier_forget(struct copier *copier)
{
    if (copier->set)
        munmap(copier->set, copier->set_bytes);
    copier->set = NULL;
}

/* Returns the bytes of a file that are in the working set: the size of a single file, a shard's size in whole
 * pages, or 0 for a shard without samples. */
static size_t set_bytes_of(const struct dataset *dataset, uint32_t file)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = dataset->files[file].bytes;
    if (!dataset->shards)
        return bytes;
    bool read = dataset->shard_first[file] < dataset->shard_first[file + 1];
    return read ? (bytes + page - 1) / page * page : 0;
}

/* Maps up to `bytes` bytes of a file at `memory`, in whole pages. Sets `*mapped` to the number of bytes
 * mapped, which is smaller if the file was truncated. With --on-error skip, a file that cannot be opened
 * counts as empty. */
static enum status map_over(const struct load *load, uint32_t file, uint8_t *memory, size_t bytes,
                            size_t *mapped)
{
    struct stat info;
    int fd;
    enum status status = dataset_file_open(load->dataset, file, 0, &fd);
    *mapped = 0;
    if (status != STATUS_OK)
        return load_skips(load) && status == STATUS_FAILED ? STATUS_OK : status;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t there = fstat(fd, &info) == 0 ? ((size_t)info.st_size + page - 1) / page * page : 0;
    size_t length = there < bytes ? there : bytes;
    void *mapping =
        length ? mmap(memory, length, PROT_READ, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, 0) : memory;
    int failure = errno;
    close(fd);
    if (mapping == MAP_FAILED)
        return status_set(status_of_errno(failure), "%s/%s: cannot map %zu bytes: %s", load->dataset->path,
                          load->dataset->files[file].name, length, strerror(failure));
    *mapped = length;
    return STATUS_OK;
}

/* Maps shards consecutively until `*bytes` are filled. Sets `*bytes` to the number mapped. */
static enum status map_shards(const struct load *load, uint8_t *memory, size_t *bytes)
{
    size_t at = 0;
    for (uint32_t f = 0; f < load->dataset->file_count && at < *bytes; f++) {
        size_t length = set_bytes_of(load->dataset, f), left = *bytes - at, mapped;
        TRY(map_over(load, f, memory + at, length < left ? length : left, &mapped));
        at += mapped;
    }
    *bytes = at;
    return STATUS_OK;
}

/* Creates the working set that copier_measure() copies. For local shards, it is their consecutive mappings.
 * For files and remote shards, it is anonymous memory of the same size. */
static enum status open_set(struct copier *copier)
{
    const struct dataset *dataset = copier->load->dataset;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), wanted = 0;
    for (uint32_t f = 0; f < dataset->file_count && wanted < COPY_MAX_BYTES; f++)
        wanted += set_bytes_of(dataset, f);
    wanted = wanted < COPY_MAX_BYTES ? (wanted + page - 1) / page * page : COPY_MAX_BYTES;
    uint8_t *memory = mmap(NULL, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return status_set(STATUS_EXHAUSTED, "out of memory for %zu bytes to measure the copy bandwidth",
                          wanted);
    copier->set = memory;
    copier->set_bytes = copier->copied_bytes = wanted;
    if (dataset->shards && !dataset->remote)
        return map_shards(copier->load, memory, &copier->copied_bytes);
    madvise(memory, wanted, MADV_NOHUGEPAGE);
    memset(memory, 1, wanted);
    return STATUS_OK;
}

/* Copies worker w's part of the working set in pieces of `piece` bytes. Each piece goes to the next slot of a
 * batch; a piece larger than a slot always starts at slot 0. Returns false if a page no longer exists. */
static bool copy_part(const struct copier *copier, uint8_t *buffer, int w, size_t piece)
{
    size_t threads = (size_t)copier->threads, slots = piece > copier->stride ? 1 : copier->load->given->batch;
    size_t begin = copier->copied_bytes * (size_t)w / threads,
           end = copier->copied_bytes * ((size_t)w + 1) / threads, slot = 0;
    for (size_t at = begin; at < end; at += piece) {
        uint8_t *to = buffer + slot * copier->stride;
        if (!guard_copy(to, copier->set + at, end - at < piece ? end - at : piece))
            return false;
        __asm__ volatile("" : : "r"(to) : "memory");
        slot = slot + 1 < slots ? slot + 1 : 0;
    }
    return true;
}

/* Copies the whole working set once. Returns bytes per second, or 0 if a page no longer exists. */
static double copy_all(const struct copier *copier, uint8_t *const *buffers, size_t piece)
{
    int threads = copier->threads, torn = 0;
    double begin_s = timer_now_s();
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : torn) if (threads > 1)
    for (int w = 0; w < threads; w++)
        torn += !copy_part(copier, buffers[w], w, piece);
    return torn ? 0 : (double)copier->copied_bytes / (timer_now_s() - begin_s);
}

enum status copier_measure(struct copier *copier, uint8_t *const *buffers, double *bytes_per_s)
{
    struct guard guard = {0};
    if (!copier->set)
        TRY(open_set(copier));
    TRY(guard_open(&guard));
    size_t sample = copier->copied_bytes / copier->load->dataset->sample_count + 1; /* with tar headers */
    double by_sample = copy_all(copier, buffers, sample < copier->stride ? sample : copier->stride);
    double by_batch = copy_all(copier, buffers, copier->load->given->batch * copier->stride);
    guard_close(&guard);
    *bytes_per_s = by_sample > by_batch ? by_sample : by_batch;
    if (by_sample <= 0 || by_batch <= 0)
        return status_set(
            STATUS_FAILED,
            "%s: a shard was truncated while measuring the copy bandwidth; repair the data set and run again",
            copier->load->dataset->path);
    return STATUS_OK;
}

/* ---- Readers ---- */

#define HUGE_BYTES ((size_t)2 << 20)

/* ---- Latencies ---- */

/* Returns the bin of a duration. Bins 0 to 31 hold the durations of 0 to 31 ns. From 32 ns on, each range
 * from 2^n to 2^(n+1) ns has 32 bins. */
static size_t bin_of(uint64_t duration_ns)
{
    if (duration_ns < 32)
        return (size_t)duration_ns;
    unsigned power = 63 - (unsigned)__builtin_clzll(duration_ns); /* at least 5 */
    return (size_t)(power - 4) * 32 + (size_t)((duration_ns >> (power - 5)) - 32);
}

static double middle_of(size_t bin)
{
    if (bin < 32)
        return (double)bin;
    return ldexp((double)(bin % 32) + 32.5, (int)(bin / 32) - 1);
}

void latency_add(struct latency *latency, uint64_t duration_ns)
{
    latency->bins[bin_of(duration_ns)]++;
    latency->count++;
}

/* Adds the counts of another histogram. */
static void latency_merge(struct latency *latency, const struct latency *other)
{
    for (size_t i = 0; i < LATENCY_BINS; i++)
        latency->bins[i] += other->bins[i];
    latency->count += other->count;
}

double latency_quantile_s(const struct latency *latency, double p)
{
    uint64_t below = 0, wanted = (uint64_t)ceil(p * (double)latency->count);
    for (size_t i = 0; i < LATENCY_BINS; i++) {
        below += latency->bins[i];
        if (below > 0 && below >= wanted)
            return 1e-9 * middle_of(i);
    }
    return 0;
}

/* ---- Memory ---- */

size_t buffer_allocated(size_t bytes)
{
    return (bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
}

void *buffer_open(size_t bytes)
{
    size_t wanted = buffer_allocated(bytes);
    void *buffer = mmap(NULL, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED)
        return NULL;
    madvise(buffer, wanted,
            MADV_HUGEPAGE); /* only a hint; without huge pages the program is slower but correct */
    memset(buffer, 0, wanted);
    return buffer;
}

void buffer_close(void *buffer, size_t bytes)
{
    if (buffer)
        munmap(buffer, buffer_allocated(bytes));
}

static void close_worker(const struct reader *reader, struct worker *worker)
{
    order_close(&worker->order);
    buffer_close(worker->slots, reader->slots * reader->stride);
    free(worker->held);
    free(worker->latency);
    image_scratch_close(&worker->decoded);
    free(worker->images);
}

void reader_close(struct reader *reader)
{
    for (int w = 0; reader->workers && w < reader->threads; w++)
        close_worker(reader, &reader->workers[w]);
    free(reader->workers);
    reader->workers = NULL;
    verifier_close(&reader->verifier);
    copier_forget(&reader->copier);
}

#define SLOTS_REMEDY "lower --batch, --shuffle or --threads"

static enum status open_worker(struct reader *reader, struct worker *worker)
{
    struct order_plan plan = load_plan(reader->load, reader->threads);
    *worker = (struct worker){.load = reader->load, .reader = reader};
    TRY(order_open(&plan, &worker->order));
    worker->slots = buffer_open(reader->slots * reader->stride);
    worker->held = malloc(reader->slots * sizeof *worker->held);
    worker->latency = calloc(LOAD_CALLS, sizeof *worker->latency);
    if (worker->slots && worker->held && worker->latency)
        return STATUS_OK;
    return status_set(STATUS_EXHAUSTED, "out of memory for %u samples of %zu bytes; " SLOTS_REMEDY,
                      reader->slots, reader->stride);
}

/* Computes the memory of the slots, and the part of it that one batch per worker fills. */
static void count_memory(struct reader *reader, const struct order_plan *plan)
{
    const struct load *load = reader->load;
    uint32_t threads = (uint32_t)reader->threads;
    uint64_t samples = order_batch_samples(plan, load->rank * threads, threads, load->given->batch);
    reader->result.memory_bytes = threads * buffer_allocated(reader->slots * reader->stride);
    reader->result.useful_bytes =
        (double)samples * (double)load->dataset->bytes / load->dataset->sample_count;
}

/* Returns the distance of slots. A slot is at least one byte longer than any sample, to detect files that
 * grew. The distance is never a multiple of 4096 bytes, because such slots would map to the same cache sets.
 */
size_t reader_stride(const struct load *load)
{
    const size_t stride = (load->dataset->sample_bytes_max + 1 + 63) / 64 * 64;
    return stride % 4096 ? stride : stride + 64;
}

enum status reader_open(struct reader *reader, const struct load *load, int threads, uint32_t slots,
                        reader_epoch *epoch)
{
    const size_t stride = reader_stride(load);
    *reader =
        (struct reader){.load = load,
                        .epoch = epoch,
                        .threads = threads,
                        .stride = stride,
                        .copier = {.load = load, .threads = threads, .stride = stride},
                        .slots = (slots + load->given->batch - 1) / load->given->batch * load->given->batch};
    TRY(memory_check((uint64_t)threads * reader->slots * reader->stride, "the buffers", SLOTS_REMEDY));
    struct order_plan plan = load_plan(load, threads);
    TRY(verifier_open(&reader->verifier, load, &plan));
    reader->result.number = UINT64_MAX;
    count_memory(reader, &plan);
    reader->workers = calloc((size_t)threads, sizeof *reader->workers);
    TRY(ALLOCATED(reader->workers, "out of memory"));
    for (int w = 0; w < threads; w++)
        TRY(open_worker(reader, &reader->workers[w]));
    return STATUS_OK;
}

uint32_t reader_stream_slots(const struct load *load)
{
    uint64_t buffer = load->given->shuffle < load->dataset->sample_count ? load->given->shuffle
                                                                         : load->dataset->sample_count;
    return (uint32_t)(buffer > 1 ? buffer + load->given->batch : load->given->batch);
}

/* ---- Shares ---- */

bool worker_take(struct worker *share, uint32_t *first, uint32_t *count)
{
    const uint32_t batch = share->load->given->batch;
    const bool divides = worker_helps(share);
    uint32_t next = __atomic_load_n(&share->next, __ATOMIC_ACQUIRE);
    while (next < share->order.count) {
        const uint32_t left = share->order.count - next;
        uint32_t size = left < batch ? left : batch;
        if (divides && left / 2 < batch)
            size = left - left / 2;
        if (__atomic_compare_exchange_n(&share->next, &next, next + size, true, __ATOMIC_ACQUIRE,
                                        __ATOMIC_ACQUIRE)) {
            *first = next;
            *count = size;
            return true;
        }
    }
    return false;
}

bool worker_helps(const struct worker *worker)
{
    return worker->reader->threads > 1 && !worker->load->control->consumer &&
           worker->load->given->on_error == ON_ERROR_FAIL;
}

/* ---- A run ---- */

enum status reader_ready(void *state, uint64_t number)
{
    struct reader *reader = state;
    const struct load *load = reader->load;
    /* Set every slot to READER_LOST (all bits set), because no sample has arrived yet in this run. */
    for (int w = 0; w < reader->threads; w++)
        memset(reader->workers[w].held, 0xff, reader->slots * sizeof *reader->workers[w].held);
    if (load->given->cache == LOAD_COLD)
        copier_forget(&reader->copier); /* mapped pages cannot be evicted */
    return verifier_ready(&reader->verifier, number, &reader->result.before);
}

static void clear(struct worker *worker)
{
    worker->checksum = (struct checksum){0};
    losses_clear(&worker->losses);
    worker->decoded.jpeg_warnings = 0;
    worker->decode_s = worker->augment_s = 0;
    worker->failure.status = STATUS_OK;
    if (worker->load->control->timed_calls)
        memset(worker->latency, 0, LOAD_CALLS * sizeof *worker->latency);
}

static void begin_epoch(struct worker *worker, uint32_t number, uint64_t epoch)
{
    worker->epoch = epoch;
    worker->delivered = worker->next = 0;
    order_make(&worker->reader->verifier.plan, epoch, number, &worker->order);
}

static void read_epoch(struct worker *worker)
{
    struct verifier *verifier = &worker->reader->verifier;
    uint64_t lost = worker->losses.checksum.count;
    enum status status = worker->reader->epoch(worker);
    if (status != STATUS_OK) /* keep the message, because status_text() is per thread */
        worker->failure = status_save(status);
    else
        verifier_note(verifier, &worker->losses, &worker->order, worker->losses.checksum.count - lost);
}

/* Combines the results of all workers and passes them to the verifier. */
static enum status finish(struct reader *reader, uint64_t number)
{
    struct load_result *result = &reader->result;
    struct losses lost;
    losses_clear(&lost);
    result->number = number;
    result->checksum = (struct checksum){0};
    result->decode_s = result->augment_s = 0;
    result->jpeg_warnings = 0;
    for (int w = 0; w < reader->threads; w++) {
        const struct worker *worker = &reader->workers[w];
        checksum_merge(&result->checksum, &worker->checksum);
        losses_merge(&lost, &worker->losses);
        result->jpeg_warnings += worker->decoded.jpeg_warnings;
        result->decode_s += worker->decode_s / reader->threads;
        result->augment_s += worker->augment_s / reader->threads;
    }
    result->skipped = lost.checksum.count;
    return verifier_finish(&reader->verifier, number, &result->checksum, &lost);
}

enum status reader_run(void *state, uint64_t number, struct run_time *time)
{
    (void)time;
    struct reader *reader = state;
    const struct load *load = reader->load;
    int threads = reader->threads;
    for (int w = 0; w < threads; w++)
        clear(&reader->workers[w]);
    for (uint32_t i = 0; i < load->epochs; i++) {
        /* All shares have an order before a thread helps another. */
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for schedule(static, 1)
            for (int w = 0; w < threads; w++)
                begin_epoch(&reader->workers[w], load->rank * (uint32_t)threads + (uint32_t)w,
                            number * load->epochs + i);
#pragma omp for schedule(static, 1)
            for (int w = 0; w < threads; w++)
                read_epoch(&reader->workers[w]);
        }
        for (int w = 0; w < threads; w++)
            if (reader->workers[w].failure.status != STATUS_OK)
                return status_restore(&reader->workers[w].failure);
    }
    return finish(reader, number);
}

/* ---- Delivery ---- */

/* Appends room for an image of `bytes` bytes to the images of the batch. Sets `*room` to it. */
static enum status add_image(struct worker *worker, size_t bytes, void **room)
{
    size_t begin = worker->images_bytes, end = begin + bytes;
    if (end > worker->images_room) {
        uint8_t *images = realloc(worker->images, end);
        TRY(ALLOCATED(images, "out of memory for images of %zu bytes", end));
        worker->images = images;
        worker->images_room = end;
    }
    worker->images_bytes = end;
    *room = worker->images + begin;
    return STATUS_OK;
}

/* Appends an image to the batch: augmented with --augment, otherwise as decoded. */
static enum status finish_image(struct worker *worker, const struct image *image, uint32_t number)
{
    const struct load *load = worker->load;
    size_t count = image_values(image);
    double begin_s = timer_now_s();
    void *room = NULL;
    if (load->given->augment) {
        if (load->augmentation.channels > 1 && image->channels != load->augmentation.channels)
            return status_set(STATUS_FAILED,
                              "--mean and --std have %u values, but this image has %u channel%s; add "
                              "--out-res and --channels 3, or give one value",
                              load->augmentation.channels, image->channels, image->channels == 1 ? "" : "s");
        TRY(add_image(worker, count * sizeof(float), &room));
        image_augment(&load->augmentation, image, (uint32_t)worker->epoch, number, room);
        worker->augment_s += timer_now_s() - begin_s;
    } else {
        TRY(add_image(worker, count * dtype_bytes(image->type), &room));
        memcpy(room, image->pixels, count * dtype_bytes(image->type));
        worker->decode_s += timer_now_s() - begin_s;
    }
    return STATUS_OK;
}

/* Decodes and augments the image of a sample. */
static enum status prepare_image(struct worker *worker, uint32_t number, const struct dataset_member *member,
                                 const uint8_t *data)
{
    const struct load *load = worker->load;
    struct image image;
    bool is_image = false;
    double begin_s = timer_now_s();
    TRY(image_fit(&load->fit, members_format(member->extension), data, member->size, (uint32_t)worker->epoch,
                  number, &worker->decoded, &image, &is_image));
    worker->decode_s += timer_now_s() - begin_s;
    if (is_image && image.depth == 1)
        return finish_image(worker, &image, number);
    return status_set(STATUS_FAILED,
                      "its %s is not an image: --decode reads JPEG, PNG, WebP, and arrays of |u1, <f2 or <f4 "
                      "with two or three axes in C order; name another member with --image, or drop --decode",
                      member->extension);
}

/* Returns the bytes of a member. `data` are the bytes of its sample. */
static const uint8_t *bytes_of(const struct dataset_member *members, uint32_t member, const uint8_t *data)
{
    for (uint32_t m = 0; m < member; m++)
        data += members[m].size;
    return data;
}

/* Decodes the image of one sample. Fails if a sample has no image: samples that are only read would make
 * decoding look faster. Checks only the header of a mask, because it is not delivered. */
static enum status prepare(struct worker *worker, uint32_t number, const uint8_t *data)
{
    const struct load *load = worker->load;
    const struct dataset_sample *sample = &load->dataset->samples[number];
    const struct dataset_member *members = &load->dataset->members[sample->member];
    if (sample->image == sample->members)
        return dataset_at(load->dataset, sample, members,
                          dataset_lacks(load->dataset, sample, &load->dataset->choice.image, "image"));
    const bool masked = sample->rule && sample->rule->mask;
    uint32_t at = sample->image;
    enum status status = prepare_image(worker, number, &members[at], bytes_of(members, at, data));
    if (status == STATUS_OK && masked) {
        at = sample->label;
        status = image_check_mask(bytes_of(members, at, data), members[at].size, worker->decoded.width,
                                  worker->decoded.height);
    }
    return dataset_at(load->dataset, sample, &members[at], status);
}

/* Returns the hash of a sample. `hash_member` hashes each member. */
static inline uint64_t hash_of(const struct dataset *dataset, uint32_t number, const uint8_t *data,
                               uint64_t (*hash_member)(const uint8_t *data, size_t size))
{
    const struct dataset_sample *sample = &dataset->samples[number];
    uint64_t hashes[DATASET_MEMBERS_MAX];
    for (uint32_t m = 0; m < sample->members; m++) {
        uint64_t size = dataset->members[sample->member + m].size;
        hashes[m] = hash_member(data, size);
        data += size;
    }
    return checksum_sample(sample->key_hash, hashes, sample->members);
}

/* With control->whole: compares the hash over all bytes of a sample with the hash that the plain reader
 * (data/plain_reader.h) computed. If they are equal, counts the sample in control->seen. */
static void check_whole(struct worker *worker, uint32_t number, const uint8_t *data)
{
    const struct dataset_sample *sample = &worker->load->dataset->samples[number];
    uint64_t hash = hash_of(worker->load->dataset, number, data, checksum_whole);
    uint8_t *seen = &worker->load->control->seen[number];
    if (hash == sample->whole && __atomic_load_n(seen, __ATOMIC_RELAXED) < 255)
        __atomic_fetch_add(seen, 1, __ATOMIC_RELAXED);
    checksum_add(&worker->checksum, hash, sample->bytes);
}

/* Adds the hash of a sample to the checksum. The hash covers only the first and last bytes of each member
 * (checksum_edges()). This function is used if control->whole is false. */
static void check_edges(struct worker *worker, uint32_t number, const uint8_t *data)
{
    const struct dataset *dataset = worker->load->dataset;
    checksum_add(&worker->checksum, hash_of(dataset, number, data, checksum_edges),
                 dataset->samples[number].bytes);
}

enum status reader_verify_slots(void *state, uint64_t *wrong)
{
    const struct reader *reader = state;
    const struct dataset *dataset = reader->load->dataset;
    *wrong = 0;
    for (int w = 0; w < reader->threads; w++)
        for (uint32_t i = 0; i < reader->slots; i++) {
            uint32_t number = reader->workers[w].held[i];
            const uint8_t *data = reader->workers[w].slots + i * reader->stride;
            if (number != READER_LOST &&
                hash_of(dataset, number, data, checksum_whole) != dataset->samples[number].whole) {
                ++*wrong;
                load_note_wrong(reader->load->control, number);
            }
        }
    return STATUS_OK;
}

/* Passes the batch to the consumer: with --decode or --augment its images, otherwise its slots. */
static enum status consume(struct worker *worker, uint32_t slot, uint32_t count)
{
    const struct load *load = worker->load;
    const size_t stride = worker->reader->stride;
    return load->given->decode
               ? consumer_take_host(load->control->consumer, worker->images, worker->images_bytes)
               : consumer_take_host(load->control->consumer, worker->slots + slot * stride, count * stride);
}

enum status worker_deliver(struct worker *worker, uint32_t slot, uint32_t count)
{
    const struct load *load = worker->load;
    worker->images_bytes = 0;
    for (uint32_t i = slot; i < slot + count; i++) {
        const uint8_t *data = worker->slots + i * worker->reader->stride;
        uint32_t number = worker->held[i];
        if (number == READER_LOST)
            continue;
        size_t images_bytes = worker->images_bytes;
        enum status status = load->given->decode ? prepare(worker, number, data) : STATUS_OK;
        if (status != STATUS_OK) { /* the sample is lost: discard its images */
            worker->images_bytes = images_bytes;
            TRY(worker_lose(worker, number, status));
            continue;
        }
        (load->control->whole ? check_whole : check_edges)(worker, number, data);
    }
    return load->control->consumer ? consume(worker, slot, count) : STATUS_OK;
}

uint8_t *worker_slot(struct worker *worker, uint32_t arrival)
{
    uint32_t slot = worker->order.indices[arrival] % worker->reader->slots;
    return worker->slots + slot * worker->reader->stride;
}

enum status worker_arrived(struct worker *worker, uint32_t arrival, uint32_t sample, bool lost)
{
    const struct load *load = worker->load;
    uint32_t slots = worker->reader->slots, arrived = arrival + 1, count = worker->order.count;
    worker->held[worker->order.indices[arrival] % slots] = lost ? READER_LOST : sample;
    if (load->given->shuffle > 1 && arrived % load->given->shuffle != 0 && arrived != count)
        return STATUS_OK;
    /* A shuffle buffer is complete: all indices before its end are filled. */
    while (worker->delivered + load->given->batch <= arrived ||
           (arrived == count && worker->delivered < count)) {
        uint32_t left = arrived - worker->delivered,
                 batch = left < load->given->batch ? left : load->given->batch;
        TRY(worker_deliver(worker, worker->delivered % slots, batch));
        worker->delivered += batch;
    }
    return STATUS_OK;
}

enum status worker_lose(struct worker *worker, uint32_t sample, enum status status)
{
    return verifier_lose(&worker->reader->verifier, &worker->losses, sample, status);
}

/* ---- Results ---- */

enum status reader_copy(void *state, double *bytes_per_s)
{
    struct reader *reader = state;
    FREED uint8_t **buffers = malloc((size_t)reader->threads * sizeof *buffers);
    TRY(ALLOCATED(buffers, "out of memory"));
    for (int w = 0; w < reader->threads; w++)
        buffers[w] = reader->workers[w].slots;
    return copier_measure(&reader->copier, buffers, bytes_per_s);
}

/* Adds the memory that workers have allocated during runs, for images. worker->images grows exactly to the
 * size of the largest batch, so no part of it is unused. */
static void add_images(const struct reader *reader, struct load_result *result)
{
    for (int w = 0; w < reader->threads; w++) {
        const struct worker *worker = &reader->workers[w];
        result->memory_bytes += image_scratch_bytes(&worker->decoded) + worker->images_room;
        result->useful_bytes += (double)worker->images_room;
    }
}

enum status reader_fetch(void *state, void *result)
{
    struct reader *reader = state;
    reader->result.device_known = verifier_device_bytes(&reader->verifier, &reader->result.device_bytes);
    reader->result.threads = reader->threads;
    for (int call = 0; call < LOAD_CALLS; call++) {
        static const double quantiles[LOAD_QUANTILES] = {0.5, 0.99, 0.999};
        struct latency all = {0};
        for (int w = 0; w < reader->threads; w++)
            latency_merge(&all, &reader->workers[w].latency[call]);
        for (int q = 0; q < LOAD_QUANTILES; q++)
            reader->result.latency_s[call][q] = latency_quantile_s(&all, quantiles[q]);
    }
    *(struct load_result *)result = reader->result;
    add_images(reader, result);
    return STATUS_OK;
}
