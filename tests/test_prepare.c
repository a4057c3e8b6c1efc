/* Tests fdsl-bench --prepare on the command line: what it writes, that repeated runs write the same bytes,
 * and what it refuses. */
#include "shell.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif
#ifdef HAVE_ARCHIVE
#include <archive.h>
#include <archive_entry.h>
#endif

#include "core/file.h"
#include "core/timer.h"
#include "data/labelled_files.h"
#include "data/source.h"
#include "data/index.h"
#include "data/npy.h"
#include "data/image_formats.h"
#include "data/tar.h"

#ifdef HAVE_XXHASH

/* ---- Running ---- */

static void expect_refusal(int wanted, const char *options, const char *words)
{
    run("$P --prepare %s", options);
    expect_line(wanted, words);
}

TestSuite(prepare, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

static void read_file(const char *name, char **bytes, size_t *size)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    cr_assert_eq(file_read(path, bytes, size), STATUS_OK, "%s", status_text());
}

static void read_index(const char *name, struct index *index)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    cr_assert_eq(index_read(path, index), STATUS_OK, "%s", status_text());
}

#define SMALL "--samples 25 --shards 3 --sample-shape 3,5 --classes 0"

/* ---- Output ---- */

/* Parses the shards, and compares the members with the index and with the sample source `counter`, byte by
 * byte. */
Test(prepare, shards_match_their_index)
{
    static struct tar_parser parser;
    struct index index;
    EXPECT(0, "$P --prepare a " SMALL " --dtype u8");
    read_index("a/counter.index", &index);
    cr_assert(index.unit_count == 3 && index.sample_count == 25 && index.units[0].count == 9);
    for (uint64_t p = 0; p < index.unit_count; p++) {
        char path[PATH_MAX], *bytes;
        size_t size, need;
        snprintf(path, sizeof path, "a/%s", index.units[p].name);
        read_file(path, &bytes, &size);
        cr_assert_eq(size, index.units[p].bytes);
        tar_open(&parser, size);
        for (uint64_t s = index.units[p].first; s < index.units[p].first + index.units[p].count; s++) {
            const struct index_member *entry = &index.members[index.samples[s].first];
            struct tar_member member;
            struct npy_header header;
            enum tar_step step;
            uint8_t expected[15];
            cr_assert_eq(tar_next(&parser, (uint8_t *)bytes + parser.position, size - (size_t)parser.position,
                                  true, &member, &step, &need),
                         STATUS_OK, "%s", status_text());
            cr_assert(step == TAR_MEMBER && member.data == entry->offset && member.size == entry->size);
            cr_assert_eq(XXH3_64bits(bytes + member.data, member.size), entry->hash);
            cr_assert_eq(npy_header_parse((uint8_t *)bytes + member.data, member.size, &header), STATUS_OK);
            cr_assert_eq(npy_header_check(&header, member.size), STATUS_OK);
            counter_fill(0, s, DTYPE_U8, sizeof expected, expected);
            cr_assert_eq(memcmp(bytes + member.data + header.data, expected, sizeof expected), 0);
        }
        free(bytes);
    }
    index_free(&index);
}

Test(prepare, the_summary_has_the_size_of_all_units_and_the_time)
{
    struct index index;
    double shown_mb = -1, shown_s = -1, bytes = 0, begin_s = timer_now_s();
    EXPECT(0, "$P --prepare a --samples 25 --shards 3");
    double elapsed_s = timer_now_s() - begin_s;
    cr_assert_eq(sscanf(out, "a: 25 samples in 3 shards, %lf MB, in %lf s\n", &shown_mb, &shown_s), 2, "%s",
                 out);
    read_index("a/counter.index", &index);
    for (uint64_t p = 0; p < index.unit_count; p++)
        bytes += (double)index.units[p].bytes;
    cr_expect_float_eq(shown_mb, 1e-6 * bytes, 0.00051, "%s", out);
    cr_expect(shown_s >= 0 && shown_s <= elapsed_s + 0.051, "%s after %.2f s", out, elapsed_s);
    index_free(&index);
}

Test(prepare, files_and_shards_have_the_same_samples)
{
    struct index files, shards;
    EXPECT(0, "$P --prepare f --samples 1001 --sample-shape 3 --classes 0 --store files");
    EXPECT(0, "$P --prepare s --samples 1001 --sample-shape 3 --classes 0 --shards 2");
    read_index("f/counter.index", &files);
    read_index("s/counter.index", &shards);
    cr_assert(files.layout == INDEX_FILES && files.unit_count == 2 && files.units[1].count == 1);
    for (uint64_t i = 0; i < 1001; i++) {
        cr_assert_str_eq(files.samples[i].key, shards.samples[i].key);
        cr_assert_eq(files.members[i].hash, shards.members[i].hash);
    }
    EXPECT(0, "test $(find f -name '*.npy' | wc -l) = 1001 && test -f f/not-imagefolder/001/001000.npy && ! "
              "test -e f/.prepare");
    EXPECT(0, "sed -n '1p;$p' f/samples.csv");
    cr_assert_str_eq(out, "key,number,file_npy\n001000,1000,not-imagefolder/001/001000.npy\n");
    index_free(&files);
    index_free(&shards);
}

Test(prepare, repeated_runs_write_same_bytes)
{
    EXPECT(0, "$P --prepare a " SMALL " && $P --prepare b " SMALL " --threads 1 && diff -r a b");
    EXPECT(0, "$P --prepare c " SMALL
              " --seed 1; cmp -s a/counter-000000.tar c/counter-000000.tar; test $? = 1");
}

