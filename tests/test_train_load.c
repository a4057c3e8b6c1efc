/* Tests training on samples that are read while it runs: --feed load. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "cpu_engines.h"
#include "data/set_stream.h"
#include "must.h"
#include "same_state.h"
#include "train/feed.h"
#include "train/host_engine.h"
#include "train/trainer.h"
#include "train_support.h"

#include "shell.h" /* included last, because its `out` and `status` would shadow names in other headers */

#include "cells.h"

TestSuite(train_load, .init = shell_set_up, .fini = shell_tear_down, .timeout = 120);

#if defined HAVE_PNG && defined HAVE_XXHASH

/* Training on the folder f takes milliseconds. 108 samples are trained on. */
#define STREAM "--model logreg --feed load --batch 16 --format csv "
#define LOAD   STREAM "--data f --lanes 4 --shuffle 40 "

#ifdef _OPENMP
#define ENGINE "train-omp"
#else
#define ENGINE "train-naive"
#endif

/* Writes 120 digits as class folders (f) and as 1 and 3 shards (m1, m3), all in the same order. */
static void prepare(void)
{
    EXPECT(0,
           "$P --prepare all --from digits --samples 120 --store imagefolder && mkdir f && cp -r all/*/ f && "
           "$P --prepare m1 --from dataset --source f --shards 1 --name s && "
           "$P --prepare m3 --from dataset --source f --shards 3 --name s");
}

/* ---- Bits ---- */

/* Copies the columns that depend on the results of these epochs. */
static void copy_results_of(size_t epochs, char *text, size_t size)
{
    static const char *const columns[] = {"train_loss", "train_acc", "test_loss", "test_acc", "items"};
    *text = '\0';
    for (size_t epoch = 1; epoch <= epochs; epoch++)
        for (size_t c = 0; c < COUNT_OF(columns); c++) {
            strncat(text, value(out, epoch, columns[c]), size - strlen(text) - 2);
            strcat(text, " ");
        }
}

static void copy_results(char *text, size_t size)
{
    copy_results_of(3, text, size);
}

Test(train_load, threads_and_storage_do_not_change_a_bit)
{
    static const char *const names[] = {"f", "m1", "m3"};
    char wanted[512] = "", found[512];
    prepare();
    for (size_t n = 0; n < COUNT_OF(names); n++)
        for (int threads = 1; threads <= 3; threads++) {
            EXPECT(0,
                   "$P --variant " ENGINE " " STREAM
                   "--data %s --test-data f --threads %d --epochs 3 --flip --shift 1 "
                   "--mixup 0.5 --export now && tail -c 31400 now > values && cp -n values first && "
                   "cmp values first",
                   names[n], threads);
            copy_results(found, sizeof found);
            if (!*wanted)
                strcpy(wanted, found);
            cr_expect_str_eq(found, wanted, "%s, %d threads", names[n], threads);
            cr_expect_str_eq(value(out, 1, "masked"), "0");
            cr_expect_gt(atof(value(out, 1, "read_bytes_per_s")), 0);
        }
}

/* Files in memory change no bit, and fewer bytes are read. */
Test(train_load, files_that_stay_in_memory_do_not_change_a_bit)
{
    static const char *const sizes[] = {"none", "1", "20K", "all"}, *const names[] = {"f", "m3"};
    char wanted[512] = "", found[512];
    prepare();
    for (size_t n = 0; n < COUNT_OF(names); n++) {
        double before = INFINITY;
        for (size_t s = 0; s < COUNT_OF(sizes); s++) {
            EXPECT(0,
                   "$P --variant " ENGINE " " STREAM
                   "--data %s --test-data f --threads 2 --prefetch 1 --epochs 3 --flip --resident-bytes %s "
                   "--export now && tail -c 31400 now > values && cp -n values first && cmp values first",
                   names[n], sizes[s]);
            copy_results(found, sizeof found);
            if (!*wanted)
                strcpy(wanted, found);
            cr_expect_str_eq(found, wanted, "%s, %s", names[n], sizes[s]);
            const double kept = atof(value(out, 3, "resident_samples"));
            cr_expect(s < 2    ? kept == 0
                      : s == 2 ? kept > 0 && kept < 120
                               : kept == 120,
                      "%s: %g", sizes[s], kept);
            const double read =
                atof(value(out, 3, "read_bytes_per_s")) * atof(value(out, 3, "time_median_s"));
            cr_expect(s < 2 || read < before, "%s: %g bytes", sizes[s], read);
            cr_expect(s < 3 || read == 0, "%g bytes", read);
            before = read;
            const char *given = value(out, 3, "resident_bytes");
            cr_expect(s == 0   ? !*given
                      : s == 1 ? strcmp(given, "1") == 0
                      : s == 2 ? strcmp(given, "20480") == 0
                               : atof(given) > 20480,
                      "%s: %s", sizes[s], given);
        }
    }
}

/* One request in ten fails, so some are repeated. */
Test(train_load, shards_behind_a_faulty_server_give_the_same_results)
{
    char wanted[512], found[512];
    prepare();
    EXPECT(0, "$P --variant " ENGINE " " STREAM "--data m3 --test-data f --epochs 3 --export near && "
              "tail -c 31400 near >values");
    copy_results(wanted, sizeof wanted);
    for (int cached = 0; cached < 2; cached++) {
        run("rm -f gate port; mkfifo gate && (python3 %s/tests/remote_server.py . <gate >port 2>/dev/null "
            "&); "
            "exec 9>gate; while [ ! -s port ]; do sleep 0.05; done; "
            "$P --variant " ENGINE " " STREAM
            "--data http://127.0.0.1:$(cut -d' ' -f1 port)/faulty/m3/s.index "
            "--test-data f --epochs 3 --threads 3 --export far %s; status=$?; exec 9>&-; "
            "[ $status = 0 ] && tail -c 31400 far | cmp - values >&2 || exit $((status + 1))",
            root, cached ? "--cache-dir cache --cache-bytes 1G" : "");
        if (status != 0 && strstr(out, "libcurl"))
            cr_skip_test("this build has no libcurl");
        cr_assert_eq(status, 0, "%s", out);
        copy_results(found, sizeof found);
        cr_expect_str_eq(found, wanted, "%s", out);
    }
}

/* A set that is read in whole shards, and does not fit, would be downloaded again for each block of samples.
 */
