/* Tests checks of files before a run, atomically written files, and which files remain after signals. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* for unshare() */
#endif

#include "record.h"

TestSuite(record, .init = start, .fini = stop, .timeout = 60);

/* ---- Checks before a run ---- */

static void expect_check_refuses(const char *where, const char *message)
{
    cr_expect_eq(check_sample(where), STATUS_USAGE, "%s passed", where);
    expect_message(message);
}

Test(record, check_changes_no_file)
{
    cr_expect_eq(check_sample(path), STATUS_OK, "%s", status_text());
    cr_expect_neq(access(path, F_OK), 0);
    cr_assert_eq(chdir(folder), 0);
    cr_expect_eq(check_sample("rows.csv"), STATUS_OK, "%s", status_text());
    cr_expect_neq(access(path, F_OK), 0);
    cr_expect_eq(check_sample("/rows-at-the-root.csv"), access("/", W_OK) == 0 ? STATUS_OK : STATUS_USAGE);
    cr_expect_neq(access("/rows-at-the-root.csv", F_OK), 0);

    put("name,note,wrong\nx,y,1\nto");
    struct stat before, after;
    cr_assert_eq(stat(path, &before), 0);
    cr_expect_eq(check_sample(path), STATUS_OK);
    cr_assert_eq(stat(path, &after), 0);
    cr_expect(before.st_size == after.st_size && before.st_mtim.tv_nsec == after.st_mtim.tv_nsec);
}

Test(record, check_refuses_non_files)
{
    char where[PATH_MAX];
    expect_check_refuses(folder, "is a folder");
    expect_check_refuses("/dev/null", "is a device or pipe");
    expect_check_refuses("", "names no file");
    snprintf(where, sizeof where, "%s/none/", folder);
    expect_check_refuses(where, "names no file");
    snprintf(where, sizeof where, "%s/none/rows.csv", folder);
    expect_check_refuses(where, "its folder does not exist; create it with: mkdir -p '");
    put("name,note,wrong\n");
    snprintf(where, sizeof where, "%s/rows.csv", path);
    expect_check_refuses(where, "Not a directory");
    memset(where, 'n', 400);
    where[400] = '\0';
    expect_check_refuses(where, "File name too long");
    snprintf(where, sizeof where, "%s/link", folder);
    cr_assert_eq(symlink("nowhere/else", where), 0);
    expect_check_refuses(where, "is a link to a file that does not exist");
}

Test(record, append_refuses_non_files)
{
    char where[PATH_MAX];
    struct row row = sample_row("a", "b", "0");
    cr_expect_eq(csv_append("/dev/null", &row, 1), STATUS_USAGE);
    cr_expect_eq(csv_append(folder, &row, 1), STATUS_FAILED);
    snprintf(where, sizeof where, "%s/pipe", folder);
    cr_assert_eq(mkfifo(where, 0600), 0);
    cr_expect_eq(csv_check(where, &row), STATUS_USAGE);
    cr_expect_eq(csv_append(where, &row, 1), STATUS_USAGE);
    row_free(&row);
}

Test(record, links_are_followed)
{
    char where[PATH_MAX];
    cr_assert_eq(append_sample("a", "b", "0"), STATUS_OK);
    snprintf(where, sizeof where, "%s/link", folder);
    cr_assert_eq(symlink("rows.csv", where), 0);
    struct row row = sample_row("c", "d", "0");
    cr_expect_eq(csv_check(where, &row), STATUS_OK);
    cr_expect_eq(csv_append(where, &row, 1), STATUS_OK);
    row_free(&row);
    expect_file("name,note,wrong\na,b,0\nc,d,0\n");
}

/* Runs in a child process, which gives up root's permissions. Returns 0 if both checks fail as expected. */
static int check_without_permission(void)
{
    if (getuid() == 0 && setuid(65534) != 0)
        return 1;
    char other[PATH_MAX];
    snprintf(other, sizeof other, "%s/locked/new.csv", folder);
    if (check_sample(other) != STATUS_USAGE ||
        !strstr(status_text(), "cannot be written (Permission denied)"))
        return 2;
    if (check_sample(path) != STATUS_USAGE || !strstr(status_text(), "cannot be read and written"))
        return 3;
    return 0;
}

Test(record, check_detects_missing_permissions)
{
    put("name,note,wrong\n");
    cr_assert_eq(chmod(path, 0444), 0);
    run_command("mkdir -m 555 '%s/locked' && chmod 755 '%s'", folder, folder);
    pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0)
        _exit(check_without_permission());
    int step = exit_status_of(child);
    cr_expect_eq(step, 0, "step %d", step);
}

