/* Reads from /proc the CPU time, memory and storage traffic of a process or a tree of processes. */
#ifndef FDSL_MACHINE_PROCESS_H
#define FDSL_MACHINE_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "core/status.h"

/* Counters of the resources that processes have used so far. A counter is negative if it is unknown. */
enum process_counter {
    PROCESS_CPU_S,
    PROCESS_READ_BYTES,    /* from storage, not from the page cache */
    PROCESS_WRITTEN_BYTES, /* to storage, counted when they are written to the page cache */
    PROCESS_COUNTERS
};
struct process_use {
    double counters[PROCESS_COUNTERS];
    double rss_bytes; /* resident memory now; a shared memory page counts once per process */
};

/* Reads what this process uses, with all its threads. Thread safe. */
void process_use_own(struct process_use *use);

/* All descendants of this process, including those whose parents have ended. The counters include those of
 * descendants that have ended. */
struct process_tree;

/* Makes this process the parent of orphaned descendants (PR_SET_CHILD_SUBREAPER). The caller frees `*tree`
 * with process_tree_free(). STATUS_FAILED if /proc cannot be read, STATUS_EXHAUSTED if memory runs out. */
enum status process_tree_open(struct process_tree **tree);
void process_tree_free(struct process_tree *tree);

/* Reads what the tree has used so far; counters never decrease. Returns false if memory runs out, or if
 * processes end faster than they can be read; then all fields of `use` are negative. The first call reads all
 * of /proc; later calls read only new processes and the tree. Thread safe. */
bool process_tree_use(struct process_tree *tree, struct process_use *use);

/* Returns the number of processes that were running at the latest successful process_tree_use(). Thread safe.
 */
size_t process_tree_running(struct process_tree *tree);

/* Collects all children of this process that have ended. If `child` is one of them, returns true and sets
 * `*wait_status` as waitpid() does. No other function may wait for children, and SIGCHLD must not be ignored;
 * otherwise the status of `child` may be lost. If no children are left and `child` was not found, the
 * function warns, returns true, and sets the status of exit(1). Thread safe. */
bool process_tree_collect(struct process_tree *tree, pid_t child, int *wait_status);

#endif
