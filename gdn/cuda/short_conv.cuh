// short_conv.cuh: the short convolution of the linear mixers with all that follows it, forward and backward in one
// pass.
//
//   c_t = bias + sum_{j=0..3} weight[j] x_{t-3+j}     (depthwise, causal; tap 3 is the current token)
//   a_t = silu(c_t)
//   y_t = a_t (sum over the head of a_t^2 + 1e-6)^-1/2    in the first norm_channels channels (q and k), else a_t;
//         with l1 a_t / (sum over the head of |a_t| + 1e-6)
//   backward  dc = dy (after the norm: r (dy - y (y.dy))) silu'(c)      dx_t = sum_j weight[j] dc_{t+3-j}
//             dweight[j] += sum over tokens of dc_t x_{t-3+j}           dbias += sum dc
//             l1: dc = r (dy - sign(a) (y.dy)) silu'(c)
// Two and three taps are four of which the first are 0: short_conv_widen, short_conv_narrow.
//
// Shapes: x, y, dy, dx [B T, C] bf16 with row strides (packed q|k|v rows); weight, dweight [C, 4] and bias, dbias [C]
// fp32; weight NULL means no convolution (y = silu(x) and the norm), bias NULL none. K, the norm's head width, is 64,
// 128, 192 or 256. doc_start [B T] or NULL: for each token the position inside its row, 0 to T - 1, at which its
// document starts; taps never reach before it. Rows of the batch are independent. dx must not be x.
// Bytes a channel and token: forward 4, backward 6, and 3 tokens of overlap a strip.
//
// A warp holds up to 256 channels (whole heads) and walks a strip of tokens; the last three tokens stay in registers
// (as fp32).
//
// defines: short_conv_forward, short_conv_backward, short_conv_backward_scratch, short_conv_widen, short_conv_narrow
#ifndef GDN_CUDA_SHORT_CONV_CUH
#define GDN_CUDA_SHORT_CONV_CUH

#include "common.cuh"

enum {
  SHORT_CONV_WARPS = 4,
  SHORT_CONV_FORWARD_STRIP = 32,  // tokens a warp
  SHORT_CONV_RING = 8             // tokens in flight a warp, a multiple of 4
};

#define SHORT_CONV_L2_EPS 1e-6f

// Where a warp works: its channels and its tokens. Blocks next to each other take neighbouring channels.
struct ConvStrip {
  int channel;     // this lane's first channel
  int limit;       // end of the warp's channels
  bool active;     // this lane has channels
  bool normalise;  // the warp's channels are q or k
  int64_t group;   // which SHORT_CONV_WARPS strips the block walks
  int64_t row;     // batch row x T: index of the row's first token
  int begin, end;  // tokens inside the row
};

__device__ __forceinline__ ConvStrip conv_strip(int64_t B, int T, int C, int norm_channels, int K, int strip) {
  int lane = threadIdx.x % 32, span = K == 192 ? 192 : 256;
  int norm_segments = (norm_channels + span - 1) / span, segments = norm_segments + (C - norm_channels + 255) / 256;
  int segment = (int)(blockIdx.x % (unsigned)segments);
  int strips = (T - 1) / strip + 1;
  ConvStrip s;
  s.group = blockIdx.x / (unsigned)segments;
  int64_t index = s.group * SHORT_CONV_WARPS + threadIdx.x / 32;
  s.normalise = segment < norm_segments;
  int first = s.normalise ? segment * span : norm_channels + (segment - norm_segments) * 256;
  s.limit = s.normalise ? min(first + span, norm_channels) : min(first + 256, C);
  s.channel = first + lane * 8;
  s.active = s.channel < s.limit;
  s.row = index / strips * T;
  s.begin = index < B * strips ? (int)(index % strips) * strip : T;  // beyond the last strip: no tokens
  s.end = T - s.begin > strip ? s.begin + strip : T;
  return s;
}

// The block's weights, one float4 of taps for channel 8 lane + i at [i][lane], and its biases; neutral where there are
// none. Registers hold what changes: the weights are read from here again for each token.
struct ConvWeights {
  float4 taps[8][32];
  float bias[8][32];
};

