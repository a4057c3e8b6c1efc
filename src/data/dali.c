/* Formats the index file that DALI's webdataset reader needs for each shard. */
#include "core/text.h"
#include "data/index.h"

#include <inttypes.h>

enum status dali_add_sample(FILE *stream, const char *key, const struct index_member *members, size_t count)
{
    TRY(index_check_name(key));
    for (size_t i = 0; i < count; i++)
        TRY(index_check_name(members[i].extension));
    for (size_t i = 0; i < count; i++)
        fprintf(stream, "%s%s %" PRIu64 " %" PRIu64 " %s.%s", i ? " " : "", members[i].extension,
                members[i].offset, members[i].size, key, members[i].extension);
    fputc('\n', stream);
    return STATUS_OK;
}

enum status dali_format(const struct index *index, uint64_t number, char **text, size_t *size)
{
    const struct index_unit *unit = &index->units[number];
    *text = NULL;
    FILE *stream = open_memstream(text, size);
    TRY(ALLOCATED(stream, "out of memory for a DALI index"));
    fprintf(stream, DALI_HEAD, unit->count);
    enum status status = STATUS_OK;
    for (uint64_t s = unit->first; status == STATUS_OK && s < unit->first + unit->count; s++)
        status = dali_add_sample(stream, index->samples[s].key, index->members + index->samples[s].first,
                                 index->samples[s].count);
    bool whole = text_close(stream);
    return status == STATUS_OK ? ALLOCATED(whole, "out of memory for a DALI index") : status;
}
