// sliding_attention_sm90.cuh: the attention kernels for Hopper (sm_90a): wgmma, TMA, one producer warp and two consumer
// warpgroups a CTA (the structure of Shah et al. 2024, FlashAttention-3). Same algorithm, masks and stores as
// sliding_attention.cuh.
//
// Every kernel: one CTA a multiprocessor takes tiles of 128 rows from a counter until none is left, so that the loads
// of a tile run under the end of the one before (which CTA gets a tile has no influence on its result). Warpgroup 0
// gives its registers away; one warp of it takes tiles and issues loads. Warpgroups 1 and 2 own 64 rows each. Results
// of one product become the register operand of the next (P, dS never touch shared memory): the key-side backward
// therefore computes S^T = K Q^T and dP^T = V dO^T.
//
// defines: attention_forward_sm90_kernel, the sizes and shared memory of all three kernels, TileQueue, Stage
#ifndef GDN_CUDA_SLIDING_ATTENTION_SM90_CUH
#define GDN_CUDA_SLIDING_ATTENTION_SM90_CUH

#include "sliding_attention.cuh"

namespace attention {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "compile for sm_90a (-gencode=arch=compute_90a,code=sm_90a), not sm_90: wgmma needs it"
#endif

constexpr int SM90_THREADS = 384, SM90_ROWS = 128;  // rows: queries (forward, dQ) or keys (dK, dV) a CTA
constexpr int SM90_FORWARD_STAGES = 2, SM90_Q_STAGES = 2, SM90_Q_KEYS = 128, SM90_KV_STAGES = 3, SM90_KV_QUERIES = 64;
constexpr int SM90_STATS_BYTES = 2 * SM90_KV_QUERIES * 4;  // lse and delta of one step

template <int D>
constexpr int forward_sm90_bytes() {
  return 1024 + SM90_ROWS * D * 2 * (2 + 2 * SM90_FORWARD_STAGES) + 256;
}
template <int D>
constexpr int backward_kv_sm90_bytes() {
  return 1024 + 3 * SM90_ROWS * D * 2 + SM90_KV_STAGES * (2 * SM90_KV_QUERIES * D * 2 + SM90_STATS_BYTES) + 256;
}
template <int D>
constexpr int backward_q_sm90_bytes() {
  return 1024 + 3 * SM90_ROWS * D * 2 + SM90_Q_STAGES * 2 * SM90_Q_KEYS * D * 2 + 256;
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SM90_BODY 1
// The CTA starts with 3 x 168 registers a thread column and cannot get more: PRODUCER + 2 CONSUMER must not exceed 504,
// or registers_up waits for ever.
template <int PRODUCER, int CONSUMER>
__device__ __forceinline__ void registers_down() {
  static_assert(PRODUCER + 2 * CONSUMER <= 504, "more registers than the CTA has");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER));
}
template <int PRODUCER, int CONSUMER>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER));
}
// A shuffle tells the compiler that the value is the same in a warp: branches on it then do not break up wgmma chains.
__device__ __forceinline__ int warpgroup_index() { return __shfl_sync(0xffffffff, threadIdx.x / 128, 0); }
// Turns between the two consumer warpgroups: turn_wait(wg) returns when the other one has called turn_pass(wg).
__device__ __forceinline__ void turn_wait(int wg) { asm volatile("bar.sync %0, 256;" ::"r"(1 + wg) : "memory"); }
__device__ __forceinline__ void turn_pass(int wg) { asm volatile("bar.arrive %0, 256;" ::"r"(1 + wg) : "memory"); }
// One arrival a warp, behind a __syncwarp, speaks for all its lanes. compute-sanitizer's racecheck follows arrivals of
// single threads only and takes the other lanes' accesses for races; built with -DATTENTION_RACECHECK every lane
// arrives.
#ifdef ATTENTION_RACECHECK
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif
constexpr int CONSUMER_ARRIVALS = 8 * WARP_ARRIVALS;
__device__ __forceinline__ void warp_arrive(uint32_t bar) {
  __syncwarp();
  if (WARP_ARRIVALS == 32 || (threadIdx.x & 31) == 0) barrier_arrive(bar);
}

