/* Tests fdsl-bench verify-published: on small sets, with one planted fault at a time. */
#include <criterion/criterion.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "core/portable.h"
#include "data/image_formats.h"
#include "folder.h"
#include "must.h"
#include "run/compare.h"
#include "synth/class.h"
#include "synth/lines.h"

TestSuite(verify_published, .timeout = 120);

#ifdef HAVE_PNG
#define PIXELS (PUBLISHED_RES * PUBLISHED_RES)

static const struct published_set sets[] = {
    {.name = "rcdb",
     .law = PUBLISHED_RCDB,
     .classes = 2,
     .threads = 2,
     .instances = 2,
     .block_images = 2,
     .res = PUBLISHED_RES,
     .background = 255},
    {.name = "visualatom",
     .law = PUBLISHED_VISUALATOM,
     .classes = 2,
     .threads = 2,
     .instances = 2,
     .block_images = 2,
     .res = PUBLISHED_RES},
    {.name = "segrcdb",
     .law = PUBLISHED_SEGRCDB,
     .classes = 254,
     .first_class = 1,
     .threads = 1,
     .instances = 20,
     .block_images = 20,
     .res = PUBLISHED_RES,
     .has_masks = true},
};

static const enum formula_id ids[] = {FORMULA_RCDB, FORMULA_VISUALATOM, FORMULA_SEGRCDB};

/* The paths of one image of each set, in the names of the scripts. */
static const char *const image_paths[] = {
    "copy/image/00001/00001_0001.png", "copy/00001/vertex_0257_instance_0001.png", "copy/image/000001.png"};
static const char *const folders[] = {"copy/image/00001", "copy/00001", "copy/image"};
static const uint32_t classes[] = {1, 1, 0};

/* Writes gray pixels as a PNG file with equal channels, as the scripts do. */
static void write_png(const char *path, const uint8_t *pixels, uint32_t channels)
{
    const struct png_shape shape = {.width = PUBLISHED_RES, .height = PUBLISHED_RES, .channels = channels};
    uint8_t *coloured = malloc((size_t)PIXELS * channels);
    void *bytes;
    size_t size;
    for (size_t i = 0; i < (size_t)PIXELS * channels; i++)
        coloured[i] = pixels[i / channels];
    must(png_encode(coloured, &shape, &bytes, &size));
    must(file_write_atomic(path, bytes, size));
    free(bytes);
    free(coloured);
}

/* The pixels of the image, and of its mask. */
struct copy {
    uint8_t *pixels, *mask;
};

/* Writes one image, its mask and all class files of set s into the folder `copy`. */
static void make_copy(int s, struct copy *copy)
{
    static char folder[] = "/tmp/verify-published-XXXXXX";
    struct published *published;
    void *scratch;
    struct class_row rows[2];
    char command[200];
    enter_folder(folder);
    setenv("XDG_CACHE_HOME", folder, 1);
    snprintf(command, sizeof command, "mkdir -p %s copy/mask copy/param", folders[s]);
    cr_assert_eq(system(command), 0);
    copy->pixels = malloc(PIXELS);
    copy->mask = malloc(PIXELS);
    must(published_open(&sets[s], 2, &published));
    scratch = malloc(published_scratch_bytes(published));
    const struct published_image image = {.class_index = classes[s],
                                          .instance = 1,
                                          .canvas = copy->pixels,
                                          .mask = copy->mask,
                                          .pitch = PUBLISHED_RES};
    published_draw(published, &image, scratch);
    write_png(image_paths[s], copy->pixels, 3);
    if (sets[s].has_masks)
        write_png("copy/mask/000001.png", copy->mask, 1);
    for (int i = 0; i < 2; i++)
        published_row(formulas[ids[s]], &published_classes(published)[i], &rows[i]);
    must(published_files_write("copy/param", formulas[ids[s]], rows, 2));
    free(scratch);
    published_close(published);
}

static void free_copy(struct copy *copy)
{
    free(copy->pixels);
    free(copy->mask);
}

