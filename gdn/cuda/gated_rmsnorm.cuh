// gated_rmsnorm.cuh: the norms at the end of the linear mixers, forward and backward in one pass each.
//
// Per head (GDN, GDN-2, KDA, DeltaNet), rows of V values:
//   r = (mean(o^2) + eps)^-1/2      z = gate + bias      y = o r gamma act(z)        act: SiLU, sigmoid, or none
//   dn = dy act(z)   do = r (gamma dn - o r mean(gamma dn o r))   dgate = dy o r gamma act'(z)   dgamma += sum dn o r
// (without a norm, gamma NULL: y = o act(z), do = dy act(z), dgate = dy o act'(z))
// Whole width (Mamba-2, gate before norm), rows of D values:
//   u = o silu(z)    y = u r weight     du = r weight dy - u r^3 mean(weight dy u)    do = du silu(z)   dz = du o
//   silu'(z)
//
// Shapes: o, y, dy, do_ [N, H V] bf16 with row strides; gate, dgate the same columns of packed rows with their own
// strides; gamma [V] fp32, shared by the heads; bias [H V] fp32 or NULL. V a multiple of 64 up to 512. Strides and
// column offsets multiples of 8. r is not saved: the backward pass reads o anyway. do_ may be o, dgate may be gate.
// Bytes a value: forward 6, backward 10 (without gate 4 and 6).
//
// defines: GateActivation, gated_rmsnorm_forward, gated_rmsnorm_backward, gated_rmsnorm_backward_scratch,
//          rmsnorm_gate_first_forward, rmsnorm_gate_first_backward, rmsnorm_gate_first_backward_scratch
#ifndef GDN_CUDA_GATED_RMSNORM_CUH
#define GDN_CUDA_GATED_RMSNORM_CUH

#include "common.cuh"
#include "rmsnorm.cuh"

typedef enum { ACT_NONE, ACT_SILU, ACT_SIGMOID } GateActivation;

enum {
  GATED_NORM_WARPS = 4,
  RMSNORM_GATE_FIRST_BLOCKS = 528,
  GATED_NORM_FORWARD_TOKENS = 4,  // a warp's tokens, all loaded before the first is used
  GATED_NORM_CHUNK = 256          // tokens a block in the backward pass: one row of partial sums each
};

// A warp serves 32 / LANES heads; LANES lanes hold a head's V values in NV groups of eight a lane.
template <int LANES, int NV, GateActivation ACT>
__global__ void __launch_bounds__(32 * GATED_NORM_WARPS)
    gated_rmsnorm_forward_kernel(bf16 *y, const bf16 *o, const bf16 *gate, const float *gamma, const float *bias,
                                 float eps, int64_t N, int H, int V, int64_t y_stride, int64_t o_stride,
                                 int64_t gate_stride) {
  const int TOKENS = GATED_NORM_FORWARD_TOKENS, heads = 32 / LANES, groups = (H + heads - 1) / heads;
  int lane = threadIdx.x % LANES, head = (int)(blockIdx.x % groups) * heads + threadIdx.x % 32 / LANES;
  int64_t token0 = ((int64_t)(blockIdx.x / groups) * GATED_NORM_WARPS + threadIdx.x / 32) * TOKENS;
  Vec8 vo[TOKENS][NV], vg[TOKENS][NV];
#pragma unroll
  for (int k = 0; k < TOKENS; k++)
#pragma unroll
    for (int i = 0; i < NV; i++) {
      int c = (lane + i * LANES) * 8;
      bool on = head < H && c < V && token0 + k < N;
      vo[k][i] = on ? load8_once(o + (token0 + k) * o_stride + head * V + c) : vec8_zero();
      if (ACT != ACT_NONE) vg[k][i] = on ? load8_once(gate + (token0 + k) * gate_stride + head * V + c) : vec8_zero();
    }
#pragma unroll
  for (int k = 0; k < TOKENS; k++) {
    float sum = 0, fo[8], fg[8], w[8], b[8];
#pragma unroll
    for (int i = 0; i < NV; i++) {
      unpack8(fo, vo[k][i]);
#pragma unroll
      for (int j = 0; j < 8; j++) sum += fo[j] * fo[j];
    }
    float r = rsqrtf(warp_sum<LANES>(sum) / (float)V + eps);
#pragma unroll
    for (int i = 0; i < NV; i++) {
      int c = (lane + i * LANES) * 8;
      if (head >= H || c >= V || token0 + k >= N) continue;
      unpack8(fo, vo[k][i]);
      load_floats8(w, gamma + c);
      if (ACT != ACT_NONE) unpack8(fg, vg[k][i]);
      if (ACT != ACT_NONE && bias) {
        load_floats8(b, bias + head * V + c);
#pragma unroll
        for (int j = 0; j < 8; j++) fg[j] += b[j];
      }
#pragma unroll
      for (int j = 0; j < 8; j++) {
        fo[j] *= r * w[j];
        if (ACT != ACT_NONE) fo[j] *= sigmoid_fast(fg[j]);
        if (ACT == ACT_SILU) fo[j] *= fg[j];
      }
      store8(y + (token0 + k) * y_stride + head * V + c, pack8(fo));
    }
  }
}

