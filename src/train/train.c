/* The workload `train`: its options, its input, and the columns of its rows. A run is one epoch and gives one
 * row. */
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "core/fnv.h"
#include "core/workload.h"
#include "data/safetensors.h"
#include "train/augment.h"
#include "train/export.h"
#include "train/init.h"
#include "train/job.h"
#include "train/pipeline.h"
#include "train/step_log.h"
#include "train/trainer.h"

struct parameters {
    struct job_parameters job; /* must be the first member */
    int model, optimizer, schedule, sync, lr_scale, parallel, pipe_schedule;
    bool several_ranks, largest; /* largest: --batch max */
    uint64_t stages, micros;     /* --stages is 0 if not given */
    uint64_t epochs, seed, lr_step, lr_cycles, shift, keep, verify_steps;
    double lr, momentum, beta1, beta2, epsilon, weight_decay, lr_warmup, lr_gamma, lr_power, lr_min;
    double label_smoothing, mean, std, clip_norm, ema, layer_decay, drop_path;
    double rand_augment, erasing, mixup, cutmix;
    uint64_t accumulate, rand_augment_ops, repeats;
    uint64_t checkpoint_steps, test_steps; /* 0: not given */
    uint64_t log_steps;
    int loss, interpolation, generator, recipe;
    const char *lr_milestones, *balance, *init, *checkpoint, *export_path, *step_path, *data_path,
        *save_batch, *log_path;
    bool drop_last, flip, raw, resume, allow_nan, checkpoint_activations, cudnn_benchmark;
};

static const char *const optimizers[] = {"sgd", "adam", "adamw",
                                         NULL}; /* in the order of enum optimizer_kind */
static const char *const feeds[] = {"stored", "live", "constant", NULL}; /* in the order of enum data_feed */
static const char *const schedules[] = {"constant",   "step", "multistep", "cosine",
                                        "polynomial", NULL};        /* in the order of enum schedule_kind */
static const char *const losses[] = {"cross-entropy", "bce", NULL}; /* in the order of enum loss_kind */
enum interpolation { INTERPOLATION_BILINEAR, INTERPOLATION_BICUBIC };
static const char *const interpolations[] = {"bilinear", "bicubic", NULL};
enum live_generator { GENERATOR_AUTO, GENERATOR_FUSED, GENERATOR_BAT, GENERATOR_GBASE, GENERATOR_OMP };
static const char *const generators[] = {"auto", "fused", "bat", "gbase", "omp", NULL}; /* in enum order */
static const char *const recipes[] = {"none", "paper", NULL};
enum lr_scale { LR_SCALE_NONE, LR_SCALE_LINEAR, LR_SCALE_SQRT };
static const char *const lr_scales[] = {"none", "linear", "sqrt", NULL}; /* in the order of enum lr_scale */
enum parallel { PARALLEL_DATA, PARALLEL_PIPELINE };
static const char *const parallels[] = {"data", "pipeline", NULL}; /* in the order of enum parallel */

