/* The workload `load`: options, input and verification. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/text.h"
#include "core/workload.h"
#include "data/dataset.h"
#include "data/remote.h"
#include "data/resident.h"
#include "data/set_stream.h"
#include "load/load_parts.h"
#include "machine/comm.h"

static const char *const layouts[] = {"nchw", "nhwc", NULL};
static const char *const axes_names[] = {"cthw", "tchw", "thwc", NULL}; /* enum load_axes */
static const char *const dtypes[] = {"raw", "f32", "f16", "bf16", NULL};
static const enum dtype dtype_values[] = {DTYPE_STORED, DTYPE_F32, DTYPE_F16, DTYPE_BF16};
static const char *const caches[] = {"warm", "cold", "any", NULL}; /* in the order of enum load_cache */

#define AT(field) offsetof(struct load_parameters, field)
static const struct option_spec options[] = {
    {"data", "DIR", OPTION_TEXT, AT(data), .column = COLUMN,
     .help = "folder with the samples (single files or tar shards; --prepare creates one), or a URL of tar "
             "shards: https://HOST/PATH/shard-{000..099}.tar, s3://BUCKET/PREFIX/ (all shards below it), or "
             "an Azure container"},
    CACHE_OPTIONS(AT(cache_dir), AT(cache_bytes), ""),
    MEMBER_OPTIONS(AT(image), AT(label), AT(member)),
    LABELS_OPTION(AT(labels)),
    {"batch", "N", OPTION_COUNT, AT(batch), .fallback = "32", .minimum = 1, .maximum = 1 << 20,
     .choices = option_max, .column = COLUMN, .help = "samples per batch"},
    {"shuffle", "N", OPTION_COUNT, AT(shuffle), .fallback = "1000", .maximum = 1 << 24, .column = COLUMN,
     .help =
         "size of the shuffle buffer in samples, for variants that read shards; 0 shuffles only the "
         "order of the shards. Variants that stream have the default of train --feed load, " STREAM_TEXT_OF(
             STREAM_SHUFFLE) ", divide the buffer equally among --lanes, and keep the order of the files "
                             "with 0. Other variants that read files, and gpu-resident, ignore this option "
                             "and shuffle all samples"},
    STREAM_LANES_OPTION(AT(lanes), "a variant that streams"),
    STREAM_PREFETCH_OPTION(AT(prefetch), "a variant that streams"),
    STREAM_RESIDENT_OPTION(AT(resident_bytes), "a variant that streams",
                           ". gpu-resident keeps samples in device memory (default: as many as fit), and "
                           "--threads threads read the rest"),
    STREAM_DEVICE_OPTION(AT(resident_device_bytes), "stream-gpu"),
    {"seed", "N", OPTION_COUNT, AT(seed), .fallback = "0", .maximum = 18446744073709551615.0,
     .column = COLUMN,
     .help = "seed of the sample order, of --augment and of the random parts of --fit; each epoch has its "
             "own order"},
    {"epochs", "N", OPTION_COUNT, AT(epochs), .fallback = "1", .minimum = 1, .maximum = 1 << 20,
     .column = COLUMN, .help = "epochs per run"},
    {"iodepth", "N", OPTION_COUNT, AT(iodepth), .fallback = "32", .minimum = 1, .maximum = 4096,
     .column = COLUMN,
     .help = "maximum number of files (files-uring) or reads (shards-uring) in flight, and of connections to "
             "a URL"},
    {"block", "KIB", OPTION_COUNT, AT(block), .fallback = "256", .minimum = 4, .maximum = 1 << 16,
     .column = COLUMN, .help = "size of each read of the variants shards and shards-uring"},
    {"readahead", "N", OPTION_COUNT, AT(readahead), .fallback = "2", .maximum = 1 << 20, .column = COLUMN,
     .help = "number of tar files that the operating system reads ahead, for the variants shards, "
             "shards-mmap, shards-omp and shards-gpu; ignored with --cache warm"},
    {"cache", "STATE", OPTION_CHOICE, AT(cache), .fallback = "warm", .choices = caches,
     .column = COLUMN_APART,
     .help = "state of the page cache before each run: warm (at least 99 % of the data resident), cold (at "
             "most 1 %) or any (unchanged). The run fails if this state is not reached. Without this option, "
             "any is used if Linux hides the state of files of another user. STATE is one of"},
    {"on-error", "WHAT", OPTION_CHOICE, AT(on_error), .fallback = "fail", .choices = on_error_names,
     .column = COLUMN,
     .help = "what to do with a sample that cannot be read. fail ends the run; skip omits the sample and "
             "counts it. With skip, all data are first compared with the index of --prepare, if there is "
             "one. mask is for variants that stream: a broken sample keeps its place in the batch, without "
             "values, and is counted. WHAT is one of"},
    {"decode", NULL, OPTION_FLAG, AT(decode), .column = COLUMN,
     .help = "decode images of all formats that the program reads (docs/decode.md), and .npy arrays"},
    {"out-res", "PIXELS", OPTION_COUNT, AT(out_res), .minimum = 1, .maximum = FIT_RES_MAX, .column = COLUMN,
     .help = "width and height of the decoded images (default: as stored); implies --decode"},
    {"fit", "HOW", OPTION_CHOICE, AT(fit), .fallback = "resize", .choices = fit_names, .column = COLUMN,
     .help = "how a decoded image gets the size --out-res. resize changes width and height; crop cuts out a "
             "part at a random position; random-resized-crop cuts out a random part and resizes it, like "
             "torchvision's RandomResizedCrop. HOW is one of"},
    {"exact-resize", NULL, OPTION_FLAG, AT(exact_resize), .column = COLUMN, .help = EXACT_RESIZE_HELP},
    {"channels", "1|3", OPTION_COUNT, AT(channels), .fallback = "3", .minimum = 1, .maximum = 3,
     .column = COLUMN, .help = "number of channels of the images, if --out-res is given"},
    {"layout", "NAME", OPTION_CHOICE, AT(interleaved), .fallback = "nchw", .choices = layouts,
     .column = COLUMN,
     .help = "order of the values in batches of shards-gpu --decode: nchw stores each channel as a plane, "
             "nhwc the channels of a pixel together. NAME is one of"},
    {"decoder", "NAME", OPTION_CHOICE, AT(decoder), .fallback = "auto", .choices = decoder_names,
     .column = COLUMN,
     .help = "what decodes the JPEG files of shards-gpu --decode and stream-gpu: hardware, the GPU's JPEG "
             "engines; hybrid, nvJPEG's CUDA kernels; cpu, the reading threads. auto uses the first of these "
             "that exists. The reading threads decode all other formats. NAME is one of"},
    STREAM_SHARE_OPTION(AT(device_share), COLUMN),
    {"augment", NULL, OPTION_FLAG, AT(augment), .column = COLUMN,
     .help = "shift, flip and normalise images, and convert them to float32; shards-gpu does not shift them, "
             "and converts them to --dtype. Implies --decode"},
    {"shift", "PIXELS", OPTION_COUNT, AT(shift), .fallback = "4", .maximum = 1 << 12, .column = COLUMN,
     .help = "maximum shift of --augment, vertically and horizontally (with --out-res the default is 0)"},
    {"mean", "M[,M,M]", OPTION_TEXT, AT(mean_text), .fallback = "0", .minimum = -1e6, .maximum = 1e6,
     .column = COLUMN,
     .help = "mean that --augment and GPU variants subtract from the values; bytes are first scaled to the "
             "range 0 to 1. One value, or one per channel of decoded images"},
    {"std", "S[,S,S]", OPTION_TEXT, AT(std_text), .fallback = "1", .minimum = 1e-6, .maximum = 1e6,
     .column = COLUMN,
     .help = "standard deviation by which --augment and GPU variants divide the values after --mean is "
             "subtracted; one value, or one per channel"},
    CROP_OPTIONS(AT(crop)),
    JITTER_OPTIONS(AT(color), "images and clips of variants that stream"),
    {"axes", "NAME", OPTION_CHOICE, AT(axes), .fallback = "cthw", .choices = axes_names, .column = COLUMN,
     .help = "order of the axes in batches of clips of variants that stream: channels, frames, height, "
             "width. NAME is one of"},
    {"dtype", "TYPE", OPTION_CHOICE, AT(dtype), .fallback = "f16", .choices = dtypes, .column = COLUMN,
     .help = "element type of the batches of a GPU variant; raw keeps the stored type. TYPE is one of"},
    {"ring", "N", OPTION_COUNT, AT(ring), .fallback = "2", .minimum = 2, .maximum = 64, .column = COLUMN,
     .help = "buffers per thread, for the variants shards-gpu and gds"},
    {"chunk", "KIB", OPTION_COUNT, AT(chunk), .fallback = "2048", .minimum = 4, .maximum = 1 << 20,
     .column = COLUMN,
     .help = "size of each read, and of each copy to the GPU, for the variants shards-gpu and gds. Without "
             "--chunk, chunks of pinned shards have up to 8192 KiB, and chunks for the JPEG engines up "
             "to 256 images"},
    {"rates-only", NULL, OPTION_FLAG, AT(rates_only),
     .help = "make only timed runs: the columns copy_bytes_per_s, copy_share, copy_share_error, cpu_cores, "
             "cpu_clock_hz, displacement, shards_per_batch and those of latencies stay empty. With --cache "
             "cold, only the data set is evicted from the page cache, even for root"},
    COMPUTE_OPTION(AT(compute)),
};

