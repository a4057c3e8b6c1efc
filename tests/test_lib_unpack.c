/* Tests shards that are compressed: the bytes that are unpacked from each form of gzip and zstd, and that
 * streams and programs read the same samples as from shards that are not compressed. */
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef HAVE_ZLIB
#include <zlib.h>
#endif
#ifdef HAVE_ZSTD
#include <zstd.h>
#endif

#include "data/checksum.h"
#include "data/dataset.h"
#include "data/remote_cache.h"
#include "data/set_files.h"
#include "data/tar.h"
#include "must.h"

#include "lib_support.h" /* included last, because `out` and `status` would shadow names in other headers */

TestSuite(unpack, .timeout = 120, .init = shell_set_up, .fini = shell_tear_down);

struct bytes {
    uint8_t *at;
    size_t size;
};

static void add(struct bytes *to, const void *from, size_t size)
{
    to->at = realloc(to->at, to->size + size + 1);
    cr_assert_not_null(to->at);
    memcpy(to->at + to->size, from, size);
    to->size += size;
}

/* Returns a tar file with one member of `random` bytes that do not shrink and `zeros` that do. */
static struct bytes make_tar(size_t random, size_t zeros)
{
    uint8_t header[TAR_BLOCK_BYTES];
    struct bytes tar = {0};
    const size_t size = random + zeros, end = size + tar_padding(size) + TAR_END_BYTES;
    uint32_t state = 1;
    must(tar_header(header, "a.bin", size));
    add(&tar, header, sizeof header);
    tar.at = realloc(tar.at, tar.size + end);
    cr_assert_not_null(tar.at);
    memset(tar.at + tar.size, 0, end);
    for (size_t i = 0; i < random; i++)
        tar.at[tar.size + i] = (uint8_t)((state = state * 1664525 + 1013904223) >> 24);
    tar.size += end;
    return tar;
}

/* Bytes that unpack_bytes() must hand out, and how many of them it did. */
struct expected {
    const struct bytes *bytes;
    size_t got;
    bool differs;
};

static enum status compare(void *context, const void *bytes, size_t size)
{
    struct expected *expected = context;
    expected->differs |= size > expected->bytes->size - expected->got ||
                         memcmp(expected->bytes->at + expected->got, bytes, size) != 0;
    expected->got += expected->differs ? 0 : size;
    return STATUS_OK;
}

static enum status unpack(const void *packed, size_t size, struct expected *expected)
{
    const int fd = memfd_create("packed", MFD_CLOEXEC);
    cr_assert(fd >= 0 && write(fd, packed, size) == (ssize_t)size);
    expected->got = 0;
    expected->differs = false;
    const enum status result = unpack_bytes(&(struct unpack_input){.fd = fd, .tar = true}, compare, expected);
    close(fd);
    return result;
}

#ifdef HAVE_ZLIB
/* Appends a member of gzip. `flush`: bytes after which the compressor ends a block, as pigz does; 0: never.
 */
