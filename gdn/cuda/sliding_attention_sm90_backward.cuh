// sliding_attention_sm90_backward.cuh: the two backward kernels for Hopper. Structure: sliding_attention_sm90.cuh;
// formulas: sliding_attention.cuh.
//
// defines: attention_backward_kv_sm90_kernel, attention_backward_q_sm90_kernel
#ifndef GDN_CUDA_SLIDING_ATTENTION_SM90_BACKWARD_CUH
#define GDN_CUDA_SLIDING_ATTENTION_SM90_BACKWARD_CUH

#include "sliding_attention_sm90.cuh"

namespace attention {

// A tile is (128 keys, b, kv head); runs over the query heads of the group in order and over tiles of 64 queries.
template <int D>
static __global__ void __launch_bounds__(SM90_THREADS, 1)
    attention_backward_kv_sm90_kernel(bf16 *dk_out, bf16 *dv_out, int *counter,
                                      const __grid_constant__ CUtensorMap do_map,
                                      const __grid_constant__ CUtensorMap q_map,
                                      const __grid_constant__ CUtensorMap k_map,
                                      const __grid_constant__ CUtensorMap v_map, const float *lse2, const float *delta,
                                      const float2 *table, const AttentionArgs a) {
#if SM90_BODY
  constexpr int R = SM90_ROWS, RQ = SM90_KV_QUERIES, STAGES = SM90_KV_STAGES, BYTES = R * D * 2, BYTES_Q = RQ * D * 2;
  constexpr int PRODUCER = D == 128 ? 24 : 40;  // registers a thread
  extern __shared__ unsigned char smem_raw[];
  unsigned char *smem = smem_raw + (-smem_address(smem_raw) & 1023);  // the output goes through the first BYTES of it
  const uint32_t sk = smem_address(smem) + BYTES, sv = sk + BYTES, sq = sv + BYTES, sdo = sq + STAGES * BYTES_Q;
  const uint32_t stats = sdo + STAGES * BYTES_Q, kv_full = stats + STAGES * SM90_STATS_BYTES, kv_free = kv_full + 8,
                 full = kv_free + 8, free = full + 8 * STAGES, queue_at = free + 8 * STAGES;
  const TileQueue queue = {queue_at, queue_at + 16, (volatile int *)(smem + BYTES + (queue_at + 32 - sk))};
  float *stats_p = (float *)(smem + BYTES + (stats - sk));
  const int blocks = (a.T + R - 1) / R, group = a.Hq / a.Hkv;
  if (threadIdx.x == 0) {
    barrier_init(kv_full, 1);
    barrier_init(kv_free, CONSUMER_ARRIVALS);
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, WARP_ARRIVALS);
      barrier_init(free + 8 * s, CONSUMER_ARRIVALS);
    }
    tile_queue_init(queue);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_down<PRODUCER, 252 - PRODUCER / 2>();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      Stage<STAGES> st;
      for (int t = 0;; t++) {
        int id = 0;
        if (lane == 0) id = tile_queue_take(queue, t, a.B * a.Hkv * blocks, counter);
        id = __shfl_sync(0xffffffff, id, 0);
        if (id < 0) break;
        const Tile tile = tile_of(a, id, blocks, a.Hkv);
        const int j0 = tile.block * R, b = tile.b;
        const int i_first = j0 / RQ, i_last = last_query(a, b, min(j0 + R, a.T) - 1) / RQ;
        if (lane == 0) {
          barrier_wait(kv_free, (t & 1) ^ 1);
          barrier_expect(kv_full, 2 * BYTES);
          tma_load_tile<R, D>(sk, &k_map, kv_full, tile.h, j0, b);
          tma_load_tile<R, D>(sv, &v_map, kv_full, tile.h, j0, b);
        }
        for (int h = tile.h * group; h < (tile.h + 1) * group; h++) {
          // lanes 0..15 bring lse of 4 queries each, lanes 16..31 delta
          const float *from = (lane < 16 ? lse2 : delta) + ((int64_t)b * a.Hq + h) * a.T_pad + 4 * (lane & 15);
          for (int i = i_first; i <= i_last; i++, st.advance()) {
            const uint32_t bar = full + 8 * st.index;
            const float4 x = *(const float4 *)(from + i * RQ);
            barrier_wait(free + 8 * st.index, st.parity ^ 1);
            *(float4 *)(stats_p + st.index * 2 * RQ + 4 * lane) = x;
            __syncwarp();
            if (lane == 0) {
              barrier_expect(bar, 2 * BYTES_Q);
              tma_load_tile<RQ, D>(sq + st.index * BYTES_Q, &q_map, bar, h, i * RQ, b);
              tma_load_tile<RQ, D>(sdo + st.index * BYTES_Q, &do_map, bar, h, i * RQ, b);
            } else if (WARP_ARRIVALS == 32) {
              barrier_arrive(bar);
            }
          }
        }
      }
    }
  } else {
    registers_up<PRODUCER, 252 - PRODUCER / 2>();
    const int wg = warpgroup_index() - 1, lane = threadIdx.x & 31;
    const int tile_row = wg * 64 + (threadIdx.x / 32 % 4) * 16;
    Stage<STAGES> st;
    for (int t = 0;; t++) {
      const int id = tile_queue_next(queue, t);
      if (id < 0) break;
      const Tile tile = tile_of(a, id, blocks, a.Hkv);
      const int j0 = tile.block * R, b = tile.b, w0 = j0 + wg * 64, key_row = j0 + tile_row + lane / 4;
      const int i_first = j0 / RQ, i_last = last_query(a, b, min(j0 + R, a.T) - 1) / RQ;
      // Queries that see no key of this warpgroup need no work: its own range inside the CTA's.
      const int own_first = w0 / RQ, own_last = w0 < a.T ? last_query(a, b, min(w0 + 64, a.T) - 1) / RQ : -1;
      float dk[D / 2], dv[D / 2], s[RQ / 2], dp[RQ / 2];
      uint32_t x[RQ / 16][4], y[RQ / 16][4];
#pragma unroll
      for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0.f;
      barrier_wait(kv_full, t & 1);
      int held = -1;  // stage whose last products may still be running
      int i_block = i_first - 1;
      for (int it = (i_last - i_first + 1) * group; it > 0; it--, st.advance()) {
        i_block = i_block < i_last ? i_block + 1 : i_first;
        const int i0 = i_block * RQ;
        const uint32_t tq = sq + st.index * BYTES_Q, tdo = sdo + st.index * BYTES_Q;
        const float2 *l = (const float2 *)(stats_p + st.index * 2 * RQ) + (lane & 3), *d = l + RQ / 2;
        barrier_wait(full + 8 * st.index, st.parity);
        if (i_block < own_first || i_block > own_last) {
          if (held >= 0) {  // let go of it now: the producer may need it before this warpgroup computes again
            wgmma_wait<0>();
            warp_arrive(free + 8 * held);
            held = -1;
          }
          warp_arrive(free + 8 * st.index);
          continue;
        }
        wgmma_fence();
        warpgroup_product_nt<D, R>(s, sk, wg * 64, tq);
        wgmma_commit();
        warpgroup_product_nt<D, R>(dp, sv, wg * 64, tdo);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_own(s);
        if (held >= 0) warp_arrive(free + 8 * held);
        held = st.index;
        if (i0 < w0 + 64 || first_key(a, b, i0 + RQ - 1) > w0) mask_queries(s, i0 + 2 * (lane & 3), key_row, b, a);
#pragma unroll
        for (int j = 0; j < RQ / 8; j++) {
          const float2 lj = l[4 * j];
#pragma unroll
          for (int e = 0; e < 4; e++) s[4 * j + e] = exp2_fast(fmaf(s[4 * j + e], a.scale_log2, e & 1 ? -lj.y : -lj.x));
        }
        pack_operand(x, s);
        wgmma_fence();
        warpgroup_product_rn<D, RQ>(dv, x, tdo);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_own(dp);
#pragma unroll
        for (int j = 0; j < RQ / 8; j++) {
          const float2 dj = d[4 * j];
#pragma unroll
          for (int e = 0; e < 4; e++) s[4 * j + e] *= dp[4 * j + e] - (e & 1 ? dj.y : dj.x);
        }
        pack_operand(y, s);
        wgmma_fence();
        warpgroup_product_rn<D, RQ>(dk, y, tq);
        wgmma_commit();
        wgmma_wait<1>();  // dV: frees the registers of P for the next step
        wgmma_own(dv);
      }
      wgmma_wait<0>();
      wgmma_own(dk);
      wgmma_own(dv);
      if (held >= 0) warp_arrive(free + 8 * held);
      warp_arrive(kv_free);
      const float scale[2] = {a.scale, a.scale};
      scale_rows(dk, scale);
      if (table) rotate_back<D>(dk, table, key_row, a.T);
      const int64_t at = (int64_t)b * a.T * a.dqkv_stride + (int64_t)tile.h * D;
      store_rows<D, R>(dv_out + at, a.dqkv_stride, j0 + tile_row, a.T, smem, tile_row, dv);
      store_rows<D, R>(dk_out + at, a.dqkv_stride, j0 + tile_row, a.T, smem, tile_row, dk);
    }
  }