__device__ __forceinline__ void conv_weights_load(ConvWeights &to, const float *weight, const float *bias,
                                                  const ConvStrip &s, int limit) {
  int first = s.channel - (int)(threadIdx.x % 32) * 8;
  for (int k = threadIdx.x; k < 256; k += 32 * SHORT_CONV_WARPS) {
    bool on = first + k < limit;
    to.taps[k % 8][k / 8] =
        weight && on ? __ldg(reinterpret_cast<const float4 *>(weight) + first + k) : make_float4(0, 0, 0, 1);
    to.bias[k % 8][k / 8] = bias && on ? bias[first + k] : 0.0f;
  }
  __syncthreads();
}

// c[8] of one token from its inputs x0 and those of the three tokens before it.
template <bool BIAS>
__device__ __forceinline__ void conv_step(float c[8], const ConvWeights &w, const float x3[8], const float x2[8],
                                          const float x1[8], const float x0[8]) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float4 taps = w.taps[i][lane];
    c[i] = taps.x * x3[i] + taps.y * x2[i] + taps.z * x1[i] + taps.w * x0[i];
    if (BIAS) c[i] += w.bias[i][lane];
  }
}

__device__ __forceinline__ void zero8(float f[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) f[i] = 0;
}

// The three tokens before the strip, x[3] being t - 1, x[2] t - 2, x[1] t - 3; zeros before the row.
__device__ __forceinline__ void conv_history(float h[4][8], const bf16 *x, int stride, const ConvStrip &s) {
#pragma unroll
  for (int j = 1; j <= 3; j++) {
    zero8(h[4 - j]);
    if (s.active && s.begin >= j) unpack8(h[4 - j], load8(x - j * stride));
  }
}

// LANES lanes hold one head. BIAS, DOCS and L1 are constants so that the usual case pays for none; with L1 doc_start
// may still be NULL. Strides are 32 bits here: they count from the strip's own pointers. Inputs arrive through a ring
// in shared memory, by asynchronous copies; each lane copies and reads its own 16 bytes, so that no barriers are
// needed. Token t0 + k is h[k].
template <int LANES, bool BIAS, bool DOCS, bool L1 = false>
__global__ void __launch_bounds__(32 * SHORT_CONV_WARPS, 5)
    short_conv_forward_kernel(bf16 *y, int y_stride, const bf16 *x, int x_stride, const float *weight,
                              const float *bias, const int32_t *doc_start, int64_t B, int T, int C, int norm_channels,
                              int K, int strip) {
  __shared__ Vec8 rings[SHORT_CONV_WARPS][SHORT_CONV_RING][32];
  __shared__ ConvWeights w;
  ConvStrip s = conv_strip(B, T, C, norm_channels, K, strip);
  conv_weights_load(w, weight, bias, s, s.limit);
  if (s.begin >= s.end) return;
  int lane = threadIdx.x % 32;
  Vec8(*ring)[32] = rings[threadIdx.x / 32];
  x += (s.row + s.begin) * x_stride + s.channel, y += (s.row + s.begin) * y_stride + s.channel;
  if (DOCS && (!L1 || doc_start)) doc_start += s.row;
  float h[4][8];
  conv_history(h, x, x_stride, s);
  uint32_t mine = (uint32_t)__cvta_generic_to_shared(&ring[0][lane]);
  const uint32_t slot_bytes = sizeof ring[0];
#pragma unroll
  for (int k = 0; k < SHORT_CONV_RING; k++) {
    copy16_async(mine + k * slot_bytes, x, s.active && s.begin + k < s.end);
    copy_commit();
    x += x_stride;
  }
  int base = 0;
  for (int t0 = s.begin; t0 < s.end; t0 += 4) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      int t = t0 + k;
      if (t >= s.end) break;
      if (DOCS && (!L1 || doc_start)) {  // what this token cannot see, no later one can
        int seen = t - doc_start[t];
        if (seen < 3) zero8(h[(k + 1) % 4]);
        if (seen < 2) zero8(h[(k + 2) % 4]);
        if (seen < 1) zero8(h[(k + 3) % 4]);
      }
      copy_wait<SHORT_CONV_RING - 1>();
      unpack8(h[k], ring[base + k][lane]);
      float a[8];
      conv_step<BIAS>(a, w, h[(k + 1) % 4], h[(k + 2) % 4], h[(k + 3) % 4], h[k]);
      copy16_async(mine + (base + k) * slot_bytes, x, s.active && t + SHORT_CONV_RING < s.end);
      copy_commit();
      x += x_stride;
#pragma unroll
      for (int i = 0; i < 8; i++) a[i] *= sigmoid_fast(a[i]);
      if (s.normalise) {  // a lane without channels has zeros
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += L1 ? fabsf(a[i]) : a[i] * a[i];
        float r = warp_sum<LANES>(sum) + SHORT_CONV_L2_EPS;
        r = L1 ? 1.0f / r : rsqrtf(r);
#pragma unroll
        for (int i = 0; i < 8; i++) a[i] *= r;
      }
      if (s.active) store8(y, pack8(a));
      y += y_stride;
    }
    base = base + 4 == SHORT_CONV_RING ? 0 : base + 4;
  }
}

