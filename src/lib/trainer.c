/* Trainers: opens the workload `train` with options by name, and drives its trainer (train/trainer.h) step by
 * step. Hands it the batches of a stream or of the caller (train/given.h). */
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/array.h"
#include "lib/call.h"
#include "machine/comm.h"
#include "machine/device.h"
#include "train/given.h"
#include "train/train.h"

#define SLOTS     2  /* batches of host memory on their way to a device */
#define ALIGNMENT 16 /* of samples in device memory, in bytes */

/* Device memory for the samples and labels of a batch. */
struct slot {
    void *samples;
    void *taken; /* event: they were read */
    bool used;
};

struct fdsl_trainer {
    pid_t process;
    int device; /* FDSL_CPU: the variant does not use a device */
    struct resources resources;
    struct options options;
    struct train_parameters parameters;
    char **argv; /* the texts of the options, to which the parameters refer */
    int argc;
    struct partition partition;
    const struct variant_entry *entry;
    struct opened *input;
    void *state;
    uint64_t epochs_run;
    struct train_epoch latest;
    bool failed; /* failed: a step failed, and its results are not known */
    struct failure failure;

    struct given given;
    bool hands_over;            /* samples are those of `given` */
    struct fdsl_stream *stream; /* NULL: they are the caller's */
    int stream_device;          /* FDSL_CPU: its batches are in host memory */
    struct fdsl_batch *held;    /* of the stream, during a step */
    bool seeks;                 /* the stream may be at another step */
    bool at_caller;             /* the batch of the step is in memory of the caller */
    int32_t *labels;            /* of a batch */
    uint8_t *rows;              /* multi-hot labels of a batch of device memory */
    void *bridge;               /* CUDA stream that orders the batches with the steps */
    void *caller_stream;
    void *ready; /* event */
    struct slot slots[SLOTS];
    uint32_t turn;
    size_t sample_bytes;
    float *logits;
};

static atomic_int user; /* process with an open trainer, or 0: options, ranks and data have static parts */
static atomic_int
    opener; /* process that has tried to open a trainer, or 0: OpenMP's threads do not survive fork() */

/* ---- Messages ---- */

/* Options have their names on the command line in messages: "--lr-step" becomes "lr_step". */
static enum fdsl_status relay(enum status status)
{
    char text[sizeof((struct failure *)NULL)->text], *to = text;
    const char *from = status_text();
    if (status == STATUS_OK)
        return FDSL_OK;
    for (bool within = false; *from && to < text + sizeof text - 1; from++) {
        const bool inside = from > status_text() && !strchr(" '(", from[-1]); /* a word, such as a path */
        const bool begins = !inside && strncmp(from, "--", 2) == 0 && from[2] >= 'a' && from[2] <= 'z';
        within =
            begins ||
            (within && (*from == '-' || (*from >= 'a' && *from <= 'z') || (*from >= '0' && *from <= '9')));
        if (begins)
            from += 2;
        *to++ = within && *from == '-' ? '_' : *from;
    }
    *to = '\0';
    return lib_relay(status_set(status, "%s", text));
}

/* ---- Configuration ---- */

enum fdsl_status fdsl_trainer_config_init(struct fdsl_trainer_config *config, size_t size)
{
    static const struct fdsl_trainer_config defaults = {
        .size = sizeof defaults, .variant = "auto", .dtype = "u8", .world_size = 1};
    return lib_set_config(config, size, &defaults, sizeof defaults);
}

static enum status add_argument(struct fdsl_trainer *self, const char *name, const char *value)
{
    char *text = NULL;
    const size_t length = strlen(name) + strlen(value) + 4;
    TRY(ALLOCATED(array_grow(&self->argv, (size_t)self->argc + 1, sizeof *self->argv) &&
                      (text = malloc(length)),
                  "out of memory for the options"));
    snprintf(text, length, "--%s=%s", name, value);
    for (char *at = text + 2; *at != '='; at++)
        *at = *at == '_' ? '-' : *at;
    self->argv[self->argc++] = text;
    self->argv[self->argc] = NULL;
    return STATUS_OK;
}

/* Appends an option. A flag with the value "yes" has no value on a command line; with "no", it is left out.
 */
static enum status add_option(struct fdsl_trainer *self, const char *name, const char *value)
{
    const int index = self->argc;
    if (!value)
        return status_set(STATUS_USAGE, "options: %s has no value: give names and values in pairs", name);
    TRY(add_argument(self, name, value));
    char *text = self->argv[index];
    for (size_t i = 0; i < workload_train.option_count; i++) {
        const struct option_spec *spec = &workload_train.options[i];
        const size_t length = strlen(spec->name);
        if (spec->kind != OPTION_FLAG || strncmp(text + 2, spec->name, length) != 0 ||
            text[2 + length] != '=')
            continue;
        const bool on = strcmp(value, "yes") == 0;
        if (!on && strcmp(value, "no") != 0)
            return status_set(STATUS_USAGE, "%s: '%s' is neither yes nor no", name, value);
        text[2 + length] = '\0';
        if (!on) {
            free(text);
            self->argv[self->argc = index] = NULL;
        }
        return STATUS_OK;
    }
    return STATUS_OK;
}

