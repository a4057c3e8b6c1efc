/* Passes inputs of libFuzzer to the target that the environment variable FUZZ_TARGET names.
 * scripts/check/fuzz.sh runs this program. */
#include "targets.h"

#include <stdio.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void (*feed)(const uint8_t *, size_t);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    const char *name = getenv("FUZZ_TARGET");
    for (size_t i = 0; name && i < COUNT_OF(fuzz_targets); i++)
        if (strcmp(name, fuzz_targets[i].name) == 0)
            feed = fuzz_targets[i].feed;
    if (feed)
        return 0;
    fprintf(stderr, "FUZZ_TARGET names no target\n");
    exit(2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    feed(data, size);
    return 0;
}
