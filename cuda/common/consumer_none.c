/* A build without CUDA: no accelerator that could consume a batch. */
#include "core/consumer.h"
#include "machine/device.h"

enum status consumer_open(int device, double step_s, const struct lesson *lesson, struct consumer **consumer)
{
    (void)step_s, (void)lesson;
    *consumer = NULL;
    return status_prefix(device_probe(device), "--compute");
}
