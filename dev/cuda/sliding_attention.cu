// sliding_attention.cu: the lab of the attention kernels. A CPU reference in double, checks of both kernel families
// against it over awkward shapes, then times.
//
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a dev/cuda/sliding_attention.cu -o build/lab_attention
//   build/lab_attention [all | check | small | bench | sections] [mma | wgmma]
//
// `small` runs a few short cases only, for compute-sanitizer.
//
// Limits: relative error by norm against double, at most twice that of the same computation on the CPU with the
// roundings that the kernels make on purpose (rotated q, k, P, dS and every output in bf16; all else in double).
//
// Under racecheck build with -DATTENTION_RACECHECK (sliding_attention_sm90.cuh says why).
//
// Versions, one H200, B=8 T=4096, 16 heads of 128, milliseconds (forward, dK dV, dQ); all of them with RoPE 0.145 and
// row sums 0.085 beside; the same version varies by up to 7% from run to run:
//                                                             window 2048             full causal
//   0 naive_attention.cuh: one thread a query                 forward only, mode bench has its time for one row
//   1 mma.sync, 64-row tiles, 16 rows a warp                  2.02  3.44  2.28        2.61  4.44  2.95
//   2 wgmma + TMA, 128 rows, one CTA a tile, 64-key dQ steps  0.76  1.46  1.21        1.02  2.09  1.55
//   3 one CTA a multiprocessor, tiles from a counter          0.75  1.33  1.07        1.04  1.90  1.41
//   4 warpgroups take turns in the forward                    0.69  1.33  1.07        0.92  1.90  1.41
//   5 128-key dQ steps                                        0.69  1.34  1.01        0.96  1.98  1.33
//     together with RoPE and row sums                         3.26                    4.50
// Tried and dropped: S of the next step issued before dS of this one in dQ (64-key steps); the compiler serialises its
// wgmma (note C7515). Heads a section: 2 to 15 are alike, 30 cost 4%, 128 cost up to 30% (mode sections).

#include "../../gdn/cuda/sliding_attention.cu"
#include "naive_attention.cuh"

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

static int passed, failed, skipped;

static void report(bool ok, const char *what, const std::string &where) {
  ok ? passed++ : failed++;
  if (!ok) printf("FAIL %s: %s\n", where.c_str(), what);
}

// ---- data -----------------------------------------------------------------------------------------------------

static uint64_t random_state;
static double random_unit(void) {
  random_state += 0x9E3779B97F4A7C15ull;
  uint64_t z = random_state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}
static double random_normal(void) { return sqrt(-2 * log(1 - random_unit())) * cos(6.283185307179586 * random_unit()); }
static double round_bf16(double x) { return (double)__bfloat162float(__float2bfloat16((float)x)); }

struct Case {
  int B, T, Hq, Hkv, D, W;
  bool docs;
  double gain;  // standard deviation of q: large ones give extreme logits
};

struct Tensors {  // [B][T][heads][D], lse [B][Hq][T]
  std::vector<double> q, k, v, dout, o, lse, dq, dk, dv;
};

static std::string name_of(const Case &c) {
  char s[128];
  snprintf(s, sizeof s, "B%d T%d Hq%d Hkv%d D%d W%d%s%s", c.B, c.T, c.Hq, c.Hkv, c.D, c.W, c.docs ? " docs" : "",
           c.gain > 1 ? " extreme" : "");
  return s;
}

static std::vector<int32_t> doc_starts(const Case &c) {
  std::vector<int32_t> start((size_t)c.B * c.T);
  for (int b = 0; b < c.B; b++)
    for (int t = 0; t < c.T; t++) start[(size_t)b * c.T + t] = t < 37 + b ? 0 : t < 88 + b ? 37 + b : 88 + b;
  return start;
}

// ---- CPU reference --------------------------------------------------------------------------------------------

// x[D] at position t, by the angle or its negative.
static void rotate(double *x, int D, int t, double base, double sign) {
  for (int i = 0; i < D / 2; i++) {
    const double angle = t * pow(base, -2.0 * i / D), c = cos(angle), s = sign * sin(angle), a = x[i], b = x[i + D / 2];
    x[i] = a * c - b * s;
    x[i + D / 2] = b * c + a * s;
  }
}

