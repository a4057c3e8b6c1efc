/* A CUDA device as the driver sees it: what it does, what its bus carries, what holds its clocks down.
 * Through NVML, which is opened with dlopen on first use. */
#ifndef FDSL_MACHINE_NVML_H
#define FDSL_MACHINE_NVML_H

#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"

/* At one moment; a field is negative or empty where NVML does not tell. */
struct gpu_state {
    int sm_clock_mhz, sm_clock_max_mhz, memory_clock_mhz, temperature_c;
    double power_w;
    int utilisation_percent;                      /* of a past period: the time that any kernel ran */
    int64_t memory_used_bytes, memory_free_bytes; /* by and for all processes */
    uint64_t throttle_reasons;                    /* NVML's bits; 0: none */
};

/* The part of it that costs least to ask for: a microsecond on an H200, where all of it takes milliseconds.
 */
struct gpu_clocks {
    int sm_clock_mhz, memory_clock_mhz; /* negative where NVML does not tell */
    uint64_t throttle_reasons;
};

/* Bytes on its PCIe bus, towards the device and away from it; negative where NVML does not tell. */
struct gpu_traffic {
    double rx_bytes_per_s, tx_bytes_per_s;
};

FDSL_C_BEGIN

/* What the device does now. `pci_bus_id` ("0000:01:00.0") names it, as CUDA numbers may differ from NVML's.
 * Any thread may ask. STATUS_UNAVAILABLE with the reason where there is no NVML. */
enum status nvml_gpu_state(const char *pci_bus_id, struct gpu_state *state);

/* The device's clocks now. Any thread may ask. STATUS_UNAVAILABLE with the reason where there is no NVML. */
enum status nvml_gpu_clocks(const char *pci_bus_id, struct gpu_clocks *clocks);

/* The energy in joules that the device has used since the driver was loaded; NaN where NVML does not tell. It
 * is brought up to date every 100 ms or so; to ask takes 4 ms on an H200. */
double nvml_gpu_energy_j(const char *pci_bus_id);

/* The bytes that the device's bus carries now. On its own, as NVML counts for 20 ms in each direction before
 * it answers. */
enum status nvml_gpu_traffic(const char *pci_bus_id, struct gpu_traffic *traffic);

/* The peak rate of the device's PCIe link in one direction, in bytes per second: the most lanes, at the
 * latest generation that the device supports. 0 where NVML does not tell. */
double nvml_pcie_peak_bytes_per_s(const char *pci_bus_id);

/* The driver's version ("580.159.04") into `text`, empty without NVML. */
void nvml_driver_version(char *text, size_t size);

/* The reasons among `bits` that slow clocks down under load, in words: "power cap, thermal"; empty when
 * there is none (idle and user-set clocks do not count). Returns `text`. */
const char *nvml_throttle_words(uint64_t bits, char *text, size_t size);

FDSL_C_END

#endif
