// delta_rule_prepare.cuh: what the chunks of the delta rule need before the scan, all chunks in parallel.
//
// For a chunk of 64 tokens and a value head, with a_t = g_t log2 e, G_i = sum of a_t from the chunk's (or document's)
// start:
//     M = strictly lower( beta_i (k_i . k_j) 2^(G_i - G_j) )         A = (I + M)^-1
//     P = scale lower( (q_i . k_j) 2^(G_i - G_j) )
// One block per chunk and key head, 4 warps; warp w owns rows 16w to 16w + 15. The products of q and k are shared by
// the value heads of the key head. The inverse: fp32 forward substitution on the 16 x 16 diagonal blocks, then two
// merges in fp32 (a product series in place of substitution loses everything when keys repeat). Reads q, k, logits;
// writes A and P (bf16, 8 KiB each) and four rows of 64 numbers (fp32, 1 KiB) per chunk and head: G, beta, 2^G_i (0
// where the carried-in state does not reach) and 2^(G_63 - G_j) (0 where j does not reach the next chunk).
//
// defines: DeltaRuleArgs, ChunkVectors, exp_approx, reciprocal, softplus, sigmoid, GateRate, gate_rate, gate_value,
//          gate_slope, PrepareLayout, invert_unit_lower, delta_rule_prepare_kernel
#ifndef GDN_CUDA_DELTA_RULE_PREPARE_CUH
#define GDN_CUDA_DELTA_RULE_PREPARE_CUH

#include "delta_rule.h"
#include "mma.cuh"

typedef __nv_bfloat16 bf16;

#define LOG2_E 1.4426950408889634f
#define GATE_FLOOR (-126.0f)  // of a_t: 2^-126 is the smallest normal number, what it multiplies vanishes

// What all kernels get. Strides are resolved (never 0). A chunk and value head is the unit (b * chunks + n) * HV + h.
struct DeltaRuleArgs {
  int B, T, chunks, H, HV, group, K, V, gate, erase;
  float scale, beta_scale;
  const bf16 *q, *k, *v, *a, *beta, *w;
  int64_t q_stride, k_stride, v_stride, a_stride, beta_stride, w_stride;
  const float *A_log, *dt_bias;
  const int32_t *doc_start;
  bf16 *o;
  int64_t o_stride;
  const bf16 *d_o;
  int64_t d_o_stride;
  // saved, the matrices as stored tiles (mma.cuh): blocks of 64 x 64
  bf16 *A, *P;     // [unit] tile
  float *vectors;  // [unit][4][64]
  bf16 *operands;  // channel decay: [unit][Q+, K-, E+][K / 64] tile of 64 tokens x 64 keys
  bf16 *U;         // [unit][V / 64] tile of 64 tokens x 64 value columns
  bf16 *Ht;  // [unit][V / 64][K / 64] tile of 64 value columns x 64 keys: the state at the chunk's start, transposed
  // scratch
  bf16 *dX;          // as U
  bf16 *dHt;         // as Ht: the gradient of the state at the chunk's end
  float *row_sums;   // [parts][2][unit][64]: shares of dG and of dbeta
  float *gate_sums;  // [2][B][HV]
  // scratch with channel decay
  float *raw;        // [unit][3][64][K]: dO H^T, dX H^T, U dH'^T
  float *raw_score;  // [unit][2][64][64]: dO U^T, dX U^T
  float *raw_state;  // [unit][K]: sum over value columns of H o dH'
  float *bias_sums;  // [unit][K + 1]: shares of ddt_bias, then of dA_log
  // gradients
  bf16 *dq, *dk, *dv, *da, *dbeta, *dw;
  int64_t dq_stride, dk_stride, dv_stride, da_stride, dbeta_stride, dw_stride;
  float *dA_log, *ddt_bias;
  // the channel form: decay, erase gate or both per key channel
  int channel;                 // whether it is
  int general;                 // whether it needs CHANNEL_GENERAL
  int gate_heads;              // heads that g has: HV, or H with ERASE_CHANNEL
  int write_columns;           // the write gate is one number a value column (w), not one a token and head
  int erase_mean, write_mean;  // a head's mean takes the place of its gates
  float lower_bound;           // of the bounded gate; 0: not bounded
  int member;                  // which value head of its key head a launch of the gradients serves
  float *group_sums;           // scratch, group > 1: [B][chunks][H][4][64][K], dq, dk, da, dbeta of the members so far
  float *group_rows;           // scratch, group > 1: [B][chunks][H][64], likewise <k, de> of the erase gate's mean
};

// In the channel form: beta, the write gate if it is one number a token and head; in CHANNEL_GENERAL, in place of G,
// the erase gate if that is; and the decay of the whole chunk per key channel.
enum ChunkVectors {
  VEC_G = 0,
  VEC_BETA = 64,
  VEC_IN = 128,
  VEC_OUT = 192,
  VEC_ERASE = 0,
  VEC_DECAY = 128,
  VEC_COUNT = 256
};

