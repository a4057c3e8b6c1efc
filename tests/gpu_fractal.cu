/* Compares the orbits, images and labels of fractals that `fused` computes with those of `naive` and `omp`,
 * bit for bit, for odd sizes and for orbits that overflow. Then plants faults, which the comparison must
 * detect, and prints the times of computing orbits and of images. make check-gpu runs this program.
 *
 *     gpu_fractal [--short] [--times]
 *
 * --short: few small cases and no times; for compute-sanitizer. --times: only the times.
 *
 * Prints one line per case. Exit status 3 if a case fails, 4 without a GPU. */
#include <math.h>

#include "core/timer.h"
#include "gpu_generated.cuh"
#include "synth/class.h"
#include "synth/fused_ifs.cuh"

#define FEW 12 /* images; more take `naive` too long */

/* ---- Classes ---- */

/* Draws a system as the published search draws candidates. Some overflow. */
static struct class_row candidate(uint32_t number)
{
    struct class_row row = {};
    uint32_t words = 0;
    auto draw = [&] {
        const struct philox_block block = philox(philox_key(5), number, words / 4, 0, 0);
        return philox_word(block, words++);
    };
    const uint32_t maps = 2 + philox_below(draw(), 6);
    double sum = 0;
    row.id = number;
    row.value[0] = maps;
    for (uint32_t m = 0; m < maps; m++) {
        double *map = &row.value[1 + IFS_MAP_VALUES * m];
        for (uint32_t i = 0; i < 6; i++)
            map[i] = 2 * (draw() * 0x1p-32) - 1;
        map[6] = fabs(map[0] * map[3] - map[1] * map[2]);
        sum += map[6];
    }
    for (uint32_t m = 0; m < maps; m++)
        row.value[1 + IFS_MAP_VALUES * m + 6] /= sum;
    return row;
}

/* Returns whether the orbit of a candidate stays finite and fills a part of a coarse raster, so that it is
 * like a class of a published set. */
static bool fills(const struct class_row *row, const std::vector<double> &uniforms)
{
    const uint32_t side = 32, least = side * side / 4;
    std::vector<struct ifs_point> orbit(uniforms.size());
    std::vector<bool> cells(side * side);
    struct ifs_system system;
    struct ifs_point point = {0, 0}, low = point, high = point;
    ifs_system(row, &system);
    for (size_t i = 0; i < orbit.size(); i++) {
        orbit[i] = point;
        low = {fmin(low.x, point.x), fmin(low.y, point.y)};
        high = {fmax(high.x, point.x), fmax(high.y, point.y)};
        point = ifs_step(&system, ifs_choice(&system, uniforms[i]), point);
    }
    if (!(high.x - low.x < 100 && high.y - low.y < 100))
        return false;
    for (const struct ifs_point &at : orbit)
        cells[(uint32_t)((at.y - low.y) / (high.y - low.y) * (side - 1)) * side +
              (uint32_t)((at.x - low.x) / (high.x - low.x) * (side - 1))] = true;
    return std::count(cells.begin(), cells.end(), true) >= least;
}

/* Sets the classes: candidates, or only those that fill a raster, of which it keeps a list. */
static void choose_classes(struct synth *synth, uint32_t count, bool full)
{
    static std::vector<struct class_row> kept;
    static std::vector<double> uniforms(4000);
    static uint32_t number = 0;
    if (number == 0)
        ifs_uniforms((uint32_t)uniforms.size(), uniforms.data());
    for (; kept.size() < count && full; number++) {
        const struct class_row row = candidate(number);
        if (fills(&row, uniforms))
            kept.push_back(row);
    }
    synth->class_count = count;
    synth->rows = static_cast<struct class_row *>(calloc(count, sizeof *synth->rows));
    for (uint32_t c = 0; c < count; c++)
        synth->rows[c] = full ? kept[c] : candidate(c);
}

/* ---- Cases ---- */

/* A change that only the device sees. The comparison must detect it. */
enum fault { FAULT_NONE, FAULT_COEFFICIENT, FAULT_UNIFORM, FAULT_SEED };

