/* Zip archives: their directory, for files of torch.save() and of NumPy, and NumPy's archives of arrays
 * (.npz), whose members are .npy files. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef HAVE_ZLIB
#include <zlib.h>
#endif

#include "core/portable.h"
#include "core/text.h"
#include "data/npy.h"
#include "data/tensor_file.h"

/* ---- The directory ---- */

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
#define FLAGS_DEFLATE   0x0006                /* how hard the writer tried to compress; of no effect */
#define DEFLATED        8                     /* compression method */
#define RATIO_MAX       1032                  /* bytes that deflate can store in one byte */
#define DIRECTORY_MAX   (UINT64_C(256) << 20) /* bytes of the central directory */
#define COMMENT_MAX     65535                 /* bytes of the comment after the end record */

#define AGAIN           "; write the file again" /* what to do about an archive that is not valid */

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
        return status_set(STATUS_FAILED, "its zip64 records at offset %" PRIu64 " are not valid" AGAIN, at);
    struct directory large = {number(end + 32, 8), number(end + 48, 8), number(end + 40, 8), at};
    if ((directory->members != 0xFFFF && directory->members != large.members) ||
        (directory->begin != UINT32_MAX && directory->begin != large.begin) ||
        (directory->bytes != UINT32_MAX && directory->bytes != large.bytes))
        return status_set(STATUS_FAILED, "its zip64 records contradict the record at its end" AGAIN);
    *directory = large;
    return STATUS_OK;
}

/* Refuses a file whose last bytes are no end record. Looks for one before a comment. */
static enum status refuse_end(const struct tensor_file *file)
{
    const uint64_t count = file->bytes < END_BYTES + COMMENT_MAX ? file->bytes : END_BYTES + COMMENT_MAX;
    FREED uint8_t *bytes = malloc(count);
    TRY(ALLOCATED(bytes, "out of memory"));
    TRY(tensor_file_read(file, file->bytes - count, bytes, count));
    for (uint64_t at = count - END_BYTES; at > 0; at--)
        if (number(bytes + at - 1, 4) == END_MAGIC)
            return status_set(STATUS_FAILED,
                              "its zip archive ends %" PRIu64
                              " bytes before the end of the file: a comment or "
                              "other bytes follow; write the file again without them",
                              count - (at - 1) - END_BYTES);
    return status_set(STATUS_FAILED,
                      "not a zip archive, or truncated: there is no end record of an archive in its last "
                      "%" PRIu64 " bytes" AGAIN,
                      count);
}

