/* Fuzz targets, one function per format. Each function parses the given bytes. It must not crash or read past
 * their end. It aborts if its results contradict each other. fuzz.c passes one target to libFuzzer (make
 * fuzz); test_fuzz.c runs the targets on all files in tests/fuzz/. */
#ifndef FDSL_TESTS_FUZZ_TARGETS_H
#define FDSL_TESTS_FUZZ_TARGETS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef HAVE_ZLIB
#include <zlib.h>
#endif
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "core/text.h"
#include "core/array.h"
#include "data/image.h"
#include "data/remote_cache.h"
#include "data/http.h"
#include "data/labelled_files.h"
#include "data/index.h"
#include "data/mds.h"
#include "data/members.h"
#include "data/npy.h"
#include "data/image_formats.h"
#include "data/embeddings.h"
#include "data/tensor_file.h"
#include "data/tar.h"
#include "core/record.h"
#include "synth/class.h"
#include "train/checkpoint.h"

/* Parses the first line as the value of --image, of --label, and of --member. Each accepted rule then reads a
 * label from the remaining lines, as if they were a member. */
static inline void fuzz_members(const uint8_t *data, size_t size)
{
    static const char *const extensions[] = {"JSON", "cls", "a"};
    const uint8_t *end = memchr(data, '\n', size);
    size_t length = end ? (size_t)(end - data) : size, rest = end ? size - length - 1 : 0;
    char *text = strndup((const char *)data, length);
    struct members members;
    for (int option = 0; text && option < 3; option++) {
        const struct member_rule *rule;
        const struct member_list *list = option == 0   ? &members.image
                                         : option == 1 ? &members.label
                                                       : &members.only;
        if (members_parse(option == 0 ? text : NULL, option == 1 ? text : NULL, option == 2 ? text : NULL,
                          &members) != STATUS_OK)
            continue;
        uint32_t found = members_find(list, extensions, 3, true, &rule);
        if (found > 3 || (found < 3 && (!rule || rule->folder)) || (option != 1 && rule && found == 3))
            abort();
        for (uint32_t r = 0; r < list->count; r++) {
            int32_t label = 0;
            if (!list->rules[r].folder && rest > 0)
                (void)members_label(&list->rules[r], end + 1, rest, &label);
        }
        (void)members_lack(list, "label", extensions, 3);
    }
    free(text);
}

/* Parses one shard twice: with all bytes available, and with only the bytes that each step needs. Both
 * parsers must agree. */
static inline void fuzz_tar_as_it_is(const uint8_t *data, size_t size)
{
    static struct tar_parser whole, sparing;
    size_t window = 0;
    tar_open(&whole, size);
    tar_open(&sparing, TAR_SIZE_UNKNOWN);
    for (;;) {
        struct tar_member a = {0}, b = {0};
        enum tar_step step_a, step_b;
        size_t need, at = (size_t)whole.position, key_length;
        const char *extension;
        enum status status_a = tar_next(&whole, data + at, size - at, true, &a, &step_a, &need), status_b;
        for (window = 0;;) {
            if (sparing.position > size) /* the member ends after the shard; only a parser that knows the
                                            shard's size can refuse this member */
                return;
            at = (size_t)sparing.position;
            size_t available = size - at < window ? size - at : window;
            uint8_t *exact = malloc(available + 1); /* so that sanitizers detect a read past the end */
            if (!exact)
                return;
            memcpy(exact, data + at, available);
            status_b = tar_next(&sparing, exact, available, available == size - at, &b, &step_b, &need);
            free(exact);
            if (status_b != STATUS_OK || step_b != TAR_MORE)
                break;
            if (need <= window && available == window && at == (size_t)sparing.position)
                abort(); /* the parser requested bytes that it already had */
            window = need;
        }
        if (status_a != STATUS_OK)
            return;
        if (status_b != STATUS_OK || step_a != step_b || step_a == TAR_MORE)
            abort();
        if (step_a == TAR_END)
            return;
        if (a.data != b.data || a.size != b.size || a.header != b.header || strcmp(a.name, b.name) != 0 ||
            a.size > size - a.data || a.kind != b.kind || strcmp(a.target, b.target) != 0 ||
            (a.kind != TAR_FILE && a.size > 0))
            abort();
        if (key_split(a.name, &key_length, &extension) && a.name[key_length] != '.')
            abort();
    }
}

/* Parses the shard unchanged, then with correct checksums in all headers, because a fuzzer cannot guess a
 * checksum. */
