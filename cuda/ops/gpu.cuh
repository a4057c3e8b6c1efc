/* The variants of `ops` on a GPU: the arguments of their kernels, and the code that they share for input,
 * results and timing. A variant implements struct gpu_steps. docs/ops.md describes the variants. Sets in
 * device memory (rows_device.cu) use the same code; struct gpu_target says where their rows come from and go
 * to. */
#ifndef FDSL_CUDA_OPS_GPU_CUH
#define FDSL_CUDA_OPS_GPU_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/check.cuh"
#include "core/parallel.h"
#include "core/variant.h"
#include "ops/job.h"

#define BLOCK_THREADS 256
#define BLOCK_WARPS   (BLOCK_THREADS / 32)

#define ROWS_MAX      UINT64_C(0xFFFFFFFF) /* numbers of rows within a run are uint32_t */

/* Consecutive rows of a run, in device memory. For k < count, row first + k of the run is row (k + shift) mod
 * count of `rows`. */
struct chunk {
    const uint8_t *rows;
    uint64_t first, count, shift;
};

/* Device memory that a run with a first pass clears before it begins. */
struct run_words {
    uint64_t kept;    /* number of kept rows */
    uint64_t listed;  /* number of kept rows in earlier chunks; only for the fused kernel */
    uint32_t largest; /* largest finite magnitude of the output rows, as bits */
    uint32_t unused;
};

/* Results and intermediate results. The pointer to an array is NULL if the run has no such array. In the
 * arguments of a kernel, it may also be NULL if the kernel leaves this array to a later kernel. */
struct gpu_arrays {
    uint8_t *kept;
    uint64_t *order;
    uint8_t *values, *scales;
    uint64_t *hashes;
    uint32_t *rows;        /* the kept rows of the run, in order; NULL if all rows are kept */
    uint64_t *row_hashes;  /* per row of the run; only for dedup */
    uint32_t *row_largest; /* largest finite magnitude per row of the run; only for nvfp4 */
    struct run_words *words;
    const int32_t *row_labels; /* per row that is gathered; only for gpu_gather() */
    int64_t *labels;           /* per output row; only for gpu_gather() */
};

/* The arguments of the kernels of a run. */
struct gpu_job {
    struct ops_format format;
    float norm_min, norm_max;
    bool masks;     /* rows with a norm out of bounds are not kept */
    bool unaligned; /* rows can only be read one value at a time (ROW_ANY in row.cuh) */
    uint32_t row_bytes;
    uint64_t row_stride;               /* bytes from one input row to the next */
    uint64_t value_bytes, scale_bytes; /* per output row */
    uint32_t pad_bytes;                /* of the values of an output row: zeros at its end */
    uint64_t first, shift, count;      /* see struct ops */
    uint64_t candidates, outputs;      /* rows that the permutation permutes; output rows */
    bool permutes;
    bool consecutive;     /* gpu_gather(): without a permutation, output row j is row draw.first + j */
    struct ops_draw draw; /* valid if `permutes` or `consecutive` is set */
    uint64_t seed;        /* only with `step` */
    const uint64_t *step; /* gpu_gather(): the number of the batch, in device memory; NULL: `draw` says it */
    struct gpu_arrays arrays;
};

struct gpu_ops;

/* Enqueues work on gpu->compute. */
typedef enum status gpu_chunk_function(struct gpu_ops *gpu, const struct chunk *chunk);

/* The functions that differ between variants. */
struct gpu_steps {
    bool fused; /* read() also lists the kept rows, and writes all results if gpu->one_pass is set */
    /* Reads consecutive rows (chunk->shift is 0). Fills kept, row_hashes and row_largest. */
    gpu_chunk_function *read;
    /* Writes output rows from the rows of a chunk: all output rows if all rows are resident. */
    gpu_chunk_function *write;
};

