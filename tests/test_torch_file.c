/* Tests PyTorch files that are damaged or malicious: archives with bad members and records, and bad pickles.
 */
#include "embeddings_support.h"

#include <sys/resource.h>

TestSuite(torch_file, .init = set_up, .fini = tear_down, .timeout = 60);

/* ---- Bad archives ---- */

/* Writes the archive. Expects that it is refused with a message that contains `words`. */
static void expect_bad_archive(const char *words)
{
    archive_end(&archive);
    put("bad.pt", archive.file.bytes, archive.file.count);
    expect_bad("bad.pt", words);
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

Test(torch_file, archives_with_bad_members_are_refused)
{
    static const char *const names[] = {"../x", "/x",   "x/../../y", "x/./y", "x//y", "x/",
                                        "a\\b", "a\nb", "..",        "",      ".",    "x/.."};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        begin_tensor();
        archive_add(&archive, names[i], "", 0);
        expect_bad_archive("not a plain path");
    }
    begin_tensor();
    archive_add(&archive, "x/data/0", values, 60);
    expect_bad_archive("two members named 'x/data/0'");
    begin_tensor();
    archive.method = 8;
    archive_add(&archive, "x/bomb", values, 60);
    expect_bad_archive("'x/bomb' is compressed (method 8");
    begin_tensor();
    archive_list(&archive, "x/data/1", 0, 60); /* the local header at offset 0 has the name of data.pkl */
    expect_bad_archive("differs from its local header");
    begin_tensor();
    archive_list(&archive, "x/data/1", archive.file.count + 1000, 60);
    expect_bad_archive("outside the archive");
    begin_tensor();
    archive_add(&archive, "y/data.pkl", blob.bytes, blob.count);
    expect_bad_archive("more than one data.pkl");
    begin_tensor();
    archive_add(&archive, "x/byteorder", "big", 3);
    expect_bad_archive("big-endian");
    archive_begin(&archive);
    expect_bad_archive("no FOLDER/data.pkl");
}

/* The data of member x/out contain the member x/in with its local header. */
Test(torch_file, archives_with_overlapping_members_are_refused)
{
    static struct archive inner;
    begin_tensor();
    archive_begin(&inner);
    archive_add(&inner, "x/in", "1234", 4);
    size_t begin = archive.file.count + 30 + strlen("x/out");
    archive_add(&archive, "x/out", inner.file.bytes, inner.file.count);
    archive_list(&archive, "x/in", begin, 4);
    expect_bad_archive("'x/out' and 'x/in' overlap");
}

/* Overwrites `count` bytes of a good archive with `number`. A negative offset is relative to the end. Expects
 * that the archive is refused with a message that contains `words`. */
static void expect_bad_patch(long offset, uint64_t number, size_t count, const char *words)
{
    begin_tensor();
    archive_end(&archive);
    uint8_t *at = offset < 0 ? archive.file.bytes + archive.file.count + offset : archive.file.bytes + offset;
    memcpy(at, &number, count);
    put("bad.pt", archive.file.bytes, archive.file.count);
    expect_bad("bad.pt", words);
}

Test(torch_file, archives_with_bad_records_are_refused)
{
    begin_tensor();
    long first = (long)archive.file.count; /* offset of the central directory */
    expect_bad_patch(-22, 0, 1, "not a zip archive, or truncated");
    expect_bad_patch(-18, 1, 2, "record at its end is not valid");
    expect_bad_patch(-2, 1, 2, "record at its end is not valid");
    expect_bad_patch(-10, 0xFFFFFFF0, 4, "central directory of");
    expect_bad_patch(-6, 0, 4, "central directory of");
    expect_bad_patch(-14, 0x00010001, 4,
                     "lists more members"); /* the record gives one member; there are two */
    expect_bad_patch(-14, 0x00030003, 4, "cannot list 3 members");
    expect_bad_patch(first, 0, 1, "central directory is not valid");
    expect_bad_patch(first + 8, 1, 2, "encrypted");
    expect_bad_patch(first + 24, 0x7FFFFFFF, 4,
                     "cannot have 2147483647 bytes"); /* the uncompressed size of a member */
    expect_bad_patch(first + 20, 0x7FFFFFF07FFFFFF0, 8, "differs from its local header");
    expect_bad_patch(first + 28, 0xFFFF, 2, "central directory is not valid");
    expect_bad_patch(first + 42, 7, 4, "differs from its local header");
    expect_bad_patch(0, 0, 1, "differs from its local header");
    expect_bad_patch(28, 0xFFFF, 2, "reaches beyond the end of the members"); /* length of the extra field */
}

