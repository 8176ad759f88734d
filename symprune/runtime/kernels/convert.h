/* Between float32, bfloat16 and float16, without branches so that compilers can vectorise it. */
#ifndef CONVERT_H
#define CONVERT_H

#include "level.h"

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float from_bfloat16(uint16_t value) { return as_float((uint32_t)value << 16); }

/* To the nearest, ties to even; NaN stays NaN. */
INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

/* The same for what is known to be no NaN. */
INLINE uint16_t number_to_bfloat16(float value) {
    uint32_t bits = as_bits(value);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float from_float16(uint16_t value) {
    uint32_t sign = (uint32_t)(value & 0x8000) << 16;
    uint32_t rest = value & 0x7fff;
    float normal = as_float((rest << 13) + 0x38000000);
    float small = (float)(int32_t)rest * 0x1p-24f;
    float special = as_float((rest << 13) | 0x7f800000);
    float size = rest >= 0x7c00 ? special : rest < 0x400 ? small : normal;
    return as_float(as_bits(size) | sign);
}

INLINE uint16_t to_float16(float value) {
    uint32_t bits = as_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000;
    uint32_t size = bits & 0x7fffffff;
    /* Adding 0.5 leaves a small number's float16 bits, rounded, at the bottom. */
    uint32_t small = as_bits(as_float(size) + 0.5f) - as_bits(0.5f);
    uint32_t normal = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
    uint32_t finite = size < 0x38800000 ? small : normal;
    uint32_t rest = size >= 0x47800000 ? 0x7c00 : finite;
    uint32_t nan = 0x7e00;
    return (uint16_t)(sign | (size > 0x7f800000 ? nan : rest));
}

INLINE float read_float(const void *from, int64_t index, int dtype) {
    if (dtype == AS_FLOAT32) return ((const float *)from)[index];
    uint16_t value = ((const uint16_t *)from)[index];
    return dtype == AS_BFLOAT16 ? from_bfloat16(value) : from_float16(value);
}

INLINE void write_float(void *to, int64_t index, int dtype, float value) {
    if (dtype == AS_FLOAT32)
        ((float *)to)[index] = value;
    else
        ((uint16_t *)to)[index] = dtype == AS_BFLOAT16 ? to_bfloat16(value) : to_float16(value);
}

/* `count` columns of a row of an expanded panel, from a group on, to a dtype. */
INLINE void write_group(const Tiles *tiles, int kind, int row, int64_t group, int count, int dtype,
                        void *out) {
    int64_t first = group * GROUP;
    int64_t tile = group * PANEL + row;
    if (is_codes(kind)) {
        const uint8_t *codes = (const uint8_t *)tiles->words + tile * GROUP;
        float scale = tiles->scales[tile];
        int zero = zero_of(kind);
        if (dtype == AS_BFLOAT16)
            for (int j = 0; j < count; j++)
                ((uint16_t *)out)[first + j] =
                    number_to_bfloat16((float)(codes[j] - zero) * scale);
        else
            for (int j = 0; j < count; j++)
                write_float(out, first + j, dtype, (float)(codes[j] - zero) * scale);
    } else if (kind == FLOAT32) {
        const float *values = (const float *)tiles->words + tile * GROUP;
        if (dtype == AS_FLOAT32)
            memcpy((float *)out + first, values, 4 * (size_t)count);
        else
            for (int j = 0; j < count; j++) write_float(out, first + j, dtype, values[j]);
    } else {
        const uint16_t *values = (const uint16_t *)tiles->words + tile * GROUP;
        if (dtype == kind) /* the numbers of the two lists agree */
            memcpy((uint16_t *)out + first, values, 2 * (size_t)count);
        else
            for (int j = 0; j < count; j++)
                write_float(out, first + j, dtype,
                            kind == BFLOAT16 ? from_bfloat16(values[j])
                                             : from_float16(values[j]));
    }
}

/* A whole row, in natural order. */
INLINE void write_row(const Tiles *tiles, int kind, int row, int64_t columns, int dtype,
                      void *out) {
    int64_t whole = columns / GROUP;
    for (int64_t group = 0; group < whole; group++)
        write_group(tiles, kind, row, group, GROUP, dtype, out);
    if (columns % GROUP)
        write_group(tiles, kind, row, whole, (int)(columns % GROUP), dtype, out);
}

#define DEFINE_READ(name)                                                                     \
    static void name(const void *from, int64_t first, int count, int dtype, float *out) {     \
        if (dtype == AS_FLOAT32)                                                              \
            memcpy(out, (const float *)from + first, 4 * (size_t)count);                      \
        else if (dtype == AS_BFLOAT16)                                                        \
            for (int j = 0; j < count; j++)                                                   \
                out[j] = from_bfloat16(((const uint16_t *)from)[first + j]);                  \
        else                                                                                  \
            for (int j = 0; j < count; j++)                                                   \
                out[j] = from_float16(((const uint16_t *)from)[first + j]);                   \
    }

/* `write_row` with every choice a constant, for the compiler to specialise. */
#define WRITE_DTYPE(kind, dtype)                                     \
    case kind * DTYPES + dtype:                                      \
        write_row(tiles, kind, row, columns, dtype, out);            \
        break;
#define WRITE_KIND(kind)                                             \
    WRITE_DTYPE(kind, AS_FLOAT32) WRITE_DTYPE(kind, AS_BFLOAT16) WRITE_DTYPE(kind, AS_FLOAT16)
#define DEFINE_WRITE(name)                                                                   \
    static void name(const Tiles *tiles, int kind, int row, int64_t columns, int dtype,      \
                     void *out) {                                                            \
        switch (kind * DTYPES + dtype) {                                                     \
            WRITE_KIND(FLOAT32)                                                              \
            WRITE_KIND(BFLOAT16)                                                             \
            WRITE_KIND(FLOAT16)                                                              \
            WRITE_KIND(INT8)                                                                 \
            WRITE_KIND(INT4)                                                                 \
            WRITE_KIND(INT3)                                                                 \
            WRITE_KIND(INT2)                                                                 \
            WRITE_KIND(INT4Z)                                                                \
            WRITE_KIND(INT3Z)                                                                \
            WRITE_KIND(INT2Z)                                                                \
        }                                                                                    \
    }

#endif
