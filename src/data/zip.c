#include "data/zip.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Field offsets and signatures are those of PKWARE's APPNOTE.TXT, version 6.3.10. */
#define LOCAL_BYTES     30
#define LOCAL_MAGIC     0x04034B50
#define MEMBER_BYTES    46
#define MEMBER_MAGIC    0x02014B50
#define END_BYTES       22
#define END_MAGIC       0x06054B50
#define LOCATOR_BYTES   20
#define LOCATOR_MAGIC   0x07064B50
#define END64_BYTES     56
#define END64_MAGIC     0x06064B50
#define EXTRA64         1                     /* number of the extra field with sizes of 64 bits */
#define FLAGS_KNOWN     0x0808                /* sizes follow the data; names are UTF-8 */
#define FLAG_DESCRIPTOR 0x0008                /* sizes follow the data */
#define DIRECTORY_MAX   (UINT64_C(256) << 20) /* bytes of the central directory */

/* Reads `count` bytes, little-endian. */
static uint64_t number(const uint8_t *bytes, unsigned count)
{
    uint64_t value = 0;
    for (unsigned i = count; i > 0; i--)
        value = value << 8 | bytes[i - 1];
    return value;
}

/* ---- The end of the archive ---- */

struct directory {
    uint64_t members, begin, bytes;
    uint64_t end; /* offset of the first end record; the directory must end there */
};

/* Reads the zip64 records, if the archive has them. They precede the end record. */
static enum status read_end64(const struct tensor_file *file, struct directory *directory)
{
    uint8_t locator[LOCATOR_BYTES], end[END64_BYTES];
    if (file->bytes < END_BYTES + LOCATOR_BYTES + END64_BYTES)
        return STATUS_OK;
    uint64_t at = file->bytes - END_BYTES - LOCATOR_BYTES;
    TRY(tensor_file_read(file, at, locator, sizeof locator));
    if (number(locator, 4) != LOCATOR_MAGIC)
        return STATUS_OK;
    at -= END64_BYTES;
    TRY(tensor_file_read(file, at, end, sizeof end));
    if (number(locator + 8, 8) != at || number(end, 4) != END64_MAGIC ||
        number(end + 4, 8) != END64_BYTES - 12)
        return status_set(STATUS_FAILED, "its zip64 records at offset %" PRIu64 " are not valid", at);
    struct directory large = {number(end + 32, 8), number(end + 48, 8), number(end + 40, 8), at};
    if ((directory->members != 0xFFFF && directory->members != large.members) ||
        (directory->begin != UINT32_MAX && directory->begin != large.begin) ||
        (directory->bytes != UINT32_MAX && directory->bytes != large.bytes))
        return status_set(STATUS_FAILED, "its zip64 records contradict the record at its end");
    *directory = large;
    return STATUS_OK;
}

static enum status read_end(const struct tensor_file *file, struct directory *directory)
{
    uint8_t end[END_BYTES];
    if (file->bytes < END_BYTES)
        return status_set(STATUS_FAILED,
                          "not a zip archive: it has only %" PRIu64 " bytes; write it with torch.save()",
                          file->bytes);
    uint64_t at = file->bytes - END_BYTES;
    TRY(tensor_file_read(file, at, end, sizeof end));
    if (number(end, 4) != END_MAGIC)
        return status_set(STATUS_FAILED,
                          "not a zip archive, or truncated: it does not end with the end record "
                          "of an archive; write it with torch.save()");
    if (number(end + 4, 4) != 0 || number(end + 8, 2) != number(end + 10, 2) || number(end + 20, 2) != 0)
        return status_set(STATUS_FAILED, "the record at its end is not valid");
    *directory = (struct directory){number(end + 10, 2), number(end + 16, 4), number(end + 12, 4), at};
    TRY(read_end64(file, directory));
    if (directory->begin > directory->end || directory->bytes != directory->end - directory->begin)
        return status_set(STATUS_FAILED,
                          "its central directory of %" PRIu64 " bytes at offset %" PRIu64
                          " does not end at offset %" PRIu64,
                          directory->bytes, directory->begin, directory->end);
    if (directory->bytes > DIRECTORY_MAX || directory->members > directory->bytes / MEMBER_BYTES)
        return status_set(STATUS_FAILED,
                          "its central directory of %" PRIu64 " bytes cannot list %" PRIu64
                          " members, or is too large",
                          directory->bytes, directory->members);
    return STATUS_OK;
}

