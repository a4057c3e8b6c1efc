#include "data/tar.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "core/file.h"

/* Offsets of header fields. Constants whose names end in _BYTES are lengths of fields. */
enum {
    NAME = 0,
    NAME_BYTES = 100,
    MODE = 100,
    OWNER = 108,
    GROUP = 116,
    SIZE = 124,
    SIZE_BYTES = 12,
    TIME = 136,
    CHECKSUM = 148,
    CHECKSUM_BYTES = 8,
    TYPE = 156,
    TARGET = 157,
    TARGET_BYTES = 100,
    MAGIC = 257,
    PREFIX = 345,
    PREFIX_BYTES = 155
};

/* Larger than any real file, but small enough that sums of offsets do not overflow. */
#define SIZE_MAX_BYTES (UINT64_C(1) << 62)

#define MULTI_VOLUME                                                                                  \
    "a part of an archive in several volumes, which is not supported; write the shard without tar's " \
    "--multi-volume"
#define BAD(at, ...) bad_at(at, status_set(STATUS_FAILED, __VA_ARGS__))

static enum status bad_at(uint64_t offset, enum status status)
{
    return status_prefix(status, "offset %" PRIu64, offset);
}

void tar_open(struct tar_parser *parser, uint64_t shard_bytes)
{
    tar_move(parser, 0);
    parser->shard_bytes = shard_bytes;
    parser->has_global = parser->is_pax = parser->folders = false;
    parser->global.has_name = parser->global.has_target = parser->global.has_size = false;
    parser->name[0] = parser->target[0] = '\0';
}

/* Ends the effect of the extended headers of one member. */
static void forget_extensions(struct tar_parser *parser)
{
    parser->is_extended = false;
    parser->is_pax = parser->has_global;
    parser->next.has_name = parser->next.has_target = parser->next.has_size = false;
}

void tar_move(struct tar_parser *parser, uint64_t position)
{
    parser->position = position;
    parser->has_ended = false;
    forget_extensions(parser);
}

/* ---- Fields ---- */

static bool is_zero(const uint8_t *bytes, size_t count)
{
    return count == 0 || (bytes[0] == 0 && memcmp(bytes, bytes + 1, count - 1) == 0);
}

/* Parses an octal number. Blanks may precede it; blanks and zero bytes may follow. Returns false for any
 * other text. */
static bool octal(const uint8_t *field, size_t length, uint64_t *value)
{
    size_t i = 0;
    *value = 0;
    while (i < length && field[i] == ' ')
        i++;
    for (; i < length && field[i] >= '0' && field[i] <= '7'; i++)
        *value = *value << 3 | (uint64_t)(field[i] - '0'); /* at most 12 digits, so 36 bits */
    for (; i < length; i++)
        if (field[i] != ' ' && field[i] != '\0')
            return false;
    return true;
}

/* Parses GNU's base-256 number: first byte 0x80, then big-endian. */
static bool base256(const uint8_t *field, size_t length, uint64_t *value)
{
    *value = 0;
    for (size_t i = 1; i < length; i++) {
        if (*value >> 56)
            return false;
        *value = *value << 8 | field[i];
    }
    return true;
}

static enum status size_of(uint64_t at, const uint8_t *header, uint64_t *size)
{
    const uint8_t *field = header + SIZE;
    if (field[0] & 0x40 && field[0] & 0x80)
        return BAD(at, "the size is negative");
    bool read = field[0] & 0x80 ? field[0] == 0x80 && base256(field, SIZE_BYTES, size)
                                : octal(field, SIZE_BYTES, size);
    if (!read)
        return BAD(at, "the size is not a number");
    return *size < SIZE_MAX_BYTES
               ? STATUS_OK
               : BAD(at, "the size of %" PRIu64 " bytes is more than any file holds", *size);
}

/* Verifies the header's checksum: the sum of its bytes, with the checksum field counted as blanks. Also
 * accepts the sum of signed bytes, which some old programs write. */
