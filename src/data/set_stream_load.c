/* Implements the functions of set_stream_parts.h that fill a batch: a thread reads the members of a sample,
 * decodes its image into the batch, and mixes it. */
#include "data/set_stream_parts.h"

#include <string.h>
#include <strings.h>

#include "core/timer.h"
#include "data/checksum.h"

/* ---- The members of a sample ---- */

/* Returns the time if the sample is timed. Reading the clock takes long compared with copying a few bytes. */
static double clock_of(const struct worker *worker)
{
    return worker->timed ? timer_now_s() : 0;
}

/* Reads the part of a sample that is `member`, and sets `*found` to its bytes: in memory if they are there or
 * shall stay there, otherwise in `bytes`. */
static enum status read_member(struct worker *worker, uint32_t number, enum resident_part part,
                               const struct dataset_member *member, uint8_t *bytes, const uint8_t **found)
{
    struct set_stream *self = worker->self;
    const uint32_t at = number % self->request.count;
    *found = resident_find(&self->resident, at, part);
    if (*found)
        return set_files_recheck(self->files, member);
    uint8_t *place = resident_begin(&self->resident, at, part);
    const enum status status = set_files_read(self->files, member, member->size, place ? place : bytes);
    if (place)
        resident_end(&self->resident, at, part, status == STATUS_OK);
    worker->bytes += status == STATUS_OK ? member->size : 0;
    *found = place ? place : bytes;
    return status;
}

/* Returns whether the bytes of a member have the hash of the index, or there is no index. */
static bool as_indexed(const struct dataset *dataset, const struct dataset_member *member,
                       const uint8_t *bytes)
{
    return !dataset->indexed || checksum_whole(bytes, member->size) == member->whole;
}

/* Reads the image of sample `number` of the plan, and sets `*found` to its bytes. With `copies`, they are in
 * `bytes`; otherwise they may be elsewhere. If the data set has an index, compares the hash of the bytes. */
static enum status read_image(struct worker *worker, const struct dataset_sample *sample, uint32_t number,
                              const struct dataset_member *member, bool copies, uint8_t *bytes,
                              const uint8_t **found)
{
    const struct dataset *dataset = worker->self->request.dataset;
    const enum status status = read_member(worker, number, RESIDENT_IMAGE, member, bytes, found);
    if (status != STATUS_OK)
        return status_prefix(status, "sample '%s'", sample->key);
    if (copies && *found != bytes)
        memcpy(bytes, *found, member->size);
    worker->image_edges = checksum_edges(*found, member->size);
    worker->broken = !as_indexed(dataset, member, *found);
    return worker->broken
               ? dataset_at(dataset, sample, member,
                            status_set(STATUS_FAILED, "the data do not match the hash in the index"))
               : STATUS_OK;
}

/* Returns the number of labels that a stream accepts. */
static uint32_t class_limit(const struct set_stream_request *request)
{
    return request->classes ? request->classes : INT32_MAX;
}

static enum status read_label(struct worker *worker, const struct dataset_sample *sample, uint32_t number,
                              int32_t *label)
{
    const struct dataset *dataset = worker->self->request.dataset;
    const bool folder = sample->label == sample->members;
    const struct dataset_member *member = &dataset->members[sample->member + (folder ? 0 : sample->label)];
    const uint8_t *found = worker->label;
    if (!folder) {
        worker->broken = member->size > worker->self->label_bytes;
        if (worker->broken)
            return dataset_at(dataset, sample, member,
                              status_set(STATUS_FAILED, "its %s has %llu bytes, too many for a label",
                                         member->extension, (unsigned long long)member->size));
        enum status status = read_member(worker, number, RESIDENT_LABEL, member, worker->label, &found);
        if (status != STATUS_OK)
            return status_prefix(status, "sample '%s'", sample->key);
        worker->label_edges = checksum_edges(found, member->size);
        worker->broken = !as_indexed(dataset, member, found);
        if (worker->broken)
            return dataset_at(dataset, sample, member,
                              status_set(STATUS_FAILED, "the data do not match the hash in the index"));
    }
    const enum status status = dataset_label(dataset, sample, found, folder ? 0 : member->size,
                                             class_limit(&worker->self->request), label);
    worker->broken = status == STATUS_FAILED;
    return status == STATUS_OK ? STATUS_OK : dataset_at(dataset, sample, member, status);
}

