/* Tests how `load` uses an index of a data set. The faults are missing samples, flipped bits, and names or
 * lists that do not match the shards. */
#ifdef HAVE_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

#include "core/timer.h"
#include "data/checksum.h"
#include "data/dataset.h"
#include "load_support.h"

TestSuite(load_index, .timeout = 60);

Test(load_index, prepared_data_are_read_and_compared_with_their_index, .init = make_folder,
     .fini = remove_folder)
{
    uint64_t checksums[2];
    for (int shards = 0; shards <= 1; shards++) {
        struct job job;
        struct checksum checksum;
        prepare(shards ? "shards" : "files");
        for (size_t v = 0; v < (shards ? COUNT_OF(shard_variants) : COUNT_OF(file_variants)); v++) {
            if (start_job(&job, shards ? shard_variants[v] : file_variants[v], "--cache any"))
                expect_none_wrong(&job);
            cr_assert(dataset_of(&job)->indexed);
            const struct order_plan plan = load_plan(job.input, 1);
            must(load_expect(job.input, &plan, 0, &checksum));
            close_job(&job);
        }
        checksums[shards] = checksum.sum;
        renew_folder();
    }
    cr_assert_eq(checksums[0], checksums[1], "both layouts must have the same samples");
}

Test(load_index, flipped_bits_are_detected_by_index, .init = make_folder, .fini = remove_folder)
{
    struct job job;
    struct dataset dataset;
    prepare("shards");
    must(dataset_open(folder, false, NULL, NULL, &dataset));
    const struct dataset_member *member = &dataset.members[dataset.samples[20].member];
    char shard[64];
    snprintf(shard, sizeof shard, "%s", dataset.files[member->file].name);
    overwrite(shard, (long)(member->offset + member->size / 2), "\xff", 1);
    struct stat info; /* decay of the disk changes no time */
    cr_assert_eq(stat(in_folder(shard), &info), 0);
    dataset_know_file(&dataset.files[member->file], &info);
    cr_assert_eq(dataset_hash(&dataset), STATUS_FAILED);
    cr_assert(strstr(status_text(), shard) && strstr(status_text(), "offset "), "%s", status_text());
    dataset_close(&dataset);
    must(open_job(&job, "--cache any --on-error skip"));
    cr_assert_eq(dataset_of(&job)->skipped, 1);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++) {
        if (!start(&job, shard_variants[v]))
            continue;
        run_well(&job, 0);
        const struct load_result result = result_of(&job);
        cr_assert(result.skipped == 0 && result.checksum.count == 39, "%s", shard_variants[v]);
        stop(&job);
    }
    close_job(&job);
}

/* Writes another name into the header of the member whose data begin at `offset`. */
static void rename_member(const char *shard, uint64_t offset, const char *name)
{
    uint8_t before[TAR_BLOCK_BYTES], header[TAR_BLOCK_BYTES];
    char size[13] = "";
    int fd = open(in_folder(shard), O_RDWR);
    cr_assert(fd >= 0 && pread(fd, before, sizeof before, (off_t)(offset - sizeof before)) == sizeof before);
    memcpy(size, before + 124, 12);
    cr_assert_eq(tar_header(header, name, strtoull(size, NULL, 8)), STATUS_OK);
    cr_assert_eq(pwrite(fd, header, sizeof header, (off_t)(offset - sizeof header)), sizeof header);
    close(fd);
}

/* Without --on-error skip, a verified run of every variant must fail with this message. With
 * --on-error skip, every variant must skip the sample. */
static void expect_headers_compared(const char *words)
{
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        for (int skip = 0; skip <= 1; skip++) {
            struct job job;
            uint64_t wrong = 1;
            bool started =
                start_job(&job, shard_variants[v], skip ? "--cache any --on-error skip" : "--cache any");
            cr_assert_eq(dataset_of(&job)->skipped, (uint64_t)skip);
            if (started && skip) {
                must(run_closely(&job, 0, &wrong));
                cr_assert_eq(wrong, 0);
                run_well(&job, 0);
                const struct load_result result = result_of(&job);
                cr_assert(result.checksum.count + result.skipped == 39, "%s", shard_variants[v]);
            } else if (started) {
                cr_assert_eq(run_closely(&job, 0, &wrong), STATUS_FAILED, "%s", shard_variants[v]);
                expect_words(words);
            }
            close_job(&job);
        }
}

