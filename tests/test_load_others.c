/* Tests how `load` works with its environment: Linux kernels that forbid system calls, files of other users,
 * the comparison with other loaders, and tar files of other programs. */
#include "core/timer.h"
#include "load_support.h"

TestSuite(load_others, .timeout = 60);

/* ---- io_uring forbidden, as in a container ---- */

#if defined(HAVE_URING) && defined(__x86_64__) && !defined(FDSL_SANITIZED)
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static void forbid(unsigned call, unsigned failure)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | failure),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {COUNT_OF(filter), filter};
    cr_assert_eq(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    cr_assert_eq(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

static void expect_no_uring(unsigned failure)
{
    forbid(425 /* io_uring_setup */, failure);
    cr_assert(!is_available("shards-uring") && !is_available("files-uring"));
    expect_words("seccomp");
}

/* The seccomp filter also applies to programs that this process starts. */
Test(load_others, forbidden_io_uring_exits_4, .init = make_folder, .fini = remove_folder)
{
    forbid(425 /* io_uring_setup */, 1 /* EPERM */);
    for (int shards = 1; shards >= 0; shards--) {
        const char *name = shards ? "shards-uring" : "files-uring";
        shards ? make_shards(101) : make_files(101);
        cr_assert(command("timeout 30 $P --variant %s --data $D >$D/out.txt 2>&1; test $? = 4", name), "%s",
                  name);
        cr_assert(command("grep -q 'io_uring is not available.*seccomp' $D/out.txt"), "%s", name);
        renew_folder();
    }
}

Test(load_others, forbidden_io_uring_makes_variants_unavailable)
{
    expect_no_uring(1 /* EPERM */);
}

Test(load_others, missing_io_uring_makes_variants_unavailable)
{
    expect_no_uring(38 /* ENOSYS */);
}

/* ---- Files whose resident pages the kernel hides from this process ---- */

Test(load_others, cold_and_warm_are_refused_if_pages_are_hidden, .init = make_folder, .fini = remove_folder)
{
    struct cache_pages mine = {0}, theirs = {0};
    struct job job;
    make_shards(101);
    forbid(451 /* cachestat */, 1 /* EPERM */);
    int fd = open(in_folder("x-000000.tar"), O_RDONLY);
    must(cache_count(fd, 20000, &mine));
    cr_assert(mine.all == 5 && !mine.hidden);
    close(fd);
    if (geteuid() != 0)
        return;
    cr_assert(chmod(folder, 0755) == 0 && seteuid(65534) == 0);
    fd = open(in_folder("x-000000.tar"), O_RDONLY);
    must(cache_count(fd, 20000, &theirs));
    cr_assert(theirs.all == 5 && theirs.hidden);
    close(fd);
    for (int cold = 0; cold <= 1; cold++) {
        struct cache_pages pages;
        must(open_job(&job, cold ? "--cache cold" : "--cache warm"));
        cr_assert_eq(load_settle_cache(job.input, &pages), STATUS_FAILED);
        expect_words("use --cache any");
        expect_words("own the files");
        close_job(&job);
    }
    struct cache_pages pages;
    must(open_job(&job, ""));
    cr_assert_str_eq(job.workload->cache(job.input), "any", "only --cache may end such a run");
    must(load_settle_cache(job.input, &pages));
    close_job(&job);
    cr_assert_eq(seteuid(0), 0);
    must(open_job(&job, ""));
    cr_assert_str_eq(job.workload->cache(job.input), "warm");
    close_job(&job);
    cr_assert(command("cp $P $D/program && chmod 755 $D && cd / && timeout 50 setpriv --reuid 65534 "
                      "--clear-groups $D/program --workload load --variant shards,shards-mmap --loops 3 "
                      "--data $D --format csv 2>$D/err.txt >$D/out.txt"));
    cr_assert(command("test $(grep -c ',any,' $D/out.txt) = 2 && ! grep -q ',warm,' $D/out.txt && "
                      "test $(grep -c 'cache any is used' $D/err.txt) = 1"));
}
#endif

/* ---- The comparison with other loaders ---- */

static void need_python(void)
{
    if (!command("python3 -c pass 2>/dev/null"))
        cr_skip_test("no python3");
}

/* The beginning of a command that imports scripts/compare/loading.py as c. */
#define LOADING "PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=scripts/compare python3 -c 'import sys, loading as c\n"

/* Runs scripts/compare/loading.py on the folder. Returns whether it refuses the folder with this message. */
static bool comparison_refuses(const char *words)
{
    return command(LOADING "d = sys.argv[1]\n"
                           "c.check_count(d, c.expected(\"shards\", d)[0])' $D 2>&1 | grep -qF '%s'",
                   words);
}

Test(load_others, the_comparison_refuses_shards_that_tarfile_truncates, .init = make_folder,
     .fini = remove_folder)
{
    need_python();
    make_shards(101);
    cr_assert_not(comparison_refuses(""));
    cr_assert(command("{ echo key; seq -f %%06g 0 101; } >$D/samples.csv"));
    cr_assert(comparison_refuses("contains 101 samples, but its samples.csv lists 102"));
    cr_assert_eq(unlink(in_folder("samples.csv")), 0);
    cr_assert_eq(truncate(in_folder("x-000002.tar"), 0), 0);
    cr_assert(comparison_refuses("empty file"));
    make_shards(101);
    struct stat whole;
    cr_assert_eq(stat(in_folder("x-000002.tar"), &whole), 0);
    cr_assert_eq(truncate(in_folder("x-000002.tar"), whole.st_size - TAR_END_BYTES), 0);
    cr_assert(comparison_refuses("x-000002.tar: offset "));
    make_shards(101);
    /* Damages the second header. It is at offset 512, because the first member of sample 0 has no data. */
    overwrite("x-000000.tar", 512, "z", 1);
    cr_assert(comparison_refuses("x-000000.tar: offset 512: a broken header"));
}

/* The rows of loading.py must have the same columns as the program's rows, so that both fit in one table. */
Test(load_others, the_comparison_has_the_columns_of_our_rows, .init = make_folder, .fini = remove_folder)
{
    need_python();
    make_shards(101);
    cr_assert(command(
        "$P --variant shards-mmap --data $D --cache any --min-time 0 --format csv 2>/dev/null | " LOADING
        "import csv\n"
        "rows = list(csv.reader(sys.stdin))\n"
        "assert rows[0] == list(c.COLUMNS), set(rows[0]) ^ set(c.COLUMNS)\n"
        "assert rows[1][0] == c.columns_of(None)[1], rows[1][0]'"));
}

/* For torch-files, the column `threads` is 1 both without workers and with one worker. So the name of the
 * loader must distinguish the two cases. */
Test(load_others, comparison_distinguishes_worker_counts)
{
    need_python();
    cr_assert(command(LOADING
                      "names = [c.name_of(n, w) for n in (\"torch-files\", \"dali\") for w in (0, 1)]\n"
                      "assert names == [\"torch-files-inline\", \"torch-files\", \"dali\", \"dali\"]\n"
                      "assert c.hash_samples([b\"a\", b\"bc\"]) == c.hash_samples([b\"bc\", b\"a\"])\n"
                      "assert c.hash_samples([b\"a\", b\"bc\"]) != c.hash_samples([b\"ab\", b\"c\"])'"));
}

/* loading.py must refuse to append to a table with other columns. */
Test(load_others, the_comparison_refuses_tables_with_other_columns, .init = make_folder,
     .fini = remove_folder)
{
    static const struct {
        const char *table, *words;
    } cases[] = {{"schema,workload\nload/4,load\n", "does not have the columns of load/"},
                 {"schema,workload\nsynth/5,synth\n", "does not have the columns of load/"},
                 {"a,b\n1,2\n", "does not have the columns of load/"}};
    need_python();
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        put_file("rows.csv", cases[i].table, strlen(cases[i].table));
        cr_expect(
            command(LOADING "c.columns_of(sys.argv[1])' $D/rows.csv 2>&1 | grep -qF '%s'", cases[i].words),
            "%s", cases[i].words);
    }
}

/* With --gpu, loading.py compares a loader with a variant that delivers the same bytes to the GPU. The
 * variant must have as many threads as the loader has workers. */
Test(load_others, comparison_uses_matching_variant, .init = make_folder, .fini = remove_folder)
{
    need_python();
    cr_assert(command("printf '#!/bin/sh\\necho said\\necho \"$*\"\\n' >$D/bench && chmod +x $D/bench"));
    cr_assert(command(
        LOADING
        "import argparse\n"
        "def said(gpu, decode=None): return [row[\"said\"] for row in c.run_ours(argparse.Namespace(gpu=gpu, "
        "decode=decode, files=\"F\", shards=\"S\", workers=16, batch=4, time=1, bench=sys.argv[1]))]\n"
        "cpu, gpu = said(False), said(True)\n"
        "assert all(\"--out-res 64 --fit random-resized-crop\" in line for line in said(False, 64))\n"
        "assert [line.split()[1] for line in cpu] == [\"files-omp\", \"shards-omp\", \"shards-omp\"], cpu\n"
        "assert [line.split()[1] for line in gpu] == [\"files-gpu\", \"shards-gpu\", \"shards-gpu\"], gpu\n"
        "assert all(\"--threads 16\" in line and \"--dtype raw\" in line for line in gpu), gpu\n"
        "assert \"--shuffle 1000\" in gpu[1] and \"--shuffle 0\" in gpu[2], gpu' $D/bench"));
}

/* ---- Tars from other programs ---- */

/* Two ranks divide a shard, so the second rank's part begins after the global pax header. The header must
 * apply there too. */
Test(load_others, global_pax_header_applies_in_every_share, .init = make_folder, .fini = remove_folder)
{
    static const uint8_t zeros[TAR_END_BYTES];
    static const char record[] = "12 size=700\n";
    uint8_t header[TAR_BLOCK_BYTES];
    FILE *stream = fopen(in_folder("g.tar"), "w");
    cr_assert_not_null(stream);
    cr_assert_eq(tar_header(header, "global", sizeof record - 1), STATUS_OK);
    header[156] = 'g';
    memcpy(header + 148, "        ", 8);
    unsigned sum = 0;
    for (size_t i = 0; i < sizeof header; i++)
        sum += header[i];
    snprintf((char *)header + 148, 8, "%06o", sum);
    fwrite(header, 1, sizeof header, stream);
    fwrite(record, 1, sizeof record - 1, stream);
    fwrite(zeros, 1, tar_padding(sizeof record - 1), stream);
    for (uint32_t i = 0; i < 101; i++) { /* each member's header gives 3 bytes, the global header 700 */
        char name[64];
        snprintf(name, sizeof name, "%06u.bin", i);
        cr_assert_eq(tar_header(header, name, 3), STATUS_OK);
        fwrite(header, 1, sizeof header, stream);
        for (uint32_t byte = 0; byte < 1024; byte++)
            putc(byte < 700 ? content(i, 0, byte) : 0, stream);
    }
    fwrite(zeros, 1, sizeof zeros, stream);
    fclose(stream);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        for (uint64_t rank = 0; rank < 2; rank++) {
            struct job job;
            must(open_job(&job, "--cache any --shuffle 0 --batch 7"));
            cr_assert_eq(dataset_of(&job)->sample_bytes_max, 700);
            must(job.workload->repartition(job.input, job.parameters,
                                           &(const struct partition){.rank = rank, .ranks = 2}));
            if (start(&job, shard_variants[v])) {
                cr_assert_eq(run(&job, 1), STATUS_OK, "%s, rank %d: %s", shard_variants[v], (int)rank,
                             status_text());
                expect_none_wrong(&job);
            }
            close_job(&job);
        }
}

/* Runs a Python script with the folder as its argument. The script must not contain double quotes. */
static void make_with_python(const char *script)
{
    need_python();
    cr_assert(command("python3 -c \"%s\" $D", script));
}

/* Expects all variants to read every sample of the shards in the folder. */
static void expect_read(uint32_t samples)
{
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++) {
        struct job job;
        if (start_job(&job, shard_variants[v], "--cache any --shuffle 7 --batch 5"))
            expect_none_wrong(&job);
        cr_assert_eq(dataset_of(&job)->sample_count, samples);
        close_job(&job);
    }
}

