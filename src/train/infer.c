/* The workload `infer`: runs a trained network over the test set, batch by batch, and writes its predictions.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/array.h"
#include "core/file.h"
#include "core/text.h"
#include "core/workload.h"
#include "data/remote.h"
#include "data/tensor_file.h"
#include "machine/comm.h"
#include "train/checkpoint.h"
#include "train/trainer.h"
#include "train/job.h"

/* ---- Inference on an engine ---- */

void inferrer_close(void *state)
{
    struct inferrer *inferrer = state;
    if (inferrer->state)
        inferrer->engine->close(inferrer->state);
    free(inferrer->logits);
    free(inferrer);
}

enum status inferrer_open(const struct engine *engine, const struct resources *resources, const void *job,
                          void **state)
{
    struct inferrer *inferrer = *state = calloc(1, sizeof *inferrer);
    TRY(ALLOCATED(inferrer, "out of memory"));
    inferrer->job = job;
    inferrer->engine = engine;
    inferrer->number = UINT64_MAX;
    const struct train *train = &inferrer->job->train;
    const struct train_state from = {
        .parameters = (float *)(uintptr_t)inferrer->job->parameters}; /* const cast: set() only reads it */
    inferrer->logits = malloc((size_t)train->batch * train->model->classes * sizeof *inferrer->logits);
    TRY(ALLOCATED(inferrer->logits, "out of memory for a batch"));
    TRY(engine->open(train, resources, &inferrer->state));
    return engine->set(inferrer->state, &from);
}

enum status inferrer_run(void *state, uint64_t number, struct run_time *time)
{
    struct inferrer *inferrer = state;
    const struct train *train = &inferrer->job->train;
    uint32_t batches = train->data->sets[DATA_TEST].count / train->batch;
    (void)time;
    inferrer->number = number;
    const uint64_t batch = number * (uint64_t)comm_size() + (uint64_t)comm_rank();
    /* NaN marks the logits as not written. Several runs may evaluate the same samples, so the logits of an
     * earlier run would otherwise pass the verification of an engine that writes nothing. */
    inferrer->logits[0] = inferrer->logits[(size_t)train->batch * train->model->classes - 1] = NAN;
    return inferrer->engine->evaluate(inferrer->state, DATA_TEST, (uint32_t)(batch % batches) * train->batch,
                                      train->batch, inferrer->logits);
}

enum status inferrer_fetch(void *state, void *result)
{
    const struct inferrer *inferrer = state;
    const struct train *train = &inferrer->job->train;
    struct infer_result *into = result;
    memcpy(into->logits, inferrer->logits,
           (size_t)train->batch * train->model->classes * sizeof *into->logits);
    into->number = inferrer->number;
    return STATUS_OK;
}

/* Returns the bytes of memory that the engine uses. */
static uint64_t inferrer_memory_bytes(const void *state)
{
    const struct inferrer *inferrer = state;
    return inferrer->engine->memory_bytes(inferrer->state);
}

/* ---- The workload ---- */

struct infer_parameters {
    struct job_parameters job; /* must be the first member */
    const char *checkpoint, *predictions, *mean, *std;
    int model;    /* negative: not given */
    uint64_t top; /* classes per row of --predictions; 0: not given */
};

#define AT(field) offsetof(struct infer_parameters, field)
static const struct option_spec options[] = {
    {"checkpoint", "FILE|DIR", OPTION_TEXT, AT(checkpoint), .column = COLUMN,
     .help = "the trained network: a checkpoint file, or a folder whose latest checkpoint is used. Options "
             "that choose the samples keep their values from training unless they are given. Or a file of "
             "tensors that --export or another program wrote (.safetensors, .npz, .pt, .pth, .pth.tar), "
             "which needs --data or --test-data"},
#define TRAINED "as in training"
#define OTHER   "; with another --data, as for the workload train"
    JOB_OPTIONS(struct infer_parameters, NULL, "data to test on (default: " TRAINED ")",
                ". Inference does not use these samples", TRAINED OTHER, TRAINED OTHER, TRAINED OTHER,
                TRAINED OTHER, NULL, " (default: " TRAINED ")", TRAINED OTHER, TRAINED, NULL, NULL, NULL),
    CACHE_OPTIONS(AT(job.cache_dir), AT(job.cache_bytes),
                  ". With --data synth, it keeps the orbits of fractals"),
    {"batch", "N", OPTION_COUNT, AT(job.batch), .fallback = "64", .minimum = 1, .maximum = 1 << 20,
     .choices = option_max, .column = COLUMN,
     .help =
         "samples per run, at most those of the test set. max finds the largest batch that fits into memory"},
    {"model", "NAME", OPTION_CHOICE, AT(model), .choices = model_names,
     .help = "the network in a file of tensors (default: the one that --export wrote into it). NAME is one "
             "of"},
    MEAN_OPTIONS(AT(mean), AT(std), COLUMN,
                 "that of the training, which checkpoints and files of --export have", "as for --mean"),
    {"predictions", "FILE", OPTION_OUTPUT, AT(predictions), .choices = option_stdout,
     .help = "write a CSV file with one row per test sample: its key and label, then the most probable "
             "classes with their probabilities; - writes to stdout, and the table of results to stderr"},
    {"top", "N", OPTION_COUNT, AT(top), .minimum = 1, .maximum = 1 << 20,
     .help = "classes per row of --predictions (default: 5, or all if there are fewer)"},
};

