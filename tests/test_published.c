/* Tests the published data sets: random numbers against CPython and NumPy, images and class files against the
 * published scripts, random access, the cache file. */
#include <criterion/criterion.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "core/parallel.h"
#include "core/portable.h"
#include "data/remote.h"
#include "folder.h"
#include "must.h"
#include "published_vectors.h"
#include "synth/lines.h"
#include "synth/class.h"
#include "synth/published.h"

TestSuite(published, .timeout = 120);

#define PIXELS (PUBLISHED_RES * PUBLISHED_RES)

/* ---- Random numbers ---- */

static uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void fold(uint64_t *digest, double value)
{
    uint64_t bits = bits_of(value);
    for (int i = 0; i < 64; i += 8)
        *digest = (*digest ^ (bits >> i & 255)) * UINT64_C(0x100000001b3);
}

#define DIGEST_START UINT64_C(0xcbf29ce484222325)

static void seed_python(struct twister *twister, uint64_t seed)
{
    uint32_t digits[] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    twister_seed_array(twister, digits, digits[1] ? 2 : 1);
}

Test(published, python_draws_are_those_of_cpython)
{
    for (size_t s = 0; s < COUNT_OF(python_seeds); s++) {
        struct twister twister;
        uint64_t digest = DIGEST_START;
        seed_python(&twister, python_seeds[s]);
        for (int round = 0; round < 300; round++) {
            double draws[7];
            draws[0] = twister_random(&twister);
            draws[1] = twister_uniform(&twister, -2.5, 7);
            draws[2] = python_randint(&twister, -400, 400);
            draws[3] = python_randint(&twister, 0, 256);
            draws[4] = python_randint(&twister, 5, 5);
            draws[5] = python_expovariate(&twister, 1.0 / 100);
            draws[6] = twister_word(&twister);
            for (int i = 0; i < 7; i++) {
                fold(&digest, draws[i]);
                if (round == 0)
                    cr_assert_eq(bits_of(draws[i]), python_first[7 * s + (size_t)i],
                                 "seed %zu, draw %d: %.17g", s, i, draws[i]);
            }
        }
        cr_assert_eq(digest, python_digests[s], "seed %zu", s);
    }
}

Test(published, numpy_draws_are_those_of_numpy)
{
    for (size_t s = 0; s < COUNT_OF(numpy_seeds); s++) {
        struct twister twister;
        uint64_t digest = DIGEST_START;
        twister_seed(&twister, numpy_seeds[s]);
        for (int round = 0; round < 300; round++) {
            double draws[3];
            draws[0] = twister_random(&twister);
            draws[1] = twister_uniform(&twister, -1, 1);
            draws[2] = numpy_randint(&twister, 2, 8);
            for (int i = 0; i < 3; i++) {
                fold(&digest, draws[i]);
                if (round == 0)
                    cr_assert_eq(bits_of(draws[i]), numpy_first[3 * s + (size_t)i], "seed %zu, draw %d", s,
                                 i);
            }
        }
        cr_assert_eq(digest, numpy_digests[s], "seed %zu", s);
    }
}

Test(published, skipping_and_blocks_of_words_equal_single_words)
{
    static const size_t counts[] = {0, 1, 623, 624, 625, 1247, 1248, 5000};
    for (size_t from = 0; from < COUNT_OF(counts); from++)
        for (size_t i = 0; i < COUNT_OF(counts); i++) {
            struct twister one, many, skipped;
            uint32_t words[5000];
            seed_python(&one, 7);
            for (size_t k = 0; k < counts[from]; k++)
                twister_word(&one);
            many = skipped = one;
            twister_words(&many, words, counts[i]);
            twister_skip(&skipped, counts[i]);
            for (size_t k = 0; k < counts[i]; k++)
                cr_assert_eq(words[k], twister_word(&one));
            uint32_t next = twister_word(&one);
            cr_assert_eq(twister_word(&many), next);
            cr_assert_eq(twister_word(&skipped), next, "from %zu, %zu words", counts[from], counts[i]);
        }
}

Test(published, noise_is_that_of_the_package)
{
    struct twister twister;
    uint64_t digest = DIGEST_START;
    static const double last[] = {0.0, 1.0, 255.5, 256.0, 1023.99, 1024.0, 9999.999};
    seed_python(&twister, 48);
    for (int i = 0; i < 4000; i++) {
        struct twister before = twister;
        float noise = published_noise((float)twister_uniform(&twister, 0, 10000)), vector;
        uint32_t words[2];
        twister_words(&before, words, 2);
        published_noises(words, 1, &vector);
        cr_assert(noise == vector, "%d: %.9g %.9g", i, (double)noise, (double)vector);
        if (i < 4)
            cr_assert_eq(bits_of((double)noise), noise_first[i]);
        fold(&digest, (double)noise);
    }
    for (size_t i = 0; i < COUNT_OF(last); i++)
        fold(&digest, (double)published_noise((float)last[i]));
    cr_assert_eq(digest, noise_digest[0]);
}

