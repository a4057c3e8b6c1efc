/* --parallel auto: chooses how the ranks divide a step, from planned memory and measured times. All functions
 * are pure. */
#ifndef FDSL_TRAIN_PARALLEL_CHOICE_H
#define FDSL_TRAIN_PARALLEL_CHOICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

/* Writes the name of a way, such as "data parallel on 4 GPUs, recomputing". */
void parallel_name(const struct parallel_way *way, char name[PARALLEL_NAME]);

/* Returns whether a plan fits into the memory of each GPU: `room_bytes`, one per GPU. */
bool parallel_fits(const struct parallel_plan *plan, const uint64_t *room_bytes);

/* Returns the index of the plan with the shortest step of those that fit; a later plan must be faster than
 * the best one before it by PARALLEL_GAIN. PARALLEL_NONE if no plan fits. Writes one line to `why`: the
 * choice, and why not the others; or the smallest set-up that would fit. `count` is at least 1.
 * `context_bytes` is the memory of a GPU that no division reduces. */
int parallel_choose(const struct parallel_plan *plans, uint32_t count, const uint64_t *room_bytes,
                    uint64_t context_bytes, char *why, size_t size);

#endif
