/* Tests sample sources by themselves, without --prepare. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "core/dtype.h"
#include "data/npy.h"
#include "data/source.h"

TestSuite(source, .timeout = 60);

/* The sizes of samples that sources report must be correct, because --prepare computes the number of shards
 * and the size of chunks from them. */
Test(source, sample_bytes_is_the_size_of_a_tensor_and_its_header)
{
    const struct {
        const char *name;
        const void *parameters;
    } sources[] = {{"counter", &(const struct counter_values){.shape = "3,8,64,64", .type = DTYPE_F16}},
                   {"digits", &(const struct generated_values){.encoding = SOURCE_NPY}},
                   {"clips", &(const struct generated_values){.encoding = SOURCE_NPY}},
                   {"synth", &(const struct synth_values){.encoding = SOURCE_NPY, .classes = 2, .res = 512}}};
    for (size_t i = 0; i < COUNT_OF(sources); i++) {
        struct source_reader reader;
        struct source_sample sample = {0};
        const struct source_request request = {.parameters = sources[i].parameters,
                                               .resources = {.threads = 1}};
        cr_assert(source_open(sources[i].name, &request, &reader) == STATUS_OK, "%s", status_text());
        cr_assert(source_make(reader.source, reader.state, 0, 1, &sample) == STATUS_OK, "%s", status_text());
        const struct source_member *member = source_member(&sample, "npy");
        cr_assert_not_null(member, "%s", sources[i].name);
        cr_expect(reader.facts.sample_bytes >= member->size &&
                      reader.facts.sample_bytes <= member->size + NPY_HEADER_MAX,
                  "%s: %llu bytes, not %zu", sources[i].name, (unsigned long long)reader.facts.sample_bytes,
                  member->size);
        for (size_t m = 0; m < sample.count; m++)
            free(sample.members[m].bytes);
        source_close(&reader);
    }
}
