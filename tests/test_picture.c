/* Tests picture files: written pictures can be read again, and no temporary files remain. */
#include <criterion/criterion.h>

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/philox.h"
#include "synth/synth.h"

TestSuite(picture, .timeout = 60);

#ifdef HAVE_PNG

#include <png.h>

static char folder[] = "/tmp/fdsl-picture-XXXXXX";

static void make_folder(void)
{
    cr_assert_not_null(mkdtemp(folder));
}

static const char *inside(const char *name)
{
    static char path[4][300];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
    return path[turn];
}

/* Removes the files in `path` and returns their number. */
static int empty_folder(const char *path)
{
    int count = 0;
    DIR *stream = opendir(path);
    cr_assert_not_null(stream);
    for (struct dirent *entry; (entry = readdir(stream));) {
        char name[600];
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        cr_assert_eq(remove(name), 0, "%s", name);
        count++;
    }
    closedir(stream);
    return count;
}

/* Ends a test: expects the folder to have `count` entries, and removes it. */
static void expect_files(int count)
{
    cr_assert_eq(empty_folder(folder), count);
    cr_assert_eq(rmdir(folder), 0);
}

static uint8_t *noisy_pixels(uint32_t number, size_t count)
{
    uint8_t *pixels = malloc(count);
    cr_assert_not_null(pixels);
    for (size_t i = 0; i < count; i++)
        pixels[i] = (uint8_t)philox(philox_key(number), (uint32_t)i, 0, 0, 0).word[0];
    return pixels;
}

/* Expects an 8-bit gray PNG of this size. Returns its pixels, which the caller frees. */
static uint8_t *read_png(const char *path, uint32_t width, uint32_t height)
{
    unsigned char header[29];
    FILE *stream = fopen(path, "rb");
    cr_assert(stream && fread(header, 1, sizeof header, stream) == sizeof header, "%s", path);
    fclose(stream);
    cr_assert(header[24] == 8 && header[25] == 0 && header[28] == 0,
              "not an 8-bit gray PNG without interlacing");

    png_image image = {.version = PNG_IMAGE_VERSION};
    cr_assert(png_image_begin_read_from_file(&image, path), "%s", image.message);
    cr_assert(image.width == width && image.height == height, "%u x %u", image.width, image.height);
    image.format = PNG_FORMAT_GRAY;
    uint8_t *pixels = malloc((size_t)width * height);
    cr_assert(png_image_finish_read(&image, NULL, pixels, 0, NULL), "%s", image.message);
    return pixels;
}

static void expect_png(const char *path, const uint8_t *pixels, uint32_t width, uint32_t height)
{
    uint8_t *back = read_png(path, width, height);
    cr_assert_eq(memcmp(pixels, back, (size_t)width * height), 0, "%s", path);
    free(back);
}

static void expect_text_file(const char *path, const char *expected)
{
    char text[2048] = "";
    FILE *stream = fopen(path, "r");
    cr_assert_not_null(stream);
    cr_assert_gt(fread(text, 1, sizeof text - 1, stream), 0);
    fclose(stream);
    cr_assert_str_eq(text, expected);
}

Test(picture, written_pictures_are_read_back, .init = make_folder)
{
    static const uint32_t sizes[][2] = {{1, 1}, {7, 3}, {512, 512}, {1, 300}, {1000, 2}};
    cr_assert_eq(picture_available(), STATUS_OK);
    for (uint32_t i = 0; i < COUNT_OF(sizes); i++) {
        uint8_t *pixels = noisy_pixels(i, (size_t)sizes[i][0] * sizes[i][1]);
        cr_assert_eq(
            picture_write_png(inside("a.png"), pixels, &(struct png_shape){sizes[i][0], sizes[i][1], 1}),
            STATUS_OK, "%s", status_text());
        expect_png(inside("a.png"), pixels, sizes[i][0], sizes[i][1]);
        free(pixels);
    }
    expect_files(1);
}

Test(picture, impossible_sizes_are_refused, .init = make_folder)
{
    uint8_t pixel = 0;
    cr_assert_eq(picture_write_png(inside("a.png"), &pixel, &(struct png_shape){0, 1, 1}), STATUS_USAGE);
    cr_assert_eq(picture_write_png(inside("a.png"), &pixel, &(struct png_shape){1, 0, 1}), STATUS_USAGE);
    cr_assert_eq(picture_write_png(inside("a.png"), &pixel, &(struct png_shape){65536, 65536, 1}),
                 STATUS_USAGE);
    cr_assert_eq(picture_write_png(inside("a.png"), &pixel, &(struct png_shape){UINT32_MAX, 1, 1}),
                 STATUS_USAGE);
    /* This width is within the program's limit but exceeds libpng's. libpng refuses it before it reads
     * pixels, and its message must be relayed. */
    cr_assert_eq(picture_write_png(inside("a.png"), &pixel, &(struct png_shape){1000001, 1, 1}),
                 STATUS_FAILED);
    cr_assert(strstr(status_text(), "a.png: libpng: "), "%s", status_text());
    expect_files(0);
}

