/* AVX-512 with VBMI, VBMI2 and VNNI: values are expanded to their places in a register.
 *
 * Codes: 64 columns are one register of codes u with level u - zero; pruned places get u = zero.
 * One vpdpbusd multiplies them with 64 quantised inputs, exactly. Floats are widened to float32
 * and multiplied with the inputs as they are. */
#include "level.h"

#if defined(__x86_64__)

#include "avx512.h"

/* A load in two halves: faster where the next address is only just being found. */
INLINE __m512i load_halves(const uint8_t *p) {
    __m256i low = _mm256_loadu_si256((const __m256i *)p);
    __m256i high = _mm256_loadu_si256((const __m256i *)(p + 32));
    __m512i values = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    __asm__("" : "+v"(values));
    return values;
}

/* 64 codes from packed bits: each 8 of them are in one lane of 8 bytes, a multishift takes them
 * apart. */
INLINE __m512i unpack(const uint8_t *p, int kind, int masked) {
    if (kind == INT8) return masked ? load_halves(p) : load_first(p);
    int bits = bits_of(kind);
    __m512i lanes;
    if (bits == 4) {
        lanes = _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)p));
    } else if (bits == 3) {
        const __m512i bytes = _mm512_set_epi64(
            0x1717171717171615, 0x1414141414141312, 0x111111111111100f, 0x0e0e0e0e0e0e0d0c,
            0x0b0b0b0b0b0b0a09, 0x0808080808080706, 0x0505050505050403, 0x0202020202020100);
        lanes = _mm512_permutexvar_epi8(
            bytes, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p)));
    } else {
        lanes = _mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i *)p));
    }
    long long step = 0x0706050403020100LL * bits;
    __m512i codes = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(step), lanes);
    return _mm512_and_si512(codes, _mm512_set1_epi8((char)((1 << bits) - 1)));
}

INLINE __m256 load_scales(const uint8_t *p) {
    __m128i halves = _mm_loadu_si128((const __m128i *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* The codes of one row of a tile; moves `run` behind it. */
INLINE __m512i expand_codes(const uint8_t **run, const uint8_t *mask, int kind, int masked) {
    __m512i codes = unpack(*run, kind, masked);
    if (!masked) {
        *run += run_bytes(kind, GROUP);
        return codes;
    }
    *run += (count64(mask) * (uint64_t)bits_of(kind) + 7) / 8;
    return _mm512_mask_expand_epi8(_mm512_set1_epi8((char)zero_of(kind)), load64(mask), codes);
}

typedef struct {
    float each[PANEL];
} Scales;

INLINE void store_scales(Scales *scales, __m256 values) {
    _mm256_storeu_ps(scales->each, values);
    __asm__("" : "+m"(*scales)); /* or the compiler shuffles them about after all */
}

/* Scale number `row` in every place. */
INLINE __m512 spread_scale(__m256 values, int row) {
    return _mm512_permutexvar_ps(_mm512_set1_epi32(row), _mm512_castps256_ps512(values));
}

INLINE void one_codes(const uint8_t *p, int64_t groups, const Input *x, float *out, int kind,
                      int masked) {
    __m512 sums[PANEL];
    UNROLL for (int row = 0; row < PANEL; row++) sums[row] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++) {
        __m512i inputs = _mm512_load_si512(x->codes[group].x);
        __m512i start = _mm512_load_si512(x->codes[group].start);
        const uint8_t *masks = p;
        p += head_of(kind, masked);
        prefetch(p, kind, masked);
        __m256 both =
            _mm256_mul_ps(load_scales(p - 2 * PANEL), _mm256_set1_ps(x->scales[group]));
        /* By way of memory where the shuffles have enough to do. */
        int by_memory = kind != INT8;
        Scales scales;
        if (by_memory) store_scales(&scales, both);
        UNROLL for (int row = 0; row < PANEL; row++) {
            __m512i u = expand_codes(&p, masks + 8 * row, kind, masked);
            __m512 dots = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, u, inputs));
            __m512 scale = by_memory ? _mm512_set1_ps(scales.each[row]) : spread_scale(both, row);
            sums[row] = _mm512_fmadd_ps(dots, scale, sums[row]);
        }
    }
    add_up(sums, out);
}

INLINE const uint8_t *expand_codes_tiles(const uint8_t *p, int64_t groups, const Tiles *tiles,
                                         int kind, int masked) {
    uint8_t *words = tiles->words;
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *masks = p;
        p += head_of(kind, masked);
        prefetch(p, kind, masked);
        _mm256_storeu_ps(tiles->scales + group * PANEL, load_scales(p - 2 * PANEL));
        UNROLL for (int row = 0; row < PANEL; row++, words += GROUP)
            _mm512_store_si512(words, expand_codes(&p, masks + 8 * row, kind, masked));
    }
    return p;
}

