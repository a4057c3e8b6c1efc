/* Tables and states of published sets, and the file that keeps the states. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "core/parallel.h"
#include "core/timer.h"
#include "data/remote.h"
#include "synth/input.h"
#include "synth/lines.h"
#include "synth/published_files.h"
#include "synth/published_parts.h"

/* ---- Directions ---- */

/* A hash of all cosines and sines, computed by the C library that the published images were drawn with: glibc
 * from 2.28, on a processor with FMA. */
#define DIRECTIONS_HASH UINT64_C(0xea9d2bd2cd07d422)

/* Returns a hash of `count` 32-bit words that begins with `hash`. */
static uint64_t hash_words(uint64_t hash, const uint32_t *words, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        hash = (hash ^ words[i]) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
    }
    return hash;
}

static enum status fill_directions(struct published *published)
{
    enum { FIRST = PUBLISHED_VERTICES_MIN, LAST = PUBLISHED_VERTICES_MAX };
    size_t count = (size_t)(LAST + 1) * LAST - FIRST * (FIRST - 1);
    published->directions = malloc(count * sizeof *published->directions);
    TRY(ALLOCATED(published->directions, "out of memory for tables of sines"));
    double *to = published->directions;
    for (uint32_t q = FIRST; q <= LAST; q++) {
        double angle = M_PI * 2 / q;
        for (uint32_t v = 0; v < q; v++) {
            to[v] = cos(angle * v);
            to[q + v] = sin(angle * v);
        }
        to += 2 * q;
    }
    const void *words = published->directions;
    uint64_t hash = hash_words(1, words, 2 * count);
    if (hash != DIRECTIONS_HASH)
        return status_set(STATUS_UNAVAILABLE,
                          "%s cannot be drawn as published on this machine: its C library rounds cosines and "
                          "sines differently (hash %016llx), so that pixels would differ; use glibc 2.28 or "
                          "newer on a processor with FMA, or the random numbers philox",
                          published->set->name, (unsigned long long)hash);
    return STATUS_OK;
}

/* ---- Computing states ---- */

static _Thread_local const struct remote_cancel *cancel_by; /* of this thread; NULL: none */

void published_cancel_by(const struct remote_cancel *cancel)
{
    cancel_by = cancel;
}

const struct remote_cancel *published_cancel(void)
{
    return cancel_by;
}

static bool is_cancelled(void)
{
    return cancel_by && cancel_by->set;
}

static enum status stopped(const struct published_set *set)
{
    return status_set(STATUS_FAILED, "reading the random numbers of %s was stopped", set->name);
}

/* Computes the states of all blocks. One task per script thread. */
struct scan {
    struct published *published;
    const atomic_bool *cancel; /* NULL: none */
    struct progress progress;
    _Atomic uint32_t done; /* blocks */
};

static void show(struct scan *scan)
{
    if (progress_due(&scan->progress))
        progress_show(
            &scan->progress, "%s: reading the random numbers of the published script, once: %.0f %%",
            scan->published->set->name, 100.0 * scan->done / published_blocks(scan->published->set));
}

static void scan_thread(void *context, uint64_t task, int thread)
{
    struct scan *scan = context;
    struct published *published = scan->published;
    const struct published_set *set = published->set;
    uint32_t count = published_blocks(set) / set->threads, first = (uint32_t)task * count;
    uint32_t seed = (uint32_t)task + 1;
    struct twister stream;
    twister_seed_array(&stream, &seed, 1);
    for (uint32_t block = first; block < first + count && !(scan->cancel && *scan->cancel); block++) {
        published->states[block] = stream;
        published_skip_block(published, block, &stream);
        scan->done++;
        if (thread == 0)
            show(scan);
    }
}

static enum status scan_states(struct published *published, int threads)
{
    struct scan scan = {.published = published, .cancel = cancel_by ? &cancel_by->set : NULL};
    progress_begin(&scan.progress, true);
    parallel_for(threads, published->set->threads, scan_thread, &scan);
    progress_clear(&scan.progress);
    return scan.done == published_blocks(published->set) ? STATUS_OK : stopped(published->set);
}

/* Draws the classes of a set. `states` are those of its classes; NULL: SegRCDB, whose classes have their own
 * stream. */
static void draw_classes(const struct published_set *set, const struct twister *states,
                         struct published_class *classes)
{
    uint32_t seed = 0;
    struct twister stream;
    twister_seed_array(&stream, &seed, 1);
    for (uint32_t i = 0; i < set->classes; i++) {
        if (states)
            stream = states[i];
        published_draw_class(set->law, &stream, &classes[i]);
        classes[i].number = set->first_class + i;
    }
}

/* ---- The file ---- */

/* A header, and the states as little-endian words, which each machine that we support stores. */
struct states_header {
    char magic[8];
    uint32_t version, threads, blocks, block_images;
    char set[32];
    uint64_t hash; /* of the states */
};

