// delta_rule_channel.cuh: the chunk-parallel kernels of the delta rule with a decay per key channel (KDA, Gated
// DeltaNet-2).
//
//     e = b o k,  z = w o v      (KDA: b = w = beta, one number a token)
//     M = strictly lower( sum_d e_id k_jd 2^(G_id - G_jd) )      P = scale lower( sum_d q_id k_jd 2^(G_id - G_jd) )
//     Q+ = scale q o 2^G      K- = k o 2^(Gc - G)      E+ = e o 2^G
// The decay cannot be split into a row and a column factor over a whole chunk without overflow. 16 x 16 blocks below
// the diagonal: both factors are taken relative to G of the last row of the column block, so both are <= 1 and nothing
// from the future enters; tensor cores. Diagonal blocks: the same for their halves, the halves of these and so on, in
// TF32, for near rows count most; a row with itself in fp32. Backward, from the raw products that
// delta_rule_gradients_kernel leaves: eight rows at a time, from the last to the first, with all rows before them
// relative to the one before them; among the eight the halves with each other, and their halves, down to pairs in fp32.
// A row's gradients are complete when its own eight rows are done. The gate's gradient is a running sum of q dq + e de
// - k dk, in which what is inside the rows summed so far cancels: it is made to, exactly, for rounding would be most of
// the rest.
//
// Each kernel has plain forms (KDA and GDN-2 with as many value as key heads) and a general one, which also knows value
// heads that share a key head, the bounded gate, no decay, and means of gates. There every value head is prepared by
// itself; what shares a key head in the backward pass is added up by one launch after the other.
//
// defines: ChannelForm, delta_rule_prepare_channel_kernel, PrepareChannelLayout, delta_rule_channel_gradients_kernel,
//          ChannelGradientsLayout, delta_rule_channel_parameters_kernel
#ifndef GDN_CUDA_DELTA_RULE_CHANNEL_CUH
#define GDN_CUDA_DELTA_RULE_CHANNEL_CUH

#include "delta_rule_gradients.cuh"
#include "delta_rule_prepare.cuh"

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 2^min(x, 0): exponents that stand for a decay never exceed 0; those between two documents may, and are masked later.
// A NaN becomes 1.
__device__ __forceinline__ float decay_factor(float x) { return exp2_approx(fminf(x, 0.0f)); }
// a_t of one channel: g log2 e, not below the floor
__device__ __forceinline__ float gate_log2(GateRate A, float x) {
  float a = gate_value(A, x) * LOG2_E;
  return a < GATE_FLOOR ? GATE_FLOOR : a;  // not fmaxf, which would hide a NaN
}
// The same in the general form: bounded, g = lower_bound sigmoid(exp(A_log) x), when lower_bound is not 0.
__device__ __forceinline__ float gate_log2_general(GateRate A, float x, float lower_bound) {
  return lower_bound != 0.0f ? lower_bound * LOG2_E * sigmoid(A.rate * x) : gate_log2(A, x);
}

// Two rows of two channels, in this order: (row, channel) (row, channel + 1) (other row, channel)
// (other row, channel + 1).
struct RowPairs {
  float x[4];
};
__device__ __forceinline__ RowPairs row_pairs(float4 v) { return {{v.x, v.y, v.z, v.w}}; }
__device__ __forceinline__ RowPairs row_pairs(uint32_t first, uint32_t second) {
  return {{unpack_lo(first), unpack_hi(first), unpack_lo(second), unpack_hi(second)}};
}
__device__ __forceinline__ float4 to_float4(const RowPairs &v) { return make_float4(v.x[0], v.x[1], v.x[2], v.x[3]); }
enum ChannelForm { CHANNEL_KDA, CHANNEL_GDN2, CHANNEL_GENERAL };

template <int K>
struct PrepareChannelLayout {
  static constexpr int LD = 68, LG = K + 8, TILE = 64 * K * 2;
  static constexpr int Q = 0, KEY = TILE, E = 2 * TILE, KEY_ANCHORED = 3 * TILE, G = 4 * TILE;
  static constexpr int A = 64 * LD * 4, P = 2 * A;  // later: M at 0, A, P
  static constexpr int VEC = G + 64 * LG * 4, DOC = VEC + VEC_COUNT * 4, SEGMENT = DOC + 256;
  static constexpr int BYTES = SEGMENT + 4 * K * 4;
  static_assert(P + TILE_BLOCK_BYTES <= VEC, "M, A and P must fit over the tiles");
  static_assert(64 * LD >= 34 * 128, "what half of the channels hands over must fit into A");
};

