#include "train/memory.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/options.h"

#define LIMIT_LEAST_BYTES 1024.0
#define LIMIT_MOST_BYTES  0x1p60

/* ---- Accounts ---- */

uint64_t memory_total(const struct memory_account *account)
{
    uint64_t total = 0;
    for (int part = 0; part < MEMORY_PARTS; part++)
        total += account->bytes[part];
    return total;
}

enum status memory_take(struct memory_account *account, enum memory_part part, uint64_t bytes)
{
    if (!account)
        return STATUS_OK;
    const uint64_t used = memory_total(account);
    if (account->limit_bytes && !account->plans && bytes > 0 && used + bytes > account->limit_bytes)
        return status_set(STATUS_TOO_LARGE,
                          "--memory-limit: %.3f GB in use, %.3f GB more needed, but the limit is %.3f GB; "
                          "lower --batch",
                          1e-9 * (double)used, 1e-9 * (double)bytes, 1e-9 * (double)account->limit_bytes);
    account->bytes[part] += bytes;
    return STATUS_OK;
}

/* Prints a row of the table. */
static void print_row(const char *name, uint64_t planned, const uint64_t *allocated, const char *note)
{
    char second[64] = "";
    if (allocated)
        snprintf(second, sizeof second, " %12.1f", 1e-6 * (double)*allocated);
    status_say("  %-12s %11.1f%s%s", name, 1e-6 * (double)planned, second, note);
}

void memory_print(const char *title, const struct memory_account *planned,
                  const struct memory_account *allocated, uint64_t measured_bytes)
{
    static const char *const names[MEMORY_PARTS] = {
        [MEMORY_ACTIVATIONS] = "activations", [MEMORY_PARAMETERS] = "parameters",
        [MEMORY_GRADIENTS] = "gradients",     [MEMORY_OPTIMIZER] = "optimizer",
        [MEMORY_WORKSPACE] = "workspace",     [MEMORY_SAMPLES] = "samples",
        [MEMORY_STREAM] = "stream",           [MEMORY_CONTEXT] = "context"};
    const uint64_t planned_bytes = memory_total(planned), sum = allocated ? memory_total(allocated) : 0;
    char note[96] = "";
    if (allocated)
        snprintf(note, sizeof note, "  (%.1f MB in use: %+.1f %% of the plan)", 1e-6 * (double)measured_bytes,
                 100 * ((double)measured_bytes / (double)planned_bytes - 1));
    status_say("%s", title);
    status_say("  %-12s %11s%s", "", "planned MB", allocated ? " allocated MB" : "");
    for (int part = 0; part < MEMORY_PARTS; part++)
        print_row(names[part], planned->bytes[part], allocated ? &allocated->bytes[part] : NULL, "");
    print_row("total", planned_bytes, allocated ? &sum : NULL, note);
}

uint64_t memory_largest_batch(uint64_t small, uint64_t small_bytes, uint64_t large, uint64_t large_bytes,
                              uint64_t limit_bytes)
{
    if (large_bytes <= small_bytes || large <= small)
        return large_bytes <= limit_bytes ? large : small_bytes <= limit_bytes ? small : 0;
    const double each = (double)(large_bytes - small_bytes) / (double)(large - small),
                 fixed = (double)small_bytes - each * (double)small,
                 batch = floor(((double)limit_bytes - fixed) / each);
    return batch >= 1 ? (uint64_t)batch : 0;
}

/* ---- --memory-limit ---- */

enum status memory_limit_parse(const char *text, uint32_t ranks, uint64_t *limits)
{
    uint32_t count = 0;
    for (const char *at = text; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        char word[32];
        uint64_t bytes;
        if (snprintf(word, sizeof word, "%.*s", (int)strcspn(at, ","), at) >= (int)sizeof word)
            return status_set(STATUS_USAGE, "--memory-limit: '%.80s' is not a size, such as 16G", at);
        TRY(parse_bytes("--memory-limit", word, LIMIT_LEAST_BYTES, LIMIT_MOST_BYTES, &bytes));
        if (count < ranks)
            limits[count] = bytes;
        count++;
    }
    for (uint32_t i = 1; count == 1 && i < ranks; i++)
        limits[i] = limits[0];
    return count == 1 || count == ranks
               ? STATUS_OK
               : status_set(STATUS_USAGE,
                            "--memory-limit %.80s has %" PRIu32 " sizes, but there %s %" PRIu32
                            " rank%s; give one size, or one per rank",
                            text, count, ranks == 1 ? "is" : "are", ranks, ranks == 1 ? "" : "s");
}
