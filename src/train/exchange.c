#include "train/exchange.h"

#include <stdio.h>
#include <string.h>

/* All methods, in the order of preference of --sync auto. */
#define METHODS(METHOD) METHOD(mpi)

#define ADDRESS(name)   &exchange_##name,
#define NAME(name)      #name,
static const struct exchange_method *const methods[] = {METHODS(ADDRESS)};
const char *const exchange_names[] = {"auto", METHODS(NAME) NULL};

enum status exchange_find(int sync, const struct engine *engine, const struct exchange_method **method)
{
    char reasons[512] = "";
    size_t first = sync > 0 ? (size_t)sync - 1 : 0, end = sync > 0 ? first + 1 : COUNT_OF(methods);
    for (size_t i = first; i < end; i++) {
        size_t used = strlen(reasons);
        *method = methods[i];
        if (methods[i]->probe(engine) == STATUS_OK)
            return STATUS_OK;
        snprintf(reasons + used, sizeof reasons - used, "%s%s: %s", used ? "; " : "", methods[i]->name,
                 status_text());
    }
    return status_set(STATUS_UNAVAILABLE, "it cannot train on several ranks here (--sync %s)", reasons);
}
