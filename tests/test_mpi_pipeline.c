/* Tests training on a pipeline under mpirun. With any number of stages and micro-batches, and with any
 * schedule, the gradients must equal those of one rank. Also tests rows, checkpoints, refusals, and failures
 * of one rank. Skipped if the build has no MPI or mpirun is missing. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "cpu_engines.h"
#include "machine/comm.h"
#include "train/pipeline.h"
#include "train_support.h"

#include "mpi_train.h" /* included last, because its `out` and `status` would shadow names in other headers */

TestSuite(mpi_pipeline, .init = start, .fini = stop, .timeout = 240);

/* ---- Messages ---- */

#define STAGE "FDSL_TEST_STAGE" /* environment variable of ranks; its value names the test */

/* Lets this process open no more files, or again as many as before. */
static void limit_files(bool limited)
{
    static struct rlimit before;
    if (limited) {
        int lowest_free = open("/dev/null", O_RDONLY);
        getrlimit(RLIMIT_NOFILE, &before);
        setrlimit(RLIMIT_NOFILE, &(struct rlimit){(rlim_t)lowest_free, before.rlim_max});
        close(lowest_free);
    } else
        setrlimit(RLIMIT_NOFILE, &before);
}

/* Each rank sends messages to the next rank. The sender may be ahead of the receiver by as many messages as
 * there are buffers. With `apart`, the last rank cannot open shared memory, as in another container. Returns
 * an exit status. */
static int pass_messages(bool apart)
{
    enum { BUFFERS = 3, MESSAGES = 20 };
    static const size_t counts[] = {1, 1023, 100003};
    const int rank = comm_rank(), last = comm_size() - 1;
    int wrong = 0;
    for (size_t c = 0; !wrong && c < COUNT_OF(counts); c++) {
        size_t bytes = counts[c] * sizeof(int);
        const struct comm_channel_spec specs[] = {{rank - 1, false, rank > 0 ? bytes : 0, BUFFERS},
                                                  {rank + 1, true, rank < last ? bytes : 0, BUFFERS}};
        struct comm_channel *channels[2], *in, *next;
        if (apart && rank == last)
            limit_files(true);
        wrong |= comm_channels_open(specs, 2, channels) != STATUS_OK;
        if (apart && rank == last)
            limit_files(false);
        in = channels[0], next = channels[1];
        for (int i = 0; !wrong && i < MESSAGES; i++) {
            int *to = NULL, *from = NULL;
            wrong |= next && comm_channel_room(next, (void **)&to) != STATUS_OK;
            for (size_t j = 0; !wrong && next && j < counts[c]; j++)
                to[j] = i + (int)j;
            wrong |= next && comm_channel_send(next, bytes) != STATUS_OK;
            wrong |= in && comm_channel_receive(in, (void **)&from) != STATUS_OK;
            for (size_t j = 0; !wrong && in && j < counts[c]; j++)
                wrong |= from[j] != i + (int)j;
        }
        comm_channel_close(in);
        comm_channel_close(next);
        wrong |= comm_agree(STATUS_OK) != STATUS_OK; /* waits until all ranks have closed their channels */
    }
    return wrong;
}

/* ---- Gradients ---- */

#define EPOCHS 2

/* The results of a training run. */
struct outcome {
    struct train_state end;
    float *gradients, *logits;
    struct train_totals totals;
};

static void outcome_new(const struct net *net, struct outcome *outcome)
{
    bool room = train_state_new(net->model.arena_values, &outcome->end);
    outcome->gradients = calloc(net->model.arena_values, sizeof(float));
    outcome->logits = calloc((size_t)net->data.sets[DATA_TEST].count * net->model.classes, sizeof(float));
    if (!room || !outcome->gradients || !outcome->logits)
        abort();
}

static void outcome_free(struct outcome *outcome)
{
    train_state_free(&outcome->end);
    free(outcome->gradients);
    free(outcome->logits);
}

