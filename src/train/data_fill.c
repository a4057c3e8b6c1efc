/* Reads samples of a source or rows of embeddings into a set: chooses them, decodes them on several threads,
 * and checks them. */
#include "train/data_fill.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "core/parallel.h"
#include "core/text.h"
#include "core/timer.h"
#include "data/checksum.h"
#include "data/dataset.h"
#include "data/embeddings.h"
#include "data/image_formats.h"
#include "data/remote.h"
#include "data/tensor_file.h"
#include "machine/host.h"

#define CHUNK       256                   /* at most this many samples are requested at a time */
#define CHUNK_BYTES (UINT64_C(256) << 20) /* at most this many bytes, but at least one sample, at a time */
#define PROGRESS_S  0.25
#define CLASSES_MAX (1 << 24)
#define SKIPS_TOLD  8 /* warnings about broken samples per set; further ones are only counted */

const char *const data_size_options[DATA_PARTS] = {"--train-size", "--test-size"};

/* ---- Decoding ---- */

/* Finds a member of a sample, and sets `*rule` to the entry of `list` that names it. `option` is the name of
 * the option that sets the list. */
static enum status find_member(const struct source_sample *sample, const struct member_list *list,
                               const char *option, const struct source_member **member,
                               const struct member_rule **rule)
{
    const char *extensions[SOURCE_MEMBERS_MAX] = {NULL};
    uint32_t count = (uint32_t)sample->count;
    for (uint32_t m = 0; m < count; m++)
        extensions[m] = sample->members[m].extension;
    *member = NULL;
    uint32_t found = members_find(list, extensions, count, false, rule);
    if (!*rule)
        return members_lack(list, option, extensions, count);
    *member = &sample->members[found];
    return STATUS_OK;
}

/* Returns whether the training set has canvases, from which training cuts its images. */
static bool has_canvases(const struct data *data)
{
    return data->fit.res && data->fit.how == FIT_RANDOM_RESIZED_CROP && data->feed != DATA_LOAD;
}

/* Returns how samples of a set are fitted when they are decoded here. Random-resized-crop is for the steps of
 * training: a canvas keeps its size, and the samples that set the scale and the offset of a stream are
 * resized. */
static struct image_fit fit_of(const struct data *data, enum data_part part)
{
    struct image_fit fit = data->fit;
    if (!fit.res || fit.how != FIT_RANDOM_RESIZED_CROP)
        return fit;
    fit.how = part == DATA_TEST && data->centre ? FIT_CENTRE : FIT_RESIZE;
    fit.res = part == DATA_TRAIN && has_canvases(data) ? 0 : fit.res;
    return fit;
}

/* Decodes the image or volume of a sample. The pixels are valid while `scratch` and the sample are unchanged.
 */
static enum status decode(const struct data *data, enum data_part part, const struct source_sample *sample,
                          uint64_t number, struct image_scratch *scratch, struct image *image)
{
    const struct source_member *member;
    const struct member_rule *rule;
    const struct image_fit fit = fit_of(data, part);
    bool is_image;
    if (sample->image) /* the data set has chosen it, perhaps by the name of its file */
        member = source_member(sample, sample->image);
    else
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

/* Reads the multi-hot label of a sample to `row`. */
static enum status read_multi_hot(const struct data *data, const struct source_sample *sample, uint32_t *row)
{
    const struct source_member *member = source_member(sample, MULTI_HOT_MEMBER);
    uint32_t classes = data->classes;
    const uint8_t *label;
    if (!member)
        return status_set(STATUS_FAILED, "it has no multi-hot label ('" MULTI_HOT_MEMBER "')");
    TRY(members_multi_hot(member->bytes, member->size, &classes, &label));
    for (uint32_t w = 0; w < multi_hot_words(classes); w++)
        row[w] = multi_hot_pack(label, classes, w);
    return STATUS_OK;
}

static enum status read_label(const struct data *data, const struct source_sample *sample, int32_t *label)
{
    const struct source_member *member;
    const struct member_rule *rule;
    static const struct member_rule known = {.extension = "cls"};
    if (sample->in_folder) {
        rule = &known;
        member = source_member(sample, "cls");
    } else
        TRY(find_member(sample, &data->members.label, "label", &member, &rule));
    TRY(members_label(rule, member->bytes, member->size, label));
    return label_check(*label, CLASSES_MAX);
}

/* ---- Checks and memory ---- */

static const char *const set_names[DATA_PARTS] = {"training", "test"};

/* Sets the shape of the canvases and of the samples of the network from the first canvas. */
static enum status fit_canvas(struct data *data, const struct image *image)
{
    const struct image_fit *fit = &data->fit;
    if (image->type != DTYPE_U8 || (image->channels != 1 && image->channels != 3))
        return status_value(STATUS_USAGE, "fit", "random-resized-crop",
                            " needs 8-bit images with one or three channels; use --fit resize, or other "
                            "--data");
    if (image->channels > fit->channels)
        return status_value(STATUS_USAGE, "fit", "random-resized-crop",
                            " cannot convert colour images to gray; use --channels 3, or --fit resize");
    data->shape = (struct shape){fit->channels, image->depth, fit->res, fit->res};
    data->type = image->type;
    data->sample_values = data->sample_bytes = shape_values(&data->shape);
    data->canvas = (struct shape){image->channels, image->depth, image->height, image->width};
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
            canvas ? "; with --feed stored, --fit random-resized-crop needs images of one size and number of "
                     "channels: use --feed load, which crops images of any size, or --fit resize"
                   : remedy);
    return is.channels <= DATA_CHANNELS_MAX
               ? STATUS_OK
               : status_set(STATUS_USAGE, "%u channels; at most %d are supported", is.channels,
                            DATA_CHANNELS_MAX);
}

