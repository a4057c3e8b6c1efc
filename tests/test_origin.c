/* Origins of samples, opened in the program. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "data/npy.h"
#include "data/origin.h"

TestSuite(origin, .timeout = 60);

/* Shards and chunks are cut by these sizes. */
Test(origin, sample_bytes_is_the_size_of_a_tensor_and_its_header)
{
    static const char *const encode[] = {"--encode", "npy", NULL}, *const none[] = {NULL};
    static const struct {
        const char *name;
        const char *const *words;
    } origins[] = {{"counter", none}, {"digits", encode}, {"clips", none}, {"synth", encode}};
    const struct resources one = {.threads = 1};
    for (size_t i = 0; i < COUNT_OF(origins); i++) {
        struct origin_reader reader;
        struct origin_sample sample = {0};
        cr_assert(origin_open(origins[i].name, origins[i].words, &one, &reader) == STATUS_OK, "%s",
                  status_text());
        cr_assert(reader.origin->make(reader.state, 0, 1, &sample) == STATUS_OK, "%s", status_text());
        const struct origin_member *member = origin_member(&sample, "npy");
        cr_assert_not_null(member, "%s", origins[i].name);
        cr_expect(reader.facts.sample_bytes >= member->size &&
                      reader.facts.sample_bytes <= member->size + NPY_HEADER_MAX,
                  "%s: %llu bytes, not %zu", origins[i].name, (unsigned long long)reader.facts.sample_bytes,
                  member->size);
        for (size_t m = 0; m < sample.count; m++)
            free(sample.members[m].bytes);
        origin_close(&reader);
    }
}
