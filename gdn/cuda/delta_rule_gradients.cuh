// delta_rule_gradients.cuh: gradients of the delta rule's inputs, all chunks in parallel.
//
// With U, H (forward scan) and dX, dH' (reverse scan) of a chunk, D_ij = 2^(G_i - G_j) for i >= j:
//     S = scale lower( dO U^T o D )       N = -strictly lower( dX U^T o D )
//     dq = scale 2^G (dO H^T) + S k       de = -2^G (dX H^T) + N k
//     dk~ = 2^(Gc-G) (U dH'^T) + S^T q + (beta N)^T k        dk = dk~ + beta de
//     dv = beta dX        dbeta = k . de + v . dX
//     dG = q . dq + beta k . de - k . dk~,  dG_63 += 2^Gc <H, dH'> + sum_j k_j . 2^(Gc-G_j) (U dH'^T)_j
// and dg_t is the sum of dG_i over i >= t of the chunk and document.
// A work item is a chunk, a key head and PART key columns; a block walks over the value heads of the key head and over
// slices of 64 value columns, then goes on to its next item, whose first slices are already on their way. Two
// warpgroups share the key columns (and the columns of dO U^T); all operands are shared tiles. The row sums over key
// columns come out as one share per part; delta_rule_gates_kernel adds them in order and goes on to the logits. -dX U^T
// is used in place of -A^T dA A^T: it spares two products and two roundings. Bytes per chunk and head: reads dO, dX, U
// (each part again), H, dH', q, k, v; writes dq, dk, dv.
//
// defines: delta_rule_gradients_kernel, GradientsLayout, delta_rule_gates_kernel, delta_rule_gate_parameters_kernel
#ifndef GDN_CUDA_DELTA_RULE_GRADIENTS_CUH
#define GDN_CUDA_DELTA_RULE_GRADIENTS_CUH

#include "delta_rule_prepare.cuh"

template <int PART, bool GROUPED>
struct GradientsLayout {
  static constexpr int THREADS = 256;
  static constexpr int STAGES = PART == 128 && !GROUPED ? 3 : 2;
  static constexpr int DO = 0, DX = TILE_BLOCK_BYTES, U = 2 * TILE_BLOCK_BYTES, H = 3 * TILE_BLOCK_BYTES;
  static constexpr int DH = H + 64 * PART * 2, VEC = DH + 64 * PART * 2, STAGE = VEC + 1024;
  static constexpr int Q = STAGES * STAGE, KEY = Q + 64 * PART * 2, SUMS = KEY + 64 * PART * 2;
  // row sums [2 warpgroups][64 rows][3], v . dX [64], scalars [16], documents [64]
  static constexpr int ROW_V = SUMS + 2 * 64 * 3 * 4, SCALARS = ROW_V + 256, DOC = SCALARS + 64, BARRIER = DOC + 256,
                       GROUP = BARRIER + 64;
  static constexpr int BYTES = GROUP + (GROUPED ? 2 * 64 * PART * 4 : 0);
  // after the last slice its stage holds the three score matrices as bf16 tiles
  static constexpr int S = 0, N = TILE_BLOCK_BYTES, BN = 2 * TILE_BLOCK_BYTES;
};

__device__ __forceinline__ float sum_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float sum_warp(float x) {
#pragma unroll
  for (int off = 16; off; off >>= 1) x += __shfl_xor_sync(0xffffffffu, x, off);
  return x;
}
// <x, y> of packed pairs, added to sum
__device__ __forceinline__ float dot_bf16(uint32_t x, uint32_t y, float sum) {
  return sum + unpack_lo(x) * unpack_lo(y) + unpack_hi(x) * unpack_hi(y);
}

