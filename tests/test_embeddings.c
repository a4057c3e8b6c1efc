/* Tests the readers of files of embeddings (.npy, .safetensors, .pt): values, order of files, and refusal of
 * bad files with one message that names the file. */
#include <criterion/criterion.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "core/half.h"
#include "data/embeddings.h"
#include "data/npy.h"
#include "data/safetensors.h"
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

TestSuite(embeddings, .init = set_up, .fini = tear_down, .timeout = 60);

/* ---- Writing files ---- */

static void put(const char *path, const void *bytes, size_t size)
{
    cr_assert_eq(file_write_atomic(path, bytes, size), STATUS_OK, "%s", status_text());
}

/* Fills `blob` with a .npy file. */
static void make_npy(struct blob *blob, const char *type, const char *shape, const void *data, size_t bytes)
{
    char header[NPY_HEADER_MAX];
    blob->count = 0;
    blob_add(blob, header, npy_header_make(header, type, shape));
    blob_add(blob, data, bytes);
}

static struct blob blob;
static struct archive archive;

static void put_npy(const char *path, const char *type, const char *shape, size_t bytes)
{
    make_npy(&blob, type, shape, values, bytes);
    put(path, blob.bytes, blob.count);
}

/* Writes the safetensors file with this header and `bytes` bytes of values. */
static void put_header(const char *path, const char *header, size_t bytes)
{
    blob.count = 0;
    blob_number(&blob, strlen(header), 8);
    blob_text(&blob, header);
    blob_add(&blob, values, bytes);
    put(path, blob.bytes, blob.count);
}

/* Writes an archive with the pickle in `blob`, and a storage "0" with `count` values of f32. */
static void put_torch(const char *path, size_t count)
{
    archive_begin(&archive);
    archive_add(&archive, "x/data.pkl", blob.bytes, blob.count);
    archive_add(&archive, "x/data/0", values, count * sizeof *values);
    archive_end(&archive);
    put(path, archive.file.bytes, archive.file.count);
}

/* Writes the file of a tensor of shape (rows, columns). */
static void put_tensor(const char *path, int rows, int columns)
{
    const struct written tensor = {"FloatStorage", "0", rows * columns, 0, rows, columns};
    pickle_begin(&blob);
    pickle_tensor(&blob, &tensor);
    blob_text(&blob, ".");
    put_torch(path, (size_t)(rows * columns));
}

/* ---- Checks ---- */

static struct embeddings *open_well(const char *path, const char *tensor)
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
static void expect_set(const char *path, const char *tensor, uint64_t rows, uint32_t columns, size_t parts)
{
    struct embeddings *set = open_well(path, tensor);
    cr_assert(set->rows == rows && set->columns == columns && set->part_count == parts,
              "%s: %u columns, %llu rows, %zu parts", path, set->columns, (unsigned long long)set->rows,
              set->part_count);
    embeddings_close(set);
}

/* Checks that all parts of a set together have the f32 values 0, 1, 2, ... */
static void expect_counting(const char *path, uint64_t rows, uint32_t columns)
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
static void expect_refusal(const char *path, const char *tensor, enum status wanted, const char *name,
                           const char *words)
{
    struct embeddings *set = NULL;
    enum status status = embeddings_open(path, tensor, &set);
    cr_assert(status == wanted && !set, "%s: status %d", path, (int)status);
    cr_assert(strstr(status_text(), name) && strstr(status_text(), words), "%s: %s", path, status_text());
}

static void expect_bad(const char *path, const char *words)
{
    expect_refusal(path, "", STATUS_FAILED, path, words);
}

/* ---- Round trips ---- */

