/* Lists the members of a zip archive in which no member is compressed, such as the files of torch.save(). */
#ifndef FDSL_DATA_ZIP_H
#define FDSL_DATA_ZIP_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"
#include "data/tensor_file.h"

struct zip_member {
    const char *name;
    uint64_t begin;         /* offset of its local header */
    uint64_t offset, bytes; /* position of its data in the file */
};

struct zip {
    struct zip_member *members; /* sorted by name */
    size_t count;
    char *directory; /* owned; names point into it */
};

/* Reads the central directory, and checks that it agrees with the members' local headers. Supports zip64.
 * Refuses members that are compressed, encrypted, outside the file, overlapping, or named twice, and names
 * that lead out of a folder. CRCs are not checked, because torch.save() can omit them. The caller frees
 * `zip`, even after a failure. STATUS_FAILED with the reason. */
enum status zip_list(const struct tensor_file *file, struct zip *zip);
void zip_free(struct zip *zip);

/* Returns the member of this name, or NULL. */
const struct zip_member *zip_find(const struct zip *zip, const char *name);

#endif
