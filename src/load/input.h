/* The interface between the workload `load` and its variants. A variant reads the samples of a directory into
 * batches. */
#ifndef FDSL_LOAD_INPUT_H
#define FDSL_LOAD_INPUT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/compute.h"
#include "core/consumer.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/dataset.h"
#include "data/checksum.h"
#include "data/image.h"
#include "data/jitter.h"
#include "data/random_draws.h"
#include "load/convert.h"
#include "load/order.h"

/* State of the page cache at the start of a run. */
enum load_cache {
    LOAD_WARM, /* files are read before the first run; at least 99 % of their pages are then resident */
    LOAD_COLD, /* files are evicted before every run; at most 1 % of their pages are then resident */
    LOAD_ANY   /* the page cache is left as it is */
};

/* Pages in the page cache, summed over files. */
struct cache_pages {
    uint64_t resident, all;
    bool hidden; /* Linux does not report the pages of at least one file, so `resident` is meaningless */
};

#define WARM_SHARE_MIN 0.99 /* a data set counts as warm if at least this share of its pages is resident */

/* Returns the resident share of all counted pages, from 0 to 1; 0 if none were counted. */
static inline double cache_share(const struct cache_pages *pages)
{
    return pages->all ? (double)pages->resident / (double)pages->all : 0;
}

#define AUGMENT_CHANNELS_MAX 3

/* Augmentation of a decoded image for training: shift, flip and normalisation. The result is a pure function
 * of the parameters, the image, the epoch and the sample number, so it is the same for all variants on the
 * CPU. Variants on a GPU use load/convert.h instead. */
struct augmentation {
    struct augment move;
    /* Per channel, after the shift: (value - mean) * scale; bytes are first divided by 255. Channels with an
     * index of at least `channels` use mean[0] and scale[0]. */
    float mean[AUGMENT_CHANNELS_MAX], scale[AUGMENT_CHANNELS_MAX];
    uint32_t channels;
    uint64_t seed;
};

/* Settings that change between runs. */
struct load_control {
    bool whole;       /* compute checksums over every byte and verify samples one by one */
    bool timed_calls; /* time each open, read and close call */
    uint8_t *seen;    /* with `whole`: how often each sample was delivered correctly, up to 255 */
    uint32_t wrong;   /* smallest number of a sample that was compared and is wrong, since the latest
                         load_verify() began; UINT32_MAX: none is known */
    bool in_buffers;  /* the latest load_verify() compared only the samples still in the buffers */

    double resident_share; /* share of the data set that a variant keeps in device memory; set by its setup(),
                              or its latest run */

    struct checksum lost; /* checksum of the samples that the latest run lost; set by verifier_finish() */

    struct consumer *consumer; /* receives every delivered batch; NULL if there is none */
};

/* The values of the options, with the defaults that depend on other options. */
struct load_parameters {
    const char *data, *mean_text, *std_text, *image, *label, *member, *labels, *cache_dir;
    uint64_t batch, shuffle, seed, epochs;
    uint64_t iodepth;         /* maximum number of files (files-uring) or reads (shards-uring) in flight */
    uint64_t readahead;       /* number of shards that Linux is asked to read ahead */
    uint64_t lanes, prefetch; /* for variants that stream: arguments of draw_lanes(), and batches ahead */
    uint64_t ring;            /* buffers per thread, for variants that deliver on a device */
    uint64_t block, chunk, shift, out_res, channels, cache_bytes;
    uint64_t resident_bytes; /* maximum number of bytes that variants that stream keep in host memory; 0:
                                none. gpu-resident: in device memory; 0: as many as fit */
    uint64_t resident_device_bytes; /* the same in device memory, for variants that stream; 0: none */
    double mean[AUGMENT_CHANNELS_MAX], std[AUGMENT_CHANNELS_MAX]; /* per channel; set by load_open() */
    int cache;                                                    /* enum load_cache */
    int decoder;                                                  /* enum decoder */
    double device_share; /* for variants that stream to a device: as in struct set_stream_request; NaN: the
                            decoder's own share */
    int on_error;        /* enum on_error */
    int interleaved;     /* decoded images on a device are NHWC, not NCHW */
    int dtype, fit;
    struct compute compute;
    bool decode, augment, exact_resize;
    struct crop_parameters crop;
    struct jitter_parameters color; /* for variants that stream, as `axes` */
    int axes;                       /* enum load_axes */
    bool rates_only;                /* no runs in addition to those that are timed */
    bool normalised; /* --mean or --std was given; set by load_open(). Without `augment`, only variants that
                        deliver on a device can use these options. */
    bool default_shuffle; /* --shuffle was not given: variants that stream have STREAM_SHUFFLE; set by
                             load_open() */
    bool default_chunk;   /* --chunk was not given: pinned shards have larger chunks; set by load_open() */
    bool by_channel;      /* --mean or --std has one value per channel; set by load_open() */
};