Test(published, groups_of_noises_equal_single_noises)
{
    static const size_t counts[] = {1, 63, 64, 65, 200};
    struct twister twister;
    seed_python(&twister, 3);
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        uint32_t words[400];
        float noises[201] = {0};
        noises[counts[i]] = 77;
        twister_words(&twister, words, 2 * counts[i]);
        published_noises(words, counts[i], noises);
        cr_assert(noises[counts[i]] == 77, "%zu noises write one more", counts[i]);
        for (size_t k = 0; k < counts[i]; k++)
            cr_assert(noises[k] ==
                      published_noise((float)(10000.0 * random_of_words(words[2 * k], words[2 * k + 1]))));
    }
}

Test(published, numbers_are_printed_as_python_prints_them)
{
    char text[PUBLISHED_REPR_BYTES];
    for (size_t i = 0; i < COUNT_OF(repr_values); i++) {
        double value;
        memcpy(&value, &repr_values[i], sizeof value);
        cr_assert_str_eq(published_repr(value, text), repr_texts[i]);
    }
}

/* ---- Images ---- */

/* Sets that consist of the first classes of the first script threads of the published ones. The images of a
 * thread depend only on the thread's number and on the images before them. */
static const struct published_set small_rcdb = {.name = "rcdb",
                                                .law = PUBLISHED_RCDB,
                                                .classes = 4,
                                                .threads = 2,
                                                .instances = 1000,
                                                .block_images = 1000,
                                                .res = PUBLISHED_RES,
                                                .background = 255};
static const struct published_set small_segrcdb = {.name = "segrcdb",
                                                   .law = PUBLISHED_SEGRCDB,
                                                   .classes = 254,
                                                   .first_class = 1,
                                                   .threads = 2,
                                                   .instances = 40,
                                                   .block_images = 20,
                                                   .res = PUBLISHED_RES,
                                                   .has_masks = true};
static const struct published_set small_visualatom = {.name = "visualatom",
                                                      .law = PUBLISHED_VISUALATOM,
                                                      .classes = 4,
                                                      .threads = 2,
                                                      .instances = 1000,
                                                      .block_images = 1000,
                                                      .res = PUBLISHED_RES};

/* SHA-256 of images and masks that the unmodified scripts drew. Classes are those of the small sets. */
static const struct {
    const struct published_set *set;
    uint32_t class_index, instance;
    bool is_mask;
    const char *sha256;
} golden[] = {
    {&small_rcdb, 0, 0, false, "bbd4f21a8df8e15378e08584f2aa09dc22be607dbfc3c4e932130a0fb822deed"},
    {&small_rcdb, 0, 1, false, "b67b4c6e241539787a969826b610b872b301f3b6ce0517c6d7eb518f4a4ece2d"},
    {&small_rcdb, 0, 2, false, "36918985efde04027d5998121e4c3530f73d972656008d025091999e91a47b49"},
    {&small_rcdb, 1, 0, false, "a0d62adcfc530a5f10cb77ba2422519380bb655179c04c317de8bf11c55b7397"},
    {&small_rcdb, 1, 1, false, "422fd0e0f4056f8bb7679bf9179a10d03cc776645f82e3e2f5f0e423f2516276"},
    {&small_rcdb, 1, 2, false, "ef0b6ba8a8401de954a926ccba89d5738f8d87af3e7b2a328f4cff030410d4f0"},
    {&small_rcdb, 2, 0, false, "d3fe66f84432c5f0703c0af5736a04c835e61145e7bf9bdd2d64e9f6caab475e"},
    {&small_rcdb, 2, 1, false, "a917c9aae916c64f5d9ecba3b5b20471281a54158e154252b60968485909de45"},
    {&small_rcdb, 2, 2, false, "c42be518da6db1f7d89891a7f7a1202a0130243f2c588efd37378f91ae311155"},
    {&small_rcdb, 3, 0, false, "1bc668cf26594e2036f4e1ac56cb7e5681c43f492785f520b0dd6e05294b6a51"},
    {&small_rcdb, 3, 1, false, "76ecaea920fa9d095ae21c748a7e8fd89c5284da284aad6587ad4feccf7297ef"},
    {&small_rcdb, 3, 2, false, "463cbcadebe7268a012c5cf9d48683262b5cc25e1feacd2265b97abebec9dbc5"},
    {&small_segrcdb, 0, 0, false, "61b5398ace7d2852777a0ab3068f5e260ed41bc21e114091fbd2eed7820b5375"},
    {&small_segrcdb, 0, 0, true, "48cd66923b482e20bdbc18d9ac8f120099485006c45a9afcdf4783346289a59a"},
    {&small_segrcdb, 0, 1, false, "88b38965d6333826066268b150f7b892110e96d64e39bf81062f7bfb31554b68"},
    {&small_segrcdb, 0, 1, true, "cdc4f0541f8a2d753777914e6b61525a644c7325d89b5fd1cf822b631a1aea99"},
    {&small_segrcdb, 0, 20, false, "64209fcf1782353ceda9a523b7ea60bbe7a416d702c8b1df5cc3c8d8749920eb"},
    {&small_segrcdb, 0, 20, true, "4dc1702da177ef24f52e44c49adad473dfb596bcfcef9e1fcf7a24247dd38222"},
    {&small_segrcdb, 0, 21, false, "760fd63a647ecb0c49743d30b0f8cd986d3d9527f24d000b80e87223abbe337b"},
    {&small_segrcdb, 0, 21, true, "3c099879fe720ffe221498ebbaba3008ae0267baf60b08f82af979db92cfb643"},
    {&small_visualatom, 0, 0, false, "9b04c11c5f3a08cd00c889573d0eca902beec9475bd2c9e33a5efe8e71cee264"},
    {&small_visualatom, 0, 1, false, "e6a1e7d05eac6e2426917424cc45b1faa6895f170d4541a4bc342e296edc7721"},
    {&small_visualatom, 1, 0, false, "00ad8d5dc3d392af67945fb71706987a74fe53e126898bccfbe6f2aa3fd2b4a2"},
    {&small_visualatom, 1, 1, false, "4a4fee66deae3db85d50e786151ee719dad53e6726d003a8fe49535d2446eb51"},
    {&small_visualatom, 2, 0, false, "ef720502a335ca9b2759f1ad89f8b34c7d646238a30e0030a86d6c4daa1e8936"},
    {&small_visualatom, 2, 1, false, "c3d532cb0a802ad6a1004399933c38c6647955e9ca83bbd413a4d10193739f3c"},
    {&small_visualatom, 3, 0, false, "e4c971841a330449413ff576d0b60790e1d59c2a018bc0c16dc965903cefd495"},
    {&small_visualatom, 3, 1, false, "7439fc3d2c2f17f07b49f5c4f59eeb40d871de91d26e21470b20ed3ea68d0405"},
};

