/* Tests sets of embeddings in device memory (ops/rows_device.h). The kept rows, their numbers and their
 * values must be those of `ops-naive`, bit for bit. Batches must be those of the permutation, computed on the
 * host.
 *
 *     gpu_rows            runs all checks, then measures (4,000,000 rows of 768 floats; needs 20 GB)
 *     gpu_rows --quick    omits the checks of large sets and the measurements
 *     gpu_rows --fault    plants a fault in each check with values; each of these checks must then fail
 *
 * Prints one line per check. Exit status 1 if a check failed, 4 without a GPU. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "common/check.cuh"
#include "core/parallel.h"
#include "core/philox.h"
#include "core/timer.h"
#include "core/variant.h"
#include "machine/device.h"
#include "ops/job.h"
#include "ops/row_batches.h"
#include "ops/rows_device.h"

extern "C" const struct variant variant_ops_naive;

#define POISON 0xA5
#define GUARD  64 /* bytes after an output, which must not change */

static unsigned passed, failed;
static bool fault;

#define MUST(call)                                                       \
    do {                                                                 \
        if (cuda_status((call), #call, __FILE__, __LINE__) != STATUS_OK) \
            exit((fprintf(stderr, "gpu_rows: %s\n", status_text()), 1)); \
    } while (0)

static void report(bool ok, const std::string &name)
{
    printf("%-7s %s\n", ok ? "ok" : "FAILED", name.c_str());
    fflush(stdout);
    (ok ? passed : failed)++;
}

/* Runs a call that must succeed. Reports the failure otherwise. */
static bool works(enum status status, const std::string &name)
{
    if (status != STATUS_OK)
        report(false, name + ": " + status_text());
    return status == STATUS_OK;
}

/* ---- Rows: a function of their number, on host and device ---- */

static __host__ __device__ uint32_t mixed(uint64_t value)
{
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return (uint32_t)(value ^ value >> 31);
}

/* Every 20th row is bad: too small, too large, with NaN, with infinity, or zero, in turn. */
static __host__ __device__ bool is_bad(uint64_t row)
{
    return row % 20 == 7;
}

/* Every 13th row has the values of an earlier row. */
static __host__ __device__ uint64_t same_as(uint64_t row)
{
    return row % 13 == 5 && !is_bad(row) ? row / 2 : row;
}

static __host__ __device__ float value_of(uint64_t row, uint32_t column, uint32_t width)
{
    uint64_t source = same_as(row), kind = source / 20 % 5;
    float value = ((float)(mixed(source * width + column) >> 8) * 0x1p-23f - 1) * sqrtf(3.0f / (float)width);
    if (!is_bad(source))
        return value;
    if (kind == 2 && column == source % width)
        return float_from_bits(0x7FC01234);
    if (kind == 3 && column == source % width)
        return float_from_bits(0xFF800000);
    return kind == 0 ? value * 1e-3f : kind == 1 ? value * 1e3f : kind == 4 ? 0 : value;
}

static __host__ __device__ void store(uint8_t *row, enum dtype type, uint32_t i, float value)
{
    if (type == DTYPE_F32)
        ((float *)row)[i] = value;
    else
        ((uint16_t *)row)[i] = type == DTYPE_F16 ? half_from_float(value) : bf16_from_float(value);
}

static std::vector<uint8_t> make_rows(uint64_t rows, uint32_t width, enum dtype type)
{
    size_t row_bytes = width * dtype_bytes(type);
    std::vector<uint8_t> bytes(rows * row_bytes);
    for (uint64_t row = 0; row < rows; row++)
        for (uint32_t i = 0; i < width; i++)
            store(bytes.data() + row * row_bytes, type, i, value_of(row, i, width));
    return bytes;
}

static __global__ void fill_rows(uint8_t *rows, uint64_t count, uint32_t width, enum dtype type)
{
    for (uint64_t row = blockIdx.x; row < count; row += gridDim.x)
        for (uint32_t i = threadIdx.x; i < width; i += blockDim.x)
            store(rows + row * width * dtype_bytes(type), type, i, value_of(row, i, width));
}

static int32_t label_of(uint64_t row)
{
    return (int32_t)mixed(row + 1000) & 0x7FFFFFFF;
}

/* ---- The reference: ops-naive ---- */

struct reference {
    std::vector<uint64_t> order; /* numbers of the kept rows */
    std::vector<uint8_t> rows;   /* with padding */
    uint64_t stride;
};

static enum ops_type type_of(enum dtype type)
{
    return type == DTYPE_F32 ? OPS_F32 : type == DTYPE_F16 ? OPS_F16 : OPS_BF16;
}

static uint32_t padded_width(uint32_t width, uint32_t align)
{
    return align > 1 ? (width + align - 1) / align * align : width;
}

static void fetch(const struct ops *ops, void *state, enum ops_array array, uint64_t count, void *to)
{
    struct ops_fetch fetch = {};
    fetch.array = array;
    fetch.count = count;
    fetch.to = to;
    if (ops_array_bytes(ops, array) && variant_ops_naive.fetch(state, &fetch) != STATUS_OK)
        exit((fprintf(stderr, "gpu_rows: %s\n", status_text()), 1));
}

static struct reference make_reference(const std::vector<uint8_t> &bytes, uint64_t count, uint32_t width,
                                       enum dtype from, const struct rows_device_steps &steps)
{
    const enum dtype to = steps.to == DTYPE_STORED ? from : steps.to;
    const struct resources resources = {1, 0};
    struct ops_control control = {};
    struct ops_part part = {bytes.data(), 0, count};
    struct ops ops = {};
    struct reference reference;
    struct run_time time = {};
    struct ops_fetch summary = {};
    void *state = NULL;
    ops.steps[OPS_MASK] = steps.mask;
    ops.steps[OPS_DEDUP] = steps.dedup;
    ops.steps[OPS_COMPACT] = ops.steps[OPS_CONVERT] = true;
    ops.format.from = from;
    ops.format.to = type_of(to);
    ops.format.columns = width;
    ops.norm_min = steps.norm_min;
    ops.norm_max = steps.norm_max;
    ops.count = count;
    ops.parts = &part;
    ops.part_count = count > 0;
    ops.row_bytes = width * dtype_bytes(from);
    ops.control = &control;
    if (variant_ops_naive.setup(&resources, &ops, &state) != STATUS_OK ||
        variant_ops_naive.run(state, 0, &time) != STATUS_OK ||
        variant_ops_naive.fetch(state, &summary) != STATUS_OK)
        exit((fprintf(stderr, "gpu_rows: %s\n", status_text()), 1));
    const uint64_t kept = summary.summary.outputs;
    const size_t packed = width * dtype_bytes(to);
    std::vector<uint8_t> values(kept * packed);
    reference.order.resize(kept);
    fetch(&ops, state, OPS_ORDER, kept, reference.order.data());
    fetch(&ops, state, OPS_VALUES, kept, values.data());
    reference.stride = padded_width(width, steps.align) * dtype_bytes(to);
    reference.rows.assign(kept * reference.stride, 0);
    for (uint64_t k = 0; k < kept; k++)
        memcpy(reference.rows.data() + k * reference.stride, values.data() + k * packed, packed);
    variant_ops_naive.teardown(state);
    return reference;
}

/* ---- Batches ---- */

/* Device memory for a batch, poisoned, with a guard after it. `offset` moves the values by some bytes. */
struct output {
    uint8_t *memory;
    int64_t *labels;
    uint64_t rows, stride, offset;
    std::vector<uint8_t> host;
    std::vector<int64_t> host_labels;

    output(uint64_t rows, uint64_t stride, uint64_t offset = 0) : rows(rows), stride(stride), offset(offset)
    {
        host.resize(rows * stride + offset + GUARD);
        host_labels.resize(rows + 1);
        MUST(cudaMalloc(&memory, host.size()));
        MUST(cudaMalloc(&labels, host_labels.size() * sizeof *labels));
        poison();
    }
    ~output()
    {
        MUST(cudaFree(memory));
        MUST(cudaFree(labels));
    }
    void poison()
    {
        MUST(cudaMemset(memory, POISON, host.size()));
        MUST(cudaMemset(labels, POISON, host_labels.size() * sizeof *labels));
        MUST(cudaDeviceSynchronize()); /* streams that do not block do not wait for it */
    }
    uint8_t *values() const
    {
        return memory + offset;
    }
    void read()
    {
        MUST(cudaDeviceSynchronize());
        MUST(cudaMemcpy(host.data(), memory, host.size(), cudaMemcpyDeviceToHost));
        MUST(cudaMemcpy(host_labels.data(), labels, host_labels.size() * sizeof *labels,
                        cudaMemcpyDeviceToHost));
        if (fault && rows > 0)
            host[offset + stride * (rows / 2) + stride / 2] ^= 1;
    }
    const uint8_t *row(uint64_t j) const
    {
        return host.data() + offset + j * stride;
    }
    /* Returns whether the bytes before the first row and after row `count` still have the poison. */
    bool guarded(uint64_t count) const
    {
        for (uint64_t i = 0; i < offset; i++)
            if (host[i] != POISON)
                return false;
        for (uint64_t i = offset + count * stride; i < host.size(); i++)
            if (host[i] != POISON)
                return false;
        return host_labels[count] == (int64_t)(0x0101010101010101u * POISON);
    }
};

/* Compares row `j` of a batch with kept row `k`. */
static bool row_equals(const struct output &out, uint64_t j, const struct reference &wanted, uint64_t k,
                       bool labels)
{
    return memcmp(out.row(j), wanted.rows.data() + k * wanted.stride, wanted.stride) == 0 &&
           (!labels || out.host_labels[j] == label_of(wanted.order[k]));
}

/* Gathers all rows of an epoch in batches of `batch` rows and compares them. */
static std::string check_epoch(struct rows_device *rows, const struct reference &wanted, uint64_t epoch,
                               uint64_t batch, uint64_t offset, bool labels)
{
    const uint64_t seed = 0x123456789ABCDEF0u, count = wanted.order.size();
    struct permutation permutation = permutation_begin(seed + epoch, count);
    struct output out(batch, wanted.stride, offset);
    for (uint64_t first = 0; first < count; first += batch) {
        uint64_t size = count - first < batch ? count - first : batch;
        out.poison();
        if (rows_device_gather(rows, true, seed, epoch, first, size, out.values(), labels ? out.labels : NULL,
                               NULL) != STATUS_OK)
            return status_text();
        out.read();
        for (uint64_t j = 0; j < size; j++)
            if (!row_equals(out, j, wanted, permutation_at(&permutation, first + j), labels))
                return "element " + std::to_string(first + j) + " of epoch " + std::to_string(epoch) +
                       " differs";
        if (!out.guarded(labels ? size : batch))
            return "bytes outside a batch have changed";
    }
    return "";
}

/* Gathers a list of numbers with repetitions, from host or device memory. */
static std::string check_numbers(struct rows_device *rows, const struct reference &wanted, bool on_device,
                                 bool labels)
{
    const uint64_t count = wanted.order.size(), size = count < 300 ? 2 * count : 300;
    std::vector<uint32_t> numbers(size + 1);
    struct output out(size + 1, wanted.stride);
    uint32_t *device;
    std::string wrong;
    for (uint64_t j = 0; j < size; j++)
        numbers[j] = j % 3 == 0 ? (uint32_t)(count - 1 - j / 3) : mixed(j) % (uint32_t)count;
    numbers[size] = (uint32_t)count; /* refused on the host, NaN on the device */
    MUST(cudaMalloc(&device, numbers.size() * sizeof *device));
    MUST(cudaMemcpy(device, numbers.data(), numbers.size() * sizeof *device, cudaMemcpyHostToDevice));
    if (rows_device_gather_numbers(rows, on_device ? device : numbers.data(), on_device, size + on_device,
                                   out.values(), labels ? out.labels : NULL, NULL) != STATUS_OK)
        wrong = status_text();
    std::fill(numbers.begin(), numbers.end() - 1, 0xFFFFFFFFu); /* must have been copied */
    out.read();
    for (uint64_t j = 0; wrong.empty() && j < size; j++) {
        uint64_t k = j % 3 == 0 ? count - 1 - j / 3 : mixed(j) % (uint32_t)count;
        if (!row_equals(out, j, wanted, k, labels))
            wrong = "row " + std::to_string(j) + " of a list differs";
    }
    const uint16_t *last = reinterpret_cast<const uint16_t *>(out.row(size));
    for (uint64_t i = 0; wrong.empty() && on_device && i < wanted.stride / 2; i++)
        if (last[i] != 0x7FFF || (labels && out.host_labels[size] != -1))
            wrong = "a number that does not exist must give NaN";
    if (wrong.empty() && !on_device &&
        rows_device_gather_numbers(rows, &numbers.back(), false, 1, out.values(), NULL, NULL) != STATUS_USAGE)
        wrong = "a number that does not exist was accepted";
    MUST(cudaFree(device));
    return wrong;
}

/* Gathers by a batch number in device memory, across an epoch's end. */
static std::string check_steps(struct rows_device *rows, const struct reference &wanted, bool labels)
{
    const uint64_t count = wanted.order.size(), size = count / 3 > 0 ? count / 3 : 1, batches = count / size;
    struct output out(size, wanted.stride);
    uint64_t *step;
    std::string wrong;
    MUST(cudaMalloc(&step, sizeof *step));
    for (uint64_t number : {(uint64_t)0, batches - 1, batches, 5 * batches + batches / 2}) {
        struct permutation permutation = permutation_begin(99 + number / batches, count);
        MUST(cudaMemcpy(step, &number, sizeof number, cudaMemcpyHostToDevice));
        if (rows_device_gather_step(rows, true, 99, step, size, out.values(), labels ? out.labels : NULL,
                                    NULL) != STATUS_OK)
            wrong = status_text();
        out.read();
        for (uint64_t j = 0; wrong.empty() && j < size; j++)
            if (!row_equals(out, j, wanted, permutation_at(&permutation, number % batches * size + j),
                            labels))
                wrong = "row " + std::to_string(j) + " of step " + std::to_string(number) + " differs";
    }
    MUST(cudaFree(step));
    return wrong;
}

/* ---- Sets ---- */

enum way { MAPPED, COPIED, WRAPPED, WRAPPED_STRIDED };
static const char *const ways[] = {"mapped", "copied", "wrapped", "wrapped with a stride"};

struct set_case {
    enum way way;
    uint64_t rows;
    uint32_t width;
    enum dtype from, to;
    bool mask, dedup, labels;
    uint32_t align;
    uint64_t limit;
};

static const char *name_of(enum dtype type)
{
    return type == DTYPE_STORED ? "stored" : dtype_names[type];
}

static std::string describe(const struct set_case &one)
{
    char text[160];
    snprintf(text, sizeof text, "%s, %llu x %u %s to %s%s%s%s", ways[one.way], (unsigned long long)one.rows,
             one.width, name_of(one.from), name_of(one.to), one.mask ? ", mask" : "",
             one.dedup ? ", dedup" : "", one.labels ? ", labels" : "");
    std::string name = text;
    if (one.align > 1)
        name += ", align " + std::to_string(one.align);
    if (one.limit)
        name += ", limit " + std::to_string(one.limit);
    return name;
}

struct copied {
    const uint8_t *rows;
    uint64_t count;
    size_t row_bytes;
    std::atomic<uint64_t> calls, total, fails_at; /* total: rows; fails_at: the row at which copies fail */
};

static enum status copy_rows(void *context, uint64_t first, uint64_t count, void *to)
{
    struct copied *copied = static_cast<struct copied *>(context);
    copied->calls++;
    copied->total += count;
    if (first + count > copied->count || first + count > copied->fails_at)
        return status_set(STATUS_FAILED, "rows %llu to %llu cannot be read", (unsigned long long)first,
                          (unsigned long long)(first + count));
    memcpy(to, copied->rows + first * copied->row_bytes, count * copied->row_bytes);
    return STATUS_OK;
}

/* A set with its input, which some ways need as long as the set is open. */
struct opened {
    std::vector<uint8_t> bytes;
    std::vector<int32_t> labels;
    struct copied copied = {};
    struct embeddings set = {};
    struct embeddings_part parts[3] = {};
    uint8_t *device = NULL;
    struct rows_device *rows = NULL;

    ~opened()
    {
        rows_device_close(rows);
        MUST(cudaFree(device));
    }
};

static struct rows_device_steps steps_of(const struct set_case &one)
{
    struct rows_device_steps steps = {};
    steps.mask = one.mask;
    steps.norm_min = 0.1f;
    steps.norm_max = 100;
    steps.dedup = one.dedup;
    steps.to = one.to;
    steps.align = one.align;
    return steps;
}

/* Divides the rows into three parts, of which the second is empty. */
static void make_set(const struct set_case &one, struct opened *opened)
{
    uint64_t cut = one.rows / 3, row_bytes = one.width * dtype_bytes(one.from);
    const uint64_t firsts[] = {0, cut, cut, one.rows};
    for (int i = 0; i < 3; i++) {
        struct embeddings_part *part = &opened->parts[i];
        *part = {};
        part->file = "set";
        part->tensor = "";
        part->values = part->stored = opened->bytes.data() + firsts[i] * row_bytes;
        part->value_bytes = row_bytes;
        part->first = firsts[i];
        part->rows = firsts[i + 1] - firsts[i];
    }
    opened->set.stored = one.from == DTYPE_F32   ? EMBEDDINGS_F32
                         : one.from == DTYPE_F16 ? EMBEDDINGS_F16
                                                 : EMBEDDINGS_BF16;
    opened->set.stored_columns = one.width;
    opened->set.dtype = one.from;
    opened->set.columns = one.width;
    opened->set.rows = one.rows;
    opened->set.parts = opened->parts;
    opened->set.part_count = 3;
}

static enum status open_host(const struct set_case &one, struct opened *opened, int device)
{
    struct rows_device_request request = {};
    if (one.way == MAPPED) {
        make_set(one, opened);
        request.set = &opened->set;
    } else {
        opened->copied.rows = opened->bytes.data();
        opened->copied.count = one.rows;
        opened->copied.row_bytes = one.width * dtype_bytes(one.from);
        opened->copied.fails_at = UINT64_MAX;
        request.copy = copy_rows;
        request.context = &opened->copied;
        request.rows = one.rows;
        request.width = one.width;
        request.dtype = one.from;
    }
    request.labels = one.labels ? opened->labels.data() : NULL;
    request.steps = steps_of(one);
    request.device = device;
    request.memory_limit = one.limit;
    request.threads = 3;
    return rows_device_open(&request, &opened->rows);
}

static enum status open_device(const struct set_case &one, struct opened *opened, int device)
{
    struct rows_device_tensor tensor = {};
    struct rows_device_steps steps = steps_of(one);
    size_t row_bytes = one.width * dtype_bytes(one.from);
    size_t stride = row_bytes + (one.way == WRAPPED_STRIDED ? 3 * dtype_bytes(one.from) : 0);
    MUST(cudaMalloc(&opened->device, one.rows * stride + 1));
    MUST(cudaMemset(opened->device, POISON, one.rows * stride + 1));
    if (one.rows > 0)
        MUST(cudaMemcpy2D(opened->device, stride, opened->bytes.data(), row_bytes, row_bytes, one.rows,
                          cudaMemcpyHostToDevice));
    tensor.values = opened->device;
    tensor.rows = one.rows;
    tensor.width = one.width;
    tensor.dtype = one.from;
    tensor.stride = one.way == WRAPPED_STRIDED ? stride : 0;
    tensor.labels = one.labels ? opened->labels.data() : NULL;
    tensor.device = device;
    return rows_device_wrap(&tensor, &steps, one.limit, NULL, &opened->rows);
}

static enum status open_case(const struct set_case &one, struct opened *opened, int device = 0)
{
    opened->bytes = make_rows(one.rows, one.width, one.from);
    for (uint64_t row = 0; row < one.rows; row++)
        opened->labels.push_back(label_of(row));
    return one.way == MAPPED || one.way == COPIED ? open_host(one, opened, device)
                                                  : open_device(one, opened, device);
}

/* Selects among the rows of a set, without and with their numbers. The second selection must have the numbers
 * of the first one within the set, replaced by those of the set. */
static std::string check_chain(const struct rows_device *from, const std::vector<uint32_t> &numbers,
                               bool mask)
{
    const struct rows_device_info info = rows_device_info(from);
    const struct rows_device_steps steps = {mask,         1, 1e19f, false,
                                            DTYPE_STORED, 0}; /* most norms are near 1 */
    struct rows_device_tensor tensor = {};
    struct rows_device *chosen[2] = {};
    std::string wrong;
    tensor.values = info.values;
    tensor.rows = info.rows;
    tensor.stride = info.stride;
    tensor.width = info.width;
    tensor.dtype = info.dtype;
    tensor.device = info.device;
    for (int i = 0; i < 2; i++) {
        tensor.numbers = i ? info.numbers : NULL;
        if (wrong.empty() && rows_device_wrap(&tensor, &steps, 0, NULL, &chosen[i]) != STATUS_OK)
            wrong = status_text();
    }
    const uint64_t count = wrong.empty() ? rows_device_info(chosen[0]).rows : 0;
    std::vector<uint32_t> within(count + 1), own(count + 1);
    if (wrong.empty() && (rows_device_numbers(chosen[0], 0, count, within.data()) != STATUS_OK ||
                          rows_device_numbers(chosen[1], 0, count, own.data()) != STATUS_OK))
        wrong = status_text();
    uint64_t hash = 0;
    for (uint64_t k = 0; wrong.empty() && k < count; k++) {
        hash += rows_device_number_hash(k, own[k]);
        if (own[k] != numbers[within[k]])
            wrong = "the number of row " + std::to_string(k) + " of a second selection is wrong";
    }
    if (wrong.empty() && info.numbers && rows_device_info(chosen[1]).numbers_hash != hash + fault)
        wrong = "the hash of the numbers of a second selection is wrong";
    for (struct rows_device *each : chosen)
        rows_device_close(each);
    return wrong;
}

/* Compares the description of a set and the numbers of its rows. */
static std::string check_info(const struct rows_device *rows, const struct set_case &one,
                              const struct reference &wanted)
{
    struct rows_device_info info = rows_device_info(rows);
    std::vector<uint32_t> numbers(wanted.order.size());
    uint64_t cut = numbers.size() / 2;
    if (info.rows != wanted.order.size())
        return std::to_string(info.rows) + " rows instead of " + std::to_string(wanted.order.size());
    if (info.input_rows != one.rows || info.width != one.width ||
        info.padded_width != padded_width(one.width, one.align) ||
        info.dtype != (one.to == DTYPE_STORED ? one.from : one.to))
        return "the description is wrong";
    const uint64_t limited = info.memory_bytes - (info.labels ? one.rows * sizeof *info.labels : 0);
    if (one.limit ? info.resident_rows == 0 || info.resident_rows >= info.rows || limited > one.limit
                  : info.resident_rows != info.rows)
        return std::to_string(info.resident_rows) + " of " + std::to_string(info.rows) +
               " rows are resident, in " + std::to_string(info.memory_bytes) + " bytes";
    if (rows_device_numbers(rows, 0, cut, numbers.data()) != STATUS_OK ||
        rows_device_numbers(rows, cut, numbers.size() - cut, numbers.data() + cut) != STATUS_OK)
        return status_text();
    for (uint64_t k = 0; k < numbers.size(); k++)
        if (numbers[k] != wanted.order[k])
            return "the number of row " + std::to_string(k) + " is wrong";
    uint64_t hash = 0;
    for (uint64_t k = 0; k < numbers.size(); k++)
        hash += rows_device_number_hash(k, numbers[k]);
    if (one.rows > 0 && (info.numbers != NULL) != (one.mask || one.dedup))
        return "numbers are missing, or there are too many";
    if (info.numbers_hash != (info.numbers ? hash : 0))
        return "the hash of the numbers is wrong";
    if (one.limit || info.rows == 0)
        return "";
    const std::string wrong = check_chain(rows, numbers, false);
    return wrong.empty() ? check_chain(rows, numbers, true) : wrong;
}

static void check_set(const struct set_case &one)
{
    struct opened opened;
    std::string name = describe(one);
    if (!works(open_case(one, &opened), name))
        return;
    struct reference wanted = make_reference(opened.bytes, one.rows, one.width, one.from, steps_of(one));
    const uint64_t count = wanted.order.size(),
                   value = dtype_bytes(one.to == DTYPE_STORED ? one.from : one.to);
    std::string wrong = check_info(opened.rows, one, wanted);
    if (wrong.empty() && count > 0)
        wrong = check_epoch(opened.rows, wanted, 0, count, 0, one.labels);
    if (wrong.empty() && count > 0)
        wrong = check_epoch(opened.rows, wanted, 7, count / 4 + 1, value, one.labels);
    if (wrong.empty() && count > 0)
        wrong = check_numbers(opened.rows, wanted, false, one.labels);
    if (wrong.empty() && count > 0 && !one.limit) {
        wrong = check_numbers(opened.rows, wanted, true, one.labels);
        if (wrong.empty())
            wrong = check_steps(opened.rows, wanted, one.labels);
    }
    report(wrong.empty(), name + (wrong.empty() ? "" : ": " + wrong));
}

static void check_sets(void)
{
    const enum dtype f32 = DTYPE_F32, f16 = DTYPE_F16, bf16 = DTYPE_BF16, stored = DTYPE_STORED;
    for (enum way way : {MAPPED, COPIED, WRAPPED, WRAPPED_STRIDED})
        for (uint64_t rows : {0, 1, 3, 997})
            if (rows > 0 || !fault)
                check_set({way, rows, 768, f32, f16, true, false, true, 0, 0});
    for (enum dtype from : {f32, f16, bf16})
        for (enum dtype to : {f32, f16, bf16, stored})
            for (uint32_t width : {767, 768})
                check_set({width == 767 ? MAPPED : WRAPPED, 499, width, from, to, true, false, false, 0, 0});
    for (uint32_t width : {1, 3, 8, 100, 1000, 1024, 4096, 65536})
        for (uint32_t align : {0, 16}) {
            const uint64_t rows = width > 4096 ? 61 : 499;
            check_set({COPIED, rows, width, f32, f16, true, false, true, align, 0});
            check_set({WRAPPED, rows, width, f16, bf16, true, true, true, align, 0});
            check_set({WRAPPED, rows, width, f32, stored, false, false, true, align, 0});
            check_set({MAPPED, rows, width, f32, bf16, false, false, true, align, 0});
        }
    for (uint32_t align : {5, 7, 8, 1000})
        for (bool mask : {false, true})
            check_set({mask ? COPIED : WRAPPED, 499, 768, f32, f16, mask, false, true, align, 0});
    for (enum way way : {MAPPED, WRAPPED_STRIDED})
        check_set({way, 997, 64, f32, f16, false, true, true, 0, 0});
    check_set({WRAPPED_STRIDED, 997, 768, f16, stored, false, false, true, 0, 0});
    check_set({WRAPPED_STRIDED, 997, 768, f32, f32, true, false, true, 8, 0});
}

/* Sets of which only a part fits into the memory limit. */
static void check_partial(void)
{
    for (enum way way : {MAPPED, COPIED})
        for (enum dtype to : {DTYPE_F16, DTYPE_STORED})
            for (bool mask : {true, false}) {
                const uint64_t limit = to == DTYPE_F16 ? 4000000 : 8000000;
                check_set({way, 5003, 768, DTYPE_F32, to, mask, false, true, 0, limit});
            }
    check_set({COPIED, 5003, 767, DTYPE_F32, DTYPE_BF16, true, true, true, 8, 4000000});
    check_set({MAPPED, 5003, 767, DTYPE_F16, DTYPE_F32, true, false, false, 0, 8000000});
    check_set({MAPPED, 5003, 1000, DTYPE_BF16, DTYPE_STORED, true, false, true, 16, 5000000});
    check_set({COPIED, 61, 65536, DTYPE_F32, DTYPE_F16, true, false, true, 0, 6000000});
}

/* ---- Graphs, streams, several sets, errors ---- */

static void check_graph(void)
{
    const char *name = "a graph of three batches and a step, launched five times";
    const struct set_case one = {COPIED, 3001, 768, DTYPE_F32, DTYPE_F16, true, false, true, 0, 0};
    struct opened opened;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    uint64_t *step;
    if (!works(open_case(one, &opened), name))
        return;
    struct reference wanted = make_reference(opened.bytes, one.rows, one.width, one.from, steps_of(one));
    const uint64_t count = wanted.order.size(), size = 1000, batches = count / size;
    std::vector<uint32_t> list(size, 17);
    uint32_t *numbers;
    struct output fixed(size, wanted.stride), next(size, wanted.stride), listed(size, wanted.stride);
    std::string wrong;
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    MUST(cudaMalloc(&step, sizeof *step));
    MUST(cudaMemset(step, 0, sizeof *step));
    MUST(cudaMalloc(&numbers, size * sizeof *numbers));
    MUST(cudaMemcpy(numbers, list.data(), size * sizeof *numbers, cudaMemcpyHostToDevice));
    enum status status = device_load(0);
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    if (status == STATUS_OK)
        status = rows_device_gather(opened.rows, true, 1, 2, 3, size, fixed.values(), fixed.labels, stream);
    if (status == STATUS_OK)
        status =
            rows_device_gather_step(opened.rows, true, 5, step, size, next.values(), next.labels, stream);
    if (status == STATUS_OK)
        status = rows_device_gather_numbers(opened.rows, numbers, true, size, listed.values(), listed.labels,
                                            stream);
    if (status == STATUS_OK)
        status = device_add(0, step, 1, stream);
    std::string refused;
    if (status == STATUS_OK && (rows_device_gather_numbers(opened.rows, list.data(), false, 1, fixed.values(),
                                                           NULL, stream) != STATUS_USAGE ||
                                strcmp(status_subject(), "stream") != 0))
        refused = "a list in host memory must be refused in a capture";
    MUST(cudaStreamEndCapture(stream, &graph));
    if (!works(status, name))
        return;
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    wrong = refused;
    struct permutation first = permutation_begin(3, count);
    for (uint64_t launch = 0; wrong.empty() && launch < 5; launch++) {
        struct permutation permutation = permutation_begin(5 + launch / batches, count);
        fixed.poison(), next.poison(), listed.poison();
        MUST(cudaGraphLaunch(exec, stream));
        fixed.read(), next.read(), listed.read();
        for (uint64_t j = 0; wrong.empty() && j < size; j++)
            if (!row_equals(fixed, j, wanted, permutation_at(&first, 3 + j), true) ||
                !row_equals(next, j, wanted, permutation_at(&permutation, launch % batches * size + j),
                            true) ||
                !row_equals(listed, j, wanted, 17, true))
                wrong = "row " + std::to_string(j) + " of launch " + std::to_string(launch) + " differs";
    }
    MUST(cudaGraphExecDestroy(exec));
    MUST(cudaGraphDestroy(graph));
    MUST(cudaStreamDestroy(stream));
    MUST(cudaFree(step));
    MUST(cudaFree(numbers));
    report(wrong.empty(), name + (wrong.empty() ? "" : ": " + wrong));
}

#define HOLD_NS 20000000

static __global__ void hold()
{
    uint64_t begin_ns, now_ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin_ns));
    do
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now_ns));
    while (now_ns - begin_ns < HOLD_NS);
}