static const char magic[8] = "FDSLMT19";
enum { VERSION = 1 }; /* increase it if the states of a set change */

static struct states_header make_header(const struct published *published)
{
    struct states_header header = {.version = VERSION,
                                   .threads = published->set->threads,
                                   .blocks = published_blocks(published->set),
                                   .block_images = published->set->block_images};
    memcpy(header.magic, magic, sizeof magic);
    snprintf(header.set, sizeof header.set, "%s", published->set->name);
    header.hash = hash_words(VERSION, published->states[0].word,
                             published_blocks(published->set) * (sizeof(struct twister) / sizeof(uint32_t)));
    return header;
}

void cache_path(const char *name, char path[PATH_MAX])
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int length = 0;
    if (cache && cache[0] == '/')
        length = snprintf(path, PATH_MAX, "%s/fdsl-bench/%s", cache, name);
    else if (home && home[0] == '/')
        length = snprintf(path, PATH_MAX, "%s/.cache/fdsl-bench/%s", home, name);
    if (length <= 0 || length >= PATH_MAX)
        path[0] = '\0';
}

static bool states_valid(const struct published *published)
{
    const struct published_set *set = published->set;
    uint32_t count = published_blocks(set) / set->threads;
    for (uint32_t block = 0; block < published_blocks(set); block++) {
        uint32_t seed = block / count + 1;
        struct twister first;
        if (published->states[block].next > TWISTER_WORDS)
            return false;
        if (block % count != 0)
            continue;
        twister_seed_array(&first, &seed, 1);
        if (memcmp(&first, &published->states[block], sizeof first) != 0)
            return false;
    }
    return true;
}

/* Reads the states. Returns false if there is no valid file; warns if there is a damaged one. */
static bool states_read(struct published *published, const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return false;
    struct states_header header, expected;
    struct stat info;
    size_t bytes = published_blocks(published->set) * sizeof *published->states, got;
    bool whole = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
                 (uint64_t)info.st_size == sizeof header + bytes &&
                 file_read_at(fd, &header, sizeof header, 0, &got) && got == sizeof header &&
                 file_read_at(fd, published->states, bytes, sizeof header, &got) && got == bytes;
    close(fd);
    if (whole) {
        expected = make_header(published);
        whole = memcmp(&header, &expected, sizeof header) == 0 && states_valid(published);
    }
    if (!whole)
        status_warn("%s is damaged or of another version; computing it again", path);
    return whole;
}

void cache_make_folders(char *path)
{
    for (char *slash = path[0] ? strchr(path + 1, '/') : NULL; slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0777); /* an error shows when the file is written */
        *slash = '/';
    }
}

static enum status states_write(const struct published *published, char *path)
{
    struct states_header header = make_header(published);
    struct file_writer writer;
    cache_make_folders(path);
    TRY(file_begin(&writer, path));
    enum status status = file_add(&writer, &header, sizeof header);
    if (status == STATUS_OK)
        status = file_add(&writer, published->states,
                          published_blocks(published->set) * sizeof *published->states);
    return status == STATUS_OK ? file_end(&writer) : status;
}

/* Gets the states from the file, or computes them and writes the file. */
static enum status get_states(struct published *published, int threads)
{
    char name[64], path[PATH_MAX];
    snprintf(name, sizeof name, "%s.states", published->set->name);
    cache_path(name, path);
    if (published->set->law == PUBLISHED_SEGRCDB)
        draw_classes(published->set, NULL, published->classes); /* the images depend on them */
    if (path[0] && states_read(published, path)) {
        if (published->set->law != PUBLISHED_SEGRCDB)
            draw_classes(published->set, published->states, published->classes);
        return STATUS_OK;
    }
    TRY(scan_states(published, threads));
    if (!path[0] || states_write(published, path) != STATUS_OK)
        status_warn("the positions in the random numbers of %s are computed at every start, because they "
                    "cannot be stored%s%s; set XDG_CACHE_HOME to a folder that can be written",
                    published->set->name, path[0] ? ": " : "", path[0] ? status_text() : "");
    return STATUS_OK;
}

/* ---- Opening ---- */

static void published_free(struct published *published)
{
    uint32_t blocks = published_blocks(published->set);
    for (uint32_t block = 0; published->cursors && block < blocks; block++)
        free(published->cursors[block]);
    free(published->cursors);
    free(published->classes);
    free(published->states);
    free(published->directions);
    free(published);
}

static enum status open_parts(struct published *published, int threads)
{
    const struct published_set *set = published->set;
    published->classes = calloc(set->classes, sizeof *published->classes);
    published->states = malloc(published_blocks(set) * sizeof *published->states);
    published->cursors = calloc(published_blocks(set), sizeof *published->cursors);
    TRY(ALLOCATED(published->classes && published->states && published->cursors,
                  "out of memory for the random numbers of %s", set->name));
    TRY(fill_directions(published));
    return get_states(published, threads);
}