/* Fractals in space: how their cameras and weights are, and whether they have point clouds. */
enum solid { SOLID_NONE, SOLID_CIRCLE, SOLID_SPHERE, SOLID_ONE, SOLID_CLOUD };

struct trial {
    uint32_t classes, points, res, batch;
    uint32_t out_res; /* 0: the whole canvas */
    enum output_fit fit;
    enum dtype type;
    uint32_t channels;
    enum output_layout layout;
    bool draws_points;
    bool plain;  /* neither weights nor flips */
    bool listed; /* random image numbers, some of them large and some repeated, instead of consecutive ones */
    enum fault fault;
    enum solid solid; /* fractals in space; then `points`, `draws_points` and `plain` have no effect */
};

/* Sets the classes of fractals in space: those of a search. Some weights of the last class overflow at once,
 * some after many steps. */
static void choose_solids(const struct trial *trial, struct synth *synth)
{
    const uint32_t count = trial->classes;
    synth_set_formula(synth, FORMULA_IFS3D);
    synth->ifs.sphere = trial->solid == SOLID_SPHERE;
    synth->ifs.cloud = trial->solid == SOLID_CLOUD ? IFS3D_CLOUD : 0;
    synth->ifs.weights = trial->solid == SOLID_ONE ? 1 : IFS3D_WEIGHTS;
    synth->class_count = count;
    synth->rows = static_cast<struct class_row *>(calloc(count, sizeof *synth->rows));
    must(ifs3d_search(5, IFS3D_THRESHOLD, count, synth->rows));
    double *last = synth->rows[count - 1].value + 1;
    for (uint32_t m = 0; count > 1 && m < 2; m++)
        last[IFS3D_MAP_VALUES * m] = last[IFS3D_MAP_VALUES * m + 4] = last[IFS3D_MAP_VALUES * m + 8] = 0.97;
}

static void open_synth(const struct trial *trial, bool full, struct synth *synth)
{
    *synth = {};
    if (trial->solid) {
        choose_solids(trial, synth);
    } else {
        synth_set_formula(synth, FORMULA_FRACTALDB);
        choose_classes(synth, trial->classes, full);
        synth->ifs.points = trial->points;
    }
    if (trial->plain && !trial->solid) {
        synth->ifs.weights = 0;
        synth->ifs.flips = 1;
    }
    synth->points = trial->draws_points;
    synth->res = trial->res;
    synth->batch = synth->stride = trial->batch;
    synth->seed = 7;
    synth->first = 5;
    const bool whole = trial->out_res == 0;
    synth->output = {trial->type,
                     trial->layout,
                     whole ? OUTPUT_WHOLE : trial->fit,
                     whole ? trial->res : trial->out_res,
                     trial->channels,
                     {},
                     {}};
    const double mean[] = {0.4, 0.5, 0.6}, deviation[] = {0.25, 0.5, 0.75};
    output_set_scale(&synth->output, synth->res, mean, deviation);
    must(synth_fill_tables(synth));
}

/* Changes what the device reads, after the reference has drawn its images. */
static void plant(enum fault fault, struct synth *synth)
{
    if (fault == FAULT_COEFFICIENT && synth->solids)
        for (uint32_t c = 0; c < synth->class_count; c++)
            synth->solids[c].map[1][9] *= 1.01;
    else if (fault == FAULT_COEFFICIENT)
        for (uint32_t c = 0; c < synth->class_count; c++)
            synth->systems[c].map[1][4] *= 1.01;
    else if (fault == FAULT_UNIFORM)
        synth->uniforms[synth->ifs.points - 20] = 1 - synth->uniforms[synth->ifs.points - 20];
    else if (fault == FAULT_SEED)
        synth->seed++;
}

