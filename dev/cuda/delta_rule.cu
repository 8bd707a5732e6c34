// Kernel lab for the delta rule: prepare, scan, reverse scan, gradients (gdn/cuda/delta_rule.h).
//
// Reference: the recurrence token by token in float64 with its own back-propagation through time, on the same bf16
// inputs. Limit: an emulation in fp32 that rounds to bf16 where the kernels do (but knows nothing of tiles or threads)
// gives the error that the format costs for these very inputs; a kernel may have twice that plus one bf16 rounding
// (2^-9). Every buffer is filled with NaN before the launch; NaN or infinity anywhere fails.
//
// The naive form (naive_delta_rule.cuh, forward only) is held against the same reference, by the same limit.
//
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a dev/cuda/delta_rule.cu gdn/cuda/delta_rule.cu -o lab
//
//   lab check     many shapes against the reference
//   lab general   of these: value heads in groups, means of gates, the bounded gate, no decay, gates at their ends
//   lab small     the smallest shapes only (for compute-sanitizer)
//   lab emulate   check with the emulation in the kernels' place: shows what the format costs, needs no GPU
//   lab bench     every kernel timed (CUDA events, L2 flushed, median), with bytes and percent of the memory floor
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>
#include "../../gdn/cuda/delta_rule.h"
#include "naive_delta_rule.cuh"

typedef std::vector<float> Floats;
typedef std::vector<double> Doubles;

#define CUDA(call)                                                                                       \
  do {                                                                                                   \
    cudaError_t e_ = (call);                                                                             \
    if (e_ != cudaSuccess) fail(EXIT_INTERNAL, "%s:%d: %s", __FILE__, __LINE__, cudaGetErrorString(e_)); \
  } while (0)

static const double COPY_RATE = 4.27e12;  // bytes per second, measured copy on one H200

static int passed, failed;
static bool emulate_only;  // no GPU: the emulation stands in for the kernels

// ---------------------------------------------------------------------------------------------------------------------
// Random numbers and rounding

