#include "data/safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/file.h"
#include "core/text.h"

#define ALIGNMENT 8 /* alignment of the values; the header is padded to it */
/* Start of the header of every file that this program writes. */
#define BEGINNING "{\"__metadata__\":{\"format\":\"pt\",\"fdsl-bench\":"

/* Prints the header's text, without its length. */
static void print_header(FILE *stream, const char *const about[], const struct safetensor *tensors,
                         size_t count)
{
    uint64_t at = 0;
    fprintf(stream, BEGINNING "\"%s\"", about[1]);
    for (about += 2; *about; about += 2)
        fprintf(stream, ",\"%s\":\"%s\"", about[0], about[1]);
    fputc('}', stream);
    for (size_t i = 0; i < count; i++) {
        fprintf(stream, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", tensors[i].name, tensors[i].type);
        for (uint32_t axis = 0; axis < tensors[i].axes; axis++)
            fprintf(stream, "%s%" PRIu64, axis ? "," : "", tensors[i].shape[axis]);
        fprintf(stream, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", at, at + tensors[i].bytes);
        at += tensors[i].bytes;
    }
    fputc('}', stream);
    while (ftell(stream) % ALIGNMENT)
        fputc(' ', stream);
}

enum status safetensors_header(const char *const about[], const struct safetensor *tensors, size_t count,
                               char **header, size_t *size)
{
    uint64_t length = 0;
    *header = NULL;
    FILE *stream = open_memstream(header, size);
    TRY(ALLOCATED(stream, "out of memory"));
    fwrite(&length, sizeof length, 1, stream);
    print_header(stream, about, tensors, count);
    if (!text_close(stream)) {
        free(*header);
        *header = NULL;
        return status_set(STATUS_EXHAUSTED, "out of memory");
    }
    length = *size - sizeof length; /* little-endian, like every machine that this program is built for */
    memcpy(*header, &length, sizeof length);
    return STATUS_OK;
}

enum status safetensors_write(const char *path, const char *const about[], const struct safetensor *tensors,
                              size_t count)
{
    struct file_writer writer;
    FREED char *header = NULL;
    size_t size;
    TRY(safetensors_header(about, tensors, count, &header, &size));
    TRY(file_begin(&writer, path));
    TRY(file_add(&writer, header, size));
    for (size_t i = 0; i < count; i++)
        TRY(file_add(&writer, tensors[i].values, tensors[i].bytes));
    return file_end(&writer);
}

enum status safetensors_check(const char *path)
{
    static const struct file_kind ours = {"safetensors file of fdsl-bench", sizeof(uint64_t), BEGINNING,
                                          sizeof BEGINNING - 1};
    return file_check_kind(path, &ours);
}