// The queue of tiles inside a CTA: two places, each with a barrier for full and one for free.
struct TileQueue {
  uint32_t full, free;  // two barriers each
  volatile int *place;  // two ints
};
__device__ __forceinline__ void tile_queue_init(const TileQueue &queue) {
  for (int i = 0; i < 2; i++) barrier_init(queue.full + 8 * i, 1), barrier_init(queue.free + 8 * i, CONSUMER_ARRIVALS);
}
// One thread: takes the t-th tile of this CTA and tells the consumers; -1 when all `total` are taken.
__device__ __forceinline__ int tile_queue_take(const TileQueue &queue, int t, int total, int *counter) {
  const int i = t & 1, next = t == 0 ? (int)blockIdx.x : (int)gridDim.x + atomicAdd(counter, 1);
  barrier_wait(queue.free + 8 * i, ((t >> 1) & 1) ^ 1);
  const int id = next < total ? next : -1;
  queue.place[i] = id;
  barrier_arrive(queue.full + 8 * i);
  return id;
}
// All consumer warps: the t-th tile of this CTA or -1.
__device__ __forceinline__ int tile_queue_next(const TileQueue &queue, int t) {
  const int i = t & 1;
  barrier_wait(queue.full + 8 * i, (t >> 1) & 1);
  const int id = __shfl_sync(0xffffffff, queue.place[i], 0);
  warp_arrive(queue.free + 8 * i);
  return id;
}
#else
#define SM90_BODY 0
#endif

// A place in a ring of stages: index, and the parity that a full barrier has once it is filled. Waiting for a free
// barrier with the other parity passes at once the first time round.
template <int STAGES>
struct Stage {
  int index = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++index == STAGES) index = 0, parity ^= 1;
  }
};

