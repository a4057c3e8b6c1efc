/* Compares the augmentation of training samples on the device with that on the host, bit for bit. Tests every
 * operation of RandAugment at odd sizes. Also tests whole batches with crop, resize, flip, operations,
 * copies, erasing and mixing, on one rank and on several. Compares these batches as images, as values and as
 * patches. make check-gpu runs this program.
 *
 *     gpu_augment [--short]   --short: small images; for compute-sanitizer
 *
 * Prints one line per case. Exit status 2 for invalid arguments, 3 if a case fails, 4 without a GPU. */
#include "gpu_learner.cuh"

#include "core/philox.h"
#include "machine/device.h"
#include "train/augment.cuh"
#include "train/feed.h"
#include "train/vit/kernels.cuh"

static bool brief;
static int failures;

static void tell(bool well, const char *what)
{
    printf("%s  %s\n", well ? "ok    " : "FAILED", what);
    failures += !well;
}

template <class T> static T *host(size_t count)
{
    return static_cast<T *>(must_have(malloc(count * sizeof(T))));
}

template <class T> static T *device(size_t count)
{
    T *memory;
    must(cudaMalloc(&memory, count * sizeof(T)));
    return memory;
}

/* Fills images with smooth values, noise and black. If `gray` is not NULL, all channels of an image are
 * equal; `gray` is then the shape of the images. */
static void fill(uint8_t *values, size_t count, const struct shape *gray)
{
    const size_t plane = gray ? (size_t)gray->depth * gray->height * gray->width : count;
    for (size_t i = 0; i < count; i++) {
        uint32_t word = philox(philox_key(2), (uint32_t)i, 0, 0, 1).word[0];
        values[i] = (uint8_t)(word % 3 == 0 ? 0 : (i * 3 + word % 64) % 256);
        if (gray && i / plane % gray->channels > 0)
            values[i] = values[i - plane];
    }
}

/* ---- Operations ---- */

/* Compares images of the device with those of the host. The device has only one channel of gray images. */
static bool same_planes(const uint8_t *mine, const uint8_t *right, size_t bytes, const struct shape *shape,
                        bool gray)
{
    const size_t plane = (size_t)shape->depth * shape->height * shape->width,
                 apart = gray ? shape->channels : 1;
    for (size_t i = 0; i < bytes / plane; i++)
        if (memcmp(mine + i / apart * plane, right + i * plane, plane) != 0)
            return false;
    return true;
}

/* The policies whose operations are compared: each filter, and fills that differ between channels. */
static const struct augment_policy policies[] = {
    {.kind = AUGMENT_TORCHVISION},
    {.kind = AUGMENT_PDP2026, .fill = {128, 128, 128}, .probability = 0.5},
    {.kind = AUGMENT_TIMM, .fill = {124, 116, 104}, .probability = 0.5, .increasing = true},
    {.kind = AUGMENT_TIMM, .fill = {9, 9, 9}, .probability = 0.5, .bicubic = true}};

static bool same_operation(const struct augment_policy *policy, const struct shape *shape, bool gray,
                           enum augment_operation operation, enum augment_strength strength, double magnitude)
{
    const uint32_t count = 3;
    const size_t values = shape_values(shape), bytes = count * values;
    const size_t held = gray ? values / shape->channels : values; /* per image, on the device */
    const struct augment_numbers numbers = augment_numbers(policy, operation, strength, magnitude, shape);
    uint8_t *image = host<uint8_t>(bytes), *mine = host<uint8_t>(bytes), *right = host<uint8_t>(bytes);
    uint8_t *from = device<uint8_t>(bytes), *to = device<uint8_t>(bytes);
    bool same = true;
    fill(image, bytes, gray ? shape : nullptr);
    for (uint32_t j = 0; j < count; j++) {
        augment_apply(shape, operation, &numbers, image + j * values, right + j * values);
        must(cudaMemcpy(from + j * held, image + j * values, held, cudaMemcpyHostToDevice));
    }
    for (uint8_t *output : {to, from}) { /* into another array, then in place */
        must(device_augment_apply(shape, gray, operation, &numbers, count, from, output, nullptr));
        must(cudaMemcpy(mine, output, count * held, cudaMemcpyDeviceToHost));
        same &= same_planes(mine, right, bytes, shape, gray);
    }
    must(cudaFree(from));
    must(cudaFree(to));
    free(image);
    free(mine);
    free(right);
    return same;
}

