// delta_rule_scan.cuh: the two sequential kernels of the delta rule, chunk after chunk of 64 tokens.
//
// Forward, with the state H (K x V) at the chunk's start:
//     X = beta (V - 2^G (k H))    U = A X    O = scale 2^G (q H) + P U    H' = 2^Gc H + k^T (2^(Gc-G) U)
// Backward, with the gradient dH' of the state at the chunk's end:
//     dU = P^T dO + 2^(Gc-G) (k dH')    dX = A^T dU    dH = 2^Gc dH' + q^T (scale 2^G dO) - k^T (beta 2^G dX)
// (without erasure, SSD: X = U = beta V, dX = dU; with channel decay prepare has put the decays into the operand tiles:
// X = Z - E+ H, O = Q+ H + P U, H' = 2^Gc H + K-^T U, and likewise backward.)
// A block serves one sequence, one value head and a slice of 16 WARPS value columns. The state lies transposed in
// accumulators: a warp owns 16 value columns (rows of H^T) and all K, so warps never exchange anything; every product
// takes its A operand from registers and its B operand from the tiles that all warps share:
//     X^T = Z^T - H^T E^T    U^T = X^T A^T    O^T = H^T Q^T + U^T P^T    H'^T = H^T + U^T K
// Raw q and k go into the tensor cores; scalar decays only scale accumulator columns (tokens).
// Bytes per chunk and head: reads q, k (each slice again, mostly from L2), v or dO, A, P; writes O, U, H or dX, dH'.
//
// defines: delta_rule_scan_kernel, delta_rule_reverse_scan_kernel, ScanLayout
#ifndef GDN_CUDA_DELTA_RULE_SCAN_CUH
#define GDN_CUDA_DELTA_RULE_SCAN_CUH

#include "delta_rule_prepare.cuh"

enum ScanMode {
  SCAN_SSD,     // scalar decay, no erasure
  SCAN_SCALAR,  // scalar decay and erasure
  SCAN_KDA,     // channel decay, scalar beta
  SCAN_GDN2     // channel decay and erasure, write gate per value column
};

template <int K, int WARPS, int MODE>
struct ScanLayout {
  static constexpr bool ERASE = MODE != SCAN_SSD, CHANNEL = MODE >= SCAN_KDA;
  static constexpr int SLICE = WARPS * 16, THREADS = WARPS * 32, TILE = 64 * K * 2;
  // READ_E: tile of X = Z - E H; WRITE: tile of H' = H + W^T U. With scalar decay both are the raw keys.
  static constexpr int Q = 0, WRITE = TILE, READ_E = CHANNEL ? 2 * TILE : TILE, A = (CHANNEL ? 3 : 2) * TILE;
  static constexpr int P = A + TILE_BLOCK_BYTES, VALUE = P + TILE_BLOCK_BYTES, GATE = VALUE + 64 * SLICE * 2;
  static constexpr int VEC = GATE + (MODE == SCAN_GDN2 ? 64 * SLICE * 2 : 0), STAGE = VEC + 1024;
  static constexpr int STAGING = 2 * STAGE;  // 2 KiB for each warp: outputs on their way to memory
  static constexpr int BARRIER = STAGING + WARPS * 2048, BYTES = BARRIER + 16;  // a barrier for each stage
};

