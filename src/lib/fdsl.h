/* libfdsl: images for training. A generator makes VisualAtom images by number, on the CPU or a CUDA GPU. A
 * stream reads, decodes and augments the samples of a data set, in host memory ("Data sets and streams"
 * below).
 *
 *     struct fdsl_config config;
 *     struct fdsl_generator *generator;
 *     fdsl_config_init(&config, sizeof config);
 *     config.classes = 1000;
 *     if (fdsl_open(&config, &generator) != FDSL_OK)
 *         errx(1, "%s", fdsl_error());
 *     fdsl_generate(generator, 0, config.batch, images, labels, NULL);
 *     fdsl_close(generator);
 *
 * An image is drawn on a square canvas of `res` x `res` pixels, which is then resized or cropped to
 * `out_res`. With N classes, image g is instance g div N of the class at index g mod N. The generators
 * "naive", "omp" and "fused" are bit-identical to each other and to the variants of the same names in the
 * program fdsl-bench. Their pixels depend only on the formula, the class, the seed, the instance, the side of
 * the canvas and the output format. The pixels do not depend on the device, the batch or the number of
 * threads. "gbase" and "bat" run the CUDA kernels of the paper (hpca-uji, PDP 2026), which draw overlapping
 * lines in any order. "bat" rounds noise to half precision; "gbase" draws noise from another random number
 * generator.
 *
 * This header is C99 and valid C++. No CUDA header is needed: a CUDA stream is passed as `void *`, NULL for
 * the default stream.
 *
 * Errors: most functions return FDSL_OK or an error code. After an error, fdsl_error() returns one line of
 * text; if an argument is wrong, the line names it. The library never prints, never exits, and installs no
 * signal handler. It leaves the current CUDA device, the locale and the floating-point environment as they
 * were.
 *
 * Threads: several generators and streams can be used at the same time, on one device or many. Calls on one
 * generator must not overlap; nor must calls on one stream, except those that say so. Generators, sources and
 * streams belong to the process that opened them. After fork(), the child must open its own. It can use CUDA
 * only if the parent did not use CUDA before the fork. */
#ifndef FDSL_H
#define FDSL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define FDSL_API __attribute__((visibility("default")))
#else
#define FDSL_API
#endif

/* The version of this header. fdsl_version() returns the version of the library. */
#define FDSL_VERSION_TEXT "0.2.0"

/* The results of functions. */
enum fdsl_status {
    FDSL_OK = 0,
    FDSL_FAILED = 1,      /* out of memory, a CUDA call failed, or a sample cannot be read */
    FDSL_INVALID = 2,     /* an argument, a configuration or an input file is not valid */
    FDSL_UNAVAILABLE = 4, /* not supported by this build or this machine */
    FDSL_END = 5,         /* no error: the epoch has ended (fdsl_stream_next()) */
    FDSL_PENDING = 6      /* no error: the next batch is not complete yet (fdsl_stream_wait()) */
};

#define FDSL_CPU          (-1) /* the device number of the CPU */
#define FDSL_CHANNELS_MAX 3

/* The parameters of a class. docs/visualatom.md of fdsl-bench gives the formulas. */
struct fdsl_class {
    uint32_t id; /* the label of its images */
    uint32_t vertices, orbits;
    float oval_x, oval_y;
    uint32_t freq1, freq2;
    float noise;      /* coefficient of the noise */
    uint32_t radius;  /* start radius in pixels */
    float line_width; /* in pixels: a constant that every orbit adds to the radius */
};

/* Describes the images, and how to generate them. Set all fields with fdsl_config_init(), then change some.
 * fdsl_open() copies strings and lists. */
struct fdsl_config {
    size_t size; /* sizeof(struct fdsl_config) of the caller: later versions may append fields */

