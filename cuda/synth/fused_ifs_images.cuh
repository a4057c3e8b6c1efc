/* Kernels that make images from a bank of orbits; fused_ifs.cuh has an overview. */
#ifndef FDSL_CUDA_SYNTH_FUSED_IFS_IMAGES_CUH
#define FDSL_CUDA_SYNTH_FUSED_IFS_IMAGES_CUH

#include "synth/fused_ifs.cuh"
#include "synth/fused_output.cuh"

#define IMAGE_BLOCK 224 /* four columns of a resized output of 224 pixels per thread, in four parts */

/* How images become outputs. */
enum ifs_finish {
    IFS_BYTES,  /* u8, one channel, not resized */
    IFS_VALUES, /* all other types, not resized */
    IFS_MEANS,  /* resized; sums have 32 bits */
    IFS_LARGE   /* resized; sums have 64 bits */
};

/* The arguments of the kernels. All pointers are to device memory. */
struct ifs_job {
    struct ifs_rules rules;
    struct line_rules lines; /* for the key of the crop */
    uint32_t res, turns;
    uint64_t seed, first, stride; /* as in struct synth */
    const struct ifs_system *systems;
    const uint8_t *const *maps;
    const struct ifs3d_system *solids; /* NULL: fractals of the plane; else ... */
    const uint8_t *bitmaps;            /* ... the points of each image of the call */
    const uint2 *spans;                /* of each output row or column, if the output is resized */
    struct synth_output output;
    struct fused_call call;
    const struct fused_call *stored; /* NULL: use `call` */
    uint32_t rows;                   /* output rows per tile */
    uint32_t band;                   /* canvas rows whose bits fit in shared memory */
    uint32_t halves;                 /* bytes of random halves in shared memory; 0 for points */
    uint32_t words;                  /* words per row of bits */
};

/* ---- Tables ---- */

/* A span of struct output_span in two words. */
FDSL_HD uint2 ifs_pack_span(struct output_span span)
{
    uint2 packed = {span.first | span.last << 16, span.head | span.tail << 16};
    return packed;
}

static __device__ __forceinline__ struct output_span ifs_unpack_span(uint2 packed)
{
    return {packed.x & 0xffff, packed.x >> 16, packed.y & 0xffff, packed.y >> 16};
}

/* ---- Images ---- */

/* The image of a tile. */
struct ifs_view {
    const uint8_t *map;
    uint8_t *image;        /* destination */
    struct philox_key key; /* of the masks */
    uint32_t flip;
    struct output_corner corner;
};

/* Looks up an image. The block of its first tile also stores the label. */
static __device__ __forceinline__ ifs_view ifs_view_of(const ifs_job &job, uint64_t j, bool first)
{
    const fused_call call = job.stored ? *job.stored : job.call;
    const uint64_t run = call.listed ? 0 : call.number + (call.counter ? *call.counter : 0);
    const struct synth_image image =
        synth_image_at(job.first, job.stride, job.turns, run, call.listed ? call.listed[j] : j);
    const struct ifs_instance shown = ifs_instance(&job.rules, image.instance);
    const uint32_t id = job.solids ? job.solids[image.class_index].id : job.systems[image.class_index].id;
    const struct synth_output &output = job.output;
    const size_t bytes = (size_t)output.res * output.res * output.channels * dtype_bytes(output.type);
    struct output_corner corner = {0, 0};
    if (output.fit == OUTPUT_CROP)
        corner = output_crop(atom_image_key(&job.lines, job.seed, id, image.instance), job.res, output.res);
    if (first)
        call.labels[j] = id;
    if (job.solids)
        return {job.bitmaps + j * ifs_map_bytes(true, job.res), call.images + j * bytes, {}, 0, corner};
    return {job.maps[(uint64_t)image.class_index * ifs_orbits(&job.rules) + shown.weight],
            call.images + j * bytes, ifs_mask_key(&job.rules, job.seed, id, shown.drawing), shown.flip,
            corner};
}

/* ---- Bits ---- */

/* A band of the canvas: `rows` rows from row `y` on, and the columns x .. end - 1. Bits of a row begin at
 * bits[words * row]. All columns up to the next multiple of 8 have a bit, 0 outside the canvas. */
struct ifs_band {
    uint32_t y, rows, x, end, words;
};

/* Returns a word of a row of a map: columns 8 * index .. 8 * index + 7. No square covers columns outside. */
static __device__ __forceinline__ uint32_t owners_at(const uint32_t *row, int32_t index, int32_t words)
{
    return index >= 0 && index < words ? __ldg(row + index) : 0xffffffffu;
}

