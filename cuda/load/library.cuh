/* Libraries that the program opens with dlopen(), so that it also runs where they are not installed. */
#ifndef FDSL_CUDA_LOAD_LIBRARY_CUH
#define FDSL_CUDA_LOAD_LIBRARY_CUH

#include <string.h>

#include <mutex>

#include "core/status.h"

/* Opens a library with `open` in the first call; later calls return the same status and message. The library
 * stays open until the process ends. Thread safe. Each library needs its own type `Library`, because the
 * static variables exist once per type. */
template <typename Library>
enum status library_open_once(enum status (*open)(Library *library), const Library **library)
{
    static std::mutex lock;
    static Library only;
    static bool tried;
    static enum status status;
    static char reason[512];
    std::lock_guard<std::mutex> guard(lock);
    if (!tried) {
        status = open(&only);
        if (status != STATUS_OK)
            strncpy(reason, status_text(), sizeof reason - 1);
    }
    tried = true;
    *library = &only;
    return status == STATUS_OK ? STATUS_OK : status_set(status, "%s", reason);
}

#endif