enum status set_load_check_shape(const struct set_stream_request *request, const struct image *image)
{
    if (image->channels == request->channels && image->depth == request->depth &&
        image->height == request->height && image->width == request->width && image->type == request->type)
        return STATUS_OK;
    return status_set(
        STATUS_USAGE,
        "it is %s of %ux%ux%ux%u (channels, depth, height, width), but samples are %s of "
        "%ux%ux%ux%u; to give all images one size, %s",
        dtype_names[image->type], image->channels, image->depth, image->height, image->width,
        dtype_names[request->type], request->channels, request->depth, request->height, request->width,
        OPTION_OR_FIELD("add --out-res PIXELS --channels 3 (or 1)", "set out_res and channels"));
}

/* Copies a multi-hot label to `to`. */
static enum status take_multi_hot(const struct dataset *dataset, const uint8_t *bytes, uint64_t size,
                                  uint8_t *to)
{
    uint32_t classes = dataset->multi_hot_classes;
    const uint8_t *label;
    TRY(members_multi_hot(bytes, size, &classes, &label));
    memcpy(to, label, classes);
    return STATUS_OK;
}

/* Reads the mask of sample `number` of the plan, whose image was loaded, and cuts it out to `to`. A multi-hot
 * label is copied. */
static enum status read_mask(struct worker *worker, const struct dataset_sample *sample, uint32_t epoch,
                             uint32_t number, uint8_t *to)
{
    const struct set_stream *self = worker->self;
    const struct set_stream_request *request = &self->request;
    const struct dataset *dataset = request->dataset;
    const bool lacks = sample->label == sample->members;
    const struct dataset_member *member = &dataset->members[sample->member + (lacks ? 0 : sample->label)];
    const uint8_t *found = NULL;
    enum status status = STATUS_OK;
    if (!lacks)
        status = read_member(worker, number, RESIDENT_LABEL, member, worker->label, &found);
    if (status != STATUS_OK)
        return status_prefix(status, "sample '%s'", sample->key);
    const double begin_s = clock_of(worker);
    if (lacks) {
        status = dataset_lacks(dataset, sample, &dataset->choice.label, "label");
    } else if (!as_indexed(dataset, member, found)) {
        status = status_set(STATUS_FAILED, "its %s does not match the hash in the index",
                            dataset->multi_hot ? "label" : "mask");
    } else {
        const struct image_view of = {worker->width, worker->height, epoch, number,
                                      request->mask_flip && draw_flip(request->mask_seed, epoch, number)};
        worker->label_edges = checksum_edges(found, member->size);
        status = dataset->multi_hot
                     ? take_multi_hot(dataset, found, member->size, to)
                     : image_fit_mask(&request->fit, &of, found, member->size, &worker->scratch, to);
    }
    worker->decode_s += worker->timed * (clock_of(worker) - begin_s);
    worker->broken = status == STATUS_FAILED;
    return status == STATUS_OK ? STATUS_OK : dataset_at(dataset, sample, member, status);
}

/* Decodes the bytes of a member to `to`. */
static enum status decode(struct worker *worker, const struct dataset_member *member, const uint8_t *bytes,
                          uint32_t epoch, uint32_t number, uint8_t *to)
{
    const struct set_stream_request *request = &worker->self->request;
    struct image image;
    bool is_image;
    TRY(image_fit(&request->fit, members_format(member->extension), bytes, member->size, epoch, number,
                  &worker->scratch, &image, &is_image));
    if (!is_image)
        return status_set(STATUS_FAILED,
                          "its %s is neither an image nor an array of an image; name another member with %s",
                          member->extension, OPTION_OR_FIELD("--image", "image"));
    TRY(set_load_check_shape(request, &image));
    TRY(image_check_finite(&image));
    worker->width = worker->scratch.width;
    worker->height = worker->scratch.height;
    if (request->output)
        image_output_store(request->output, &image, epoch, number, worker->changed, to);
    else
        image_store(&image, to);
    return STATUS_OK;
}

