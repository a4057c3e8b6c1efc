/* Tests formats: .npy headers, IDX, CIFAR-10, counter values, the project's index, the wids index, and PNG in
 * memory. */
#include <criterion/criterion.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#ifdef HAVE_ZLIB
#include <zlib.h>
#endif

#include "core/file.h"
#include "data/labelled_files.h"
#include "data/source.h"
#include "data/index.h"
#include "data/npy.h"
#include "data/image_formats.h"

static void expect_text(const char *words)
{
    cr_assert_not_null(strstr(status_text(), words), "'%s' lacks '%s'", status_text(), words);
}

/* ---- .npy ---- */

static enum status parse_npy(const char *dictionary, int version, struct npy_header *header)
{
    uint8_t bytes[512] = "\x93NUMPY";
    size_t length = strlen(dictionary), begin = version == 1 ? 10 : 12;
    bytes[6] = (uint8_t)version;
    bytes[8] = (uint8_t)length;
    memcpy(bytes + begin, dictionary, length);
    return npy_header_parse(bytes, begin + length, header);
}

Test(npy, a_written_header_is_read_back)
{
    char bytes[NPY_HEADER_MAX];
    struct npy_header header;
    size_t length = npy_header_make(bytes, "<f2", "3, 8, 64, 64");
    cr_assert_eq(length % 64, 0);
    cr_assert_eq(npy_header_parse((uint8_t *)bytes, length, &header), STATUS_OK, "%s", status_text());
    cr_assert_str_eq(header.type, "<f2");
    cr_assert(header.value_bytes == 2 && !header.fortran && header.axes == 4 && header.shape[1] == 8);
    cr_assert(header.values == 98304 && header.data == length);
    cr_assert_eq(npy_header_check(&header, length + 196608), STATUS_OK);
    cr_assert_eq(npy_header_check(&header, length + 196607), STATUS_FAILED);
}

Test(npy, headers_of_other_writers_are_read)
{
    struct npy_header header;
    cr_assert_eq(parse_npy("{'descr': '<f4', 'fortran_order': True, 'shape': (), }   \n", 1, &header),
                 STATUS_OK);
    cr_assert(header.fortran && header.axes == 0 && header.values == 1);
    cr_assert_eq(parse_npy("{\"shape\": (5L,), 'descr':'|b1','fortran_order':False}", 2, &header), STATUS_OK);
    cr_assert(header.values == 5 && header.value_bytes == 1);
    cr_assert_eq(parse_npy("{'descr': '>c16', 'fortran_order': False, 'shape': (0, 3), }", 3, &header),
                 STATUS_OK);
    cr_assert(header.values == 0 && header.value_bytes == 16);
}

Test(npy, invalid_headers_are_refused)
{
    static const char *const dictionaries[] = {
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", /* stored as pickles */
        "{'descr': '|O8', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<f3', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<f4', 'fortran_order': Maybe, 'shape': (1,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1, }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
        "{'descr': '<f4', 'fortran_order': False, }",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), } x",
        "{'descr': '<f1', 'fortran_order': False, 'shape': (1,), }", /* types that NumPy does not have */
        "{'descr': '<b2', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<i16', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<c4', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<f4L', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1), }", /* a number, not a tuple */
        "{'descr': '<f4', 'fortran_order': False, 'shape': (07,), }",
        "\n {'descr': '<f4', 'fortran_order': False, 'shape': (1,), }",
        "",
    };
    struct npy_header header;
    for (size_t i = 0; i < COUNT_OF(dictionaries); i++)
        cr_assert_eq(parse_npy(dictionaries[i], 1, &header), STATUS_FAILED, "%s", dictionaries[i]);
    cr_assert_eq(parse_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", 4, &header),
                 STATUS_FAILED);
    cr_assert_eq(npy_header_parse((const uint8_t *)"\x93NUMPY\1\0\xff\xff{}  ", 14, &header), STATUS_FAILED);
    expect_text("bytes follow");
}

/* NumPy wrote the files. It reads versions 1.0, 2.0 and 3.0 only, and longs of Python 2 only in the first
 * two. */