Test(train_load, a_set_at_a_url_must_fit_into_memory_or_cache)
{
    char url[128], test[PATH_MAX], cache[PATH_MAX];
    int port = 0;
    prepare();
    EXPECT(0, "cp -r f test && mkfifo gate");
    snprintf(url, sizeof url, "%s/gate", folder);
    const int gate = open(url, O_RDWR | O_CLOEXEC); /* the server ends when it is closed */
    cr_assert_geq(gate, 0);
    EXPECT(0, "(python3 %s/tests/remote_server.py . >port 2>/dev/null <gate &)", root);
    EXPECT(0, "while [ ! -s port ]; do sleep 0.05; done; cat port");
    cr_assert_eq(sscanf(out, "%d", &port), 1);
    setenv("no_proxy", "127.0.0.1", 1);
    snprintf(test, sizeof test, "%s/test", folder);
    snprintf(cache, sizeof cache, "%s/cache", folder);
    EXPECT(0, "cat m3/*.tar | wc -c");
    const uint64_t bytes = (uint64_t)atoll(out);
    for (int i = 0; i < 5; i++) {
        const bool cached = i == 2 || i == 3, fits = i % 2 || i == 4;
        struct data data;
        snprintf(url, sizeof url, "http://127.0.0.1:%d/%s/m3/s.index", port, i == 4 ? "web" : "norange");
        const struct data_request request = {.name = url,
                                             .test_name = test,
                                             .batch = 10,
                                             .feed = DATA_LOAD,
                                             .lanes = 3,
                                             .shuffle = 60,
                                             .ahead = 2,
                                             .cache_dir = cached ? cache : NULL,
                                             .cache_bytes = cached ? bytes - !fits : 0,
                                             .shard_bytes = cached || i == 4 ? 1 : bytes - !fits,
                                             .resources = {.threads = 2}};
        const enum status result = data_open(&request, &data);
        if (result == STATUS_UNAVAILABLE)
            cr_skip_test("this build has no libcurl");
        cr_expect_eq(result, fits ? STATUS_OK : STATUS_USAGE, "%d: %s", i, status_text());
        cr_expect(fits || strstr(status_text(), cached ? "--cache-bytes" : "--cache-dir"), "%s",
                  status_text());
        data_close(&data);
    }
    close(gate);
}

/* A step of all samples has the same samples with both feeds, in another order. */
Test(train_load, a_step_of_all_samples_is_that_of_stored_samples)
{
    static const char *const fits[] = {"", "--out-res 20 --channels 1",
                                       "--out-res 20 --fit random-resized-crop --flip --test-data f"};
    prepare();
    for (size_t i = 0; i < COUNT_OF(fits); i++) {
        double losses[2];
        for (int load = 0; load < 2; load++) {
            EXPECT(
                0,
                "$P --variant train-naive --model logreg --data f --batch 1000 --format csv --epochs 3 %s %s",
                fits[i], load ? "--feed load" : "--feed stored --mean 0.1 --std 0.3");
            losses[load] = atof(value(out, 3, "train_loss"));
        }
        /* Canvases and streams measure other samples for the normalisation. */
        EXPECT(0,
               "$P --variant train-naive --model logreg --data f --batch 1000 --format csv --epochs 3 %s "
               "--feed load --mean 0.1 --std 0.3",
               fits[i]);
        losses[1] = atof(value(out, 3, "train_loss"));
        cr_expect(losses[0] > 0 && fabs(losses[1] - losses[0]) < 1e-5 * losses[0], "%s: %.9g and %.9g",
                  fits[i], losses[0], losses[1]);
    }
    /* With few samples, scale and offset come from all of them. */
    EXPECT(
        0,
        "$P --variant train-naive --model logreg --data f --batch 1000 --format csv --epochs 1 --feed stored "
        "--checkpoint a >one && $P --variant train-naive --model logreg --data f --batch 1000 --format csv "
        "--epochs 1 --feed load --checkpoint b");
    char one[PATH_MAX], other[PATH_MAX];
    struct checkpoint stored, load;
    snprintf(one, sizeof one, "%s/a/epoch-000001.ckpt", folder);
    snprintf(other, sizeof other, "%s/b/epoch-000001.ckpt", folder);
    must(checkpoint_read(one, &stored));
    must(checkpoint_read(other, &load));
    cr_expect(stored.scale[0] == load.scale[0] && stored.offset[0] == load.offset[0]);
    checkpoint_free(&stored);
    checkpoint_free(&load);
}

/* Returns the largest resident memory of a training run, in KiB. */
static int peak_of(int epochs)
{
    EXPECT(0,
           "python3 -c 'import subprocess, resource, sys; subprocess.run(sys.argv[1:], check=True, "
           "stdout=subprocess.DEVNULL); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)' "
           "$P --variant " ENGINE " " LOAD "--threads 2 --epochs %d 2>says",
           epochs);
    return atoi(out);
}

#ifndef __SANITIZE_ADDRESS__ /* a sanitizer keeps freed memory */
Test(train_load, memory_does_not_grow_with_epochs)
{
    prepare();
    const int one = peak_of(20), two = peak_of(20), few = one > two ? one : two;
    int many = peak_of(120);
    if (many > few + few / 100) /* pages of the program itself come and go */
        many = peak_of(120);
    cr_expect(few > 0 && many <= few + few / 100, "%d KiB, after 100 more epochs %d KiB", few, many);
}
#endif

/* ---- Resuming ---- */

/* What stays in memory does not belong to the run. */
Test(train_load, a_run_resumes_at_any_step_with_the_same_bits)
{
    static const char *const kept[] = {"", "--resident-bytes 20K", "--resident-bytes all"};
    char wanted[PATH_MAX], found[PATH_MAX];
    prepare();
    EXPECT(0, "$P --variant " ENGINE " " LOAD "--epochs 2 --checkpoint whole --checkpoint-steps 3 --keep 100 "
              "--ema 0.9 --resident-bytes 9K && ls whole");
    snprintf(wanted, sizeof wanted, "%s/whole/epoch-000002.ckpt", folder);
    snprintf(found, sizeof found, "%s/part/epoch-000002.ckpt", folder);
    EXPECT(0, "ls whole | grep -c step");
    cr_expect_gt(atoi(out), 2);
    EXPECT(0, "ls whole | grep -v epoch-000002.ckpt > names");
    for (int i = 1; run("[ $(wc -l <names) -ge %d ]", i) == 0; i++) {
        EXPECT(0,
               "rm -rf part && mkdir part && cp whole/$(sed -n %dp names) part && $P --variant " ENGINE
               " " LOAD
               "--epochs 2 --checkpoint part --checkpoint-steps 3 --keep 100 --ema 0.9 --resume --threads %d "
               "--prefetch %d %s",
               i, 1 + i % 3, 1 + i % 4, kept[i % 3]);
        expect_same_state(wanted, found, true);
    }
}

Test(train_load, other_samples_or_another_order_are_refused)
{
    static const struct {
        const char *options, *words;
    } cases[] = {{"--data f --shuffle 40 --lanes 3", "lanes=4 in the checkpoint, 3 now"},
                 {"--data f --lanes 4 --shuffle 41", "shuffle=40 in the checkpoint, 41 now"},
                 {"--data f --lanes 4 --shuffle 40 --on-error mask", "on-error"},
                 {"--data f --lanes 4 --shuffle 40 --out-res 28 --channels 1", "out-res"},
                 {"--data m1 --lanes 4 --shuffle 40", "belong to other samples"}};
    prepare();
    EXPECT(0, "cp -r f test && $P --variant train-naive " LOAD "--test-data test --epochs 1 --checkpoint k");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        run("$P --variant train-naive " STREAM "--test-data test --epochs 2 --checkpoint k --resume %s",
            cases[i].options);
        cr_expect(status == 2 && says(cases[i].words), "%s: %s", cases[i].options, out);
    }
    run("$P --variant train-naive --model logreg --data f --test-data test --batch 16 --format csv --epochs "
        "2 "
        "--checkpoint k --resume");
    expect_line(2, "feed=load in the checkpoint, none now; give --feed load");
    EXPECT(0, "$P --variant train-naive --model logreg --data f --test-data test --batch 16 --epochs 1 "
              "--checkpoint s");
    run("$P --variant train-naive " LOAD
        "--test-data test --epochs 2 --on-error mask --checkpoint s --resume");
    expect_line(2, "no feed in the checkpoint, load now; drop --feed");
    EXPECT(0, "cp $(ls f/0004/*.png | head -1) $(ls f/0003/*.png | head -1)");
    run("$P --variant train-naive " LOAD "--test-data test --epochs 2 --checkpoint k --resume");
    cr_expect(status == 2 && says("the samples of --data f have changed"), "%s", out);
}

