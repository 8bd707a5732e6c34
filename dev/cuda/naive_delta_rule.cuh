// naive_delta_rule.cuh: the forward pass of the delta rule straight from its recurrence, to measure the fast kernels by
// (gdn/cuda/delta_rule.h has the formulas and the tensors).
//
// The columns of the state never meet, so each is one thread's: a thread owns one value column of one (batch row, value
// head) and walks through the tokens, one after the other, with its K numbers of the state. What makes it slow:
// - T steps in a row, each two passes over K numbers: parallel are only the B HV V columns (16384 of them for 8 rows of
//   16 heads of 128, where an H200 has room for 270336 threads), and every step waits for the one before;
// - up to 256 numbers a thread do not fit into registers: they lie in local memory, which is memory behind the caches,
//   and are read and written twice a token;
// - every column reads the same k and q, and computes the same gates, for itself (with gates per channel: K logarithms
//   and exponentials a token in each of V threads);
// - nothing is a product of matrices, so that the tensor cores stand still.
// The fast kernels work in chunks of 64 tokens. What the chunks need of q, k and the gates is computed for all of them
// at once (delta_rule_prepare.cuh, delta_rule_channel.cuh); the scan (delta_rule_scan.cuh) then takes T / 64 steps,
// each of five products on tensor cores, the state in registers; and the states at the chunks' starts stay for the
// backward pass, whose parallel part is delta_rule_gradients.cuh.
//
// defines: naive_delta_rule_forward
#ifndef GDN_DEV_CUDA_NAIVE_DELTA_RULE_CUH
#define GDN_DEV_CUDA_NAIVE_DELTA_RULE_CUH

#include "../../gdn/cuda/delta_rule.h"

static __device__ float naive_sigmoid(float x) { return 1 / (1 + expf(-x)); }
static __device__ float naive_softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// Row `token` of a tensor of `width` numbers a token.
static __device__ const __nv_bfloat16 *naive_row(BF16Rows x, int64_t token, int width) {
  return x.data + token * (x.stride ? x.stride : width);
}

static __device__ float naive_mean(const __nv_bfloat16 *logits, int n) {
  float sum = 0;
  for (int i = 0; i < n; i++) sum += naive_sigmoid(__bfloat162float(logits[i]));
  return sum / n;
}

// Gated DeltaNet, DeltaNet, SSD: one decay and one beta a token and value head.
static __global__ void naive_delta_rule_kernel(BF16RowsOut o, DeltaRuleInputs in, DeltaRuleShape s) {
  const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  const int K = s.key_dim, V = s.value_dim, H = s.key_heads, HV = s.value_heads;
  if (index >= (int64_t)s.batch * HV * V) return;
  const int j = (int)(index % V), hv = (int)(index / V % HV), kh = hv / (HV / H);
  float state[256] = {0};
  for (int t = 0; t < s.tokens; t++) {
    const int64_t token = index / V / HV * s.tokens + t;
    const __nv_bfloat16 *q = naive_row(in.q, token, H * K) + kh * K, *k = naive_row(in.k, token, H * K) + kh * K;
    float decay = 1, beta = 0, write = 0, old = 0, out = 0;
    if (s.gate != GATE_NONE) {
      const float dt = naive_softplus(__bfloat162float(naive_row(in.a, token, HV)[hv]) + in.dt_bias[hv]);
      decay = expf(-expf(in.A_log[hv]) * dt);
      write = dt;  // of SSD
    }
    if (in.doc_start && in.doc_start[token] == t) decay = 0;  // a document starts
    if (s.erase != ERASE_NONE)
      write = beta = s.beta_scale * naive_sigmoid(__bfloat162float(naive_row(in.beta, token, HV)[hv]));
    for (int d = 0; d < K; d++) {
      state[d] *= decay;
      old += __bfloat162float(k[d]) * state[d];  // what the decayed state holds for this key
    }
    const float change = write * __bfloat162float(naive_row(in.v, token, HV * V)[hv * V + j]) - beta * old;
    for (int d = 0; d < K; d++) {
      state[d] += __bfloat162float(k[d]) * change;
      out += __bfloat162float(q[d]) * state[d];
    }
    o.data[token * (o.stride ? o.stride : HV * V) + hv * V + j] = __float2bfloat16(s.scale * out);
  }
}

