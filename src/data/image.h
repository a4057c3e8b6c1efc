/* Decoder of images and volumes, shared by the workloads that read them. */
#ifndef FDSL_DATA_IMAGE_H
#define FDSL_DATA_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "core/portable.h"
#include "core/status.h"
#include "data/image_formats.h"
#include "data/jitter.h"
#include "data/npy.h"
#include "data/rand_augment.h"
#include "data/random_draws.h"
#include "data/resample.h"

struct image {
    uint32_t channels, depth, height, width; /* depth is 1 except for volumes */
    enum dtype type;                         /* DTYPE_U8, DTYPE_F16 or DTYPE_F32 */
    bool interleaved; /* the channels of a pixel are adjacent; otherwise each channel is stored as a plane */
    const uint8_t *pixels; /* may be unaligned */
};

/* Returns the number of values. */
static inline size_t image_values(const struct image *image)
{
    return (size_t)image->channels * image->depth * image->height * image->width;
}

/* Memory of a thread that decodes images. Zero it before the first use. It owns its buffers, which grow as
 * needed. */
struct image_scratch {
    uint8_t *pixels; /* pixels of the latest image */
    size_t pixels_bytes;
    uint8_t *turned; /* upright pixels */
    size_t turned_bytes;
    uint8_t *resized; /* resized pixels, in the orientation of the stored image */
    size_t resized_bytes;
    struct jpeg_decoder *jpeg;
    uint64_t
        jpeg_warnings; /* accepted warnings (jpeg_warnings()) in all JPEGs so far; the owner may reset it */
    struct resampler resampler;
    uint32_t width, height; /* of the latest image of image_fit(), upright, before it was cut out */
    /* The header of the latest array: arrays of a data set usually have the same. npy.data 0: none. */
    uint8_t npy_bytes[NPY_HEADER_MAX];
    struct npy_header npy;
};

/* The formats of members. The first bytes of a file decide between formats of images, because files with the
 * extension of another format exist in well-known data sets. */
enum image_format {
    IMAGE_NONE,
    IMAGE_NPY,
    IMAGE_PNG,
    IMAGE_JPEG,
    IMAGE_READ,   /* an image in another format that image_decode() reads, but nothing writes */
    IMAGE_FOREIGN /* an image in a format that image_decode() does not read */
};

FDSL_C_BEGIN

void image_scratch_close(struct image_scratch *scratch);

/* Returns the size of the pixel buffers of `scratch`, in bytes. Memory of libjpeg and the weights of the
 * resampler are not included. */
uint64_t image_scratch_bytes(const struct image_scratch *scratch);

/* Returns the format of a member, from its extension (in any case) and its first bytes. IMAGE_NONE if the
 * extension is neither npy nor one of MEMBERS_IMAGEFOLDER. */
enum image_format image_format(const char *extension, const uint8_t *data, size_t size);

/* Decodes a member. Images are decoded into `scratch`, and are rotated and mirrored as their EXIF
 * data require. The result depends only on the bytes of the member. "npy" becomes a view of `data`, with axes
 * (height, width), (channels, height, width) or (channels, depth, height, width). `*is_image` is false for
 * members of other formats and for all other arrays. STATUS_FAILED, with the reason, for a broken member;
 * STATUS_UNAVAILABLE for a format that this build cannot decode. Each thread needs its own scratch. */
enum status image_decode(const char *extension, const uint8_t *data, size_t size,
                         struct image_scratch *scratch, struct image *image, bool *is_image);

/* Decodes a JPEG to RGB as it is stored: not turned upright, and gray repeated in all channels. This is what
 * decoders of GPUs compute. Otherwise as image_decode(). */
enum status image_decode_stored(const uint8_t *data, size_t size, struct image_scratch *scratch,
                                struct image *image);

/* Checks only the header of an image, without decoding pixels. Sets the shape in `image`, as stored, without
 * pixels. STATUS_OK and no channels for members of other formats; otherwise as image_decode(). */
enum status image_check_header(const char *extension, const uint8_t *data, size_t size,
                               struct image_scratch *scratch, struct image *image);

/* Rejects NaN and Inf in arrays of halves and floats. A network cannot learn from them, and the user would
 * blame the learning rate for the bad loss. STATUS_FAILED with the position of the first one. */
enum status image_check_finite(const struct image *image);

/* Copies the values of an image to `to`, in channel-first order, in the type of the image. An interleaved
 * image has one or three channels. */
void image_store(const struct image *image, uint8_t *to);

/* Grows a buffer of a scratch to at least `bytes` bytes. The old content of the buffer is lost. */
enum status image_room(uint8_t **room, size_t *room_bytes, size_t bytes);

