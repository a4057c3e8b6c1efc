/* The oracle: naive.c in double, for --verify and for tests that compare gradients with finite differences.
 */
#define FDSL_DOUBLE
#include "train/naive.c"
