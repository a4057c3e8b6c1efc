/* Tests sets in the format MDS: which columns are read, and what is said about broken ones. The sets are
 * written from the documentation of the format; python/tests/test_mosaic.py reads those of the real writer.
 */
#include "data/dataset.h"
#include "data/plain_reader.h"
#include "must.h"

#include "lib_support.h" /* included last, because `out` and `status` would shadow names in other headers */

#if defined HAVE_PNG && defined HAVE_XXHASH && defined HAVE_JANSSON

/* A writer. columns: {name: (encoding, size or None)}; samples: lists of bytes, in the order of the columns.
 * of() converts a folder of tar shards with the members cls and png. */
static const char writer[] =
    "import gzip, hashlib, json, os, struct, sys, tarfile\n"
    "def shard(columns, samples):\n"
    "    data = [b''.join(struct.pack('<I', len(v)) for v, c in zip(s, columns.values()) if not c[1]) + "
    "b''.join(s) for s in samples]\n"
    "    text, at = b'{}', 4 * (len(data) + 2) + 2\n"
    "    table = [at]\n"
    "    for one in data:\n"
    "        table.append(table[-1] + len(one))\n"
    "    return struct.pack('<%dI' % (len(table) + 1), len(data), *table) + text + b''.join(data)\n"
    "def write(out, columns, samples, per=7, pack=None, change=None):\n"
    "    os.makedirs(out, exist_ok=True)\n"
    "    entries = []\n"
    "    for i in range(0, len(samples), per):\n"
    "        part = samples[i:i + per]\n"
    "        raw = shard(columns, part)\n"
    "        files = {'raw_data': ('', raw), 'zip_data': ('.gz', gzip.compress(raw)) if pack else None}\n"
    "        entry = dict(version=2, format='mds', samples=len(part), compression=pack, hashes=['md5'],\n"
    "                     column_names=list(columns), column_encodings=[c[0] for c in columns.values()],\n"
    "                     column_sizes=[c[1] for c in columns.values()], size_limit=1000)\n"
    "        for name, file in files.items():\n"
    "            base = 'shard.%05d.mds' % len(entries) + (file[0] if file else '')\n"
    "            entry[name] = file and dict(basename=base, bytes=len(file[1]),\n"
    "                                        hashes=dict(md5=hashlib.md5(file[1]).hexdigest()))\n"
    "            if file and (name == 'zip_data' or not pack):\n"
    "                open(out + '/' + base, 'wb').write(file[1])\n"
    "        entries.append(entry)\n"
    "    if change:\n"
    "        change(entries[-1])\n"
    "    json.dump(dict(version=2, shards=entries), open(out + '/index.json', 'w'))\n"
    "def of(folder):\n"
    "    for name in sorted(os.listdir(folder)):\n"
    "        if name.endswith('.tar'):\n"
    "            tar = tarfile.open(folder + '/' + name)\n"
    "            files = {m.name: tar.extractfile(m).read() for m in tar}\n"
    "            for key in sorted({n.split('.')[0] for n in files}):\n"
    "                yield int(files[key + '.cls']), files[key + '.png']\n"
    "one = lambda n: (n + 1).to_bytes(1, 'little')\n";

static void set_up(void)
{
    shell_set_up();
    put_text("mds.py", writer);
}

TestSuite(mds, .timeout = 120, .init = set_up, .fini = shell_tear_down);

#define PYTHON(text) EXPECT(0, "%s", "python3 - <<'END'\nfrom mds import *\n" text "\nEND")

/* Opens a set. */
static enum status open_set(const char *name, const char *image, const char *label, const char *member,
                            struct dataset *dataset)
{
    char path[PATH_MAX];
    struct members members;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    must(members_parse(image, label, member, &members));
    return dataset_open(path, false, &members, NULL, dataset);
}

