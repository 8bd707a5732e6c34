// train_gdn.c: Gated DeltaNet models on CPUs, the whole model in one plain C file.
//
// This is the reference that everything else is measured against, written to be read beside the papers
//   Gated Delta Networks (arXiv 2412.06464), Gated DeltaNet-2 (arXiv 2605.22791), Mamba-2 (arXiv 2405.21060),
// in their order: embedding, RMSNorm, short convolution, L2 norm, gates, the delta rule in chunk form, gated output
// norm, attention, Mamba2's skip, SwiGLU, head and loss; each layer forward and then backward; then the model that
// calls them, AdamW, and the table through which the training loop (gdn/trainer.h) and the tests reach it.
//
// Sizes: B rows of a batch, T tokens a row, N = B T, d width, H key heads, HV value heads, K key dim, V value dim,
// C chunk. Arrays are row-major; `ld` is the number of elements from one token to the next, so that an argument may be
// some columns of a wider buffer. Arguments: outputs, inputs, weights, sizes. Backward functions add to weight
// gradients and overwrite input gradients unless they say otherwise.
//
// `real` is float; the tests compile this very file with double (-DGDN_REAL_DOUBLE).

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef GDN_REAL_DOUBLE
typedef double real;
#define R(name) name  // exp, exp2, sqrt ... of type real
#else
typedef float real;
#define R(name) name##f
#endif

#include "gdn/check.h"       // Error, fail, alloc_array, alloc_zeroed
#include "gdn/config.h"      // Config, ParamTable, LayerLayout
#include "gdn/cpu_matmul.h"  // matmul_small, linear_forward, linear_backward_input, linear_backward_weight
#include "gdn/engine.h"      // EngineApi

// The tests plant one wrong term at a time and look whether the suite notices (test_gdn.c). Nothing of it is compiled
// into the trainer.
enum {
  PLANT_NONE,
  PLANT_P_WITHOUT_DECAY,     // dq, dk of the intra-chunk output without Gamma
  PLANT_SWAPPED_KV,          // dw from the wrong factor: dX twice instead of v o dX
  PLANT_LAST_ROW_GATE,       // dG of a chunk's last row without the state's share
  PLANT_NO_DM,               // the erase term's dM left out
  PLANT_STATE_DECAY,         // dH carried to the left without 2^Gc
  PLANT_CONV_INDEX,          // conv gradient one tap off
  PLANT_WINDOW,              // attention backward with a window one key too wide
  PLANT_L2_PROJECTION,       // L2 norm's backward without the projection
  PLANT_RMSNORM_PROJECTION,  // RMSNorm's backward without the projection
  PLANT_SILU_DERIVATIVE,     // SwiGLU backward with sigmoid in place of SiLU's derivative
  PLANT_SOFTPLUS,            // gate backward without the sigmoid
  PLANT_BETA_RANGE,          // beta's derivative as if its range were 1
  PLANT_ROPE_SIGN,           // RoPE's backward rotated the wrong way
  PLANT_D_SKIP,              // Mamba2's D x without its share of dx
  PLANT_SOFTMAX_TARGET,      // cross-entropy gradient without the one-hot target
  PLANT_COUNT
};
#ifdef GDN_PLANT
extern int gdn_planted;
#define PLANTED(fault) (gdn_planted == (fault))
#else
#define PLANTED(fault) 0
#endif

// The check of the CUDA engine compares it with this file's own error when everything that the GPU keeps in bf16 is
// rounded to bf16 here too: -DGDN_EMULATE_BF16 makes ROUND round an array in place. Else it is
// nothing.
#ifdef GDN_EMULATE_BF16
static real bf16_round(real x) {
  float f = (float)x;
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7f800000u) != 0x7f800000u) bits = (bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u;
  memcpy(&f, &bits, 4);
  return f;
}
static void ROUND(real *x, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = bf16_round(x[i]);
}
// A matrix operand in bf16 of what is kept in fp32: a rounded copy.
static const real *rounded(real *copy, const real *x, int64_t n) {
  memcpy(copy, x, (size_t)n * sizeof(real));
  ROUND(copy, n);
  return copy;
}
#else
static inline void ROUND(real *x, int64_t n) { (void)x, (void)n; }
#define rounded(copy, x, n) ((void)(copy), (x))
#endif

// exp(x) and 2^x for x <= 0 (rounding above it does no harm), in a form that compilers turn into vector instructions:
// x = n log(2) + r with |r| <= log(2)/2, a polynomial in r, then n into the exponent's bits. Within 2 ulp of the true
// value; far below 2^-126 they are 0; NaN stays NaN. In double the library's functions.
#ifdef GDN_REAL_DOUBLE
static inline real exp_nonpositive(real x) { return exp(x); }
static inline real exp2_nonpositive(real x) { return exp2(x); }
#else
#define TO_INTEGER 12582912.0f  // 1.5 * 2^23: after adding it, the last bits hold the nearest integer

static inline float exp_scaled(float r, float shifted) {  // exp(r) 2^n, shifted = n + TO_INTEGER
  // the coefficients of Cephes' expf
  float p = 1.9875691e-4f;
  p = p * r + 1.3981999e-3f;
  p = p * r + 8.3334519e-3f;
  p = p * r + 4.1665796e-2f;
  p = p * r + 1.6666665e-1f;
  p = p * r + 5.0000001e-1f;
  p = p * r * r + r + 1;
  uint32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;  // n = -127 gives 0
  float power;
  memcpy(&power, &bits, sizeof power);
  return p * power;
}
static inline real exp_nonpositive(real x) {
  x = x < -88 ? -88 : x;
  float shifted = x * 1.44269504f + TO_INTEGER, n = shifted - TO_INTEGER;
  return exp_scaled(x - n * 0.693359375f + n * 2.12194440e-4f, shifted);  // log(2) in two parts, the first exact
}
static inline real exp2_nonpositive(real x) {
  x = x < -127 ? -127 : x;
  float shifted = x + TO_INTEGER;
  return exp_scaled((x - (shifted - TO_INTEGER)) * 0.693147181f, shifted);
}
#endif

static inline real sigmoid(real x) {
  real e = exp_nonpositive(-R(fabs)(x));
  return (x >= 0 ? 1 : e) / (1 + e);
}
static inline real silu(real x) { return x * sigmoid(x); }
static inline real silu_derivative(real x) {
  real s = sigmoid(x);
  return s * (1 + x * (1 - s));
}

// Sums over tokens for the gradient of a vector: a thread owns COLUMNS of its elements and walks over all tokens, so
// that the order of the sum is fixed.
enum { COLUMNS = 16 };

static inline void add_products(real sum[COLUMNS], const real *a, const real *b, real scale, int cols) {
  if (cols == COLUMNS)  // a constant length, which compilers turn into vector instructions
    for (int c = 0; c < COLUMNS; c++) sum[c] += a[c] * b[c] * scale;
  else
    for (int c = 0; c < cols; c++) sum[c] += a[c] * b[c] * scale;
}

// ----------------------------------------------------------------------------
// embedding

// x [N,d] = rows of table [vocab,d]
static void embedding_forward(real *x, const int32_t *tokens, const real *table, int64_t N, int d) {
#pragma omp parallel for
  for (int64_t t = 0; t < N; t++) memcpy(x + t * d, table + (int64_t)tokens[t] * d, (size_t)d * sizeof(real));
}

// dtable [vocab,d] += dx, in the order of the tokens: one thread a range of columns, so the sums have a fixed order.
static void embedding_backward(real *dtable, const real *dx, const int32_t *tokens, int64_t N, int d) {
#pragma omp parallel for
  for (int j0 = 0; j0 < d; j0 += 16) {
    int j1 = j0 + 16 < d ? j0 + 16 : d;
    for (int64_t t = 0; t < N; t++)
      for (int j = j0; j < j1; j++) dtable[(int64_t)tokens[t] * d + j] += dx[t * d + j];
  }
}

static inline real sum_of_squares(const real *x, int n) {
  real sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int j = 0; j < n; j++) sum += x[j] * x[j];
  return sum;
}

// ----------------------------------------------------------------------------
// RMSNorm: y = x rstd w, rstd = (mean x^2 + eps)^-1/2

static void rmsnorm_forward(real *y, real *rstd, const real *x, const real *w, int64_t N, int d, double eps) {
#pragma omp parallel for
  for (int64_t t = 0; t < N; t++) {
    const real *xt = x + t * d;
    real r = 1 / R(sqrt)(sum_of_squares(xt, d) / d + (real)eps);
    for (int j = 0; j < d; j++) y[t * d + j] = xt[j] * r * w[j];
    rstd[t] = r;
  }
}

// dx [N,d] += rstd (w o dy - x rstd^2 mean(x o w o dy)); dw [d] += sum over tokens of dy o x rstd
static void rmsnorm_backward(real *dx, real *dw, const real *dy, const real *x, const real *rstd, const real *w,
                             int64_t N, int d) {
#pragma omp parallel for
  for (int64_t t = 0; t < N; t++) {
    const real *xt = x + t * d, *dyt = dy + t * d;
    real r = rstd[t], dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int j = 0; j < d; j++) dot += xt[j] * w[j] * dyt[j];
    if (PLANTED(PLANT_RMSNORM_PROJECTION)) dot = 0;
    for (int j = 0; j < d; j++) dx[t * d + j] += r * (w[j] * dyt[j] - xt[j] * r * r * dot / d);
  }
#pragma omp parallel for
  for (int j0 = 0; j0 < d; j0 += COLUMNS) {
    int cols = d - j0 < COLUMNS ? d - j0 : COLUMNS;
    real sum[COLUMNS] = {0};
    for (int64_t t = 0; t < N; t++) add_products(sum, dy + t * d + j0, x + t * d + j0, rstd[t], cols);
    for (int j = 0; j < cols; j++) dw[j0 + j] += sum[j];
  }
}

// ----------------------------------------------------------------------------
// short convolution + SiLU: causal, one filter a channel; the last tap is the current token. Paper 1, section 3.4.
// start[t] (index within the row, may be negative) is the first token of t's document: what lies before is not seen.

typedef struct {
  int B, T, channels, taps;  // taps 0: no convolution, SiLU alone
} ConvShape;

// [taps,ch], so that loops over channels read in order; the caller frees it.
static real *conv_weights_by_tap(const real *w, ConvShape s) {
  real *by_tap = (real *)alloc_array((int64_t)s.taps * s.channels, sizeof(real), "short convolution");
  for (int j = 0; j < s.taps; j++)
    for (int c = 0; c < s.channels; c++) by_tap[j * s.channels + c] = w[c * s.taps + j];
  return by_tap;
}

// pre [N,ch] = conv(x) + bias; y [N,ch] = SiLU(pre). tail [B,taps-1,ch]: inputs before the row's first, or NULL
// (zeros).
static void short_conv_forward(real *y, real *pre, const real *x, int64_t ld, const real *tail, const real *w,
                               const real *bias, const int32_t *start, ConvShape s) {
  int ch = s.channels, taps = s.taps;
  real *by_tap = conv_weights_by_tap(w, s);
#pragma omp parallel for
  for (int64_t n = 0; n < (int64_t)s.B * s.T; n++) {
    int b = (int)(n / s.T), t = (int)(n % s.T);
    real *p = pre + n * ch;
    if (!taps) memcpy(p, x + n * ld, (size_t)ch * sizeof(real));
    if (taps && bias) memcpy(p, bias, (size_t)ch * sizeof(real));
    if (taps && !bias) memset(p, 0, (size_t)ch * sizeof(real));
    for (int j = 0; j < taps; j++) {
      int u = t - (taps - 1) + j;
      if (u < start[n] || (u < 0 && !tail)) continue;
      const real *xu = u >= 0 ? x + (n - t + u) * ld : tail + ((int64_t)b * (taps - 1) + taps - 1 + u) * ch;
      const real *wj = by_tap + j * ch;
      for (int c = 0; c < ch; c++) p[c] += wj[c] * xu[c];
    }
    for (int c = 0; c < ch; c++) y[n * ch + c] = silu(p[c]);
  }
  free(by_tap);
}

// dx (columns of a packed buffer, overwritten), dw [ch,taps], dbias [ch] or NULL. dy [N,ch] is overwritten by d pre.
static void short_conv_backward(real *dx, real *dw, real *dbias, real *dy, const real *pre, const real *x, int64_t ld,
                                const real *w, const int32_t *start, ConvShape s) {
  int ch = s.channels, taps = s.taps;
  int64_t N = (int64_t)s.B * s.T;
#pragma omp parallel for
  for (int64_t i = 0; i < N; i++)
    for (int c = 0; c < ch; c++) dy[i * ch + c] *= silu_derivative(pre[i * ch + c]);
  real *by_tap = conv_weights_by_tap(w, s);
#pragma omp parallel for
  for (int64_t n = 0; n < N; n++) {
    int t = (int)(n % s.T);
    real *g = dx + n * ld;
    if (!taps) memcpy(g, dy + n * ch, (size_t)ch * sizeof(real));
    if (taps) memset(g, 0, (size_t)ch * sizeof(real));
    for (int j = 0; j < taps; j++) {  // x[t] reaches pre[t + taps-1-j] through tap j
      int u = t + taps - 1 - j;
      if (u >= s.T || t < start[n - t + u]) continue;
      const real *wj = by_tap + (PLANTED(PLANT_CONV_INDEX) && j ? j - 1 : j) * ch;
      for (int c = 0; c < ch; c++) g[c] += wj[c] * dy[(n - t + u) * ch + c];
    }
  }
  free(by_tap);
  if (!taps) return;
#pragma omp parallel for
  for (int c0 = 0; c0 < ch; c0 += COLUMNS) {  // a thread owns some channels: fixed order over the tokens
    int cols = ch - c0 < COLUMNS ? ch - c0 : COLUMNS;
    for (int j = 0; j < taps; j++) {
      real sum[COLUMNS] = {0};
      for (int b = 0; b < s.B; b++)
        for (int t = taps - 1 - j; t < s.T; t++) {
          int64_t n = (int64_t)b * s.T + t, u = n - (taps - 1) + j;
          if (t - (taps - 1) + j >= start[n]) add_products(sum, dy + n * ch + c0, x + u * ld + c0, 1, cols);
        }
      for (int c = 0; c < cols; c++) dw[(c0 + c) * taps + j] += sum[c];
    }
    if (dbias)
      for (int64_t n = 0; n < N; n++)
        for (int c = c0; c < c0 + cols; c++) dbias[c] += dy[n * ch + c];
  }
}

