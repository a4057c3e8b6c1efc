/* Tests scripts/migrate_rows.py: rows of older schemas become current rows, only values whose meaning has
 * changed become empty, and files that cannot be converted do not change. tests/data/rows has the first rows
 * of files with older headers. */
#include "core/portable.h"
#include "shell.h"

#define MIGRATE "$R/scripts/migrate_rows.py "
#define OLD     "$R/tests/data/rows/"
#define NAIVE                                                                                               \
    "$P --variant naive --res 16 --batch 2 --vertices 5 --orbits 3 --radius 3 --warmups 0 --warmup-time 0 " \
    "--loops 2 "

static void set_up(void)
{
    shell_set_up();
    setenv("R", root, 1);
    if (shell("python3 -c ''") != 0)
        cr_skip_test("no python3");
}

TestSuite(migrate, .init = set_up, .fini = shell_tear_down, .timeout = 120);

/* ---- Values after the conversion ---- */

/* A Python program that compares each FILE.old with FILE, and prints FILE and the columns whose values were
 * not kept. It is independent of the parser and the names in migrate_rows.py: it uses Python's csv module and
 * its own `pairs`. */
static const char compare[] =
    "import csv, sys\n"
    "pairs = [pair.split(':') for pair in ('output:dtype tensor:dtype depth:iodepth tally:checksum '\n"
    "    'shards_a_batch:shards_per_batch resident_before:resident_share_before '\n"
    "    'resident_after:resident_share_after device_bytes:storage_read_bytes wait_share:stall_share "
    "first_wait_s:first_batch_s '\n"
    "    'utilisation:busy_share peak_flops:peak_flops_per_s mem_clock_mhz:memory_clock_mhz '\n"
    "    'timed:timed_stages').split()]\n"
    "for path in sys.argv[1:]:\n"
    "    old, new = (list(csv.DictReader(open(path + end))) for end in ('.old', ''))\n"
    "    names = dict(pairs)\n"
    "    workload = old[0]['schema'].split('/')[0]\n"
    "    names.update({'layout': 'store'} if workload == 'load' and 'store' not in old[0] else {})\n"
    "    names.update({'loss': 'train_loss'} if workload == 'train' and 'train_loss' not in old[0] else {})\n"
    "    assert len(old) == len(new) == 2\n"
    "    lost = {name for a, b in zip(old, new) for name in a if name != 'schema' and\n"
    "            a[name] != b[names.get(name, name)]}\n"
    "    print(path, new[0]['schema'], new[1]['schema'], *sorted(lost))\n";

Test(migrate, older_schemas_become_current)
{
    static const struct {
        const char *name, *now, *lost;
    } files[] = {{"synth_1", "synth/7", "digest roofline_share"},
                 {"synth_2", "synth/7", "digest roofline_share"},
                 {"synth_3", "synth/7", "roofline_share"},
                 {"synth_4", "synth/7", "roofline_share"},
                 {"synth_5", "synth/7", "roofline_share"},
                 {"synth_6", "synth/7", ""},
                 {"load_3", "load/12", ""},
                 {"load_4", "load/12", ""},
                 {"load_4_b", "load/12", ""},
                 {"load_5", "load/12", ""},
                 {"load_6", "load/12", ""},
                 {"load_7", "load/12", ""},
                 {"load_8", "load/12", ""},
                 {"load_9", "load/12", ""},
                 {"load_10", "load/12", ""},
                 {"load_11", "load/12", ""},
                 {"train_1", "train/10", "time_cv time_sd_s"},
                 {"train_2", "train/10", "roofline_share time_cv time_sd_s"},
                 {"train_2_b", "train/10", "roofline_share time_cv time_sd_s"},
                 {"train_2_c", "train/10", "roofline_share time_cv time_sd_s"},
                 {"train_3", "train/10", ""},
                 {"train_4", "train/10", ""},
                 {"train_5", "train/10", ""},
                 {"train_6", "train/10", ""},
                 {"train_7", "train/10", ""},
                 {"train_8", "train/10", ""},
                 {"train_9", "train/10", ""},
                 {"infer_1", "infer/7", "roofline_share"},
                 {"infer_2", "infer/7", ""},
                 {"infer_3", "infer/7", ""},
                 {"infer_4", "infer/7", ""},
                 {"infer_5", "infer/7", ""},
                 {"infer_6", "infer/7", ""},
                 {"monitor_1", "monitor/2", ""}};
    static char converted[sizeof out];
    put("compare.py", compare, sizeof compare - 1);
    EXPECT(0, "ls " OLD "*.csv | wc -l");
    cr_expect_eq(atoi(out), (int)COUNT_OF(files));
    EXPECT(0, "cp " OLD "*.csv . && chmod 640 *.csv && for f in *.csv; do cp $f $f.old; done && " MIGRATE
              "*.csv");
    memcpy(converted, out, sizeof out);
    EXPECT(0, "test \"$(stat -c %%a *.csv | sort -u)\" = 640 && python3 compare.py *.csv");
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        const char *name = files[i].name;
        char line[256];
        snprintf(line, sizeof line, "%s.csv: 2 rows of ", name);
        const char *at = strstr(converted, line);
        cr_assert_not_null(at, "%s: %s", name, converted);
        snprintf(line, sizeof line, " converted to %s", files[i].now);
        at = strstr(at, " converted to ");
        cr_expect(at && strncmp(at, line, strlen(line)) == 0, "%s: %s", name, converted);
        snprintf(line, sizeof line, "%s.csv %s %s%s%s\n", name, files[i].now, files[i].now,
                 *files[i].lost ? " " : "", files[i].lost);
        cr_expect(says(line), "not %s in: %s", line, out);
    }
    /* An old file is kept only if values were omitted. */
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        EXPECT(
            0,
            "n=0; for kept in %s.csv.*-*; do test ! -e $kept || { cmp $kept %s.csv.old && n=$((n + 1)); }; "
            "done; echo $n",
            files[i].name, files[i].name);
        cr_expect_eq(atoi(out), *files[i].lost != '\0', "%s: %s", files[i].name, out);
    }
}

