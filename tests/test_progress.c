/* Tests the progress display: the text of durations, and when a line is printed. */
#include "core/status.h"

#include <criterion/criterion.h>
#include <criterion/redirect.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/portable.h"

Test(progress, durations_are_short)
{
    static const struct {
        double seconds;
        const char *text;
    } durations[] = {{0, "0 s"},           {59.4, "59 s"},          {59.6, "1 min 00 s"},
                     {200, "3 min 20 s"},  {3599.4, "59 min 59 s"}, {3599.6, "1 h 00 min"},
                     {7500, "2 h 05 min"}, {360000, "100 h 00 min"}};
    char text[32];
    for (size_t i = 0; i < COUNT_OF(durations); i++)
        cr_expect_str_eq(progress_duration(durations[i].seconds, text, sizeof text), durations[i].text);
}

Test(progress, lines_are_due_after_their_period)
{
    struct progress progress;
    char text[256];
    cr_redirect_stderr();
    setenv("FDSL_PROGRESS_S", "0", 1);
    progress_begin(&progress, false);
    cr_expect(!progress_due(&progress), "a line is due, although lines are disabled");
    progress_begin(&progress, true);
    cr_expect(progress_due(&progress));
    progress_show(&progress, "%d of %d", 1, 2);
    progress_clear(&progress);
    fflush(stderr);
    text[fread(text, 1, sizeof text - 1, cr_get_redirected_stderr())] = '\0';
    cr_expect_str_eq(text, "fdsl-bench: 1 of 2\n");
    setenv("FDSL_PROGRESS_S", "1000", 1);
    progress_begin(&progress, true);
    cr_expect(!progress_due(&progress));
    setenv("FDSL_PROGRESS_S", "-1", 1);
    progress_begin(&progress, true);
    cr_expect_eq(progress.period_s, 10, "%g", progress.period_s);
    unsetenv("FDSL_PROGRESS_S");
    progress_begin(&progress, true);
    cr_expect_eq(progress.period_s, 10, "%g", progress.period_s);
}
