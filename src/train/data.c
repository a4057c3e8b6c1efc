#include <dirent.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/options.h"
#include "core/parallel.h"
#include "core/text.h"
#include "core/timer.h"
#include "data/random_boxes.h"
#include "data/dataset.h"
#include "data/image.h"
#include "data/members.h"
#include "data/remote.h"
#include "data/source.h"
#include "machine/host.h"
#include "train/data.h"

#define CHUNK            256                   /* at most this many samples are requested at a time */
#define CHUNK_BYTES      (UINT64_C(256) << 20) /* at most this many bytes, but at least one sample, at a time */
#define PROGRESS_S       0.25
#define CLASSES_MAX      (1 << 24)
#define SKIPS_TOLD       8 /* warnings about broken samples per set; further ones are only counted */
#define DATA_SAMPLES_MAX ((UINT64_C(1) << 31) - 1) /* maximum samples per set */

/* The option that sets the size of each part. */
static const char *const size_options[DATA_PARTS] = {"--train-size", "--test-size"};

/* The samples of a source that a set takes. */
struct data_range {
    uint64_t first, count;
    int held; /* 1: only samples that the source holds out; 0: only the others; -1: all */
};

/* ---- Decoding ---- */

/* Finds a member of a sample, and sets `*rule` to the entry of `list` that names it. `option` is the name of
 * the option that sets the list. If the data set has one folder per class, the source adds the number of the
 * folder as the member "cls". */
static enum status find_member(const struct source_sample *sample, const struct member_list *list,
                               const char *option, const struct source_member **member,
                               const struct member_rule **rule)
{
    const char *extensions[SOURCE_MEMBERS_MAX] = {NULL};
    uint32_t count = (uint32_t)sample->count;
    for (uint32_t m = 0; m < count; m++)
        extensions[m] = sample->members[m].extension;
    *member = NULL;
    uint32_t found = members_find(list, extensions, count, sample->in_folder, rule);
    if (!*rule)
        return members_lack(list, option, extensions, count);
    *member = found < count ? &sample->members[found] : source_member(sample, "cls");
    return STATUS_OK;
}

/* Returns whether the training set has canvases, from which training cuts its images. */
static bool has_canvases(const struct data *data)
{
    return data->fit.res && data->fit.how == FIT_RANDOM_RESIZED_CROP;
}

/* Decodes the image or volume of a sample. The pixels are valid while `scratch` and the sample are unchanged.
 */
static enum status decode(const struct data *data, enum data_part part, const struct source_sample *sample,
                          uint64_t number, struct image_scratch *scratch, struct image *image)
{
    const struct source_member *member;
    const struct member_rule *rule;
    struct image_fit fit = data->fit;
    bool is_image;
    if (has_canvases(data)) {
        fit.how = FIT_RESIZE;
        fit.res = part == DATA_TRAIN ? 0 : fit.res;
    }
    TRY(find_member(sample, &data->members.image, "image", &member, &rule));
    TRY(image_fit(&fit, members_format(member->extension), member->bytes, member->size, 0, (uint32_t)number,
                  scratch, image, &is_image));
    if (is_image && image->type != DTYPE_F32 && image_values(image) <= INT32_MAX)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "its %s is neither a PNG or JPEG image nor an array of |u1 or <f2 with the axes "
                      "(height, width), (channels, height, width) or (channels, depth, height, width); "
                      "name another member with --image",
                      member->extension);
}

static enum status read_label(const struct data *data, const struct source_sample *sample, int32_t *label)
{
    const struct source_member *member;
    const struct member_rule *rule;
    TRY(find_member(sample, &data->members.label, "label", &member, &rule));
    TRY(members_label(rule, member->bytes, member->size, label));
    return label_check(*label, CLASSES_MAX);
}

/* ---- Checks and memory ---- */

static const char *const set_names[DATA_PARTS] = {"training", "test"};

/* Rejects NaN and Inf. A network cannot learn from them, and the user would blame the learning rate for the
 * bad loss. */
static enum status check_finite(const struct image *image)
{
    const uint8_t *values = image->pixels;
    size_t count = image->type == DTYPE_F16 ? image_values(image) : 0;
    for (size_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, values + 2 * i, sizeof bits); /* may be unaligned in a file */
        if ((bits & 0x7C00) == 0x7C00)
            return status_set(STATUS_FAILED,
                              "its value number %zu of %zu is %s; remove or correct the sample", i, count,
                              bits & 0x03FF ? "NaN" : "infinite");
    }
    return STATUS_OK;
}

/* Sets the shape of the canvases and of the samples of the network from the first canvas. */
static enum status fit_canvas(struct data *data, const struct image *image)
{
    const struct image_fit *fit = &data->fit;
    if (image->type != DTYPE_U8 || image->depth > 1 || (image->channels != 1 && image->channels != 3))
        return status_value(STATUS_USAGE, "fit", "random-resized-crop",
                            " needs 8-bit images with one or three "
                            "channels; use --fit resize, or other --data");
    if (image->channels > fit->channels)
        return status_value(STATUS_USAGE, "fit", "random-resized-crop",
                            " cannot convert colour images to gray; use "
                            "--channels 3, or --fit resize");
    data->shape = (struct shape){fit->channels, 1, fit->res, fit->res};
    data->type = image->type;
    data->sample_values = data->sample_bytes = shape_values(&data->shape);
    data->canvas = (struct shape){image->channels, 1, image->height, image->width};
    data->canvas_bytes = image_values(image);
    return STATUS_OK;
}

/* Sets the shape and type of both sets from the first sample that is read. */
static enum status set_shape(struct data *data, enum data_part part, const struct image *image)
{
    if (part == DATA_TRAIN && has_canvases(data))
        return fit_canvas(data, image);
    data->shape = (struct shape){image->channels, image->depth, image->height, image->width};
    data->type = image->type;
    data->sample_values = image_values(image);
    data->sample_bytes = data->sample_values * dtype_bytes(image->type);
    return STATUS_OK;
}

/* Writes how images of different shapes get one shape. */
static void name_remedy(const struct shape *is, const struct shape *was, char *remedy, size_t size)
{
    if (is->height != was->height || is->width != was->width)
        snprintf(remedy, size,
                 "; add --out-res PIXELS, which gives all images one size and number of channels");
    else if (is->height == is->width)
        snprintf(remedy, size, "; only their channels differ: add --out-res %u --channels 3 (or 1)",
                 is->width);
    else
        snprintf(remedy, size, "; only their channels differ: add --out-res PIXELS --channels 3 (or 1)");
}

