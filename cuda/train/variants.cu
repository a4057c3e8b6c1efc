/* The variants that use the engines of engine.cuh. */
#include "machine/device.h"
#include "train/cudnn.cuh"
#include "train/engine.cuh"
#include "train/inferrer.h"
#include "train/trainer.h"

static enum status probe(const struct resources *resources)
{
    return device_probe(resources->device);
}

template <const struct engine *ENGINE>
static enum status train_setup(const struct resources *resources, const void *input, void **state)
{
    return trainer_open(ENGINE, resources, input, state);
}

static enum status infer_setup(const struct resources *resources, const void *input, void **state)
{
    return inferrer_open(&engine_cuda, resources, input, state);
}

template <const struct engine *ENGINE> static constexpr struct variant training_by(void)
{
    return {.platform = "cuda",
            .threaded = false,
            .traits = ENGINE,
            .probe = probe,
            .setup = train_setup<ENGINE>,
            .run = trainer_run,
            .fetch = trainer_fetch,
            .teardown = trainer_close};
}

extern "C" {
extern const struct variant variant_train_cuda, variant_train_tf32, variant_train_bf16, variant_train_amp;
extern const struct variant variant_infer_cuda;
const struct variant variant_train_cuda = training_by<&engine_cuda>();
const struct variant variant_train_tf32 = training_by<&engine_tf32>();
const struct variant variant_train_bf16 = training_by<&engine_bf16>();
const struct variant variant_train_amp = training_by<&engine_amp>();
const struct variant variant_infer_cuda = {.platform = "cuda",
                                           .threaded = false,
                                           .traits = &engine_cuda,
                                           .probe = probe,
                                           .setup = infer_setup,
                                           .run = inferrer_run,
                                           .fetch = inferrer_fetch,
                                           .teardown = inferrer_close};
}

#ifdef HAVE_CUDNN
static enum status probe_cudnn(const struct resources *resources)
{
    TRY(cudnn_probe());
    return device_probe(resources->device);
}

template <const struct engine *ENGINE>
static enum status cudnn_setup(const struct resources *resources, const void *input, void **state)
{
    return trainer_open(ENGINE, resources, input, state);
}

template <const struct engine *ENGINE> static constexpr struct variant training_by_cudnn(void)
{
    return {.platform = "cuda",
            .threaded = false,
            .traits = ENGINE,
            .probe = probe_cudnn,
            .setup = cudnn_setup<ENGINE>,
            .run = trainer_run,
            .fetch = trainer_fetch,
            .teardown = trainer_close};
}

extern "C" {
extern const struct variant variant_train_cudnn, variant_train_cudnn_tf32;
const struct variant variant_train_cudnn = training_by_cudnn<&engine_cudnn>();
const struct variant variant_train_cudnn_tf32 = training_by_cudnn<&engine_cudnn_tf32>();
}
#endif
