#include "data/prepare_parts.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/file.h"
#include "core/array.h"
#include "core/text.h"
#include "core/timer.h"
#include "data/index.h"
#include "data/members.h"
#include "data/unit_writer.h"
#include "data/samples.h"
#include "machine/comm.h"
#include "machine/env.h"

#define FOLDER_SAMPLES 1000                /* samples per folder, with --store files */
#define SHARD_SAMPLES  10000               /* limit of samples per shard without --shards */
#define SHARD_BYTES    (UINT64_C(1) << 30) /* approximate limit of bytes per shard without --shards */
#define CHUNK_SAMPLES  256 /* samples in memory at a time; fewer if that exceeds CHUNK_BYTES */
#define CHUNK_BYTES    (UINT64_C(64) << 20)
#define KEY_DIGITS     6 /* minimum number of digits of a key */
#define BROKEN_TOLD    8 /* warnings about broken images per rank; further ones are only counted */

/* Programs that read class folders would treat each folder of --store files as a class. Therefore, these
 * folders are stored inside a folder with this name; such programs then find this folder as the only
 * class. */
#define NOT_IMAGEFOLDER "not-imagefolder/"

static enum status check_counts(struct parameters *parameters, const struct source_facts *facts)
{
    bool shards = parameters->store == INDEX_SHARDS;
    if (facts->samples == 0)
        return status_set(STATUS_FAILED, "--from %s: the source has no samples; name another source",
                          parameters->from);
    if (parameters->samples == 0 && facts->samples == SOURCE_ENDLESS)
        return status_set(STATUS_USAGE, "set the number of samples with --samples N; --from %s is unlimited",
                          parameters->from);
    if (parameters->samples == 0)
        parameters->samples = facts->samples;
    if (parameters->samples > facts->samples)
        return status_set(STATUS_USAGE, "--samples %" PRIu64 ": the source has only %" PRIu64,
                          parameters->samples, facts->samples);
    if (!shards && parameters->shards > 0)
        return status_set(STATUS_USAGE, "--shards needs --store shards; drop --shards");
    if (!shards)
        return STATUS_OK;
    if (parameters->shards > parameters->samples)
        return status_set(STATUS_USAGE,
                          "--shards %" PRIu64 ": there are only %" PRIu64 " samples; use fewer shards",
                          parameters->shards, parameters->samples);
    uint64_t bytes = facts->stored_bytes ? facts->stored_bytes : facts->sample_bytes;
    uint64_t by_bytes = SHARD_BYTES / (bytes + 2048);
    uint64_t most = by_bytes < 1 ? 1 : by_bytes < SHARD_SAMPLES ? by_bytes : SHARD_SAMPLES;
    if (parameters->shards == 0)
        parameters->shards = (parameters->samples + most - 1) / most;
    return parameters->shards <= SHARDS_MAX
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "%" PRIu64 " samples of %" PRIu64
                            " bytes would need more than %d shards; set their number with --shards N",
                            parameters->samples, bytes, SHARDS_MAX);
}

static int digits_of(uint64_t number)
{
    return snprintf(NULL, 0, "%" PRIu64, number);
}

static enum status open_job(struct job *job)
{
    struct parameters *parameters = &job->parameters;
    struct env env;
    env_capture(&env);
    if (!options_given(&job->options, "threads"))
        parameters->threads = env_openmp_threads();
    int threads = parameters->threads ? (int)parameters->threads : env.allowed_threads;
#ifdef _OPENMP
    omp_set_num_threads(threads < 1 ? 1 : threads);
#endif
    TRY(prepare_check_options(job));
    TRY(members_parse(NULL, NULL, NULL, &job->members));
    const struct source_request request = {
        .options = &job->options,
        .parameters = job->source_parameters,
        .workload_parameters = job->workload_parameters,
        .resources = {.threads = threads < 1 ? 1 : threads, .device = (int)parameters->device},
        .target = parameters->folder,
        .allow_empty = parameters->store != INDEX_IMAGEFOLDER};
    TRY(job->source->open(&request, &job->facts, &job->state));
    TRY(check_counts(parameters, &job->facts));
    TRY(prepare_describe(job));
    uint64_t units = parameters->store == INDEX_SHARDS
                         ? parameters->shards
                         : (parameters->samples + FOLDER_SAMPLES - 1) / FOLDER_SAMPLES;
    int digits = digits_of(parameters->samples - 1);
    uint64_t by_bytes = CHUNK_BYTES / job->facts.sample_bytes;
    job->key_digits = digits > KEY_DIGITS ? digits : KEY_DIGITS;
    job->chunk = by_bytes < 1 ? 1 : by_bytes < CHUNK_SAMPLES ? by_bytes : CHUNK_SAMPLES;
    job->folder = (struct folder){.path = parameters->folder,
                                  .name = parameters->name,
                                  .provenance = job->provenance,
                                  .above = job->source->whole_files ? "" : NOT_IMAGEFOLDER,
                                  .layout = (enum index_layout)parameters->store,
                                  .unit_count = units,
                                  .lock = -1};
    if (job->folder.layout == INDEX_IMAGEFOLDER)
        TRY(class_folders_read(job->source, job->state, parameters->samples, &job->classes));
    TRY(class_folders_name(&job->facts, parameters->name, &job->classes));
    job->folder.class_folders = (const char *const *)job->classes.names;
    job->folder.class_count = job->classes.count;
    job->folder.class_list = job->classes.list;
    return STATUS_OK;
}

