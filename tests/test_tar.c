/* Tests the tar parser and writer, and the keys of samples. libarchive and Python's tarfile must read what
 * the writer writes, and the parser must read what tarfile writes. */
#include <criterion/criterion.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef HAVE_ARCHIVE
#include <archive.h>
#include <archive_entry.h>
#endif

#include "core/file.h"
#include "data/members.h"
#include "data/tar.h"

enum { SHARD_MAX = 1 << 20, LISTING_MAX = 1 << 16 };

/* ---- Shards in memory ---- */

static uint8_t shard[SHARD_MAX];
static size_t shard_size;

static void add(const char *name, const void *data, size_t size)
{
    cr_assert_eq(tar_header(shard + shard_size, name, size), STATUS_OK, "%s", status_text());
    memcpy(shard + shard_size + TAR_BLOCK_BYTES, data, size);
    shard_size += TAR_BLOCK_BYTES + size;
    memset(shard + shard_size, 0, tar_padding(size));
    shard_size += tar_padding(size);
}

static void end_shard(void)
{
    memset(shard + shard_size, 0, TAR_END_BYTES);
    shard_size += TAR_END_BYTES;
}

/* Writes a shard of three members (files), which have 1, 1000 and 0 bytes. */
static void small_shard(void)
{
    static uint8_t thousand[1000];
    for (size_t i = 0; i < sizeof thousand; i++)
        thousand[i] = (uint8_t)(i * 7 + 1);
    shard_size = 0;
    add("000000.cls", "7", 1);
    add("000000.npy", thousand, sizeof thousand);
    add("000001.cls", "", 0);
    end_shard();
}

/* Corrects the checksum of the header at `at` after a change. */
static void repair(size_t at)
{
    unsigned sum = 0;
    memset(shard + at + 148, ' ', 8);
    for (size_t i = 0; i < TAR_BLOCK_BYTES; i++)
        sum += shard[at + i];
    snprintf((char *)shard + at + 148, 7, "%06o", sum);
}

/* ---- Reading ---- */

/* The members that the parser found, with one line "name header data size" per member. After the name of a
 * hard link comes "=" and its target; after that of a symbolic link "@" and its target; after that of a
 * device
 * "!". */
static char listing[LISTING_MAX];

static enum status list_shard(const uint8_t *bytes, size_t size, uint64_t known)
{
    static const char *const kinds[] = {"", "=", "@", "!"};
    static struct tar_parser parser;
    size_t used = 0;
    listing[0] = '\0';
    tar_open(&parser, known);
    for (;;) {
        struct tar_member member;
        enum tar_step step;
        size_t need, at = (size_t)parser.position;
        cr_assert_leq(at, size);
        TRY(tar_next(&parser, bytes + at, size - at, true, &member, &step, &need));
        cr_assert_neq(step, TAR_MORE);
        if (step == TAR_END)
            return STATUS_OK;
        used +=
            (size_t)snprintf(listing + used, sizeof listing - used, "%s%s%s %llu %llu %llu\n", member.name,
                             kinds[member.kind], member.target, (unsigned long long)member.header,
                             (unsigned long long)member.data, (unsigned long long)member.size);
    }
}

static void expect_listing(const char *expected)
{
    cr_assert_eq(list_shard(shard, shard_size, shard_size), STATUS_OK, "%s", status_text());
    cr_assert_str_eq(listing, expected);
    cr_assert_eq(list_shard(shard, shard_size, TAR_SIZE_UNKNOWN), STATUS_OK, "%s", status_text());
    cr_assert_str_eq(listing, expected);
}

static void expect_refusal(const char *words)
{
    cr_assert_eq(list_shard(shard, shard_size, shard_size), STATUS_FAILED, "%s", words);
    cr_assert_not_null(strstr(status_text(), words), "'%s' lacks '%s'", status_text(), words);
    cr_assert_not_null(strstr(status_text(), "offset "), "%s", status_text());
}

Test(tar, written_shards_are_read_back)
{
    small_shard();
    expect_listing("000000.cls 0 512 1\n000000.npy 1024 1536 1000\n000001.cls 2560 3072 0\n");
}

Test(tar, header_is_reproducible_ustar)
{
    static const char expected[] = "000000.cls";
    small_shard();
    cr_assert_str_eq((char *)shard, expected);
    cr_assert_eq(memcmp(shard + 100, "0000444\0000000000\0000000000\00000000000001\00000000000000\0", 48), 0);
    cr_assert_eq(memcmp(shard + 257, "ustar\00000", 8), 0);
    for (size_t i = 265; i < TAR_BLOCK_BYTES; i++)
        cr_assert_eq(shard[i], 0, "byte %zu", i);
}