/* Opens a shuffled stream of a set. */
static struct fdsl_stream *open_stream(const char *name, const char *label)
{
    char path[PATH_MAX];
    struct fdsl_source_config config;
    struct fdsl_stream_config stream;
    struct fdsl_source *source;
    good(fdsl_source_config_init(&config, sizeof config));
    good(fdsl_stream_config_init(&stream, sizeof stream));
    snprintf(path, sizeof path, "%s/%s", folder, name);
    config.path = path;
    config.label = label;
    good(fdsl_source_open(&config, &source));
    stream.channels = 1;
    stream.batch_size = 16;
    stream.seed = 3;
    stream.lanes = 3;
    stream.shuffle_buffer = 30;
    stream.num_threads = 2;
    struct fdsl_stream *opened = opened_stream(source, &stream);
    fdsl_source_close(source);
    return opened;
}

/* Expects the same batches in two epochs. */
static void expect_same(struct fdsl_stream *one, struct fdsl_stream *other)
{
    static uint8_t images[2][16 * 28 * 28];
    static int64_t labels[2][16];
    struct fdsl_stream *streams[] = {one, other};
    for (int epoch = 0; epoch < 2;) {
        uint32_t count[2];
        enum fdsl_status result[2];
        for (int i = 0; i < 2; i++)
            result[i] = fdsl_stream_fill(streams[i], images[i], labels[i], &count[i], NULL);
        cr_assert(result[0] == result[1] && (result[0] == FDSL_OK || result[0] == FDSL_END), "%s",
                  fdsl_error());
        epoch += result[0] == FDSL_END;
        cr_assert_eq(count[0], count[1]);
        cr_expect_eq(memcmp(images[0], images[1], count[0] * (size_t)28 * 28), 0);
        cr_expect_eq(memcmp(labels[0], labels[1], count[0] * sizeof **labels), 0);
    }
    for (int i = 0; i < 2; i++)
        fdsl_stream_close(streams[i]);
}

/* Writes 61 digits as tar shards (p), and the same as MDS: plain (q), compressed (z), with the labels as text
 * (t), and as arrays (a). */
static void prepare(void)
{
    EXPECT(0,
           "$P --prepare p --from digits --samples 61 --shards 3 && $P --prepare n --from digits --samples "
           "61 --encode npy --shards 1 && rm p/*.index p/*.wids.json");
    PYTHON(
        "digits = list(of('p'))\n"
        "png = [[image, label.to_bytes(8, 'little')] for label, image in digits]\n"
        "write('q', {'x': ('png', None), 'y': ('int', 8)}, png)\n"
        "write('z', {'x': ('png', None), 'y': ('int64', 8)}, png, pack='gz')\n"
        "write('t', {'label': ('str', None), 'x': ('png', None)}, [[b'%d' % l, i] for l, i in digits], 61)\n"
        "tar = tarfile.open('n/' + [n for n in os.listdir('n') if n.endswith('.tar')][0])\n"
        "raw = [tar.extractfile(m).read()[-784:] for m in tar if m.name.endswith('npy')]\n"
        "write('a', {'x': ('ndarray:uint8:28,28', 784), 'y': ('int', 8)}, [[r, s[1]] for r, s in zip(raw, "
        "png)])\n"
        "write('d', {'x': ('ndarray', None), 'y': ('int', 8)}, [[b'\\x08\\x08\\x1c\\x1c' + r, s[1]] for r, s "
        "in "
        "zip(raw, png)])");
}

Test(mds, streams_deliver_the_batches_of_tar_shards)
{
    static const char *const sets[] = {"q", "z", "t", "a", "d", "q/index.json"};
    prepare();
    for (size_t i = 0; i < COUNT_OF(sets); i++)
        expect_same(open_stream("p", NULL), open_stream(sets[i], NULL));
}