template <int PART, bool GROUPED, bool ERASE, bool CHANNEL>
__global__ __launch_bounds__(256, PART == 64 && !GROUPED ? 2 : 1) void delta_rule_gradients_kernel(DeltaRuleArgs p) {
  typedef GradientsLayout<PART, GROUPED> L;
  constexpr int NT = PART / 16;  // accumulator tiles of 8 key columns a warp
  extern __shared__ __align__(1024) unsigned char smem[];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int wg = warp >> 2, m0 = (warp & 3) * 16, n0 = wg * (PART / 2);
  const TileLane ln = lane_n(lane), lk = lane_k(lane);
  const uint32_t base = smem_address(smem);
  const int parts = p.K / PART, slices = p.V / 64, total = slices * p.group;
  const int items = p.B * p.chunks * p.H * parts;
  const int64_t units = (int64_t)p.B * p.chunks * p.HV;
  float *sums = (float *)(smem + L::SUMS), *row_v = (float *)(smem + L::ROW_V), *scalars = (float *)(smem + L::SCALARS);
  int *doc = (int *)(smem + L::DOC);
  float *group = (float *)(smem + L::GROUP);  // dq, dk of the value heads so far: every thread its own accumulators

  // What is loaded next: an item's place, and pointers to the current value head's first slice.
  int next_item = blockIdx.x, next_it = 0, next_slice = 0, next_stage = 0;
  const bf16 *from_do, *from_dx, *from_u, *from_h, *from_dh;
  const float *from_vec;
  int next_rows;
  auto load_next = [&] {
    if (next_item < items) {
      if (next_slice == 0) {
        const int part = next_item % parts, rest = next_item / parts, kh = rest % p.H, chunk = rest / p.H;
        const int b = chunk / p.chunks, n = chunk - b * p.chunks, hv = kh * p.group + next_it / slices;
        const int64_t unit = (int64_t)chunk * p.HV + hv;
        from_do = p.d_o + ((int64_t)b * p.T + n * 64) * p.d_o_stride + hv * p.V;
        from_dx = p.dX + unit * 64 * p.V, from_u = p.U + unit * 64 * p.V;
        from_h = p.Ht + unit * p.V * p.K + part * PART * 64, from_dh = p.dHt + unit * p.V * p.K + part * PART * 64;
        from_vec = p.vectors + unit * VEC_COUNT;
        next_rows = min(64, p.T - n * 64);
      }
      const uint32_t stage = base + next_stage * L::STAGE, barrier = base + L::BARRIER + next_stage * 8;
      barrier_expect(barrier, 2 * TILE_BLOCK_BYTES + 2 * 64 * PART * 2 + VEC_COUNT * 4);
      load_stored_async<TILE_BLOCK_BYTES, 256>(stage + L::DX, from_dx + next_slice * 4096, barrier);
      load_stored_async<TILE_BLOCK_BYTES, 256>(stage + L::U, from_u + next_slice * 4096, barrier);
      load_stored_async<64 * PART * 2, 256>(stage + L::H, from_h + (int64_t)next_slice * 64 * p.K, barrier);
      load_stored_async<64 * PART * 2, 256>(stage + L::DH, from_dh + (int64_t)next_slice * 64 * p.K, barrier);
      load_stored_async<VEC_COUNT * 4, 256>(stage + L::VEC, from_vec, barrier);
      load_tile_async<64, 256>(stage + L::DO, from_do + next_slice * 64, p.d_o_stride, next_rows);
    }
    cp_async_commit();
    if (++next_slice == slices) next_slice = 0;
    if (++next_it == total) next_it = 0, next_item += gridDim.x;
    if (++next_stage == L::STAGES) next_stage = 0;
  };
  if (tid == 0)
    for (int s = 0; s < L::STAGES; s++) barrier_init(base + L::BARRIER + s * 8);
  __syncthreads();
#pragma unroll
  for (int s = 0; s < L::STAGES - 1; s++) load_next();

  int stage_index = 0;
  float rq[NT][4], re[NT][4], rk[NT][4], dp[4][4], dn[4][4];
  int parity = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int part = item % parts, rest = item / parts, kh = rest % p.H, chunk = rest / p.H, k0 = part * PART;
    const int b = chunk / p.chunks, n = chunk - b * p.chunks;
    const int t0 = n * 64, rows = min(64, p.T - t0);
    const int64_t token0 = (int64_t)b * p.T + t0;
    float hh = 0.0f, vx[2] = {}, hd[CHANNEL ? PART / 64 : 1][8] = {};
    for (int it = 0; it < total; it++) {
      const int hvi = it / slices, hv = kh * p.group + hvi, slice = it % slices;
      const int64_t unit = (int64_t)chunk * p.HV + hv;
      cp_async_wait<L::STAGES - 2>();
      barrier_wait(base + L::BARRIER + stage_index * 8, parity);
      tiles_visible();
      __syncthreads();
      const int stage_offset = stage_index * L::STAGE;
      if (++stage_index == L::STAGES) stage_index = 0, parity ^= 1;
      const uint32_t stage = base + stage_offset;
      const float *vec = (const float *)(smem + stage_offset + L::VEC);

      // This part's share of the value columns, for dv and v . dX: asked for now, used after the products have started.
      const bool own_v = slice % parts == part, write_gate = CHANNEL && p.write_columns;
      uint4 v_piece[2], w_piece[2];
      if (own_v)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          int row = (tid >> 3) + 32 * i;
          v_piece[i] = row < rows
                           ? *(const uint4 *)(p.v + (token0 + row) * p.v_stride + hv * p.V + slice * 64 + (tid & 7) * 8)
                           : make_uint4(0, 0, 0, 0);
          if (write_gate && row < rows)
            w_piece[i] = *(const uint4 *)(p.w + (token0 + row) * p.w_stride + hv * p.V + slice * 64 + (tid & 7) * 8);
        }
      product_begin();
#pragma unroll
      for (int ks = 0; ks < 4; ks++) {
        const int add = slice > 0 || ks > 0;
        const uint32_t H = stage + L::H + (n0 >> 6) * TILE_BLOCK_BYTES,
                       dH = stage + L::DH + (n0 >> 6) * TILE_BLOCK_BYTES;
        product_tiles<NT, 0, 1>(rq, stage + L::DO, H, n0 & 63, ks, add, m0, ln, lk);
        if (ERASE) product_tiles<NT, 0, 1>(re, stage + L::DX, H, n0 & 63, ks, add, m0, ln, lk);
        product_tiles<NT, 0, 1>(rk, stage + L::U, dH, n0 & 63, ks, add, m0, ln, lk);
        product_tiles<4, 0, 0>(dp, stage + L::DO, stage + L::U, wg * 32, ks, add, m0, ln, lk);
        if (ERASE) product_tiles<4, 0, 0>(dn, stage + L::DX, stage + L::U, wg * 32, ks, add, m0, ln, lk);
      }
      product_end();
      // While the tensor cores work: the next loads, with the first slice q and k too.
      if (!CHANNEL && it == 0) {
        load_tile_async<PART, 256>(base + L::Q, p.q + token0 * p.q_stride + kh * p.K + k0, p.q_stride, rows);
        load_tile_async<PART, 256>(base + L::KEY, p.k + token0 * p.k_stride + kh * p.K + k0, p.k_stride, rows);
        if (tid < 64) doc[tid] = p.doc_start ? max(p.doc_start[token0 + min(tid, rows - 1)] - t0, 0) : 0;
      }
      load_next();
      // Meanwhile: <H, dH'>, and this part's share of the value columns for dv and v . dX.
      if (own_v) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          int row = (tid >> 3) + 32 * i, piece = tid & 7;
          uint4 x = *(const uint4 *)(smem + stage_offset + L::DX + row * 128 + ((piece ^ (row & 7)) << 4));
          if (row < rows) {
            const uint32_t *xs = &x.x, *vs = &v_piece[i].x, *ws = &w_piece[i].x;
            uint32_t out[4];
            float beta = vec[VEC_BETA + row];
            if (write_gate) {
              uint32_t dw[4];
#pragma unroll
              for (int e = 0; e < 4; e++) {
                float w0 = sigmoid(unpack_lo(ws[e])), w1 = sigmoid(unpack_hi(ws[e]));
                float x0 = w0 * unpack_lo(xs[e]), x1 = w1 * unpack_hi(xs[e]);
                out[e] = pack_bf16(x0, x1);
                dw[e] = pack_bf16(unpack_lo(vs[e]) * x0 * (1.0f - w0), unpack_hi(vs[e]) * x1 * (1.0f - w1));
              }
              *(uint4 *)(p.dw + (token0 + row) * p.dw_stride + hv * p.V + slice * 64 + piece * 8) =
                  make_uint4(dw[0], dw[1], dw[2], dw[3]);
            } else {
#pragma unroll
              for (int e = 0; e < 4; e++) {
                vx[i] = dot_bf16(xs[e], vs[e], vx[i]);
                out[e] = pack_bf16(beta * unpack_lo(xs[e]), beta * unpack_hi(xs[e]));
              }
            }
            *(uint4 *)(p.dv + (token0 + row) * p.dv_stride + hv * p.V + slice * 64 + piece * 8) =
                make_uint4(out[0], out[1], out[2], out[3]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 64 * PART / 8 / 256; i++) {
        uint4 x = ((const uint4 *)(smem + stage_offset + L::H))[tid + i * 256];
        uint4 y = ((const uint4 *)(smem + stage_offset + L::DH))[tid + i * 256];
        if (CHANNEL) {  // a thread meets the same eight keys of a block in all its rows
          float *s = hd[i / 2];
          s[0] += unpack_lo(x.x) * unpack_lo(y.x), s[1] += unpack_hi(x.x) * unpack_hi(y.x);
          s[2] += unpack_lo(x.y) * unpack_lo(y.y), s[3] += unpack_hi(x.y) * unpack_hi(y.y);
          s[4] += unpack_lo(x.z) * unpack_lo(y.z), s[5] += unpack_hi(x.z) * unpack_hi(y.z);
          s[6] += unpack_lo(x.w) * unpack_lo(y.w), s[7] += unpack_hi(x.w) * unpack_hi(y.w);
          continue;
        }
        hh = dot_bf16(x.x, y.x, dot_bf16(x.y, y.y, dot_bf16(x.z, y.z, dot_bf16(x.w, y.w, hh))));
      }
      product_wait<0>();
      accumulators_ready(rq), accumulators_ready(re), accumulators_ready(rk);
      accumulators_ready(dp), accumulators_ready(dn);
      if (slice + 1 < slices) continue;

      if (CHANNEL) {  // the rest is delta_rule_channel_gradients_kernel's: leave the products as they are
        float *raw = p.raw + unit * 3 * 64 * p.K + k0 + n0;
#pragma unroll
        for (int i = 0; i < NT; i++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float *out = raw + (m0 + g + 8 * e) * p.K + i * 8 + 2 * t;
            *(float2 *)out = make_float2(rq[i][2 * e], rq[i][2 * e + 1]);
            *(float2 *)(out + 64 * p.K) = make_float2(re[i][2 * e], re[i][2 * e + 1]);
            *(float2 *)(out + 128 * p.K) = make_float2(rk[i][2 * e], rk[i][2 * e + 1]);
          }
        if (part == 0)
#pragma unroll
          for (int h = 0; h < 4; h++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              float *out = p.raw_score + unit * 8192 + (m0 + g + 8 * e) * 64 + wg * 32 + h * 8 + 2 * t;
              *(float2 *)out = make_float2(dp[h][2 * e], dp[h][2 * e + 1]);
              *(float2 *)(out + 4096) = make_float2(dn[h][2 * e], dn[h][2 * e + 1]);
            }
        __syncthreads();  // the stage's tiles are free: shares of <H, dH'> a key channel
        float *share = (float *)(smem + stage_offset);
#pragma unroll
        for (int i = 0; i < PART / 64; i++)
#pragma unroll
          for (int e = 0; e < 8; e++) share[(i * 8 + e) * 256 + tid] = hd[i][e];
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
          for (int off = 1; off < 8; off <<= 1) vx[i] += __shfl_xor_sync(0xffffffffu, vx[i], off);
          if ((lane & 7) == 0) row_v[(tid >> 3) + 32 * i] = vx[i];
        }
        tiles_visible();
        __syncthreads();
        if (tid < 64) p.row_sums[((int64_t)part * 2 + 1) * units * 64 + unit * 64 + tid] = row_v[tid];
        if (tid < PART) {
          const int piece = (tid & 63) >> 3;
          float sum = 0.0f;
          for (int r = 0; r < 32; r++) sum += share[((tid >> 6) * 8 + (tid & 7)) * 256 + r * 8 + (piece ^ (r & 7))];
          p.raw_state[unit * p.K + k0 + tid] = sum;
        }
        continue;
      }

      // ---- after the last slice of a value head: scores, products inside the chunk, row sums
      if (it == 0)  // q and k have to be there: their group is the last, or the last but one
        cp_async_wait<0>();
      else if (it < L::STAGES - 1)
        cp_async_wait<1>();
      __syncthreads();  // everyone is done with the stage's tiles (its vectors stay)
#pragma unroll
      for (int h = 0; h < 4; h++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          int i = m0 + g + e * 8, j = wg * 32 + h * 8 + 2 * t;
          float s[2], nn[2];
#pragma unroll
          for (int c = 0; c < 2; c++) {
            bool lower = j + c <= i && doc[i] == doc[j + c];
            float decay = exp2f(lower ? vec[VEC_G + i] - vec[VEC_G + j + c] : 0.0f);
            s[c] = lower ? p.scale * dp[h][2 * e + c] * decay : 0.0f;
            nn[c] = ERASE && lower && j + c < i ? -dn[h][2 * e + c] * decay : 0.0f;
          }
          float beta = vec[VEC_BETA + i];
          int at = stage_offset + i * 128 + (((wg * 4 + h) ^ g) << 4) + t * 4;
          *(uint32_t *)(smem + at + L::S) = pack_bf16(s[0], s[1]);
          *(uint32_t *)(smem + at + L::N) = pack_bf16(nn[0], nn[1]);
          *(uint32_t *)(smem + at + L::BN) = pack_bf16(beta * nn[0], beta * nn[1]);
        }
      hh = sum_warp(hh);
      if (lane == 0) scalars[warp] = hh;
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int off = 1; off < 8; off <<= 1) vx[i] += __shfl_xor_sync(0xffffffffu, vx[i], off);
        if ((lane & 7) == 0) row_v[(tid >> 3) + 32 * i] = vx[i];
      }
      hh = vx[0] = vx[1] = 0.0f;
      // State terms: scale the rows; the part of dG_63 that comes through k and dH'.
      float k_out = 0.0f;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int row = m0 + g + e * 8;
        float in = vec[VEC_IN + row], out = vec[VEC_OUT + row];
