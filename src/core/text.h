/* Text that comes from outside, such as names of files and keys of samples, on its way to people and into
 * CSV. */
#ifndef FDSL_CORE_TEXT_H
#define FDSL_CORE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "core/portable.h"

FDSL_C_BEGIN

/* Copies `text` into `out`, a buffer of `size` bytes, so that a terminal shows it and does nothing else.
 * Control characters, marks that change the direction of writing and bytes that are not UTF-8 become \n, \r,
 * \t or \xNN; all else stays. So printable text stays as it is, and escaping twice is the same as once. What
 * does not fit is cut between two characters. Returns `out`. */
const char *text_printable(const char *text, char *out, size_t size);

/* Prints `text` to a stream for people, as text_printable() makes it, however long it is. */
void text_print(FILE *stream, const char *text);

/* Writes one field of CSV as in RFC 4180: in quotes where it holds a comma, a quote or a line end. */
void text_csv_field(FILE *stream, const char *text);

/* Counts the records of a CSV text of `size` bytes; a line end in quotes ends none. `*whole`: the last one
 * has its line end. */
uint64_t text_csv_records(const char *text, size_t size, bool *whole);

FDSL_C_END

#endif
