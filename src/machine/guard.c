#include "machine/guard.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct sigaction before; /* action for SIGBUS before the first guard */
static int guards;              /* number of open guards */
static __thread sigjmp_buf escape;
static __thread volatile sig_atomic_t guarded;

static volatile sig_atomic_t filling, filled;
static uintptr_t page_bytes;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of opening and closing */
static struct {
    _Atomic uintptr_t begin, end; /* end: 0 if the entry is free */
} ranges[GUARD_RANGES];

static bool is_in_range(uintptr_t address)
{
    bool inside = false;
    for (int i = 0; i < GUARD_RANGES; i++)
        inside |= address >= atomic_load(&ranges[i].begin) && address < atomic_load(&ranges[i].end);
    return inside;
}

/* mmap() is a plain system call, so it is safe in a signal handler. */
static bool fill_page(const siginfo_t *info)
{
    uintptr_t page = (uintptr_t)info->si_addr & ~(page_bytes - 1);
    return mmap((void *)page, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                0) != MAP_FAILED;
}

static void on_bus_error(int signal_, siginfo_t *info, void *context)
{
    (void)context;
    if (guarded)
        siglongjmp(escape, 1);
    if (is_in_range((uintptr_t)info->si_addr) && fill_page(info))
        return;
    if (filling && fill_page(info)) {
        filled = 1;
        return;
    }
    sigaction(signal_, &before, NULL); /* the access was not guarded: repeat it with the action of before,
                                          which usually ends the program */
}

enum status guard_open(struct guard *guard)
{
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_NODEFER | SA_SIGINFO};
    pthread_mutex_lock(&lock);
    guard->open = guards > 0 || sigaction(SIGBUS, &action, &before) == 0;
    guards += guard->open;
    const int error = errno;
    pthread_mutex_unlock(&lock);
    return guard->open ? STATUS_OK : status_set(STATUS_FAILED, "cannot catch SIGBUS: %s", strerror(error));
}

void guard_fill(struct guard *guard)
{
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    filled = 0;
    guard->fills = true;
    filling = 1;
}

enum status guard_fill_range(struct guard *guard, const void *begin, size_t bytes)
{
    pthread_mutex_lock(&lock);
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (int i = 0; i < GUARD_RANGES && !guard->range; i++)
        if (atomic_load(&ranges[i].end) == 0) {
            guard->range = i + 1;
            atomic_store(&ranges[i].begin, (uintptr_t)begin);
            atomic_store(&ranges[i].end, (uintptr_t)begin + bytes);
        }
    pthread_mutex_unlock(&lock);
    return guard->range ? STATUS_OK : status_set(STATUS_EXHAUSTED, "too many files are mapped");
}

bool guard_filled(void)
{
    return filled;
}

void guard_close(struct guard *guard)
{
    if (guard->fills)
        filling = 0;
    guard->fills = false;
    pthread_mutex_lock(&lock);
    if (guard->range)
        atomic_store(&ranges[guard->range - 1].end, 0);
    guard->range = 0;
    if (guard->open && --guards == 0)
        sigaction(SIGBUS, &before, NULL);
    guard->open = false;
    pthread_mutex_unlock(&lock);
}

bool guard_run(void (*work)(void *context), void *context)
{
    if (sigsetjmp(escape, 0)) { /* 0: saves no signal mask, because SA_NODEFER leaves SIGBUS unblocked */
        guarded = 0;
        return false;
    }
    guarded = 1;
    __asm__ volatile("" : : : "memory");
    work(context);
    __asm__ volatile("" : : : "memory");
    guarded = 0;
    return true;
}

struct copy {
    uint8_t *to;
    const uint8_t *from;
    size_t bytes;
};

static void copy(void *context)
{
    const struct copy *job = context;
    memcpy(job->to, job->from, job->bytes);
}

bool guard_copy(uint8_t *to, const uint8_t *from, size_t bytes)
{
    return guard_run(copy, &(struct copy){to, from, bytes});
}
