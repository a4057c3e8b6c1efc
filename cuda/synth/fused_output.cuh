/* `fused`: converts a tile's canvas to the output image. */
#ifndef FDSL_CUDA_SYNTH_FUSED_OUTPUT_CUH
#define FDSL_CUDA_SYNTH_FUSED_OUTPUT_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "synth/fused.cuh"

/* A tile of an image. */
struct tile {
    int32_t x, y, width, height;                  /* its area of the image, in canvas pixels */
    uint32_t out_x, out_y, out_width, out_height; /* its area of the output, in output pixels */
    uint32_t pitch; /* words per row of the canvas in shared memory, padding included */
};

/* Destination and format of an image's output. */
struct output_sink {
    const struct synth_output &output;
    uint32_t area; /* see output_area() */
    void *image;
    bool four; /* runs of four pixels are aligned, so vector stores are possible */
};

/* ---- Values ---- */

/* Returns the same value as output_value_u8(). Uses a 32-bit division if that suffices. */
static __device__ __forceinline__ uint8_t fused_value_u8(uint64_t sum, uint32_t area)
{
    if (area == 1)
        return (uint8_t)sum;
    if (area <= UINT32_MAX / 512)
        return (uint8_t)((2 * (uint32_t)sum + area) / (2 * area));
    return output_value_u8(sum, area);
}

static __device__ __forceinline__ uint32_t half_bits(float value)
{
    return __half_as_ushort(__float2half_rn(value));
}

