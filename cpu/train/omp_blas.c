/* The variant `train-omp-blas`: `train-omp` with OpenBLAS, used as deep-learning frameworks use it. Gathered
 * operands are copied into a matrix (im2col), and single-threaded sgemm multiplies this matrix. This variant
 * is the baseline for our own GEMM.
 *
 * OpenBLAS is loaded with dlopen() in probe(). If it were linked, it would start its threads in every run of
 * the program. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "machine/host.h"
#include "omp_net.h"
#include "train/trainer.h"

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

enum status omp_blas_open(const struct train *train, const struct resources *resources, void **state)
{
    TRY(blas_probe(resources));
    return omp_net_open(train, resources, (struct gemm_kernels){tiles, multiply}, state);
}

/* The variant reports the instruction set that `train-omp` would use. OpenBLAS chooses its own kernel by the
 * same CPU features. */
TRAINING_BY(variant_train_omp_blas, engine_omp_blas, .threaded = true, .instruction_set = isa_best_name,
            .probe = blas_probe);