#pragma unroll
        for (int i = 0; i < NT; i++) {
          int col = n0 + i * 8;
          uint32_t kw = *(const uint32_t *)(smem + L::KEY + (col >> 6) * TILE_BLOCK_BYTES + row * 128 +
                                            ((((col & 63) >> 3) ^ g) << 4) + t * 4);
#pragma unroll
          for (int c = 0; c < 2; c++) {
            rq[i][2 * e + c] *= p.scale * in;
            re[i][2 * e + c] = ERASE ? -in * re[i][2 * e + c] : 0.0f;
            rk[i][2 * e + c] *= out;
          }
          k_out += unpack_lo(kw) * rk[i][2 * e] + unpack_hi(kw) * rk[i][2 * e + 1];
        }
      }
      k_out = sum_warp(k_out);
      if (lane == 0) scalars[8 + warp] = k_out;
      tiles_visible();
      __syncthreads();
      product_begin();
      const uint32_t kt = base + L::KEY + (n0 >> 6) * TILE_BLOCK_BYTES, qt = base + L::Q + (n0 >> 6) * TILE_BLOCK_BYTES;
#pragma unroll
      for (int ks = 0; ks < 4; ks++) {
        product_tiles<NT, 0, 1>(rq, stage + L::S, kt, n0 & 63, ks, 1, m0, ln, lk);
        product_tiles<NT, 1, 1>(rk, stage + L::S, qt, n0 & 63, ks, 1, m0, ln, lk);
        if (ERASE) {
          product_tiles<NT, 0, 1>(re, stage + L::N, kt, n0 & 63, ks, 1, m0, ln, lk);
          product_tiles<NT, 1, 1>(rk, stage + L::BN, kt, n0 & 63, ks, 1, m0, ln, lk);
        }
      }
      product_end();
      product_wait<0>();
      accumulators_ready(rq), accumulators_ready(re), accumulators_ready(rk);
      if (hvi + 1 == p.group) __syncthreads();  // dq and dk are about to replace q and k
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int row = m0 + g + e * 8;
        float beta = vec[VEC_BETA + row], qq = 0.0f, ke = 0.0f, kk = 0.0f;
