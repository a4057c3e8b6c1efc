/* Reads the tensors of files that PyTorch's torch.save() writes: a zip archive with a pickle and one member
 * per storage, or the older format, pickles followed by the storages. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/portable.h"
#include "data/tensor_file.h"

/* ---- Pickles ----
 * Reads Python pickles of protocol 2 without executing anything. The result is a tree of plain values. A call
 * of a Python object (REDUCE) becomes a value that names the object and holds the arguments. */

enum pickle_kind {
    PICKLE_NONE,
    PICKLE_BOOL,
    PICKLE_INT,
    PICKLE_NUMBER, /* a float, or an integer of more than 64 bits; its value is not kept */
    PICKLE_TEXT,
    PICKLE_TUPLE,
    PICKLE_LIST,
    PICKLE_DICT,       /* also collections.OrderedDict and defaultdict */
    PICKLE_OBJECT,     /* an object of `plain_objects`; its contents are not kept */
    PICKLE_GLOBAL,     /* a Python object that `allowed` accepts; its text is "module name" */
    PICKLE_PERSISTENT, /* a reference to data outside the pickle; its only item is the key */
    PICKLE_CALL        /* items: a global and the tuple of its arguments */
};

struct pickle_value {
    enum pickle_kind kind;
    unsigned mark;    /* 0; for the caller, who may see a shared value more than once */
    bool plain;       /* a global of `plain_objects` */
    int64_t number;   /* bool, int */
    const char *text; /* text, global: `length` bytes in the pickle, without a terminating zero */
    size_t length;
    struct pickle_value **items; /* a dict has alternating keys and values */
    size_t count;
};

struct pickle {
    struct pickle_value *root;
    struct pickle_block *blocks; /* owned; the values */
    uint64_t arrays;             /* of NumPy, which are not read */
};

#define VALUES_MAX             8000000 /* maximum number of values per pickle: 450 MB, without the lists of items */
#define BLOCK_VALUES           1000
#define ORDERED_DICT           "collections OrderedDict"
#define DEFAULT_DICT           "collections defaultdict"
#define NUMPY_ARRAY            "numpy.core.multiarray _reconstruct"
#define NUMPY_2_ARRAY          "numpy._core.multiarray _reconstruct"
#define PICKLE_ALLOCATED(room) ALLOCATED(room, "out of memory for its pickle")
#define TRUNCATED              status_set(STATUS_FAILED, "its pickle is truncated")

struct pickle_block {
    struct pickle_block *next;
    struct pickle_value values[BLOCK_VALUES];
};

struct values {
    struct pickle_value **items;
    size_t count;
};

/* State of the machine that executes a pickle's opcodes: a stack, and a memo of values that are used
 * again. */
struct parser {
    const uint8_t *bytes, *at, *end;
    bool (*allowed)(const char *text, size_t length);
    struct pickle *pickle;
    size_t value_count;
    struct values stack; /* a mark is NULL */
    struct values memo;  /* unused entries are NULL */
    bool stopped;
};

/* ---- Values ---- */

/* Returns whether a value is this text. */
static bool pickle_is(const struct pickle_value *value, const char *text)
{
    size_t length = strlen(text);
    if ((value->kind != PICKLE_TEXT && value->kind != PICKLE_GLOBAL) || value->length != length)
        return false;
    for (size_t i = 0; i < length; i++) /* a global has a line feed instead of the blank */
        if (value->text[i] != text[i] && !(value->text[i] == '\n' && text[i] == ' '))
            return false;
    return true;
}

static enum status push_item(struct pickle_value ***items, size_t *count, struct pickle_value *value)
{
    TRY(PICKLE_ALLOCATED(array_grow(items, *count, sizeof **items)));
    (*items)[(*count)++] = value;
    return STATUS_OK;
}

static enum status push(struct parser *parser, struct pickle_value *value)
{
    return push_item(&parser->stack.items, &parser->stack.count, value);
}

static enum status add_item(struct pickle_value *list, struct pickle_value *value)
{
    return push_item(&list->items, &list->count, value);
}

/* Creates a value and pushes it. */
static enum status push_new(struct parser *parser, enum pickle_kind kind, struct pickle_value **value)
{
    size_t index = parser->value_count % BLOCK_VALUES;
    *value = NULL;
    if (parser->value_count == VALUES_MAX)
        return status_set(STATUS_FAILED, "its pickle has more than %d values", VALUES_MAX);
    if (index == 0) {
        struct pickle_block *block = calloc(1, sizeof *block);
        TRY(PICKLE_ALLOCATED(block));
        block->next = parser->pickle->blocks;
        parser->pickle->blocks = block;
    }
    parser->value_count++;
    *value = &parser->pickle->blocks->values[index];
    (*value)->kind = kind;
    return push(parser, *value);
}

static enum status push_number(struct parser *parser, enum pickle_kind kind, int64_t number)
{
    struct pickle_value *value;
    TRY(push_new(parser, kind, &value));
    value->number = number;
    return STATUS_OK;
}

static enum status pop(struct parser *parser, struct pickle_value **value)
{
    struct values *stack = &parser->stack;
    *value = NULL;
    if (stack->count == 0 || !stack->items[stack->count - 1])
        return status_set(STATUS_FAILED, "its pickle takes a value from an empty stack");
    *value = stack->items[--stack->count];
    return STATUS_OK;
}

/* Returns the position after the topmost mark. */
static enum status find_mark(struct parser *parser, size_t *first)
{
    struct values *stack = &parser->stack;
    for (*first = stack->count; *first > 0; --*first)
        if (!stack->items[*first - 1])
            return STATUS_OK;
    return status_set(STATUS_FAILED, "its pickle lacks a mark on the stack");
}

/* ---- Reading the opcodes' arguments ---- */

/* Returns the next `count` bytes, or NULL if fewer are left. */
static const uint8_t *take(struct parser *parser, size_t count)
{
    if ((size_t)(parser->end - parser->at) < count)
        return NULL;
    parser->at += count;
    return parser->at - count;
}

/* Takes an integer of `count` bytes, little-endian. */
static enum status take_number(struct parser *parser, size_t count, uint64_t *number)
{
    const uint8_t *bytes = take(parser, count);
    *number = 0;
    if (!bytes)
        return TRUNCATED;
    for (size_t i = count; i > 0; i--)
        *number = *number << 8 | bytes[i - 1];
    return STATUS_OK;
}

static enum status do_int(struct parser *parser, size_t count)
{
    uint64_t number;
    TRY(take_number(parser, count, &number));
    return push_number(parser, PICKLE_INT, count == 4 ? (int32_t)number : (int64_t)number);
}