/* ---- Writing units ---- */

/* Number of the first sample of a unit. The unit ends before unit_begins(job, unit + 1). */
static uint64_t unit_begins(const struct job *job, uint64_t unit)
{
    uint64_t samples = job->parameters.samples, units = job->folder.unit_count;
    if (job->folder.layout != INDEX_SHARDS)
        return unit * FOLDER_SAMPLES < samples ? unit * FOLDER_SAMPLES : samples;
    uint64_t least = samples / units, larger = samples % units; /* the first `larger` units have one more */
    return unit * least + (unit < larger ? unit : larger);
}

static const char *unit_word(const struct job *job)
{
    static const char *const words[] = {"folder", "shard", "part"}; /* in the order of enum index_layout */
    return words[job->folder.layout];
}

static const char *sample_word(const struct job *job)
{
    return job->source->whole_files ? "file" : "sample";
}

/* Counts the samples and finished units of this rank. Finished units are from an earlier run. */
static void count_samples(struct job *job)
{
    uint64_t step = (uint64_t)comm_size();
    for (uint64_t unit = (uint64_t)comm_rank(); unit < job->folder.unit_count; unit += step) {
        uint64_t samples = unit_begins(job, unit + 1) - unit_begins(job, unit);
        bool finished = folder_finished(&job->folder, unit);
        job->samples_total += samples;
        job->samples_earlier += finished ? samples : 0;
        job->samples_kept = job->samples_earlier;
        job->units_finished += finished;
    }
}

static void show(struct job *job, uint64_t unit)
{
    char left[32];
    if (!progress_due(&job->progress))
        return;
    double elapsed_s = fmax(timer_now_s() - job->writing_s, 1e-9);
    double rate = (double)job->samples_written / elapsed_s;
    uint64_t done = job->samples_earlier + job->samples_written;
    progress_show(&job->progress,
                  "preparing%s: %s %" PRIu64 " of %" PRIu64 ", %" PRIu64 " of %" PRIu64
                  " %ss, %.*f %ss/s, %s left",
                  comm_size() > 1 ? ", rank 0" : "", unit_word(job), unit + 1, job->folder.unit_count, done,
                  job->samples_total, sample_word(job), rate < 10 ? 1 : 0, rate, sample_word(job),
                  progress_duration((double)(job->samples_total - done) / rate, left, sizeof left));
}

/* Sets the message that is printed if a signal ends the program. With several ranks the message has no
 * numbers, because a rank knows only its own units. */
static void say_what_is_kept(const struct job *job)
{
    if (comm_rank() != 0)
        return;
    if (comm_size() > 1)
        file_say_on_signal("finished %ss are kept in %s; to continue, repeat the same command",
                           unit_word(job), job->folder.path);
    else
        file_say_on_signal("%" PRIu64 " of %" PRIu64 " %ss with %" PRIu64
                           " %ss are kept in %s; to continue, repeat the same command",
                           job->units_finished, job->folder.unit_count, unit_word(job), job->samples_kept,
                           sample_word(job), job->folder.path);
}

/* Compares the shape of an image, as stored, with that of the first one. */
static void compare_shapes(struct job *job, const struct image *image)
{
    struct image *first = &job->first_image;
    if (first->channels == 0)
        *first = *image;
    job->mixed_sizes |= image->width != first->width || image->height != first->height;
    job->mixed_channels |= image->channels != first->channels;
}

/* Returns the member that readers of the copy take for the image of a sample, or sample->count. */
static size_t image_member(const struct job *job, const struct source_sample *sample)
{
    const char *extensions[SOURCE_MEMBERS_MAX];
    const struct member_rule *rule;
    for (size_t m = 0; m < sample->count; m++)
        extensions[m] = sample->members[m].extension;
    return members_find(&job->members.image, extensions, (uint32_t)sample->count, false, &rule);
}