// ----------------------------------------------------------------------------
// norm of q and k, per head: L2, y = x (sum x^2 + eps)^-1/2; the ablation L1, y = x / (sum |x| + eps)

static inline real qk_norm_scale(const real *x, int K, QKNorm norm, double eps) {
  real sum = 0;
  for (int j = 0; j < K; j++) sum += norm == NORM_L2 ? x[j] * x[j] : R(fabs)(x[j]);
  return norm == NORM_L2 ? 1 / R(sqrt)(sum + (real)eps) : 1 / (sum + (real)eps);
}

// y [N,heads*K], x with ld
static void qk_norm_forward(real *y, const real *x, int64_t ld, int64_t N, int heads, int K, QKNorm norm, double eps) {
#pragma omp parallel for
  for (int64_t n = 0; n < N; n++)
    for (int h = 0; h < heads; h++) {
      const real *xh = x + n * ld + h * K;
      real r = qk_norm_scale(xh, K, norm, eps), *yh = y + n * heads * K + h * K;
      for (int j = 0; j < K; j++) yh[j] = xh[j] * r;
    }
}

// dx with ld; a zero x gives dx = r dy, which is finite (at most dy / sqrt(eps))
static void qk_norm_backward(real *dx, const real *dy, const real *x, int64_t ld, int64_t N, int heads, int K,
                             QKNorm norm, double eps) {
#pragma omp parallel for
  for (int64_t n = 0; n < N; n++)
    for (int h = 0; h < heads; h++) {
      const real *xh = x + n * ld + h * K, *g = dy + n * heads * K + h * K;
      real r = qk_norm_scale(xh, K, norm, eps), dot = 0, *gx = dx + n * ld + h * K;
      for (int j = 0; j < K; j++) dot += xh[j] * r * g[j];
      if (PLANTED(PLANT_L2_PROJECTION)) dot = 0;
      for (int j = 0; j < K; j++) {
        real along = norm == NORM_L2 ? xh[j] * r : (real)((xh[j] > 0) - (xh[j] < 0));
        gx[j] = r * (g[j] - along * dot);
      }
    }
}

// ----------------------------------------------------------------------------
// gates

// softplus with PyTorch's threshold; log1p keeps it exact where exp(x) is tiny
static inline double softplus(double x) { return x > 20 ? x : log1p(exp(x)); }

// A gate below this (natural log) is 2^-126 to the delta rule: what it multiplies vanishes, and so does its gradient.
#define GATE_FLOOR (-126 * 0.6931471805599453)

// log decay g <= 0 of one head or channel: -exp(A_log) softplus(a + dt_bias) (paper 1, section 3.4), or KDA's bounded
// form lb sigmoid(exp(A_log) (a + dt_bias)). In double: exp(A_log) softplus(.) is never inf * 0.
static inline real log_decay(double a, double a_log, double lower_bound) {
  double g = lower_bound ? lower_bound / (1 + exp(-exp(a_log) * a)) : -exp(a_log) * softplus(a);
  return (real)(g < -1e30 ? -1e30 : g);
}

// g [N,n]: n gates a token; gate i belongs to head i / per_head of a_log and has dt_bias[i].
static void decay_forward(real *g, const real *a, int64_t ld, const real *a_log, const real *dt_bias, int64_t N, int n,
                          int per_head, double lower_bound) {
#pragma omp parallel for
  for (int64_t t = 0; t < N; t++)
    for (int i = 0; i < n; i++)
      g[t * n + i] = log_decay((double)a[t * ld + i] + (double)dt_bias[i], a_log[i / per_head], lower_bound);
}

// da (with lda, overwritten), da_log [n/per_head], ddt_bias [n] from dg [N,n].
static void decay_backward(real *da, int64_t lda, real *da_log, real *ddt_bias, const real *dg, const real *g,
                           const real *a, int64_t ld, const real *a_log, const real *dt_bias, int64_t N, int n,
                           int per_head, double lower_bound) {
#pragma omp parallel for
  for (int h = 0; h < n / per_head; h++) {
    double A = exp(a_log[h]), sum_log = 0;
    for (int i = h * per_head; i < (h + 1) * per_head; i++) {
      double sum_bias = 0;
      for (int64_t t = 0; t < N; t++) {
        double x = (double)a[t * ld + i] + dt_bias[i], d = dg[t * n + i], dx;
        if ((double)g[t * n + i] <= GATE_FLOOR) {
          dx = 0;
        } else if (lower_bound) {
          double y = 1 / (1 + exp(-A * x)), slope = d * lower_bound * y * (1 - y);
          dx = slope * A, sum_log += slope * A * x;
        } else {
          dx = -d * A / (1 + exp(-x));
          if (PLANTED(PLANT_SOFTPLUS)) dx = -d * A;
          sum_log += d * g[t * n + i];
        }
        da[t * lda + i] = (real)dx;
        sum_bias += dx;
      }
      ddt_bias[i] += (real)sum_bias;
    }
    da_log[h] += (real)sum_log;
  }
}

// beta, b or w: y [N,n] = range * sigmoid(x). PER_HEAD (an ablation of paper 2): the mean of a head's `per_head`
// channels, given to each of them.
static void gate_forward(real *y, const real *x, int64_t ld, int64_t N, int n, int per_head, GateWidth width,
                         int range) {
#pragma omp parallel for
  for (int64_t t = 0; t < N; t++) {
    for (int i = 0; i < n; i++) y[t * n + i] = range * sigmoid(x[t * ld + i]);
    if (width == PER_HEAD)
      for (int h = 0; h < n / per_head; h++) {
        real mean = 0, *yh = y + t * n + h * per_head;
        for (int i = 0; i < per_head; i++) mean += yh[i];
        for (int i = 0; i < per_head; i++) yh[i] = mean / per_head;
      }
  }
}

// dx (ld, overwritten) from dy [N,n]: dy y (1 - y / range)
static void gate_backward(real *dx, const real *dy, const real *x, int64_t ld, int64_t N, int n, int per_head,
                          GateWidth width, int range) {
#pragma omp parallel for
  for (int64_t t = 0; t < N; t++)
    for (int h = 0; h < n / per_head; h++) {
      real mean = 0;
      for (int i = 0; i < per_head; i++) mean += dy[t * n + h * per_head + i] / per_head;
      for (int i = h * per_head; i < (h + 1) * per_head; i++) {
        real s = sigmoid(x[t * ld + i]), d = width == PER_HEAD ? mean : dy[t * n + i];
        dx[t * ld + i] = d * s * (1 - s) * (PLANTED(PLANT_BETA_RANGE) ? 1 : range);
      }
    }
}

// ----------------------------------------------------------------------------
// The delta rule, one core for every linear mixer, in chunk form. Per head, with a state S [K,V]:
//
//   S_t = (I - k_t e_t^T) Diag(exp g_t) S_{t-1} + k_t z_t^T,   e_t = b_t o k_t,   z_t = w_t o v_t,   o_t = s S_t^T q_t
//
// GDN (paper 1, eq. 10): g a scalar a head, b = w = beta. DeltaNet: g = 0. KDA: g one a key channel. GDN-2 (paper 2): b
// one a key channel, w one a value channel. Mamba2: no erase (e = 0), w = dt. A chunk of C tokens that starts from the
// state H is done at once (G: sum of g log2 e from the chunk's start):
//
//   M = strictlower(sum_d e_id k_jd 2^(G_id-G_jd))     P = s lower(sum_d q_id k_jd 2^(G_id-G_jd))
//   X = Z - (e o 2^G) H      U = (I + M)^-1 X      O = (s q o 2^G) H + P U      H' = Diag(2^Gc) H + (k o 2^(Gc-G))^T U
//
// Only 2^(G_i-G_j) with i >= j has a meaning; no factor above 1 is ever formed. A document that starts inside a chunk
// restarts G; pairs across the border and the carried-in state are left out by selection.

enum { CHUNK = 64, LEAF = 4 };
typedef enum { ERASE_NONE, ERASE_HEAD, ERASE_CHANNEL } EraseKind;

typedef struct {
  int B, T, H, HV, K, V;
  int channel_decay;  // g: 0 one a value head, 1 one a channel
  int decay_heads;    // heads that g has: HV, or H (GDN-2)
  EraseKind erase;    // b: none, [N,HV] or [N,H*K]
  int channel_write;  // w: 0 [N,HV], 1 [N,HV*V]
  real scale;         // s
} DeltaShape;

typedef struct {  // inputs of all heads; ld: elements between tokens
  const real *q, *k, *v;
  int64_t ldq, ldk, ldv;
  const real *g;  // [N, decay_heads * (channel_decay ? K : 1)], NULL: no decay
  const real *b, *w;
  const int32_t *start;  // [N] first token of t's document within the row (may be negative), NULL: one document
} DeltaInputs;

typedef struct {           // one chunk of one head, as math on paper; rows: tokens
  int n, segments;         // rows; whether a document starts after row 0
  int first_segment_rows;  // rows [0, this) see the carried-in state
  int segment[CHUNK];      // row of the chunk at which row i's document starts, -1: it came in from the left
  double *G;               // [n, gates] cumulative log2 decay, gates = K or 1
  real *q, *k, *e, *z;     // [n,K] [n,K] [n,K] [n,V]
  real *Qp, *Ep, *Km;      // s q o 2^G, e o 2^G, k o 2^(Gc-G)
  real *M, *P;             // [n,CHUNK]
  real *X, *U;             // [n,V]
  real *decay;             // [K] 2^Gc, 0 when the state does not reach the chunk's end
  real *rows, *cols;       // [CHUNK,K] scratch of the anchored blocks
  real *t1, *t2;           // [max(K,V), CHUNK] scratch: transposes
} Chunk;

static int64_t chunk_scratch_size(int K, int V) {
  int64_t big = K > V ? K : V;
  return (int64_t)CHUNK * (10 * K + 3 * V + 2 * CHUNK + 2 * big) + K + 128;
}

static void chunk_bind(Chunk *c, real *p, int K, int V) {
  int64_t big = K > V ? K : V;
  p = (real *)(((uintptr_t)p + 63) & ~(uintptr_t)63);
  c->G = (double *)p, p += (int64_t)CHUNK * K * (int)(sizeof(double) / sizeof(real));
  c->q = p, p += CHUNK * K;
  c->k = p, p += CHUNK * K;
  c->e = p, p += CHUNK * K;
  c->Qp = p, p += CHUNK * K;
  c->Ep = p, p += CHUNK * K;
  c->Km = p, p += CHUNK * K;
  c->rows = p, p += CHUNK * K;
  c->cols = p, p += CHUNK * K;
  c->z = p, p += CHUNK * V;
  c->X = p, p += CHUNK * V;
  c->U = p, p += CHUNK * V;
  c->M = p, p += CHUNK * CHUNK;
  c->P = p, p += CHUNK * CHUNK;
  c->t1 = p, p += big * CHUNK;
  c->t2 = p, p += big * CHUNK;
  c->decay = p;
}

static void transpose(real *dst, const real *src, int rows, int cols) {  // dst [cols,CHUNK]
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < cols; j++) dst[j * CHUNK + i] = src[i * cols + j];
}

static inline real factor(double exponent) {  // 2^exponent for exponent <= 0
  return exponent >= 0 ? 1 : exp2_nonpositive((real)exponent);
}

// Gates, inputs and scaled copies of chunk rows t0 .. t0+n-1 of value head hv in row b of the batch.
static void chunk_load(Chunk *c, const DeltaShape *s, const DeltaInputs *in, int b, int hv, int t0, int n) {
  int K = s->K, V = s->V, h = hv / (s->HV / s->H), gates = s->channel_decay ? K : 1;
  int gh = s->decay_heads == s->HV ? hv : h;
  c->n = n, c->segments = 0, c->first_segment_rows = n;
  for (int i = 0; i < n; i++) {
    int64_t t = (int64_t)b * s->T + t0 + i;
    int starts = in->start && in->start[t] == t0 + i;
    c->segment[i] = starts ? i : i ? c->segment[i - 1] : -1;
    if (starts && i) c->segments = 1;
    if (starts && c->first_segment_rows == n) c->first_segment_rows = i;
    for (int d = 0; d < gates; d++) {
      double a = in->g ? (double)in->g[(t * s->decay_heads + gh) * gates + d] * 1.4426950408889634 : 0;
      if (a < -126) a = -126;
      c->G[i * gates + d] = starts ? 0 : (i ? c->G[(i - 1) * gates + d] : 0) + a;
    }
    memcpy(c->q + i * K, in->q + t * in->ldq + h * K, (size_t)K * sizeof(real));
    memcpy(c->k + i * K, in->k + t * in->ldk + h * K, (size_t)K * sizeof(real));
    const real *v = in->v + t * in->ldv + hv * V;
    for (int d = 0; d < K; d++)
      c->e[i * K + d] = s->erase == ERASE_NONE   ? 0
                        : s->erase == ERASE_HEAD ? in->b[t * s->HV + hv] * c->k[i * K + d]
                                                 : in->b[(t * s->H + h) * K + d] * c->k[i * K + d];
    for (int j = 0; j < V; j++)
      c->z[i * V + j] = v[j] * (s->channel_write ? in->w[(t * s->HV + hv) * V + j] : in->w[t * s->HV + hv]);
  }
  int last = n - 1;
  for (int i = 0; i < n; i++) {
    int sees_state = i < c->first_segment_rows, reaches_end = c->segment[i] == c->segment[last];
    real *in_state = c->t1, *to_end = c->t1 + gates;
    for (int d = 0; d < gates; d++) {
      in_state[d] = sees_state ? factor(c->G[i * gates + d]) : 0;
      to_end[d] = reaches_end ? factor(c->G[last * gates + d] - c->G[i * gates + d]) : 0;
    }
    for (int d = 0; d < K; d++) {
      c->Qp[i * K + d] = s->scale * c->q[i * K + d] * in_state[gates == 1 ? 0 : d];
      c->Ep[i * K + d] = c->e[i * K + d] * in_state[gates == 1 ? 0 : d];
      c->Km[i * K + d] = c->k[i * K + d] * to_end[gates == 1 ? 0 : d];
    }
  }
  for (int d = 0; d < K; d++)
    c->decay[d] = c->segment[last] == -1 ? factor(c->G[last * gates + (gates == 1 ? 0 : d)]) : 0;
}

