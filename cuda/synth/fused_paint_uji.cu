/* Compiles the painting kernels of `fused` for one formula. */
#include "synth/fused_paint.cuh"

fused_kernel *const fused_paint_uji = fused_paint_kernel<false, FORMULA_UJI>;
fused_kernel *const fused_paint_uji_wide = fused_paint_kernel<true, FORMULA_UJI>;
