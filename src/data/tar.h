/* The tar format: a parser without I/O, and the plain ustar that we write.
 *
 * A shard is a row of blocks of 512 bytes: a header a member, its data padded to whole blocks, two blocks of
 * zeros at the end. The parser reads ustar, old V7, pax and GNU headers, as Python's tarfile, webdataset and
 * GNU tar write them. docs/formats.md says what it takes and what it refuses. */
#ifndef FDSL_DATA_TAR_H
#define FDSL_DATA_TAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

#define TAR_BLOCK_BYTES  512
#define TAR_END_BYTES    1024      /* the zeros after the last member */
#define TAR_NAME_MAX     4095      /* bytes of a member's name */
#define TAR_NAME_FIELD   100       /* bytes of a name that a plain header holds */
#define TAR_EXTENDED_MAX (1 << 20) /* data of a pax header or a GNU long name, in bytes */
#define TAR_SIZE_UNKNOWN UINT64_MAX

/* A regular file. Offsets count from the shard's begin; the name is the parser's until the next call. */
struct tar_member {
    const char *name;
    uint64_t header, data, size;
};

enum tar_step { TAR_MEMBER, TAR_MORE, TAR_END };

/* What extended headers say of the next member, or, for `g`, of all that follow. */
struct tar_override {
    bool has_name, has_size;
    uint64_t size;
    char name[TAR_NAME_MAX + 1];
};

struct tar_parser {
    uint64_t position;    /* of the next byte that the parser wants */
    uint64_t shard_bytes; /* TAR_SIZE_UNKNOWN: members are checked against the end only where it is seen */
    uint64_t end;         /* where the blocks of zeros begin, once they were met */
    bool has_ended;
    uint64_t extended; /* where the headers of the member begin, when extended ones come before it */
    bool is_extended;
    bool has_global; /* a header for all that follow came by */
    struct tar_override next, global;
    char name[TAR_NAME_MAX + 1];
};

FDSL_C_BEGIN

/* Begins a shard of that size, or of TAR_SIZE_UNKNOWN. The parser holds no memory. */
void tar_open(struct tar_parser *parser, uint64_t shard_bytes);

/* Goes on at another member's headers; what was said for all that follow stays. */
void tar_move(struct tar_parser *parser, uint64_t position);

/* One step. `bytes` are the `available` bytes of the shard from parser->position on; `at_end`: there are no
 * more behind them.
 *
 * TAR_MEMBER: `*member` is a regular file; position is then behind its padded data, which need not be
 *             available.
 * TAR_MORE:   nothing was found yet; call again with at least `*need` bytes from position on, which may have
 *             moved. Never with `at_end`.
 * TAR_END:    the shard has ended: from the blocks of zeros to its last byte there is nothing but zeros.
 *
 * STATUS_FAILED with a message that begins with the offset in the shard; the caller puts the shard's name
 * before it. A shard without its blocks of zeros was cut, and fails. So does one with data after them: a page
 * of it was zeroed, or it is several archives one after the other. The end is seen only with `at_end`, or
 * where the shard's size is known. */
enum status tar_next(struct tar_parser *parser, const uint8_t *bytes, size_t available, bool at_end,
                     struct tar_member *member, enum tar_step *step, size_t *need);

/* Bytes of zeros behind data of this size, up to the next block. */
static inline size_t tar_padding(uint64_t size)
{
    return (size_t)(-size % TAR_BLOCK_BYTES);
}

/* Fills the header of a regular file: ustar, mode 0444, owner 0, time 0, so that equal contents are equal
 * bytes. STATUS_FAILED where the name is empty or longer than TAR_NAME_FIELD, or the size is 8 GiB or more.
 */
enum status tar_header(uint8_t block[TAR_BLOCK_BYTES], const char *name, uint64_t size);

/* The same for a name of up to TAR_NAME_MAX bytes: one that is longer than TAR_NAME_FIELD stands in front, as
 * GNU tar writes it, and no byte of it is lost. `*count` becomes the bytes that are filled. */
#define TAR_HEADERS_MAX (2 * TAR_BLOCK_BYTES + (TAR_NAME_MAX / TAR_BLOCK_BYTES + 1) * TAR_BLOCK_BYTES)
enum status tar_headers(uint8_t bytes[TAR_HEADERS_MAX], const char *name, uint64_t size, size_t *count);

FDSL_C_END

#endif