static enum status check_sum(uint64_t at, const uint8_t *header)
{
    uint64_t stored;
    int64_t bytes = 0, chars = 0;
    for (int i = 0; i < TAR_BLOCK_BYTES; i++) {
        uint8_t byte = i >= CHECKSUM && i < CHECKSUM + CHECKSUM_BYTES ? ' ' : header[i];
        bytes += byte;
        chars += (int8_t)byte;
    }
    if (!octal(header + CHECKSUM, CHECKSUM_BYTES, &stored))
        return BAD(at, "not a tar header: its checksum is not a number");
    if ((int64_t)stored != bytes && (int64_t)stored != chars)
        return BAD(at, "wrong header checksum: the header says %" PRIu64 ", but its bytes add up to %" PRId64,
                   stored, bytes);
    return STATUS_OK;
}

enum status tar_refuse_other(const void *bytes, size_t size)
{
    static const struct {
        const char *begin, *kind, *remedy;
    } others[] = {
        {"\x1f\x8b", "gzip", ", or let its name end in .tar.gz"},
        {"\x28\xb5\x2f\xfd", "zstd", ", or let its name end in .tar.zst"},
        {"\xfd"
         "7zXZ",
         "xz", ""},
        {"BZh", "bzip2", ""},
        {"PK\x03\x04", "zip", ""},
    };
    const char *text = bytes;
    for (size_t i = 0; i < COUNT_OF(others); i++)
        if (size >= strlen(others[i].begin) && memcmp(bytes, others[i].begin, strlen(others[i].begin)) == 0)
            return status_set(STATUS_FAILED, "this is not a tar file, but %s data: unpack it%s",
                              others[i].kind, others[i].remedy);
    while (size > 0 && (*text == ' ' || *text == '\t' || *text == '\r' || *text == '\n'))
        text++, size--;
    static const char *const pages[] = {"<!doctype", "<html", "<?xml"};
    for (size_t i = 0; i < COUNT_OF(pages); i++)
        if (size >= strlen(pages[i]) && strncasecmp(text, pages[i], strlen(pages[i])) == 0)
            return status_set(STATUS_FAILED,
                              "this is not a tar file, but an HTML or XML page, such as a server's page "
                              "for logging in: check the address and the credentials");
    return STATUS_OK;
}

/* Reads the name stored in the header itself. */
static void plain_name(const uint8_t *header, char *name)
{
    int prefix = 0;
    if (memcmp(header + MAGIC, "ustar", 6) == 0) /* with the zero byte; GNU has a blank and no prefix */
        prefix = (int)strnlen((const char *)header + PREFIX, PREFIX_BYTES);
    snprintf(name, TAR_NAME_MAX + 1, "%.*s%s%.*s", prefix, (const char *)header + PREFIX, prefix ? "/" : "",
             (int)strnlen((const char *)header + NAME, NAME_BYTES), (const char *)header + NAME);
}

/* ---- Extended headers ---- */

/* Takes the name of a member, or of the target of a link. */
static enum status take_name(uint64_t at, const uint8_t *text, size_t length, char name[TAR_NAME_MAX + 1],
                             bool *has_name)
{
    if (length > TAR_NAME_MAX)
        return BAD(at, "the name has %zu bytes; at most %d are supported", length, TAR_NAME_MAX);
    if (memchr(text, '\0', length))
        return BAD(at, "the name contains a zero byte");
    memcpy(name, text, length);
    name[length] = '\0';
    *has_name = length > 0; /* pax: an empty value cancels an earlier one */
    return STATUS_OK;
}

/* Parses a decimal number of at most 19 digits. Returns false if the text is longer, empty, or has any other
 * character. */
static bool decimal(const uint8_t *text, size_t length, uint64_t *value)
{
    *value = 0;
    if (length == 0 || length > 19)
        return false;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        *value = *value * 10 + (uint64_t)(text[i] - '0');
    }
    return true;
}