/* Batches of a set that is not resident, each after a kernel that takes long. A slot of pinned memory must
 * not be filled again before the kernel that reads it has run. */
static void check_slots(void)
{
    const char *name = "twenty batches with rows from the host, after kernels of 20 ms";
    const struct set_case one = {COPIED, 5003, 768, DTYPE_F32, DTYPE_F16, true, false, true, 0, 4000000};
    struct opened opened;
    if (!works(open_case(one, &opened), name))
        return;
    struct reference wanted = make_reference(opened.bytes, one.rows, one.width, one.from, steps_of(one));
    const uint64_t count = wanted.order.size(), size = 700, batches = count / size;
    std::vector<struct output *> outs;
    std::string wrong;
    cudaStream_t stream;
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (uint64_t n = 0; n < 20; n++)
        outs.push_back(new struct output(size, wanted.stride));
    for (uint64_t n = 0; wrong.empty() && n < outs.size(); n++) {
        hold<<<1, 1, 0, stream>>>();
        MUST(cudaGetLastError());
        if (rows_device_gather(opened.rows, true, 3, n / batches, n % batches * size, size, outs[n]->values(),
                               outs[n]->labels, stream) != STATUS_OK)
            wrong = status_text();
    }
    for (uint64_t n = 0; n < outs.size(); n++) {
        struct permutation permutation = permutation_begin(3 + n / batches, count);
        outs[n]->read();
        for (uint64_t j = 0; wrong.empty() && j < size; j++)
            if (!row_equals(*outs[n], j, wanted, permutation_at(&permutation, n % batches * size + j), true))
                wrong = "row " + std::to_string(j) + " of batch " + std::to_string(n) + " differs";
        delete outs[n];
    }
    MUST(cudaStreamDestroy(stream));
    report(wrong.empty(), name + (wrong.empty() ? "" : ": " + wrong));
}

