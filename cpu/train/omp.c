/* The variants `train-omp` and `infer-omp`: OpenMP divides samples and matrix tiles among threads; the inner
 * loops use SIMD. docs/notes/engines.md says where the time goes.
 *
 * Convolutions process one sample per thread; linear layers process the whole batch. Networks with batch
 * normalisation pass through the blocks layer by layer (omp_sample.c). Results are bit-identical for any
 * number of threads, because the order of every sum is fixed. In convolutions, one thread does all the work
 * of a sample. An element of a GEMM is summed in the same order in any tile. Convolution gradients are summed
 * per chunk of the batch, then over the chunks in order. */
#include <dlfcn.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "core/phase.h"
#include "machine/host.h"
#include "omp_net.h"
#include "train/trainer.h"

/* ---- With OpenBLAS ---- */

/* The variant `train-omp-blas`: `train-omp` with OpenBLAS, used as deep-learning frameworks use it. Gathered
 * operands are copied into a matrix (im2col), and single-threaded sgemm multiplies this matrix. This variant
 * is the baseline for our own GEMM.
 *
 * OpenBLAS is loaded with dlopen() in probe(). If it were linked, it would start its threads in every run of
 * the program. */

#define BLAS_LIBRARY "libopenblas.so.0"

/* Declarations of CBLAS, the standard C interface of BLAS. */
enum { CBLAS_ROWS = 101, CBLAS_PLAIN = 111, CBLAS_TRANSPOSED = 112 };
typedef void sgemm_function(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                            const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);

static sgemm_function *sgemm;

