// recall.h: a built-in task that needs no file: multi-query associative recall (Arora et al. 2024, "Zoology", MQAR).
// A sample is a function of (seed, index) alone, by Philox, so the stream is endless, never repeats, and looks the same
// to any number of ranks.
//
// Token ids: 0 is the filler, 1..keys are keys, keys+1..keys+values are values. A sample of length T:
//
//   k1 v1 k2 v2 ... kD vD   then, in the T-2D places left, every key once more at an even distance from their start
//
// The D keys of a sample are distinct; each value is drawn independently, so values may repeat among keys. The target
// at a query is the value of its key; all other targets are -1 (not counted). What follows a query is filler, never the
// answer. Which of the places 0, 2, 4, ... the queries take is drawn without replacement with probability proportional
// to (1 + n)^(power - 1), n the number of the place, the first key drawing first (Zoology's power law, power 0.01; 1
// is uniform): most queries come soon, a few after a long gap. Filler is id 0, or with random_fillers any id but the
// keys of this sample (Zoology's random_non_queries draws them from all ids, which with a small vocabulary would
// bind a key anew).
//
// With stale_pairs > 0 forgetting is asked for as well: that many stale pairs come first (their keys cycle through a
// random order of all keys, so that more pairs than keys rewrite them), then two fillers, then the D pairs as above,
// whose keys are drawn from the stale ones. Every queried key was bound before; the last value wins.
//
// Validation is sample RECALL_VALIDATION + i: the same function at indices that no training run reaches, so the random
// numbers of the two never coincide. (Equal samples are not excluded, but there are more than keys^D of them.)
//
// defines: RecallConfig, recall_defaults, recall_vocab, recall_check, recall_sample, RECALL_VALIDATION
#ifndef GDN_RECALL_H
#define GDN_RECALL_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "check.h"
#include "philox.h"

#define RECALL_VALIDATION ((int64_t)1 << 62)

typedef struct {
  int T;               // length of a sample
  int pairs;           // D, key-value pairs asked for
  int keys, values;    // how many ids of each kind
  int stale_pairs;     // 0: plain recall
  int random_fillers;  // 0: filler is id 0
  double power;        // of the gaps' law, > 0
} RecallConfig;

static inline RecallConfig recall_defaults(int T) {
  RecallConfig c;
  c.T = T;
  c.pairs = 8;
  c.keys = c.values = 64;
  c.stale_pairs = c.random_fillers = 0;
  c.power = 0.01;
  return c;
}

static inline int recall_vocab(const RecallConfig *c) { return 1 + c->keys + c->values; }

// Can samples be made? Returns 0, or EXIT_USAGE with the numbers.
static inline int recall_check(const RecallConfig *c, Error *err) {
  if (c->pairs < 1 || c->keys < 1 || c->values < 1 || c->stale_pairs < 0 || c->keys > 1000000 || c->values > 1000000)
    return error_set(
        err, EXIT_USAGE,
        "recall: %d pairs, %d keys, %d values, %d stale pairs: needed 1 or more of the first three (1000000 "
        "at most of keys and values) and 0 or more stale ones",
        c->pairs, c->keys, c->values, c->stale_pairs);
  if (c->pairs > c->keys)
    return error_set(err, EXIT_USAGE, "recall: %d pairs need as many distinct keys, there are %d: fewer --recall-pairs",
                     c->pairs, c->keys);
  if (c->stale_pairs && c->stale_pairs < c->pairs)
    return error_set(err, EXIT_USAGE,
                     "recall: %d stale pairs do not cover the %d pairs that rewrite them: more --recall-stale-pairs",
                     c->stale_pairs, c->pairs);
  int64_t needed = 4 * (int64_t)c->pairs + (c->stale_pairs ? 2 * (int64_t)c->stale_pairs + 2 : 0);
  if (c->T < needed)
    return error_set(err, EXIT_USAGE,
                     "recall: a sample of %d pairs and %d stale pairs needs %lld tokens, --seq-len is %d: a longer "
                     "--seq-len or fewer --recall-pairs",
                     c->pairs, c->stale_pairs, (long long)needed, c->T);
  if (!(c->power > 0 && c->power <= 1))
    return error_set(err, EXIT_USAGE, "recall: the power of the gaps' law is %g, needed more than 0 and at most 1",
                     c->power);
  return 0;
}

