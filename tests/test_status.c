/* Tests status codes and messages: prefixes, truncation, escaping, threads, and what ranks print. */
#include <criterion/criterion.h>
#include <criterion/redirect.h>

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/exhausted.h"
#include "core/status.h"
#include "core/text.h"

enum { TEXT_MAX = 1023 }; /* 1 KiB with the terminating zero */

TestSuite(status, .timeout = 60);

/* Returns a text of `count` letters. The next call overwrites it. */
static const char *letters(char letter, size_t count)
{
    static char text[4096];
    memset(text, letter, count);
    text[count] = '\0';
    return text;
}

Test(status, a_thread_begins_without_a_message)
{
    cr_assert_not_null(status_text());
    cr_expect_str_empty(status_text());
}

Test(status, set_returns_its_code_and_formats)
{
    static const enum status codes[] = {STATUS_OK, STATUS_FAILED, STATUS_USAGE, STATUS_WRONG,
                                        STATUS_UNAVAILABLE};
    for (size_t i = 0; i < COUNT_OF(codes); i++) {
        cr_expect(status_set(codes[i], "%s number %d", "message", (int)i) == codes[i]);
        char expected[32];
        snprintf(expected, sizeof expected, "message number %d", (int)i);
        cr_expect_str_eq(status_text(), expected);
    }
}

Test(status, a_message_records_what_is_at_fault)
{
    cr_expect_str_empty(status_subject());
    cr_expect_eq(status_option(STATUS_USAGE, "out-res", ": '%d' is odd", 3), STATUS_USAGE);
    cr_expect_str_eq(status_text(), "--out-res: '3' is odd");
    cr_expect_str_eq(status_subject(), "out-res");
    cr_expect_eq(status_prefix(STATUS_USAGE, "line %d", 7), STATUS_USAGE);
    cr_expect_str_eq(status_subject(), "out-res");
    cr_expect_eq(status_about(STATUS_OK, "batch"), STATUS_OK);
    cr_expect_str_eq(status_subject(), "out-res");
    status_about(status_set(STATUS_FAILED, "x.csv: full"), "x.csv");
    cr_expect_str_eq(status_subject(), "x.csv");
    status_set(STATUS_FAILED, "another");
    cr_expect_str_empty(status_subject());
}

Test(status, a_kept_failure_is_recorded_again)
{
    struct failure kept = status_save(status_option(STATUS_USAGE, "batch", " is too large"));
    cr_expect(status_repeats(STATUS_USAGE, &kept));
    cr_expect_not(status_repeats(STATUS_FAILED, &kept));
    cr_expect_not(status_repeats(status_set(STATUS_USAGE, "--batch is too large"), &kept));
    cr_expect_not(status_repeats(status_option(STATUS_USAGE, "batch", " is 3"), &kept));
    cr_expect_eq(status_restore(&kept), STATUS_USAGE);
    cr_expect_str_eq(status_text(), "--batch is too large");
    cr_expect_str_eq(status_subject(), "batch");
}

Test(status, appended_text_keeps_the_subject)
{
    status_option(STATUS_USAGE, "batch", " is too large");
    cr_expect_eq(status_append(STATUS_USAGE, "; use %d", 3), STATUS_USAGE);
    cr_expect_str_eq(status_text(), "--batch is too large; use 3");
    cr_expect_str_eq(status_subject(), "batch");
}

Test(status, codes_are_the_documented_exit_statuses)
{
    cr_expect(STATUS_OK == 0 && STATUS_FAILED == 1 && STATUS_USAGE == 2 && STATUS_WRONG == 3 &&
              STATUS_UNAVAILABLE == 4);
    for (int code = STATUS_OK; code <= STATUS_UNAVAILABLE; code++)
        cr_expect_eq(status_exit((enum status)code), code);
    cr_expect_eq(status_exit(STATUS_EXHAUSTED), STATUS_FAILED);
    cr_expect_eq(status_exit(STATUS_TOO_LARGE), STATUS_USAGE);
}

Test(status, the_cause_of_a_failed_call_decides_whether_resources_ran_out)
{
    static const int exhausted[] = {ENOMEM, ENOSPC, EDQUOT, EMFILE, ENFILE},
                     other[] = {EIO, ENOENT, EACCES, 0};
    for (size_t i = 0; i < COUNT_OF(exhausted); i++)
        cr_expect_eq(status_of_errno(exhausted[i]), STATUS_EXHAUSTED, "%d", exhausted[i]);
    for (size_t i = 0; i < COUNT_OF(other); i++)
        cr_expect_eq(status_of_errno(other[i]), STATUS_FAILED, "%d", other[i]);
}