Test(load_others, pax_and_gnu_tars_of_python_are_read, .init = make_folder, .fini = remove_folder)
{
    static const char script[] =
        "import tarfile,io,sys\n"
        "for s,f in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):\n"
        "  t=tarfile.open('%s/y-%06d.tar'%(sys.argv[1],s),'w',format=f)\n"
        "  d=tarfile.TarInfo('folder'); d.type=tarfile.DIRTYPE; t.addfile(d)\n"
        "  for i in range(20):\n"
        "    for e in ('bin','cls'):\n"
        "      m=tarfile.TarInfo('folder/'+'k'*150*(i%2)+'%d-%d.%s'%(s,i,e)); b=b'%d'%i*(i*300+1)\n"
        "      m.size=len(b); m.mtime=0.5+i; t.addfile(m,io.BytesIO(b))\n"
        "  t.addfile(tarfile.TarInfo('README'))\n"
        "  t.close()\n";
    make_with_python(script);
    expect_read(40);
}

/* A hard link delivers the bytes of its target: an earlier member of a sample, another link, or a file that
 * belongs to no sample. The last samples of a shard consist of links only. */
#define LINKS                                                                                            \
    "import tarfile,io,sys\n"                                                                            \
    "for s,f in enumerate((tarfile.USTAR_FORMAT,tarfile.GNU_FORMAT,tarfile.PAX_FORMAT)):\n"              \
    "  t=tarfile.open('%s/l-%06d.tar'%(sys.argv[1],s),'w',format=f)\n"                                   \
    "  d='k'*(60 if f==tarfile.USTAR_FORMAT else 200)+'/'\n"                                             \
    "  def add(n,b,l=None):\n"                                                                           \
    "    m=tarfile.TarInfo(n); m.size=0 if l else len(b); m.type=tarfile.LNKTYPE if l else b'0'\n"       \
    "    m.linkname=l or ''; t.addfile(m,io.BytesIO(b))\n"                                               \
    "  add('blobs/0',b'blob'*3000)\n"                                                                    \
    "  for i in range(20):\n"                                                                            \
    "    if i==0: add(d+'0.bin',b'','blobs/0')\n"                                                        \
    "    elif i%3==1: add(d+'%d.bin'%i,b'',d+'%d.bin'%(i-1))\n"                                          \
    "    else: add('./'+d+'%d.bin'%i,b'%d'%i*(i*300+1))\n"                                               \
    "    add(('./' if i%3!=1 and i else '')+d+'%d.cls'%i,b'%d'%i)\n"                                     \
    "  for i in range(20,27): add(d+'%d.bin'%i,b'',d+'%d.bin'%(i-9)); add(d+'%d.cls'%i,b'',d+'1.cls')\n" \
    "  t.close()\n"