/* Values of --axes. */
enum load_axes { LOAD_CTHW, LOAD_TCHW, LOAD_THWC };

/* The input. All runs have the same input, except for `*control` and `epochs`; `epochs` is 1 while
 * control->whole is set. Run n reads epochs n * epochs to n * epochs + epochs - 1. */
struct load {
    const struct dataset *dataset;
    struct load_control *control;
    const struct load_parameters *given;
    uint32_t epochs;
    uint32_t rank, ranks;
    uint32_t block_bytes; /* bytes per read from a shard */
    struct image_fit fit; /* with `decode`: how decoded images get their size */
    struct augmentation augmentation;
    enum dtype dtype;     /* for variants that deliver on a device */
    uint64_t chunk_bytes; /* for these: bytes per buffer, unless a sample is larger */
};

/* Returns whether broken samples are left out. */
static inline bool load_skips(const struct load *load)
{
    return load->given->on_error == ON_ERROR_SKIP;
}

/* Records that a sample was compared and is wrong, for the message. Thread-safe. */
static inline void load_note_wrong(struct load_control *control, uint32_t sample)
{
    uint32_t first = __atomic_load_n(&control->wrong, __ATOMIC_RELAXED);
    while (sample < first && !__atomic_compare_exchange_n(&control->wrong, &first, sample, true,
                                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

/* Properties of a load variant. */
struct load_traits {
    bool shards, files; /* can read shards; can read single files */
    bool streams;       /* pulls batches from a struct stream (load/stream_run.h) */
    bool device;        /* delivers tensors on a device */
    bool resident;      /* the data set stays in device memory, so runs do not transfer it over the bus */
    bool ring;          /* reads chunks into rings of buffers */
    bool keyed;         /* uses keyed orders (load/order.h) */
    bool decodes;       /* with `device`: can decode images */
    bool calls;         /* makes open, read and close calls that can be timed */

    /* Checks whether the variant can read this input. NULL if it can read any input. */
    enum status (*accepts)(const struct load *load);

    /* Names of the stages that a run's time includes, for the column `timed_stages`. If `timed_unless_warm`
     * is not NULL, it replaces `timed` in runs without --cache warm. */
    const char *timed, *timed_unless_warm;
    const char *timed_unless_resident; /* replaces `timed` if not all data are in device memory */

    /* Measures an upper bound on the loader's rate, in bytes per second. On the CPU, the variant's threads
     * copy the working set into the variant's buffers (reader_copy()). docs/load_gpu.md describes the bound
     * for variants that deliver on a device. */
    enum status (*copy)(void *state, double *bytes_per_s);

    /* Verifies the samples that are still in the buffers after the latest run: compares the hash over all
     * bytes of each sample with the hash that dataset_hash() computed. The caller must have called
     * dataset_hash(). Checks all samples in the buffers, or a few thousand of them. Sets `*wrong` to the
     * number of samples that differ. */
    enum status (*verify_slots)(void *state, uint64_t *wrong);
};

enum load_call { LOAD_OPEN, LOAD_READ, LOAD_CLOSE, LOAD_CALLS };
enum { LOAD_QUANTILES = 3 }; /* the latencies that 50 %, 99 % and 99.9 % of the calls do not exceed */

/* Result of a load variant's latest run, filled by fetch(). */
struct load_result {
    uint64_t number;           /* number of the run; UINT64_MAX before the first */
    struct checksum checksum;  /* over the delivered samples */
    uint64_t skipped;          /* samples that could not be read or decoded */
    uint64_t jpeg_warnings;    /* with `decode`: accepted warnings of libjpeg, in all epochs of the run */
    struct cache_pages before; /* resident pages at the start of the run (LOAD_WARM: of the first run) */
    bool device_known;         /* Linux reports device_bytes */
    uint64_t device_bytes;     /* bytes that the process read from storage devices during the run */
    int threads;               /* threads that shared the run */
    uint64_t chunk_bytes;      /* of variants with rings; otherwise 0 */
    double pinned_share;       /* share of the bytes that were copied to the device from pinned shards */
    double pin_s;              /* time to map and pin the shards, in setup() */
    uint64_t moved_bytes; /* bytes that the run moved, for comparing its rate with copy(); 0 if the run moved
                             only the delivered bytes */
    const char *decoder;  /* one of decoder_names; NULL if nothing is decoded for a device */
    double
        jpeg_engine_share; /* with `decoder`: average use, from 0 to 1, of the GPU's JPEG engines over NVML's
                              last sample period before fetch(); negative if NVML does not report it */
    const char *gds;       /* cuFile's mode: "gds" or "compat"; NULL without cuFile */
    uint64_t memory_bytes; /* peak memory for data: buffers in host and device memory, without mapped files */
    double useful_bytes;   /* useful part of memory_bytes: one batch per thread, and the resident data set */
    uint64_t resident;     /* variants that stream: samples whose files stay in memory */
    uint64_t resident_device;   /* variants that stream: samples that are in device memory */
    double first_batch_s;       /* variants that stream: time from the start of the run to its first batch */
    double decode_s, augment_s; /* decode and augmentation time within the run, mean over threads */
    double latency_s[LOAD_CALLS][LOAD_QUANTILES]; /* only with control->timed_calls */
};

FDSL_C_BEGIN

/* Returns the order plan for `threads` threads per rank. */
struct order_plan load_plan(const struct load *load, int threads);

/* Returns the order plan of variants that stream. Each rank is one worker. */
struct order_plan load_stream_plan(const struct load *load);

/* Computes the expected checksum of this rank's part of run `number`, from the hashes that the plain reader
 * (data/plain_reader.h) computed. STATUS_EXHAUSTED if memory runs out. */
enum status load_expect(const struct load *load, const struct order_plan *plan, uint64_t number,
                        struct checksum *expected);

/* Adds the pages of an open file of `bytes` bytes to `pages`. Uses cachestat(2), or mincore(2) if
 * cachestat(2) fails, as it does before Linux 6.5. Sets `hidden` if Linux does not report the pages, because
 * this process neither owns the file nor may write it. STATUS_FAILED, with the reason, if mincore(2) fails;
 * STATUS_EXHAUSTED if memory runs out. */
enum status cache_count(int fd, uint64_t bytes, struct cache_pages *pages);

/* Counts the resident pages of all files of the data set. */
enum status load_resident(const struct load *load, struct cache_pages *pages);

/* Brings the page cache into the state load->given->cache and counts the resident pages. STATUS_FAILED if
 * that state cannot be reached. A run is therefore recorded as warm or cold only if the page cache was in
 * that state. */
enum status load_settle_cache(const struct load *load, struct cache_pages *pages);

/* Returns whether Linux hides from this process which pages of the data set are resident. Asks for the first
 * file that can be opened and is not empty. */
bool load_pages_hidden(const struct dataset *dataset);

/* Every copy to a device takes about 3 us longer than its bytes take. Smaller pieces of pinned shards are
 * therefore copied to a buffer, by many threads at the same time. */
#define LOAD_PINNED_MIN_BYTES (512u << 10)

/* Returns whether the mapped shards should be pinned for copies to a device: with a warm page cache, if
 * samples are not decoded, if no file is a copy in memory or from a URL, and if the files leave half of the
 * available memory to others. */
bool load_should_pin(const struct load *load);

/* Copies of a chunk of this size take 150 us. A chunk needs two copies, of its bytes and of its table, so
 * they are at most 4 % slower than larger ones. Chunks that threads copy to buffers should be smaller,
 * because all buffers should fit into the CPU's cache. */
#define LOAD_PINNED_CHUNK_BYTES (UINT64_C(8) << 20)

/* Returns the size of chunks that should be large, in bytes, for `threads` threads. Without --chunk, it is
 * `most_bytes` or, if that is smaller, a quarter of a thread's share, but not below the default of --chunk.
 */
uint64_t load_large_chunk(const struct load *load, int threads, uint64_t most_bytes);

/* Sets `*bytes` to the number of bytes that this process has read from storage devices so far
 * (/proc/self/io). Returns false if Linux does not report it. */
bool cache_device_bytes(uint64_t *bytes);

/* Writes the augmented image to `values`: channels x height x width floats. draw_move() gives the shift and
 * the flip of `sample` in `epoch`. Thread safe. */
void image_augment(const struct augmentation *augmentation, const struct image *image, uint32_t epoch,
                   uint32_t sample, float *values);

FDSL_C_END

#endif
