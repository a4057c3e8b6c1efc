/* Tests the sums of arrays over ranks (machine/comm.h) under mpirun: the bits, failures of one rank, warnings
 * about a late rank, and engines with different layouts. Skipped if the build has no MPI or mpirun is
 * missing. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#ifdef _OPENMP
#include "../cpu/train/omp_kernel.h"
#endif
#include <sys/mman.h>
#include <sys/syscall.h>

#include "core/array.h"
#include "machine/comm.h"
#include "train/trainer.h"
#include "train_support.h"

#include "mpirun.h" /* included last, because its `out` and `status` would shadow names in other headers */

TestSuite(mpi_sums, .init = start, .fini = stop, .timeout = 400);

#define COUNTED     "FDSL_TEST_SUM"   /* variable of the ranks that test comm_reduce() */
#define MIXED_RANKS "FDSL_TEST_MIXED" /* variable of the ranks that test different engines */

#define LATE_RANK   "FDSL_TEST_LATE" /* variable of the ranks that wait for a late rank; its value says how */

static float part(int rank, size_t i)
{
    return (float)(1 + rank) / (float)(3 + i % 7);
}

/* Adds up arrays of `count` values twice. Returns an exit status. */
static int add_up(size_t count)
{
    struct comm_reducer *reducer = NULL;
    float *values = malloc((count + 1) * sizeof *values);
    int wrong = !values || comm_reducer_open(count, &reducer) != STATUS_OK;
    for (int round = 0; !wrong && round < 2; round++) {
        for (size_t i = 0; i < count; i++)
            values[i] = part(comm_rank(), i);
        wrong = comm_reduce(reducer, STATUS_OK, values) != STATUS_OK;
        for (size_t i = 0; !wrong && i < count; i++) {
            float sum = part(0, i);
            for (int rank = 1; rank < comm_size(); rank++)
                sum += part(rank, i);
            wrong = values[i] != sum;
        }
    }
    comm_reducer_close(reducer);
    free(values);
    return wrong;
}

/* All ranks must report a failure on rank 1, and the next sum must succeed. */
static int fail_on_one_rank(void)
{
    struct comm_reducer *reducer = NULL;
    float values[8] = {0};
    int wrong = comm_reducer_open(8, &reducer) != STATUS_OK;
    enum status mine = comm_rank() == 1 ? status_set(STATUS_WRONG, "planted") : STATUS_OK;
    wrong |=
        comm_reduce(reducer, mine, values) != STATUS_WRONG || strcmp(status_text(), "rank 1: planted") != 0;
    wrong |= comm_reduce(reducer, STATUS_OK, values) != STATUS_OK;
    comm_reducer_close(reducer);
    wrong |= comm_reducer_open(comm_rank() == 1 ? 9 : 8, &reducer) != STATUS_USAGE ||
             !strstr(status_text(), "rank 1: its numbers of gradients differ from those of rank 0");
    comm_reducer_close(reducer);
    return wrong;
}

/* Only MPI limits the number of values. */
static int open_large(void)
{
    struct comm_reducer *reducer = NULL;
    bool limited = comm_size() > 1 && !comm_shares_memory;
    int wrong = comm_reducer_open((size_t)1 << 31, &reducer) != (limited ? STATUS_FAILED : STATUS_OK);
    wrong |=
        limited && !strstr(status_text(), "an MPI message has at most 2147483647 elements, not 21474836");
    comm_reducer_close(reducer);
    return wrong;
}

#ifdef _OPENMP
#define MIXED_STEPS 3

/* Trains MIXED_STEPS steps from the initial parameters. Sets `end` to the final state. */
static enum status train_steps_of(const struct engine *engine, const struct train *train,
                                  const float *initial, struct train_state *end)
{
    const struct resources resources = {.threads = 1};
    const struct train_state begin = {
        (float *)(uintptr_t)initial, end->m, end->v, {0, 0}, NULL}; /* the moments are 0 */
    void *state = NULL;
    enum status ended = engine->open(train, &resources, &state);
    if (ended == STATUS_OK)
        ended = engine->set(state, &begin);
    if (ended == STATUS_OK)
        ended = engine->steps(state, 0, 0, MIXED_STEPS);
    if (ended == STATUS_OK)
        ended = engine->get(state, end);
    if (state)
        engine->close(state);
    return ended;
}