/* The last size does not fit into shared memory. */
static void compare_operations(void)
{
    static const uint32_t sizes[][2] = {{1, 1},   {3, 5},     {17, 17},   {2, 9},
                                        {40, 64}, {224, 224}, {223, 225}, {480, 516}};
    static const double magnitudes[] = {0, 9, 28, 30};
    for (int operation = 0; operation < AUGMENT_OPERATIONS; operation++)
        for (size_t s = 0; s < COUNT_OF(sizes) - (brief ? 3 : 0); s++) {
            bool same = true;
            for (const struct augment_policy &policy : policies)
                for (uint32_t kind = 0; kind < 9; kind++)
                    for (double magnitude : magnitudes) {
                        const struct shape shape = {kind < 3 ? 1u : 3u, 1, sizes[s][0], sizes[s][1]};
                        if (kind >= 6 && policy.fill[0] != policy.fill[1])
                            continue; /* the channels of a gray image would differ */
                        same &= same_operation(&policy, &shape, kind >= 6, (enum augment_operation)operation,
                                               (enum augment_strength)(kind % 3),
                                               policy.kind == AUGMENT_TIMM ? magnitude / 3 : magnitude);
                    }
            char text[128];
            snprintf(text, sizeof text, "operation %d at %ux%u", operation, sizes[s][0], sizes[s][1]);
            tell(same, text);
        }
}

/* ---- Batches ---- */

struct trial {
    struct shape canvas, shape;
    struct augment augment;
    uint32_t batch, count; /* samples of a step, and of the training set */
    bool gray;             /* all channels of a sample are equal */
    struct mixing mixing;
    uint32_t rank, ranks; /* 0 ranks mean 1 */
    uint32_t parts;       /* number of parts of a step; 0 means 1 */
};

/* Creates the data and the settings of a trial. Sets only the input shape of `model`. */
static void open_trial(const struct trial *trial, struct data *data, struct model *model, struct train *train)
{
    const size_t canvas = shape_values(&trial->canvas);
    *model = {};
    model->input = trial->shape;
    *data = {};
    data->shape = trial->shape;
    data->type = DTYPE_U8;
    data->classes = trial->count;
    data->sample_values = data->sample_bytes = shape_values(&trial->shape);
    data->canvas = trial->canvas;
    data->canvas_bytes = canvas;
    data->gray = trial->gray;
    struct data_set *set = &data->sets[DATA_TRAIN];
    set->count = trial->count;
    set->values = host<uint8_t>(trial->count * canvas);
    set->labels = host<uint32_t>(trial->count);
    for (uint32_t i = 0; i < trial->count; i++)
        set->labels[i] = i;
    fill(static_cast<uint8_t *>(set->values), trial->count * canvas, trial->gray ? &trial->canvas : nullptr);
    data_normalise(data, true);
    *train = {};
    train->model = model;
    train->data = data;
    train->mixing = trial->mixing;
    train->rank = trial->rank;
    train->ranks = trial->ranks;
    train->accumulate = trial->parts;
    train->seed = 11;
    train->batch = trial->batch;
    train->augment = trial->augment;
    train->augment.height = trial->shape.height;
    train->augment.width = trial->shape.width;
}

/* The device memory of a trial. */
struct on_device {
    struct allocations allocations;
    struct device_augment augment;
    struct device_set set;
    struct device_batch batch;
    float *values;
    bf16 *patches;
};

