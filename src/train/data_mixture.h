/* Training data that are a mixture of sources (--feed mixed): what --mix says, and the data of each source.
 */
#ifndef FDSL_TRAIN_DATA_MIXTURE_H
#define FDSL_TRAIN_DATA_MIXTURE_H

#include "data/mixture.h"
#include "train/data.h"

#define DATA_MIX_SHARES \
    100 /* --mix synth:auto chooses a share for the other sources in parts of this number */

enum data_mix_labels { DATA_MIX_JOINED, DATA_MIX_OFFSET };

/* The options of a mixture, as texts. */
struct data_mix_texts {
    const char *mix, *epoch, *weights_at; /* `epoch` and `weights_at`: NULL if not given */
    int labels;                           /* enum data_mix_labels */
    uint64_t
        share; /* with synth:auto: the share of the other sources, of DATA_MIX_SHARES; 0: not chosen yet */
};

/* The parsed texts. */
struct data_mix {
    uint32_t count, named;
    bool automatic; /* the weight of `synth` is auto */
    struct {
        char name[MIXTURE_NAME];
        char *path;      /* owned; NULL: the source is `load` or `synth` */
        uint32_t weight; /* in units of 1/10000 */
    } sources[MIXTURE_SOURCES];
    uint32_t generated; /* index of `synth`; MIXTURE_SOURCES: none */
    uint32_t phase_count;
    struct mixture_weights phases[MIXTURE_PHASES];
};

struct data_mixture {
    struct data_mix mix;
    bool chosen; /* with synth:auto: the share is that of all training */
    struct mixture_request request;
    struct mixture plan; /* data_mixture_plan() */
    struct data sources[MIXTURE_SOURCES];
};

FDSL_C_BEGIN

/* Parses the texts. STATUS_USAGE with the option. The caller frees `mix`, even after a failure. */
enum status data_mix_parse(const struct data_mix_texts *texts, struct data_mix *mix);
void data_mix_free(struct data_mix *mix);

/* Returns the index of a source by its name, or MIXTURE_SOURCES. */
uint32_t data_mix_find(const struct data_mix *mix, const char *name);

/* Opens the data of all sources; the test set is that of the source that ends an epoch. For data_open(). */
enum status data_mixture_open(const struct data_request *request, struct data *data);
void data_mixture_close(struct data *data);

/* With synth:auto: sets the share of the sources that are read, from 1 to DATA_MIX_SHARES. It changes the
 * number of samples of an epoch. data_mixture_plan() must follow. */
enum status data_mixture_set_share(struct data *data, uint32_t share);

/* Sets what decides the order of the samples. Call it again after each change. The streams of the data must
 * be closed. */
enum status data_mixture_plan(struct data *data, uint64_t seed, uint32_t batch, bool drop_last);

/* Writes "load=0.6 synth=0.4": the share of each source at the beginning. */
void data_mixture_shares(const struct data *data, char *text, size_t size);

/* Opens the stream of a source. `plan` is that of mixture_plan_of(). */
enum status data_mixture_source(const struct data *data, uint32_t source, const struct stream_plan *plan,
                                const struct data_stream_request *request, struct stream **stream);

/* Returns the label of a sample that is generated; `state` is a const struct data * of the source. */
uint64_t data_generated_label(const void *state, uint64_t sample);

/* Implements data_stream() for a mixture, in host memory. */
enum status data_mixture_stream(const struct data *data, const struct data_stream_request *request,
                                struct stream **stream);

FDSL_C_END

#endif