// Forward and backward of one (batch row, kv head). rounded: with the kernels' bf16 roundings.
static void reference_head(const Case &c, double base, const std::vector<int32_t> &start, Tensors &x, int b, int hk,
                           bool rounded) {
  const int D = c.D, T = c.T, G = c.Hq / c.Hkv, W = c.W > 0 ? c.W : T;
  const double scale = 1 / sqrt((double)D);
  auto r = [&](double y) { return rounded ? round_bf16(y) : y; };
  auto at = [&](int t, int h, int H) { return (((size_t)b * T + t) * H + h) * D; };
  std::vector<double> k((size_t)T * D), q((size_t)T * D), dk((size_t)T * D), dv((size_t)T * D), p(T), o(D), dq(D);
  auto load = [&](std::vector<double> &to, const std::vector<double> &from, int h, int H) {
    for (int t = 0; t < T; t++) {
      std::copy(&from[at(t, h, H)], &from[at(t, h, H)] + D, &to[(size_t)t * D]);
      rotate(&to[(size_t)t * D], D, t, base, 1);
      for (int i = 0; i < D; i++) to[(size_t)t * D + i] = r(to[(size_t)t * D + i]);
    }
  };
  load(k, x.k, hk, c.Hkv);
  for (int h = hk * G; h < (hk + 1) * G; h++) {
    load(q, x.q, h, c.Hq);
    for (int i = 0; i < T; i++) {
      const int lo = std::max(std::max(0, i - W + 1), c.docs ? start[(size_t)b * T + i] : 0);
      const double *qi = &q[(size_t)i * D], *doi = &x.dout[at(i, h, c.Hq)];
      double m = -1e300, sum = 0, delta = 0;
      for (int j = lo; j <= i; j++) {
        double s = 0;
        for (int d = 0; d < D; d++) s += qi[d] * k[(size_t)j * D + d];
        m = std::max(m, p[j] = s * scale);
      }
      for (int j = lo; j <= i; j++) sum += exp(p[j] - m);
      std::fill(o.begin(), o.end(), 0.0);
      for (int j = lo; j <= i; j++) {
        const double w = r(exp(p[j] - m));
        for (int d = 0; d < D; d++) o[d] += w * x.v[at(j, hk, c.Hkv) + d];
      }
      for (int d = 0; d < D; d++) delta += doi[d] * (x.o[at(i, h, c.Hq) + d] = r(o[d] / sum));
      x.lse[((size_t)b * c.Hq + h) * T + i] = m + log(sum);
      std::fill(dq.begin(), dq.end(), 0.0);
      for (int j = lo; j <= i; j++) {
        const double w = exp(p[j] - m) / sum, wr = r(w);
        const double *vj = &x.v[at(j, hk, c.Hkv)];
        double dp = 0;
        for (int d = 0; d < D; d++) dp += doi[d] * vj[d];
        const double ds = r(w * (dp - delta));
        for (int d = 0; d < D; d++) {
          dv[(size_t)j * D + d] += wr * doi[d];
          dq[d] += ds * k[(size_t)j * D + d];
          dk[(size_t)j * D + d] += ds * qi[d];
        }
      }
      rotate(dq.data(), D, i, base, -1);
      for (int d = 0; d < D; d++) x.dq[at(i, h, c.Hq) + d] = r(dq[d] * scale);
    }
  }
  for (int j = 0; j < T; j++) {
    rotate(&dk[(size_t)j * D], D, j, base, -1);
    for (int d = 0; d < D; d++) {
      x.dk[at(j, hk, c.Hkv) + d] = r(dk[(size_t)j * D + d] * scale);
      x.dv[at(j, hk, c.Hkv) + d] = r(dv[(size_t)j * D + d]);
    }
  }
}

