// snapshot.h: a copy of weights and moments in host memory, taken behind the training, from which a save is written.
//
// Between two updates nothing changes weights or moments. So a thread copies them while the next step's gradients are
// computed, and only the next update waits until the copy is complete (snapshot_wait). The memory is asked for when a
// run starts, and a thread touches it: the first touch of 16 GB takes seconds, as long as a step of a 1.3B model.
//
// One thread (the training's) opens, begins, waits and closes; another one copies and reads.
//
// defines: CheckpointRead, Snapshot, snapshot_open, snapshot_begin, snapshot_copy, snapshot_wait, snapshot_read,
//          snapshot_close
#ifndef GDN_SNAPSHOT_H
#define GDN_SNAPSHOT_H

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "engine.h"
#include "json.h"
#include "worker_thread.h"

// Copies `count` elements of an arena (engine.h: ARENA_PARAM, ARENA_M or ARENA_V) from element `first` on into dst.
// EngineApi.read has this form but for the type of its first argument.
typedef void (*CheckpointRead)(void *ctx, int arena, int64_t first, int64_t count, float *dst);

#ifndef SNAPSHOT_PIECE
#define SNAPSHOT_PIECE (1 << 22)  // elements that are copied at a time; tests make it small
#endif
enum { SNAPSHOT_ARENAS = 3 };
static const Arena snapshot_arenas[SNAPSHOT_ARENAS] = {ARENA_PARAM, ARENA_M, ARENA_V};

typedef struct {
  float *arena[4];       // by Arena; ARENA_GRAD unused
  int64_t first, count;  // the range of the arenas that is copied
  int is_open;
  pthread_mutex_t lock;
  pthread_cond_t complete;
  int64_t left;  // elements that are not copied yet; under lock
  pthread_t toucher;
  int touching;  // the thread was started and not joined
  int quit;      // to it; by __atomic
} Snapshot;