static const struct option_section sections[] = {
    {"data", "data"},
    {"batches", "batch"},
    {"reading", "iodepth"},
    {"decoding", "decode"},
    {"augmentation", "augment"},
    {"variants on a GPU", "dtype"},
    {"training step", "compute"},
    {NULL, NULL},
};

/* The input, and state that variants do not see. */
struct load_job {
    struct load load; /* must be first: variants see only this */
    struct dataset dataset;
    struct load_control control;

    /* Values of `load` and `control`, saved while samples are verified one by one */
    uint32_t epochs;
    struct checksum lost;
};

/* ---- Opening ---- */

static enum status check_fit(const struct options *given, const struct load_parameters *parameters)
{
    static const char *const of_fit[] = {"fit", "channels", "exact-resize"};
    static const char *const of_crop[] = {"crop-scale", "crop-ratio"};
    const bool crops = parameters->out_res > 0 && parameters->fit == FIT_RANDOM_RESIZED_CROP;
    for (size_t i = 0; !crops && i < COUNT_OF(of_crop); i++)
        if (options_given(given, of_crop[i]))
            return status_option(STATUS_USAGE, of_crop[i],
                                 " requires --out-res PIXELS --fit random-resized-crop");
    for (size_t i = 0; parameters->out_res == 0 && i < COUNT_OF(of_fit); i++)
        if (options_given(given, of_fit[i]))
            return status_option(STATUS_USAGE, of_fit[i],
                                 " requires --out-res PIXELS, the size of the decoded images");
    if (parameters->channels == 2)
        return status_option(STATUS_USAGE, "channels", ": '2' is neither 1 (gray) nor 3 (colour)");
    return STATUS_OK;
}

