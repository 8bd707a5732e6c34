// rmsnorm.cuh: RMSNorm over rows, forward and backward (Zhang and Sennrich, arXiv 1910.07467, without the mean).
//
//   forward   r = (mean(x^2) + eps)^-1/2        y = x r weight
//   backward  dx (+)= r weight dy - x r^3 mean(weight dy x)        dweight += sum over rows of dy x r
//
// Shapes: x, y, dx, dy [N, D] bf16 contiguous, rstd [N] fp32, weight and dweight [D] fp32. D a multiple of 8, at most
// 8192. Bytes a row: forward 4 D, backward 6 D (8 D when dx is added to).
// Forward: a row is held in registers by one warp (D <= 2560) or by the four warps of a block. Backward: eight columns
// a thread.
//
// defines: rmsnorm_forward, rmsnorm_backward, rmsnorm_backward_scratch
#ifndef GDN_CUDA_RMSNORM_CUH
#define GDN_CUDA_RMSNORM_CUH

#include "common.cuh"

enum {
  RMSNORM_MAX_WIDTH = 8192,
  RMSNORM_WARPS = 4,            // forward: warps a block
  RMSNORM_GROUP_THREADS = 256,  // backward: threads a block, unless one row needs more
  RMSNORM_GROUPS = 8,           // backward: rows a block at a time, at most
  RMSNORM_BLOCKS = 396          // backward: blocks, each leaving one row of partial sums
};

// Sum over the WARPS warps that share a row; `turn` alternates between two buffers so that one barrier is enough.
template <int WARPS>
__device__ __forceinline__ float row_sum(float v, float (*buffer)[RMSNORM_WARPS], int turn) {
  v = warp_sum(v);
  if (WARPS == 1) return v;
  if (threadIdx.x % 32 == 0) buffer[turn][threadIdx.x / 32] = v;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) total += buffer[turn][i];
  return total;
}

