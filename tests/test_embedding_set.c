/* Tests --prepare --from embeddings and --verify-set: which rows are kept, what is written, interrupted runs,
 * and damage that must be found and named. */
#include "shell.h"

#include <math.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/dtype.h"
#include "data/embeddings.h"
#include "data/npy.h"
#include "ops/row.h"

#if defined HAVE_XXHASH && defined HAVE_JANSSON

TestSuite(embedding_set, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

enum { ROWS = 300, COLUMNS = 19 };

static float rows[ROWS][COLUMNS];

/* Rows 3, 5, 7, 9 and 11 are invalid, and rows 20 and 290 are copies of row 2. */
static void fill_rows(void)
{
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLUMNS; j++)
            rows[i][j] = (float)((i * 101 + j * 1723) % 6007 - 3003) / 12000;
    memset(rows[3], 0, sizeof *rows);
    rows[5][18] = NAN;
    rows[7][0] = -INFINITY;
    rows[9][4] = 1000;
    memset(rows[11], 0, sizeof *rows);
    rows[11][6] = 0.0999f;
    memcpy(rows[20], rows[2], sizeof *rows);
    memcpy(rows[290], rows[2], sizeof *rows);
}

static void put_rows(const char *name, int first, int count)
{
    static char file[NPY_HEADER_MAX + sizeof rows];
    char shape[64];
    snprintf(shape, sizeof shape, "%d, %d", count, COLUMNS);
    size_t header = npy_header_make(file, "<f4", shape), bytes = (size_t)count * sizeof *rows;
    memcpy(file + header, rows[first], bytes);
    put(name, file, header + bytes);
}

/* Writes the rows to two files. */
static void put_set(void)
{
    fill_rows();
    put_rows("a.npy", 0, 120);
    put_rows("b.npy", 120, ROWS - 120);
}

static bool is_kept(int row)
{
    return row != 3 && row != 5 && row != 7 && row != 9 && row != 11 && row != 20 && row != 290;
}

#define PREPARE_WITH(options) "$P --prepare set --from embeddings --source a.npy,b.npy " options " "
#define PREPARE               PREPARE_WITH("--rows-per-file 50")

/* ---- What is written ---- */

/* Compares the set with rows and hashes that are computed here. */
static void expect_rows(bool half)
{
    char path[PATH_MAX];
    struct embeddings *set;
    int row = 0;
    snprintf(path, sizeof path, "%s/set", folder);
    cr_assert_eq(embeddings_open(path, "", &set), STATUS_OK, "%s", status_text());
    cr_assert(set->rows == ROWS - 7 && set->columns == COLUMNS && set->part_count == 6);
    for (size_t part = 0; part < set->part_count; part++) {
        char *hashes;
        size_t size;
        snprintf(path, sizeof path, "%s/set/000/%06zu.xxh3", folder, part);
        cr_assert_eq(file_read(path, &hashes, &size), STATUS_OK, "%s", status_text());
        cr_assert_eq(size, set->parts[part].rows * sizeof(uint64_t));
        for (uint64_t i = 0; i < set->parts[part].rows; i++, row++) {
            uint16_t converted[COLUMNS];
            uint64_t hash;
            while (!is_kept(row))
                row++;
            for (int j = 0; j < COLUMNS; j++)
                converted[j] = half_from_float(rows[row][j]);
            const void *wanted = half ? (const void *)converted : rows[row];
            size_t bytes = half ? sizeof converted : sizeof *rows;
            cr_assert_eq(memcmp(set->parts[part].values + i * bytes, wanted, bytes), 0, "row %d", row);
            memcpy(&hash, hashes + i * sizeof hash, sizeof hash);
            cr_assert_eq(hash, XXH3_64bits(wanted, bytes), "row %d", row);
        }
        free(hashes);
    }
    embeddings_close(set);
}

