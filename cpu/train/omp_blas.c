/* `train-omp-blas`: `train-omp` with the products of OpenBLAS, as frameworks have them: what lies no matrix
 * is copied into one (im2col), and one thread's sgemm multiplies it. What our own products are measured
 * against.
 *
 * The library is opened when the variant is asked for: linked, it would start threads in every run. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "omp_engine.h"
#include "train/trainer.h"

#define BLAS_LIBRARY "libopenblas.so.0"

/* Of the standard C interface of BLAS. */
enum { CBLAS_ROWS = 101, CBLAS_PLAIN = 111, CBLAS_TURNED = 112 };
typedef void sgemm_function(int order, int turn_a, int turn_b, int m, int n, int k, float alpha,
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
    set_threads(1); /* ours are enough */
    return STATUS_OK;
}

/* ---- Products ---- */

#define TILE_ROWS       32
#define ROOM_VALUES     32768
#define ROOM_VALUES_MIN 1024 /* where memory is short */
#define STEPS_MAX       4096

static size_t tiles(const struct product *product)
{
    return (product->row_count + TILE_ROWS - 1) / TILE_ROWS;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* The distance between neighbours, if it is the same for all; else 0. */
static size_t spacing(const uint32_t *offsets, size_t count)
{
    size_t apart = count > 1 ? offsets[1] - offsets[0] : 1;
    for (size_t i = 1; i < count; i++)
        if (offsets[i] - offsets[i - 1] != apart)
            return 0;
    return apart;
}

static void begin_rows(const struct product *product, size_t first, size_t end)
{
    for (size_t i = first; i < end && !product->add; i++)
        if (product->bias)
            memcpy(product->c + i * product->c_pitch, product->bias, product->columns * sizeof(float));
        else
            memset(product->c + i * product->c_pitch, 0, product->columns * sizeof(float));
}

static void call(const struct product *product, const float *a, bool turned, size_t pitch, size_t first,
                 size_t rows, size_t begin, size_t steps)
{
    sgemm(CBLAS_ROWS, turned ? CBLAS_TURNED : CBLAS_PLAIN, CBLAS_PLAIN, (int)rows, (int)product->columns,
          (int)steps, 1, a, (int)pitch, product->b + begin * product->b_pitch, (int)product->b_pitch, 1,
          product->c + first * product->c_pitch, (int)product->c_pitch);
}

/* Rows first .. end - 1, their parts of a copied into a matrix, piece by piece. */
static void multiply_copied(const struct product *product, size_t first, size_t end)
{
    float few[ROOM_VALUES_MIN],
        *many = malloc(ROOM_VALUES * sizeof *many); /* stacks of threads may be small */
    float *room = many ? many : few;
    size_t values = many ? ROOM_VALUES : ROOM_VALUES_MIN, steps_max = least(values, STEPS_MAX);
    for (size_t begin = 0; begin < product->step_count; begin += steps_max) {
        size_t steps = least(product->step_count - begin, steps_max), most = values / steps;
        for (size_t row = first; row < end; row += most) {
            size_t rows = least(end - row, most);
            for (size_t i = 0; i < rows; i++)
                for (size_t s = 0; s < steps; s++)
                    room[i * steps + s] = product->a[product->rows[row + i] + product->steps[begin + s]];
            call(product, room, false, steps, row, rows, begin, steps);
        }
    }
    free(many);
}

static void multiply(const struct product *product, size_t tile, size_t count)
{
    size_t first = tile * TILE_ROWS, end = least((tile + count) * TILE_ROWS, product->row_count);
    size_t down = spacing(product->rows, product->row_count),
           along = spacing(product->steps, product->step_count);
    const float *a = product->a + product->rows[first] + product->steps[0];
    begin_rows(product, first, end);
    if (along == 1 && down >= product->step_count)
        call(product, a, false, down, first, end - first, 0, product->step_count);
    else if (down == 1 && along >= product->row_count)
        call(product, a, true, along, first, end - first, 0, product->step_count);
    else
        multiply_copied(product, first, end);
    for (size_t i = first; product->relu && i < end; i++)
        for (size_t n = 0; n < product->columns; n++) {
            float *value = &product->c[i * product->c_pitch + n];
            *value = *value <= 0 ? 0 : *value;
        }
}

/* ---- The variant ---- */

enum status omp_blas_open(const struct train *train, const struct resources *resources, void **state)
{
    TRY(blas_probe(resources));
    return omp_net_open(train, resources, (struct multiplier){tiles, multiply}, state);
}

static enum status train_setup(const struct resources *resources, const void *input, void **state)
{
    return trainer_open(&engine_omp_blas, resources, input, state);
}

const struct variant variant_train_omp_blas = {
    .platform = "cpu",
    .threaded = true,
    .instruction_set = omp_net_instruction_set, /* OpenBLAS chooses alike */
    .traits = &engine_omp_blas,
    .probe = blas_probe,
    .setup = train_setup,
    .run = trainer_run,
    .fetch = trainer_fetch,
    .teardown = trainer_close,
};
