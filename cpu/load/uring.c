#include "core/phase.h"
#include "uring.h"

#include <errno.h>
#include <string.h>

enum status uring_probe(const int *operations)
{
    struct io_uring ring;
    int failure = io_uring_queue_init(4, &ring, 0);
    if (failure < 0)
        return status_set(
            STATUS_UNAVAILABLE, "io_uring is not available: %s%s", strerror(-failure),
            failure == -EPERM
                ? " (blocked by kernel.io_uring_disabled, or by a seccomp filter, as in many containers)"
            : failure == -ENOMEM ? " (the limit of locked memory is too low: ulimit -l)"
            : failure == -ENOSYS ? " (the Linux kernel is too old, or a seccomp filter blocks it)"
                                 : "");
    struct io_uring_probe *probe = io_uring_get_probe_ring(&ring);
    enum status status = STATUS_OK;
    if (!probe)
        status =
            status_set(STATUS_UNAVAILABLE, "cannot query io_uring's operations: the Linux kernel is too old");
    for (; status == STATUS_OK && *operations >= 0; operations++)
        if (!io_uring_opcode_supported(probe, *operations))
            status = status_set(STATUS_UNAVAILABLE, "the io_uring of this Linux kernel lacks operation %d",
                                *operations);
    io_uring_free_probe(probe);
    io_uring_queue_exit(&ring);
    return status;
}

enum status uring_submit(struct io_uring *ring)
{
    int result = io_uring_submit(ring);
    if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY)
        return status_set(STATUS_FAILED, "io_uring: %s", strerror(-result));
    return STATUS_OK;
}

enum status uring_wait(struct io_uring *ring)
{
    int result;
    RANGE(WAIT);
    do
        result = io_uring_submit_and_wait(ring, 1);
    while (result == -EINTR);
    if (result < 0)
        return status_set(STATUS_FAILED, "io_uring: %s", strerror(-result));
    return STATUS_OK;
}