Test(status, the_latest_message_replaces_earlier_ones)
{
    status_set(STATUS_FAILED, "a long message that comes first");
    status_set(STATUS_USAGE, "short");
    cr_expect_str_eq(status_text(), "short");
}

Test(status, prefixes_nest_outwards_and_keep_the_code)
{
    status_set(STATUS_WRONG, "the cause");
    cr_expect(status_prefix(STATUS_WRONG, "line %d", 7) == STATUS_WRONG);
    cr_expect(status_prefix(STATUS_USAGE, "%s", "file.csv") == STATUS_USAGE);
    cr_expect(status_prefix(STATUS_OK, "%s", "success") == STATUS_OK);
    cr_expect_str_eq(status_text(), "file.csv: line 7: the cause");
}

/* A message begins with names and ends with the remedy, so a message that is too long loses its middle. */
Test(status, a_long_message_loses_its_middle)
{
    status_set(STATUS_FAILED, "begin%send", letters('a', 3000));
    cr_expect(strlen(status_text()) == TEXT_MAX, "%zu", strlen(status_text()));
    cr_expect(strncmp(status_text(), "beginaaa", 8) == 0 && strstr(status_text(), "a ... a"));
    cr_expect_str_eq(status_text() + TEXT_MAX - 4, "aend");
    status_set(STATUS_FAILED, "%s", letters('b', TEXT_MAX));
    cr_expect(strspn(status_text(), "b") == TEXT_MAX, "a message of the maximum length must be complete");
}

Test(status, a_prefix_keeps_the_end_of_a_long_message)
{
    status_set(STATUS_FAILED, "%s; do this", letters('m', TEXT_MAX));
    status_prefix(STATUS_FAILED, "file");
    status_prefix(STATUS_OK, "not added to the message of an earlier failure");
    cr_expect(strlen(status_text()) == TEXT_MAX);
    cr_expect(strncmp(status_text(), "file: mmm", 9) == 0, "%.20s", status_text());
    cr_expect_str_eq(status_text() + TEXT_MAX - 9, "; do this");
    status_prefix(STATUS_FAILED, "%s", letters('p', 2000));
    cr_expect(strncmp(status_text(), "ppp", 3) == 0, "%.20s", status_text());
    cr_expect_str_eq(status_text() + strlen(status_text()) - 9, "; do this");
}

/* Truncation must not split a UTF-8 character. */
Test(status, truncation_keeps_characters_whole)
{
    for (size_t shift = 0; shift < 4; shift++) {
        char text[4 * TEXT_MAX] = "", shown[sizeof text];
        memset(text, 'x', shift);
        for (size_t i = 0; i < TEXT_MAX / 2; i++)
            strcat(text, "\u20ac");
        status_set(STATUS_FAILED, "%s", text);
        cr_expect(strstr(status_text(), " ... ") && strlen(status_text()) <= TEXT_MAX);
        cr_expect_str_eq(text_printable(status_text(), shown, sizeof shown), status_text());
        cr_expect_null(strchr(status_text(), '\\'));
    }
}

/* Messages contain file names, which are untrusted, and terminals execute control sequences. */
Test(status, control_sequences_are_escaped)
{
    static const char hostile[] = "a\033]0;title\007\n\tb\x9b\xff";
    static const char harmless[] = "a\\x1b]0;title\\x07\\n\\tb\\x9b\\xff";
    char line[128];
    status_set(STATUS_FAILED, "%s", hostile);
    cr_expect_str_eq(status_text(), harmless);
    status_prefix(STATUS_FAILED, "%s", hostile);
    snprintf(line, sizeof line, "%s: %s", harmless, harmless);
    cr_expect_str_eq(status_text(), line);
}

static void *fail_elsewhere(void *text_before)
{
    snprintf(text_before, 64, "%s", status_text());
    status_set(STATUS_USAGE, "the other thread's");
    status_prefix(STATUS_USAGE, "prefix");
    return strdup(status_text());
}