static bool has_option(const struct fdsl_trainer_config *config, const char *name)
{
    for (const char *const *at = config->options; at && *at && at[1]; at += 2)
        if (strcmp(*at, name) == 0)
            return true;
    return false;
}

/* Gets what the configuration says of the samples that are handed over. */
static enum status read_given(const struct fdsl_trainer_config *config, struct fdsl_trainer *self)
{
    static const char *const names[] = {"u8", "f16", "bf16", "f32", NULL};
    static const enum dtype types[] = {DTYPE_U8, DTYPE_F16, DTYPE_BF16, DTYPE_F32};
    struct given *given = &self->given;
    struct lib_stream_facts facts = {.samples = 0};
    const uint32_t *shape = config->shape;
    int type;
    self->hands_over = config->stream || config->samples;
    if (!self->hands_over)
        return STATUS_OK;
    if (config->stream) {
        TRY(lib_stream_facts(config->stream, &facts));
        self->stream = config->stream;
        self->stream_device = facts.device;
        self->seeks = true;
        given->shape = (struct shape){facts.shape[0], facts.shape[1], facts.shape[2], facts.shape[3]};
        given->type = (enum dtype)facts.type;
        given->samples = facts.samples;
        given->classes = config->classes ? config->classes : facts.classes;
        given->multi_hot = facts.multi_hot;
        given->mixed = facts.mixed;
        given->identity = facts.identity;
        if (config->classes && config->classes < facts.classes)
            return status_set(STATUS_USAGE,
                              "classes: the stream has %" PRIu32 " classes, more than %" PRIu32
                              "; leave classes out, or raise it",
                              facts.classes, config->classes);
        if (facts.rank != self->partition.rank || facts.ranks != self->partition.ranks)
            return status_set(STATUS_USAGE,
                              "stream: it is of rank %" PRIu32 " of %" PRIu32
                              ", but the trainer of rank %" PRIu64 " of %" PRIu64
                              "; open it with the rank and world_size of the trainer",
                              facts.rank, facts.ranks, self->partition.rank, self->partition.ranks);
    } else {
        const bool clip = shape[3] > 0;
        TRY(lib_find_name("dtype", config->dtype, names, &type));
        if (config->samples >= INT32_MAX)
            return status_set(STATUS_USAGE, "samples: %" PRIu64 " is out of range; at most 2^31 - 2",
                              config->samples);
        TRY(lib_check_count("shape", shape[0], 1, DATA_CHANNELS_MAX));
        TRY(lib_check_count("shape", shape[1], 1, 1 << 16));
        TRY(lib_check_count("shape", shape[2], 1, 1 << 16));
        TRY(lib_check_count("shape", shape[3], 0, 1 << 16));
        given->shape =
            (struct shape){shape[0], clip ? shape[1] : 1, shape[clip ? 2 : 1], shape[clip ? 3 : 2]};
        given->type = types[type];
        given->samples = (uint32_t)config->samples;
        given->classes = config->classes;
        given->multi_hot = config->multi_hot;
        given->mixed = config->mixed;
    }
    if (given->classes == 0)
        return status_set(STATUS_USAGE, "classes: the number of classes is not known; set it");
    TRY(lib_check_count("classes", given->classes, 1, 1 << 20));
    if (given->mixed && self->partition.ranks > 1)
        return status_set(STATUS_USAGE,
                          "mixed: with several ranks, the samples of a batch cannot be mixed, because "
                          "partners are samples of other ranks; name the data with the option data, "
                          "and use the options mixup and cutmix");
    if (facts.samples && facts.drop_last)
        TRY(add_option(self, "drop-last", "yes"));
    char batch[16];
    snprintf(batch, sizeof batch, "%" PRIu32, facts.batch);
    if (facts.samples && has_option(config, "batch"))
        return status_set(STATUS_USAGE, "batch: the stream decides it: %s samples; leave it out", batch);
    if (facts.samples && has_option(config, "drop_last"))
        return status_set(STATUS_USAGE, "drop_last: the stream decides it; leave it out");
    return facts.samples ? add_option(self, "batch", batch) : STATUS_OK;
}

/* ---- Opening ---- */

/* Refuses abbreviations: an option of the program that a trainer does not have, such as "out", must not be
 * read as the beginning of another one. */
static enum status refuse_abbreviation(void *context, const char *name)
{
    (void)context;
    for (size_t i = 0; *name && i < workload_train.option_count; i++)
        if (strncmp(workload_train.options[i].name, name, strlen(name)) == 0)
            return status_set(STATUS_USAGE, "unknown option '--%s'; did you mean '--%s'?", name,
                              workload_train.options[i].name);
    return STATUS_OK;
}

