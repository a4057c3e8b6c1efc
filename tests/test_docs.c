/* What the pages say of the program is there, and what is there is on a page. */
#include <criterion/criterion.h>

#include <stdlib.h>

#include "command.h"
#include "folder.h"

static void start(void)
{
    static char program[PATH_MAX];
    find_program(program);
    setenv("P", program, 1);
}

TestSuite(docs, .init = start, .timeout = 60);

#define PAGES "README.md docs/*.md"
#define OPTIONS                                                                                          \
    "{ $P --help; $P --prepare DIR --help; } | sed -n 's/^  \\(-., \\)\\?\\(--[a-z0-9-]*\\).*/\\2/p' | " \
    "sort -u"

Test(docs, every_option_is_on_a_page)
{
    shell(OPTIONS);
    cr_assert(says("--variant\n") && says("--sample-shape\n") && says("--verbose\n"), "%s", out);
    shell(OPTIONS " | while read -r option; do grep -qE -e \"$option([^a-z0-9-]|$)\" " PAGES
                  " || echo $option; done");
    cr_expect_str_eq(out, "", "on no page: %s", out);
}

Test(docs, every_link_leads_to_a_file)
{
    shell("for page in " PAGES " results/README.md results/reference/README.md; do "
          "grep -o '](\\([^)#]*\\)' $page | cut -c 3- | grep -v '^http' | "
          "while read -r file; do test -e $(dirname $page)/$file || echo $page: $file; done; done");
    cr_expect_str_eq(out, "", "%s", out);
}