// Loads the tiles of one chunk in three turns: 0 q, 1 k, 2 the slice of v (or dO), A, P and the chunk's vectors.
template <int K, int WARPS, int MODE>
__device__ __forceinline__ void scan_load(int turn, uint32_t base, int stage_index, const DeltaRuleArgs &p, int b,
                                          int n, int hv, int slice0, const bf16 *value, int64_t value_stride,
                                          bool write_gate) {
  typedef ScanLayout<K, WARPS, MODE> L;
  const uint32_t stage = base + stage_index * L::STAGE, barrier = base + L::BARRIER + stage_index * 8;
  const int rows = min(64, p.T - n * 64), kh = hv / p.group;
  const int64_t token0 = (int64_t)b * p.T + n * 64, unit = ((int64_t)b * p.chunks + n) * p.HV + hv;
  if (!L::CHANNEL && turn == 0)
    load_tile_async<K, L::THREADS>(stage + L::Q, p.q + token0 * p.q_stride + kh * K, p.q_stride, rows);
  if (!L::CHANNEL && turn == 1)
    load_tile_async<K, L::THREADS>(stage + L::WRITE, p.k + token0 * p.k_stride + kh * K, p.k_stride, rows);
  if (turn == 2) {
    barrier_expect(barrier, (L::CHANNEL ? 3 * L::TILE : 0) + TILE_BLOCK_BYTES * (L::ERASE ? 2 : 1) + VEC_COUNT * 4);
    if (L::CHANNEL) load_stored_async<3 * L::TILE, L::THREADS>(stage, p.operands + unit * 3 * 64 * K, barrier);
    if (L::ERASE) load_stored_async<TILE_BLOCK_BYTES, L::THREADS>(stage + L::A, p.A + unit * 4096, barrier);
    load_stored_async<TILE_BLOCK_BYTES, L::THREADS>(stage + L::P, p.P + unit * 4096, barrier);
    load_stored_async<VEC_COUNT * 4, L::THREADS>(stage + L::VEC, p.vectors + unit * VEC_COUNT, barrier);
    if (MODE == SCAN_GDN2 && write_gate)
      load_tile_async<L::SLICE, L::THREADS>(stage + L::GATE, p.w + token0 * p.w_stride + hv * p.V + slice0, p.w_stride,
                                            rows);
    load_tile_async<L::SLICE, L::THREADS>(stage + L::VALUE, value + token0 * value_stride + hv * p.V + slice0,
                                          value_stride, rows);
    cp_async_commit();
  }
}

// The state as the A operand: 16 columns (k16 step ks) of the accumulators.
template <int K>
__device__ __forceinline__ void state_fragment(uint32_t (&a)[4], const float (&h)[K / 8][4], int ks) {
  a[0] = pack_bf16(h[2 * ks][0], h[2 * ks][1]);
  a[1] = pack_bf16(h[2 * ks][2], h[2 * ks][3]);
  a[2] = pack_bf16(h[2 * ks + 1][0], h[2 * ks + 1][1]);
  a[3] = pack_bf16(h[2 * ks + 1][2], h[2 * ks + 1][3]);
}

// The decay of a whole chunk: one number, or one a key channel.
template <int K, bool CHANNEL>
__device__ __forceinline__ void state_decay(float (&h)[K / 8][4], const float *vec, int t) {
#pragma unroll
  for (int nt = 0; nt < K / 8; nt++) {
    float2 d;
    if (CHANNEL)
      d = *(const float2 *)(vec + VEC_DECAY + nt * 8 + 2 * t);
    else
      d.x = d.y = vec[VEC_IN + 63];
    h[nt][0] *= d.x, h[nt][1] *= d.y, h[nt][2] *= d.x, h[nt][3] *= d.y;
  }
}

// Puts a state fragment into the warp's staging rows (16 value columns x 64 keys); after the fourth, writes them out.
__device__ __forceinline__ void state_store(bf16 *out, const uint32_t (&a)[4], int ks, uint32_t staging,
                                            const unsigned char *staging_ptr, int lane) {
  store_matrix_x4(a, lane, [&](int block, int r) {
    return staging + ((block & 1) * 8 + r) * 128 + (((2 * (ks & 3) + (block >> 1)) ^ r) << 4);
  });
  if ((ks & 3) == 3) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = i * 4 + (lane >> 3), piece = lane & 7;
      uint4 x = *(const uint4 *)(staging_ptr + row * 128 + (piece << 4));  // stays permuted: a stored tile
      *(uint4 *)(out + (ks >> 2) * 4096 + row * 64 + piece * 8) = x;
    }
    __syncwarp();
  }
}