static enum status parse(const struct fdsl_trainer_config *config, struct fdsl_trainer *self)
{
    TRY(ALLOCATED(array_grow(&self->argv, 0, sizeof *self->argv), "out of memory for the options"));
    self->argv[self->argc++] = strdup("fdsl");
    TRY(ALLOCATED(self->argv[0], "out of memory for the options"));
    self->argv[1] = NULL;
    TRY(read_given(config, self));
    for (const char *const *at = config->options; at && *at; at += 2)
        TRY(add_option(self, at[0], at[1]));
    self->options =
        (struct options){.tables = {{workload_train.options, workload_train.option_count, &self->parameters}},
                         .table_count = 1,
                         .explain = refuse_abbreviation,
                         .help = "docs/train.md"};
    self->options.defaults = workload_train.defaults(self->argc, self->argv);
    TRY(options_parse(&self->options, self->argc, self->argv));
    if (self->parameters.job.batch == OPTION_MAX)
        return status_set(STATUS_USAGE, "--batch max: the program finds the largest batch; give a number");
    if (self->parameters.parallel == PARALLEL_AUTO)
        return status_set(STATUS_USAGE, "--parallel auto needs measurements, which only the program does; "
                                        "use --parallel data");
    if (self->parameters.memory)
        return status_set(STATUS_USAGE, "--memory: only the program prints where the memory goes; drop it");
    if (self->hands_over && self->parameters.parallel == PARALLEL_PIPELINE)
        return status_set(STATUS_USAGE, "--parallel pipeline: batches that are handed over are not divided "
                                        "into micro-batches; use --parallel data");
    if (self->hands_over) {
        self->parameters.job.given = &self->given;
        self->parameters.job.data = "batches";
        if (self->partition.ranks > 1 && (self->parameters.mixup > 0 || self->parameters.cutmix > 0))
            return status_set(STATUS_USAGE,
                              "--mixup and --cutmix: with several ranks, samples are mixed with those "
                              "of other ranks, which this rank does not have; drop them, or name the "
                              "data with --data");
        if (self->given.mixed && (self->parameters.mixup > 0 || self->parameters.cutmix > 0))
            return status_set(STATUS_USAGE, "--mixup and --cutmix: the batches are mixed already; drop them");
    }
    return STATUS_OK;
}

/* Collective: ranks with different options would wait for each other, or combine what does not belong
 * together. */
static enum status check_alike(const struct fdsl_trainer *self)
{
    static const char version[] = FDSL_VERSION;
    const struct given *given = &self->given;
    const struct shape *shape = &given->shape;
    const uint32_t samples[] = {self->hands_over, given->samples, given->classes,  given->multi_hot,
                                given->mixed,     given->type,    shape->channels, shape->depth,
                                shape->height,    shape->width};
    TRY(comm_check_same(fnv_add(FNV_BEGIN, version, sizeof version), "version of libfdsl",
                        "use the same on all ranks"));
    TRY(comm_check_same(options_hash(&self->options, NULL), "options", "give all ranks the same options"));
    return comm_check_same(fnv_add(FNV_BEGIN, samples, sizeof samples), "samples",
                           "give all ranks the same samples, shape, dtype, classes, multi_hot and mixed");
}

/* Returns STATUS_OK if the variant can train with these options. */
static enum status suits(const struct fdsl_trainer *self, const struct variant_entry *entry)
{
    TRY(variant_available(entry, &self->resources));
    TRY(workload_train.suits(&self->options, &self->parameters, entry->variant));
    return self->input ? workload_train.accepts(self->input, entry->variant) : STATUS_OK;
}

/* Chooses the variant: that of the configuration, or the first of "auto" that suits the data. */
static enum status choose(const char *name, struct fdsl_trainer *self)
{
    FREED const struct variant_entry **entries = NULL;
    size_t count;
    const bool automatic = variant_is_auto(name);
    TRY(variant_select(name, "train", &entries, &count));
    if (count != 1 && !automatic)
        return status_set(STATUS_USAGE, "variant: '%s' names several variants; a trainer has one", name);
    enum status status = STATUS_OK;
    for (size_t i = 0; i < count && !self->entry; i++) {
        status = suits(self, entries[i]);
        if (status == STATUS_OK)
            self->entry = entries[i];
        else if (!automatic)
            return status_prefix(status, "%s", entries[i]->name);
    }
    return status;
}

static enum status open_device(struct fdsl_trainer *self)
{
    const struct data *data = &self->input->data;
    self->sample_bytes = data->sample_bytes;
    if (!self->hands_over)
        return STATUS_OK;
    self->labels = malloc(self->parameters.job.batch * sizeof *self->labels);
    TRY(ALLOCATED(self->labels, "out of memory for the labels of a batch"));
    return self->device < 0 ? STATUS_OK : device_stream_create(self->device, &self->bridge);
}

static enum status release(void *context, void *done_event);

/* Gives a batch back to its stream. */
static enum fdsl_status give_back(const struct fdsl_trainer *self, struct fdsl_batch *batch)
{
    return fdsl_batch_release(batch, self->stream_device < 0 ? NULL : self->bridge);
}

/* Opens data, variant and trainer. Collective. */
static enum status open_trainer(void *context)
{
    struct fdsl_trainer *self = context;
    void *input = NULL;
    enum status status = workload_train.open(&self->options, &self->parameters, &self->partition, &input);
    self->input = input;
    if (status == STATUS_OK && workload_train.mix.open(input))
        status = status_set(STATUS_USAGE,
                            "--mix: synth:auto needs measurements, which only the program does; give "
                            "weights, or resume from a checkpoint of the program");
    return comm_agree(status);
}