/* LONG1: a length of one byte, then a signed integer. */
static enum status do_long(struct parser *parser, size_t unused)
{
    (void)unused;
    uint64_t count, number;
    TRY(take_number(parser, 1, &count));
    if (count > sizeof number)
        return take(parser, count) ? push_number(parser, PICKLE_NUMBER, 0) : TRUNCATED;
    TRY(take_number(parser, count, &number));
    unsigned shift = 64 - 8 * (unsigned)count;
    return push_number(parser, PICKLE_INT,
                       count == 0 ? 0 : (int64_t)(number << shift) / (INT64_C(1) << shift));
}

static enum status do_text(struct parser *parser, size_t unused)
{
    (void)unused;
    struct pickle_value *value;
    uint64_t length;
    TRY(take_number(parser, 4, &length));
    const uint8_t *bytes = take(parser, length);
    if (!bytes)
        return TRUNCATED;
    TRY(push_new(parser, PICKLE_TEXT, &value));
    value->text = (const char *)bytes;
    value->length = length;
    return STATUS_OK;
}

/* ---- Objects without tensors ----
 * Training scripts save their arguments, paths and devices beside the tensors. None of these objects is
 * created: a call of one becomes a value without contents, and what is stored in the object is dropped. So a
 * tensor inside such an object is not listed. */

static const struct {
    const char *module, *names; /* names between blanks */
} plain_objects[] = {
    {"argparse", " Namespace "},
    {"types", " SimpleNamespace "},
    {"pathlib", " Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath "},
    {"datetime", " date datetime time timedelta timezone "},
    {"collections", " OrderedDict defaultdict deque Counter "},
    {"torch", " device Size float16 bfloat16 float32 float64 uint8 int8 int16 int32 int64 bool "},
    {"torch.torch_version", " TorchVersion "},
    {"numpy", " dtype ndarray "},
    {"numpy.core.multiarray", " scalar _reconstruct "},
    {"numpy._core.multiarray", " scalar _reconstruct "},
    {"_codecs", " encode "},
    {"copy_reg", " _reconstructor "},
    {"copyreg", " _reconstructor "},
    {"__builtin__", " object dict list tuple set frozenset int long float complex str bool slice bytearray "},
    {"builtins", " object dict list tuple set frozenset int float complex str bool slice bytearray "},
};

/* Returns whether a global, "module\nname" with these lengths, is in the table. */
static bool is_plain(const char *text, size_t module, size_t name)
{
    for (size_t i = 0; i < COUNT_OF(plain_objects); i++) {
        const char *own = plain_objects[i].names;
        if (strlen(plain_objects[i].module) != module || memcmp(plain_objects[i].module, text, module) != 0)
            continue;
        for (; own[1]; own += 1 + strcspn(own + 1, " "))
            if (strcspn(own + 1, " ") == name && memcmp(own + 1, text + module + 1, name) == 0)
                return true;
    }
    return false;
}

/* ---- Opcodes ---- */

/* Returns the number of tensors in a dict: values that are calls. */
static size_t tensors_in(const struct pickle_value *value)
{
    size_t count = 0;
    for (size_t i = 1; value->kind == PICKLE_DICT && i < value->count; i += 2)
        count += value->items[i]->kind == PICKLE_CALL;
    return count;
}

/* Finds the key of the outermost dict whose value has most tensors among the entries that were read so far.
 * Some of them are still on the stack, after the dict and a mark. Returns NULL if no entry has tensors. */
static const struct pickle_value *find_parameters(const struct values *stack)
{
    const struct pickle_value *root = stack->count ? stack->items[0] : NULL, *found = NULL;
    size_t most = 0, inside = root && root->kind == PICKLE_DICT ? root->count : 0;
    size_t pending = inside + stack->count - (stack->count < 2 ? stack->count : 2);
    for (size_t i = 0; root && root->kind == PICKLE_DICT && i + 1 < pending; i += 2) {
        struct pickle_value *const *entry = i < inside ? root->items + i : stack->items + 2 + i - inside;
        if (!entry[0] || !entry[1]) /* a mark: a value that is not complete */
            break;
        if (entry[0]->kind != PICKLE_TEXT || tensors_in(entry[1]) <= most)
            continue;
        most = tensors_in(entry[1]);
        found = entry[0];
    }
    return found;
}

/* Formats how Python saves only the parameters of an object `x`, for a pickle that is refused at its current
 * position. A key is named only if the file has it. */
static void advise_saving(const struct parser *parser, char *text, size_t size)
{
    const struct pickle_value *key = find_parameters(&parser->stack);
    int length = key && key->length < 80 ? (int)key->length : 0;
    if (length && !memchr(key->text, '\'', key->length) && !memchr(key->text, '\\', key->length))
        snprintf(text, size, "torch.save(x['%.*s'], 'weights.pt')", length, key->text);
    else if (parser->stack.count == 1)
        snprintf(text, size, "torch.save(x.state_dict(), 'weights.pt')");
    else
        snprintf(text, size,
                 "torch.save(x[KEY], 'weights.pt') with the key of the parameters, one of x.keys(), "
                 "or x[KEY].state_dict() if this is a network");
}

/* GLOBAL: a module and a name, each ended by a line feed. In the value, `text` still has the line feed
 * between them. */
static enum status do_global(struct parser *parser, size_t unused)
{
    (void)unused;
    size_t left = (size_t)(parser->end - parser->at);
    const uint8_t *module_end = memchr(parser->at, '\n', left), *name_end = NULL;
    if (module_end)
        name_end = memchr(module_end + 1, '\n', (size_t)(parser->end - module_end - 1));
    if (!name_end)
        return TRUNCATED;
    struct pickle_value *value;
    TRY(push_new(parser, PICKLE_GLOBAL, &value));
    value->text = (const char *)parser->at;
    value->length = (size_t)(name_end - parser->at);
    parser->at = name_end + 1;
    int module = (int)(module_end - (const uint8_t *)value->text), name = (int)(name_end - module_end - 1);
    value->plain = is_plain(value->text, (size_t)module, (size_t)name);
    if (value->plain || parser->allowed(value->text, value->length))
        return STATUS_OK;
    char advice[256];
    advise_saving(parser, advice, sizeof advice);
    return status_set(STATUS_FAILED,
                      "it needs the Python object '%.*s.%.*s', which is refused: only tensors, dicts, lists, "
                      "tuples, numbers, strings and a few plain objects are read, and nothing is executed; "
                      "if you trust the file, save only its tensors with Python: x = torch.load('FILE', "
                      "map_location='cpu', weights_only=False), then %s",
                      module < 80 ? module : 80, value->text, name < 80 ? name : 80, module_end + 1, advice);
}

