/* Tests the order in which files and folders are synced and renamed, so that data survive a power failure.
 * This suite replaces fsync() and rename() with functions that log their calls. */
#include <criterion/criterion.h>

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/file.h"
#include "core/record.h"

/* The log of calls, one letter per call. F is fsync() of a file, D of the test's folder, d of another folder.
 * R is rename(). */
static char notes[64], folder[] = "/tmp/fdsl-sync-XXXXXX";

static void note(char letter)
{
    size_t used = strlen(notes);
    cr_assert_lt(used + 1, sizeof notes);
    notes[used] = letter;
}

int fsync(int fd)
{
    struct stat info, own;
    cr_assert(fstat(fd, &info) == 0 && stat(folder, &own) == 0);
    note(!S_ISDIR(info.st_mode) ? 'F' : info.st_ino == own.st_ino && info.st_dev == own.st_dev ? 'D' : 'd');
    return (int)syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to)
{
    note('R');
    return renameat(AT_FDCWD, from, AT_FDCWD, to);
}

static void set_up(void)
{
    cr_assert_not_null(mkdtemp(folder));
}

static void tear_down(void)
{
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    cr_assert_eq(system(command), 0);
}

TestSuite(file_sync, .init = set_up, .fini = tear_down, .timeout = 60);

static const char *in_folder(const char *name)
{
    static char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* The file is synced and renamed; then its folder is synced. So the file survives a power failure. */
Test(file_sync, a_file_is_durable)
{
    cr_assert_eq(file_write_atomic(in_folder("new"), "one", 3), STATUS_OK, "%s", status_text());
    cr_expect_str_eq(notes, "FRD");
    cr_assert_eq(file_write_atomic(in_folder("new"), "two", 3), STATUS_OK);
    cr_expect_str_eq(notes, "FRDFRD");
}

Test(file_sync, files_of_a_group_are_complete_before_the_first_is_renamed)
{
    struct file_writer one, two;
    cr_assert(file_begin(&one, in_folder("one")) == STATUS_OK && file_add(&one, "1", 1) == STATUS_OK);
    cr_assert(file_begin(&two, in_folder("two")) == STATUS_OK && file_add(&two, "2", 1) == STATUS_OK);
    cr_assert(file_complete(&one) == STATUS_OK && file_complete(&two) == STATUS_OK);
    cr_assert(file_end(&one) == STATUS_OK && file_end(&two) == STATUS_OK);
    cr_expect_str_eq(notes, "FFRDRD");
}

/* Each row is synced. After the first row, the folder is synced too, because it contains the name of the new
 * file. */
Test(file_sync, a_row_and_its_new_file_are_durable)
{
    struct row row = {0};
    row_text(&row, "column", "text");
    cr_assert_eq(csv_append(in_folder("rows.csv"), &row, 1), STATUS_OK, "%s", status_text());
    cr_expect_str_eq(notes, "FD");
    cr_assert_eq(csv_append(in_folder("rows.csv"), &row, 1), STATUS_OK, "%s", status_text());
    cr_expect_str_eq(notes, "FDF");
    row_free(&row);
}
