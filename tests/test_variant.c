/* Tests the table of variants: names, availability, and the choice of --variant. */
#include <criterion/criterion.h>
#include <criterion/redirect.h>

#include <stdlib.h>
#include <string.h>

#include "core/variant.h"
#include "core/workload.h"
#include "run/report.h"

TestSuite(variant, .timeout = 60);

static const struct variant_entry **chosen;
static size_t count;

static void expect_refusal(const char *list, const char *workload, const char *words)
{
    static const struct variant_entry *unset;
    chosen = &unset;
    cr_expect(variant_select(list, workload, &chosen, &count) == STATUS_USAGE, "'%s'", list);
    cr_expect(strstr(status_text(), words), "'%s': '%s' is not in: %s", list, words, status_text());
    cr_expect_null(chosen, "'%s': a list was returned, although the call failed", list);
}

Test(variant, the_table_is_valid)
{
    cr_expect(variant_table_check() == STATUS_OK, "%s", status_text());
    cr_assert(variant_count > 0);
    for (size_t i = 0; i < variant_count; i++) {
        const struct variant_entry *entry = &variant_table[i];
        cr_expect_not_null(workload_find(entry->workload), "%s", entry->name);
        cr_expect(entry->summary && *entry->summary, "%s", entry->name);
        cr_expect(strspn(entry->name, "abcdefghijklmnopqrstuvwxyz0123456789-") == strlen(entry->name), "'%s'",
                  entry->name);
        for (size_t j = 0; j < i; j++)
            cr_expect_str_neq(entry->name, variant_table[j].name);
        if (entry->variant)
            cr_expect(strcmp(entry->variant->platform, "cpu") == 0 ||
                          strcmp(entry->variant->platform, "cuda") == 0,
                      "%s", entry->name);
    }
}

Test(variant, cpu_variants_have_an_instruction_set)
{
    for (size_t i = 0; i < variant_count; i++) {
        const struct variant_entry *entry = &variant_table[i];
        bool loads = strcmp(entry->workload, "load") == 0;
        if (!entry->variant)
            continue;
        if (loads || strcmp(entry->variant->platform, "cuda") == 0) {
            cr_expect_null(entry->variant->instruction_set, "%s", entry->name);
            continue;
        }
        cr_assert_not_null(entry->variant->instruction_set, "%s", entry->name);
        const char *name = entry->variant->instruction_set();
        cr_expect(strcmp(name, "scalar") == 0 || (!strstr(entry->name, "naive") &&
                                                  (strcmp(name, "avx2") == 0 || strcmp(name, "avx512") == 0)),
                  "%s: %s", entry->name, name);
    }
}

Test(variant, every_workload_can_be_found_and_has_variants)
{
    for (size_t w = 0; workload_table[w]; w++) {
        const char *name = workload_table[w]->name;
        cr_expect(workload_find(name) == workload_table[w]);
        cr_expect(variant_select("all", name, &chosen, &count) == STATUS_OK);
        cr_expect(count > 0, "%s", name);
        free(chosen);
    }
    cr_expect_null(workload_find("snth"));
}

Test(variant, is_found_by_its_exact_name)
{
    for (size_t i = 0; i < variant_count; i++)
        cr_expect(variant_find(variant_table[i].name) == &variant_table[i]);
    cr_expect_null(variant_find("NAIVE"));
    cr_expect_null(variant_find("naiv"));
    cr_expect_null(variant_find(""));
    cr_expect_null(variant_find("all"));
}

Test(variant, naive_is_available_and_missing_variants_say_so)
{
    const struct resources resources = {.threads = 1};
    cr_expect(variant_available(variant_find("naive"), &resources) == STATUS_OK);
    for (size_t i = 0; i < variant_count; i++) {
        const struct variant_entry *entry = &variant_table[i];
        if (entry->variant)
            continue;
        cr_expect(variant_available(entry, &resources) == STATUS_UNAVAILABLE, "%s", entry->name);
        cr_expect(strncmp(status_text(), "not built: ", 11) == 0, "%s", status_text());
    }
}

#ifndef HAVE_CUDA
Test(variant, the_reason_names_only_what_the_build_lacks)
{
#ifdef HAVE_XXHASH
#define XXHASH ""
#else
#define XXHASH "no xxHash and "
#endif
    static const char *const cases[][2] = {{"CUDA", "not built: this build has no CUDA"},
                                           {"CUBLAS", "not built: this build has no CUDA"},
                                           {"CUDNN", "not built: this build has no CUDA"},
                                           {"XXHASH_CUDA", "not built: this build has " XXHASH "no CUDA"},
                                           {"XXHASH_CUFILE", "not built: this build has " XXHASH "no CUDA"}};
    const struct resources resources = {.threads = 1};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const struct variant_entry left_out = {"x", "synth", cases[i][0], "", NULL};
        cr_expect(variant_available(&left_out, &resources) == STATUS_UNAVAILABLE);
        cr_expect_str_eq(status_text(), cases[i][1]);
    }
}
#endif

static enum status refuse(const struct resources *resources)
{
    return status_set(STATUS_UNAVAILABLE, "device %d is away", resources->device);
}

Test(variant, the_probe_decides_availability)
{
    const struct variant probed = {.platform = "cpu", .probe = refuse};
    const struct variant_entry entry = {"x", "synth", "NOTHING", "", &probed};
    const struct resources resources = {.threads = 1, .device = 3};
    cr_expect(variant_available(&entry, &resources) == STATUS_UNAVAILABLE);
    cr_expect_str_eq(status_text(), "device 3 is away");
}