/* ---- Broken samples ---- */

Test(train_load, a_broken_sample_is_masked_or_ends_the_run)
{
    prepare();
    /* with --test-data, all samples of f are trained on */
    EXPECT(0, "cp -r f test && for d in f/0002 f/0007; do f=$(ls $d/*.png | head -1); "
              "dd if=/dev/zero of=$f bs=1 seek=60 count=100 conv=notrunc; done");
    run("$P --variant train-naive " LOAD "--test-data test --epochs 2");
    expect_line(1, "--on-error mask gives such samples weight 0");
    EXPECT(0, "$P --variant " ENGINE " " LOAD "--test-data test --epochs 2 --on-error mask --verify "
              "--verify-steps 4 2>says");
    for (size_t epoch = 1; epoch <= 2; epoch++) {
        cr_expect_str_eq(value(out, epoch, "masked"), "2");
        cr_expect_str_eq(value(out, epoch, "wrong"), "0");
        cr_expect_str_eq(value(out, epoch, "items"), "120");
    }
    /* A warning names up to three of them, in the order of the step. */
    EXPECT(0, "for d in f/0003 f/0005 f/0006; do f=$(ls $d/*.png | head -1); "
              "dd if=/dev/zero of=$f bs=1 seek=60 count=100 conv=notrunc; done");
    EXPECT(0, "$P --variant train-naive --model logreg --feed load --data f --test-data test --batch 120 "
              "--shuffle 0 --epochs 1 --on-error mask --dry-run --save-batch 1:one 2>&1");
    cr_expect(says("5 broken samples of epoch 1, step 1 masked: '0002/") && says("', '0003/") &&
                  says("', '0005/") && says("' and 2 more; the first: f/0002/"),
              "%s", out);
    EXPECT(0, "for f in f/*/*.png; do dd if=/dev/zero of=$f bs=1 seek=60 count=100 conv=notrunc; done");
    run("$P --variant train-naive " LOAD "--test-data test --epochs 2 --on-error mask");
    expect_line(1, "none of 120 training samples has an image and a label that can be read");
}

/* Masked samples count as seen, also in a step that has no other sample. */
Test(train_load, masked_samples_are_logged_as_seen)
{
    prepare();
    EXPECT(0, "cp -r f test && f=$(ls f/0002/*.png | head -1) && "
              "dd if=/dev/zero of=$f bs=1 seek=60 count=100 conv=notrunc");
    EXPECT(0, "$P --variant " ENGINE
              " --model logreg --feed load --data f --test-data test --batch 1 --epochs 2 "
              "--on-error mask --log log.csv --log-steps 1 2>&1");
    cr_expect(says("epoch 1: 1 broken training sample was masked") &&
                  says("epoch 2: 1 broken training sample was masked"),
              "%s", out);
    EXPECT(0, "cat log.csv");
    size_t masked = 0;
    for (size_t row = 1; row <= 240; row++) {
        cr_expect_eq(atoi(value(out, row, "samples_seen")), (int)row);
        cr_expect_gt(atof(value(out, row, "items_per_s")), 0);
        masked += *value(out, row, "loss") == '\0';
    }
    cr_expect_eq(masked, 2);
}

/* Sample 4 of the shard gets a broken label, or loses its label or its image. */
Test(train_load, a_sample_without_a_label_or_an_image_is_masked)
{
    static const char *const faults[] = {"echo xx >000004.cls", "echo -3 >000004.cls", "rm 000004.cls",
                                         "rm 000004.png", "echo xx >000000.cls"};
    prepare();
    for (size_t i = 0; i < COUNT_OF(faults); i++) {
        EXPECT(0,
               "rm -rf x u && mkdir x u && tar xf m1/*.tar -C x && (cd x && %s && tar cf ../u/s.tar "
               "--sort=name .)",
               faults[i]);
        run("$P --variant train-naive " STREAM "--data u --test-data f --epochs 1");
        cr_expect(status == 1 && says("--on-error mask gives such samples weight 0"), "%s: %s", faults[i],
                  out);
        EXPECT(0, "$P --variant " ENGINE " " STREAM
                  "--data u --test-data f --epochs 2 --on-error mask --mixup 0.5 --verify --verify-steps 4 "
                  "2>says");
        for (size_t epoch = 1; epoch <= 2; epoch++) {
            cr_expect_str_eq(value(out, epoch, "masked"), "1", "%s", faults[i]);
            cr_expect_str_eq(value(out, epoch, "wrong"), "0", "%s", faults[i]);
            cr_expect_str_eq(value(out, epoch, "items"), "120");
            cr_expect_str_eq(value(out, epoch, "train_samples"), "120");
        }
        EXPECT(0, "cat says");
        cr_expect_eq(says("has no label that can be read, and is masked"), i != 3, "%s: %s", faults[i], out);
        /* A test sample is omitted. */
        EXPECT(0,
               "$P --variant " ENGINE " " STREAM "--data f --test-data u --epochs 1 --on-error mask 2>says");
        cr_expect_str_eq(value(out, 1, "test_samples"), "119", "%s", faults[i]);
    }
    /* Without --test-data, the sample is trained on. */
    EXPECT(0, "$P --variant " ENGINE " " STREAM "--data u --epochs 1 --on-error mask 2>says");
    cr_expect_str_eq(value(out, 1, "masked"), "1");
}

/* Opens the training data of a folder, with the test set in the folder `test`. */
static void open_data(enum data_feed feed, bool mask, const struct image_fit *fit, struct data *data)
{
    char train[PATH_MAX], test[PATH_MAX];
    snprintf(train, sizeof train, "%s/f", folder);
    snprintf(test, sizeof test, "%s/test", folder);
    const struct data_request request = {.name = train,
                                         .test_name = test,
                                         .fit = fit ? *fit : (struct image_fit){0},
                                         .batch = 120,
                                         .feed = (int)feed,
                                         .mask = mask,
                                         .lanes = 3,
                                         .shuffle = 60,
                                         .ahead = 2,
                                         .resources = {.threads = 2}};
    must(data_open(&request, data));
    data_normalise(data, false);
}

/* Computes the gradients of a step, and its totals. */
static void gradients_of(const struct engine *engine, const struct train *train, float *gradients,
                         struct train_totals *totals)
{
    struct train_state state;
    void *engine_state = NULL;
    cr_assert(train_state_new(train->model->arena_values, &state));
    model_initialise(train->model, 3, state.parameters);
    must(engine->open(train, &(struct resources){.threads = 2}, &engine_state));
    must(engine->set(engine_state, &state));
    must(engine->steps(engine_state, 0, 0, 1));
    must(engine->totals(engine_state, totals));
    must(engine->gradients(engine_state, gradients));
    engine->close(engine_state);
    train_state_free(&state);
}