struct drawing {
    struct published *published;
    void *scratch;
    uint8_t *pixels, *mask;
};

static void open_drawing(const struct published_set *set, struct drawing *drawing)
{
    must(published_open(set, 2, &drawing->published));
    drawing->scratch = malloc(published_scratch_bytes(drawing->published));
    drawing->pixels = malloc(PIXELS);
    drawing->mask = malloc(PIXELS);
    cr_assert(drawing->scratch && drawing->pixels && drawing->mask);
}

static void close_drawing(struct drawing *drawing)
{
    free(drawing->scratch);
    published_close(drawing->published);
    free(drawing->pixels);
    free(drawing->mask);
}

/* Draws an image. Bytes that are not written stay 0x5a. */
static void draw(struct drawing *drawing, uint32_t class_index, uint64_t instance, bool plain)
{
    const struct published_image image = {.class_index = class_index,
                                          .instance = instance,
                                          .canvas = drawing->pixels,
                                          .mask = drawing->mask,
                                          .pitch = PUBLISHED_RES,
                                          .plain = plain};
    memset(drawing->pixels, 0x5a, PIXELS);
    memset(drawing->mask, 0x5a, PIXELS);
    published_draw(drawing->published, &image, drawing->scratch);
}

static void enter_cache_folder(void)
{
    char folder[] = "/tmp/published-XXXXXX";
    enter_folder(folder);
    setenv("XDG_CACHE_HOME", folder, 1);
}

static void check_sha256(const uint8_t *pixels, const char *expected, const char *what)
{
    char text[65] = "";
    FILE *file = fopen("pixels", "w");
    cr_assert(file && fwrite(pixels, 1, PIXELS, file) == PIXELS && fclose(file) == 0);
    FILE *pipe = popen("sha256sum pixels", "r");
    cr_assert(pipe && fread(text, 1, 64, pipe) == 64);
    pclose(pipe);
    cr_assert_str_eq(text, expected, "%s", what);
}

static void check_golden(const struct published_set *set)
{
    struct drawing drawing;
    enter_cache_folder();
    open_drawing(set, &drawing);
    for (size_t i = 0; i < COUNT_OF(golden); i++)
        for (int plain = 0; plain < 2 && golden[i].set == set; plain++) {
            char what[99];
            snprintf(what, sizeof what, "%s %u %u plain %d", set->name, golden[i].class_index,
                     golden[i].instance, plain);
            draw(&drawing, golden[i].class_index, golden[i].instance, plain);
            check_sha256(golden[i].is_mask ? drawing.mask : drawing.pixels, golden[i].sha256, what);
        }
    close_drawing(&drawing);
}

