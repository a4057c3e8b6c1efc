/* The number of CPU threads that the environment asks for. */
#ifndef FDSL_MACHINE_THREADS_H
#define FDSL_MACHINE_THREADS_H

#include <stdbool.h>
#include <stdint.h>

#define THREADS_MAX 8192 /* maximum number of hardware threads that Linux supports on x86-64 */

/* Gets the number of CPU threads that OMP_NUM_THREADS requests. In a list ("4,2"), only the first number
 * counts; the others are for nested levels. `*threads` is 0 if the variable is unset or empty. Returns false
 * if the variable is invalid. */
bool threads_requested(uint64_t *threads);

#endif
