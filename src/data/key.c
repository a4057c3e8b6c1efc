#include "data/key.h"

#include <string.h>

/* Returns whether a name is "__x__" or "__x__/...", which writers of shards reserve for their metadata. */
static bool is_reserved(const char *name)
{
    size_t first = strcspn(name, "/");
    return first >= 4 && strncmp(name, "__", 2) == 0 && strncmp(name + first - 2, "__", 2) == 0;
}

bool key_split(const char *name, size_t *key_length, const char **extension)
{
    const char *slash = strrchr(name, '/'), *last = slash ? slash + 1 : name;
    const char *dot = strchr(last, '.');
    if (!dot || dot == last || dot[1] == '\0' || is_reserved(name))
        return false;
    *key_length = (size_t)(dot - name);
    *extension = dot + 1;
    return true;
}