static enum status do_tuple(struct parser *parser, size_t first)
{
    struct values *stack = &parser->stack;
    struct pickle_value *tuple;
    size_t count = stack->count - first;
    TRY(push_new(parser, PICKLE_TUPLE, &tuple));
    for (size_t i = 0; i < count; i++) {
        if (!stack->items[first + i])
            return status_set(STATUS_FAILED, "its pickle has a mark inside a tuple");
        TRY(add_item(tuple, stack->items[first + i]));
    }
    stack->count = first;
    return push(parser, tuple);
}

static enum status do_small_tuple(struct parser *parser, size_t count)
{
    if (parser->stack.count < count)
        return status_set(STATUS_FAILED, "its pickle takes a value from an empty stack");
    return do_tuple(parser, parser->stack.count - count);
}

/* TUPLE, APPENDS and SETITEMS: take all values after the mark. */
static enum status do_marked(struct parser *parser, size_t kind)
{
    struct values *stack = &parser->stack;
    size_t first;
    TRY(find_mark(parser, &first));
    if (kind == PICKLE_TUPLE) {
        TRY(do_tuple(parser, first));
        stack->items[first - 1] = stack->items[first]; /* drops the mark */
        stack->count--;
        return STATUS_OK;
    }
    struct pickle_value *target = first > 1 ? stack->items[first - 2] : NULL;
    if (!target || (target->kind != kind && target->kind != PICKLE_OBJECT) ||
        (kind == PICKLE_DICT && (stack->count - first) % 2 != 0))
        return status_set(STATUS_FAILED, "its pickle adds items to a value that is not a %s",
                          kind == PICKLE_LIST ? "list" : "dict");
    for (size_t i = first; i < stack->count && target->kind == kind; i++)
        TRY(add_item(target, stack->items[i]));
    stack->count = first - 1;
    return STATUS_OK;
}

/* APPEND and SETITEM. */
static enum status do_item(struct parser *parser, size_t kind)
{
    struct pickle_value *value, *key = NULL, *target;
    TRY(pop(parser, &value));
    if (kind == PICKLE_DICT)
        TRY(pop(parser, &key));
    TRY(pop(parser, &target));
    if (target->kind == PICKLE_OBJECT)
        return push(parser, target);
    if (target->kind != kind)
        return status_set(STATUS_FAILED, "its pickle adds an item to a value that is not a %s",
                          kind == PICKLE_LIST ? "list" : "dict");
    if (key)
        TRY(add_item(target, key));
    TRY(add_item(target, value));
    return push(parser, target);
}

/* REDUCE and NEWOBJ: call a global. A call of OrderedDict without arguments, or of defaultdict, becomes an
 * empty dict. */
static enum status do_call(struct parser *parser, size_t unused)
{
    (void)unused;
    struct pickle_value *callee, *arguments, *value;
    TRY(pop(parser, &arguments));
    TRY(pop(parser, &callee));
    if (callee->kind != PICKLE_GLOBAL || arguments->kind != PICKLE_TUPLE)
        return status_set(STATUS_FAILED, "its pickle calls a value that is not a Python object");
    if (pickle_is(callee, DEFAULT_DICT)) /* its argument is the type of the values */
        return push_new(parser, PICKLE_DICT, &value);
    if (pickle_is(callee, ORDERED_DICT))
        return arguments->count == 0 ? push_new(parser, PICKLE_DICT, &value)
                                     : status_set(STATUS_FAILED, "its OrderedDict has arguments");
    parser->pickle->arrays += pickle_is(callee, NUMPY_ARRAY) || pickle_is(callee, NUMPY_2_ARRAY);
    if (callee->plain)
        return push_new(parser, PICKLE_OBJECT, &value);
    TRY(push_new(parser, PICKLE_CALL, &value));
    TRY(add_item(value, callee));
    return add_item(value, arguments);
}

/* BUILD: sets the attributes of an object. The OrderedDict of a module's state has the attribute _metadata,
 * which is not needed. */
static enum status do_build(struct parser *parser, size_t unused)
{
    (void)unused;
    struct pickle_value *attributes, *target;
    TRY(pop(parser, &attributes));
    TRY(pop(parser, &target));
    if (target->kind != PICKLE_OBJECT && (target->kind != PICKLE_DICT || attributes->kind != PICKLE_DICT))
        return status_set(STATUS_FAILED, "its pickle sets attributes (BUILD) of a value that is not a dict");
    return push(parser, target);
}

static enum status do_persistent(struct parser *parser, size_t unused)
{
    (void)unused;
    struct pickle_value *key, *value;
    TRY(pop(parser, &key));
    TRY(push_new(parser, PICKLE_PERSISTENT, &value));
    return add_item(value, key);
}

static enum status do_get(struct parser *parser, size_t bytes)
{
    uint64_t index;
    TRY(take_number(parser, bytes, &index));
    if (index >= parser->memo.count || !parser->memo.items[index])
        return status_set(STATUS_FAILED, "its pickle uses a memo entry that is not set");
    return push(parser, parser->memo.items[index]);
}

static enum status do_put(struct parser *parser, size_t bytes)
{
    struct values *stack = &parser->stack, *memo = &parser->memo;
    uint64_t index;
    TRY(take_number(parser, bytes, &index));
    if (stack->count == 0 || !stack->items[stack->count - 1])
        return status_set(STATUS_FAILED, "its pickle stores a value from an empty stack");
    if (index >= (size_t)(parser->end - parser->bytes)) /* indexes start at 0; each entry takes an opcode */
        return status_set(STATUS_FAILED, "its pickle has a memo entry that is too large");
    while (memo->count <= index)
        TRY(push_item(&memo->items, &memo->count, NULL));
    memo->items[index] = stack->items[stack->count - 1];
    return STATUS_OK;
}

static enum status do_mark(struct parser *parser, size_t unused)
{
    (void)unused;
    return push(parser, NULL);
}

static enum status do_new(struct parser *parser, size_t kind)
{
    struct pickle_value *value;
    return push_new(parser, (enum pickle_kind)kind, &value);
}

static enum status do_bool(struct parser *parser, size_t value)
{
    return push_number(parser, PICKLE_BOOL, (int64_t)value);
}

static enum status do_float(struct parser *parser, size_t bytes)
{
    return take(parser, bytes) ? push_number(parser, PICKLE_NUMBER, 0) : TRUNCATED;
}

static enum status do_stop(struct parser *parser, size_t unused)
{
    (void)unused;
    parser->stopped = true;
    return pop(parser, &parser->pickle->root);
}

