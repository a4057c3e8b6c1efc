/* Tests fractals (synth/ifs.h): points against images of the published script, patches that are pasted one by
 * one against the rule of owners, orbits that overflow, and the bank. Run from the repository root. */
#include "support.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef HAVE_XXHASH
#include <xxhash.h>
#endif

#include "machine/host.h"
#include "synth/class.h"

TestSuite(fractal, .timeout = 300);

#define CLASSES \
    "--formula fractaldb --class tests/data/fractaldb.csv" /* classes 0, 1 and 7 of FractalDB-1k */
#define SIDE 362

/* ---- Published images ---- */

/* Images of make_fractaldb.py with --draw_type point_gray: SHA-256 of their gray pixels. Weights 4 and 16 of
 * class 0 and weight 4 of class 7 overflow; in the first case, the range of an axis is infinite. */
static const struct {
    uint32_t class_index, instance; /* class 2 is number 7 */
    const char *sha256;
} published[] = {
    {0, 8, "429051bd6345ed3f284fee92a54acde0caa4ef8cab2293d811988a30f777a8fe"},
    {0, 9, "de53a2637a5c3b1e6a0b4ab5bab6f183df77e1bd1f996898a80991fc8440eb1b"},
    {0, 10, "7bd9e01bbbbddc356b0e939567113ab6a3735545bc2d8cdb5a1a081f560ebc5c"},
    {0, 11, "633d65e72a0c07d907f1354f270729c194a3dcb2d6188fdff3cdad86d32cba55"},
    {0, 16, "5aea6cc4d9a07cc3082e3cb5579c7885468383ddc55aa46fe36f8b1e44f96e7b"},
    {0, 18, "22041987bb5d60f9d26f7c62d55ff764af5b644f4b6551319fea10f920b11b2a"},
    {0, 64, "8d8f73c46235c29d9094701dd8f4745315d03007dbc36cee5313d81c7132b07f"},
    {0, 99, "0e30753aefcbd5d866da973818c5a37e73820e14f0a9634df9585dfc27badcb4"},
    {1, 0, "de29775a3e67c348398cee08af812dfbd4b450e24a3df69e3e0ec503a769d356"},
    {1, 45, "e9fb14651375d3af811855f22c8af7b92407928ab25fdbfef3b449f4909c4a95"},
    {2, 17, "e1a61f093972c7bfb2f5a969817cf819bd116982fa10f85a6a523c0cfa482952"},
    {2, 98, "ed9b4f7287c6662f4547a949c6c1fcb4d25f3f1db2fb4aff4782853c15bc1227"},
};

static void expect_sha256(const uint8_t *pixels, const char *expected, const char *what)
{
    char path[] = "/tmp/fdsl-fractal-XXXXXX", command[80], sum[65] = "";
    const int file = mkstemp(path);
    cr_assert_geq(file, 0);
    cr_assert_eq(write(file, pixels, SIDE * SIDE), SIDE * SIDE);
    close(file);
    snprintf(command, sizeof command, "sha256sum %s", path);
    FILE *pipe = popen(command, "r");
    cr_assert(pipe && fgets(sum, sizeof sum, pipe));
    pclose(pipe);
    unlink(path);
    cr_expect_str_eq(sum, expected, "%s", what);
}

/* Draws one image of a class by its number and returns it. */
static uint8_t *draw_one(const struct opened *opened, const char *variant, uint64_t number)
{
    const uint64_t numbers[] = {number};
    return images_of(opened, variant, 1, numbers, 1);
}

Test(fractal, points_are_those_of_the_script)
{
    struct opened opened;
    open_synth(&opened, CLASSES " --draw points --batch 1");
    for (size_t i = 0; i < COUNT_OF(published); i++)
        for (int fast = 0; fast < 2; fast++) {
            char what[64];
            uint8_t *pixels = draw_one(&opened, fast ? "omp" : "naive",
                                       3 * (uint64_t)published[i].instance + published[i].class_index);
            snprintf(what, sizeof what, "class %u instance %u %s", published[i].class_index,
                     published[i].instance, fast ? "omp" : "naive");
            expect_sha256(pixels, published[i].sha256, what);
            free(pixels);
        }
    close_synth(&opened);
}