#define BROKEN 50 /* number of the broken sample */

static void break_sample(void)
{
    EXPECT(0,
           "f=$(ls f/*/*.png | sed -n %dp) && cp $f kept && echo $f >name && "
           "dd if=/dev/zero of=$f bs=1 seek=60 count=100 conv=notrunc",
           BROKEN + 1);
}

static void mend_sample(void)
{
    EXPECT(0, "mv kept $(cat name)");
}

/* The gradients are those of stored samples of which one has the label DATA_MASKED, whatever its pixels. */
static void expect_masked_gradients(const struct engine *engine, enum loss_kind loss)
{
    struct data stored, load;
    struct model model;
    struct train_totals want, have;
    open_data(DATA_STORED, false, NULL, &stored);
    must(model_build(table_of("lenet"), stored.shape, stored.classes, &model));
    struct train train = {.model = &model,
                          .data = &stored,
                          .seed = 5,
                          .batch = 120,
                          .optimizer = {.kind = OPTIMIZER_SGD},
                          .schedule = {.rate = 0.01},
                          .loss = loss,
                          .smoothing = 0.1f};
    FREED float *wanted = malloc(3 * model.arena_values * sizeof *wanted);
    float *found = wanted + model.arena_values, *whole = found + model.arena_values;
    gradients_of(engine, &train, whole, &want);
    stored.sets[DATA_TRAIN].labels[50] = DATA_MASKED;
    gradients_of(engine, &train, wanted, &want);
    cr_expect_eq(want.samples, 119);
    break_sample();
    open_data(DATA_LOAD, true, NULL, &load);
    train.data = &load;
    gradients_of(engine, &train, found, &have);
    mend_sample();
    cr_expect(have.samples == 119 && have.masked == 1 && want.masked == 0, "%zu samples",
              (size_t)have.samples);
    cr_expect_lt(relative_error(found, wanted, model.arena_values), 1e-5);
    cr_expect_lt(fabs(have.loss - want.loss), 1e-5 * want.loss);
    cr_expect_gt(relative_error(whole, wanted, model.arena_values), 1e-3);
    cr_expect(isfinite(have.loss) && have.loss > 0);
    data_close(&stored);
    data_close(&load);
}

Test(train_load, a_masked_sample_has_no_loss_and_no_gradient)
{
    prepare();
    EXPECT(0, "cp -r f test");
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++) {
        expect_masked_gradients(cpu_engines[e], LOSS_CROSS_ENTROPY);
        expect_masked_gradients(cpu_engines[e], LOSS_BINARY);
    }
}

/* The 120 samples of a step of MixUp, in the order of the files: sample j is mixed with sample 119 - j. */
struct mixed {
    const struct data *stored;
    const struct model *model;
    const float *parameters;
    double share; /* of the first sample in each mixture */
};

/* Adds the gradient of mixture `j` to `gradients`, computed in double from the definition of the loss.
 * Returns the loss. */
static double add_mixture(const struct mixed *mixed, uint32_t j, float *gradients)
{
    const struct layer *layer = &mixed->model->layers[0];
    const uint32_t parts[2] = {j, 119 - j}, classes = mixed->model->classes,
                   values = (uint32_t)layer->in_values;
    const double shares[2] = {mixed->share, 1 - mixed->share};
    double x[784] = {0}, p[10], targets[10] = {0}, sum = 0, weight = 0, loss = 0;
    for (int i = 0; i < 2; i++) {
        const uint8_t *pixels = data_sample(mixed->stored, DATA_TRAIN, parts[i]);
        const uint32_t label = mixed->stored->sets[DATA_TRAIN].labels[parts[i]];
        if (parts[i] == BROKEN) /* zeros of weight 0 */
            continue;
        weight += shares[i];
        for (uint32_t v = 0; v < values; v++)
            x[v] += shares[i] * pixels[v] / 255;
        for (uint32_t k = 0; k < classes; k++)
            targets[k] += shares[i] * (0.1 / classes + (k == label ? 0.9 : 0));
    }
    for (uint32_t k = 0; k < classes; k++) {
        p[k] = mixed->parameters[layer->bias + k];
        for (uint32_t v = 0; v < values; v++)
            p[k] += mixed->parameters[layer->weight + k * values + v] * x[v];
        sum += p[k] = exp(p[k]);
    }
    for (uint32_t k = 0; k < classes; k++) {
        const double delta = (weight * p[k] / sum - targets[k]) / 120;
        loss -= targets[k] * log(p[k] / sum);
        gradients[layer->bias + k] += (float)delta;
        for (uint32_t v = 0; v < values; v++)
            gradients[layer->weight + k * values + v] += (float)(delta * x[v]);
    }
    return loss;
}

/* In the mixtures of a masked sample, the other sample keeps its share, and the masked sample adds zeros. */
Test(train_load, a_masked_sample_of_mixup_has_weight_0)
{
    struct data stored, load;
    struct model model;
    struct train_state state;
    prepare();
    EXPECT(0, "cp -r f test");
    open_data(DATA_STORED, false, NULL, &stored);
    break_sample();
    open_data(DATA_LOAD, true, NULL, &load);
    load.lanes = 1;
    load.shuffle = 0;
    must(model_build(table_of("logreg"), stored.shape, stored.classes, &model));
    const struct train train = {.model = &model,
                                .data = &load,
                                .seed = 5,
                                .batch = 120,
                                .optimizer = {.kind = OPTIMIZER_SGD},
                                .schedule = {.rate = 0.01},
                                .loss = LOSS_CROSS_ENTROPY,
                                .smoothing = 0.1f,
                                .mixing = {.mixup = 1}};
    cr_assert(train_state_new(model.arena_values, &state));
    model_initialise(&model, 3, state.parameters); /* as gradients_of() does */
    FREED float *wanted = calloc(2 * model.arena_values, sizeof *wanted);
    float *found = wanted + model.arena_values;
    const struct mixed mixed = {&stored, &model, state.parameters, (double)train_mix(&train, 0, 0).share};
    double loss = 0;
    cr_assert(mixed.share > 0.05 && mixed.share < 0.95, "%g", mixed.share);
    for (uint32_t j = 0; j < 120; j++)
        loss += add_mixture(&mixed, j, wanted);
    for (size_t e = 0; e < COUNT_OF(cpu_engines); e++) {
        struct train_totals totals;
        gradients_of(cpu_engines[e], &train, found, &totals);
        cr_expect(totals.samples == 119 && totals.masked == 1);
        cr_expect_lt(relative_error(found, wanted, model.arena_values), 1e-5, "%s", cpu_engines[e]->name);
        cr_expect_lt(fabs(totals.loss - loss), 1e-5 * loss, "%s: %.9g and %.9g", cpu_engines[e]->name,
                     totals.loss, loss);
    }
    train_state_free(&state);
    data_close(&stored);
    data_close(&load);
}

