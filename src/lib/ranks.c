/* The ranks of a trainer: implements machine/comm.h over connections to rank 0, over a communicator of the
 * MPI that the process has loaded, or over NCCL. Each of these only gathers on rank 0 and spreads from it. */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/array.h"
#include "core/timer.h"
#include "lib/call.h"
#include "machine/comm.h"
#include "machine/heartbeat.h"
#include "train/exchange.h"

#define JOIN_S   120.0 /* a rank waits so long for the others to join */
#define SILENT_S 120   /* a connection ends if the other machine has not answered for so long */
#define CHUNK    ((size_t)1 << 26)
#define GREETED \
    0x66647377 /* the first word of a connection, with the number of the layout of these messages */

static struct {
    int rank, size; /* size 0: one rank */
    int local_rank, local_size;
    uint64_t *hosts; /* per rank: hash of the name of its machine */
    enum status (*gather)(const void *mine, size_t bytes, void *all);
    enum status (*spread)(void *data, size_t bytes);
    void (*leave)(void);
    int *sockets; /* on rank 0: one per rank; else [0] is that to rank 0 */
    void *nccl;
} ranks;

/* ---- Connections ---- */

static enum status lost(int rank, int cause)
{
    const bool left = cause == 0 || cause == ECONNRESET || cause == EPIPE;
    return status_set(STATUS_FAILED, "the connection to rank %d ended: %s", rank,
                      left ? "it left the training run; see its error" : strerror(cause));
}

static enum status send_all(int rank, int socket, const void *data, size_t bytes, int flags)
{
    for (size_t done = 0; done < bytes;) {
        const ssize_t sent = send(socket, (const char *)data + done, bytes - done, MSG_NOSIGNAL | flags);
        if (sent < 0 && errno != EINTR)
            return lost(rank, errno);
        done += sent > 0 ? (size_t)sent : 0;
    }
    return STATUS_OK;
}

static enum status receive_all(int rank, int socket, void *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        const ssize_t got = recv(socket, (char *)data + done, bytes - done, 0);
        if (got == 0 || (got < 0 && errno != EINTR))
            return lost(rank, got == 0 ? 0 : errno);
        done += got > 0 ? (size_t)got : 0;
    }
    return STATUS_OK;
}

/* A message begins with its size: ranks that call different functions get an error, not wrong values. */
static enum status send_message(int rank, int socket, const void *data, uint64_t bytes)
{
    TRY(send_all(rank, socket, &bytes, sizeof bytes, MSG_MORE));
    return send_all(rank, socket, data, bytes, 0);
}

static enum status receive_message(int rank, int socket, void *data, uint64_t bytes)
{
    uint64_t sent;
    TRY(receive_all(rank, socket, &sent, sizeof sent));
    if (sent != bytes)
        return status_set(STATUS_FAILED,
                          "rank %d sent %" PRIu64 " bytes, but this rank expects %" PRIu64
                          "; call the same functions in the same order on all ranks",
                          rank, sent, bytes);
    return receive_all(rank, socket, data, bytes);
}

static enum status socket_gather(const void *mine, size_t bytes, void *all)
{
    if (ranks.rank > 0)
        return send_message(0, ranks.sockets[0], mine, bytes);
    memcpy(all, mine, bytes);
    for (int i = 1; i < ranks.size; i++)
        TRY(receive_message(i, ranks.sockets[i], (char *)all + (size_t)i * bytes, bytes));
    return STATUS_OK;
}

static enum status socket_spread(void *data, size_t bytes)
{
    if (ranks.rank > 0)
        return receive_message(0, ranks.sockets[0], data, bytes);
    for (int i = 1; i < ranks.size; i++)
        TRY(send_message(i, ranks.sockets[i], data, bytes));
    return STATUS_OK;
}

static void socket_leave(void)
{
    for (int i = 0; ranks.sockets && i < (ranks.rank ? 1 : ranks.size); i++)
        if (ranks.sockets[i] >= 0)
            close(ranks.sockets[i]);
    free(ranks.sockets);
    ranks.sockets = NULL;
}

/* The first message of a rank, and the reply of rank 0 with its own number of ranks and, as the rank, TAKEN
 * if another process has joined as this one. */
