/* Tests the readers of files of embeddings (.npy, .safetensors, .pt): values, order of files, and refusal of
 * bad files with one message that names the file. */
#include "embeddings_support.h"

#include <fcntl.h>

TestSuite(embeddings, .init = set_up, .fini = tear_down, .timeout = 60);

/* ---- Round trips ---- */

Test(embeddings, npy_files_are_read)
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
Test(embeddings, safetensors_files_are_read)
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
Test(embeddings, safetensors_headers_of_other_writers_are_read)
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
    expect_set("new.safetensors", "a", 1, 2, 1);
    expect_refusal("new.safetensors", "", STATUS_FAILED, "new.safetensors: tensor 'b'",
                   "no tensor 'b_scale'");
    put_header("new.safetensors",
               "{\"a\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]},"
               "\"b\":{\"dtype\":\"F7\",\"shape\":[2,2],\"data_offsets\":[8,10]}}",
               10);
    expect_counting("new.safetensors", 1, 2); /* a type that this program does not know */
    expect_refusal("new.safetensors", "b", STATUS_FAILED, "new.safetensors: tensor 'b'", "type F7");
}

#endif

Test(embeddings, torch_files_are_read)
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
Test(embeddings, files_of_pytorch_are_read)
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

Test(embeddings, folders_patterns_and_lists_select_files)
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
    expect_refusal("d/1.npy,d/1.npy", "", STATUS_USAGE, "d/1.npy", "is named twice; name each file once");
    expect_refusal("d/1.npy,./d//1.npy", "", STATUS_USAGE, "./d//1.npy", "are the same file");
    expect_refusal("d,d/s*", "", STATUS_USAGE, "d/sub/3.npy", "is named twice");
    cr_assert_eq(system("ln -s ../1.npy d/sub/link.npy"), 0);
    expect_refusal("d/1.npy,d/sub", "", STATUS_USAGE, "'d/1.npy' and 'd/sub/link.npy'", "are the same file");
    cr_assert_eq(unlink("d/sub/link.npy"), 0);
    expect_refusal("d/readme.txt", "", STATUS_FAILED, "d/readme.txt", ".safetensors");
    cr_assert_eq(system("mkdir e; ln -s .. d/sub/up"), 0);
    expect_refusal("e", "", STATUS_USAGE, "e", "no file whose name ends in");
    expect_refusal("d", "", STATUS_USAGE, "d/sub/up", "links back");
}

Test(embeddings, files_of_different_types_or_columns_are_refused)
{
    put_npy("a.npy", "<f4", "1, 5", 20);
    put_npy("b.npy", "<f4", "1, 4", 16);
    put_npy("c.npy", "<f2", "1, 5", 10);
    expect_refusal("a.npy,b.npy", "", STATUS_FAILED, "b.npy: it has 4 values per row of f32",
                   "a.npy has 5 of f32");
    expect_refusal("a.npy,c.npy", "", STATUS_FAILED, "c.npy: it has 5 values per row of f16",
                   "a.npy has 5 of f32");
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

Test(embeddings, a_file_that_shrinks_is_an_error)
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

/* A file that is written again in place, with its time of modification set back, has another time of change.
 */
Test(embeddings, a_file_that_is_rewritten_is_an_error)
{
    struct stat info;
    put_npy("same.npy", "<f4", "40, 1000", 160000);
    struct embeddings *set = open_well("same.npy", "");
    cr_assert_eq(embeddings_check_files(set), STATUS_OK, "%s", status_text());
    cr_assert_eq(stat("same.npy", &info), 0);
    usleep(20000); /* the clock of files advances at intervals */
    put_npy("new.npy", "<f4", "40, 1000", 160000);
    cr_assert_eq(system("cat new.npy >same.npy"), 0);
    cr_assert_eq(utimensat(AT_FDCWD, "same.npy", (struct timespec[]){info.st_atim, info.st_mtim}, 0), 0);
    cr_expect_eq(embeddings_check_files(set), STATUS_FAILED);
    cr_expect(strstr(status_text(), "same.npy was changed"), "%s", status_text());
    embeddings_close(set);
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
        FILE *file = fopen(path, "w"); /* file_write_atomic() would sync each file */
        cr_assert(file && fwrite(bytes, 1, cut, file) == cut && fclose(file) == 0);
        expect_bad(path, "");
    }
    free(bytes);
}

Test(embeddings, truncated_files_are_refused)
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

Test(embeddings, bad_npy_files_are_refused)
{
    static const struct {
        const char *type, *shape, *words;
        size_t bytes;
    } files[] = {
        {">f4", "3, 5", "big-endian", 60},
        {"|O", "3, 5", "type '|O' are not supported", 60},
        {"<V2", "3, 5", "type '<V2' are not supported", 30},
        {"<u2", "3, 5", "NumPy has no bfloat16", 30},
        {"<f16", "3, 5", "type <f16; convert", 240},
        {"<i4", "3, 5", "no floating-point tensor", 60},
        {"<f4", "3, 5, 1", "no floating-point tensor", 60},
        {"<f4", "", "no floating-point tensor", 4},
        {"<f4", "3, 0", "0 values per row", 0},
        {"<f4", "0, 65537", "65537 values per row", 0},
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

Test(embeddings, bad_safetensors_files_are_refused)
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
        expect_bad("bad.safetensors", "not a safetensors file, or truncated");
    }
    FILE *sparse = fopen("bad.safetensors", "r+");
    cr_assert(sparse && ftruncate(fileno(sparse), 200000000) == 0);
    cr_assert_eq(fwrite(lengths, sizeof *lengths, 1, sparse), 1);
    fclose(sparse);
    expect_bad("bad.safetensors", "its header has 100000001 bytes; at most 100000000 are allowed");
}

#endif
