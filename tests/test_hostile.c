/* Tests hostile inputs of --prepare and of the readers, by running the program: unusual names, sizes, ends of
 * shards and depths of folders. */
#include "shell.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "data/tar.h"

#if defined(HAVE_XXHASH)

TestSuite(hostile, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

/* Like expect_refused(), but also expects that the line contains no escape sequence. */
static void expect_refusal(int wanted, const char *words, const char *command)
{
    expect_refused(wanted, words, command);
    cr_expect_null(strchr(out, '\033'), "%s", out);
}

/* ---- Shards with arbitrary names ---- */

static char shard_path[PATH_MAX];

static FILE *begin_shard(const char *name)
{
    snprintf(shard_path, sizeof shard_path, "%s/%s", folder, name);
    FILE *stream = fopen(shard_path, "w");
    cr_assert_not_null(stream);
    return stream;
}

static void add_member(FILE *stream, const char *name, const char *data)
{
    static const uint8_t zeros[TAR_BLOCK_BYTES];
    uint8_t headers[TAR_HEADERS_MAX];
    size_t count, size = strlen(data);
    cr_assert_eq(tar_headers(headers, name, size, &count), STATUS_OK, "%s", status_text());
    fwrite(headers, 1, count, stream);
    fwrite(data, 1, size, stream);
    fwrite(zeros, 1, tar_padding(size), stream);
}

static void end_shard(FILE *stream)
{
    static const uint8_t zeros[TAR_END_BYTES];
    cr_assert(fwrite(zeros, 1, sizeof zeros, stream) == sizeof zeros && fclose(stream) == 0);
}

/* An extension with a blank, tab or newline would add a field or line to an index. */
Test(hostile, extensions_that_would_inject_records_are_refused)
{
    static const char *const extensions[] = {"a\tb", "a\nsample\t9", "a b", "\033[2J"};
    for (size_t i = 0; i < sizeof extensions / sizeof *extensions; i++) {
        char name[64];
        EXPECT(0, "rm -rf s f o && mkdir s f");
        FILE *stream = begin_shard("s/x.tar");
        for (int k = 0; k < 3; k++) {
            snprintf(name, sizeof name, "k%d.%s", k, extensions[i]);
            add_member(stream, name, "data");
        }
        end_shard(stream);
        snprintf(name, sizeof name, "f/k.%s", extensions[i]);
        put(name, "data", 4);
        expect_refusal(1, "s/x.tar: '", "$P --prepare o --from dataset --source s");
        expect_refusal(1, "which an index cannot store; rename the file",
                       "$P --prepare o --from dataset --source f --store files");
        EXPECT(0, "! test -e o"); /* checked before anything is written */
    }
}

/* Tests names that differ only after byte 100, and very long keys. No name is truncated, so none collide. */
Test(hostile, long_names_do_not_collide)
{
    char extension[1200], name[2000];
    EXPECT(0, "mkdir s");
    FILE *stream = begin_shard("s/x.tar");
    memset(extension, 'e', sizeof extension);
    extension[1100] = '\0';
    for (int k = 0; k < 3; k++)
        for (char last = 'a'; last <= 'b'; last++) {
            extension[1099] = last;
            snprintf(name, sizeof name, "%0*d.%s", k ? 100 * k : 4, k, extension);
            add_member(stream, name, last == 'a' ? "first" : "second");
        }
    end_shard(stream);
    EXPECT(0, "$P --prepare o --from dataset --source s && $P --prepare p --from dataset --source o && "
              "cmp o/dataset-000000.tar p/dataset-000000.tar");
    EXPECT(0, "$P --variant shards --data o --cache any --verify --min-time 0 --format csv | tail -n 1 | "
              "grep -c ',yes,0$'");
    EXPECT(0, "grep -c %0200d, o/samples.csv", 2);
    if (run("python3 -c 'import tarfile, csv' 2>/dev/null") != 0)
        return;
    EXPECT(0, "python3 -c \"import tarfile\n"
              "t = tarfile.open('o/dataset-000000.tar')\n"
              "names = t.getnames()\n"
              "assert len(set(names)) == 6, names\n"
              "assert [len(n) for n in names] == [1107] * 6\n"
              "assert [t.extractfile(n).read() for n in names] == [b'first', b'second'] * 3\"");
}

/* ---- Ends of shards ---- */

/* Blocks of zeros end a shard, and data after them are an error. Such data occur in the output of cat a.tar
 * b.tar, and in a shard with a zeroed page. */
Test(hostile, data_after_the_end_of_a_shard_is_an_error)
{
    EXPECT(0, "mkdir s t");
    for (int part = 0; part < 2; part++) {
        FILE *stream = begin_shard(part ? "s/b" : "s/a");
        for (int k = 0; k < (part ? 94 : 6); k++) {
            char name[32];
            snprintf(name, sizeof name, "%d-%06d.bin", part, k);
            add_member(stream, name, "data");
        }
        end_shard(stream);
    }
    EXPECT(0, "cat s/a s/b > s/x.tar");
    expect_refusal(1, "s/x.tar: offset 6144: the shard ends here, but data follows at offset 7168",
                   "$P --variant shards --data s --cache any --min-time 0");
    EXPECT(0, "cp s/b t/x.tar && dd if=/dev/zero of=t/x.tar bs=4096 seek=3 count=1 conv=notrunc 2>/dev/null");
    expect_refusal(1, "t/x.tar: offset 12288: the shard ends here, but data follows at offset 16384",
                   "$P --variant shards --data t --cache any --min-time 0");
    EXPECT_PRINTS(0, "data follows at offset 16384",
                  "$P --variant shards --data t --cache any --on-error skip --min-time 0 --format csv");
    EXPECT(0, "cp s/b t/x.tar && truncate -s +20480 t/x.tar"); /* zeros at the end, as tar pads archives */
    EXPECT(0, "$P --variant shards --data t --cache any --min-time 0 --verify");
}

/* ---- Depth ---- */

/* Creates `count` nested folders in an open folder, which is closed. Returns the innermost folder. */
static int nest_folders(int fd, int count)
{
    for (int depth = 0; depth < count; depth++) {
        cr_assert(fd >= 0 && mkdirat(fd, "d", 0777) == 0);
        int deeper = openat(fd, "d", O_RDONLY | O_DIRECTORY);
        close(fd);
        fd = deeper;
    }
    return fd;
}

/* Folders may be nested as deep as a path allows. Recursion would exceed the small stack and the limit of
 * open files. */
Test(hostile, very_deep_folders_are_read)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/s", folder);
    cr_assert(mkdir(path, 0777) == 0);
    int fd = nest_folders(open(path, O_RDONLY | O_DIRECTORY), 1990);
    int file = openat(fd, "1.bin", O_WRONLY | O_CREAT, 0666);
    cr_assert(file >= 0 && write(file, "deep", 4) == 4 && close(file) == 0);
    put("s/2.bin", "high", 4);
    EXPECT_PRINTS(0, "2 samples in 1 shard", "ulimit -s 512 -n 64; $P --prepare o --from dataset --source s");
    fd = nest_folders(fd, 60);
    file = openat(fd, "3.bin", O_WRONLY | O_CREAT, 0666);
    cr_assert(file >= 0 && close(file) == 0 && close(fd) == 0);
    expect_refusal(1, ": File name too long", "$P --prepare p --from dataset --source s");
}

