// swiglu.cuh: the MLP's gate, forward and backward (Shazeer, arXiv 2002.05202).
//
//   forward   h = silu(gate) up
//   backward  dgate = dh up silu'(gate),  dup = dh silu(gate), in place over the packed rows; h again for dW of down
//
// Shapes: gate_up [N, stride] bf16, each row gate [F] then up [F]; h, dh [N, F] bf16. F a multiple of 8, stride a
// multiple of 8 and at least 2 F. Bytes a row: forward 6 F, backward 12 F.
//
// defines: swiglu_forward, swiglu_backward
#ifndef GDN_CUDA_SWIGLU_CUH
#define GDN_CUDA_SWIGLU_CUH

#include "common.cuh"

static __global__ void __launch_bounds__(512)
    swiglu_forward_kernel(bf16 *h, const bf16 *gate_up, int F, int64_t stride) {
  const bf16 *gate = gate_up + (int64_t)blockIdx.x * stride, *up = gate + F;
  h += (int64_t)blockIdx.x * F;
  for (int c = threadIdx.x * 8; c < F; c += blockDim.x * 16) {  // two groups of eight in flight
    int c2 = c + blockDim.x * 8;
    bool second = c2 < F;
    Vec8 g[2], u[2];
    g[0] = load8_once(gate + c), u[0] = load8_once(up + c);
    g[1] = second ? load8_once(gate + c2) : vec8_zero(), u[1] = second ? load8_once(up + c2) : vec8_zero();
#pragma unroll
    for (int k = 0; k < 2; k++) {
      float fg[8], fu[8];
      unpack8(fg, g[k]);
      unpack8(fu, u[k]);
#pragma unroll
      for (int j = 0; j < 8; j++) fg[j] = fg[j] * sigmoid_fast(fg[j]) * fu[j];
      if (k == 0 || second) store8(h + (k ? c2 : c), pack8(fg));
    }
  }
}

static __global__ void __launch_bounds__(512)
    swiglu_backward_kernel(bf16 *gate_up, bf16 *h, const bf16 *dh, int F, int64_t stride) {
  bf16 *gate = gate_up + (int64_t)blockIdx.x * stride, *up = gate + F;
  h += (int64_t)blockIdx.x * F, dh += (int64_t)blockIdx.x * F;
  for (int c = threadIdx.x * 8; c < F; c += blockDim.x * 16) {
    int c2 = c + blockDim.x * 8;
    bool second = c2 < F;
    Vec8 g[2], u[2], d[2];
    g[0] = load8_once(gate + c), u[0] = load8_once(up + c), d[0] = load8_once(dh + c);
    g[1] = u[1] = d[1] = vec8_zero();
    if (second) g[1] = load8_once(gate + c2), u[1] = load8_once(up + c2), d[1] = load8_once(dh + c2);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      float fg[8], fu[8], fd[8];
      unpack8(fg, g[k]);
      unpack8(fu, u[k]);
      unpack8(fd, d[k]);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float s = sigmoid_fast(fg[j]), silu = fg[j] * s;
        float dgate = fd[j] * fu[j] * (s + silu * (1.0f - s)), dup = fd[j] * silu;
        fd[j] = silu * fu[j], fg[j] = dgate, fu[j] = dup;
      }
      if (k == 0 || second) {
        int at = k ? c2 : c;
        store8(gate + at, pack8(fg));
        store8(up + at, pack8(fu));
        store8(h + at, pack8(fd));
      }
    }
  }
}

// Threads a row: each takes two groups of eight at a time, as few idle ones as warps allow.
static inline int swiglu_threads(int F) {
  int64_t groups = ceil_div(F, 8), rounds = ceil_div(groups, 1024);
  return (int)(ceil_div(ceil_div(groups, 2 * rounds), 32) * 32);
}

static MAYBE_UNUSED void swiglu_forward(bf16 *h, const bf16 *gate_up, int64_t N, int F, int64_t stride,
                                        cudaStream_t stream) {
  require_multiple("swiglu_forward", "the MLP width (--ff)", F, 8);
  require_multiple("swiglu_forward", "the row stride", stride, 8);
  if (N == 0 || F == 0) return;
  swiglu_forward_kernel<<<grid_size(N, "swiglu_forward"), swiglu_threads(F), 0, stream>>>(h, gate_up, F, stride);
  KERNEL_CHECK("swiglu_forward");
}

// gate_up becomes its own gradient; h may be the same buffer as dh.
static MAYBE_UNUSED void swiglu_backward(bf16 *gate_up, bf16 *h, const bf16 *dh, int64_t N, int F, int64_t stride,
                                         cudaStream_t stream) {
  require_multiple("swiglu_backward", "the MLP width (--ff)", F, 8);
  require_multiple("swiglu_backward", "the row stride", stride, 8);
  if (N == 0 || F == 0) return;
  swiglu_backward_kernel<<<grid_size(N, "swiglu_backward"), swiglu_threads(F), 0, stream>>>(gate_up, h, dh, F, stride);
  KERNEL_CHECK("swiglu_backward");
}

#endif  // GDN_CUDA_SWIGLU_CUH
