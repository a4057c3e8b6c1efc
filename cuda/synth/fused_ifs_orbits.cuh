/* Kernels that compute orbits and their maps; fused_ifs.cuh has an overview. */
#ifndef FDSL_CUDA_SYNTH_FUSED_IFS_ORBITS_CUH
#define FDSL_CUDA_SYNTH_FUSED_IFS_ORBITS_CUH

#include "synth/fused_ifs.cuh"

#define CHOICE_BLOCK 256
#define WALK_BLOCK   128
#define WALK_MAPS    (IFS_MAPS_MAX + 1) /* an unused one for IFS_REPEAT */

/* ---- Choices ---- */

/* A thread computes eight choices of a class. */
static __global__ void __launch_bounds__(CHOICE_BLOCK)
    ifs_choices_kernel(const __grid_constant__ ifs_group group)
{
    const uint64_t eights = group.pitch / IFS_EIGHT, at = (uint64_t)blockIdx.x * CHOICE_BLOCK + threadIdx.x;
    const uint64_t row = at / eights;
    const uint32_t first = (uint32_t)(at % eights) * IFS_EIGHT;
    if (row >= group.class_rows)
        return;
    const struct ifs_system *system = group.systems + group.classes[row];
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (uint32_t k = 0; k < IFS_EIGHT; k++) {
        const uint32_t i = first + k;
        const uint32_t choice =
            i + 1 < group.rules.points ? ifs_choice(system, group.uniforms[i]) : (uint32_t)IFS_REPEAT;
        words[k / 4] |= choice << k % 4 * 8;
    }
    *reinterpret_cast<uint2 *>(group.choices + row * group.pitch + first) = make_uint2(words[0], words[1]);
}

/* ---- Points ---- */

/* The coefficients a .. f of an orbit's maps in shared memory: coefficient i of map m is at
 * values[(6 * m + i) * stride]. If each thread has its own orbit, lanes read different banks. */
struct ifs_maps {
    const double *values;
    uint32_t stride;
};

/* Returns coefficient i of map m of an orbit, as ifs_weighted() does. */
static __device__ __forceinline__ double ifs_coefficient(const ifs_group &group, const ifs_item &item,
                                                         uint32_t m, uint32_t i)
{
    return ifs_multiply(group.systems[item.class_index].map[m][i], item.factor[i]);
}

/* Returns the point after `at`, like ifs_step(). Has no branch, so that the coefficients of several steps are
 * loaded in advance. */
static __device__ __forceinline__ ifs_point ifs_next(ifs_maps maps, uint32_t choice, ifs_point at)
{
    const double *map = maps.values + 6 * choice * maps.stride;
    const uint32_t n = maps.stride;
    const double x = ifs_add(ifs_add(ifs_multiply(at.x, map[0]), ifs_multiply(at.y, map[n])), map[4 * n]);
    const double y =
        ifs_add(ifs_add(ifs_multiply(at.x, map[2 * n]), ifs_multiply(at.y, map[3 * n])), map[5 * n]);
    const bool repeat = choice == IFS_REPEAT;
    return {repeat ? at.x : x, repeat ? at.y : y};
}

/* Calls visit(i, point) for points begin .. end - 1, and returns point `end`. `at` is point `begin`, which is
 * a multiple of IFS_EIGHT. */
template <class Visit>
static __device__ __forceinline__ ifs_point ifs_walk(ifs_maps maps, const uint8_t *choices, ifs_point at,
                                                     uint32_t begin, uint32_t end, Visit visit)
{
    for (uint32_t i = begin; i < end; i += IFS_EIGHT) {
        const uint2 eight = *reinterpret_cast<const uint2 *>(choices + i);
        auto choice = [&](uint32_t k) { return (k < 4 ? eight.x : eight.y) >> k % 4 * 8 & 0xff; };
        if (i + IFS_EIGHT <= end) {
#pragma unroll
            for (uint32_t k = 0; k < IFS_EIGHT; k++) {
                visit(i + k, at);
                at = ifs_next(maps, choice(k), at);
            }
        } else {
#pragma unroll 1
            for (uint32_t k = 0; i + k < end; k++) {
                visit(i + k, at);
                at = ifs_next(maps, choice(k), at);
            }
        }
    }
    return at;
}

