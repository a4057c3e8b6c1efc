#include "data/members.h"

#include <ctype.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#ifdef HAVE_JANSSON
#include <jansson.h>
#endif

#include "core/text.h"
#include "data/npy.h"

#define NAMES_MAX 400 /* bytes of a list of members in a message */

/* ---- Names of members ---- */

/* Returns whether a name is "__x__" or "__x__/...", which writers of shards reserve for their metadata. */
static bool is_reserved(const char *name)
{
    size_t first = strcspn(name, "/");
    return first >= 4 && strncmp(name, "__", 2) == 0 && strncmp(name + first - 2, "__", 2) == 0;
}

bool key_split(const char *name, size_t *key_length, const char **extension)
{
    const char *slash = strrchr(name, '/'), *last = slash ? slash + 1 : name;
    const char *dot = strchr(last, '.');
    if (!dot || dot == last || dot[1] == '\0' || is_reserved(name))
        return false;
    *key_length = (size_t)(dot - name);
    *extension = dot + 1;
    return true;
}

/* Moves `*name` to its next component that is not ".". Returns the length of this component, or 0 at `end`.
 */
static size_t find_component(const char **name, const char *end)
{
    for (;; ++*name) {
        while (*name < end && **name == '/')
            ++*name;
        const char *slash = memchr(*name, '/', (size_t)(end - *name));
        size_t length = (size_t)((slash ? slash : end) - *name);
        if (length != 1 || **name != '.')
            return length;
    }
}

size_t key_normal(const char *name, size_t length, char *normal)
{
    const char *end = name + length;
    size_t used = 0, component;
    for (; (component = find_component(&name, end)) > 0; name += component) {
        if (used > 0)
            normal[used++] = '/';
        memcpy(normal + used, name, component);
        used += component;
    }
    normal[used] = '\0';
    return used;
}

bool key_same(const char *key, const char *name, size_t length)
{
    const char *key_end = key + strlen(key), *name_end = name + length;
    if ((size_t)(key_end - key) == length && memcmp(key, name, length) == 0)
        return true; /* nearly always */
    for (size_t component;; key += component, name += component) {
        component = find_component(&key, key_end);
        if (find_component(&name, name_end) != component || memcmp(key, name, component) != 0)
            return false;
        if (component == 0)
            return true;
    }
}

/* ---- The options ---- */

static enum status bad_entry(const char *option, const char *entry, size_t length, const char *why)
{
    return status_set(STATUS_USAGE, "%s%s: '%.*s' %s", OPTION_DASHES, option,
                      (int)(length < 80 ? length : 80), entry, why);
}

/* Parses one entry of `length` bytes. `labels` is true if the entry belongs to --label. */
static enum status parse_rule(const char *option, const char *entry, size_t length, bool labels,
                              struct member_rule *rule)
{
    const char *colon = memchr(entry, ':', length);
    size_t extension = colon ? (size_t)(colon - entry) : length, field = length - extension;
    *rule = (struct member_rule){.folder = labels && length == 6 && memcmp(entry, "folder", 6) == 0};
    if (rule->folder)
        return STATUS_OK;
    if (memchr(entry, ',', length))
        return bad_entry(option, entry, length, "has a comma; separate extensions by ';'");
    if (length == 0 || extension == 0)
        return bad_entry(option, entry, length, "has no extension; separate extensions by one ';'");
    if (*entry == '.' || memchr(entry, '/', length))
        return bad_entry(option, entry, length, "is not an extension; write it without the dot, as in png");
    if (extension >= sizeof rule->extension || field > sizeof rule->field)
        return bad_entry(option, entry, length, "is too long");
    if (colon && !labels)
        return bad_entry(option, entry, length,
                         OPTION_OR_FIELD("names a field, which only --label can; drop the ':'",
                                         "names a field, which only label can; drop the ':'"));
    memcpy(rule->extension, entry, extension);
    rule->pattern = strpbrk(rule->extension, "*?[") != NULL;
    if (colon)
        memcpy(rule->field, colon + 1, field - 1);
    if (labels && !*rule->field && (colon || strcasecmp(rule->extension, "json") == 0))
        return bad_entry(option, entry, length, "names no field; write json:FIELD");
    if (strstr(rule->field, "..") || *rule->field == '.' || (*rule->field && entry[length - 1] == '.'))
        return bad_entry(option, entry, length, "has an empty name between dots; write json:OUTER.INNER");
    return STATUS_OK;
}