/* Converts rows of an older schema. Expects these values in these columns of the first row. */
static void expect_implied(const char *name, const char *columns, const char *values)
{
    char line[128];
    snprintf(line, sizeof line, "\n%s\n", values);
    EXPECT(0,
           "cp %s.csv a.csv && " MIGRATE "a.csv && python3 -c 'import csv, sys\n"
           "row = next(csv.DictReader(open(\"a.csv\")))\n"
           "print(*(row[name] for name in sys.argv[1:]), sep=\",\")' %s",
           name, columns);
    cr_expect(says(line), "%s: %s: not %s in: %s", name, columns, values, out);
}

Test(migrate, values_that_old_rows_imply_are_written)
{
    expect_implied(OLD "synth_1", "dtype channels layout out_res fit scaling compute", "u8,1,nchw,224,,,");
    EXPECT(0,
           "awk -F, -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } NR == 2 { $at[\"tensor\"] = "
           "\"f16\"; $at[\"compute_ms\"] = 5 } 1' " OLD "load_4.csv > changed.csv");
    expect_implied("changed", "dtype compute compute_ms store iodepth", "f16,5,5,files,32");
    expect_implied(OLD "load_3", "dtype store iodepth compute", ",files,32,");
    expect_implied(OLD "train_1", "feed fresh init drop_last", "stored,,,0");
    expect_implied(OLD "train_4", "sync balance samples_per_step", ",,");
    expect_implied(OLD "train_5", "sync balance samples_per_step", "peer,equal,512");
    expect_implied(OLD "monitor_1", "gpu device rss_bytes read_bytes_per_s write_bytes_per_s",
                   ",Made-up Accelerator X1,220000000,,");
}

/* Quotes, line ends, line breaks in quotes, empty lines and bytes that are not UTF-8 must not change. */
Test(migrate, values_keep_their_bytes)
{
    EXPECT(0, "{ cat " OLD
              "synth_6.csv | sed '2s/,vm,/,\"a \"\"b\"\", c\\nd\",/; 3s/,vm,/,\"v\\xffm\",/; s/$/\\r/'; "
              "printf '\\n'; } > a.csv; cp a.csv b.csv; " MIGRATE "a.csv && "
              "sed 's,^synth/6,synth/7,' b.csv | tail -n +2 > c.csv && tail -n +2 a.csv | cmp - c.csv");
}

/* Gives the columns of the current program's rows their former names. The script must restore the rows byte
 * for byte. */
Test(migrate, former_names_become_current_ones)
{
    EXPECT(0, NAIVE "--out a.csv --samples-out s.csv >log 2>&1 || { cat log; exit 1; }");
    EXPECT_PRINTS(
        0, "old_s.csv: 2 rows of synth/6 converted to synth/7",
        "for f in a s; do sed '1s/,dtype,/,output,/; 1s/,timed_stages,/,timed,/; "
        "1s/,stall_share,first_batch_s,/,wait_share,first_wait_s,/; 1s/,busy_share,/,utilisation,/; "
        "1s/,peak_flops_per_s,/,peak_flops,/; 1s/,memory_clock_mhz,/,mem_clock_mhz,/; s,^synth/7,synth/6,' "
        "$f.csv > old_$f.csv; ! cmp -s $f.csv old_$f.csv || exit; done; " MIGRATE "old_?.csv && "
        "cmp a.csv old_a.csv && cmp s.csv old_s.csv");
}

