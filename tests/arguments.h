/* Helpers for the command lines of tests. A line begins with the default options of a suite. The options of
 * one test follow and override them. */
#ifndef FDSL_TESTS_ARGUMENTS_H
#define FDSL_TESTS_ARGUMENTS_H

#include <string.h>

/* Keeps only the last occurrence of each option and its value, because the program refuses an option that is
 * given twice. `count` is the number of words. Returns how many words remain. */
static inline size_t drop_repeated(char **words, size_t count)
{
    for (size_t i = 0; i < count;) {
        size_t length = strcspn(words[i], "="), taken = 1, later = i + 1;
        if (i + 1 < count && words[i][length] != '=' && strncmp(words[i + 1], "--", 2) != 0)
            taken = 2;
        while (later < count &&
               !(strncmp(words[later], words[i], length) == 0 && strcspn(words[later], "=") == length))
            later++;
        if (strncmp(words[i], "--", 2) != 0 || later == count) {
            i++;
            continue;
        }
        memmove(words + i, words + i + taken, (count - i - taken) * sizeof *words);
        count -= taken;
    }
    return count;
}

/* Applies drop_repeated() in place to a line of words separated by blanks. */
static inline void drop_repeated_in(char *line)
{
    char copy[8192], *words[512], *rest = copy, *word;
    size_t count = 0;
    strcpy(copy, line);
    while (count < 512 && (word = strsep(&rest, " ")))
        if (*word)
            words[count++] = word;
    count = drop_repeated(words, count);
    *line = '\0';
    for (size_t i = 0; i < count; i++)
        strcat(strcat(line, i ? " " : ""), words[i]);
}

#endif
