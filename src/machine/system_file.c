#include "machine/system_file.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool system_field(const char *path, const char *key, char *value, size_t size)
{
    char line[PATH_MAX + 64];
    bool found = false;
    value[0] = '\0';
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    while (!found && fgets(line, sizeof line, file))
        found = strncmp(line, key, strlen(key)) == 0;
    fclose(file);
    if (!found)
        return false;
    const char *text = line + strlen(key);
    text += strspn(text, " \t:");
    snprintf(value, size, "%.*s", (int)strcspn(text, "\n"), text);
    return true;
}

bool system_number(const char *path, const char *key, uint64_t *number)
{
    char text[64], *end;
    if (!system_field(path, key, text, sizeof text))
        return false;
    *number = strtoull(text, &end, 10);
    return end != text;
}

uint64_t system_memory_bytes(const char *key)
{
    uint64_t kib = 0;
    return system_number("/proc/meminfo", key, &kib) ? kib * 1024 : 0;
}