// dx of a token is complete three tokens later: p1, p2, p3 carry the unfinished ones. The three tokens after the strip
// are walked too (for dx alone). At a document's first token the unfinished ones are stored at once.
template <int LANES, bool BIAS, bool DOCS, bool L1 = false>
__global__ void __launch_bounds__(32 * SHORT_CONV_WARPS, 3)
    short_conv_backward_kernel(bf16 *dx, int dx_stride, float *partial_weight, float *partial_bias, const bf16 *dy,
                               int dy_stride, const bf16 *x, int x_stride, const float *weight, const float *bias,
                               const int32_t *doc_start, int64_t B, int T, int C, int norm_channels, int K, int strip) {
  const int TAPS = BIAS ? 5 : 4;
  __shared__ union {
    Vec8 rings[SHORT_CONV_WARPS][SHORT_CONV_RING][2][32];
    float shares[SHORT_CONV_WARPS][5][256];
  } shared;
  __shared__ ConvWeights w;
  ConvStrip s = conv_strip(B, T, C, norm_channels, K, strip);
  conv_weights_load(w, weight, bias, s, s.limit);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float dw[8][4], db[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++) dw[i][0] = dw[i][1] = dw[i][2] = dw[i][3] = 0;
  if (s.begin < s.end) {
    Vec8(*ring)[2][32] = shared.rings[warp];
    x += (s.row + s.begin) * x_stride + s.channel, dy += (s.row + s.begin) * dy_stride + s.channel;
    dx += (s.row + s.begin) * dx_stride + s.channel;
    if (DOCS && (!L1 || doc_start)) doc_start += s.row;
    int stop = T - s.end > 3 ? s.end + 3 : T, first = s.begin;  // tokens before `first` are stored or not ours
    float h[4][8], p1[8], p2[8], p3[8];                         // p: unfinished dx of tokens t - 1, t - 2, t - 3
    conv_history(h, x, x_stride, s);
    uint32_t mine = (uint32_t)__cvta_generic_to_shared(&ring[0][0][lane]);
    const uint32_t slot_bytes = sizeof ring[0];
#pragma unroll
    for (int k = 0; k < SHORT_CONV_RING; k++) {
      bool on = s.active && s.begin + k < stop;
      copy16_async(mine + k * slot_bytes, x, on);
      copy16_async(mine + k * slot_bytes + slot_bytes / 2, dy, on);
      copy_commit();
      x += x_stride, dy += dy_stride;
    }
    zero8(p1), zero8(p2), zero8(p3);
    int base = 0;
    for (int t0 = s.begin; t0 < stop; t0 += 4) {
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int k1 = (k + 3) % 4, k2 = (k + 2) % 4, k3 = (k + 1) % 4;  // tokens t - 1, t - 2, t - 3 in h
        int t = t0 + k;
        if (t >= stop) break;
        if (DOCS && (!L1 || doc_start)) {
          int seen = t - doc_start[t];
          if (seen < 3) zero8(h[k3]);
          if (seen < 2) zero8(h[k2]);
          if (seen < 1) {
            zero8(h[k1]);
            if (s.active && t - 3 >= first) store8(dx - 3 * dx_stride, pack8(p3));
            if (s.active && t - 2 >= first && t - 2 < s.end) store8(dx - 2 * dx_stride, pack8(p2));
            if (s.active && t - 1 >= first && t - 1 < s.end) store8(dx - dx_stride, pack8(p1));
            first = t;
          }
        }
        copy_wait<SHORT_CONV_RING - 1>();
        float c[8], dc[8], done[8];
        unpack8(h[k], ring[base + k][0][lane]);
        unpack8(dc, ring[base + k][1][lane]);
        conv_step<BIAS>(c, w, h[k3], h[k2], h[k1], h[k]);
        bool on = s.active && t + SHORT_CONV_RING < stop;
        copy16_async(mine + (base + k) * slot_bytes, x, on);
        copy16_async(mine + (base + k) * slot_bytes + slot_bytes / 2, dy, on);
        copy_commit();
        x += x_stride, dy += dy_stride;
        if (s.normalise) {  // a lane without channels has zeros in c and dc
          float squares = 0, product = 0, sg[8];
#pragma unroll
          for (int i = 0; i < 8; i++) {
            sg[i] = sigmoid_fast(c[i]);
            c[i] *= sg[i];  // the activation
            squares += L1 ? fabsf(c[i]) : c[i] * c[i];
            product += c[i] * dc[i];
            sg[i] += c[i] - c[i] * sg[i];  // silu'
          }
          float r = warp_sum<LANES>(squares) + SHORT_CONV_L2_EPS;
          r = L1 ? 1.0f / r : rsqrtf(r);
          float slope = warp_sum<LANES>(product) * r * r;
          if (!L1) slope *= r;
#pragma unroll
          for (int i = 0; i < 8; i++)
            dc[i] = (r * dc[i] - slope * (L1 ? (float)((c[i] > 0) - (c[i] < 0)) : c[i])) * sg[i];
        } else {
#pragma unroll
          for (int i = 0; i < 8; i++) {
            float sg = sigmoid_fast(c[i]), a = c[i] * sg;
            dc[i] *= sg + (a - a * sg);
          }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
          float4 taps = w.taps[i][lane];
          done[i] = p3[i] + taps.x * dc[i];
          p3[i] = p2[i] + taps.y * dc[i];
          p2[i] = p1[i] + taps.z * dc[i];
          p1[i] = taps.w * dc[i];
        }
        if (s.active && t - 3 >= first) store8(dx - 3 * dx_stride, pack8(done));
        dx += dx_stride;
        if (t < s.end) {
#pragma unroll
          for (int i = 0; i < 8; i++) {
            dw[i][0] += dc[i] * h[k3][i];
            dw[i][1] += dc[i] * h[k2][i];
            dw[i][2] += dc[i] * h[k1][i];
            dw[i][3] += dc[i] * h[k][i];
            if (BIAS) db[i] += dc[i];
          }
        }
      }
      base = base + 4 == SHORT_CONV_RING ? 0 : base + 4;
    }
    // where the row ends, nothing more reaches its last three tokens
    if (s.active && stop - 3 >= first && stop - 3 < s.end) store8(dx - 3 * dx_stride, pack8(p3));
    if (s.active && stop - 2 >= first && stop - 2 < s.end) store8(dx - 2 * dx_stride, pack8(p2));
    if (s.active && stop - 1 >= first && stop - 1 < s.end) store8(dx - dx_stride, pack8(p1));
    copy_wait<0>();
  }
  __syncthreads();  // the rings are free: their memory takes the sums