Test(embeddings, npy)
{
    put_npy("a.npy", "<f4", "3, 5", 60);
    expect_counting("a.npy", 3, 5);
    put_npy("row.npy", "<f4", "7,", 28);
    expect_counting("row.npy", 1, 7);
    put_npy("empty.npy", "<f4", "0, 5", 0);
    expect_counting("empty.npy", 0, 5);
    put_npy("large.npy", "<f4", "40, 1000", 160000); /* mapped, not copied */
    expect_counting("large.npy", 40, 1000);
    put_npy("half.npy", "<f2", "1, 65536", 131072);
    struct embeddings *set = open_well("half.npy", "");
    cr_assert(set->dtype == DTYPE_F16 && set->rows == 1 && set->columns == 65536);
    cr_assert_eq(memcmp(set->parts[0].values, values, 131072), 0);
    embeddings_close(set);
}

#ifdef HAVE_JANSSON
Test(embeddings, safetensors)
{
    struct safetensor tensors[] = {
        {"b", "F32", 2, {2, 5}, values, 40},  {"a", "F32", 2, {1, 5}, values + 10, 20},
        {"ids", "I64", 1, {3}, values, 24},   {"scale", "F32", 1, {5}, values, 20},
        {"scalar", "F32", 0, {0}, values, 4}, {"half", "BF16", 2, {2, 3}, values, 12},
    };
    const char *const about[] = {"fdsl-bench", "test", "note", "x", NULL};
    cr_assert_eq(safetensors_write("two.safetensors", about, tensors, 5), STATUS_OK, "%s", status_text());
    expect_counting("two.safetensors", 3, 5);
    expect_set("two.safetensors", "a", 1, 5, 1);
    expect_set("two.safetensors", "[ab]", 3, 5, 2);
    expect_set("two.safetensors", "scale", 1, 5, 1);
    expect_refusal("two.safetensors", "z*", STATUS_FAILED, "two.safetensors", "'b' (F32, 2 axes)");
    expect_refusal("two.safetensors", "ids", STATUS_FAILED, "'ids'", "type I64");
    expect_refusal("two.safetensors", "scalar", STATUS_FAILED, "'scalar'", "0 axes");
    cr_assert_eq(safetensors_write("six.safetensors", about, tensors, 6), STATUS_OK, "%s", status_text());
    expect_refusal("six.safetensors", "", STATUS_FAILED, "half", "one type");
    struct embeddings *set = open_well("six.safetensors", "half");
    cr_assert(set->dtype == DTYPE_BF16 && set->rows == 2 && set->columns == 3);
    embeddings_close(set);
}

/* One header has an odd length, and its tensors are not in the order of their data. */
Test(embeddings, safetensors_of_other_writers)
{
    put_header("odd.safetensors",
               "{\"b\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[8,16]}, \"__metadata__\":{},"
               "\"a\":{\"shape\":[1,2],\"dtype\":\"F32\",\"data_offsets\":[0,8]},"
               "\"e\":{\"dtype\":\"F32\",\"shape\":[0,2],\"data_offsets\":[8,8]}}   ",
               16);
    expect_counting("odd.safetensors", 2, 2);
    put_header("new.safetensors",
               "{\"a\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]},"
               "\"b\":{\"dtype\":\"F4\",\"shape\":[2,2],\"data_offsets\":[8,10]}}",
               10);
    expect_counting("new.safetensors", 1, 2);
    expect_refusal("new.safetensors", "b", STATUS_FAILED, "new.safetensors: tensor 'b'", "type F4");
}

#endif

Test(embeddings, torch)
{
    put_tensor("a.pt", 3, 5);
    expect_counting("a.pt", 3, 5);
    put_tensor("row.pth", 7, 0);
    put_tensor("large.pt", 40, 1000);
    expect_counting("large.pt", 40, 1000);
    pickle_begin(&blob); /* {"a": tensor, "n": {3: [tensor, (tensor,)]}}; the tensors share one storage */
    blob_text(&blob, "}(");
    pickle_text(&blob, "a");
    pickle_tensor(&blob, &(struct written){"FloatStorage", "0", 20, 0, 1, 5});
    pickle_text(&blob, "n");
    blob_text(&blob, "}");
    pickle_int(&blob, 3);
    blob_text(&blob, "](");
    pickle_tensor(&blob, &(struct written){"FloatStorage", "0", 20, 5, 2, 5});
    pickle_tensor(&blob, &(struct written){"FloatStorage", "0", 20, 15, 1, 5});
    blob_text(&blob, "\x85"
                     "esu.");
    put_torch("nested.pt", 20);
    expect_counting("nested.pt", 4, 5);
    expect_set("nested.pt", "n.3.1.0", 1, 5, 1);
    expect_set("nested.pt", "n.*", 3, 5, 2);
}

