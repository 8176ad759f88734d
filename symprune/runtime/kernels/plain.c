/* Plain C: what every machine can do, and what a compiler makes of it. */
#include <math.h>

#include "generic.h"

static float quantise(const float *x, int zero, CodeInput *out) {
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

INLINE float dot_codes(const Tiles *tiles, const Input *x, int64_t token, int row, int zero) {
    float sum = 0;
    for (int64_t group = 0; group < x->groups; group++) {
        int64_t tile = group * PANEL + row, at = token * x->groups + group;
        const uint8_t *u = (const uint8_t *)tiles->words + tile * GROUP;
        const int8_t *input = x->codes[at].x;
        int32_t dot = 0;
        for (int j = 0; j < GROUP; j++) dot += (u[j] - zero) * input[j];
        sum += (float)dot * (tiles->scales[tile] * x->scales[at]);
    }
    return sum;
}

/* 16 partial sums, added up in pairs at the end. */
INLINE float dot_floats(const Tiles *tiles, const Input *x, int64_t token, int row, int kind) {
    float sums[16] = {0};
    for (int64_t group = 0; group < x->groups; group++) {
        int64_t from = (group * PANEL + row) * GROUP;
        const float *input = x->floats + (token * x->groups + group) * GROUP;
        const float *wide = (const float *)tiles->words + from;
        const uint16_t *narrow = (const uint16_t *)tiles->words + from;
        for (int j = 0; j < GROUP; j++) {
            float value = kind == FLOAT32    ? wide[j]
                          : kind == BFLOAT16 ? from_bfloat16(narrow[j])
                                             : from_float16(narrow[j]);
            sums[j % 16] += value * input[j];
        }
    }
    for (int half = 8; half; half /= 2)
        for (int j = 0; j < half; j++) sums[j] += sums[j + half];
    return sums[0];
}

#define DEFINE_SEVERAL(kind, dot, argument)                                         \
    static void several_##kind(const Tiles *tiles, const Input *x, float *out) {    \
        for (int64_t token = 0; token < x->tokens; token++)                         \
            for (int row = 0; row < PANEL; row++)                                   \
                out[token * PANEL + row] = dot(tiles, x, token, row, argument);     \
    }

DEFINE_SEVERAL(FLOAT32, dot_floats, FLOAT32)
DEFINE_SEVERAL(BFLOAT16, dot_floats, BFLOAT16)
DEFINE_SEVERAL(FLOAT16, dot_floats, FLOAT16)
DEFINE_SEVERAL(INT8, dot_codes, zero_of(INT8))
DEFINE_SEVERAL(INT4, dot_codes, zero_of(INT4))
DEFINE_SEVERAL(INT3, dot_codes, zero_of(INT3))
DEFINE_SEVERAL(INT2, dot_codes, zero_of(INT2))
DEFINE_ALL(EXPAND, generic_expand, generic_expand)
DEFINE_WRITE(write_any)

const Level plain_level = {
    .name = "plain",
    .quantise = quantise,
    .expand = ALL(expand),
    .several = {several_FLOAT32, several_BFLOAT16, several_FLOAT16, several_INT8, several_INT4,
                several_INT3, several_INT2},
    .write = write_any,
};