/* Calls set(row, run) for each row and each run of eight columns of a band. */
template <class Set> static __device__ __forceinline__ void for_eights(const ifs_band &band, Set set)
{
    const uint32_t first = band.x / 8, runs = (band.end + 7) / 8 - first;
    const uint32_t step = blockDim.x % runs, rows = blockDim.x / runs;
    uint32_t row = threadIdx.x / runs, run = threadIdx.x % runs;
    while (row < band.rows) {
        set(row, first + run);
        row += rows;
        run += step;
        if (run >= runs) {
            run -= runs;
            row++;
        }
    }
}

/* Fills the masks of all cells whose squares can touch the band. Returns the number of the first one, which
 * may be outside the canvas; those masks are arbitrary, but also have nine bits. `lowest`: the lowest number
 * of a row in the drawing. */
static __device__ __forceinline__ int32_t fill_masks(const struct philox_key key, uint32_t res,
                                                     int32_t lowest, uint32_t rows, uint4 *masks)
{
    /* A look-up without owner reads up to 15 masks after the last cell. */
    const int32_t begin = ((lowest - 3) * (int32_t)res - 3) >> 3;
    const int32_t end = ((lowest + (int32_t)rows - 1) * (int32_t)res + 15) >> 3;
    for (int32_t b = begin + (int32_t)threadIdx.x; b <= end; b += (int32_t)blockDim.x) {
        const struct philox_block block = ifs_mask_block(key, (uint32_t)b);
        uint32_t words[4];
#pragma unroll
        for (uint32_t w = 0; w < 4; w++)
            words[w] = ifs_mask(block.word[w] & 0xffff) | ifs_mask(block.word[w] >> 16) << 16;
        masks[b - begin] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return begin * 8;
}

/* Returns the bits of the pixels of eight owners. `at` is the index of the first pixel's mask for owner 0.
 * The mask of owner o is o % 3 columns and o / 3 rows after it. Masks have nine bits, so the bit of
 * IFS_NO_OWNER is 0. */
static __device__ __forceinline__ uint32_t bits_of(uint32_t owners, const uint16_t *at, uint32_t res)
{
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t k = 0; k < 8; k++) {
        const uint32_t o = owners >> 4 * k & 15, third = o * 11 >> 5 & 3; /* o / 3; 1 for IFS_NO_OWNER */
        bits |= (at[k + o + third * (res - 3)] >> o & 1) << k;
    }
    return bits;
}

/* Fills a band with the bits of a patch image. */
static __device__ __forceinline__ void fill_patches(const ifs_job &job, const ifs_view &view,
                                                    const ifs_band &band, uint4 *masks, uint32_t *bits)
{
    const uint32_t res = job.res, pitch = (uint32_t)ifs_map_pitch(false, res) / 4;
    const bool upside_down = view.flip & 1, mirrored = view.flip & 2;
    const uint32_t lowest = upside_down ? band.y : res - band.y - band.rows;
    const int32_t first = fill_masks(view.key, res, (int32_t)lowest, band.rows, masks);
    const uint16_t *table = reinterpret_cast<const uint16_t *>(masks);
    __syncthreads();
    for_eights(band, [&](uint32_t r, uint32_t run) {
        const uint32_t y = band.y + r, drawn = upside_down ? y : res - 1 - y; /* row of the drawing */
        const uint32_t *row =
            reinterpret_cast<const uint32_t *>(view.map) + (size_t)(res - 1 - drawn) * pitch;
        const int32_t x = mirrored ? (int32_t)(res - 8 - 8 * run) : (int32_t)(8 * run);
        uint32_t owners = owners_at(row, x >> 3, (int32_t)pitch), found = 0;
        if (x & 7)
            owners = __funnelshift_r(owners, owners_at(row, (x >> 3) + 1, (int32_t)pitch), x % 8 * 4 & 31);
        if (owners != 0xffffffffu)
            found = bits_of(owners, table + (((int32_t)drawn - 3) * (int32_t)res + x - 3 - first), res);
        if (mirrored)
            found = __brev(found) >> 24;
        reinterpret_cast<uint8_t *>(bits + r * band.words)[run] = (uint8_t)found;
    });
}

/* Fills a band with the bits of a point image. */
static __device__ __forceinline__ void fill_points(const ifs_job &job, const ifs_view &view,
                                                   const ifs_band &band, uint32_t *bits)
{
    const uint32_t res = job.res, pitch = (uint32_t)ifs_map_pitch(true, res) / 4;
    const uint32_t left = band.x / 32, columns = (band.end + 31) / 32 - left;
    for (uint32_t i = threadIdx.x; i < band.rows * columns; i += blockDim.x) {
        const uint32_t r = i / columns, column = left + i % columns, y = band.y + r;
        const uint32_t *row =
            reinterpret_cast<const uint32_t *>(view.map) + (size_t)(view.flip & 1 ? res - 1 - y : y) * pitch;
        uint32_t found = row[column];
        if (view.flip & 2) {
            const int32_t x = (int32_t)res - 32 - 32 * (int32_t)column, at = x >> 5;
            found = __brev(__funnelshift_r(at < 0 ? 0 : row[at], x & 31 ? row[at + 1] : 0, x & 31));
        }
        bits[r * band.words + column] = found;
    }
}

