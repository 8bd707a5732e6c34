// order.h: in which order samples are seen, without a state. The sample at a global position is a function of
// (seed, position, number of samples): an epoch is a permutation of all samples, a new one each epoch, and the whole
// state of a loader is one integer. Any number of ranks, threads or micro-batches that share out the positions of a
// step sees the same global batch.
//
// The permutation is a Feistel network (Luby and Rackoff 1988) on the smallest 2^(2h) >= samples, its round function
// Philox, made a permutation of 0..samples-1 by cycle walking (Black and Rogaway 2002): apply it again until the result
// is below `samples`. The domain is less than 4 times `samples`, so that takes fewer than 4 turns on average.
//
// defines: sample_epoch, sample_at
#ifndef GDN_ORDER_H
#define GDN_ORDER_H

#include <stdint.h>

#include "philox.h"

enum { ORDER_ROUNDS = 8 };

// The epoch, from 0, that a position (from 0) lies in; samples >= 1.
static inline int64_t sample_epoch(int64_t position, int64_t samples) { return position / samples; }

// The sample index in 0..samples-1 at a global position >= 0; samples >= 1. Every run of `samples` positions that
// starts at a multiple of `samples` holds each sample exactly once.
static inline int64_t sample_at(uint64_t seed, int64_t position, int64_t samples) {
  uint64_t epoch = (uint64_t)(position / samples), x = (uint64_t)(position % samples);
  int half = 1;
  while (half < 31 && ((uint64_t)1 << (2 * half)) < (uint64_t)samples) half++;  // 2^62 samples are enough
  uint32_t mask = ((uint32_t)1 << half) - 1;
  // The key mixes the seed with a constant of its own, so that no other user of Philox shares its numbers.
  uint64_t key = random_bits(seed, hash_name("sample order"), epoch);
  do {
    uint32_t left = (uint32_t)(x >> half), right = (uint32_t)x & mask;
    for (int round = 0; round < ORDER_ROUNDS; round++) {
      uint32_t w[4], next;
      philox4x32(w, key, (uint64_t)round, right);
      next = left ^ (w[0] & mask);
      left = right;
      right = next;
    }
    x = (uint64_t)left << half | right;
  } while (x >= (uint64_t)samples);
  return (int64_t)x;
}

#endif  // GDN_ORDER_H