static bool is_url(const struct load_parameters *parameters)
{
    return remote_is(parameters->data) && !remote_local(parameters->data);
}

/* Checks the options of the cache. `remote` says whether the shards are at a URL, `cached` whether a cache is
 * of use for them. */
static enum status check_remote(const struct options *given, struct load_parameters *parameters, bool remote,
                                bool cached)
{
    if (!cached && (parameters->cache_dir || options_given(given, "cache-bytes")))
        return status_set(STATUS_USAGE, "--cache-dir and --cache-bytes are for data at a URL and for shards "
                                        "that are compressed; drop them");
    if (!parameters->cache_dir && options_given(given, "cache-bytes"))
        return status_set(STATUS_USAGE,
                          "--cache-bytes is the size of a cache; name its folder with --cache-dir DIR");
    if (!remote || parameters->cache_dir)
        return STATUS_OK;
    if (options_given(given, "cache") && parameters->cache != LOAD_ANY)
        return status_value(STATUS_USAGE, "cache", caches[parameters->cache],
                            " needs files: add --cache-dir DIR, or drop --cache");
    parameters->cache = LOAD_ANY;
    return STATUS_OK;
}

/* Requires --cache any if the data set is larger than --cache-bytes. Every epoch then reads shards from the
 * server, so the page cache cannot be kept warm or cold. */
static enum status check_cache_bytes(const struct options *given, struct load_parameters *parameters,
                                     const struct dataset *dataset)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < dataset->file_count; i++)
        bytes += dataset->files[i].bytes;
    if (!parameters->cache_dir || !parameters->cache_bytes || bytes <= parameters->cache_bytes)
        return STATUS_OK;
    if (options_given(given, "cache") && parameters->cache != LOAD_ANY)
        return status_value(STATUS_USAGE, "cache", caches[parameters->cache],
                            ": --cache-bytes is too small for this set of %llu bytes; raise it, or "
                            "use --cache any",
                            (unsigned long long)bytes);
    status_warn(
        "--cache-bytes is too small for this set of %llu bytes: every epoch reads shards from the server",
        (unsigned long long)bytes);
    parameters->cache = LOAD_ANY;
    return STATUS_OK;
}

/* Without --cache, uses the state `any` if Linux hides which pages of the data set are resident, because the
 * state `warm` could not be checked. With --cache, load_settle_cache() reports the error. */
static void accept_hidden_pages(const struct options *given, struct load_parameters *parameters,
                                const struct dataset *dataset)
{
    if (parameters->cache == LOAD_ANY || options_given(given, "cache") || dataset->remote ||
        !load_pages_hidden(dataset))
        return;
    status_say("--cache any is used, because Linux reports resident pages only to processes that own the "
               "files or may write them: rows do not say how much of the data was in the page cache");
    parameters->cache = LOAD_ANY;
}