#ifdef HAVE_XXHASH
/* Our own masks. These hashes must never change. */
Test(fractal, patches_are_golden)
{
    static const struct {
        const char *options;
        uint64_t hash;
    } golden[] = {
        {" --batch 6", 0x2f2f42af1cb0db2e},
        {" --batch 6 --seed 18446744073709551615 --instance 1234567890123", 0x665d1ee626b005a2},
        {" --batch 3 --res 77 --instance 60", 0x5cb16563642fb432},
    };
    for (size_t i = 0; i < COUNT_OF(golden); i++) {
        struct opened opened;
        char line[200];
        const uint64_t numbers[] = {0};
        snprintf(line, sizeof line, CLASSES "%s", golden[i].options);
        open_synth(&opened, line);
        uint8_t *images = images_of(&opened, "naive", 1, numbers, 1);
        const uint64_t hash = XXH3_64bits(images, opened.synth->batch * synth_output_bytes(opened.synth));
        cr_expect_eq(hash, golden[i].hash, "%s: 0x%016llx", line, (unsigned long long)hash);
        free(images);
        close_synth(&opened);
    }
}
#endif

/* ---- Owners against sequential pasting ---- */

#ifdef _OPENMP
#ifdef FDSL_SANITIZED
#define ALL " --batch 60" /* the weights do not change which memory is used */
#else
#define ALL " --batch 300"
#endif
/* `naive` pastes squares one by one; `omp` asks the owner map of the bank. All 25 weights of three classes,
 * all flips, canvases of even and odd sides up to the smallest, and converted images. */
Test(fractal, owners_equal_sequential_pasting)
{
    static const char *const lines[] = {ALL,
                                        ALL " --draw points",
                                        " --batch 12 --instance 3000000000001 --seed 5",
                                        " --batch 75 --res 13 --instance 45",
                                        " --batch 75 --res 14 --draw points",
                                        " --batch 48 --res 65 --instance 40",
                                        " --batch 48 --res 129 --instance 3",
                                        " --batch 12 --res 700",
                                        " --batch 24 --out-res 224 --dtype f16 --channels 3 --instance 9",
                                        " --batch 24 --out-res 100 --fit crop --draw points"};
    static const char *const isas[] = {"scalar", "avx2", "avx512"};
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        struct opened opened;
        char line[200];
        const uint64_t numbers[] = {0};
        snprintf(line, sizeof line, CLASSES "%s", lines[i]);
        open_synth(&opened, line);
        int64_t *labels, *their_labels;
        const size_t bytes = synth_output_bytes(opened.synth);
        uint8_t *expected = images_and_labels_of(&opened, "naive", 1, numbers, 1, &labels);
        for (size_t k = 0; k < COUNT_OF(isas); k++)
            if (isa_force(isas[k])) {
                uint8_t *images = images_and_labels_of(&opened, "omp", 3, numbers, 1, &their_labels);
                for (uint64_t j = 0; j < opened.synth->batch; j++) {
                    cr_expect_eq(memcmp(images + j * bytes, expected + j * bytes, bytes), 0,
                                 "%s, image %llu, %s", line, (unsigned long long)j, isas[k]);
                    cr_expect_eq(their_labels[j], labels[j]);
                }
                free(images);
                free(their_labels);
            }
        free(expected);
        free(labels);
        close_synth(&opened);
    }
}
#endif