// Place in a stored tile [64 tokens][64 value columns] of eight columns: 16 from v0 on, half 0 or 1.
__device__ __forceinline__ int stored_at(int token, int v0, int half) {
  return token * 64 + (((((v0 & 63) >> 3) + half) ^ (token & 7)) << 3);
}

// Packs accumulators [16 value columns x 64 tokens] into A fragments of the product over tokens.
__device__ __forceinline__ void pack_tokens(uint32_t (&a)[4][4], const float (&x)[8][4]) {
#pragma unroll
  for (int ks = 0; ks < 4; ks++) {
    a[ks][0] = pack_bf16(x[2 * ks][0], x[2 * ks][1]);
    a[ks][1] = pack_bf16(x[2 * ks][2], x[2 * ks][3]);
    a[ks][2] = pack_bf16(x[2 * ks + 1][0], x[2 * ks + 1][1]);
    a[ks][3] = pack_bf16(x[2 * ks + 1][2], x[2 * ks + 1][3]);
  }
}

// Writes packed accumulators transposed: at(token, half) gives the place of eight value columns, NULL to drop them.
template <class F>
__device__ __forceinline__ void token_store(const uint32_t (&a)[4][4], uint32_t staging,
                                            const unsigned char *staging_ptr, int lane, F at) {
#pragma unroll
  for (int ks = 0; ks < 4; ks++)
    store_matrix_x4_trans(a[ks], lane, [&](int block, int r) {
      int token = ks * 16 + (block >> 1) * 8 + r;
      return staging + token * 32 + (((block & 1) ^ ((token >> 2) & 1)) << 4);
    });
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int token = i * 16 + (lane >> 1), half = lane & 1;
    uint4 x = *(const uint4 *)(staging_ptr + token * 32 + ((half ^ ((token >> 2) & 1)) << 4));
    bf16 *to = at(token, half);
    if (to) *(uint4 *)to = x;
  }
  __syncwarp();
}