template <int K, bool GENERAL>
__global__ __launch_bounds__(256, 2) void delta_rule_prepare_channel_kernel(DeltaRuleArgs p) {
  typedef PrepareChannelLayout<K> L;
  constexpr int LD = L::LD, LG = L::LG, PIECES = K / 8, SEGMENTS = 256 / K, ROWS = 64 / SEGMENTS;
  extern __shared__ __align__(1024) unsigned char smem[];
  float *G = (float *)(smem + L::G), *vec = (float *)(smem + L::VEC), *segment = (float *)(smem + L::SEGMENT);
  int *doc = (int *)(smem + L::DOC);
  const int n = blockIdx.x, h = blockIdx.y, b = blockIdx.z;                                     // h: value head
  const int kh = GENERAL ? h / p.group : h, gh = GENERAL && p.erase != ERASE_CHANNEL ? h : kh;  // of q, k, b; of g
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int t0 = n * 64, rows = min(64, p.T - t0);
  const int64_t token0 = (int64_t)b * p.T + t0, unit = ((int64_t)b * p.chunks + n) * p.HV + h;
  const bool erase_logits = p.erase == ERASE_CHANNEL, channel_erase = erase_logits && !(GENERAL && p.erase_mean);
  const bool decay = !GENERAL || p.gate != GATE_NONE;
  const uint32_t base = smem_address(smem);

  load_tile_async<K, 256>(base + L::Q, p.q + token0 * p.q_stride + kh * K, p.q_stride, rows);
  load_tile_async<K, 256>(base + L::KEY, p.k + token0 * p.k_stride + kh * K, p.k_stride, rows);
  if (decay) load_tile_async<K, 256>(base + L::KEY_ANCHORED, p.a + token0 * p.a_stride + gh * K, p.a_stride, rows);
  if (erase_logits) load_tile_async<K, 256>(base + L::E, p.beta + token0 * p.beta_stride + kh * K, p.beta_stride, rows);
  cp_async_commit();
  bool carried = n > 0;
  if (p.doc_start) carried = n > 0 && p.doc_start[token0] < t0;
  if (tid < 64) {
    doc[tid] = p.doc_start ? max(p.doc_start[token0 + min(tid, rows - 1)] - t0, 0) : 0;
    float beta = 0.0f;
    if (!erase_logits && tid < rows)
      beta = p.beta_scale * sigmoid(__bfloat162float(p.beta[(token0 + tid) * p.beta_stride + h]));
    vec[VEC_BETA + tid] = beta;
    if (GENERAL) vec[VEC_ERASE + tid] = beta;
  }
  cp_async_wait<0>();
  __syncthreads();
  if (GENERAL && (p.erase_mean || p.write_mean))  // a warp sums a row of gates
    for (int row = warp; row < 64; row += 8) {
      float erase = 0.0f, write = 0.0f;
      if (p.erase_mean)
        for (int c = lane; c < K; c += 32) {
          const int at = (c >> 6) * TILE_BLOCK_BYTES + row * 128 + (((c >> 3) ^ row) & 7) * 16 + (c & 7) * 2;
          erase += sigmoid(__bfloat162float(*(const bf16 *)(smem + L::E + at)));
        }
      if (p.write_mean && row < rows)
        for (int c = lane; c < p.V; c += 32)
          write += sigmoid(__bfloat162float(p.w[(token0 + row) * p.w_stride + (int64_t)h * p.V + c]));
      erase = sum_warp(erase), write = sum_warp(write);
      if (lane == 0) {
        if (p.erase_mean) vec[VEC_ERASE + row] = row < rows ? p.beta_scale * erase / K : 0.0f;
        if (p.write_mean) vec[VEC_BETA + row] = write / p.V;
      }
    }
  // G: a thread sums one channel over a segment of the rows, restarting at documents; then the segments are joined.
  const int d = tid % K, seg = tid / K, first = seg * ROWS;
  {
    const GateRate A = gate_rate(decay ? p.A_log[gh] : 0.0f);
    const float bias = decay ? p.dt_bias[gh * K + d] : 0.0f;
    const unsigned char *logits =
        smem + L::KEY_ANCHORED + (d >> 6) * TILE_BLOCK_BYTES + (d & 7) * 2;  // until the keys come
    float sum = 0.0f;
    for (int i0 = first; i0 < first + ROWS; i0 += 8) {
      float a[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int row = i0 + i;
        float x = __bfloat162float(*(const bf16 *)(logits + row * 128 + (((d >> 3) ^ row) & 7) * 16));
        a[i] = GENERAL ? gate_log2_general(A, x + bias, p.lower_bound) : gate_log2(A, x + bias);
        if (!decay || row >= rows) a[i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
        sum = doc[i0 + i] == i0 + i ? a[i] : sum + a[i];
        G[(i0 + i) * LG + d] = sum;
      }
    }
    segment[seg * K + d] = sum;
  }
  __syncthreads();
  {
    float before = 0.0f;
#pragma unroll
    for (int s = 0; s < SEGMENTS - 1; s++)
      if (s < seg) before = segment[s * K + d] + (doc[s * ROWS + ROWS - 1] < s * ROWS ? before : 0.0f);
    for (int i = first; i < first + ROWS; i++)
      if (doc[i] < first) G[i * LG + d] += before;
  }
  // e in place of the logits of b
  for (int i = tid; i < 64 * PIECES; i += 256) {
    uint4 kx = ((const uint4 *)(smem + L::KEY))[i], x;
    const int row = (i >> 3) & 63;
    if (channel_erase) x = ((const uint4 *)(smem + L::E))[i];
    uint32_t *ks = &kx.x, *xs = &x.x;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      float lo = vec[(GENERAL ? VEC_ERASE : VEC_BETA) + row], hi = lo;
      if (channel_erase) lo = p.beta_scale * sigmoid(unpack_lo(xs[c])), hi = p.beta_scale * sigmoid(unpack_hi(xs[c]));
      ks[c] = pack_bf16(lo * unpack_lo(ks[c]), hi * unpack_hi(ks[c]));
    }
    ((uint4 *)(smem + L::E))[i] = kx;
  }
  __syncthreads();
  // Q+, K-, E+ as stored tiles; the keys relative to the last row of their 16-row block; the chunk's decay.
  bf16 *out = p.operands + unit * 3 * 64 * K;
  for (int i = tid; i < 64 * PIECES; i += 256) {
    const int row = (i >> 3) & 63, block = i >> 9, d0 = block * 64 + (((i & 7) ^ (row & 7)) << 3);
    uint4 q = ((const uint4 *)(smem + L::Q))[i], k = ((const uint4 *)(smem + L::KEY))[i],
          e = ((const uint4 *)(smem + L::E))[i];
    uint4 ka;
    uint32_t *qs = &q.x, *ks = &k.x, *es = &e.x, *as = &ka.x;
    const float in = carried && doc[row] == 0 ? 1.0f : 0.0f, last = doc[row] == doc[63] ? 1.0f : 0.0f;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      float2 G_row = *(const float2 *)&G[row * LG + d0 + 2 * c], G_end = *(const float2 *)&G[63 * LG + d0 + 2 * c];
      float2 anchor = *(const float2 *)&G[(row | 15) * LG + d0 + 2 * c];
      float2 plus = make_float2(in * decay_factor(G_row.x), in * decay_factor(G_row.y));
      float2 minus = make_float2(last * decay_factor(G_end.x - G_row.x), last * decay_factor(G_end.y - G_row.y));
      float k0 = unpack_lo(ks[c]), k1 = unpack_hi(ks[c]);
      qs[c] = pack_bf16(p.scale * unpack_lo(qs[c]) * plus.x, p.scale * unpack_hi(qs[c]) * plus.y);
      es[c] = pack_bf16(unpack_lo(es[c]) * plus.x, unpack_hi(es[c]) * plus.y);
      ks[c] = pack_bf16(k0 * minus.x, k1 * minus.y);
      as[c] = pack_bf16(k0 * decay_factor(anchor.x - G_row.x), k1 * decay_factor(anchor.y - G_row.y));
    }
    ((uint4 *)out)[i] = q;
    ((uint4 *)(out + 64 * K))[i] = k;
    ((uint4 *)(out + 128 * K))[i] = e;
    ((uint4 *)(smem + L::KEY_ANCHORED))[i] = ka;
  }
  if (tid < K) vec[VEC_DECAY + tid] = carried && doc[63] == 0 ? decay_factor(G[63 * LG + tid]) : 0.0f;
  __syncthreads();
  // Blocks below the diagonal: 6 pairs (row block, column block) for P and for M, over 8 warps.
  const TileLane ln = lane_n(lane), lk = lane_k(lane);
  float acc[2][2][4] = {};
