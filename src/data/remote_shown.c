/* Recognises URLs, and removes their secrets. Apart from remote_url.c, because it needs no connection. */
#include <stdio.h>
#include <string.h>

#include "data/remote.h"

bool remote_is(const char *path)
{
    return strstr(path, "://") != NULL;
}

const char *remote_local(const char *url)
{
    return strncmp(url, "file://", 7) == 0 ? url + 7 : NULL;
}

void remote_shown(const char *url, char *shown, size_t size)
{
    if (!remote_is(url)) {
        snprintf(shown, size, "%s", url);
        return;
    }
    const char *host = strstr(url, "://") + 3, *user = memrchr(host, '@', strcspn(host, "/?"));
    const char *rest = user ? user : host;
    const int length = (int)strcspn(rest, "?");
    snprintf(shown, size, "%.*s%s%.*s%s", (int)(host - url), url, user ? "..." : "", length, rest,
             rest[length] ? "?..." : "");
}