static void compare(const struct trial *trial)
{
    struct synth synth;
    struct generated_batch right, ours;
    char text[256];
    open_synth(trial, true, &synth);
    const uint32_t count = trial->batch + (trial->batch < FEW ? (trial->batch + 1) / 2 : 5);
    const std::vector<uint64_t> numbers = numbers_of(trial->listed, count);
    generate_on_host(&synth, numbers, FEW, &right);
    plant(trial->fault, &synth);
    generate_on_device(&synth, numbers, trial->listed, false, &ours);
    static const char *const solids[] = {"", ", in space", ", in space, sphere", ", in space, one row",
                                         ", in space, clouds"};
    const uint32_t images = count_wrong(right.images, ours.images, count);
    const uint32_t labels =
        count_wrong(right.labels, ours.labels, count) + count_wrong(right.points, ours.points, count);
    snprintf(text, sizeof text,
             "%u classes%s, %u points, %u^2, batch %u, output %u^2 %s %s x %u%s%s%s%s: %u images, %u targets "
             "differ",
             trial->classes, solids[trial->solid], synth.ifs.points, trial->res, trial->batch,
             synth.output.res, fit_name(synth.output.fit), dtype_names[trial->type], trial->channels,
             trial->draws_points ? ", points" : "", trial->plain ? ", plain" : "",
             trial->listed ? ", listed" : "", trial->fault ? ", planted fault" : "", images, labels);
    report((images + labels == 0) == (trial->fault == FAULT_NONE), text);
    synth_free(&synth);
}

/* ---- Orbits ---- */

/* Compares all orbits of candidates, of which many overflow, with those of the host. Computes them in two
 * calls, so that the second one adds to a bank. */
static void compare_orbits(uint32_t classes, uint32_t points, uint32_t res, bool draws_points, bool full)
{
    const struct trial trial = {classes,     points,   res, 1,           0,
                                OUTPUT_CROP, DTYPE_U8, 1,   OUTPUT_NCHW, draws_points};
    struct synth synth;
    struct ifs_device_bank *bank;
    char text[256];
    open_synth(&trial, full, &synth);
    const uint64_t count = (uint64_t)classes * ifs_orbits(&synth.ifs);
    const size_t bytes = ifs_map_bytes(draws_points, res);
    std::vector<uint64_t> orbits(count), some;
    std::vector<const uint8_t *> maps(count);
    std::vector<uint8_t> map(bytes);
    for (uint64_t i = 0; i < count; i++) {
        orbits[i] = i;
        if (i % 7 == 3)
            some.push_back(count - 1 - i);
    }
    must(ifs_bank_need(synth.bank, orbits.data(), count, THREADS));
    must(ifs_device_open(0, &synth, &bank));
    must(ifs_device_need(bank, some.data(), some.size()));
    must(ifs_device_need(bank, nullptr, 0));
    must(cudaMemcpy(maps.data(), ifs_device_maps(bank), count * sizeof maps[0], cudaMemcpyDeviceToHost));
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < count; i++) {
        must(cudaMemcpy(map.data(), maps[i], bytes, cudaMemcpyDeviceToHost));
        wrong += memcmp(map.data(), ifs_bank_map(synth.bank, i), bytes) != 0;
    }
    snprintf(text, sizeof text, "%llu orbits of %u points, %s, %u^2, %s: %llu differ",
             (unsigned long long)count, points, full ? "classes" : "candidates", res,
             draws_points ? "bitmaps" : "owner maps", (unsigned long long)wrong);
    report(wrong == 0, text);
    ifs_device_close(bank);
    synth_free(&synth);
}

/* Users of the same tables must share a bank, which stays valid when the first one closes it and its input is
 * gone. A bank of bitmaps, or of a canvas of another size, is another one. */
static void share_bank()
{
    const struct trial trial = {2, 3000, 50, 30, 0, OUTPUT_CROP, DTYPE_U8, 1, OUTPUT_NCHW};
    const uint64_t orbits[] = {3, 7};
    struct synth synth;
    struct ifs_device_bank *first, *second, *other, *smaller;
    open_synth(&trial, true, &synth);
    struct synth copy = synth, bitmaps = synth, small = synth;
    bitmaps.points = true;
    small.res = 40;
    must(ifs_device_open(0, &copy, &first));
    must(ifs_device_open(0, &synth, &second));
    must(ifs_device_open(0, &bitmaps, &other));
    must(ifs_device_open(0, &small, &smaller));
    must(ifs_device_need(first, orbits, 1));
    const bool shared = first == second && ifs_device_facts(second).orbits == 1;
    const bool own = other != first && smaller != first && smaller != other &&
                     ifs_device_facts(other).orbits == 0 && ifs_device_facts(smaller).orbits == 0;
    ifs_device_close(first);
    copy = {};
    must(ifs_device_need(second, orbits, 2));
    report(shared && own && ifs_device_facts(second).orbits == 2, "users of the same classes share a bank");
    ifs_device_close(other);
    ifs_device_close(second);
    ifs_device_close(smaller);
    must(ifs_device_open(0, &synth, &first));
    report(ifs_device_facts(first).orbits == 0, "a bank that all users closed is gone");
    ifs_device_close(first);
    synth_free(&synth);
}

