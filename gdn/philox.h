// philox.h: random numbers from counters (Philox 4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as
// 1, 2, 3"). A number depends on (key, counter) alone: no state to save, no order of draws to keep, the same on every
// rank, thread and machine.
//
// defines: philox4x32, random_bits, random_uniform, random_normal, hash_name
#ifndef GDN_PHILOX_H
#define GDN_PHILOX_H

#include <math.h>
#include <stdint.h>

// One block: four 32-bit words from a 64-bit key and a 128-bit counter (hi, lo).
static inline void philox4x32(uint32_t out[4], uint64_t key, uint64_t hi, uint64_t lo) {
  uint32_t c0 = (uint32_t)lo, c1 = (uint32_t)(lo >> 32), c2 = (uint32_t)hi, c3 = (uint32_t)(hi >> 32);
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
    uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1;
    c3 = (uint32_t)p0;
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// 64 random bits for (seed, stream, index).
static inline uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
  uint32_t w[4];
  philox4x32(w, seed, stream, index);
  return (uint64_t)w[1] << 32 | w[0];
}

// Uniform in (0, 1): never 0 or 1, so that log() is safe.
static inline double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return ((double)(random_bits(seed, stream, index) >> 11) + 0.5) * 0x1p-53;
}

// Normal (0, 1) by Box and Muller, one number an index.
static inline double random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  uint32_t w[4];
  philox4x32(w, seed, stream, index);
  double u1 = ((double)w[0] + 0.5) * 0x1p-32, u2 = ((double)w[1] + 0.5) * 0x1p-32;
  return sqrt(-2.0 * log(u1)) * cos(6.283185307179586 * u2);
}

// FNV-1a: a stream number from a name.
static inline uint64_t hash_name(const char *s) {
  uint64_t h = 0xcbf29ce484222325u;
  for (; *s; s++) h = (h ^ (uint8_t)*s) * 0x100000001b3u;
  return h;
}

#endif  // GDN_PHILOX_H