static __device__ __forceinline__ ifs_reach no_reach()
{
    const double infinity = __longlong_as_double(0x7ff0000000000000);
    return {{0, 0}, {infinity, infinity}, {-infinity, -infinity}};
}

/* Extends a reach by a point. Coordinates that are NaN change nothing. */
static __device__ __forceinline__ void extend(ifs_reach *reach, ifs_point point)
{
    reach->least.x = point.x < reach->least.x ? point.x : reach->least.x;
    reach->least.y = point.y < reach->least.y ? point.y : reach->least.y;
    reach->most.x = point.x > reach->most.x ? point.x : reach->most.x;
    reach->most.y = point.y > reach->most.y ? point.y : reach->most.y;
}

static __device__ __forceinline__ bool same(ifs_point a, ifs_point b)
{
    return __double_as_longlong(a.x) == __double_as_longlong(b.x) &&
           __double_as_longlong(a.y) == __double_as_longlong(b.y);
}

static __device__ __forceinline__ bool is_nan(ifs_point a)
{
    return a.x != a.x || a.y != a.y;
}

/* Fills the coefficients of the thread's orbit. `values` has WALK_MAPS * 6 * WALK_BLOCK entries. */
static __device__ __forceinline__ ifs_maps own_maps(const ifs_group &group, const ifs_item &item,
                                                    double *values)
{
    const uint32_t maps = group.systems[item.class_index].maps;
    for (uint32_t m = 0; m < maps; m++)
        for (uint32_t i = 0; i < 6; i++)
            values[(6 * m + i) * WALK_BLOCK + threadIdx.x] = ifs_coefficient(group, item, m, i);
    for (uint32_t i = 0; i < 6; i++)
        values[(6 * IFS_REPEAT + i) * WALK_BLOCK + threadIdx.x] = 0;
    return {values + threadIdx.x, WALK_BLOCK};
}

/* Computes the points of a chunk, up to point `limit`: marks and reach. visit(i, point) is called, too. */
template <class Visit>
static __device__ __forceinline__ void walk_chunk(const ifs_group &group, ifs_maps maps,
                                                  const uint8_t *choices, uint32_t item, uint32_t chunk,
                                                  ifs_point at, uint32_t limit, Visit visit)
{
    ifs_reach reach = no_reach();
    const uint32_t first = chunk * group.chunk;
    for (uint32_t s = first; s < first + group.chunk && s * group.length < limit; s++) {
        group.marks[(size_t)item * IFS_SEGMENTS + s] = at;
        const uint32_t begin = s * group.length;
        at = ifs_walk(maps, choices, at, begin, min(begin + group.length, limit),
                      [&](uint32_t i, ifs_point point) {
                          extend(&reach, point);
                          visit(i, point);
                      });
    }
    reach.end = at;
    group.reach[(size_t)item * group.chunks + chunk] = reach;
}

/* A thread computes a chunk. Lanes have neighbouring orbits, which are mostly of one class. */
static __global__ void __launch_bounds__(WALK_BLOCK) ifs_walk_kernel(const __grid_constant__ ifs_group group)
{
    __shared__ double values[WALK_MAPS * 6 * WALK_BLOCK];
    const uint64_t at = (uint64_t)blockIdx.x * WALK_BLOCK + threadIdx.x;
    const uint32_t item = (uint32_t)(at % group.count), chunk = (uint32_t)(at / group.count);
    if (chunk >= group.chunks)
        return;
    const struct ifs_item &own = group.items[item];
    const uint8_t *choices = group.choices + (size_t)own.row * group.pitch;
    const ifs_maps maps = own_maps(group, own, values);
    const uint32_t begin = chunk * group.chunk * group.length;
    ifs_point start = {0, 0};
    start = ifs_walk(maps, choices, start, begin > IFS_BURN ? begin - IFS_BURN : 0, begin,
                     [](uint32_t, ifs_point) {});
    walk_chunk(group, maps, choices, item, chunk, start, group.rules.points, [](uint32_t, ifs_point) {});
}