/* All opcodes that Python's pickletools lists. Opcodes without a function are refused. */
static const struct opcode {
    uint8_t code;
    const char *name;
    enum status (*execute)(struct parser *parser, size_t argument);
    size_t argument;
} opcodes[] = {
    {'(', "MARK", do_mark, 0},
    {'.', "STOP", do_stop, 0},
    {'N', "NONE", do_new, PICKLE_NONE},
    {')', "EMPTY_TUPLE", do_new, PICKLE_TUPLE},
    {']', "EMPTY_LIST", do_new, PICKLE_LIST},
    {'}', "EMPTY_DICT", do_new, PICKLE_DICT},
    {0x88, "NEWTRUE", do_bool, true},
    {0x89, "NEWFALSE", do_bool, false},
    {'K', "BININT1", do_int, 1},
    {'M', "BININT2", do_int, 2},
    {'J', "BININT", do_int, 4},
    {0x8A, "LONG1", do_long, 0},
    {'G', "BINFLOAT", do_float, 8},
    {'X', "BINUNICODE", do_text, 0},
    {'c', "GLOBAL", do_global, 0},
    {0x85, "TUPLE1", do_small_tuple, 1},
    {0x86, "TUPLE2", do_small_tuple, 2},
    {0x87, "TUPLE3", do_small_tuple, 3},
    {'t', "TUPLE", do_marked, PICKLE_TUPLE},
    {'e', "APPENDS", do_marked, PICKLE_LIST},
    {'u', "SETITEMS", do_marked, PICKLE_DICT},
    {'a', "APPEND", do_item, PICKLE_LIST},
    {'s', "SETITEM", do_item, PICKLE_DICT},
    {'R', "REDUCE", do_call, 0},
    {0x81, "NEWOBJ", do_call, 0},
    {'b', "BUILD", do_build, 0},
    {'Q', "BINPERSID", do_persistent, 0},
    {'h', "BINGET", do_get, 1},
    {'j', "LONG_BINGET", do_get, 4},
    {'q', "BINPUT", do_put, 1},
    {'r', "LONG_BINPUT", do_put, 4},
    {'0', "POP", NULL, 0},
    {'1', "POP_MARK", NULL, 0},
    {'2', "DUP", NULL, 0},
    {'B', "BINBYTES", NULL, 0},
    {'C', "SHORT_BINBYTES", NULL, 0},
    {'F', "FLOAT", NULL, 0},
    {'I', "INT", NULL, 0},
    {'L', "LONG", NULL, 0},
    {'P', "PERSID", NULL, 0},
    {'S', "STRING", NULL, 0},
    {'T', "BINSTRING", NULL, 0},
    {'U', "SHORT_BINSTRING", NULL, 0},
    {'V', "UNICODE", NULL, 0},
    {'d', "DICT", NULL, 0},
    {'g', "GET", NULL, 0},
    {'i', "INST", NULL, 0},
    {'l', "LIST", NULL, 0},
    {'o', "OBJ", NULL, 0},
    {'p', "PUT", NULL, 0},
    {0x80, "PROTO", NULL, 0},
    {0x82, "EXT1", NULL, 0},
    {0x83, "EXT2", NULL, 0},
    {0x84, "EXT4", NULL, 0},
    {0x8B, "LONG4", NULL, 0},
    {0x8C, "SHORT_BINUNICODE", NULL, 0},
    {0x8D, "BINUNICODE8", NULL, 0},
    {0x8E, "BINBYTES8", NULL, 0},
    {0x8F, "EMPTY_SET", NULL, 0},
    {0x90, "ADDITEMS", NULL, 0},
    {0x91, "FROZENSET", NULL, 0},
    {0x92, "NEWOBJ_EX", NULL, 0},
    {0x93, "STACK_GLOBAL", NULL, 0},
    {0x94, "MEMOIZE", NULL, 0},
    {0x95, "FRAME", NULL, 0},
    {0x96, "BYTEARRAY8", NULL, 0},
    {0x97, "NEXT_BUFFER", NULL, 0},
    {0x98, "READONLY_BUFFER", NULL, 0},
};

static enum status step(struct parser *parser, uint8_t code)
{
    size_t i = 0;
    while (i < COUNT_OF(opcodes) && opcodes[i].code != code)
        i++;
    if (i == COUNT_OF(opcodes))
        return status_set(STATUS_FAILED, "its pickle has the unknown opcode 0x%02x", code);
    if (!opcodes[i].execute)
        return status_set(STATUS_FAILED,
                          "its pickle has the opcode %s, which is refused: only tensors, dicts, lists, "
                          "tuples, numbers and strings are read",
                          opcodes[i].name);
    return opcodes[i].execute(parser, opcodes[i].argument);
}

static enum status parse(struct parser *parser)
{
    const uint8_t *head = take(parser, 2);
    if (!head)
        return TRUNCATED;
    if (head[0] != 0x80)
        return status_set(STATUS_FAILED, "its pickle does not begin with a protocol of 2 or more");
    if (head[1] != 2)
        return status_set(STATUS_FAILED,
                          "its pickle has protocol %u; only 2 is read, the default of torch.save()", head[1]);
    while (!parser->stopped) {
        const uint8_t *code = take(parser, 1);
        if (!code)
            return TRUNCATED;
        TRY(status_prefix(step(parser, *code), "offset %zu of its pickle", (size_t)(code - parser->bytes)));
    }
    return parser->stack.count == 0 ? STATUS_OK
                                    : status_set(STATUS_FAILED, "its pickle has values after its end");
}

/* Parses a pickle. The values point into `bytes`. `allowed` returns whether a global, such as
 * "torch FloatStorage", may occur. Every other global, and every opcode that is not needed for plain values,
 * is refused by name. Shared values may occur more than once in the tree, and lists and dicts may contain
 * themselves. `*used` becomes the number of bytes of the pickle; NULL: it has all bytes. The caller frees
 * `pickle`, even after a failure. STATUS_FAILED with the reason. */
static enum status pickle_parse(const uint8_t *bytes, size_t size,
                                bool (*allowed)(const char *text, size_t length), size_t *used,
                                struct pickle *pickle)
{
    struct parser parser = {
        .bytes = bytes, .at = bytes, .end = bytes + size, .allowed = allowed, .pickle = pickle};
    *pickle = (struct pickle){0};
    enum status status = parse(&parser);
    if (used)
        *used = (size_t)(parser.at - bytes);
    else if (status == STATUS_OK && parser.at != parser.end)
        status = status_set(STATUS_FAILED, "its pickle has bytes after its end");
    free(parser.stack.items);
    free(parser.memo.items);
    return status;
}

static void pickle_free(struct pickle *pickle)
{
    while (pickle->blocks) {
        struct pickle_block *next = pickle->blocks->next;
        for (size_t i = 0; i < BLOCK_VALUES; i++)
            free(pickle->blocks->values[i].items);
        free(pickle->blocks);
        pickle->blocks = next;
    }
    pickle->root = NULL;
}

