/* The source `dataset`: reads the samples of an existing directory, written by --prepare or another tool.
 * --prepare uses this source to convert a data set to another layout; training uses it to read a data set. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/file.h"
#include "core/parallel.h"
#include "core/philox.h"
#include "data/dataset.h"
#include "data/image.h"
#include "data/label_names.h"
#include "data/members.h"
#include "data/npy.h"
#include "data/plain_reader.h"
#include "data/remote.h"
#include "data/source.h"

/* How the images of a copy are resized; see the options. */
struct resizing {
    struct image_fit fit; /* fit.res is 0: images are not resized */
    int encoding;         /* enum source_encoding; negative: the format of each image */
    int quality;          /* of JPEG files */
    int threads;
    struct image_scratch *scratch; /* owned; of each thread */
};

/* An open data set, and its reader, which keeps the latest shard open between requests. A shard at a URL
 * would otherwise be transferred again for each request. */
struct copy {
    struct dataset dataset;
    struct plain plain;
    struct copy *self;        /* this struct: label() gets a const state, but must move the reader */
    uint32_t next;            /* the first shard that has not been requested */
    uint64_t asked;           /* the latest sample that was requested */
    struct permutation order; /* of the samples, if `permuted` */
    bool permuted;
    struct resizing resizing;
    char *extensions[INDEX_EXTENSIONS_MAX]; /* owned; new ones of images in another format */
    size_t extension_count;
    bool for_target;             /* the samples are copied to another data set */
    bool masked;                 /* each sample of a copy must have a mask */
    struct image_scratch header; /* for the headers of images with masks */
    bool advises;                /* messages about broken samples name --on-error skip */
};

static int by_number(const void *number, const void *sample)
{
    const uint64_t left = *(const uint64_t *)number, right = ((const struct dataset_sample *)sample)->number;
    return (left > right) - (left < right);
}

/* Returns sample `number` of the source, or NULL if it was skipped. */
static const struct dataset_sample *sample_at(const struct copy *copy, uint64_t number)
{
    const struct dataset *dataset = &copy->dataset;
    if (dataset->sample_count < dataset->listed)
        return bsearch(&number, dataset->samples, dataset->sample_count, sizeof *dataset->samples, by_number);
    return &dataset->samples[copy->permuted ? permutation_at(&copy->order, number) : number];
}

const struct dataset *source_dataset_set(const struct source_reader *reader)
{
    return &((const struct copy *)reader->state)->dataset;
}

const struct dataset_sample *source_dataset_sample(const struct source_reader *reader, uint64_t number)
{
    return sample_at(reader->state, number);
}

static bool dataset_source_lost(const void *state, uint64_t number)
{
    return !sample_at(state, number);
}

static void dataset_source_close(void *state)
{
    struct copy *copy = state;
    plain_close(&copy->plain);
    dataset_close(&copy->dataset);
    for (int i = 0; copy->resizing.scratch && i < copy->resizing.threads; i++)
        image_scratch_close(&copy->resizing.scratch[i]);
    free(copy->resizing.scratch);
    image_scratch_close(&copy->header);
    for (size_t i = 0; i < copy->extension_count; i++)
        free(copy->extensions[i]);
    free(copy);
}

/* ---- Samples ---- */

/* Reads a member from its file and adds it to `sample`. */
static enum status add_member(struct plain *plain, const struct dataset_sample *from,
                              const struct dataset_member *member, struct source_sample *sample)
{
    void *bytes = malloc(member->size + 1);
    TRY(ALLOCATED(bytes, "%s/%s: out of memory for %llu bytes", plain->dataset->path,
                  plain->dataset->files[member->file].name, (unsigned long long)member->size));
    source_add(sample, member->extension, bytes, member->size);
    return plain_member(plain, from, member, bytes);
}

