/* Tests formats of embeddings whose rows are decoded: float64, .npz, fp8, NVFP4 and MXFP4. Files in
 * tests/data/embeddings/ were written by NumPy, ml_dtypes and safetensors, which also computed the values. */
#include "embeddings_support.h"

#include <math.h>
#ifdef HAVE_ZLIB
#include <zlib.h>
#endif

TestSuite(embedding_formats, .init = set_up, .fini = tear_down, .timeout = 60);

/* ---- Values ---- */

/* Returns e2m1 code `code` as the OCP Microscaling Formats specification lists it in table 5. */
static double e2m1(unsigned code)
{
    static const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
}

/* Returns e4m3 code `code` by the definition in section 5.1 of the OCP 8-bit floating point specification. */
static double e4m3(unsigned code)
{
    int exponent = (int)(code >> 3 & 15), mantissa = (int)(code & 7);
    double magnitude = exponent ? ldexp(1 + mantissa / 8.0, exponent - 7) : ldexp(mantissa / 8.0, -6);
    magnitude = exponent == 15 && mantissa == 7 ? (double)NAN : magnitude;
    return code & 0x80 ? -magnitude : magnitude;
}

/* Returns e8m0 code `code` by the definition in section 5.4.1 of the Microscaling Formats specification. */
static double e8m0(unsigned code)
{
    return code == 255 ? (double)NAN : ldexp(1, (int)code - 127);
}

/* Compares with the sign of zeros; all NaNs are equal. */
static bool same_value(double one, double two)
{
    return (isnan(one) && isnan(two)) || (one == two && signbit(one) == signbit(two));
}

Test(embedding_formats, all_codes_have_the_values_of_the_specifications)
{
    static const float tensor_scales[] = {1, 0.0123F, 3e-39F, 1e36F};
    for (unsigned code = 0; code < 256; code++) {
        cr_expect(same_value((double)fp8_to_float((uint8_t)code), e4m3(code)), "fp8 %u", code);
        cr_expect(same_value((double)mxfp4_scale_value((uint8_t)code), e8m0(code)), "e8m0 %u", code);
        for (unsigned four = 0; four < 16; four++) {
            double value = (double)(float)(e2m1(four) * e8m0(code)); /* the product is exact in double */
            float found = mxfp4_value((uint8_t)four, (uint8_t)code);
            cr_expect(same_value((double)found, value) && (code != 255 || float_bits(found) == 0x7FFFFFFF),
                      "%u %u", four, code);
            for (size_t i = 0; i < COUNT_OF(tensor_scales); i++) {
                value = (double)(float)(e2m1(four) * e4m3(code) * (double)tensor_scales[i]);
                found = nvfp4_value((uint8_t)four, (uint8_t)code, tensor_scales[i]);
                cr_expect(same_value((double)found, value) &&
                              ((code & 127) != 127 || float_bits(found) == 0x7FFFFFFF),
                          "%u %u %g", four, code, (double)tensor_scales[i]);
            }
        }
    }
}

/* Every tie between two floats must be rounded to the even one, and its neighbours to the nearest one. */
Test(embedding_formats, float64_is_rounded_to_nearest_even)
{
    for (uint32_t bits = 1; bits < 0x7F800000; bits += 0x10001 + bits % 7) {
        double low = (double)float_from_bits(bits), high = (double)float_from_bits(bits + 1);
        if (bits + 1 == 0x7F800000)
            high = 0x1p128; /* the first value beyond the largest float */
        double middle = low + (high - low) / 2, even = bits % 2 ? (double)float_from_bits(bits + 1) : low;
        for (int sign = -1; sign <= 1; sign += 2) {
            cr_assert_eq((double)float_from_double(sign * middle), sign * even, "%x", bits);
            cr_assert_eq((double)float_from_double(sign * nextafter(middle, 0)), sign * low, "%x", bits);
            cr_assert_eq((double)float_from_double(sign * nextafter(middle, INFINITY)),
                         sign * (double)float_from_bits(bits + 1), "%x", bits);
        }
    }
    cr_assert_eq(float_from_double(0x1.fffffefffffffp127), 0x1.fffffep127F);
    cr_assert_eq(float_from_double(0x1.ffffffp127), INFINITY);
    cr_assert_eq(float_bits(float_from_double(-(double)NAN)), 0x7FFFFFFF);
}

