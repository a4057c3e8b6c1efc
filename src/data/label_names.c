#include "data/label_names.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "core/text.h"

/* ---- Lists of words ---- */

static int by_order(const void *a, const void *b)
{
    return text_order(*(const char *const *)a, *(const char *const *)b);
}

/* Returns the index of a word in a list of words, or LABEL_NONE. A list that is not sorted is searched from
 * the beginning. */
static int32_t index_of(const char *const *words, uint32_t count, bool sorted, const char *word)
{
    const char *const *found = sorted && count ? bsearch(&word, words, count, sizeof *words, by_order) : NULL;
    for (uint32_t w = 0; !sorted && !found && w < count; w++)
        found = strcmp(words[w], word) == 0 ? &words[w] : NULL;
    return found ? (int32_t)(found - words) : LABEL_NONE;
}

/* Adds a word to the sorted list of classes, unless it is there. `*kept` is the word in the list. */
static enum status add_word(struct dataset *dataset, const char *word, const char **kept)
{
    uint32_t low = 0, high = dataset->class_name_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const int order = text_order(dataset->class_names[middle], word);
        if (order == 0) {
            *kept = dataset->class_names[middle];
            return STATUS_OK;
        }
        *(order < 0 ? &low : &high) = middle + (order < 0);
    }
    TRY(dataset_grow(&dataset->class_names, dataset->class_name_count, sizeof *dataset->class_names));
    TRY(dataset_keep_name(dataset, word, strlen(word), kept));
    memmove(dataset->class_names + low + 1, dataset->class_names + low,
            (dataset->class_name_count++ - low) * sizeof *dataset->class_names);
    dataset->class_names[low] = *kept;
    return STATUS_OK;
}

/* ---- Words in samples ---- */

struct words {
    struct dataset *dataset;
    bool listed;            /* classes.txt has the words */
    const char **of_sample; /* the word of each sample, or NULL */
    const char *first_key;  /* of the first sample whose label was read */
    bool numbers;           /* that label is an integer */
    bool mixed;             /* integers follow words */
};

static enum status add_label(struct words *words, uint32_t number, const char *text, bool integer)
{
    struct dataset *dataset = words->dataset;
    const struct dataset_sample *sample = &dataset->samples[number];
    if (!words->first_key) {
        words->first_key = sample->key;
        words->numbers = integer;
    } else if (integer != words->numbers && (dataset->skip || dataset->incomplete)) {
        /* The words are broken labels, which the reader of their samples reports. */
        words->numbers = words->mixed = true;
        if (!words->listed) {
            free(dataset->class_names);
            dataset->class_names = NULL;
            dataset->class_name_count = 0;
        }
    } else if (integer != words->numbers) {
        const enum status status = status_set(
            STATUS_FAILED,
            "%s: the label of sample '%s' is the integer %s, but that of sample '%s' is a word; write "
            "all labels as words, or all as integers",
            dataset->path, sample->key, text, words->first_key);
        return dataset->streamed ? dataset_advise_mask(status) : status;
    }
    if (words->numbers)
        return STATUS_OK;
    if (!words->listed)
        return add_word(dataset, text, &words->of_sample[number]);
    const int32_t label = index_of(dataset->class_names, dataset->class_name_count, false, text);
    if (label == LABEL_NONE)
        return status_set(STATUS_FAILED,
                          "%s: the label '%s' of sample '%s' is not in classes.txt; add it at the end, or "
                          "remove classes.txt: the words are then sorted",
                          dataset->path, text, sample->key);
    words->of_sample[number] = dataset->class_names[label];
    return STATUS_OK;
}

/* Reads the labels of all samples, or only the first one if it is an integer. */
static enum status read_words(struct words *words, struct label_reading *reading)
{
    struct dataset *dataset = words->dataset;
    uint32_t shard = 0;
    for (uint32_t i = 0; i < dataset->sample_count && !words->numbers; i++) {
        struct dataset_sample *sample = &dataset->samples[i];
        char text[LABEL_BYTES_MAX + 1];
        bool integer;
        dataset_ask_sample(dataset, i, &shard, &reading->next);
        TRY(dataset_check_cancelled(dataset));
        if (dataset_choose_members(dataset, sample) != STATUS_OK || sample->label >= sample->members)
            continue;
        const enum status status = plain_label_text(&reading->plain, sample, text, &integer);
        if (status == STATUS_UNAVAILABLE || status == STATUS_EXHAUSTED)
            return status;
        if (status == STATUS_OK)
            TRY(add_label(words, i, text, integer));
    }
    return STATUS_OK;
}

