/* A bank of orbits (ifs.h) in a cache file. The file has all orbits of a set. It is mapped read-only, so the
 * processes of a machine share its pages. It is written under another name and then renamed, so a mapping
 * stays valid if the file is replaced. Nobody may write to it: it has no permission for that, and a bank
 * checks the time of modification before and after each batch (ifs_bank_check()).
 *
 * The file has a header, which is compared as a whole, the maps in the order of the orbits, one 32-bit word
 * of facts per orbit, and a hash of all this. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core/file.h"
#include "core/parallel.h"
#include "core/text.h"
#include "core/timer.h"
#include "data/checksum.h"
#include "synth/ifs.h"

enum { VERSION = 1, HEADER_BYTES = 4096, PART_ORBITS = 800 };

struct header {
    char magic[8];
    uint32_t version, classes, res, points;
    struct ifs_rules rules;
    uint32_t unused;                  /* 0 */
    uint64_t orbits, stride, systems; /* stride: of the maps; systems: the hash of the classes */
};
_Static_assert(sizeof(struct header) == 80, "the header has no gaps");

/* A bank that has a file, and the parts of the file. */
struct kept {
    struct header header;
    const struct ifs_system *systems;
    const double *uniforms;
    struct ifs_bank *bank;
    int threads;
    size_t class_bytes; /* of the maps of a class */
    uint64_t *hashes;   /* of the maps of each class */
    double begin_s;     /* of opening */
    char path[PATH_MAX];
};

static size_t file_bytes(const struct kept *kept)
{
    const struct header *header = &kept->header;
    return HEADER_BYTES + header->orbits * (header->stride + sizeof(uint32_t)) + sizeof(uint64_t);
}

/* ---- Hashes ---- */

/* Maps of consecutive classes. */
struct hashing {
    const uint8_t *maps;
    size_t class_bytes;
    uint32_t first; /* class */
    uint64_t *hashes;
};

static void hash_class(void *context, uint64_t task, int thread)
{
    const struct hashing *hashing = context;
    const uint64_t c = hashing->first + task;
    (void)thread;
    hashing->hashes[c] =
        checksum_seeded(hashing->maps + task * hashing->class_bytes, hashing->class_bytes, c);
}

static void hash_classes(const struct kept *kept, const uint8_t *maps, uint32_t first, uint32_t count)
{
    struct hashing hashing = {maps, kept->class_bytes, first, kept->hashes};
    parallel_for(kept->threads, count, hash_class, &hashing);
}

/* Returns the hash at the end of the file, after hash_classes() for all classes. */
static uint64_t hash_all(const struct kept *kept, const uint32_t *facts)
{
    uint64_t hash = checksum_seeded(&kept->header, sizeof kept->header, 0);
    hash = checksum_seeded(kept->hashes, kept->header.classes * sizeof *kept->hashes, hash);
    return checksum_seeded(facts, kept->header.orbits * sizeof *facts, hash);
}

/* ---- Reading ---- */

/* Returns whether the mapping is the file that the header describes, unchanged. */
static bool is_intact(const struct kept *kept, const uint8_t *file)
{
    const size_t rest = file_bytes(kept) - sizeof(uint64_t);
    uint64_t stored;
    if (memcmp(file, &kept->header, sizeof kept->header) != 0)
        return false;
    hash_classes(kept, file + HEADER_BYTES, 0, kept->header.classes);
    memcpy(&stored, file + rest, sizeof stored);
    return stored == hash_all(kept, (const uint32_t *)(file + HEADER_BYTES +
                                                       kept->header.orbits * kept->header.stride));
}

/* Maps the file, and gives its orbits to the bank. Sets `*found` to false if there is no file, or if it is
 * broken or foreign, which is said once if `says` is set. `*found` is also false if it cannot be mapped. */