static enum status check_combination(const struct options *given, struct load_parameters *parameters)
{
    if (!parameters->data)
        return status_set(STATUS_USAGE,
                          "name the data to read with --data DIR; fdsl-bench --prepare DIR creates samples");
    if (parameters->cache == LOAD_COLD && parameters->epochs > 1)
        return status_value(STATUS_USAGE, "cache", "cold",
                            ": only the first epoch of a run would be cold; drop --epochs");
    if (parameters->block % 4)
        return status_number(STATUS_USAGE, "block", (double)parameters->block,
                             " is not a multiple of the page size, 4 KiB; use a multiple of 4");
    if (parameters->chunk % 4)
        return status_number(STATUS_USAGE, "chunk", (double)parameters->chunk,
                             " is not a multiple of the page size, 4 KiB; use a multiple of 4");
    if (parameters->normalised && !parameters->augment && dtype_values[parameters->dtype] == DTYPE_STORED &&
        options_given(given, "dtype"))
        return status_value(STATUS_USAGE, "dtype", "raw",
                            " keeps the values as stored; drop --mean and --std");
    if (!parameters->augment && options_given(given, "shift"))
        return status_option(STATUS_USAGE, "shift", " requires --augment; add it");
    if (!parameters->color.jitter && options_given(given, "color-jitter-p"))
        return status_option(STATUS_USAGE, "color-jitter-p", " requires --color-jitter B,C,S,H; add it");
    static const char *const of_blur[] = {"blur-kernel", "blur-sigma"};
    for (size_t i = 0; i < COUNT_OF(of_blur); i++)
        if (!(parameters->color.blur > 0) && options_given(given, of_blur[i]))
            return status_option(STATUS_USAGE, of_blur[i], " requires --blur P above 0; add it");
    struct jitter color;
    struct crop_range range;
    TRY(jitter_read(&parameters->color, &color));
    TRY(crop_read(&parameters->crop, &range));
    TRY(check_fit(given, parameters));
    return is_url(parameters) ? check_remote(given, parameters, true, true) : STATUS_OK;
}

static void load_close(void *input)
{
    struct load_job *job = input;
    free(job->control.seen);
    dataset_close(&job->dataset);
    free(job);
}

/* Returns the value of --resident-bytes that stands for "all", because the row says how many bytes these are.
 */
static uint64_t bytes_of_all(const struct dataset *dataset)
{
    const struct resident_samples samples = {dataset, NULL, dataset->sample_count, true};
    uint64_t bytes;
    (void)resident_fit(&samples, RESIDENT_ALL, &bytes);
    return bytes > dataset->bytes ? bytes : dataset->bytes;
}

/* Computes what the variants need from the parameters. */
static void fill_load(const struct load_parameters *parameters, struct load_job *job)
{
    job->load = (struct load){
        .dataset = &job->dataset,
        .control = &job->control,
        .given = parameters,
        .epochs = (uint32_t)parameters->epochs,
        .block_bytes = (uint32_t)parameters->block << 10,
        .augmentation = {.move = {.shift = (uint32_t)parameters->shift, .flip = true},
                         .seed = parameters->seed,
                         .channels = parameters->by_channel ? AUGMENT_CHANNELS_MAX : 1},
        .fit = {.how = (enum fit_how)parameters->fit,
                .res = (uint32_t)parameters->out_res,
                .channels = (uint32_t)parameters->channels,
                .seed = parameters->seed,
                .unscaled = parameters->exact_resize},
        .dtype = dtype_values[parameters->dtype],
        .chunk_bytes = parameters->chunk << 10,
    };
    job->load.fit.raw = job->dataset.raw;
    (void)crop_read(&parameters->crop, &job->load.fit.range); /* succeeds: load_validate() has called it */
    for (int c = 0; c < AUGMENT_CHANNELS_MAX; c++) {
        job->load.augmentation.mean[c] = (float)parameters->mean[c];
        job->load.augmentation.scale[c] = (float)(1 / parameters->std[c]);
    }
}

static enum status load_move(void *input, void *parameters, const struct partition *partition)
{
    struct load_job *job = input;
    (void)parameters;
    job->load.rank = (uint32_t)partition->rank;
    job->load.ranks = (uint32_t)partition->ranks;
    return STATUS_OK;
}

/* Parses --mean and --std. */
static enum status read_scale(struct load_parameters *parameters)
{
    TRY(parse_channels("--mean", parameters->mean_text, PARSE_CHANNELS_MAX, -1e6, 1e6, parameters->mean));
    TRY(parse_channels("--std", parameters->std_text, PARSE_CHANNELS_MAX, 1e-6, 1e6, parameters->std));
    parameters->by_channel = strchr(parameters->mean_text, ',') || strchr(parameters->std_text, ',');
    return STATUS_OK;
}

/* Counts the variants of --variant, and those of them that stream. */
static enum status count_streams(const struct options *given, size_t *count, size_t *streams, bool *labels)
{
    const char *list = options_word(given, "variant");
    const struct variant_entry **chosen = NULL;
    *count = *streams = 0;
    *labels = false;
    if (!list)
        return STATUS_OK;
    TRY(variant_select(list, "load", &chosen, count));
    for (size_t i = 0; i < *count; i++) {
        const struct load_traits *traits = chosen[i]->variant ? chosen[i]->variant->traits : NULL;
        *streams += traits && traits->streams;
        *labels |= traits && (traits->streams || traits->device);
    }
    free(chosen);
    return STATUS_OK;
}