#define AT(field) offsetof(struct parameters, field)
static const struct option_spec options[] = {
    JOB_OPTIONS(struct parameters, "digits", "data to train on", "", "all; 10000 of generated data",
                "all; 2000 of generated data",
                "10; 8 for clips; for a data set of --prepare, its largest label plus 1", "64", ""),
    {"recipe", "NAME", OPTION_CHOICE, AT(recipe), "none", 0, 0, recipes, false,
     "replace the defaults of other options: paper trains as in the published pre-training on VisualAtom. "
     "Add --help or --dry-run to see the values. NAME is one of"},
    {"model", "NAME", OPTION_CHOICE, AT(model), "cnn", 0, 0, model_names, true, "the network"},
    {"batch", "N", OPTION_COUNT, AT(job.batch), "64", 1, 1 << 20, option_max, true,
     "samples per step; with several ranks, per rank, or with --scaling strong, of all ranks together. max "
     "finds the largest batch that fits into memory"},
    {"drop-last", NULL, OPTION_FLAG, AT(drop_last), NULL, 0, 0, NULL, true,
     "leave out the last batch of every epoch if it is short. Its samples differ from epoch to epoch"},
    {"epochs", "N", OPTION_COUNT, AT(epochs), "5", 1, 1 << 20, NULL, true, "epochs; one row per epoch"},
    {"optimizer", "NAME", OPTION_CHOICE, AT(optimizer), "adam", 0, 0, optimizers, true, "the update rule"},
    {"lr", "RATE", OPTION_REAL, AT(lr), "0.001", 0, 1e38, NULL, true, "learning rate after the warm-up"},
    {"momentum", "M", OPTION_REAL, AT(momentum), "0.9", 0, 1, NULL, true, "momentum of sgd"},
    {"beta1", "B", OPTION_REAL, AT(beta1), "0.9", 0, 0.999999, NULL, true,
     "decay rate of the first moment in adam and adamw"},
    {"beta2", "B", OPTION_REAL, AT(beta2), "0.999", 0, 0.9999999, NULL, true,
     "decay rate of the second moment in adam and adamw"},
    {"epsilon", "E", OPTION_REAL, AT(epsilon), "1e-8", 1e-30, 1, NULL, true,
     "epsilon in the denominator of adam and adamw"},
    {"weight-decay", "W", OPTION_REAL, AT(weight_decay), "0", 0, 1e3, NULL, true,
     "weight decay. sgd and adam add W times the parameters to the gradient; adamw shrinks the parameters "
     "instead. In the networks vit-*, it applies neither to norms, biases and positions nor to the class "
     "token"},
    {"lr-schedule", "KIND", OPTION_CHOICE, AT(schedule), "constant", 0, 0, schedules, true,
     "how the learning rate changes over the steps"},
    {"lr-warmup", "EPOCHS", OPTION_REAL, AT(lr_warmup), "0", 0, 1e6, NULL, true,
     "epochs over which the learning rate rises linearly to --lr"},
    {"lr-step", "EPOCHS", OPTION_COUNT, AT(lr_step), "10", 1, 1 << 20, NULL, true,
     "epochs between two decays of --lr-schedule step"},
    {"lr-milestones", "E1:E2:...", OPTION_TEXT, AT(lr_milestones), NULL, 0, 0, NULL, true,
     "epochs after which --lr-schedule multistep decays, ascending, at most 8"},
    {"lr-gamma", "G", OPTION_REAL, AT(lr_gamma), "0.1", 0, 1, NULL, true,
     "decay factor of --lr-schedule step and multistep"},
    {"lr-power", "P", OPTION_REAL, AT(lr_power), "1", 0, 100, NULL, true,
     "power of --lr-schedule polynomial; 1 is a linear decay"},
    {"lr-min", "RATE", OPTION_REAL, AT(lr_min), "0", 0, 1e38, NULL, true,
     "learning rate at the end of --lr-schedule cosine and polynomial"},
    {"lr-cycles", "N", OPTION_COUNT, AT(lr_cycles), "1", 1, 1 << 20, NULL, true,
     "how often --lr-schedule cosine and polynomial repeat their decay, each time from --lr"},
    {"label-smoothing", "S", OPTION_REAL, AT(label_smoothing), "0", 0, 1, NULL, true,
     "share of the target probability that is spread evenly over all classes"},
    {"loss", "NAME", OPTION_CHOICE, AT(loss), "cross-entropy", 0, 0, losses, true,
     "the loss: softmax cross-entropy, or binary cross-entropy of each class. NAME is one of"},
    {"clip-norm", "NORM", OPTION_REAL, AT(clip_norm), NULL, 1e-30, 1e30, NULL, true,
     "scale the gradients of a step down if their Euclidean norm over all parameters is larger than this"},
    {"accumulate", "N", OPTION_COUNT, AT(accumulate), "1", 1, 1 << 20, NULL, true,
     "compute the gradients of a step in N parts of its batch, one after another, to save memory"},
    {"ema", "DECAY", OPTION_REAL, AT(ema), NULL, 1e-6, 0.9999999, NULL, true,
     "also keep an exponential moving average of the parameters with this decay per step, and test it"},
    {"layer-decay", "D", OPTION_REAL, AT(layer_decay), "1", 1e-6, 1, NULL, true,
     "multiply the learning rate of each block of a transformer by D, relative to the block after it"},
    {"drop-path", "RATE", OPTION_REAL, AT(drop_path), NULL, 0, 0.99, NULL, true,
     "rate of stochastic depth in the last block of a transformer; it rises linearly from 0 in the first "
     "block (default: as --model says)"},
    {"checkpoint-activations", NULL, OPTION_FLAG, AT(checkpoint_activations), NULL, 0, 0, NULL, true,
     "save memory: compute the forward pass of each block again in the backward pass (only train-vit)"},
    {"feed", "HOW", OPTION_CHOICE, AT(job.feed), NULL, 0, 0, feeds, true,
     "where training samples come from. stored reads or generates all samples before training (default, "
     "except for synth); live generates each batch during training (only for synth, where it is the "
     "default); "
     "constant repeats the first batch, to measure the speed without the cost of input. HOW is one of"},
    {"generator", "NAME", OPTION_CHOICE, AT(generator), "auto", 0, 0, generators, true,
     "which variant of synth generates live samples. NAME is one of"},
    {"fresh", NULL, OPTION_FLAG, AT(job.fresh), NULL, 0, 0, NULL, true,
     "with --feed live, generate new samples in every epoch"},
    {"shift", "PIXELS", OPTION_COUNT, AT(shift), "0", 0, 1 << 12, NULL, true,
     "shift each training sample at random, vertically and horizontally, by up to this many pixels, and fill "
     "the gaps with zeros"},
    {"flip", NULL, OPTION_FLAG, AT(flip), NULL, 0, 0, NULL, true,
     "flip each training sample left to right with probability 1/2"},
    {"interpolation", "HOW", OPTION_CHOICE, AT(interpolation), "bilinear", 0, 0, interpolations, true,
     "how --fit random-resized-crop resizes training samples. HOW is one of"},
    {"rand-augment", "M", OPTION_REAL, AT(rand_augment), NULL, 0, 30, NULL, true,
     "apply operations of RandAugment with this magnitude (0 to 30) to each training sample"},
    {"rand-augment-ops", "N", OPTION_COUNT, AT(rand_augment_ops), "2", 1, 16, NULL, true,
     "number of operations that --rand-augment applies to a sample"},
    {"erasing", "P", OPTION_REAL, AT(erasing), "0", 0, 1, NULL, true,
     "probability that a rectangle of a training sample is filled with noise"},
    {"mixup", "ALPHA", OPTION_REAL, AT(mixup), "0", 0, 1000, NULL, true,
     "mix pairs of training samples and their labels (MixUp), with shares of the distribution Beta(ALPHA, "
     "ALPHA); 0: do not"},
    {"cutmix", "ALPHA", OPTION_REAL, AT(cutmix), "0", 0, 1000, NULL, true,
     "replace a rectangle of each training sample by that of another one (CutMix), with an area of the "
     "distribution Beta(ALPHA, ALPHA); 0: do not. With --mixup as well, each step draws one of the two"},
    {"repeats", "N", OPTION_COUNT, AT(repeats), "1", 1, 64, NULL, true,
     "repeated augmentation: each step has N differently augmented copies of each of its samples"},
    {"raw", NULL, OPTION_FLAG, AT(raw), NULL, 0, 0, NULL, true,
     "do not normalise samples with the training set's mean and standard deviation"},
    {"mean", "M", OPTION_REAL, AT(mean), "0", -1e6, 1e6, NULL, true,
     "normalise samples with this mean and with --std instead of the training set's; bytes count as 0 to 1"},
    {"std", "S", OPTION_REAL, AT(std), NULL, 1e-6, 1e6, NULL, true,
     "normalise samples with this standard deviation and with --mean"},
    {"cudnn-benchmark", NULL, OPTION_FLAG, AT(cudnn_benchmark), NULL, 0, 0, NULL, true,
     "measure the algorithms of cuDNN and take the fastest (only train-cudnn and train-cudnn-tf32)"},
    {"seed", "N", OPTION_COUNT, AT(seed), "0", 0, 18446744073709551615.0, NULL, true,
     "seed of the initial parameters, order, dropout and augmentation"},
    {"sync", "METHOD", OPTION_CHOICE, AT(sync), "auto", 0, 0, exchange_names, true,
     "how ranks add up their gradients: mpi in host memory; for GPU variants also nccl, by NVIDIA's library, "
     "and peer, by GPUs of one machine that read each other's memory. peer-bf16 sends the gradients as bf16; "
     "peer-fused also updates the parameters, and each rank has the moments of its share only. auto takes "
     "the first of peer, nccl and mpi that works. METHOD is one of"},
    {"lr-scale", "RULE", OPTION_CHOICE, AT(lr_scale), "none", 0, 0, lr_scales, true,
     "how --lr changes with the number of ranks. With --scaling weak, N ranks have N times the batch: linear "
     "multiplies --lr by N, sqrt by the square root of N, and none leaves --lr unchanged. With --scaling "
     "strong, every rule leaves --lr unchanged. RULE is one of"},
    {"balance", "HOW", OPTION_TEXT, AT(balance), "equal", 0, 0, NULL, true,
     "how ranks divide the samples of a step: equal; measured, by their speeds, which are measured in each "
     "epoch; memory, by their free memory; or by a list of numbers, one per rank, such as 3:1"},
    {"parallel", "HOW", OPTION_CHOICE, AT(parallel), "data", 0, 0, parallels, true,
     "how ranks divide a step. With data, each rank has the whole network and a part of the samples. With "
     "pipeline, each rank has some layers, and micro-batches of all samples pass through the ranks. HOW is "
     "one "
     "of"},
    {"stages", "S", OPTION_COUNT, AT(stages), NULL, 1, MODEL_LAYERS_MAX, NULL, true,
     "parts into which --parallel pipeline cuts the network; must be the number of ranks (default)"},
    {"microbatches", "M", OPTION_COUNT, AT(micros), "8", 1, 1 << 16, NULL, true,
     "parts into which --parallel pipeline divides the samples of a step"},
    {"schedule", "NAME", OPTION_CHOICE, AT(pipe_schedule), "1f1b", 0, 0, pipe_schedule_names, true,
     "in which order --parallel pipeline computes its micro-batches: gpipe all forward passes first, 1f1b "
     "forward and backward passes in turn, zb-h1 as 1f1b, with gradients of weights in the time in which "
     "1f1b "
     "waits. NAME is one of"},
    {"init", "FILE|DIR", OPTION_TEXT, AT(init), NULL, 0, 0, NULL, false,
     "start with the parameters of this checkpoint, of the latest checkpoint in this folder, or of a file "
     "of --export or of timm, whose name ends in .safetensors. The model must be the same. If the number of "
     "classes differs, the last layer starts with zeros"},
    {"checkpoint", "DIR", OPTION_TEXT, AT(checkpoint), NULL, 0, 0, NULL, false,
     "write a checkpoint into this folder after every epoch"},
    {"keep", "N", OPTION_COUNT, AT(keep), "3", 1, 1 << 20, NULL, false, "number of checkpoints to keep"},
    {"checkpoint-steps", "N", OPTION_COUNT, AT(checkpoint_steps), NULL, 1, 1 << 30, NULL, false,
     "also write a checkpoint every N steps, counted over all epochs"},
    {"resume", NULL, OPTION_FLAG, AT(resume), NULL, 0, 0, NULL, false,
     "continue bit-exactly from the latest checkpoint in the folder of --checkpoint, or start from the "
     "beginning if there is none"},
    {"log", "FILE", OPTION_OUTPUT, AT(log_path), NULL, 0, 0, NULL, false,
     "append rows about the steps within the epochs to this CSV file"},
    {"log-steps", "N", OPTION_COUNT, AT(log_steps), "100", 1, 1 << 30, NULL, false,
     "steps between two rows of --log, counted over all epochs"},
    {"test-steps", "N", OPTION_COUNT, AT(test_steps), NULL, 1, 1 << 30, NULL, false,
     "also test the network every N steps, counted over all epochs, and append a row to the file of --log"},
    {"export", "FILE", OPTION_OUTPUT, AT(export_path), NULL, 0, 0, NULL, false,
     "write the parameters after the last epoch as safetensors, which PyTorch can load"},
    {"export-step", "FILE", OPTION_OUTPUT, AT(step_path), NULL, 0, 0, NULL, false,
     "write the first step as safetensors: its samples, gradients and loss, and the parameters before and "
     "after it"},
    {"export-data", "FILE", OPTION_OUTPUT, AT(data_path), NULL, 0, 0, NULL, false,
     "write the training set, the test set and the initial parameters as safetensors; add --dry-run to skip "
     "training"},
    {"save-batch", "N:DIR", OPTION_TEXT, AT(save_batch), NULL, 0, 0, NULL, false,
     "write the first N samples of the first step as PNG files into this folder, as the network sees them"},
    {"allow-nan", NULL, OPTION_FLAG, AT(allow_nan), NULL, 0, 0, NULL, false,
     "continue if the loss is not finite"},
    {"verify-steps", "N", OPTION_COUNT, AT(verify_steps), "10", 1, 1 << 20, NULL, false,
     "number of steps that --verify compares with the reference before the first epoch"},
};

