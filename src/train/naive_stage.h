/* `train-naive` as a stage of a pipeline (struct stage_functions). Only naive.c includes this file, and only
 * when it is compiled in float: the oracle is never a stage. */
#ifndef FDSL_TRAIN_NAIVE_STAGE_H
#define FDSL_TRAIN_NAIVE_STAGE_H

static struct passing micro_passing(const struct naive *naive, const struct micro *micro, uint32_t j)
{
    return (struct passing){.seed = naive->train->seed,
                            .epoch = micro->epoch,
                            .sample = micro->numbers[j],
                            .training = micro->training};
}

/* Returns the index in the batch of a micro-batch's first sample. */
static uint32_t micro_begin(const struct naive *naive, const struct micro *micro)
{
    return micro->slot * naive->train->stage->capacity;
}

/* Gathers the samples of a micro-batch in the first stage. */
static enum status take_micro(struct naive *naive, const struct micro *micro)
{
    const struct data *data = naive->train->data;
    const uint32_t begin = micro_begin(naive, micro);
    double begin_s = timer_now_s();
    if (micro->training)
        TRY(feed_step(&naive->feed, micro->epoch, micro->numbers, micro->count));
    for (uint32_t j = 0; j < micro->count; j++)
        if (micro->training)
            take_to_learn(naive, micro->epoch, micro->numbers, j, begin + j);
        else
            take(naive, data_sample(data, micro->part, micro->numbers[j]), begin + j);
    naive->totals.data_s += micro->training ? timer_now_s() - begin_s : 0;
    return STATUS_OK;
}

static enum status stage_forward(void *state, const struct micro *micro, const float *inputs, float *outputs)
{
    struct naive *naive = state;
    const struct model *model = naive->train->model;
    const uint32_t begin = micro_begin(naive, micro), last = model->layer_count - 1;
    const size_t values = model->layers[last].out_values;
    double loss = 0;
    if (inputs)
        copy_in(naive->inputs + begin * model->input_values, inputs, micro->count * model->input_values);
    else
        TRY(take_micro(naive, micro));
    for (uint32_t j = 0; j < micro->count; j++) {
        const struct passing passing = micro_passing(naive, micro, j);
        forward(naive, &passing, begin + j);
        if (outputs)
            copy_out(outputs + j * values, output_of(naive, naive->outputs, last, begin + j), values);
        else {
            const struct target target =
                train_target(naive->train, &naive->mix, micro->numbers, micro->count, j);
            take_loss(naive, &target, begin + j, micro->total, &loss);
        }
    }
    if (!outputs)
        add_totals(naive, micro->step, micro->count, loss);
    return STATUS_OK;
}

static enum status stage_backward(void *state, const struct micro *micro, enum gradients_of of,
                                  const float *deltas, float *in_deltas)
{
    struct naive *naive = state;
    const struct model *model = naive->train->model;
    const uint32_t begin = micro_begin(naive, micro), last = model->layer_count - 1;
    const size_t values = model->layers[last].out_values;
    if (micro->index == 0 && of & GRADIENTS_OF_WEIGHTS)
        memset(naive->gradients, 0, model->arena_values * sizeof *naive->gradients);
    for (uint32_t j = 0; j < micro->count; j++) {
        const struct passing passing = micro_passing(naive, micro, j);
        float *in_delta = in_deltas ? in_deltas + j * model->input_values : NULL;
        if (deltas)
            copy_in(output_of(naive, naive->deltas, last, begin + j), deltas + j * values, values);
        if (in_delta)
            memset(in_delta, 0, model->input_values * sizeof *in_delta);
        if (of & GRADIENTS_OF_INPUTS)
            backward_inputs(naive, &passing, begin + j, in_delta);
        if (of & GRADIENTS_OF_WEIGHTS)
            backward_weights(naive, begin + j);
    }
    return STATUS_OK;
}

static enum status stage_update(void *state, uint64_t step)
{
    struct naive *naive = state;
    update_parameters(naive, step);
    published_store(&naive->published, &naive->totals);
    return STATUS_OK;
}

static const struct stage_functions stages = {
    .live = true, .forward = stage_forward, .backward = stage_backward, .update = stage_update};

#endif
