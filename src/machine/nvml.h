/* State of a GPU from NVML: clocks, power, PCIe traffic, reasons for throttled clocks. NVML is opened with
 * dlopen on first use. */
#ifndef FDSL_MACHINE_NVML_H
#define FDSL_MACHINE_NVML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* The state at one moment. A field that NVML does not report is negative (throttle_reasons: 0). */
struct gpu_state {
    int sm_clock_mhz, sm_clock_max_mhz, memory_clock_mhz, temperature_c;
    double power_w;
    int utilisation_percent; /* share of the last sample period in which a CUDA kernel ran */
    int64_t memory_used_bytes, memory_free_bytes; /* of the whole device */
    uint64_t throttle_reasons;                    /* NVML's bits; 0: none */
};

/* The part of the state that is cheap to query: about 1 us on an H200. The whole state takes milliseconds. */
struct gpu_clocks {
    int sm_clock_mhz, memory_clock_mhz; /* negative if NVML does not report them */
    uint64_t throttle_reasons;
};

/* PCIe traffic to the device (rx) and from the device (tx); negative if NVML does not report it. */
struct gpu_traffic {
    double rx_bytes_per_s, tx_bytes_per_s;
};

/* A process that computes on a GPU. Numbers and names may be those of another container. */
struct gpu_process {
    unsigned pid;
    int64_t memory_bytes; /* of the GPU; negative if NVML does not report it */
    char name[64];        /* without its folder; "" if NVML does not report it */
};

FDSL_C_BEGIN

/* All functions here are thread safe. `pci_bus_id` ("0000:01:00.0") identifies the device, because CUDA and
 * NVML may number devices differently. Without NVML, or if NVML does not know the device, functions that
 * return a status return STATUS_UNAVAILABLE with the reason. */

/* Writes the name of the model ("NVIDIA H200"). */
enum status nvml_gpu_name(const char *pci_bus_id, char *text, size_t size);

/* Reads the current state. */
enum status nvml_gpu_state(const char *pci_bus_id, struct gpu_state *state);

/* Lists the processes that have a CUDA context on the device, and sets `*count` to their number, which may
 * exceed `room`, the number of entries of `processes`. */
enum status nvml_gpu_processes(const char *pci_bus_id, struct gpu_process *processes, size_t room,
                               size_t *count);

#define ENERGY_SPAN_S 0.8 /* minimum time between two readings: the counter changes every 100 ms */

/* Returns the energy in joules that the device has used since the driver was loaded; NaN if NVML does not
 * report it. The counter is updated about every 100 ms. The query takes 4 ms on an H200. */
double nvml_gpu_energy_j(const char *pci_bus_id);

/* Reads the current PCIe traffic. Separate from nvml_gpu_state() because NVML measures for 20 ms in each
 * direction before it answers. */
enum status nvml_gpu_traffic(const char *pci_bus_id, struct gpu_traffic *traffic);

/* Returns the average use (0 to 1) of the JPEG engines over NVML's last sample period, at most about a
 * second; negative if NVML does not report it. */
double nvml_jpeg_engine_share(const char *pci_bus_id);

/* Returns the peak rate of the PCIe link in one direction, in bytes per second. Assumes the maximum link
 * width and the newest PCIe generation that the device supports. Returns 0 if NVML does not report them, or
 * if the generation is newer than 6. */
double nvml_pcie_peak_bytes_per_s(const char *pci_bus_id);

/* Writes the driver version ("580.159.04") to `text`, or "" without NVML. */
void nvml_driver_version(char *text, size_t size);

/* Writes the reasons in `bits` that reduce clocks under load, as in "power cap, thermal"; "" if there is
 * none. Idle clocks and clocks set by the user do not count. Returns `text`. */
const char *nvml_throttle_words(uint64_t bits, char *text, size_t size);

FDSL_C_END

/* ---- Causes of slow runs on a GPU ---- */

/* Watches for causes of slow runs on a GPU: other processes before the timed runs; clocks, power, and reasons
 * for throttled clocks during them.
 *
 * A separate thread queries NVML every 50 ms, so runs do not wait for it. The repeated calls take about 1 us
 * each on an H200. */

/* Readings taken while phase_now() was PHASE_TIMED. */
struct gpu_watched {
    int sm_clock_mhz, mem_clock_mhz; /* medians; negative if unknown */
    double power_w; /* mean of the whole board; NaN if unknown or if the runs were too short for NVML, which
                       updates its energy counter every 100 ms */
    uint64_t throttle_reasons; /* NVML's bits, ORed over all readings; 0: none */
};

struct gpu_watch;

/* Starts watching the GPU with this PCI bus id ("0000:01:00.0"). If the id is empty or NVML cannot read this
 * GPU, `*watch` becomes NULL. The caller ends the watch with gpu_watch_end(). STATUS_EXHAUSTED if
 * memory runs out, STATUS_FAILED if the thread cannot be started. */
enum status gpu_watch_begin(const char *pci_bus_id, struct gpu_watch **watch);

/* Stops watching, fills `*watched` and frees the watch. Call right after the timed runs, while phase_now() is
 * still PHASE_TIMED. If `watch` is NULL, all values are unknown. */
void gpu_watch_end(struct gpu_watch *watch, struct gpu_watched *watched);

/* ---- Other processes ---- */

#define GPU_PROCESSES_MAX 8   /* processes that are named */
#define GPU_ID_BYTES      32  /* "0000:01:00.0" */
#define COMM_LOCAL_IDS    256 /* with more ranks on a machine, each one names the processes */

enum gpu_others_action { GPU_OTHERS_WARN, GPU_OTHERS_REFUSE, GPU_OTHERS_IGNORE };

/* The words of --gpu-others, NULL-terminated. */
extern const char *const gpu_others_words[];

struct gpu_others {
    bool known; /* NVML listed them */
    size_t count;
    struct gpu_process processes[GPU_PROCESSES_MAX];
};

/* Collective: lists the processes that use a GPU besides this program, and names them in one line on stderr
 * (GPU_OTHERS_WARN), or in the message of STATUS_UNAVAILABLE (GPU_OTHERS_REFUSE). Ranks that share a GPU
 * print one line. `device` is negative for a rank without a GPU. Call before any rank uses its GPU: in a
 * container, NVML may list this process under a number that the process does not know. */
enum status gpu_others_look(int device, enum gpu_others_action action, struct gpu_others *others);

/* Writes "pid 12 (python3, 1.5 GB), pid 13 (name unknown) and 2 more". `count` may exceed the number of
 * `processes`, which is at most GPU_PROCESSES_MAX. */
void gpu_others_text(const struct gpu_process *processes, size_t count, char *text, size_t size);

#endif