/* Python's tar reader must find the members that DALI's index and the wids index list. */
Test(prepare, python_finds_the_members_of_both_indexes)
{
    if (run("python3 -c 'import tarfile, hashlib, json'") != 0)
        cr_skip_test("no python3 here");
    EXPECT(0, "$P --prepare a " SMALL " --name x");
    EXPECT(
        0, "%s",
        "cat > t.py <<'E'\n"
        "import hashlib, json, sys, tarfile\n"
        "members = {}\n"
        "for line in open('a/x.index'):\n"
        "    f = line.rstrip('\\n').split('\\t')\n"
        "    if f[0] == 'place': now = members.setdefault(f[1], [])\n"
        "    if f[0] == 'sample': now += [(f[1] + '.' + f[i], int(f[i+1]), int(f[i+2])) for i in range(2, "
        "len(f), 4)]\n"
        "for name, expected in members.items():\n"
        "    with tarfile.open('a/' + name) as t:\n"
        "        assert [(m.name, m.offset_data, m.size) for m in t] == expected, name\n"
        "        assert all(m.mode == 0o444 and m.mtime == 0 and m.uid == 0 and not m.pax_headers for m in "
        "t)\n"
        "    lines = open('a/' + name[:-3] + 'idx').read().splitlines()\n"
        "    assert lines[0] == 'v1.2 %d' % len(expected)\n"
        "    assert lines[1:] == ['npy %d %d %s' % (o, s, n) for n, o, s in expected]\n"
        "w = json.load(open('a/x.wids.json')) if len(sys.argv) > 1 else None\n"
        "if w:\n"
        "    assert w['__kind__'] == 'wids-shard-index-v1' and w['wids_version'] == 1 and w['name'] == 'x'\n"
        "    assert [s['url'] for s in w['shardlist']] == list(members)\n"
        "    for s in w['shardlist']:\n"
        "        data = open('a/' + s['url'], 'rb').read()\n"
        "        assert s['filesize'] == len(data) and s['nsamples'] == len(members[s['url']])\n"
        "        assert s.get('md5sum', hashlib.md5(data).hexdigest()) == hashlib.md5(data).hexdigest()\n"
        "E\n");
#ifdef HAVE_JANSSON
    EXPECT(0, "python3 t.py wids");
#ifdef HAVE_CRYPTO
    EXPECT(0, "test $(grep -c md5sum a/x.wids.json) = 3");
#endif
#else
    EXPECT(0, "python3 t.py");
#endif
}

#ifdef HAVE_ARCHIVE
/* Compares the index with libarchive: the name, data offset and size of every member. */
Test(prepare, libarchive_finds_the_members_of_the_index)
{
    struct index index;
    uint64_t next = 0;
    EXPECT(0, "$P --prepare a " SMALL);
    read_index("a/counter.index", &index);
    for (uint64_t p = 0; p < index.unit_count; p++) {
        char path[PATH_MAX], name[64];
        struct archive *archive = archive_read_new();
        struct archive_entry *entry;
        snprintf(path, sizeof path, "%s/a/%s", folder, index.units[p].name);
        archive_read_support_format_tar(archive);
        cr_assert_eq(archive_read_open_filename(archive, path, 4096), ARCHIVE_OK);
        for (; archive_read_next_header(archive, &entry) == ARCHIVE_OK; next++) {
            snprintf(name, sizeof name, "%s.%s", index.samples[next].key, index.members[next].extension);
            cr_assert_str_eq(archive_entry_pathname(entry), name);
            cr_assert_eq(archive_entry_size(entry), (int64_t)index.members[next].size);
            cr_assert_eq((uint64_t)archive_read_header_position(archive) + 512, index.members[next].offset);
        }
        cr_assert_eq(archive_errno(archive), 0);
        archive_read_free(archive);
    }
    cr_assert_eq(next, 25);
    index_free(&index);
}
#endif

/* With pyarrow, metadata_parquet.py writes a table of all samples. Without pyarrow, it prints one line
 * and exits with status 4. */
Test(prepare, the_table_of_samples_is_parquet)
{
    if (run("python3 -c 1") != 0)
        cr_skip_test("no python3 here");
    EXPECT(0, "$P --prepare a " SMALL);
    if (run("python3 -c 'import pyarrow'") != 0) {
        EXPECT(4, "python3 %s/scripts/packaging/metadata_parquet.py a", root);
        cr_assert_not_null(strstr(out, "pyarrow is missing"), "%s", out);
        return;
    }
    EXPECT(0, "python3 %s/scripts/packaging/metadata_parquet.py a && test -s a/metadata.parquet", root);
    cr_assert_not_null(strstr(out, "25 samples, 4 columns"), "%s", out);
}

/* ---- Sources ---- */

#define SYNTH "--from synth --classes 3 --samples 20 --shards 2 --res 32"

#if defined(HAVE_PNG) && defined(HAVE_INIH)
Test(prepare, synth_samples_are_the_images_and_labels_of_run_0)
{
    EXPECT(0, "$P --prepare a " SYNTH " --variant naive --batch 7");
    EXPECT(0, "sed -n '1p;6p' a/samples.csv");
    cr_assert_str_eq(out, "key,class,instance,seed,shard,file_cls,file_png\n"
                          "000004,1,1,0,synth-000000.tar,000004.cls,000004.png\n");
    EXPECT(0, "tar xOf a/synth-000000.tar 000004.cls");
    cr_assert_str_eq(out, "1");

    /* The pixels must equal those of the images of run 0, both in PNG files and in arrays. */
    EXPECT(0, "$P --variant naive --classes 3 --batch 20 --res 32 --png p --warmups 0 --warmup-time 0 "
              "--min-samples 1 --min-time 0 --max-time 0");
    EXPECT(0, "tar xf a/synth-000000.tar && cmp 000004.png p/class-1_instance-1.png");
    EXPECT(0, "$P --prepare n " SYNTH
              " --encode npy && tar xf n/synth-000000.tar && tail -c 1024 000004.npy > raw");
    char *png, *raw;
    size_t png_size, raw_size;
    uint8_t pixels[32 * 32];
    struct png_shape shape;
    uint32_t turn;
    read_file("000004.png", &png, &png_size);
    read_file("raw", &raw, &raw_size);
    cr_assert_eq(png_decode(png, png_size, pixels, sizeof pixels, &shape, &turn), STATUS_OK, "%s",
                 status_text());
    cr_assert(raw_size == sizeof pixels && memcmp(raw, pixels, sizeof pixels) == 0);
    free(png);
    free(raw);
}