/* A pixel of a patch image is lit only near a point, with the share of bits that are set in 1 .. 511. */
Test(fractal, masks_have_the_published_law)
{
    uint32_t counts[512] = {0}, set = 0;
    for (uint32_t half = 0; half < 65536; half++)
        counts[ifs_mask(half)]++;
    cr_expect_eq(counts[0], 0);
    for (uint32_t mask = 1; mask < 512; mask++) {
        cr_expect(counts[mask] == 128 || counts[mask] == 129, "mask %u: %u", mask, counts[mask]);
        for (int bit = 0; bit < 9; bit++)
            set += counts[mask] * (mask >> bit & 1);
    }
    cr_expect_float_eq(set / (9 * 65536.0), 256.0 / 511, 1e-3);
    const struct philox_block block = ifs_mask_block(philox_key(7), 3);
    for (uint32_t cell = 0; cell < 8; cell++)
        cr_expect_eq(ifs_mask_of(block, 24 + cell),
                     ifs_mask(block.word[cell / 2] >> 16 * (cell % 2) & 65535));
}

/* ---- Orbits ---- */

/* Systems of two maps that grow by a factor and repeat the point for a u above p. */
static struct ifs_system growing(double factor, double p)
{
    return (struct ifs_system){
        .maps = 2, .map = {{factor, 0.1, 0.2, 0.5, 0.3, -0.1, p / 2}, {factor, 0, 0, -0.5, 0.1, 0.2, p / 2}}};
}

/* The script deletes the 100 points before the first NaN, and everything after it. */
Test(fractal, points_before_an_overflow_are_dropped)
{
    static const struct {
        uint32_t first_nan, points, drawn;
    } cases[] = {{0, 500, 0}, {99, 500, 0}, {100, 500, 0}, {101, 500, 1}, {499, 500, 399}, {500, 500, 500}};
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        cr_expect_eq(ifs_drawn(cases[i].first_nan, cases[i].points), cases[i].drawn);
}

/* Compares the maps of the bank with the definition for orbits that overflow early, late or never, that
 * repeat points, or whose extent is 0 along an axis. */
Test(fractal, the_bank_equals_the_definition)
{
    enum { POINTS = 3000, RES = 40 };
    static const double factors[] = {0, 0.9, -1, 1.2, 1.5, 3, -30, 1e4, 1e300};
    const struct ifs_rules rules = {.domain = 3, .points = POINTS, .weights = IFS_WEIGHTS, .flips = 4};
    struct ifs_system systems[2 * COUNT_OF(factors)];
    uint64_t orbits[IFS_WEIGHTS * COUNT_OF(systems)];
    static double uniforms[POINTS];
    static struct ifs_point scratch[POINTS];
    static uint8_t canvas[RES * RES];
    uint32_t black = 0;
    for (size_t i = 0; i < COUNT_OF(systems); i++) {
        systems[i] = growing(factors[i / 2], i % 2 ? 0.7 : 1);
        if (i % 2) /* y stays 0 */
            for (int m = 0; m < 2; m++)
                systems[i].map[m][2] = systems[i].map[m][5] = 0;
    }
    for (size_t i = 0; i < COUNT_OF(orbits); i++)
        orbits[i] = COUNT_OF(orbits) - 1 - i;
    ifs_uniforms(POINTS - 1, uniforms);
    for (int pass = 0; pass < 4; pass++) {
        const bool points = pass & 1;
        const size_t at_once = pass & 2 ? 1 : COUNT_OF(orbits); /* alone, or in groups of a class */
        struct ifs_bank *bank;
        cr_assert_eq(ifs_bank_open(&rules, systems, COUNT_OF(systems), uniforms, RES, points, &bank),
                     STATUS_OK);
        for (size_t i = 0; i < COUNT_OF(orbits); i += at_once)
            cr_assert_eq(ifs_bank_need(bank, orbits + i, at_once, 2), STATUS_OK, "%s", status_text());
        for (uint64_t orbit = 0; orbit < COUNT_OF(orbits); orbit++) {
            const struct ifs_system *system = &systems[orbit / IFS_WEIGHTS];
            const uint8_t *map = ifs_bank_map(bank, orbit);
            uint32_t wrong = 0, lit = 0;
            const struct philox_key key = ifs_mask_key(&rules, 1, system->id, orbit % IFS_WEIGHTS);
            ifs_draw(&rules, system, 1, orbit % IFS_WEIGHTS * 4, points, RES, uniforms, scratch, canvas);
            for (uint32_t y = 0; y < RES; y++)
                for (uint32_t x = 0; x < RES; x++) {
                    const uint8_t *row = map + y * ifs_map_pitch(points, RES);
                    const uint32_t owner = row[x / 2] >> 4 * (x % 2) & 15;
                    bool set = points && (row[x / 8] >> x % 8 & 1);
                    if (!points && owner != IFS_NO_OWNER) {
                        const uint32_t cell = ifs_owner_cell(RES, x, y, owner);
                        set = ifs_mask_of(ifs_mask_block(key, cell / 8), cell) >> owner & 1;
                    }
                    wrong += canvas[y * RES + x] != (set ? IFS_GRAY : 0);
                    lit += set;
                }
            cr_expect_eq(wrong, 0, "orbit %u", (unsigned)orbit);
            black += lit == 0;
        }
        const struct ifs_bank_facts facts = ifs_bank_facts(bank);
        cr_expect_eq(facts.orbits, COUNT_OF(orbits));
        cr_expect_eq(facts.bytes, COUNT_OF(orbits) * ifs_map_bytes(points, RES));
        ifs_bank_close(bank);
    }
    cr_expect(black > 40 && black < 2 * COUNT_OF(orbits), "%u orbits overflow before point 100", black);
}