FDSL_C_END

/* ---- Images of one size ----
 * --out-res and --fit. */

enum fit_how {
    FIT_RESIZE,              /* the whole image, resized; a rectangle becomes a square */
    FIT_CROP,                /* a part at a random position, not resized */
    FIT_RANDOM_RESIZED_CROP, /* a random part, resized */
    /* Only for --prepare: the whole image, with its aspect ratio, made smaller until its longer or its
     * shorter side has `res` pixels. An image that is small enough keeps its size. */
    FIT_LONGEST,
    FIT_SHORTEST,
    /* Only for test images: the image is resized with its aspect ratio until its shorter side has res * 256 /
     * 224 pixels, rounded, and the centre is cut out. The longer side is rounded down and the position of the
     * centre to the nearest even number if it is a half, as torchvision does. */
    FIT_CENTRE
};
extern const char
    *const fit_names[]; /* option values, in enum order, NULL-terminated; not those of --prepare */

/* The output has res x res pixels, except for FIT_LONGEST and FIT_SHORTEST. Random parts are functions of the
 * seed, the epoch and the sample. */
#define EXACT_RESIZE_HELP                                                              \
    "decode JPEG files at their full size before they are resized"                     \
    ", as GPUs do. Without it, a JPEG is decoded at 1/2, 1/4 or 1/8 of its size if th" \
    "at is still larger than the output, which is faster and gives slightly different values"
struct image_fit {
    enum fit_how how;
    uint32_t res;      /* 0: images keep their size, and the other fields are ignored */
    uint32_t channels; /* 1 or 3; 0: as stored */
    uint64_t seed;
    bool unscaled; /* decode every JPEG at its full size, as GPUs do */
    bool whole;    /* decode every JPEG to its end, so that a broken file is found with every random part;
                      otherwise the rows below the part are not read, which is faster */
    enum resample_choice filter; /* of FIT_RANDOM_RESIZED_CROP; the others are bilinear */
    struct crop_range range;     /* of FIT_RANDOM_RESIZED_CROP */
    struct image raw; /* the shape and the type of members that are values without a header; with 0 channels:
                         members have a header. Counts also if `res` is 0 */
};

#define FIT_RES_MAX        16384
#define CROP_SCALE_MIN     1e-4
#define CROP_RATIO_MAX     7.0 /* of width / height; box_exp() has a limit */

#define CROP_SCALE_DEFAULT "0.08,1"
#define CROP_RATIO_DEFAULT "0.75,1.3333"

/* The values of the options below. NULL, both: the workload does not have them. */
struct crop_parameters {
    const char *scale, *ratio;
};

/* Rows of the option tables of workloads with --fit random-resized-crop. `at`: offset of the struct
 * crop_parameters in the workload's parameters. */
#define CROP_OPTIONS(at)                                                                                  \
    OPTION_ROW("crop-scale", "MIN,MAX", OPTION_TEXT, (at) + offsetof(struct crop_parameters, scale),      \
               .fallback = CROP_SCALE_DEFAULT, .column = COLUMN,                                          \
               .help = "range of the area of the parts that --fit random-resized-crop cuts out, as a "    \
                       "fraction of the image; `scale` of torchvision's RandomResizedCrop"),              \
        OPTION_ROW("crop-ratio", "MIN,MAX", OPTION_TEXT, (at) + offsetof(struct crop_parameters, ratio),  \
                   .fallback = CROP_RATIO_DEFAULT, .column = COLUMN,                                      \
                   .help = "range of width / height of these parts, before they are resized; `ratio` of " \
                           "torchvision's RandomResizedCrop")

FDSL_C_BEGIN

/* Sets the parts that random-resized-crop cuts out. STATUS_USAGE if a value is out of range: scale[] must be
 * in CROP_SCALE_MIN to 1, ratio[] in 1 / CROP_RATIO_MAX to CROP_RATIO_MAX, both in order. The message begins
 * with names[0] or names[1]. */
enum status crop_range_set(const char *const names[2], const double *scale, const double *ratio,
                           struct crop_range *range);

/* Reads the options. STATUS_USAGE with the name of the option. */
enum status crop_read(const struct crop_parameters *parameters, struct crop_range *range);

/* Returns the part of an upright image of width x height pixels that becomes the output.
 *
 * FIT_RANDOM_RESIZED_CROP follows torchvision's RandomResizedCrop: the area is uniform between 8 % and 100 %
 * of the image, and the logarithm of width / height is uniform between log(3/4) and log(4/3), or in
 * fit->range. Both are drawn up to ten times, until the rectangle fits. If none fits, the result is the
 * largest rectangle at the centre whose ratio of the sides is in the range. Philox counter of each attempt:
 * attempt, sample, epoch. */