Test(published, rcdb_images_are_those_of_the_script)
{
    check_golden(&small_rcdb);
}

Test(published, segrcdb_images_and_masks_are_those_of_the_script)
{
    check_golden(&small_segrcdb);
}

Test(published, visualatom_images_are_those_of_the_script)
{
    check_golden(&small_visualatom);
}

/* One class per script thread, so that many classes are drawn. The first instances are those of the sets. */
static const struct published_set wide[] = {
    {.name = "rcdb",
     .law = PUBLISHED_RCDB,
     .classes = 40,
     .threads = 40,
     .instances = 2,
     .block_images = 2,
     .res = PUBLISHED_RES,
     .background = 255},
    {.name = "visualatom",
     .law = PUBLISHED_VISUALATOM,
     .classes = 12,
     .threads = 12,
     .instances = 2,
     .block_images = 2,
     .res = PUBLISHED_RES},
    {.name = "segrcdb",
     .law = PUBLISHED_SEGRCDB,
     .classes = 254,
     .first_class = 1,
     .threads = 4,
     .instances = 8,
     .block_images = 2,
     .res = PUBLISHED_RES,
     .has_masks = true},
};

/* Draws all images of a set and compares fast and plain drawing. Returns the images, then the masks, which
 * the caller frees. */
static uint8_t *draw_set(const struct published_set *set)
{
    struct drawing drawing;
    size_t count = set->has_masks ? set->instances : set->classes * set->instances;
    uint8_t *images = malloc(2 * count * PIXELS);
    cr_assert_not_null(images);
    open_drawing(set, &drawing);
    for (size_t i = 0; i < count; i++) {
        uint32_t class_index = (uint32_t)(i / set->instances);
        uint64_t instance = i % set->instances;
        draw(&drawing, class_index, instance, false);
        memcpy(images + i * PIXELS, drawing.pixels, PIXELS);
        memcpy(images + (count + i) * PIXELS, drawing.mask, PIXELS);
        draw(&drawing, class_index, instance, true);
        cr_assert_arr_eq(drawing.pixels, images + i * PIXELS, PIXELS, "%s image %zu", set->name, i);
        cr_assert_arr_eq(drawing.mask, images + (count + i) * PIXELS, PIXELS, "%s mask %zu", set->name, i);
    }
    close_drawing(&drawing);
    return images;
}

Test(published, fast_drawing_equals_plain_drawing)
{
    enter_cache_folder();
    for (size_t s = 0; s < COUNT_OF(wide); s++)
        free(draw_set(&wide[s]));
}

Test(published, any_order_gives_the_images_of_the_sequence)
{
    static const uint32_t order[] = {3, 0, 4, 4, 1, 2, 2, 0, 3};
    struct published_set set = small_rcdb;
    struct drawing ordered, random;
    enter_cache_folder();
    set.instances = set.block_images = 5;
    uint8_t *images = malloc(5 * PIXELS);
    cr_assert_not_null(images);
    open_drawing(&set, &ordered);
    for (uint32_t i = 0; i < 5; i++) {
        draw(&ordered, 1, i, false);
        memcpy(images + i * PIXELS, ordered.pixels, PIXELS);
        cr_assert(i == 0 || memcmp(images, ordered.pixels, PIXELS) != 0);
    }
    published_forget();
    open_drawing(&set, &random); /* its states are those of the cache file */
    for (size_t i = 0; i < COUNT_OF(order); i++) {
        draw(&random, i % 2 ? 0 : 3, (uint32_t)i % 5, false); /* another class in between */
        draw(&random, 1, order[i], false);
        cr_assert_arr_eq(random.pixels, images + order[i] * PIXELS, PIXELS, "draw %zu", i);
    }
    free(images);
    close_drawing(&ordered);
    close_drawing(&random);
}

/* ---- Openings at the same time ---- */

/* An opening on a thread of its own. */
struct opening {
    const struct published_set *set;
    struct remote_cancel cancel;
    struct published *published;
    enum status status;
    char text[200];
    _Atomic bool ended;
    pthread_t thread;
};

static void *open_on_thread(void *context)
{
    struct opening *opening = context;
    published_cancel_by(&opening->cancel);
    opening->status = published_open(opening->set, 1, &opening->published);
    snprintf(opening->text, sizeof opening->text, "%s", opening->status == STATUS_OK ? "" : status_text());
    opening->ended = true;
    return NULL;
}

static void begin_opening(struct opening *opening, const struct published_set *set)
{
    *opening = (struct opening){.set = set};
    cr_assert_eq(pthread_create(&opening->thread, NULL, open_on_thread, opening), 0);
}