/* ---- Files of other programs ---- */

static const char *golden(const char *name)
{
    static char paths[2][2 * PATH_MAX];
    static int next;
    next ^= 1;
    snprintf(paths[next], sizeof paths[next], "%s/tests/data/embeddings/%s", root, name);
    return paths[next];
}

/* Expects that embeddings_read() reads the same rows from files as embeddings_decode() from mappings: all
 * rows, and some in the middle. */
static void expect_same_rows(const struct embeddings *set)
{
    const size_t bytes = embeddings_row_bytes(set);
    uint8_t *rows = malloc(set->rows * bytes), *row = malloc(bytes);
    for (uint64_t first = 0; first < 4 && first < set->rows; first++) {
        const uint64_t count = set->rows - first - first % 2;
        cr_assert_eq(embeddings_read(set, first, count, rows), STATUS_OK, "%s", status_text());
        for (uint64_t i = 0; i < count; i++) {
            embeddings_decode(set, first + i, row);
            cr_assert_eq(memcmp(rows + i * bytes, row, bytes), 0, "row %d", (int)(first + i));
        }
    }
    free(rows);
    free(row);
}

/* Expects that a set has the values in the file `wanted`, and that embeddings_decode() agrees. */
static void expect_values(const char *path, const char *tensor, const char *wanted,
                          enum embeddings_type stored, enum dtype dtype)
{
    struct embeddings *set = open_well(path, tensor), *wanted_set = open_well(wanted, "");
    float row[128], expected[128];
    uint16_t halves[128];
    cr_assert(set->stored == stored && set->dtype == dtype && set->columns == wanted_set->columns &&
                  set->rows == wanted_set->rows && set->columns <= COUNT_OF(row),
              "%s", path);
    cr_assert(!embeddings_in_place(set) && !set->parts[0].values);
    expect_same_rows(set);
    for (uint64_t i = 0; i < set->rows; i++) {
        embeddings_row(set, i, row);
        embeddings_row(wanted_set, i, expected);
        if (dtype != DTYPE_F32)
            embeddings_decode(set, i, halves);
        for (uint32_t j = 0; j < set->columns; j++) {
            cr_assert(same_value((double)row[j], (double)expected[j]), "%s: row %d, value %u: %a, not %a",
                      path, (int)i, j, (double)row[j], (double)expected[j]);
            if (dtype != DTYPE_F32)
                cr_assert_eq(halves[j], dtype == DTYPE_F16 ? half_from_float(expected[j])
                                                           : bf16_from_float(expected[j]));
        }
    }
    embeddings_close(set);
    embeddings_close(wanted_set);
}

Test(embedding_formats, files_of_other_programs_are_decoded)
{
    expect_values(golden("f64_source.npy"), "", golden("f64.npy"), EMBEDDINGS_F64, DTYPE_F32);
#ifdef HAVE_ZLIB
    expect_values(golden("f64_stored.npz"), "", golden("f64.npy"), EMBEDDINGS_F64, DTYPE_F32);
    expect_values(golden("f64_packed.npz"), "e*", golden("f64.npy"), EMBEDDINGS_F64, DTYPE_F32);
#endif
#ifdef HAVE_JANSSON
    expect_values(golden("f64.safetensors"), "", golden("f64.npy"), EMBEDDINGS_F64, DTYPE_F32);
    expect_values(golden("fp8.safetensors"), "", golden("fp8.npy"), EMBEDDINGS_FP8, DTYPE_F16);
    expect_values(golden("mxfp4.safetensors"), "", golden("mxfp4.npy"), EMBEDDINGS_MXFP4, DTYPE_BF16);
    expect_values(golden("nvfp4.safetensors"), "*", golden("nvfp4.npy"), EMBEDDINGS_NVFP4, DTYPE_F32);
    /* The scales of fp4 are rows only if their whole name is given. */
    expect_set(golden("nvfp4.safetensors"), "emb_scale", 52, 5, 1);
    expect_refusal(golden("mxfp4.safetensors"), "emb_scale", STATUS_FAILED, "'emb_scale'", "type F8_E8M0");
    expect_refusal(golden("mxfp4.safetensors"), "*_*", STATUS_FAILED, "mxfp4", "no tensor matches");
#endif
}