Test(load_others, hard_links_deliver_their_targets, .init = make_folder, .fini = remove_folder)
{
    make_with_python(LINKS);
    expect_read(3 * 27);
    for (size_t v = 0; v < COUNT_OF(shard_variants); v++)
        for (uint64_t rank = 0; rank < 7; rank++) {
            struct job job;
            must(open_job(&job, "--cache any --shuffle 0 --batch 7"));
            must(job.workload->repartition(job.input, job.parameters,
                                           &(const struct partition){.rank = rank, .ranks = 7}));
            if (start(&job, shard_variants[v])) {
                cr_assert_eq(run(&job, 1), STATUS_OK, "%s, rank %d: %s", shard_variants[v], (int)rank,
                             status_text());
                expect_none_wrong(&job);
            }
            close_job(&job);
        }
    cr_assert(
        command("cd $D && mkdir set out all && mv *.tar set && $P --prepare copy --from dataset --source set "
                "--store files >/dev/null && cat copy/not-imagefolder/000/*.bin >copied && "
                "for t in set/*.tar; do rm -r out; mkdir out; tar -C out -xf $t; "
                "for i in $(seq 0 26); do cat out/k*/$i.bin; done; done >extracted && cmp copied extracted"));
}

/* A link whose target is not an earlier file, a symbolic link, and a device lose their sample, and only that.
 */