static inline void fuzz_tar(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size + 1);
    fuzz_tar_as_it_is(data, size);
    if (!copy)
        return;
    memcpy(copy, data, size);
    for (size_t at = 0; size - at >= TAR_BLOCK_BYTES; at += TAR_BLOCK_BYTES) {
        unsigned sum = 0, any = 0;
        for (size_t i = 0; i < TAR_BLOCK_BYTES; i++)
            any |= copy[at + i];
        memset(copy + at + 148, any ? ' ' : 0, 8);
        for (size_t i = 0; i < TAR_BLOCK_BYTES; i++)
            sum += copy[at + i];
        if (any)
            snprintf((char *)copy + at + 148, 7, "%06o", sum);
    }
    fuzz_tar_as_it_is(copy, size);
    free(copy);
}

static inline void fuzz_npy(const uint8_t *data, size_t size)
{
    struct npy_header header;
    if (npy_header_parse(data, size, &header) == STATUS_OK && header.data > size)
        abort();
}

static inline void fuzz_idx(const uint8_t *data, size_t size)
{
    struct idx idx;
    uint64_t values = 1;
    if (idx_parse(data, size, &idx) != STATUS_OK)
        return;
    for (uint32_t i = 0; i < idx.axes; i++)
        values *= idx.shape[i];
    if (idx.values + values != data + size)
        abort();
}

static inline void fuzz_cifar(const uint8_t *data, size_t size)
{
    struct cifar cifar;
    for (int kind = CIFAR_10; kind <= CIFAR_100_COARSE; kind++)
        if (cifar_parse((enum cifar_kind)kind, data, size, &cifar) == STATUS_OK &&
            (cifar_image(&cifar, cifar.count - 1) + CIFAR_IMAGE_BYTES != data + size ||
             cifar_label(&cifar, cifar.count - 1) >= cifar.layout->classes[cifar.layout->own]))
            abort();
}

/* Corrects the checksums of all chunks, so that changes reach the decoder. */
static inline void fuzz_seal_png(uint8_t *file, size_t size)
{
#ifdef HAVE_ZLIB
    for (size_t at = 8; at < size && size - at >= 12;) {
        size_t bytes =
            (size_t)file[at] << 24 | (size_t)file[at + 1] << 16 | (size_t)file[at + 2] << 8 | file[at + 3];
        if (bytes > size - at - 12)
            return;
        unsigned long sum = crc32(0, file + at + 4, (uInt)bytes + 4);
        for (size_t b = 0; b < 4; b++)
            file[at + 8 + bytes + b] = (uint8_t)(sum >> (24 - 8 * b));
        at += bytes + 12;
    }
#endif
}

/* Decodes a picture as it is, and with correct checksums. Skips large pictures: decoding them takes time and
 * tests nothing more. */
static inline void fuzz_png(const uint8_t *data, size_t size)
{
    for (int sealed = 0; sealed < 2; sealed++) {
        struct png_shape shape;
        uint32_t turn = 1;
        uint8_t *copy = malloc(size + 1), *pixels = NULL;
        memcpy(copy, data, size);
        if (sealed)
            fuzz_seal_png(copy, size);
        if (png_shape(copy, size, &shape) == STATUS_OK &&
            (uint64_t)shape.width * shape.height * shape.channels <= 1 << 20)
            pixels = malloc((size_t)shape.width * shape.height * shape.channels);
        if (pixels &&
            png_decode(copy, size, pixels, (size_t)shape.width * shape.height * shape.channels, &shape,
                       &turn) == STATUS_OK &&
            (turn < 1 || turn > 8))
            abort();
        free(pixels);
        free(copy);
    }
}

static inline void fuzz_wids(const uint8_t *data, size_t size)
{
    struct wids wids;
    (void)wids_parse((const char *)data, size, &wids);
    wids_free(&wids);
}

/* Offsets must not decrease, because readers read a shard in the order of its index and never seek back. */
static inline void fuzz_offsets(const struct index *index)
{
    for (uint64_t p = 0; p < index->unit_count; p++) {
        uint64_t end = 0;
        for (uint64_t s = index->units[p].first; s < index->units[p].first + index->units[p].count; s++)
            for (uint64_t m = index->samples[s].first; m < index->samples[s].first + index->samples[s].count;
                 m++) {
                if (index->members[m].offset < end)
                    abort();
                end = index->members[m].offset + index->members[m].size;
            }
    }
}

/* Parses the project's own index format. `data` has all lines except the last. The last line is the hash of
 * the other lines. This function adds it, because a fuzzer cannot guess a hash. */
static inline void fuzz_index(const uint8_t *data, size_t size)
{
    struct index_text text;
    struct index index;
    if (index_text_begin(&text, INDEX_SHARDS, "x") != STATUS_OK)
        return;
    fwrite(data, 1, size, text.stream);
    fputc('\n', text.stream);
    if (index_text_end(&text) == STATUS_OK) {
        if (index_parse(text.text, text.size, &index) == STATUS_OK)
            fuzz_offsets(&index);
        index_free(&index);
    } else
        index_text_free(&text);
}

/* Parses an IDX file, which may be gzipped. The unpacked data must have the size that the header specifies.
 */