static enum status read_end(const struct tensor_file *file, struct directory *directory)
{
    uint8_t end[END_BYTES];
    if (file->bytes < END_BYTES)
        return status_set(STATUS_FAILED, "not a zip archive: it has only %" PRIu64 " bytes" AGAIN,
                          file->bytes);
    uint64_t at = file->bytes - END_BYTES;
    TRY(tensor_file_read(file, at, end, sizeof end));
    if (number(end, 4) != END_MAGIC)
        return refuse_end(file);
    if (number(end + 4, 4) != 0 || number(end + 8, 2) != number(end + 10, 2) || number(end + 20, 2) != 0)
        return status_set(STATUS_FAILED, "the record at its end is not valid" AGAIN);
    *directory = (struct directory){number(end + 10, 2), number(end + 16, 4), number(end + 12, 4), at};
    TRY(read_end64(file, directory));
    if (directory->begin > directory->end || directory->bytes != directory->end - directory->begin)
        return status_set(STATUS_FAILED,
                          "its central directory of %" PRIu64 " bytes at offset %" PRIu64
                          " does not end at offset %" PRIu64 AGAIN,
                          directory->bytes, directory->begin, directory->end);
    if (directory->bytes > DIRECTORY_MAX || directory->members > directory->bytes / MEMBER_BYTES)
        return status_set(STATUS_FAILED,
                          "its central directory of %" PRIu64 " bytes cannot list %" PRIu64
                          " members, or is too large" AGAIN,
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
                : status_set(STATUS_FAILED, "its member '%.200s' has a name that is not a plain path" AGAIN,
                             name);
}

/* Replaces each 32-bit size or offset that is 0xFFFFFFFF by its 64-bit value from the extra field. */
static enum status read_extra(const uint8_t *extra, size_t size, struct zip_member *member)
{
    uint64_t *fields[] = {&member->bytes, &member->stored, &member->begin};
    for (size_t at = 0; size - at >= 4;) {
        size_t id = number(extra + at, 2), length = number(extra + at + 2, 2);
        at += 4;
        if (length > size - at)
            break;
        size_t next = at + length;
        for (size_t i = 0; id == EXTRA64 && i < COUNT_OF(fields); i++)
            if (*fields[i] == UINT32_MAX) {
                if (next - at < 8)
                    return status_set(STATUS_FAILED, "its member '%.200s' lacks its size or offset" AGAIN,
                                      member->name);
                *fields[i] = number(extra + at, 8);
                at += 8;
            }
        at = next;
    }
    return STATUS_OK;
}

/* Returns the name of a method of compression. */
static const char *method_name(unsigned method)
{
    static const struct {
        unsigned method;
        const char *name;
    } names[] = {{0, "stored"}, {8, "deflate"}, {9, "Deflate64"}, {12, "bzip2"},
                 {14, "LZMA"},  {93, "zstd"},   {95, "xz"}};
    for (size_t i = 0; i < COUNT_OF(names); i++)
        if (names[i].method == method)
            return names[i].name;
    return "unknown";
}

/* Refuses encrypted members, and members that are compressed in a way that is not read. */
static enum status check_method(const struct zip_member *member, unsigned flags, bool deflated)
{
    const bool unpacks = member->method == DEFLATED && deflated;
    if (member->method != 0 && !unpacks)
        return status_set(
            STATUS_FAILED,
            "its member '%.200s' is compressed (method %u, %s); only stored%s members are read: "
            "write the file with %s",
            member->name, member->method, method_name(member->method), deflated ? " and deflated" : "",
            deflated ? "numpy.savez() or numpy.savez_compressed()" : "torch.save()");
    if (flags & 1)
        return status_set(STATUS_FAILED,
                          "its member '%.200s' is encrypted; write the file without a password",
                          member->name);
    if (flags & ~(FLAGS_KNOWN | (unpacks ? FLAGS_DEFLATE : 0)))
        return status_set(STATUS_FAILED, "its member '%.200s' has unknown flags (0x%x)" AGAIN, member->name,
                          flags);
    if (unpacks ? member->bytes / RATIO_MAX <= member->stored : member->bytes == member->stored)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "its member '%.200s' cannot have %" PRIu64 " bytes: only %" PRIu64 " are stored" AGAIN,
                      member->name, member->bytes, member->stored);
}

/* Reads one record of the central directory. Moves the name by one byte, to end it with a zero. */
static enum status read_member(uint8_t **at, const uint8_t *end, bool deflated, struct zip_member *member)
{
    uint8_t *record = *at;
    if (end - record < MEMBER_BYTES || number(record, 4) != MEMBER_MAGIC)
        return status_set(STATUS_FAILED, "its central directory is not valid" AGAIN);
    size_t name = number(record + 28, 2), extra = number(record + 30, 2), comment = number(record + 32, 2);
    unsigned flags = (unsigned)number(record + 8, 2);
    if ((size_t)(end - record) < MEMBER_BYTES + name + extra + comment)
        return status_set(STATUS_FAILED, "its central directory is not valid" AGAIN);
    *member = (struct zip_member){.name = (char *)record + MEMBER_BYTES - 1,
                                  .begin = number(record + 42, 4),
                                  .bytes = number(record + 24, 4),
                                  .stored = number(record + 20, 4),
                                  .crc = (uint32_t)number(record + 16, 4),
                                  .method = (unsigned)number(record + 10, 2)};
    memmove(record + MEMBER_BYTES - 1, record + MEMBER_BYTES, name);
    record[MEMBER_BYTES - 1 + name] = '\0';
    TRY(check_name(member->name, name));
    TRY(read_extra(record + MEMBER_BYTES + name, extra, member));
    TRY(check_method(member, flags, deflated));
    *at = record + MEMBER_BYTES + name + extra + comment;
    return STATUS_OK;
}