/* Parses a list of entries that are separated by ';'. */
static enum status parse_list(const char *option, const char *text, const char *preset, bool labels,
                              struct member_list *list)
{
    *list =
        (struct member_list){.given = text != NULL, .preset = preset && (!text || strcmp(text, preset) == 0)};
    for (const char *entry = text ? text : preset; entry;) {
        const char *end = strchr(entry, ';');
        size_t length = end ? (size_t)(end - entry) : strlen(entry);
        if (list->count == MEMBER_RULES_MAX)
            return status_set(STATUS_USAGE, "%s%s: more than %d extensions", OPTION_DASHES, option,
                              MEMBER_RULES_MAX);
        TRY(parse_rule(option, entry, length, labels, &list->rules[list->count]));
        list->count++;
        entry = end ? end + 1 : NULL;
    }
    return STATUS_OK;
}

enum status members_parse(const char *image, const char *label, const char *member, struct members *members)
{
    *members = (struct members){.all = member && strcmp(member, "all") == 0};
    TRY(parse_list("image", image, MEMBERS_IMAGE, false, &members->image));
    TRY(parse_list("label", label, MEMBERS_LABEL, true, &members->label));
    if (member && !members->all)
        TRY(parse_list("member", member, NULL, false, &members->only));
    if (member && !members->all && (image || label))
        return status_set(STATUS_USAGE, "--member %s reads this member alone; drop --image and --label",
                          member);
    if (members->all && (image || label))
        return status_set(STATUS_USAGE, "--member all reads every member; drop --image and --label");
    return STATUS_OK;
}

enum status members_take_table(const char *file, const char *label, struct members *members)
{
    const char *const other = file && label && !members->label.preset         ? "label"
                              : file && (members->all || members->only.count) ? "member"
                                                                              : NULL;
    members->labels_file = file;
    return other ? status_set(STATUS_USAGE, "%slabels%s %s has the labels of images; drop %s%s",
                              OPTION_DASHES, OPTION_OR_FIELD("", ":"), file, OPTION_DASHES, other)
                 : STATUS_OK;
}

/* ---- Choosing ---- */

bool members_matches(const struct member_rule *rule, const char *extension)
{
    char dotted[MEMBER_EXTENSION_MAX + 256];
    if (rule->folder)
        return false;
    if (!rule->pattern)
        return strcasecmp(rule->extension, extension) == 0;
    snprintf(dotted, sizeof dotted, ".%s", extension);
    return fnmatch(rule->extension, extension, FNM_CASEFOLD) == 0 ||
           fnmatch(rule->extension, dotted, FNM_CASEFOLD) == 0;
}

bool members_ambiguous(const struct member_rule *rule, const char *option, const char *const extensions[],
                       uint32_t count, uint32_t found)
{
    for (uint32_t m = found + 1; rule && rule->pattern && m < count; m++)
        if (members_matches(rule, extensions[m])) {
            status_set(STATUS_FAILED,
                       "%s%s %s matches several of its members: %.60s and %.60s; use a narrower pattern",
                       OPTION_DASHES, option, rule->extension, extensions[found], extensions[m]);
            return true;
        }
    return false;
}

uint32_t members_find(const struct member_list *list, const char *const extensions[], uint32_t count,
                      bool folder, const struct member_rule **rule)
{
    for (uint32_t r = 0; folder && list->preset && r < list->count; r++) {
        *rule = &list->rules[r];
        if ((*rule)->folder)
            return count;
    }
    for (uint32_t r = 0; r < list->count; r++) {
        *rule = &list->rules[r];
        if ((*rule)->folder && folder)
            return count;
        for (uint32_t m = 0; m < count; m++)
            if (members_matches(*rule, extensions[m]))
                return m;
    }
    *rule = NULL;
    return count;
}

bool members_look_split(const char *const extensions[], uint32_t count)
{
    struct members defaults;
    const struct member_rule *rule;
    bool split = count > 1 && members_parse(NULL, NULL, NULL, &defaults) == STATUS_OK;
    for (uint32_t m = 0; split && m < count; m++) {
        const char *format = members_format(extensions[m]);
        split = format != extensions[m] && members_find(&defaults.image, &format, 1, false, &rule) == 0;
    }
    return split;
}

