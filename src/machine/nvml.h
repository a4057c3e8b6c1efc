/* State of a GPU from NVML: clocks, power, PCIe traffic, reasons for throttled clocks. NVML is opened with
 * dlopen on first use. */
#ifndef FDSL_MACHINE_NVML_H
#define FDSL_MACHINE_NVML_H

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

/* Reads the current clocks. */
enum status nvml_gpu_clocks(const char *pci_bus_id, struct gpu_clocks *clocks);

/* Lists the processes that have a CUDA context on the device, and sets `*count` to their number, which may
 * exceed `room`, the number of entries of `processes`. */
enum status nvml_gpu_processes(const char *pci_bus_id, struct gpu_process *processes, size_t room,
                               size_t *count);

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

#endif