/* Runs in a child process with its own mounts. Returns 77 if it may not create them. */
static int check_read_only(void)
{
    put("name,note,wrong\n");
    if ((unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount(folder, folder, NULL, MS_BIND, NULL) != 0 ||
        mount(NULL, folder, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL) != 0)
        return 77;
    char other[PATH_MAX];
    snprintf(other, sizeof other, "%s/new.csv", folder);
    if (check_sample(other) != STATUS_USAGE || !strstr(status_text(), "Read-only file system"))
        return 1;
    if (check_sample(path) != STATUS_USAGE || !strstr(status_text(), "Read-only file system"))
        return 2;
    return 0;
}

Test(record, check_detects_read_only_file_systems)
{
    pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0)
        _exit(check_read_only());
    int step = exit_status_of(child);
    if (step == 77)
        cr_skip_test("this process may not mount file systems");
    cr_expect_eq(step, 0, "step %d", step);
}

/* ---- Atomically written files ---- */

static void expect_lone_file(void)
{
    run_command("test \"$(ls -A '%s')\" = rows.csv", folder);
}

Test(record, atomic_write_replaces)
{
    umask(027);
    cr_expect_eq(file_write_atomic(path, "one\n", 4), STATUS_OK, "%s", status_text());
    expect_file("one\n");
    cr_expect_eq(file_write_atomic(path, "two", 3), STATUS_OK);
    expect_file("two");
    struct stat info;
    cr_assert_eq(stat(path, &info), 0);
    cr_expect_eq(info.st_mode & 0777, 0640, "the permissions must follow the umask");
    cr_expect_eq(file_write_atomic(path, "", 0), STATUS_OK);
    expect_file("");
    expect_lone_file();
}

Test(record, failed_atomic_write_changes_nothing)
{
    cr_assert_eq(file_write_atomic(path, "one\n", 4), STATUS_OK);
    limit_file_size(3);
    cr_expect_eq(file_write_atomic(path, "other", 5), STATUS_FAILED);
    limit_file_size(0);
    expect_message("File too large");
    fsync_error = EIO;
    cr_expect_eq(file_write_atomic(path, "other", 5), STATUS_FAILED);
    fsync_error = 0;
    expect_message("rows.csv cannot be written: Input/output error");
    expect_file("one\n");
    expect_lone_file();
}

Test(record, file_appears_when_complete)
{
    struct file_writer writer;
    put("old");
    cr_assert_eq(file_begin(&writer, path), STATUS_OK, "%s", status_text());
    cr_assert_eq(file_add(&writer, "one ", 4), STATUS_OK);
    expect_file("old");
    cr_assert_eq(file_add(&writer, "two", 3), STATUS_OK);
    cr_assert_eq(file_end(&writer), STATUS_OK, "%s", status_text());
    expect_file("one two");
    expect_lone_file();
}

Test(record, abandoned_file_keeps_old_content)
{
    struct file_writer writer;
    put("old");
    cr_assert_eq(file_begin(&writer, path), STATUS_OK, "%s", status_text());
    cr_assert_eq(file_add(&writer, "new", 3), STATUS_OK);
    file_abandon(&writer);
    expect_file("old");
    expect_lone_file();

    cr_assert_eq(file_begin(&writer, path), STATUS_OK, "%s", status_text());
    limit_file_size(3);
    cr_assert_eq(file_add(&writer, "new", 3), STATUS_OK);
    cr_assert_eq(file_add(&writer, "er", 2), STATUS_FAILED);
    limit_file_size(0);
    expect_message("rows.csv cannot be written: File too large");
    file_abandon(&writer); /* has no effect after a failure */
    expect_file("old");
    expect_lone_file();
}

Test(record, atomic_write_refuses_devices_and_folders)
{
    char where[PATH_MAX];
    cr_expect_eq(file_write_atomic("/dev/null", "x", 1), STATUS_FAILED);
    expect_message("is not a regular file");
    struct stat info;
    cr_assert_eq(stat("/dev/null", &info), 0);
    cr_expect(S_ISCHR(info.st_mode));
    cr_expect_eq(file_write_atomic(folder, "x", 1), STATUS_FAILED);
    snprintf(where, sizeof where, "%s/none/file", folder);
    cr_expect_eq(file_write_atomic(where, "x", 1), STATUS_FAILED);
    expect_message("No such file or directory");
}

Test(record, atomic_write_follows_links)
{
    char link[PATH_MAX];
    put("old");
    snprintf(link, sizeof link, "%s/link", folder);
    cr_assert_eq(symlink("rows.csv", link), 0);
    cr_expect_eq(file_write_atomic(link, "new", 3), STATUS_OK);
    expect_file("new");
    struct stat info;
    cr_assert_eq(lstat(link, &info), 0);
    cr_expect(S_ISLNK(info.st_mode));
}

Test(record, complete_files_appear_only_at_file_end)
{
    struct file_writer writer;
    put("old");
    cr_assert_eq(file_begin(&writer, path), STATUS_OK, "%s", status_text());
    cr_assert_eq(file_add(&writer, "new", 3), STATUS_OK);
    cr_assert_eq(file_complete(&writer), STATUS_OK);
    expect_file("old");
    cr_assert_eq(file_end(&writer), STATUS_OK, "%s", status_text());
    expect_file("new");
    expect_lone_file();
}

/* ---- Signals ---- */

