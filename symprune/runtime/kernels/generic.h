/* Quantising and expanding in plain C, value by value, for levels that have nothing better. */
#ifndef GENERIC_H
#define GENERIC_H

#include <math.h>

#include "convert.h"

/* Value number `index` of a run as a word; of a code the byte u with level u - zero. */
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
    uint32_t code = (two >> ((index * bits) & 7)) & ((1u << bits) - 1);
    return code + (skips_zero(kind) && code >= (uint32_t)zero_of(kind));
}

INLINE void write_word(void *words, int64_t index, int kind, uint32_t word) {
    if (word_size(kind) == 1)
        ((uint8_t *)words)[index] = (uint8_t)word;
    else if (word_size(kind) == 2)
        ((uint16_t *)words)[index] = (uint16_t)word;
    else
        ((uint32_t *)words)[index] = word;
}

INLINE const uint8_t *generic_expand(const uint8_t *p, int64_t groups, const Tiles *tiles,
                                     int kind, int masked) {
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
    return p;
}

INLINE float generic_quantise(const float *x, int zero, CodeInput *out) {
    uint32_t largest = 0;
    for (int j = 0; j < GROUP; j++) {
        uint32_t bits = as_bits(x[j]) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    int finite = largest < 0x7f800000;
    float most = as_float(largest);
    float factor = finite && most > 1e-35f ? 127.0f / most : 0.0f;
    for (int j = 0; j < GROUP; j++) out->x[j] = finite ? (int8_t)lrintf(x[j] * factor) : 0;
    for (int lane = 0; lane < GROUP / 4; lane++) {
        int sum = 0;
        for (int j = 0; j < 4; j++) sum += out->x[4 * lane + j];
        out->start[lane] = -zero * sum;
    }
    return finite ? most / 127.0f : as_float(0x7fc00000);
}

#define DEFINE_EXPAND(kind, masked, how)                                             \
    static const uint8_t *expand_##kind##_##masked(const uint8_t *p, int64_t groups, \
                                                   const Tiles *tiles) {             \
        return how(p, groups, tiles, kind, masked);                                  \
    }
#define DEFINE_SEVERAL(kind, how)                                                        \
    static void several_##kind(const Tiles *tiles, int64_t first, int64_t groups,        \
                               const Input *x, Sums *sums) {                             \
        how(tiles, first, groups, x, sums, kind);                                        \
    }

/* DEFINE_<what> for every kind, with and without masks. */
#define DEFINE_BOTH(what, kind, how) DEFINE_##what(kind, 0, how) DEFINE_##what(kind, 1, how)
#define DEFINE_FLOATS(what, wide, narrow)                                       \
    DEFINE_BOTH(what, FLOAT32, wide)                                            \
    DEFINE_BOTH(what, BFLOAT16, narrow)                                         \
    DEFINE_BOTH(what, FLOAT16, narrow)
#define DEFINE_CODES(what, how)                                                 \
    DEFINE_BOTH(what, INT8, how)                                                \
    DEFINE_BOTH(what, INT4, how)                                                \
    DEFINE_BOTH(what, INT3, how)                                                \
    DEFINE_BOTH(what, INT2, how)                                                \
    DEFINE_BOTH(what, INT4Z, how)                                               \
    DEFINE_BOTH(what, INT3Z, how)                                               \
    DEFINE_BOTH(what, INT2Z, how)
#define DEFINE_ALL_SEVERAL(floats, codes)                                       \
    DEFINE_SEVERAL(FLOAT32, floats)                                             \
    DEFINE_SEVERAL(BFLOAT16, floats)                                            \
    DEFINE_SEVERAL(FLOAT16, floats)                                             \
    DEFINE_SEVERAL(INT8, codes)                                                 \
    DEFINE_SEVERAL(INT4, codes)                                                 \
    DEFINE_SEVERAL(INT3, codes)                                                 \
    DEFINE_SEVERAL(INT2, codes)                                                 \
    DEFINE_SEVERAL(INT4Z, codes)                                                \
    DEFINE_SEVERAL(INT3Z, codes)                                                \
    DEFINE_SEVERAL(INT2Z, codes)

#define BOTH(what, kind) {what##_##kind##_0, what##_##kind##_1}
#define ALL_CODES(what)                                                              \
    BOTH(what, INT8), BOTH(what, INT4), BOTH(what, INT3), BOTH(what, INT2),          \
        BOTH(what, INT4Z), BOTH(what, INT3Z), BOTH(what, INT2Z)
#define ALL(what) \
    {BOTH(what, FLOAT32), BOTH(what, BFLOAT16), BOTH(what, FLOAT16), ALL_CODES(what)}

#define ALL_SEVERAL                                                                  \
    {several_FLOAT32, several_BFLOAT16, several_FLOAT16, several_INT8,  several_INT4, \
     several_INT3,    several_INT2,     several_INT4Z,   several_INT3Z, several_INT2Z}

#endif