Test(npy, versions_are_those_of_numpy)
{
    for (int version = 1; version <= 3; version++) {
        char path[64], *bytes;
        size_t size;
        struct npy_header header;
        snprintf(path, sizeof path, "tests/fuzz/npy/numpy-%d.0", version);
        cr_assert_eq(file_read(path, &bytes, &size), STATUS_OK, "%s", status_text());
        cr_assert_eq(npy_header_parse((uint8_t *)bytes, size, &header), STATUS_OK, "%s", status_text());
        cr_expect(header.axes == 2 && header.shape[1] == 3 && header.data % 64 == 0);
        cr_expect_eq(npy_header_check(&header, size), STATUS_OK, "%s", status_text());
        bytes[7] = 1;
        cr_expect_eq(npy_header_parse((uint8_t *)bytes, size, &header), STATUS_FAILED, "%d.1", version);
        expect_text(".1 is not supported; 1.0, 2.0 and 3.0 are");
        bytes[7] = 0;
        bytes[6] = version == 3 ? 4 : 0;
        cr_expect_eq(npy_header_parse((uint8_t *)bytes, size, &header), STATUS_FAILED);
        free(bytes);
        cr_expect_eq(
            parse_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3L,), }", version, &header),
            version == 3 ? STATUS_FAILED : STATUS_OK, "%d", version);
        cr_expect_eq(
            parse_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }\n ", version, &header),
            version == 3 ? STATUS_FAILED : STATUS_OK, "%d", version);
    }
}

/* A header of more than 65,535 bytes is refused, even if the file contains all of it. */
Test(npy, long_headers_are_refused)
{
    static const char dictionary[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }";
    for (size_t more = 0; more <= 1; more++) {
        size_t length = 65535 + more, size = 12 + length;
        uint8_t *bytes = malloc(size);
        struct npy_header header;
        memset(bytes, ' ', size);
        memcpy(bytes, "\x93NUMPY\2\0", 8);
        for (int i = 0; i < 4; i++)
            bytes[8 + i] = (uint8_t)(length >> 8 * i);
        memcpy(bytes + 12, dictionary, sizeof dictionary - 1);
        cr_expect_eq(npy_header_parse(bytes, size, &header), more ? STATUS_FAILED : STATUS_OK);
        if (more)
            expect_text("its .npy header has 65536 bytes; at most 65535 are allowed");
        free(bytes);
    }
}

/* A header may end exactly at the end of the file. If the file is up to six bytes shorter, the header must be
 * refused, although the missing bytes are in memory. */
Test(npy, a_header_may_end_with_the_file)
{
    static const char dictionary[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }";
    size_t length = sizeof dictionary - 1;
    for (int version = 1; version <= 2; version++)
        for (size_t more = 0; more <= 6; more++) {
            size_t begin = version == 1 ? 10 : 12, size = begin + length - more;
            uint8_t *bytes = calloc(1, begin + length); /* bytes past the end of the file are in memory */
            struct npy_header header;
            memcpy(bytes, "\x93NUMPY", 6);
            bytes[6] = (uint8_t)version;
            bytes[8] = (uint8_t)length;
            memcpy(bytes + begin, dictionary, length);
            cr_expect_eq(npy_header_parse(bytes, size, &header), more ? STATUS_FAILED : STATUS_OK,
                         "version %d, %zu bytes beyond the end", version, more);
            if (more)
                expect_text("bytes follow");
            free(bytes);
        }
}

/* ---- IDX and CIFAR-10 ---- */

Test(idx, images_and_labels_are_read)
{
    struct idx idx;
    cr_assert_eq(idx_parse((const uint8_t *)"\0\0\x08\1\0\0\0\3\5\6\7", 11, &idx), STATUS_OK);
    cr_assert(idx.axes == 1 && idx.shape[0] == 3 && idx.values[2] == 7);
    cr_assert_eq(idx_parse((const uint8_t *)"\0\0\x08\3\0\0\0\1\0\0\0\2\0\0\0\2abcd", 20, &idx), STATUS_OK);
    cr_assert(idx.axes == 3 && idx.shape[2] == 2 && idx.values[3] == 'd');
}

