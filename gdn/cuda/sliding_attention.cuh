// sliding_attention.cuh: what the attention kernels of both families share (sliding_attention_sm80.cuh with mma.sync,
// sliding_attention_sm90.cuh and sliding_attention_sm90_backward.cuh with wgmma): arguments, the order of tiles, masks,
// the online softmax, stores; and the kernels that need no tensor cores: RoPE, row sums of do * o.
//
// With S = Q K^T, P = exp(s S - lse), s = D^-1/2, delta_i = <do_i, o_i>:
//   dV = P^T dO,   dP = dO V^T,   dS = P o (dP - delta),   dQ = s dS K,   dK = s dS^T Q      (FlashAttention-2, Alg. 2)
// The backward is two kernels: one owns a tile of keys and runs over queries (dK, dV), one owns a tile of queries and
// runs over keys (dQ). S and dP are computed twice, seven products instead of five, and no sum needs an atomic.
//
// defines: AttentionArgs, Tile, tile_of, first_key, last_query, mask_keys, mask_queries, softmax_step, scale_rows,
//          softmax_finish, rotate_back, store_rows, rope_table_kernel, rope_kernel, attention_delta_kernel
#ifndef GDN_CUDA_SLIDING_ATTENTION_CUH
#define GDN_CUDA_SLIDING_ATTENTION_CUH

#include <math_constants.h>

#include "attention_mma.cuh"

namespace attention {

struct AttentionArgs {
  int B, T, Hq, Hkv;
  int W;        // 1..T
  int T_pad;    // T rounded up to 128: row length of the scratch arrays
  int section;  // heads that run through their tiles together, so that what they read again stays in L2
  int64_t qkv_stride, dqkv_stride;
  float scale, scale_log2;  // D^-1/2, and times log2(e)
  const int32_t *doc_start;
};

struct Tile {
  int block, b, h;
};

// The tile with number id. Heads go in sections; inside a section all heads take block 0, then block 1, ...
__device__ __forceinline__ Tile tile_of(const AttentionArgs &a, int id, int blocks, int H) {
  const int per_section = a.section * blocks, s = id / per_section, r = id % per_section;
  const int heads = min(a.section, a.B * H - s * a.section), bh = s * a.section + r % heads;
  return {r / heads, bh / H, bh % H};
}

// First key that row i of batch row b sees; does not decrease with i. Rows past the end count as the last.
__device__ __forceinline__ int first_key(const AttentionArgs &a, int b, int i) {
  const int lo = max(0, i - a.W + 1);
  return a.doc_start ? max(lo, min(i, a.doc_start[(int64_t)b * a.T + min(i, a.T - 1)])) : lo;
}

// Last query that sees key j.
__device__ __forceinline__ int last_query(const AttentionArgs &a, int b, int j) {
  int hi = min(a.T - 1, j + a.W - 1), lo = min(j, a.T - 1);
  if (a.doc_start) {
    const int32_t *start = a.doc_start + (int64_t)b * a.T;
    while (lo < hi) {
      const int mid = (lo + hi + 1) >> 1;
      if (start[mid] <= j)
        lo = mid;
      else
        hi = mid - 1;
    }
  }
  return hi;
}

// Rows are queries: keys outside [lo, hi] of their row become -inf. key0: the thread's first column.
template <int N2>
__device__ __forceinline__ void mask_keys(float (&s)[N2], int key0, const int (&lo)[2], const int (&hi)[2]) {
#pragma unroll
  for (int i = 0; i < N2; i++) {
    const int key = key0 + 8 * (i / 4) + (i & 1), r = (i >> 1) & 1;
    if (key < lo[r] || key > hi[r]) s[i] = -CUDART_INF_F;
  }
}

// Rows are keys key_row and key_row + 8, columns are queries from query0.
template <int N2>
__device__ __forceinline__ void mask_queries(float (&s)[N2], int query0, int key_row, int b, const AttentionArgs &a) {
#pragma unroll
  for (int j = 0; j < N2 / 4; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int q = query0 + 8 * j + e, lo = first_key(a, b, q);
#pragma unroll
      for (int r = 0; r < 2; r++)
        if (key_row + 8 * r > q || key_row + 8 * r < lo) s[4 * j + 2 * r + e] = -CUDART_INF_F;
    }
}

// One step of the online softmax. s becomes exp2(scale_log2 (s - m)); m, sum (this thread's columns only) follow, and
// factor is what earlier sums must be multiplied by. Every row has seen a key by the end of its first step.
template <int N2>
__device__ __forceinline__ void softmax_step(float (&s)[N2], float (&m)[2], float (&sum)[2], float (&factor)[2],
                                             float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float x = m[r];
#pragma unroll
    for (int j = 0; j < N2 / 4; j++) x = fmaxf(x, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
    factor[r] = exp2_fast((m[r] - x) * scale_log2);
    m[r] = x;
    const float shift = -x * scale_log2;
    float part = 0.f;
#pragma unroll
    for (int j = 0; j < N2 / 4; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float &y = s[4 * j + 2 * r + e];
        y = exp2_fast(fmaf(y, scale_log2, shift));
        part += y;
      }
    sum[r] = sum[r] * factor[r] + part;
  }
}

template <int N2>
__device__ __forceinline__ void scale_rows(float (&d)[N2], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N2; i++) d[i] *= factor[(i >> 1) & 1];
}