#define CANCEL_POLL_S 0.1 /* time between two looks at the caller's cancellation */

/* The set that was opened last, or NULL. While a thread opens a set, which it does without the lock, `latest`
 * is NULL and `opening` is true. */
static struct published *latest;
static bool opening;
static pthread_mutex_t latest_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t latest_opened; /* `opening` has become false */

static void make_condition(void)
{
    timer_cond_init(&latest_opened);
}

static bool is_latest(const struct published_set *set)
{
    return latest && strcmp(latest->set->name, set->name) == 0 && latest->set->threads == set->threads &&
           latest->set->classes == set->classes && latest->set->instances == set->instances;
}

static void forget_latest(void)
{
    if (latest && latest->users == 0)
        published_free(latest);
    latest = NULL;
}

/* Waits until no other thread opens a set. Called with the lock. */
static enum status await_turn(const struct published_set *set)
{
    while (opening && !is_cancelled()) {
        const struct timespec until = timer_deadline(CANCEL_POLL_S);
        pthread_cond_timedwait(&latest_opened, &latest_lock, &until);
    }
    return opening ? stopped(set) : STATUS_OK;
}

/* Opens a set. `*published` is NULL after a failure. */
static enum status open_set(const struct published_set *set, int threads, struct published **published)
{
    struct published *opened = *published = calloc(1, sizeof *opened);
    TRY(ALLOCATED(opened, "out of memory for %s", set->name));
    opened->own_set = *set;
    opened->set = &opened->own_set;
    enum status status = open_parts(opened, threads);
    if (status == STATUS_OK)
        return STATUS_OK;
    published_free(opened);
    *published = NULL;
    return status;
}

enum status published_open(const struct published_set *set, int threads, struct published **published)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    *published = NULL;
    pthread_once(&once, make_condition);
    pthread_mutex_lock(&latest_lock);
    enum status status = await_turn(set);
    if (status == STATUS_OK && !is_latest(set)) {
        struct published *opened;
        forget_latest();
        opening = true;
        pthread_mutex_unlock(&latest_lock);
        status = open_set(set, threads, &opened);
        pthread_mutex_lock(&latest_lock);
        opening = false;
        latest = opened;
        pthread_cond_broadcast(&latest_opened);
    }
    if (status == STATUS_OK) {
        *published = latest;
        latest->users++;
    }
    pthread_mutex_unlock(&latest_lock);
    return status;
}

void published_close(struct published *published)
{
    if (!published)
        return;
    pthread_mutex_lock(&latest_lock);
    published->users--;
    if (published->users == 0 && published != latest)
        published_free(published);
    pthread_mutex_unlock(&latest_lock);
}

void published_forget(void)
{
    pthread_mutex_lock(&latest_lock);
    forget_latest();
    pthread_mutex_unlock(&latest_lock);
}

/* ---- What formulas use (lines.h) ---- */

static enum status open_stream(const struct synth *synth, int threads, struct published **published)
{
    return published_open(synth->set, threads, published);
}

const struct published_stream published_lines = {
    .open = open_stream,
    .draw = published_draw,
    .scratch_bytes = published_scratch_bytes,
    .close = published_close,
};

void published_row(const struct formula *formula, const struct published_class *class_, struct class_row *row)
{
    const struct {
        const char *column;
        double value;
    } values[] = {
        {"vertices", class_->vertices},     {"orbits", class_->orbits},   {"noise", class_->noise},
        {"line_width", class_->line_width}, {"radius", class_->radius},   {"oval_x", class_->oval_x},
        {"oval_y", class_->oval_y},         {"freq1", class_->wave1},     {"freq2", class_->wave2},
        {"start_x", class_->start_w},       {"start_y", class_->start_h},
    };
    *row = (struct class_row){.id = class_->number};
    for (size_t i = 0; i < COUNT_OF(values); i++)
        (void)published_set_column(formula, row, values[i].column, values[i].value);
}

static void fill_rows(const struct formula_preset *preset, const struct published_class *classes,
                      uint32_t count, struct class_row *rows)
{
    for (uint32_t i = 0; i < count; i++)
        published_row(formula_of_preset(preset->name), &classes[i], &rows[i]);
}

enum status published_rows(const struct formula_preset *preset, uint32_t count, struct class_row *rows)
{
    struct published *published;
    if (preset->set->law == PUBLISHED_SEGRCDB) { /* the states are not needed */
        FREED struct published_class *classes = calloc(preset->set->classes, sizeof *classes);
        TRY(ALLOCATED(classes, "out of memory for the classes of %s", preset->name));
        draw_classes(preset->set, NULL, classes);
        fill_rows(preset, classes, count, rows);
        return STATUS_OK;
    }
    TRY(published_open(preset->set, parallel_threads(), &published));
    fill_rows(preset, published_classes(published), count, rows);
    published_close(published);
    return STATUS_OK;
}
