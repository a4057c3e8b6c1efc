/* Stub of the consumer for builds without CUDA. */
#include "core/consumer.h"
#include "machine/device.h"

enum status consumer_open(int device, double step_s, const struct task *task, struct consumer **consumer)
{
    (void)step_s, (void)task;
    *consumer = NULL;
    return status_prefix(device_probe(device), "--compute");
}
