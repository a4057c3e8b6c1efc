/* The parameter update of a step: SGD with momentum, Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and
 * Hutter, 2019), as torch.optim defines them; LAMB (You et al., "Large batch optimization for deep learning:
 * training BERT in 76 minutes", 2020), as timm defines it; and Muon (Jordan et al., "Muon: an optimizer for
 * hidden layers in neural networks", 2024). The learning rate is a pure function of the step.
 *
 * Host and device share this definition. The oracle defines FDSL_DOUBLE and computes everything in double. */
#ifndef FDSL_TRAIN_OPTIMIZER_H
#define FDSL_TRAIN_OPTIMIZER_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "data/random_draws.h"

#ifdef FDSL_DOUBLE
typedef double train_real;
#define TRAIN_SQRT sqrt
#else
typedef float train_real;
#define TRAIN_SQRT sqrtf
#endif

/* The optimizers: constant, name in --optimizer, arrays of state per parameter (`m` alone, or `m` and `v`),
 * and whether --momentum and the options of Adam (--beta1, --beta2, --epsilon) apply. To add an optimizer
 * that updates each parameter alone, add a line, and its rule to optimizer_step(). */
#define OPTIMIZERS(OPTIMIZER)                 \
    OPTIMIZER(SGD, "sgd", 1, true, false)     \
    OPTIMIZER(ADAM, "adam", 2, false, true)   \
    OPTIMIZER(ADAMW, "adamw", 2, false, true) \
    OPTIMIZER(LAMB, "lamb", 2, false, true)   \
    OPTIMIZER(MUON, "muon", 2, true, true)

#define OPTIMIZER_NAME(constant, name, ...) name,
#define OPTIMIZER_CONSTANT(constant, ...)   OPTIMIZER_##constant,
enum optimizer_kind { OPTIMIZERS(OPTIMIZER_CONSTANT) OPTIMIZER_KINDS };
#undef OPTIMIZER_CONSTANT

enum schedule_kind {
    SCHEDULE_CONSTANT,
    SCHEDULE_STEP,
    SCHEDULE_MULTISTEP,
    SCHEDULE_COSINE,
    SCHEDULE_POLYNOMIAL,
    SCHEDULE_TANH
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
    double clip_value;  /* largest absolute value of a gradient; 0: no limit */
    double clip_adaptive; /* factor of optimizer_clip_unit(); 0: not used */
    double matrix_rate;   /* Muon: learning rate of hidden matrices, divided by that of other parameters */
    bool average_warms;   /* the decay of the average rises: optimizer_average_decay() */
};

struct schedule {
    enum schedule_kind kind;
    double rate;           /* the learning rate after the warm-up */
    uint64_t warmup_steps; /* the rate rises linearly, in step 0 from rate / warmup_steps; 0: no warm-up */
    uint64_t total_steps;  /* schedule_has_end(): the rate is `least` from this step on */
    double decay_steps;    /* SCHEDULE_STEP: the rate decays every `decay_steps` steps, counted from step 0 */
    double gamma;          /* SCHEDULE_STEP, SCHEDULE_MULTISTEP: factor of each decay */
    double least;          /* schedule_has_end(): the rate at the end of a cycle */
    double power;          /* SCHEDULE_POLYNOMIAL */
    uint32_t cycles;    /* schedule_has_end(): number of decays, one after another, between warm-up and end; 0
                           means 1 */
    bool warmup_begins; /* the rate of the warm-up's step 0 is warmup_rate */
    double warmup_rate;
    double cycle_decay; /* schedule_has_end(): factor of `rate` from one cycle to the next; 0 means 1 */
    double cycle_mul;   /* schedule_has_end(): factor of the length of a cycle to the next; 0 means 1 */
    double k_decay;     /* schedule_has_end(): exponent of the part of a cycle that is done; 0 means 1 */
    /* Noise, drawn anew in each epoch from step `noise_step` on: the rate is multiplied by 1 + n, where n is
     * normal with standard deviation 1, drawn again until |n| < noise_limit. 0: no noise. */
    double noise_limit;
    uint64_t noise_step, epoch_steps, seed;
    uint32_t milestone_count;
    uint64_t milestones[SCHEDULE_MILESTONES_MAX]; /* SCHEDULE_MULTISTEP: steps of the decays, ascending */
    bool overlaps; /* schedule_has_end(): the decay counts from step 0, also during the warm-up */
};

