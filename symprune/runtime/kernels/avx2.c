/* AVX2 with FMA: 8 places at a time, by tables of 256 shuffles, one for every byte of a mask.
 *
 * Codes become signed levels, of which a pruned one is 0; |level| times the input with the level's
 * sign is a dot product of 32 places that cannot overflow. bfloat16 is shuffled straight into the
 * upper halves of float32. */
#include "level.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2,popcnt"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,popcnt")
#endif

#include <immintrin.h>

#include "generic.h"
#include "shuffles.h"

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

INLINE __m128i load128(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
INLINE __m256i load256(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

INLINE __m256 load_scales(const uint8_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
}

/* Not far ahead: tables and inputs fill most of the nearest cache. */
INLINE void prefetch(const uint8_t *p, int kind, int masked) {
    int bytes = PANEL * GROUP * bits_of(kind) / 8;
    bytes = masked ? 64 + bytes / 2 : bytes;
    UNROLL for (int at = 0; at < bytes; at += 64)
        _mm_prefetch((const char *)p + 2048 + at, _MM_HINT_T0);
}

/* Eight registers of 8 partial sums -> 8 sums. */
INLINE void add_up(const __m256 *sums, float *out) {
    __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
    __m256 high =
        _mm256_hadd_ps(_mm256_hadd_ps(sums[4], sums[5]), _mm256_hadd_ps(sums[6], sums[7]));
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                                        _mm256_permute2f128_ps(low, high, 0x31)));
}

/* Codes. */

/* 16 codes of 2 or 3 bits in 16-bit lanes: the two bytes a code lies in, its bits moved to the
 * top, and down again. */
INLINE __m256i unpack16(const uint8_t *p, int bits) {
    int64_t bytes;
    memcpy(&bytes, p, 8);
    int16_t from[16], up[16];
    UNROLL for (int j = 0; j < 16; j++) {
        int first = j * bits / 8;
        from[j] = (int16_t)((first + 1) << 8 | first);
        up[j] = (int16_t)(1 << (16 - bits - j * bits % 8));
    }
    __m256i pairs = _mm256_shuffle_epi8(_mm256_set1_epi64x(bytes), load256(from));
    return _mm256_srli_epi16(_mm256_mullo_epi16(pairs, load256(up)), 16 - bits);
}

/* 32 codes as signed levels. */
INLINE __m256i unpack_levels(const uint8_t *p, int part, int kind) {
    if (kind == INT8)
        return _mm256_xor_si256(load256(p + 32 * part), _mm256_set1_epi8((char)0x80));
    int bits = bits_of(kind);
    __m256i codes;
    if (bits == 4) {
        __m256i both = _mm256_cvtepu8_epi16(load128(p + 16 * part));
        codes = _mm256_and_si256(_mm256_or_si256(both, _mm256_slli_epi16(both, 4)),
                                 _mm256_set1_epi8(0x0f));
    } else {
        __m256i low = unpack16(p + 4 * bits * part, bits);
        __m256i high = unpack16(p + 4 * bits * part + 2 * bits, bits);
        codes = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xd8);
    }
    return _mm256_sub_epi8(codes, _mm256_set1_epi8((char)zero_of(kind)));
}

INLINE __m128i two_quarters(const void *low, const void *high) {
    return _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)low),
                              _mm_loadl_epi64((const __m128i *)high));
}