/* Gives the image of a column the name that readers of a copy look for, and an array a header. */
static enum status name_image(const struct dataset *dataset, struct source_member *member)
{
    struct image image = dataset->raw;
    struct source_sample array = {.count = 0};
    char shape[NPY_SHAPE_MAX], channels[24] = "", depth[24] = "";
    void *room;
    if (image.channels == 0) {
        member->extension = members_format(member->extension);
        return STATUS_OK;
    }
    image.pixels = member->bytes;
    if (image.channels > 1 || image.depth > 1)
        snprintf(channels, sizeof channels, "%u, ", image.channels);
    if (image.depth > 1)
        snprintf(depth, sizeof depth, "%u, ", image.depth);
    snprintf(shape, sizeof shape, "%s%s%u, %u", channels, depth, image.height, image.width);
    TRY(source_add_array(&array, dtype_npy(image.type), shape, NULL, member->size, &room));
    image_store(&image, room);
    free(member->bytes);
    *member = array.members[0];
    return STATUS_OK;
}

/* Returns whether readers of a copy would find the label that was chosen, with the default of --label. */
static bool reads_chosen(const struct source_sample *made, const struct member_rule *chosen)
{
    const char *extensions[SOURCE_MEMBERS_MAX];
    const struct member_rule *found;
    struct members defaults;
    for (size_t m = 0; m < made->count; m++)
        extensions[m] = made->members[m].extension;
    return members_parse(NULL, NULL, NULL, &defaults) == STATUS_OK &&
           members_find(&defaults.label, extensions, (uint32_t)made->count, false, &found) < made->count &&
           strcasecmp(found->extension, chosen->extension) == 0 && strcmp(found->field, chosen->field) == 0;
}

/* Adds the label as the member "cls" if it is the number of the sample's class folder, or in a column, whose
 * integers are no text. In a copy, also adds a label that --label chose if readers would otherwise find
 * another label, or none. */
static enum status add_label(const struct copy *copy, const struct dataset_sample *sample,
                             struct source_sample *made)
{
    int32_t label;
    made->in_folder =
        sample->rule && (sample->rule->folder || (sample->rule->mask && sample->class_folder != LABEL_NONE));
    if (made->in_folder)
        return source_add_label(made, (uint64_t)sample->class_folder);
    const bool column = copy->dataset.columns && sample->rule;
    made->in_folder = column;
    if (!column && (!copy->for_target || !copy->dataset.choice.label.given || copy->dataset.multi_hot ||
                    reads_chosen(made, sample->rule)))
        return STATUS_OK;
    const struct source_member *member = &made->members[sample->label];
    enum status status = members_label(sample->rule, member->bytes, member->size, &label);
    if (status == STATUS_OK)
        status = label_check(label, INT32_MAX);
    return status == STATUS_OK ? source_add_label(made, (uint64_t)label)
                               : dataset_at(&copy->dataset, sample,
                                            &copy->dataset.members[sample->member + sample->label], status);
}

static void sort_members(struct source_sample *sample)
{
    for (size_t i = 1; i < sample->count; i++)
        for (size_t j = i; j > 0; j--) {
            struct source_member *one = &sample->members[j - 1], *two = &sample->members[j], kept = *one;
            if (strcmp(one->extension, two->extension) > 0) {
                *one = *two;
                *two = kept;
            }
        }
}

/* ---- Resizing ---- */

#define KEPT (SOURCE_JPEG + 1) /* beside enum source_encoding: the member keeps its name */

static const enum fit_how fits[] = {FIT_RESIZE, FIT_CROP, FIT_LONGEST, FIT_SHORTEST};
static const char *const fit_words[] = {"resize", "crop", "longest", "shortest", NULL};

/* Encodes an image. The caller frees `*bytes`. */
static enum status encode(const struct image *image, int encoding, int quality, void **bytes, size_t *size)
{
    const struct png_shape png = {image->width, image->height, image->channels};
    const size_t plane = (size_t)image->width * image->height;
    char shape[NPY_SHAPE_MAX];
    struct source_sample array = {.count = 0};
    void *room;
    if (encoding != SOURCE_NPY)
        return source_encode(encoding, quality, image->pixels, &png, bytes, size);
    if (image->channels == 1)
        snprintf(shape, sizeof shape, "%u, %u", image->height, image->width);
    else
        snprintf(shape, sizeof shape, "%u, %u, %u", image->channels, image->height, image->width);
    TRY(source_add_array(&array, "|u1", shape, NULL, plane * image->channels, &room));
    for (size_t i = 0; i < plane * image->channels; i++)
        ((uint8_t *)room)[i % image->channels * plane + i / image->channels] = image->pixels[i];
    *bytes = array.members[0].bytes;
    *size = array.members[0].size;
    return STATUS_OK;
}

