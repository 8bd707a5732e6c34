// adamw.cuh: the update over the flat parameter arena, and the global gradient norm.
//
//   g = scale grad       m = b1 m + (1 - b1) g       v = b2 v + (1 - b2) g^2
//   w = w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
//
// (Loshchilov and Hutter, arXiv 1711.05101)
// All fp32; the bf16 copy that the matrix products read is written in the same pass. Which parameters decay is one bit
// for each 8 elements (tensors start at multiples of 8 and are padded to them): 1 / 64 byte an element.
// Bytes an element: update 30, norm 4. Whether a step is taken at all, and clipping, is the training loop's.
//
// defines: AdamWSettings, adamw_update, adamw_decay_words, adamw_decay_mark, gradient_sum_squares,
//          gradient_sum_squares_scratch, weights_to_bf16
#ifndef GDN_CUDA_ADAMW_CUH
#define GDN_CUDA_ADAMW_CUH

#include <math.h>

#include "common.cuh"

typedef struct {
  float lr, beta1, beta2, eps, weight_decay;
  float grad_scale;  // factor on the gradients: 1, or less where their norm is clipped
  int64_t step;      // 1 for the first update
} AdamWSettings;

enum { NORM_BLOCKS = 1056, NORM_THREADS = 256, ADAMW_THREADS = 256 };

// A block takes 8 ADAMW_THREADS elements; a thread two groups of four, so that a warp's accesses are contiguous.
static __global__ void __launch_bounds__(ADAMW_THREADS)
    adamw_kernel(float *master, bf16 *weights, float *m, float *v, const float *grads, const uint32_t *decay_bits,
                 float scale, float lr, float beta1, float beta2, float eps, float decay, float correction1,
                 float correction2, int64_t groups) {
  int64_t first = (int64_t)blockIdx.x * (2 * ADAMW_THREADS) + threadIdx.x;
  float4 g[2], fm[2], fv[2], w[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int64_t i = first + k * ADAMW_THREADS;
    if (i >= groups) continue;
    g[k] = __ldcs(reinterpret_cast<const float4 *>(grads) + i);
    fm[k] = __ldcs(reinterpret_cast<const float4 *>(m) + i);
    fv[k] = __ldcs(reinterpret_cast<const float4 *>(v) + i);
    w[k] = __ldcs(reinterpret_cast<const float4 *>(master) + i);
  }
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int64_t i = first + k * ADAMW_THREADS;
    if (i >= groups) continue;
    float shrink = decay_bits[i / 64] >> (i / 2 % 32) & 1 ? lr * decay : 0.0f;
    float pg[4] = {g[k].x, g[k].y, g[k].z, g[k].w}, pm[4] = {fm[k].x, fm[k].y, fm[k].z, fm[k].w};
    float pv[4] = {fv[k].x, fv[k].y, fv[k].z, fv[k].w}, pw[4] = {w[k].x, w[k].y, w[k].z, w[k].w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float grad = pg[j] * scale;
      pm[j] = beta1 * pm[j] + (1.0f - beta1) * grad;
      pv[j] = beta2 * pv[j] + (1.0f - beta2) * grad * grad;
      float step = pm[j] * correction1 / (sqrtf(pv[j] * correction2) + eps);
      pw[j] = pw[j] - shrink * pw[j] - lr * step;
    }
    __stcs(reinterpret_cast<float4 *>(m) + i, make_float4(pm[0], pm[1], pm[2], pm[3]));
    __stcs(reinterpret_cast<float4 *>(v) + i, make_float4(pv[0], pv[1], pv[2], pv[3]));
    __stcs(reinterpret_cast<float4 *>(master) + i, make_float4(pw[0], pw[1], pw[2], pw[3]));
    if (weights) {
      __nv_bfloat162 lo = __floats2bfloat162_rn(pw[0], pw[1]), hi = __floats2bfloat162_rn(pw[2], pw[3]);
      uint2 pair = make_uint2(*reinterpret_cast<uint32_t *>(&lo), *reinterpret_cast<uint32_t *>(&hi));
      reinterpret_cast<uint2 *>(weights)[i] = pair;
    }
  }
}