/* Writes a file repeatedly, as the threads that write images do. */
static void *write_for_ever(void *number)
{
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s/%d", folder, *(int *)number);
    while (file_write_atomic(name, "whole", 5) == STATUS_OK)
        ;
    return NULL;
}

static void write_until_killed(void)
{
    int numbers[] = {0, 1, 2, 3};
    pthread_t thread;
    signal(SIGINT, SIG_DFL); /* shells ignore SIGINT in background processes */
    signal(SIGHUP, SIG_DFL);
    file_remove_on_signals();
    for (int i = 1; i < 4; i++)
        if (pthread_create(&thread, NULL, write_for_ever, &numbers[i]) != 0)
            _exit(1);
    write_for_ever(&numbers[0]);
    _exit(1);
}

Test(record, a_signal_leaves_no_temporary_file)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    for (int i = 0; i < 60; i++) {
        pid_t pid = fork();
        cr_assert_geq(pid, 0);
        if (pid == 0)
            write_until_killed();
        for (int j = 0; j < 4; j++) { /* wait until every thread has written */
            char name[PATH_MAX];
            snprintf(name, sizeof name, "%s/%d", folder, j);
            while (access(name, F_OK) != 0)
                usleep(100);
        }
        usleep((useconds_t)(37 * i));
        cr_assert_eq(kill(pid, signals[i % 3]), 0);
        cr_expect_eq(exit_status_of(pid), 128 + signals[i % 3]);
        run_command("test -z \"$(find '%s' -name '*.tmp')\" && rm '%s'/?", folder, folder);
    }
}

Test(record, an_ignored_signal_stays_ignored)
{
    pid_t pid = fork();
    cr_assert_geq(pid, 0);
    if (pid == 0) {
        signal(SIGHUP, SIG_IGN); /* as nohup does */
        file_remove_on_signals();
        raise(SIGHUP);
        _exit(7);
    }
    cr_expect_eq(exit_status_of(pid), 7);
}

/* csv_complete() adds the row of another process to a file, unless the file already has it or has other
 * columns. */
Test(record, a_row_of_another_process_is_added_once)
{
    size_t added;
    char *text;
    struct row row = sample_row("a", "two\nlines", "0"), like = sample_row("", "", "");
    cr_assert_eq(csv_text(&row, 1, &text), STATUS_OK);
    cr_assert_eq(append_sample("xa", "two\nlines", "0"), STATUS_OK); /* ends like the row in `text` */
    cr_expect_eq(csv_complete(path, &like, text, &added), STATUS_OK, "%s", status_text());
    cr_expect_eq(added, 1);
    expect_file("name,note,wrong\nxa,\"two\nlines\",0\na,\"two\nlines\",0\n");
    cr_expect_eq(csv_complete(path, &like, text, &added), STATUS_OK, "%s", status_text());
    cr_expect_eq(added, 0);
    cr_expect_eq(unlink(path), 0);
    cr_expect_eq(csv_complete(path, &like, text, &added), STATUS_OK, "%s", status_text());
    expect_file("name,note,wrong\na,\"two\nlines\",0\n");
    text[0] = 'N';
    cr_expect_eq(csv_complete(path, &like, text, &added), STATUS_USAGE);
    expect_message("the rows saved with the checkpoint have other columns than the rows of this program");
    free(text);
    row_free(&row);
    row_free(&like);
}

/* If the file has some of the rows, csv_complete() adds only the others. A killed process may also have left
 * an incomplete line. */
Test(record, only_missing_rows_of_another_process_are_added)
{
    static const struct {
        const char *before;
        size_t added;
    } cases[] = {{"name,note,wrong\na,1,0\nb,\"two\nlines\",0\nc,3,0\n", 0},
                 {"name,note,wrong\na,1,0\nb,\"two\nlines\",0\n", 1},
                 {"name,note,wrong\na,1,0\nb,\"two\nlines\",0\nc,", 1},
                 {"name,note,wrong\na,1,0\n", 2},
                 {"name,note,wrong\n", 3},
                 {"", 3}};
    char *text;
    struct row rows[] = {sample_row("a", "1", "0"), sample_row("b", "two\nlines", "0"),
                         sample_row("c", "3", "0")};
    cr_assert_eq(csv_text(rows, COUNT_OF(rows), &text), STATUS_OK);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        size_t added;
        put(cases[i].before);
        cr_expect_eq(csv_complete(path, &rows[0], text, &added), STATUS_OK, "%s", status_text());
        cr_expect_eq(added, cases[i].added, "case %zu: %zu rows", i, added);
        expect_file(text);
    }
    put("name,note,wrong\na,1,0\nc,3,0\n");
    size_t added;
    cr_expect_eq(csv_complete(path, &rows[0], text, &added), STATUS_OK, "%s", status_text());
    expect_file("name,note,wrong\na,1,0\nc,3,0\nb,\"two\nlines\",0\n");
    free(text);
    for (size_t i = 0; i < COUNT_OF(rows); i++)
        row_free(&rows[i]);
}