/* Describes the file of sample `i` of a batch for the consumer, or, if it must not decode this file, takes
 * the file away from the batch. */
static enum status hand_on(struct worker *worker, const struct dataset_member *member, struct slot *slot,
                           uint32_t i)
{
    const struct set_stream_request *request = &worker->self->request;
    const struct image_fit *fit = &request->fit;
    struct set_stream_file *file = &slot->files[i];
    *file =
        (struct set_stream_file){.index = i, .bytes = slot->bytes + slot->file_at[i], .size = member->size};
    if (image_for_device(members_format(member->extension), file->bytes, file->size, fit->res,
                         &worker->scratch, &file->shape) &&
        (fit->channels || file->shape.channels == request->channels)) {
        TRY(image_fit_part(fit, &file->shape, (uint32_t)slot->at.epoch, slot->numbers[i], &file->part,
                           &file->turn));
        worker->width = file->turn.transpose ? file->shape.height : file->shape.width;
        worker->height = file->turn.transpose ? file->shape.width : file->shape.height;
        return STATUS_OK;
    }
    slot->file_at[i] = NO_FILE;
    return STATUS_OK;
}

/* Describes sample `i` of a batch for a consumer that has its pixels, or gets them: NULL or memory of the
 * slot. */
static enum status describe_decoded(const struct set_stream *self, struct slot *slot, uint32_t i,
                                    const struct jpeg_shape *shape, const uint8_t *pixels)
{
    struct set_stream_file *file = &slot->files[i];
    *file = (struct set_stream_file){.index = i, .pixels = pixels, .shape = *shape};
    slot->file_at[i] = DECODED;
    return image_fit_part(&self->request.fit, shape, (uint32_t)slot->at.epoch, slot->numbers[i], &file->part,
                          &file->turn);
}

/* Decodes the whole image of sample `i` of a batch for a consumer that keeps it. Returns false, and leaves
 * the sample as it is, if decode() has to fit it. */
static bool decode_whole(struct worker *worker, const struct dataset_member *member, const uint8_t *bytes,
                         struct slot *slot, uint32_t i)
{
    struct set_stream *self = worker->self;
    const struct set_stream_request *request = &self->request;
    struct jpeg_shape shape;
    struct image image;
    if (!self->crops || !atomic_load_explicit(&self->wants, memory_order_relaxed) ||
        atomic_load(&slot->pixels_used) >= slot->pixels_room ||
        !image_fit_whole(&request->fit, members_format(member->extension), bytes, member->size,
                         &worker->scratch, &shape, &image) ||
        !(request->fit.channels || shape.channels == request->channels))
        return false;
    const size_t size = stream_aligned((size_t)3 * shape.width * shape.height);
    const size_t at = atomic_fetch_add(&slot->pixels_used, size);
    if (at + size > slot->pixels_room)
        return false;
    image_store_rgb(&image, slot->pixels + at);
    if (describe_decoded(self, slot, i, &shape, slot->pixels + at) == STATUS_OK)
        return true;
    slot->file_at[i] = NO_FILE;
    return false;
}

/* Keeps the header of an array that was stored in the batch: further arrays with this header have the same
 * shape and type. Files of records have no headers. */