Test(idx, invalid_files_are_refused)
{
    struct idx idx;
    cr_assert_eq(idx_parse((const uint8_t *)"\0\0\x08\1\0\0\0\3\5\6", 10, &idx), STATUS_FAILED);
    expect_text("requires 11 bytes, but the file has 10");
    cr_assert_eq(idx_parse((const uint8_t *)"\0\0\x08\1\0\0\0\3\5\6\7\x08", 12, &idx), STATUS_FAILED);
    expect_text("requires 11 bytes, but the file has 12");
    cr_assert_eq(idx_parse((const uint8_t *)"\0\0\x08\3\0\0\0\0\0\0\0\2\0\0\0\2a", 17, &idx), STATUS_FAILED);
    cr_assert_eq(idx_parse((const uint8_t *)"\0\0\x0d\1\0\0\0\0", 8, &idx), STATUS_FAILED);
    cr_assert_eq(idx_parse((const uint8_t *)"\0\0\x08\0", 4, &idx), STATUS_FAILED);
    cr_assert_eq(idx_parse((const uint8_t *)"\0\0\x08\2\xff\xff\xff\xff\xff\xff\xff\xff", 12, &idx),
                 STATUS_FAILED);
    cr_assert_eq(idx_parse((const uint8_t *)"", 0, &idx), STATUS_FAILED);
    cr_assert_eq(idx_read("/nowhere/x", &idx), STATUS_FAILED);
    idx_free(&idx);
}

#ifdef HAVE_ZLIB
Test(idx, gzipped_files_are_read_and_truncated_ones_refused)
{
    char path[] = "/tmp/fdsl-idx-XXXXXX";
    struct idx idx;
    cr_assert(close(mkstemp(path)) == 0);
    gzFile file = gzopen(path, "wb");
    cr_assert(gzwrite(file, "\0\0\x08\1\0\0\0\3\5\6\7", 11) == 11 && gzclose(file) == Z_OK);
    cr_assert_eq(idx_read(path, &idx), STATUS_OK, "%s", status_text());
    cr_assert_eq(idx.values[1], 6);
    idx_free(&idx);
    for (off_t size = 3; size < 25; size++) {
        cr_assert_eq(truncate(path, 25 - size + 2), 0);
        cr_assert_eq(idx_read(path, &idx), STATUS_FAILED, "cut to %d", (int)(25 - size + 2));
        expect_text(path);
        idx_free(&idx);
    }
    unlink(path);
}
#endif

#ifdef HAVE_ZLIB
/* Compresses bytes as one gzip member. Returns its size. */
static size_t pack(const void *bytes, size_t size, uint8_t *packed, size_t room)
{
    z_stream stream = {.next_in = (Bytef *)(uintptr_t)bytes,
                       .avail_in = (uInt)size,
                       .next_out = packed,
                       .avail_out = (uInt)room};
    cr_assert_eq(deflateInit2(&stream, 9, Z_DEFLATED, 15 + 16, 9, Z_DEFAULT_STRATEGY), Z_OK);
    cr_assert_eq(deflate(&stream, Z_FINISH), Z_STREAM_END);
    deflateEnd(&stream);
    return stream.total_out;
}

static enum status take(const uint8_t *packed, size_t size, struct idx *idx)
{
    uint8_t *owned = malloc(size);
    memcpy(owned, packed, size);
    return idx_take(owned, size, idx);
}

static const char labels_idx[] = "\0\0\x08\1\0\0\0\3\5\6\7";

/* Concatenated gzip files unpack to concatenated contents. */
Test(idx, concatenated_gzip_files_are_read)
{
    uint8_t packed[512];
    struct idx idx;
    for (size_t cut = 0; cut <= 11; cut++) {
        size_t size = pack(labels_idx, cut, packed, sizeof packed);
        size += pack(labels_idx + cut, 11 - cut, packed + size, sizeof packed - size);
        size += pack("", 0, packed + size, sizeof packed - size);
        cr_assert_eq(take(packed, size, &idx), STATUS_OK, "cut at %zu: %s", cut, status_text());
        cr_expect(idx.shape[0] == 3 && memcmp(idx.values, "\5\6\7", 3) == 0);
        idx_free(&idx);
        cr_assert_eq(take(packed, size - 1, &idx), STATUS_FAILED);
        expect_text("the gzip data are truncated");
        idx_free(&idx);
        packed[size] = 'x';
        cr_assert_eq(take(packed, size + 1, &idx), STATUS_FAILED);
        expect_text("the gzip data are truncated");
        idx_free(&idx);
    }
}

