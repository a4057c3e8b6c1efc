/* `fused` for iterated function systems (synth/ifs.h): the bank of orbits in device memory, and the images.
 * docs/notes/synth.md has measurements.
 *
 *   orbits   The points of an orbit are divided into chunks, one per thread. A chunk begins IFS_BURN points
 *            early at (0, 0). Most orbits contract on average, so after these points nearly all chunks have
 * exactly the points of the orbit. The ends of neighbouring chunks are compared; chunks that differ are
 *            computed again from the true point, while other orbits are rastered. Each segment of a chunk
 *            stores its first point.
 *   raster   A block draws an orbit's map, one segment per thread: a cell receives the maximum of the numbers
 *            of its visits. Then each pixel takes the latest of the nine cells around it.
 *   images   A block makes a tile of an image. It computes the masks of the tile's cells and looks up the
 *            bit of each pixel. The output is made from these bits. */
#ifndef FDSL_CUDA_SYNTH_FUSED_IFS_CUH
#define FDSL_CUDA_SYNTH_FUSED_IFS_CUH

#include "synth/fused.cuh"
#include "synth/ifs.h"

#define IFS_SEGMENTS 1024u /* segments per orbit: the threads of a block that rasters */
#define IFS_BURN     1024u /* points that a chunk computes before its first one */
#define IFS_EIGHT    8u    /* choices per load; segments are multiples of it */

/* An orbit to compute. */
struct ifs_item {
    uint32_t class_index;
    uint32_t row;     /* of its class in the choices */
    uint8_t *map;     /* destination */
    double factor[6]; /* of the coefficients a .. f, as in ifs_weighted() */
};

/* The results of a chunk: the point after its last one, and the extent of its points. */
struct ifs_reach {
    struct ifs_point end, least, most;
};

/* The raster of an orbit. */
struct ifs_frame {
    struct ifs_axis x, y;
    uint32_t drawn; /* points 0 .. drawn - 1 are drawn */
};

/* A group of orbits to compute. All pointers are to device memory. */
struct ifs_group {
    struct ifs_rules rules;
    uint32_t res;
    const struct ifs_system *systems; /* all classes, without weights */
    const double *uniforms;
    const uint32_t *classes; /* the class of each row of choices */
    uint8_t *choices;        /* `pitch` bytes per row; IFS_REPEAT after the last point */
    size_t pitch;
    uint32_t class_rows; /* rows of choices */
    const struct ifs_item *items;
    uint32_t count;          /* of items */
    uint32_t length;         /* points per segment, a multiple of IFS_EIGHT */
    uint32_t chunk, chunks;  /* segments per chunk; chunks per orbit that have points */
    struct ifs_point *marks; /* first points of segments; IFS_SEGMENTS per item */
    struct ifs_reach *reach; /* `chunks` per item */
    struct ifs_frame *frames;
    uint32_t *listed, *listed_count; /* the items with chunks to compute again */
    uint8_t *is_listed;              /* per item */
    bool late;                       /* rasters the listed items; false: the others */
    uint32_t strips, rows;           /* strips per map, rows per strip */
    uint32_t blocks;                 /* that raster at a time */
    ushort2 *cells;                  /* of an orbit's points, per block; unused if there is one strip */
};

/* ---- The bank: fused_ifs_bank.cu ---- */

/* The orbits of an input, in device memory. Thread-safe. */
struct ifs_device_bank;

/* Opens the bank of an input on a device: an empty one, or the one that is open already for the same tables,
 * such as that of another generator. The tables of `synth` must outlive it; `synth` need not. Each caller
 * closes the bank. */
enum status ifs_device_open(int device, const struct synth *synth, struct ifs_device_bank **bank);

/* Computes those of `count` orbits that the bank does not have yet, and waits until they are complete. NULL:
 * all orbits. The numbers are those of struct ifs_bank. STATUS_TOO_LARGE if there is not enough device
 * memory. Other threads that call it wait. */
enum status ifs_device_need(struct ifs_device_bank *bank, const uint64_t *orbits, uint64_t count);

/* Returns the addresses of the maps, by orbit, in device memory. They stay valid while the bank is open. */
const uint8_t *const *ifs_device_maps(const struct ifs_device_bank *bank);

/* Returns the systems of all classes in device memory. */
const struct ifs_system *ifs_device_systems(const struct ifs_device_bank *bank);

/* Returns the size of the bank, and the time of computing it (synth/ifs.h). */
struct ifs_bank_facts ifs_device_facts(struct ifs_device_bank *bank);

void ifs_device_close(struct ifs_device_bank *bank); /* accepts NULL */

/* ---- Fractals in space: fused_ifs3d.cu ---- */

/* Draws views of FAMILY_IFS3D as bitmaps, and point clouds. */
struct ifs_solids;
enum status ifs_solids_open(int device, const struct synth *synth, struct ifs_solids **solids);

/* Enqueues the bitmaps of the images of a call, as for ifs_plan_enqueue(), and their point clouds. */
enum status ifs_solids_enqueue(const struct ifs_solids *solids, const struct fused_call *call,
                               const struct fused_call *stored, uint64_t count, cudaStream_t stream);

/* Return device memory: the classes, and the bitmaps in the order of the call, ifs_map_bytes() each. */
const struct ifs3d_system *ifs_solids_systems(const struct ifs_solids *solids);
const uint8_t *ifs_solids_bitmaps(const struct ifs_solids *solids);
uint64_t ifs_solids_bytes(const struct ifs_solids *solids);
void ifs_solids_close(struct ifs_solids *solids); /* accepts NULL */

/* ---- The plan: fused_ifs.cu ---- */

/* Makes images from a bank or from the bitmaps of fractals in space, with the interface of struct fused_plan
 * (fused.cuh). */
struct ifs_plan;
enum status ifs_plan_open(int device, const struct synth *synth, struct ifs_plan **plan);
enum status ifs_plan_enqueue(const struct ifs_plan *plan, const struct fused_call *call,
                             const struct fused_call *stored, uint64_t count, cudaStream_t stream);
struct ifs_device_bank *ifs_plan_bank(const struct ifs_plan *plan); /* NULL: fractals in space have none */
uint64_t ifs_plan_bytes(const struct ifs_plan *plan);
void ifs_plan_close(struct ifs_plan *plan); /* accepts NULL */

#endif