struct greeting {
    uint32_t word, rank, size;
};

#define TAKEN UINT32_MAX

static void limit_wait(int socket, double seconds)
{
    const struct timeval limit = {.tv_sec = (time_t)seconds};
    (void)setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    (void)setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit); /* also of connect() */
}

/* Reads the greeting of a connection and replies. Returns whether a rank has joined. */
static bool greet(int from)
{
    struct greeting greeting = {0};
    limit_wait(from, 1);
    if (recv(from, &greeting, sizeof greeting, MSG_WAITALL) != sizeof greeting || greeting.word != GREETED)
        return false;
    const bool same =
        greeting.size == (uint32_t)ranks.size && greeting.rank > 0 && greeting.rank < greeting.size;
    const bool joins = same && ranks.sockets[greeting.rank] < 0;
    const struct greeting reply = {GREETED, same && !joins ? TAKEN : greeting.rank, (uint32_t)ranks.size};
    if (send_all((int)greeting.rank, from, &reply, sizeof reply, 0) != STATUS_OK || !joins)
        return false;
    limit_wait(from, 0);
    ranks.sockets[greeting.rank] = from;
    return true;
}

/* Accepts the connections of all ranks. Closes those of other programs. */
static enum status accept_all(int listener)
{
    const double end_s = timer_now_s() + JOIN_S;
    limit_wait(listener, 1);
    for (int joined = 1; joined < ranks.size;) {
        const int from = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (from < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
            return status_set(STATUS_FAILED, "port: cannot accept a connection: %s", strerror(errno));
        if (from >= 0 && greet(from))
            joined++;
        else if (from >= 0)
            close(from);
        if (joined < ranks.size && timer_now_s() > end_s)
            return status_set(STATUS_FAILED, "%d of %d ranks have joined after %g s; start all of them",
                              joined, ranks.size, JOIN_S);
    }
    return STATUS_OK;
}

/* Listens at the first of the addresses that this machine has. */
static enum status listen_at(const struct addrinfo *found, const char *port)
{
    const int on = 1;
    int listener = -1;
    for (const struct addrinfo *at = found; at && listener < 0; at = at->ai_next) {
        listener = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        (void)setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (listener >= 0 && (bind(listener, at->ai_addr, at->ai_addrlen) || listen(listener, SOMAXCONN))) {
            const int error = errno;
            close(listener);
            errno = error;
            listener = -1;
        }
    }
    if (listener < 0)
        return errno == EADDRNOTAVAIL
                   ? status_set(STATUS_USAGE, "address: it is not one of this machine, where rank 0 listens; "
                                              "give all ranks the address of the machine of rank 0")
                   : status_set(STATUS_FAILED,
                                "port: rank 0 cannot listen at port %s: %s; choose another one on all ranks",
                                port, strerror(errno));
    const enum status status = accept_all(listener);
    close(listener);
    return status;
}

/* Connects to rank 0, which may not listen yet. Waits for its reply until `end_s`. Sets `*answered` if
 * something that is not rank 0 listens. */
static enum status join(const struct addrinfo *at, double end_s, bool *answered)
{
    const struct greeting greeting = {GREETED, (uint32_t)ranks.rank, (uint32_t)ranks.size};
    struct greeting reply = {0};
    const double left_s = end_s - timer_now_s();
    const int to = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (to < 0)
        return errno == EAFNOSUPPORT
                   ? STATUS_OK
                   : status_set(STATUS_FAILED, "port: cannot open a socket: %s", strerror(errno));
    limit_wait(to, left_s > 1 ? left_s : 1);
    const bool connected = connect(to, at->ai_addr, at->ai_addrlen) == 0;
    const bool known = connected && send_all(0, to, &greeting, sizeof greeting, 0) == STATUS_OK &&
                       receive_all(0, to, &reply, sizeof reply) == STATUS_OK && reply.word == GREETED;
    *answered = connected && !known;
    if (known && reply.size == greeting.size && reply.rank == greeting.rank) {
        limit_wait(to, 0);
        ranks.sockets[0] = to;
        return STATUS_OK;
    }
    close(to);
    if (known && reply.size != greeting.size)
        return status_set(STATUS_USAGE, "world_size: it is %d, but %" PRIu32 " on rank 0", ranks.size,
                          reply.size);
    return known ? status_set(STATUS_USAGE,
                              "rank: another process has joined as rank %d; give each process its own rank, "
                              "and each training run its own port",
                              ranks.rank)
                 : STATUS_OK;
}

static enum status connect_to(const struct addrinfo *found, const char *address, const char *port)
{
    const double end_s = timer_now_s() + JOIN_S;
    bool answered = false;
    do {
        for (const struct addrinfo *at = found; at && ranks.sockets[0] < 0; at = at->ai_next)
            TRY(join(at, end_s, &answered));
        if (ranks.sockets[0] >= 0)
            return STATUS_OK;
        usleep(50000);
    } while (timer_now_s() < end_s);
    return status_set(STATUS_FAILED, "address: %s at %s, port %s, after %g s; %s",
                      answered ? "another program listens" : "rank 0 does not listen", address, port, JOIN_S,
                      answered ? "choose another port on all ranks"
                               : "start rank 0, with the same address and port");
}

/* Sends small messages at once, and notices a machine that no longer answers. TCP_USER_TIMEOUT would also end
 * the connection to a rank that is busy for so long and reads nothing. */
static void tune(int socket)
{
    static const struct {
        int level, name, value;
    } settings[] = {{IPPROTO_TCP, TCP_NODELAY, 1},
                    {SOL_SOCKET, SO_KEEPALIVE, 1},
                    {IPPROTO_TCP, TCP_KEEPIDLE, SILENT_S / 2},
                    {IPPROTO_TCP, TCP_KEEPINTVL, SILENT_S / 12},
                    {IPPROTO_TCP, TCP_KEEPCNT, 6}};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        (void)setsockopt(socket, settings[i].level, settings[i].name, &settings[i].value, sizeof(int));
}

static enum status open_sockets(const struct fdsl_trainer_config *config)
{
    struct addrinfo *found = NULL;
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_family = AF_UNSPEC};
    const int count = ranks.rank ? 1 : ranks.size;
    char port[16];
    TRY(lib_check_count("port", config->port, 1, 65535));
    snprintf(port, sizeof port, "%" PRIu32, config->port);
    ranks.sockets = malloc((size_t)count * sizeof *ranks.sockets);
    TRY(ALLOCATED(ranks.sockets, "out of memory"));
    for (int i = 0; i < count; i++)
        ranks.sockets[i] = -1;
    ranks.gather = socket_gather;
    ranks.spread = socket_spread;
    ranks.leave = socket_leave;
    const int error = getaddrinfo(config->address, port, &hints, &found);
    if (error)
        return status_set(STATUS_USAGE, "address: %s: %s", config->address, gai_strerror(error));
    const enum status status = ranks.rank ? connect_to(found, config->address, port) : listen_at(found, port);
    freeaddrinfo(found);
    for (int i = 0; i < count; i++)
        if (ranks.sockets[i] >= 0)
            tune(ranks.sockets[i]);
    return status;
}