/* Compares a member with its local header, and sets the offset of its data. All members must end at or before
 * the offset `end`. */
static enum status read_local(const struct tensor_file *file, uint64_t end, struct zip_member *member)
{
    uint8_t local[LOCAL_BYTES];
    size_t length = strlen(member->name);
    FREED char *name = malloc(length + 1);
    TRY(ALLOCATED(name, "out of memory"));
    if (member->begin > end || end - member->begin < LOCAL_BYTES + length)
        return status_set(STATUS_FAILED,
                          "its member '%.200s' at offset %" PRIu64 " is outside the archive" AGAIN,
                          member->name, member->begin);
    TRY(tensor_file_read(file, member->begin, local, sizeof local));
    TRY(tensor_file_read(file, member->begin + LOCAL_BYTES, name, length));
    uint64_t begin = member->begin + LOCAL_BYTES + length + number(local + 28, 2);
    uint64_t size = number(local + 22, 4);
    unsigned flags = (unsigned)number(local + 6, 2);
    bool same_size = flags & FLAG_DESCRIPTOR || size == member->bytes || size == UINT32_MAX;
    if (number(local, 4) != LOCAL_MAGIC || flags & ~(FLAGS_KNOWN | FLAGS_DEFLATE) ||
        number(local + 8, 2) != member->method || number(local + 26, 2) != length ||
        memcmp(name, member->name, length) != 0 || !same_size)
        return status_set(STATUS_FAILED,
                          "its member '%.200s' differs from its local header at offset %" PRIu64 AGAIN,
                          member->name, member->begin);
    if (begin > end || member->stored > end - begin)
        return status_set(STATUS_FAILED,
                          "its member '%.200s' of %" PRIu64 " bytes at offset %" PRIu64
                          " reaches beyond the end of the members, %" PRIu64 AGAIN,
                          member->name, member->stored, begin, end);
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
        if (members[i].begin < members[i - 1].offset + members[i - 1].stored)
            return status_set(STATUS_FAILED, "its members '%.200s' and '%.200s' overlap" AGAIN,
                              members[i - 1].name, members[i].name);
    qsort(members, zip->count, sizeof *members, compare_names);
    for (size_t i = 1; i < zip->count; i++)
        if (strcmp(members[i].name, members[i - 1].name) == 0)
            return status_set(STATUS_FAILED, "it has two members named '%.200s'" AGAIN, members[i].name);
    return STATUS_OK;
}

enum status zip_list(const struct tensor_file *file, bool deflated, struct zip *zip)
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
        TRY(read_member(&at, end, deflated, &zip->members[zip->count]));
        TRY(read_local(file, directory.begin, &zip->members[zip->count]));
    }
    if (at != end)
        return status_set(STATUS_FAILED,
                          "its central directory lists more members than its end record" AGAIN);
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

/* ---- Members with arrays ---- */

#ifdef HAVE_ZLIB

#define PIECE 65536 /* bytes that are read or unpacked at once */

/* Position in a member. Hashes the unpacked bytes. */
struct reader {
    const struct tensor_file *file;
    uint64_t at, left; /* of the stored bytes */
    bool deflated, ended;
    z_stream stream;
    uint8_t *piece; /* PIECE stored bytes; owned */
    uint32_t crc;
};