static const struct option_section sections[] = {
    {"network", "checkpoint"},
    {"data", "data"},
    {"training and test set", "train-size"},
    {"generated images", "classes"},
    {"image format", "out-res"},
    {"loading", "cache-dir"},
    {"network", "model"},
    {"output", "predictions"},
    {NULL, NULL},
};
static const char *const single[] = {"predictions", NULL};

static const struct column columns[] = {
    {"timed_stages", VALUE_WORD, COMBINE_FIRST, "", .about = "the stages that the time of a run includes"},
    {"model", VALUE_WORD, COMBINE_FIRST, "", .about = "the network"},
    {"epoch", VALUE_INTEGER, COMBINE_FIRST, "",
     .about = "epochs that the network was trained for; empty for a file of tensors"},
    {"parameters", VALUE_INTEGER, COMBINE_FIRST, "", .about = "parameters of the network"},
    {"test_samples", VALUE_INTEGER, COMBINE_FIRST, "", .about = "samples of the test set"},
    {"skipped", VALUE_INTEGER, COMBINE_FIRST, "",
     .about = "broken samples that --on-error skip left out; empty if the number is unknown"},
    {"test_loss", VALUE_REAL, COMBINE_FIRST, "", .about = "mean loss over the whole test set",
     .better = BETTER_LOWER, .of_run = true},
    {"test_acc", VALUE_REAL, COMBINE_FIRST, "",
     .about = "share of the whole test set that is classified correctly", .digits = 6,
     .better = BETTER_HIGHER, .of_run = true},
    {"memory_bytes", VALUE_INTEGER, COMBINE_FIRST, "bytes", .about = "memory that the engine allocates",
     .better = BETTER_LOWER},
    {"batch_probes", VALUE_INTEGER, COMBINE_FIRST, "",
     .about = "batches that --batch max tried; empty if --batch is a number"},
    {"test_map", VALUE_REAL, COMBINE_FIRST, "",
     .about =
         "mean average precision over the classes that the test set shows; empty unless labels are "
         "multi-hot, and test_acc is then the share of samples that show the class of their largest logit",
     .digits = 6, .better = BETTER_HIGHER, .of_run = true},
    {.name = NULL},
};
static const char *const shown[] = {"test_acc", NULL};
static const char *const baselines[] = {"infer-naive", NULL};

/* ---- Opening ---- */

/* The workload's input and what it owns. */
struct opened {
    struct infer_job job; /* must be the first member: variants cast the input to it */
    struct model model;
    struct data data;
    struct checkpoint checkpoint; /* parameters point into its options */
    uint32_t probes;              /* batches tried for --batch max; 0: none */
    bool tensors;                 /* the network is from a file of tensors, not from a checkpoint */
    const char *predictions;      /* value of --predictions */
    int stdout_fd;                /* with --predictions -, on rank 0, until they are written; else negative */
    uint32_t top;
};

#define TOP 5 /* default of --top */
/* Begins each file of predictions, so that no other file is replaced. */
static const char predictions_begin[] = "key,label,class_1,probability_1";

static void infer_close(void *input)
{
    struct opened *opened = input;
    if (opened->stdout_fd >= 0)
        close(opened->stdout_fd);
    data_close(&opened->data);
    checkpoint_free(&opened->checkpoint);
    free(opened);
}