static inline void fuzz_gzip(const uint8_t *data, size_t size)
{
    uint8_t *owned = malloc(size + 1);
    struct idx idx;
    if (!owned)
        return;
    memcpy(owned, data, size);
    if (idx_take(owned, size, &idx) == STATUS_OK && (!idx.owned || idx.values < idx.owned || idx.axes == 0))
        abort();
    idx_free(&idx);
}

/* Counts unpacked bytes, and hashes them. */
struct fuzz_unpacked {
    uint64_t bytes, hash;
};

static inline enum status fuzz_unpacked_add(void *context, const void *bytes, size_t size)
{
    struct fuzz_unpacked *unpacked = context;
    unpacked->bytes += size;
    unpacked->hash = fnv_add(unpacked->hash, bytes, size < 4096 ? size : 4096);
    return size > 0 && size <= 1 << 20 ? STATUS_OK : (abort(), STATUS_FAILED);
}

/* Unpacks a compressed shard from a file and from memory. The results must be the same, and bounded by the
 * size of the input. */
static inline void fuzz_unpack(const uint8_t *data, size_t size)
{
    const int fd = memfd_create("fuzz", MFD_CLOEXEC);
    struct fuzz_unpacked unpacked[2] = {{0, FNV_BEGIN}, {0, FNV_BEGIN}};
    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        abort();
    const enum status status =
        unpack_bytes(&(struct unpack_input){.fd = fd, .tar = true}, fuzz_unpacked_add, &unpacked[0]);
    if (unpack_bytes(&(struct unpack_input){.bytes = data, .size = size, .tar = true}, fuzz_unpacked_add,
                     &unpacked[1]) != status ||
        unpacked[0].bytes != unpacked[1].bytes || unpacked[0].hash != unpacked[1].hash ||
        unpacked[0].bytes > 1032 * (uint64_t)size + ((uint64_t)65 << 20) || (status == STATUS_OK && size < 4))
        abort();
    close(fd);
}

/* For parsers that need a path. Sets `path` to a file in memory that contains the bytes. Returns false if
 * such a file cannot be created. */
static inline bool fuzz_file(const uint8_t *data, size_t size, int *fd, char path[64])
{
    *fd = memfd_create("fuzz", 0);
    if (*fd < 0 || write(*fd, data, size) != (ssize_t)size)
        return false;
    snprintf(path, 64, "/proc/self/fd/%d", *fd);
    return true;
}

/* Checks the tensors that a reader accepts. Their values must be inside the file and have the size of the
 * shape. */
static inline void fuzz_tensors(const struct tensor_file *file)
{
    for (size_t i = 0; i < file->count; i++) {
        const struct tensor *tensor = &file->tensors[i];
        uint64_t values = 1;
        if (tensor->fault)
            continue;
        if (tensor->axes > TENSOR_AXES_MAX ||
            (!tensor_is_packed(tensor) &&
             (tensor->offset > file->bytes || tensor->bytes > file->bytes - tensor->offset)))
            abort();
        for (uint32_t axis = 0; axis < tensor->axes; axis++)
            values *= tensor->shape[axis];
        if (tensor->code == TENSOR_PLAIN && values * dtype_bytes(tensor->dtype) != tensor->bytes)
            abort();
    }
}

static inline void fuzz_list(const uint8_t *data, size_t size, enum status (*list)(struct tensor_file *))
{
    char path[64];
    struct tensor_file file = {.path = path, .bytes = size};
    if (fuzz_file(data, size, &file.fd, path) && list(&file) == STATUS_OK)
        fuzz_tensors(&file);
    tensor_file_close(&file);
}

static inline void fuzz_safetensors(const uint8_t *data, size_t size)
{
    fuzz_list(data, size, safetensors_list);
}

/* Parses a file of torch.save(), which is a zip archive with a pickle. */
static inline void fuzz_torch(const uint8_t *data, size_t size)
{
    fuzz_list(data, size, torch_list);
}

/* Opens a .safetensors as a set of embeddings, and decodes its rows, from the mapping and from the file. */
static inline void fuzz_embeddings(const uint8_t *data, size_t size)
{
    char path[64], link[64];
    int fd;
    struct embeddings *set = NULL;
    snprintf(link, sizeof link, "/tmp/fdsl-fuzz-%d.safetensors", (int)getpid());
    unlink(link);
    if (fuzz_file(data, size, &fd, path) && symlink(path, link) == 0 &&
        embeddings_open(link, "", &set) == STATUS_OK && embeddings_align(set, 3) == STATUS_OK) {
        float *values = malloc(set->columns * sizeof *values);
        void *row = malloc(embeddings_row_bytes(set));
        for (uint64_t i = 0; values && row && i < set->rows && i < 1000; i++) {
            embeddings_row(set, i, values);
            if (embeddings_read(set, i, 1, row) != STATUS_OK)
                abort();
            embeddings_decode(set, i, values);
            if (memcmp(row, values, embeddings_row_bytes(set)) != 0)
                abort();
        }
        free(values);
        free(row);
    }
    embeddings_close(set);
    unlink(link);
    close(fd);
}