Test(load_others, members_without_data_are_refused_or_skipped, .init = make_folder, .fini = remove_folder)
{
    static const struct {
        const char *type, *target, *words;
    } cases[] = {{"LNKTYPE", "9.bin", "'3.bin' is a hard link to '9.bin', which is not an earlier file"},
                 {"LNKTYPE", "../3.bin", "is not an earlier file"},
                 {"SYMTYPE", "1.bin", "'3.bin' is a symbolic link to '1.bin', which is not followed"},
                 {"FIFOTYPE", "", "'3.bin' is a device or a pipe"},
                 {"CHRTYPE", "", "'3.bin' is a device or a pipe"}};
    need_python();
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        cr_assert(
            command("python3 -c \"import tarfile,io,sys\n"
                    "t=tarfile.open(sys.argv[1]+'/a.tar','w')\n"
                    "for i in range(10):\n"
                    "  for e in ('bin','cls'):\n"
                    "    m=tarfile.TarInfo('%%d.%%s'%%(i,e)); m.size=900\n"
                    "    if m.name=='3.bin': m.type=tarfile.%s; m.linkname='%s'; m.size=0\n"
                    "    t.addfile(m,io.BytesIO(b'%%d'%%i*m.size))\n"
                    "m=tarfile.TarInfo('latest'); m.type=tarfile.SYMTYPE; m.linkname='x'; t.addfile(m)\n"
                    "t.close()\" $D",
                    cases[i].type, cases[i].target));
        expect_refused(cases[i].words);
        expect_skipped(9, "1");
    }
}

