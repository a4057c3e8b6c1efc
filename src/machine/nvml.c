/* NVML through dlopen: the program must start without a driver and build without nvml.h. The constants and
 * structs below are NVML's binary interface, which NVIDIA keeps stable. */
#include "machine/nvml.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/parallel.h"
#include "core/phase.h"
#include "core/text.h"
#include "core/timer.h"
#include "machine/comm.h"
#include "machine/device.h"

typedef struct nvml_device *nvml_device; /* opaque */

enum { NVML_SUCCESS = 0 };
enum { NVML_CLOCK_SM = 1, NVML_CLOCK_MEMORY = 2 };
enum { NVML_TEMPERATURE_GPU = 0 };
enum { NVML_PCIE_TX = 0, NVML_PCIE_RX = 1 };

struct nvml_utilisation {
    unsigned gpu_percent, memory_percent;
};

struct nvml_memory {
    unsigned long long total_bytes, free_bytes, used_bytes;
};

struct nvml_process {
    unsigned pid;
    unsigned long long used_bytes; /* all bits set: unknown */
    unsigned gpu_instance, compute_instance;
};

#define PROCESSES_MAX 256

static struct {
    int (*init)(void);
    const char *(*error_string)(int result);
    int (*device_by_pci_bus_id)(const char *pci_bus_id, nvml_device *device);
    int (*driver_version)(char *text, unsigned length);
    int (*name)(nvml_device device, char *text, unsigned length);
    int (*clock_mhz)(nvml_device device, int clock, unsigned *mhz);
    int (*clock_max_mhz)(nvml_device device, int clock, unsigned *mhz);
    int (*temperature_c)(nvml_device device, int sensor, unsigned *celsius);
    int (*power_mw)(nvml_device device, unsigned *milliwatts);
    int (*throttle_reasons)(nvml_device device, unsigned long long *reasons);
    int (*utilisation)(nvml_device device, struct nvml_utilisation *utilisation);
    int (*memory)(nvml_device device, struct nvml_memory *memory);
    int (*pcie_kb_per_s)(nvml_device device, int direction, unsigned *kilobytes);
    int (*pcie_generation)(nvml_device device, unsigned *generation);
    int (*pcie_lanes)(nvml_device device, unsigned *lanes);
    int (*energy_mj)(nvml_device device, unsigned long long *millijoules);
    int (*jpeg_percent)(nvml_device device, unsigned *percent, unsigned *period_us);
    int (*processes)(nvml_device device, unsigned *count, struct nvml_process *processes);
    int (*process_name)(unsigned pid, char *text, unsigned length);
} nvml;

static const struct {
    const char *name, *older_name;
    void *function; /* the address of a member of `nvml` */
    bool required;
} symbols[] = {
    {"nvmlInit_v2", NULL, &nvml.init, true},
    {"nvmlErrorString", NULL, &nvml.error_string, true},
    {"nvmlDeviceGetHandleByPciBusId_v2", NULL, &nvml.device_by_pci_bus_id, true},
    {"nvmlSystemGetDriverVersion", NULL, &nvml.driver_version, true},
    {"nvmlDeviceGetName", NULL, &nvml.name, false},
    {"nvmlDeviceGetClockInfo", NULL, &nvml.clock_mhz, false},
    {"nvmlDeviceGetMaxClockInfo", NULL, &nvml.clock_max_mhz, false},
    {"nvmlDeviceGetTemperature", NULL, &nvml.temperature_c, false},
    {"nvmlDeviceGetPowerUsage", NULL, &nvml.power_mw, false},
    {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons",
     &nvml.throttle_reasons, false},
    {"nvmlDeviceGetUtilizationRates", NULL, &nvml.utilisation, false},
    {"nvmlDeviceGetMemoryInfo", NULL, &nvml.memory, false},
    {"nvmlDeviceGetPcieThroughput", NULL, &nvml.pcie_kb_per_s, false},
    {"nvmlDeviceGetGpuMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkGeneration", &nvml.pcie_generation,
     false},
    {"nvmlDeviceGetMaxPcieLinkWidth", NULL, &nvml.pcie_lanes, false},
    {"nvmlDeviceGetTotalEnergyConsumption", NULL, &nvml.energy_mj, false},
    {"nvmlDeviceGetJpgUtilization", NULL, &nvml.jpeg_percent, false},
    {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2", &nvml.processes,
     false},
    {"nvmlSystemGetProcessName", NULL, &nvml.process_name, false},
};