/* Gathers batches of three sets at the same time, two of them from two threads each. */
static void check_several(void)
{
    const struct set_case cases[] = {
        {COPIED, 2003, 768, DTYPE_F32, DTYPE_F16, true, false, true, 0, 0},
        {WRAPPED, 1009, 100, DTYPE_F16, DTYPE_F32, true, true, true, 8, 0},
        {MAPPED, 5003, 768, DTYPE_F32, DTYPE_F16, true, false, true, 0, 4000000},
    };
    struct opened opened[3];
    struct reference wanted[3];
    std::string wrong[5];
    for (int i = 0; i < 3; i++) {
        if (!works(open_case(cases[i], &opened[i]), "three sets at once"))
            return;
        wanted[i] =
            make_reference(opened[i].bytes, cases[i].rows, cases[i].width, cases[i].from, steps_of(cases[i]));
    }
    std::vector<std::thread> threads;
    for (int i = 0; i < 5; i++)
        threads.emplace_back([&, i] {
            for (uint64_t epoch = 0; wrong[i].empty() && epoch < 4; epoch++)
                wrong[i] =
                    check_epoch(opened[i / 2].rows, wanted[i / 2], 10 * (uint64_t)i + epoch, 301, 0, true);
        });
    for (std::thread &thread : threads)
        thread.join();
    std::string all = wrong[0] + wrong[1] + wrong[2] + wrong[3] + wrong[4];
    report(all.empty(), "three sets at once, five threads" + (all.empty() ? "" : ": " + all));
}