/* These files were written by PyTorch 2.11, from values 0, 1/8, 2/8, ... */
Test(embeddings, files_of_pytorch)
{
    static const struct {
        const char *name, *tensor;
        enum dtype dtype;
        uint64_t rows;
    } files[] = {{"tensor", "", DTYPE_F32, 3},        {"half", "", DTYPE_F16, 3}, {"bf16", "", DTYPE_BF16, 3},
                 {"dict", "", DTYPE_F32, 3},          {"list", "", DTYPE_F32, 3}, {"state", "", DTYPE_F32, 4},
                 {"dict", "embeddings", DTYPE_F32, 3}};
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        char path[2 * PATH_MAX];
        snprintf(path, sizeof path, "%s/tests/fuzz/torch/%s.pt", root, files[i].name);
        struct embeddings *set = open_well(path, files[i].tensor);
        cr_assert(set->dtype == files[i].dtype && set->rows == files[i].rows && set->columns == 5, "%s",
                  path);
        for (unsigned j = 0; j < 5 && strcmp(files[i].name, "state") != 0; j++) {
            uint16_t bits;
            float value;
            memcpy(&bits, set->parts[0].values + j * sizeof bits, sizeof bits);
            if (set->dtype == DTYPE_F32)
                memcpy(&value, set->parts[0].values + j * sizeof value, sizeof value);
            else
                value = set->dtype == DTYPE_F16 ? half_to_float(bits) : bf16_to_float(bits);
            cr_assert_eq(value, (float)j / 8, "%s", path);
        }
        embeddings_close(set);
    }
    char path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s/tests/fuzz/torch/transposed.pt", root);
    expect_bad(path, "save tensor.contiguous()");
}

/* ---- Several files ---- */

Test(embeddings, folders_patterns_and_lists)
{
    cr_assert_eq(system("mkdir -p d/sub d/.hidden 'd/a,b'"), 0);
    put_npy("d/1.npy", "<f4", "1, 5", 20);
    put_tensor("d/0.pt", 2, 5);
    put_npy("d/sub/3.npy", "<f4", "3, 5", 60);
    put_npy("d/.hidden/9.npy", "<f4", "3, 4", 48);
    put_npy("d/a,b/2.npy", "<f4", "4, 5", 80);
    put("d/readme.txt", "x", 1);
    struct embeddings *set = open_well("d", "");
    static const char *const order[] = {"d/0.pt", "d/1.npy", "d/a,b/2.npy", "d/sub/3.npy"};
    cr_assert(set->part_count == 4 && set->rows == 10);
    for (size_t i = 0; i < 4; i++)
        cr_assert_str_eq(set->parts[i].file, order[i]);
    embeddings_close(set);
    expect_set("d/sub,d/0.pt", "", 5, 5, 2);
    expect_set("d/*.npy,d/s*", "", 4, 5, 2);
    expect_set("d/a,b", "", 4, 5, 1);
    expect_refusal("d/x.npy", "", STATUS_USAGE, "d/x.npy", "No such file");
    expect_refusal("d/*.x", "", STATUS_USAGE, "d/*.x", "no file matches");
    expect_refusal("d/1.npy,,d/1.npy", "", STATUS_USAGE, "d/1.npy", "empty name");
    expect_refusal("d/readme.txt", "", STATUS_FAILED, "d/readme.txt", ".safetensors");
    cr_assert_eq(system("mkdir e; ln -s .. d/sub/up"), 0);
    expect_refusal("e", "", STATUS_USAGE, "e", "no file whose name ends in");
    expect_refusal("d", "", STATUS_USAGE, "d/sub/up", "links back");
}

