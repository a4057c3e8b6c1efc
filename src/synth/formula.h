/* Formulas, as host code sees them. A formula is one file of this folder, which defines a struct formula, and
 * one line of formulas.def. Options, help, class tables, class files and the library's names come from the
 * struct; the rule of drawing is in formulas.def (see atom.h), so that kernels have it at compile time.
 *
 * A class of any formula is a row of doubles: its number, and one value per parameter of the formula. */
#ifndef FDSL_SYNTH_FORMULA_H
#define FDSL_SYNTH_FORMULA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/portable.h"
#include "core/status.h"
#include "synth/atom.h"
#include "synth/ifs.h"
#include "synth/ifs3d.h"
#include "synth/published.h"

#define FORMULA_PARAMETERS_MAX IFS3D_PARAMETERS

/* A class: its number and the values of the formula's parameters, in the order of formula->parameters. */
struct class_row {
    uint32_t id;
    double value[FORMULA_PARAMETERS_MAX]; /* beyond the formula's parameters: values that only published files
                                             have, or 0 (class.h) */
};

/* The distribution from which a parameter is drawn for a new class. */
enum parameter_law {
    LAW_UNIFORM,     /* between its minimum and maximum, both ends included */
    LAW_EXPONENTIAL, /* an integer, rounded down, with the mean that the key `mean` gives; drawn again until
                        it is in the range */
    LAW_DIFFERENT /* uniform; drawn again until it differs from the parameter before it, unless that is 0 or
                     the range has one value */
};

/* A parameter of a class. */
struct formula_parameter {
    const char *name;                                                   /* column of our CSV files */
    enum { PARAMETER_INTEGER, PARAMETER_FLOAT, PARAMETER_DOUBLE } type; /* the values that it can have */
    double least, most; /* limits of every class, drawn or read */

    /* The range from which it is drawn. `low_key` and `high_key` are keys of an INI file. Without a low key,
     * the minimum is `low`. Without a high key, the maximum is the minimum plus `span`. Without both, the
     * parameter is not drawn. */
    enum parameter_law law;
    const char *low_key, *high_key;
    double low, span;
    uint32_t turn; /* its place in the order of the draws, from 0 */
};

/* ---- Published random streams ----
 *
 * Some published scripts draw a whole data set from one stream of random numbers. The formula's file
 * describes how (struct published_stream); the renderers only call draw(). published.h has the data sets and
 * the images. */

struct synth;

/* The engine of a published stream. */
struct published_stream {
    /* Opens the stream of synth->set for the classes synth->rows, which are those of the set. May take long,
     * with progress, if the stream has no random access; may keep a cache file. `threads`: number of threads
     * it may use. `synth` must outlive the stream, which the caller closes, even after an error. */
    enum status (*open)(const struct synth *synth, int threads, struct published **published);
    /* Draws an image. Thread-safe: each thread has its own `scratch` of scratch_bytes() bytes, 64-byte
     * aligned. The bits depend only on the set, the class and the instance. */
    void (*draw)(const struct published *published, const struct published_image *image, void *scratch);
    size_t (*scratch_bytes)(const struct published *published);
    void (*close)(struct published *published); /* accepts NULL */
};

/* ---- Formulas ---- */

/* A named set of classes. Presets without `csv` and `rows` are ranges: sections of configs/classes.cfg. */
struct formula_preset {
    const char *name;
    const char *csv; /* text of a built-in list of classes, or NULL */
    /* Makes the first `count` classes of a published set, or NULL. `rows` has room for them. */
    enum status (*rows)(const struct formula_preset *preset, uint32_t count, struct class_row *rows);
    const struct published_set *set; /* the published set that the preset is, or NULL */
    uint32_t classes;                /* without `set`: the number of its classes; 0: any number */
    const struct ifs_rules *ifs;     /* fractals: how it makes orbits; NULL: as the formula */
};

enum formula_family {
    FAMILY_LINES, /* closed polygons; drawn by the engine of atom.h */
    FAMILY_IFS,   /* iterated function systems; drawn by the engine of ifs.h */
    FAMILY_IFS3D, /* three-dimensional ones; drawn by the engine of ifs3d.h */
    FAMILY_COLOR  /* fractals in colour over clouds; drawn by the engine of color.h */
};

/* The targets of an image, as bits. */
enum formula_targets {
    TARGET_LABEL = 1,    /* the number of the image's class */
    TARGET_MASK = 2,     /* per pixel, the number of the class that it shows; 0: background */
    TARGET_POINTS = 4,   /* a point cloud, if the rules of the preset have one */
    TARGET_MULTI_HOT = 8 /* per class, in the order of the classes: 1 if the image shows it, else 0 */
};

struct formula {
    const char *name;    /* value of --formula: the name in formulas.def */
    const char *summary; /* one sentence without a capital letter and full stop: "NAME <summary>" */
    enum formula_id id;
    enum formula_family family;
    unsigned targets; /* enum formula_targets */

    /* The classes. Formulas with the same `parameters` can share classes and presets. */
    const struct formula_parameter *parameters;
    size_t parameter_count;
    const char
        *mean_key; /* INI key of the mean of LAW_EXPONENTIAL, or of the threshold of a search; or NULL */
    const char
        *published_keys; /* keys of a published class file, in its order, as "key=column,..."; NULL: none */
    uint32_t id_least, id_most;           /* limits of class numbers; drawn classes count from id_least */
    uint32_t classes;                     /* default number of classes; 0: one class, the benchmark class */
    const struct formula_preset *presets; /* NULL if there are none; the last has no name. A formula also has
                                             the preset of its own name */
    /* Checks what the limits of the parameters do not. The message does not contain the class's number. */
    enum status (*check)(const struct formula *formula, const struct class_row *row);

    bool paper;                  /* the variants of the PDP 2026 paper (gbase ... bat) draw it, too */
    uint32_t canvas;             /* default side of the canvas in pixels */
    const struct ifs_rules *ifs; /* fractals: how orbits are made, unless the preset differs; else NULL */

    const struct published_stream *published; /* NULL: --random published is refused ... */
    const char *unpublished;                  /* ... for this reason, "because <reason>" */
};

/* Returns whether the classes are iterated function systems, which a search finds. */
static inline bool formula_is_system(const struct formula *formula)
{
    return formula->family == FAMILY_IFS || formula->family == FAMILY_IFS3D;
}

FDSL_C_BEGIN

/* All formulas, indexed by enum formula_id. */
extern const struct formula *const formulas[FORMULA_COUNT];

/* Their names, ending with NULL. */
extern const char *const formula_names[FORMULA_COUNT + 1];

/* Returns the value of a parameter by its column; 0 if the formula has no such parameter. */
double formula_value(const struct formula *formula, const struct class_row *row, const char *name);

/* Sets the value of a parameter by its column. Returns false, and changes nothing, if there is no such one.
 */
bool formula_set(const struct formula *formula, struct class_row *row, const char *name, double value);

/* Returns the preset of a formula that `presets` lists; NULL if it has no such preset. */
const struct formula_preset *formula_preset(const struct formula *formula, const char *name);

/* Returns the first formula that has a preset of this name, or has this name; NULL if there is none. */
const struct formula *formula_of_preset(const char *name);

/* Returns the number of classes that a preset has; 0 if it has any number, or is NULL. */
uint32_t formula_preset_classes(const struct formula_preset *preset);

FDSL_C_END

#endif
