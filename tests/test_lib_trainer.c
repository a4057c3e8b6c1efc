/* Trainers of libfdsl: the parameters of the program on one rank, and on two ranks of an MPI communicator
 * that is handed in; batches of the caller; refusals. python/tests/test_trainer.py has the rest. */
#include <criterion/criterion.h>

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "lib/fdsl.h"
#include "mpirun.h"

TestSuite(lib_trainer, .init = start, .fini = stop, .timeout = 100);

#define RANKS "FDSL_TEST_TRAINER" /* variable of the ranks that train */
#define DATA                                                                                         \
    "--workload train --variant train-omp --threads 1 --data digits --model logreg --train-size 53 " \
    "--test-size 11"

static const char *const own[] = {"data", "digits", "model", "logreg", "train_size", "53", "test-size",
                                  "11",   "epochs", "2",     "batch",  "8",          NULL};

static struct fdsl_trainer_config configured(const char *variant, const char *const *options)
{
    struct fdsl_trainer_config config;
    cr_assert_eq(fdsl_trainer_config_init(&config, sizeof config), FDSL_OK);
    config.variant = variant;
    config.options = options;
    config.threads = 1;
    return config;
}

/* Trains all epochs, and writes the parameters. Returns whether all calls succeed. */
static bool train_all(const struct fdsl_trainer_config *config, const char *path)
{
    struct fdsl_trainer *trainer;
    enum fdsl_status result = fdsl_trainer_open(config, &trainer);
    while (result == FDSL_OK)
        result = fdsl_trainer_step(trainer, 3);
    const bool well = result == FDSL_END && fdsl_trainer_export(trainer, path) == FDSL_OK;
    if (!well)
        fprintf(stderr, "%s\n", fdsl_error());
    fdsl_trainer_close(trainer);
    return well;
}

/* Returns the values in a file of safetensors, after its header, and their size. */
static char *values_of(const char *path, size_t *bytes)
{
    static char content[1 << 17];
    FILE *file = fopen(path, "r");
    cr_assert(file, "%s", path);
    const size_t size = fread(content, 1, sizeof content, file);
    fclose(file);
    uint64_t header;
    memcpy(&header, content, sizeof header);
    cr_assert(size < sizeof content && header + sizeof header < size);
    *bytes = size - sizeof header - (size_t)header;
    char *copy = malloc(*bytes);
    memcpy(copy, content + sizeof header + header, *bytes);
    return copy;
}

static void expect_same(const char *path, const char *other)
{
    size_t bytes, other_bytes;
    char *left = values_of(path, &bytes), *right = values_of(other, &other_bytes);
    cr_expect(bytes == other_bytes && memcmp(left, right, bytes) == 0, "%s and %s differ", path, other);
    free(left);
    free(right);
}

/* With RANKS, this process is a rank: it initializes MPI, as a user's program does, and hands in
 * MPI_COMM_WORLD. */
__attribute__((constructor)) static void be_rank(void)
{
    if (!getenv(RANKS))
        return;
    void *mpi = dlopen("libmpi.so.40", RTLD_NOW | RTLD_GLOBAL),
         *comm = mpi ? dlsym(mpi, "ompi_mpi_comm_world") : NULL;
    int (*init)(int *, char ***) = NULL, (*finalize)(void) = NULL;
    if (!comm)
        _exit(2);
    *(void **)&init = dlsym(mpi, "MPI_Init");
    *(void **)&finalize = dlsym(mpi, "MPI_Finalize");
    bool well = init(NULL, NULL) == 0;
    struct fdsl_trainer_config config = configured("train-omp", own);
    config.mpi_comm = &comm;
    well = well && train_all(&config, "library.safetensors");
    _exit(finalize() != 0 || !well);
}

Test(lib_trainer, one_and_two_ranks_have_the_parameters_of_the_program)
{
    const struct fdsl_trainer_config config = configured("train-omp", own);
    cr_assert(train_all(&config, "library.safetensors"));
    run_well(0, DATA " --batch 8 --epochs 2 --export program.safetensors");
    expect_same("library.safetensors", "program.safetensors");
    void *mpi = dlopen("libmpi.so.40", RTLD_NOW);
    if (!mpi || !dlsym(mpi, "ompi_mpi_comm_world"))
        cr_skip_test("there is no Open MPI 4 or 5");
    run_as_ranks(RANKS, 2, 2);
    run_well(2, DATA " --batch 8 --epochs 2 --export program.safetensors");
    expect_same("library.safetensors", "program.safetensors");
}