/* Compares two runs of a variant, of which the second needs other orbits, with the definition. */
static void compare_runs(const struct variant *variant, const char *name, enum solid solid)
{
    struct trial trial = {2, 3000, 50, 30, 0, OUTPUT_CROP, DTYPE_U8, 1, OUTPUT_NCHW};
    const struct resources resources = {.threads = 1, .device = 0};
    struct synth synth;
    void *state = nullptr;
    struct run_time time;
    char text[256];
    uint32_t images = 0, labels = 0;
    trial.solid = solid;
    open_synth(&trial, true, &synth);
    const size_t bytes = synth_image_bytes(&synth), cloud = synth_cloud_bytes(&synth) / sizeof(float);
    std::vector<uint8_t> right(bytes), ours(bytes), memory(synth_solid_scratch_bytes());
    std::vector<float> right_cloud(cloud), our_cloud(cloud);
    std::vector<struct ifs_point> scratch(synth.ifs.points);
    must(variant->setup(&resources, &synth, &state));
    for (uint64_t run : {1, 40}) {
        must(variant_run(variant, state, run, &time));
        for (uint64_t j = 0; j < synth.batch; j++) {
            const struct synth_image image = synth_run_image(&synth, run, j);
            struct synth_fetch fetch = {
                .j = j, .pixels = ours.data(), .mask = nullptr, .cloud = cloud ? our_cloud.data() : nullptr};
            must(variant->fetch(state, &fetch));
            if (solid)
                synth_draw_solid(&synth, image, memory.data(), right.data(),
                                 cloud ? right_cloud.data() : nullptr);
            else
                ifs_draw(&synth.ifs, &synth.systems[image.class_index], synth.seed, image.instance,
                         synth.points, synth.res, synth.uniforms, scratch.data(), right.data());
            images += right != ours || right_cloud != our_cloud;
            labels += fetch.label != synth_label(&synth, image);
        }
    }
    snprintf(text, sizeof text, "two runs of %s%s: %u images, %u labels differ", name,
             solid ? ", in space" : "", images, labels);
    report(images + labels == 0, text);
    variant->teardown(state);
    synth_free(&synth);
}