/* A Python function that writes a shard from words: NAME=TEXT is a file, NAME>TARGET a hard link, NAME@TARGET
 * a symbolic link, NAME| a pipe, and NAME/ a folder. */
#define WRITE_SHARD                                                                              \
    "import tarfile,io,sys,re,random\n"                                                          \
    "types={'=':tarfile.REGTYPE,'>':tarfile.LNKTYPE,'@':tarfile.SYMTYPE,'|':tarfile.FIFOTYPE}\n" \
    "def write(path,words):\n"                                                                   \
    "  t=tarfile.open(path,'w',format=tarfile.GNU_FORMAT)\n"                                     \
    "  for w in words:\n"                                                                        \
    "    n,k,v=re.match('([^=>@|]*)([=>@|]?)(.*)',w).groups()\n"                                 \
    "    m=tarfile.TarInfo(n); m.type=types[k] if k else tarfile.DIRTYPE; m.mode=0o755\n"        \
    "    b=v.encode() if k=='=' else b''; m.size=len(b); m.linkname=v if k!='=' else ''\n"       \
    "    t.addfile(m,io.BytesIO(b))\n"                                                           \
    "  t.close()\n"

/* A name that occurs again is replaced, as when the shard is extracted. A hard link then refers to the later
 * file; if the name is no longer a file, its sample is refused. */