#pragma unroll
  for (int turn = 0; turn < 2; turn++) {
    const int job = warp + 8 * turn, pair = job >> 1;
    if (job >= 12) break;
    const int r = pair == 0 ? 1 : pair < 3 ? 2 : 3, c = pair - r * (r - 1) / 2, anchor = (16 * c + 15) * LG;
    const uint32_t tile = base + (job & 1 ? L::E : L::Q);
#pragma unroll 2
    for (int ks = 0; ks < K / 16; ks++) {
      uint32_t a[4], kb[4];
      ldmatrix_x4(a, tile_at(tile, lk, r * 16, ks * 16));
      ldmatrix_x4(kb, tile_at(base + L::KEY_ANCHORED, ln, c * 16, ks * 16));
#pragma unroll
      for (int x = 0; x < 4; x++) {
        const int row = r * 16 + g + (x & 1) * 8, col = ks * 16 + (x >> 1) * 8 + 2 * t;
        float2 Gi = *(const float2 *)&G[row * LG + col], Ga = *(const float2 *)&G[anchor + col];
        a[x] = pack_bf16(unpack_lo(a[x]) * decay_factor(Gi.x - Ga.x), unpack_hi(a[x]) * decay_factor(Gi.y - Ga.y));
      }
      mma_bf16(acc[turn][0], a, kb[0], kb[1]);
      mma_bf16(acc[turn][1], a, kb[2], kb[3]);
    }
  }
  // Diagonal blocks: a warp has one of the four and half of the channels. Level 0 is the last eight rows with the first
  // eight, relative to row 7; level 1 the last four of each eight with its first four, and so on, down to neighbours.
  // The eight columns of a product are the earlier rows of all groups of its level.
  const int block = warp >> 1, block_row = block * 16;
  float own[2] = {0.0f, 0.0f}, level_P[4][4] = {}, level_M[4][4] = {};