// A block stays on one group of heads for GATED_NORM_CHUNK tokens: its warps add up dgamma and dbias in registers,
// then through shared memory. partial_gamma [chunks x groups][V], partial_bias [chunks][H V].
template <int LANES, int NV, GateActivation ACT, bool BIAS>
__global__ void __launch_bounds__(32 * GATED_NORM_WARPS)
    gated_rmsnorm_backward_kernel(bf16 *do_, bf16 *dgate, float *partial_gamma, float *partial_bias, const bf16 *dy,
                                  const bf16 *o, const bf16 *gate, const float *gamma, const float *bias, float eps,
                                  int64_t N, int H, int V, int64_t do_stride, int64_t dgate_stride, int64_t dy_stride,
                                  int64_t o_stride, int64_t gate_stride) {
  __shared__ float shares[BIAS ? 2 : 1][GATED_NORM_WARPS * 32 * NV * 8];
  const int heads = 32 / LANES, groups = (H + heads - 1) / heads, TOKENS = NV == 1 ? 4 : 2;
  int lane = threadIdx.x % LANES, sub = threadIdx.x % 32 / LANES, warp = threadIdx.x / 32;
  int head = (int)(blockIdx.x % groups) * heads + sub;
  int64_t chunk = blockIdx.x / groups, begin = chunk * GATED_NORM_CHUNK;
  int64_t end = begin + GATED_NORM_CHUNK < N ? begin + GATED_NORM_CHUNK : N;
  float w[NV][8], dw[NV][8], db[BIAS ? NV : 1][8];
#pragma unroll
  for (int i = 0; i < NV; i++) {
    int c = (lane + i * LANES) * 8;
#pragma unroll
    for (int j = 0; j < 8; j++) w[i][j] = dw[i][j] = db[BIAS ? i : 0][j] = 0;
    if (c < V) load_floats8(w[i], gamma + c);
  }
  for (int64_t token0 = begin + warp * TOKENS; token0 < end; token0 += GATED_NORM_WARPS * TOKENS) {
    Vec8 vo[TOKENS][NV], vg[TOKENS][NV], vd[TOKENS][NV];
#pragma unroll
    for (int k = 0; k < TOKENS; k++)
#pragma unroll
      for (int i = 0; i < NV; i++) {
        int c = (lane + i * LANES) * 8;
        bool on = head < H && c < V && token0 + k < end;
        vo[k][i] = on ? load8_once(o + (token0 + k) * o_stride + head * V + c) : vec8_zero();
        vd[k][i] = on ? load8_once(dy + (token0 + k) * dy_stride + head * V + c) : vec8_zero();
        if (ACT != ACT_NONE)
          vg[k][i] = on ? load8_once(gate + (token0 + k) * gate_stride + head * V + c) : vec8_zero();
      }
#pragma unroll
    for (int k = 0; k < TOKENS; k++) {
      float squares = 0, product = 0, fo[8], fd[8], fg[8], act[NV][8], slope[NV][8];
#pragma unroll
      for (int i = 0; i < NV; i++) {
        unpack8(fo, vo[k][i]);
        unpack8(fd, vd[k][i]);
        if (ACT != ACT_NONE) unpack8(fg, vg[k][i]);
        if (BIAS && head < H && (lane + i * LANES) * 8 < V) {
          float b[8];
          load_floats8(b, bias + head * V + (lane + i * LANES) * 8);
#pragma unroll
          for (int j = 0; j < 8; j++) fg[j] += b[j];
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
          act[i][j] = 1, slope[i][j] = 0;
          if (ACT != ACT_NONE) {
            float s = sigmoid_fast(fg[j]), t = s * (1.0f - s);
            act[i][j] = ACT == ACT_SILU ? fg[j] * s : s;
            slope[i][j] = ACT == ACT_SILU ? s + fg[j] * t : t;
          }
          squares += fo[j] * fo[j];
          product += w[i][j] * fd[j] * act[i][j] * fo[j];
        }
      }
      float r = rsqrtf(warp_sum<LANES>(squares) / (float)V + eps);
      float mean = warp_sum<LANES>(product) / (float)V * r * r;  // of gamma dn o r, times r: o takes the last one
#pragma unroll
      for (int i = 0; i < NV; i++) {
        int c = (lane + i * LANES) * 8;
        if (head >= H || c >= V || token0 + k >= end) continue;
        unpack8(fo, vo[k][i]);
        unpack8(fd, vd[k][i]);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          float normed = fo[j] * r, dn = fd[j] * act[i][j];
          fg[j] = fd[j] * normed * w[i][j] * slope[i][j];
          dw[i][j] += dn * normed;
          if (BIAS) db[BIAS ? i : 0][j] += fg[j];
          fo[j] = r * (w[i][j] * dn - fo[j] * mean);
        }
        store8(do_ + (token0 + k) * do_stride + head * V + c, pack8(fo));
        if (ACT != ACT_NONE) store8(dgate + (token0 + k) * dgate_stride + head * V + c, pack8(fg));
      }
    }
  }
  // shares: [warp][head of the warp][V rounded up to LANES * NV * 8]
  const int span = LANES * NV * 8;