// Bytes of memory that this process can still take without being killed: what the machine and its control group
// (version 2 or 1) have left; huge where neither says. malloc alone says yes to more.
static MAYBE_UNUSED double memory_available(void) {
  double least = 1e18, limit, used;
  long long kib = 0;
  char line[128];
  FILE *f = fopen("/proc/meminfo", "r");
  while (f && fgets(line, sizeof line, f))
    if (sscanf(line, "MemAvailable: %lld kB", &kib) == 1) least = 1024.0 * (double)kib;
  if (f) fclose(f);
  static const char *const groups[2][2] = {
      {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"}};
  for (int g = 0; g < 2; g++) {
    FILE *max = fopen(groups[g][0], "r"), *now = fopen(groups[g][1], "r");
    if (max && now && fscanf(max, "%lf", &limit) == 1 && fscanf(now, "%lf", &used) == 1 && limit - used < least)
      least = limit - used;
    if (max) fclose(max);
    if (now) fclose(now);
  }
  return least;
}

// 1 when there is memory for all of it. Large pages where the system has them: they are faster to touch and to copy.
static MAYBE_UNUSED int snapshot_allocate(Snapshot *s) {
  const size_t page = 4096, bytes = (size_t)s->count * sizeof(float);
  if (!s->arena[snapshot_arenas[SNAPSHOT_ARENAS - 1]] && 12.0 * (double)s->count > memory_available()) return 0;
  for (int i = 0; i < SNAPSHOT_ARENAS; i++) {
    float **a = &s->arena[snapshot_arenas[i]];
    if (*a) continue;
    if (!(*a = (float *)malloc(bytes + sizeof(float)))) return 0;
#ifdef MADV_HUGEPAGE
    size_t before = (page - (uintptr_t)*a % page) % page;  // advice: without it all works, slower
    if (bytes > before + page) (void)madvise((char *)*a + before, (bytes - before) / page * page, MADV_HUGEPAGE);
#endif
  }
  return 1;
}

static MAYBE_UNUSED void snapshot_release(Snapshot *s) {
  for (int a = 0; a < 4; a++) free(s->arena[a]), s->arena[a] = NULL;
}

static MAYBE_UNUSED void *snapshot_touch(void *arg) {
  Snapshot *s = (Snapshot *)arg;
  const int64_t page = 4096 / (int64_t)sizeof(float);
  for (int i = 0; i < SNAPSHOT_ARENAS; i++)
    for (int64_t at = 0; at < s->count && !__atomic_load_n(&s->quit, __ATOMIC_RELAXED); at += page)
      *(volatile float *)&s->arena[snapshot_arenas[i]][at] = 0;
  return NULL;
}

static MAYBE_UNUSED void snapshot_end_touching(Snapshot *s) {
  __atomic_store_n(&s->quit, 1, __ATOMIC_RELAXED);
  if (s->touching) pthread_join(s->toucher, NULL);
  s->touching = 0;
}

// For copies of the elements first .. first+count-1. Where memory is short now, snapshot_begin tries again.
static MAYBE_UNUSED void snapshot_open(Snapshot *s, int64_t first, int64_t count) {
  memset(s, 0, sizeof *s);
  s->first = first, s->count = count, s->is_open = 1;
  pthread_mutex_init(&s->lock, NULL);
  monotonic_cond_init(&s->complete);
  if (!snapshot_allocate(s)) {
    snapshot_release(s);
    return;
  }
  s->touching = !worker_thread_start(&s->toucher, snapshot_touch, s);
}

// From here on a copy is owed: snapshot_wait waits for snapshot_copy. EXIT_MEMORY when there is no room for one: then
// none is owed. The copy before must be complete and written.
static MAYBE_UNUSED int snapshot_begin(Snapshot *s, Error *err) {
  snapshot_end_touching(s);
  if (!snapshot_allocate(s)) {
    snapshot_release(s);
    char need[32];
    format_bytes(need, sizeof need, 12.0 * (double)s->count);
    return error_set(err, EXIT_MEMORY, "no memory for a copy of the model and its moments (%s)", need);
  }
  pthread_mutex_lock(&s->lock);
  s->left = SNAPSHOT_ARENAS * s->count;
  pthread_mutex_unlock(&s->lock);
  return 0;
}

// Takes the copy that is owed.
static MAYBE_UNUSED void snapshot_copy(Snapshot *s, CheckpointRead read, void *ctx) {
  for (int i = 0; i < SNAPSHOT_ARENAS; i++)
    for (int64_t at = 0, n; at < s->count; at += n) {
      n = s->count - at < SNAPSHOT_PIECE ? s->count - at : (int64_t)SNAPSHOT_PIECE;
      read(ctx, snapshot_arenas[i], s->first + at, n, s->arena[snapshot_arenas[i]] + at);
      pthread_mutex_lock(&s->lock);
      s->left -= n;
      if (!s->left) pthread_cond_broadcast(&s->complete);
      pthread_mutex_unlock(&s->lock);
    }
}

// Waits until the copy is complete, at most for so many seconds. The number of elements that are left, 0: complete, or
// none is owed.
static MAYBE_UNUSED int64_t snapshot_wait(Snapshot *s, double seconds) {
  struct timespec until;
  if (!s->is_open) return 0;
  clock_gettime(CLOCK_MONOTONIC, &until);
  int64_t ns = until.tv_nsec + (int64_t)(seconds * 1e9);
  until.tv_sec += (time_t)(ns / 1000000000), until.tv_nsec = (long)(ns % 1000000000);
  pthread_mutex_lock(&s->lock);
  while (s->left && pthread_cond_timedwait(&s->complete, &s->lock, &until) != ETIMEDOUT) continue;
  int64_t left = s->left;
  pthread_mutex_unlock(&s->lock);
  return left;
}

// A CheckpointRead of the copy; ctx is the Snapshot.
static MAYBE_UNUSED void snapshot_read(void *ctx, int arena, int64_t first, int64_t count, float *dst) {
  const Snapshot *s = (const Snapshot *)ctx;
  memcpy(dst, s->arena[arena] + (first - s->first), (size_t)count * sizeof(float));
}

// No copy may be owed.
static MAYBE_UNUSED void snapshot_close(Snapshot *s) {
  if (!s->is_open) return;
  snapshot_end_touching(s);
  snapshot_release(s);
  pthread_cond_destroy(&s->complete);
  pthread_mutex_destroy(&s->lock);
  memset(s, 0, sizeof *s);
}

#endif  // GDN_SNAPSHOT_H
