// bench_cpu.c: how fast the CPU engine is, and how fast this machine would let it be.
//
//   make bench      or      build/bench_cpu [--threads N] [--seconds S] [--model "mamba2 gdn swa"] [--steps N]
//
// 1. The machine: multiply-adds in registers, and copies in memory and in cache. These give the floor of every other
//    line: the larger of (operations / peak) and (bytes that must move / copy bandwidth in cache), which no code beats.
// 2. Matrix products at a small model's shapes, beside OpenBLAS in the same run. Exit status 1 when one takes more than
//    3 times OpenBLAS's time, when the two results differ, or when the engine's exponential is inaccurate.
// 3. Whole training steps of four models, and each of their parts, timed one by one on the buffers of the model.
// Every time is the least of many repeats, so that other work on the machine disturbs it little. Operations are those
// that the method needs (causal halves are counted as halves); exponentials are not counted.
// --steps N: only N steps of --model, for a profiler.

#include "../../train_gdn.c"

#include <dlfcn.h>
#include <omp.h>
#include <time.h>
#include "gdn/init.h"     // init_tensor
#include "gdn/philox.h"   // random_uniform
#include "gdn/presets.h"  // pattern_parse

static double seconds_wanted = 0.06;  // of repeats for each line
static double peak, copy_cache;       // all threads: flop/s, bytes/s (read and written)

