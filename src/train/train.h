/* The parameters and the input of the workload `train`, for train.c, train_measures.c (columns and reports),
 * parallel.c (how ranks divide a step) and libfdsl. */
#ifndef FDSL_TRAIN_TRAIN_H
#define FDSL_TRAIN_TRAIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/workload.h"
#include "data/jitter.h"
#include "train/job.h"
#include "train/trainer.h"

struct train_parameters {
    struct job_parameters job; /* must be the first member */
    int model, optimizer, schedule, sync, lr_scale, parallel, pipe_schedule;
    uint64_t ranks;          /* set when the options are read */
    bool largest;            /* --batch max */
    bool reduced_batch;      /* --batch of all ranks is larger than the training set, so job.batch is less */
    uint64_t stages, micros; /* --stages is 0 if not given */
    uint64_t epochs, seed, lr_cycles, shift, keep, verify_steps;
    double lr, momentum, beta1, beta2, epsilon, weight_decay, lr_warmup, lr_step, lr_gamma, lr_power, lr_min;
    /* NaN: not given, except for muon_lr and lr_noise_limit */
    double muon_lr, warmup_lr, lr_cooldown, lr_cycle_decay, lr_cycle_mul, lr_k_decay, lr_noise,
        lr_noise_limit;
    double clip_value, clip_adaptive, bce_threshold, bce_pos_weight;
    double loss_scale, loss_scale_growth, loss_scale_backoff;
    double dropout, head_init_scale, head_init_bias;
    uint64_t loss_scale_interval; /* 0: not given */
    double label_smoothing, clip_norm, ema, layer_decay, drop_path;
    double erasing, mixup, cutmix;
    uint64_t accumulate, rand_augment_ops, repeats;
    struct jitter_parameters color;
    uint64_t lr_warmup_updates, lr_step_updates; /* 0: not given */
    uint64_t checkpoint_steps, test_steps;       /* 0: not given */
    uint64_t log_steps;
    int loss, generator, recipe;
    int decoder;         /* enum decoder */
    double device_share; /* NaN: not given */
    const char *rand_augment, *mean, *std, *lr_milestones, *balance, *init, *checkpoint, *export_path,
        *step_path, *data_path, *save_batch, *log_path, *begin_path, *state_path;
    bool drop_last, flip, erase_last, lr_overlap, raw, resume, allow_nan, checkpoint_activations,
        cudnn_benchmark;
    int init_ema; /* enum init_ema */
    bool ema_warmup, bce_sum;
    const char *memory_limit; /* NULL: not given */
    bool replicated;          /* a pipeline has several replicas */
    bool memory;
    bool chooses; /* --parallel auto has not chosen yet */
    bool sync_batch_norm, zero_init_last_gamma;
    const char *fp32_layers; /* NULL: not given */
};

enum live_generator { GENERATOR_AUTO, GENERATOR_FUSED, GENERATOR_BAT, GENERATOR_GBASE, GENERATOR_OMP };
enum lr_scale { LR_SCALE_NONE, LR_SCALE_LINEAR, LR_SCALE_SQRT };
enum parallel { PARALLEL_DATA, PARALLEL_PIPELINE, PARALLEL_AUTO };

/* The workload's input and what it owns. */
struct opened {
    struct train_job job; /* must be the first member: trainers cast the input to it */
    struct model model;
    struct data data;
    struct train_decoding decoding;         /* what the options say */
    struct option_values identity, samples; /* samples: job_samples() */
    float *initial;                         /* initial parameters */
    double *weights;                        /* per rank: its weight from --balance */
    uint32_t *shares;                       /* per rank: room for its share */
    uint32_t probes;                        /* batches tried for --batch max; 0: none */
    uint64_t init_hash;
    struct stream_state begin; /* of --init-state */
    uint32_t skipped;          /* job.skipped */
    double chosen_step_s;      /* seconds per step that --parallel auto has measured; 0: not measured */
    uint64_t context_bytes;    /* of the latest train_plan_ranks(): on this rank, the part MEMORY_CONTEXT */
    uint64_t *memory_limits;   /* per rank: bytes of --memory-limit; NULL: not given */
    char init[17];             /* hash of the parameters from --init; "" without --init */
};

extern const struct workload workload_train;

/* Checks other parameters with the data that are open, and makes them the plan of the run, with its batch. */
enum status train_replan(const struct options *given, const struct train_parameters *parameters,
                         const struct partition *partition, struct opened *opened);

/* Sets up a variant that only plans its memory. Sets `needed` and `room`, in bytes, one number per rank.
 * Collective. */
enum status train_plan_ranks(struct opened *opened, const struct variant *variant,
                             const struct resources *resources, uint64_t *needed, uint64_t *room);

/* ---- parallel.c: implements workload->choice ---- */

bool train_chooses(const void *parameters);
enum status train_choose(const struct options *given, void *input, void *parameters,
                         const struct partition *partition, const struct variant *variant,
                         const struct resources *resources);

/* ---- train_measures.c: functions of workload_train with these names ---- */

extern const struct column train_columns[];
struct work train_work(const void *input, const struct variant *variant);
enum status train_measure(const void *input, const struct variant *variant, void *state, struct row *row);

/* ---- The choice of a division (parallel.c) ---- */

/* --parallel auto chooses how the ranks divide a step, from planned memory and measured times. All functions
 * are pure. */

/* A way to divide a step among stages * replicas GPUs. One stage: data parallel. One replica: a pipeline, or
 * a single GPU if there is also one stage. */
struct parallel_way {
    uint32_t stages, replicas;
    bool recomputes; /* --checkpoint-activations */
    bool on_cpu;     /* the parts are ranks on CPUs, not GPUs: only for texts */
};

/* A way, and what is known about it. */
struct parallel_plan {
    struct parallel_way way;
    const uint64_t *needed_bytes; /* per GPU: planned memory; not owned */
    double step_s;                /* measured seconds per step; NaN: not measured, or it does not fit */
    /* Samples of a step per GPU, and the bytes by which the memory grows per sample; 0: not known. */
    uint64_t samples;
    double sample_bytes;
};

#define PARALLEL_WAYS_MAX 32   /* candidates */
#define PARALLEL_NAME     64   /* room for the name of a way */
#define PARALLEL_GAIN     0.03 /* a less simple way must be faster by this share of a step's time */
#define PARALLEL_NONE     (-1)

/* Writes the ways for `gpus` GPUs to `ways`, the simplest first: data parallel, then pipelines with few
 * stages first, each without and with recomputing. At most PARALLEL_WAYS_MAX; returns their number. */
uint32_t parallel_ways(uint32_t gpus, struct parallel_way ways[PARALLEL_WAYS_MAX]);

/* Returns the index of the plan with the shortest step of those that fit; a later plan must be faster than
 * the best one before it by PARALLEL_GAIN. PARALLEL_NONE if no plan fits. Writes one line to `why`: the
 * choice, and why not the others; or the smallest set-up that would fit. `count` is at least 1.
 * `context_bytes` is the memory of a GPU that no division reduces. */
int parallel_choose(const struct parallel_plan *plans, uint32_t count, const uint64_t *room_bytes,
                    uint64_t context_bytes, char *why, size_t size);

#endif