Test(lib_trainer, batches_are_checked_and_learned)
{
    static const char *const options[] = {"model", "logreg", "batch", "4", "epochs", "40", "lr", "0.1", NULL};
    struct fdsl_trainer_config config = configured("train-naive", options);
    struct fdsl_trainer *trainer, *second;
    struct fdsl_trainer_score score = {.size = sizeof score};
    uint8_t images[4][6] = {{0, 255}, {255, 0}, {0, 255, 9}, {255, 0, 9}};
    int64_t labels[] = {0, 1, 0, 1};
    float logits[8];
    struct fdsl_trainer_batch batch = {sizeof batch, images, labels, NULL, 4, 1};
    config.samples = 4;
    config.classes = 2;
    memcpy(config.shape, (uint32_t[]){1, 2, 3}, 3 * sizeof *config.shape);
    cr_assert_eq(fdsl_trainer_open(&config, &trainer), FDSL_OK, "%s", fdsl_error());
    cr_expect_eq(fdsl_trainer_open(&config, &second), FDSL_INVALID);
    cr_expect(strstr(fdsl_error(), "another one is open") && !second);
    cr_expect_eq(fdsl_trainer_step(trainer, 1), FDSL_INVALID); /* it has no data */
    labels[2] = 2;
    cr_expect_eq(fdsl_trainer_step_batch(trainer, &batch, NULL), FDSL_INVALID);
    cr_expect(strstr(fdsl_error(), "labels: sample 2 has the label 2"), "%s", fdsl_error());
    labels[2] = 0;
    batch.count = 3;
    cr_expect_eq(fdsl_trainer_step_batch(trainer, &batch, NULL), FDSL_INVALID);
    batch.count = 4;
    batch.share = 0.5F;
    cr_expect_eq(fdsl_trainer_step_batch(trainer, &batch, NULL), FDSL_INVALID); /* without config.mixed */
    batch.share = 1;
    for (int i = 0; i < 40; i++)
        cr_assert_eq(fdsl_trainer_step_batch(trainer, &batch, NULL), FDSL_OK, "%s", fdsl_error());
    cr_expect_eq(fdsl_trainer_step_batch(trainer, &batch, NULL), FDSL_END);
    cr_expect_eq(fdsl_trainer_read(trainer, &score), FDSL_OK);
    cr_expect_eq(score.samples, 160);
    cr_assert_eq(fdsl_trainer_evaluate_batch(trainer, &batch, NULL, logits, &score), FDSL_OK, "%s",
                 fdsl_error());
    cr_expect(score.accuracy == 1 && score.loss < 0.2, "loss %g", score.loss);
    for (int i = 0; i < 4; i++)
        cr_expect((logits[2 * i + 1] > logits[2 * i]) == (labels[i] == 1));
    fdsl_trainer_close(trainer);
    memcpy(config.shape, (uint32_t[]){16, 65536, 65536, 1 << 28}, sizeof config.shape); /* 2^64 values */
    cr_expect_eq(fdsl_trainer_open(&config, &second), FDSL_INVALID);
    cr_expect(strstr(fdsl_error(), "shape: 268435456 is out of range"), "%s", fdsl_error());
    memcpy(config.shape, (uint32_t[]){1, 2, 3, 0}, sizeof config.shape);
    cr_assert_eq(fdsl_trainer_open(&config, &trainer), FDSL_OK, "after another one was closed: %s",
                 fdsl_error());
    fdsl_trainer_close(trainer);
}

/* Only 0 and 1 are multi-hot labels, and 255 in all bytes of a sample that does not count. */
Test(lib_trainer, multi_hot_labels_are_checked)
{
    static const char *const options[] = {"model", "logreg", "batch", "3", "epochs",
                                          "9",     "loss",   "bce",   NULL};
    struct fdsl_trainer_config config = configured("train-naive", options);
    struct fdsl_trainer *trainer;
    struct fdsl_trainer_score score = {.size = sizeof score};
    const uint8_t images[3][6] = {{0, 255}, {255, 0}, {255, 255}};
    uint8_t labels[3][2] = {{0, 1}, {1, 0}, {1, 1}};
    struct fdsl_trainer_batch batch = {sizeof batch, images, NULL, labels[0], 3, 1};
    config.samples = 3;
    config.classes = 2;
    config.multi_hot = 1;
    memcpy(config.shape, (uint32_t[]){1, 2, 3}, 3 * sizeof *config.shape);
    cr_assert_eq(fdsl_trainer_open(&config, &trainer), FDSL_OK, "%s", fdsl_error());
    static const uint8_t wrong[][2] = {{0, 2}, {2, 0}, {255, 0}, {1, 255}, {254, 254}};
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        memcpy(labels[1], wrong[i], 2);
        cr_expect_eq(fdsl_trainer_step_batch(trainer, &batch, NULL), FDSL_INVALID, "%zu", i);
        cr_expect(strstr(fdsl_error(), "multi_hot: sample 1 has a byte"), "%s", fdsl_error());
        cr_expect_eq(fdsl_trainer_evaluate_batch(trainer, &batch, NULL, NULL, &score), FDSL_INVALID);
    }
    memset(labels[1], 255, 2);
    cr_expect_eq(fdsl_trainer_step_batch(trainer, &batch, NULL), FDSL_OK, "%s", fdsl_error());
    cr_expect(fdsl_trainer_read(trainer, &score) == FDSL_OK && score.samples == 2);
    cr_expect_eq(fdsl_trainer_evaluate_batch(trainer, &batch, NULL, NULL, &score), FDSL_INVALID);
    cr_expect(strstr(fdsl_error(), "labels: sample 1 has none"), "%s", fdsl_error());
    memcpy(labels[1], (uint8_t[]){1, 0}, 2);
    cr_expect_eq(fdsl_trainer_evaluate_batch(trainer, &batch, NULL, NULL, &score), FDSL_OK);
    cr_expect(score.samples == 3 && score.precision >= 0);
    fdsl_trainer_close(trainer);
}

/* Ways that only the program measures, or into which only it divides a step, are refused. */
Test(lib_trainer, other_ways_to_divide_a_step_are_refused)
{
    static const char *const ways[] = {"auto", "pipeline"};
    for (size_t i = 0; i < COUNT_OF(ways); i++) {
        const char *options[] = {"model", "mlp", "batch", "4", "parallel", ways[i], NULL};
        struct fdsl_trainer_config config = configured("train-naive", options);
        struct fdsl_trainer *trainer;
        config.samples = 4;
        config.classes = 2;
        memcpy(config.shape, (uint32_t[]){1, 2, 3}, 3 * sizeof *config.shape);
        cr_expect_eq(fdsl_trainer_open(&config, &trainer), FDSL_INVALID);
        cr_expect(strncmp(fdsl_error(), "parallel ", 9) == 0 && strstr(fdsl_error(), ways[i]), "%s",
                  fdsl_error());
    }
}