static void check_memory(void)
{
    size_t before = 0, after, total;
    std::string wrong;
    for (uint32_t i = 0; i < 80 && wrong.empty(); i++) {
        if (i == 20) { /* the kernels are loaded */
            MUST(cudaDeviceSynchronize());
            MUST(cudaMemGetInfo(&before, &total));
        }
        struct set_case one = {(enum way)(i % 3), 2003,       768,  DTYPE_F32, DTYPE_F16,
                               i % 4 != 0,        i % 5 == 0, true, 0,         0};
        struct opened opened;
        struct output out(100, 768 * 2);
        one.limit = i % 3 < 2 && i % 7 == 0 ? 2500000 : 0;
        if (open_case(one, &opened) != STATUS_OK ||
            rows_device_gather(opened.rows, true, 0, 0, 0, 100, out.values(), out.labels, NULL) != STATUS_OK)
            wrong = status_text();
    }
    MUST(cudaDeviceSynchronize());
    MUST(cudaMemGetInfo(&after, &total));
    if (wrong.empty() && after + ((size_t)4 << 20) < before)
        wrong = std::to_string((before - after) >> 20) + " MB of device memory were not returned";
    report(wrong.empty(), "80 sets opened and closed" + (wrong.empty() ? "" : ": " + wrong));
}