Test(embeddings, one_type_and_number_of_columns)
{
    put_npy("a.npy", "<f4", "1, 5", 20);
    put_npy("b.npy", "<f4", "1, 4", 16);
    put_npy("c.npy", "<f2", "1, 5", 10);
    expect_refusal("a.npy,b.npy", "", STATUS_FAILED, "b.npy has 4 columns", "a.npy has 5 of f32");
    expect_refusal("a.npy,c.npy", "", STATUS_FAILED, "c.npy has 5 columns of f16", "a.npy has 5 of f32");
}

/* If a mapped file becomes shorter, reading a missing page must cause an error, not a signal. */
struct reading {
    const struct embeddings *set;
    volatile uint8_t last;
};

static void read_last(void *context)
{
    struct reading *reading = context;
    reading->last = reading->set->parts[0].values[159999];
}

Test(embeddings, a_file_that_shrinks)
{
    struct guard guard = {false};
    uint8_t byte;
    put_npy("large.npy", "<f4", "40, 1000", 160000);
    struct reading reading = {.set = open_well("large.npy", "")};
    cr_assert_eq(guard_open(&guard), STATUS_OK);
    cr_assert(guard_run(read_last, &reading));
    cr_assert(guard_copy(&byte, reading.set->parts[0].values + 159999, 1));
    cr_assert(byte == reading.last && byte == ((uint8_t *)values)[159999]);
    cr_assert_eq(embeddings_check_files(reading.set), STATUS_OK, "%s", status_text());
    cr_assert_eq(truncate("large.npy", 1000), 0);
    cr_assert_not(guard_run(read_last, &reading));
    cr_assert_not(guard_copy(&byte, reading.set->parts[0].values + 159999, 1));
    guard_close(&guard);
    cr_assert_eq(embeddings_check_files(reading.set), STATUS_FAILED);
    cr_assert(strstr(status_text(), "large.npy was changed") && strstr(status_text(), "has 1000 now"));
    embeddings_close((struct embeddings *)reading.set);
}

/* ---- Bad files ---- */

/* Expects that the file `whole` is refused if it is truncated at any byte. */
static void expect_truncated(const char *whole, const char *path)
{
    char *bytes;
    size_t size;
    expect_counting(whole, 3, 5);
    cr_assert_eq(file_read(whole, &bytes, &size), STATUS_OK);
    for (size_t cut = 0; cut < size; cut++) {
        FILE *file = fopen(path, "w"); /* file_write_atomic() would sync */
        cr_assert(file && fwrite(bytes, 1, cut, file) == cut && fclose(file) == 0);
        expect_bad(path, "");
    }
    free(bytes);
}

Test(embeddings, truncated_files)
{
    put_npy("a.npy", "<f4", "3, 5", 60);
    put_tensor("a.pt", 3, 5);
    expect_truncated("a.npy", "cut.npy");
    expect_truncated("a.pt", "cut.pt");
#ifdef HAVE_JANSSON
    const struct safetensor tensor = {"a", "F32", 2, {3, 5}, values, 60};
    const char *const about[] = {"fdsl-bench", "test", NULL};
    cr_assert_eq(safetensors_write("a.safetensors", about, &tensor, 1), STATUS_OK);
    expect_truncated("a.safetensors", "cut.safetensors");
#endif
}

