/* Compares timm's RandAugment and random-resized-crop with Pillow, with which timm applies them. The file
 * tests/data/augment/pillow.bin was written by tests/pillow_vectors.py, which calls Pillow. */
#include "train_support.h"

#include <stdio.h>

#include "train/augment.h"

#define FILE_NAME    "tests/data/augment/pillow.bin"
#define RESIZED      (-1)
#define RESULT_BYTES 2000

/* The header of a record, as in the file. The level follows it as a double. */
struct header {
    int32_t operation, strength, increasing, bicubic, height, width, channels;
};

struct tally {
    uint32_t records, values, off_by_one, more;
};

/* The same picture as picture() in pillow_vectors.py. */
static void paint(uint8_t *image, size_t values)
{
    for (size_t i = 0; i < values; i++)
        image[i] = (uint8_t)(i % 5 == 0 ? 0 : (i * 37 + i * i % 61 * 3) % 256);
}

static void resize_whole(const struct header *header, const uint8_t *image, uint8_t *mine)
{
    const struct shape canvas = {(uint32_t)header->channels, 1, (uint32_t)header->height,
                                 (uint32_t)header->width};
    const struct augment_plan plan = {
        .samples = 1, .canvas = canvas, .shape = {canvas.channels, 1, 20, 17}, .bicubic = header->bicubic};
    struct augment_scratch scratch = {0};
    must(augment_scratch_open(&plan, &scratch));
    augment_image(&plan, image, 0, 0, &scratch, mine);
    augment_scratch_close(&scratch);
}

/* Computes the result of a record, and returns the number of its values. */
static size_t compute(const struct header *header, double level, uint8_t *mine)
{
    const struct shape shape = {(uint32_t)header->channels, 1, (uint32_t)header->height,
                                (uint32_t)header->width};
    const struct augment_policy policy = {.kind = AUGMENT_TIMM,
                                          .fill = {124, 116, 104},
                                          .probability = 1,
                                          .increasing = header->increasing,
                                          .bicubic = header->bicubic};
    uint8_t image[41 * 50 * 3];
    cr_assert(shape_values(&shape) <= sizeof image);
    paint(image, shape_values(&shape));
    if (header->operation == RESIZED) {
        resize_whole(header, image, mine);
        return (size_t)shape.channels * 20 * 17;
    }
    const enum augment_operation operation = (enum augment_operation)header->operation;
    const struct augment_numbers numbers =
        augment_numbers(&policy, operation, (enum augment_strength)header->strength, level, &shape);
    augment_apply(&shape, operation, &numbers, image, mine);
    return shape_values(&shape);
}

/* Compares all records of one operation. */
static struct tally compare(FILE *file, int operation)
{
    struct header header;
    double level;
    struct tally tally = {0};
    uint8_t mine[RESULT_BYTES], right[RESULT_BYTES];
    rewind(file);
    while (fread(&header, sizeof header, 1, file) == 1) {
        cr_assert_eq(fread(&level, sizeof level, 1, file), 1);
        const size_t values = compute(&header, level, mine);
        cr_assert(values <= sizeof right && fread(right, 1, values, file) == values);
        if (header.operation != operation)
            continue;
        tally.records++;
        for (size_t i = 0; i < values; i++) {
            const int off = abs(mine[i] - right[i]);
            tally.values++;
            tally.off_by_one += off == 1;
            tally.more += off > 1;
        }
    }
    return tally;
}

/* Moved pixels differ by one in a few places, where float and double round down differently. A position on
 * the border, as in a rotation by exactly 30 degrees, may be on either side of it. Blended values differ by
 * at most one, because Pillow rounds down, and rounds the other image first. The weights of a resize have 14
 * bits here and 22 in Pillow. All other operations are equal. */
Test(augment_pillow, operations_of_timm_differ_from_pillow_by_at_most_one)
{
    FILE *file = fopen(FILE_NAME, "rb");
    cr_assert(file, FILE_NAME);
    for (int operation = RESIZED; operation < AUGMENT_OPERATIONS; operation++) {
        if (operation == AUGMENT_IDENTITY)
            continue;
        const bool moves = operation >= AUGMENT_SHEAR_X && operation <= AUGMENT_ROTATE;
        const bool blends = operation >= AUGMENT_BRIGHTNESS && operation <= AUGMENT_SHARPNESS;
        const struct tally tally = compare(file, operation);
        const double share = moves ? 0.01 : blends || operation == AUGMENT_AUTOCONTRAST ? 1 : 0;
        cr_expect(tally.records >= 5, "operation %d: %u records", operation, tally.records);
        cr_expect(tally.more <= (operation == AUGMENT_ROTATE ? 0.001 : 0) * tally.values,
                  "operation %d: %u of %u values differ by more than one", operation, tally.more,
                  tally.values);
        cr_expect(tally.off_by_one <= (operation == RESIZED ? 0.05 : share) * tally.values,
                  "operation %d: %u of %u values differ by one", operation, tally.off_by_one, tally.values);
    }
    fclose(file);
}