Test(picture, a_folder_has_its_pictures_and_an_index, .init = make_folder)
{
    struct picture pictures[3] = {{NULL, NULL, 16, 0, 9, 5, false, NULL},
                                  {NULL, NULL, 16, 12, 10, 5, false, NULL},
                                  {NULL, NULL, 16, 3, 0, 18446744073709551615u, false, NULL}};
    uint8_t *pixels[3];
    for (uint32_t i = 0; i < 3; i++)
        pictures[i].pixels = pixels[i] = noisy_pixels(i, 256);
    cr_assert_eq(picture_write_folder(folder, pictures, 3), STATUS_OK, "%s", status_text());
    expect_png(inside("class-00_instance-09.png"), pixels[0], 16, 16);
    expect_png(inside("class-12_instance-10.png"), pixels[1], 16, 16);
    expect_png(inside("class-03_instance-00.png"), pixels[2], 16, 16);
    expect_text_file(inside("index.tsv"), "file\tclass\tinstance\tseed\n"
                                          "class-00_instance-09.png\t0\t9\t5\n"
                                          "class-12_instance-10.png\t12\t10\t5\n"
                                          "class-03_instance-00.png\t3\t0\t18446744073709551615\n");
    for (int i = 0; i < 3; i++)
        pictures[i].mask = pixels[2 - i];
    cr_assert_eq(picture_write_folder(folder, pictures, 2), STATUS_OK, "%s", status_text());
    expect_png(inside("class-12_instance-10.mask.png"), pixels[1], 16, 16);
    expect_text_file(inside("index.tsv"),
                     "file\tclass\tinstance\tseed\tmask\n"
                     "class-00_instance-09.png\t0\t9\t5\tclass-00_instance-09.mask.png\n"
                     "class-12_instance-10.png\t12\t10\t5\tclass-12_instance-10.mask.png\n");
    for (int i = 0; i < 3; i++)
        free(pixels[i]);
    expect_files(6);
}

Test(picture, an_empty_name_is_the_current_folder, .init = make_folder)
{
    uint8_t pixel = 77;
    struct picture picture = {&pixel, NULL, 1, 0, 0, 0, false, NULL};
    cr_assert_eq(chdir(folder), 0);
    cr_assert_eq(picture_check_folder(""), STATUS_OK, "%s", status_text());
    cr_assert_eq(picture_write_folder("", &picture, 1), STATUS_OK, "%s", status_text());
    cr_assert_eq(picture_write_sheet("sheet.png", &picture, 1), STATUS_OK, "%s", status_text());
    cr_assert_eq(access("class-0_instance-0.png", F_OK), 0);
    cr_assert_eq(access("sheet.png", F_OK), 0);
    expect_files(3);
}

/* Threads write many files, and one of the files cannot be renamed. The call must return the status and the
 * message of this failure. */
Test(picture, failures_of_threads_are_returned, .init = make_folder)
{
    enum { COUNT = 64 };
    uint8_t *pixels = noisy_pixels(1, 256);
    struct picture pictures[COUNT];
    for (uint32_t i = 0; i < COUNT; i++)
        pictures[i] = (struct picture){pixels, NULL, 16, 0, i, 0, false, NULL};
    cr_assert_eq(mkdir(inside("class-0_instance-33.png"), 0777), 0);
    cr_assert_eq(picture_write_folder(folder, pictures, COUNT), STATUS_FAILED);
    cr_assert(strstr(status_text(), "class-0_instance-33.png"), "%s", status_text());
    cr_assert_neq(access(inside("index.tsv"), F_OK), 0, "index.tsv lists pictures that were not written");

    DIR *stream = opendir(folder);
    for (struct dirent *entry; (entry = readdir(stream));)
        cr_assert(entry->d_name[0] == '.' || !strcmp(strrchr(entry->d_name, '.'), ".png"), "%s remains",
                  entry->d_name);
    closedir(stream);
    cr_assert(!strchr(status_text(), '\n'));
    free(pixels);
    int left = empty_folder(folder);
    cr_assert(left >= 1 && left <= COUNT);
    cr_assert_eq(rmdir(folder), 0);
}