Test(embeddings, bad_npy)
{
    static const struct {
        const char *type, *shape, *words;
        size_t bytes;
    } files[] = {
        {">f4", "3, 5", "big-endian", 60},
        {"|O", "3, 5", "type '|O' are not supported", 60},
        {"<V2", "3, 5", "type '<V2' are not supported", 30},
        {"<u2", "3, 5", "NumPy has no bfloat16", 30},
        {"<f8", "3, 5", "type <f8; convert", 120},
        {"<i4", "3, 5", "no tensor of float32", 60},
        {"<f4", "3, 5, 1", "no tensor of float32", 60},
        {"<f4", "", "no tensor of float32", 4},
        {"<f4", "3, 0", "0 columns", 0},
        {"<f4", "0, 65537", "65537 columns", 0},
        {"<f4", "3, 5", "requires", 64},
        {"<f4", "288230376151711744, 288230376151711744", "more values than any file", 64},
    };
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        put_npy("bad.npy", files[i].type, files[i].shape, files[i].bytes);
        expect_bad("bad.npy", files[i].words);
    }
    put_npy("bad.npy", "<f4", "3, 5", 60);
    blob.bytes[1] = 'X';
    put("bad.npy", blob.bytes, blob.count);
    expect_bad("bad.npy", "wrong magic");
    put_npy("bad.npy", "<f4", "3, 5", 60);
    char *order = memmem(blob.bytes, blob.count, "False", 5);
    memcpy(order, "True ", 5);
    put("bad.npy", blob.bytes, blob.count);
    expect_bad("bad.npy", "Fortran order");
    expect_refusal("bad.npy", "emb", STATUS_FAILED, "bad.npy", "--tensor 'emb'");
}

#ifdef HAVE_JANSSON
#define ENTRY(name, shape, offsets) \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

Test(embeddings, bad_safetensors)
{
    static const struct {
        const char *header, *words;
        size_t bytes;
    } files[] = {
        {"{" ENTRY("a", "[1,2]", "[0,8]") "," ENTRY("b", "[1,2]", "[4,12]") "}", "overlap", 12},
        {"{" ENTRY("a", "[1,2]", "[0,8]") "," ENTRY("b", "[1,2]", "[12,20]") "}", "hole", 20},
        {"{" ENTRY("a", "[1,2]", "[4,12]") "}", "hole", 12},
        {"{" ENTRY("a", "[1,2]", "[0,8]") "}", "16 bytes follow", 16},
        {"{" ENTRY("a", "[1,2]", "[0,8]") "}", "not inside the file", 4},
        {"{" ENTRY("a", "[1,2]", "[8,0]") "}", "not inside the file", 8},
        {"{" ENTRY("a", "[1,2]", "[-8,0]") "}", "not two counts", 8},
        {"{" ENTRY("a", "[1,2]", "[0,8.0]") "}", "not two counts", 8},
        {"{" ENTRY("a", "[1,2]", "[0,8,8]") "}", "not two counts", 8},
        {"{" ENTRY("a", "[1,3]", "[0,8]") "}", "3 values of type F32", 8},
        {"{" ENTRY("a", "[1,1]", "[0,8]") "}", "1 values of type F32", 8},
        {"{" ENTRY("a", "[1,-2]", "[0,8]") "}", "not a length", 8},
        {"{" ENTRY("a", "[4294967296,4294967296]", "[0,8]") "}", "more values than any file", 8},
        {"{" ENTRY("a", "[4611686018427387904]", "[0,0]") "}", "values of type F32", 0},
        {"{" ENTRY("a", "2", "[0,8]") "}", "not a list", 8},
        {"{" ENTRY("a", "[1,2]", "[0,8]") "," ENTRY("a", "[1,2]", "[8,16]") "}", "duplicate object key", 16},
        {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
         "duplicate object key", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", "its entry is not", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", "its entry is not", 8},
        {"{\"a\":3}", "its entry is not", 8},
        {"{\"__metadata__\":{\"a\":1}}", "__metadata__", 0},
        {"{\"__metadata__\":[]}", "__metadata__", 0},
        {"{\"__metadata__\":{}}", "no tensors", 0},
        {" {}", "does not begin with '{'", 0},
        {"{} x", "invalid JSON", 0},
        {"{\"a\xFF\":1}", "invalid JSON", 0},
        {"{\"a\\u0000\":1}", "invalid JSON", 0},
    };
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        put_header("bad.safetensors", files[i].header, files[i].bytes);
        expect_bad("bad.safetensors", files[i].words);
    }
    const uint64_t lengths[] = {100000001, UINT64_MAX};
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        put_header("bad.safetensors", "{}", 0);
        memcpy(blob.bytes, &lengths[i], sizeof *lengths);
        put("bad.safetensors", blob.bytes, blob.count);
        expect_bad("bad.safetensors", "at most 100000000 are allowed");
    }
    FILE *sparse = fopen("bad.safetensors", "r+");
    cr_assert(sparse && ftruncate(fileno(sparse), 200000000) == 0);
    cr_assert_eq(fwrite(lengths, sizeof *lengths, 1, sparse), 1);
    fclose(sparse);
    expect_bad("bad.safetensors", "its header has 100000001 bytes; at most 100000000 are allowed");
}

