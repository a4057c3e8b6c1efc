/* The reference of a step's update (optimizer.h): plain loops over the tensors of a network. naive.c includes
 * this file in float and in double. */
#ifndef FDSL_TRAIN_NAIVE_OPTIMIZER_H
#define FDSL_TRAIN_NAIVE_OPTIMIZER_H

#include <string.h>

#include "train/engine.h"

/* Arenas of a network; `ema` may be NULL. */
struct naive_arenas {
    train_real *parameters, *gradients, *m, *v, *ema;
    train_real *adjusted; /* gradients as they enter the rule; NULL unless train_needs_tensors() */
};

static double naive_squares(const train_real *values, size_t count)
{
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += (double)values[i] * values[i];
    return sum;
}

/* Clips the gradients of each unit of a tensor (optimizer_clip_unit()). As in timm, the last layer is not
 * clipped. */
static void naive_clip_units(const struct train *train, const struct model_tensor *tensor,
                             const struct naive_arenas *arenas)
{
    const double factor = train->optimizer.clip_adaptive;
    const size_t rows = train_rows_of(tensor), columns = tensor->values / rows;
    for (size_t r = 0; factor > 0 && !tensor->head && !tensor->is_statistic && r < rows; r++) {
        const size_t first = tensor->first + r * columns;
        const double clip = optimizer_clip_unit(factor, naive_squares(arenas->parameters + first, columns),
                                                naive_squares(arenas->gradients + first, columns));
        for (size_t i = first; i < first + columns; i++)
            arenas->adjusted[i] *= (train_real)clip;
    }
}

/* LAMB: updates the moments of a tensor, and returns the factor of its step. */
static train_real naive_trust(const struct update *update, const struct model_tensor *tensor,
                              const struct naive_arenas *arenas)
{
    double parameters = 0, directions = 0;
    for (size_t i = tensor->first; i < tensor->first + tensor->values; i++) {
        optimizer_moments_step(update, optimizer_clipped(update, arenas->adjusted[i]), &arenas->m[i],
                               &arenas->v[i]);
        const double at = arenas->parameters[i],
                     way = optimizer_direction(update, arenas->parameters[i], arenas->m[i], arenas->v[i]);
        parameters += at * at;
        directions += way * way;
    }
    return (train_real)optimizer_trust(update->decay, parameters, directions);
}

/* Sets `gram` to A A^T for a matrix A with `count` rows of `length` values, which are `across` values apart;
 * adjacent values of a row are `along` apart. */
static void naive_gram(const train_real *a, size_t count, size_t across, size_t length, size_t along,
                       train_real *gram)
{
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < count; j++) {
            train_real sum = 0;
            for (size_t k = 0; k < length; k++)
                sum += a[i * across + k * along] * a[j * across + k * along];
            gram[i * count + j] = sum;
        }
}

/* Runs the Newton-Schulz iteration on a matrix with `rows` rows, stored row by row. Works on the rows of the
 * matrix or of its transpose, whichever are fewer: their products need less memory. `scratch` has room for
 * two squares of this number, and a vector of this length. */
static void naive_orthogonalise(train_real *matrix, size_t rows, size_t columns, train_real *scratch)
{
    const bool tall = rows > columns;
    const size_t count = tall ? columns : rows, length = tall ? rows : columns;
    const size_t across = tall ? 1 : columns, along = tall ? columns : 1;
    const train_real scale = (train_real)(1 / (sqrt(naive_squares(matrix, rows * columns)) + MUON_EPSILON));
    train_real *gram = scratch, *factors = gram + count * count, *column = factors + count * count;
    for (size_t i = 0; i < rows * columns; i++)
        matrix[i] *= scale;
    for (int iteration = 0; iteration < MUON_ITERATIONS; iteration++) {
        naive_gram(matrix, count, across, length, along, gram);
        naive_gram(gram, count, count, count, 1, factors); /* gram is symmetric: this is its square */
        for (size_t i = 0; i < count * count; i++)
            factors[i] = (train_real)MUON_B * gram[i] + (train_real)MUON_C * factors[i];
        for (size_t k = 0; k < length; k++) {
            for (size_t i = 0; i < count; i++)
                column[i] = matrix[i * across + k * along];
            for (size_t i = 0; i < count; i++) {
                train_real sum = 0;
                for (size_t j = 0; j < count; j++)
                    sum += factors[i * count + j] * column[j];
                matrix[i * across + k * along] = (train_real)MUON_A * column[i] + sum;
            }
        }
    }
}

/* Returns the values of scratch that naive_update() needs. */
static size_t naive_optimizer_scratch(const struct train *train)
{
    size_t most = 0;
    for (uint32_t t = 0; train->optimizer.kind == OPTIMIZER_MUON && t < train->model->tensor_count; t++) {
        const struct model_tensor *tensor = &train->model->tensors[t];
        const size_t rows = train_rows_of(tensor), columns = tensor->values / rows;
        const size_t count = rows < columns ? rows : columns;
        if (tensor->hidden && 2 * count * count + count > most)
            most = 2 * count * count + count;
    }
    return most;
}

/* Updates the parameters with arenas->gradients. `all` has the factor of optimizer_clip(). */
static void naive_update(const struct train *train, const struct update *all,
                         const struct naive_arenas *arenas, train_real *scratch)
{
    const train_real *gradients = arenas->adjusted ? arenas->adjusted : arenas->gradients;
    if (arenas->adjusted)
        memcpy(arenas->adjusted, arenas->gradients, train->model->arena_values * sizeof *arenas->adjusted);
    for (uint32_t t = 0; t < train->model->tensor_count; t++) {
        const struct model_tensor *tensor = &train->model->tensors[t];
        const size_t first = tensor->first, end = first + tensor->values, rows = train_rows_of(tensor);
        struct update of = optimizer_of(all, train_update_of(train, tensor));
        naive_clip_units(train, tensor, arenas);
        if (of.kind == OPTIMIZER_LAMB)
            of.trust = naive_trust(&of, tensor, arenas);
        if (of.kind == OPTIMIZER_MUON) {
            of.trust = (train_real)optimizer_matrix_scale(rows, tensor->values / rows);
            for (size_t i = first; i < end; i++)
                arenas->adjusted[i] =
                    optimizer_momentum(&of, optimizer_clipped(&of, gradients[i]), &arenas->m[i]);
            naive_orthogonalise(arenas->adjusted + first, rows, tensor->values / rows, scratch);
        }
        for (size_t i = first; i < end; i++) {
            optimizer_apply(&of, gradients[i], &arenas->parameters[i], &arenas->m[i], &arenas->v[i]);
            if (arenas->ema)
                arenas->ema[i] = optimizer_average(&of, arenas->ema[i], arenas->parameters[i]);
        }
    }
}

#endif