static void reference(const Case &c, double base, Tensors &x, bool rounded) {
  const size_t nq = (size_t)c.B * c.T * c.Hq * c.D, nk = (size_t)c.B * c.T * c.Hkv * c.D;
  x.o.assign(nq, 0), x.dq.assign(nq, 0), x.dk.assign(nk, 0), x.dv.assign(nk, 0);
  x.lse.assign((size_t)c.B * c.Hq * c.T, 0);
  const std::vector<int32_t> start = doc_starts(c);
  std::vector<std::thread> threads;
  for (int b = 0; b < c.B; b++)
    for (int h = 0; h < c.Hkv; h++)
      threads.emplace_back(reference_head, std::cref(c), base, std::cref(start), std::ref(x), b, h, rounded);
  for (std::thread &t : threads) t.join();
}

static Tensors random_inputs(const Case &c, uint64_t seed) {
  random_state = seed;
  Tensors x;
  const size_t nq = (size_t)c.B * c.T * c.Hq * c.D, nk = (size_t)c.B * c.T * c.Hkv * c.D;
  auto fill = [](std::vector<double> &v, size_t n, double gain) {
    v.resize(n);
    for (double &y : v) y = round_bf16(gain * random_normal());
  };
  fill(x.q, nq, c.gain), fill(x.k, nk, 1), fill(x.v, nk, 1), fill(x.dout, nq, 1);
  return x;
}

// ---- the kernels on host data ---------------------------------------------------------------------------------

template <typename X>
struct Device {
  X *p = NULL;
  size_t n;
  explicit Device(size_t count) : n(count) {
    ATTENTION_CUDA(cudaMalloc(&p, (n ? n : 1) * sizeof(X)));
    ATTENTION_CUDA(cudaMemset(p, 0xFF, n * sizeof(X)));  // NaN in bf16 and in fp32
  }
  ~Device() { cudaFree(p); }
  Device(const Device &) = delete;
  std::vector<X> host() const {
    std::vector<X> h(n);
    ATTENTION_CUDA(cudaMemcpy(h.data(), p, n * sizeof(X), cudaMemcpyDeviceToHost));
    return h;
  }
  void set(const std::vector<X> &h) {
    ATTENTION_CUDA(cudaMemcpy(p, h.data(), h.size() * sizeof(X), cudaMemcpyHostToDevice));
  }
};

struct Output {
  std::vector<bf16> o, dqkv;
  std::vector<float> lse;
  bool operator==(const Output &y) const {
    return !memcmp(o.data(), y.o.data(), o.size() * 2) && !memcmp(dqkv.data(), y.dqkv.data(), dqkv.size() * 2) &&
           !memcmp(lse.data(), y.lse.data(), lse.size() * 4);
  }
};

enum { GAP = 8 };  // elements between tokens that belong to nobody: NaN in, untouched out

// Rows [b0, b0 + B) of the case only. naive: forward only, by the naive kernel; dqkv stays as it was.
static Output run_kernels(const Case &c, const Tensors &x, AttentionPath path, int b0, int B, double base,
                          bool naive = false) {
  const int64_t width = (int64_t)(c.Hq + 2 * c.Hkv) * c.D, stride = width + GAP, tokens = (int64_t)B * c.T;
  Device<bf16> qkv(tokens * stride), dqkv(tokens * stride), o(tokens * c.Hq * c.D), dout(tokens * c.Hq * c.D);
  Device<float> lse((size_t)B * c.Hq * c.T);
  Device<int32_t> start(tokens);
  Device<float2> table((size_t)c.T * c.D / 2);
  std::vector<bf16> h = qkv.host(), hd(tokens * c.Hq * c.D);
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t from = (int64_t)b0 * c.T + t;
    bf16 *row = &h[t * stride];
    for (int i = 0; i < c.Hq * c.D; i++) {
      row[i] = __float2bfloat16((float)x.q[from * c.Hq * c.D + i]);
      hd[t * c.Hq * c.D + i] = __float2bfloat16((float)x.dout[from * c.Hq * c.D + i]);
    }
    for (int i = 0; i < c.Hkv * c.D; i++) {
      row[c.Hq * c.D + i] = __float2bfloat16((float)x.k[from * c.Hkv * c.D + i]);
      row[(c.Hq + c.Hkv) * c.D + i] = __float2bfloat16((float)x.v[from * c.Hkv * c.D + i]);
    }
  }
  qkv.set(h), dout.set(hd);
  const std::vector<int32_t> all = doc_starts(c);
  start.set(std::vector<int32_t>(all.begin() + (int64_t)b0 * c.T, all.begin() + (int64_t)(b0 + B) * c.T));
  AttentionSize n = {B, c.T, c.Hq, c.Hkv, c.D, c.W, stride, stride, path};
  Device<float> scratch(sliding_attention_scratch_floats(&n));
  bf16 *q = qkv.p, *k = q + c.Hq * c.D, *v = k + c.Hkv * c.D;
  bf16 *dq = dqkv.p, *dk = dq + c.Hq * c.D, *dv = dk + c.Hkv * c.D;
  rope_table_fill(table.p, c.T, c.D, base, 0);
  rope_forward(q, k, table.p, &n, 0);
  if (naive) {
    naive_attention_forward(o.p, lse.p, q, k, v, c.docs ? start.p : NULL, &n, 0);
    ATTENTION_CUDA(cudaGetLastError());
    ATTENTION_CUDA(cudaDeviceSynchronize());
    return {o.host(), dqkv.host(), lse.host()};
  }
  sliding_attention_forward(o.p, lse.p, scratch.p, q, k, v, c.docs ? start.p : NULL, &n, 0);
  sliding_attention_backward(dq, dk, dv, scratch.p, dout.p, o.p, lse.p, q, k, v, table.p, c.docs ? start.p : NULL, &n,
                             0);
  ATTENTION_CUDA(cudaDeviceSynchronize());
  return {o.host(), dqkv.host(), lse.host()};
}

