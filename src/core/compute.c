#include "core/compute.h"

#include <string.h>

/* Refuses train and train:MODEL: the trainer itself trains on what is read or generated. */
static enum status refuse_training(const char *text)
{
    const char *model = text[5] == ':' && text[6] ? text + 6 : "MODEL";
    return status_value(STATUS_USAGE, "compute", text,
                        ": give the time of a step in milliseconds. To train on batches while they are read "
                        "or generated, run --workload train --variant %s --model %.40s with --data DIR "
                        "--feed load or --data synth --feed live",
                        strncmp(model, "vit-", 4) == 0     ? "train-vit"
                        : strncmp(model, "resnet", 6) == 0 ? "train-resnet"
                                                           : "train-cuda",
                        model);
}

enum status compute_read(struct compute *compute)
{
    const char *text = compute->text;
    double step_ms;
    compute->step_s = 0;
    if (!text)
        return STATUS_OK;
    if (strncmp(text, "train", 5) == 0 && (text[5] == ':' || !text[5]))
        return refuse_training(text);
    TRY(parse_real("--compute", text, COMPUTE_MIN_MS, COMPUTE_MAX_MS, &step_ms));
    compute->step_s = 1e-3 * step_ms;
    return STATUS_OK;
}