/* Cancels an opening, if `cancels`, and waits for its end, which must come soon. */
static void end_opening(struct opening *opening, bool cancels)
{
    if (cancels)
        atomic_store(&opening->cancel.set, true);
    for (int i = 0; i < 1000 && !opening->ended; i++)
        usleep(10000);
    cr_assert(opening->ended);
    cr_assert_eq(pthread_join(opening->thread, NULL), 0);
    cr_assert(!cancels || (opening->status == STATUS_FAILED && !opening->published &&
                           strstr(opening->text, "was stopped")),
              "%s", opening->text);
}

/* An opening that waits for another one can be cancelled, and continues if the other one is. Closing waits
 * for neither. */
Test(published, openings_can_be_cancelled_while_they_wait)
{
    static const struct published_set large = {.name = "rcdb-1k",
                                               .law = PUBLISHED_RCDB,
                                               .classes = 1000,
                                               .threads = 40,
                                               .instances = 1000,
                                               .block_images = 1000,
                                               .res = PUBLISHED_RES,
                                               .background = 255};
    struct opening first, second, third, fourth;
    struct published *small;
    enter_cache_folder();
    must(published_open(&small_rcdb, 1, &small));
    begin_opening(&first, &large);
    usleep(200000); /* the first one scans */
    begin_opening(&second, &large);
    begin_opening(&third, &small_rcdb);
    begin_opening(&fourth, &small_rcdb);
    usleep(200000);
    published_close(small);
    published_forget();
    end_opening(&second, true);
    cr_assert(!first.ended && !third.ended && !fourth.ended);
    end_opening(&first, true);
    end_opening(&third, false);
    end_opening(&fourth, false);
    cr_assert(third.status == STATUS_OK && fourth.status == STATUS_OK, "%s%s", third.text, fourth.text);
    cr_expect_eq(third.published, fourth.published);
    published_close(third.published);
    published_close(fourth.published);
    published_forget();
}

/* Rows can be further apart than they are long. */
Test(published, pixels_between_the_rows_stay_as_they_are)
{
    enum { PITCH = 577 };
    for (size_t s = 0; s < COUNT_OF(wide); s++)
        for (int plain = 0; plain < 2; plain++) {
            struct drawing drawing;
            uint8_t *planes = malloc(2 * PUBLISHED_RES * PITCH);
            cr_assert_not_null(planes);
            enter_cache_folder();
            open_drawing(&wide[s], &drawing);
            draw(&drawing, 0, 1, plain);
            const struct published_image image = {.instance = 1,
                                                  .canvas = planes,
                                                  .mask = planes + PUBLISHED_RES * PITCH,
                                                  .pitch = PITCH,
                                                  .plain = plain};
            memset(planes, 0x5a, 2 * PUBLISHED_RES * PITCH);
            published_draw(drawing.published, &image, drawing.scratch);
            for (size_t y = 0; y < 2 * PUBLISHED_RES; y++) {
                const uint8_t *expected = y < PUBLISHED_RES ? drawing.pixels : drawing.mask;
                cr_assert_arr_eq(planes + y * PITCH, expected + y % PUBLISHED_RES * PUBLISHED_RES,
                                 PUBLISHED_RES, "%s row %zu", wide[s].name, y);
                for (size_t x = PUBLISHED_RES; x < PITCH; x++)
                    cr_assert_eq(planes[y * PITCH + x], 0x5a, "%s (%zu, %zu)", wide[s].name, x, y);
            }
            free(planes);
            close_drawing(&drawing);
        }
}

enum { THREADS = 8, ROUNDS = 60 };

struct race {
    struct drawing drawings[THREADS];
    uint8_t *images; /* of the instances of class 1 */
    atomic_int wrong;
};

static void draw_task(void *context, uint64_t task, int thread)
{
    struct race *race = context;
    uint32_t instance = (uint32_t)(task * 7 % 5);
    draw(&race->drawings[thread], 1, instance, false);
    race->wrong += memcmp(race->drawings[thread].pixels, race->images + instance * PIXELS, PIXELS) != 0;
}

Test(published, threads_that_draw_one_class_do_not_disturb_each_other)
{
    struct published_set set = small_rcdb;
    struct race race = {.images = malloc(5 * PIXELS)};
    enter_cache_folder();
    set.instances = set.block_images = 5;
    for (int i = 0; i < THREADS; i++)
        open_drawing(&set, &race.drawings[i]);
    for (uint32_t i = 0; i < 5; i++) {
        draw(&race.drawings[0], 1, i, true);
        memcpy(race.images + i * PIXELS, race.drawings[0].pixels, PIXELS);
    }
    parallel_for(THREADS, ROUNDS, draw_task, &race);
    cr_assert_eq(race.wrong, 0);
    for (int i = 0; i < THREADS; i++)
        close_drawing(&race.drawings[i]);
    free(race.images);
}

/* ---- The cache file ---- */

#define CACHE_FILE "fdsl-bench/rcdb.states"

