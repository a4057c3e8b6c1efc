#include "core/words.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "core/text.h"

static bool same_letter(char a, char b)
{
    return tolower((unsigned char)a) == tolower((unsigned char)b);
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Restricted Damerau-Levenshtein distance: insertions, deletions, substitutions and transpositions of
 * neighbours, each letter edited at most once. Ignores case. */
static size_t edit_distance(const char *a, size_t n, const char *b, size_t m)
{
    size_t rows[3][WORD_MAX + 1];
    size_t *before = rows[0], *last = rows[1], *here = rows[2];
    for (size_t j = 0; j <= m; j++)
        last[j] = before[j] = j;
    for (size_t i = 1; i <= n; i++) {
        here[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t cost = last[j - 1] + !same_letter(a[i - 1], b[j - 1]);
            cost = smaller(cost, smaller(last[j], here[j - 1]) + 1);
            if (i > 1 && j > 1 && same_letter(a[i - 1], b[j - 2]) && same_letter(a[i - 2], b[j - 1]))
                cost = smaller(cost, before[j - 2] + 1);
            here[j] = cost;
        }
        size_t *spare = before;
        before = last;
        last = here;
        here = spare;
    }
    return last[m];
}

const char *nearest_word(const char *word, const char *const *candidates, size_t count)
{
    const char *nearest = NULL;
    size_t length = strlen(word), best = SIZE_MAX;
    if (length == 0 || length > WORD_MAX)
        return NULL;
    for (size_t i = 0; i < count; i++) {
        size_t other = strlen(candidates[i]);
        if (other == 0 || other > WORD_MAX)
            continue;
        size_t distance = edit_distance(word, length, candidates[i], other), cost = distance;
        /* If `word` is a prefix of the candidate, the cost is at most 1; if the candidate is a prefix of
         * `word`, at most 2. */
        if (strncasecmp(word, candidates[i], smaller(length, other)) == 0)
            cost = smaller(distance, length < other ? 1 : 2);
        else if (distance > 1 + length / 3 || 2 * distance > length) /* half of the letters must be right */
            continue;
        size_t rank = cost * (WORD_MAX + 1) + distance; /* for equal costs, the smaller distance wins */
        if (rank < best) {
            best = rank;
            nearest = candidates[i];
        }
    }
    return nearest;
}

void list_words(char *text, size_t size, const char *const *words, size_t count)
{
    text[0] = '\0';
    for (size_t i = 0; i < count; i++)
        text_join(text, size, i + 1 == count ? " and " : ", ", "%s", words[i]);
}

bool is_one_of(const char *word, const char *const *words)
{
    while (*words && strcmp(word, *words) != 0)
        words++;
    return *words;
}

char *trim(char *text)
{
    text += strspn(text, " \t");
    size_t length = strlen(text);
    while (length > 0 && strchr(" \t", text[length - 1]))
        length--;
    text[length] = '\0';
    return text;
}