/* Returns whether two states are equal up to rounding. */
static bool close_to(const struct train_state *one, const struct train_state *other, size_t values)
{
    double off = 0, norm = 0;
    for (size_t i = 0; i < values; i++) {
        off += pow((double)one->parameters[i] - other->parameters[i], 2);
        norm += pow((double)other->parameters[i], 2);
    }
    return sqrt(off) < 1e-5 * sqrt(norm);
}

/* Even ranks train with train-omp, odd ranks with train-naive, whose layout of the gradients differs. All
 * ranks must get the same bits. Their result must equal that of one rank up to rounding. The model is so
 * large that its gradients are exchanged in several parts and pieces (exchange.h). */
static int train_mixed(void)
{
    static const uint32_t shares[] = {2, 4, 0, 1};
    struct data data;
    struct model model;
    struct train_state end, alone;
    data_random(&data, (struct shape){1, 1, 28, 28}, 10, 20, 5);
    if (model_build(&model_tables[2], data.shape, 10, &model) != STATUS_OK || model.arena_values < 1 << 20)
        return 1;
    float *initial = calloc(model.arena_values, sizeof *initial);
    struct exchange exchange = {.mixed = &model, .count = model.arena_values};
    struct train train = {.model = &model,
                          .data = &data,
                          .batch = 7,
                          .optimizer = {.kind = OPTIMIZER_SGD, .momentum = 0.9},
                          .schedule = {.rate = 0.01}};
    if (!initial || !train_state_new(model.arena_values, &end) ||
        !train_state_new(model.arena_values, &alone))
        return 1;
    model_initialise(&model, 3, initial);
    int wrong = comm_rank() == 0 && train_steps_of(&engine_naive, &train, initial, &alone) != STATUS_OK;
    train.rank = (uint32_t)comm_rank();
    train.ranks = (uint32_t)comm_size();
    train.shares = comm_size() == 4 ? shares : NULL;
    train.share_max = 7;
    train.exchange = &exchange;
    const struct engine *engine = comm_rank() % 2 ? &engine_naive : &engine_omp;
    wrong |= exchange_open(2, engine, &exchange) != STATUS_USAGE; /* method 2 is nccl */
    wrong |= exchange_open(0, engine, &exchange) != STATUS_OK;
    wrong |= train_steps_of(engine, &train, initial, &end) != STATUS_OK;
    wrong |= comm_check_same(fnv_add(FNV_BEGIN, end.parameters, model.arena_values * sizeof(float)), "bits",
                             "") != STATUS_OK;
    wrong |= comm_rank() == 0 && !close_to(&end, &alone, model.arena_values);
    exchange_close(&exchange);
    return wrong;
}

__attribute__((constructor)) static void be_mixed_rank(void)
{
    if (!getenv(MIXED_RANKS))
        return;
    int wrong = comm_open() != STATUS_OK || comm_size() != atoi(getenv(MIXED_RANKS)) || train_mixed();
    comm_close();
    _exit(wrong);
}

Test(mpi_sums, different_engines_exchange_the_same_parts)
{
    run_as_ranks(MIXED_RANKS, 2, 4);
}
#endif

/* Runs before main() in all processes. A process that is a rank does its work here and exits. The counts are
 * at and near the sizes of cache lines, small blocks and blocks of mpi/comm_mpi.c. */