static void number_words(const struct words *words)
{
    struct dataset *dataset = words->dataset;
    for (uint32_t i = 0; i < dataset->sample_count; i++)
        dataset->samples[i].class_folder = words->of_sample[i]
                                               ? index_of(dataset->class_names, dataset->class_name_count,
                                                          !words->listed, words->of_sample[i])
                                               : LABEL_NONE;
    dataset->labelled = dataset->worded = true;
    if (!words->listed && dataset->class_name_count == dataset->sample_count && dataset->sample_count >= 8)
        status_warn("%s: each of the %" PRIu32 " samples has another word as its label, such as '%s'; if "
                    "these are no labels, name the labels with %slabel",
                    dataset->path, dataset->sample_count, dataset->class_names[0], OPTION_DASHES);
}

static enum status find_words(struct dataset *dataset, struct label_reading *reading)
{
    FREED const char **of_sample = calloc((size_t)dataset->sample_count + 1, sizeof *of_sample);
    TRY(DATASET_ALLOCATED(of_sample));
    struct words words = {.dataset = dataset, .listed = dataset->class_names != NULL, .of_sample = of_sample};
    const enum status status = read_words(&words, reading);
    if (status == STATUS_OK && words.first_key && !words.numbers)
        number_words(&words);
    if (!words.numbers || words.mixed) { /* the samples are read from the first shard again */
        plain_close(&reading->plain);
        *reading = (struct label_reading){.plain = {.dataset = dataset, .fd = -1}};
    }
    return status;
}

/* ---- Tables ---- */

struct line {
    const char *name, *label;
    uint64_t number;                     /* from 1 */
    const struct dataset_sample *sample; /* that has this name; NULL: none */
};

struct table {
    const char *path;
    struct line *lines; /* owned; sorted by name */
    uint32_t count;
    bool words;
};

static int by_name(const void *a, const void *b)
{
    const struct line *left = a, *right = b;
    const int order = strcmp(left->name, right->name);
    return order ? order : (left->number > right->number) - (left->number < right->number);
}

/* Cuts the next field from a CSV text, removes its quotes, and ends it with a zero. `*last` says whether the
 * line ends after it. Returns NULL if a quote is not closed, or is followed by other characters. */
static char *cut_field(char **text, bool *last)
{
    char *field = *text, *from = field, *to = field;
    const bool quoted = *from == '"';
    from += quoted;
    while (quoted ? *from && (*from != '"' || from[1] == '"') : !strchr(",\n", *from)) {
        from += quoted && *from == '"';
        *to++ = *from++;
    }
    if (quoted && *from++ != '"')
        return NULL;
    if (!quoted && to > field && to[-1] == '\r' && *from != ',')
        to--;
    from += quoted && *from == '\r';
    const char end = *from;
    if (end && end != ',' && end != '\n')
        return NULL;
    *last = end != ',';
    *text = from + (end != '\0');
    *to = '\0';
    return field;
}

/* Cuts a line into the fields of the columns `at`, which are left NULL if the line has fewer fields. Returns
 * false if a field is broken. */
static bool cut_line(char **text, const uint32_t at[2], char *fields[2])
{
    bool last = false;
    fields[0] = fields[1] = NULL;
    for (uint32_t column = 0; !last; column++) {
        char *field = cut_field(text, &last);
        if (!field)
            return false;
        for (int f = 0; f < 2; f++)
            fields[f] = column == at[f] ? field : fields[f];
    }
    return true;
}

/* Finds the columns `name` and `label` in the first line. */
static enum status find_columns(const char *path, char **text, uint32_t at[2])
{
    static const char *const names[] = {"name", "label"};
    bool last = false;
    at[0] = at[1] = UINT32_MAX;
    if (strncmp(*text, "\xef\xbb\xbf", 3) == 0) /* the byte order mark of some editors */
        *text += 3;
    for (uint32_t column = 0; !last; column++) {
        const char *field = cut_field(text, &last);
        for (int f = 0; field && f < 2; f++)
            if (strcmp(field, names[f]) == 0)
                at[f] = column;
        if (!field)
            break;
    }
    if (at[0] != UINT32_MAX && at[1] != UINT32_MAX)
        return STATUS_OK;
    return status_set(STATUS_FAILED,
                      "%s: the first line has no columns 'name' and 'label'; write name,label in it", path);
}