static inline real pair_factor(const Chunk *c, int i, int j) {  // Gamma_ij of a scalar decay
  return c->segment[i] == c->segment[j] ? factor(c->G[i] - c->G[j]) : 0;
}

// Channel decay. Rows [r0,r1) against columns [c0,c1), all rows after all columns: with the anchor at the last row of
// the column block both factors are at most 1, and nothing of the future enters.
static void anchored_factors(Chunk *c, int K, int r0, int r1, int c0, int c1) {
  const double *anchor = c->G + (c1 - 1) * K;
  for (int i = r0; i < r1; i++)
    for (int d = 0; d < K; d++) c->rows[i * K + d] = factor(c->G[i * K + d] - anchor[d]);
  for (int j = c0; j < c1; j++)
    for (int d = 0; d < K; d++) c->cols[j * K + d] = factor(anchor[d] - c->G[j * K + d]);
}

// S1[i][j] = sum_d a1_id k_jd 2^(G_id-G_jd), S2 likewise with a2, for the lower triangle of rows [r0,r1): halving.
static void channel_scores(Chunk *c, real *S1, real *S2, const real *a1, const real *a2, int K, int r0, int r1) {
  if (r1 - r0 <= LEAF || (c->segments && r1 - r0 <= CHUNK)) {  // leaf, or a document border inside: pair by pair
    for (int i = r0; i < r1; i++)
      for (int j = r0; j <= i; j++) {
        real x = 0, y = 0;
        if (c->segment[i] == c->segment[j])
#pragma omp simd reduction(+ : x, y)
          for (int d = 0; d < K; d++) {
            real f = c->k[j * K + d] * (i == j ? 1 : factor(c->G[i * K + d] - c->G[j * K + d]));
            x += a1[i * K + d] * f, y += a2[i * K + d] * f;
          }
        S1[i * CHUNK + j] = x, S2[i * CHUNK + j] = y;
      }
    return;
  }
  int mid = (r0 + r1) / 2;
  channel_scores(c, S1, S2, a1, a2, K, r0, mid);
  channel_scores(c, S1, S2, a1, a2, K, mid, r1);
  anchored_factors(c, K, mid, r1, r0, mid);
  int rows = r1 - mid, cols = mid - r0;
  for (int j = 0; j < cols; j++)  // (k o factor)^T, [K,cols]
    for (int d = 0; d < K; d++) c->t1[d * CHUNK + j] = c->k[(r0 + j) * K + d] * c->cols[(r0 + j) * K + d];
  for (int i = 0; i < rows * K; i++) c->t2[i] = a1[mid * K + i] * c->rows[mid * K + i];
  matmul_small(S1 + mid * CHUNK + r0, CHUNK, c->t2, K, 1, c->t1, CHUNK, rows, cols, K, 1, 0);
  for (int i = 0; i < rows * K; i++) c->t2[i] = a2[mid * K + i] * c->rows[mid * K + i];
  matmul_small(S2 + mid * CHUNK + r0, CHUNK, c->t2, K, 1, c->t1, CHUNK, rows, cols, K, 1, 0);
}

// The gradients of those scores: da_id += sum_j dS_ij k_jd 2^(..), dk_jd += sum_i dS_ij a_id 2^(..), same anchors.
static void channel_scores_backward(Chunk *c, real *da, real *dk, const real *dS, const real *a, int K, int r0,
                                    int r1) {
  if (r1 - r0 <= LEAF || (c->segments && r1 - r0 <= CHUNK)) {
    for (int i = r0; i < r1; i++)
      for (int j = r0; j <= i; j++) {
        if (c->segment[i] != c->segment[j]) continue;
        for (int d = 0; d < K; d++) {
          real f = dS[i * CHUNK + j] * (i == j ? 1 : factor(c->G[i * K + d] - c->G[j * K + d]));
          da[i * K + d] += f * c->k[j * K + d], dk[j * K + d] += f * a[i * K + d];
        }
      }
    return;
  }
  int mid = (r0 + r1) / 2;
  channel_scores_backward(c, da, dk, dS, a, K, r0, mid);
  channel_scores_backward(c, da, dk, dS, a, K, mid, r1);
  anchored_factors(c, K, mid, r1, r0, mid);
  int rows = r1 - mid, cols = mid - r0;
  for (int i = 0; i < cols * K; i++) c->t1[i] = c->k[r0 * K + i] * c->cols[r0 * K + i];
  matmul_small(c->t2, K, dS + mid * CHUNK + r0, CHUNK, 1, c->t1, K, rows, K, cols, 1, 0);
  for (int i = 0; i < rows * K; i++) da[mid * K + i] += c->t2[i] * c->rows[mid * K + i];
  for (int i = 0; i < rows * K; i++) c->t1[i] = a[mid * K + i] * c->rows[mid * K + i];
  matmul_small(c->t2, K, dS + mid * CHUNK + r0, 1, CHUNK, c->t1, K, cols, K, rows, 1, 0);
  for (int i = 0; i < cols * K; i++) dk[r0 * K + i] += c->t2[i] * c->cols[r0 * K + i];
}

// M, P, X and U of a loaded chunk that starts from the state H [K,V].
static void chunk_solve(Chunk *c, const DeltaShape *s, const real *H) {
  int K = s->K, V = s->V, n = c->n;
  if (s->channel_decay) {
    channel_scores(c, c->M, c->P, c->e, c->q, K, 0, n);
  } else {
    transpose(c->t1, c->k, n, K);
    matmul_small(c->M, CHUNK, c->e, K, 1, c->t1, CHUNK, n, n, K, 1, 0);
    matmul_small(c->P, CHUNK, c->q, K, 1, c->t1, CHUNK, n, n, K, 1, 0);
    for (int i = 0; i < n; i++)
      for (int j = 0; j <= i; j++) {
        real f = pair_factor(c, i, j);
        c->M[i * CHUNK + j] *= f, c->P[i * CHUNK + j] *= f;
      }
  }
  for (int i = 0; i < n; i++)
    for (int j = 0; j < CHUNK; j++) {
      if (j >= i) c->M[i * CHUNK + j] = 0;
      c->P[i * CHUNK + j] = j <= i ? s->scale * c->P[i * CHUNK + j] : 0;
    }
  memcpy(c->X, c->z, (size_t)(n * V) * sizeof(real));
  if (s->erase != ERASE_NONE) matmul_small(c->X, V, c->Ep, K, 1, H, V, n, V, K, -1, 1);
  ROUND(c->M, n * CHUNK), ROUND(c->P, n * CHUNK), ROUND(c->X, n * V);
  memcpy(c->U, c->X, (size_t)(n * V) * sizeof(real));
  if (s->erase != ERASE_NONE)
    for (int i = 1; i < n; i++)  // forward substitution: row i needs the rows above it
      matmul_small(c->U + i * V, V, c->M + i * CHUNK, CHUNK, 1, c->U, V, 1, V, i, -1, 1);
  ROUND(c->U, n * V);
}

// o [N,HV*V]; states [B,HV,chunks,K,V]: the state at the start of each chunk, for the backward pass (NULL: not kept).
// h0 [B,HV,K,V]: starting state, NULL: zero. h_end [B,HV,K,V]: the state after the last token, NULL: not wanted.
// h0 and h_end may be the same array.
static void delta_rule_forward(real *o, real *states, real *h_end, const DeltaInputs *in, const real *h0,
                               const DeltaShape *s) {
  int K = s->K, V = s->V, chunks = (s->T + CHUNK - 1) / CHUNK;
#pragma omp parallel
  {
    real *scratch = (real *)alloc_array(chunk_scratch_size(K, V) + 2 * (int64_t)K * V, sizeof(real), "delta rule");
    real *H = scratch, *next = H + (int64_t)K * V;
    Chunk c;
    chunk_bind(&c, next + (int64_t)K * V, K, V);
#pragma omp for collapse(2) schedule(dynamic)
    for (int b = 0; b < s->B; b++)
      for (int hv = 0; hv < s->HV; hv++) {
        int64_t head = (int64_t)b * s->HV + hv;
        if (h0)
          memcpy(H, h0 + head * K * V, (size_t)K * V * sizeof(real));
        else
          memset(H, 0, (size_t)K * V * sizeof(real));
        for (int ci = 0; ci < chunks; ci++) {
          int t0 = ci * CHUNK, n = s->T - t0 < CHUNK ? s->T - t0 : CHUNK;
          const real *H_in = rounded(next, H, (int64_t)K * V);
          if (states) memcpy(states + (head * chunks + ci) * K * V, H_in, (size_t)K * V * sizeof(real));
          chunk_load(&c, s, in, b, hv, t0, n);
          chunk_solve(&c, s, H_in);
          real *oc = o + (((int64_t)b * s->T + t0) * s->HV + hv) * V;
          matmul_small(oc, (int64_t)s->HV * V, c.Qp, K, 1, H_in, V, n, V, K, 1, 0);
          matmul_small(oc, (int64_t)s->HV * V, c.P, CHUNK, 1, c.U, V, n, V, n, 1, 1);
          for (int d = 0; d < K; d++)
            for (int j = 0; j < V; j++) H[d * V + j] *= c.decay[d];
          matmul_small(H, V, c.Km, 1, K, c.U, V, K, V, n, 1, 1);
        }
        if (h_end) memcpy(h_end + head * K * V, H, (size_t)K * V * sizeof(real));
      }
    free(scratch);
  }
}

typedef struct {  // gradients of DeltaInputs, same shapes; all overwritten
  real *q, *k;    // [N,H*K]: summed over the value heads of a group
  real *v;
  int64_t ldv;
  real *g, *b, *w;  // NULL: not wanted
  real *h0;         // [B,HV,K,V], NULL: not wanted
} DeltaGradients;