/* Returns the number of arrays of state per parameter. */
FDSL_HD int optimizer_moments(enum optimizer_kind kind)
{
#define OPTIMIZER_MOMENTS(constant, name, moments, ...) kind == OPTIMIZER_##constant ? moments:
    return OPTIMIZERS(OPTIMIZER_MOMENTS) 0;
#undef OPTIMIZER_MOMENTS
}

/* Returns whether the rule needs whole tensors (optimizer_apply()). Such a rule, and adaptive clipping, need
 * all gradients of a tensor before the update of its first parameter. */
FDSL_HD bool optimizer_needs_tensors(enum optimizer_kind kind)
{
    return kind == OPTIMIZER_LAMB || kind == OPTIMIZER_MUON;
}

/* Returns whether the rate depends on the number of steps of the whole training run. */
FDSL_HD bool schedule_has_end(enum schedule_kind kind)
{
    return kind == SCHEDULE_COSINE || kind == SCHEDULE_POLYNOMIAL || kind == SCHEDULE_TANH;
}

/* Returns the length of the first cycle, in steps, of cycles that together have `span` steps. */
FDSL_HD double schedule_first_cycle(const struct schedule *schedule, uint64_t span)
{
    const double cycles = schedule->cycles ? schedule->cycles : 1, mul = schedule->cycle_mul;
    return mul > 1 ? (double)span * (mul - 1) / (pow(mul, cycles) - 1) : (double)span / cycles;
}

/* Returns the rate of a schedule with an end: in each cycle it falls from the cycle's first rate to `least`.
 * If u is the part of the cycle that is done, to the power of k_decay (Zhang and Li, "k-decay", 2020), the
 * rate is least + (top - least) f(u), where f is (1 + cos(pi u)) / 2 (Loshchilov and Hutter, "SGDR", 2017),
 * (1 - u)^power, or (1 - tanh(10 u - 7)) / 2 (Hsueh et al., "Stochastic gradient descent with hyperbolic-
 * tangent decay", 2019, with the bounds of timm). */
FDSL_HD double schedule_decay(const struct schedule *schedule, uint64_t step)
{
    const double pi = 3.14159265358979323846;
    const uint64_t first = schedule->overlaps ? 0 : schedule->warmup_steps;
    const uint64_t span = schedule->total_steps - first, at = step - first;
    double cycle = schedule_first_cycle(schedule, span), number = floor((double)at / cycle);
    double done = fmod((double)at, cycle), top = schedule->rate;
    if (at >= span)
        return schedule->least;
    if (schedule->cycle_mul > 1) {
        done = (double)at;
        for (number = 0; number + 1 < schedule->cycles && done >= cycle; number++) {
            done -= cycle;
            cycle *= schedule->cycle_mul;
        }
    }
    if (schedule->cycle_decay > 0)
        top *= pow(schedule->cycle_decay, number);
    if (schedule->k_decay > 0)
        done = cycle * pow(done / cycle, schedule->k_decay);
    return schedule->least + (top - schedule->least) *
                                 (schedule->kind == SCHEDULE_COSINE ? 0.5 * (1 + cos(pi * done / cycle))
                                  : schedule->kind == SCHEDULE_TANH ? 0.5 * (1 - tanh(10 * done / cycle - 7))
                                                                    : pow(1 - done / cycle, schedule->power));
}

/* Returns the rate of a step without noise. */
FDSL_HD double schedule_smooth_rate(const struct schedule *schedule, uint64_t step)
{
    const double warmed = (double)step / (double)schedule->warmup_steps;
    uint32_t passed = 0;
    if (step < schedule->warmup_steps && schedule->warmup_begins)
        return schedule->warmup_rate + (schedule->rate - schedule->warmup_rate) * warmed;
    if (step < schedule->warmup_steps)
        return schedule->rate * (double)(step + 1) / (double)schedule->warmup_steps;
    if (schedule_has_end(schedule->kind))
        return schedule_decay(schedule, step);
    if (schedule->kind == SCHEDULE_STEP) {
        const double left = fmod((double)step, schedule->decay_steps); /* exact, unlike the quotient */
        return schedule->rate * pow(schedule->gamma, round(((double)step - left) / schedule->decay_steps));
    }
    if (schedule->kind == SCHEDULE_MULTISTEP) {
        while (passed < schedule->milestone_count && step >= schedule->milestones[passed])
            passed++;
        return schedule->rate * pow(schedule->gamma, passed);
    }
    return schedule->rate;
}

