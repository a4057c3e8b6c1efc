/* Shared by the MPI suites: runs the program under mpirun, each test in its own folder. */
#ifndef FDSL_TESTS_MPIRUN_H
#define FDSL_TESTS_MPIRUN_H

#include <criterion/criterion.h>

#include <dirent.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "arguments.h"
#include "cells.h"
#include "core/portable.h"
#include "core/timer.h"
#include "folder.h"

/* Options for images that take microseconds, and exactly three samples. */
#define TINY                                                                                           \
    "--variant " VARIANTS " --res 32 --vertices 20 --orbits 4 --radius 3 --warmups 1 --warmup-time 0 " \
    "--min-samples 3 --min-time 0 --max-time 0 "
#define MIXED \
    "--variant " VARIANTS " --res 32 --warmups 0 --warmup-time 0 --min-samples 1 --min-time 0 --max-time 0 "

enum { TEXT_MAX = 1 << 20 };

static char program[PATH_MAX], folder[] = "/tmp/fdsl-mpi-XXXXXX";
static int status;
static char out[TEXT_MAX], err[TEXT_MAX];

/* ---- Running ---- */

/* Reads a whole file into `text`, which has TEXT_MAX bytes. `text` is "" if the file does not exist. */
static inline void read_text(const char *path, char *text)
{
    FILE *file = fopen(path, "r");
    size_t bytes = file ? fread(text, 1, TEXT_MAX - 1, file) : 0;
    text[bytes] = '\0';
    if (file)
        fclose(file);
}

/* Runs a shell command; $PROGRAM is the program under test. */
static inline void shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline void shell(const char *format, ...)
{
    char command[8192];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command - 32, format, arguments);
    va_end(arguments);
    strcat(command, " >stdout.txt 2>stderr.txt");
    FILE *pipe = popen(command, "r");
    cr_assert_not_null(pipe);
    int ended = pclose(pipe);
    status = WIFEXITED(ended) ? WEXITSTATUS(ended) : 128 + WTERMSIG(ended);
    read_text("stdout.txt", out);
    read_text("stderr.txt", err);
}

/* Runs the program under mpirun on `ranks` ranks. If `ranks` is 0, runs it without mpirun. */
static inline void run(int ranks, const char *arguments)
{
    char line[8192];
    snprintf(line, sizeof line, "%s", arguments);
    drop_repeated_in(line);
    if (ranks)
        shell("timeout 150 mpirun --bind-to none -n %d $PROGRAM %s", ranks, line);
    else
        shell("$PROGRAM %s", line);
}

static inline void run_well(int ranks, const char *arguments)
{
    run(ranks, arguments);
    cr_assert(status == 0, "%d ranks, %s: exit %d: %s", ranks, arguments, status, err);
}

/* Creates the test's folder, and removes the variables of any launcher that runs the tests. Sets variables
 * that let mpirun start everywhere: as root, with more ranks than cores, and without a network. */
