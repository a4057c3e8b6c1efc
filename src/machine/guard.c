#include "machine/guard.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct sigaction before; /* action for SIGBUS before the first guard */
static int guards;              /* number of open guards */
static __thread sigjmp_buf escape;
static __thread volatile sig_atomic_t guarded;

static volatile sig_atomic_t filling, filled;
static uintptr_t page_bytes;

/* mmap() is a plain system call, so it is safe in a signal handler. */
static bool fill_page(const siginfo_t *info)
{
    uintptr_t page = (uintptr_t)info->si_addr & ~(page_bytes - 1);
    filled = 1;
    return mmap((void *)page, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                0) != MAP_FAILED;
}

static void on_bus_error(int signal_, siginfo_t *info, void *context)
{
    (void)context;
    if (guarded)
        siglongjmp(escape, 1);
    if (filling && fill_page(info))
        return;
    signal(signal_, SIG_DFL); /* the access was not guarded: with the default action, the repeated access
                                 ends the program */
}

enum status guard_open(struct guard *guard)
{
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_NODEFER | SA_SIGINFO};
    if (guards == 0 && sigaction(SIGBUS, &action, &before) != 0)
        return status_set(STATUS_FAILED, "cannot catch SIGBUS: %s", strerror(errno));
    guards++;
    guard->open = true;
    return STATUS_OK;
}

void guard_fill(struct guard *guard)
{
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    filled = 0;
    guard->fills = true;
    filling = 1;
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
    if (guard->open && --guards == 0)
        sigaction(SIGBUS, &before, NULL);
    guard->open = false;
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