Test(embedding_set, keeps_valid_rows_in_order)
{
    put_set();
    EXPECT_PRINTS(0, "293 of 300 rows are kept; 5 are invalid, and 2 are duplicates", PREPARE "--dedup 2>&1");
    expect_rows(false);
    EXPECT_EXACTLY(0,
                   "key,first_row,rows,file_safetensors,file_xxh3\n"
                   "000005,250,43,000/000005.safetensors,000/000005.xxh3\n",
                   "sed -n '1p;$p' set/samples.csv");
    EXPECT_PRINTS(0, "set: all hashes match: 13 files, 293 rows", "$P --verify-set set");
    EXPECT_PRINTS(0, "already complete", PREPARE "--dedup 2>&1");
    EXPECT(0,
           "$P --prepare all --from embeddings --source a.npy,b.npy 2>&1"); /* only --dedup counts copies */
    EXPECT_OUT("295 of 300 rows are kept; 5 are invalid\n", "all: 1 file with 295 rows in 1 folder,");
}

/* A repeated command with other options or other source files is refused, and the message names the cause. */
Test(embedding_set, other_options_are_refused)
{
    put_set();
    EXPECT(0, PREPARE);
    EXPECT_PRINTS(2, "other options (--rows-per-file=50 there, --rows-per-file=60 now)",
                  PREPARE_WITH("--rows-per-file 60"));
    EXPECT_PRINTS(2, "other options (--rows-per-file=50 there, none now)", PREPARE_WITH(""));
    put_rows("b.npy", 120, 10);
    EXPECT_PRINTS(2, "or its source files have changed", PREPARE);
}

Test(embedding_set, rows_are_converted)
{
    put_set();
    EXPECT(0, PREPARE "--dedup --to f16 --encode npy --threads 3");
    expect_rows(true);
    EXPECT(
        0,
        "for to in stored f32 bf16 fp8 nvfp4 mxfp4; do $P --prepare $to --from embeddings --source '?.npy' "
        "--to $to --rows-per-file 128 && $P --verify-set $to || exit; done");
    EXPECT(0, "cmp stored/000/000001.safetensors f32/000/000001.safetensors");
    /* Each file ends with the scale of the whole set. */
    EXPECT(
        0,
        "cd nvfp4/000 && tail -c 4 000000.safetensors > scale && tail -c 4 000002.safetensors | cmp scale");
    EXPECT(
        0,
        "$P --prepare again --from embeddings --source a.npy,b.npy --to nvfp4 --rows-per-file 128 --threads "
        "1 && diff -r again/000 nvfp4/000 | grep -v 'Only in nvfp4/000: scale'; test $? = 1");
}

/* ---- Variants ---- */

/* The hashes and values of earlier versions, which had no --variant. */
Test(embedding_set, all_variants_write_the_same_bytes)
{
    static const struct {
        const char *to, *hashes, *values;
    } sets[] = {
        {"stored", "582299278 2360", "964381982 2400"},  {"f16", "850980568 2360", "662764444 2400"},
        {"bf16", "1757272664 2360", "3624756285 2400"},  {"fp8", "2664115662 2360", "1464025136 2400"},
        {"nvfp4", "3199461596 2360", "2048485899 2400"}, {"mxfp4", "1008378361 2360", "4106039161 2400"}};
    put_set();
    for (size_t i = 0; i < COUNT_OF(sets); i++) {
        const char *to = sets[i].to;
        EXPECT_PRINTS(0, sets[i].hashes,
                      PREPARE_WITH("--to %s --rows-per-file 50") "&& cat set/000/*.xxh3 | cksum", to);
        /* The header of fp4 has the number of columns since then, so that only the rows are compared. */
        EXPECT_PRINTS(0, sets[i].values,
                      "for file in set/000/*.safetensors; do tail -c 400 $file; done | cksum");
        EXPECT(0,
               "for variant in ops-naive ops-omp auto; do for threads in 1 3; do rm -rf other; $P --prepare "
               "other "
               "--name embeddings --from embeddings --source a.npy,b.npy --rows-per-file 50 --to %s "
               "--variant $variant "
               "--threads $threads && diff -r other set || exit; done; done; rm -rf set",
               to);
    }
    EXPECT_PRINTS(2, "--variant omp: not a variant of ops", PREPARE "--variant omp");
    EXPECT_PRINTS(2, "--variant: unknown variant 'nothing'", PREPARE "--variant nothing");
    EXPECT_PRINTS(2, "one variant writes the files; name one, or auto",
                  PREPARE "--variant ops-naive,ops-omp");
    EXPECT_PRINTS(2, "--variant all: one variant writes the files", PREPARE "--variant all");
}

