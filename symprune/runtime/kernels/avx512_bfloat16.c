/* AVX-512 with instructions for bfloat16, when the matrix and the inputs are: pairs are multiplied
 * and summed in float32 without being widened first. */
#include "level.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512bf16"))), apply_to = function)
#else
#pragma GCC target("avx512bf16")
#endif

#include "avx512.h"

INLINE __m512 add_pairs(__m512 sums, __m512i words, __m512i inputs) {
    return _mm512_dpbf16_ps(sums, (__m512bh)words, (__m512bh)inputs);
}

INLINE void one(const uint8_t *p, int64_t groups, const Input *x, float *out, int masked) {
    __m512 sums[PANEL];
    UNROLL for (int row = 0; row < PANEL; row++) sums[row] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++) {
        __m512i low = _mm512_load_si512(x->halves + group * GROUP);
        __m512i high = _mm512_load_si512(x->halves + group * GROUP + 32);
        const uint8_t *masks = p;
        p += head_of(BFLOAT16, masked);
        prefetch(p, BFLOAT16, masked);
        UNROLL for (int row = 0; row < PANEL; row++) {
            __m512i words[2];
            expand_floats(&p, masks + 8 * row, BFLOAT16, masked, words);
            sums[row] = add_pairs(add_pairs(sums[row], words[0], low), words[1], high);
        }
    }
    add_up(sums, out);
}

INLINE void several(const Tiles *tiles, const Input *x, int64_t first, int count, float *out) {
    __m512 sums[TOKENS][PANEL];
    UNROLL for (int token = 0; token < count; token++)
        UNROLL for (int row = 0; row < PANEL; row++) sums[token][row] = _mm512_setzero_ps();
    const uint16_t *words = tiles->words;
    for (int64_t group = 0; group < x->groups; group++) {
        __m512i low[TOKENS], high[TOKENS];
        UNROLL for (int token = 0; token < count; token++) {
            const uint16_t *inputs = x->halves + ((first + token) * x->groups + group) * GROUP;
            low[token] = _mm512_load_si512(inputs);
            high[token] = _mm512_load_si512(inputs + 32);
        }
        UNROLL for (int row = 0; row < PANEL; row++, words += GROUP) {
            __m512i one = _mm512_load_si512(words), two = _mm512_load_si512(words + 32);
            UNROLL for (int token = 0; token < count; token++)
                sums[token][row] =
                    add_pairs(add_pairs(sums[token][row], one, low[token]), two, high[token]);
        }
    }
    UNROLL for (int token = 0; token < count; token++)
        add_up(sums[token], out + (first + token) * PANEL);
}

void one_bfloat16_0(const uint8_t *p, int64_t groups, const Input *x, float *out) {
    one(p, groups, x, out, 0);
}

void one_bfloat16_1(const uint8_t *p, int64_t groups, const Input *x, float *out) {
    one(p, groups, x, out, 1);
}

void several_bfloat16(const Tiles *tiles, const Input *x, float *out) {
    int64_t first = 0;
    for (; first + TOKENS <= x->tokens; first += TOKENS) several(tiles, x, first, TOKENS, out);
    for (; first < x->tokens; first++) several(tiles, x, first, 1, out);
}

#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute pop
#endif
#endif
