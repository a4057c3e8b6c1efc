/* Checkpoints: all that training needs to go on bit for bit, after every epoch, in files that appear whole or
 * not at all. They know no engine: one variant goes on where another stopped. */
#ifndef FDSL_TRAIN_CHECKPOINT_H
#define FDSL_TRAIN_CHECKPOINT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "train/data.h"
#include "train/engine.h"
#include "train/model.h"

/* What is behind a network. Draws are functions of the epoch, so `epochs` is the state
 * of all random numbers. */
struct train_history {
    uint32_t epochs;         /* done */
    double trained_s;        /* time of their steps */
    double to_98_s, to_99_s; /* what of it had passed when 98 % and 99 % of the test set were right first;
                              * negative: not yet */
};

/* What its samples were, as the options say it, and the hash of each set. Sizes are 0 where not given. */
struct train_samples {
    uint64_t train_size, test_size, classes, res;
    uint64_t hashes[DATA_PARTS];
};

/* A checkpoint in memory. */
struct checkpoint {
    char model[MODEL_NAME_MAX];
    struct shape input;
    uint32_t classes;
    float scale[DATA_CHANNELS_MAX], offset[DATA_CHANNELS_MAX]; /* what its samples were normalised with */
    struct train_history history;
    struct train_samples samples;
    char *data;               /* owned: --data */
    char *row;                /* owned: of its epoch, as CSV, header and line; "" for none */
    char *identity;           /* owned: the options that decide the parameters, "name=value name=value ..." */
    struct train_state state; /* owned: arenas of `arena_values` */
    uint64_t arena_values;
};

FDSL_C_BEGIN

/* Whether checkpoints can be written into the folder, which is made where it is missing. STATUS_USAGE with
 * the reason; STATUS_UNAVAILABLE where the build has no xxHash. */
enum status checkpoint_check_folder(const char *folder);

/* Takes a folder, and removes temporary files that killed processes left there. STATUS_USAGE where another
 * process has it; where the file system has no locks there is a warning. The lock ends with
 * checkpoint_unlock(), or with the process. */
enum status checkpoint_lock(const char *folder, int *lock);
void checkpoint_unlock(int lock);

/* Whether the folder holds any. */
enum status checkpoint_exists(const char *folder, bool *exists);

/* Writes FOLDER/epoch-000012.ckpt and removes all but the latest `keep`. */
enum status checkpoint_write(const char *folder, uint32_t keep, const struct checkpoint *checkpoint);

/* Reads a file. STATUS_FAILED with path and reason: no checkpoint, of another schema, cut, or with a wrong
 * checksum. The caller frees, also after a failure. */
enum status checkpoint_read(const char *path, struct checkpoint *checkpoint);

/* Reads the latest one of a folder. Where `pass_over`, files that are cut or damaged are passed over with a
 * warning, as a power cut may leave them; whatever else is in the way (another schema, rights, memory, the
 * disk) fails, for the next epoch would take its place. `*found` is false where there is no checkpoint at
 * all; STATUS_FAILED where all are broken. The caller frees. */
enum status checkpoint_read_latest(const char *folder, bool pass_over, struct checkpoint *checkpoint,
                                   bool *found);
void checkpoint_free(struct checkpoint *checkpoint);

/* Reads what the user named with an option: a file, or a folder's latest, none of which is passed over.
 * STATUS_USAGE where there is nothing. The caller frees, also after a failure. */
enum status checkpoint_find(const char *option, const char *path, struct checkpoint *checkpoint);

/* The model that it is of, as its arenas have it. STATUS_FAILED where this program has no such one. */
enum status checkpoint_model(const struct checkpoint *checkpoint, struct model *model);

/* XXH3-64 of its parameters; 0 where the build has no xxHash, and so no checkpoints. */
uint64_t checkpoint_hash(const struct checkpoint *checkpoint);

FDSL_C_END

#endif
