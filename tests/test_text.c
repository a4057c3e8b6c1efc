/* Tests the escaping of external text for terminals and CSV. */
#include <criterion/criterion.h>

#include <stdlib.h>

#include "core/portable.h"
#include "core/text.h"

static const struct {
    const char *text, *shown;
} cases[] = {
    {"", ""},
    {"plain text, \\ and \"quotes\"", "plain text, \\ and \"quotes\""},
    {"\u00e9\u20ac\U0001F600", "\u00e9\u20ac\U0001F600"},
    {"\x1b[2J\x07", "\\x1b[2J\\x07"},
    {"a\tb\nc\rd\x7f", "a\\tb\\nc\\rd\\x7f"},
    {"\xc2\x9b"
     "31m",
     "\\xc2\\x9b31m"}, /* CSI, as UTF-8 */
    {"\x9b"
     "31m",
     "\\x9b31m"}, /* CSI, as a single byte */
    {"\xe2\x80\xae"
     "gnp.exe",
     "\\xe2\\x80\\xaegnp.exe"}, /* right-to-left override */
    {"\xe2\x81\xa6", "\\xe2\\x81\\xa6"},
    {"\xe2\x80\xa8", "\\xe2\\x80\\xa8"}, /* a line separator */
    {"\xff\xfe", "\\xff\\xfe"},
    {"\xc0\x80", "\\xc0\\x80"}, /* an overlong encoding */
    {"\xe0\x82\x80", "\\xe0\\x82\\x80"},
    {"\xf0\x80\x80\x80", "\\xf0\\x80\\x80\\x80"},
    {"\xed\xa0\x80", "\\xed\\xa0\\x80"},          /* a surrogate */
    {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"}, /* above U+10FFFF */
    {"\xe2\x82", "\\xe2\\x82"},                   /* truncated character */
    {"x\xe2\x82y", "x\\xe2\\x82y"},
};

Test(text, unprintable_characters_are_escaped)
{
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char shown[64], again[64], *printed = NULL;
        size_t size;
        cr_expect_str_eq(text_printable(cases[i].text, shown, sizeof shown), cases[i].shown);
        cr_expect_str_eq(text_printable(shown, again, sizeof again), shown,
                         "escaped text must not be escaped again");
        FILE *stream = open_memstream(&printed, &size);
        text_print(stream, cases[i].text);
        cr_assert(fclose(stream) == 0);
        cr_expect_str_eq(printed, cases[i].shown);
        free(printed);
    }
}

/* Tests all texts of two bytes. The buffer has no room for more, so that a sanitizer detects reads past the
 * end of the text. */
Test(text, control_bytes_are_always_escaped)
{
    for (unsigned i = 0x0101; i < 0x10000; i++) {
        char *text = malloc(3), shown[16];
        text[0] = (char)(i >> 8);
        text[1] = (char)(i & 0xFF);
        text[2] = '\0';
        text_printable(text, shown, sizeof shown);
        for (const char *c = shown; *c; c++)
            cr_assert((unsigned char)*c >= ' ' && *c != 127, "%04x", i);
        free(text);
    }
}

Test(text, long_text_is_truncated_between_characters)
{
    static const char text[] = "a\u20ac\x1b";
    static const char *const shown[] = {"",        "",        "a",       "a",       "a",
                                        "a\u20ac", "a\u20ac", "a\u20ac", "a\u20ac", "a\u20ac\\x1b"};
    for (size_t size = 1; size < COUNT_OF(shown); size++) {
        char *out = malloc(size);
        cr_expect_str_eq(text_printable(text, out, size), shown[size], "%zu", size);
        free(out);
    }
}

Test(text, csv_fields_are_quoted_as_needed)
{
    static const struct {
        const char *text, *field;
    } fields[] = {{"", ""},
                  {"a b", "a b"},
                  {"a,b", "\"a,b\""},
                  {"a\nb", "\"a\nb\""},
                  {"a\rb", "\"a\rb\""},
                  {"say \"a\"", "\"say \"\"a\"\"\""}};
    for (size_t i = 0; i < COUNT_OF(fields); i++) {
        char *written = NULL;
        size_t size;
        FILE *stream = open_memstream(&written, &size);
        text_csv_field(stream, fields[i].text);
        cr_assert(fclose(stream) == 0);
        cr_expect_str_eq(written, fields[i].field);
        free(written);
    }
}

Test(text, csv_records_are_counted)
{
    bool whole;
    cr_expect(text_csv_records("", 0, &whole) == 0 && whole);
    cr_expect(text_csv_records("a\nb\n", 4, &whole) == 2 && whole);
    cr_expect(text_csv_records("a\nb", 3, &whole) == 1 && !whole);
    cr_expect(text_csv_records("\"a\nb\",c\n", 8, &whole) == 1 && whole);
    cr_expect(text_csv_records("\"a\"\"\n\"\nb\n", 9, &whole) == 2 && whole);
    cr_expect(text_csv_records("\"a\n", 3, &whole) == 0 && !whole);
}