// KDA and Gated DeltaNet-2: the decay per key channel, and with ERASE_CHANNEL b per key channel, w per value column.
static __global__ void naive_delta_rule_channel_kernel(BF16RowsOut o, DeltaRuleInputs in, DeltaRuleShape s) {
  const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  const int K = s.key_dim, V = s.value_dim, H = s.key_heads, HV = s.value_heads;
  if (index >= (int64_t)s.batch * HV * V) return;
  const int j = (int)(index % V), hv = (int)(index / V % HV), kh = hv / (HV / H);
  const bool two = s.erase == ERASE_CHANNEL;               // Gated DeltaNet-2
  const int gate_heads = two ? H : HV, g = two ? kh : hv;  // whose decay
  float state[128] = {0};
  for (int t = 0; t < s.tokens; t++) {
    const int64_t token = index / V / HV * s.tokens + t;
    const bool start = in.doc_start && in.doc_start[token] == t;
    const __nv_bfloat16 *q = naive_row(in.q, token, H * K) + kh * K, *k = naive_row(in.k, token, H * K) + kh * K;
    const __nv_bfloat16 *b = naive_row(in.beta, token, two ? H * K : HV) + (two ? kh * K : hv);
    const __nv_bfloat16 *w = two ? naive_row(in.w, token, HV * V) + hv * V : b;
    const float write = !two           ? s.beta_scale * naive_sigmoid(__bfloat162float(b[0]))
                        : s.write_mean ? naive_mean(w, V)
                                       : naive_sigmoid(__bfloat162float(w[j]));
    float erase = two ? s.beta_scale * (s.erase_mean ? naive_mean(b, K) : 0) : write, old = 0, out = 0;
    for (int d = 0; d < K; d++) {
      float decay = start ? 0 : 1;
      if (s.gate != GATE_NONE && !start) {
        const float A = expf(in.A_log[g]);
        const float x = __bfloat162float(naive_row(in.a, token, gate_heads * K)[g * K + d]) + in.dt_bias[g * K + d];
        decay = expf(s.lower_bound != 0 ? s.lower_bound * naive_sigmoid(A * x) : -A * naive_softplus(x));
      }
      if (two && !s.erase_mean) erase = s.beta_scale * naive_sigmoid(__bfloat162float(b[d]));
      state[d] *= decay;
      old += erase * __bfloat162float(k[d]) * state[d];
    }
    const float change = write * __bfloat162float(naive_row(in.v, token, HV * V)[hv * V + j]) - old;
    for (int d = 0; d < K; d++) {
      state[d] += __bfloat162float(k[d]) * change;
      out += __bfloat162float(q[d]) * state[d];
    }
    o.data[token * (o.stride ? o.stride : HV * V) + hv * V + j] = __float2bfloat16(s.scale * out);
  }
}

// As delta_rule_forward, but saves nothing. The shape must have passed delta_rule_check.
static void naive_delta_rule_forward(BF16RowsOut o, const DeltaRuleInputs *in, const DeltaRuleShape *s,
                                     cudaStream_t stream) {
  const int64_t columns = (int64_t)s->batch * s->value_heads * s->value_dim;
  const unsigned blocks = (unsigned)((columns + 63) / 64);
  if (s->gate == GATE_CHANNEL || s->erase == ERASE_CHANNEL)
    naive_delta_rule_channel_kernel<<<blocks, 64, 0, stream>>>(o, *in, *s);
  else
    naive_delta_rule_kernel<<<blocks, 64, 0, stream>>>(o, *in, *s);
}

#endif  // GDN_DEV_CUDA_NAIVE_DELTA_RULE_CUH