// ---- checks ---------------------------------------------------------------------------------------------------

struct Errors {
  double o, lse, dq, dk, dv;
};

// ||a - ref|| / ||ref||. Gradients that vanish in theory (a query with one key: dS = 0) leave rounding noise only, so
// the norm counts as at least 0.02 an element.
static double relative_error(const std::vector<double> &a, const std::vector<double> &ref) {
  double d = 0, n = 0;
  for (size_t i = 0; i < ref.size(); i++) d += (a[i] - ref[i]) * (a[i] - ref[i]), n += ref[i] * ref[i];
  return sqrt(d / fmax(n, 4e-4 * (double)ref.size()));
}

static Tensors unpack(const Case &c, const Output &y, bool *gaps_kept) {
  Tensors x;
  for (bf16 e : y.o) x.o.push_back(__bfloat162float(e));
  for (float e : y.lse) x.lse.push_back(e);
  const int64_t nq = c.Hq * c.D, nk = c.Hkv * c.D, stride = nq + 2 * nk + GAP;
  for (int64_t t = 0; t < (int64_t)c.B * c.T; t++) {
    const bf16 *row = &y.dqkv[t * stride];
    for (int64_t i = 0; i < nq; i++) x.dq.push_back(__bfloat162float(row[i]));
    for (int64_t i = 0; i < nk; i++) x.dk.push_back(__bfloat162float(row[nq + i]));
    for (int64_t i = 0; i < nk; i++) x.dv.push_back(__bfloat162float(row[nq + nk + i]));
    for (int i = 0; i < GAP; i++) *gaps_kept &= *(const uint16_t *)(row + nq + 2 * nk + i) == 0xFFFF;
  }
  return x;
}

static Errors errors_of(const Tensors &x, const Tensors &ref) {
  return {relative_error(x.o, ref.o), relative_error(x.lse, ref.lse), relative_error(x.dq, ref.dq),
          relative_error(x.dk, ref.dk), relative_error(x.dv, ref.dv)};
}

// NaN fails: the comparison is written so that only a number passes.
static bool within(const Errors &e, const Errors &emulated) {
  auto ok = [](double x, double y) { return x <= 2 * y + 1e-4; };
  return ok(e.o, emulated.o) && ok(e.lse, emulated.lse) && ok(e.dq, emulated.dq) && ok(e.dk, emulated.dk) &&
         ok(e.dv, emulated.dv);
}

static const char *path_name[] = {"auto", "mma", "wgmma"};
static std::vector<AttentionPath> paths;
static double worst[3][5];     // error over limit per path and tensor
static double worst_naive[2];  // of o, lse

