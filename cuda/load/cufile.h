/* cuFile (GPUDirect Storage), opened at run time: the program needs no library to start, and no header to
 * build. The declarations are those of the interface's documentation, as far as they are used here. */
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
    int error; /* 0, or from 5001 on */
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
        unsigned major, minor; /* of the kernel's driver; 0: there is none */
        size_t poll_threshold, direct_max;
        unsigned status, control; /* flags: file systems and devices that are served; how */
    } driver;
    unsigned features; /* flags */
    unsigned cache_max, buffer_cache, pinned_max, batch_max, batch_timeout_ms;
};

#define CUFILE_CONTROL_COMPAT (1u << 1) /* reads by way of host memory are allowed */
#define CUFILE_FEATURE_BATCH  (1u << 1)

struct cufile_request {
    int mode; /* CUFILE_BATCH */
    union {
        struct {
            void *base; /* of device memory */
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

/* The library's functions. The last four are NULL in versions without batches. */
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

/* The library with its driver open, once for the process. STATUS_UNAVAILABLE with the reason. */
enum status cufile_open(const struct cufile **library);

/* How it reads: `*direct` only where the kernel's driver is there and nothing may be read by way of host
 * memory (allow_compat_mode false in cufile.json), as files that cannot be read directly are then refused;
 * what is open with O_DIRECT, and read by whole blocks, comes straight from the disk then. STATUS_FAILED
 * where the driver does not tell. */
enum status cufile_way(const struct cufile *library, bool *direct, bool *batches);

FDSL_C_END

#endif