/* ---- MPI ---- */

/* The functions of MPI that are used, as the process has loaded them. The handles of Open MPI are pointers,
 * those of MPICH and its relatives are integers, in the same registers. */
static struct {
    int (*Comm_rank)(void *, int *);
    int (*Comm_size)(void *, int *);
    int (*Gather)(const void *, int, void *, void *, int, void *, int, void *);
    int (*Bcast)(void *, int, void *, int, void *);
    void *comm, *byte;
} mpi;

#define MPICH_BYTE ((uintptr_t)0x4c00010d) /* MPI_BYTE in the ABI of MPICH */

static enum status mpi_status(int error, const char *call)
{
    return error == 0 ? STATUS_OK
                      : status_set(STATUS_FAILED, "mpi_comm: %s failed with error %d", call, error);
}

static enum status mpi_gather(const void *mine, size_t bytes, void *all)
{
    if (bytes > INT_MAX)
        return status_set(STATUS_FAILED, "mpi_comm: a message has more than 2 GiB");
    return mpi_status(mpi.Gather(mine, (int)bytes, mpi.byte, all, (int)bytes, mpi.byte, 0, mpi.comm),
                      "MPI_Gather");
}

static enum status mpi_spread(void *data, size_t bytes)
{
    for (size_t done = 0; done < bytes; done += CHUNK) {
        const size_t part = bytes - done < CHUNK ? bytes - done : CHUNK;
        TRY(mpi_status(mpi.Bcast((char *)data + done, (int)part, mpi.byte, 0, mpi.comm), "MPI_Bcast"));
    }
    return STATUS_OK;
}