// One thread: its own CPU time, which other programs on the machine disturb least; more: the time on the wall.
static double now(void) {
  struct timespec t;
  clock_gettime(omp_get_max_threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Least time of the statement that follows, over repeats; `before` is not timed.
#define LEAST(best, before, ...)                                    \
  do {                                                              \
    best = INFINITY;                                                \
    double end_ = now() + seconds_wanted;                           \
    for (int repeat_ = 0; repeat_ < 3 || now() < end_; repeat_++) { \
      before;                                                       \
      double t_ = now();                                            \
      __VA_ARGS__;                                                  \
      t_ = now() - t_;                                              \
      if (t_ < best) best = t_;                                     \
    }                                                               \
  } while (0)

static real *random_array(int64_t n, uint64_t seed, real bound) {
  real *p = (real *)alloc_array(n, sizeof(real), "benchmark");
  for (int64_t i = 0; i < n; i++) p[i] = bound * (real)(2 * random_uniform(seed, 0, (uint64_t)i) - 1);
  return p;
}

// ----------------------------------------------------------------------------
// the machine

enum { CHAINS = 16 };  // independent sums: more than latency times the multiply-adds of a cycle

static double fma_flops(int64_t n) {  // floating-point operations of n rounds, which it does
  vec c[CHAINS], x = vec_set((real)0.999), y = vec_set((real)0.001);
#pragma GCC unroll 16
  for (int i = 0; i < CHAINS; i++) c[i] = vec_set((real)i);
  for (int64_t k = 0; k < n; k++) {
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) c[i] = c[i] * x + y;
  }
  vec sum = c[0];
#pragma GCC unroll 16
  for (int i = 1; i < CHAINS; i++) sum += c[i];
  volatile real keep = sum[0];
  (void)keep;
  return 2.0 * LANES * CHAINS * (double)n;
}

static void fma_on_all(int64_t n) {
#pragma omp parallel
  fma_flops(n);
}

static double fma_rate(void) {  // of all threads together
  double best;
  const int64_t n = 400000;
  LEAST(best, , fma_on_all(n));
  return 2.0 * LANES * CHAINS * (double)n * omp_get_max_threads() / best;
}

static void copy_on_all(char *to, const char *from, int64_t part, int passes) {
#pragma omp parallel
  for (int p = 0; p < passes; p++)
    memcpy(to + part * omp_get_thread_num(), from + part * omp_get_thread_num(), (size_t)part);
}

static double copy_rate(int64_t bytes) {  // bytes read and written per second, arrays of `bytes`, split over threads
  char *a = (char *)alloc_array(bytes, 1, "benchmark"), *b = (char *)alloc_array(bytes, 1, "benchmark");
  double best;
  int threads = omp_get_max_threads(), passes = bytes < (1 << 24) ? 16 : 1;
  memset(a, 1, (size_t)bytes), memset(b, 2, (size_t)bytes);
  LEAST(best, , copy_on_all(b, a, bytes / threads / 64 * 64, passes));
  double moved = 2.0 * (double)(bytes / threads / 64 * 64 * threads) * passes;
  free(a), free(b);
  return moved / best;
}

static void bench_machine(void) {
  int threads = omp_get_max_threads();
  peak = fma_rate(), copy_cache = copy_rate((int64_t)4 << 20);
  double copy_memory = copy_rate((int64_t)256 << 20);
  omp_set_num_threads(1);
  double one = fma_rate();
  omp_set_num_threads(threads);
  printf("machine: %d threads, vectors of %d bytes, times of %s\n", threads, VEC_BYTES,
         threads == 1 ? "the thread's CPU clock" : "the wall clock");
  double load;
  if (getloadavg(&load, 1) == 1 && load > 1)
    printf("  BUSY: %.1f other programs want to run; times with more than one thread come out too long\n", load);
  printf("  multiply-adds in registers  %7.1f GFLOP/s one core, %.1f on %d\n", one / 1e9, peak / 1e9, threads);
  printf("  copy, read + written        %7.1f GB/s in memory (256 MiB), %.1f in cache (4 MiB)\n", copy_memory / 1e9,
         copy_cache / 1e9);
}

__attribute__((noinline)) static void exp_library(real *y, const real *x, int n) {
  for (int i = 0; i < n; i++) y[i] = R(exp)(x[i]);
}
__attribute__((noinline)) static void exp_ours(real *y, const real *x, int n) {
  for (int i = 0; i < n; i++) y[i] = exp_nonpositive(x[i]);
}

// The exponential behind SiLU, softmax and decay, against the library's. Returns 1 when its error is above 2 ulp.
static int bench_exp(void) {
  enum { COUNT = 1 << 16 };
  static real x[COUNT], y[COUNT];
  double ours, library, worst = 0;
  for (int i = 0; i < COUNT; i++) x[i] = (real)(-87.0 * i / COUNT);
  LEAST(library, , exp_library(y, x, COUNT));
  LEAST(ours, , exp_ours(y, x, COUNT));
  for (int i = 0; i < COUNT; i++) {
    int exponent;
    double want = exp((double)x[i]), error;
    frexp(want, &exponent);
    error = fabs((double)y[i] - want) / ldexp(1, exponent - (sizeof(real) == 4 ? FLT_MANT_DIG : DBL_MANT_DIG));
    if (!(error <= worst)) worst = error;
  }
  printf("  exp, one thread             %7.2f ns, the library's %.2f ns; largest error %.2f ulp (limit 2)\n\n",
         ours / COUNT * 1e9, library / COUNT * 1e9, worst);
  return !(worst <= 2);
}

// ----------------------------------------------------------------------------
// matrix products beside OpenBLAS

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };  // of the CBLAS interface
typedef void (*SgemmFn)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *,
                        int);

static SgemmFn openblas_load(void) {
  unsetenv("OPENBLAS_CORETYPE");  // let it choose its fastest kernel
  unsetenv("OPENBLAS_L2_SIZE");
  void *lib = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
  SgemmFn sgemm = lib && sizeof(real) == sizeof(float) ? (SgemmFn)dlsym(lib, "cblas_sgemm") : NULL;
  void (*set_threads)(int) = lib ? (void (*)(int))dlsym(lib, "openblas_set_num_threads") : NULL;
  const char *(*config)(void) = lib ? (const char *(*)(void))dlsym(lib, "openblas_get_config") : NULL;
  const char *(*core)(void) = lib ? (const char *(*)(void))dlsym(lib, "openblas_get_corename") : NULL;
  if (!sgemm || !set_threads) {
    printf("OpenBLAS is not installed (libopenblas.so.0): nothing to compare with; Debian: apt install libopenblas0\n");
    return NULL;
  }
  set_threads(omp_get_max_threads());
  printf("OpenBLAS: %s, kernel %s\n", config ? config() : "?", core ? core() : "?");
  return sgemm;
}