/* Returns whether the driver has the function and the device answers. */
#define ANSWERS(function, ...) (nvml.function && nvml.function(__VA_ARGS__) == NVML_SUCCESS)

/* The reason why NVML cannot be used; empty if it can be used. Written only by open_nvml(), under open_once.
 */
static char obstacle[256];
static pthread_once_t open_once = PTHREAD_ONCE_INIT;

static void open_nvml(void)
{
    /* Never closed: NVML is used until the program ends. */
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(obstacle, sizeof obstacle, "%s; it comes with the NVIDIA driver", dlerror());
        return;
    }
    for (size_t i = 0; i < COUNT_OF(symbols); i++) {
        void *address = dlsym(library, symbols[i].name);
        if (!address && symbols[i].older_name)
            address = dlsym(library, symbols[i].older_name);
        if (!address && symbols[i].required) {
            snprintf(obstacle, sizeof obstacle, "libnvidia-ml.so.1 lacks %s; update the NVIDIA driver",
                     symbols[i].name);
            return;
        }
        memcpy(symbols[i].function, &address, sizeof address);
    }
    int result = nvml.init();
    if (result != NVML_SUCCESS)
        snprintf(obstacle, sizeof obstacle, "nvmlInit_v2: %s; does nvidia-smi work?",
                 nvml.error_string(result));
}

static enum status require_nvml(void)
{
    pthread_once(&open_once, open_nvml);
    return obstacle[0] ? status_set(STATUS_UNAVAILABLE, "no NVML: %s", obstacle) : STATUS_OK;
}

/* Returns NVML's handle of a device. Each thread caches its latest handle, because the lookup takes longer
 * than a reading. */
static enum status find_device(const char *pci_bus_id, nvml_device *device)
{
    static _Thread_local struct {
        char pci_bus_id[32];
        nvml_device device;
    } latest;
    TRY(require_nvml());
    if (!latest.device || strcmp(latest.pci_bus_id, pci_bus_id) != 0) {
        int result = nvml.device_by_pci_bus_id(pci_bus_id, device);
        if (result != NVML_SUCCESS)
            return status_set(STATUS_UNAVAILABLE, "NVML does not know the GPU at PCI bus id '%s': %s",
                              pci_bus_id, nvml.error_string(result));
        snprintf(latest.pci_bus_id, sizeof latest.pci_bus_id, "%s", pci_bus_id);
        latest.device = *device;
    }
    *device = latest.device;
    return STATUS_OK;
}

enum status nvml_gpu_name(const char *pci_bus_id, char *text, size_t size)
{
    nvml_device device;
    TRY(find_device(pci_bus_id, &device));
    return ANSWERS(name, device, text, (unsigned)size)
               ? STATUS_OK
               : status_set(STATUS_UNAVAILABLE, "NVML does not report the name of the GPU at %s", pci_bus_id);
}

enum status nvml_gpu_processes(const char *pci_bus_id, struct gpu_process *processes, size_t room,
                               size_t *count)
{
    struct nvml_process found[PROCESSES_MAX];
    unsigned number = PROCESSES_MAX;
    nvml_device device;
    *count = 0;
    TRY(find_device(pci_bus_id, &device));
    if (!ANSWERS(processes, device, &number, found))
        return status_set(STATUS_UNAVAILABLE, "NVML does not list the processes on the GPU at %s",
                          pci_bus_id);
    *count = number;
    for (size_t i = 0; i < number && i < room; i++) {
        char path[1024] = "";
        processes[i] = (struct gpu_process){
            .pid = found[i].pid,
            .memory_bytes = found[i].used_bytes > INT64_MAX ? -1 : (int64_t)found[i].used_bytes};
        if (!ANSWERS(process_name, found[i].pid, path, sizeof path))
            continue;
        path[strcspn(path, " ")] = '\0'; /* some drivers append the arguments */
        const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
        snprintf(processes[i].name, sizeof processes[i].name, "%.63s", name);
    }
    return STATUS_OK;
}

