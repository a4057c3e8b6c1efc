/* `train-naive` and `infer-naive`: the reference engine of src/train/naive.c as variants. */
#include "machine/host.h"
#include "train/engine.h"
#include "variants.h"

TRAINING_BY(variant_train_naive, engine_naive, .instruction_set = isa_scalar_name);
INFERRING_BY(variant_infer_naive, engine_naive, .instruction_set = isa_scalar_name);