static void open_device(const struct train *train, struct on_device *device)
{
    const struct data *data = train->data;
    const struct data_set *set = &data->sets[DATA_TRAIN];
    *device = {};
    struct allocations *allocations = &device->allocations;
    must(device_augment_open(train, allocations, &device->augment));
    must(allocate_copy(allocations, &device->set.values, set->values, set->count * data->canvas_bytes,
                       nullptr));
    must(allocate_copy(allocations, &device->set.labels, set->labels, set->count * sizeof *set->labels,
                       nullptr));
    must(device_batch_allocate(train, train_part_max(train), &device->batch, allocations));
    must(allocate(allocations, &device->values, train_part_max(train) * data->sample_values));
    must(allocate(allocations, &device->patches, train_part_max(train) * data->sample_values));
}

/* A part of a step on the host. This rank has `own` samples in the step. The part has the samples `skipped`
 * to skipped + count - 1 of them. `numbers` comes from train_batch(). */
struct host_part {
    struct feed *feed;
    uint32_t epoch, step, own, skipped, count;
    const uint32_t *numbers;
};

/* Computes a part on the device: its images, and the values that the network gets. */
static void run_part(const struct host_part *part, struct on_device *device, struct device_set *set)
{
    const struct train *train = part->feed->train;
    struct share share = train_share(train, part->step);
    share.first += part->skipped;
    share.count = part->count;
    *set = device->set;
    must(batch_draw(train, set, &device->batch, part->epoch, part->step, &share, nullptr));
    must(device_augment_run(&device->augment, part->epoch, device->batch.numbers, part->count, set, nullptr));
    must(batch_gather(train->data, set, &device->batch, part->count, device->values, nullptr));
}

/* Returns the index in part->numbers of entry `j` of the part's list. */
static uint32_t entry_of(const struct host_part *part, uint32_t j)
{
    return part->skipped + (j < part->count ? j : part->own + j - part->count);
}

/* Compares the images of a part, and the images of partners if the device computes them separately. With one
 * rank, the host computes no partners, because they are among the samples of the rank. */
static bool same_images(const struct host_part *part, const struct device_set *set)
{
    const struct train *train = part->feed->train;
    const struct data *data = train->data;
    const size_t bytes = data->sample_bytes, held = bytes / (set->gray ? data->shape.channels : 1);
    const uint32_t images = train_part_augmented(train, part->count),
                   there = train_generated(train, part->own);
    uint8_t *mine = host<uint8_t>(images * bytes);
    bool same = set->held.alone && set->held.partners == (images > part->count);
    must(cudaMemcpy(mine, set->values, images * held, cudaMemcpyDeviceToHost));
    for (uint32_t j = 0; j < images; j++) {
        const uint32_t entry = entry_of(part, j), at = entry < there ? entry : 2 * part->own - 1 - entry;
        same &= same_planes(mine + j * held,
                            static_cast<const uint8_t *>(feed_sample(part->feed, part->numbers[entry], at)),
                            bytes, &data->shape, set->gray);
    }
    free(mine);
    return same;
}

/* Compares the values that the network gets. */
static bool same_values(const struct host_part *part, const float *values)
{
    const struct train *train = part->feed->train;
    const size_t length = train->data->sample_values;
    const struct mix mix = train_mix(train, part->epoch, part->step);
    float *right = host<float>(2 * length), *mine = host<float>(part->count * length);
    bool same = true;
    must(cudaMemcpy(mine, values, part->count * length * sizeof *mine, cudaMemcpyDeviceToHost));
    for (uint32_t j = 0; j < part->count; j++) {
        feed_gather(part->feed, &mix, part->epoch, part->numbers, part->own, part->skipped + j,
                    right + length, right);
        same &= memcmp(right, mine + j * length, length * sizeof *right) == 0;
    }
    free(right);
    free(mine);
    return same;
}

