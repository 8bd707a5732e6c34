// sliding_attention.h: causal attention over a sliding window (or the whole past), RoPE included, forward and backward.
//
//   q', k' = rope(q), rope(k)                                 rotation by position * base^(-2i/D), i < D/2, of the
//                                                             pairs (i, i + D/2) (Su et al. 2021, half-split form)
//   s_ij = D^-1/2 <q'_i, k'_j>,  i - W < j <= i               W = window, the token itself counted; W <= 0: all j <= i
//   o_i = sum_j softmax_j(s_ij) v_j,  lse_i = log sum_j exp(s_ij)
//
// q [B,T,Hq,D], k and v [B,T,Hkv,D] bf16, usually three places of one packed buffer [B*T][qkv_stride]. Hq is a multiple
// of Hkv; query head h reads kv head h / (Hq/Hkv). Tiled online softmax (Dao 2023, FlashAttention-2, Algorithms 1, 2):
// nothing of size T x T is stored. No atomics: the same inputs give the same bits. All launches are asynchronous on
// `stream`; a launch that CUDA refuses ends the program with one line and exit code 70.
//
// Order of a training step: rope_forward (in place on q, k), sliding_attention_forward; then
// sliding_attention_backward, which reads the rotated q, k and gives gradients of the unrotated ones.
//
// Bytes per token: rope_forward 4 (Hq + Hkv) D, forward 2 (2 Hq + 2 Hkv) D + 4 Hq, backward about
// 2 (4 Hq + 6 Hkv) D plus what the tiles read again (from L2, mostly).
//
// defines: AttentionSize, AttentionPath, sliding_attention_check, rope_table_fill, rope_forward,
//          sliding_attention_forward, sliding_attention_backward, sliding_attention_scratch_floats
#ifndef GDN_CUDA_SLIDING_ATTENTION_H
#define GDN_CUDA_SLIDING_ATTENTION_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "../check.h"

typedef enum {
  ATTENTION_AUTO = 0,   // wgmma and TMA on compute capability 9.0, mma.sync elsewhere
  ATTENTION_MMA = 1,    // mma.sync, any GPU from compute capability 8.0
  ATTENTION_WGMMA = 2,  // compute capability 9.0 only
} AttentionPath;

typedef struct {
  int B, T;             // batch rows, tokens a row
  int Hq, Hkv, D;       // query heads, key/value heads, head dim (64 or 128)
  int window;           // W above; <= 0: full causal
  int64_t qkv_stride;   // elements from a token to the next in q, k, v
  int64_t dqkv_stride;  // the same in dq, dk, dv
  AttentionPath path;
} AttentionSize;

// 0, or an exit code with the sentence in err: what cannot run, before anything is launched.
int sliding_attention_check(const AttentionSize *size, Error *err);

// table [T][D/2] of (cos, sin) of position * base^(-2i/D), computed in double precision, rounded to fp32.
void rope_table_fill(float2 *table, int T, int D, double base, cudaStream_t stream);

// Rotates q and k in place. Fp32 arithmetic, rounded to bf16 once.
void rope_forward(__nv_bfloat16 *q, __nv_bfloat16 *k, const float2 *table, const AttentionSize *size,
                  cudaStream_t stream);

// Number of floats in `scratch`, 16-byte aligned. Nothing in it is kept from one call to the next, and two calls that
// may run at the same time need two.
int64_t sliding_attention_scratch_floats(const AttentionSize *size);

// o [B,T,Hq,D] bf16 and lse [B,Hq,T] fp32 (natural logarithm) from rotated q, k. doc_start [B*T] int32 or NULL: the
// first position, in its row, of the document that a token belongs to; earlier keys are masked. It must not decrease
// along a row and must not lie behind the token.
void sliding_attention_forward(__nv_bfloat16 *o, float *lse, float *scratch, const __nv_bfloat16 *q,
                               const __nv_bfloat16 *k, const __nv_bfloat16 *v, const int32_t *doc_start,
                               const AttentionSize *size, cudaStream_t stream);

// dq, dk, dv (rows of dqkv_stride elements) are overwritten; dk, dv sum the heads of a group in order. table NULL: no
// rotation back, dq and dk are gradients of the q and k given.
void sliding_attention_backward(__nv_bfloat16 *dq, __nv_bfloat16 *dk, __nv_bfloat16 *dv, float *scratch,
                                const __nv_bfloat16 *dout, const __nv_bfloat16 *o, const float *lse,
                                const __nv_bfloat16 *q, const __nv_bfloat16 *k, const __nv_bfloat16 *v,
                                const float2 *table, const int32_t *doc_start, const AttentionSize *size,
                                cudaStream_t stream);

#endif  // GDN_CUDA_SLIDING_ATTENTION_H
