/* Libraries that libfdsl opens only when they are needed. */
#ifndef FDSL_LIB_LATE_H
#define FDSL_LIB_LATE_H

#include "core/status.h"

/* Opens the libraries that a data set at this path or URL needs: remote_options.prepare of libfdsl.
 * STATUS_UNAVAILABLE with the name of the missing library and the reason. Thread safe. */
enum status late_open(const char *url);

#endif
