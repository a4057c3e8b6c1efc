/* Writes files as torch.save() does, without PyTorch: a zip archive of stored members, with a pickle of
 * protocol 2. Tests also use these functions to write archives and pickles that must be refused. */
#ifndef FDSL_TESTS_TORCH_WRITER_H
#define FDSL_TESTS_TORCH_WRITER_H

#include <criterion/criterion.h>

#include <stdint.h>
#include <string.h>

/* Bytes of a file or of a part of it. */
struct blob {
    uint8_t bytes[1 << 18];
    size_t count;
};

static inline void blob_add(struct blob *blob, const void *bytes, size_t count)
{
    cr_assert_leq(count, sizeof blob->bytes - blob->count);
    memcpy(blob->bytes + blob->count, bytes, count);
    blob->count += count;
}

static inline void blob_text(struct blob *blob, const char *text)
{
    blob_add(blob, text, strlen(text));
}

static inline void blob_number(struct blob *blob, uint64_t number, unsigned bytes)
{
    blob_add(blob, &number, bytes); /* little-endian, like this machine */
}

/* ---- Pickles ---- */

static inline void pickle_begin(struct blob *blob)
{
    blob->count = 0;
    blob_add(blob, "\x80\x02", 2);
}

static inline void pickle_text(struct blob *blob, const char *text)
{
    blob_text(blob, "X");
    blob_number(blob, strlen(text), 4);
    blob_text(blob, text);
}

static inline void pickle_int(struct blob *blob, int32_t number)
{
    blob_text(blob, "J");
    blob_number(blob, (uint32_t)number, 4);
}

/* A contiguous tensor. If `columns` is 0, the tensor has one axis, otherwise two. */
struct written {
    const char *storage, *key;
    int32_t values, first; /* number of values in the storage; index of the tensor's first value */
    int32_t rows, columns;
};

static inline void pickle_tensor(struct blob *blob, const struct written *tensor)
{
    blob_text(blob, "ctorch._utils\n_rebuild_tensor_v2\n((");
    pickle_text(blob, "storage");
    blob_text(blob, "ctorch\n");
    blob_text(blob, tensor->storage);
    blob_text(blob, "\n");
    pickle_text(blob, tensor->key);
    pickle_text(blob, "cpu");
    pickle_int(blob, tensor->values);
    blob_text(blob, "tQ");
    pickle_int(blob, tensor->first);
    pickle_int(blob, tensor->rows);
    if (tensor->columns) {
        pickle_int(blob, tensor->columns);
        blob_text(blob, "\x86");
        pickle_int(blob, tensor->columns);
        pickle_int(blob, 1);
        blob_text(blob, "\x86");
    } else {
        blob_text(blob, "\x85");
        pickle_int(blob, 1);
        blob_text(blob, "\x85");
    }
    blob_text(blob, "\x89"
                    "ccollections\nOrderedDict\n)RtR");
}

/* ---- Zip archives ---- */

struct archive {
    struct blob file, directory;
    unsigned members;
    uint16_t method; /* compression method of members that are added next; 0: stored */
};

static inline void archive_begin(struct archive *archive)
{
    archive->file.count = archive->directory.count = 0;
    archive->members = archive->method = 0;
}

/* Adds a record of the central directory. */
static inline void archive_list(struct archive *archive, const char *name, size_t begin, size_t size)
{
    struct blob *to = &archive->directory;
    blob_number(to, 0x02014B50, 4);
    blob_number(to, 0, 4); /* versions */
    blob_number(to, 0, 2); /* flags */
    blob_number(to, archive->method, 2);
    blob_number(to, 0, 8); /* time, CRC */
    blob_number(to, size, 4);
    blob_number(to, size, 4);
    blob_number(to, strlen(name), 2);
    blob_number(to, 0, 8); /* extra, comment, disk, attributes */
    blob_number(to, 0, 4); /* attributes */
    blob_number(to, begin, 4);
    blob_text(to, name);
    archive->members++;
}

static inline void archive_add(struct archive *archive, const char *name, const void *bytes, size_t count)
{
    struct blob *to = &archive->file;
    archive_list(archive, name, to->count, count);
    blob_number(to, 0x04034B50, 4);
    blob_number(to, 0, 4); /* version, flags */
    blob_number(to, archive->method, 2);
    blob_number(to, 0, 8); /* time, CRC */
    blob_number(to, count, 4);
    blob_number(to, count, 4);
    blob_number(to, strlen(name), 2);
    blob_number(to, 0, 2);
    blob_text(to, name);
    blob_add(to, bytes, count);
}

/* Completes archive->file: adds the central directory and the record at its end. */
static inline void archive_end(struct archive *archive)
{
    struct blob *to = &archive->file;
    size_t begin = to->count;
    blob_add(to, archive->directory.bytes, archive->directory.count);
    blob_number(to, 0x06054B50, 4);
    blob_number(to, 0, 4);
    blob_number(to, archive->members, 2);
    blob_number(to, archive->members, 2);
    blob_number(to, archive->directory.count, 4);
    blob_number(to, begin, 4);
    blob_number(to, 0, 2);
}

#endif