/* ---- The program ---- */

/* The script's table must have the columns that the program writes. */
Test(migrate, columns_are_those_of_the_program)
{
    EXPECT(0, NAIVE "--out rows_synth.csv --monitor rows_monitor.csv >log 2>&1 || { cat log; exit 1; }");
    EXPECT(0, "$P --variant train-naive --data digits --train-size 40 --test-size 10 --model logreg --batch "
              "10 --epochs 1 "
              "--checkpoint c --out rows_train.csv --log rows_steps.csv >log 2>&1 || { cat log; exit 1; }");
    EXPECT(0, "$P --variant infer-naive --checkpoint c --batch 10 "
              "--loops 2 --warmups 0 --warmup-time 0 "
              "--out rows_infer.csv >log 2>&1 || { cat log; exit 1; }");
#ifdef HAVE_XXHASH
    EXPECT(0, "$P --prepare set --samples 40 --sample-shape 3,4,4 --dtype u8 >log 2>&1 && $P --variant "
              "shards --data set "
              "--loops 2 --warmups 0 --warmup-time 0 --out rows_load.csv >log 2>&1 || { cat log; exit 1; }");
#endif
#ifdef HAVE_MPI
    EXPECT(0, "$P --variant mpi --bytes 4 --loops 2 --warmups 0 --warmup-time 0 --out rows_exchange.csv "
              "--samples-out samples_exchange.csv >log 2>&1 && " MIGRATE
              "--check rows_exchange.csv samples_exchange.csv || { cat log; exit 1; }");
#endif
    EXPECT(0, MIGRATE "--check rows_*.csv");
    EXPECT_OUT(
        "rows_synth.csv: has the current schema, synth/", "rows_train.csv: has the current schema, train/",
        "rows_infer.csv: has the current schema, infer/", "rows_steps.csv: has the current schema, steps/",
        "rows_monitor.csv: has the current schema, monitor/");
}

/* The program refuses to append to rows of an older schema and names the command that converts them. */
Test(migrate, the_program_names_the_script)
{
    EXPECT_PRINTS(2,
                  "a.csv has rows of the older schema synth/5, not synth/7; convert it with: "
                  "scripts/migrate_rows.py a.csv (or name another file)",
                  "cp " OLD "synth_5.csv a.csv; " NAIVE "--out a.csv");
    EXPECT(0, MIGRATE "a.csv && " NAIVE "--out a.csv >log 2>&1 || { cat log; exit 1; }");
    EXPECT(0, "grep -c ^synth/7 a.csv");
    cr_expect_eq(atoi(out), 3, "%s", out);
    EXPECT_PRINTS(2, "scripts/migrate_rows.py t.csv",
                  "cp " OLD
                  "train_3.csv t.csv; $P --variant train-naive --data digits --train-size 40 --test-size 10 "
                  "--model logreg --batch 10 --epochs 1 --checkpoint c --resume --out t.csv");
    EXPECT_PRINTS(2, "convert it with: scripts/migrate_rows.py m.csv",
                  "cp " OLD "monitor_1.csv m.csv; " NAIVE "--monitor m.csv");
    EXPECT(0, MIGRATE "m.csv && " NAIVE "--monitor m.csv >log 2>&1 || { cat log; exit 1; }");
    /* Rows of a newer schema, and rows of another workload, cannot be converted. */
    EXPECT(2, "sed 's,^synth/5,synth/8,' " OLD "synth_5.csv > b.csv; " NAIVE "--out b.csv");
    cr_expect(strstr(out, "has other columns") && !strstr(out, "migrate"), "%s", out);
    EXPECT(2, NAIVE "--out " OLD "load_5.csv");
    cr_expect(strstr(out, "has other columns") && !strstr(out, "migrate"), "%s", out);
}

/* ---- Files that do not change ---- */

Test(migrate, current_files_are_not_touched)
{
    EXPECT_PRINTS(0, "a.csv: has the current schema, load/12\n",
                  "cp " OLD "load_5.csv a.csv && " MIGRATE
                  "a.csv && touch -d 2001-01-01 a.csv && cp -p a.csv b.csv && " MIGRATE
                  "a.csv && cmp a.csv b.csv && test $(stat -c %%Y a.csv) = $(stat -c %%Y b.csv)");
    EXPECT(0, "printf 'a,b\\n1,2\\n' > other.csv && : > empty.csv && " MIGRATE "--check *.csv");
    EXPECT_OUT("other.csv: no rows of fdsl-bench; left as it is", "empty.csv: empty; left as it is");
}

