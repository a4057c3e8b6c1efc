/* Sources: where the samples of a prepared dataset come from.
 *
 * A source makes any sample by its number, always the same bytes, so that ranks can share the work and a
 * killed run can go on. A new source is a `const struct source` in its own room and a line in source.c. */
#ifndef FDSL_DATA_SOURCE_H
#define FDSL_DATA_SOURCE_H

#include <stddef.h>
#include <stdint.h>

#include "core/generator.h"
#include "core/options.h"
#include "core/status.h"
#include "core/variant.h"

#define SOURCE_MEMBERS_MAX 4
#define SOURCE_COLUMNS_MAX 4
#define SOURCE_TEXT_MAX    4097       /* any key and its zero: as long as a path or a name in a tar */
#define SOURCE_ENDLESS     UINT64_MAX /* instead of a number of samples */

struct source_member {
    const char *extension; /* lives as long as the source is open */
    void *bytes;           /* from malloc; the sample's */
    size_t size;
};

/* Members in the order of their extensions. */
struct source_sample {
    struct source_member members[SOURCE_MEMBERS_MAX];
    size_t count;
    const char *key; /* its name where it comes from, or NULL; lives as long as the source is open */
};

/* What is known once a source is open. */
struct source_facts {
    uint64_t samples;      /* how many there are; SOURCE_ENDLESS: as many as are asked for */
    uint64_t sample_bytes; /* about, for the number of shards */
    uint64_t identity;     /* a hash of what the options name but do not hold: the contents of files */
};

/* What a source is opened with: its options and, where it has a workload, that one's. */
struct source_request {
    const struct options *options;
    const void *parameters;
    void *workload_parameters;
    struct resources resources;
    const char *target; /* the folder that samples are written into, or NULL; it need not exist */
};

struct source {
    const char *name, *summary;

    /* Its options. Those with `column` set decide what the samples are. */
    const struct option_spec *options;
    size_t option_count;
    size_t parameters_bytes;

    /* A workload whose options it takes as well, or NULL; and those of its columns that do not decide what
     * the samples are, NULL-terminated. */
    const char *workload;
    const char *const *indifferent;

    /* What describe() tells of a sample, for samples.csv; NULL-terminated, SOURCE_COLUMNS_MAX at most. */
    const char *const *columns;

    /* Checks the options and makes the state, which the caller closes. */
    enum status (*open)(const struct source_request *request, struct source_facts *facts, void **state);
    void (*close)(void *state);

    /* Makes samples first to first + count - 1. The caller frees each, also after a failure; they come
     * zeroed. */
    enum status (*make)(void *state, uint64_t first, uint64_t count, struct source_sample *samples);

    /* Makes a generator of the values of samples, without labels and headers, as of the member "npy". It does
     * not outlive the state; the caller closes it. May be NULL: there is none. */
    enum status (*generate)(void *state, const struct generator_request *request,
                            struct generator **generator);

    /* With generate(): the label of a sample that nobody has made. */
    uint64_t (*label)(const void *state, uint64_t number);

    /* The texts of the columns, one for each. */
    void (*describe)(const void *state, uint64_t number, char texts[][SOURCE_TEXT_MAX]);
};

/* All sources, NULL-terminated. */
extern const struct source *const source_table[];

const struct source *source_find(const char *name);

/* ---- For those who want samples without a folder ---- */

#define SOURCE_ARGUMENTS_MAX 8

/* A source that was opened by words. */
struct source_reader {
    const struct source *source;
    void *state;
    struct source_facts facts;
    struct options options;
    void *parameters, *workload_parameters; /* owned */
    char *arguments[SOURCE_ARGUMENTS_MAX];  /* owned; the values of options point into them */
};

/* Opens the source of that name with the options that `words` give, names and values in turn and then NULL:
 * {"--source", "x", NULL}. Any text will do as a value, "--" as well. The caller closes, also after a
 * failure. */
enum status source_open(const char *name, const char *const words[], const struct resources *resources,
                        struct source_reader *reader);
void source_close(struct source_reader *reader);

/* The member with this extension, or NULL. */
const struct source_member *source_member(const struct source_sample *sample, const char *extension);

/* ---- For those who make samples ---- */

/* What a picture becomes in a sample. */
enum source_encoding { SOURCE_PNG, SOURCE_NPY };
extern const char *const source_encodings[]; /* for an option, as the enum */

/* Adds a member; takes `bytes`. */
void source_add(struct source_sample *sample, const char *extension, void *bytes, size_t size);

/* Adds "cls", the label in decimal digits. */
enum status source_add_label(struct source_sample *sample, uint64_t label);

/* Adds "npy", an array of this type and shape (npy_header_make()) with these values, which are copied. Where
 * `values` is NULL they are zero, and `*room` shows where to write them. */
enum status source_add_array(struct source_sample *sample, const char *type, const char *shape,
                             const void *values, size_t bytes, void **room);

/* Frees what the sample holds, and leaves it empty. */
void source_sample_free(struct source_sample *sample);

/* Makes samples one by one, in parallel where OpenMP is there; for sources whose make() can be so. */
typedef enum status source_make_one(const void *state, uint64_t number, struct source_sample *sample);
enum status source_make_all(source_make_one *make, const void *state, uint64_t first, uint64_t count,
                            struct source_sample *samples);

#endif
