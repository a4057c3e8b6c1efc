#include "load/cufile.h"

#include <dlfcn.h>
#include <string.h>

#include "common/exhausted.h"
#include "load/library.cuh"

static enum status load_functions(void *handle, struct cufile *library)
{
    const struct {
        const char *name;
        void *pointer;
        bool optional;
    } functions[] = {{"cuFileDriverOpen", &library->open_driver, false},
                     {"cuFileDriverGetProperties", &library->properties, false},
                     {"cuFileHandleRegister", &library->register_file, false},
                     {"cuFileHandleDeregister", &library->deregister_file, false},
                     {"cuFileBufRegister", &library->register_buffer, false},
                     {"cuFileBufDeregister", &library->deregister_buffer, false},
                     {"cuFileRead", &library->read, false},
                     {"cuFileBatchIOSetUp", &library->batch_open, true},
                     {"cuFileBatchIOSubmit", &library->batch_submit, true},
                     {"cuFileBatchIOGetStatus", &library->batch_status, true},
                     {"cuFileBatchIODestroy", &library->batch_close, true}};
    for (size_t i = 0; i < COUNT_OF(functions); i++) {
        void *symbol = dlsym(handle, functions[i].name);
        if (!symbol && !functions[i].optional)
            return status_set(STATUS_UNAVAILABLE, "the cuFile library has no %s; install a newer version",
                              functions[i].name);
        /* POSIX allows this conversion of an object pointer to a function pointer. */
        memcpy(functions[i].pointer, &symbol, sizeof symbol);
    }
    return STATUS_OK;
}

enum status cufile_memory(struct cufile_error error)
{
    return gpu_status_of(LIBRARY_CUFILE, error.error, error.cuda, 0) == STATUS_EXHAUSTED
               ? status_set(STATUS_EXHAUSTED, "out of memory for cuFile (error %d)", error.error)
               : STATUS_OK;
}

static enum status open_library(struct cufile *library)
{
    void *handle = dlopen("libcufile.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return status_set(STATUS_UNAVAILABLE,
                          "cuFile not found; install libcufile.so.0, which is part of the CUDA toolkit: %s",
                          dlerror());
    TRY(load_functions(handle, library));
    struct cufile_error opened = library->open_driver();
    if (opened.error == 0)
        return STATUS_OK;
    TRY(cufile_memory(opened));
    return status_set(STATUS_UNAVAILABLE,
                      "cannot open cuFile's driver (error %d): set up GPUDirect Storage, or enable "
                      "compatibility mode (allow_compat_mode in cufile.json)",
                      opened.error);
}

enum status cufile_open(const struct cufile **library)
{
    return library_open_once(open_library, library);
}

enum status cufile_way(const struct cufile *library, bool *direct, bool *batches)
{
    struct cufile_properties properties = {};
    struct cufile_error got = library->properties(&properties);
    if (got.error != 0)
        return status_set(STATUS_FAILED, "cannot query cuFile's properties (error %d)", got.error);
    bool driver = properties.driver.major > 0 && properties.driver.status != 0;
    *direct = driver && !(properties.driver.control & CUFILE_CONTROL_COMPAT);
    *batches = library->batch_open && library->batch_submit && library->batch_status &&
               library->batch_close && (properties.features & CUFILE_FEATURE_BATCH);
    return STATUS_OK;
}