Test(tar, header_refuses_what_ustar_cannot_store)
{
    uint8_t block[TAR_BLOCK_BYTES];
    char name[102];
    memset(name, 'n', 101);
    name[101] = '\0';
    cr_assert_eq(tar_header(block, name, 0), STATUS_FAILED);
    cr_assert_eq(tar_header(block, "", 0), STATUS_FAILED);
    cr_assert_eq(tar_header(block, "x", UINT64_C(1) << 33), STATUS_FAILED);
    name[100] = '\0';
    cr_assert_eq(tar_header(block, name, (UINT64_C(1) << 33) - 1), STATUS_OK);
}

/* The parser must request more data until it can continue. A request may be at most as large as the two
 * blocks at the end of an archive. */
Test(tar, any_buffer_size_gives_same_result)
{
    static struct tar_parser parser;
    small_shard();
    int members = 0;
    size_t window = 0;
    tar_open(&parser, TAR_SIZE_UNKNOWN);
    for (;;) {
        struct tar_member member;
        enum tar_step step;
        size_t need, at = (size_t)parser.position, left = shard_size - at;
        size_t available = window < left ? window : left;
        cr_assert_eq(tar_next(&parser, shard + at, available, available == left, &member, &step, &need),
                     STATUS_OK, "%s", status_text());
        if (step == TAR_END)
            break;
        members += step == TAR_MEMBER;
        cr_assert(step == TAR_MEMBER || (size_t)parser.position > at || need > window);
        window = step == TAR_MORE ? need : 0;
        cr_assert_leq(window, TAR_END_BYTES);
    }
    cr_assert_eq(members, 3);
}

/* ---- Faults ---- */

Test(tar, truncated_shards_are_refused)
{
    small_shard();
    size_t whole = shard_size,
           ends = whole - TAR_BLOCK_BYTES; /* the file may end after one of the two blocks of zeros */
    for (shard_size = 0; shard_size < ends; shard_size++) {
        cr_assert_eq(list_shard(shard, shard_size, shard_size), STATUS_FAILED, "cut at %zu", shard_size);
        cr_assert_eq(list_shard(shard, shard_size, TAR_SIZE_UNKNOWN), STATUS_FAILED, "cut at %zu",
                     shard_size);
    }
}

Test(tar, a_flipped_bit_in_any_header_is_refused)
{
    static const char right[] = "000000.cls 0 512 1\n000000.npy 1024 1536 1000\n000001.cls 2560 3072 0\n";
    static const size_t headers[] = {0, 1024, 2560};
    small_shard();
    for (size_t h = 0; h < 3; h++)
        for (size_t bit = 0; bit < 8 * TAR_BLOCK_BYTES; bit++) {
            size_t at = headers[h] + bit / 8;
            shard[at] ^= (uint8_t)(1 << bit % 8);
            /* A flipped bit may pass only in the checksum field, and only if the value of the field does not
             * change: "01" and " 1" are the same value. The header is then correct. */
            bool passed = list_shard(shard, shard_size, shard_size) == STATUS_OK;
            cr_assert(!passed || (at - headers[h] >= 148 && at - headers[h] < 156), "header %zu, bit %zu", h,
                      bit);
            cr_assert(!passed || strcmp(listing, right) == 0, "header %zu, bit %zu", h, bit);
            shard[at] ^= (uint8_t)(1 << bit % 8);
        }
}

Test(tar, implausible_sizes_are_refused)
{
    small_shard();
    memcpy(shard + 1024 + 124, "77777777777", 12);
    repair(1024);
    expect_refusal("offset 1024: the shard ends at");
    memset(shard + 1024 + 124, 0xFF, 12);
    repair(1024);
    expect_refusal("offset 1024: the size is negative");
    memset(shard + 1024 + 124, 0x7F, 12);
    shard[1024 + 124] = 0x80;
    repair(1024);
    expect_refusal("offset 1024: the size is not a number");
    memcpy(shard + 1024 + 124, "-0000000001", 12);
    repair(1024);
    expect_refusal("offset 1024: the size is not a number");
    memcpy(shard + 1024 + 124, "\x80\0\0\0\x7f\0\0\0\0\0\0\0", 12);
    repair(1024);
    expect_refusal("more than any file holds");
}