#endif

/* ---- Bad archives ---- */

static void put_archive(void)
{
    archive_end(&archive);
    put("bad.pt", archive.file.bytes, archive.file.count);
}

/* Begins the archive of a good tensor, to which a test adds a bad member. */
static void begin_tensor(void)
{
    pickle_begin(&blob);
    pickle_tensor(&blob, &(struct written){"FloatStorage", "0", 15, 0, 3, 5});
    blob_text(&blob, ".");
    archive_begin(&archive);
    archive_add(&archive, "x/data.pkl", blob.bytes, blob.count);
    archive_add(&archive, "x/data/0", values, 60);
}

Test(embeddings, archives_with_bad_members)
{
    static const char *const names[] = {"../x", "/x",   "x/../../y", "x/./y", "x//y", "x/",
                                        "a\\b", "a\nb", "..",        "",      ".",    "x/.."};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        begin_tensor();
        archive_add(&archive, names[i], "", 0);
        put_archive();
        expect_bad("bad.pt", "not a plain path");
    }
    begin_tensor();
    archive_add(&archive, "x/data/0", values, 60);
    put_archive();
    expect_bad("bad.pt", "two members named 'x/data/0'");
    begin_tensor();
    archive.method = 8;
    archive_add(&archive, "x/bomb", values, 60);
    put_archive();
    expect_bad("bad.pt", "'x/bomb' is compressed (method 8");
    begin_tensor();
    archive_list(&archive, "x/data/1", 0, 60); /* the local header at offset 0 has the name of data.pkl */
    put_archive();
    expect_bad("bad.pt", "differs from its local header");
    begin_tensor();
    archive_list(&archive, "x/data/1", archive.file.count + 1000, 60);
    put_archive();
    expect_bad("bad.pt", "outside the archive");
    begin_tensor();
    archive_add(&archive, "y/data.pkl", blob.bytes, blob.count);
    put_archive();
    expect_bad("bad.pt", "more than one data.pkl");
    begin_tensor();
    archive_add(&archive, "x/byteorder", "big", 3);
    put_archive();
    expect_bad("bad.pt", "big-endian");
    archive_begin(&archive);
    put_archive();
    expect_bad("bad.pt", "no FOLDER/data.pkl");
}

/* The data of member x/out contain the member x/in with its local header. */
Test(embeddings, archives_with_overlapping_members)
{
    static struct archive inner;
    begin_tensor();
    archive_begin(&inner);
    archive_add(&inner, "x/in", "1234", 4);
    size_t begin = archive.file.count + 30 + strlen("x/out");
    archive_add(&archive, "x/out", inner.file.bytes, inner.file.count);
    archive_list(&archive, "x/in", begin, 4);
    put_archive();
    expect_bad("bad.pt", "'x/out' and 'x/in' overlap");
}

/* Overwrites `count` bytes of a good archive with `number`. A negative offset is relative to the end. */
static void patch(long offset, uint64_t number, size_t count)
{
    begin_tensor();
    archive_end(&archive);
    uint8_t *at = offset < 0 ? archive.file.bytes + archive.file.count + offset : archive.file.bytes + offset;
    memcpy(at, &number, count);
    put("bad.pt", archive.file.bytes, archive.file.count);
}