Test(load_index, header_mismatch_with_index_is_detected, .init = make_folder, .fini = remove_folder)
{
    struct dataset dataset;
    char words[256], shard[64];
    prepare("shards");
    must(dataset_open(folder, false, NULL, NULL, &dataset));
    const struct dataset_member member = dataset.members[dataset.samples[20].member];
    snprintf(shard, sizeof shard, "%s", dataset.files[member.file].name);
    must(dataset_hash(&dataset));
    dataset_close(&dataset);
    rename_member(shard, member.offset, "000099.npy");
    snprintf(words, sizeof words, "%s: offset %llu: the header names '000099.npy'", shard,
             (unsigned long long)member.offset - TAR_BLOCK_BYTES);
    expect_headers_compared(words);
    rename_member(shard, member.offset, "000020.png");
    expect_headers_compared("the header names '000020.png'");
    rename_member(shard, member.offset, "README"); /* a name that belongs to no sample */
    expect_headers_compared("the header names 'README'");
    rename_member(shard, member.offset, "000020.npy");
    overwrite(shard, (long)member.offset - TAR_BLOCK_BYTES, "9", 1);
    snprintf(words, sizeof words, "%s: offset %llu: wrong header checksum", shard,
             (unsigned long long)member.offset - TAR_BLOCK_BYTES);
    expect_headers_compared(words);
}

Test(load_index, missing_shard_and_unreadable_folder_are_reported, .init = make_folder, .fini = remove_folder)
{
    prepare("shards");
    cr_assert_eq(rename(in_folder("counter-000001.tar"), "/tmp/fdsl-load-moved.tar"), 0);
    expect_refused("counter-000001.tar: the shard is missing");
    expect_skipped(27, "13");
    struct dataset dataset;
    must(dataset_open(folder, true, NULL, NULL, &dataset));
    cr_assert(dataset.faults == 1 && dataset.skipped == 13, "%d faults", (int)dataset.faults);
    dataset_close(&dataset);
    cr_assert_eq(unlink("/tmp/fdsl-load-moved.tar"), 0);
    cr_assert_eq(chmod(folder, 0), 0);
    if (geteuid() == 0)
        cr_assert_eq(seteuid(65534), 0);
    expect_refused("Permission denied");
    if (getuid() == 0)
        cr_assert_eq(seteuid(0), 0);
    cr_assert_eq(chmod(folder, 0700), 0);
}

/* Swaps two sample lines and corrects the hash of the index. The index must be refused, because readers would
 * have to seek back. */
Test(load_index, index_with_decreasing_offsets_is_refused, .init = make_folder, .fini = remove_folder)
{
    struct index index;
    char path[2 * PATH_MAX];
    prepare("shards");
    snprintf(path, sizeof path, "%s", in_folder("counter.index"));
    must(index_read(path, &index));
    struct index_sample third = index.samples[3];
    index.samples[3] = index.samples[4];
    index.samples[4] = third;
    must(index_save(path, &index, 0, index.unit_count));
    index_free(&index);
    expect_refused("counter.index: line 7: counter-000000.tar: offset ");
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        if (is_available(shard_variants[v]))
            cr_assert(command("$P --variant %s --data $D --cache any --on-error skip --min-time 0 2>&1 | "
                              "grep -q 'there is no room for a header'",
                              shard_variants[v]),
                      "%s", shard_variants[v]);
}

#ifdef HAVE_JANSSON
/* Writes a wids index for the shards of make_shards(). `first` is the URL of the first shard; `more` is JSON
 * that is added to its entry. */
static void write_wids(const char *first, const char *more)
{
    FILE *stream = fopen(in_folder("x.wids.json"), "w");
    fprintf(stream,
            "{\"__kind__\": \"wids-shard-index-v1\", \"wids_version\": 1, \"shardlist\": [\n"
            "{\"url\": \"%s\", \"nsamples\": 25%s},\n"
            "{\"url\": \"x-000001.tar\", \"nsamples\": 25}, {\"url\": \"x-000002.tar\", \"nsamples\": 51}]}",
            first, more);
    cr_assert_eq(fclose(stream), 0);
}

