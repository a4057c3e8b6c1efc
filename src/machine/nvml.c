/* NVML through dlopen: the program must start without a driver and build without nvml.h. The constants and
 * structs below are NVML's binary interface, which NVIDIA keeps stable. */
#include "machine/nvml.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "core/text.h"

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

enum status nvml_gpu_clocks(const char *pci_bus_id, struct gpu_clocks *clocks)
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
