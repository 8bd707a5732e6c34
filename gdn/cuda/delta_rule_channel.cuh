// delta_rule_channel.cuh: the chunk-parallel kernels of the delta rule with a decay per key channel (KDA, Gated
// DeltaNet-2).
//
//     e = b o k,  z = w o v      (KDA: b = w = beta, one number a token)
//     M = strictly lower( sum_d e_id k_jd 2^(G_id - G_jd) )      P = scale lower( sum_d q_id k_jd 2^(G_id - G_jd) )
//     Q+ = scale q o 2^G      K- = k o 2^(Gc - G)      E+ = e o 2^G
// The decay cannot be split into a row and a column factor over a whole chunk without overflow. 16 x 16 blocks below
// the diagonal: both factors are taken relative to G of the last row of the column block, so both are <= 1 and nothing
// from the future enters; tensor cores. Diagonal blocks: pair by pair in fp32, every exponent <= 0. Backward, from the
// raw products that delta_rule_gradients_kernel leaves: two threads own a key channel and walk over the same 16 x 16
// blocks in fp32 (4 multiply-adds a pair), from the last rows to the first, so that a row's gradients are complete when
// its own block is done and the gate's gradient is a running sum.
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

// 2^min(x, 0): exponents that stand for a decay never exceed 0; those between two documents may, and are masked later.
__device__ __forceinline__ float decay_factor(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fminf(x, 0.0f)));
  return y;
}
// a_t of one channel: g log2 e, not below the floor
__device__ __forceinline__ float gate_log2(float A_log, float x) {
  float a = gate_value(A_log, x) * LOG2_E;
  return a < GATE_FLOOR ? GATE_FLOOR : a;  // not fmaxf, which would hide a NaN
}
// The same in the general form: bounded, g = lower_bound sigmoid(exp(A_log) x), when lower_bound is not 0.
__device__ __forceinline__ float gate_log2_general(float A_log, float x, float lower_bound) {
  return lower_bound != 0.0f ? lower_bound * LOG2_E * sigmoid(__expf(A_log) * x) : gate_log2(A_log, x);
}

enum ChannelForm { CHANNEL_KDA, CHANNEL_GDN2, CHANNEL_GENERAL };

template <int K>
struct PrepareChannelLayout {
  static constexpr int LD = 68, LG = K + 4, TILE = 64 * K * 2;
  static constexpr int Q = 0, KEY = TILE, E = 2 * TILE, KEY_ANCHORED = 3 * TILE, G = 4 * TILE;
  static constexpr int A = 64 * LD * 4, P = 2 * A;  // later: M at 0, A, P
  static constexpr int VEC = G + 64 * LG * 4, DOC = VEC + VEC_COUNT * 4, SEGMENT = DOC + 256;
  static constexpr int BYTES = SEGMENT + 4 * K * 4;
  static_assert(P + TILE_BLOCK_BYTES <= VEC, "M, A and P must fit over the tiles");
};

