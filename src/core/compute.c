#include "core/compute.h"

#include <stdio.h>
#include <string.h>

enum status compute_read(struct compute *compute)
{
    static const char train[] = "train";
    const char *text = compute->text;
    compute->step_s = 0;
    compute->task = (struct task){0};
    if (!text)
        return STATUS_OK;
    size_t length = strcspn(text, ":");
    if (length == sizeof train - 1 && memcmp(text, train, length) == 0) {
        const char *model = text[length] ? text + length + 1 : "";
        if (text[length] && (!*model || strlen(model) >= sizeof compute->task.model))
            return status_option(STATUS_USAGE, "compute",
                                 " %.40s: name a network after the colon, as in train:cnn", text);
        snprintf(compute->task.model, sizeof compute->task.model, "%s", model);
        enum status status = *model ? task_check_name(model) : STATUS_OK;
        return status == STATUS_OK ? STATUS_OK : status_prefix(status, "--compute");
    }
    if (!strchr("+-.0123456789", *text))
        return status_option(STATUS_USAGE, "compute",
                             ": '%.40s' is neither a number of milliseconds nor train[:MODEL]", text);
    double step_ms;
    TRY(parse_real("--compute", text, COMPUTE_MIN_MS, COMPUTE_MAX_MS, &step_ms));
    compute->step_s = 1e-3 * step_ms;
    return STATUS_OK;
}

enum status compute_teach(struct compute *compute)
{
    enum status status = task_choose(&compute->task);
    if (status != STATUS_OK)
        return status_prefix(status, "--compute %s", compute->text);
    snprintf(compute->name, sizeof compute->name, "train:%s", compute->task.model);
    compute->text = compute->name;
    return STATUS_OK;
}
