/* A mixture as a source of streams (mix.c). */
#ifndef FDSL_LIB_MIX_H
#define FDSL_LIB_MIX_H

#include "data/mixture.h"
#include "lib/call.h"

struct fdsl_source;

struct source_mixture {
    struct mixture_request request; /* without what a stream's configuration decides: the orders, the seed and
                                       the batch */
    struct fdsl_source *sources[MIXTURE_SOURCES]; /* each is used by the mixture */
    uint32_t classes[MIXTURE_SOURCES];            /* of each source; 0: not known */
    uint32_t positions;                           /* samples of an epoch */
    const char **class_names;                     /* owned; NULL: those of a source, or none */
};

/* Ignores NULL. */
void mix_free(struct source_mixture *mix);

/* Sets the order of the sources from a stream's configuration. */
static inline struct mixture_request mix_request(const struct source_mixture *mix,
                                                 const struct fdsl_stream_config *config)
{
    struct mixture_request request = mix->request;
    request.seed = config->seed;
    request.batch = config->batch_size * config->world_size;
    request.drop_last = config->drop_last;
    for (uint32_t k = 0; k < request.count; k++)
        if (request.sources[k].samples) {
            request.sources[k].lanes = config->lanes;
            request.sources[k].shuffle = config->shuffle ? config->shuffle_buffer : 0;
        }
    return request;
}

#endif