Test(load_others, hard_links_to_replaced_names_deliver_what_tar_extracts, .init = make_folder,
     .fini = remove_folder)
{
    static const struct {
        const char *words, *data; /* the data of all samples */
    } good[] = {{"X=one Y=two X>Y 1.bin>X", "two"},
                {"X=one Y>X X=two 1.bin>Y", "one"},
                {"X=one X=two 1.bin>X", "two"},
                {"X=one ./X=two 1.bin>X", "two"},
                {"d/X=one .//d/./X=two 1.bin>d//X", "two"},
                {"X=one /X=two 1.bin>X", "two"},
                {"X=one X>X 1.bin>./X", "one"},
                {"X=one Y>X Z>Y 1.bin>Z", "one"},
                {"X@nowhere X=one 1.bin>X", "one"},
                {"X=one 0.bin=two X>0.bin 1.bin>X", "twotwo"}};
    static const struct {
        const char *words, *refusal;
        uint32_t others; /* samples that are not refused */
    } bad[] = {{"X=one X@nowhere 1.bin>X", "'1.bin' is a hard link to 'X', which is a symbolic link", 0},
               {"0.bin=one X@0.bin 1.bin>X", "'1.bin' is a hard link to 'X', which is a symbolic link", 1},
               {"X=one X| 1.bin>X", "'1.bin' is a hard link to 'X', which is a device or a pipe", 0},
               {"X=one X/ 1.bin>X", "'1.bin' is a hard link to 'X', which is a folder", 0},
               {"X>Y 1.bin>X Y=one", "'1.bin' is a hard link to 'X', which is a hard link to no", 0},
               {"1.bin>Y Y=one", "'1.bin' is a hard link to 'Y', which is not an earlier file", 0},
               {"1.bin>1.bin", "'1.bin' is a hard link to '1.bin', which is not an earlier file", 0},
               {"1.bin=one 1.bin=two", "sample '1': it has 'bin' twice", 0},
               {"1.bin=one 3.bin=three 1.bin=two", "the key '1' occurred before", 1}};
    char script[4096] = "", data[256] = "", count[8];
    size_t used = 0;
    uint32_t left = 0;
    need_python();
    for (size_t i = 0; i < COUNT_OF(bad); i++)
        used += (size_t)sprintf(script + used, "write('a%zu.hidden','%s'.split())\n", i, bad[i].words);
    for (size_t i = 0; i < COUNT_OF(good); i++) {
        used += (size_t)sprintf(script + used, "write('%02zu.hidden','%s'.split())\n", i, good[i].words);
        strcat(data, good[i].data);
    }
    cr_assert(command("cd $D && python3 -c \"" WRITE_SHARD "%s\"", script));
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        cr_assert(command("cd $D && mv a%zu.hidden a.tar", i));
        expect_refused(bad[i].refusal);
        cr_assert(command("cd $D && mv a.tar a%zu.hidden", i));
        left += bad[i].others;
    }
    cr_assert(command("cd $D && for i in 0[0-9].hidden; do mv $i ${i%%hidden}tar; done"));
    expect_read(COUNT_OF(good) + 1);
    cr_assert(command("cd $D && mkdir set && mv *.tar set && $P --prepare copy --from dataset --source set "
                      "--store shards --shards 1 >/dev/null && tar -xOf copy/*.tar >all && "
                      "printf %s | cmp - all && rm -r set copy && "
                      "for f in a*.hidden; do mv $f ${f%%hidden}tar; done",
                      data));
    snprintf(count, sizeof count, "%d", (int)COUNT_OF(bad));
    expect_skipped(left, count);
}

/* Compares the data of the samples of random shards with what `tar -x` extracts. A sample must be lost
 * exactly if tar extracts no regular file for it. The names of samples occur once; other names are replaced.
 * No name is replaced by a link without a target, because tar leaves such a name as it was. */
Test(load_others, random_shards_with_links_deliver_what_tar_extracts, .init = make_folder,
     .fini = remove_folder)
{
    struct job job;
    need_python();
    if (!command("tar --version 2>/dev/null | grep -q GNU"))
        cr_skip_test("no GNU tar");
    cr_assert(command("cd $D && python3 -c \"" WRITE_SHARD "import os,subprocess\n"
                      "def spell(n): return random.choice(['','','./','.//','././'])+n\n"
                      "for s in range(200):\n"
                      "  random.seed(s); names=[]; words=[]\n"
                      "  for i in range(random.randrange(4,40)):\n"
                      "    n=random.choice(['X','Y','Z','d/X','d//X','d/./Y','%%d-%%d.bin'%%(s,i)])\n"
                      "    plain=os.path.normpath(n); key=n.endswith('bin'); v='%%d.%%d'%%(s,i)\n"
                      "    k=random.choice('==>>>>>@' if key else '===>>>@/')\n"
                      "    if k=='/' and plain in names or k=='>' and not names: k='='\n"
                      "    if k=='>': v=spell(random.choice(names))\n"
                      "    if k=='>' and random.random()<0.1 and plain not in names: v='no'\n"
                      "    if k=='@': v='nowhere'\n"
                      "    words.append(spell(n)+('/' if k=='/' else k+v))\n"
                      "    if k!='/' and v!='no': names.append(plain)\n"
                      "  write('%%03d.tar'%%s,words+['%%d-e.bin=end'%%s]); os.mkdir('%%03d'%%s)\n"
                      "  subprocess.run(['tar','-C','%%03d'%%s,'-xf','%%03d.tar'%%s],stderr=-3)\n\""));
    must(open_job(&job, "--cache any --on-error skip"));
    const struct dataset *dataset = dataset_of(&job);
    for (uint32_t i = 0; i < dataset->sample_count; i++) {
        const struct dataset_member *member = &dataset->members[dataset->samples[i].member];
        const char *shard = dataset->files[member->file].name;
        char name[PATH_MAX + 128], extracted[64] = "", ours[64] = "";
        snprintf(name, sizeof name, "%s/%.3s/%.100s.bin", folder, shard, dataset->samples[i].key);
        int fd = open(name, O_RDONLY | O_NOFOLLOW), set = openat(dataset->directory, shard, O_RDONLY);
        cr_assert(fd >= 0 && set >= 0, "%s", name);
        cr_assert_eq(read(fd, extracted, sizeof extracted - 1), (ssize_t)member->size, "%s", name);
        cr_assert_eq(pread(set, ours, member->size, (off_t)member->offset), (ssize_t)member->size);
        cr_assert_str_eq(ours, extracted, "%s", name);
        close(fd);
        close(set);
    }
    cr_assert_gt(dataset->skipped, 100);
    cr_assert(command("test $(find $D/??? -type f -name '*.bin' | wc -l) = %u", dataset->sample_count));
    close_job(&job);
}

