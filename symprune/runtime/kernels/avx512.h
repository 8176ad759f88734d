/* What codes and floats share with AVX-512. All that follows this is compiled for it. */
#ifndef AVX512_H
#define AVX512_H

#if defined(__clang__)
#pragma clang attribute push(                                                             \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,"    \
                          "avx512vnni,avx2,fma,f16c,bmi,bmi2,popcnt"))),                  \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni," \
                   "avx2,fma,f16c,bmi,bmi2,popcnt")
#endif

#include <immintrin.h>

#include "generic.h"

/* Arrays of registers stay in registers only if every loop over them is unrolled. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

typedef struct __attribute__((packed, may_alias)) {
    uint64_t bits;
} Mask64;
typedef struct __attribute__((packed, may_alias)) {
    uint32_t bits;
} Mask32;

/* How many bits are set at an address. Left to themselves compilers count what they have loaded
 * into a mask register already, and moving it out of there again takes longer than the rest. */
INLINE uint64_t count64(const uint8_t *p) {
    uint64_t count;
    __asm__("popcntq %1, %0" : "=r"(count) : "m"(*(const Mask64 *)p) : "cc");
    return count;
}

INLINE uint64_t count32(const uint8_t *p) {
    uint32_t count;
    __asm__("popcntl %1, %0" : "=r"(count) : "m"(*(const Mask32 *)p) : "cc");
    return count;
}

/* A load that stays a load: expanding straight from memory is many times slower on Zen CPUs. */
INLINE __m512i load_first(const uint8_t *p) {
    __m512i values = _mm512_loadu_si512(p);
    __asm__("" : "+v"(values));
    return values;
}

/* What is read some tiles later: the stream is longer than the CPU looks ahead by itself. */
INLINE void prefetch(const uint8_t *p, int kind, int masked) {
    int bytes = PANEL * GROUP * bits_of(kind) / 8;
    bytes = masked ? 64 + bytes / 2 : bytes;
    UNROLL for (int at = 0; at < bytes; at += 64)
        _mm_prefetch((const char *)p + 8192 + at, _MM_HINT_T0);
}

/* How many tokens are multiplied at once, as many as there are registers for. */
#define TOKENS 2

/* Eight registers of 16 partial sums -> 8 sums, always added in the same order. */
INLINE void add_up(const __m512 *sums, float *out) {
    __m256 half[PANEL];
    UNROLL for (int row = 0; row < PANEL; row++)
        half[row] = _mm256_add_ps(_mm512_castps512_ps256(sums[row]),
                                  _mm512_extractf32x8_ps(sums[row], 1));
    __m256 pairs[4];
    UNROLL for (int pair = 0; pair < 4; pair++)
        pairs[pair] = _mm256_hadd_ps(half[2 * pair], half[2 * pair + 1]);
    __m256 low = _mm256_hadd_ps(pairs[0], pairs[1]), high = _mm256_hadd_ps(pairs[2], pairs[3]);
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                                        _mm256_permute2f128_ps(low, high, 0x31)));
}

/* Expanding in place: given another register, the instruction waits until that one is ready, even
 * to overwrite it. */
#define EXPAND_IN_PLACE(instruction, values, mask) \
    __asm__(instruction " %0, %0%{%1%}%{z%}" : "+v"(values) : "Yk"(mask))

/* One row of a tile as words in 2 (16 bits) or 4 registers (32 bits); moves `run` behind it. */
INLINE void expand_floats(const uint8_t **run, const uint8_t *mask, int kind, int masked,
                          __m512i *words) {
    const uint8_t *p = *run;
    UNROLL for (int part = 0; part < bits_of(kind) / 8; part++) {
        words[part] = load_first(p);
        if (!masked) {
            p += 64;
        } else if (kind == FLOAT32) {
            uint16_t here = load16(mask + 2 * part);
            EXPAND_IN_PLACE("vpexpandd", words[part], (__mmask16)here);
            p += 4 * (uint64_t)_mm_popcnt_u32(here);
        } else {
            __mmask32 here = ((const Mask32 *)(mask + 4 * part))->bits;
            EXPAND_IN_PLACE("vpexpandw", words[part], here);
            p += 2 * count32(mask + 4 * part);
        }
    }
    *run = masked ? *run + count64(mask) * (uint64_t)(bits_of(kind) / 8) : p;
}

INLINE void load_sums(const Sums *sums, __m512 *own) {
    UNROLL for (int row = 0; row < PANEL; row++) own[row] = _mm512_load_ps(sums->of[row]);
}

INLINE void store_sums(Sums *sums, const __m512 *own) {
    UNROLL for (int row = 0; row < PANEL; row++) _mm512_store_ps(sums->of[row], own[row]);
}

#endif