/* ---- CSV and terminals ---- */

Test(hostile, samples_csv_is_quoted)
{
    EXPECT(0, "mkdir s && printf 1 > 's/say \"a\", b\nc.png' && printf 2 > s/x.png && printf 3 > s/x.txt");
    EXPECT(0, "$P --prepare o --from dataset --source s --store files && cat o/samples.csv");
    cr_expect_str_eq(strstr(out, "key,"),
                     "key,source_key,file_png,file_txt\n"
                     "000000,\"say \"\"a\"\", b\nc.png\",not-imagefolder/000/000000.png,\n"
                     "000001,x.png,not-imagefolder/000/000001.png,not-imagefolder/000/000001.txt\n");
    EXPECT(0, "$P --prepare o --from dataset --source s --store files");
    cr_expect_not_null(strstr(out, "already complete"), "a line end in quotes must not end a record: %s",
                       out);
    if (run("python3 -c 'import csv' 2>/dev/null") != 0)
        return;
    EXPECT(0, "python3 -c \"import csv\n"
              "rows = list(csv.DictReader(open('o/samples.csv', newline='')))\n"
              "assert rows[0]['source_key'] == 'say \\\"a\\\", b\\nc.png', rows\n"
              "assert [len(r) for r in rows] == [4, 4]\"");
}