#pragma unroll 2
  for (int ks = 0; ks < K / 16; ks++) {
    const int col = (warp & 1) * (K / 2) + ks * 8 + 2 * t;
    auto word = [&](int tile, int row) {
      row += block_row;
      return *(const uint32_t *)(smem + tile + (col >> 6) * TILE_BLOCK_BYTES + row * 128 +
                                 ((((col >> 3) ^ row) & 7) << 4) + t * 4);
    };
    auto G_at = [&](int row) { return *(const float2 *)&G[(block_row + row) * LG + col]; };
    const RowPairs q = row_pairs(word(L::Q, g), word(L::Q, g + 8)), e = row_pairs(word(L::E, g), word(L::E, g + 8)),
                   k = row_pairs(word(L::KEY, g), word(L::KEY, g + 8));
    const float2 G_lo = G_at(g), G_hi = G_at(g + 8);
#pragma unroll
    for (int i = 0; i < 4; i++) own[i >> 1] += q.x[i] * k.x[i];
#pragma unroll
    for (int level = 0; level < 4; level++) {
      const int size = 8 >> level, mask = ~(2 * size - 1);
      const int key_row = (g & -size) * 2 + (g & (size - 1));
      const float2 anchor_lo = G_at((g & mask) + size - 1), anchor_hi = G_at(((g + 8) & mask) + size - 1);
      uint32_t q_operand[4] = {}, e_operand[4] = {};
      auto scale_row = [&](int half, float2 G_row,
                           float2 anchor) {  // rows lie at 0 and 1, not at 0 and 2, of an operand
        const float f0 = exp2_approx(-fabsf(G_row.x - anchor.x)), f1 = exp2_approx(-fabsf(G_row.y - anchor.y));
        q_operand[half] = round_tf32(q.x[2 * half] * f0), q_operand[half + 2] = round_tf32(q.x[2 * half + 1] * f1);
        e_operand[half] = round_tf32(e.x[2 * half] * f0), e_operand[half + 2] = round_tf32(e.x[2 * half + 1] * f1);
      };
      if (level > 0) scale_row(0, G_lo, anchor_lo);
      scale_row(1, G_hi, anchor_hi);
      float2 kf = make_float2(k.x[0], k.x[1]);
      if (level > 0) {
        const uint32_t k_word = word(L::KEY, key_row);
        kf = make_float2(unpack_lo(k_word), unpack_hi(k_word));
      }
      if (level < 3) {
        const float2 G_key = level > 0 ? G_at(key_row) : G_lo, anchor = G_at((key_row & mask) + size - 1);
        kf.x *= exp2_approx(-fabsf(anchor.x - G_key.x)), kf.y *= exp2_approx(-fabsf(anchor.y - G_key.y));
      }
      const float b0 = __uint_as_float(round_tf32(kf.x)), b1 = __uint_as_float(round_tf32(kf.y));
      mma_tf32(level_P[level], q_operand, b0, b1);
      mma_tf32(level_M[level], e_operand, b0, b1);
    }
  }
  __syncthreads();  // the tiles have served: M, A and P take their place
  float *M = (float *)smem, *A = (float *)(smem + L::A);
  for (int i = tid; i < TILE_BLOCK_BYTES / 16; i += 256) ((uint4 *)(smem + L::P))[i] = make_uint4(0, 0, 0, 0);
  own[0] = sum_quad(own[0]), own[1] = sum_quad(own[1]);
  float *handed = A + block * 32 + lane;  // the second half of the channels goes through A
  if (warp & 1) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      handed[i * 128] = level_P[i >> 2][i & 3], handed[(16 + i) * 128] = level_M[i >> 2][i & 3];
      if (i < 2) handed[(32 + i) * 128] = own[i];
    }
  }
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < 2; turn++) {
    const int job = warp + 8 * turn, pair = job >> 1;
    if (job >= 12) break;
    const int r = pair == 0 ? 1 : pair < 3 ? 2 : 3, c = pair - r * (r - 1) / 2;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = r * 16 + g + 8 * e, j = c * 16 + half * 8 + 2 * t;
        float x = doc[i] == doc[j] ? acc[turn][half][2 * e] : 0.0f,
              y = doc[i] == doc[j + 1] ? acc[turn][half][2 * e + 1] : 0.0f;
        if (job & 1)
          *(float2 *)&M[i * LD + j] = make_float2(x, y);
        else
          *(uint32_t *)(smem + L::P + i * 128 + (((2 * c + half) ^ (i & 7)) << 4) + t * 4) =
              pack_bf16(p.scale * x, p.scale * y);
      }
  }
  if (!(warp & 1)) {
    auto store = [&](int i, int j, float x) {
      *(bf16 *)(smem + L::P + i * 128 + (((j >> 3) ^ (i & 7)) << 4) + (j & 7) * 2) = __float2bfloat16(p.scale * x);
    };
#pragma unroll
    for (int x = 0; x < 16; x++) {
      const int size = 8 >> (x >> 2), column = 2 * t + (x & 1), i = g + (x & 2) * 4;
      const int j = (column & -size) * 2 + (column & (size - 1));
      if (!(i & size) || ((i ^ j) & ~(2 * size - 1))) continue;  // not a later row of this group
      const bool same = doc[block_row + i] == doc[block_row + j];
      const float P_ij = level_P[x >> 2][x & 3] + handed[x * 128],
                  M_ij = level_M[x >> 2][x & 3] + handed[(16 + x) * 128];
      store(block_row + i, block_row + j, same ? P_ij : 0.0f);
      M[(block_row + i) * LD + block_row + j] = same ? M_ij : 0.0f;
    }
    if (t < 2) store(block_row + g + 8 * t, block_row + g + 8 * t, (t ? own[1] : own[0]) + handed[(32 + t) * 128]);
  }
  __syncthreads();
  invert_unit_lower<LD>(A, M, tid);
  __syncthreads();
  uint4 *A_out = (uint4 *)(p.A + unit * 4096), *P_out = (uint4 *)(p.P + unit * 4096);
  for (int piece = tid; piece < 512; piece += 256) {
    const int i = piece >> 3, j = ((piece & 7) ^ (i & 7)) * 8;
    P_out[piece] = ((const uint4 *)(smem + L::P))[piece];
    float4 lo = *(const float4 *)&A[i * LD + j], hi = *(const float4 *)&A[i * LD + j + 4];
    A_out[piece] =
        make_uint4(pack_bf16(lo.x, lo.y), pack_bf16(lo.z, lo.w), pack_bf16(hi.x, hi.y), pack_bf16(hi.z, hi.w));
  }
  if (tid < VEC_COUNT) {
    float x = vec[tid];
    if ((!GENERAL && tid < VEC_BETA) || tid >= VEC_DECAY + K) x = 0.0f;
    p.vectors[unit * VEC_COUNT + tid] = x;
  }
}

// Of the 8 x 8 block (r, c) of scores, c <= r, at r (r + 1) / 2 + c: row i lies at i ^ (i >> 2), which keeps the reads
// of both fragments, along rows and along columns, free of bank conflicts.
template <int K>
struct ChannelGradientsLayout {
  static constexpr int BLOCKS = 36, P = 0, M = BLOCKS * 64 * 4, G = 2 * M, DK = G + 64 * K * 4, KEY = DK + 64 * K * 4;
  static constexpr int DOC = KEY + 64 * K * 2, BETA = DOC + 256, ROW_K = BETA + 256;
  static constexpr int SHARE = ROW_K + (K / 16) * 64 * 4, BYTES = SHARE + 64;
};

template <class T>
__device__ __forceinline__ T *kept(T *pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
// What a thread of the gradients holds of eight rows, neighbours of both, is the A operand of mma_tf32 as it is: x * f.
__device__ __forceinline__ void scaled_operand(uint32_t (&a)[4], const RowPairs &x, const RowPairs &f) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = round_tf32(x.x[i] * f.x[i]);
}
// sum += f * d, d an accumulator: channels down, rows across; dot[channel] += x * f * d
__device__ __forceinline__ void add_scaled(RowPairs &sum, float (&dot)[2], const RowPairs &x, const RowPairs &f,
                                           const float (&d)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float y = f.x[i] * d[(i & 1) * 2 + (i >> 1)];
    sum.x[i] += y, dot[i & 1] += x.x[i] * y;
  }
}