/* A part of a mixture that is masked has weight 0; the loss of the other part remains. */
Test(train_load, the_loss_of_a_mixture_is_the_sum_of_its_parts)
{
    const float logits[3] = {0.5f, -1, 2};
    struct model model = {.classes = 3};
    uint32_t rows[] = {1, 3, 6};
    for (int kind = 0; kind < 3; kind++) { /* the last one: multi-hot labels */
        const struct data data = {.sets[DATA_TRAIN].multi_hot = kind == 2 ? rows : NULL};
        const struct train train = {.model = &model,
                                    .data = &data,
                                    .loss = kind ? LOSS_BINARY : LOSS_CROSS_ENTROPY,
                                    .smoothing = 0.2f};
        float delta[4][3], loss[4];
        const struct target targets[] = {{0, 2, 0.25f},
                                         {0, DATA_MASKED, 0.25f},
                                         {DATA_MASKED, 2, 0.25f},
                                         {DATA_MASKED, DATA_MASKED, 0.25f}};
        for (size_t i = 0; i < COUNT_OF(targets); i++)
            loss[i] = sample_loss(&train, logits, &targets[i], 4, delta[i]);
        cr_expect_lt(fabsf(loss[0] - loss[1] - loss[2]), 1e-6f);
        cr_expect(loss[1] > 0 && loss[2] > 0 && loss[3] == 0);
        for (int k = 0; k < 3; k++) {
            cr_expect_lt(fabsf(delta[0][k] - delta[1][k] - delta[2][k]), 1e-6f);
            cr_expect_eq(delta[3][k], 0);
        }
    }
}

/* ---- The stream of a rank ---- */

static void open_stream(const struct train *train, struct feed_stream *feed)
{
    must(feed_stream_open(train, 2, 1, DECODER_CPU, NULL, NULL, feed));
}

/* Takes a step, and returns its batch. */
static struct stream_batch take(struct feed_stream *feed, uint32_t epoch, uint32_t step)
{
    const struct draw_order order = train_order(feed->train, epoch);
    uint32_t numbers[256];
    struct stream_batch batch;
    const uint32_t count = train_batch(feed->train, &order, step, numbers);
    must(feed_stream_next(feed, epoch, step, numbers, train_generated(feed->train, count), &batch));
    return batch;
}

/* Every rank has its own stream. Together, they deliver each sample once. */
Test(train_load, ranks_read_each_sample_once)
{
    struct data data;
    struct model model = {.classes = 10};
    prepare();
    EXPECT(0, "cp -r f test");
    open_data(DATA_LOAD, false, NULL, &data);
    for (uint32_t ranks = 1; ranks <= 5; ranks++) {
        uint64_t sum = 0, wanted = 0;
        uint32_t seen[120] = {0};
        for (uint32_t n = 0; n < 120; n++)
            wanted += data_read_hash(&data, 0, n);
        for (uint32_t rank = 0; rank < ranks; rank++) {
            const struct train train = {
                .model = &model, .data = &data, .seed = 9, .batch = 35, .rank = rank, .ranks = ranks};
            struct train_totals totals = {0};
            struct feed_stream feed;
            open_stream(&train, &feed);
            for (uint32_t step = 0; step < 4; step++) {
                struct stream_batch batch = take(&feed, 3, step);
                for (uint32_t j = 0; j < batch.samples.count; j++) {
                    seen[batch.numbers[j]]++;
                    cr_expect_eq(batch.samples.labels[j],
                                 (int32_t)data.sets[DATA_TRAIN].labels[batch.numbers[j]]);
                }
                must(stream_release(feed.stream, &batch, NULL));
            }
            feed_stream_totals(&feed, &totals);
            sum += totals.delivered;
            feed_stream_close(&feed);
        }
        cr_expect_eq(sum, wanted, "%u ranks", ranks);
        for (uint32_t n = 0; n < 120; n++)
            cr_expect_eq(seen[n], 1, "%u ranks: sample %u: %u times", ranks, n, seen[n]);
    }
    data_close(&data);
}

/* Another list of numbers would pair images with the labels of other samples. */
Test(train_load, a_batch_of_other_samples_is_refused)
{
    struct data data;
    struct model model = {.classes = 10};
    uint32_t numbers[16];
    struct feed_stream feed;
    struct stream_batch batch;
    prepare();
    EXPECT(0, "cp -r f test");
    open_data(DATA_LOAD, false, NULL, &data);
    const struct train train = {.model = &model, .data = &data, .seed = 9, .batch = 16};
    const struct draw_order order = train_order(&train, 0);
    open_stream(&train, &feed);
    train_batch(&train, &order, 0, numbers);
    numbers[3] ^= 1;
    cr_expect_eq(feed_stream_next(&feed, 0, 0, numbers, 16, &batch), STATUS_FAILED);
    numbers[3] ^= 1;
    cr_expect_eq(feed_stream_next(&feed, 0, 0, numbers, 15, &batch), STATUS_FAILED);
    must(feed_stream_next(&feed, 0, 0, numbers, 16, &batch));
    feed_stream_close(&feed);
    data_close(&data);
}

/* The crops of an epoch are those of stored samples, whose canvases are images of the same size. */
Test(train_load, random_crops_differ_between_epochs_and_copies)
{
    const struct image_fit fit = {.how = FIT_RANDOM_RESIZED_CROP, .res = 12, .channels = 1};
    struct data load, stored;
    struct model model = {.classes = 10};
    struct feed_stream feed;
    prepare();
    EXPECT(0, "cp -r f test");
    open_data(DATA_LOAD, false, &fit, &load);
    open_data(DATA_STORED, false, &fit, &stored);
    cr_assert(load.canvas_bytes == 0 && load.sample_bytes == 144 && stored.canvas_bytes == 28 * 28);
    struct train train = {
        .model = &model, .data = &load, .seed = 9, .batch = 120, .augment = {.crop = true, .repeats = 2}};
    struct augment_scratch scratch = {0};
    struct augment_plan plan;
    train.data = &stored;
    must(augment_plan(&train, &plan));
    must(augment_scratch_open(&plan, &scratch));
    train.data = &load;
    train.augment.crop = false;
    open_stream(&train, &feed);
    uint8_t image[144], first[144];
    for (uint32_t epoch = 0; epoch < 2; epoch++) {
        struct stream_batch batch = take(&feed, epoch, 0);
        bool differs = false;
        for (uint32_t j = 0; j < batch.samples.count; j++) {
            const uint8_t *values = (const uint8_t *)batch.samples.values + j * batch.samples.stride;
            const uint32_t number = batch.numbers[j];
            augment_image(&plan, data_sample(&stored, DATA_TRAIN, number % 120), epoch, number, &scratch,
                          image);
            cr_expect_arr_eq(values, image, 144, "epoch %u, sample %u", epoch, number);
            augment_image(&plan, data_sample(&stored, DATA_TRAIN, number % 120), 1 - epoch, number % 120,
                          &scratch, first);
            differs |= memcmp(first, values, 144) != 0;
        }
        cr_expect(differs);
        must(stream_release(feed.stream, &batch, NULL));
    }
    feed_stream_close(&feed);
    augment_scratch_close(&scratch);
    data_close(&load);
    data_close(&stored);
}

/* ---- Faults ---- */