#endif
}

// A tile is (128 queries, b, query head); runs over tiles of SM90_Q_KEYS keys from the diagonal down.
template <int D>
static __global__ void __launch_bounds__(SM90_THREADS, 1)
    attention_backward_q_sm90_kernel(bf16 *dq_out, int *counter, const __grid_constant__ CUtensorMap do_map,
                                     const __grid_constant__ CUtensorMap q_map,
                                     const __grid_constant__ CUtensorMap k_map,
                                     const __grid_constant__ CUtensorMap v_map, const float *lse2, const float *delta,
                                     const float2 *table, const AttentionArgs a) {
#if SM90_BODY
  constexpr int R = SM90_ROWS, RK = SM90_Q_KEYS, STAGES = SM90_Q_STAGES, BYTES = R * D * 2, BYTES_K = RK * D * 2;
  extern __shared__ unsigned char smem_raw[];
  unsigned char *smem = smem_raw + (-smem_address(smem_raw) & 1023);  // the output goes through the first BYTES of it
  const uint32_t sq = smem_address(smem) + BYTES, sdo = sq + BYTES, sk = sdo + BYTES, sv = sk + STAGES * BYTES_K;
  const uint32_t q_full = sv + STAGES * BYTES_K, q_free = q_full + 8, full = q_free + 8, free = full + 8 * STAGES,
                 queue_at = free + 8 * STAGES;
  const TileQueue queue = {queue_at, queue_at + 16, (volatile int *)(smem + BYTES + (queue_at + 32 - sq))};
  const int blocks = (a.T + R - 1) / R;
  if (threadIdx.x == 0) {
    barrier_init(q_full, 1);
    barrier_init(q_free, CONSUMER_ARRIVALS);
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(free + 8 * s, CONSUMER_ARRIVALS);
    }
    tile_queue_init(queue);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_down<24, 240>();
    if (threadIdx.x == 0) {
      Stage<STAGES> st;
      for (int t = 0;; t++) {
        const int id = tile_queue_take(queue, t, a.B * a.Hq * blocks, counter);
        if (id < 0) break;
        const Tile tile = tile_of(a, id, blocks, a.Hq);
        const int i0 = (blocks - 1 - tile.block) * R, b = tile.b, hk = tile.h / (a.Hq / a.Hkv);
        const int j_first = first_key(a, b, i0) / RK;
        barrier_wait(q_free, (t & 1) ^ 1);
        barrier_expect(q_full, 2 * BYTES);
        tma_load_tile<R, D>(sq, &q_map, q_full, tile.h, i0, b);
        tma_load_tile<R, D>(sdo, &do_map, q_full, tile.h, i0, b);
        for (int j = (min(i0 + R, a.T) - 1) / RK; j >= j_first; j--, st.advance()) {
          const uint32_t bar = full + 8 * st.index;
          barrier_wait(free + 8 * st.index, st.parity ^ 1);
          barrier_expect(bar, 2 * BYTES_K);
          tma_load_tile<RK, D>(sk + st.index * BYTES_K, &k_map, bar, hk, j * RK, b);
          tma_load_tile<RK, D>(sv + st.index * BYTES_K, &v_map, bar, hk, j * RK, b);
        }
      }
    }
  } else {
    registers_up<24, 240>();
    const int wg = warpgroup_index() - 1, lane = threadIdx.x & 31;
    const int tile_row = wg * 64 + (threadIdx.x / 32 % 4) * 16;
    Stage<STAGES> st;
    for (int t = 0;; t++) {
      const int id = tile_queue_next(queue, t);
      if (id < 0) break;
      const Tile tile = tile_of(a, id, blocks, a.Hq);
      const int i0 = (blocks - 1 - tile.block) * R, b = tile.b, h = tile.h, w0 = i0 + wg * 64;
      const int j_last = (min(i0 + R, a.T) - 1) / RK, steps = j_last - first_key(a, b, i0) / RK + 1;
      const int row = i0 + tile_row + lane / 4, lo_min = first_key(a, b, w0), lo_max = first_key(a, b, w0 + 63);
      const int hi[2] = {row, row + 8}, lo[2] = {first_key(a, b, row), first_key(a, b, row + 8)};
      const int64_t stats = ((int64_t)b * a.Hq + h) * a.T_pad + row;
      const float l[2] = {lse2[stats], lse2[stats + 8]}, d[2] = {delta[stats], delta[stats + 8]};
      float dq[D / 2], s[RK / 2], dp[RK / 2];
      uint32_t x[RK / 16][4];
#pragma unroll
      for (int i = 0; i < D / 2; i++) dq[i] = 0.f;
      barrier_wait(q_full, t & 1);
      int held = -1;  // stage whose last product may still be running
      for (int it = 0; it < steps; it++, st.advance()) {
        const int j0 = (j_last - it) * RK;
        const uint32_t tk = sk + st.index * BYTES_K, tv = sv + st.index * BYTES_K;
        barrier_wait(full + 8 * st.index, st.parity);
        if (j0 > w0 + 63 || j0 + RK <= lo_min) {  // no row of this warpgroup sees these keys
          if (held >= 0) {  // let go of it now: the producer may need it before this warpgroup computes again
            wgmma_wait<0>();
            warp_arrive(free + 8 * held);
            held = -1;
          }
          warp_arrive(free + 8 * st.index);
          continue;
        }
        wgmma_fence();
        warpgroup_product_nt<D, R>(s, sq, wg * 64, tk);
        wgmma_commit();
        wgmma_wait<1>();  // dQ of the step before: frees the registers of its dS
        wgmma_own(dq);
        if (held >= 0) warp_arrive(free + 8 * held);
        held = st.index;
        wgmma_fence();
        warpgroup_product_nt<D, R>(dp, sdo, wg * 64, tv);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_own(s);
        if (j0 + RK > w0 || j0 < lo_max) mask_keys(s, j0 + 2 * (lane & 3), lo, hi);
#pragma unroll
        for (int i = 0; i < RK / 2; i++) s[i] = exp2_fast(fmaf(s[i], a.scale_log2, -l[(i >> 1) & 1]));
        wgmma_wait<0>();
        wgmma_own(dp);
#pragma unroll
        for (int i = 0; i < RK / 2; i++) s[i] *= dp[i] - d[(i >> 1) & 1];
        pack_operand(x, s);
        wgmma_fence();
        warpgroup_product_rn<D, RK>(dq, x, tk);
        wgmma_commit();
      }
      wgmma_wait<0>();
      wgmma_own(dq);
      if (held >= 0) warp_arrive(free + 8 * held);
      warp_arrive(q_free);
      const float scale[2] = {a.scale, a.scale};
      scale_rows(dq, scale);
      if (table) rotate_back<D>(dq, table, row, a.T);
      store_rows<D, R>(dq_out + (int64_t)b * a.T * a.dqkv_stride + (int64_t)h * D, a.dqkv_stride, i0 + tile_row, a.T,
                       smem, tile_row, dq);
    }
  }
#endif
}

}  // namespace attention

#endif  // GDN_CUDA_SLIDING_ATTENTION_SM90_BACKWARD_CUH
