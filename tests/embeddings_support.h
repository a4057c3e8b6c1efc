/* Shared by the suites that read sets of embeddings: writes files, and checks what the reader says about
 * them. */
#ifndef FDSL_TESTS_EMBEDDINGS_SUPPORT_H
#define FDSL_TESTS_EMBEDDINGS_SUPPORT_H

#include <criterion/criterion.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "core/dtype.h"
#include "data/embeddings.h"
#include "data/npy.h"
#include "data/tensor_file.h"
#include "folder.h"
#include "machine/guard.h"
#include "torch_writer.h"

static char folder[] = "/tmp/fdsl-embeddings-XXXXXX";
static char root[PATH_MAX]; /* the folder in which the tests were started */

static float values[40000]; /* 0, 1, 2, ... */

static void set_up(void)
{
    cr_assert_not_null(getcwd(root, sizeof root));
    enter_folder(folder);
    for (size_t i = 0; i < COUNT_OF(values); i++)
        values[i] = (float)i;
}

static void tear_down(void)
{
    leave_folder(folder);
}

/* ---- Writing files ---- */

static inline void put(const char *path, const void *bytes, size_t size)
{
    cr_assert_eq(file_write_atomic(path, bytes, size), STATUS_OK, "%s", status_text());
}

/* Fills `blob` with a .npy file. */
static inline void make_npy(struct blob *blob, const char *type, const char *shape, const void *data,
                            size_t bytes)
{
    char header[NPY_HEADER_MAX];
    blob->count = 0;
    blob_add(blob, header, npy_header_make(header, type, shape));
    blob_add(blob, data, bytes);
}

static struct blob blob;
static struct archive archive;

static inline void put_npy(const char *path, const char *type, const char *shape, size_t bytes)
{
    make_npy(&blob, type, shape, values, bytes);
    put(path, blob.bytes, blob.count);
}

/* Writes the safetensors file with this header and `bytes` bytes of values. */
static inline void put_header(const char *path, const char *header, size_t bytes)
{
    blob.count = 0;
    blob_number(&blob, strlen(header), 8);
    blob_text(&blob, header);
    blob_add(&blob, values, bytes);
    put(path, blob.bytes, blob.count);
}

/* Writes an archive with the pickle in `blob`, and a storage "0" with `count` values of f32. */
static inline void put_torch(const char *path, size_t count)
{
    archive_begin(&archive);
    archive_add(&archive, "x/data.pkl", blob.bytes, blob.count);
    archive_add(&archive, "x/data/0", values, count * sizeof *values);
    archive_end(&archive);
    put(path, archive.file.bytes, archive.file.count);
}

/* Writes the file of a tensor of shape (rows, columns). */
static inline void put_tensor(const char *path, int rows, int columns)
{
    const struct written tensor = {"FloatStorage", "0", rows * columns, 0, rows, columns};
    pickle_begin(&blob);
    pickle_tensor(&blob, &tensor);
    blob_text(&blob, ".");
    put_torch(path, (size_t)(rows * columns));
}

/* ---- Checks ---- */

static inline struct embeddings *open_well(const char *path, const char *tensor)
{
    struct embeddings *set;
    cr_assert_eq(embeddings_open(path, tensor, &set), STATUS_OK, "%s", status_text());
    uint64_t rows = 0;
    for (size_t i = 0; i < set->part_count; i++) {
        cr_assert_eq(set->parts[i].first, rows);
        rows += set->parts[i].rows;
    }
    cr_assert_eq(set->rows, rows);
    return set;
}

/* Opens a set and checks its size. */
static inline void expect_set(const char *path, const char *tensor, uint64_t rows, uint32_t columns,
                              size_t parts)
{
    struct embeddings *set = open_well(path, tensor);
    cr_assert(set->rows == rows && set->columns == columns && set->part_count == parts,
              "%s: %u columns, %llu rows, %zu parts", path, set->columns, (unsigned long long)set->rows,
              set->part_count);
    embeddings_close(set);
}

/* Checks that all parts of a set together have the f32 values 0, 1, 2, ... */
static inline void expect_counting(const char *path, uint64_t rows, uint32_t columns)
{
    struct embeddings *set = open_well(path, "");
    cr_assert(set->dtype == DTYPE_F32 && set->rows == rows && set->columns == columns);
    for (size_t i = 0; i < set->part_count; i++)
        cr_assert_eq(memcmp(set->parts[i].values, values + set->parts[i].first * columns,
                            set->parts[i].rows * columns * sizeof *values),
                     0, "%s: part %zu", path, i);
    embeddings_close(set);
}

/* Expects that a set cannot be opened, and that the message contains `name` and `words`. */
static inline void expect_refusal(const char *path, const char *tensor, enum status wanted, const char *name,
                                  const char *words)
{
    struct embeddings *set = NULL;
    enum status status = embeddings_open(path, tensor, &set);
    cr_assert(status == wanted && !set, "%s: status %d", path, (int)status);
    cr_assert(strstr(status_text(), name) && strstr(status_text(), words), "%s: %s", path, status_text());
}

static inline void expect_bad(const char *path, const char *words)
{
    expect_refusal(path, "", STATUS_FAILED, path, words);
}

#endif
