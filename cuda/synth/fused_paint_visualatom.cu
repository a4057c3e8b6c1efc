/* Compiles the painting kernels of `fused` for one formula. */
#include "synth/fused_paint.cuh"

fused_kernel *const fused_paint_visualatom = fused_paint_kernel<false, FORMULA_VISUALATOM>;
fused_kernel *const fused_paint_visualatom_wide = fused_paint_kernel<true, FORMULA_VISUALATOM>;