/* Rows of files with one tensor per storage, as PyTorch writes them. */
Test(embedding_formats, float64_of_pytorch_is_read)
{
    static double doubles[15];
    for (int i = 0; i < 15; i++)
        doubles[i] = 1 + i * 0x1.8p-24;
    const struct written tensor = {"DoubleStorage", "0", 15, 5, 2, 5};
    pickle_begin(&blob);
    pickle_tensor(&blob, &tensor);
    blob_text(&blob, ".");
    archive_begin(&archive);
    archive_add(&archive, "x/data.pkl", blob.bytes, blob.count);
    archive_add(&archive, "x/data/0", doubles, sizeof doubles);
    archive_end(&archive);
    put("a.pt", archive.file.bytes, archive.file.count);
    struct embeddings *set = open_well("a.pt", "");
    cr_assert(set->stored == EMBEDDINGS_F64 && set->rows == 2 && set->columns == 5);
    for (uint64_t i = 0; i < 2; i++) {
        float row[5];
        embeddings_row(set, i, row);
        for (int j = 0; j < 5; j++)
            cr_expect_eq(row[j], (float)doubles[5 + 5 * i + (uint64_t)j]);
    }
    embeddings_close(set);
}

/* A mapped set of float64, which is decoded from the mapping. */
Test(embedding_formats, large_files_are_mapped)
{
    static double doubles[101][97];
    for (int i = 0; i < 101; i++)
        for (int j = 0; j < 97; j++)
            doubles[i][j] = sin(97 * i + j);
    make_npy(&blob, "<f8", "101, 97", doubles, sizeof doubles);
    put("large.npy", blob.bytes, blob.count);
    struct embeddings *set = open_well("large.npy", "");
    float row[97];
    expect_same_rows(set);
    for (int i = 100; i >= 0; i--) {
        embeddings_row(set, (uint64_t)i, row);
        for (int j = 0; j < 97; j++)
            cr_assert_eq(row[j], (float)doubles[i][j]);
    }
    embeddings_close(set);
    expect_refusal("large.npy,large.npy/x", "", STATUS_USAGE, "large.npy/x", "");
    put_npy("f32.npy", "<f4", "1, 97", 388);
    expect_refusal("f32.npy,large.npy", "", STATUS_FAILED, "large.npy: it has 97 values per row of f64",
                   "f32.npy has 97 of f32");
}

/* ---- Alignment ---- */

Test(embedding_formats, rows_are_padded_with_zeros)
{
    static const uint32_t multiples[] = {1, 2, 5, 7, 8, 16};
    put_npy("a.npy", "<f4", "3, 5", 60);
    for (size_t i = 0; i < COUNT_OF(multiples); i++) {
        struct embeddings *set = open_well("a.npy", "");
        uint32_t wanted = (5 + multiples[i] - 1) / multiples[i] * multiples[i];
        float row[17];
        cr_assert_eq(embeddings_align(set, multiples[i]), STATUS_OK);
        cr_assert(set->columns == wanted && embeddings_row_bytes(set) == wanted * sizeof *row);
        expect_same_rows(set);
        cr_assert(embeddings_in_place(set) == (wanted == 5) && !set->parts[0].values == (wanted != 5));
        for (uint64_t r = 0; r < 3; r++) {
            memset(row, 0xFF, sizeof row);
            embeddings_row(set, r, row);
            for (uint32_t j = 0; j < wanted; j++)
                cr_expect_eq(row[j], j < 5 ? (float)(5 * r + j) : 0, "row %d, value %u", (int)r, j);
            cr_expect_eq(float_bits(row[wanted]), UINT32_MAX, "written behind the end of the row");
        }
        embeddings_close(set);
    }
    put_npy("wide.npy", "<f2", "1, 65535", 131070);
    struct embeddings *set = open_well("wide.npy", "");
    cr_assert_eq(embeddings_align(set, 1000), STATUS_USAGE);
    cr_assert(strstr(status_text(), "at most 65536"), "%s", status_text());
    cr_assert_eq(embeddings_align(set, 16), STATUS_OK);
    cr_assert_eq(set->columns, 65536);
    embeddings_close(set);
}