static __device__ __forceinline__ uint32_t bf16_bits(float value)
{
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

/* Stores four consecutive values of a floating-point type at index `i`, aligned to their total size. */
static __device__ __forceinline__ void store_four(const output_sink &sink, size_t i, const float values[4])
{
    switch (sink.output.type) {
    case DTYPE_F16:
        *reinterpret_cast<uint2 *>(static_cast<uint16_t *>(sink.image) + i) =
            make_uint2(half_bits(values[0]) | half_bits(values[1]) << 16,
                       half_bits(values[2]) | half_bits(values[3]) << 16);
        break;
    case DTYPE_BF16:
        *reinterpret_cast<uint2 *>(static_cast<uint16_t *>(sink.image) + i) =
            make_uint2(bf16_bits(values[0]) | bf16_bits(values[1]) << 16,
                       bf16_bits(values[2]) | bf16_bits(values[3]) << 16);
        break;
    default:
        *reinterpret_cast<float4 *>(static_cast<float *>(sink.image) + i) =
            make_float4(values[0], values[1], values[2], values[3]);
    }
}

static __device__ __forceinline__ void store_four_u8(const output_sink &sink, size_t i, uint32_t first,
                                                     uint32_t second, uint32_t third, uint32_t fourth)
{
    *reinterpret_cast<uint32_t *>(static_cast<uint8_t *>(sink.image) + i) =
        first | second << 8 | third << 16 | fourth << 24;
}

/* Stores planar channel `c` of pixels (y, x) .. (y, x + 3). */
template <class Sum>
static __device__ __forceinline__ void store_plane(const output_sink &sink, uint32_t c, uint32_t y,
                                                   uint32_t x, const Sum sums[4])
{
    const struct synth_output &output = sink.output;
    size_t i = output_index(&output, c, y, x);
    if (output.type == DTYPE_U8) {
        store_four_u8(sink, i, fused_value_u8(sums[0], sink.area), fused_value_u8(sums[1], sink.area),
                      fused_value_u8(sums[2], sink.area), fused_value_u8(sums[3], sink.area));
        return;
    }
    float values[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        values[k] = output_value(sums[k], output.scale[c], output.bias[c]);
    store_four(sink, i, values);
}

/* Stores pixels (y, x) .. (y, x + 3) of an image with a single channel or with planar channels. */
template <class Sum>
static __device__ __forceinline__ void store_planes(const output_sink &sink, uint32_t y, uint32_t x,
                                                    const Sum sums[4])
{
    for (uint32_t c = 0; c < sink.output.channels; c++)
        store_plane(sink, c, y, x, sums);
}

/* Stores pixels (y, x) .. (y, x + 3) of an image with three interleaved channels: twelve consecutive
 * values. */
template <class Sum>
static __device__ __forceinline__ void store_pixels(const output_sink &sink, uint32_t y, uint32_t x,
                                                    const Sum sums[4])
{
    const struct synth_output &output = sink.output;
    size_t i = output_index(&output, 0, y, x);
#pragma unroll
    for (int first = 0; first < 12; first += 4) {
        if (output.type == DTYPE_U8) {
            store_four_u8(sink, i + first, fused_value_u8(sums[first / 3], sink.area),
                          fused_value_u8(sums[(first + 1) / 3], sink.area),
                          fused_value_u8(sums[(first + 2) / 3], sink.area),
                          fused_value_u8(sums[(first + 3) / 3], sink.area));
            continue;
        }
        float values[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            values[k] = output_value(sums[(first + k) / 3], output.scale[(first + k) % 3],
                                     output.bias[(first + k) % 3]);
        store_four(sink, i + first, values);
    }
}

/* Stores pixels (y, x) .. (y, x + 3), except those in column `end` and beyond. The type `Sum` must be able to
 * represent the sums. */
template <class Sum>
static __device__ __forceinline__ void store_run(const output_sink &sink, uint32_t y, uint32_t x,
                                                 uint32_t end, const Sum sums[4])
{
    bool planes = sink.output.channels == 1 || sink.output.layout == OUTPUT_NCHW;
    if (sink.four && x + 4 <= end) {
        if (planes)
            store_planes(sink, y, x, sums);
        else
            store_pixels(sink, y, x, sums);
        return;
    }
#pragma unroll
    for (uint32_t k = 0; k < 4; k++)
        if (x + k < end)
            output_store(&sink.output, sink.area, sums[k], y, x + k, sink.image);
}

/* ---- Sums ---- */

/* Returns the weighted sum of the grays that an output pixel covers. row_at(y)(x) returns the gray of canvas
 * pixel (y, x). The type `Sum` must be able to represent 255 * area. */
template <class Sum, class Rows>
static __device__ __forceinline__ Sum span_sum(uint32_t out_res, const struct output_span &rows,
                                               const struct output_span &columns, Rows row_at)
{
    Sum sum = 0;
    for (uint32_t y = rows.first; y <= rows.last; y++) {
        auto row = row_at(y);
        uint32_t ends = row(columns.first) * columns.head, between = 0;
        for (uint32_t x = columns.first + 1; x < columns.last; x++)
            between += row(x);
        if (columns.first < columns.last)
            ends += row(columns.last) * columns.tail;
        sum += ((Sum)between * out_res + ends) * output_weight(rows, out_res, y);
    }
    return sum;
}

/* ---- From a tile ---- */

/* Loads four canvas words from column x of row y on. Rows are padded to whole vectors. */
static __device__ __forceinline__ uint4 canvas_words(const struct tile &tile, const uint32_t *canvas,
                                                     uint32_t y, uint32_t x)
{
    return *reinterpret_cast<const uint4 *>(canvas + y * tile.pitch + x);
}

/* Writes up to four pixels of an unscaled tile, from column x of row y on. */
static __device__ __forceinline__ void write_run(const output_sink &sink, const struct tile &tile,
                                                 const uint32_t *canvas, uint32_t y, uint32_t x)
{
    uint4 words = canvas_words(tile, canvas, y, x);
    uint64_t sums[4] = {words.x & 0xFF, words.y & 0xFF, words.z & 0xFF, words.w & 0xFF};
    store_run(sink, tile.out_y + y, tile.out_x + x, tile.out_x + tile.out_width, sums);
}

/* Writes a resized tile. A lane takes four adjacent columns at a time and writes them in all rows of its
 * warp, so that it computes the spans of these columns only once. The type `Sum` must be able to represent
 * 255 * area. */
template <class Sum>
static __device__ __forceinline__ void write_resized(const output_sink &sink, uint32_t res,
                                                     const struct tile &tile, const uint32_t *canvas)
{
    const uint32_t out_res = sink.output.res, warps = blockDim.x / FUSED_WARP;
    auto row_at = [&](uint32_t y) {
        const uint32_t *row = canvas + (y - tile.y) * tile.pitch - tile.x;
        return [row](uint32_t x) { return row[x] & 0xFF; };
    };
    for (uint32_t x = threadIdx.x % FUSED_WARP * 4; x < tile.out_width; x += 4 * FUSED_WARP) {
        struct output_span columns[4];
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            columns[k] = output_span(tile.out_x + min(x + k, tile.out_width - 1), res, out_res);
        for (uint32_t y = threadIdx.x / FUSED_WARP; y < tile.out_height; y += warps) {
            struct output_span rows = output_span(tile.out_y + y, res, out_res);
            uint64_t sums[4];
#pragma unroll
            for (uint32_t k = 0; k < 4; k++)
                sums[k] = span_sum<Sum>(out_res, rows, columns[k], row_at);
            store_run(sink, tile.out_y + y, tile.out_x + x, tile.out_x + tile.out_width, sums);
        }
    }
}

/* Returns whether the output has the gray bytes of canvas words. */
static __device__ __forceinline__ bool writes_bytes(const struct synth_output &output)
{
    return output.type == DTYPE_U8 && output.channels == 1 && output.fit != OUTPUT_RESIZE;
}

/* Returns byte `Byte` of four canvas words. */
template <uint32_t Byte> static __device__ __forceinline__ uint32_t canvas_bytes(uint4 words)
{
    const uint32_t pick = Byte + 4 << 4 | Byte;
    return __byte_perm(__byte_perm(words.x, words.y, pick), __byte_perm(words.z, words.w, pick), 0x5410);
}

/* Calls write(words, i) for each run of four pixels of an unscaled tile: words = read(x, y), and `i` is the
 * index of the first pixel in the output. Eager: several runs are in flight at a time, which takes more
 * registers and helps if a multiprocessor has little other work. */
template <bool Eager, class Read, class Write>
static __device__ __forceinline__ void for_runs(const struct tile &tile, uint32_t res, Read read, Write write)
{
    /* A warp writes two rows at a time if half its lanes suffice for a row. */
    const uint32_t lanes = tile.out_width > 2 * FUSED_WARP ? FUSED_WARP : FUSED_WARP / 2;
    const uint32_t first = threadIdx.x / lanes, step = blockDim.x / lanes, some = Eager ? 4 : 1;
    for (uint32_t x = threadIdx.x % lanes * 4; x < tile.out_width; x += 4 * lanes) {
        const size_t begin = (size_t)(tile.out_y + first) * res + tile.out_x + x;
        uint32_t y = first, i = 0; /* the index in the output, minus `begin` */
        for (; y + (some - 1) * step < tile.out_height; y += some * step, i += some * step * res) {
            uint4 words[some];
#pragma unroll
            for (uint32_t k = 0; k < some; k++)
                words[k] = read(x, y + k * step);
#pragma unroll
            for (uint32_t k = 0; k < some; k++)
                write(words[k], begin + i + k * step * res);
        }
        for (; Eager && y < tile.out_height; y += step, i += step * res)
            write(read(x, y), begin + i);
    }
}

/* Writes one byte of each canvas word of an unscaled tile to `image`, and, unless `mask` is NULL, the class
 * numbers to `mask`. Each store writes four pixels. */
template <uint32_t Byte, bool Eager>
static __device__ __forceinline__ void write_bytes(const struct tile &tile, const uint32_t *canvas,
                                                   uint8_t *image, uint8_t *mask, uint32_t res)
{
    for_runs<Eager>(
        tile, res, [&](uint32_t x, uint32_t y) { return canvas_words(tile, canvas, y, x); },
        [&](uint4 words, size_t i) {
            *reinterpret_cast<uint32_t *>(image + i) = canvas_bytes<Byte>(words);
            if (mask)
                *reinterpret_cast<uint32_t *>(mask + i) = canvas_bytes<FUSED_MASK_SHIFT / 8>(words);
        });
}

/* Writes a tile's part of a mask: in each output pixel, the class number of one canvas pixel. `four`: runs of
 * four pixels are aligned. */
static __device__ __forceinline__ void write_mask(const struct synth_output &output, uint32_t res,
                                                  const struct tile &tile, const uint32_t *canvas,
                                                  uint8_t *mask, bool four)
{
    if (four && output.fit != OUTPUT_RESIZE) {
        write_bytes<FUSED_MASK_SHIFT / 8, false>(tile, canvas, mask, nullptr, output.res);
        return;
    }
    for (uint32_t y = threadIdx.x / FUSED_WARP; y < tile.out_height; y += blockDim.x / FUSED_WARP)
        for (uint32_t x = threadIdx.x % FUSED_WARP; x < tile.out_width; x += FUSED_WARP) {
            uint32_t from_x = x, from_y = y;
            if (output.fit == OUTPUT_RESIZE) {
                from_x = output_nearest(&output, res, 0, tile.out_x + x) - (uint32_t)tile.x;
                from_y = output_nearest(&output, res, 0, tile.out_y + y) - (uint32_t)tile.y;
            }
            mask[(size_t)(tile.out_y + y) * output.res + tile.out_x + x] =
                (uint8_t)(canvas[from_y * tile.pitch + from_x] >> FUSED_MASK_SHIFT);
        }
}

/* Writes the image of a tile in the output format, and its mask if `mask` is not NULL. A warp writes one row
 * at a time, and each lane writes four pixels. */
template <bool Eager>
static __device__ __forceinline__ void write_outputs(const fused_job &job, const output_sink &sink,
                                                     const struct tile &tile, const uint32_t *canvas,
                                                     uint8_t *mask)
{
    const struct synth_output &output = job.output;
    uint32_t res = job.input.res;
    if (sink.four && writes_bytes(output)) {
        write_bytes<0, Eager>(tile, canvas, static_cast<uint8_t *>(sink.image), mask, output.res);
        return;
    }
    if (mask)
        write_mask(output, res, tile, canvas, mask, sink.four);
    if (output.fit == OUTPUT_RESIZE) {
        if (sink.area <= UINT32_MAX / 255)
            write_resized<uint32_t>(sink, res, tile, canvas);
        else
            write_resized<uint64_t>(sink, res, tile, canvas);
        return;
    }
    for (uint32_t y = threadIdx.x / FUSED_WARP; y < tile.out_height; y += blockDim.x / FUSED_WARP)
        for (uint32_t x = threadIdx.x % FUSED_WARP * 4; x < tile.out_width; x += 4 * FUSED_WARP)
            write_run(sink, tile, canvas, y, x);
}

/* Returns the destination and the format of the image with this rank. */
static __device__ __forceinline__ output_sink sink_of(const fused_job &job, uint32_t rank,
                                                      const struct tile &tile)
{
    const struct synth_output &output = job.output;
    return {output, output_area(output.fit, job.input.res), job.cards[rank].image,
            output.res % 4 == 0 && tile.out_x % 4 == 0 && tile.out_width % 4 == 0};
}

/* Writes a tile to its destinations. Masked: the formula has masks. Eager: see for_runs(). */
template <bool Masked, bool Eager>
static __device__ __forceinline__ void write_tile(const fused_job &job, uint32_t rank,
                                                  const struct tile &tile, const uint32_t *canvas)
{
    write_outputs<Eager>(job, sink_of(job, rank, tile), tile, canvas,
                         Masked ? job.cards[rank].mask : nullptr);
}

/* Writes a tile without lines, if its output is u8 with one channel and not resized. Otherwise returns false
 * and writes nothing. */
template <bool Masked>
static __device__ __forceinline__ bool write_empty(const fused_job &job, uint32_t rank,
                                                   const struct tile &tile, uint32_t background)
{
    const output_sink sink = sink_of(job, rank, tile);
    if (!sink.four || !writes_bytes(sink.output))
        return false;
    uint8_t *image = static_cast<uint8_t *>(sink.image), *mask = Masked ? job.cards[rank].mask : nullptr;
    for_runs<true>(
        tile, sink.output.res, [](uint32_t, uint32_t) { return uint4{}; },
        [&](uint4, size_t i) {
            *reinterpret_cast<uint32_t *>(image + i) = background * 0x01010101u;
            if (mask)
                *reinterpret_cast<uint32_t *>(mask + i) = 0;
        });
    return true;
}

#endif
