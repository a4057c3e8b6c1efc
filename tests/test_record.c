#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* unshare() */
#endif

#include <criterion/criterion.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/file.h"
#include "core/record.h"

/* ---- A file system that misbehaves on demand ---- */

static int flock_error, fsync_error;

int flock(int fd, int operation)
{
    if (flock_error) {
        errno = flock_error;
        return -1;
    }
    return (int)syscall(SYS_flock, fd, operation);
}

int fsync(int fd)
{
    if (fsync_error) {
        errno = fsync_error;
        return -1;
    }
    return (int)syscall(SYS_fsync, fd);
}

/* ---- A folder for each test ---- */

static char folder[] = "/tmp/fdsl-record-XXXXXX";
static char path[sizeof folder + 16];

static void start(void)
{
    cr_assert_not_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/rows.csv", folder);
}

static void run_command(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void run_command(const char *format, ...)
{
    char command[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    cr_assert_eq(system(command), 0, "%s", command);
}

static void stop(void)
{
    run_command("rm -rf '%s'", folder);
}

TestSuite(record, .init = start, .fini = stop, .timeout = 60);

static void put(const char *text)
{
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file);
    cr_assert_geq(fputs(text, file), 0);
    cr_assert_eq(fclose(file), 0);
}

/* What the file holds; owned by the caller. */
static char *get(void)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = fopen(path, "r");
    cr_assert_not_null(file);
    if (getdelim(&text, &bytes, '\0', file) < 0) {
        free(text);
        text = strdup("");
    }
    fclose(file);
    return text;
}

static void expect_file(const char *expected)
{
    char *text = get();
    cr_expect_str_eq(text, expected);
    free(text);
}

static void expect_message(const char *part)
{
    cr_expect_not_null(strstr(status_text(), part), "'%s' lacks '%s'", status_text(), part);
    cr_expect_null(strchr(status_text(), '\n'));
}

static struct row sample_row(const char *first, const char *second, const char *third)
{
    struct row row = {0};
    row_text(&row, "name", first);
    row_text(&row, "note", second);
    row_number(&row, "wrong", third);
    return row;
}

static enum status append_sample(const char *first, const char *second, const char *third)
{
    struct row row = sample_row(first, second, third);
    enum status status = csv_append(path, &row, 1);
    row_free(&row);
    return status;
}

static enum status check_sample(const char *where)
{
    struct row row = sample_row("a", "b", "0");
    enum status status = csv_check(where, &row);
    row_free(&row);
    return status;
}

/* ---- Rows ---- */

Test(record, fields_as_text)
{
    struct row row = {0};
    row_text(&row, "text", "x");
    row_text(&row, "none", NULL);
    row_number(&row, "number", "12");
    row_number(&row, "no_number", NULL);
    row_count(&row, "count", 18446744073709551615ull);
    row_real(&row, "real", 0.0012345678912);
    row_real(&row, "whole", 3);
    row_real(&row, "nan", NAN);
    row_real(&row, "infinite", -INFINITY);
    cr_expect_eq(row_check(&row), STATUS_OK);
    cr_expect_str_eq(row_get(&row, "text"), "x");
    cr_expect_str_eq(row_get(&row, "none"), "");
    cr_expect_str_eq(row_get(&row, "number"), "12");
    cr_expect_str_eq(row_get(&row, "no_number"), "");
    cr_expect_str_eq(row_get(&row, "count"), "18446744073709551615");
    cr_expect_str_eq(row_get(&row, "real"), "0.00123456789");
    cr_expect_str_eq(row_get(&row, "whole"), "3");
    cr_expect_str_eq(row_get(&row, "nan"), "");
    cr_expect_str_eq(row_get(&row, "infinite"), "");
    cr_expect_null(row_get(&row, "absent"));
    cr_expect(row.fields[0].kind == FIELD_TEXT && row.fields[2].kind == FIELD_NUMBER &&
              row.fields[4].kind == FIELD_NUMBER && row.fields[5].kind == FIELD_NUMBER);
    row_free(&row);
    cr_expect(row.fields == NULL && row.count == 0, "a freed row can be used again");
}