static enum status verify(int s)
{
    return verify_published("copy", formulas[ids[s]], &sets[s], false, 2);
}

static void check_set(int s)
{
    struct copy copy;
    char command[2 * PATH_MAX];
    make_copy(s, &copy);
    must(verify(s));
    write_png(image_paths[s], copy.pixels, 1); /* one channel is enough */
    must(verify(s));

    copy.pixels[PIXELS - 1] ^= 1;
    write_png(image_paths[s], copy.pixels, 3);
    cr_assert_eq(verify(s), STATUS_WRONG, "one different pixel");
    copy.pixels[PIXELS - 1] ^= 1;
    write_png(image_paths[s], copy.pixels, 3);
    must(verify(s));

    snprintf(command, sizeof command, "cp %s keep && truncate -s -100 %s", image_paths[s], image_paths[s]);
    cr_assert_eq(system(command), 0);
    cr_assert_eq(verify(s), STATUS_WRONG, "a truncated file");
    snprintf(command, sizeof command, "cp keep %s && cp keep %s/stranger.png", image_paths[s], folders[s]);
    cr_assert_eq(system(command), 0);
    cr_assert_eq(verify(s), STATUS_WRONG, "a file that is not in the set");
    snprintf(command, sizeof command,
             "rm %s/stranger.png; sed -i 's/Line_num,/Line_num,1/' copy/param/00001.csv", folders[s]);
    cr_assert_eq(system(command), 0);
    cr_assert_eq(verify(s), STATUS_WRONG, "another parameter");
    cr_assert_eq(system("rm -r copy/param"), 0);
    must(verify(s));
    free_copy(&copy);
}

Test(verify_published, rcdb)
{
    check_set(0);
}

Test(verify_published, visualatom)
{
    check_set(1);
}

Test(verify_published, segrcdb)
{
    check_set(2);
}

Test(verify_published, masks_are_compared)
{
    struct copy copy;
    make_copy(2, &copy);
    copy.mask[77] ^= 255;
    write_png("copy/mask/000001.png", copy.mask, 1);
    cr_assert_eq(verify(2), STATUS_WRONG);
    cr_assert_eq(unlink("copy/mask/000001.png"), 0);
    must(verify(2));
    free_copy(&copy);
}

/* A channel that differs from the others is a difference, and so is another size. */
Test(verify_published, other_channels_and_sizes_differ)
{
    const struct png_shape shape = {.width = PUBLISHED_RES, .height = PUBLISHED_RES, .channels = 3};
    const struct png_shape smaller = {.width = PUBLISHED_RES, .height = PUBLISHED_RES - 1, .channels = 1};
    struct copy copy;
    void *bytes;
    size_t size;
    make_copy(0, &copy);
    uint8_t *coloured = malloc(3 * PIXELS);
    for (size_t i = 0; i < 3 * PIXELS; i++)
        coloured[i] = copy.pixels[i / 3];
    coloured[3 * 1000 + 2] ^= 1;
    must(png_encode(coloured, &shape, &bytes, &size));
    must(file_write_atomic(image_paths[0], bytes, size));
    free(bytes);
    cr_assert_eq(verify(0), STATUS_WRONG);
    must(png_encode(copy.pixels, &smaller, &bytes, &size));
    must(file_write_atomic(image_paths[0], bytes, size));
    free(bytes);
    cr_assert_eq(verify(0), STATUS_WRONG);
    free(coloured);
    free_copy(&copy);
}

/* Makes the second image of set 0 a PNG file with this header and these rows of one filter byte and values.
 */
