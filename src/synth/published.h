/* Published data sets of line formulas, pixel for pixel: RCDB, SegRCDB and VisualAtom as their scripts draw
 * them; and the random numbers of these scripts.
 *
 * Each script runs as several processes ("script threads"). Each of these seeds Python's `random` once, and
 * draws the parameters of its classes and all their images from one stream of numbers. Image (c, i)
 * therefore depends on all numbers before it. This code keeps the state of the stream at the first image of
 * every block: a class, or 20 images of SegRCDB. From there it skips the numbers of the images in between
 * without drawing them.
 *
 * Arithmetic is IEEE double without fused operations, and the noise is float32, as in the scripts. Every
 * machine computes the same bits. */
#ifndef FDSL_SYNTH_PUBLISHED_H
#define FDSL_SYNTH_PUBLISHED_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* ---- Random numbers of Python ---- */

/* MT19937 is the generator of Matsumoto and Nishimura, "Mersenne twister", ACM TOMACS 8(1), 1998. Further
 * functions are the laws by which Python's `random` and NumPy's legacy generator turn its words into
 * numbers, and the float32 noise of the package `noise`. */

/* Before a function: the compiler generates a second version for AVX2, which has vectors of 8 words. The
 * dynamic linker picks one at program start. Both versions give the same bits. */
#if defined(__x86_64__) && defined(__linux__) && !defined(FDSL_SANITIZED)
#define WIDE_CLONES __attribute__((target_clones("default", "avx2")))
#else
#define WIDE_CLONES
#endif

#define TWISTER_WORDS 624

/* The state of a generator: a pure value, which may be copied and stored. */
struct twister {
    uint32_t word[TWISTER_WORDS];
    uint32_t next; /* index of the next word to use; TWISTER_WORDS: all are used */
};

/* Seeds as init_genrand() does; NumPy's seed(seed). */
void twister_seed(struct twister *twister, uint32_t seed);

/* Seeds as init_by_array() does. Python's seed(n) for an integer n passes the 32-bit digits of |n|, the
 * lowest first. count >= 1. */
void twister_seed_array(struct twister *twister, const uint32_t *key, size_t count);

/* Writes the next `count` words to `words`. */
void twister_words(struct twister *twister, uint32_t *words, size_t count);

/* Skips `count` words: the next word is the one that would follow them. About 5 times as fast as drawing
 * them. */
void twister_skip(struct twister *twister, uint64_t count);

/* Replaces the words of the state by the next ones. For twister_word(). */
void twister_renew(struct twister *twister);

/* Returns the next word. */
static inline uint32_t twister_word(struct twister *twister)
{
    if (twister->next >= TWISTER_WORDS)
        twister_renew(twister);
    uint32_t word = twister->word[twister->next++];
    word ^= word >> 11;
    word ^= word << 7 & 0x9d2c5680u;
    word ^= word << 15 & 0xefc60000u;
    return word ^ word >> 18;
}

/* Returns the double in [0, 1) of two words: 53 bits. random() of Python and NumPy. */
static inline double random_of_words(uint32_t first, uint32_t second)
{
    return ((first >> 5) * 67108864.0 + (second >> 6)) * 0x1p-53;
}

static inline double twister_random(struct twister *twister)
{
    uint32_t first = twister_word(twister);
    return random_of_words(first, twister_word(twister));
}

/* Returns uniform(low, high) of Python and NumPy. */
static inline double twister_uniform(struct twister *twister, double low, double high)
{
    return low + (high - low) * twister_random(twister);
}

/* ---- Laws of Python ---- */

/* Returns an integer in [0, bound) by Python's rule: takes the highest bits of a word, as many as `bound`
 * has, until they are below `bound`. bound >= 1. */
static inline uint32_t python_below(struct twister *twister, uint32_t bound)
{
    int shift = __builtin_clz(bound);
    uint32_t value;
    do
        value = twister_word(twister) >> shift;
    while (value >= bound);
    return value;
}

/* Returns randint(low, high): both ends inclusive, fewer than 2^32 values. */
static inline int32_t python_randint(struct twister *twister, int32_t low, int32_t high)
{
    return low + (int32_t)python_below(twister, (uint32_t)(high - low) + 1);
}

/* Returns expovariate(rate). */
double python_expovariate(struct twister *twister, double rate);

/* ---- Laws of NumPy ---- */

/* Returns randint(low, high): high is excluded, low < high. Takes the lowest bits of a word, as many as
 * high - low - 1 has, until they are at most high - low - 1. */
int32_t numpy_randint(struct twister *twister, int32_t low, int32_t high);

/* ---- Noise ---- */

/* Returns pnoise1(position) of the package `noise` with its default parameters. 0 <= position < 2^31. */
float published_noise(float position);

/* Writes pnoise1(uniform(0, 10000)) for each of `count` pairs of words. Bit-identical to published_noise().
 */