// do_ [N,HV*V] and dh_end [B,HV,K,V] (NULL: zero) in, everything else out. With the chunk formulas above:
//   dU = P^T dO + K-^T' dH'     dX = (I+M)^-T dU     dH = Diag(2^Gc) dH' + Q+^T dO - E+^T dX
//   dP = lower(dO U^T)          dM = -strictlower(dX U^T)
static void delta_rule_backward(DeltaGradients *grad, const real *do_, const real *dh_end, const real *states,
                                const DeltaInputs *in, const DeltaShape *s) {
  int K = s->K, V = s->V, T = s->T, chunks = (T + CHUNK - 1) / CHUNK, group = s->HV / s->H;
  int gates = s->channel_decay ? K : 1, big = K > V ? K : V;
  int64_t scratch_size = chunk_scratch_size(K, V) + 3 * (int64_t)K * V + (int64_t)CHUNK * (3 * K + 3 * V + 2 * CHUNK) +
                         (int64_t)K * big + K + 64 + 2 * (int64_t)CHUNK * K * (int)(sizeof(double) / sizeof(real));
#pragma omp parallel
  {
    real *scratch = (real *)alloc_array(scratch_size, sizeof(real), "delta rule"), *p = scratch;
    double *dG = (double *)p;
    p += (int64_t)CHUNK * K * (int)(sizeof(double) / sizeof(real));
    real *dH = p, *HT = dH + (int64_t)K * V, *dq = HT + (int64_t)K * big, *de = dq + CHUNK * K, *dk = de + CHUNK * K;
    real *dO = dk + CHUNK * K, *dU = dO + CHUNK * V, *dX = dU + CHUNK * V, *dP = dX + CHUNK * V,
         *dM = dP + CHUNK * CHUNK;
    real *g_last = dM + CHUNK * CHUNK;
    real *copy = scratch + scratch_size - (int64_t)K * V;
    Chunk c;
    chunk_bind(&c, g_last + K + (K & 1), K, V);
#pragma omp for collapse(2) schedule(dynamic)
    for (int b = 0; b < s->B; b++)
      for (int h = 0; h < s->H; h++)
        for (int hv = h * group; hv < (h + 1) * group; hv++) {  // in order: what a group shares is summed here
          int64_t head = (int64_t)b * s->HV + hv;
          int first = hv == h * group;
          if (dh_end)
            memcpy(dH, dh_end + head * K * V, (size_t)K * V * sizeof(real));
          else
            memset(dH, 0, (size_t)K * V * sizeof(real));
          for (int ci = chunks - 1; ci >= 0; ci--) {
            int t0 = ci * CHUNK, n = T - t0 < CHUNK ? T - t0 : CHUNK, last = n - 1;
            const real *H = states + (head * chunks + ci) * K * V;
            chunk_load(&c, s, in, b, hv, t0, n);
            chunk_solve(&c, s, H);
            for (int i = 0; i < n; i++)
              memcpy(dO + i * V, do_ + (((int64_t)b * T + t0 + i) * s->HV + hv) * V, (size_t)V * sizeof(real));
            const real *dH_in = rounded(copy, dH, (int64_t)K * V);
            // dU, dX
            matmul_small(dU, V, c.P, 1, CHUNK, dO, V, n, V, n, 1, 0);
            matmul_small(dU, V, c.Km, K, 1, dH_in, V, n, V, K, 1, 1);
            ROUND(dU, n * V);
            memcpy(dX, dU, (size_t)(n * V) * sizeof(real));
            if (s->erase != ERASE_NONE)
              for (int i = n - 2; i >= 0; i--)  // (I+M)^T dX = dU, from the last row up
                matmul_small(dX + i * V, V, c.M + (i + 1) * CHUNK + i, 1, CHUNK, dX + (i + 1) * V, V, 1, V, n - 1 - i,
                             -1, 1);
            ROUND(dX, n * V);
            // dP, dM
            transpose(c.t1, c.U, n, V);
            matmul_small(dP, CHUNK, dO, V, 1, c.t1, CHUNK, n, n, V, s->scale, 0);
            matmul_small(dM, CHUNK, dX, V, 1, c.t1, CHUNK, n, n, V, -1, 0);
            for (int i = 0; i < n; i++)
              for (int j = 0; j < n; j++) {
                if (j > i) dP[i * CHUNK + j] = 0;
                if (j >= i || s->erase == ERASE_NONE || PLANTED(PLANT_NO_DM)) dM[i * CHUNK + j] = 0;
              }
            // the state's share of dq, de, dk and of the last row's gate
            for (int d = 0; d < K; d++)
              for (int j = 0; j < V; j++) HT[j * K + d] = H[d * V + j];
            matmul_small(dq, K, dO, V, 1, HT, K, n, K, V, s->scale, 0);
            matmul_small(de, K, dX, V, 1, HT, K, n, K, V, -1, 0);
            for (int d = 0; d < K; d++) {
              real sum = 0;
              for (int j = 0; j < V; j++) sum += H[d * V + j] * dH_in[d * V + j];
              g_last[d] = sum * c.decay[d];
            }
            for (int d = 0; d < K; d++)
              for (int j = 0; j < V; j++) HT[j * K + d] = dH_in[d * V + j];
            matmul_small(dk, K, c.U, V, 1, HT, K, n, K, V, 1, 0);
            for (int i = 0; i < n; i++) {
              int sees_state = i < c.first_segment_rows, reaches_end = c.segment[i] == c.segment[last];
              for (int d = 0; d < K; d++) {
                double Gi = c.G[i * gates + (gates == 1 ? 0 : d)], Gc = c.G[last * gates + (gates == 1 ? 0 : d)];
                real from_state = sees_state ? factor(Gi) : 0, to_end = reaches_end ? factor(Gc - Gi) : 0;
                dq[i * K + d] *= from_state, de[i * K + d] *= from_state, dk[i * K + d] *= to_end;
                g_last[d] += c.k[i * K + d] * dk[i * K + d];
              }
            }
            // dH of the chunk's start
            for (int d = 0; d < K; d++)
              for (int j = 0; j < V; j++) dH[d * V + j] *= PLANTED(PLANT_STATE_DECAY) ? 1 : c.decay[d];
            matmul_small(dH, V, c.Qp, 1, K, dO, V, K, V, n, 1, 1);
            if (s->erase != ERASE_NONE) matmul_small(dH, V, c.Ep, 1, K, dX, V, K, V, n, -1, 1);
            // pairs inside the chunk
            if (s->channel_decay) {
              ROUND(dP, n * CHUNK), ROUND(dM, n * CHUNK);
              channel_scores_backward(&c, dq, dk, dP, c.q, K, 0, n);
              if (s->erase != ERASE_NONE) channel_scores_backward(&c, de, dk, dM, c.e, K, 0, n);
            } else {
              for (int i = 0; i < n; i++)
                for (int j = 0; j <= i; j++) {
                  real f = pair_factor(&c, i, j);
                  dP[i * CHUNK + j] *= PLANTED(PLANT_P_WITHOUT_DECAY) ? 1 : f, dM[i * CHUNK + j] *= f;
                }
              ROUND(dP, n * CHUNK), ROUND(dM, n * CHUNK);
              matmul_small(dq, K, dP, CHUNK, 1, c.k, K, n, K, n, 1, 1);
              matmul_small(dk, K, dP, 1, CHUNK, c.q, K, n, K, n, 1, 1);
              if (s->erase != ERASE_NONE) {
                matmul_small(de, K, dM, CHUNK, 1, c.k, K, n, K, n, 1, 1);
                matmul_small(dk, K, dM, 1, CHUNK, c.e, K, n, K, n, 1, 1);
              }
            }
            // gates: dG_i = q o dq + e o de - k o dk~, the last row also the state's decay; dg_t = sum of dG_i, i >= t
            if (grad->g && in->g) {
              int gh = s->decay_heads == s->HV ? hv : h, add = s->decay_heads != s->HV && !first;
              memset(dG, 0, (size_t)(CHUNK * gates) * sizeof(double));
              for (int i = last; i >= 0; i--) {
                for (int d = 0; d < K; d++) {
                  double x = (double)c.q[i * K + d] * dq[i * K + d] + (double)c.e[i * K + d] * de[i * K + d] -
                             (double)c.k[i * K + d] * dk[i * K + d];
                  if (i == last && !PLANTED(PLANT_LAST_ROW_GATE)) x += g_last[d];
                  dG[i * gates + (gates == 1 ? 0 : d)] += x;
                }
                int64_t t = (int64_t)b * T + t0 + i;
                int restarts = c.segment[i] == i;  // G does not depend on the gate of a document's first token
                for (int d = 0; d < gates; d++) {
                  if (i < last && c.segment[i + 1] != i + 1) dG[i * gates + d] += dG[(i + 1) * gates + d];
                  real *dst = &grad->g[(t * s->decay_heads + gh) * gates + d],
                       x = restarts ? 0 : (real)dG[i * gates + d];
                  *dst = add ? *dst + x : x;
                }
              }
            }
            for (int i = 0; i < n; i++) {
              int64_t t = (int64_t)b * T + t0 + i;
              real *gq = grad->q + (t * s->H + h) * K, *gk = grad->k + (t * s->H + h) * K;
              real *gb = !grad->b || s->erase == ERASE_NONE ? NULL
                         : s->erase == ERASE_HEAD           ? grad->b + t * s->HV + hv
                                                            : grad->b + (t * s->H + h) * K;
              const real *bt = s->erase == ERASE_NONE   ? NULL
                               : s->erase == ERASE_HEAD ? in->b + t * s->HV + hv
                                                        : in->b + (t * s->H + h) * K;
              real sum = 0;
              for (int d = 0; d < K; d++) {
                real bd = !bt ? 0 : s->erase == ERASE_HEAD ? bt[0] : bt[d], ke = c.k[i * K + d] * de[i * K + d];
                real dkd = dk[i * K + d] + bd * de[i * K + d];
                gq[d] = first ? dq[i * K + d] : gq[d] + dq[i * K + d];
                gk[d] = first ? dkd : gk[d] + dkd;
                sum += ke;
                if (gb && s->erase == ERASE_CHANNEL) gb[d] = first ? ke : gb[d] + ke;
              }
              if (gb && s->erase == ERASE_HEAD) gb[0] = sum;
              const real *v = in->v + t * in->ldv + hv * V;
              const real *w = s->channel_write ? in->w + (t * s->HV + hv) * V : in->w + t * s->HV + hv;
              real *gv = grad->v + t * grad->ldv + hv * V, dot = 0;
              for (int j = 0; j < V; j++) {
                real dz = dX[i * V + j], dw = (PLANTED(PLANT_SWAPPED_KV) ? dz : v[j]) * dz;
                if (grad->w && s->channel_write) grad->w[(t * s->HV + hv) * V + j] = dw;
                gv[j] = dz * w[s->channel_write ? j : 0];
                dot += dw;
              }
              if (grad->w && !s->channel_write) grad->w[t * s->HV + hv] = dot;
            }
          }
          if (grad->h0) memcpy(grad->h0 + head * K * V, dH, (size_t)K * V * sizeof(real));
        }
    free(scratch);
  }
}

// ----------------------------------------------------------------------------
// gated output norm, per head of V: y = o rstd w act(gate). Paper 1, section 3.4; SiLU, or sigmoid (KDA).
// w NULL: no norm (rstd 1); gate NULL: no gate.

static inline real gate_value(real x, OutputGate act) { return act == OUTPUT_GATE_SIGMOID ? sigmoid(x) : silu(x); }
static inline real gate_slope(real x, OutputGate act) {
  real s = sigmoid(x);
  return act == OUTPUT_GATE_SIGMOID ? s * (1 - s) : silu_derivative(x);
}

static inline real head_rstd(const real *o, int V, double eps) {
  return 1 / R(sqrt)(sum_of_squares(o, V) / V + (real)eps);
}

static void output_norm_forward(real *y, const real *o, const real *gate, int64_t ld, const real *w, int64_t N,
                                int heads, int V, OutputGate act, double eps) {
#pragma omp parallel for
  for (int64_t n = 0; n < N; n++)
    for (int h = 0; h < heads; h++) {
      const real *oh = o + (n * heads + h) * V, *g = gate ? gate + n * ld + h * V : NULL;
      real r = w ? head_rstd(oh, V, eps) : 1, *yh = y + (n * heads + h) * V;
      for (int j = 0; j < V; j++) yh[j] = oh[j] * r * (w ? w[j] : 1) * (g ? gate_value(g[j], act) : 1);
    }
}

// d_o [N,heads*V], dgate (ld) overwritten; dw [V] += . d_o may be the same array as dy.
static void output_norm_backward(real *d_o, real *dgate, real *dw, const real *dy, const real *o, const real *gate,
                                 int64_t ld, const real *w, int64_t N, int heads, int V, OutputGate act, double eps) {
  if (w) {
    real *rstd = (real *)alloc_array(N * heads, sizeof(real), "output norm");
#pragma omp parallel for
    for (int64_t i = 0; i < N * heads; i++) rstd[i] = head_rstd(o + i * V, V, eps);
#pragma omp parallel for
    for (int j0 = 0; j0 < V; j0 += COLUMNS) {
      int cols = V - j0 < COLUMNS ? V - j0 : COLUMNS;
      real sum[COLUMNS] = {0}, value[COLUMNS];
      for (int64_t i = 0; i < N * heads; i++) {
        const real *g = gate ? gate + (i / heads) * ld + (i % heads) * V + j0 : NULL, *dyi = dy + i * V + j0;
        for (int j = 0; j < cols; j++) value[j] = dyi[j] * (g ? gate_value(g[j], act) : 1);
        add_products(sum, value, o + i * V + j0, rstd[i], cols);
      }
      for (int j = 0; j < cols; j++) dw[j0 + j] += sum[j];
    }
    free(rstd);
  }
#pragma omp parallel for
  for (int64_t n = 0; n < N; n++)
    for (int h = 0; h < heads; h++) {
      int64_t i = n * heads + h;
      const real *oh = o + i * V, *g = gate ? gate + n * ld + h * V : NULL;
      real r = w ? head_rstd(oh, V, eps) : 1, dot = 0;
      for (int j = 0; j < V; j++) {
        real dn = dy[i * V + j] * (g ? gate_value(g[j], act) : 1) * (w ? w[j] : 1);  // d (o rstd)
        if (g) dgate[n * ld + h * V + j] = dy[i * V + j] * oh[j] * r * (w ? w[j] : 1) * gate_slope(g[j], act);
        d_o[i * V + j] = dn;
      }
#pragma omp simd reduction(+ : dot)
      for (int j = 0; j < V; j++) dot += d_o[i * V + j] * oh[j];
      if (w)
        for (int j = 0; j < V; j++) d_o[i * V + j] = r * (d_o[i * V + j] - oh[j] * r * r * dot / V);
    }
}

// ----------------------------------------------------------------------------
// attention, causal, with a sliding window or full; rotary positions (RoPE) on q and k

// y [N,heads*D] = rotation of x by angle position * theta^(-2i/D), halves paired (NeoX). sign -1: the inverse, which is
// the backward pass. pos0: position of the rows' first token.
static void rope_rotate(real *y, int64_t ldy, const real *x, int64_t ldx, int B, int T, int heads, int D, double theta,
                        int64_t pos0, int sign) {
  int half = D / 2;
#pragma omp parallel for
  for (int t = 0; t < T; t++)
    for (int i = 0; i < half; i++) {
      double angle = (double)(pos0 + t) * pow(theta, -2.0 * i / D);
      real cosine = (real)cos(angle), sine = (real)(sign * sin(angle));
      for (int b = 0; b < B; b++)
        for (int h = 0; h < heads; h++) {
          int64_t n = (int64_t)b * T + t;
          real x0 = x[n * ldx + h * D + i], x1 = x[n * ldx + h * D + half + i];
          y[n * ldy + h * D + i] = x0 * cosine - x1 * sine;
          y[n * ldy + h * D + half + i] = x1 * cosine + x0 * sine;
        }
    }
}

typedef struct {
  int B, T, H, HKV, D;
  int past;    // keys before the row's first token (carried), key index u lies at row u + past of k and v
  int window;  // keys that a query sees, itself included; 0: all
} AttentionShape;

static inline int attention_first_key(const AttentionShape *s, int t, int start) {
  int lo = s->window && t - s->window + 1 > start ? t - s->window + 1 : start;
  return lo < -s->past ? -s->past : lo;
}

// o [N,H*D], lse [N,H] (log of the softmax denominator). q [N,H*D]; k, v [B, past+T, HKV*D].
static void attention_forward(real *o, real *lse, const real *q, const real *k, const real *v, const int32_t *start,
                              const AttentionShape *s) {
  int D = s->D, total = s->past + s->T, group = s->H / s->HKV;
  int64_t ldkv = (int64_t)s->HKV * D;
  real scale = 1 / R(sqrt)((real)D);
#pragma omp parallel
  {
    real *p = (real *)alloc_array(total, sizeof(real), "attention");
#pragma omp for collapse(2) schedule(dynamic)
    for (int b = 0; b < s->B; b++)
      for (int h = 0; h < s->H; h++)
        for (int t = 0; t < s->T; t++) {
          int64_t n = (int64_t)b * s->T + t;
          const real *qt = q + (n * s->H + h) * D;
          const real *kb = k + ((int64_t)b * total + s->past) * ldkv + (h / group) * D;
          const real *vb = v + ((int64_t)b * total + s->past) * ldkv + (h / group) * D;
          int lo = attention_first_key(s, t, start[n]);
          real max = -INFINITY, sum = 0, *ot = o + (n * s->H + h) * D;
          for (int u = lo; u <= t; u++) {
            real dot = 0;
            const real *ku = kb + u * ldkv;
#pragma omp simd reduction(+ : dot)
            for (int j = 0; j < D; j++) dot += qt[j] * ku[j];
            p[u - lo] = dot * scale;
            if (p[u - lo] > max) max = p[u - lo];
          }
          for (int u = lo; u <= t; u++) p[u - lo] = exp_nonpositive(p[u - lo] - max);
          for (int u = lo; u <= t; u++) sum += p[u - lo];
          for (int j = 0; j < D; j++) ot[j] = 0;
          for (int u = lo; u <= t; u++) {
            real x = p[u - lo] / sum;
#pragma omp simd
            for (int j = 0; j < D; j++) ot[j] += x * vb[u * ldkv + j];
          }
          lse[n * s->H + h] = max + R(log)(sum);
        }
    free(p);
  }
}

