#include "load/nvjpeg.h"

#include <dlfcn.h>
#include <string.h>

#include "load/library.cuh"

/* libnvjpeg.so.N is the library of CUDA N. The name without a number exists only if the toolkit's development
 * files are installed. */
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
    return library_open_once(open_library, library);
}
