/* Warnings about data sets from which a network cannot learn well. */
#include <inttypes.h>
#include <stdlib.h>

#include "train/data.h"

#define FEW 100 /* with fewer test samples, one sample changes the accuracy by more than 1 % */

void data_warn_of_classes(const struct data *data, const char *name, bool whole)
{
    if (data_is_generated(name))
        return;
    const struct data_set *train = &data->sets[DATA_TRAIN], *test = &data->sets[DATA_TEST];
    uint32_t *seen = calloc(data->classes, sizeof *seen);
    uint32_t missing = 0, unseen = 0, first = 0, single = 0;
    for (uint32_t i = 0; seen && i < train->count; i++)
        seen[train->labels[i]]++;
    for (uint32_t i = 0; seen && i < test->count; i++) {
        missing += seen[test->labels[i]] == 0;
        seen[test->labels[i]] += 2; /* so 1 means: one training sample and no test sample */
    }
    for (uint32_t c = data->classes; whole && seen && c-- > 0;) {
        single += seen[c] == 1;
        if (seen[c] == 0) {
            unseen++;
            first = c;
        }
    }
    free(seen);
    if (single)
        status_say("--data %s: %" PRIu32 " class%s a single sample, which is trained on and never tested",
                   name, single, single == 1 ? " has" : "es have");
    if (unseen)
        status_warn("--data %s: %" PRIu32 " of %" PRIu32 " classes ha%s no sample (the first: class %" PRIu32
                    "); labels begin at 0, and class folders without a usable sample count as classes",
                    name, unseen, data->classes, unseen == 1 ? "s" : "ve", first);
    if (data->classes == 1)
        status_warn(
            "--data %s: all samples have class 0, so there is nothing to learn; class folders must be "
            "directly in the folder of the data set",
            name);
    else if (missing)
        status_warn("--data %s: the test set has %" PRIu32 " class%s without a training sample; raise "
                    "--train-size, or use other data",
                    name, missing, missing == 1 ? "" : "es");
}

void data_warn_of_few(const struct data *data, const char *name)
{
    static bool told;
    const uint32_t count = data->sets[DATA_TEST].count;
    if (told || count >= FEW || data_is_generated(name))
        return;
    told = true;
    status_warn("--data %s: the test set has only %" PRIu32
                " sample%s, so a single sample changes the accuracy by %.3g %%; %s",
                name, count, count == 1 ? "" : "s", 100.0 / count,
                data->split
                    ? "add samples, raise --test-share, or store a larger test set and the training set in "
                      "folders 'test' and 'train'"
                    : "add test samples");
}
