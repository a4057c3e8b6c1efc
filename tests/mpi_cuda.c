/* A stand-in for an MPI that takes pointers to GPU memory, for tests on machines whose MPI does not. Says
 * that it has CUDA support. Sums of floats must be in device memory, and are added up through a buffer in
 * host memory. Any other address ends the run. MPI_Finalize() prints how many sums there were.
 *
 *     mpicc -shared -fPIC -o mpi_cuda.so tests/mpi_cuda.c -ldl
 *     mpirun -x LD_PRELOAD=$PWD/mpi_cuda.so ...
 *
 * Device memory is that of CUDA. For tests without a GPU, it is also the FAKE_BYTES bytes at FAKE_DEVICE,
 * which the tests map without access rights, so that the host can neither read nor write them. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FAKE_DEVICE UINT64_C(0x600000000000)
#define FAKE_BYTES  (UINT64_C(1) << 20)

/* From the CUDA driver API. */
enum { MEMORY_TYPE = 2, MEMORY_DEVICE = 2 };
static int (*get_attribute)(void *value, int attribute, uint64_t address);
static int (*to_host)(void *to, uint64_t from, size_t bytes);
static int (*to_device)(uint64_t to, const void *from, size_t bytes);

static unsigned long sums, sum_bytes;

__attribute__((constructor)) static void find_driver(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver)
        return;
    *(void **)&get_attribute = dlsym(driver, "cuPointerGetAttribute");
    *(void **)&to_host = dlsym(driver, "cuMemcpyDtoH_v2");
    *(void **)&to_device = dlsym(driver, "cuMemcpyHtoD_v2");
}

int MPI_Finalize(void)
{
    fprintf(stderr, "mpi_cuda: %lu sums of %lu bytes in device memory\n", sums, sum_bytes);
    return PMPI_Finalize();
}

int MPIX_Query_cuda_support(void);
int MPIX_Query_cuda_support(void)
{
    return getenv("MPI_CUDA_OFF") == NULL;
}

static int is_fake(uint64_t address)
{
    return address >= FAKE_DEVICE && address < FAKE_DEVICE + FAKE_BYTES;
}

static int is_device(uint64_t address)
{
    unsigned type = 0;
    return is_fake(address) ||
           (get_attribute && get_attribute(&type, MEMORY_TYPE, address) == 0 && type == MEMORY_DEVICE);
}

static void demand(int good, const char *what)
{
    if (good)
        return;
    fprintf(stderr, "mpi_cuda: %s\n", what);
    _exit(99);
}

static void copy(uint64_t device, void *host, size_t bytes, int back)
{
    if (!is_fake(device)) {
        demand((back ? to_device(device, host, bytes) : to_host(host, device, bytes)) == 0,
               "CUDA cannot copy");
        return;
    }
    void *all = (void *)(uintptr_t)FAKE_DEVICE, *at = (void *)(uintptr_t)device;
    demand(mprotect(all, FAKE_BYTES, PROT_READ | PROT_WRITE) == 0, "mprotect");
    memcpy(back ? at : host, back ? host : at, bytes);
    demand(mprotect(all, FAKE_BYTES, PROT_NONE) == 0, "mprotect");
}

/* As in Open MPI, reductions that do not block take no device memory. */
int MPI_Iallreduce(const void *from, void *to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                   MPI_Request *request)
{
    demand(!is_device((uint64_t)(uintptr_t)to), "MPI_Iallreduce() of device memory");
    return PMPI_Iallreduce(from, to, count, type, op, comm, request);
}

int MPI_Allreduce(const void *from, void *to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm)
{
    const size_t bytes = (size_t)count * sizeof(float);
    if (type != MPI_FLOAT)
        return PMPI_Allreduce(from, to, count, type, op, comm);
    demand(from == MPI_IN_PLACE && op == MPI_SUM, "not a sum in place");
    demand(is_device((uint64_t)(uintptr_t)to), "a sum of floats is not in device memory");
    void *host = malloc(bytes + 1);
    demand(host != NULL, "out of memory");
    copy((uint64_t)(uintptr_t)to, host, bytes, 0);
    const int error = PMPI_Allreduce(MPI_IN_PLACE, host, count, type, op, comm);
    copy((uint64_t)(uintptr_t)to, host, bytes, 1);
    free(host);
    sums++;
    sum_bytes += bytes;
    return error;
}
