/* Tests scripts/setup/packages.sh with a package manager that only logs its calls. */
#include "shell.h"

/* Runs the script. Its PATH has the tools that the script needs, but not the tools that some packages
 * provide. */
#define SETUP "env -i $E PATH=bin MAKE_GOAL=bench bash scripts/setup/packages.sh build"

static void set_up(void)
{
    shell_set_up();
    EXPECT(0,
           "mkdir bin && cp -r %s/scripts . && for name in bash sh env cc grep head mktemp mkdir rm tail "
           "cat; do ln -s $(command -v $name) bin; done",
           root);
    put_script("bin/apt-get", "#!/bin/sh\necho \"$@\" >>calls\n");
    EXPECT(0, "cp bin/apt-get bin/make");
}

TestSuite(setup, .init = set_up, .fini = shell_tear_down, .timeout = 60);

/* The script's PATH has neither git nor mpicc. */
Test(setup, prints_packages_and_command_before_it_installs)
{
    if (geteuid() != 0)
        cr_skip_test("the script installs packages only as root");
    EXPECT(0, SETUP);
    const char *command = strstr(out, "apt-get install -y ");
    cr_assert(command && strstr(out, "git (") && strstr(out, "git (") < command, "%s", out);
    EXPECT(0, "tail -n 1 calls | sed 's/.*-recommends //; s/ $//'");
    cr_expect(strncmp(out, "git ", 4) == 0, "%s", out);
}

Test(setup, probes_a_compiler_that_a_wrapper_runs)
{
    put_script("bin/ccache", "#!/bin/sh\nexec \"$@\"\n");
    EXPECT_PRINTS(4, "libc6-dev", "E='SETUP=0 CC=ccache'; " SETUP);
    EXPECT_PRINTS(0, "git", "env -i SETUP=0 'CC=ccache cc' PATH=bin bash scripts/setup/packages.sh build");
    cr_expect_not(says("libc6-dev"), "%s", out);
}

Test(setup, setup_0_installs_nothing)
{
    EXPECT_PRINTS(0, "apt-get install -y --no-install-recommends git ", "E=SETUP=0; " SETUP);
    cr_expect_eq(run("test -e calls"), 1, "apt-get was called");
}