enum status members_lack(const struct member_list *list, const char *option, const char *const extensions[],
                         uint32_t count)
{
    char wanted[NAMES_MAX] = "", there[NAMES_MAX] = "";
    bool folder = false, split = members_look_split(extensions, count);
    for (uint32_t r = 0; r < list->count; r++) {
        const struct member_rule *rule = &list->rules[r];
        folder |= rule->folder && list->given;
        text_join(wanted, sizeof wanted, ";", "%s%s%s", rule->folder ? "folder" : rule->extension,
                  *rule->field ? ":" : "", rule->field);
    }
    for (uint32_t m = 0; m < count; m++)
        text_join(there, sizeof there, ", ", "%.60s", extensions[m]);
    return status_set(STATUS_FAILED, "it has no member for %s%s %s; its members are: %s; %s%s%s%s%s",
                      OPTION_DASHES, option, wanted, there, split ? MEMBERS_SPLIT : "name one of them with ",
                      split ? "" : OPTION_DASHES, split ? "" : option, split ? "" : ", or remove the sample",
                      folder ? "; folders are classes only in a folder without .tar files, with more images "
                               "in its subfolders than directly in it, and without .cls files"
                             : "");
}

const char *members_format(const char *extension)
{
    const char *dot = strrchr(extension, '.');
    return dot ? dot + 1 : extension;
}

/* ---- Labels ---- */

enum status members_multi_hot(const uint8_t *bytes, uint64_t size, uint32_t *classes, const uint8_t **label)
{
    struct npy_header header;
    TRY(npy_header_parse(bytes, size, &header));
    TRY(npy_header_check(&header, size));
    if ((strcmp(header.type, "|u1") != 0 && strcmp(header.type, "|b1") != 0) || header.axes != 1 ||
        header.values == 0 || header.values > UINT32_MAX)
        return status_set(STATUS_FAILED,
                          "a multi-hot label is an array of uint8 with one axis, but this one "
                          "has the type %s, %u axes and %llu values",
                          header.type, header.axes, (unsigned long long)header.values);
    if (*classes == 0)
        *classes = (uint32_t)header.values;
    if (header.values != *classes)
        return status_set(STATUS_FAILED, "its multi-hot label has %llu classes, but others have %u",
                          (unsigned long long)header.values, *classes);
    *label = bytes + header.data;
    for (uint32_t k = 0; k < *classes; k++)
        if ((*label)[k] > 1)
            return status_set(STATUS_FAILED,
                              "its multi-hot label has the value %u for class %u; values are 0 and 1",
                              (*label)[k], k);
    return STATUS_OK;
}

/* Appended to the message about a word in a data set whose other labels are integers, or in `load`. */
#define NOT_A_WORD "; words are labels only if all labels are words"

/* Copies a word without surrounding blanks and line breaks. Returns false if it is empty, too long, or has
 * control characters. `bytes` may have no more than LABEL_BYTES_MAX bytes of a larger member. */
static bool take_word(const uint8_t *bytes, uint64_t size, char text[LABEL_BYTES_MAX + 1])
{
    if (size > LABEL_BYTES_MAX)
        return false;
    while (size > 0 && isspace(bytes[size - 1]))
        size--;
    while (size > 0 && isspace(*bytes))
        bytes++, size--;
    for (uint64_t i = 0; i < size; i++)
        if (iscntrl(bytes[i]))
            return false;
    if (size == 0)
        return false;
    memcpy(text, bytes, size);
    text[size] = '\0';
    return true;
}

#ifdef HAVE_JANSSON
/* Follows the names of `field` through nested objects. Returns NULL if a name is missing. */
static const json_t *find_field(const json_t *value, const char *field)
{
    while (value && *field) {
        size_t length = strcspn(field, ".");
        char name[MEMBER_FIELD_MAX];
        memcpy(name, field, length);
        name[length] = '\0';
        value = json_object_get(value, name);
        field += length + (field[length] == '.');
    }
    return value;
}

/* Parses a JSON member. The caller frees `*root`. `*value` is the field, which is not NULL. */
static enum status json_field(const struct member_rule *rule, const uint8_t *bytes, uint64_t size,
                              json_t **root, const json_t **value)
{
    json_error_t error;
    if (size > MEMBER_JSON_BYTES_MAX)
        return status_set(STATUS_FAILED, "its %s has %llu bytes, more than the %d that are parsed",
                          rule->extension, (unsigned long long)size, MEMBER_JSON_BYTES_MAX);
    *root = json_loadb((const char *)bytes, size, JSON_REJECT_DUPLICATES, &error);
    if (!*root)
        return status_set(STATUS_FAILED, "its %s is not valid JSON: line %d: %s", rule->extension, error.line,
                          error.text);
    *value = find_field(*root, rule->field);
    return *value ? STATUS_OK
                  : status_set(STATUS_FAILED, "its %s has no field '%s'; name another with %slabel %s:FIELD",
                               rule->extension, rule->field, OPTION_DASHES, rule->extension);
}

static bool is_label(const json_t *value)
{
    return json_is_integer(value) && json_integer_value(value) >= INT32_MIN &&
           json_integer_value(value) <= INT32_MAX;
}

