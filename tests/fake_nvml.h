/* A fake NVML library with one GPU, at 0000:17:00.0, for tests without a GPU. */
#ifndef FDSL_TESTS_FAKE_NVML_H
#define FDSL_TESTS_FAKE_NVML_H

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

/* The reported power is 312.5 W, but the energy counter grows by 250 J per second. Macros change the library:
 *   OLD         has only the functions of older drivers, and refuses to read the power
 *   BROKEN      fails to initialize
 *   BARE        has only the required functions
 *   MUTE        refuses all readings
 *   BUSY        computes for 2 ms per reading of the utilisation
 *   SLOW        waits for 30 ms per reading of the utilisation
 *   UNSTEADY    returns a different SM clock at every third reading
 *   BUSY_GPU    lists two processes on the GPU
 *   GENERATION  generation of the GPU's PCIe link (default: 5) */
static const char fake_nvml[] =
    "#include <stdio.h>\n"
    "#include <string.h>\n"
    "#include <time.h>\n"
    "#include <unistd.h>\n"
    "static int gpu;\n"
    "#ifdef MUTE\n"
    "#define REFUSE_UNLESS(known) return 3\n"
    "#else\n"
    "#define REFUSE_UNLESS(known) do { if (device != &gpu || !(known)) return 2; } while (0)\n"
    "#endif\n"
    "int nvmlInit_v2(void) {\n"
    "#ifdef BROKEN\n"
    "    return 9;\n"
    "#endif\n"
    "    gpu = 42; return 0; }\n"
    "const char *nvmlErrorString(int result) {\n"
    "    return result == 9 ? \"Driver Not Loaded\" : \"Not Found\"; }\n"
    "int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {\n"
    "    if (gpu != 42) return 1;\n"
    "    if (strcmp(id, \"0000:17:00.0\") != 0) return 6;\n"
    "    *device = &gpu; return 0; }\n"
    "int nvmlSystemGetDriverVersion(char *text, unsigned length) {\n"
    "    return snprintf(text, length, \"580.159.04\") >= (int)length ? 7 : 0; }\n"
    "#ifndef BARE\n"
    "int nvmlDeviceGetName(void *device, char *text, unsigned length) {\n"
    "    REFUSE_UNLESS(1);\n"
    "    return snprintf(text, length, \"Fake GPU\") >= (int)length ? 7 : 0; }\n"
    "int nvmlDeviceGetClockInfo(void *device, int clock, unsigned *mhz) {\n"
    "    REFUSE_UNLESS(clock == 1 || clock == 2);\n"
    "    *mhz = clock == 1 ? 1410 : 3201;\n"
    "#ifdef UNSTEADY\n"
    "    static int readings;\n"
    "    if (clock == 1 && readings++ % 3 == 0) *mhz = 345;\n"
    "#endif\n"
    "    return 0; }\n"
    "int nvmlDeviceGetMaxClockInfo(void *device, int clock, unsigned *mhz) {\n"
    "    REFUSE_UNLESS(clock == 1);\n"
    "    *mhz = 1980; return 0; }\n"
    "int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {\n"
    "    REFUSE_UNLESS(sensor == 0);\n"
    "    *celsius = 61; return 0; }\n"
    "int nvmlDeviceGetUtilizationRates(void *device, unsigned rates[2]) {\n"
    "    REFUSE_UNLESS(1);\n"
    "#ifdef BUSY\n"
    "    for (clock_t end = clock() + CLOCKS_PER_SEC / 500; clock() < end;) ;\n"
    "#endif\n"
    "#ifdef SLOW\n"
    "    usleep(30000);\n"
    "#endif\n"
    "    rates[0] = 97; rates[1] = 55; return 0; }\n"
    "int nvmlDeviceGetMemoryInfo(void *device, unsigned long long bytes[3]) {\n"
    "    REFUSE_UNLESS(1);\n"
    "    bytes[0] = 150754820096; bytes[1] = 100000000001; bytes[2] = 50754820095; return 0; }\n"
    "int nvmlDeviceGetPcieThroughput(void *device, int counter, unsigned *kilobytes) {\n"
    "    REFUSE_UNLESS(counter == 0 || counter == 1);\n"
    "    usleep(20000);\n"
    "    *kilobytes = counter == 1 ? 2500000 : 1250; return 0; }\n"
    "#ifndef GENERATION\n"
    "#define GENERATION 5\n"
    "#endif\n"
    "#ifdef OLD\n"
    "int nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned *generation) {\n"
    "#else\n"
    "int nvmlDeviceGetGpuMaxPcieLinkGeneration(void *device, unsigned *generation) {\n"
    "#endif\n"
    "    REFUSE_UNLESS(1);\n"
    "    *generation = GENERATION; return 0; }\n"
    "int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *lanes) {\n"
    "    REFUSE_UNLESS(1);\n"
    "    *lanes = 16; return 0; }\n"
    "#ifndef OLD\n"
    "int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {\n"
    "    REFUSE_UNLESS(1);\n"
    "    struct timespec now;\n"
    "    clock_gettime(CLOCK_MONOTONIC, &now);\n"
    "    unsigned long long ms = now.tv_sec * 1000ull + now.tv_nsec / 1000000;\n"
    "    *millijoules = ms / 100 * 100 * 250; return 0; }\n"
    "#endif\n"
    "#ifdef BUSY_GPU\n"
    "struct process { unsigned pid; unsigned long long bytes; unsigned instances[2]; };\n"
    "int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *list) {\n"
    "    REFUSE_UNLESS(*count >= 2);\n"
    "    list[0] = (struct process){4711, 2300000000, {0, 0}};\n"
    "    list[1] = (struct process){4712, -1, {0, 0}};\n"
    "    *count = 2; return 0; }\n"
    "int nvmlSystemGetProcessName(unsigned pid, char *text, unsigned length) {\n"
    "    if (pid != 4711) return 6;\n"
    "    return snprintf(text, length, \"/usr/bin/python3 train.py\") >= (int)length ? 7 : 0; }\n"
    "#endif\n"
    "#ifdef OLD\n"
    "int nvmlDeviceGetPowerUsage(void *device, unsigned *mw) { (void)device, (void)mw; return 3; }\n"
    "int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits) {\n"
    "#else\n"
    "int nvmlDeviceGetPowerUsage(void *device, unsigned *mw) {\n"
    "    REFUSE_UNLESS(1);\n"
    "    *mw = 312500; return 0; }\n"
    "int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *bits) {\n"
    "#endif\n"
    "    REFUSE_UNLESS(1);\n"
    "    *bits = 0x24; return 0; }\n"
    "#endif\n";

/* Compiles the library in `folder` with `flags` and loads it. A later dlopen("libnvidia-ml.so.1") then finds
 * the fake library, even if a real one is installed. */
static inline void load_fake_nvml(const char *folder, const char *flags)
{
    char path[256], command[512];
    const char *cc = getenv("CC");
    snprintf(path, sizeof path, "%s/fake.c", folder);
    FILE *file = fopen(path, "w");
    cr_assert(file && fputs(fake_nvml, file) >= 0 && fclose(file) == 0, "%s", path);
    snprintf(command, sizeof command,
             "cd '%s' && %s %s -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o fake.so fake.c", folder,
             cc && *cc ? cc : "cc", flags);
    cr_assert(system(command) == 0, "%s", command);
    snprintf(path, sizeof path, "%s/fake.so", folder);
    cr_assert(dlopen(path, RTLD_NOW) != NULL, "%s", dlerror());
}

#endif