Test(variant, selects_variants_in_the_given_order)
{
    cr_assert(variant_select("naive", NULL, &chosen, &count) == STATUS_OK);
    cr_expect(count == 1 && chosen[0] == variant_find("naive"));
    free(chosen);
    cr_assert(variant_select("bat,naive,omp", "synth", &chosen, &count) == STATUS_OK);
    cr_expect(count == 3);
    cr_expect(chosen[0] == variant_find("bat") && chosen[1] == variant_find("naive") &&
              chosen[2] == variant_find("omp"));
    free(chosen);
    cr_assert(variant_select(" naive ,\tomp ", NULL, &chosen, &count) == STATUS_OK, "%s", status_text());
    cr_expect(count == 2 && chosen[0] == variant_find("naive") && chosen[1] == variant_find("omp"));
    free(chosen);
}

Test(variant, all_selects_the_workload_in_table_order)
{
    static const char *const workloads[] = {NULL, "synth"};
    for (size_t w = 0; w < COUNT_OF(workloads); w++) {
        size_t expected = 0;
        cr_assert(variant_select("all", workloads[w], &chosen, &count) == STATUS_OK);
        for (size_t i = 0; i < variant_count; i++)
            if (strcmp(variant_table[i].workload, "synth") == 0) {
                cr_assert(expected < count);
                cr_expect(chosen[expected++] == &variant_table[i]);
            }
        cr_expect(count == expected);
        free(chosen);
    }
}

Test(variant, auto_selects_candidates_of_every_workload_the_best_first)
{
    for (size_t w = 0; workload_table[w]; w++) {
        const char *name = workload_table[w]->name;
        cr_assert(variant_select("auto", name, &chosen, &count) == STATUS_OK, "%s: %s", name, status_text());
        cr_assert(count > 0, "%s", name);
        bool cpu = false; /* no GPU variant may follow one that needs no GPU */
        for (size_t i = 0; i < count; i++) {
            const bool gpu = strstr(chosen[i]->needs, "CU") != NULL;
            cr_expect_str_eq(chosen[i]->workload, name);
            cr_expect(!gpu || !cpu || strcmp(name, "load") == 0, "%s", chosen[i]->name);
            cpu |= !gpu && strcmp(chosen[i]->needs, "MPI") != 0;
        }
        cr_expect(cpu || strcmp(name, "exchange") == 0, "%s has no candidate without a GPU", name);
        free(chosen);
    }
    cr_assert(variant_select("auto", NULL, &chosen, &count) == STATUS_OK);
    cr_expect_str_eq(chosen[0]->workload, "synth");
    free(chosen);
    expect_refusal("auto,naive", NULL, "'auto' cannot be combined with names");
    expect_refusal("naive,auto", "synth", "'auto' cannot be combined with names");
    expect_refusal("aut", "synth", "unknown variant 'aut'; did you mean 'auto'?");
    expect_refusal("al", "synth", "unknown variant 'al'; did you mean 'all'?");
}

Test(variant, a_repeated_name_is_refused)
{
    expect_refusal("naive,naive", NULL, "'naive' is named twice");
    expect_refusal("naive,omp,naive", "synth", "'naive' is named twice");
}

Test(variant, a_variant_of_another_workload_is_refused)
{
    expect_refusal("naive", "load", "'naive' belongs to the workload 'synth', not 'load'");
    expect_refusal("naive", "load", "one workload at a time");
}

Test(variant, an_unknown_name_is_refused_with_the_nearest_one)
{
    expect_refusal("nive", NULL, "unknown variant 'nive'; did you mean 'naive'?");
    expect_refusal("naive,omq", NULL, "unknown variant 'omq'; did you mean 'omp'?");
    expect_refusal("bat-resue", NULL, "did you mean 'bat-reuse'?");
    expect_refusal("zzzzzzzzzz", NULL, "unknown variant 'zzzzzzzzzz'; --list shows them all");
    expect_refusal("naive,all", NULL, "'all' cannot be combined");
    expect_refusal("all,naive", NULL, "'all' cannot be combined");
}

Test(variant, empty_names_are_refused)
{
    static const char *const lists[] = {"", ",naive", "naive,,omp"};
    for (size_t i = 0; i < COUNT_OF(lists); i++)
        expect_refusal(lists[i], NULL, "unknown variant ''");
    expect_refusal("naive,", NULL, "'naive,': a name is missing after the last comma");
    expect_refusal(",", NULL, "a name is missing after the last comma");
    expect_refusal("naive , \t", NULL, "a name is missing after the last comma");
}

#if defined(HAVE_CUDA) && defined(HAVE_XXHASH)
#define SLOWER ", and ops-cuda, ops-fused, train-graph, infer-graph stay slower"
#elif defined(HAVE_CUDA)
#define SLOWER ", and train-graph, infer-graph stay slower"
#else
#define SLOWER ""
#endif

Test(variant, kernels_compiled_at_load_give_a_warning, .init = cr_redirect_stderr)
{
    struct device_info device = {.name = "NVIDIA H200", .architecture = "sm_90", .code_architecture = 90};
    report_compiled_at_load(&device);
    device.code_architecture = 80;
    device.compiled_at_load = true;
    report_compiled_at_load(&device);
    fflush(stderr);
    cr_expect_stderr_eq_str(
        "fdsl-bench: warning: this build has no code for NVIDIA H200 (sm_90): the driver compiles "
        "the CUDA kernels when they are loaded, which delays their first run" SLOWER
        "; build for this GPU with: make CUDA_ARCHS=90\n");
}