static enum status take_keyword(uint64_t at, struct tar_override *override, const uint8_t *key,
                                size_t key_length, const uint8_t *value, size_t length)
{
    if (key_length >= 11 && memcmp(key, "GNU.sparse.", 11) == 0)
        return BAD(at, "sparse members are not supported; write the shard without tar's --sparse");
    if (key_length > 11 && memcmp(key, "GNU.volume.", 11) == 0 && memcmp(key + 11, "label", 5) != 0)
        return BAD(at, MULTI_VOLUME);
    if (key_length == 4 && memcmp(key, "path", 4) == 0)
        return take_name(at, value, length, override->name, &override->has_name);
    if (key_length == 8 && memcmp(key, "linkpath", 8) == 0)
        return take_name(at, value, length, override->target, &override->has_target);
    if (key_length != 4 || memcmp(key, "size", 4) != 0)
        return STATUS_OK;
    override->has_size = length > 0;
    if (length > 0 && (!decimal(value, length, &override->size) || override->size >= SIZE_MAX_BYTES))
        return BAD(at, "the size in a pax header, '%.*s', is not a valid file size",
                   (int)(length < 32 ? length : 32), (const char *)value);
    return STATUS_OK;
}

/* Parses pax records "LENGTH KEY=VALUE\n". LENGTH is the size of the whole record, in decimal. */
static enum status take_pax(uint64_t at, struct tar_override *override, const uint8_t *text, size_t size)
{
    while (size > 0 && text[0] != '\0') { /* some writers pad with zeros */
        const uint8_t *blank = memchr(text, ' ', size < 20 ? size : 20);
        uint64_t length = 0;
        if (!blank || !decimal(text, (size_t)(blank - text), &length) || length > size ||
            length < (uint64_t)(blank - text) + 3 || text[length - 1] != '\n')
            return BAD(at, "a pax record has an invalid length");
        const uint8_t *key = blank + 1, *end = text + length - 1;
        const uint8_t *equals = memchr(key, '=', (size_t)(end - key));
        if (!equals)
            return BAD(at, "a pax record has no '='");
        TRY(take_keyword(at, override, key, (size_t)(equals - key), equals + 1, (size_t)(end - equals - 1)));
        text += length;
        size -= length;
    }
    return STATUS_OK;
}

static bool is_extension(uint8_t type)
{
    return type == 'x' || type == 'X' || type == 'g' || type == 'L' || type == 'K';
}

/* Parses the data of an extended header. All of the data is available. */
static enum status take_extension(struct tar_parser *parser, uint8_t type, const uint8_t *data, size_t size)
{
    uint64_t at = parser->position;
    struct tar_override *next = &parser->next;
    if (type == 'L')
        return take_name(at, data, strnlen((const char *)data, size), next->name, &next->has_name);
    if (type == 'K')
        return take_name(at, data, strnlen((const char *)data, size), next->target, &next->has_target);
    parser->has_global |= type == 'g';
    parser->is_pax = true;
    return take_pax(at, type == 'g' ? &parser->global : &parser->next, data, size);
}

/* ---- Steps ---- */

static uint64_t padded(uint64_t size)
{
    return size + tar_padding(size);
}

/* Checks that the shard has `bytes` bytes from parser->position on. Returns STATUS_OK if the shard's size is
 * unknown. */
static enum status check_end(const struct tar_parser *parser, size_t available, bool at_end, uint64_t bytes,
                             const char *what)
{
    uint64_t end = at_end ? parser->position + available : parser->shard_bytes;
    if (end == TAR_SIZE_UNKNOWN || (parser->position <= end && bytes <= end - parser->position))
        return STATUS_OK;
    return BAD(parser->position,
               "the shard ends at %" PRIu64 ", inside %s of %" PRIu64
               " bytes: the shard was truncated, or the header is damaged",
               end, what, bytes);
}

/* Refuses the types of members whose data cannot be read, or whose meaning is unknown. Otherwise sets
 * `*kind`, and sets `*found` if the member is reported. */
