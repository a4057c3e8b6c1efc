/* Compiles one instantiation of the painting kernel of `fused`. */
#include "synth/fused_paint.cuh"

fused_kernel *const fused_paint_visualatom = fused_paint_kernel<false, FORMULA_VISUALATOM>;