/* Names are escaped before they reach a terminal. */
Test(hostile, names_are_escaped)
{
    EXPECT(0, "mkdir \"$(printf 's\\033[31m')\" && printf x > \"$(printf 's\\033[31m/k\\007.npy')\"");
    expect_refusal(1, "s\\x1b[31m/k\\x07.npy: it has no member for --label",
                   "$P --variant train-naive --data \"$(printf 's\\033[31m')\"");
    EXPECT(0, "$P --prepare \"$(printf 'o\\033[31m')\" --samples 2");
    cr_expect(strstr(out, "o\\x1b[31m: 2 samples") && !strchr(out, '\033'), "%s", out);
    expect_refusal(2, "unknown option '--\\x1b[31m'", "$P \"$(printf -- '--\\033[31m')\"");
}

/* ---- Sources ---- */

Test(hostile, an_empty_source_gives_no_samples)
{
    put("x-images-idx3-ubyte", "\0\0\x08\3\0\0\0\0\0\0\0\2\0\0\0\2", 16);
    put("x-labels-idx1-ubyte", "\0\0\x08\1\0\0\0\0", 8);
    expect_refusal(1, "--from idx: the source has no samples",
                   "$P --prepare o --from idx --source x-images-idx3-ubyte");
    expect_refusal(1, "--from idx: the source has no samples",
                   "$P --prepare o --from idx --source x-images-idx3-ubyte --samples 50000");
    EXPECT(0, "! test -e o");
}

Test(hostile, a_target_in_its_own_source_is_refused)
{
    EXPECT(0, "mkdir -p s/deep && printf 1 > s/1.txt && ln -s s link");
    static const char *const targets[] = {"s",        "s/",     "s/new",   "s/deep/new/er",
                                          "link/new", "./link", "$PWD/s/x"};
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        char command[256];
        snprintf(command, sizeof command, "$P --prepare %s --from dataset --source s", targets[i]);
        expect_refusal(2, "this folder is inside its source, s; name a folder outside the source", command);
    }
    EXPECT(0, "test \"$(find s | wc -l)\" = 3");
    EXPECT(0, "$P --prepare s2 --from dataset --source s"); /* s2 is not inside s */
}

/* After "=", the value of an option may begin with dashes. */
Test(hostile, a_value_after_an_equals_sign_may_begin_with_dashes)
{
    expect_refusal(2, "--data --: no such folder", "$P --variant train-naive --data=--");
    expect_refusal(2, "--data needs a value", "$P --variant train-naive --data --");
    EXPECT(0, "mkdir -- --");
    expect_refusal(2, "--data --: no samples found", "$P --variant train-naive --data=--");
}

/* ---- Pointers of Git LFS ---- */

/* In a clone without its large files, each file is a small text. Every reader must say so, for files, members
 * of samples, shards and indexes. */
