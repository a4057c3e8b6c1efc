/* Reads Python pickles of protocol 2 without executing anything. The result is a tree of plain values. A call
 * of a Python object (REDUCE) becomes a value that names the object and holds the arguments. */
#ifndef FDSL_DATA_PICKLE_H
#define FDSL_DATA_PICKLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

enum pickle_kind {
    PICKLE_NONE,
    PICKLE_BOOL,
    PICKLE_INT,
    PICKLE_NUMBER, /* a float, or an integer of more than 64 bits; its value is not kept */
    PICKLE_TEXT,
    PICKLE_TUPLE,
    PICKLE_LIST,
    PICKLE_DICT,       /* also collections.OrderedDict */
    PICKLE_GLOBAL,     /* a Python object that `allowed` accepts; its text is "module name" */
    PICKLE_PERSISTENT, /* a reference to data outside the pickle; its only item is the key */
    PICKLE_CALL        /* items: a global and the tuple of its arguments */
};

struct pickle_value {
    enum pickle_kind kind;
    unsigned mark;    /* 0; for the caller, who may see a shared value more than once */
    int64_t number;   /* bool, int */
    const char *text; /* text, global: `length` bytes in the pickle, without a terminating zero */
    size_t length;
    struct pickle_value **items; /* a dict has alternating keys and values */
    size_t count;
};

struct pickle {
    struct pickle_value *root;
    struct pickle_block *blocks; /* owned; the values */
};

/* Parses a pickle. The values point into `bytes`. `allowed` returns whether a global, such as
 * "torch FloatStorage", may occur. Every other global, and every opcode that is not needed for plain values,
 * is refused by name. Shared values may occur more than once in the tree, and lists and dicts may contain
 * themselves. The caller frees `pickle`, even after a failure. STATUS_FAILED with the reason. */
enum status pickle_parse(const uint8_t *bytes, size_t size, bool (*allowed)(const char *text, size_t length),
                         struct pickle *pickle);
void pickle_free(struct pickle *pickle);

/* Returns whether a value is this text. */
bool pickle_is(const struct pickle_value *value, const char *text);

#endif