/* Joins the chunks of an orbit, of which `drawn` points are drawn. */
static __device__ __forceinline__ void store_frame(const ifs_group &group, uint32_t item, uint32_t drawn)
{
    const uint32_t points = group.chunk * group.length, chunks = (drawn + points - 1) / points;
    ifs_reach reach = no_reach();
    for (uint32_t k = 0; k < chunks; k++) {
        const ifs_reach one = group.reach[(size_t)item * group.chunks + k];
        extend(&reach, one.least);
        extend(&reach, one.most);
    }
    group.frames[item] = {ifs_axis(reach.least.x, reach.most.x), ifs_axis(reach.least.y, reach.most.y),
                          drawn};
}

/* A thread compares the chunks of an orbit. Lists the orbit if two do not join, or if it overflows. */
static __global__ void __launch_bounds__(WALK_BLOCK) ifs_join_kernel(const __grid_constant__ ifs_group group)
{
    const uint32_t item = blockIdx.x * WALK_BLOCK + threadIdx.x;
    if (item >= group.count)
        return;
    const struct ifs_reach *reach = group.reach + (size_t)item * group.chunks;
    const struct ifs_point *marks = group.marks + (size_t)item * IFS_SEGMENTS;
    bool joined = !is_nan(reach[group.chunks - 1].end);
    for (uint32_t k = 1; k < group.chunks; k++)
        joined = joined && same(reach[k - 1].end, marks[(size_t)k * group.chunk]);
    group.is_listed[item] = !joined;
    if (joined)
        store_frame(group, item, group.rules.points);
    else
        group.listed[atomicAdd(group.listed_count, 1)] = item;
}

/* A thread completes a listed orbit: computes the chunks that do not join again, finds the first coordinates
 * that are NaN, and limits the orbit to the points that are drawn. */
static __global__ void __launch_bounds__(WALK_BLOCK)
    ifs_repair_kernel(const __grid_constant__ ifs_group group)
{
    __shared__ double values[WALK_MAPS * 6 * WALK_BLOCK];
    const uint32_t at = blockIdx.x * WALK_BLOCK + threadIdx.x, points = group.rules.points;
    if (at >= *group.listed_count)
        return;
    const uint32_t item = group.listed[at];
    const struct ifs_item &own = group.items[item];
    const uint8_t *choices = group.choices + (size_t)own.row * group.pitch;
    const ifs_maps maps = own_maps(group, own, values);
    struct ifs_reach *reach = group.reach + (size_t)item * group.chunks;
    struct ifs_point *marks = group.marks + (size_t)item * IFS_SEGMENTS;
    struct ifs_point start = {0, 0};
    uint32_t nan_x = points, nan_y = points;
    for (uint32_t k = 0; k < group.chunks && nan_x == points; k++) {
        if (!same(start, marks[(size_t)k * group.chunk]) || is_nan(reach[k].end))
            walk_chunk(group, maps, choices, item, k, start, points, [&](uint32_t i, ifs_point point) {
                nan_x = point.x != point.x && i < nan_x ? i : nan_x;
                nan_y = point.y != point.y && i < nan_y ? i : nan_y;
            });
        start = reach[k].end;
    }
    uint32_t drawn = ifs_drawn(nan_x, points);
    if (nan_y < drawn)
        drawn = ifs_drawn(nan_y, drawn);
    if (drawn > 0 && drawn < points) { /* without the points that are not drawn */
        const uint32_t last = (drawn - 1) / (group.chunk * group.length);
        const struct ifs_point first = marks[(size_t)last * group.chunk];
        walk_chunk(group, maps, choices, item, last, first, drawn, [](uint32_t, ifs_point) {});
    }
    store_frame(group, item, drawn);
}

/* ---- Raster ---- */

/* Computes cells of an axis in fixed point, with FIXED_BITS bits after the point. A fused multiply-add of a
 * coordinate gives the place in the low word of a double. The result is at most one unit away from the exact
 * place, so it gives the cell unless the place is nearly an integer. */
#define FIXED_BITS 17u
struct ifs_scale {
    double factor, offset;
};

static __device__ __forceinline__ ifs_scale ifs_scale_of(const struct ifs_axis &axis, uint32_t res)
{
    const double shift = 0x1.8p35; /* 1.5 * 2^(52 - FIXED_BITS) */
    if (!(axis.range >= 0x1p-900 && axis.range <= 0x1p900))
        return {0, shift}; /* an integer, so ifs_cell() decides */
    const double factor = (double)(res - 2 * IFS_PAD) * axis.inverse;
    return {factor, (IFS_PAD - axis.low * factor) + shift};
}