/* ---- Members ---- */

static enum status check_name(const char *name, size_t length)
{
    bool safe = true;
    for (size_t i = 0; i < length; i++)
        safe &= (unsigned char)name[i] >= ' ' && name[i] != 127 && name[i] != '\\';
    for (const char *part = name; safe; part = strchr(part, '/') + 1) {
        size_t size = strcspn(part, "/");
        safe = size > 0 && !(size == 1 && part[0] == '.') && !(size == 2 && memcmp(part, "..", 2) == 0);
        if (part[size] == '\0')
            break;
    }
    return safe ? STATUS_OK
                : status_set(STATUS_FAILED,
                             "its member '%.200s' has a name that is not a plain path; write the file with "
                             "torch.save()",
                             name);
}

/* Replaces each 32-bit size or offset that is 0xFFFFFFFF by its 64-bit value from the extra field. */
static enum status read_extra(const uint8_t *extra, size_t size, struct zip_member *member, uint64_t *stored)
{
    uint64_t *fields[] = {&member->bytes, stored, &member->begin};
    for (size_t at = 0; size - at >= 4;) {
        size_t id = number(extra + at, 2), length = number(extra + at + 2, 2);
        at += 4;
        if (length > size - at)
            break;
        size_t next = at + length;
        for (size_t i = 0; id == EXTRA64 && i < COUNT_OF(fields); i++)
            if (*fields[i] == UINT32_MAX) {
                if (next - at < 8)
                    return status_set(STATUS_FAILED, "its member '%.200s' lacks its size or offset",
                                      member->name);
                *fields[i] = number(extra + at, 8);
                at += 8;
            }
        at = next;
    }
    return STATUS_OK;
}

/* Reads one record of the central directory. Moves the name by one byte, to end it with a zero. */
static enum status read_member(uint8_t **at, const uint8_t *end, struct zip_member *member)
{
    uint8_t *record = *at;
    if (end - record < MEMBER_BYTES || number(record, 4) != MEMBER_MAGIC)
        return status_set(STATUS_FAILED, "its central directory is not valid");
    size_t name = number(record + 28, 2), extra = number(record + 30, 2), comment = number(record + 32, 2);
    unsigned flags = (unsigned)number(record + 8, 2), method = (unsigned)number(record + 10, 2);
    uint64_t stored = number(record + 20, 4);
    if ((size_t)(end - record) < MEMBER_BYTES + name + extra + comment)
        return status_set(STATUS_FAILED, "its central directory is not valid");
    *member = (struct zip_member){.name = (char *)record + MEMBER_BYTES - 1,
                                  .begin = number(record + 42, 4),
                                  .bytes = number(record + 24, 4)};
    memmove(record + MEMBER_BYTES - 1, record + MEMBER_BYTES, name);
    record[MEMBER_BYTES - 1 + name] = '\0';
    TRY(check_name(member->name, name));
    TRY(read_extra(record + MEMBER_BYTES + name, extra, member, &stored));
    if (flags & ~FLAGS_KNOWN)
        return status_set(STATUS_FAILED, "its member '%.200s' is encrypted or has unknown flags (0x%x)",
                          member->name, flags);
    if (method != 0 || stored != member->bytes)
        return status_set(STATUS_FAILED,
                          "its member '%.200s' is compressed (method %u, %" PRIu64 " bytes from %" PRIu64
                          "); only stored members are read: write the file with torch.save()",
                          member->name, method, member->bytes, stored);
    *at = record + MEMBER_BYTES + name + extra + comment;
    return STATUS_OK;
}

/* Compares a member with its local header, and sets the offset of its data. All members must end at or before
 * the offset `end`. */