/* Without division, cells are the same: for places that are integers or next to one, and for extents that are
 * tiny, huge, infinite or NaN. */
Test(fractal, fast_cells_equal_cells)
{
    static const double ranges[] = {1, 0.1, 350, 3e-310, 5e-324, 1e300, 1.7e308, INFINITY, NAN, 0};
    for (size_t r = 0; r < COUNT_OF(ranges); r++)
        for (uint32_t n = 0; n < 20000; n++) {
            const uint32_t res = 13 + n % 500;
            const struct philox_block words = philox(philox_key(n), (uint32_t)r, 0, 0, 0);
            const double low = n % 3 ? -ranges[r] / 3 : 0;
            const struct ifs_axis axis = ifs_axis(low, ranges[r] + low);
            double value = low + ranges[r] * (words.word[0] * 0x1p-32);
            if (n % 2) { /* the point of an integer, or its neighbours */
                value = low + ranges[r] * (words.word[0] % (res - 11)) / (res - 12);
                for (uint32_t i = 0; i < words.word[1] % 4; i++)
                    value = nextafter(value, words.word[2] % 2 ? 1e308 : low);
            }
            cr_assert_eq(ifs_cell_fast(&axis, value, res), ifs_cell(&axis, value, res), "%.17g in %.17g",
                         value, ranges[r]);
        }
}

Test(fractal, choices_are_those_of_the_definition)
{
    const struct ifs_system system = growing(0.5, 0.75);
    const double uniforms[] = {0, 0.1, 0.375, nextafter(0.375, 1), 0.75, nextafter(0.75, 1), 0.999999};
    static const uint8_t expected[] = {0, 0, 0, 1, 1, IFS_REPEAT, IFS_REPEAT};
    uint8_t choices[COUNT_OF(uniforms)];
    ifs_choices(&system, uniforms, COUNT_OF(uniforms), choices);
    for (size_t i = 0; i < COUNT_OF(uniforms); i++) {
        cr_expect_eq(choices[i], expected[i], "%zu", i);
        cr_expect_eq(ifs_choice(&system, uniforms[i]), expected[i], "%zu", i);
    }
}

