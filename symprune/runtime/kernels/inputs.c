/* Inputs made ready, once for all matrices that share them.
 *
 * The queries, keys and values of a block, or its gate and its way up, are multiplied with the same
 * inputs one after the other. Each thread keeps what it made ready last, together with the bytes it
 * was made from: only for the very same bytes is it used again. */
#include "inputs.h"

#include <pthread.h>
#include <stdlib.h>

#include "threads.h"

typedef struct {
    char *memory; /* what is ready, its scales, the bytes */
    size_t room;
    const Level *level; /* null: nothing is kept */
    int kind, dtype;
    int64_t tokens, columns;
} Kept;

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void let_go(void *data) {
    free(((Kept *)data)->memory);
    free(data);
}

static void make_key(void) { pthread_key_create(&key, let_go); }

static Kept *kept_by_this_thread(void) {
    static _Thread_local Kept *mine; /* the key's own look-up takes longer, but it tidies up */
    if (mine) return mine;
    pthread_once(&once, make_key);
    mine = calloc(1, sizeof(Kept));
    if (mine) pthread_setspecific(key, mine);
    return mine;
}

static int make_room(Kept *kept, size_t size) {
    kept->level = NULL;
    if (size <= kept->room) return 0;
    free(kept->memory);
    void *memory = NULL;
    kept->room = posix_memalign(&memory, 64, size) ? 0 : size;
    kept->memory = kept->room ? memory : NULL;
    return kept->room ? 0 : -1;
}

typedef struct {
    const Level *level;
    const Matrix *matrix;
    const void *from;
    int dtype;
    Input input;
} Task;

/* Tokens `first` to `last`. */
static void prepare(void *data, int64_t first, int64_t last) {
    Task *task = data;
    const Matrix *matrix = task->matrix;
    const Level *with = task->level;
    for (int64_t token = first; token < last; token++)
        for (int64_t group = 0; group < matrix->groups; group++) {
            _Alignas(64) float x[GROUP];
            int64_t from = group * GROUP, at = token * matrix->groups + group;
            int64_t left = matrix->columns - from;
            int count = left < GROUP ? (int)left : GROUP;
            int64_t source = token * matrix->columns + from;
            with->read(task->from, source, count, task->dtype, x);
            memset(x + count, 0, 4 * (size_t)(GROUP - count));
            if (is_codes(matrix->kind))
                ((float *)task->input.scales)[at] = with->quantise(
                    x, zero_of(matrix->kind), (CodeInput *)task->input.codes + at);
            else if (with->order)
                with->order(x, matrix->kind, (float *)task->input.floats + at * GROUP);
            else
                memcpy((float *)task->input.floats + at * GROUP, x, sizeof x);
        }
}

int ready_inputs(const Level *level, const Matrix *matrix, const void *x, int64_t tokens, int dtype,
                 int threads, Input *input) {
    Kept *kept = kept_by_this_thread();
    if (!kept) return -1;
    size_t inputs = (size_t)(tokens * matrix->groups);
    size_t words = inputs * (is_codes(matrix->kind) ? sizeof(CodeInput) : 4 * GROUP);
    size_t bytes = (size_t)(tokens * matrix->columns) * (dtype == AS_FLOAT32 ? 4 : 2);
    size_t copy = words + 4 * inputs;
    int same = kept->level == level && kept->kind == matrix->kind && kept->dtype == dtype &&
               kept->tokens == tokens && kept->columns == matrix->columns &&
               !memcmp(kept->memory + copy, x, bytes);
    if (!same && make_room(kept, copy + bytes)) return -1;
    char *memory = kept->memory;
    *input = (Input){tokens, matrix->groups, (float *)memory, (CodeInput *)memory,
                     (float *)(memory + words)};
    if (same) return 0;
    /* From the copy: what another thread may do to the inputs meanwhile must not part the two. */
    memcpy(memory + copy, x, bytes);
    Task task = {level, matrix, memory + copy, dtype, *input};
    share_out(prepare, &task, tokens, 1, tokens < 8 ? 1 : threads);
    kept->level = level, kept->kind = matrix->kind, kept->dtype = dtype;
    kept->tokens = tokens, kept->columns = matrix->columns;
    return 0;
}
