/* Tests how parameters are divided among ranks if the exchange updates them. Every parameter must belong to
 * one rank, and the moments of all ranks must be gathered correctly. Needs no GPU. Skipped if the build has
 * no MPI or mpirun is missing. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "machine/comm.h"
#include "train/exchange.h"

#include "mpirun.h" /* last: its global variables would hide parameters of the headers above */

TestSuite(mpi_updates, .init = start, .fini = stop, .timeout = 400);

#define RANKS_OF_TEST "FDSL_TEST_SHARES" /* environment variable of the ranks */

enum { CHUNK = EXCHANGE_CHUNK_VALUES, VALUES_MAX = 100 * CHUNK };

static const size_t sizes[] = {0, 1, 3, 4, 127, 128, 129, 255, 257, 1021, 4099, 12799, VALUES_MAX};

/* ---- The division ---- */

static bool belongs_to(size_t i, uint32_t rank, uint32_t ranks)
{
    return i / CHUNK % ranks == rank;
}

Test(mpi_updates, counts_and_indices_agree, .init = NULL, .fini = NULL)
{
    for (uint32_t ranks = 1; ranks <= 8; ranks++)
        for (uint32_t rank = 0; rank < ranks; rank++) {
            size_t before = 0;
            for (size_t end = 0; end < VALUES_MAX; end++) {
                cr_assert_eq(exchange_share_before(end, rank, ranks), before, "%zu values, rank %u of %u",
                             end, rank, ranks);
                if (belongs_to(end, rank, ranks))
                    cr_assert_eq(exchange_share_at(before++, rank, ranks), end, "rank %u of %u", rank, ranks);
            }
        }
}

/* A kernel processes four values at a time. The four must belong to the same rank and be consecutive. */
Test(mpi_updates, vectors_of_four_values_have_one_rank, .init = NULL, .fini = NULL)
{
    for (uint32_t ranks = 1; ranks <= 8; ranks++)
        for (uint32_t rank = 0; rank < ranks; rank++)
            for (size_t i = 0; i < 20 * CHUNK; i += 4) {
                size_t at = exchange_share_at(i, rank, ranks);
                cr_assert(at % 4 == 0 && exchange_share_at(i + 3, rank, ranks) == at + 3);
                cr_assert_eq(exchange_share_before(i, rank, ranks) % 4, 0);
            }
}

/* The shares of two ranks in any part of an arena differ by at most one chunk. exchange_share_room() must be
 * enough for the largest share, and less than two chunks above the mean share. */
Test(mpi_updates, parts_are_divided_equally, .init = NULL, .fini = NULL)
{
    for (uint32_t ranks = 1; ranks <= 8; ranks++)
        for (size_t first = 0; first < 10 * CHUNK; first += 32)
            for (size_t n = 0; n < COUNT_OF(sizes); n++) {
                size_t least = SIZE_MAX, most = 0, sum = 0;
                for (uint32_t rank = 0; rank < ranks; rank++) {
                    size_t own = exchange_share_before(first + sizes[n], rank, ranks) -
                                 exchange_share_before(first, rank, ranks);
                    least = own < least ? own : least;
                    most = own > most ? own : most;
                    sum += own;
                }
                cr_assert_eq(sum, sizes[n]);
                cr_assert(most - least <= CHUNK, "%zu %zu", least, most);
                cr_assert(exchange_share_room(sizes[n], ranks) >= exchange_share_before(sizes[n], 0, ranks));
                cr_assert(exchange_share_room(sizes[n], ranks) < sizes[n] / ranks + 2 * CHUNK);
            }
}

/* ---- Gathering ---- */

static float value_at(size_t i)
{
    return i % 5 ? (float)i : -0.f;
}

/* Takes this rank's share of an arena, and gathers the arena from all shares. Returns an exit status. */
static int take_and_collect(size_t values)
{
    static float arena[VALUES_MAX], gathered[VALUES_MAX], own[VALUES_MAX];
    for (size_t i = 0; i < values; i++) {
        const bool mine = belongs_to(i, (uint32_t)comm_rank(), (uint32_t)comm_size());
        arena[i] = mine ? value_at(i) : NAN; /* a rank may use only its own share */
        gathered[i] = NAN;
    }
    exchange_share_take(arena, values, own);
    int wrong = exchange_share_collect(STATUS_OK, own, values, gathered) != STATUS_OK;
    for (size_t i = 0; i < values; i++) {
        const float wanted = value_at(i);
        wrong |= memcmp(&gathered[i], &wanted, sizeof wanted) != 0;
    }
    return wrong;
}

/* All ranks must report a failure on rank 1. */
static int fail_on_one_rank(void)
{
    float own[CHUNK] = {0}, arena[1];
    enum status mine = comm_rank() == 1 ? status_set(STATUS_FAILED, "planted") : STATUS_OK;
    return exchange_share_collect(mine, own, 1, arena) != STATUS_FAILED ||
           strcmp(status_text(), "rank 1: planted") != 0;
}

/* Runs before main() in all processes. A process that is a rank does its work here and exits. */
__attribute__((constructor)) static void be_rank(void)
{
    if (!getenv(RANKS_OF_TEST))
        return;
    int wrong = comm_open() != STATUS_OK || comm_size() != atoi(getenv(RANKS_OF_TEST));
    for (size_t i = 0; !wrong && i < COUNT_OF(sizes); i++)
        wrong = take_and_collect(sizes[i]);
    if (!wrong && comm_size() > 1)
        wrong = fail_on_one_rank();
    comm_close();
    _exit(wrong);
}

Test(mpi_updates, moments_are_gathered_from_all_ranks)
{
    run_as_ranks(RANKS_OF_TEST, 1, 5);
}

/* ---- Refusals ---- */

#define LEARN "--variant train-naive --model logreg --train-size 20 --test-size 5 --batch 4 --epochs 1 "

Test(mpi_updates, variants_on_cpus_refuse_exchanges_of_gpus)
{
    static const char *const methods[] = {"peer-bf16", "peer-fused"};
    for (size_t i = 0; i < COUNT_OF(methods); i++) {
        char line[256], wanted[64];
        snprintf(line, sizeof line, LEARN "--sync %s", methods[i]);
        snprintf(wanted, sizeof wanted, "--sync %s: it cannot train on several ranks here (", methods[i]);
        run(2, line);
        cr_expect(status == 4 && strstr(err, wanted), "%d: %s", status, err);
        run(1, line); /* one rank exchanges nothing */
        cr_expect_eq(status, 0, "%s", err);
    }
}
