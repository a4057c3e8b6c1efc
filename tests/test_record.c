/* Tests result rows and the CSV files that they are appended to. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* for unshare() */
#endif

#include "cell.h"
#include "record.h"

TestSuite(record, .init = start, .fini = stop, .timeout = 60);

/* ---- Rows ---- */

Test(record, fields_are_written_as_text)
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
    cr_expect_str_eq(cell(&row, "text"), "x");
    cr_expect_str_eq(cell(&row, "none"), "");
    cr_expect_str_eq(cell(&row, "number"), "12");
    cr_expect_str_eq(cell(&row, "no_number"), "");
    cr_expect_str_eq(cell(&row, "count"), "18446744073709551615");
    cr_expect_str_eq(cell(&row, "real"), "0.00123456789");
    cr_expect_str_eq(cell(&row, "whole"), "3");
    cr_expect_str_eq(cell(&row, "nan"), "");
    cr_expect_str_eq(cell(&row, "infinite"), "");
    cr_expect_null(cell(&row, "absent"));
    cr_expect(row.columns[0].type == VALUE_WORD && row.columns[2].type == VALUE_REAL &&
              row.columns[4].type == VALUE_INTEGER && row.columns[5].type == VALUE_REAL);
    row_free(&row);
    cr_expect(row.values == NULL && row.count == 0, "a freed row must be empty");
}

/* The text of a value depends on its column. A column that is not set is absent. */
Test(record, values_have_the_digits_of_their_columns)
{
    static const struct column columns[] = {{"four", VALUE_REAL, COMBINE_MIN, "s", .digits = 4},
                                            {"cents", VALUE_REAL, COMBINE_MIN, "", .digits = DECIMALS(2)},
                                            {"flag", VALUE_FLAG, COMBINE_FIRST, .unit = ""},
                                            {"switch", VALUE_SWITCH, COMBINE_FIRST, .unit = ""},
                                            {"hash", VALUE_HASH, COMBINE_SUM, .unit = ""},
                                            {"unset", VALUE_INTEGER, COMBINE_SUM, .unit = ""},
                                            {"number", VALUE_INTEGER, COMBINE_SUM, .unit = ""},
                                            {.name = NULL}};
    struct row row;
    row_open(&row, columns);
    row_real(&row, "four", 123456.789);
    row_real(&row, "cents", 2);
    row_flag(&row, "flag", false);
    row_flag(&row, "switch", true);
    row_hash(&row, "hash", 0xabc);
    row_count(&row, "number", 1);
    row_text(&row, "number", "all"); /* a word may stand in a column of numbers */
    cr_assert_eq(row_check(&row), STATUS_OK);
    static const char *const texts[] = {"1.235e+05", "2.00", "no", "1", "0000000000000abc", "", "all"};
    for (size_t i = 0; i < COUNT_OF(texts); i++)
        cr_expect_str_eq(cell(&row, columns[i].name), texts[i], "%s", columns[i].name);
    cr_expect_eq(row_get_real(&row, "four"), 123456.789, "the value itself is not rounded");
    cr_expect(isnan(row_get_real(&row, "unset")) && !row_value(&row, "unset"));
    cr_expect_str_eq(row_get_word(&row, "number"), "all");
    row_free(&row);
}

Test(record, an_unknown_column_of_a_table_is_a_bug, .signal = SIGABRT)
{
    static const struct column columns[] = {{"one", VALUE_REAL, COMBINE_MIN, .unit = ""}, {.name = NULL}};
    struct row row;
    row_open(&row, columns);
    row_real(&row, "two", 1);
}

Test(record, many_fields_keep_their_order)
{
    struct row row = {0};
    for (unsigned i = 0; i < 1000; i++) {
        char column[16];
        snprintf(column, sizeof column, "c%u", i);
        row_count(&row, column, i);
    }
    cr_assert_eq(row.count, 1000);
    cr_expect_str_eq(row.columns[999].name, "c999");
    cr_expect_str_eq(cell(&row, "c517"), "517");
    row_free(&row);
}

Test(record, a_failed_row_is_not_written)
{
    struct row row = sample_row("a", "b", "0");
    row.failed = true;
    cr_expect_eq(row_check(&row), STATUS_EXHAUSTED);
    cr_expect_eq(csv_check(path, &row), STATUS_EXHAUSTED);
    cr_expect_eq(csv_append(path, &row, 1), STATUS_EXHAUSTED);
    cr_expect_neq(access(path, F_OK), 0);
    row_free(&row);
}

