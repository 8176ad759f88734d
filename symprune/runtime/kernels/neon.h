/* What levels of 64-bit ARMs share: panels are expanded 8 places at a time, by tables of 256
 * shuffles, and multiplied from there, for one token as for several. What includes this says before
 * whether there are DOT_PRODUCTS, and makes its level with NEON_LEVEL behind. */
#ifndef NEON_H
#define NEON_H

#include <arm_neon.h>

#include "generic.h"
#include "shuffles.h"

/* 64 codes as bytes: those of 4 bits are halves of bytes, the low half first. */
INLINE void unpack_codes(const uint8_t *p, int kind, uint8_t *out) {
    if (bits_of(kind) != 4) {
        for (int j = 0; j < GROUP; j++) out[j] = (uint8_t)read_word(p, j, kind);
        return;
    }
    const uint8x16_t field = vdupq_n_u8(0x0f);
    for (int part = 0; part < 2; part++) {
        uint8x16_t both = vld1q_u8(p + 16 * part);
        uint8x16_t low = vandq_u8(both, field), high = vshrq_n_u8(both, 4);
        vst1q_u8(out + 32 * part, vzip1q_u8(low, high));
        vst1q_u8(out + 32 * part + 16, vzip2q_u8(low, high));
    }
}

INLINE const uint8_t *expand_codes(const uint8_t *p, int64_t groups, const Tiles *tiles,
                                   int kind, int masked) {
    uint8_t *words = tiles->words;
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *masks = p;
        p += head_of(kind, masked);
        for (int row = 0; row < PANEL; row++)
            tiles->scales[group * PANEL + row] = from_bfloat16(load16(p - 2 * (PANEL - row)));
        for (int row = 0; row < PANEL; row++, words += GROUP) {
            uint8_t buffer[GROUP + 16];
            const uint8_t *kept = p;
            if (kind != INT8) {
                unpack_codes(p, kind, masked ? buffer : words);
                memset(buffer + GROUP, 0, 16);
                kept = buffer;
            }
            if (!masked) {
                if (kind == INT8) memcpy(words, p, GROUP);
                p += run_bytes(kind, GROUP);
                continue;
            }
            uint64_t mask = load64(masks + 8 * row);
            for (int j = 0; j < 8; j++) {
                int here = (int)(mask >> (8 * j) & 255);
                uint8x8_t places = vqtbx1_u8(vdup_n_u8((uint8_t)zero_of(kind)), vld1q_u8(kept),
                                             vld1_u8(of_bytes[0][here]));
                vst1_u8(words + 8 * j, places);
                kept += __builtin_popcount((unsigned)here);
            }
            p += run_bytes(kind, __builtin_popcountll(mask));
        }
    }
    return p;
}

/* 16-bit words. */
INLINE const uint8_t *expand_words(const uint8_t *p, int64_t groups, const Tiles *tiles,
                                   int kind, int masked) {
    uint8_t *words = tiles->words;
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *masks = p;
        p += head_of(kind, masked);
        for (int row = 0; row < PANEL; row++) {
            uint64_t mask = masked ? load64(masks + 8 * row) : ~0ull;
            for (int j = 0; j < 8; j++, words += 16) {
                int here = (int)(mask >> (8 * j) & 255);
                vst1q_u8(words, vqtbl1q_u8(vld1q_u8(p), vld1q_u8(of_words[here])));
                p += 2 * __builtin_popcount((unsigned)here);
            }
        }
    }
    return p;
}

/* 16 products of levels and inputs, summed to 4 lanes, exactly. */
INLINE int32x4_t add_products(int32x4_t sums, int8x16_t levels, int8x16_t x) {
#if DOT_PRODUCTS
    return vdotq_s32(sums, levels, x);
#else
    int16x8_t products = vmull_s8(vget_low_s8(levels), vget_low_s8(x));
    products = vmlal_s8(products, vget_high_s8(levels), vget_high_s8(x));
    return vpadalq_s16(sums, products);
#endif
}

INLINE void several_codes(const Tiles *tiles, int64_t first, int64_t groups, const Input *x,
                          Sums *sums, int kind) {
    const uint8x16_t zero = vdupq_n_u8((uint8_t)zero_of(kind));
    for (int64_t token = 0; token < x->tokens; token++) {
        float32x4_t own[PANEL];
        for (int row = 0; row < PANEL; row++) own[row] = vld1q_f32(sums[token].of[row]);
        const uint8_t *words = tiles->words;
        for (int64_t group = 0; group < groups; group++) {
            int64_t at = token * x->groups + first + group;
            int8x16_t inputs[4];
            for (int part = 0; part < 4; part++)
                inputs[part] = vld1q_s8(x->codes[at].x + 16 * part);
            for (int row = 0; row < PANEL; row++, words += GROUP) {
                int32x4_t dot = vdupq_n_s32(0);
                for (int part = 0; part < 4; part++) {
                    uint8x16_t levels = vsubq_u8(vld1q_u8(words + 16 * part), zero);
                    dot = add_products(dot, vreinterpretq_s8_u8(levels), inputs[part]);
                }
                float scale = tiles->scales[group * PANEL + row] * x->scales[at];
                own[row] = vfmaq_n_f32(own[row], vcvtq_f32_s32(dot), scale);
            }
        }
        for (int row = 0; row < PANEL; row++) vst1q_f32(sums[token].of[row], own[row]);
    }
}

INLINE float32x4_t load_floats(const void *words, int64_t index, int kind) {
    if (kind == FLOAT32) return vld1q_f32((const float *)words + index);
    uint16x4_t halves = vld1_u16((const uint16_t *)words + index);
    if (kind == FLOAT16) return vcvt_f32_f16(vreinterpret_f16_u16(halves));
    return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
}

INLINE void several_floats(const Tiles *tiles, int64_t first, int64_t groups, const Input *x,
                           Sums *sums, int kind) {
    for (int64_t token = 0; token < x->tokens; token++)
        for (int64_t tile = 0; tile < groups * PANEL; tile++) {
            const float *inputs = x->floats + (token * x->groups + first + tile / PANEL) * GROUP;
            float *own = sums[token].of[tile % PANEL];
            float32x4_t two[2] = {vld1q_f32(own), vld1q_f32(own + 4)};
            for (int j = 0; j < GROUP / 4; j++)
                two[j % 2] = vfmaq_f32(two[j % 2],
                                       load_floats(tiles->words, tile * GROUP + 4 * j, kind),
                                       vld1q_f32(inputs + 4 * j));
            vst1q_f32(own, two[0]);
            vst1q_f32(own + 4, two[1]);
        }
}

static void add_up(const Sums *sums, float *out) {
    for (int row = 0; row < PANEL; row++)
        out[row] = vaddvq_f32(vaddq_f32(vld1q_f32(sums->of[row]), vld1q_f32(sums->of[row] + 4)));
}

static float quantise(const float *x, int zero, CodeInput *out) {
    return generic_quantise(x, zero, out);
}

DEFINE_FLOATS(EXPAND, generic_expand, expand_words)
DEFINE_CODES(EXPAND, expand_codes)
DEFINE_ALL_SEVERAL(several_floats, several_codes)
DEFINE_READ(read_any)
DEFINE_WRITE(write_any)

#define NEON_LEVEL(its_name)        \
    {                               \
        .name = its_name,           \
        .read = read_any,           \
        .quantise = quantise,       \
        .expand = ALL(expand),      \
        .several = ALL_SEVERAL,     \
        .add_up = add_up,           \
        .write = write_any,         \
    }

#endif
