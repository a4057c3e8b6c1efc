/* A stream of the samples of a data set: class folders, or tar shards on a disk or at a URL. CPU threads read
 * and decode each sample directly into its place in a batch. A consumer with a decoder of its own may take a
 * share of the JPEG files undecoded (device_share). */
#ifndef FDSL_DATA_SET_STREAM_H
#define FDSL_DATA_SET_STREAM_H

#include "core/stream.h"
#include "data/dataset.h"
#include "data/image.h"
#include "data/mixing.h"

/* A broken sample: its bytes were read, but they are no image, no label or no mask, or differ from the hash
 * in the index. With both values, a file that cannot be opened or read, or that changed after dataset_open(),
 * ends the stream; so do images that need --out-res, because their shapes differ. */
enum set_stream_error {
    SET_STREAM_FAIL, /* ends the stream with the file, the key and the reason */
    SET_STREAM_MASK /* becomes zeros with the label STREAM_MASKED, and a mask of STREAM_IGNORED; the first few
                       are reported as warnings */
};

struct set_stream_request {
    /* The samples. Sample number n of the plan is sample samples[n % count] of the data set; NULL: sample
     * n % count. Numbers from `count` on are copies, with their own random crops. Both arrays and the data
     * set, which dataset_open() opened, must outlive the stream. */
    const struct dataset *dataset;
    const uint32_t *samples;
    const uint32_t *labels; /* labels[n % count]; a sample with the label (uint32_t)STREAM_MASKED is broken.
                               NULL: the stream reads the label of each sample */
    uint32_t count;         /* elements of each array; 0: all samples of the data set */
    uint32_t copies;        /* the plan's numbers are below count * copies; 0: one */
    uint32_t classes;       /* a sample that the stream reads with a larger label is broken; 0: none is */

    /* If the data set has masks (dataset->masks), and `labels` is NULL, each batch has the masks of its
     * images, cut out like them (image_fit_mask()), and all labels are 0. A mask that is missing, broken or
     * of another size makes its sample a broken one. With `mask_flip`, masks are mirrored as an image_output
     * with this seed mirrors the images. Multi-hot labels (dataset->multi_hot) take the place of masks: one
     * byte per class. */
    bool mask_flip;
    uint64_t mask_seed;

    /* Each sample becomes an image of this shape and type, channels first. With fit.res, images are
     * resized and cropped by the epoch and the plan's number of the sample (image_fit()); otherwise each
     * image must have this shape. */
    struct image_fit fit;
    uint32_t channels, depth, height, width;
    enum dtype type;
    const struct image_output *output; /* for images of bytes: how their values are stored; must outlive the
                                          stream. NULL: as they are, channels first, not mirrored */

    /* MixUp and CutMix of images of bytes, with a depth of 1, after they are stored; zeros: none. `mix_seed`
     * is the seed of mix_draw(), and the steps are those of the plan. `own` returns how many of the samples
     * that the plan lists for a step are in its batch. The others, if there are any, follow as their
     * partners (mix_partner()); they are neither delivered nor counted. NULL: all are in the batch. */
    struct mixing mixing;
    uint64_t mix_seed;
    uint32_t (*own)(const void *context, uint64_t epoch, uint64_t step); /* `context` is that of the plan */

    /* The order of the plan, if it is that of draw_lanes() with these arguments. If the samples of shards are
     * small, shards are then read in blocks, which use at most one MiB of memory per lane (set_files.h).
     * 0 lanes: another order; each sample is read alone. Neither changes the batches. */
    uint32_t lanes, shuffle;

    struct stream_plan plan;
    struct stream_position begin; /* the first batch; zeros: the beginning */
    int threads;                  /* at least 1 */
    uint32_t ahead; /* number of batches that are prepared before the consumer takes them, at least 1 */
    uint32_t held;  /* number of batches that the consumer holds at a time; 0: one. It may hold more, but the
                       stream then prepares fewer; STATUS_USAGE if it holds ahead + held batches and asks for
                       another one */
    enum set_stream_error on_error;