Test(tar, errors_have_an_offset)
{
    small_shard();
    shard[1024] ^= 1;
    expect_refusal("offset 1024: wrong header checksum");
    small_shard();
    shard_size -= TAR_END_BYTES;
    expect_refusal("offset 3072: the shard lacks its end-of-archive blocks");
    shard_size = 0;
    expect_refusal("offset 0: the shard is empty");
    small_shard();
    memset(shard + 1024, 0, TAR_BLOCK_BYTES);
    expect_refusal("offset 1024: data after a single block of zeros");
    memset(shard, 'x', shard_size);
    expect_refusal("offset 0: not a tar header");
    small_shard();
    shard[1024 + 156] = 'S';
    repair(1024);
    expect_refusal("sparse");
}

/* Gives the first member another type, without data, whatever size its header has. */
static void shard_of_type(char type, const char *size)
{
    small_shard();
    shard[156] = (uint8_t)type;
    memcpy(shard + 124, size, 12);
    memcpy(shard + 157, "x/y", 4);
    memmove(shard + 512, shard + 1024, shard_size - 1024);
    shard_size -= 512;
    repair(0);
}

/* Nothing that is a sample may vanish: links and devices are reported, folders and labels are skipped, and
 * members of other types are refused. */
Test(tar, every_file_type_is_reported_skipped_or_refused)
{
    for (int c = 1; c < 256; c++) {
        char expected[256];
        if (strchr("07xXgLK", c))
            continue; /* files and extended headers */
        shard_of_type((char)c, "00000000000");
        if (strchr("12346", c)) {
            snprintf(expected, sizeof expected,
                     "000000.cls%s 0 512 0\n000000.npy 512 1024 1000\n000001.cls 2048 2560 0\n",
                     c == '1'   ? "=x/y"
                     : c == '2' ? "@x/y"
                                : "!");
            expect_listing(expected);
        } else if (strchr("5DV", c)) {
            static struct tar_parser parser;
            struct tar_member first;
            enum tar_step step;
            size_t need;
            expect_listing("000000.npy 512 1024 1000\n000001.cls 2048 2560 0\n");
            tar_open(&parser, shard_size);
            parser.folders = true; /* then only labels are skipped */
            cr_assert_eq(tar_next(&parser, shard, shard_size, true, &first, &step, &need), STATUS_OK);
            cr_assert_str_eq(first.name, c == 'V' ? "000000.npy" : "000000.cls");
            cr_assert_eq(first.kind, c == 'V' ? TAR_FILE : TAR_FOLDER);
        } else
            expect_refusal(c == 'S'   ? "'000000.cls' is a sparse member"
                           : c == 'M' ? "'000000.cls' is a part of an archive in several volumes"
                                      : "'000000.cls' has the unknown type '");
    }
}

/* In old archives, the size in the header of a hard link is that of its target, but no data follow. In those
 * of pax, data may follow; the link is then a file. */
Test(tar, hard_links_may_have_a_size)
{
    static const char after[] = "000000.npy 512 1024 1000\n000001.cls 2048 2560 0\n";
    char expected[256];
    snprintf(expected, sizeof expected, "000000.cls=x/y 0 512 0\n%s", after);
    shard_of_type('1', "00000000001");
    expect_listing(expected);
    small_shard();
    shard[156] = '1';
    repair(0);
    expect_listing("000000.cls 0 512 1\n000000.npy 1024 1536 1000\n000001.cls 2560 3072 0\n");
    shard_size = 0;
    add("pax", "13 mtime=1.5\n", 13);
    shard[156] = 'x';
    repair(0);
    add("000000.cls", "", 0);
    shard[1024 + 156] = '1';
    memcpy(shard + 1024 + 124, "00000000001", 12);
    repair(1024);
    add("000001.cls", "", 0);
    end_shard();
    expect_refusal("it is unclear whether data follow");
}

/* ---- Data after the end ---- */

/* Parses the shard and returns the status at its end. The parser gets at least `window` bytes at a time,
 * unless fewer remain. */