Test(idx, excess_data_in_gzip_files_is_refused)
{
    static uint8_t packed[1 << 17], more[100000];
    struct idx idx;
    memcpy(more, labels_idx, 11);
    for (size_t size = 12; size <= sizeof more; size = size < 100 ? size + 1 : 10 * size) {
        cr_assert_eq(take(packed, pack(more, size, packed, sizeof packed), &idx), STATUS_FAILED, "%zu", size);
        expect_text("its IDX header requires 11 bytes, but the file has ");
        idx_free(&idx);
    }
}

/* Each file unpacks to 256 MiB. Content that is not IDX is detected from its first bytes, and the rest is not
 * unpacked. A header that claims too many values does not cause a large allocation. */
Test(idx, gzip_bombs_are_not_unpacked)
{
    static const struct {
        const char *begin;
        size_t size;
        const char *words;
    } bombs[] = {{"PK\3\4", 4, "not an IDX file"},
                 {"\0\0\x0d\1", 4, "type 0x0d"},
                 {"\0\0\x08\1\0\0\0\3", 8, "its IDX header requires 11 bytes, but the file has more"},
                 {"\0\0\x08\3\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", 16, "too many values"}};
    static uint8_t packed[1 << 19], plain[1 << 20];
    struct rusage before, after;
    struct idx idx;
    getrusage(RUSAGE_SELF, &before);
    for (size_t i = 0; i < COUNT_OF(bombs); i++) {
        memcpy(plain, bombs[i].begin, bombs[i].size);
        size_t size = pack(plain, sizeof plain, packed, sizeof packed);
        memset(plain, 0, bombs[i].size);
        size_t zeros = pack(plain, sizeof plain, packed + size, sizeof packed - size);
        for (int m = 1; m < 255; m++, size += zeros) /* each member unpacks to 1 MiB of zeros */
            memcpy(packed + size + zeros, packed + size, zeros);
        cr_assert_eq(take(packed, size + zeros, &idx), STATUS_FAILED);
        expect_text(bombs[i].words);
        idx_free(&idx);
    }
    getrusage(RUSAGE_SELF, &after);
#ifndef FDSL_SANITIZED
    cr_expect_lt(after.ru_maxrss - before.ru_maxrss, 64 << 10, "%ld KiB more", after.ru_maxrss);
#endif
}
#endif

Test(cifar, records_are_read_and_invalid_ones_refused)
{
    static uint8_t bytes[2 * (1 + CIFAR_IMAGE_BYTES)] = {3};
    struct cifar cifar;
    bytes[(1 + CIFAR_IMAGE_BYTES)] = 9;
    bytes[(1 + CIFAR_IMAGE_BYTES) + 1] = 200;
    cr_assert_eq(cifar_parse(CIFAR_10, bytes, sizeof bytes, &cifar), STATUS_OK);
    cr_assert(cifar.count == 2 && cifar_label(&cifar, 1) == 9 && *cifar_image(&cifar, 1) == 200);
    cr_assert_eq(cifar_parse(CIFAR_10, bytes, sizeof bytes - 1, &cifar), STATUS_FAILED);
    cr_assert_eq(cifar_parse(CIFAR_10, bytes, 0, &cifar), STATUS_FAILED);
    bytes[0] = 10;
    cr_assert_eq(cifar_parse(CIFAR_10, bytes, sizeof bytes, &cifar), STATUS_FAILED);
    expect_text("record 0 has label 10");
    /* CIFAR-100: the coarse and the fine label of each record */
    static uint8_t two[2 * (2 + CIFAR_IMAGE_BYTES)] = {19, 99, 7};
    two[sizeof two / 2] = 5;
    two[sizeof two / 2 + 1] = 41;
    two[sizeof two - CIFAR_IMAGE_BYTES] = 201;
    cr_assert_eq(cifar_parse(CIFAR_100_FINE, two, sizeof two, &cifar), STATUS_OK);
    cr_assert(cifar.count == 2 && cifar_label(&cifar, 0) == 99 && cifar_label(&cifar, 1) == 41 &&
              *cifar_image(&cifar, 0) == 7 && *cifar_image(&cifar, 1) == 201);
    cr_assert_eq(cifar_parse(CIFAR_100_COARSE, two, sizeof two, &cifar), STATUS_OK);
    cr_assert(cifar_label(&cifar, 0) == 19 && cifar_label(&cifar, 1) == 5);
    two[1] = 100;
    cr_assert_eq(cifar_parse(CIFAR_100_COARSE, two, sizeof two, &cifar), STATUS_FAILED);
    expect_text("not a binary CIFAR-100 file: record 0 has label 100");
    two[1] = 0;
    two[0] = 20;
    cr_assert_eq(cifar_parse(CIFAR_100_FINE, two, sizeof two, &cifar), STATUS_FAILED);
}

