/* cuFile (GPUDirect Storage), loaded at run time. The program starts without the library and builds without
 * its header. This header declares only those documented functions that the program uses. */
#ifndef FDSL_CUDA_LOAD_CUFILE_H
#define FDSL_CUDA_LOAD_CUFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include "core/portable.h"
#include "core/status.h"

struct cufile_error {
    int error; /* 0: success; errors are 5001 and higher */
    int cuda;  /* a CUresult */
};

#define CUFILE_OPAQUE_FD 1

struct cufile_descriptor {
    int type;
    union {
        int fd;
        void *handle;
    } handle;
    const void *operations;
};

struct cufile_properties {
    struct {
        unsigned major, minor; /* version of the Linux driver nvidia-fs; 0 if it is not loaded */
        size_t poll_threshold, direct_max;
        /* `status`: flags for supported file systems and devices. `control`: flags for modes. */
        unsigned status, control;
    } driver;
    unsigned features; /* flags */
    unsigned cache_max, buffer_cache, pinned_max, batch_max, batch_timeout_ms;
};

#define CUFILE_CONTROL_COMPAT (1u << 1) /* reads through host memory are allowed */
#define CUFILE_FEATURE_BATCH  (1u << 1)

struct cufile_request {
    int mode; /* CUFILE_BATCH */
    union {
        struct {
            void *base; /* device memory */
            off_t file_offset, base_offset;
            size_t bytes;
        } batch;
    } u;
    void *file;
    int operation; /* CUFILE_READ */
    void *cookie;
};

#define CUFILE_BATCH 1
#define CUFILE_READ  0

struct cufile_event {
    void *cookie;
    int status; /* one of CUFILE_STATUS_* */
    size_t bytes;
};

#define CUFILE_STATUS_WAITING  0x01
#define CUFILE_STATUS_PENDING  0x02
#define CUFILE_STATUS_COMPLETE 0x10

/* The library's functions. The four batch functions are NULL in library versions without batches. */
struct cufile {
    struct cufile_error (*open_driver)(void);
    struct cufile_error (*properties)(struct cufile_properties *properties);
    struct cufile_error (*register_file)(void **file, struct cufile_descriptor *descriptor);
    void (*deregister_file)(void *file);
    struct cufile_error (*register_buffer)(const void *base, size_t bytes, int flags);
    struct cufile_error (*deregister_buffer)(const void *base);
    ssize_t (*read)(void *file, void *base, size_t bytes, off_t file_offset, off_t base_offset);
    struct cufile_error (*batch_open)(void **batch, unsigned count);
    struct cufile_error (*batch_submit)(void *batch, unsigned count, struct cufile_request *requests,
                                        unsigned flags);
    struct cufile_error (*batch_status)(void *batch, unsigned least, unsigned *count,
                                        struct cufile_event *events, struct timespec *timeout);
    void (*batch_close)(void *batch);
};

FDSL_C_BEGIN

/* Returns STATUS_EXHAUSTED, with a message, if the call that returned `error` failed for lack of memory, else
 * STATUS_OK. */
enum status cufile_memory(struct cufile_error error);

/* Loads the library and opens its driver, once per process. If this fails, returns STATUS_UNAVAILABLE with
 * the reason. */
enum status cufile_open(const struct cufile **library);

/* Queries how cuFile reads. Sets `*direct` to whether the Linux driver nvidia-fs is loaded and reads through
 * host memory are disabled (allow_compat_mode is false in cufile.json). If `*direct` is true, cuFile refuses
 * files that it cannot read directly. cuFile then transfers whole blocks of a file opened with O_DIRECT
 * directly from the disk. Sets `*batches` to whether the library supports batches of reads. Returns
 * STATUS_FAILED if the library does not report its properties. */
enum status cufile_way(const struct cufile *library, bool *direct, bool *batches);

FDSL_C_END

#endif