__attribute__((constructor)) static void be_rank(void)
{
    static const size_t counts[] = {0,    1,    3,    4,    15,     16,     17,     1000,
                                    1023, 1024, 1025, 1031, 131071, 131072, 131073, 300007};
    if (!getenv(COUNTED))
        return;
    int wrong = comm_open() != STATUS_OK || comm_size() != atoi(getenv(COUNTED));
    for (int shares = 0; shares < 2; shares++) {
        comm_shares_memory = shares;
        for (size_t i = 0; !wrong && i < COUNT_OF(counts); i++)
            wrong = add_up(counts[i]);
        wrong = wrong || open_large();
        if (!wrong && comm_size() > 1)
            wrong = fail_on_one_rank();
    }
    comm_close();
    _exit(wrong);
}

/* All ranks must get the same bits as a sum in rank order, in shared memory and over MPI. This must also be
 * true for arrays with fewer values than there are ranks. */
Test(mpi_sums, arrays_are_added_up_in_rank_order)
{
    run_as_ranks(COUNTED, 1, 5);
}

/* ---- Device memory ---- */

#define ON_DEVICE   "FDSL_TEST_DEVICE" /* variable of the ranks that pass pointers to device memory to MPI */
#define FAKE_DEVICE 0x600000000000     /* as in mpi_cuda.c */
#define FAKE_BYTES  ((size_t)1 << 20)

/* The values are in memory that the host cannot access, so a copy or a sum on the host ends the rank. */
static int add_up_on_device(size_t count)
{
    float *values = mmap((void *)FAKE_DEVICE, FAKE_BYTES, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (values == MAP_FAILED)
        return 1;
    for (size_t i = 0; i < count; i++)
        values[i] = (float)((size_t)comm_rank() * 1000 + i % 977);
    int wrong =
        mprotect(values, FAKE_BYTES, PROT_NONE) || comm_cuda_sum(STATUS_OK, values, count) != STATUS_OK;
    const enum status mine = comm_rank() == 1 ? status_set(STATUS_WRONG, "planted") : STATUS_OK;
    wrong |= mprotect(values, FAKE_BYTES, PROT_READ);
    for (size_t i = 0; !wrong && i < count; i++)
        wrong = values[i] != (float)((size_t)comm_size() * (1000 * ((size_t)comm_size() - 1) / 2 + i % 977));
    return wrong || comm_cuda_sum(mine, values, count) != STATUS_WRONG ||
           strcmp(status_text(), "rank 1: planted") != 0;
}

__attribute__((constructor)) static void be_rank_with_device(void)
{
    static const size_t counts[] = {1, 3, 7, 1009, 131073};
    const char *ranks = getenv(ON_DEVICE);
    if (!ranks)
        return;
    int wrong = comm_open() != STATUS_OK || comm_size() != atoi(ranks);
    if (getenv("MPI_CUDA_OFF"))
        wrong |= comm_cuda_probe() != STATUS_UNAVAILABLE ||
                 !strstr(status_text(), "does not take pointers to GPU memory; use --sync mpi");
    else
        wrong |= comm_cuda_probe() != STATUS_OK;
    for (size_t i = 0; !wrong && !getenv("MPI_CUDA_OFF") && i < COUNT_OF(counts); i++)
        wrong = add_up_on_device(counts[i]);
    comm_close();
    _exit(wrong);
}

static char root[PATH_MAX]; /* the folder in which the tests were started */
__attribute__((constructor)) static void keep_root(void)
{
    if (!getcwd(root, sizeof root))
        *root = '\0';
}

Test(mpi_sums, mpi_gets_pointers_to_device_memory)
{
    char self[PATH_MAX] = "";
    shell("mpicc -shared -fPIC -o mpi_cuda.so %s/tests/mpi_cuda.c -ldl", root);
    if (status != 0)
        cr_skip_test("mpicc cannot build the stand-in: %s", err);
    cr_assert(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    for (int ranks = 2; ranks <= 3; ranks++) {
        shell("timeout 100 mpirun --bind-to none -x LD_PRELOAD=$PWD/mpi_cuda.so -x " ON_DEVICE "=%d -n %d %s",
              ranks, ranks, self);
        cr_expect_eq(status, 0, "%d ranks: exit %d: %s", ranks, status, err);
        cr_expect_not_null(strstr(err, "mpi_cuda: 5 sums of 528372 bytes in device memory"), "%s", err);
    }
    shell("timeout 100 mpirun --bind-to none -x LD_PRELOAD=$PWD/mpi_cuda.so -x MPI_CUDA_OFF=1 -x " ON_DEVICE
          "=2 -n 2 %s",
          self);
    cr_expect_eq(status, 0, "exit %d: %s", status, err);
}

/* ---- Warnings ---- */

#define FAST 30 /* how much faster the clock of the ranks that wait runs: the warning comes after 30 s */

/* Replaces the function of the C library in this executable. */
int clock_gettime(clockid_t clock, struct timespec *time)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, time);
    if (failed == 0 && clock == CLOCK_MONOTONIC && getenv(LATE_RANK)) {
        int64_t ns = ((int64_t)time->tv_sec % 10000000 * 1000000000 + time->tv_nsec) * FAST;
        *time = (struct timespec){ns / 1000000000, ns % 1000000000};
    }
    return failed;
}