/* ---- The counter ---- */

Test(counter, values_are_a_pure_function)
{
    uint8_t few[5], many[64];
    uint16_t halves[100];
    float reals[10];
    counter_fill(7, 3, DTYPE_U8, sizeof few, few);
    counter_fill(7, 3, DTYPE_U8, sizeof many, many);
    cr_assert_eq(memcmp(few, many, sizeof few), 0);
    counter_fill(7, 4, DTYPE_U8, sizeof few, few);
    cr_assert_neq(memcmp(few, many, sizeof few), 0);
    counter_fill(8, 3, DTYPE_U8, sizeof few, few);
    cr_assert_neq(memcmp(few, many, sizeof few), 0);
    counter_fill(0, 0, DTYPE_F16, COUNT_OF(halves), halves);
    for (size_t i = 0; i < COUNT_OF(halves); i++)
        cr_assert_eq(halves[i] & 0xFC00, 0x3C00);
    counter_fill(0, 0, DTYPE_F32, COUNT_OF(reals), reals);
    for (size_t i = 0; i < COUNT_OF(reals); i++)
        cr_assert(reals[i] >= 0 && reals[i] < 1);
}

/* ---- Indexes ---- */

#ifdef HAVE_XXHASH
static const struct index_member two_members[] = {{"cls", 512, 1, 0x0123456789abcdef}, {"png", 1536, 100, 5}};

/* Returns the text of an index of two shards with one sample each. */
static char *index_text(size_t *size)
{
    struct index_text text;
    const struct index_unit places[] = {
        {.name = "x-000000.tar", .bytes = 4096, .md5 = "0123456789abcdef0123456789abcdef"},
        {.name = "x-000001.tar", .bytes = 4096, .md5 = ""}};
    cr_assert_eq(index_text_begin(&text, INDEX_SHARDS, "some options"), STATUS_OK);
    for (int i = 0; i < 2; i++) {
        index_text_add_unit(&text, &places[i]);
        index_text_add_sample(text.stream, i ? "000001" : "000000", two_members, 2);
    }
    cr_assert_eq(index_text_end(&text), STATUS_OK, "%s", status_text());
    *size = text.size;
    return text.text;
}