/* Reads the file of the set again. Checks that its last class is `expected`. */
static void check_last_class(const struct published_set *set, const struct published_class *expected)
{
    struct published *published;
    published_forget();
    must(published_open(set, 2, &published));
    const struct published_class *last = &published_classes(published)[set->classes - 1];
    cr_assert_eq(last->vertices, expected->vertices);
    cr_assert_eq(last->start_w, expected->start_w);
    cr_assert_eq(last->number, expected->number);
    published_close(published);
}

Test(published, a_damaged_cache_file_is_computed_again)
{
    struct published_set set = small_rcdb;
    struct published *published;
    char *good, *now;
    size_t size, size_now;
    enter_cache_folder();
    set.instances = set.block_images = 3;
    must(published_open(&set, 2, &published));
    struct published_class last = published_classes(published)[3];
    published_close(published);
    must(file_read(CACHE_FILE, &good, &size));
    for (size_t at = 0; at <= size; at += at < 64 ? 7 : at < size ? size - at < 997 ? size - at : 997 : 1) {
        char *bad = malloc(size);
        memcpy(bad, good, size);
        if (at < size)
            bad[at] ^= 4;
        must(file_write_atomic(CACHE_FILE, bad, at < size ? size : size - 1)); /* flipped, or too short */
        check_last_class(&set, &last);
        must(file_read(CACHE_FILE, &now, &size_now));
        cr_assert(size_now == size && memcmp(now, good, size) == 0, "byte %zu", at);
        free(now);
        free(bad);
    }
    free(good);
}

Test(published, the_cache_file_of_another_set_is_not_used)
{
    struct published_set set = small_rcdb, other = small_rcdb;
    struct published *published;
    enter_cache_folder();
    set.instances = set.block_images = 3;
    other.instances = other.block_images = 4;
    must(published_open(&set, 2, &published));
    struct published_class last = published_classes(published)[3];
    published_close(published);
    must(published_open(&other, 2, &published));
    cr_assert_neq(bits_of(published_classes(published)[3].noise), bits_of(last.noise),
                  "states of another number of instances were used");
    published_close(published);
    check_last_class(&set, &last);
}

/* A pipe, a folder or a link to a device in the place of the file is neither waited for nor replaced. */
Test(published, odd_files_in_the_cache_folder_are_not_read)
{
    static const char *const makes[] = {"mkfifo", "mkdir", "ln -s /dev/zero", "ln -s none"};
    struct published_set set = small_rcdb;
    struct published *published;
    enter_cache_folder();
    set.instances = set.block_images = 3;
    must(published_open(&set, 2, &published));
    struct published_class last = published_classes(published)[3];
    published_close(published);
    for (size_t i = 0; i < COUNT_OF(makes); i++) {
        char command[99];
        snprintf(command, sizeof command, "rm -rf %s && %s %s", CACHE_FILE, makes[i], CACHE_FILE);
        cr_assert_eq(system(command), 0);
        check_last_class(&set, &last);
        snprintf(command, sizeof command, "test %s %s", i < 2 ? "! -f" : "-L", CACHE_FILE);
        cr_assert(i == 3 || system(command) == 0, "%s", makes[i]);
    }
}

Test(published, a_folder_that_cannot_be_written_is_no_error)
{
    struct published_set set = small_rcdb;
    struct published *published;
    enter_cache_folder();
    set.instances = set.block_images = 3;
    must(published_open(&set, 2, &published));
    struct published_class last = published_classes(published)[3];
    published_close(published);
    setenv("XDG_CACHE_HOME", "/dev/null", 1);
    check_last_class(&set, &last);
    setenv("XDG_CACHE_HOME", "", 1);
    unsetenv("HOME");
    check_last_class(&set, &last);
}

/* ---- Class files ---- */

static const char class_0[] =
    "Vertex,14\r\nPerlin_noise,0.2524272875508373\r\nline_width,0.011791870367106105\r\n"
    "Center_rad,97\r\nLine_num,196\r\nOval_rate_x,1.449491064788738\r\n"
    "Oval_rate_y,1.651592972722763\r\nstart_pos_h,163.0\r\nstart_pos_w,104.0\r\n";

static const struct formula *formula_of(const struct published_set *set)
{
    return formulas[set->law == PUBLISHED_RCDB      ? FORMULA_RCDB
                    : set->law == PUBLISHED_SEGRCDB ? FORMULA_SEGRCDB
                                                    : FORMULA_VISUALATOM];
}

/* Returns the classes of a set, which the caller frees. */
static struct class_row *rows_of(const struct published_set *set)
{
    struct published *published;
    struct class_row *rows = malloc(set->classes * sizeof *rows);
    cr_assert_not_null(rows);
    must(published_open(set, 2, &published));
    for (uint32_t i = 0; i < set->classes; i++)
        published_row(formula_of(set), &published_classes(published)[i], &rows[i]);
    published_close(published);
    return rows;
}