static double relative_difference(const real *a, const real *b, int64_t n) {
  double num = 0, den = 0;
  for (int64_t i = 0; i < n; i++) num += ((double)a[i] - b[i]) * ((double)a[i] - b[i]), den += (double)b[i] * b[i];
  return sqrt(num / den);  // not a number when one of them is not
}

// Returns the number of products that are too slow or differ.
static int bench_products(int64_t N) {
  static const struct {
    const char *name;
    int in, out;
  } layers[] = {
      {"input projections", 256, 1056},
      {"output projection", 256, 256},
      {"MLP gate and up", 256, 1408},
      {"MLP down", 704, 256},
      {"head", 256, 264},
  };
  SgemmFn sgemm = openblas_load();
  double worst = 0, sum_ours = 0, sum_theirs = 0, sum_floor = 0;
  int wrong = 0;
  printf("matrix products, %lld tokens     %9s %9s %9s %9s  %s\n", (long long)N, "ms", "GFLOP/s", "% of peak",
         "OpenBLAS", "time of ours / theirs");
  for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
    int in = layers[i].in, out = layers[i].out, n = (int)N;
    real *x = random_array(N * in, 1, 1), *w = random_array((int64_t)out * in, 2, 1), *dy = random_array(N * out, 3, 1);
    int64_t most = N * (in > out ? in : out);
    real *ours = (real *)alloc_zeroed(most, sizeof(real), "benchmark");
    real *theirs = (real *)alloc_zeroed(most, sizeof(real), "benchmark");
    for (int pass = 0; pass < 3; pass++) {
      static const char *const pass_name[] = {"forward", "d input", "d weight"};
      int64_t count = pass == 0 ? N * out : pass == 1 ? N * in : (int64_t)out * in;
      double a = INFINITY, b = INFINITY, t, flops = 2.0 * (double)N * in * out;
      for (int round = 0; round < 3; round++) {  // in turn, so that a busy moment of the machine hits both
        if (pass == 0) LEAST(t, , linear_forward(ours, out, x, in, w, N, in, out, 0));
        if (pass == 1) LEAST(t, , linear_backward_input(ours, in, dy, out, w, N, in, out, 0));
        if (pass == 2)
          LEAST(t, memset(ours, 0, (size_t)count * sizeof(real)),
                linear_backward_weight(ours, dy, out, x, in, N, in, out));
        a = t < a ? t : a;
        if (!sgemm) continue;
        if (pass == 0)
          LEAST(t, ,
                sgemm(ROW_MAJOR, NO_TRANS, TRANS, n, out, in, 1, (float *)x, in, (float *)w, in, 0, (float *)theirs,
                      out));
        if (pass == 1)
          LEAST(t, ,
                sgemm(ROW_MAJOR, NO_TRANS, NO_TRANS, n, in, out, 1, (float *)dy, out, (float *)w, in, 0,
                      (float *)theirs, in));
        if (pass == 2)
          LEAST(t, memset(theirs, 0, (size_t)count * sizeof(real)),
                sgemm(ROW_MAJOR, TRANS, NO_TRANS, out, in, n, 1, (float *)dy, out, (float *)x, in, 1, (float *)theirs,
                      in));
        b = t < b ? t : b;
      }
      printf("  %-18s %-9s %12.3f %9.1f %9.1f", layers[i].name, pass_name[pass], a * 1e3, flops / a / 1e9,
             100 * flops / a / peak);
      sum_ours += a, sum_floor += flops / peak;
      if (sgemm) {
        double differ = relative_difference(ours, theirs, count);
        int bad = !(differ < 1e-5) || a > 3 * b;  // random signs: sqrt(2048) roundings of 6e-8 are 3e-6
        printf(" %9.3f  %.2f%s", b * 1e3, a / b, !(differ < 1e-5) ? "  RESULTS DIFFER" : bad ? "  TOO SLOW" : "");
        wrong += bad, sum_theirs += b;
        if (a / b > worst) worst = a / b;
      }
      printf("\n");
    }
    free(x), free(w), free(dy), free(ours), free(theirs);
  }
  printf("  sum: %.3f ms, %.0f%% of peak", sum_ours * 1e3, 100 * sum_floor / sum_ours);
  if (sgemm)
    printf("; OpenBLAS %.3f ms; ours / theirs %.2f, worst %.2f (limit 3)", sum_theirs * 1e3, sum_ours / sum_theirs,
           worst);
  printf("\n\n");
  return wrong;
}

