/* Generates eight images on the CPU and writes them side by side to images.pgm.
 *
 *     cc generate.c $(pkg-config --cflags --libs fdsl) -o generate && ./generate
 */
#include <fdsl.h>
#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 8, SIDE = 224 };

static void check(enum fdsl_status status)
{
    if (status != FDSL_OK) {
        fprintf(stderr, "generate: %s\n", fdsl_error());
        exit((int)status);
    }
}

int main(void)
{
    struct fdsl_config config;
    struct fdsl_generator *generator;
    static unsigned char images[COUNT][SIDE][SIDE];
    int64_t labels[COUNT];

    check(fdsl_config_init(&config, sizeof config));
    config.preset = "paper-1000"; /* the 1000 classes of the paper's pre-training */
    config.out_res = SIDE;        /* drawn at 512 x 512, then reduced */
    check(fdsl_open(&config, &generator));
    check(fdsl_generate(generator, 0, COUNT, images, labels, NULL));
    fdsl_close(generator);

    FILE *file = fopen("images.pgm", "wb");
    if (!file || fprintf(file, "P5 %d %d 255\n", COUNT * SIDE, SIDE) < 0)
        return perror("images.pgm"), 1;
    for (int y = 0; y < SIDE; y++)
        for (int i = 0; i < COUNT; i++)
            fwrite(images[i][y], 1, SIDE, file);
    return fclose(file) == 0 ? 0 : (perror("images.pgm"), 1);
}
