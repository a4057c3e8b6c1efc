/* The parameter update of a step: SGD with momentum, Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and
 * Hutter, 2019), as torch.optim defines them. The learning rate is a pure function of the step.
 *
 * Host and device share this definition. The oracle defines FDSL_DOUBLE and computes everything in double. */
#ifndef FDSL_TRAIN_OPTIMIZER_H
#define FDSL_TRAIN_OPTIMIZER_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"

#ifdef FDSL_DOUBLE
typedef double train_real;
#define TRAIN_SQRT sqrt
#else
typedef float train_real;
#define TRAIN_SQRT sqrtf
#endif

/* The optimizers: constant, name in --optimizer, arrays of state per parameter (`m` alone, or `m` and `v`),
 * and whether --momentum and the options of Adam (--beta1, --beta2, --epsilon) apply. To add an optimizer,
 * add a line, and its rule to optimizer_step(). */
#define OPTIMIZERS(OPTIMIZER)               \
    OPTIMIZER(SGD, "sgd", 1, true, false)   \
    OPTIMIZER(ADAM, "adam", 2, false, true) \
    OPTIMIZER(ADAMW, "adamw", 2, false, true)

#define OPTIMIZER_NAME(constant, name, ...) name,
#define OPTIMIZER_CONSTANT(constant, ...)   OPTIMIZER_##constant,
enum optimizer_kind { OPTIMIZERS(OPTIMIZER_CONSTANT) OPTIMIZER_KINDS };
#undef OPTIMIZER_CONSTANT

enum schedule_kind {
    SCHEDULE_CONSTANT,
    SCHEDULE_STEP,
    SCHEDULE_MULTISTEP,
    SCHEDULE_COSINE,
    SCHEDULE_POLYNOMIAL
};
#define SCHEDULE_MILESTONES_MAX 8

struct optimizer {
    enum optimizer_kind kind;
    double momentum;              /* SGD */
    double beta1, beta2, epsilon; /* Adam, AdamW */
    double weight_decay;          /* SGD and Adam add it, times the parameter, to the gradient; AdamW shrinks
                                     the parameter instead */
    double clip_norm;   /* the gradients of a step are scaled down to this Euclidean norm if theirs is larger;
                           0: never */
    double average;     /* decay per step of the moving average of the parameters; 0: no average */
    double layer_decay; /* see optimizer_share(); 0 means 1 */
};

struct schedule {
    enum schedule_kind kind;
    double rate;           /* the learning rate after the warm-up */
    uint64_t warmup_steps; /* the rate rises linearly from rate / warmup_steps in step 0; 0: no warm-up */
    uint64_t total_steps;  /* cosine, polynomial: the rate is `least` from this step on */
    uint64_t decay_steps;  /* SCHEDULE_STEP: the rate decays every `decay_steps` steps, counted from step 0 */
    double gamma;          /* SCHEDULE_STEP, SCHEDULE_MULTISTEP: factor of each decay */
    double least;          /* cosine, polynomial: the rate at the end of a cycle */
    double power;          /* SCHEDULE_POLYNOMIAL */
    uint32_t cycles; /* cosine, polynomial: number of decays, one after another, between warm-up and end; 0
                        means 1 */
    uint32_t milestone_count;
    uint64_t milestones[SCHEDULE_MILESTONES_MAX]; /* SCHEDULE_MULTISTEP: steps of the decays, ascending */
};

/* Returns the number of arrays of state per parameter. */
FDSL_HD int optimizer_moments(enum optimizer_kind kind)
{
#define OPTIMIZER_MOMENTS(constant, name, moments, ...) kind == OPTIMIZER_##constant ? moments:
    return OPTIMIZERS(OPTIMIZER_MOMENTS) 0;
#undef OPTIMIZER_MOMENTS
}

/* Returns whether the rate depends on the number of steps of the whole training run. */
FDSL_HD bool schedule_has_end(enum schedule_kind kind)
{
    return kind == SCHEDULE_COSINE || kind == SCHEDULE_POLYNOMIAL;
}

/* Returns the rate of a schedule with an end: in each cycle it falls from `rate` to `least`. If u is the part
 * of the cycle that is done, the rate is least + (rate - least) f(u), where f is (1 + cos(pi u)) / 2
 * (Loshchilov and Hutter, "SGDR", 2017) or (1 - u)^power. */
FDSL_HD double schedule_decay(const struct schedule *schedule, uint64_t step)
{
    const double pi = 3.14159265358979323846;
    const uint64_t span = schedule->total_steps - schedule->warmup_steps, at = step - schedule->warmup_steps;
    const double cycle = (double)span / (schedule->cycles ? schedule->cycles : 1);
    const double done = fmod((double)at, cycle), range = schedule->rate - schedule->least;
    if (at >= span)
        return schedule->least;
    return schedule->least + range * (schedule->kind == SCHEDULE_COSINE
                                          ? 0.5 * (1 + cos(pi * done / cycle))
                                          : pow(1 - done / cycle, schedule->power));
}