static enum status rebuild(const struct checkpoint *checkpoint, const struct data *data, struct model *model)
{
    TRY(status_prefix(checkpoint_model(checkpoint, model), "--checkpoint"));
    const struct shape *in = &checkpoint->input, *is = &data->shape;
    const bool fits =
        data->multi_hot ? data->classes == checkpoint->classes : data->classes <= checkpoint->classes;
    if (memcmp(in, is, sizeof *in) != 0 || !fits)
        return status_set(
            STATUS_USAGE,
            "--checkpoint: the network is for samples of %ux%ux%ux%u (channels, depth, height, width) and %u "
            "classes, but --data has samples of %ux%ux%ux%u and %u classes; use samples that fit the network",
            in->channels, in->depth, in->height, in->width, checkpoint->classes, is->channels, is->depth,
            is->height, is->width, data->classes);
    return STATUS_OK;
}

static enum status warn_of_other_samples(const struct checkpoint *checkpoint,
                                         const struct job_parameters *job, const struct data *data)
{
    char words[512], part[512] = "";
    if (data->hashes[DATA_TEST] == checkpoint->hashes[DATA_TEST])
        return STATUS_OK;
    CLOSED_BY(option_values_free) struct option_values samples = {0};
    TRY(job_samples(job, &samples));
    const size_t count = job_differences(checkpoint, job->data, &samples, "train-size", words, sizeof words);
    const bool same_size = option_value_same(option_values_find(&checkpoint->samples, "test-size"),
                                             option_values_find(&samples, "test-size"));
    if (data->split)
        snprintf(part, sizeof part,
                 "; only the held-out part of %.200s is tested (%" PRIu32
                 " samples); to test a whole set, name it with --test-data",
                 job->data, data->sets[DATA_TEST].count);
    if (count == 1 && !same_size)
        status_warn("the number of test samples differs from the number during training (%s); "
                    "accuracies are not comparable",
                    words);
    else
        status_warn("these are not the test samples that were used when the network was trained on %s (%s); "
                    "the network may have been trained on some of them, so accuracies are not comparable%s",
                    checkpoint->data, count ? words : "the same options, but the samples have changed", part);
    return STATUS_OK;
}

/* Rejects options that have no effect with the network that --checkpoint names, and files that cannot be
 * read or written. */
static enum status check_network(const struct options *given, const struct infer_parameters *parameters,
                                 bool tensors)
{
    static const char *const of_tensors[] = {"model", "mean", "std"};
    static const struct file_kind kind = {"file of predictions", 0, predictions_begin,
                                          sizeof predictions_begin - 1};
    for (size_t i = 0; !tensors && i < COUNT_OF(of_tensors); i++)
        if (options_given(given, of_tensors[i]))
            return status_option(STATUS_USAGE, of_tensors[i],
                                 " is for files of tensors, such as .safetensors, but --checkpoint %s is a "
                                 "checkpoint, which has the value; drop --%s",
                                 parameters->checkpoint, of_tensors[i]);
    if (!parameters->mean != !parameters->std)
        return status_option(STATUS_USAGE, parameters->mean ? "mean" : "std", " needs --%s; add that",
                             parameters->mean ? "std" : "mean");
    if (parameters->top && !parameters->predictions)
        return status_option(STATUS_USAGE, "top", " needs --predictions FILE; add that, or drop --top");
    if (tensors && access(parameters->checkpoint, F_OK) != 0)
        return status_set(STATUS_USAGE, "--checkpoint %s: %s", parameters->checkpoint, strerror(errno));
    if (tensors && !parameters->job.data && !parameters->job.test_data)
        return status_set(STATUS_USAGE,
                          "--checkpoint %s: a file of tensors does not say with which samples to test; add "
                          "--test-data, or --data for data with a test set",
                          parameters->checkpoint);
    if (!parameters->predictions || strcmp(parameters->predictions, *option_stdout) == 0)
        return STATUS_OK;
    return status_prefix(file_check_kind(parameters->predictions, &kind), "--predictions");
}

/* Sets options that were not given, and that a file of tensors does not have. */
static void set_defaults(struct job_parameters *job)
{
    if (!job->data)
        job->data = job->test_data; /* whose classes are those of --test-data */
    if (job->fit < 0)
        job->fit = FIT_RESIZE;
    if (job->channels == 0)
        job->channels = 3;
}