    /* The images. Classes come from class_list, from class_file, or from preset. */
    const char *formula;     /* "uji" (default): the paper's code; "visualatom": the VisualAtom data set */
    uint64_t seed;           /* seed of all images; default 0 */
    uint32_t res;            /* side of the canvas in pixels, 1 to 16384; default 512 */
    uint32_t classes;        /* number of classes; default 1000. They are drawn at random from the
                              * preset's ranges; if the preset is a list, its first classes are used */
    const char *preset;      /* "uji", "visualatom", "lowercompute", or the lists "paper-1000" and
                                "lowercompute-1000"; NULL (default): the preset with the name of the formula */
    const char *preset_file; /* INI file with other presets; NULL (default): the built-in ones */
    const char *class_file;  /* CSV file with the classes, instead of a preset; NULL (default): none */
    const struct fdsl_class *class_list; /* the classes, instead of a preset; NULL (default): none */
    uint32_t class_count;                /* number of entries in class_list; default 0 */

    /* The output. A canvas becomes an image of out_res * out_res pixels. */
    uint32_t out_res;   /* side of an image in pixels, 1 to 16384; 0 (default): res */
    const char *fit;    /* "resize" (default): mean over the covered area; "crop": a randomly placed square */
    uint32_t channels;  /* 1 (default), or 3 with the same gray in each */
    const char *layout; /* "nchw" (default) or "nhwc" */
    const char *dtype;  /* "u8" (default), "f16", "bf16" or "f32"; floating-point values are (gray / 255 -
                         * mean) / std */
    double mean[FDSL_CHANNELS_MAX]; /* per channel; default 0; must be 0 for u8 */
    double std[FDSL_CHANNELS_MAX];  /* per channel; default 1; must be 1 for u8 */

    /* The generator and its resources. */
    const char *generator; /* on the CPU: "omp", "naive"; on a CUDA device: "fused", "bat", "gbase"; "auto"
                              (default): "omp" on the CPU, "fused" on a CUDA device */
    int device;            /* FDSL_CPU (default), or the number of a CUDA device */
    int threads;           /* CPU threads; 0 (default): OMP_NUM_THREADS, else all that the process may use */
    uint32_t batch;        /* maximum number of images per call; default 256 */
};

/* The memory layout of one image. The images of a batch are contiguous. */
struct fdsl_layout {
    size_t size;               /* sizeof(struct fdsl_layout) of the caller; set it before the call */
    uint32_t shape[3];         /* (channels, height, width), or (height, width, channels) for "nhwc" */
    uint64_t strides_bytes[3]; /* from one element to the next along each axis */
    uint32_t element_bytes;    /* 1, 2 or 4 */
    uint64_t image_bytes;
};

struct fdsl_generator;

/* Returns the version of the library, such as "0.2.0". Thread-safe. */
FDSL_API const char *fdsl_version(void);

/* Returns the text of the calling thread's latest error; "" if there was none. The next failing call of this
 * thread overwrites it. */
FDSL_API const char *fdsl_error(void);

/* Returns the number of CUDA devices. If it is 0, fdsl_error() returns the reason, for example that there is
 * no driver or that the library was built without CUDA. Thread-safe. */
FDSL_API int fdsl_cuda_devices(void);

/* Sets the defaults. `size` is sizeof *config. FDSL_INVALID if config is NULL or the library does not know
 * that size. Thread-safe. */
FDSL_API enum fdsl_status fdsl_config_init(struct fdsl_config *config, size_t size);

/* Opens a generator; the caller closes it. Allocates all memory that the generator needs, and may take a
 * second if CUDA is not initialised yet. `*generator` becomes NULL after an error. FDSL_INVALID for a
 * value or file that is not valid, or for batches that need more memory than is free; FDSL_UNAVAILABLE if the
 * build or machine lacks the device or the generator; FDSL_FAILED if a CUDA call or an allocation failed.
 * Thread-safe. */
FDSL_API enum fdsl_status fdsl_open(const struct fdsl_config *config, struct fdsl_generator **generator);

/* Frees a generator; NULL is allowed. The work of its calls must have completed on the device. Does nothing
 * in a child after fork(). */
FDSL_API void fdsl_close(struct fdsl_generator *generator);

