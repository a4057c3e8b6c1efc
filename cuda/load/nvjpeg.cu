#include "load/nvjpeg.h"

#include <dlfcn.h>
#include <string.h>

#include <mutex>

/* The names of the library: without a version from the toolkit's development files, with one for each major
 * version of CUDA. */
static void *open_any(void)
{
    static const char *const names[] = {"libnvjpeg.so.13", "libnvjpeg.so.12", "libnvjpeg.so"};
    void *handle = NULL;
    for (size_t i = 0; !handle && i < COUNT_OF(names); i++)
        handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    return handle;
}

static enum status open_library(struct nvjpeg *library)
{
    const struct {
        const char *name;
        void *pointer;
    } functions[] = {{"nvjpegCreateExV2", &library->create},
                     {"nvjpegDestroy", &library->destroy},
                     {"nvjpegGetHardwareDecoderInfo", &library->engines},
                     {"nvjpegJpegStateCreate", &library->state_create},
                     {"nvjpegJpegStateDestroy", &library->state_destroy},
                     {"nvjpegDecodeBatchedInitialize", &library->batch_begin},
                     {"nvjpegDecodeBatched", &library->batch_decode}};
    void *handle = open_any();
    if (!handle)
        return status_set(
            STATUS_UNAVAILABLE,
            "nvJPEG not found (libnvjpeg.so.13, part of the CUDA toolkit); install it, or decode "
            "with --decoder cpu");
    for (size_t i = 0; i < COUNT_OF(functions); i++) {
        void *symbol = dlsym(handle, functions[i].name);
        if (!symbol)
            return status_set(STATUS_UNAVAILABLE,
                              "the nvJPEG library has no %s; install a newer version, or decode with "
                              "--decoder cpu",
                              functions[i].name);
        /* POSIX allows this conversion of an object pointer to a function pointer. */
        memcpy(functions[i].pointer, &symbol, sizeof symbol);
    }
    return STATUS_OK;
}

enum status nvjpeg_open(const struct nvjpeg **library)
{
    static std::mutex lock;
    static struct nvjpeg only; /* stays open until the process ends */
    static bool tried;
    static enum status status;
    static char reason[512];
    std::lock_guard<std::mutex> guard(lock);
    if (!tried) {
        status = open_library(&only);
        if (status != STATUS_OK)
            strncpy(reason, status_text(), sizeof reason - 1);
    }
    tried = true;
    *library = &only;
    return status == STATUS_OK ? STATUS_OK : status_set(status, "%s", reason);
}
