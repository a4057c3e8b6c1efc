/* fdsl-bench: parse, select, run, report. */
#include <signal.h>
#include <stdio.h>

#include "comm.h"
#include "core/record.h"
#include "core/report.h"
#include "core/runner.h"
#include "core/settings.h"
#include "core/status.h"
#include "core/variant.h"
#include "load/prepare.h"

#ifndef FDSL_VERSION
#define FDSL_VERSION "unknown"
#endif

static enum status dispatch(struct settings *settings, int argc, char *argv[])
{
    if (settings->help) {
        settings_help(stdout);
        return STATUS_OK;
    }
    if (settings->version) {
        puts("fdsl-bench " FDSL_VERSION);
        return STATUS_OK;
    }
    struct resources resources = {.threads = 1, .device = (int)settings->device};
    if (settings->list)
        return report_list(&resources, settings->verbose, settings->format);
    if (settings->environment)
        return report_env((int)settings->device, settings->format);
    TRY(comm_open());
    enum status status = settings->prepare ? prepare_run(argc, argv) : runner_run(settings);
    comm_close();
    return status;
}

int main(int argc, char *argv[])
{
    struct settings settings = {0};
    signal(SIGXFSZ, SIG_IGN); /* a file-size limit is an error of write(), which is reported */
    file_remove_on_signals();
    enum status status = variant_table_check();
    if (status == STATUS_OK)
        status = settings_read(&settings, argc, argv);
    if (status == STATUS_OK)
        status = dispatch(&settings, argc, argv);
    if (status != STATUS_OK)
        status_print();
    settings_free(&settings);
    if ((fflush(stdout) != 0 || ferror(stdout)) && status == STATUS_OK) {
        perror("fdsl-bench: stdout");
        status = STATUS_FAILED;
    }
    return (int)status;
}
