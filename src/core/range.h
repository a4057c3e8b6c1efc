/* Named ranges for profilers (NVTX 3). They cost nothing where no profiler listens, and are empty functions
 * where NVTX was not found at build time. Ranges nest. */
#ifndef FDSL_CORE_RANGE_H
#define FDSL_CORE_RANGE_H

void range_push(const char *name);
void range_pop(void);

#endif