/* Reads the network in a file of tensors, for the samples of opened->data. */
static enum status read_network(const struct infer_parameters *parameters, struct opened *opened)
{
    const struct init_request request = {"--checkpoint", parameters->checkpoint, INIT_EMA_AUTO};
    double mean[DATA_CHANNELS_MAX], std[DATA_CHANNELS_MAX];
    bool normalised;
    TRY(init_network(&request, parameters->model < 0 ? NULL : model_names[parameters->model], &opened->data,
                     &opened->model, &opened->checkpoint, &normalised));
    if (normalised && parameters->mean)
        return status_option(STATUS_USAGE, "mean",
                             ": --checkpoint %s says how its samples are normalised; drop --mean and --std",
                             parameters->checkpoint);
    if (normalised)
        return STATUS_OK;
    if (!parameters->mean)
        return status_set(STATUS_USAGE,
                          "--checkpoint %s: it does not say how its samples are normalised; add --mean and "
                          "--std with the values of its training",
                          parameters->checkpoint);
    TRY(job_read_mean(parameters->mean, parameters->std, opened->data.shape.channels, mean, std));
    data_normalise_by(&opened->data, mean, std);
    memcpy(opened->checkpoint.scale, opened->data.scale, sizeof opened->data.scale);
    memcpy(opened->checkpoint.offset, opened->data.offset, sizeof opened->data.offset);
    return STATUS_OK;
}

/* Sets opened->top: the number of classes per row of --predictions. */
static enum status choose_top(const struct infer_parameters *parameters, struct opened *opened)
{
    const uint32_t classes = opened->model.classes;
    if (parameters->top > classes)
        return status_number(STATUS_USAGE, "top", (double)parameters->top,
                             ": the network has %" PRIu32 " classes; give at most this number", classes);
    opened->top = parameters->top ? (uint32_t)parameters->top : classes < TOP ? classes : TOP;
    opened->predictions = parameters->predictions;
    return STATUS_OK;
}

static enum status infer_open(const struct options *given, void *parameters_,
                              const struct partition *partition, void **input)
{
    struct infer_parameters *parameters = parameters_;
    struct opened *opened = *input = calloc(1, sizeof *opened);
    TRY(ALLOCATED(opened, "out of memory"));
    opened->stdout_fd = -1;
    if (!parameters->checkpoint)
        return status_set(STATUS_USAGE, "name the trained network with --checkpoint FILE; training with "
                                        "--checkpoint DIR writes such files");
    if (partition->ranks > 1 && partition->strong)
        return status_set(STATUS_USAGE,
                          "--scaling strong: the ranks of infer have a whole batch each; leave it out");
    const bool tensors = opened->tensors = tensor_file_named(parameters->checkpoint);
    TRY(check_network(given, parameters, tensors));
    if (!tensors)
        TRY(checkpoint_find("--checkpoint", parameters->checkpoint, &opened->checkpoint));
    job_hide_secrets(&parameters->job);
    if (!tensors)
        TRY(job_take_samples(given, &opened->checkpoint, &parameters->job));
    if (tensors)
        set_defaults(&parameters->job);
    if (parameters->job.on_error < 0)
        parameters->job.on_error = 0; /* "fail" */
    if (parameters->job.fit < 0 || parameters->job.channels == 0)
        return status_set(STATUS_FAILED, "--checkpoint %s lacks the values of --fit and --channels",
                          parameters->checkpoint);
    for (size_t i = 0; i < COUNT_OF(options); i++) {
        const char *needed = job_lacking(&parameters->job, options[i].name);
        if (needed && options_given(given, options[i].name))
            return status_option(STATUS_USAGE, options[i].name, " needs %s; add that, or drop --%s", needed,
                                 options[i].name);
    }
    const struct option_value *feed = option_values_find(&opened->checkpoint.identity, "feed");
    const bool words = feed && feed->kind == OPTION_VALUE_WORD,
               mixed = words && strcmp(feed->word, "mixed") == 0;
    parameters->job.centre = tensors || mixed || (words && strcmp(feed->word, "load") == 0);
    if (mixed && !options_given(given, "classes"))
        parameters->job.classes = 0; /* training used --classes for its generated images only */
    if (options_given(given, "on-error") && parameters->job.on_error == ON_ERROR_MASK)
        return status_set(STATUS_USAGE, "--on-error mask is for training with --feed load; use --on-error "
                                        "skip, which omits broken test samples");
    parameters->job.test_only = true;
    parameters->job.keys = parameters->predictions != NULL;
    if (parameters->job.batch == OPTION_MAX)
        parameters->job.batch = 1;
    TRY(job_open_data(&parameters->job, &opened->data));
    const bool batch_given = options_given(given, "batch");
    parameters->job.batch = job_limit_batch(parameters->job.batch, opened->data.sets[DATA_TEST].count,
                                            DATA_TEST, batch_given, batch_given);
    if (tensors)
        TRY(read_network(parameters, opened));
    memcpy(opened->data.scale, opened->checkpoint.scale, sizeof opened->data.scale);
    memcpy(opened->data.offset, opened->checkpoint.offset, sizeof opened->data.offset);
    TRY(rebuild(&opened->checkpoint, &opened->data, &opened->model));
    TRY(choose_top(parameters, opened));
    if (tensors && opened->data.split)
        status_say("only the held-out part of %.200s is tested (%" PRIu32
                   " samples); to test all of it, name it with --test-data",
                   parameters->job.data, opened->data.sets[DATA_TEST].count);
    if (!tensors)
        TRY(warn_of_other_samples(&opened->checkpoint, &parameters->job, &opened->data));
    if (opened->predictions && strcmp(opened->predictions, *option_stdout) == 0 && partition->rank == 0)
        TRY(file_take_stdout(&opened->stdout_fd));
    opened->job = (struct infer_job){.train = {.model = &opened->model,
                                               .data = &opened->data,
                                               .batch = (uint32_t)parameters->job.batch,
                                               .forward_only = true},
                                     .parameters = checkpoint_parameters(&opened->checkpoint)};
    return STATUS_OK;
}