/* Sets `*encoding` to the format of a member, or to KEPT if images are not written in this format.
 * STATUS_FAILED if the member is no image that can be resized. */
static enum status format_of(const struct source_member *member, int *encoding)
{
    struct image image;
    struct image_scratch none = {0};
    bool is_image;
    const char *extension = members_format(member->extension);
    switch (image_format(extension, member->bytes, member->size)) {
    case IMAGE_PNG:
        *encoding = SOURCE_PNG;
        return STATUS_OK;
    case IMAGE_JPEG:
        *encoding = SOURCE_JPEG;
        return STATUS_OK;
    case IMAGE_READ:
        *encoding = KEPT;
        return STATUS_OK;
    case IMAGE_NPY:
        *encoding = SOURCE_NPY;
        return STATUS_OK;
    case IMAGE_FOREIGN: /* the decoder says why it refuses such images */
        return image_decode(extension, member->bytes, member->size, &none, &image, &is_image);
    case IMAGE_NONE:
        break;
    }
    return status_set(STATUS_FAILED,
                      "--out-res: its %s is neither an image nor an array; name another member with --image",
                      member->extension);
}

/* Resizes the image of a sample and replaces the bytes of its member. An image that has the right size and
 * format remains unchanged, and so does a broken one. Sets `*encoding` to the format that gives the member
 * its extension, or to KEPT if the member keeps its name. */
static enum status resize_image(const struct resizing *resizing, const struct dataset_sample *from,
                                struct image_scratch *scratch, struct source_sample *sample, int *encoding)
{
    struct source_member *member = &sample->members[from->image];
    const char *extension = members_format(member->extension);
    struct image image;
    bool is_image = false, same = false;
    int stored = 0;
    void *bytes;
    size_t size;
    TRY(format_of(member, &stored));
    const bool any =
        resizing->encoding < 0; /* no format is chosen: images that cannot be written become PNG images */
    const int written = !any ? resizing->encoding : stored == KEPT ? SOURCE_PNG : stored;
    *encoding = written == stored && any ? KEPT : written;
    enum status status = any || written == stored
                             ? image_fit_other(&resizing->fit, extension, member->bytes, member->size,
                                               from->number, scratch, &image, &is_image, &same)
                             : image_fit(&resizing->fit, extension, member->bytes, member->size, 0,
                                         from->number, scratch, &image, &is_image);
    if (status == STATUS_FAILED &&
        image_decode(extension, member->bytes, member->size, scratch, &image, &is_image) == STATUS_FAILED) {
        *encoding = KEPT;
        sample->broken = true;
        return STATUS_OK;
    }
    TRY(status);
    if (!is_image)
        return status_set(STATUS_FAILED, "--out-res: its %s is an array, but no image; drop --out-res",
                          member->extension);
    if (same) {
        *encoding = any ? KEPT : written;
        return STATUS_OK;
    }
    TRY(encode(&image, written, resizing->quality, &bytes, &size));
    free(member->bytes);
    member->bytes = bytes;
    member->size = size;
    return STATUS_OK;
}

/* Gives the image of a sample the extension of the format `encoding`, unless that is KEPT. */
static enum status rename_image(struct copy *copy, const struct dataset_sample *from, int encoding,
                                struct source_sample *sample)
{
    struct source_member *member = &sample->members[from->image];
    const char *format = members_format(member->extension);
    char name[256];
    if (encoding == KEPT || strcasecmp(format, source_extensions[encoding]) == 0 ||
        (encoding == SOURCE_JPEG && strcasecmp(format, "jpeg") == 0))
        return STATUS_OK;
    snprintf(name, sizeof name, "%.*s%s", (int)(format - member->extension), member->extension,
             source_extensions[encoding]);
    for (size_t m = 0; m < sample->count; m++)
        if (strcasecmp(sample->members[m].extension, name) == 0)
            return status_set(STATUS_USAGE,
                              "--encode %s: it has a member '%s' already; choose its members with --image "
                              "and --label, or choose another --encode",
                              source_encodings[encoding], name);
    size_t i = 0;
    while (i < copy->extension_count && strcmp(copy->extensions[i], name) != 0)
        i++;
    if (i == INDEX_EXTENSIONS_MAX)
        return status_set(STATUS_FAILED, "more than %d extensions of images", INDEX_EXTENSIONS_MAX);
    if (i == copy->extension_count) {
        TRY(ALLOCATED(copy->extensions[i] = strdup(name), "out of memory"));
        copy->extension_count++;
    }
    member->extension = copy->extensions[i];
    return STATUS_OK;
}

