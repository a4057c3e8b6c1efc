/* The oracle: naive.c in double, for gradients that can be held against differences, and for --verify. */
#define FDSL_DOUBLE
#include "naive.c"