/* Returns whether `patches` has the patches of an image of these values, rounded to bf16. */
static bool same_patch_order(const struct shape *shape, uint32_t size, const float *image,
                             const bf16 *patches)
{
    for (uint32_t top = 0; top < shape->height; top += size)
        for (uint32_t left = 0; left < shape->width; left += size)
            for (uint32_t c = 0; c < shape->channels; c++)
                for (uint32_t i = 0; i < size * size; i++, patches++) {
                    const uint32_t y = c * shape->height + top + i / size, x = left + i % size;
                    const bf16 right = __float2bfloat16_rn(image[y * shape->width + x]);
                    if (memcmp(&right, patches, sizeof right) != 0)
                        return false;
                }
    return true;
}

/* Compares the patches that a vision transformer gets, of each size that divides the image. */
static bool same_patches(const struct host_part *part, const struct device_set *set,
                         const struct on_device *device)
{
    const struct train *train = part->feed->train;
    const struct data *data = train->data;
    const size_t length = data->sample_values;
    const struct mix mix = train_mix(train, part->epoch, part->step);
    float *right = host<float>(2 * length);
    bf16 *mine = host<bf16>(part->count * length);
    bool same = true;
    for (uint32_t size : {4u, 8u, 16u}) {
        if (data->shape.height % size || data->shape.width % size)
            continue;
        must(vit_patches(data, set, &device->batch, part->count, size, device->patches, nullptr));
        must(cudaMemcpy(mine, device->patches, part->count * length * sizeof *mine, cudaMemcpyDeviceToHost));
        for (uint32_t j = 0; j < part->count; j++) {
            feed_gather(part->feed, &mix, part->epoch, part->numbers, part->own, part->skipped + j,
                        right + length, right);
            same &= same_patch_order(&data->shape, size, right, mine + j * length);
        }
    }
    free(right);
    free(mine);
    return same;
}

static bool same_labels(const struct host_part *part, const uint32_t *labels)
{
    const struct data *data = part->feed->train->data;
    const uint32_t entries = train_entries(part->feed->train, part->count);
    uint32_t *mine = host<uint32_t>(entries);
    bool same = true;
    must(cudaMemcpy(mine, labels, entries * sizeof *mine, cudaMemcpyDeviceToHost));
    for (uint32_t j = 0; j < entries; j++)
        same &=
            mine[j] == data->sets[DATA_TRAIN].labels[train_original(data, part->numbers[entry_of(part, j)])];
    free(mine);
    return same;
}

static bool same_part(const struct host_part *part, struct on_device *device)
{
    struct device_set set;
    run_part(part, device, &set);
    return (!device->augment.images || same_images(part, &set)) && same_values(part, device->values) &&
           same_patches(part, &set, device) && same_labels(part, device->batch.labels);
}

static bool same_step(const struct train *train, struct feed *feed, struct on_device *device, uint32_t epoch,
                      uint32_t step)
{
    const struct draw_order order = draw_order(train->seed, epoch, train->data->sets[DATA_TRAIN].count);
    const struct share share = train_share(train, step);
    uint32_t *numbers = host<uint32_t>(2 * train->batch);
    const uint32_t own = train_batch(train, &order, step, numbers);
    bool same = true;
    must(feed_step(feed, epoch, step, numbers, own));
    for (uint32_t i = 0; i < train_parts(train); i++) {
        const struct share of = train_part(train, &share, i);
        const struct host_part part = {
            feed, epoch, step, own, (uint32_t)(of.first - share.first), (uint32_t)of.count, numbers};
        if (part.count > 0) /* in a short last step, a rank or a part may have no samples */
            same &= same_part(&part, device);
    }
    free(numbers);
    return same;
}