/* Checks that a sample has the shape and type of the first one. Another shape is not a fault of the sample,
 * so --on-error skip does not apply; --out-res gives all images one shape. */
static enum status check_shape(const struct data *data, enum data_part part, const struct image *image)
{
    const struct shape is = {image->channels, image->depth, image->height, image->width};
    const bool canvas = part == DATA_TRAIN && has_canvases(data);
    const struct shape *was = canvas ? &data->canvas : &data->shape;
    char remedy[160] = "";
    if (is.depth == 1 && data->fit.res == 0 && image->type == DTYPE_U8 && data->type == DTYPE_U8)
        name_remedy(&is, was, remedy, sizeof remedy);
    if (memcmp(&is, was, sizeof is) != 0 || image->type != data->type)
        return status_set(
            STATUS_USAGE,
            "it is %s of %ux%ux%ux%u (channels, depth, height, width), but the first sample is %s "
            "of %ux%ux%ux%u%s",
            dtype_names[image->type], is.channels, is.depth, is.height, is.width, dtype_names[data->type],
            was->channels, was->depth, was->height, was->width,
            canvas ? "; --fit random-resized-crop needs images of one size and number of channels: use "
                     "--fit resize, or convert the files with another program"
                   : remedy);
    return is.channels <= DATA_CHANNELS_MAX
               ? STATUS_OK
               : status_set(STATUS_USAGE, "%u channels; at most %d are supported", is.channels,
                            DATA_CHANNELS_MAX);
}

/* The capacity of a growing set: the current and the maximum number of samples, and the option that sets the
 * maximum. */
struct room {
    uint64_t now, most;
    const char *option;
};

/* Returns STATUS_TOO_LARGE if `samples` samples do not fit into memory; the message suggests lowering
 * `option`. Without this check, a system that overcommits memory may kill the program when it first writes to
 * the memory. */
static enum status data_check_memory(uint64_t samples, size_t sample_bytes, const char *option)
{
    char what[96], remedy[64];
    snprintf(what, sizeof what, "%" PRIu64 " samples of %zu bytes", samples, sample_bytes);
    snprintf(remedy, sizeof remedy, "lower %s", option);
    return memory_check(samples * sample_bytes, what, remedy);
}

/* Makes room for `count` more samples, at most CHUNK. If `known` is true, room->most is the exact number of
 * samples, and the first call allocates all memory. */
static enum status make_room(const struct data *data, enum data_part part, struct data_set *set,
                             uint64_t count, bool known, struct room *room)
{
    const size_t bytes = data_stored_bytes(data, part);
    if (set->count + count <= room->now)
        return STATUS_OK;
    uint64_t wanted = known ? room->most : 2 * room->now + CHUNK;
    wanted = wanted < room->most ? wanted : room->most;
    TRY(data_check_memory(wanted - room->now, bytes + sizeof *set->labels, room->option));
    void *values = realloc(set->values, wanted * bytes);
    if (values)
        set->values = values;
    uint32_t *labels = values ? realloc(set->labels, wanted * sizeof *labels) : NULL;
    if (!labels)
        return status_set(STATUS_EXHAUSTED, "out of memory for %" PRIu64 " samples; lower %s", wanted,
                          room->option);
    set->labels = labels;
    room->now = wanted;
    return STATUS_OK;
}

/* Separates the channels of RGB pixels. CPUs with FMA instructions also have byte shuffles, with which the
 * compiler vectorises the loop. */
FDSL_FMA_CLONES
static void separate(const uint8_t *restrict pixels, size_t count, uint8_t *restrict red)
{
    uint8_t *restrict green = red + count, *restrict blue = red + 2 * count;
    for (size_t i = 0; i < count; i++) {
        red[i] = pixels[3 * i];
        green[i] = pixels[3 * i + 1];
        blue[i] = pixels[3 * i + 2];
    }
}

/* Copies the values of an image to `to`, in channel-first order. Interleaved images have one or three
 * channels. */
static void copy_values(const struct image *image, uint8_t *to)
{
    size_t values = image_values(image);
    if (image->interleaved && image->channels == 3)
        separate(image->pixels, values / 3, to);
    else
        memcpy(to, image->pixels, values * dtype_bytes(image->type));
}

/* ---- Progress ---- */

/* Prints progress if stderr is a terminal. */
static void show_progress(uint64_t done, uint64_t most, double *shown_s)
{
    if (!status_shows_progress() || timer_now_s() - *shown_s < PROGRESS_S)
        return;
    *shown_s = timer_now_s();
    fprintf(stderr, "\r\033[Ksamples: %" PRIu64 " of %" PRIu64, done, most);
    fflush(stderr);
}

static void end_progress(void)
{
    if (status_shows_progress())
        fputs("\r\033[K", stderr);
}

/* ---- Adding samples, on several threads ---- */

/* Samples that are read with one request and decoded at the same time. */
struct intake {
    struct source_reader *reader;
    struct data *data;
    enum data_part part;
    uint64_t count;
    uint64_t numbers[CHUNK]; /* of the samples in their source */
    struct source_sample samples[CHUNK];
    bool failed[CHUNK];
    int threads;
    struct image_scratch *scratch; /* of each thread */
};

/* Decodes and checks a sample, and stores it after the samples that the set already has. */
static enum status store(const struct intake *batch, uint64_t i, struct image_scratch *scratch)
{
    const struct data *data = batch->data;
    const struct data_set *set = &data->sets[batch->part];
    struct image image;
    int32_t label;
    TRY(decode(data, batch->part, &batch->samples[i], batch->numbers[i], scratch, &image));
    TRY(check_shape(data, batch->part, &image));
    TRY(check_finite(&image));
    TRY(read_label(data, &batch->samples[i], &label));
    copy_values(&image, (uint8_t *)set->values + (set->count + i) * data_stored_bytes(data, batch->part));
    set->labels[set->count + i] = (uint32_t)label;
    return STATUS_OK;
}

static void try_to_store(void *context, uint64_t i, int thread)
{
    struct intake *batch = context;
    batch->failed[i] = store(batch, i, &batch->scratch[thread]) != STATUS_OK;
}