static inline void start(void)
{
    static const char *const own[][2] = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                         {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                         {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
                                         {"OMPI_MCA_pml", "ob1"},
                                         {"OMPI_MCA_btl", "self,vader,tcp"},
                                         {"OMPI_MCA_btl_tcp_if_include", "lo"},
                                         {"OMPI_MCA_oob_tcp_if_include", "lo"}};
#ifndef HAVE_MPI
    cr_skip_test("this build has no MPI");
#endif
    if (system("command -v mpirun >/dev/null") != 0)
        cr_skip_test("mpirun is not installed");
    find_program(program);
    forget_launchers();
    for (size_t i = 0; i < COUNT_OF(own); i++)
        setenv(own[i][0], own[i][1], 1);
    setenv("PROGRAM", program, 1);
    /* Leak detection is off. MPI's plugins leak memory, and lsan.supp cannot suppress their leaks because the
     * plugins are already unloaded when leaks are reported. */
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
    enter_folder(folder);
}

static inline void stop(void)
{
    leave_folder(folder);
}

/* Runs the test's own executable on each number of ranks from `least` to `most`, with the number in a
 * variable of the environment. Code that runs before main() must do the work of a rank and exit. */
static inline void run_as_ranks(const char *variable, int least, int most)
{
    char self[PATH_MAX] = "";
    cr_assert(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    for (int ranks = least; ranks <= most; ranks++) {
        shell("timeout 100 mpirun --bind-to none -x %s=%d -n %d %s", variable, ranks, ranks, self);
        cr_expect_eq(status, 0, "%d ranks: exit %d: %s", ranks, status, err);
        cr_expect_str_empty(err); /* for example, no warning about shared memory */
    }
}

/* Compiles a library of MPI functions from `name`.c, which gets this text. */
static inline void make_library(const char *name, const char *text)
{
    char path[64];
    snprintf(path, sizeof path, "%s.c", name);
    FILE *file = fopen(path, "w");
    cr_assert(file && fputs(text, file) >= 0 && fclose(file) == 0);
    snprintf(path, sizeof path, "mpicc -shared -fPIC -o %s.so %s.c", name, name);
    cr_assert(system(path) == 0);
}

/* ---- Ranks in the background ---- */

/* Finds the process ids of the children of `parent` that run the program, at most 8. */
static inline int children_of(pid_t parent, pid_t *children)
{
    int count = 0;
    DIR *directory = opendir("/proc");
    cr_assert_not_null(directory);
    for (const struct dirent *entry; (entry = readdir(directory)) && count < 8;) {
        char path[300], line[512] = "", name[64] = "";
        int pid, above;
        snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
        FILE *file = fopen(path, "r");
        if (!file)
            continue;
        if (fgets(line, sizeof line, file) && sscanf(line, "%d (%63[^)]) %*c %d", &pid, name, &above) == 3 &&
            above == parent && strcmp(name, "fdsl-bench") == 0)
            children[count++] = pid;
        fclose(file);
    }
    closedir(directory);
    return count;
}

static inline void nap(void)
{
    nanosleep(&(struct timespec){0, 20000000}, NULL);
}

/* A library that is preloaded before MPI. Between runs, the ranks vote in an MPI_Iallreduce(). Rank
 * HELD_RANK stops at its third vote: it writes its process id to the file "held" and waits for the file "go".
 * A rank that sleeps while it waits in a vote creates the file "slept". A rank that calls MPI_Send() more
 * than ten times creates the file "noisy". */
static const char vote_holder[] =
    "#include <fcntl.h>\n"
    "#include <mpi.h>\n"
    "#include <stdio.h>\n"
    "#include <stdlib.h>\n"
    "#include <string.h>\n"
    "#include <time.h>\n"
    "#include <unistd.h>\n"
    "static int votes, in_vote;\n"
    "int MPI_Iallreduce(const void *from, void *to, int count, MPI_Datatype type, MPI_Op operation,\n"
    "                   MPI_Comm ranks, MPI_Request *request)\n"
    "{\n"
    "    const char *rank = getenv(\"OMPI_COMM_WORLD_RANK\"), *held = getenv(\"HELD_RANK\");\n"
    "    in_vote = type == MPI_DOUBLE && count > 1;\n"
    "    if (in_vote && rank && held && strcmp(rank, held) == 0 && ++votes == 3 &&\n"
    "        system(\"cd $HELD_IN && echo $PPID >held.tmp && mv held.tmp held && \"\n"
    "               \"until [ -e go ]; do sleep 0.02; done\"))\n"
    "        return MPI_ERR_OTHER;\n"
    "    return PMPI_Iallreduce(from, to, count, type, operation, ranks, request);\n"
    "}\n"
    "static void leave(const char *name)\n"
    "{\n"
    "    char path[4096];\n"
    "    snprintf(path, sizeof path, \"%s/%s\", getenv(\"HELD_IN\"), name);\n"
    "    close(creat(path, 0666));\n"
    "}\n"
    "int MPI_Send(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm ranks)\n"
    "{\n"
    "    static int sent;\n"
    "    if (++sent > 10)\n"
    "        leave(\"noisy\");\n"
    "    return PMPI_Send(data, count, type, to, tag, ranks);\n"
    "}\n"
    "int usleep(useconds_t us)\n"
    "{\n"
    "    if (in_vote)\n"
    "        leave(\"slept\");\n"
    "    return nanosleep(&(struct timespec){us / 1000000, us % 1000000 * 1000L}, NULL);\n"
    "}\n";

/* Starts mpirun in the background with its output in files. Rank `held_rank` stops at its third vote, as
 * described for `vote_holder`. In the command, $PROGRAM is the program. Returns mpirun's process id. */
static inline pid_t start_ranks(int held_rank, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline pid_t start_ranks(int held_rank, const char *format, ...)
{
    char command[4096] = "export LD_PRELOAD=$HELD_IN/holder.so; exec mpirun --bind-to none ", number[16],
         cwd[PATH_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command + strlen(command), sizeof command - strlen(command) - 32, format, arguments);
    va_end(arguments);
    strcat(command, " >stdout.txt 2>stderr.txt");
    make_library("holder", vote_holder);
    snprintf(number, sizeof number, "%d", held_rank);
    setenv("HELD_RANK", number, 1);
    setenv("HELD_IN", getcwd(cwd, sizeof cwd), 1);
    setenv("ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0", 1);
    pid_t pid = fork();
    cr_assert(pid >= 0);
    if (pid == 0) {
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    return pid;
}

/* Waits until the rank that start_ranks() named has stopped. Returns the process id of this rank. */
static inline pid_t wait_until_held(void)
{
    static char text[TEXT_MAX];
    double begin_s = timer_now_s();
    while (access("held", F_OK) != 0 && timer_now_s() - begin_s < 90)
        nap();
    read_text("held", text);
    if (!*text)
        read_text("stderr.txt", err);
    cr_assert(*text, "no rank stopped at its third vote: %s", err);
    return (pid_t)atoi(text);
}

static inline void let_go(void)
{
    cr_assert(system("touch go") == 0);
}

/* Waits at most `limit_s` seconds for a process to end. Returns whether it did. */
static inline bool ends_within(pid_t pid, double limit_s, int *ended)
{
    for (double begin_s = timer_now_s(); timer_now_s() - begin_s < limit_s; nap())
        if (waitpid(pid, ended, WNOHANG) == pid)
            return true;
    return false;
}

/* Returns the rank of a process that Open MPI started. */
static inline int rank_of(pid_t pid)
{
    static const char name[] = "OMPI_COMM_WORLD_RANK=";
    static char variables[TEXT_MAX];
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/environ", (int)pid);
    read_text(path, variables);
    for (const char *at = variables; *at; at += strlen(at) + 1)
        if (strncmp(at, name, sizeof name - 1) == 0)
            return atoi(at + sizeof name - 1);
    cr_assert_fail("process %d has no %s", (int)pid, name);
    return -1;
}

/* Waits for the end of all ranks. Expects that stderr then contains `words` (which end in "rank"), followed
 * by this rank or by a list with this rank: "waiting for rank 1" or "waiting for ranks 1, 2". */
static inline void expect_end(pid_t mpirun, const char *words, int rank)
{
    int ended;
    bool named = false;
    cr_assert(ends_within(mpirun, 40, &ended), "the ranks did not end");
    read_text("stderr.txt", err);
    const char *at = strstr(err, words);
    cr_assert_not_null(at, "%s", err);
    char *next = (char *)at + strlen(words) + (at[strlen(words)] == 's');
    do
        named |= strtol(next, &next, 10) == rank;
    while (*next++ == ',');
    cr_expect(named, "rank %d is not named: %s", rank, err);
}

/* Runs the program on two ranks, with a library that is preloaded before MPI. The library makes
 * memfd_create() fail, so the ranks exchange arrays through MPI to sum them. In every exchange, the library
 * multiplies the first received value by `factor` on rank `rank`, or on all ranks if `rank` is -1. */
static inline void run_with_fault(int rank, int factor, const char *options)
{
    static const char faulty[] =
        "#include <errno.h>\n"
        "#include <mpi.h>\n"
        "#include <stdlib.h>\n"
        "int memfd_create(const char *name, unsigned flags)\n"
        "{\n"
        "    errno = ENOSYS;\n"
        "    return -1;\n"
        "}\n"
        "int MPI_Iallgatherv(const void *from, int count, MPI_Datatype type, void *to, const int *counts,\n"
        "                    const int *offsets, MPI_Datatype into, MPI_Comm ranks, MPI_Request *request)\n"
        "{\n"
        "    int rank, fault = atoi(getenv(\"FAULTY_RANK\"));\n"
        "    MPI_Comm_rank(ranks, &rank);\n"
        "    PMPI_Allgatherv(from, count, type, to, counts, offsets, into, ranks);\n"
        "    if (fault < 0 || fault == rank)\n"
        "        *(float *)to *= atoi(getenv(\"FAULTY_FACTOR\"));\n"
        "    return PMPI_Ibarrier(MPI_COMM_SELF, request);\n"
        "}\n";
    make_library("faulty", faulty);
    shell("timeout 150 mpirun --bind-to none -x FAULTY_RANK=%d -x FAULTY_FACTOR=%d -x "
          "LD_PRELOAD=$PWD/faulty.so -x "
          "ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 -n 2 $PROGRAM %s",
          rank, factor, options);
}

#endif