/* Parses a .npz, and unpacks its arrays. Arrays of more than 1 MiB are refused for their size, because a
 * small input can describe gigabytes of zeros. */
static inline void fuzz_npz(const uint8_t *data, size_t size)
{
    char path[64];
    struct tensor_file file = {.path = path, .bytes = size};
    if (fuzz_file(data, size, &file.fd, path) && npz_list(&file) == STATUS_OK) {
        fuzz_tensors(&file);
        for (size_t i = 0; i < file.count; i++) {
            const struct tensor *tensor = &file.tensors[i];
            void *values = tensor->fault || tensor->bytes > 1 << 20 ? NULL : malloc(tensor->bytes + 1);
            if (values)
                (void)tensor_read(&file, tensor, values);
            free(values);
        }
    }
    tensor_file_close(&file);
}

/* Parses the pickle of a file of torch.save(). Its tensors are in a storage of 60 bytes. */
static inline void fuzz_pickle(const uint8_t *data, size_t size)
{
    struct zip_member storage = {.name = "x/data/0", .bytes = 60};
    const struct zip zip = {.members = &storage, .count = 1};
    struct tensor_file file = {.fd = -1, .bytes = storage.bytes};
    if (torch_list_pickle(data, size, &zip, "x/", &file) == STATUS_OK)
        fuzz_tensors(&file);
    tensor_file_close(&file);
}

/* Parses a CSV list of classes of each formula. Every class that is read must be within the limits. */
static inline void fuzz_classes(const uint8_t *data, size_t size)
{
    char path[64];
    int fd;
    const bool opened = fuzz_file(data, size, &fd, path);
    for (size_t f = 0; opened && f < FORMULA_COUNT; f++) {
        struct class_row *rows = NULL;
        size_t count = 0;
        if (class_read_csv(path, formulas[f], &rows, &count) == STATUS_OK)
            for (size_t i = 0; i < count; i++)
                if (class_check(formulas[f], &rows[i]) != STATUS_OK)
                    abort();
        free(rows);
    }
    close(fd);
}

/* Parses a class file of a published script, for each formula. What is read must survive writing and reading.
 */
static inline void fuzz_published(const uint8_t *data, size_t size)
{
    for (size_t i = 0; i < FORMULA_COUNT; i++) {
        char *text = strndup((const char *)data, size), again[PUBLISHED_TEXT_BYTES];
        struct class_row row, second;
        if (text && published_text_read("file", text, formulas[i], UINT32_MAX, &row) == STATUS_OK) {
            published_text_write(formulas[i], &row, again);
            if (published_text_read("again", again, formulas[i], UINT32_MAX, &second) != STATUS_OK ||
                memcmp(&row, &second, sizeof row) != 0)
                abort();
        }
        free(text);
    }
}

/* Parses class ranges of each formula. Classes drawn from them must be within the limits. */
static inline void fuzz_ranges(const uint8_t *data, size_t size)
{
    char path[64];
    int fd;
    const bool opened = fuzz_file(data, size, &fd, path);
    for (size_t f = 0; opened && f < FORMULA_COUNT; f++) {
        struct class_ranges ranges;
        if (class_ranges_read(path, "uji", formulas[f], &ranges) != STATUS_OK ||
            formulas[f]->family != FAMILY_LINES) /* whose classes are not drawn from ranges */
            continue;
        for (uint32_t id = 0; id < 8; id++) {
            struct class_row row;
            class_draw(&ranges, formulas[f]->id_least + id, &row);
            if (class_check(formulas[f], &row) != STATUS_OK)
                abort();
        }
    }
    close(fd);
}

/* Parses a checkpoint and the model that it describes, first unchanged and then with a correct checksum. */
static inline void fuzz_checkpoint(const uint8_t *data, size_t size)
{
    enum { DIGEST_AT = 16 }; /* offset of the checksum, after magic, schema and size */
    for (int repaired = 0; repaired <= 1; repaired++) {
        uint8_t *copy = malloc(size + 1);
        struct checkpoint checkpoint = {0};
        struct model model;
        char path[64];
        int fd;
        if (!copy)
            return;
        memcpy(copy, data, size);
        if (repaired && size >= DIGEST_AT + sizeof(uint64_t)) {
            memset(copy + DIGEST_AT, 0, sizeof(uint64_t));
            uint64_t digest = 0;
#ifdef HAVE_XXHASH
            digest = XXH3_64bits(copy, size);
#endif
            memcpy(copy + DIGEST_AT, &digest, sizeof digest);
        }
        if (fuzz_file(copy, size, &fd, path) && checkpoint_read(path, &checkpoint) == STATUS_OK &&
            checkpoint_model(&checkpoint, &model) == STATUS_OK &&
            model.arena_values != checkpoint.arena_values)
            abort();
        checkpoint_free(&checkpoint);
        close(fd);
        free(copy);
    }
}