static void take_file(struct kept *kept, bool says, bool *found)
{
    const size_t bytes = file_bytes(kept);
    struct stat info;
    *found = false;
    const int fd = open(kept->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* do not wait for a pipe's writer */
    if (fd < 0)
        return;
    const bool fits = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && (uint64_t)info.st_size == bytes;
    void *file = fits ? mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    struct guard guard = {.open = false};
    *found = file != MAP_FAILED && guard_open(&guard) == STATUS_OK &&
             guard_fill_range(&guard, file, bytes) == STATUS_OK && is_intact(kept, file);
    if (*found) {
        const uint8_t *maps = (const uint8_t *)file + HEADER_BYTES;
        ifs_bank_adopt(kept->bank, fd, &guard, info.st_mtim, file, bytes, maps,
                       (const uint32_t *)(maps + kept->header.orbits * kept->header.stride),
                       timer_now_s() - kept->begin_s);
    } else {
        guard_close(&guard);
        close(fd);
        if (file != MAP_FAILED)
            munmap(file, bytes);
        if (says)
            status_warn("%s is damaged or belongs to other orbits; computing it again", kept->path);
    }
}

/* ---- Writing ---- */

/* Computes the orbits of `count` classes from class `first` on, and copies them to `maps` and `facts`. */
static enum status compute_part(const struct kept *kept, uint32_t first, uint32_t count, uint8_t *maps,
                                uint32_t *facts)
{
    const struct header *header = &kept->header;
    const size_t orbits = (size_t)count * ifs_orbits(&header->rules);
    const size_t map_bytes = ifs_map_bytes(header->points, header->res);
    struct ifs_bank *bank;
    FREED uint64_t *numbers = malloc(orbits * sizeof *numbers);
    TRY(ALLOCATED(numbers, "out of memory for orbits"));
    for (size_t i = 0; i < orbits; i++)
        numbers[i] = i;
    TRY(ifs_bank_open(&header->rules, kept->systems + first, count, kept->uniforms, header->res,
                      header->points, &bank));
    const enum status status = ifs_bank_need(bank, numbers, orbits, kept->threads);
    for (size_t i = 0; status == STATUS_OK && i < orbits; i++) {
        const struct ifs_orbit orbit = ifs_bank_orbit(bank, i);
        memcpy(maps + i * header->stride, ifs_bank_map(bank, i), map_bytes);
        memset(maps + i * header->stride + map_bytes, 0, header->stride - map_bytes);
        facts[i] = orbit.cells << 1 | orbit.overflows;
    }
    ifs_bank_close(bank);
    return status;
}

static enum status write_parts(const struct kept *kept, struct file_writer *writer, uint8_t *maps,
                               uint32_t *facts)
{
    const struct header *header = &kept->header;
    const uint32_t orbits = ifs_orbits(&header->rules);
    const uint32_t part = orbits < PART_ORBITS ? PART_ORBITS / orbits : 1;
    struct progress progress;
    enum status status = STATUS_OK;
    progress_begin(&progress, true);
    for (uint32_t first = 0; status == STATUS_OK && first < header->classes; first += part) {
        const uint32_t count = header->classes - first < part ? header->classes - first : part;
        status = compute_part(kept, first, count, maps, facts + (size_t)first * orbits);
        if (status == STATUS_OK) {
            hash_classes(kept, maps, first, count);
            status = file_add(writer, maps, count * kept->class_bytes);
        }
        if (progress_due(&progress))
            progress_show(&progress, "computing orbits for --cache-dir: classes %u of %u", (unsigned)first,
                          (unsigned)header->classes);
    }
    progress_clear(&progress);
    return status;
}

/* Computes all orbits and writes the file. */
static enum status write_file(const struct kept *kept)
{
    const struct header *header = &kept->header;
    const size_t part = PART_ORBITS * header->stride;
    struct file_writer writer;
    uint64_t hash;
    FREED uint8_t *begin = calloc(1, HEADER_BYTES);
    FREED uint8_t *maps = malloc(part > kept->class_bytes ? part : kept->class_bytes);
    FREED uint32_t *facts = malloc(header->orbits * sizeof *facts);
    TRY(ALLOCATED(begin && maps && facts, "out of memory for orbits"));
    memcpy(begin, header, sizeof *header);
    TRY(file_begin(&writer, kept->path));
    enum status status = file_add(&writer, begin, HEADER_BYTES);
    if (status == STATUS_OK)
        status = write_parts(kept, &writer, maps, facts);
    if (status == STATUS_OK)
        status = file_add(&writer, facts, header->orbits * sizeof *facts);
    hash = status == STATUS_OK ? hash_all(kept, facts) : 0;
    if (status == STATUS_OK)
        status = file_add(&writer, &hash, sizeof hash);
    if (status == STATUS_OK && fchmod(writer.fd, 0444) != 0)
        status = status_set(STATUS_FAILED, "%s cannot be made read-only: %s", kept->path, strerror(errno));
    if (status == STATUS_OK)
        return file_end(&writer);
    file_abandon(&writer);
    return status;
}

/* ---- Opening ---- */

/* Locks an open file. Waits as long as another process computes orbits. Some file systems have no locks,
 * which
 * `*locked` says; then several processes may compute the same file, of which the last one remains. */
static enum status wait_for_lock(int fd, const char *path, bool *locked)
{
    const double begin_s = timer_now_s();
    *locked = false;
    for (bool said = false; flock(fd, LOCK_EX | LOCK_NB) != 0;) {
        if (errno == ENOSYS || errno == EOPNOTSUPP || errno == ENOLCK)
            return STATUS_OK;
        if (errno != EWOULDBLOCK && errno != EINTR)
            return status_set(STATUS_FAILED, "%s cannot be locked: %s", path, strerror(errno));
        if (file_signal_held())
            return status_set(STATUS_FAILED, "interrupted while another process computes orbits");
        if (!said && timer_now_s() - begin_s > 1) {
            status_say("%s: waiting for another process, which computes the orbits", path);
            said = true;
        }
        nanosleep(&(struct timespec){0, 20000000}, NULL);
    }
    *locked = true;
    return STATUS_OK;
}

/* Removes temporary files that killed processes left, which may be as large as the bank. The caller holds the
 * lock, so no other process writes one. */
static void remove_temporaries(const struct kept *kept, const char *folder)
{
    const char *name = strrchr(kept->path, '/') + 1;
    const size_t length = strlen(name);
    DIR *directory = opendir(folder);
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (strncmp(entry->d_name, name, length) == 0 && text_ends_in(entry->d_name, ".tmp"))
            (void)unlinkat(dirfd(directory), entry->d_name, 0); /* may fail: it only wastes space */
    if (directory)
        closedir(directory);
}

/* Takes the file, or writes it first. One process of those that use the folder writes; the others wait. */
static enum status take_or_write(struct kept *kept, const char *folder)
{
    bool found, locked;
    char lock[PATH_MAX + 8];
    const int cause = mkdir(folder, 0777) == 0 ? 0 : errno;
    if (cause != 0 && access(folder, F_OK) != 0)
        return status_set(STATUS_FAILED, "cannot create the folder %s: %s", folder, strerror(cause));
    take_file(kept, access(kept->path, F_OK) == 0, &found);
    if (found)
        return STATUS_OK;
    snprintf(lock, sizeof lock, "%s.lock", kept->path);
    const int fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return status_set(STATUS_FAILED, "cannot create %s: %s", lock, strerror(errno));
    enum status status = wait_for_lock(fd, lock, &locked);
    if (status == STATUS_OK && locked)
        remove_temporaries(kept, folder);
    if (status == STATUS_OK) {
        take_file(kept, false, &found); /* another process may have written it */
        status = found ? STATUS_OK : write_file(kept);
        if (status == STATUS_OK && !found) {
            take_file(kept, false, &found);
            if (!found)
                status = status_set(STATUS_FAILED, "%s was written, but cannot be read again", kept->path);
        }
    }
    lock_close(fd);
    return status;
}

enum status ifs_bank_open_kept(const char *folder, int threads, const struct ifs_rules *rules,
                               const struct ifs_system *systems, uint32_t count, const double *uniforms,
                               uint32_t res, bool points, struct ifs_bank **bank)
{
    TRY(ifs_bank_open(rules, systems, count, uniforms, res, points, bank));
#ifndef HAVE_XXHASH
    (void)folder, (void)threads, (void)take_or_write;
    return status_set(STATUS_UNAVAILABLE, "%s needs xxHash, which this build lacks",
                      OPTION_OR_FIELD("--cache-dir", "cache_dir"));
#else
    FREED struct kept *kept = calloc(1, sizeof *kept);
    FREED uint64_t *hashes = malloc(count * sizeof *hashes);
    TRY(ALLOCATED(kept && hashes, "out of memory for orbits"));
    *kept = (struct kept){.header = {.magic = "fdslbank",
                                     .version = VERSION,
                                     .classes = count,
                                     .res = res,
                                     .points = points,
                                     .rules = *rules,
                                     .orbits = (uint64_t)count * ifs_orbits(rules),
                                     .stride = ifs_map_stride(points, res),
                                     .systems = checksum_seeded(systems, count * sizeof *systems, 0)},
                          .systems = systems,
                          .uniforms = uniforms,
                          .bank = *bank,
                          .threads = threads,
                          .hashes = hashes,
                          .begin_s = timer_now_s()};
    kept->class_bytes = ifs_orbits(rules) * kept->header.stride;
    const int length = snprintf(kept->path, sizeof kept->path, "%s/fractals-%016" PRIx64 ".bank", folder,
                                checksum_seeded(&kept->header, sizeof kept->header, 0));
    const enum status status = length < (int)sizeof kept->path
                                   ? take_or_write(kept, folder)
                                   : status_set(STATUS_USAGE, "the path is too long");
    return status_prefix(status, "%s %s", OPTION_OR_FIELD("--cache-dir", "cache_dir"), folder);
#endif
}
