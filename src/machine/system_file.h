/* Fields of the files under /proc and /sys that describe the machine. */
#ifndef FDSL_MACHINE_SYSTEM_FILE_H
#define FDSL_MACHINE_SYSTEM_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Finds the first line of `path` that begins with `key`, and copies the text after the key, without leading
 * blanks and colons, to `value`. Many files under /proc and cgroup files have this format. If there is no
 * such line, `value` becomes empty and the result is false. */
bool system_field(const char *path, const char *key, char *value, size_t size);

/* Reads a field as a number. Returns false if it is missing or not a number ("max" in a control group). */
bool system_number(const char *path, const char *key, uint64_t *number);

/* Returns the size at `key` in /proc/meminfo; 0 if it is missing. */
uint64_t system_memory_bytes(const char *key);

#endif