/* `count` tokens (a constant) from one on, whose inputs begin `at`. */
INLINE void some_codes(const Tiles *tiles, int64_t groups, const Input *x, int64_t at, Sums *sums,
                       int count) {
    __m512 own[TOKENS][PANEL];
    UNROLL for (int token = 0; token < count; token++) load_sums(sums + token, own[token]);
    const uint8_t *words = tiles->words;
    for (int64_t group = 0; group < groups; group++, at++) {
        __m512i inputs[TOKENS], start[TOKENS];
        __m256 scales[TOKENS];
        __m256 of_rows = _mm256_loadu_ps(tiles->scales + group * PANEL);
        UNROLL for (int token = 0; token < count; token++) {
            int64_t here = at + token * x->groups;
            inputs[token] = _mm512_load_si512(x->codes[here].x);
            start[token] = _mm512_load_si512(x->codes[here].start);
            scales[token] = _mm256_mul_ps(of_rows, _mm256_set1_ps(x->scales[here]));
        }
        UNROLL for (int row = 0; row < PANEL; row++, words += GROUP) {
            __m512i u = _mm512_load_si512(words);
            UNROLL for (int token = 0; token < count; token++) {
                __m512 dots =
                    _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start[token], u, inputs[token]));
                own[token][row] =
                    _mm512_fmadd_ps(dots, spread_scale(scales[token], row), own[token][row]);
            }
        }
    }
    UNROLL for (int token = 0; token < count; token++) store_sums(sums + token, own[token]);
}

/* Floats. 16-bit kinds: inputs of each 32 columns are the 16 even ones, then the 16 odd ones, for
 * bfloat16; float16 and float32 have them in natural order. */

/* Four registers of float32, in the order of the inputs. */
INLINE void widen(const __m512i *words, int kind, __m512 *values) {
    if (kind == FLOAT32) {
        UNROLL for (int part = 0; part < 4; part++) values[part] = _mm512_castsi512_ps(words[part]);
    } else if (kind == BFLOAT16) {
        const __m512i high = _mm512_set1_epi32((int)0xffff0000);
        UNROLL for (int part = 0; part < 2; part++) {
            values[2 * part] = _mm512_castsi512_ps(_mm512_slli_epi32(words[part], 16));
            values[2 * part + 1] = _mm512_castsi512_ps(_mm512_and_si512(words[part], high));
        }
    } else {
        UNROLL for (int part = 0; part < 2; part++) {
            values[2 * part] = _mm512_cvtph_ps(_mm512_castsi512_si256(words[part]));
            values[2 * part + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words[part], 1));
        }
    }
}

INLINE void one_floats(const uint8_t *p, int64_t groups, const Input *x, float *out, int kind,
                       int masked) {
    __m512 sums[PANEL];
    UNROLL for (int row = 0; row < PANEL; row++) sums[row] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *masks = p;
        p += head_of(kind, masked);
        prefetch(p, kind, masked);
        __m512 inputs[4], values[4];
        UNROLL for (int part = 0; part < 4; part++)
            inputs[part] = _mm512_load_ps(x->floats + group * GROUP + 16 * part);
        UNROLL for (int row = 0; row < PANEL; row++) {
            __m512i words[4];
            expand_floats(&p, masks + 8 * row, kind, masked, words);
            widen(words, kind, values);
            UNROLL for (int part = 0; part < 4; part++)
                sums[row] = _mm512_fmadd_ps(values[part], inputs[part], sums[row]);
        }
    }
    add_up(sums, out);
}

INLINE const uint8_t *expand_floats_tiles(const uint8_t *p, int64_t groups, const Tiles *tiles,
                                          int kind, int masked) {
    uint8_t *to = tiles->words;
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *masks = p;
        p += head_of(kind, masked);
        prefetch(p, kind, masked);
        UNROLL for (int row = 0; row < PANEL; row++) {
            __m512i words[4];
            expand_floats(&p, masks + 8 * row, kind, masked, words);
            UNROLL for (int part = 0; part < bits_of(kind) / 8; part++, to += 64)
                _mm512_store_si512(to, words[part]);
        }
    }
    return p;
}

