/* Plain C: what every machine can do, and what a compiler makes of it. */
#include "generic.h"

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

INLINE void several_codes(const Tiles *tiles, const Input *x, float *out, int kind) {
    for (int64_t token = 0; token < x->tokens; token++)
        for (int row = 0; row < PANEL; row++)
            out[token * PANEL + row] = dot_codes(tiles, x, token, row, zero_of(kind));
}

INLINE void several_floats(const Tiles *tiles, const Input *x, float *out, int kind) {
    for (int64_t token = 0; token < x->tokens; token++)
        for (int row = 0; row < PANEL; row++)
            out[token * PANEL + row] = dot_floats(tiles, x, token, row, kind);
}

DEFINE_FLOATS(EXPAND, generic_expand, generic_expand)
DEFINE_CODES(EXPAND, generic_expand)
DEFINE_ALL_SEVERAL(several_floats, several_codes)
DEFINE_READ(read_any)
DEFINE_WRITE(write_any)

static float quantise(const float *x, int zero, CodeInput *out) {
    return generic_quantise(x, zero, out);
}

const Level plain_level = {
    .name = "plain",
    .read = read_any,
    .quantise = quantise,
    .expand = ALL(expand),
    .several = ALL_SEVERAL,
    .write = write_any,
};