Test(index, a_written_index_is_read_back)
{
    size_t size;
    struct index index;
    char *text = index_text(&size), path[] = "/tmp/fdsl-index-XXXXXX";
    cr_assert_eq(index_parse(text, size, &index), STATUS_OK, "%s", status_text());
    cr_assert(index.layout == INDEX_SHARDS && index.unit_count == 2 && index.sample_count == 2 &&
              index.member_count == 4);
    cr_assert_str_eq(index.provenance, "some options");
    cr_assert_str_eq(index.units[1].name, "x-000001.tar");
    cr_assert_str_eq(index.units[1].md5, "");
    cr_assert(index.units[1].first == 1 && index.units[1].count == 1 && index.units[1].bytes == 4096);
    cr_assert_str_eq(index.samples[1].key, "000001");
    cr_assert(index.samples[1].unit == 1 && index.samples[1].first == 2 && index.samples[1].count == 2);
    cr_assert_str_eq(index.members[3].extension, "png");
    cr_assert(index.members[2].hash == 0x0123456789abcdef && index.members[3].size == 100);

    struct index again;
    cr_assert(close(mkstemp(path)) == 0);
    cr_assert_eq(index_save(path, &index, 1, 1), STATUS_OK, "%s", status_text());
    cr_assert_eq(index_read(path, &again), STATUS_OK, "%s", status_text());
    cr_assert(again.unit_count == 1 && again.sample_count == 1);
    cr_assert_str_eq(again.samples[0].key, "000001");
    index_free(&again);
    index_free(&index);
    unlink(path);
}

Test(index, any_changed_or_missing_byte_is_refused)
{
    size_t size;
    char *text = index_text(&size);
    for (size_t i = 0; i <= size; i++) {
        struct index index;
        char *copy = malloc(size + 1);
        memcpy(copy, text, size + 1);
        if (i < size)
            copy[i] ^= 1;
        cr_assert_eq(index_parse(copy, size, &index) == STATUS_OK, i == size, "byte %zu", i);
        index_free(&index);
        copy = calloc(1, i + 1);
        memcpy(copy, text, i);
        cr_assert_eq(index_parse(copy, i, &index) == STATUS_OK, i == size, "cut to %zu", i);
        index_free(&index);
    }
    free(text);
}

static void expect_bad_lines(const char *lines, const char *words)
{
    struct index_text text;
    struct index index;
    cr_assert_eq(index_text_begin(&text, INDEX_SHARDS, "x"), STATUS_OK);
    fputs(lines, text.stream);
    cr_assert_eq(index_text_end(&text), STATUS_OK);
    cr_assert_eq(index_parse(text.text, text.size, &index), STATUS_FAILED, "%s", lines);
    expect_text(words);
    index_free(&index);
}

Test(index, bad_lines_are_reported)
{
    expect_bad_lines("place\tx\t10\n", "line 2: a 'place' line must have");
    expect_bad_lines("place\t../x\t10\t-\n", "is outside the folder");
    expect_bad_lines("sample\tk\n", "before the first 'place' line");
    expect_bad_lines("place\tx\t10\t-\nsample\tk\n", "line 3: sample 'k' has no members");
    expect_bad_lines("place\tx\t10\t-\nsample\tk\tcls\t0\t11\t0123456789abcdef\n", "ends after the end of x");
    expect_bad_lines("place\tx\t10\t-\nsample\tk\tcls\t18446744073709551615\t2\t0123456789abcdef\n",
                     "member");
    expect_bad_lines("place\tx\t10\t-\nsample\tk\tcls\t0\t1\t123\n", "a member must have");
    expect_bad_lines("other\tx\n", "not a known kind of line");
    expect_bad_lines("place\tx\t9999\t-\nsample\tb\tcls\t1536\t1\t0123456789abcdef\n"
                     "sample\ta\tcls\t512\t1\t0123456789abcdef\n",
                     "line 4: x: offset 512: the previous member ends at 1537, so there is no room");
    expect_bad_lines("place\tx\t9999\t-\nsample\ta\tcls\t512\t600\t0123456789abcdef\tpng\t1536\t1\t"
                     "0123456789abcdef\n",
                     "line 3: x: offset 1536: the previous member ends at 1112");
    expect_bad_lines("place\tx\t9999\t-\nsample\ta\tcls\t511\t1\t0123456789abcdef\n", "no room");
}

/* The project's index and DALI's index cannot quote names. So a name that would be parsed as several fields
 * or lines is refused. Only a key of the project's index may have a blank: class folders have such names. */
