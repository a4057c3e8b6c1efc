/* Expects that a call returns STATUS_OK, and ends the test with the error message otherwise. */
#ifndef FDSL_TESTS_MUST_H
#define FDSL_TESTS_MUST_H

#include <criterion/criterion.h>

#include "core/status.h"

#define must(call) cr_assert_eq(call, STATUS_OK, "%s", status_text())

#endif