Test(record, many_fields_in_order)
{
    struct row row = {0};
    for (unsigned i = 0; i < 1000; i++) {
        char column[16];
        snprintf(column, sizeof column, "c%u", i);
        row_count(&row, column, i);
    }
    cr_assert_eq(row.count, 1000);
    cr_expect_str_eq(row.fields[999].column, "c999");
    cr_expect_str_eq(row_get(&row, "c517"), "517");
    row_free(&row);
}

Test(record, failed_row_is_written_nowhere)
{
    struct row row = sample_row("a", "b", "0");
    row.failed = true;
    cr_expect_eq(row_check(&row), STATUS_FAILED);
    cr_expect_eq(csv_check(path, &row), STATUS_FAILED);
    cr_expect_eq(csv_append(path, &row, 1), STATUS_FAILED);
    cr_expect_neq(access(path, F_OK), 0);
    row_free(&row);
}

/* ---- CSV ---- */

Test(record, lines)
{
    struct row row = sample_row("plain", "with, comma", "");
    row_text(&row, "a \"quoted\" column", "say \"hi\"\r\n");
    char *text;
    size_t bytes;
    FILE *stream = open_memstream(&text, &bytes);
    csv_write_header(stream, &row);
    csv_write_row(stream, &row);
    fclose(stream);
    cr_expect_str_eq(text, "name,note,wrong,\"a \"\"quoted\"\" column\"\n"
                           "plain,\"with, comma\",,\"say \"\"hi\"\"\r\n\"\n");
    free(text);
    row_free(&row);
}

static const char *const tricky[] = {
    "",         "plain",      " blanks ", "a,b",        "\"",   "\"\"",          "say \"hi\", twice",
    "one\ntwo", "cr\rlf\r\n", "\n",       "naïve ✓ 例", "\t;'", "=SUM(A1),\"x\""};
#define TRICKY_COUNT (sizeof tricky / sizeof tricky[0])

/* Has python3's csv module read the file, and compares every cell. */
static void expect_parsed(size_t rows)
{
    char command[512], line[4096];
    snprintf(
        command, sizeof command,
        "python3 -c \"import csv\nfor r in csv.reader(open('%s', newline='', encoding='utf-8'), strict=True):"
        " print(*[c.encode().hex() for c in r], sep=',')\"",
        path);
    FILE *python = popen(command, "r");
    cr_assert_not_null(python);
    for (size_t r = 0; r <= rows; r++) {
        cr_assert_not_null(fgets(line, sizeof line, python), "row %zu of %zu is missing", r, rows);
        line[strcspn(line, "\n")] = '\0';
        char *rest = line;
        for (size_t i = 0; i < TRICKY_COUNT; i++) {
            char expected[64] = "", column[16];
            snprintf(column, sizeof column, "c,%zu", i);
            const char *text = r == 0 ? column : tricky[(i + r) % TRICKY_COUNT];
            for (size_t b = 0; text[b]; b++)
                snprintf(expected + 2 * b, 3, "%02x", (unsigned char)text[b]);
            const char *cell = strsep(&rest, ",");
            cr_assert_not_null(cell);
            cr_expect_str_eq(cell, expected);
        }
        cr_expect_null(rest, "row %zu has more fields", r);
    }
    cr_expect_null(fgets(line, sizeof line, python));
    cr_assert_eq(pclose(python), 0);
}

Test(record, round_trip_through_a_real_parser)
{
    if (system("python3 -c 'import csv' 2>/dev/null") != 0)
        cr_skip_test("python3 is not there");
    for (size_t r = 1; r <= TRICKY_COUNT; r++) {
        struct row row = {0};
        for (size_t i = 0; i < TRICKY_COUNT; i++) {
            char column[16];
            snprintf(column, sizeof column, "c,%zu", i);
            row_text(&row, column, tricky[(i + r) % TRICKY_COUNT]);
        }
        cr_assert_eq(csv_check(path, &row), STATUS_OK, "%s", status_text());
        cr_assert_eq(csv_append(path, &row, 1), STATUS_OK, "%s", status_text());
        row_free(&row);
    }
    expect_parsed(TRICKY_COUNT);
}

Test(record, single_empty_field_is_a_row)
{
    struct row row = {0};
    row_text(&row, "only", "");
    cr_expect_eq(csv_append(path, &row, 1), STATUS_OK);
    cr_expect_eq(csv_append(path, &row, 1), STATUS_OK);
    row_free(&row);
    expect_file("only\n\"\"\n\"\"\n");
}