Test(index, names_that_a_line_cannot_store_are_refused)
{
    static const char *const names[] = {"", "a b", "a\tb", "a\nb", "a\rb", "\x1b[2J", "a\x7f"};
    for (size_t i = 0; i < COUNT_OF(names); i++)
        for (int key = 0; key <= 1; key++) {
            const struct index_member member = {.extension = key ? "png" : names[i], .size = 1};
            char *text = NULL;
            size_t size;
            FILE *stream = open_memstream(&text, &size);
            bool fits = key && strcmp(names[i], "a b") == 0;
            cr_expect_eq(index_text_add_sample(stream, key ? names[i] : "0", &member, 1),
                         fits ? STATUS_OK : STATUS_FAILED);
            cr_expect_eq(dali_add_sample(stream, key ? names[i] : "0", &member, 1), STATUS_FAILED);
            expect_text("rename the file");
            cr_assert_eq(fclose(stream), 0);
            cr_expect_eq(size > 0, fits, "a refused name is written in part");
            free(text);
        }
}

Test(index, extensions_are_counted_once)
{
    static char names[INDEX_EXTENSIONS_MAX + 1][8];
    struct index_extensions extensions = {.count = 0};
    for (int round = 0; round < 2; round++)
        for (size_t i = 0; i < INDEX_EXTENSIONS_MAX; i++) {
            snprintf(names[i], sizeof names[i], "e%zu", i);
            cr_assert_eq(index_extensions_add(&extensions, names[i]), STATUS_OK);
        }
    cr_expect_eq(extensions.count, INDEX_EXTENSIONS_MAX);
    cr_expect_str_eq(extensions.names[7], "e7");
    cr_expect_eq(index_extensions_add(&extensions, "more"), STATUS_FAILED);
    extensions.count = 0;
    cr_expect_eq(index_extensions_add(&extensions, "a\tb"), STATUS_FAILED);
}

#ifdef HAVE_JANSSON
Test(wids, a_written_index_is_read_back)
{
    size_t size;
    struct index index;
    struct wids wids;
    char *text = index_text(&size), *json;
    cr_assert_eq(index_parse(text, size, &index), STATUS_OK);
    cr_assert_eq(wids_format("x", &index, &json), STATUS_OK, "%s", status_text());
    cr_assert_eq(wids_parse(json, strlen(json), &wids), STATUS_OK, "%s", status_text());
    cr_assert_str_eq(wids.name, "x");
    cr_assert(wids.count == 2 && wids.shards[1].samples == 1 && wids.shards[1].bytes == 4096);
    cr_assert_str_eq(wids.shards[0].url, "x-000000.tar");
    cr_assert_str_eq(wids.shards[0].digest, "md5:0123456789abcdef0123456789abcdef");
    cr_assert_null(wids.shards[1].digest);
    wids_free(&wids);
    free(json);
    index_free(&index);
}

Test(wids, invalid_indexes_are_refused)
{
    static const char *const texts[] = {
        "",
        "[]",
        "{\"__kind__\":\"other\"}",
        "{\"__kind__\":\"wids-shard-index-v1\"}",
        "{\"__kind__\":\"wids-shard-index-v1\",\"shardlist\":[{}]}",
        "{\"__kind__\":\"wids-shard-index-v1\",\"shardlist\":[{\"url\":\"a\",\"nsamples\":-1}]}",
        "{\"__kind__\":\"wids-shard-index-v1\",\"shardlist\":[{\"url\":\"a\",\"nsamples\":1,\"md5sum\":"
        "\"xyz\"}]}",
        "{\"__kind__\":\"wids-shard-index-v1\",\"shardlist\":[{\"url\":\"a\",\"nsamples\":1,\"filesize\":"
        "\"9\"}]}",
    };
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        struct wids wids;
        cr_assert_eq(wids_parse(texts[i], strlen(texts[i]), &wids), STATUS_FAILED, "%s", texts[i]);
        wids_free(&wids);
    }
}
#endif
#endif

/* ---- PNG ---- */