/* The samples of one request, for try_to_resize(). */
struct resize_task {
    const struct copy *copy;
    uint64_t first;
    struct source_sample *samples;
    int *encodings; /* of each sample; negative: it failed */
};

static void try_to_resize(void *context, uint64_t i, int thread)
{
    const struct resize_task *task = context;
    const struct resizing *resizing = &task->copy->resizing;
    const struct dataset_sample *from = sample_at(task->copy, task->first + i);
    if (from->image == from->members || resize_image(resizing, from, &resizing->scratch[thread],
                                                     &task->samples[i], &task->encodings[i]) != STATUS_OK)
        task->encodings[i] = -1;
}

/* Resizes the images of samples on several threads. Error messages are per thread. The calling thread
 * therefore resizes a failed image again, to set its own message. */
static enum status resize_all(struct copy *copy, uint64_t first, uint64_t count,
                              struct source_sample *samples)
{
    const struct dataset *dataset = &copy->dataset;
    FREED int *encodings = calloc(count + 1, sizeof *encodings);
    TRY(ALLOCATED(encodings, "out of memory"));
    parallel_for(copy->resizing.threads, count, try_to_resize,
                 &(struct resize_task){copy, first, samples, encodings});
    for (uint64_t i = 0; i < count; i++) {
        const struct dataset_sample *from = sample_at(copy, first + i);
        const bool has = from->image < from->members;
        enum status status = STATUS_OK;
        if (!has)
            status = dataset_lacks(dataset, from, &dataset->choice.image, "image");
        else if (encodings[i] < 0)
            status = resize_image(&copy->resizing, from, copy->resizing.scratch, &samples[i], &encodings[i]);
        if (status == STATUS_OK)
            status = rename_image(copy, from, encodings[i], &samples[i]);
        TRY(dataset_at(dataset, from, &dataset->members[from->member + (has ? from->image : 0)], status));
    }
    return STATUS_OK;
}

static bool dataset_source_ask(void *state, uint64_t number)
{
    struct copy *copy = state;
    const struct dataset *dataset = &copy->dataset;
    const struct dataset_sample *sample = sample_at(copy, number);
    if (!dataset->remote)
        return false;
    if (!sample)
        return true;
    uint32_t file = dataset->members[sample->member].file;
    if (number < copy->asked) /* another pass begins */
        copy->next = 0;
    copy->asked = number;
    if (copy->next == 0 && copy->plain.fd >= 0 && file < copy->plain.file) {
        plain_close(&copy->plain);
        copy->plain = (struct plain){.dataset = dataset, .fd = -1};
    }
    return dataset_ask_ahead(dataset, copy->plain.fd < 0 ? 0 : copy->plain.file + 1, file, &copy->next);
}

/* Refuses a sample without a mask, or whose mask is none or has another size than its image, in a set in
 * which others have one: a network that trains on the copy would find out later. */
static enum status check_mask(struct copy *copy, const struct dataset_sample *sample,
                              const struct source_sample *made)
{
    const struct dataset *dataset = &copy->dataset;
    const bool has = sample->rule && sample->rule->mask;
    const struct source_member none = {.extension = ""};
    const struct source_member *image =
                                   sample->image < sample->members ? &made->members[sample->image] : &none,
                               *mask = has ? &made->members[sample->label] : &none;
    const enum status status = has ? image_check_masked(members_format(image->extension), image->bytes,
                                                        image->size, mask->bytes, mask->size, &copy->header)
                                   : dataset_lacks(dataset, sample, &dataset->choice.label, "label");
    if (status == STATUS_FAILED)
        status_append(status, "; repair or remove this sample in the source");
    return dataset_at(dataset, sample, &dataset->members[sample->member + (has ? sample->label : 0)], status);
}