static enum status open_mpi(const struct fdsl_trainer_config *config)
{
    static const char *const files[] = {"libmpi.so.40", "libmpi.so.12", "libmpi.so"};
    void *library = RTLD_DEFAULT;
    for (size_t i = 0; !dlsym(library, "MPI_Bcast") && i < sizeof files / sizeof *files; i++) {
        void *loaded = dlopen(files[i], RTLD_NOW | RTLD_NOLOAD);
        library = loaded ? loaded : library;
    }
    *(void **)&mpi.Comm_rank = dlsym(library, "MPI_Comm_rank");
    *(void **)&mpi.Comm_size = dlsym(library, "MPI_Comm_size");
    *(void **)&mpi.Gather = dlsym(library, "MPI_Gather");
    *(void **)&mpi.Bcast = dlsym(library, "MPI_Bcast");
    if (!mpi.Comm_rank || !mpi.Comm_size || !mpi.Gather || !mpi.Bcast)
        return status_set(STATUS_UNAVAILABLE, "mpi_comm: this process has not loaded MPI");
    mpi.byte = dlsym(library, "ompi_mpi_byte");
    const bool pointers = mpi.byte != NULL;
    mpi.byte = pointers ? mpi.byte : (void *)MPICH_BYTE; /* cppcheck-suppress intToPointerCast */
    if (pointers)
        memcpy(&mpi.comm, config->mpi_comm, sizeof mpi.comm);
    else
        mpi.comm = (void *)(uintptr_t) * (const unsigned *)config->mpi_comm;
    TRY(mpi_status(mpi.Comm_rank(mpi.comm, &ranks.rank), "MPI_Comm_rank"));
    TRY(mpi_status(mpi.Comm_size(mpi.comm, &ranks.size), "MPI_Comm_size"));
    ranks.gather = mpi_gather;
    ranks.spread = mpi_spread;
    return STATUS_OK;
}

/* ---- NCCL ---- */

static enum status nccl_gather(const void *mine, size_t bytes, void *all)
{
    return exchange_nccl_gather(ranks.nccl, mine, bytes, all);
}

static enum status nccl_spread(void *data, size_t bytes)
{
    return exchange_nccl_spread(ranks.nccl, data, bytes);
}

static void nccl_leave(void)
{
    exchange_nccl_leave(ranks.nccl);
    ranks.nccl = NULL;
}

static enum status open_nccl(const struct fdsl_trainer_config *config)
{
    ranks.gather = nccl_gather;
    ranks.spread = nccl_spread;
    ranks.leave = nccl_leave;
    return exchange_nccl_join(config->device, config->nccl_id, ranks.rank, ranks.size, &ranks.nccl);
}

/* ---- Joining ---- */

static enum status all_gather(const void *mine, size_t bytes, void *all)
{
    TRY(ranks.gather(mine, bytes, all));
    return ranks.spread(all, bytes * (size_t)ranks.size);
}

/* Finds the ranks of this machine. */
static enum status find_machine(void)
{
    char name[HOST_NAME_MAX + 1] = "";
    (void)gethostname(name, sizeof name - 1);
    const uint64_t hash = fnv_add(FNV_BEGIN, name, strlen(name));
    ranks.hosts = calloc((size_t)ranks.size, sizeof *ranks.hosts);
    TRY(ALLOCATED(ranks.hosts, "out of memory"));
    TRY(all_gather(&hash, sizeof hash, ranks.hosts));
    ranks.local_rank = ranks.local_size = 0;
    for (int i = 0; i < ranks.size; i++) {
        ranks.local_rank += i < ranks.rank && ranks.hosts[i] == hash;
        ranks.local_size += ranks.hosts[i] == hash;
    }
    return STATUS_OK;
}