#ifdef HAVE_PNG
Test(png, written_pixels_are_read_back)
{
    uint8_t pixels[2 * 3 * 3], decoded[sizeof pixels];
    for (size_t i = 0; i < sizeof pixels; i++)
        pixels[i] = (uint8_t)(37 * i);
    for (uint32_t channels = 1; channels <= 3; channels += 2) {
        const struct png_shape shape = {3, 2, channels};
        struct png_shape found;
        uint32_t turn;
        void *bytes;
        size_t size;
        cr_assert_eq(png_encode(pixels, &shape, &bytes, &size), STATUS_OK, "%s", status_text());
        cr_assert_eq(png_shape(bytes, size, &found), STATUS_OK);
        cr_assert(found.width == 3 && found.height == 2 && found.channels == channels);
        cr_assert_eq(png_decode(bytes, size, decoded, sizeof decoded, &found, &turn), STATUS_OK, "%s",
                     status_text());
        cr_assert_eq(memcmp(decoded, pixels, 6 * channels), 0);
        cr_assert_eq(png_decode(bytes, size, decoded, 6 * channels - 1, &found, &turn), STATUS_FAILED);
        cr_assert_eq(png_decode(bytes, size - 20, decoded, sizeof decoded, &found, &turn), STATUS_FAILED);
        cr_assert_eq(png_shape("no PNG at all", 13, &found), STATUS_FAILED);
        free(bytes);
    }
}

#ifdef HAVE_ZLIB
/* Corrects the checksum of a chunk of a PNG file after a change. `size` counts the chunk's name and data. */
static void seal_chunk(uint8_t *chunk, size_t size)
{
    unsigned long sum = crc32(0, chunk, (uInt)size);
    for (int b = 0; b < 4; b++)
        chunk[size + (size_t)b] = (uint8_t)(sum >> (24 - 8 * b));
}

/* Changes a PNG file of two 8-bit pixels into a file of one 16-bit pixel. Decoding must drop the lower 8
 * bits. A decoder that took the value for linear light would give 137. */
Test(png, only_the_lower_8_of_16_bits_are_lost)
{
    static const uint8_t pixels[2] = {64, 64};
    uint8_t decoded;
    struct png_shape found;
    uint32_t turn;
    void *bytes;
    size_t size;
    cr_assert_eq(png_encode(pixels, &(struct png_shape){2, 1, 1}, &bytes, &size), STATUS_OK);
    uint8_t *header = (uint8_t *)bytes + 12; /* "IHDR" and its 13 bytes */
    header[7] = 1;                           /* width */
    header[12] = 16;                         /* bits per value */
    seal_chunk(header, 17);
    uint8_t *gamma = header + 25; /* the next chunk; 16-bit values without a gamma are the difficult case */
    cr_assert_eq(memcmp(gamma, "gAMA", 4), 0);
    gamma[1] = 'B';
    seal_chunk(gamma, 8);
    cr_assert_eq(png_decode(bytes, size, &decoded, 1, &found, &turn), STATUS_OK, "%s", status_text());
    cr_expect_eq(decoded, 64);
    free(bytes);
}

/* A header that claims more pixels than the file can hold must not cause an allocation. */
Test(png, implausible_sizes_are_refused)
{
    static const uint8_t pixel[1] = {7};
    static const struct {
        uint8_t width[4], height[4];
        const char *words;
    } headers[] = {
        {{0, 0, 0x40, 0}, {0, 0, 0x40, 1}, "16384 x 16385 pixels does not fit"},
        {{0, 1, 0, 0}, {0, 1, 0, 0}, "65536 x 65536 pixels does not fit"},
        {{0, 0, 0x10, 0}, {0, 0, 0x10, 0}, "4096 x 4096 pixels does not fit in a file of this size"}};
    const struct png_shape shape = {1, 1, 1};
    struct png_shape found;
    void *bytes;
    size_t size;
    cr_assert_eq(png_encode(pixel, &shape, &bytes, &size), STATUS_OK);
    for (size_t i = 0; i < COUNT_OF(headers); i++) {
        uint8_t *header = (uint8_t *)bytes + 12; /* "IHDR" and its 13 bytes */
        memcpy(header + 4, headers[i].width, 4);
        memcpy(header + 8, headers[i].height, 4);
        seal_chunk(header, 17);
        cr_assert_eq(png_shape(bytes, size, &found), STATUS_FAILED);
        expect_text(headers[i].words);
    }
    free(bytes);
}
#endif
#endif