// ----------------------------------------------------------------------------
// training steps and their parts

typedef struct {
  const char *name;
  double seconds, flops, bytes, floor;  // sums over the layers
} Part;
static Part parts[32];
static int n_parts;

static void part_add(const char *name, double seconds, double flops, double elements) {
  double bytes = elements * sizeof(real), floor = flops / peak > bytes / copy_cache ? flops / peak : bytes / copy_cache;
  int i = 0;
  while (i < n_parts && strcmp(parts[i].name, name)) i++;
  if (i == n_parts) parts[n_parts++] = (Part){name, 0, 0, 0, 0};
  parts[i].seconds += seconds, parts[i].flops += flops, parts[i].bytes += bytes, parts[i].floor += floor;
}

// One part of one layer: its least time, operations, and elements that must be read or written.
#define PART(name, flops, elements, ...)                        \
  do {                                                          \
    double best_;                                               \
    LEAST(best_, , __VA_ARGS__);                                \
    part_add(name, best_, (double)(flops), (double)(elements)); \
  } while (0)

static void product_parts(Engine *e, int64_t w, const real *x, int64_t ldx, const real *y, int64_t ldy, int64_t N,
                          int in, int out) {
  double flops = 2.0 * (double)N * in * out, elements = (double)N * (in + out) + (double)in * out;
  real *tmp = (real *)alloc_zeroed(N * (in > out ? in : out), sizeof(real), "benchmark");
  PART("matrix products, forward", flops, elements, linear_forward(tmp, out, x, ldx, param(e, w), N, in, out, 0));
  PART("matrix products, d input", flops, elements, linear_backward_input(tmp, in, y, ldy, param(e, w), N, in, out, 0));
  PART("matrix products, d weight", flops, elements, linear_backward_weight(grad(e, w), y, ldy, x, ldx, N, in, out));
  free(tmp);
}