/* Returns the bits of 32 columns of a row, from column x on. */
static __device__ __forceinline__ uint32_t window(const uint32_t *row, uint32_t x)
{
    return __funnelshift_r(row[x / 32], row[x / 32 + 1], x % 32);
}

/* ---- Outputs that are not resized ---- */

/* Returns the grays of four bits as bytes. */
template <uint32_t Gray> static __device__ __forceinline__ uint32_t four_grays(uint32_t bits)
{
    return ((bits & 15) * 0x00204081u & 0x01010101u) * Gray;
}

/* Writes the grays of a band, whose first row is row `y` of the output. The rows are consecutive in memory,
 * so a thread writes 16 aligned bytes at a time. */
template <uint32_t Gray>
static __device__ __forceinline__ void write_grays(const ifs_view &view, const ifs_band &band, uint32_t y,
                                                   const uint32_t *bits)
{
    const uint32_t width = band.end - band.x;
    const int32_t total = (int32_t)(band.rows * width);
    uint8_t *begin = view.image + (size_t)y * width;
    const int32_t head = (int32_t)(reinterpret_cast<uintptr_t>(begin) % 16);
    for (int32_t at = 16 * (int32_t)threadIdx.x - head; at < total; at += 16 * (int32_t)blockDim.x) {
        if (at >= 0 && at + 16 <= total && width >= 16) {
            const uint32_t row = (uint32_t)at / width, x = (uint32_t)at % width, left = width - x;
            uint32_t some = window(bits + row * band.words, band.x + x);
            if (left < 16)
                some = (some & (1u << left) - 1) | window(bits + (row + 1) * band.words, band.x) << left;
            *reinterpret_cast<uint4 *>(begin + at) =
                make_uint4(four_grays<Gray>(some), four_grays<Gray>(some >> 4), four_grays<Gray>(some >> 8),
                           four_grays<Gray>(some >> 12));
            continue;
        }
        for (int32_t i = max(at, 0); i < min(at + 16, total); i++) {
            const uint32_t row = (uint32_t)i / width, x = band.x + (uint32_t)i % width;
            begin[i] = (bits[row * band.words + x / 32] >> x % 32 & 1) * Gray;
        }
    }
}

/* Writes a band, whose first row is row `y` of the output. */
template <uint32_t Gray>
static __device__ __forceinline__ void write_values(const output_sink &sink, const ifs_band &band, uint32_t y,
                                                    const uint32_t *bits)
{
    const uint32_t width = band.end - band.x, fours = (width + 3) / 4;
    for (uint32_t i = threadIdx.x; i < band.rows * fours; i += blockDim.x) {
        const uint32_t row = i / fours, x = i % fours * 4;
        const uint32_t some = window(bits + row * band.words, band.x + x);
        const uint32_t sums[4] = {(some & 1) * Gray, (some >> 1 & 1) * Gray, (some >> 2 & 1) * Gray,
                                  (some >> 3 & 1) * Gray};
        store_run(sink, y + row, x, width, sums);
    }
}

/* ---- Resized outputs ---- */

/* The weighted sum of the bits of a span of columns: out_res times the number of bits, less first * (first
 * bit) and last * (last bit). */
struct ifs_columns {
    uint32_t begin, length, first, last;
};

static __device__ __forceinline__ ifs_columns columns_of(struct output_span span, uint32_t out_res)
{
    const bool one = span.first == span.last;
    return {span.first, span.last - span.first + 1, out_res - span.head, one ? 0 : out_res - span.tail};
}

/* Computes the weighted sums of four spans of a row. `narrow`: they have at most 32 columns together. */
static __device__ __forceinline__ void sum_row(const struct ifs_columns spans[4], bool narrow,
                                               uint32_t out_res, const uint32_t *row, uint32_t sums[4])
{
    const uint32_t some = window(row, spans[0].begin);
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        const struct ifs_columns &span = spans[k];
        if (narrow) {
            const uint32_t own = some >> (span.begin - spans[0].begin) & 0xffffffffu >> (32 - span.length);
            sums[k] = out_res * __popc(own) - span.first * (own & 1) - span.last * (own >> (span.length - 1));
            continue;
        }
        uint32_t count = 0;
        for (uint32_t done = 0; done < span.length; done += 32) {
            const uint32_t left = span.length - done, part = window(row, span.begin + done);
            count += __popc(left < 32 ? part & (1u << left) - 1 : part);
        }
        sums[k] = out_res * count - span.first * (window(row, span.begin) & 1) -
                  span.last * (window(row, span.begin + span.length - 1) & 1);
    }
}