/* Prefixes an error with the sample's location, or with its number if it has none. */
static enum status name_sample(const struct intake *batch, uint64_t i, enum status status)
{
    const struct source_reader *reader = batch->reader;
    return reader->source->locate ? reader->source->locate(reader->state, batch->numbers[i], status)
                                  : status_prefix(status, "sample %" PRIu64, batch->numbers[i]);
}

/* Handles a failure of a sample, whose message is set and names the sample. Counts a broken sample as skipped
 * if the reader skips such samples; otherwise returns `status`. */
static enum status skip(const struct intake *batch, enum status status)
{
    struct data_set *set = &batch->data->sets[batch->part];
    if (status != STATUS_FAILED)
        return status;
    if (!batch->reader->skip)
        return batch->reader->source->locate ? dataset_advise_skip(status) : status;
    end_progress();
    if (set->skipped++ < SKIPS_TOLD)
        status_warn("skipped in the %s set: %s", set_names[batch->part], status_text());
    return STATUS_OK;
}

/* Reads the samples that are in batch->numbers. Removes skipped samples from the batch. */
static enum status read_batch(struct intake *batch)
{
    const struct source_reader *reader = batch->reader;
    uint64_t kept = 0;
    if (!reader->skip)
        return source_make_listed(reader->source, reader->state, batch->numbers, batch->count,
                                  batch->samples);
    for (uint64_t i = 0; i < batch->count; i++) {
        struct source_sample *sample = &batch->samples[kept];
        enum status status = source_make(reader->source, reader->state, batch->numbers[i], 1, sample);
        batch->numbers[kept] = batch->numbers[i];
        if (status == STATUS_OK)
            kept++;
        else
            source_sample_free(sample);
        if (status != STATUS_OK)
            TRY(skip(batch, status));
    }
    batch->count = kept;
    return STATUS_OK;
}

/* Sets the shape of both sets from the first sample of the batch. */
static enum status take_shape(const struct intake *batch)
{
    struct image image;
    enum status status =
        decode(batch->data, batch->part, &batch->samples[0], batch->numbers[0], batch->scratch, &image);
    if (status == STATUS_OK)
        status = set_shape(batch->data, batch->part, &image);
    return status == STATUS_OK ? STATUS_OK : skip(batch, name_sample(batch, 0, status));
}

/* Removes the first sample from the batch. */
static void remove_first(struct intake *batch)
{
    source_sample_free(&batch->samples[0]);
    batch->count--;
    memmove(batch->samples, batch->samples + 1, batch->count * sizeof *batch->samples);
    memmove(batch->numbers, batch->numbers + 1, batch->count * sizeof *batch->numbers);
    batch->samples[batch->count] = (struct source_sample){0};
}

/* Moves a sample that was stored at index `from` of the batch to index `to` <= `from`. */
static void move_sample(const struct intake *batch, uint64_t to, uint64_t from)
{
    const struct data_set *set = &batch->data->sets[batch->part];
    const size_t bytes = data_stored_bytes(batch->data, batch->part);
    uint8_t *values = (uint8_t *)set->values + set->count * bytes;
    if (to == from)
        return;
    memcpy(values + to * bytes, values + from * bytes, bytes);
    set->labels[set->count + to] = set->labels[set->count + from];
}

/* Adds all samples of a batch to their set, except for skipped ones. Error messages are per thread. The
 * calling thread therefore decodes each failed sample again, to set its own message. */
static enum status add_batch(struct intake *batch, bool known, struct room *room)
{
    struct data *data = batch->data;
    struct data_set *set = &data->sets[batch->part];
    uint32_t kept = 0;
    while (data->sample_values == 0 && batch->count > 0) {
        TRY(take_shape(batch));
        batch->scratch->jpeg_warnings = 0; /* store() decodes this sample again */
        if (data->sample_values == 0)
            remove_first(batch);
    }
    if (batch->count == 0)
        return STATUS_OK;
    enum status status = make_room(data, batch->part, set, batch->count, known, room);
    if (status != STATUS_OK)
        return name_sample(batch, 0, status);
    parallel_for(batch->threads, batch->count, try_to_store, batch);
    for (uint64_t i = 0; i < batch->count; i++) {
        status = batch->failed[i] ? store(batch, i, batch->scratch) : STATUS_OK;
        if (status == STATUS_OK)
            move_sample(batch, kept++, i);
        else
            TRY(skip(batch, name_sample(batch, i, status)));
    }
    set->count += kept;
    return STATUS_OK;
}

/* ---- Choosing samples ---- */

/* Returns the number of samples per request. The limits keep the buffer small compared with the set. */
static uint64_t chunk_of(const struct source_reader *reader)
{
    uint64_t fit = CHUNK_BYTES / (reader->facts.sample_bytes + 1);
    return fit < 1 ? 1 : fit < CHUNK ? fit : CHUNK;
}

static bool is_in(const struct source_reader *reader, struct data_range range, uint64_t number)
{
    const uint8_t *held = reader->facts.held;
    return range.held < 0 || (held && held[number]) == range.held;
}

/* Chooses `limit` samples of a range by taking the classes in turn: the first sample of every class, then the
 * second of every class, and so on. Sets `chosen` to 1 for these samples. `turns` has one element per sample
 * of the range. `counts` has CLASSES_MAX zeros, and `sizes` has range.count + 1 zeros. */
static enum status take_in_turn(const struct source_reader *reader, struct data_range range, uint64_t limit,
                                uint32_t *turns, uint32_t *counts, uint32_t *sizes, uint8_t *chosen)
{
    uint32_t last = 0; /* the first turn that is not taken completely */
    uint64_t asked = range.first;
    for (uint64_t i = 0; i < range.count; i++) {
        source_ask(reader->source, reader->state, &asked, range.first + range.count);
        turns[i] = UINT32_MAX;
        if (!is_in(reader, range, range.first + i))
            continue;
        uint64_t label = reader->source->label(reader->state, range.first + i);
        if (label > INT32_MAX && !reader->skip) /* source->label() has set the message */
            return STATUS_FAILED;
        if (label > INT32_MAX)
            continue; /* a sample that is lost, or whose label cannot be read, has no turn */
        TRY(label_check((int32_t)label, CLASSES_MAX));
        sizes[turns[i] = counts[label]++]++;
    }
    for (; sizes[last] && sizes[last] <= limit; last++)
        limit -= sizes[last];
    for (uint64_t i = 0; i < range.count; i++)
        chosen[i] = turns[i] < last || (turns[i] == last && limit > 0 && limit-- > 0);
    return STATUS_OK;
}

