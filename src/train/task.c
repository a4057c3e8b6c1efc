/* Chooses the network that trains on batches from another workload (core/step_backend.h). */
#include "core/step_backend.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/options.h"
#include "core/text.h"
#include "train/data.h"
#include "train/task.h"

/* Returns whether step backends can train the network. They support neither volumes nor transformers. */
static bool is_trainable(const struct model_table *table)
{
    return !table->volumetric && table->layers[0].kind != LAYER_PATCHES;
}

static const struct model_table *find_model(const char *name)
{
    const struct model_table *table = model_tables;
    while (table->name && (!is_trainable(table) || strcmp(table->name, name) != 0))
        table++;
    return table->name ? table : NULL;
}

enum status task_check_name(const char *model)
{
    char list[128] = "";
    const char *names[16];
    size_t count = 0;
    if (find_model(model))
        return STATUS_OK;
    for (const struct model_table *table = model_tables; table->name && count < COUNT_OF(names); table++) {
        if (!is_trainable(table))
            continue;
        names[count++] = table->name;
        text_join(list, sizeof list, ", ", "%s", table->name);
    }
    const char *nearest = nearest_word(model, names, count);
    return status_set(STATUS_USAGE, "train:MODEL has no network '%.40s' for images; choose from %s%s%s%s",
                      model, list, nearest ? "; did you mean train:" : "", nearest ? nearest : "",
                      nearest ? "?" : "");
}

enum status task_build(const struct task *task, struct model *model)
{
    TRY(task_check_name(task->model));
    enum status status =
        model_build(find_model(task->model), (struct shape){task->channels, 1, task->height, task->width},
                    task->classes, model);
    if (status != STATUS_USAGE)
        return status;
    return status_append(status, "; choose another network with train:MODEL, for example train:logreg");
}

enum status task_choose(struct task *task)
{
    struct model model;
    bool digits = task->channels == 1 && task->height == 28 && task->width == 28;
    if (task->classes < 2)
        return status_set(STATUS_USAGE, "its samples all have the same class, so there is nothing to learn; "
                                        "use samples of several classes");
    if (task->channels > DATA_CHANNELS_MAX)
        return status_set(STATUS_USAGE, "its samples have %" PRIu32 " channels; at most %d are supported",
                          task->channels, DATA_CHANNELS_MAX);
    if (!*task->model)
        snprintf(task->model, sizeof task->model, digits ? "cnn" : "cnn-fdsl");
    return task_build(task, &model);
}
