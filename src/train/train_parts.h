/* Internal interface of the workload `train`: train.c (options), train_applies.c (which options have an
 * effect), train_checks.c (checks of options and variants), train_open.c (input) and train_measures.c
 * (columns of the rows). No other file includes this header. */
#ifndef FDSL_TRAIN_TRAIN_PARTS_H
#define FDSL_TRAIN_TRAIN_PARTS_H

#include "core/workload.h"
#include "train/job.h"
#include "train/trainer.h"

struct train_parameters {
    struct job_parameters job; /* must be the first member */
    int model, optimizer, schedule, sync, lr_scale, parallel, pipe_schedule;
    bool several_ranks, largest; /* largest: --batch max */
    uint64_t asked_batch;    /* --batch of all ranks, if it is larger than the training set; otherwise 0 */
    uint64_t stages, micros; /* --stages is 0 if not given */
    uint64_t epochs, seed, lr_step, lr_cycles, shift, keep, verify_steps;
    double lr, momentum, beta1, beta2, epsilon, weight_decay, lr_warmup, lr_gamma, lr_power, lr_min;
    double label_smoothing, clip_norm, ema, layer_decay, drop_path;
    double rand_augment, erasing, mixup, cutmix;
    uint64_t accumulate, rand_augment_ops, repeats;
    uint64_t checkpoint_steps, test_steps; /* 0: not given */
    uint64_t log_steps;
    int loss, interpolation, generator, recipe;
    const char *mean, *std, *lr_milestones, *balance, *init, *checkpoint, *export_path, *step_path,
        *data_path, *save_batch, *log_path;
    bool drop_last, flip, raw, resume, allow_nan, checkpoint_activations, cudnn_benchmark;
};

enum interpolation { INTERPOLATION_BILINEAR, INTERPOLATION_BICUBIC };
enum live_generator { GENERATOR_AUTO, GENERATOR_FUSED, GENERATOR_BAT, GENERATOR_GBASE, GENERATOR_OMP };
enum lr_scale { LR_SCALE_NONE, LR_SCALE_LINEAR, LR_SCALE_SQRT };
enum parallel { PARALLEL_DATA, PARALLEL_PIPELINE };

/* The workload's input and what it owns. */
struct opened {
    struct train_job job; /* must be the first member: trainers cast the input to it */
    struct model model;
    struct data data;
    char *identity;
    char *samples;    /* job_samples() */
    float *initial;   /* initial parameters */
    double *weights;  /* per rank: its weight from --balance */
    uint32_t *shares; /* per rank: room for its share */
    uint32_t probes;  /* batches tried for --batch max; 0: none */
    char init[17];    /* hash of the parameters from --init; "" without --init */
};

/* ---- train.c ---- */

extern const struct workload workload_train;
extern const char *const train_generators[]; /* in the order of enum live_generator */

/* ---- train_applies.c ---- */

/* If `option` has no effect with these parameters, returns what it needs, such as "--optimizer sgd".
 * Otherwise returns NULL. */
const char *train_lacking(const struct train_parameters *parameters, const char *option);

/* Returns true if --mean and --std normalise the samples. */
bool train_has_mean(const struct train_parameters *parameters);

/* Parses --mean and --std for samples of this many channels; 0: any number of them. Only if train_has_mean().
 * STATUS_USAGE if a value is no number or out of range, or if there are too few or too many. */
enum status train_read_mean(const struct train_parameters *parameters, uint32_t channels,
                            double mean[DATA_CHANNELS_MAX], double std[DATA_CHANNELS_MAX]);

/* Implements workload->applies(). */
bool train_applies(const void *parameters, const struct variant *variant, const char *option);

/* Returns true if --fit random-resized-crop applies. */
bool train_crops(const struct train_parameters *parameters);

/* Returns true if the generator paints lines of different orbits in any order. Its images then differ in some
 * bits from those of the reference, and from run to run. */
bool train_draws_other_bits(const struct train_parameters *parameters);

/* Sets opened->identity to "model=cnn batch=64 ...". Training can resume only from a checkpoint with the same
 * identity. The batch is the global batch, so training can resume on another number of ranks. It is the batch
 * of the options, also if the training set is smaller, because options are compared before the data are read.
 */
enum status train_identify(const struct train_parameters *all, struct opened *opened);

/* ---- train_checks.c: STATUS_USAGE with a remedy if the options are impossible. `all` has the global
 * batch ---- */

/* Checks the options alone, and that output files can be written. */
enum status train_check_options(const struct options *given, const struct train_parameters *parameters,
                                const struct partition *partition);

/* If the batch is larger than the training set, makes it as large as the set, and says so. */
enum status train_limit_batch(struct train_parameters *all, const struct partition *partition,
                              const struct data *data);

/* Check the options with the data, the network, and the plan of the steps. */
enum status train_check_data(const struct train_parameters *all, const struct partition *partition,
                             const struct data *data);
enum status train_check_model(const struct train_parameters *all, const struct partition *partition,
                              const struct model *model);
enum status train_check_steps(const struct train_parameters *all, const struct train *train);

/* Implements workload->accepts(). */
enum status train_accepts(const void *input, const struct variant *variant);

/* ---- train_open.c: functions of workload_train with these names ---- */

enum status train_open(const struct options *given, void *parameters, const struct partition *partition,
                       void **input);
void train_close(void *input);
void train_range(const void *input, const void *parameters, const struct partition *partition,
                 uint64_t *least, uint64_t *most);
enum status train_set_batch(void *input, void *parameters, const struct partition *partition, uint64_t batch,
                            uint32_t probes);

/* ---- train_measures.c: functions of workload_train with these names ---- */

extern const struct column train_columns[];
struct work train_work(const void *input, const struct variant *variant);
enum status train_measure(const void *input, const struct variant *variant, void *state, struct row *row);

#endif