#pragma unroll
  for (int i = 0; i < NV; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) {
      int at = (warp * heads + sub) * span + (lane + i * LANES) * 8 + j;
      shares[0][at] = dw[i][j];
      if (BIAS) shares[BIAS ? 1 : 0][at] = db[BIAS ? i : 0][j];
    }
  __syncthreads();
  for (int c = threadIdx.x; c < V; c += blockDim.x) {
    float total = 0;
    for (int k = 0; k < GATED_NORM_WARPS * heads; k++) total += shares[0][k * span + c];
    partial_gamma[(int64_t)blockIdx.x * V + c] = total;
  }
  if (BIAS)
    for (int k = threadIdx.x; k < heads * V; k += blockDim.x) {
      int h = k / V, c = k % V, to = (int)(blockIdx.x % groups) * heads + h;
      if (to >= H) continue;
      float total = 0;
      for (int i = 0; i < GATED_NORM_WARPS; i++) total += shares[BIAS ? 1 : 0][(i * heads + h) * span + c];
      partial_bias[(chunk * H + to) * V + c] = total;
    }
}

// Without a norm: y = o act(gate + bias), element by element. A block serves a token.
static __global__ void __launch_bounds__(128)
    output_gate_forward_kernel(bf16 *y, const bf16 *o, const bf16 *gate, const float *bias, GateActivation act,
                               int width, int64_t y_stride, int64_t o_stride, int64_t gate_stride) {
  int64_t n = blockIdx.x;
  for (int c = threadIdx.x * 8; c < width; c += 128 * 8) {
    float fo[8], fg[8], b[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    unpack8(fo, load8(o + n * o_stride + c));
    if (act != ACT_NONE) {
      unpack8(fg, load8(gate + n * gate_stride + c));
      if (bias) load_floats8(b, bias + c);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float z = fg[j] + b[j];
        fo[j] *= act == ACT_SILU ? z * sigmoid_fast(z) : sigmoid_fast(z);
      }
    }
    store8(y + n * y_stride + c, pack8(fo));
  }
}

