/* Compiles the kernels of `fused` for one formula. */
#include "synth/fused_paint.cuh"
#include "synth/fused_vertices.cuh"

const struct fused_kernels fused_uji = FUSED_KERNELS(FORMULA_UJI, false, 16, 48);