Test(status, each_thread_has_its_own_message)
{
    status_set(STATUS_FAILED, "this thread's");
    char text_before[64] = "unset";
    pthread_t thread;
    void *text;
    cr_assert(pthread_create(&thread, NULL, fail_elsewhere, text_before) == 0);
    cr_assert(pthread_join(thread, &text) == 0);
    cr_expect_str_empty(text_before);
    cr_expect_str_eq((char *)text, "prefix: the other thread's");
    cr_expect_str_eq(status_text(), "this thread's");
    free(text);
}

static enum status relay(enum status code, int *reached)
{
    TRY(code);
    ++*reached;
    return STATUS_OK;
}

Test(status, try_returns_at_the_first_failure)
{
    int reached = 0;
    cr_expect(relay(STATUS_UNAVAILABLE, &reached) == STATUS_UNAVAILABLE);
    cr_expect(reached == 0);
    cr_expect(relay(STATUS_OK, &reached) == STATUS_OK);
    cr_expect(reached == 1);
}

Test(status, prints_plain_lines_if_stderr_is_not_a_terminal, .init = cr_redirect_stderr)
{
    status_set(STATUS_FAILED, "it failed");
    status_print();
    status_warn("%d samples are few", 3);
    cr_expect_str_eq(status_text(), "it failed", "a warning must not replace the message of a failure");
    fflush(stderr);
    cr_expect_stderr_eq_str("fdsl-bench: it failed\nfdsl-bench: warning: 3 samples are few\n");
}

Test(status, only_rank_0_prints_messages_of_all_ranks, .init = cr_redirect_stderr)
{
    status_joined(2, 4);
    status_set(STATUS_FAILED, "an error of all");
    status_print();
    status_warn("a warning for all");
    status_note("a note");
    status_warn_own("%d degrees here", 95);
    cr_expect_not(status_shows_progress());
    cr_expect_not(status_coloured(STDERR_FILENO));
    fflush(stderr);
    cr_expect_stderr_eq_str("fdsl-bench: warning: rank 2: 95 degrees here\n");
}

Test(status, a_rank_without_known_peers_prints_its_errors, .init = cr_redirect_stderr)
{
    status_launched(2, 0);
    status_set(STATUS_UNAVAILABLE, "no MPI");
    status_print();
    fflush(stderr);
    cr_expect_stderr_eq_str("fdsl-bench: rank 2: no MPI\n");
}

Test(status, warnings_for_all_ranks_have_no_rank_number, .init = cr_redirect_stderr)
{
    status_launched(0, 4);
    status_warn("a warning for all");
    status_warn_own("only here");
    fflush(stderr);
    cr_expect_stderr_eq_str("fdsl-bench: warning: a warning for all\n"
                            "fdsl-bench: warning: rank 0: only here\n");
}

Test(status, a_single_rank_has_no_number, .init = cr_redirect_stderr)
{
    status_warn_own("only here");
    fflush(stderr);
    cr_expect_stderr_eq_str("fdsl-bench: warning: only here\n");
}

/* Expects that stderr ends after `text`. */
static void expect_stderr(const char *text)
{
    fflush(stderr);
    cr_expect_stderr_eq_str(text);
}

Test(status, caveats_of_all_rows_are_one_line, .init = cr_redirect_stderr)
{
    status_summarise_caveats(3); /* prints nothing */
    status_caveat("did not settle", "raise --max-time", "naive: %d %%", 5);
    status_caveat("had outliers", "wait", "omp");
    status_caveat("did not settle", "raise --max-time", "omp: %d %%", 7);
    status_summarise_caveats(3);
    status_summarise_caveats(3); /* the first call forgot the caveats */
    status_caveat("had outliers", "wait", "naive");
    status_summarise_caveats(1);
    expect_stderr("fdsl-bench: warning: 2 of 3 rows did not settle: raise --max-time; 1 of 3 rows had "
                  "outliers: wait (details: --verbose)\n"
                  "fdsl-bench: warning: the row had outliers: wait (details: --verbose)\n");
}

Test(status, caveats_can_be_shown_in_detail, .init = cr_redirect_stderr)
{
    status_show_caveats(true);
    status_caveat("did not settle", "raise --max-time", "naive: %d %%", 5);
    status_summarise_caveats(2);
    expect_stderr("fdsl-bench: warning: naive: 5 %\n"
                  "fdsl-bench: warning: 1 of 2 rows did not settle: raise --max-time\n");
}