/* ---- Appending ---- */

Test(record, header_once)
{
    cr_expect_eq(append_sample("a", "b", "0"), STATUS_OK);
    cr_expect_eq(append_sample("c", "d,e", "1"), STATUS_OK);
    expect_file("name,note,wrong\na,b,0\nc,\"d,e\",1\n");
}

Test(record, empty_file_gets_a_header)
{
    put("");
    cr_expect_eq(check_sample(path), STATUS_OK);
    cr_expect_eq(append_sample("a", "b", "0"), STATUS_OK);
    expect_file("name,note,wrong\na,b,0\n");
}

Test(record, windows_line_ends_and_blank_lines_pass)
{
    put("name,note,wrong\r\nx,y,1\r\n\r\n");
    cr_expect_eq(check_sample(path), STATUS_OK, "%s", status_text());
    cr_expect_eq(append_sample("a", "b", "0"), STATUS_OK);
    expect_file("name,note,wrong\r\nx,y,1\r\n\r\na,b,0\n");
}

static void expect_refused(const char *content, const char *message)
{
    put(content);
    cr_expect_eq(check_sample(path), STATUS_USAGE, "checked:\n%s", content);
    expect_message(message);
    cr_expect_eq(append_sample("a", "b", "0"), STATUS_USAGE, "appended to:\n%s", content);
    expect_message(message);
    expect_message("rows.csv");
    expect_file(content);
}

Test(record, foreign_header_is_refused)
{
    expect_refused("name,batch,wrong\nx,y,1\n", "holds other columns (column 2 is 'batch', not 'note')");
    expect_refused("name,note\nx,y\n", "has fewer columns than these rows");
    expect_refused("name,note,wrong,more\nx,y,1,2\n", "has more columns than these rows");
    expect_refused("name,note,wrongs\n", "(column 3 is 'wrongs', not 'wrong')");
    expect_refused("name,note,wron\n", "(column 3 is 'wron', not 'wrong')");
    expect_refused("\n", "(column 1 is '', not 'name')");
    expect_refused("\"name,note,wrong\n", "(column 1 is '\"name', not 'name')");
    expect_refused("dear diary", "(column 1 is 'dear diary', not 'name')");
    expect_refused("name,note,wrong,more", "has more columns");
    expect_refused("\033[31mred\a", "(column 1 is '?[31mred?', not 'name')");
    expect_refused("a cell of more than forty bytes, which is far too long for a message, and has commas\n",
                   "(column 1 is 'a cell of more than forty bytes', not 'name')");
}

Test(record, row_with_other_fields_is_refused)
{
    expect_refused("name,note,wrong\nx,y,1\nx,yname,z,1,2\nx,y,1\n",
                   "line 3: 5 fields where the header has 3; repair or delete this row");
    expect_refused("name,note,wrong\n\"x\n\nx\",y,1\nx\n", "line 5: 1 fields where the header has 3");
}

Test(record, torn_row_is_cut_off)
{
    static const char *const tails[] = {"x", "x,", "x,y", "x,\"y", "x,\"y,z,\"\"", "\"", "x,\"y\""};
    for (size_t i = 0; i < COUNT_OF(tails); i++) {
        char content[128];
        snprintf(content, sizeof content, "name,note,wrong\nw,\"2\nlines\",0\n%s", tails[i]);
        put(content);
        cr_expect_eq(check_sample(path), STATUS_OK, "%s", status_text());
        expect_file(content);
        cr_expect_eq(append_sample("a", "b", "0"), STATUS_OK, "%s", status_text());
        expect_file("name,note,wrong\nw,\"2\nlines\",0\na,b,0\n");
    }
}

Test(record, torn_header_is_written_anew)
{
    static const char *const headers[] = {"n", "name,", "name,note,wron", "name,note,wrong"};
    for (size_t i = 0; i < COUNT_OF(headers); i++) {
        put(headers[i]);
        cr_expect_eq(check_sample(path), STATUS_OK, "%s", status_text());
        cr_expect_eq(append_sample("a", "b", "0"), STATUS_OK, "%s", status_text());
        expect_file("name,note,wrong\na,b,0\n");
    }
}

