/* nvJPEG, loaded at run time. The program starts without the library and builds without its header. This
 * header declares only those documented functions that the program uses. */
#ifndef FDSL_CUDA_LOAD_NVJPEG_H
#define FDSL_CUDA_LOAD_NVJPEG_H

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

#define NVJPEG_OK                      0
#define NVJPEG_INTERLEAVED_RGB         5         /* output: three bytes per pixel */
#define NVJPEG_INTERPOLATED_UPSAMPLING (1u << 5) /* flag: same as "fancy upsampling" of libjpeg */

enum nvjpeg_backend {
    NVJPEG_GPU_HYBRID =
        2, /* decodes Huffman codes on the CPU, or on the GPU in batches of more than 50 images */
    NVJPEG_HARDWARE = 3 /* the GPU's JPEG engines */
};

struct nvjpeg_image {
    uint8_t *channel[4]; /* device memory; interleaved pixels use only the first */
    size_t pitch[4];     /* bytes per row */
};

/* Memory functions that nvJPEG calls. They return 0 or a CUDA error. */
struct nvjpeg_device_memory {
    int (*allocate)(void *context, void **memory, size_t bytes, cudaStream_t stream);
    int (*release)(void *context, void *memory, size_t bytes, cudaStream_t stream);
    void *context;
};
struct nvjpeg_pinned_memory {
    int (*allocate)(void *context, void **memory, size_t bytes, cudaStream_t stream);
    int (*release)(void *context, void *memory, size_t bytes, cudaStream_t stream);
    void *context;
};

typedef struct nvjpegHandle *nvjpeg_handle;
typedef struct nvjpegJpegState *nvjpeg_state;

/* The library's functions. They return NVJPEG_OK or another nvjpegStatus_t. */
struct nvjpeg {
    int (*create)(int backend, struct nvjpeg_device_memory *device, struct nvjpeg_pinned_memory *pinned,
                  unsigned flags, nvjpeg_handle *handle);
    int (*destroy)(nvjpeg_handle handle);
    int (*engines)(nvjpeg_handle handle, unsigned *engines, unsigned *cores);
    int (*state_create)(nvjpeg_handle handle, nvjpeg_state *state);
    int (*state_destroy)(nvjpeg_state state);
    int (*batch_begin)(nvjpeg_handle handle, nvjpeg_state state, int images, int threads, int format);
    int (*batch_decode)(nvjpeg_handle handle, nvjpeg_state state, const uint8_t *const *bytes,
                        const size_t *sizes, struct nvjpeg_image *images, cudaStream_t stream);
};

/* Opens the library, once per process. STATUS_UNAVAILABLE, with the remedy, if it is missing or too old.
 * Thread safe. */
enum status nvjpeg_open(const struct nvjpeg **library);

#endif
