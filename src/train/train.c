/* The workload `train`: its options. A run is one epoch and gives one row. */
#include <string.h>

#include "core/array.h"
#include "train/pipeline.h"
#include "train/train_parts.h"

static const char *const optimizers[] = {"sgd", "adam", "adamw",
                                         NULL}; /* in the order of enum optimizer_kind */
static const char *const feeds[] = {"stored", "live", "constant", NULL}; /* in the order of enum data_feed */
static const char *const schedules[] = {"constant",   "step", "multistep", "cosine",
                                        "polynomial", NULL};        /* in the order of enum schedule_kind */
static const char *const losses[] = {"cross-entropy", "bce", NULL}; /* in the order of enum loss_kind */
static const char *const interpolations[] = {"bilinear", "bicubic", NULL};
const char *const train_generators[] = {"auto", "fused", "bat", "gbase", "omp", NULL};
static const char *const recipes[] = {"none", "paper", NULL};
static const char *const lr_scales[] = {"none", "linear", "sqrt", NULL}; /* in the order of enum lr_scale */
static const char *const parallels[] = {"data", "pipeline", NULL};       /* in the order of enum parallel */

#define AT(field) offsetof(struct train_parameters, field)
static const struct option_spec options[] = {
    JOB_OPTIONS(
        struct train_parameters, "digits", "data to train on", "", "all; 10000 of generated data",
        "all; 2000 of generated data", "0.1",
        "10; 8 for clips; for class folders, data sets of --prepare and URLs, the largest label plus 1", "64",
        "", "uji", "as stored; synth: --res", "resize", "3", "fail"),
    {"recipe", "NAME", OPTION_CHOICE, AT(recipe), .fallback = "none", .choices = recipes,
     .help = "replace the defaults of other options: paper trains as in the published pre-training on "
             "VisualAtom. Add --help or --dry-run to see the values. NAME is one of"},
    {"model", "NAME", OPTION_CHOICE, AT(model), .fallback = "cnn", .choices = model_names, .column = COLUMN,
     .help = "the network"},
    {"batch", "N", OPTION_COUNT, AT(job.batch), .fallback = "64", .minimum = 1, .maximum = 1 << 20,
     .choices = option_max, .column = COLUMN,
     .help = "samples per step. With several ranks: samples per rank (--scaling weak) or of all ranks "
             "together (--scaling strong). max finds the largest batch that fits into memory"},
    {"drop-last", NULL, OPTION_FLAG, AT(drop_last), .column = COLUMN,
     .help =
         "leave out the last batch of every epoch if it is short. Its samples differ from epoch to epoch"},
    {"epochs", "N", OPTION_COUNT, AT(epochs), .fallback = "5", .minimum = 1, .maximum = 1 << 20,
     .column = COLUMN, .help = "epochs; one row per epoch"},
    {"optimizer", "NAME", OPTION_CHOICE, AT(optimizer), .fallback = "adam", .choices = optimizers,
     .column = COLUMN, .help = "the update rule"},
    {"lr", "RATE", OPTION_REAL, AT(lr), .fallback = "0.001", .maximum = 1e38, .column = COLUMN,
     .help = "learning rate after the warm-up"},
    {"momentum", "M", OPTION_REAL, AT(momentum), .fallback = "0.9", .maximum = 1, .column = COLUMN,
     .help = "momentum of sgd"},
    {"beta1", "B", OPTION_REAL, AT(beta1), .fallback = "0.9", .maximum = 0.999999, .column = COLUMN,
     .help = "decay rate of the first moment in adam and adamw"},
    {"beta2", "B", OPTION_REAL, AT(beta2), .fallback = "0.999", .maximum = 0.9999999, .column = COLUMN,
     .help = "decay rate of the second moment in adam and adamw"},
    {"epsilon", "E", OPTION_REAL, AT(epsilon), .fallback = "1e-8", .minimum = 1e-30, .maximum = 1,
     .column = COLUMN, .help = "epsilon in the denominator of adam and adamw"},
    {"weight-decay", "W", OPTION_REAL, AT(weight_decay), .fallback = "0", .maximum = 1e3, .column = COLUMN,
     .help = "weight decay. sgd and adam add W times the parameters to the gradient; adamw shrinks the "
             "parameters instead. In the networks vit-*, it applies neither to norms, biases and positions "
             "nor to the class token"},
    {"lr-schedule", "KIND", OPTION_CHOICE, AT(schedule), .fallback = "constant", .choices = schedules,
     .column = COLUMN, .help = "how the learning rate changes over the steps"},
    {"lr-warmup", "EPOCHS", OPTION_REAL, AT(lr_warmup), .fallback = "0", .maximum = 1e6, .column = COLUMN,
     .help = "epochs over which the learning rate rises linearly to --lr"},
    {"lr-step", "EPOCHS", OPTION_COUNT, AT(lr_step), .fallback = "10", .minimum = 1, .maximum = 1 << 20,
     .column = COLUMN,
     .help = "epochs between two decays of --lr-schedule step, counted from the start of training, including "
             "the warm-up"},
    {"lr-milestones", "E1:E2:...", OPTION_TEXT, AT(lr_milestones), .column = COLUMN,
     .help = "epochs after which --lr-schedule multistep decays, ascending, at most 8"},
    {"lr-gamma", "G", OPTION_REAL, AT(lr_gamma), .fallback = "0.1", .maximum = 1, .column = COLUMN,
     .help = "decay factor of --lr-schedule step and multistep"},
    {"lr-power", "P", OPTION_REAL, AT(lr_power), .fallback = "1", .maximum = 100, .column = COLUMN,
     .help = "power of --lr-schedule polynomial; 1 is a linear decay"},
    {"lr-min", "RATE", OPTION_REAL, AT(lr_min), .fallback = "0", .maximum = 1e38, .column = COLUMN,
     .help = "learning rate at the end of --lr-schedule cosine and polynomial"},
    {"lr-cycles", "N", OPTION_COUNT, AT(lr_cycles), .fallback = "1", .minimum = 1, .maximum = 1 << 20,
     .column = COLUMN,
     .help = "how often --lr-schedule cosine and polynomial repeat their decay, each time from --lr"},
    {"label-smoothing", "S", OPTION_REAL, AT(label_smoothing), .fallback = "0", .maximum = 1,
     .column = COLUMN, .help = "share of the target probability that is spread evenly over all classes"},
    {"loss", "NAME", OPTION_CHOICE, AT(loss), .fallback = "cross-entropy", .choices = losses,
     .column = COLUMN,
     .help = "the loss: softmax cross-entropy, or binary cross-entropy of each class. NAME is one of"},
    {"clip-norm", "NORM", OPTION_REAL, AT(clip_norm), .minimum = 1e-30, .maximum = 1e30, .column = COLUMN,
     .help = "scale the gradients of a step down if their Euclidean norm over all parameters is larger than "
             "this"},
    {"accumulate", "N", OPTION_COUNT, AT(accumulate), .fallback = "1", .minimum = 1, .maximum = 1 << 20,
     .column = COLUMN,
     .help = "compute the gradients of a step in N parts of its batch, one after another, to save memory"},
    {"ema", "DECAY", OPTION_REAL, AT(ema), .minimum = 1e-6, .maximum = 0.9999999, .column = COLUMN,
     .help =
         "also keep an exponential moving average of the parameters with this decay per step, and test it"},
    {"layer-decay", "D", OPTION_REAL, AT(layer_decay), .fallback = "1", .minimum = 1e-6, .maximum = 1,
     .column = COLUMN,
     .help =
         "multiply the learning rate of each block of a transformer by D, relative to the block after it"},
    {"drop-path", "RATE", OPTION_REAL, AT(drop_path), .maximum = 0.99, .column = COLUMN,
     .help = "rate of stochastic depth in the last block of a transformer; it rises linearly from 0 in the "
             "first block (default: the network's own rate)"},
    {"checkpoint-activations", NULL, OPTION_FLAG, AT(checkpoint_activations), .column = COLUMN,
     .help =
         "save memory: compute the forward pass of each block again in the backward pass (only train-vit)"},
    {"feed", "HOW", OPTION_CHOICE, AT(job.feed), .choices = feeds, .column = COLUMN,
     .help = "where training samples come from. stored reads or generates all samples before training "
             "(default, except for synth); live generates each batch during training (only for synth, where "
             "it is the default); constant repeats the first batch, to measure the speed without the cost of "
             "input. HOW is one of"},
    {"generator", "NAME", OPTION_CHOICE, AT(generator), .fallback = "auto", .choices = train_generators,
     .column = COLUMN, .help = "which variant of synth generates live samples. NAME is one of"},
    {"fresh", NULL, OPTION_FLAG, AT(job.fresh), .column = COLUMN,
     .help = "with --feed live, generate new samples in every epoch"},
    {"shift", "PIXELS", OPTION_COUNT, AT(shift), .fallback = "0", .maximum = 1 << 12, .column = COLUMN,
     .help = "shift each training sample at random, vertically and horizontally, by up to this many pixels, "
             "and fill the gaps with zeros"},
    {"flip", NULL, OPTION_FLAG, AT(flip), .column = COLUMN,
     .help = "flip each training sample left to right with probability 1/2"},
    {"interpolation", "HOW", OPTION_CHOICE, AT(interpolation), .fallback = "bilinear",
     .choices = interpolations, .column = COLUMN,
     .help = "how --fit random-resized-crop resizes training samples. HOW is one of"},
    {"rand-augment", "M", OPTION_REAL, AT(rand_augment), .maximum = 30, .column = COLUMN,
     .help = "apply operations of RandAugment with this magnitude (0 to 30) to each training sample; none: "
             "off (default: none)"},
    {"rand-augment-ops", "N", OPTION_COUNT, AT(rand_augment_ops), .fallback = "2", .minimum = 1,
     .maximum = 16, .column = COLUMN, .help = "number of operations that --rand-augment applies to a sample"},
    {"erasing", "P", OPTION_REAL, AT(erasing), .fallback = "0", .maximum = 1, .column = COLUMN,
     .help = "probability that a rectangle of a training sample is filled with noise"},
    {"mixup", "ALPHA", OPTION_REAL, AT(mixup), .fallback = "0", .maximum = 1000, .column = COLUMN,
     .help = "mix pairs of training samples and their labels (MixUp), with weights drawn from Beta(ALPHA, "
             "ALPHA); 0: off"},
    {"cutmix", "ALPHA", OPTION_REAL, AT(cutmix), .fallback = "0", .maximum = 1000, .column = COLUMN,
     .help = "replace a rectangle of each training sample by that of another one (CutMix); the area of the "
             "rectangle, as a fraction of the image, is drawn from Beta(ALPHA, ALPHA); 0: off. With --mixup "
             "as well, each step draws one of the two"},
    {"repeats", "N", OPTION_COUNT, AT(repeats), .fallback = "1", .minimum = 1, .maximum = 64,
     .column = COLUMN,
     .help = "repeated augmentation: each step has N differently augmented copies of each of its samples"},
    {"raw", NULL, OPTION_FLAG, AT(raw), .column = COLUMN,
     .help = "do not normalise samples with the training set's mean and standard deviation"},
    {"mean", "M[,M,M]", OPTION_TEXT, AT(mean), .minimum = -1e6, .maximum = 1e6, .column = COLUMN,
     .help = "normalise samples with this mean and the standard deviation of --std: one value, or one per "
             "channel; for bytes, both refer to values scaled to 0 to 1 (default: the training set's mean)"},
    {"std", "S[,S,S]", OPTION_TEXT, AT(std), .minimum = 1e-6, .maximum = 1e6, .column = COLUMN,
     .help = "normalise samples with this standard deviation and the mean of --mean: one value, or one per "
             "channel (default: the training set's standard deviation)"},
    {"cudnn-benchmark", NULL, OPTION_FLAG, AT(cudnn_benchmark), .column = COLUMN,
     .help = "measure the algorithms of cuDNN and take the fastest (only train-cudnn and train-cudnn-tf32)"},
    {"seed", "N", OPTION_COUNT, AT(seed), .fallback = "0", .maximum = 18446744073709551615.0,
     .column = COLUMN, .help = "seed of the initial parameters, order, dropout and augmentation"},
    {"sync", "METHOD", OPTION_CHOICE, AT(sync), .fallback = "auto", .choices = exchange_names,
     .column = COLUMN,
     .help = "how ranks add up their gradients. mpi adds them up in host memory. The other methods are for "
             "GPU variants: nccl uses NVIDIA's library; with peer, GPUs of one machine read each other's "
             "memory; peer-bf16 is peer with gradients sent as bf16; peer-fused is peer that also updates "
             "the parameters, and each rank holds only the moments of its share. auto takes the first of "
             "peer, nccl and mpi that works. METHOD is one of"},
    {"lr-scale", "RULE", OPTION_CHOICE, AT(lr_scale), .fallback = "none", .choices = lr_scales,
     .column = COLUMN,
     .help = "how --lr changes with the number of ranks. With --scaling weak, N ranks have N times the "
             "batch: linear multiplies --lr by N, sqrt by the square root of N, and none leaves --lr "
             "unchanged. With --scaling strong, every rule leaves --lr unchanged. RULE is one of"},
    {"balance", "HOW", OPTION_TEXT, AT(balance), .fallback = "equal", .column = COLUMN,
     .help = "how ranks divide the samples of a step: equal; measured, by the speeds measured in each epoch; "
             "memory, by free memory; or in proportion to numbers, one per rank, such as 3:1"},
    {"parallel", "HOW", OPTION_CHOICE, AT(parallel), .fallback = "data", .choices = parallels,
     .column = COLUMN,
     .help = "how ranks divide a step. With data, each rank has the whole network and a part of the samples. "
             "With pipeline, each rank has some layers, and micro-batches of all samples pass through the "
             "ranks. HOW is one of"},
    {"stages", "S", OPTION_COUNT, AT(stages), .minimum = 1, .maximum = MODEL_LAYERS_MAX, .column = COLUMN,
     .help = "parts into which --parallel pipeline cuts the network; must be the number of ranks (default: "
             "the number of ranks)"},
    {"microbatches", "M", OPTION_COUNT, AT(micros), .fallback = "8", .minimum = 1, .maximum = 1 << 16,
     .column = COLUMN, .help = "parts into which --parallel pipeline divides the samples of a step"},
    {"schedule", "NAME", OPTION_CHOICE, AT(pipe_schedule), .fallback = "1f1b", .choices = pipe_schedule_names,
     .column = COLUMN,
     .help = "the order in which --parallel pipeline computes its micro-batches. gpipe computes all forward "
             "passes first. 1f1b alternates forward and backward passes. zb-h1 is like 1f1b, but computes "
             "gradients of weights while 1f1b would wait. NAME is one of"},
    {"init", "FILE|DIR", OPTION_TEXT, AT(init),
     .help = "start with the parameters in this file, or in the latest checkpoint of this folder. The file "
             "is a checkpoint, or a file of --export or torch.save() whose name ends in .safetensors, .pt, "
             ".pth or .pth.tar. The model must be the same. If the number of classes differs, or the file "
             "has no last layer, that layer starts with zeros"},
    {"checkpoint", "DIR", OPTION_TEXT, AT(checkpoint),
     .help = "write a checkpoint into this folder after every epoch"},
    {"keep", "N", OPTION_COUNT, AT(keep), .fallback = "3", .minimum = 1, .maximum = 1 << 20,
     .help = "number of checkpoints to keep"},
    {"checkpoint-steps", "N", OPTION_COUNT, AT(checkpoint_steps), .minimum = 1, .maximum = 1 << 30,
     .help = "also write a checkpoint every N steps, counted over all epochs"},
    {"resume", NULL, OPTION_FLAG, AT(resume),
     .help = "continue from the latest checkpoint in the folder of --checkpoint, or start from the beginning "
             "if there is none"},
    {"log", "FILE", OPTION_OUTPUT, AT(log_path),
     .help = "append rows about the steps within the epochs to this CSV file"},
    {"log-steps", "N", OPTION_COUNT, AT(log_steps), .fallback = "100", .minimum = 1, .maximum = 1 << 30,
     .help = "steps between two rows of --log, counted over all epochs"},
    {"test-steps", "N", OPTION_COUNT, AT(test_steps), .minimum = 1, .maximum = 1 << 30,
     .help = "also test the network every N steps, counted over all epochs, and append a row to the file of "
             "--log"},
    {"export", "FILE", OPTION_OUTPUT, AT(export_path),
     .help = "write the parameters after the last epoch as safetensors, which PyTorch can load; the name "
             "must end in .safetensors, or have no ending"},
    {"export-step", "FILE", OPTION_OUTPUT, AT(step_path),
     .help = "write the first step as safetensors: its samples, gradients (before clipping and weight decay) "
             "and loss, and the parameters before and after it; add --dry-run to stop afterwards"},
    {"export-data", "FILE", OPTION_OUTPUT, AT(data_path),
     .help = "write the training set, the test set and the initial parameters as safetensors; add --dry-run "
             "to stop afterwards"},
    {"save-batch", "N:DIR", OPTION_TEXT, AT(save_batch),
     .help = "write the first N samples of the first step as PNG files into this new or empty folder, as the "
             "network sees them; add --dry-run to stop afterwards"},
    {"allow-nan", NULL, OPTION_FLAG, AT(allow_nan), .help = "continue if the loss is not finite"},
    {"verify-steps", "N", OPTION_COUNT, AT(verify_steps), .fallback = "10", .minimum = 1, .maximum = 1 << 20,
     .help = "number of steps that --verify compares with the reference before the first epoch"},
};

