/* Reads a data set for two epochs, and prints the batches.
 *
 *     cc stream.c $(pkg-config --cflags --libs fdsl) -o stream && ./stream FOLDER
 */
#include <fdsl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static void check(enum fdsl_status status)
{
    if (status != FDSL_OK) {
        fprintf(stderr, "stream: %s\n", fdsl_error());
        exit((int)status);
    }
}

int main(int argc, char **argv)
{
    struct fdsl_source_config from;
    struct fdsl_stream_config config;
    struct fdsl_source *source;
    struct fdsl_stream *stream;
    struct fdsl_batch *batch;
    struct fdsl_batch_info info = {.size = sizeof info};
    struct fdsl_tensor images, labels;
    enum fdsl_status status;

    check(fdsl_source_config_init(&from, sizeof from));
    from.path = argc > 1 ? argv[1] : "."; /* class folders, shards, or a URL */
    check(fdsl_source_open(&from, &source));
    check(fdsl_stream_config_init(&config, sizeof config));
    config.batch_size = 32;
    config.out_res = 224;
    config.fit = "random-resized-crop";
    config.flip = 1;
    config.dtype = "f32";
    check(fdsl_stream_open(source, &config, &stream));

    for (int epoch = 0; epoch < 2; epoch++) {
        while ((status = fdsl_stream_next(stream, NULL, &batch)) == FDSL_OK) {
            check(fdsl_batch_describe(batch, &info));
            check(fdsl_batch_tensor(batch, FDSL_IMAGES, &images)); /* (count, 3, 224, 224), float */
            check(fdsl_batch_tensor(batch, FDSL_LABELS, &labels));
            printf("epoch %" PRIu64 ", step %" PRIu64 ": %" PRIu32 " images, the first of class %" PRId64
                   "\n",
                   info.epoch, info.step, info.count, info.count ? ((int64_t *)labels.data)[0] : -1);
            check(fdsl_batch_release(batch, NULL));
        }
        if (status != FDSL_END)
            check(status);
    }
    fdsl_stream_close(stream);
    fdsl_source_close(source);
    return 0;
}