/* Describes the images of a generator. FDSL_INVALID if the library does not know layout->size. */
FDSL_API enum fdsl_status fdsl_describe(const struct fdsl_generator *generator, struct fdsl_layout *layout);

/* Returns the number of classes, and copies the first `capacity` classes to `classes` (NULL if capacity is
 * 0). If an argument is not valid, returns 0; fdsl_error() then returns the reason. */
FDSL_API uint32_t fdsl_classes(const struct fdsl_generator *generator, struct fdsl_class *classes,
                               uint32_t capacity);

/* Returns the memory that the generator has allocated on its device, in bytes. On the CPU, this is an
 * estimate: canvases and labels. */
FDSL_API uint64_t fdsl_memory_bytes(const struct fdsl_generator *generator);

/* Generates images first .. first + count - 1 into `images`. Stores their class ids in `labels` unless it is
 * NULL. `count` must be at least 1, and at most the `batch` of the configuration.
 *
 * On the CPU, `images` must be aligned to the size of one element, `stream` must be NULL, and the images are
 * complete when the call returns. On a CUDA device, `images` and `labels` are device memory, and `images`
 * must be aligned to 16 bytes. The work is enqueued on `stream` without waiting and without allocating, so
 * the call can be captured into a CUDA graph. One generator has scratch memory for one call: calls on several
 * streams must be ordered (fdsl_order()).
 *
 * FDSL_INVALID if an argument is not valid; fdsl_error() names it. FDSL_FAILED if a launch failed. */
FDSL_API enum fdsl_status fdsl_generate(struct fdsl_generator *generator, uint64_t first, uint32_t count,
                                        void *images, int64_t *labels, void *stream);

/* Generates images numbers[0] .. numbers[count - 1]. The list may have any numbers in any order. On a CUDA
 * device it must be in device memory. FDSL_UNAVAILABLE for "gbase" and "bat": for them, the host must know
 * the image numbers, but it cannot read a list in device memory. Otherwise like fdsl_generate(). */
FDSL_API enum fdsl_status fdsl_generate_list(struct fdsl_generator *generator, const uint64_t *numbers,
                                             uint32_t count, void *images, int64_t *labels, void *stream);

/* Generates images *next .. *next + count - 1, then adds `step` to *next. On a CUDA device, `next` is device
 * memory, and the generation and the addition are enqueued on `stream`. If `step` is `count`, each replay of
 * a captured call generates the images that follow those of the previous replay. To share a sequence among
 * ranks, rank r starts at r * count and uses step = count * ranks. FDSL_UNAVAILABLE for "gbase" and "bat".
 * Otherwise like fdsl_generate(). */
FDSL_API enum fdsl_status fdsl_generate_next(struct fdsl_generator *generator, uint64_t *next, uint64_t step,
                                             uint32_t count, void *images, int64_t *labels, void *stream);

/* ---- Memory and streams, for callers that do not use CUDA themselves ---- */

/* Allocates `bytes` > 0 bytes on a device, aligned to at least 64 bytes; the caller frees them. FDSL_FAILED
 * if the device has too little memory. Thread-safe. */
FDSL_API enum fdsl_status fdsl_alloc(int device, size_t bytes, void **memory);

/* Frees memory of fdsl_alloc(); NULL is allowed. On a CUDA device, first waits for the work that uses it.
 * Thread-safe. */
FDSL_API void fdsl_free(int device, void *memory);

/* Copies `bytes` bytes; `from` and `to` may each be memory of the host or of the device. The copy begins
 * after the work that was enqueued on `stream`, and is complete when the call returns. On the CPU, `stream`
 * must be NULL. Thread-safe. */
FDSL_API enum fdsl_status fdsl_copy(int device, void *to, const void *from, size_t bytes, void *stream);

/* Waits until the work enqueued on `stream` is complete. On the CPU, `stream` must be NULL, and the call does
 * nothing. Thread-safe. */
FDSL_API enum fdsl_status fdsl_wait(int device, void *stream);

/* Makes all later work on the stream `after` wait for all work that is already enqueued on the stream
 * `before`. Does nothing for equal streams, or while one of the two is being captured. On the CPU, both must
 * be NULL. Thread-safe. */