/* ---- Streams of batches ---- */

enum { STREAM_STEP = 600, STREAM_RANKS = 2, STREAM_ROWS = STREAM_STEP / STREAM_RANKS };

static enum status open_stream(const struct opened &opened, bool shuffle, uint32_t rank, uint32_t ranks,
                               bool whole, struct device_batches **batches)
{
    const uint64_t rows = rows_device_info(opened.rows).rows;
    struct row_batches_request request = {};
    request.rows = opened.rows;
    request.labels = true;
    request.seed = 7;
    request.shuffle = shuffle;
    request.global = STREAM_STEP;
    request.rank = rank;
    request.ranks = ranks;
    request.steps = whole ? rows / STREAM_STEP : (rows + STREAM_STEP - 1) / STREAM_STEP;
    request.capacity = STREAM_STEP / ranks;
    request.slots = 1;
    return row_batches_open(&request, batches);
}

/* Returns the rows of a rank in step `n`, counted over all epochs. */
static std::vector<uint64_t> rows_of_step(uint64_t rows, bool shuffle, uint32_t rank, uint32_t ranks,
                                          uint64_t steps, uint64_t n)
{
    struct partition partition = {};
    partition.rank = rank;
    partition.ranks = ranks;
    partition.strong = true;
    const uint64_t epoch = n / steps, step = n % steps;
    const struct share share = partition_step(&partition, (uint32_t)rows, STREAM_STEP, (uint32_t)step);
    const struct permutation permutation = permutation_begin(7 + epoch, rows);
    std::vector<uint64_t> list;
    for (uint64_t j = 0; j < share.count; j++) {
        const uint64_t at = step * STREAM_STEP + share.first + j;
        list.push_back(shuffle ? permutation_at(&permutation, at) : at);
    }
    return list;
}

/* Compares a batch of a stream, whose labels have 64 bits. */
static std::string check_batch(struct output &out, const int64_t *labels, const struct reference &wanted,
                               const std::vector<uint64_t> &rows)
{
    std::vector<int64_t> found(rows.size() + 1);
    out.read();
    MUST(cudaMemcpy(found.data(), labels, rows.size() * sizeof *labels, cudaMemcpyDeviceToHost));
    for (uint64_t j = 0; j < rows.size(); j++)
        if (!row_equals(out, j, wanted, rows[j], false) || found[j] != label_of(wanted.order[rows[j]]))
            return "row " + std::to_string(j) + " differs";
    return "";
}

static enum status fill(struct device_batches *batches, void *rows, int64_t *labels, cudaStream_t stream,
                        struct stream_batch *batch)
{
    const struct device_parts to = {rows, labels, nullptr, nullptr};
    return device_batches_fill(batches, &to, stream, batch);
}

/* Two epochs of a rank of two, of rows of which some are in host memory. Each of these is copied once for its
 * batch, ahead of it; only the batch after the last one is copied in vain. In their order, runs are copied.
 */
static void check_stream(bool shuffle, uint32_t rank)
{
    const struct set_case one = {COPIED, 5003, 768, DTYPE_F32, DTYPE_F16, false, false, true, 0, 4000000};
    const std::string name = "a stream of rank " + std::to_string(rank) + (shuffle ? ", shuffled" : "");
    struct opened opened;
    struct device_batches *batches = NULL;
    struct stream_batch batch;
    if (!works(open_case(one, &opened), name))
        return;
    const struct reference wanted =
        make_reference(opened.bytes, one.rows, one.width, one.from, steps_of(one));
    const struct rows_device_info info = rows_device_info(opened.rows);
    const uint64_t steps = (info.rows + STREAM_STEP - 1) / STREAM_STEP;
    uint64_t streamed = 0, following = 0;
    struct output out(STREAM_ROWS, wanted.stride);
    int64_t *labels;
    MUST(cudaMalloc(&labels, STREAM_ROWS * sizeof *labels));
    opened.copied.calls = opened.copied.total = 0;
    enum status status = open_stream(opened, shuffle, rank, STREAM_RANKS, false, &batches);
    std::string wrong = status == STATUS_OK ? "" : status_text();
    for (uint64_t n = 0; wrong.empty() && n <= 2 * steps; n++) {
        const std::vector<uint64_t> rows = rows_of_step(info.rows, shuffle, rank, STREAM_RANKS, steps, n);
        following = 0;
        for (uint64_t row : rows)
            following += row >= info.resident_rows;
        if (n == 2 * steps)
            break;
        streamed += following;
        if (fill(batches, out.values(), labels, NULL, &batch) != STATUS_OK)
            wrong = status_text();
        else if (batch.samples.count != rows.size() || batch.epoch != n / steps || batch.step != n % steps)
            wrong = "the description of a batch is wrong";
        else
            wrong = check_batch(out, labels, wanted, rows);
    }
    stream_close(&batches->stream);
    const uint64_t calls = opened.copied.calls, total = opened.copied.total;
    if (wrong.empty() &&
        (total < streamed || total > streamed + following || (!shuffle && calls > total / 8)))
        wrong = std::to_string(total) + " rows were copied in " + std::to_string(calls) +
                " calls instead of " + std::to_string(streamed);
    MUST(cudaFree(labels));
    report(wrong.empty(), name + (wrong.empty() ? "" : ": " + wrong));
}

/* While one thread captures in global mode, as PyTorch does, another one opens a set, reads rows from the
 * host, replays a graph, asks for the position, moves it, and closes everything. The capture must survive,
 * and the batches must be right. */
