/* Shared by the files that implement --prepare. No other file includes this header. */
#ifndef FDSL_DATA_PREPARE_PARTS_H
#define FDSL_DATA_PREPARE_PARTS_H

#include "core/options.h"
#include "core/status.h"
#include "core/workload.h"
#include "data/class_folders.h"
#include "data/folder.h"
#include "data/image.h"
#include "data/members.h"
#include "data/prepare.h"
#include "data/source.h"

#define SHARDS_MAX 1000000

struct parameters {
    const char *folder, *from, *name, *config;
    uint64_t samples, shards, threads, device;
    int store;
    bool help;
};

struct job {
    bool (*is_option)(const char *name); /* whether the program has this option outside --prepare */
    struct parameters parameters;
    const struct source *source;
    void *source_parameters, *workload_parameters; /* owned */
    const struct workload *workload;               /* workload of the source, or NULL */
    struct options options;
    struct source_facts facts;
    void *state;      /* state of the source */
    char *provenance; /* owned */
    struct folder folder;
    struct class_folders classes; /* labels and folders: only for --store imagefolder */
    int key_digits;
    uint64_t chunk;                   /* samples in memory at a time */
    struct image_scratch scratch;     /* to check the headers of copied images */
    uint64_t broken;                  /* copied samples of this rank whose image has a broken header */
    struct members members;           /* how readers of the copy find the image and the label of a sample */
    struct image first_image;         /* shape of the first PNG or JPEG image that this rank copied */
    bool mixed_sizes, mixed_channels; /* whether other images have another size or number of channels */

    /* Progress of this rank */
    struct progress progress;
    double began_s, writing_s; /* times when the run began and when writing began */
    uint64_t samples_written, samples_earlier, samples_total, samples_kept, units_finished;
};

/* Parses the command line and the configuration file into `job`: the source, the options of --prepare, and
 * those of the source and its workload. STATUS_USAGE with the option and a remedy, STATUS_EXHAUSTED if memory
 * runs out. The caller frees job->options and the parameters, even after a failure. */
enum status prepare_read_options(struct job *job, const struct config *config);

/* Sets --name and --store if the source determines them, and checks them. */
enum status prepare_check_options(struct job *job);

/* Formats job->provenance: one line with all options that affect the bytes of the data set, and a hash of the
 * inputs. Equal lines mean equal data sets. Call after the source has been opened. STATUS_EXHAUSTED if memory
 * runs out. */
enum status prepare_describe(struct job *job);

#endif