FDSL_API enum fdsl_status fdsl_order(int device, void *before, void *after);

/* Returns 1 while `stream` is being captured into a CUDA graph, else 0; also 0 on the CPU and after an error.
 * Thread-safe. */
FDSL_API int fdsl_capturing(int device, void *stream);

/* ---- Data sets and streams ---- */

/* A source is an open data set: class folders, or tar shards in a folder or at a URL. A stream delivers its
 * samples as batches of images and labels, epoch after epoch:
 *
 *     struct fdsl_source_config from;
 *     struct fdsl_stream_config config;
 *     struct fdsl_source *source;
 *     struct fdsl_stream *stream;
 *     fdsl_source_config_init(&from, sizeof from);
 *     from.path = "photos/";
 *     fdsl_source_open(&from, &source);
 *     fdsl_stream_config_init(&config, sizeof config);
 *     config.batch_size = 256;
 *     config.out_res = 224;
 *     config.fit = "random-resized-crop";
 *     fdsl_stream_open(source, &config, &stream);
 *     while (fdsl_stream_fill(stream, images, labels, &count) == FDSL_OK)
 *         train(images, labels, count);
 *     fdsl_stream_close(stream);
 *     fdsl_source_close(source);
 *
 * Order: the samples of an epoch are a function of the seed and the epoch. Neither the number of threads nor
 * the number of ranks changes it. It is the order of `fdsl-bench --workload train --feed load`, and of class
 * folders and shards that hold the same samples in the same order. Step s of an epoch has the samples at the
 * positions s * G to (s + 1) * G - 1 of the order, where G = batch_size * world_size. Each rank has a
 * consecutive part of them. All ranks have the same number of steps. In the last step of an epoch the parts
 * may be smaller, or empty; they differ by at most one sample.
 *
 * Samples that cannot be decoded: see `on_error`. A file that cannot be opened or read, or that changed after
 * the source was opened, always ends the stream with an error. */

/* Describes a data set. Set all fields with fdsl_source_config_init(), then change some. fdsl_source_open()
 * copies strings. */
struct fdsl_source_config {
    size_t size; /* sizeof(struct fdsl_source_config) of the caller */

    const char *path; /* a folder, a shard (.tar), a wids index, or a URL: https://, s3://, file:// */
    const char
        *kind; /* "auto" (default), "shards" or "folder": FDSL_INVALID if the data set is another kind */

    /* The members of a sample in a shard; docs/load.md of fdsl-bench describes both lists. */
    const char *image; /* extensions of the image, separated by ';'; NULL (default): all known formats */
    const char *label; /* where the label is, such as "cls" or "json:label"; NULL (default): the class folder,
                        * or the first of cls, json:label and txt */

    /* Shards at a URL. */
    const char *cache_dir; /* a folder for copies of them; NULL (default): they are held in memory */
    uint64_t cache_bytes;  /* maximum size of the cache; 0 (default): unlimited */
};

/* What fdsl_source_open() found. */
struct fdsl_source_info {
    size_t size;      /* sizeof(struct fdsl_source_info) of the caller; set it before the call */
    uint64_t samples; /* number of samples, at least 1 */
    uint64_t bytes;   /* size of all samples */
    uint32_t classes; /* number of classes with a name (fdsl_source_class()); 0: the classes have no names */
    uint32_t files;   /* number of shards, or of files */
    int shards;       /* 1: shards; 0: class folders */
    uint64_t hash;    /* of the names of the samples, and of the sizes, the first and the last bytes of their
                       * members */
};

/* Describes a stream. Set all fields with fdsl_stream_config_init(), then change some. fdsl_stream_open()
 * copies strings. */
struct fdsl_stream_config {
    size_t size; /* sizeof(struct fdsl_stream_config) of the caller */

