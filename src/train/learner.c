/* Which network learns from batches that others make (core/learner.h). */
#include "core/learner.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/options.h"
#include "train/data.h"
#include "train/learner.h"

/* The names of the networks that take pictures, as a list for messages. */
static void list_models(char *names, size_t size)
{
    names[0] = '\0';
    for (const struct model_table *table = model_tables; table->name; table++) {
        size_t used = strlen(names);
        if (!table->volumetric)
            snprintf(names + used, size - used, "%s%s", used ? ", " : "", table->name);
    }
}

static const struct model_table *find_model(const char *name)
{
    const struct model_table *table = model_tables;
    while (table->name && (table->volumetric || strcmp(table->name, name) != 0))
        table++;
    return table->name ? table : NULL;
}

enum status lesson_build(const struct lesson *lesson, struct model *model)
{
    const struct model_table *table = find_model(lesson->model);
    char names[128];
    if (table)
        return model_build(table, (struct shape){lesson->channels, 1, lesson->height, lesson->width},
                           lesson->classes, model);
    list_models(names, sizeof names);
    return status_set(STATUS_USAGE, "no network of pictures is named '%s'; there are %s", lesson->model,
                      names);
}

enum status lesson_choose(struct lesson *lesson)
{
    struct model model;
    bool digits = lesson->channels == 1 && lesson->height == 28 && lesson->width == 28;
    if (lesson->classes < 2)
        return status_set(STATUS_USAGE,
                          "its samples are all of one class, so there is nothing to tell apart");
    if (lesson->channels > DATA_CHANNELS_MAX)
        return status_set(STATUS_USAGE, "its samples have %" PRIu32 " channels; at most %d are taken",
                          lesson->channels, DATA_CHANNELS_MAX);
    if (!*lesson->model)
        snprintf(lesson->model, sizeof lesson->model, digits ? "cnn" : "cnn-fdsl");
    return lesson_build(lesson, &model);
}