Test(record, last_row_that_may_be_whole_is_left_alone)
{
    const char *message = "this last row has no end and may be torn; end or delete it";
    expect_refused("name,note,wrong\nx,y,1", message);
    expect_message("line 2:");
    expect_refused("name,note,wrong\nx,y,", message);
    expect_refused("name,note,wrong\nx,\"y\nx,y,1\nx,y,1\n", message);
}

Test(record, concurrent_appenders_leave_whole_rows)
{
    enum { PROCESSES = 4, ROWS = 50 };
    pid_t children[PROCESSES];
    for (int p = 0; p < PROCESSES; p++) {
        children[p] = fork();
        cr_assert_geq(children[p], 0);
        if (children[p] == 0) {
            static char note[5001];
            memset(note, 'a' + p, sizeof note - 1);
            for (int i = 0; i < ROWS; i++) {
                char number[16];
                snprintf(number, sizeof number, "%d", i);
                if (check_sample(path) != STATUS_OK || append_sample("x", note, number) != STATUS_OK)
                    _exit(1);
            }
            _exit(0);
        }
    }
    for (int p = 0; p < PROCESSES; p++) {
        int status;
        cr_assert_eq(waitpid(children[p], &status, 0), children[p]);
        cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }

    char *text = get(), *rest = text;
    cr_assert_str_eq(strsep(&rest, "\n"), "name,note,wrong");
    int next[PROCESSES] = {0};
    for (char *line; *rest && (line = strsep(&rest, "\n"));) {
        cr_assert_eq(strncmp(line, "x,", 2), 0);
        int p = line[2] - 'a';
        cr_assert(p >= 0 && p < PROCESSES);
        cr_assert_eq(strspn(line + 2, (char[]){line[2], '\0'}), 5000);
        cr_assert_eq(atoi(line + 2 + 5000 + 1), next[p]++, "each process's rows are in its order");
    }
    for (int p = 0; p < PROCESSES; p++)
        cr_expect_eq(next[p], ROWS);
    free(text);
}

Test(record, processes_that_start_together_write_one_header)
{
    enum { PROCESSES = 4, ROUNDS = 25 };
    for (int round = 0; round < ROUNDS; round++) {
        int gate[2];
        pid_t children[PROCESSES];
        unlink(path);
        cr_assert_eq(pipe(gate), 0);
        for (int p = 0; p < PROCESSES; p++) {
            children[p] = fork();
            cr_assert_geq(children[p], 0);
            if (children[p] == 0) {
                char byte;
                close(gate[1]);
                (void)!read(gate[0], &byte, 1); /* until the parent closes the other end */
                _exit(append_sample("a", "b", "0"));
            }
        }
        close(gate[0]);
        close(gate[1]);
        for (int p = 0; p < PROCESSES; p++) {
            int status;
            cr_assert_eq(waitpid(children[p], &status, 0), children[p]);
            cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == STATUS_OK);
        }
        expect_file("name,note,wrong\na,b,0\na,b,0\na,b,0\na,b,0\n");
    }
}

Test(record, killed_and_requeued_leaves_whole_rows)
{
    enum { BYTES = 400000 };
    static char note[BYTES + 1];
    memset(note, 'k', BYTES);
    for (int round = 0; round < 12; round++) {
        pid_t child = fork();
        cr_assert_geq(child, 0);
        if (child == 0) {
            (void)!freopen("/dev/null", "w", stderr); /* it may warn of the row before */
            while (append_sample("x", note, "1") == STATUS_OK)
                ;
            _exit(1);
        }
        struct timespec pause = {0, 3000000 + 1100000 * round};
        nanosleep(&pause, NULL);
        cr_assert_eq(kill(child, SIGKILL), 0);
        int status;
        cr_assert_eq(waitpid(child, &status, 0), child);
        cr_assert(WIFSIGNALED(status), "the child gave up by itself");
        cr_assert_eq(append_sample("a", "b", "0"), STATUS_OK, "%s", status_text());
    }
    char *text = get(), *rest = text;
    cr_assert_str_eq(strsep(&rest, "\n"), "name,note,wrong");
    int ours = 0;
    for (char *line; *rest && (line = strsep(&rest, "\n"));) {
        if (strcmp(line, "a,b,0") == 0)
            ours++;
        else
            cr_assert(strlen(line) == BYTES + 4 && line[BYTES + 3] == '1');
    }
    cr_expect_eq(ours, 12);
    free(text);
}

/* ---- Failing ---- */

