#include "data/samples.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/file.h"
#include "core/text.h"
#include "data/unit_writer.h"

/* The contents of samples.csv, for write_columns() and write_sample(). */
struct list {
    const struct source *source;
    const void *state;
    const struct index *index;
    struct index_extensions extensions; /* one column per extension */
};

static bool has_member(const struct index *index, const struct index_sample *sample, const char *extension)
{
    for (uint64_t m = sample->first; m < sample->first + sample->count; m++)
        if (strcmp(index->members[m].extension, extension) == 0)
            return true;
    return false;
}

/* Writes one record: the key, the source's columns, the shard, and one file name per extension. The file name
 * is empty if the sample has no member with that extension. */
static void write_sample(FILE *stream, const struct list *list, uint64_t number)
{
    const struct index_sample *sample = &list->index->samples[number];
    const char *unit = list->index->units[sample->unit].name;
    bool files = list->index->layout == INDEX_FILES, shards = list->index->layout == INDEX_SHARDS;
    char texts[SOURCE_COLUMNS_MAX][SOURCE_TEXT_MAX], file[2 * PATH_MAX];
    text_csv_field(stream, sample->key);
    source_describe(list->source, list->state, number, texts);
    for (size_t i = 0; list->source->columns[i]; i++) {
        fputc(',', stream);
        text_csv_field(stream, texts[i]);
    }
    if (shards)
        fprintf(stream, ",%s", unit);
    for (size_t i = 0; i < list->extensions.count; i++) {
        const char *extension = list->extensions.names[i];
        snprintf(file, sizeof file, "%s%s%s.%s", files ? unit : "", files ? "/" : "", sample->key, extension);
        fputc(',', stream);
        if (has_member(list->index, sample, extension))
            text_csv_field(stream, file);
    }
    fputc('\n', stream);
}

static void write_columns(FILE *stream, const struct list *list)
{
    fputs("key", stream);
    for (size_t i = 0; list->source->columns[i]; i++)
        fprintf(stream, ",%s", list->source->columns[i]);
    if (list->index->layout == INDEX_SHARDS)
        fputs(",shard", stream);
    for (size_t i = 0; i < list->extensions.count; i++) {
        char column[PATH_MAX];
        snprintf(column, sizeof column, "file_%s", list->extensions.names[i]);
        fputc(',', stream);
        text_csv_field(stream, column);
    }
    fputc('\n', stream);
}

enum status samples_format(const struct source *source, const void *state, const struct index *index,
                           char **text, size_t *size)
{
    struct list list = {.source = source, .state = state, .index = index};
    *text = NULL;
    for (uint64_t m = 0; m < index->member_count; m++)
        TRY(index_extensions_add(&list.extensions, index->members[m].extension));
    FILE *stream = open_memstream(text, size);
    TRY(ALLOCATED(stream, "out of memory for " SAMPLES_NAME));
    write_columns(stream, &list);
    for (uint64_t i = 0; i < index->sample_count; i++)
        write_sample(stream, &list, i);
    return ALLOCATED(text_close(stream), "out of memory for " SAMPLES_NAME);
}

enum status samples_write(const char *folder, const struct source *source, const void *state,
                          const struct index *index)
{
    char path[PATH_MAX];
    FREED char *text = NULL;
    size_t size = 0;
    TRY(unit_path(path, folder, SAMPLES_NAME));
    TRY(samples_format(source, state, index, &text, &size));
    return file_write_atomic(path, text, size);
}

bool samples_are_whole(const char *folder, const struct index *index)
{
    char path[PATH_MAX], *text = NULL;
    size_t size = 0;
    bool whole = false;
    if (unit_path(path, folder, SAMPLES_NAME) != STATUS_OK || access(path, F_OK) != 0 ||
        file_read(path, &text, &size) != STATUS_OK)
        return false;
    bool counts = text_csv_records(text, size, &whole) == index->sample_count + 1;
    free(text);
    return counts && whole;
}