static enum status open_all(const struct fdsl_trainer_config *config, struct fdsl_trainer *self)
{
    const char *name = config->variant ? config->variant : "auto";
    uint32_t rank, ranks;
    TRY(lib_threads("threads", config->threads, &self->resources.threads));
    self->resources.device = config->device;
    TRY(lib_ranks_open(config, &rank, &ranks));
    self->partition = (struct partition){.rank = rank, .ranks = ranks};
    self->given.context = self;
    self->given.release = release;
    enum status status = parse(config, self);
    if (status == STATUS_OK && !variant_is_auto(name)) { /* a wrong option is found before data are read */
        status = workload_train.validate(&self->options, &self->parameters, &self->partition);
        if (status == STATUS_OK)
            status = choose(name, self);
        self->entry = NULL;
    }
    TRY(comm_agree(status));
    TRY(check_alike(self));
    TRY(lib_on_threads(self->resources.threads, open_trainer, self));
    TRY(comm_check_same(workload_train.ranks.identity(self->input), "data", "give all ranks the same files"));
    TRY(comm_agree(choose(name, self)));
    const char *chosen = self->entry->name;
    TRY(comm_check_same(fnv_add(FNV_BEGIN, chosen, strlen(chosen)), "variant",
                        "give all ranks the same variant"));
    self->device = strcmp(self->entry->variant->platform, "cuda") == 0 ? config->device : FDSL_CPU;
    if (self->stream && self->stream_device >= 0 && self->stream_device != self->device)
        TRY(comm_agree(status_set(STATUS_USAGE,
                                  "stream: it is on CUDA device %d, but the trainer is on %s; open both on "
                                  "one device, or the stream on the CPU",
                                  self->stream_device, self->device < 0 ? "the CPU" : "another one")));
    TRY(comm_agree(open_device(self)));
    return comm_agree(self->entry->variant->setup(&self->resources, self->input, &self->state));
}

static void close_all(struct fdsl_trainer *self)
{
    if (self->state)
        self->entry->variant->teardown(self->state);
    if (self->held)
        (void)give_back(self, self->held);
    for (int i = 0; i < SLOTS; i++) {
        if (self->slots[i].samples)
            device_free(self->device, self->slots[i].samples);
        device_event_destroy(self->device, self->slots[i].taken);
    }
    device_event_destroy(self->device, self->ready);
    device_stream_destroy(self->device, self->bridge);
    if (self->input)
        workload_train.close(self->input);
    options_free(&self->options);
    for (int i = 0; i < self->argc; i++)
        free(self->argv[i]);
    free(self->argv);
    free(self->labels);
    free(self->rows);
    free(self->logits);
    free(self);
    lib_ranks_close();
    atomic_store(&user, 0);
}

enum fdsl_status fdsl_trainer_open(const struct fdsl_trainer_config *config, struct fdsl_trainer **trainer)
{
    struct environment before;
    status_forget_warnings();
    if (!trainer)
        return lib_invalid("trainer: it is NULL");
    *trainer = NULL;
    if (lib_check_struct("config", config, sizeof *config) != STATUS_OK)
        return lib_relay(STATUS_USAGE);
    int other = 0;
    if (!atomic_compare_exchange_strong(&user, &other, (int)getpid()))
        return lib_invalid(
            other == (int)getpid()
                ? "trainer: another one is open in this process; close it first, or use another process"
                : "trainer: this process was forked while one was open; fork before, or start a new process");
    other = 0;
    if (!atomic_compare_exchange_strong(&opener, &other, (int)getpid()) && other != (int)getpid()) {
        atomic_store(&user, 0);
        return lib_invalid(
            "trainer: this process was forked after its parent had opened one; fork before, or start a new "
            "process");
    }
    struct fdsl_trainer *self = calloc(1, sizeof *self);
    enum status status = ALLOCATED(self, "out of memory");
    if (!self) {
        atomic_store(&user, 0);
        return lib_relay(status);
    }
    self->process = getpid();
    self->latest =
        (struct train_epoch){.loss = NAN, .train_accuracy = NAN, .test = {NAN, NAN, NAN}, .epoch_s = NAN};
    status = lib_enter(&before);
    if (status == STATUS_OK)
        status = open_all(config, self);
    if (status != STATUS_OK) {
        const struct failure failure = status_save(status);
        close_all(self);
        (void)status_restore(&failure);
    } else
        *trainer = self;
    lib_leave(&before);
    return relay(status);
}

void fdsl_trainer_close(struct fdsl_trainer *trainer)
{
    struct environment before;
    if (!trainer || trainer->process != getpid())
        return;
    (void)lib_enter(&before);
    close_all(trainer);
    lib_leave(&before);
}

/* ---- Calls ---- */