/* If the data set has one folder per class, and the set gets only some of its samples, chooses samples of all
 * classes. `*chosen` is then an array with one flag per sample of the range; otherwise NULL. The caller frees
 * it. */
static enum status choose(const struct source_reader *reader, struct data_range range, uint64_t limit,
                          uint8_t **chosen)
{
    *chosen = NULL;
    if (!reader->facts.class_folders || limit >= range.count)
        return STATUS_OK;
    FREED uint32_t *turns = calloc(range.count, sizeof *turns), *counts = calloc(CLASSES_MAX, sizeof *counts);
    FREED uint32_t *sizes = calloc(range.count + 1, sizeof *sizes);
    *chosen = calloc(range.count, 1);
    TRY(ALLOCATED(turns && counts && sizes && *chosen, "out of memory to choose samples"));
    return take_in_turn(reader, range, limit, turns, counts, sizes, *chosen);
}

/* ---- Filling a set ---- */

/* Returns whether the set takes sample `at` of the range. `chosen` has one flag per sample of the range, or
 * is NULL. */
static bool takes(const struct source_reader *reader, struct data_range range, const uint8_t *chosen,
                  uint64_t at)
{
    return (!chosen || chosen[at]) && is_in(reader, range, range.first + at);
}

/* Chooses the next samples of the range, at most `most`, and advances `*at`. Returns their number,
 * which includes `*lost`, the number of samples that opening left out. */
static uint64_t next_numbers(const struct source_reader *reader, struct data_range range,
                             const uint8_t *chosen, uint64_t most, uint64_t *at, uint64_t numbers[CHUNK],
                             uint32_t *lost)
{
    uint64_t count = 0;
    *lost = 0;
    for (; *at < range.count && count < most; ++*at) {
        const uint64_t number = range.first + *at;
        if (!takes(reader, range, chosen, *at))
            continue;
        if (reader->source->lost && reader->source->lost(reader->state, number))
            ++*lost;
        else
            numbers[count - *lost] = number;
        count++;
    }
    return count;
}

/* How far samples were requested in advance: `count` of the first `at` samples of the range. */
struct ahead {
    uint64_t at, count;
};

/* Requests the samples that the set takes next, until `limit` samples are requested or the source accepts no
 * more requests. */
static void ask_ahead(struct source_reader *reader, struct data_range range, const uint8_t *chosen,
                      uint64_t limit, struct ahead *ahead)
{
    for (; reader->source->ask && ahead->at < range.count && ahead->count < limit; ahead->at++) {
        if (!takes(reader, range, chosen, ahead->at))
            continue;
        if (!reader->source->ask(reader->state, range.first + ahead->at))
            return;
        ahead->count++;
    }
}

/* Implements data_fill(). Skipped samples count towards `limit`, so a broken sample does not change which
 * other samples are taken. */
static enum status fill(struct data_range range, uint64_t limit, const uint8_t *chosen, struct intake *batch)
{
    struct data_set *set = &batch->data->sets[batch->part];
    struct source_reader *reader = batch->reader;
    struct room room = {0, limit < range.count ? limit : range.count, size_options[batch->part]};
    uint64_t chunk = chunk_of(reader), taken = 0;
    double shown_s = timer_now_s();
    struct ahead ahead = {0, 0};
    enum status status = STATUS_OK;
    for (uint64_t at = 0; status == STATUS_OK && at < range.count && taken < limit;) {
        uint64_t left = limit - taken;
        ask_ahead(reader, range, chosen, limit, &ahead);
        uint32_t lost;
        batch->count =
            next_numbers(reader, range, chosen, left < chunk ? left : chunk, &at, batch->numbers, &lost);
        taken += batch->count;
        batch->count -= lost;
        set->skipped += lost;
        if (batch->count == 0)
            continue;
        status = read_batch(batch);
        if (status == STATUS_OK)
            status = add_batch(batch, range.held < 0, &room);
        for (uint64_t i = 0; i < COUNT_OF(batch->samples); i++)
            source_sample_free(&batch->samples[i]);
        show_progress(set->count, room.most, &shown_s);
    }
    end_progress();
    return status;
}

/* Reports the warnings of libjpeg that were accepted. Such files have all their pixels. */
static void tell_warnings(const struct image_scratch *scratch, int threads, enum data_part part)
{
    uint64_t warnings = 0;
    for (int i = 0; i < threads; i++)
        warnings += scratch[i].jpeg_warnings;
    if (warnings > 0)
        status_warn("the %s set: accepted %" PRIu64 " warning%s of libjpeg that %s no lost data",
                    set_names[part], warnings, warnings == 1 ? "" : "s", warnings == 1 ? "means" : "mean");
}

/* Appends the samples in `range` of an open source to set `part`, at most `limit` of them. range.count = 0
 * means all samples of the source. For class folders, chooses `limit` samples by taking the classes in turn,
 * and adds them in the order of the source. The first sample of `data` sets the shape and the type. `threads`
 * threads decode. STATUS_FAILED, with the sample's location, if a sample is broken. If the reader skips
 * broken samples, it leaves them out, and `skipped` of the set counts them. STATUS_USAGE if a sample differs
 * from the first, or if the set does not fit into memory. */
static enum status data_fill(struct source_reader *reader, struct data_range range, uint64_t limit,
                             int threads, struct data *data, enum data_part part)
{
    threads = threads < 1 ? 1 : threads < CHUNK ? threads : CHUNK;
    limit = limit < DATA_SAMPLES_MAX ? limit : DATA_SAMPLES_MAX;
    range.count = range.count ? range.count : reader->facts.samples;
    FREED struct intake *batch = calloc(1, sizeof *batch);
    FREED struct image_scratch *scratch = calloc((size_t)threads, sizeof *scratch);
    FREED uint8_t *chosen = NULL;
    enum status status = ALLOCATED(batch && scratch, "out of memory to read samples");
    if (status == STATUS_OK)
        status = choose(reader, range, limit, &chosen);
    if (status == STATUS_OK) {
        batch->reader = reader;
        batch->data = data;
        batch->part = part;
        batch->threads = threads;
        batch->scratch = scratch;
        status = fill(range, limit, chosen, batch);
    }
    if (status == STATUS_OK)
        tell_warnings(scratch, threads, part);
    for (int i = 0; scratch && i < threads; i++)
        image_scratch_close(&scratch[i]);
    return status;
}