// A tile is (128 queries, b, query head); runs over tiles of 128 keys from the diagonal down.
template <int D>
static __global__ void __launch_bounds__(SM90_THREADS, 1)
    attention_forward_sm90_kernel(bf16 *o_out, float *lse, int *counter, const __grid_constant__ CUtensorMap q_map,
                                  const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                                  const AttentionArgs a) {
#if SM90_BODY
  constexpr int R = SM90_ROWS, STAGES = SM90_FORWARD_STAGES, BYTES = R * D * 2;
  extern __shared__ unsigned char smem_raw[];
  unsigned char *smem = smem_raw + (-smem_address(smem_raw) & 1023);  // the output goes through the first BYTES of it
  const uint32_t sq = smem_address(smem) + BYTES, sk = sq + BYTES, sv = sk + STAGES * BYTES;
  const uint32_t q_full = sv + STAGES * BYTES, q_free = q_full + 8, k_full = q_free + 8, v_full = k_full + 8 * STAGES,
                 k_free = v_full + 8 * STAGES, v_free = k_free + 8 * STAGES, queue_at = v_free + 8 * STAGES;
  const TileQueue queue = {queue_at, queue_at + 16, (volatile int *)(smem + BYTES + (queue_at + 32 - sq))};
  const int blocks = (a.T + R - 1) / R;
  if (threadIdx.x == 0) {
    barrier_init(q_full, 1);
    barrier_init(q_free, CONSUMER_ARRIVALS);
    for (int s = 0; s < STAGES; s++) {
      barrier_init(k_full + 8 * s, 1);
      barrier_init(v_full + 8 * s, 1);
      barrier_init(k_free + 8 * s, CONSUMER_ARRIVALS);
      barrier_init(v_free + 8 * s, CONSUMER_ARRIVALS);
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
        const int i0 = (blocks - 1 - tile.block) * R, hk = tile.h / (a.Hq / a.Hkv);
        const int j_first = first_key(a, tile.b, i0) / R;
        barrier_wait(q_free, (t & 1) ^ 1);
        barrier_expect(q_full, BYTES);
        tma_load_tile<R, D>(sq, &q_map, q_full, tile.h, i0, tile.b);
        for (int j = i0 / R; j >= j_first; j--, st.advance()) {
          barrier_wait(k_free + 8 * st.index, st.parity ^ 1);
          barrier_expect(k_full + 8 * st.index, BYTES);
          tma_load_tile<R, D>(sk + st.index * BYTES, &k_map, k_full + 8 * st.index, hk, j * R, tile.b);
          barrier_wait(v_free + 8 * st.index, st.parity ^ 1);
          barrier_expect(v_full + 8 * st.index, BYTES);
          tma_load_tile<R, D>(sv + st.index * BYTES, &v_map, v_full + 8 * st.index, hk, j * R, tile.b);
        }
      }
    }
  } else {
    registers_up<24, 240>();
    const int wg = warpgroup_index() - 1, lane = threadIdx.x & 31;
    const int tile_row = wg * 64 + (threadIdx.x / 32 % 4) * 16;
    if (wg == 1) turn_pass(0);
    Stage<STAGES> st;
    for (int t = 0;; t++) {
      const int id = tile_queue_next(queue, t);
      if (id < 0) break;
      const Tile tile = tile_of(a, id, blocks, a.Hq);
      const int i0 = (blocks - 1 - tile.block) * R, b = tile.b, h = tile.h;
      const int j_last = i0 / R, steps = j_last - first_key(a, b, i0) / R + 1;
      const int row = i0 + tile_row + lane / 4, lo_max = first_key(a, b, i0 + wg * 64 + 63);
      const int hi[2] = {row, row + 8}, lo[2] = {first_key(a, b, row), first_key(a, b, row + 8)};
      float o[D / 2], s[R / 2], m[2] = {-CUDART_INF_F, -CUDART_INF_F}, sum[2] = {0.f, 0.f}, factor[2];
      uint32_t p[R / 16][4];
#pragma unroll
      for (int i = 0; i < D / 2; i++) o[i] = 0.f;
      barrier_wait(q_full, t & 1);
      barrier_wait(k_full + 8 * st.index, st.parity);
      wgmma_fence();
      warpgroup_product_nt<D, R>(s, sq, wg * 64, sk + st.index * BYTES);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_own(s);
      warp_arrive(k_free + 8 * st.index);
      if (steps == 1) warp_arrive(q_free);
      mask_keys(s, j_last * R + 2 * (lane & 3), lo, hi);
      softmax_step(s, m, sum, factor, a.scale_log2);
      pack_operand(p, s);
      // S of this step and P V of the step before are in flight together; the softmax runs while P V does. The
      // warpgroups take turns at issuing, so that one's softmax falls into the other's products.
      for (int it = 1; it < steps; it++) {
        const Stage<STAGES> before = st;
        const int j0 = (j_last - it) * R;
        st.advance();
        barrier_wait(k_full + 8 * st.index, st.parity);
        turn_wait(wg);
        wgmma_fence();
        warpgroup_product_nt<D, R>(s, sq, wg * 64, sk + st.index * BYTES);
        wgmma_commit();
        barrier_wait(v_full + 8 * before.index, before.parity);
        wgmma_fence();
        warpgroup_product_rn<D, R>(o, p, sv + before.index * BYTES);
        wgmma_commit();
        turn_pass(1 - wg);
        wgmma_wait<1>();
        wgmma_own(s);
        warp_arrive(k_free + 8 * st.index);
        if (it == steps - 1) warp_arrive(q_free);
        if (j0 < lo_max) mask_keys(s, j0 + 2 * (lane & 3), lo, hi);
        softmax_step(s, m, sum, factor, a.scale_log2);
        wgmma_wait<0>();
        wgmma_own(o);
        warp_arrive(v_free + 8 * before.index);
        scale_rows(o, factor);
        pack_operand(p, s);
      }
      barrier_wait(v_full + 8 * st.index, st.parity);
      wgmma_fence();
      warpgroup_product_rn<D, R>(o, p, sv + st.index * BYTES);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_own(o);
      warp_arrive(v_free + 8 * st.index);
      st.advance();
      softmax_finish<D>(o, m, sum, lse + ((int64_t)b * a.Hq + h) * a.T, row, a);
      store_rows<D, R>(o_out + ((int64_t)b * a.T * a.Hq + h) * D, (int64_t)a.Hq * D, i0 + tile_row, a.T, smem, tile_row,
                       o);
    }
    if (wg == 0) turn_wait(0);  // takes the turn that is left over
  }
#endif
}

}  // namespace attention

#endif  // GDN_CUDA_SLIDING_ATTENTION_SM90_CUH