/* Returns the noise of a step. Counter: number of the draw, 0, epoch. */
FDSL_HD double schedule_noise(const struct schedule *schedule, uint64_t step)
{
    const double pi = 3.14159265358979323846, most = 4294967296.0;
    for (uint32_t i = 0;; i++) {
        const struct philox_block block =
            philox(philox_key(schedule->seed), i, 0, (uint32_t)(step / schedule->epoch_steps), DRAW_RATE);
        const double normal =
            sqrt(-2 * log((block.word[0] + 1.0) / most)) * cos(2 * pi * (block.word[1] / most));
        if (fabs(normal) < schedule->noise_limit)
            return normal;
    }
}

/* Returns the learning rate of a step. Steps count from 0 over all epochs. */
FDSL_HD double schedule_rate(const struct schedule *schedule, uint64_t step)
{
    const double rate = schedule_smooth_rate(schedule, step);
    return schedule->noise_limit > 0 && step >= schedule->noise_step
               ? rate * (1 + schedule_noise(schedule, step))
               : rate;
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
    train_real most;          /* largest absolute value of a gradient, after `clip`; may be infinite */
    train_real correct1;      /* 1 / (1 - beta1^t), with t = step + 1 */
    train_real matrix_rate;   /* factor of the rate of hidden matrices */
    train_real trust; /* factor of the rate, per tensor: optimizer_trust() or optimizer_matrix_scale() */
};

/* Returns the decay of the moving average in a step. With average_warms, it is at most 1 - (1 + step)^(-2/3),
 * as with timm's --model-ema-warmup: the average forgets the initial parameters faster. */
FDSL_HD double optimizer_average_decay(const struct optimizer *optimizer, uint64_t step)
{
    const double early = 1 - pow(1 + (double)step, -2.0 / 3);
    return optimizer->average_warms && early < optimizer->average ? early : optimizer->average;
}

/* Returns the update of a step, without clipping. Steps count from 0 over all epochs. */
FDSL_HD struct update optimizer_at(const struct optimizer *optimizer, const struct schedule *schedule,
                                   uint64_t step)
{
    struct update update;
    double rate = schedule_rate(schedule, step), t = (double)step + 1;
    const double average = optimizer_average_decay(optimizer, step);
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
    update.average = (train_real)average;
    update.rest = (train_real)(1 - average);
    update.most = optimizer->clip_value > 0 ? (train_real)optimizer->clip_value : (train_real)INFINITY;
    update.correct1 = (train_real)(1 / (1 - pow(optimizer->beta1, t)));
    update.matrix_rate = (train_real)optimizer->matrix_rate;
    update.trust = 1;
    return update;
}

/* Returns the factor that scales gradients down to the norm `clip_norm`, as torch.nn.utils.clip_grad_norm_
 * does. `norm` is the Euclidean norm of all gradients of the step. */
FDSL_HD double optimizer_clip(double clip_norm, double norm)
{
    double factor = clip_norm / (norm + 1e-6);
    return factor < 1 ? factor : 1;
}

/* Returns the factor that scales the gradients of a unit down to `clip_adaptive` times the norm of its
 * parameters (Brock et al., "High-performance large-scale image recognition without normalization", 2021,
 * with the constants of timm). A unit is a row of a weight tensor (the weights of one output), or a whole
 * tensor of one axis. Both arguments are sums of squares. */
FDSL_HD double optimizer_clip_unit(double clip_adaptive, double parameter_squares, double gradient_squares)
{
    const double norm = sqrt(parameter_squares), gradient = sqrt(gradient_squares);
    const double most = (norm > 1e-3 ? norm : 1e-3) * clip_adaptive;
    return gradient < most ? 1 : most / (gradient > 1e-6 ? gradient : 1e-6);
}

/* LAMB: returns the factor of a tensor's step, the norm of its parameters divided by the norm of its
 * direction. It is 1 if one of them is 0, and for tensors without weight decay. */
FDSL_HD double optimizer_trust(double decay, double parameter_squares, double direction_squares)
{
    return decay != 0 && parameter_squares > 0 && direction_squares > 0
               ? sqrt(parameter_squares) / sqrt(direction_squares)
               : 1;
}

/* Muon: the Newton-Schulz iteration. A matrix X with singular values up to 1 becomes a X + b X X^T X +
 * c (X X^T)^2 X; after MUON_ITERATIONS, its singular values are near 1. The constants are the author's. */