Test(train_load, a_set_that_changes_while_it_is_read_ends_training)
{
    struct data data;
    struct model model;
    struct train_state state;
    void *engine_state = NULL;
    prepare();
    EXPECT(0, "cp -r f test");
    open_data(DATA_LOAD, true, NULL, &data);
    must(model_build(table_of("logreg"), data.shape, data.classes, &model));
    const struct train train = {.model = &model, .data = &data, .seed = 5, .batch = 10};
    cr_assert(train_state_new(model.arena_values, &state));
    must(engine_naive.open(&train, &(struct resources){.threads = 2}, &engine_state));
    must(engine_naive.set(engine_state, &state));
    must(engine_naive.steps(engine_state, 0, 0, 2));
    EXPECT(0, "for f in f/*/*.png; do printf x >>$f; done");
    cr_expect_eq(engine_naive.steps(engine_state, 0, 2, 10), STATUS_FAILED);
    cr_expect(strstr(status_text(), "/f/"), "%s", status_text());
    engine_naive.close(engine_state);
    train_state_free(&state);
    data_close(&data);
}

Test(train_load, what_does_not_go_together_is_refused)
{
    static const struct {
        const char *options, *words;
    } cases[] = {
        {"--feed load --data digits", "--data digits has generated samples; use --feed stored"},
        {"--feed load --data synth", "--data synth has generated samples; use --feed live"},
        {"--data f --feed load --on-error skip", "use --on-error mask"},
        {"--data f --feed stored --on-error mask", "--on-error mask is for --feed load"},
        {"--data f --feed stored --lanes 3", "--lanes needs --feed load"},
        {"--data f --feed stored --shuffle 3", "--shuffle needs --feed load"},
        {"--data f --feed stored --prefetch 3", "--prefetch needs --feed load"},
        {"--data f --feed stored --resident-bytes 3", "--resident-bytes needs --feed load"},
        {"--data f --feed load --resident-bytes 0", "--resident-bytes"},
        {"--data f --feed load --resident-bytes most", "--resident-bytes"},
        {"--data f --feed stored --decoder cpu", "--decoder needs --feed load"},
        {"--data f --feed stored --device-share 0.1", "--device-share needs --feed load"},
        {"--data f --feed load --decoder hybrid", "--decoder needs images of one size; add --out-res"},
        {"--data f --feed load --device-share 0.1", "--device-share needs images of one size; add --out-res"},
        {"--data f --feed load --out-res 20 --decoder cpu --device-share 0.1",
         "--device-share 0.1 leaves samples to a GPU"},
        {"--data f --feed load --out-res 20 --device-share 1.1", "--device-share"},
        {"--data f --feed load --out-res 20 --decoder hardware", "it runs on a CPU, and --decoder hardware"},
        {"--data f --feed load --out-res 20 --device-share 0.1",
         "it runs on a CPU, which decodes all samples"},
        {"--data f --feed load --cache-dir x", "--cache-dir needs data at a URL"},
        {"--data digits --cache-dir x", "--cache-dir needs data at a URL"},
        {"--data f --feed load --test-data f --test-share 0.2", "--test-share holds out nothing"},
        {"--data f --feed load --test-data nothing", "--test-data nothing"},
        {"--feed load --data both --test-data f", "it has the folder"},
        {"--data f --feed load --export-data x", "add --feed stored"},
        {"--data f --feed load --interpolation bicubic --out-res 20",
         "--interpolation needs --fit random-resized-crop"},
        {"--data f --feed lod", "did you mean 'load'"},
    };
    prepare();
    EXPECT(0, "mkdir both && cp -r f both/train && cp -r f both/test");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        run("$P --variant train-naive --model logreg %s", cases[i].options);
        cr_expect(status == 2 && says(cases[i].words), "%s: exit %d: %s", cases[i].options, status, out);
    }
    EXPECT_PRINTS(0, "--resident-device-bytes has no effect with --variant train-naive",
                  "$P --variant train-naive --model logreg --data f --feed load --epochs 1 "
                  "--resident-device-bytes 1M");
}

/* ---- Test sets ---- */

/* infer fits the test images as training did. */
Test(train_load, test_data_from_another_folder_are_evaluated_alike)
{
    char loss[64];
    prepare();
    EXPECT(0,
           "cp -r f held && $P --variant train-naive " LOAD
           "--test-data held --out-res 16 --channels 1 --fit random-resized-crop --epochs 1 --checkpoint k");
    cr_expect_str_eq(value(out, 1, "train_samples"), "120");
    cr_expect_str_eq(value(out, 1, "test_samples"), "120");
    cr_expect_str_eq(value(out, 1, "test_data"), "held");
    snprintf(loss, sizeof loss, "%s", value(out, 1, "test_loss"));
    EXPECT(0, "$P --variant infer-naive --checkpoint k --format csv");
    cr_expect_str_eq(value(out, 1, "test_loss"), loss);
    EXPECT(0, "$P --variant train-naive --model logreg --data f --test-data held --batch 16 --format csv "
              "--epochs 1");
    cr_expect_str_eq(value(out, 1, "train_samples"), "120");
    EXPECT(0, "for d in f/*; do mkdir -p few/${d#f/} && cp $(ls $d/*.png | head -1) few/${d#f/}; done");
    EXPECT(0, "$P --variant train-naive " LOAD "--test-data few --epochs 1");
    cr_expect(says("--test-data few: the test set has only 10 samples"), "%s", out);
    /* data with a test set of their own */
    EXPECT(0, "mkdir both && cp -r f both/train && cp -r held both/test && $P --variant train-naive " STREAM
              "--data both --epochs 1");
    cr_expect_str_eq(value(out, 1, "test_samples"), "120");
}

/* The first step and the first batch are written from a stream too. */
Test(train_load, steps_and_pictures_are_exported)
{
    prepare();
    EXPECT(0, "$P --variant train-naive " LOAD "--dry-run --export-step step --save-batch 3:pictures && "
              "[ $(ls pictures/00000[0-2]-[0-9].png | wc -l) = 3 ] && [ -s step ]");
}

/* An option that the variant does not support is an error before the data are read: here, they do not exist.
 * Wrong options that concern all variants are named first. */
