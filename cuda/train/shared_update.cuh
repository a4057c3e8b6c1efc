/* Helpers for engines whose exchange may also update the parameters (exchange_method.updates). */
#ifndef FDSL_CUDA_TRAIN_SHARED_UPDATE_CUH
#define FDSL_CUDA_TRAIN_SHARED_UPDATE_CUH

#include <cuda_runtime.h>

#include "train/engine.h"
#include "train/exchange.h"
#include "train/network.cuh"

/* Allocates the optimizer's moments and enqueues zeroing them. If the exchange updates the parameters, the
 * moments cover only this rank's chunks of the arena (train/exchange.h), otherwise the whole arena. */
enum status moments_open(const struct train *train, struct train_state *state,
                         struct allocations *allocations, cudaStream_t stream);

/* If the exchange updates the parameters, allocates arrays->update and passes `arrays` to the exchange; the
 * caller has set the other members. `arrays` must outlive the exchange's steps. Otherwise does nothing. */
enum status shared_update_open(const struct train *train, struct allocations *allocations,
                               struct exchange_update *arrays);

/* Call before the first part of a step: enqueues storing the update of the step for the exchange. */
enum status shared_update_begin(const struct exchange_update *arrays, const struct update *update,
                                cudaStream_t stream);

/* Copy the parameters and, when training, the moments between host and device, and wait for the copies. With
 * an exchange that updates the parameters, state_get() is collective: it gathers the moments of all ranks. */
enum status state_set(const struct train *train, const struct train_state *to, const struct train_state *from,
                      cudaStream_t stream);
enum status state_get(const struct train *train, struct train_state *to, const struct train_state *from,
                      cudaStream_t stream);

#endif
