#include "data/pickle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/portable.h"

#define VALUES_MAX    8000000 /* maximum number of values per pickle: 450 MB, without the lists of items */
#define BLOCK_VALUES  1000
#define ORDERED_DICT  "collections OrderedDict"
#define OUT_OF_MEMORY status_set(STATUS_EXHAUSTED, "out of memory for its pickle")
#define TRUNCATED     status_set(STATUS_FAILED, "its pickle is truncated")

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

static enum status push_item(struct pickle_value ***items, size_t *count, struct pickle_value *value)
{
    if (!array_grow(items, *count, sizeof **items))
        return OUT_OF_MEMORY;
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
        if (!block)
            return OUT_OF_MEMORY;
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
    if (pickle_is(value, ORDERED_DICT) || parser->allowed(value->text, value->length))
        return STATUS_OK;
    int module = (int)(module_end - (const uint8_t *)value->text), name = (int)(name_end - module_end - 1);
    char advice[256];
    advise_saving(parser, advice, sizeof advice);
    return status_set(
        STATUS_FAILED,
        "it needs the Python object '%.*s.%.*s', which is refused: only tensors, dicts, lists, "
        "tuples, numbers and strings are read, and nothing is executed; if you trust the file, save only its "
        "tensors with Python: x = torch.load('FILE', map_location='cpu', weights_only=False), then %s",
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
    if (!target || target->kind != kind || (kind == PICKLE_DICT && (stack->count - first) % 2 != 0))
        return status_set(STATUS_FAILED, "its pickle adds items to a value that is not a %s",
                          kind == PICKLE_LIST ? "list" : "dict");
    for (size_t i = first; i < stack->count; i++)
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
    if (target->kind != kind)
        return status_set(STATUS_FAILED, "its pickle adds an item to a value that is not a %s",
                          kind == PICKLE_LIST ? "list" : "dict");
    if (key)
        TRY(add_item(target, key));
    TRY(add_item(target, value));
    return push(parser, target);
}

/* REDUCE: calls a global. A call of OrderedDict without arguments becomes an empty dict. */
static enum status do_reduce(struct parser *parser, size_t unused)
{
    (void)unused;
    struct pickle_value *callee, *arguments, *value;
    TRY(pop(parser, &arguments));
    TRY(pop(parser, &callee));
    if (callee->kind != PICKLE_GLOBAL || arguments->kind != PICKLE_TUPLE)
        return status_set(STATUS_FAILED, "its pickle calls a value that is not a Python object");
    if (pickle_is(callee, ORDERED_DICT))
        return arguments->count == 0 ? push_new(parser, PICKLE_DICT, &value)
                                     : status_set(STATUS_FAILED, "its OrderedDict has arguments");
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
    if (target->kind != PICKLE_DICT || attributes->kind != PICKLE_DICT)
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
    {'R', "REDUCE", do_reduce, 0},
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
    {0x81, "NEWOBJ", NULL, 0},
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
        enum status status = step(parser, *code);
        if (status != STATUS_OK)
            return status_prefix(status, "offset %zu of its pickle", (size_t)(code - parser->bytes));
    }
    return parser->at == parser->end && parser->stack.count == 0
               ? STATUS_OK
               : status_set(STATUS_FAILED, "its pickle has values or bytes after its end");
}

enum status pickle_parse(const uint8_t *bytes, size_t size, bool (*allowed)(const char *text, size_t length),
                         struct pickle *pickle)
{
    struct parser parser = {
        .bytes = bytes, .at = bytes, .end = bytes + size, .allowed = allowed, .pickle = pickle};
    *pickle = (struct pickle){0};
    enum status status = parse(&parser);
    free(parser.stack.items);
    free(parser.memo.items);
    return status;
}

void pickle_free(struct pickle *pickle)
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

bool pickle_is(const struct pickle_value *value, const char *text)
{
    size_t length = strlen(text);
    if ((value->kind != PICKLE_TEXT && value->kind != PICKLE_GLOBAL) || value->length != length)
        return false;
    for (size_t i = 0; i < length; i++) /* a global has a line feed instead of the blank */
        if (value->text[i] != text[i] && !(value->text[i] == '\n' && text[i] == ' '))
            return false;
    return true;
}
