/* Text in buffers, lists of words, and escaping of external text, such as file names and sample keys, for
 * terminals and CSV. */
#ifndef FDSL_CORE_TEXT_H
#define FDSL_CORE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Append formatted text to `text`, a string in a buffer of `size` bytes. Both functions truncate text that
 * does not fit. text_join() writes `separator` first, unless `text` is empty. */
void text_append(char *text, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
void text_join(char *text, size_t size, const char *separator, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Closes a stream. Returns whether everything was written. */
bool text_close(FILE *stream);

/* Returns whether `text` ends in `end` and is longer than `end`. */
bool text_ends_in(const char *text, const char *end);

/* Compares two texts as Python compares file names: by the code points of UTF-8, where a byte that is not
 * UTF-8 counts as U+DC00 plus the byte. Returns a negative number, 0 or a positive number, like strcmp(). */
int text_order(const char *a, const char *b);

/* For qsort() and bsearch(): compares two elements of an array of texts by their bytes. */
int text_compare(const void *a, const void *b);

/* Copies `text` into `out`, a buffer of `size` bytes, so that it is safe to print on a terminal. Control
 * characters, line separators, bidirectional marks and invalid UTF-8 become \n, \r, \t or \xNN. Other
 * characters stay the same, so escaping twice equals escaping once. Truncates between characters if `out` is
 * too small. Returns `out`. */
const char *text_printable(const char *text, char *out, size_t size);

/* Prints `text` of any length, escaped like text_printable(). */
void text_print(FILE *stream, const char *text);

/* Prints `text` and a line end, broken between words into lines of at most `width` characters. The caller has
 * already printed `indent` characters of the first line; the other lines start with as many blanks. */
void text_print_wrapped(FILE *stream, const char *text, size_t indent, size_t width);

/* Writes a blank and a word, in quotes if a shell would not read it as it is. */
void text_print_word(FILE *stream, const char *word);

/* Writes one CSV field as in RFC 4180: in quotes if it contains a comma, a quote or a line end. */
void text_csv_field(FILE *stream, const char *text);

/* Returns the number of complete records in a CSV text of `size` bytes. A line end inside quotes does not end
 * a record. `*whole` becomes false if the text ends in the middle of a record. */
uint64_t text_csv_records(const char *text, size_t size, bool *whole);

#define WORD_MAX 63 /* letters; longer words get no suggestion */

/* Returns the candidate that is most similar to `word`, or NULL if none is similar enough to suggest. Words
 * are similar if their edit distance is small or one is a prefix of the other. */
const char *nearest_word(const char *word, const char *const *candidates, size_t count);

/* Writes "a", "a and b" or "a, b and c" into a buffer of `size` bytes, truncated if it does not fit. */
void list_words(char *text, size_t size, const char *const *words, size_t count);

/* Returns whether `word` is one of `words`, which end with NULL. */
bool is_one_of(const char *word, const char *const *words);

/* Removes the blanks and tabs at both ends of `text`, in place. Returns its new start. */
char *trim(char *text);

#endif