static void compare_batches(const struct trial *trial)
{
    struct data data;
    struct model model;
    struct train train;
    struct on_device device;
    struct feed feed;
    const struct resources resources = {.threads = 8, .device = 0};
    open_trial(trial, &data, &model, &train);
    open_device(&train, &device);
    must(feed_open(&train, &resources, &feed));
    bool same = true;
    for (uint32_t epoch = 0; epoch < 2; epoch++)
        for (uint32_t step = 0; step < train_steps(&train); step++)
            same &= same_step(&train, &feed, &device, epoch, step);
    char text[512];
    snprintf(
        text, sizeof text,
        "batches of %u from %ux%ux%ux%u to %ux%ux%ux%u: gray %d, crop %d, bicubic %d, flip %d, shift %u, "
        "operations %u, "
        "copies %u, policy %d, erasing %g, colours %g, blur %g, mixup %g, cutmix %g, rank %u of %u, parts %u",
        trial->batch, trial->canvas.channels, trial->canvas.depth, trial->canvas.height, trial->canvas.width,
        trial->shape.channels, trial->shape.depth, trial->shape.height, trial->shape.width, trial->gray,
        trial->augment.crop, trial->augment.bicubic, trial->augment.flip, trial->augment.shift,
        trial->augment.operations, trial->augment.repeats, trial->augment.policy.kind,
        (double)trial->augment.erasing, (double)trial->augment.color.probability,
        (double)trial->augment.color.blur, trial->mixing.mixup, trial->mixing.cutmix, trial->rank,
        trial->ranks ? trial->ranks : 1, train_parts(&train));
    tell(same, text);
    feed_close(&feed);
    allocations_free(&device.allocations);
    data_close(&data);
}

/* ---- Running all tests ---- */

static struct trial small_trial(uint32_t i)
{
    struct trial trial = {.canvas = {i & 1 ? 3u : 1u, 1, 50, 41},
                          .shape = {3, 1, 17, 20},
                          .augment = {},
                          .batch = 6,
                          .count = 20,
                          .gray = false,
                          .mixing = {},
                          .rank = 0,
                          .ranks = 1,
                          .parts = 1};
    trial.augment = {.shift = i & 2, .flip = true, .crop = true, .bicubic = (i & 1) != 0};
    trial.augment.operations = i & 4 ? 3 : 2;
    trial.augment.magnitude = 28;
    trial.augment.repeats = i & 8 ? 3 : 1;
    trial.augment.policy = policies[i % COUNT_OF(policies)];
    trial.augment.policy.deviation = 0.5;
    trial.augment.policy.limit = 10;
    trial.augment.policy.random_filter = trial.augment.random_filter = i % 5 == 0;
    trial.augment.magnitude = trial.augment.policy.kind == AUGMENT_TIMM ? 9 : 28;
    trial.augment.erasing = 0.5f;
    trial.augment.erase_last = (i & 2) != 0;
    trial.gray = (i & 12) == 12;
    return trial;
}

static void compare_small(uint32_t i)
{
    struct trial trial = small_trial(i);
    compare_batches(&trial);
    trial.shape = {trial.canvas.channels, 1, 61, 33}; /* larger than the canvas along one axis */
    trial.augment.operations = 0;
    compare_batches(&trial);
    trial.shape = trial.canvas; /* no crop: the whole sample */
    trial.augment.crop = false;
    trial.augment.operations = 1;
    compare_batches(&trial);
}

/* Patches of 4 x 4 and 8 x 8 pixels, with and without shifts. Without operations, the gather flips. */
static void compare_patches(void)
{
    for (uint32_t i = 0; i < 16; i++) {
        struct trial trial = small_trial(i);
        trial.canvas = trial.shape = {i & 1 ? 3u : 1u, 1, 24, 32};
        trial.augment.crop = false;
        trial.augment.repeats = 1;
        trial.augment.operations = i & 4 ? 2 : 0;
        trial.gray = i & 2;
        trial.mixing = {i & 8 ? 0 : 0.8, i & 8 ? 1.0 : 0};
        compare_batches(&trial);
    }
}