/* Images of a formula with masks: members of shards, and two folders of files. Image and mask are cut alike,
 * and a lossy or floating-point image still has a lossless mask. */
Test(prepare, masks_are_stored_with_their_images)
{
#define MASKED "--from synth --preset segrcdb --classes 9 --samples 7 --res 64 --out-res 31"
    EXPECT(0, "$P --variant naive --preset segrcdb --classes 9 --batch 7 --res 64 --out-res 31 --png p "
              "--warmups 0 --warmup-time 0 --min-samples 1 --min-time 0 --max-time 0");
    EXPECT(0, "$P --prepare s " MASKED " --shards 2 && cat s/*.tar > /dev/null && mkdir x && cd x && "
              "tar xf ../s/synth-000000.tar && tar xf ../s/synth-000001.tar && cat *.cls");
    cr_expect(strstr(out, "\n0000000"), "%s", out);
    EXPECT(0, "$P --prepare i " MASKED " --store imagefolder --batch 3 2>&1");
    cr_expect(strstr(out, "7 samples in 2 folders"), "%s", out);
    EXPECT(0,
           "for i in 0 1 2 3 4 5 6; do cmp x/00000$i.png p/class-0_instance-$i.png && "
           "cmp x/00000$i.mask.png p/class-0_instance-$i.mask.png && cmp x/00000$i.png i/image/00000$i.png "
           "&& cmp x/00000$i.mask.png i/mask/00000$i.png || exit 1; done; find i -type f | wc -l");
    cr_expect_str_eq(out, "16\n");
    EXPECT(0, "head -c 200 i/synth.index | head -1 | cut -f 2; grep -c '^sample.image/.*mask.png.*png' "
              "i/synth.index");
    cr_expect_str_eq(out, "imagefolder\n7\n");
    static const char *const kinds[] = {"npy", "jpeg"}, *const files[] = {"mask.png,npy", "jpg,mask.png"};
    for (int k = 0; k < 2; k++) {
        EXPECT(0,
               "rm -rf e && $P --prepare e " MASKED " --encode %s --store files && cmp x/000003.mask.png "
               "e/not-imagefolder/000/000003.mask.png && ls e/not-imagefolder/000/000003.* | cut -d. -f 2- | "
               "grep -v cls | paste -sd,",
               kinds[k]);
        cr_expect(strstr(out, files[k]), "%s", out);
    }
    /* A missing mask is written again; sets are read and verified. */
    EXPECT(0, "rm i/mask/000004.png && $P --prepare i " MASKED " --store imagefolder 2>&1 && "
              "cmp x/000004.mask.png i/mask/000004.png");
    EXPECT(0, "$P --variant files --data i --decode --min-samples 1 --min-time 0 --max-time 0 2>&1");
    cr_expect_null(strstr(out, "not read"), "%s", out);
    EXPECT(0, "$P --variant shards --data s --decode --min-samples 1 --min-time 0 --max-time 0 2>&1");
    EXPECT(0, "$P --prepare c --from dataset --source i && tar xf c/dataset-000000.tar && "
              "cmp x/000004.mask.png 000004.mask.png && cat *.cls");
    cr_expect(strstr(out, "0000000"), "%s", out);
    EXPECT(0, "$P --variant files --data i --verify --min-samples 1 --min-time 0 --max-time 0 2>&1");
    cr_expect_null(strstr(out, "not read"), "%s", out);
    /* A copy does not resize images without their masks. */
    EXPECT(2, "$P --prepare z --from dataset --source s --out-res 16 2>&1");
    cr_expect(strstr(out, "--out-res resizes images, but not their masks ('mask.png')"), "%s", out);
    EXPECT(0, "$P --prepare z --from dataset --source s --out-res 16 --member 'png;cls' && tar tf z/*.tar");
    cr_expect(strstr(out, "000000.png") && !strstr(out, "mask"), "%s", out);
    /* A copy without a mask, or that would lose a label, is refused; labels can be chosen. */
    static const char *const changes[] = {"rm 000003.mask.png", "printf 3 >000003.cls"},
                             *const words[] = {"sample '000003': it has no mask ('mask.png'), unlike other",
                                               "sample 3: it has the label 3 and a mask"};
    for (int k = 0; k < 2; k++) {
        EXPECT(0, "rm -rf y t && cp -r x y && mkdir t && cd y && %s && tar --sort=name -cf ../t/t.tar *",
               changes[k]);
        EXPECT_PRINTS(1, words[k], "$P --prepare y/%d --from dataset --source t --store imagefolder 2>&1", k);
    }
    /* Also as shards, as long as --member all does not copy whatever there is. */
    static const char
        *const faults[] = {"rm 000003.mask.png",
                           "printf '\\002' | dd of=000003.mask.png bs=1 seek=25 conv=notrunc 2>&1",
                           "cp 000003.cls 000003.mask.png"},
               *const faulty[] = {"sample '000003': it has no mask ('mask.png'), unlike other",
                                  "sample '000003': its mask has 8 bits per value and PNG colour",
                                  "sample '000003': its mask is not a PNG file"};
    for (int k = 0; k < 3; k++) {
        EXPECT(0, "rm -rf y t && cp -r x y && mkdir t && cd y && %s && tar --sort=name -cf ../t/t.tar *",
               faults[k]);
        EXPECT_PRINTS(1, faulty[k], "$P --prepare y/s%d --from dataset --source t 2>&1", k);
        EXPECT(0, "$P --prepare y/a%d --from dataset --source t --member all 2>&1", k);
    }
    EXPECT(0, "rm -rf y && cp -r x y");
    EXPECT(0, "$P --prepare y/2 --from dataset --source x --store imagefolder --label cls && test -f "
              "y/2/0000/000003.png && ! test -d y/2/mask");
    /* Masks are verified; a network needs labels. */
    EXPECT(0, "$P --variant stream --data i --out-res 16 --fit random-resized-crop --verify --min-samples 1 "
              "--min-time 0 --max-time 0 2>&1");
    EXPECT_PRINTS(2, "--data i: its samples have masks ('mask.png') instead of labels",
                  "$P --variant train-naive --data i --feed load 2>&1");
    EXPECT_PRINTS(2, "masks ('mask.png') instead of labels", "$P --variant train-naive --data s 2>&1");
    EXPECT(0, "$P --variant train-naive --data s --label cls --epochs 1 2>&1");
    EXPECT(0,
           "chmod u+w i/mask/* && printf X | dd of=i/mask/000002.png bs=1 seek=70 conv=notrunc 2>/dev/null");
    EXPECT_PRINTS(1, "do not match the hash in the index",
                  "$P --variant files --data i --verify --min-samples 1 --min-time 0 --max-time 0 2>&1");
    /* The tree of the published set. */
    EXPECT(0, "$P --prepare v --from synth --preset segrcdb --random published --samples 2 --instance 3500 "
              "--store imagefolder --names published && test -f v/mask/003501.png && "
              "$P verify-published v --preset segrcdb 2>&1");
    cr_expect(strstr(out, "2 of 2 images equal") && strstr(out, "2 of 2 masks equal"), "%s", out);
#undef MASKED
}

