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

/* Moves `*name` to its next component that is not ".". Returns the length of this component, or 0 at `end`.
 */
static size_t find_component(const char **name, const char *end)
{
    for (;; ++*name) {
        while (*name < end && **name == '/')
            ++*name;
        const char *slash = memchr(*name, '/', (size_t)(end - *name));
        size_t length = (size_t)((slash ? slash : end) - *name);
        if (length != 1 || **name != '.')
            return length;
    }
}

size_t key_normal(const char *name, size_t length, char *normal)
{
    const char *end = name + length;
    size_t used = 0, component;
    for (; (component = find_component(&name, end)) > 0; name += component) {
        if (used > 0)
            normal[used++] = '/';
        memcpy(normal + used, name, component);
        used += component;
    }
    normal[used] = '\0';
    return used;
}

bool key_same(const char *key, const char *name, size_t length)
{
    const char *key_end = key + strlen(key), *name_end = name + length;
    if ((size_t)(key_end - key) == length && memcmp(key, name, length) == 0)
        return true; /* nearly always */
    for (size_t component;; key += component, name += component) {
        component = find_component(&key, key_end);
        if (find_component(&name, name_end) != component || memcmp(key, name, component) != 0)
            return false;
        if (component == 0)
            return true;
    }
}