static enum status dataset_source_make(void *state, uint64_t first, uint64_t count,
                                       struct source_sample *samples)
{
    struct copy *copy = state;
    const struct dataset *dataset = &copy->dataset;
    enum status status = STATUS_OK;
    for (uint64_t i = 0; status == STATUS_OK && i < count; i++) {
        const struct dataset_sample *sample = sample_at(copy, first + i);
        samples[i].key = sample->key;
        if (sample->image < sample->members)
            samples[i].image = dataset->members[sample->member + sample->image].extension;
        if (sample->members + (dataset->classes || dataset->labelled || dataset->columns) >
            SOURCE_MEMBERS_MAX)
            status = status_set(STATUS_FAILED, "%s: sample '%s' has %u members, more than %d; %s",
                                dataset->path, sample->key, sample->members, SOURCE_MEMBERS_MAX,
                                dataset_looks_split(dataset, sample)
                                    ? MEMBERS_SPLIT
                                    : "choose some with --image and --label, or --member");
        for (uint32_t m = 0; status == STATUS_OK && m < sample->members; m++) {
            status = add_member(&copy->plain, sample, &dataset->members[sample->member + m], &samples[i]);
            if (status != STATUS_OK) /* the message names the file */
                status_prefix(status, "sample '%s'", sample->key);
            if (status == STATUS_FAILED && copy->advises)
                dataset_advise_skip(status);
            if (status == STATUS_OK && dataset->columns && copy->for_target && m == sample->image)
                status = name_image(dataset, &samples[i].members[m]);
        }
        if (status == STATUS_OK && copy->masked)
            status = check_mask(copy, sample, &samples[i]);
        if (status == STATUS_OK && dataset->choice.only.count == 0)
            status = add_label(copy, sample, &samples[i]);
    }
    if (status == STATUS_OK && copy->resizing.fit.res)
        status = resize_all(copy, first, count, samples);
    for (uint64_t i = 0; i < count; i++)
        sort_members(&samples[i]);
    return status;
}

/* The location of a sample is that of its image. */
static enum status dataset_source_locate(const void *state, uint64_t number, enum status status)
{
    const struct dataset *dataset = &((const struct copy *)state)->dataset;
    const struct dataset_sample *sample = sample_at(state, number);
    const uint32_t image = sample->image < sample->members ? sample->image : 0;
    return dataset_at(dataset, sample, &dataset->members[sample->member + image], status);
}

/* Returns UINT64_MAX and sets a message if the sample has no label that is a class. */
static uint64_t dataset_source_label(const void *state, uint64_t number)
{
    struct copy *copy = ((const struct copy *)state)->self;
    const struct dataset_sample *sample = sample_at(copy, number);
    int32_t label = 0;
    if (!sample)
        return UINT64_MAX;
    enum status status = plain_label(&copy->plain, sample, INT32_MAX, &label);
    if (status != STATUS_OK)
        dataset_source_locate(state, number, status);
    return status == STATUS_OK ? (uint64_t)label : UINT64_MAX;
}

/* Samples that open() left out have no label. */
static enum status dataset_source_multi_hot(const void *state, uint64_t number, uint32_t *row)
{
    struct copy *copy = ((const struct copy *)state)->self;
    const struct dataset_sample *sample = sample_at(copy, number);
    uint32_t classes = copy->dataset.multi_hot_classes;
    return sample ? plain_multi_hot(&copy->plain, sample, &classes, row)
                  : status_set(STATUS_FAILED, "sample %llu was left out", (unsigned long long)number);
}

static void dataset_source_describe(const void *state, uint64_t number, char texts[][SOURCE_TEXT_MAX])
{
    snprintf(texts[0], SOURCE_TEXT_MAX, "%s", sample_at(state, number)->key);
}

/* ---- Opening ---- */

/* Hashes the keys of all samples, the edges (first and last bytes) of their members, and the names of the
 * classes. */
