#include "data/prepare.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/file.h"
#include "core/text.h"
#include "data/checksum.h"
#include "data/embeddings.h"
#include "data/index.h"
#include "data/source.h"
#include "data/tensor_file.h"

#define RANGES_MAX 8 /* ranges of rows that are listed per file */

struct check {
    const char *folder;
    struct index index;
    uint64_t files, bad, rows, bytes;
};

/* ---- Messages ---- */

/* Prints the beginning of a line about a bad file. */
static void print_bad(struct check *check, const char *path)
{
    check->bad++;
    text_print(stdout, path);
    fputs(": ", stdout);
}

/* ---- Rows ---- */

/* The rows of a file: values, and scales for fp4. */
struct rows {
    const uint8_t *values, *scales;
    size_t value_bytes, scale_bytes; /* per row */
    uint64_t count;
};

static enum status find_rows(const struct tensor_file *file, const uint8_t *bytes, struct rows *rows)
{
    *rows = (struct rows){0};
    for (size_t i = 0; i < file->count; i++) {
        const struct tensor *tensor = &file->tensors[i];
        bool scales = strcmp(tensor->name, "scales") == 0;
        if (tensor->axes != 2 || tensor->shape[0] == 0)
            continue;
        *(scales ? &rows->scales : &rows->values) = bytes + tensor->offset;
        *(scales ? &rows->scale_bytes : &rows->value_bytes) = (size_t)(tensor->bytes / tensor->shape[0]);
        rows->count = tensor->shape[0];
    }
    return rows->values ? STATUS_OK : status_set(STATUS_FAILED, "it has no rows");
}

/* Returns whether row i matches its hash. `joined` has room for the values and scales of a row. */
static bool row_matches(const struct rows *rows, uint64_t i, uint64_t hash, uint8_t *joined)
{
    const uint8_t *values = rows->values + i * rows->value_bytes;
    if (rows->scale_bytes == 0)
        return checksum_whole(values, rows->value_bytes) == hash;
    memcpy(joined, values, rows->value_bytes);
    memcpy(joined + rows->value_bytes, rows->scales + i * rows->scale_bytes, rows->scale_bytes);
    return checksum_whole(joined, rows->value_bytes + rows->scale_bytes) == hash;
}

/* Prints the ranges of rows that differ from their hashes. `first` is the number of row 0 within the set. */
static void print_ranges(const struct rows *rows, const uint64_t *hashes, uint64_t first, uint8_t *joined)
{
    uint64_t ranges = 0, wrong = 0;
    for (uint64_t i = 0; i < rows->count;) {
        uint64_t end = i;
        while (end < rows->count && !row_matches(rows, end, hashes[end], joined))
            end++;
        wrong += end - i;
        if (end > i && ranges++ < RANGES_MAX)
            printf("%s%" PRIu64, ranges == 1 ? "these rows of the set differ from their hashes: " : ", ",
                   first + i);
        if (end > i + 1 && ranges <= RANGES_MAX)
            printf(" to %" PRIu64, first + end - 1);
        i = end + 1;
    }
    if (ranges > RANGES_MAX)
        printf(", and %" PRIu64 " more ranges", ranges - RANGES_MAX);
    if (wrong > 0)
        printf(" (%" PRIu64 " of %" PRIu64 " rows of the file)\n", wrong, rows->count);
    else
        puts("its rows match their hashes, but its header, labels or scale differ");
}

/* Names the bad rows of a file whose hash differs. Fails if its header is damaged. */
static enum status name_rows(const char *path, const uint8_t *bytes, const uint64_t *hashes, uint64_t count,
                             uint64_t first)
{
    struct tensor_file file;
    struct rows rows;
    enum status status = tensor_file_open(path, &file);
    if (status == STATUS_OK)
        status = find_rows(&file, bytes, &rows);
    uint8_t *joined = status == STATUS_OK ? malloc(rows.value_bytes + rows.scale_bytes + 1) : NULL;
    if (joined && rows.count == count)
        print_ranges(&rows, hashes, first, joined);
    else
        status = STATUS_FAILED;
    free(joined);
    tensor_file_close(&file);
    return status;
}

/* ---- Files ---- */

/* Reads a file. Prints a line if it cannot be read. The caller frees `*bytes`. */
static bool read_whole(struct check *check, const char *path, char **bytes, size_t *size)
{
    check->files++;
    if (file_read(path, bytes, size) == STATUS_OK)
        return true;
    check->bad++;
    text_print(stdout, status_text());
    putchar('\n');
    return false;
}

