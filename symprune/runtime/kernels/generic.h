/* Expanding panels in plain C, value by value, for levels that have nothing better. */
#ifndef GENERIC_H
#define GENERIC_H

#include "convert.h"

/* Value number `index` of a run as a word; codes of few bits as u = 2 code + 1. */
INLINE uint32_t read_word(const uint8_t *run, int index, int kind) {
    int bits = bits_of(kind);
    if (kind == FLOAT32) {
        uint32_t word;
        memcpy(&word, run + 4 * index, 4);
        return word;
    }
    if (bits == 16) return load16(run + 2 * index);
    if (kind == INT8) return run[index];
    uint32_t two = load16(run + ((index * bits) >> 3));
    return ((two >> ((index * bits) & 7)) & ((1u << bits) - 1)) * 2 + 1;
}

INLINE void write_word(void *words, int64_t index, int kind, uint32_t word) {
    if (word_size(kind) == 1)
        ((uint8_t *)words)[index] = (uint8_t)word;
    else if (word_size(kind) == 2)
        ((uint16_t *)words)[index] = (uint16_t)word;
    else
        ((uint32_t *)words)[index] = word;
}

INLINE void generic_expand(const uint8_t *p, int64_t groups, const Tiles *tiles, int kind,
                           int masked) {
    int64_t at = 0;
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *masks = p;
        p += head_of(kind, masked);
        if (is_codes(kind))
            for (int row = 0; row < PANEL; row++)
                tiles->scales[group * PANEL + row] =
                    from_bfloat16(load16(p - 2 * (PANEL - row)));
        for (int row = 0; row < PANEL; row++, at += GROUP) {
            if (!masked) {
                for (int j = 0; j < GROUP; j++)
                    write_word(tiles->words, at + j, kind, read_word(p, j, kind));
                p += run_bytes(kind, GROUP);
                continue;
            }
            uint32_t pruned = is_codes(kind) ? (uint32_t)zero_of(kind) : 0;
            for (int j = 0; j < GROUP; j++) write_word(tiles->words, at + j, kind, pruned);
            int count = 0;
            for (uint64_t mask = load64(masks + 8 * row); mask; mask &= mask - 1)
                write_word(tiles->words, at + __builtin_ctzll(mask), kind,
                           read_word(p, count++, kind));
            p += run_bytes(kind, count);
        }
    }
}

#define DEFINE_EXPAND(kind, masked, how)                                                        \
    static void expand_##kind##_##masked(const uint8_t *p, int64_t groups, const Tiles *tiles) { \
        how(p, groups, tiles, kind, masked);                                                    \
    }
/* DEFINE_<what> for every kind, with and without masks. */
#define DEFINE_ALL(what, floats, codes)  \
    DEFINE_##what(FLOAT32, 0, floats)    \
    DEFINE_##what(FLOAT32, 1, floats)    \
    DEFINE_##what(BFLOAT16, 0, floats)   \
    DEFINE_##what(BFLOAT16, 1, floats)   \
    DEFINE_##what(FLOAT16, 0, floats)    \
    DEFINE_##what(FLOAT16, 1, floats)    \
    DEFINE_##what(INT8, 0, codes)        \
    DEFINE_##what(INT8, 1, codes)        \
    DEFINE_##what(INT4, 0, codes)        \
    DEFINE_##what(INT4, 1, codes)        \
    DEFINE_##what(INT3, 0, codes)        \
    DEFINE_##what(INT3, 1, codes)        \
    DEFINE_##what(INT2, 0, codes)        \
    DEFINE_##what(INT2, 1, codes)

#define BOTH(what, kind) {what##_##kind##_0, what##_##kind##_1}
#define ALL(what)                                                                      \
    {BOTH(what, FLOAT32), BOTH(what, BFLOAT16), BOTH(what, FLOAT16), BOTH(what, INT8), \
     BOTH(what, INT4), BOTH(what, INT3), BOTH(what, INT2)}

#endif
