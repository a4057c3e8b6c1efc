/* Records NVTX ranges for tests: a library that NVTX loads if NVTX_INJECTION64_PATH names it. When the
 * process ends, the library appends to the file that NVTX_RECORD names. It writes one line per range: how
 * often the range was opened, the name of the enclosing range, and the name of the range. The last line,
 * "depth N", has the number of ranges that were not closed.
 *
 *     cc -shared -fPIC -idirafter DIR -o recorder.so tests/nvtx_recorder.c     DIR: where nvtx3/ is */
#include <nvtx3/nvToolsExt.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANGES_MAX 256
#define DEPTH_MAX  64

static struct {
    char name[64], inside[64];
    unsigned long count;
} ranges[RANGES_MAX];
static int range_count, open_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread char stack[DEPTH_MAX][64];
static __thread int depth;

static int push(const char *name)
{
    const char *inside = depth > 0 ? stack[depth - 1] : "-";
    int i = 0;
    pthread_mutex_lock(&lock);
    while (i < range_count && (strcmp(ranges[i].name, name) != 0 || strcmp(ranges[i].inside, inside) != 0))
        i++;
    if (i == range_count && range_count < RANGES_MAX) {
        snprintf(ranges[i].name, sizeof ranges[i].name, "%s", name);
        snprintf(ranges[i].inside, sizeof ranges[i].inside, "%s", inside);
        range_count++;
    }
    if (i < RANGES_MAX)
        ranges[i].count++;
    __atomic_add_fetch(&open_count, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&lock);
    if (depth < DEPTH_MAX)
        snprintf(stack[depth], sizeof stack[depth], "%s", name);
    return depth++;
}

static int pop(void)
{
    __atomic_sub_fetch(&open_count, 1, __ATOMIC_SEQ_CST);
    return --depth;
}

__attribute__((destructor)) static void write_record(void)
{
    const char *path = getenv("NVTX_RECORD");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file)
        return;
    for (int i = 0; i < range_count; i++)
        fprintf(file, "%lu %s %s\n", ranges[i].count, ranges[i].inside, ranges[i].name);
    fprintf(file, "depth %d\n", open_count);
    fclose(file);
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table);
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table)
{
    const NvtxExportTableCallbacks *callbacks =
        (const NvtxExportTableCallbacks *)get_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table;
    unsigned size = 0;
    if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) ||
        size <= NVTX_CBID_CORE_RangePop)
        return 0;
    *table[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
    return 1;
}