/* Reads a file and compares its size and hash with the index. Prints a line if the file cannot be read or has
 * the wrong size. If only the hash differs, sets `*differs` and prints the beginning of a line; the caller
 * prints the rest. The caller frees `*bytes`. */
static bool file_matches(struct check *check, const char *path, const struct index_member *member,
                         char **bytes, bool *differs)
{
    size_t size;
    check->bytes += member->size;
    *differs = false;
    if (!read_whole(check, path, bytes, &size))
        return false;
    if (size != member->size) {
        print_bad(check, path);
        printf("it has %zu bytes instead of %" PRIu64 "\n", size, member->size);
        return false;
    }
    *differs = checksum_whole((const uint8_t *)*bytes, size) != member->hash;
    if (*differs)
        print_bad(check, path);
    return !*differs;
}

static enum status member_path(const struct check *check, const struct index_sample *sample,
                               const struct index_member *member, char path[PATH_MAX])
{
    int length = snprintf(path, PATH_MAX, "%s/%s/%s.%s", check->folder, check->index.units[sample->unit].name,
                          sample->key, member->extension);
    return length < PATH_MAX ? STATUS_OK : status_set(STATUS_FAILED, "%s: path too long", check->folder);
}

/* Returns the number of rows of a file. */
static uint64_t count_rows(const struct index *index, uint64_t sample)
{
    return index->members[index->samples[sample].first + 1].size / sizeof(uint64_t);
}

/* Checks one file of rows and its file of hashes. */
static enum status check_sample(struct check *check, const struct index_sample *sample)
{
    const struct index_member *members = &check->index.members[sample->first];
    char path[PATH_MAX];
    FREED char *hashes = NULL, *bytes = NULL;
    bool differs;
    uint64_t count = count_rows(&check->index, (uint64_t)(sample - check->index.samples));
    TRY(member_path(check, sample, &members[1], path));
    bool hashes_match = file_matches(check, path, &members[1], &hashes, &differs);
    if (differs)
        puts("it differs from its hash in the index");
    TRY(member_path(check, sample, &members[0], path));
    (void)file_matches(check, path, &members[0], &bytes, &differs);
    if (differs && !hashes_match)
        puts("it differs from its hash in the index; without the hashes of its rows, the bad rows are "
             "unknown");
    else if (differs && name_rows(path, (const uint8_t *)bytes, (const uint64_t *)(void *)hashes, count,
                                  check->rows) != STATUS_OK)
        puts("its header differs, so all of its rows are unreadable");
    check->rows += count;
    return STATUS_OK;
}

/* ---- Other files ---- */

/* Writes the columns of samples.csv for file `number`. `state` is an array with the first row of each file,
 * followed by the number of rows of the set. */
static void describe(const void *state, uint64_t number, char texts[][SOURCE_TEXT_MAX])
{
    const uint64_t *starts = state;
    snprintf(texts[0], SOURCE_TEXT_MAX, "%" PRIu64, starts[number]);
    snprintf(texts[1], SOURCE_TEXT_MAX, "%" PRIu64, starts[number + 1] - starts[number]);
}

static const struct source described = {.columns = embeddings_sample_columns, .describe = describe};

/* Compares samples.csv with the text that --prepare writes for this index. */
static enum status check_samples(struct check *check)
{
    const struct index *index = &check->index;
    char path[PATH_MAX];
    FREED char *wanted = NULL, *found = NULL;
    size_t wanted_size, found_size;
    TRY(unit_path(path, check->folder, SAMPLES_NAME));
    FREED uint64_t *starts = malloc((index->sample_count + 1) * sizeof *starts);
    TRY(ALLOCATED(starts, "out of memory for %s", path));
    starts[0] = 0;
    for (uint64_t i = 0; i < index->sample_count; i++)
        starts[i + 1] = starts[i] + count_rows(index, i);
    TRY(samples_format(&described, starts, index, &wanted, &wanted_size));
    if (read_whole(check, path, &found, &found_size) &&
        (found_size != wanted_size || memcmp(found, wanted, wanted_size) != 0)) {
        print_bad(check, path);
        puts("it differs from the list that --prepare wrote");
    }
    return STATUS_OK;
}