/* ---- Objects that are not read ---- */

/* A list of a tensor, a Namespace that holds another one, and an array of NumPy. */
Test(torch_file, tensors_in_objects_are_counted)
{
    struct tensor_file file;
    pickle_begin(&blob);
    blob_text(&blob, "](");
    pickle_tensor(&blob, &(struct written){"FloatStorage", "0", 15, 0, 3, 5});
    blob_text(&blob, "cargparse\nNamespace\n)\x81}");
    blob_add(&blob, "X\x01\0\0\0a", 6);
    pickle_tensor(&blob, &(struct written){"FloatStorage", "0", 15, 0, 3, 5});
    blob_text(&blob, "sbcnumpy.core.multiarray\n_reconstruct\n)Re.");
    put_torch("some.pt", 15);
    cr_assert_eq(tensor_file_open("some.pt", &file), STATUS_OK, "%s", status_text());
    cr_expect_eq(file.count, 1);
    cr_expect_eq(file.skipped, 2);
    tensor_file_close(&file);
}

/* ---- Bad pickles ---- */

/* The test writes the protocol opcode in front of each pickle. The error message must contain `words`. */
Test(torch_file, bad_pickles_are_refused)
{
    static const struct {
        const char *pickle;
        size_t bytes;
        const char *words;
    } files[] = {
#define PICKLE(text) text, sizeof text - 1
        {PICKLE("cos\nsystem\nX\x07\0\0\0touch x\x85R."), "'os.system', which is refused"},
        {PICKLE("cmodels\nConfig\n)R."), "save only its tensors with Python: x = torch.load("},
        {PICKLE("cargparse\nNamespaces\n)R."), "'argparse.Namespaces', which is refused"},
        {PICKLE("cargparse\nName\n)R."), "'argparse.Name', which is refused"},
        {PICKLE("c__builtin__\neval\n)R."), "'__builtin__.eval', which is refused"},
        {PICKLE("c__builtin__\ngetattr\n)R."), "'__builtin__.getattr', which is refused"},
        {PICKLE("cargparse\nNamespace\n)\x81}b."), "no tensors"},
        {PICKLE("cargparse\nNamespace\nK\x01\x81."), "calls a value that is not a Python object"},
        {PICKLE("ctorch._utils\n_rebuild_parameter\n(K\0\x89}tR."), "parameter is not described"},
        {PICKLE("ctorch._utils\n_rebuild_parameter\n)R."), "parameter is not described"},
        {PICKLE("cbuiltins\neval\nX\x01\0\0\0001\x85R."), "'builtins.eval', which is refused"},
        {PICKLE("ctorch._utils\n_rebuild_tensor_v3\n."),
         "'torch._utils._rebuild_tensor_v3', which is refused"},
        {PICKLE("ctorch\nFloatStorage\n)R."), "calls a type of storage"},
        {PICKLE("K\x01)R."), "calls a value that is not a Python object"},
        {PICKLE("ccollections\nOrderedDict\nK\x01\x85R."), "OrderedDict has arguments"},
        {PICKLE("ctorch._utils\n_rebuild_tensor_v2\n)R."), "not described in the format of torch.save()"},
        {PICKLE("ctorch._utils\n_rebuild_tensor_v2\n(K\0K\0K\0K\0K\0K\0tR."), "storage is not described"},
        {PICKLE("ctorch\nFloatStorage\n}b."), "sets attributes (BUILD)"},
        {PICKLE("(i__main__\nX\n."), "opcode INST"},
        {PICKLE("\x8c\x01x."), "opcode SHORT_BINUNICODE"},
        {PICKLE("\x82\x01."), "opcode EXT1"},
        {PICKLE("}\x81."), "empty stack"},
        {PICKLE("})\x92."), "opcode NEWOBJ_EX"},
        {PICKLE("\xFF."), "unknown opcode 0xff"},
        {PICKLE("R."), "empty stack"},
        {PICKLE("(."), "empty stack"},
        {PICKLE("t."), "lacks a mark"},
        {PICKLE("(\x85."), "mark inside a tuple"},
        {PICKLE("h\x05."), "memo entry that is not set"},
        {PICKLE("Nq\0q\x01q\x02q\x03h\x04."), "memo entry that is not set"},
        {PICKLE("Nq\x01h\0."), "memo entry that is not set"},
        {PICKLE("Nr\xFF\xFF\xFF\xFF."), "memo entry that is too large"},
        {PICKLE("NK\x01"
                "a."),
         "not a list"},
        {PICKLE("](K\x01K\x02u."), "not a dict"},
        {PICKLE("}(K\x01u."), "not a dict"},
        {PICKLE("X\xFF\xFF\xFF\xFF."), "truncated"},
        {PICKLE("NN."), "after its end"},
        {PICKLE("N.N"), "after its end"},
        {PICKLE("}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u."), "the key 'a' twice"},
        {PICKLE("})K\x01s."), "neither a string nor an integer"},
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
}

/* ---- The format before version 1.6 ---- */

/* Reads a file of tests/data/checkpoints/, and writes the first `count` bytes to bad.pt; all if `count` is 0.
 */
static size_t copy_checkpoint(const char *name, size_t count, size_t at, int change)
{
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/tests/data/checkpoints/%s", root, name);
    FILE *file = fopen(path, "rb");
    cr_assert_not_null(file, "%s", path);
    blob.count = fread(blob.bytes, 1, sizeof blob.bytes, file);
    fclose(file);
    blob.bytes[at] ^= (uint8_t)change;
    put("bad.pt", blob.bytes, count ? count : blob.count);
    return blob.count;
}

/* make.py wrote both files from the same object: views, several types, an empty tensor, and plain objects. */
Test(torch_file, older_files_have_the_tensors_of_new_ones)
{
    struct tensor_file older, newer;
    copy_checkpoint("legacy.pt", 0, 0, 0);
    cr_assert_eq(tensor_file_open("bad.pt", &older), STATUS_OK, "%s", status_text());
    rename("bad.pt", "old.pt");
    copy_checkpoint("legacy_zip.pt", 0, 0, 0);
    cr_assert_eq(tensor_file_open("bad.pt", &newer), STATUS_OK, "%s", status_text());
    cr_assert(older.count == newer.count && older.count == 8, "%zu", older.count);
    for (size_t i = 0; i < older.count; i++) {
        const struct tensor *one = &older.tensors[i], *other = &newer.tensors[i];
        unsigned char read[2][256];
        cr_expect_str_eq(one->name, other->name);
        cr_expect_str_eq(one->type, other->type, "%s", one->name);
        cr_assert(one->axes == other->axes && one->bytes == other->bytes && one->bytes <= sizeof read[0]);
        cr_expect_arr_eq(one->shape, other->shape, one->axes * sizeof *one->shape, "%s", one->name);
        cr_assert_eq(tensor_read(&older, one, read[0]), STATUS_OK);
        cr_assert_eq(tensor_read(&newer, other, read[1]), STATUS_OK);
        cr_expect_arr_eq(read[0], read[1], one->bytes, "%s", one->name);
    }
    tensor_file_close(&older);
    tensor_file_close(&newer);
}

Test(torch_file, broken_older_files_are_refused)
{
    const size_t bytes = copy_checkpoint("legacy.pt", 0, 0, 0);
    struct tensor_file file;
    for (size_t count = 16; count < bytes; count += 7) {
        copy_checkpoint("legacy.pt", count, 0, 0);
        cr_expect_eq(tensor_file_open("bad.pt", &file), STATUS_FAILED, "%zu bytes", count);
        tensor_file_close(&file);
    }
    /* any changed byte gives an error or a list of tensors, but no invalid access */
    for (size_t at = 0; at < bytes; at++) {
        copy_checkpoint("legacy.pt", 0, at, 0x41);
        (void)tensor_file_open("bad.pt", &file);
        tensor_file_close(&file);
    }
    copy_checkpoint("legacy.pt", 0, 0, 0);
    blob_add(&blob, "x", 1);
    put("bad.pt", blob.bytes, blob.count);
    expect_bad("bad.pt", "it has 1 bytes after its last storage");
    uint8_t *little = memmem(blob.bytes, blob.count, "little_endian", 13);
    for (little += 13; *little != 0x88; little++) /* NEWTRUE */
        ;
    *little = 0x89;
    put("bad.pt", blob.bytes, bytes);
    expect_bad("bad.pt", "it does not say that its values are little-endian");
    copy_checkpoint("legacy.pt", bytes - 1, 0, 0);
    expect_bad("bad.pt", "or the file is truncated");
}

/* Adds an entry of a dict whose value is a dict of so many tensors. */
static void add_tensors(const char *key, int count)
{
    char name[16];
    pickle_text(&blob, key);
    blob_text(&blob, "}(");
    for (int i = 0; i < count; i++) {
        snprintf(name, sizeof name, "w%d", i);
        pickle_text(&blob, name);
        pickle_tensor(&blob, &(struct written){"FloatStorage", "0", 15, 0, 3, 5});
    }
    blob_text(&blob, "u");
}

/* Ends the pickle with the options of a script, which are refused. Expects the advice `words`. */
static void expect_advice(const char *words)
{
    pickle_text(&blob, "args");
    blob_text(&blob, "cmodels\nConfig\n");
    put_torch("bad.pt", 15);
    expect_bad("bad.pt", words);
}

/* The advice how to save the tensors names a key only if the file has it. */
Test(torch_file, the_advice_for_refused_pickles_names_a_key_of_the_file)
{
    static const char *const keys[] = {"state_dict", "model", "net_g", "model_state_dict"};
    for (size_t k = 0; k < COUNT_OF(keys); k++)
        for (int flushed = 0; flushed < 2; flushed++) { /* Python ends a SETITEMS after 1000 entries */
            char words[96];
            snprintf(words, sizeof words, "then torch.save(x['%s'], 'weights.pt')", keys[k]);
            pickle_begin(&blob);
            blob_text(&blob, "}(");
            pickle_text(&blob, "epoch");
            pickle_int(&blob, 3);
            add_tensors("scaler", 1);
            add_tensors(keys[k], 3);
            blob_text(&blob, flushed ? "u(" : "");
            add_tensors("last", 2);
            expect_advice(words);
        }
    const char *const other =
        "then torch.save(x[KEY], 'weights.pt') with the key of the parameters, one of x.keys()";
    pickle_begin(&blob);
    blob_text(&blob, "}(");
    expect_advice(other); /* the parameters may follow */
    pickle_begin(&blob);
    blob_text(&blob, "}(");
    add_tensors("it's", 1); /* would end the string in Python */
    expect_advice(other);
    pickle_begin(&blob);
    blob_text(&blob, "cmodels\nNet\n");
    put_torch("bad.pt", 15);
    expect_bad("bad.pt", "then torch.save(x.state_dict(), 'weights.pt')");
}

/* Makes a pickle of `levels` nested values, each of which contains the previous one `times` times. The
 * innermost value is a tensor or an empty list. If `keys` is set, the values are dicts, otherwise tuples. */
static void nested_pickle(int levels, int times, bool tensor, bool keys)
{
    pickle_begin(&blob);
    blob_text(&blob, "(");
    if (tensor)
        pickle_tensor(&blob, &(struct written){"FloatStorage", "0", 15, 0, 3, 5});
    else
        blob_text(&blob, "]");
    for (int level = 0; level < levels; level++) {
        blob_text(&blob, "q");
        blob_number(&blob, (uint64_t)level, 1);
        blob_text(&blob, keys ? "}(" : "(");
        for (int i = 0; i < times; i++) {
            if (keys) {
                blob_text(&blob, "K");
                blob_number(&blob, (uint64_t)i, 1);
            }
            blob_text(&blob, "h");
            blob_number(&blob, (uint64_t)level, 1);
        }
        blob_text(&blob, keys ? "u" : "t");
    }
    blob_text(&blob, "t.");
}

/* A few hundred bytes describe up to 10^20 values. The work and the memory must not grow with their number.
 */
Test(torch_file, values_that_expand_cost_little)
{
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    for (int i = 0; i < 4; i++) {
        nested_pickle(20, 10, i / 2, i % 2);
        cr_expect_leq(blob.count, 1500);
        put_torch("bad.pt", 15);
        expect_bad("bad.pt", i / 2 ? "refer to each other so often" : "no tensors");
    }
    getrusage(RUSAGE_SELF, &after);
    cr_expect_leq(after.ru_utime.tv_sec - before.ru_utime.tv_sec, 1);
    cr_expect_leq(after.ru_maxrss - before.ru_maxrss, 32 << 10, "%ld KiB",
                  after.ru_maxrss - before.ru_maxrss);
    for (int keys = 0; keys < 2; keys++) {
        nested_pickle(3, 3, true, keys);
        put_torch("good.pt", 15);
        expect_set("good.pt", "", (1 + 3 + 9 + 27) * 3, 5, 1 + 3 + 9 + 27);
    }
}

Test(torch_file, tensors_outside_their_storage_are_refused)
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
        {{"FloatStorage", "0", 16, 0, 3, 5}, "16 values of float32, but the member 'x/data/0' has 60 bytes"},
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

/* PyTorch negates and conjugates tensors lazily: torch.save() then writes the values without the new sign,
 * and a dict like {"neg": True} as the last argument. Each flag must be refused, because the values would
 * have wrong signs. Every test case is the end of a tensor's arguments, beginning with requires_grad. */
Test(torch_file, lazy_signs_and_hooks_are_refused)
{
    static const char usual[] = "\x89"
                                "ccollections\nOrderedDict\n)RtR";
#define NO_HOOKS    "ccollections\nOrderedDict\n)R"
#define FLAG(count) "X" count "\0\0\0"
    static const struct {
        const char *arguments;
        size_t bytes;
        bool refused;
    } ends[] = {
#define END(text) text, sizeof text - 1
        {END("\x89" NO_HOOKS), false},
        {END("\x88" NO_HOOKS), false}, /* requires_grad is true */
        {END("\x89" NO_HOOKS "}"), false},
        {END("\x89" NO_HOOKS "}" FLAG("\3") "neg\x88s"), true},
        {END("\x89" NO_HOOKS "}" FLAG("\4") "conj\x88s"), true},
        {END("\x89" NO_HOOKS "}(" FLAG("\4") "conj\x88" FLAG("\3") "neg\x88u"), true},
        {END("\x89" NO_HOOKS "}" FLAG("\7") "unknown\x88s"), true},
        {END("\x89" NO_HOOKS "N"), true},
        {END("\x89}" FLAG("\4") "hook\x88s"), true},
        {END("\x89N"), true},
        {END("N" NO_HOOKS), true},
#undef END
    };
    for (size_t i = 0; i < COUNT_OF(ends); i++) {
        pickle_begin(&blob);
        pickle_tensor(&blob, &(struct written){"FloatStorage", "0", 15, 0, 3, 5});
        blob.count -= sizeof usual - 1;
        blob_add(&blob, ends[i].arguments, ends[i].bytes);
        blob_text(&blob, "tR.");
        put_torch("signs.pt", 15);
        if (ends[i].refused)
            expect_bad("signs.pt", "it has hooks or metadata, such as a lazy conjugate");
        else
            expect_counting("signs.pt", 3, 5);
    }
}