    /* Share of the samples, from 0 to 1, whose JPEG files the consumer decodes and fits itself: those of
     * set_stream_on_device(), if image_for_device() accepts their files. The threads decode all others. Only
     * with fit.res, and with FIT_RESIZE, FIT_CROP or FIT_RANDOM_RESIZED_CROP. With a share above 0, the
     * threads also decode each JPEG at its full size (fit.unscaled), so that which decoder takes a sample
     * changes values only by rounding. */
    double device_share;

    /* Shards of a URL without a cache folder are held in memory: together at most this many bytes, or one
     * shard if it is larger. 0: SET_STREAM_SHARD_BYTES. */
    uint64_t shard_bytes;

    /* The files of the first samples of `samples` stay in memory, as they are stored, after they were read:
     * of as many as fit into this number of bytes (data/resident.h); UINT64_MAX: of all. Does not change the
     * batches. */
    uint64_t resident_bytes;

    /* Memory on a device in which the consumer keeps samples, which are not read again: set_stream_keep(). 0:
     * none. Only without `output` and `mixing`. With random crops, the consumer keeps whole images, which it
     * is handed as files (set_stream_files()), and must fit all of these itself. */
    uint64_t device_bytes;

    const bool *stopped; /* remote_stop() with this flag ends set_stream_find_shape(); NULL: nothing does */

    /* Allocate the memory of a batch, for example pinned memory; NULL: host memory aligned to STREAM_ALIGN.
     * The threads of the stream call both: with device_share, when the files of a batch need more memory, and
     * with device_bytes, when the consumer keeps no further samples. So they must be thread safe and must not
     * depend on the current device of the thread. */
    enum status (*allocate)(size_t bytes, void **memory);
    void (*deallocate)(void *memory);
};

#define SET_STREAM_SHARD_BYTES (UINT64_C(1) << 30)

/* Maximum size of the decoded images of a batch that are handed on; further ones are fitted. A stream
 * allocates less if that is enough for the images of a batch, and frees the memory when the consumer keeps no
 * further samples. */
#define SET_STREAM_PIXEL_BYTES (UINT64_C(64) << 20)

/* A JPEG file that the stream hands on undecoded. Its sample is the part `part` of the stored image, resized
 * to fit.res x fit.res pixels and turned upright by `turn`, with the channels of the request: what
 * image_fit() computes with fit.unscaled. image_fit() mirrors no images except by `turn`. */
struct set_stream_file {
    uint32_t index; /* of the sample in the batch; its values are undefined */
    const uint8_t
        *bytes;    /* in memory of request.allocate, a multiple of STREAM_ALIGN bytes after its beginning */
    uint64_t size; /* in bytes */
    /* With request.device_bytes, an image may be decoded already; `bytes` is then NULL. Its pixels are here,
     * as RGB in memory of request.allocate, or, if this is NULL, where the consumer keeps them. */
    const uint8_t *pixels;
    struct jpeg_shape shape; /* of the stored image; of a JPEG in `bytes`, meets image_suits_device() */
    struct image_box part;   /* within the stored image */
    struct orientation turn;
};

/* Returns whether a sample is named as a JPEG. */
static inline bool set_stream_is_jpeg(const struct dataset *dataset, const struct dataset_sample *sample)
{
    const struct dataset_member *members = &dataset->members[sample->member];
    return sample->image < sample->members &&
           image_format(members_format(members[sample->image].extension), NULL, 0) == IMAGE_JPEG;
}

/* Returns whether the batches of a stream have masks or multi-hot labels. */
static inline bool set_stream_masks(const struct set_stream_request *request)
{
    return (request->dataset->masks || request->dataset->multi_hot) && !request->labels;
}

/* Returns the bytes per sample of a mask or a multi-hot label; 0: there are none. */
static inline size_t set_stream_mask_bytes(const struct set_stream_request *request)
{
    if (!set_stream_masks(request))
        return 0;
    return request->dataset->multi_hot ? request->dataset->multi_hot_classes
                                       : (size_t)request->height * request->width;
}

/* Returns the share of the samples that a decoder on a device should take. */
static inline double set_stream_share(enum decoder decoder)
{
    return decoder == DECODER_HARDWARE ? 0.85 : decoder == DECODER_HYBRID ? 0.25 : 0;
}