/* ---- Reading sets back ---- */

/* Returns value j of a row that was converted as the specifications of OCP and NVIDIA define it. */
static float packed_value(const struct ops_format *format, const uint8_t *values, const uint8_t *scales,
                          int j)
{
    static const double codes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const unsigned code = values[j / 2] >> 4 * (j % 2) & 15;
    const double value = code & 8 ? -codes[code & 7] : codes[code & 7];
    if (format->to == OPS_F32)
        return ((const float *)(const void *)values)[j];
    if (format->to == OPS_FP8)
        return fp8_to_float(values[j]);
    if (format->to == OPS_MXFP4)
        return (float)ldexp(value, scales[j / 32] - 127);
    return (float)(value * (double)fp8_to_float(scales[j / 16]) * (double)format->tensor_scale);
}

/* Compares the rows of `set` with conversions of the rows that are kept. */
static void expect_packed(struct ops_format format, uint32_t columns)
{
    char path[PATH_MAX];
    struct embeddings *set;
    uint32_t largest = 0;
    _Alignas(float) uint8_t values[4 * COLUMNS];
    uint8_t scales[COLUMNS];
    int row = 0;
    for (int i = 0; i < ROWS; i++)
        if (is_kept(i))
            largest = ops_largest_finite(rows[i], DTYPE_F32, COLUMNS, largest);
    format.tensor_scale = nvfp4_tensor_scale(largest);
    snprintf(path, sizeof path, "%s/set", folder);
    cr_assert_eq(embeddings_open(path, "", &set), STATUS_OK, "%s", status_text());
    cr_assert(set->rows == ROWS - 7 && set->columns == columns, "%u columns", set->columns);
    for (uint64_t i = 0; i < set->rows; i++, row++) {
        float found[2 * COLUMNS];
        while (!is_kept(row))
            row++;
        ops_convert_row(&format, rows[row], values, scales);
        embeddings_row(set, i, found);
        for (uint32_t j = 0; j < columns; j++)
            cr_assert_eq(found[j], j < COLUMNS ? packed_value(&format, values, scales, (int)j) : 0,
                         "row %d, value %u", row, j);
    }
    embeddings_close(set);
}

Test(embedding_set, packed_sets_are_read_back)
{
    static const struct {
        const char *name;
        enum ops_type to;
    } types[] = {{"fp8", OPS_FP8}, {"nvfp4", OPS_NVFP4}, {"mxfp4", OPS_MXFP4}};
    put_set();
    for (size_t i = 0; i < COUNT_OF(types); i++) {
        const struct ops_format format = {
            .from = DTYPE_F32, .to = types[i].to, .columns = COLUMNS, .saturate = true};
        const char *name = types[i].name;
        EXPECT(0, PREPARE "--dedup --to %s", name);
        expect_packed(format, COLUMNS);
        EXPECT(0, "$P --verify-set set");
        EXPECT(0,
               "$P --variant all --workload ops --data set --to f32,nvfp4 --verify --loops 2 --warmup-time 0 "
               "--norm-min 0 --format csv | cut -d, -f1-200 > rows.csv");
        EXPECT_PRINTS(0, name, "cat rows.csv");
        /* The rows are written again as f32, and as the type that they have. */
        EXPECT(0, "$P --prepare wide --from embeddings --source set --to f32 --norm-min 0");
        if (types[i].to == OPS_NVFP4)
            EXPECT_PRINTS(2, "choose a type with --to", "$P --prepare again --from embeddings --source set");
        else
            EXPECT(0, "$P --prepare again --from embeddings --source set --norm-min 0 --rows-per-file 50 && "
                      "diff -r again/000 set/000");
        EXPECT(0, "rm -rf set && mv wide set");
        expect_packed(format, COLUMNS);
        EXPECT(0, "rm -rf set again && " PREPARE "--dedup --to %s --align 8", name);
        expect_packed(format, 24);
        EXPECT(0, "$P --verify-set set && rm -r set");
    }
}