/* Returns the learning rate of a step. Steps count from 0 over all epochs. */
FDSL_HD double schedule_rate(const struct schedule *schedule, uint64_t step)
{
    uint32_t passed = 0;
    if (step < schedule->warmup_steps)
        return schedule->rate * (double)(step + 1) / (double)schedule->warmup_steps;
    if (schedule_has_end(schedule->kind))
        return schedule_decay(schedule, step);
    if (schedule->kind == SCHEDULE_STEP)
        return schedule->rate * pow(schedule->gamma, (double)(step / schedule->decay_steps));
    if (schedule->kind == SCHEDULE_MULTISTEP) {
        while (passed < schedule->milestone_count && step >= schedule->milestones[passed])
            passed++;
        return schedule->rate * pow(schedule->gamma, passed);
    }
    return schedule->rate;
}

/* The values of a step's update that are the same for all parameters. */
struct update {
    enum optimizer_kind kind;
    train_real rate, momentum, decay;
    train_real beta1, beta2, rest1, rest2; /* rest1 = 1 - beta1, rest2 = 1 - beta2 */
    train_real rate1;                      /* rate / (1 - beta1^t), with t = step + 1 */
    train_real scale2;                     /* 1 / sqrt(1 - beta2^t), with t = step + 1 */
    train_real epsilon;
    train_real clip;          /* factor of the gradients, from optimizer_clip() */
    train_real statistic;     /* of a running statistic: weight of the new value; 0: a parameter */
    train_real average, rest; /* of optimizer_average(): decay, and 1 - decay */
};

/* Returns the update of a step, without clipping. Steps count from 0 over all epochs. */
FDSL_HD struct update optimizer_at(const struct optimizer *optimizer, const struct schedule *schedule,
                                   uint64_t step)
{
    struct update update;
    double rate = schedule_rate(schedule, step), t = (double)step + 1;
    update.kind = optimizer->kind;
    update.rate = (train_real)rate;
    update.momentum = (train_real)optimizer->momentum;
    update.decay = (train_real)optimizer->weight_decay;
    update.beta1 = (train_real)optimizer->beta1;
    update.beta2 = (train_real)optimizer->beta2;
    update.rest1 = (train_real)(1 - optimizer->beta1);
    update.rest2 = (train_real)(1 - optimizer->beta2);
    update.rate1 = (train_real)(rate / (1 - pow(optimizer->beta1, t)));
    update.scale2 = (train_real)(1 / sqrt(1 - pow(optimizer->beta2, t)));
    update.epsilon = (train_real)optimizer->epsilon;
    update.clip = 1;
    update.statistic = 0;
    update.average = (train_real)optimizer->average;
    update.rest = (train_real)(1 - optimizer->average);
    return update;
}

/* Returns the factor that scales gradients down to the norm `clip_norm`, as torch.nn.utils.clip_grad_norm_
 * does. `norm` is the Euclidean norm of all gradients of the step. */
FDSL_HD double optimizer_clip(double clip_norm, double norm)
{
    double factor = clip_norm / (norm + 1e-6);
    return factor < 1 ? factor : 1;
}

/* The properties of a tensor's update that can differ between tensors. */
struct tensor_update {
    float share;     /* factor of the learning rate */
    bool decays;     /* whether weight decay applies */
    float statistic; /* see struct update */
};

/* Returns the factor of the learning rate for a tensor whose depth (model_tensor.depth) is `above` less than
 * that of the last tensor. */
FDSL_HD float optimizer_share(const struct optimizer *optimizer, uint32_t above)
{
    return optimizer->layer_decay > 0 ? (float)pow(optimizer->layer_decay, above) : 1;
}

/* Returns the update of a tensor. */
FDSL_HD struct update optimizer_of(const struct update *update, struct tensor_update tensor)
{
    struct update of = *update;
    of.decay = tensor.decays ? of.decay : 0;
    of.rate *= tensor.share;
    of.rate1 *= tensor.share;
    of.statistic = tensor.statistic;
    return of;
}

/* Updates one parameter. For a running statistic, `gradient` is the new value. `m` is its momentum or first
 * moment, and `v` is its second moment, which SGD does not access. Both start at zero. If all gradients of a
 * parameter are 0 and it starts at 0, it stays 0. */
FDSL_HD void optimizer_step(const struct update *update, train_real gradient, train_real *parameter,
                            train_real *m, train_real *v)
{
    train_real value = *parameter;
    if (update->statistic > 0) {
        *parameter = value + update->statistic * (gradient - value);
        return;
    }
    gradient *= update->clip; /* 1 if nothing is clipped, so the gradient keeps its bits */
    if (update->kind == OPTIMIZER_ADAMW)
        value -= update->rate * update->decay * value;
    else
        gradient += update->decay * value;
    if (update->kind == OPTIMIZER_SGD) {
        *m = update->momentum * *m + gradient;
        *parameter = value - update->rate * *m;
        return;
    }
    *m = update->beta1 * *m + update->rest1 * gradient;
    *v = update->beta2 * *v + update->rest2 * gradient * gradient;
    *parameter = value - update->rate1 * *m / (TRAIN_SQRT(*v) * update->scale2 + update->epsilon);
}

/* Returns the moving average of a parameter after a step, from the average before it. */
FDSL_HD train_real optimizer_average(const struct update *update, train_real average, train_real parameter)
{
    return update->average * average + update->rest * parameter;
}

#endif