static void infer_range(const void *input, const void *parameters, const struct partition *partition,
                        uint64_t *least, uint64_t *most)
{
    (void)parameters, (void)partition;
    *least = 1;
    *most = ((const struct opened *)input)->data.sets[DATA_TEST].count;
}

static enum status infer_set_batch(void *input, void *parameters, const struct partition *partition,
                                   uint64_t batch, uint32_t probes)
{
    struct opened *opened = input;
    (void)partition;
    ((struct infer_parameters *)parameters)->job.batch = batch;
    opened->job.train.batch = (uint32_t)batch;
    opened->probes = probes;
    return STATUS_OK;
}

static enum status infer_probe(void *state)
{
    return inferrer_run(state, 0, NULL);
}

static bool infer_applies(const void *parameters_, const struct variant *variant, const char *option)
{
    const struct infer_parameters *parameters = parameters_;
    (void)variant;
    bool synth = !parameters->job.data || strcmp(parameters->job.data, "synth") == 0;
    return (synth || strcmp(option, "res") != 0) && !job_lacking(&parameters->job, option);
}

/* ---- Runs and rows ---- */

static struct work infer_work(const void *input, const struct variant *variant)
{
    const struct opened *opened = input;
    const struct engine *engine = variant->traits;
    struct model_savings savings = engine->savings;
    savings.backward = true;
    double samples = opened->job.train.batch, bytes = samples * (double)opened->data.sample_bytes;
    return (struct work){.items = samples,
                         .bytes = bytes,
                         .least = {.flops = samples * model_flops(&opened->model, &savings),
                                   .unit = engine->unit,
                                   .once_bytes = bytes}};
}

/* Returns the number of samples with a wrong logit. A logit is wrong if its difference from the oracle's
 * exceeds `bound` times the largest absolute logit of the batch. */
static uint64_t count_off(const struct train *train, double bound, const float *mine, const float *exact)
{
    size_t classes = train->model->classes;
    double largest = 0;
    uint64_t off = 0;
    for (size_t i = 0; i < train->batch * classes; i++)
        if (fabs(exact[i]) > largest) /* not fmax(): gcc 12 for aarch64 fails to compile it here */
            largest = fabs(exact[i]);
    for (size_t i = 0; i < train->batch; i++) {
        bool wrong = false;
        for (size_t k = i * classes; k < (i + 1) * classes; k++)
            wrong |= !(fabs((double)mine[k] - exact[k]) <= bound * largest);
        off += wrong;
    }
    return off;
}

/* Implements verify(): counts the samples whose logits differ from the oracle's. If the variant's latest run
 * is not run `number`, all samples count as wrong. */
