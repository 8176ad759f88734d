/* Inputs as a level wants them. */
#ifndef INPUTS_H
#define INPUTS_H

#include "level.h"

/* Makes `tokens` inputs ready for a matrix: codes are rounded, floats are put in order. What it
 * gives is valid until the thread asks again. 0, or -1 without memory. */
int ready_inputs(const Level *level, const Matrix *matrix, const void *x, int64_t tokens, int dtype,
                 int threads, Input *input);

#endif