static enum status find_kind(const struct tar_parser *parser, uint8_t type, enum tar_kind *kind, bool *found)
{
    uint64_t at = parser->position;
    size_t length = strlen(parser->name);
    *found = true;
    *kind = TAR_SPECIAL;
    switch (type) {
    case '\0': /* V7: a trailing slash marks a folder */
        *kind = length == 0 || parser->name[length - 1] != '/' ? TAR_FILE : TAR_FOLDER;
        *found = *kind == TAR_FILE || parser->folders;
        return STATUS_OK;
    case '0':
    case '7': /* contiguous on its disk */
        *kind = TAR_FILE;
        return STATUS_OK;
    case '1':
        *kind = TAR_LINK;
        return STATUS_OK;
    case '2':
        *kind = TAR_SYMLINK;
        return STATUS_OK;
    case '3':
    case '4':
    case '6':
        return STATUS_OK;
    case '5': /* a folder */
    case 'D': /* GNU: a folder and the names in it */
        *kind = TAR_FOLDER;
        *found = parser->folders;
        return STATUS_OK;
    case 'V': /* GNU: the label of the archive */
        *found = false;
        return STATUS_OK;
    case 'S':
        return BAD(
            at, "'%.200s' is a sparse member, which is not supported; write the shard without tar's --sparse",
            parser->name);
    case 'M':
        return BAD(at, "'%.200s' is " MULTI_VOLUME, parser->name);
    default:
        return BAD(
            at,
            "'%.200s' has the unknown type '%c'; write the shard with GNU tar, bsdtar or Python's tarfile",
            parser->name, type);
    }
}

/* Requests `bytes` bytes from parser->position on. Fails if the shard has fewer. */
static enum status ask(const struct tar_parser *parser, size_t available, bool at_end, size_t bytes,
                       enum tar_step *step, size_t *need)
{
    TRY(check_end(parser, available, at_end, bytes, "a header"));
    *step = TAR_MORE;
    *need = bytes;
    return STATUS_OK;
}

/* Decides whether data follow the header of a hard link with a size. POSIX has changed its mind: in ustar, no
 * data follow, whatever the size is; in pax, they do. So this function looks at the next block. It is
 * requested with `*step` and `*need` if it is not available. If data follow, the member is a file of its own,
 * and `*kind` is TAR_FILE. */
static enum status look_after_link(const struct tar_parser *parser, const uint8_t *header, size_t available,
                                   bool at_end, uint64_t *size, enum tar_kind *kind, enum tar_step *step,
                                   size_t *need)
{
    const uint8_t *next = header + TAR_BLOCK_BYTES;
    if (available < 2 * TAR_BLOCK_BYTES)
        return ask(parser, available, at_end, 2 * TAR_BLOCK_BYTES, step, need);
    if (!is_zero(next, TAR_BLOCK_BYTES) && check_sum(0, next) != STATUS_OK) {
        *kind = TAR_FILE;
        return STATUS_OK;
    }
    if (parser->is_pax)
        return BAD(parser->position,
                   "'%.200s' is a hard link with a size of %" PRIu64
                   ", and it is unclear whether data follow; write the shard with tar --hard-dereference",
                   parser->name, *size);
    *size = 0;
    return STATUS_OK;
}

/* Parses the header at parser->position. The caller has checked that it is in memory and not zero. Sets
 * `*step` to TAR_MEMBER if the member is reported, and to TAR_MORE with `*need` if more bytes are needed. */
