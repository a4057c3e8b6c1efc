#include "run/gpu_others.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/text.h"
#include "machine/comm.h"
#include "machine/device.h"

const char *const gpu_others_words[] = {"warn", "refuse", "ignore", NULL}; /* by enum gpu_others_action */

void gpu_others_text(const struct gpu_process *processes, size_t count, char *text, size_t size)
{
    *text = '\0';
    for (size_t i = 0; i < count && i < GPU_PROCESSES_MAX; i++) {
        char memory[32] = "";
        if (processes[i].memory_bytes >= 0)
            snprintf(memory, sizeof memory, ", %.1f GB", 1e-9 * (double)processes[i].memory_bytes);
        text_join(text, size, ", ", "pid %u (%s%s)", processes[i].pid,
                  *processes[i].name ? processes[i].name : "name unknown", memory);
    }
    if (count > GPU_PROCESSES_MAX)
        text_append(text, size, " and %zu more", count - GPU_PROCESSES_MAX);
}

/* Removes this process, which has used the GPU if it ran something before. */
static void drop_own(struct gpu_others *others)
{
    size_t kept = 0;
    const size_t listed = others->count < GPU_PROCESSES_MAX ? others->count : GPU_PROCESSES_MAX;
    for (size_t i = 0; i < listed; i++)
        if (others->processes[i].pid != (unsigned)getpid())
            others->processes[kept++] = others->processes[i];
    others->count -= listed - kept;
}

/* Returns whether a lower rank of this machine uses the same GPU, and has therefore named its processes. */
static enum status is_named(const char *pci_bus_id, bool *named)
{
    char ids[COMM_LOCAL_IDS][GPU_ID_BYTES];
    *named = false;
    if (comm_local_size() > COMM_LOCAL_IDS)
        return STATUS_OK;
    char own[GPU_ID_BYTES] = "";
    snprintf(own, sizeof own, "%s", pci_bus_id);
    TRY(comm_gather_local(own, sizeof own, ids));
    for (int i = 0; i < comm_local_rank(); i++)
        *named |= strcmp(ids[i], own) == 0;
    return STATUS_OK;
}

enum status gpu_others_look(int device, enum gpu_others_action action, struct gpu_others *others)
{
    char id[GPU_ID_BYTES] = "", text[1024];
    bool named;
    *others = (struct gpu_others){0};
    others->known = device >= 0 && action != GPU_OTHERS_IGNORE &&
                    device_pci_bus_id(device, id, sizeof id) == STATUS_OK &&
                    nvml_gpu_processes(id, others->processes, GPU_PROCESSES_MAX, &others->count) == STATUS_OK;
    drop_own(others);
    TRY(is_named(id, &named)); /* collective: from here on, ranks may begin to use their GPUs */
    if (!others->known || others->count == 0 || named)
        return comm_agree(STATUS_OK);
    gpu_others_text(others->processes, others->count, text, sizeof text);
    if (action == GPU_OTHERS_REFUSE)
        return comm_agree(status_set(STATUS_UNAVAILABLE,
                                     "GPU %d (%s) is in use by %s; end %s, choose another GPU with --device "
                                     "or --best-gpu, or allow it with --gpu-others warn",
                                     device, id, text, others->count == 1 ? "it" : "them"));
    status_warn_own(
        "GPU %d (%s) is also used by %s, which can slow down the timed runs; end %s, choose another "
        "GPU with --device or --best-gpu, or accept it with --gpu-others ignore",
        device, id, text, others->count == 1 ? "it" : "them");
    return comm_agree(STATUS_OK);
}