static void check_case(const Case &c, uint64_t seed) {
  const double base = 10000;
  Tensors ref = random_inputs(c, seed), emulated = ref;
  reference(c, base, ref, false);
  reference(c, base, emulated, true);
  const Errors allowed = errors_of(emulated, ref);
  {
    bool kept = true;
    const Tensors x = unpack(c, run_kernels(c, ref, ATTENTION_AUTO, 0, c.B, base, true), &kept);
    const double ratio[2] = {relative_error(x.o, ref.o) / (2 * allowed.o + 1e-4),
                             relative_error(x.lse, ref.lse) / (2 * allowed.lse + 1e-4)};
    for (int i = 0; i < 2; i++) worst_naive[i] = ratio[i] <= worst_naive[i] ? worst_naive[i] : ratio[i];
    report(ratio[0] <= 1 && ratio[1] <= 1, "error of o or lse", name_of(c) + " naive");
  }
  for (AttentionPath path : paths) {
    const std::string where = name_of(c) + " " + path_name[path];
    const Output y = run_kernels(c, ref, path, 0, c.B, base);
    bool gaps_kept = true;
    const Tensors x = unpack(c, y, &gaps_kept);
    const Errors e = errors_of(x, ref);
    const double ratio[5] = {e.o / (2 * allowed.o + 1e-4), e.lse / (2 * allowed.lse + 1e-4),
                             e.dq / (2 * allowed.dq + 1e-4), e.dk / (2 * allowed.dk + 1e-4),
                             e.dv / (2 * allowed.dv + 1e-4)};
    for (int i = 0; i < 5; i++) worst[path][i] = ratio[i] <= worst[path][i] ? worst[path][i] : ratio[i];
    const bool ok = within(e, allowed);
    report(ok, "error", where);
    if (!ok)
      printf("     o %.2e (emulated %.2e) lse %.2e (%.2e) dq %.2e (%.2e) dk %.2e (%.2e) dv %.2e (%.2e)\n", e.o,
             allowed.o, e.lse, allowed.lse, e.dq, allowed.dq, e.dk, allowed.dk, e.dv, allowed.dv);
    report(gaps_kept, "wrote between the tokens", where);
    report(run_kernels(c, ref, path, 0, c.B, base) == y, "a second launch gives other bits", where);
    for (int b = 0; b < c.B && c.B > 1; b++) {
      const Output alone = run_kernels(c, ref, path, b, 1, base);
      Output part;
      part.o.assign(y.o.begin() + y.o.size() / c.B * b, y.o.begin() + y.o.size() / c.B * (b + 1));
      part.dqkv.assign(y.dqkv.begin() + y.dqkv.size() / c.B * b, y.dqkv.begin() + y.dqkv.size() / c.B * (b + 1));
      part.lse.assign(y.lse.begin() + y.lse.size() / c.B * b, y.lse.begin() + y.lse.size() / c.B * (b + 1));
      report(alone == part, "a batch row depends on its neighbours", where);
    }
  }
}

// Only query i has a gradient: keys i-W and older, and later ones, get exactly 0; keys i-W+1 .. i do not.
static void check_edges(int D, int W, int i) {
  const Case c = {1, 289, 2, 1, D, W, false, 1};
  Tensors x = random_inputs(c, 77 + W);
  for (int t = 0; t < c.T; t++)
    if (t != i) std::fill(&x.dout[(size_t)t * 2 * D], &x.dout[(size_t)t * 2 * D] + 2 * D, 0.0);
  for (AttentionPath path : paths) {
    bool kept = true, ok = true;
    const Tensors y = unpack(c, run_kernels(c, x, path, 0, 1, 10000), &kept);
    for (int j = 0; j < c.T; j++) {
      double dk = 0, dv = 0;
      for (int d = 0; d < D; d++) dk += fabs(y.dk[(size_t)j * D + d]), dv += fabs(y.dv[(size_t)j * D + d]);
      const bool seen = j <= i && j > i - W;
      ok &= seen ? dv > 0 && (W == 1 || dk > 0) : dv == 0 && dk == 0;
    }
    report(ok, "window edge of dk, dv", name_of(c) + " " + path_name[path]);
  }
}