/* Only a fixed number of reasons is counted; others must not get lost. */
Test(status, a_caveat_that_cannot_be_counted_is_printed, .init = cr_redirect_stderr)
{
    static char what[17][16];
    for (size_t i = 0; i < COUNT_OF(what); i++) {
        snprintf(what[i], sizeof what[i], "reason %zu", i);
        status_caveat(what[i], "wait", "detail %zu", i);
    }
    expect_stderr("fdsl-bench: warning: detail 16\n");
}

Test(status, other_ranks_count_no_caveats, .init = cr_redirect_stderr)
{
    status_launched(1, 2);
    status_show_caveats(true);
    status_caveat("did not settle", "raise --max-time", "naive");
    status_summarise_caveats(1);
    expect_stderr("");
}

Test(status, held_warnings_are_printed_at_the_release, .init = cr_redirect_stderr)
{
    status_hold();
    status_warn("first");
    status_warn_own("the only rank");
    status_warn("second");
    status_say("a note");
    status_release();
    status_warn("third");
    status_release(); /* prints nothing twice */
    expect_stderr("fdsl-bench: a note\nfdsl-bench: warning: first\nfdsl-bench: warning: the only rank\n"
                  "fdsl-bench: warning: second\nfdsl-bench: warning: third\n");
}

Test(status, a_warning_is_not_repeated_with_another_context, .init = cr_redirect_stderr)
{
    status_warn("x: 12");
    for (int i = 1; i < 4; i++) {
        char text[16];
        snprintf(text, sizeof text, "--n %d", i);
        status_set_context(text);
        status_warn("x: 12");
        status_warn("x: %d", i);
        status_say("a note");
    }
    status_set_context("");
    status_warn("x: 12");
    expect_stderr("fdsl-bench: warning: x: 12\nfdsl-bench: warning: --n 1: x: 12\n"
                  "fdsl-bench: warning: --n 1: x: 1\nfdsl-bench: --n 1: a note\n"
                  "fdsl-bench: warning: --n 2: x: 2\nfdsl-bench: --n 2: a note\n"
                  "fdsl-bench: warning: --n 3: x: 3\nfdsl-bench: --n 3: a note\n"
                  "fdsl-bench: warning: x: 12\n");
}

Test(status, an_option_that_an_error_states_is_printed_once, .init = cr_redirect_stderr)
{
    static const char *const contexts[] = {"--n 1 --fit crop --out 2", "--fit crop --n 1", "--n 1 --fit crop",
                                           "--fit crop", "--x-fit crop --n 1"};
    for (size_t i = 0; i < sizeof contexts / sizeof *contexts; i++) {
        status_set_context(contexts[i]);
        struct failure kept = status_save(status_value(STATUS_USAGE, "fit", "crop", ": too %s", "large"));
        status_set(STATUS_FAILED, "another");
        (void)status_restore(&kept);
        status_print();
    }
    cr_expect_str_eq(status_subject(), "fit");
    status_set_context("--fit crop");
    status_option(STATUS_USAGE, "fit", ": too large");
    status_print();
    status_prefix(STATUS_USAGE, "variant x");
    status_append(STATUS_USAGE, "; lower it");
    status_print();
    status_set_context("--n 1 --fit crop");
    status_print();
    status_about(STATUS_USAGE, "n");
    status_print();
    status_number(STATUS_USAGE, "n", 1.5, ": too small");
    status_print();
    status_set_context("--fit crop");
    status_set(STATUS_USAGE, "--fit crop: it only looks like the option");
    status_print();
    status_set_context("");
    expect_stderr(
        "fdsl-bench: --n 1 --out 2: --fit crop: too large\nfdsl-bench: --n 1: --fit crop: too large\n"
        "fdsl-bench: --n 1: --fit crop: too large\nfdsl-bench: --fit crop: too large\n"
        "fdsl-bench: --x-fit crop --n 1: --fit crop: too large\n"
        "fdsl-bench: --fit crop: too large\n"
        "fdsl-bench: variant x: --fit crop: too large; lower it\n"
        "fdsl-bench: --n 1: variant x: --fit crop: too large; lower it\n"
        "fdsl-bench: --n 1 --fit crop: variant x: --fit: too large; lower it\n"
        "fdsl-bench: --fit crop: --n 1.5: too small\n"
        "fdsl-bench: --fit crop: --fit crop: it only looks like the option\n");
}