static void check_captures(bool shuffle)
{
    const struct set_case streamed = {COPIED, 5003, 768, DTYPE_F32, DTYPE_F16, true, false, true, 0, 4000000};
    struct set_case resident = streamed;
    const std::string name =
        std::string("work of another thread during a capture") + (shuffle ? ", shuffled" : "");
    struct opened some, all, other;
    struct device_batches *from_host = NULL, *replayed = NULL;
    struct stream_batch batch;
    cudaStream_t own, captured;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    int64_t *labels;
    resident.limit = 0; /* all rows are on the device */
    if (!works(open_case(streamed, &some), name) || !works(open_case(resident, &all), name))
        return;
    const struct reference wanted =
        make_reference(some.bytes, streamed.rows, streamed.width, streamed.from, steps_of(streamed));
    const uint64_t rows = wanted.order.size(), steps = rows / STREAM_STEP;
    struct output first(STREAM_STEP, wanted.stride), second(STREAM_STEP, wanted.stride);
    MUST(cudaMalloc(&labels, 2 * STREAM_STEP * sizeof *labels));
    MUST(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
    MUST(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
    if (!works(open_stream(some, shuffle, 0, 1, true, &from_host), name) ||
        !works(open_stream(all, shuffle, 0, 1, true, &replayed), name))
        return;
    MUST(cudaStreamBeginCapture(own, cudaStreamCaptureModeThreadLocal));
    enum status status = fill(replayed, second.values(), labels + STREAM_STEP, own, &batch);
    MUST(cudaStreamEndCapture(own, &graph));
    if (!works(status, name))
        return;
    MUST(cudaGraphInstantiate(&replay, graph, 0));
    MUST(cudaGraphDestroy(graph));
    graph = NULL;
    std::string wrong;
    MUST(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
    std::thread([&] {
        struct stream_batch taken;
        const auto must_work = [&](enum status result, const char *what) {
            if (result != STATUS_OK && wrong.empty())
                wrong = std::string(what) + ": " + status_text();
        };
        if (cudaSetDevice(0) != cudaSuccess)
            wrong = "cudaSetDevice()";
        for (int i = 0; i < 8; i++)
            must_work(fill(from_host, first.values(), labels, own, &taken), "fill()");
        must_work(open_case(streamed, &other), "opening");
        rows_device_close(other.rows);
        other.rows = NULL;
        for (int i = 0; i < 3; i++)
            if (cudaGraphLaunch(replay, own) != cudaSuccess && wrong.empty())
                wrong = "cudaGraphLaunch()";
        must_work(device_batches_locate(replayed), "locate()");
        if (wrong.empty() && replayed->stream.at.step != 3)
            wrong = "the position after three replays is " + std::to_string(replayed->stream.at.step);
        must_work(stream_seek(&replayed->stream, {1, 2}), "seek()");
        must_work(fill(replayed, second.values(), labels + STREAM_STEP, own, &taken), "fill() after a seek");
        stream_close(&replayed->stream);
        stream_close(&from_host->stream);
    }).join();
    const cudaError_t error = cudaStreamEndCapture(captured, &graph);
    (void)cudaGetLastError();
    if (wrong.empty() && error != cudaSuccess)
        wrong = std::string("the capture has ended: ") + cudaGetErrorString(error);
    if (wrong.empty())
        wrong = check_batch(first, labels, wanted, rows_of_step(rows, shuffle, 0, 1, steps, 7));
    if (wrong.empty())
        wrong = check_batch(second, labels + STREAM_STEP, wanted,
                            rows_of_step(rows, shuffle, 0, 1, steps, steps + 2));
    if (graph)
        MUST(cudaGraphDestroy(graph));
    MUST(cudaGraphExecDestroy(replay));
    MUST(cudaStreamDestroy(own));
    MUST(cudaStreamDestroy(captured));
    MUST(cudaFree(labels));
    report(wrong.empty(), name + (wrong.empty() ? "" : ": " + wrong));
}

/* A set on each other device, used while device 0 is current. */
static void check_devices(void)
{
    for (int device = 1; device < device_count() && device < 4; device++) {
        const struct set_case one = {COPIED, 997, 768, DTYPE_F32, DTYPE_F16, true, false, true, 0, 0};
        struct opened opened;
        std::string name = "a set on device " + std::to_string(device), wrong;
        MUST(cudaSetDevice(0));
        if (!works(open_case(one, &opened, device), name))
            continue;
        struct reference wanted = make_reference(opened.bytes, one.rows, one.width, one.from, steps_of(one));
        if (device_current() != 0)
            wrong = "opening has changed the current device";
        MUST(cudaSetDevice(device)); /* for the memory of batches */
        if (wrong.empty())
            wrong = check_epoch(opened.rows, wanted, 0, 400, 0, true);
        struct output out(10, wanted.stride);
        MUST(cudaSetDevice(0));
        if (wrong.empty() &&
            rows_device_gather(opened.rows, true, 0, 0, 0, 10, out.values(), NULL, NULL) != STATUS_OK)
            wrong = status_text();
        if (wrong.empty() && device_current() != 0)
            wrong = "gathering has changed the current device";
        MUST(cudaSetDevice(device));
        MUST(cudaDeviceSynchronize());
        MUST(cudaSetDevice(0));
        report(wrong.empty(), name + (wrong.empty() ? "" : ": " + wrong));
    }
}

/* A file that cannot be read: the failure comes back when the set is opened, or with the batch. */
static void check_failures(void)
{
    struct set_case one = {COPIED, 5003, 768, DTYPE_F32, DTYPE_F16, true, false, false, 0, 4000000};
    struct opened opened, refused;
    struct output out(5003, 768 * 2);
    std::string wrong;
    if (!works(open_case(one, &opened), "rows that cannot be read"))
        return;
    opened.copied.fails_at = 0;
    const enum status first = rows_device_gather(opened.rows, true, 0, 0, 0, 1000, out.values(), NULL, NULL);
    if (first != STATUS_FAILED || !strstr(status_text(), "cannot be read"))
        wrong = "a batch must return the failure of its rows";
    opened.copied.fails_at = UINT64_MAX;
    for (uint64_t at = 0; wrong.empty() && at < 2; at++)
        if (rows_device_gather(opened.rows, true, 0, 0, at * 1000, 1000, out.values(), NULL, NULL) !=
            STATUS_OK)
            wrong = std::string("a later batch must succeed: ") + status_text();
    refused.bytes = opened.bytes;
    struct rows_device_request request = {};
    refused.copied.rows = refused.bytes.data();
    refused.copied.count = 100; /* of 5003 */
    refused.copied.row_bytes = 768 * 4;
    refused.copied.fails_at = UINT64_MAX;
    request.copy = copy_rows;
    request.context = &refused.copied;
    request.rows = 5003;
    request.width = 768;
    request.dtype = DTYPE_F32;
    request.steps = steps_of(one);
    request.threads = 2;
    if (wrong.empty() && (rows_device_open(&request, &refused.rows) != STATUS_FAILED || refused.rows))
        wrong = "opening must return the failure of its rows";
    report(wrong.empty(), "rows that cannot be read" + (wrong.empty() ? "" : ": " + wrong));
}

static void refuses(enum status status, enum status wanted, const char *subject)
{
    bool right = status == wanted && strcmp(status_subject(), subject) == 0;
    char line[400];
    snprintf(line, sizeof line, "refused: %.300s%s", status == STATUS_OK ? "nothing" : status_text(),
             right ? "" : " (another failure was expected)");
    report(right, line);
}

static void check_errors(void)
{
    const struct set_case one = {COPIED, 100, 12, DTYPE_F32, DTYPE_F16, true, false, false, 0, 0};
    struct opened opened;
    struct output out(100, 24);
    if (!works(open_case(one, &opened), "a set for errors"))
        return;
    const auto open_with = [&](auto change) {
        struct rows_device_request request = {};
        struct rows_device *rows = NULL;
        request.copy = copy_rows;
        request.context = &opened.copied;
        request.rows = 100;
        request.width = 12;
        request.dtype = DTYPE_F32;
        request.steps = steps_of(one);
        request.threads = 1;
        change(request);
        enum status status = rows_device_open(&request, &rows);
        rows_device_close(rows);
        return status;
    };
    refuses(open_with([](struct rows_device_request &r) { r.copy = NULL; }), STATUS_USAGE, "set");
    refuses(open_with([](struct rows_device_request &r) { r.threads = 0; }), STATUS_USAGE, "threads");
    refuses(open_with([](struct rows_device_request &r) { r.rows = UINT64_C(1) << 32; }), STATUS_USAGE,
            "rows");
    refuses(open_with([](struct rows_device_request &r) { r.width = 0; }), STATUS_USAGE, "width");
    refuses(open_with([](struct rows_device_request &r) { r.width = 65537; }), STATUS_USAGE, "width");
    refuses(open_with([](struct rows_device_request &r) { r.dtype = DTYPE_U8; }), STATUS_USAGE, "dtype");
    refuses(open_with([](struct rows_device_request &r) { r.steps.to = DTYPE_U8; }), STATUS_USAGE, "to");
    refuses(open_with([](struct rows_device_request &r) { r.steps.align = 65537; }), STATUS_USAGE, "align");
    refuses(open_with([](struct rows_device_request &r) { r.steps.norm_min = -1; }), STATUS_USAGE,
            "norm_min");
    refuses(open_with([](struct rows_device_request &r) { r.steps.norm_min = NAN; }), STATUS_USAGE,
            "norm_min");
    refuses(open_with([](struct rows_device_request &r) { r.steps.norm_min = 101; }), STATUS_USAGE,
            "norm_min");
    refuses(open_with([](struct rows_device_request &r) { r.steps.norm_max = INFINITY; }), STATUS_USAGE,
            "norm_max");
    refuses(open_with([](struct rows_device_request &r) { r.device = -1; }), STATUS_USAGE, "device");
    refuses(open_with([](struct rows_device_request &r) { r.device = 99; }), STATUS_UNAVAILABLE, "");
    refuses(open_with([](struct rows_device_request &r) { r.memory_limit = 100; }), STATUS_TOO_LARGE,
            "memory_limit");
    const auto wrap_with = [&](auto change) {
        struct rows_device_tensor tensor = {};
        struct rows_device_steps steps = steps_of(one);
        struct rows_device *rows = NULL;
        uint64_t limit = 0;
        tensor.values = out.memory;
        tensor.rows = 10;
        tensor.width = 12;
        tensor.dtype = DTYPE_F32;
        change(tensor, limit);
        enum status status = rows_device_wrap(&tensor, &steps, limit, NULL, &rows);
        rows_device_close(rows);
        return status;
    };
    refuses(wrap_with([](struct rows_device_tensor &t, uint64_t &) { t.stride = 44; }), STATUS_USAGE,
            "stride");
    refuses(wrap_with([](struct rows_device_tensor &t, uint64_t &) { t.stride = 50; }), STATUS_USAGE,
            "stride");
    refuses(wrap_with([](struct rows_device_tensor &t, uint64_t &) { t.values = (uint8_t *)t.values + 2; }),
            STATUS_USAGE, "values");
    refuses(wrap_with([&](struct rows_device_tensor &t, uint64_t &) { t.values = opened.bytes.data(); }),
            STATUS_USAGE, "values");
    refuses(wrap_with([](struct rows_device_tensor &t, uint64_t &) { t.values = NULL; }), STATUS_USAGE,
            "values");
    refuses(wrap_with([](struct rows_device_tensor &, uint64_t &limit) { limit = 600; }), STATUS_TOO_LARGE,
            "memory_limit");
    uint64_t all = rows_device_info(opened.rows).rows;
    uint8_t *to = out.values();
    uint32_t none[1];
    refuses(rows_device_gather(opened.rows, true, 0, 0, all, 1, to, NULL, NULL), STATUS_USAGE, "count");
    refuses(rows_device_gather(opened.rows, true, 0, 0, UINT64_MAX, 2, to, NULL, NULL), STATUS_USAGE,
            "count");
    refuses(rows_device_gather(opened.rows, true, 0, 0, 0, 1, to + 1, NULL, NULL), STATUS_USAGE, "out");
    refuses(rows_device_gather(opened.rows, true, 0, 0, 0, 1, to, out.labels, NULL), STATUS_USAGE, "labels");
    refuses(rows_device_gather_step(opened.rows, true, 0, (uint64_t *)to, 0, to, NULL, NULL), STATUS_USAGE,
            "count");
    refuses(rows_device_gather_step(opened.rows, true, 0, (uint64_t *)to, all + 1, to, NULL, NULL),
            STATUS_USAGE, "count");
    refuses(rows_device_numbers(opened.rows, all, 1, none), STATUS_USAGE, "count");
}

/* ---- Large sets ---- */

/* Fills one row on the host as fill_rows() does on the device, and converts it. */
static std::vector<uint8_t> converted_row(uint64_t row, uint32_t width, enum dtype from, enum dtype to)
{
    std::vector<uint8_t> stored(width * dtype_bytes(from)), converted(width * dtype_bytes(to));
    struct ops_format format = {};
    format.from = from;
    format.to = type_of(to);
    format.columns = width;
    for (uint32_t i = 0; i < width; i++)
        store(stored.data(), from, i, value_of(row, i, width));
    ops_convert_row(&format, stored.data(), converted.data(), NULL);
    return converted;
}

/* Gathers the rows `list` of a set and compares them. Row k of the set is row kept[k] of the input. */
static std::string compare_some(struct rows_device *rows, std::vector<uint32_t> list,
                                const std::vector<uint32_t> &kept, uint32_t width, enum dtype from,
                                enum dtype to)
{
    struct output out(list.size(), width * dtype_bytes(to));
    if (rows_device_gather_numbers(rows, list.data(), false, list.size(), out.values(), NULL, NULL) !=
        STATUS_OK)
        return status_text();
    out.read();
    for (uint64_t j = 0; j < list.size(); j++) {
        std::vector<uint8_t> wanted = converted_row(kept[list[j]], width, from, to);
        if (memcmp(out.row(j), wanted.data(), wanted.size()) != 0)
            return "row " + std::to_string(list[j]) + " differs";
    }
    return "";
}

static std::vector<uint32_t> kept_rows(uint64_t rows)
{
    std::vector<uint32_t> kept;
    for (uint64_t row = 0; row < rows; row++)
        if (!is_bad(same_as(row)))
            kept.push_back((uint32_t)row);
    return kept;
}

/* A set with more than 2^32 values: 70,000 rows of 65,536. */
static void check_large(void)
{
    const uint64_t count = 70000;
    const uint32_t width = 65536;
    struct rows_device_tensor tensor = {};
    struct rows_device_steps steps = {};
    struct rows_device *whole = NULL, *filtered = NULL;
    size_t free_bytes, total_bytes;
    std::vector<uint32_t> all(count), kept = kept_rows(count);
    std::string wrong;
    uint8_t *values;
    MUST(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (free_bytes < (size_t)24 << 30) {
        printf("skipped 70,000 x 65,536: needs 24 GiB of free device memory\n");
        return;
    }
    for (uint64_t i = 0; i < count; i++)
        all[i] = (uint32_t)i;
    MUST(cudaMalloc(&values, count * width * 2));
    fill_rows<<<4096, 256>>>(values, count, width, DTYPE_F16);
    MUST(cudaGetLastError());
    tensor.values = values;
    tensor.rows = count;
    tensor.width = width;
    tensor.dtype = DTYPE_F16;
    steps.to = DTYPE_STORED;
    if (rows_device_wrap(&tensor, &steps, 0, NULL, &whole) != STATUS_OK)
        wrong = status_text();
    if (wrong.empty())
        wrong = compare_some(whole, {0, 65535, 65536, 69999, 32769, 12345}, all, width, DTYPE_F16, DTYPE_F16);
    steps.mask = true;
    steps.norm_min = 0.1f;
    steps.norm_max = 100;
    steps.to = DTYPE_BF16;
    if (wrong.empty() && rows_device_wrap(&tensor, &steps, 0, NULL, &filtered) != STATUS_OK)
        wrong = status_text();
    const uint32_t last = (uint32_t)kept.size() - 1;
    if (wrong.empty() && rows_device_info(filtered).rows != kept.size())
        wrong = "another number of rows is kept";
    if (wrong.empty())
        wrong =
            compare_some(filtered, {0, last, last - 1, 65535, 40000, 7}, kept, width, DTYPE_F16, DTYPE_BF16);
    rows_device_close(filtered);
    rows_device_close(whole);
    MUST(cudaFree(values));
    report(wrong.empty(), "70000 x 65536, more than 2^32 values" + (wrong.empty() ? "" : ": " + wrong));
}

/* ---- Measurements ---- */

#define TIMED_ROWS  4000000
#define TIMED_WIDTH 768
#define BATCH       8192
#define OUTPUTS     8
#define LAUNCHES    200

/* Times that a copy of these bytes within an H200 takes: 4.1 TB/s (docs/notes/ops.md). */
static double floor_us(double bytes)
{
    return bytes / 4.1e6;
}

/* Returns the time per call on the device, in microseconds. */
template <class CALL> static double time_calls(cudaStream_t stream, unsigned calls, CALL call)
{
    cudaEvent_t begin, end;
    float elapsed_ms;
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    for (unsigned i = 0; i < calls / 4 + 1; i++)
        call(i);
    MUST(cudaStreamSynchronize(stream));
    MUST(cudaEventRecord(begin, stream));
    for (unsigned i = 0; i < calls; i++)
        call(i);
    MUST(cudaEventRecord(end, stream));
    MUST(cudaEventSynchronize(end));
    MUST(cudaEventElapsedTime(&elapsed_ms, begin, end));
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
    return 1e3 * elapsed_ms / calls;
}

static void must(enum status status)
{
    if (status != STATUS_OK)
        exit((fprintf(stderr, "gpu_rows: %s\n", status_text()), 1));
}

/* Measures batches of BATCH rows. `outs` are OUTPUTS batches, so that the cache does not keep them. */
static void time_batches(struct rows_device *rows, uint8_t *const outs[OUTPUTS])
{
    const uint64_t batches = rows_device_info(rows).rows / BATCH;
    const double bytes = 2.0 * BATCH * (double)rows_device_info(rows).stride;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    uint64_t *step;
    uint32_t *numbers;
    std::vector<uint32_t> list(BATCH);
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    MUST(cudaMalloc(&step, sizeof *step));
    MUST(cudaMemset(step, 0, sizeof *step));
    MUST(cudaMalloc(&numbers, BATCH * sizeof *numbers));
    struct permutation permutation = permutation_begin(1, rows_device_info(rows).rows);
    for (uint64_t j = 0; j < BATCH; j++)
        list[j] = (uint32_t)permutation_at(&permutation, j);
    MUST(cudaMemcpy(numbers, list.data(), BATCH * sizeof *numbers, cudaMemcpyHostToDevice));
    const auto gather = [&](unsigned i) {
        must(rows_device_gather(rows, true, 1, 0, i % batches * BATCH, BATCH, outs[i % OUTPUTS], NULL,
                                stream));
    };
    printf("batches of %d x %u %s: %.1f MB moved, floor %.1f us (4.1 TB/s)\n", BATCH,
           rows_device_info(rows).padded_width, dtype_names[rows_device_info(rows).dtype], 1e-6 * bytes,
           floor_us(bytes));
    printf("  gather                     %8.2f us\n", time_calls(stream, LAUNCHES, gather));
    double begin_s = timer_now_s();
    for (unsigned i = 0; i < LAUNCHES; i++)
        gather(i);
    printf("  host time of a call        %8.2f us\n", 1e6 * (timer_now_s() - begin_s) / LAUNCHES);
    MUST(cudaStreamSynchronize(stream));
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (unsigned i = 0; i < LAUNCHES; i++)
        gather(i);
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    printf("  gather, graph of %d       %8.2f us\n", LAUNCHES,
           time_calls(stream, 5, [&](unsigned) { MUST(cudaGraphLaunch(exec, stream)); }) / LAUNCHES);
    MUST(cudaGraphExecDestroy(exec));
    MUST(cudaGraphDestroy(graph));
    must(device_load(0));
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    must(rows_device_gather_step(rows, true, 1, step, BATCH, outs[0], NULL, stream));
    must(device_add(0, step, 1, stream));
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    printf("  gather_step + add, a graph %8.2f us\n",
           time_calls(stream, LAUNCHES, [&](unsigned) { MUST(cudaGraphLaunch(exec, stream)); }));
    MUST(cudaGraphExecDestroy(exec));
    MUST(cudaGraphDestroy(graph));
    for (bool on_device : {true, false})
        printf("  list of numbers, %s    %8.2f us\n", on_device ? "device" : "host  ",
               time_calls(stream, LAUNCHES, [&](unsigned i) {
                   must(rows_device_gather_numbers(rows, on_device ? numbers : list.data(), on_device, BATCH,
                                                   outs[i % OUTPUTS], NULL, stream));
               }));
    printf("  a copy of the same size    %8.2f us\n", time_calls(stream, LAUNCHES, [&](unsigned i) {
               const uint8_t *from = static_cast<const uint8_t *>(rows_device_info(rows).values);
               MUST(cudaMemcpyAsync(outs[i % OUTPUTS], from + i % batches * (uint64_t)(bytes / 2),
                                    (size_t)(bytes / 2), cudaMemcpyDeviceToDevice, stream));
           }));
    MUST(cudaStreamDestroy(stream));
    MUST(cudaFree(step));
    MUST(cudaFree(numbers));
}

/* Opens a set of rows in host memory, whole and with a limit that half of the rows fit into. */
static void time_host(const uint8_t *device_rows, uint8_t *const outs[OUTPUTS])
{
    const uint64_t count = TIMED_ROWS / 4, row_bytes = TIMED_WIDTH * 4;
    std::vector<uint8_t> bytes(count * row_bytes);
    struct copied copied = {};
    struct rows_device_request request = {};
    MUST(cudaMemcpy(bytes.data(), device_rows, bytes.size(), cudaMemcpyDeviceToHost));
    copied.rows = bytes.data();
    copied.count = count;
    copied.row_bytes = row_bytes;
    copied.fails_at = UINT64_MAX;
    request.copy = copy_rows;
    request.context = &copied;
    request.rows = count;
    request.width = TIMED_WIDTH;
    request.dtype = DTYPE_F32;
    request.steps = {true, 0.1f, 100, false, DTYPE_F16, 0};
    request.threads = (int)std::thread::hardware_concurrency();
    for (uint64_t limit : {(uint64_t)0, count * TIMED_WIDTH}) {
        struct rows_device *rows;
        request.memory_limit = limit;
        double begin_s = timer_now_s();
        must(rows_device_open(&request, &rows));
        printf("from host memory, 1,000,000 rows, mask + f16: %.1f ms (floor 56 ms at 55 GB/s); %llu of %llu "
               "resident\n",
               1e3 * (timer_now_s() - begin_s), (unsigned long long)rows_device_info(rows).resident_rows,
               (unsigned long long)rows_device_info(rows).rows);
        if (limit) {
            double us = time_calls(NULL, 40, [&](unsigned i) {
                must(rows_device_gather(rows, true, 1, 0, i * BATCH, BATCH, outs[i % OUTPUTS], NULL, NULL));
                rows_device_ahead(rows, true, 1, 0, (i + 1) * BATCH, BATCH);
            });
            printf("  batch of %d, half of its rows from the host: %.0f us (floor %.0f us at 55 GB/s)\n",
                   BATCH, us, 0.5 * BATCH * (double)row_bytes / 55e3);
        }
        rows_device_close(rows);
    }
}

static void measure(void)
{
    const uint64_t count = TIMED_ROWS;
    struct rows_device_tensor tensor = {};
    struct rows_device_steps steps = {true, 0.1f, 100, false, DTYPE_F16, 0}, none = {};
    struct rows_device *whole, *rows = NULL;
    std::vector<uint32_t> kept = kept_rows(count);
    size_t free_bytes, total_bytes;
    uint8_t *values, *outs[OUTPUTS];
    MUST(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (free_bytes < (size_t)24 << 30) {
        printf("no measurements: they need 24 GiB of free device memory\n");
        return;
    }
    MUST(cudaMalloc(&values, count * TIMED_WIDTH * 4));
    for (int i = 0; i < OUTPUTS; i++)
        MUST(cudaMalloc(&outs[i], BATCH * TIMED_WIDTH * 4));
    fill_rows<<<4096, 256>>>(values, count, TIMED_WIDTH, DTYPE_F32);
    MUST(cudaGetLastError());
    MUST(cudaDeviceSynchronize());
    tensor.values = values;
    tensor.rows = count;
    tensor.width = TIMED_WIDTH;
    tensor.dtype = DTYPE_F32;
    none.to = DTYPE_STORED;
    must(rows_device_wrap(&tensor, &none, 0, NULL, &whole));
    const double bytes = (double)count * TIMED_WIDTH * 4 + (double)kept.size() * TIMED_WIDTH * 2;
    printf("mask + f16 of 4,000,000 x 768 f32 in device memory: %.2f GB moved, floor %.2f ms (4.1 TB/s)\n",
           1e-9 * bytes, 1e-3 * floor_us(bytes));
    for (int i = 0; i < 8; i++) {
        rows_device_close(rows);
        double begin_s = timer_now_s();
        must(rows_device_wrap(&tensor, &steps, 0, NULL, &rows));
        printf("  rows_device_wrap           %8.3f ms%s\n", 1e3 * (timer_now_s() - begin_s),
               i == 0 ? " (the first allocates)" : "");
    }
    std::string wrong = rows_device_info(rows).rows == kept.size() ? "" : "another number of rows is kept";
    std::vector<uint32_t> some;
    for (uint32_t i = 0; i < 500; i++)
        some.push_back(mixed(i) % (uint32_t)kept.size());
    some.push_back((uint32_t)kept.size() - 1);
    if (wrong.empty())
        wrong = compare_some(rows, some, kept, TIMED_WIDTH, DTYPE_F32, DTYPE_F16);
    report(wrong.empty(), "4000000 x 768, as measured" + (wrong.empty() ? "" : ": " + wrong));
    time_batches(rows, outs);
    time_batches(whole, outs);
    rows_device_close(rows);
    time_host(values, outs);
    rows_device_close(whole);
    for (int i = 0; i < OUTPUTS; i++)
        MUST(cudaFree(outs[i]));
    MUST(cudaFree(values));
}

int main(int argc, char **argv)
{
    bool quick = argc > 1 && strcmp(argv[1], "--quick") == 0;
    fault = argc > 1 && strcmp(argv[1], "--fault") == 0;
    if (device_count() == 0) {
        fprintf(stderr, "gpu_rows: no GPU\n");
        return 4;
    }
    check_sets();
    check_partial();
    check_graph();
    check_slots();
    check_several();
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        for (uint32_t rank = 0; rank < STREAM_RANKS; rank++)
            check_stream(shuffle, rank);
        check_captures(shuffle);
    }
    check_devices();
    if (!fault) {
        check_failures();
        check_errors();
        check_memory();
    }
    if (!fault && !quick) {
        check_large();
        measure();
    }
    printf("%u passed, %u failed\n", passed, failed);
    return failed > 0;
}