Test(hostile, pointers_of_git_lfs_are_named)
{
    static const char *const commands[] = {
        "mkdir d/c && for i in 0 1 2; do cp p d/c/$i.jpg; done && $P --variant files --data d --cache any",
        "for i in 0 1; do cp p d/$i.png; echo 1 >d/$i.cls; done && $P --variant files --decode --data d "
        "--cache any",
        "for i in 0 1; do cp p d/$i.npy; echo 1 >d/$i.cls; done && $P --variant train-naive --data d",
        "cp p d/a.tar && $P --variant shards --data d --cache any",
        "cp p d/a.tar && $P --variant shards --data d/a.tar --cache any",
        "cp p d/0.jpg && tar -C d -cf d/a.tar 0.jpg && $P --variant shards --data d --cache any",
        "cp -r shards d/s && cp p d/s/counter-000001.tar && $P --variant shards --data d/s --cache any",
        "cp -r shards d/s && rm d/s/*.index && cp p d/s/counter-000001.tar && "
        "$P --variant shards --data d/s --cache any",
        "cp -r shards d/s && rm d/s/*.index && cp p d/s/counter.wids.json && "
        "$P --variant shards --data d/s --cache any",
        "cp -r shards d/s && cp p d/s/counter.index && $P --variant shards --data d/s --cache any",
        "cp -r files d/s && cp p d/s/not-imagefolder/000/000000.npy && $P --variant files --data d/s --cache "
        "any",
        "$P --prepare d/o --from idx --source p --labels p",
        "$P --prepare d/o --from cifar --source p",
        "cp p d/a.npy && $P --prepare o --from embeddings --source d",
        "cp p d/a.pt && $P --prepare o --from embeddings --source d",
        "cp p d/a.pth.tar && $P --prepare d/o --from embeddings --source d/a.pth.tar",
        "cp p d/a.safetensors && $P --prepare o --from embeddings --source d",
        "$P --variant infer-naive --checkpoint p",
        "$P --variant naive --class p",
    };
    put_text("p",
             "version https://git-lfs.github.com/spec/v1\n"
             "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n");
    EXPECT(0, "$P --prepare shards --samples 20 --shards 3 --sample-shape 3,8,8 && "
              "$P --prepare files --samples 3 --store files --sample-shape 3,8,8");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        EXPECT(0, "rm -rf d && mkdir d");
        int result = run("%s", commands[i]);
        cr_expect(result == 1 || result == 2, "%s: exit status %d: %s", commands[i], result, out);
        cr_expect(strstr(out, "a Git LFS pointer, not the file itself: run `git lfs pull`"), "%s: %s",
                  commands[i], out);
    }
    EXPECT_PRINTS(0, "skipped: d/0.jpg",
                  "rm -rf d && mkdir d && cp p d/0.jpg && printf data >d/1.jpg && "
                  "$P --variant files --data d --cache any --on-error skip --min-time 0");
}

/* Records that are read twice would have twice the weight. */
Test(hostile, cifar_files_are_named_once)
{
    char records[2 * 3073] = "";
    put("a.bin", records, sizeof records);
    EXPECT(0, "mkdir d && ln -s ../a.bin d/b.bin && cp a.bin c.bin");
    expect_refusal(2, "'a.bin' is named twice", "$P --prepare o --from cifar --source a.bin,a.bin");
    expect_refusal(2, "'./a.bin' and 'd/b.bin' are the same file",
                   "$P --prepare o --from cifar --source ./a.bin,c.bin,d/b.bin");
    EXPECT(0, "$P --prepare o --from cifar --source a.bin,c.bin");
}

/* ---- A damaged index ---- */

/* Both remedies in the error message must work: preparing the set again, and reading it without the index. */
Test(hostile, a_cut_index_can_be_prepared_again)
{
    static const char options[] = "--samples 20 --shards 3 --sample-shape 3";
    EXPECT(0, "$P --prepare whole %s && cp -r whole a && truncate -s -20 a/counter.index", options);
    expect_refusal(1, "remove the folder and prepare the data set again, or remove only the index",
                   "$P --variant shards --data a --cache any --min-time 0");
    EXPECT_PRINTS(2, "remove the folder and prepare it again, or remove only the index",
                  "$P --prepare a %s --seed 1", options);
    EXPECT_PRINTS(0, "a/counter.index was truncated or changed: preparing all files again",
                  "$P --prepare a %s", options);
    EXPECT(0, "diff -r whole a && truncate -s 9 a/counter.index");
    EXPECT(2, "$P --prepare a %s", options);
    EXPECT(0, "rm a/counter.index && $P --variant shards --data a --cache any --min-time 0");
}

#endif