/* The bytes must not depend on the variant, the batch size or the number of threads. */
Test(prepare, synth_bytes_do_not_depend_on_variant)
{
    EXPECT(0, "$P --prepare a " SYNTH " --variant naive --batch 7 --threads 1 && $P --prepare b " SYNTH
              " && diff -r a b");
}

Test(prepare, invalid_options_of_synth_are_refused)
{
    expect_refusal(2, "a " SYNTH " --dtype f16", "--encode png stores u8 images");
    expect_refusal(2, "a " SYNTH " --png x", "--png applies to timed runs only");
    expect_refusal(
        2, "a " SYNTH " --layout nhwc",
        "--layout nhwc: prepared samples are PNG files or arrays of the shape (channels, height, width)");
    expect_refusal(2, "a " SYNTH " --layout hwc", "--layout: 'hwc' is not one of nchw, nhwc");
    expect_refusal(2, "a " SYNTH " --variant fuse", "not a variant of synth");
    expect_refusal(2, "a --from synth", "set the number of samples");
    expect_refusal(2, "a --instance 3",
                   "--instance is an option of --from synth; --prepare --help lists all options");
    expect_refusal(
        2, "a --encode npy",
        "--encode is an option of --from synth, idx, cifar, dataset, digits, embeddings and cifar100; ");
    expect_refusal(2, "a --verify",
                   "--verify does not apply to --prepare; --prepare --help lists the options that do");
    expect_refusal(2, "a --frobnicate", "unknown option '--frobnicate'");
    EXPECT(0, "! test -e a");
    EXPECT(0, "$P --prepare a " SYNTH " --dtype f16 --channels 3 --encode npy --out-res 16 --layout nchw");
}
#endif

#ifdef HAVE_PNG
static void write_file(const char *name, const void *bytes, size_t size)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *stream = fopen(path, "w");
    cr_assert(stream && fwrite(bytes, 1, size, stream) == size && fclose(stream) == 0);
}

static void expect_picture(const char *name, const void *pixels, size_t size)
{
    char *bytes;
    size_t count;
    uint8_t decoded[CIFAR_IMAGE_BYTES];
    struct png_shape shape;
    uint32_t turn;
    read_file(name, &bytes, &count);
    cr_assert_eq(png_decode(bytes, count, decoded, sizeof decoded, &shape, &turn), STATUS_OK, "%s",
                 status_text());
    cr_assert_eq((size_t)shape.width * shape.height * shape.channels, size);
    cr_assert_eq(memcmp(decoded, pixels, size), 0);
    free(bytes);
}

Test(prepare, idx_files_are_converted)
{
    write_file("x-images-idx3-ubyte", "\0\0\x08\3\0\0\0\3\0\0\0\2\0\0\0\2abcdefghijkl", 28);
    write_file("x-labels-idx1-ubyte", "\0\0\x08\1\0\0\0\3\5\6\7", 11);
    EXPECT(0, "$P --prepare a --from idx --source x-images-idx3-ubyte --store files && cat "
              "a/not-imagefolder/000/000002.cls");
    cr_assert_not_null(strstr(out, "3 samples in 1 folder,"), "%s", out);
    cr_assert_eq(out[strlen(out) - 1], '7');
    expect_picture("a/not-imagefolder/000/000001.png", "efgh", 4);

    /* A source with the same name but other contents is another data set. */
    write_file("x-labels-idx1-ubyte", "\0\0\x08\1\0\0\0\3\5\6\x08", 11);
    expect_refusal(2, "a --from idx --source x-images-idx3-ubyte --store files",
                   "or its source files have changed");
    write_file("x-labels-idx1-ubyte", "\0\0\x08\1\0\0\0\2\5\6", 10);
    expect_refusal(1, "b --from idx --source x-images-idx3-ubyte", "does not hold one label for each");
    expect_refusal(1, "b --from idx --source x-labels-idx1-ubyte --labels x-labels-idx1-ubyte",
                   "holds no images: it has 1 axis, but images have three");
    write_file("y-images-idx3-ubyte", "\0\0\x08\3\0\0\0\2\0\0\0\0\0\0\0\2", 16);
    expect_refusal(1, "b --from idx --source y-images-idx3-ubyte --labels x-labels-idx1-ubyte",
                   "holds no images: its header says 0 x 2 pixels");
    expect_refusal(2, "b --from idx --source x", "name it with --labels");
    expect_refusal(2, "b --from idx", "--source FILE");
    expect_refusal(2, "b --from dataset --source nowhere", "--source nowhere: No such file");
}

