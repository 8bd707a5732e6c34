// data_source.h: one interface over token shards and the built-in recall stream. A training step is a global batch of
// `rows` samples; step s (from 0) takes the positions s*rows .. (s+1)*rows-1 of a stateless order, so that the whole
// state of the loader is one integer, and a resumed run sees what an uninterrupted one would have seen.
//
// Of several ranks each takes its own part of a step's rows: rank r of R those at s*rows + r*rows/R and after.
//
// A row is T tokens and T targets; a target is the token after, or -1 where none is counted.
//
// defines: DataSource, data_source_open_shards, data_source_open_recall, data_source_sample, data_source_read,
//          data_source_close, StepLoader, loader_start, loader_take, loader_stop
#ifndef GDN_DATA_SOURCE_H
#define GDN_DATA_SOURCE_H

#include "prefetch.h"  // first: it asks libc for pread
#include "order.h"
#include "recall.h"
#include "signals.h"

typedef struct {
  int recall;  // 1: the built-in stream, 0: shards
  int T;
  uint64_t seed;
  int ordered;           // 1: position i is sample i (validation), 0: shuffled anew every epoch
  int64_t samples;       // in an epoch; recall: endless
  ShardSet set;          // shards
  RecallConfig config;   // recall
  char fingerprint[96];  // identifies the data in a checkpoint
} DataSource;

// Shards by file names or globs. vocab: of the model. option: "--train" or "--val". Returns 0, or EXIT_DATA and one
// line.
static inline int data_source_open_shards(DataSource *d, const char *const *patterns, int n_patterns, int vocab,
                                          const char *option, int T, uint64_t seed, int ordered, Error *err) {
  memset(d, 0, sizeof *d);
  d->T = T, d->seed = seed, d->ordered = ordered;
  int code = shards_open(&d->set, patterns, n_patterns, vocab, option, err);
  if (code) return code;
  d->samples = shards_samples(&d->set, T);
  snprintf(d->fingerprint, sizeof d->fingerprint, "shards:%016llx", (unsigned long long)shards_fingerprint(&d->set));
  return 0;
}

// The recall stream; a validation source gives samples that no training run reaches.
static inline int data_source_open_recall(DataSource *d, const RecallConfig *c, uint64_t seed, int validation,
                                          Error *err) {
  memset(d, 0, sizeof *d);
  d->recall = 1, d->T = c->T, d->seed = seed, d->ordered = validation, d->config = *c;
  d->samples = RECALL_VALIDATION;
  snprintf(d->fingerprint, sizeof d->fingerprint,
           "recall:seed=%llu,length=%d,pairs=%d,keys=%d,values=%d,stale=%d,%s,%g", (unsigned long long)seed, c->T,
           c->pairs, c->keys, c->values, c->stale_pairs, c->random_fillers ? "random" : "zero", c->power);
  return recall_check(c, err);
}

static inline void data_source_close(DataSource *d) {
  if (!d->recall) shards_close(&d->set);
  memset(d, 0, sizeof *d);
}

// Index of the sample at a global position.
static inline int64_t data_source_sample(const DataSource *d, int64_t position) {
  if (d->recall) return d->ordered ? RECALL_VALIDATION + position : position;
  return d->ordered ? position : sample_at(d->seed, position, d->samples);
}

static inline void data_source_split(const int32_t *raw, int T, int32_t *tokens, int32_t *targets) {
  memcpy(tokens, raw, (size_t)T * sizeof *raw);
  memcpy(targets, raw + 1, (size_t)T * sizeof *raw);
}

// Rows at positions first .. first+rows-1 into tokens and targets [rows, T]. Returns 0, or EXIT_DATA (shards_read).
static inline int data_source_read(DataSource *d, int64_t first, int64_t rows, int32_t *tokens, int32_t *targets,
                                   Error *err) {
  int64_t T = d->T;
  int32_t *raw = d->recall ? NULL : (int32_t *)alloc_array(T + 1, sizeof *raw, "a row of tokens");
  int code = 0;
  for (int64_t r = 0; r < rows && !code; r++) {
    int64_t sample = data_source_sample(d, first + r);
    if (d->recall) {
      recall_sample(&d->config, d->seed, sample, tokens + r * T, targets + r * T);
    } else {
      code = shards_read_sample(&d->set, sample, (int)T, raw, err);
      if (!code) data_source_split(raw, (int)T, tokens + r * T, targets + r * T);
    }
  }
  free(raw);
  return code;
}

// ----------------------------------------------------------------------------
// the rows of training steps, read ahead in the background

typedef struct {
  DataSource *source;
  int64_t rows, next;     // own rows of a step; the step that is being read ahead, -1: none
  int64_t total, offset;  // rows of a step over all ranks, the first own one
  Prefetch prefetch;
  int32_t *raw;      // [rows, T+1]
  int64_t *indices;  // [rows]
} StepLoader;

// Of the `total` rows of a step, those from `offset` on are this rank's `rows`.
static inline int loader_start(StepLoader *l, DataSource *source, int64_t total, int64_t offset, int64_t rows,
                               Error *err) {
  memset(l, 0, sizeof *l);
  l->source = source, l->rows = rows, l->next = -1;
  l->total = total, l->offset = offset;
  if (source->recall) return 0;
  l->raw = (int32_t *)alloc_array(rows * ((int64_t)source->T + 1), sizeof *l->raw, "rows of a step");
  l->indices = (int64_t *)alloc_array(rows, sizeof *l->indices, "rows of a step");
  return prefetch_start(&l->prefetch, &source->set, source->T, rows, err);
}

static inline void loader_stop(StepLoader *l) {
  if (l->raw) prefetch_stop(&l->prefetch);
  free(l->raw);
  free(l->indices);
  memset(l, 0, sizeof *l);
}

static inline void loader_request(StepLoader *l, int64_t step) {
  for (int64_t r = 0; r < l->rows; r++) l->indices[r] = data_source_sample(l->source, step * l->total + l->offset + r);
  prefetch_request(&l->prefetch, l->indices, l->rows);
  l->next = step;
}

// Rows of a step into tokens and targets [rows, T]; begins to read those of the next one. Returns 0, EXIT_STOPPED when
// a stop was asked for while waiting, or EXIT_DATA.
static inline int loader_take(StepLoader *l, int64_t step, int32_t *tokens, int32_t *targets, StopWatch *stop,
                              Error *err) {
  int64_t T = l->source->T;
  if (l->source->recall) return data_source_read(l->source, step * l->total + l->offset, l->rows, tokens, targets, err);
  if (l->next >= 0 && l->next != step) {  // another step was read ahead: drop it
    Error ignored;
    prefetch_take(&l->prefetch, NULL, &ignored);
    l->next = -1;
  }
  if (l->next < 0) loader_request(l, step);
  while (!prefetch_wait(&l->prefetch, 0.1))
    if (stop_requested(stop)) return EXIT_STOPPED;
  int code = prefetch_take(&l->prefetch, l->raw, err);
  l->next = -1;
  if (code) return code;
  for (int64_t r = 0; r < l->rows; r++)
    data_source_split(l->raw + r * (T + 1), (int)T, tokens + r * T, targets + r * T);
  loader_request(l, step + 1);
  return 0;
}

#endif  // GDN_DATA_SOURCE_H