static void compare_all(bool brief)
{
    const enum output_fit crop = OUTPUT_CROP, resize = OUTPUT_RESIZE;
    const enum output_layout planes = OUTPUT_NCHW, pixels = OUTPUT_NHWC;
    const struct trial shorts[] = {
        {3, 3000, 64, 7, 0, crop, DTYPE_U8, 1, planes, false, false, true},
        {3, 3001, 61, 5, 33, resize, DTYPE_F16, 3, planes, false},
        {2, 1000, 13, 3, 0, crop, DTYPE_U8, 1, planes, true, true},
        {3, 0, 97, 7, 0, crop, DTYPE_U8, 1, planes, false, false, true, FAULT_NONE, SOLID_CIRCLE},
        {2, 0, 31, 9, 0, crop, DTYPE_U8, 1, planes, false, false, false, FAULT_NONE, SOLID_CLOUD},
    };
    const struct trial trials[] = {
        {3, 200000, 362, 7, 0, crop, DTYPE_U8, 1, planes},
        {40, 200000, 362, 256, 0, crop, DTYPE_U8, 1, planes, false, false, true},
        {40, 200000, 362, 64, 224, resize, DTYPE_F16, 3, planes, false, false, true},
        {5, 200000, 362, 9, 224, crop, DTYPE_BF16, 3, pixels, false, false, true},
        {5, 200000, 362, 9, 224, crop, DTYPE_U8, 1, planes, false, false, true},
        {1, 100000, 512, 5, 0, crop, DTYPE_U8, 1, planes, false, true},
        {30, 100000, 512, 64, 224, resize, DTYPE_F32, 1, planes, false, true, true},
        {2, 2, 13, 4, 0, crop, DTYPE_U8, 1, planes, false},
        {2, 100, 14, 4, 0, crop, DTYPE_U8, 1, planes, false, false, true},
        {3, 5000, 37, 11, 0, crop, DTYPE_U8, 1, planes, false, false, true},
        {3, 5000, 97, 11, 0, crop, DTYPE_F32, 3, pixels, false, false, true},
        {3, 5000, 101, 11, 53, crop, DTYPE_U8, 3, planes, false, false, true},
        {3, 20000, 211, 11, 300, resize, DTYPE_U8, 1, planes, false, false,
         true}, /* larger than the canvas */
        {3, 20000, 509, 11, 8, resize, DTYPE_U8, 1, planes, false, false, true},
        {3, 20000, 509, 11, 1, resize, DTYPE_F32, 3, planes, false, false, true},
        {2, 20000, 1024, 3, 0, crop, DTYPE_U8, 1, planes, false, false, true},
        {1, 20000, 4099, 2, 700, resize, DTYPE_U8, 1, planes, false, true},
        {1, 20000, 16384, 1, 16383, resize, DTYPE_U8, 1, planes, false, true},
        {40, 200000, 362, 256, 0, crop, DTYPE_U8, 1, planes, true, false, true},
        {40, 200000, 362, 64, 224, resize, DTYPE_F16, 3, planes, true, false, true},
        {3, 5000, 61, 11, 50, crop, DTYPE_BF16, 1, planes, true, false, true},
        {1, 20000, 4099, 2, 2, resize, DTYPE_U8, 1, planes, true, true},
        {1, 0, 224, 40, 0, crop, DTYPE_U8, 1, planes, false, false, false, FAULT_NONE, SOLID_CIRCLE},
        {7, 0, 224, 100, 0, crop, DTYPE_U8, 1, planes, false, false, false, FAULT_NONE, SOLID_SPHERE},
        {3, 0, 224, 37, 0, crop, DTYPE_U8, 1, planes, false, false, false, FAULT_NONE, SOLID_ONE},
        {40, 0, 224, 256, 0, crop, DTYPE_U8, 1, planes, false, false, true, FAULT_NONE, SOLID_SPHERE},
        {40, 0, 224, 64, 0, crop, DTYPE_U8, 1, planes, false, false, true, FAULT_NONE, SOLID_CIRCLE},
        {5, 0, 1, 12, 0, crop, DTYPE_U8, 1, planes, false, false, true, FAULT_NONE, SOLID_SPHERE},
        {5, 0, 31, 11, 40, resize, DTYPE_BF16, 3, pixels, false, false, false, FAULT_NONE, SOLID_SPHERE},
        {5, 0, 101, 60, 53, crop, DTYPE_U8, 3, planes, false, false, false, FAULT_NONE, SOLID_CIRCLE},
        {5, 0, 257, 11, 224, resize, DTYPE_F16, 3, planes, false, false, true, FAULT_NONE, SOLID_SPHERE},
        {5, 0, 257, 30, 8, resize, DTYPE_F32, 1, planes, false, false, false, FAULT_NONE, SOLID_SPHERE},
        {2, 0, 509, 25, 0, crop, DTYPE_F32, 1, planes, false, false, false, FAULT_NONE, SOLID_CIRCLE},
        {2, 0, 4099, 3, 700, resize, DTYPE_U8, 1, planes, false, false, false, FAULT_NONE, SOLID_SPHERE},
        {9, 0, 224, 30, 0, crop, DTYPE_U8, 1, planes, false, false, false, FAULT_NONE, SOLID_CLOUD},
        {9, 0, 224, 30, 0, crop, DTYPE_U8, 1, planes, false, false, true, FAULT_NONE, SOLID_CLOUD},
        {3, 0, 224, 30, 0, crop, DTYPE_U8, 1, planes, false, false, false, FAULT_COEFFICIENT, SOLID_CIRCLE},
        {3, 0, 224, 30, 0, crop, DTYPE_U8, 1, planes, false, false, false, FAULT_SEED, SOLID_SPHERE},
        {3, 200000, 362, 7, 0, crop, DTYPE_U8, 1, planes, false, false, false, FAULT_COEFFICIENT},
        {3, 200000, 362, 7, 0, crop, DTYPE_U8, 1, planes, true, false, false, FAULT_COEFFICIENT},
        {3, 200000, 362, 7, 0, crop, DTYPE_U8, 1, planes, false, false, false, FAULT_UNIFORM},
        {3, 200000, 362, 7, 0, crop, DTYPE_U8, 1, planes, false, false, false, FAULT_SEED},
    };
    for (const struct trial &trial : shorts)
        compare(&trial);
    compare_orbits(2, 3000, 40, false, false);
    for (enum solid solid : {SOLID_NONE, SOLID_CLOUD}) {
        compare_runs(&variant_fused, "fused", solid);
        compare_runs(&variant_fused_graph, "fused-graph", solid);
    }
    share_bank();
    for (const struct trial &trial : trials)
        if (!brief)
            compare(&trial);
    if (brief)
        return;
    compare_orbits(60, 200000, 362, false, false);
    compare_orbits(60, 200000, 362, true, false);
    compare_orbits(100, 200000, 362, false, true);
    compare_orbits(40, 100000, 224, false, false);
    compare_orbits(7, 200000, 1031, false, false);
    compare_orbits(2, 777, 16384, true, false);
}