static uint64_t identify(const struct dataset *dataset)
{
    uint64_t identity = 0;
#ifdef HAVE_XXHASH
    for (uint32_t i = 0; i < dataset->sample_count; i++)
        identity =
            XXH3_64bits_withSeed(&dataset->samples[i].edges, sizeof dataset->samples[i].edges, identity);
    for (uint32_t i = 0; dataset->labelled && i < dataset->sample_count; i++)
        identity = XXH3_64bits_withSeed(&dataset->samples[i].class_folder,
                                        sizeof dataset->samples[i].class_folder, identity);
    uint32_t count;
    const char *const *names = dataset_class_names(dataset, &count);
    for (uint32_t c = 0; c < count; c++)
        identity = XXH3_64bits_withSeed(names[c], strlen(names[c]) + 1, identity);
#else
    (void)dataset;
#endif
    return identity;
}

/* Checks, before anything is written, that the copy's index can store every extension. */
static enum status check_extensions(const struct dataset *dataset)
{
    struct index_extensions extensions = {.count = 0};
    for (uint32_t i = 0; i < dataset->sample_count; i++)
        for (uint32_t m = 0; m < dataset->samples[i].members; m++) {
            const struct dataset_member *member = &dataset->members[dataset->samples[i].member + m];
            const bool named = dataset->columns && m == dataset->samples[i].image; /* see name_image() */
            enum status status = index_extensions_add(&extensions, named ? members_format(member->extension)
                                                                         : member->extension);
            TRY(status_prefix(status, "%s/%s", dataset->path, dataset->files[member->file].name));
        }
    return STATUS_OK;
}

static enum status open_source(const struct source_request *request, const struct members *members,
                               struct copy *copy)
{
    const struct dataset_values *parameters = request->parameters;
    const struct copy *like = request->like;
    const struct remote_options remote = {.option = parameters->option ? parameters->option
                                                    : request->target  ? "source"
                                                                       : NULL,
                                          .cache_dir = parameters->cache_dir,
                                          .cache_bytes = parameters->cache_bytes};
    /* infer lists a training set whose samples are not read: its shards are not read completely, either */
    const bool compare = !request->only_held || !like;
    enum status status =
        parameters->records
            ? dataset_find_records(parameters->source, parameters->records, parameters->test_set, members,
                                   &copy->dataset)
            : dataset_find(parameters->source, request->skip, compare, members, &remote, &copy->dataset);
    copy->advises = !request->target && !request->skip && !request->streamed;
    if (status == STATUS_OK && like)
        status = dataset_same_classes(&copy->dataset, &like->self->dataset);
    copy->dataset.test_share = request->test_share;
    copy->dataset.only_held = request->only_held;
    copy->dataset.allow_empty = request->allow_empty;
    copy->dataset.incomplete = request->incomplete;
    copy->dataset.streamed = request->streamed;
    copy->dataset.needs_labels = !request->target || copy->dataset.choice.label.given;
    if (status == STATUS_OK)
        status = dataset_check(parameters->source, &copy->dataset);
    if (status == STATUS_OK && like)
        status = label_names_follow(&like->self->dataset, &copy->dataset);
    if (status == STATUS_OK && request->target && request->allow_empty && copy->dataset.empty_classes)
        status_warn("%s/%s: the class folder has no image (%u such folder%s); the copy has no sample of this "
                    "class, but keeps its number",
                    copy->dataset.path, copy->dataset.empty_class, copy->dataset.empty_classes,
                    copy->dataset.empty_classes == 1 ? "" : "s");
    if (status != STATUS_OK && copy->advises && copy->dataset.faults)
        dataset_advise_skip(status);
    return status;
}

/* Called for shards at a URL. */
static enum status check_permute(const struct dataset_values *parameters)
{
    return parameters->permute
               ? status_set(STATUS_USAGE, "--permute would transfer a shard for each sample of a URL; copy "
                                          "the data set without --permute, then permute the copy")
               : STATUS_OK;
}

