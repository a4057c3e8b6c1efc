/* Compiles one instantiation of the painting kernel of `fused`. */
#include "synth/fused_paint.cuh"

fused_kernel *const fused_paint_uji_wide = fused_paint_kernel<true, FORMULA_UJI>;