/* Lets files grow to `bytes` at most, as a full disk would. */
static void limit_file_size(rlim_t bytes)
{
    struct rlimit limit;
    cr_assert_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes ? bytes : limit.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

Test(record, full_disk_keeps_rows_whole)
{
    const char *before = "name,note,wrong\nfirst,row,0\n";
    cr_assert_eq(append_sample("first", "row", "0"), STATUS_OK);
    for (rlim_t room = 0; room < strlen("second,row,0\n"); room++) {
        limit_file_size(strlen(before) + room);
        cr_expect_eq(append_sample("second", "row", "0"), STATUS_FAILED);
        limit_file_size(0);
        expect_message("a row could not be written (File too large); the rows before it are whole");
        expect_file(before);
    }
    cr_expect_eq(append_sample("second", "row", "0"), STATUS_OK, "with room again it goes on");
    expect_file("name,note,wrong\nfirst,row,0\nsecond,row,0\n");
}

Test(record, full_disk_leaves_no_header_alone)
{
    limit_file_size(20);
    cr_expect_eq(append_sample("first", "row", "0"), STATUS_FAILED);
    limit_file_size(0);
    cr_expect(access(path, F_OK) != 0, "an empty file is left");
    cr_expect_eq(append_sample("first", "row", "0"), STATUS_OK, "%s", status_text());
    expect_file("name,note,wrong\nfirst,row,0\n");
}

/* Who waited for the lock of a file that was then taken away writes to a new one. */
Test(record, a_file_taken_away_meanwhile_is_made_anew, .timeout = 60)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    cr_assert(fd >= 0 && flock(fd, LOCK_EX) == 0);
    pid_t pid = fork();
    cr_assert(pid >= 0);
    if (pid == 0) {
        close(fd); /* or the child holds the lock too */
        _exit(append_sample("first", "row", "0") == STATUS_OK ? 0 : 1);
    }
    usleep(200000); /* until it waits; should it come later, the file is just not there */
    int ended;
    cr_assert(unlink(path) == 0 && close(fd) == 0);
    cr_assert(waitpid(pid, &ended, 0) == pid && ended == 0);
    expect_file("name,note,wrong\nfirst,row,0\n");
}

Test(record, late_failure_is_cut_back_too)
{
    cr_assert_eq(append_sample("first", "row", "0"), STATUS_OK);
    fsync_error = EDQUOT;
    cr_expect_eq(append_sample("second", "row", "0"), STATUS_FAILED);
    fsync_error = 0;
    expect_message("Disk quota exceeded");
    expect_file("name,note,wrong\nfirst,row,0\n");
}

Test(record, without_locks_rows_are_appended_but_never_cut)
{
    flock_error = ENOSYS;
    cr_expect_eq(append_sample("first", "row", "0"), STATUS_OK, "%s", status_text());
    cr_expect_eq(check_sample(path), STATUS_OK);
    cr_expect_eq(append_sample("second", "row", "0"), STATUS_OK);
    expect_file("name,note,wrong\nfirst,row,0\nsecond,row,0\n");

    put("name,note,wrong\ntorn");
    cr_expect_eq(append_sample("third", "row", "0"), STATUS_FAILED);
    expect_message("line 2: this last row is torn; delete it");
    expect_file("name,note,wrong\ntorn");
    put("name,note,wrong\n");
    fsync_error = EIO;
    cr_expect_eq(append_sample("third", "row", "0"), STATUS_FAILED);
    expect_message("may be torn; delete its last line");
}

Test(record, lock_failure_is_told)
{
    flock_error = EIO;
    cr_expect_eq(append_sample("first", "row", "0"), STATUS_FAILED);
    expect_message("cannot be locked: Input/output error");
    expect_file("");
}

/* ---- Checking beforehand ---- */

static void expect_check_refuses(const char *where, const char *message)
{
    cr_expect_eq(check_sample(where), STATUS_USAGE, "%s passed", where);
    expect_message(message);
}

Test(record, check_touches_nothing)
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

