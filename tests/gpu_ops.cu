/* Checks the device code of `ops` that other checks reach only in part: conversions of all 2^32 floats to
 * f16, bf16 and fp8, hashes of rows of up to 5120 bytes, and inverses of permutations.
 *
 *     gpu_ops            runs all checks
 *     gpu_ops --quick    omits the conversions
 *     gpu_ops --fault    plants a fault in each check; every check must then fail
 *
 * Prints one line per check. Exit status 1 if a check failed, 4 without a GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "common/check.cuh"
#include "core/philox.h"
#include "data/checksum.h"
#include "machine/device.h"
#include "ops/row.cuh"

#define THREADS 256
#define WARPS   (THREADS / WARP_LANES)

static unsigned passed, failed;
static bool fault;

#define MUST(call)                                                       \
    do {                                                                 \
        if (cuda_status((call), #call, __FILE__, __LINE__) != STATUS_OK) \
            exit((fprintf(stderr, "gpu_ops: %s\n", status_text()), 1));  \
    } while (0)

static void report(bool ok, const char *name)
{
    printf("%-7s %s\n", ok ? "ok" : "FAILED", name);
    (ok ? passed : failed)++;
}

/* Returns the number of elements that a kernel counted as wrong. */
template <class LAUNCH> static unsigned long long count_wrong(LAUNCH launch)
{
    unsigned long long *device, wrong;
    MUST(cudaMalloc(&device, sizeof *device));
    MUST(cudaMemset(device, 0, sizeof *device));
    launch(device);
    MUST(cudaGetLastError());
    MUST(cudaMemcpy(&wrong, device, sizeof wrong, cudaMemcpyDeviceToHost));
    MUST(cudaFree(device));
    return wrong;
}

/* ---- Conversions ---- */

/* Thread t converts the floats with the bits 4 * t .. 4 * t + 3. */
static __global__ void convert_all(enum ops_type to, bool saturate, bool flip, unsigned long long *wrong)
{
    uint32_t bits = 4 * (blockIdx.x * THREADS + threadIdx.x);
    float4 quad = make_float4(__uint_as_float(bits), __uint_as_float(bits + 1), __uint_as_float(bits + 2),
                              __uint_as_float(bits + 3));
    for (uint32_t i = 0; i < 4; i++) {
        float value = __uint_as_float(bits + i);
        uint32_t pair = to == OPS_F16 ? (i < 2 ? f16_pair(quad.x, quad.y) : f16_pair(quad.z, quad.w))
                                      : (i < 2 ? bf16_pair(quad.x, quad.y) : bf16_pair(quad.z, quad.w));
        uint32_t got =
            to == OPS_FP8 ? fp8_quad(quad, saturate) >> 8 * i & 0xFF : pair >> 16 * (i % 2) & 0xFFFF;
        uint32_t wanted = to == OPS_F16    ? half_from_float(value)
                          : to == OPS_BF16 ? bf16_from_float(value)
                                           : fp8_from_float(value, saturate);
        if (flip && bits + i == 0x3F800001)
            got ^= 1;
        if (got != wanted)
            atomicAdd(wrong, 1);
    }
}

static void check_conversions(void)
{
    static const struct {
        const char *name;
        enum ops_type to;
        bool saturate;
    } cases[] = {{"f16", OPS_F16, false},
                 {"bf16", OPS_BF16, false},
                 {"fp8 nan", OPS_FP8, false},
                 {"fp8 saturate", OPS_FP8, true}};
    for (const auto &one : cases) {
        char name[64];
        unsigned long long wrong = count_wrong([&](unsigned long long *count) {
            convert_all<<<(1u << 30) / THREADS, THREADS>>>(one.to, one.saturate, fault, count);
        });
        snprintf(name, sizeof name, "all floats to %s: %llu wrong", one.name, wrong);
        report(wrong == 0, name);
    }
}

/* ---- Hashes ---- */