Test(embeddings, archives_with_bad_records)
{
    begin_tensor();
    long first = (long)archive.file.count; /* offset of the central directory */
    patch(-22, 0, 1);
    expect_bad("bad.pt", "not a zip archive, or truncated");
    patch(-18, 1, 2);
    expect_bad("bad.pt", "record at its end is not valid");
    patch(-2, 1, 2);
    expect_bad("bad.pt", "record at its end is not valid");
    patch(-10, 0xFFFFFFF0, 4);
    expect_bad("bad.pt", "central directory of");
    patch(-6, 0, 4);
    expect_bad("bad.pt", "central directory of");
    patch(-14, 0x00010001, 4); /* the record gives one member; there are two */
    expect_bad("bad.pt", "lists more members");
    patch(-14, 0x00030003, 4);
    expect_bad("bad.pt", "cannot list 3 members");
    patch(first, 0, 1);
    expect_bad("bad.pt", "central directory is not valid");
    patch(first + 8, 1, 2);
    expect_bad("bad.pt", "encrypted");
    patch(first + 24, 0x7FFFFFFF, 4); /* the uncompressed size of a member */
    expect_bad("bad.pt", "compressed");
    patch(first + 20, 0x7FFFFFF07FFFFFF0, 8);
    expect_bad("bad.pt", "differs from its local header");
    patch(first + 28, 0xFFFF, 2);
    expect_bad("bad.pt", "central directory is not valid");
    patch(first + 42, 7, 4);
    expect_bad("bad.pt", "differs from its local header");
    patch(0, 0, 1);
    expect_bad("bad.pt", "differs from its local header");
    patch(28, 0xFFFF, 2); /* length of the extra field */
    expect_bad("bad.pt", "reaches beyond the end of the members");
}

/* ---- Bad pickles ---- */

/* The file has the opcode of the protocol before each pickle. `words` must be in the error message. */
Test(embeddings, bad_pickles)
{
    static const struct {
        const char *pickle;
        size_t bytes;
        const char *words;
    } files[] = {
#define PICKLE(text) text, sizeof text - 1
        {PICKLE("cos\nsystem\nX\x07\0\0\0touch x\x85R."), "'os.system', which is refused"},
        {PICKLE("cbuiltins\neval\nX\x01\0\0\0001\x85R."), "'builtins.eval', which is refused"},
        {PICKLE("ctorch._utils\n_rebuild_tensor_v3\n."),
         "'torch._utils._rebuild_tensor_v3', which is refused"},
        {PICKLE("ctorch\nFloatStorage\n)R."), "calls a type of storage"},
        {PICKLE("K\x01)R."), "calls a value that is not a Python object"},
        {PICKLE("ccollections\nOrderedDict\nK\x01\x85R."), "OrderedDict has arguments"},
        {PICKLE("ctorch._utils\n_rebuild_tensor_v2\n)R."), "not described as torch.save() does"},
        {PICKLE("ctorch._utils\n_rebuild_tensor_v2\n(K\0K\0K\0K\0K\0K\0tR."), "storage is not described"},
        {PICKLE("ctorch\nFloatStorage\n}b."), "sets attributes (BUILD)"},
        {PICKLE("(i__main__\nX\n."), "opcode INST"},
        {PICKLE("\x8c\x01x."), "opcode SHORT_BINUNICODE"},
        {PICKLE("\x82\x01."), "opcode EXT1"},
        {PICKLE("}\x81."), "opcode NEWOBJ"},
        {PICKLE("\xFF."), "unknown opcode 0xff"},
        {PICKLE("R."), "empty stack"},
        {PICKLE("(."), "empty stack"},
        {PICKLE("t."), "lacks a mark"},
        {PICKLE("(\x85."), "mark inside a tuple"},
        {PICKLE("h\x05."), "memo that is not set"},
        {PICKLE("Nq\0q\x01q\x02q\x03h\x04."), "memo that is not set"},
        {PICKLE("Nq\x01h\0."), "memo that is not set"},
        {PICKLE("Nr\xFF\xFF\xFF\xFF."), "memo that is too large"},
        {PICKLE("NK\x01"
                "a."),
         "not a list"},
        {PICKLE("](K\x01K\x02u."), "not a dict"},
        {PICKLE("}(K\x01u."), "not a dict"},
        {PICKLE("X\xFF\xFF\xFF\xFF."), "truncated"},
        {PICKLE("NN."), "after its end"},
        {PICKLE("N.N"), "after its end"},
        {PICKLE("}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u."), "the key 'a' twice"},
        {PICKLE("})K\x01s."), "neither a text nor an integer"},
        {PICKLE("]q\0h\0a."), "nested more than 32 deep"},
        {PICKLE("N."), "no tensors"},
#undef PICKLE
    };
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        pickle_begin(&blob);
        blob_add(&blob, files[i].pickle, files[i].bytes);
        put_torch("bad.pt", 15);
        expect_bad("bad.pt", files[i].words);
    }
    cr_assert_neq(access("x", F_OK), 0, "a pickle was executed");
    blob.count = 0;
    blob_text(&blob, "N.");
    put_torch("bad.pt", 15);
    expect_bad("bad.pt", "does not begin with a protocol");
    blob.count = 0;
    blob_add(&blob, "\x80\x04N.", 4);
    put_torch("bad.pt", 15);
    expect_bad("bad.pt", "protocol 4");
    put("bad.pt", "\x80\x02\x8A\x0A....", 8);
    expect_bad("bad.pt", "before 1.6");
}