/* Rows are padded in the files. */
Test(embedding_set, rows_are_aligned)
{
    put_set();
    EXPECT(0, PREPARE "--dedup --align 16 2>&1");
    cr_assert(!strstr(out, "tensor cores"), "%s", out);
    EXPECT_PRINTS(0, "\"shape\":[50,32]", "head -c 200 set/000/000000.safetensors | tail -c +9");
    expect_packed((struct ops_format){.from = DTYPE_F32, .to = OPS_F32, .columns = COLUMNS}, 32);
    EXPECT_PRINTS(2, "other options (--align=16 there, none now)", PREPARE "--dedup");
    EXPECT_PRINTS(
        0, "the rows have 19 values, which is not a multiple of 8, so tensor cores would be partly idle",
        "$P --prepare half --from embeddings --source a.npy --to f16 2>&1");
    EXPECT(0, "$P --prepare full --from embeddings --source a.npy 2>&1");
    cr_assert(!strstr(out, "tensor cores"), "%s", out);
    EXPECT(0, "$P --prepare even --from embeddings --source a.npy --to f16 --align 8 2>&1");
    cr_assert(!strstr(out, "tensor cores"), "%s", out);
    EXPECT_PRINTS(2, "--align: '0' is out of range",
                  "$P --prepare none --from embeddings --source a.npy --align 0");
    EXPECT_PRINTS(2, "--align: '65' is out of range",
                  "$P --prepare none --from embeddings --source a.npy --align 65");
}

Test(embedding_set, invalid_options_and_sources_are_refused)
{
    put_set();
    put_rows("none.npy", 0, 0);
    static const struct {
        int status;
        const char *options, *words;
    } refused[] = {
        {2, "", "name the files or folders to read with --source"},
        {2, "--source x.npy", "x.npy: No such file"},
        {2, "--source a.npy --samples 3", "--samples does not apply to --from embeddings"},
        {2, "--source a.npy --store shards", "writes only --store files"},
        {2, "--source a.npy --encode npy --to bf16", "NumPy has no type bf16"},
        {2, "--source a.npy --fp8 nan", "only with --to fp8"},
        {2, "--source a.npy --norm-min 2 --norm-max 1", "larger than --norm-max"},
        {1, "--source a.npy --norm-min 50", "none of the 120 rows has a norm from 50 to 100"},
        {1, "--source a.npy --tensor x", "a.npy: no tensor matches"},
        {1, "--source none.npy", "none.npy: all its tensors have 0 rows"},
    };
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        EXPECT(refused[i].status, "$P --prepare set --from embeddings %s", refused[i].options);
        cr_assert(strstr(out, refused[i].words), "%s: %s", refused[i].options, out);
        EXPECT(1, "test -e set");
    }
    /* Without rows, there is no time per row. */
    EXPECT(0, "$P --variant ops-omp --data none.npy --loops 3 --warmup-time 0");
    cr_assert(strstr(out, "\nops-omp                       -") && !strstr(out, "inf"), "%s", out);
    EXPECT_PRINTS(1, ".npy or .npz (as numpy.save()", "cp a.npy a.csv && $P --variant ops-omp --data a.csv");
#ifdef HAVE_ZLIB
    EXPECT_PRINTS(1, "a.npz: not a zip archive", "cp a.npy a.npz && $P --variant ops-omp --data a.npz");
#endif
    EXPECT_PRINTS(2, "inside its source",
                  "mkdir d && cp a.npy d && $P --prepare d/set --from embeddings --source d");
}