/* ---- CSV ---- */

Test(record, cells_are_quoted_as_needed)
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

/* Parses the file with python3's csv module and compares every cell. */
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

Test(record, rows_are_parsed_by_python)
{
    if (system("python3 -c 'import csv' 2>/dev/null") != 0)
        cr_skip_test("python3 is not installed");
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

Test(record, the_header_is_written_once)
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

Test(record, windows_line_ends_and_blank_lines_are_accepted)
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
    expect_refused("name,batch,wrong\nx,y,1\n", "has other columns (column 2 is 'batch', not 'note')");
    expect_refused("name,note\nx,y\n", "has fewer columns than these rows");
    expect_refused("name,note,wrong,more\nx,y,1,2\n", "has more columns than these rows");
    expect_refused("name,note,wrongs\n", "(column 3 is 'wrongs', not 'wrong')");
    expect_refused("name,note,wron\n", "(column 3 is 'wron', not 'wrong')");
    expect_refused("\n", "(column 1 is '', not 'name')");
    expect_refused("\"name,note,wrong\n", "(column 1 is '\"name', not 'name')");
    expect_refused("dear diary", "(column 1 is 'dear diary', not 'name')");
    expect_refused("name,note,wrong,more", "has more columns");
    expect_refused("\033[31mred\a", "(column 1 is '\\x1b[31mred\\x07', not 'name')");
    expect_refused("a cell of more than forty bytes, which is far too long for a message, and has commas\n",
                   "(column 1 is 'a cell of more than forty bytes', not 'name')");
}

Test(record, row_with_other_fields_is_refused)
{
    expect_refused("name,note,wrong\nx,y,1\nx,yname,z,1,2\nx,y,1\n",
                   "line 3: 5 fields, but the header has 3; repair or delete this row");
    expect_refused("name,note,wrong\n\"x\n\nx\",y,1\nx\n", "line 5: 1 field, but the header has 3");
}

Test(record, torn_row_is_removed)
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

Test(record, torn_header_is_rewritten)
{
    static const char *const headers[] = {"n", "name,", "name,note,wron", "name,note,wrong"};
    for (size_t i = 0; i < COUNT_OF(headers); i++) {
        put(headers[i]);
        cr_expect_eq(check_sample(path), STATUS_OK, "%s", status_text());
        cr_expect_eq(append_sample("a", "b", "0"), STATUS_OK, "%s", status_text());
        expect_file("name,note,wrong\na,b,0\n");
    }
}

Test(record, last_row_that_may_be_complete_is_refused)
{
    const char *message = "this last row has no line end and may be incomplete; complete or delete it";
    expect_refused("name,note,wrong\nx,y,1", message);
    expect_message("line 2:");
    expect_refused("name,note,wrong\nx,y,", message);
    expect_refused("name,note,wrong\nx,\"y\nx,y,1\nx,y,1\n", message);
}

Test(record, concurrent_appenders_write_complete_rows)
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
    for (int p = 0; p < PROCESSES; p++)
        cr_assert_eq(exit_status_of(children[p]), 0);

    char *text = get(), *rest = text;
    cr_assert_str_eq(strsep(&rest, "\n"), "name,note,wrong");
    int next[PROCESSES] = {0};
    for (char *line; *rest && (line = strsep(&rest, "\n"));) {
        cr_assert_eq(strncmp(line, "x,", 2), 0);
        int p = line[2] - 'a';
        cr_assert(p >= 0 && p < PROCESSES);
        cr_assert_eq(strspn(line + 2, (char[]){line[2], '\0'}), 5000);
        cr_assert_eq(atoi(line + 2 + 5000 + 1), next[p]++, "rows of a process are out of order");
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
                (void)!read(gate[0], &byte, 1); /* blocks until the parent closes the other end */
                _exit(append_sample("a", "b", "0"));
            }
        }
        close(gate[0]);
        close(gate[1]);
        for (int p = 0; p < PROCESSES; p++)
            cr_assert_eq(exit_status_of(children[p]), STATUS_OK);
        expect_file("name,note,wrong\na,b,0\na,b,0\na,b,0\na,b,0\n");
    }
}