template <int K, int WARPS, int MODE>
__global__ __launch_bounds__(WARPS * 32, 1) void delta_rule_scan_kernel(DeltaRuleArgs p) {
  typedef ScanLayout<K, WARPS, MODE> L;
  extern __shared__ __align__(1024) unsigned char smem[];
  const int slice0 = blockIdx.x * L::SLICE, hv = blockIdx.y, b = blockIdx.z;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
  const TileLane ln = lane_n(lane), lk = lane_k(lane);
  const uint32_t base = smem_address(smem), staging = base + L::STAGING + warp * 2048;
  const unsigned char *staging_ptr = smem + L::STAGING + warp * 2048;
  const int v0 = slice0 + warp * 16;

  float h[K / 8][4] = {};
  if (threadIdx.x == 0) barrier_init(base + L::BARRIER), barrier_init(base + L::BARRIER + 8);
  __syncthreads();
  auto load = [&](int turn, int n, int stage_index) {
    scan_load<K, WARPS, MODE>(turn, base, stage_index, p, b, n, hv, slice0, p.v, p.v_stride, true);
  };
  for (int turn = 0; turn < 3; turn++) load(turn, 0, 0);
  for (int n = 0; n < p.chunks; n++) {
    cp_async_wait<0>();
    barrier_wait(base + L::BARRIER + (n & 1) * 8, (n >> 1) & 1);
    tiles_visible();
    __syncthreads();  // the tiles of chunk n have landed and nobody reads the other stage any more
    const uint32_t stage = base + (n & 1) * L::STAGE;
    const float *vec = (const float *)(smem + (n & 1) * L::STAGE + L::VEC);
    const int64_t unit = ((int64_t)b * p.chunks + n) * p.HV + hv;

    float x[8][4], o[8][4];
    uint32_t a[2][4];
    bf16 *h_out = p.Ht + unit * p.V * K + (v0 >> 6) * (K * 64) + (v0 & 63) * 64;
#pragma unroll
    for (int ks = 0; ks < K / 16; ks++) {
      state_fragment<K>(a[ks & 1], h, ks);
      product_begin();
      if (L::ERASE) product_nk<0, 4>(x, a[ks & 1], stage + L::READ_E, ks * 16, ln, ks > 0);
      product_nk<0, 4>(o, a[ks & 1], stage + L::Q, ks * 16, ln, ks > 0);
      product_end();
      state_store(h_out, a[ks & 1], ks, staging, staging_ptr, lane);
      if (ks < 3 && n + 1 < p.chunks) load(ks, n + 1, (n + 1) & 1);  // while the tensor cores work
      product_wait<1>();                                             // the fragment before this one may now be replaced
    }
    product_wait<0>();
    accumulators_ready(x);
    accumulators_ready(o);
    // X = beta (v - 2^G (k H)), O = scale 2^G (q H); with channel decay X = z - E H, O as it is
#pragma unroll
    for (int np = 0; np < 4; np++) {
      uint32_t v[4], w[4];
      ldmatrix_x4_trans(v, tile_at(stage + L::VALUE, ln, np * 16, warp * 16));
      if (MODE == SCAN_GDN2) ldmatrix_x4_trans(w, tile_at(stage + L::GATE, ln, np * 16, warp * 16));
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int nt = 2 * np + e;
        float z[4] = {unpack_lo(v[2 * e]), unpack_hi(v[2 * e]), unpack_lo(v[2 * e + 1]), unpack_hi(v[2 * e + 1])};
        float2 beta = *(const float2 *)(vec + VEC_BETA + nt * 8 + 2 * t);
        if (L::CHANNEL) {
#pragma unroll
          for (int c = 0; c < 4; c++) {
            float gate = c & 1 ? beta.y : beta.x;
            if (MODE == SCAN_GDN2)
              gate = sigmoid(c & 1 ? unpack_hi(w[2 * e + (c >> 1)]) : unpack_lo(w[2 * e + (c >> 1)]));
            x[nt][c] = gate * z[c] - x[nt][c];
          }
        } else {
          float2 in = *(const float2 *)(vec + VEC_IN + nt * 8 + 2 * t);
          if (!L::ERASE) x[nt][0] = x[nt][1] = x[nt][2] = x[nt][3] = 0.0f;
          x[nt][0] = beta.x * (z[0] - in.x * x[nt][0]);
          x[nt][1] = beta.y * (z[1] - in.y * x[nt][1]);
          x[nt][2] = beta.x * (z[2] - in.x * x[nt][2]);
          x[nt][3] = beta.y * (z[3] - in.y * x[nt][3]);
          in.x *= p.scale, in.y *= p.scale;
          o[nt][0] *= in.x, o[nt][1] *= in.y, o[nt][2] *= in.x, o[nt][3] *= in.y;
        }
      }
    }
    uint32_t ua[4][4];
    if (L::ERASE) {  // U = A X
      pack_tokens(ua, x);
      product_begin();
      product_nk<0, 4>(x, ua[0], stage + L::A, 0, ln, 0);
      product_nk<1, 4>(x, ua[1], stage + L::A, 16, ln);
      product_nk<2, 4>(x, ua[2], stage + L::A, 32, ln);
      product_nk<3, 4>(x, ua[3], stage + L::A, 48, ln);
      product_end();
      product_wait<0>();
      accumulators_ready(x);
    }
    pack_tokens(ua, x);
    product_begin();  // O += P U
    product_nk<0, 4>(o, ua[0], stage + L::P, 0, ln);
    product_nk<1, 4>(o, ua[1], stage + L::P, 16, ln);
    product_nk<2, 4>(o, ua[2], stage + L::P, 32, ln);
    product_nk<3, 4>(o, ua[3], stage + L::P, 48, ln);
    product_end();
    bf16 *u_out = p.U + unit * 64 * p.V + (v0 >> 6) * 4096;
    token_store(ua, staging, staging_ptr, lane,
                [&](int token, int half) { return u_out + stored_at(token, v0, half); });
    // H' = 2^Gc H + k^T (2^(Gc-G) U)
    if (!L::CHANNEL)
#pragma unroll
      for (int nt = 0; nt < 8; nt++) {
        float2 out = *(const float2 *)(vec + VEC_OUT + nt * 8 + 2 * t);
        x[nt][0] *= out.x, x[nt][1] *= out.y, x[nt][2] *= out.x, x[nt][3] *= out.y;
      }
    state_decay<K, L::CHANNEL>(h, vec, t);
    product_wait<0>();
    accumulators_ready(o);
    pack_tokens(ua, x);
    product_begin();
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
#pragma unroll
      for (int block = 0; block < K / 64; block++)
        product_kn<0, 4>(h + block * 8, ua[ks], stage + L::WRITE + block * TILE_BLOCK_BYTES, ks * 16, lk);
    product_end();
    uint32_t oa[4][4];
    pack_tokens(oa, o);
    bf16 *o_out = p.o + ((int64_t)b * p.T + n * 64) * p.o_stride + hv * p.V + v0;
    const int rows = p.T - n * 64;
    token_store(oa, staging, staging_ptr, lane,
                [&](int token, int half) { return token < rows ? o_out + token * p.o_stride + half * 8 : NULL; });
    product_wait<0>();
    accumulators_ready(h);
  }
}

