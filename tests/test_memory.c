/* Tests allocations that fail: each allocation of the program fails in one run. The program must end with an
 * error about memory, or continue without that allocation. */
#include "shell.h"

#include <string.h>

/* A library that makes allocation number FAIL_AT (malloc(), calloc(), ...) fail, and creates the file that
 * the variable FAILED names. It counts only calls by the program itself, not by libraries, and of the calls
 * with the same call stack only the first three: the later ones fail in the same way. */
static const char allocator[] =
    "#define _GNU_SOURCE\n"
    "#include <errno.h>\n"
    "#include <execinfo.h>\n"
    "#include <fcntl.h>\n"
    "#include <link.h>\n"
    "#include <stdint.h>\n"
    "#include <stdio.h>\n"
    "#include <stdlib.h>\n"
    "#include <unistd.h>\n"
    "void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);\n"
    "void *__libc_memalign(size_t, size_t);\n"
    "static uintptr_t begin, end, base;\n"
    "static struct { unsigned long begin, end; } foreign[64];\n"
    "static int foreign_count;\n"
    "static _Atomic long calls;\n"
    "static int find(struct dl_phdr_info *info, size_t bytes, void *unused)\n"
    "{\n"
    "    for (int i = 0; i < info->dlpi_phnum; i++)\n"
    "        if (info->dlpi_phdr[i].p_type == PT_LOAD && info->dlpi_phdr[i].p_flags & PF_X) {\n"
    "            base = info->dlpi_addr;\n"
    "            begin = base + info->dlpi_phdr[i].p_vaddr;\n"
    "            end = begin + info->dlpi_phdr[i].p_memsz;\n"
    "        }\n"
    "    return 1; /* the first object is the program */\n"
    "}\n"
    "__attribute__((constructor)) static void start(void)\n"
    "{\n"
    "    const char *path = getenv(\"FOREIGN\");\n"
    "    FILE *file = path ? fopen(path, \"r\") : NULL;\n"
    "    while (file && foreign_count < 64 && fscanf(file, \"%lx %lx\", &foreign[foreign_count].begin,\n"
    "                                                &foreign[foreign_count].end) == 2)\n"
    "        foreign_count++;\n"
    "    if (file)\n"
    "        fclose(file);\n"
    "    dl_iterate_phdr(find, NULL);\n"
    "}\n"
    "static int is_ours(uintptr_t caller)\n"
    "{\n"
    "    for (int i = 0; i < foreign_count; i++)\n"
    "        if (caller - base >= foreign[i].begin && caller - base < foreign[i].end)\n"
    "            return 0;\n"
    "    return caller >= begin && caller < end;\n"
    "}\n"
    "static __thread int busy;\n" /* backtrace() may allocate memory */
    "static _Atomic int seen[1 << 20];\n"
    "static int is_counted(void)\n"
    "{\n"
    "    void *frames[32];\n"
    "    uint32_t hash = 0;\n"
    "    busy = 1;\n"
    "    const int count = backtrace(frames, 32);\n"
    "    busy = 0;\n"
    "    for (int i = 0; i < count; i++)\n"
    "        if ((uintptr_t)frames[i] >= begin && (uintptr_t)frames[i] < end)\n"
    "            hash = (hash ^ (uint32_t)((uintptr_t)frames[i] - base)) * 2654435761u;\n"
    "    return ++seen[hash >> 12] <= 3;\n"
    "}\n"
    "static int fails(uintptr_t caller)\n"
    "{\n"
    "    const char *at = !busy && is_ours(caller) ? getenv(\"FAIL_AT\") : NULL;\n"
    "    if (!at || !is_counted() || ++calls != atol(at))\n"
    "        return 0;\n"
    "    close(open(getenv(\"FAILED\"), O_CREAT | O_WRONLY, 0666));\n"
    "    errno = ENOMEM;\n"
    "    return 1;\n"
    "}\n"
    "#define FAILS fails((uintptr_t)__builtin_return_address(0))\n"
    "void *malloc(size_t n) { return FAILS ? NULL : __libc_malloc(n); }\n"
    "void *calloc(size_t n, size_t size) { return FAILS ? NULL : __libc_calloc(n, size); }\n"
    "void *realloc(void *old, size_t n) { return FAILS ? NULL : __libc_realloc(old, n); }\n"
    "void *reallocarray(void *old, size_t n, size_t size)\n"
    "{ return FAILS ? NULL : __libc_realloc(old, n * size); }\n"
    "void *aligned_alloc(size_t a, size_t n) { return FAILS ? NULL : __libc_memalign(a, n); }\n"
    "int posix_memalign(void **to, size_t a, size_t n)\n"
    "{ return FAILS || !(*to = __libc_memalign(a, n)) ? ENOMEM : 0; }\n";

