/* Reads the tensors of files that PyTorch's torch.save() writes (version 1.6 and newer). */
#ifndef FDSL_DATA_TORCH_FILE_H
#define FDSL_DATA_TORCH_FILE_H

#include "data/pickle.h"
#include "data/tensor_file.h"
#include "data/zip.h"

/* Lists the tensors of an open file, in the order of the pickle. The file is a zip archive with a pickle and
 * one member per storage. The pickle may contain tensors, and nested dicts, lists and tuples of tensors. The
 * name of a tensor consists of the keys and indexes that lead to it, separated by dots: "layers.0". The name
 * is "" if the pickle is a single tensor. Nothing is executed: data/pickle.h refuses everything else.
 * STATUS_FAILED with the reason. */
enum status torch_list(struct tensor_file *file);

/* The second half of torch_list(), for tests: lists the tensors in a pickle. The members of the archive that
 * store the values are named `prefix`data/KEY. */
enum status torch_list_pickle(const uint8_t *bytes, size_t size, const struct zip *zip, const char *prefix,
                              struct tensor_file *file);

#endif