/* Changes of colour and blur, of images and of clips, which have no operations of RandAugment. */
static void compare_colours(void)
{
    for (uint32_t i = 0; i < (brief ? 8u : 32u); i++) {
        struct trial trial = small_trial(i % 16);
        trial.augment.operations = i & 1 ? trial.augment.operations : 0;
        trial.augment.color = {.probability = 0.8f,
                               .low = {0.6f, i & 2 ? 1 : 0.2f, 0, -0.1f},
                               .high = {1.4f, i & 2 ? 1 : 1.8f, 3, 0.3f},
                               .grayscale = 0.2f,
                               .blur = i & 4 ? 0.5f : 0,
                               .kernel = i & 8 ? 31u : 5u,
                               .sigma_min = 0.1f,
                               .sigma_max = 4};
        compare_batches(&trial);
        trial.augment.crop = false;
        trial.canvas = trial.shape = {3, 1, 68, 132};
        compare_batches(&trial);
        trial.augment.operations = 0;
        trial.canvas = trial.shape = {3, 5, 33, 21 + i % 4};
        compare_batches(&trial);
        trial.augment.crop = true;
        trial.canvas = {i & 1 ? 3u : 1u, 4, 40, 51};
        trial.shape = {3, 4, 17, 21};
        compare_batches(&trial);
    }
}

static void compare_mixed_in(uint32_t parts)
{
    static const struct mixing mixings[] = {{0.8, 0}, {0, 1}, {0.8, 1}};
    for (uint32_t i = 0; i < COUNT_OF(mixings); i++)
        for (uint32_t ranks = 1; ranks <= (brief ? 2u : 3u); ranks++)
            for (uint32_t rank = 0; rank < ranks; rank++) {
                struct trial trial = small_trial(8 + i);
                trial.mixing = mixings[i];
                trial.rank = rank;
                trial.ranks = ranks;
                trial.parts = parts;
                compare_batches(&trial);
            }
}

/* The partner of a sample is in the same batch on one rank, and is augmented separately on several ranks and
 * in several parts. The last step has 2 samples, so one of 3 ranks has none. */
static void compare_mixed(void)
{
    compare_mixed_in(1);
    compare_mixed_in(2);
    compare_mixed_in(3);
}

static void compare_big(void)
{
    struct trial big = {.canvas = {1, 1, 512, 512},
                        .shape = {3, 1, 224, 224},
                        .augment = {},
                        .batch = 40,
                        .count = 80,
                        .gray = false,
                        .mixing = {},
                        .rank = 0,
                        .ranks = 1,
                        .parts = 1};
    big.augment.crop = big.augment.flip = true;
    big.augment.operations = 2;
    big.augment.magnitude = 28;
    compare_batches(&big);
    big.augment.bicubic = true;
    big.canvas = {3, 1, 1000, 900};
    compare_batches(&big);
    big.canvas = big.shape; /* no crop, as in --recipe paper */
    big.augment.crop = false;
    big.augment.erasing = 0.25f;
    big.mixing = {0.8, 1};
    for (bool gray : {false, true}) {
        big.gray = gray;
        compare_batches(&big);
    }
    big.canvas = big.shape = {3, 1, 512, 512};
    compare_batches(&big);
}

int main(int argc, char **argv)
{
    brief = argc == 2 && strcmp(argv[1], "--short") == 0;
    if (argc > 1 && !brief)
        return fprintf(stderr, "gpu_augment: usage: gpu_augment [--short]\n"), 2;
    if (device_probe(0) != STATUS_OK)
        return fprintf(stderr, "gpu_augment: %s\n", status_text()), 4;
    compare_operations();
    for (uint32_t i = 0; i < (brief ? 4u : 16u); i++)
        compare_small(i);
    compare_patches();
    compare_colours();
    compare_mixed();
    if (!brief)
        compare_big();
    return failures ? 3 : 0;
}