#pragma unroll
  for (int i = 0; i < 8; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) shared.shares[warp][j][i * 32 + lane] = dw[i][j];
    if (BIAS) shared.shares[warp][TAPS - 1][i * 32 + lane] = db[i];
  }
  __syncthreads();
  // threads in the order of the output: channel first_channel + k / 4, tap k % 4
  int first_channel = s.channel - lane * 8;
  for (int k = threadIdx.x; k < 4 * (s.limit - first_channel); k += blockDim.x) {
    int channel = k / 4, at = channel % 8 * 32 + channel / 8;
    float total = 0;
    for (int i = 0; i < SHORT_CONV_WARPS; i++) total += shared.shares[i][k % 4][at];
    partial_weight[(s.group * C + first_channel) * 4 + k] = total;
  }
  if (BIAS)
    for (int channel = threadIdx.x; channel < s.limit - first_channel; channel += blockDim.x) {
      float total = 0;
      for (int i = 0; i < SHORT_CONV_WARPS; i++) total += shared.shares[i][TAPS - 1][channel % 8 * 32 + channel / 8];
      partial_bias[s.group * C + first_channel + channel] = total;
    }
}

// Tokens a warp in the backward pass: long strips overlap less and leave fewer partial sums, short ones fill the GPU.
static inline int short_conv_backward_strip(int64_t B, int64_t T) { return B * T >= 16384 ? 256 : 64; }

