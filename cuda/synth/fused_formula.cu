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
    static constexpr bool sparse = false, long_lines = false; /* see fused_paint_kernel() */
    /* Of fused_vertices_split_kernel(); a group with few units needs few warps. */
    static constexpr uint32_t warps = 16, quads = 48;
};

template <> struct sizes<FORMULA_RCDB> {
    static constexpr bool sparse = true, long_lines = true;
    static constexpr uint32_t warps = 8, quads = 26;
};

template <> struct sizes<FORMULA_SEGRCDB> {
    static constexpr bool sparse = false, long_lines = true;
    static constexpr uint32_t warps = 8, quads = 14;
};

template <enum formula_id Formula> static constexpr struct fused_kernels kernels_of()
{
    constexpr uint32_t warps = sizes<Formula>::warps, quads = sizes<Formula>::quads;
    constexpr bool sparse = sizes<Formula>::sparse, long_lines = sizes<Formula>::long_lines;
    return {{fused_vertices_kernel<false, Formula>, fused_vertices_kernel<true, Formula>},
            {fused_vertices_split_kernel<false, Formula, warps, quads>,
             fused_vertices_split_kernel<true, Formula, warps, quads>},
            warps * FUSED_WARP,
            quads * SPLIT_UNIT_BYTES,
            {fused_paint_kernel<false, Formula, sparse, long_lines>,
             fused_paint_kernel<true, Formula, sparse, long_lines>}};
}

const struct fused_kernels JOIN(fused_, FUSED_NAME) = kernels_of<JOIN(id_, FUSED_NAME)>();
