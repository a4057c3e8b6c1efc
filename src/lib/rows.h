/* Rows of embeddings as a source of streams (rows.c). */
#ifndef FDSL_LIB_ROWS_H
#define FDSL_LIB_ROWS_H

#include <stdatomic.h>
#include <stdbool.h>

#include "core/stream.h"
#include "data/device_batches.h"
#include "data/random_draws.h"
#include "lib/call.h"

/* Some rows of a set of embeddings. Which ones does not change; threads may share them. */
struct rows;

/* Open the rows of fdsl_rows_open() and fdsl_rows_select(). Both check the fields of `config`. `*rows` is
 * NULL after an error. When another thread sets `*cancel`, rows_select() fails soon. */
enum status rows_open(const struct fdsl_rows_config *config, struct rows **rows);
enum status rows_select(struct rows *from, const struct fdsl_select_config *config, const atomic_bool *cancel,
                        struct rows **rows);

/* Frees rows; NULL is allowed. What other rows share with them stays. */
void rows_free(struct rows *rows);

uint32_t rows_count(const struct rows *rows); /* at least 1 */
bool rows_labelled(const struct rows *rows);
uint64_t rows_hash(const struct rows *rows); /* struct fdsl_source_info.hash */

/* Sets the fields of `info` that describe rows, and `samples`, `bytes` and `files`. */
void rows_describe(const struct rows *rows, struct fdsl_source_info *info);

/* The samples of a stream of rows. */
struct rows_format {
    enum dtype type;
    uint32_t width;     /* values per row, with the padding */
    uint64_t transform; /* hash of both */
};

/* Checks `dtype`, and describes what the stream delivers. */
enum status rows_check_format(const struct rows *rows, const struct fdsl_stream_config *config,
                              struct rows_format *format);

/* Lists the numbers of rows in host memory, if only a device has them. To be called before rows_order().
 * Thread safe. STATUS_EXHAUSTED if memory runs out, or the failure of the copy. */
enum status rows_list(struct rows *rows);

/* The order of epoch `epoch`: which row of the files is at a position. Without `shuffle`, the order of
 * `rows`. */
struct rows_order {
    const struct rows *rows;
    bool shuffle;
    struct draw_order order;
};
struct rows_order rows_order(const struct rows *rows, bool shuffle, uint64_t seed, uint64_t epoch);
uint32_t rows_order_at(const struct rows_order *order, uint32_t position);

/* The order of a stream. */
struct rows_plan {
    struct stream_plan plan; /* lists numbers of rows in the files (rows_order_at()) */
    uint64_t seed;
    bool shuffle;
    uint32_t global, rank, ranks; /* rows of a step of all ranks */
};

/* Opens a stream in host memory (`*stream`) or on config->device (`*batches`; `*stream` is its stream, and
 * batches have no list of numbers). `rows` must outlive the stream. */
enum status rows_stream_open(struct rows *rows, const struct fdsl_stream_config *config,
                             const struct rows_format *format, const struct rows_plan *plan,
                             struct stream **stream, struct device_batches **batches);

#endif