    /* The order. */
    uint32_t batch_size;     /* images per batch and rank; default 256 */
    uint32_t rank;           /* of this process, below world_size; default 0 */
    uint32_t world_size;     /* number of processes; default 1 */
    uint64_t seed;           /* of the order, the crops and the flips; default 0 */
    int shuffle;             /* 0: the order of the files; default 1 */
    uint32_t shuffle_buffer; /* samples in all shuffle windows together; default 16384 */
    uint32_t lanes;          /* number of places of the data set that are read at the same time; default 64 */
    int drop_last;           /* 1: leave out the last step of an epoch if it is not full; default 0 */

    /* The images. An image of any size becomes an image of out_res * out_res pixels. */
    uint32_t out_res;   /* side in pixels, 1 to 16384; 0 (default): all images have one size already */
    const char *fit;    /* "resize" (default): the whole image; "center-crop": the image is resized until its
                         * shorter side has out_res * 256 / 224 pixels, and its centre is cut out;
                         * "random-resized-crop": a random part, as in torchvision, anew in each epoch;
                         * "crop": a randomly placed square, not resized */
    int flip;           /* 1: mirror each image horizontally with probability 1/2; default 0 */
    uint32_t channels;  /* 1 (gray) or 3 (RGB, default) */
    const char *layout; /* "nchw" (default) or "nhwc" */
    const char *dtype;  /* "u8" (default), "f16", "bf16" or "f32"; floating-point values are (byte / 255 -
                         * mean) / std */
    double mean[FDSL_CHANNELS_MAX]; /* per channel; default 0; must be 0 for u8 */
    double std[FDSL_CHANNELS_MAX];  /* per channel; default 1; must be 1 for u8 */

    /* Resources and errors. */
    int num_threads; /* threads that read and decode; 0 (default): OMP_NUM_THREADS, else all that the process
                      * may use */
    uint32_t prefetch;    /* number of batches that are prepared ahead, 1 to 1024; default 2 */
    uint32_t held;        /* number of batches that the caller holds at the same time, 1 to 1024; default 1 */
    uint64_t shard_bytes; /* maximum size of the shards at a URL that are in memory without cache_dir; 0
                           * (default): 1 GiB */
    const char *on_error; /* a sample without an image or a label, or that cannot be decoded: "fail" (default)
                           * ends the stream with an error; "mask": its values are 0, its label is -1 */
};

/* The shapes of a stream. They do not change. */
struct fdsl_stream_info {
    size_t size;            /* sizeof(struct fdsl_stream_info) of the caller; set it before the call */
    uint32_t shape[3];      /* of an image: (channels, height, width), or (height, width, channels) */
    uint32_t element_bytes; /* 1, 2 or 4 */
    uint64_t image_bytes;   /* of one image; the images of a batch are contiguous */
    uint32_t capacity;      /* largest number of images in a batch of this rank */
    uint64_t steps;         /* per epoch, at least 1 */
    uint64_t samples;       /* per epoch, of all ranks */
};

struct fdsl_batch_info {
    size_t size;          /* sizeof(struct fdsl_batch_info) of the caller; set it before the call */
    uint32_t count;       /* number of images; 0 if this rank has no sample in the step */
    uint32_t masked;      /* how many of them are masked */
    uint64_t epoch, step; /* the step is counted within the epoch */
    int last;             /* 1: the last step of the epoch */
};

/* The parts of a batch. */
enum fdsl_field {
    FDSL_IMAGES = 0, /* (count, shape...) in the dtype of the stream */
    FDSL_LABELS = 1, /* (count) in int64; -1: the sample is masked */
    FDSL_NUMBERS = 2 /* (count) in int64: the numbers of the samples, in the order of the data set */
};

/* A dense array, with the layout of struct DLTensor of DLPack: a pointer to this struct is a DLTensor *. */
struct fdsl_tensor {
    void *data;          /* aligned to 256 bytes */
    int32_t device_type; /* 1: CPU */
    int32_t device_id;   /* 0 */
    int32_t ndim;
    uint8_t code;             /* 0: int; 1: unsigned int; 2: float; 4: bfloat */
    uint8_t bits;             /* per element */
    uint16_t lanes;           /* 1 */
    int64_t *shape, *strides; /* `ndim` values each; strides are in elements */
    uint64_t byte_offset;     /* 0 */
};

