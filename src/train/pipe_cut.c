/* Cuts a network into the stages of a pipeline. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/timer.h"
#include "machine/comm.h"
#include "train/pipeline.h"

#define TRIALS 4 /* runs per piece: the first one warms up, and the fastest one counts */

/* Divides the network at all possible cuts into pieces. Writes the first layer of each piece to `starts`,
 * followed by the number of layers. Returns the number of pieces. */
static uint32_t find_pieces(const struct model *model, uint32_t *starts)
{
    uint32_t pieces = 0;
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (i == 0 || model_may_cut(model, i))
            starts[pieces++] = i;
    starts[pieces] = model->layer_count;
    return pieces;
}

uint32_t pipe_pieces(const struct model *model)
{
    uint32_t starts[MODEL_LAYERS_MAX + 1];
    return find_pieces(model, starts);
}

/* ---- Costs ---- */

/* Host memory and sample numbers for the trial of a piece. */
struct trial {
    float *inputs, *outputs, *deltas, *in_deltas;
    uint32_t *numbers;
};

static bool trial_new(const struct model *piece, uint32_t capacity, struct trial *trial)
{
    size_t in = piece->input_values * capacity,
           out = piece->layers[piece->layer_count - 1].out_values * capacity;
    trial->inputs = calloc(2 * (in + out), sizeof(float));
    trial->numbers = calloc(capacity, sizeof *trial->numbers);
    if (!trial->inputs || !trial->numbers)
        return false;
    trial->outputs = trial->inputs + in;
    trial->deltas = trial->outputs + out;
    trial->in_deltas = trial->deltas + out;
    /* The trial's inputs and gradients are positive, so that ReLU and pooling do not turn them into zeros:
     * zeros would cost less time. */
    for (size_t i = 0; i < in; i++)
        trial->inputs[i] = 0.5f + (float)(i % 7) * 0.125f;
    for (size_t i = 0; i < out; i++)
        trial->deltas[i] = 1e-3f * (1 + (float)(i % 5));
    for (uint32_t i = 0; i < capacity; i++)
        trial->numbers[i] = i;
    return true;
}

static void trial_free(struct trial *trial)
{
    free(trial->inputs);
    free(trial->numbers);
}

static enum status run_trial(const struct train *piece, const struct engine *engine, void *state,
                             const struct trial *trial, double *seconds)
{
    const struct stage *stage = piece->stage;
    const struct micro micro = {
        .training = true, .numbers = trial->numbers, .count = stage->capacity, .total = stage->capacity};
    double begin_s = timer_now_s();
    TRY(engine->stages->forward(state, &micro, stage->first ? NULL : trial->inputs,
                                stage->last ? NULL : trial->outputs));
    TRY(engine->stages->backward(state, &micro, GRADIENTS_OF_BOTH, stage->last ? NULL : trial->deltas,
                                 stage->first ? NULL : trial->in_deltas));
    double took_s = timer_now_s() - begin_s;
    *seconds = took_s < *seconds ? took_s : *seconds;
    return STATUS_OK;
}

/* Measures a piece whose engine is open. Its parameters are initialised from the seed of the training run. */
static enum status run_trials(const struct train *piece, const struct engine *engine, void *state,
                              double *seconds)
{
    CLOSED_BY(train_state_free) struct train_state begin = {0};
    CLOSED_BY(trial_free) struct trial trial = {0};
    bool room = train_state_new(piece->model->arena_values, &begin) &&
                trial_new(piece->model, piece->stage->capacity, &trial);
    *seconds = HUGE_VAL;
    TRY(ALLOCATED(room, "out of memory to measure the layers; lower --batch"));
    model_initialise(piece->model, piece->seed, begin.parameters);
    TRY(engine->set(state, &begin));
    for (int i = 0; i < TRIALS; i++)
        TRY(run_trial(piece, engine, state, &trial, seconds));
    return STATUS_OK;
}

/* Measures the layers first .. end - 1 as a separate stage. */
static enum status measure_piece(const struct train *train, const struct engine *engine,
                                 const struct resources *resources, uint32_t first, uint32_t end,
                                 uint32_t capacity, double *seconds)
{
    const struct stage stage = {
        .first = first == 0, .last = end == train->model->layer_count, .slots = 1, .capacity = capacity};
    struct model *model = malloc(sizeof *model);
    struct train piece = *train;
    void *state = NULL;
    TRY(ALLOCATED(model, "out of memory"));
    model_slice(train->model, first, end, model);
    piece.model = model;
    piece.stage = &stage;
    enum status status = engine->open(&piece, resources, &state);
    if (status == STATUS_OK)
        status = run_trials(&piece, engine, state, seconds);
    if (state)
        engine->close(state);
    free(model);
    return status;
}

/* ---- Cuts ---- */

/* Fills `begins` with slices that cost at most `most` each. Each slice has as many pieces as possible, but
 * leaves at least one piece for each later slice. Returns whether `stages` slices suffice. */
static bool fill(const uint32_t *starts, const double *costs, uint32_t pieces, uint32_t stages, double most,
                 uint32_t *begins)
{
    uint32_t piece = 0;
    for (uint32_t s = 0; s < stages; s++) {
        double cost = 0;
        begins[s] = starts[piece];
        do
            cost += costs[piece++];
        while (pieces - piece > stages - 1 - s && cost + costs[piece] <= most);
        if (cost > most)
            return false;
    }
    begins[stages] = starts[pieces];
    return piece == pieces;
}

void pipe_choose(const uint32_t *starts, const double *costs, uint32_t pieces, uint32_t stages,
                 uint32_t *begins)
{
    double best = HUGE_VAL;
    /* The cost of a slice is the sum of the costs of its pieces, which are consecutive. So the sums over
     * consecutive pieces are the only candidates for `most`. */
    for (uint32_t i = 0; i < pieces; i++) {
        double sum = 0;
        for (uint32_t j = i; j < pieces; j++) {
            sum += costs[j];
            double most = sum * (1 + 1e-12); /* sums of the same pieces can differ in their last bit */
            if (most < best && fill(starts, costs, pieces, stages, most, begins))
                best = most;
        }
    }
    (void)fill(starts, costs, pieces, stages, best, begins);
}

enum status pipe_cut(const struct train *train, const struct engine *engine,
                     const struct resources *resources, uint32_t stages, uint32_t capacity, uint32_t *begins)
{
    uint32_t starts[MODEL_LAYERS_MAX + 1], pieces = find_pieces(train->model, starts);
    double costs[MODEL_LAYERS_MAX] = {0};
    enum status status = STATUS_OK;
    if (stages > pieces)
        return status_set(STATUS_USAGE, "%s can be cut into at most %u stages, not %u; use fewer ranks",
                          train->model->name, pieces, stages);
    for (uint32_t i = 0; comm_rank() == 0 && status == STATUS_OK && i < pieces; i++)
        status = measure_piece(train, engine, resources, starts[i], starts[i + 1], capacity, &costs[i]);
    TRY(comm_agree(status));
    TRY(comm_spread(costs, sizeof costs));
    pipe_choose(starts, costs, pieces, stages, begins);
    return STATUS_OK;
}