/* Prints a line for each file of tensors that the index does not name, because --data would read its rows. */
static enum status check_extra(struct check *check)
{
    struct paths paths;
    char path[PATH_MAX], *name = path;
    enum status status = paths_find(check->folder, tensor_file_named, &paths);
    char **found = paths.names;
    bool *listed = calloc(paths.count + 1, sizeof *listed);
    if (status == STATUS_OK && !listed)
        status = status_set(STATUS_EXHAUSTED, "out of memory for the files of %s", check->folder);
    if (status == STATUS_OK && paths.count > 0)
        qsort(found, paths.count, sizeof *found, text_compare);
    for (uint64_t i = 0; status == STATUS_OK && paths.count > 0 && i < check->index.sample_count; i++) {
        const struct index_sample *sample = &check->index.samples[i];
        status = member_path(check, sample, &check->index.members[sample->first], path);
        char **at = bsearch(&name, found, paths.count, sizeof *found, text_compare);
        if (at)
            listed[at - found] = true;
    }
    for (size_t i = 0; status == STATUS_OK && i < paths.count; i++)
        if (!listed[i]) {
            check->files++;
            print_bad(check, found[i]);
            puts("it does not belong to the set; remove it");
        }
    free(listed);
    paths_free(&paths);
    return status;
}

/* ---- The set ---- */

/* Finds the only index in the folder. */
static enum status find_index(const char *folder, char path[PATH_MAX])
{
    DIR *list = opendir(folder);
    size_t count = 0;
    bool prepared = false;
    if (!list)
        return status_set(STATUS_USAGE, "--verify-set %s: %s", folder, strerror(errno));
    for (struct dirent *entry; (entry = readdir(list));) {
        const char *dot = strrchr(entry->d_name, '.');
        prepared |= strcmp(entry->d_name, ".prepare") == 0;
        if (dot && strcmp(dot, ".index") == 0 && count++ == 0 &&
            snprintf(path, PATH_MAX, "%s/%s", folder, entry->d_name) >= PATH_MAX)
            count = 2;
    }
    closedir(list);
    if (count == 0 && prepared)
        return status_set(STATUS_USAGE,
                          "--verify-set %s: its --prepare was interrupted; repeat that command to continue",
                          folder);
    return count == 1 ? STATUS_OK
                      : status_set(STATUS_USAGE,
                                   "--verify-set %s: it has %s index; name a folder that --prepare --from "
                                   "embeddings wrote",
                                   folder, count ? "more than one" : "no");
}

static enum status check_kind(const struct check *check)
{
    const struct index *index = &check->index;
    bool rows = index->layout == INDEX_FILES && index->sample_count > 0;
    for (uint64_t i = 0; rows && i < index->sample_count; i++)
        rows = index->samples[i].count == 2 &&
               strcmp(index->members[index->samples[i].first + 1].extension, "xxh3") == 0;
    return rows ? STATUS_OK
                : status_set(STATUS_USAGE,
                             "--verify-set %s: not a set of embeddings; --workload load --verify checks "
                             "other data sets",
                             check->folder);
}

static enum status check_set(struct check *check)
{
    for (uint64_t i = 0; i < check->index.sample_count; i++)
        TRY(check_sample(check, &check->index.samples[i]));
    TRY(check_samples(check));
    TRY(check_extra(check));
    if (check->bad > 0)
        return status_set(STATUS_WRONG,
                          "%s: %" PRIu64 " of %" PRIu64
                          " files are missing, differ or do not belong to the set; "
                          "restore them, or remove them and repeat the --prepare command",
                          check->folder, check->bad, check->files);
    text_print(stdout, check->folder);
    printf(": all hashes match: %" PRIu64 " files, %" PRIu64 " rows, %.3f MB\n", check->files, check->rows,
           1e-6 * (double)check->bytes);
    return STATUS_OK;
}

enum status verify_set_run(const char *folder)
{
    char path[PATH_MAX], name[PATH_MAX];
    struct check check = {.folder = name};
    size_t length = strlen(folder);
    while (length > 1 && folder[length - 1] == '/')
        length--;
    if (length >= sizeof name)
        return status_set(STATUS_USAGE, "--verify-set: the name has %zu bytes; use a shorter path", length);
    snprintf(name, sizeof name, "%.*s", (int)length, folder);
#ifndef HAVE_XXHASH
    return status_set(STATUS_UNAVAILABLE,
                      "--verify-set: not available, because xxHash was not found; install "
                      "libxxhash-dev and build again");
#endif
    TRY(find_index(name, path));
    enum status status = index_read(path, &check.index);
    if (status == STATUS_OK)
        status = check_kind(&check);
    if (status == STATUS_OK)
        status = check_set(&check);
    index_free(&check.index);
    return status;
}