Test(load_index, wids_index_gives_number_of_lost_samples, .init = make_folder, .fini = remove_folder)
{
    char text[64];
    make_shards(101);
    write_wids("x-000000.tar", "");
    expect_skipped(101, "0");
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        expect_exactly_once(shard_variants[v], "--cache any --shuffle 10");

    uint32_t whole = whole_before(25, 20000);
    snprintf(text, sizeof text, "%u", 25 - whole);
    cr_assert_eq(truncate(in_folder("x-000001.tar"), 20000), 0);
    expect_refused("x-000001.tar: offset ");
    expect_skipped(76 + whole, text);
    cr_assert_eq(unlink(in_folder("x-000001.tar")), 0);
    expect_refused("x-000001.tar: cannot open");
    expect_skipped(76, "25");
}

/* The index on this machine may name any file on this machine. Messages have the whole path. A URL is that of
 * a shard which was downloaded into the folder of the index. */
Test(load_index, wids_index_names_shards_anywhere, .init = make_folder, .fini = remove_folder)
{
    static const char *const places[] = {"%s/x-000000.tar",
                                         "file://%s/x-000000.tar",
                                         "file:%s/x-000000.tar",
                                         "%s/.//x-000000.tar",
                                         "https://example.org/a/x-000000.tar",
                                         "s3://bucket/x%%2D000000.tar?sig=secret"};
    static const char *const outside[] = {"%s/other/x-000000.tar", "file://%s/other/x-000000.tar",
                                          "other/../other/x-000000.tar", "./other/x-000000.tar"};
    char place[2 * PATH_MAX];
    make_shards(101);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    for (size_t i = 0; i < COUNT_OF(places); i++) {
        snprintf(place, sizeof place, places[i], folder);
        write_wids(place, "");
        for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
            expect_exactly_once(shard_variants[v], "--cache any --shuffle 10");
    }
    cr_assert(command("cd $D && mkdir other && mv x-000000.tar other"));
    for (size_t i = 0; i < COUNT_OF(outside); i++) {
        snprintf(place, sizeof place, outside[i], folder);
        write_wids(place, "");
        for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
            expect_exactly_once(shard_variants[v], "--cache any --shuffle 10");
    }
    snprintf(place, sizeof place, outside[0], folder);
#pragma GCC diagnostic pop
    write_wids(place, ", \"filesize\": 1");
    strcat(place, ": the shard has ");
    expect_refused(place);
    cr_assert(command("rm $D/other/*"));
    expect_refused("/other/x-000000.tar: cannot open: No such file");
    expect_skipped(76, "25");
}

Test(load_index, wids_index_with_unusable_places_is_refused, .init = make_folder, .fini = remove_folder)
{
    make_shards(101);
    write_wids("https://example.org/y.tar", "");
    expect_refused("'x-000001.tar' is a path, but other shards of the index have URLs");
    write_wids("https://example.org/", "");
    expect_refused("'https://example.org/' names no file");
    write_wids("https://example.org", "");
    expect_refused("'https://example.org' names no file");
    write_wids("x-000001.tar", "");
    expect_refused("'x-000001.tar' is named twice");
    expect_refused("/x.wids.json: ");
    cr_assert(command("cd $D && cp x.wids.json z.wids.json"));
    expect_refused("the folder contains both x.wids.json and z.wids.json; name one of them");
    cr_assert(command("rm $D/z.wids.json"));
    write_wids("./x-000001.tar", "");
    expect_refused("'./x-000001.tar' and 'x-000001.tar' are the same file");
    write_wids("x-000000.tar", "");
    cr_assert(command(
        "cd $D && sed -i 's|\"x-|\"https://user:secret@example.org/x-|g; s|x-000002.tar|y.tar?secret|' "
        "x.wids.json"));
    expect_refused("'https://...@example.org/y.tar?...' is not in the folder of the index, but other shards");
}

/* A shard that is read twice gives its samples twice the weight. Another name of the same file counts, too.
 */
Test(load_index, a_shard_that_is_named_twice_is_refused, .init = make_folder, .fini = remove_folder)
{
    make_shards(101);
    cr_assert_eq(symlink("x-000001.tar", in_folder("y.tar")), 0);
    expect_refused("'x-000001.tar' and 'y.tar' are the same file; name each file once, or copy the file");
    cr_assert(command("cd $D && rm y.tar && ln x-000001.tar y.tar"));
    expect_refused("'x-000001.tar' and 'y.tar' are the same file");
    cr_assert(command("cd $D && rm y.tar && cp x-000001.tar y.tar"));
    expect_skipped(126, "0");
}