/* A row of 16-bit values is widened in place. */
Test(embedding_formats, padded_rows_of_halves_are_widened)
{
    static const uint16_t halves[] = {0x3C00, 0xC000, 0x7BFF};
    make_npy(&blob, "<f2", "1, 3", halves, sizeof halves);
    put("a.npy", blob.bytes, blob.count);
    for (uint32_t multiple = 1; multiple <= 8; multiple *= 8) {
        struct embeddings *set = open_well("a.npy", "");
        float row[8] = {0};
        cr_assert_eq(embeddings_align(set, multiple), STATUS_OK);
        embeddings_row(set, 0, row);
        cr_expect(row[0] == 1 && row[1] == -2 && row[2] == 65504 && row[3] == 0 && row[7] == 0);
        embeddings_close(set);
    }
}

/* ---- Archives of NumPy ---- */

#ifdef HAVE_ZLIB

static const char *seed(const char *name)
{
    static char path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s/tests/fuzz/npz/%s", root, name);
    return path;
}

Test(embedding_formats, arrays_of_archives_are_selected_by_name)
{
    expect_set(seed("stored.npz"), "", 3, 5, 1);
    expect_set(seed("stored.npz"), "emb", 3, 5, 1);
    expect_refusal(seed("stored.npz"), "label", STATUS_FAILED, "'label'", "type <i8");
    expect_refusal(seed("packed.npz"), "", STATUS_FAILED, "'half': it has 5 values per row of f16",
                   "emb has 5 of f64");
    expect_set(seed("packed.npz"), "half", 3, 5, 1);
    expect_refusal(seed("packed.npz"), "names", STATUS_FAILED, "'names'", "not a plain array of numbers");
    expect_refusal(seed("packed.npz"), "o", STATUS_FAILED, "'o'", "not a plain array of numbers");
    expect_set(seed("empty.npz"), "", 0, 5, 1);
    expect_set(seed("streamed.npz"), "", 3, 5, 1);
    expect_set(seed("descriptor.npz"), "", 3, 5, 1);
    expect_set(seed("zeros.npz"), "", 50, 700, 1);
}

/* The arrays of this archive are compressed, and have more than 64 KiB together. They stay in order. */
Test(embedding_formats, compressed_arrays_are_unpacked)
{
    struct embeddings *set = open_well(golden("f16.npz"), "");
    cr_assert(set->part_count == 3 && set->rows == 331 && set->columns == 101 && set->dtype == DTYPE_F16);
    cr_assert(embeddings_in_place(set));
    expect_same_rows(set);
    for (uint64_t i = 0; i < set->rows; i++) {
        float row[101];
        embeddings_row(set, i, row);
        for (uint64_t j = 0; j < 101; j++)
            cr_assert_eq(row[j], (float)((101 * i + j) * 37 % 1009) / 8);
    }
    embeddings_close(set);
}

/* A large array that is not compressed is mapped. Its CRC is compared nevertheless. */
Test(embedding_formats, mapped_arrays_are_checked)
{
    make_npy(&blob, "<f4", "40, 1000", values, 160000);
    const uint32_t crc = (uint32_t)crc32(0, blob.bytes, (uInt)blob.count);
    archive_begin(&archive);
    archive_add(&archive, "a.npy", blob.bytes, blob.count);
    const size_t directory = archive.file.count;
    archive_end(&archive);
    put("a.npz", archive.file.bytes, archive.file.count); /* without a CRC */
    expect_bad("a.npz", "the archive lists 00000000");
    memcpy(archive.file.bytes + 14, &crc, sizeof crc);
    memcpy(archive.file.bytes + directory + 16, &crc, sizeof crc);
    put("a.npz", archive.file.bytes, archive.file.count);
    expect_counting("a.npz", 40, 1000);
    archive.file.bytes[directory - 1] ^= 1;
    put("a.npz", archive.file.bytes, archive.file.count);
    expect_bad("a.npz", "the file is damaged");
}

/* Inverts each byte of an archive in turn. The file is refused, or has the same values: some fields, such as
 * times, have no effect. */