static enum status take_header(struct tar_parser *parser, const uint8_t *header, size_t available,
                               bool at_end, struct tar_member *member, enum tar_step *step, size_t *need)
{
    uint8_t type = header[TYPE];
    uint64_t at = parser->position, size;
    const struct tar_override *next = &parser->next, *global = &parser->global;
    enum tar_kind kind;
    bool found;
    *step = TAR_END;
    TRY(size_of(at, header, &size));
    if (next->has_size || global->has_size)
        size = next->has_size ? next->size : global->size;
    if (next->has_name || global->has_name)
        strcpy(parser->name, next->has_name ? next->name : global->name);
    else
        plain_name(header, parser->name);
    TRY(find_kind(parser, type, &kind, &found));
    parser->target[0] = '\0';
    if (kind == TAR_LINK && size > 0) {
        TRY(look_after_link(parser, header, available, at_end, &size, &kind, step, need));
        if (*step == TAR_MORE)
            return STATUS_OK;
    }
    if ((kind == TAR_LINK || kind == TAR_SYMLINK) && (next->has_target || global->has_target))
        strcpy(parser->target, next->has_target ? next->target : global->target);
    else if (kind == TAR_LINK || kind == TAR_SYMLINK)
        snprintf(parser->target, sizeof parser->target, "%.*s",
                 (int)strnlen((const char *)header + TARGET, TARGET_BYTES), (const char *)header + TARGET);
    if (type >= '2' && type <= '6') /* no data follow, whatever the size field says */
        size = 0;
    TRY(check_end(parser, available, at_end, TAR_BLOCK_BYTES + padded(size), "a member"));
    *member = (struct tar_member){.name = parser->name,
                                  .target = parser->target,
                                  .kind = kind,
                                  .header = parser->is_extended ? parser->extended : at,
                                  .data = at + TAR_BLOCK_BYTES,
                                  .size = size};
    parser->position += TAR_BLOCK_BYTES + padded(size);
    forget_extensions(parser);
    *step = found ? TAR_MEMBER : TAR_END;
    return STATUS_OK;
}

/* Fails because data follows a block of zeros. `offset` is the offset of the data. */
static enum status refuse_data_after_end(const struct tar_parser *parser, uint64_t offset)
{
    if (offset - parser->end < TAR_END_BYTES)
        return BAD(parser->end, "data after a single block of zeros: the shard is damaged");
    return BAD(parser->end,
               "the shard ends here, but data follows at offset %" PRIu64
               ": a part was overwritten with zeros, or archives were joined with cat; restore the shard, or "
               "keep each archive in its own file",
               offset);
}

/* Handles the end-of-archive blocks and checks that the rest of the shard is zero. Requests one block at a
 * time, so the caller's buffer may be small. */
static enum status take_end(struct tar_parser *parser, const uint8_t *bytes, size_t available, bool at_end,
                            enum tar_step *step, size_t *need)
{
    if (!parser->has_ended && parser->is_extended)
        return BAD(parser->position, "the shard ends after an extended header, before its member");
    if (!parser->has_ended)
        parser->end = parser->position;
    parser->has_ended = true;
    if (!is_zero(bytes, available)) {
        size_t zeros = 0;
        while (bytes[zeros] == 0)
            zeros++;
        uint64_t offset = parser->position + zeros;
        return refuse_data_after_end(parser, offset - (offset - parser->end) % TAR_BLOCK_BYTES);
    }
    parser->position += available;
    *step = at_end || parser->position == parser->shard_bytes ? TAR_END : TAR_MORE;
    *need = TAR_BLOCK_BYTES;
    return STATUS_OK;
}

enum status tar_next(struct tar_parser *parser, const uint8_t *bytes, size_t available, bool at_end,
                     struct tar_member *member, enum tar_step *step, size_t *need)
{
    for (;;) {
        uint64_t begin = parser->position;
        if (parser->has_ended)
            return take_end(parser, bytes, available, at_end, step, need);
        if (begin == 0 && file_refuse_pointer(bytes, available) != STATUS_OK)
            return STATUS_FAILED;
        if (available == 0 && (at_end || parser->position == parser->shard_bytes))
            return BAD(begin, begin ? "the shard lacks its end-of-archive blocks: it was truncated"
                                    : "the shard is empty");
        if (available < TAR_BLOCK_BYTES)
            return ask(parser, available, at_end, TAR_BLOCK_BYTES, step, need);
        if (is_zero(bytes, TAR_BLOCK_BYTES))
            return take_end(parser, bytes, available, at_end, step, need);
        TRY(check_sum(begin, bytes));
        if (is_extension(bytes[TYPE])) {
            uint64_t size;
            TRY(size_of(begin, bytes, &size));
            if (size > TAR_EXTENDED_MAX)
                return BAD(begin, "the extended header has %" PRIu64 " bytes; at most %d are supported", size,
                           TAR_EXTENDED_MAX);
            size_t whole = TAR_BLOCK_BYTES + (size_t)padded(size);
            if (available < whole)
                return ask(parser, available, at_end, whole, step, need);
            TRY(take_extension(parser, bytes[TYPE], bytes + TAR_BLOCK_BYTES, (size_t)size));
            if (!parser->is_extended && bytes[TYPE] != 'g')
                parser->extended = begin;
            parser->is_extended |= bytes[TYPE] != 'g';
            parser->position += whole;
        } else {
            TRY(take_header(parser, bytes, available, at_end, member, step, need));
            if (*step != TAR_END) /* TAR_END stands for a member that is skipped */
                return STATUS_OK;
        }
        uint64_t passed = parser->position - begin;
        if (passed > available && at_end) /* unreachable: check_end() has failed before */
            return BAD(begin, "the shard ends inside a member");
        bytes += passed < available ? passed : available;
        available -= passed < available ? (size_t)passed : available;
    }
}