/* Opens the data set, of files of records the training set. With --on-error mask, it keeps the samples that
 * lack an image or a label. The message about a broken sample advises a value of --on-error that all chosen
 * variants accept. */
static enum status open_dataset(const struct options *given, const struct load_parameters *parameters,
                                const struct members *members, const struct remote_options *remote,
                                struct dataset *dataset)
{
    size_t variants, streams;
    bool labels;
    TRY(count_streams(given, &variants, &streams, &labels));
    const bool skips = parameters->on_error == ON_ERROR_SKIP;
    const struct record_format *records =
        parameters->image || parameters->label || parameters->member || parameters->labels
            ? NULL
            : record_format_find(parameters->data);
    struct members of_records;
    TRY(members_parse(RECORD_EXTENSION, NULL, NULL, &of_records));
    enum status status = records
                             ? dataset_find_records(parameters->data, records, false, &of_records, dataset)
                             : dataset_find(parameters->data, skips, false, members, remote, dataset);
    dataset->incomplete = parameters->on_error == ON_ERROR_MASK;
    dataset->needs_labels = labels;
    dataset->streamed = variants > 0 && streams == variants;
    if (status == STATUS_OK)
        status = dataset_check(parameters->data, dataset);
    return status != STATUS_OK && parameters->on_error == ON_ERROR_FAIL && dataset->faults && streams == 0
               ? dataset_advise_skip(status)
               : status;
}

/* Sets the parameters that tell which options are given, and checks the options. */
static enum status check_parameters(const struct options *given, struct load_parameters *parameters)
{
    TRY(workload_refuse_max(parameters->batch));
    parameters->default_shuffle = !options_given(given, "shuffle");
    parameters->default_chunk = !options_given(given, "chunk");
    parameters->normalised = options_given(given, "mean") || options_given(given, "std");
    return check_combination(given, parameters);
}

static enum status load_validate(const struct options *given, const void *parameters,
                                 const struct partition *partition)
{
    struct load_parameters copy = *(const struct load_parameters *)parameters;
    (void)partition;
    return check_parameters(given, &copy);
}

static enum status load_open(const struct options *given, void *parameters_,
                             const struct partition *partition, void **input)
{
    struct load_parameters *parameters = parameters_;
#ifndef HAVE_XXHASH
    return status_set(STATUS_UNAVAILABLE, "not built: this build has no xxHash");
#endif
    TRY(check_parameters(given, parameters));
    TRY(read_scale(parameters));
    TRY(compute_read(&parameters->compute));
    parameters->decode |= parameters->augment || parameters->out_res;
    if (parameters->out_res && !options_given(given, "shift"))
        parameters->shift = 0; /* with --out-res, --fit can shift the image */
    struct members members;
    TRY(members_parse(parameters->image, parameters->label, parameters->member, &members));
    TRY(members_take_table(parameters->labels, parameters->label, &members));
    struct load_job *job = *input = calloc(1, sizeof *job);
    TRY(ALLOCATED(job, "out of memory"));
    const struct remote_options remote = {.connections = (uint32_t)parameters->iodepth,
                                          .cache_dir = parameters->cache_dir,
                                          .cache_bytes = parameters->cache_bytes,
                                          .frozen = options_flag(given, "dry-run")};
    TRY(open_dataset(given, parameters, &members, &remote, &job->dataset));
    if (!is_url(parameters)) /* the wids index in a folder may name shards at URLs */
        TRY(check_remote(given, parameters, job->dataset.remote || dataset_in_memory(&job->dataset),
                         dataset_uses_cache(&job->dataset)));
    /* CSV rows must not contain the secrets in the query of a URL. */
    if (strchr(parameters->data, '?') && remote_is(parameters->data)) {
        static char shown[PATH_MAX];
        remote_shown(parameters->data, shown, sizeof shown);
        parameters->data = shown;
    }
    TRY(check_cache_bytes(given, parameters, &job->dataset));
    accept_hidden_pages(given, parameters, &job->dataset);
    if (job->dataset.sample_count < partition->ranks)
        return status_set(STATUS_USAGE, "--data %s has %u samples, too few for %llu ranks; start fewer ranks",
                          parameters->data, job->dataset.sample_count, (unsigned long long)partition->ranks);
    if (parameters->cache == LOAD_COLD && partition->ranks > 1)
        return status_value(STATUS_USAGE, "cache", "cold",
                            " needs a single rank, because one rank would reload pages that "
                            "another evicted; use --cache any, or one rank with more --threads");
    if (parameters->resident_bytes == OPTION_ALL)
        parameters->resident_bytes = bytes_of_all(&job->dataset);
    fill_load(parameters, job);
    job->control.resident_share = 1;
    job->control.wrong = UINT32_MAX;
    return load_move(job, parameters, partition);
}