static inline int64_t short_conv_groups(int64_t B, int64_t T, int strip) {
  return ceil_div(B * ceil_div(T, strip), SHORT_CONV_WARPS);
}

static inline int64_t short_conv_blocks(int64_t B, int64_t T, int C, int norm_channels, int K, int strip) {
  return short_conv_groups(B, T, strip) *
         (ceil_div(norm_channels, K == 192 ? 192 : 256) + ceil_div(C - norm_channels, 256));
}

// Floats of scratch that short_conv_backward needs.
static inline int64_t short_conv_backward_scratch(int64_t B, int64_t T, int C) {
  return short_conv_groups(B, T, short_conv_backward_strip(B, T)) * C * 5;
}

static inline void short_conv_check(const char *kernel, int64_t T, int C, int norm_channels, int K, int64_t s0,
                                    int64_t s1) {
  if (T > INT32_MAX / 2 || s0 > INT32_MAX / 16 || s1 > INT32_MAX / 16)
    fail(EXIT_CONFIG, "%s: %lld tokens a row, rows of %lld and %lld; use a smaller --seq-len or --width", kernel,
         (long long)T, (long long)s0, (long long)s1);
  require_multiple(kernel, "the number of channels", C, 8);
  require_multiple(kernel, "a row stride", s0, 8);
  require_multiple(kernel, "a row stride", s1, 8);
  if (norm_channels > 0 && K != 64 && K != 128 && K != 192 && K != 256)
    fail(EXIT_CONFIG, "%s: key heads of %d, needed: 64, 128, 192 or 256; change --heads", kernel, K);
  if (norm_channels < 0 || norm_channels > C || (norm_channels > 0 && norm_channels % K != 0))
    fail(EXIT_CONFIG, "%s: %d normalised channels of %d, needed: whole heads of %d", kernel, norm_channels, C, K);
}

// Calls LAUNCH(LANES, BIAS, DOCS) with constants.
#define SHORT_CONV_DISPATCH(K, bias, docs, LAUNCH) \
  do {                                             \
    if (bias) {                                    \
      if (docs)                                    \
        SHORT_CONV_LANES(K, true, true, LAUNCH);   \
      else                                         \
        SHORT_CONV_LANES(K, true, false, LAUNCH);  \
    } else {                                       \
      if (docs)                                    \
        SHORT_CONV_LANES(K, false, true, LAUNCH);  \
      else                                         \
        SHORT_CONV_LANES(K, false, false, LAUNCH); \
    }                                              \
  } while (0)
#define SHORT_CONV_LAUNCH(LANES, BIAS, DOCS) SHORT_CONV_KERNEL(LANES, BIAS, DOCS, false)
#define SHORT_CONV_LAUNCH_L1(LANES, BIAS, DOCS) SHORT_CONV_KERNEL(LANES, BIAS, DOCS, true)
#define SHORT_CONV_LANES(K, BIAS, DOCS, LAUNCH) \
  do {                                          \
    if ((K) == 64)                              \
      LAUNCH(8, BIAS, DOCS);                    \
    else if ((K) == 128)                        \
      LAUNCH(16, BIAS, DOCS);                   \
    else                                        \
      LAUNCH(32, BIAS, DOCS);                   \
  } while (0)

// Convolutions of two or three taps: wide [C, 4] <- weight [C, taps], and back, dweight [C, taps] += dwide [C, 4].
static __global__ void short_conv_widen_kernel(float *wide, const float *weight, int taps, int64_t count) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  int tap = (int)(i % 4) - (4 - taps);
  if (i < count) wide[i] = tap < 0 ? 0.0f : weight[i / 4 * taps + tap];
}
static __global__ void short_conv_narrow_kernel(float *dweight, const float *dwide, int taps, int64_t count) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) dweight[i] += dwide[i / taps * 4 + 4 - taps + i % taps];
}
static MAYBE_UNUSED void short_conv_widen(float *wide, const float *weight, int taps, int C, cudaStream_t stream) {
  int64_t count = (int64_t)C * 4;
  short_conv_widen_kernel<<<grid_size(ceil_div(count, 256), "short_conv_widen"), 256, 0, stream>>>(wide, weight, taps,
                                                                                                   count);
  KERNEL_CHECK("short_conv_widen");
}
static MAYBE_UNUSED void short_conv_narrow(float *dweight, const float *dwide, int taps, int C, cudaStream_t stream) {
  int64_t count = (int64_t)C * taps;
  short_conv_narrow_kernel<<<grid_size(ceil_div(count, 256), "short_conv_narrow"), 256, 0, stream>>>(dweight, dwide,
                                                                                                     taps, count);
  KERNEL_CHECK("short_conv_narrow");
}

