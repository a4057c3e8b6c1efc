/* The tar format: a parser that does no I/O, and a writer of ustar headers and GNU long-name headers.
 *
 * A shard is a sequence of 512-byte blocks. Each member has one header and its data, padded to whole blocks.
 * Two blocks of zeros end the shard. The parser reads ustar, old V7, pax and GNU headers, as written by
 * Python's tarfile, webdataset and GNU tar. docs/formats.md lists what it accepts and refuses. */
#ifndef FDSL_DATA_TAR_H
#define FDSL_DATA_TAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define TAR_BLOCK_BYTES  512
#define TAR_END_BYTES    1024      /* the two blocks of zeros at the end */
#define TAR_NAME_MAX     4095      /* longest member name, in bytes */
#define TAR_NAME_FIELD   100       /* longest name in a plain header, in bytes */
#define TAR_EXTENDED_MAX (1 << 20) /* largest data of a pax header or a GNU long name, in bytes */
#define TAR_SIZE_UNKNOWN UINT64_MAX

/* The kind of a member. Volume labels are not reported, and folders only if parser->folders is set. */
enum tar_kind {
    TAR_FILE,    /* a regular file */
    TAR_LINK,    /* a hard link: another name of the member `target`, which comes before it */
    TAR_SYMLINK, /* a symbolic link to `target` */
    TAR_SPECIAL, /* a device or a FIFO */
    TAR_FOLDER
};

/* A member of a shard. `header` and `data` are offsets from the start of the shard, in bytes. Only a regular
 * file has data; for the other kinds, `size` is 0, and `data` is the offset of the next header. `name` and
 * `target` belong to the parser and are valid until the next call. */
struct tar_member {
    const char *name, *target; /* `target` is "" for all kinds but links */
    enum tar_kind kind;
    uint64_t header, data, size;
};

enum tar_step { TAR_MEMBER, TAR_MORE, TAR_END };

/* Values from extended headers. A header of type `g` applies to all following members; any other extended
 * header applies only to the next member. */
struct tar_override {
    bool has_name, has_target, has_size;
    uint64_t size;
    char name[TAR_NAME_MAX + 1], target[TAR_NAME_MAX + 1];
};

struct tar_parser {
    uint64_t position;    /* offset of the next byte to parse */
    uint64_t shard_bytes; /* size; if TAR_SIZE_UNKNOWN, truncation is detected only with `at_end` */
    uint64_t end;         /* offset of the first end-of-archive block, if has_ended */
    bool has_ended;
    uint64_t extended; /* offset of the member's first extended header, if is_extended */
    bool is_extended;
    bool has_global; /* a global pax header was seen */
    bool folders;    /* report folders, too; the caller sets it after tar_open() */
    bool is_pax;     /* a pax header precedes the member, or has_global */
    struct tar_override next, global;
    char name[TAR_NAME_MAX + 1], target[TAR_NAME_MAX + 1];
};

FDSL_C_BEGIN

/* Starts parsing a shard of this size, or of TAR_SIZE_UNKNOWN. The parser allocates no memory. */
void tar_open(struct tar_parser *parser, uint64_t shard_bytes);

/* Refuses files that are often in the place of a shard: compressed archives, and HTML pages of a server.
 * `bytes` are the first bytes of the file. A shard may begin with such bytes, too, so use this only to
 * explain why a file is not a shard. STATUS_FAILED with a remedy. */
enum status tar_refuse_other(const void *bytes, size_t size);

/* Moves to the headers of another member, at offset `position`. Global pax headers stay in effect. */
void tar_move(struct tar_parser *parser, uint64_t position);

/* Parses one step. `bytes` are the `available` bytes of the shard from parser->position on. `at_end` means
 * that the shard ends after them.
 *
 * TAR_MEMBER: `*member` is set. parser->position is then after its padded data, which need not be available.
 * TAR_MORE:   No member found yet. Call again with at least `*need` bytes from parser->position on; this
 *             position may have changed. Not returned with `at_end`.
 * TAR_END:    The shard has ended; everything after the last member is zero.
 *
 * STATUS_FAILED with a message that begins with the offset in the shard; the caller prepends the shard's
 * name. A shard without end-of-archive blocks fails, because it was truncated. A shard with data after these
 * blocks fails, because a part was overwritten with zeros, or several archives were concatenated. TAR_END is
 * returned only with `at_end` or if the shard's size is known. */
enum status tar_next(struct tar_parser *parser, const uint8_t *bytes, size_t available, bool at_end,
                     struct tar_member *member, enum tar_step *step, size_t *need);

/* Returns the number of padding bytes after data of this size, up to the next block. */
static inline size_t tar_padding(uint64_t size)
{
    return (size_t)(-size % TAR_BLOCK_BYTES);
}

/* Fills the header of a regular file: ustar, mode 0444, owner 0, time 0. Equal names and sizes therefore give
 * equal headers. STATUS_FAILED if the name is empty or longer than TAR_NAME_FIELD, or the size is 8 GiB or
 * more. */
enum status tar_header(uint8_t block[TAR_BLOCK_BYTES], const char *name, uint64_t size);

/* Fills all headers of a regular file with a name of up to TAR_NAME_MAX bytes. A name longer than
 * TAR_NAME_FIELD is stored in a preceding GNU long-name header. Sets `*count` to the number of bytes filled.
 * STATUS_FAILED if the name is empty or longer than TAR_NAME_MAX, or the size is 8 GiB or more. */
#define TAR_HEADERS_MAX (2 * TAR_BLOCK_BYTES + (TAR_NAME_MAX / TAR_BLOCK_BYTES + 1) * TAR_BLOCK_BYTES)
enum status tar_headers(uint8_t bytes[TAR_HEADERS_MAX], const char *name, uint64_t size, size_t *count);

FDSL_C_END

#endif
