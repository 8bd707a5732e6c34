// sampler.h: picks the next token from a row of logits. Order: temperature, then top-k, then top-p (nucleus sampling,
// arXiv 1904.09751) on what is left. Random numbers come from counters (philox.h), so that a token depends on
// (seed, sample, position) and the logits alone.
//
// defines: Sampler, SamplerEntry, sampler_pick
#ifndef GDN_SAMPLER_H
#define GDN_SAMPLER_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include "philox.h"

typedef struct {
  double temperature;  // 0: the most likely token
  int top_k;           // 0: all tokens
  double top_p;        // 1: all tokens
  uint64_t seed;
} Sampler;

typedef struct {
  double logit;
  int id;
} SamplerEntry;

static inline int sampler_compare(const void *a, const void *b) {  // largest first, ties by smaller id
  const SamplerEntry *x = (const SamplerEntry *)a, *y = (const SamplerEntry *)b;
  if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
  return x->id < y->id ? -1 : x->id > y->id;
}

// Returns a token id, or -1 when a logit is NaN or none is finite. scratch [vocab]. -inf is a token that never comes.
static inline int sampler_pick(const Sampler *s, const float *logits, int vocab, SamplerEntry *scratch, uint64_t sample,
                               uint64_t position) {
  int best = -1;
  for (int i = 0; i < vocab; i++) {
    if (isnan(logits[i]) || (isinf(logits[i]) && logits[i] > 0)) return -1;
    if (best < 0 || logits[i] > logits[best]) best = i;
  }
  if (best < 0 || isinf(logits[best])) return -1;
  if (s->temperature <= 0 || s->top_k == 1) return best;

  double top = logits[best], total = 0;
  int n = vocab;
  for (int i = 0; i < vocab; i++) scratch[i].logit = (logits[i] - top) / s->temperature, scratch[i].id = i;
  int sorted = (s->top_k > 0 && s->top_k < vocab) || s->top_p < 1;
  if (sorted) qsort(scratch, (size_t)vocab, sizeof *scratch, sampler_compare);
  if (s->top_k > 0 && s->top_k < n) n = s->top_k;
  for (int i = 0; i < n; i++) total += exp(scratch[i].logit);
  if (s->top_p < 1) {  // the fewest tokens that hold top_p of the mass, at least one
    double sum = 0, want = s->top_p * total;
    int kept = 0;
    while (kept < n && (kept == 0 || sum < want)) sum += exp(scratch[kept++].logit);
    n = kept, total = sum;
  }
  double u = random_uniform(s->seed, hash_name("sampler") + sample, position) * total, sum = 0;
  int last = scratch[0].id;
  for (int i = 0; i < n; i++) {
    double p = exp(scratch[i].logit);
    if (p == 0) continue;
    last = scratch[i].id;
    sum += p;
    if (u < sum) return last;
  }
  return last;  // rounding left u at the very end
}

#endif  // GDN_SAMPLER_H