/* Returns whether a sample belongs to the share of the device. Depends only on the number in the plan: not on
 * epochs, ranks, threads or timing. A larger share has all samples of a smaller one. */
static inline bool set_stream_on_device(uint32_t number, double share)
{
    const uint64_t hash = stream_hash((number + UINT64_C(1)) * UINT64_C(0x9E3779B97F4A7C15));
    return (double)(hash >> 32) < share * 0x1p32;
}

/* Returns the hash stream_batch.read of a sample whose bytes, as far as checksum_edges() covers them, are
 * those that dataset_open() found. Sums of these hashes show whether an epoch has each sample once, under its
 * own number. A masked sample has this hash, whatever was read for it. */
static inline uint64_t set_stream_hash(const struct dataset_sample *sample, uint32_t number)
{
    return stream_hash((sample->key_hash ^ (uint64_t)number << 32 ^ number) + sample->edges);
}

FDSL_C_BEGIN

/* Sets channels, depth, height, width and type of the samples that request->dataset and request->fit
 * describe: with fit.res from `fit`, otherwise, or if it is an array, from the first sample; with
 * SET_STREAM_MASK, from the first one that can be decoded. STATUS_FAILED, with the file and the reason, if
 * there is none. STATUS_USAGE if one of a few local samples has another shape. */
enum status set_stream_find_shape(struct set_stream_request *request);

/* Decides how much memory a stream may use for shards of a URL, or that are unpacked: request.shard_bytes.
 * `lanes` and `shuffle` are those of draw_lanes(). A `*shard_bytes` above 0 is the caller's own limit and
 * stays. Otherwise it becomes 0, or what the blocks of the shuffle windows need if that is more. A block is
 * then requested once per epoch for each run of consecutive samples of the order that it touches.
 * STATUS_USAGE if a server sends no ranges, or if there is a cache folder, and the shuffled shards do not fit
 * into the memory or the cache: nearly each sample would download its shard again. Shuffled shards that are
 * compressed are all held in memory, without a cache folder. STATUS_EXHAUSTED if they, or the windows, do not
 * fit into memory. */
enum status set_stream_plan_shards(const struct dataset *dataset, uint32_t lanes, uint32_t shuffle,
                                   int threads, uint64_t *shard_bytes);

/* Opens a stream, and starts its threads, which begin to prepare batches at the first stream_next(): a caller
 * may seek before it, and nothing is read in vain. STATUS_EXHAUSTED if memory or
 * threads run out, STATUS_TOO_LARGE if the batches do not fit into memory, STATUS_USAGE if the fit and the
 * shape contradict each other; nothing is then left allocated, and `*stream` is NULL. Values are in host
 * memory: stream_release() refuses an event (STATUS_USAGE), so the caller waits for it first. */
enum status set_stream_open(const struct set_stream_request *request, struct stream **stream);

/* Returns the files of a batch that stream_next() delivered, in the order of `index`, and sets `*count` to
 * their number. `stream` must be of set_stream_open(). They are valid until the batch is released. */
const struct set_stream_file *set_stream_files(const struct stream *stream, const struct stream_batch *batch,
                                               uint32_t *count);

/* Returns whether the parts of images differ in each epoch. */
static inline bool set_stream_crops(const struct image_fit *fit)
{
    return fit->res && (fit->how == FIT_CROP || fit->how == FIT_RANDOM_RESIZED_CROP);
}

/* With request.device_bytes: returns for each sample of a batch that stream_next() delivered the place where
 * the consumer keeps it, or SET_STREAM_LOADED. The values of a sample that it keeps are undefined; its label
 * and its hash in stream_batch.read are as before. The array is valid until the batch is released. */
#define SET_STREAM_LOADED UINT64_MAX
const uint64_t *set_stream_places(const struct stream *stream, const struct stream_batch *batch);