/* 32 places from kept levels, or from codes of 8 bits; moves them on. */
INLINE __m256i spread32(const uint8_t **kept, uint32_t mask, int kind) {
    uint32_t first = mask & 255, second = mask >> 8 & 255, third = mask >> 16 & 255;
    const uint8_t *half = *kept + _mm_popcnt_u32(mask & 0xffff);
    __m256i values =
        _mm256_inserti128_si256(_mm256_castsi128_si256(load128(*kept)), load128(half), 1);
    *kept += _mm_popcnt_u32(mask);
    if (kind == INT8) values = _mm256_xor_si256(values, _mm256_set1_epi8((char)0x80));
    __m128i low = two_quarters(of_bytes[0][first], of_bytes[_mm_popcnt_u32(first)][second]);
    __m128i high = two_quarters(of_bytes[0][third], of_bytes[_mm_popcnt_u32(third)][mask >> 24]);
    return _mm256_shuffle_epi8(values,
                               _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}

/* Masked codes of few bits are unpacked into a buffer one tile ahead: what has just been stored
 * cannot be loaded in other pieces for a while. */
INLINE int is_buffered(int kind, int masked) { return masked && kind != INT8; }

/* A tile ready to be multiplied. */
typedef struct {
    const uint8_t *masks, *scales;
    const uint8_t *runs[PANEL];
    _Alignas(32) uint8_t buffer[PANEL][GROUP + 32];
} Tile;

/* Returns where the next tile begins. */
INLINE const uint8_t *unpack_tile(const uint8_t *p, int kind, int masked, Tile *tile) {
    tile->masks = p;
    p += head_of(kind, masked);
    tile->scales = p - 2 * PANEL;
    prefetch(p, kind, masked);
    UNROLL for (int row = 0; row < PANEL; row++) {
        tile->runs[row] = p;
        if (is_buffered(kind, masked)) {
            tile->runs[row] = tile->buffer[row];
            UNROLL for (int part = 0; part < 2; part++)
                _mm256_store_si256((__m256i *)(tile->buffer[row] + 32 * part),
                                   unpack_levels(p, part, kind));
        }
        int count = masked ? (int)_mm_popcnt_u64(load64(tile->masks + 8 * row)) : GROUP;
        p += run_bytes(kind, count);
    }
    return p;
}

/* The tile of a group, of which there are so many; `p` is where the next to be read begins. */
INLINE const Tile *next_tile(const uint8_t **p, int64_t group, int64_t groups, int kind, int masked,
                             Tile *tiles) {
    int ahead = is_buffered(kind, masked);
    if (!ahead || !group) *p = unpack_tile(*p, kind, masked, tiles);
    if (ahead && group + 1 < groups) *p = unpack_tile(*p, kind, masked, &tiles[(group + 1) % 2]);
    return &tiles[ahead ? group % 2 : 0];
}

/* A row of a tile as 2 registers of levels. */
INLINE void expand_row(const Tile *tile, int row, int kind, int masked, __m256i *levels) {
    const uint8_t *kept = tile->runs[row];
    if (!masked) {
        UNROLL for (int part = 0; part < 2; part++) levels[part] = unpack_levels(kept, part, kind);
        return;
    }
    uint64_t mask = load64(tile->masks + 8 * row);
    UNROLL for (int part = 0; part < 2; part++)
        levels[part] = spread32(&kept, (uint32_t)(mask >> (32 * part)), kind);
}

/* 64 products summed to 8 lanes, exactly. */
INLINE __m256 dot_codes(const __m256i *levels, const CodeInput *input) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sums[2];
    for (int part = 0; part < 2; part++) {
        __m256i x = _mm256_load_si256((const __m256i *)(input->x + 32 * part));
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(levels[part]),
                                             _mm256_sign_epi8(x, levels[part]));
        sums[part] = _mm256_madd_epi16(pairs, ones);
    }
    return _mm256_cvtepi32_ps(_mm256_add_epi32(sums[0], sums[1]));
}

/* Scales go by way of memory: the shuffles have enough to do. */
typedef struct {
    float each[PANEL];
} Scales;

INLINE void store_scales(Scales *scales, __m256 values) {
    _mm256_storeu_ps(scales->each, values);
    __asm__("" : "+m"(*scales)); /* or the compiler shuffles them about after all */
}

INLINE void one_codes(const uint8_t *p, int64_t groups, const Input *x, float *out, int kind,
                      int masked) {
    Tile tiles[2];
    __m256 sums[PANEL];
    UNROLL for (int row = 0; row < PANEL; row++) sums[row] = _mm256_setzero_ps();
    for (int64_t group = 0; group < groups; group++) {
        const Tile *tile = next_tile(&p, group, groups, kind, masked, tiles);
        Scales scales;
        store_scales(&scales, _mm256_mul_ps(load_scales(tile->scales),
                                            _mm256_set1_ps(x->scales[group])));
        UNROLL for (int row = 0; row < PANEL; row++) {
            __m256i levels[2];
            expand_row(tile, row, kind, masked, levels);
            __m256 scale = _mm256_set1_ps(scales.each[row]);
            sums[row] = _mm256_fmadd_ps(dot_codes(levels, x->codes + group), scale, sums[row]);
        }
    }
    add_up(sums, out);
}