static enum status read_local(const struct tensor_file *file, uint64_t end, struct zip_member *member)
{
    uint8_t local[LOCAL_BYTES];
    char name[UINT16_MAX];
    size_t length = strlen(member->name);
    if (member->begin > end || end - member->begin < LOCAL_BYTES + length)
        return status_set(STATUS_FAILED, "its member '%.200s' at offset %" PRIu64 " is outside the archive",
                          member->name, member->begin);
    TRY(tensor_file_read(file, member->begin, local, sizeof local));
    TRY(tensor_file_read(file, member->begin + LOCAL_BYTES, name, length));
    uint64_t begin = member->begin + LOCAL_BYTES + length + number(local + 28, 2);
    uint64_t size = number(local + 22, 4);
    unsigned flags = (unsigned)number(local + 6, 2);
    bool same_size = flags & FLAG_DESCRIPTOR || size == member->bytes || size == UINT32_MAX;
    if (number(local, 4) != LOCAL_MAGIC || flags & ~FLAGS_KNOWN || number(local + 8, 2) != 0 ||
        number(local + 26, 2) != length || memcmp(name, member->name, length) != 0 || !same_size)
        return status_set(STATUS_FAILED,
                          "its member '%.200s' differs from its local header at offset %" PRIu64,
                          member->name, member->begin);
    if (begin > end || member->bytes > end - begin)
        return status_set(STATUS_FAILED,
                          "its member '%.200s' of %" PRIu64 " bytes at offset %" PRIu64
                          " reaches beyond the end of the members, %" PRIu64,
                          member->name, member->bytes, begin, end);
    member->offset = begin;
    return STATUS_OK;
}

static int compare_begins(const void *a, const void *b)
{
    const struct zip_member *one = a, *two = b;
    return one->begin < two->begin ? -1 : one->begin > two->begin;
}

static int compare_names(const void *a, const void *b)
{
    const struct zip_member *one = a, *two = b;
    return strcmp(one->name, two->name);
}

/* Refuses members that overlap or share a name. Leaves them sorted by name. */
static enum status check_members(struct zip *zip)
{
    struct zip_member *members = zip->members;
    if (zip->count == 0)
        return STATUS_OK;
    qsort(members, zip->count, sizeof *members, compare_begins);
    for (size_t i = 1; i < zip->count; i++)
        if (members[i].begin < members[i - 1].offset + members[i - 1].bytes)
            return status_set(STATUS_FAILED,
                              "its members '%.200s' and '%.200s' overlap; write the file with torch.save()",
                              members[i - 1].name, members[i].name);
    qsort(members, zip->count, sizeof *members, compare_names);
    for (size_t i = 1; i < zip->count; i++)
        if (strcmp(members[i].name, members[i - 1].name) == 0)
            return status_set(STATUS_FAILED,
                              "it has two members named '%.200s'; write the file with torch.save()",
                              members[i].name);
    return STATUS_OK;
}

enum status zip_list(const struct tensor_file *file, struct zip *zip)
{
    struct directory directory = {0};
    *zip = (struct zip){0};
    TRY(read_end(file, &directory));
    zip->directory = malloc(directory.bytes + 1);
    zip->members = calloc(directory.members + 1, sizeof *zip->members);
    TRY(ALLOCATED(zip->directory && zip->members, "out of memory for its %" PRIu64 " members",
                  directory.members));
    TRY(tensor_file_read(file, directory.begin, zip->directory, directory.bytes));
    uint8_t *at = (uint8_t *)zip->directory, *end = at + directory.bytes;
    for (; zip->count < directory.members; zip->count++) {
        TRY(read_member(&at, end, &zip->members[zip->count]));
        TRY(read_local(file, directory.begin, &zip->members[zip->count]));
    }
    if (at != end)
        return status_set(STATUS_FAILED, "its central directory lists more members than its end record");
    return check_members(zip);
}

void zip_free(struct zip *zip)
{
    free(zip->members);
    free(zip->directory);
    *zip = (struct zip){0};
}

const struct zip_member *zip_find(const struct zip *zip, const char *name)
{
    const struct zip_member wanted = {.name = name};
    return zip->count ? bsearch(&wanted, zip->members, zip->count, sizeof wanted, compare_names) : NULL;
}