Test(mds, programs_read_the_samples_of_tar_shards)
{
    prepare();
    EXPECT(0,
           "for d in p q z a; do for feed in stored load; do $P --variant train-omp --model logreg --data $d "
           "--test-data $d --feed $feed --epochs 2 --batch 16 --threads 2 --out $feed.csv >log 2>&1 || { cat "
           "log; exit 1; }; "
           "done; done; python3 - <<'END'\n"
           "import csv\n"
           "for feed in ('stored', 'load'):\n"
           "    rows = [(r['train_loss'], r['test_acc']) for r in csv.DictReader(open(feed + '.csv'))]\n"
           "    assert len(rows) == 8 and rows[0:2] == rows[2:4] == rows[4:6] == rows[6:8], rows\n"
           "END");
    EXPECT_PRINTS(2, "one of the training set and the test set has arrays",
                  "$P --variant train-omp --model logreg --data a --test-data p");
    EXPECT(
        0,
        "for d in q z; do $P --variant shards-mmap,shards-omp,stream --data $d --decode --verify --batch 8 "
        "--cache any --min-samples 1 --max-time 0 || exit 1; done");
    EXPECT_PRINTS(2, "finds samples by tar headers", "$P --variant shards --data q");
    /* Labels that are words. */
    PYTHON(
        "write('w', {'x': ('png', None), 'y': ('str', None)}, [[image, b'dog'] for _, image in of('p')])\n");
    EXPECT(0, "$P --variant shards-mmap --data w --cache any --min-samples 1 --max-time 0");
    EXPECT_PRINTS(1, "its png is not a label: neither an integer of 32 bits nor a word",
                  "$P --variant shards-mmap --data p --label png");
    /* A copy has the members that readers look for. */
    EXPECT(0, "for d in q a z; do $P --prepare c$d --from dataset --source $d || exit 1; done");
    expect_same(open_stream("p", NULL), open_stream("cq", NULL));
    expect_same(open_stream("p", NULL), open_stream("cz", NULL));
    expect_same(open_stream("p", NULL), open_stream("ca", NULL));
    /* The name of a column is that of no folder. */
    PYTHON("write('s', {'o/x': ('png', None), 'y': ('int', 8)}, [[b'png', one(2) + bytes(7)]])\n"
           "write('e', {'x': ('png', None), '/../../../e': ('bytes', None)}, [[b'png', b'1']])");
    EXPECT_PRINTS(1, "'/../../../e.bin' contains a slash, so it cannot be the extension of a file",
                  "$P --prepare ce --from dataset --source e");
    EXPECT(0, "test ! -e ce");
    EXPECT(0, "$P --prepare cs --from dataset --source s --store files && test -e cs/*/*/000000.png");
}

/* Labels: integers of each size and sign, and a field of JSON. */
Test(mds, columns_become_labels)
{
    static const struct {
        const char *label;
        int32_t wanted[2];
    } cases[] = {{"i8", {-3, 120}},        {"u8", {253, 120}}, {"i16", {-3, 120}},
                 {"u16", {65533, 120}},    {"i32", {-3, 120}}, {"i64", {-3, 120}},
                 {"meta:a.b", {7, 8}},     {"n.txt", {5, 6}},  {"*.uint8", {253, 120}},
                 {"absent;I32", {-3, 120}}};
    PYTHON("def values(n, b): return [n.to_bytes(k, 'little', signed=True) for k in (1, 1, 2, 2, 4, 8)] + "
           "[b'{\"a\": "
           "{\"b\": %d}}' % (b + 2), b'%d' % b, b'none', b'png', (1 << 40).to_bytes(8, 'little')]\n"
           "write('s', {'i8': ('int8', 1), 'u8': ('uint8', 1), 'i16': ('int16', 2), 'u16': ('uint16', 2), "
           "'i32': "
           "('int32', 4), 'i64': ('int64', 8), 'meta': ('json', None), 'n': ('str_int', None), "
           "'k': ('pkl', None), 'g': ('png', None), 'big': ('uint64', 8)}, [values(-3, 5), values(120, 6)])");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct dataset dataset;
        must(open_set("s", NULL, cases[i].label, NULL, &dataset));
        cr_assert_eq(dataset.sample_count, 2);
        for (uint32_t s = 0; s < 2; s++) {
            struct plain plain = {.dataset = &dataset, .fd = -1};
            int32_t label = 0;
            must(plain_label(&plain, &dataset.samples[s], 0, &label));
            cr_expect_eq(label, cases[i].wanted[s], "%s: %d", cases[i].label, label);
            plain_close(&plain);
        }
        dataset_close(&dataset);
    }
}

