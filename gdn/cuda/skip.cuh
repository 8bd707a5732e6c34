// skip.cuh: Mamba2's skip connection (arXiv 2405.21060): y = o + D x, one D a head.
//
//   forward   o[t,c] += D[c / P] x[t,c]
//   backward  dx[t,c] += D[c / P] dy[t,c]        dD[h] += sum over tokens and the head's channels of dy x
//
// Shapes: o, y, dy, dx, x [N, heads P] bf16 with row strides, D, dD [heads] fp32. P a multiple of 8. Bytes a value: forward
// 6, backward 8.
//
// defines: skip_forward, skip_backward, skip_backward_scratch
#ifndef GDN_CUDA_SKIP_CUH
#define GDN_CUDA_SKIP_CUH

#include "common.cuh"

enum { SKIP_TOKENS = 64 };  // tokens a block of the backward pass: one row of partial sums each

static __global__ void __launch_bounds__(256)
    skip_forward_kernel(bf16 *o, int64_t o_stride, const bf16 *x, int64_t x_stride, const float *D, int width, int P) {
  int64_t n = blockIdx.x;
  for (int c = threadIdx.x * 8; c < width; c += 256 * 8) {
    float a[8], b[8], d = D[c / P];
    unpack8(a, load8(o + n * o_stride + c));
    unpack8(b, load8(x + n * x_stride + c));
#pragma unroll
    for (int j = 0; j < 8; j++) a[j] += d * b[j];
    store8(o + n * o_stride + c, pack8(a));
  }
}

static MAYBE_UNUSED void skip_forward(bf16 *o, int64_t o_stride, const bf16 *x, int64_t x_stride, const float *D,
                                      int64_t N, int heads, int P, cudaStream_t stream) {
  require_multiple("skip_forward", "Mamba2's head dim (--mamba-head)", P, 8);
  require_multiple("skip_forward", "a row stride", o_stride | x_stride, 8);
  if (N == 0) return;
  skip_forward_kernel<<<grid_size(N, "skip_forward"), 256, 0, stream>>>(o, o_stride, x, x_stride, D, heads * P, P);
  KERNEL_CHECK("skip_forward");
}

// One thread eight channels, SKIP_TOKENS tokens; partial [blocks][width / 8] sums of dy x over the eight channels.
static __global__ void __launch_bounds__(256)
    skip_backward_kernel(bf16 *dx, int64_t dx_stride, float *partial, const bf16 *dy, int64_t dy_stride, const bf16 *x,
                         int64_t x_stride, const float *D, int64_t N, int width, int P) {
  int group = blockIdx.y * 256 + threadIdx.x, c = group * 8;
  if (c >= width) return;
  int64_t first = (int64_t)blockIdx.x * SKIP_TOKENS, last = first + SKIP_TOKENS < N ? first + SKIP_TOKENS : N;
  float d = D[c / P], sum = 0;
  for (int64_t n = first; n < last; n++) {
    float g[8], a[8], v[8];
    unpack8(g, load8(dy + n * dy_stride + c));
    unpack8(a, load8(dx + n * dx_stride + c));
    unpack8(v, load8(x + n * x_stride + c));
#pragma unroll
    for (int j = 0; j < 8; j++) {
      a[j] += d * g[j];
      sum += g[j] * v[j];
    }
    store8(dx + n * dx_stride + c, pack8(a));
  }
  partial[(int64_t)blockIdx.x * (width / 8) + group] = sum;
}

static __global__ void skip_heads_kernel(float *dD, const float *sums, int groups) {  // the groups of a head, in order
  float sum = 0;
  for (int i = 0; i < groups; i++) sum += sums[blockIdx.x * groups + i];
  dD[blockIdx.x] += sum;
}

// Floats of scratch that skip_backward needs.
static inline int64_t skip_backward_scratch(int64_t N, int width) {
  return (ceil_div(N, SKIP_TOKENS) + 1) * (width / 8);
}

static MAYBE_UNUSED void skip_backward(bf16 *dx, int64_t dx_stride, float *dD, float *scratch, const bf16 *dy,
                                       int64_t dy_stride, const bf16 *x, int64_t x_stride, const float *D, int64_t N,
                                       int heads, int P, cudaStream_t stream) {
  require_multiple("skip_backward", "a row stride", dx_stride | dy_stride | x_stride, 8);
  if (N == 0) return;
  int width = heads * P;
  int64_t blocks = ceil_div(N, SKIP_TOKENS);
  dim3 grid(grid_size(blocks, "skip_backward"), (unsigned)ceil_div(width / 8, 256));
  float *sums = scratch + blocks * (width / 8);
  skip_backward_kernel<<<grid, 256, 0, stream>>>(dx, dx_stride, scratch, dy, dy_stride, x, x_stride, D, N, width, P);
  KERNEL_CHECK("skip_backward");
  partial_reduce(sums, scratch, blocks, width / 8, 0, stream);
  skip_heads_kernel<<<heads, 1, 0, stream>>>(dD, sums, P / 8);
  KERNEL_CHECK("skip_backward");
}

#endif  // GDN_CUDA_SKIP_CUH