/* With request.device_bytes: the consumer keeps sample `index` of a delivered batch at `place`, and from now
 * on the values of this sample. Batches that are listed later are delivered without them; so are copies
 * that the same decoder would decode (set_stream_on_device()). Its file is not read again, but compared with
 * the one that was opened, as for a sample in memory (resident_bytes). To be called once for each of the
 * samples 0 to count - 1, by the thread that calls stream_next(), for samples that are not masked.
 * With random crops, `file` is the sample's file, and the consumer keeps its pixels; otherwise NULL. */
void set_stream_keep(struct stream *stream, const struct stream_batch *batch, uint32_t index, uint64_t place,
                     const struct set_stream_file *file);

/* The consumer keeps no further samples. With random crops, images are then fitted while they are decoded. */
void set_stream_keep_no_more(struct stream *stream);

/* Returns the request of a stream, with its defaults. */
const struct set_stream_request *set_stream_request_of(const struct stream *stream);

/* Reports that the consumer cannot decode the file of sample `index` of a delivered batch; `why` is the
 * failure, whose message is set. With SET_STREAM_MASK, if `why` is STATUS_FAILED: gives the sample the label
 * STREAM_MASKED, counts it once in `batch` and in the statistics, and returns STATUS_OK; the caller sets its
 * values to zero. Otherwise returns `why`, and adds the file, the sample and the epoch's step to the message.
 * The stream then remains usable. STATUS_USAGE if the batch is not held, or has no such sample. To be called
 * by the thread that calls stream_next(). */
enum status set_stream_break(struct stream *stream, struct stream_batch *batch, uint32_t index,
                             enum status why);

FDSL_C_END

/* Rows of the option tables of workloads that open a stream; `at`: offset of the uint64_t in the workload's
 * parameters. `stream` names what reads the stream. */
#define STREAM_SHUFFLE        16384 /* default of --shuffle of streams, in samples */
#define STREAM_LANES          64    /* default of --lanes of streams */
#define STREAM_TEXT(tokens)   #tokens
#define STREAM_TEXT_OF(macro) STREAM_TEXT(macro)
#define STREAM_LANES_OPTION(at, stream)                                                                \
    OPTION_ROW("lanes", "N", OPTION_COUNT, at, .fallback = STREAM_TEXT_OF(STREAM_LANES), .minimum = 1, \
               .maximum = 1 << 20, .column = COLUMN,                                                   \
               .help = "number of positions from which " stream                                        \
                       " reads the data set in parallel; a batch takes samples from all of them in turn")
#define STREAM_SHARE_OPTION(at, apart)                                                                     \
    OPTION_ROW("device-share", "S", OPTION_REAL, at, .maximum = 1, .column = apart,                        \
               .help = "share of the samples that --decoder hardware or hybrid decodes; --threads decode " \
                       "the others. Which samples these are depends only on their numbers (default: 0.85 " \
                       "with hardware, 0.25 with hybrid, 0 with cpu)")
/* `stream` names what keeps the files in host memory; `more` is added to the help. */
#define STREAM_RESIDENT_OPTION(at, stream, more)                                                           \
    OPTION_ROW("resident-bytes", "N[K|M|G]|all", OPTION_BYTES, at, .minimum = 1, .maximum = 1e18,          \
               .choices = option_all, .column = COLUMN,                                                    \
               .help = "memory of each rank in which " stream                                              \
                       " keeps the files of the first samples, as many as fit; it reads the rest in each " \
                       "epoch. all keeps all files" more)
#define STREAM_DEVICE_OPTION(at, stream)                                                                 \
    OPTION_ROW("resident-device-bytes", "N[K|M|G]", OPTION_BYTES, at, .minimum = 1, .maximum = 1e18,     \
               .column = COLUMN,                                                                         \
               .help = "memory of the GPU in which " stream                                              \
                       " keeps samples after they were read, as many as fit; it reads the rest in each " \
                       "epoch. With random crops, whole images are kept")
#define STREAM_PREFETCH_OPTION(at, stream)                                                        \
    OPTION_ROW("prefetch", "N", OPTION_COUNT, at, .fallback = "2", .minimum = 1, .maximum = 1024, \
               .column = COLUMN, .help = "batches that " stream " decodes in advance")

#endif
