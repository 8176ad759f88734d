/* Packing a matrix: the panels of 8 rows, one after the other or several at once. */
#include "level.h"
#include "threads.h"

typedef struct {
    int kind, masked;
    int64_t rows, columns, groups;
    const uint8_t *words;
    const uint16_t *scales;
    const uint8_t *keep;
    int64_t *offsets;
    uint8_t *data;
} Source;

/* Which of 64 columns are kept; none outside. */
static uint64_t find_mask(const Source *source, int64_t row, int64_t group) {
    int64_t first = group * GROUP, left = source->columns - first;
    int count = left < GROUP ? (int)left : GROUP;
    int64_t at = row * source->columns + first;
    uint64_t mask = 0;
    if (row >= source->rows) return 0;
    if (source->keep)
        for (int j = 0; j < count; j++) mask |= (uint64_t)(source->keep[at + j] != 0) << j;
    else if (is_codes(source->kind) || !source->masked)
        mask = count == GROUP ? ~0ull : (1ull << count) - 1;
    else if (source->kind == FLOAT32)
        for (int j = 0; j < count; j++)
            mask |= (uint64_t)(((const uint32_t *)source->words)[at + j] != 0) << j;
    else
        for (int j = 0; j < count; j++)
            mask |= (uint64_t)(((const uint16_t *)source->words)[at + j] != 0) << j;
    return mask;
}

/* The values of a run: those of the mask, or all 64, where those outside are 0. */
static uint8_t *write_run(const Source *source, int64_t row, int64_t group, uint64_t mask,
                          uint8_t *to) {
    int kind = source->kind, bits = bits_of(kind), size = word_size(kind);
    const uint8_t *from = source->words + (row * source->columns + group * GROUP) * size;
    int64_t bytes = run_bytes(kind, source->masked ? __builtin_popcountll(mask) : GROUP);
    memset(to, 0, (size_t)bytes);
    if (bits >= 8) {
        uint8_t *place = to;
        for (uint64_t left = mask; left; left &= left - 1) {
            int j = __builtin_ctzll(left);
            memcpy(source->masked ? place : to + j * size, from + j * size, (size_t)size);
            place += size;
        }
    } else {
        int count = 0;
        for (uint64_t left = mask; left; left &= left - 1) {
            int j = __builtin_ctzll(left);
            int bit = (source->masked ? count++ : j) * bits;
            unsigned code = (unsigned)from[j] << (bit & 7);
            to[bit >> 3] |= (uint8_t)code;
            if ((bit & 7) + bits > 8) to[(bit >> 3) + 1] |= (uint8_t)(code >> 8);
        }
    }
    return to + bytes;
}

static void find_sizes(void *data, int64_t first, int64_t last) {
    Source *source = data;
    int head = head_of(source->kind, source->masked);
    for (int64_t panel = first; panel < last; panel++) {
        int64_t bytes = source->groups * head;
        if (source->masked)
            for (int64_t row = panel * PANEL; row < (panel + 1) * PANEL; row++)
                for (int64_t group = 0; group < source->groups; group++)
                    bytes += run_bytes(source->kind,
                                       __builtin_popcountll(find_mask(source, row, group)));
        else
            bytes += source->groups * PANEL * run_bytes(source->kind, GROUP);
        source->offsets[panel + 1] = bytes;
    }
}

static void write_panels(void *data, int64_t first, int64_t last) {
    Source *source = data;
    int head = head_of(source->kind, source->masked);
    for (int64_t panel = first; panel < last; panel++) {
        uint8_t *to = source->data + source->offsets[panel];
        for (int64_t group = 0; group < source->groups; group++) {
            uint8_t *run = to + head;
            for (int row = 0; row < PANEL; row++) {
                int64_t number = panel * PANEL + row;
                uint64_t mask = find_mask(source, number, group);
                uint16_t scale = 0;
                if (source->masked) memcpy(to + 8 * row, &mask, 8);
                if (is_codes(source->kind)) {
                    if (number < source->rows)
                        scale = source->scales[number * source->groups + group];
                    memcpy(to + head - 2 * (PANEL - row), &scale, 2);
                }
                run = write_run(source, number, group, mask, run);
            }
            to = run;
        }
    }
}

int packed_encode(int kind, int masked, int64_t rows, int64_t columns, const void *words,
                  const uint16_t *scales, const uint8_t *keep, int64_t *offsets, uint8_t *data,
                  int threads) {
    Source source = {kind, masked, rows, columns, (columns + GROUP - 1) / GROUP,
                     words, scales, keep, offsets, data};
    int64_t panels = (rows + PANEL - 1) / PANEL;
    share_out(data ? write_panels : find_sizes, &source, panels, 16, threads);
    if (!data) {
        offsets[0] = 0;
        for (int64_t panel = 0; panel < panels; panel++) offsets[panel + 1] += offsets[panel];
    }
    return 0;
}