static enum status end_of_shard(size_t window)
{
    static struct tar_parser parser;
    size_t need = TAR_BLOCK_BYTES;
    tar_open(&parser, shard_size);
    for (;;) {
        struct tar_member member;
        enum tar_step step;
        size_t at = (size_t)parser.position, left = shard_size - at;
        size_t wanted = need > window ? need : window, available = wanted < left ? wanted : left;
        TRY(tar_next(&parser, shard + at, available, available == left, &member, &step, &need));
        if (step == TAR_END)
            return STATUS_OK;
        if (step == TAR_MEMBER)
            need = TAR_BLOCK_BYTES;
    }
}

static void expect_end_refused(const char *words)
{
    static const size_t windows[] = {0, 700, 1024, 8192, SHARD_MAX};
    for (size_t i = 0; i < COUNT_OF(windows); i++) {
        cr_assert_eq(end_of_shard(windows[i]), STATUS_FAILED, "%s, window %zu", words, windows[i]);
        cr_assert_not_null(strstr(status_text(), words), "'%s' lacks '%s'", status_text(), words);
    }
}

/* tar pads archives to records of 10 KiB. So zeros may follow the end-of-archive blocks, but nothing else. */
Test(tar, data_after_the_end_is_refused)
{
    small_shard();
    size_t once = shard_size;
    memcpy(shard + once, shard, once); /* cat a.tar a.tar */
    shard_size = 2 * once;
    expect_end_refused("offset 3072: the shard ends here, but data follows at offset 4096: ");
    for (size_t padded = once + 1; padded < 20 * TAR_BLOCK_BYTES; padded += 511) {
        small_shard();
        memset(shard + once, 0, padded - once);
        shard_size = padded;
        cr_assert_eq(end_of_shard(0), STATUS_OK, "%zu: %s", padded, status_text());
        cr_assert_eq(end_of_shard(SHARD_MAX), STATUS_OK, "%zu: %s", padded, status_text());
        shard[padded - 1] = 1;
        expect_end_refused("offset 3072: the shard ends here, but data follows at offset ");
    }
}

/* A zeroed page looks like the end of a shard with data after it. It must be refused at any position. */
Test(tar, a_zeroed_page_is_refused)
{
    for (size_t page = 0; page < 4; page++) {
        shard_size = 0;
        for (int i = 0; i < 40; i++) {
            char name[16];
            snprintf(name, sizeof name, "%06d.bin", i);
            add(name, "data", 4);
        }
        end_shard();
        memset(shard + 8192 * page, 0, 4096);
        expect_end_refused("the shard ends here, but data follows at offset ");
    }
}

/* ---- Long names ---- */

/* Pairs of names that differ only in the last byte, with lengths around every limit. */
static const size_t long_lengths[] = {99, 100, 101, 155, 255, 256, 511, 512, 513, 1023, 1024, 4094, 4095};

static void long_name(size_t length, char last, char name[TAR_NAME_MAX + 2])
{
    memset(name, 'n', length);
    memcpy(name, "key.", 4);
    name[length - 1] = last;
    name[length] = '\0';
}

static void add_long(const char *name, const void *data, size_t size)
{
    size_t count;
    cr_assert_eq(tar_headers(shard + shard_size, name, size, &count), STATUS_OK, "%s", status_text());
    cr_assert(count <= TAR_HEADERS_MAX && count % TAR_BLOCK_BYTES == 0);
    shard_size += count;
    memcpy(shard + shard_size, data, size);
    memset(shard + shard_size + size, 0, tar_padding(size));
    shard_size += size + tar_padding(size);
}

static void long_shard(void)
{
    shard_size = 0;
    for (size_t i = 0; i < COUNT_OF(long_lengths); i++)
        for (char last = 'a'; last <= 'b'; last++) {
            char name[TAR_NAME_MAX + 2];
            long_name(long_lengths[i], last, name);
            add_long(name, &last, 1);
        }
    end_shard();
}

/* Called for each name that a reader finds. Expects the next name of the list. */
static size_t long_found;
static void expect_long(const char *name, uint8_t content, uint64_t size)
{
    char expected[TAR_NAME_MAX + 2], last = long_found % 2 ? 'b' : 'a';
    cr_assert_lt(long_found / 2, COUNT_OF(long_lengths));
    long_name(long_lengths[long_found / 2], last, expected);
    cr_assert_str_eq(name, expected);
    cr_assert(size == 1 && content == last);
    long_found++;
}

