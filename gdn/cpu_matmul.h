// cpu_matmul.h: matrix products for the CPU engine, on all cores, the same bits for any number of threads.
//
// Include after `typedef float real;` (or double). One kernel does the arithmetic: an MR x NR tile of C held in vector
// registers while it walks over k (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication").
// Large products pack panels of A and B so that the kernel reads memory in order; small ones (the chunks of the delta
// rule) run it on the matrices as they lie. Every element of C is summed by one thread in the order of k.
//
// defines: matmul, matmul_small, linear_forward, linear_backward_input, linear_backward_weight
#ifndef GDN_CPU_MATMUL_H
#define GDN_CPU_MATMUL_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "check.h"
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__AVX512F__)
enum { VEC_BYTES = 64, TILE_ROWS = 12 };  // 24 accumulators of 32 registers
#elif defined(__AVX__)
enum { VEC_BYTES = 32, TILE_ROWS = 6 };  // 12 of 16
#else
enum { VEC_BYTES = 16, TILE_ROWS = 4 };
#endif
typedef real vec __attribute__((vector_size(VEC_BYTES), aligned(sizeof(real)), may_alias));
enum { LANES = VEC_BYTES / (int)sizeof(real), TILE_COLS = 2 * LANES, BLOCK_K = 256, BLOCK_M = 20 * TILE_ROWS };

static inline vec vec_set(real x) { return x - (vec){0}; }