static void start(void)
{
#if defined __SANITIZE_ADDRESS__
    cr_skip_test("a sanitizer has its own allocator");
#endif
    shell_set_up();
    put("allocator.c", allocator, sizeof allocator - 1);
    EXPECT(0, "cc -O1 -shared -fPIC -o allocator.so allocator.c");
    EXPECT(0, "nm -n $P | awk '$2 ~ /[tTwW]/ { is = $3 ~ /cudart|^cuda|^__cuda/; if (is != was) "
              "printf \"%%s%%s\", $1, is ? \" \" : \"\\n\"; was = is } END { print was ? "
              "\"ffffffffffffffff\" : \"\" }' >foreign");
}

TestSuite(memory, .init = start, .fini = shell_tear_down, .timeout = 300);

/* Runs the program with allocation number `at` failing. The program must end with a message about memory, or
 * succeed without that allocation. Returns whether it asked for that many allocations. */
static bool fails_at(int at, int threads, const char *arguments)
{
    char failed[PATH_MAX];
    snprintf(failed, sizeof failed, "%s/FAILED", folder);
    (void)unlink(failed);
    run("{ [ ! -e made ] || rm -r made; } && FAILED=$PWD/FAILED FOREIGN=$PWD/foreign FAIL_AT=%d "
        "OMP_NUM_THREADS=%d LD_PRELOAD=$PWD/allocator.so timeout 30 $P %s",
        at, threads, arguments);
    cr_expect(status <= 4, "allocation %d: exit %d: %s", at, status, out);
    cr_expect(status == 0 || says("memory"), "allocation %d: exit %d: %s", at, status, out);
    cr_assert(at < 2000, "the program does not stop allocating memory");
    return access(failed, F_OK) == 0;
}

/* Runs the program once per allocation and makes this allocation fail. */
static void expect_refusals(const char *arguments)
{
    int at = 1;
    while (fails_at(at, 2, arguments))
        at++;
    cr_expect(at > 10, "only %d allocations failed: %s", at - 1, arguments);
}

#define ONE " --warmups 0 --warmup-time 0 --min-samples 1 --min-time 0 --max-time 0"

Test(memory, generating_handles_failed_allocations)
{
    expect_refusals("--variant naive,omp --res 32 --vertices 20 --batch 3 --verify --samples-out s.csv "
                    "--out r.csv" ONE);
    expect_refusals("--variant naive --res 32 --classes 3 --batch 5 --png made --npy x.npy "
                    "--write-classes c.csv" ONE);
}

Test(memory, loading_handles_failed_allocations)
{
    expect_refusals("--prepare made --samples 7 --shards 2 --sample-shape 5 --dtype u8");
    expect_refusals("--prepare made --from synth --classes 2 --samples 4 --res 32 --encode png");
    EXPECT(0, "$P --prepare shards --samples 9 --shards 2 --sample-shape 5 --dtype u8");
    EXPECT(0, "$P --prepare files --store files --samples 9 --sample-shape 5 --dtype u8");
    expect_refusals("--workload load --variant all --data shards --cache any --verify" ONE);
    expect_refusals("--workload load --variant all --data files --cache any --verify --shuffle 3" ONE);
}

Test(memory, streams_handle_failed_allocations)
{
    EXPECT(0, "$P --prepare images --samples 9 --shards 2 --sample-shape 3,4 --dtype u8");
    expect_refusals("--variant stream --data images --cache any --verify --batch 4 --threads 2" ONE);
}

/* A failed allocation in the trial of a batch says that the batch does not fit, so the search continues with
 * smaller ones. A set of 65 samples is the smallest one with two trials, of 64 and of all samples. */
Test(memory, the_largest_batch_is_found_although_allocations_fail)
{
    static const char *const variants[] = {"train-naive", "train-omp"};
    for (size_t v = 0; v < 2; v++) {
        char arguments[160];
        snprintf(arguments, sizeof arguments,
                 "--variant %s --model logreg --data digits --train-size 65 --test-size 10 --epochs 1 "
                 "--batch max",
                 variants[v]);
        int found = 0;
        bool failed = true;
        for (int at = 1; failed; at++) {
            failed = fails_at(at, 1, arguments);
            cr_expect(!says("--batch max, trying"), "%s, allocation %d: %s", variants[v], at, out);
            found += status == 0 && says(" does not (");
        }
        cr_expect(found > 5, "%s: %d searches have met a failed allocation", variants[v], found);
    }
}

Test(memory, training_handles_failed_allocations)
{
#define TRAIN "--workload train --data digits --train-size 20 --test-size 10 --batch 7 --epochs 1 --model "
    expect_refusals(TRAIN "lenet --variant train-naive");
    expect_refusals(TRAIN
                    "lenet --variant train-omp --checkpoint made --export e.safetensors --shift 2 --flip");
}
