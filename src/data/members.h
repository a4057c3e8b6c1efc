/* The members of samples: how the name of a member is split into the key of its sample and an extension, as
 * webdataset does, and which members are the image and the label of a sample. Extensions are compared without
 * regard to case. `load`, `train` and --prepare share this choice. */
#ifndef FDSL_DATA_MEMBERS_H
#define FDSL_DATA_MEMBERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* Extensions of the files that ImageFolder reads (IMG_EXTENSIONS in torchvision/datasets/folder.py). */
#define MEMBERS_IMAGEFOLDER   "jpg;jpeg;png;ppm;bmp;pgm;tif;tiff;webp"
#define MEMBERS_IMAGE         "jpg;jpeg;png;npy;ppm;bmp;pgm;tif;tiff;webp" /* default of --image */
#define MEMBERS_LABEL         "cls;json:label;txt;folder"                  /* default of --label */
#define MASK_MEMBER           "mask.png"                                   /* extension of a mask */
#define MULTI_HOT_MEMBER      "multihot.npy" /* of a multi-hot label: u8 (classes) */

#define MEMBER_RULES_MAX      16
#define MEMBER_EXTENSION_MAX  64         /* bytes, with the terminating zero */
#define MEMBER_FIELD_MAX      128        /* bytes, with the terminating zero */
#define MEMBER_JSON_BYTES_MAX (16 << 20) /* largest JSON member that is parsed */

/* One entry of --image or --label. A label with a `field` is a value in a JSON object; any other label is a
 * text. It is a decimal integer, or in all samples a word (data/label_names.h). */
struct member_rule {
    char extension[MEMBER_EXTENSION_MAX]; /* empty if `folder`; or a pattern */
    bool pattern;                         /* `extension` has wildcards; see members_matches() */
    char field[MEMBER_FIELD_MAX]; /* names from the outermost object inwards, separated by dots; or empty */
    bool folder;                  /* the label is the number of the sample's class folder */
    bool mask;                    /* the member is a mask or a multi-hot label, instead of a class */
    uint8_t number_bytes;         /* the label is a little-endian integer of this size; 0: it is a text */
    bool number_signed;
};

/* The entries of an option, in order of preference. */
struct member_list {
    struct member_rule rules[MEMBER_RULES_MAX];
    uint32_t count;
    bool given;  /* the option was given, so a sample without such a member is an error */
    bool preset; /* the list is the default of its option */
};

struct members {
    struct member_list image, label;
    struct member_list only; /* --member EXT: read only this member; otherwise empty */
    bool all;                /* --member all: read every member */
    const char *labels_file; /* --labels FILE: the table that has the labels (data/label_names.h), or NULL.
                                Set by the caller after members_parse(); not owned */
};

/* The options that choose members, for a table of options. `image_at`, `label_at` and `member_at` are the
 * offsets of their values. For `column_`, see `column` of struct option_spec. */
/* clang-format off */
#define MEMBER_IMAGE_LABEL(image_at, label_at, column_)                                                     \
    {"image", "LIST", OPTION_TEXT, image_at, .column = column_, .help = "extensions of the image of a sample, or patterns such as *_rgb.png, separated by ';' (quote the list). The first entry that a sample has is read (default: " MEMBERS_IMAGE ")"},                                                    \
    {"label", "LIST", OPTION_TEXT, label_at, .column = column_, .help = "possible locations of the label, separated by ';'. EXT: an integer or a word in the member with this extension; json:FIELD: the same in a JSON object (OUTER.INNER for nested objects); folder: the number of the class folder. Words become the numbers of the sorted words. The first location that a sample has is read (default: in class folders folder, elsewhere " MEMBERS_LABEL ")"}
#define MEMBER_OPTIONS(image_at, label_at, member_at)                                                       \
    MEMBER_IMAGE_LABEL(image_at, label_at, COLUMN),                                                           \
    {"member", "EXT", OPTION_TEXT, member_at, .column = COLUMN, .help = "read only the member with this extension, for example bin, or all members: all"}
/* The option of a table of labels, for a table of options, as MEMBER_OPTIONS. */
#define LABELS_OPTION(labels_at)                                                                              \
    {"labels", "FILE", OPTION_TEXT, labels_at, .column = COLUMN, .help = "CSV file with the labels, with the columns name (key or file of a sample) and label (an integer, or in all lines a word), instead of --label"}
/* clang-format on */

/* ---- Labels ---- */

#define LABEL_BYTES_MAX 64   /* maximum size of a member that is a label in decimal digits */
#define LABEL_NONE      (-1) /* value for a sample without a label */

/* Parses a label: a decimal integer, optionally surrounded by blanks, tabs and line breaks. Returns false for
 * any other text and for values outside int32. */
FDSL_HD bool label_parse(const uint8_t *text, uint64_t size, int32_t *label)
{
    uint64_t i = 0, digits = 0;
    int64_t value = 0;
    while (i < size && (text[i] == ' ' || text[i] == '\n' || text[i] == '\r' || text[i] == '\t'))
        i++;
    bool negative = i < size && text[i] == '-';
    for (i += negative; i < size && text[i] >= '0' && text[i] <= '9'; i++, digits++) {
        value = 10 * value + (text[i] - '0');
        if (value > (int64_t)INT32_MAX + negative)
            return false;
    }
    while (i < size && (text[i] == ' ' || text[i] == '\n' || text[i] == '\r' || text[i] == '\t'))
        i++;
    *label = (int32_t)(negative ? -value : value);
    return digits > 0 && i == size;
}

