/* Tests the workload `ops` with rows from files: several files, the parts that ranks read, unaligned rows,
 * and files that shrink while they are read. */
#include "ops_support.h"

#include <stdio.h>
#include <unistd.h>

TestSuite(ops_files, .timeout = 60);

static const char *const variants[] = {"ops-naive", "ops-omp"};

static char folder[] = "/tmp/fdsl-ops-XXXXXX";

static float value_of(uint64_t row, uint32_t column)
{
    return row % 5 == 3 ? 0 : 0.125F * (float)(1 + row) + (float)column;
}

/* Writes `rows` rows, beginning with row `first`, to a safetensors file. The header ends with `odd` blanks,
 * which can move the rows to an unaligned offset. */
static void write_rows(const char *name, uint64_t first, uint64_t rows, uint32_t columns, int odd)
{
    char path[256], header[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int length =
        snprintf(header, sizeof header,
                 "{\"rows\":{\"dtype\":\"F32\",\"shape\":[%llu,%u],\"data_offsets\":[0,%llu]}}%*s",
                 (unsigned long long)rows, columns, (unsigned long long)(rows * columns * 4), odd, "");
    uint64_t bytes = (uint64_t)length;
    FILE *file = fopen(path, "wb");
    cr_assert(file && fwrite(&bytes, 8, 1, file) == 1 && fwrite(header, bytes, 1, file) == 1);
    for (uint64_t row = first; row < first + rows; row++)
        for (uint32_t column = 0; column < columns; column++) {
            float value = value_of(row, column);
            cr_assert_eq(fwrite(&value, sizeof value, 1, file), 1);
        }
    cr_assert_eq(fclose(file), 0);
}

static void make_set(void)
{
    cr_assert(mkdtemp(folder));
    write_rows("a.safetensors", 0, 5, 6, 0);
    write_rows("b.safetensors", 5, 0, 6, 1);
    write_rows("c.safetensors", 5, 12, 6, 1);
    write_rows("d.safetensors", 17, 1, 6, 2);
}

static void remove_set(void)
{
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_assert_eq(system(command), 0);
}

static void open_files(struct job *job, uint64_t rank, uint64_t ranks, const char *options)
{
    char line[512];
    snprintf(line, sizeof line, "--data %s %s", folder, options);
    enum status status = open_rank(job, rank, ranks, line);
    if (status == STATUS_UNAVAILABLE)
        cr_skip_test("this build has no xxHash or no jansson");
    cr_assert_eq(status, STATUS_OK, "%s", status_text());
}

Test(ops_files, all_files_are_one_set, .init = make_set, .fini = remove_set)
{
    for (uint64_t ranks = 1; ranks <= 7; ranks++)
        for (uint64_t rank = 0, next = 0; rank < ranks; rank++) {
            struct job job;
            open_files(&job, rank, ranks, "");
            cr_assert(job.ops->first == next && job.ops->format.columns == 6);
            next += job.ops->count;
            cr_expect(rank + 1 < ranks || next == 18);
            for (uint64_t i = 0; i < job.ops->count; i++)
                for (uint32_t column = 0; column < 6; column++)
                    cr_assert_eq(ops_value(ops_row(job.ops, i), DTYPE_F32, column),
                                 value_of(job.ops->first + i, column));
            close_job(&job);
        }
}

/* After open(), the options --rows, --dim and --dtype have the values of the files, so that the CSV rows
 * show these values. */
Test(ops_files, parameters_are_those_of_the_files, .init = make_set, .fini = remove_set)
{
    static const char *const expected[][2] = {{"rows", "18"}, {"dim", "6"}, {"dtype", "f32"}};
    struct job job;
    size_t found = 0;
    open_files(&job, 0, 1, "");
    for (size_t i = 0; i < job.workload->option_count; i++)
        for (size_t k = 0; k < COUNT_OF(expected); k++) {
            char text[64];
            if (strcmp(job.workload->options[i].name, expected[k][0]) != 0)
                continue;
            options_text(&job.workload->options[i], job.parameters, text, sizeof text);
            cr_expect_str_eq(text, expected[k][1]);
            found++;
        }
    cr_expect_eq(found, COUNT_OF(expected));
    close_job(&job);
}

Test(ops_files, variants_compute_the_same_bits, .init = make_set, .fini = remove_set)
{
    static const char *const options[] = {"", "--dedup --to nvfp4",
                                          "--steps compact,permute,convert,hash --sample 4",
                                          "--steps mask,compact,convert --to mxfp4 --norm-min 3"};
    for (size_t i = 0; i < COUNT_OF(options); i++)
        for (uint64_t rank = 0; rank < (strstr(options[i], "dedup") ? 1 : 3); rank++)
            for (size_t v = 0; v < COUNT_OF(variants); v++) {
                struct job job;
                void *state;
                open_files(&job, rank, strstr(options[i], "dedup") ? 1 : 3, options[i]);
                const struct variant *variant = set_up(&job, variants[v], &state);
                for (uint64_t number = 0; variant && number < 20; number++)
                    cr_assert_eq(wrong_rows(&job, variant, state, number, number), 0, "%s %s", variants[v],
                                 options[i]);
                if (variant)
                    variant->teardown(state);
                close_job(&job);
            }
}

/* ---- Rows that are decoded ---- */

/* Returns the text of --dtype after open(), which is also that of the column. */
static const char *dtype_of(const struct job *job)
{
    static char text[64];
    for (size_t i = 0; i < job->workload->option_count; i++)
        if (strcmp(job->workload->options[i].name, "dtype") == 0)
            options_text(&job->workload->options[i], job->parameters, text, sizeof text);
    return text;
}

static void expect_decoded(const struct job *job, const struct embeddings *set)
{
    uint8_t row[128 * sizeof(float)];
    cr_assert(job->ops->row_bytes == embeddings_row_bytes(set) && sizeof row >= job->ops->row_bytes);
    cr_assert(job->ops->format.from == set->dtype && job->ops->format.columns == set->columns);
    for (uint64_t i = 0; i < job->ops->count; i++) {
        embeddings_decode(set, job->ops->first + i, row);
        cr_assert_eq(memcmp(ops_row(job->ops, i), row, job->ops->row_bytes), 0, "row %d", (int)i);
    }
}

Test(ops_files, decoded_rows_are_processed)
{
    static const char *const files[][2] = {
        {"f64_source.npy", "f64"},  {"f64_packed.npz", "f64"},      {"f16.npz", "f16"},
        {"fp8.safetensors", "fp8"}, {"nvfp4.safetensors", "nvfp4"}, {"mxfp4.safetensors", "mxfp4"}};
    static const char *const options[] = {"--steps mask,compact,convert,hash --to nvfp4",
                                          "--steps mask,compact,permute,convert,hash --to fp8",
                                          "--steps compact,hash"};
    for (size_t f = 0; f < COUNT_OF(files); f++)
        for (uint64_t task = 0; task < 2 * COUNT_OF(options); task++) {
            char path[256], line[512];
            const uint64_t ranks = 1 + task % 2; /* the last rank is tested */
            const char *steps = options[task / 2];
            struct job job;
            struct embeddings *set;
            snprintf(path, sizeof path, "tests/data/embeddings/%s", files[f][0]);
            snprintf(line, sizeof line, "--data %s %s%s", path, steps,
                     strstr(steps, "mask") ? " --norm-min 0 --norm-max 1e19" : "");
            enum status status = open_rank(&job, ranks - 1, ranks, line);
            if (status == STATUS_UNAVAILABLE) {
                close_job(&job);
                continue;
            }
            cr_assert_eq(status, STATUS_OK, "%s", status_text());
            cr_assert_str_eq(dtype_of(&job), files[f][1]);
            cr_assert_eq(embeddings_open(path, "", &set), STATUS_OK);
            cr_assert_eq(job.ops->count, set->rows / ranks);
            expect_decoded(&job, set);
            for (size_t v = 0; v < COUNT_OF(variants); v++) {
                void *state;
                const struct variant *variant = set_up(&job, variants[v], &state);
                for (uint64_t number = 0; variant && number < 3; number++)
                    cr_assert_eq(wrong_rows(&job, variant, state, number, number), 0, "%s %s", variants[v],
                                 line);
                if (variant)
                    variant->teardown(state);
            }
            embeddings_close(set);
            close_job(&job);
        }
    struct job job;
    cr_assert_eq(open_rank(&job, 0, 1, "--dtype f64"), STATUS_USAGE); /* generated rows have fewer types */
    close_job(&job);
}

/* A variant gets the scale of an NVFP4 tensor instead of computing it, and rows that change between runs. */
Test(ops_files, rows_and_scale_can_be_given, .init = make_set, .fini = remove_set)
{
    for (size_t v = 0; v < COUNT_OF(variants); v++) {
        struct job job;
        void *state;
        open_files(&job, 0, 1, "--steps convert --to nvfp4");
        struct ops *ops = (struct ops *)(uintptr_t)job.ops;
        const struct ops_part *all = ops->parts;
        ops->scaled = true;
        ops->format.tensor_scale = 0.25F;
        const struct variant *variant = set_up(&job, variants[v], &state);
        for (size_t part = 0; variant && part < 2; part++) {
            struct run_time unused;
            const struct ops_part one = {all[part].rows, 0, all[part].count};
            ops->parts = &one;
            ops->part_count = 1;
            ops->count = one.count;
            cr_assert_eq(variant_run(variant, state, 0, &unused), STATUS_OK);
            uint8_t *values = results_of(&job, variant, state, OPS_VALUES), row[8], scale;
            uint8_t *scales = results_of(&job, variant, state, OPS_SCALES);
            cr_assert_eq(summary_of(variant, state).tensor_scale, 0.25F);
            for (uint64_t i = 0; i < one.count; i++) {
                ops_convert_row(&ops->format, one.rows + i * ops->row_bytes, row, &scale);
                cr_assert(memcmp(values + 8 * i, row, 8) == 0 && scales[i] == scale, "%s: row %d",
                          variants[v], (int)i);
            }
            free(values);
            free(scales);
        }
        ops->parts = all;
        if (variant)
            variant->teardown(state);
        close_job(&job);
    }
}

/* If a file shrinks, the run must end with an error that names the file, not with a signal. */
Test(ops_files, a_file_that_shrinks_is_named, .init = make_set, .fini = remove_set)
{
    char path[256];
    for (size_t v = 0; v < COUNT_OF(variants); v++) {
        struct job job;
        struct run_time unused;
        void *state;
        uint64_t wrong;
        write_rows("c.safetensors", 5, 60000, 6, 0);
        open_files(&job, 0, 1, "");
        const struct variant *variant = set_up(&job, variants[v], &state);
        if (variant) {
            cr_assert_eq(wrong_rows(&job, variant, state, 0, 0), 0);
            snprintf(path, sizeof path, "%s/c.safetensors", folder);
            cr_assert_eq(truncate(path, 9000), 0);
            cr_expect_eq(variant_run(variant, state, 1, &unused), STATUS_FAILED);
            cr_expect(strstr(status_text(), "c.safetensors was changed while it was read"), "%s",
                      status_text());
            cr_expect_eq(job.workload->verify(job.input, variant, state, 0, &wrong), STATUS_FAILED);
            variant->teardown(state);
        }
        close_job(&job);
    }
}

Test(ops_files, options_of_generated_rows_are_refused, .init = make_set, .fini = remove_set)
{
    static const char *const options[] = {"--rows 5", "--dim 6", "--dtype f32", "--bad 0.1",
                                          "--duplicates 0"};
    struct job job;
    open_files(&job, 0, 1, "");
    close_job(&job);
    for (size_t i = 0; i < COUNT_OF(options); i++) {
        char line[512];
        snprintf(line, sizeof line, "--data %s %s", folder, options[i]);
        cr_expect_eq(open_rank(&job, 0, 1, line), STATUS_USAGE);
        cr_expect(strstr(status_text(), "describes generated rows"), "%s", status_text());
        close_job(&job);
    }
    char seeded[512];
    snprintf(seeded, sizeof seeded, "--data %s --steps mask --seed 3", folder);
    cr_expect_eq(open_rank(&job, 0, 1, seeded), STATUS_USAGE);
    cr_expect_str_eq(status_text(), "--seed is for generated rows and the step permute; drop it");
    close_job(&job);
    cr_expect_eq(open_rank(&job, 0, 1, "--tensor x"), STATUS_USAGE);
    close_job(&job);
    cr_expect_eq(open_rank(&job, 0, 1, "--data /nonexistent"), STATUS_USAGE);
    cr_expect(strstr(status_text(), "/nonexistent"), "%s", status_text());
    close_job(&job);
}