static void check_round_trip(const struct published_set *set)
{
    struct class_row *rows = rows_of(set), *again;
    size_t count;
    must(published_files_write("one", formula_of(set), rows, set->classes));
    must(class_read("one", formula_of(set), &again, &count));
    cr_assert_eq(count, set->classes);
    for (size_t i = 0; i < count; i++)
        cr_assert_eq(memcmp(&again[i], &rows[i], sizeof *rows), 0, "class %zu", i);
    must(published_files_write("two", formula_of(set), again, count));
    cr_assert_eq(system("diff -r one two && rm -r one two"), 0);
    free(again);
    free(rows);
}

Test(published, class_files_are_those_of_the_script_and_are_read_back)
{
    char *text;
    size_t size, count;
    struct class_row *rows, *again;
    enter_cache_folder();
    rows = rows_of(&wide[0]);
    must(published_files_write("rcdb", formulas[FORMULA_RCDB], rows, 2));
    must(file_read("rcdb/00000.csv", &text, &size));
    cr_assert_str_eq(text, class_0);
    must(class_read("rcdb/00000.csv", formulas[FORMULA_RCDB], &again, &count));
    cr_assert(count == 1 && memcmp(again, rows, sizeof *rows) == 0);
    free(again);
    free(rows);
    free(text);
    check_round_trip(&wide[0]);
    check_round_trip(&wide[1]);
    check_round_trip(&wide[2]);
}

/* The keys that VisualAtom does not draw with are optional. */
Test(published, class_files_of_visualatom_may_lack_the_start)
{
    static const char text[] =
        "Vertex,14\r\nPerlin_noise,0.25\r\nline_width,0.01\r\nCenter_rad,97\r\n"
        "Line_num,196\r\nOval_rate_x,1.5\r\nOval_rate_y,1.75\r\nnami1,3\r\nnami2,15\r\n";
    char again[PUBLISHED_TEXT_BYTES];
    const struct formula *formula = formulas[FORMULA_VISUALATOM];
    struct class_row row;
    strcpy(again, text);
    must(published_text_read("x", again, formula, 5, &row));
    cr_assert(row.id == 5 && formula_value(formula, &row, "freq2") == 15);
    cr_assert_eq(published_text_write(formula, &row, again), sizeof text - 1);
    cr_assert_str_eq(again, text);
}

/* The 254 files of SegRCDB, concatenated, as SegRCDB_params.py writes them. */
Test(published, segrcdb_class_files_are_those_of_the_script)
{
    char text[65] = "";
    enter_cache_folder();
    struct class_row *rows = rows_of(&wide[2]);
    must(published_files_write("param", formulas[FORMULA_SEGRCDB], rows, 254));
    free(rows);
    FILE *pipe = popen("cat param/*.csv | sha256sum", "r");
    cr_assert(pipe && fread(text, 1, 64, pipe) == 64);
    pclose(pipe);
    cr_assert_str_eq(text, "e8bbce1a55dfc4fe4f12d8350a6b0e6332f3ebe71d0306dfb131fe1905fb5cfc");
}

static void write_text(const char *path, const char *text)
{
    must(file_write_atomic(path, text, strlen(text)));
}

static void check_refused(enum formula_id formula, const char *path, const char *text, const char *reason)
{
    struct class_row *rows;
    size_t count;
    if (text)
        write_text(path, text);
    cr_assert_eq(published_files_read(path, formulas[formula], &rows, &count), STATUS_USAGE, "%s", reason);
    cr_assert(strstr(status_text(), reason), "%s: %s", reason, status_text());
    cr_assert_null(rows);
}