Test(tar, long_names_are_read_back)
{
    static struct tar_parser parser;
    long_shard();
    tar_open(&parser, shard_size);
    for (;;) {
        struct tar_member member;
        enum tar_step step;
        size_t need, at = (size_t)parser.position;
        cr_assert_eq(tar_next(&parser, shard + at, shard_size - at, true, &member, &step, &need), STATUS_OK,
                     "%s", status_text());
        if (step == TAR_END)
            break;
        expect_long(member.name, shard[member.data], member.size);
    }
    cr_assert_eq(long_found, 2 * COUNT_OF(long_lengths));
}

Test(tar, names_that_are_too_long_are_refused)
{
    uint8_t bytes[TAR_HEADERS_MAX];
    char name[TAR_NAME_MAX + 2];
    size_t count;
    long_name(TAR_NAME_MAX + 1, 'x', name);
    cr_assert_eq(tar_headers(bytes, name, 1, &count), STATUS_FAILED);
    cr_assert_not_null(strstr(status_text(), "1 to 4095 bytes; this one has 4096"), "%s", status_text());
    cr_assert_eq(tar_headers(bytes, "", 1, &count), STATUS_FAILED);
    cr_assert_eq(tar_headers(bytes, "x", UINT64_C(1) << 33, &count), STATUS_FAILED);
    long_name(TAR_NAME_MAX, 'x', name);
    cr_assert_eq(tar_headers(bytes, name, 1, &count), STATUS_OK);
    cr_assert_eq(count, 10 * TAR_BLOCK_BYTES);
}

/* ---- Shards from other programs ---- */

/* Runs a Python script that writes the file argv[1]. Reads that file into the shard. */
static void shard_by_python(const char *script)
{
    char path[] = "/tmp/fdsl-tar-XXXXXX", command[8192], *bytes;
    int fd = mkstemp(path);
    cr_assert(fd >= 0 && close(fd) == 0);
    if (system("python3 -c 'import tarfile' 2>/dev/null") != 0) {
        unlink(path);
        cr_skip_test("no python3 here");
    }
    snprintf(command, sizeof command, "python3 -c \"%s\" %s", script, path);
    cr_assert_eq(system(command), 0);
    cr_assert_eq(file_read(path, &bytes, &shard_size), STATUS_OK);
    cr_assert_leq(shard_size, (size_t)SHARD_MAX);
    memcpy(shard, bytes, shard_size);
    free(bytes);
    unlink(path);
}

#define PYTHON                                                            \
    "import io, sys, tarfile\n"                                           \
    "def add(t, name, data, **more):\n"                                   \
    "    i = tarfile.TarInfo(name); i.size = len(data); i.mode = 0o444\n" \
    "    for k, v in more.items(): setattr(i, k, v)\n"                    \
    "    t.addfile(i, io.BytesIO(data))\n"

static void expect_names(const char *expected)
{
    char names[LISTING_MAX] = "";
    cr_assert_eq(list_shard(shard, shard_size, shard_size), STATUS_OK, "%s", status_text());
    for (char *rest = listing, *line; (line = strsep(&rest, "\n")) && *line;) {
        size_t used = strlen(names);
        char *data = strrchr(line, ' '), *end = data;
        while (end > line && *--end != ' ')
            ;
        while (end > line && *--end != ' ')
            ;
        snprintf(names + used, sizeof names - used, "%.*s %s\n", (int)(end - line), line, data + 1);
    }
    cr_assert_str_eq(names, expected);
}

/* webdataset sets a time that is a float, so every member gets a pax header. */
Test(tar, pax_headers_of_python_are_read)
{
    shard_by_python(PYTHON "with tarfile.open(sys.argv[1], 'w', format=tarfile.PAX_FORMAT) as t:\n"
                           "    add(t, 'a.cls', b'12', mtime=1.25)\n"
                           "    add(t, 'd/' * 100 + 'b.png', b'x' * 600, mtime=1.25)\n"
                           "    add(t, '\u00e9.txt', b'', mtime=2)\n");
    char expected[1024] = "a.cls 2\n";
    for (int i = 0; i < 100; i++)
        strcat(expected, "d/");
    strcat(expected, "b.png 600\n\u00e9.txt 0\n");
    expect_names(expected);
}

Test(tar, gnu_headers_of_python_are_read)
{
    shard_by_python(PYTHON "with tarfile.open(sys.argv[1], 'w', format=tarfile.GNU_FORMAT) as t:\n"
                           "    add(t, 'd/' * 100 + 'b.png', b'x' * 600)\n"
                           "    add(t, 'l', b'', type=tarfile.SYMTYPE, linkname='y' * 200)\n"
                           "    add(t, 'c.cls', b'3')\n");
    char expected[1024] = "";
    for (int i = 0; i < 100; i++)
        strcat(expected, "d/");
    strcat(expected, "b.png 600\nl@");
    memset(expected + strlen(expected), 'y', 200);
    strcat(expected, " 0\nc.cls 1\n");
    expect_names(expected);
}