/* Warns if an image of a copied sample is known to be broken, or has a broken header. The sample is copied
 * nevertheless, unchanged. */
static void check_images(struct job *job, uint64_t number, const struct source_sample *sample)
{
    const size_t shown = image_member(job, sample);
    for (size_t m = 0; m < sample->count; m++) {
        const struct source_member *member = &sample->members[m];
        const char *format = members_format(member->extension);
        struct image image;
        bool is_image;
        enum status status = image_check_header(format, member->bytes, member->size, &job->scratch, &image);
        if (status == STATUS_OK && !sample->broken && m == shown && image.channels)
            compare_shapes(job, &image);
        if (status == STATUS_OK && sample->broken)
            status = image_decode(format, member->bytes, member->size, &job->scratch, &image, &is_image);
        if (status == STATUS_FAILED && job->broken++ < BROKEN_TOLD) {
            job->source->locate(job->state, number, status);
            status_warn_own("copied a broken image: %s", status_text());
        }
    }
}

static void tell_broken(const struct job *job)
{
    if (job->broken)
        status_warn_own("copied %" PRIu64
                        " broken image%s unchanged; remove %s from the source and prepare into a new "
                        "folder, or read the copy with --on-error skip. Only the headers of unchanged images "
                        "are checked; "
                        "to check all pixels: fdsl-bench --variant %s --decode --data %s",
                        job->broken, job->broken == 1 ? "" : "s", job->broken == 1 ? "it" : "them",
                        job->folder.layout == INDEX_SHARDS ? "shards" : "files", job->folder.path);
}

/* Warns of images of one size that `train` would refuse nevertheless. With images of several sizes it needs
 * --out-res, which also gives all images the same channels. */
static void tell_mixed_channels(const struct job *job)
{
    if (job->mixed_channels && !job->mixed_sizes)
        status_warn_own(
            "the images have different numbers of channels, and training needs one number: prepare "
            "into a new folder with %s--channels 3 (or 1)",
            options_given(&job->options, "out-res") ? "" : "--out-res PIXELS ");
}

static enum status make_chunk(struct job *job, struct unit_writer *writer, uint64_t first, uint64_t count)
{
    FREED struct source_sample *samples = calloc(count, sizeof *samples);
    TRY(ALLOCATED(samples, "out of memory"));
    enum status status = source_make(job->source, job->state, first, count, samples);
    for (uint64_t i = 0; status == STATUS_OK && job->source->locate && i < count; i++)
        check_images(job, first + i, &samples[i]);
    for (uint64_t i = 0; status == STATUS_OK && job->classes.labels && i < count; i++)
        status = class_folders_keep(&job->classes, first + i, &samples[i]);
    if (status == STATUS_OK)
        status = unit_add(writer, first, count, samples);
    for (uint64_t i = 0; i < count; i++)
        source_sample_free(&samples[i]);
    return status;
}

static enum status fill_unit(struct job *job, struct unit_writer *writer, uint64_t unit, const char *name)
{
    char part[PATH_MAX];
    uint64_t asked = unit_begins(job, unit), end = unit_begins(job, unit + 1);
    TRY(folder_part_path(&job->folder, unit, part));
    TRY(unit_begin(writer, job->folder.layout, job->folder.path, name, job->key_digits,
                   job->folder.class_folders));
    for (uint64_t at = unit_begins(job, unit); at < end;) {
        uint64_t count = end - at < job->chunk ? end - at : job->chunk;
        source_ask(job->source, job->state, &asked, end);
        TRY(make_chunk(job, writer, at, count));
        at += count;
        job->samples_written += count;
        show(job, unit);
    }
    return unit_end(writer, job->provenance, part);
}

/* Writes the units of this rank: comm_rank(), comm_rank() + comm_size(), ... */
static enum status write_units(struct job *job)
{
    count_samples(job);
    say_what_is_kept(job);
    job->writing_s = timer_now_s();
    progress_begin(&job->progress, comm_rank() == 0);
    for (uint64_t unit = (uint64_t)comm_rank(); unit < job->folder.unit_count;
         unit += (uint64_t)comm_size()) {
        struct unit_writer writer;
        char name[PATH_MAX];
        if (folder_finished(&job->folder, unit))
            continue;
        folder_unit_name(&job->folder, unit, name);
        enum status status = fill_unit(job, &writer, unit, name);
        unit_abandon(&writer);
        if (status != STATUS_OK)
            return status_set(
                status, "cannot write %s %s: %s; finished %ss are kept: repeat the command to continue%s",
                job->classes.labels ? "data set" : unit_word(job),
                job->classes.labels ? job->folder.path : name, status_text(), unit_word(job),
                job->source->locate
                    ? ", or, if you change the source, prepare into a new folder or remove this one"
                    : "");
        job->units_finished++;
        job->samples_kept += unit_begins(job, unit + 1) - unit_begins(job, unit);
        say_what_is_kept(job);
    }
    return STATUS_OK;
}