/* The published pre-training (docs/pretrain.md). The warm-up is 5000 steps of 256 samples. */
static const char *const paper[] = {
    /* the samples; left out with other data than synth */
    "data", "synth", "preset", "paper-1000", "classes", "1000", "train-size", "1000000", "fresh", "yes",
    "res", "512",
    /* the training */
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

static const struct measure columns[] = {
    {"timed_stages", COMBINE_FIRST},   {"epoch", COMBINE_SAME},
    {"steps", COMBINE_SAME},           {"parameters", COMBINE_SAME},
    {"train_samples", COMBINE_SAME},   {"test_samples", COMBINE_SAME},
    {"train_loss", COMBINE_SAME},      {"train_acc", COMBINE_SAME},
    {"test_loss", COMBINE_SAME},       {"test_acc", COMBINE_SAME},
    {"last_lr", COMBINE_SAME},         {"trained_s", COMBINE_SAME},
    {"to_98_s", COMBINE_SAME},         {"to_99_s", COMBINE_SAME},
    {"data_share", COMBINE_MAX},       {"memory_bytes", COMBINE_SUM},
    {"generate_share", COMBINE_MAX},   {"generated_per_s", COMBINE_SUM_REAL},
    {"opening_s", COMBINE_MAX},        {"init", COMBINE_FIRST},
    {"skipped_steps", COMBINE_SAME},   {"loss_scale", COMBINE_SAME},
    {"exchange", COMBINE_FIRST},       {"exchange_share", COMBINE_MAX},
    {"samples_per_step", COMBINE_SUM}, {"layers", COMBINE_COMMON},
    {"bubble", COMBINE_MEAN},          {"bubble_ideal", COMBINE_MEAN},
    {"bubble_formula", COMBINE_SAME},  {"batch_probes", COMBINE_SAME},
    {"gradient_norm", COMBINE_SAME},   {"ema_test_loss", COMBINE_SAME},
    {"ema_test_acc", COMBINE_SAME},    {NULL, COMBINE_FIRST},
};
static const char *const shown[] = {"epoch", "train_loss", "train_acc", "test_acc", NULL};
static const char *const baselines[] = {"train-naive", NULL};

/* The workload's input and what it owns. */
struct opened {
    struct train_job job; /* must be the first member: trainers cast the input to it */
    struct model model;
    struct data data;
    char *identity;
    float *initial;   /* initial parameters */
    double *weights;  /* per rank; NULL with one rank */
    uint32_t *shares; /* per rank; NULL with one rank */
    uint32_t probes;  /* batches tried for --batch max; 0: none */
    char init[17];    /* hash of the parameters from --init; "" without --init */
};

static void train_close(void *input)
{
    struct opened *opened = input;
    data_close(&opened->data);
    free(opened->identity);
    free(opened->initial);
    free(opened->weights);
    free(opened->shares);
    free(opened);
}

/* ---- Opening ---- */

static bool is_one_of(const char *name, const char *const *names)
{
    for (size_t i = 0; names[i]; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}

static bool crops(const struct parameters *parameters)
{
    return parameters->job.out_res && parameters->job.fit == FIT_RANDOM_RESIZED_CROP;
}

/* If `option` has no effect with these parameters, returns what it needs, such as "--optimizer sgd".
 * Otherwise returns NULL. */
static const char *lacking(const struct parameters *parameters, const char *option)
{
    static const char *const of_adam[] = {"beta1", "beta2", "epsilon", NULL};
    static const char *const of_end[] = {"lr-min", "lr-cycles", NULL};
    static const char *const of_checkpoints[] = {"resume", "keep", "checkpoint-steps", NULL};
    static const char *const of_pipeline[] = {"stages", "microbatches", "schedule", NULL};
    static const char *const of_data_parallel[] = {"sync", "balance", "clip-norm", "accumulate", "ema", NULL};
    static const char *const of_transformers[] = {"layer-decay", "drop-path", NULL};
    bool pipeline = parameters->parallel == PARALLEL_PIPELINE;
    bool sgd = parameters->optimizer == OPTIMIZER_SGD;
    bool transformer = model_tables[parameters->model].layers[0].kind == LAYER_PATCHES;
    if (strcmp(option, "momentum") == 0 && !sgd)
        return "--optimizer sgd";
    if (is_one_of(option, of_adam) && sgd)
        return "--optimizer adam or adamw";
    if (strcmp(option, "lr-step") == 0 && parameters->schedule != SCHEDULE_STEP)
        return "--lr-schedule step";
    if (strcmp(option, "lr-gamma") == 0 && parameters->schedule != SCHEDULE_STEP &&
        parameters->schedule != SCHEDULE_MULTISTEP)
        return "--lr-schedule step or multistep";
    if (strcmp(option, "lr-milestones") == 0 && parameters->schedule != SCHEDULE_MULTISTEP)
        return "--lr-schedule multistep";
    if (strcmp(option, "lr-power") == 0 && parameters->schedule != SCHEDULE_POLYNOMIAL)
        return "--lr-schedule polynomial";
    if (is_one_of(option, of_end) && !schedule_has_end((enum schedule_kind)parameters->schedule))
        return "--lr-schedule cosine or polynomial";
    if (strcmp(option, "mean") == 0 && !(parameters->std > 0)) /* NaN without --std */
        return "--std S";
    if (strcmp(option, "std") == 0 && parameters->raw)
        return "samples that are normalised; drop --raw";
    if (is_one_of(option, of_pipeline) && !pipeline)
        return "--parallel pipeline";
    if (is_one_of(option, of_data_parallel) && pipeline)
        return "--parallel data";
    if (is_one_of(option, of_transformers) && !transformer)
        return "a transformer, such as --model vit-tiny";
    if (strcmp(option, "interpolation") == 0 && !crops(parameters))
        return "--fit random-resized-crop";
    if (strcmp(option, "rand-augment-ops") == 0 && isnan(parameters->rand_augment))
        return "--rand-augment M";
    if (strcmp(option, "res") == 0 && strcmp(parameters->job.data, "synth") != 0)
        return "--data synth";
    if ((strcmp(option, "fresh") == 0 || strcmp(option, "generator") == 0) &&
        parameters->job.feed != DATA_LIVE)
        return strcmp(parameters->job.data, "synth") == 0 ? "--feed live" : "--data synth";
    if (is_one_of(option, of_checkpoints) && !parameters->checkpoint)
        return "--checkpoint DIR";
    if ((strcmp(option, "log-steps") == 0 || strcmp(option, "test-steps") == 0) && !parameters->log_path)
        return "--log FILE";
    return job_lacking(&parameters->job, option);
}

/* --sync, --lr-scale, --balance and --parallel data have no effect with one rank. They are not refused there,
 * so that the same options can be measured on any number of ranks. */
static bool train_applies(const void *parameters, const struct variant *variant, const char *option)
{
    static const char *const of_ranks[] = {"sync", "lr-scale", "balance", "parallel", NULL};
    const struct parameters *given = parameters;
    (void)variant;
    return !lacking(parameters, option) &&
           (given->several_ranks || given->parallel == PARALLEL_PIPELINE || !is_one_of(option, of_ranks));
}

/* Rejects a --shift that reaches the width or the height of a sample, because such a shift could leave only
 * zeros. */
static enum status check_shift(const struct parameters *parameters, const struct shape *shape)
{
    uint32_t side = shape->height < shape->width ? shape->height : shape->width;
    return parameters->shift < side
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "--shift %" PRIu64 ": these samples are %ux%u; give a smaller shift",
                            parameters->shift, shape->height, shape->width);
}

/* Rejects output files that cannot be written. Only rank 0 writes files. */
static enum status check_outputs(const struct parameters *parameters, const struct partition *partition)
{
    const char *const paths[] = {parameters->export_path, parameters->step_path, parameters->data_path};
    if (parameters->step_path && partition->ranks > 1)
        return status_set(STATUS_USAGE, "--export-step writes the samples of one rank; start without mpirun");
    for (size_t i = 0; partition->rank == 0 && i < COUNT_OF(paths); i++)
        if (paths[i])
            TRY(safetensors_check(paths[i]));
    if (parameters->log_path && partition->rank == 0)
        TRY(step_log_check(parameters->log_path));
    return parameters->checkpoint && partition->rank == 0 ? checkpoint_check_folder(parameters->checkpoint)
                                                          : STATUS_OK;
}

/* Rejects stages and micro-batches that are impossible. `all` has the batch of all ranks. */
static enum status check_pipeline(const struct parameters *all, const struct partition *partition)
{
    if (all->parallel != PARALLEL_PIPELINE)
        return STATUS_OK;
    if (all->mixup > 0 || all->cutmix > 0)
        return status_set(STATUS_USAGE,
                          "--parallel pipeline cannot mix samples; use --parallel data, or drop "
                          "--mixup and --cutmix");
    if (all->stages && all->stages != partition->ranks)
        return status_set(STATUS_USAGE,
                          "--stages %" PRIu64 ": each rank holds one stage, and there are %" PRIu64
                          " ranks; start as many ranks as stages, or drop --stages",
                          all->stages, partition->ranks);
    if (all->micros > all->job.batch)
        return status_set(STATUS_USAGE,
                          "--microbatches %" PRIu64 " is more than the %" PRIu64
                          " samples of a step; lower --microbatches, or raise --batch",
                          all->micros, all->job.batch);
    return STATUS_OK;
}

/* Rejects a network with fewer pieces than stages. */
static enum status check_stages(const struct parameters *all, const struct partition *partition,
                                const struct model *model)
{
    uint32_t most = pipe_pieces(model);
    if (all->parallel == PARALLEL_PIPELINE && model->transformer)
        return status_set(STATUS_USAGE,
                          "--parallel pipeline cannot cut %s, a transformer; use --parallel data, or another "
                          "--model",
                          model->name);
    return all->parallel != PARALLEL_PIPELINE || partition->ranks <= most
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "--model %s can be cut into at most %u stages; start at most %u ranks, or use "
                            "another model",
                            model->name, most, most);
}

