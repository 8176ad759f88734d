/* Plain C: what every machine can do, and what a compiler makes of it. */
#include "generic.h"

INLINE void several_codes(const Tiles *tiles, int64_t first, int64_t groups, const Input *x,
                          Sums *sums, int kind) {
    for (int64_t token = 0; token < x->tokens; token++)
        for (int64_t tile = 0; tile < groups * PANEL; tile++) {
            int64_t at = token * x->groups + first + tile / PANEL;
            const uint8_t *u = (const uint8_t *)tiles->words + tile * GROUP;
            const int8_t *input = x->codes[at].x;
            int32_t dot = 0;
            for (int j = 0; j < GROUP; j++) dot += (u[j] - zero_of(kind)) * input[j];
            sums[token].of[tile % PANEL][0] += (float)dot * (tiles->scales[tile] * x->scales[at]);
        }
}

INLINE void several_floats(const Tiles *tiles, int64_t first, int64_t groups, const Input *x,
                           Sums *sums, int kind) {
    for (int64_t token = 0; token < x->tokens; token++)
        for (int64_t tile = 0; tile < groups * PANEL; tile++) {
            const float *input =
                x->floats + (token * x->groups + first + tile / PANEL) * GROUP;
            const float *wide = (const float *)tiles->words + tile * GROUP;
            const uint16_t *narrow = (const uint16_t *)tiles->words + tile * GROUP;
            float *sum = sums[token].of[tile % PANEL];
            for (int j = 0; j < GROUP; j++) {
                float value = kind == FLOAT32    ? wide[j]
                              : kind == BFLOAT16 ? from_bfloat16(narrow[j])
                                                 : from_float16(narrow[j]);
                sum[j % 16] += value * input[j];
            }
        }
}

static void add_up(const Sums *sums, float *out) {
    for (int row = 0; row < PANEL; row++) {
        float each[16];
        memcpy(each, sums->of[row], sizeof each);
        for (int half = 8; half; half /= 2)
            for (int j = 0; j < half; j++) each[j] += each[j + half];
        out[row] = each[0];
    }
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
    .add_up = add_up,
    .write = write_any,
};