/* ---- Finishing ---- */

/* Checks the number of samples in the index, which was merged from parts on disk. A part with a valid
 * checksum may still have more or fewer samples than this run would write. */
static enum status check_gathered(const struct job *job, const struct index *index)
{
    return index->sample_count == job->parameters.samples
               ? STATUS_OK
               : status_set(STATUS_FAILED,
                            "%s: its index has %" PRIu64 " samples, but %" PRIu64
                            " were expected; remove the folder and prepare it again",
                            job->folder.path, index->sample_count, job->parameters.samples);
}

static void tell(const struct job *job, const struct index *index)
{
    uint64_t bytes = 0, classes = job->classes.count, folders = classes ? classes : index->unit_count;
    for (uint64_t i = 0; i < index->unit_count; i++)
        bytes += index->units[i].bytes;
    text_print(stdout, job->folder.path);
    printf(": %" PRIu64 " %s%s", index->sample_count, sample_word(job), index->sample_count == 1 ? "" : "s");
    if (job->facts.rows > 0)
        printf(" with %" PRIu64 " row%s", job->facts.rows, job->facts.rows == 1 ? "" : "s");
    printf(" in %" PRIu64 " %s%s, %.3f MB, in %.1f s", folders, classes ? "class folder" : unit_word(job),
           folders == 1 ? "" : "s", 1e-6 * (double)bytes, timer_now_s() - job->began_s);
    if (job->folder.part_count > 0)
        printf(" (%" PRIu64 " of %" PRIu64 " %s%s %s already finished)", job->folder.part_count,
               index->unit_count, unit_word(job), index->unit_count == 1 ? "" : "s",
               job->folder.part_count == 1 ? "was" : "were");
    putchar('\n');
}

static enum status conclude(const struct job *job)
{
    CLOSED_BY(index_free) struct index index;
    TRY(folder_gather(&job->folder, &index));
    TRY(check_gathered(job, &index));
    TRY(samples_write(job->folder.path, job->source, job->state, &index));
    TRY(folder_conclude(&job->folder, &index));
    tell(job, &index);
    return STATUS_OK;
}

/* Claims the folder, writes the units and finishes the dataset. Runs on all ranks, which agree on the status
 * after each phase. */
static enum status make_dataset(struct job *job)
{
    bool lead = comm_rank() == 0;
    TRY(comm_agree(lead ? folder_claim(&job->folder) : STATUS_OK));
    bool complete = folder_complete(&job->folder);
    if (lead && complete) {
        text_print(stdout, job->folder.path);
        puts(": already complete");
    }
    enum status status = complete ? STATUS_OK : write_units(job);
    progress_clear(&job->progress);
    if (status == STATUS_OK)
        tell_broken(job);
    if (status == STATUS_OK)
        tell_mixed_channels(job);
    TRY(comm_agree(status));
    return comm_agree(lead && !complete ? conclude(job) : STATUS_OK);
}

static enum status prepare(struct job *job, const struct config *config)
{
    TRY(comm_agree(prepare_read_options(job, config)));
    TRY(comm_check_same(job->parameters.help, "options", "give all ranks the same options"));
    if (job->parameters.help) {
        if (comm_rank() == 0)
            prepare_help(stdout);
        return STATUS_OK;
    }
#ifndef HAVE_XXHASH
    return status_set(
        STATUS_UNAVAILABLE,
        "--prepare: not available, because xxHash was not found; install libxxhash-dev and build again");
#endif
    job->began_s = timer_now_s();
    TRY(comm_agree(open_job(job)));
    TRY(comm_check_same(fnv_add(FNV_BEGIN, job->provenance, strlen(job->provenance)),
                        "options or the files that they name", "give all ranks the same"));
    return make_dataset(job);
}

enum status prepare_run(const struct config *config, bool (*is_option)(const char *name))
{
    struct job job = {.is_option = is_option, .folder = {.lock = -1}};
    enum status status = prepare(&job, config);
    if (job.folder.lock >= 0)
        folder_release(&job.folder);
    if (job.state && job.source->close)
        job.source->close(job.state);
    image_scratch_close(&job.scratch);
    options_free(&job.options);
    free(job.source_parameters);
    free(job.workload_parameters);
    free(job.provenance);
    class_folders_free(&job.classes);
    return status;
}