/* ---- Times ---- */

/* Prints the time of computing all orbits. */
static void print_bank_time(uint32_t classes, uint32_t points, uint32_t res, bool plain, bool draws_points)
{
    const struct trial trial = {classes, points,      res,          1,    0, OUTPUT_CROP, DTYPE_U8,
                                1,       OUTPUT_NCHW, draws_points, plain};
    struct synth synth;
    struct ifs_bank_facts facts = {};
    std::vector<double> open_s, all_s;
    open_synth(&trial, true, &synth);
    for (int run = 0; run < 5; run++) {
        struct ifs_device_bank *bank;
        const double begin_s = timer_now_s();
        must(ifs_device_open(0, &synth, &bank));
        open_s.push_back(timer_now_s() - begin_s);
        must(ifs_device_need(bank, nullptr, 0));
        facts = ifs_device_facts(bank);
        all_s.push_back(facts.seconds);
        ifs_device_close(bank);
    }
    printf("%6llu orbits of %u points, %u^2 %-10s %8.2f ms (first %.2f ms, opening %.2f ms); %7.1f MB\n",
           (unsigned long long)facts.orbits, points, res, draws_points ? "bitmaps" : "owner maps",
           1e3 * median(all_s), 1e3 * all_s[0], 1e3 * median(open_s), 1e-6 * (double)facts.bytes);
    fflush(stdout);
    synth_free(&synth);
}

/* Prints the median time per image of the generator. */
static void print_times(const struct trial *trial)
{
    const struct generator_request request = {
        .on_device = true, .resources = {.threads = 1, .device = 0}, .batch = trial->batch};
    struct synth synth;
    struct generator *generator;
    struct device_clock clock = {};
    uint8_t *images;
    int64_t *labels;
    std::vector<double> times_s;
    open_synth(trial, true, &synth);
    must(cudaMalloc(&images, trial->batch * synth_output_bytes(&synth)));
    must(cudaMalloc(&labels, trial->batch * sizeof *labels));
    must(synth_generator_open(&synth, &variant_fused, &request, &generator));
    must(device_clock_open(&clock));
    const struct generator_targets targets = {labels, nullptr};
    for (uint32_t run = 0; run < RUNS; run++) {
        const struct generator_numbers numbers = {nullptr, run * trial->batch, nullptr, nullptr};
        struct run_time time;
        must(device_clock_begin(&clock));
        must(generator_make(generator, &numbers, trial->batch, images, &targets, clock.stream));
        must(device_clock_end(&clock, &time));
        if (run >= RUNS / 4)
            times_s.push_back(time.device_s);
    }
    printf("%-7s %4u classes %4u^2 to %4u^2 %-4s x %u batch %4u %8.3f us per image\n",
           trial->solid          ? "views"
           : trial->draws_points ? "points"
                                 : "patches",
           trial->classes, trial->res, synth.output.res, dtype_names[trial->type], trial->channels,
           trial->batch, 1e6 / trial->batch * median(times_s));
    fflush(stdout);
    generator_close(generator);
    device_clock_close(&clock);
    must(cudaFree(labels));
    must(cudaFree(images));
    synth_free(&synth);
}