// y [B T, C] <- x [B T, C], weight [C, 4] or NULL, bias [C] or NULL. norm_channels 0: no norm (Mamba-2; K is ignored).
// l1: the L1 norm, not with a bias.
static MAYBE_UNUSED void short_conv_forward(bf16 *y, int64_t y_stride, const bf16 *x, int64_t x_stride,
                                            const float *weight, const float *bias, const int32_t *doc_start, int64_t B,
                                            int64_t T, int C, int norm_channels, int K, cudaStream_t stream,
                                            bool l1 = false) {
  short_conv_check("short_conv_forward", T, C, norm_channels, K, y_stride, x_stride);
  if (l1 && bias) fail(EXIT_INTERNAL, "short_conv_forward: an L1 norm and a bias");
  if (B * T == 0 || C == 0) return;
  int strip = SHORT_CONV_FORWARD_STRIP;
  unsigned blocks = grid_size(short_conv_blocks(B, T, C, norm_channels, K, strip), "short_conv_forward");
#define SHORT_CONV_KERNEL(LANES, BIAS, DOCS, L1)                                                  \
  short_conv_forward_kernel<LANES, BIAS, DOCS, L1><<<blocks, 32 * SHORT_CONV_WARPS, 0, stream>>>( \
      y, (int)y_stride, x, (int)x_stride, weight, bias, doc_start, B, (int)T, C, norm_channels, K, strip)
  if (l1)
    SHORT_CONV_LANES(K, false, true, SHORT_CONV_LAUNCH_L1);
  else
    SHORT_CONV_DISPATCH(K, bias, doc_start, SHORT_CONV_LAUNCH);
#undef SHORT_CONV_KERNEL
  KERNEL_CHECK("short_conv_forward");
}

// dx [B T, C], dweight [C, 4] += (unless weight is NULL), dbias [C] += (unless bias is NULL) <- dy, forward's inputs.
static MAYBE_UNUSED void short_conv_backward(bf16 *dx, int64_t dx_stride, float *dweight, float *dbias, float *scratch,
                                             const bf16 *dy, int64_t dy_stride, const bf16 *x, int64_t x_stride,
                                             const float *weight, const float *bias, const int32_t *doc_start,
                                             int64_t B, int64_t T, int C, int norm_channels, int K, cudaStream_t stream,
                                             bool l1 = false) {
  if (l1 && bias) fail(EXIT_INTERNAL, "short_conv_backward: an L1 norm and a bias");
  short_conv_check("short_conv_backward", T, C, norm_channels, K, dx_stride, dy_stride);
  require_multiple("short_conv_backward", "a row stride", x_stride, 8);
  if (B * T == 0 || C == 0) return;
  int strip = short_conv_backward_strip(B, T);
  int64_t groups = short_conv_groups(B, T, strip);
  unsigned blocks = grid_size(short_conv_blocks(B, T, C, norm_channels, K, strip), "short_conv_backward");
  float *partial_bias = scratch + groups * C * 4;
#define SHORT_CONV_KERNEL(LANES, BIAS, DOCS, L1)                                                                   \
  short_conv_backward_kernel<LANES, BIAS, DOCS, L1><<<blocks, 32 * SHORT_CONV_WARPS, 0, stream>>>(                 \
      dx, (int)dx_stride, scratch, partial_bias, dy, (int)dy_stride, x, (int)x_stride, weight, bias, doc_start, B, \
      (int)T, C, norm_channels, K, strip)
  if (l1)
    SHORT_CONV_LANES(K, false, true, SHORT_CONV_LAUNCH_L1);
  else
    SHORT_CONV_DISPATCH(K, bias, doc_start, SHORT_CONV_LAUNCH);
#undef SHORT_CONV_KERNEL
  KERNEL_CHECK("short_conv_backward");
  if (weight) partial_reduce(dweight, scratch, groups, (int64_t)C * 4, 1, stream);
  if (bias) partial_reduce(dbias, partial_bias, groups, C, 1, stream);
}

#endif  // GDN_CUDA_SHORT_CONV_CUH