// dq [N,H*D], dk, dv [N,HKV*D], all overwritten; no carried keys (past 0).
static void attention_backward(real *dq, real *dk, real *dv, const real *do_, const real *o, const real *lse,
                               const real *q, const real *k, const real *v, const int32_t *start,
                               const AttentionShape *shape) {
  AttentionShape s = *shape;
  if (PLANTED(PLANT_WINDOW) && s.window) s.window++;
  int D = s.D, group = s.H / s.HKV;
  int64_t ldkv = (int64_t)s.HKV * D;
  real scale = 1 / R(sqrt)((real)D);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int b = 0; b < s.B; b++)
    for (int hk = 0; hk < s.HKV; hk++) {
      for (int t = 0; t < s.T; t++) {
        memset(dk + ((int64_t)b * s.T + t) * ldkv + hk * D, 0, (size_t)D * sizeof(real));
        memset(dv + ((int64_t)b * s.T + t) * ldkv + hk * D, 0, (size_t)D * sizeof(real));
      }
      for (int h = hk * group; h < (hk + 1) * group; h++)
        for (int t = 0; t < s.T; t++) {
          int64_t n = (int64_t)b * s.T + t, base = (int64_t)b * s.T * ldkv + hk * D;
          const real *qt = q + (n * s.H + h) * D, *g = do_ + (n * s.H + h) * D, *ot = o + (n * s.H + h) * D;
          real *gq = dq + (n * s.H + h) * D, delta = 0;
#pragma omp simd reduction(+ : delta)
          for (int j = 0; j < D; j++) delta += g[j] * ot[j];  // summed as dp is: a query with one key has gradient 0
          for (int j = 0; j < D; j++) gq[j] = 0;
          for (int u = attention_first_key(&s, t, start[n]); u <= t; u++) {
            const real *ku = k + base + u * ldkv, *vu = v + base + u * ldkv;
            real *gk = dk + base + u * ldkv, *gv = dv + base + u * ldkv, dot = 0, dp = 0;
#pragma omp simd reduction(+ : dot, dp)
            for (int j = 0; j < D; j++) dot += qt[j] * ku[j], dp += g[j] * vu[j];
            real p = exp_nonpositive(dot * scale - lse[n * s.H + h]), ds = p * (dp - delta) * scale;
#pragma omp simd
            for (int j = 0; j < D; j++) gq[j] += ds * ku[j], gk[j] += ds * qt[j], gv[j] += p * g[j];
          }
        }
    }
}

// ----------------------------------------------------------------------------
// Mamba2: the skip D x, and its norm after the gate: y = RMSNorm((o + D x) o SiLU(z)) in groups of n channels

static void mamba2_output_forward(real *y, const real *o, const real *x, int64_t ldx, const real *z, int64_t ldz,
                                  const real *D, const real *w, int64_t N, int heads, int P, int groups, double eps) {
  int width = heads * P, n = width / groups;
#pragma omp parallel for
  for (int64_t t = 0; t < N; t++)
    for (int g = 0; g < groups; g++) {
      real *yt = y + t * width;
      for (int j = g * n; j < (g + 1) * n; j++)
        yt[j] = (o[t * width + j] + D[j / P] * x[t * ldx + j]) * silu(z[t * ldz + j]);
      real r = 1 / R(sqrt)(sum_of_squares(yt + g * n, n) / n + (real)eps);
      for (int j = g * n; j < (g + 1) * n; j++) yt[j] *= r * w[j];
    }
}

// d_o [N,width] overwritten (may be dy), dx (ldx) overwritten with D's share, dz (ldz) overwritten; dD [heads], dw
// [width] +=.
static void mamba2_output_backward(real *d_o, real *dx, int64_t lddx, real *dz, real *dD, real *dw, const real *dy,
                                   const real *o, const real *x, int64_t ldx, const real *z, int64_t ldz, const real *D,
                                   const real *w, int64_t N, int heads, int P, int groups, double eps) {
  int width = heads * P, n = width / groups;
  real *rstd = (real *)alloc_array(N * groups, sizeof(real), "mamba2");
  real *u = (real *)alloc_array(N * width, sizeof(real), "mamba2");  // (o + D x) o SiLU(z)
#pragma omp parallel for
  for (int64_t t = 0; t < N; t++)
    for (int g = 0; g < groups; g++) {
      real *ut = u + t * width;
      for (int j = g * n; j < (g + 1) * n; j++)
        ut[j] = (o[t * width + j] + D[j / P] * x[t * ldx + j]) * silu(z[t * ldz + j]);
      rstd[t * groups + g] = 1 / R(sqrt)(sum_of_squares(ut + g * n, n) / n + (real)eps);
    }
#pragma omp parallel for
  for (int j0 = 0; j0 < width; j0 += COLUMNS) {
    int cols = width - j0 < COLUMNS ? width - j0 : COLUMNS;
    real sum[COLUMNS] = {0};
    for (int64_t t = 0; t < N; t++)
      for (int j = 0; j < cols; j++)
        sum[j] += dy[t * width + j0 + j] * u[t * width + j0 + j] * rstd[t * groups + (j0 + j) / n];
    for (int j = 0; j < cols; j++) dw[j0 + j] += sum[j];
  }
#pragma omp parallel for
  for (int64_t t = 0; t < N; t++)
    for (int g = 0; g < groups; g++) {
      real r = rstd[t * groups + g], dot = 0;

#pragma omp simd reduction(+ : dot)
      for (int j = g * n; j < (g + 1) * n; j++) dot += dy[t * width + j] * w[j] * u[t * width + j];
      for (int j = g * n; j < (g + 1) * n; j++) {
        real du = r * (dy[t * width + j] * w[j] - u[t * width + j] * r * r * dot / n), zj = z[t * ldz + j];
        dz[t * ldz + j] = du * (o[t * width + j] + D[j / P] * x[t * ldx + j]) * silu_derivative(zj);
        real ds = du * silu(zj);
        dx[t * lddx + j] = PLANTED(PLANT_D_SKIP) ? 0 : D[j / P] * ds;
        d_o[t * width + j] = ds;
      }
    }
#pragma omp parallel for
  for (int h = 0; h < heads; h++) {
    double sum = 0;
    for (int64_t t = 0; t < N; t++)
      for (int j = h * P; j < (h + 1) * P; j++) sum += (double)d_o[t * width + j] * x[t * ldx + j];
    dD[h] += (real)sum;
  }
  free(rstd);
  free(u);
}

// ----------------------------------------------------------------------------
// SwiGLU: s [N,ff] = SiLU(gate) o up, gate and up the halves of gu [N,2 ff]

static void swiglu_forward(real *s, const real *gu, int64_t N, int ff) {
#pragma omp parallel for
  for (int64_t t = 0; t < N; t++)
    for (int j = 0; j < ff; j++) s[t * ff + j] = silu(gu[t * 2 * ff + j]) * gu[t * 2 * ff + ff + j];
}

static void swiglu_backward(real *dgu, const real *ds, const real *gu, int64_t N, int ff) {
#pragma omp parallel for
  for (int64_t t = 0; t < N; t++)
    for (int j = 0; j < ff; j++) {
      real g = gu[t * 2 * ff + j], u = gu[t * 2 * ff + ff + j], d = ds[t * ff + j];
      dgu[t * 2 * ff + j] = d * u * (PLANTED(PLANT_SILU_DERIVATIVE) ? sigmoid(g) : silu_derivative(g));
      dgu[t * 2 * ff + ff + j] = d * silu(g);
    }
}

// ----------------------------------------------------------------------------
// cross-entropy over the first `vocab` of `ld` columns: padded columns have no probability and no gradient

// losses [N] (0 where target is -1), lse [N]; returns their sum, in the order of the tokens
static double cross_entropy_forward(real *losses, real *lse, const real *logits, int64_t ld, const int32_t *targets,
                                    int64_t N, int vocab) {
#pragma omp parallel for
  for (int64_t t = 0; t < N; t++) {
    const real *x = logits + t * ld;
    losses[t] = lse[t] = 0;
    if (targets[t] < 0) continue;
    real max = x[0], sum = 0;
    for (int j = 1; j < vocab; j++) max = x[j] > max ? x[j] : max;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < vocab; j++) sum += exp_nonpositive(x[j] - max);
    lse[t] = max + R(log)(sum);
    losses[t] = lse[t] - x[targets[t]];
  }
  double sum = 0;
  for (int64_t t = 0; t < N; t++) sum += losses[t];
  return sum;
}

// logits are overwritten by scale * (softmax - onehot), zeros where the target is -1 and in padded columns
static void cross_entropy_backward(real *logits, int64_t ld, const real *lse, const int32_t *targets, int64_t N,
                                   int vocab, real scale) {
#pragma omp parallel for
  for (int64_t t = 0; t < N; t++) {
    real *x = logits + t * ld;
    for (int j = 0; j < vocab; j++) x[j] = targets[t] < 0 ? 0 : scale * exp_nonpositive(x[j] - lse[t]);
    for (int j = vocab; j < ld; j++) x[j] = 0;
    if (targets[t] >= 0 && !PLANTED(PLANT_SOFTMAX_TARGET)) x[targets[t]] -= scale;
  }
}

// ----------------------------------------------------------------------------
// the model

typedef struct {  // sizes of one layer's mixer
  int key, val;   // channels of q (and k), of v
  int conv_cols;  // channels of the short convolution
  int gates;      // decay gates a token
  int per_head;   // of which a head has
  int rows;       // columns of the packed input product
  DeltaShape delta;
  AttentionShape attention;
} MixerSizes;

typedef struct {                   // what a layer's forward keeps for its backward; N tokens each
  real *x, *h, *rstd;              // residual in [d], its RMSNorm [d], [1]
  real *packed;                    // input product [in_rows]
  real *pre, *y;                   // conv before and after SiLU [conv_cols]
  real *q, *k, *v;                 // normalised (delta) or rotated (attention) [key]; attention also copies v
  real *f, *g, *b, *w;             // low-rank decay pre-activation, log decay, erase and write gates
  real *gate;                      // low-rank output gate [val]
  real *states;                    // [B,HV,chunks,K,V]
  real *o, *lse, *oy;              // mixer output [val], attention's log sums [H], after norm and gate [val]
  real *x1, *h1, *rstd1, *gu, *s;  // residual after the mixer [d], RMSNorm [d], [1], MLP [2 ff], [ff]
} LayerActs;

typedef struct {        // carried from one forward to the next (ENGINE_CARRY)
  real *S;              // [B,HV,K,V] recurrent state
  real *tail;           // [B,taps-1,conv_cols] last inputs of the convolution
  real *keys, *values;  // [B,cap,HKV*D] last rotated keys and values
  int cap;
} LayerState;

struct Engine {
  Config c;
  const ParamTable *table;
  EngineSettings set;
  real *arena[4];  // parameters, gradients, moments
  int64_t shard_first, shard_count;
  LayerActs *acts;
  LayerState *state;
  real *x_end, *h_end, *rstd_end;  // residual after the last layer, its norm
  real *logits, *losses, *lse;     // logits [head_rows, vocab_rows]
  int64_t head_rows;
  int32_t *tokens, *targets, *start;
  int32_t *since;   // [B] carried tokens of the current document
  int64_t carried;  // tokens of the carried sequence so far
  int B, T;         // of the last forward
  // scratch of the backward pass
  real *dx, *dh, *dpacked, *dy, *dq, *dk, *dv, *dg, *db, *dw, *df, *dgate, *d_o, *ds, *dgu, *dskip;
  real *memory;  // all activations and scratch
  int64_t memory_elements;
};

static MixerSizes mixer_sizes(const Config *c, const LayerLayout *l, int B, int T) {
  MixerSizes m;
  memset(&m, 0, sizeof m);
  m.rows = l->in_rows;
  m.conv_cols = l->conv_cols;
  if (mixer_is_delta(l->mixer)) {
    int channel = mixer_channel_decay(l->mixer), gh = l->mixer == MIX_GDN2 ? c->heads : c->v_heads;
    m.key = c->heads * c->head_k, m.val = c->v_heads * c->head_v;
    m.conv_cols = 2 * m.key + m.val;
    m.per_head = channel ? c->head_k : 1;
    m.gates = gh * m.per_head;
    m.delta = (DeltaShape){B,
                           T,
                           c->heads,
                           c->v_heads,
                           c->head_k,
                           c->head_v,
                           channel,
                           gh,
                           l->mixer == MIX_GDN2 ? ERASE_CHANNEL : ERASE_HEAD,
                           l->mixer == MIX_GDN2,
                           1 / R(sqrt)((real)c->head_k)};
  } else if (l->mixer == MIX_MAMBA2) {
    int di = c->width * c->mamba_expand, nh = di / c->mamba_head;
    m.key = c->mamba_groups * c->mamba_state, m.val = di;
    m.conv_cols = di + 2 * m.key;
    m.per_head = 1, m.gates = nh;
    m.delta = (DeltaShape){B, T, c->mamba_groups, nh, c->mamba_state, c->mamba_head, 0, nh, ERASE_NONE, 0, 1};
  } else {
    m.key = c->attn_heads * c->attn_head_dim, m.val = m.key;
    m.attention = (AttentionShape){
        B, T, c->attn_heads, c->attn_kv_heads, c->attn_head_dim, 0, l->mixer == MIX_SWA ? c->window : 0};
  }
  return m;
}

static real *take(real *base, int64_t *used, int64_t n) {  // the next n elements, NULL while only counting
  real *p = base ? base + *used : NULL;
  *used += (n + 15) / 16 * 16;
  return p;
}