// A thread serves eight columns of GATED_NORM_CHUNK tokens. partial_bias [chunks][width].
static __global__ void __launch_bounds__(128)
    output_gate_backward_kernel(bf16 *do_, bf16 *dgate, float *partial_bias, const bf16 *dy, const bf16 *o,
                                const bf16 *gate, const float *bias, GateActivation act, int64_t N, int width,
                                int64_t do_stride, int64_t dgate_stride, int64_t dy_stride, int64_t o_stride,
                                int64_t gate_stride) {
  int c = (int)(blockIdx.y * 128 + threadIdx.x) * 8;
  if (c >= width) return;
  int64_t begin = (int64_t)blockIdx.x * GATED_NORM_CHUNK, end = begin + GATED_NORM_CHUNK;
  float b[8] = {0, 0, 0, 0, 0, 0, 0, 0}, db[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (bias) load_floats8(b, bias + c);
  for (int64_t n = begin; n < end && n < N; n++) {
    float fd[8], fo[8], fg[8];
    unpack8(fd, load8(dy + n * dy_stride + c));
    if (act != ACT_NONE) {
      unpack8(fo, load8(o + n * o_stride + c));
      unpack8(fg, load8(gate + n * gate_stride + c));
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float z = fg[j] + b[j], s = sigmoid_fast(z), t = s * (1.0f - s);
        fg[j] = fd[j] * fo[j] * (act == ACT_SILU ? s + z * t : t);
        db[j] += fg[j];
        fd[j] *= act == ACT_SILU ? z * s : s;
      }
      store8(dgate + n * dgate_stride + c, pack8(fg));
    }
    store8(do_ + n * do_stride + c, pack8(fd));
  }
  if (bias)
#pragma unroll
    for (int j = 0; j < 8; j++) partial_bias[(int64_t)blockIdx.x * width + c + j] = db[j];
}

// Lanes that share a head of V values.
static inline int gated_rmsnorm_lanes(int V) { return V == 64 ? 8 : V == 128 ? 16 : 32; }

static inline int64_t gated_rmsnorm_groups(int H, int V) { return ceil_div(H, 32 / gated_rmsnorm_lanes(V)); }

// Floats of scratch that gated_rmsnorm_backward needs.
static inline int64_t gated_rmsnorm_backward_scratch(int64_t N, int H, int V) {
  return ceil_div(N, GATED_NORM_CHUNK) * (gated_rmsnorm_groups(H, V) * V + (int64_t)H * V);
}

static inline void gated_rmsnorm_check(const char *kernel, int H, int V, int64_t s0, int64_t s1, int64_t s2) {
  if (V % 64 != 0 || V < 64 || V > 512 || H < 1)
    fail(EXIT_CONFIG, "%s: %d heads of %d values, needed: a multiple of 64 up to 512; change --heads", kernel, H, V);
  require_multiple(kernel, "a row stride", s0, 8);
  require_multiple(kernel, "a row stride", s1, 8);
  require_multiple(kernel, "a row stride", s2, 8);
}

// Calls LAUNCH(LANES, NV) with the constants for heads of V values.
#define GATED_RMSNORM_DISPATCH(V, LAUNCH) \
  do {                                    \
    if ((V) == 64)                        \
      LAUNCH(8, 1);                       \
    else if ((V) == 128)                  \
      LAUNCH(16, 1);                      \
    else if ((V) <= 256)                  \
      LAUNCH(32, 1);                      \
    else                                  \
      LAUNCH(32, 2);                      \
  } while (0)

// y [N, H V] <- o [N, H V], gate [N, H V] (NULL with ACT_NONE), gamma [V] (NULL: no norm), bias [H V] or NULL.
static MAYBE_UNUSED void gated_rmsnorm_forward(bf16 *y, int64_t y_stride, const bf16 *o, int64_t o_stride,
                                               const bf16 *gate, int64_t gate_stride, const float *gamma,
                                               const float *bias, GateActivation act, float eps, int64_t N, int H,
                                               int V, cudaStream_t stream) {
  gated_rmsnorm_check("gated_rmsnorm_forward", H, V, y_stride, o_stride, act == ACT_NONE ? 0 : gate_stride);
  if (N == 0) return;
  if (!gamma) {
    output_gate_forward_kernel<<<grid_size(N, "output_gate_forward"), 128, 0, stream>>>(
        y, o, gate, bias, act, H * V, y_stride, o_stride, gate_stride);
    KERNEL_CHECK("output_gate_forward");
    return;
  }
  int64_t blocks = ceil_div(N, GATED_NORM_WARPS * GATED_NORM_FORWARD_TOKENS) * gated_rmsnorm_groups(H, V);
#define GATED_LAUNCH_ACT(LANES, NV, ACT)                                                  \
  gated_rmsnorm_forward_kernel<LANES, NV, ACT>                                            \
      <<<grid_size(blocks, "gated_rmsnorm_forward"), 32 * GATED_NORM_WARPS, 0, stream>>>( \
          y, o, gate, gamma, bias, eps, N, H, V, y_stride, o_stride, gate_stride)
#define GATED_LAUNCH(LANES, NV)                  \
  do {                                           \
    if (act == ACT_SILU)                        \
      GATED_LAUNCH_ACT(LANES, NV, ACT_SILU);    \
    else if (act == ACT_SIGMOID)                \
      GATED_LAUNCH_ACT(LANES, NV, ACT_SIGMOID); \
    else                                         \
      GATED_LAUNCH_ACT(LANES, NV, ACT_NONE);    \
  } while (0)
  GATED_RMSNORM_DISPATCH(V, GATED_LAUNCH);
#undef GATED_LAUNCH
#undef GATED_LAUNCH_ACT
  KERNEL_CHECK("gated_rmsnorm_forward");
}