/* Opens a source with the option values in `parameters`, calls data_fill(), and closes the source. An error
 * of generated samples names --data; an error of files names the file. */
static enum status data_read(const struct data_request *request, const char *source, const void *parameters,
                             struct data_range range, uint64_t limit, struct data *data, enum data_part part)
{
    struct source_reader reader;
    const struct source_request with = {.parameters = parameters, .resources = request->resources};
    enum status status = source_open(source, &with, &reader);
    if (status == STATUS_OK)
        status = data_fill(&reader, range, limit, request->resources.threads, data, part);
    source_close(&reader);
    return status == STATUS_OK || !data_is_generated(request->name)
               ? status
               : status_prefix(status, "--data %s", request->name);
}

/* ---- Opening ---- */

#define CIFAR_BATCHES 5
#define DIGITS        10 /* number of classes */
#define CLIPS         8

/* A source that stays open to generate samples during training. */
struct data_source {
    struct source_reader reader;
};

static void close_source(struct data *data)
{
    if (data->source)
        source_close(&data->source->reader);
    free(data->source);
    data->source = NULL;
}

void data_close(struct data *data)
{
    for (int part = 0; part < DATA_PARTS; part++) {
        free(data->sets[part].values);
        free(data->sets[part].labels);
    }
    close_source(data);
    *data = (struct data){0};
}

/* ---- Finding the sets ---- */

static bool file_there(const char *folder, const char *name, char path[PATH_MAX])
{
    return snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX && access(path, F_OK) == 0;
}

/* Returns the size of a part of a generated set. */
static uint64_t generated_size(const struct data_request *request, int part)
{
    if (part == DATA_TRAIN)
        return request->train_size ? request->train_size : DATA_TRAIN_SIZE;
    return request->test_size ? request->test_size : DATA_TEST_SIZE;
}

/* Returns how many samples of a part are generated. */
static uint64_t generated_count(const struct data_request *request, int part)
{
    return request->describe ? 1 : generated_size(request, part);
}

/* Generates both sets. Test samples have numbers above all possible training numbers, so the test set does
 * not depend on the size of the training set. */
static enum status generate(const struct data_request *request, const char *source, struct data *data)
{
    static const struct generated_values values = {.encoding = SOURCE_NPY};
    uint64_t train = generated_count(request, DATA_TRAIN), test = generated_count(request, DATA_TEST);
    if (!request->test_only)
        TRY(data_read(request, source, &values, (struct data_range){0, train, -1}, train, data, DATA_TRAIN));
    return data_read(request, source, &values, (struct data_range){DATA_SAMPLES_MAX + 1, test, -1}, test,
                     data, DATA_TEST);
}

/* Returns the first part that is read. */
static int first_part(const struct data_request *request)
{
    return request->test_only ? DATA_TEST : DATA_TRAIN;
}

/* ---- Generated during training ---- */

/* Generates the labels of all training samples, also of those that are not in memory. */
static enum status label_all(const struct source_reader *reader, uint64_t count, struct data_set *set)
{
    if (count > set->count)
        TRY(data_check_memory(count - set->count, sizeof *set->labels, "--train-size"));
    uint32_t *labels = realloc(set->labels, count * sizeof *labels);
    TRY(ALLOCATED(labels, "out of memory for %" PRIu64 " labels; lower --train-size", count));
    set->labels = labels;
    for (uint64_t n = set->count; n < count; n++)
        labels[n] = (uint32_t)reader->source->label(reader->state, n);
    set->count = (uint32_t)count;
    return STATUS_OK;
}

/* Returns the increment of sample numbers per epoch. It is at least 2^32, so numbers of later epochs are
 * above those of the test set. It is a multiple of the number of classes, so each sample keeps its label. */
static uint64_t fresh_step(uint32_t classes)
{
    return ((UINT64_C(1) << 32) + classes - 1) / classes * classes;
}

/* Fills both sets from the source `synth`, which the caller has opened. */
static enum status fill_synth(const struct data_request *request, struct source_reader *reader,
                              struct data *data)
{
    uint64_t train = generated_count(request, DATA_TRAIN), test = generated_count(request, DATA_TEST);
    uint64_t measured = train < DATA_MEASURED ? train : DATA_MEASURED, held = train;
    if (data->feed == DATA_LIVE)
        held = measured;
    if (data->feed == DATA_CONSTANT) {
        held = request->batch > measured ? request->batch : measured;
        held = held < train ? held : train;
    }
    int threads = request->resources.threads;
    if (!request->test_only) {
        TRY(data_fill(reader, (struct data_range){0, held, -1}, held, threads, data, DATA_TRAIN));
        TRY(label_all(reader, train, &data->sets[DATA_TRAIN]));
        data->held = (uint32_t)held;
        data->measured = (uint32_t)measured;
    }
    return data_fill(reader, (struct data_range){DATA_SAMPLES_MAX + 1, test, -1}, test, threads, data,
                     DATA_TEST);
}

static enum status open_synth(const struct data_request *request, struct data *data)
{
    struct data_source *source = data->source = calloc(1, sizeof *source);
    TRY(ALLOCATED(source, "out of memory"));
    const struct image_fit *fit = &request->fit;
    const bool fits = fit->res && fit->how != FIT_RANDOM_RESIZED_CROP;
    const struct synth_values values = {.encoding = SOURCE_NPY,
                                        .preset = request->preset,
                                        .classes = data->classes,
                                        .res = (uint32_t)request->res,
                                        .out_res = fits ? fit->res : 0,
                                        .crop = fit->how == FIT_CROP,
                                        .channels = !fits || fit->channels == 1 ? 1 : 3};
    if (fit->how != FIT_RANDOM_RESIZED_CROP)
        data->fit = (struct image_fit){0}; /* the source delivers images of this size */
    data->gray = true;
    data->feed = request->feed < 0 ? DATA_LIVE : (enum data_feed)request->feed;
    data->fresh = request->fresh ? fresh_step(data->classes) : 0;
    enum status status =
        source_open("synth", &(struct source_request){.parameters = &values, .resources = request->resources},
                    &source->reader);
    if (status == STATUS_OK)
        status = fill_synth(request, &source->reader, data);
    if (data->feed != DATA_LIVE)
        close_source(data);
    return status == STATUS_OK ? status : status_prefix(status, "--data %s", request->name);
}