/* Parses a CSV file of rows, which another program may have written. */
static inline void fuzz_rows(const uint8_t *data, size_t size)
{
    char path[64];
    int fd;
    struct row row = {0};
    row_text(&row, "schema", "x/1");
    row_text(&row, "text", "a,b");
    if (fuzz_file(data, size, &fd, path))
        (void)csv_check(path, &row);
    row_free(&row);
    close(fd);
}

/* Writes the cells of a table as CSV. The caller frees the text. */
static inline char *fuzz_table_text(const struct table *table, size_t *bytes)
{
    char *text = NULL;
    FILE *stream = open_memstream(&text, bytes);
    if (stream) /* the reader drops one byte order mark; the first cell may begin with another */
        fputs("\xEF\xBB\xBF", stream);
    for (size_t row = 0; stream && table->columns && row <= table->rows; row++)
        for (size_t i = 0; i < table->columns; i++) {
            const char *cell = table->cells[row * table->columns + i];
            if (table->columns == 1 && !*cell)
                fputs("\"\"", stream);
            text_csv_field(stream, cell);
            fputc(i + 1 < table->columns ? ',' : '\n', stream);
        }
    return stream && fclose(stream) == 0 ? text : NULL;
}

/* Reads a table, writes it and reads it again. Both tables must have the same cells. */
static inline void fuzz_table(const uint8_t *data, size_t size)
{
    struct table table, again = {0};
    char *text = malloc(size + 1);
    if (!text)
        return;
    memcpy(text, data, size);
    text[size] = '\0';
    if (table_parse("table", text, size, &table) == STATUS_OK && (text = fuzz_table_text(&table, &size))) {
        if (table_parse("table", text, size, &again) != STATUS_OK || again.rows != table.rows ||
            again.columns != table.columns)
            abort();
        for (size_t i = 0; i < table.columns * (table.rows + 1); i++)
            if (strcmp(table.cells[i], again.cells[i]) != 0)
                abort();
    }
    table_free(&table);
    table_free(&again);
}

static inline enum status fuzz_object(void *context, const struct s3_object *object)
{
    *(size_t *)context += strlen(object->name) + strlen(object->tag);
    return STATUS_OK;
}

static inline void fuzz_objects(const uint8_t *data, size_t size)
{
    char next[S3_TOKEN_MAX];
    size_t length = 0;
    char *text = malloc(size); /* exactly as long as the data, so that a read past their end is found */
    if (text && size)
        memcpy(text, data, size);
    if (text && s3_list(text, size, fuzz_object, &length, next) == STATUS_OK && strlen(next) >= sizeof next)
        abort();
    free(text);
}

/* A set in the format MDS, and its shard. */
struct fuzz_mds {
    const struct mds *mds;
    uint64_t size;
};

static inline bool fuzz_exists(void *context, const char *name)
{
    return strlen(name) & *(const size_t *)context;
}

/* All values must be inside of the shard. */
static inline enum status fuzz_columns(void *context, const struct mds_sample *sample)
{
    const struct fuzz_mds *fuzzed = context;
    for (uint32_t c = 0; c < fuzzed->mds->count; c++)
        if (sample->offsets[c] > fuzzed->size || sample->sizes[c] > fuzzed->size - sample->offsets[c])
            abort();
    return STATUS_OK;
}

/* Parses the first line as the index of a set, and the remaining bytes as its first shard. */
static inline void fuzz_mds(const uint8_t *data, size_t size)
{
    const uint8_t *end = memchr(data, '\n', size);
    size_t length = end ? (size_t)(end - data) : size;
    struct members choice;
    struct mds mds;
    struct fuzz_mds fuzzed = {&mds, size - length - (end != NULL)};
    char path[64];
    int fd = -1;
    bool found = false;
    if (mds_parse((const char *)data, length, fuzz_exists, &length, &mds, &found) == STATUS_OK && found &&
        members_parse(NULL, NULL, NULL, &choice) == STATUS_OK && mds_choose(&mds, &choice) == STATUS_OK &&
        fuzz_file(data + size - fuzzed.size, fuzzed.size, &fd, path) &&
        mds_list(&mds, 0, fd, fuzzed.size, fuzz_columns, &fuzzed) == STATUS_OK && mds.raw.channels > 0 &&
        (mds.raw.height == 0 || mds.raw.width == 0 || mds.raw.depth == 0))
        abort();
    if (fd >= 0)
        close(fd);
    mds_free(&mds);
}

/* Input of a target that builds a file: each call takes one byte; 0 at the end. */
struct fuzz_bytes {
    const uint8_t *at, *end;
};

static inline unsigned fuzz_take(struct fuzz_bytes *bytes)
{
    return bytes->at < bytes->end ? *bytes->at++ : 0;
}