/* Returns true if the generator's images differ in some bits from those of the reference, and from run to
 * run: lines of different orbits are painted in any order. */
static bool draws_other_bits(const struct parameters *parameters)
{
    return parameters->generator == GENERATOR_BAT || parameters->generator == GENERATOR_GBASE;
}

/* Rejects options that do not apply. */
static enum status check(const struct options *given, const struct parameters *parameters)
{
    for (size_t i = 0; i < COUNT_OF(options); i++) {
        const char *needed = lacking(parameters, options[i].name);
        if (needed && options_given(given, options[i].name))
            return status_set(STATUS_USAGE, "--%s needs %s; add that, or drop --%s", options[i].name, needed,
                              options[i].name);
    }
    if (options_given(given, "verify-steps") && !options_given(given, "verify"))
        return status_set(STATUS_USAGE, "--verify-steps needs --verify; add that, or drop --verify-steps");
    if (options_given(given, "verify") && draws_other_bits(parameters))
        return status_set(STATUS_USAGE,
                          "--verify: images of --generator %s differ from those of the reference; use "
                          "--generator fused or omp, or drop --verify",
                          generators[parameters->generator]);
    if (parameters->largest && (parameters->repeats > 1 || parameters->save_batch))
        return status_set(STATUS_USAGE,
                          "--repeats and --save-batch need a known batch; give --batch a number");
    if (parameters->largest && parameters->data_path)
        return status_set(STATUS_USAGE, "--export-data writes its file before --batch max is known; give "
                                        "--batch a number");
    return STATUS_OK;
}