/* Adds a band to the output rows y .. y + count - 1. `opens` and `closes`: it is the first or the last band
 * of the tile. Writes the rows after the last band; until then, `sums` has the sums of four pixels at a time.
 * A thread takes four columns and several consecutive rows, so that it sums most canvas rows only once. */
template <uint32_t Gray, class Sum>
static __device__ __forceinline__ void write_means(const ifs_job &job, const output_sink &sink,
                                                   const ifs_band &band, uint32_t y, uint32_t count,
                                                   bool opens, bool closes, const uint32_t *bits, Sum *sums)
{
    const uint32_t out_res = job.output.res, fours = (out_res + 3) / 4;
    const uint32_t parts = fours < blockDim.x ? blockDim.x / fours : 1, part = (count + parts - 1) / parts;
    for (uint32_t i = threadIdx.x; i < fours * parts; i += blockDim.x) {
        const uint32_t x = i % fours * 4, begin = i / fours * part;
        struct ifs_columns spans[4];
        uint32_t known = UINT32_MAX, own[4]; /* sums of canvas row `known` */
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            spans[k] = columns_of(ifs_unpack_span(job.spans[min(x + k, out_res - 1)]), out_res);
        const bool narrow = spans[3].begin + spans[3].length - spans[0].begin <= 32;
        for (uint32_t r = begin; r < min(begin + part, count); r++) {
            const struct output_span rows = ifs_unpack_span(job.spans[y + r]);
            Sum *kept = sums + 4 * ((size_t)r * fours + i % fours), four[4];
#pragma unroll
            for (uint32_t k = 0; k < 4; k++)
                four[k] = opens ? 0 : kept[k];
            for (uint32_t at = max(rows.first, band.y); at <= min(rows.last, band.y + band.rows - 1); at++) {
                const Sum weight = output_weight(rows, out_res, at);
                if (at != known)
                    sum_row(spans, narrow, out_res, bits + (at - band.y) * band.words, own);
                known = at;
#pragma unroll
                for (uint32_t k = 0; k < 4; k++)
                    four[k] += weight * own[k];
            }
#pragma unroll
            for (uint32_t k = 0; k < 4; k++) {
                if (!closes)
                    kept[k] = four[k];
                four[k] *= Gray;
            }
            if (closes)
                store_run(sink, y + r, x, out_res, four);
        }
    }
}

/* ---- The kernel ---- */

extern __shared__ uint4 ifs_shared[];

/* A block makes a tile of output rows. */
template <bool Points, enum ifs_finish Finish, uint32_t Gray>
static __global__ void __launch_bounds__(IMAGE_BLOCK, Finish == IFS_BYTES ? 6 : 4)
    ifs_image_kernel(const __grid_constant__ ifs_job job)
{
    __shared__ struct ifs_view view;
    const struct synth_output &output = job.output;
    const uint32_t y = blockIdx.y * job.rows, rows = min(job.rows, output.res - y);
    uint4 *halves = ifs_shared;
    uint32_t *bits = reinterpret_cast<uint32_t *>(ifs_shared) + job.halves / 4;
    void *sums = bits + job.band * job.words;
    if (threadIdx.x == 0)
        view = ifs_view_of(job, blockIdx.x, blockIdx.y == 0);
    __syncthreads();
    const output_sink sink = {output, output_area(output.fit, job.res), view.image, output.res % 4 == 0};
    struct ifs_band band = {view.corner.y + y, rows, view.corner.x, view.corner.x + output.res, job.words};
    uint32_t end = band.y + rows;
    if (Finish == IFS_MEANS || Finish == IFS_LARGE) {
        band.y = ifs_unpack_span(job.spans[y]).first;
        end = ifs_unpack_span(job.spans[y + rows - 1]).last + 1;
        band.x = 0;
        band.end = job.res;
    }
    for (const uint32_t begin = band.y; band.y < end; band.y += band.rows) {
        band.rows = min(job.band, end - band.y);
        if (band.y > begin)
            __syncthreads(); /* the previous band has been read */
        if (Points)
            fill_points(job, view, band, bits);
        else
            fill_patches(job, view, band, halves, bits);
        __syncthreads();
        const uint32_t at = y + band.y - begin; /* the band's first output row, unless it is resized */
        const bool opens = band.y == begin, closes = band.y + band.rows == end;
        if (Finish == IFS_BYTES)
            write_grays<Gray>(view, band, at, bits);
        else if (Finish == IFS_VALUES)
            write_values<Gray>(sink, band, at, bits);
        else
            write_means<Gray>(
                job, sink, band, y, rows, opens, closes, bits,
                static_cast<std::conditional_t<Finish == IFS_MEANS, uint32_t, uint64_t> *>(sums));
    }
}

#endif