/* Each list contains the previous list ten times, so a few hundred bytes describe 10^20 values. */
Test(embeddings, nested_lists_that_expand_are_refused)
{
    pickle_begin(&blob);
    blob_text(&blob, "(]q");
    blob_number(&blob, 0, 1);
    for (uint8_t level = 1; level <= 20; level++) {
        blob_text(&blob, "](");
        for (int i = 0; i < 10; i++) {
            blob_text(&blob, "h");
            blob_number(&blob, (uint64_t)level - 1, 1);
        }
        blob_text(&blob, "eq");
        blob_number(&blob, level, 1);
    }
    blob_text(&blob, "t.");
    put_torch("bad.pt", 15);
    expect_bad("bad.pt", "more than 4000000 values");
}

Test(embeddings, tensors_outside_their_storage)
{
    static const struct {
        struct written tensor;
        const char *words;
    } files[] = {
        {{"FloatStorage", "0", 15, 1, 3, 5}, "reach beyond its storage of 15 values"},
        {{"FloatStorage", "0", 15, 0, 4, 5}, "reach beyond its storage of 15 values"},
        {{"FloatStorage", "0", 15, 0, 2147483647, 2147483647}, "reach beyond its storage"},
        {{"FloatStorage", "0", 15, -1, 3, 5}, "not a count"},
        {{"FloatStorage", "0", 15, 0, -3, 5}, "not tuples of equal length"},
        {{"FloatStorage", "0", 16, 0, 3, 5}, "16 values of float32, but the member 'x/data/0' 60 bytes"},
        {{"FloatStorage", "0", -1, 0, 3, 5}, "storage is not described"},
        {{"FloatStorage", "1", 15, 0, 3, 5}, "no member 'x/data/1'"},
        {{"FloatStorage", "../0", 15, 0, 3, 5}, "no member 'x/data/../0'"},
        {{"HalfStorage", "0", 15, 0, 3, 5}, "15 values of float16"},
        {{"QInt8Storage", "0", 15, 0, 3, 5}, "'torch.QInt8Storage', which is refused"},
    };
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        pickle_begin(&blob);
        pickle_tensor(&blob, &files[i].tensor);
        blob_text(&blob, ".");
        put_torch("bad.pt", 15);
        expect_bad("bad.pt", files[i].words);
    }
}