/* Warp w hashes bytes [0, (w + 1) * unit) of `bytes`. */
template <enum dtype TYPE, enum row_kind KIND>
static __global__ void hash_all(const uint8_t *bytes, uint32_t unit, uint32_t count, uint64_t *hashes)
{
    __shared__ struct hash_keys keys;
    uint32_t warp = (blockIdx.x * THREADS + threadIdx.x) / WARP_LANES;
    if (threadIdx.x < WARP_LANES)
        hash_keys_begin(keys);
    __syncthreads();
    if (warp >= count)
        return;
    struct window<TYPE, 6> window;
    uint32_t size = (warp + 1) * unit;
    uint64_t hash = size > XXH3_SHORT_MAX ? warp_hash<KIND>(keys, window, bytes, size)
                                          : warp_hash<ROW_ANY>(keys, window, bytes, size);
    if (threadIdx.x % WARP_LANES == 0)
        hashes[warp] = hash;
}

#define HASH_BYTES 5120

template <enum dtype TYPE, enum row_kind KIND> static void check_hashes(uint32_t unit, const char *name)
{
    std::vector<uint8_t> bytes(HASH_BYTES);
    uint32_t count = HASH_BYTES / unit, wrong = 0;
    std::vector<uint64_t> hashes(count);
    uint8_t *device;
    uint64_t *device_hashes;
    char line[96];
    for (uint32_t i = 0; i < HASH_BYTES; i++)
        bytes[i] = (uint8_t)(i * 2654435761u >> 24);
    MUST(cudaMalloc(&device, HASH_BYTES));
    MUST(cudaMalloc(&device_hashes, count * sizeof *device_hashes));
    MUST(cudaMemcpy(device, bytes.data(), HASH_BYTES, cudaMemcpyHostToDevice));
    hash_all<TYPE, KIND><<<(count + WARPS - 1) / WARPS, THREADS>>>(device, unit, count, device_hashes);
    MUST(cudaGetLastError());
    MUST(cudaMemcpy(hashes.data(), device_hashes, count * sizeof *device_hashes, cudaMemcpyDeviceToHost));
    bytes[0] ^= fault;
    for (uint32_t i = 0; i < count; i++)
        wrong += hashes[i] != checksum_whole(bytes.data(), (i + 1) * unit);
    MUST(cudaFree(device));
    MUST(cudaFree(device_hashes));
    snprintf(line, sizeof line, "hashes of %s: %u of %u wrong", name, wrong, count);
    report(wrong == 0, line);
}

/* ---- Permutations ---- */

static __global__ void invert_all(struct permutation permutation, uint64_t off, unsigned long long *wrong)
{
    for (uint64_t i = blockIdx.x * THREADS + threadIdx.x; i < permutation.count; i += gridDim.x * THREADS)
        if (permutation_inverse(&permutation, permutation_at(&permutation, i)) != i + off)
            atomicAdd(wrong, 1);
}

static void check_permutations(void)
{
    for (uint64_t count : {1, 5, 257, 4000000, 67108865}) {
        struct permutation permutation = permutation_begin(count, count);
        char name[64];
        unsigned long long wrong = count_wrong(
            [&](unsigned long long *device) { invert_all<<<1024, THREADS>>>(permutation, fault, device); });
        snprintf(name, sizeof name, "inverse of a permutation of %llu: %llu wrong", (unsigned long long)count,
                 wrong);
        report(wrong == 0, name);
    }
}

int main(int argc, char **argv)
{
    fault = argc > 1 && strcmp(argv[1], "--fault") == 0;
    if (device_count() == 0) {
        fprintf(stderr, "gpu_ops: no GPU\n");
        return 4;
    }
    if (argc < 2 || strcmp(argv[1], "--quick") != 0)
        check_conversions();
    check_hashes<DTYPE_F32, ROW_WHOLE>(1024, "rows of f32, multiples of 256 values");
    check_hashes<DTYPE_F32, ROW_ALIGNED>(16, "rows of f32, 16-byte loads");
    check_hashes<DTYPE_F32, ROW_ANY>(4, "rows of f32");
    check_hashes<DTYPE_F16, ROW_WHOLE>(512, "rows of f16, multiples of 256 values");
    check_hashes<DTYPE_F16, ROW_ANY>(2, "rows of f16");
    check_permutations();
    printf("%u passed, %u failed\n", passed, failed);
    return failed > 0;
}
