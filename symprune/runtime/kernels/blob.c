/* The blob itself: finding a matrix in it, and walking over one that is not trusted yet. */
#include "blob.h"

INLINE int64_t load_offset(const uint8_t *offsets, int64_t panel) {
    return (int64_t)load64(offsets + 8 * panel);
}

static uint32_t load32(const uint8_t *p) {
    uint32_t value;
    memcpy(&value, p, 4);
    return value;
}

static int64_t pieces_of(const uint8_t *blob) {
    uint32_t pieces = load32(blob + 28);
    return pieces ? pieces : 1;
}

Matrix open_matrix(const uint8_t *blob, int64_t piece) {
    Matrix matrix;
    matrix.kind = (int)load32(blob + 12);
    matrix.masked = (int)(load32(blob + 16) & 1);
    matrix.rows = load32(blob + 20);
    matrix.columns = load32(blob + 24);
    matrix.groups = (matrix.columns + GROUP - 1) / GROUP;
    matrix.panels = (matrix.rows + PANEL - 1) / PANEL;
    matrix.offsets = blob + PACKED_HEADER + 8 * piece * matrix.panels;
    matrix.data = blob + PACKED_HEADER + 8 * (pieces_of(blob) * matrix.panels + 1);
    return matrix;
}

const uint8_t *panel_of(const Matrix *matrix, int64_t panel) {
    return matrix->data + load_offset(matrix->offsets, panel);
}

/* Whether a row of 64 words has anything but zeros from place `first` on. */
static int filled(const uint8_t *run, int kind, int first) {
    for (int bit = first * bits_of(kind); bit < GROUP * bits_of(kind); bit++)
        if (run[bit >> 3] >> (bit & 7) & 1) return 1;
    return 0;
}

/* One panel from `p` to exactly `end`. */
static int check_panel(const uint8_t *p, const uint8_t *end, const Matrix *matrix, int rows) {
    int kind = matrix->kind, masked = matrix->masked, head = head_of(kind, masked);
    for (int64_t group = 0; group < matrix->groups; group++) {
        int64_t left = matrix->columns - group * GROUP;
        int columns = left < GROUP ? (int)left : GROUP;
        uint64_t inside = columns == GROUP ? ~0ull : (1ull << columns) - 1;
        if (end - p < head) return PANEL_CUT_OFF;
        const uint8_t *run = p + head;
        for (int row = 0; row < PANEL; row++) {
            uint64_t mask = masked ? load64(p + 8 * row) : ~0ull;
            if (masked && mask & ~(row < rows ? inside : 0)) return WEIGHTS_OUTSIDE;
            int64_t bytes = run_bytes(kind, masked ? __builtin_popcountll(mask) : GROUP);
            if (end - run < bytes) return PANEL_CUT_OFF;
            if (!masked && (row >= rows || columns < GROUP) &&
                filled(run, kind, row < rows ? columns : 0))
                return WEIGHTS_OUTSIDE;
            if (is_codes(kind) && (load16(p + head - 2 * (PANEL - row)) & 0x7f80) == 0x7f80)
                return SCALE_NOT_FINITE;
            run += bytes;
        }
        p = run;
    }
    return p == end ? 0 : PANEL_CUT_OFF;
}

int packed_check(const uint8_t *blob, int64_t size) {
    if (size < PACKED_HEADER + PACKED_PADDING) return NOT_A_BLOB;
    if (memcmp(blob, "SYMPACK\1", 8) || load32(blob + 8) != PACKED_VERSION) return NOT_A_BLOB;
    if (load32(blob + 12) >= KINDS || load32(blob + 16) > 3) return NOT_A_BLOB;
    if (!load32(blob + 20) || !load32(blob + 24)) return NOT_A_BLOB;
    if (load64(blob + 32) != (uint64_t)size) return NOT_A_BLOB;
    for (int byte = 40; byte < PACKED_HEADER; byte++)
        if (blob[byte]) return NOT_A_BLOB;
    Matrix matrix = open_matrix(blob, 0);
    /* Fewer than 2^61 panels, so nothing below overflows. */
    int64_t all = pieces_of(blob) * matrix.panels;
    int64_t room = size - PACKED_HEADER - PACKED_PADDING - 8;
    if (all > room / 8) return NOT_A_BLOB;
    int64_t data = room - 8 * all;
    if (load_offset(matrix.offsets, 0) != 0 || load_offset(matrix.offsets, all) != data)
        return PANELS_MISPLACED;
    for (int64_t panel = 0; panel < all; panel++) {
        int64_t begin = load_offset(matrix.offsets, panel);
        int64_t end = load_offset(matrix.offsets, panel + 1);
        if (begin < 0 || end < begin || end > data) return PANELS_MISPLACED;
        int64_t rows = matrix.rows - panel % matrix.panels * PANEL;
        int wrong = check_panel(matrix.data + begin, matrix.data + end, &matrix,
                                rows < PANEL ? (int)rows : PANEL);
        if (wrong) return wrong;
    }
    return 0;
}