static void recurrent_parts(Engine *e, const LayerLayout *l, const LayerActs *a, const MixerSizes *m, int64_t N) {
  const Config *c = &e->c;
  const DeltaShape *s = &m->delta;
  ConvShape conv = {e->B, e->T, m->conv_cols, l->conv >= 0 ? c->conv_size : 0};
  double ch = (double)N * m->conv_cols, taps = conv.taps, val = (double)N * m->val, key = (double)N * m->key;
  PART("short conv, forward", (2 * taps + 1) * ch, 3 * ch,
       short_conv_forward(a->y, a->pre, a->packed + l->conv_first, m->rows, NULL, param(e, l->conv),
                          param(e, l->conv_bias), e->start, conv));
  real *dy = random_array(N * m->conv_cols, 4, (real)1e-3);
  PART("short conv, backward", (4 * taps + 1) * ch, 4 * ch,
       (memcpy(e->dy, dy, (size_t)(N * m->conv_cols) * sizeof(real)),
        short_conv_backward(e->dpacked + l->conv_first, grad(e, l->conv), grad(e, l->conv_bias), e->dy, a->pre,
                            a->packed + l->conv_first, m->rows, param(e, l->conv), e->start, conv)));
  free(dy);
  double gates = 2.0 * N * (l->a_log >= 0 ? m->gates : 0) + 2.0 * N *
                                                                (l->mixer == MIX_GDN2     ? m->key + m->val
                                                                 : l->mixer == MIX_MAMBA2 ? m->gates
                                                                                          : c->v_heads);
  PART("gates, forward", 0, gates, gates_forward(e, l, a, m, N));
  if (l->mixer != MIX_MAMBA2) {
    PART("q and k norm, forward", 6 * key, 4 * key, {
      qk_norm_forward(a->q, a->y, m->conv_cols, N, c->heads, c->head_k, c->qk_norm, c->l2_eps);
      qk_norm_forward(a->k, a->y + m->key, m->conv_cols, N, c->heads, c->head_k, c->qk_norm, c->l2_eps);
    });
    PART("q and k norm, backward", 12 * key, 6 * key, {
      qk_norm_backward(e->dy, e->dq, a->y, m->conv_cols, N, c->heads, c->head_k, c->qk_norm, c->l2_eps);
      qk_norm_backward(e->dy + m->key, e->dk, a->y + m->key, m->conv_cols, N, c->heads, c->head_k, c->qk_norm,
                       c->l2_eps);
    });
  }
  // delta rule: operations of one chunk and head from the equations above delta_rule_forward; C C K for a lower
  // triangle
  double C = CHUNK, K = s->K, V = s->V, units = (double)e->B * s->HV * ((s->T + CHUNK - 1) / CHUNK),
         states = units * K * V;
  int erase = s->erase != ERASE_NONE;
  double forward = (1 + erase) * C * C * K + (1 + erase) * C * C * V + (4 + 2 * erase) * C * K * V;
  double backward = (3 + 3 * erase) * C * C * K + (2 + 3 * erase) * C * C * V + (8 + 6 * erase) * C * K * V;
  double in_elements = 2 * key + val + (a->g ? (double)N * m->gates : 0) +
                       (s->erase == ERASE_CHANNEL ? key
                        : s->erase == ERASE_HEAD  ? (double)N * s->HV
                                                  : 0) +
                       (s->channel_write ? val : (double)N * s->HV);
  DeltaInputs in = delta_inputs(e, l, a, m);
  DeltaGradients dg = {e->dq, e->dk, l->mixer == MIX_MAMBA2 ? e->dy : e->dy + 2 * m->key, m->conv_cols, e->dg, e->db,
                       e->dw, NULL};
  PART("delta rule, forward", units * forward, in_elements + val + states,
       delta_rule_forward(a->o, a->states, NULL, &in, NULL, s));
  PART("delta rule, backward", units * backward, 2 * in_elements + val + states,
       delta_rule_backward(&dg, e->d_o, NULL, a->states, &in, s));
  if (l->a_log >= 0) {
    real *da = (real *)alloc_array(N * m->gates, sizeof(real), "benchmark");
    const real *pre = l->f_up >= 0 ? a->f : a->packed + l->a;
    PART("gates, backward", 0, 4.0 * N * m->gates,
         decay_backward(da, m->gates, grad(e, l->a_log), grad(e, l->dt_bias), e->dg, a->g, pre,
                        l->f_up >= 0 ? m->gates : m->rows, param(e, l->a_log), param(e, l->dt_bias), N, m->gates,
                        m->per_head, 0));
    free(da);
  }
  if (l->mixer == MIX_GDN2)
    PART("gates, backward", 0, 3 * (key + val), {
      gate_backward(e->dpacked + l->b, e->db, a->packed + l->b, m->rows, N, m->key, c->head_k, c->erase, c->beta_max);
      gate_backward(e->dpacked + l->w, e->dw, a->packed + l->w, m->rows, N, m->val, c->head_v, c->write, 1);
    });
  // backward into spare buffers: in the model it overwrites its input
  if (l->mixer == MIX_MAMBA2) {
    PART("output norm, forward", 8 * val, 4 * val,
         mamba2_output_forward(a->oy, a->o, a->y, m->conv_cols, a->packed + l->gate, m->rows, param(e, l->d_skip),
                               param(e, l->o_norm), N, s->HV, s->V, c->mamba_groups, c->norm_eps));
    PART(
        "output norm, backward", 24 * val, 7 * val,
        mamba2_output_backward(e->dgate, e->dskip, m->val, e->dpacked + l->gate, grad(e, l->d_skip), grad(e, l->o_norm),
                               e->d_o, a->o, a->y, m->conv_cols, a->packed + l->gate, m->rows, param(e, l->d_skip),
                               param(e, l->o_norm), N, s->HV, s->V, c->mamba_groups, c->norm_eps));
  } else {
    const real *gate = a->gate ? a->gate : l->gate >= 0 ? a->packed + l->gate : NULL;
    int64_t ld = a->gate ? m->val : m->rows;
    OutputGate act = config_output_gate(c, l->mixer);
    real *dgate = (real *)alloc_array(N * ld, sizeof(real), "benchmark");
    PART("output norm, forward", 6 * val, 3 * val,
         output_norm_forward(a->oy, a->o, gate, ld, param(e, l->o_norm), N, c->v_heads, c->head_v, act, c->norm_eps));
    PART("output norm, backward", 20 * val, 5 * val,
         output_norm_backward(e->dskip, dgate, grad(e, l->o_norm), e->d_o, a->o, gate, ld, param(e, l->o_norm), N,
                              c->v_heads, c->head_v, act, c->norm_eps));
    free(dgate);
  }
}