/* Hashes the properties that determine the orders and the checksums of timed runs: the key, the edges
 * (data/checksum.h) and the size of every sample, in order, and the first sample of every shard. */
static uint64_t load_identity(const void *input)
{
    const struct dataset *dataset = ((const struct load *)input)->dataset;
    uint64_t hash = FNV_BEGIN;
    for (uint32_t i = 0; i < dataset->sample_count; i++) {
        const struct dataset_sample *sample = &dataset->samples[i];
        const uint64_t facts[] = {sample->key_hash, sample->edges, sample->bytes};
        hash = fnv_add(hash, facts, sizeof facts);
    }
    if (dataset->shard_first)
        hash = fnv_add(hash, dataset->shard_first,
                       (dataset->file_count + (size_t)1) * sizeof *dataset->shard_first);
    return hash;
}

/* In load_applies(): whether the option is one of these. */
#define IS(...) is_one_of(option, (const char *const[]){__VA_ARGS__, NULL})

static bool load_applies(const void *parameters_, const struct variant *variant, const char *option)
{
    static const struct load_traits every = {
        .ring = true, .resident = true, .decodes = true, .streams = true};
    const struct load_parameters *parameters = parameters_;
    const struct load_traits *traits = variant ? variant->traits : &every;
    const bool device = !variant || traits->device, cpu = !variant || !traits->device;
    const bool decodes = cpu || traits->decodes, streams = traits->streams;
    if (variant && streams && IS("mean", "std", "dtype", "layout"))
        return false;
    if (IS("color-jitter-p"))
        return streams && parameters->color.jitter;
    if (IS("blur-kernel", "blur-sigma"))
        return streams && parameters->color.blur > 0;
    if (IS("color-jitter", "grayscale", "blur", "axes", "lanes", "prefetch"))
        return streams;
    if (IS("device-share"))
        return (!variant || parameters->out_res) && device && streams;
    if (IS("resident-device-bytes"))
        return device && streams;
    if (IS("shift"))
        return parameters->augment && cpu;
    if (IS("decode", "augment", "out-res"))
        return decodes;
    if (IS("fit", "channels", "exact-resize"))
        return parameters->out_res && decodes;
    if (IS("crop-scale", "crop-ratio"))
        return parameters->out_res && decodes && parameters->fit == FIT_RANDOM_RESIZED_CROP;
    if (IS("layout", "decoder"))
        return (!variant || parameters->out_res) && device && decodes;
    if (IS("mean", "std"))
        return (device && dtype_values[parameters->dtype] != DTYPE_STORED) || (cpu && parameters->augment);
    if (IS("dtype"))
        return device;
    if (IS("ring", "chunk"))
        return device && traits->ring && !(variant && IS("chunk") && parameters->default_chunk);
    if (IS("resident-bytes"))
        return streams || (device && traits->resident);
    if (IS("shuffle"))
        return !traits->keyed && !(variant && streams && parameters->default_shuffle);
    if (IS("iodepth") && is_url(parameters))
        return true; /* the number of connections */
    if (variant && streams)
        return !IS("iodepth", "block", "readahead");
    return cpu || !IS("iodepth", "block");
}

/* Checks the options of variants that deliver batches from a stream. */
static enum status suits_streams(const struct options *given, const struct load_parameters *parameters)
{
    if (parameters->on_error == ON_ERROR_SKIP)
        return dataset_refuse_skip("a stream");
    return parameters->augment || options_given(given, "mean") || options_given(given, "std")
               ? status_set(STATUS_USAGE,
                            "neither shifts, flips nor normalises images; drop --augment, --mean and --std")
               : STATUS_OK;
}