/* Returns true if the option cannot change the network's parameters at the end of an epoch. Returns true also
 * for options that affect only the data, because the identity contains hashes of the data. */
static bool decides_nothing(const struct parameters *parameters, const char *option)
{
    if (strcmp(option, "feed") == 0) /* live and stored samples are bit-identical */
        return parameters->job.feed != DATA_CONSTANT;
    if (strcmp(option, "fresh") == 0)
        return !parameters->job.fresh;
    if (strcmp(option, "generator") == 0)
        return !draws_other_bits(parameters);
    if (strcmp(option, "sync") == 0)
        return !exchange_rounds(parameters->sync);
    /* Other ranks, shares, exchanges and pipelines change only the order of sums. --lr-scale changes only
     * --lr. */
    static const char *const others[] = {"data",         "train-size", "test-size", "res",
                                         "lr-scale",     "balance",    "parallel",  "stages",
                                         "microbatches", "schedule",   NULL};
    if (is_one_of(option, others))
        return true;
    if (strcmp(option, "checkpoint-activations") == 0 || strcmp(option, "accumulate") == 0)
        return true;
    return strcmp(option, "epochs") == 0 && !schedule_has_end((enum schedule_kind)parameters->schedule);
}

/* Sets opened->identity to "model=cnn batch=64 ...". Training can resume only from a checkpoint with the same
 * identity. The batch is that of all ranks, so training can resume on another number of ranks. */
static enum status identify(const struct parameters *parameters, struct opened *opened)
{
    size_t size;
    FILE *stream = open_memstream(&opened->identity, &size);
    if (!stream)
        return status_set(STATUS_FAILED, "out of memory");
    for (size_t i = 0; i < COUNT_OF(options); i++) {
        char text[256];
        options_text(&options[i], parameters, text, sizeof text);
        if (options[i].column && *text && !decides_nothing(parameters, options[i].name) &&
            !lacking(parameters, options[i].name))
            fprintf(stream, "%s=%s ", options[i].name, text);
    }
    if (*opened->init)
        fprintf(stream, "init=%s ", opened->init);
    fprintf(stream, "train-samples=%016" PRIx64 " test-samples=%016" PRIx64, opened->data.hashes[DATA_TRAIN],
            opened->data.hashes[DATA_TEST]);
    bool whole = !ferror(stream);
    whole = fclose(stream) == 0 && whole;
    return whole ? STATUS_OK : status_set(STATUS_FAILED, "out of memory");
}

/* Reads --balance, and allocates the shares of the ranks. */
static enum status read_balance(const struct parameters *parameters, const struct partition *partition,
                                struct opened *opened)
{
    uint32_t ranks = (uint32_t)partition->ranks;
    opened->weights = malloc(ranks * sizeof *opened->weights);
    opened->shares = malloc(ranks * sizeof *opened->shares);
    return opened->weights && opened->shares
               ? balance_parse(parameters->balance, ranks, &opened->job.balance, opened->weights)
               : status_set(STATUS_FAILED, "out of memory for the shares");
}

/* Sets the shares that the ranks have until trainers change them. */
static void fill_shares(struct opened *opened)
{
    struct train_job *job = &opened->job;
    bool any = job->balance == BALANCE_MEASURED || job->balance == BALANCE_MEMORY;
    if (job->train.ranks <= 1 || job->pipeline.stages)
        return;
    job->weights = opened->weights;
    job->shares = opened->shares;
    partition_divide(job->weights, job->train.ranks, job->train.batch, 0, job->shares);
    job->train.shares = job->balance == BALANCE_EQUAL ? NULL : job->shares;
    job->train.share_max = train_room(&job->train, any);
}

/* Returns the value of an option that may be missing. */
static double or_zero(double value)
{
    return isnan(value) ? 0 : value;
}

static struct augment augment_of(const struct parameters *parameters, const struct shape *shape)
{
    const bool changes = !isnan(parameters->rand_augment);
    return (struct augment){.shift = (uint32_t)parameters->shift,
                            .flip = parameters->flip,
                            .crop = crops(parameters),
                            .bicubic = parameters->interpolation == INTERPOLATION_BICUBIC,
                            .operations = changes ? (uint32_t)parameters->rand_augment_ops : 0,
                            .magnitude = changes ? parameters->rand_augment : 0,
                            .repeats = (uint32_t)parameters->repeats,
                            .erasing = (float)parameters->erasing,
                            .height = shape->height,
                            .width = shape->width};
}

