/* Files of tensors: NumPy (.npy, .npz), safetensors, and PyTorch (.pt, .pth, .pth.tar). An open file lists
 * its tensors with their names, types, shapes and positions. The values stay in the file. */
#ifndef FDSL_DATA_TENSOR_FILE_H
#define FDSL_DATA_TENSOR_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include "core/dtype.h"
#include "core/portable.h"
#include "core/status.h"

#define TENSOR_AXES_MAX 8

/* How values are stored, as far as this program reads them. */
enum tensor_code {
    TENSOR_OTHER, /* not read */
    TENSOR_PLAIN, /* f32, f16 or bf16, as struct tensor.dtype says */
    TENSOR_F64,
    TENSOR_FP8,  /* fp8 e4m3fn */
    TENSOR_FP4,  /* fp4 e2m1; two values share a byte, the first one in the low four bits */
    TENSOR_E8M0, /* powers of two: an exponent of 8 bits with bias 127 */
    TENSOR_BYTES /* u8 */
};

/* A member of a zip archive. */
struct zip_member {
    const char *name;
    uint64_t begin;          /* offset of its local header */
    uint64_t offset, stored; /* position of its data in the file */
    uint64_t bytes;          /* size of its data after unpacking */
    uint32_t crc;            /* of the unpacked data; files of torch.save() may have a wrong one */
    unsigned method;         /* 0: not compressed */
};

/* A tensor in C order. */
struct tensor {
    char *name;    /* owned; "" if the format has no names */
    char type[24]; /* the file's name of the type, for messages */
    bool real;     /* a floating-point type, whether it is read or not */
    enum tensor_code code;
    enum dtype dtype; /* f32, f16 or bf16; only for TENSOR_PLAIN */
    uint32_t axes;    /* at most TENSOR_AXES_MAX unless `fault` is set */
    uint64_t shape[TENSOR_AXES_MAX];
    uint64_t offset, bytes;   /* position of the values in the file. If tensor_is_packed(), the offset is
                                 UINT64_MAX, which tensor_file_read() refuses */
    struct zip_member member; /* only in a .npz: the member that has the values at its end; without a name */
    const char *fault;        /* why the values cannot be read, with a remedy; NULL: they can be */
};

struct tensor_file {
    const char *path; /* owned by the caller */
    int fd;
    uint64_t bytes;   /* size of the file */
    struct stat info; /* of the file, before anything was read */
    struct tensor *tensors;
    size_t count;
    bool prepared;           /* a .safetensors that --prepare --from embeddings wrote */
    uint64_t packed_columns; /* its values per row, if its metadata has them, else 0 */
    char *notes;             /* owned; metadata of a .safetensors: for tensor_file_note() */
    uint64_t skipped;        /* of a file of torch.save(): tensors and arrays in objects that are not read */
};

FDSL_C_BEGIN

/* Returns whether the name ends in .npy, .npz, .safetensors, .pt, .pth or .pth.tar. */
bool tensor_file_named(const char *path);

/* Opens a file and lists its tensors. The name decides the format. The caller closes the file, even after a
 * failure. STATUS_FAILED with the path and the reason; STATUS_UNAVAILABLE in builds without the library that
 * the format needs. */
enum status tensor_file_open(const char *path, struct tensor_file *file);
void tensor_file_close(struct tensor_file *file);

/* Returns the value of a key in the metadata of a .safetensors, or NULL. */
const char *tensor_file_note(const struct tensor_file *file, const char *key);

/* Returns whether the values are compressed, so that they must be read with tensor_read(). */
bool tensor_is_packed(const struct tensor *tensor);

/* Reads all values of a tensor, tensor->bytes bytes, and checks the CRC of a .npz. If `values` is NULL, only
 * checks the CRC. STATUS_FAILED with the reason, without the path. */
enum status tensor_read(const struct tensor_file *file, const struct tensor *tensor, void *values);

/* ---- For the readers of the formats ---- */

/* Reads `count` bytes at `offset`. STATUS_FAILED if the file ends before. */
enum status tensor_file_read(const struct tensor_file *file, uint64_t offset, void *bytes, size_t count);