/* A set in device memory, which takes the results of one run: only the values and the list of kept rows. */
struct gpu_target {
    uint8_t *values;                 /* room for ops_outputs() rows */
    uint32_t *rows;                  /* room for all rows; NULL if all rows are kept */
    uint64_t value_bytes, pad_bytes; /* per output row; the padding is included in value_bytes */
    const uint8_t *input; /* rows that are already in device memory; NULL: they are in host memory */
    uint64_t stride;      /* of `input` */
    bool unaligned;       /* rows of `input`, or padded output rows, are not aligned to 16 bytes */
    enum status (*copy)(void *context, uint64_t first, uint64_t count, void *to); /* NULL: ops->parts */
    void *context;
    void (*parallel)(int threads, uint64_t count, parallel_task *task, void *context);
};

/* A ring of chunks in pinned and in device memory; see input.cu. */
struct chunk_ring {
    uint32_t buffers;
    uint64_t chunk_rows, chunk_bytes;
    uint8_t *host, *device;
    cudaEvent_t *copied, *computed; /* per buffer */
};

struct gpu_ops {
    const struct ops *ops;
    const struct gpu_steps *steps;
    const struct gpu_target *target;                    /* NULL for variants */
    int device, threads, multiprocessors, shared_bytes; /* shared_bytes: maximum shared memory per block */
    bool bulk;                                          /* kernels may use bulk copies */
    cudaStream_t compute, copies;
    cudaEvent_t begin, end;

    uint8_t *resident; /* all rows in order, if they are resident; otherwise NULL */
    struct chunk_ring ring;
    uint64_t chunks; /* maximum number of calls of `pass` in one gpu_input_pass() */

    cudaMemPool_t pool;
    uint8_t *arena; /* one allocation that contains the arrays below */
    uint64_t arena_bytes;
    struct gpu_job job;         /* job of the latest run */
    struct gpu_arrays arrays;   /* same as job.arrays */
    uint64_t cleared_bytes;     /* bytes that a run clears at the arena's start: words and counts */
    uint8_t *counts;            /* per tile of the fused kernel */
    uint64_t *sorted_hashes[2]; /* only for dedup */
    uint32_t *sorted_rows;
    uint8_t *scratch; /* scratch memory for CUB */
    uint64_t scratch_bytes;

    bool lists;           /* some rows may be dropped, so kept rows have to be listed */
    bool scaled;          /* nvfp4: the largest magnitude must be found before rows are converted */
    bool reads;           /* a first pass over the rows is needed */
    bool one_pass;        /* the first pass writes all results */
    uint32_t tiles;       /* elements of `counts` that launches of the fused kernel have used in this run */
    uint8_t *copy_target; /* target of the copies that measure the bandwidth of device memory */
    uint64_t copies_measured;
    double step_begin_s;
    struct run_words *host_words; /* in pinned memory */
    struct ops_summary summary;
};

/* ---- Runs: gpu.cu. The first three functions implement functions of struct variant. ---- */

enum status gpu_ops_run(void *state, uint64_t number, struct run_time *time);
enum status gpu_ops_fetch(void *state, void *result);
void gpu_ops_teardown(void *state);
extern const struct ops_traits gpu_ops_traits;

/* Implements setup() of the variant that has these `steps`. */
enum status gpu_ops_open(const struct resources *resources, const void *input, const struct gpu_steps *steps,
                         void **state);

/* Creates the streams, events and pinned memory of gpu->device, which is current; and a memory pool, which
 * keeps freed memory. The caller closes the device, even after a failure, when no input and no arena is open.
 */
enum status gpu_device_open(struct gpu_ops *gpu);
enum status gpu_pool_open(struct gpu_ops *gpu);
void gpu_device_close(struct gpu_ops *gpu);

/* Computes the passes and the sizes of ring and arena from gpu->ops, gpu->steps and gpu->target. */
enum status gpu_plan(struct gpu_ops *gpu);