static void attention_parts(Engine *e, const LayerLayout *l, const LayerActs *a, MixerSizes *m, int64_t N) {
  const Config *c = &e->c;
  AttentionShape *s = &m->attention;
  double pairs = 0, q = (double)N * m->key, kv = (double)N * c->attn_kv_heads * c->attn_head_dim;
  for (int t = 0; t < s->T; t++) pairs += s->window && t + 1 > s->window ? s->window : t + 1;
  pairs *= (double)s->B * s->H;
  PART("rotary positions", 6 * q, 2 * q,
       rope_rotate(e->dpacked + l->q, m->rows, e->dq, m->key, e->B, e->T, c->attn_heads, c->attn_head_dim,
                   c->rope_theta, 0, -1));
  PART("attention, forward", 4 * s->D * pairs, 2 * q + 2 * kv,
       attention_forward(a->o, a->lse, a->q, a->k, a->v, e->start, s));
  PART("attention, backward", 10 * s->D * pairs, 4 * q + 4 * kv,
       attention_backward(e->dq, e->dk, e->dv, e->d_o, a->o, a->lse, a->q, a->k, a->v, e->start, s));
}

static void model_parts(Engine *e, AdamW *adam) {
  const Config *c = &e->c;
  const ParamTable *t = e->table;
  int64_t N = (int64_t)e->B * e->T;
  int d = c->width, ff = c->ff;
  double nd = (double)N * d, logits = (double)N * t->vocab_rows, P = (double)t->total;
  n_parts = 0;
  for (int i = 0; i < c->layers; i++) {
    const LayerLayout *l = &t->layers[i];
    LayerActs *a = &e->acts[i];
    MixerSizes m = mixer_sizes(c, l, e->B, e->T);
    product_parts(e, l->in_proj, a->h, d, e->dpacked, m.rows, N, d, m.rows);
    product_parts(e, l->o_proj, a->oy, m.val, e->dx, d, N, m.val, d);
    if (mixer_is_attention(l->mixer))
      attention_parts(e, l, a, &m, N);
    else
      recurrent_parts(e, l, a, &m, N);
    if (ff) {
      product_parts(e, l->gate_up, a->h1, d, e->dgu, 2 * ff, N, d, 2 * ff);
      product_parts(e, l->down, a->s, ff, e->dx, d, N, ff, d);
      PART("SwiGLU, forward", 3.0 * N * ff, 3.0 * N * ff, swiglu_forward(a->s, a->gu, N, ff));
      PART("SwiGLU, backward", 8.0 * N * ff, 5.0 * N * ff, swiglu_backward(e->dgu, e->ds, a->gu, N, ff));
    }
    for (int norms = 0; norms < 1 + (ff != 0); norms++) {
      PART("RMSNorm, forward", 4 * nd, 2 * nd,
           rmsnorm_forward(a->h, a->rstd, a->x, param(e, l->attn_norm), N, d, c->norm_eps));
      PART("RMSNorm, backward", 12 * nd, 4 * nd,
           rmsnorm_backward(e->dx, grad(e, l->attn_norm), e->dh, a->x, a->rstd, param(e, l->attn_norm), N, d));
    }
  }
  product_parts(e, t->head, e->h_end, d, e->logits, t->vocab_rows, N, d, t->vocab_rows);
  PART("cross-entropy, forward", 2 * logits, logits,
       cross_entropy_forward(e->losses, e->lse, e->logits, t->vocab_rows, e->targets, N, c->vocab));
  PART("cross-entropy, backward", 2 * logits, 2 * logits,
       cross_entropy_backward(e->logits, t->vocab_rows, e->lse, e->targets, N, c->vocab, (real)1 / (real)N));
  PART("embedding", 0, 5 * nd, {
    embedding_forward(e->acts[0].x, e->tokens, param(e, t->embedding), N, d);
    embedding_backward(grad(e, t->embedding), e->dx, e->tokens, N, d);
  });
  PART("gradients: zero, norm", 2 * P, 2 * P, (cpu_zero_grad(e), model_grad_sumsq(e, 0, t->total)));
  PART("AdamW", 12 * P, 7 * P, model_update(e, adam));
}

