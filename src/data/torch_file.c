#include "data/torch_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PICKLE_BYTES_MAX (UINT64_C(256) << 20)
#define DEPTH_MAX        32      /* nested dicts, lists and tuples */
#define VISITS_MAX       4000000 /* values visited in the search for tensors; a value counts at each visit */
#define VISITS_PER_BYTE  4       /* maximum number of visits per byte of the pickle; more are repetitions */
#define BYTES_PER_TENSOR 16   /* minimum number of bytes of the pickle per tensor; the first takes over 100 */
#define REPEATS_MIN      1000 /* visits and tensors that every pickle may have in addition */
#define NAME_MAX_BYTES   1024
#define REBUILD          "torch._utils _rebuild_tensor_v2"

/* ---- Types ---- */

static const struct storage_type {
    const char *global, *name;
    uint32_t bytes;
    bool real, readable;
    enum dtype dtype;
} storage_types[] = {
    {"torch FloatStorage", "float32", 4, true, true, DTYPE_F32},
    {"torch HalfStorage", "float16", 2, true, true, DTYPE_F16},
    {"torch BFloat16Storage", "bfloat16", 2, true, true, DTYPE_BF16},
    {"torch DoubleStorage", "float64", 8, true, false, 0},
    {"torch LongStorage", "int64", 8, false, false, 0},
    {"torch IntStorage", "int32", 4, false, false, 0},
    {"torch ShortStorage", "int16", 2, false, false, 0},
    {"torch CharStorage", "int8", 1, false, false, 0},
    {"torch ByteStorage", "uint8", 1, false, false, 0},
    {"torch BoolStorage", "bool", 1, false, false, 0},
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
    return pickle_is(&value, REBUILD) || find_type(&value);
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

/* Finds the archive member that holds the values of a tensor. The pickle refers to this storage by the
 * persistent id ('storage', type, key, device, values), where `values` is a count. Checks that the member
 * named by the key has the size of this many values. */
static enum status find_storage(const struct search *search, const struct pickle_value *value,
                                const struct storage_type **type, const struct zip_member **member,
                                uint64_t *values)
{
    char name[NAME_MAX_BYTES];
    const struct pickle_value *id = value->kind == PICKLE_PERSISTENT ? value->items[0] : value;
    if (value->kind != PICKLE_PERSISTENT || id->kind != PICKLE_TUPLE || id->count != 5 ||
        !pickle_is(id->items[0], "storage") || !(*type = find_type(id->items[1])) ||
        id->items[2]->kind != PICKLE_TEXT || !is_count(id->items[4]))
        return status_set(STATUS_FAILED, "its storage is not described in the format of torch.save()");
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
    tensor->readable = type->readable;
    tensor->dtype = type->dtype;
    return tensor->fault ? STATUS_OK : place(tensor, items[1], type, member, stored);
}

/* ---- The search for tensors ---- */

/* State of a list, tuple or dict that was visited before: the `mark` of struct pickle_value. */
enum mark { MARK_NEW, MARK_CHECKED, MARK_NO_TENSORS };

static enum status visit(struct search *search, struct pickle_value *value, unsigned depth);

static enum status refuse_repetition(void)
{
    return status_set(STATUS_FAILED,
                      "its values refer to each other so often that a file of this size describes too many: "
                      "save only its tensors with torch.save(), each under one name");
}

static enum status add_tensor(struct search *search, const struct pickle_value *call)
{
    struct tensor tensor = {.name = NULL};
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
    TRY(ALLOCATED(keys, "out of memory for its pickle"));
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

enum status torch_list_pickle(const uint8_t *bytes, size_t size, const struct zip *zip, const char *prefix,
                              struct tensor_file *file)
{
    struct search search = {.zip = zip,
                            .prefix = prefix,
                            .file = file,
                            .visits_max = REPEATS_MIN + VISITS_PER_BYTE * (uint64_t)size,
                            .tensors_max = REPEATS_MIN + size / BYTES_PER_TENSOR};
    CLOSED_BY(pickle_free) struct pickle pickle;
    TRY(pickle_parse(bytes, size, allowed, &pickle));
    return visit(&search, pickle.root, 0);
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
    TRY(ALLOCATED(bytes, "out of memory for its pickle"));
    TRY(tensor_file_read(file, member->offset, bytes, member->bytes));
    return torch_list_pickle(bytes, member->bytes, zip, prefix, file);
}

/* Returns whether the file begins like a file of torch.save() before version 1.6: with the pickle of a long
 * integer of ten bytes. */
static bool is_legacy(const struct tensor_file *file)
{
    uint8_t start[4];
    return file->bytes > sizeof start && tensor_file_read(file, 0, start, sizeof start) == STATUS_OK &&
           memcmp(start, "\x80\x02\x8A\x0A", sizeof start) == 0;
}

enum status torch_list(struct tensor_file *file)
{
    if (is_legacy(file))
        return status_set(STATUS_FAILED,
                          "it has the format of PyTorch before 1.6, not a zip archive: load it "
                          "with torch.load() and save it again");
    CLOSED_BY(zip_free) struct zip zip;
    TRY(zip_list(file, &zip));
    return list_archive(file, &zip);
}