// The checks must notice a window that is one key off, another RoPE base, a lost document boundary.
static void check_sensitivity(void) {
  const Case c = {1, 289, 2, 1, 128, 100, true, 1};
  Tensors ref = random_inputs(c, 5), emulated = ref;
  reference(c, 10000, ref, false);
  reference(c, 10000, emulated, true);
  const Errors allowed = errors_of(emulated, ref);
  Case wider = c, merged = c;
  wider.W = 101, merged.docs = false;
  for (AttentionPath path : paths) {
    bool kept = true;
    report(!within(errors_of(unpack(c, run_kernels(wider, ref, path, 0, 1, 10000), &kept), ref), allowed),
           "window + 1 not noticed", path_name[path]);
    report(!within(errors_of(unpack(c, run_kernels(merged, ref, path, 0, 1, 10000), &kept), ref), allowed),
           "lost documents not noticed", path_name[path]);
    report(!within(errors_of(unpack(c, run_kernels(c, ref, path, 0, 1, 10500), &kept), ref), allowed),
           "other RoPE base not noticed", path_name[path]);
  }
}

static void check_same_as_full(int T) {  // windows of T and more are the whole past, bit for bit
  for (AttentionPath path : paths) {
    Case c = {2, T, 2, 2, 128, 0, false, 1};
    const Tensors x = random_inputs(c, 9);
    const Output full = run_kernels(c, x, path, 0, 2, 10000);
    for (int W : {T, T + 1, 1 << 20}) {
      c.W = W;
      report(run_kernels(c, x, path, 0, 2, 10000) == full, "W >= T differs from full causal", name_of(c));
    }
  }
}

static void check_refusals(void) {
  const AttentionSize good = {1, 16, 4, 2, 64, 0, 512, 512, ATTENTION_AUTO};
  Error err;
  report(sliding_attention_check(&good, &err) == 0, "a good size is refused", "check");
  auto refuse = [&](AttentionSize n, int code, const char *what) {
    report(sliding_attention_check(&n, &err) == code && strlen(err.text) > 20, what, "check");
  };
  AttentionSize n = good;
  n.D = 96, refuse(n, EXIT_CONFIG, "head dim 96"), n = good;
  n.Hkv = 3, refuse(n, EXIT_CONFIG, "4 heads over 3"), n = good;
  n.T = 0, refuse(n, EXIT_CONFIG, "no tokens"), n = good;
  n.qkv_stride = 515, refuse(n, EXIT_INTERNAL, "odd stride"), n = good;
}

static void check_all(bool small) {
  uint64_t seed = 1;
  if (small) {
    for (int D : {64, 128})
      for (int W : {0, 50}) check_case({2, 161, 2, 1, D, W, W > 0, 1}, seed++);
    check_case({4, 65, 80, 40, 64, 0, false, 1}, seed++);
    return;
  }
  check_refusals();
  for (int T : {1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 129, 289}) {
    check_case({2, T, 2, 1, 128, 0, false, 1}, seed++);
    check_case({1, T, 2, 2, 64, 17, false, 1}, seed++);
    check_case({2, T, 4, 2, 64, 0, false, 1}, seed++);
    check_case({1, T, 2, 2, 128, 40, T > 88, 1}, seed++);
  }
  for (int D : {64, 128})
    for (int W : {1, 2, 63, 64, 65, 100, 128, 144, 288, 289, 290}) check_case({1, 289, 2, 1, D, W, false, 1}, seed++);
  for (int D : {64, 128})
    for (int W : {0, 20, 100}) {
      check_case({2, 129, 3, 1, D, W, true, 1}, seed++);
      check_case({2, 289, 2, 2, D, W, true, 1}, seed++);
      check_case({1, 289, 2, 2, D, W, false, 30}, seed++);
    }
  check_case({1, 1111, 4, 2, 128, 0, false, 1}, seed++);
  check_case({2, 1111, 2, 2, 128, 300, false, 1}, seed++);
  check_case({2, 1024, 2, 2, 64, 256, false, 1}, seed++);
  check_case({1, 1111, 4, 2, 128, 300, true, 1}, seed++);
  // More tiles than multiprocessors: a CTA works through several.
  check_case({8, 161, 32, 16, 64, 50, true, 1}, seed++);
  check_case({4, 289, 40, 20, 128, 0, false, 1}, seed++);
  check_case({4, 289, 40, 20, 128, 100, true, 1}, seed++);
  for (int D : {64, 128})
    for (int W : {1, 64, 100, 128}) check_edges(D, W, 200), check_edges(D, W, 256);
  check_sensitivity();
  check_same_as_full(100), check_same_as_full(289);
}

