/* Classes of the formulas uji and visualatom as suites write them, and as the program stores them. */
#ifndef FDSL_TESTS_CLASS_ROWS_H
#define FDSL_TESTS_CLASS_ROWS_H

#include "synth/lines.h"

static inline struct class_row row_of(const struct atom_class *class_)
{
    const struct formula *formula = formulas[FORMULA_UJI];
    struct class_row row = {.id = class_->id};
    formula_set(formula, &row, "vertices", class_->vertices);
    formula_set(formula, &row, "orbits", class_->orbits);
    formula_set(formula, &row, "oval_x", (double)class_->oval_x);
    formula_set(formula, &row, "oval_y", (double)class_->oval_y);
    formula_set(formula, &row, "freq1", class_->freq1);
    formula_set(formula, &row, "freq2", class_->freq2);
    formula_set(formula, &row, "noise", (double)class_->noise);
    formula_set(formula, &row, "radius", class_->radius);
    formula_set(formula, &row, "line_width", (double)class_->line_width);
    return row;
}

static inline struct atom_class class_of_row(const struct class_row *row)
{
    struct atom_class class_;
    lines_class(formulas[FORMULA_UJI], row, &class_);
    return class_;
}

#endif