/* The rank whose number is the first character of `how` comes 42 s late, by the fast clock. */
__attribute__((constructor)) static void be_late_rank(void)
{
    const char *how = getenv(LATE_RANK);
    struct comm_reducer *reducer = NULL;
    struct comm_channel *channel = NULL;
    float values[8] = {0};
    void *buffer = values;
    if (!how)
        return;
    int wrong = comm_open() != STATUS_OK, rank = comm_rank();
    comm_shares_memory = strstr(how, "memory") != NULL;
    bool message = strstr(how, "message");
    const struct comm_channel_spec spec = {/* rank 1 sends to rank 2 */
                                           .peer = rank == 1 ? 2 : 1,
                                           .sends = rank == 1,
                                           .bytes = rank ? sizeof values : 0,
                                           .buffers = 2};
    wrong |= comm_reducer_open(8, &reducer) != STATUS_OK;
    wrong |= comm_channels_open(&spec, 1, &channel) != STATUS_OK;
    if (rank == *how - '0')
        usleep(42 * 1000000 / FAST);
    if (strstr(how, "sum"))
        wrong |= comm_reduce(reducer, STATUS_OK, values) != STATUS_OK;
    else if (message && rank == 1)
        wrong |= comm_channel_room(channel, &buffer) != STATUS_OK ||
                 comm_channel_send(channel, sizeof values) != STATUS_OK;
    else if (message && rank == 2)
        wrong |= comm_channel_receive(channel, &buffer) != STATUS_OK;
    else if (!message)
        wrong |= comm_agree(STATUS_OK) != STATUS_OK;
    comm_channel_close(channel);
    comm_reducer_close(reducer);
    comm_close();
    _exit(wrong);
}

/* In every kind of wait, exactly one of three ranks names the late rank, and only once, because its next
 * warning is due after 60 s. Then all ranks continue. */
Test(mpi_sums, a_late_rank_is_named_once)
{
    static const char *const kinds[] = {
        "0: sum in memory",  "1: sum in memory", "2: sum in memory", "1: message in memory",
        "1: message by MPI", "1: sum by MPI",    "1: vote"};
    char self[PATH_MAX] = "", words[64];
    cr_assert(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    for (size_t i = 0; i < COUNT_OF(kinds); i++) {
        shell("timeout 150 mpirun --bind-to none -x '" LATE_RANK "=%s' -n 3 %s", kinds[i], self);
        snprintf(words, sizeof words, "waiting for rank %c for 3", *kinds[i]);
        const char *at = strstr(err, words);
        cr_expect_eq(status, 0, "%s: exit %d: %s", kinds[i], status, err);
        cr_expect(at && !strstr(at + 1, "waiting"), "%s: %s", kinds[i], err);
    }
}