static void expect_damage_is_found(const char *path, const char *tensor)
{
    char *bytes;
    size_t size, refused = 0;
    struct embeddings *set = open_well(path, tensor);
    cr_assert_eq(file_read(path, &bytes, &size), STATUS_OK);
    for (size_t at = 0; at < 2 * size; at++) {
        struct embeddings *damaged = NULL;
        const bool cut = at >= size;
        if (!cut)
            bytes[at] ^= 0x41;
        FILE *file = fopen("bad.npz", "w"); /* file_write_atomic() would sync each file */
        cr_assert(file && fwrite(bytes, 1, cut ? at - size : size, file) == (cut ? at - size : size));
        cr_assert_eq(fclose(file), 0);
        enum status status = embeddings_open("bad.npz", tensor, &damaged);
        refused += status != STATUS_OK;
        cr_assert(status == STATUS_OK || strncmp(status_text(), "bad.npz: ", 9) == 0, "%s", status_text());
        cr_assert(!cut || status == STATUS_FAILED, "cut at %zu", at - size);
        for (uint64_t i = 0; damaged && i < set->rows; i++) {
            float row[8], wanted[8];
            cr_assert(damaged->rows == set->rows && damaged->columns == set->columns, "byte %zu", at);
            embeddings_row(damaged, i, row);
            embeddings_row(set, i, wanted);
            cr_assert_eq(memcmp(row, wanted, set->columns * sizeof *row), 0, "byte %zu", at);
        }
        embeddings_close(damaged);
        if (!cut)
            bytes[at] ^= 0x41;
    }
    cr_assert(refused > size + size / 2, "only %zu of %zu faults were found", refused, 2 * size);
    free(bytes);
    embeddings_close(set);
}

Test(embedding_formats, damaged_archives_are_refused, .timeout = 120)
{
    expect_damage_is_found(seed("stored.npz"), "emb");
    expect_damage_is_found(seed("streamed.npz"), "emb");
    expect_damage_is_found(seed("descriptor.npz"), "emb");
}

/* Writes bad.npz with the array in `blob`, compressed, and these sizes, CRC and flags in its records. */
struct forged {
    uint64_t bytes;
    uint32_t crc;
    uint16_t flags, method;
    size_t cut;            /* bytes missing at the end of the compressed data */
    uint16_t local_method; /* in the local header, if it is not 0 */
    size_t more;           /* bytes that the records list in addition to those of the data */
};

static size_t pack(const struct blob *from, uint8_t *to, size_t room)
{
    z_stream stream = {0};
    cr_assert_eq(deflateInit2(&stream, 9, Z_DEFLATED, -MAX_WBITS, 9, Z_DEFAULT_STRATEGY), Z_OK);
    stream.next_in = (Bytef *)(uintptr_t)from->bytes;
    stream.avail_in = (uInt)from->count;
    stream.next_out = to;
    stream.avail_out = (uInt)room;
    cr_assert_eq(deflate(&stream, Z_FINISH), Z_STREAM_END);
    deflateEnd(&stream);
    return room - stream.avail_out;
}

static void put_forged(const struct forged *forged)
{
    static uint8_t packed[1 << 16];
    static struct blob file;
    size_t size = pack(&blob, packed, sizeof packed) - forged->cut, begin;
    file.count = 0;
    for (int central = 0; central < 2; central++) {
        if (central)
            begin = file.count;
        blob_number(&file, central ? 0x02014B50 : 0x04034B50, 4);
        blob_number(&file, 20, central ? 4 : 2);
        blob_number(&file, forged->flags, 2);
        blob_number(&file, !central && forged->local_method ? forged->local_method : forged->method, 2);
        blob_number(&file, 0, 4);
        blob_number(&file, forged->crc, 4);
        blob_number(&file, size + forged->more, 4);
        blob_number(&file, forged->bytes, 4);
        blob_number(&file, 5, 2);
        blob_number(&file, 0, 2);
        if (central) {
            blob_number(&file, 0, 8);
            blob_number(&file, 0, 2);
            blob_number(&file, 0, 4);
        }
        blob_text(&file, "a.npy");
        if (!central)
            blob_add(&file, packed, size);
    }
    size_t directory = file.count - begin;
    blob_number(&file, 0x06054B50, 4);
    blob_number(&file, 0, 4);
    blob_number(&file, 1, 2);
    blob_number(&file, 1, 2);
    blob_number(&file, directory, 4);
    blob_number(&file, begin, 4);
    blob_number(&file, 0, 2);
    put("bad.npz", file.bytes, file.count);
}