// master, m, v [n] fp32 are updated and weights [n] bf16 written (NULL: not) from grads [n]. decay_bits of
// adamw_decay_words(n) words. n a multiple of 8.
static MAYBE_UNUSED void adamw_update(float *master, bf16 *weights, float *m, float *v, const float *grads,
                                      const uint32_t *decay_bits, AdamWSettings adamw, int64_t n, cudaStream_t stream) {
  require_multiple("adamw_update", "the number of parameters of the arena", n, 8);
  if (n == 0) return;
  double correction1 = 1.0 / (1.0 - pow(adamw.beta1, (double)adamw.step));
  double correction2 = 1.0 / (1.0 - pow(adamw.beta2, (double)adamw.step));
  adamw_kernel<<<grid_size(ceil_div(n / 4, 2 * ADAMW_THREADS), "adamw_update"), ADAMW_THREADS, 0, stream>>>(
      master, weights, m, v, grads, decay_bits, adamw.grad_scale, adamw.lr, adamw.beta1, adamw.beta2, adamw.eps,
      adamw.weight_decay, (float)correction1, (float)correction2, n / 4);
  KERNEL_CHECK("adamw_update");
}

// Words of the decay bitmap of n elements.
static inline int64_t adamw_decay_words(int64_t n) { return ceil_div(n, 256); }

// Host: marks elements begin .. end-1 of the arena as decaying, in a bitmap that starts as zeros. begin a multiple of
// 8; a last partial group belongs to the tensor (its padding is zero and stays zero).
static inline void adamw_decay_mark(uint32_t *bits, int64_t begin, int64_t end) {
  for (int64_t group = begin / 8; group < ceil_div(end, 8); group++) bits[group / 32] |= 1u << (group % 32);
}

static __global__ void __launch_bounds__(NORM_THREADS)
    sum_squares_kernel(double *partial, const float *grads, int64_t groups) {
  __shared__ double sums[NORM_THREADS];
  double sum = 0;
  int64_t stride = (int64_t)gridDim.x * NORM_THREADS, i = (int64_t)blockIdx.x * NORM_THREADS + threadIdx.x;
  for (; i < groups; i += 4 * stride) {  // groups of four elements, four in flight
    float4 g[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
      g[k] = i + k * stride < groups ? __ldcs(reinterpret_cast<const float4 *>(grads) + i + k * stride)
                                     : make_float4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      double a = g[k].x, b = g[k].y, c = g[k].z,
             d = g[k].w;  // double: a gradient of 1e20 is finite, its fp32 square not
      sum += a * a + b * b + (c * c + d * d);
    }
  }
  sums[threadIdx.x] = sum;
  for (int half = NORM_THREADS / 2; half > 0; half >>= 1) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) partial[blockIdx.x] = sums[0];
}

static __global__ void __launch_bounds__(1024)
    sum_partials_kernel(double *total, const double *partial, int count, int accumulate) {
  __shared__ double sums[1024];
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += 1024) sum += partial[i];
  sums[threadIdx.x] = sum;
  for (int half = 512; half > 0; half >>= 1) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *total = accumulate ? *total + sums[0] : sums[0];
}

// Floats of scratch (8-byte aligned) that gradient_sum_squares needs.
static inline int64_t gradient_sum_squares_scratch(void) { return 2 * NORM_BLOCKS; }

// total (one double on the GPU) (+)= sum of grads^2. Of several ranks each sums its shard.
static MAYBE_UNUSED void gradient_sum_squares(double *total, float *scratch, const float *grads, int64_t n,
                                              int accumulate, cudaStream_t stream) {
  require_multiple("gradient_sum_squares", "the number of gradients of the arena", n, 8);
  double *partial = (double *)scratch;
  sum_squares_kernel<<<NORM_BLOCKS, NORM_THREADS, 0, stream>>>(partial, grads, n / 4);
  KERNEL_CHECK("gradient_sum_squares");
  sum_partials_kernel<<<1, 1024, 0, stream>>>(total, partial, NORM_BLOCKS, accumulate);
  KERNEL_CHECK("gradient_sum_squares");
}

static __global__ void weights_to_bf16_kernel(bf16 *weights, const float *master, int64_t groups) {
  int64_t group = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (group >= groups) return;
  float f[8];
  load_floats8(f, master + group * 8);
  store8(weights + group * 8, pack8(f));
}

// weights [n] bf16 <- master [n] fp32, n a multiple of 8: after a load or an initialisation.
static MAYBE_UNUSED void weights_to_bf16(bf16 *weights, const float *master, int64_t n, cudaStream_t stream) {
  require_multiple("weights_to_bf16", "the number of parameters of the arena", n, 8);
  if (n == 0) return;
  weights_to_bf16_kernel<<<grid_size(ceil_div(n / 8, 256), "weights_to_bf16"), 256, 0, stream>>>(weights, master,
                                                                                                 n / 8);
  KERNEL_CHECK("weights_to_bf16");
}

#endif  // GDN_CUDA_ADAMW_CUH