INLINE const uint8_t *expand_codes(const uint8_t *p, int64_t groups, const Tiles *out, int kind,
                                   int masked) {
    const __m256i zero = _mm256_set1_epi8((char)zero_of(kind));
    uint8_t *words = out->words;
    Tile tiles[2];
    for (int64_t group = 0; group < groups; group++) {
        const Tile *tile = next_tile(&p, group, groups, kind, masked, tiles);
        _mm256_storeu_ps(out->scales + group * PANEL, load_scales(tile->scales));
        for (int row = 0; row < PANEL; row++, words += GROUP) {
            __m256i levels[2];
            expand_row(tile, row, kind, masked, levels);
            for (int part = 0; part < 2; part++)
                _mm256_store_si256((__m256i *)(words + 32 * part),
                                   _mm256_add_epi8(levels[part], zero));
        }
    }
    return p;
}

INLINE void several_codes(const Tiles *tiles, int64_t first, int64_t groups, const Input *x,
                          Sums *sums, int kind) {
    const __m256i zero = _mm256_set1_epi8((char)zero_of(kind));
    for (int64_t token = 0; token < x->tokens; token++) {
        const uint8_t *words = tiles->words;
        __m256 own[PANEL];
        UNROLL for (int row = 0; row < PANEL; row++) own[row] = _mm256_load_ps(sums[token].of[row]);
        for (int64_t group = 0; group < groups; group++) {
            int64_t at = token * x->groups + first + group;
            __m256 scales = _mm256_mul_ps(_mm256_loadu_ps(tiles->scales + group * PANEL),
                                          _mm256_set1_ps(x->scales[at]));
            UNROLL for (int row = 0; row < PANEL; row++, words += GROUP) {
                __m256i levels[2];
                for (int part = 0; part < 2; part++)
                    levels[part] = _mm256_sub_epi8(
                        _mm256_load_si256((const __m256i *)(words + 32 * part)), zero);
                __m256 scale = _mm256_permutevar8x32_ps(scales, _mm256_set1_epi32(row));
                own[row] = _mm256_fmadd_ps(dot_codes(levels, x->codes + at), scale, own[row]);
            }
        }
        UNROLL for (int row = 0; row < PANEL; row++) _mm256_store_ps(sums[token].of[row], own[row]);
    }
}

/* Floats: 8 partial sums per row, inputs in natural order. */