static enum status train_with(const struct engine *engine, const struct net *net, struct outcome *outcome)
{
    const struct resources resources = {.threads = 1};
    const struct train_state begin = {net->initial, net->zeros, net->zeros, {0, 0}, NULL};
    void *state = NULL;
    TRY(engine->open(&net->train, &resources, &state));
    TRY(engine->set(state, &begin));
    for (uint32_t epoch = 0; epoch < EPOCHS; epoch++)
        TRY(engine->steps(state, epoch, 0, train_steps(&net->train)));
    TRY(engine->totals(state, &outcome->totals));
    TRY(engine->gradients(state, outcome->gradients));
    TRY(engine->evaluate(state, DATA_TEST, 0, net->data.sets[DATA_TEST].count, outcome->logits));
    TRY(engine->get(state, &outcome->end));
    engine->close(state);
    return STATUS_OK;
}

/* Returns the largest relative_error() of the arrays of two outcomes; 0 if all arrays are equal. */
static double compare(const struct net *net, const struct outcome *mine, const struct outcome *wanted)
{
    const size_t values = net->model.arena_values;
    double worst = relative_error(mine->gradients, wanted->gradients, values);
    worst = worse(worst, relative_error(mine->end.parameters, wanted->end.parameters, values));
    worst = worse(worst, relative_error(mine->end.m, wanted->end.m, values));
    return worse(worst, relative_error(mine->logits, wanted->logits,
                                       (size_t)net->data.sets[DATA_TEST].count * net->model.classes));
}

/* Trains on a pipeline with every schedule, and twice with the last one. A transformer has no ZB-H1. All runs
 * must be bit-identical. Returns the largest relative error of the arrays. */
static double train_piped(const struct engine *engine, struct net *net, uint32_t stages, uint32_t micros,
                          const struct outcome *wanted)
{
    const struct engine piped = pipeline_engine(engine);
    const int schedules = net->model.transformer ? PIPE_ZB_H1 : PIPE_ZB_H1 + 1;
    double worst = 0;
    struct outcome first;
    outcome_new(net, &first);
    net->train.rank = (uint32_t)comm_rank() / stages;
    net->train.ranks = (uint32_t)comm_size() / stages;
    for (int run = 0; run <= schedules; run++) {
        const int schedule = run < schedules ? run : schedules - 1;
        const struct pipeline_plan plan = {engine, (enum pipe_schedule)schedule, stages, micros, 0, 0};
        struct outcome mine;
        outcome_new(net, &mine);
        net->train.pipeline = &plan;
        if (train_with(&piped, net, run ? &mine : &first) != STATUS_OK)
            worst = INFINITY;
        net->train.pipeline = NULL;
        const struct outcome *now = run ? &mine : &first;
        worst = worse(worst, compare(net, now, wanted));
        worst = worse(worst, run && compare(net, &mine, &first) != 0 ? INFINITY : 0);
        uint64_t samples = now->totals.samples;
        worst = worse(worst,
                      comm_sum(&samples, 1) != STATUS_OK || samples != wanted->totals.samples ? INFINITY : 0);
        outcome_free(&mine);
    }
    net->train.rank = net->train.ranks = 0;
    outcome_free(&first);
    return worst;
}

/* Compares a pipeline with one rank, on 11 samples in batches of `batch`, for several numbers of
 * micro-batches; with a transformer or replicas, for one number. The last step has fewer samples. The
 * reference adds up samples one by one, so its results must be bit-identical, unless there are replicas.
 * train-omp differs by a rounding error of about 1e-7. A sample that is left out, repeated or weighted
 * wrongly changes the gradients by more than 1e-2. */
static int expect_same_training(const struct engine *engine, const struct model_table *table,
                                struct shape input, uint32_t stages, uint32_t batch, struct mixing mixing)
{
    static const uint32_t micros[] = {3, 1, 8};
    struct net net;
    struct outcome wanted;
    double bound = strcmp(engine->name, "naive") == 0 && stages == (uint32_t)comm_size() ? 0 : 1e-5;
    int wrong = 0;
    net_open(&net, engine, table, input, 4, 11, batch, 0.1f);
    net.train.augment = (struct augment){.shift = 1, .flip = true, .erasing = 0.5f};
    net.train.mixing = mixing;
    outcome_new(&net, &wanted);
    bool trained = train_with(engine, &net, &wanted) == STATUS_OK;
    const bool few = net.model.transformer || stages != (uint32_t)comm_size();
    for (size_t m = 0; m < (few ? 1 : COUNT_OF(micros)); m++) {
        double off = trained ? train_piped(engine, &net, stages, micros[m], &wanted) : INFINITY;
        if (!(off <= bound))
            fprintf(stderr, "%s, %s, %u stages on %d ranks, batch %u, %u micro-batches: off by %g (%s)\n",
                    engine->name, table->name, stages, comm_size(), batch, micros[m], off, status_text());
        wrong |= !(off <= bound);
    }
    outcome_free(&wanted);
    net_close(&net);
    return wrong;
}