template <int K, bool GENERAL>
__global__ __launch_bounds__(256, GENERAL ? 1 : 2) void delta_rule_prepare_channel_kernel(DeltaRuleArgs p) {
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
    const float A_log = decay ? p.A_log[gh] : 0.0f, bias = decay ? p.dt_bias[gh * K + d] : 0.0f;
    const unsigned char *logits =
        smem + L::KEY_ANCHORED + (d >> 6) * TILE_BLOCK_BYTES + (d & 7) * 2;  // until the keys come
    float sum = 0.0f;
    for (int i0 = first; i0 < first + ROWS; i0 += 8) {
      float a[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int row = i0 + i;
        float x = __bfloat162float(*(const bf16 *)(logits + row * 128 + (((d >> 3) ^ row) & 7) * 16));
        if (GENERAL)
          a[i] = row < rows && decay ? gate_log2_general(A_log, x + bias, p.lower_bound) : 0.0f;
        else
          a[i] = row < rows ? gate_log2(A_log, x + bias) : 0.0f;
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
  // Diagonal blocks: 4 x 136 pairs.
  float ps[3] = {}, ms[3] = {};
#pragma unroll
  for (int turn = 0; turn < 3; turn++) {
    int pair = tid + 256 * turn;
    if (turn == 2) pair = warp == 7 ? 512 + lane : 544;
    if (pair >= 544) continue;
    const int block = pair / 136, m = pair - block * 136;
    int i = (int)((sqrtf(8.0f * m + 1.0f) - 1.0f) * 0.5f);
    if ((i + 1) * (i + 2) / 2 <= m) i++;
    if (i * (i + 1) / 2 > m) i--;
    const int j = m - i * (i + 1) / 2 + block * 16;
    i += block * 16;
    float s = 0.0f, z = 0.0f;
#pragma unroll 2
    for (int piece = 0; piece < PIECES; piece++) {
      const int at_i = (piece >> 3) * TILE_BLOCK_BYTES + i * 128 + (((piece & 7) ^ (i & 7)) << 4);
      const int at_j = (piece >> 3) * TILE_BLOCK_BYTES + j * 128 + (((piece & 7) ^ (j & 7)) << 4);
      uint4 q = *(const uint4 *)(smem + L::Q + at_i), e = *(const uint4 *)(smem + L::E + at_i);
      uint4 k = *(const uint4 *)(smem + L::KEY + at_j);
      const uint32_t *qs = &q.x, *es = &e.x, *ks = &k.x;
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float4 Gi = *(const float4 *)&G[i * LG + piece * 8 + 4 * c],
               Gj = *(const float4 *)&G[j * LG + piece * 8 + 4 * c];
        float f0 = unpack_lo(ks[2 * c]) * decay_factor(Gi.x - Gj.x),
              f1 = unpack_hi(ks[2 * c]) * decay_factor(Gi.y - Gj.y);
        float f2 = unpack_lo(ks[2 * c + 1]) * decay_factor(Gi.z - Gj.z);
        float f3 = unpack_hi(ks[2 * c + 1]) * decay_factor(Gi.w - Gj.w);
        s += unpack_lo(qs[2 * c]) * f0 + unpack_hi(qs[2 * c]) * f1 + unpack_lo(qs[2 * c + 1]) * f2 +
             unpack_hi(qs[2 * c + 1]) * f3;
        z += unpack_lo(es[2 * c]) * f0 + unpack_hi(es[2 * c]) * f1 + unpack_lo(es[2 * c + 1]) * f2 +
             unpack_hi(es[2 * c + 1]) * f3;
      }
    }
    ps[turn] = s, ms[turn] = z;
  }
  __syncthreads();  // the tiles have served: M, A and P take their place
  float *M = (float *)smem, *A = (float *)(smem + L::A);
  for (int i = tid; i < TILE_BLOCK_BYTES / 16; i += 256) ((uint4 *)(smem + L::P))[i] = make_uint4(0, 0, 0, 0);
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
#pragma unroll
  for (int turn = 0; turn < 3; turn++) {
    int pair = tid + 256 * turn;
    if (turn == 2) pair = warp == 7 ? 512 + lane : 544;
    if (pair >= 544) continue;
    const int block = pair / 136, m = pair - block * 136;
    int i = (int)((sqrtf(8.0f * m + 1.0f) - 1.0f) * 0.5f);
    if ((i + 1) * (i + 2) / 2 <= m) i++;
    if (i * (i + 1) / 2 > m) i--;
    const int j = m - i * (i + 1) / 2 + block * 16;
    i += block * 16;
    const bool same = doc[i] == doc[j];
    *(bf16 *)(smem + L::P + i * 128 + (((j >> 3) ^ (i & 7)) << 4) + (j & 7) * 2) =
        __float2bfloat16(same ? p.scale * ps[turn] : 0.0f);
    if (i > j) M[i * LD + j] = same ? ms[turn] : 0.0f;
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

template <int K>
struct ChannelGradientsLayout {
  // scores transposed, block (r, c) of 16 x 16 at r (r + 1) / 2 + c: P and M side by side
  static constexpr int SCORES = 0, G = 10 * 256 * 2 * 4, DK = G + 64 * K * 4, KEY = DK + 64 * K * 4;
  static constexpr int DOC = KEY + 64 * K * 2, BETA = DOC + 256, ROW_K = BETA + 256;
  static constexpr int SHARE = ROW_K + (K / 16) * 64 * 4, BYTES = SHARE + 64;
};

// Two threads of a warp, 16 lanes apart, share a key channel: of every 16 rows one has the first eight, one the last.
template <int K, int FORM>
__global__ __launch_bounds__(2 * K, FORM == CHANNEL_GENERAL
                                        ? 1
                                        : 2) void delta_rule_channel_gradients_kernel(DeltaRuleArgs p, int parts) {
  typedef ChannelGradientsLayout<K> L;
  constexpr int THREADS = 2 * K, WARPS = K / 16;
  constexpr bool GENERAL = FORM == CHANNEL_GENERAL;
  const unsigned ALL = 0xffffffffu;
  extern __shared__ __align__(1024) unsigned char smem[];
  float *scores = (float *)(smem + L::SCORES), *betas = (float *)(smem + L::BETA), *row_k = (float *)(smem + L::ROW_K);
  float *share = (float *)(smem + L::SHARE);
  int *doc = (int *)(smem + L::DOC);
  const int n = blockIdx.x, kh = blockIdx.y, b = blockIdx.z;
  // the value head, and the head of the decay
  const int h = GENERAL ? kh * p.group + p.member : kh, gh = GENERAL && p.erase != ERASE_CHANNEL ? h : kh;
  const bool channel_erase = GENERAL ? p.erase == ERASE_CHANNEL && !p.erase_mean : FORM == CHANNEL_GDN2;
  const bool decay = !GENERAL || p.gate != GATE_NONE;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, half = lane >> 4, d = warp * 16 + (lane & 15);
  float *G = (float *)(smem + L::G) + d, *dks = (float *)(smem + L::DK) + d;  // this channel's columns, rows K apart
  const bf16 *key = (const bf16 *)(smem + L::KEY) + d;
  const int t0 = n * 64, rows = min(64, p.T - t0);
  const int64_t token0 = (int64_t)b * p.T + t0, unit = ((int64_t)b * p.chunks + n) * p.HV + h;
  const int64_t units = (int64_t)p.B * p.chunks * p.HV;
  bool carried = n > 0;
  if (p.doc_start) carried = n > 0 && p.doc_start[token0] < t0;

  if (tid < 64) {
    doc[tid] = p.doc_start ? max(p.doc_start[token0 + min(tid, rows - 1)] - t0, 0) : 0;
    betas[tid] = p.vectors[unit * VEC_COUNT + (GENERAL ? VEC_ERASE : VEC_BETA) + tid];
  }
  // k stays; the gate logits wait where dk will be summed
#pragma unroll
  for (int i = tid; i < 64 * K / 8; i += THREADS) {
    const int row = i / (K / 8), col = kh * K + i % (K / 8) * 8;
    uint4 x = make_uint4(0, 0, 0, 0), y = x;
    if (row < rows) {
      x = __ldg((const uint4 *)(p.k + (token0 + row) * p.k_stride + col));
      if (decay) y = __ldg((const uint4 *)(p.a + (token0 + row) * p.a_stride + (gh - kh) * K + col));
    }
    ((uint4 *)(smem + L::KEY))[i] = x;
    ((uint4 *)(smem + L::DK))[i] = y;
  }
  __syncthreads();
  // dP and dM, masked, transposed into blocks
#pragma unroll 8
  for (int i = tid; i < 4096; i += THREADS) {
    const int row = i >> 6, col = i & 63;
    float P = __ldg(p.raw_score + unit * 8192 + i), M = __ldg(p.raw_score + unit * 8192 + 4096 + i);
    if ((col >> 4) > (row >> 4)) continue;
    const bool same = doc[row] == doc[col];
    float *s = scores + ((row >> 4) * ((row >> 4) + 1) / 2 + (col >> 4)) * 512 + (col & 15) * 16 + (row & 15);
    s[0] = same && col <= row ? p.scale * P : 0.0f;
    s[256] = same && col < row ? -M : 0.0f;
  }
  // G: each half of the pair sums 32 rows, then the second adds what the first came to.
  const float A_log = decay ? p.A_log[gh] : 0.0f, bias = decay ? p.dt_bias[gh * K + d] : 0.0f;
  const bf16 *a_in = p.a + token0 * p.a_stride + gh * K + d, *q_in = p.q + token0 * p.q_stride + kh * K + d;
  const bf16 *b_in = p.beta + token0 * p.beta_stride + kh * K + d;
  const float *raw = p.raw + unit * 3 * 64 * K + d;
  float sum = 0.0f;
  for (int i0 = half * 32; i0 < half * 32 + 32; i0 += 8) {
    float a[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float x = __bfloat162float(((const bf16 *)(smem + L::DK))[(i0 + i) * K + d]);
      if (GENERAL)
        a[i] = i0 + i < rows && decay ? gate_log2_general(A_log, x + bias, p.lower_bound) : 0.0f;
      else
        a[i] = i0 + i < rows ? gate_log2(A_log, x + bias) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      sum = doc[i0 + i] == i0 + i ? a[i] : sum + a[i];
      G[(i0 + i) * K] = sum;
    }
  }
  const float first_half = __shfl_sync(ALL, sum, lane & 15);
  if (half)
    for (int row = 32; row < 64; row++)
      if (doc[row] < 32) G[row * K] += first_half;
  __syncthreads();  // the logits give way to dk; the scores are there
  const float G_end = G[63 * K];
  // What comes through the state into dk, and into the gates of all rows of the last document.
  float carry = 0.0f;
  for (int i0 = half * 32; i0 < half * 32 + 32; i0 += 16) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = __ldg(raw + (128 + i0 + i) * K);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int row = i0 + i;
      x[i] = doc[row] == doc[63] ? x[i] * decay_factor(G_end - G[row * K]) : 0.0f;
      dks[row * K] = x[i];
      carry += x[i] * __bfloat162float(key[row * K]);
    }
  }
  carry += __shfl_xor_sync(ALL, carry, 16);
  carry += (carried && doc[63] == 0 ? decay_factor(G_end) : 0.0f) * p.raw_state[unit * K + d];
  __syncwarp();

  float sum_A = 0.0f, sum_dt = 0.0f;
  for (int r = 3; r >= 0; r--) {
    const int row0 = r * 16 + half * 8;  // of this thread's eight rows
    float q[8], e[8], dq[8], de[8], Gi[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int row = row0 + i, safe = min(row, rows - 1);
      dq[i] = __ldg(raw + row * K), de[i] = __ldg(raw + (64 + row) * K);
      q[i] = row < rows ? __bfloat162float(__ldg(q_in + safe * p.q_stride)) : 0.0f;
      if (channel_erase) e[i] = __bfloat162float(__ldg(b_in + safe * p.beta_stride));
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int row = row0 + i;
      Gi[i] = G[row * K];
      float plus = carried && doc[row] == 0 ? decay_factor(Gi[i]) : 0.0f;
      dq[i] *= p.scale * plus, de[i] *= -plus;
      float gate = channel_erase ? p.beta_scale * sigmoid(e[i]) : betas[row];
      e[i] = __bfloat162float(__float2bfloat16(gate * __bfloat162float(key[row * K])));  // as prepare rounded it
    }
    // the diagonal block; above the diagonal the scores are 0
    const float *s = scores + (r * (r + 1) / 2 + r) * 512 + half * 8;
#pragma unroll 2
    for (int j = 0; j < 16; j++) {
      const int row = r * 16 + j;
      const float k = __bfloat162float(key[row * K]), Gj = G[row * K];
      float dk = 0.0f;
#pragma unroll
      for (int i4 = 0; i4 < 2; i4++) {
        float4 P4 = *(const float4 *)&s[j * 16 + i4 * 4], M4 = *(const float4 *)&s[256 + j * 16 + i4 * 4];
        const float *Ps = &P4.x, *Ms = &M4.x;
#pragma unroll
        for (int x = 0; x < 4; x++) {
          const int i = i4 * 4 + x;
          float f = decay_factor(Gi[i] - Gj), kf = k * f;
          dq[i] += Ps[x] * kf, de[i] += Ms[x] * kf;
          dk += f * (Ps[x] * q[i] + Ms[x] * e[i]);
        }
      }
      dk += __shfl_xor_sync(ALL, dk, 16);
      if (!half) dks[row * K] += dk;
    }
    // earlier column blocks, relative to their last row
    for (int c = r - 1; c >= 0; c--) {
      const float *s = scores + (r * (r + 1) / 2 + c) * 512 + half * 8;
      const float anchor = G[(c * 16 + 15) * K];
      float f[8];
#pragma unroll
      for (int i = 0; i < 8; i++) f[i] = decay_factor(Gi[i] - anchor);
#pragma unroll 4
      for (int j = 0; j < 16; j++) {
        const int row = c * 16 + j;
        const float fk = decay_factor(anchor - G[row * K]), k = __bfloat162float(key[row * K]) * fk;
        float dk = 0.0f;
#pragma unroll
        for (int i4 = 0; i4 < 2; i4++) {
          float4 P4 = *(const float4 *)&s[j * 16 + i4 * 4], M4 = *(const float4 *)&s[256 + j * 16 + i4 * 4];
          const float *Ps = &P4.x, *Ms = &M4.x;
#pragma unroll
          for (int x = 0; x < 4; x++) {
            const int i = i4 * 4 + x;
            const float kf = k * f[i];
            dq[i] += Ps[x] * kf, de[i] += Ms[x] * kf;
            dk += f[i] * (Ps[x] * q[i] + Ms[x] * e[i]);
          }
        }
        dk += __shfl_xor_sync(ALL, dk, 16);
        if (!half) dks[row * K] += fk * dk;
      }
    }
    __syncwarp();
    // Everything of these rows is known now. The gate's gradient sums from the last row up: first within the eight
    // rows, then with what lies below, if it is the same document.
    float x[8], gates[8], dg[8], running = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int safe = min(row0 + i, rows - 1);
      x[i] = decay ? __bfloat162float(__ldg(a_in + safe * p.a_stride)) + bias : 0.0f;
      if (channel_erase) gates[i] = __bfloat162float(__ldg(b_in + safe * p.beta_stride));
    }
#pragma unroll
    for (int i = 7; i >= 0; i--) {
      const int row = row0 + i;
      if (row < 63 && doc[row] != doc[row + 1]) running = 0.0f;
      running += q[i] * dq[i] + e[i] * de[i] - __bfloat162float(key[row * K]) * dks[row * K];
      dg[i] = running;
    }
    const int below = doc[min(row0 + 8, 63)];
    float top = dg[0] + (doc[row0] == below ? carry : 0.0f);
    const float lower = __shfl_sync(ALL, top, lane | 16);  // of the second eight rows: what the first eight stand on
    if (!half) carry = lower, top = dg[0] + (doc[row0] == below ? carry : 0.0f);
#pragma unroll
    for (int i = 7; i >= 0; i--) {
      const int row = row0 + i;
      const float k = __bfloat162float(key[row * K]), dk = dks[row * K];
      const float gate = channel_erase ? p.beta_scale * sigmoid(gates[i]) : betas[row];
      float g = dg[i] + (doc[row] == below ? carry : 0.0f), ke = k * de[i];
      if (GENERAL) {
        if (row < rows) {
          const float A = __expf(A_log) * x[i], y = sigmoid(A), value = gate_value(A_log, x[i]);
          float da = 0.0f;
          if (p.lower_bound != 0.0f)
            da = g * p.lower_bound * y * sigmoid(-A), sum_A += da * A, da *= __expf(A_log);
          else if (decay && !(value * LOG2_E < GATE_FLOOR))
            da = g * gate_slope(A_log, x[i]), sum_A += g * value;
          sum_dt += da;
          const int64_t token = token0 + row;
          float *sums = p.group_sums + (((int64_t)b * p.chunks + n) * p.H + kh) * 4 * 64 * K + row * K + d;
          // Adds what came from the members before; true for the last one, which writes it out.
          auto complete = [&](float &sum, int slot) {
            if (p.member > 0) sum += sums[slot * 64 * K];
            if (p.member + 1 == p.group) return true;
            sums[slot * 64 * K] = sum;
            return false;
          };
          float dq_sum = dq[i], dk_sum = dk + gate * de[i], db = ke * gate * (1.0f - gate / p.beta_scale);
          if (complete(dq_sum, 0)) p.dq[token * p.dq_stride + kh * K + d] = __float2bfloat16(dq_sum);
          if (complete(dk_sum, 1)) p.dk[token * p.dk_stride + kh * K + d] = __float2bfloat16(dk_sum);
          if (decay && (p.erase != ERASE_CHANNEL || complete(da, 2)))
            p.da[token * p.da_stride + gh * K + d] = __float2bfloat16(da);
          if (channel_erase && complete(db, 3)) p.dbeta[token * p.dbeta_stride + kh * K + d] = __float2bfloat16(db);
        }
      } else if (row < rows) {
        float value = gate_value(A_log, x[i]), da = 0.0f;
        if (!(value * LOG2_E < GATE_FLOOR)) da = g * gate_slope(A_log, x[i]), sum_A += g * value;
        sum_dt += da;
        p.da[(token0 + row) * p.da_stride + h * K + d] = __float2bfloat16(da);
        p.dq[(token0 + row) * p.dq_stride + h * K + d] = __float2bfloat16(dq[i]);
        p.dk[(token0 + row) * p.dk_stride + h * K + d] = __float2bfloat16(dk + gate * de[i]);
        if (channel_erase)
          p.dbeta[(token0 + row) * p.dbeta_stride + h * K + d] =
              __float2bfloat16(ke * gate * (1.0f - gate / p.beta_scale));
      }
      if (!channel_erase) {
#pragma unroll
        for (int off = 1; off < 16; off <<= 1) ke += __shfl_xor_sync(ALL, ke, off);
        if ((lane & 15) == 0) row_k[warp * 64 + row] = ke;
      }
    }
    carry = __shfl_sync(ALL, top, lane & 15);
  }
  sum_dt += __shfl_xor_sync(ALL, sum_dt, 16);
  const int64_t sums_at = GENERAL ? ((int64_t)b * p.chunks + n) * p.gate_heads + gh : unit;
  const bool more = GENERAL && p.erase == ERASE_CHANNEL && p.member > 0;  // members before left their sums there
  if (!half) {
    if (more) sum_dt += p.bias_sums[sums_at * (K + 1) + d];
    p.bias_sums[sums_at * (K + 1) + d] = sum_dt;
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