enum status data_generator(const struct data *data, const struct generator_request *request,
                           struct generator **generator)
{
    const struct source_reader *reader = &data->source->reader;
    return reader->source->generate(reader->state, request, generator);
}

/* ---- Folders ---- */

static uint64_t limit_of(const struct data_request *request, int part)
{
    uint64_t limit = part == DATA_TRAIN ? request->train_size : request->test_size;
    return limit ? limit : UINT64_MAX;
}

/* The three functions below are not inlined: their paths would be on the stack together. */
static __attribute__((noinline)) enum status open_idx(const struct data_request *request, struct data *data)
{
    static const char *const names[DATA_PARTS][2] = {
        {"train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"},
        {"t10k-images-idx3-ubyte", "t10k-images-idx3-ubyte.gz"}};
    for (int part = first_part(request); part < DATA_PARTS; part++) {
        char path[PATH_MAX];
        if (!file_there(request->name, names[part][0], path) &&
            !file_there(request->name, names[part][1], path))
            return status_set(
                STATUS_USAGE,
                "--data %s: there is no %s, plain or gzipped; add it, because MNIST has four files",
                request->name, names[part][0]);
        const struct labelled_values values = {.source = path, .encoding = SOURCE_NPY};
        TRY(data_read(request, "idx", &values, (struct data_range){0, 0, -1}, limit_of(request, part), data,
                      (enum data_part)part));
    }
    return STATUS_OK;
}

/* Returns whether the folder has CIFAR-10 batch `number`. Writes the batch's path to `path`. */
static bool cifar_batch(const char *folder, int number, char path[PATH_MAX])
{
    char name[32];
    snprintf(name, sizeof name, "data_batch_%d.bin", number);
    return file_there(folder, name, path);
}

static bool any_cifar(const char *folder)
{
    char path[PATH_MAX];
    for (int i = 1; i <= CIFAR_BATCHES; i++)
        if (cifar_batch(folder, i, path))
            return true;
    return file_there(folder, "test_batch.bin", path);
}

/* Reads the CIFAR-10 batches of a folder; data_batch_1.bin to data_batch_5.bin form one training set. */
static __attribute__((noinline)) enum status open_cifar(const struct data_request *request, struct data *data)
{
    char paths[CIFAR_BATCHES][PATH_MAX], path[PATH_MAX];
    const char *learn[CIFAR_BATCHES + 1] = {NULL}, *const test[] = {path, NULL};
    size_t count = 0;
    for (int i = 1; i <= CIFAR_BATCHES; i++)
        if (cifar_batch(request->name, i, paths[count])) {
            learn[count] = paths[count];
            count++;
        }
    if (count == 0)
        return status_set(STATUS_USAGE,
                          "--data %s: the folder has none of the files data_batch_1.bin to data_batch_%d.bin",
                          request->name, CIFAR_BATCHES);
    if (!file_there(request->name, "test_batch.bin", path))
        return status_set(STATUS_USAGE,
                          "--data %s: there is no test_batch.bin; add this file, which has the test samples",
                          request->name);
    const struct labelled_values trained = {.files = learn, .encoding = SOURCE_NPY},
                                 tested = {.files = test, .encoding = SOURCE_NPY};
    if (!request->test_only)
        TRY(data_read(request, "cifar", &trained, (struct data_range){0, 0, -1},
                      limit_of(request, DATA_TRAIN), data, DATA_TRAIN));
    return data_read(request, "cifar", &tested, (struct data_range){0, 0, -1}, limit_of(request, DATA_TEST),
                     data, DATA_TEST);
}

static double share_of(const struct data_request *request)
{
    return request->test_share > 0 ? request->test_share : DATA_TEST_SHARE;
}

/* Opens the data sets of a training set and a test set, or one data set for both. `paths` has NULL for a data
 * set that does not exist. The test set is opened first, because it is usually smaller. A training set that
 * is not read is opened too, to compare its class folders. */
static enum status open_readers(const struct data_request *request, const char *const paths[DATA_PARTS],
                                struct source_reader readers[DATA_PARTS])
{
    for (int part = DATA_PARTS; part-- > 0;) {
        const struct dataset_values values = {.source = paths[part],
                                              .image = request->image ? request->image : MEMBERS_IMAGE,
                                              .label = request->label ? request->label : MEMBERS_LABEL,
                                              .fit = -1,
                                              .encoding = -1};
        const struct source_request with = {.parameters = &values,
                                            .resources = request->resources,
                                            .skip = request->skip,
                                            .test_share = paths[DATA_TEST] ? 0 : share_of(request),
                                            .only_held = part == DATA_TRAIN && request->test_only,
                                            .allow_empty = part == DATA_TEST,
                                            .like = part == DATA_TRAIN ? readers[DATA_TEST].state : NULL};
        if (paths[part])
            TRY(source_open("dataset", &with, &readers[part]));
    }
    return STATUS_OK;
}

/* Warns of the number of samples that are left out, because it changes the sets. */
static void tell_skipped(const struct data_request *request, const struct source_reader readers[DATA_PARTS],
                         struct data *data)
{
    bool uncounted = false;
    for (int part = first_part(request); part < DATA_PARTS; part++)
        uncounted = uncounted || readers[part].facts.uncounted;
    data->skips = !uncounted;
    const uint32_t train = data->sets[DATA_TRAIN].skipped, test = data->sets[DATA_TEST].skipped;
    if (train + test > 0 || uncounted)
        status_warn("--data %s: skipped %" PRIu32 " broken sample%s of the training set and %" PRIu32
                    " of the test set%s",
                    request->name, train, train == 1 ? "" : "s", test,
                    uncounted ? ", and an unknown number more" : "");
}