#pragma unroll
        for (int i = 0; i < NT; i++) {
          int col = n0 + i * 8, at = (col >> 6) * TILE_BLOCK_BYTES + row * 128 + ((((col & 63) >> 3) ^ g) << 4) + t * 4;
          uint32_t *qw = (uint32_t *)(smem + L::Q + at), *kw = (uint32_t *)(smem + L::KEY + at);
          float *q2 = &rq[i][2 * e], *e2 = &re[i][2 * e], *k2 = &rk[i][2 * e];
          float kx = unpack_lo(*kw), ky = unpack_hi(*kw);
          qq += unpack_lo(*qw) * q2[0] + unpack_hi(*qw) * q2[1];
          ke += kx * e2[0] + ky * e2[1];
          kk += kx * k2[0] + ky * k2[1];
          float dk0 = k2[0] + beta * e2[0], dk1 = k2[1] + beta * e2[1], dq0 = q2[0], dq1 = q2[1];
          if (GROUPED) {
            float *own = group + ((e * NT + i) * 4) * 256 + tid;
            if (hvi > 0) dq0 += own[0], dq1 += own[256], dk0 += own[512], dk1 += own[768];
            if (hvi + 1 < p.group) own[0] = dq0, own[256] = dq1, own[512] = dk0, own[768] = dk1;
          }
          if (hvi + 1 == p.group) {
            *qw = pack_bf16(dq0, dq1);
            *kw = pack_bf16(dk0, dk1);
          }
        }
        qq = sum_quad(qq), ke = sum_quad(ke), kk = sum_quad(kk);
        if (t == 0) {
          float *s = &sums[(wg * 64 + row) * 3];
          s[0] = qq, s[1] = ke, s[2] = kk;
        }
      }
      __syncthreads();
      if (tid < 64) {
        const float *s = &sums[tid * 3], *z = &sums[(64 + tid) * 3];
        float qq = s[0] + z[0], ke = s[1] + z[1], kk = s[2] + z[2], dG = qq + vec[VEC_BETA + tid] * ke - kk;
        if (tid == 63) {
          float x = 0.0f, y = 0.0f;
#pragma unroll
          for (int w = 0; w < 8; w++) x += scalars[w], y += scalars[8 + w];
          dG += vec[VEC_IN + 63] * x + y;
        }
        float *out = p.row_sums + (int64_t)part * 2 * units * 64 + unit * 64 + tid;
        out[0] = dG;
        out[units * 64] = ke + row_v[tid];
      }
    }
    if (CHANNEL) continue;
    // dq, dk out of the q and k tiles
    constexpr int PIECES = PART / 8;