static enum status reader_open(const struct tensor_file *file, const struct zip_member *member,
                               struct reader *reader)
{
    *reader = (struct reader){.file = file,
                              .at = member->offset,
                              .left = member->stored,
                              .piece = malloc(PIECE),
                              .crc = (uint32_t)crc32(0, NULL, 0)};
    TRY(ALLOCATED(reader->piece, "out of memory"));
    reader->deflated = member->method == DEFLATED && inflateInit2(&reader->stream, -MAX_WBITS) == Z_OK;
    return ALLOCATED(member->method != DEFLATED || reader->deflated, "out of memory for zlib");
}

static void reader_close(struct reader *reader)
{
    if (reader->deflated)
        inflateEnd(&reader->stream);
    free(reader->piece);
}

/* Reads the next piece of stored bytes, at most `most`. */
static enum status next_piece(struct reader *reader, uint64_t most, size_t *count)
{
    *count = (size_t)(most < PIECE ? most : PIECE);
    *count = reader->left < *count ? (size_t)reader->left : *count;
    TRY(tensor_file_read(reader->file, reader->at, reader->piece, *count));
    reader->at += *count;
    reader->left -= *count;
    return STATUS_OK;
}

/* Unpacks up to `room` bytes, at most PIECE. Sets `*got` to their number, which is 0 only at the end. */
static enum status inflate_some(struct reader *reader, uint8_t *to, size_t room, size_t *got)
{
    z_stream *stream = &reader->stream;
    for (*got = 0; *got == 0 && !reader->ended;) {
        if (stream->avail_in == 0 && reader->left > 0) {
            size_t count;
            TRY(next_piece(reader, PIECE, &count));
            stream->next_in = reader->piece;
            stream->avail_in = (uInt)count;
        }
        stream->next_out = to;
        stream->avail_out = (uInt)room;
        int result = inflate(stream, Z_NO_FLUSH);
        *got = room - stream->avail_out;
        reader->ended = result == Z_STREAM_END;
        if (result != Z_OK && result != Z_STREAM_END)
            return status_set(STATUS_FAILED, "its compressed data is damaged: %s" AGAIN,
                              stream->msg ? stream->msg : "it ends too early");
    }
    return STATUS_OK;
}

/* Reads the next `count` bytes of the member. STATUS_FAILED if the member ends before. */
static enum status take(struct reader *reader, uint8_t *to, uint64_t count)
{
    for (uint64_t done = 0; done < count;) {
        uint64_t left = count - done;
        size_t got = (size_t)(left < PIECE ? left : PIECE);
        uint8_t *bytes = to + done;
        if (reader->deflated)
            TRY(inflate_some(reader, bytes, got, &got));
        else
            TRY(next_piece(reader, left, &got));
        if (got == 0)
            return status_set(STATUS_FAILED, "its data ends after %" PRIu64 " of %" PRIu64 " bytes" AGAIN,
                              done, count);
        if (!reader->deflated)
            memcpy(bytes, reader->piece, got);
        reader->crc = (uint32_t)crc32(reader->crc, bytes, (uInt)got);
        done += got;
    }
    return STATUS_OK;
}

/* Checks, after all bytes were taken, that nothing follows and that the CRC is right. */
static enum status check_end(struct reader *reader, const struct zip_member *member)
{
    uint8_t excess;
    size_t got = 0;
    if (reader->deflated)
        TRY(inflate_some(reader, &excess, 1, &got));
    if (got > 0 || reader->left > 0 || reader->stream.avail_in > 0)
        return status_set(STATUS_FAILED, "its data has more than %" PRIu64 " bytes" AGAIN, member->bytes);
    if (reader->crc == member->crc)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "its data has the CRC %08x, but the archive lists %08x: the file is damaged" AGAIN,
                      reader->crc, member->crc);
}

/* Reads a whole member: `skipped` bytes that are only hashed, then the others to `to`. If `to` is NULL, all
 * bytes are only hashed. */