/* The figures and the docs use the reference rows, so these rows must have the current schema. */
Test(migrate, the_reference_rows_are_current)
{
    shell(MIGRATE "--check $R/results/reference/*.csv");
    cr_expect(status == 0 && says("h200_monitor.csv: has the current schema") &&
                  says("h200_synth.csv: has the current schema"),
              "%d: %s", status, out);
}

Test(migrate, check_and_output_do_not_change_the_file)
{
    EXPECT(3, "cp " OLD "synth_5.csv a.csv && touch -d 2001-01-01 a.csv && " MIGRATE "--check a.csv");
    cr_expect(
        strstr(out,
               "a.csv: has rows of synth/5; convert them to synth/7 with: scripts/migrate_rows.py a.csv"),
        "%s", out);
    EXPECT_PRINTS(0, "\n0\n2\n",
                  "mkdir d && " MIGRATE "--output d a.csv && cmp a.csv " OLD
                  "synth_5.csv && ls -A d . | grep -c '\\.csv\\.'; "
                  "test $(stat -c %%Y a.csv) = $(date -d 2001-01-01 +%%s) && grep -c ^synth/7 d/a.csv");
    EXPECT_PRINTS(1, "d/a.csv exists; choose another folder", MIGRATE "--output d a.csv");
    EXPECT(0, "mkdir e && " MIGRATE "--output e d/a.csv && cmp d/a.csv e/a.csv");
    EXPECT(2, MIGRATE "--output nowhere a.csv");
    EXPECT(2, MIGRATE "--output d --check a.csv");
    EXPECT(2, MIGRATE);
    EXPECT_PRINTS(0, "Examples:", MIGRATE "--help");
}

static const struct {
    const char *make; /* prints a file; $F has two rows of load/5 */
    const char *says;
} refused[] = {
    {"head -c -1 $F", "line 3: the last row has no line end and may be incomplete; complete or delete it"},
    {"head -c -40 $F", "line 3: the last row has no line end and may be incomplete"},
    {"sed '3s/,vm,/,\"vm,/' $F", "line 3: a quote is not closed; close or remove it, or delete this row"},
    {"sed '2s/,vm,/,v\"m,/' $F", "line 2: a quote is not closed"},
    {"sed '3s/,[^,]*$//' $F", "line 3: 88 fields where the header has 89; repair or delete this row"},
    {"cat $F $F", "line 4: a second header; split the file in two there"},
    {"sed '3s,^load/5,load/4,' $F", "line 3: schema 'load/4' after rows of 'load/5'; split the file in two"},
    {"sed '1s/,gds,/,speed,/' $F",
     "line 1: unknown column 'speed' in rows of load/5, and its values would be lost"},
    {"sed '1s/,gds,/,tally,/' $F", "line 1: two columns for 'checksum'; remove one of them"},
    {"cut -d, -f-88 $F", "line 1: rows of load/5 have a column 'wrong', but this file does not"},
    {"sed 's,^load/5,load/13,' $F", "rows of load/13, newer than load/12, which this script writes"},
    {"sed 's,^load/5,read/5,' $F", "line 2: unknown schema 'read/5' (known: synth/7, load/12, train/10, "
                                   "infer/7, exchange/1, ops/1, monitor/2, steps/1"},
    {"sed 's,^load/5,load/12,' $F", "line 1: the columns are not those of load/12"},
    {"head -1 $F", "no rows after the header, so its schema is unknown; delete it"},
};

Test(migrate, bad_files_are_refused)
{
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        EXPECT(1,
               "F=" OLD "load_5.csv; { %s; } > bad.csv; cp bad.csv copy.csv; s=0; " MIGRATE
               "bad.csv || s=$?; cmp bad.csv copy.csv && test $(ls -A | wc -l) = 2 && exit $s",
               refused[i].make);
        cr_expect(strstr(out, "migrate_rows: bad.csv") == out && strstr(out, refused[i].says), "%s: %s",
                  refused[i].make, out);
        cr_expect(strchr(out, '\n') == strrchr(out, '\n'), "not one line: %s", out);
    }
    EXPECT(1, "cp " OLD "load_4.csv good.csv; " MIGRATE "bad.csv nosuch.csv good.csv");
    cr_expect(strstr(out, "nosuch.csv: no such file") && strstr(out, "good.csv: 2 rows of load/4 converted"),
              "the other files must be converted: %s", out);
}