/* Adds a tensor to the list and takes ownership of its name, even after a failure. A name that is NULL counts
 * as out of memory. */
enum status tensor_file_add(struct tensor_file *file, const struct tensor *tensor);

/* Multiplies the lengths of the axes. Returns false if the product exceeds 2^62. */
bool tensor_values(const uint64_t *shape, uint32_t axes, uint64_t *values);

/* ---- safetensors ----
 * The format that PyTorch, JAX and other programs read: a length (8 bytes, little-endian), a JSON header with
 * names, types, shapes and offsets, then the values. */

/* A tensor in C order. Names and strings must not need JSON escapes. */
struct safetensor {
    char name[64];
    const char *type; /* "F32", "I64", "U8" */
    uint32_t axes;    /* 0: a scalar */
    uint64_t shape[5];
    const void *values;
    size_t bytes;
};

/* Writes a file atomically. `about` is the metadata: alternating keys and values, then NULL; the first key is
 * "fdsl-bench". STATUS_FAILED with the reason if writing fails. */
enum status safetensors_write(const char *path, const char *const about[], const struct safetensor *tensors,
                              size_t count);

/* Formats what precedes the values in such a file: the length, and the header. The caller frees `*header`.
 * The values of `tensors` are not used. STATUS_EXHAUSTED if memory runs out. */
enum status safetensors_header(const char *const about[], const struct safetensor *tensors, size_t count,
                               char **header, size_t *size);

/* Checks that safetensors_write() can write `path` without destroying other data. An existing file must be
 * empty or begin with the header of safetensors_header(). STATUS_USAGE with the reason and a remedy. */
enum status safetensors_check(const char *path);

/* Lists the tensors of an open file. STATUS_FAILED with the reason; STATUS_UNAVAILABLE in builds without
 * jansson. The header may have at most 100 MB. Its names must be unique, and its tensors must follow one
 * another without holes until the end of the file. */
enum status safetensors_list(struct tensor_file *file);

/* ---- Zip archives, NumPy's .npz ---- */

struct zip {
    struct zip_member *members; /* sorted by name */
    size_t count;
    char *directory; /* owned; names point into it */
};

/* Reads the central directory, and checks that it agrees with the members' local headers. Supports zip64.
 * Refuses members that are encrypted, outside the file, overlapping, or named twice, and names that lead out
 * of a folder. Also refuses members that are compressed, except with deflate if `deflated` is set. Neither
 * unpacks members nor checks their CRCs. The caller frees `zip`, even after a failure. STATUS_FAILED with the
 * reason. */
enum status zip_list(const struct tensor_file *file, bool deflated, struct zip *zip);
void zip_free(struct zip *zip);

/* Returns the member of this name, or NULL. */
const struct zip_member *zip_find(const struct zip *zip, const char *name);

/* Lists the arrays of an open .npz in the order in which the archive stores them. An array has the name of
 * its member, without ".npy". An array whose type is not read has a fault. STATUS_FAILED with the reason;
 * STATUS_UNAVAILABLE in builds without zlib. */
enum status npz_list(struct tensor_file *file);

struct npy_header;

/* ---- Files of torch.save() ---- */

/* Lists the tensors of an open file, in the order of the pickle. The file is a zip archive with a pickle and
 * one member per storage, or has the format before PyTorch 1.6. The pickle may contain tensors, and nested
 * dicts, lists and tuples of tensors. The name of a tensor consists of the keys and indexes that lead to it,
 * separated by dots: "layers.0". The name is "" if the pickle is a single tensor. Nothing is executed. Plain
 * objects that training scripts save beside tensors (argparse.Namespace, pathlib.Path and the others of
 * `plain_objects`) are skipped with their contents; the reader of the pickle refuses everything else.
 * STATUS_FAILED with the reason. */
enum status torch_list(struct tensor_file *file);

/* The second half of torch_list(), for tests: lists the tensors in a pickle. The members of the archive that
 * store the values are named `prefix`data/KEY. */
enum status torch_list_pickle(const uint8_t *bytes, size_t size, const struct zip *zip, const char *prefix,
                              struct tensor_file *file);

FDSL_C_END

#endif