/* Begins a call on a trainer. */
static enum status begin(const struct fdsl_trainer *trainer, struct environment *before)
{
    *before = (struct environment){.device = -1};
    status_forget_warnings();
    TRY(lib_check_given("trainer", trainer));
    if (trainer->process != getpid())
        return status_set(STATUS_FAILED,
                          "trainer: it was opened before fork(); use it in the process that opened it");
    if (trainer->failed)
        return status_restore(&trainer->failure);
    return lib_enter(before);
}

/* Ends a call that trains. After a failure of a step, later calls return it again. */
static enum fdsl_status end(struct fdsl_trainer *trainer, struct environment *before, enum status status,
                            bool trained)
{
    if (status != STATUS_OK && trained && !trainer->failed) {
        trainer->failure = status_save(status);
        trainer->failed = true;
    }
    lib_leave(before);
    return relay(status);
}

static uint64_t count_parameters(const struct model *model)
{
    uint64_t count = 0;
    for (uint32_t t = 0; t < model->tensor_count; t++)
        count += model->tensors[t].is_statistic ? 0 : model->tensors[t].values;
    return count;
}

enum fdsl_status fdsl_trainer_describe(const struct fdsl_trainer *trainer, struct fdsl_trainer_info *info)
{
    struct environment before;
    struct trainer_position position;
    enum status status = begin(trainer, &before);
    if (status == STATUS_OK)
        status = lib_check_struct("info", info, sizeof *info);
    if (status == STATUS_OK) {
        const struct train_epoch *latest = &trainer->latest;
        trainer_position(trainer->state, &position);
        *info = (struct fdsl_trainer_info){.size = sizeof *info,
                                           .variant = trainer->entry->name,
                                           .parameters = count_parameters(&trainer->input->model),
                                           .memory_bytes = position.memory_bytes,
                                           .classes = trainer->input->data.classes,
                                           .epoch = position.epoch,
                                           .epochs = position.epochs,
                                           .step = position.step,
                                           .steps = position.steps,
                                           .batch = position.samples,
                                           .train_loss = latest->loss,
                                           .train_accuracy = latest->train_accuracy,
                                           .test_loss = latest->test.loss,
                                           .test_accuracy = latest->test.accuracy,
                                           .epoch_s = latest->epoch_s};
    }
    lib_leave(&before);
    return relay(status);
}

/* ---- Batches that are handed over ---- */

/* Gives the batch of the step back to the stream. */
static enum status release_held(struct fdsl_trainer *self)
{
    struct fdsl_batch *held = self->held;
    self->held = NULL;
    return held && give_back(self, held) != FDSL_OK ? status_set(STATUS_FAILED, "%s", fdsl_error())
                                                    : STATUS_OK;
}

/* Implements given.release. An engine on the CPU calls it in the next step; advance() has given the batch
 * back before. */
static enum status release(void *context, void *done_event)
{
    struct fdsl_trainer *self = context;
    if (self->device < 0)
        return STATUS_OK;
    if (self->at_caller)
        return device_event_wait(self->device, done_event, self->caller_stream);
    TRY(device_event_wait(self->device, done_event, self->bridge));
    if (self->slots[self->turn].used)
        TRY(device_event_record(self->device, &self->slots[self->turn].taken, self->bridge));
    return release_held(self);
}

/* Copies samples of host memory to device memory, which the step before the previous one has read. */
static enum status copy_in(struct fdsl_trainer *self, const void *from, uint32_t count)
{
    self->turn = (self->turn + 1) % SLOTS;
    struct slot *slot = &self->slots[self->turn];
    if (!slot->samples)
        TRY(device_alloc(self->device, self->parameters.job.batch * self->sample_bytes, &slot->samples));
    slot->used = true;
    if (slot->taken)
        TRY(device_event_wait(self->device, slot->taken, self->bridge));
    TRY(device_copy(self->device, slot->samples, from, count * self->sample_bytes, self->bridge));
    self->given.values = slot->samples;
    return STATUS_OK;
}

/* Checks the labels of a batch in host memory, and copies them. */
static enum status take_labels(struct fdsl_trainer *self, const int64_t *labels, uint32_t count)
{
    const uint32_t classes = self->given.classes;
    for (uint32_t i = 0; i < count; i++) {
        if (labels && (labels[i] < -1 || labels[i] >= (int64_t)classes))
            return status_set(STATUS_USAGE,
                              "labels: sample %" PRIu32 " has the label %" PRId64
                              ", which is not below the number "
                              "of classes, %" PRIu32,
                              i, labels[i], classes);
        self->labels[i] = labels ? (int32_t)labels[i] : 0;
    }
    return STATUS_OK;
}

/* Checks multi-hot labels of the caller, which are in host memory. */
static enum status check_rows(const struct fdsl_trainer *self, const uint8_t *rows, uint32_t count)
{
    const uint32_t classes = self->given.classes;
    for (uint32_t i = 0; i < count; i++, rows += classes) {
        uint8_t any = 0, all = UINT8_MAX;
        for (uint32_t k = 0; k < classes; k++) {
            any |= rows[k];
            all &= rows[k];
        }
        if (any > 1 && all != STREAM_IGNORED)
            return status_set(STATUS_USAGE,
                              "multi_hot: sample %" PRIu32 " has a byte that is neither 0 nor 1; 1 says that "
                              "it has the class, and %d in all bytes that it does not count",
                              i, STREAM_IGNORED);
    }
    return STATUS_OK;
}