/* `parameters` has the batch of all ranks. */
static void fill_job(const struct parameters *parameters, const struct partition *partition,
                     struct opened *opened)
{
    struct train *train = &opened->job.train;
    *train = (struct train){.model = &opened->model,
                            .data = &opened->data,
                            .seed = parameters->seed,
                            .batch = (uint32_t)parameters->job.batch,
                            .drop_last = parameters->drop_last,
                            .rank = (uint32_t)partition->rank,
                            .ranks = (uint32_t)partition->ranks,
                            .augment = augment_of(parameters, &opened->data.shape),
                            .optimizer = {.kind = (enum optimizer_kind)parameters->optimizer,
                                          .momentum = parameters->momentum,
                                          .beta1 = parameters->beta1,
                                          .beta2 = parameters->beta2,
                                          .epsilon = parameters->epsilon,
                                          .weight_decay = parameters->weight_decay,
                                          .clip_norm = or_zero(parameters->clip_norm),
                                          .average = or_zero(parameters->ema),
                                          .layer_decay = parameters->layer_decay},
                            .loss = (enum loss_kind)parameters->loss,
                            .smoothing = (float)parameters->label_smoothing,
                            .mixing = {parameters->mixup, parameters->cutmix},
                            .accumulate = (uint32_t)parameters->accumulate,
                            .checkpoint_activations = parameters->checkpoint_activations,
                            .cudnn_benchmark = parameters->cudnn_benchmark};
    if (parameters->generator != GENERATOR_AUTO)
        train->generator = generators[parameters->generator];
    uint64_t steps = train_steps(train);
    train->schedule =
        (struct schedule){.kind = (enum schedule_kind)parameters->schedule,
                          .rate = parameters->lr,
                          .warmup_steps = (uint64_t)llround(parameters->lr_warmup * (double)steps),
                          .total_steps = parameters->epochs * steps,
                          .decay_steps = parameters->lr_step * steps,
                          .gamma = parameters->lr_gamma,
                          .least = parameters->lr_min,
                          .power = parameters->lr_power,
                          .cycles = (uint32_t)parameters->lr_cycles};
    opened->job.initial = opened->initial;
    opened->job.epochs = (uint32_t)parameters->epochs;
    opened->job.verify_steps = (uint32_t)parameters->verify_steps;
    opened->job.checkpoints = parameters->checkpoint;
    opened->job.keep = (uint32_t)parameters->keep;
    opened->job.checkpoint_steps = parameters->checkpoint ? (uint32_t)parameters->checkpoint_steps : 0;
    opened->job.log_path = parameters->log_path;
    opened->job.log_steps = parameters->log_path ? (uint32_t)parameters->log_steps : 0;
    opened->job.test_steps = (uint32_t)parameters->test_steps;
    opened->job.resume = parameters->resume;
    opened->job.allow_nan = parameters->allow_nan;
    opened->job.sync = parameters->sync;
    if (parameters->parallel == PARALLEL_PIPELINE)
        opened->job.pipeline =
            (struct pipeline_plan){.schedule = (enum pipe_schedule)parameters->pipe_schedule,
                                   .stages = (uint32_t)partition->ranks,
                                   .micros = (uint32_t)parameters->micros};
    opened->job.identity = opened->identity;
    opened->job.data = parameters->job.data;
    opened->job.samples = (struct train_samples){
        parameters->job.train_size,
        parameters->job.test_size,
        parameters->job.classes,
        parameters->job.res,
        {opened->data.hashes[DATA_TRAIN], opened->data.hashes[DATA_TEST]},
    };
    opened->job.export_path = parameters->export_path;
    opened->job.step_path = parameters->step_path;
}

/* Computes the initial parameters. */
static enum status begin(const struct parameters *parameters, struct opened *opened)
{
    uint64_t hash;
    opened->initial = malloc(opened->model.arena_values * sizeof *opened->initial);
    if (!opened->initial)
        return status_set(STATUS_FAILED, "out of memory for the parameters");
    model_initialise(&opened->model, parameters->seed, opened->initial);
    if (!parameters->init)
        return STATUS_OK;
    TRY(init_take(parameters->init, &opened->model, opened->initial, &hash));
    snprintf(opened->init, sizeof opened->init, "%016" PRIx64, hash);
    return STATUS_OK;
}

/* Returns the parameters of the whole training run: its batch is that of all ranks, and its learning rate
 * is scaled. */
static struct parameters of_all_ranks(const struct parameters *parameters, const struct partition *partition)
{
    struct parameters all = *parameters;
    all.job.batch = partition_share(partition, parameters->job.batch).total;
    double factor = (double)all.job.batch / (double)parameters->job.batch;
    if (parameters->lr_scale == LR_SCALE_LINEAR)
        all.lr *= factor;
    if (parameters->lr_scale == LR_SCALE_SQRT)
        all.lr *= sqrt(factor);
    return all;
}

/* Rejects a batch that leaves a rank without samples, or that is larger than the training set. */
static enum status check_batch(const struct parameters *all, const struct partition *partition,
                               const struct data *data)
{
    uint32_t count = data->sets[DATA_TRAIN].count;
    if (all->job.batch < partition->ranks)
        return status_set(STATUS_USAGE,
                          "--batch %" PRIu64 " has too few samples for %" PRIu64
                          " ranks; raise --batch, or start fewer ranks",
                          all->job.batch, partition->ranks);
    if (all->accumulate > all->job.batch / partition->ranks)
        return status_set(STATUS_USAGE,
                          "--accumulate %" PRIu64 " is more than the %" PRIu64
                          " samples of a rank's step; lower --accumulate, or raise --batch",
                          all->accumulate, all->job.batch / partition->ranks);
    if (partition->ranks > 1 && all->job.batch > count)
        return status_set(STATUS_USAGE,
                          "the batches of %" PRIu64 " ranks have %" PRIu64 " samples, more than the %" PRIu32
                          " samples to train on; lower --batch, or start fewer ranks",
                          partition->ranks, all->job.batch, count);
    return job_check_batch(&all->job, DATA_TRAIN, data);
}

/* Rejects augmentation that is impossible with these samples. */
static enum status check_augment(const struct parameters *all, const struct train *train)
{
    struct augment_plan plan;
    const uint64_t count = train->data->sets[DATA_TRAIN].count;
    if (all->job.batch % all->repeats != 0)
        return status_set(STATUS_USAGE,
                          "--repeats %" PRIu64 " does not divide the %" PRIu64
                          " samples of a step; give a --batch that is a multiple of it",
                          all->repeats, all->job.batch);
    if (count * all->repeats > UINT32_MAX)
        return status_set(
            STATUS_USAGE,
            "--repeats %" PRIu64 ": %" PRIu64
            " copies of the training samples are more than 2^32; lower --repeats or --train-size",
            all->repeats, count * all->repeats);
    return augment_computes(&train->augment) ? augment_plan(train, &plan) : STATUS_OK;
}

/* Writes the files of --save-batch. */
static enum status save_batch(const char *text, const struct train *train)
{
    char *end;
    errno = 0;
    const uint64_t count = isdigit((unsigned char)*text) ? strtoull(text, &end, 10) : 0;
    if (errno || count == 0 || count > UINT32_MAX || *end != ':' || !end[1])
        return status_set(STATUS_USAGE, "--save-batch %.80s: give a number and a folder, as in 16:samples",
                          text);
    if (mkdir(end + 1, 0777) != 0 && errno != EEXIST)
        return status_set(STATUS_USAGE, "--save-batch: %s cannot be created: %s", end + 1, strerror(errno));
    return export_batch(train, &(struct resources){.threads = 1}, (uint32_t)count, end + 1);
}

/* Reads --lr-milestones: ascending epochs, joined by ':'. */
static enum status read_milestones(const struct parameters *all, uint64_t steps, struct schedule *schedule)
{
    const char *text = all->lr_milestones;
    if (all->schedule != SCHEDULE_MULTISTEP)
        return STATUS_OK;
    if (!text)
        return status_set(STATUS_USAGE, "--lr-schedule multistep needs --lr-milestones E1:E2:...");
    for (uint64_t last = 0; schedule->milestone_count < SCHEDULE_MILESTONES_MAX;) {
        char *end;
        errno = 0;
        const uint64_t epoch = isdigit((unsigned char)*text) ? strtoull(text, &end, 10) : 0;
        if (errno || epoch <= last || epoch > UINT32_MAX || (*end && *end != ':'))
            break;
        schedule->milestones[schedule->milestone_count++] = epoch * steps;
        if (!*end)
            return STATUS_OK;
        last = epoch;
        text = end + 1;
    }
    return status_set(
        STATUS_USAGE,
        "--lr-milestones %.80s: give at most %d ascending epochs from 1 on, joined by ':', as in "
        "30:60:80",
        all->lr_milestones, SCHEDULE_MILESTONES_MAX);
}