static struct gpu_clocks read_clocks(nvml_device device)
{
    struct gpu_clocks clocks = {-1, -1, 0};
    unsigned mhz;
    unsigned long long reasons;
    if (ANSWERS(clock_mhz, device, NVML_CLOCK_SM, &mhz))
        clocks.sm_clock_mhz = (int)mhz;
    if (ANSWERS(clock_mhz, device, NVML_CLOCK_MEMORY, &mhz))
        clocks.memory_clock_mhz = (int)mhz;
    if (ANSWERS(throttle_reasons, device, &reasons))
        clocks.throttle_reasons = reasons;
    return clocks;
}

/* Reads the current clocks. */
static enum status nvml_gpu_clocks(const char *pci_bus_id, struct gpu_clocks *clocks)
{
    nvml_device device;
    *clocks = (struct gpu_clocks){-1, -1, 0};
    TRY(find_device(pci_bus_id, &device));
    *clocks = read_clocks(device);
    return STATUS_OK;
}

double nvml_gpu_energy_j(const char *pci_bus_id)
{
    nvml_device device;
    unsigned long long millijoules;
    bool known = find_device(pci_bus_id, &device) == STATUS_OK && ANSWERS(energy_mj, device, &millijoules);
    return known ? 1e-3 * (double)millijoules : NAN;
}

enum status nvml_gpu_state(const char *pci_bus_id, struct gpu_state *state)
{
    nvml_device device;
    unsigned value;
    struct nvml_utilisation utilisation;
    struct nvml_memory memory;

    *state = (struct gpu_state){-1, -1, -1, -1, -1.0, -1, -1, -1, 0};
    TRY(find_device(pci_bus_id, &device));
    const struct gpu_clocks clocks = read_clocks(device);
    state->sm_clock_mhz = clocks.sm_clock_mhz;
    state->memory_clock_mhz = clocks.memory_clock_mhz;
    state->throttle_reasons = clocks.throttle_reasons;
    if (ANSWERS(clock_max_mhz, device, NVML_CLOCK_SM, &value))
        state->sm_clock_max_mhz = (int)value;
    if (ANSWERS(temperature_c, device, NVML_TEMPERATURE_GPU, &value))
        state->temperature_c = (int)value;
    if (ANSWERS(power_mw, device, &value))
        state->power_w = 1e-3 * value;
    if (ANSWERS(utilisation, device, &utilisation))
        state->utilisation_percent = (int)utilisation.gpu_percent;
    if (ANSWERS(memory, device, &memory)) {
        state->memory_used_bytes = (int64_t)memory.used_bytes;
        state->memory_free_bytes = (int64_t)memory.free_bytes;
    }
    return STATUS_OK;
}

static double read_pcie_bytes_per_s(nvml_device device, int direction)
{
    unsigned kilobytes;
    return ANSWERS(pcie_kb_per_s, device, direction, &kilobytes) ? 1e3 * kilobytes : -1;
}

enum status nvml_gpu_traffic(const char *pci_bus_id, struct gpu_traffic *traffic)
{
    nvml_device device;
    *traffic = (struct gpu_traffic){-1, -1};
    TRY(find_device(pci_bus_id, &device));
    traffic->rx_bytes_per_s = read_pcie_bytes_per_s(device, NVML_PCIE_RX);
    traffic->tx_bytes_per_s = read_pcie_bytes_per_s(device, NVML_PCIE_TX);
    return STATUS_OK;
}

double nvml_jpeg_engine_share(const char *pci_bus_id)
{
    nvml_device device;
    unsigned percent, period_us;
    bool known =
        find_device(pci_bus_id, &device) == STATUS_OK && ANSWERS(jpeg_percent, device, &percent, &period_us);
    return known ? 0.01 * percent : -1;
}

double nvml_pcie_peak_bytes_per_s(const char *pci_bus_id)
{
    /* Per PCIe generation: transfers per second per lane, times the share of payload bits, divided by 8 bits.
     * Generations 1 and 2 use 8b/10b encoding, generations 3 to 5 use 128b/130b, and generation 6 uses flits
     * of 256 bytes with 242 bytes of data. */
    static const double lane_bytes_per_s[] = {0,
                                              2.5e9 * 8 / 10 / 8,
                                              5e9 * 8 / 10 / 8,
                                              8e9 * 128 / 130 / 8,
                                              16e9 * 128 / 130 / 8,
                                              32e9 * 128 / 130 / 8,
                                              64e9 * 242 / 256 / 8};
    nvml_device device;
    unsigned generation, lanes;
    bool known = find_device(pci_bus_id, &device) == STATUS_OK &&
                 ANSWERS(pcie_generation, device, &generation) && ANSWERS(pcie_lanes, device, &lanes);
    return known && generation < COUNT_OF(lane_bytes_per_s) ? lanes * lane_bytes_per_s[generation] : 0;
}