struct image_box image_fit_box(const struct image_fit *fit, uint32_t width, uint32_t height, uint32_t epoch,
                               uint32_t sample);

/* Computes the part of a stored JPEG that becomes the output, and the orientation that turns the resized part
 * upright. STATUS_FAILED if the image is too small for FIT_CROP. */
enum status image_fit_part(const struct image_fit *fit, const struct jpeg_shape *shape, uint32_t epoch,
                           uint32_t sample, struct image_box *stored, struct orientation *turn);

/* Decodes a member and fits it; if fit->res is 0, only decodes it. With fit->raw, `extension` is ignored.
 * `*image` has interleaved bytes, in `scratch`; all frames of a clip, which is an array with a depth above 1,
 * are fitted alike, and its bytes are planes. Where the format permits, only the part that is needed is
 * decoded. Unless fit->unscaled is set, a JPEG is decoded at 1/2, 1/4 or 1/8 of its size if the scaled part
 * is still larger than the output. Gray is converted to three channels by repetition; colour is converted to
 * one channel as 0.299 R + 0.587 G + 0.114 B. `*is_image` is false for members that are not images.
 * STATUS_FAILED, with the reason, if the member is broken, if the values of an array are not bytes, with
 * FIT_CROP, if the image is smaller than the output, or with FIT_CENTRE, if the resized image would be longer
 * than FIT_RES_MAX pixels. Each thread needs its own scratch. */
enum status image_fit(const struct image_fit *fit, const char *extension, const uint8_t *data, size_t size,
                      uint32_t epoch, uint32_t sample, struct image_scratch *scratch, struct image *image,
                      bool *is_image);

/* Returns at least the number of bytes that image_store_rgb() writes if image_fit_whole() accepts the image,
 * of which only the header is read; 0 if it does not accept it. */
size_t image_whole_bytes(const struct image_fit *fit, const char *extension, const uint8_t *data, size_t size,
                         struct image_scratch *scratch);

/* Decodes a whole image, as it is stored, for image_fit_part() and a kernel that cuts out and resizes parts:
 * their result is that of image_fit(), with any random part. Sets `*shape`, and `*image` to bytes in
 * `scratch` or in `data`. Returns false if the image is broken, if image_fit() would decode a part of it at a
 * smaller size, or if it is too large for the kernel; image_fit() then has to fit it. */
bool image_fit_whole(const struct image_fit *fit, const char *extension, const uint8_t *data, size_t size,
                     struct image_scratch *scratch, struct jpeg_shape *shape, struct image *image);

/* Copies the pixels of an image of bytes with one or three channels and a depth of 1 to `to`, as RGB,
 * interleaved: 3 * width * height bytes. Gray is repeated. */
void image_store_rgb(const struct image *image, uint8_t *to);

/* An image whose mask is wanted: its upright size before it is cut out, the arguments of image_fit(), and
 * whether it is mirrored afterwards. */
struct image_view {
    uint32_t width, height, epoch, sample;
    bool mirrored;
};

/* Decodes the mask of an image: a PNG file of 8-bit gray, of the size of the upright image; each byte is the
 * number of a class. Writes the part that image_fit() makes of the image to `to`, one byte per pixel. Where n
 * pixels are made of m pixels, pixel j has the class of pixel (2j + 1)m / 2n, rounded down. With fit->res 0,
 * this is the whole mask. STATUS_FAILED, with the reason, for a broken mask, another kind of image or another
 * size. */
enum status image_fit_mask(const struct image_fit *fit, const struct image_view *of, const uint8_t *data,
                           size_t size, struct image_scratch *scratch, uint8_t *to);

/* Checks from its header that a file is a mask of an upright image of width x height pixels: a PNG of 8-bit
 * gray or with a palette, of this size. STATUS_FAILED, with the reason. */
enum status image_check_mask(const uint8_t *data, size_t size, uint32_t width, uint32_t height);

/* Does the same with the header of the image. Unlike image_fit_mask(), it also accepts a mask of height x
 * width pixels, because the image may be rotated, and any size if the member is no image. */
enum status image_check_masked(const char *extension, const uint8_t *data, size_t size, const uint8_t *mask,
                               size_t mask_size, struct image_scratch *scratch);

/* Does the same as image_fit() with fit->res > 0, except for a member whose upright image already has the
 * size and the channels of the output. For such a member, sets `*same` and does not set `*image`. Not for
 * FIT_CENTRE. */