static const struct option_section sections[] = {
    {"data", "data"},
    {"network", "model"},
    {"optimizer", "recipe"},
    {"optimizer", "batch"},
    {"network", "drop-path"},
    {"data", "feed"},
    {"augmentation", "shift"},
    {"data", "raw"},
    {"network", "cudnn-benchmark"},
    {"optimizer", "seed"},
    {"ranks", "sync"},
    {"network", "init"},
    {"output", "checkpoint"},
    {"optimizer", "allow-nan"},
    {"what to run", "verify-steps"},
    {NULL, NULL},
};

/* The published pre-training (docs/pretrain.md). The warm-up is 5000 steps of 256 samples. */
static const char *const paper[] = {
    /* the samples; left out with other data than synth */
    "data", "synth", "preset", "paper-1000", "classes", "1000", "train-size", "1000000", "fresh", "yes",
    "res", "512",
    /* how to train */
    "out-res", "224", "channels", "3", "mean", "0.5", "std", "0.5", "batch", "256", "drop-last", "yes",
    "optimizer", "adamw", "lr", "0.001", "lr-schedule", "cosine", "lr-warmup", "1.28", "weight-decay", "0.05",
    "label-smoothing", "0.1", "drop-path", "0.1", "flip", "yes", "rand-augment", "28", "rand-augment-ops",
    "2", "erasing", "0.25", "mixup", "0.8", "cutmix", "1", NULL};