static enum status blas_probe(const struct resources *resources)
{
    (void)resources;
    if (sgemm)
        return STATUS_OK;
    void *library = dlopen(BLAS_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    void (*set_threads)(int) = NULL;
    if (library) {
        *(void **)&sgemm = dlsym(library, "cblas_sgemm");
        *(void **)&set_threads = dlsym(library, "openblas_set_num_threads");
    }
    if (!sgemm || !set_threads) {
        sgemm = NULL;
        return status_set(STATUS_UNAVAILABLE, "needs OpenBLAS (" BLAS_LIBRARY "): apt install libopenblas0");
    }
    set_threads(1); /* OpenMP threads already call sgemm in parallel */
    return STATUS_OK;
}

/* ---- GEMM ---- */

#define TILE_ROWS       32
#define ROOM_VALUES     32768
#define ROOM_VALUES_MIN 1024 /* size of the fallback on the stack if malloc() fails */
#define STEPS_MAX       4096

static size_t tiles(const struct gemm *gemm)
{
    return (gemm->row_count + TILE_ROWS - 1) / TILE_ROWS;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Returns the distance between neighbouring offsets; 0 if it varies, 1 if there is only one offset. */
static size_t spacing(const uint32_t *offsets, size_t count)
{
    size_t apart = count > 1 ? offsets[1] - offsets[0] : 1;
    for (size_t i = 1; i < count; i++)
        if (offsets[i] - offsets[i - 1] != apart)
            return 0;
    return apart;
}

/* Initialises rows of c with the bias, or with zeros; sgemm then adds to them. Does nothing if gemm->add is
 * set. */
static void begin_rows(const struct gemm *gemm, size_t first, size_t end)
{
    for (size_t i = first; i < end && !gemm->add; i++)
        if (gemm->bias)
            memcpy(gemm->c + i * gemm->c_pitch, gemm->bias, gemm->columns * sizeof(float));
        else
            memset(gemm->c + i * gemm->c_pitch, 0, gemm->columns * sizeof(float));
}

static void call(const struct gemm *gemm, const float *a, bool transposed, size_t pitch, size_t first,
                 size_t rows, size_t begin, size_t steps)
{
    sgemm(CBLAS_ROWS, transposed ? CBLAS_TRANSPOSED : CBLAS_PLAIN, CBLAS_PLAIN, (int)rows, (int)gemm->columns,
          (int)steps, 1, a, (int)pitch, gemm->b + begin * gemm->b_pitch, (int)gemm->b_pitch, 1,
          gemm->c + first * gemm->c_pitch, (int)gemm->c_pitch);
}

/* Computes rows first .. end - 1 of c. Copies the gathered elements of `a`, one part at a time, into a
 * matrix, and multiplies this matrix by `b`. */
static void multiply_copied(const struct gemm *gemm, size_t first, size_t end)
{
    float few[ROOM_VALUES_MIN],
        *many = malloc(ROOM_VALUES * sizeof *many); /* heap, because thread stacks may be small */
    float *room = many ? many : few;
    size_t values = many ? ROOM_VALUES : ROOM_VALUES_MIN, steps_max = least(values, STEPS_MAX);
    for (size_t begin = 0; begin < gemm->step_count; begin += steps_max) {
        size_t steps = least(gemm->step_count - begin, steps_max), most = values / steps;
        for (size_t row = first; row < end; row += most) {
            size_t rows = least(end - row, most);
            for (size_t i = 0; i < rows; i++)
                for (size_t s = 0; s < steps; s++)
                    room[i * steps + s] = gemm->a[gemm->rows[row + i] + gemm->steps[begin + s]];
            call(gemm, room, false, steps, row, rows, begin, steps);
        }
    }
    free(many);
}

static void multiply(const struct gemm *gemm, size_t tile, size_t count)
{
    size_t first = tile * TILE_ROWS, end = least((tile + count) * TILE_ROWS, gemm->row_count);
    size_t down = spacing(gemm->rows, gemm->row_count), along = spacing(gemm->steps, gemm->step_count);
    const float *a = gemm->a + gemm->rows[first] + gemm->steps[0];
    begin_rows(gemm, first, end);
    if (along == 1 && down >= gemm->step_count)
        call(gemm, a, false, down, first, end - first, 0, gemm->step_count);
    else if (down == 1 && along >= gemm->row_count)
        call(gemm, a, true, along, first, end - first, 0, gemm->step_count);
    else
        multiply_copied(gemm, first, end);
    for (size_t i = first; gemm->relu && i < end; i++)
        for (size_t n = 0; n < gemm->columns; n++) {
            float *value = &gemm->c[i * gemm->c_pitch + n];
            *value = *value <= 0 ? 0 : *value;
        }
}

/* ---- The variant ---- */

/* Implements open() of engine_omp_blas. STATUS_UNAVAILABLE if OpenBLAS is missing. */
static enum status omp_blas_open(const struct train *train, const struct resources *resources, void **state)
{
    TRY(blas_probe(resources));
    return omp_net_open(train, resources, (struct gemm_kernels){tiles, multiply}, state);
}

/* The variant reports the instruction set that `train-omp` would use. OpenBLAS chooses its own kernel by the
 * same CPU features. */
TRAINING_BY(variant_train_omp_blas, engine_omp_blas, .threaded = true, .instruction_set = isa_best_name,
            .probe = blas_probe);

/* ---- The engine with our own GEMM ---- */

#define LITTLE_WORK 5e5 /* multiply-adds of a batch's forward pass; this many take about ten microseconds */

/* ---- The barrier ---- */

#define SPINS 1000 /* 10 to 50 microseconds, depending on the CPU */
#if defined(__x86_64__)
#define SPIN() __builtin_ia32_pause()
#else
#define SPIN() ((void)0)
#endif

void barrier_init(struct barrier *barrier)
{
    atomic_init(&barrier->arrived, 0);
    atomic_init(&barrier->passed, 0);
    pthread_mutex_init(&barrier->mutex, NULL);
    pthread_cond_init(&barrier->released, NULL);
}

static void barrier_destroy(struct barrier *barrier)
{
    pthread_cond_destroy(&barrier->released);
    pthread_mutex_destroy(&barrier->mutex);
}

/* OpenMP's own barriers may spin for milliseconds, unless OMP_WAIT_POLICY is passive. If other processes also
 * need the cores, the spinning threads keep the last thread from running. In a measurement with other
 * processes, a training step with OpenMP's barriers took six times as much CPU time. This barrier therefore
 * spins briefly and then sleeps. */
void barrier_wait(struct barrier *barrier)
{
    uint32_t threads = (uint32_t)omp_get_num_threads(), round = atomic_load(&barrier->passed);
    if (threads == 1)
        return;
    if (atomic_fetch_add(&barrier->arrived, 1) + 1 == threads) {
        atomic_store(&barrier->arrived, 0);
        pthread_mutex_lock(&barrier->mutex);
        atomic_store(&barrier->passed, round + 1);
        pthread_cond_broadcast(&barrier->released);
        pthread_mutex_unlock(&barrier->mutex);
        return;
    }
    for (uint32_t spins = 0; spins < SPINS; spins++) {
        if (atomic_load(&barrier->passed) != round)
            return;
        SPIN();
    }
    pthread_mutex_lock(&barrier->mutex);
    while (atomic_load(&barrier->passed) == round)
        pthread_cond_wait(&barrier->released, &barrier->mutex);
    pthread_mutex_unlock(&barrier->mutex);
}

/* ---- Kernels ---- */

/* Each kernel is CPU code for one instruction set. */
static const struct net_kernel *const kernels[ISAS] = {
    [ISA_SCALAR] = &net_kernel_scalar,
#if defined(__x86_64__)
    [ISA_AVX2] = &net_kernel_avx2,
    [ISA_AVX512] = &net_kernel_avx512,
#endif
};

struct gemm_kernels omp_net_gemm_kernels(void)
{
    const struct net_kernel *kernel = kernels[isa_best()];
    return (struct gemm_kernels){kernel->tiles, kernel->multiply};
}

/* ---- Threads ----
 *
 * Training steps run in a parallel region, in which every thread calls the same functions. Worksharing loops
 * and `single` regions divide the work. Barriers separate producers from consumers. */

/* Runs the in-place layers of a block over all rows, forward or backward. */
static void after_rows(struct net *net, const struct block *block, uint32_t epoch, bool training, bool back)
{
    if (block->after == block->after_end && !(back && block->relu))
        return;
    if (net->train->model->transformer) {
        if (training)
            net_drop_paths(net, block, epoch, back);
        return;
    }
#pragma omp for nowait
    for (uint32_t j = 0; j < net->count; j++) {
        struct passing passing = net_passing(net, j, epoch, DATA_TRAIN, training);
        float *values = net_row(net, block, j);
        if (back)
            net_after_backward(net, block, &passing, values, net_deltas(net, block, j));
        else
            net_after(net, block, &passing, values);
    }
    barrier_wait(&net->barrier);
}

/* ---- The loss ---- */

static void take_loss(struct net *net, uint32_t j)
{
    const struct train *train = net->train;
    const struct block *last = &net->blocks[net->block_count - 1];
    const float *logits = net_row(net, last, j);
    const struct target target =
        train_target(train, &net->mix, net->step_numbers, net->step_count, net->fed + j);
    net->losses[j] = sample_loss(train, logits, &target, net->total, net_deltas(net, last, j));
    net->correct[j] = sample_correct(train, logits, &target);
}

/* Adds the results of step `number` to the totals, in the order of the samples. */
static void add_totals(struct net *net, uint64_t number)
{
    double loss = 0;
    for (uint32_t j = 0; j < net->count; j++) {
        loss += net->losses[j];
        net->totals.correct += net->correct[j];
        net->totals.samples += !train_masked(net->train, net->numbers[j]);
    }
    net->totals.loss += loss;
    if (!isfinite(loss) && net->totals.bad_step == TRAIN_FINE)
        net->totals.bad_step = number;
    published_store(&net->published, &net->totals);
}

/* Adds the losses of the samples of step `number` to the totals. Computes the gradients of the logits. Ends
 * with a barrier. */
static void take_losses(struct net *net, uint64_t number)
{
#pragma omp for nowait
    for (uint32_t j = 0; j < net->count; j++)
        take_loss(net, j);
    barrier_wait(&net->barrier);
#pragma omp master
    add_totals(net, number);
}

/* ---- Steps ---- */

/* Runs the forward pass of the samples in net->numbers, up to the logits or the outputs of the stage. Ends
 * with a barrier. */
static void forward(struct net *net, uint32_t epoch, enum data_part part, bool training)
{
    RANGE(FORWARD);
    if (net->by_layer)
        net_layers_forward(net, epoch, part, training);
#pragma omp for schedule(dynamic) nowait
    for (uint32_t j = 0; j < (net->by_layer ? 0 : net->count); j++) {
        const struct passing passing = net_passing(net, j, epoch, part, training);
        net_sample_forward(net, &net->workers[omp_get_thread_num()], &passing);
    }
    barrier_wait(&net->barrier);
    for (uint32_t i = net->flat + 1; i < net->block_count; i++) {
        if (net->blocks[i].kind == BLOCK_LINEAR)
            net_linear_forward(net, &net->blocks[i]);
        else
            net_tokens(net, &net->blocks[i], false);
        after_rows(net, &net->blocks[i], epoch, training, false);
    }
}

/* Runs the backward pass of the blocks up to FLAT, sample by sample. Each chunk of consecutive samples has
 * its own sums of gradients. If a step has several micro-batches or parts, the sums of all chunks are added
 * up only after the last micro-batch or part. */
static void samples_backward(struct net *net, uint32_t epoch, enum gradients_of of)
{
    uint32_t count = net->count, size = (count + NET_CHUNKS_MAX - 1) / NET_CHUNKS_MAX;
    size = size < NET_CHUNK ? NET_CHUNK : size;
    uint32_t chunks = (count + size - 1) / size;
#pragma omp for schedule(dynamic) nowait
    for (uint32_t chunk = 0; chunk < chunks; chunk++) {
        float *sums = net->sums + chunk * net->chunk_values;
        uint32_t begin = chunk * size, end = begin + size < count ? begin + size : count;
        if (!net->accumulates)
            memset(sums, 0, net->chunk_values * sizeof *sums);
        for (uint32_t j = begin; j < end; j++) {
            const struct passing passing = net_passing(net, j, epoch, DATA_TRAIN, true);
            net_sample_backward(net, &net->workers[omp_get_thread_num()], &passing, of, sums);
        }
    }
    barrier_wait(&net->barrier);
    if (!net->accumulates)
        net_gather_sums(net, chunks);
}

/* Runs the backward pass of the current samples. Ends with a barrier. */
static void backward(struct net *net, uint32_t epoch, enum gradients_of of)
{
    RANGE(BACKWARD);
    for (uint32_t i = net->block_count - 1; i > net->flat; i--) {
        if (of & GRADIENTS_OF_INPUTS)
            after_rows(net, &net->blocks[i], epoch, true, true);
        if (net->blocks[i].kind == BLOCK_LINEAR)
            net_linear_backward(net, &net->blocks[i], of);
        else
            net_tokens(net, &net->blocks[i], true);
    }
    if (net->flat == 1)
        return;
    if (of & GRADIENTS_OF_INPUTS)
        after_rows(net, &net->blocks[net->flat], epoch, true, true);
    if (net->by_layer)
        net_layers_backward(net, epoch);
    else
        samples_backward(net, epoch, of);
}

/* Adds up the gradients of all ranks. If engines of other ranks use another layout, passes the gradients in
 * the layout of the model's arena. `status` is the status of this rank's step so far. */
static enum status add_up(struct net *net, enum status status)
{
    struct exchange *exchange = net->train->exchange;
    if (!net->common)
        return exchange_sum(exchange, status, net->gradients, net->arena_values);
    net_give_arena(net, net->gradients, net->common);
    TRY(exchange_sum(exchange, status, net->common, net->train->model->arena_values));
    net_take_arena(net, net->common, net->gradients);
    return STATUS_OK;
}

/* Only the master thread may call the exchange. */
static void exchange(struct net *net)
{
    if (!net->train->exchange)
        return;
#pragma omp master
    if (net->exchanged == STATUS_OK) /* a sum of a normalisation may have failed, on all ranks */
        net->exchanged = add_up(net, STATUS_OK);
    barrier_wait(&net->barrier);
}

/* Makes a part of this rank's samples the current batch. */
static void choose_part(struct net *net, uint32_t epoch, uint32_t step, uint32_t part)
{
    const struct share share = train_share(net->train, step), own = train_part(net->train, &share, part);
    net->fed = (uint32_t)(own.first - share.first);
    net->numbers = net->step_numbers + net->fed;
    net->step_count = (uint32_t)share.count;
    net->count = (uint32_t)own.count;
    net->total = (uint32_t)own.total;
    net->adds = part > 0;
    net->mix = train_mix(net->train, epoch, step);
}

/* Computes the loss and the gradients of a part of the samples of this rank. The part is not empty. */
static void compute_part(struct net *net, uint32_t epoch, uint32_t step, uint32_t part)
{
#pragma omp master
    choose_part(net, epoch, step, part);
    if (net->accumulates && part == 0)
        net_clear_sums(net);
    barrier_wait(&net->barrier);
    forward(net, epoch, DATA_TRAIN, true);
    take_losses(net, (uint64_t)epoch * train_steps(net->train) + step);
    backward(net, epoch, GRADIENTS_OF_BOTH);
}

/* Computes the gradients of the samples of this rank. A rank without samples, for example in a short last
 * step, contributes zeros to the exchange. */
static void compute_gradients(struct net *net, uint32_t epoch, uint32_t step)
{
    const struct share share = train_share(net->train, step);
    if (share.count == 0) {
#pragma omp master
        {
            net->count = 0;
            net->total = (uint32_t)share.total;
        }
        barrier_wait(&net->barrier);
        if (net->train->sync_batch_norm && net->train->exchange)
            net_layers_idle(net);
#pragma omp master
        memset(net->gradients, 0, net->arena_values * sizeof *net->gradients);
        barrier_wait(&net->barrier);
        return;
    }
    /* Every thread looks for the first empty part by itself, because net->count may already belong to the
     * next part. */
    for (uint32_t part = 0; part < train_parts(net->train); part++) {
        if (train_part(net->train, &share, part).count == 0)
            break;
        compute_part(net, epoch, step, part);
    }
    if (net->accumulates && net->flat > 1)
        net_gather_sums(net, net->chunks);
}

static void make_step(struct net *net, const struct draw_order *order, uint32_t epoch, uint32_t step)
{
    uint64_t number = (uint64_t)epoch * train_steps(net->train) + step;
#pragma omp master
    if (!feed_computes(&net->feed)) /* otherwise omp_steps() has filled step_numbers */
        train_batch(net->train, order, step, net->step_numbers);
    compute_gradients(net, epoch, step);
    exchange(net);
    if (net->exchanged == STATUS_OK)
        net_update(net, number);
}

/* ---- A stage of a pipeline (struct stage_functions) ----
 *
 * Each micro-batch has its own rows in the arrays of the batch, from net->begin on. Each chunk's sums of
 * gradients accumulate over all micro-batches of a step. */

/* Makes `micro` the current samples. */
static void choose_micro(struct net *net, const struct micro *micro)
{
    const struct train *train = net->train;
    const uint32_t entries = micro->training ? train_entries(train, micro->count) : micro->count;
    net->begin = micro->slot * net->most;
    net->count = net->step_count = micro->count;
    net->total = micro->total;
    net->adds = micro->index > 0;
    if (micro->training)
        net->mix = train_mix(train, micro->epoch, (uint32_t)(micro->step % train_steps(train)));
    memcpy(net->numbers, micro->numbers, entries * sizeof *net->numbers);
}

/* take_rows() copies an array in C order into the current rows of `rows`, an array like block->rows.
 * give_rows() copies the current rows into an array in C order. */
static void take_rows(const struct net *net, const struct block *block, const float *from, float *rows)
{
    const size_t values = block->row_values, first = (size_t)net->begin * block->tokens;
#pragma omp for nowait
    for (size_t row = 0; row < (size_t)net->count * block->tokens; row++)
        memcpy(rows + (first + row) * block->out_pitch, from + row * values, values * sizeof *rows);
}

static void give_rows(const struct net *net, const struct block *block, const float *rows, float *into)
{
    const size_t values = block->row_values, first = (size_t)net->begin * block->tokens;
#pragma omp for nowait
    for (size_t row = 0; row < (size_t)net->count * block->tokens; row++)
        memcpy(into + row * values, rows + (first + row) * block->out_pitch, values * sizeof *into);
}

static enum status stage_forward(void *state, const struct micro *micro, const void *inputs, void *outputs)
{
    struct net *net = state;
    const struct block *last = &net->blocks[net->block_count - 1];
    choose_micro(net, micro);
    net->inputs = inputs;
    if (!inputs && micro->training)
        TRY(feed_step(&net->feed, micro->epoch, feed_micro(net->train, micro), micro->numbers, micro->count));
#pragma omp parallel num_threads(net->threads)
    {
        forward(net, micro->epoch, micro->part, micro->training);
        if (outputs)
            give_rows(net, last, last->rows, outputs);
        else
            take_losses(net, micro->step);
    }
    return STATUS_OK;
}

static enum status stage_backward(void *state, const struct micro *micro, enum gradients_of of,
                                  const void *deltas, void *in_deltas)
{
    struct net *net = state;
    const struct block *last = &net->blocks[net->block_count - 1], *flat = &net->blocks[net->flat];
    choose_micro(net, micro);
    net->in_deltas = in_deltas;
#pragma omp parallel num_threads(net->threads)
    {
        if (deltas)
            take_rows(net, last, deltas, last->deltas);
        if (!net->adds && of & GRADIENTS_OF_WEIGHTS)
            net_clear_sums(net);
        barrier_wait(&net->barrier);
        backward(net, micro->epoch, of);
        if (in_deltas && net->flat == 1) /* with blocks before FLAT, backward() writes in_deltas */
            give_rows(net, flat, flat->deltas, in_deltas);
    }
    return STATUS_OK;
}

static enum status stage_clear(void *state)
{
    struct net *net = state;
    memset(net->gradients, 0, net->arena_values * sizeof *net->gradients);
#pragma omp parallel num_threads(net->threads)
    net_clear_sums(net);
    return STATUS_OK;
}

static enum status stage_sum(void *state, bool *overflowed)
{
    struct net *net = state;
    (void)overflowed;
    if (net->flat > 1) {
#pragma omp parallel num_threads(net->threads)
        net_gather_sums(net, net->chunks);
    }
    return net->train->exchange ? add_up(net, STATUS_OK) : STATUS_OK;
}

static enum status stage_update(void *state, uint64_t step, bool overflowed)
{
    struct net *net = state;
    (void)overflowed;
#pragma omp parallel num_threads(net->threads)
    net_update(net, step);
    return STATUS_OK;
}

static const struct stage_functions stages = {.value_bytes = sizeof(float),
                                              .forward = stage_forward,
                                              .backward = stage_backward,
                                              .clear = stage_clear,
                                              .sum = stage_sum,
                                              .update = stage_update};

/* ---- The engine ---- */

static void omp_close(void *state)
{
    struct net *net = state;
    feed_close(&net->feed);
    net_free(net);
    barrier_destroy(&net->barrier);
    free(state);
}

enum status omp_net_open(const struct train *train, const struct resources *resources,
                         struct gemm_kernels gemm, void **state)
{
    struct net *net = *state = calloc(1, sizeof *net);
    TRY(ALLOCATED(net, "omp: out of memory"));
    net->train = train;
    net->kernel = kernels[isa_best()];
    net->gemm = gemm;
    /* A small batch is computed on one thread: it takes less time than the synchronisation of several
     * threads, especially if a sleeping thread must be woken. */
    const struct stage *stage = train->stage;
    net->most = train_part_max(train);
    net->accumulates = stage || train_parts(train) > 1;
    net->batch = stage ? stage->capacity * stage->slots : net->most;
    bool little = net->most * train->model->multiplications < LITTLE_WORK;
    net->threads = little ? 1 : resources->threads;
    net->chunks = (net->most + NET_CHUNK - 1) / NET_CHUNK;
    net->chunks = net->chunks < NET_CHUNKS_MAX ? net->chunks : NET_CHUNKS_MAX;
    net->totals.bad_step = TRAIN_FINE;
    net->mix.share = 1;
    barrier_init(&net->barrier);
    TRY(net_plan(net));
    return feed_open(train, resources, &net->feed);
}

static enum status omp_open(const struct train *train, const struct resources *resources, void **state)
{
    return omp_net_open(train, resources, omp_net_gemm_kernels(), state);
}

static enum status omp_set(void *state, const struct train_state *from)
{
    struct net *net = state;
    net_take_arena(net, from->parameters, net->parameters);
    if (!net->train->forward_only) {
        net_take_arena(net, from->m, net->m);
        net_take_arena(net, from->v, net->v);
    }
    if (net->ema)
        net_take_arena(net, from->ema ? from->ema : from->parameters, net->ema);
#pragma omp parallel num_threads(net->threads)
    net_prepare_weights(net);
    return STATUS_OK;
}

static enum status omp_get(void *state, struct train_state *into)
{
    const struct net *net = state;
    net_give_arena(net, net->parameters, into->parameters);
    net_give_arena(net, net->m, into->m);
    net_give_arena(net, net->v, into->v);
    if (net->ema && into->ema)
        net_give_arena(net, net->ema, into->ema);
    return STATUS_OK;
}

static enum status omp_steps(void *state, uint32_t epoch, uint32_t first, uint32_t count)
{
    struct net *net = state;
    const struct draw_order order = train_order(net->train, epoch);
    /* If samples are generated, read or augmented, the same threads do this between two steps. A parallel
     * region then covers a single step. */
    uint32_t at_once = feed_computes(&net->feed) ? 1 : count;
    for (uint32_t done = 0; done < count; done += at_once) {
        uint32_t own = train_batch(net->train, &order, first + done, net->step_numbers);
        enum status status = feed_step(&net->feed, epoch, first + done, net->step_numbers, own);
        if (status != STATUS_OK)
            return net->train->sync_batch_norm && net->train->exchange ? net_layers_fail(net, status)
                                                                       : add_up(net, status);
#pragma omp parallel num_threads(net->threads)
        for (uint32_t i = done; i < done + at_once && net->exchanged == STATUS_OK; i++)
            make_step(net, &order, epoch, first + i);
        TRY(net->exchanged);
    }
    return STATUS_OK;
}

static enum status omp_totals(void *state, struct train_totals *totals)
{
    struct net *net = state;
    *totals = net->totals;
    net->totals = (struct train_totals){.bad_step = TRAIN_FINE};
    published_store(&net->published, &net->totals);
    for (int i = 0; i < net->threads; i++) {
        totals->data_s += net->workers[i].data_s / net->threads;
        net->workers[i].data_s = 0;
    }
    feed_totals(&net->feed, totals);
    totals->data_s += totals->stall_s;
    return STATUS_OK;
}

static void omp_progress(const void *state, struct train_progress *progress)
{
    published_load(&((const struct net *)state)->published, progress);
}

static enum status omp_gradients(void *state, float *gradients)
{
    const struct net *net = state;
    net_give_arena(net, net->gradients, gradients);
    return STATUS_OK;
}

/* Evaluates samples first .. first + count - 1; `count` is at most the batch size. */
static void evaluate_batch(struct net *net, enum data_part part, uint32_t first, uint32_t count,
                           float *logits)
{
    const struct block *last = &net->blocks[net->block_count - 1];
    uint32_t classes = net->train->model->classes;
#pragma omp master
    {
        net->count = count;
        net->numbers = net->step_numbers;
        for (uint32_t j = 0; j < count; j++)
            net->numbers[j] = first + j;
    }
    barrier_wait(&net->barrier);
    forward(net, 0, part, false);
#pragma omp for nowait
    for (uint32_t j = 0; j < count; j++)
        memcpy(logits + (size_t)j * classes, last->rows + j * last->out_pitch, classes * sizeof *logits);
    barrier_wait(&net->barrier);
}

static enum status omp_evaluate(void *state, enum data_part part, uint32_t first, uint32_t count,
                                float *logits)
{
    struct net *net = state;
#pragma omp parallel num_threads(net->threads)
    for (uint32_t i = 0; i < count; i += net->batch) {
        uint32_t size = count - i < net->batch ? count - i : net->batch;
        evaluate_batch(net, part, first + i, size, logits + (size_t)i * net->train->model->classes);
    }
    return STATUS_OK;
}

static uint64_t omp_memory_bytes(const void *state)
{
    const struct net *net = state;
    return net->bytes + feed_memory_bytes(&net->feed);
}

#define ENGINE(name_, open_)                                                                          \
    {                                                                                                 \
        .name = name_, .bounds = ENGINE_BOUNDS_FLOAT, .feeds = true, .augments = true,                \
        .gradients_in = GRADIENTS_IN_HOST, .savings = {.pooled_gradients = true}, .open = open_,      \
        .close = omp_close, .set = omp_set, .get = omp_get, .steps = omp_steps, .totals = omp_totals, \
        .progress = omp_progress, .gradients = omp_gradients, .evaluate = omp_evaluate,               \
        .memory_bytes = omp_memory_bytes, .stages = &stages                                           \
    }

const struct engine engine_omp = ENGINE("omp", omp_open);
const struct engine engine_omp_blas = ENGINE("omp-blas", omp_blas_open);

/* ---- The variants ---- */

TRAINING_BY(variant_train_omp, engine_omp, .threaded = true, .instruction_set = isa_best_name);
INFERRING_BY(variant_infer_omp, engine_omp, .threaded = true, .instruction_set = isa_best_name);