static void keep_header(struct worker *worker, const struct dataset_member *member, const uint8_t *bytes)
{
    const struct set_stream *self = worker->self;
    const size_t header_bytes = member->size - self->sample_bytes;
    if (!self->direct || worker->header_known)
        return;
    if (header_bytes == 0 || (header_bytes >= CHECKSUM_EDGE && self->sample_bytes >= CHECKSUM_EDGE &&
                              header_bytes <= sizeof worker->header)) {
        memcpy(worker->header, bytes, header_bytes);
        worker->header_bytes = header_bytes;
        worker->header_known = true;
    }
}

/* Reads the image of sample `i` of a batch, and decodes it unless the consumer does. */
static enum status load_image(struct worker *worker, const struct dataset_sample *sample, struct slot *slot,
                              uint32_t i)
{
    const struct set_stream *self = worker->self;
    const struct dataset *dataset = self->request.dataset;
    const struct dataset_member *member = &dataset->members[sample->member + sample->image];
    const bool keeps = slot->files && slot->file_at[i] != NO_FILE;
    const uint8_t *bytes;
    const double begin_s = clock_of(worker);
    TRY(read_image(worker, sample, slot->numbers[i], member, keeps,
                   keeps ? slot->bytes + slot->file_at[i] : worker->image, &bytes));
    const double read_s = clock_of(worker);
    worker->read_s += worker->timed * (read_s - begin_s);
    enum status status = keeps ? hand_on(worker, member, slot, i) : STATUS_OK;
    const bool handed_on = keeps && slot->file_at[i] != NO_FILE;
    if (status == STATUS_OK && !handed_on && !decode_whole(worker, member, bytes, slot, i))
        status = decode(worker, member, bytes, (uint32_t)slot->at.epoch, slot->numbers[i],
                        slot->values + i * self->sample_bytes);
    worker->decode_s += worker->timed * (clock_of(worker) - read_s);
    worker->broken = status == STATUS_FAILED;
    if (status == STATUS_OK)
        keep_header(worker, member, bytes);
    return status == STATUS_OK ? STATUS_OK : dataset_at(dataset, sample, member, status);
}

/* Sets the hash of sample `i` of a batch to that of the bytes that were read, instead of those that
 * dataset_check() found. Members that the stream does not read keep their hashes. */
static void hash_read(const struct worker *worker, const struct dataset_sample *sample, struct slot *slot,
                      uint32_t i)
{
    const struct set_stream_request *request = &worker->self->request;
    struct dataset_sample read = *sample;
    uint64_t edges[DATASET_MEMBERS_MAX];
    for (uint32_t m = 0; m < sample->members; m++)
        edges[m] = m == sample->image ? worker->image_edges
                   : m == sample->label && !request->labels
                       ? worker->label_edges
                       : request->dataset->members[sample->member + m].edges;
    read.edges = checksum_sample(sample->key_hash, edges, sample->members);
    slot->read[i] = set_stream_hash(&read, slot->numbers[i]);
    if (slot->edges)
        slot->edges[i] = read.edges;
}

void set_load_prefetch(const struct set_stream *self, const struct slot *slot, uint32_t begin, uint32_t end)
{
    const struct dataset_member *members = self->request.dataset->members;
    for (uint32_t i = begin; i < end; i++)
        __builtin_prefetch(sample_of(&self->request, slot->numbers[i]));
    for (uint32_t i = begin; i < end; i++) {
        const struct dataset_sample *sample = sample_of(&self->request, slot->numbers[i]);
        if (sample->image < sample->members)
            __builtin_prefetch(&members[sample->member + sample->image]);
    }
    for (uint32_t i = begin; i < end; i++) {
        const struct dataset_sample *sample = sample_of(&self->request, slot->numbers[i]);
        if (sample->image < sample->members)
            set_files_prefetch(self->files, &members[sample->member + sample->image]);
    }
}

/* ---- Arrays that are read directly into the batch ----
 * The values of an array, its header and the label of the sample are read by one call. Whatever is not as
 * expected is left to load_members(), which reads the members again, one by one, and reports what is wrong.
 */

