/* The plain C interface of the packed matrices' kernels: what Python calls through ctypes.
 *
 * The format is written down in ../blob.py. A blob must have passed `packed_check` once before it
 * is given to anything else here. Nothing in here knows Python or PyTorch. */
#ifndef PACKED_H
#define PACKED_H

#include <stdint.h>

#define PACKED_GROUP 64
#define PACKED_PANEL 8
#define PACKED_HEADER 64
#define PACKED_PADDING 64
#define PACKED_VERSION 2 /* of the format */
#define PACKED_INTERFACE 3

enum packed_kind { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, INT3, INT2, KINDS };
enum packed_dtype { AS_FLOAT32, AS_BFLOAT16, AS_FLOAT16, DTYPES };
enum packed_level { PLAIN, AVX2, AVX512, NEON, NEON_DOT, LEVELS };

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface. */
int packed_interface(void);

/* Whether this CPU, and this build, has a level; whether it has fast bfloat16 instructions. */
int packed_has_level(int level);
int packed_has_bfloat16(void);
/* The level everything uses from now on. */
void packed_set_level(int level);

/* The `GOMP_parallel` of the OpenMP that torch uses; without one, threads of our own. */
void packed_set_parallel(void *gomp_parallel);

/* 0 if every tile lies where it should, else the number of what is wrong. */
int packed_check(const uint8_t *blob, int64_t size);

/* out[token, row] = sum of x[token, column] * weight[row, column] + bias[row].
 * x, bias (may be null) and out have the same dtype and are dense. 0, or -1 without memory. */
int packed_multiply(const uint8_t *blob, int64_t piece, const void *x, int64_t tokens, int dtype,
                    const void *bias, void *out, int threads);

/* Rows `first` to `first + count` of a matrix, dense. */
int packed_expand(const uint8_t *blob, int64_t piece, int64_t first, int64_t count, int dtype,
                  void *out, int threads);

/* Rows by their numbers, all of them inside. */
int packed_gather(const uint8_t *blob, const int64_t *rows, int64_t count, int dtype, void *out,
                  int threads);

/* The panels of one matrix [rows, columns]: words of the kind's size, scales [rows, groups] for
 * codes, keep [rows, columns] or null: then all codes are kept, and all floats but +0.
 * With a null `data`, offsets[0..panels] are found; else the panels are written to them. */
int packed_encode(int kind, int masked, int64_t rows, int64_t columns, const void *words,
                  const uint16_t *scales, const uint8_t *keep, int64_t *offsets, uint8_t *data,
                  int threads);

#ifdef __cplusplus
}
#endif
#endif