static enum status infer_verify(const void *input, const struct variant *variant, void *state,
                                uint64_t number, uint64_t *wrong)
{
    const struct opened *opened = input;
    const struct train *train = &opened->job.train;
    const struct resources all = job_all_threads();
    double bound = ((const struct inferrer *)state)->engine->bounds.logits;
    size_t count = (size_t)train->batch * train->model->classes;
    FREED float *logits = malloc(2 * count * sizeof *logits);
    TRY(ALLOCATED(logits, "out of memory to verify"));
    struct infer_result mine = {.logits = logits}, exact = {.logits = logits + count};
    void *oracle = NULL;
    TRY(variant->fetch(state, &mine));
    enum status status = inferrer_open(&engine_oracle, &all, input, &oracle);
    if (status == STATUS_OK)
        status = inferrer_run(oracle, number, NULL);
    if (status == STATUS_OK)
        status = inferrer_fetch(oracle, &exact);
    if (status == STATUS_OK)
        *wrong = mine.number == number ? count_off(train, bound, mine.logits, exact.logits) : train->batch;
    if (oracle)
        inferrer_close(oracle);
    return status;
}

/* ---- Predictions ---- */

/* Writes the row of sample `n`: the most probable classes, and of equal ones the lower first. The
 * probabilities are the softmax of the logits; with multi-hot labels, the sigmoid of each, and the label
 * lists the classes that the sample shows. The logits are changed: each written class becomes -infinity. */
static enum status write_row(FILE *stream, const char *key, const struct data_set *set, uint32_t n,
                             uint32_t classes, uint32_t top, float *logits)
{
    double largest = -INFINITY, sum = 0;
    for (uint32_t k = 0; k < classes; k++) {
        if (!isfinite(logits[k]))
            return status_set(STATUS_FAILED,
                              "sample %.200s: the network's output for class %" PRIu32
                              " is NaN or infinite, so there are no probabilities",
                              key, k);
        largest = logits[k] > largest ? logits[k] : largest;
    }
    for (uint32_t k = 0; k < classes; k++)
        sum += exp(logits[k] - largest);
    text_csv_field(stream, key);
    if (!set->multi_hot)
        fprintf(stream, ",%" PRIu32, set->labels[n]);
    const char *before = ",";
    for (uint32_t k = 0; set->multi_hot && k < classes; k++)
        if (target_has(set->multi_hot, classes, set->labels[n], k)) {
            fprintf(stream, "%s%" PRIu32, before, k);
            before = " ";
        }
    if (set->multi_hot && *before == ',')
        fputc(',', stream);
    for (uint32_t i = 0; i < top; i++) {
        const uint32_t best = largest_logit(logits, classes);
        fprintf(stream, ",%" PRIu32 ",%.9g", best,
                set->multi_hot ? 1 / (1 + exp(-logits[best])) : exp(logits[best] - largest) / sum);
        logits[best] = -INFINITY;
    }
    fputc('\n', stream);
    return STATUS_OK;
}

static enum status write_rows(const struct opened *opened, float *logits, FILE *stream)
{
    const struct data_set *set = &opened->data.sets[DATA_TEST];
    fprintf(stream, "%s", predictions_begin);
    for (uint32_t i = 1; i < opened->top; i++)
        fprintf(stream, ",class_%" PRIu32 ",probability_%" PRIu32, i + 1, i + 1);
    fputc('\n', stream);
    for (uint32_t n = 0; n < set->count; n++) {
        char number[16];
        snprintf(number, sizeof number, "%" PRIu32, n);
        TRY(write_row(stream, set->keys ? set->keys[n] : number, set, n, opened->model.classes, opened->top,
                      logits + (size_t)n * opened->model.classes));
    }
    return STATUS_OK;
}

/* Writes the file of --predictions. Changes the logits. */
static enum status write_predictions(struct opened *opened, float *logits)
{
    FREED char *text = NULL;
    size_t size;
    FILE *stream = open_memstream(&text, &size);
    TRY(ALLOCATED(stream, "--predictions: out of memory"));
    enum status status = write_rows(opened, logits, stream);
    const bool complete = text_close(stream);
    TRY(status_prefix(status, "--predictions"));
    TRY(ALLOCATED(complete, "--predictions: out of memory"));
    if (opened->stdout_fd >= 0) {
        const int stdout_fd = opened->stdout_fd;
        opened->stdout_fd = -1;
        return file_write_stdout(stdout_fd, text, size);
    }
    TRY(file_write_atomic(opened->predictions, text, size));
    status_say("%" PRIu32 " predictions written to %s", opened->data.sets[DATA_TEST].count,
               opened->predictions);
    return STATUS_OK;
}