// o /= sum; writes lse of the warp's two rows of this thread. row: the first of the two.
template <int D>
__device__ __forceinline__ void softmax_finish(float (&o)[D / 2], const float (&m)[2], const float (&sum)[2],
                                               float *lse, int row, const AttentionArgs &a) {
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float x = sum[r];
    x += __shfl_xor_sync(0xffffffff, x, 1);
    x += __shfl_xor_sync(0xffffffff, x, 2);
    inverse[r] = 1.f / x;
    if ((threadIdx.x & 3) == 0 && row + 8 * r < a.T) lse[row + 8 * r] = m[r] * a.scale + logf(x);
  }
  scale_rows(o, inverse);
}

// Gradient with respect to the unrotated vector: the rotation by the negative angle. row: position of the first row.
template <int D>
__device__ __forceinline__ void rotate_back(float (&d)[D / 2], const float2 *table, int row, int T) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float2 *angles = table + (int64_t)min(row + 8 * r, T - 1) * (D / 2) + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int j = 0; j < D / 16; j++) {
      const float4 cs = *(const float4 *)(angles + 8 * j);
      float *x = d + 4 * j + 2 * r, *y = d + 4 * (j + D / 16) + 2 * r;
      const float x0 = x[0], y0 = y[0], x1 = x[1], y1 = y[1];
      x[0] = x0 * cs.x + y0 * cs.y;
      y[0] = y0 * cs.x - x0 * cs.y;
      x[1] = x1 * cs.z + y1 * cs.w;
      y[1] = y1 * cs.z - x1 * cs.w;
    }
  }
}

// The warp's 16 rows x D, as bf16, to dst (token `row` of a buffer with `stride`), through rows tile_row.. of a tile
// of R rows in shared memory that nobody else reads any more.
template <int D, int R>
__device__ __forceinline__ void store_rows(bf16 *dst, int64_t stride, int row, int T, unsigned char *tile, int tile_row,
                                           const float (&d)[D / 2]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < D / 8; j++)
#pragma unroll
    for (int r = 0; r < 2; r++)
      *(uint32_t *)(tile + tile_offset<R>(tile_row + lane / 4 + 8 * r, j) + 4 * (lane & 3)) =
          pack_bf16(d[4 * j + 2 * r], d[4 * j + 2 * r + 1]);
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * (D / 8); i += 32) {
    const int r = i / (D / 8), chunk = i % (D / 8);
    if (row + r < T)
      *(uint4 *)(dst + (int64_t)(row + r) * stride + 8 * chunk) =
          *(const uint4 *)(tile + tile_offset<R>(tile_row + r, chunk));
  }
  __syncwarp();
}