Test(prepare, cifar_files_are_converted)
{
    static uint8_t records[2 * (1 + CIFAR_IMAGE_BYTES)], pixels[CIFAR_IMAGE_BYTES];
    for (size_t i = 0; i < sizeof records; i++)
        records[i] = (uint8_t)(i * 31);
    records[0] = 3;
    records[(1 + CIFAR_IMAGE_BYTES)] = 9;
    for (size_t i = 0; i < 1024; i++)
        for (size_t c = 0; c < 3; c++)
            pixels[3 * i + c] = records[(1 + CIFAR_IMAGE_BYTES) + 1 + 1024 * c + i];
    write_file("one", records, sizeof records);
    EXPECT(0, "cp one two && $P --prepare a --from cifar --source one,two --store files && cat "
              "a/not-imagefolder/000/000003.cls");
    cr_assert_eq(out[strlen(out) - 1], '9');
    expect_picture("a/not-imagefolder/000/000001.png", pixels, sizeof pixels);
    EXPECT(0, "cmp a/not-imagefolder/000/000001.png a/not-imagefolder/000/000003.png");
    write_file("cut", records, 100);
    expect_refusal(1, "b --from cifar --source one,cut", "cut: not a binary CIFAR-10");
    expect_refusal(2, "b --from cifar --source one,", "--source 'one,': a name between commas is empty");
    expect_refusal(2, "b --from cifar --source ,one", "a name between commas is empty");
    expect_refusal(2, "b --from cifar --source one,,one", "a name between commas is empty");
    expect_refusal(1, "b --from cifar --source one,none", "none: cannot be read");
    EXPECT(0, "mkfifo pipe");
    expect_refusal(1, "b --from cifar --source pipe",
                   "pipe: not a regular file"); /* open() must not wait for a writer */
    /* The same image as a record of CIFAR-100, after its coarse and its fine label. */
    static uint8_t two[2 + CIFAR_IMAGE_BYTES] = {17, 61};
    memcpy(two + 2, records + 1 + CIFAR_IMAGE_BYTES + 1, CIFAR_IMAGE_BYTES);
    write_file("two", two, sizeof two);
    EXPECT(
        0,
        "$P --prepare f --from cifar100 --source two --store files && cat f/not-imagefolder/000/000000.cls");
    cr_assert_str_eq(out + strlen(out) - 2, "61");
    expect_picture("f/not-imagefolder/000/000000.png", pixels, sizeof pixels);
    EXPECT(0, "$P --prepare c --from cifar100 --labels-of coarse --source two --store files && cat "
              "c/not-imagefolder/000/000000.cls");
    cr_assert_str_eq(out + strlen(out) - 2, "17");
    expect_refusal(1, "b --from cifar100 --source one",
                   "one: not a binary CIFAR-100 file: its size, 6146 bytes");
    expect_refusal(2, "b --from cifar --labels-of fine --source one", "--labels-of");
}
#endif

#if defined HAVE_PNG && defined HAVE_JPEG
#define RESIZED "--from dataset --source j --out-res 20 "

/* The bytes do not depend on the number of threads. The index has the options, and the copy can be read,
 * verified, and resized again. */
Test(prepare, images_are_resized)
{
    EXPECT(0, "$P --prepare j --from digits --samples 300 --encode jpeg --shards 2");
    EXPECT(0, "$P --prepare a " RESIZED "--quality 80 --threads 1 && "
              "$P --prepare b " RESIZED "--quality 80 --threads 3 && diff -r a b && grep -e '--out-res=20 "
              "--quality=80 ' a/dataset.index");
    EXPECT(0, "$P --prepare b " RESIZED "--quality 81 --name other 2>&1 | grep -e 'quality=80 there'; "
              "$P --prepare q " RESIZED " && test $(stat -c %%s a/*.tar) -le $(stat -c %%s q/*.tar)");
    EXPECT(0,
           "$P --variant shards --data a --decode --loops 1 --warmups 0 --verify --format csv | grep -c ,0,");
    EXPECT(0, "$P --variant train-naive --model lenet --epochs 1 --data a --format csv");
    EXPECT(0, "$P --prepare p " RESIZED "--encode png && tar tf p/dataset-000000.tar | grep -c png | "
              "grep -x 300 && ! tar tf p/dataset-000000.tar | grep jpg");
    EXPECT(0, "$P --prepare n " RESIZED "--encode npy --channels 3 --fit longest --store files && "
              "$P --variant files --data n --loops 1 --warmups 0 --verify && "
              "head -c 128 n/not-imagefolder/000/000007.npy | grep -a \"'shape': (3, 20, 20)\"");
    EXPECT(0, "$P --prepare c --from dataset --source j --out-res 28 --encode png && "
              "$P --prepare d --from dataset --source j --out-res 28 --encode npy --channels 3 && "
              "$P --prepare e --from dataset --source d --out-res 28 --encode png --channels 1 && "
              "cmp c/dataset-000000.tar e/dataset-000000.tar");
    EXPECT(0,
           "for d in j c; do $P --prepare 8$d --from dataset --source $d --out-res 8 --encode png || exit 1; "
           "done; cmp 8j/dataset-000000.tar 8c/dataset-000000.tar");
    EXPECT(
        0,
        "mkdir t && for i in 0 1; do tar xOf c/dataset-000000.tar 000000.png >t/$i.png && echo 1 >t/$i.cls; "
        "done; $P --prepare u --from dataset --source t --out-res 14 --fit crop --store files && "
        "! cmp -s u/not-imagefolder/000/000000.png u/not-imagefolder/000/000001.png");
}

/* Images that have the size already are copied byte for byte. */
Test(prepare, images_of_the_right_size_are_copied)
{
    EXPECT(0, "$P --prepare j --from digits --samples 30 --encode jpeg && "
              "$P --prepare copy --from dataset --source j");
    static const char *const options[] = {"--out-res 28",
                                          "--out-res 28 --fit crop",
                                          "--out-res 28 --quality 5",
                                          "--out-res 100 --fit longest",
                                          "--out-res 28 --encode jpeg",
                                          "--out-res 28 --fit shortest --channels 1"};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        EXPECT(0,
               "$P --prepare r --from dataset --source j %s && cmp r/dataset-000000.tar "
               "copy/dataset-000000.tar && rm -r r",
               options[i]);
    EXPECT(0, "$P --prepare r --from dataset --source j --out-res 27 && ! cmp -s r/dataset-000000.tar "
              "copy/dataset-000000.tar");
}