/* Copies multi-hot labels from device memory, and waits for them. */
static enum status copy_rows(struct fdsl_trainer *self, uint32_t count, void *cuda_stream)
{
    struct given *given = &self->given;
    const size_t bytes = (size_t)count * given->classes;
    if (!self->rows)
        self->rows = malloc(self->parameters.job.batch * (size_t)given->classes);
    TRY(ALLOCATED(self->rows, "out of memory for multi-hot labels"));
    TRY(device_copy(self->device, self->rows, given->rows, bytes, cuda_stream));
    given->rows = self->rows;
    return STATUS_OK;
}

/* Makes a batch that of the next step. `cuda_stream`: on which it is complete. */
static enum status hand_over(struct fdsl_trainer *self, const struct lib_batch_parts *parts, bool on_device,
                             void *cuda_stream)
{
    struct given *given = &self->given;
    given->count = parts->count;
    given->values = parts->images;
    given->labels = self->labels;
    given->rows = given->multi_hot ? parts->rows : NULL;
    given->share = parts->share;
    given->device_labels = NULL;
    self->slots[0].used = self->slots[1].used = false;
    if (!given->multi_hot && self->device >= 0 && device_has(self->device, parts->labels))
        given->device_labels = parts->labels;
    else
        TRY(take_labels(self, given->multi_hot ? NULL : parts->labels, parts->count));
    if (self->device >= 0 && given->rows && device_has(self->device, given->rows))
        TRY(copy_rows(self, parts->count, cuda_stream));
    if (given->rows && !self->stream)
        TRY(check_rows(self, given->rows, parts->count));
    if (self->device < 0)
        return STATUS_OK;
    if (!on_device) {
        TRY(copy_in(self, parts->images, parts->count));
        cuda_stream = self->bridge;
    }
    TRY(device_event_record(self->device, &self->ready, cuda_stream));
    given->ready = self->ready;
    return STATUS_OK;
}

/* Takes the batch of the next step from the stream. */
static enum fdsl_status take_streamed(struct fdsl_trainer *self, const struct trainer_position *at)
{
    struct lib_batch_parts parts;
    enum fdsl_status result = FDSL_OK;
    if (release_held(self) != STATUS_OK) /* of a step that failed */
        return lib_relay(STATUS_FAILED);
    if (self->seeks)
        result = fdsl_stream_seek(self->stream, at->epoch, at->step);
    if (result != FDSL_OK)
        return result;
    self->seeks = false;
    void *const bridge = self->stream_device < 0 ? NULL : self->bridge;
    do
        result = fdsl_stream_next(self->stream, bridge, &self->held);
    while (result == FDSL_END);
    if (result != FDSL_OK)
        return result;
    lib_batch_parts(self->held, &parts);
    if (parts.epoch != at->epoch || parts.step != at->step)
        return lib_invalid("stream: it is not at the step of the trainer; take no batches from it yourself");
    self->at_caller = false;
    const enum status status = hand_over(self, &parts, self->stream_device >= 0, bridge);
    self->seeks = status != STATUS_OK; /* after a failure, the next call takes this batch again */
    return lib_relay(status);
}

/* ---- Steps ---- */

/* Ends an epoch whose steps were passed to the engine. Collective. */
static enum status end_epoch(struct fdsl_trainer *self)
{
    enum status status;
    TRY(trainer_finish(self->state, &self->latest));
    self->epochs_run++;
    status = comm_rank() == 0 ? trainer_keep(self->input, self->state, "") : STATUS_OK;
    TRY(comm_agree(status));
    if (!trainer_more(self->input, self->state))
        status = trainer_end(self->input, self->state, self->epochs_run);
    return comm_agree(status);
}

static enum status advance(struct fdsl_trainer *self, uint32_t count)
{
    TRY(trainer_advance(self->state, count));
    if (self->device < 0) /* the steps have ended */
        TRY(release_held(self));
    return trainer_left(self->state) == 0 ? end_epoch(self) : STATUS_OK;
}

enum fdsl_status fdsl_trainer_step(struct fdsl_trainer *trainer, uint32_t count)
{
    struct environment before;
    enum status status = begin(trainer, &before);
    if (status == STATUS_OK && trainer->hands_over && !trainer->stream)
        status = status_set(STATUS_USAGE, "trainer: it trains on batches that are handed over; call "
                                          "fdsl_trainer_step_batch()");
    if (status != STATUS_OK)
        return end(trainer, &before, status, false);
    if (!trainer_more(trainer->input, trainer->state)) {
        lib_leave(&before);
        return FDSL_END;
    }
    const uint32_t left = trainer_left(trainer->state);
    count = count < left ? count : left;
    for (uint32_t i = 0; trainer->stream && i < count && status == STATUS_OK; i++) {
        struct trainer_position at;
        trainer_position(trainer->state, &at);
        const enum fdsl_status result = take_streamed(trainer, &at);
        if (result != FDSL_OK) {
            lib_leave(&before);
            return result;
        }
        status = advance(trainer, 1);
    }
    if (!trainer->stream)
        status = advance(trainer, count);
    return end(trainer, &before, status, true);
}