/* Returns whether batches have the values of arrays as they are stored. */
static bool stores_arrays(const struct set_stream_request *request)
{
    const struct image_output *output = request->output;
    if (request->fit.res || set_stream_masks(request))
        return false;
    return !output ||
           (output->type == request->type && !output->flip && !image_output_changes(output) &&
            (request->channels == 1 || (!output->interleaved && (!output->frames || request->depth == 1))));
}

bool set_load_reads_directly(const struct set_stream_request *request)
{
    const struct dataset *dataset = request->dataset;
    bool direct = stores_arrays(request) && dataset->shards && !dataset->remote && !dataset->raw.interleaved;
    for (uint32_t i = 0; direct && !dataset->raw.channels && i < dataset->sample_count; i++) {
        const struct dataset_sample *sample = &dataset->samples[i];
        const struct dataset_member *members = &dataset->members[sample->member];
        direct = sample->image == sample->members ||
                 strcasecmp(members_format(members[sample->image].extension), "npy") == 0;
    }
    return direct;
}

/* Reads an array to `values`, its header to worker->image, and if `label` is not NULL, that member to
 * worker->label. Returns false if they cannot be read at once. */
static bool read_directly(struct worker *worker, const struct dataset_member *image,
                          const struct dataset_member *label, uint8_t *values)
{
    const size_t header = worker->header_bytes;
    struct set_files_range ranges[SET_FILES_RANGES];
    int count = 0;
    const bool first = label && label->offset < image->offset;
    const struct dataset_member *begin = first ? label : image, *end = first ? image : label;
    const uint64_t gap = label ? end->offset - begin->offset - begin->size : 0;
    if (label && (label->file != image->file || label->size > worker->self->label_bytes || gap > GAP_MAX))
        return false;
    if (first) {
        ranges[count++] = (struct set_files_range){worker->label, label->size, true};
        ranges[count++] = (struct set_files_range){worker->gap, gap, false};
    }
    ranges[count++] = (struct set_files_range){worker->image, header, true};
    ranges[count++] = (struct set_files_range){values, image->size - header, true};
    if (label && !first) {
        ranges[count++] = (struct set_files_range){worker->gap, gap, false};
        ranges[count++] = (struct set_files_range){worker->label, label->size, true};
    }
    return set_files_read_ranges(worker->self->files, image->file, begin->offset, ranges, count);
}

/* Copies from memory what read_directly() reads. Returns false if it is not all in memory. */
static bool copy_resident(struct worker *worker, uint32_t at, const struct dataset_member *image,
                          const struct dataset_member *label, uint8_t *values)
{
    const struct resident *resident = &worker->self->resident;
    const size_t header = worker->header_bytes;
    const uint8_t *bytes = resident_find(resident, at, RESIDENT_IMAGE), *text = NULL;
    if (label && label->size <= worker->self->label_bytes)
        text = resident_find(resident, at, RESIDENT_LABEL);
    if (!bytes || (label && !text))
        return false;
    memcpy(worker->image, bytes, header);
    memcpy(values, bytes + header, image->size - header);
    if (label)
        memcpy(worker->label, text, label->size);
    return true;
}

/* Keeps what read_directly() has read, if it shall stay in memory. */
static void keep_resident(const struct worker *worker, uint32_t at, const struct dataset_member *image,
                          const struct dataset_member *label, const uint8_t *values)
{
    const struct resident *resident = &worker->self->resident;
    const size_t header = worker->header_bytes;
    uint8_t *bytes = resident_begin(resident, at, RESIDENT_IMAGE);
    uint8_t *text = label ? resident_begin(resident, at, RESIDENT_LABEL) : NULL;
    if (bytes) {
        memcpy(bytes, worker->image, header);
        memcpy(bytes + header, values, image->size - header);
        resident_end(resident, at, RESIDENT_IMAGE, true);
    }
    if (text) {
        memcpy(text, worker->label, label->size);
        resident_end(resident, at, RESIDENT_LABEL, true);
    }
}

/* Returns whether the values that were read are those of the index and of the header, and finite. Sets
 * worker->image_edges. */