// acc[MR][NR] = sum over k of A(i,k) B(k,:). A(i,k) = a[i*rs + k*cs]; row k of B starts at b + k*ldb.
static inline void tile_kernel(vec acc[TILE_ROWS][2], const real *a, int64_t rs, int64_t cs, const real *b, int64_t ldb,
                               int64_t k) {
  vec c[TILE_ROWS][2];
#pragma GCC unroll 12
  for (int i = 0; i < TILE_ROWS; i++) c[i][0] = c[i][1] = vec_set(0);
  for (int64_t p = 0; p < k; p++) {
    vec b0 = *(const vec *)(b + p * ldb), b1 = *(const vec *)(b + p * ldb + LANES);
#pragma GCC unroll 12
    for (int i = 0; i < TILE_ROWS; i++) {
      vec x = vec_set(a[i * rs + p * cs]);
      c[i][0] += x * b0;
      c[i][1] += x * b1;
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < TILE_ROWS; i++) acc[i][0] = c[i][0], acc[i][1] = c[i][1];
}

// C[m,n] = beta C + alpha A B for matrices that fit a cache, in the calling thread.
// A(i,p) = a[i*rs + p*cs]; B and C row-major with leading dimensions ldb, ldc. k = 0 leaves beta C.
static MAYBE_UNUSED void matmul_small(real *c, int64_t ldc, const real *a, int64_t rs, int64_t cs, const real *b,
                                      int64_t ldb, int m, int n, int k, real alpha, real beta) {
  for (int i0 = 0; i0 < m; i0 += TILE_ROWS) {
    int rows = m - i0 < TILE_ROWS ? m - i0 : TILE_ROWS;
    for (int j0 = 0; j0 < n; j0 += TILE_COLS) {
      int cols = n - j0 < TILE_COLS ? n - j0 : TILE_COLS;
      real tile[TILE_ROWS][TILE_COLS] __attribute__((aligned(64)));
      if (rows == TILE_ROWS && cols == TILE_COLS) {
        tile_kernel((vec(*)[2])tile, a + i0 * rs, rs, cs, b + j0, ldb, k);
      } else {
        for (int i = 0; i < rows; i++) {
          for (int j = 0; j < cols; j++) tile[i][j] = 0;
          for (int p = 0; p < k; p++) {
            real x = a[(i0 + i) * rs + p * cs];
            const real *br = b + p * ldb + j0;
            for (int j = 0; j < cols; j++) tile[i][j] += x * br[j];
          }
        }
      }
      for (int i = 0; i < rows; i++) {
        real *cr = c + (i0 + i) * ldc + j0;
        if (beta == 0)
          for (int j = 0; j < cols; j++) cr[j] = alpha * tile[i][j];
        else
          for (int j = 0; j < cols; j++) cr[j] = beta * cr[j] + alpha * tile[i][j];
      }
    }
  }
}

// C[m,n] = beta C + A B, on all threads. A(i,p) = a[i*ars + p*acs], B(p,j) = b[p*brs + j*bcs], C row-major.
static MAYBE_UNUSED void matmul(real *c, int64_t ldc, const real *a, int64_t ars, int64_t acs, const real *b,
                                int64_t brs, int64_t bcs, int64_t m, int64_t n, int64_t k, real beta) {
  int64_t panels = (n + TILE_COLS - 1) / TILE_COLS, m_blocks = (m + BLOCK_M - 1) / BLOCK_M;
  // a task is a block of rows of A and a group of panels of B; every further group packs the same rows of A again, so
  // there are only as many as give each thread some four tasks
#ifdef _OPENMP
  int64_t tasks = omp_get_max_threads() > 1 ? 4 * omp_get_max_threads() : 1;
#else
  int64_t tasks = 1;
#endif
  int64_t groups = (tasks + m_blocks - 1) / (m_blocks ? m_blocks : 1);
  int64_t group = groups < panels ? (panels + groups - 1) / groups : 1;  // panels in each
  groups = (panels + group - 1) / group;
  real *packed_b = (real *)alloc_array(panels * TILE_COLS * BLOCK_K, sizeof(real), "matrix product");
  if (k == 0)
    for (int64_t i = 0; i < m; i++)
      for (int64_t j = 0; j < n; j++) c[i * ldc + j] = beta == 0 ? 0 : beta * c[i * ldc + j];
#pragma omp parallel
  {
    real *packed_a = (real *)alloc_array((int64_t)BLOCK_M * BLOCK_K, sizeof(real), "matrix product");
    for (int64_t p0 = 0; p0 < k; p0 += BLOCK_K) {
      int64_t kb = k - p0 < BLOCK_K ? k - p0 : BLOCK_K;
      real scale = p0 ? 1 : beta;
#pragma omp for schedule(static)
      for (int64_t j = 0; j < panels; j++) {  // panel j of B: [kb][TILE_COLS], zeros beyond n
        real *dst = packed_b + j * TILE_COLS * BLOCK_K;
        int64_t cols = n - j * TILE_COLS < TILE_COLS ? n - j * TILE_COLS : TILE_COLS;
        const real *src = b + p0 * brs + j * TILE_COLS * bcs;
        if (cols < TILE_COLS) memset(dst, 0, (size_t)(kb * TILE_COLS) * sizeof(real));
        if (bcs == 1 && cols == TILE_COLS)
          for (int64_t p = 0; p < kb; p++) memcpy(dst + p * TILE_COLS, src + p * brs, TILE_COLS * sizeof(real));
        else if (bcs == 1)
          for (int64_t p = 0; p < kb; p++) memcpy(dst + p * TILE_COLS, src + p * brs, (size_t)cols * sizeof(real));
        else
          for (int64_t x = 0; x < cols; x++)
            for (int64_t p = 0; p < kb; p++) dst[p * TILE_COLS + x] = src[p * brs + x * bcs];
      }
#pragma omp for schedule(dynamic) collapse(2)
      for (int64_t ib = 0; ib < m_blocks; ib++)
        for (int64_t g = 0; g < groups; g++) {
          int64_t i0 = ib * BLOCK_M, rows = m - i0 < BLOCK_M ? m - i0 : BLOCK_M;
          for (int64_t i = 0; i < rows; i += TILE_ROWS) {  // A: strips of TILE_ROWS rows, [kb][TILE_ROWS]
            real *dst = packed_a + i * BLOCK_K;
            int64_t r = rows - i < TILE_ROWS ? rows - i : TILE_ROWS;
            const real *src = a + (i0 + i) * ars + p0 * acs;
            if (ars == 1 && r == TILE_ROWS)
              for (int64_t p = 0; p < kb; p++) memcpy(dst + p * TILE_ROWS, src + p * acs, TILE_ROWS * sizeof(real));
            else if (ars == 1)
              for (int64_t p = 0; p < kb; p++) {
                for (int64_t x = 0; x < r; x++) dst[p * TILE_ROWS + x] = src[x + p * acs];
                for (int64_t x = r; x < TILE_ROWS; x++) dst[p * TILE_ROWS + x] = 0;
              }
            else if (r == TILE_ROWS)
              for (int64_t p = 0; p < kb; p++)
                for (int64_t x = 0; x < TILE_ROWS; x++) dst[p * TILE_ROWS + x] = src[x * ars + p * acs];
            else
              for (int64_t x = 0; x < TILE_ROWS; x++)
                for (int64_t p = 0; p < kb; p++) dst[p * TILE_ROWS + x] = x < r ? src[x * ars + p * acs] : 0;
          }
          int64_t j_end = (g + 1) * group < panels ? (g + 1) * group : panels;
          for (int64_t j = g * group; j < j_end; j++)
            for (int64_t i = 0; i < rows; i += TILE_ROWS) {
              real tile[TILE_ROWS][TILE_COLS] __attribute__((aligned(64)));
              tile_kernel((vec(*)[2])tile, packed_a + i * BLOCK_K, 1, TILE_ROWS, packed_b + j * TILE_COLS * BLOCK_K,
                          TILE_COLS, kb);
              int64_t r = rows - i < TILE_ROWS ? rows - i : TILE_ROWS;
              int64_t cols = n - j * TILE_COLS < TILE_COLS ? n - j * TILE_COLS : TILE_COLS;
              for (int64_t x = 0; x < r; x++) {
                real *cr = c + (i0 + i + x) * ldc + j * TILE_COLS;
                if (scale == 0)
                  for (int64_t y = 0; y < cols; y++) cr[y] = tile[x][y];
                else
                  for (int64_t y = 0; y < cols; y++) cr[y] = scale * cr[y] + tile[x][y];
              }
            }
        }
    }
    free(packed_a);
  }
  free(packed_b);
}

// A linear layer of `in` inputs and `out` outputs over N tokens: y = x W^T, W [out, in]. ldx, ldy: elements between
// tokens, so that x and y may be columns of packed buffers. accumulate: add to the output instead of replacing it.
static MAYBE_UNUSED void linear_forward(real *y, int64_t ldy, const real *x, int64_t ldx, const real *w, int64_t N,
                                        int in, int out, int accumulate) {
  matmul(y, ldy, x, ldx, 1, w, 1, in, N, out, in, (real)accumulate);
}
static MAYBE_UNUSED void linear_backward_input(real *dx, int64_t ldx, const real *dy, int64_t ldy, const real *w,
                                               int64_t N, int in, int out, int accumulate) {
  matmul(dx, ldx, dy, ldy, 1, w, in, 1, N, in, out, (real)accumulate);
}
static MAYBE_UNUSED void linear_backward_weight(real *dw, const real *dy, int64_t ldy, const real *x, int64_t ldx,
                                                int64_t N, int in, int out) {
  matmul(dw, in, dy, 1, ldy, x, ldx, 1, out, in, N, 1);
}

#endif  // GDN_CPU_MATMUL_H
