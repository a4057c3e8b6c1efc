/* Tests that variants work with small stacks, and that too many threads cause a warning. */
#include "program.h"

TestSuite(threads, .init = start, .fini = stop, .timeout = 120);

/* Runs CPU variants of synth, train and infer. The caller has limited the size of stacks. */
static void run_all(void)
{
    static const char *const lines[] = {
        "--variant naive,omp --res 512 --classes 3 --batch 3 --out-res 224 --dtype f32 --verify",
        "--variant naive,omp --res 64 --batch 2 --npy x.npy --out rows.csv --samples-out samples.csv",
        "--variant train-naive,train-omp --model lenet",
        "--variant train-naive,train-omp --model cnn --shift 2 --flip",
        "--variant train-omp --model cnn-fdsl --checkpoint run --export run.safetensors",
    };
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        bool trains = strstr(lines[i], "train-");
        run("%s %s", lines[i],
            trains ? "--data digits --train-size 20 --test-size 9 --batch 9 --epochs 1"
                   : "--loops 1 --warmups 0 --warmup-time 0");
        cr_expect(status == 0 || status == 4, "%s: exit %d: %s", lines[i], status, err);
    }
    run("--variant infer-naive,infer-omp --verify --data digits --test-size 9 --checkpoint run --loops 1 "
        "--warmups 0 --warmup-time 0");
    cr_expect(status == 0 || status == 4, "infer: exit %d: %s", status, err);
}

/* Writes a data set and reads it with CPU variants of load. The caller has limited the size of stacks. */
static void run_loaders(void)
{
    run("--prepare set --samples 40 --shards 3 --sample-shape 3,8 --dtype f16");
    cr_expect(status == 0 || strstr(err, "not built"), "--prepare: exit %d: %s", status, err);
    run("--variant shards,shards-mmap,shards-omp,stream --data set --cache any --verify --loops 1 --warmups "
        "0 "
        "--warmup-time 0");
    cr_expect(status == 0 || status == 4 || strstr(err, "not built"), "shards: exit %d: %s", status, err);
}

/* Removes all variables except PATH, because the environment is on the stack and may exceed the limit. */
static void forget_environment(void)
{
    char *path = strdup(getenv("PATH"));
    clearenv();
    setenv("PATH", path, 1);
    free(path);
}

Test(threads, small_stacks_suffice)
{
    if (strstr(program, "/san/"))
        SKIP("a sanitizer needs larger stacks");
    forget_environment();
    how.stack_bytes_max = 80 << 10;
    run_all();
    run_loaders();
}

Test(threads, small_stacks_of_openmp_suffice)
{
    if (strstr(program, "/san/"))
        SKIP("a sanitizer needs larger stacks");
    setenv("OMP_STACKSIZE", "32k", 1);
    run_all();
    run_loaders();
}

Test(threads, too_many_threads_give_a_warning)
{
#ifndef _OPENMP
    SKIP("this build has no variant with threads");
#endif
    char line[256];
    long hardware = sysconf(_SC_NPROCESSORS_ONLN);
    snprintf(line, sizeof line, "--variant omp " TINY " --threads %ld", 4 * hardware + 4);
    run_well(line);
    cr_expect(strstr(err, "more threads mostly wait for each other; omit --threads"), "%s", err);
    snprintf(line, sizeof line, "--variant naive " TINY " --threads %ld", 4 * hardware + 4);
    run_well(line);
    cr_expect(!strstr(err, "more threads"), "a warning for naive, which has one thread: %s", err);
    run_well("--variant omp " TINY " --threads 2");
    cr_expect(!strstr(err, "more threads"), "%s", err);
}