static void print_all_times(void)
{
    const enum output_fit crop = OUTPUT_CROP, resize = OUTPUT_RESIZE;
    const struct trial trials[] = {
        {1000, 200000, 362, 256, 0, crop, DTYPE_U8, 1, OUTPUT_NCHW},
        {1000, 200000, 362, 256, 224, resize, DTYPE_F16, 3, OUTPUT_NCHW},
        {1000, 200000, 362, 256, 224, resize, DTYPE_U8, 1, OUTPUT_NCHW},
        {1000, 200000, 362, 256, 224, crop, DTYPE_F16, 3, OUTPUT_NHWC},
        {1000, 200000, 362, 1, 0, crop, DTYPE_U8, 1, OUTPUT_NCHW},
        {1000, 200000, 362, 1024, 0, crop, DTYPE_U8, 1, OUTPUT_NCHW},
        {1000, 200000, 362, 1024, 224, resize, DTYPE_F16, 3, OUTPUT_NCHW},
        {1000, 200000, 362, 256, 0, crop, DTYPE_U8, 1, OUTPUT_NCHW, true},
        {1000, 200000, 362, 256, 224, resize, DTYPE_F16, 3, OUTPUT_NCHW, true},
        {1000, 100000, 512, 1000, 0, crop, DTYPE_U8, 1, OUTPUT_NCHW, false, true},
        {1000, 0, 224, 256, 0, crop, DTYPE_U8, 1, OUTPUT_NCHW, false, false, false, FAULT_NONE, SOLID_SPHERE},
        {1000, 0, 224, 1024, 0, crop, DTYPE_U8, 1, OUTPUT_NCHW, false, false, false, FAULT_NONE,
         SOLID_SPHERE},
        {1000, 0, 224, 12000, 0, crop, DTYPE_U8, 1, OUTPUT_NCHW, false, false, false, FAULT_NONE,
         SOLID_SPHERE},
        {1000, 0, 224, 12000, 0, crop, DTYPE_U8, 1, OUTPUT_NCHW, false, false, false, FAULT_NONE,
         SOLID_CIRCLE},
        {100, 0, 224, 1200, 0, crop, DTYPE_U8, 1, OUTPUT_NCHW, false, false, false, FAULT_NONE, SOLID_SPHERE},
        {21, 0, 224, 256, 0, crop, DTYPE_U8, 1, OUTPUT_NCHW, false, false, false, FAULT_NONE, SOLID_SPHERE},
        {1000, 0, 224, 1024, 0, crop, DTYPE_F16, 3, OUTPUT_NCHW, false, false, false, FAULT_NONE,
         SOLID_SPHERE},
    };
    print_bank_time(1000, 200000, 362, false, false);
    print_bank_time(1000, 200000, 362, false, true);
    print_bank_time(1000, 200000, 362, true, false);
    print_bank_time(1000, 100000, 512, true, false);
    print_bank_time(1, 200000, 362, false, false);
    for (const struct trial &trial : trials)
        print_times(&trial);
}

int main(int argc, char **argv)
{
    bool brief = false, times = false;
    for (int i = 1; i < argc; i++) {
        brief = brief || strcmp(argv[i], "--short") == 0;
        times = times || strcmp(argv[i], "--times") == 0;
    }
    if (device_probe(0) != STATUS_OK) {
        fprintf(stderr, "gpu_fractal: %s\n", status_text());
        return 4;
    }
    if (!times)
        compare_all(brief);
    if (!brief)
        print_all_times();
    return failures ? 3 : 0;
}