/* ---- Tensors of a file ---- */

#define PICKLE_BYTES_MAX (UINT64_C(256) << 20)
#define DEPTH_MAX        32      /* nested dicts, lists and tuples */
#define VISITS_MAX       4000000 /* values visited in the search for tensors; a value counts at each visit */
#define VISITS_PER_BYTE  4       /* maximum number of visits per byte of the pickle; more are repetitions */
#define BYTES_PER_TENSOR 16   /* minimum number of bytes of the pickle per tensor; the first takes over 100 */
#define REPEATS_MIN      1000 /* visits and tensors that every pickle may have in addition */
#define NAME_MAX_BYTES   1024
#define REBUILD          "torch._utils _rebuild_tensor_v2"
#define REBUILD_OUTER    "torch._utils _rebuild_parameter" /* arguments: a tensor, requires_grad, hooks */

/* ---- Types ---- */

static const struct storage_type {
    const char *global, *name;
    uint32_t bytes;
    bool real;
    enum tensor_code code;
    enum dtype dtype;
} storage_types[] = {
    {"torch FloatStorage", "float32", 4, true, TENSOR_PLAIN, DTYPE_F32},
    {"torch HalfStorage", "float16", 2, true, TENSOR_PLAIN, DTYPE_F16},
    {"torch BFloat16Storage", "bfloat16", 2, true, TENSOR_PLAIN, DTYPE_BF16},
    {"torch DoubleStorage", "float64", 8, true, TENSOR_F64, 0},
    {"torch LongStorage", "int64", 8, false, TENSOR_OTHER, 0},
    {"torch IntStorage", "int32", 4, false, TENSOR_OTHER, 0},
    {"torch ShortStorage", "int16", 2, false, TENSOR_OTHER, 0},
    {"torch CharStorage", "int8", 1, false, TENSOR_OTHER, 0},
    {"torch ByteStorage", "uint8", 1, false, TENSOR_OTHER, 0},
    {"torch BoolStorage", "bool", 1, false, TENSOR_OTHER, 0},
};

static const struct storage_type *find_type(const struct pickle_value *value)
{
    for (size_t i = 0; i < COUNT_OF(storage_types); i++)
        if (value->kind == PICKLE_GLOBAL && pickle_is(value, storage_types[i].global))
            return &storage_types[i];
    return NULL;
}

static bool allowed(const char *text, size_t length)
{
    const struct pickle_value value = {.kind = PICKLE_GLOBAL, .text = text, .length = length};
    return pickle_is(&value, REBUILD) || pickle_is(&value, REBUILD_OUTER) || find_type(&value);
}

/* ---- One tensor ---- */

struct search {
    const struct zip *zip;
    const char *prefix;
    struct tensor_file *file;
    uint64_t visits, visits_max; /* values seen, and their limit */
    size_t tensors_max;
    char name[NAME_MAX_BYTES]; /* of the current value */
};

static bool is_count(const struct pickle_value *value)
{
    return value->kind == PICKLE_INT && value->number >= 0;
}

/* Returns whether a value is a persistent id ('storage', type, key, device, values), where `values` is a
 * count. In the older format, it also has the description of a part of a storage, which must be None. */
static bool is_storage(const struct pickle_value *value, const struct storage_type **type)
{
    const struct pickle_value *id = value->kind == PICKLE_PERSISTENT ? value->items[0] : value;
    return value->kind == PICKLE_PERSISTENT && id->kind == PICKLE_TUPLE &&
           (id->count == 5 || (id->count == 6 && id->items[5]->kind == PICKLE_NONE)) &&
           pickle_is(id->items[0], "storage") && (*type = find_type(id->items[1])) &&
           id->items[2]->kind == PICKLE_TEXT && is_count(id->items[4]);
}

/* Finds the archive member that holds the values of a tensor. Checks that the member
 * named by the key has the size of this many values. */
static enum status find_storage(const struct search *search, const struct pickle_value *value,
                                const struct storage_type **type, const struct zip_member **member,
                                uint64_t *values)
{
    char name[NAME_MAX_BYTES];
    if (!is_storage(value, type))
        return status_set(STATUS_FAILED, "its storage is not described in the format of torch.save()");
    const struct pickle_value *id = value->items[0];
    *values = (uint64_t)id->items[4]->number;
    snprintf(name, sizeof name, "%.500sdata/%.*s", search->prefix,
             id->items[2]->length < 100 ? (int)id->items[2]->length : 100, id->items[2]->text);
    *member = zip_find(search->zip, name);
    if (!*member)
        return status_set(STATUS_FAILED, "the archive has no member '%.200s' with its values", name);
    if (*values > UINT64_MAX / (*type)->bytes || *values * (*type)->bytes != (*member)->bytes)
        return status_set(STATUS_FAILED,
                          "its storage has %" PRIu64 " values of %s, but the member '%.200s' has %" PRIu64
                          " bytes",
                          *values, (*type)->name, name, (*member)->bytes);
    return STATUS_OK;
}

/* Reads shape and strides. Sets tensor->fault if the tensor is not contiguous in C order. */
static enum status read_shape(const struct pickle_value *shape, const struct pickle_value *strides,
                              struct tensor *tensor)
{
    bool valid =
        shape->kind == PICKLE_TUPLE && strides->kind == PICKLE_TUPLE && shape->count == strides->count;
    for (size_t i = 0; valid && i < shape->count; i++)
        valid = is_count(shape->items[i]) && strides->items[i]->kind == PICKLE_INT;
    if (!valid)
        return status_set(STATUS_FAILED, "its shape and strides are not tuples of equal length");
    tensor->axes = (uint32_t)shape->count;
    if (shape->count > TENSOR_AXES_MAX) {
        tensor->fault = "it has more than 8 axes";
        return STATUS_OK;
    }
    uint64_t expected = 1;
    bool contiguous = true, overflow = false;
    for (size_t i = shape->count; i > 0; i--) {
        uint64_t length = tensor->shape[i - 1] = (uint64_t)shape->items[i - 1]->number;
        contiguous &= length == 1 || (uint64_t)strides->items[i - 1]->number == expected;
        overflow |= length != 0 && expected > UINT64_MAX / length;
        expected *= length;
    }
    if (!contiguous && expected != 0 && !overflow)
        tensor->fault = "it is not contiguous in memory: save tensor.contiguous() instead";
    return STATUS_OK;
}