Test(record, check_refuses_what_is_no_file)
{
    char where[PATH_MAX];
    expect_check_refuses(folder, "is a folder");
    expect_check_refuses("/dev/null", "is a device or pipe");
    expect_check_refuses("", "names no file");
    snprintf(where, sizeof where, "%s/none/", folder);
    expect_check_refuses(where, "names no file");
    snprintf(where, sizeof where, "%s/none/rows.csv", folder);
    expect_check_refuses(where, "its folder does not exist; make it with: mkdir -p '");
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

Test(record, append_refuses_what_is_no_file)
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

/* Runs in a child: gives up root's rights over permissions. Returns 0 when both refusals came. */
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

Test(record, check_sees_missing_permissions)
{
    put("name,note,wrong\n");
    cr_assert_eq(chmod(path, 0444), 0);
    run_command("mkdir -m 555 '%s/locked' && chmod 755 '%s'", folder, folder);
    pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0)
        _exit(check_without_permission());
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_expect(WIFEXITED(status));
    cr_expect_eq(WEXITSTATUS(status), 0, "step %d", WEXITSTATUS(status));
}

/* Runs in a child with mounts of its own: 77 where it may not have them. */
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

Test(record, check_sees_read_only_file_systems)
{
    pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0)
        _exit(check_read_only());
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        cr_skip_test("no mounts here");
    cr_expect_eq(WEXITSTATUS(status), 0, "step %d", WEXITSTATUS(status));
}

/* ---- Whole files ---- */

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
    cr_expect_eq(info.st_mode & 0777, 0640, "the usual permissions, not those of a temporary file");
    cr_expect_eq(file_write_atomic(path, "", 0), STATUS_OK);
    expect_file("");
    expect_lone_file();
}

Test(record, atomic_write_fails_whole)
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

Test(record, a_file_that_grows_appears_at_its_end)
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

Test(record, a_file_that_is_abandoned_leaves_what_was_there)
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
    file_abandon(&writer); /* harmless after a failure */
    expect_file("old");
    expect_lone_file();
}

Test(record, atomic_write_spares_devices_and_folders)
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

Test(record, files_that_are_complete_wait_for_their_end)
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

/* Writes a file of its own over and over, as threads do that write pictures. */
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
        int status;
        pid_t pid = fork();
        cr_assert_geq(pid, 0);
        if (pid == 0)
            write_until_killed();
        for (int j = 0; j < 4; j++) { /* until every thread has written */
            char name[PATH_MAX];
            snprintf(name, sizeof name, "%s/%d", folder, j);
            while (access(name, F_OK) != 0)
                usleep(100);
        }
        usleep((useconds_t)(37 * i));
        cr_assert_eq(kill(pid, signals[i % 3]), 0);
        cr_assert_eq(waitpid(pid, &status, 0), pid);
        cr_expect(WIFSIGNALED(status) && WTERMSIG(status) == signals[i % 3], "status %x", status);
        run_command("test -z \"$(find '%s' -name '*.tmp')\" && rm '%s'/?", folder, folder);
    }
}

Test(record, an_ignored_signal_stays_ignored)
{
    int status;
    pid_t pid = fork();
    cr_assert_geq(pid, 0);
    if (pid == 0) {
        signal(SIGHUP, SIG_IGN); /* as nohup does */
        file_remove_on_signals();
        raise(SIGHUP);
        _exit(7);
    }
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

/* A row that was made elsewhere is added once, and only where its columns are ours. */
Test(record, a_kept_row_is_completed)
{
    bool added;
    char *text;
    struct row row = sample_row("a", "two\nlines", "0"), like = sample_row("", "", "");
    cr_assert_eq(csv_text(&row, &text), STATUS_OK);
    cr_assert_eq(append_sample("xa", "two\nlines", "0"), STATUS_OK); /* ends as ours does */
    cr_expect_eq(csv_complete(path, &like, text, &added), STATUS_OK, "%s", status_text());
    cr_expect(added);
    expect_file("name,note,wrong\nxa,\"two\nlines\",0\na,\"two\nlines\",0\n");
    cr_expect_eq(csv_complete(path, &like, text, &added), STATUS_OK, "%s", status_text());
    cr_expect(!added);
    cr_expect_eq(unlink(path), 0);
    cr_expect_eq(csv_complete(path, &like, text, &added), STATUS_OK, "%s", status_text());
    expect_file("name,note,wrong\na,\"two\nlines\",0\n");
    text[0] = 'N';
    cr_expect_eq(csv_complete(path, &like, text, &added), STATUS_USAGE);
    expect_message("its columns are not those");
    free(text);
    row_free(&row);
    row_free(&like);
}
