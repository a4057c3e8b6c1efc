/* Compiles the kernels of `fused` for the formula FUSED_NAME. The Makefile compiles this file once per
 * formula, because the kernels of one formula take seconds to compile. */
#include "synth/fused_paint.cuh"
#include "synth/fused_vertices.cuh"

#define JOIN_(first, second) first##second
#define JOIN(first, second)  JOIN_(first, second)

/* id_uji, ...: the formulas by name */
#define FORMULA(symbol, name, ...) \
    [[maybe_unused]] static constexpr enum formula_id id_##name = FORMULA_##symbol;
#include "synth/formulas.def"
#undef FORMULA

/* The sizes of a formula's kernels. They change no image. */
template <enum formula_id> struct sizes {
    using paint = paint_sizes<>;
    /* Of fused_vertices_split_kernel(); a group with few units needs few warps. */
    static constexpr uint32_t warps = 16, quads = 48;
};

template <> struct sizes<FORMULA_RCDB> {
    using paint = paint_sizes<8, 3, true, true, true, FUSED_PARTS>;
    static constexpr uint32_t warps = 8, quads = 26;
};

template <> struct sizes<FORMULA_SEGRCDB> {
    using paint = paint_sizes<16, 2, false, true>;
    static constexpr uint32_t warps = 8, quads = 14;
};

template <enum formula_id Formula, class Paint = typename sizes<Formula>::paint,
          uint32_t warps = sizes<Formula>::warps, uint32_t quads = sizes<Formula>::quads>
static constexpr struct fused_kernels kernels_of()
{
    return {{fused_vertices_kernel<false, Formula, Paint::parts>,
             fused_vertices_kernel<true, Formula, Paint::parts>},
            {fused_vertices_split_kernel<false, Formula, Paint::parts, warps, quads>,
             fused_vertices_split_kernel<true, Formula, Paint::parts, warps, quads>},
            warps * FUSED_WARP,
            quads * SPLIT_UNIT_BYTES,
            {fused_paint_kernel<false, Formula, Paint>, fused_paint_kernel<true, Formula, Paint>},
            Paint::parts,
            Paint::block,
            Paint::blocks,
            offsetof(paint_shared<Paint>, canvas)};
}

const struct fused_kernels JOIN(fused_, FUSED_NAME) = kernels_of<JOIN(id_, FUSED_NAME)>();

#define ID JOIN(id_, FUSED_NAME)
template <uint32_t W, uint32_t B, bool Even, uint32_t Parts = 1> static constexpr struct fused_kernels trial()
{
    return kernels_of<ID,
                      paint_sizes<W, B, sizes<ID>::paint::sparse, sizes<ID>::paint::is_long, Even, Parts>>();
}

const struct fused_kernels JOIN(fused_trials_, FUSED_NAME)[] = {
    /* 0 */ trial<16, 2, false>(),
    /* 1 */ trial<16, 2, true>(),
    /* 2 */ trial<8, 3, true>(),
    /* 3 */ trial<8, 3, true, FUSED_PARTS>(),
    /* 4 */ trial<16, 2, true, FUSED_PARTS>(),
#ifdef FUSED_TRIALS
    /* 5 */ trial<8, 4, true, FUSED_PARTS>(),
    /* 6 */ trial<4, 8, true, FUSED_PARTS>(),
    /* 7 */ trial<4, 5, true, FUSED_PARTS>(),
    /* 8 */ trial<4, 4, true, FUSED_PARTS>(),
    /* 9 */ trial<4, 3, true, FUSED_PARTS>(),
    /* 10 */ trial<4, 8, true>(),
#endif
};
#ifdef FUSED_TRIALS
using other = sizes<FORMULA_RCDB>::paint;
const struct fused_kernels fused_vertices_trials[] = {
    /* 0 */ kernels_of<FORMULA_RCDB>(),
    /* 1 */ kernels_of<FORMULA_RCDB, other, 16, 26>(),
    /* 2 */ kernels_of<FORMULA_RCDB, other, 16, 52>(),
    /* 3 */ kernels_of<FORMULA_RCDB, other, 4, 26>(),
    /* 4 */ kernels_of<FORMULA_RCDB, other, 8, 52>(),
};
#endif
