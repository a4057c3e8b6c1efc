/* Assigns cores, a GPU and the scaling (weak or strong) to each rank. Checks that all ranks have the same
 * options and data. */
#include "run/rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "machine/comm.h"
#include "machine/cores.h"
#include "run/settings.h"
#include "run/runner.h"

/* Callers use this function to leave CUDA uninitialized if the run needs no GPU. */
bool runner_any_on_gpu(const struct settings *settings)
{
    if (settings_compute(settings))
        return true;
    for (size_t i = 0; i < settings->variant_count; i++)
        if (settings->variants[i]->variant && strcmp(settings->variants[i]->variant->platform, "cuda") == 0)
            return true;
    return false;
}

enum status runner_join(const struct settings *settings, enum status read)
{
    const struct failure failure = status_save(read);
    comm_set_timeout(settings->rank_timeout_s);
    enum status status = comm_open();
    if (read != STATUS_OK)
        (void)status_restore(&failure);
    if (status != STATUS_OK)
        return read != STATUS_OK ? read : status;
    TRY(comm_agree(read));
    bool prepares = settings->prepare, rank_0_prepares = prepares;
    TRY(comm_spread(&rank_0_prepares, sizeof rank_0_prepares));
    return comm_agree(prepares == rank_0_prepares
                          ? STATUS_OK
                          : status_set(STATUS_USAGE, "--prepare must be given to all ranks or to none"));
}

/* Ranks with different options would deadlock, or produce results that cannot be combined. */
enum status runner_check_alike(const struct settings *settings)
{
    static const char *const own[] = {"threads", NULL}; /* options that may differ between ranks */
    static const char version[] = FDSL_VERSION;
    uint64_t build = fnv_add(FNV_BEGIN, version, sizeof version);
    TRY(comm_check_same(fnv_add(build, env_revision(), strlen(env_revision())), "version and revision",
                        "start the same program on all ranks"));
    return comm_check_same(
        options_hash(&settings->options, own), "options",
        "give all ranks the same options; only --threads and the names of output files may differ");
}

enum status runner_check_data(const struct runner *runner)
{
    const struct workload *workload = runner->settings->workload;
    return comm_check_same(workload->ranks.identity ? workload->ranks.identity(runner->input) : 0, "data",
                           "give all ranks the same files, for example in a shared folder");
}

enum status runner_take_cores(struct settings *settings, double *worst)
{
    enum cores_outcome outcome;
    *worst = CORES_KEPT;
    if (settings->binding == BINDING_NONE || comm_size() == 1)
        return STATUS_OK;
    TRY(comm_agree(cores_take((uint32_t)settings->threads, &outcome)));
    settings_take_threads(settings);
    *worst = outcome;
    return comm_max(worst, 1);
}

/* Returns whether a chosen variant runs on more than one core. */
static bool any_threaded(const struct settings *settings)
{
    for (size_t i = 0; i < settings->variant_count; i++)
        if (settings->variants[i]->variant && settings->variants[i]->variant->threaded)
            return true;
    return false;
}

bool runner_repeats_threads(const struct settings *settings)
{
    const struct axis *axis = axes_find(&settings->axes, "threads");
    bool all = false, same = false;
    char number[AXIS_TEXT_BYTES];
    snprintf(number, sizeof number, "%d", settings->allowed_threads);
    for (size_t i = 0; axis && i < axis->count; i++) {
        all |= strcmp(axis->texts[i], "0") == 0;
        same |= strcmp(axis->texts[i], number) == 0;
    }
    return all && same;
}

#define CROWD 4 /* warn above this number of threads per hardware thread; loaders benefit from several */

void runner_warn_about_cores(const struct settings *settings, double outcome)
{
    char threads[16];
    snprintf(threads, sizeof threads, "%d", settings->resources.threads);
    if (settings->resources.threads > CROWD * settings->allowed_threads && any_threaded(settings))
        status_warn_value("threads", threads,
                          ": this process may use %d hardware thread%s, and more threads mostly wait for "
                          "each other; omit --threads to use one per hardware thread",
                          settings->allowed_threads, settings->allowed_threads == 1 ? "" : "s");
    if (!settings->ranks && runner_repeats_threads(settings))
        status_warn(
            "--threads: 0 means %d per rank here; this number is listed too, so both measure the same",
            settings->allowed_threads);
    if (cores_bound_by_openmp() && (comm_size() > 1 || settings->threads == 0))
        status_warn("OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY bound this process to one core before it "
                    "started, so only that core is counted; unset them%s",
                    comm_size() > 1 ? ", or ranks share cores" : ", or use --threads N");
    else if (outcome == CORES_CROWDED)
        status_warn("there are more ranks than cores, so some ranks share a core; start fewer ranks");
    else if (outcome == CORES_IDLE && any_threaded(settings))
        status_warn("mpirun bound the ranks to some of the cores, so the other cores are idle; to use all "
                    "cores, start with: mpirun --bind-to none");
}