static void write_raw_png(unsigned bits, unsigned kind, const char *rows)
{
    char command[1024];
    snprintf(
        command, sizeof command,
        "python3 -c \"import zlib, struct; p = open('pixels', 'rb').read(); "
        "rows = b''.join(bytes(1) + b''.join(%s for v in p[512 * y:512 * y + 512]) for y in range(512)); "
        "c = lambda t, d: struct.pack('>I', len(d)) + t + d + struct.pack('>I', zlib.crc32(t + d)); "
        "open('%s', 'wb').write(b'\\x89PNG\\r\\n\\x1a\\n' + c(b'IHDR', struct.pack('>IIBBBBB', 512, 512, "
        "%u, %u, 0, 0, 0)) + c(b'IDAT', zlib.compress(rows, 1)) + c(b'IEND', b''))\"",
        rows, image_paths[0], bits, kind);
    cr_assert_eq(system(command), 0);
}

/* Readers other than ours do not drop the low bits of 16-bit values, nor the transparency. */
Test(verify_published, other_kinds_of_pixels_differ)
{
    struct copy copy;
    make_copy(0, &copy);
    must(file_write_atomic("pixels", copy.pixels, PIXELS));
    write_raw_png(8, 0, "bytes([v])");
    must(verify(0));
    write_raw_png(16, 0, "bytes([v, v])");
    cr_assert_eq(verify(0), STATUS_WRONG);
    write_raw_png(8, 4, "bytes([v, 0])");
    cr_assert_eq(verify(0), STATUS_WRONG);
    free_copy(&copy);
}

/* A folder of a class that set s does not have is not in the set, nor is a file beside the folders. */
static void expect_other_folders(int s)
{
    struct copy copy;
    char command[3 * PATH_MAX];
    make_copy(s, &copy);
    snprintf(command, sizeof command, "cp -r %s %s/../00002", folders[s], folders[s]);
    cr_assert_eq(system(command), 0);
    cr_assert_eq(verify(s), STATUS_WRONG, "class 2 of 0 and 1");
    snprintf(command, sizeof command, "rm -r %s/../00002 && cp %s %s/../x.png", folders[s], image_paths[s],
             folders[s]);
    cr_assert_eq(system(command), 0);
    cr_assert_eq(verify(s), STATUS_WRONG, "a file beside the folders");
    snprintf(command, sizeof command, "rm %s/../x.png", folders[s]);
    cr_assert_eq(system(command), 0);
    must(verify(s));
    free_copy(&copy);
}

Test(verify_published, other_folders_of_rcdb_are_not_in_the_set)
{
    expect_other_folders(0);
}

Test(verify_published, other_folders_of_visualatom_are_not_in_the_set)
{
    expect_other_folders(1);
}

Test(verify_published, a_folder_without_files_of_the_set_is_a_mistake)
{
    struct copy copy;
    make_copy(0, &copy);
    cr_assert_eq(system("mkdir empty"), 0);
    cr_assert_eq(verify_published("empty", formulas[ids[0]], &sets[0], false, 1), STATUS_USAGE);
    cr_assert(strstr(status_text(), "contains no file of rcdb"), "%s", status_text());
    free_copy(&copy);
}

#endif

Test(verify_published, the_command_explains_what_is_missing)
{
    char program[PATH_MAX], command[2 * PATH_MAX];
    find_program(program);
    static const struct {
        const char *arguments;
        int status;
        const char *text;
    } cases[] = {{"--help", 0, "usage: fdsl-bench verify-published DIR --preset SET"},
                 {"--preset rcdb-1k", 2, "needs a folder"},
                 {"/dev/null --preset rcdb-1k", 2, "is not a folder"},
                 {"/tmp", 2, "--preset is missing"},
                 {"/tmp --preset 1p-frac", 2, "is not a published set whose images can be drawn again"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char text[4096] = "";
        snprintf(command, sizeof command, "%s verify-published %s 2>&1", program, cases[i].arguments);
        FILE *pipe = popen(command, "r");
        cr_assert(pipe && fread(text, 1, sizeof text - 1, pipe) > 0);
        int status = pclose(pipe);
        cr_assert_eq(WEXITSTATUS(status), cases[i].status, "%s: %s", cases[i].arguments, text);
        cr_assert(strstr(text, cases[i].text), "%s: %s", cases[i].arguments, text);
    }
}