enum status lib_ranks_open(const struct fdsl_trainer_config *config, uint32_t *rank, uint32_t *count)
{
    const int ways = (config->address != NULL) + (config->mpi_comm != NULL) + (config->nccl_id != NULL);
    *rank = 0;
    *count = 1;
    TRY(lib_check_count("world_size", config->world_size, 1, 1 << 16));
    TRY(lib_check_count("rank", config->rank, 0, config->world_size - 1));
    if (ways > 1)
        return status_set(STATUS_USAGE,
                          "address, mpi_comm, nccl_id: ranks meet at one of these; drop the others");
    if (ways == 0)
        return config->world_size == 1
                   ? STATUS_OK
                   : status_set(STATUS_USAGE,
                                "world_size: %" PRIu32
                                " ranks need a place to meet: address, mpi_comm or nccl_id",
                                config->world_size);
    ranks.rank = (int)config->rank;
    ranks.size = (int)config->world_size;
    if (config->mpi_comm || ranks.size > 1)
        TRY(config->mpi_comm ? open_mpi(config) : config->address ? open_sockets(config) : open_nccl(config));
    if (ranks.size > 1)
        TRY(find_machine());
    *rank = (uint32_t)ranks.rank;
    *count = (uint32_t)ranks.size;
    return STATUS_OK;
}

void lib_ranks_close(void)
{
    if (ranks.leave)
        ranks.leave();
    free(ranks.hosts);
    memset(&ranks, 0, sizeof ranks);
}

/* ---- machine/comm.h ---- */

/* Pipelines pass messages between neighbours, which these ways to meet do not offer. */
static enum status no_messages(void)
{
    return status_set(STATUS_UNAVAILABLE,
                      "--parallel pipeline needs the program fdsl-bench; use --parallel data");
}

#include "machine/comm_plain.h"

int comm_rank(void)
{
    return ranks.rank;
}

int comm_size(void)
{
    return ranks.size > 1 ? ranks.size : 1;
}

int comm_local_rank(void)
{
    return ranks.local_rank;
}

int comm_local_size(void)
{
    return ranks.size > 1 ? ranks.local_size : 1;
}

enum status comm_agree(enum status status)
{
    if (comm_size() == 1)
        return status;
    const size_t count = (size_t)ranks.size;
    const struct failure mine = status_save(status);
    FREED struct failure *all = NULL;
    FREED int *codes = malloc(count * sizeof *codes);
    const int code = codes ? (int)status : (int)STATUS_EXHAUSTED;
    if (!codes)
        return status_set(STATUS_EXHAUSTED, "out of memory"); /* the others see that the connection ends */
    TRY(all_gather(&code, sizeof code, codes));
    int worst = 0, with = 0;
    for (int i = 0; i < ranks.size; i++)
        worst =
            status_severity((enum status)codes[i]) > status_severity((enum status)codes[worst]) ? i : worst;
    if (codes[worst] == STATUS_OK)
        return STATUS_OK;
    for (int i = 0; i < ranks.size; i++)
        with += codes[i] == codes[worst];
    all = malloc(count * sizeof *all);
    TRY(ALLOCATED(all, "out of memory"));
    TRY(all_gather(&mine, sizeof mine, all));
    all[worst].text[sizeof mine.text - 1] = all[worst].subject[sizeof mine.subject - 1] = '\0';
    const enum status result = status_restore(&all[worst]);
    return with == ranks.size ? result : status_prefix(result, "rank %d", worst);
}

enum status comm_give_up(enum status status)
{
    if (ranks.leave && ranks.sockets) { /* the other ranks see that the connection ends */
        ranks.leave();
        ranks.size = 0;
    }
    return status;
}

enum status comm_vote(enum status status, double *values, size_t count)
{
    TRY(comm_agree(status));
    return comm_max(values, count);
}

/* Gathers the arrays of all ranks, combines them on rank 0 in the order of the ranks, and spreads the result.
 */
static enum status combine(void *values, size_t count, size_t size,
                           void (*add)(void *sum, const void *value, size_t count))
{
    if (comm_size() == 1)
        return STATUS_OK;
    FREED char *all = ranks.rank == 0 ? malloc((size_t)ranks.size * count * size) : NULL;
    TRY(ALLOCATED(all || ranks.rank > 0, "out of memory for a sum over the ranks"));
    TRY(ranks.gather(values, count * size, all));
    for (int i = 1; ranks.rank == 0 && i < ranks.size; i++)
        add(all, all + (size_t)i * count * size, count);
    if (ranks.rank == 0)
        memcpy(values, all, count * size);
    return ranks.spread(values, count * size);
}