struct Random {
  uint64_t s;
  explicit Random(uint64_t seed) : s(seed * 0x9E3779B97F4A7C15ull + 0x1234567) {}
  uint64_t next() {
    uint64_t z = (s += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  double uniform() { return (next() >> 11) * (1.0 / 9007199254740992.0); }
  double normal() { return sqrt(-2 * log(uniform() + 1e-300)) * cos(6.283185307179586 * uniform()); }
};

static float bf(float x) {  // to bf16 and back, nearest even
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7f800000u) == 0x7f800000u) return x;
  u += 0x7fff + ((u >> 16) & 1);
  u &= 0xffff0000u;
  memcpy(&x, &u, 4);
  return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Cases

enum Inputs { PLAIN, STRONG, FLAT, REPEATED, MIXED, SPIKE_CHANNEL, SPIKE_TOKEN, EIGHTY };
static const char *inputs_name[] = {"random",           "gates to -112", "g = 0",
                                    "keys all equal",   "g 0 or -1000",  "a channel at 1e-12",
                                    "a token at 1e-30", "g = -80"};

struct Case {
  int B, T, H, HV, K, V;
  DeltaRuleGate gate;
  DeltaRuleErase erase;
  float beta_scale;
  Inputs inputs;
  bool documents, packed;
  bool erase_mean = false, write_mean = false;
  float lower_bound = 0;
};

static bool channel_form(const Case &c) { return c.gate == GATE_CHANNEL || c.erase == ERASE_CHANNEL; }
static int gate_heads(const Case &c) { return c.erase == ERASE_CHANNEL ? c.H : c.HV; }
static int a_width(const Case &c) { return c.gate == GATE_CHANNEL ? gate_heads(c) * c.K : c.HV; }
static int beta_width(const Case &c) { return c.erase == ERASE_CHANNEL ? c.H * c.K : c.HV; }
static int bias_width(const Case &c) { return a_width(c); }

struct Host {  // one case; all values already bf16 where the kernel reads bf16
  Floats q, k, v, a, beta, w, A_log, dt_bias, dO;
  std::vector<int32_t> doc;
};

static Host make_inputs(const Case &c, uint64_t seed) {
  Random r(seed);
  Host h;
  size_t BT = (size_t)c.B * c.T;
  auto vectors = [&](Floats &x, bool same) {
    x.resize(BT * c.H * c.K);
    Floats first(c.K);
    for (size_t i = 0; i < BT * c.H; i++) {
      double s = 0;
      std::vector<double> y(c.K);
      for (auto &e : y) e = r.normal(), s += e * e;
      for (int d = 0; d < c.K; d++) {
        float e = bf((float)(y[d] / sqrt(s)));
        if (same && i >= (size_t)c.H) e = first[d];
        if (same && i < (size_t)c.H) first[d] = e;
        x[i * c.K + d] = e;
      }
    }
  };
  vectors(h.q, false);
  vectors(h.k, c.inputs == REPEATED);
  h.v.resize(BT * c.HV * c.V), h.dO.resize(BT * c.HV * c.V);
  for (auto &x : h.v) x = bf((float)r.normal());
  for (auto &x : h.dO) x = bf((float)r.normal());
  h.a.resize(BT * a_width(c)), h.beta.resize(BT * beta_width(c)), h.A_log.resize(gate_heads(c)),
      h.dt_bias.resize(bias_width(c));
  for (auto &x : h.A_log) x = (float)log(1 + 15 * r.uniform());
  for (auto &x : h.dt_bias) x = (float)(-4 + 2 * r.uniform());
  if (c.inputs == STRONG || c.inputs == MIXED)
    std::fill(h.A_log.begin(), h.A_log.end(), (float)log(16.0)), std::fill(h.dt_bias.begin(), h.dt_bias.end(), 0.0f);
  if (c.inputs == FLAT) std::fill(h.A_log.begin(), h.A_log.end(), -60.0f);
  const bool spikes = c.inputs == SPIKE_CHANNEL || c.inputs == SPIKE_TOKEN || c.inputs == EIGHTY;
  if (spikes) std::fill(h.A_log.begin(), h.A_log.end(), 0.0f), std::fill(h.dt_bias.begin(), h.dt_bias.end(), 0.0f);
  if (c.lower_bound != 0)  // the logit of a bounded gate is exp(A_log) x
    for (size_t i = 0; i < h.A_log.size(); i++) h.A_log[i] = (float)r.normal() * 0.5f;
  for (size_t i = 0; i < h.a.size(); i++) {
    double x = r.normal(), u = r.uniform();
    if (c.inputs == STRONG) x = u < 0.2 ? 7 * r.uniform() : -6 + r.normal();
    if (c.inputs == MIXED) x = u < 0.5 ? 62.5 : -200;  // 16 * 62.5 = 1000
    if (spikes) {  // g = -softplus(x): 0.99 is x = -4.6, 1e-12 x = 27.6, 1e-30 x = 69
      const size_t width = (size_t)a_width(c), t = i / width % (size_t)c.T;
      x = -4.6;
      if (c.inputs == SPIKE_CHANNEL && i % (size_t)c.K == 5) x = 27.6;
      if (c.inputs == SPIKE_TOKEN && t % 64 == 29) x = 69;
      if (c.inputs == EIGHTY) x = 80;
    }
    h.a[i] = bf((float)x);
  }
  for (size_t i = 0; i < h.beta.size(); i++) {
    double y = r.normal(), u = r.uniform();
    if (c.inputs == FLAT || c.inputs == MIXED) y = u < 0.3 ? -200 : u < 0.6 ? 200 : y;  // beta 0 and c
    if (c.inputs == REPEATED) y = 200;
    h.beta[i] = bf((float)y);
  }
  if (c.erase == ERASE_CHANNEL) {
    h.w.resize(BT * c.HV * c.V);
    for (auto &x : h.w) x = bf((float)r.normal());
  }
  if (c.documents) {
    h.doc.resize(BT);
    const int starts[] = {0, 1, 5, 37, 64, 88, 120, 121, 192, 250};
    for (int b = 0; b < c.B; b++)
      for (int t = 0; t < c.T; t++) {
        int s = 0;
        for (int x : starts)
          if (x + 3 * b <= t && x) s = x + 3 * b;
        h.doc[(size_t)b * c.T + t] = s;
      }
  }
  return h;
}

// ---------------------------------------------------------------------------------------------------------------------
// Results of the reference, of the emulation, of the kernels

struct Result {
  Doubles o, dq, dk, dv, da, dbeta, dw, dA, ddt;
  Doubles da_terms, dA_terms, ddt_terms;  // what these sums are differences of (reference only)
  Doubles naive;                          // o of the naive kernel (GPU only)
  void resize(const Case &c) {
    size_t BT = (size_t)c.B * c.T;
    o.assign(BT * c.HV * c.V, 0), dv = o, dq.assign(BT * c.H * c.K, 0), dk = dq;
    da.assign(BT * a_width(c), 0), da_terms = da, dbeta.assign(BT * beta_width(c), 0),
                                   dw.assign(c.erase == ERASE_CHANNEL ? dv.size() : 0, 0);
    dA.assign(gate_heads(c), 0), dA_terms = dA, ddt.assign(bias_width(c), 0), ddt_terms = ddt;
  }
};

static double softplus64(double x) { return x > 40 ? x : log1p(exp(x)); }
static double sigmoid64(double x) { return 1 / (1 + exp(-x)); }

struct HeadShares {  // of one (b, hv): dq, dk before the sum over the group; the gate's parameters before the sum over
                     // b
  Doubles dq, dk, ddt, ddt_terms;  // ddt: one number, or one a channel
  Doubles da, da_terms, dbeta;     // value heads may share these too
  double dA, dA_terms;
};

// From the gradients of the gate (per token, or token and channel), of b (k o de) and of z's gate (v o dX) to the
// logits. Scalar gates: db holds the whole sum per token.
static double log_decay64(const Case &c, double A_log, double x) {
  return c.lower_bound != 0 ? c.lower_bound * sigmoid64(exp(A_log) * x) : -exp(A_log) * softplus64(x);
}

static void logits_backward(const Case &c, const Host &h, int b, int hv, const Doubles &dg, const Doubles &db,
                            const Doubles &dwv, const Doubles &terms, Result *r, HeadShares *s) {
  const int channels = c.gate == GATE_CHANNEL ? c.K : 1, erases = c.erase == ERASE_CHANNEL ? c.K : 1;
  const int kh = hv / (c.HV / c.H), gh = c.erase == ERASE_CHANNEL ? kh : hv;  // of the decay, and of beta
  s->dA = s->dA_terms = 0, s->ddt.assign(channels, 0.0), s->ddt_terms = s->ddt;
  s->da.assign((size_t)c.T * channels, 0.0), s->da_terms = s->da, s->dbeta.assign((size_t)c.T * erases, 0.0);
  for (int t = 0; t < c.T; t++) {
    if (c.gate != GATE_NONE)
      for (int d = 0; d < channels; d++) {
        size_t i = ((size_t)b * c.T + t) * a_width(c) + (size_t)gh * channels + d, at = (size_t)t * channels + d;
        double A_log = h.A_log[gh], x = (double)h.a[i] + h.dt_bias[(size_t)gh * channels + d], A = exp(A_log),
               g = log_decay64(c, A_log, x);
        bool floor = g * 1.4426950408889634 < -126;
        double slope = floor ? 0 : -A * sigmoid64(x), by_A = g;  // dg / dx and dg / dA_log
        if (c.lower_bound != 0) slope = c.lower_bound * A * sigmoid64(A * x) * sigmoid64(-A * x), by_A = slope * x;
        double da = dg[at] * slope + (c.erase == ERASE_NONE ? db[t] * sigmoid64(x) : 0);
        s->da[at] = da, s->da_terms[at] = terms[at] * slope;
        s->dA += floor ? 0 : dg[at] * by_A, s->ddt[d] += da;
        s->dA_terms += floor ? 0 : pow(terms[at] * by_A, 2), s->ddt_terms[d] += pow(terms[at] * slope, 2);
      }
    double mean = 0;
    for (int d = 0; d < erases; d++) mean += db.empty() ? 0 : db[(size_t)t * erases + d] / erases;
    if (c.erase != ERASE_NONE)
      for (int d = 0; d < erases; d++) {
        size_t i = ((size_t)b * c.T + t) * beta_width(c) + (size_t)gh * erases + d;
        double sg = sigmoid64(h.beta[i]);
        s->dbeta[(size_t)t * erases + d] =
            (c.erase_mean ? mean : db[(size_t)t * erases + d]) * c.beta_scale * sg * (1 - sg);
      }
    mean = 0;
    for (int j = 0; j < c.V && c.write_mean; j++) mean += dwv[(size_t)t * c.V + j] / c.V;
    if (c.erase == ERASE_CHANNEL)
      for (int j = 0; j < c.V; j++) {
        size_t i = (((size_t)b * c.T + t) * c.HV + hv) * c.V + j;
        double sg = sigmoid64(h.w[i]);
        r->dw[i] = (c.write_mean ? mean : dwv[(size_t)t * c.V + j]) * sg * (1 - sg);
      }
  }
}

static double mean_gate(const float *logits, int n) {
  double sum = 0;
  for (int i = 0; i < n; i++) sum += sigmoid64(logits[i]);
  return sum / n;
}

// The recurrence and its back-propagation through time.
static void reference_head(const Case &c, const Host &h, int b, int hv, Result *r, HeadShares *share) {
  const int K = c.K, V = c.V, T = c.T, kh = hv / (c.HV / c.H), channels = c.gate == GATE_CHANNEL ? K : 1;
  const int gh = c.erase == ERASE_CHANNEL ? kh : hv;
  const double scale = c.erase == ERASE_NONE ? 1 : 1 / sqrt((double)K);
  auto Q = [&](int t) { return &h.q[(((size_t)b * T + t) * c.H + kh) * K]; };
  auto Kk = [&](int t) { return &h.k[(((size_t)b * T + t) * c.H + kh) * K]; };
  auto row = [&](int t) { return (((size_t)b * T + t) * c.HV + hv) * V; };
  Doubles S((size_t)K * V, 0.0), Sh((size_t)T * K * V), u((size_t)T * V), al((size_t)T * K), be((size_t)T * K),
      we((size_t)T * V);
  for (int t = 0; t < T; t++) {
    double x = 0;
    for (int d = 0; d < K; d++) {
      int gate = d % channels;
      if (c.gate != GATE_NONE && d < channels)
        x = (double)h.a[((size_t)b * T + t) * a_width(c) + gh * channels + gate] + h.dt_bias[gh * channels + gate];
      double &a = al[(size_t)t * K + d];
      a = c.gate != GATE_NONE ? exp(log_decay64(c, h.A_log[gh], x)) : 1;
      if (c.documents && h.doc[(size_t)b * T + t] == t) a = 0;  // a document starts: the state before it is gone
      size_t i = ((size_t)b * T + t) * beta_width(c) + (c.erase == ERASE_CHANNEL ? kh * K + d : hv);
      be[(size_t)t * K + d] = c.erase == ERASE_NONE ? 0 : c.beta_scale * sigmoid64(h.beta[i]);
      if (c.erase_mean) be[(size_t)t * K + d] = d ? be[(size_t)t * K] : c.beta_scale * mean_gate(&h.beta[i], K);
    }
    const double write = c.write_mean ? mean_gate(&h.w[row(t)], V) : 0;
    for (int j = 0; j < V; j++)
      we[(size_t)t * V + j] = c.write_mean               ? write
                              : c.erase == ERASE_CHANNEL ? sigmoid64(h.w[row(t) + j])
                              : c.erase == ERASE_NONE    ? softplus64(x)
                                                         : be[(size_t)t * K];
    double *ut = &u[(size_t)t * V];
    for (int j = 0; j < V; j++) ut[j] = we[(size_t)t * V + j] * h.v[row(t) + j];
    for (int d = 0; d < K; d++) {
      double e = be[(size_t)t * K + d] * Kk(t)[d], a = al[(size_t)t * K + d];
      for (int j = 0; j < V; j++) {
        double &s = S[(size_t)d * V + j];
        s *= a;
        ut[j] -= e * s;
      }
    }
    memcpy(&Sh[(size_t)t * K * V], S.data(), sizeof(double) * K * V);
    for (int d = 0; d < K; d++) {
      double kd = Kk(t)[d], qd = scale * Q(t)[d];
      for (int j = 0; j < V; j++) {
        double &s = S[(size_t)d * V + j];
        s += kd * ut[j];
        r->o[row(t) + j] += qd * s;
      }
    }
  }
  share->dq.assign((size_t)T * K, 0), share->dk = share->dq;
  const int erases = c.erase == ERASE_CHANNEL ? K : 1;
  Doubles dS((size_t)K * V, 0.0), du(V), dg((size_t)T * channels, 0.0), terms = dg, db((size_t)T * erases, 0.0),
                                                                        dwv((size_t)T * V);
  for (int t = T - 1; t >= 0; t--) {
    const double *sh = &Sh[(size_t)t * K * V], *ut = &u[(size_t)t * V];
    const float *dO = &h.dO[row(t)];
    std::fill(du.begin(), du.end(), 0.0);
    for (int d = 0; d < K; d++) {
      double kd = Kk(t)[d], qd = scale * Q(t)[d], sum = 0;
      for (int j = 0; j < V; j++) {
        double &x = dS[(size_t)d * V + j];
        sum += (sh[(size_t)d * V + j] + kd * ut[j]) * dO[j];
        x += qd * dO[j];
        du[j] += kd * x;
      }
      share->dq[(size_t)t * K + d] = scale * sum;
      terms[(size_t)t * channels + d % channels] += fabs(scale * sum * Q(t)[d]);
    }
    for (int d = 0; d < K; d++) {
      double kd = Kk(t)[d], bd = be[(size_t)t * K + d], dk = 0, e = 0, dgate = 0;
      for (int j = 0; j < V; j++) {
        double &x = dS[(size_t)d * V + j];
        dk += x * ut[j];
        e -= sh[(size_t)d * V + j] * du[j], x -= bd * kd * du[j];
        dgate += x * sh[(size_t)d * V + j];
        x *= al[(size_t)t * K + d];
      }
      share->dk[(size_t)t * K + d] = dk + bd * e;
      if (c.erase != ERASE_NONE) db[(size_t)t * erases + d % erases] += kd * e;
      dg[(size_t)t * channels + d % channels] += dgate;
      terms[(size_t)t * channels + d % channels] += fabs(kd * dk) + fabs(bd * kd * e);
    }
    for (int j = 0; j < V; j++) {
      r->dv[row(t) + j] = we[(size_t)t * V + j] * du[j];
      dwv[(size_t)t * V + j] = h.v[row(t) + j] * du[j];
      if (c.erase != ERASE_CHANNEL) db[t] += dwv[(size_t)t * V + j];
    }
  }
  logits_backward(c, h, b, hv, dg, db, dwv, terms, r, share);
}

// The chunk form with the kernels' roundings: fp32 sums, bf16 operands.
static void emulate_head(const Case &c, const Host &h, int b, int hv, Result *r, HeadShares *share) {
  const int K = c.K, V = c.V, T = c.T, kh = hv / (c.HV / c.H), NT = (T + 63) / 64;
  const float scale = c.erase == ERASE_NONE ? 1.0f : (float)(1 / sqrt((double)K));
  const bool erase = c.erase != ERASE_NONE;
  struct Chunk {
    float G[64], be[64], in[64], out[64], A[64][64], P[64][64];
    int doc[64];
    Floats q, k, v, dO, U, H, dX, dH;
  };
  std::vector<Chunk> chunks(NT);
  for (int n = 0; n < NT; n++) {
    Chunk &x = chunks[n];
    x.q.assign(64 * K, 0), x.k = x.q, x.v.assign(64 * V, 0), x.dO = x.v, x.U = x.v, x.dX = x.v;
    int start0 = 0;
    for (int i = 0; i < 64; i++) {
      int t = n * 64 + i, tc = std::min(t, T - 1);
      bool live = t < T;
      size_t at = ((size_t)b * T + tc) * c.HV + hv;
      float a = c.gate != GATE_NONE ? h.a[at] + h.dt_bias[hv] : 0;
      float g = c.gate != GATE_NONE && live
                    ? std::max((float)(-exp((double)h.A_log[hv]) * softplus64(a) * 1.4426950408889634), -126.0f)
                    : 0;
      int start = c.documents ? h.doc[(size_t)b * T + tc] - n * 64 : -1;
      if (i == 0) start0 = start;
      x.doc[i] = std::max(start, 0);
      x.G[i] = g + (i && x.doc[i] == x.doc[i - 1] ? x.G[i - 1] : 0);
      x.be[i] = !live ? 0 : erase ? c.beta_scale * (float)sigmoid64(h.beta[at]) : (float)softplus64(a);
      if (!live) continue;
      for (int d = 0; d < K; d++) {
        x.q[i * K + d] = h.q[(((size_t)b * T + t) * c.H + kh) * K + d];
        x.k[i * K + d] = h.k[(((size_t)b * T + t) * c.H + kh) * K + d];
      }
      for (int j = 0; j < V; j++) {
        x.v[i * V + j] = h.v[(((size_t)b * T + t) * c.HV + hv) * V + j];
        x.dO[i * V + j] = h.dO[(((size_t)b * T + t) * c.HV + hv) * V + j];
      }
    }
    bool carried = n > 0 && start0 < 0;
    float M[64][64];
    for (int i = 0; i < 64; i++) {
      x.in[i] = x.doc[i] == 0 && carried ? exp2f(x.G[i]) : 0;
      x.out[i] = x.doc[i] == x.doc[63] ? exp2f(x.G[63] - x.G[i]) : 0;
      for (int j = 0; j < 64; j++) {
        M[i][j] = x.P[i][j] = 0;
        if (j > i || x.doc[i] != x.doc[j]) continue;
        float qk = 0, kk = 0, w = exp2f(x.G[i] - x.G[j]);
        for (int d = 0; d < K; d++) qk += x.q[i * K + d] * x.k[j * K + d], kk += x.k[i * K + d] * x.k[j * K + d];
        x.P[i][j] = bf(scale * qk * w);
        if (j < i && erase) M[i][j] = x.be[i] * kk * w;
      }
    }
    for (int j = 0; j < 64; j++) {
      float y[64];
      for (int i = 0; i < 64; i++) {
        y[i] = i == j;
        for (int m = j; m < i; m++) y[i] -= M[i][m] * y[m];
        x.A[i][j] = i < j ? 0 : bf(y[i]);
      }
    }
  }
  Floats H((size_t)K * V, 0.0f), acc(64 * V), y(64 * V);
  // acc[i] += f * sum_d x[i][d] Hb[d]
  auto times_state = [&](const Floats &x, const Floats &Hb, Floats &out) {
    std::fill(out.begin(), out.end(), 0.0f);
    for (int i = 0; i < 64; i++)
      for (int d = 0; d < K; d++)
        for (int j = 0; j < V; j++) out[i * V + j] += x[i * K + d] * Hb[(size_t)d * V + j];
  };
  for (int n = 0; n < NT; n++) {
    Chunk &x = chunks[n];
    x.H.resize((size_t)K * V);
    for (size_t i = 0; i < x.H.size(); i++) x.H[i] = bf(H[i]);
    times_state(x.k, x.H, acc);
    Floats X(64 * V), O(64 * V), Us(64 * V);
    for (int i = 0; i < 64; i++)
      for (int j = 0; j < V; j++) {
        float z = x.be[i] * (x.v[i * V + j] - (erase ? x.in[i] * acc[i * V + j] : 0));
        X[i * V + j] = erase ? bf(z) : z;
      }
    times_state(x.q, x.H, O);
    for (int i = 0; i < 64; i++)
      for (int j = 0; j < V; j++) {
        float s = 0;
        if (erase)
          for (int m = 0; m <= i; m++) s += x.A[i][m] * X[m * V + j];
        else
          s = X[i * V + j];
        x.U[i * V + j] = bf(s), Us[i * V + j] = bf(s * x.out[i]);
      }
    for (int i = 0; i < 64; i++)
      for (int j = 0; j < V; j++) {
        float s = O[i * V + j] * (scale * x.in[i]);
        for (int m = 0; m <= i; m++) s += x.P[i][m] * x.U[m * V + j];
        if (n * 64 + i < T) r->o[(((size_t)b * T + n * 64 + i) * c.HV + hv) * V + j] = bf(s);
      }
    for (auto &e : H) e *= x.in[63];
    for (int i = 0; i < 64; i++)
      for (int d = 0; d < K; d++)
        for (int j = 0; j < V; j++) H[(size_t)d * V + j] += x.k[i * K + d] * Us[i * V + j];
  }
  std::fill(H.begin(), H.end(), 0.0f);
  for (int n = NT - 1; n >= 0; n--) {
    Chunk &x = chunks[n];
    x.dH.resize((size_t)K * V);
    for (size_t i = 0; i < x.dH.size(); i++) x.dH[i] = bf(H[i]);
    times_state(x.k, x.dH, acc);
    for (int m = 0; m < 64; m++)
      for (int j = 0; j < V; j++) {
        float s = acc[m * V + j] * x.out[m];
        for (int i = m; i < 64; i++) s += x.P[i][m] * x.dO[i * V + j];
        y[m * V + j] = erase ? bf(s) : s;
      }
    for (int m = 0; m < 64; m++)
      for (int j = 0; j < V; j++) {
        float s = 0;
        if (erase)
          for (int i = m; i < 64; i++) s += x.A[i][m] * y[i * V + j];
        else
          s = y[m * V + j];
        x.dX[m * V + j] = bf(s), acc[m * V + j] = bf(-s * x.be[m] * x.in[m]);
      }
    for (auto &e : H) e *= x.in[63];
    for (int i = 0; i < 64; i++)
      for (int d = 0; d < K; d++)
        for (int j = 0; j < V; j++)
          H[(size_t)d * V + j] += x.q[i * K + d] * bf(x.dO[i * V + j] * (scale * x.in[i])) +
                                  (erase ? x.k[i * K + d] * acc[i * V + j] : 0.0f);
  }
  share->dq.assign((size_t)T * K, 0), share->dk = share->dq;
  Doubles dg(T, 0.0), db(T, 0.0), terms(T, 0.0);
  for (int n = 0; n < NT; n++) {
    Chunk &x = chunks[n];
    static thread_local float S[64][64], N[64][64], BN[64][64];
    for (int i = 0; i < 64; i++)
      for (int m = 0; m < 64; m++) {
        S[i][m] = N[i][m] = BN[i][m] = 0;
        if (m > i || x.doc[i] != x.doc[m]) continue;
        float s = 0, e = 0, w = exp2f(x.G[i] - x.G[m]);
        for (int j = 0; j < V; j++) s += x.dO[i * V + j] * x.U[m * V + j], e += x.dX[i * V + j] * x.U[m * V + j];
        S[i][m] = bf(scale * s * w);
        if (m < i && erase) N[i][m] = bf(-e * w), BN[i][m] = bf(x.be[i] * -e * w);
      }
    Floats dq(64 * K, 0.0f), de = dq, dk = dq;
    double last = 0;
    for (int d = 0; d < K; d++) {
      const float *Hd = &x.H[(size_t)d * V], *dHd = &x.dH[(size_t)d * V];
      float hh = 0;
      for (int j = 0; j < V; j++) hh += Hd[j] * dHd[j];
      last += hh * x.in[63];
      for (int i = 0; i < 64; i++) {
        float a = 0, e = 0, k = 0;
        for (int j = 0; j < V; j++)
          a += x.dO[i * V + j] * Hd[j], e += x.dX[i * V + j] * Hd[j], k += x.U[i * V + j] * dHd[j];
        dq[i * K + d] = scale * x.in[i] * a, de[i * K + d] = erase ? -x.in[i] * e : 0, dk[i * K + d] = x.out[i] * k;
        last += x.k[i * K + d] * dk[i * K + d];
      }
    }
    for (int i = 0; i < 64; i++)
      for (int m = 0; m <= i; m++)
        for (int d = 0; d < K; d++) {
          dq[i * K + d] += S[i][m] * x.k[m * K + d], de[i * K + d] += N[i][m] * x.k[m * K + d];
          dk[m * K + d] += S[i][m] * x.q[i * K + d] + BN[i][m] * x.k[i * K + d];
        }
    double dG[64];
    for (int i = 0; i < 64; i++) {
      float qq = 0, ke = 0, kk = 0, vx = 0;
      int t = n * 64 + i;
      for (int d = 0; d < K; d++) {
        qq += x.q[i * K + d] * dq[i * K + d], ke += x.k[i * K + d] * de[i * K + d],
            kk += x.k[i * K + d] * dk[i * K + d];
        if (t < T)
          share->dq[(size_t)t * K + d] = dq[i * K + d],
                                    share->dk[(size_t)t * K + d] = dk[i * K + d] + x.be[i] * de[i * K + d];
      }
      dG[i] = qq + x.be[i] * ke - kk + (i == 63 ? last : 0);
      for (int j = 0; j < V; j++) {
        vx += x.v[i * V + j] * x.dX[i * V + j];
        if (t < T) r->dv[(((size_t)b * T + t) * c.HV + hv) * V + j] = bf(x.be[i] * x.dX[i * V + j]);
      }
      if (t < T) db[t] = ke + vx;
    }
    for (int i = 62; i >= 0; i--)
      if (x.doc[i] == x.doc[i + 1]) dG[i] += dG[i + 1];
    for (int i = 0; i < 64; i++)
      if (n * 64 + i < T) dg[n * 64 + i] = dG[i];
  }
  logits_backward(c, h, b, hv, dg, db, Doubles(), terms, r, share);
}

// The same for a decay per key channel: operands Q+, K-, E+ and the anchored blocks below the diagonal in bf16.
static void emulate_channel_head(const Case &c, const Host &h, int b, int hv, Result *r, HeadShares *share) {
  const int K = c.K, V = c.V, T = c.T, NT = (T + 63) / 64, kh = hv / (c.HV / c.H);
  const int gh = c.erase == ERASE_CHANNEL ? kh : hv;
  const float scale = (float)(1 / sqrt((double)K));
  const bool two = c.erase == ERASE_CHANNEL;
  struct Chunk {
    Floats G, q, k, e, gate, Qp, Km, Ep, v, w, dO, U, H, dX, dH, decay;
    float A[64][64], P[64][64];
    int doc[64];
    bool carried;
  };
  std::vector<Chunk> chunks(NT);
  auto f = [](float x) { return exp2f(std::min(x, 0.0f)); };
  for (int n = 0; n < NT; n++) {
    Chunk &x = chunks[n];
    x.G.assign(64 * K, 0), x.q = x.k = x.e = x.gate = x.Qp = x.Km = x.Ep = x.G;
    x.v.assign(64 * V, 0), x.w = x.dO = x.U = x.dX = x.v;
    int start0 = 0;
    for (int i = 0; i < 64; i++) {
      int t = n * 64 + i, tc = std::min(t, T - 1);
      int start = c.documents ? h.doc[(size_t)b * T + tc] - n * 64 : -1;
      if (i == 0) start0 = start;
      x.doc[i] = std::max(start, 0);
      for (int d = 0; d < K; d++) {
        size_t token = (size_t)b * T + tc, at = (token * c.H + kh) * K + d;
        float a = 0;
        if (t < T && c.gate != GATE_NONE) {
          double x = (double)h.a[token * a_width(c) + gh * K + d] + h.dt_bias[gh * K + d];
          a = std::max((float)(log_decay64(c, h.A_log[gh], x) * 1.4426950408889634), -126.0f);
        }
        x.G[i * K + d] = a + (i && x.doc[i] == x.doc[i - 1] ? x.G[(i - 1) * K + d] : 0);
        if (t >= T) continue;
        x.q[i * K + d] = h.q[at], x.k[i * K + d] = h.k[at];
        x.gate[i * K + d] = c.beta_scale * (float)(c.erase_mean ? mean_gate(&h.beta[at - d], K)
                                                                : sigmoid64(h.beta[two ? at : token * c.HV + hv]));
        x.e[i * K + d] = bf(x.gate[i * K + d] * h.k[at]);
      }
      if (t < T) {
        const size_t at = (((size_t)b * T + t) * c.HV + hv) * V;
        const float write = c.write_mean ? (float)mean_gate(&h.w[at], V) : 0;
        for (int j = 0; j < V; j++) {
          x.v[i * V + j] = h.v[at + j], x.dO[i * V + j] = h.dO[at + j];
          x.w[i * V + j] = c.write_mean ? write : two ? (float)sigmoid64(h.w[at + j]) : x.gate[i * K];
        }
      }
    }
    x.carried = n > 0 && start0 < 0;
    x.decay.resize(K);
    float M[64][64];
    for (int d = 0; d < K; d++) x.decay[d] = x.carried && x.doc[63] == 0 ? f(x.G[63 * K + d]) : 0;
    for (int i = 0; i < 64; i++) {
      for (int d = 0; d < K; d++) {
        float G = x.G[i * K + d], in = x.carried && x.doc[i] == 0 ? f(G) : 0;
        x.Qp[i * K + d] = bf(scale * x.q[i * K + d] * in), x.Ep[i * K + d] = bf(x.e[i * K + d] * in);
        x.Km[i * K + d] = bf(x.doc[i] == x.doc[63] ? x.k[i * K + d] * f(x.G[63 * K + d] - G) : 0);
      }
      for (int j = 0; j < 64; j++) {
        M[i][j] = x.P[i][j] = 0;
        if (j > i || x.doc[i] != x.doc[j]) continue;
        float s = 0, m = 0;
        for (int d = 0; d < K; d++) {
          float Gi = x.G[i * K + d], Gj = x.G[j * K + d];
          if (i / 16 == j / 16) {
            float kf = x.k[j * K + d] * f(Gi - Gj);
            s += x.q[i * K + d] * kf, m += x.e[i * K + d] * kf;
          } else {
            float anchor = x.G[(j | 15) * K + d], kf = bf(x.k[j * K + d] * f(anchor - Gj)), fi = f(Gi - anchor);
            s += bf(x.q[i * K + d] * fi) * kf, m += bf(x.e[i * K + d] * fi) * kf;
          }
        }
        x.P[i][j] = bf(scale * s);
        if (j < i) M[i][j] = m;
      }
    }
    for (int j = 0; j < 64; j++) {
      float y[64];
      for (int i = 0; i < 64; i++) {
        y[i] = i == j;
        for (int m = j; m < i; m++) y[i] -= M[i][m] * y[m];
        x.A[i][j] = i < j ? 0 : bf(y[i]);
      }
    }
  }
  Floats H((size_t)K * V, 0.0f), X(64 * V), acc(64 * V);
  auto times_state = [&](const Floats &x, const Floats &Hb, Floats &out) {
    std::fill(out.begin(), out.end(), 0.0f);
    for (int i = 0; i < 64; i++)
      for (int d = 0; d < K; d++)
        for (int j = 0; j < V; j++) out[i * V + j] += x[i * K + d] * Hb[(size_t)d * V + j];
  };
  for (int n = 0; n < NT; n++) {
    Chunk &x = chunks[n];
    x.H.resize((size_t)K * V);
    for (size_t i = 0; i < x.H.size(); i++) x.H[i] = bf(H[i]);
    times_state(x.Ep, x.H, acc);
    for (int i = 0; i < 64 * V; i++) X[i] = bf(x.w[i] * x.v[i] - acc[i]);
    times_state(x.Qp, x.H, acc);
    for (int i = 0; i < 64; i++)
      for (int j = 0; j < V; j++) {
        float s = 0;
        for (int m = 0; m <= i; m++) s += x.A[i][m] * X[m * V + j];
        x.U[i * V + j] = bf(s);
      }
    for (int i = 0; i < 64; i++)
      for (int j = 0; j < V; j++) {
        float s = acc[i * V + j];
        for (int m = 0; m <= i; m++) s += x.P[i][m] * x.U[m * V + j];
        if (n * 64 + i < T) r->o[(((size_t)b * T + n * 64 + i) * c.HV + hv) * V + j] = bf(s);
      }
    for (int d = 0; d < K; d++)
      for (int j = 0; j < V; j++) {
        float &s = H[(size_t)d * V + j];
        s *= x.decay[d];
        for (int i = 0; i < 64; i++) s += x.Km[i * K + d] * x.U[i * V + j];
      }
  }
  std::fill(H.begin(), H.end(), 0.0f);
  for (int n = NT - 1; n >= 0; n--) {
    Chunk &x = chunks[n];
    x.dH.resize((size_t)K * V);
    for (size_t i = 0; i < x.dH.size(); i++) x.dH[i] = bf(H[i]);
    times_state(x.Km, x.dH, acc);
    for (int m = 0; m < 64; m++)
      for (int j = 0; j < V; j++) {
        float s = acc[m * V + j];
        for (int i = m; i < 64; i++) s += x.P[i][m] * x.dO[i * V + j];
        X[m * V + j] = bf(s);
      }
    for (int m = 0; m < 64; m++)
      for (int j = 0; j < V; j++) {
        float s = 0;
        for (int i = m; i < 64; i++) s += x.A[i][m] * X[i * V + j];
        x.dX[m * V + j] = bf(s);
      }
    for (int d = 0; d < K; d++)
      for (int j = 0; j < V; j++) {
        float &s = H[(size_t)d * V + j];
        s *= x.decay[d];
        for (int i = 0; i < 64; i++) s += x.Qp[i * K + d] * x.dO[i * V + j] - x.Ep[i * K + d] * x.dX[i * V + j];
      }
  }
  share->dq.assign((size_t)T * K, 0), share->dk = share->dq;
  Doubles dg((size_t)T * K, 0.0), terms = dg, db((size_t)T * (two ? K : 1), 0.0), dwv((size_t)T * V, 0.0);
  for (int n = 0; n < NT; n++) {
    Chunk &x = chunks[n];
    static thread_local float S[64][64], N[64][64];
    for (int i = 0; i < 64; i++)
      for (int m = 0; m < 64; m++) {
        S[i][m] = N[i][m] = 0;
        if (m > i || x.doc[i] != x.doc[m]) continue;
        float s = 0, e = 0;
        for (int j = 0; j < V; j++) s += x.dO[i * V + j] * x.U[m * V + j], e += x.dX[i * V + j] * x.U[m * V + j];
        S[i][m] = scale * s, N[i][m] = m < i ? -e : 0;
      }
    for (int d = 0; d < K; d++) {
      const float *Hd = &x.H[(size_t)d * V], *dHd = &x.dH[(size_t)d * V];
      float dq[64], de[64], dk[64], last = 0, hh = 0;
      for (int j = 0; j < V; j++) hh += Hd[j] * dHd[j];
      last = hh * x.decay[d];
      for (int i = 0; i < 64; i++) {
        float a = 0, e = 0, k = 0, G = x.G[i * K + d], in = x.carried && x.doc[i] == 0 ? f(G) : 0;
        for (int j = 0; j < V; j++)
          a += x.dO[i * V + j] * Hd[j], e += x.dX[i * V + j] * Hd[j], k += x.U[i * V + j] * dHd[j];
        dq[i] = scale * in * a, de[i] = -in * e, dk[i] = x.doc[i] == x.doc[63] ? f(x.G[63 * K + d] - G) * k : 0;
        last += x.k[i * K + d] * dk[i];
      }
      for (int i = 0; i < 64; i++)
        for (int m = 0; m <= i; m++) {
          float w = f(x.G[i * K + d] - x.G[m * K + d]), kf = x.k[m * K + d] * w;
          dq[i] += S[i][m] * kf, de[i] += N[i][m] * kf;
          dk[m] += w * (S[i][m] * x.q[i * K + d] + N[i][m] * x.e[i * K + d]);
        }
      double sum = last;
      for (int i = 63; i >= 0; i--) {
        if (i < 63 && x.doc[i] != x.doc[i + 1]) sum = 0;
        sum += x.q[i * K + d] * dq[i] + x.e[i * K + d] * de[i] - x.k[i * K + d] * dk[i];
        int t = n * 64 + i;
        if (t >= T) continue;
        dg[(size_t)t * K + d] = sum;
        db[two ? (size_t)t * K + d : t] += x.k[i * K + d] * de[i];
        share->dq[(size_t)t * K + d] = dq[i], share->dk[(size_t)t * K + d] = dk[i] + x.gate[i * K + d] * de[i];
      }
    }
    for (int i = 0; i < 64 && n * 64 + i < T; i++)
      for (int j = 0; j < V; j++) {
        int t = n * 64 + i;
        r->dv[(((size_t)b * T + t) * c.HV + hv) * V + j] = bf(x.w[i * V + j] * x.dX[i * V + j]);
        dwv[(size_t)t * V + j] = x.v[i * V + j] * x.dX[i * V + j];
        if (!two) db[t] += dwv[(size_t)t * V + j];
      }
  }
  logits_backward(c, h, b, hv, dg, db, dwv, terms, r, share);
}

static void run_heads(const Case &c, const Host &h, Result *r, bool emulate) {
  r->resize(c);
  std::vector<HeadShares> shares((size_t)c.B * c.HV);
  std::vector<std::thread> pool;
  int workers = std::max(1, std::min((int)std::thread::hardware_concurrency(), 8));
  for (int w = 0; w < workers; w++)
    pool.emplace_back([&, w] {
      for (int i = w; i < c.B * c.HV; i += workers)
        (!emulate          ? reference_head
         : channel_form(c) ? emulate_channel_head
                           : emulate_head)(c, h, i / c.HV, i % c.HV, r, &shares[i]);
    });
  for (auto &t : pool) t.join();
  int group = c.HV / c.H;
  for (int b = 0; b < c.B; b++)
    for (int hv = 0; hv < c.HV; hv++) {
      HeadShares &s = shares[(size_t)b * c.HV + hv];
      for (int t = 0; t < c.T; t++)
        for (int d = 0; d < c.K; d++) {
          size_t at = (((size_t)b * c.T + t) * c.H + hv / group) * c.K + d;
          r->dq[at] += s.dq[(size_t)t * c.K + d], r->dk[at] += s.dk[(size_t)t * c.K + d];
        }
      const int gh = c.erase == ERASE_CHANNEL ? hv / group : hv;
      const size_t na = s.ddt.size(), nb = s.dbeta.size() / c.T;
      for (int t = 0; t < c.T; t++) {
        const size_t token = (size_t)b * c.T + t;
        for (size_t i = 0; i < na; i++) {
          const size_t at = token * a_width(c) + gh * na + i;
          r->da[at] += s.da[t * na + i], r->da_terms[at] += s.da_terms[t * na + i];
        }
        for (size_t i = 0; i < nb; i++) r->dbeta[token * beta_width(c) + gh * nb + i] += s.dbeta[t * nb + i];
      }
      r->dA[gh] += s.dA, r->dA_terms[gh] += s.dA_terms;
      for (size_t i = 0; i < na; i++) r->ddt[gh * na + i] += s.ddt[i], r->ddt_terms[gh * na + i] += s.ddt_terms[i];
    }
  for (auto &x : r->dA_terms) x = sqrt(x);
  for (auto &x : r->ddt_terms) x = sqrt(x);
  if (emulate) {  // outputs are stored in bf16
    for (auto *v : {&r->dq, &r->dk, &r->da, &r->dbeta, &r->dw})
      for (auto &x : *v) x = bf((float)x);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernels

template <class E>
struct Device {
  E *p = NULL;
  size_t n = 0;
  explicit Device(size_t count) : n(count) {
    CUDA(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(E)));
    CUDA(cudaMemset(p, 0xff, std::max<size_t>(n, 1) * sizeof(E)));  // NaN in bf16 and in fp32
  }
  Device(const Device &) = delete;
  ~Device() { cudaFree(p); }
  void put(const std::vector<E> &x) { CUDA(cudaMemcpy(p, x.data(), x.size() * sizeof(E), cudaMemcpyHostToDevice)); }
  std::vector<E> get() const {
    std::vector<E> x(n);
    CUDA(cudaMemcpy(x.data(), p, n * sizeof(E), cudaMemcpyDeviceToHost));
    return x;
  }
};
typedef __nv_bfloat16 bf16_t;

static uint16_t bits_of(float x) {
  uint32_t u;
  x = bf(x);
  memcpy(&u, &x, 4);
  return (uint16_t)(u >> 16);
}
static double value_of(uint16_t b) {
  uint32_t u = (uint32_t)b << 16;
  float x;
  memcpy(&x, &u, 4);
  return x;
}
// rows of `width` at `offset` of rows of `stride`
static void put_rows(Device<uint16_t> &d, const Floats &x, int64_t width, int64_t stride, int64_t offset) {
  std::vector<uint16_t> all = d.get();
  for (size_t i = 0; i < x.size(); i++) all[i / width * stride + offset + i % width] = bits_of(x[i]);
  d.put(all);
}
static Doubles get_rows(const std::vector<uint16_t> &all, size_t count, int64_t width, int64_t stride, int64_t offset) {
  Doubles x(count);
  for (size_t i = 0; i < count; i++) x[i] = value_of(all[i / width * stride + offset + i % width]);
  return x;
}

static DeltaRuleShape shape_of(const Case &c) {
  DeltaRuleShape s = {c.B, c.T,          c.H, c.HV, c.K,           c.V,          c.gate,      c.erase,
                      0,   c.beta_scale, 0,   0,    c.lower_bound, c.erase_mean, c.write_mean};
  s.scale = c.erase == ERASE_NONE ? 1.0f : (float)(1 / sqrt((double)c.K));
  return s;
}

// Runs forward and backward on buffers full of NaN. Bits of all outputs, in `bits`, to compare runs.
static void run_kernels(const Case &c, const Host &h, Result *r, std::vector<uint16_t> *bits, int key_part,
                        int value_slice) {
  r->resize(c);
  DeltaRuleShape s = shape_of(c);
  s.key_part = key_part, s.value_slice = value_slice;
  size_t BT = (size_t)c.B * c.T;
  // packed: q | k | v | a | beta in one row, as a packed projection leaves them
  int64_t nq = (int64_t)c.H * c.K, nv = (int64_t)c.HV * c.V;
  const int64_t na = a_width(c), nb = beta_width(c);
  const int64_t at_a = 2 * nq + nv, at_b = (at_a + na + 7) / 8 * 8, at_w = (at_b + nb + 7) / 8 * 8;
  const int64_t width = at_w + (c.erase == ERASE_CHANNEL ? nv : 0);
  int64_t sq = c.packed ? width : nq, sv = c.packed ? width : nv;
  Device<uint16_t> in(c.packed ? BT * width : 1), q(c.packed ? 1 : BT * nq), k(c.packed ? 1 : BT * nq),
      v(c.packed ? 1 : BT * nv), a(c.packed ? 1 : BT * na), beta(c.packed ? 1 : BT * nb),
      w(c.packed || h.w.empty() ? 1 : BT * nv);
  Device<uint16_t> din(c.packed ? BT * width : 1), dq(c.packed ? 1 : BT * nq), dk(c.packed ? 1 : BT * nq),
      dv(c.packed ? 1 : BT * nv), da(c.packed ? 1 : BT * na), dbeta(c.packed ? 1 : BT * nb),
      dw(c.packed || h.w.empty() ? 1 : BT * nv);
  Device<uint16_t> o(BT * nv), d_o(BT * nv), naive(BT * nv);
  Device<float> A_log(gate_heads(c)), dt_bias(bias_width(c)), dA(gate_heads(c)), ddt(bias_width(c));
  Device<int32_t> doc(BT);
  Device<unsigned char> saved(delta_rule_saved_bytes(&s)), scratch(delta_rule_scratch_bytes(&s));
  auto *x = (bf16_t *)in.p, *dx = (bf16_t *)din.p;
  DeltaRuleInputs I;
  DeltaRuleGradients D;
  if (c.packed) {
    put_rows(in, h.q, nq, width, 0), put_rows(in, h.k, nq, width, nq), put_rows(in, h.v, nv, width, 2 * nq);
    put_rows(in, h.a, na, width, at_a), put_rows(in, h.beta, nb, width, at_b), put_rows(in, h.w, nv, width, at_w);
    I = {
        {x, width}, {x + nq, width}, {x + 2 * nq, width}, {x + at_a, width}, {x + at_b, width}, {x + at_w, width}, 0, 0,
        0};
    D = {{dx, width},
         {dx + nq, width},
         {dx + 2 * nq, width},
         {dx + at_a, width},
         {dx + at_b, width},
         {dx + at_w, width},
         0,
         0};
  } else {
    put_rows(q, h.q, nq, nq, 0), put_rows(k, h.k, nq, nq, 0), put_rows(v, h.v, nv, nv, 0);
    put_rows(a, h.a, na, na, 0), put_rows(beta, h.beta, nb, nb, 0), put_rows(w, h.w, nv, nv, 0);
    I = {{(bf16_t *)q.p, 0},
         {(bf16_t *)k.p, 0},
         {(bf16_t *)v.p, 0},
         {(bf16_t *)a.p, 0},
         {(bf16_t *)beta.p, 0},
         {(bf16_t *)w.p, 0},
         0,
         0,
         0};
    D = {{(bf16_t *)dq.p, 0},
         {(bf16_t *)dk.p, 0},
         {(bf16_t *)dv.p, 0},
         {(bf16_t *)da.p, 0},
         {(bf16_t *)dbeta.p, 0},
         {(bf16_t *)dw.p, 0},
         0,
         0};
  }
  put_rows(d_o, h.dO, nv, nv, 0);
  A_log.put(h.A_log), dt_bias.put(h.dt_bias);
  if (c.documents) doc.put(h.doc);
  I.A_log = A_log.p, I.dt_bias = dt_bias.p, I.doc_start = c.documents ? doc.p : NULL;
  Floats before(gate_heads(c), 0.5f);  // gradients are added to
  dA.put(before), ddt.put(Floats(bias_width(c), 0.5f));
  D.dA_log = dA.p, D.ddt_bias = ddt.p;
  Error e = {};
  if (delta_rule_forward({(bf16_t *)o.p, 0}, saved.p, &I, &s, 0, &e)) fail_error(&e);
  if (delta_rule_backward(&D, scratch.p, {(bf16_t *)d_o.p, 0}, saved.p, &I, &s, 0, &e)) fail_error(&e);
  naive_delta_rule_forward({(bf16_t *)naive.p, 0}, &I, &s, 0);
  CUDA(cudaGetLastError());
  CUDA(cudaDeviceSynchronize());
  auto all = din.get();
  r->o = get_rows(o.get(), BT * nv, nv, nv, 0), r->naive = get_rows(naive.get(), BT * nv, nv, nv, 0);
  r->dq = get_rows(c.packed ? all : dq.get(), BT * nq, nq, sq, 0);
  r->dk = get_rows(c.packed ? all : dk.get(), BT * nq, nq, sq, c.packed ? nq : 0);
  r->dv = get_rows(c.packed ? all : dv.get(), BT * nv, nv, sv, c.packed ? 2 * nq : 0);
  if (c.gate != GATE_NONE)
    r->da = get_rows(c.packed ? all : da.get(), BT * na, na, c.packed ? width : na, c.packed ? at_a : 0);
  if (c.erase != ERASE_NONE)
    r->dbeta = get_rows(c.packed ? all : dbeta.get(), BT * nb, nb, c.packed ? width : nb, c.packed ? at_b : 0);
  if (c.erase == ERASE_CHANNEL) r->dw = get_rows(c.packed ? all : dw.get(), BT * nv, nv, sv, c.packed ? at_w : 0);
  Floats gA = dA.get(), gd = ddt.get();
  for (int i = 0; i < gate_heads(c); i++) r->dA[i] = gA[i] - 0.5;
  for (int i = 0; i < bias_width(c); i++) r->ddt[i] = gd[i] - 0.5;
  if (bits) {
    bits->clear();
    for (auto *y : {&r->o, &r->dq, &r->dk, &r->dv, &r->da, &r->dbeta, &r->dw})
      for (double z : *y) bits->push_back(bits_of((float)z));
    for (auto &y : {gA, gd})
      for (float z : y) {
        uint32_t u;
        memcpy(&u, &z, 4);
        bits->push_back((uint16_t)u), bits->push_back((uint16_t)(u >> 16));
      }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Comparison

static double norm(const Doubles &x) {
  double s = 0;
  for (double e : x) s += e * e;
  return sqrt(s);
}
static double distance(const Doubles &x, const Doubles &y) {
  double s = 0;
  for (size_t i = 0; i < x.size(); i++) s += (x[i] - y[i]) * (x[i] - y[i]);
  return sqrt(s);
}
// One tensor: prints error / emulated error in percent; false when above the limit or not finite.
static bool compare(const char *name, const Doubles &gpu, const Doubles &emu, const Doubles &ref, const Doubles *terms,
                    double absolute) {
  double scale = norm(ref), e = distance(gpu, ref), m = distance(emu, ref);
  double limit = 2 * m + (scale + (terms ? norm(*terms) : 0)) / 512 + absolute * sqrt((double)ref.size());
  bool ok = std::isfinite(e) && e <= limit;  // a NaN or an infinity makes the distance one too
  double unit = scale > 0 ? scale : 1;
  if (terms && norm(*terms) > 1e6 * unit) unit = norm(*terms);  // what is left over of far larger terms
  printf(" %s %.2f/%.2f%s", name, 100 * e / unit, 100 * m / unit, ok ? "" : "<-FAIL");
  return ok;
}

static void check_case(const Case &c, int key_part, int value_slice) {
  static int index = 0;
  Host h = make_inputs(c, 100 + index++);
  Result ref, emu, gpu;
  run_heads(c, h, &ref, false);
  run_heads(c, h, &emu, true);
  std::vector<uint16_t> bits, again;
  if (emulate_only)
    gpu = emu;
  else
    run_kernels(c, h, &gpu, &bits, key_part, value_slice);
  printf("B%d T%d H%d/%d K%d V%d %s%s%s%s%s c%.0f %s%s%s%s%s:", c.B, c.T, c.H, c.HV, c.K, c.V,
         c.gate == GATE_NONE ? "no gate " : "",
         c.erase == ERASE_NONE      ? "ssd"
         : c.erase == ERASE_CHANNEL ? "gdn2"
         : c.gate == GATE_CHANNEL   ? "kda"
                                    : "delta",
         c.erase_mean ? " erase mean" : "", c.write_mean ? " write mean" : "", c.lower_bound != 0 ? " bounded" : "",
         c.beta_scale, inputs_name[c.inputs], c.documents ? ", documents" : "", c.packed ? ", packed" : "",
         key_part == 64 ? ", part 64" : "", value_slice == 64 ? ", slice 64" : "");
  bool ok = compare("o", gpu.o, emu.o, ref.o, NULL, 1e-6);
  ok &= compare("dq", gpu.dq, emu.dq, ref.dq, NULL, 1e-6);
  ok &= compare("dk", gpu.dk, emu.dk, ref.dk, NULL, 1e-6);
  ok &= compare("dv", gpu.dv, emu.dv, ref.dv, NULL, 1e-6);
  if (c.gate != GATE_NONE) {
    ok &= compare("da", gpu.da, emu.da, ref.da, &ref.da_terms, 1e-6);
    ok &= compare("dA", gpu.dA, emu.dA, ref.dA, &ref.dA_terms, 1e-5);
    ok &= compare("ddt", gpu.ddt, emu.ddt, ref.ddt, &ref.ddt_terms, 1e-5);
  }
  if (c.erase != ERASE_NONE) ok &= compare("dbeta", gpu.dbeta, emu.dbeta, ref.dbeta, NULL, 1e-5);
  if (c.erase == ERASE_CHANNEL) ok &= compare("dw", gpu.dw, emu.dw, ref.dw, NULL, 1e-6);
  if (!emulate_only) ok &= compare("naive o", gpu.naive, emu.o, ref.o, NULL, 1e-6);
  if (!emulate_only) run_kernels(c, h, &gpu, &again, key_part, value_slice);
  if (again != bits) ok = false, printf(" <-FAIL two runs differ");
  printf("\n");
  ok ? passed++ : failed++;
}

// Changing the first documents leaves the bits of the later ones alone, forward; and a row alone gives the same bits.
static void check_documents() {
  Case c = {2, 200, 2, 2, 64, 64, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, true, false};
  Host h = make_inputs(c, 7);
  Result x, y;
  run_kernels(c, h, &x, NULL, 0, 0);
  for (int t = 0; t < 88; t++)  // row 0: the document that starts at 88 and what follows must not see this
    for (int i = 0; i < 2 * 64; i++)
      h.k[(size_t)t * 128 + i] = bf(-0.7f * h.k[(size_t)t * 128 + i]), h.v[(size_t)t * 128 + i] += 3;
  for (int t = 0; t < 88; t++) h.a[t * 2] = 3;
  run_kernels(c, h, &y, NULL, 0, 0);
  size_t same = 0, changed = 0, total = 0;
  for (int b = 0; b < 2; b++)
    for (int t = 0; t < c.T; t++)
      for (int i = 0; i < 128; i++) {
        size_t at = ((size_t)b * c.T + t) * 128 + i;
        if (b == 1 || t >= 88)
          total++, same += x.o[at] == y.o[at];
        else
          changed += x.o[at] != y.o[at];
      }
  bool ok = same == total && changed > 0;
  printf("documents: %zu of %zu later outputs keep their bits%s\n", same, total, ok ? "" : " <-FAIL");
  ok ? passed++ : failed++;
}

// Per channel: what lies in the future changes no bit of an output.
static void check_future(const char *what, Case c) {
  Host h = make_inputs(c, 9);
  Result x, y;
  run_kernels(c, h, &x, NULL, 0, 0);
  const int from = 100, na = a_width(c), nb = beta_width(c), nv = c.HV * c.V;
  for (int t = from; t < c.T; t++) {
    for (int i = 0; i < na; i++) h.a[(size_t)t * na + i] = bf(2 - h.a[(size_t)t * na + i]);
    for (int i = 0; i < nb; i++) h.beta[(size_t)t * nb + i] = bf(1 - h.beta[(size_t)t * nb + i]);
    for (int i = 0; i < nv && !h.w.empty(); i++) h.w[(size_t)t * nv + i] = bf(1 - h.w[(size_t)t * nv + i]);
  }
  run_kernels(c, h, &y, NULL, 0, 0);
  size_t same = 0, changed = 0;
  for (size_t i = 0; i < x.o.size(); i++) {
    const bool equal = x.o[i] == y.o[i];
    (int)(i / nv) < from ? same += equal : changed += !equal;
  }
  const bool ok = same == (size_t)from * nv && changed > 0;
  printf("future gates, %s: %zu of %d earlier outputs keep their bits%s\n", what, same, from * nv, ok ? "" : " <-FAIL");
  ok ? passed++ : failed++;
}

// Gated DeltaNet-2 with b = w = beta is KDA: the same arithmetic on the same numbers, so the same up to one bf16
// rounding of what is summed in another order; it tells where not a single bit differs. dbeta is then the sum of db and
// dw.
static void check_equal_gates(bool means) {
  Case kda = {2, 200, 2, 2, 128, 128, GATE_CHANNEL, ERASE_SCALAR, 1, PLAIN, true, false}, two = kda;
  two.erase = ERASE_CHANNEL, two.erase_mean = two.write_mean = means;
  Host h = make_inputs(kda, 11), h2 = h;
  const size_t BT = (size_t)kda.B * kda.T;
  h2.beta.resize(BT * 2 * 128), h2.w.resize(BT * 2 * 128);
  for (size_t i = 0; i < BT * 2 * 128; i++) h2.beta[i] = h2.w[i] = h.beta[i / 128];
  Result x, y;
  run_kernels(kda, h, &x, NULL, 0, 0), run_kernels(two, h2, &y, NULL, 0, 0);
  Doubles db(BT * 2, 0.0);
  for (size_t i = 0; i < BT * 2 * 128; i++) db[i / 128] += y.dbeta[i] + y.dw[i];
  const struct {
    const char *name;
    const Doubles *x, *y;
  } pairs[] = {{"o", &x.o, &y.o},    {"dq", &x.dq, &y.dq}, {"dk", &x.dk, &y.dk},    {"dv", &x.dv, &y.dv},
               {"da", &x.da, &y.da}, {"dA", &x.dA, &y.dA}, {"ddt", &x.ddt, &y.ddt}, {"dbeta", &x.dbeta, &db}};
  bool ok = true;
  printf("b = w = beta against KDA%s:", means ? " (means)" : "");
  for (auto &p : pairs) {
    size_t differ = 0;
    for (size_t i = 0; i < p.x->size(); i++) differ += (*p.x)[i] != (*p.y)[i];
    // dbeta: sums of 256 rounded numbers that mostly cancel
    const double e = distance(*p.x, *p.y), limit = (p.x == &x.dbeta ? 8.0 : 1.0) / 512 * norm(*p.x);
    const bool near = std::isfinite(e) && e <= limit && norm(*p.x) > 0;
    ok &= near;
    if (differ)
      printf(" %s off by %.1e%s", p.name, e / norm(*p.x), near ? "" : "<-FAIL");
    else
      printf(" %s same bits", p.name);
  }
  printf("\n");
  ok ? passed++ : failed++;
}

static void refuse(const char *what, Case c) {
  DeltaRuleShape s = shape_of(c);
  Error e = {};
  int code = delta_rule_check(&s, &e);
  printf("refused %s: exit %d, %s%s\n", what, code, e.text, code == EXIT_CONFIG ? "" : " <-FAIL");
  code == EXIT_CONFIG ? passed++ : failed++;
}

static void check_small() {
  check_case({1, 1, 1, 1, 64, 64, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false}, 0, 0);
  check_case({2, 65, 1, 2, 64, 64, GATE_SCALAR, ERASE_SCALAR, 2, PLAIN, false, true}, 0, 0);
  check_case({1, 130, 2, 2, 128, 128, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, true, false}, 0, 0);
  check_case({1, 70, 1, 2, 128, 64, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false}, 0, 0);
  check_case({1, 66, 1, 1, 192, 128, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false}, 0, 0);
  check_case({1, 129, 1, 1, 256, 128, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false}, 0, 0);
  check_case({1, 67, 1, 1, 64, 64, GATE_SCALAR, ERASE_NONE, 1, PLAIN, false, false}, 0, 0);
  check_case({1, 70, 1, 1, 64, 64, GATE_CHANNEL, ERASE_CHANNEL, 2, PLAIN, true, true}, 0, 0);
  check_case({1, 66, 1, 1, 128, 128, GATE_CHANNEL, ERASE_SCALAR, 1, PLAIN, false, false}, 0, 0);
}

static void check_channel() {
  const int lengths[] = {1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 129, 289};
  for (int T : lengths)
    check_case({2, T, 2, 2, 64, 64, GATE_CHANNEL, ERASE_CHANNEL, 1, PLAIN, false, T % 2 == 0}, 0, 0);
  for (int T : lengths)
    check_case({1, T, 2, 2, 128, 128, GATE_CHANNEL, ERASE_SCALAR, 2, PLAIN, T > 64, T % 2 == 1}, 0, 0);
  for (Inputs x : {STRONG, FLAT, REPEATED, MIXED})
    for (int T : {7, 64, 200}) {
      check_case({1, T, 2, 2, 128, 128, GATE_CHANNEL, ERASE_CHANNEL, x == REPEATED ? 1.0f : 2.0f, x, false, false}, 0,
                 0);
      check_case({1, T, 2, 2, 64, 128, GATE_CHANNEL, ERASE_SCALAR, x == REPEATED ? 1.0f : 2.0f, x, false, false}, 0, 0);
    }
  check_case({3, 200, 2, 2, 128, 192, GATE_CHANNEL, ERASE_CHANNEL, 2, PLAIN, true, true}, 0, 0);
  check_case({1, 200, 1, 1, 128, 256, GATE_CHANNEL, ERASE_SCALAR, 1, PLAIN, false, false}, 64, 64);
}

// What the general form of the channel kernels adds: value heads that share a key head, means of gates, the bounded
// gate, no decay; and gates at their ends in all forms.
static void check_general() {
  const int lengths[] = {1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 129, 289};
  auto form = [](Case c, bool erase_mean, bool write_mean, float lower_bound) {
    c.erase_mean = erase_mean, c.write_mean = write_mean, c.lower_bound = lower_bound;
    return c;
  };
  for (int T : lengths) {
    const bool docs = T > 64, pack = T % 2 == 0;
    check_case({2, T, 1, 2, 64, 64, GATE_CHANNEL, ERASE_SCALAR, 1, PLAIN, docs, pack}, 0, 0);
    check_case({1, T, 2, 4, 64, 64, GATE_CHANNEL, ERASE_CHANNEL, 2, PLAIN, docs, !pack}, 0, 0);
    check_case(form({1, T, 2, 2, 64, 64, GATE_CHANNEL, ERASE_CHANNEL, 2, PLAIN, !docs, pack}, true, false, 0), 0, 0);
    check_case(form({1, T, 2, 2, 64, 64, GATE_CHANNEL, ERASE_CHANNEL, 1, PLAIN, docs, pack}, false, true, 0), 0, 0);
    check_case(form({1, T, 2, 2, 64, 64, GATE_CHANNEL, ERASE_CHANNEL, 1, PLAIN, docs, !pack}, true, true, 0), 0, 0);
    check_case(form({1, T, 2, 2, 64, 64, GATE_CHANNEL, ERASE_SCALAR, 1, PLAIN, docs, !pack}, false, false, -5), 0, 0);
  }
  check_case({1, 200, 2, 6, 128, 128, GATE_CHANNEL, ERASE_SCALAR, 2, PLAIN, true, true}, 0, 0);
  check_case({2, 150, 2, 6, 128, 192, GATE_CHANNEL, ERASE_CHANNEL, 1, PLAIN, true, true}, 0, 0);
  check_case(form({1, 150, 1, 3, 128, 128, GATE_CHANNEL, ERASE_CHANNEL, 2, PLAIN, false, true}, true, true, 0), 0, 0);
  check_case(form({1, 150, 1, 2, 128, 128, GATE_CHANNEL, ERASE_CHANNEL, 2, PLAIN, true, true}, true, false, 0), 64, 64);
  check_case(form({1, 150, 1, 2, 128, 256, GATE_CHANNEL, ERASE_CHANNEL, 1, PLAIN, true, false}, false, true, 0), 64,
             64);
  check_case(form({1, 150, 1, 2, 128, 128, GATE_CHANNEL, ERASE_SCALAR, 1, PLAIN, true, true}, false, false, -0.5f), 0,
             0);
  check_case({2, 150, 1, 2, 128, 128, GATE_NONE, ERASE_CHANNEL, 1, PLAIN, true, true}, 0, 0);
  check_case(form({1, 150, 2, 2, 64, 64, GATE_NONE, ERASE_CHANNEL, 1, PLAIN, false, false}, true, true, 0), 0, 0);
  for (Inputs x : {STRONG, FLAT, REPEATED, MIXED, SPIKE_CHANNEL, SPIKE_TOKEN, EIGHTY}) {
    const float beta = x == REPEATED ? 1.0f : 2.0f;
    check_case({1, 200, 1, 2, 64, 64, GATE_CHANNEL, ERASE_CHANNEL, beta, x, false, false}, 0, 0);
    check_case({1, 130, 1, 2, 128, 64, GATE_CHANNEL, ERASE_SCALAR, beta, x, true, false}, 0, 0);
    if (x < SPIKE_CHANNEL) continue;
    check_case({1, 200, 2, 2, 128, 128, GATE_CHANNEL, ERASE_CHANNEL, beta, x, false, false}, 0, 0);
    check_case({1, 200, 2, 2, 64, 64, GATE_CHANNEL, ERASE_SCALAR, beta, x, false, false}, 0, 0);
    check_case({1, 200, 2, 2, 128, 128, GATE_SCALAR, ERASE_SCALAR, beta, x, false, false}, 0, 0);
  }
  if (!emulate_only) {
    check_equal_gates(false), check_equal_gates(true);
    check_future("KDA", {1, 200, 2, 2, 128, 128, GATE_CHANNEL, ERASE_SCALAR, 1, PLAIN, false, false});
    check_future("GDN-2", {1, 200, 2, 2, 128, 128, GATE_CHANNEL, ERASE_CHANNEL, 1, PLAIN, false, false});
    check_future("KDA grouped, bounded",
                 form({1, 200, 1, 2, 64, 64, GATE_CHANNEL, ERASE_SCALAR, 1, PLAIN, false, false}, false, false, -5));
    check_future("GDN-2 grouped, means",
                 form({1, 200, 1, 2, 64, 64, GATE_CHANNEL, ERASE_CHANNEL, 1, PLAIN, false, false}, true, true, 0));
  }
}

static void check_all() {
  check_small();
  check_channel();
  check_general();
  const int lengths[] = {1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 129, 289};
  for (int T : lengths) check_case({2, T, 2, 2, 64, 64, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, T % 2 == 0}, 0, 0);
  for (int T : lengths)
    check_case({1, T, 1, 2, 128, 128, GATE_SCALAR, ERASE_SCALAR, 2, PLAIN, T > 64, T % 2 == 1}, 0, 0);
  const int dims[][2] = {{64, 64}, {128, 128}, {128, 256}, {192, 384}, {256, 256}, {256, 512}, {64, 192}, {128, 320}};
  for (auto &d : dims) check_case({1, 289, 2, 2, d[0], d[1], GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false}, 0, 0);
  for (auto &d : dims) check_case({1, 150, 2, 4, d[0], d[1], GATE_SCALAR, ERASE_SCALAR, 2, PLAIN, false, true}, 0, 0);
  check_case({5, 129, 2, 6, 128, 128, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false}, 0, 0);
  check_case({2, 289, 2, 6, 64, 128, GATE_SCALAR, ERASE_SCALAR, 2, PLAIN, true, false}, 0, 0);
  check_case({1, 200, 2, 2, 128, 128, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false}, 64, 64);
  check_case({1, 200, 1, 2, 128, 128, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false}, 64, 64);
  check_case({1, 200, 1, 1, 256, 256, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false}, 64, 64);
  for (Inputs x : {STRONG, FLAT, REPEATED, MIXED})
    for (int T : {7, 50, 64, 200})
      check_case({1, T, 2, 2, 128, 128, GATE_SCALAR, ERASE_SCALAR, x == REPEATED ? 1.0f : 2.0f, x, false, false}, 0, 0);
  check_case({1, 200, 1, 1, 256, 256, GATE_SCALAR, ERASE_SCALAR, 1, REPEATED, false, false}, 0, 0);
  for (int T : {50, 64, 289})
    check_case({2, T, 2, 2, 128, 128, GATE_NONE, ERASE_SCALAR, 2, PLAIN, T == 289, false}, 0, 0);
  for (int T : {63, 100, 289})
    check_case({2, T, 1, 4, 128, 64, GATE_SCALAR, ERASE_NONE, 1, PLAIN, T == 289, false}, 0, 0);
  if (!emulate_only) check_documents();
  refuse("HV not a multiple of H", {1, 8, 2, 3, 64, 64, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false});
  refuse("HV below H", {1, 8, 2, 1, 64, 64, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false});
  refuse("K 96", {1, 8, 1, 1, 96, 192, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false});
  refuse("V 200", {1, 8, 1, 1, 64, 200, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false});
  refuse("V 576", {1, 8, 1, 1, 64, 576, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false});
  refuse("erase gate per channel, one decay", {1, 8, 1, 1, 64, 64, GATE_SCALAR, ERASE_CHANNEL, 1, PLAIN, false, false});
  Case c = {1, 8, 1, 1, 64, 64, GATE_CHANNEL, ERASE_SCALAR, 1, PLAIN, false, false};
  c.erase_mean = true, refuse("a mean of one gate", c);
  c.erase_mean = false, c.lower_bound = -6, refuse("lower bound -6", c);
  refuse("channel gate with K 256", {1, 8, 1, 1, 256, 64, GATE_CHANNEL, ERASE_SCALAR, 1, PLAIN, false, false});
  refuse("T 0", {1, 0, 1, 1, 64, 64, GATE_SCALAR, ERASE_SCALAR, 1, PLAIN, false, false});
}

// ---------------------------------------------------------------------------------------------------------------------
// Benchmark

__global__ void fill_kernel(__nv_bfloat16 *x, size_t n, float amplitude, float shift, uint32_t seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    uint32_t z = (uint32_t)i * 2654435761u ^ (uint32_t)(i >> 32) ^ seed;
    z ^= z >> 16, z *= 0x85ebca6bu, z ^= z >> 13, z *= 0xc2b2ae35u, z ^= z >> 16;
    x[i] = __float2bfloat16(amplitude * ((z >> 8) * (2.0f / 16777216.0f) - 1.0f) + shift);
  }
}

static double median_ms(int repeats, void *flush, size_t flush_bytes, const std::function<void()> &f) {
  std::vector<float> ms;
  cudaEvent_t a, b;
  CUDA(cudaEventCreate(&a));
  CUDA(cudaEventCreate(&b));
  for (int i = 0; i < repeats + 2; i++) {
    CUDA(cudaMemsetAsync(flush, i, flush_bytes));
    CUDA(cudaEventRecord(a));
    f();
    CUDA(cudaEventRecord(b));
    CUDA(cudaEventSynchronize(b));
    float t;
    CUDA(cudaEventElapsedTime(&t, a, b));
    if (i >= 2) ms.push_back(t);
  }
  cudaEventDestroy(a), cudaEventDestroy(b);
  std::sort(ms.begin(), ms.end());
  return ms[ms.size() / 2];
}

static void bench(int B, int T, int H, int HV, int K, int V, DeltaRuleGate gate, DeltaRuleErase erase,
                  double fla_forward, double fla_both) {
  DeltaRuleShape s = {B, T, H, HV, K, V, gate, erase, (float)(1 / sqrt((double)K)), 1.0f, 0, 0, 0, false, false};
  const int decays = erase == ERASE_CHANNEL ? H : HV;
  size_t BT = (size_t)B * T, nq = BT * H * K, nv = BT * HV * V, na = BT * (gate == GATE_CHANNEL ? decays * K : HV),
         nb = BT * (erase == ERASE_CHANNEL ? H * K : HV), nw = erase == ERASE_CHANNEL ? nv : 1, nbias = na / BT,
         flush_bytes = (size_t)256 << 20;
  Device<bf16_t> q(nq), k(nq), v(nv), a(na), beta(nb), w(nw), o(nv), d_o(nv), dq(nq), dk(nq), dv(nv), da(na), dbeta(nb),
      dw(nw);
  Device<float> A_log(HV), dt_bias(nbias), dA(HV), ddt(nbias);
  DeltaRuleShape worst = s;
  worst.key_part = 64;
  Device<unsigned char> saved(delta_rule_saved_bytes(&s)), scratch(delta_rule_scratch_bytes(&worst)),
      flush(flush_bytes);
  float unit = sqrtf(3.0f / K);  // norm about 1
  fill_kernel<<<1024, 256>>>(q.p, nq, unit, 0, 1);
  fill_kernel<<<1024, 256>>>(k.p, nq, unit, 0, 2);
  fill_kernel<<<1024, 256>>>(v.p, nv, 1, 0, 3);
  fill_kernel<<<1024, 256>>>(d_o.p, nv, 1, 0, 4);
  fill_kernel<<<1024, 256>>>(a.p, na, 2, -3, 5);
  fill_kernel<<<1024, 256>>>(beta.p, nb, 2, 0, 6);
  fill_kernel<<<1024, 256>>>(w.p, nw, 2, 0, 7);
  A_log.put(Floats(HV, 0.5f)), dt_bias.put(Floats(nbias, 0.0f)), dA.put(Floats(HV, 0.0f)), ddt.put(Floats(nbias, 0.0f));
  DeltaRuleInputs I = {{q.p, 0}, {k.p, 0}, {v.p, 0}, {a.p, 0}, {beta.p, 0}, {w.p, 0}, A_log.p, dt_bias.p, NULL};
  DeltaRuleGradients D = {{dq.p, 0}, {dk.p, 0}, {dv.p, 0}, {da.p, 0}, {dbeta.p, 0}, {dw.p, 0}, dA.p, ddt.p};
  Error e = {};
  auto must = [&](int code) {
    if (code) fail_error(&e);
  };
  double chunks = (T + 63) / 64, units = B * chunks * HV, kunits = B * chunks * H;
  double KB = kunits * 64 * K * 2, VB = units * 64 * V * 2, HB = units * (double)K * V * 2, AP = units * 8192 * 2,
         VE = units * 1024;
  printf("\n%s B=%d T=%d, %d/%d heads of (%d,%d); floor at %.2f TB/s\n",
         erase == ERASE_CHANNEL ? "GDN-2"
         : gate == GATE_CHANNEL ? "KDA"
         : erase == ERASE_NONE  ? "SSD"
                                : "GDN",
         B, T, H, HV, K, V, COPY_RATE / 1e12);
  double sum = 0, floor_sum = 0;
  auto line = [&](const char *name, double bytes, const std::function<void()> &f) {
    double ms = median_ms(15, flush.p, flush_bytes, f), fl = bytes / COPY_RATE * 1e3;
    printf("  %-26s %7.3f ms  %8.1f MB  floor %6.3f ms  %5.1f%%\n", name, ms, bytes / 1e6, fl, 100 * fl / ms);
    fflush(stdout);
    sum += ms, floor_sum += fl;
    return ms;
  };
  // With channel gates the floor counts the operand tiles and the gates' logits, but not the products that the two
  // halves of the gradients hand over.
  double gates = gate == GATE_CHANNEL ? KB * (erase == ERASE_CHANNEL ? 2 : 1) : 0,
         OP = gate == GATE_CHANNEL ? 3 * KB : 0;
  double WB = erase == ERASE_CHANNEL ? VB : 0;
  line("prepare", 2 * KB + AP + VE + gates + OP, [&] { must(delta_rule_prepare(saved.p, &I, &s, 0, &e)); });
  double scan_bytes = (OP > 0 ? OP : 2 * KB) + WB + AP + VE + 3 * VB + HB,
         reverse_bytes = (OP > 0 ? OP : 2 * KB) + AP + VE + 2 * VB + HB;
  double grad_bytes = 4 * KB + VE + 5 * VB + 2 * HB + 2 * gates + 2 * WB;
  line("scan", scan_bytes, [&] { must(delta_rule_scan({o.p, 0}, saved.p, &I, &s, 0, &e)); });
  line("reverse scan", reverse_bytes, [&] {
    must(delta_rule_reverse_scan(scratch.p, {d_o.p, 0}, saved.p, &I, &s, 0, &e));
  });
  line("gradients", grad_bytes, [&] { must(delta_rule_gradients(&D, scratch.p, {d_o.p, 0}, saved.p, &I, &s, 0, &e)); });
  printf("  %-26s %7.3f ms                floor %6.3f ms  %5.1f%%\n", "sum", sum, floor_sum, 100 * floor_sum / sum);
  for (int slice : {64, 128})
    if (V % slice == 0 && slice != (V % 128 ? 64 : 128)) {
      DeltaRuleShape x = s;
      x.value_slice = slice;
      line(slice == 64 ? "scan, slice 64" : "scan, slice 128", scan_bytes, [&] {
        must(delta_rule_scan({o.p, 0}, saved.p, &I, &x, 0, &e));
      });
      line(slice == 64 ? "reverse, slice 64" : "reverse, slice 128", reverse_bytes, [&] {
        must(delta_rule_reverse_scan(scratch.p, {d_o.p, 0}, saved.p, &I, &x, 0, &e));
      });
    }
  for (int part : {64, 128})
    if (K % part == 0 && part != (K % 128 ? 64 : 128)) {
      DeltaRuleShape x = s;
      x.key_part = part;
      line(part == 64 ? "gradients, part 64" : "gradients, part 128", grad_bytes, [&] {
        must(delta_rule_gradients(&D, scratch.p, {d_o.p, 0}, saved.p, &I, &x, 0, &e));
      });
    }
  double f = median_ms(15, flush.p, flush_bytes, [&] { must(delta_rule_forward({o.p, 0}, saved.p, &I, &s, 0, &e)); });
  double fb = median_ms(15, flush.p, flush_bytes, [&] {
    must(delta_rule_forward({o.p, 0}, saved.p, &I, &s, 0, &e));
    must(delta_rule_backward(&D, scratch.p, {d_o.p, 0}, saved.p, &I, &s, 0, &e));
  });
  printf("  %-26s %7.3f ms", "forward", f);
  if (fla_forward > 0) printf("  fla %.2f (%.2fx)", fla_forward, fla_forward / f);
  printf("\n  %-26s %7.3f ms", "forward + backward", fb);
  if (fla_both > 0) printf("  fla %.2f (%.2fx)", fla_both, fla_both / fb);
  double naive = median_ms(3, flush.p, flush_bytes, [&] { naive_delta_rule_forward({o.p, 0}, &I, &s, 0); });
  CUDA(cudaGetLastError());
  printf("\n  %-26s %7.3f ms  (%.0fx)\n", "naive forward", naive, naive / f);
}

int main(int argc, char **argv) {
  program_name = "delta_rule lab";
  std::string mode = argc > 1 ? argv[1] : "check";
  if (argc > 2 || (mode != "check" && mode != "small" && mode != "general" && mode != "bench" && mode != "emulate"))
    fail(EXIT_USAGE, "unknown arguments; use: lab check | small | general | emulate | bench");
  int devices = 0;
  emulate_only = mode == "emulate";
  if (!emulate_only && (cudaGetDeviceCount(&devices) != cudaSuccess || !devices))
    fail(EXIT_CONFIG, "no CUDA device found");
  if (mode == "bench") {
    bench(8, 4096, 6, 6, 256, 512, GATE_SCALAR, ERASE_SCALAR, 1.53, 6.39);
    bench(8, 4096, 16, 16, 128, 128, GATE_SCALAR, ERASE_SCALAR, 1.32, 3.58);
    bench(8, 4096, 12, 12, 128, 256, GATE_SCALAR, ERASE_SCALAR, 0, 0);
    bench(8, 4096, 16, 16, 128, 128, GATE_CHANNEL, ERASE_SCALAR, 1.95, 9.80);
    bench(8, 4096, 16, 16, 128, 128, GATE_CHANNEL, ERASE_CHANNEL, 0, 0);
    bench(8, 4096, 1, 64, 128, 64, GATE_SCALAR, ERASE_NONE, 0, 0);
    bench(8, 4096, 8, 16, 128, 128, GATE_CHANNEL, ERASE_SCALAR, 0, 0);
    bench(8, 4096, 8, 16, 128, 128, GATE_CHANNEL, ERASE_CHANNEL, 0, 0);
    return 0;
  }
  mode == "small" ? check_small() : mode == "general" ? check_general() : check_all();
  printf("%d passed, %d failed, 0 skipped\n", passed, failed);
  return failed ? 1 : 0;
}
