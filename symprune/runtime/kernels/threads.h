/* Work split over threads: those of torch's OpenMP if its address is known, else our own. */
#ifndef THREADS_H
#define THREADS_H

#include <stdint.h>

/* Call `work(data, first, last)` until all of 0..count has been given out, in pieces of `step`. */
void share_out(void (*work)(void *data, int64_t first, int64_t last), void *data, int64_t count,
               int64_t step, int threads);

#endif