INLINE void some_floats(const Tiles *tiles, int64_t groups, const Input *x, int64_t at, Sums *sums,
                        int count, int kind) {
    __m512 own[TOKENS][PANEL];
    UNROLL for (int token = 0; token < count; token++) load_sums(sums + token, own[token]);
    const uint8_t *from = tiles->words;
    for (int64_t group = 0; group < groups; group++, at++)
        UNROLL for (int row = 0; row < PANEL; row++) {
            __m512i words[4];
            __m512 values[4];
            UNROLL for (int part = 0; part < bits_of(kind) / 8; part++, from += 64)
                words[part] = _mm512_load_si512(from);
            widen(words, kind, values);
            UNROLL for (int token = 0; token < count; token++) {
                const float *inputs = x->floats + (at + token * x->groups) * GROUP;
                UNROLL for (int part = 0; part < 4; part++)
                    own[token][row] = _mm512_fmadd_ps(
                        values[part], _mm512_load_ps(inputs + 16 * part), own[token][row]);
            }
        }
    UNROLL for (int token = 0; token < count; token++) store_sums(sums + token, own[token]);
}

static void order(const float *x, int kind, float *out) {
    const __m512i even =
        _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    for (int part = 0; part < 4; part += 2) {
        __m512 low = _mm512_loadu_ps(x + 16 * part), high = _mm512_loadu_ps(x + 16 * part + 16);
        __m512 first = kind == BFLOAT16 ? _mm512_permutex2var_ps(low, even, high) : low;
        __m512 second = kind == BFLOAT16 ? _mm512_permutex2var_ps(low, odd, high) : high;
        _mm512_store_ps(out + 16 * part, first);
        _mm512_store_ps(out + 16 * part + 16, second);
    }
}

static float quantise(const float *x, int zero, CodeInput *out) {
    const __m512i size = _mm512_set1_epi32(0x7fffffff);
    __m512 values[4];
    __m512i largest = _mm512_setzero_si512();
    UNROLL for (int part = 0; part < 4; part++) {
        values[part] = _mm512_loadu_ps(x + 16 * part);
        __m512i bits = _mm512_and_si512(_mm512_castps_si512(values[part]), size);
        largest = _mm512_max_epi32(largest, bits);
    }
    float most = as_float((uint32_t)_mm512_reduce_max_epi32(largest));
    int finite = as_bits(most) < 0x7f800000;
    __m512 factor = _mm512_set1_ps(finite && most > 1e-35f ? 127.0f / most : 0.0f);
    UNROLL for (int part = 0; part < 4; part++) {
        __m512i codes = _mm512_cvtps_epi32(_mm512_mul_ps(values[part], factor));
        codes = finite ? codes : _mm512_setzero_si512();
        _mm_store_si128((__m128i *)(out->x + 16 * part), _mm512_cvtepi32_epi8(codes));
    }
    __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1),
                                       _mm512_load_si512(out->x));
    _mm512_store_si512(out->start, _mm512_mullo_epi32(sums, _mm512_set1_epi32(-zero)));
    return finite ? most / 127.0f : as_float(0x7fc00000);
}

DEFINE_READ(read_any)
DEFINE_WRITE(write_any)

INLINE void several_codes(const Tiles *tiles, int64_t first, int64_t groups, const Input *x,
                          Sums *sums, int kind) {
    int64_t token = 0;
    for (; token + TOKENS <= x->tokens; token += TOKENS)
        some_codes(tiles, groups, x, token * x->groups + first, sums + token, TOKENS);
    for (; token < x->tokens; token++)
        some_codes(tiles, groups, x, token * x->groups + first, sums + token, 1);
    (void)kind; /* all are bytes by now */
}

INLINE void several_floats(const Tiles *tiles, int64_t first, int64_t groups, const Input *x,
                           Sums *sums, int kind) {
    int64_t token = 0;
    for (; token + TOKENS <= x->tokens; token += TOKENS)
        some_floats(tiles, groups, x, token * x->groups + first, sums + token, TOKENS, kind);
    for (; token < x->tokens; token++)
        some_floats(tiles, groups, x, token * x->groups + first, sums + token, 1, kind);
}

static void add_up_sums(const Sums *sums, float *out) {
    __m512 own[PANEL];
    load_sums(sums, own);
    add_up(own, out);
}

#define DEFINE_ONE(kind, masked, how)                                                   \
    static void one_##kind##_##masked(const uint8_t *p, int64_t groups, const Input *x, \
                                      float *out) {                                     \
        how(p, groups, x, out, kind, masked);                                           \
    }

DEFINE_FLOATS(ONE, one_floats, one_floats)
DEFINE_CODES(ONE, one_codes)
DEFINE_FLOATS(EXPAND, expand_floats_tiles, expand_floats_tiles)
DEFINE_CODES(EXPAND, expand_codes_tiles)
DEFINE_ALL_SEVERAL(several_floats, several_codes)

const Level avx512_level = {
    .name = "avx512",
    .read = read_any,
    .order = order,
    .quantise = quantise,
    .one = ALL(one),
    .expand = ALL(expand),
    .several = ALL_SEVERAL,
    .add_up = add_up_sums,
    .write = write_any,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