static double train_step(Engine *e, const int32_t *tokens, const int32_t *targets, int B, int T, AdamW *adam) {
  int64_t N = (int64_t)B * T;
  cpu_zero_grad(e);
  double loss = model_forward(e, tokens, targets, B, T, 0) / (double)N;
  model_backward(e, 1 / (double)N);
  double norm = sqrt(model_grad_sumsq(e, 0, e->table->total));
  adam->step++, adam->grad_scale = norm > 1 ? 1 / norm : 1;
  model_update(e, adam);
  return loss;
}

static void bench_model(const char *pattern, int steps) {
  Config c = config_default();
  Error err = {0, ""};
  if (pattern_parse(pattern, &c, &err)) fail(err.code, "%s", err.text);
  c.width = 256, c.layers = 6, c.ff = 704, c.vocab = 257, c.bos = -1;
  c.heads = c.v_heads = 4, c.head_k = c.head_v = 64;
  c.attn_heads = c.attn_kv_heads = 4, c.attn_head_dim = 64, c.window = 128;
  c.mamba_state = 64, c.mamba_head = 64;
  int B = 8, T = 256, N = B * T;
  EngineSettings set;
  memset(&set, 0, sizeof set);
  set.max_rows = B, set.max_len = T, set.train = 1;
  ParamTable table = param_table_build(&c);
  if (cpu_check(&c, &set, &err)) fail(err.code, "%s", err.text);
  Engine *e = cpu_create(&c, &table, &set, &err);
  if (!e) fail(err.code, "%s", err.text);
  for (int i = 0; i < table.n; i++) {
    const ParamSpec *s = &table.specs[i];
    float *w = (float *)alloc_zeroed(s->count, sizeof(float), "benchmark");
    if (s->init != INIT_PAD) init_tensor(w, s, INIT_RULE_PAPER, c.layers, 1, 0, s->count);
    cpu_write(e, ARENA_PARAM, s->offset, s->count, w);
    free(w);
  }
  int32_t *tokens = (int32_t *)alloc_array(N + 1, sizeof(int32_t), "benchmark");
  for (int i = 0; i <= N; i++) tokens[i] = (int32_t)(256 * random_uniform(5, 0, (uint64_t)i));
  int32_t *targets = (int32_t *)alloc_array(N, sizeof(int32_t), "benchmark");
  memcpy(targets, tokens + 1, (size_t)N * sizeof(int32_t));
  AdamW adam = {1e-4, 0.9, 0.95, 1e-8, 0.1, 1, 0, 0};
  double loss = 0, step = INFINITY;
  if (!steps) seconds_wanted *= 20;
  if (steps)
    for (int i = 0; i < steps; i++) {
      double t = now();
      loss = train_step(e, tokens, targets, B, T, &adam);
      t = now() - t;
      if (t < step) step = t;
    }
  else
    LEAST(step, , loss = train_step(e, tokens, targets, B, T, &adam));
  if (!steps) seconds_wanted /= 20;
  if (!isfinite(loss)) fail(EXIT_INTERNAL, "%s: the loss is not finite", pattern);
  printf("training step, \"%s\": %lld parameters, %d layers, %d x %d tokens: %.1f ms, %.0f tokens/s\n", pattern,
         (long long)table.params, c.layers, B, T, step * 1e3, N / step);
  if (!steps) {
    double sum = 0, floor = 0;
    seconds_wanted /= 5;  // parts are timed in every layer
    model_parts(e, &adam);
    seconds_wanted *= 5;
    for (int i = 0; i < n_parts; i++) sum += parts[i].seconds, floor += parts[i].floor;
    printf("  %-26s %8s %7s %8s %8s %8s  %s\n", "part", "ms", "share", "floor", "GFLOP/s", "GB/s", "% of floor");
    for (int i = 0; i < n_parts; i++) {
      const Part *p = &parts[i];
      printf("  %-26s %8.3f %6.1f%% %8.3f %8.1f %8.1f %9.0f\n", p->name, p->seconds * 1e3, 100 * p->seconds / sum,
             p->floor * 1e3, p->flops / p->seconds / 1e9, p->bytes / p->seconds / 1e9, 100 * p->floor / p->seconds);
    }
    printf("  %-26s %8.3f         %8.3f %27.0f   (the step: %.3f ms)\n", "sum of the parts", sum * 1e3, floor * 1e3,
           100 * floor / sum, step * 1e3);
  }
  printf("\n");
  free(tokens), free(targets);
  cpu_destroy(e);
  param_table_free(&table);
}