static void layer_acts_bind(LayerActs *a, const Engine *e, int layer, real *base, int64_t *used) {
  const Config *c = &e->c;
  const LayerLayout *l = &e->table->layers[layer];
  int B = e->set.max_rows, T = e->set.max_len;
  int64_t N = (int64_t)B * T, d = c->width;
  MixerSizes m = mixer_sizes(c, l, B, T);
  memset(a, 0, sizeof *a);
  a->x = take(base, used, N * d), a->h = take(base, used, N * d), a->rstd = take(base, used, N);
  a->packed = take(base, used, N * m.rows);
  a->o = take(base, used, N * m.val), a->x1 = take(base, used, N * d);
  if (mixer_is_attention(l->mixer)) {
    int64_t kv = (int64_t)c->attn_kv_heads * c->attn_head_dim, past = e->state ? e->state[layer].cap : 0;
    a->q = take(base, used, N * m.key);
    a->k = take(base, used, (N + B * past) * kv), a->v = take(base, used, (N + B * past) * kv);
    a->lse = take(base, used, N * c->attn_heads);
    a->oy = a->o;
  } else {
    a->pre = take(base, used, N * m.conv_cols), a->y = take(base, used, N * m.conv_cols);
    if (l->mixer != MIX_MAMBA2) a->q = take(base, used, N * m.key), a->k = take(base, used, N * m.key);
    if (l->f_up >= 0) a->f = take(base, used, N * m.gates);
    if (l->a_log >= 0) a->g = take(base, used, N * m.gates);
    if (l->b >= 0) a->b = take(base, used, N * (l->mixer == MIX_GDN2 ? m.key : c->v_heads));
    if (l->w >= 0) a->w = take(base, used, N * m.val);
    if (l->mixer == MIX_MAMBA2) a->w = take(base, used, N * m.gates);
    if (l->g_up >= 0) a->gate = take(base, used, N * m.val);
    int64_t chunks = (T + CHUNK - 1) / CHUNK;
    if (e->set.train) a->states = take(base, used, B * m.delta.HV * chunks * m.delta.K * m.delta.V);
    a->oy = take(base, used, N * m.val);
  }
  if (c->ff) {
    a->h1 = take(base, used, N * d), a->rstd1 = take(base, used, N);
    a->gu = take(base, used, N * 2 * c->ff), a->s = take(base, used, N * c->ff);
  }
}

// Everything of fixed size for the largest micro-batch: counted with base NULL, then bound.
static int64_t engine_bind(Engine *e, real *base) {
  const Config *c = &e->c;
  int64_t N = (int64_t)e->set.max_rows * e->set.max_len, used = 0, most = 0, d = c->width;
  int64_t packed = 0, conv = 0, key = 0, val = 0, gates = 0, b_cols = 0;
  for (int i = 0; i < c->layers; i++) {
    const LayerLayout *l = &e->table->layers[i];
    MixerSizes m = mixer_sizes(c, l, 1, 1);
    int64_t start = used;
    if (!e->set.train) used = 0;  // nothing is kept: all layers share one set
    layer_acts_bind(&e->acts[i], e, i, base, &used);
    most = used > most ? used : most;
    if (!e->set.train) used = start > most ? start : most;
    packed = m.rows > packed ? m.rows : packed, conv = m.conv_cols > conv ? m.conv_cols : conv;
    key = m.key > key ? m.key : key, val = m.val > val ? m.val : val, gates = m.gates > gates ? m.gates : gates;
    int64_t bc = l->mixer == MIX_GDN2 ? m.key : c->v_heads;
    b_cols = bc > b_cols ? bc : b_cols;
  }
  e->x_end = take(base, &used, N * d), e->h_end = take(base, &used, N * d), e->rstd_end = take(base, &used, N);
  int64_t limit = ((int64_t)1 << 26) / e->table->vocab_rows;
  e->head_rows = N < limit ? N : limit < 1 ? 1 : limit;
  e->logits = take(base, &used, e->head_rows * e->table->vocab_rows);
  e->losses = take(base, &used, N), e->lse = take(base, &used, N);
  if (e->set.train) {
    e->dx = take(base, &used, N * d), e->dh = take(base, &used, N * d);
    e->dpacked = take(base, &used, N * packed), e->dy = take(base, &used, N * conv);
    e->dq = take(base, &used, N * key), e->dk = take(base, &used, N * key), e->dv = take(base, &used, N * val);
    e->dg = take(base, &used, N * gates), e->df = take(base, &used, N * gates);
    e->db = take(base, &used, N * b_cols), e->dw = take(base, &used, N * (val > gates ? val : gates));
    e->dgate = take(base, &used, N * val), e->d_o = take(base, &used, N * val), e->dskip = take(base, &used, N * val);
    if (c->ff) e->ds = take(base, &used, N * c->ff), e->dgu = take(base, &used, N * 2 * c->ff);
  }
  return used;
}

static const real *param(const Engine *e, int64_t offset) { return offset < 0 ? NULL : e->arena[ARENA_PARAM] + offset; }
static real *grad(const Engine *e, int64_t offset) { return offset < 0 ? NULL : e->arena[ARENA_GRAD] + offset; }

// Decay, erase and write gates of a layer from its packed projections.
static void gates_forward(const Engine *e, const LayerLayout *l, const LayerActs *a, const MixerSizes *m, int64_t N) {
  const Config *c = &e->c;
  double lb = l->mixer == MIX_KDA ? c->kda_lower_bound : 0;
  if (l->f_up >= 0)
    linear_forward(a->f, m->gates, a->packed + l->f, m->rows, param(e, l->f_up), N, c->head_v, m->gates, 0);
  if (l->a_log >= 0)
    decay_forward(a->g, l->f_up >= 0 ? a->f : a->packed + l->a, l->f_up >= 0 ? m->gates : m->rows, param(e, l->a_log),
                  param(e, l->dt_bias), N, m->gates, m->per_head, lb);
  if (l->mixer == MIX_GDN2) {
    gate_forward(a->b, a->packed + l->b, m->rows, N, m->key, c->head_k, c->erase, c->beta_max);
    gate_forward(a->w, a->packed + l->w, m->rows, N, m->val, c->head_v, c->write, 1);
  } else if (l->mixer != MIX_MAMBA2) {
    gate_forward(a->b, a->packed + l->b, m->rows, N, c->v_heads, 1, PER_CHANNEL, c->beta_max);
  } else {
    const real *bias = param(e, l->dt_bias);
    for (int64_t n = 0; n < N; n++)  // dt = softplus(dt + bias): Mamba2's write gate
      for (int i = 0; i < m->gates; i++)
        a->w[n * m->gates + i] = (real)softplus((double)a->packed[n * m->rows + l->a + i] + (double)bias[i]);
  }
  if (l->g_up >= 0) {
    linear_forward(a->gate, m->val, a->packed + l->gate, m->rows, param(e, l->g_up), N, c->head_v, m->val, 0);
    const real *bias = param(e, l->g_up_bias);
    for (int64_t n = 0; n < N; n++)
      for (int j = 0; j < m->val; j++) a->gate[n * m->val + j] += bias[j];
  }
}

static DeltaInputs delta_inputs(const Engine *e, const LayerLayout *l, const LayerActs *a, const MixerSizes *m) {
  DeltaInputs in = {a->q, a->k, a->y + 2 * m->key,  m->key,  m->key, m->conv_cols,
                    a->g, a->b, a->w ? a->w : a->b, e->start};
  if (l->mixer == MIX_MAMBA2) {  // y = x | B | C
    in.q = a->y + m->val + m->key, in.k = a->y + m->val, in.v = a->y;
    in.ldq = in.ldk = in.ldv = m->conv_cols;
  }
  return in;
}

// Keeps the last inputs of the convolution, taps-1 of them, for the next forward.
static void conv_tail_update(const Engine *e, LayerState *st, const LayerActs *a, const LayerLayout *l,
                             const MixerSizes *m) {
  int keep = e->c.conv_size - 1, B = e->B, T = e->T, ch = m->conv_cols;
  for (int b = 0; b < B; b++) {
    real *tail = st->tail + (int64_t)b * keep * ch;
    for (int i = 0; i < keep; i++) {
      int t = T - keep + i;
      if (t < 0)
        memmove(tail + i * ch, tail + (i + T) * ch, (size_t)ch * sizeof(real));
      else
        memcpy(tail + i * ch, a->packed + ((int64_t)b * T + t) * m->rows + l->conv_first, (size_t)ch * sizeof(real));
    }
  }
}

// y = o_proj's input, from the packed projections of a delta-rule or Mamba2 layer.
static void recurrent_mixer_forward(Engine *e, const LayerLayout *l, LayerActs *a, LayerState *st,
                                    const MixerSizes *m) {
  const Config *c = &e->c;
  int64_t N = (int64_t)e->B * e->T;
  ConvShape conv = {e->B, e->T, m->conv_cols, l->conv >= 0 ? c->conv_size : 0};
  int carry = st && e->carried > 0;
  short_conv_forward(a->y, a->pre, a->packed + l->conv_first, m->rows, carry && conv.taps ? st->tail : NULL,
                     param(e, l->conv), param(e, l->conv_bias), e->start, conv);
  if (st && conv.taps) conv_tail_update(e, st, a, l, m);
  gates_forward(e, l, a, m, N);
  if (l->mixer != MIX_MAMBA2) {
    qk_norm_forward(a->q, a->y, m->conv_cols, N, c->heads, c->head_k, c->qk_norm, c->l2_eps);
    qk_norm_forward(a->k, a->y + m->key, m->conv_cols, N, c->heads, c->head_k, c->qk_norm, c->l2_eps);
  }
  ROUND(a->y, N * m->conv_cols);
  if (a->q) ROUND(a->q, N * m->key), ROUND(a->k, N * m->key);
  DeltaInputs in = delta_inputs(e, l, a, m);
  delta_rule_forward(a->o, a->states, st ? st->S : NULL, &in, carry ? st->S : NULL, &m->delta);
  ROUND(a->o, N * m->val);
  if (l->mixer == MIX_MAMBA2)
    mamba2_output_forward(a->oy, a->o, a->y, m->conv_cols, a->packed + l->gate, m->rows, param(e, l->d_skip),
                          param(e, l->o_norm), N, m->delta.HV, m->delta.V, c->mamba_groups, c->norm_eps);
  else
    output_norm_forward(a->oy, a->o,
                        a->gate        ? a->gate
                        : l->gate >= 0 ? a->packed + l->gate
                                       : NULL,
                        a->gate ? m->val : m->rows, param(e, l->o_norm), N, c->v_heads, c->head_v,
                        config_output_gate(c, l->mixer), c->norm_eps);
  ROUND(a->oy, N * m->val);
}

static void recurrent_mixer_backward(Engine *e, const LayerLayout *l, const LayerActs *a, const MixerSizes *m) {
  const Config *c = &e->c;
  int64_t N = (int64_t)e->B * e->T;
  int mamba = l->mixer == MIX_MAMBA2, channel_gate = a->gate != NULL;
  // d_o holds the gradient of oy
  if (mamba)
    mamba2_output_backward(e->d_o, e->dskip, m->val, e->dpacked + l->gate, grad(e, l->d_skip), grad(e, l->o_norm),
                           e->d_o, a->o, a->y, m->conv_cols, a->packed + l->gate, m->rows, param(e, l->d_skip),
                           param(e, l->o_norm), N, m->delta.HV, m->delta.V, c->mamba_groups, c->norm_eps);
  else
    output_norm_backward(e->d_o, channel_gate ? e->dgate : e->dpacked + l->gate, grad(e, l->o_norm), e->d_o, a->o,
                         channel_gate   ? a->gate
                         : l->gate >= 0 ? a->packed + l->gate
                                        : NULL,
                         channel_gate ? m->val : m->rows, param(e, l->o_norm), N, c->v_heads, c->head_v,
                         config_output_gate(c, l->mixer), c->norm_eps);
  if (channel_gate) {
    real *dbias = grad(e, l->g_up_bias);
    for (int64_t n = 0; n < N; n++)
      for (int j = 0; j < m->val; j++) dbias[j] += e->dgate[n * m->val + j];
    linear_backward_weight(grad(e, l->g_up), e->dgate, m->val, a->packed + l->gate, m->rows, N, c->head_v, m->val);
    linear_backward_input(e->dpacked + l->gate, m->rows, e->dgate, m->val, param(e, l->g_up), N, c->head_v, m->val, 0);
  }
  ROUND(e->d_o, N * m->val);
  DeltaInputs in = delta_inputs(e, l, a, m);
  DeltaGradients dg = {e->dq, e->dk, mamba ? e->dy : e->dy + 2 * m->key, m->conv_cols, e->dg, e->db, e->dw, NULL};
  delta_rule_backward(&dg, e->d_o, NULL, a->states, &in, &m->delta);
  ROUND(e->dq, N * m->key), ROUND(e->dk, N * m->key);
  if (l->a_log >= 0) {
    double lb = l->mixer == MIX_KDA ? c->kda_lower_bound : 0;
    int low_rank = l->f_up >= 0;
    decay_backward(low_rank ? e->df : e->dpacked + l->a, low_rank ? m->gates : m->rows, grad(e, l->a_log),
                   grad(e, l->dt_bias), e->dg, a->g, low_rank ? a->f : a->packed + l->a, low_rank ? m->gates : m->rows,
                   param(e, l->a_log), param(e, l->dt_bias), N, m->gates, m->per_head, lb);
    if (low_rank) {
      linear_backward_weight(grad(e, l->f_up), e->df, m->gates, a->packed + l->f, m->rows, N, c->head_v, m->gates);
      linear_backward_input(e->dpacked + l->f, m->rows, e->df, m->gates, param(e, l->f_up), N, c->head_v, m->gates, 0);
    }
  }
  if (mamba) {
    real *ddt = grad(e, l->dt_bias);
    const real *bias = param(e, l->dt_bias);
    for (int i = 0; i < m->gates; i++) {  // dt is the write gate too
      double sum = 0;
      for (int64_t n = 0; n < N; n++) {
        double x = (double)a->packed[n * m->rows + l->a + i] + (double)bias[i],
               d = e->dw[n * m->gates + i] / (1 + exp(-x));
        e->dpacked[n * m->rows + l->a + i] += (real)d;
        sum += d;
      }
      ddt[i] += (real)sum;
    }
    for (int64_t n = 0; n < N; n++) {
      for (int j = 0; j < m->val; j++) e->dy[n * m->conv_cols + j] += e->dskip[n * m->val + j];
      memcpy(e->dy + n * m->conv_cols + m->val, e->dk + n * m->key, (size_t)m->key * sizeof(real));
      memcpy(e->dy + n * m->conv_cols + m->val + m->key, e->dq + n * m->key, (size_t)m->key * sizeof(real));
    }
  } else {
    if (l->mixer == MIX_GDN2) {
      gate_backward(e->dpacked + l->b, e->db, a->packed + l->b, m->rows, N, m->key, c->head_k, c->erase, c->beta_max);
      gate_backward(e->dpacked + l->w, e->dw, a->packed + l->w, m->rows, N, m->val, c->head_v, c->write, 1);
    } else {  // beta is erase and write gate at once
      for (int64_t i = 0; i < N * c->v_heads; i++) e->db[i] += e->dw[i];
      gate_backward(e->dpacked + l->b, e->db, a->packed + l->b, m->rows, N, c->v_heads, 1, PER_CHANNEL, c->beta_max);
    }
    qk_norm_backward(e->dy, e->dq, a->y, m->conv_cols, N, c->heads, c->head_k, c->qk_norm, c->l2_eps);
    qk_norm_backward(e->dy + m->key, e->dk, a->y + m->key, m->conv_cols, N, c->heads, c->head_k, c->qk_norm, c->l2_eps);
  }
  ConvShape conv = {e->B, e->T, m->conv_cols, l->conv >= 0 ? c->conv_size : 0};
  short_conv_backward(e->dpacked + l->conv_first, grad(e, l->conv), grad(e, l->conv_bias), e->dy, a->pre,
                      a->packed + l->conv_first, m->rows, param(e, l->conv), e->start, conv);
}