/* The state of a stream: everything that determines the following batches. It depends neither on the rank nor
 * on the batches that are prepared ahead. A program may store it as it is. */
struct fdsl_state {
    size_t size;      /* sizeof(struct fdsl_state) of the caller; set it before the call */
    uint64_t epoch;   /* of the next batch */
    uint64_t sample;  /* number of samples of this epoch that all ranks have received */
    uint64_t samples; /* number of samples of the data set */
    uint64_t seed;
    uint64_t data;                  /* fdsl_source_info.hash */
    uint64_t transform;             /* hash of the fields of struct fdsl_stream_config that describe images */
    uint32_t global_batch;          /* batch_size * world_size */
    uint32_t lanes, shuffle_buffer; /* 0 without shuffle */
    uint32_t drop_last;
};

/* Counts since the stream was opened. */
struct fdsl_stream_stats {
    size_t size; /* sizeof(struct fdsl_stream_stats) of the caller; set it before the call */
    uint64_t batches, samples, masked; /* delivered */
    uint64_t bytes;                    /* read from files */
    double wait_s;                     /* time that fdsl_stream_next() and fdsl_stream_wait() waited */
    double read_s, decode_s;           /* sums over all threads */
    double ready;          /* mean number of complete batches when fdsl_stream_next() was called */
    uint64_t memory_bytes; /* memory of batches and threads */
    uint64_t shard_bytes;  /* size of the shards at a URL that are in memory now */
};

struct fdsl_source;
struct fdsl_stream;
struct fdsl_batch;

/* Returns the warnings of the calling thread's latest fdsl_source_open(), fdsl_stream_open(),
 * fdsl_stream_next() or fdsl_stream_fill(), one per line; "" if there were none. The library prints nothing.
 */
FDSL_API const char *fdsl_warnings(void);

/* Set the defaults. `size` is the size of the struct. FDSL_INVALID if the pointer is NULL or the library does
 * not know that size. Thread-safe. */
FDSL_API enum fdsl_status fdsl_source_config_init(struct fdsl_source_config *config, size_t size);
FDSL_API enum fdsl_status fdsl_stream_config_init(struct fdsl_stream_config *config, size_t size);

/* Opens a data set and lists its samples; reads the first and last bytes of each. The caller closes the
 * source.
 * `*source` becomes NULL after an error. FDSL_INVALID if the data set does not exist, has no samples or is of
 * another kind; FDSL_FAILED if a file is broken or cannot be read; FDSL_UNAVAILABLE if a library for URLs or
 * a format is missing. A source does not change: threads and streams may share it. Thread-safe. */
FDSL_API enum fdsl_status fdsl_source_open(const struct fdsl_source_config *config,
                                           struct fdsl_source **source);

/* Closes a source; NULL is allowed. Streams that use the source keep it open. Does nothing in a child after
 * fork(). Thread-safe. */
FDSL_API void fdsl_source_close(struct fdsl_source *source);

/* Describes a source. FDSL_INVALID if an argument is NULL or info->size is unknown. Thread-safe. */
FDSL_API enum fdsl_status fdsl_source_describe(const struct fdsl_source *source,
                                               struct fdsl_source_info *info);

/* Returns the name of a class, by its label; NULL if there is none. Valid until the source is closed.
 * Thread-safe. */
FDSL_API const char *fdsl_source_class(const struct fdsl_source *source, uint32_t label);

/* Opens a stream, and allocates the memory of its batches. The caller closes it. `*stream` becomes NULL after
 * an error. Its threads begin to read when the first batch is requested. They block all signals. FDSL_INVALID
 * if a field is not valid, or if the batches do not fit into memory; FDSL_FAILED if memory or threads run
 * out, or if a sample lacks its image or label and on_error is "fail". Thread-safe. */
FDSL_API enum fdsl_status fdsl_stream_open(struct fdsl_source *source,
                                           const struct fdsl_stream_config *config,
                                           struct fdsl_stream **stream);