#define CONV(out)                                                                        \
    {                                                                                    \
        .kind = LAYER_CONV, .channels = out, .kernel = {1, 3, 3}, .padding = { 0, 1, 1 } \
    }
#define HALVE                                     \
    {                                             \
        .kind = LAYER_POOL, .kernel = { 1, 2, 2 } \
    }
#define BLOCK(out)                                                              \
    CONV(out), {.kind = LAYER_RELU}, CONV(out), {.kind = LAYER_ADD, .back = 4}, \
    {                                                                           \
        .kind = LAYER_RELU                                                      \
    }

/* The layers of cnn and cnn-fdsl with fewer channels, which take less time */
LAYERS(narrow_cnn, false, CONV(5), {.kind = LAYER_RELU}, CONV(7), {.kind = LAYER_RELU}, HALVE,
       {.kind = LAYER_DROPOUT, .rate = 0.25f}, {.kind = LAYER_LINEAR, .channels = 11}, {.kind = LAYER_RELU},
       {.kind = LAYER_DROPOUT, .rate = 0.5f}, {.kind = LAYER_LINEAR});
LAYERS(narrow_blocks, false, CONV(3), {.kind = LAYER_RELU}, HALVE, BLOCK(3), CONV(5), {.kind = LAYER_RELU},
       HALVE, BLOCK(5), CONV(6), {.kind = LAYER_RELU}, HALVE, BLOCK(6), {.kind = LAYER_MEAN},
       {.kind = LAYER_LINEAR});

#define PLAIN(kind_)  \
    {                 \
        .kind = kind_ \
    }
#define WIDE(out)                                   \
    {                                               \
        .kind = LAYER_TOKEN_LINEAR, .channels = out \
    }
#define DROP                                  \
    {                                         \
        .kind = LAYER_DROP_PATH, .rate = 0.3f \
    }
#define SUM                          \
    {                                \
        .kind = LAYER_ADD, .back = 6 \
    }
#define VIT_BLOCK                                                                           \
    PLAIN(LAYER_NORM), WIDE(18), {.kind = LAYER_ATTENTION, .heads = 2}, WIDE(6), DROP, SUM, \
        PLAIN(LAYER_NORM), WIDE(11), PLAIN(LAYER_GELU), WIDE(6), DROP, SUM

/* A vision transformer of four blocks */
LAYERS(narrow_vit, false, {.kind = LAYER_PATCHES, .channels = 6, .kernel = {1, 3, 2}}, PLAIN(LAYER_TOKENS),
       VIT_BLOCK, VIT_BLOCK, VIT_BLOCK, VIT_BLOCK, PLAIN(LAYER_SELECT), PLAIN(LAYER_NORM),
       PLAIN(LAYER_LINEAR));

/* Tests lenet, a network with dropout, a network with additions and a transformer. With some cuts, an
 * addition uses the input of a stage. The mixed samples of a micro-batch have partners in other
 * micro-batches. */
static int train_stages(uint32_t stages)
{
    const struct mixing none = {0}, mixup = {.mixup = 0.8}, both = {.mixup = 0.8, .cutmix = 1};
    int wrong = 0;
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++) {
        const struct engine *engine = cpu_engines[e];
        const bool replicas = stages != (uint32_t)comm_size();
        if (!replicas) {
            wrong |=
                expect_same_training(engine, &model_tables[1], (struct shape){1, 1, 16, 16}, stages, 7, both);
            wrong |= expect_same_training(engine, &narrow_cnn, (struct shape){3, 1, 8, 8}, stages, 9, none);
        }
        wrong |= expect_same_training(engine, &narrow_blocks, (struct shape){1, 1, 9, 9}, stages, 5, mixup);
        wrong |= expect_same_training(engine, &narrow_vit, (struct shape){1, 1, 9, 6}, stages, 7, both);
    }
    return wrong;
}

