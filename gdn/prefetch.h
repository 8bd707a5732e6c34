// prefetch.h: reads the rows of the next step from shards while the current step computes. One request is in flight at
// a time: request the next step's samples, compute, take them. An error of the background thread surfaces at the take.
//
//   Prefetch p;
//   prefetch_start(&p, &set, T, rows, &err);
//   prefetch_request(&p, indices, rows);
//   for each step: { prefetch_take(&p, tokens, &err); prefetch_request(&p, next_indices, rows); ... compute ... }
//   prefetch_stop(&p);
//
// defines: Prefetch, prefetch_start, prefetch_request, prefetch_wait, prefetch_take, prefetch_stop
#ifndef GDN_PREFETCH_H
#define GDN_PREFETCH_H

#include "shards.h"
#include "worker_thread.h"

typedef enum { PREFETCH_IDLE, PREFETCH_BUSY, PREFETCH_READY, PREFETCH_QUIT } PrefetchState;

typedef struct {
  ShardSet *set;
  int T;
  int64_t rows_max, rows;
  int64_t *indices;  // [rows_max] samples of the request
  int32_t *tokens;   // [rows_max, T+1]
  PrefetchState state;
  Error err;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
} Prefetch;

static MAYBE_UNUSED void *prefetch_main(void *arg) {
  Prefetch *p = (Prefetch *)arg;
  pthread_mutex_lock(&p->lock);
  for (;;) {
    while (p->state != PREFETCH_BUSY && p->state != PREFETCH_QUIT) pthread_cond_wait(&p->changed, &p->lock);
    if (p->state == PREFETCH_QUIT) break;
    pthread_mutex_unlock(&p->lock);  // the request belongs to this thread while the state is BUSY
    Error err;
    memset(&err, 0, sizeof err);
    for (int64_t r = 0; r < p->rows && !err.code; r++)
      shards_read_sample(p->set, p->indices[r], p->T, p->tokens + r * (p->T + 1), &err);
    pthread_mutex_lock(&p->lock);
    p->err = err;
    if (p->state == PREFETCH_BUSY) p->state = PREFETCH_READY;
    pthread_cond_broadcast(&p->changed);
  }
  pthread_mutex_unlock(&p->lock);
  return NULL;
}

// rows_max: most samples of one request. The set must outlive the Prefetch; others may read from it meanwhile.
// Returns 0, or EXIT_CONFIG when no thread can be made.
static inline int prefetch_start(Prefetch *p, ShardSet *set, int T, int64_t rows_max, Error *err) {
  memset(p, 0, sizeof *p);
  p->set = set;
  p->T = T;
  p->rows_max = rows_max;
  p->indices = (int64_t *)alloc_array(rows_max, sizeof(int64_t), "list of samples");
  p->tokens = (int32_t *)alloc_array(rows_max * ((int64_t)T + 1), sizeof(int32_t), "rows read ahead");
  pthread_mutex_init(&p->lock, NULL);
  monotonic_cond_init(&p->changed);
  int rc = worker_thread_start(&p->thread, prefetch_main, p);
  if (!rc) return 0;
  free(p->indices);
  free(p->tokens);
  memset(p, 0, sizeof *p);
  return error_set(err, EXIT_CONFIG, "%s: cannot start the reading thread: %s", set->option, strerror(rc));
}

// Begins to read the samples indices[rows], rows <= rows_max; returns at once. The last request must have been taken.
static inline void prefetch_request(Prefetch *p, const int64_t *indices, int64_t rows) {
  pthread_mutex_lock(&p->lock);
  if (p->state != PREFETCH_IDLE || rows < 0 || rows > p->rows_max)
    fail(EXIT_INTERNAL, "prefetch: request of %lld rows (at most %lld) in state %d", (long long)rows,
         (long long)p->rows_max, (int)p->state);
  memcpy(p->indices, indices, (size_t)rows * sizeof *indices);
  p->rows = rows;
  p->state = PREFETCH_BUSY;
  pthread_cond_broadcast(&p->changed);
  pthread_mutex_unlock(&p->lock);
}

// Waits up to `seconds` for the request; 1 when prefetch_take will not wait. To poll for a stop while data are slow.
static inline int prefetch_wait(Prefetch *p, double seconds) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  int64_t ns = until.tv_nsec + (int64_t)(seconds * 1e9);
  until.tv_sec += (time_t)(ns / 1000000000), until.tv_nsec = (long)(ns % 1000000000);
  pthread_mutex_lock(&p->lock);
  while (p->state == PREFETCH_BUSY && pthread_cond_timedwait(&p->changed, &p->lock, &until) != ETIMEDOUT) continue;
  int ready = p->state != PREFETCH_BUSY;
  pthread_mutex_unlock(&p->lock);
  return ready;
}

// Waits for the request and copies its rows into tokens[rows, T+1]; NULL drops them. Returns 0 or the error of the
// reading (see shards_read).
static inline int prefetch_take(Prefetch *p, int32_t *tokens, Error *err) {
  pthread_mutex_lock(&p->lock);
  if (p->state == PREFETCH_IDLE) fail(EXIT_INTERNAL, "prefetch: taken before it was requested");
  while (p->state == PREFETCH_BUSY) pthread_cond_wait(&p->changed, &p->lock);
  int code = p->err.code;
  if (code)
    *err = p->err;
  else if (tokens)
    memcpy(tokens, p->tokens, (size_t)(p->rows * ((int64_t)p->T + 1)) * sizeof *tokens);
  p->state = PREFETCH_IDLE;
  pthread_mutex_unlock(&p->lock);
  return code;
}

// Ends the thread, after the request in flight.
static inline void prefetch_stop(Prefetch *p) {
  if (!p->set) return;
  pthread_mutex_lock(&p->lock);
  p->state = PREFETCH_QUIT;
  pthread_cond_broadcast(&p->changed);
  pthread_mutex_unlock(&p->lock);
  pthread_join(p->thread, NULL);
  pthread_cond_destroy(&p->changed);
  pthread_mutex_destroy(&p->lock);
  free(p->indices);
  free(p->tokens);
  memset(p, 0, sizeof *p);
}

#endif  // GDN_PREFETCH_H
