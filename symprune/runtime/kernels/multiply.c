/* The kernels' entry points: inputs made ready once, panels shared out over the threads. */
#include "blob.h"
#include "convert.h"
#include "inputs.h"
#include "threads.h"

#include <stdlib.h>

static const Level *const all_levels[LEVELS] = {
    [PLAIN] = &plain_level,
#if defined(__x86_64__)
    [AVX2] = &avx2_level,
    [AVX512] = &avx512_level,
#elif defined(__aarch64__)
    [NEON] = &neon_level,
#endif
#if COMPILES_DOT_PRODUCTS
    [NEON_DOT] = &neon_dot_level,
#endif
};

static const Level *level = &plain_level;

#define SMALL 65536 /* bytes of weights that are not worth another thread */
#define AT_ONCE 16  /* tiles that stay in the nearest cache while every token uses them */

int packed_interface(void) { return PACKED_INTERFACE; }

#if defined(__x86_64__)
#include <cpuid.h>

int packed_has_level(int number) {
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    unsigned a, b, c, d;
    avx2 = avx2 && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    if (number == AVX2) return avx2;
    if (number == AVX512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
               __builtin_cpu_supports("avx512vnni");
    return number == PLAIN;
}

int packed_has_bfloat16(void) {
    unsigned a, b, c, d;
    return packed_has_level(AVX512) && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
#else
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

static int has_dot_products(void) {
#if defined(__ARM_FEATURE_DOTPROD)
    return 1;
#elif defined(__aarch64__) && defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1;
#else
    return 0;
#endif
}

int packed_has_level(int number) {
    if (number == NEON_DOT && !has_dot_products()) return 0;
    return number >= 0 && number < LEVELS && all_levels[number] != NULL;
}

int packed_has_bfloat16(void) {
#if defined(__aarch64__) && defined(__linux__)
    return getauxval(AT_HWCAP2) >> 14 & 1;
#else
    return 0;
#endif
}
#endif

void packed_set_level(int number) {
    if (packed_has_level(number)) level = all_levels[number];
}

static void *allocate(size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes + 64) ? NULL : memory;
}

typedef struct {
    const Level *level;
    Matrix matrix;
    Input input;
    int64_t tokens, first, count;
    const int64_t *rows;
    const void *bias;
    void *out;
    int dtype;
    _Atomic int failed;
} Task;

/* The 8 sums of a panel for one token. */
static void write_out(const Task *task, int64_t panel, int64_t token, const float *sums) {
    const Matrix *matrix = &task->matrix;
    int64_t first = panel * PANEL, left = matrix->rows - first;
    int count = left < PANEL ? (int)left : PANEL;
    for (int row = 0; row < count; row++) {
        float sum = sums[row];
        if (task->bias) sum += read_float(task->bias, first + row, task->dtype);
        write_float(task->out, token * matrix->rows + first + row, task->dtype, sum);
    }
}

/* Room for `groups` expanded tiles, and behind it for the sums of some tokens. */
static int make_tiles(const Matrix *matrix, int64_t groups, int64_t tokens, Tiles *tiles,
                      Sums **sums) {
    size_t weights = (size_t)groups * PANEL * GROUP;
    size_t words = weights * (size_t)word_size(matrix->kind), scales = weights / GROUP * 4;
    scales = (scales + 63) / 64 * 64;
    char *memory = allocate(words + scales + (size_t)tokens * sizeof(Sums));
    tiles->words = memory;
    tiles->scales = (float *)(memory + words);
    *sums = (Sums *)(memory + words + scales);
    return memory != NULL;
}

static void multiply_panels(void *data, int64_t first, int64_t last) {
    Task *task = data;
    const Matrix *matrix = &task->matrix;
    const Level *with = task->level;
    int kind = matrix->kind, masked = matrix->masked;
    float out[PANEL];
    One *one = with->one[kind][masked];
    if (task->tokens == 1 && one) {
        for (int64_t panel = first; panel < last; panel++) {
            one(panel_of(matrix, panel), matrix->groups, &task->input, out);
            write_out(task, panel, 0, out);
        }
        return;
    }
    Tiles tiles;
    Sums *sums;
    if (!make_tiles(matrix, AT_ONCE, task->tokens, &tiles, &sums)) {
        task->failed = 1;
        return;
    }
    for (int64_t panel = first; panel < last; panel++) {
        const uint8_t *p = panel_of(matrix, panel);
        memset(sums, 0, (size_t)task->tokens * sizeof(Sums));
        for (int64_t group = 0; group < matrix->groups; group += AT_ONCE) {
            int64_t left = matrix->groups - group, count = left < AT_ONCE ? left : AT_ONCE;
            p = with->expand[kind][masked](p, count, &tiles);
            with->several[kind](&tiles, group, count, &task->input, sums);
        }
        for (int64_t token = 0; token < task->tokens; token++) {
            with->add_up(sums + token, out);
            write_out(task, panel, token, out);
        }
    }
    free(tiles.words);
}

/* Panels a thread takes at a time: some pieces per thread, so that late ones are made up for. */
static int64_t step_of(int64_t panels, int *threads, int64_t bytes) {
    if (bytes / SMALL + 1 < *threads) *threads = (int)(bytes / SMALL + 1);
    int64_t step = panels / (*threads * 8);
    return *threads == 1 ? panels : step < 1 ? 1 : step;
}

static int64_t packed_bytes(const Matrix *matrix) {
    return panel_of(matrix, matrix->panels) - panel_of(matrix, 0);
}

int packed_multiply(const uint8_t *blob, int64_t piece, const void *x, int64_t tokens, int dtype,
                    const void *bias, void *out, int threads) {
    Task task = {.level = level, .matrix = open_matrix(blob, piece), .tokens = tokens,
                 .bias = bias, .out = out, .dtype = dtype};
    if (tokens <= 0) return 0;
    const Matrix *matrix = &task.matrix;
    int64_t step = step_of(matrix->panels, &threads, packed_bytes(matrix) * tokens);
    if (ready_inputs(level, matrix, x, tokens, dtype, threads, &task.input)) return -1;
    share_out(multiply_panels, &task, matrix->panels, step, threads);
    return task.failed ? -1 : 0;
}

static void expand_panels(void *data, int64_t first, int64_t last) {
    Task *task = data;
    const Matrix *matrix = &task->matrix;
    Tiles tiles;
    Sums *none;
    if (!make_tiles(matrix, matrix->groups, 0, &tiles, &none)) {
        task->failed = 1;
        return;
    }
    int64_t bytes = matrix->columns * (task->dtype == AS_FLOAT32 ? 4 : 2), expanded = -1;
    int64_t from = task->rows ? first : first * PANEL, to = task->rows ? last : last * PANEL;
    for (int64_t at = from; at < to; at++) {
        int64_t row = task->rows ? task->rows[at] : at;
        int64_t place = task->rows ? at : at - task->first;
        if (place < 0 || place >= task->count) continue;
        if (row / PANEL != expanded) {
            expanded = row / PANEL;
            task->level->expand[matrix->kind][matrix->masked](panel_of(matrix, expanded),
                                                              matrix->groups, &tiles);
        }
        task->level->write(&tiles, matrix->kind, (int)(row % PANEL), matrix->columns,
                           task->dtype, (char *)task->out + place * bytes);
    }
    free(tiles.words);
}

typedef struct {
    Task task;
    int64_t first_panel;
} Rows;

static void expand_from(void *data, int64_t first, int64_t last) {
    Rows *rows = data;
    expand_panels(&rows->task, rows->first_panel + first, rows->first_panel + last);
}

int packed_expand(const uint8_t *blob, int64_t piece, int64_t first, int64_t count, int dtype,
                  void *out, int threads) {
    Rows rows = {{.level = level, .matrix = open_matrix(blob, piece), .first = first,
                  .count = count, .out = out, .dtype = dtype}, first / PANEL};
    if (count <= 0) return 0;
    int64_t panels = (first + count + PANEL - 1) / PANEL - rows.first_panel;
    int64_t step = step_of(panels, &threads, 2 * count * rows.task.matrix.columns);
    share_out(expand_from, &rows, panels, step, threads);
    return rows.task.failed ? -1 : 0;
}

int packed_gather(const uint8_t *blob, const int64_t *numbers, int64_t count, int dtype,
                  void *out, int threads) {
    Task task = {.level = level, .matrix = open_matrix(blob, 0), .count = count, .rows = numbers,
                 .out = out, .dtype = dtype};
    if (count <= 0) return 0;
    int64_t step = step_of(count, &threads, 2 * PANEL * count * task.matrix.columns);
    share_out(expand_panels, &task, count, step, threads);
    return task.failed ? -1 : 0;
}