/* Bytes after the end of an archive are named, as far as a comment may reach. */
static void expect_end_is_found(void)
{
    enum { MOST = 70000 };
    static const size_t follow[] = {1, 22, 65535, 65536, MOST};
    FREED uint8_t *file = calloc(1, MOST + (1 << 16));
    cr_assert(file);
    archive_begin(&archive);
    make_npy(&blob, "<f4", "3, 5", values, 60);
    archive_add(&archive, "a.npy", blob.bytes, blob.count);
    archive_end(&archive);
    memcpy(file, archive.file.bytes, archive.file.count);
    for (size_t i = 0; i < COUNT_OF(follow); i++) {
        put("bad.npz", file, archive.file.count + follow[i]);
        expect_bad("bad.npz", follow[i] <= 65535
                                  ? "bytes before the end of the file: a comment or other bytes follow"
                                  : "no end record of an archive in its last 65557 bytes; write");
    }
}

Test(embedding_formats, hostile_archives_are_refused)
{
    make_npy(&blob, "<f4", "3, 5", values, 60);
    const uint32_t crc = (uint32_t)crc32(0, blob.bytes, (uInt)blob.count);
    const uint64_t size = blob.count;
    const struct {
        struct forged forged;
        const char *words;
    } cases[] = {
        {{size, crc + 1, 0, 8, 0, 0, 0}, "the file is damaged"},
        {{size - 1, crc, 0, 8, 0, 0, 0}, "header requires"},
        {{size + 1, crc, 0, 8, 0, 0, 0}, "its data ends after"},
        {{UINT32_MAX - 1, crc, 0, 8, 0, 0, 0},
         "cannot have 4294967294 bytes"},                   /* a zip bomb states its size */
        {{100, crc, 0, 8, 0, 0, 0}, "more than 100 bytes"}, /* or not */
        {{size, crc, 1, 8, 0, 0, 0}, "is encrypted; write the file without a password"},
        {{size, crc, 0, 12, 0, 0, 0}, "compressed (method 12, bzip2)"},
        {{size, crc, 0, 14, 0, 0, 0},
         "(method 14, LZMA); only stored and deflated members are read: write the file with numpy.savez()"},
        {{size, crc, 0x40, 8, 0, 0, 0}, "unknown flags (0x40); write the file again"},
        {{size, crc, 0, 0, 0, 0, 0}, "cannot have"},
        {{size, crc, 0, 8, 2, 0, 0}, "compressed data is damaged"},
        {{size, crc, 0, 8, 0, 1, 0}, "differs from its local header"},
        {{size, crc, 0, 8, 0, 0, 1}, "reaches beyond the end of the members"},
    };
    put_forged(&(struct forged){size, crc, 2, 8, 0, 0, 0}); /* the flags say how hard the writer tried */
    expect_counting("bad.npz", 3, 5);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        put_forged(&cases[i].forged);
        expect_bad("bad.npz", cases[i].words);
    }
    /* The header of the array describes fewer values than follow, or 2^60. */
    make_npy(&blob, "<f4", "2, 5", values, 60);
    put_forged(&(struct forged){blob.count, (uint32_t)crc32(0, blob.bytes, (uInt)blob.count), 0, 8, 0, 0, 0});
    expect_bad("bad.npz", "header requires");
    make_npy(&blob, "<f4", "1152921504606846976, 1", values, 60);
    put_forged(&(struct forged){blob.count, (uint32_t)crc32(0, blob.bytes, (uInt)blob.count), 0, 8, 0, 0, 0});
    expect_bad("bad.npz", "");
    expect_end_is_found();
    archive_begin(&archive);
    archive_end(&archive);
    put("bad.npz", archive.file.bytes, archive.file.count);
    expect_bad("bad.npz", "it has no tensors");
}

#else

Test(embedding_formats, archives_need_zlib)
{
    put("a.npz", "x", 1);
    expect_refusal("a.npz", "", STATUS_UNAVAILABLE, "a.npz", "install zlib");
}

#endif

/* ---- Faults in files of fp4 ---- */

#ifdef HAVE_JANSSON