enum status image_fit_other(const struct image_fit *fit, const char *extension, const uint8_t *data,
                            size_t size, uint32_t sample, struct image_scratch *scratch, struct image *image,
                            bool *is_image, bool *same);

FDSL_C_END

/* ---- JPEG files that a device decodes ----
 * A device decodes a whole JPEG as it is stored. It then cuts out and resizes the part that image_fit_part()
 * computes. */

enum decoder {
    DECODER_AUTO,     /* the first that this machine has: hardware, hybrid, else CPU */
    DECODER_HARDWARE, /* the JPEG engines of the GPU */
    DECODER_HYBRID,   /* CUDA kernels of nvJPEG */
    DECODER_CPU
};
extern const char *const decoder_names[]; /* option values, in enum order, NULL-terminated */

/* Limits of the images that a device decodes. nvJPEG and libjpeg interpolate chroma differently in images
 * that are narrower than PICTURE_WIDTH_MIN. */
#define PICTURE_WIDTH_MIN  8
#define PICTURE_SIDE_MAX   16384
#define PICTURE_PIXELS_MAX (UINT32_C(1) << 26)
#define PICTURE_SCALE_MAX  100 /* maximum ratio of width or height to --out-res */

FDSL_C_BEGIN

/* Returns whether a device can decode a JPEG with this header, and fit it to res x res pixels. */
bool image_suits_device(const struct jpeg_shape *shape, uint32_t res);

/* Returns whether a device decodes this file to the pixels that libjpeg decodes, except for rounding: a JPEG
 * with such a header and with complete markers (jpeg_intact()), so it ends with the marker EOI. Sets `*shape`
 * if it does. If it does not, image_fit() must decode the file, or report what is wrong with it. Reads all
 * bytes of the file, but decodes nothing. */
bool image_for_device(const char *extension, const uint8_t *data, size_t size, uint32_t res,
                      struct image_scratch *scratch, struct jpeg_shape *shape);

FDSL_C_END

/* ---- The form in which a stream stores images ---- */

/* The form in which a stream stores the images and clips of bytes that it decodes: mirrored or not, changed
 * by RandAugment and colour jitter, normalised, partly erased, in any element type and order of axes. With
 * the same seed, the random changes are those of training (train/augment.h). A clip, whose frames are its
 * depth, is changed as a whole. */

#define IMAGE_OUTPUT_CHANNELS_MAX 3

/* Set it with image_output_set(). A byte has only 256 values, so each output value is read from a table. */
struct image_output {
    enum dtype type;
    bool interleaved; /* true: NHWC, and frames before rows; false: NCHW */
    bool frames;      /* clips, if not interleaved: frames before channels */
    bool flip;        /* mirror each image horizontally with probability 1/2 (draw_flip()) */
    /* RandAugment after the flip, if rand.operations is not 0. */
    struct rand_augment rand; /* only with a depth of 1 */
    struct jitter color;      /* after RandAugment */
    /* With probability `erasing`, a rectangle becomes noise. Only `erasing`, `height` and `width` are used.
     */
    struct augment erase;
    uint64_t seed; /* of all random changes */
    /* A value is byte * scale + offset, rounded once to float and then to the type. */
    float scale[IMAGE_OUTPUT_CHANNELS_MAX], offset[IMAGE_OUTPUT_CHANNELS_MAX];
    union {
        uint8_t u8[256];
        uint16_t f16[256]; /* also bf16 */
        float f32[256];
    } values[IMAGE_OUTPUT_CHANNELS_MAX]; /* per channel, by byte */
};

/* Returns whether bytes change before they are stored. */
static inline bool image_output_changes(const struct image_output *output)
{
    return output->rand.operations > 0 || jitter_on(&output->color);
}

FDSL_C_BEGIN

/* Sets `type`, `interleaved`, `values`, `scale` and `offset`. Values are (byte / 255 - mean) / deviation,
 * computed as byte * scale + offset in float, as data_gather() does for training, and rounded to the type;
 * with DTYPE_U8, they are the bytes. `mean` and `deviation` have one value per channel. */
void image_output_set(struct image_output *output, enum dtype type, bool interleaved, const double *mean,
                      const double *deviation);

/* Stores an image of bytes with at most IMAGE_OUTPUT_CHANNELS_MAX channels. `to` has room for its values, and
 * is aligned to one of them. `scratch` has room for the bytes of two images; it is only used if
 * image_output_changes(). Thread safe. */
void image_output_store(const struct image_output *output, const struct image *image, uint32_t epoch,
                        uint32_t number, uint8_t *scratch, void *to);

FDSL_C_END

#endif
