/* The part of a ring that decodes images (--decode). A worker decodes the JPEG files of a chunk on the
 * device, and all other images in its own thread. Then one kernel fits all images into their slots. */
#ifndef FDSL_CUDA_LOAD_RING_DECODE_CUH
#define FDSL_CUDA_LOAD_RING_DECODE_CUH

#include "load/ring.cuh"

/* Opens the decoder of a ring and computes the room for pixels, ring->room. Call after the sizes of the
 * ring's buffers are known. The caller then adds ring->room.fitted to the size of a buffer. */
enum status ring_decode_begin(struct ring *ring, const struct load *load);

/* Allocates a worker's memory for decoding. The caller closes it with ring_decode_close(), even after a
 * failure. */
enum status ring_decode_open(struct ring_worker *worker);
void ring_decode_close(struct ring_worker *worker);

/* Adds the room that the image of a sample needs to `*room`. Returns whether it still fits. */
bool ring_decode_fits(const struct ring *ring, uint32_t sample, struct picture_room *room);

/* Decodes the images of a chunk in host buffer `index`. `entries` are the `*count` entries of the chunk's
 * table; entries of broken images are removed, and their samples recorded as lost. Writes the fit entries
 * (struct fit_entry) to the buffer, from `*end` on. After them, writes the pixels of images that this thread
 * decoded. Sets `*fits` to the offset of the fit entries, and `*end` to the end of the pixels. */
enum status ring_decode(struct ring_worker *worker, uint32_t index, struct unpack_entry *entries,
                        uint32_t *count, uint64_t *fits, uint64_t *end);

/* Launches the kernel that fits the images of the chunk whose fit entries are at `fits` in device buffer
 * `index`. */
enum status ring_decode_launch(const struct ring_worker *worker, uint32_t index, uint64_t fits,
                               uint32_t count, cudaStream_t stream);

/* Measures the rate of nvJPEG alone, in bytes of samples per second. The first images of the data set are in
 * pinned memory; one thread decodes batches of 256 of them. Requires an image that the device decodes. */
enum status ring_decode_rate(struct ring *ring, double *bytes_per_s);

#endif