void nvml_driver_version(char *text, size_t size)
{
    if (require_nvml() != STATUS_OK || nvml.driver_version(text, (unsigned)size) != NVML_SUCCESS)
        text[0] = '\0';
}

const char *nvml_throttle_words(uint64_t bits, char *text, size_t size)
{
    /* The list omits reasons that are not throttling: idle (0x1), clocks set by the user (0x2) and display
     * clocks (0x100). */
    static const struct {
        uint64_t bits;
        const char *word;
    } reasons[] = {
        {0x04, "power cap"}, {0x08, "hardware slowdown"}, {0x10, "sync boost"},
        {0x60, "thermal"},   {0x80, "power brake"},
    };
    text[0] = '\0';
    for (size_t i = 0; i < COUNT_OF(reasons); i++)
        if (bits & reasons[i].bits)
            text_join(text, size, ", ", "%s", reasons[i].word);
    return text;
}

/* ---- Causes of slow runs ---- */

#define PERIOD_S   0.05
#define CLOCKS_MAX 8192 /* MHz; higher clocks count as this value */

/* A histogram of clocks in MHz, so that the median needs no list of samples. */
struct clocks {
    uint32_t seen[CLOCKS_MAX + 1];
    uint32_t total;
};

struct gpu_watch {
    char pci_bus_id[32];
    struct ticker *ticker; /* its thread updates the members below until gpu_watch_end() */
    struct clocks sm, mem;
    uint64_t throttle_reasons;
    double begin_s, begin_j; /* time and energy at the first energy reading; NaN before */
};

static void note_clock(struct clocks *clocks, int mhz)
{
    if (mhz < 0)
        return;
    clocks->seen[mhz < CLOCKS_MAX ? mhz : CLOCKS_MAX]++;
    clocks->total++;
}

/* Returns the median clock; for an even count, the lower of the middle two. Returns -1 if there was no
 * reading. */
static int median_clock(const struct clocks *clocks)
{
    uint32_t passed = 0;
    for (int mhz = 0; mhz <= CLOCKS_MAX; mhz++) {
        passed += clocks->seen[mhz];
        if (passed > 0 && 2 * (uint64_t)passed >= clocks->total)
            return mhz;
    }
    return -1;
}

static void look(struct gpu_watch *watch)
{
    struct gpu_clocks clocks;
    if (phase_now() != PHASE_TIMED || nvml_gpu_clocks(watch->pci_bus_id, &clocks) != STATUS_OK)
        return;
    note_clock(&watch->sm, clocks.sm_clock_mhz);
    note_clock(&watch->mem, clocks.memory_clock_mhz);
    watch->throttle_reasons |= clocks.throttle_reasons;
    if (isnan(watch->begin_s)) { /* only once: the query takes 4 ms on an H200 */
        watch->begin_j = nvml_gpu_energy_j(watch->pci_bus_id);
        watch->begin_s = timer_now_s();
    }
}

static void tick(void *context, uint64_t missed)
{
    (void)missed;
    look(context);
}

enum status gpu_watch_begin(const char *pci_bus_id, struct gpu_watch **watch)
{
    struct gpu_clocks unused;
    *watch = NULL;
    if (!*pci_bus_id || nvml_gpu_clocks(pci_bus_id, &unused) != STATUS_OK)
        return STATUS_OK;
    struct gpu_watch *self = calloc(1, sizeof *self);
    TRY(ALLOCATED(self, "out of memory"));
    snprintf(self->pci_bus_id, sizeof self->pci_bus_id, "%s", pci_bus_id);
    self->begin_s = self->begin_j = NAN;
    if (ticker_open(PERIOD_S, tick, self, &self->ticker) != 0) {
        free(self);
        return status_set(STATUS_FAILED, "cannot start a thread that watches the GPU; raise ulimit -u");
    }
    *watch = self;
    return STATUS_OK;
}

/* Returns the mean power from the first energy reading until now. */
static double mean_power_w(const struct gpu_watch *watch)
{
    double span_s = timer_now_s() - watch->begin_s;
    if (!(span_s >= ENERGY_SPAN_S) || isnan(watch->begin_j))
        return NAN;
    return (nvml_gpu_energy_j(watch->pci_bus_id) - watch->begin_j) / span_s;
}

