/* Runs the fuzz targets on the corpus: all files in tests/fuzz/, complete and truncated at each of their
 * first 4096 bytes. make fuzz starts from the same files. */
#include <criterion/criterion.h>

#include <dirent.h>
#include <limits.h>

#include "core/file.h"
#include "fuzz/targets.h"

enum { CUT_MAX = 4096 };

/* Passes the input in a block of exact size, so that a sanitizer detects reads past its end. */
static void feed_exactly(void (*feed)(const uint8_t *, size_t), const char *bytes, size_t size)
{
    uint8_t *exact = malloc(size ? size : 1);
    cr_assert_not_null(exact);
    memcpy(exact, bytes, size);
    feed(exact, size);
    free(exact);
}

static int feed_folder(const char *folder, void (*feed)(const uint8_t *, size_t))
{
    int files = 0;
    DIR *list = opendir(folder);
    cr_assert_not_null(list, "%s", folder);
    for (struct dirent *entry; (entry = readdir(list));) {
        char path[2 * PATH_MAX], *bytes;
        size_t size;
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        cr_assert_eq(file_read(path, &bytes, &size), STATUS_OK, "%s", status_text());
        feed_exactly(feed, bytes, size);
        for (size_t cut = 0; cut < size && cut < CUT_MAX; cut++)
            feed_exactly(feed, bytes, cut);
        free(bytes);
        files++;
    }
    closedir(list);
    return files;
}

Test(fuzz, no_target_fails_on_its_corpus, .timeout = 60)
{
    for (size_t i = 0; i < COUNT_OF(fuzz_targets); i++) {
        char folder[PATH_MAX];
        snprintf(folder, sizeof folder, "tests/fuzz/%s", fuzz_targets[i].name);
        cr_assert_gt(feed_folder(folder, fuzz_targets[i].feed), 0, "%s has no seeds", folder);
    }
}
