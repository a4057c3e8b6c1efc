/* The random numbers of the published Python scripts: MT19937, and the laws by which Python's `random` and
 * NumPy's legacy generator turn its words into numbers; the float32 noise of the package `noise`.
 *
 * MT19937 is the generator of Matsumoto and Nishimura, "Mersenne twister", ACM TOMACS 8(1), 1998. Arithmetic
 * is IEEE double without fused operations, so every machine computes the same bits. */
#ifndef FDSL_SYNTH_PUBLISHED_RANDOM_H
#define FDSL_SYNTH_PUBLISHED_RANDOM_H

#include <stddef.h>
#include <stdint.h>

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

#endif