/* Checks the labels: all are integers, or all are words. */
static enum status check_labels(struct table *table)
{
    int32_t label;
    for (uint32_t i = 0; i < table->count; i++) {
        const struct line *line = &table->lines[i];
        const bool word = !label_parse((const uint8_t *)line->label, strlen(line->label), &label);
        if (i > 0 && word != table->words)
            return status_set(STATUS_FAILED,
                              "%s: line %" PRIu64 ": the label '%s' is %s, but that of line %" PRIu64
                              " is %s; write all labels as words, or all as integers",
                              table->path, line->number, line->label, word ? "a word" : "an integer",
                              table->lines->number, word ? "an integer" : "a word");
        table->words = word;
    }
    return STATUS_OK;
}

/* Parses the text of a table, which the lines point into. */
static enum status parse(struct table *table, char *text, size_t size)
{
    uint32_t at[2];
    uint64_t number = 1;
    const char *const end = text + size;
    if (memchr(text, '\0', size))
        return status_set(STATUS_FAILED, "%s: it has zero bytes, so it is no CSV text", table->path);
    TRY(find_columns(table->path, &text, at));
    while (text < end) {
        char *fields[2];
        number++;
        if (*text == '\n' || (*text == '\r' && text[1] == '\n')) { /* an empty line */
            text += *text == '\r' ? 2 : 1;
            continue;
        }
        if (!cut_line(&text, at, fields) || !fields[0] || !fields[1] || !*fields[0] || !*fields[1])
            return status_set(STATUS_FAILED, "%s: record %" PRIu64 ": it lacks a name or a label, or a quote",
                              table->path, number);
        TRY(dataset_grow(&table->lines, table->count, sizeof *table->lines));
        table->lines[table->count++] = (struct line){.name = fields[0], .label = fields[1], .number = number};
    }
    if (table->count == 0)
        return status_set(STATUS_FAILED, "%s: it has no labels after its first line", table->path);
    TRY(check_labels(table));
    qsort(table->lines, table->count, sizeof *table->lines, by_name);
    for (uint32_t i = 1; i < table->count; i++)
        if (strcmp(table->lines[i].name, table->lines[i - 1].name) == 0)
            return status_set(STATUS_FAILED, "%s: lines %" PRIu64 " and %" PRIu64 " have the same name '%s'",
                              table->path, table->lines[i - 1].number, table->lines[i].number,
                              table->lines[i].name);
    return STATUS_OK;
}

/* For bsearch(): compares a name with that of a line. */
static int with_line(const void *name, const void *line)
{
    return strcmp(name, ((const struct line *)line)->name);
}

/* Finds the line of a sample. `*line` becomes NULL if there is none. STATUS_FAILED if there are two, or if
 * the line is that of another sample. */
static enum status find_sample(const struct table *table, const struct dataset *dataset,
                               const struct dataset_sample *sample, struct line **line)
{
    const struct dataset_member *members = &dataset->members[sample->member];
    const char *file = dataset->files[members->file].name, *key = sample->key;
    char names[4][2 * PATH_MAX];
    uint32_t count = 0;
    const char *slash = strrchr(key, '/'), *dot = strrchr(slash ? slash : key, '.');
    snprintf(names[count++], sizeof names[0], "%s", key);
    if (dataset->shards)
        snprintf(names[count++], sizeof names[0], "%s/%s", file, key);
    if (sample->image < sample->members && (dataset->shards || !dot))
        snprintf(names[count++], sizeof names[0], "%s.%s", key, members[sample->image].extension);
    if (!dataset->shards && dot && dot > key)
        snprintf(names[count++], sizeof names[0], "%.*s", (int)(dot - key), key);
    *line = NULL;
    for (uint32_t n = 0; n < count; n++) {
        struct line *found = bsearch(names[n], table->lines, table->count, sizeof *table->lines, with_line);
        if (found && *line)
            return status_set(STATUS_FAILED,
                              "%s: lines %" PRIu64 " and %" PRIu64 " are for the same sample '%s'",
                              table->path, (*line)->number, found->number, key);
        *line = found ? found : *line;
    }
    if (*line && (*line)->sample)
        return status_set(
            STATUS_FAILED, "%s: line %" PRIu64 ": the samples '%s' and '%s' (%s) both have this name; %s",
            table->path, (*line)->number, (*line)->sample->key, key, file,
            dataset->shards ? "write SHARD.tar/KEY as the names" : "write the names with extensions");
    if (*line)
        (*line)->sample = sample;
    return STATUS_OK;
}

/* Sets the labels of all samples from a table. If they are words, their list is that of classes.txt, or the
 * words of the whole table. */