/* ---- Writing ---- */

/* Fills a header of this type with the first `length` bytes of `name`, at most TAR_NAME_FIELD. */
static void fill_header(uint8_t block[TAR_BLOCK_BYTES], const char *name, size_t length, uint64_t size,
                        char type)
{
    char *text = (char *)block;
    memset(block, 0, TAR_BLOCK_BYTES);
    memcpy(text + NAME, name, length);
    strcpy(text + MODE, "0000444");
    strcpy(text + OWNER, "0000000");
    strcpy(text + GROUP, "0000000");
    snprintf(text + SIZE, SIZE_BYTES, "%011" PRIo64, size);
    strcpy(text + TIME, "00000000000");
    memset(text + CHECKSUM, ' ', CHECKSUM_BYTES);
    text[TYPE] = type;
    memcpy(text + MAGIC, type == '0' ? "ustar\00000" : "ustar  ", 8); /* the second form is GNU's */
    unsigned sum = 0;
    for (size_t i = 0; i < TAR_BLOCK_BYTES; i++)
        sum += block[i];
    snprintf(text + CHECKSUM, CHECKSUM_BYTES - 1, "%06o", sum); /* followed by a zero and a blank */
}

static enum status check_member(const char *name, size_t name_max, uint64_t size)
{
    size_t length = strlen(name);
    if (length == 0 || length > name_max)
        return status_set(STATUS_FAILED,
                          "'%.120s': a member's name must have 1 to %zu bytes; this one has %zu", name,
                          name_max, length);
    if (size >> 33)
        return status_set(STATUS_FAILED,
                          "%s: a shard member must be smaller than 8 GiB; this one has %" PRIu64 " bytes",
                          name, size);
    return STATUS_OK;
}

enum status tar_header(uint8_t block[TAR_BLOCK_BYTES], const char *name, uint64_t size)
{
    TRY(check_member(name, TAR_NAME_FIELD, size));
    fill_header(block, name, strlen(name), size, '0');
    return STATUS_OK;
}

enum status tar_headers(uint8_t bytes[TAR_HEADERS_MAX], const char *name, uint64_t size, size_t *count)
{
    size_t length = strlen(name);
    *count = 0;
    TRY(check_member(name, TAR_NAME_MAX, size));
    if (length >
        TAR_NAME_FIELD) { /* store the whole name, with its zero, as the data of a preceding header */
        static const char link[] = "././@LongLink";
        fill_header(bytes, link, sizeof link - 1, length + 1, 'L');
        memset(bytes + TAR_BLOCK_BYTES, 0, (size_t)padded(length + 1));
        memcpy(bytes + TAR_BLOCK_BYTES, name, length);
        *count = TAR_BLOCK_BYTES + (size_t)padded(length + 1);
    }
    fill_header(bytes + *count, name, length < TAR_NAME_FIELD ? length : TAR_NAME_FIELD, size, '0');
    *count += TAR_BLOCK_BYTES;
    return STATUS_OK;
}