// Gates, without branches: those of key channels are a large part of the channel form's work. Relative errors below
// 1e-6; what is below 2^-126 is 0.
__device__ __forceinline__ float exp_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * LOG2_E));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// log(1 + e^x) = max(x, 0) + log(1 + e), e = e^-|x| <= 1, by 2 atanh(s), s = e / (2 + e) <= 1/3
__device__ __forceinline__ float softplus(float x) {
  const float e = exp_approx(-fabsf(x)), s = e * reciprocal(2.0f + e), z = s * s;
  float series = 2.0f / 13;
  series = series * z + 2.0f / 11;
  series = series * z + 2.0f / 9;
  series = series * z + 2.0f / 7;
  series = series * z + 2.0f / 5;
  series = series * z + 2.0f / 3;
  series = series * z + 2.0f;
  return s * series + fmaxf(x, 0.0f);
}
__device__ __forceinline__ float sigmoid(float x) {
  const float e = exp_approx(-fabsf(x)), y = reciprocal(1.0f + e);
  return x >= 0.0f ? y : e * y;
}
// exp(A_log) of a head
struct GateRate {
  float log, rate;
};
__device__ __forceinline__ GateRate gate_rate(float A_log) { return {A_log, exp_approx(A_log)}; }
// g = -exp(A_log) softplus(x) in [-inf, 0]. Far left softplus(x) = exp(x); one exponential avoids inf * 0.
__device__ __forceinline__ float gate_value(GateRate A, float x) {
  const float far = -exp_approx(A.log + x), near = -A.rate * softplus(x);
  return x < -15.0f ? far : near;
}
// dg/dx = -exp(A_log) sigmoid(x)
__device__ __forceinline__ float gate_slope(GateRate A, float x) {
  const float far = -exp_approx(A.log + x), near = -A.rate * sigmoid(x);
  return x < -15.0f ? far : near;
}

template <int K>
struct PrepareLayout {
  static constexpr int LD = 68;  // row stride of the fp32 matrices: 16-byte rows, an odd number of 16-byte pieces
  static constexpr int TILES = 2 * 64 * K * 2, INVERSE = 2 * 64 * LD * 4 + TILE_BLOCK_BYTES;  // one after the other
  static constexpr int VEC = TILES > INVERSE ? TILES : INVERSE, BYTES = VEC + VEC_COUNT * 4 + 64 * 4 + 16;
};