enum status runner_check_no_device(const struct settings *settings, uint64_t ranks)
{
    bool given = options_given(&settings->options, "device") || settings->best_gpu;
    int unused;
    TRY(rank_device_find(settings->rank_device, ranks, 0, &unused));
    if (given && settings->rank_device)
        return status_set(STATUS_USAGE,
                          "--device, --best-gpu and --rank-device all choose a GPU; give only one of them");
    if (ranks == 1 || !given)
        return STATUS_OK;
    return status_set(STATUS_USAGE,
                      "--device and --best-gpu work only with one rank; with several, rank i of a machine "
                      "uses GPU i; to choose among GPUs, use --rank-device or set CUDA_VISIBLE_DEVICES");
}

/* Returns whether a variant runs on a GPU. Works also for variants that this build lacks. */
static bool is_for_gpu(const struct variant_entry *entry)
{
    return entry->variant ? strcmp(entry->variant->platform, "cuda") == 0
                          : strstr(entry->needs, "CUDA") || strstr(entry->needs, "CUDNN");
}

/* Replaces GPU variants by the workload's CPU variant, under the names of the GPU variants. */
static enum status use_cpu(struct runner *runner)
{
    struct settings *settings = runner->settings;
    const char *name = settings->workload->cpu_stand_in;
    const struct variant_entry *other = name ? variant_find(name) : NULL;
    runner->stand_ins = calloc(settings->variant_count, sizeof *runner->stand_ins);
    TRY(ALLOCATED(runner->stand_ins, "out of memory for the variants"));
    for (size_t i = 0; i < settings->variant_count; i++) {
        const struct variant_entry *entry = settings->variants[i];
        if (!is_for_gpu(entry))
            continue;
        if (!other || !other->variant)
            return status_set(other ? STATUS_UNAVAILABLE : STATUS_USAGE,
                              "--rank-device: a rank on the CPU cannot run %s: %s%s; give this rank a GPU",
                              entry->name, other ? "this build lacks " : "it has no implementation for CPUs",
                              other ? other->name : "");
        runner->stand_ins[i] = *entry;
        runner->stand_ins[i].variant = other->variant;
        settings->variants[i] = &runner->stand_ins[i];
    }
    return STATUS_OK;
}

enum status runner_take_device(struct runner *runner)
{
    struct settings *settings = runner->settings;
    int chosen;
    TRY(rank_device_find(settings->rank_device, runner->partition.ranks, runner->partition.rank, &chosen));
    if (chosen == RANK_DEVICE_CPU)
        return use_cpu(runner);
    bool chooses = comm_size() > 1 || chosen >= 0;
    int devices = chooses && runner_any_on_gpu(settings) ? device_count() : 0;
    if (devices == 0)
        return STATUS_OK;
    if (chosen >= devices)
        return status_set(STATUS_USAGE,
                          "--rank-device: there is no GPU %d; this process can use %d GPU%s, counted from 0",
                          chosen, devices, devices == 1 ? "" : "s");
    settings->resources.device = chosen >= 0 ? chosen : comm_local_rank() % devices;
    return STATUS_OK;
}

/* Compares PCI bus ids, because the same CUDA number can mean different devices on different ranks. */
enum status runner_count_sharers(struct runner *runner)
{
    const size_t bytes = sizeof runner->device.pci_bus_id;
    char *ids = calloc((size_t)comm_local_size(), bytes);
    enum status status = comm_agree(ALLOCATED(ids, "out of memory"));
    if (status == STATUS_OK)
        status = comm_gather_local(runner->device.pci_bus_id, bytes, ids);
    for (int i = 0; status == STATUS_OK && i < comm_local_size(); i++)
        runner->sharers +=
            *runner->device.pci_bus_id && strcmp(runner->device.pci_bus_id, ids + (size_t)i * bytes) == 0;
    free(ids);
    double most = runner->sharers;
    if (status == STATUS_OK)
        status = comm_max(&most, 1);
    if (status == STATUS_OK && most > 1)
        status_warn("%.0f ranks share a GPU and slow each other down; start no more ranks on a machine than "
                    "it has GPUs",
                    most);
    return status;
}

enum status runner_take_scaling(struct runner *runner)
{
    struct settings *settings = runner->settings;
    if (settings->workload->ranks.joint && options_given(&settings->options, "scaling"))
        return status_option(STATUS_USAGE, "scaling",
                             ": all ranks of %s take part in each of its %s; omit --scaling",
                             settings->workload->name, settings->workload->item);
    if (settings->workload->ranks.share_items) {
        if (settings->scaling == SCALING_WEAK && options_given(&settings->options, "scaling"))
            return status_value(STATUS_USAGE, "scaling", "weak",
                                ": ranks of %s always divide its %s; omit --scaling",
                                settings->workload->name, settings->workload->item);
        settings->scaling = SCALING_STRONG;
    }
    runner->partition.strong = settings->scaling == SCALING_STRONG;
    return STATUS_OK;
}