static bool check_directly(struct worker *worker, const struct dataset_member *member, const uint8_t *values)
{
    const struct set_stream *self = worker->self;
    const struct set_stream_request *request = &self->request;
    const size_t header = worker->header_bytes;
    const struct image image = {.channels = request->channels,
                                .depth = request->depth,
                                .height = request->height,
                                .width = request->width,
                                .type = request->type,
                                .pixels = values};
    uint8_t edges[2 * CHECKSUM_EDGE];
    if (memcmp(worker->image, worker->header, header) != 0)
        return false;
    if (request->dataset->indexed &&
        checksum_split(worker->image, header, values, self->sample_bytes) != member->whole)
        return false;
    if (header == 0) {
        worker->image_edges = checksum_edges(values, self->sample_bytes);
    } else {
        memcpy(edges, worker->image, CHECKSUM_EDGE);
        memcpy(edges + CHECKSUM_EDGE, values + self->sample_bytes - CHECKSUM_EDGE, CHECKSUM_EDGE);
        worker->image_edges = checksum_edges_only(edges, member->size);
    }
    return image_check_finite(&image) == STATUS_OK;
}

/* Fills the place of sample `i` of a batch as load_members() does, but leaves the comparison of its shard to
 * compare_shards(). Returns false, and leaves the values undefined, if load_members() has to do it. */
static bool load_directly(struct worker *worker, struct slot *slot, uint32_t i)
{
    const struct set_stream *self = worker->self;
    const struct set_stream_request *request = &self->request;
    const struct dataset *dataset = request->dataset;
    const uint32_t number = slot->numbers[i];
    slot->direct[i] = NO_SHARD;
    if (!worker->header_known || check_number(request, number) != STATUS_OK)
        return false;
    const uint32_t at = number % request->count;
    const struct dataset_sample *sample = sample_of(request, number);
    const struct dataset_member *members = &dataset->members[sample->member], *label = NULL;
    if (sample->image >= sample->members ||
        (request->labels && request->labels[at] == (uint32_t)STREAM_MASKED))
        return false;
    if (!request->labels && sample->label < sample->members)
        label = &members[sample->label];
    const struct dataset_member *image = &members[sample->image];
    uint8_t *values = slot->values + i * self->sample_bytes;
    if (image->size != worker->header_bytes + self->sample_bytes)
        return false;
    const double begin_s = clock_of(worker);
    const bool there = copy_resident(worker, at, image, label, values);
    if (!there && !read_directly(worker, image, label, values))
        return false;
    const double read_s = clock_of(worker);
    if (!check_directly(worker, image, values))
        return false;
    if (label)
        worker->label_edges = checksum_edges(worker->label, label->size);
    if (request->labels)
        slot->labels[i] = (int32_t)request->labels[at];
    else if (dataset_label(dataset, sample, worker->label, label ? label->size : 0, class_limit(request),
                           &slot->labels[i]) != STATUS_OK)
        return false;
    hash_read(worker, sample, slot, i);
    slot->direct[i] = image->file;
    if (!there)
        keep_resident(worker, at, image, label, values);
    worker->bytes += there ? 0 : image->size + (label ? label->size : 0);
    worker->read_s += worker->timed * (read_s - begin_s);
    worker->decode_s += worker->timed * (clock_of(worker) - read_s);
    return true;
}

