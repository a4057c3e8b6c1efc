/* Shared by the suites of the workload `load`: writes intact or broken data sets, and runs variants. */
#ifndef FDSL_TESTS_LOAD_SUPPORT_H
#define FDSL_TESTS_LOAD_SUPPORT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <criterion/criterion.h>

#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/options.h"
#include "core/workload.h"
#include "data/image_formats.h"
#include "data/tar.h"
#include "load/input.h"
#include "must.h"
#include "cell.h"

/* Expects that the latest error message contains `words`. */
static inline void expect_words(const char *words)
{
    cr_assert_not_null(strstr(status_text(), words), "'%s' lacks '%s'", status_text(), words);
}

/* ---- Data sets on disk ---- */

static char folder[PATH_MAX];

static inline void make_folder(void)
{
    snprintf(folder, sizeof folder, "/tmp/fdsl-load-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
}

static inline void remove_folder(void)
{
    char command[PATH_MAX + 16];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_assert_eq(system(command), 0);
}

/* Replaces the test's folder by a new one in `where`. Some tests need a disk, and others need a file system
 * in memory; /tmp may be either. */
static inline void make_folder_in(const char *where)
{
    remove_folder();
    snprintf(folder, sizeof folder, "%s/fdsl-load-XXXXXX", where);
    cr_assert_not_null(mkdtemp(folder));
}

/* Replaces the test's folder by a new one, which is empty. */
static inline void renew_folder(void)
{
    remove_folder();
    make_folder();
}

/* Runs a shell command, in which $D is the test's folder and $P the program. Returns whether it succeeds. */
static inline bool command(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline bool command(const char *format, ...)
{
    char text[8192];
    const char *program = getenv("FDSL_BENCH");
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    cr_assert(length > 0 && (size_t)length < sizeof text, "a command is too long: %.80s", format);
    setenv("D", folder, 1);
    setenv("P", program ? program : "./fdsl-bench", 1);
    return system(text) == 0;
}

static inline const char *in_folder(const char *name)
{
    static char path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* Writes a file into the test's folder. */
static inline void put_file(const char *name, const void *bytes, size_t size)
{
    FILE *stream = fopen(in_folder(name), "w");
    cr_assert(stream && fwrite(bytes, 1, size, stream) == size && fclose(stream) == 0, "%s", name);
}

/* Returns byte `i` of a sample's member. A member is one of the sample's files in a tar shard. */
static inline uint8_t content(uint32_t sample, uint32_t member, uint32_t i)
{
    return (uint8_t)(sample * 7 + member * 31 + i * 13 + i / 251);
}

/* Returns the size of a member in bytes. Some sizes are smaller and some are larger than a tar block, than a
 * page, and than the part of a member that checksums cover. */
static inline uint32_t size_of(uint32_t sample, uint32_t member)
{
    return member ? sample % 3 : (sample * 997) % 9000;
}

static inline void put_member(FILE *stream, uint32_t sample, uint32_t member)
{
    char name[64];
    uint8_t header[TAR_BLOCK_BYTES];
    uint32_t size = size_of(sample, member);
    snprintf(name, sizeof name, "%06u.%s", sample, member ? "cls" : "bin");
    cr_assert_eq(tar_header(header, name, size), STATUS_OK);
    fwrite(header, 1, sizeof header, stream);
    for (uint32_t i = 0; i < size; i++)
        putc(content(sample, member, i), stream);
    for (uint32_t i = 0; i < tar_padding(size); i++)
        putc(0, stream);
}

/* Writes `samples` samples to three shards. The last shard gets about half of them. */
static inline void make_shards(uint32_t samples)
{
    static const uint8_t zeros[TAR_END_BYTES];
    uint32_t sample = 0;
    for (int shard = 0; shard < 3; shard++) {
        char name[64];
        snprintf(name, sizeof name, "x-%06d.tar", shard);
        FILE *stream = fopen(in_folder(name), "w");
        cr_assert_not_null(stream);
        for (uint32_t end = shard == 2 ? samples : (shard + 1) * samples / 4; sample < end; sample++)
            for (uint32_t member = 0; member < 2; member++)
                put_member(stream, sample, member);
        fwrite(zeros, 1, sizeof zeros, stream);
        fclose(stream);
    }
}

static inline void make_files(uint32_t samples)
{
    for (uint32_t sample = 0; sample < samples; sample++)
        for (uint32_t member = 0; member < 2; member++) {
            char name[64];
            snprintf(name, sizeof name, "%03u", sample / 100);
            mkdir(in_folder(name), 0777);
            snprintf(name, sizeof name, "%03u/%06u.%s", sample / 100, sample, member ? "cls" : "bin");
            FILE *stream = fopen(in_folder(name), "w");
            cr_assert_not_null(stream);
            for (uint32_t i = 0; i < size_of(sample, member); i++)
                putc(content(sample, member, i), stream);
            fclose(stream);
        }
}

/* A workload, its input, which is opened with the options of a command line, and a variant. */
struct job {
    const struct workload *workload;
    struct options options;
    void *parameters, *input;
    char *line;
    const char *name;              /* name of the variant */
    const struct variant *variant; /* NULL: no variant is set up */
    void *state;
};

static inline enum status open_workload(struct job *job, const char *name, const char *line,
                                        struct partition partition)
{
    char *argv[32] = {(char *)"test"};
    int argc = 1;
    *job = (struct job){.workload = workload_find(name), .line = strdup(line)};
    for (char *rest = job->line, *word; (word = strsep(&rest, " "));)
        if (*word)
            argv[argc++] = word;
    job->parameters = calloc(1, job->workload->parameters_bytes);
    job->options = (struct options){
        .tables = {{job->workload->options, job->workload->option_count, job->parameters}}, .table_count = 1};
    must(options_parse(&job->options, argc, argv));
    return job->workload->open(&job->options, job->parameters, &partition, &job->input);
}

/* Returns whether a variant supports the input and the options of a job. */
static inline enum status accepted(const struct job *job, const struct variant *variant)
{
    TRY(job->workload->accepts(job->input, variant));
    return job->workload->suits ? job->workload->suits(&job->options, job->parameters, variant) : STATUS_OK;
}

/* Opens the workload `load` with the data set in the test's folder. */
static inline enum status open_job(struct job *job, const char *line)
{
    char text[PATH_MAX + 1024];
    snprintf(text, sizeof text, "--data %s %s", folder, line);
    return open_workload(job, "load", text, (struct partition){.ranks = 1});
}

static inline const struct dataset *dataset_of(const struct job *job)
{
    return ((const struct load *)job->input)->dataset;
}

static inline bool is_available(const char *name)
{
    return variant_available(variant_find(name), &(const struct resources){.threads = 1}) == STATUS_OK;
}

/* Sets up a variant. Returns false if it cannot run here. */
static inline bool start(struct job *job, const char *name)
{
    const struct variant *variant = variant_find(name)->variant;
    if (!is_available(name))
        return false;
    must(accepted(job, variant));
    must(variant->setup(&(const struct resources){.threads = 3}, job->input, &job->state));
    job->variant = variant;
    job->name = name;
    return true;
}

/* Opens the workload and sets up a variant. Returns false if the variant cannot run here. In both cases,
 * close_job() must follow. */
static inline bool start_job(struct job *job, const char *name, const char *line)
{
    must(open_job(job, line));
    return start(job, name);
}

/* Tears down the variant, if one is set up. */
static inline void stop(struct job *job)
{
    if (job->variant)
        job->variant->teardown(job->state);
    job->variant = NULL;
}

static inline void close_job(struct job *job)
{
    stop(job);
    if (job->input)
        job->workload->close(job->input);
    options_free(&job->options);
    free(job->parameters);
    free(job->line);
}

/* Performs run `number`. */
static inline enum status run(const struct job *job, uint64_t number)
{
    struct run_time unused;
    return variant_run(job->variant, job->state, number, &unused);
}

/* Performs run `number`, after the caller has called ready(). */
static inline enum status run_ready(const struct job *job, uint64_t number)
{
    struct run_time unused;
    return job->variant->run(job->state, number, &unused);
}

static inline void run_well(const struct job *job, uint64_t number)
{
    cr_assert_eq(run(job, number), STATUS_OK, "%s %s: %s", job->name, job->line, status_text());
}

/* Performs run `number`. Expects that it fails with a message that contains `words`. */
static inline void expect_failure(const struct job *job, uint64_t number, const char *words)
{
    cr_assert_eq(run(job, number), STATUS_FAILED, "%s: %s", job->name, status_text());
    expect_words(words);
}

static inline struct load_result result_of(const struct job *job)
{
    struct load_result result;
    must(job->variant->fetch(job->state, &result));
    return result;
}

static const char *const shard_variants[] = {"shards", "shards-mmap", "shards-omp", "shards-uring"};
static const char *const file_variants[] = {"files", "files-omp", "files-uring"};

/* Performs run `number` with checksums of all bytes, and sets `wrong` to the number of wrong samples. */
static inline enum status run_closely(const struct job *job, uint64_t number, uint64_t *wrong)
{
    TRY(job->workload->checks.closely(job->input, true));
    enum status status = run(job, number);
    if (status == STATUS_OK)
        status = job->workload->verify(job->input, job->variant, job->state, number, wrong);
    must(job->workload->checks.closely(job->input, false));
    return status;
}

/* Expects no wrong samples in two runs: one whose checksums cover all bytes, and an ordinary one, whose
 * buffers are compared afterwards. */
static inline void expect_none_wrong(const struct job *job)
{
    uint64_t wrong = 1;
    must(run_closely(job, 4, &wrong));
    cr_assert_eq(wrong, 0, "%d samples are wrong", (int)wrong);
    run_well(job, 5);
    must(job->workload->verify(job->input, job->variant, job->state, 5, &wrong));
    cr_assert_eq(wrong, 0, "%d samples are wrong in the buffers", (int)wrong);
}

static inline void expect_exactly_once(const char *name, const char *line)
{
    struct job job;
    if (start_job(&job, name, line)) {
        for (uint64_t number = 0; number < 3; number++)
            run_well(&job, number);
        cr_assert_eq(result_of(&job).checksum.count % 101, 0, "%s %s", name, line);
        expect_none_wrong(&job);
    }
    close_job(&job);
}

/* Writes a data set of 40 samples with an index. */
static inline void prepare(const char *layout)
{
    cr_assert(
        command("$P --prepare $D --store %s --samples 40 --sample-shape 3,8 --dtype f16 >/dev/null 2>&1",
                strcmp(layout, "shards") == 0 ? "shards --shards 3" : layout));
}

/* ---- Broken data sets ---- */

static inline void overwrite(const char *name, long offset, const void *bytes, size_t count)
{
    int fd = open(in_folder(name), O_WRONLY);
    cr_assert(fd >= 0 && pwrite(fd, bytes, count, offset) == (ssize_t)count);
    close(fd);
}

static inline void expect_refused(const char *words)
{
    struct job job;
    cr_assert_neq(open_job(&job, "--cache any"), STATUS_OK, "%s", words);
    expect_words(words);
    close_job(&job);
}

/* Returns how many samples of a truncated shard are certainly complete. The shard begins with sample `sample`
 * and is truncated to `bytes` bytes. The last sample with an intact member does not count: its other member
 * may be missing. */
static inline uint32_t whole_before(uint32_t sample, uint64_t bytes)
{
    uint32_t whole = 0;
    for (uint64_t end = 0;; whole++)
        for (uint32_t member = 0; member < 2; member++) {
            uint32_t size = size_of(sample + whole, member);
            end += TAR_BLOCK_BYTES + size + tar_padding(size);
            if (end > bytes) /* if member 0 is truncated, the previous sample is the last one with an intact
                                member */
                return whole - (whole > 0 && member == 0);
        }
}

#ifdef HAVE_PNG
/* Writes 20 images as samples. The bytes of image 7 are not a valid image. */
static inline void make_pictures(bool shard)
{
    static const uint8_t zeros[TAR_END_BYTES];
    FILE *stream = shard ? fopen(in_folder("p.tar"), "w") : NULL;
    for (int i = 0; i < 20; i++) {
        const struct png_shape shape = {5, 3, 3};
        uint8_t pixels[45], header[TAR_BLOCK_BYTES];
        char name[64];
        void *bytes;
        size_t size;
        memset(pixels, i * 3, sizeof pixels);
        cr_assert_eq(png_encode(pixels, &shape, &bytes, &size), STATUS_OK);
        if (i == 7)
            memset((uint8_t *)bytes + 20, 0xee, 20);
        snprintf(name, sizeof name, "%06d.png", i);
        if (!shard)
            stream = fopen(in_folder(name), "w");
        cr_assert_eq(tar_header(header, name, size), STATUS_OK);
        fwrite(header, 1, shard ? sizeof header : 0, stream);
        fwrite(bytes, 1, size, stream);
        fwrite(zeros, 1, shard ? tar_padding(size) : 0, stream);
        if (!shard)
            fclose(stream);
        free(bytes);
    }
    if (shard)
        cr_assert(fwrite(zeros, 1, sizeof zeros, stream) == sizeof zeros && fclose(stream) == 0);
}
#endif

/* ---- Columns of a row ---- */

/* Makes a row of the columns that only this workload has, and of --shuffle, after a run. The caller calls
 * row_free(). */
static inline struct row row_of(const struct job *job)
{
    static struct column columns[64] = {{.name = "shuffle", .type = VALUE_INTEGER}};
    struct row row;
    for (size_t i = 0; i + 2 < COUNT_OF(columns) && job->workload->columns[i].name; i++)
        columns[i + 1] = job->workload->columns[i];
    row_open(&row, columns);
    must(job->workload->observe(job->input, job->variant, job->state, &row));
    must(job->workload->measure(job->input, job->variant, job->state, &row));
    return row;
}

/* Runs a variant once, and sets `text` to the text of its row in the column `column`. */
static inline void measured(const char *variant_name, const char *line, const char *column, char text[64])
{
    struct job job;
    cr_assert(start_job(&job, variant_name, line), "%s: %s", variant_name, status_text());
    run_well(&job, 1);
    struct row row = row_of(&job);
    snprintf(text, 64, "%s", cell(&row, column));
    row_free(&row);
    close_job(&job);
}

/* Expects every variant with --on-error skip to read the remaining `left` samples. `skipped` is the expected
 * text of the column `skipped`. */
static inline void expect_skipped(uint32_t left, const char *skipped)
{
    for (size_t v = 0; v < COUNT_OF(shard_variants) + COUNT_OF(file_variants); v++) {
        bool shards = v < COUNT_OF(shard_variants);
        const char *name = shards ? shard_variants[v] : file_variants[v - COUNT_OF(shard_variants)];
        struct job job;
        must(open_job(&job, "--cache any --on-error skip --shuffle 9 --batch 4"));
        if (dataset_of(&job)->shards == shards && start(&job, name)) {
            for (uint64_t number = 0; number < 2; number++)
                run_well(&job, number);
            const struct load_result result = result_of(&job);
            cr_assert_eq(result.checksum.count, left, "%s: %d left", name, (int)result.checksum.count);
            struct row row = row_of(&job);
            cr_assert_str_eq(cell(&row, "skipped"), skipped);
            row_free(&row);
        }
        close_job(&job);
    }
}

#endif