/* Reads the options that resize images. Sets the size of a stored sample. */
static enum status open_resizing(const struct source_request *request, struct resizing *resizing,
                                 struct source_facts *facts)
{
    const struct dataset_values *parameters = request->parameters;
    const char *option = parameters->fit >= 0        ? "fit"
                         : parameters->channels      ? "channels"
                         : parameters->quality       ? "quality"
                         : parameters->encoding >= 0 ? "encode"
                                                     : NULL;
    if (!parameters->out_res)
        return option ? status_set(STATUS_USAGE, "--%s needs --out-res PIXELS; add that, or drop --%s",
                                   option, option)
                      : STATUS_OK;
    if (parameters->channels == 2)
        return status_set(STATUS_USAGE, "--channels: '2' is neither 1 nor 3");
    if (parameters->quality && (parameters->encoding == SOURCE_PNG || parameters->encoding == SOURCE_NPY))
        return status_set(STATUS_USAGE, "--quality is for JPEG files; drop --quality, or --encode %s",
                          source_encodings[parameters->encoding]);
    *resizing =
        (struct resizing){.fit = {.how = parameters->fit < 0 ? FIT_RESIZE : fits[parameters->fit],
                                  .res = (uint32_t)parameters->out_res,
                                  .channels = (uint32_t)parameters->channels,
                                  .unscaled = true},
                          .encoding = parameters->encoding,
                          .quality = parameters->quality ? (int)parameters->quality : SOURCE_JPEG_QUALITY,
                          .threads = request->resources.threads < 1 ? 1 : request->resources.threads};
    resizing->scratch = calloc((size_t)resizing->threads, sizeof *resizing->scratch);
    TRY(ALLOCATED(resizing->scratch, "out of memory"));
    const uint64_t values = 3 * parameters->out_res * parameters->out_res;
    facts->stored_bytes = parameters->encoding == SOURCE_NPY ? values
                          : values / 4 < facts->sample_bytes ? values / 4 + 1
                                                             : facts->sample_bytes;
    return STATUS_OK;
}

/* Rejects masks if images are resized: a mask would keep its size, and no longer fit its image. Rejects them
 * also if there is no target: training needs labels. */
static enum status check_masks(const struct source_request *request, const struct dataset *dataset)
{
    const struct dataset_values *parameters = request->parameters;
    if (!dataset->masks)
        return STATUS_OK;
    if (!request->target)
        return status_set(STATUS_USAGE,
                          "--%s %s: its samples have masks ('" MASK_MEMBER "') instead of labels, which "
                          "training needs; choose labels with --label, or train on the masks in Python",
                          dataset->option, parameters->source);
    return parameters->out_res
               ? status_option(STATUS_USAGE, "out-res",
                               " resizes images, but not their masks ('" MASK_MEMBER
                               "'); drop --out-res, or choose other members with --label or --member")
               : STATUS_OK;
}

/* Refuses the options of the cache of a copy if they have no effect. */
static enum status check_cache(const struct dataset_values *parameters, const struct dataset *dataset)
{
    if (parameters->cache_bytes && !parameters->cache_dir)
        return status_option(STATUS_USAGE, "cache-bytes", " needs --cache-dir DIR; add that, or drop it");
    return parameters->cache_dir && !dataset_uses_cache(dataset)
               ? status_option(STATUS_USAGE, "cache-dir",
                               " is for data at a URL and for shards that are compressed; drop it")
               : STATUS_OK;
}

static enum status dataset_source_open(const struct source_request *request, struct source_facts *facts,
                                       void **state)
{
    const struct dataset_values *parameters = request->parameters;
#ifndef HAVE_XXHASH
    if (!parameters->records) /* these need no hashes */
        return status_set(STATUS_UNAVAILABLE, "cannot read data sets: this build has no xxHash");
#endif
    if (!parameters->source)
        return status_set(STATUS_USAGE, "name the folder to read with --source DIR");
    TRY(source_check_target(parameters->source, request->target));
    if (remote_is(parameters->source) && !remote_local(parameters->source))
        TRY(check_permute(parameters));
    struct members members;
    bool chosen = parameters->image || parameters->label || parameters->member || parameters->labels;
    TRY(members_parse(parameters->image, parameters->label, chosen ? parameters->member : "all", &members));
    TRY(members_take_table(parameters->labels, parameters->label, &members));
    struct copy *copy = *state = calloc(1, sizeof *copy);
    TRY(ALLOCATED(copy, "out of memory"));
    struct dataset *dataset = &copy->dataset;
    copy->plain = (struct plain){.dataset = dataset, .fd = -1};
    copy->self = copy;
    copy->for_target = request->target != NULL;
    TRY(open_source(request, &members, copy));
    if (request->target)
        TRY(check_cache(parameters, dataset));
    if (dataset->remote)
        TRY(check_permute(parameters));
    copy->permuted = parameters->permute > 0;
    copy->order = permutation_begin(parameters->permute, dataset->sample_count);
    if (request->target)
        TRY(check_extensions(dataset));
    facts->samples = dataset->listed;
    facts->sample_bytes = dataset->sample_count ? dataset->bytes / dataset->sample_count : 0;
    TRY(open_resizing(request, &copy->resizing, facts));
    TRY(check_masks(request, dataset));
    facts->masks = dataset->masks;
    facts->multi_hot = dataset->multi_hot;
    facts->classes = dataset->multi_hot_classes;
    copy->masked = copy->for_target && dataset->masks && !parameters->member;
    facts->identity = identify(dataset);
    facts->class_folders = dataset->classes != NULL && !copy->permuted;
    facts->uncounted = dataset->uncounted;
    facts->held = dataset->held;
    facts->class_names = dataset_class_names(dataset, &facts->class_count);
    return STATUS_OK;
}