/* Instance k: flip k mod 4, weight k / 4 mod 25; flips share the masks. */
Test(fractal, instances_are_numbered_as_published)
{
    const struct ifs_rules rules = {.domain = 3, .points = 2, .weights = 25, .flips = 4};
    const struct ifs_rules one = {.domain = 4, .points = 2, .weights = 0, .flips = 1};
    struct ifs_instance shown = ifs_instance(&rules, 1045);
    cr_expect(shown.flip == 1 && shown.weight == 11 && shown.drawing == 261);
    shown = ifs_instance(&one, 1045);
    cr_expect(shown.flip == 0 && shown.weight == 0 && shown.drawing == 1045);
    const struct philox_key a = ifs_mask_key(&rules, 1, 2, 3), b = ifs_mask_key(&one, 1, 2, 3);
    cr_expect(memcmp(&a, &b, sizeof a) != 0);
}

/* ---- The bank ---- */

/* Threads that need the same orbits at the same time. */
struct needer {
    struct ifs_bank *bank;
    uint64_t begin;
    enum status status;
};

static void *need(void *context)
{
    struct needer *needer = context;
    for (uint64_t i = needer->begin; i < 40 && needer->status == STATUS_OK; i++) {
        const uint64_t orbits[] = {i, i / 2, i};
        needer->status = ifs_bank_need(needer->bank, orbits, 3, 1);
        if (!ifs_bank_map(needer->bank, i) || !ifs_bank_map(needer->bank, i / 2))
            needer->status = STATUS_FAILED;
    }
    return NULL;
}

Test(fractal, threads_share_a_bank)
{
    const struct ifs_rules rules = {.domain = 3, .points = 500, .weights = IFS_WEIGHTS, .flips = 4};
    const struct ifs_system systems[] = {growing(0.5, 1), growing(0.9, 1)};
    static double uniforms[500];
    struct needer needers[4] = {{.begin = 0}, {.begin = 0}, {.begin = 10}, {.begin = 20}};
    pthread_t threads[COUNT_OF(needers)];
    struct ifs_bank *bank;
    ifs_uniforms(499, uniforms);
    cr_assert_eq(ifs_bank_open(&rules, systems, 2, uniforms, 64, false, &bank), STATUS_OK);
    for (size_t i = 0; i < COUNT_OF(needers); i++) {
        needers[i].bank = bank;
        cr_assert_eq(pthread_create(&threads[i], NULL, need, &needers[i]), 0);
    }
    for (size_t i = 0; i < COUNT_OF(needers); i++) {
        pthread_join(threads[i], NULL);
        cr_expect_eq(needers[i].status, STATUS_OK);
    }
    cr_expect_eq(ifs_bank_facts(bank).orbits, 40);
    ifs_bank_close(bank);
}

#ifdef HAVE_XXHASH
enum { KEPT = 33, KEPT_POINTS = 300, KEPT_RES = 31 }; /* systems: more than are written at once */

static const struct ifs_rules kept_rules = {
    .domain = 3, .points = KEPT_POINTS, .weights = IFS_WEIGHTS, .flips = 4};

/* Opens a bank of KEPT systems in `folder`; NULL: one without a file, of which all orbits are computed. */
static enum status open_kept(const char *folder, bool points, struct ifs_bank **bank)
{
    static struct ifs_system systems[KEPT];
    static double uniforms[KEPT_POINTS];
    static uint64_t orbits[KEPT * IFS_WEIGHTS];
    for (uint32_t i = 0; i < KEPT; i++) {
        systems[i] = growing(0.1 * i - 1, 1);
        systems[i].id = i;
    }
    for (uint64_t i = 0; i < COUNT_OF(orbits); i++)
        orbits[i] = i;
    ifs_uniforms(KEPT_POINTS - 1, uniforms);
    if (folder)
        return ifs_bank_open_kept(folder, 2, &kept_rules, systems, KEPT, uniforms, KEPT_RES, points, bank);
    cr_assert_eq(ifs_bank_open(&kept_rules, systems, KEPT, uniforms, KEPT_RES, points, bank), STATUS_OK);
    return ifs_bank_need(*bank, orbits, COUNT_OF(orbits), 2);
}