static enum status take_labels(struct dataset *dataset, struct table *table)
{
    const bool listed = table->words && dataset->class_names;
    const char *kept;
    for (uint32_t i = 0; table->words && !listed && i < table->count; i++)
        TRY(add_word(dataset, table->lines[i].label, &kept));
    for (uint32_t i = 0; i < dataset->sample_count; i++) {
        struct dataset_sample *sample = &dataset->samples[i];
        struct line *line = NULL;
        int32_t label = LABEL_NONE;
        (void)dataset_choose_members(dataset, sample); /* the reader of the sample reports a failure */
        TRY(find_sample(table, dataset, sample, &line));
        if (line && table->words)
            label = index_of(dataset->class_names, dataset->class_name_count, !listed, line->label);
        else if (line)
            label_parse((const uint8_t *)line->label, strlen(line->label), &label);
        if (line && label < 0)
            return status_set(STATUS_FAILED, "%s: line %" PRIu64 ": the label '%s' %s", table->path,
                              line->number, line->label,
                              table->words ? "is not in classes.txt" : "is negative");
        sample->class_folder = label;
    }
    dataset->labelled = true;
    dataset->worded = table->words;
    return STATUS_OK;
}

static enum status read_table(struct dataset *dataset)
{
    struct table table = {.path = dataset->choice.labels_file};
    FREED char *text = NULL;
    size_t size;
    enum status status = file_read(table.path, &text, &size);
    if (status == STATUS_OK)
        status = parse(&table, text, size);
    if (status == STATUS_OK)
        status = take_labels(dataset, &table);
    uint32_t unused = 0;
    for (uint32_t i = 0; status == STATUS_OK && i < table.count; i++)
        unused += table.lines[i].sample == NULL;
    if (unused && dataset_warns(dataset))
        status_say("%s: %" PRIu32 " of %" PRIu32 " lines are for no sample of %s", table.path, unused,
                   table.count, dataset->path);
    free(table.lines);
    return status;
}

/* ---- The interface ---- */

enum status label_names_find(struct dataset *dataset, struct label_reading *reading)
{
    const struct members *choice = &dataset->choice;
    if (dataset->records || dataset->sample_count == 0 || dataset->labelled)
        return STATUS_OK;
    if (choice->labels_file)
        return read_table(dataset);
    if (!dataset->needs_labels || dataset->masks || dataset->multi_hot || choice->only.count)
        return STATUS_OK;
    return find_words(dataset, reading);
}

void label_names_apply(const struct dataset *dataset, struct dataset_sample *sample, uint32_t count)
{
    static const struct member_rule known = {.folder = true};
    const bool has = sample->class_folder != LABEL_NONE;
    if (!dataset->labelled || (!has && !dataset->choice.labels_file))
        return;
    sample->label = count;
    sample->rule = has ? &known : NULL;
}

enum status label_names_follow(struct dataset *test, const struct dataset *train)
{
    if (!test->worded && !train->worded)
        return STATUS_OK;
    if (test->worded != train->worded && test->sample_count && train->sample_count)
        return status_set(STATUS_USAGE,
                          "the labels of %s are words, but those of %s are integers; write both as "
                          "words, or both as integers",
                          test->worded ? test->path : train->path, test->worded ? train->path : test->path);
    FREED int32_t *labels = malloc((test->class_name_count + (size_t)1) * sizeof *labels);
    const char **names = malloc((train->class_name_count + (size_t)1) * sizeof *names);
    if (!labels || !names || !array_grow(&test->names, test->name_count, sizeof *test->names)) {
        free(names);
        return DATASET_ALLOCATED(false);
    }
    test->names[test->name_count++] =
        (char *)test->class_names; /* others may hold the list until the set is closed */
    for (uint32_t c = 0; c < test->class_name_count; c++) {
        labels[c] = index_of(train->class_names, train->class_name_count, false, test->class_names[c]);
        if (labels[c] != LABEL_NONE)
            continue;
        status_set(STATUS_USAGE,
                   "%s has the label '%s', but %s does not; labels are the numbers of the sorted "
                   "words of the training set",
                   test->path, test->class_names[c], train->path);
        free(names);
        test->names[--test->name_count] = NULL;
        return STATUS_USAGE;
    }
    for (uint32_t i = 0; i < test->sample_count; i++)
        if (test->samples[i].class_folder != LABEL_NONE)
            test->samples[i].class_folder = labels[test->samples[i].class_folder];
    memcpy(names, train->class_names, train->class_name_count * sizeof *names);
    for (uint32_t c = 0; c < train->class_name_count; c++) /* the training set may be closed first */
        TRY(dataset_keep_name(test, names[c], strlen(names[c]), &names[c]));
    test->class_names = names;
    test->class_name_count = train->class_name_count;
    return STATUS_OK;
}