/* Sets the position of the values, which must be inside the storage. */
static enum status place(struct tensor *tensor, const struct pickle_value *first,
                         const struct storage_type *type, const struct zip_member *member, uint64_t stored)
{
    uint64_t values;
    if (!is_count(first))
        return status_set(STATUS_FAILED, "its offset in the storage is not a count");
    uint64_t begin = (uint64_t)first->number;
    if (!tensor_values(tensor->shape, tensor->axes, &values) || begin > stored || values > stored - begin)
        return status_set(STATUS_FAILED,
                          "its values, starting at number %" PRIu64 ", reach beyond its storage of %" PRIu64
                          " values",
                          begin, stored);
    tensor->offset = member->offset + begin * type->bytes;
    tensor->bytes = values * type->bytes;
    return STATUS_OK;
}

/* Reads the arguments of _rebuild_tensor_v2: storage, offset in it, shape, strides, requires_grad, hooks, and
 * sometimes metadata, which must be empty. */
static enum status read_tensor(const struct search *search, const struct pickle_value *arguments,
                               struct tensor *tensor)
{
    const struct storage_type *type = NULL;
    const struct zip_member *member = NULL;
    uint64_t stored = 0;
    if (arguments->count < 6 || arguments->count > 7)
        return status_set(STATUS_FAILED, "it is not described in the format of torch.save()");
    struct pickle_value *const *items = arguments->items;
    TRY(find_storage(search, items[0], &type, &member, &stored));
    TRY(read_shape(items[2], items[3], tensor));
    if (items[4]->kind != PICKLE_BOOL || items[5]->kind != PICKLE_DICT || items[5]->count > 0 ||
        (arguments->count == 7 && (items[6]->kind != PICKLE_DICT || items[6]->count > 0)))
        tensor->fault = "it has hooks or metadata, such as a lazy conjugate: save tensor.detach().clone()";
    snprintf(tensor->type, sizeof tensor->type, "%s", type->name);
    tensor->real = type->real;
    tensor->code = type->code;
    tensor->dtype = type->dtype;
    return tensor->fault ? STATUS_OK : place(tensor, items[1], type, member, stored);
}

/* ---- The search for tensors ---- */

/* State of a list, tuple, dict or call that was visited before: the `mark` of struct pickle_value. */
enum mark { MARK_NEW, MARK_CHECKED, MARK_NO_TENSORS };

static enum status visit(struct search *search, struct pickle_value *value, unsigned depth);

static enum status refuse_repetition(void)
{
    return status_set(STATUS_FAILED,
                      "its values refer to each other so often that a file of this size describes too many: "
                      "save only its tensors with torch.save(), each under one name");
}

static enum status add_tensor(struct search *search, struct pickle_value *call)
{
    struct tensor tensor = {.name = NULL};
    const struct pickle_value *arguments = call->items[1];
    call->mark = MARK_CHECKED;
    if (pickle_is(call->items[0], REBUILD_OUTER)) {
        if (arguments->count != 3 || arguments->items[0]->kind != PICKLE_CALL ||
            arguments->items[2]->kind != PICKLE_DICT || arguments->items[2]->count > 0)
            return status_set(STATUS_FAILED, "a parameter is not described in the format of torch.save()");
        call = arguments->items[0];
        call->mark = MARK_CHECKED;
    }
    if (!pickle_is(call->items[0], REBUILD))
        return status_set(STATUS_FAILED, "its pickle calls a type of storage");
    if (search->file->count == search->tensors_max)
        return refuse_repetition();
    enum status status = read_tensor(search, call->items[1], &tensor);
    if (status != STATUS_OK)
        return *search->name ? status_prefix(status, "tensor '%.200s'", search->name) : status;
    tensor.name = strdup(search->name);
    return tensor_file_add(search->file, &tensor);
}

/* Visits an item of a container. Its name is the name of the container, a dot and `key`. */
static enum status visit_item(struct search *search, const char *key, size_t length,
                              struct pickle_value *item, unsigned depth)
{
    size_t used = strlen(search->name);
    if (used + length + 2 > sizeof search->name)
        return status_set(STATUS_FAILED, "the keys of a tensor have more than %d bytes together",
                          NAME_MAX_BYTES - 2);
    snprintf(search->name + used, sizeof search->name - used, "%s%.*s", used ? "." : "", (int)length, key);
    TRY(visit(search, item, depth));
    search->name[used] = '\0';
    return STATUS_OK;
}

static int compare_texts(const void *a, const void *b)
{
    const struct pickle_value *one = *(struct pickle_value *const *)a,
                              *two = *(struct pickle_value *const *)b;
    size_t least = one->length < two->length ? one->length : two->length;
    int order = memcmp(one->text, two->text, least);
    return order ? order : one->length < two->length ? -1 : one->length > two->length;
}

/* Refuses a dict that has the same text as a key twice. Python cannot write such a dict. */
static enum status check_keys(const struct pickle_value *dict)
{
    FREED const struct pickle_value **keys = malloc((dict->count / 2 + 1) * sizeof(struct pickle_value *));
    size_t count = 0;
    TRY(PICKLE_ALLOCATED(keys));
    for (size_t i = 0; i < dict->count; i += 2)
        if (dict->items[i]->kind == PICKLE_TEXT)
            keys[count++] = dict->items[i];
    qsort(keys, count, sizeof(struct pickle_value *), compare_texts);
    for (size_t i = 1; i < count; i++)
        if (compare_texts(&keys[i - 1], &keys[i]) == 0)
            return status_set(STATUS_FAILED, "a dict has the key '%.*s' twice",
                              keys[i]->length < 80 ? (int)keys[i]->length : 80, keys[i]->text);
    return STATUS_OK;
}

static enum status visit_dict(struct search *search, struct pickle_value *dict, unsigned depth)
{
    if (dict->mark == MARK_NEW)
        TRY(check_keys(dict));
    dict->mark = MARK_CHECKED;
    for (size_t i = 0; i < dict->count; i += 2) {
        const struct pickle_value *key = dict->items[i];
        char number[32];
        int digits = snprintf(number, sizeof number, "%" PRId64, key->number);
        if (key->kind == PICKLE_TEXT)
            TRY(visit_item(search, key->text, key->length, dict->items[i + 1], depth));
        else if (key->kind == PICKLE_INT)
            TRY(visit_item(search, number, (size_t)digits, dict->items[i + 1], depth));
        else
            return status_set(STATUS_FAILED, "a dict has a key that is neither a string nor an integer");
    }
    return STATUS_OK;
}

static enum status visit_list(struct search *search, const struct pickle_value *list, unsigned depth)
{
    for (size_t i = 0; i < list->count; i++) {
        char number[32];
        int digits = snprintf(number, sizeof number, "%zu", i);
        TRY(visit_item(search, number, (size_t)digits, list->items[i], depth));
    }
    return STATUS_OK;
}

/* Lists the tensors in a value. The pickle may refer to a value many times, and its tensors have another name
 * each time. A value without tensors is searched only once. */
