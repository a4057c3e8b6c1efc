/* Lists of words: the nearest word to a misspelled one, and texts for messages. */
#ifndef FDSL_CORE_WORDS_H
#define FDSL_CORE_WORDS_H

#include <stdbool.h>
#include <stddef.h>

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