/* Returns the same as ifs_cell(). */
static __device__ __forceinline__ uint32_t ifs_cell_fixed(ifs_scale scale, const struct ifs_axis *axis,
                                                          double value, uint32_t res)
{
    const uint32_t place = (uint32_t)__double2loint(fma(value, scale.factor, scale.offset));
    if (((place + 2) & ((1u << FIXED_BITS) - 1)) > 4)
        return place >> FIXED_BITS;
    return ifs_cell(axis, value, res);
}

/* The strip of a map that a block draws. */
struct ifs_strip {
    uint32_t y, rows;   /* rows of the map */
    int32_t first;      /* first row of cells, in the orientation of the drawing */
    uint32_t cell_rows; /* rows of cells */
    uint32_t words;     /* words per row of cells */
};

template <bool Points>
static __device__ __forceinline__ ifs_strip ifs_strip_at(const ifs_group &group, uint32_t index)
{
    const uint32_t y = index * group.rows, rows = min(group.rows, group.res - y);
    const int32_t least = (int32_t)(group.res - y - rows); /* row of the drawing of the strip's last row */
    return {y, rows, Points ? least : least - 3, Points ? rows : rows + 2,
            Points ? (uint32_t)ifs_map_pitch(true, group.res) / 4 : group.res};
}

/* In an owner map, the word of a cell is OWNERS * (number of its latest point + 1), so that an owner can be
 * added. */
#define OWNERS 16u

/* Copies a strip of a bitmap. */
static __device__ __forceinline__ void store_bitmap(const ifs_strip &strip, const uint32_t *cells,
                                                    uint8_t *map)
{
    uint32_t *words = reinterpret_cast<uint32_t *>(map) + (size_t)strip.y * strip.words;
    for (uint32_t i = threadIdx.x; i < strip.rows * strip.words; i += blockDim.x) {
        const uint32_t row = i / strip.words;
        words[i] = cells[(strip.rows - 1 - row) * strip.words + i % strip.words];
    }
}

#define OWNER_ROWS 15u /* rows per unit of work of a warp */

/* Writes a strip of an owner map. A lane takes a column of pixels, from the top of the drawing down. */
static __device__ __forceinline__ void store_owners(const ifs_strip &strip, uint32_t res, size_t pitch,
                                                    const uint32_t *cells, uint8_t *map)
{
    const uint32_t lane = threadIdx.x % FUSED_WARP, columns = (uint32_t)pitch / 16;
    const uint32_t units = columns * ((strip.rows + OWNER_ROWS - 1) / OWNER_ROWS);
    for (uint32_t unit = threadIdx.x / FUSED_WARP; unit < units; unit += blockDim.x / FUSED_WARP) {
        const uint32_t x = unit % columns * FUSED_WARP + lane, begin = unit / columns * OWNER_ROWS;
        uint32_t rows[3][3]; /* cells of columns x - 1, x - 2, x - 3; the lowest of the three rows first */
        auto load = [&](uint32_t row, uint32_t to[3]) {
#pragma unroll
            for (uint32_t j = 0; j < 3; j++)
                to[j] = x > j && x < res ? cells[row * res + x - 1 - j] : 0;
        };
        load(begin, rows[0]);
        load(begin + 1, rows[1]);
#pragma unroll 3
        for (uint32_t q = begin; q < min(begin + OWNER_ROWS, strip.rows); q++) {
            uint32_t latest = 0;
            load(q + 2, rows[2]);
#pragma unroll
            for (uint32_t r = 0; r < 3; r++)
#pragma unroll
                for (uint32_t j = 0; j < 3; j++)
                    latest = max(latest, rows[r][j] | (3 * r + 2 - j));
            uint32_t word = (latest < OWNERS ? IFS_NO_OWNER : latest % OWNERS) << lane % 8 * 4;
            word |= __shfl_xor_sync(FUSED_ALL, word, 1);
            word |= __shfl_xor_sync(FUSED_ALL, word, 2);
            word |= __shfl_xor_sync(FUSED_ALL, word, 4);
            if (lane % 8 == 0)
                *reinterpret_cast<uint32_t *>(map + (strip.y + strip.rows - 1 - q) * pitch + x / 2) = word;
#pragma unroll
            for (uint32_t j = 0; j < 3; j++) {
                rows[0][j] = rows[1][j];
                rows[1][j] = rows[2][j];
            }
        }
    }
}