static void add_gzip(struct bytes *to, const uint8_t *from, size_t size, int level, size_t flush)
{
    z_stream stream = {0};
    const size_t room = size + size / 100 + 4096 + (flush ? size / flush * 16 : 0);
    uint8_t *packed = malloc(room);
    cr_assert(packed &&
              deflateInit2(&stream, level, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
    stream.next_out = packed;
    stream.avail_out = (uInt)room;
    for (size_t done = 0, part; done < size || done == 0; done += part ? part : 1) {
        part = flush && size - done > flush ? flush : size - done;
        stream.next_in = (Bytef *)(uintptr_t)(from + done);
        stream.avail_in = (uInt)part;
        const bool last = done + part == size;
        cr_assert_eq(deflate(&stream, last ? Z_FINISH : Z_FULL_FLUSH), last ? Z_STREAM_END : Z_OK);
    }
    add(to, packed, room - stream.avail_out);
    deflateEnd(&stream);
    free(packed);
}
#endif

#ifdef HAVE_ZSTD
/* Appends a frame of zstd with a check sum, or without one, and with this window; 0: a small one. `sized`:
 * the header says how many bytes follow. */
static void add_zstd(struct bytes *to, const uint8_t *from, size_t size, bool sum, int window, bool sized,
                     int threads)
{
    ZSTD_CCtx *context = ZSTD_createCCtx();
    const size_t room = ZSTD_compressBound(size) + 64;
    uint8_t *packed = malloc(room);
    cr_assert(context && packed);
    ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, sum);
    ZSTD_CCtx_setParameter(context, ZSTD_c_nbWorkers, threads); /* libraries without threads refuse it */
    if (window) {
        ZSTD_CCtx_setParameter(context, ZSTD_c_enableLongDistanceMatching, 1);
        ZSTD_CCtx_setParameter(context, ZSTD_c_windowLog, window);
    }
    if (sized)
        ZSTD_CCtx_setPledgedSrcSize(context, size);
    ZSTD_inBuffer in = {from, size, 0};
    ZSTD_outBuffer out_ = {packed, room, 0};
    size_t left;
    /* Some bytes first, because zstd would store the size of data that it gets at once. A block ends there.
     */
    ZSTD_inBuffer begin = {from, size / 3, 0};
    if (!sized) {
        cr_assert(!ZSTD_isError(ZSTD_compressStream2(context, &out_, &begin, ZSTD_e_flush)));
        in.pos = begin.pos;
    }
    do
        left = ZSTD_compressStream2(context, &out_, &in, ZSTD_e_end);
    while (left != 0 && !ZSTD_isError(left));
    cr_assert(!ZSTD_isError(left), "%s", ZSTD_getErrorName(left));
    add(to, packed, out_.pos);
    free(packed);
    ZSTD_freeCCtx(context);
}

/* Appends a frame that decoders skip, such as pzstd writes before each frame. */
static void add_skipped(struct bytes *to, uint32_t size)
{
    const uint8_t head[] = {
        0x5a, 0x2a, 0x4d, 0x18, (uint8_t)size, (uint8_t)(size >> 8), (uint8_t)(size >> 16), 0};
    uint8_t *zeros = calloc(1, size + 1);
    add(to, head, sizeof head);
    add(to, zeros, size);
    free(zeros);
}
#endif

/* The ways in which compressors write the same data. `unsummed`: a flipped bit can stay unnoticed. */
static const struct form {
    const char *name;
    bool zstd, unsummed;
    int parts; /* members or frames; 0: one */
} forms[] = {
    {"gzip", false, false, 0},        {"gzip_stored", false, false, 0}, {"gzip_members", false, false, 4},
    {"gzip_blocks", false, false, 0}, {"zstd", true, false, 0},         {"zstd_unsummed", true, true, 0},
    {"zstd_frames", true, false, 4},  {"zstd_two", true, true, 2},      {"zstd_skipped", true, false, 4},
    {"zstd_unsized", true, true, 0},  {"zstd_long", true, false, 0},    {"zstd_threads", true, false, 0}};

/* Compresses data. Members and frames are cut at odd places, and one of them is empty. Returns false if this
 * build cannot. */
static bool pack(const struct form *form, const struct bytes *data, struct bytes *packed)
{
    const size_t third = data->size / 3, all = data->size;
    const size_t cuts[][5] = {{0, all}, {0, third, all}, {0, third, third, all - 1, all}};
    const size_t *cut = cuts[form->parts / 2];
    *packed = (struct bytes){0};
    for (int i = 0; i < (form->parts ? form->parts : 1); i++) {
        const uint8_t *from = data->at + cut[i];
        const size_t size = cut[i + 1] - cut[i];
        (void)from, (void)size;
#ifdef HAVE_ZLIB
        if (!form->zstd)
            add_gzip(packed, from, size, strstr(form->name, "stored") ? 0 : 6,
                     strstr(form->name, "blocks") ? data->size / 7 + 1 : 0);
#endif
#ifdef HAVE_ZSTD
        if (form->zstd && strstr(form->name, "skip"))
            add_skipped(packed, 100 * (uint32_t)i);
        if (form->zstd)
            add_zstd(packed, from, size, !form->unsummed, strstr(form->name, "long") ? 27 : 0,
                     !strstr(form->name, "unsized"), strstr(form->name, "threads") ? 2 : 0);
        if (form->zstd && strstr(form->name, "skip") && i == 3)
            add_skipped(packed, 0);
#endif
    }
    return packed->size > 0;
}

Test(unpack, all_forms_have_the_bytes_of_the_data)
{
    const struct bytes tars[] = {make_tar(1 << 20, 3 << 20), make_tar(3 << 19, 1),
                                 make_tar(0, (1 << 20) + 1536), make_tar(0, 0)};
    for (size_t t = 0; t < COUNT_OF(tars); t++)
        for (size_t i = 0; i < COUNT_OF(forms); i++) {
            struct bytes packed;
            struct expected expected = {&tars[t], 0, false};
            if (!pack(&forms[i], &tars[t], &packed))
                continue;
            cr_expect_eq(unpack(packed.at, packed.size, &expected), STATUS_OK, "%s: %s", forms[i].name,
                         status_text());
            cr_expect(!expected.differs && expected.got == tars[t].size, "%s, %zu", forms[i].name, t);
            free(packed.at);
        }
}

#ifdef HAVE_ZLIB
/* Tools that write to tapes pad files to whole blocks. */
Test(unpack, gzip_files_may_be_padded_with_zeros)
{
    static const size_t padding[] = {1, 3, 511, 10240, (1 << 20) - 1, (2 << 20) + 1};
    const struct bytes tar = make_tar(1000, 1);
    uint8_t *zeros = calloc(1, padding[COUNT_OF(padding) - 1]);
    cr_assert_not_null(zeros);
    for (size_t i = 0; i < COUNT_OF(padding); i++) {
        struct bytes packed = {0}, member = {0};
        struct expected expected = {&tar, 0, false};
        add_gzip(&member, tar.at, tar.size, 6, 0);
        add(&packed, member.at, member.size);
        add(&packed, zeros, padding[i]);
        cr_expect_eq(unpack(packed.at, packed.size, &expected), STATUS_OK, "%zu: %s", padding[i],
                     status_text());
        cr_expect(!expected.differs && expected.got == tar.size, "%zu", padding[i]);
        cr_expect_eq(unpack(packed.at + member.size, padding[i], &expected), STATUS_FAILED, "zeros alone");
        add(&packed, member.at, member.size);
        cr_expect_eq(unpack(packed.at, packed.size, &expected), STATUS_FAILED, "%zu", padding[i]);
        cr_expect(strstr(status_text(), "zeros and then other data follow its end"), "%s", status_text());
        free(packed.at);
        free(member.at);
    }
    free(zeros);
    free(tar.at);
}
#endif

/* A file that ends too early, or with a bit flipped, fails, or has the same bytes: some bits have no meaning.
 * Between two members, a file that is cut looks complete; then the tar file lacks its end. */
Test(unpack, broken_files_never_have_other_bytes)
{
    const struct bytes tar = make_tar(300, 700);
    for (size_t i = 0; i < COUNT_OF(forms); i++) {
        struct bytes packed;
        struct expected expected = {&tar, 0, false};
        if (!pack(&forms[i], &tar, &packed))
            continue;
        size_t whole = 0;
        for (size_t cut = 0; cut < packed.size; cut++) {
            const enum status result = unpack(packed.at, cut, &expected);
            cr_assert(!expected.differs && (result == STATUS_FAILED || result == STATUS_OK), "%s, %zu: %s",
                      forms[i].name, cut, status_text());
            cr_assert(result == STATUS_OK || strstr(status_text(), cut == 0  ? "the file is empty"
                                                                   : cut < 4 ? ""
                                                                             : "truncated"),
                      "%s, %zu: %s", forms[i].name, cut, status_text());
            cr_assert(result != STATUS_OK || expected.got < tar.size || strstr(forms[i].name, "skip"),
                      "%s, %zu", forms[i].name, cut);
            whole += result == STATUS_OK;
        }
        cr_expect(whole <= 8, "%s: %zu", forms[i].name, whole);
        for (size_t bit = 0; !forms[i].unsummed && bit < 8 * packed.size; bit += bit % 8 ? 6 : 1) {
            packed.at[bit / 8] ^= (uint8_t)(1 << bit % 8);
            const enum status result = unpack(packed.at, packed.size, &expected);
            cr_assert(result != STATUS_OK || (!expected.differs && expected.got == tar.size), "%s, bit %zu",
                      forms[i].name, bit);
            packed.at[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
        free(packed.at);
    }
}

static void expect_refusal(const struct bytes *packed, enum status wanted, const char *words)
{
    struct expected expected = {&(struct bytes){0}, 0, false};
    cr_expect_eq(unpack(packed->at, packed->size, &expected), wanted, "%s: %s", words, status_text());
    cr_expect(strstr(status_text(), words), "%s: %s", words, status_text());
}

static void expect_refused_text(const char *text, const char *words)
{
    struct bytes bytes = {0};
    add(&bytes, text, strlen(text));
    expect_refusal(&bytes, STATUS_FAILED, words);
    free(bytes.at);
}

Test(unpack, refusals_have_a_remedy)
{
    struct bytes tar = make_tar(100, 0), noise = {0}, packed = {0};
    expect_refusal(&tar, STATUS_FAILED, "neither gzip nor zstd data; if it is a tar file, name it .tar");
    expect_refused_text("<!DOCTYPE html><p>Please log in", "an HTML or XML page");
    expect_refused_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n",
                        "Git LFS pointer");
    expect_refused_text("\xfd"
                        "7zXZ and more",
                        "this is not a tar file, but xz data: unpack it");
    for (int i = 0; i < 1024; i++)
        add(&noise, &(uint8_t){(uint8_t)(i * 7 + 1)}, 1);
#ifdef HAVE_ZLIB
    add_gzip(&packed, noise.at, noise.size, 6, 0);
    expect_refusal(&packed, STATUS_FAILED, "not a tar header");
    struct bytes twice = {0};
    add_gzip(&twice, packed.at, packed.size, 6, 0);
    packed.size = 0;
    add_gzip(&packed, tar.at, tar.size, 6, 0);
    add(&packed, "garbage", 7);
    expect_refusal(&packed, STATUS_FAILED,
                   "damaged gzip data after 2048 unpacked bytes: incorrect header check; "
                   "copy or download the file again");
    free(twice.at);
#else
    add(&packed, "\x1f\x8b\x08", 4);
    expect_refusal(&packed, STATUS_UNAVAILABLE, "this build has no zlib: unpack it with gunzip");
#endif
    packed.size = 0;
#ifdef HAVE_ZSTD
    static const uint8_t dictionary[] = {0x28, 0xb5, 0x2f, 0xfd, 0x01, 0x00, 7, 1, 0, 0};
    struct bytes large = make_tar(0, (size_t)80 << 20);
    struct expected expected = {&large, 0, false};
    add_zstd(&packed, tar.at, tar.size, true, 28, false, 0);
    expect_refusal(&packed, STATUS_FAILED,
                   "a window of more than 128 MiB; compress the shard with zstd --long=27");
    packed.size = 0;
    add(&packed, dictionary, sizeof dictionary);
    expect_refusal(&packed, STATUS_FAILED, "need a dictionary; compress the shard without one");
    packed.size = 0;
    add_zstd(&packed, noise.at, noise.size, true, 0, true, 0);
    expect_refusal(&packed, STATUS_FAILED, "not a tar header");
    /* A bomb ends soon after its first 64 MiB. gzip cannot reach the ratio. */
    packed.size = 0;
    add_zstd(&packed, large.at, large.size, true, 0, true, 0);
    cr_expect_eq(unpack(packed.at, packed.size, &expected), STATUS_FAILED);
    cr_expect(strstr(status_text(), "unpack to more than 1032 times their size"), "%s", status_text());
    cr_expect(expected.got >= (size_t)63 << 20 && expected.got < (size_t)66 << 20, "%zu", expected.got);
#ifdef HAVE_ZLIB
    packed.size = 0;
    add_gzip(&packed, large.at, large.size, 9, 0);
    must(unpack(packed.at, packed.size, &expected));
#endif
    free(large.at);
#else
    add(&packed, "\x28\xb5\x2f\xfd", 4);
    expect_refusal(&packed, STATUS_UNAVAILABLE, "this build has no libzstd: unpack it with zstd -d");
#endif
    free(packed.at);
    free(noise.at);
    free(tar.at);
}

#if defined HAVE_PNG && defined HAVE_XXHASH && defined HAVE_ZLIB

#ifdef HAVE_ZSTD
static const char *const folders[] = {"z", "y"};
#else
static const char *const folders[] = {"z"};
#endif

/* Writes 60 digits as shards (p), and the same shards compressed by gzip (z) and zstd (y). */
static void prepare(void)
{
    EXPECT(0,
           "$P --prepare all --from digits --samples 60 --store imagefolder && mkdir f p z y && "
           "cp -r all/*/ f && $P --prepare m --from dataset --source f --shards 3 --name s && cp m/*.tar p");
    for (int i = 0; i < 3; i++)
        for (size_t f = 0; f < COUNT_OF(folders); f++) {
            char path[2 * PATH_MAX], name[64];
            struct bytes packed, shard = {0};
            char *text;
            snprintf(path, sizeof path, "%s/p/s-%06d.tar", folder, i);
            must(file_read(path, &text, &shard.size));
            shard.at = (uint8_t *)text;
            snprintf(name, sizeof name, "%s/s-%06d.tar.%s", folders[f], i, f ? "zst" : "gz");
            cr_assert(pack(&forms[f ? 4 : 2], &shard, &packed));
            put(name, packed.at, packed.size);
            free(packed.at);
            free(text);
        }
}

/* Expects that the cache folder has this many files, also hidden ones. */
static void expect_files(int count)
{
    EXPECT(0, "test $(ls -A c | wc -l) = %d || { ls -A c; false; }", count);
}

/* Opens a source in the test's folder, with the cache folder c if `cached` is set. */
static enum fdsl_status try_source(const char *name, bool cached, uint64_t cache_bytes,
                                   struct fdsl_source **source)
{
    char path[PATH_MAX], cache[PATH_MAX];
    struct fdsl_source_config config;
    good(fdsl_source_config_init(&config, sizeof config));
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(cache, sizeof cache, "%s/c", folder);
    config.path = path;
    config.kind = "shards";
    config.cache_dir = cached ? cache : NULL;
    config.cache_bytes = cache_bytes;
    return fdsl_source_open(&config, source);
}

static struct fdsl_source *open_source(const char *name, bool cached)
{
    struct fdsl_source *source;
    good(try_source(name, cached, 0, &source));
    return source;
}

/* Opens a shuffled stream, which closes the source. */
static struct fdsl_stream *open_stream(struct fdsl_source *source)
{
    struct fdsl_stream_config config;
    struct fdsl_stream *stream;
    good(fdsl_stream_config_init(&config, sizeof config));
    config.out_res = 28;
    config.batch_size = 16;
    config.prefetch = 1;
    config.seed = 3;
    config.lanes = 3;
    config.shuffle_buffer = 30;
    config.num_threads = 2;
    good(fdsl_stream_open(source, &config, &stream));
    fdsl_source_close(source);
    return stream;
}

/* Two epochs of both streams must be the same. */
static void expect_same(struct fdsl_stream *one, struct fdsl_stream *other)
{
    static uint8_t images[2][16 * 3 * 28 * 28];
    static int64_t labels[2][16];
    struct fdsl_stream *streams[] = {one, other};
    for (int epoch = 0; epoch < 2;) {
        uint32_t count[2];
        enum fdsl_status status_[2];
        for (int i = 0; i < 2; i++)
            status_[i] = fdsl_stream_fill(streams[i], images[i], labels[i], &count[i], NULL);
        cr_assert(status_[0] == status_[1] && (status_[0] == FDSL_OK || status_[0] == FDSL_END), "%s",
                  fdsl_error());
        epoch += status_[0] == FDSL_END;
        cr_assert_eq(count[0], count[1]);
        cr_expect_eq(memcmp(images[0], images[1], count[0] * sizeof *images / 16), 0);
        cr_expect_eq(memcmp(labels[0], labels[1], count[0] * sizeof **labels), 0);
    }
    for (int i = 0; i < 2; i++)
        fdsl_stream_close(streams[i]);
}

/* Shuffled batches are those of the shards that are not compressed: when the copies are written, when they
 * exist, when one of them is damaged, and when another program removes them after the set was opened. */
Test(unpack, streams_deliver_the_same_batches)
{
    static const char *const changes[] = {
        ":", ":", "f=$(ls c/*.data | head -1) && printf X | dd of=$f bs=1 seek=600 conv=notrunc status=none",
        "rm c/*.data"};
    prepare();
    for (size_t f = 0; f < COUNT_OF(folders); f++)
        for (size_t i = 0; i < COUNT_OF(changes); i++) {
            const bool open_before = i == 3;
            struct fdsl_source *source = NULL;
            if (open_before)
                source = open_source(folders[f], true);
            EXPECT(0, "%s", changes[i]);
            expect_same(open_stream(open_source("p", false)),
                        open_stream(open_before ? source : open_source(folders[f], true)));
            expect_files(i == 3 ? 4 : 1 + 3 * (int)(f + 1)); /* and the lock */
        }
}

/* A file that changes while it is unpacked leaves no copy. */
Test(unpack, files_that_change_leave_no_copy)
{
    struct bytes tar = make_tar(100, 0), packed;
    struct stat info;
    char path[PATH_MAX];
    const struct remote_options options = {.cache_dir = path};
    const struct cache_entry entry = {.source = 1, .bytes = CACHE_UNKNOWN};
    const int fd = memfd_create("packed", MFD_CLOEXEC);
    const struct unpack_input input = {.fd = fd, .tar = true};
    int copy;
    snprintf(path, sizeof path, "%s/c", folder);
    cr_assert(pack(&forms[0], &tar, &packed) && write(fd, packed.at, packed.size) == (ssize_t)packed.size);
    cr_assert_eq(fstat(fd, &info), 0);
    struct file_identity identity = file_identify(&info);
    identity.modified_ns--;
    cr_expect_eq(unpack_open(&options, NULL, &entry, &input, &identity, &copy), STATUS_FAILED);
    cr_expect(copy < 0 && strstr(status_text(), "the file changed while it was unpacked"), "%s",
              status_text());
    expect_files(1); /* the lock */
    identity.modified_ns++;
    must(unpack_open(&options, NULL, &entry, &input, &identity, &copy));
    expect_files(2);
    close(copy);
    close(fd);
    free(packed.at);
    free(tar.at);
}

/* A copy that is damaged is written again by the next process, with a warning. */
Test(unpack, damaged_copies_are_replaced)
{
    prepare();
    const char *command = "$P --variant stream --data z --decode --cache-dir c --cache any --batch 8 "
                          "--min-samples 1 --max-time 0 2>&1";
    EXPECT(0, "%s && mkdir k && cp c/*.data k", command);
    EXPECT(0, "for f in c/*.data; do printf X | dd of=$f bs=1 seek=20000 conv=notrunc status=none; done");
    EXPECT_PRINTS(0, ".data is damaged; it is removed and read again", "%s", command);
    EXPECT(0, "for f in c/*.data; do cmp $f k/$(basename $f) || exit 1; done");
    EXPECT(0, "cat z/*.gz | gunzip | cmp - p/s-000000.tar 2>&1 | grep -q EOF && "
              "for f in p/*.tar; do cat $f; done | md5sum >a && ls c/*.data | wc -l | grep -qx 3");
}

/* A shard that changes gets another copy. The limit of the cache removes the old one. */
Test(unpack, changed_shards_get_other_copies)
{
    struct fdsl_source *source;
    prepare();
    const uint64_t bytes = 3 * 52224;
    good(try_source("z", true, 0, &source));
    fdsl_source_close(source);
    EXPECT(0, "test $(cat c/*.data | wc -c) = %llu && touch z/*", (unsigned long long)bytes);
    good(try_source("z", true, 0, &source));
    fdsl_source_close(source);
    expect_files(7);
    EXPECT(0, "touch z/*");
    good(try_source("z", true, bytes, &source));
    expect_files(4);
    /* Streams notice a change that happens while they read. */
    static uint8_t images[16 * 3 * 28 * 28];
    uint32_t count;
    struct fdsl_stream *stream = open_stream(source);
    EXPECT(0, "for f in z/*; do cp $f new && mv new $f; done");
    enum fdsl_status result = FDSL_OK;
    while (result == FDSL_OK || result == FDSL_END)
        result = fdsl_stream_fill(stream, images, NULL, &count, NULL);
    cr_expect(result == FDSL_FAILED && strstr(fdsl_error(), "/z/s-00000") &&
                  strstr(fdsl_error(), "the file changed after"),
              "%s", fdsl_error());
    fdsl_stream_close(stream);
    /* All copies of a set must fit together. */
    cr_expect_eq(try_source("z", true, bytes - 1, &source), FDSL_INVALID);
    cr_expect(strstr(fdsl_error(), "the unpacked copies of the shards have more than the 156671 bytes") &&
                  strstr(fdsl_error(), "raise cache_bytes"),
              "%s", fdsl_error());
    cr_expect_eq(try_source("z", true, 50000, &source), FDSL_INVALID);
    cr_expect(
        strstr(fdsl_error(), "/z/s-000000.tar.gz: cache_bytes 50000: the unpacked data have more bytes"),
        "%s", fdsl_error());
    EXPECT(0, "! ls c/*.part");
}

/* Several processes want the same copies: one writes each, and all read it. */
Test(unpack, processes_share_copies)
{
    prepare();
    EXPECT(0,
           "for i in 1 2 3 4; do $P --variant stream --data z --decode --cache-dir c --cache any --batch 8 "
           "--min-samples 1 --max-time 0 >log$i 2>&1 & done; wait; for i in 1 2 3 4; do grep -q stream log$i "
           "|| { cat log$i; exit 1; }; done");
    expect_files(4);
}

/* Training and `load` read compressed shards in a folder, and those that a wids index names. */
Test(unpack, programs_read_compressed_shards)
{
    prepare();
    EXPECT(0,
           "mkdir w && python3 - %s <<'END'\n"
           "import hashlib, json, sys\n"
           "wids = json.load(open('m/s.wids.json'))\n"
           "for shard in wids['shardlist']:\n"
           "    shard['url'] = '../%s/' + shard['url'] + '.%s'\n"
           "    data = open('w/' + shard['url'], 'rb').read()\n"
           "    shard.update(filesize=len(data), md5sum=hashlib.md5(data).hexdigest())\n"
           "json.dump(wids, open('w/s.wids.json', 'w'))\n"
           "END",
           "x", folders[COUNT_OF(folders) - 1], COUNT_OF(folders) > 1 ? "zst" : "gz");
    EXPECT(
        0,
        "for d in p z %s w; do $P --variant train-omp --model logreg --data $d --feed load --batch 16 "
        "--epochs 2 --threads 2 $(test $d != p && echo --cache-dir c) --out $d.csv >log 2>&1 || { cat log; "
        "exit 1; }; done; python3 - p z %s w <<'END'\n"
        "import csv, sys\n"
        "rows = [[row['train_loss'] for row in csv.DictReader(open(d + '.csv'))] for d in sys.argv[1:]]\n"
        "assert len(rows[0]) == 2 and all(row == rows[0] for row in rows), rows\n"
        "END",
        COUNT_OF(folders) > 1 ? "y" : "", COUNT_OF(folders) > 1 ? "y" : "");
    EXPECT(0,
           "for d in z w; do $P --variant shards,shards-mmap,shards-omp,stream --data $d --decode --verify "
           "--cache-dir c --cache any --batch 8 --min-samples 1 --max-time 0 || exit 1; done");
    EXPECT(0, "$P --variant stream --decode --data z/s-000001.tar.gz --cache-dir c --cache any --batch 8 "
              "--min-samples 1 --max-time 0");
    expect_files(1 + 3 * (int)COUNT_OF(folders));
#ifdef HAVE_CRYPTO
    EXPECT(0, "sed -i 's/\"md5sum\": \"./\"md5sum\": \"f/' w/s.wids.json");
    EXPECT_PRINTS(1, "md5", "$P --variant stream --data w --decode --verify --cache-dir c --cache any");
#endif
    EXPECT(0, "sed -i 's/\"nsamples\": 20/\"nsamples\": 21/' w/s.wids.json");
    EXPECT_PRINTS(1, "the shard holds 20 samples but its index says 21",
                  "$P --variant stream --data w --decode --cache-dir c --cache any");
}

/* Without a cache folder, shards are unpacked in memory: all programs read the same samples, and each thread
 * has an offset of its own in a shard that several read. */
Test(unpack, shards_are_unpacked_in_memory_without_a_cache)
{
    prepare();
    for (size_t f = 0; f < COUNT_OF(folders); f++) {
        expect_same(open_stream(open_source("p", false)), open_stream(open_source(folders[f], false)));
        EXPECT(0,
               "$P --variant shards,shards-mmap,shards-omp,stream --data %s --decode --verify --batch 8 "
               "--min-samples 1 --max-time 0",
               folders[f]);
        EXPECT_PRINTS(2, "needs files: add --cache-dir DIR, or drop --cache",
                      "$P --variant shards --data %s --cache warm", folders[f]);
    }
    EXPECT(0, "test ! -e c");
}

/* Shards of which not all stay in memory are unpacked when they are opened, and each open file of a shard is
 * complete. */
Test(unpack, shards_are_unpacked_again_when_they_are_opened)
{
    prepare();
    char path[PATH_MAX];
    static uint8_t bytes[2][60000];
    ssize_t sizes[2];
    struct dataset dataset;
    struct set_files *files;
    snprintf(path, sizeof path, "%s/z", folder);
    must(dataset_open(path, false, NULL, NULL, &dataset));
    cr_assert(dataset_in_memory(&dataset));
    for (uint32_t f = 0; f < dataset.file_count; f++) {
        cr_assert(dataset.files[f].unpacked, "small shards stay in memory");
        close(dataset.files[f].memory);
        dataset.files[f].unpacked = false;
    }
    for (int i = 0; i < 2; i++) {
        int fd;
        must(i ? dataset_file_await(&dataset, 1, NULL, &fd) : dataset_file_open(&dataset, 1, 0, &fd));
        sizes[i] = read(fd, bytes[i], sizeof bytes[i]);
        dataset_file_close(&dataset, fd);
    }
    cr_expect(sizes[0] == 52224 && sizes[1] == sizes[0] && memcmp(bytes[0], bytes[1], sizeof bytes[0]) == 0);
    /* With room for one shard, reading samples of several shards in turn unpacks each of them again. */
    must(set_files_open(&dataset, 2, 1, &(struct set_files_order){0}, &files));
    for (uint32_t i = 0; i < 2 * dataset.sample_count; i++) {
        const struct dataset_sample *sample = &dataset.samples[i * 23 % dataset.sample_count];
        const struct dataset_member *member = &dataset.members[sample->member];
        must(set_files_read(files, member, member->size, bytes[0]));
        cr_expect_eq(checksum_edges(bytes[0], member->size), member->edges);
        cr_expect_eq(set_files_held_bytes(files), 52224);
    }
    EXPECT(0, "touch z/*");
    cr_expect_eq(set_files_read(files, &dataset.members[0], 1, bytes[0]), STATUS_FAILED);
    cr_expect(strstr(status_text(), "the file changed"), "%s", status_text());
    set_files_close(files);
    dataset_close(&dataset);
}

/* Copies have the files of a copy of plain shards, and networks are tested on the same samples. */
Test(unpack, copies_and_inference_read_compressed_shards)
{
    prepare();
    EXPECT(0,
           "$P --prepare qp --from dataset --source p --permute 3 --store files --name s && rm qp/s.index");
    EXPECT(0, "$P --variant train-omp --model logreg --data p --test-data p --epochs 2 --checkpoint k");
    for (size_t i = 0; i < COUNT_OF(folders); i++) {
        EXPECT(
            0,
            "for n in 1 2; do $P --prepare q%s --from dataset --source %s --permute 3 --store files --name s "
            "--cache-dir c || exit 1; done; rm q%s/s.index && diff -r qp q%s && rm -r q%s && $P --prepare "
            "q%s "
            "--from dataset --source %s --permute 3 --store files --name s && rm q%s/s.index && diff -r qp "
            "q%s",
            folders[i], folders[i], folders[i], folders[i], folders[i], folders[i], folders[i], folders[i],
            folders[i]);
        EXPECT(0,
               "for d in p %s '%s --cache-dir c'; do set -- $d && $P --variant infer-omp --checkpoint k "
               "--data $d --test-data $1 --out i%zu.csv || exit 1; done; python3 - <<'END'\n"
               "import csv\n"
               "rows = [(row['test_loss'], row['test_acc']) for row in csv.DictReader(open('i%zu.csv'))]\n"
               "assert len(rows) == 3 and rows[0] == rows[1] == rows[2], rows\n"
               "END",
               folders[i], folders[i], i, i);
    }
    EXPECT_PRINTS(2, "--cache-dir needs data at a URL, images of FractalDB or shards that are compressed",
                  "$P --variant infer-omp --checkpoint k --data p --test-data p --cache-dir c");
    EXPECT_PRINTS(2, "--cache-bytes needs --cache-dir DIR",
                  "$P --variant infer-omp --checkpoint k --data p --test-data p --cache-bytes 1M");
    expect_files(1 + 3 * (int)COUNT_OF(folders));
}

Test(unpack, refusals_name_the_remedy)
{
    static const struct {
        int status;
        const char *words, *command;
    } cases[] = {
        {2, "--cache-dir is for data at a URL and for shards that are compressed",
         "$P --prepare q --from dataset --source p --cache-dir c"},
        {2, "--cache-bytes needs --cache-dir DIR",
         "$P --prepare q --from dataset --source p --cache-bytes 1M"},
        {2, "raise --cache-bytes",
         "$P --prepare q --from dataset --source z --cache-dir c --cache-bytes 150K"},
        {2, "--cache-dir and --cache-bytes are for data at a URL and for shards that are compressed",
         "$P --variant stream --data p --cache-dir c"},
        {2, "raise --cache-bytes",
         "$P --variant stream --data z --cache-dir c --cache-bytes 150K --cache any"},
        {2, "--cache-bytes 30720: the unpacked data have more bytes; raise the limit",
         "$P --variant stream --data z --cache-dir c --cache-bytes 30K --cache any"},
        {2, "a dry run writes none", "$P --variant stream --data z --cache-dir d --cache any --dry-run"},
        {1, "z/s-000000.tar.gz: the gzip data are truncated; copy or download the file again",
         "truncate -s -9 z/s-000000.tar.gz && $P --variant stream --data z --cache-dir e --cache any"},
        {1, "z/s-000000.tar.gz: the gzip data are truncated; copy or download the file again",
         "$P --variant stream --data z"},
        {1, "z/s-000000.tar.gz: damaged gzip data after",
         "cp p/s-000000.tar z && gzip -f z/s-000000.tar && printf XXXX | dd of=z/s-000000.tar.gz bs=1 "
         "seek=3000 "
         "conv=notrunc status=none && $P --variant stream --data z --cache-dir e --cache any"},
        {1, "z/s-000000.tar.gz: this is neither gzip nor zstd data; if it is a tar file, name it .tar",
         "cp p/s-000000.tar z/s-000000.tar.gz && $P --variant stream --data z --cache-dir e --cache any"},
        {1, "z/s-000000.tar.gz: offset 51200: the shard lacks its end-of-archive blocks: it was truncated",
         "head -c 51200 p/s-000000.tar | gzip >z/s-000000.tar.gz && $P --variant stream --data z --cache-dir "
         "e "
         "--cache any"},
    };
    prepare();
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        expect_refused(cases[i].status, cases[i].words, cases[i].command);
    EXPECT(0, "! ls e/*.part");
    EXPECT(
        0,
        "cp p/s-000000.tar z && $P --variant stream --decode --data z --cache any --batch 8 --min-samples 1 "
        "--max-time 0 2>&1");
    EXPECT_OUT("only the shards whose names end in .tar are read, not s-000000.tar.gz");
}

#endif