FDSL_C_BEGIN

/* STATUS_FAILED if the label is not a class from 0 to `classes` - 1. Thread safe. */
enum status label_check(int32_t label, uint32_t classes);

/* Parses the values of --image, --label and --member. A value is NULL if its option was not given.
 * STATUS_USAGE with the option and the fault. */
enum status members_parse(const char *image, const char *label, const char *member, struct members *members);

/* Sets members->labels_file to the value of --labels, unless it is NULL. `label` is the value of --label.
 * STATUS_USAGE if --label or --member was given, too. */
enum status members_take_table(const char *file, const char *label, struct members *members);

/* Finds the first rule that applies to a sample, and sets `*rule`. `extensions` lists the `count` members of
 * the sample. `folder` is true if the sample has a class folder; the rule `folder` applies only then, and
 * comes first if the list is the default of --label. All readers and writers of labels use this choice.
 * Returns the number of the member that the rule names, or `count` if the rule is `folder`. If no rule
 * applies, returns `count` and sets `*rule` to NULL. */
uint32_t members_find(const struct member_list *list, const char *const extensions[], uint32_t count,
                      bool folder, const struct member_rule **rule);

/* Returns whether an extension is that of a rule. A pattern, with the wildcards of fnmatch(), must match the
 * extension, or the extension after a dot: "*.jpg" matches "jpg" and "left.jpg", "left*" only the latter. */
bool members_matches(const struct member_rule *rule, const char *extension);

/* Returns whether the rule that members_find() found applies to another member after `found`, too, and sets
 * the message that its pattern is ambiguous. `option` is as in members_lack(). */
bool members_ambiguous(const struct member_rule *rule, const char *option, const char *const extensions[],
                       uint32_t count, uint32_t found);

/* Returns whether the members look like several samples whose names have dots: there are two or more, and all
 * of them are images with a dot in the extension, as 0.jpg and 1.jpg are of the files cat.0.jpg and
 * cat.1.jpg. */
bool members_look_split(const char *const extensions[], uint32_t count);

/* Prepended to the advice in a message about such members. */
#define MEMBERS_SPLIT                                                                                      \
    "names are split at their first dot, as webdataset does; if each file is a sample, rename the files, " \
    "or "                                                                                                  \
    "unpack the shard and read the files as class folders"

/* Sets the message that a sample has none of the members in `list`. `option` is the option that
 * chooses this member, without dashes: image, label or member. The message lists the members that the sample
 * has. Returns STATUS_FAILED. */
enum status members_lack(const struct member_list *list, const char *option, const char *const extensions[],
                         uint32_t count);

/* Returns the part of an extension that names the format: "png" for "left.png". */
const char *members_format(const char *extension);

/* Reads a label from the bytes of its member. STATUS_FAILED with the reason if it is not an integer of 32
 * bits; STATUS_UNAVAILABLE for JSON in builds without jansson. Thread safe. */
enum status members_label(const struct member_rule *rule, const uint8_t *bytes, uint64_t size,
                          int32_t *label);

/* Finds a multi-hot label in the bytes of its member MULTI_HOT_MEMBER: an array of u8 or bool with one axis,
 * whose values are 0 or 1. Sets `*label` to its first value, within `bytes`, and `*classes`, unless it is
 * above 0, to the number of values. STATUS_FAILED with the reason, also if the label has another number of
 * values. Thread safe. */
enum status members_multi_hot(const uint8_t *bytes, uint64_t size, uint32_t *classes, const uint8_t **label);

/* Writes a label as text, without surrounding blanks, and sets `*number` if it is an integer. A word has at
 * most LABEL_BYTES_MAX bytes, and no control characters. STATUS_FAILED, with the reason, if it is neither.
 * Otherwise as members_label(). */
enum status members_label_text(const struct member_rule *rule, const uint8_t *bytes, uint64_t size,
                               char text[LABEL_BYTES_MAX + 1], bool *number);

/* ---- Names of members ---- */

/* Splits a name at the first dot of its last path component. "a.b/c.left.jpg" has the key "a.b/c" (the first
 * `*key_length` bytes) and the extension "left.jpg" (`*extension` points into the name; compare it
 * case-insensitively). Returns false for names that belong to no sample. These are names without a dot or
 * with an empty extension, names whose last component begins with a dot, and names whose first component
 * begins and ends with two underscores. */
bool key_split(const char *name, size_t *key_length, const char **extension);

/* Writes the normal form of a name: without a slash at its beginning or end, and without components that are
 * empty or ".". The names "./a//b", "/a/b" and "a/b" are the same file when an archive is extracted. `normal`
 * has room for `length` + 1 bytes. Returns the length of the normal form. */
size_t key_normal(const char *name, size_t length, char *normal);

/* Returns whether a key and the first `length` bytes of a name have the same normal form. */
bool key_same(const char *key, const char *name, size_t length);

FDSL_C_END

#endif