/* Names that differ only in "./" or "//" have the same key. */
Test(load_others, members_with_other_spellings_of_a_key_are_one_sample, .init = make_folder,
     .fini = remove_folder)
{
    need_python();
    cr_assert(command("python3 -c \"" WRITE_SHARD "write(sys.argv[1]+'/a.tar','./0.bin=a 0.cls=1 d/1.bin=b "
                      "d//1.cls=2 2.bin=c ././2.cls=3 /3.bin=d 3.cls=4'.split())\" $D"));
    expect_read(4);
    cr_assert(command("cd $D && mkdir set && mv a.tar set && $P --prepare copy --from dataset --source set "
                      "--store shards --shards 1 --member all >/dev/null && tar -xPOf copy/*.tar >all && "
                      "printf a1b2c3d4 | cmp - all"));
}

/* Finding the target of a link takes the same time in every shard. */
Test(load_others, shards_of_many_links_open_soon, .init = make_folder, .fini = remove_folder, .timeout = 60)
{
    need_python();
    cr_assert(
        command("python3 -c \"" WRITE_SHARD "write(sys.argv[1]+'/a.tar',['k.e%%d=1'%%i for i in range(40000)]"
                "+['l%%d.bin>k.e0'%%i for i in range(40000)])\n"
                "write(sys.argv[1]+'/b.tar',['0.bin=x']+['%%d.bin>%%d.bin'%%(i+1,i) for i in range(10000)])\n"
                "\" $D"));
    struct job job;
    double begin_s = timer_clock_s(CLOCK_PROCESS_CPUTIME_ID);
    must(open_job(&job, "--cache any --on-error skip"));
    double used_s = timer_clock_s(CLOCK_PROCESS_CPUTIME_ID) - begin_s;
    cr_assert_lt(used_s, 2, "%g s", used_s); /* a linear search takes at least 5 s */
    cr_assert_eq(dataset_of(&job)->sample_count, 50001);
    close_job(&job);
}

#if defined HAVE_CURL && defined HAVE_XXHASH
Test(load_others, linked_shards_at_a_url_deliver_the_same_bytes, .init = make_folder, .fini = remove_folder)
{
    make_with_python(LINKS);
    cr_assert(
        command("S=$PWD/tests/remote_server.py && cd $D && mkdir set && mv *.tar set && mkfifo hold port && "
                "(python3 $S set <hold >port & exec 9>hold; read n <port; export no_proxy=127.0.0.1; "
                "for s in set 'http://127.0.0.1:'$n'/web/l-{000000..000002}.tar'; do $P --prepare "
                "copy-${s%%%%:*} --from dataset "
                "--source \"$s\" --store shards --shards 1 --member all >/dev/null || exit 1; done; "
                "for v in shards shards-mmap shards-omp; do $P --variant $v --verify --loops 1 --warmups 0 "
                "--warmup-time 0 --data \"http://127.0.0.1:$n/web/l-{000000..000002}.tar\" >/dev/null || "
                "exit 1; done) && "
                "test $(tar -tf copy-set/*.tar | wc -l) = 162 && cmp copy-set/*.tar copy-http/*.tar"));
}
#endif

/* tar without --sort=name writes the members of a sample in the order of the folder. A sample must never be
 * delivered with fewer members than it has. */