/* A list that a target builds, and how many of its objects the parser has returned. */
struct fuzz_listing {
    struct fuzz_listed {
        char name[64], tag[64];
        uint64_t bytes;
    } objects[6];
    unsigned count, found;
};

/* Writes up to eight characters to `stream`, in one of the forms that XML allows, and appends them to `text`
 * as UTF-8. */
static inline void fuzz_xml_text(struct fuzz_bytes *bytes, FILE *stream, char text[64])
{
    static const struct {
        const char *utf8, *entity;
        unsigned code;
    } characters[] = {{"a", "a", 'a'},
                      {"/", "/", '/'},
                      {"&", "&amp;", '&'},
                      {"<", "&lt;", '<'},
                      {">", "&gt;", '>'},
                      {"\"", "&quot;", '"'},
                      {"'", "&apos;", '\''},
                      {"]", "]", ']'},
                      {"\xc3\xa9", "\xc3\xa9", 0xe9},
                      {"\xf0\x9f\x98\x80", "\xf0\x9f\x98\x80", 0x1f600},
                      {"\r", "&#13;", '\r'},
                      {"%", "%", '%'},
                      {"\t", "\t", '\t'},
                      {" ", " ", ' '}};
    for (unsigned left = 1 + fuzz_take(bytes) % 8; left > 0; left--) {
        const unsigned i = fuzz_take(bytes) % (sizeof characters / sizeof *characters);
        const unsigned form = fuzz_take(bytes) % 5;
        strcat(text, characters[i].utf8);
        if (form == 1)
            fprintf(stream, "&#%u;", characters[i].code);
        else if (form == 2)
            fprintf(stream, "&#x%X;", characters[i].code);
        else if (form == 3 && characters[i].code != '\r')
            fprintf(stream, "<![CDATA[%s]]>", characters[i].utf8);
        else
            fprintf(stream, "%s%s", form == 4 ? "<!-- <Key> -->" : "", characters[i].entity);
    }
}

/* Writes an object in the form of S3 or Azure, with its elements in any order, and other elements. */
static inline void fuzz_xml_object(struct fuzz_bytes *bytes, bool azure, FILE *stream,
                                   struct fuzz_listed *object)
{
    const unsigned order = fuzz_take(bytes);
    object->bytes = (uint64_t)fuzz_take(bytes) << fuzz_take(bytes) % 57;
    fputs(azure ? "<Blob>" : "<Contents>\n", stream);
    for (unsigned i = 0; i < 3; i++)
        switch ((i + order) % 3) {
        case 0:
            fputs(azure ? "<Name>" : "<Key>", stream);
            fuzz_xml_text(bytes, stream, object->name);
            fputs(azure ? "</Name >" : "</Key>", stream);
            break;
        case 1:
            fprintf(stream,
                    azure ? "<Properties><Content-Length>%llu</Content-Length></Properties>"
                          : "<Size>%llu</Size>",
                    (unsigned long long)object->bytes);
            break;
        default:
            if (order & 4)
                fputs("<Owner a='b'><Key>x</Key><Size/></Owner>", stream);
            if (order & 8)
                break; /* no tag */
            fputs(azure ? "<Properties><Etag>" : "<ETag>", stream);
            fuzz_xml_text(bytes, stream, object->tag);
            fputs(azure ? "</Etag></Properties>" : "</ETag>", stream);
        }
    fputs(azure ? "</Blob>" : "</Contents>", stream);
}

static inline enum status fuzz_listed(void *context, const struct s3_object *object)
{
    struct fuzz_listing *listing = context;
    const struct fuzz_listed *wanted = &listing->objects[listing->found++];
    if (listing->found > listing->count || strcmp(object->name, wanted->name) != 0 ||
        strcmp(object->tag, wanted->tag) != 0 || object->bytes != wanted->bytes)
        abort();
    return STATUS_OK;
}

/* Builds a list of objects from the bytes, and parses it: the parser must return the same objects and token.
 * A part of the list must be refused. In builds without expat, all lists are. */