Test(train_load, options_are_checked_before_the_data)
{
    static const struct {
        const char *line, *words;
    } cases[] = {
        {"train-omp --feed load --out-res 20 --decoder hybrid", "--decoder hybrid decodes on a GPU"},
        {"train-omp --feed load --out-res 20 --device-share 0.5", "drop --device-share"},
        {"train-omp --cudnn-benchmark", "--cudnn-benchmark works only with"},
        {"train-omp --model vit-tiny --checkpoint-activations", "--checkpoint-activations works only with"},
        {"train-omp --feed load --decoder hybrid", "add --out-res PIXELS"},
        {"shards-mmap --mean 0.5", "--mean and --std require --augment"},
        {"shards-mmap --on-error mask", "--on-error mask is for variants that stream"},
        {"stream --on-error skip --decode", "--on-error skip would change the batches"},
        {"stream --augment", "drop --augment"},
        {"stream --augment --block 5", "--block 5 is not a multiple"},
        {"stream --decode", "nowhere"},
        {"train-omp", "nowhere"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        EXPECT(2, "$P --data nowhere --variant %s", cases[i].line);
        cr_expect(strstr(out, cases[i].words), "%s: %s", cases[i].line, out);
        cr_expect(strcmp(cases[i].words, "nowhere") == 0 || !strstr(out, "nowhere"), "%s: %s", cases[i].line,
                  out);
    }
}

#ifdef HAVE_JPEG

/* ---- Decoders on a device ---- */

/* Writes 60 JPEG files of 128 x 128 pixels as class folders: f, and the same files in test. */
static void prepare_jpegs(void)
{
    EXPECT(0, "$P --prepare all --from synth --samples 60 --classes 4 --res 128 --encode jpeg "
              "--store imagefolder && mkdir f && cp -r all/*/ f && cp -r f test");
}

/* With --exact-resize, a JPEG has the values of a PNG file with its pixels. Without it, 128 pixels are
 * decoded as 32 before they become 15. Without a smaller size, the switch changes nothing. */
Test(train_load, an_exact_resize_is_that_of_all_pixels)
{
#define RESIZE "--model logreg --batch 16 --format csv --epochs 2 --channels 1 --out-res 15 --data "
    static const char *const feeds[] = {"load", "stored"};
    char exact[512], pixels[512], scaled[512];
    prepare_jpegs();
    EXPECT(0, "$P --prepare p --from dataset --source f --out-res 128 --encode png --store imagefolder && "
              "$P --prepare j --from dataset --source f --store imagefolder");
    for (size_t i = 0; i < COUNT_OF(feeds); i++) {
        EXPECT(0, "$P --variant " ENGINE " " RESIZE "p --feed %s", feeds[i]);
        copy_results_of(2, pixels, sizeof pixels);
        EXPECT(0, "$P --variant " ENGINE " " RESIZE "j --feed %s --exact-resize", feeds[i]);
        copy_results_of(2, exact, sizeof exact);
        EXPECT(0, "$P --variant " ENGINE " " RESIZE "j --feed %s", feeds[i]);
        copy_results_of(2, scaled, sizeof scaled);
        cr_expect_str_eq(exact, pixels);
        cr_expect_str_neq(scaled, pixels);
    }
    EXPECT_PRINTS(2, "exact-resize", "$P --variant " ENGINE " " STREAM "--data f --exact-resize");
#undef RESIZE
}

static const struct image_fit small = {.how = FIT_RESIZE, .res = 20, .channels = 1};

static enum decoder there; /* the decoder that the device of device_engine() has */

/* Opens a stream as an engine on a device does, but then trains with the reference, whose own stream decodes
 * the same samples. */
static enum status open_on_device(const struct train *train, const struct resources *resources, void **state)
{
    struct feed_stream feed;
    const enum decoder wanted = feed_decoder_wanted(train);
    const enum status result =
        feed_stream_open(train, 1, 1, wanted == DECODER_AUTO ? there : wanted, NULL, NULL, &feed);
    feed_stream_close(&feed);
    TRY(result);
    return engine_naive.open(train, resources, state);
}

static struct engine device_engine(enum decoder decoder)
{
    struct engine engine = engine_naive;
    there = decoder;
    engine.open = open_on_device;
    return engine;
}

/* A device decides what auto is, and which share it takes. */
Test(train_load, the_decoder_of_a_device_is_settled_when_its_stream_opens)
{
    static const struct {
        struct train_decoding wanted;
        enum decoder opened;
        double share;        /* negative: refused */
        const char *subject; /* the option at fault */
    } cases[] = {
        {{DECODER_AUTO, -1}, DECODER_HARDWARE, 0.85, NULL},
        {{DECODER_AUTO, -1}, DECODER_HYBRID, 0.25, NULL},
        {{DECODER_AUTO, -1}, DECODER_CPU, 0, NULL},
        {{DECODER_AUTO, 0.4}, DECODER_HYBRID, 0.4, NULL},
        {{DECODER_AUTO, 0}, DECODER_HYBRID, 0, NULL},
        {{DECODER_HYBRID, -1}, DECODER_HYBRID, 0.25, NULL},
        {{DECODER_HYBRID, 1}, DECODER_HYBRID, 1, NULL},
        {{DECODER_CPU, -1}, DECODER_CPU, 0, NULL},
        {{DECODER_HYBRID, -1}, DECODER_HARDWARE, -1, "decoder"},
        {{DECODER_HARDWARE, -1}, DECODER_CPU, -1, "decoder"},
        {{DECODER_AUTO, 0.4}, DECODER_CPU, -1, "device-share"},
        {{DECODER_CPU, 0.4}, DECODER_CPU, -1, "device-share"},
    };
    struct data data;
    struct model model = {.classes = 4};
    prepare_jpegs();
    open_data(DATA_LOAD, false, &small, &data);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct train_decoding decoding = cases[i].wanted;
        const struct train train = {.model = &model, .data = &data, .batch = 10, .decoding = &decoding};
        struct feed_stream feed;
        const enum status result = feed_stream_open(&train, 2, 1, cases[i].opened, NULL, NULL, &feed);
        cr_expect_eq(result, cases[i].share < 0 ? STATUS_USAGE : STATUS_OK, "case %zu", i);
        if (result != STATUS_OK) {
            cr_expect_str_eq(status_subject(), cases[i].subject);
            cr_expect(decoding.decoder == cases[i].wanted.decoder, "nothing is decided");
        } else
            cr_expect(decoding.decoder == cases[i].opened && decoding.share == cases[i].share, "case %zu", i);
        feed_stream_close(&feed);
    }
    data_close(&data);
}

Test(train_load, a_device_opens_no_decoder_that_it_does_not_need)
{
    struct data data;
    struct train_decoding decoding = {DECODER_AUTO, -1};
    struct train train = {.data = &data, .batch = 10, .decoding = &decoding};
    prepare_jpegs();
    open_data(DATA_LOAD, false, &small, &data);
    cr_expect_eq(feed_decoder_wanted(&train), DECODER_AUTO);
    decoding.share = 0;
    cr_expect_eq(feed_decoder_wanted(&train), DECODER_CPU);
    decoding = (struct train_decoding){DECODER_HYBRID, -1};
    cr_expect_eq(feed_decoder_wanted(&train), DECODER_HYBRID);
    train.decoding = NULL;
    cr_expect_eq(feed_decoder_wanted(&train), DECODER_CPU);
    train.decoding = &decoding;
    decoding.decoder = DECODER_AUTO;
    data_close(&data);
    open_data(DATA_STORED, false, &small, &data);
    cr_expect_eq(feed_decoder_wanted(&train), DECODER_CPU);
    data_close(&data);
    EXPECT(0, "rm -rf f test all");
    prepare(); /* PNG files */
    EXPECT(0, "cp -r f test");
    open_data(DATA_LOAD, false, &small, &data);
    cr_expect_eq(feed_decoder_wanted(&train), DECODER_CPU);
    data_close(&data);
}

/* The reference sees the samples that a device sees: decoded at full size. The images are more than twice as
 * large as the output, so they would otherwise be decoded at a fraction of their size. */
