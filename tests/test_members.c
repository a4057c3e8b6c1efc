/* Tests how members are chosen: the options, the labels, and samples with unusual members. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "data/members.h"

static void expect_bad(const char *image, const char *label, const char *member, const char *words)
{
    struct members members;
    cr_expect_eq(members_parse(image, label, member, &members), STATUS_USAGE, "%s", words);
    cr_expect(strstr(status_text(), words), "'%s' lacks '%s'", status_text(), words);
}

Test(members, faults_in_options_are_named)
{
    char many[64] = "a", longer[200] = "", field[300] = "json:";
    for (int i = 0; i < MEMBER_RULES_MAX; i++)
        strcat(many, ";a");
    memset(longer, 'a', MEMBER_EXTENSION_MAX);
    memset(field + 5, 'a', MEMBER_FIELD_MAX);
    expect_bad("", NULL, NULL, "--image: '' has no extension");
    expect_bad("jpg;;png", NULL, NULL, "--image: '' has no extension");
    expect_bad("jpg;", NULL, NULL, "--image: '' has no extension");
    expect_bad(".jpg", NULL, NULL, "'.jpg' is not an extension; write it without the dot");
    expect_bad("a/b", NULL, NULL, "'a/b' is not an extension");
    expect_bad("json:x", NULL, NULL, "names a field, which only --label can");
    expect_bad(many, NULL, NULL, "more than 16 extensions");
    expect_bad(longer, NULL, NULL, "is too long");
    expect_bad(NULL, "json", NULL, "'json' names no field; write json:FIELD");
    expect_bad(NULL, "JSON:", NULL, "'JSON:' names no field");
    expect_bad(NULL, ":x", NULL, "has no extension");
    expect_bad(NULL, "json:.a", NULL, "an empty name between dots");
    expect_bad(NULL, "json:a..b", NULL, "an empty name between dots");
    expect_bad(NULL, "json:a.", NULL, "an empty name between dots");
    expect_bad(NULL, field, NULL, "is too long");
    expect_bad(NULL, NULL, "", "--member: '' has no extension");
    expect_bad("jpg,png", NULL, NULL, "'jpg,png' has a comma; separate extensions by ';'");
    expect_bad("png", NULL, "all", "--member all reads every member; drop --image and --label");
    expect_bad("png", NULL, "bin", "--member bin reads this member alone; drop --image and --label");
}

/* Returns the name of the chosen member, or "none", or "folder". */
static const char *chosen(const char *label, const char *const extensions[], uint32_t count, bool folder)
{
    static struct members members;
    const struct member_rule *rule;
    cr_assert_eq(members_parse(NULL, label, NULL, &members), STATUS_OK, "%s", status_text());
    uint32_t found = members_find(&members.label, extensions, count, folder, &rule);
    cr_assert(found <= count && (rule != NULL) >= (found < count));
    return found < count ? extensions[found] : rule ? "folder" : "none";
}

Test(members, the_first_existing_entry_is_chosen)
{
    static const char *const all[] = {"txt", "JSON", "Cls"};
    cr_expect_str_eq(chosen(NULL, all, 3, true), "folder"); /* in class folders, sidecars are not labels */
    cr_expect_str_eq(chosen(MEMBERS_LABEL, all, 3, true), "folder"); /* the default, written out */
    cr_expect_str_eq(chosen("cls;folder", all, 3, true), "Cls");
    cr_expect_str_eq(chosen(NULL, all, 3, false), "Cls");
    cr_expect_str_eq(chosen(NULL, all, 2, false), "JSON");
    cr_expect_str_eq(chosen(NULL, all, 1, false), "txt");
    cr_expect_str_eq(chosen(NULL, all, 0, true), "folder");
    cr_expect_str_eq(chosen(NULL, all, 0, false), "none");
    cr_expect_str_eq(chosen("folder;cls", all, 3, true), "folder");
    cr_expect_str_eq(chosen("folder;cls", all, 3, false), "Cls");
    cr_expect_str_eq(chosen("xml;txt;cls", all, 3, false), "txt");
    cr_expect_str_eq(chosen("tx;txtt", all, 3, false), "none");
    cr_expect_str_eq(members_format("left.png"), "png");
    cr_expect_str_eq(members_format("png"), "png");
}

/* Reads a label. Returns "" or the error message. */
static const char *label_of(const char *rule, const void *bytes, size_t size, int32_t *label)
{
    static struct members members;
    cr_assert_eq(members_parse(NULL, rule, NULL, &members), STATUS_OK, "%s", status_text());
    enum status status = members_label(&members.label.rules[0], bytes, size, label);
    return status == STATUS_OK ? "" : status_text();
}

Test(members, labels_are_integers)
{
    int32_t label = 7;
    cr_expect(*label_of("txt", "12\n", 3, &label) == 0 && label == 12);
    cr_expect(strstr(label_of("txt", "", 0, &label), "its txt is not a label"));
    cr_expect(strstr(label_of("cls", "1.5", 3, &label), "its cls is not a label"));
    cr_expect(strstr(label_of("cls", "2147483648", 10, &label), "its cls is not a label"));
#ifdef HAVE_JANSSON
    static const struct {
        const char *rule, *text, *message; /* without a message, the label is 5 */
    } cases[] = {
        {"json:label", "{\"label\": 5}", NULL},
        {"json:a.b.c", "{\"a\": {\"b\": {\"c\": 5}}}", NULL},
        {"meta.json:label", " {\"label\":5}\n", NULL},
        {"json:label", "{\"Label\": 5}",
         "its json has no field 'label'; name another with --label json:FIELD"},
        {"json:a.b", "{\"a\": 5}", "its json has no field 'a.b'"},
        {"json:a.b", "{\"a.b\": 5}", "its json has no field 'a.b'"},
        {"json:a", "{\"a\": 5.0}", "field 'a' of its json is not an integer of 32 bits"},
        {"json:a", "{\"a\": \"5\"}", "is not an integer of 32 bits"},
        {"json:a", "{\"a\": true}", "is not an integer of 32 bits"},
        {"json:a", "{\"a\": null}", "is not an integer of 32 bits"},
        {"json:a", "{\"a\": 2147483648}", "is not an integer of 32 bits"},
        {"json:a", "{\"a\": 99999999999999999999}", "is not valid JSON"},
        {"json:a", "[5]", "has no field 'a'"},
        {"json:a", "5", "is not valid JSON"},
        {"json:a", "", "is not valid JSON"},
        {"json:a", "{\"a\": 5", "is not valid JSON"},
        {"json:a", "{\"a\": 5, \"a\": 6}", "is not valid JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *says = label_of(cases[i].rule, cases[i].text, strlen(cases[i].text), &label);
        if (cases[i].message)
            cr_expect(strstr(says, cases[i].message), "%s: '%s'", cases[i].text, says);
        else
            cr_expect(!*says && label == 5, "%s: '%s'", cases[i].text, says);
        label = 7;
    }
    char *deep = malloc(100000);
    cr_assert(deep);
    memset(deep, '[', 100000);
    cr_expect(strstr(label_of("json:a", deep, 100000, &label), "is not valid JSON"));
    cr_expect(strstr(label_of("json:a", deep, MEMBER_JSON_BYTES_MAX + 1, &label), "more than the 16777216"));
    free(deep);
#endif
}