#pragma unroll
    for (int i = 0; i < 64 * PIECES / 256; i++) {
      int e = tid + i * 256, row = e / PIECES, piece = e % PIECES;
      if (row < rows) {
        int at = (piece >> 3) * TILE_BLOCK_BYTES + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
        int64_t col = (int64_t)kh * p.K + k0 + piece * 8;
        *(uint4 *)(p.dq + (token0 + row) * p.dq_stride + col) = *(const uint4 *)(smem + L::Q + at);
        *(uint4 *)(p.dk + (token0 + row) * p.dk_stride + col) = *(const uint4 *)(smem + L::KEY + at);
      }
    }
  }
}

// Logit gradients. One block per value head and sequence, a warp per chunk; lane l has tokens l and l + 32.
__global__ __launch_bounds__(256) void delta_rule_gates_kernel(DeltaRuleArgs p, int parts) {
  const int hv = blockIdx.x, b = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int64_t units = (int64_t)p.B * p.chunks * p.HV;
  const GateRate rate = gate_rate(p.gate != GATE_NONE ? p.A_log[hv] : 0.0f);
  const float bias = p.gate != GATE_NONE ? p.dt_bias[hv] : 0.0f;
  float sum_A = 0.0f, sum_dt = 0.0f;
  for (int n = warp; n < p.chunks; n += 8) {
    const int64_t unit = ((int64_t)b * p.chunks + n) * p.HV + hv;
    const int t0 = n * 64, rows = min(64, p.T - t0);
    float dG[2], db[2];
    int doc[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int row = lane + 32 * h;
      dG[h] = db[h] = 0.0f;
      for (int part = 0; part < parts; part++) {
        const float *in = p.row_sums + (int64_t)part * 2 * units * 64 + unit * 64 + row;
        dG[h] += in[0], db[h] += in[units * 64];
      }
      int64_t token = (int64_t)b * p.T + t0 + min(row, rows - 1);
      doc[h] = p.doc_start ? max(p.doc_start[token] - t0, 0) : 0;
    }
#pragma unroll
    for (int h = 0; h < 2; h++)  // sum over the tokens at and after this one, in its document
#pragma unroll
      for (int off = 1; off < 32; off <<= 1) {
        float down = __shfl_down_sync(0xffffffffu, dG[h], off);
        int other = __shfl_down_sync(0xffffffffu, doc[h], off);
        if (lane + off < 32 && other == doc[h]) dG[h] += down;
      }
    float second = __shfl_sync(0xffffffffu, dG[1], 0);
    int second_doc = __shfl_sync(0xffffffffu, doc[1], 0);
    if (second_doc == doc[0]) dG[0] += second;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int row = lane + 32 * h;
      if (row >= rows) continue;
      int64_t token = (int64_t)b * p.T + t0 + row;
      if (p.gate != GATE_NONE) {
        float x = __bfloat162float(p.a[token * p.a_stride + hv]) + bias, value = gate_value(rate, x);
        float da = 0.0f;
        // Below the floor the decay is 0 for good; a NaN stays one.
        if (!(value * LOG2_E < GATE_FLOOR)) da = dG[h] * gate_slope(rate, x), sum_A += dG[h] * value;
        if (p.erase == ERASE_NONE) da += db[h] * sigmoid(x);
        sum_dt += da;
        p.da[token * p.da_stride + hv] = __float2bfloat16(da);
      }
      if (p.erase != ERASE_NONE) {
        float s = sigmoid(__bfloat162float(p.beta[token * p.beta_stride + hv]));
        p.dbeta[token * p.dbeta_stride + hv] = __float2bfloat16(db[h] * p.beta_scale * s * (1.0f - s));
      }
    }
  }
  __shared__ float share[2][8];
  sum_A = sum_warp(sum_A), sum_dt = sum_warp(sum_dt);
  if (lane == 0) share[0][warp] = sum_A, share[1][warp] = sum_dt;
  __syncthreads();
  if (threadIdx.x < 2) {
    float s = 0.0f;
    for (int w = 0; w < 8; w++) s += share[threadIdx.x][w];
    p.gate_sums[((int64_t)threadIdx.x * p.B + b) * p.HV + hv] = s;
  }
}

// dA_log and ddt_bias: adds the shares of the sequences, in order.
__global__ void delta_rule_gate_parameters_kernel(DeltaRuleArgs p) {
  int hv = blockIdx.x * blockDim.x + threadIdx.x;
  if (hv >= p.HV) return;
  float a = 0.0f, dt = 0.0f;
  for (int b = 0; b < p.B; b++) {
    a += p.gate_sums[(int64_t)b * p.HV + hv];
    dt += p.gate_sums[((int64_t)p.B + b) * p.HV + hv];
  }
  p.dA_log[hv] += a;
  p.ddt_bias[hv] += dt;
}

#endif  // GDN_CUDA_DELTA_RULE_GRADIENTS_CUH