/* Device memory that processes share, imitated by shared memory of the host. `maps` counts the mappings. */
static int shares, maps;

static enum status open_shared(const char *name, size_t bytes, void **memory)
{
    struct stat now;
    const int file = shm_open(name, bytes ? O_CREAT | O_RDWR : O_RDWR, 0600);
    if (file < 0 || (bytes && ftruncate(file, (off_t)bytes) != 0) || fstat(file, &now) != 0)
        abort();
    *memory = mmap(NULL, (size_t)now.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return *memory != MAP_FAILED ? STATUS_OK : STATUS_FAILED;
}

static enum status imitated_share(size_t bytes, void **memory, struct stage_handle *handle)
{
    snprintf(handle->bytes, sizeof handle->bytes, "/fdsl-stage-%d-%d", (int)getpid(), shares++);
    return open_shared(handle->bytes, bytes, memory);
}

static enum status imitated_map(const struct stage_handle *handle, void **memory)
{
    TRY(open_shared(handle->bytes, 0, memory));
    maps++;
    return shm_unlink(handle->bytes) == 0 ? STATUS_OK : STATUS_FAILED;
}

static enum status failing_map(const struct stage_handle *handle, void **memory)
{
    TRY(imitated_map(handle, memory));
    return comm_rank() == 1 && maps % 2 == 0 ? status_set(STATUS_UNAVAILABLE, "no peer access") : STATUS_OK;
}

static void imitated_release(void *memory, bool mapped)
{
    (void)memory, (void)mapped; /* the process ends soon */
}

/* Stages whose messages have their values in device memory, or, if one rank cannot map it, in host memory. */
static int train_on_devices(bool fails)
{
    struct stage_functions functions = *engine_naive.stages;
    struct engine engine = engine_naive;
    functions.share = imitated_share;
    functions.map = fails ? failing_map : imitated_map;
    functions.release = imitated_release;
    engine.stages = &functions;
    const int wrong = expect_same_training(&engine, &narrow_vit, (struct shape){1, 1, 9, 6},
                                           (uint32_t)comm_size(), 7, (struct mixing){.mixup = 0.8});
    return wrong || maps == 0;
}

/* Runs before main() in all processes. A process that is a rank does its work here and exits. */
__attribute__((constructor)) static void be_rank(void)
{
    const char *name = getenv(STAGE);
    if (!name)
        return;
    int wrong = comm_open() != STATUS_OK;
    if (!wrong)
        comm_shares_memory = !strstr(name, "through MPI");
    if (!wrong)
        wrong = strstr(name, "messages") ? pass_messages(strstr(name, "apart"))
                : strstr(name, "pairs")  ? train_stages(2)
                : strstr(name, "device") ? train_on_devices(strstr(name, "one"))
                                         : train_stages((uint32_t)comm_size());
    comm_close();
    _exit(wrong);
}

static void run_ranks(const char *name, int ranks)
{
    char self[PATH_MAX] = "";
    cr_assert(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    shell("timeout 200 mpirun --bind-to none -x '" STAGE "=%s' -n %d %s", name, ranks, self);
    cr_expect_eq(status, 0, "%d ranks: exit %d: %s", ranks, status, err);
}

Test(mpi_pipeline, messages_arrive_in_order)
{
    char words[80];
    for (int ranks = 2; ranks <= 3; ranks++) {
        run_ranks("messages in shared memory", ranks);
        run_ranks("messages through MPI", ranks);
        run_ranks("messages to a rank apart", ranks);
        snprintf(words, sizeof words, "cannot share memory with rank %d, so MPI copies its messages",
                 ranks - 2);
        cr_expect(strstr(err, words), "%d ranks: %s", ranks, err);
    }
}

Test(mpi_pipeline, one_stage_trains_what_one_rank_trains)
{
    run_ranks("training", 1);
}

Test(mpi_pipeline, two_stages_train_what_one_rank_trains)
{
    run_ranks("training", 2);
}

Test(mpi_pipeline, two_stages_train_the_same_through_mpi)
{
    run_ranks("training through MPI", 2);
}

Test(mpi_pipeline, three_stages_train_what_one_rank_trains)
{
    run_ranks("training", 3);
}

Test(mpi_pipeline, four_stages_train_what_one_rank_trains)
{
    run_ranks("training", 4);
}

Test(mpi_pipeline, stages_train_the_same_with_messages_in_device_memory)
{
    run_ranks("training on devices", 3);
    run_ranks("training, but one device cannot be mapped", 3);
    cr_expect(strstr(err, "messages pass through host memory"), "%s", err);
}

Test(mpi_pipeline, two_replicas_of_two_stages_train_what_one_rank_trains)
{
    run_ranks("training in pairs", 4);
}

/* ---- Micro-batches of any size ---- */

#define BATCH 13

/* Computes the gradients of a step in micro-batches of `size` samples, on a stage that contains the
 * whole network. */
static void find_gradients(const struct engine *engine, void *state, uint32_t size, float *gradients)
{
    static const uint32_t numbers[BATCH] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    for (uint32_t first = 0, index = 0; first < BATCH; first += size) {
        const struct micro micro = {.index = index++,
                                    .training = true,
                                    .numbers = numbers + first,
                                    .first = first,
                                    .count = BATCH - first < size ? BATCH - first : size,
                                    .total = BATCH};
        must(engine->stages->forward(state, &micro, NULL, NULL));
        must(engine->stages->backward(state, &micro, GRADIENTS_OF_INPUTS, NULL, NULL));
        must(engine->stages->backward(state, &micro, GRADIENTS_OF_WEIGHTS, NULL, NULL));
    }
    must(engine->gradients(state, gradients));
}

/* Both engines add up the gradients of a linear layer sample by sample, so the gradients must be
 * bit-identical for all micro-batch sizes. */
static void expect_same_gradients(const struct engine *engine, struct net *net)
{
    const struct stage stage = {.first = true, .last = true, .splits = true, .slots = 1, .capacity = BATCH};
    const size_t values = net->model.arena_values;
    float *now = calloc(2 * values, sizeof *now), *whole = now + values;
    net->train.stage = &stage;
    net_reopen(net, engine);
    find_gradients(engine, net->state, BATCH, whole);
    for (uint32_t size = 1; size < BATCH; size++) {
        find_gradients(engine, net->state, size, now);
        cr_expect(memcmp(now, whole, values * sizeof *now) == 0, "%s, micro-batches of %u", engine->name,
                  size);
    }
    free(now);
}

Test(mpi_pipeline, micro_batches_do_not_change_the_gradients_of_a_linear_layer)
{
    struct net net;
    net_open(&net, &engine_naive, &model_tables[0], (struct shape){1, 1, 9, 7}, 5, BATCH, BATCH, 0.1f);
    expect_same_gradients(&engine_naive, &net);
#ifdef _OPENMP
    expect_same_gradients(&engine_omp, &net);
#endif
    net_close(&net);
}

/* ---- Cuts ---- */

Test(mpi_pipeline, cuts_keep_the_most_expensive_slice_cheap)
{
    static const uint32_t starts[] = {0, 3, 8, 11, 16, 20};
    struct pipe_costs costs = {.pieces = 5, .seconds = {1, 4, 2, 2, 3}};
    static const uint32_t wanted[5][6] = {
        {0, 20}, {0, 11, 20}, {0, 8, 16, 20}, {0, 3, 8, 16, 20}, {0, 3, 8, 11, 16, 20}};
    for (uint32_t stages = 1; stages <= 5; stages++) {
        uint32_t begins[6] = {0};
        must(pipe_choose(starts, &costs, stages, begins));
        cr_expect(memcmp(begins, wanted[stages - 1], (stages + 1) * sizeof *begins) == 0,
                  "%u stages: %u %u %u %u %u %u", stages, begins[0], begins[1], begins[2], begins[3],
                  begins[4], begins[5]);
    }
}

/* Three stages keep 3, 2 and 1 micro-batches. Each piece needs 10 bytes and 1 per micro-batch; two pieces in
 * a stage need 2 bytes less. */
Test(mpi_pipeline, cuts_respect_the_memory_of_each_stage)
{
    static const uint32_t starts[] = {0, 1, 2, 3, 4, 5, 6};
    struct pipe_costs costs = {.pieces = 6, .limited = true, .seconds = {1, 1, 1, 1, 1, 1}, .joint_bytes = 2};
    static const struct {
        double limits[3];
        uint32_t begins[4]; /* begins[3] is 0 if nothing fits */
    } cases[] = {
        {{1e9, 1e9, 1e9}, {0, 2, 4, 6}}, {{24, 23, 1e9}, {0, 2, 4, 6}}, /* 2 (10 + 3) - 2 = 24 bytes */
        {{24, 21, 1e9}, {0, 2, 3, 6}},                                  /* 2 (10 + 2) - 2 = 22 bytes */
        {{23, 1e9, 30}, {0, 1, 4, 6}},   {{23, 21, 1e9}, {0, 1, 2, 6}}, {{12, 1e9, 1e9}, {0}}};
    for (uint32_t i = 0; i < 6; i++) {
        costs.bytes[i] = 11;
        costs.slot_bytes[i] = 1;
    }
    for (uint32_t s = 0; s < 3; s++)
        costs.slots[s] = 3 - s;
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        uint32_t begins[7] = {0};
        memcpy(costs.limits, cases[c].limits, sizeof cases[c].limits);
        const enum status found = pipe_choose(starts, &costs, 3, begins);
        cr_expect_eq(found, cases[c].begins[3] ? STATUS_OK : STATUS_TOO_LARGE, "case %zu", c);
        for (int i = 0; found == STATUS_OK && i < 4; i++)
            cr_expect_eq(begins[i], cases[c].begins[i], "case %zu: %u", c, begins[i]);
    }
    cr_expect_not_null(strstr(status_text(), "one needs 1.08 times the memory"), "%s", status_text());
}

/* A residual block is cut only before its first convolution, whose input the addition uses. */
Test(mpi_pipeline, no_cut_separates_an_addition_from_its_earlier_layer)
{
    struct model model;
    char cuts[64] = "";
    must(model_build(&model_tables[4], (struct shape){1, 1, 16, 16}, 3, &model));
    for (uint32_t i = 0; i < model.layer_count; i++)
        if (model_may_cut(&model, i))
            snprintf(cuts + strlen(cuts), sizeof cuts - strlen(cuts), "%s ", model.layers[i].name);
    cr_expect_str_eq(cuts, "conv2 conv4 conv5 conv7 conv8 fc1 ");
    cr_expect_eq(pipe_pieces(&model), 7);
}

Test(mpi_pipeline, slices_have_the_parameters_and_the_work_of_the_network)
{
    static const struct model_savings none;
    for (int i = 0; model_tables[i].name; i++) {
        struct model whole, slice;
        size_t parameters = 0, arena = 0;
        uint32_t tensors = 0, begin = 0;
        double flops = 0;
        must(model_build(&model_tables[i], (struct shape){1, model_tables[i].volumetric ? 16 : 1, 16, 16}, 3,
                         &whole));
        for (uint32_t end = 1; end <= whole.layer_count; end++) {
            if (end < whole.layer_count && !model_may_cut(&whole, end))
                continue;
            model_slice(&whole, begin, end, &slice);
            cr_expect_eq(slice.arena_first, arena, "%s", whole.name);
            for (uint32_t t = 0; t < slice.tensor_count; t++) {
                cr_expect_str_eq(slice.tensors[t].name, whole.tensors[tensors + t].name);
                cr_expect_eq(slice.tensors[t].first + arena, whole.tensors[tensors + t].first);
            }
            arena += slice.arena_values;
            parameters += slice.parameters;
            tensors += slice.tensor_count;
            flops += model_flops(&slice, &none);
            begin = end;
        }
        cr_expect(arena == whole.arena_values && parameters == whole.parameters &&
                      tensors == whole.tensor_count && flops == model_flops(&whole, &none),
                  "%s", whole.name);
    }
}

/* ---- The program ---- */

#define NAIVE DIVIDE "--variant train-naive "
#define PIPE  NAIVE "--parallel pipeline --microbatches 5 "

Test(mpi_pipeline, rows_describe_the_stages)
{
    run_well(3, PIPE "--schedule zb-h1 --verify --export piped.safetensors");
    cr_expect_eq(count_of(out, "\n"), 1 + 2 * 4, "%s", out);
    for (size_t row = 5; row <= 8; row++) {
        double bubble = number(out, row, "bubble"), ideal = number(out, row, "bubble_ideal");
        cr_expect(bubble > 0 && bubble < 1 && ideal > -1e-9 && ideal < 1, "%g, %g", bubble, ideal);
        cr_expect_str_eq(value(out, row, "bubble_formula"), "0.1176"); /* (S - 1) / (3 M + S - 1) */
        cr_expect_str_eq(value(out, row, "parallel"), "pipeline");
        cr_expect_str_eq(value(out, row, "stages"), "3");
        cr_expect_str_eq(value(out, row, "microbatches"), "5");
        cr_expect_str_eq(value(out, row, "schedule"), "zb-h1");
        cr_expect_str_eq(value(out, row, "wrong"), "0");
        cr_expect_str_empty(value(out, row, "sync"));
        cr_expect_str_empty(value(out, row, "exchange"));
    }
    cr_expect_str_eq(value(out, 8, "items"), "62");
    cr_expect_str_empty(value(out, 8, "layers"));
    cr_expect(strncmp(value(out, 5, "layers"), "conv1-", 6) == 0);
    cr_expect(strstr(value(out, 7, "layers"), "fc3"));
    double all = number(out, 8, "memory_bytes");
    run_well(0, NAIVE "--export alone.safetensors --scaling weak");
    cr_expect(all < 3 * number(out, 1, "memory_bytes"), "%g", all);
    cr_expect(same_files("alone.safetensors", "piped.safetensors"), "the parameters differ");
}

/* gpipe keeps the activations of all micro-batches. With 1f1b, the first of two stages keeps at most two. */
Test(mpi_pipeline, a_stage_has_the_memory_of_its_layers)
{
    double first[2];
    for (int i = 0; i < 2; i++) {
        char line[512];
        snprintf(line, sizeof line, PIPE "--microbatches 24 --epochs 1 --schedule %s", i ? "1f1b" : "gpipe");
        run_well(2, line);
        first[i] = number(out, 1, "memory_bytes");
    }
    run_well(0, NAIVE "--epochs 1 --scaling weak");
    double whole = number(out, 1, "memory_bytes");
    cr_expect(first[1] < 0.25 * first[0] && first[1] < whole, "%g, %g, %g", first[0], first[1], whole);
}

Test(mpi_pipeline, stages_train_on_live_samples)
{
    static const char live[] = NAIVE "--data synth --res 24 --classes 4 --epochs 1 --feed live ";
    char line[512];
    snprintf(line, sizeof line, "%s --scaling weak --export alone.safetensors", live);
    run_well(0, line);
    snprintf(line, sizeof line, "%s --parallel pipeline --microbatches 3 --export piped.safetensors", live);
    run_well(2, line);
    cr_expect(same_files("alone.safetensors", "piped.safetensors"), "live samples differ");
}

/* Only the first stage learns the labels of a mixture, and only it reads samples. */
Test(mpi_pipeline, stages_train_on_mixed_sources)
{
    static const char mixed[] = NAIVE "--train-size 24 --data set --test-data set --feed mixed --mix "
                                      "load:0.5,synth:0.5 --res 24 --mixup 0.8 "
                                      "--model vit-micro --epochs 1 ";
    char line[640];
    shell("$PROGRAM --prepare set --from synth --res 24 --classes 4 --samples 24");
    cr_assert_eq(status, 0, "%s", err);
    snprintf(line, sizeof line, "%s --scaling weak --export alone.safetensors", mixed);
    run_well(0, line);
    snprintf(line, sizeof line, "%s --parallel pipeline --microbatches 3 --export piped.safetensors", mixed);
    run_well(2, line);
    cr_expect(same_files("alone.safetensors", "piped.safetensors"), "mixed sources differ");
}

Test(mpi_pipeline, replicas_train_a_transformer)
{
    run_well(
        4,
        LEARN_ON(
            "train-naive") "--data synth --res 24 --classes 4 --model vit-micro --scaling strong "
                           "--batch 24 --epochs 1 --verify --parallel pipeline --microbatches 3 --stages 2 "
                           "--balance memory");
    cr_expect_eq(count_of(out, "\n"), 1 + 5, "%s", out);
    cr_expect_str_eq(value(out, 5, "stages"), "2");
    cr_expect_str_eq(value(out, 5, "wrong"), "0");
    cr_expect_str_eq(value(out, 5, "exchange"), "mpi");
    cr_expect_str_eq(value(out, 5, "balance"), "memory");
    cr_expect_str_eq(value(out, 1, "layers"), value(out, 3, "layers"));
}

#ifdef HAVE_XXHASH
Test(mpi_pipeline, training_resumes_with_and_without_a_pipeline)
{
    run_well(0, NAIVE "--scaling weak --epochs 4 --export whole.safetensors");
    run_well(2, PIPE "--epochs 1 --checkpoint k");
    run_well(0, NAIVE "--scaling weak --epochs 2 --checkpoint k --resume");
    run_well(4, PIPE "--epochs 3 --checkpoint k --resume --schedule gpipe --microbatches 24");
    run_well(3, PIPE "--epochs 4 --checkpoint k --resume --schedule zb-h1 --export resumed.safetensors");
    cr_expect(same_files("whole.safetensors", "resumed.safetensors"), "a resumed run differs");
}

Test(mpi_pipeline, a_killed_stage_ends_all_ranks)
{
    pid_t ranks[8], mpirun = start_training(PIPE, ranks);
    int rank = rank_of(ranks[1]);
    kill(ranks[1], SIGKILL);
    expect_end(mpirun, "noticed that process rank", rank);
}

/* The stopped rank's neighbours name it, unless they wait for each other in a collective call. */
Test(mpi_pipeline, a_stage_that_does_not_answer_ends_all_ranks)
{
    pid_t ranks[8], mpirun = start_training(PIPE, ranks), middle = 0;
    for (int i = 0; i < 3; i++)
        middle = rank_of(ranks[i]) == 1 ? ranks[i] : middle;
    kill(middle, SIGSTOP);
    expect_end(mpirun, "gave up waiting for rank", 1);
}
#endif

Test(mpi_pipeline, a_loss_that_is_not_finite_is_explained)
{
    run(2, PIPE "--lr 1e30 --optimizer sgd");
    cr_expect(status != 0 && strstr(err, "rank 1: epoch 1, step ") && strstr(err, "the loss is not finite"),
              "%d: %s", status, err);
}

Test(mpi_pipeline, impossible_pipelines_are_refused)
{
    static const struct {
        int ranks;
        const char *options, *message;
    } cases[] = {
        {2, "--stages 3", "--stages 3: each rank holds one stage, and there are 2 ranks"},
        {3, "--stages 2", "--stages 2: each rank holds one stage, and there are 3 ranks"},
        {4, "--stages 2 --microbatches 13", "--microbatches 13 is more than the 12 samples of a step"},
        {2, "--microbatches 25", "--microbatches 25 is more than the 24 samples of a step"},
        {3, "--model logreg", "--model logreg can be cut into at most 1 stages"},
        {2, "--sync mpi", "--sync needs --parallel data"},
        {2, "--parallel data --stages 2", "--stages needs --parallel pipeline"},
        {2, "--parallel data --schedule gpipe", "--schedule needs --parallel pipeline"},
        {2, "--model vit-micro --schedule zb-h1", "--schedule zb-h1: the kernels of a transformer"},
        {2, "--export-step a.safetensors", "--export-step writes the samples of one rank"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char line[512];
        snprintf(line, sizeof line, NAIVE "--parallel pipeline %s", cases[i].options);
        run(cases[i].ranks, line);
        cr_expect(status == 2 && strstr(err, cases[i].message), "%s: %d: %s", cases[i].options, status, err);
    }
    struct engine whole = engine_naive;
    whole.stages = NULL;
    cr_expect_eq(pipeline_accepts(&whole), STATUS_USAGE);
    cr_expect_not_null(strstr(status_text(), "it cannot train a part of a network"));
    must(pipeline_accepts(&engine_naive));
}