static const struct option_spec options[] = {
    {"source", "DIR", OPTION_TEXT, offsetof(struct dataset_values, source),
     .help = "folder with the samples: single files or tar shards"},
    {"permute", "SEED", OPTION_COUNT, offsetof(struct dataset_values, permute), .minimum = 1,
     .maximum = 18446744073709551615.0, .column = COLUMN,
     .help = "write the samples in a random order, which SEED (1 or more) selects; with --samples N, N "
             "random samples (default: the order of the data set, by class if it has class folders)"},
    {"out-res", "PIXELS", OPTION_COUNT, offsetof(struct dataset_values, out_res), .minimum = 1,
     .maximum = 4096, .column = COLUMN,
     .help = "resize the image of each sample, as --fit says, with the antialiased bilinear filter of "
             "Pillow. An image that needs no change is copied byte for byte (default: copy all images)"},
    {"fit", "HOW", OPTION_CHOICE, offsetof(struct dataset_values, fit), .choices = fit_words,
     .column = COLUMN,
     .help = "how images get the size --out-res: resize changes width and height to PIXELS; crop cuts out "
             "PIXELS x PIXELS at a random position; longest and shortest keep the aspect ratio, and make an "
             "image smaller until that side has PIXELS (default: resize). HOW is one of"},
    {"channels", "1|3", OPTION_COUNT, offsetof(struct dataset_values, channels), .minimum = 1, .maximum = 3,
     .column = COLUMN, .help = "number of channels of the images if --out-res is given (default: as stored)"},
    {"encode", "KIND", OPTION_CHOICE, offsetof(struct dataset_values, encoding), .choices = source_encodings,
     .column = COLUMN,
     .help = "file format of the images if --out-res is given; npy stores raw bytes (default: the format of "
             "each image). KIND is one of"},
    {"quality", "Q", OPTION_COUNT, offsetof(struct dataset_values, quality), .minimum = 1, .maximum = 100,
     .column = COLUMN, .help = "quality of the JPEG files that --out-res writes (default: 90)"},
    MEMBER_OPTIONS(offsetof(struct dataset_values, image), offsetof(struct dataset_values, label),
                   offsetof(struct dataset_values, member)),
    LABELS_OPTION(offsetof(struct dataset_values, labels)),
    CACHE_OPTIONS(offsetof(struct dataset_values, cache_dir), offsetof(struct dataset_values, cache_bytes),
                  ""),
};

static const char *const columns[] = {"source_key", NULL};

const struct source source_dataset = {
    .name = "dataset",
    .summary = "the samples of an existing data set",
    .options = options,
    .option_count = COUNT_OF(options),
    .parameters_bytes = sizeof(struct dataset_values),
    .columns = columns,
    .open = dataset_source_open,
    .close = dataset_source_close,
    .make = dataset_source_make,
    .ask = dataset_source_ask,
    .lost = dataset_source_lost,
    .label = dataset_source_label,
    .multi_hot = dataset_source_multi_hot,
    .locate = dataset_source_locate,
    .describe = dataset_source_describe,
};