// A = (I + M)^-1 of a 64 x 64 strictly lower M in shared memory, rows of LD floats; the first 128 threads work, all
// take part in the barriers. M's rows of a diagonal block must be visible to the warp that solves it. The part above
// M's diagonal is scratch. A is written whole. Ends without a barrier.
template <int LD>
__device__ __forceinline__ void invert_unit_lower(float *A, float *M, int tid) {
  const int lane = tid & 31, warp = tid >> 5;
  const bool work = tid < 128;
  if (work) {
    // Diagonal blocks: lane c solves column c of (I + M) y = 1_c, row after row.
    float y[16];
    int c = lane & 15, r0 = warp * 16;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float s = i == c ? 1.0f : 0.0f;
      const float *row = &M[(r0 + i) * LD + r0];
#pragma unroll
      for (int m = 0; m < i; m++) s -= row[m] * y[m];
      y[i] = s;
    }
    if (lane < 16)
#pragma unroll
      for (int i = 0; i < 16; i++) A[(r0 + i) * LD + r0 + c] = y[i];
  }
  __syncthreads();
  // Merge 16 -> 32: block (1,0) = -A11 M10 A00, for both halves; the product M10 A00 waits above the diagonal of M.
  {
    int half = tid >> 6, i = (tid >> 2) & 15, j = (tid & 3) * 4, c0 = half * 32, q0 = c0 + 16;
    float x[4] = {};
    if (work) {
#pragma unroll
      for (int m = 0; m < 16; m++) {
        float l = M[(q0 + i) * LD + c0 + m];
        float4 r = *(const float4 *)&A[(c0 + m) * LD + c0 + j];
        x[0] += l * r.x, x[1] += l * r.y, x[2] += l * r.z, x[3] += l * r.w;
      }
      *(float4 *)&M[(c0 + i) * LD + q0 + j] = make_float4(x[0], x[1], x[2], x[3]);
    }
    __syncthreads();
    if (work) {
      x[0] = x[1] = x[2] = x[3] = 0.0f;
#pragma unroll
      for (int m = 0; m < 16; m++) {
        float l = A[(q0 + i) * LD + q0 + m];
        float4 r = *(const float4 *)&M[(c0 + m) * LD + q0 + j];
        x[0] -= l * r.x, x[1] -= l * r.y, x[2] -= l * r.z, x[3] -= l * r.w;
      }
      *(float4 *)&A[(q0 + i) * LD + c0 + j] = make_float4(x[0], x[1], x[2], x[3]);
      *(float4 *)&A[(c0 + i) * LD + q0 + j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  __syncthreads();
  // Merge 32 -> 64 in the same way: a thread computes rows i and i + 16, four columns.
  {
    int i = tid >> 3, j = (tid & 7) * 4;
    float x[2][4] = {};
    if (work) {
#pragma unroll
      for (int m = 0; m < 32; m += 4) {
        float4 l0 = *(const float4 *)&M[(32 + i) * LD + m], l1 = *(const float4 *)&M[(48 + i) * LD + m];
        const float *p0 = &l0.x, *p1 = &l1.x;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          float4 r = *(const float4 *)&A[(m + e) * LD + j];
          x[0][0] += p0[e] * r.x, x[0][1] += p0[e] * r.y, x[0][2] += p0[e] * r.z, x[0][3] += p0[e] * r.w;
          x[1][0] += p1[e] * r.x, x[1][1] += p1[e] * r.y, x[1][2] += p1[e] * r.z, x[1][3] += p1[e] * r.w;
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++)
        *(float4 *)&M[(i + 16 * h) * LD + 32 + j] = make_float4(x[h][0], x[h][1], x[h][2], x[h][3]);
    }
    __syncthreads();
    if (work) {
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int e = 0; e < 4; e++) x[h][e] = 0.0f;
#pragma unroll
      for (int m = 0; m < 32; m += 4) {
        float4 l0 = *(const float4 *)&A[(32 + i) * LD + 32 + m], l1 = *(const float4 *)&A[(48 + i) * LD + 32 + m];
        const float *p0 = &l0.x, *p1 = &l1.x;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          float4 r = *(const float4 *)&M[(m + e) * LD + 32 + j];
          x[0][0] -= p0[e] * r.x, x[0][1] -= p0[e] * r.y, x[0][2] -= p0[e] * r.z, x[0][3] -= p0[e] * r.w;
          x[1][0] -= p1[e] * r.x, x[1][1] -= p1[e] * r.y, x[1][2] -= p1[e] * r.z, x[1][3] -= p1[e] * r.w;
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        *(float4 *)&A[(32 + i + 16 * h) * LD + j] = make_float4(x[h][0], x[h][1], x[h][2], x[h][3]);
        *(float4 *)&A[(i + 16 * h) * LD + 32 + j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  }
}

template <int K>
__global__ __launch_bounds__(128, K <= 128 ? 4 : 3) void delta_rule_prepare_kernel(DeltaRuleArgs p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  constexpr int LD = PrepareLayout<K>::LD;
  float *M = (float *)smem, *A = M + 64 * LD;
  uint4 *out_P = (uint4 *)(A + 64 * LD);  // a tile
  float *vec = (float *)(smem + PrepareLayout<K>::VEC);
  int *doc = (int *)(vec + VEC_COUNT);  // document's first row in the chunk, 0 when it began before
  float *carry = (float *)(doc + 64);   // [0] sum of the first half, [1] whether the chunk continues a document
  const int n = blockIdx.x, kh = blockIdx.y, b = blockIdx.z;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int t0 = n * 64, rows = min(64, p.T - t0);
  const int64_t token0 = (int64_t)b * p.T + t0;
  const bool erase = p.erase != ERASE_NONE;

  uint32_t q_tile = smem_address(smem), k_tile = q_tile + 64 * K * 2;
  load_tile_async<K, 128>(q_tile, p.q + token0 * p.q_stride + kh * K, p.q_stride, rows);
  load_tile_async<K, 128>(k_tile, p.k + token0 * p.k_stride + kh * K, p.k_stride, rows);
  cp_async_commit();
  if (tid < 64) {
    int r = min(tid, rows - 1);  // padded rows belong to the last document
    int start = p.doc_start ? p.doc_start[token0 + r] - t0 : 0;
    doc[tid] = max(start, 0);
    if (tid == 0) carry[1] = n > 0 && start < (p.doc_start ? 0 : 1) ? 1.0f : 0.0f;
  }
  cp_async_wait<0>();
  __syncthreads();

  // Raw scores of rows 16 warp .., columns up to the diagonal block.
  float qk[8][4] = {}, kk[8][4] = {};
  const TileLane ln = lane_n(lane), lk = lane_k(lane);
#pragma unroll 4
  for (int ks = 0; ks < K / 16; ks++) {
    uint32_t aq[4], ak[4];
    ldmatrix_x4(aq, tile_at(q_tile, lk, warp * 16, ks * 16));
    ldmatrix_x4(ak, tile_at(k_tile, lk, warp * 16, ks * 16));
#pragma unroll
    for (int np = 0; np < 4; np++)
      if (np <= warp) {
        uint32_t bk[4];
        ldmatrix_x4(bk, tile_at(k_tile, ln, np * 16, ks * 16));
        mma_bf16(qk[2 * np], aq, bk[0], bk[1]);
        mma_bf16(qk[2 * np + 1], aq, bk[2], bk[3]);
        if (erase) {
          mma_bf16(kk[2 * np], ak, bk[0], bk[1]);
          mma_bf16(kk[2 * np + 1], ak, bk[2], bk[3]);
        }
      }
  }
  __syncthreads();  // q and k are no longer needed: M and A take their place

  for (int hv = kh * p.group; hv < (kh + 1) * p.group; hv++) {
    const int64_t unit = ((int64_t)b * p.chunks + n) * p.HV + hv;
    // Gates and their sum, restarted at every document.
    float G = 0.0f;
    if (tid < 64) {
      float beta = 0.0f;
      if (tid < rows) {
        float dt = 0.0f;
        if (p.gate != GATE_NONE) {
          float x = __bfloat162float(p.a[(token0 + tid) * p.a_stride + hv]) + p.dt_bias[hv];
          G = gate_value(gate_rate(p.A_log[hv]), x) * LOG2_E;
          if (G < GATE_FLOOR) G = GATE_FLOOR;  // not fmaxf, which would hide a NaN
          dt = softplus(x);
        }
        beta = erase ? p.beta_scale * sigmoid(__bfloat162float(p.beta[(token0 + tid) * p.beta_stride + hv])) : dt;
      }
      int first = doc[tid] - (tid & 32);
      for (int off = 1; off < 32; off <<= 1) {
        float up = __shfl_up_sync(0xffffffffu, G, off);
        if (lane >= off && lane - off >= first) G += up;
      }
      if (tid == 31) carry[0] = G;
      vec[VEC_BETA + tid] = beta;
    }
    __syncthreads();
    if (tid < 64) {
      if (tid >= 32 && doc[tid] < 32) G += carry[0];
      vec[VEC_G + tid] = G;
    }
    __syncthreads();
    if (tid < 64) {
      vec[VEC_IN + tid] = doc[tid] == 0 && carry[1] != 0.0f ? exp2f(G) : 0.0f;
      vec[VEC_OUT + tid] = doc[tid] == doc[63] ? exp2f(vec[VEC_G + 63] - G) : 0.0f;
    }
    // Scores with their decays; a factor exists only for i >= j in one document.
#pragma unroll
    for (int np = 0; np < 4; np++)
      if (np <= warp) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int e = 0; e < 2; e++) {  // e: rows g and g + 8
            int i = warp * 16 + g + e * 8, j = np * 16 + h * 8 + 2 * t;
            float s[2], m[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
              bool lower = j + c <= i && doc[i] == doc[j + c];
              float decay = exp2f(lower ? vec[VEC_G + i] - vec[VEC_G + j + c] : 0.0f);
              s[c] = lower ? p.scale * qk[2 * np + h][2 * e + c] * decay : 0.0f;
              m[c] = lower && j + c < i ? vec[VEC_BETA + i] * kk[2 * np + h][2 * e + c] * decay : 0.0f;
            }
            ((uint32_t *)out_P)[i * 32 + (((2 * np + h) ^ g) << 2) + t] = pack_bf16(s[0], s[1]);
            *(float2 *)&M[i * LD + j] = make_float2(m[0], m[1]);
          }
      } else {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            ((uint32_t *)out_P)[(warp * 16 + g + e * 8) * 32 + (((2 * np + h) ^ g) << 2) + t] = 0u;
      }
    if (erase) {
      __syncwarp();
      invert_unit_lower<LD>(A, M, tid);
    }
    __syncthreads();
    // Out: 512 pieces of 16 bytes each for A and P, 64 for the vectors.
    uint4 *A_out = (uint4 *)(p.A + unit * 4096), *P_out = (uint4 *)(p.P + unit * 4096);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      int piece = tid + e * 128, i = piece >> 3, j = ((piece & 7) ^ (i & 7)) * 8;
      P_out[piece] = out_P[piece];
      if (erase) {
        float4 lo = *(const float4 *)&A[i * LD + j], hi = *(const float4 *)&A[i * LD + j + 4];
        A_out[piece] =
            make_uint4(pack_bf16(lo.x, lo.y), pack_bf16(lo.z, lo.w), pack_bf16(hi.x, hi.y), pack_bf16(hi.z, hi.w));
      }
    }
    if (tid < VEC_COUNT / 4) ((float4 *)(p.vectors + unit * VEC_COUNT))[tid] = ((const float4 *)vec)[tid];
    __syncthreads();
  }
}

#endif  // GDN_CUDA_DELTA_RULE_PREPARE_CUH