#define F4      "\"e\":{\"dtype\":\"F4\",\"shape\":[2,32],\"data_offsets\":[0,32]}"
#define SCALE   "\"e_scale\":{\"dtype\":"
#define NV      SCALE "\"F8_E4M3\",\"shape\":[2,2],\"data_offsets\":[32,36]}"
#define PACKED  "\"embeddings\":{\"dtype\":\"U8\",\"shape\":[2,16],\"data_offsets\":[0,32]}"
#define META    "\"__metadata__\":{\"fdsl-bench\":\"embeddings\""
#define SCALES2 "\"scales\":{\"dtype\":\"U8\",\"shape\":[2,1],\"data_offsets\":[32,34]}"

Test(embedding_formats, bad_fp4_files_are_refused)
{
    static const struct {
        const char *header, *words;
        size_t bytes;
    } files[] = {
        {"{" F4 "}", "no tensor 'e_scale'", 32},
        {"{\"e\":{\"dtype\":\"F8_E4M3\",\"shape\":[2,16],\"data_offsets\":[0,32]},\"e_scale_inv\":"
         "{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[32,36]}}",
         "'e_scale_inv' seems to have their scales", 36},
        {"{" F4 "," NV "}", "a single F32 named 'e_scale_2'", 36},
        {"{" F4 "," NV ",\"e_scale_2\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[36,44]}}",
         "a single F32 named 'e_scale_2'", 44},
        {"{" F4 "," NV ",\"e_scale_2\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[36,40]}}",
         "a single F32 named 'e_scale_2'", 40},
        {"{" F4 "," SCALE "\"F8_E8M0\",\"shape\":[2,2],\"data_offsets\":[32,36]}}",
         "2 scales, but each block", 36},
        {"{" F4 "," SCALE "\"F8_E8M0\",\"shape\":[1,1],\"data_offsets\":[32,33]}}", "no tensor 'e_scale'",
         33},
        {"{" F4 "," SCALE "\"F8_E8M0\",\"shape\":[2],\"data_offsets\":[32,34]}}", "no tensor 'e_scale'", 34},
        {"{" F4 "," SCALE "\"F8_E5M2\",\"shape\":[2,1],\"data_offsets\":[32,34]}}", "type F8_E5M2", 34},
        {"{" F4 "," SCALE "\"U8\",\"shape\":[2,1],\"data_offsets\":[32,34]}}", "type U8", 34},
        {"{\"e\":{\"dtype\":\"F4\",\"shape\":[2,3],\"data_offsets\":[0,3]}," SCALE
         "\"F8_E8M0\",\"shape\":[2,1],\"data_offsets\":[3,5]}}",
         "odd number of fp4 values", 5},
        {"{\"e\":{\"dtype\":\"F4\",\"shape\":[3,3],\"data_offsets\":[0,5]}}", "9 values of type F4", 5},
        {"{\"e\":{\"dtype\":\"F8_E5M2\",\"shape\":[2,1],\"data_offsets\":[0,2]}}", "type F8_E5M2", 2},
        {"{\"e\":{\"dtype\":\"F6_E2M3\",\"shape\":[2,4],\"data_offsets\":[0,6]}}", "type F6_E2M3", 6},
        {"{" PACKED "," SCALES2 "}", "no floating-point tensor", 34}, /* not written by --prepare */
        {"{" META "}," PACKED "}", "no tensor 'scales'", 32},
        {"{" META ",\"columns\":\"33\"}," PACKED "," SCALES2 "}", "33 values of fp4 and 1 scales", 34},
        {"{" META ",\"columns\":\"32\"},\"embeddings\":{\"dtype\":\"U8\",\"shape\":[2,15],"
         "\"data_offsets\":[0,30]},\"scales\":{\"dtype\":\"U8\",\"shape\":[2,1],\"data_offsets\":[30,32]}}",
         "32 values of fp4 and 1 scales", 32},
        {"{" META ",\"columns\":\"99999999999999999999\"}," PACKED "," SCALES2 "}", "and 1 scales", 34},
    };
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        put_header("bad.safetensors", files[i].header, files[i].bytes);
        expect_bad("bad.safetensors", files[i].words);
    }
    put_header("a.safetensors", "{" META "}," PACKED "," SCALES2 "}", 34);
    expect_set("a.safetensors", "", 2, 32, 1);
    put_header("a.safetensors", "{" META ",\"columns\":\"3\"}," PACKED "," SCALES2 "}", 34);
    expect_set("a.safetensors", "", 2, 3, 1);
    expect_refusal("a.safetensors", "scales", STATUS_FAILED, "'scales'", "type U8");
}

#endif