/* Checks a batch of the caller. Sets `*on_device`. */
static enum status check_batch(const struct fdsl_trainer *self, const struct fdsl_trainer_batch *batch,
                               bool *on_device, struct lib_batch_parts *parts)
{
    const struct given *given = &self->given;
    TRY(lib_check_given("batch", batch));
    TRY(lib_check_given("images", batch->images));
    TRY(lib_check_struct("batch", batch, sizeof *batch));
    if (!self->hands_over)
        return status_set(STATUS_USAGE,
                          "batch: the trainer has its own samples; open it with the field samples");
    TRY(given->multi_hot ? lib_check_given("multi_hot", batch->multi_hot)
                         : lib_check_given("labels", batch->labels));
    if (!(batch->share >= 0 && batch->share <= 1) ||
        (!given->mixed && batch->share != 0 && batch->share != 1))
        return status_set(STATUS_USAGE, "share: %g is %s", (double)batch->share,
                          given->mixed ? "out of range; it must be 0 to 1"
                                       : "not 1, but the trainer was opened without mixed");
    *on_device = self->device >= 0 && device_has(self->device, batch->images);
    if (*on_device && (uintptr_t)batch->images % ALIGNMENT != 0)
        return status_set(STATUS_USAGE, "images: %p is not aligned to %d bytes", batch->images, ALIGNMENT);
    *parts = (struct lib_batch_parts){.images = batch->images,
                                      .labels = batch->labels,
                                      .rows = batch->multi_hot,
                                      .count = batch->count,
                                      .share = batch->share > 0 ? batch->share : 1};
    return STATUS_OK;
}

enum fdsl_status fdsl_trainer_step_batch(struct fdsl_trainer *trainer, const struct fdsl_trainer_batch *batch,
                                         void *cuda_stream)
{
    struct environment before;
    struct lib_batch_parts parts;
    struct trainer_position at;
    bool on_device;
    enum status status = begin(trainer, &before);
    if (status == STATUS_OK)
        status = check_batch(trainer, batch, &on_device, &parts);
    if (status == STATUS_OK && trainer->stream)
        status = status_set(STATUS_USAGE, "batch: the trainer takes its batches from a stream");
    if (status != STATUS_OK)
        return end(trainer, &before, status, false);
    if (!trainer_more(trainer->input, trainer->state)) {
        lib_leave(&before);
        return FDSL_END;
    }
    trainer_position(trainer->state, &at);
    if (parts.count != at.samples)
        status = status_set(STATUS_USAGE,
                            "count: the batch has %" PRIu32 " samples, but step %" PRIu32 " of %" PRIu32
                            " has %" PRIu32 " on this rank",
                            parts.count, at.step + 1, at.steps, at.samples);
    if (status == STATUS_OK)
        status = hand_over(trainer, &parts, on_device, cuda_stream);
    if (status != STATUS_OK)
        return end(trainer, &before, status, false);
    trainer->at_caller = on_device;
    trainer->caller_stream = cuda_stream;
    return end(trainer, &before, advance(trainer, 1), true);
}

/* ---- Results ---- */

enum fdsl_status fdsl_trainer_read(struct fdsl_trainer *trainer, struct fdsl_trainer_score *score)
{
    struct environment before;
    struct train_totals totals;
    enum status status = begin(trainer, &before);
    if (status == STATUS_OK)
        status = lib_check_struct("score", score, sizeof *score);
    if (status != STATUS_OK)
        return end(trainer, &before, status, false);
    status = trainer_read(trainer->state, &totals);
    if (status == STATUS_OK)
        *score = (struct fdsl_trainer_score){.size = sizeof *score,
                                             .samples = totals.samples,
                                             .loss = totals.loss / (double)totals.samples,
                                             .accuracy = (double)totals.correct / (double)totals.samples,
                                             .precision = NAN};
    return end(trainer, &before, status, true);
}

static void set_score(struct fdsl_trainer_score *score, uint64_t samples, const struct judgement *judged)
{
    *score = (struct fdsl_trainer_score){.size = sizeof *score,
                                         .samples = samples,
                                         .loss = judged->loss,
                                         .accuracy = judged->accuracy,
                                         .precision = judged->precision};
}

enum fdsl_status fdsl_trainer_evaluate(struct fdsl_trainer *trainer, struct fdsl_trainer_score *score)
{
    struct environment before;
    struct judgement judged;
    enum status status = begin(trainer, &before);
    if (status == STATUS_OK)
        status = lib_check_struct("score", score, sizeof *score);
    if (status == STATUS_OK && trainer->hands_over)
        status = status_set(STATUS_USAGE, "trainer: it has no test set; call fdsl_trainer_evaluate_batch()");
    if (status != STATUS_OK)
        return end(trainer, &before, status, false);
    status = trainer_evaluate(trainer->state, &judged);
    if (status == STATUS_OK)
        set_score(score, trainer->input->data.sets[DATA_TEST].count, &judged);
    return end(trainer, &before, status, true);
}