/* Servers and users put other files in the place of a shard. A pattern of names is for URLs only. */
Test(load_index, other_files_in_place_of_a_shard_are_named, .init = make_folder, .fini = remove_folder)
{
    static const char *const others[][2] = {
        {"gzip -c x-000000.tar", "this is not a tar file, but gzip data: unpack it"},
        {"xz -c x-000000.tar", "this is not a tar file, but xz data: unpack it"},
        {"printf '\\n <!DOCTYPE html><title>Log in</title>'",
         "this is not a tar file, but an HTML or XML page, such as a server's page for logging in"},
    };
    char text[PATH_MAX];
    for (int indexed = 0; indexed < 2; indexed++)
        for (size_t i = 0; i < COUNT_OF(others); i++) {
            renew_folder();
            if (indexed)
                prepare("shards");
            else
                make_shards(101);
            snprintf(text, sizeof text, "cd $D && f=$(ls *0.tar) && cp $f x-000000.tar; %s >y && mv y $f",
                     others[i][0]);
            cr_assert(command("%s", text));
            if (indexed)
                cr_assert(command("rm $D/x-000000.tar"));
            expect_refused(others[i][1]);
        }
}

Test(load_index, shards_are_compared_with_wids_index, .init = make_folder, .fini = remove_folder)
{
    struct job job;
    uint64_t wrong;
    make_shards(101);
    write_wids("x-000000.tar", ", \"filesize\": 1000");
    expect_refused("x-000000.tar: the shard has ");
    expect_skipped(101, "0"); /* no sample is missing */
    cr_assert(
        command("$P --variant shards --data $D --on-error skip --max-time 0.01 2>&1 | "
                "grep 'warning: all samples of this shard are read, although it differs from its list: '"));
    cr_assert(command("cp $D/x-000002.tar $D/y.tar"));
    write_wids("y.tar", "");
    expect_refused("y.tar: the shard holds 51 samples but its index says 25");
    expect_skipped(127, "0");
    write_wids("x-000000.tar", ", \"md5sum\": \"00000000000000000000000000000000\"");
    cr_assert(start_job(&job, "shards", "--cache any"));
#ifdef HAVE_CRYPTO
    cr_assert_eq(run_closely(&job, 0, &wrong), STATUS_FAILED);
    expect_words("x-000000.tar: the shard's md5 is ");
#else
    must(run_closely(&job, 0, &wrong));
#endif
    close_job(&job);
}
#endif

Test(load_index, extensions_differing_in_case_are_reported, .init = make_folder, .fini = remove_folder)
{
    make_files(101);
    put_file("000/000004.CLS", "7", 1);
    expect_refused("000/000004.cls: sample '000/000004': it has 'cls' twice");
    expect_skipped(100, "1");
}

/* With --on-error skip, dangling links and pipes are skipped. It is unknown how many samples a dangling
 * link had, so the column `skipped` is empty. */
Test(load_index, unreadable_files_are_skipped, .init = make_folder, .fini = remove_folder)
{
    make_files(101);
    cr_assert_eq(symlink("nowhere", in_folder("dead.bin")), 0);
    expect_refused("dead.bin: a symbolic link to 'nowhere', which cannot be opened: No such file");
    expect_skipped(101, "");
    renew_folder();
    make_shards(101);
    cr_assert_eq(mkfifo(in_folder("pipe.tar"), 0600), 0);
    expect_skipped(101, "0");
    for (int shard = 0; shard < 3; shard++) {
        char name[64];
        snprintf(name, sizeof name, "x-%06d.tar", shard);
        cr_assert_eq(truncate(in_folder(name), 0), 0);
    }
    struct job job;
    cr_assert_eq(open_job(&job, "--cache any --on-error skip"), STATUS_FAILED);
    expect_words("all samples are broken");
    close_job(&job);
}

Test(load_index, duplicate_extension_is_reported, .init = make_folder, .fini = remove_folder)
{
    static const uint8_t zeros[TAR_END_BYTES];
    FILE *stream = fopen(in_folder("twice.tar"), "w");
    put_member(stream, 1, 0);
    put_member(stream, 1, 0);
    for (uint32_t sample = 2; sample < 10; sample++)
        put_member(stream, sample, 0);
    fwrite(zeros, 1, sizeof zeros, stream);
    fclose(stream);
    expect_refused("twice.tar: offset 2048: sample '000001': it has 'bin' twice");
    expect_skipped(8, "1"); /* all other samples can be read */
}