/* Closes a stream; NULL is allowed. A waiting fdsl_stream_next() of another thread must have returned
 * (fdsl_stream_cancel()). Batches that were not released stay valid; the last fdsl_batch_release() then ends
 * the threads and frees the memory. Does nothing in a child after fork(). */
FDSL_API void fdsl_stream_close(struct fdsl_stream *stream);

/* Describes a stream. FDSL_INVALID if an argument is NULL or info->size is unknown. Thread-safe. */
FDSL_API enum fdsl_status fdsl_stream_describe(const struct fdsl_stream *stream,
                                               struct fdsl_stream_info *info);

/* Waits for the next batch and sets `*batch`, which the caller releases. FDSL_END, with `*batch` NULL, once
 * at the end of each epoch; the following call begins the next epoch. FDSL_FAILED if a sample cannot be read;
 * the error is returned at its step, after all earlier batches, and again by each later call until
 * fdsl_stream_seek(). FDSL_FAILED also after fdsl_stream_cancel(). FDSL_INVALID if the caller holds prefetch
 * + held batches. */
FDSL_API enum fdsl_status fdsl_stream_next(struct fdsl_stream *stream, struct fdsl_batch **batch);

/* Waits until fdsl_stream_next() would return at once, for at most `seconds`: FDSL_OK if it would, else
 * FDSL_PENDING. For callers that handle signals while they wait. */
FDSL_API enum fdsl_status fdsl_stream_wait(struct fdsl_stream *stream, double seconds);

/* Copies the next batch into the caller's memory. `images` has room for the capacity of the stream (struct
 * fdsl_stream_info), `labels` for as many labels, or is NULL. Sets `*count` to the number of images.
 * Otherwise as fdsl_stream_next(). */
FDSL_API enum fdsl_status fdsl_stream_fill(struct fdsl_stream *stream, void *images, int64_t *labels,
                                           uint32_t *count);

/* Describe a batch, and one of its parts. The memory of the tensor, its shape and its strides are valid until
 * the batch is released. The caller may write to the images and labels. Thread-safe. */
FDSL_API enum fdsl_status fdsl_batch_describe(const struct fdsl_batch *batch, struct fdsl_batch_info *info);
FDSL_API enum fdsl_status fdsl_batch_tensor(struct fdsl_batch *batch, enum fdsl_field field,
                                            struct fdsl_tensor *tensor);

/* Returns a batch, whose memory the stream then uses again; NULL is allowed. In any order, also after
 * fdsl_stream_close(). FDSL_INVALID if it was released before. Thread-safe, also while another thread waits
 * in fdsl_stream_next(). */
FDSL_API enum fdsl_status fdsl_batch_release(struct fdsl_batch *batch);

/* Makes step `step` of epoch `epoch` the next batch. Batches that the caller holds stay valid. Clears an
 * error. FDSL_INVALID if the epoch has no such step. */
FDSL_API enum fdsl_status fdsl_stream_seek(struct fdsl_stream *stream, uint64_t epoch, uint64_t step);

/* Describes the position after the batches that were delivered. FDSL_INVALID if state->size is unknown. */
FDSL_API enum fdsl_status fdsl_stream_save(const struct fdsl_stream *stream, struct fdsl_state *state);

/* Continues after the batches that were delivered when the state was saved, also on another number of ranks.
 * FDSL_INVALID, with the name of the field, if the data set, the transform, the seed, the global batch or
 * another field that determines the batches differs; the position then does not change. */
FDSL_API enum fdsl_status fdsl_stream_load(struct fdsl_stream *stream, const struct fdsl_state *state);

/* Gets the statistics. Thread-safe, also while another thread uses the stream. */
FDSL_API enum fdsl_status fdsl_stream_stats(struct fdsl_stream *stream, struct fdsl_stream_stats *stats);

/* Ends a waiting fdsl_stream_next() of another thread, and makes later calls fail until fdsl_stream_seek() or
 * fdsl_stream_load(). Returns at once. Thread-safe. */
FDSL_API void fdsl_stream_cancel(struct fdsl_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