/* Rejects schedules that leave no steps for the decay, or that would raise the rate. */
static enum status check_schedule(const struct parameters *all, const struct schedule *schedule)
{
    if (!schedule_has_end(schedule->kind))
        return STATUS_OK;
    if (schedule->warmup_steps >= schedule->total_steps)
        return status_set(STATUS_USAGE,
                          "--lr-warmup %g leaves none of the %" PRIu64
                          " epochs for the decay; lower --lr-warmup",
                          all->lr_warmup, all->epochs);
    if (schedule->least > schedule->rate)
        return status_set(STATUS_USAGE, "--lr-min %g is more than the learning rate %g; lower --lr-min",
                          schedule->least, schedule->rate);
    return STATUS_OK;
}

/* Sets opened->job. */
static enum status plan(const struct parameters *all, const struct partition *partition,
                        struct opened *opened)
{
    free(opened->identity);
    opened->identity = NULL;
    TRY(identify(all, opened));
    fill_job(all, partition, opened);
    fill_shares(opened);
    return read_milestones(all, train_steps(&opened->job.train), &opened->job.train.schedule);
}

/* Returns the smallest value of --batch: every part of a rank's step and every micro-batch needs a sample. */
static uint64_t smallest_batch(const struct parameters *parameters, const struct partition *partition)
{
    uint64_t ranks = partition->ranks, parts = ranks * parameters->accumulate;
    uint64_t total =
        parameters->parallel == PARALLEL_PIPELINE && parameters->micros > ranks ? parameters->micros : parts;
    return partition->strong ? total : (total + ranks - 1) / ranks;
}

/* Opens the data, the model and the initial parameters of the whole training run. */
static enum status open_all(const struct parameters *all, const struct partition *partition,
                            struct opened *opened)
{
    struct job_parameters job = all->job;
    if (all->largest) /* a constant feed holds one batch, whose size is not known yet */
        job.batch = UINT32_MAX;
    TRY(job_open_data(&job, &opened->data));
    TRY(check_batch(all, partition, &opened->data));
    TRY(check_pipeline(all, partition));
    TRY(check_shift(all, &opened->data.shape));
    data_normalise(&opened->data, !all->raw);
    if (all->std > 0 && !all->raw)
        data_normalise_by(&opened->data, all->mean, all->std);
    TRY(model_build(&model_tables[all->model], opened->data.shape, opened->data.classes, &opened->model));
    TRY(check_stages(all, partition, &opened->model));
    if (!isnan(all->drop_path) && opened->model.transformer) /* other networks ignore that of --recipe */
        TRY(model_set_drop_path(&opened->model, all->drop_path));
    TRY(begin(all, opened));
    TRY(plan(all, partition, opened));
    TRY(check_schedule(all, &opened->job.train.schedule));
    TRY(check_augment(all, &opened->job.train));
    if (all->save_batch && partition->rank == 0)
        TRY(save_batch(all->save_batch, &opened->job.train));
    return all->data_path && partition->rank == 0
               ? export_data(&opened->job.train, opened->initial, opened->identity, all->data_path)
               : STATUS_OK;
}

/* Leaves in `parameters` what the rows show: the batch of this rank. */
static enum status train_open(const struct options *given, void *parameters_,
                              const struct partition *partition, void **input)
{
    struct parameters *parameters = parameters_;
    struct opened *opened = *input = calloc(1, sizeof *opened);
    if (!opened)
        return status_set(STATUS_FAILED, "out of memory");
    if (parameters->job.feed < 0)
        parameters->job.feed = strcmp(parameters->job.data, "synth") == 0 ? DATA_LIVE : DATA_STORED;
    parameters->several_ranks = partition->ranks > 1;
    parameters->largest = parameters->job.batch == OPTION_MAX;
    if (parameters->largest)
        parameters->job.batch = smallest_batch(parameters, partition);
    TRY(check(given, parameters));
    TRY(check_outputs(parameters, partition));
    TRY(read_balance(parameters, partition, opened));
    const struct parameters all = of_all_ranks(parameters, partition);
    TRY(open_all(&all, partition, opened));
    parameters->job.batch = partition_share(partition, parameters->job.batch).count;
    parameters->stages = partition->ranks;
    return STATUS_OK;
}

static void train_range(const void *input, const void *parameters, const struct partition *partition,
                        uint64_t *least, uint64_t *most)
{
    uint32_t count = ((const struct opened *)input)->data.sets[DATA_TRAIN].count;
    *least = smallest_batch(parameters, partition);
    *most = partition->strong ? count : count / partition->ranks;
}

static enum status train_set_batch(void *input, void *parameters_, const struct partition *partition,
                                   uint64_t batch, uint32_t probes)
{
    struct parameters *parameters = parameters_;
    struct opened *opened = input;
    parameters->job.batch = batch;
    const struct parameters all = of_all_ranks(parameters, partition);
    TRY(plan(&all, partition, opened));
    opened->probes = probes;
    if (probes == 0) {
        opened->job.checkpoints = opened->job.step_path = opened->job.log_path = NULL;
        opened->job.resume = false;
    }
    parameters->job.batch = partition_share(partition, batch).count;
    return STATUS_OK;
}

/* Returns a hash of the samples, for the comparison of the ranks. */
static uint64_t train_identity(const void *input)
{
    const struct opened *opened = input;
    return fnv_add(FNV_BEGIN, opened->data.hashes, sizeof opened->data.hashes);
}

/* ---- Runs and rows ---- */

/* Returns the bytes of the parameters and their optimizer state, which every step must read and write. */
static double updated_bytes(const struct train *train)
{
    const struct optimizer *optimizer = &train->optimizer;
    int moments = optimizer->kind != OPTIMIZER_SGD ? 2 : optimizer->momentum > 0 ? 1 : 0;
    return (double)train->model->parameters * (1 + moments) * sizeof(float);
}

static struct work train_work(const void *input, const struct variant *variant)
{
    const struct opened *opened = input;
    const struct train *train = &opened->job.train;
    const struct engine *engine = variant->traits;
    double samples = (double)train_share_of_epoch(train);
    double bytes = samples * (double)data_stored_bytes(&opened->data, DATA_TRAIN);
    return (struct work){.items = samples,
                         .bytes = bytes,
                         .least = {.flops = samples * model_flops(&opened->model, &engine->savings),
                                   .unit = engine->unit,
                                   .once_bytes = opened->data.feed == DATA_STORED ? bytes : 0,
                                   .round_bytes = updated_bytes(train),
                                   .rounds = 2.0 * train_steps(train)}};
}

static const char *train_folder(const void *input)
{
    return ((const struct opened *)input)->job.checkpoints;
}