#define PAPER_SAMPLES 12 /* entries of `paper` that describe the samples */

static const char *const *train_defaults(int argc, char *const argv[])
{
    const char *recipe = options_peek(options, COUNT_OF(options), argc, argv, "recipe");
    const char *data = options_peek(options, COUNT_OF(options), argc, argv, "data");
    if (!recipe || strcmp(recipe, "paper") != 0)
        return NULL;
    return !data || strcmp(data, "synth") == 0 ? paper : paper + PAPER_SAMPLES;
}

static const char *const single[] = {"checkpoint", "export", "export-step", "save-batch", NULL};

static const char *const shown[] = {"train_loss", "train_acc", "test_acc", NULL};
static const char *const baselines[] = {"train-naive", NULL};

/* Returns a hash of the samples, for the comparison of the ranks. */
static uint64_t train_identity(const void *input)
{
    const struct opened *opened = input;
    return fnv_add(FNV_BEGIN, opened->data.hashes, sizeof opened->data.hashes);
}

static const char *train_folder(const void *input)
{
    return ((const struct opened *)input)->job.checkpoints;
}

const struct workload workload_train = {
    .name = "train",
    .schema = "train/10",
    .summary = "trains a network to classify, epoch by epoch",
    .item = "samples",
    .options = options,
    .option_count = COUNT_OF(options),
    .option_sections = sections,
    .parameters_bytes = sizeof(struct train_parameters),
    .defaults = train_defaults,
    .single = single,
    .columns = train_columns,
    .shown = shown,
    .cpu_stand_in = "train-omp",
    .baselines = baselines,
    .open = train_open,
    .close = train_close,
    .repartition = job_stay,
    .applies = train_applies,
    .accepts = train_accepts,
    .largest = {job_batch, train_range, train_set_batch, trainer_probe},
    .epochs.check = trainer_check,
    .epochs.more = trainer_more,
    .work = train_work,
    .verify = trainer_verify,
    .measure = train_measure,
    .ranks.identity = train_identity,
    .checks.verdict = trainer_verdict,
    .epochs.keep = trainer_keep,
    .epochs.folder = train_folder,
    .epochs.kept = trainer_kept,
    .epochs.end = trainer_end,
};