enum status data_room_for_labels(const struct data *data, uint64_t count, const char *option,
                                 struct data_set *set)
{
    uint32_t *labels = realloc(set->labels, count * sizeof *labels), *rows = NULL;
    if (labels)
        set->labels = labels;
    if (data->multi_hot)
        rows = realloc(set->multi_hot, count * multi_hot_words(data->classes) * sizeof *rows);
    if (rows)
        set->multi_hot = rows;
    return ALLOCATED(labels && (rows || !data->multi_hot), "out of memory for %" PRIu64 " labels; lower %s",
                     count, option);
}

/* The capacity of a growing set: the current and the maximum number of samples, and the option that sets the
 * maximum. */
struct room {
    uint64_t now, most;
    const char *option;
};

enum status data_check_memory(uint64_t samples, size_t sample_bytes, const char *option)
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
    TRY(data_check_memory(wanted - room->now, bytes + data_label_bytes(data), room->option));
    void *values = realloc(set->values, wanted * bytes);
    TRY(ALLOCATED(values, "out of memory for %" PRIu64 " samples; lower %s", wanted, room->option));
    set->values = values;
    TRY(data_room_for_labels(data, wanted, room->option, set));
    room->now = wanted;
    return STATUS_OK;
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
    bool measured; /* the samples are only measured; a stream reads them again, and reports broken ones */
    int threads;
    struct image_scratch *scratch; /* of each thread; owned */
};

/* Opens an intake with at most `most` threads. The caller closes it, even after a failure. */
static enum status intake_open(struct source_reader *reader, int threads, int most, struct data *data,
                               enum data_part part, struct intake **batch)
{
    struct intake *opened = *batch = calloc(1, sizeof *opened);
    TRY(ALLOCATED(opened, "out of memory to read samples"));
    opened->reader = reader;
    opened->data = data;
    opened->part = part;
    opened->threads = threads < 1 ? 1 : threads < most ? threads : most;
    opened->scratch = calloc((size_t)opened->threads, sizeof *opened->scratch);
    return ALLOCATED(opened->scratch, "out of memory to read samples");
}

static void intake_close(struct intake **batch)
{
    for (int i = 0; *batch && (*batch)->scratch && i < (*batch)->threads; i++)
        image_scratch_close(&(*batch)->scratch[i]);
    if (*batch)
        free((*batch)->scratch);
    free(*batch);
}