/* Returns whether the bank in the folder opens and equals a computed one. */
static bool keeps(const char *folder, bool points)
{
    struct ifs_bank *bank = NULL, *computed;
    bool equal = open_kept(folder, points, &bank) == STATUS_OK;
    cr_assert_eq(open_kept(NULL, points, &computed), STATUS_OK);
    for (uint64_t i = 0; equal && i < KEPT * IFS_WEIGHTS; i++) {
        const struct ifs_orbit is = ifs_bank_orbit(bank, i), wanted = ifs_bank_orbit(computed, i);
        equal =
            memcmp(ifs_bank_map(bank, i), ifs_bank_map(computed, i), ifs_map_bytes(points, KEPT_RES)) == 0 &&
            is.cells == wanted.cells && is.overflows == wanted.overflows;
    }
    equal = equal && ifs_bank_facts(bank).orbits == KEPT * IFS_WEIGHTS;
    ifs_bank_close(bank);
    ifs_bank_close(computed);
    return equal;
}

/* Runs a shell command in the folder, on its only file BANK, and returns whether it succeeded. */
static bool shell_in(const char *folder, const char *command)
{
    char line[512];
    snprintf(line, sizeof line, "cd %s && BANK=$(ls *.bank) && chmod u+w $BANK && %s", folder, command);
    return system(line) == 0;
}

/* Damages the file in several ways. It must be computed again, and then read again. */
static void expect_repaired(const char *folder, const char *command)
{
    cr_assert(shell_in(folder, command), "%s", command);
    cr_expect(shell_in(folder, "! cmp -s $BANK ../whole"), "%s", command);
    cr_expect(keeps(folder, false), "%s", command);
    cr_expect(shell_in(folder, "cmp -s $BANK ../whole"), "%s", command);
}

/* The orbits of the file are those that are computed, whichever of several processes writes it. A file with
 * any damage, or of other orbits, is written anew. */