static enum status visit(struct search *search, struct pickle_value *value, unsigned depth)
{
    size_t before = search->file->count;
    if (depth > DEPTH_MAX)
        return status_set(STATUS_FAILED, "its dicts and lists are nested more than %d deep", DEPTH_MAX);
    if (++search->visits > VISITS_MAX)
        return status_set(STATUS_FAILED, "it has more than %d values", VISITS_MAX);
    if (search->visits > search->visits_max)
        return refuse_repetition();
    if (value->kind == PICKLE_CALL)
        return add_tensor(search, value);
    if (value->mark == MARK_NO_TENSORS)
        return STATUS_OK;
    if (value->kind == PICKLE_DICT)
        TRY(visit_dict(search, value, depth + 1));
    if (value->kind == PICKLE_LIST || value->kind == PICKLE_TUPLE)
        TRY(visit_list(search, value, depth + 1));
    if (search->file->count == before)
        value->mark = MARK_NO_TENSORS;
    return STATUS_OK;
}

/* Returns the number of tensors and arrays that were not listed, because they are in objects that are not
 * read. */
static uint64_t count_skipped(const struct pickle *pickle)
{
    uint64_t count = pickle->arrays;
    for (const struct pickle_block *block = pickle->blocks; block; block = block->next)
        for (size_t i = 0; i < BLOCK_VALUES; i++) {
            const struct pickle_value *value = &block->values[i];
            count +=
                value->kind == PICKLE_CALL && value->mark == MARK_NEW && pickle_is(value->items[0], REBUILD);
        }
    return count;
}

static enum status list_tensors(struct pickle *pickle, size_t size, const struct zip *zip, const char *prefix,
                                struct tensor_file *file)
{
    struct search search = {.zip = zip,
                            .prefix = prefix,
                            .file = file,
                            .visits_max = REPEATS_MIN + VISITS_PER_BYTE * (uint64_t)size,
                            .tensors_max = REPEATS_MIN + size / BYTES_PER_TENSOR};
    TRY(visit(&search, pickle->root, 0));
    file->skipped = count_skipped(pickle);
    return STATUS_OK;
}

enum status torch_list_pickle(const uint8_t *bytes, size_t size, const struct zip *zip, const char *prefix,
                              struct tensor_file *file)
{
    CLOSED_BY(pickle_free) struct pickle pickle;
    TRY(pickle_parse(bytes, size, allowed, NULL, &pickle));
    return list_tensors(&pickle, size, zip, prefix, file);
}

/* ---- The archive ---- */

/* Finds the folder of the archive, the one with data.pkl. */
static enum status find_prefix(const struct zip *zip, char prefix[NAME_MAX_BYTES])
{
    const char *found = NULL;
    for (size_t i = 0; i < zip->count; i++) {
        const char *slash = strchr(zip->members[i].name, '/');
        if (!slash || strcmp(slash, "/data.pkl") != 0)
            continue;
        if (found)
            return status_set(STATUS_FAILED, "it has more than one data.pkl");
        found = zip->members[i].name;
    }
    if (!found || strlen(found) > 500)
        return status_set(STATUS_FAILED, "not a file of torch.save(): the archive has no FOLDER/data.pkl");
    snprintf(prefix, NAME_MAX_BYTES, "%.*s", (int)(strlen(found) - strlen("data.pkl")), found);
    return STATUS_OK;
}

static enum status check_order(const struct tensor_file *file, const struct zip *zip, const char *prefix)
{
    char name[NAME_MAX_BYTES + 16], order[6] = "";
    snprintf(name, sizeof name, "%sbyteorder", prefix);
    const struct zip_member *member = zip_find(zip, name);
    if (!member) /* PyTorch before 2.1 writes none */
        return STATUS_OK;
    if (member->bytes == sizeof order)
        TRY(tensor_file_read(file, member->offset, order, sizeof order));
    return memcmp(order, "little", sizeof order) == 0
               ? STATUS_OK
               : status_set(STATUS_FAILED, "its values are big-endian: load it with torch.load() and save it "
                                           "again on a little-endian machine");
}

static enum status list_archive(struct tensor_file *file, const struct zip *zip)
{
    char prefix[NAME_MAX_BYTES], name[NAME_MAX_BYTES + 16];
    TRY(find_prefix(zip, prefix));
    TRY(check_order(file, zip, prefix));
    snprintf(name, sizeof name, "%sdata.pkl", prefix);
    const struct zip_member *member = zip_find(zip, name);
    if (member->bytes > PICKLE_BYTES_MAX)
        return status_set(STATUS_FAILED, "its pickle has %" PRIu64 " bytes; at most %" PRIu64 " are allowed",
                          member->bytes, PICKLE_BYTES_MAX);
    FREED uint8_t *bytes = malloc(member->bytes + 1);
    TRY(PICKLE_ALLOCATED(bytes));
    TRY(tensor_file_read(file, member->offset, bytes, member->bytes));
    return torch_list_pickle(bytes, member->bytes, zip, prefix, file);
}

/* ---- The format before version 1.6, and of torch.save(_use_new_zipfile_serialization=False) ----
 * Five pickles: a magic number, the version of the format, a dict about the machine, the object, and the list
 * of the storages' keys. Then the storages follow in the order of this list. Each one begins with its number
 * of values, in 8 bytes. */

#define LEGACY_MAGIC   "\x80\x02\x8A\x0A\x6C\xFC\x9C\x46\xF9\x20\x6A\xA8\x50\x19."
#define LEGACY_VERSION 1001
#define LEGACY_WINDOW  65536 /* bytes in which the pickles are first looked for */

static bool is_legacy(const struct tensor_file *file)
{
    uint8_t start[sizeof LEGACY_MAGIC - 1];
    return file->bytes > sizeof start && tensor_file_read(file, 0, start, sizeof start) == STATUS_OK &&
           memcmp(start, LEGACY_MAGIC, sizeof start) == 0;
}

static bool no_global(const char *text, size_t length)
{
    (void)text, (void)length;
    return false;
}

/* The pickles of a file in this format, from the version on. */
struct legacy {
    struct pickle version, machine, object, keys;
    size_t object_bytes;
    uint64_t end; /* offset of the first storage */
};

static void legacy_free(struct legacy *legacy)
{
    pickle_free(&legacy->version);
    pickle_free(&legacy->machine);
    pickle_free(&legacy->object);
    pickle_free(&legacy->keys);
}