// do_ [N, H V], dgate [N, H V], dgamma [V] += (NULL when gamma is), dbias [H V] += (NULL when bias is) <- dy and the
// forward's inputs.
static MAYBE_UNUSED void gated_rmsnorm_backward(bf16 *do_, int64_t do_stride, bf16 *dgate, int64_t dgate_stride,
                                                float *dgamma, float *dbias, float *scratch, const bf16 *dy,
                                                int64_t dy_stride, const bf16 *o, int64_t o_stride, const bf16 *gate,
                                                int64_t gate_stride, const float *gamma, const float *bias,
                                                GateActivation act, float eps, int64_t N, int H, int V,
                                                cudaStream_t stream) {
  gated_rmsnorm_check("gated_rmsnorm_backward", H, V, do_stride, dy_stride, o_stride);
  if (act != ACT_NONE)
    gated_rmsnorm_check("gated_rmsnorm_backward", H, V, dgate_stride, gate_stride, 0);
  else if (bias)
    fail(EXIT_INTERNAL, "gated_rmsnorm_backward: a gate bias without a gate");
  if (N == 0) return;
  int64_t chunks = ceil_div(N, GATED_NORM_CHUNK), blocks = chunks * gated_rmsnorm_groups(H, V);
  if (!gamma) {
    dim3 grid(grid_size(chunks, "output_gate_backward"), (unsigned)ceil_div((int64_t)H * V, 128 * 8));
    output_gate_backward_kernel<<<grid, 128, 0, stream>>>(do_, dgate, scratch, dy, o, gate, bias, act, N, H * V,
                                                          do_stride, dgate_stride, dy_stride, o_stride, gate_stride);
    KERNEL_CHECK("output_gate_backward");
    if (bias) partial_reduce(dbias, scratch, chunks, (int64_t)H * V, 1, stream);
    return;
  }
  float *partial_bias = scratch + blocks * V;
#define GATED_LAUNCH_ACT(LANES, NV, ACT, BIAS)                                                                \
  gated_rmsnorm_backward_kernel<LANES, NV, ACT, BIAS>                                                         \
      <<<grid_size(blocks, "gated_rmsnorm_backward"), 32 * GATED_NORM_WARPS, 0, stream>>>(                    \
          do_, dgate, scratch, partial_bias, dy, o, gate, gamma, bias, eps, N, H, V, do_stride, dgate_stride, \
          dy_stride, o_stride, gate_stride)
#define GATED_LAUNCH(LANES, NV)                         \
  do {                                                  \
    if (act == ACT_SILU && bias)                       \
      GATED_LAUNCH_ACT(LANES, NV, ACT_SILU, true);     \
    else if (act == ACT_SILU)                          \
      GATED_LAUNCH_ACT(LANES, NV, ACT_SILU, false);    \
    else if (act == ACT_SIGMOID && bias)               \
      GATED_LAUNCH_ACT(LANES, NV, ACT_SIGMOID, true);  \
    else if (act == ACT_SIGMOID)                       \
      GATED_LAUNCH_ACT(LANES, NV, ACT_SIGMOID, false); \
    else                                                \
      GATED_LAUNCH_ACT(LANES, NV, ACT_NONE, false);    \
  } while (0)
  GATED_RMSNORM_DISPATCH(V, GATED_LAUNCH);
#undef GATED_LAUNCH
#undef GATED_LAUNCH_ACT
  KERNEL_CHECK("gated_rmsnorm_backward");
  partial_reduce(dgamma, scratch, blocks, V, 1, stream);
  if (bias) partial_reduce(dbias, partial_bias, chunks, (int64_t)H * V, 1, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Mamba-2's order: the gate first, then one norm over the whole width (arXiv 2405.21060, norm_before_gate false).
// One row a block of four warps.

template <int NV>
__global__ void __launch_bounds__(32 * RMSNORM_WARPS)
    rmsnorm_gate_first_forward_kernel(bf16 *y, const bf16 *o, const bf16 *gate, const float *weight, float eps, int D,
                                      int64_t y_stride, int64_t o_stride, int64_t gate_stride) {
  __shared__ float buffer[2][RMSNORM_WARPS];
  const int threads = 32 * RMSNORM_WARPS;
  int64_t row = blockIdx.x;
  Vec8 vo[NV], vg[NV];
  float u[NV][8], sum = 0, fg[8], w[8];
#pragma unroll
  for (int i = 0; i < NV; i++) {
    int c = (threadIdx.x + i * threads) * 8;
    vo[i] = c < D ? load8_once(o + row * o_stride + c) : vec8_zero();
    vg[i] = c < D ? load8_once(gate + row * gate_stride + c) : vec8_zero();
  }
#pragma unroll
  for (int i = 0; i < NV; i++) {
    unpack8(u[i], vo[i]);
    unpack8(fg, vg[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      u[i][j] *= fg[j] * sigmoid_fast(fg[j]);
      sum += u[i][j] * u[i][j];
    }
  }
  float r = rsqrtf(row_sum<RMSNORM_WARPS>(sum, buffer, 0) / (float)D + eps);
#pragma unroll
  for (int i = 0; i < NV; i++) {
    int c = (threadIdx.x + i * threads) * 8;
    if (c >= D) continue;
    load_floats8(w, weight + c);
#pragma unroll
    for (int j = 0; j < 8; j++) u[i][j] *= r * w[j];
    store8(y + row * y_stride + c, pack8(u[i]));
  }
}

template <int NV>
__global__ void __launch_bounds__(32 * RMSNORM_WARPS)
    rmsnorm_gate_first_backward_kernel(bf16 *do_, bf16 *dgate, float *partial, const bf16 *dy, const bf16 *o,
                                       const bf16 *gate, const float *weight, float eps, int64_t N, int D,
                                       int64_t do_stride, int64_t dgate_stride, int64_t dy_stride, int64_t o_stride,
                                       int64_t gate_stride) {
  __shared__ float buffer[2][2][RMSNORM_WARPS];
  const int threads = 32 * RMSNORM_WARPS;
  float dw[NV][8];
  int turn = 0;
#pragma unroll
  for (int i = 0; i < NV; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) dw[i][j] = 0;
  for (int64_t row = blockIdx.x; row < N; row += gridDim.x) {
    Vec8 vo[NV], vg[NV], vd[NV];
    float squares = 0, product = 0, fo[8], fg[8], fd[8], w[8];
#pragma unroll
    for (int i = 0; i < NV; i++) {
      int c = (threadIdx.x + i * threads) * 8;
      vo[i] = c < D ? load8_once(o + row * o_stride + c) : vec8_zero();
      vg[i] = c < D ? load8_once(gate + row * gate_stride + c) : vec8_zero();
      vd[i] = c < D ? load8_once(dy + row * dy_stride + c) : vec8_zero();
    }
#pragma unroll
    for (int i = 0; i < NV; i++) {
      int c = (threadIdx.x + i * threads) * 8;
      if (c >= D) continue;
      unpack8(fo, vo[i]);
      unpack8(fg, vg[i]);
      unpack8(fd, vd[i]);
      load_floats8(w, weight + c);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float u = fo[j] * fg[j] * sigmoid_fast(fg[j]);
        squares += u * u;
        product += w[j] * fd[j] * u;
      }
    }
    float r = rsqrtf(row_sum<RMSNORM_WARPS>(squares, buffer[0], turn) / (float)D + eps);
    float slope = row_sum<RMSNORM_WARPS>(product, buffer[1], turn) / (float)D * r * r * r;
    turn ^= 1;
#pragma unroll
    for (int i = 0; i < NV; i++) {
      int c = (threadIdx.x + i * threads) * 8;
      if (c >= D) continue;
      unpack8(fo, vo[i]);
      unpack8(fg, vg[i]);
      unpack8(fd, vd[i]);
      load_floats8(w, weight + c);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float s = sigmoid_fast(fg[j]), silu = fg[j] * s, u = fo[j] * silu, rdy = r * fd[j];
        float du = rdy * w[j] - slope * u;
        dw[i][j] += rdy * u;
        fg[j] = du * fo[j] * (s + silu * (1.0f - s));
        fo[j] = du * silu;
      }
      store8(do_ + row * do_stride + c, pack8(fo));
      store8(dgate + row * dgate_stride + c, pack8(fg));
    }
  }
#pragma unroll
  for (int i = 0; i < NV; i++) {
    int c = (threadIdx.x + i * threads) * 8;
    if (c >= D) continue;
#pragma unroll
    for (int j = 0; j < 8; j++) partial[(int64_t)blockIdx.x * D + c + j] = dw[i][j];
  }
}

static inline int64_t rmsnorm_gate_first_blocks(int64_t N) {
  return N < (int64_t)RMSNORM_GATE_FIRST_BLOCKS ? N : (int64_t)RMSNORM_GATE_FIRST_BLOCKS;
}

// Floats of scratch that rmsnorm_gate_first_backward needs.
static inline int64_t rmsnorm_gate_first_backward_scratch(int64_t N, int D) { return rmsnorm_gate_first_blocks(N) * D; }

#define RMSNORM_GATE_FIRST_DISPATCH(D, LAUNCH) \
  switch (((D) + 1023) / 1024) {               \
    case 1:                                    \
      LAUNCH(1);                               \
      break;                                   \
    case 2:                                    \
      LAUNCH(2);                               \
      break;                                   \
    case 3:                                    \
      LAUNCH(3);                               \
      break;                                   \
    case 4:                                    \
      LAUNCH(4);                               \
      break;                                   \
    case 5:                                    \
      LAUNCH(5);                               \
      break;                                   \
    default:                                   \
      LAUNCH(8);                               \
      break;                                   \
  }

// y [N, D] <- o [N, D], gate [N, D], weight [D].
static MAYBE_UNUSED void rmsnorm_gate_first_forward(bf16 *y, int64_t y_stride, const bf16 *o, int64_t o_stride,
                                                    const bf16 *gate, int64_t gate_stride, const float *weight,
                                                    float eps, int64_t N, int D, cudaStream_t stream) {
  rmsnorm_check_width("rmsnorm_gate_first_forward", D);
  require_multiple("rmsnorm_gate_first_forward", "a row stride", y_stride | o_stride | gate_stride, 8);
  if (N == 0) return;
#define GATE_FIRST_LAUNCH(NV)                                                                                     \
  rmsnorm_gate_first_forward_kernel<NV>                                                                           \
      <<<grid_size(N, "rmsnorm_gate_first_forward"), 32 * RMSNORM_WARPS, 0, stream>>>(y, o, gate, weight, eps, D, \
                                                                                      y_stride, o_stride, gate_stride)
  RMSNORM_GATE_FIRST_DISPATCH(D, GATE_FIRST_LAUNCH);
#undef GATE_FIRST_LAUNCH
  KERNEL_CHECK("rmsnorm_gate_first_forward");
}

// do_ [N, D], dgate [N, D], dweight [D] += <- dy and the forward's inputs.
static MAYBE_UNUSED void rmsnorm_gate_first_backward(bf16 *do_, int64_t do_stride, bf16 *dgate, int64_t dgate_stride,
                                                     float *dweight, float *scratch, const bf16 *dy, int64_t dy_stride,
                                                     const bf16 *o, int64_t o_stride, const bf16 *gate,
                                                     int64_t gate_stride, const float *weight, float eps, int64_t N,
                                                     int D, cudaStream_t stream) {
  rmsnorm_check_width("rmsnorm_gate_first_backward", D);
  require_multiple("rmsnorm_gate_first_backward", "a row stride",
                   do_stride | dgate_stride | dy_stride | o_stride | gate_stride, 8);
  if (N == 0) return;
  int64_t blocks = rmsnorm_gate_first_blocks(N);
#define GATE_FIRST_LAUNCH(NV)                                                                  \
  rmsnorm_gate_first_backward_kernel<NV><<<(unsigned)blocks, 32 * RMSNORM_WARPS, 0, stream>>>( \
      do_, dgate, scratch, dy, o, gate, weight, eps, N, D, do_stride, dgate_stride, dy_stride, o_stride, gate_stride)
  RMSNORM_GATE_FIRST_DISPATCH(D, GATE_FIRST_LAUNCH);
#undef GATE_FIRST_LAUNCH
  KERNEL_CHECK("rmsnorm_gate_first_backward");
  partial_reduce(dweight, scratch, blocks, D, 1, stream);
}

#endif  // GDN_CUDA_GATED_RMSNORM_CUH