// ---- times ----------------------------------------------------------------------------------------------------

static __global__ void random_fill_kernel(bf16 *x, int64_t n, uint32_t seed) {
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    float sum = 0;  // four uniform numbers: close enough to a normal one
    for (int r = 0; r < 4; r++) {
      uint32_t z = (uint32_t)i * 2654435761u + seed + r * 0x9E3779B9u;
      z = (z ^ (z >> 16)) * 0x85EBCA6Bu, z = (z ^ (z >> 13)) * 0xC2B2AE35u, z ^= z >> 16;
      sum += (float)z * 0x1p-32f - 0.5f;
    }
    x[i] = __float2bfloat16(sum * 1.732f);
  }
}

static double median_ms(const std::function<void()> &f, int N = 15) {
  cudaEvent_t start, stop;
  ATTENTION_CUDA(cudaEventCreate(&start));
  ATTENTION_CUDA(cudaEventCreate(&stop));
  std::vector<float> ms(N);
  for (int i = -std::min(N, 3); i < N; i++) {
    ATTENTION_CUDA(cudaEventRecord(start));
    f();
    ATTENTION_CUDA(cudaEventRecord(stop));
    ATTENTION_CUDA(cudaEventSynchronize(stop));
    if (i >= 0) ATTENTION_CUDA(cudaEventElapsedTime(&ms[i], start, stop));
  }
  std::sort(ms.begin(), ms.end());
  cudaEventDestroy(start), cudaEventDestroy(stop);
  return ms[N / 2];
}

// The delta kernel does this in a real backward; here one kernel is timed many times.
static void zero_counters(float *scratch) { ATTENTION_CUDA(cudaMemsetAsync(counters_of(scratch), 0, 16)); }

