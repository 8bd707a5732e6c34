// naive_attention.cuh: the forward pass of sliding-window attention straight from its formula, to measure the fast
// kernels by (gdn/cuda/sliding_attention.h has the formula and the tensors).
//
// One thread for each query. What makes it slow:
// - each query reads all of its keys twice and its values once, from memory or caches: nothing that one thread has read
//   serves another, although the queries of a head share nearly all keys;
// - neighbouring threads read rows of q, k, v a whole token apart, 2 bytes at a time;
// - the output under way, 128 numbers a thread, does not fit into registers with a loop of unknown length: it lies in
//   local memory, which is memory;
// - every multiplication is one of the fp32 cores, of 67 TFLOP/s, where the tensor cores of an H200 have 990.
// The fast kernels take a tile of 64 or 128 queries at once. Keys and values come into shared memory once a tile (by
// cp.async in sliding_attention_sm80.cuh, by TMA and a warp of its own in sliding_attention_sm90.cuh), both products
// run on tensor cores (mma.sync, wgmma), and the online softmax (a running maximum, by which the sums so far are
// scaled) reads the keys a single time, with the output in registers all along.
//
// defines: naive_attention_forward
#ifndef GDN_DEV_CUDA_NAIVE_ATTENTION_CUH
#define GDN_DEV_CUDA_NAIVE_ATTENTION_CUH

#include "../../gdn/cuda/sliding_attention.h"

static __device__ float naive_score(const __nv_bfloat16 *q, const __nv_bfloat16 *k, int D) {
  float sum = 0;
  for (int d = 0; d < D; d++) sum += __bfloat162float(q[d]) * __bfloat162float(k[d]);
  return sum / sqrtf((float)D);
}

static __global__ void naive_attention_kernel(__nv_bfloat16 *o, float *lse, const __nv_bfloat16 *q,
                                              const __nv_bfloat16 *k, const __nv_bfloat16 *v, const int32_t *doc_start,
                                              AttentionSize n) {
  const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= (int64_t)n.B * n.Hq * n.T) return;
  const int i = (int)(index % n.T), h = (int)(index / n.T % n.Hq), kv_head = h / (n.Hq / n.Hkv);
  const int64_t row = index / n.T / n.Hq * n.T;  // the batch row's first token
  int first = n.window > 0 && n.window <= i ? i - n.window + 1 : 0;
  if (doc_start && doc_start[row + i] > first) first = doc_start[row + i];
  const __nv_bfloat16 *query = q + (row + i) * n.qkv_stride + h * n.D;
  k += row * n.qkv_stride + kv_head * n.D, v += row * n.qkv_stride + kv_head * n.D;
  float top = -INFINITY, sum = 0, out[128] = {0};
  for (int j = first; j <= i; j++) top = fmaxf(top, naive_score(query, k + j * n.qkv_stride, n.D));
  for (int j = first; j <= i; j++) {
    const float p = expf(naive_score(query, k + j * n.qkv_stride, n.D) - top);
    sum += p;
    for (int d = 0; d < n.D; d++) out[d] += p * __bfloat162float(v[j * n.qkv_stride + d]);
  }
  for (int d = 0; d < n.D; d++) o[((row + i) * n.Hq + h) * n.D + d] = __float2bfloat16(out[d] / sum);
  lse[index] = top + logf(sum);
}

// As sliding_attention_forward, without scratch. q and k are rotated already.
static void naive_attention_forward(__nv_bfloat16 *o, float *lse, const __nv_bfloat16 *q, const __nv_bfloat16 *k,
                                    const __nv_bfloat16 *v, const int32_t *doc_start, const AttentionSize *n,
                                    cudaStream_t stream) {
  const int64_t queries = (int64_t)n->B * n->Hq * n->T;
  naive_attention_kernel<<<(unsigned)((queries + 63) / 64), 64, 0, stream>>>(o, lse, q, k, v, doc_start, *n);
}

#endif  // GDN_DEV_CUDA_NAIVE_ATTENTION_CUH