/* Missing masks do not make the search for the others slower: the time of a tree where nine of ten masks have
 * other names is compared with that of a complete one. */
Test(load_index, missing_masks_cost_no_search, .init = make_folder, .fini = remove_folder)
{
    enum { IMAGES = 20000 };
    double times_s[2];
    if (access("/dev/shm", W_OK) == 0) /* so many files on a disk take long */
        make_folder_in("/dev/shm");
    cr_assert(
        command("python3 - $D <<'END'\n"
                "import os, sys\n"
                "os.makedirs(sys.argv[1] + '/image/a')\n"
                "os.makedirs(sys.argv[1] + '/mask/a')\n"
                "for i in range(%d):\n"
                "    for kind in 'image', 'mask':\n"
                "        open('%%s/%%s/%%s%%05d.png' %% (sys.argv[1], kind, 'a/' * (i %% 3 == 0), i), 'w')\n"
                "END",
                IMAGES));
    for (int few = 0; few < 2; few++) {
        struct dataset dataset;
        if (few) /* only every tenth image has a mask */
            cr_assert(command("python3 - $D <<'END'\n"
                              "import os, sys\n"
                              "for place, _, names in os.walk(sys.argv[1] + '/mask'):\n"
                              "    for name in names:\n"
                              "        if name[4] != '0':\n"
                              "            os.rename(place + '/' + name, place + '/9' + name[1:])\n"
                              "END"));
        const double begin_s = timer_cpu_s();
        must(dataset_find(folder, false, false, NULL, NULL, &dataset));
        times_s[few] = timer_cpu_s() - begin_s;
        cr_assert_eq(dataset.sample_count, IMAGES);
        for (uint32_t i = 0; i < IMAGES; i++) {
            const struct dataset_sample *sample = &dataset.samples[i];
            const struct dataset_member *members = &dataset.members[sample->member];
            const char *image = dataset.files[members[0].file].name;
            const bool tenth = sample->key[strlen(sample->key) - 1] == '0';
            cr_assert_eq(sample->members, few && !tenth ? 1 : 2, "%s", sample->key);
            cr_assert(sample->members == 1 ||
                          strcmp(image + strlen("image"),
                                 dataset.files[members[1].file].name + strlen("mask")) == 0,
                      "%s", image);
        }
        dataset_close(&dataset);
    }
    cr_expect(times_s[1] < 2 * times_s[0] + 0.1, "%g s, complete %g s", times_s[1], times_s[0]);
}

#ifdef HAVE_XXHASH
/* Hashes are computed with the vectors of the processor. They are those of xxhash.h as this file is compiled,
 * for any processor; also with a seed, and of data in two parts. */
Test(load_index, hashes_are_those_of_any_processor)
{
    static const size_t sizes[] = {0,   1,   3,   16,  17,   128,  129,  240,   241,   255,  256,
                                   257, 511, 512, 513, 1023, 1024, 1025, 16384, 16385, 99991};
    static const size_t heads[] = {0, 1, 3, 63, 64, 127, 128, 255, 256, 257, 1024};
    uint8_t *bytes = malloc(99991 + 8);
    cr_assert_not_null(bytes);
    for (size_t i = 0; i < 99991 + 8; i++)
        bytes[i] = (uint8_t)(i * 2654435761u >> 13);
    for (size_t s = 0; s < COUNT_OF(sizes); s++)
        for (size_t from = 0; from < 8; from += 7) { /* also unaligned */
            const uint64_t hash = XXH3_64bits(bytes + from, sizes[s]);
            cr_assert_eq(checksum_whole(bytes + from, sizes[s]), hash, "%zu", sizes[s]);
            cr_assert_eq(checksum_seeded(bytes + from, sizes[s], 7),
                         XXH3_64bits_withSeed(bytes + from, sizes[s], 7), "%zu", sizes[s]);
            for (size_t h = 0; h < COUNT_OF(heads) && heads[h] <= sizes[s]; h++)
                cr_assert_eq(
                    checksum_split(bytes + from, heads[h], bytes + from + heads[h], sizes[s] - heads[h]),
                    hash, "%zu of %zu", heads[h], sizes[s]);
        }
    free(bytes);
}
#endif