template <int D>
static void bench(int B, int T, int H, int W, int section = 0) {
  const int64_t width = (int64_t)3 * H * D, tokens = (int64_t)B * T;
  Device<bf16> qkv(tokens * width), dqkv(tokens * width), o(tokens * H * D), dout(tokens * H * D);
  Device<float> lse((size_t)B * H * T), scratch(4 + 2 * (size_t)B * H * ((T + 127) / 128 * 128));
  Device<float2> table((size_t)T * D / 2);
  random_fill_kernel<<<1024, 256>>>(qkv.p, tokens * width, 1);
  random_fill_kernel<<<1024, 256>>>(dout.p, tokens * H * D, 2);
  rope_table_fill(table.p, T, D, 10000, 0);
  bf16 *q = qkv.p, *k = q + H * D, *v = k + H * D, *dq = dqkv.p, *dk = dq + H * D, *dv = dk + H * D;
  double pairs = 0;
  for (int i = 0; i < T; i++) pairs += std::min(i + 1, W > 0 ? W : T);
  const double product = 2 * pairs * D * H * B;  // floating-point operations of one of the seven products
  for (AttentionPath path : paths) {
    AttentionSize n = {B, T, H, H, D, W, width, width, path};
    AttentionArgs a = arguments_of(&n, NULL);
    if (section > 0) {  // how many heads share the L2 cache best
      a.section = section;
      printf("%-5s D%-3d W%-5d section %-3d forward %.3f  backward kv %.3f  backward q %.3f ms\n", path_name[path], D,
             W, section, median_ms([&] { forward_launch<D>(o.p, lse.p, scratch.p, q, k, v, &n, a, 0); }),
             median_ms([&] {
               zero_counters(scratch.p), backward_kv_launch<D>(dk, dv, scratch.p, dout.p, q, k, v, table.p, &n, a, 0);
             }),
             median_ms([&] {
               zero_counters(scratch.p), backward_q_launch<D>(dq, scratch.p, dout.p, q, k, v, table.p, &n, a, 0);
             }));
      continue;
    }
    auto line = [&](const char *what, double ms, double products, double bytes) {
      printf("%-5s D%-3d W%-5d %-12s %7.3f ms", path_name[path], D, W, what, ms);
      if (products > 0)
        printf("  %6.3f TFLOP %5.0f TFLOP/s %5.1f%% of 675", products * product * 1e-12, products * product / ms * 1e-9,
               products * product / ms * 1e-9 / 6.75);
      if (bytes > 0) printf("  %6.3f GB %6.0f GB/s", bytes * 1e-9, bytes / ms * 1e-6);
      printf("\n");
    };
    const double row = (double)tokens * H * D * 2;
    double total = 0, ms;
    total += ms = median_ms([&] { rope_forward(q, k, table.p, &n, 0); });
    line("rope", ms, 0, 4 * row);
    total += ms = median_ms([&] { sliding_attention_forward(o.p, lse.p, scratch.p, q, k, v, NULL, &n, 0); });
    line("forward", ms, 2, 0);
    total += ms = median_ms([&] { delta_launch<D>(scratch.p, dout.p, o.p, lse.p, a, 0); });
    line("delta", ms, 0, 2 * row);
    total += ms = median_ms([&] {
      zero_counters(scratch.p), backward_kv_launch<D>(dk, dv, scratch.p, dout.p, q, k, v, table.p, &n, a, 0);
    });
    line("backward kv", ms, 4, 0);
    total += ms = median_ms(
        [&] { zero_counters(scratch.p), backward_q_launch<D>(dq, scratch.p, dout.p, q, k, v, table.p, &n, a, 0); });
    line("backward q", ms, 3, 0);
    line("all", total, 7, 0);  // as if it were the five products of an atomic backward: comparable with others
  }
  if (section > 0) return;
  AttentionSize n = {1, T, H, H, D, W, width, width, ATTENTION_AUTO};
  const double ms = median_ms([&] { naive_attention_forward(o.p, lse.p, q, k, v, NULL, &n, 0); }, 1);
  ATTENTION_CUDA(cudaGetLastError());
  printf("naive D%-3d W%-5d forward, one row of %d %7.3f ms  %6.3f TFLOP %6.2f TFLOP/s\n", D, W, B, ms,
         2 * product / B * 1e-12, 2 * product / B / ms * 1e-9);
}

int main(int argc, char **argv) {
  const std::string mode = argc > 1 ? argv[1] : "all";
  program_name = "lab_attention";
  setvbuf(stdout, NULL, _IOLBF, 0);  // what was found before a hang is on paper
  if (mode != "all" && mode != "check" && mode != "small" && mode != "bench" && mode != "sections")
    fail(EXIT_USAGE, "mode %s: one of all, check, small, bench, sections", mode.c_str());
  const std::string only = argc > 2 ? argv[2] : "";
  if (only != "" && only != "mma" && only != "wgmma") fail(EXIT_USAGE, "path %s: mma or wgmma", only.c_str());
  if (only != "wgmma") paths.push_back(ATTENTION_MMA);
  if (only != "mma") {
    if (device_capability() == 90)
      paths.push_back(ATTENTION_WGMMA);
    else
      skipped++, printf("skipped: wgmma kernels need compute capability 9.0\n");
  }
  if (mode == "sections")
    for (int section : {2, 4, 8, 15, 30, 128})
      bench<128>(8, 4096, 16, 2048, section), bench<128>(8, 4096, 16, 0, section);
  if (mode != "bench" && mode != "sections") {
    check_all(mode == "small");
    for (AttentionPath p : paths)
      printf("worst error / limit, %-5s: o %.2f lse %.2f dq %.2f dk %.2f dv %.2f\n", path_name[p], worst[p][0],
             worst[p][1], worst[p][2], worst[p][3], worst[p][4]);
    printf("worst error / limit, naive: o %.2f lse %.2f\n", worst_naive[0], worst_naive[1]);
  }
  if (mode == "all" || mode == "bench") {
    bench<128>(8, 4096, 16, 2048);
    bench<128>(8, 4096, 16, 0);
    bench<64>(8, 4096, 32, 2048);
  }
  printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  return failed ? 1 : 0;
}