template <int K, int WARPS, int MODE>
__global__ __launch_bounds__(WARPS * 32, 1) void delta_rule_reverse_scan_kernel(DeltaRuleArgs p) {
  typedef ScanLayout<K, WARPS, MODE> L;
  extern __shared__ __align__(1024) unsigned char smem[];
  const int slice0 = blockIdx.x * L::SLICE, hv = blockIdx.y, b = blockIdx.z;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
  const TileLane ln = lane_n(lane), lk = lane_k(lane);
  const uint32_t base = smem_address(smem), staging = base + L::STAGING + warp * 2048;
  const unsigned char *staging_ptr = smem + L::STAGING + warp * 2048;
  const int v0 = slice0 + warp * 16;

  float h[K / 8][4] = {};
  if (threadIdx.x == 0) barrier_init(base + L::BARRIER), barrier_init(base + L::BARRIER + 8);
  __syncthreads();
  auto load = [&](int turn, int n, int stage_index) {
    scan_load<K, WARPS, MODE>(turn, base, stage_index, p, b, n, hv, slice0, p.d_o, p.d_o_stride, false);
  };
  for (int turn = 0; turn < 3; turn++) load(turn, p.chunks - 1, 0);
  for (int i = 0; i < p.chunks; i++) {
    const int n = p.chunks - 1 - i;
    cp_async_wait<0>();
    barrier_wait(base + L::BARRIER + (i & 1) * 8, (i >> 1) & 1);
    tiles_visible();
    __syncthreads();
    const uint32_t stage = base + (i & 1) * L::STAGE;
    const float *vec = (const float *)(smem + (i & 1) * L::STAGE + L::VEC);
    const int64_t unit = ((int64_t)b * p.chunks + n) * p.HV + hv;

    // dU = 2^(Gc-G) (k dH') + P^T dO
    float x[8][4];
    uint32_t a[2][4];
    bf16 *h_out = p.dHt + unit * p.V * K + (v0 >> 6) * (K * 64) + (v0 & 63) * 64;
#pragma unroll
    for (int ks = 0; ks < K / 16; ks++) {
      state_fragment<K>(a[ks & 1], h, ks);
      product_begin();
      product_nk<0, 4>(x, a[ks & 1], stage + L::WRITE, ks * 16, ln, ks > 0);
      product_end();
      state_store(h_out, a[ks & 1], ks, staging, staging_ptr, lane);
      if (ks < 3 && n > 0) load(ks, n - 1, (i + 1) & 1);
      product_wait<1>();
    }
    uint32_t da[4][4];
#pragma unroll
    for (int ks = 0; ks < 4; ks++) ldmatrix_x4_trans(da[ks], tile_at(stage + L::VALUE, ln, ks * 16, warp * 16));
    product_wait<0>();
    accumulators_ready(x);
    if (!L::CHANNEL)
#pragma unroll
      for (int nt = 0; nt < 8; nt++) {
        float2 out = *(const float2 *)(vec + VEC_OUT + nt * 8 + 2 * t);
        x[nt][0] *= out.x, x[nt][1] *= out.y, x[nt][2] *= out.x, x[nt][3] *= out.y;
      }
    product_begin();
    product_kn<0, 1>(x, da[0], stage + L::P, 0, lk);
    product_kn<0, 2>(x, da[1], stage + L::P, 16, lk);
    product_kn<0, 3>(x, da[2], stage + L::P, 32, lk);
    product_kn<0, 4>(x, da[3], stage + L::P, 48, lk);
    product_end();
    product_wait<0>();
    accumulators_ready(x);
    uint32_t xa[4][4];
    pack_tokens(xa, x);
    if (L::ERASE) {  // dX = A^T dU
      product_begin();
      product_kn<0, 1>(x, xa[0], stage + L::A, 0, lk, 0);
      product_kn<0, 2>(x, xa[1], stage + L::A, 16, lk);
      product_kn<0, 3>(x, xa[2], stage + L::A, 32, lk);
      product_kn<0, 4>(x, xa[3], stage + L::A, 48, lk);
      product_end();
    }
    // dH = 2^Gc dH' + q^T (scale 2^G dO) - k^T (beta 2^G dX)
    if (!L::CHANNEL)
#pragma unroll
      for (int nt = 0; nt < 8; nt++) {
        float2 in = *(const float2 *)(vec + VEC_IN + nt * 8 + 2 * t);
        in.x *= p.scale, in.y *= p.scale;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          uint32_t &d = da[nt >> 1][(nt & 1) * 2 + e];
          d = pack_bf16(unpack_lo(d) * in.x, unpack_hi(d) * in.y);
        }
      }
    state_decay<K, L::CHANNEL>(h, vec, t);
    product_wait<0>();
    accumulators_ready(x);
    product_begin();
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
#pragma unroll
      for (int block = 0; block < K / 64; block++)
        product_kn<0, 4>(h + block * 8, da[ks], stage + L::Q + block * TILE_BLOCK_BYTES, ks * 16, lk);
    product_end();
    if (L::ERASE) pack_tokens(xa, x);
    bf16 *x_out = p.dX + unit * 64 * p.V + (v0 >> 6) * 4096;
    token_store(xa, staging, staging_ptr, lane,
                [&](int token, int half) { return x_out + stored_at(token, v0, half); });
    if (L::ERASE) {
#pragma unroll
      for (int nt = 0; nt < 8; nt++) {
        float2 in = *(const float2 *)(vec + VEC_IN + nt * 8 + 2 * t),
               beta = *(const float2 *)(vec + VEC_BETA + nt * 8 + 2 * t);
        float ex = L::CHANNEL ? -1.0f : -beta.x * in.x, ey = L::CHANNEL ? -1.0f : -beta.y * in.y;
        x[nt][0] *= ex, x[nt][1] *= ey, x[nt][2] *= ex, x[nt][3] *= ey;
      }
      pack_tokens(xa, x);
      product_begin();
#pragma unroll
      for (int ks = 0; ks < 4; ks++)
#pragma unroll
        for (int block = 0; block < K / 64; block++)
          product_kn<0, 4>(h + block * 8, xa[ks], stage + L::READ_E + block * TILE_BLOCK_BYTES, ks * 16, lk);
      product_end();
    }
    product_wait<0>();
    accumulators_ready(h);
  }
}

#endif  // GDN_CUDA_DELTA_RULE_SCAN_CUH
