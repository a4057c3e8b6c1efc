#include "run/ranks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine/comm.h"

/* ---- Packed rows: zero-terminated strings in one buffer ---- */

static size_t packed_bytes(const struct row *row)
{
    size_t bytes = 0;
    for (size_t i = 0; i < row->count; i++)
        bytes += strlen(row->fields[i].text) + 1;
    return bytes;
}

static void pack(const struct row *row, char *to)
{
    for (size_t i = 0; i < row->count; i++)
        to = stpcpy(to, row->fields[i].text) + 1;
}

/* Unpacks a row with the columns of `like`. */
static enum status unpack(const char *from, const struct row *like, struct row *row)
{
    for (size_t i = 0; i < like->count; i++) {
        const struct field *field = &like->fields[i];
        row_add(row, field->column, from, field->kind);
        from += strlen(from) + 1;
    }
    return row_check(row);
}

static enum status unpack_all(const char *packed, size_t bytes, const struct row *like, struct row **rows)
{
    *rows = calloc((size_t)comm_size(), sizeof **rows);
    TRY(ALLOCATED(*rows, "out of memory for the rows of %d ranks", comm_size()));
    for (int i = 0; i < comm_size(); i++)
        TRY(unpack(packed + (size_t)i * bytes, like, &(*rows)[i]));
    return STATUS_OK;
}

void ranks_free_rows(struct row *rows)
{
    for (int i = 0; rows && i < comm_size(); i++)
        row_free(&rows[i]);
    free(rows);
}

/* ---- Gathering ---- */

/* Gathers `bytes` bytes of each rank on rank 0. On rank 0, `*all` becomes new memory that the caller frees;
 * on other ranks it becomes NULL. */
static enum status gather(const void *mine, size_t bytes, void **all)
{
    bool leads = comm_rank() == 0;
    *all = leads ? malloc((size_t)comm_size() * bytes) : NULL;
    enum status status = STATUS_OK;
    if (leads && !*all)
        status = status_set(STATUS_EXHAUSTED, "out of memory for the results of %d ranks", comm_size());
    status = comm_agree(status);
    if (status == STATUS_OK)
        status = comm_gather(mine, bytes, *all);
    if (status != STATUS_OK) {
        free(*all);
        *all = NULL;
    }
    return status;
}

static enum status gather_rows(const struct row *mine, struct row **rows)
{
    double longest = (double)packed_bytes(mine);
    TRY(comm_max(&longest, 1));
    size_t bytes = (size_t)longest;
    FREED void *all = NULL;
    FREED char *packed = calloc(1, bytes);
    enum status status = ALLOCATED(packed, "out of memory for a row of %zu bytes", bytes);
    if (packed)
        pack(mine, packed);
    status = comm_agree(status);
    if (status == STATUS_OK)
        status = gather(packed, bytes, &all);
    if (status == STATUS_OK && all)
        status = unpack_all(all, bytes, mine, rows);
    return comm_agree(status);
}

enum status ranks_gather(const struct row *mine, const struct rank_facts *my_facts, struct row **rows,
                         struct rank_facts **facts)
{
    *rows = NULL;
    void *all = NULL;
    enum status status = gather_rows(mine, rows);
    if (status == STATUS_OK)
        status = gather(my_facts, sizeof *my_facts, &all);
    *facts = all;
    if (status != STATUS_OK) {
        ranks_free_rows(*rows);
        *rows = NULL;
    }
    return status;
}

enum status ranks_gather_samples(const struct bench *bench, struct sample **samples)
{
    void *all;
    enum status status = gather(bench->samples, bench->count * sizeof *bench->samples, &all);
    *samples = all;
    return status;
}

/* ---- Combining ---- */

struct roofline ranks_roofline(const struct rank_facts *facts, uint64_t count)
{
    struct roofline all = {0};
    for (uint64_t i = 0; i < count; i++)
        roofline_add(&all, &facts[i].roofline, facts[i].sharers);
    return all;
}

static void combine(const struct row *rows, int count, const char *column, enum combine how,
                    struct row *total)
{
    const char *first = row_get(&rows[0], column);
    char text[32] = "";
    if (!first || !*first || how == COMBINE_NONE)
        return;
    bool common = true;
    for (int i = 1; how == COMBINE_COMMON && i < count; i++)
        common &= strcmp(row_get(&rows[i], column), first) == 0;
    if (how == COMBINE_FIRST || how == COMBINE_SAME || how == COMBINE_COMMON) {
        row_set(total, column, common ? first : "");
        return;
    }
    unsigned long long sum = 0;
    double smallest = INFINITY, largest = -INFINITY, mean = 0, sum_real = 0;
    for (int i = 0; i < count; i++) {
        const char *cell = row_get(&rows[i], column);
        if (!*cell) /* the combined value is unknown if the value of any rank is unknown */
            return;
        sum += strtoull(cell, NULL, how == COMBINE_HASHES ? 16 : 10);
        double value = strtod(cell, NULL);
        smallest = fmin(smallest, value);
        largest = fmax(largest, value);
        mean += value / count;
        sum_real += value;
    }
    if (how == COMBINE_MIN || how == COMBINE_MAX || how == COMBINE_MEAN || how == COMBINE_SUM_REAL)
        snprintf(text, sizeof text, "%.9g",
                 how == COMBINE_MIN    ? smallest
                 : how == COMBINE_MAX  ? largest
                 : how == COMBINE_MEAN ? mean
                                       : sum_real);
    else
        snprintf(text, sizeof text, how == COMBINE_HASHES ? "%016llx" : "%llu", sum);
    row_set(total, column, text);
}

void ranks_combine(const struct row *rows, int count, const struct measure *measures, struct row *total)
{
    static const struct measure shared[] = {{"threads", COMBINE_SUM},
                                            {"ranks_per_device", COMBINE_MAX},
                                            {"batch", COMBINE_SUM},
                                            {"wrong", COMBINE_SUM},
                                            {"sm_clock_mhz", COMBINE_MIN},
                                            {"memory_clock_mhz", COMBINE_MIN},
                                            {"instruction_set", COMBINE_COMMON},
                                            {NULL, COMBINE_FIRST}};
    row_set(total, "rank", "all");
    for (const struct measure *measure = shared; measure->column; measure++)
        combine(rows, count, measure->column, measure->combine, total);
    for (const struct measure *measure = measures; measure->column; measure++)
        combine(rows, count, measure->column, measure->combine, total);
}

double ranks_efficiency(const struct partition *partition, double alone_s, double together_s)
{
    return alone_s / (partition->strong ? (double)partition->ranks * together_s : together_s);
}