static enum status load_suits(const struct options *given, const void *parameters_,
                              const struct variant *variant)
{
    const struct load_parameters *parameters = parameters_;
    const struct load_traits *traits = variant->traits;
    const bool decodes = parameters->decode || parameters->augment || parameters->out_res;
    const bool shifts = parameters->shift > 0 && (!parameters->out_res || options_given(given, "shift"));
    if (parameters->on_error == ON_ERROR_MASK && !traits->streams)
        return status_set(STATUS_USAGE, "omits broken samples, with --on-error skip; --on-error mask is for "
                                        "variants that stream");
    if (traits->streams)
        return suits_streams(given, parameters);
    if (parameters->color.jitter || parameters->color.grayscale > 0 || parameters->color.blur > 0)
        return status_set(STATUS_USAGE, "does not change colours; drop --color-jitter, --grayscale and "
                                        "--blur, or use stream or stream-gpu");
    if (traits->device && decodes && !traits->decodes)
        return status_set(STATUS_USAGE, "converts on the device and cannot decode or augment; drop "
                                        "--decode and --augment, or use shards-gpu or a CPU variant");
    if (traits->device && decodes && parameters->out_res == 0)
        return status_set(STATUS_USAGE, "decodes into batches of images of one size; add --out-res PIXELS");
    if (traits->device && decodes && shifts)
        return status_set(STATUS_USAGE, "does not shift images; drop --shift, or use --fit crop or "
                                        "random-resized-crop, which move them");
    if (traits->device && !decodes &&
        (strchr(parameters->mean_text, ',') || strchr(parameters->std_text, ',')))
        return status_set(STATUS_USAGE, "accepts one value per channel for --mean and --std only with "
                                        "--decode; give one value for each option");
    if (!traits->device && !parameters->augment &&
        (options_given(given, "mean") || options_given(given, "std")))
        return status_set(
            STATUS_USAGE,
            "--mean and --std require --augment or a GPU variant; add --augment, or drop both options");
    return STATUS_OK;
}

static const struct compute *load_compute(const void *parameters)
{
    return &((const struct load_parameters *)parameters)->compute;
}

static void load_set_consumer(void *input, struct consumer *consumer)
{
    ((struct load_job *)input)->control.consumer = consumer;
}

static enum status load_accepts(const void *input, const struct variant *variant)
{
    const struct load *load = input;
    const struct load_traits *traits = variant->traits;
    if (load->dataset->raw.channels && !traits->streams)
        return status_set(STATUS_USAGE,
                          "reads single files or tar shards, but %s has files of records, as MNIST and "
                          "CIFAR-10 have, or arrays of MDS; use the variant stream",
                          load->dataset->path);
    if (traits->files && !traits->streams && !load->dataset->shards &&
        load->dataset->sample_bytes_max >= INT32_MAX)
        return status_set(STATUS_USAGE,
                          "reads each file in one call, which is limited to 2 GiB, but a sample of %s has "
                          "%llu bytes; prepare the data set with --store shards",
                          load->dataset->path, (unsigned long long)load->dataset->sample_bytes_max);
    if (load->dataset->shards ? traits->shards : traits->files)
        return traits->accepts ? traits->accepts(load) : STATUS_OK;
    if (load->dataset->shards)
        return status_set(STATUS_USAGE, "reads single files, but %s holds shards; use the variant %s",
                          load->dataset->path, traits->device ? "shards-gpu" : "shards-omp");
    return status_set(STATUS_USAGE,
                      "reads shards, but %s holds single files; use the variant %s, or copy them to shards: "
                      "--prepare DIR --from dataset --source %s",
                      load->dataset->path, traits->device ? "stream-gpu" : "files-omp", load->dataset->path);
}

static const char *load_cache_state(const void *input)
{
    return caches[((const struct load *)input)->given->cache];
}

/* The least work of a run on a device, for the roofline. Each epoch must read the samples from device memory,
 * or transfer them over the bus. */
static struct least_work least_work(const struct load *load, const struct load_traits *traits, double bytes)
{
    double share = load->control->resident_share;
    if (traits->resident || (traits->streams && traits->device))
        return (struct least_work){.round_bytes = share * bytes / load->epochs,
                                   .rounds = load->epochs,
                                   .bus_bytes = (1 - share) * bytes};
    return (struct least_work){.bus_bytes = traits->device ? bytes : 0};
}

struct work load_work(const void *input, const struct variant *variant)
{
    const struct load *load = input;
    struct order_plan plan = load_variant_plan(load, variant, 1);
    double items = (double)order_count(&plan, load->rank) * load->epochs;
    double bytes = items * (double)load->dataset->bytes / load->dataset->sample_count;
    /* Subtract the samples that the latest run lost. Other runs lose the same samples, or almost the same
     * (parts_vary() in verifier.c). */
    const struct checksum *lost = &load->control->lost;
    bytes -= (double)lost->bytes;
    return (struct work){.items = items - (double)lost->count,
                         .bytes = bytes,
                         .least = least_work(load, variant->traits, bytes)};
}

/* ---- Verification ---- */

struct order_plan load_variant_plan(const struct load *load, const struct variant *variant, int threads)
{
    const struct load_traits *traits = variant->traits;
    struct order_plan plan = traits->streams ? load_stream_plan(load) : load_plan(load, threads);
    plan.keyed = traits->keyed;
    return plan;
}

static void want(void *context, uint32_t sample)
{
    uint8_t *wanted = context;
    wanted[sample]++;
}

/* Switches verification of individual samples on or off. While it is on, each run is one epoch. Switching it
 * off restores `epochs` and `lost`. */