// A warp owns 16 key channels; a thread (g = lane / 4, t = lane % 4) channels 2g and 2g + 1 of them and, of every eight
// rows, 2t and 2t + 1.
template <int K, int FORM>
__global__ __launch_bounds__(2 * K, 2) void delta_rule_channel_gradients_kernel(DeltaRuleArgs p, int parts) {
  typedef ChannelGradientsLayout<K> L;
  constexpr int THREADS = 2 * K, WARPS = K / 16;
  constexpr bool GENERAL = FORM == CHANNEL_GENERAL;
  const unsigned ALL = 0xffffffffu;
  extern __shared__ __align__(1024) unsigned char smem[];
  float *scores_P = (float *)(smem + L::P), *scores_M = (float *)(smem + L::M), *betas = (float *)(smem + L::BETA),
        *row_k = (float *)(smem + L::ROW_K), *share = (float *)(smem + L::SHARE);
  int *doc = (int *)(smem + L::DOC);
  const int n = blockIdx.x, kh = blockIdx.y, b = blockIdx.z;
  // the value head, and the head of the decay
  const int h = GENERAL ? kh * p.group + p.member : kh, gh = GENERAL && p.erase != ERASE_CHANNEL ? h : kh;
  const bool channel_erase = GENERAL ? p.erase == ERASE_CHANNEL && !p.erase_mean : FORM == CHANNEL_GDN2;
  const bool decay = !GENERAL || p.gate != GATE_NONE;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3, d = warp * 16 + 2 * g;
  // this thread's rows and channels of eight rows, those of the next eight THREADS further
  float4 *G = (float4 *)(smem + L::G) + tid, *dks = (float4 *)(smem + L::DK) + tid;
  uint2 *keys = (uint2 *)(smem + L::KEY) + tid;
  // G of the second row of the thread that is `other` away, which has the same channels
  auto anchor_of = [&](int octet, int other) { return *((const float2 *)(G + octet * THREADS + other) + 1); };
  const int t0 = n * 64, rows = min(64, p.T - t0);
  const int64_t token0 = (int64_t)b * p.T + t0, unit = ((int64_t)b * p.chunks + n) * p.HV + h;
  const int64_t units = (int64_t)p.B * p.chunks * p.HV;
  bool carried = n > 0;
  if (p.doc_start) carried = n > 0 && p.doc_start[token0] < t0;

  if (tid < 64) {
    doc[tid] = p.doc_start ? max(p.doc_start[token0 + min(tid, rows - 1)] - t0, 0) : 0;
    betas[tid] = p.vectors[unit * VEC_COUNT + (GENERAL ? VEC_ERASE : VEC_BETA) + tid];
  }
  __syncthreads();
  // dP and dM, masked, in blocks; rounded as the tensor cores read them, but not the pairs that are taken in fp32.
#pragma unroll 2
  for (int i = tid; i < 1024; i += THREADS) {
    const int row = i >> 4, col0 = (i & 15) * 4;
    float4 P = __ldg((const float4 *)(p.raw_score + unit * 8192) + i),
           M = __ldg((const float4 *)(p.raw_score + unit * 8192 + 4096) + i);
    if ((col0 >> 3) > (row >> 3)) continue;
    float *Ps = &P.x, *Ms = &M.x;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int col = col0 + c;
      const bool same = doc[row] == doc[col];
      Ps[c] = same && col <= row ? p.scale * Ps[c] : 0.0f;
      Ms[c] = same && col < row ? -Ms[c] : 0.0f;
      if ((col >> 1) != (row >> 1))
        Ps[c] = __uint_as_float(round_tf32(Ps[c])), Ms[c] = __uint_as_float(round_tf32(Ms[c]));
    }
    const int x = row & 7,
              at = (((row >> 3) * ((row >> 3) + 1) / 2 + (col0 >> 3)) * 8 + (x ^ (x >> 2))) * 8 + (col0 & 7);
    *(float4 *)&scores_P[at] = P;
    *(float4 *)&scores_M[at] = M;
  }
  // The thread's channels in the chunk's first row. Kept: the compiler would work them out anew at every use.
  const int64_t head_q = kh * K + d, head_g = gh * K + d;
  const bf16 *q_in = kept(p.q + token0 * p.q_stride + head_q), *k_in = p.k + token0 * p.k_stride + head_q;
  const bf16 *a_in = kept(p.a + token0 * p.a_stride + head_g), *b_in = kept(p.beta + token0 * p.beta_stride + head_q);
  bf16 *dq_out = kept(p.dq + token0 * p.dq_stride + head_q), *dk_out = kept(p.dk + token0 * p.dk_stride + head_q);
  bf16 *da_out = kept(p.da + token0 * p.da_stride + head_g), *db_out = kept(p.dbeta + token0 * p.dbeta_stride + head_q);
  const float *raw = kept(p.raw + unit * 3 * 64 * K + d);
  // Two rows of bf16, from `row` on; those that the sequence does not have are 0.
  auto load_rows = [&](const bf16 *from, int64_t stride, int row) {
    uint2 v;
    v.x = __ldg((const uint32_t *)(from + min(row, rows - 1) * (int)stride));
    v.y = __ldg((const uint32_t *)(from + min(row + 1, rows - 1) * (int)stride));
    return make_uint2(row < rows ? v.x : 0, row + 1 < rows ? v.y : 0);
  };
  auto load_raw = [&](int part, int row) {
    float2 lo = __ldg((const float2 *)(raw + (part * 64 + row) * K)),
           hi = __ldg((const float2 *)(raw + (part * 64 + row + 1) * K));
    return RowPairs{{lo.x, lo.y, hi.x, hi.y}};
  };
  const GateRate A = gate_rate(decay ? p.A_log[gh] : 0.0f);
  float bias[2] = {0.0f, 0.0f};
  if (decay) bias[0] = p.dt_bias[gh * K + d], bias[1] = p.dt_bias[gh * K + d + 1];

  // G: sums over the rows before, of the same document.
  {
    float last[2] = {0.0f, 0.0f};
#pragma unroll 2
    for (int o = 0; o < 8; o++) {
      const int row = o * 8 + 2 * t, start0 = doc[row], start1 = doc[row + 1];
      uint2 logits = make_uint2(0, 0);
      if (decay) logits = load_rows(a_in, p.a_stride, row);
      keys[o * THREADS] = load_rows(k_in, p.k_stride, row);
      RowPairs a = row_pairs(logits.x, logits.y);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float x = a.x[i] + bias[i & 1];
        a.x[i] = GENERAL ? gate_log2_general(A, x, p.lower_bound) : gate_log2(A, x);
        if (!decay || row + (i >> 1) >= rows) a.x[i] = 0.0f;
      }
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float sum = start1 <= row ? a.x[c] + a.x[2 + c] : a.x[2 + c];
        float up = __shfl_up_sync(ALL, sum, 1, 4);
        if (t >= 1 && start1 < row) sum += up;
        up = __shfl_up_sync(ALL, sum, 2, 4);
        if (t >= 2 && start1 < row - 2) sum += up;
        if (start1 < o * 8) sum += last[c];
        up = __shfl_up_sync(ALL, sum, 1, 4);  // G of the row before
        if (t == 0) up = last[c];
        a.x[c] = start0 < row ? up + a.x[c] : a.x[c];
        a.x[2 + c] = start1 <= row ? a.x[c] + a.x[2 + c] : a.x[2 + c];
        last[c] = __shfl_sync(ALL, a.x[2 + c], 3, 4);
      }
      G[o * THREADS] = to_float4(a);
    }
  }
  __syncthreads();
  // What comes through the state into dk, and into the gates of all rows of the last document.
  float carry[2] = {0.0f, 0.0f};
  {
    const float2 end = anchor_of(7, 3 - t);
#pragma unroll 4
    for (int o = 0; o < 8; o++) {
      RowPairs x = load_raw(2, o * 8 + 2 * t);
      const RowPairs Go = row_pairs(G[o * THREADS]), k = row_pairs(keys[o * THREADS].x, keys[o * THREADS].y);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const bool last = doc[o * 8 + 2 * t + (i >> 1)] == doc[63];
        x.x[i] = last ? x.x[i] * decay_factor((i & 1 ? end.y : end.x) - Go.x[i]) : 0.0f;
        carry[i & 1] += x.x[i] * k.x[i];
      }
      dks[o * THREADS] = to_float4(x);
    }
    const bool through = carried && doc[63] == 0;
    for (int c = 0; c < 2; c++) {
      carry[c] = sum_quad(carry[c]);
      carry[c] += (through ? decay_factor(c ? end.y : end.x) : 0.0f) * p.raw_state[unit * K + d + c];
    }
  }

  // where this thread's elements of the scores' fragments lie in a block: along a row, and down a column of two rows
  const int along = (g ^ (g >> 2)) * 8 + 2 * t, first = 2 * t, second = 2 * t + 1;
  const int down0 = (first ^ (first >> 2)) * 8 + g, down1 = (second ^ (second >> 2)) * 8 + g;
  const float beta_unscale = 1.0f / p.beta_scale;
  float sum_A = 0.0f, sum_dt[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (int r = 7; r >= 0; r--) {
    const int row = r * 8 + 2 * t;
    RowPairs dq = load_raw(0, row), de = load_raw(1, row);
    const uint2 q2 = load_rows(q_in, p.q_stride, row);
    uint2 b2 = make_uint2(0, 0), a2 = make_uint2(0, 0);
    if (channel_erase) b2 = load_rows(b_in, p.beta_stride, row);
    if (decay) a2 = load_rows(a_in, p.a_stride, row);
    const RowPairs Gr = row_pairs(G[r * THREADS]), k = row_pairs(keys[r * THREADS].x, keys[r * THREADS].y),
                   q = row_pairs(q2.x, q2.y);
    RowPairs gates = row_pairs(b2.x, b2.y), f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      gates.x[i] = channel_erase ? p.beta_scale * sigmoid(gates.x[i]) : betas[row + (i >> 1)];
      const float plus = decay_factor(Gr.x[i]) * (carried && doc[row + (i >> 1)] == 0 ? 1.0f : 0.0f);
      dq.x[i] *= p.scale * plus, de.x[i] *= -plus;
    }
    const RowPairs e = row_pairs(pack_bf16(gates.x[0] * k.x[0], gates.x[1] * k.x[1]),  // as prepare rounded it
                                 pack_bf16(gates.x[2] * k.x[2], gates.x[3] * k.x[3]));
    const float *P = scores_P + r * (r + 1) / 2 * 64, *M = scores_M + r * (r + 1) / 2 * 64;
    // Earlier rows, relative to the last one before these eight. Each product counts twice in the gate's sum, with q or
    // e and against k, and must be gone from it in the rows before both: off_rows is what roundings leave of that.
    float off_rows[2] = {0.0f, 0.0f};
    if (r > 0) {
      const float2 anchor = anchor_of(r - 1, 3 - t);
      uint32_t qf[4], ef[4];
#pragma unroll
      for (int i = 0; i < 4; i++) f.x[i] = decay_factor(Gr.x[i] - (i & 1 ? anchor.y : anchor.x));
      scaled_operand(qf, q, f), scaled_operand(ef, e, f);
      float sum_q[4] = {}, sum_e[4] = {}, in_k[2] = {0.0f, 0.0f};
#pragma unroll 2
      for (int c = 0; c < r; c++, P += 64, M += 64) {
        const RowPairs Gc = row_pairs(G[c * THREADS]), kc = row_pairs(keys[c * THREADS].x, keys[c * THREADS].y);
        RowPairs fk, dk = row_pairs(dks[c * THREADS]);
        uint32_t kf[4];
#pragma unroll
        for (int i = 0; i < 4; i++) fk.x[i] = decay_factor((i & 1 ? anchor.y : anchor.x) - Gc.x[i]);
        scaled_operand(kf, kc, fk);
        const float2 P_row = *(const float2 *)&P[along], M_row = *(const float2 *)&M[along];
        mma_tf32(sum_q, kf, P_row.x, P_row.y);
        mma_tf32(sum_e, kf, M_row.x, M_row.y);
        float sum_k[4] = {};
        mma_tf32(sum_k, qf, P[down0], P[down1]);
        mma_tf32(sum_k, ef, M[down0], M[down1]);
        add_scaled(dk, in_k, kc, fk, sum_k);
        dks[c * THREADS] = to_float4(dk);
      }
      add_scaled(dq, off_rows, q, f, sum_q), add_scaled(de, off_rows, e, f, sum_e);
      for (int c = 0; c < 2; c++) off_rows[c] = sum_quad(off_rows[c] - in_k[c]);
    }
    // Among these eight rows: the last four with the first four, relative to row 3; of each four the last two with the
    // first two, relative to row 1 or 5; the two of a thread in fp32.
    RowPairs dk = row_pairs(dks[r * THREADS]);
    float off[2][2];  // as off_rows, of each level
    const float2 P_row = *(const float2 *)&P[along], M_row = *(const float2 *)&M[along];
    const float P_down[2] = {P[down0], P[down1]}, M_down[2] = {M[down0], M[down1]};
#pragma unroll
    for (int level = 0; level < 2; level++) {
      const float2 anchor = anchor_of(r, level ? (t & 2) - t : 1 - t);
      uint32_t qf[4], ef[4], kf[4];
#pragma unroll
      for (int i = 0; i < 4; i++) f.x[i] = exp2_approx(-fabsf(Gr.x[i] - (i & 1 ? anchor.y : anchor.x)));
      scaled_operand(qf, q, f), scaled_operand(ef, e, f), scaled_operand(kf, k, f);
      const bool along_on = level ? g >> 1 == t + 1 && !(t & 1) : g >= 4 && t < 2;
      const bool down_on = level ? t == (g >> 1) + 1 && (t & 1) : t >= 2 && g < 4;
      float sum_q[4] = {}, sum_e[4] = {}, sum_k[4] = {}, in_q[2] = {0.0f, 0.0f}, in_k[2] = {0.0f, 0.0f};
      mma_tf32(sum_q, kf, along_on ? P_row.x : 0.0f, along_on ? P_row.y : 0.0f);
      mma_tf32(sum_e, kf, along_on ? M_row.x : 0.0f, along_on ? M_row.y : 0.0f);
      mma_tf32(sum_k, qf, down_on ? P_down[0] : 0.0f, down_on ? P_down[1] : 0.0f);
      mma_tf32(sum_k, ef, down_on ? M_down[0] : 0.0f, down_on ? M_down[1] : 0.0f);
      add_scaled(dq, in_q, q, f, sum_q), add_scaled(de, in_q, e, f, sum_e), add_scaled(dk, in_k, k, f, sum_k);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        off[level][c] = in_q[c] - in_k[c];
        off[level][c] += __shfl_xor_sync(ALL, off[level][c], 1);
        if (!level) off[level][c] += __shfl_xor_sync(ALL, off[level][c], 2);
      }
    }
    {
      const int at0 = (first ^ (first >> 2)) * 8 + first, at1 = (second ^ (second >> 2)) * 8 + first;
      const float P00 = P[at0], P10 = P[at1], P11 = P[at1 + 1], M10 = M[at1];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float f10 = decay_factor(Gr.x[2 + c] - Gr.x[c]), kf = k.x[c] * f10;
        dq.x[c] += P00 * k.x[c];
        dq.x[2 + c] += P11 * k.x[2 + c] + P10 * kf;
        de.x[2 + c] += M10 * kf;
        dk.x[c] += P00 * q.x[c] + f10 * (P10 * q.x[2 + c] + M10 * e.x[2 + c]);
        dk.x[2 + c] += P11 * q.x[2 + c];
      }
    }
    // Everything of these rows is known now. The gate's gradient sums from the last row up, within a document.
    const int start0 = doc[row], start1 = doc[row + 1], below = doc[min(r * 8 + 8, 63)];
    const int next = doc[min(row + 2, 63)], next2 = doc[min(row + 4, 63)];
    RowPairs dg;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float x0 = q.x[c] * dq.x[c] + e.x[c] * de.x[c] - k.x[c] * dk.x[c];
      float x1 = q.x[2 + c] * dq.x[2 + c] + e.x[2 + c] * de.x[2 + c] - k.x[2 + c] * dk.x[2 + c];
      if (t == 1) x1 -= off[0][c];    // row 3, the last of the first four
      if (!(t & 1)) x1 -= off[1][c];  // rows 1 and 5
      float sum = start0 == start1 ? x0 + x1 : x0;
      float down = __shfl_down_sync(ALL, sum, 1, 4);
      if (t <= 2 && start0 == next) sum += down;
      down = __shfl_down_sync(ALL, sum, 2, 4);
      if (t <= 1 && start0 == next2) sum += down;
      if (start0 == below) sum += carry[c];
      down = __shfl_down_sync(ALL, sum, 1, 4);  // of the row after
      if (t == 3) down = carry[c];
      dg.x[c] = sum;
      dg.x[2 + c] = start1 == (t == 3 ? below : next) ? x1 + down : x1;
      carry[c] = __shfl_sync(ALL, sum, 0, 4) - off_rows[c];
    }
    RowPairs da, db;
    float ke[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int c = i & 1;
      const float x = (c ? unpack_hi(i < 2 ? a2.x : a2.y) : unpack_lo(i < 2 ? a2.x : a2.y)) + bias[c];
      float slope, moved;  // dg/dx, and dg/dA_log
      if (GENERAL && p.lower_bound != 0.0f) {
        slope = p.lower_bound * A.rate * sigmoid(A.rate * x) * sigmoid(-A.rate * x), moved = slope * x;
      } else {
        slope = gate_slope(A, x), moved = gate_value(A, x);
        if (moved * LOG2_E < GATE_FLOOR) slope = moved = 0.0f;  // 0 for good; a NaN stays one
      }
      if (!decay || row + (i >> 1) >= rows) slope = moved = 0.0f;
      da.x[i] = dg.x[i] * slope, sum_A += dg.x[i] * moved, sum_dt[c] += da.x[i];
      const float key_erase = k.x[i] * de.x[i];
      db.x[i] = key_erase * gates.x[i] * (1.0f - gates.x[i] * beta_unscale);
      ke[i >> 1] += key_erase;
      dk.x[i] += gates.x[i] * de.x[i];
    }