Test(picture, folders_are_checked, .init = make_folder)
{
    cr_assert_eq(picture_check_folder(folder), STATUS_OK);
    cr_assert_eq(picture_check_folder(inside("new")), STATUS_OK, "%s", status_text());
    cr_assert_eq(picture_check_folder(inside("new/")), STATUS_OK, "%s", status_text());
    cr_assert_eq(picture_check_folder(inside("no/parent")), STATUS_USAGE);
    cr_assert(strstr(status_text(), "no/parent") && strstr(status_text(), "mkdir -p"), "%s", status_text());

    FILE *stream = fopen(inside("plain"), "w");
    cr_assert_not_null(stream);
    fclose(stream);
    cr_assert_eq(picture_check_folder(inside("plain")), STATUS_USAGE);
    cr_assert(strstr(status_text(), "not a folder"), "%s", status_text());
    expect_files(1); /* a check creates nothing */
}

Test(picture, folders_are_created, .init = make_folder)
{
    uint8_t pixel = 0;
    struct picture picture = {&pixel, NULL, 1, 0, 0, 0, false, NULL};
    cr_assert_eq(picture_write_folder(inside("new/deep/"), &picture, 1), STATUS_OK, "%s", status_text());
    cr_assert_eq(access(inside("new/deep/index.tsv"), R_OK), 0);
    cr_assert_eq(access(inside("new/deep/class-0_instance-0.png"), R_OK), 0);
    cr_assert_eq(empty_folder(inside("new/deep")), 2);
    cr_assert_eq(rmdir(inside("new/deep")), 0);
    expect_files(1);
}

Test(picture, an_unwritable_folder_is_refused, .init = make_folder)
{
    uint8_t pixel = 0;
    struct picture picture = {&pixel, NULL, 1, 0, 0, 0, false, NULL};
    if (geteuid() ==
        0) { /* root may write anywhere, so switch to another user, who owns the folder and can remove it */
        cr_assert_eq(chown(folder, 65534, 65534), 0);
        cr_assert_eq(setuid(65534), 0);
    }
    cr_assert_eq(chmod(folder, 0555), 0);
    cr_assert_eq(picture_check_folder(folder), STATUS_USAGE);
    cr_assert(strstr(status_text(), folder) && strstr(status_text(), "Permission denied"), "%s",
              status_text());
    cr_assert_eq(picture_check_folder(inside("new")), STATUS_USAGE);
    cr_assert_neq(picture_write_folder(folder, &picture, 1), STATUS_OK);
    cr_assert_neq(picture_write_sheet(inside("sheet.png"), &picture, 1), STATUS_OK);
    cr_assert_neq(picture_write_png(inside("a.png"), &pixel, &(struct png_shape){1, 1, 1}), STATUS_OK);
    expect_files(0);
}

/* ---- Sheets ---- */

/* Five pictures give three columns and two rows, with a border of 2 pixels around each. The last cell is
 * empty. */
Test(picture, a_sheet_has_rows_columns_and_borders, .init = make_folder)
{
    enum { SIDE = 10, PITCH = 12, WIDTH = 3 * PITCH + 2, HEIGHT = 2 * PITCH + 2 };
    struct picture pictures[5];
    uint8_t *pixels[5];
    for (uint32_t i = 0; i < 5; i++) {
        pixels[i] = noisy_pixels(i, SIDE * SIDE);
        pictures[i] = (struct picture){pixels[i], NULL, SIDE, i, 2 * i, 8, false, NULL};
    }
    cr_assert_eq(picture_write_sheet(inside("sheet.png"), pictures, 5), STATUS_OK, "%s", status_text());
    uint8_t *sheet = read_png(inside("sheet.png"), WIDTH, HEIGHT);
    for (uint32_t y = 0; y < HEIGHT; y++)
        for (uint32_t x = 0; x < WIDTH; x++) {
            uint32_t column = x / PITCH, row = y / PITCH, number = row * 3 + column;
            bool border = x % PITCH < 2 || y % PITCH < 2 || number >= 5;
            uint8_t expected = border ? 64 : pixels[number][(y % PITCH - 2) * SIDE + x % PITCH - 2];
            cr_assert_eq(sheet[y * WIDTH + x], expected, "(%u, %u)", x, y);
        }
    expect_text_file(inside("index.tsv"), "file\tclass\tinstance\tseed\trow\tcolumn\n"
                                          "sheet.png\t0\t0\t8\t0\t0\n"
                                          "sheet.png\t1\t2\t8\t0\t1\n"
                                          "sheet.png\t2\t4\t8\t0\t2\n"
                                          "sheet.png\t3\t6\t8\t1\t0\n"
                                          "sheet.png\t4\t8\t8\t1\t1\n");
    free(sheet);
    for (int i = 0; i < 5; i++)
        free(pixels[i]);
    expect_files(2);
}

