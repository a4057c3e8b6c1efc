#include "synth/published_random.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

#include "synth/atom.h"
#include "synth/published_parts.h"

/* ---- MT19937 ---- */

enum { SHIFT = 397 }; /* word i of the next state depends on words i, i + 1 and i + SHIFT of this one */

static inline uint32_t twist(uint32_t word, uint32_t following)
{
    uint32_t joined = (word & 0x80000000u) | (following & 0x7fffffffu);
    return joined >> 1 ^ (-(following & 1) & 0x9908b0dfu);
}

WIDE_CLONES void twister_renew(struct twister *twister)
{
    uint32_t *word = twister->word;
    for (int i = 0; i < TWISTER_WORDS - SHIFT; i++)
        word[i] = word[i + SHIFT] ^ twist(word[i], word[i + 1]);
    for (int i = TWISTER_WORDS - SHIFT; i < TWISTER_WORDS - 1; i++)
        word[i] = word[i - (TWISTER_WORDS - SHIFT)] ^ twist(word[i], word[i + 1]);
    word[TWISTER_WORDS - 1] = word[SHIFT - 1] ^ twist(word[TWISTER_WORDS - 1], word[0]);
    twister->next = 0;
}

void twister_seed(struct twister *twister, uint32_t seed)
{
    for (uint32_t i = 0; i < TWISTER_WORDS; i++) {
        twister->word[i] = seed;
        seed = 1812433253u * (seed ^ seed >> 30) + i + 1;
    }
    twister->next = TWISTER_WORDS;
}

void twister_seed_array(struct twister *twister, const uint32_t *key, size_t count)
{
    twister_seed(twister, 19650218u);
    uint32_t *word = twister->word, i = 1;
    size_t steps = count > TWISTER_WORDS ? count : TWISTER_WORDS, digit = 0;
    for (size_t k = 0; k < steps + TWISTER_WORDS - 1; k++) {
        uint32_t before = word[i - 1] ^ word[i - 1] >> 30;
        if (k < steps) {
            word[i] = (word[i] ^ before * 1664525u) + key[digit] + (uint32_t)digit;
            digit = digit + 1 < count ? digit + 1 : 0;
        } else {
            word[i] = (word[i] ^ before * 1566083941u) - i;
        }
        if (++i == TWISTER_WORDS) {
            word[0] = word[TWISTER_WORDS - 1];
            i = 1;
        }
    }
    word[0] = 0x80000000u;
}

WIDE_CLONES static void temper(const uint32_t *restrict state, uint32_t *restrict words, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t word = state[i];
        word ^= word >> 11;
        word ^= word << 7 & 0x9d2c5680u;
        word ^= word << 15 & 0xefc60000u;
        words[i] = word ^ word >> 18;
    }
}

void twister_words(struct twister *twister, uint32_t *words, size_t count)
{
    while (count > 0) {
        if (twister->next >= TWISTER_WORDS)
            twister_renew(twister);
        size_t left = TWISTER_WORDS - twister->next, part = count < left ? count : left;
        temper(twister->word + twister->next, words, part);
        twister->next += (uint32_t)part;
        words += part;
        count -= part;
    }
}

void twister_skip(struct twister *twister, uint64_t count)
{
    while (count > TWISTER_WORDS - twister->next) {
        count -= TWISTER_WORDS - twister->next;
        twister_renew(twister);
    }
    twister->next += (uint32_t)count;
}

/* ---- Laws ---- */

double python_expovariate(struct twister *twister, double rate)
{
    return -log(1.0 - twister_random(twister)) / rate;
}

int32_t numpy_randint(struct twister *twister, int32_t low, int32_t high)
{
    uint32_t largest = (uint32_t)(high - low) - 1, value;
    if (largest == 0)
        return low;
    uint32_t mask = UINT32_MAX >> __builtin_clz(largest);
    do
        value = twister_word(twister) & mask;
    while (value > largest);
    return low + (int32_t)value;
}

/* ---- Noise ---- */

/* The gradients of the cells of pnoise1, and that of cell 0 again. */
static float gradients[NOISE_PERIOD + 1];
static pthread_once_t gradients_once = PTHREAD_ONCE_INIT;

static void fill_gradients(void)
{
    for (int cell = 0; cell <= NOISE_PERIOD; cell++) {
        int hash = noise_permutation[cell % NOISE_PERIOD];
        gradients[cell] = hash & 8 ? -1.0f : (float)((hash & 7) + 1);
    }
}

/* Returns the noise between two gradients: t is the distance from the left one, from 0 to 1. The order of the
 * operations is that of the package. */
static inline float blend(float left, float right, float t)
{
    float fade = t * t * t * (t * (t * 6.0f - 15.0f) + 10.0f);
    float from_left = left * t, from_right = right * (t - 1.0f);
    return (from_left + fade * (from_right - from_left)) * 0.4f;
}

float published_noise(float position)
{
    pthread_once(&gradients_once, fill_gradients);
    int32_t whole = (int32_t)position;
    uint32_t cell = (uint32_t)whole % NOISE_PERIOD;
    return blend(gradients[cell], gradients[cell + 1], position - (float)whole);
}

enum { GROUP = 64 }; /* noises that are computed at a time */

WIDE_CLONES static void noise_group(const uint32_t *restrict words, float *restrict noises)
{
    int32_t cell[GROUP];
    float t[GROUP], left[GROUP], right[GROUP];
    for (int i = 0; i < GROUP; i++) {
        double high = (int32_t)(words[2 * i] >> 5), low = (int32_t)(words[2 * i + 1] >> 6);
        float position = (float)(10000.0 * ((high * 67108864.0 + low) * 0x1p-53));
        cell[i] = (int32_t)position;
        t[i] = position - (float)cell[i];
    }
    for (int i = 0; i < GROUP; i++) {
        left[i] = gradients[cell[i] & (NOISE_PERIOD - 1)];
        right[i] = gradients[(cell[i] & (NOISE_PERIOD - 1)) + 1];
    }
    for (int i = 0; i < GROUP; i++)
        noises[i] = blend(left[i], right[i], t[i]);
}

void published_noises(const uint32_t *words, size_t count, float *noises)
{
    pthread_once(&gradients_once, fill_gradients);
    for (; count >= GROUP; count -= GROUP, words += 2 * GROUP, noises += GROUP)
        noise_group(words, noises);
    if (count > 0) {
        uint32_t last[2 * GROUP] = {0};
        float results[GROUP];
        memcpy(last, words, 2 * count * sizeof *last);
        noise_group(last, results);
        memcpy(noises, results, count * sizeof *noises);
    }
}
