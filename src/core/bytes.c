#include "core/bytes.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* All of the file, which may end sooner than stat() said. */
static enum status read_all(int fd, char *bytes, size_t *size)
{
    size_t got = 0;
    while (got < *size) {
        ssize_t count = read(fd, bytes + got, *size - got);
        if (count < 0 && errno != EINTR)
            return status_set(STATUS_FAILED, "cannot be read: %s", strerror(errno));
        if (count == 0)
            break;
        got += count > 0 ? (size_t)count : 0;
    }
    bytes[got] = '\0';
    *size = got;
    return STATUS_OK;
}

static enum status read_open(int fd, char **bytes, size_t *size)
{
    struct stat info;
    if (fstat(fd, &info) != 0)
        return status_set(STATUS_FAILED, "cannot be read: %s", strerror(errno));
    if (!S_ISREG(info.st_mode))
        return status_set(STATUS_FAILED, "is no regular file");
    *size = (size_t)info.st_size;
    *bytes = malloc(*size + 1);
    if (!*bytes)
        return status_set(STATUS_FAILED, "out of memory for its %zu bytes", *size);
    enum status status = read_all(fd, *bytes, size);
    if (status != STATUS_OK) {
        free(*bytes);
        *bytes = NULL;
    }
    return status;
}

enum status bytes_read(const char *path, char **bytes, size_t *size)
{
    *bytes = NULL;
    *size = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe would wait for its writer */
    if (fd < 0)
        return status_set(STATUS_FAILED, "%s: cannot be read: %s", path, strerror(errno));
    enum status status = read_open(fd, bytes, size);
    close(fd);
    return status == STATUS_OK ? STATUS_OK : status_prefix(status, "%s", path);
}