Test(mds, columns_are_refused_by_name)
{
    static const struct {
        const char *image, *label, *member, *words;
    } cases[] = {
        {"p", "n", NULL, "its column 'p' has the encoding pil, which stores raw pixels of Pillow"},
        {NULL, "k", NULL, "its column 'k' has the encoding pkl, which runs code of the set"},
        {NULL, NULL, "k", "its column 'k' has the encoding pkl, which runs code of the set"},
        {NULL, "f", NULL, "its column 'f' has the encoding float32, which is no label"},
        {"n", NULL, NULL, "its column 'n' has the encoding str_int, which is no image"},
        {NULL, "meta", NULL, "its column 'meta' has JSON: name a field, as in --label meta:FIELD"},
        {"c", "n", NULL, "its column 'c' has arrays of int8 with 2 axes, but images are arrays of uint8"},
        {NULL, "cls", NULL,
         "--label: the set has no such column; its columns are p, g, k, f, n, meta, c, v, big"},
        {"left", "n", NULL, "--image: the set has no such column"},
        {NULL, NULL, NULL, "its column 'p' has the encoding pil"},
        {"v", "n", NULL, "has another shape or type than that of the first sample"},
        {NULL, "big", NULL, "its big.uint64 is not an integer of 32 bits"}};
    PYTHON("def values(i): return [b'x', b'png', b'x', b'1234', b'7', b'{}', b'1234', b'\\x08\\x08\\x02' + "
           "one(i) + b'y' * 2 * "
           "(i + 1), (1 << 40).to_bytes(8, 'little')]\n"
           "write('o', {'p': ('pil', None)}, [[b'x']])\n"
           "write('s', {'p': ('pil', None), 'g': ('png', None), 'k': ('pkl', None), 'f': ('float32', 4), "
           "'n': ('str_int', None), 'meta': "
           "('json', None), 'c': ('ndarray:int8:2,2', 4), 'v': ('ndarray', None), 'big': ('uint64', 8)}, "
           "[values(0), "
           "values(1)])");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct dataset dataset;
        const char *name = cases[i].image || cases[i].label || cases[i].member ? "s" : "o";
        const enum status result = open_set(name, cases[i].image, cases[i].label, cases[i].member, &dataset);
        cr_expect(result != STATUS_OK && strstr(status_text(), cases[i].words), "%zu: %s", i, status_text());
        dataset_close(&dataset);
    }
}