// Draws of one sample: number n of sample (seed, index).
typedef struct {
  uint64_t key, index, n;
} RecallDraws;

static inline int32_t recall_below(RecallDraws *d, int32_t n) {  // uniform in 0..n-1, bias below n / 2^64
  uint32_t w[4];
  philox4x32(w, d->key, d->index, d->n++);
  return (int32_t)(((((uint64_t)w[0] * (uint64_t)n) >> 32) + (uint64_t)w[1] * (uint64_t)n) >> 32);
}

static inline void recall_shuffle(RecallDraws *d, int32_t *list, int32_t count, int32_t n) {  // the first `count` of n
  for (int32_t i = 0; i < count; i++) {
    int32_t j = i + recall_below(d, n - i), t = list[i];
    list[i] = list[j], list[j] = t;
  }
}

typedef struct {
  double time;
  int32_t slot;
} RecallSlot;

static inline int recall_compare_slots(const void *a, const void *b) {
  const RecallSlot *x = (const RecallSlot *)a, *y = (const RecallSlot *)b;
  if (x->time != y->time) return x->time < y->time ? -1 : 1;
  return (x->slot > y->slot) - (x->slot < y->slot);
}

// Sample `index` >= 0 into tokens[T] and targets[T]: the answer at each of the D queries, -1 elsewhere. The config has
// passed recall_check.
static inline void recall_sample(const RecallConfig *c, uint64_t seed, int64_t index, int32_t *tokens,
                                 int32_t *targets) {
  RecallDraws d;
  d.key = seed ^ hash_name("recall");  // numbers of its own, apart from other users of the seed
  d.index = (uint64_t)index, d.n = 0;
  int32_t slots = (c->T - 2 * c->pairs - (c->stale_pairs ? 2 * c->stale_pairs + 2 : 0) + 1) / 2;
  int32_t *keys = (int32_t *)alloc_array(c->keys, sizeof(int32_t), "keys of a recall sample");
  uint8_t *asked = (uint8_t *)alloc_zeroed(c->keys + 1, 1, "keys of a recall sample");
  RecallSlot *slot = (RecallSlot *)alloc_array(slots, sizeof(RecallSlot), "places of a recall sample");
  int32_t t = 0;
  for (int32_t i = 0; i < c->T; i++) tokens[i] = 0, targets[i] = -1;
  for (int32_t i = 0; i < c->keys; i++) keys[i] = 1 + i;

  int32_t pool = c->keys;  // how many keys, the first of the list, the pairs choose from
  if (c->stale_pairs) {
    if (c->stale_pairs < pool) pool = c->stale_pairs;
    recall_shuffle(&d, keys, pool, c->keys);
    for (int32_t i = 0; i < c->stale_pairs; i++) {
      tokens[t++] = keys[i % pool];
      tokens[t++] = 1 + c->keys + recall_below(&d, c->values);
    }
    t += 2;
  }
  recall_shuffle(&d, keys, c->pairs, pool);
  int32_t first_pair = t;
  for (int32_t i = 0; i < c->pairs; i++) {
    asked[keys[i]] = 1;
    tokens[t++] = keys[i];
    tokens[t++] = 1 + c->keys + recall_below(&d, c->values);
  }

  // Weighted drawing without replacement: the first of exponential clocks with these rates (Efraimidis and Spirakis
  // 2006).
  for (int32_t i = 0; i < slots; i++) {
    uint32_t w[4];
    philox4x32(w, d.key, d.index, d.n++);
    double u = ((double)w[0] + 0.5) * 0x1p-32;
    slot[i].time = -log(u) * pow(1.0 + i, 1.0 - c->power);
    slot[i].slot = i;
  }
  qsort(slot, (size_t)slots, sizeof *slot, recall_compare_slots);
  for (int32_t i = 0; i < c->pairs; i++) {
    int32_t at = t + 2 * slot[i].slot;
    tokens[at] = keys[i];
    targets[at] = tokens[first_pair + 2 * i + 1];
  }

  for (int32_t i = t; c->random_fillers && i < c->T; i++) {
    if (targets[i] >= 0) continue;
    do {
      tokens[i] = recall_below(&d, recall_vocab(c));
    } while (tokens[i] <= c->keys && asked[tokens[i]]);
  }
  free(keys);
  free(asked);
  free(slot);
}

#endif  // GDN_RECALL_H