int main(int argc, char **argv) {
  const char *model = NULL;
  int steps = 0;
  program_name = "bench_cpu";
  for (int i = 1; i < argc; i += 2) {
    const char *value = i + 1 < argc ? argv[i + 1] : NULL;
    char *end = NULL;
    double number = value ? strtod(value, &end) : 0;
    int is_number = value && end != value && !*end;
    if (!strcmp(argv[i], "--threads") && is_number && number >= 1 && number <= 1024)
      omp_set_num_threads((int)number);
    else if (!strcmp(argv[i], "--seconds") && is_number && number > 0 && number <= 60)
      seconds_wanted = number;
    else if (!strcmp(argv[i], "--steps") && is_number && number >= 1 && number <= 1e6)
      steps = (int)number;
    else if (!strcmp(argv[i], "--model") && value)
      model = value;
    else
      fail(EXIT_USAGE, "%s %s: needed --threads N (1 to 1024), --seconds S (at most 60), --model \"MIXERS\", --steps N",
           argv[i], value ? value : "without a value");
  }
  Config parsed = config_default();
  Error err = {0, ""};
  if (model && pattern_parse(model, &parsed, &err)) fail(err.code, "--model: %s", err.text);
  if (steps) {
    bench_model(model ? model : "gdn", steps);
    return 0;
  }
  bench_machine();
  int inaccurate = bench_exp();
  if (model) {
    bench_model(model, 0);
    return inaccurate;
  }
  int wrong = inaccurate + bench_products(2048);
  static const char *const models[] = {"gdn", "gdn swa", "mamba2 gdn swa", "gdn2"};
  for (size_t i = 0; i < sizeof models / sizeof *models; i++) bench_model(models[i], 0);
  if (wrong) printf("%d lines are beyond their limit\n", wrong);
  return wrong != 0;
}