/* ---- Interrupted runs ---- */

/* An interrupted run leaves an incomplete set, which must be refused until the command is repeated. */
Test(embedding_set, unfinished_sets_are_refused)
{
    put_set();
    EXPECT(0, "mkdir -p set/.prepare set/000 && cp a.npy set/000");
    EXPECT_PRINTS(2, "its --prepare was interrupted", "$P --verify-set set");
    EXPECT_PRINTS(2, "set is incomplete", "$P --prepare other --from embeddings --source set");
    EXPECT(2, "$P --prepare other --from embeddings --source .");
    cr_assert(strstr(out, "set is incomplete") || strstr(out, "inside its source"), "%s", out);
}

/* Kills a run with SIGKILL after its first files. Without an index, the folder must be marked as unfinished.
 * The repeated command must write the same bytes as a run that was not interrupted. */
Test(embedding_set, killed_runs_are_continued)
{
    put_set();
    EXPECT(0, "$P --prepare whole --from embeddings --source a.npy,b.npy --rows-per-file 1");
    EXPECT(0,
           "{ $P --prepare set --from embeddings --source a.npy,b.npy --rows-per-file 1 >log 2>&1 & p=$!; "
           "until test -e set/000/000004.safetensors || ! kill -0 $p; do sleep 0.002; done; "
           "kill -9 $p; wait $p 2>/dev/null; "
           "test -e set/embeddings.index || test -d set/.prepare; }"); /* a fast machine completes the set */
    EXPECT(
        0,
        "$P --prepare set --from embeddings --source a.npy,b.npy --rows-per-file 1 && diff -r set whole && "
        "$P --verify-set set");
}

/* A limit on the size of files makes a write fail, as on a full disk. */
Test(embedding_set, a_full_disk_leaves_no_incomplete_files)
{
    put_set();
    EXPECT(1, "ulimit -f 4; $P --prepare set --from embeddings --source a.npy,b.npy --rows-per-file 1000");
    EXPECT(0, "test -z \"$(find set -name '*.tmp' -o -name '*.safetensors' -o -name '*.index')\"");
    EXPECT(2, "$P --verify-set set");
    EXPECT(0, "$P --prepare set --from embeddings --source a.npy,b.npy --rows-per-file 1000 && $P "
              "--verify-set set");
}

/* ---- Damage ---- */

/* Inverts a byte of a file in set/000. A negative offset is relative to the end of the file. */
static void flip(const char *name, long offset)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/set/000/%s", folder, name);
    FILE *file = fopen(path, "r+");
    cr_assert(file && fseek(file, offset, offset < 0 ? SEEK_END : SEEK_SET) == 0);
    int byte = fgetc(file);
    cr_assert(byte != EOF && fseek(file, -1, SEEK_CUR) == 0 && fputc(byte ^ 0xFF, file) != EOF);
    cr_assert_eq(fclose(file), 0);
}

/* Checks the exit status of --verify-set and that its output contains two strings. Restores the set. */
static void expect_damage(int wanted, const char *words, const char *more)
{
    EXPECT(wanted, "$P --verify-set set");
    cr_assert(strstr(out, words) && strstr(out, more), "%s", out);
    EXPECT(0, "rm -rf set && cp -r whole set");
}

/* File 1 has rows 50 to 99 of the set; a row has 76 bytes. */
Test(embedding_set, damaged_rows_are_named)
{
    put_set();
    EXPECT(0, PREPARE "--dedup && cp -r set whole");
    flip("000001.safetensors", -1);
    expect_damage(
        3, "set/000/000001.safetensors: these rows of the set differ from their hashes: 99 (1 of 50 rows",
        "1 of 13 files");
    flip("000001.safetensors", -76 * 50);
    flip("000001.safetensors", -76 * 49 + 75);
    flip("000001.safetensors", -76 * 10);
    flip("000004.safetensors", -1);
    expect_damage(3,
                  "set/000/000001.safetensors: these rows of the set differ from their hashes: 50 to 51, 90 "
                  "(3 of 50 rows of the file)",
                  "set/000/000004.safetensors: these rows of the set differ from their hashes: 249 (");
    for (long row = 1; row <= 19; row += 2)
        flip("000000.safetensors", -76 * row);
    expect_damage(3, "hashes: 31, 33, ", "45, and 2 more ranges (10 of");
}