Test(published, wrong_class_files_are_refused)
{
    char text[sizeof class_0 + 100];
    struct class_row *rows;
    size_t count;
    enter_cache_folder();
    check_refused(FORMULA_RCDB, "x.csv", "Vertex\n", "line 1: 'Vertex' is not a line key,value");
    check_refused(FORMULA_RCDB, "x.csv", "Vertex,14\nVertex,14\n", "line 2: the key Vertex is repeated");
    check_refused(FORMULA_RCDB, "x.csv", "Vertex,14\nvertex,1\n", "line 2: unknown key 'vertex'");
    check_refused(FORMULA_RCDB, "x.csv", "Vertex,1.5\n", "Vertex: '1.5' is not a whole number");
    check_refused(FORMULA_RCDB, "x.csv", "Vertex,-1\n", "Vertex: '-1' is not a whole number");
    check_refused(FORMULA_RCDB, "x.csv", "Vertex,4294967296\n", "is not a whole number");
    check_refused(FORMULA_RCDB, "x.csv", "Perlin_noise,0x10\n", "Perlin_noise: '0x10' is not a number");
    check_refused(FORMULA_RCDB, "x.csv", "Perlin_noise,1e999\n", "is not a number");
    check_refused(FORMULA_RCDB, "x.csv", "Perlin_noise,nan\n", "is not a number");
    check_refused(FORMULA_RCDB, "x.csv", "Perlin_noise,1 \n", "is not a number");
    check_refused(FORMULA_RCDB, "x.csv", "Perlin_noise,\n", "is not a number");
    check_refused(FORMULA_RCDB, "x.csv", "", "the key Vertex of a class file of rcdb is missing");
    check_refused(FORMULA_RCDB, "x.csv", "Vertex,14\n",
                  "the key Perlin_noise of a class file of rcdb is missing");
    cr_assert(mkdir("d", 0777) == 0 && mkdir("d/param", 0777) == 0);
    check_refused(FORMULA_RCDB, "d", NULL, "contains no class files");
    write_text("d/param/00007.csv", class_0);
    must(published_files_read("d", formulas[FORMULA_RCDB], &rows, &count));
    cr_assert(count == 1 && rows[0].id == 7 && rows[0].value[0] == 14);
    free(rows);
    write_text("d/param/7.csv", class_0);
    check_refused(FORMULA_RCDB, "d/param", NULL, "are the same class");
    snprintf(text, sizeof text, "%snami1,3\nnami2,4\n", class_0);
    write_text("d/param/7.csv", "");
    remove("d/param/7.csv");
    write_text("d/param/00008.csv", text);
    check_refused(FORMULA_RCDB, "d/param", NULL, "unknown key 'nami1'");
    check_refused(FORMULA_UJI, "d", NULL, "has no published class files");
    snprintf(text, sizeof text, "%s", class_0);
    memcpy(text, "Vertex,00", 9);
    check_refused(FORMULA_RCDB, "x.csv", text, "vertices 0 is not in 1");
    check_refused(FORMULA_SEGRCDB, "00003.csv",
                  "Category_num,4\nVertex,3\nPerlin_noise,1\nline_width,1\nCenter_rad,1.0\nLine_num,1\n"
                  "Oval_rate_x,1\nOval_rate_y,1\nColor_Gray,3\n",
                  "Category_num is 4, but this is class 3");
}

/* ---- The program ---- */

static void check_program(const char *arguments, int expected, const char *text)
{
    static char program[PATH_MAX];
    char command[2 * PATH_MAX], out[8192] = "";
    if (!program[0])
        find_program(program);
    snprintf(command, sizeof command, "%s %s 2>&1", program, arguments);
    FILE *pipe = popen(command, "r");
    cr_assert_not_null(pipe);
    size_t bytes = fread(out, 1, sizeof out - 1, pipe);
    const int status = pclose(pipe);
    cr_assert_eq(WEXITSTATUS(status), expected, "%s: %.*s", arguments, (int)bytes, out);
    cr_assert(strstr(out, text), "%s: %s", arguments, out);
}

/* The class list of any length begins with the published list. */
Test(published, the_paper_presets_begin_with_the_published_lists)
{
    char program[PATH_MAX];
    find_program(program);
    enter_cache_folder();
    check_program("--preset paper --classes 1001 --write-classes a.csv", 0, "");
    check_program("--preset paper-1000 --classes 1000 --write-classes b.csv", 0, "");
    cr_assert_eq(system("head -n 1001 a.csv | cmp - b.csv"), 0);
    check_program("--preset paper-lowercompute --classes 1000 --write-classes c.csv", 0, "");
    check_program("--preset lowercompute-1000 --classes 1000 --write-classes d.csv", 0, "");
    cr_assert_eq(system("cmp c.csv d.csv"), 0);
}

#define TRAIN "--variant train-naive --data synth --res 16 --train-size 8 --test-size 8 --epochs 1 --batch 8 "

Test(published, training_takes_class_files)
{
    char program[PATH_MAX];
    find_program(program);
    enter_cache_folder();
    struct class_row *rows = rows_of(&wide[0]);
    must(published_files_write("classes", formulas[FORMULA_RCDB], rows, 3));
    must(published_files_write("gap", formulas[FORMULA_RCDB], rows + 1, 2));
    free(rows);
    check_program(TRAIN "--class classes --format csv", 0, ",classes,");
    check_program(TRAIN "--class classes --classes 4", 2, "the file of --class has 3");
    check_program(TRAIN "--class classes --preset uji", 2, "--class replaces --preset");
    check_program(TRAIN "--class gap", 2, "they must be 0 to 1");
    check_program(TRAIN "--preset segrcdb", 2, "a mask instead of a label");
    check_program("--variant naive --class-format published", 2, "has an effect only with --write-classes");
    check_program("--formula uji --write-classes x --class-format published", 2,
                  "has no published class files");
    check_program("--prepare x --from synth --samples 4 --store imagefolder --names published", 2,
                  "needs --random published");
}