static enum status read_member_data(const struct tensor_file *file, const struct zip_member *member,
                                    uint64_t skipped, uint8_t *to)
{
    CLOSED_BY(reader_close) struct reader reader;
    FREED uint8_t *unused = malloc(PIECE);
    TRY(reader_open(file, member, &reader));
    TRY(ALLOCATED(unused, "out of memory"));
    for (uint64_t left = to ? skipped : member->bytes, count; left > 0; left -= count) {
        count = left < PIECE ? left : PIECE;
        TRY(take(&reader, unused, count));
    }
    if (to)
        TRY(take(&reader, to, member->bytes - skipped));
    return check_end(&reader, member);
}

/* ---- Arrays of NumPy ---- */

/* Reads the header of an array. If this program cannot read its type, such as text or objects, sets
 * tensor->fault; the CRC then shows that the header is not damaged. */
static enum status read_array(const struct tensor_file *file, const struct zip_member *member,
                              struct tensor *tensor)
{
    CLOSED_BY(reader_close) struct reader reader;
    size_t count = member->bytes < NPY_HEADER_READ ? (size_t)member->bytes : NPY_HEADER_READ;
    FREED uint8_t *bytes = malloc(count + 1);
    struct npy_header header;
    TRY(reader_open(file, member, &reader));
    TRY(ALLOCATED(bytes, "out of memory"));
    TRY(take(&reader, bytes, count));
    if (npy_header_parse(bytes, count, &header) != STATUS_OK) {
        TRY(read_member_data(file, member, 0, NULL));
        snprintf(tensor->type, sizeof tensor->type, "%s", *header.type ? header.type : "unknown");
        tensor->fault = "it is not a plain array of numbers; save numbers with numpy.savez()";
        return STATUS_OK;
    }
    TRY(npy_header_check(&header, member->bytes));
    npy_describe(&header, tensor);
    tensor->member = *member;
    tensor->member.name = NULL;
    tensor->offset = member->method == DEFLATED ? UINT64_MAX : member->offset + header.data;
    return STATUS_OK;
}

static int compare_offsets(const void *a, const void *b)
{
    const struct zip_member *one = a, *two = b;
    return one->offset < two->offset ? -1 : one->offset > two->offset;
}

/* Adds the arrays in the order in which the archive stores them. Other members are not arrays. */
static enum status list_arrays(struct tensor_file *file, const struct zip *zip)
{
    if (zip->count > 0)
        qsort(zip->members, zip->count, sizeof *zip->members, compare_offsets);
    for (size_t i = 0; i < zip->count; i++) {
        const struct zip_member *member = &zip->members[i];
        struct tensor tensor = {.name = NULL};
        if (!text_ends_in(member->name, ".npy"))
            continue;
        TRY(status_prefix(read_array(file, member, &tensor), "array '%.80s'", member->name));
        tensor.name = strndup(member->name, strlen(member->name) - strlen(".npy"));
        TRY(tensor_file_add(file, &tensor));
    }
    return STATUS_OK;
}

enum status npz_list(struct tensor_file *file)
{
    CLOSED_BY(zip_free) struct zip zip;
    TRY(zip_list(file, true, &zip));
    return list_arrays(file, &zip);
}

bool tensor_is_packed(const struct tensor *tensor)
{
    return tensor->member.method == DEFLATED;
}

enum status tensor_read(const struct tensor_file *file, const struct tensor *tensor, void *values)
{
    if (tensor->member.offset == 0)
        return values ? tensor_file_read(file, tensor->offset, values, tensor->bytes) : STATUS_OK;
    return read_member_data(file, &tensor->member, tensor->member.bytes - tensor->bytes, values);
}

#else

enum status npz_list(struct tensor_file *file)
{
    (void)file;
    return status_set(STATUS_UNAVAILABLE,
                      "this build reads no .npz: install zlib (zlib1g-dev) and build again");
}

bool tensor_is_packed(const struct tensor *tensor)
{
    (void)tensor;
    return false;
}

enum status tensor_read(const struct tensor_file *file, const struct tensor *tensor, void *values)
{
    return values ? tensor_file_read(file, tensor->offset, values, tensor->bytes) : STATUS_OK;
}

#endif