/* Python stores a long target in a GNU or pax header, and refuses it in ustar. */
Test(tar, hard_links_of_python_are_read)
{
    for (int format = 0; format < 3; format++) {
        char script[2048], expected[2048];
        int length = format == 0 ? 90 : 300;
        snprintf(script, sizeof script,
                 PYTHON
                 "with tarfile.open(sys.argv[1], 'w', format=%d) as t:\n"
                 "    add(t, 'd' * %d + '/b.png', b'x' * 600)\n"
                 "    add(t, 'e' * %d + '/b.png', b'', type=tarfile.LNKTYPE, linkname='d' * %d + '/b.png')\n"
                 "    add(t, 'c.cls', b'3')\n",
                 format, length, length, length);
        shard_by_python(script);
        char d[512] = "", e[512] = "";
        memset(d, 'd', (size_t)length);
        memset(e, 'e', (size_t)length);
        snprintf(expected, sizeof expected, "%s/b.png 600\n%s/b.png=%s/b.png 0\nc.cls 1\n", d, e, d);
        expect_names(expected);
    }
}

Test(tar, ustar_prefixes_of_python_are_read)
{
    shard_by_python(PYTHON "with tarfile.open(sys.argv[1], 'w', format=tarfile.USTAR_FORMAT) as t:\n"
                           "    add(t, 'd' * 90 + '/' + 'b' * 60 + '.png', b'x')\n"
                           "    add(t, 'e/', b'', type=tarfile.DIRTYPE)\n");
    char expected[256] = "";
    memset(expected, 'd', 90);
    strcat(expected, "/");
    memset(expected + 91, 'b', 60);
    strcat(expected, ".png 1\n");
    expect_names(expected);
}

/* Python's tarfile, which webdataset uses, must read the long names that the writer writes. */
Test(tar, python_reads_our_long_names)
{
    char path[] = "/tmp/fdsl-tar-XXXXXX", command[1024];
    int fd = mkstemp(path);
    long_shard();
    cr_assert(fd >= 0 && write(fd, shard, shard_size) == (ssize_t)shard_size && close(fd) == 0);
    snprintf(command, sizeof command,
             "python3 -c \"import sys, tarfile\n"
             "t = tarfile.open(sys.argv[1])\n"
             "lengths = [int(n) for n in sys.argv[2].split()]\n"
             "names = [('key.' + 'n' * n)[:n - 1] + c for n in lengths for c in 'ab']\n"
             "assert t.getnames() == names\n"
             "assert [t.extractfile(m).read() for m in t] == [n[-1].encode() for n in names]\" %s "
             "'99 100 101 155 255 256 511 512 513 1023 1024 4094 4095'",
             path);
    int failed = system("python3 -c 'import tarfile' 2>/dev/null") == 0 ? system(command) : -1;
    unlink(path);
    if (failed < 0)
        cr_skip_test("no python3 here");
    cr_assert_eq(failed, 0);
}

Test(tar, global_headers_and_pax_sizes_of_python_are_read)
{
    shard_by_python(PYTHON "with tarfile.open(sys.argv[1], 'w', format=tarfile.PAX_FORMAT,\n"
                           "                  pax_headers={'comment': 'all of it'}) as t:\n"
                           "    add(t, 'a.cls', b'12', pax_headers={'size': '2'})\n");
    expect_names("a.cls 2\n");
}

Test(tar, base_256_sizes_are_read)
{
    small_shard();
    memcpy(shard + 1024 + 124, "\x80\0\0\0\0\0\0\0\0\0\x03\xe8", 12);
    repair(1024);
    expect_listing("000000.cls 0 512 1\n000000.npy 1024 1536 1000\n000001.cls 2560 3072 0\n");
}