// One row a group of WARPS warps; NV groups of eight columns a thread.
template <int NV, int WARPS>
__global__ void __launch_bounds__(32 * RMSNORM_WARPS)
    rmsnorm_forward_kernel(bf16 *y, float *rstd, const bf16 *x, const float *weight, float eps, int64_t N, int D) {
  __shared__ float buffer[2][RMSNORM_WARPS];
  const int threads = 32 * WARPS, t = threadIdx.x % threads;
  int64_t row = (int64_t)blockIdx.x * (RMSNORM_WARPS / WARPS) + threadIdx.x / threads;
  if (row >= N) return;  // whole groups leave: with WARPS = 4 there is one row a block
  x += row * D, y += row * D;
  Vec8 v[NV];
  float sum = 0, f[8], w[8];
#pragma unroll
  for (int i = 0; i < NV; i++) {
    int c = (t + i * threads) * 8;
    v[i] = c < D ? load8_once(x + c) : vec8_zero();
  }
#pragma unroll
  for (int i = 0; i < NV; i++) {
    unpack8(f, v[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) sum += f[j] * f[j];
  }
  float r = rsqrtf(row_sum<WARPS>(sum, buffer, 0) / (float)D + eps);
  if (t == 0 && rstd) rstd[row] = r;
#pragma unroll
  for (int i = 0; i < NV; i++) {
    int c = (t + i * threads) * 8;
    if (c >= D) continue;
    unpack8(f, v[i]);
    load_floats8(w, weight + c);
#pragma unroll
    for (int j = 0; j < 8; j++) f[j] *= r * w[j];
    store8(y + c, pack8(f));
  }
}

// Sum over a group of `threads` (a multiple of 32) that shares a row, by its own named barrier. compute-sanitizer's
// racecheck does not follow these: with -DRMSNORM_RACECHECK the whole block waits instead.
__device__ __forceinline__ float group_sum(float v, float (*buffer)[32], int turn, int group, int threads) {
  v = warp_sum(v);
  if (threads == 32) return v;
  int t = threadIdx.x - group * threads;
  if (t % 32 == 0) buffer[turn][t / 32] = v;
#ifdef RMSNORM_RACECHECK
  __syncthreads();
#else
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
#endif
  float total = 0;
  for (int i = 0; i < threads / 32; i++) total += buffer[turn][i];
  return total;
}

// A row's threads each hold eight columns: weight and dweight stay in registers from row to row. A block has up to
// RMSNORM_GROUPS such groups, which walk rows in a fixed stride, loading the next row before the current one is done.
template <bool ADD, int MAX_THREADS>
__global__ void __launch_bounds__(MAX_THREADS, MAX_THREADS == 256 ? 3 : 1)
    rmsnorm_backward_kernel(bf16 *dx, float *partial, const bf16 *dy, const bf16 *x, const float *weight,
                            const float *rstd, int64_t N, int D, int threads) {
  __shared__ float shares[RMSNORM_GROUP_THREADS * 8], buffer[RMSNORM_GROUPS][2][32];
  int groups = blockDim.x / threads, group = threadIdx.x / threads, c = (threadIdx.x - group * threads) * 8, turn = 0;
  bool on = c < D;
  float w[8] = {0, 0, 0, 0, 0, 0, 0, 0}, dw[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (on) load_floats8(w, weight + c);
  int64_t row = (int64_t)blockIdx.x * groups + group, step = (int64_t)gridDim.x * groups;
  Vec8 vx = vec8_zero(), vdy = vec8_zero(), vdx = vec8_zero();
  float r = 0;
  if (row < N) {
    if (on) vx = load8_once(x + row * D + c), vdy = load8_once(dy + row * D + c);
    if (ADD && on) vdx = load8_once(dx + row * D + c);
    r = rstd[row];
  }
  // all groups of the block go round equally often; one without a row left adds zeros
  for (int64_t first = (int64_t)blockIdx.x * groups; first < N; first += step, row += step) {
    float fx[8], fdy[8], fd[8], sum = 0, slope, now = r;
    unpack8(fx, vx);
    unpack8(fdy, vdy);
    unpack8(fd, vdx);
    if (row + step < N) {
      int64_t next = (row + step) * D + c;
      if (on) vx = load8_once(x + next), vdy = load8_once(dy + next);
      if (ADD && on) vdx = load8_once(dx + next);
      r = rstd[row + step];
    } else {
      vx = vdy = vec8_zero();
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float xdy = fx[j] * fdy[j];
      sum += w[j] * xdy;
      dw[j] += now * xdy;
    }
    slope = group_sum(sum, buffer[group], turn, group, threads) / (float)D * now * now * now;
    turn ^= 1;
#pragma unroll
    for (int j = 0; j < 8; j++) fd[j] = (ADD ? fd[j] : 0.0f) + (now * fdy[j] * w[j] - slope * fx[j]);
    if (on && row < N) store8(dx + row * D + c, pack8(fd));
  }
  partial += (int64_t)blockIdx.x * D;
  if (groups == 1) {
    if (on)
      for (int j = 0; j < 8; j++) partial[c + j] = dw[j];
    return;
  }
  if (on)
    for (int j = 0; j < 8; j++) shares[group * D + c + j] = dw[j];
  __syncthreads();
  for (int i = threadIdx.x; i < D; i += blockDim.x) {
    float total = 0;
    for (int g = 0; g < groups; g++) total += shares[g * D + i];
    partial[i] = total;
  }
}

// Threads a row and rows a block at a time, for rows of D columns.
static inline int rmsnorm_row_threads(int D) { return (int)(ceil_div(D / 8, 32) * 32); }

static inline int rmsnorm_block_groups(int D) {
  int groups = RMSNORM_GROUP_THREADS / rmsnorm_row_threads(D);
  return groups < 1 ? 1 : groups < RMSNORM_GROUPS ? groups : (int)RMSNORM_GROUPS;
}

// Blocks of the backward pass: depends on the sizes alone, so that the order of sums does too.
static inline int64_t rmsnorm_backward_blocks(int64_t N, int D) {
  int64_t blocks = ceil_div(N, rmsnorm_block_groups(D));
  return blocks < RMSNORM_BLOCKS ? blocks : (int64_t)RMSNORM_BLOCKS;
}

// Floats of scratch that rmsnorm_backward needs.
static inline int64_t rmsnorm_backward_scratch(int64_t N, int D) { return rmsnorm_backward_blocks(N, D) * D; }

// Calls LAUNCH(NV, WARPS) with the constants for a row of D columns.
#define RMSNORM_DISPATCH(D, LAUNCH)  \
  do {                               \
    if ((D) <= 2560) {               \
      switch (((D) + 255) / 256) {   \
        case 1:                      \
          LAUNCH(1, 1);              \
          break;                     \
        case 2:                      \
          LAUNCH(2, 1);              \
          break;                     \
        case 3:                      \
          LAUNCH(3, 1);              \
          break;                     \
        case 4:                      \
          LAUNCH(4, 1);              \
          break;                     \
        case 5:                      \
        case 6:                      \
          LAUNCH(6, 1);              \
          break;                     \
        case 7:                      \
        case 8:                      \
          LAUNCH(8, 1);              \
          break;                     \
        case 9:                      \
          LAUNCH(9, 1);              \
          break;                     \
        default:                     \
          LAUNCH(10, 1);             \
          break;                     \
      }                              \
    } else {                         \
      switch (((D) + 1023) / 1024) { \
        case 3:                      \
          LAUNCH(3, 4);              \
          break;                     \
        case 4:                      \
          LAUNCH(4, 4);              \
          break;                     \
        case 5:                      \
          LAUNCH(5, 4);              \
          break;                     \
        default:                     \
          LAUNCH(8, 4);              \
          break;                     \
      }                              \
    }                                \
  } while (0)

static inline void rmsnorm_check_width(const char *kernel, int D) {
  require_multiple(kernel, "the row width", D, 8);
  if (D < 8 || D > RMSNORM_MAX_WIDTH)
    fail(EXIT_CONFIG, "%s: the row width is %d, needed: 8 to %d; change --width", kernel, D, RMSNORM_MAX_WIDTH);
}

// y [N, D], rstd [N] (may be NULL) <- x [N, D], weight [D].
static MAYBE_UNUSED void rmsnorm_forward(bf16 *y, float *rstd, const bf16 *x, const float *weight, float eps, int64_t N,
                                         int D, cudaStream_t stream) {
  rmsnorm_check_width("rmsnorm_forward", D);
  if (N == 0) return;
#define RMSNORM_LAUNCH(NV, WARPS)                                                                            \
  rmsnorm_forward_kernel<NV, WARPS>                                                                          \
      <<<grid_size(ceil_div(N, RMSNORM_WARPS / WARPS), "rmsnorm_forward"), 32 * RMSNORM_WARPS, 0, stream>>>( \
          y, rstd, x, weight, eps, N, D)
  RMSNORM_DISPATCH(D, RMSNORM_LAUNCH);
#undef RMSNORM_LAUNCH
  KERNEL_CHECK("rmsnorm_forward");
}

// dx [N, D] (written, or added to when `accumulate`), dweight [D] += ; scratch of rmsnorm_backward_scratch floats.
static MAYBE_UNUSED void rmsnorm_backward(bf16 *dx, float *dweight, float *scratch, const bf16 *dy, const bf16 *x,
                                          const float *weight, const float *rstd, int64_t N, int D, int accumulate,
                                          cudaStream_t stream) {
  rmsnorm_check_width("rmsnorm_backward", D);
  if (N == 0) return;
  int64_t blocks = rmsnorm_backward_blocks(N, D);
  int row_threads = rmsnorm_row_threads(D), threads = row_threads * rmsnorm_block_groups(D);
#define RMSNORM_LAUNCH(ADD, MAX_THREADS)    \
  rmsnorm_backward_kernel<ADD, MAX_THREADS> \
      <<<(unsigned)blocks, threads, 0, stream>>>(dx, scratch, dy, x, weight, rstd, N, D, row_threads)
  if (threads <= 256) {
    if (accumulate)
      RMSNORM_LAUNCH(true, 256);
    else
      RMSNORM_LAUNCH(false, 256);
  } else if (threads <= 512) {
    if (accumulate)
      RMSNORM_LAUNCH(true, 512);
    else
      RMSNORM_LAUNCH(false, 512);
  } else {
    if (accumulate)
      RMSNORM_LAUNCH(true, 1024);
    else
      RMSNORM_LAUNCH(false, 1024);
  }
#undef RMSNORM_LAUNCH
  KERNEL_CHECK("rmsnorm_backward");
  partial_reduce(dweight, scratch, blocks, D, 1, stream);
}

#endif  // GDN_CUDA_RMSNORM_CUH
