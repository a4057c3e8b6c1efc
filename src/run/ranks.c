#include "run/ranks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine/comm.h"

void ranks_free_rows(struct row *rows)
{
    for (int i = 0; rows && i <= comm_size(); i++)
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

/* Makes the rows of all ranks from their values and texts. `word_bytes` is the distance between the texts of
 * two ranks. */
static enum status take_rows(const struct row *mine, const struct value *values, const char *words,
                             size_t word_bytes, struct row **rows)
{
    *rows = calloc((size_t)comm_size() + 1, sizeof **rows);
    TRY(ALLOCATED(*rows, "out of memory for the rows of %d ranks", comm_size()));
    for (size_t i = 0; i < (size_t)comm_size(); i++) {
        struct row *row = &(*rows)[i];
        row_open(row, mine->columns);
        row->words = malloc(word_bytes);
        row->failed |= !row->words;
        TRY(row_check(row));
        row->word_bytes = word_bytes;
        memcpy(row->values, values + i * row->count, row->count * sizeof *values);
        memcpy(row->words, words + i * word_bytes, word_bytes);
    }
    return STATUS_OK;
}

static enum status gather_rows(const struct row *mine, struct row **rows)
{
    double longest = (double)mine->word_bytes;
    TRY(comm_max(&longest, 1));
    size_t word_bytes = (size_t)longest;
    FREED void *values = NULL, *words = NULL;
    FREED char *padded = calloc(1, word_bytes);
    TRY(comm_agree(ALLOCATED(padded, "out of memory for a row of %zu bytes", word_bytes)));
    memcpy(padded, mine->words, mine->word_bytes);
    TRY(gather(mine->values, mine->count * sizeof *mine->values, &values));
    TRY(gather(padded, word_bytes, &words));
    return comm_agree(values ? take_rows(mine, values, words, word_bytes, rows) : STATUS_OK);
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

/* Returns the number that a row shows. */
static double shown(const struct value *value)
{
    if (value->type == VALUE_INTEGER)
        return (double)value->integer;
    if (value->digits == 0 || value->real == 0)
        return value->real;
    int decimals =
        value->digits < 0 ? -value->digits : value->digits - 1 - (int)floor(log10(fabs(value->real)));
    return rint(value->real * pow(10, decimals)) / pow(10, decimals);
}

static bool is_same(const struct row *a, const struct row *b, size_t column)
{
    char first[VALUE_TEXT_MAX], second[VALUE_TEXT_MAX];
    return strcmp(row_cell(a, column, first), row_cell(b, column, second)) == 0;
}

/* Sets the value of a column that all ranks have. */
static void combine(const struct row *rows, int count, size_t column, enum combine how, struct value *total)
{
    double smallest = INFINITY, largest = -INFINITY, mean = 0, sum = 0;
    *total = rows[0].values[column];
    for (int i = 0; i < count; i++) {
        const struct value *value = &rows[i].values[column];
        double number = shown(value);
        smallest = fmin(smallest, number);
        largest = fmax(largest, number);
        mean += number / count;
        sum += number;
        if (i > 0 && how == COMBINE_SUM && value->type != VALUE_REAL)
            total->integer += value->integer; /* exact, and for hashes modulo 2^64 */
    }
    if (how == COMBINE_SUM && total->type != VALUE_REAL)
        return;
    double real = how == COMBINE_MIN    ? smallest
                  : how == COMBINE_MAX  ? largest
                  : how == COMBINE_MEAN ? mean
                                        : sum;
    *total = (struct value){.type = VALUE_REAL, .real = real};
}

void ranks_combine(const struct row *rows, int count, struct row *total)
{
    for (size_t column = 0; column < total->count; column++) {
        enum combine how = total->columns[column].combine;
        bool known = true, same = true;
        for (int i = 0; i < count; i++) {
            known &= rows[i].values[column].type != VALUE_ABSENT;
            same &= is_same(&rows[0], &rows[i], column);
        }
        if (how == COMBINE_FIRST || (how == COMBINE_COMMON && same))
            row_copy(total, column, &rows[0]);
        else if (how != COMBINE_COMMON && how != COMBINE_NONE && known)
            combine(rows, count, column, how, &total->values[column]);
    }
}

double ranks_efficiency(const struct partition *partition, double alone_s, double together_s)
{
    return alone_s / (partition->strong ? (double)partition->ranks * together_s : together_s);
}
