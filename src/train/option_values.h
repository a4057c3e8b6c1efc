/* Options and their values, as a training run compares them and as checkpoints store them: typed values, not
 * texts. Whether a run may continue from a checkpoint is decided by comparing values. */
#ifndef FDSL_TRAIN_OPTION_VALUES_H
#define FDSL_TRAIN_OPTION_VALUES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/options.h"
#include "core/status.h"

/* The kinds of values. Checkpoints store these numbers, so they must not change. */
enum option_value_kind {
    OPTION_VALUE_FLAG = 1, /* 0 or 1 */
    OPTION_VALUE_WHOLE = 2,
    OPTION_VALUE_REAL = 3, /* finite */
    OPTION_VALUE_WORD = 4, /* also the name of a choice, and a list of numbers */
    OPTION_VALUE_HASH = 5  /* not an option: a hash of an input of the run */
};

#define OPTION_VALUE_NAME_MAX 32 /* with the terminating zero */

struct option_value {
    char name[OPTION_VALUE_NAME_MAX]; /* of the option, without the dashes */
    enum option_value_kind kind;
    uint64_t whole; /* of a flag, a whole number or a hash */
    double real;
    char *word; /* owned; NULL unless the kind is OPTION_VALUE_WORD */
};

/* A zeroed struct is an empty list. */
struct option_values {
    struct option_value *of; /* owned */
    size_t count;
};

/* Appends the value of an option in the struct `values`, unless it has none. An unchanged list of numbers has
 * an unchanged word, however the user wrote it. STATUS_EXHAUSTED if memory runs out. */
enum status option_values_add(struct option_values *list, const struct option_spec *spec, const void *values);
enum status option_values_add_hash(struct option_values *list, const char *name, uint64_t hash);

/* Sets `*copy` to a copy of a list. The caller frees it, even after a failure. */
enum status option_values_copy(const struct option_values *list, struct option_values *copy);
void option_values_free(struct option_values *list);

/* Returns the value with this name, or NULL. */
const struct option_value *option_values_find(const struct option_values *list, const char *name);

/* Returns whether two values are equal. Either may be NULL: no value. */
bool option_value_same(const struct option_value *a, const struct option_value *b);

/* Writes a value as options_text() does; a hash as 16 hexadecimal digits. */
void option_value_text(const struct option_value *value, char *text, size_t size);

/* Returns "name=value name=value ..." for people and other programs. The caller frees the text; NULL if
 * memory runs out. */
char *option_values_text(const struct option_values *list);

/* Stores a value in the struct `values`. Words are not copied. STATUS_FAILED if the option does not accept
 * the value. */
enum status option_value_store(const struct option_value *value, const struct option_spec *spec,
                               void *values);

/* Encodes a list as in a checkpoint. Each value has one byte for its kind, one for the length of its name,
 * and the name. A word follows as its length in 4 bytes and its bytes; any other value as 8 bytes, which for
 * a real number are those of an IEEE double. All numbers are little-endian. `*bytes` is owned by the caller.
 */
enum status option_values_encode(const struct option_values *list, unsigned char **bytes, size_t *size);

/* Decodes a list from bytes that may be hostile. STATUS_FAILED if they are malformed; STATUS_EXHAUSTED if
 * memory runs out. The caller frees `list`, even after a failure. */
enum status option_values_decode(const unsigned char *bytes, size_t size, struct option_values *list);

#endif
