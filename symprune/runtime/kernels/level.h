/* What a level of instructions provides, and what all levels share. */
#ifndef LEVEL_H
#define LEVEL_H

#include <stddef.h>
#include <string.h>

#include "packed.h"

/* clang before 16 knows these instructions only where everything is compiled for them. */
#if defined(__aarch64__) && \
    (defined(__ARM_FEATURE_DOTPROD) || !defined(__clang__) || __clang_major__ >= 16)
#define COMPILES_DOT_PRODUCTS 1
#else
#define COMPILES_DOT_PRODUCTS 0
#endif

#define GROUP PACKED_GROUP
#define PANEL PACKED_PANEL
#define INLINE static inline __attribute__((always_inline))

/* One matrix of a blob. */
typedef struct {
    int kind, masked;
    int64_t rows, columns, groups, panels;
    const uint8_t *data;    /* of the whole blob */
    const uint8_t *offsets; /* int64, perhaps not aligned, from this matrix's first panel on */
} Matrix;

/* 64 inputs as integers, ready for codes: sum over a lane of 4 of (u - zero) * x is
 * start + sum of u * x, so the zero costs nothing per row. */
typedef struct {
    int8_t x[GROUP];
    int32_t start[GROUP / 4];
} CodeInput;

/* The inputs of one or more tokens, in the order a level wants them. */
typedef struct {
    int64_t tokens, groups;
    const float *floats;     /* [token, group, 64], for kinds of floats */
    const CodeInput *codes;  /* [token, group], for kinds of codes */
    const float *scales;     /* [token, group], of the codes */
} Input;

/* A panel expanded: every weight has its place. */
typedef struct {
    void *words;   /* [group, row, 64]: codes u with level u - zero, or the bits of floats */
    float *scales; /* [group, row] */
} Tiles;

/* The partial sums of a token, however many of each row's 16 a level uses. */
typedef struct {
    _Alignas(64) float of[PANEL][16];
} Sums;

typedef void One(const uint8_t *panel, int64_t groups, const Input *x, float *out);
typedef const uint8_t *Expand(const uint8_t *panel, int64_t groups, const Tiles *tiles);
typedef void Several(const Tiles *tiles, int64_t first, int64_t groups, const Input *x, Sums *sums);

typedef struct {
    const char *name;
    /* Up to 64 inputs as float32. */
    void (*read)(const void *from, int64_t first, int count, int dtype, float *out);
    /* 64 floats in natural order -> the order `one` and `several` read. May be null: natural. */
    void (*order)(const float *x, int kind, float *out);
    /* 64 floats -> codes with |code| <= 127, returns their scale; NaN unless all are finite. */
    float (*quantise)(const float *x, int zero, CodeInput *out);
    /* out[row] for one token, straight from the packed panel. */
    One *one[KINDS][2];
    /* Some tiles of a packed panel -> expanded; returns where the next one begins. */
    Expand *expand[KINDS][2];
    /* For all tokens, add the products with `groups` expanded tiles to sums[token]; the first of
     * them is for the inputs' group `first`. */
    Several *several[KINDS];
    /* out[row] from the partial sums of a token. */
    void (*add_up)(const Sums *sums, float *out);
    /* Row `row` of an expanded panel in a dtype. */
    void (*write)(const Tiles *tiles, int kind, int row, int64_t columns, int dtype, void *out);
} Level;

extern const Level plain_level;
extern const Level avx2_level;
extern const Level avx512_level;
extern const Level neon_level;
extern const Level neon_dot_level;

INLINE int bits_of(int kind) {
    return kind == FLOAT32 ? 32 : kind <= FLOAT16 ? 16 : kind == INT8 ? 8 : 8 - kind;
}

INLINE int is_codes(int kind) { return kind >= INT8; }

/* The code of level 0. */
INLINE int zero_of(int kind) { return 1 << (bits_of(kind) - 1); }

INLINE int word_size(int kind) { return bits_of(kind) < 8 ? 1 : bits_of(kind) / 8; }

INLINE int head_of(int kind, int masked) {
    return (masked ? 8 * PANEL : 0) + (is_codes(kind) ? 2 * PANEL : 0);
}

INLINE int64_t run_bytes(int kind, int count) { return ((int64_t)count * bits_of(kind) + 7) >> 3; }

INLINE uint64_t load64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return value;
}

INLINE uint16_t load16(const uint8_t *p) {
    uint16_t value;
    memcpy(&value, p, 2);
    return value;
}

#endif