static enum status json_label(const struct member_rule *rule, const uint8_t *bytes, uint64_t size,
                              int32_t *label)
{
    json_t *root = NULL;
    const json_t *value;
    enum status status = json_field(rule, bytes, size, &root, &value);
    if (status == STATUS_OK && !is_label(value))
        status = status_set(STATUS_FAILED, "field '%s' of its %s is not an integer of 32 bits%s", rule->field,
                            rule->extension, json_is_string(value) ? NOT_A_WORD : "");
    else if (status == STATUS_OK)
        *label = (int32_t)json_integer_value(value);
    json_decref(root);
    return status;
}

static enum status json_text(const struct member_rule *rule, const uint8_t *bytes, uint64_t size,
                             char text[LABEL_BYTES_MAX + 1], bool *number)
{
    json_t *root = NULL;
    const json_t *value;
    enum status status = json_field(rule, bytes, size, &root, &value);
    *number = status == STATUS_OK && is_label(value);
    if (*number)
        snprintf(text, LABEL_BYTES_MAX + 1, "%" PRIi32, (int32_t)json_integer_value(value));
    else if (status == STATUS_OK &&
             !(json_is_string(value) &&
               take_word((const uint8_t *)json_string_value(value), json_string_length(value), text)))
        status = status_set(STATUS_FAILED, "field '%s' of its %s is neither an integer of 32 bits nor a word",
                            rule->field, rule->extension);
    json_decref(root);
    return status;
}
#else
static enum status lacks_json(const struct member_rule *rule)
{
    return status_set(STATUS_UNAVAILABLE,
                      "its label is in %s, and this build has no jansson: install it (libjansson-dev) and "
                      "build again",
                      rule->extension);
}

#define json_label(rule, bytes, size, label)       lacks_json(rule)
#define json_text(rule, bytes, size, text, number) lacks_json(rule)
#endif

/* Reads a little-endian integer. */
static enum status number_label(const struct member_rule *rule, const uint8_t *bytes, uint64_t size,
                                int32_t *label)
{
    uint64_t value = 0;
    if (size != rule->number_bytes)
        return status_set(STATUS_FAILED, "its %s has %llu bytes, not %u", rule->extension,
                          (unsigned long long)size, rule->number_bytes);
    for (uint32_t i = 0; i < size; i++)
        value |= (uint64_t)bytes[i] << 8 * i;
    const uint32_t unused = 64 - 8 * (uint32_t)size;
    const int64_t number = rule->number_signed ? (int64_t)(value << unused) >> unused : (int64_t)value;
    if ((!rule->number_signed && value > INT32_MAX) || number < INT32_MIN || number > INT32_MAX)
        return status_set(STATUS_FAILED, "its %s is not an integer of 32 bits", rule->extension);
    *label = (int32_t)number;
    return STATUS_OK;
}

enum status members_label(const struct member_rule *rule, const uint8_t *bytes, uint64_t size, int32_t *label)
{
    if (rule->number_bytes)
        return number_label(rule, bytes, size, label);
    if (*rule->field)
        return json_label(rule, bytes, size, label);
    if (size <= LABEL_BYTES_MAX && label_parse(bytes, size, label))
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "its %s is not a label: a label is a decimal integer of 32 bits, or in all samples a "
                      "word; name another member with %slabel",
                      rule->extension, OPTION_DASHES);
}

enum status members_label_text(const struct member_rule *rule, const uint8_t *bytes, uint64_t size,
                               char text[LABEL_BYTES_MAX + 1], bool *number)
{
    int32_t label;
    if (rule->number_bytes) {
        TRY(number_label(rule, bytes, size, &label));
        *number = true;
        snprintf(text, LABEL_BYTES_MAX + 1, "%" PRIi32, label);
        return STATUS_OK;
    }
    if (*rule->field)
        return json_text(rule, bytes, size, text, number);
    *number = size <= LABEL_BYTES_MAX && label_parse(bytes, size, &label);
    if (*number)
        snprintf(text, LABEL_BYTES_MAX + 1, "%" PRIi32, label);
    else if (!take_word(bytes, size, text))
        return status_set(
            STATUS_FAILED,
            "its %s is not a label: neither an integer of 32 bits nor a word of at most %d bytes",
            rule->extension, LABEL_BYTES_MAX);
    return STATUS_OK;
}

enum status label_check(int32_t label, uint32_t classes)
{
    if (label >= 0 && (uint32_t)label < classes)
        return STATUS_OK;
    return status_set(STATUS_FAILED, "its label %" PRIi32 " is not a class from 0 to %" PRIu32, label,
                      classes - 1);
}
