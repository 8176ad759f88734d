/* Runs the kernels without Python, for sanitizers and for other CPUs under emulation.
 *
 * Reads cases: i64 size, piece, tokens, dtype, bytes of input, the blob, the input. Writes for each
 * case and level: i64 level, what check says; if that is 0 the products with one thread, those with
 * three, and the whole matrix in float32. Everything is in memory of exactly its size. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blob.h"
#include "packed.h"

static int64_t read_number(FILE *file) {
    int64_t value;
    if (fread(&value, 8, 1, file) != 1) exit(3);
    return value;
}

static void *read_bytes(FILE *file, size_t size) {
    void *memory = malloc(size ? size : 1);
    if (!memory || fread(memory, 1, size, file) != size) exit(3);
    return memory;
}

static void write_number(FILE *file, int64_t value) { fwrite(&value, 8, 1, file); }

int main(int count, char **names) {
    if (count != 3) return 2;
    FILE *in = fopen(names[1], "rb"), *out = fopen(names[2], "wb");
    if (!in || !out) return 2;
    for (int64_t cases = read_number(in); cases > 0; cases--) {
        int64_t size = read_number(in), piece = read_number(in), tokens = read_number(in);
        int dtype = (int)read_number(in);
        int64_t input_size = read_number(in);
        uint8_t *blob = read_bytes(in, (size_t)size);
        void *given = read_bytes(in, (size_t)input_size);
        for (int level = 0; level < LEVELS; level++) {
            if (!packed_has_level(level)) continue;
            packed_set_level(level);
            int wrong = packed_check(blob, size);
            write_number(out, level);
            write_number(out, wrong);
            if (wrong) continue;
            Matrix matrix = open_matrix(blob, piece);
            size_t each = dtype == AS_FLOAT32 ? 4 : 2;
            size_t inputs = (size_t)(tokens * matrix.columns) * each;
            size_t outputs = (size_t)(tokens * matrix.rows) * each;
            size_t dense = (size_t)(matrix.rows * matrix.columns) * 4;
            char *x = calloc(inputs, 1), *products = malloc(outputs), *rows = malloc(dense);
            memcpy(x, given, inputs < (size_t)input_size ? inputs : (size_t)input_size);
            for (int threads = 1; threads < 4; threads += 2) {
                if (packed_multiply(blob, piece, x, tokens, dtype, NULL, products, threads))
                    return 4;
                fwrite(products, 1, outputs, out);
            }
            if (packed_expand(blob, piece, 0, matrix.rows, AS_FLOAT32, rows, 2)) return 4;
            fwrite(rows, 1, dense, out);
            int64_t last = matrix.rows - 1;
            if (packed_gather(blob, &last, 1, AS_FLOAT32, rows, 1)) return 4;
            free(x);
            free(products);
            free(rows);
        }
        free(blob);
        free(given);
    }
    fclose(in);
    return fclose(out) ? 3 : 0;
}
