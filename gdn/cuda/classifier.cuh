// classifier.cuh: softmax cross-entropy and its gradient in one pass over a chunk of logits.
//
//   loss_n = log sum_v exp(logit_nv) - logit_n,target       dlogit_nv = scale (softmax_nv - [v = target])
//
// The logits [rows, padded] bf16 of one chunk of tokens are overwritten by their gradient: they exist once, and only
// for the chunk. Columns vocab .. padded-1 take no part: their probability and gradient are 0. A target of -1 is not
// counted: loss 0, gradient 0. A target outside 0 .. vocab-1 gives a NaN loss, which stops the run, never a wrong one.
// Bytes a row: 4 padded (one read, one write): the row waits in shared memory between the sum and the gradient.
//
// defines: classifier_backward, classifier_loss, loss_sum, CLASSIFIER_MAX_VOCAB
#ifndef GDN_CUDA_CLASSIFIER_CUH
#define GDN_CUDA_CLASSIFIER_CUH

#include <cuda_pipeline_primitives.h>

#include "common.cuh"

enum { CLASSIFIER_THREADS = 512, CLASSIFIER_MAX_VOCAB = 115200 };  // 225 KiB of shared memory a row

template <bool GRADIENT>
__global__ void __launch_bounds__(CLASSIFIER_THREADS, 3)
    classifier_kernel(bf16 *logits, float *losses, const int32_t *targets, float scale, int vocab, int padded) {
  extern __shared__ Vec8 line[];  // the row; a thread touches its own groups, and the target after a barrier
  __shared__ float warp_maxima[CLASSIFIER_THREADS / 32], warp_sums[CLASSIFIER_THREADS / 32];
  const float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
  int64_t row = blockIdx.x;
  int target = targets[row], groups = padded / 8;
  bf16 *mine = logits + row * padded;
  if (target == -1) {
    if (GRADIENT)
      for (int i = threadIdx.x; i < groups; i += CLASSIFIER_THREADS) store8(mine + i * 8, vec8_zero());
    if (threadIdx.x == 0) losses[row] = 0;
    return;
  }
  for (int i = threadIdx.x; i < groups; i += CLASSIFIER_THREADS) __pipeline_memcpy_async(&line[i], mine + i * 8, 16);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  float peak = -INFINITY, sum = 0, f[8];
  for (int i = threadIdx.x; i < groups; i += CLASSIFIER_THREADS) {
    if (i * 8 + 8 > vocab) {  // padding: no probability
      uint16_t *half = reinterpret_cast<uint16_t *>(&line[i]);
      for (int j = 0; j < 8; j++)
        if (i * 8 + j >= vocab) half[j] = 0xff80;  // -inf
    }
    unpack8(f, line[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) peak = fmaxf(peak, f[j]);
  }
  peak = warp_max(peak);
  float shift = peak == -INFINITY ? 0.0f : peak * LOG2E;  // a warp without a column: exp2(-inf - 0) = 0
  for (int i = threadIdx.x; i < groups; i += CLASSIFIER_THREADS) {
    unpack8(f, line[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) sum += exp2_fast(f[j] * LOG2E - shift);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) warp_maxima[threadIdx.x / 32] = peak, warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  float highest = -INFINITY, total = 0;
#pragma unroll
  for (int i = 0; i < CLASSIFIER_THREADS / 32; i++) highest = fmaxf(highest, warp_maxima[i]);
#pragma unroll
  for (int i = 0; i < CLASSIFIER_THREADS / 32; i++)
    total += warp_sums[i] * exp2_fast((warp_maxima[i] - highest) * LOG2E);
  bool valid = target >= 0 && target < vocab;
  if (!valid) scale = NAN;
  if (threadIdx.x == 0) {
    float at_target = valid ? __bfloat162float(reinterpret_cast<const bf16 *>(line)[target]) : NAN;
    losses[row] = logf(total) + (highest - at_target);
  }
  if (!GRADIENT) return;
  float log2_sum = highest * LOG2E + logf(total) * (1.0f / LN2);
  for (int i = threadIdx.x; i < groups; i += CLASSIFIER_THREADS) {
    unpack8(f, line[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) f[j] = scale * exp2_fast(f[j] * LOG2E - log2_sum);
    store8(mine + i * 8, pack8(f));
    if (target / 8 == i && valid) {
      float logit = __bfloat162float(reinterpret_cast<const bf16 *>(line)[target]);
      mine[target] = __float2bfloat16_rn(scale * (exp2_fast(logit * LOG2E - log2_sum) - 1.0f));
    }
  }
}

static __global__ void __launch_bounds__(1024)
    loss_sum_kernel(double *total, const float *losses, int64_t N, int accumulate) {
  __shared__ double sums[1024];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < N; i += 1024) sum += losses[i];
  sums[threadIdx.x] = sum;
  for (int half = 512; half > 0; half >>= 1) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *total = accumulate ? *total + sums[0] : sums[0];
}

// total (one double on the GPU) (+)= sum of losses [N], in a fixed order.
static MAYBE_UNUSED void loss_sum(double *total, const float *losses, int64_t N, int accumulate, cudaStream_t stream) {
  loss_sum_kernel<<<1, 1024, 0, stream>>>(total, losses, N, accumulate);
  KERNEL_CHECK("loss_sum");
}

template <bool GRADIENT>
static void classifier_launch(bf16 *logits, float *losses, const int32_t *targets, float scale, int64_t rows, int vocab,
                              int padded, cudaStream_t stream) {
  require_multiple("classifier", "the padded vocabulary", padded, 8);
  if (vocab < 1 || vocab > padded || padded > CLASSIFIER_MAX_VOCAB)
    fail(EXIT_CONFIG, "classifier: vocabulary %d padded to %d, needed: 1 <= vocabulary <= padded <= %d", vocab, padded,
         CLASSIFIER_MAX_VOCAB);
  if (rows == 0) return;
  size_t shared = (size_t)padded * sizeof(bf16);
  CUDA_CHECK(
      cudaFuncSetAttribute(classifier_kernel<GRADIENT>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
  classifier_kernel<GRADIENT><<<grid_size(rows, "classifier"), CLASSIFIER_THREADS, shared, stream>>>(
      logits, losses, targets, scale, vocab, padded);
  KERNEL_CHECK("classifier");
}

// losses [rows] fp32; logits [rows, padded] become scale x their gradient (scale is 1 / counted tokens of the step).
static MAYBE_UNUSED void classifier_backward(bf16 *logits, float *losses, const int32_t *targets, float scale,
                                             int64_t rows, int vocab, int padded, cudaStream_t stream) {
  classifier_launch<true>(logits, losses, targets, scale, rows, vocab, padded, stream);
}

// losses [rows] alone: for evaluation. The logits stay as they are.
static MAYBE_UNUSED void classifier_loss(float *losses, const bf16 *logits, const int32_t *targets, int64_t rows,
                                         int vocab, int padded, cudaStream_t stream) {
  classifier_launch<false>((bf16 *)logits, losses, targets, 0.0f, rows, vocab, padded, stream);
}

#endif  // GDN_CUDA_CLASSIFIER_CUH