/* ---- The file system ---- */

Test(migrate, links_are_followed)
{
    EXPECT(0, "mkdir d && cp " OLD "load_4.csv d/a.csv && ln -s d/a.csv l.csv && " MIGRATE
              "l.csv && test -L l.csv && "
              "grep -c ^load/12 d/a.csv");
}

#define AS_OTHER "%s env PATH=/usr/bin:/bin python3 migrate_rows.py "

/* If the test runs as root, it runs the script as another user, because root may write anywhere. */
Test(migrate, files_without_permission_to_write_do_not_change)
{
    const char *as = geteuid() == 0 ? "setpriv --reuid 65534 --regid 65534 --clear-groups" : "";
    if (*as && shell("%s true", as) != 0)
        cr_skip_test("no setpriv");
    if (run("%s env PATH=/usr/bin:/bin python3 -c ''", as) != 0)
        cr_skip_test("no python3 that another user can run");
    EXPECT(0, "chmod 755 . && mkdir d && cp " OLD
              "load_4.csv d/a.csv && cp d/a.csv d/b.csv && chmod 666 d/a.csv && "
              "chmod 444 d/b.csv && chmod 555 d && cp $R/scripts/migrate_rows.py . && mkdir -m 777 free");
    EXPECT(1, AS_OTHER "d/a.csv", as);
    EXPECT_OUT("d/a.csv cannot be written: Permission denied; ", "--output DIR");
    EXPECT(1, AS_OTHER "d/b.csv", as);
    cr_expect(
        strstr(out,
               "d/b.csv cannot be opened: Permission denied; write the result elsewhere with --output DIR"),
        "%s", out);
    EXPECT(0,
           "cmp d/a.csv " OLD "load_4.csv && cmp d/b.csv " OLD "load_4.csv && test $(ls -A d | wc -l) = 2");
    EXPECT(0, AS_OTHER "--output free d/a.csv d/b.csv && grep -c ^load/12 free/b.csv", as);
    EXPECT(0, "chmod 755 d");
}

Test(migrate, a_full_disk_changes_nothing)
{
    EXPECT_PRINTS(1, "a.csv cannot be written: File too large",
                  "cp " OLD "load_4.csv a.csv && (ulimit -f 1; trap '' XFSZ; python3 " MIGRATE "a.csv)");
    EXPECT(0, "cmp a.csv " OLD "load_4.csv && test $(ls -A | wc -l) = 1");
}

/* The signal arrives when the script has written its temporary file and syncs it. */
Test(migrate, an_interrupt_changes_no_file)
{
    static const char interrupted[] =
        "import os, runpy, signal, sys\n"
        "number = signal.Signals[sys.argv.pop(1)]\n"
        "os.fsync = lambda handle: os.kill(os.getpid(), number)\n"
        "runpy.run_path(os.environ['R'] + '/scripts/migrate_rows.py', run_name='__main__')\n";
    put("interrupted.py", interrupted, sizeof interrupted - 1);
    static const struct {
        const char *name;
        int status;
    } signals[] = {{"SIGINT", 130}, {"SIGTERM", 143}, {"SIGHUP", 129}};
    for (size_t i = 0; i < COUNT_OF(signals); i++) {
        EXPECT_EXACTLY(signals[i].status,
                       "migrate_rows: interrupted; each file is either converted or unchanged: run the "
                       "command again for the rest\n",
                       "cp " OLD "load_4.csv a.csv; python3 interrupted.py %s a.csv", signals[i].name);
        EXPECT(0, "cmp a.csv " OLD "load_4.csv && test $(ls -A | wc -l) = 2");
    }
}

Test(migrate, waits_for_the_lock)
{
    EXPECT_PRINTS(1, "a.csv: another process has had it locked for 0.1 s; wait until that process ends",
                  "cp " OLD "load_4.csv a.csv && flock a.csv " MIGRATE "--lock-timeout 0.1 a.csv");
    EXPECT(0, "{ flock a.csv sleep 1 & } && sleep 0.3; " MIGRATE "a.csv; wait; grep -c ^load/12 a.csv");
}

Test(migrate, a_kept_file_is_not_overwritten)
{
    EXPECT_PRINTS(1, "the old file would be kept as a.csv.synth-5, which exists; move that file away",
                  "cp " OLD "synth_5.csv a.csv && echo other > a.csv.synth-5 && " MIGRATE "a.csv");
    EXPECT(0, "cmp a.csv " OLD "synth_5.csv && cp a.csv a.csv.synth-5 && " MIGRATE
              "a.csv && cmp a.csv.synth-5 " OLD "synth_5.csv");
}