/* Reads both sets from two data sets, or divides one. */
static enum status read_datasets(const struct data_request *request, const char *const paths[DATA_PARTS],
                                 struct data *data)
{
    struct source_reader readers[DATA_PARTS] = {{0}};
    enum status status = open_readers(request, paths, readers);
    data->split = !paths[DATA_TEST];
    for (int part = first_part(request); status == STATUS_OK && part < DATA_PARTS; part++)
        status = data_fill(&readers[data->split ? DATA_TRAIN : part],
                           (struct data_range){0, 0, data->split ? part == DATA_TEST : -1},
                           limit_of(request, part), request->resources.threads, data, (enum data_part)part);
    if (status == STATUS_OK)
        tell_skipped(request, readers, data);
    for (int part = 0; part < DATA_PARTS; part++)
        source_close(&readers[part]);
    return status;
}

/* Finds the folder of a part of a data set. Its name may also begin with a capital or have only capitals. */
static bool part_there(const char *folder, const char *const spellings[3], char path[PATH_MAX])
{
    bool there = false;
    for (size_t i = 0; i < 3 && !there; i++)
        there = file_there(folder, spellings[i], path);
    return there;
}

/* Returns whether a folder has images, but no labels, shards or index: it is a class, or unlabelled. */
static bool has_only_images(const char *path)
{
    static const char *const others[] = {".index", ".cls", ".json", ".txt", ".tar"};
    bool image = false, other = false;
    DIR *list = opendir(path);
    for (const struct dirent *entry; list && !other && (entry = readdir(list));) {
        const char *dot = strrchr(entry->d_name, '.');
        image |= dot && image_format(dot + 1, NULL, 0) != IMAGE_NONE;
        for (size_t i = 0; dot && i < COUNT_OF(others); i++)
            other |= strcasecmp(dot, others[i]) == 0;
    }
    if (list)
        closedir(list);
    return image && !other;
}

/* Returns whether the folder `part`, such as "train", is a class and not a part of the data set: it has only
 * images, and so has another folder beside it. */
static bool is_class(const char *folder, const char *part)
{
    char path[PATH_MAX];
    bool found = false;
    DIR *list = has_only_images(part) ? opendir(folder) : NULL;
    for (const struct dirent *entry; list && !found && (entry = readdir(list));)
        found = *entry->d_name != '.' && file_there(folder, entry->d_name, path) && strcmp(path, part) != 0 &&
                has_only_images(path);
    if (list)
        closedir(list);
    return found;
}

static __attribute__((noinline)) enum status open_datasets(const struct data_request *request,
                                                           struct data *data)
{
    static const char *const trains[] = {"train", "Train", "TRAIN"},
                             *const tested[] = {"test", "Test", "TEST"},
                             *const vals[] = {"val", "Val", "VAL"};
    char train[PATH_MAX], test[PATH_MAX];
    bool learn = part_there(request->name, trains, train);
    bool tests = part_there(request->name, tested, test) || (learn && part_there(request->name, vals, test));
    if (learn != tests && is_class(request->name, learn ? train : test))
        learn = tests = false;
    const char *found = learn != tests ? strrchr(learn ? train : test, '/') + 1 : NULL;
    if (learn != tests)
        return status_set(
            STATUS_USAGE,
            "--data %s: the folder contains a data set '%s' but no '%s'; add the missing one, or "
            "name the folder %s, of which a part is then held out for testing (--test-share); if '%s' is a "
            "class, read a "
            "copy by --prepare --from dataset, which takes all folders as classes",
            request->name, found, learn ? "test' or 'val" : "train", learn ? train : test, found);
    const char *const two[DATA_PARTS] = {train, test}, *const one[DATA_PARTS] = {
                                                           request->url ? request->url : request->name, NULL};
    return read_datasets(request, learn ? two : one, data);
}

static const char *const generated[] = {"digits", "clips", "synth"};

bool data_is_generated(const char *name)
{
    bool found = false;
    for (size_t i = 0; i < COUNT_OF(generated); i++)
        found |= strcmp(name, generated[i]) == 0;
    return found;
}

static enum status unknown(const char *name)
{
    const char *nearest = nearest_word(name, generated, COUNT_OF(generated));
    bool mnist = strcmp(name, "mnist") == 0;
    return status_set(STATUS_USAGE,
                      "--data %s: no such folder; digits, clips and synth need no folder%s%s%s%s", name,
                      nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "",
                      mnist ? "; scripts/setup/fetch_mnist.sh mnist downloads it" : "");
}

/* Checks --classes for the generated sets `digits` and `clips`, which have a fixed number of classes.
 * --classes may be larger than this number, but not smaller. */
static enum status check_classes(const struct data *data, const char *name, uint32_t classes)
{
    return data->classes >= classes
               ? STATUS_OK
               : status_number(STATUS_USAGE, "classes", (double)data->classes,
                               ": %s has %" PRIu32 " classes; give at least as many, or drop --classes", name,
                               classes);
}

/* Opens both sets. Chooses their source by name, or by the contents of the folder. */
static enum status open_sets(const struct data_request *request, struct data *data)
{
    char path[PATH_MAX];
    bool idx = file_there(request->name, "train-images-idx3-ubyte", path) ||
               file_there(request->name, "train-images-idx3-ubyte.gz", path);
    bool cifar = any_cifar(request->name);
    bool digit = strcmp(request->name, "digits") == 0, synth = strcmp(request->name, "synth") == 0;
    bool clip = strcmp(request->name, "clips") == 0;
    if (request->feed == DATA_LIVE && !synth)
        return status_value(STATUS_USAGE, "feed", "live", " works only with --data synth; use --feed stored");
    data->classes = (uint32_t)request->classes;
    if (data->classes == 0)
        data->classes = clip ? CLIPS : digit || synth || idx || cifar ? DIGITS : 0;
    if (digit || clip)
        TRY(check_classes(data, request->name, clip ? CLIPS : DIGITS));
    if (digit)
        return generate(request, "digits", data);
    if (clip)
        return generate(request, "clips", data);
    if (synth)
        return open_synth(request, data);
    if (!remote_is(request->name) && access(request->name, F_OK) != 0)
        return unknown(request->name);
    if (request->skip && (idx || cifar))
        return status_set(STATUS_USAGE,
                          "--data %s: --on-error skip is for single files and tar shards, but the folder has "
                          "files of %s; drop --on-error",
                          request->name, idx ? "MNIST" : "CIFAR-10");
    return idx ? open_idx(request, data) : cifar ? open_cifar(request, data) : open_datasets(request, data);
}

/* ---- Checks and hashes ---- */