/* Each fault is one line that names the file and what is wrong. */
Test(mds, faults_are_named)
{
    static const struct {
        const char *change, *words; /* Python: data is the second shard of three, entry that of the last */
    } cases[] = {
        {"data[0:4] = struct.pack('<I', 4000000000)",
         "begins with the number 4000000000 of samples, but has only"},
        {"data[0:4] = struct.pack('<I', 6)",
         "the first sample begins at|samples end here|samples but its index says 7"},
        {"data[0:4] = struct.pack('<I', 8)", "the first sample begins at 38, within the table of offsets"},
        {"data[4:8] = struct.pack('<I', 3)",
         "shard.00001.mds: offset 4: the first sample begins at 3, within the table"},
        {"data[8:12] = struct.pack('<I', 2000000000)", "shard.00001.mds: offset 4: sample 0 is from offset"},
        {"data[12:16] = data[4:8]", "shard.00001.mds: offset 8: sample 1 is from offset"},
        {"data[38:42] = struct.pack('<I', 4294967295)",
         "offset 38: the values of the sample have 4294967307 bytes, but its place in the shard has"},
        {"data[38:42] = struct.pack('<I', 0)", "the values of the sample have 12 bytes, but its place"},
        {"data += b'more'",
         "shard.00001.mds: offset 5066: the samples end here, but the shard has 5070 bytes"},
        {"del data[-1:]",
         "shard.00001.mds: offset 28: sample 6 is from offset 4379 to 5066, but the shard has 5065 bytes"},
        {"data.clear()", "begins with the number 0 of samples, but has only 0 bytes"},
        {"data[:] = b'version https://git-lfs.github.com/spec/v1\\\\noid sha256:1\\\\nsize 1\\\\n'",
         "Git LFS"},
        {"data = None", "shard.00001.mds: cannot open: No such file or directory"},
        {"entry['samples'] = 8", "shard.00002.mds: the shard holds 6 samples but its index says 8"},
        {"entry['samples'] = -1",
         "index.json: shard 2 of the list: its number of samples is missing or wrong"},
        {"entry['samples'] = 1 << 40",
         "index.json: shard 2 of the list: its number of samples is missing or wrong"},
        {"entry['version'] = 3", "shard 2 of the list: only version 2 of the format is read"},
        {"entry['format'] = 'json'", "shard 2 of the list: its format is 'json', but only mds is read"},
        {"entry['column_sizes'][1] = 4", "its columns differ from those of the first shard"},
        {"entry['column_names'].pop()", "it has no columns, or not as many encodings or sizes"},
        {"entry['raw_data']['basename'] = '../q/shard.00001.mds'", "is outside the folder of the index"},
        {"entry['raw_data']['basename'] = 'shard.00001.mds'", "is named twice"},
        {"entry['raw_data']['basename'] = 7", "a file has no name or no size"},
        {"entry['raw_data']['basename'] = 'x'; entry['compression'] = 'br'; entry['zip_data'] = "
         "dict(basename='x.mds.br', bytes=1)",
         "is compressed by br, but only zstd and gz are read"},
        {"text = text[:-9]", "index.json: line 1: invalid JSON"},
        {"text = '{\"shards\": []}'", "index.json: it has no shards"},
        {"text = '{}'", "the folder has no index.json of an MDS set, but shards, such as shard.00000.mds"},
    };
    EXPECT(0, "$P --prepare p --from digits --samples 20 --shards 1");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        EXPECT(0,
               "rm -rf q && python3 - <<'END'\n"
               "from mds import *\n"
               "def change(entry):\n"
               "    if %d: exec(\"\"\"%s\"\"\", dict(entry=entry))\n"
               "write('q', {'x': ('png', None), 'y': ('int', 8)}, [[i, l.to_bytes(8, 'little')] for l, i in "
               "of('p')], change=change)\n"
               "data, text = bytearray(open('q/shard.00001.mds', 'rb').read()), open('q/index.json').read()\n"
               "names = dict(data=data, text=text, struct=struct)\n"
               "if not %d: exec(\"\"\"%s\"\"\", names)\n"
               "os.remove('q/shard.00001.mds')\n"
               "if names['data'] is not None: open('q/shard.00001.mds', 'wb').write(names['data'])\n"
               "open('q/index.json', 'w').write(names['text'])\n"
               "END",
               strncmp(cases[i].change, "entry", 5) == 0, cases[i].change,
               strncmp(cases[i].change, "entry", 5) == 0, cases[i].change);
        struct dataset dataset;
        const enum status result = open_set("q", NULL, NULL, NULL, &dataset);
        const char *words = cases[i].words;
        bool says = false;
        char one[128];
        for (size_t n; *words && !says; words += n + (words[n] == '|')) { /* alternatives */
            n = strcspn(words, "|");
            snprintf(one, sizeof one, "%.*s", (int)n, words);
            says = strstr(status_text(), one) != NULL;
        }
        cr_expect(result != STATUS_OK && says && !strchr(status_text(), '\n'), "%s: %s", cases[i].change,
                  result ? status_text() : "accepted");
        dataset_close(&dataset);
    }
}

#ifdef HAVE_CRYPTO
/* Digests are compared by --verify and train, and when a shard is unpacked. */
Test(mds, digests_are_compared)
{
    prepare();
    EXPECT(0, "sed -i 's/\"md5\": \"...../\"md5\": \"00000/g' q/index.json z/index.json");
    EXPECT_PRINTS(1, "shard.00000.mds: the shard's md5 is", "$P --variant stream --decode --data q --verify");
    EXPECT_PRINTS(1, "shard.00000.mds: the shard's md5 is", "$P --variant train-omp --model logreg --data q");
    EXPECT_PRINTS(1, "shard.00000.mds.gz: the shard's md5 is", "$P --variant stream --decode --data z");
}
#endif

#endif