/* Evaluates a batch whose samples were copied to trainer_test_samples(). */
static enum status judge(struct fdsl_trainer *self, const struct lib_batch_parts *parts, float *logits,
                         struct fdsl_trainer_score *score)
{
    const struct data *data = &self->input->data;
    const uint32_t classes = data->classes, words = multi_hot_words(classes);
    FREED uint32_t *labels = malloc(parts->count * sizeof *labels);
    FREED uint32_t *rows = self->given.multi_hot ? malloc((size_t)parts->count * words * sizeof *rows) : NULL;
    struct judgement judged;
    TRY(ALLOCATED(labels && (rows || !self->given.multi_hot), "out of memory for labels"));
    for (uint32_t i = 0; i < parts->count; i++) {
        labels[i] = rows ? i : (uint32_t)self->labels[i];
        if (self->labels[i] < 0 || (rows && parts->rows[(size_t)i * classes] == STREAM_IGNORED))
            return status_set(STATUS_USAGE, "labels: sample %" PRIu32 " has none; leave it out", i);
        for (uint32_t w = 0; rows && w < words; w++)
            rows[(size_t)i * words + w] = multi_hot_pack(parts->rows + (size_t)i * classes, classes, w);
    }
    const struct data_set set = {.count = parts->count, .labels = labels, .multi_hot = rows};
    TRY(trainer_evaluate_given(self->state, &set, logits, &judged));
    set_score(score, parts->count, &judged);
    return STATUS_OK;
}

static enum status evaluate_batch(struct fdsl_trainer *self, const struct lib_batch_parts *parts,
                                  void *cuda_stream, float *logits, struct fdsl_trainer_score *score)
{
    const uint32_t most = self->input->data.sets[DATA_TEST].count;
    const size_t bytes = parts->count * self->sample_bytes;
    TRY(lib_check_count("count", parts->count, 1, most));
    if (parts->share < 1)
        return status_set(STATUS_USAGE,
                          "share: samples that are mixed cannot be evaluated; give them unmixed");
    const bool multi_hot = self->given.multi_hot;
    if (self->device >= 0 &&
        device_has(self->device, multi_hot ? (const void *)parts->rows : (const void *)parts->labels))
        return status_set(STATUS_USAGE, "%s: they are in device memory; copy them to the host",
                          multi_hot ? "multi_hot" : "labels");
    TRY(take_labels(self, multi_hot ? NULL : parts->labels, parts->count));
    if (multi_hot)
        TRY(check_rows(self, parts->rows, parts->count));
    if (!logits && !self->logits)
        self->logits = malloc((size_t)most * self->given.classes * sizeof *logits);
    TRY(ALLOCATED(logits || self->logits, "out of memory for logits"));
    void *samples = trainer_test_samples(self->state);
    if (self->device < 0)
        memcpy(samples, parts->images, bytes);
    else
        TRY(device_copy(self->device, samples, parts->images, bytes, cuda_stream));
    return judge(self, parts, logits ? logits : self->logits, score);
}

enum fdsl_status fdsl_trainer_evaluate_batch(struct fdsl_trainer *trainer,
                                             const struct fdsl_trainer_batch *batch, void *cuda_stream,
                                             float *logits, struct fdsl_trainer_score *score)
{
    struct environment before;
    struct lib_batch_parts parts;
    bool on_device;
    enum status status = begin(trainer, &before);
    if (status == STATUS_OK)
        status = lib_check_struct("score", score, sizeof *score);
    if (status == STATUS_OK)
        status = check_batch(trainer, batch, &on_device, &parts);
    if (status == STATUS_OK)
        status = evaluate_batch(trainer, &parts, cuda_stream, logits, score);
    return end(trainer, &before, status, false);
}

/* ---- Files ---- */

/* Calls a function of the trainer with a path. */
static enum fdsl_status with_path(struct fdsl_trainer *trainer, const char *name, const char *path,
                                  enum status (*call)(void *state, const char *path))
{
    struct environment before;
    enum status status = begin(trainer, &before);
    if (status == STATUS_OK)
        status = lib_check_given(name, path);
    if (status == STATUS_OK)
        status = call(trainer->state, path);
    return end(trainer, &before, status, false);
}

enum fdsl_status fdsl_trainer_save(struct fdsl_trainer *trainer, const char *folder)
{
    return with_path(trainer, "folder", folder, trainer_save);
}

enum fdsl_status fdsl_trainer_load(struct fdsl_trainer *trainer, const char *folder)
{
    const enum fdsl_status result = with_path(trainer, "folder", folder, trainer_load);
    if (result == FDSL_OK)
        trainer->seeks = true;
    return result;
}

enum fdsl_status fdsl_trainer_export(struct fdsl_trainer *trainer, const char *path)
{
    return with_path(trainer, "path", path, trainer_export);
}

enum fdsl_status fdsl_trainer_import(struct fdsl_trainer *trainer, const char *path)
{
    return with_path(trainer, "path", path, trainer_import);
}