static enum status check_sets(const struct data_request *request, struct data *data)
{
    for (int part = first_part(request); part < DATA_PARTS; part++) {
        const struct data_set *set = &data->sets[part];
        uint64_t wanted = part == DATA_TRAIN ? request->train_size : request->test_size;
        if (set->count == 0 && set->skipped)
            return status_set(STATUS_FAILED,
                              "--data %s: all %" PRIu32 " samples to %s are broken; see the warnings above",
                              request->name, set->skipped, part == DATA_TRAIN ? "train on" : "test with");
        if (set->count == 0)
            return status_set(STATUS_FAILED,
                              "--data %s: there are no samples to %s; add samples, or use other data",
                              request->name, part == DATA_TRAIN ? "train on" : "test with");
        if (set->count + set->skipped < wanted)
            return status_set(
                STATUS_USAGE,
                "%s %" PRIu64 ": there are only %" PRIu32 " samples%s; give at most this number",
                size_options[part], wanted, set->count + set->skipped,
                data->split && part == DATA_TEST ? ", the part of the set that is held out (--test-share)"
                                                 : "");
    }
    return STATUS_OK;
}

/* If the number of classes is not known yet, sets it to the largest label plus one. Otherwise checks that all
 * labels are below the number of classes. */
static enum status count_classes(const struct data_request *request, struct data *data)
{
    uint32_t largest = 0;
    for (int part = 0; part < DATA_PARTS; part++)
        for (uint32_t i = 0; i < data->sets[part].count; i++)
            if (data->sets[part].labels[i] > largest)
                largest = data->sets[part].labels[i];
    if (data->classes == 0)
        data->classes = largest + 1;
    return largest < data->classes
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "--data %s: its largest label is %" PRIu32 ", but there are only %" PRIu32
                            " classes; give --classes %" PRIu32 " or more",
                            request->name, largest, data->classes, largest + 1);
}

static void identify(struct data *data)
{
#ifdef HAVE_XXHASH
    for (int part = 0; part < DATA_PARTS; part++) {
        const struct data_set *set = &data->sets[part];
        uint64_t values = XXH3_64bits(set->values, data_measured(data, (enum data_part)part) *
                                                       data_stored_bytes(data, (enum data_part)part));
        data->hashes[part] = XXH3_64bits_withSeed(set->labels, set->count * sizeof *set->labels, values);
    }
#else
    (void)data; /* without xxHash, there are no checkpoints, and ranks do not compare their data */
#endif
}

/* After request->describe: sets the numbers of samples of both generated sets, and checks that they fit into
 * memory. */
static enum status claim_all(const struct data_request *request, struct data *data)
{
    data->held = data->measured = 1;
    for (int part = 0; part < DATA_PARTS; part++) {
        const uint64_t count = generated_size(request, part);
        const bool stored = part == DATA_TEST || data->feed == DATA_STORED;
        TRY(data_check_memory(count,
                              stored ? data_stored_bytes(data, (enum data_part)part) : sizeof(uint32_t),
                              size_options[part]));
        data->sets[part].count = (uint32_t)count;
    }
    return STATUS_OK;
}

enum status data_open(const struct data_request *request, struct data *data)
{
    double begin_s = timer_now_s();
    *data = (struct data){.feed = request->feed == DATA_CONSTANT ? DATA_CONSTANT : DATA_STORED};
    data->fit = request->fit;
    TRY(members_parse(request->image, request->label, NULL, &data->members));
    TRY(open_sets(request, data));
    const bool described = request->describe && data_is_generated(request->name);
    if (request->test_share > 0 && !data->split)
        return status_set(STATUS_USAGE,
                          "--test-share: --data %s has a test set of its own, so nothing is held out; drop "
                          "--test-share",
                          request->name);
    if (!described)
        TRY(check_sets(request, data));
    TRY(count_classes(request, data));
    identify(data);
    if (described)
        TRY(claim_all(request, data));
    data->opening_s = timer_now_s() - begin_s;
    return STATUS_OK;
}

/* ---- Warnings ---- */

#define FEW 100 /* with fewer test samples, one sample changes the accuracy by more than 1 % */

void data_warn_of_classes(const struct data *data, const char *name, bool whole)
{
    if (data_is_generated(name))
        return;
    const struct data_set *train = &data->sets[DATA_TRAIN], *test = &data->sets[DATA_TEST];
    uint32_t *seen = calloc(data->classes, sizeof *seen);
    uint32_t missing = 0, unseen = 0, first = 0, single = 0;
    for (uint32_t i = 0; seen && i < train->count; i++)
        seen[train->labels[i]]++;
    for (uint32_t i = 0; seen && i < test->count; i++) {
        missing += seen[test->labels[i]] == 0;
        seen[test->labels[i]] += 2; /* so 1 means: one training sample and no test sample */
    }
    for (uint32_t c = data->classes; whole && seen && c-- > 0;) {
        single += seen[c] == 1;
        if (seen[c] == 0) {
            unseen++;
            first = c;
        }
    }
    free(seen);
    if (single)
        status_say("--data %s: %" PRIu32 " class%s a single sample, which is trained on and never tested",
                   name, single, single == 1 ? " has" : "es have");
    if (unseen)
        status_warn("--data %s: %" PRIu32 " of %" PRIu32 " classes ha%s no sample (the first: class %" PRIu32
                    "); labels begin at 0, and class folders without a usable sample count as classes",
                    name, unseen, data->classes, unseen == 1 ? "s" : "ve", first);
    if (data->classes == 1)
        status_warn(
            "--data %s: all samples have class 0, so there is nothing to learn; class folders must be "
            "directly in the folder of the data set",
            name);
    else if (missing)
        status_warn("--data %s: the test set has %" PRIu32 " class%s without a training sample; raise "
                    "--train-size, or use other data",
                    name, missing, missing == 1 ? "" : "es");
}

void data_warn_of_few(const struct data *data, const char *name)
{
    static bool told;
    const uint32_t count = data->sets[DATA_TEST].count;
    if (told || count >= FEW || data_is_generated(name))
        return;
    told = true;
    status_warn("--data %s: the test set has only %" PRIu32
                " sample%s, so a single sample changes the accuracy by %.3g %%; %s",
                name, count, count == 1 ? "" : "s", 100.0 / count,
                data->split
                    ? "add samples, raise --test-share, or store a larger test set and the training set in "
                      "folders 'test' and 'train'"
                    : "add test samples");
}