/* Computes the logits of this rank's part of the test set. begins[i] is the first logit of rank i. */
static enum status evaluate_part(const struct opened *opened, const struct inferrer *inferrer,
                                 const size_t *begins, float *logits)
{
    const size_t classes = opened->model.classes, first = begins[comm_rank()],
                 count = begins[comm_rank() + 1] - first;
    return count ? inferrer->engine->evaluate(inferrer->state, DATA_TEST, (uint32_t)(first / classes),
                                              (uint32_t)(count / classes), logits + first)
                 : STATUS_OK;
}

/* Collective: computes loss and accuracy over the whole test set. Each rank computes the logits of a
 * contiguous part of it, and rank 0 writes the predictions. */
static enum status judge(struct opened *opened, void *state, struct judgement *judged)
{
    const struct data_set *set = &opened->data.sets[DATA_TEST];
    const size_t ranks = (size_t)comm_size(), classes = opened->model.classes;
    FREED float *logits = malloc((size_t)set->count * classes * sizeof *logits);
    FREED size_t *begins = malloc((ranks + 1) * sizeof *begins);
    enum status status =
        ALLOCATED(logits && begins, "out of memory for the logits of %" PRIu32 " samples", set->count);
    for (size_t i = 0; status == STATUS_OK && i <= ranks; i++)
        begins[i] = (size_t)((uint64_t)set->count * i / ranks) * classes;
    if (status == STATUS_OK)
        status = evaluate_part(opened, state, begins, logits);
    TRY(comm_agree(status));
    TRY(comm_share_parts(logits, begins));
    TRY(logits_judge(logits, set, opened->model.classes, judged));
    return opened->predictions && comm_rank() == 0 ? write_predictions(opened, logits) : STATUS_OK;
}

static enum status infer_accepts(const void *input, const struct variant *variant)
{
    const struct engine *engine = variant->traits;
    const struct train *train = &((const struct opened *)input)->job.train;
    return engine->accepts ? engine->accepts(train) : STATUS_OK;
}

static enum status infer_measure(const void *input, const struct variant *variant, void *state,
                                 struct row *row)
{
    struct opened *opened = (struct opened *)(uintptr_t)input; /* const cast: writes to opened->stdout_fd */
    struct judgement judged;
    (void)variant;
    TRY(judge(opened, state, &judged));
    row_text(row, "timed_stages", "gather+forward");
    row_text(row, "model", opened->model.name);
    if (!opened->tensors)
        row_count(row, "epoch", opened->checkpoint.history.epochs);
    row_count(row, "parameters", opened->model.parameters);
    row_count(row, "test_samples", opened->data.sets[DATA_TEST].count);
    job_put_skipped(&opened->data, row);
    row_real(row, "test_loss", judged.loss);
    row_real(row, "test_acc", judged.accuracy);
    row_real(row, "test_map", judged.precision);
    row_count(row, "memory_bytes", inferrer_memory_bytes(state));
    if (opened->probes)
        row_count(row, "batch_probes", opened->probes);
    return STATUS_OK;
}

/* Hashes the test samples and the network, because the files that ranks read may differ. */
static uint64_t infer_identity(const void *input)
{
    const struct opened *opened = input;
    const uint64_t hashes[] = {opened->data.hashes[DATA_TEST], checkpoint_hash(&opened->checkpoint)};
    return fnv_add(FNV_BEGIN, hashes, sizeof hashes);
}

const struct workload workload_infer = {
    .name = "infer",
    .schema = "infer/8",
    .summary = "runs a trained network over a test set, batch by batch",
    .item = "samples",
    .options = options,
    .option_count = COUNT_OF(options),
    .option_sections = sections,
    .parameters_bytes = sizeof(struct infer_parameters),
    .columns = columns,
    .shown = shown,
    .shows_p99 = true,
    .baselines = baselines,
    .single = single,
    .open = infer_open,
    .close = infer_close,
    .repartition = job_stay,
    .ranks.identity = infer_identity,
    .applies = infer_applies,
    .accepts = infer_accepts,
    .largest = {job_batch, infer_range, infer_set_batch, infer_probe},
    .work = infer_work,
    .verify = infer_verify,
    .measure = infer_measure,
};
