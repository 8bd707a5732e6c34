// sliding_attention_sm80.cuh: the attention kernels for any GPU from compute capability 8.0: mma.sync, cp.async with
// two stages, four warps a CTA with 16 rows each (the structure of FlashAttention-2).
//
// defines: attention_forward_kernel, attention_backward_kv_kernel, attention_backward_q_kernel
#ifndef GDN_CUDA_SLIDING_ATTENTION_SM80_CUH
#define GDN_CUDA_SLIDING_ATTENTION_SM80_CUH

#include "sliding_attention.cuh"

namespace attention {

constexpr int WARP_TILE = 64;       // rows of the tiles of the mma.sync kernels
constexpr int WARP_TILE_KV_Q = 32;  // queries a step in attention_backward_kv_kernel

// R rows and D columns from token t0 of `src` (batch row and head already applied) into a tile; zeros past the end.
template <int R, int D>
__device__ __forceinline__ void load_tile(uint32_t tile, const bf16 *src, int64_t stride, int t0, int T) {
#pragma unroll
  for (int i = threadIdx.x; i < R * (D / 8); i += 128) {
    const int r = i / (D / 8), c = i % (D / 8), t = min(t0 + r, T - 1);
    copy_async_16(tile + tile_offset<R>(r, c), src + (int64_t)t * stride + 8 * c, t0 + r < T);
  }
}

// Grid: one CTA a (tile of 64 queries, b, query head). Shared: Q, two stages of K and V: 10 * 64 * D bytes.
template <int D>
static __global__ void __launch_bounds__(128)
    attention_forward_kernel(bf16 *o_out, float *lse, const bf16 *q, const bf16 *k, const bf16 *v, AttentionArgs a) {
  constexpr int R = WARP_TILE, BYTES = R * D * 2;
  extern __shared__ __align__(128) unsigned char smem[];
  const uint32_t sq = smem_address(smem), sk = sq + BYTES, sv = sk + 2 * BYTES;
  const int blocks = (a.T + R - 1) / R, lane = threadIdx.x & 31, warp_row = (threadIdx.x / 32) * 16;
  const Tile tile = tile_of(a, blockIdx.x, blocks, a.Hq);
  const int i0 = (blocks - 1 - tile.block) * R, b = tile.b, h = tile.h, hk = h / (a.Hq / a.Hkv);
  const int64_t row0 = (int64_t)b * a.T;
  q += row0 * a.qkv_stride + (int64_t)h * D;
  k += row0 * a.qkv_stride + (int64_t)hk * D;
  v += row0 * a.qkv_stride + (int64_t)hk * D;
  const int j_last = i0 / R, j_first = first_key(a, b, i0) / R, steps = j_last - j_first + 1;
  const int row = i0 + warp_row + lane / 4;
  const int hi[2] = {row, row + 8}, lo[2] = {first_key(a, b, row), first_key(a, b, row + 8)};
  const int lo_max = first_key(a, b, i0 + R - 1);

  load_tile<R, D>(sq, q, a.qkv_stride, i0, a.T);
  load_tile<R, D>(sk, k, a.qkv_stride, j_last * R, a.T);
  load_tile<R, D>(sv, v, a.qkv_stride, j_last * R, a.T);
  copy_async_commit();
  float o[D / 2], m[2] = {-CUDART_INF_F, -CUDART_INF_F}, sum[2] = {0.f, 0.f}, factor[2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) o[i] = 0.f;
  for (int it = 0; it < steps; it++) {
    const int j0 = (j_last - it) * R, stage = it & 1;
    if (it + 1 < steps) {
      load_tile<R, D>(sk + (stage ^ 1) * BYTES, k, a.qkv_stride, j0 - R, a.T);
      load_tile<R, D>(sv + (stage ^ 1) * BYTES, v, a.qkv_stride, j0 - R, a.T);
      copy_async_commit();
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    float s[R / 2];
    uint32_t p[R / 16][4];
    warp_product_nt<D, R>(s, sq, warp_row, sk + stage * BYTES);
    if (it == 0 || j0 < lo_max) mask_keys(s, j0 + 2 * (lane & 3), lo, hi);
    softmax_step(s, m, sum, factor, a.scale_log2);
    scale_rows(o, factor);
    pack_operand(p, s);
    warp_product_rn<D, R>(o, p, sv + stage * BYTES);
    __syncthreads();
  }
  softmax_finish<D>(o, m, sum, lse + ((int64_t)b * a.Hq + h) * a.T, row, a);
  store_rows<D, R>(o_out + (row0 * a.Hq + h) * D, (int64_t)a.Hq * D, i0 + warp_row, a.T, smem, warp_row, o);
}

// Grid: one CTA a (tile of 64 keys, b, kv head); runs over the query heads of the group in order, and over tiles of 32
// queries. Rows of the products are keys: S^T, dP^T. Shared: K, V, two stages of Q and dO.
template <int D>
static __global__ void __launch_bounds__(128)
    attention_backward_kv_kernel(bf16 *dk_out, bf16 *dv_out, const bf16 *dout, const bf16 *q, const bf16 *k,
                                 const bf16 *v, const float *lse2, const float *delta, const float2 *table,
                                 AttentionArgs a) {
  constexpr int R = WARP_TILE, RQ = WARP_TILE_KV_Q, BYTES = R * D * 2, BYTES_Q = RQ * D * 2;
  extern __shared__ __align__(128) unsigned char smem[];
  const uint32_t sk = smem_address(smem), sv = sk + BYTES, sq = sv + BYTES, sdo = sq + 2 * BYTES_Q;
  const int blocks = (a.T + R - 1) / R, lane = threadIdx.x & 31, warp_row = (threadIdx.x / 32) * 16;
  const int group = a.Hq / a.Hkv;
  const Tile tile = tile_of(a, blockIdx.x, blocks, a.Hkv);
  const int j0 = tile.block * R, b = tile.b, hk = tile.h;
  const int64_t row0 = (int64_t)b * a.T, do_stride = (int64_t)a.Hq * D;
  const int i_first = j0 / RQ, per_head = last_query(a, b, min(j0 + R, a.T) - 1) / RQ - i_first + 1;
  const int steps = per_head * group, key_row = j0 + warp_row + lane / 4;

  auto load_queries = [&](int it) {
    const int h = hk * group + it / per_head, i0 = (i_first + it % per_head) * RQ;
    load_tile<RQ, D>(sq + (it & 1) * BYTES_Q, q + row0 * a.qkv_stride + (int64_t)h * D, a.qkv_stride, i0, a.T);
    load_tile<RQ, D>(sdo + (it & 1) * BYTES_Q, dout + (row0 * a.Hq + h) * D, do_stride, i0, a.T);
    copy_async_commit();
  };
  load_tile<R, D>(sk, k + row0 * a.qkv_stride + (int64_t)hk * D, a.qkv_stride, j0, a.T);
  load_tile<R, D>(sv, v + row0 * a.qkv_stride + (int64_t)hk * D, a.qkv_stride, j0, a.T);
  load_queries(0);
  float dk[D / 2], dv[D / 2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0.f;
  for (int it = 0; it < steps; it++) {
    const int i0 = (i_first + it % per_head) * RQ, h = hk * group + it / per_head, stage = it & 1;
    if (it + 1 < steps) {
      load_queries(it + 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    const int64_t stats = ((int64_t)b * a.Hq + h) * a.T_pad + i0 + 2 * (lane & 3);
    float s[RQ / 2], dp[RQ / 2];
    uint32_t x[RQ / 16][4];
    warp_product_nt<D, R>(s, sk, warp_row, sq + stage * BYTES_Q);
    if (i0 < j0 + R || first_key(a, b, i0 + RQ - 1) > j0) mask_queries(s, i0 + 2 * (lane & 3), key_row, b, a);
#pragma unroll
    for (int j = 0; j < RQ / 8; j++) {
      const float2 l = *(const float2 *)(lse2 + stats + 8 * j);
#pragma unroll
      for (int e = 0; e < 4; e++) s[4 * j + e] = exp2_fast(fmaf(s[4 * j + e], a.scale_log2, e & 1 ? -l.y : -l.x));
    }
    pack_operand(x, s);
    warp_product_rn<D, RQ>(dv, x, sdo + stage * BYTES_Q);
    warp_product_nt<D, R>(dp, sv, warp_row, sdo + stage * BYTES_Q);
#pragma unroll
    for (int j = 0; j < RQ / 8; j++) {
      const float2 d = *(const float2 *)(delta + stats + 8 * j);
#pragma unroll
      for (int e = 0; e < 4; e++) s[4 * j + e] *= dp[4 * j + e] - (e & 1 ? d.y : d.x);
    }
    pack_operand(x, s);
    warp_product_rn<D, RQ>(dk, x, sq + stage * BYTES_Q);
    __syncthreads();
  }
  const float scale[2] = {a.scale, a.scale};
  scale_rows(dk, scale);
  if (table) rotate_back<D>(dk, table, key_row, a.T);
  const int64_t at = row0 * a.dqkv_stride + (int64_t)hk * D;
  store_rows<D, R>(dk_out + at, a.dqkv_stride, j0 + warp_row, a.T, smem, warp_row, dk);
  store_rows<D, R>(dv_out + at, a.dqkv_stride, j0 + warp_row, a.T, smem, warp_row, dv);
}

// Grid: one CTA a (tile of 64 queries, b, query head). Shared: Q, dO, two stages of K and V.
template <int D>
static __global__ void __launch_bounds__(128)
    attention_backward_q_kernel(bf16 *dq_out, const bf16 *dout, const bf16 *q, const bf16 *k, const bf16 *v,
                                const float *lse2, const float *delta, const float2 *table, AttentionArgs a) {
  constexpr int R = WARP_TILE, BYTES = R * D * 2;
  extern __shared__ __align__(128) unsigned char smem[];
  const uint32_t sq = smem_address(smem), sdo = sq + BYTES, sk = sdo + BYTES, sv = sk + 2 * BYTES;
  const int blocks = (a.T + R - 1) / R, lane = threadIdx.x & 31, warp_row = (threadIdx.x / 32) * 16;
  const Tile tile = tile_of(a, blockIdx.x, blocks, a.Hq);
  const int i0 = (blocks - 1 - tile.block) * R, b = tile.b, h = tile.h, hk = h / (a.Hq / a.Hkv);
  const int64_t row0 = (int64_t)b * a.T;
  k += row0 * a.qkv_stride + (int64_t)hk * D;
  v += row0 * a.qkv_stride + (int64_t)hk * D;
  const int j_last = i0 / R, j_first = first_key(a, b, i0) / R, steps = j_last - j_first + 1;
  const int row = i0 + warp_row + lane / 4;
  const int hi[2] = {row, row + 8}, lo[2] = {first_key(a, b, row), first_key(a, b, row + 8)};
  const int lo_max = first_key(a, b, i0 + R - 1);
  const int64_t stats = ((int64_t)b * a.Hq + h) * a.T_pad + row;
  const float l[2] = {lse2[stats], lse2[stats + 8]}, d[2] = {delta[stats], delta[stats + 8]};

  load_tile<R, D>(sq, q + row0 * a.qkv_stride + (int64_t)h * D, a.qkv_stride, i0, a.T);
  load_tile<R, D>(sdo, dout + (row0 * a.Hq + h) * D, (int64_t)a.Hq * D, i0, a.T);
  load_tile<R, D>(sk, k, a.qkv_stride, j_last * R, a.T);
  load_tile<R, D>(sv, v, a.qkv_stride, j_last * R, a.T);
  copy_async_commit();
  float dq[D / 2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) dq[i] = 0.f;
  for (int it = 0; it < steps; it++) {
    const int j0 = (j_last - it) * R, stage = it & 1;
    if (it + 1 < steps) {
      load_tile<R, D>(sk + (stage ^ 1) * BYTES, k, a.qkv_stride, j0 - R, a.T);
      load_tile<R, D>(sv + (stage ^ 1) * BYTES, v, a.qkv_stride, j0 - R, a.T);
      copy_async_commit();
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    float s[R / 2], dp[R / 2];
    uint32_t x[R / 16][4];
    warp_product_nt<D, R>(s, sq, warp_row, sk + stage * BYTES);
    warp_product_nt<D, R>(dp, sdo, warp_row, sv + stage * BYTES);
    if (it == 0 || j0 < lo_max) mask_keys(s, j0 + 2 * (lane & 3), lo, hi);
#pragma unroll
    for (int i = 0; i < R / 2; i++) {
      const int r = (i >> 1) & 1;
      s[i] = exp2_fast(fmaf(s[i], a.scale_log2, -l[r])) * (dp[i] - d[r]);
    }
    pack_operand(x, s);
    warp_product_rn<D, R>(dq, x, sk + stage * BYTES);
    __syncthreads();
  }
  const float scale[2] = {a.scale, a.scale};
  scale_rows(dq, scale);
  if (table) rotate_back<D>(dq, table, row, a.T);
  store_rows<D, R>(dq_out + row0 * a.dqkv_stride + (int64_t)h * D, a.dqkv_stride, i0 + warp_row, a.T, smem, warp_row,
                   dq);
}

}  // namespace attention

#endif  // GDN_CUDA_SLIDING_ATTENTION_SM80_CUH