extern __shared__ uint4 ifs_shared[];

/* Adds the visit of point i to cell (x, y), if the strip has the cell. */
template <bool Points>
static __device__ __forceinline__ void visit_cell(const ifs_strip &strip, uint32_t *cells, uint32_t x,
                                                  uint32_t y, uint32_t i)
{
    const uint32_t row = y - strip.first;
    if (row >= strip.cell_rows)
        return;
    if (Points)
        atomicOr(cells + row * strip.words + x / 32, 1u << x % 32);
    else
        atomicMax(cells + row * strip.words + x, (i + 1) * OWNERS);
}

/* A block draws maps, strip by strip; a thread draws the points of a segment. For the first strip, it
 * computes the cells of its points and stores them for the other strips. */
template <bool Points>
static __global__ void __launch_bounds__(IFS_SEGMENTS)
    ifs_raster_kernel(const __grid_constant__ ifs_group group)
{
    __shared__ double values[6 * WALK_MAPS];
    __shared__ struct ifs_frame frame;
    uint32_t *cells = reinterpret_cast<uint32_t *>(ifs_shared);
    ushort2 *list = group.cells + (size_t)blockIdx.x * group.length * IFS_SEGMENTS + threadIdx.x;
    const uint32_t res = group.res, begin = threadIdx.x * group.length;
    const uint32_t count = group.late ? *group.listed_count : group.count;
    for (uint32_t turn = blockIdx.x; turn < count; turn += gridDim.x) {
        const uint32_t item = group.late ? group.listed[turn] : turn;
        if (!group.late && group.is_listed[item])
            continue;
        const struct ifs_item &own = group.items[item];
        if (threadIdx.x < 6 * WALK_MAPS)
            values[threadIdx.x] = threadIdx.x < 6 * group.systems[own.class_index].maps
                                      ? ifs_coefficient(group, own, threadIdx.x / 6, threadIdx.x % 6)
                                      : 0;
        if (threadIdx.x == 0)
            frame = group.frames[item];
        for (uint32_t index = 0; index < group.strips; index++) {
            const ifs_strip strip = ifs_strip_at<Points>(group, index);
            for (uint32_t i = threadIdx.x; i < strip.cell_rows * strip.words; i += blockDim.x)
                cells[i] = 0;
            __syncthreads();
            const uint32_t end = min(begin + group.length, frame.drawn);
            if (index > 0) {
                for (uint32_t i = begin; i < end; i++) {
                    const ushort2 cell = list[(size_t)(i - begin) * IFS_SEGMENTS];
                    visit_cell<Points>(strip, cells, cell.x, cell.y, i);
                }
            } else if (begin < end) {
                const ifs_scale scale_x = ifs_scale_of(frame.x, res), scale_y = ifs_scale_of(frame.y, res);
                ifs_walk({values, 1}, group.choices + (size_t)own.row * group.pitch,
                         group.marks[(size_t)item * IFS_SEGMENTS + threadIdx.x], begin, end,
                         [&](uint32_t i, ifs_point point) {
                             const uint32_t x = ifs_cell_fixed(scale_x, &frame.x, point.x, res);
                             const uint32_t y = ifs_cell_fixed(scale_y, &frame.y, point.y, res);
                             if (group.strips > 1)
                                 list[(size_t)(i - begin) * IFS_SEGMENTS] =
                                     make_ushort2((unsigned short)x, (unsigned short)y);
                             visit_cell<Points>(strip, cells, x, y, i);
                         });
            }
            __syncthreads();
            if (Points)
                store_bitmap(strip, cells, own.map);
            else
                store_owners(strip, res, ifs_map_pitch(false, res), cells, own.map);
            __syncthreads(); /* the cells, and after the last strip the frame, have been read */
        }
    }
}

#endif