/* Fills the place of sample `i` of a batch, one member after the other. */
static enum status load_members(struct worker *worker, struct slot *slot, uint32_t i)
{
    const struct set_stream_request *request = &worker->self->request;
    const uint32_t number = slot->numbers[i];
    worker->broken = false;
    TRY(check_number(request, number));
    const uint32_t at = number % request->count;
    const struct dataset_sample *sample = sample_of(request, number);
    slot->read[i] = set_stream_hash(sample, number);
    if (request->labels && request->labels[at] == (uint32_t)STREAM_MASKED) {
        worker->broken = true;
        return dataset_at(request->dataset, sample, &request->dataset->members[sample->member],
                          status_set(STATUS_FAILED, "its label cannot be read"));
    }
    const enum status links = dataset_check_links(request->dataset, sample);
    worker->broken = links != STATUS_OK;
    TRY(links);
    if (sample->image == sample->members) {
        worker->broken = true;
        return dataset_at(request->dataset, sample, &request->dataset->members[sample->member],
                          dataset_lacks(request->dataset, sample, &request->dataset->choice.image, "image"));
    }
    TRY(load_image(worker, sample, slot, i));
    slot->labels[i] = request->labels ? (int32_t)request->labels[at] : 0;
    if (slot->masks)
        TRY(read_mask(worker, sample, (uint32_t)slot->at.epoch, number,
                      slot->masks + i * worker->self->mask_bytes));
    else if (!request->labels)
        TRY(read_label(worker, sample, number, &slot->labels[i]));
    hash_read(worker, sample, slot, i);
    return STATUS_OK;
}

/* Describes sample `i` of a batch, which the consumer keeps. */
static enum status load_kept(struct worker *worker, const struct kept *kept, struct slot *slot, uint32_t i)
{
    struct set_stream *self = worker->self;
    struct dataset_sample sample = *sample_of(&self->request, slot->numbers[i]);
    const struct dataset_member *image = &self->request.dataset->members[sample.member + sample.image];
    worker->broken = false;
    if (slot->files)
        slot->file_at[i] = NO_FILE;
    slot->direct[i] = NO_SHARD;
    slot->places[i] = kept->place;
    slot->labels[i] = kept->label;
    sample.edges = kept->edges;
    slot->read[i] = set_stream_hash(&sample, slot->numbers[i]);
    const enum status status = set_files_recheck(self->files, image);
    if (status != STATUS_OK)
        return status_prefix(status, "sample '%s'", sample.key);
    return self->crops ? describe_decoded(self, slot, i, &kept->shape, NULL) : STATUS_OK;
}

enum status set_load_sample(struct worker *worker, struct slot *slot, uint32_t i)
{
    const struct kept *kept = kept_of(worker->self, slot->numbers[i]);
    if (kept)
        return load_kept(worker, kept, slot, i);
    if (slot->places)
        slot->places[i] = SET_STREAM_LOADED;
    return worker->self->direct && load_directly(worker, slot, i) ? STATUS_OK : load_members(worker, slot, i);
}

/* ---- Mixing ---- */

void set_mix_begin(const struct set_stream *self, struct slot *slot)
{
    const struct set_stream_request *request = &self->request;
    if (!self->mixes)
        return;
    slot->mix = mix_draw(&request->mixing, request->mix_seed, (uint32_t)slot->at.epoch,
                         (uint32_t)slot->at.step, &self->shape);
    for (uint32_t i = 0; i < slot->own; i++)
        atomic_store(&slot->complete[i], 0);
}

/* To be called when sample `i` of a batch is loaded. Mixes it with its partner if that is loaded, too: so the
 * thread that loads the second one mixes both. */
void set_mix_sample(const struct set_stream *self, struct slot *slot, uint32_t i)
{
    const bool apart = slot->count > slot->own;
    const uint32_t own = slot->own, mirrored = apart ? i % own : own - 1 - i;
    const uint32_t first = apart || i > mirrored ? mirrored : i;
    const uint32_t second = mix_partner(own, slot->count, first);
    if (first != second && atomic_fetch_add(&slot->complete[first], 1) == 0)
        return;
    mix_images(&slot->mix, &self->shape, type_of(&self->request),
               self->request.output && self->request.output->interleaved, !apart,
               slot->values + first * self->sample_bytes, slot->values + second * self->sample_bytes);
}

void set_mix_partners(const struct slot *slot)
{
    for (uint32_t i = 0; i < slot->own; i++)
        slot->partners[i] = slot->labels[mix_partner(slot->own, slot->count, i)];
}