#define MUON_ITERATIONS 5
#define MUON_A          3.4445
#define MUON_B          (-4.7750)
#define MUON_C          2.0315
#define MUON_EPSILON    1e-7 /* added to the norm by which the matrix is divided first */

/* Muon: returns the factor of the step of a matrix. */
FDSL_HD double optimizer_matrix_scale(uint64_t rows, uint64_t columns)
{
    return rows > columns ? sqrt((double)rows / (double)columns) : 1;
}

/* The properties of a tensor's update that can differ between tensors. */
struct tensor_update {
    float share;     /* factor of the learning rate */
    bool decays;     /* whether weight decay applies */
    bool hidden;     /* a hidden matrix (model_tensor.hidden) */
    uint16_t index;  /* of the tensor in the model */
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
    if (of.kind == OPTIMIZER_MUON && !tensor.hidden)
        of.kind = OPTIMIZER_ADAMW;
    else if (of.kind == OPTIMIZER_MUON)
        of.rate *= of.matrix_rate;
    of.statistic = tensor.statistic;
    if (tensor.statistic > 0) /* no rule applies */
        of.kind = OPTIMIZER_SGD;
    return of;
}

/* Returns a gradient as it enters the moments: scaled by `clip` (1 if nothing is clipped, so the gradient
 * keeps its bits), and limited to `most`. A NaN stays a NaN. */
FDSL_HD train_real optimizer_clipped(const struct update *update, train_real gradient)
{
    gradient *= update->clip;
    return gradient > update->most ? update->most : gradient < -update->most ? -update->most : gradient;
}

/* Updates the moments of Adam. */
FDSL_HD void optimizer_moments_step(const struct update *update, train_real gradient, train_real *m,
                                    train_real *v)
{
    *m = update->beta1 * *m + update->rest1 * gradient;
    *v = update->beta2 * *v + update->rest2 * gradient * gradient;
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
    gradient = optimizer_clipped(update, gradient);
    if (update->kind == OPTIMIZER_ADAMW)
        value -= update->rate * update->decay * value;
    else
        gradient += update->decay * value;
    if (update->kind == OPTIMIZER_SGD) {
        *m = update->momentum * *m + gradient;
        *parameter = value - update->rate * *m;
        return;
    }
    optimizer_moments_step(update, gradient, m, v);
    *parameter = value - update->rate1 * *m / (TRAIN_SQRT(*v) * update->scale2 + update->epsilon);
}

/* ---- Rules that need whole tensors. optimizer_apply() comes after a pass over all parameters of a tensor:
 *
 * LAMB: the pass calls optimizer_moments_step() with the clipped gradients, and adds up the squares of the
 * parameters and of optimizer_direction(). `trust` is then optimizer_trust().
 *
 * Muon, hidden matrices: the pass replaces each gradient by optimizer_momentum(), then runs the Newton-Schulz
 * iteration on the matrix (n outputs x all weights of an output). optimizer_apply() gets its result in place
 * of the gradient. `trust` is optimizer_matrix_scale(). Other tensors follow AdamW. ---- */

/* LAMB: returns the direction of a parameter's step, from its new moments. */
FDSL_HD train_real optimizer_direction(const struct update *update, train_real parameter, train_real m,
                                       train_real v)
{
    return m * update->correct1 / (TRAIN_SQRT(v) * update->scale2 + update->epsilon) +
           update->decay * parameter;
}

/* Muon: updates the momentum, and returns Nesterov's combination of it with the clipped gradient. */
FDSL_HD train_real optimizer_momentum(const struct update *update, train_real gradient, train_real *m)
{
    *m = update->momentum * *m + (1 - update->momentum) * gradient;
    return update->momentum * *m + (1 - update->momentum) * gradient;
}

/* Updates one parameter, as optimizer_step() does for the rules that update each parameter alone. */
FDSL_HD void optimizer_apply(const struct update *update, train_real gradient, train_real *parameter,
                             train_real *m, train_real *v)
{
    if (update->kind == OPTIMIZER_LAMB)
        *parameter -= update->rate * update->trust * optimizer_direction(update, *parameter, *m, *v);
    else if (update->kind == OPTIMIZER_MUON)
        *parameter -= update->rate * update->decay * *parameter + update->rate * update->trust * gradient;
    else
        optimizer_step(update, gradient, parameter, m, v);
}

/* Returns the moving average of a parameter after a step, from the average before it. */
FDSL_HD train_real optimizer_average(const struct update *update, train_real average, train_real parameter)
{
    return update->average * average + update->rest * parameter;
}

#endif