static void attention_mixer_forward(Engine *e, const LayerLayout *l, LayerActs *a, LayerState *st, MixerSizes *m) {
  const Config *c = &e->c;
  int64_t N = (int64_t)e->B * e->T;
  int B = e->B, T = e->T, D = c->attn_head_dim, kv = c->attn_kv_heads * D;
  int past = !st ? 0 : e->carried < st->cap ? (int)e->carried : st->cap, total = past + T;
  rope_rotate(a->q, m->key, a->packed + l->q, m->rows, B, T, c->attn_heads, D, c->rope_theta, e->carried, 1);
  m->attention.past = past;
  for (int b = 0; b < B; b++) {
    real *kb = a->k + (int64_t)b * total * kv, *vb = a->v + (int64_t)b * total * kv;
    if (past) {
      memcpy(kb, st->keys + (int64_t)b * st->cap * kv, (size_t)past * kv * sizeof(real));
      memcpy(vb, st->values + (int64_t)b * st->cap * kv, (size_t)past * kv * sizeof(real));
    }
    const real *row = a->packed + (int64_t)b * T * m->rows;
    rope_rotate(kb + (int64_t)past * kv, kv, row + l->k, m->rows, 1, T, c->attn_kv_heads, D, c->rope_theta, e->carried,
                1);
    for (int t = 0; t < T; t++)
      memcpy(vb + (int64_t)(past + t) * kv, row + (int64_t)t * m->rows + l->v, (size_t)kv * sizeof(real));
    if (st) {
      int keep = total < st->cap ? total : st->cap;
      memcpy(st->keys + (int64_t)b * st->cap * kv, kb + (int64_t)(total - keep) * kv, (size_t)keep * kv * sizeof(real));
      memcpy(st->values + (int64_t)b * st->cap * kv, vb + (int64_t)(total - keep) * kv,
             (size_t)keep * kv * sizeof(real));
    }
  }
  ROUND(a->q, N * m->key), ROUND(a->k, (int64_t)B * total * kv);
  attention_forward(a->o, a->lse, a->q, a->k, a->v, e->start, &m->attention);
  ROUND(a->o, N * m->val);
}

static void attention_mixer_backward(Engine *e, const LayerLayout *l, const LayerActs *a, const MixerSizes *m) {
  const Config *c = &e->c;
  int B = e->B, T = e->T, D = c->attn_head_dim, kv = c->attn_kv_heads * D;
  attention_backward(e->dq, e->dk, e->dv, e->d_o, a->o, a->lse, a->q, a->k, a->v, e->start, &m->attention);
  int sign = PLANTED(PLANT_ROPE_SIGN) ? 1 : -1;
  rope_rotate(e->dpacked + l->q, m->rows, e->dq, m->key, B, T, c->attn_heads, D, c->rope_theta, 0, sign);
  rope_rotate(e->dpacked + l->k, m->rows, e->dk, kv, B, T, c->attn_kv_heads, D, c->rope_theta, 0, sign);
  for (int64_t n = 0; n < (int64_t)B * T; n++)
    memcpy(e->dpacked + n * m->rows + l->v, e->dv + n * kv, (size_t)kv * sizeof(real));
}

// x_out = x + mixer(RMSNorm(x));  x_out += MLP(RMSNorm(x_out))
static void layer_forward(Engine *e, int i, real *x_out, int carry) {
  const Config *c = &e->c;
  const LayerLayout *l = &e->table->layers[i];
  LayerActs *a = &e->acts[i];
  LayerState *st = carry ? &e->state[i] : NULL;
  int d = c->width;
  int64_t N = (int64_t)e->B * e->T;
  MixerSizes m = mixer_sizes(c, l, e->B, e->T);
  rmsnorm_forward(a->h, a->rstd, a->x, param(e, l->attn_norm), N, d, c->norm_eps);
  ROUND(a->h, N * d);
  linear_forward(a->packed, m.rows, a->h, d, param(e, l->in_proj), N, d, m.rows, 0);
  ROUND(a->packed, N * m.rows);
  if (mixer_is_attention(l->mixer))
    attention_mixer_forward(e, l, a, st, &m);
  else
    recurrent_mixer_forward(e, l, a, st, &m);
  real *x1 = c->ff ? a->x1 : x_out;
  memmove(x1, a->x, (size_t)(N * d) * sizeof(real));
  linear_forward(x1, d, a->oy, m.val, param(e, l->o_proj), N, m.val, d, 1);
  ROUND(x1, N * d);
  if (!c->ff) return;
  rmsnorm_forward(a->h1, a->rstd1, a->x1, param(e, l->mlp_norm), N, d, c->norm_eps);
  ROUND(a->h1, N * d);
  linear_forward(a->gu, 2 * c->ff, a->h1, d, param(e, l->gate_up), N, d, 2 * c->ff, 0);
  ROUND(a->gu, N * 2 * c->ff);
  swiglu_forward(a->s, a->gu, N, c->ff);
  ROUND(a->s, N * c->ff);
  memmove(x_out, a->x1, (size_t)(N * d) * sizeof(real));
  linear_forward(x_out, d, a->s, c->ff, param(e, l->down), N, c->ff, d, 1);
  ROUND(x_out, N * d);
}

// e->dx: gradient of the layer's output on entry, of its input on return
static void layer_backward(Engine *e, int i) {
  const Config *c = &e->c;
  const LayerLayout *l = &e->table->layers[i];
  const LayerActs *a = &e->acts[i];
  int d = c->width, ff = c->ff;
  int64_t N = (int64_t)e->B * e->T;
  MixerSizes m = mixer_sizes(c, l, e->B, e->T);
  if (ff) {
    linear_backward_weight(grad(e, l->down), e->dx, d, a->s, ff, N, ff, d);
    linear_backward_input(e->ds, ff, e->dx, d, param(e, l->down), N, ff, d, 0);
    ROUND(e->ds, N * ff);
    swiglu_backward(e->dgu, e->ds, a->gu, N, ff);
    ROUND(e->dgu, N * 2 * ff);
    linear_backward_weight(grad(e, l->gate_up), e->dgu, 2 * ff, a->h1, d, N, d, 2 * ff);
    linear_backward_input(e->dh, d, e->dgu, 2 * ff, param(e, l->gate_up), N, d, 2 * ff, 0);
    ROUND(e->dh, N * d);
    rmsnorm_backward(e->dx, grad(e, l->mlp_norm), e->dh, a->x1, a->rstd1, param(e, l->mlp_norm), N, d);
    ROUND(e->dx, N * d);
  }
  linear_backward_weight(grad(e, l->o_proj), e->dx, d, a->oy, m.val, N, m.val, d);
  linear_backward_input(e->d_o, m.val, e->dx, d, param(e, l->o_proj), N, m.val, d, 0);
  ROUND(e->d_o, N * m.val);
  memset(e->dpacked, 0, (size_t)(N * m.rows) * sizeof(real));  // padding columns have no gradient
  if (mixer_is_attention(l->mixer))
    attention_mixer_backward(e, l, a, &m);
  else
    recurrent_mixer_backward(e, l, a, &m);
  ROUND(e->dpacked, N * m.rows);
  linear_backward_weight(grad(e, l->in_proj), e->dpacked, m.rows, a->h, d, N, d, m.rows);
  linear_backward_input(e->dh, d, e->dpacked, m.rows, param(e, l->in_proj), N, d, m.rows, 0);
  ROUND(e->dh, N * d);
  rmsnorm_backward(e->dx, grad(e, l->attn_norm), e->dh, a->x, a->rstd, param(e, l->attn_norm), N, d);
  ROUND(e->dx, N * d);
}

// First token of each token's document, as an index of its row; negative: in what was carried.
static void document_starts(Engine *e) {
  const Config *c = &e->c;
  for (int b = 0; b < e->B; b++) {
    int64_t before = !e->carried ? 0 : c->boundary_reset ? e->since[b] : e->carried;
    int32_t current = -(int32_t)(before < INT32_MAX / 2 ? before : INT32_MAX / 2);
    for (int t = 0; t < e->T; t++) {
      int64_t n = (int64_t)b * e->T + t;
      if (c->boundary_reset && e->tokens[n] == c->bos) current = t;
      e->start[n] = current;
    }
    if (e->since) e->since[b] = e->T - current;
  }
}

// Logits of tokens [first, first+rows) into e->logits.
static void head_forward(Engine *e, real *logits, int64_t first, int64_t rows) {
  linear_forward(logits, e->table->vocab_rows, e->h_end + first * e->c.width, e->c.width, param(e, e->table->head),
                 rows, e->c.width, e->table->vocab_rows, 0);
  ROUND(logits, rows * e->table->vocab_rows);
}

static double model_forward(Engine *e, const int32_t *tokens, const int32_t *targets, int B, int T, int flags) {
  const Config *c = &e->c;
  int64_t N = (int64_t)B * T;
  int carry = flags & ENGINE_CARRY;
  if (B < 1 || T < 1 || B > e->set.max_rows || T > e->set.max_len)
    fail(EXIT_INTERNAL, "forward of %d x %d tokens in an engine made for %d x %d", B, T, e->set.max_rows,
         e->set.max_len);
  if (carry && !e->state) fail(EXIT_INTERNAL, "forward with a carried state in an engine made without one");
  if (carry && config_has_mixer(c, MIX_ATTN) && e->carried + T > e->set.max_state)
    fail(EXIT_CONFIG, "full attention keeps every key: %lld tokens wanted, room for %d; ask for fewer tokens",
         (long long)(e->carried + T), e->set.max_state);
  for (int64_t n = 0; n < N; n++)
    if (tokens[n] < 0 || tokens[n] >= c->vocab || (targets && targets[n] >= c->vocab))
      fail(EXIT_DATA, "token id %d in a batch: the model's vocabulary has %d ids; change --train, --val or --vocab",
           tokens[n] < 0 || tokens[n] >= c->vocab ? tokens[n] : targets[n], c->vocab);
  if (!carry) e->carried = 0;
  e->B = B, e->T = T;
  memcpy(e->tokens, tokens, (size_t)N * sizeof(int32_t));
  document_starts(e);
  embedding_forward(e->acts[0].x, tokens, param(e, e->table->embedding), N, c->width);
  ROUND(e->acts[0].x, N * c->width);
  for (int i = 0; i < c->layers; i++) layer_forward(e, i, i + 1 < c->layers ? e->acts[i + 1].x : e->x_end, carry);
  rmsnorm_forward(e->h_end, e->rstd_end, e->x_end, param(e, e->table->final_norm), N, c->width, c->norm_eps);
  ROUND(e->h_end, N * c->width);
  if (carry) e->carried += T;
  if (!targets) return 0;
  memcpy(e->targets, targets, (size_t)N * sizeof(int32_t));
  double loss = 0;
  for (int64_t t = 0; t < N; t += e->head_rows) {
    int64_t rows = N - t < e->head_rows ? N - t : e->head_rows;
    head_forward(e, e->logits, t, rows);
    loss +=
        cross_entropy_forward(e->losses + t, e->lse + t, e->logits, e->table->vocab_rows, targets + t, rows, c->vocab);
  }
  return loss;
}

static void model_backward(Engine *e, double scale) {
  const Config *c = &e->c;
  const ParamTable *table = e->table;
  int64_t N = (int64_t)e->B * e->T;
  if (!e->set.train) fail(EXIT_INTERNAL, "backward in an engine made without gradients");
  for (int64_t t = 0; t < N; t += e->head_rows) {
    int64_t rows = N - t < e->head_rows ? N - t : e->head_rows;
    if (N > e->head_rows) head_forward(e, e->logits, t, rows);  // else the forward's logits are still there
    cross_entropy_backward(e->logits, table->vocab_rows, e->lse + t, e->targets + t, rows, c->vocab, (real)scale);
    ROUND(e->logits, rows * table->vocab_rows);
    linear_backward_weight(grad(e, table->head), e->logits, table->vocab_rows, e->h_end + t * c->width, c->width, rows,
                           c->width, table->vocab_rows);
    linear_backward_input(e->dh + t * c->width, c->width, e->logits, table->vocab_rows, param(e, table->head), rows,
                          c->width, table->vocab_rows, 0);
  }
  ROUND(e->dh, N * c->width);
  memset(e->dx, 0, (size_t)(N * c->width) * sizeof(real));
  rmsnorm_backward(e->dx, grad(e, table->final_norm), e->dh, e->x_end, e->rstd_end, param(e, table->final_norm), N,
                   c->width);
  ROUND(e->dx, N * c->width);
  for (int i = c->layers - 1; i >= 0; i--) layer_backward(e, i);
  embedding_backward(grad(e, table->embedding), e->dx, e->tokens, N, c->width);
}