INLINE __m256 load_floats(const void *words, int64_t index, int kind) {
    if (kind == FLOAT32) return _mm256_loadu_ps((const float *)words + index);
    __m128i halves = load128((const uint16_t *)words + index);
    if (kind == FLOAT16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* Which shuffle 8 places of a mask need, in bytes of a table of 32 for each. As many bits are set in
 * it as in that part of the mask. */
INLINE uint64_t shuffle_of(uint64_t mask, int eighth) {
    int by = (8 * eighth + 59) % 64;
    return (mask >> by | mask << (64 - by)) & 255 << 5;
}

/* The two sums of even and odd eighths are added when a tile is done. */
INLINE void one_floats(const uint8_t *p, int64_t groups, const Input *x, float *out, int kind,
                       int masked) {
    __m256 sums[PANEL];
    for (int row = 0; row < PANEL; row++) sums[row] = _mm256_setzero_ps();
    for (int64_t group = 0; group < groups; group++) {
        __m256 inputs[8];
        UNROLL for (int j = 0; j < 8; j++)
            inputs[j] = _mm256_load_ps(x->floats + group * GROUP + 8 * j);
        const uint8_t *masks = p;
        p += head_of(kind, masked);
        prefetch(p, kind, masked);
        for (int row = 0; row < PANEL; row++) {
            __m256 two[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
            uint64_t mask = masked ? load64(masks + 8 * row) : 0;
            const uint8_t *run = p;
            p += masked ? 2 * _mm_popcnt_u64(mask) : run_bytes(kind, GROUP);
            UNROLL for (int j = 0; j < 8; j++) {
                __m256 values;
                if (masked) {
                    uint64_t here = shuffle_of(mask, j);
                    __m256i kept = _mm256_broadcastsi128_si256(load128(run));
                    values = _mm256_castsi256_ps(
                        _mm256_shuffle_epi8(kept, load256((const uint8_t *)of_upper_halves + here)));
                    run += 2 * _mm_popcnt_u64(here);
                } else {
                    values = load_floats(run, 8 * j, kind);
                }
                two[j % 2] = _mm256_fmadd_ps(values, inputs[j], two[j % 2]);
            }
            sums[row] = _mm256_add_ps(sums[row], _mm256_add_ps(two[0], two[1]));
        }
    }
    add_up(sums, out);
}

/* 16-bit words. */
INLINE const uint8_t *expand_words(const uint8_t *p, int64_t groups, const Tiles *tiles, int kind,
                                   int masked) {
    uint16_t *words = tiles->words;
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *masks = p;
        p += head_of(kind, masked);
        prefetch(p, kind, masked);
        for (int row = 0; row < PANEL; row++) {
            uint64_t mask = masked ? load64(masks + 8 * row) : ~0ull;
            for (int j = 0; j < 8; j++, words += 8) {
                uint64_t here = mask >> (8 * j) & 255;
                __m128i kept = _mm_shuffle_epi8(load128(p), load128(of_words[here]));
                _mm_store_si128((__m128i *)words, kept);
                p += 2 * _mm_popcnt_u64(here);
            }
        }
    }
    return p;
}

INLINE void several_floats(const Tiles *tiles, int64_t first, int64_t groups, const Input *x,
                           Sums *sums, int kind) {
    for (int64_t token = 0; token < x->tokens; token++)
        for (int64_t group = 0; group < groups; group++) {
            const float *from = x->floats + (token * x->groups + first + group) * GROUP;
            __m256 inputs[8];
            UNROLL for (int j = 0; j < 8; j++) inputs[j] = _mm256_load_ps(from + 8 * j);
            for (int row = 0; row < PANEL; row++) {
                __m256 two[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
                UNROLL for (int j = 0; j < 8; j++) {
                    int64_t index = (group * PANEL + row) * GROUP + 8 * j;
                    two[j % 2] = _mm256_fmadd_ps(load_floats(tiles->words, index, kind), inputs[j],
                                                 two[j % 2]);
                }
                float *own = sums[token].of[row];
                _mm256_store_ps(own, _mm256_add_ps(_mm256_load_ps(own),
                                                   _mm256_add_ps(two[0], two[1])));
            }
        }
}

static void add_up_sums(const Sums *sums, float *out) {
    __m256 own[PANEL];
    UNROLL for (int row = 0; row < PANEL; row++) own[row] = _mm256_load_ps(sums->of[row]);
    add_up(own, out);
}

static float quantise(const float *x, int zero, CodeInput *out) {
    (void)zero; /* levels are signed here, nothing is to be taken off */
    const __m256i size = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    for (int j = 0; j < 8; j++)
        largest = _mm256_max_epi32(largest, _mm256_and_si256(load256(x + 8 * j), size));
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(largest),
                                 _mm256_extracti128_si256(largest, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    float most = as_float((uint32_t)_mm_cvtsi128_si32(half));
    int finite = as_bits(most) < 0x7f800000;
    __m256 factor = _mm256_set1_ps(finite && most > 1e-35f ? 127.0f / most : 0.0f);
    for (int part = 0; part < 2; part++) {
        __m256i codes[4];
        for (int j = 0; j < 4; j++)
            codes[j] = _mm256_cvtps_epi32(
                _mm256_mul_ps(_mm256_loadu_ps(x + 32 * part + 8 * j), factor));
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(codes[0], codes[1]),
                                           _mm256_packs_epi32(codes[2], codes[3]));
        bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0));
        if (!finite) bytes = _mm256_setzero_si256();
        _mm256_store_si256((__m256i *)(out->x + 32 * part), bytes);
    }
    return finite ? most / 127.0f : as_float(0x7fc00000);
}

#define DEFINE_ONE(kind, masked, how)                                                   \
    static void one_##kind##_##masked(const uint8_t *p, int64_t groups, const Input *x, \
                                      float *out) {                                     \
        how(p, groups, x, out, kind, masked);                                           \
    }
DEFINE_BOTH(ONE, BFLOAT16, one_floats)
DEFINE_CODES(ONE, one_codes)
DEFINE_FLOATS(EXPAND, generic_expand, expand_words)
DEFINE_CODES(EXPAND, expand_codes)
DEFINE_ALL_SEVERAL(several_floats, several_codes)
DEFINE_READ(read_any)
DEFINE_WRITE(write_any)

const Level avx2_level = {
    .name = "avx2",
    .read = read_any,
    .quantise = quantise,
    .one = {{NULL, NULL}, BOTH(one, BFLOAT16), {NULL, NULL}, ALL_CODES(one)},
    .expand = ALL(expand),
    .several = ALL_SEVERAL,
    .add_up = add_up_sums,
    .write = write_any,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