Test(record, killed_appenders_leave_complete_rows)
{
    enum { BYTES = 400000 };
    static char note[BYTES + 1];
    memset(note, 'k', BYTES);
    for (int round = 0; round < 12; round++) {
        pid_t child = fork();
        cr_assert_geq(child, 0);
        if (child == 0) {
            (void)!freopen("/dev/null", "w",
                           stderr); /* hides a warning about the partial row of an earlier child */
            while (append_sample("x", note, "1") == STATUS_OK)
                ;
            _exit(1);
        }
        struct timespec pause = {0, 3000000 + 1100000 * round};
        nanosleep(&pause, NULL);
        cr_assert_eq(kill(child, SIGKILL), 0);
        cr_assert_eq(exit_status_of(child), 128 + SIGKILL, "the child ended before it was killed");
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

/* ---- Failures ---- */

Test(record, full_disk_keeps_rows_complete)
{
    const char *before = "name,note,wrong\nfirst,row,0\n";
    cr_assert_eq(append_sample("first", "row", "0"), STATUS_OK);
    for (rlim_t room = 0; room < strlen("second,row,0\n"); room++) {
        limit_file_size(strlen(before) + room);
        cr_expect_eq(append_sample("second", "row", "0"), STATUS_FAILED);
        limit_file_size(0);
        expect_message("a row could not be written (File too large); the rows before it are complete");
        expect_file(before);
    }
    cr_expect_eq(append_sample("second", "row", "0"), STATUS_OK,
                 "rows must be appended again without the limit");
    expect_file("name,note,wrong\nfirst,row,0\nsecond,row,0\n");
}

Test(record, full_disk_leaves_no_file_without_rows)
{
    limit_file_size(20);
    cr_expect_eq(append_sample("first", "row", "0"), STATUS_FAILED);
    limit_file_size(0);
    cr_expect(access(path, F_OK) != 0, "an empty file remains");
    cr_expect_eq(append_sample("first", "row", "0"), STATUS_OK, "%s", status_text());
    expect_file("name,note,wrong\nfirst,row,0\n");
}

/* If the file is removed while a process waits for its lock, the process must write to a new file. */
Test(record, removed_file_is_recreated, .timeout = 60)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    cr_assert(fd >= 0 && flock(fd, LOCK_EX) == 0);
    pid_t pid = fork();
    cr_assert(pid >= 0);
    if (pid == 0) {
        close(fd); /* otherwise the child would hold the lock too */
        _exit(append_sample("first", "row", "0") == STATUS_OK ? 0 : 1);
    }
    usleep(200000); /* time for the child to start waiting; if it starts later, it finds no file */
    cr_assert(unlink(path) == 0 && close(fd) == 0);
    cr_assert_eq(exit_status_of(pid), 0);
    expect_file("name,note,wrong\nfirst,row,0\n");
}

Test(record, a_row_is_removed_if_its_sync_fails)
{
    cr_assert_eq(append_sample("first", "row", "0"), STATUS_OK);
    fsync_error = EDQUOT;
    cr_expect_eq(append_sample("second", "row", "0"), STATUS_FAILED);
    fsync_error = 0;
    expect_message("Disk quota exceeded");
    expect_file("name,note,wrong\nfirst,row,0\n");
}

Test(record, without_locks_rows_are_appended_but_not_removed)
{
    flock_error = ENOSYS;
    cr_expect_eq(append_sample("first", "row", "0"), STATUS_OK, "%s", status_text());
    cr_expect_eq(check_sample(path), STATUS_OK);
    cr_expect_eq(append_sample("second", "row", "0"), STATUS_OK);
    expect_file("name,note,wrong\nfirst,row,0\nsecond,row,0\n");

    put("name,note,wrong\ntorn");
    cr_expect_eq(append_sample("third", "row", "0"), STATUS_FAILED);
    expect_message("line 2: this last row is incomplete; delete it");
    expect_file("name,note,wrong\ntorn");
    put("name,note,wrong\n");
    fsync_error = EIO;
    cr_expect_eq(append_sample("third", "row", "0"), STATUS_FAILED);
    expect_message("may be incomplete; delete the last line of the file");
}

Test(record, lock_failure_is_reported)
{
    flock_error = EIO;
    cr_expect_eq(append_sample("first", "row", "0"), STATUS_FAILED);
    expect_message("cannot be locked: Input/output error");
    expect_file("");
}
