/* A place is a multiple of RESIDENT_ALIGN, so its lowest bits say how far the bytes of the member are. A
 * thread that finds a member being written by another one reads the file itself: no thread waits. */
#include "data/resident.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "machine/host.h"

#define HUGE_PAGE (UINT64_C(2) << 20)

enum state { EMPTY, WRITTEN, COMPLETE, STATES = RESIDENT_ALIGN };

/* Returns the size of a part of a sample; 0 if the sample does not have it. */
static uint64_t size_of(const struct resident_samples *samples, uint32_t number, enum resident_part part)
{
    const struct dataset *dataset = samples->dataset;
    const struct dataset_sample *sample =
        &dataset->samples[samples->samples ? samples->samples[number] : number];
    const uint32_t member = part == RESIDENT_IMAGE ? sample->image : sample->label;
    return member < sample->members ? dataset->members[sample->member + member].size : 0;
}

static uint64_t padded(uint64_t bytes)
{
    return (bytes + RESIDENT_ALIGN - 1) / RESIDENT_ALIGN * RESIDENT_ALIGN;
}

uint32_t resident_fit(const struct resident_samples *samples, uint64_t limit, uint64_t *bytes)
{
    const uint32_t parts = 1 + samples->labels;
    uint32_t count = 0;
    for (*bytes = 0; count < samples->count; count++) {
        uint64_t own = parts * sizeof(uint64_t);
        for (uint32_t part = 0; part < parts; part++)
            own += padded(size_of(samples, count, (enum resident_part)part));
        if (own > limit - *bytes)
            break;
        *bytes += own;
    }
    return count;
}

/* Gives each part of the samples its place. */
static void set_places(const struct resident_samples *samples, struct resident *resident)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < resident->count; i++)
        for (uint32_t part = 0; part < resident->parts; part++) {
            atomic_init(&resident->places[(size_t)i * resident->parts + part], at + EMPTY);
            at += padded(size_of(samples, i, (enum resident_part)part));
        }
}

enum status resident_open(const struct resident_samples *samples, uint64_t limit, struct resident *resident)
{
    *resident = (struct resident){.parts = 1 + samples->labels};
    if (limit == 0)
        return STATUS_OK;
    resident->count = resident_fit(samples, limit, &resident->bytes);
    const uint64_t places = (uint64_t)resident->count * resident->parts * sizeof *resident->places;
    const uint64_t memory = (resident->bytes - places + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    TRY(memory_check(resident->bytes, "the resident samples",
                     OPTION_OR_FIELD("lower --resident-bytes", "lower resident_bytes")));
    resident->places = malloc(places + 1);
    resident->memory = aligned_alloc(HUGE_PAGE, memory ? memory : HUGE_PAGE);
    TRY(ALLOCATED(resident->places && resident->memory, "out of memory for %u resident samples",
                  resident->count));
    (void)madvise(resident->memory, memory, MADV_HUGEPAGE); /* a failure changes only the speed */
    set_places(samples, resident);
    return STATUS_OK;
}

void resident_close(struct resident *resident)
{
    free(resident->places);
    free(resident->memory);
    *resident = (struct resident){0};
}

static _Atomic uint64_t *place_of(const struct resident *resident, uint32_t number, enum resident_part part)
{
    return number < resident->count && (uint32_t)part < resident->parts
               ? &resident->places[(size_t)number * resident->parts + part]
               : NULL;
}

const uint8_t *resident_find(const struct resident *resident, uint32_t number, enum resident_part part)
{
    _Atomic uint64_t *place = place_of(resident, number, part);
    const uint64_t at = place ? atomic_load_explicit(place, memory_order_acquire) : EMPTY;
    return at % STATES == COMPLETE ? resident->memory + (at - COMPLETE) : NULL;
}

uint8_t *resident_begin(const struct resident *resident, uint32_t number, enum resident_part part)
{
    _Atomic uint64_t *place = place_of(resident, number, part);
    uint64_t at = place ? atomic_load(place) : WRITTEN;
    return at % STATES == EMPTY && atomic_compare_exchange_strong(place, &at, at + WRITTEN)
               ? resident->memory + at
               : NULL;
}

void resident_end(const struct resident *resident, uint32_t number, enum resident_part part, bool complete)
{
    _Atomic uint64_t *place = place_of(resident, number, part);
    const uint64_t at = atomic_load(place) - WRITTEN;
    atomic_store_explicit(place, at + (complete ? COMPLETE : EMPTY), memory_order_release);
}