Test(prepare, impossible_resizing_is_refused)
{
    static const struct {
        int status;
        const char *options, *words;
    } cases[] = {
        {2, "--fit crop", "--fit needs --out-res PIXELS; add that, or drop --fit"},
        {2, "--quality 50", "--quality needs --out-res PIXELS"},
        {2, "--encode npy", "--encode needs --out-res PIXELS"},
        {2, "--channels 3", "--channels needs --out-res PIXELS"},
        {2, "--out-res 8 --channels 2", "--channels: '2' is neither 1 nor 3"},
        {2, "--out-res 8 --encode npy --quality 50", "--quality is for JPEG files; drop --quality"},
        {1, "--out-res 29 --fit crop",
         "j/000000.jpg: sample '000000': an image of 28 x 28 pixels is too "
         "small for a crop of 29 x 29"},
        {1, "--out-res 8 --member cls", "it has no member for --image"},
        {1, "--out-res 8 --image cls", "its cls is neither an image nor an array"},
        {1, "--out-res 8 --image tif", "tif images cannot be decoded; convert them to PNG or JPEG"},
        {2, "--out-res 8 --encode png", "it has a member 'png' already"},
        {2, "--out-res 8 --fit random-resized-crop", "'random-resized-crop' is not one of resize, crop"}};
    EXPECT(0, "$P --prepare d --from digits --samples 12 --encode jpeg --store files && mkdir j && "
              "cp d/not-imagefolder/000/* j && for i in j/*.jpg; do cp $i ${i%%.jpg}.png; echo x "
              ">${i%%.jpg}.tif; done");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_expect_eq(run("rm -rf r; $P --prepare r --from dataset --source j %s", cases[i].options),
                     cases[i].status, "%s: %s", cases[i].options, out);
        cr_expect(strstr(out, cases[i].words), "%s: %s", cases[i].options, out);
    }
    EXPECT(0,
           "rm j/*.png j/*.tif && truncate -s 400 j/000003.jpg && $P --prepare b --from dataset --source j "
           "--out-res 8 --encode png --store files && cmp j/000003.jpg b/not-imagefolder/000/000003.jpg && "
           "test -e b/not-imagefolder/000/000004.png");
    cr_expect(strstr(out, "copied a broken image: j/000003.jpg: sample '000003': ") &&
                  strstr(out, "copied 1 broken image unchanged"),
              "%s", out);
}
#endif

/* A complete data set with a missing file, or with a file of the wrong size, is repaired. */
Test(prepare, lost_files_are_repaired)
{
    EXPECT(0, "$P --prepare whole " SMALL " && cp -r whole a && rm a/counter-000001.tar");
    EXPECT(0, "$P --prepare a " SMALL);
    cr_assert_not_null(strstr(out, "1 of 3 shards have missing files"), "%s", out);
    cr_assert_not_null(strstr(out, "(2 of 3 shards were already finished)"), "%s", out);
    EXPECT(0, "diff -r whole a && truncate -s 100 a/counter-000002.tar && rm a/counter-000000.idx");
    EXPECT(0, "$P --prepare a " SMALL " && diff -r whole a");
    EXPECT(0, "truncate -s -3 a/counter-000001.idx");
    EXPECT(0, "$P --prepare a " SMALL);
    cr_assert_not_null(strstr(out, "1 of 3 shards have missing files"), "%s", out);
    EXPECT(0, "diff -r whole a");
    static const char *const broken[] = {"rm a/samples.csv", "truncate -s -1 a/samples.csv",
#ifdef HAVE_JANSSON
                                         "rm a/counter.wids.json", "truncate -s -1 a/counter.wids.json",
#endif
                                         "truncate -s 0 a/samples.csv"};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        EXPECT(0, "%s && $P --prepare a " SMALL, broken[i]);
        cr_assert_not_null(strstr(out, "is missing or incomplete; writing the lists again"), "%s: %s",
                           broken[i], out);
        cr_assert_not_null(strstr(out, "(3 of 3 shards were already finished)"), "%s", out);
        EXPECT(0, "diff -r whole a");
    }
    EXPECT(0, "$P --prepare f --samples 30 --sample-shape 2 --store files && cp -r f g && rm "
              "g/not-imagefolder/000/000007.npy");
    EXPECT(0, "$P --prepare g --samples 30 --sample-shape 2 --store files && diff -r f g");
}

/* ---- Faults ---- */

#define ONCE "--warmups 0 --warmup-time 0 --min-samples 1 --min-time 0 --max-time 0"

Test(prepare, archives_read_as_files_are_warned_about)
{
    EXPECT(0,
           "$P --prepare a/shards " SMALL " && mkdir b && gzip < a/shards/counter-000000.tar > b/X.TAR.gz && "
           "$P --variant files --data b --cache any " ONCE);
    cr_assert_not_null(strstr(out, "b/X.TAR.gz looks like a shard but is read as a file"), "%s", out);
    EXPECT(0, "$P --prepare files --store files --samples 3 && "
              "$P --variant files --data files --cache any " ONCE);
    cr_assert_null(strstr(out, "looks like"), "%s", out);
}