/* Rejects generators for GPUs in engines that run on a CPU. */
static enum status check_generator(const struct train *train, const struct variant *variant)
{
    const bool for_cpu = !train->generator || strcmp(train->generator, "omp") == 0;
    return for_cpu || strcmp(variant->platform, "cuda") == 0
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "it runs on a CPU, and --generator %s generates images on a GPU; use "
                            "--generator omp or auto",
                            train->generator);
}

/* Rejects augmentation that the engine does not support. */
static enum status check_augments(const struct opened *opened, const struct engine *engine)
{
    const struct augment *augment = &opened->job.train.augment;
    const bool simple = !augment_computes(augment) && augment->erasing <= 0;
    return simple || (engine->augments && !opened->job.pipeline.stages)
               ? STATUS_OK
               : status_set(
                     STATUS_USAGE,
                     "it augments samples only by --shift and --flip; drop --fit "
                     "random-resized-crop, --rand-augment, --erasing and --repeats, or use train-cuda, "
                     "train-vit, train-omp or train-naive with --parallel data");
}

static enum status train_accepts(const void *input, const struct variant *variant)
{
    const struct opened *opened = input;
    const struct engine *engine = variant->traits;
    if (engine->accepts) /* first, because another --feed would not help if this fails */
        TRY(engine->accepts(&opened->job.train));
    if (opened->job.train.checkpoint_activations && !engine->recomputes)
        return status_set(STATUS_USAGE, "--checkpoint-activations works only with train-vit; drop it");
    TRY(check_generator(&opened->job.train, variant));
    if (opened->job.train.cudnn_benchmark && !engine->benchmarks)
        return status_set(STATUS_USAGE,
                          "--cudnn-benchmark works only with train-cudnn and train-cudnn-tf32; drop it");
    TRY(check_augments(opened, engine));
    if (opened->job.pipeline.stages)
        TRY(pipeline_accepts(engine, opened->data.feed));
    else if (opened->job.train.ranks > 1)
        TRY(exchange_probe(opened->job.sync, engine, &opened->job.train.optimizer));
    if (opened->job.train.ranks > 1 && opened->job.balance == BALANCE_MEASURED &&
        engine->gradients_in == GRADIENTS_IN_GRAPH)
        return status_set(STATUS_USAGE,
                          "its CUDA graph contains the shares and the exchange, so it can neither "
                          "measure speeds nor change shares; use --balance equal, memory or a "
                          "list such as 3:1, or use train-bf16");
    return engine->feeds || opened->data.feed == DATA_STORED
               ? STATUS_OK
               : status_set(STATUS_USAGE, "it needs all training samples in memory; use --feed stored");
}

static void put_pipeline(const struct train_epoch *epoch, const struct pipeline_plan *plan,
                         struct measures *measures)
{
    measures_put(measures, "layers", "%s", epoch->layers);
    measures_real(measures, "bubble", epoch->bubble, 4);
    measures_real(measures, "bubble_ideal", epoch->bubble_ideal, 4);
    measures_real(measures, "bubble_formula", pipe_bubble(plan->schedule, plan->stages, plan->micros), 4);
}

/* Values that are unknown (NaN) leave their column empty. */
static enum status train_measure(const void *input, const struct variant *variant, void *state,
                                 struct measures *measures)
{
    const struct opened *opened = input;
    struct train_epoch epoch;
    (void)variant;
    TRY(trainer_finish(state, &epoch));
    measures_put(measures, "timed_stages", "%s%sgather+forward+%sbackward+%supdate",
                 opened->data.feed == DATA_LIVE ? "generate+" : "",
                 augment_computes(&opened->job.train.augment) ? "augment+" : "",
                 opened->job.train.checkpoint_activations ? "recompute+" : "",
                 *epoch.exchange ? "exchange+" : "");
    measures_put(measures, "epoch", "%" PRIu32, epoch.history.epochs);
    measures_put(measures, "steps", "%" PRIu32, epoch.steps);
    measures_put(measures, "parameters", "%zu", opened->model.parameters);
    measures_put(measures, "train_samples", "%" PRIu32, opened->data.sets[DATA_TRAIN].count);
    measures_put(measures, "test_samples", "%" PRIu32, opened->data.sets[DATA_TEST].count);
    measures_real(measures, "train_loss", epoch.loss, 9);
    measures_real(measures, "train_acc", epoch.train_accuracy, 6);
    measures_real(measures, "test_loss", epoch.test_loss, 9);
    measures_real(measures, "test_acc", epoch.test_accuracy, 6);
    measures_real(measures, "gradient_norm", epoch.gradient_norm, 6);
    measures_real(measures, "ema_test_loss", epoch.ema_loss, 9);
    measures_real(measures, "ema_test_acc", epoch.ema_accuracy, 6);
    measures_real(measures, "last_lr", epoch.rate, 9);
    measures_real(measures, "trained_s", epoch.history.trained_s, 9);
    measures_real(measures, "to_98_s", epoch.history.to_98_s < 0 ? NAN : epoch.history.to_98_s, 9);
    measures_real(measures, "to_99_s", epoch.history.to_99_s < 0 ? NAN : epoch.history.to_99_s, 9);
    measures_real(measures, "data_share", epoch.data_s < 0 ? NAN : epoch.data_s / epoch.epoch_s, 4);
    measures_put(measures, "memory_bytes", "%" PRIu64, epoch.memory_bytes);
    if (opened->data.feed == DATA_LIVE) {
        measures_real(measures, "generate_share", epoch.generate_s / epoch.epoch_s, 4);
        measures_real(measures, "generated_per_s",
                      (double)train_share_of_epoch(&opened->job.train) / epoch.generate_s, 6);
    }
    measures_real(measures, "opening_s", opened->data.opening_s, 6);
    measures_put(measures, "init", "%s", opened->init);
    if (epoch.scales_loss) {
        measures_put(measures, "skipped_steps", "%" PRIu64, epoch.skipped);
        measures_real(measures, "loss_scale", epoch.loss_scale, 9);
    }
    measures_put(measures, "exchange", "%s", epoch.exchange);
    if (*epoch.exchange)
        measures_real(measures, "exchange_share", epoch.exchange_s / epoch.epoch_s, 4);
    if (opened->job.shares)
        measures_put(measures, "samples_per_step", "%" PRIu64, train_share(&opened->job.train, 0).count);
    if (opened->job.pipeline.stages)
        put_pipeline(&epoch, &opened->job.pipeline, measures);
    if (opened->probes)
        measures_put(measures, "batch_probes", "%" PRIu32, opened->probes);
    return STATUS_OK;
}

const struct workload workload_train = {
    .name = "train",
    .schema = "train/9",
    .summary = "trains a network to classify, epoch by epoch",
    .item = "samples",
    .options = options,
    .option_count = COUNT_OF(options),
    .parameters_bytes = sizeof(struct parameters),
    .defaults = train_defaults,
    .single = single,
    .measures = columns,
    .shown = shown,
    .cpu_stand_in = "train-omp",
    .baselines = baselines,
    .open = train_open,
    .close = train_close,
    .repartition = job_stay,
    .applies = train_applies,
    .accepts = train_accepts,
    .largest = {job_batch, train_range, train_set_batch, trainer_probe},
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