// ----------------------------------------------------------------------------
// AdamW (arXiv 1711.05101), on the own shard of the arena

static void model_update(Engine *e, const AdamW *a) {
  const ParamTable *t = e->table;
  real *P = e->arena[ARENA_PARAM], *G = e->arena[ARENA_GRAD];
  real *M = e->arena[ARENA_M] - e->shard_first, *V = e->arena[ARENA_V] - e->shard_first;
  double c1 = 1 - pow(a->beta1, (double)a->step), c2 = 1 - pow(a->beta2, (double)a->step);
  for (int s = 0; s < t->n; s++) {
    const ParamSpec *p = &t->specs[s];
    if (p->init == INIT_PAD) continue;
    int64_t lo = p->offset > e->shard_first ? p->offset : e->shard_first;
    int64_t hi = p->offset + p->count, end = e->shard_first + e->shard_count;
    if (hi > end) hi = end;
    real keep = (real)(1 - (p->decays || a->decay_all ? a->lr * a->weight_decay : 0));
    real b1 = (real)a->beta1, b2 = (real)a->beta2, gs = (real)a->grad_scale, eps = (real)a->eps;
    real lr1 = (real)(a->lr / c1), r2 = (real)(1 / sqrt(c2));
#pragma omp parallel for
    for (int64_t i = lo; i < hi; i++) {
      real g = G[i] * gs;
      M[i] = b1 * M[i] + (1 - b1) * g;
      V[i] = b2 * V[i] + (1 - b2) * g * g;
      P[i] = keep * P[i] - lr1 * M[i] / (R(sqrt)(V[i]) * r2 + eps);
    }
  }
}

static double model_grad_sumsq(Engine *e, int64_t first, int64_t count) {
  enum { BLOCK = 4096 };
  int64_t blocks = (count + BLOCK - 1) / BLOCK;
  double *part = (double *)alloc_array(blocks, sizeof(double), "gradient norm"), sum = 0;
  const real *g = e->arena[ARENA_GRAD] + first;
#pragma omp parallel for
  for (int64_t b = 0; b < blocks; b++) {
    int64_t end = (b + 1) * BLOCK < count ? (b + 1) * BLOCK : count;
    double s = 0;
    for (int64_t i = b * BLOCK; i < end; i++) s += (double)g[i] * g[i];
    part[b] = s;
  }
  for (int64_t b = 0; b < blocks; b++) sum += part[b];
  free(part);
  return sum;
}

// ----------------------------------------------------------------------------
// the engine: this model behind the functions of gdn/engine.h

static int cpu_check(const Config *c, const EngineSettings *s, Error *err) {
  int code = config_check(c, err);
  if (code) return code;
  if (s->max_rows < 1 || s->max_len < 1)
    return error_set(err, EXIT_CONFIG,
                     "a micro-batch of %d rows of %d tokens: needed at least 1 of each; change --batch or "
                     "--seq-len",
                     s->max_rows, s->max_len);
  if ((int64_t)s->max_rows * s->max_len > INT32_MAX / 8)
    return error_set(err, EXIT_CONFIG, "a micro-batch of %d x %d tokens is too large: use a smaller --batch",
                     s->max_rows, s->max_len);
  if (s->recompute != RECOMPUTE_NONE)
    return error_set(err, EXIT_CONFIG, "--recompute %s: the CPU engine keeps every activation; needed none",
                     recompute_names[s->recompute]);
  return 0;
}

static void cpu_destroy(Engine *e) {
  if (!e) return;
  for (int i = 0; i < 4; i++) free(e->arena[i]);
  for (int i = 0; e->state && i < e->c.layers; i++)
    free(e->state[i].S), free(e->state[i].tail), free(e->state[i].keys), free(e->state[i].values);
  free(e->state), free(e->acts), free(e->tokens), free(e->targets), free(e->start), free(e->since), free(e->memory);
  free(e);
}

static Engine *cpu_create(const Config *c, const ParamTable *t, const EngineSettings *s, Error *err) {
  Engine *e = (Engine *)alloc_zeroed(1, sizeof *e, "engine");
  e->c = *c, e->table = t, e->set = *s;
  e->shard_first = s->shard_count ? s->shard_first : 0, e->shard_count = s->shard_count ? s->shard_count : t->total;
  e->acts = (LayerActs *)alloc_zeroed(c->layers, sizeof(LayerActs), "engine");
  int64_t N = (int64_t)s->max_rows * s->max_len;
  if (s->max_state) {
    e->state = (LayerState *)alloc_zeroed(c->layers, sizeof(LayerState), "engine");
    e->since = (int32_t *)alloc_zeroed(s->max_rows, sizeof(int32_t), "engine");
    for (int i = 0; i < c->layers; i++) {
      MixerSizes m = mixer_sizes(c, &t->layers[i], s->max_rows, s->max_len);
      LayerState *st = &e->state[i];
      if (mixer_is_attention(t->layers[i].mixer)) {
        st->cap = m.attention.window && m.attention.window - 1 < s->max_state ? m.attention.window - 1 : s->max_state;
        int64_t n = (int64_t)s->max_rows * st->cap * c->attn_kv_heads * c->attn_head_dim;
        st->keys = (real *)alloc_array(n, sizeof(real), "carried keys");
        st->values = (real *)alloc_array(n, sizeof(real), "carried values");
      } else {
        st->S = (real *)alloc_zeroed((int64_t)s->max_rows * m.delta.HV * m.delta.K * m.delta.V, sizeof(real),
                                     "carried state");
        int keep = c->conv_size ? c->conv_size - 1 : 0;
        st->tail = (real *)alloc_zeroed((int64_t)s->max_rows * keep * m.conv_cols, sizeof(real), "carried state");
      }
    }
  }
  e->memory_elements = engine_bind(e, NULL);
  int64_t own[4] = {t->total, s->train ? t->total : 0, s->train ? e->shard_count : 0, s->train ? e->shard_count : 0};
  for (int i = 0; i < 4; i++) {
    e->arena[i] = (real *)calloc((size_t)(own[i] ? own[i] : 1), sizeof(real));
    if (!e->arena[i]) goto no_memory;
  }
  e->memory = (real *)malloc((size_t)e->memory_elements * sizeof(real));
  e->tokens = (int32_t *)malloc((size_t)N * sizeof(int32_t)),
  e->targets = (int32_t *)malloc((size_t)N * sizeof(int32_t));
  e->start = (int32_t *)malloc((size_t)N * sizeof(int32_t));
  if (!e->memory || !e->tokens || !e->targets || !e->start) goto no_memory;
  engine_bind(e, e->memory);
  return e;
no_memory:
  error_set(err, EXIT_MEMORY,
            "%.1f GiB of memory needed for %d x %d tokens and %lld parameters: not available; use a "
            "smaller --batch, --seq-len or model",
            (double)(e->memory_elements + own[0] + own[1] + own[2] + own[3]) * sizeof(real) / (1 << 30), s->max_rows,
            s->max_len, (long long)t->params);
  cpu_destroy(e);
  return NULL;
}

static real *arena_at(Engine *e, Arena a, int64_t first) {
  return e->arena[a] + first - (a == ARENA_M || a == ARENA_V ? e->shard_first : 0);
}
static void cpu_read(Engine *e, Arena a, int64_t first, int64_t count, float *dst) {
  const real *p = arena_at(e, a, first);
  for (int64_t i = 0; i < count; i++) dst[i] = (float)p[i];
}
static void cpu_write(Engine *e, Arena a, int64_t first, int64_t count, const float *src) {
  real *p = arena_at(e, a, first);
  for (int64_t i = 0; i < count; i++) p[i] = src[i];
}
static void cpu_read64(Engine *e, Arena a, int64_t first, int64_t count, double *dst) {
  const real *p = arena_at(e, a, first);
  for (int64_t i = 0; i < count; i++) dst[i] = (double)p[i];
}
static void cpu_write64(Engine *e, Arena a, int64_t first, int64_t count, const double *src) {
  real *p = arena_at(e, a, first);
  for (int64_t i = 0; i < count; i++) p[i] = (real)src[i];
}
static void *cpu_arena(Engine *e, Arena a) { return e->arena[a]; }
static void cpu_zero_grad(Engine *e) { memset(e->arena[ARENA_GRAD], 0, (size_t)e->table->total * sizeof(real)); }
static void cpu_losses(Engine *e, float *dst) {
  for (int64_t i = 0; i < (int64_t)e->B * e->T; i++) dst[i] = (float)e->losses[i];
}

static void cpu_logits(Engine *e, int64_t first, int64_t rows, float *dst) {
  int64_t ld = e->table->vocab_rows;
  real *row = (real *)alloc_array(ld * rows, sizeof(real), "logits");
  head_forward(e, row, first, rows);
  for (int64_t r = 0; r < rows; r++)
    for (int j = 0; j < e->c.vocab; j++) dst[r * e->c.vocab + j] = (float)row[r * ld + j];
  free(row);
}

static void cpu_reset_state(Engine *e) { e->carried = 0; }

// Activations by name: "x_end", "h_end", "losses", "logits", and of layer i "layers.i.NAME" with the names below. Those
// of a layer are kept in an engine made for training.
static int64_t cpu_activation(Engine *e, const char *name, double *dst, int64_t max) {
  int64_t N = (int64_t)e->B * e->T, d = e->c.width, count = -1;
  const real *p = NULL;
  int layer = -1, used = 0;
  if (sscanf(name, "layers.%d.%n", &layer, &used) == 1 && used && layer >= 0 && layer < e->c.layers) {
    const LayerActs *a = &e->acts[layer];
    MixerSizes m = mixer_sizes(&e->c, &e->table->layers[layer], e->B, e->T);
    const struct {
      const char *name;
      const real *p;
      int64_t columns;
    } list[] = {{"x", a->x, d},
                {"h", a->h, d},
                {"packed", a->packed, m.rows},
                {"conv", a->y, m.conv_cols},
                {"q", a->q, m.key},
                {"k", a->k, m.key},
                {"g", a->g, m.gates},
                {"o", a->o, m.val},
                {"mixer", a->oy, m.val},
                {"x1", a->x1, d},
                {"h1", a->h1, d},
                {"gu", a->gu, 2 * e->c.ff},
                {"swiglu", a->s, e->c.ff}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
      if (list[i].p && !strcmp(name + used, list[i].name)) p = list[i].p, count = N * list[i].columns;
  } else if (!strcmp(name, "x_end")) {
    p = e->x_end, count = N * d;
  } else if (!strcmp(name, "h_end")) {
    p = e->h_end, count = N * d;
  } else if (!strcmp(name, "losses")) {
    p = e->losses, count = N;
  } else if (!strcmp(name, "logits")) {
    count = N * e->c.vocab;
    real *row = (real *)alloc_array(e->table->vocab_rows, sizeof(real), "logits");
    for (int64_t n = 0; n < N; n++) {
      head_forward(e, row, n, 1);
      for (int64_t j = 0; j < e->c.vocab && n * e->c.vocab + j < max; j++) dst[n * e->c.vocab + j] = (double)row[j];
    }
    free(row);
    return count;
  }
  for (int64_t i = 0; i < count && i < max; i++) dst[i] = (double)p[i];
  return count;
}

static void cpu_synchronize(Engine *e) { (void)e; }
static int64_t cpu_memory_bytes(const Engine *e) {
  return (e->memory_elements + e->table->total * (e->set.train ? 2 : 1) + (e->set.train ? 2 * e->shard_count : 0)) *
         (int64_t)sizeof(real);
}

#if defined(GDN_EMULATE_BF16)
const EngineApi engine_cpu_bf16 = {"cpu-bf16",
#elif defined(GDN_REAL_DOUBLE)
const EngineApi engine_cpu_f64 = {"cpu-f64",
#else
const EngineApi engine_cpu_f32 = {"cpu-f32",
#endif
                                   sizeof(real),
                                   0,
                                   cpu_check,
                                   cpu_create,
                                   cpu_destroy,
                                   cpu_read,
                                   cpu_write,
                                   cpu_read64,
                                   cpu_write64,
                                   cpu_arena,
                                   model_forward,
                                   cpu_losses,
                                   cpu_logits,
                                   model_backward,
                                   cpu_zero_grad,
                                   model_grad_sumsq,
                                   model_update,
                                   cpu_reset_state,
                                   cpu_activation,
                                   cpu_synchronize,
                                   cpu_memory_bytes,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL,
                                   NULL};

// ----------------------------------------------------------------------------
// main: the program around the model is gdn/trainer.h, the same for both engines

#ifndef GDN_NO_MAIN
#include <unistd.h>
#include "gdn/trainer.h"  // trainer_main

// OpenMP's threads wait for each other by spinning, for very long by default: on a machine that does other work too,
// that made steps seven times slower. Sleeping costs a few percent on an idle one. The libraries read their setting
// when they are loaded, so it is set here and the program starts itself once more.
static void wait_asleep(char **argv) {
  if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT") || getenv("KMP_BLOCKTIME")) return;
  char program[4096];  // its path, not the link in /proc: top and pkill would know it as "exe"
  ssize_t n = readlink("/proc/self/exe", program, sizeof program);
  if (n <= 0 || n >= (ssize_t)sizeof program) return;
  program[n] = 0;
  if (!setenv("OMP_WAIT_POLICY", "passive", 1)) execv(program, argv);  // where it cannot, it goes on as it is
}

int main(int argc, char **argv) {
  wait_asleep(argv);
#ifdef GDN_REAL_DOUBLE
  return trainer_main(argc, argv, &engine_cpu_f64);
#else
  return trainer_main(argc, argv, &engine_cpu_f32);
#endif
}
#endif