#ifdef HAVE_PNG
/* `train` refuses gray and RGB images of one size. A mask beside each image does not count. */
Test(prepare, images_that_differ_only_in_channels_give_a_warning)
{
    static const char words[] = "the images have different numbers of channels";
    EXPECT(0, "$P --prepare gray --from digits --samples 12 --store files && "
              "$P --prepare rgb --from dataset --source gray --out-res 28 --channels 3 --store files && "
              "mkdir m && cp gray/not-imagefolder/000/* m && cp rgb/not-imagefolder/000/000007.png m && "
              "$P --prepare a --from dataset --source m");
    cr_expect(strstr(out, words) && strstr(out, "new folder with --out-res PIXELS --channels 3 (or 1)"), "%s",
              out);
    EXPECT(0, "$P --prepare b --from dataset --source m --out-res 16");
    cr_expect(strstr(out, words) && strstr(out, "into a new folder with --channels 3 (or 1)"), "%s", out);
    EXPECT(2, "$P --variant train-naive --model logreg --epochs 1 --data b");
    cr_expect(strstr(out, "16x16; only their channels differ: add --out-res 16 --channels 3 (or 1)"), "%s",
              out);
    EXPECT(0, "$P --variant train-naive --model logreg --epochs 1 --data b --out-res 16 --channels 3");
    EXPECT(0, "$P --prepare c --from dataset --source m --out-res 16 --channels 3");
    cr_expect_null(strstr(out, words), "%s", out);
    EXPECT(0, "rm m/* && for i in 0 1 2 3; do cp rgb/not-imagefolder/000/00000$i.* m && "
              "cp gray/not-imagefolder/000/00000$i.png m/00000$i.mask.png; done && "
              "$P --prepare d --from dataset --source m");
    cr_expect_null(strstr(out, words), "%s", out);
}

#ifdef HAVE_WEBP
/* WebP images are copied unchanged, read from shards, and written as PNG images if they are resized. */
Test(prepare, webp_images_are_copied_and_resized)
{
    EXPECT(0,
           "R=%s/tests/data/images; mkdir -p w/a w/b && cp $R/lossy.webp $R/exif.webp w/a && "
           "cp $R/alpha.webp w/b && head -c 100 w/a/lossy.webp > w/b/torn.webp && "
           "$P --prepare s --from dataset --source w && tar xf s/*.tar && cmp 000000.webp w/a/exif.webp",
           root);
    EXPECT(1, "$P --variant shards --data s --decode --cache any");
    cr_expect(strstr(out, "sample '000003': libwebp: the file was truncated"), "%s", out);
    EXPECT(0, "$P --variant shards --data s --decode --cache any --on-error skip");
    EXPECT(
        0,
        "$P --prepare r --from dataset --source w --out-res 8 --store files && cd r/not-imagefolder/000 && "
        "ls | tr '\\n' ' '");
    cr_expect(strstr(out, "copied 1 broken image unchanged") &&
                  strstr(out, "000000.cls 000000.png 000001.cls 000001.png 000002.cls 000002.png 000003.cls "
                              "000003.webp"),
              "%s", out);
}
#endif

/* A failure names a remedy that changes the source. The command then cannot be repeated in this folder. */
Test(prepare, a_changed_source_needs_a_new_folder)
{
    EXPECT(0, "$P --prepare a --from digits --samples 12 --store files && mkdir m && "
              "cp a/not-imagefolder/000/* m && mv m/000011.png kept && echo x > m/000011.tif");
    EXPECT(1, "$P --prepare b --from dataset --source m --out-res 16 --shards 2");
    cr_expect(strstr(out, "finished shards are kept: repeat the command to continue, or, if you change the "
                          "source, prepare into a new folder or remove this one"),
              "%s", out);
    EXPECT(2, "rm m/000011.tif && mv kept m/000011.png && "
              "$P --prepare b --from dataset --source m --out-res 16 --shards 2");
    cr_expect(strstr(out, "name another folder, or remove this one"), "%s", out);
    EXPECT(0, "$P --prepare c --from dataset --source m --out-res 16 --shards 2 && rm -r b && "
              "$P --prepare b --from dataset --source m --out-res 16 --shards 2");
}

/* Bytes are copied unchanged, but the user learns of images that no reader can decode. */
Test(prepare, broken_images_are_copied_with_a_warning)
{
    EXPECT(0, "$P --prepare a --from digits --samples 12 --store files && mkdir m && "
              "cp a/not-imagefolder/000/* m && : > m/000003.png && $P --prepare b --from dataset --source m");
    cr_assert(
        strstr(out, "copied a broken image: m/000003.png: sample '000003': the image is empty") &&
            strstr(out, "copied 1 broken image unchanged; remove it from the source") &&
            strstr(out, "Only the headers of unchanged images are checked; to check all pixels: fdsl-bench "),
        "%s", out);
    EXPECT(0, "mkdir o && cp a/not-imagefolder/000/000003.* o && : > o/000003.mask.png && "
              "$P --prepare p --from dataset --source o --member all");
    cr_assert(strstr(out, "o/000003.png: sample '000003': its member 'mask.png': the image is empty"), "%s",
              out);
    EXPECT(0, "for i in 0 1 2 4 5 6 7 8 9; do echo no > m/00000$i.png; done; "
              "$P --prepare c --from dataset --source m --store files && cmp m/000004.png "
              "c/not-imagefolder/000/000004.png");
    cr_assert(strstr(out, "m/000007.png") && !strstr(out, "m/000008.png") &&
                  strstr(out, "copied 10 broken images unchanged; remove them from"),
              "%s", out);
    EXPECT(0, "$P --prepare d --from dataset --source a && ! $P --variant files --decode --data c " ONCE);
    cr_assert_null(strstr(out, "copied"), "%s", out);
}
#endif

#define REPLACED                                                                                \
    "--prepare a --from digits --samples 40 --encode npy --shards 4 && cp a/digits-000000.tar " \
    "a/digits-000002.tar"

/* The source may have changed since its index was written: a shard in the place of another one, or a flipped
 * bit. Its copy would have new hashes, which match the wrong data. */
Test(prepare, a_source_is_compared_with_its_index)
{
    EXPECT(0, "$P " REPLACED);
    expect_refusal(
        1, "b --from dataset --source a",
        "sample '000020': a/digits-000002.tar: offset 0: the header names '000000.cls' of 1 bytes, "
        "but the index lists '000020.cls'");
    expect_refusal(1, "c --from dataset --source a --store files", "sample '000020': a/digits-000002.tar");
    expect_refusal(1, "d --from dataset --source a --image npy", "sample '000020': a/digits-000002.tar");
    EXPECT(0, "rm -r a && $P --prepare a --from digits --samples 40 --store files && "
              "f=a/not-imagefolder/000/000007.png && "
              "printf X | dd of=$f bs=1 seek=60 conv=notrunc status=none");
    expect_refusal(1, "e --from dataset --source a", "000007.png: offset 0: the member's data do not match");
}