// ---- RoPE and row sums ----------------------------------------------------------------------------------------

static __global__ void rope_table_kernel(float2 *table, int T, int half, double base) {
  const int64_t n = (int64_t)T * half;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    const double angle = (double)(i / half) * pow(base, -(double)(i % half) / half);
    table[i] = make_float2((float)cos(angle), (float)sin(angle));
  }
}

// A thread turns 8 pairs of every (4th) head of one token: the table is read once for many heads.
// Block (D/16, 4, 256/(D/16 * 4)).
template <int D>
static __global__ void rope_kernel(bf16 *q, bf16 *k, const float2 *table, AttentionArgs a) {
  const int64_t token = (int64_t)blockIdx.x * blockDim.z + threadIdx.z;
  if (token >= (int64_t)a.B * a.T) return;
  const int c = threadIdx.x * 8;
  float2 cs[8];
  const float4 *angles = (const float4 *)(table + (token % a.T) * (D / 2) + c);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 x = angles[i];
    cs[2 * i] = make_float2(x.x, x.y);
    cs[2 * i + 1] = make_float2(x.z, x.w);
  }
  for (int h = threadIdx.y; h < a.Hq + a.Hkv; h += 4) {
    bf16 *x = (h < a.Hq ? q + (int64_t)h * D : k + (int64_t)(h - a.Hq) * D) + token * a.qkv_stride + c;
    uint4 lo = *(uint4 *)x, hi = *(uint4 *)(x + D / 2);
    bf16 *l = (bf16 *)&lo, *u = (bf16 *)&hi;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float p = __bfloat162float(l[i]), r = __bfloat162float(u[i]);
      l[i] = __float2bfloat16(p * cs[i].x - r * cs[i].y);
      u[i] = __float2bfloat16(r * cs[i].x + p * cs[i].y);
    }
    *(uint4 *)x = lo;
    *(uint4 *)(x + D / 2) = hi;
  }
}

// delta = <do, o> and lse in units of log2, both [B,Hq,T_pad]; padding rows get lse = inf, so that their P is 0.
// Also zeroes the counters of the two kernels that follow.
template <int D>
static __global__ void attention_delta_kernel(float *delta, float *lse2, int *counters, const bf16 *dout, const bf16 *o,
                                              const float *lse, AttentionArgs a) {
  constexpr int LANES = D / 8;
  const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;  // (b, t, h)
  const int lane = threadIdx.x % LANES;
  if (blockIdx.x == 0 && threadIdx.x < 4) counters[threadIdx.x] = 0;
  if (i >= (int64_t)a.B * a.T_pad * a.Hq) return;
  const int h = (int)(i % a.Hq), t = (int)(i / a.Hq % a.T_pad), b = (int)(i / a.Hq / a.T_pad);
  float sum = 0.f;
  if (t < a.T) {
    const int64_t at = (((int64_t)b * a.T + t) * a.Hq + h) * D + 8 * lane;
    const uint4 x = *(const uint4 *)(dout + at), y = *(const uint4 *)(o + at);
    const __nv_bfloat162 *u = (const __nv_bfloat162 *)&x, *w = (const __nv_bfloat162 *)&y;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float2 p = __bfloat1622float2(u[e]), r = __bfloat1622float2(w[e]);
      sum += p.x * r.x + p.y * r.y;
    }
  }
#pragma unroll
  for (int s = LANES / 2; s > 0; s >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, s);
  if (lane == 0) {
    const int64_t row = ((int64_t)b * a.Hq + h) * a.T_pad + t;
    delta[row] = sum;
    lse2[row] = t < a.T ? lse[((int64_t)b * a.Hq + h) * a.T + t] * CUDART_L2E_F : CUDART_INF_F;
  }
}

}  // namespace attention

#endif  // GDN_CUDA_SLIDING_ATTENTION_CUH
