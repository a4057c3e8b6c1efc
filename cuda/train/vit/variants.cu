/* The variants `train-vit` and `infer-vit`. */
#include "train/variants.cuh"
#include "train/vit/engine.cuh"
#include "train/vit/kernels.cuh"

static enum status probe_vit(const struct resources *resources)
{
    TRY(vit_multiplier_probe());
    return device_probe(resources->device);
}

extern "C" {
extern const struct variant variant_train_vit, variant_infer_vit;
const struct variant variant_train_vit = training_by<&engine_vit>(false, probe_vit);
const struct variant variant_infer_vit = inferring_by<&engine_vit>(false, probe_vit);
}