static inline void fuzz_lists(const uint8_t *data, size_t size)
{
    struct fuzz_bytes bytes = {data, data + size};
    struct fuzz_listing listing = {.count = 0};
    char *text = NULL, token[64] = "", next[S3_TOKEN_MAX];
    const unsigned form = fuzz_take(&bytes), cut = fuzz_take(&bytes) << 8 | fuzz_take(&bytes);
    const bool azure = form & 1;
    FILE *stream = open_memstream(&text, &size);
    if (!stream)
        return;
    fputs(form & 2 ? "<?xml version='1.0' encoding='UTF-8'?>\n" : form & 4 ? "\xEF\xBB\xBF" : "", stream);
    fputs(azure      ? "<EnumerationResults a='b'>"
          : form & 8 ? "<ListBucketResult xmlns='u'>"
                     : "<ListBucketResult>",
          stream);
    for (int late = 0; late < 2; late++) {
        if ((form >> 4 & 1) == (unsigned)late && form & 32) {
            fputs(azure ? "<NextMarker>" : "<IsTruncated>true</IsTruncated><NextContinuationToken>", stream);
            fuzz_xml_text(&bytes, stream, token);
            fputs(azure ? "</NextMarker>" : "</NextContinuationToken>", stream);
        }
        if (late == 1)
            break;
        fputs(azure ? "<Blobs>" : "<KeyCount>9</KeyCount>", stream);
        for (; bytes.at < bytes.end && listing.count < 6; listing.count++)
            fuzz_xml_object(&bytes, azure, stream, &listing.objects[listing.count]);
        fputs(azure ? "</Blobs>" : "", stream);
    }
    fputs(azure ? "</EnumerationResults>" : "</ListBucketResult>", stream);
    if (fclose(stream) != 0)
        return;
    const enum status status = s3_list(text, size, fuzz_listed, &listing, next);
#ifdef HAVE_EXPAT
    if (status != STATUS_OK || listing.found != listing.count || strcmp(next, token) != 0)
        abort();
#else
    if (status != STATUS_UNAVAILABLE)
        abort();
#endif
    listing.found = 0;
    char *part =
        malloc(cut % size + 1); /* exactly as long as the part, so that a read past its end is found */
    if (part && (memcpy(part, text, cut % size), true) &&
        s3_list(part, cut % size, fuzz_listed, &listing, next) == STATUS_OK)
        abort();
    free(part);
    free(text);
}

/* Writes a file into the folder of a cache. */
static inline void fuzz_put(const char *path, const uint8_t *data, size_t size)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        abort();
    close(fd);
}

/* Aborts if an open entry does not have exactly these bytes. */
static inline void fuzz_same(int fd, const uint8_t *data, size_t size)
{
    struct stat info;
    uint8_t *copy = malloc(size + 1);
    if (!copy || fstat(fd, &info) != 0 || (size_t)info.st_size != size ||
        pread(fd, copy, size + 1, 0) != (ssize_t)size || memcmp(copy, data, size) != 0)
        abort();
    free(copy);
    close(fd);
}

/* The first bytes say how an entry of a cache and its draft differ from the remaining bytes, which are the
 * content. The entry is found only if it has this content; after it is written again, it is always found.
 * Builds without xxHash have no cache. */
static inline void fuzz_cache(const uint8_t *data, size_t size)
{
#ifdef HAVE_XXHASH
    static struct cache_entry entry = {.source = 1}; /* a process hashes the content of each source once */
    struct fuzz_bytes bytes = {data, data + size};
    const unsigned kind = fuzz_take(&bytes) % 8, at = fuzz_take(&bytes) << 8 | fuzz_take(&bytes);
    const unsigned draft_kind = fuzz_take(&bytes) % 4, flip = fuzz_take(&bytes), limited = fuzz_take(&bytes);
    char folder[] = "/dev/shm/fdsl-fuzz-XXXXXX", path[128], draft_path[128], lock[128], stored[128];
    const size_t length = (size_t)(bytes.end - bytes.at);
    uint8_t *changed = malloc(length + 2);
    struct cache_draft draft = {.fd = -1};
    uint64_t hash = 0;
    int fd;
    status_launched(1, 2); /* no warnings */
    if (!changed || !mkdtemp(folder)) {
        free(changed);
        return;
    }
    entry.source++;
    entry.bytes = length;
    hash = length ? XXH3_64bits(bytes.at, length) : 0;
    memcpy(changed, bytes.at, length);
    snprintf(lock, sizeof lock, "%s/lock", folder);
    snprintf(draft_path, sizeof draft_path, "%s/%016llx.part", folder, (unsigned long long)entry.source);
    snprintf(stored, sizeof stored, "%s/%016llx-%016llx.data", folder, (unsigned long long)entry.source,
             (unsigned long long)hash);
    snprintf(path, sizeof path, "%s/%016llx-%016llx.data", folder, (unsigned long long)entry.source,
             (unsigned long long)(hash ^ (kind == 4 ? 1 + flip : 0)));
    if (length)
        changed[at % length] ^= kind == 1 ? flip : 0;
    changed[length] = (uint8_t)flip;
    bool made = kind == 5 ? mkfifo(path, 0600) == 0
                : kind == 6
                    ? symlink("/dev/zero", path) == 0
                    : (fuzz_put(path, changed, kind == 2 ? at % (length + 1) : length + (kind == 3)), true);
    made &= draft_kind == 1   ? mkfifo(draft_path, 0600) == 0
            : draft_kind == 2 ? symlink(path, draft_path) == 0
            : draft_kind == 3 ? (fuzz_put(draft_path, changed, length + 1), true)
                              : true;
    const bool intact = kind == 0 || kind == 7 || (kind == 1 && (!flip || !length)) ||
                        (kind == 2 && at % (length + 1) == length);
    for (int frozen = 1; made && frozen >= 0; frozen--) {
        if (cache_find(folder, &entry, frozen, &fd) != STATUS_OK || (fd >= 0) != intact)
            abort();
        if (fd >= 0)
            fuzz_same(fd, bytes.at, length);
    }
    if (intact)
        unlink(path);
    const uint64_t limit = limited & 1 ? length + 1 : 0;
    entry.bytes = limited & 2 ? CACHE_UNKNOWN : length;
    const enum status begun = cache_begin(folder, &entry, limit, NULL, &draft, &fd);
    const size_t first = at % (length + 1);
    if (begun != STATUS_OK || fd >= 0)
        abort();
    if (entry.bytes == length
            ? pwrite(draft.fd, bytes.at, length, 0) != (ssize_t)length
            : cache_append(folder, limit, NULL, &draft, bytes.at, first) != STATUS_OK ||
                  cache_append(folder, limit, NULL, &draft, bytes.at + first, length - first) != STATUS_OK)
        abort();
    entry.bytes = length;
    if (cache_complete(folder, &entry, NULL, &draft, &fd) != STATUS_OK)
        abort();
    fuzz_same(fd, bytes.at, length);
    if (cache_find(folder, &entry, false, &fd) != STATUS_OK || fd < 0)
        abort();
    fuzz_same(fd, bytes.at, length);
    if (unlink(stored) != 0 || unlink(lock) != 0 || rmdir(folder) != 0) /* nothing else is left */
        abort();
    free(changed);
#else
    (void)data, (void)size;
#endif
}