void gpu_watch_end(struct gpu_watch *watch, struct gpu_watched *watched)
{
    *watched = (struct gpu_watched){.sm_clock_mhz = -1, .mem_clock_mhz = -1, .power_w = NAN};
    if (!watch)
        return;
    ticker_close(watch->ticker);
    watched->power_w = mean_power_w(watch);
    /* If the runs took less than one period, the thread may have no reading. A reading now still shows the
     * clocks of the runs, because clocks do not drop immediately. */
    look(watch);
    watched->sm_clock_mhz = median_clock(&watch->sm);
    watched->mem_clock_mhz = median_clock(&watch->mem);
    watched->throttle_reasons = watch->throttle_reasons;
    free(watch);
}

/* ---- Other processes ---- */

const char *const gpu_others_words[] = {"warn", "refuse", "ignore", NULL}; /* by enum gpu_others_action */

void gpu_others_text(const struct gpu_process *processes, size_t count, char *text, size_t size)
{
    *text = '\0';
    for (size_t i = 0; i < count && i < GPU_PROCESSES_MAX; i++) {
        char memory[32] = "";
        if (processes[i].memory_bytes >= 0)
            snprintf(memory, sizeof memory, ", %.1f GB", 1e-9 * (double)processes[i].memory_bytes);
        text_join(text, size, ", ", "pid %u (%s%s)", processes[i].pid,
                  *processes[i].name ? processes[i].name : "name unknown", memory);
    }
    if (count > GPU_PROCESSES_MAX)
        text_append(text, size, " and %zu more", count - GPU_PROCESSES_MAX);
}

/* Removes this process, which has used the GPU if it ran something before. */
static void drop_own(struct gpu_others *others)
{
    size_t kept = 0;
    const size_t listed = others->count < GPU_PROCESSES_MAX ? others->count : GPU_PROCESSES_MAX;
    for (size_t i = 0; i < listed; i++)
        if (others->processes[i].pid != (unsigned)getpid())
            others->processes[kept++] = others->processes[i];
    others->count -= listed - kept;
}

/* Returns whether a lower rank of this machine uses the same GPU, and has therefore named its processes. */
static enum status is_named(const char *pci_bus_id, bool *named)
{
    char ids[COMM_LOCAL_IDS][GPU_ID_BYTES];
    *named = false;
    if (comm_local_size() > COMM_LOCAL_IDS)
        return STATUS_OK;
    char own[GPU_ID_BYTES] = "";
    snprintf(own, sizeof own, "%s", pci_bus_id);
    TRY(comm_gather_local(own, sizeof own, ids));
    for (int i = 0; i < comm_local_rank(); i++)
        *named |= strcmp(ids[i], own) == 0;
    return STATUS_OK;
}

enum status gpu_others_look(int device, enum gpu_others_action action, struct gpu_others *others)
{
    char id[GPU_ID_BYTES] = "", text[1024];
    bool named;
    *others = (struct gpu_others){0};
    others->known = device >= 0 && action != GPU_OTHERS_IGNORE &&
                    device_pci_bus_id(device, id, sizeof id) == STATUS_OK &&
                    nvml_gpu_processes(id, others->processes, GPU_PROCESSES_MAX, &others->count) == STATUS_OK;
    drop_own(others);
    TRY(is_named(id, &named)); /* collective: from here on, ranks may begin to use their GPUs */
    if (!others->known || others->count == 0 || named)
        return comm_agree(STATUS_OK);
    gpu_others_text(others->processes, others->count, text, sizeof text);
    if (action == GPU_OTHERS_REFUSE)
        return comm_agree(status_set(STATUS_UNAVAILABLE,
                                     "GPU %d (%s) is in use by %s; end %s, choose another GPU with --device "
                                     "or --best-gpu, or allow it with --gpu-others warn",
                                     device, id, text, others->count == 1 ? "it" : "them"));
    status_warn_own("GPU %d (%s) is also used by %s, which can slow down the timed runs; end %s, choose "
                    "another GPU with --device or --best-gpu, or accept it with --gpu-others ignore",
                    device, id, text, others->count == 1 ? "it" : "them");
    return comm_agree(STATUS_OK);
}