/* Parses the pickles in the first `size` bytes of the file. */
static enum status read_pickles(const uint8_t *bytes, size_t size, struct legacy *legacy)
{
    struct pickle *const pickles[] = {&legacy->version, &legacy->machine, &legacy->object, &legacy->keys};
    size_t at = sizeof LEGACY_MAGIC - 1, used;
    for (size_t i = 0; i < COUNT_OF(pickles); i++, at += used) {
        TRY(pickle_parse(bytes + at, size - at, pickles[i] == &legacy->object ? allowed : no_global, &used,
                         pickles[i]));
        if (pickles[i] == &legacy->object)
            legacy->object_bytes = used;
    }
    legacy->end = at;
    return STATUS_OK;
}

static enum status check_machine(const struct legacy *legacy)
{
    const struct pickle_value *version = legacy->version.root, *machine = legacy->machine.root;
    bool little = false;
    if (version->kind != PICKLE_INT || version->number != LEGACY_VERSION)
        return status_set(STATUS_FAILED, "its format before PyTorch 1.6 does not have the version %d",
                          LEGACY_VERSION);
    for (size_t i = 0; machine->kind == PICKLE_DICT && i < machine->count; i += 2)
        little |= pickle_is(machine->items[i], "little_endian") &&
                  machine->items[i + 1]->kind == PICKLE_BOOL && machine->items[i + 1]->number;
    return little ? STATUS_OK
                  : status_set(STATUS_FAILED, "it does not say that its values are little-endian: load it "
                                              "with torch.load() and save it again on such a machine");
}

static int compare_members(const void *a, const void *b)
{
    return strcmp(((const struct zip_member *)a)->name, ((const struct zip_member *)b)->name);
}

/* Lists the storages to which the pickle refers, sorted by key. A storage that occurs several times must have
 * the same size. The names point into `names`. */
static enum status list_storages(const struct pickle *pickle, struct zip *zip)
{
    for (const struct pickle_block *block = pickle->blocks; block; block = block->next)
        for (size_t i = 0; i < BLOCK_VALUES; i++) {
            const struct storage_type *type;
            const struct pickle_value *value = &block->values[i];
            if (!is_storage(value, &type))
                continue;
            const struct pickle_value *key = value->items[0]->items[2];
            const uint64_t values = (uint64_t)value->items[0]->items[4]->number;
            char *name = NULL;
            TRY(PICKLE_ALLOCATED(
                array_grow(&zip->members, zip->count, sizeof *zip->members) &&
                asprintf(&name, "data/%.*s", key->length < 100 ? (int)key->length : 100, key->text) >= 0));
            zip->members[zip->count++] =
                (struct zip_member){.name = name, .stored = values, .method = type->bytes};
        }
    if (zip->count)
        qsort(zip->members, zip->count, sizeof *zip->members, compare_members);
    size_t kept = 0;
    for (size_t i = 0; i < zip->count; i++) {
        const struct zip_member *last = kept ? &zip->members[kept - 1] : NULL;
        struct zip_member *own = &zip->members[i];
        const bool same = last && strcmp(last->name, own->name) == 0;
        if (same && (last->stored != own->stored || last->method != own->method))
            return status_set(STATUS_FAILED, "its storage '%.100s' has two sizes", own->name);
        if (same)
            free((char *)(uintptr_t)own->name); /* const cast: owned by this list */
        else
            zip->members[kept++] = *own;
        if (same || kept - 1 < i)
            own->name = NULL; /* freed or moved */
    }
    zip->count = kept;
    return STATUS_OK;
}

/* Finds the bytes of each storage. */
static enum status place_storages(const struct tensor_file *file, const struct legacy *legacy,
                                  struct zip *zip)
{
    const struct pickle_value *keys = legacy->keys.root;
    uint64_t at = legacy->end, values;
    if (keys->kind != PICKLE_LIST || keys->count != zip->count)
        return status_set(STATUS_FAILED, "its list of storages does not have those of its tensors");
    for (size_t i = 0; i < keys->count; i++, at += values) {
        char name[NAME_MAX_BYTES];
        const struct pickle_value *key = keys->items[i];
        snprintf(name, sizeof name, "data/%.*s", key->length < 100 ? (int)key->length : 100,
                 key->kind == PICKLE_TEXT ? key->text : "");
        struct zip_member *member =
            (struct zip_member *)(uintptr_t)zip_find(zip, name); /* const cast: owned */
        if (!member || member->offset)
            return status_set(STATUS_FAILED, "its list of storages does not have those of its tensors");
        if (at > file->bytes - sizeof values)
            return status_set(STATUS_FAILED, "it is truncated before the storage '%.100s'", name);
        TRY(tensor_file_read(file, at, &values, sizeof values));
        at += sizeof values;
        if (values != member->stored || values > (file->bytes - at) / member->method)
            return status_set(STATUS_FAILED,
                              "its storage '%.100s' should have %" PRIu64 " values, but has %" PRIu64
                              ", or the file is truncated",
                              name, member->stored, values);
        values *= member->method;
        *member = (struct zip_member){.name = member->name, .offset = at, .stored = values, .bytes = values};
    }
    return at == file->bytes ? STATUS_OK
                             : status_set(STATUS_FAILED, "it has %" PRIu64 " bytes after its last storage",
                                          file->bytes - at);
}

static void storages_free(struct zip *zip)
{
    for (size_t i = 0; i < zip->count; i++)
        free((char *)(uintptr_t)zip->members[i].name); /* const cast: owned by this list */
    free(zip->members);
}

static enum status list_legacy(struct tensor_file *file)
{
    const uint64_t most = file->bytes < PICKLE_BYTES_MAX ? file->bytes : PICKLE_BYTES_MAX;
    CLOSED_BY(legacy_free) struct legacy legacy = {.end = 0};
    CLOSED_BY(storages_free) struct zip zip = {.members = NULL};
    FREED uint8_t *bytes = malloc(most);
    TRY(PICKLE_ALLOCATED(bytes));
    enum status status = STATUS_FAILED;
    /* The sizes of the pickles are not known: read more until they are complete. */
    for (uint64_t size = LEGACY_WINDOW; status == STATUS_FAILED; size *= 4) {
        size = size < most ? size : most;
        legacy_free(&legacy);
        legacy = (struct legacy){.end = 0};
        TRY(tensor_file_read(file, 0, bytes, size));
        status = read_pickles(bytes, size, &legacy);
        if (size == most)
            break;
    }
    TRY(status);
    TRY(check_machine(&legacy));
    TRY(list_storages(&legacy.object, &zip));
    TRY(place_storages(file, &legacy, &zip));
    return list_tensors(&legacy.object, legacy.object_bytes, &zip, "", file);
}

enum status torch_list(struct tensor_file *file)
{
    if (is_legacy(file))
        return list_legacy(file);
    CLOSED_BY(zip_free) struct zip zip;
    TRY(zip_list(file, false, &zip));
    return list_archive(file, &zip);
}