/* The room for held warnings is limited; a warning that does not fit must be printed at once. */
Test(status, no_held_warning_is_lost)
{
    char *text = NULL;
    size_t size, lines = 0;
    FILE *before = stderr, *stream = open_memstream(&text, &size);
    cr_assert_not_null(stream);
    stderr = stream;
    status_hold();
    for (int i = 0; i < 200; i++)
        status_warn("%s", letters('w', 1000));
    status_release();
    stderr = before;
    cr_assert(text_close(stream));
    for (const char *at = text; (at = strchr(at, '\n')); at++)
        lines++;
    cr_expect_eq(lines, 200);
    free(text);
}

/* A failure that ends the run must not be mistaken for wrong results, after which the run continues. */
Test(status, wrong_results_are_the_least_severe_failure)
{
    static const enum status failures[] = {STATUS_FAILED, STATUS_EXHAUSTED, STATUS_TOO_LARGE, STATUS_USAGE,
                                           STATUS_UNAVAILABLE};
    cr_expect(status_severity(STATUS_OK) == 0);
    cr_expect(status_severity(STATUS_WRONG) > 0);
    for (size_t i = 0; i < COUNT_OF(failures); i++) {
        cr_expect(status_severity(failures[i]) > status_severity(STATUS_WRONG));
        for (size_t j = 0; j < i; j++)
            cr_expect(status_severity(failures[i]) != status_severity(failures[j]));
    }
}

/* ---- Lack of memory ---- */

Test(status, each_system_error_that_tells_of_lack_is_exhaustion)
{
    static const int lack[] = {ENOMEM, ENOSPC, EDQUOT, EMFILE, ENFILE};
    for (int cause = 1; cause < 134; cause++) {
        bool exhausted = false;
        for (size_t i = 0; i < COUNT_OF(lack); i++)
            exhausted |= cause == lack[i];
        cr_expect_eq(status_of_errno(cause), exhausted ? STATUS_EXHAUSTED : STATUS_FAILED, "%s",
                     strerror(cause));
    }
}

/* The codes are those of the headers: cudaErrorMemoryAllocation, CUBLAS_STATUS_ALLOC_FAILED, the two
 * CUDNN_STATUS_INTERNAL_ERROR_*_ALLOCATION_FAILED, ncclSystemError and NVJPEG_STATUS_ALLOCATOR_FAILURE. */
Test(status, each_library_code_that_tells_of_lack_of_memory_is_exhaustion)
{
    static const struct {
        enum gpu_library library;
        int codes[2];
    } libraries[] = {{LIBRARY_CUDA, {2}}, {LIBRARY_CUBLAS, {3}}, {LIBRARY_CUDNN, {4003, 4004}},
                     {LIBRARY_NCCL, {0}}, {LIBRARY_NVJPEG, {5}}, {LIBRARY_CUFILE, {ENOMEM, -ENOMEM}}};
    for (size_t i = 0; i < COUNT_OF(libraries); i++)
        for (int code = -200; code < 6000; code++) {
            enum gpu_library library = libraries[i].library;
            bool exhausted = code == libraries[i].codes[0] || code == libraries[i].codes[1];
            /* CUDA returns 1 for an invalid value, 201 to 999 for others. */
            enum status status = gpu_status_of(library, code, 1, EIO);
            if (code == 0)
                cr_expect_eq(status, STATUS_OK, "library %d", (int)library);
            else if (library != LIBRARY_CUFILE || code > 5000 || exhausted)
                cr_expect_eq(status, exhausted ? STATUS_EXHAUSTED : STATUS_FAILED, "library %d: code %d",
                             (int)library, code);
            /* Whatever the library reports, CUDA has told it that memory ran out. */
            cr_expect_eq(gpu_status_of(library, code, 2, 0), code ? STATUS_EXHAUSTED : STATUS_OK,
                         "library %d: code %d", (int)library, code);
        }
    cr_expect_eq(gpu_status_of(LIBRARY_NCCL, 2, 0, ENOMEM), STATUS_EXHAUSTED, "ncclSystemError");
    cr_expect_eq(gpu_status_of(LIBRARY_NCCL, 3, 0, ENOMEM), STATUS_FAILED,
                 "ncclInternalError; errno is stale");
}
