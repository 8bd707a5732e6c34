// delta_rule.h: the gated delta rule on the GPU, forward and backward, in chunks of 64 tokens.
//
// Per head, with the state S (K x V), decay g <= 0, erase vector e and written value z:
//     S_t = (I - k_t e_t^T) exp(g_t) S_{t-1} + k_t z_t^T        o_t = scale S_t^T q_t
// Gated DeltaNet (arXiv 2412.06464, eq. 10): e = beta k, z = beta v, g = -exp(A_log) softplus(a + dt_bias).
// DeltaNet (arXiv 2406.06484): the same with g = 0. Mamba2/SSD (arXiv 2405.21060): no erase, z = dt v with
// dt = softplus(a + dt_bias), g = -exp(A_log) dt; q is C, k is B, scale 1. KDA (arXiv 2510.26692): g per key channel
// of a value head, also bounded: g = lower_bound sigmoid(exp(A_log) (a + dt_bias)). Gated DeltaNet-2 (arXiv
// 2605.22791): g and b per key channel of a key head, w per value column, e = b o k, z = w o v; with erase_mean a
// head's b gives way to its mean over the channels, with write_mean its w.
//
// Sizes: B batch, T tokens, H key heads, HV value heads (a multiple of H; value head h reads key head h / (HV / H)),
// K key dimension (64, 128, 192 or 256), V value dimension (a multiple of 64, at most 512), chunk 64.
// A tensor [B, T, heads, dim] may lie inside a packed row: `stride` is then the distance between tokens in elements,
// 0 meaning densely packed. Pointers must be 16-byte aligned and strides multiples of 8, for scalar logits not.
// Everything is deterministic: sums have a fixed order, there are no atomics.
//
// defines: DeltaRuleGate, DeltaRuleErase, DeltaRuleShape, BF16Rows, BF16RowsOut, DeltaRuleInputs, DeltaRuleGradients,
//          delta_rule_check, delta_rule_saved_bytes, delta_rule_scratch_bytes, delta_rule_forward, delta_rule_backward,
//          delta_rule_prepare, delta_rule_scan, delta_rule_reverse_scan, delta_rule_gradients
#ifndef GDN_CUDA_DELTA_RULE_H
#define GDN_CUDA_DELTA_RULE_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include "../check.h"

#define DELTA_RULE_CHUNK 64

enum DeltaRuleGate {
  GATE_NONE = 0,    // g = 0
  GATE_SCALAR = 1,  // one g per token and value head
  GATE_CHANNEL = 2  // one g per token and key channel: of each value head (KDA) or, with ERASE_CHANNEL, of each key
                    // head (GDN-2); needs K of 64 or 128
};
enum DeltaRuleErase {
  ERASE_NONE = 0,    // e = 0, z = softplus(a + dt_bias) v (SSD); needs GATE_SCALAR
  ERASE_SCALAR = 1,  // e = beta k, z = beta v
  ERASE_CHANNEL = 2  // e = b o k, z = w o v with gates per key channel and per value column (GDN-2); needs GATE_CHANNEL
                     // or GATE_NONE, and K of 64 or 128
};

struct DeltaRuleShape {
  int batch, tokens, key_heads, value_heads, key_dim, value_dim;
  DeltaRuleGate gate;
  DeltaRuleErase erase;
  float scale;                  // of q: K^-1/2, or 1 for SSD
  float beta_scale;             // c in beta = c sigmoid(logit): 1, or 2 to allow negative eigenvalues
  int value_slice;              // value columns of one scan block, 64 or 128; 0 chooses
  int key_part;                 // key columns of one gradients block, 64 or 128; 0 chooses
  float lower_bound;            // GATE_CHANNEL: 0, or below 0 for the bounded gate
  bool erase_mean, write_mean;  // ERASE_CHANNEL: the mean of a head's gates in place of each
};

struct BF16Rows {
  const __nv_bfloat16 *data;
  int64_t stride;  // elements between tokens, 0: dense
};
struct BF16RowsOut {
  __nv_bfloat16 *data;
  int64_t stride;
};

struct DeltaRuleInputs {
  BF16Rows q, k;       // [B, T, H, K], normalised
  BF16Rows v;          // [B, T, HV, V]
  BF16Rows a;          // gate logits [B, T, HV]; with GATE_CHANNEL [B, T, HV, K], with ERASE_CHANNEL too [B, T, H, K];
                       // unused with GATE_NONE
  BF16Rows beta;       // [B, T, HV] beta logits, [B, T, H, K] (b) with ERASE_CHANNEL; unused with ERASE_NONE
  BF16Rows w;          // [B, T, HV, V] write logits, w = sigmoid; only with ERASE_CHANNEL
  const float *A_log;  // [HV], [H] with ERASE_CHANNEL
  const float *dt_bias;  // [HV], [HV, K] with GATE_CHANNEL, [H, K] with ERASE_CHANNEL too
  const int32_t
      *doc_start;  // [B, T] position in its row of the first token of the token's document; NULL: no boundaries
};

struct DeltaRuleGradients {
  BF16RowsOut dq, dk;  // [B, T, H, K], summed over the value heads of a key head
  BF16RowsOut dv;      // [B, T, HV, V]
  BF16RowsOut da;      // as a
  BF16RowsOut dbeta;   // as beta
  BF16RowsOut dw;      // as w
  float *dA_log;       // as A_log, added to
  float *ddt_bias;     // as dt_bias, added to
};

// 0, or EXIT_CONFIG with the reason when the kernels do not cover this shape.
int delta_rule_check(const DeltaRuleShape *shape, Error *error);

// Bytes of what the forward pass leaves for the backward pass, and of what the backward pass needs only while it runs.
size_t delta_rule_saved_bytes(const DeltaRuleShape *shape);
size_t delta_rule_scratch_bytes(const DeltaRuleShape *shape);

// o [B, T, HV, V]. The whole of `saved` is written. Returns 0 or an ExitCode.
int delta_rule_forward(BF16RowsOut o, void *saved, const DeltaRuleInputs *in, const DeltaRuleShape *shape,
                       cudaStream_t stream, Error *error);
// d_o [B, T, HV, V]; `saved` as the forward pass of the same inputs left it. Returns 0 or an ExitCode.
int delta_rule_backward(const DeltaRuleGradients *grad, void *scratch, BF16Rows d_o, const void *saved,
                        const DeltaRuleInputs *in, const DeltaRuleShape *shape, cudaStream_t stream, Error *error);

// The kernels one by one, as the two functions above call them in this order.
int delta_rule_prepare(void *saved, const DeltaRuleInputs *in, const DeltaRuleShape *shape, cudaStream_t stream,
                       Error *error);
int delta_rule_scan(BF16RowsOut o, void *saved, const DeltaRuleInputs *in, const DeltaRuleShape *shape,
                    cudaStream_t stream, Error *error);
int delta_rule_reverse_scan(void *scratch, BF16Rows d_o, const void *saved, const DeltaRuleInputs *in,
                            const DeltaRuleShape *shape, cudaStream_t stream, Error *error);
int delta_rule_gradients(const DeltaRuleGradients *grad, void *scratch, BF16Rows d_o, const void *saved,
                         const DeltaRuleInputs *in, const DeltaRuleShape *shape, cudaStream_t stream, Error *error);

#endif  // GDN_CUDA_DELTA_RULE_H
