/* The variants of the engines in engine.cuh. */
#include "train/variants.cuh"

#include "train/cudnn.cuh"
#include "train/engine.cuh"

extern "C" {
extern const struct variant variant_train_cuda, variant_train_tf32, variant_train_bf16, variant_train_amp;
extern const struct variant variant_infer_cuda, variant_infer_tf32, variant_infer_bf16;
const struct variant variant_train_cuda = training_by<&engine_cuda>();
const struct variant variant_train_tf32 = training_by<&engine_tf32>();
const struct variant variant_train_bf16 = training_by<&engine_bf16>();
const struct variant variant_train_amp = training_by<&engine_amp>();
const struct variant variant_infer_cuda = inferring_by<&engine_cuda>();
const struct variant variant_infer_tf32 = inferring_by<&engine_tf32>();
const struct variant variant_infer_bf16 = inferring_by<&engine_bf16>();
}

#ifdef HAVE_CUDNN
static enum status probe_cudnn(const struct resources *resources)
{
    TRY(cudnn_probe());
    return device_probe(resources->device);
}

extern "C" {
extern const struct variant variant_train_cudnn, variant_train_cudnn_tf32;
const struct variant variant_train_cudnn = training_by<&engine_cudnn>(false, probe_cudnn);
const struct variant variant_train_cudnn_tf32 = training_by<&engine_cudnn_tf32>(false, probe_cudnn);
}
#endif