/* The sheet has four pictures of 5001 x 5001 pixels in two columns. Each picture has a border of 2 pixels,
 * and a sheet has at most 8192 pixels per side. So two pictures per row have room for (8192 - 2) / 2 - 2 =
 * 4093 pixels each. Each box of 2 x 2 pixels therefore becomes one pixel, and each picture gets 2501 x 2501
 * pixels. The last box of a row has half the width. */
Test(picture, sheet_shrinks_by_boxes, .init = make_folder)
{
    enum { SIDE = 5001, SMALL = 2501, WIDTH = 2 * (SMALL + 2) + 2 };
    uint8_t *pixels = calloc(SIDE, SIDE);
    cr_assert_not_null(pixels);
    pixels[0] = 255, pixels[1] = 3, pixels[SIDE] = 100, pixels[SIDE + 1] = 20; /* mean 94.5, rounded up */
    pixels[SIDE - 1] = 10, pixels[2 * SIDE - 1] = 31;                          /* the right edge: mean 20.5 */
    pixels[(size_t)SIDE * SIDE - 1] = 200; /* the corner: a box of one pixel */
    struct picture pictures[4];
    for (uint32_t i = 0; i < 4; i++)
        pictures[i] = (struct picture){pixels, NULL, SIDE, i, 0, 0, false, NULL};
    cr_assert_eq(picture_write_sheet(inside("sheet.png"), pictures, 4), STATUS_OK, "%s", status_text());
    uint8_t *sheet = read_png(inside("sheet.png"), WIDTH, WIDTH);
    for (int row = 0; row < 2; row++)
        for (int column = 0; column < 2; column++) {
            const uint8_t *cell = sheet + (size_t)(2 + row * (SMALL + 2)) * WIDTH + 2 + column * (SMALL + 2);
            cr_assert_eq(cell[0], 95);
            cr_assert_eq(cell[1], 0);
            cr_assert_eq(cell[SMALL - 1], 21);
            cr_assert_eq(cell[(size_t)(SMALL - 1) * WIDTH + SMALL - 1], 200);
            cr_assert_eq(cell[SMALL], 64, "not the gray of the border");
        }
    free(sheet);
    free(pixels);
    expect_files(2);
}

/* A picture of the maximum size is not shrunk. With one more pixel per side, it is halved. */
Test(picture, a_picture_above_the_maximum_side_is_halved, .init = make_folder)
{
    uint8_t *pixels = calloc(8189, 8189);
    cr_assert_not_null(pixels);
    struct picture picture = {pixels, NULL, 8188, 0, 0, 0, false, NULL};
    cr_assert_eq(picture_write_sheet(inside("sheet.png"), &picture, 1), STATUS_OK, "%s", status_text());
    free(read_png(inside("sheet.png"), 8192, 8192));
    picture.side = 8189;
    cr_assert_eq(picture_write_sheet(inside("sheet.png"), &picture, 1), STATUS_OK, "%s", status_text());
    free(read_png(inside("sheet.png"), 4095 + 4, 4095 + 4));
    free(pixels);
    expect_files(2);
}

Test(picture, impossible_sheets_are_refused)
{
    uint8_t pixel = 0;
    struct picture picture = {&pixel, NULL, 1, 0, 0, 0, false, NULL};
    cr_assert_eq(picture_write_sheet("/nowhere/sheet.png", &picture, 0), STATUS_USAGE);
    cr_assert_eq(picture_write_sheet("/nowhere/sheet.png", &picture, UINT64_C(1) << 40), STATUS_USAGE);
    cr_assert(strstr(status_text(), "1 to 7452900"), "%s", status_text());
    cr_assert_neq(picture_write_sheet("/nowhere/sheet.png", &picture, 1), STATUS_OK);
    cr_assert(strstr(status_text(), "/nowhere/sheet.png"), "%s", status_text());
}

#else

Test(picture, without_libpng_pictures_are_unavailable)
{
    cr_assert_eq(picture_available(), STATUS_UNAVAILABLE);
    cr_assert(strstr(status_text(), "libpng"), "%s", status_text());
    cr_assert_eq(picture_check_folder(""), STATUS_UNAVAILABLE);
    cr_assert_eq(picture_write_png("a.png", NULL, &(struct png_shape){1, 1, 1}), STATUS_UNAVAILABLE);
    cr_assert_eq(picture_write_folder("", NULL, 0), STATUS_UNAVAILABLE);
    cr_assert_eq(picture_write_sheet("a.png", NULL, 0), STATUS_UNAVAILABLE);
}

#endif