Test(embedding_set, damaged_files_are_named)
{
    put_set();
    EXPECT(0, PREPARE "--dedup && cp -r set whole");
    flip("000000.safetensors", 8);
    expect_damage(3, "000000.safetensors: its header differs", "1 of 13 files");
    flip("000000.safetensors", 50); /* a byte of the metadata */
    expect_damage(3, "000000.safetensors: its", "header");
    flip("000002.xxh3", 9);
    expect_damage(3, "set/000/000002.xxh3: it differs from its hash", "1 of 13 files");
    flip("000002.xxh3", 9);
    flip("000002.safetensors", -9);
    expect_damage(3, "000002.safetensors: it differs from its hash in the index; without", "2 of 13 files");
    EXPECT(0, "rm set/000/000003.safetensors");
    expect_damage(3, "set/000/000003.safetensors: cannot be read", "1 of 13 files");
    EXPECT(0, "truncate -s -1 set/000/000003.safetensors");
    expect_damage(3, "000003.safetensors: it has", "instead of");
    EXPECT(0, "sed -i 's/^sample/samplf/' set/embeddings.index");
    expect_damage(1, "embeddings.index", "truncated or changed");
    EXPECT(0, "sed -i s/,250,/,251,/ set/samples.csv");
    expect_damage(3, "set/samples.csv: it differs from the list that --prepare wrote", "1 of 13 files");
    EXPECT(0, "rm set/samples.csv");
    expect_damage(3, "set/samples.csv: cannot be read", "1 of 13 files");
    EXPECT(0, "cp set/000/000000.safetensors set/000/extra.safetensors && mkdir set/001 && cp a.npy set/001");
    expect_damage(3, "set/000/extra.safetensors: it does not belong to the set; remove it",
                  "set/001/a.npy: it does not belong to the set");
    EXPECT(0, "$P --verify-set set//");
    EXPECT(0, "rm set/embeddings.index");
    expect_damage(2, "it has no index", "--from embeddings");
    EXPECT(0, "cp set/embeddings.index set/b.index");
    expect_damage(2, "more than one index", "set");
    EXPECT(0, "rm -rf set && $P --prepare set --samples 2 --sample-shape 3 --store files");
    expect_damage(2, "not a set of embeddings", "--workload load --verify");
    EXPECT(2, "$P --verify-set nowhere");
    EXPECT_PRINTS(2, "--format does not apply to --verify-set; leave one out",
                  "$P --verify-set set --format json");
    EXPECT(2, "$P --verify-set set --variant ops-omp");
}

/* Tests damaged rows of .npy files and of nvfp4, whose rows have scales. */
Test(embedding_set, damage_in_npy_and_nvfp4_files_is_named)
{
    put_set();
    EXPECT(0, PREPARE "--encode npy && cp -r set whole");
    flip("000001.npy", -77);
    expect_damage(3, "000001.npy: these rows of the set differ from their hashes: 98 (", "");
    EXPECT(0, "rm -r whole set; " PREPARE "--to nvfp4 && cp -r set whole");
    /* The file ends with 2 scales for each of 50 rows, and the scale of the set. */
    flip("000001.safetensors", -5);
    expect_damage(3, "hashes: 99 (", "");
    flip("000001.safetensors", -105);
    expect_damage(3, "hashes: 99 (", "");
    flip("000001.safetensors", -1);
    expect_damage(3, "its rows match", "scale");
}

#else

Test(embedding_set, needs_xxhash_and_jansson)
{
    cr_skip_test("this build has no xxHash or no jansson");
}

#endif
