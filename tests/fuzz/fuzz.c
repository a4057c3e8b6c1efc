/* Passes inputs of libFuzzer to the target that the environment variable FUZZ_TARGET names.
 * scripts/check/fuzz.sh runs this program. With FUZZ_FILES, it needs no libFuzzer and passes the files that
 * its arguments name: scripts/check/threads.sh runs it under ThreadSanitizer. */
#include "targets.h"

#include <stdio.h>

#include "core/file.h"

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

#ifdef FUZZ_FILES
int main(int argc, char **argv)
{
    LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 1; i < argc; i++) {
        char *bytes;
        size_t size;
        if (file_read(argv[i], &bytes, &size) != STATUS_OK)
            return 1;
        feed((const uint8_t *)bytes, size);
        free(bytes);
    }
    return argc < 2;
}
#endif