/* Checks the markers of an image. Then decodes the whole image, and a random crop of it, and makes it
 * smaller. Large images are not decoded, because that takes too long for a fuzzer. */
static inline void fuzz_jpeg(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size + 1); /* ends where the data end, so that a read past their end is found */
    const struct image_fit fits[] = {{.res = 0},
                                     {.how = FIT_RANDOM_RESIZED_CROP, .res = 7, .channels = 3},
                                     {.how = FIT_SHORTEST, .res = 7, .unscaled = true}};
    struct image_scratch scratch = {.jpeg = jpeg_open()};
    struct image image;
    struct jpeg_shape shape;
    bool is_image;
    bool begun = jpeg_begin(scratch.jpeg, data, size, &shape) == STATUS_OK;
    bool small = begun && (uint64_t)shape.width * shape.height <= 1 << 20;
    memcpy(copy + 1, data, size);
    if (jpeg_intact(copy + 1, size, begun ? shape.width : 16, begun ? shape.height : 16) && size < 20)
        abort(); /* no image is that short */
    free(copy);
    for (int i = 0; small && i < 3; i++)
        (void)image_fit(&fits[i], "jpg", data, size, 0, (uint32_t)size, &scratch, &image, &is_image);
    image_scratch_close(&scratch);
}

/* Decodes an image, which ends where the data end, if it is not large. */
static inline void fuzz_webp(const uint8_t *data, size_t size)
{
    uint32_t width, height;
    struct image_scratch scratch = {0};
    struct image image;
    bool is_image;
    if (webp_shape(data, size, &width, &height) == STATUS_OK && (uint64_t)width * height <= 1 << 20 &&
        image_decode("webp", data, size, &scratch, &image, &is_image) == STATUS_OK &&
        (!is_image || image_values(&image) != (size_t)3 * width * height))
        abort();
    image_scratch_close(&scratch);
}

#include "stream.h"

static const struct {
    const char *name;
    void (*feed)(const uint8_t *data, size_t size);
} fuzz_targets[] = {{"tar", fuzz_tar},
                    {"npy", fuzz_npy},
                    {"idx", fuzz_idx},
                    {"cifar", fuzz_cifar},
                    {"png", fuzz_png},
                    {"wids", fuzz_wids},
                    {"index", fuzz_index},
                    {"gzip", fuzz_gzip},
                    {"unpack", fuzz_unpack},
                    {"classes", fuzz_classes},
                    {"ranges", fuzz_ranges},
                    {"rows", fuzz_rows},
                    {"checkpoint", fuzz_checkpoint},
                    {"table", fuzz_table},
                    {"safetensors", fuzz_safetensors},
                    {"torch", fuzz_torch},
                    {"pickle", fuzz_pickle},
                    {"npz", fuzz_npz},
                    {"embeddings", fuzz_embeddings},
                    {"mds", fuzz_mds},
                    {"members", fuzz_members},
                    {"objects", fuzz_objects},
                    {"jpeg", fuzz_jpeg},
                    {"webp", fuzz_webp},
                    {"lists", fuzz_lists},
                    {"cache", fuzz_cache},
                    {"stream", fuzz_stream},
                    {"published", fuzz_published}};

#endif
