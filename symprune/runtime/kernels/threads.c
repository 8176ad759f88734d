/* Work split over threads. Whoever is free takes the next piece, so a thread that comes late, or a
 * core that another program uses, holds nobody up; results do not depend on who did what. */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "packed.h"

#define MOST_THREADS 256

typedef void (*Parallel)(void (*function)(void *), void *data, unsigned threads, unsigned flags);

static Parallel gomp_parallel;

typedef struct {
    void (*work)(void *data, int64_t first, int64_t last);
    void *data;
    int64_t count, step;
    _Atomic int64_t next;
} Job;

static void take_pieces(void *argument) {
    Job *job = argument;
    for (;;) {
        int64_t first = atomic_fetch_add_explicit(&job->next, job->step, memory_order_relaxed);
        if (first >= job->count) return;
        int64_t last = first + job->step;
        job->work(job->data, first, last < job->count ? last : job->count);
    }
}

/* Our own threads: started when first needed, asleep between jobs, one job at a time. A child of
 * fork has none of them and starts its own. */
static struct {
    pthread_mutex_t busy; /* held by the caller for a whole job */
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    Job *job;
    int started, wanted, running;
    uint64_t number; /* of the job */
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static void *wait_for_jobs(void *argument) {
    int mine = (int)(intptr_t)argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.number == seen || mine >= pool.wanted) {
            seen = pool.number;
            pthread_cond_wait(&pool.wake, &pool.lock);
        }
        seen = pool.number;
        Job *job = pool.job;
        pthread_mutex_unlock(&pool.lock);
        take_pieces(job);
        pthread_mutex_lock(&pool.lock);
        if (--pool.running == 0) pthread_cond_signal(&pool.done);
    }
    return NULL;
}

static void forget_threads(void) {
    pool.started = 0;
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
}

static void watch_for_forks(void) { pthread_atfork(NULL, NULL, forget_threads); }

static void share_out_ourselves(Job *job, int threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_for_forks);
    pthread_mutex_lock(&pool.busy);
    pthread_mutex_lock(&pool.lock);
    int helpers = (threads < MOST_THREADS ? threads : MOST_THREADS) - 1;
    while (pool.started < helpers) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, wait_for_jobs, (void *)(intptr_t)pool.started)) break;
        pthread_detach(thread);
        pool.started++;
    }
    pool.job = job;
    pool.wanted = pool.running = helpers < pool.started ? helpers : pool.started;
    pool.number++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    take_pieces(job);
    pthread_mutex_lock(&pool.lock);
    while (pool.running) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.busy);
}

void packed_set_parallel(void *address) { gomp_parallel = (Parallel)address; }

void share_out(void (*work)(void *data, int64_t first, int64_t last), void *data, int64_t count,
               int64_t step, int threads) {
    Job job = {work, data, count, step, 0};
    int64_t pieces = (count + step - 1) / step;
    if (threads > pieces) threads = (int)pieces;
    if (threads <= 1)
        take_pieces(&job);
    else if (gomp_parallel)
        gomp_parallel(take_pieces, &job, (unsigned)threads, 0);
    else
        share_out_ourselves(&job, threads);
}
