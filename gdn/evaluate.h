// evaluate.h: the loss over a fixed, ordered set of rows, in all and by position in the row, and how well recall
// samples are answered. The training loop and the sub-command eval call the same function, so their numbers agree.
//
// defines: Evaluation, evaluation_start, evaluation_free, evaluate, evaluate_recall, target_bytes, evaluation_loss,
//          evaluation_bits_per_byte
#ifndef GDN_EVALUATE_H
#define GDN_EVALUATE_H

#include "data_source.h"
#include "engine.h"
#include "tokenizer.h"
#include "watchdog.h"

typedef struct {
  double loss_sum;          // nats, over the counted targets
  int64_t counted, bytes;   // targets; bytes of text that they stand for, 0: not known
  int T, buckets;           // positions of a row are split evenly into buckets, 0: none
  double *bucket_sum;       // [buckets]
  int64_t *bucket_counted;  // [buckets]
  int part, parts;          // of several ranks, each evaluates micro-batches part, part + parts, ...
} Evaluation;

static inline void evaluation_start(Evaluation *v, int T, int buckets) {
  memset(v, 0, sizeof *v);
  v->T = T, v->buckets = buckets < T ? buckets : T, v->parts = 1;
  if (!buckets) return;
  v->bucket_sum = (double *)alloc_zeroed(buckets, sizeof(double), "losses by position");
  v->bucket_counted = (int64_t *)alloc_zeroed(buckets, sizeof(int64_t), "losses by position");
}

static inline void evaluation_free(Evaluation *v) {
  free(v->bucket_sum);
  free(v->bucket_counted);
  memset(v, 0, sizeof *v);
}

static inline double evaluation_loss(const Evaluation *v) {
  return v->counted ? v->loss_sum / (double)v->counted : NAN;
}

static inline double evaluation_bits_per_byte(const Evaluation *v) {
  return v->bytes ? v->loss_sum / 0.69314718055994531 / (double)v->bytes : NAN;
}

// Bytes of text that the counted targets [T] of one row stand for: what the tokenizer decodes them to.
static inline int64_t target_bytes(const Tokenizer *t, const int32_t *targets, int T) {
  TokenStream s;
  size_t n;
  int64_t bytes = 0;
  token_stream_begin(&s, t);
  for (int i = 0; i < T; i++)
    if (targets[i] >= 0) {
      token_stream_push(&s, targets[i], &n);
      bytes += (int64_t)n;
    }
  token_stream_end(&s, &n);
  token_stream_free(&s);
  return bytes + (int64_t)n;
}

static inline void evaluation_add_positions(Evaluation *v, const EngineApi *api, Engine *e, const int32_t *targets,
                                            int rows, float *losses) {
  api->losses(e, losses);
  for (int r = 0; r < rows; r++)
    for (int t = 0; t < v->T; t++)
      if (targets[(int64_t)r * v->T + t] >= 0) {
        int b = (int)((int64_t)t * v->buckets / v->T);
        v->bucket_sum[b] += losses[(int64_t)r * v->T + t];
        v->bucket_counted[b]++;
      }
}

// Rows 0 .. rows-1 of an ordered source, `batch` at a time, added to v (its part of them). tokenizer: to count bytes,
// NULL: not known. Returns 0, EXIT_STOPPED when a stop was asked for (v is then of no use), or EXIT_DATA.
static inline int evaluate(Evaluation *v, const EngineApi *api, Engine *e, DataSource *source, int64_t rows, int batch,
                           const Tokenizer *tokenizer, StopWatch *stop, Error *err) {
  int64_t T = source->T, N = (int64_t)batch * T;
  int32_t *tokens = (int32_t *)alloc_array(N, sizeof(int32_t), "a batch of validation rows");
  int32_t *targets = (int32_t *)alloc_array(N, sizeof(int32_t), "a batch of validation rows");
  float *losses = v->buckets ? (float *)alloc_array(N, sizeof(float), "losses by position") : NULL;
  int code = 0;
  for (int64_t first = (int64_t)v->part * batch; first < rows && !code; first += (int64_t)v->parts * batch) {
    int n = rows - first < batch ? (int)(rows - first) : batch;
    watchdog_progress();
    if (stop && stop_requested(stop)) code = EXIT_STOPPED;
    if (!code) code = data_source_read(source, first, n, tokens, targets, err);
    if (code) break;
    v->loss_sum += api->forward(e, tokens, targets, n, (int)T, 0);
    for (int64_t i = 0; i < n * T; i++) v->counted += targets[i] >= 0;
    if (v->buckets) evaluation_add_positions(v, api, e, targets, n, losses);
    if (tokenizer)
      for (int r = 0; r < n; r++) v->bytes += target_bytes(tokenizer, targets + r * T, (int)T);
  }
  free(tokens);
  free(targets);
  free(losses);
  return code;
}

// Counts the targets of rows 0 .. rows-1 (those of micro-batches part, part + parts, ...) and those whose logit is the
// largest. Returns as evaluate.
static inline int evaluate_recall(int64_t *right, int64_t *counted, int part, int parts, const EngineApi *api,
                                  Engine *e, DataSource *source, int vocab, int64_t rows, int batch, StopWatch *stop,
                                  Error *err) {
  int64_t T = source->T, N = (int64_t)batch * T;
  int32_t *tokens = (int32_t *)alloc_array(N, sizeof(int32_t), "a batch of validation rows");
  int32_t *targets = (int32_t *)alloc_array(N, sizeof(int32_t), "a batch of validation rows");
  float *logits = (float *)alloc_array(vocab, sizeof(float), "logits");
  int code = 0;
  *right = *counted = 0;
  for (int64_t first = (int64_t)part * batch; first < rows && !code; first += (int64_t)parts * batch) {
    watchdog_progress();
    int n = rows - first < batch ? (int)(rows - first) : batch;
    if (stop && stop_requested(stop)) code = EXIT_STOPPED;
    if (!code) code = data_source_read(source, first, n, tokens, targets, err);
    if (code) break;
    api->forward(e, tokens, targets, n, (int)T, 0);
    for (int64_t i = 0; i < n * T; i++) {
      if (targets[i] < 0) continue;
      api->logits(e, i, 1, logits);
      int best = 0, finite = 1;
      for (int j = 0; j < vocab; j++) {
        if (logits[j] > logits[best]) best = j;
        finite &= isfinite(logits[j]) != 0;
      }
      *right += finite && best == targets[i];
      ++*counted;
    }
  }
  free(tokens);
  free(targets);
  free(logits);
  return code;
}

#endif  // GDN_EVALUATE_H