Test(train_load, the_reference_decodes_as_a_device_does)
{
    struct data data;
    struct train_decoding decoding = {DECODER_AUTO, 0.5};
    struct model model = {.classes = 4};
    struct train train = {.model = &model, .data = &data, .batch = 30, .decoding = &decoding};
    struct feed_stream stream;
    struct feed feed, scaled;
    prepare_jpegs();
    open_data(DATA_LOAD, false, &small, &data);
    must(feed_stream_open(&train, 2, 1, DECODER_HARDWARE, NULL, NULL, &stream));
    must(feed_open(&train, &(struct resources){.threads = 2}, &feed));
    train.decoding = NULL;
    must(feed_open(&train, &(struct resources){.threads = 2}, &scaled));
    struct stream_batch batch = take(&stream, 0, 0);
    uint32_t count, next = 0, same = 0, numbers[30];
    const struct draw_order order = train_order(&train, 0);
    const struct set_stream_file *files = set_stream_files(stream.stream, &batch, &count);
    train_batch(&train, &order, 0, numbers);
    must(feed_step(&feed, 0, 0, numbers, 30));
    must(feed_step(&scaled, 0, 0, numbers, 30));
    cr_assert(count > 5 && count < 25, "%u files", count);
    for (uint32_t j = 0; j < 30; j++) {
        const uint8_t *values = (const uint8_t *)batch.samples.values + j * batch.samples.stride;
        if (next < count && files[next].index == j) {
            next++;
            continue;
        }
        cr_expect_arr_eq(feed_sample(&feed, numbers[j], j), values, batch.samples.stride);
        same += memcmp(feed_sample(&scaled, numbers[j], j), values, batch.samples.stride) == 0;
    }
    cr_expect_lt(same, 3, "%u samples are the same at a fraction of their size", same);
    cr_expect_eq(next, count);
    must(stream_release(stream.stream, &batch, NULL));
    feed_stream_close(&stream);
    feed_close(&feed);
    feed_close(&scaled);
    data_close(&data);
}

/* Trains up to epoch `epochs`, or returns why the trainer refuses. Verifies its first steps. */
static enum status train_to(const struct engine *engine, struct train_job *job, uint32_t epochs,
                            struct train_epoch *epoch)
{
    struct run_time unused;
    void *trainer = NULL;
    uint64_t wrong = 0;
    job->epochs = epochs;
    enum status result = trainer_open(engine, &(struct resources){.threads = 1}, job, &trainer);
    if (result == STATUS_OK)
        must(trainer_verify(NULL, NULL, trainer, 0, &wrong));
    cr_expect_eq(wrong, 0);
    while (result == STATUS_OK && trainer_more(NULL, trainer)) {
        must(trainer_run(trainer, 0, &unused));
        must(trainer_finish(trainer, epoch));
        must(trainer_keep(NULL, trainer, ""));
    }
    const struct failure failure = status_save(result);
    trainer_close(trainer);
    return result == STATUS_OK ? STATUS_OK : status_restore(&failure);
}

/* A resumed run must decode as the run before. */
Test(train_load, another_decoder_than_that_of_the_checkpoint_is_refused)
{
    static const struct {
        enum decoder device; /* DECODER_CPU: an engine without a device */
        struct train_decoding wanted;
        const char *words; /* NULL: accepted */
    } cases[] = {
        {DECODER_HYBRID,
         {DECODER_AUTO, -1},
         "decoder=hardware in the checkpoint, hybrid now; give --decoder "},
        {DECODER_CPU,
         {DECODER_AUTO, -1},
         "decoder=hardware in the checkpoint, cpu now; give --decoder hardware"},
        {DECODER_HARDWARE, {DECODER_CPU, -1}, "decoder=hardware in the checkpoint, cpu now"},
        {DECODER_HARDWARE,
         {DECODER_AUTO, 0.5},
         "device-share=0.85 in the checkpoint, 0.5 now; give --device-share 0.85"},
        {DECODER_HARDWARE, {DECODER_AUTO, -1}, NULL},
        {DECODER_HARDWARE, {DECODER_HARDWARE, 0.85}, NULL},
    };
    struct data data;
    struct model model;
    struct train_epoch whole, resumed;
    struct train_decoding wanted = {DECODER_AUTO, -1};
    char path[PATH_MAX], other[PATH_MAX];
    prepare_jpegs();
    EXPECT(0, "mkdir k whole");
    snprintf(path, sizeof path, "%s/k", folder);
    snprintf(other, sizeof other, "%s/whole", folder);
    open_data(DATA_LOAD, false, &small, &data);
    must(model_build(table_of("logreg"), data.shape, data.classes, &model));
    float *initial = malloc(model.arena_values * sizeof *initial);
    model_initialise(&model, 1, initial);
    struct train_job job = {.train = {.model = &model,
                                      .data = &data,
                                      .batch = 16,
                                      .decoding = &wanted,
                                      .optimizer = {.kind = OPTIMIZER_SGD},
                                      .schedule = {.rate = 0.01}},
                            .initial = initial,
                            .verify_steps = 2,
                            .keep = 9,
                            .checkpoints = other,
                            .resume = true};
    struct engine engine = device_engine(DECODER_HARDWARE);
    must(train_to(&engine, &job, 2, &whole));
    cr_expect(whole.decoding.decoder == DECODER_HARDWARE && whole.decoding.share == 0.85);
    cr_expect(wanted.decoder == DECODER_AUTO && wanted.share < 0, "the next variant decides anew");
    job.checkpoints = path;
    must(train_to(&engine, &job, 1, &resumed));
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        wanted = cases[i].wanted;
        engine = cases[i].device == DECODER_CPU ? engine_naive : device_engine(cases[i].device);
        EXPECT(0, "rm -f k/epoch-000002*");
        const enum status result = train_to(&engine, &job, 2, &resumed);
        cr_expect_eq(result, cases[i].words ? STATUS_USAGE : STATUS_OK, "case %zu: %s", i, status_text());
        cr_expect(!cases[i].words || strstr(status_text(), cases[i].words), "%s", status_text());
        cr_expect(cases[i].words || resumed.loss == whole.loss);
    }
    free(initial);
    data_close(&data);
}

/* A checkpoint without a decoder is one of a run that decoded with the CPU. */
Test(train_load, a_checkpoint_names_its_decoder)
{
    static const struct train_decoding by_cpu = {DECODER_CPU, 0}, by_device = {DECODER_HYBRID, 0.25};
    const struct train_job job = {.checkpoints = "k"};
    struct option_values identity = {0};
    cr_expect_eq(resume_take_decoding(&job, &by_device, true, &identity), STATUS_USAGE);
    cr_expect(strstr(status_text(), "decoder=cpu in the checkpoint, hybrid now; give --decoder cpu"), "%s",
              status_text());
    option_values_free(&identity);
    must(resume_take_decoding(&job, &by_cpu, true, &identity));
    cr_expect_eq(identity.count, 2);
    must(resume_take_decoding(&job, &by_cpu, true, &identity));
    cr_expect_eq(resume_take_decoding(&job, &by_device, true, &identity), STATUS_USAGE);
    option_values_free(&identity);
    must(resume_take_decoding(&job, &by_device, false, &identity));
    cr_expect_eq(resume_take_decoding(&job, &by_cpu, true, &identity), STATUS_USAGE);
    cr_expect(strstr(status_text(), "decoder=hybrid in the checkpoint, cpu now; give --decoder hybrid"), "%s",
              status_text());
    option_values_free(&identity);
}

#endif

#endif
