/* Tests the step of --compute MS (common/product.cuh): its products are right. Does not calibrate the time of
 * a step, because sanitizers make calibration too slow. make check-gpu runs this program.
 *
 * Prints one line per case. Exit status 3 if a case fails, 4 without a GPU. */
#include "gpu_learner.cuh"

#include "machine/device.h"
#include "common/product.cuh"

static int failures;

#define PRODUCT_ROUNDING \
    4.0 /* bound for the rounding error of a sum, in units of 2^-24 per term; terms are below one */

/* Returns the largest error in a tile of the product, in units of 2^-24 per term. A thread block of the first
 * wave must have computed the tile. */
static double tile_off(const float *matrices, unsigned tile, unsigned depth)
{
    const size_t values = (size_t)PRODUCT_SIDE * PRODUCT_SIDE, tiles = PRODUCT_SIDE / PRODUCT_TILE;
    size_t row = tile / tiles * PRODUCT_TILE, column = tile % tiles * PRODUCT_TILE;
    double worst = 0;
    for (size_t y = row; y < row + PRODUCT_TILE; y++)
        for (size_t x = column; x < column + PRODUCT_TILE; x++) {
            double sum = 0;
            for (size_t d = 0; d < depth; d++)
                sum += (double)matrices[y * PRODUCT_SIDE + d] * matrices[values + d * PRODUCT_SIDE + x];
            double off = fabs(matrices[2 * values + y * PRODUCT_SIDE + x] - sum);
            if (isnan(off))
                return NAN;
            worst = fmax(worst, off);
        }
    return worst / (depth * 0x1p-24);
}

/* Checks the last tile that the first wave of thread blocks computes. With up to 24 units of work there is
 * one wave. If this wave has fewer than two blocks per tile, a single block writes the tile. With more than
 * 24 units, several blocks would write the tile, each with a different part of k, in an unpredictable order.
 */
static void multiply(struct product *product, unsigned units)
{
    const size_t bytes = (size_t)3 * PRODUCT_SIDE * PRODUCT_SIDE * sizeof(float);
    const unsigned tiles = PRODUCT_SIDE / PRODUCT_TILE * (PRODUCT_SIDE / PRODUCT_TILE);
    unsigned tile = (product->wave < tiles ? product->wave : tiles) - 1;
    float *matrices = static_cast<float *>(malloc(bytes));
    must_have(matrices);
    product->units = units;
    must(product_launch(product, nullptr));
    must(cudaMemcpy(matrices, product->matrices, bytes, cudaMemcpyDeviceToHost));
    double off = tile_off(matrices, tile, units * PRODUCT_DEPTH);
    printf("%s  a step of %u units: %.2g off\n", off <= PRODUCT_ROUNDING ? "ok    " : "FAILED", units, off);
    failures += !(off <= PRODUCT_ROUNDING);
    free(matrices);
}

int main(void)
{
    struct product product = {};
    setvbuf(stdout, NULL, _IOLBF, 0); /* print each line immediately */
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_product: %s\n", status_text());
        return 4;
    }
    must(cudaSetDevice(0));
    must(product_open(0, nullptr, &product));
    for (unsigned units : {1, 3, 24})
        multiply(&product, units);
    product_close(&product);
    return failures ? 3 : 0;
}