static void add_counts(void *sum, const void *value, size_t count)
{
    for (size_t i = 0; i < count; i++)
        ((uint64_t *)sum)[i] += ((const uint64_t *)value)[i];
}

static void add_floats(void *sum, const void *value, size_t count)
{
    for (size_t i = 0; i < count; i++)
        ((float *)sum)[i] += ((const float *)value)[i];
}

static void take_larger(void *sum, const void *value, size_t count)
{
    double *most = sum;
    for (size_t i = 0; i < count; i++)
        most[i] = ((const double *)value)[i] > most[i] ? ((const double *)value)[i] : most[i];
}

enum status comm_sum(uint64_t *values, size_t count)
{
    return combine(values, count, sizeof *values, add_counts);
}

enum status comm_max(double *values, size_t count)
{
    return combine(values, count, sizeof *values, take_larger);
}

enum status comm_spread(void *data, size_t bytes)
{
    return comm_size() == 1 ? STATUS_OK : ranks.spread(data, bytes);
}

enum status comm_gather(const void *mine, size_t bytes, void *all)
{
    if (comm_size() > 1)
        return ranks.gather(mine, bytes, all);
    memcpy(all, mine, bytes);
    return STATUS_OK;
}

enum status comm_gather_local(const void *mine, size_t bytes, void *all)
{
    if (comm_size() == 1) {
        memcpy(all, mine, bytes);
        return STATUS_OK;
    }
    FREED char *whole = malloc((size_t)ranks.size * bytes);
    TRY(ALLOCATED(whole, "out of memory"));
    TRY(all_gather(mine, bytes, whole));
    for (int i = 0, at = 0; i < ranks.size; i++)
        if (ranks.hosts[i] == ranks.hosts[ranks.rank])
            memcpy((char *)all + (size_t)at++ * bytes, whole + (size_t)i * bytes, bytes);
    return STATUS_OK;
}

/* A library does not end the process of its caller, so it does not watch for ranks that are suspended. */
enum status heartbeat_open(double limit_s, struct heartbeat **heartbeat)
{
    (void)limit_s;
    *heartbeat = NULL;
    return STATUS_OK;
}

void heartbeat_close(struct heartbeat *heartbeat)
{
    (void)heartbeat;
}

struct comm_reducer {
    size_t count;
};

enum status comm_reducer_open(size_t count, struct comm_reducer **reducer)
{
    struct comm_reducer *self = *reducer = malloc(sizeof *self);
    TRY(comm_agree(ALLOCATED(self, "out of memory")));
    self->count = count;
    return comm_check_same(count, "numbers of parameters", "give all ranks the same options");
}

void comm_reducer_close(struct comm_reducer *reducer)
{
    free(reducer);
}

enum status comm_reduce(struct comm_reducer *reducer, enum status status, float *values)
{
    TRY(comm_agree(status));
    return combine(values, reducer->count, sizeof *values, add_floats);
}

enum status comm_cuda_probe(void)
{
    return status_set(STATUS_UNAVAILABLE, "mpi-cuda needs the program fdsl-bench");
}

enum status comm_cuda_sum(enum status status, float *values, size_t count)
{
    (void)status, (void)values, (void)count;
    return comm_cuda_probe();
}

enum status comm_share_parts(float *values, const size_t *begins)
{
    if (comm_size() == 1)
        return STATUS_OK;
    const size_t end = begins[ranks.size];
    FREED float *all = ranks.rank == 0 ? malloc((size_t)ranks.size * end * sizeof *all) : NULL;
    TRY(ALLOCATED(all || ranks.rank > 0, "out of memory for the parts of the ranks"));
    TRY(ranks.gather(values, end * sizeof *values, all));
    for (int i = 1; ranks.rank == 0 && i < ranks.size; i++)
        memcpy(values + begins[i], all + (size_t)i * end + begins[i],
               (begins[i + 1] - begins[i]) * sizeof *values);
    return ranks.spread(values, end * sizeof *values);
}

bool comm_shares_memory = false;