#pragma unroll
    for (int second_row = 0; second_row < 2; second_row++) {
      if (row + second_row >= rows) break;
      const int i = 2 * second_row;
      float2 dq2 = make_float2(dq.x[i], dq.x[i + 1]), dk2 = make_float2(dk.x[i], dk.x[i + 1]),
             da2 = make_float2(da.x[i], da.x[i + 1]), db2 = make_float2(db.x[i], db.x[i + 1]);
      float *sums =
          GENERAL ? p.group_sums + (((int64_t)b * p.chunks + n) * p.H + kh) * 4 * 64 * K + (row + second_row) * K + d
                  : NULL;
      // Adds what came from the members before; true for the last one, which writes it out.
      auto complete = [&](float2 &sum, int slot) {
        if (!GENERAL) return true;
        float2 *at = (float2 *)(sums + slot * 64 * K);
        if (p.member > 0) sum.x += at->x, sum.y += at->y;
        if (p.member + 1 == p.group) return true;
        *at = sum;
        return false;
      };
      auto write = [&](bf16 *to, int64_t stride, float2 v) {
        *(uint32_t *)(to + (row + second_row) * (int)stride) = pack_bf16(v.x, v.y);
      };
      if (complete(dq2, 0)) write(dq_out, p.dq_stride, dq2);
      if (complete(dk2, 1)) write(dk_out, p.dk_stride, dk2);
      if (decay && (p.erase != ERASE_CHANNEL || complete(da2, 2))) write(da_out, p.da_stride, da2);
      if (channel_erase && complete(db2, 3)) write(db_out, p.dbeta_stride, db2);
    }
    if (!channel_erase) {
#pragma unroll
      for (int x = 0; x < 2; x++) {
#pragma unroll
        for (int off = 4; off < 32; off <<= 1) ke[x] += __shfl_xor_sync(ALL, ke[x], off);
        if (g == 0) row_k[warp * 64 + row + x] = ke[x];
      }
    }
  }
  const int64_t sums_at = GENERAL ? ((int64_t)b * p.chunks + n) * p.gate_heads + gh : unit;
  const bool more = GENERAL && p.erase == ERASE_CHANNEL && p.member > 0;  // members before left their sums there
  for (int c = 0; c < 2; c++) {
    sum_dt[c] = sum_quad(sum_dt[c]);
    float *at = p.bias_sums + sums_at * (K + 1) + d + c;
    if (t == 0) *at = more ? sum_dt[c] + *at : sum_dt[c];
  }
  sum_A = sum_warp(sum_A);
  if (lane == 0) share[warp] = sum_A;
  __syncthreads();
  if (tid == 0) {
    float s = 0.0f;
    for (int w = 0; w < WARPS; w++) s += share[w];
    if (more) s += p.bias_sums[sums_at * (K + 1) + K];
    p.bias_sums[sums_at * (K + 1) + K] = s;
  }
  if (GENERAL && p.erase == ERASE_CHANNEL) {  // gates that a mean has replaced: each has an equal share of its gradient
    if (tid < 64) {
      float erase = 0.0f, write = 0.0f;
      if (p.erase_mean) {
        float *sums = p.group_rows + (((int64_t)b * p.chunks + n) * p.H + kh) * 64 + tid;
        for (int w = 0; w < WARPS; w++) erase += row_k[w * 64 + tid];
        if (p.member > 0) erase += sums[0];
        if (p.member + 1 < p.group) sums[0] = erase;
      }
      for (int part = 0; part < parts; part++)
        write += p.row_sums[((int64_t)part * 2 + 1) * units * 64 + unit * 64 + tid];
      betas[tid] = p.beta_scale * erase / K, row_k[tid] = write / p.V;
    }
    __syncthreads();
    if (p.erase_mean && p.member + 1 == p.group)
      for (int i = tid; i < rows * K; i += THREADS) {
        const int row = i / K, col = kh * K + i % K;
        float s = sigmoid(__bfloat162float(p.beta[(token0 + row) * p.beta_stride + col]));
        p.dbeta[(token0 + row) * p.dbeta_stride + col] = __float2bfloat16(betas[row] * s * (1.0f - s));
      }
    if (p.write_mean)
      for (int i = tid; i < rows * p.V; i += THREADS) {
        const int row = i / p.V;
        const int64_t col = (int64_t)h * p.V + i % p.V;
        float s = sigmoid(__bfloat162float(p.w[(token0 + row) * p.w_stride + col]));
        p.dw[(token0 + row) * p.dw_stride + col] = __float2bfloat16(row_k[row] * s * (1.0f - s));
      }
    return;
  }
  if (!channel_erase && tid < rows) {
    float db = 0.0f;
    for (int part = 0; part < parts; part++) db += p.row_sums[((int64_t)part * 2 + 1) * units * 64 + unit * 64 + tid];
    for (int w = 0; w < WARPS; w++) db += row_k[w * 64 + tid];
    float s = betas[tid] / p.beta_scale;
    p.dbeta[(token0 + tid) * p.dbeta_stride + h] = __float2bfloat16(db * p.beta_scale * s * (1.0f - s));
  }
}

// dt_bias and A_log: adds the shares of all chunks, in order. One block a head of the decay; 8 threads a parameter take
// every eighth chunk.
__global__ __launch_bounds__(1024) void delta_rule_channel_parameters_kernel(DeltaRuleArgs p) {
  __shared__ float part[8][260];
  const int h = blockIdx.x, lane = threadIdx.x & 127, s = threadIdx.x >> 7;
  const int64_t chunks = (int64_t)p.B * p.chunks;
  for (int i = lane; i <= p.K; i += 128) {
    float sum = 0.0f;
    for (int64_t c = s; c < chunks; c += 8) sum += p.bias_sums[(c * p.gate_heads + h) * (p.K + 1) + i];
    part[s][i] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i <= p.K; i += 1024) {
    float sum = 0.0f;
    for (int x = 0; x < 8; x++) sum += part[x][i];
    if (i < p.K)
      p.ddt_bias[h * p.K + i] += sum;
    else
      p.dA_log[h] += sum;
  }
}

#endif  // GDN_CUDA_DELTA_RULE_CHANNEL_CUH
