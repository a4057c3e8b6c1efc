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
    static constexpr uint32_t warps = 32, quads = 50; /* most classes have at most 200 orbits */
};

template <> struct sizes<FORMULA_RCDB> {
    using paint = paint_sizes<8, 3, true, true>;
    static constexpr uint32_t warps = 8, quads = 26;
};

template <> struct sizes<FORMULA_SEGRCDB> {
    using paint = paint_sizes<16, 2, true>;
    static constexpr uint32_t warps = 8, quads = 14;
};

template <enum formula_id Formula> static constexpr struct fused_kernels kernels_of()
{
    using paint = typename sizes<Formula>::paint;
    constexpr uint32_t parts = paint::parts, warps = sizes<Formula>::warps, quads = sizes<Formula>::quads;
    return {{fused_vertices_kernel<false, Formula, parts>, fused_vertices_kernel<true, Formula, parts>},
            {fused_vertices_split_kernel<false, Formula, parts, warps, quads>,
             fused_vertices_split_kernel<true, Formula, parts, warps, quads>},
            warps * FUSED_WARP,
            quads * SPLIT_UNIT_BYTES,
            {fused_paint_kernel<false, Formula, paint>, fused_paint_kernel<true, Formula, paint>},
            parts,
            paint::block,
            paint::blocks,
            offsetof(paint_shared<paint>, canvas)};
}

const struct fused_kernels JOIN(fused_, FUSED_NAME) = kernels_of<JOIN(id_, FUSED_NAME)>();