static enum status check_closely(void *input, bool closely)
{
    struct load_job *job = input;
    struct load_control *control = &job->control;
    if (!closely && !control->whole)
        return STATUS_OK;
    if (closely) {
        if (job->load.given->on_error != ON_ERROR_MASK) /* it would end the run at a sample that is masked */
            TRY(dataset_hash(&job->dataset));
        control->seen = calloc(job->dataset.sample_count, 1);
        TRY(ALLOCATED(control->seen, "out of memory to verify"));
        job->epochs = job->load.epochs;
        job->lost = control->lost;
        job->load.epochs = 1;
    } else {
        free(control->seen);
        control->seen = NULL;
        job->load.epochs = job->epochs;
        control->lost = job->lost;
    }
    control->whole = closely;
    return STATUS_OK;
}

/* A run with control->whole sets control->seen[i] to its number of correct deliveries of sample i. A delivery
 * is correct if it has the hash over all bytes that the plain reader (data/plain_reader.h) computed. This
 * function counts the samples whose number of correct deliveries differs from the number that the epoch
 * requires. Skipped samples do not count as wrong; masked ones do, if they are intact. */
static enum status count_unseen(const struct load_job *job, const struct variant *variant, uint64_t number,
                                const struct load_result *result, uint64_t *wrong)
{
    struct order_plan plan = load_variant_plan(&job->load, variant, 1);
    FREED uint8_t *wanted = calloc(job->dataset.sample_count, 1);
    TRY(ALLOCATED(wanted, "out of memory to verify"));
    TRY(load_visit_epoch(&job->load, &plan, number, want, wanted));
    const bool streams = ((const struct load_traits *)variant->traits)->streams;
    const uint64_t skipped = streams ? 0 : result->skipped; /* a stream also proves what it masks */
    for (uint32_t i = 0; i < job->dataset.sample_count; i++)
        if (job->control.seen[i] != wanted[i]) {
            ++*wrong;
            if (!skipped) /* otherwise, this may be a skipped one, and none is named */
                load_note_wrong(job->load.control, i);
        }
    *wrong -= *wrong < skipped ? *wrong : skipped;
    return STATUS_OK;
}

/* Checks that the result belongs to run `number`. Then checks every sample if control->whole is set,
 * otherwise the samples that are still in the buffers. A run without control->whole has already compared its
 * checksum with the expected one. */
static enum status load_verify(const void *input, const struct variant *variant, void *state, uint64_t number,
                               uint64_t *wrong)
{
    const struct load_job *job = input;
    const struct load_traits *traits = variant->traits;
    *wrong = 0;
    job->load.control->wrong = UINT32_MAX;
    job->load.control->in_buffers = !job->control.whole;
    struct load_result result;
    TRY(variant->fetch(state, &result));
    if (result.number != number) {
        job->load.control->in_buffers = false;
        *wrong = (uint64_t)load_work(input, variant).items;
        return STATUS_OK;
    }
    return job->control.whole ? count_unseen(job, variant, number, &result, wrong)
                              : traits->verify_slots(state, wrong);
}

/* Collective. Adds the first sample that load_verify() found wrong on any rank, and whether it compared only
 * some samples. */
static void load_verdict(const void *input, void *state, char *text, size_t size)
{
    (void)state;
    const struct load_job *job = input;
    const struct dataset *dataset = &job->dataset;
    double first = -(double)job->control.wrong;
    if (comm_max(&first, 1) != STATUS_OK || first <= -(double)UINT32_MAX)
        return;
    const struct dataset_sample *sample = &dataset->samples[(uint32_t)-first];
    char name[512];
    dataset_name(dataset, sample, &dataset->members[sample->member], name, sizeof name);
    const size_t used = strlen(text);
    snprintf(text + used, size - used, " (%sthe first: %s)",
             job->control.in_buffers ? "only those still in the buffers were compared; " : "", name);
}

/* ---- The workload ---- */

static const char *const baselines[] = {"files", "shards", NULL};

static const char *const shown[] = {"skipped", NULL};

const struct workload workload_load = {
    .name = "load",
    .schema = "load/14",
    .summary = "reads samples from files or shards into batches",
    .item = "samples",
    .options = options,
    .option_count = COUNT_OF(options),
    .option_sections = sections,
    .parameters_bytes = sizeof(struct load_parameters),
    .columns = load_columns,
    .shown = shown,
    .baselines = baselines,
    .checks.every_run = true,
    .ranks.share_items = true,
    .open = load_open,
    .close = load_close,
    .repartition = load_move,
    .ranks.identity = load_identity,
    .ranks.check_total = load_check_total,
    .applies = load_applies,
    .validate = load_validate,
    .suits = load_suits,
    .accepts = load_accepts,
    .cache = load_cache_state,
    .batches.step = load_compute,
    .batches.set_consumer = load_set_consumer,
    .work = load_work,
    .verify = load_verify,
    .checks.closely = check_closely,
    .checks.verdict = load_verdict,
    .observe = load_observe,
    .measure = load_measure,
};