/* Decodes and checks a sample, and stores it after the samples that the set already has. */
static enum status store(const struct intake *batch, uint64_t i, struct image_scratch *scratch)
{
    const struct data *data = batch->data;
    const struct data_set *set = &data->sets[batch->part];
    struct image image;
    int32_t label = (int32_t)(set->count + i);
    TRY(decode(data, batch->part, &batch->samples[i], batch->numbers[i], scratch, &image));
    TRY(check_shape(data, batch->part, &image));
    TRY(image_check_finite(&image));
    TRY(data->multi_hot ? read_multi_hot(data, &batch->samples[i], data_multi_hot(data, set, set->count + i))
                        : read_label(data, &batch->samples[i], &label));
    image_store(&image, (uint8_t *)set->values + (set->count + i) * data_stored_bytes(data, batch->part));
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

/* Handles a failure of a sample that a stream would read; the message names the sample. */
static enum status tolerate(const struct data *data, enum status status)
{
    if (status == STATUS_FAILED && data->masks)
        return STATUS_OK;
    return status == STATUS_FAILED ? dataset_advise_mask(status) : status;
}

/* Handles a failure of a sample, whose message is set and names the sample. Counts a broken sample as skipped
 * if the reader skips such samples; otherwise returns `status`. */
static enum status skip(const struct intake *batch, enum status status)
{
    struct data_set *set = &batch->data->sets[batch->part];
    if (batch->measured)
        return tolerate(batch->data, status);
    if (status != STATUS_FAILED)
        return status;
    if (!batch->reader->skip && batch->reader->source->locate)
        return batch->data->feed == DATA_LOAD ? dataset_advise_mask(status) : dataset_advise_skip(status);
    if (!batch->reader->skip)
        return status;
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
    if (!reader->skip && !batch->measured)
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
    const struct data *data = batch->data;
    const struct data_set *set = &data->sets[batch->part];
    const size_t bytes = data_stored_bytes(data, batch->part);
    uint8_t *values = (uint8_t *)set->values + set->count * bytes;
    if (to == from)
        return;
    memcpy(values + to * bytes, values + from * bytes, bytes);
    if (data->multi_hot)
        memcpy(data_multi_hot(data, set, set->count + to), data_multi_hot(data, set, set->count + from),
               multi_hot_words(data->classes) * sizeof *set->multi_hot);
    set->labels[set->count + to] =
        data->multi_hot ? (uint32_t)(set->count + to) : set->labels[set->count + from];
}

/* Sets the shape of both sets, if it is not known yet. Removes broken samples from the batch. */
static enum status find_shape(struct intake *batch)
{
    while (batch->data->sample_values == 0 && batch->count > 0) {
        TRY(take_shape(batch));
        batch->scratch->jpeg_warnings = 0; /* store() decodes this sample again */
        if (batch->data->sample_values == 0)
            remove_first(batch);
    }
    return STATUS_OK;
}

/* Adds all samples of a batch to their set, except for skipped ones. Error messages are per thread. The
 * calling thread therefore decodes each failed sample again, to set its own message. */
static enum status add_batch(struct intake *batch, bool known, struct room *room)
{
    struct data *data = batch->data;
    struct data_set *set = &data->sets[batch->part];
    uint32_t kept = 0;
    TRY(find_shape(batch));
    if (batch->count == 0)
        return STATUS_OK;
    enum status status = make_room(data, batch->part, set, batch->count, known, room);
    if (status != STATUS_OK)
        return name_sample(batch, 0, status);
    parallel_for(batch->threads, batch->count, try_to_store, batch);
    for (uint64_t i = 0; i < batch->count; i++) {
        status = batch->failed[i] ? store(batch, i, batch->scratch) : STATUS_OK;
        if (status == STATUS_OK) {
            data_note_label(set, set->labels[set->count + i], batch->numbers[i]);
            move_sample(batch, kept++, i);
            if (data->keeps_keys && batch->part == DATA_TEST && batch->reader->source->locate)
                TRY(data_keep_key(set, source_dataset_sample(batch->reader, batch->numbers[i])->key));
        } else
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
    struct room room = {0, limit < range.count ? limit : range.count, data_size_options[batch->part]};
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
static void tell_warnings(const struct intake *batch)
{
    uint64_t warnings = 0;
    for (int i = 0; i < batch->threads; i++)
        warnings += batch->scratch[i].jpeg_warnings;
    if (warnings > 0)
        status_warn("the %s set: accepted %" PRIu64 " warning%s of libjpeg that %s no lost data",
                    set_names[batch->part], warnings, warnings == 1 ? "" : "s",
                    warnings == 1 ? "means" : "mean");
}

enum status data_fill(struct source_reader *reader, struct data_range range, uint64_t limit, int threads,
                      struct data *data, enum data_part part)
{
    CLOSED_BY(intake_close) struct intake *batch;
    FREED uint8_t *chosen = NULL;
    limit = limit < DATA_SAMPLES_MAX ? limit : DATA_SAMPLES_MAX;
    range.count = range.count ? range.count : reader->facts.samples;
    TRY(intake_open(reader, threads, CHUNK, data, part, &batch));
    TRY(choose(reader, range, limit, &chosen));
    TRY(fill(range, limit, chosen, batch));
    tell_warnings(batch);
    return STATUS_OK;
}

/* ---- Listing and measuring samples that a stream reads ---- */

#define MEASURED_AT_ONCE 64 /* samples that are in memory at the same time while they are measured */

/* Returns the number of samples of the range that the set takes, at most `limit`. */
static uint64_t count_taken(const struct source_reader *reader, struct data_range range, uint64_t limit,
                            const uint8_t *chosen)
{
    uint64_t count = 0;
    for (uint64_t at = 0; at < range.count && count < limit; at++)
        count += takes(reader, range, chosen, at);
    return count;
}

/* Sets `*label` to DATA_MASKED if the label of a sample is broken, and the data mask such samples. The
 * message then says what is wrong. A sample that cannot be read is an error. */
static enum status mask_label(const struct source_reader *reader, uint64_t number, const struct data *data,
                              uint32_t *label)
{
    struct source_sample sample = {0};
    int32_t read = 0;
    *label = DATA_MASKED;
    enum status status = source_make(reader->source, reader->state, number, 1, &sample);
    const bool readable = status == STATUS_OK;
    if (readable)
        status = read_label(data, &sample, &read);
    source_sample_free(&sample);
    if (!readable)
        return status;
    if (status == STATUS_OK)
        *label = (uint32_t)read;
    else if (reader->source->locate)
        reader->source->locate(reader->state, number, status);
    return tolerate(data, status);
}

/* Appends a sample with a multi-hot label to the list, which has room for it. */
static enum status list_multi_hot(const struct source_reader *reader, uint64_t number,
                                  const struct data *data, struct data_list *list)
{
    uint32_t *const row = list->multi_hot + (size_t)list->count * multi_hot_words(data->classes);
    const enum status status = reader->source->multi_hot(reader->state, number, row);
    TRY(tolerate(data, status));
    list->numbers[list->count] = number;
    list->labels[list->count] = status == STATUS_OK ? list->count : DATA_MASKED;
    if (status != STATUS_OK && list->masked++ == 0)
        status_warn("masked in the %s set: %s", set_names[DATA_TRAIN], status_text());
    list->count++;
    return STATUS_OK;
}

/* Appends a sample of the source to the list, which has room for it. */
static enum status list_sample(const struct source_reader *reader, uint64_t number, const struct data *data,
                               struct data_list *list)
{
    const uint64_t found = reader->source->label(reader->state, number); /* a failure sets the message */
    uint32_t label = (uint32_t)found;
    enum status status = found > INT32_MAX ? STATUS_FAILED : label_check((int32_t)label, CLASSES_MAX);
    if (status != STATUS_OK && found <= INT32_MAX && reader->source->locate)
        reader->source->locate(reader->state, number, status);
    if (status != STATUS_OK && !data->masks)
        return tolerate(data, status);
    if (status != STATUS_OK)
        TRY(mask_label(reader, number, data, &label));
    if (label == DATA_MASKED && list->masked++ == 0)
        status_warn("masked in the %s set: %s", set_names[DATA_TRAIN], status_text());
    list->numbers[list->count] = number;
    list->labels[list->count++] = label;
    return STATUS_OK;
}

enum status data_list_samples(struct source_reader *reader, struct data_range range, uint64_t limit,
                              const struct data *data, struct data_list *list)
{
    FREED uint8_t *chosen = NULL;
    struct source_reader tolerant = *reader;
    tolerant.skip |= data->masks;
    *list = (struct data_list){0};
    limit = limit < DATA_SAMPLES_MAX ? limit : DATA_SAMPLES_MAX;
    range.count = range.count ? range.count : reader->facts.samples;
    TRY(choose(&tolerant, range, limit, &chosen));
    const uint64_t count = count_taken(reader, range, limit, chosen);
    TRY(data_check_memory(count, sizeof *list->numbers + data_label_bytes(data), "--train-size"));
    list->numbers = malloc((count + 1) * sizeof *list->numbers);
    list->labels = malloc((count + 1) * sizeof *list->labels);
    if (data->multi_hot)
        list->multi_hot = calloc(count + 1, data_label_bytes(data));
    TRY(ALLOCATED(list->numbers && list->labels && (list->multi_hot || !data->multi_hot),
                  "out of memory for a list of samples"));
    uint64_t asked = range.first;
    for (uint64_t at = 0; list->count < count; at++) {
        if (!reader->facts.class_folders) /* otherwise, no file is read */
            source_ask(reader->source, reader->state, &asked, range.first + range.count);
        if (takes(reader, range, chosen, at))
            TRY((data->multi_hot ? list_multi_hot : list_sample)(reader, range.first + at, data, list));
    }
    if (list->masked > 0)
        status_warn("%" PRIu32 " training sample%s no label that can be read, and %s masked", list->masked,
                    list->masked == 1 ? " has" : "s have", list->masked == 1 ? "is" : "are");
    return STATUS_OK;
}

/* Decodes the samples in batch->numbers, and adds them to data->sums in their order. */
static enum status measure_batch(struct intake *batch)
{
    struct data *data = batch->data;
    struct data_set *set = &data->sets[DATA_TRAIN];
    TRY(read_batch(batch));
    TRY(find_shape(batch));
    if (batch->count > 0 && !set->values) {
        set->values = malloc(MEASURED_AT_ONCE * data->sample_bytes);
        TRY(ALLOCATED(set->values, "out of memory for %d samples", MEASURED_AT_ONCE));
        TRY(data_room_for_labels(data, MEASURED_AT_ONCE, "--batch", set));
    }
    parallel_for(batch->threads, batch->count, try_to_store, batch);
    for (uint64_t i = 0; i < batch->count; i++) {
        enum status status = batch->failed[i] ? store(batch, i, batch->scratch) : STATUS_OK;
        if (status != STATUS_OK) {
            TRY(skip(batch, name_sample(batch, i, status)));
            continue;
        }
        const uint8_t *values = (uint8_t *)set->values + i * data->sample_bytes;
        for (uint32_t c = 0; c < data->shape.channels; c++)
            data_add_sums(data, values, c, &data->sums[c]);
        data->measured++;
    }
    return STATUS_OK;
}

static enum status measure_all(const struct data_list *list, struct intake *batch)
{
    const uint64_t count = list->count < DATA_MEASURED ? list->count : DATA_MEASURED;
    const uint64_t fit = chunk_of(batch->reader), most = fit < MEASURED_AT_ONCE ? fit : MEASURED_AT_ONCE;
    enum status status = STATUS_OK;
    for (uint64_t done = 0; status == STATUS_OK && done < count; done += most) {
        batch->count = count - done < most ? count - done : most;
        for (uint64_t i = 0; i < batch->count; i++)
            batch->numbers[i] = list->numbers[(done + i) * list->count / count];
        status = measure_batch(batch);
        for (size_t i = 0; i < COUNT_OF(batch->samples); i++)
            source_sample_free(&batch->samples[i]);
    }
    return status;
}

enum status data_measure(struct source_reader *reader, const struct data_list *list, int threads,
                         struct data *data)
{
    struct data_set *set = &data->sets[DATA_TRAIN];
    CLOSED_BY(intake_close) struct intake *batch;
    TRY(intake_open(reader, threads, MEASURED_AT_ONCE, data, DATA_TRAIN, &batch));
    batch->measured = true;
    enum status status = measure_all(list, batch);
    free(set->values);
    free(set->labels);
    free(set->multi_hot);
    *set = (struct data_set){0};
    if (status == STATUS_OK && data->measured == 0 && list->count > 0)
        status = status_set(STATUS_FAILED,
                            "none of %" PRIu32 " training samples has an image and a label that can be read",
                            list->count < DATA_MEASURED ? list->count : DATA_MEASURED);
    return status;
}

/* ---- Rows of embeddings ---- */

/* Rows of embeddings and their labels: both sets, or the test set and a generator for the training set. */

#define ROW_CLASSES_MAX (1 << 24)

struct data_rows {
    struct embeddings *sets[DATA_PARTS]; /* owned; both parts of a divided set have sets[DATA_TRAIN] */
    uint32_t *numbers[DATA_PARTS];       /* owned; of each sample, the number of its row in the set */
    uint64_t hash;                       /* data_rows_hash() */
};

/* ---- What the request names ---- */

/* Returns whether a folder has files of tensors and neither subfolders, shards nor other images: in a data
 * set of images, a file such as model.pt belongs to something else, and .npy files may be images. */
static bool has_only_tensors(const char *path)
{
    bool tensors = false, others = false;
    DIR *folder = opendir(path);
    for (const struct dirent *entry; folder && !others && (entry = readdir(folder));) {
        const char *name = entry->d_name, *dot = strrchr(name, '.');
        struct stat info;
        const bool npy = text_ends_in(name, ".npy"), known = *name != '.' && tensor_file_named(name);
        tensors |= known && !npy;
        others |= *name != '.' && fstatat(dirfd(folder), name, &info, 0) == 0 && S_ISDIR(info.st_mode);
        others |=
            dot && dot != name &&
            (text_ends_in(name, ".tar") ? !known : image_format(dot + 1, NULL, 0) != IMAGE_NONE && !npy);
    }
    if (folder)
        closedir(folder);
    return tensors && !others;
}

/* Returns whether these labels are a table of the labels of images. */
static bool is_table(const char *labels)
{
    return labels && text_ends_in(labels, ".csv");
}

bool rows_named(const struct data_request *request)
{
    if (data_is_generated(request->name))
        return false;
    return (request->labels && !is_table(request->labels)) ||
           (request->test_labels && !is_table(request->test_labels)) || request->tensor ||
           tensor_file_named(request->name) || has_only_tensors(request->name);
}

/* Rejects options that are for images. */
static enum status check_request(const struct data_request *request)
{
    const struct {
        bool given;
        const char *option;
    } others[] = {{request->image, "image"},
                  {request->label, "label"},
                  {request->fit.res > 0, "out-res"},
                  {request->skip || request->mask, "on-error"}};
    for (size_t i = 0; i < COUNT_OF(others); i++)
        if (others[i].given)
            return status_option(STATUS_USAGE, others[i].option,
                                 " is for images, but --data %s has rows of embeddings; drop --%s%s",
                                 request->name, others[i].option, i == 1 ? ", or use --labels" : "");
    const char *const names[] = {request->name, request->test_name};
    for (size_t i = 0; i < COUNT_OF(names); i++)
        if (names[i] && remote_is(names[i]))
            return status_option(
                STATUS_USAGE, i ? "test-data" : "data",
                " %s is a URL, but rows of embeddings are read from local files; download them", names[i]);
    return request->test_labels && !request->test_name
               ? status_set(STATUS_USAGE, "--test-labels needs --test-data, the rows that the labels are for")
               : STATUS_OK;
}

/* ---- Rows ---- */

/* Opens a generator whose samples are those of a part. */
static enum status open_reader(const struct data_rows *rows, enum data_part part,
                               const struct embeddings *set, int threads, struct generator **reader)
{
    const struct embedding_rows request = {.set = set,
                                           .numbers = rows->numbers[part],
                                           .finite = true,
                                           .to = set->dtype,
                                           .width = set->columns,
                                           .threads = threads > 1 ? threads : 1};
    return embedding_rows_open(&request, reader);
}

/* Reads samples of a part; `samples` NULL: samples 0 to count - 1. */
static enum status read_samples(const struct data_request *request, const struct data *data,
                                enum data_part part, const struct embeddings *set, const uint64_t *samples,
                                uint32_t count, void *to)
{
    struct generator *reader;
    TRY(open_reader(data->rows, part, set, request->resources.threads, &reader));
    const enum status status =
        generator_make(reader, &(struct generator_numbers){.list = samples}, count, to, NULL, NULL);
    generator_close(reader);
    return status;
}

/* ---- Choosing rows ---- */

/* Sets the samples of a part: the rows that are held out (`held` is 1), that are not (0), or all (-1), at
 * most `limit`. */
static enum status choose_rows(struct data *data, enum data_part part, const struct embeddings *set,
                               const int32_t *labels, const uint8_t *flags, int held, uint64_t limit)
{
    struct data_set *into = &data->sets[part];
    uint32_t **numbers = &data->rows->numbers[part];
    char key[24];
    *numbers = malloc((set->rows + 1) * sizeof **numbers);
    into->labels = malloc((set->rows + 1) * sizeof *into->labels);
    TRY(ALLOCATED(*numbers && into->labels, "out of memory for the list of rows"));
    for (uint64_t row = 0; row < set->rows && into->count < limit; row++)
        if (held < 0 || flags[row] == held) {
            data_note_label(into, (uint32_t)labels[row], row);
            into->labels[into->count] = (uint32_t)labels[row];
            (*numbers)[into->count++] = (uint32_t)row;
            snprintf(key, sizeof key, "%" PRIu64, row);
            if (data->keeps_keys && part == DATA_TEST)
                TRY(data_keep_key(into, key));
        }
    return STATUS_OK;
}

/* Sets `*flags`: 1 for each row that is held out. The key of a row is its number. The caller frees it. */
static enum status hold_out(const struct embeddings *set, const int32_t *labels, double share,
                            uint8_t **flags)
{
    FREED struct dataset_candidate *candidates = malloc((set->rows + 1) * sizeof *candidates);
    *flags = calloc(set->rows + 1, 1);
    TRY(ALLOCATED(candidates && *flags, "out of memory to hold out rows"));
    for (uint64_t row = 0; row < set->rows; row++)
        candidates[row] = (struct dataset_candidate){labels[row], (uint32_t)row, stream_hash(row)};
    dataset_hold_out(candidates, (uint32_t)set->rows, share, *flags);
    return STATUS_OK;
}

/* Copies the values of a part into memory. */
static enum status store_rows(const struct data_request *request, struct data *data, enum data_part part,
                              const struct embeddings *set)
{
    struct data_set *into = &data->sets[part];
    TRY(data_check_memory(into->count, data->sample_bytes, data_size_options[part]));
    into->values = malloc(into->count * data->sample_bytes + 1);
    TRY(ALLOCATED(into->values, "out of memory for %" PRIu32 " rows; lower %s", into->count,
                  data_size_options[part]));
    return read_samples(request, data, part, set, NULL, into->count, into->values);
}

/* Sets data->sums and the hash from rows that are evenly distributed over the training set. */
static enum status measure(const struct data_request *request, struct data *data,
                           const struct embeddings *set)
{
    const uint64_t count = data->sets[DATA_TRAIN].count, most = count < DATA_MEASURED ? count : DATA_MEASURED;
    FREED uint64_t *samples = malloc((most + 1) * sizeof *samples);
    FREED uint8_t *values = malloc(most * data->sample_bytes + 1);
    TRY(ALLOCATED(samples && values, "out of memory to measure rows"));
    for (uint64_t i = 0; i < most; i++)
        samples[i] = i * count / most;
    TRY(read_samples(request, data, DATA_TRAIN, set, samples, (uint32_t)most, values));
    for (uint64_t i = 0; i < most; i++)
        data_add_sums(data, values + i * data->sample_bytes, 0, &data->sums[0]);
    data->measured = (uint32_t)most;
    data->rows->hash = checksum_seeded(values, most * data->sample_bytes, count ^ set->rows << 32);
    return STATUS_OK;
}

/* ---- Opening ---- */

/* Opens the files of a part, and reads its labels. */
static enum status open_part(const struct data_request *request, enum data_part part, struct embeddings **set,
                             int32_t **labels)
{
    const bool test = part == DATA_TEST;
    const char *path = test ? request->test_name : request->name, *option = test ? "--test-data" : "--data";
    /* A tensor has the same name in the files of both sets; a file of labels is for one of them. */
    const bool files = embedding_labels_are_files(request->labels);
    const char *from = !test || (!request->test_labels && !files) ? request->labels : request->test_labels;
    TRY(status_prefix(embeddings_open(path, request->tensor ? request->tensor : "", set), "%s", option));
    if ((*set)->rows > DATA_SAMPLES_MAX)
        return status_set(STATUS_TOO_LARGE, "%s %s has %" PRIu64 " rows; at most %" PRIu64 " are supported",
                          option, path, (*set)->rows, DATA_SAMPLES_MAX);
    if (test && !from && files)
        return status_set(STATUS_USAGE, "--test-data %s: name the labels of its rows with --test-labels",
                          path);
    return embedding_labels(*set, from, 0, ROW_CLASSES_MAX - 1, labels);
}

/* Sets the shape of the samples. Both sets have it, because one network sees both. */
static enum status take_row_shape(const struct embeddings *set, struct data *data)
{
    if (data->sample_values == 0) {
        data->shape = (struct shape){1, 1, 1, set->columns};
        data->type = set->dtype;
        data->sample_values = set->columns;
        data->sample_bytes = set->columns * dtype_bytes(set->dtype);
    }
    return data->type == set->dtype && data->sample_values == set->columns
               ? STATUS_OK
               : status_set(
                     STATUS_USAGE,
                     "the training set has rows of %zu values of %s, but the test set has rows of %" PRIu32
                     " values of %s; both need the same",
                     data->sample_values, dtype_names[data->type], set->columns, dtype_names[set->dtype]);
}

/* Chooses the samples of a part and reads their values, or with DATA_LOAD measures the training set. */
static enum status fill_part(const struct data_request *request, enum data_part part,
                             const struct embeddings *set, const int32_t *labels, const uint8_t *flags,
                             struct data *data)
{
    const bool train = part == DATA_TRAIN;
    const uint64_t size = train ? request->train_size : request->test_size;
    TRY(take_row_shape(set, data));
    TRY(choose_rows(data, part, set, labels, flags, !data->split ? -1 : !train, size ? size : UINT64_MAX));
    return train && data->feed == DATA_LOAD ? measure(request, data, set)
                                            : store_rows(request, data, part, set);
}

/* Opens and fills both parts from one set, or each from its own. */
static enum status open_parts(const struct data_request *request, struct data *data,
                              int32_t *labels[DATA_PARTS], uint8_t **flags)
{
    struct embeddings **sets = data->rows->sets;
    const double share = request->test_share > 0 ? request->test_share : DATA_TEST_SHARE;
    data->split = !request->test_name;
    if (!request->test_only || data->split)
        TRY(open_part(request, DATA_TRAIN, &sets[DATA_TRAIN], &labels[DATA_TRAIN]));
    if (data->split)
        TRY(hold_out(sets[DATA_TRAIN], labels[DATA_TRAIN], share, flags));
    else
        TRY(open_part(request, DATA_TEST, &sets[DATA_TEST], &labels[DATA_TEST]));
    if (!request->test_only)
        TRY(fill_part(request, DATA_TRAIN, sets[DATA_TRAIN], labels[DATA_TRAIN], *flags, data));
    const int from = data->split ? DATA_TRAIN : DATA_TEST;
    return fill_part(request, DATA_TEST, sets[from], labels[from], *flags, data);
}

/* Counts the classes. A failure names the row. */
static enum status count_classes(struct data *data)
{
    const struct data_set *set = data_largest(data);
    const enum status status = data_count_classes(data);
    if (status == STATUS_OK)
        return STATUS_OK;
    const struct embeddings *rows = data->rows->sets[data->split ? DATA_TRAIN : set - data->sets];
    const struct embeddings_part *part = embeddings_part_of(rows, set->largest_number);
    return status_prefix(status, "%s: row %" PRIu64, part->file, set->largest_number - part->first);
}

enum status data_rows_open(const struct data_request *request, struct data *data)
{
    int32_t *labels[DATA_PARTS] = {NULL};
    uint8_t *flags = NULL;
    TRY(check_request(request));
    data->rows = calloc(1, sizeof *data->rows);
    TRY(ALLOCATED(data->rows, "out of memory"));
    enum status status = open_parts(request, data, labels, &flags);
    if (status == STATUS_OK)
        status = count_classes(data);
    for (int part = 0; part < DATA_PARTS; part++) {
        free(labels[part]);
        if (part == DATA_TRAIN && data->feed == DATA_LOAD)
            continue; /* the streams read from it */
        embeddings_close(data->rows->sets[part]);
        data->rows->sets[part] = NULL;
    }
    free(flags);
    return status;
}

void rows_close(struct data *data)
{
    for (int part = 0; data->rows && part < DATA_PARTS; part++) {
        embeddings_close(data->rows->sets[part]);
        free(data->rows->numbers[part]);
    }
    free(data->rows);
    data->rows = NULL;
}

uint64_t data_rows_hash(const struct data *data)
{
    return data->rows->hash;
}

bool rows_are_whole(const struct data *data)
{
    /* choose_rows() lists rows in their order */
    return data->sets[DATA_TRAIN].count == data->rows->sets[DATA_TRAIN]->rows;
}

enum status rows_state_hash(const struct data *data, uint64_t *hash)
{
    return embedding_hash(data->rows->sets[DATA_TRAIN], (const int32_t *)data->sets[DATA_TRAIN].labels, hash);
}

enum status rows_generator(const struct data *data, int threads, struct generator **generator)
{
    return open_reader(data->rows, DATA_TRAIN, data->rows->sets[DATA_TRAIN], threads, generator);
}