#if defined(HAVE_JANSSON) && defined(HAVE_CRYPTO)
Test(prepare, a_source_is_compared_with_its_wids_index)
{
    EXPECT(0, "$P " REPLACED " && rm a/*.index");
    expect_refusal(1, "b --from dataset --source a", "a/digits-000002.tar: the shard's md5 is ");
}
#endif

#ifdef HAVE_JANSSON
/* If a folder has two lists of shards, one must be chosen. The names of classes beside them are kept. */
Test(prepare, one_of_two_wids_indexes_is_chosen)
{
    EXPECT(0, "$P --prepare a --from digits --samples 40 --shards 4 && rm a/*.index && "
              "cd a && sed 's/0.tar/x.tar/' digits.wids.json >train.wids.json && "
              "mv digits.wids.json val.wids.json && "
              "seq -f n%%.0f 0 9 >classes.txt");
    expect_refusal(
        2, "b --from dataset --source a",
        "--source a: the folder contains both train.wids.json and val.wids.json; name one of them");
    EXPECT(0, "$P --prepare b --from dataset --source a/val.wids.json --store imagefolder");
    EXPECT(0, "test $(ls b/*/*.png | wc -l) = 40 && test $(ls -d b/n0 b/n9 | wc -l) = 2");
    EXPECT(0, "$P --variant shards --data a/val.wids.json " ONCE);
    EXPECT(0, "rm a/train.wids.json && $P --prepare c --from dataset --source a --store imagefolder && "
              "diff -r b c && rm a/val.wids.json && $P --prepare d --from dataset --source a && "
              "cmp a/classes.txt d/classes.txt");
}
#endif

Test(prepare, invalid_options_and_folders_are_refused)
{
    expect_refusal(2, "a", "set the number of samples with --samples N");
    expect_refusal(2, "a --samples 2 --shards 3", "there are only 2 samples");
    expect_refusal(2, "a --samples 2 --shards 1 --store files", "--shards needs --store shards");
    expect_refusal(2, "a --samples 2 --name ../x", "--name '../x'");
    expect_refusal(2, "a --samples 2 --from sinth", "did you mean 'synth'?");
    expect_refusal(2, "a --samples 2 --sample-shape 3,,4", "--sample-shape");
    expect_refusal(2, "a --samples 2 --sample-shape 3,", "missing after the last comma");
    expect_refusal(2, "a --samples 2 --sample-shape 65536,65536,2", "more than 2^32 values");
    expect_refusal(2, "a --samples 2 --verify", "--verify does not apply to --prepare");
    EXPECT(0, "! test -e a && touch file && mkdir full && touch full/mine");
    expect_refusal(2, "file --samples 2", "cannot open folder 'file': Not a directory");
    expect_refusal(2, "file/b --samples 2", "cannot create folder 'file/b': Not a directory");
    EXPECT(0, "$P --prepare new/above/b/ --samples 2 && test -e new/above/b/counter.index");
    expect_refusal(2, "full --samples 2", "full contains other files ('mine')");
    EXPECT(0, "test \"$(ls -A full)\" = mine && $P --prepare b " SMALL);
    expect_refusal(2, "b --samples 25 --shards 3 --sample-shape 3,6",
                   "(--sample-shape=3,5 there, --sample-shape=3,6 now)");
    expect_refusal(2, "b --samples 25 --shards 3 --sample-shape 3,5 --name y", "b contains other files");
    EXPECT(0, "rm b/counter.index");
    expect_refusal(2, "b " SMALL,
                   "without its index, counter.index; copy it with "
                   "--prepare NEW --from dataset --source b, which writes an index, or remove");
    EXPECT(0, "$P --prepare c --from dataset --source b && test -s c/dataset.index");
    EXPECT(0, "$P --prepare x --help && ! test -e x");
}

Test(prepare, concurrent_runs_are_refused)
{
    char path[PATH_MAX];
    EXPECT(0, "mkdir a");
    snprintf(path, sizeof path, "%s/a", folder);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    cr_assert(fd >= 0 && flock(fd, LOCK_EX) == 0);
    expect_refusal(2, "a " SMALL, "another run is preparing a");
    close(fd);
    EXPECT(0, "$P --prepare a " SMALL);
}

Test(prepare, a_folder_without_permission_is_refused)
{
    const char *other = geteuid() == 0 ? "setpriv --reuid 65534 --regid 65534 --clear-groups" : "";
    EXPECT(0, "mkdir a && chmod 555 a && chmod 755 . && cp $P program"); /* root may write everywhere */
    EXPECT(2, "%s ./program --prepare a " SMALL, other);
    cr_assert_not_null(strstr(out, "cannot write into folder 'a'"), "%s", out);
}

/* A write that fails, as on a full disk, must leave no shard and no temporary file. Repeating the command
 * must complete the data set. */
Test(prepare, failed_write_keeps_finished_units)
{
    static const char options[] = "--samples 40 --shards 4 --sample-shape 1000";
    EXPECT(0, "$P --prepare whole %s", options);
    EXPECT(1, "ulimit -f 8; $P --prepare a %s", options); /* the unit of ulimit is 512 or 1024 bytes */
    cr_assert_not_null(strstr(out, "cannot write shard counter-000000.tar: "), "%s", out);
    cr_assert_not_null(strstr(out, "cannot be written: File too large; finished shards are kept: repeat"),
                       "%s", out);
    EXPECT(0, "test -z \"$(find a -name '*.tmp' -o -name '*.tar')\"");
    EXPECT(0, "$P --prepare a %s && diff -r whole a", options);
}

#else
Test(prepare, needs_xxhash)
{
    cr_assert_eq(
        WEXITSTATUS(system("${FDSL_BENCH:-./fdsl-bench} --prepare /tmp/fdsl-none --samples 2 2>/dev/null")),
        4);
}
#endif