/* Runs all steps once and waits for the end. Fills gpu->summary. */
enum status gpu_run_once(struct gpu_ops *gpu);

/* Frees the arena, in the order of gpu->compute. */
enum status gpu_arena_free(struct gpu_ops *gpu);

/* Returns the bytes of the values of an output row. */
uint64_t gpu_value_bytes(const struct gpu_ops *gpu);

/* If the times of steps are measured, begins to measure a step. */
void gpu_step_begin(struct gpu_ops *gpu);

/* Does nothing unless the times of steps are measured. Waits for all kernels, adds the time since the
 * previous step to the time of `step`, and begins to measure the next step. */
enum status gpu_step_done(struct gpu_ops *gpu, enum ops_step step);

/* ---- Input: input.cu ---- */

/* Computes the sizes of the ring. */
enum status gpu_input_plan(struct gpu_ops *gpu);

/* Returns the size of the input's device memory, in bytes. */
uint64_t gpu_input_bytes(const struct gpu_ops *gpu);

/* Copies the rows to the device, or creates the ring. The caller closes the input, even after a failure. */
enum status gpu_input_open(struct gpu_ops *gpu);
void gpu_input_close(struct gpu_ops *gpu);

/* Calls `pass` for consecutive chunks that together contain all rows of the run. */
enum status gpu_input_pass(struct gpu_ops *gpu, gpu_chunk_function *pass);

/* Measures the rate of copies from the pinned ring to the device. */
enum status gpu_input_copy_rate(struct gpu_ops *gpu, double *bytes_per_s);

/* ---- The second pass: write.cu ---- */

/* Writes the order, values, scales and hashes of output rows. Skips those whose pointer in `arrays` is NULL.
 */
enum status gpu_write(struct gpu_ops *gpu, const struct chunk *chunk, const struct gpu_arrays *arrays);

/* Writes the order of all output rows. */
enum status gpu_write_order(struct gpu_ops *gpu);

/* ---- Gathering rows that are only copied: gather.cu ---- */

/* Rows of a batch that are not in device memory: row j of `rows` becomes output row j. */
struct gpu_staged {
    const uint8_t *rows; /* NULL: none */
    uint64_t stride;
    struct ops_format format;
    uint32_t row_bytes, pad_bytes;
};

/* Returns whether gpu_gather_bulk() can write the output rows. `bulk`: the GPU has bulk copies. */
bool gpu_gather_fits(const struct gpu_job *job, bool bulk);

/* Enqueues one kernel that copies input rows to output rows and, unless their pointers are NULL, writes the
 * order and the labels. A row whose number is not below chunk->count becomes a row of NaN with the label -1.
 * Rows are only copied: job->row_bytes equals job->value_bytes. */
enum status gpu_gather_bulk(const struct gpu_job *job, const struct chunk *chunk, cudaStream_t stream);

/* Does the same for rows of any size and alignment. Rows of `staged` are converted; they are those whose
 * number is at least chunk->count, but below job->candidates. */
enum status gpu_gather_any(const struct gpu_job *job, const struct chunk *chunk,
                           const struct gpu_staged *staged, cudaStream_t stream);

/* Loads the kernels that gather without staged rows on the current device: a first launch must not be
 * captured.
 */
enum status gpu_gather_load(void);

/* ---- The first pass with one kernel per step: steps.cu ---- */

/* Implements read() of struct gpu_steps. */
enum status gpu_read_steps(struct gpu_ops *gpu, const struct chunk *chunk);

/* ---- The fused kernel: fused.cu ---- */

/* The steps of `ops-fused`. */
extern const struct gpu_steps gpu_fused_steps;

/* Returns whether output rows fit into shared memory, so that one pass is possible. */
bool gpu_fused_fits(const struct gpu_ops *gpu);

/* Returns the number of elements of gpu->counts. */
uint64_t gpu_fused_tiles(const struct gpu_ops *gpu);

#endif
