/* The blob itself. */
#ifndef BLOB_H
#define BLOB_H

#include "level.h"

/* What `packed_check` answers. */
enum { NOT_A_BLOB = 1, PANELS_MISPLACED, PANEL_CUT_OFF, WEIGHTS_OUTSIDE, SCALE_NOT_FINITE };

Matrix open_matrix(const uint8_t *blob, int64_t piece);
const uint8_t *panel_of(const Matrix *matrix, int64_t panel);

#endif