void published_noises(const uint32_t *words, size_t count, float *noises);

/* ---- Data sets ---- */

#define PUBLISHED_RES          512  /* pixels per side of every canvas with a published stream */
#define PUBLISHED_VERTICES_MIN 3    /* of a polygon */
#define PUBLISHED_VERTICES_MAX 1000 /* of a polygon */

/* The rules by which a script draws: the order of its draws, and where it rounds. */
enum published_law {
    PUBLISHED_RCDB,
    PUBLISHED_SEGRCDB,
    PUBLISHED_VISUALATOM,
    PUBLISHED_FRACTALDB /* no stream: FAMILY_IFS (formula.h); only points are reproducible */
};

/* A data set that a published script makes. Constant. */
struct published_set {
    const char *name;
    enum published_law law;
    uint32_t threads; /* script thread t is seeded with t + 1, and draws a share of the set */
    uint32_t classes; /* their numbers begin with first_class */
    uint32_t first_class;
    uint64_t instances;    /* images per class; of the set, if an image shows several classes */
    uint32_t block_images; /* images between two stored states: `instances`, or a divisor of a thread's share
                              if an image shows several classes */
    uint32_t res;          /* side of its images: PUBLISHED_RES, except for PUBLISHED_FRACTALDB */
    uint8_t background;
    bool has_masks; /* an image shows several classes */
};

/* One image to draw. */
struct published_image {
    uint32_t class_index; /* 0 if an image shows several classes */
    uint64_t instance;    /* 0 .. set->instances - 1 */
    uint8_t *canvas;      /* res * res grays, row-major, `pitch` bytes per row */
    uint8_t *mask; /* the same for class numbers, 0 for the background; NULL: not wanted. Unchanged if the
                      set has no masks */
    size_t pitch;
    bool plain; /* draw line by line and pixel by pixel, with scalar arithmetic: the reference. Same result */
};

/* Returns the number of stored states. */
static inline uint32_t published_blocks(const struct published_set *set)
{
    return set->has_masks ? (uint32_t)(set->instances / set->block_images) : set->classes;
}

/* The parameters of a class, as the script draws them. Lengths are in pixels. */
struct published_class {
    uint32_t number;
    uint32_t vertices, orbits; /* Vertex, Line_num */
    double noise, line_width;  /* Perlin_noise, line_width */
    uint32_t radius;           /* Center_rad: of the start circle */
    double oval_x, oval_y;     /* Oval_rate_x, Oval_rate_y: stretch of the start circle */
    uint32_t wave1, wave2;     /* nami1, nami2: only VisualAtom */
    double start_h, start_w;   /* start_pos_h, start_pos_w: centre of instance 0; not SegRCDB */
};

/* A data set that is open for drawing. */
struct published;

struct remote_cancel;

/* While `cancel` is set by the calling thread, its openings end with STATUS_FAILED within about a second
 * after cancel->set becomes true, also while they wait for an opening by another thread. NULL: nothing ends
 * them. */
void published_cancel_by(const struct remote_cancel *cancel);

/* Returns what ends the openings of the calling thread, or NULL. Searches of classes end with it, too. */
const struct remote_cancel *published_cancel(void);

/* Opens a set. Reads the states of its streams from the cache folder, or computes them on `threads` threads
 * and stores them there. Shows progress. The folder is $XDG_CACHE_HOME/fdsl-bench, or ~/.cache/fdsl-bench. A
 * damaged file in it is replaced, with a warning. If the folder cannot be written, warns and continues.
 * The set that was opened last is kept, so that opening it again is cheap. Thread-safe. Close with
 * published_close(). STATUS_UNAVAILABLE if cos() or sin() of this C library round differently from those of
 * the published images; STATUS_EXHAUSTED if memory runs out; `*published` is then NULL. */
enum status published_open(const struct published_set *set, int threads, struct published **published);
void published_close(struct published *published);

/* Frees the set that is kept, if it is closed. */
void published_forget(void);

/* Returns set->classes classes, in the order of their numbers, owned by `published`. */
const struct published_class *published_classes(const struct published *published);

/* Draws one image. `scratch` has published_scratch_bytes() bytes, aligned like memory of malloc(). Drawing
 * the instances of a class in ascending order skips nothing twice, in any order of classes and on any thread.
 * Thread-safe: each thread has its own `scratch`. The pixels depend only on the set, the class and the
 * instance. */
void published_draw(const struct published *published, const struct published_image *image, void *scratch);
size_t published_scratch_bytes(const struct published *published);

/* ---- The folder of caches ---- */

/* Stores the path of a file in the cache folder; "" if the environment names no folder. */
void cache_path(const char *name, char path[PATH_MAX]);

/* Creates the folders of a path that do not exist. An error shows when the file is written. */
void cache_make_folders(char *path);

#endif