Test(fractal, a_bank_is_kept_in_a_file)
{
    char base[] = "/tmp/fdsl-bank-XXXXXX", folder[64], line[128];
    cr_assert_not_null(mkdtemp(base));
    snprintf(folder, sizeof folder, "%s/cache", base);
    pid_t children[3];
    for (size_t i = 0; i < COUNT_OF(children); i++)
        if ((children[i] = fork()) == 0)
            _exit(keeps(folder, false) ? 0 : 1);
    for (size_t i = 0; i < COUNT_OF(children); i++) {
        int state;
        cr_assert_eq(waitpid(children[i], &state, 0), children[i]);
        cr_expect_eq(state, 0, "process %zu", i);
    }
    cr_assert(shell_in(folder, "cp $BANK ../whole && test $(ls | wc -l) = 2")); /* the file and its lock */
    struct ifs_bank *open_bank;
    cr_assert_eq(open_kept(folder, false, &open_bank), STATUS_OK);
    const uint8_t first = *ifs_bank_map(open_bank, 40);
    cr_expect(shell_in(folder, "stat -c %i $BANK > ../inode"));
    cr_expect(keeps(folder, false) && shell_in(folder, "test $(stat -c %i $BANK) = $(cat ../inode)"));
#define FLIP(at) "printf '\\132' | dd of=$BANK bs=1 conv=notrunc status=none seek=" at
    expect_repaired(folder, "rm $BANK && : > $BANK");
    expect_repaired(folder, "truncate -s -1 $BANK");
    expect_repaired(folder, "truncate -s +1 $BANK");
    expect_repaired(folder, FLIP("3"));                             /* the header */
    expect_repaired(folder, FLIP("60"));                            /* the hash of the classes in it */
    expect_repaired(folder, FLIP("4097"));                          /* the first map */
    expect_repaired(folder, FLIP("$(($(stat -c %s $BANK) - 12))")); /* a fact */
    expect_repaired(folder, FLIP("$(($(stat -c %s $BANK) - 2))"));  /* the hash */
    expect_repaired(folder, "dd if=/dev/zero of=$BANK bs=512 seek=9 count=1 conv=notrunc status=none");
    cr_expect_eq(*ifs_bank_map(open_bank, 40), first); /* an open bank keeps the file that was replaced */
    ifs_bank_close(open_bank);
    static const char *const changes[] = {FLIP("9000"), "truncate -s -1 $BANK", "truncate -s 0 $BANK"};
    static const uint64_t some = 3;
    for (size_t i = 0; i < COUNT_OF(changes); i++) { /* maps of a file that changes must not be used */
        cr_assert_eq(open_kept(folder, false, &open_bank), STATUS_OK, "%s", status_text());
        cr_expect(ifs_bank_need(open_bank, &some, 1, 1) == STATUS_OK &&
                  ifs_bank_check(open_bank) == STATUS_OK);
        cr_assert(shell_in(folder, changes[i]));
        const uint8_t lost = *ifs_bank_map(open_bank, some); /* reads 0 instead of ending the program */
        cr_expect(i < 2 || lost == 0);
        cr_expect_eq(ifs_bank_check(open_bank), STATUS_FAILED, "%s", changes[i]);
        cr_expect_eq(ifs_bank_need(open_bank, &some, 1, 1), STATUS_FAILED, "%s", changes[i]);
        cr_expect(strstr(status_text(), "was changed while it was in use"));
        ifs_bank_close(open_bank);
    }
    cr_expect(keeps(folder, false));
    cr_expect(shell_in(folder, "mv $BANK ../patches")); /* points have another file */
    cr_expect(keeps(folder, true) && shell_in(folder, "cp ../patches $BANK"));
    cr_expect(keeps(folder, true) && shell_in(folder, "! cmp -s $BANK ../patches"));
    snprintf(line, sizeof line, "rm -r %s", base);
    cr_assert_eq(system(line), 0);
    snprintf(line, sizeof line, "%s/no/folder", base);
    cr_expect_eq(open_kept(line, false, &open_bank), STATUS_FAILED);
    cr_expect(strstr(status_text(), "cannot create the folder") && strstr(status_text(), "No such file"));
    ifs_bank_close(open_bank);
    cr_expect_eq(open_kept("/dev/null", false, &open_bank), STATUS_FAILED);
    ifs_bank_close(open_bank);
    cr_expect_eq(open_kept("/proc/self", false, &open_bank), STATUS_FAILED);
    ifs_bank_close(open_bank);
}
#endif

/* ---- Classes ---- */

Test(fractal, classes_that_are_no_systems_are_refused)
{
    struct class_row *rows;
    size_t count;
    cr_assert_eq(class_read_csv("tests/data/fractaldb.csv", formulas[FORMULA_FRACTALDB], &rows, &count),
                 STATUS_OK, "%s", status_text());
    cr_assert_eq(count, 3);
    static const struct {
        uint32_t parameter; /* of class 7, which has four maps */
        double value;
        const char *piece;
    } cases[] = {{0, 1, "maps"},
                 {0, 8, "maps"},
                 {0, 2, "a3 is"},
                 {7, 0.5, "p1 to p4 have the sum"},
                 {1, 1e7, "a1"},
                 {7, -0.1, "p1"},
                 {49, 0.5, "p7 is 0.5, but the class has 4 maps"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct class_row row = rows[2];
        row.value[cases[i].parameter] = cases[i].value;
        cr_expect_eq(class_check(formulas[FORMULA_FRACTALDB], &row), STATUS_USAGE);
        cr_expect(strstr(status_text(), cases[i].piece), "%s", status_text());
    }
    free(rows);
}