#ifdef HAVE_ARCHIVE
Test(tar, libarchive_reads_our_shards)
{
    small_shard();
    struct archive *archive = archive_read_new();
    struct archive_entry *entry;
    char theirs[LISTING_MAX] = "";
    archive_read_support_format_tar(archive);
    cr_assert_eq(archive_read_open_memory(archive, shard, shard_size), ARCHIVE_OK);
    while (archive_read_next_header(archive, &entry) == ARCHIVE_OK) {
        char data[2048];
        size_t used = strlen(theirs);
        uint64_t header = (uint64_t)archive_read_header_position(archive);
        ssize_t size = archive_read_data(archive, data, sizeof data);
        cr_assert_eq(size, archive_entry_size(entry));
        cr_assert_eq(archive_entry_perm(entry), 0444);
        cr_assert_eq(archive_entry_mtime(entry), 0);
        cr_assert_eq(memcmp(data, shard + header + TAR_BLOCK_BYTES, (size_t)size), 0);
        snprintf(theirs + used, sizeof theirs - used, "%s %llu %llu %zd\n", archive_entry_pathname(entry),
                 (unsigned long long)header, (unsigned long long)header + TAR_BLOCK_BYTES, size);
    }
    cr_assert_eq(archive_errno(archive), 0);
    archive_read_free(archive);
    expect_listing(theirs);
}

Test(tar, libarchive_reads_our_long_names)
{
    long_shard();
    struct archive *archive = archive_read_new();
    struct archive_entry *entry;
    archive_read_support_format_tar(archive);
    cr_assert_eq(archive_read_open_memory(archive, shard, shard_size), ARCHIVE_OK);
    while (archive_read_next_header(archive, &entry) == ARCHIVE_OK) {
        uint8_t byte = 0;
        cr_assert_eq(archive_read_data(archive, &byte, 1), 1);
        expect_long(archive_entry_pathname(entry), byte, (uint64_t)archive_entry_size(entry));
    }
    cr_assert_eq(archive_errno(archive), 0);
    archive_read_free(archive);
    cr_assert_eq(long_found, 2 * COUNT_OF(long_lengths));
}
#endif

/* ---- Keys ---- */

static void expect_key(const char *name, const char *key, const char *extension)
{
    size_t length = 0;
    const char *found = NULL;
    bool split = key_split(name, &length, &found);
    cr_assert_eq(split, key != NULL, "%s", name);
    if (!key)
        return;
    cr_assert(length == strlen(key) && memcmp(name, key, length) == 0, "%s: key %.*s", name, (int)length,
              name);
    cr_assert_str_eq(found, extension);
}

Test(key, names_are_split_as_by_webdataset)
{
    expect_key("a.b/c.jpg", "a.b/c", "jpg");
    expect_key("x/194.left.jpg", "x/194", "left.jpg");
    expect_key("000000.cls", "000000", "cls");
    expect_key("./a.PNG", "./a", "PNG");
    expect_key("a", NULL, NULL);
    expect_key("a.b/c", NULL, NULL);
    expect_key(".hidden", NULL, NULL);
    expect_key("a/.hidden.png", NULL, NULL);
    expect_key("a.", NULL, NULL);
    expect_key("", NULL, NULL);
    expect_key("__meta__", NULL, NULL);
    expect_key("__meta__/x.json", NULL, NULL);
    expect_key("__x__.json", "__x__", "json");
    expect_key("_x_/y.json", "_x_/y", "json");
}

Test(key, other_spellings_of_a_name_are_the_same)
{
    static const struct {
        const char *name, *normal;
    } cases[] = {{"a/b", "a/b"},     {"./a/b", "a/b"},   {"././/a//b/", "a/b"},
                 {"/a/./b", "a/b"},  {"a/b/.", "a/b"},   {"a/../b", "a/../b"},
                 {".a/b.", ".a/b."}, {"a/..b", "a/..b"}, {"", ""},
                 {"./", ""},         {".", ""},          {"A/b", "A/b"},
                 {"a", "a"},         {"a/bc", "a/bc"},   {"a/b/c", "a/b/c"},
                 {"ab", "ab"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char normal[32], longer[32];
        size_t length = strlen(cases[i].name);
        snprintf(longer, sizeof longer, "%sx/y", cases[i].name); /* what follows the name does not count */
        cr_assert_eq(key_normal(longer, length, normal), strlen(cases[i].normal));
        cr_assert_str_eq(normal, cases[i].normal);
        for (size_t k = 0; k < COUNT_OF(cases); k++)
            cr_assert_eq(key_same(cases[k].name, longer, length),
                         strcmp(cases[i].normal, cases[k].normal) == 0, "'%s' and '%s'", cases[k].name,
                         cases[i].name);
    }
}