Test(load_others, samples_whose_members_are_apart_are_refused_or_skipped, .init = make_folder,
     .fini = remove_folder)
{
    static const struct {
        const char *order, *words, *skipped;
        uint32_t left;
    } cases[] = {
        {"0.bin 0.cls 1.bin 2.bin 2.cls 1.cls 3.bin",
         "'1.cls': the key '1' occurred before, at offset 2560, with other samples in between", "1", 3},
        {"0.bin 1.bin 0.cls 1.cls 2.bin", "write the shard with tar --sort=name", "2", 1},
        {"0.bin 1.bin 0.cls 0.json 1.cls 0.txt 2.bin", "the key '0' occurred before, at offset 512", "2", 1},
        {"./0.bin 1.bin 0.cls 2.bin", "the key './0' occurred before", "1", 2}};
    need_python();
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        cr_assert(command("python3 -c \"import tarfile,io,sys\n"
                          "for s in 'ab':\n"
                          "  t=tarfile.open(sys.argv[1]+'/%%s.tar'%%s,'w')\n"
                          "  for n in ('%s' if s=='a' else '0.bin 0.cls 1.bin').split():\n"
                          "    m=tarfile.TarInfo(n); m.size=300; t.addfile(m,io.BytesIO(b'x'*300))\n"
                          "  t.close()\" $D",
                          cases[i].order));
        expect_refused(cases[i].words);
        expect_skipped(cases[i].left + 2, cases[i].skipped); /* the same keys in another shard are no fault */
    }
}

/* The script calls tarfile as webdataset's TarWriter does: it writes a stream ("w|") and sorts a sample's
 * members by extension. Members have TarWriter's owner and mode, and a time that is a float. */
Test(load_others, tars_as_webdataset_writes_them_are_read, .init = make_folder, .fini = remove_folder)
{
    static const char script[] =
        "import tarfile,io,sys,time\n"
        "for s,f in enumerate((tarfile.USTAR_FORMAT, tarfile.DEFAULT_FORMAT)):\n"
        "  with open('%s/w-%06d.tar'%(sys.argv[1],s),'wb') as stream:\n"
        "    t=tarfile.open(fileobj=stream,mode='w|',format=f)\n"
        "    for i in range(30):\n"
        "      "
        "sample={'__key__':'train/%d-%06d'%(s,i),'jpg':b'%d'%i*(i*200+1),'cls':b'%d'%i,'meta.json':b'{}'}\n"
        "      for k in sorted(sample):\n"
        "        if k=='__key__': continue\n"
        "        m=tarfile.TarInfo(sample['__key__']+'.'+k); m.size=len(sample[k]); m.mtime=time.time()\n"
        "        m.mode=0o444; m.uname=m.gname='bigdata'; t.addfile(m,io.BytesIO(sample[k]))\n"
        "    t.close()\n";
    make_with_python(script);
    expect_read(60);
}

/* Tests all formats of GNU tar with long names: about 90 characters in v7, 190 in ustar, and 410 in the other
 * formats. The archives also contain folders as members, and a hard link with a target of that length. ustar
 * cannot store such a target, so its link is to a short name. */
Test(load_others, every_format_of_gnu_tar_is_read, .init = make_folder, .fini = remove_folder)
{
    static const struct {
        const char *name;
        int half; /* half the length of a name */
    } formats[] = {{"v7", 40}, {"ustar", 90}, {"oldgnu", 200}, {"gnu", 200}, {"pax", 200}};
    if (!command("tar --version 2>/dev/null | grep -q GNU"))
        cr_skip_test("no GNU tar");
    for (size_t f = 0; f < COUNT_OF(formats); f++)
        cr_assert(
            command(
                "cd $D && f=%s && long=$(printf '%%%ds' '' | tr ' ' k) && mkdir -p t/$f/$long && cd t && "
                "for i in 1 2 3 4 5 6 7 8 9; do printf $i >$f/$i.cls; seq ${i}000 >$f/$i.bin; done && "
                "seq 99 >$f/$long/$long.bin && ln $f/$([ $f = ustar ] && echo 1.bin || echo $long/$long.bin) "
                "$f/z.bin && tar --format=$f --sort=name -cf ../$f.tar ./$f && "
                "cd .. && rm -r t",
                formats[f].name, formats[f].half),
            "%s", formats[f].name);
    expect_read(55);
}
