// test_layers.c: the layers of train_gdn.c one by one. The file under test is included, so that its static functions
// can be called; it is compiled once with real = double and once with real = float:
//
//   cc -O2 -fopenmp -I. -DGDN_NO_MAIN -DGDN_PLANT [-DGDN_REAL_DOUBLE] dev/test/test_layers.c -lm
//
// The delta rule is compared with the token-by-token recurrence of recurrence.h, whose own back-propagation is first
// compared with central finite differences. Every other layer is compared with its formula written once more, naively,
// in complex double: value and, by the complex step, gradient (Squire and Trapp 1998: Im f(x + i h) / h with h = 1e-30
// is a finite difference that subtracts nothing, so it is exact to rounding). References see the same numbers as the
// code under test, rounded to real beforehand. Outputs are poisoned with NaN and stand between guard elements.
//
// An argument runs only the areas whose name contains it. Everything runs on one thread, which is faster than waiting
// for a second one on arrays this small; the areas about threads set their own number.

#include "train_gdn.c"

#include <complex.h>
#undef I
#include <omp.h>
#include "dev/test/check_report.h"  // check, report_end
#include "dev/test/recurrence.h"    // recurrence_forward, recurrence_backward

int gdn_planted;

// Limits of the relative error of a tensor. Double: sums of some hundred terms and the solve of a chunk leave 1e-13 to
// 1e-12. Float: 6e-8 a rounding, 1e-6 to 1e-5 after the same sums; gradients go through two such stages.
#ifdef GDN_REAL_DOUBLE
static const double limit_output = 1e-10, limit_gradient = 1e-10, rounding = DBL_EPSILON;
#else
static const double limit_output = 1e-4, limit_gradient = 1e-3, rounding = FLT_EPSILON;
#endif

// ----------------------------------------------------------------------------
// what the tests share: random numbers, guarded buffers, comparisons

static uint64_t random_state = 1;
static double uniform(double lo, double hi) {  // splitmix64
  uint64_t x = random_state += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u, x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return lo + (hi - lo) * (double)((x ^ (x >> 31)) >> 11) * 0x1p-53;
}
static double normal(void) { return sqrt(-2 * log(uniform(1e-12, 1))) * cos(6.283185307179586 * uniform(0, 1)); }
static void fill_uniform(real *p, int64_t n, double lo, double hi) {
  for (int64_t i = 0; i < n; i++) p[i] = (real)uniform(lo, hi);
}
static void fill_normal(real *p, int64_t n, double scale) {
  for (int64_t i = 0; i < n; i++) p[i] = (real)(scale * normal());
}

// n reals full of NaN between guards. The address sanitizer finds accesses beyond the end itself, so no guards then.
#ifdef __SANITIZE_ADDRESS__
enum { GUARD = 0 };
#else
enum { GUARD = 32 };
#endif
static const real guard_value = (real)-7654321;

static real *buffer(int64_t n) {
  if (n < 0) fail(EXIT_INTERNAL, "test: a buffer of %lld", (long long)n);
  char *base = (char *)alloc_array(64 + (n + 2 * GUARD) * (int64_t)sizeof(real), 1, "test");
  memcpy(base, &n, sizeof n);
  real *p = (real *)(base + 64) + GUARD;
  for (int64_t i = 0; i < n; i++) p[i] = (real)NAN;
  for (int i = 0; i < GUARD; i++) p[-1 - i] = p[n + i] = guard_value;
  return p;
}
static void buffer_free(real *p) {
  if (!p) return;
  char *base = (char *)(p - GUARD) - 64;
  int64_t n;
  memcpy(&n, base, sizeof n);
  for (int i = 0; i < GUARD; i++)
    if (p[-1 - i] != guard_value || p[n + i] != guard_value) {
      check(0, "a buffer of %lld elements was written %d elements outside", (long long)n, i + 1);
      break;
    }
  free(base);
}
static real *buffer_normal(int64_t n, double scale) {
  real *p = buffer(n);
  fill_normal(p, n, scale);
  return p;
}
static real *buffer_copy(const real *src, int64_t n) {
  real *p = buffer(n);
  memcpy(p, src, (size_t)n * sizeof(real));
  return p;
}
static int same_values(const real *a, const real *b, int64_t n) {  // 0 and -0 are one value
  for (int64_t i = 0; i < n; i++)
    if (!(a[i] == b[i])) return 0;
  return 1;
}
static int same_bits(const real *a, const real *b, int64_t n) { return !memcmp(a, b, (size_t)n * sizeof(real)); }
static double *as_double(const real *x, int64_t n) {
  if (!x) return NULL;
  double *p = (double *)alloc_array(n, sizeof(double), "test");
  for (int64_t i = 0; i < n; i++) p[i] = (double)x[i];
  return p;
}

// Columns [first, first + width) of a buffer with ld elements a row, to and from a dense array.
static void pack(real *packed, int64_t ld, int64_t first, const real *dense, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; i++) memcpy(packed + i * ld + first, dense + i * width, (size_t)width * sizeof(real));
}
static real *unpack(const real *packed, int64_t ld, int64_t first, int64_t rows, int64_t width) {
  real *dense = buffer(rows * width);
  for (int64_t i = 0; i < rows; i++) memcpy(dense + i * width, packed + i * ld + first, (size_t)width * sizeof(real));
  return dense;
}
// Whether the columns outside [first, first + width) still hold the poison that buffer() put there.
static int others_untouched(const real *packed, int64_t ld, int64_t first, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows * ld; i++)
    if ((i % ld < first || i % ld >= first + width) && !isnan(packed[i])) return 0;
  return 1;
}

static struct {
  const char *name;
  int passed, failed;
  double began, output, gradient;  // seconds; worst errors
} area;
static void area_begin(const char *name) {
  area.name = name, area.passed = checks_passed, area.failed = checks_failed, area.output = area.gradient = 0;
  area.began = omp_get_wtime();
}
static void area_end(void) {
  printf("%-28s %5d checks, %d failed, worst output %.1e, worst gradient %.1e, %.2f s\n", area.name,
         checks_passed + checks_failed - area.passed - area.failed, checks_failed - area.failed, area.output,
         area.gradient, omp_get_wtime() - area.began);
  fflush(stdout);
}

typedef enum { OUTPUT, GRADIENT } Role;

// |x - ref| / max(|ref|, floor) against the limit of its role. The floor is for tensors that are nothing but rounding:
// what a gate of 2^-126 multiplies, differences of larger terms.
static int check_tensor(const char *what, const char *name, const real *x, const double *ref, int64_t n, double floor,
                        Role role) {
  double diff = 0, norm = 0, limit = role == OUTPUT ? limit_output : limit_gradient;
  for (int64_t i = 0; i < n; i++) {
    if (!isfinite(x[i]) || !isfinite(ref[i]))
      return check(0, "%s: %s[%lld] is %g, expected %g", what, name, (long long)i, (double)x[i], ref[i]);
    diff += ((double)x[i] - ref[i]) * ((double)x[i] - ref[i]), norm += ref[i] * ref[i];
  }
  diff = sqrt(diff), norm = sqrt(norm);
  double error = diff == 0 ? 0 : diff / fmax(norm, floor);
  double *worst = role == OUTPUT ? &area.output : &area.gradient;
  if (error > *worst) *worst = error;
  return check(error <= limit, "%s: %s: relative error %.3g, limit %.3g", what, name, error, limit);
}
static const double vanished = 1e-25;  // floor of everything: against it 2^-126 is nothing

// ----------------------------------------------------------------------------
// a layer's formula in complex double: its value and, by the complex step, its gradient

typedef double _Complex cplx;
typedef void (*Formula)(cplx *y, cplx *const *x, const void *sizes);
enum { MAX_INPUTS = 5 };
typedef struct {
  Formula formula;
  const void *sizes;
  int64_t outputs;
  int inputs;
  const char *name[MAX_INPUTS];
  const real *x[MAX_INPUTS];
  int64_t n[MAX_INPUTS];
  const real *dx[MAX_INPUTS];      // gradient to check, or NULL
  const real *before[MAX_INPUTS];  // what it was added to, or NULL: overwritten
} Reference;

// terms: size of larger terms that cancel in a gradient and leave their rounding, 0: none
static void reference_check(const char *what, const Reference *r, const real *y, const real *dy, double terms) {
  const double h = 1e-30;
  cplx *x[MAX_INPUTS] = {0}, *out = (cplx *)alloc_array(r->outputs, sizeof(cplx), "test");
  for (int a = 0; a < r->inputs; a++) {
    x[a] = (cplx *)alloc_array(r->n[a], sizeof(cplx), "test");
    for (int64_t i = 0; i < r->n[a]; i++) x[a][i] = (double)r->x[a][i];
  }
  double *ref = (double *)alloc_array(r->outputs, sizeof(double), "test");
  r->formula(out, x, r->sizes);
  for (int64_t i = 0; i < r->outputs; i++) ref[i] = creal(out[i]);
  if (y) check_tensor(what, "output", y, ref, r->outputs, vanished, OUTPUT);
  free(ref);
  for (int a = 0; a < r->inputs; a++) {
    if (!r->dx[a]) continue;
    char name[64];
    snprintf(name, sizeof name, "gradient of %s", r->name[a]);
    ref = (double *)alloc_array(r->n[a], sizeof(double), "test");
    for (int64_t i = 0; i < r->n[a]; i++) {
      cplx keep = x[a][i];
      x[a][i] = keep + h * _Complex_I;
      r->formula(out, x, r->sizes);
      x[a][i] = keep;
      ref[i] = r->before[a] ? (double)r->before[a][i] : 0;
      for (int64_t j = 0; j < r->outputs; j++) ref[i] += (double)dy[j] * cimag(out[j]) / h;
    }
    double floor = 64 * rounding / limit_gradient * terms;
    check_tensor(what, name, r->dx[a], ref, r->n[a], fmax(floor, vanished), GRADIENT);
    free(ref);
  }
  for (int a = 0; a < r->inputs; a++) free(x[a]);
  free(out);
}

static cplx csigmoid(cplx x) { return 1 / (1 + cexp(-x)); }
static cplx csilu(cplx x) { return x * csigmoid(x); }

// ----------------------------------------------------------------------------
// delta rule: a problem, the engine's answer, the recurrence's answer

enum { KIND_GDN, KIND_DELTANET, KIND_KDA, KIND_GDN2, KIND_SSD, KINDS };
static const char *const kind_names[] = {"GDN", "DeltaNet", "KDA", "GDN-2", "SSD"};

typedef struct {
  int kind, ld;
  DeltaShape s;
  real *packed;                   // [N,ld]: q, k, v with a column of poison before, between and after
  real *g, *b, *w, *h0;           // as in DeltaInputs; [B,HV,K,V]
  real *d_o, *dh_end;             // [N,HV*V] [B,HV,K,V]
  int32_t *start;                 // [N] or NULL
  int g_width, b_width, w_width;  // elements a token, 0: none
} Problem;

static int64_t tokens_of(const Problem *p) { return (int64_t)p->s.B * p->s.T; }
static int64_t state_of(const Problem *p) { return (int64_t)p->s.B * p->s.HV * p->s.K * p->s.V; }
static real *problem_q(const Problem *p) { return p->packed + 1; }
static real *problem_k(const Problem *p) { return p->packed + p->s.H * p->s.K + 2; }
static real *problem_v(const Problem *p) { return p->packed + 2 * p->s.H * p->s.K + 3; }

static Problem problem_alloc(int kind, DeltaShape s) {
  Problem p;
  memset(&p, 0, sizeof p);
  p.kind = kind, p.s = s;
  p.ld = 2 * s.H * s.K + s.HV * s.V + 4;
  p.g_width = kind == KIND_DELTANET ? 0 : s.decay_heads * (s.channel_decay ? s.K : 1);
  p.b_width = s.erase == ERASE_NONE ? 0 : s.erase == ERASE_HEAD ? s.HV : s.H * s.K;
  p.w_width = s.HV * (s.channel_write ? s.V : 1);
  int64_t N = tokens_of(&p);
  p.packed = buffer(N * p.ld);
  p.g = p.g_width ? buffer(N * p.g_width) : NULL, p.b = p.b_width ? buffer(N * p.b_width) : NULL;
  p.w = buffer(N * p.w_width), p.h0 = buffer(state_of(&p));
  p.d_o = buffer(N * s.HV * s.V), p.dh_end = buffer(state_of(&p));
  return p;
}
static void problem_free(Problem *p) {
  buffer_free(p->packed), buffer_free(p->g), buffer_free(p->b), buffer_free(p->w), buffer_free(p->h0);
  buffer_free(p->d_o), buffer_free(p->dh_end), free(p->start);
}

// New values for tokens [t0,t1) of row b: unit keys and queries (Mamba2's are free), gates mild, b and w in (0.1,0.95).
static void problem_randomize(Problem *p, int b, int t0, int t1) {
  for (int64_t n = (int64_t)b * p->s.T + t0; n < (int64_t)b * p->s.T + t1; n++) {
    for (int side = 0; side < 2; side++)
      for (int h = 0; h < p->s.H; h++) {
        real *x = (side ? problem_k(p) : problem_q(p)) + n * p->ld + h * p->s.K;
        double sum = 0;
        fill_normal(x, p->s.K, 1);
        for (int d = 0; d < p->s.K; d++) sum += (double)x[d] * x[d];
        for (int d = 0; d < p->s.K; d++) x[d] = (real)(x[d] / (p->kind == KIND_SSD ? sqrt((double)p->s.K) : sqrt(sum)));
      }
    fill_normal(problem_v(p) + n * p->ld, p->s.HV * p->s.V, 1);
    if (p->g) fill_uniform(p->g + n * p->g_width, p->g_width, -0.5, 0);
    if (p->b) fill_uniform(p->b + n * p->b_width, p->b_width, 0.1, 0.95);
    fill_uniform(p->w + n * p->w_width, p->w_width, 0.1, 0.95);
    fill_normal(p->d_o + n * p->s.HV * p->s.V, p->s.HV * p->s.V, 1);
  }
}

// decay_heads 0: HV, and H for GDN-2, as the models have them
static Problem problem_make(int kind, int B, int T, int H, int HV, int K, int V, int decay_heads) {
  int channel = kind == KIND_KDA || kind == KIND_GDN2;
  DeltaShape s = {B,
                  T,
                  H,
                  HV,
                  K,
                  V,
                  channel,
                  decay_heads         ? decay_heads
                  : kind == KIND_GDN2 ? H
                                      : HV,
                  kind == KIND_SSD    ? ERASE_NONE
                  : kind == KIND_GDN2 ? ERASE_CHANNEL
                                      : ERASE_HEAD,
                  kind == KIND_GDN2,
                  kind == KIND_SSD ? 1 : 1 / R(sqrt)((real)K)};
  Problem p = problem_alloc(kind, s);
  for (int b = 0; b < B; b++) problem_randomize(&p, b, 0, T);
  fill_normal(p.h0, state_of(&p), 0.5), fill_normal(p.dh_end, state_of(&p), 0.5);
  return p;
}

// Tokens [t0,t1) of rows [b0,b1) as a problem of its own.
static Problem problem_slice(const Problem *p, int b0, int b1, int t0, int t1) {
  DeltaShape s = p->s;
  s.B = b1 - b0, s.T = t1 - t0;
  Problem x = problem_alloc(p->kind, s);
  if (p->start) x.start = (int32_t *)alloc_array(tokens_of(&x), sizeof(int32_t), "test");
  int64_t state = (int64_t)s.HV * s.K * s.V;
  memcpy(x.h0, p->h0 + b0 * state, (size_t)(s.B * state) * sizeof(real));
  memcpy(x.dh_end, p->dh_end + b0 * state, (size_t)(s.B * state) * sizeof(real));
  for (int b = 0; b < s.B; b++) {
    int64_t from = (int64_t)(b0 + b) * p->s.T + t0, to = (int64_t)b * s.T;
    memcpy(x.packed + to * p->ld, p->packed + from * p->ld, (size_t)s.T * p->ld * sizeof(real));
    pack(x.d_o + to * s.HV * s.V, s.HV * s.V, 0, p->d_o + from * s.HV * s.V, s.T, s.HV * s.V);
    if (p->g) pack(x.g + to * p->g_width, p->g_width, 0, p->g + from * p->g_width, s.T, p->g_width);
    if (p->b) pack(x.b + to * p->b_width, p->b_width, 0, p->b + from * p->b_width, s.T, p->b_width);
    pack(x.w + to * p->w_width, p->w_width, 0, p->w + from * p->w_width, s.T, p->w_width);
    for (int t = 0; p->start && t < s.T; t++) x.start[to + t] = p->start[from + t] - t0;
  }
  return x;
}

enum { OUT_O, OUT_H, OUT_DQ, OUT_DK, OUT_DV, OUT_DG, OUT_DB, OUT_DW, OUT_DH0, OUTS };
static const char *const out_names[] = {"o", "h_end", "dq", "dk", "dv", "dg", "db", "dw", "dh0"};

typedef struct {
  real *x[OUTS];
  int64_t width[OUTS], n[OUTS];  // elements a token (0: a state), elements
} Outcome;

static void outcome_sizes(Outcome *r, const Problem *p) {
  int64_t val = (int64_t)p->s.HV * p->s.V, key = (int64_t)p->s.H * p->s.K;
  int64_t width[OUTS] = {val, 0, key, key, val, p->g_width, p->b_width, p->w_width, 0};
  for (int i = 0; i < OUTS; i++) {
    r->width[i] = width[i];
    r->n[i] = i == OUT_H || i == OUT_DH0 ? state_of(p) : tokens_of(p) * width[i];
  }
}
static void outcome_free(Outcome *r) {
  for (int i = 0; i < OUTS; i++) buffer_free(r->x[i]);
}

// The engine's answer. The forward pass that keeps no states, in place on the carried state, must give the same bits.
static Outcome delta_run(const char *what, const Problem *p) {
  const DeltaShape *s = &p->s;
  Outcome r;
  outcome_sizes(&r, p);
  for (int i = 0; i < OUTS; i++) r.x[i] = r.n[i] && i != OUT_DV ? buffer(r.n[i]) : NULL;
  DeltaInputs in = {problem_q(p), problem_k(p), problem_v(p), p->ld, p->ld, p->ld, p->g, p->b, p->w, p->start};
  real *states = buffer(state_of(p) * ((s->T + CHUNK - 1) / CHUNK));
  delta_rule_forward(r.x[OUT_O], states, r.x[OUT_H], &in, p->h0, s);
  real *o = buffer(r.n[OUT_O]), *carried = buffer_copy(p->h0, state_of(p));
  delta_rule_forward(o, NULL, carried, &in, carried, s);
  check(same_bits(o, r.x[OUT_O], r.n[OUT_O]) && same_bits(carried, r.x[OUT_H], r.n[OUT_H]),
        "%s: the forward pass without states gives other bits", what);
  int64_t ldv = s->HV * s->V + 3;
  real *dv = buffer(tokens_of(p) * ldv);
  DeltaGradients grad = {r.x[OUT_DQ], r.x[OUT_DK], dv + 1, ldv, r.x[OUT_DG], r.x[OUT_DB], r.x[OUT_DW], r.x[OUT_DH0]};
  delta_rule_backward(&grad, p->d_o, p->dh_end, states, &in, s);
  r.x[OUT_DV] = unpack(dv, ldv, 1, tokens_of(p), s->HV * s->V);
  check(others_untouched(dv, ldv, 1, tokens_of(p), s->HV * s->V), "%s: dv written beside its columns", what);
  buffer_free(o), buffer_free(carried), buffer_free(states), buffer_free(dv);
  return r;
}

static RecurrenceShape recurrence_shape(const Problem *p) {
  const DeltaShape *s = &p->s;
  RecurrenceShape r = {s->B,
                       s->T,
                       s->H,
                       s->HV,
                       s->K,
                       s->V,
                       p->g ? s->decay_heads : 0,
                       s->channel_decay ? s->K : 1,
                       s->erase == ERASE_NONE      ? 0
                       : s->erase == ERASE_CHANNEL ? s->H
                                                   : s->HV,
                       s->erase == ERASE_CHANNEL ? s->K : 1,
                       s->channel_write ? s->V : 1,
                       (double)s->scale};
  return r;
}
static RecurrenceTensors recurrence_inputs(const Problem *p) {
  const DeltaShape *s = &p->s;
  int64_t N = tokens_of(p);
  real *q = unpack(problem_q(p), p->ld, 0, N, s->H * s->K), *k = unpack(problem_k(p), p->ld, 0, N, s->H * s->K),
       *v = unpack(problem_v(p), p->ld, 0, N, s->HV * s->V);
  RecurrenceTensors in = {as_double(q, N * s->H * s->K),   as_double(k, N * s->H * s->K),
                          as_double(v, N * s->HV * s->V),  as_double(p->g, N * p->g_width),
                          as_double(p->b, N * p->b_width), as_double(p->w, N * p->w_width),
                          as_double(p->h0, state_of(p)),   p->start};
  buffer_free(q), buffer_free(k), buffer_free(v);
  return in;
}
static void recurrence_free(RecurrenceTensors *t) {
  free(t->q), free(t->k), free(t->v), free(t->g), free(t->b), free(t->w), free(t->h0);
}

// All outputs and gradients of the engine against the recurrence.
static void delta_check(const char *what, const Problem *p) {
  char text[200];
  snprintf(text, sizeof text, "%s, %s B=%d T=%d H=%d HV=%d K=%d V=%d", what, kind_names[p->kind], p->s.B, p->s.T,
           p->s.H, p->s.HV, p->s.K, p->s.V);
  Outcome r = delta_run(text, p);
  RecurrenceShape s = recurrence_shape(p);
  RecurrenceTensors in = recurrence_inputs(p);
  double *ref[OUTS], *d_o = as_double(p->d_o, r.n[OUT_O]), *dh_end = as_double(p->dh_end, r.n[OUT_H]);
  for (int i = 0; i < OUTS; i++) ref[i] = r.n[i] ? (double *)alloc_array(r.n[i], sizeof(double), "test") : NULL;
  recurrence_forward(ref[OUT_O], ref[OUT_H], &in, &s);
  RecurrenceTensors grad = {ref[OUT_DQ], ref[OUT_DK], ref[OUT_DV],  ref[OUT_DG],
                            ref[OUT_DB], ref[OUT_DW], ref[OUT_DH0], NULL};
  recurrence_backward(&grad, d_o, dh_end, &in, &s);
  // dg is a difference, q o dq + e o de - k o dk: where strong gates cancel it to nothing, what stays is the rounding
  // of these terms, some tens of units in the last place.
  double terms = 0;
  for (int64_t i = 0; i < r.n[OUT_DQ]; i++) terms += pow(in.q[i] * grad.q[i], 2) + pow(in.k[i] * grad.k[i], 2);
  for (int i = 0; i < OUTS; i++) {
    double floor = i == OUT_DG ? 64 * rounding / limit_gradient * sqrt(terms) : 0;
    if (r.n[i])
      check_tensor(text, out_names[i], r.x[i], ref[i], r.n[i], fmax(floor, vanished), i < 2 ? OUTPUT : GRADIENT);
  }
  for (int i = 0; i < OUTS; i++) free(ref[i]);
  free(d_o), free(dh_end);
  recurrence_free(&in), outcome_free(&r);
}

// Documents of row b start where `borders` says, a list that ends with -1; tokens before the first one continue what
// was carried in.
static void set_documents(Problem *p, int b, const int *borders) {
  if (!p->start) p->start = (int32_t *)alloc_zeroed(tokens_of(p), sizeof(int32_t), "test");
  int32_t current = -9;
  for (int t = 0; t < p->s.T; t++) {
    if (*borders == t) current = t, borders++;
    p->start[(int64_t)b * p->s.T + t] = current;
  }
}

// ----------------------------------------------------------------------------
// delta rule: the recurrence itself

static double recurrence_loss(const RecurrenceTensors *in, const RecurrenceShape *s, const double *d_o,
                              const double *dh_end) {
  int64_t no = (int64_t)s->B * s->T * s->HV * s->V, nh = (int64_t)s->B * s->HV * s->K * s->V;
  double *o = (double *)alloc_array(no, sizeof(double), "test"), *h = (double *)alloc_array(nh, sizeof(double), "test"),
         sum = 0;
  recurrence_forward(o, h, in, s);
  for (int64_t i = 0; i < no; i++) sum += o[i] * d_o[i];
  for (int64_t i = 0; i < nh; i++) sum += h[i] * dh_end[i];
  free(o), free(h);
  return sum;
}

// Every element of every input. Five-point differences with h = 1e-3: truncation h^4, rounding 1e-16 / h, both 1e-12.
static void test_recurrence(void) {
  static const int borders[2][3] = {{0, 3, -1}, {2, -1, -1}};
  for (int kind = 0; kind < KINDS; kind++)
    for (int grouped = 0; grouped < 3; grouped++)
      for (int documents = 0; documents < 2; documents++) {
        Problem p = problem_make(kind, 2, 5, grouped ? 2 : 1, grouped ? 4 : 1, 3, 2, grouped == 2 ? 2 : 0);
        for (int b = 0; documents && b < 2; b++) set_documents(&p, b, borders[b]);
        RecurrenceShape s = recurrence_shape(&p);
        RecurrenceTensors in = recurrence_inputs(&p), grad = recurrence_inputs(&p);
        Outcome sizes;
        outcome_sizes(&sizes, &p);
        double *d_o = as_double(p.d_o, sizes.n[OUT_O]), *dh_end = as_double(p.dh_end, sizes.n[OUT_H]);
        recurrence_backward(&grad, d_o, dh_end, &in, &s);
        double *x[] = {in.q, in.k, in.v, in.g, in.b, in.w, in.h0},
               *dx[] = {grad.q, grad.k, grad.v, grad.g, grad.b, grad.w, grad.h0};
        for (int a = 0; a < 7; a++) {
          int64_t n = sizes.n[OUT_DQ + a];
          double *found = (double *)alloc_array(n, sizeof(double), "test"), h = 1e-3, f[4];
          for (int64_t i = 0; i < n; i++) {
            double keep = x[a][i];
            for (int step = 0; step < 4; step++) {
              x[a][i] = keep + (step < 2 ? step - 2 : step - 1) * h;
              f[step] = recurrence_loss(&in, &s, d_o, dh_end);
            }
            x[a][i] = keep;
            found[i] = (f[0] - 8 * f[1] + 8 * f[2] - f[3]) / (12 * h);
          }
          double e = n ? relative_error(found, dx[a], n) : 0;
          if (n)
            check(e < 1e-9, "recurrence, %s: %s differs from finite differences by %.3g", kind_names[kind],
                  out_names[OUT_DQ + a], e);
          if (e > area.gradient) area.gradient = e;
          free(found);
        }
        free(d_o), free(dh_end), recurrence_free(&in), recurrence_free(&grad), problem_free(&p);
      }
}

// Steps worked by hand, from the recurrence and from the engine.
static void test_hand_checked(void) {
  DeltaShape s1 = {1, 1, 1, 1, 1, 1, 0, 1, ERASE_HEAD, 0, 1}, s2 = {1, 1, 1, 1, 2, 2, 1, 1, ERASE_CHANNEL, 1, 1};
  for (int which = 0; which < 2; which++) {
    Problem p = problem_alloc(which ? KIND_GDN2 : KIND_GDN, which ? s2 : s1);
    static const double q[2][2] = {{1, 0}, {0.6, 0.8}}, v[2][2] = {{1, 0}, {2, 4}}, g[2][2] = {{0.5, 0}, {0.5, 1}},
                        b[2][2] = {{0.5, 0}, {1, 0}}, w[2][2] = {{0.5, 0}, {1, 0.5}},
                        h0[2][4] = {{0.5, 0, 0, 0}, {1, 0, 0, 1}},
                        expected[2][4] = {{0.625, 0, 0, 0}, {1.52, 1.2, 1.36, 2.6}};
    int n = which ? 2 : 1;
    for (int i = 0; i < n; i++) {
      problem_q(&p)[i] = problem_k(&p)[i] = (real)q[which][i];
      problem_v(&p)[i] = (real)v[which][i];
      p.g[i] = (real)log(g[which][i]), p.b[i] = (real)b[which][i], p.w[i] = (real)w[which][i];
      p.d_o[i] = 1;
    }
    for (int i = 0; i < n * n; i++) p.h0[i] = (real)h0[which][i], p.dh_end[i] = 1;
    Outcome r = delta_run("hand-checked step", &p);
    check_tensor("hand-checked step", "h_end", r.x[OUT_H], expected[which], n * n, vanished, OUTPUT);
    RecurrenceShape s = recurrence_shape(&p);
    RecurrenceTensors in = recurrence_inputs(&p);
    double h[4];
    recurrence_forward(NULL, h, &in, &s);
    double e = relative_error(h, expected[which], n * n);
    check(e < limit_output, "hand-checked step: the recurrence is off by %g", e);
    recurrence_free(&in), outcome_free(&r), problem_free(&p);
  }
}

// ----------------------------------------------------------------------------
// delta rule: lengths, sizes, groups

static const int all_lengths[] = {1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 79, 127, 129, 289};
enum { LENGTHS = 15 };

static void delta_check_new(const char *what, int kind, int B, int T, int H, int HV, int K, int V, int decay_heads) {
  Problem p = problem_make(kind, B, T, H, HV, K, V, decay_heads);
  delta_check(what, &p);
  problem_free(&p);
}

static void test_delta_small(void) {  // enough to notice a wrong term
  delta_check_new("small", KIND_GDN, 2, 70, 2, 2, 5, 7, 0);
  delta_check_new("small", KIND_GDN2, 1, 70, 1, 2, 5, 7, 0);
}

static void test_delta_lengths(void) {
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < LENGTHS; i++) {
      delta_check_new("lengths", kind, 2, all_lengths[i], 2, 2, 5, 7, 0);
      delta_check_new("lengths", kind, 1, all_lengths[i], 1, 1, 24, 20, 0);
    }
}

static void test_delta_sizes(void) {
  static const int sizes[][2] = {{1, 1},   {16, 16},   {64, 64},   {96, 192},  {128, 128}, {48, 48},
                                 {33, 65}, {100, 200}, {192, 384}, {256, 512}, {64, 128},  {128, 64}};
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < 12; i++) {
      int K = sizes[i][0], V = sizes[i][1];
      delta_check_new("sizes", kind, 1, K * V > 20000 ? 9 : K * V > 5000 ? 66 : 129, 1, 1, K, V, 0);
      if (K <= 64) delta_check_new("sizes", kind, 5, 17, 1, 2, K, V, 0);
    }
}

static void test_delta_groups(void) {
  static const int groups[][2] = {{2, 4}, {2, 6}, {1, 3}, {3, 3}};
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < 4; i++)
      for (int key_gates = 0; key_gates < 2; key_gates++)
        for (int T = 5; T < 100; T += 65) {
          int H = groups[i][0], HV = groups[i][1];
          delta_check_new("groups", kind, 2, T, H, HV, 6, 10, key_gates ? H : HV);
        }
}

// ----------------------------------------------------------------------------
// delta rule: gates and keys at their ends

enum {
  DECAY_ZERO,
  DECAY_112,
  DECAY_0_112,
  DECAY_0_1000,
  DECAY_ONE_CHANNEL,
  DECAY_ONE_TOKEN,
  DECAY_TO_8,
  DECAY_TO_80,
  DECAY_20,
  DECAY_KINDS
};
static const char *const decay_names[] = {
    "g = 0",           "g = -112",     "g 0 or -112",   "g 0 or -1000", "one channel 1e-12 beside 0.99",
    "one token 1e-30", "g down to -8", "g down to -80", "g = -20"};

static void set_decay(Problem *p, int decay) {
  int gates = p->s.channel_decay ? p->s.K : p->g_width;  // with one gate a head, a head stands for a channel
  for (int64_t i = 0; p->g && i < tokens_of(p) * p->g_width; i++) {
    int t = (int)(i / p->g_width % p->s.T);
    double x = 0;
    if (decay == DECAY_112) x = -112;
    if (decay == DECAY_0_112) x = uniform(0, 1) < 0.5 ? 0 : -112;
    if (decay == DECAY_0_1000) x = uniform(0, 1) < 0.5 ? 0 : -1000;
    if (decay == DECAY_ONE_CHANNEL) x = i % gates == 1 ? log(1e-12) : log(0.99);
    if (decay == DECAY_ONE_TOKEN) x = t == 20 ? log(1e-30) : uniform(-0.1, 0);
    if (decay == DECAY_TO_8) x = uniform(-8, 0);
    if (decay == DECAY_TO_80) x = uniform(-80, 0);
    if (decay == DECAY_20) x = -20;
    p->g[i] = (real)x;
  }
}

static void test_delta_gates(void) {
  static const int lengths[] = {7, 50, 64, 65, 200};
  for (int kind = 0; kind < KINDS; kind++)
    for (int decay = 0; decay < DECAY_KINDS && (kind != KIND_DELTANET || !decay); decay++)
      for (int i = 0; i < 5; i++) {
        Problem p = problem_make(kind, 1, lengths[i], 2, 2, 16, 16, 0);
        set_decay(&p, decay);
        delta_check(decay_names[decay], &p);
        problem_free(&p);
      }
}

// -112 wipes the state: o_t = s beta (q.k) v_t from the second token on.
static void test_delta_wiped(void) {
  enum { T = 64, K = 16 };
  Problem p = problem_make(KIND_GDN, 1, T, 1, 1, K, K, 0);
  set_decay(&p, DECAY_112);
  for (int t = 0; t < T; t++) p.b[t] = p.w[t] = (real)0.9;
  Outcome r = delta_run("g = -112", &p);
  double expected[T * K];
  for (int t = 0; t < T; t++) {
    double dot = 0;
    for (int d = 0; d < K; d++) dot += (double)problem_q(&p)[t * p.ld + d] * (double)problem_k(&p)[t * p.ld + d];
    for (int j = 0; j < K; j++)
      expected[t * K + j] = (double)p.s.scale * (double)p.w[t] * dot * (double)problem_v(&p)[t * p.ld + j];
  }
  check_tensor("g = -112 wipes the state", "o", r.x[OUT_O], expected, T * K, vanished, OUTPUT);
  outcome_free(&r), problem_free(&p);
}

static void test_delta_beta(void) {
  static const int kinds[] = {KIND_GDN, KIND_DELTANET, KIND_KDA, KIND_GDN2};
  for (int i = 0; i < 4; i++)
    for (int beta = 0; beta < 4; beta++)  // 3: 0, 1 or 2 by token and head (and channel)
      for (int T = 7; T <= 137; T += 65) {
        Problem p = problem_make(kinds[i], 1, T, 2, 2, 16, 16, 0);
        for (int64_t j = 0; j < tokens_of(&p) * p.b_width; j++) p.b[j] = (real)(beta < 3 ? beta : floor(uniform(0, 3)));
        for (int64_t j = 0; beta < 3 && j < tokens_of(&p) * p.w_width; j++) p.w[j] = (real)beta;
        delta_check("beta in 0, 1, 2", &p);
        if (beta == 0) {  // nothing is ever written
          memset(p.h0, 0, (size_t)state_of(&p) * sizeof(real));
          Outcome r = delta_run("beta 0", &p);
          for (int64_t j = 0; j < r.n[OUT_O]; j++)
            if (r.x[OUT_O][j] != 0) {
              check(0, "beta 0 from a zero state: output %g", (double)r.x[OUT_O][j]);
              break;
            }
          check(1, "beta 0");
          outcome_free(&r);
          delta_check("beta 0 from a zero state", &p);
        }
        problem_free(&p);
      }
}

// All keys of a chunk equal (a repeated token): where a power series of M would explode.
static void test_delta_equal_keys(void) {
  static const double betas[] = {0.5, 1, 2};
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < 3; i++)
      for (int gate = 0; gate < 2; gate++) {
        Problem p = problem_make(kind, 1, 130, 1, 2, 16, 16, 0);
        for (int64_t n = 1; n < 130; n++)
          memcpy(problem_k(&p) + n * p.ld, problem_k(&p), (size_t)(p.s.H * p.s.K) * sizeof(real));
        for (int64_t j = 0; j < tokens_of(&p) * p.b_width; j++) p.b[j] = (real)betas[i];
        for (int64_t j = 0; j < tokens_of(&p) * p.w_width; j++) p.w[j] = (real)betas[i];
        if (gate) set_decay(&p, DECAY_ZERO);
        delta_check("equal keys", &p);
        problem_free(&p);
      }
}

// beta = 1 and the same unit key twice: reading with that key gives the second value.
static void test_delta_replaces(void) {
  for (int kind = 0; kind < KINDS - 1; kind++) {
    Problem p = problem_make(kind, 1, 2, 1, 1, 16, 16, 0);
    set_decay(&p, DECAY_ZERO);
    for (int n = 0; n < 2; n++) {
      memcpy(problem_k(&p) + n * p.ld, problem_k(&p), 16 * sizeof(real));
      memcpy(problem_q(&p) + n * p.ld, problem_k(&p), 16 * sizeof(real));
    }
    for (int j = 0; j < 2 * p.b_width; j++) p.b[j] = 1;
    for (int j = 0; j < 2 * p.w_width; j++) p.w[j] = 1;
    p.s.scale = 1;
    Outcome r = delta_run("replace", &p);
    double *expected = as_double(problem_v(&p) + p.ld, 16);
    check_tensor("beta 1, same key twice", kind_names[kind], r.x[OUT_O] + 16, expected, 16, vanished, OUTPUT);
    free(expected), outcome_free(&r), problem_free(&p);
  }
}

// Three tokens that tell the decay-weighted mask from the causal mask that the paper prints: alpha = 1
// hides the mistake, alpha = (1, 0.5, 0.25) shows it.
static void test_delta_paper_mask(void) {
  for (int strong = 0; strong < 2; strong++) {
    static const double alpha[] = {1, 0.5, 0.25}, beta[] = {1, 0.5, 0.8}, angle[] = {0.3, 1.1, 2.2};
    Problem p = problem_make(KIND_GDN, 1, 3, 1, 1, 2, 2, 0);
    for (int t = 0; t < 3; t++) {
      p.g[t] = (real)(strong ? log(alpha[t]) : 0), p.b[t] = p.w[t] = (real)beta[t];
      problem_k(&p)[t * p.ld] = (real)cos(angle[t]), problem_k(&p)[t * p.ld + 1] = (real)sin(angle[t]);
    }
    delta_check("three tokens, starting state", &p);
    RecurrenceShape s = recurrence_shape(&p);
    RecurrenceTensors in = recurrence_inputs(&p);
    double o[6], wrong[6] = {0}, u[3][2], S[4], G = 0;
    recurrence_forward(o, NULL, &in, &s);
    memcpy(S, in.h0, sizeof S);
    for (int t = 0; t < 3; t++) {  // o as printed: decayed q times the starting state, plus an undecayed q k^T times u
      const double *k = in.k + 2 * t, *q = in.q + 2 * t;
      G += in.g[t];
      for (int j = 0; j < 2; j++) {
        for (int d = 0; d < 2; d++) S[d * 2 + j] *= exp(in.g[t]);
        u[t][j] = in.w[t] * in.v[2 * t + j] - in.b[t] * (k[0] * S[j] + k[1] * S[2 + j]);
        for (int d = 0; d < 2; d++) {
          S[d * 2 + j] += k[d] * u[t][j];
          wrong[2 * t + j] += s.scale * exp(G) * q[d] * in.h0[d * 2 + j];
        }
        for (int i = 0; i <= t; i++)
          wrong[2 * t + j] += s.scale * (q[0] * in.k[2 * i] + q[1] * in.k[2 * i + 1]) * u[i][j];
      }
    }
    double e = relative_error(wrong, o, 6);
    check(strong ? e > 1e-2 : e < 1e-12, "causal mask in place of the decay: differs by %g with alpha %s 1", e,
          strong ? "below" : "=");
    recurrence_free(&in), problem_free(&p);
  }
}

// ----------------------------------------------------------------------------
// delta rule: what must not matter, to the bit

static void check_rows(const char *what, const Outcome *a, int64_t a0, const Outcome *b, int64_t b0, int64_t rows) {
  for (int i = 0; i < OUTS; i++)
    if (a->width[i])
      check(same_bits(a->x[i] + a0 * a->width[i], b->x[i] + b0 * b->width[i], rows * a->width[i]),
            "%s: %s has other bits", what, out_names[i]);
}
// The same for documents: what is left out by selection may be 0 or -0.
static void check_documents(const char *what, const Outcome *a, const Outcome *b, int64_t first, int64_t rows) {
  for (int i = 0; i < OUTS; i++)
    if (a->width[i])
      check(same_values(a->x[i] + first * a->width[i], b->x[i] + first * a->width[i], rows * a->width[i]),
            "%s: %s of another document has changed", what, out_names[i]);
}
// Tokens of one outcome against the same tokens of a whole row. A gate's gradient is a difference that may be nothing
// for one token, so its error is measured against the root mean square of the row's.
static void check_part(const char *what, const Outcome *part, int64_t p0, const Outcome *whole, int64_t w0, int64_t n,
                       int64_t row) {
  for (int i = 0; i < OUTS; i++) {
    if (!whole->width[i]) continue;
    int64_t width = whole->width[i];
    double *ref = as_double(whole->x[i] + w0 * width, n * width), floor = 0;
    for (int64_t j = 0; i == OUT_DG && j < row * width; j++) floor += pow((double)whole->x[i][j], 2) / (double)row;
    check_tensor(what, out_names[i], part->x[i] + p0 * width, ref, n * width, fmax(sqrt(floor), vanished),
                 i < 2 ? OUTPUT : GRADIENT);
    free(ref);
  }
}

static void test_delta_future(void) {
  enum { T = 129 };
  static const int when[] = {1, 40, 63, 64, 100, 128};
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < 6; i++) {
      Problem p = problem_make(kind, 1, T, 1, 2, 16, 12, 0);
      Outcome before = delta_run("future", &p);
      problem_randomize(&p, 0, when[i], T);
      if (p.g) fill_uniform(p.g + when[i] * p.g_width, p.g_width, -60, -40);
      Outcome after = delta_run("future", &p);
      int64_t width = before.width[OUT_O], done = when[i] * width;
      check(same_bits(before.x[OUT_O], after.x[OUT_O], done), "%s: a token of the future changes outputs before %d",
            kind_names[kind], when[i]);
      check(!same_bits(before.x[OUT_O] + done, after.x[OUT_O] + done, width), "%s: output %d ignores its token",
            kind_names[kind], when[i]);
      outcome_free(&before), outcome_free(&after), problem_free(&p);
    }
}

static void test_delta_rows_threads(void) {
  enum { T = 70 };
  for (int kind = 0; kind < KINDS; kind++) {
    char text[100];
    Problem p = problem_make(kind, 3, T, 2, 4, 9, 12, 0);
    Outcome all = delta_run("rows", &p);
    int64_t state = state_of(&p) / 3;
    for (int b = 0; b < 3; b++) {
      Problem one = problem_slice(&p, b, b + 1, 0, T);
      Outcome r = delta_run("rows", &one);
      snprintf(text, sizeof text, "%s: row %d of a batch against the row alone", kind_names[kind], b);
      check_rows(text, &all, b * T, &r, 0, T);
      check(same_bits(all.x[OUT_H] + b * state, r.x[OUT_H], state) &&
                same_bits(all.x[OUT_DH0] + b * state, r.x[OUT_DH0], state),
            "%s: states", text);
      outcome_free(&r), problem_free(&one);
    }
    for (int threads = 1; threads <= 3; threads++) {
      omp_set_num_threads(threads);
      Outcome r = delta_run("threads", &p);
      snprintf(text, sizeof text, "%s with %d threads", kind_names[kind], threads);
      check_rows(text, &all, 0, &r, 0, 3 * T);
      check(same_bits(all.x[OUT_H], r.x[OUT_H], 3 * state) && same_bits(all.x[OUT_DH0], r.x[OUT_DH0], 3 * state),
            "%s: states", text);
      outcome_free(&r);
    }
    omp_set_num_threads(1);
    // gradients that are not wanted are not touched and do not change the others; no dh_end and no h0 are zeros
    DeltaInputs in = {problem_q(&p), problem_k(&p), problem_v(&p), p.ld, p.ld, p.ld, p.g, p.b, p.w, p.start};
    memset(p.h0, 0, (size_t)(3 * state) * sizeof(real)), memset(p.dh_end, 0, (size_t)(3 * state) * sizeof(real));
    Outcome zero = delta_run("zeros", &p);
    real *o = buffer(zero.n[OUT_O]), *states = buffer(3 * state * 2), *dq = buffer(zero.n[OUT_DQ]),
         *dk = buffer(zero.n[OUT_DK]), *dv = buffer(zero.n[OUT_DV]);
    delta_rule_forward(o, states, NULL, &in, NULL, &p.s);
    DeltaGradients few = {dq, dk, dv, p.s.HV * p.s.V, NULL, NULL, NULL, NULL};
    delta_rule_backward(&few, p.d_o, NULL, states, &in, &p.s);
    check(same_bits(o, zero.x[OUT_O], zero.n[OUT_O]) && same_bits(dq, zero.x[OUT_DQ], zero.n[OUT_DQ]) &&
              same_bits(dk, zero.x[OUT_DK], zero.n[OUT_DK]) && same_bits(dv, zero.x[OUT_DV], zero.n[OUT_DV]),
          "%s: NULL in place of zeros or of unwanted gradients changes the bits", kind_names[kind]);
    buffer_free(o), buffer_free(states), buffer_free(dq), buffer_free(dk), buffer_free(dv);
    outcome_free(&all), outcome_free(&zero), problem_free(&p);
  }
}

// Whole sequence = pieces with the state carried forward and its gradient carried back.
static void test_delta_pieces(void) {
  enum { T = 100 };
  for (int kind = 0; kind < KINDS; kind++)
    for (int mode = 0; mode < 2; mode++) {
      char text[100];
      snprintf(text, sizeof text, "%s: whole sequence against %s", kind_names[kind], mode ? "single steps" : "pieces");
      Problem p = problem_make(kind, 2, T, 1, 2, 9, 12, 0);
      Outcome whole = delta_run(text, &p);
      static const int cuts[] = {0, 1, 37, T};
      int pieces = mode ? T : 3;
      Problem *piece = (Problem *)alloc_array(pieces, sizeof *piece, "test");
      real *carried = buffer_copy(p.h0, state_of(&p));
      for (int i = 0; i < pieces; i++) {
        piece[i] = problem_slice(&p, 0, 2, mode ? i : cuts[i], mode ? i + 1 : cuts[i + 1]);
        memcpy(piece[i].h0, carried, (size_t)state_of(&p) * sizeof(real));
        Outcome r = delta_run(text, &piece[i]);
        memcpy(carried, r.x[OUT_H], (size_t)state_of(&p) * sizeof(real));
        outcome_free(&r);
      }
      double *end = as_double(whole.x[OUT_H], state_of(&p));
      check_tensor(text, "h_end", carried, end, state_of(&p), vanished, OUTPUT);
      memcpy(carried, p.dh_end, (size_t)state_of(&p) * sizeof(real));
      for (int i = pieces - 1; i >= 0; i--) {
        memcpy(piece[i].dh_end, carried, (size_t)state_of(&p) * sizeof(real));
        Outcome r = delta_run(text, &piece[i]);
        memcpy(carried, r.x[OUT_DH0], (size_t)state_of(&p) * sizeof(real));
        int t0 = mode ? i : cuts[i], n = piece[i].s.T;
        for (int b = 0; b < 2; b++) check_part(text, &r, b * n, &whole, b * T + t0, n, T);
        outcome_free(&r), problem_free(&piece[i]);
      }
      double *begin = as_double(whole.x[OUT_DH0], state_of(&p));
      check_tensor(text, "dh0", carried, begin, state_of(&p), vanished, GRADIENT);
      free(end), free(begin), free(piece), buffer_free(carried), outcome_free(&whole), problem_free(&p);
    }
}

// Documents inside a row. Row 0 has the borders, row 1 continues what was carried in.
static void test_delta_documents(void) {
  enum { T = 130 };
  static const int borders[][6] = {{0, 37, 88, -1},        {0, 64, -1}, {0, 1, 2, 3, -1},      {0, 63, 64, 65, -1},
                                   {0, 126, 127, 129, -1}, {0, -1},     {20, 40, 41, 100, -1}, {64, 128, -1}};
  static const int none[] = {-1};
  for (int kind = 0; kind < KINDS; kind++)
    for (int i = 0; i < 8; i++) {
      char text[120];
      snprintf(text, sizeof text, "%s, documents from %d, %d", kind_names[kind], borders[i][0], borders[i][1]);
      Problem p = problem_make(kind, 2, T, 1, 2, 7, 9, 0);
      set_documents(&p, 0, borders[i]), set_documents(&p, 1, none);
      delta_check("documents", &p);
      Outcome whole = delta_run(text, &p);
      int count = 0;
      while (borders[i][count] >= 0) count++;
      for (int k = 0; k < count; k++) {  // each document alone, with no state and no start array
        int t0 = borders[i][k], t1 = k + 1 < count ? borders[i][k + 1] : T, n = t1 - t0;
        Problem alone = problem_slice(&p, 0, 1, t0, t1);
        free(alone.start), alone.start = NULL;
        memset(alone.h0, 0, (size_t)state_of(&alone) * sizeof(real));
        if (k + 1 < count) memset(alone.dh_end, 0, (size_t)state_of(&alone) * sizeof(real));
        Outcome r = delta_run(text, &alone);
        check_part(text, &r, 0, &whole, t0, n, T);
        outcome_free(&r), problem_free(&alone);
      }
      // other contents before the second border (gates, starting state and all): the values after it stay
      int border = borders[i][count > 1];
      if (border > 0) {
        problem_randomize(&p, 0, 0, border);
        if (p.g) fill_uniform(p.g, border * p.g_width, -120, 0);
        fill_normal(p.h0, state_of(&p) / 2, 3);
        Outcome other = delta_run(text, &p);
        check_documents(text, &whole, &other, border, 2 * T - border);
        check(same_bits(whole.x[OUT_H], other.x[OUT_H], state_of(&p)), "%s: h_end has other bits", text);
        check(!same_bits(whole.x[OUT_O], other.x[OUT_O], whole.width[OUT_O]), "%s: nothing changed", text);
        outcome_free(&whole);
        whole = other;
      }
      // and from the last border on: the values before it stay, gradients included
      int last = borders[i][count - 1];
      if (last > 0) {
        problem_randomize(&p, 0, last, T);
        if (p.g) fill_uniform(p.g + last * p.g_width, (T - last) * p.g_width, -120, 0);
        Outcome other = delta_run(text, &p);
        check_documents(text, &whole, &other, 0, last);
        outcome_free(&other);
      }
      outcome_free(&whole), problem_free(&p);
    }
}

// ----------------------------------------------------------------------------
// delta rule: one mixer as a special case of another

// The same tokens as a problem of another kind: g, b and w given anew by the caller.
static Problem problem_as(const Problem *p, int kind) {
  Problem x = problem_make(kind, p->s.B, p->s.T, p->s.H, p->s.HV, p->s.K, p->s.V, 0);
  memcpy(x.packed, p->packed, (size_t)(tokens_of(p) * p->ld) * sizeof(real));
  memcpy(x.h0, p->h0, (size_t)state_of(p) * sizeof(real));
  memcpy(x.dh_end, p->dh_end, (size_t)state_of(p) * sizeof(real));
  memcpy(x.d_o, p->d_o, (size_t)(tokens_of(p) * p->s.HV * p->s.V) * sizeof(real));
  x.s.scale = p->s.scale;
  return x;
}
// dst[n,i] = src[n, i / times]
static void spread(real *dst, const real *src, int64_t n, int times) {
  for (int64_t i = 0; i < n * times; i++) dst[i] = src[i / times];
}
static double *sum_groups(const real *x, int64_t n, int times) {
  double *sum = (double *)alloc_zeroed(n, sizeof(double), "test");
  for (int64_t i = 0; i < n * times; i++) sum[i / times] += (double)x[i];
  return sum;
}
static void check_reduction(const char *what, const Problem *wide, const Problem *narrow) {
  Outcome a = delta_run(what, wide), b = delta_run(what, narrow);
  for (int i = 0; i < OUTS; i++) {
    if (!a.n[i] || !b.n[i]) continue;
    double *ref = sum_groups(a.x[i], b.n[i], (int)(a.n[i] / b.n[i]));
    double floor = 0;
    for (int64_t j = 0; i == OUT_DG && j < a.n[i]; j++) floor += (double)a.x[i][j] * (double)a.x[i][j];
    check_tensor(what, out_names[i], b.x[i], ref, b.n[i], fmax(sqrt(floor), vanished), i < 2 ? OUTPUT : GRADIENT);
    free(ref);
  }
  outcome_free(&a), outcome_free(&b);
}

static void test_delta_reductions(void) {
  enum { B = 2, T = 131, H = 2, K = 7, V = 10 };
  const int64_t n = B * T * H;
  Problem kda = problem_make(KIND_KDA, B, T, H, H, K, V, 0), gdn2 = problem_as(&kda, KIND_GDN2);
  memcpy(gdn2.g, kda.g, (size_t)(n * K) * sizeof(real));
  spread(gdn2.b, kda.b, n, K), spread(gdn2.w, kda.w, n, V);
  check_reduction("GDN-2 with equal gates is KDA", &gdn2, &kda);

  Problem gdn = problem_as(&kda, KIND_GDN);
  spread(kda.g, gdn.g, n, K);
  memcpy(kda.b, gdn.b, (size_t)n * sizeof(real)), memcpy(kda.w, gdn.w, (size_t)n * sizeof(real));
  check_reduction("KDA with equal channels is GDN", &kda, &gdn);

  Problem delta = problem_as(&gdn, KIND_DELTANET);
  memcpy(delta.b, gdn.b, (size_t)n * sizeof(real)), memcpy(delta.w, gdn.w, (size_t)n * sizeof(real));
  set_decay(&gdn, DECAY_ZERO);
  check_reduction("GDN with g = 0 is DeltaNet", &gdn, &delta);

  Problem ssd = problem_as(&gdn, KIND_SSD);
  memcpy(gdn.g, ssd.g, (size_t)n * sizeof(real)), memcpy(gdn.w, ssd.w, (size_t)n * sizeof(real));
  memset(gdn.b, 0, (size_t)n * sizeof(real));
  check_reduction("GDN with b = 0 is SSD", &gdn, &ssd);
  problem_free(&kda), problem_free(&gdn2), problem_free(&gdn), problem_free(&delta), problem_free(&ssd);
}

// ----------------------------------------------------------------------------
// short convolution

typedef struct {
  ConvShape s;
  const int32_t *start;
  int tail, bias;
} ConvSizes;

// x: input [N,ch], weight [ch,taps], bias [ch], tail [B,taps-1,ch]
static void conv_formula(cplx *y, cplx *const *x, const void *sizes) {
  const ConvSizes *z = (const ConvSizes *)sizes;
  int ch = z->s.channels, taps = z->s.taps;
  for (int b = 0; b < z->s.B; b++)
    for (int t = 0; t < z->s.T; t++)
      for (int c = 0; c < ch; c++) {
        int64_t n = (int64_t)b * z->s.T + t;
        cplx sum = taps ? (z->bias ? x[2][c] : 0) : x[0][n * ch + c];
        for (int lag = 0; lag < taps; lag++) {  // the last tap is the current token
          cplx w = x[1][c * taps + taps - 1 - lag];
          if (t - lag < z->start[n]) break;
          if (t - lag >= 0) sum += w * x[0][(n - lag) * ch + c];
          if (t - lag < 0 && z->tail) sum += w * x[3][((int64_t)b * (taps - 1) + taps - 1 + t - lag) * ch + c];
        }
        y[n * ch + c] = csilu(sum);
      }
}

// documents 0: one, from before the row; 1: from the row's first token; 2: lengths 1, 2, 3, 1, 2, 3, ...
static void conv_check(int B, int T, int ch, int taps, int bias, int tail, int documents) {
  char what[120];
  snprintf(what, sizeof what, "conv B=%d T=%d channels=%d taps=%d bias=%d tail=%d documents=%d", B, T, ch, taps, bias,
           tail, documents);
  ConvShape s = {B, T, ch, taps};
  int64_t N = (int64_t)B * T, ld = ch + 5, first = 2;
  int32_t *start = (int32_t *)alloc_array(N, sizeof *start, "test");
  for (int b = 0; b < B; b++)
    for (int t = 0, length = 1, begin = 0; t < T; t++) {
      if (t - begin == length) begin = t, length = length % 3 + 1;
      start[b * T + t] = documents == 0 ? -100 : documents == 1 ? 0 : begin;
    }
  real *x = buffer_normal(N * ch, 1), *w = buffer_normal(ch * (taps ? taps : 1), 0.6), *b = buffer_normal(ch, 0.5);
  real *carried = buffer_normal(B * (taps > 1 ? taps - 1 : 1) * ch, 1), *packed = buffer(N * ld);
  real *pre = buffer(N * ch), *y = buffer(N * ch), *dy = buffer_normal(N * ch, 1);
  pack(packed, ld, first, x, N, ch);
  short_conv_forward(y, pre, packed + first, ld, tail ? carried : NULL, w, bias ? b : NULL, start, s);
  // training starts every row without a tail, so only then there is a backward pass
  real *dx = buffer(N * ld), *dw = buffer_normal(ch * (taps ? taps : 1), 1), *db = buffer_normal(ch, 1),
       *dx_dense = NULL;
  real *dw0 = buffer_copy(dw, ch * (taps ? taps : 1)), *db0 = buffer_copy(db, ch);
  if (!tail) {
    real *scratch = buffer_copy(dy, N * ch);
    short_conv_backward(dx + first, dw, bias ? db : NULL, scratch, pre, packed + first, ld, w, start, s);
    dx_dense = unpack(dx, ld, first, N, ch);
    check(others_untouched(dx, ld, first, N, ch), "%s: dx written beside its columns", what);
    buffer_free(scratch);
  }
  ConvSizes sizes = {s, start, tail, bias};
  Reference r = {conv_formula,
                 &sizes,
                 N * ch,
                 4,
                 {"x", "weight", "bias", "tail"},
                 {x, w, b, carried},
                 {N * ch, (int64_t)ch * taps, ch, taps > 1 ? (int64_t)B * (taps - 1) * ch : 0},
                 {dx_dense, tail ? NULL : dw, tail || !bias || !taps ? NULL : db, NULL},
                 {NULL, dw0, db0, NULL}};
  reference_check(what, &r, y, dy, 0);
  if (!tail && B == 2) {  // the gradients of two rows are the sum of those of each
    real *sum = buffer_copy(dw0, ch * (taps ? taps : 1)), *dx1 = buffer(N * ld), *scratch = buffer_copy(dy, N * ch);
    ConvShape one = {1, T, ch, taps};
    for (int row = 0; row < 2; row++)
      short_conv_backward(dx1 + row * T * ld + first, sum, NULL, scratch + row * T * ch, pre + row * T * ch,
                          packed + row * T * ld + first, ld, w, start + row * T, one);
    double *ref = as_double(sum, (int64_t)ch * taps);
    check_tensor(what, "weight gradient of two rows against one and one", dw, ref, (int64_t)ch * taps, vanished,
                 GRADIENT);
    real *dense = unpack(dx1, ld, first, N, ch);
    check(same_bits(dense, dx_dense, N * ch), "%s: rows of a batch are not independent", what);
    free(ref), buffer_free(sum), buffer_free(dx1), buffer_free(scratch), buffer_free(dense);
  }
  free(start), buffer_free(x), buffer_free(w), buffer_free(b), buffer_free(carried), buffer_free(packed);
  buffer_free(pre), buffer_free(y), buffer_free(dy), buffer_free(dx), buffer_free(dw), buffer_free(db);
  buffer_free(dx_dense), buffer_free(dw0), buffer_free(db0);
}

static void test_conv_small(void) { conv_check(2, 5, 3, 4, 1, 0, 0); }

static void test_conv(void) {
  static const int lengths[] = {1, 2, 3, 4, 5, 17, 65}, taps[] = {2, 3, 4, 0};
  for (int i = 0; i < 7; i++)
    for (int j = 0; j < 4; j++)
      for (int bias = 0; bias < 2; bias++)
        for (int documents = 0; documents < 3; documents++) {
          conv_check(2, lengths[i], 3, taps[j], bias, 0, documents);
          if (taps[j]) conv_check(2, lengths[i], 3, taps[j], bias, 1, documents);
          if (lengths[i] == 5) conv_check(1, 5, 37, taps[j], bias, 0, documents);  // more than two blocks of channels
        }
  // whole row = two pieces with the tail carried, to the bit; the inputs of the first piece are the tail of the second
  enum { T = 9, CH = 5, TAPS = 4 };
  real *x = buffer_normal(T * CH, 1), *w = buffer_normal(CH * TAPS, 1), *pre = buffer(T * CH), *y = buffer(T * CH),
       *part = buffer(T * CH);
  int32_t start[T];
  ConvShape s = {1, T, CH, TAPS}, a = {1, 4, CH, TAPS}, b = {1, T - 4, CH, TAPS};
  for (int t = 0; t < T; t++) start[t] = -100;
  short_conv_forward(y, pre, x, CH, NULL, w, NULL, start, s);
  short_conv_forward(part, pre, x, CH, NULL, w, NULL, start, a);
  short_conv_forward(part + 4 * CH, pre, x + 4 * CH, CH, x + CH, w, NULL, start, b);
  check(same_bits(y, part, T * CH), "conv: whole row against two pieces");
  buffer_free(x), buffer_free(w), buffer_free(pre), buffer_free(y), buffer_free(part);
}

// ----------------------------------------------------------------------------
// norms

typedef struct {
  int64_t N;
  int heads, width;  // groups a token, elements a group
  double eps;
  int kind, norm, gate;  // meaning by formula
} NormSizes;

static void rmsnorm_formula(cplx *y, cplx *const *x, const void *sizes) {
  const NormSizes *z = (const NormSizes *)sizes;
  int d = z->width;
  for (int64_t n = 0; n < z->N; n++) {
    cplx mean = 0;
    for (int j = 0; j < d; j++) mean += x[0][n * d + j] * x[0][n * d + j] / d;
    for (int j = 0; j < d; j++) y[n * d + j] = x[0][n * d + j] / csqrt(mean + z->eps) * x[1][j];
  }
}

static void test_rmsnorm(void) {
  static const int widths[] = {1, 5, 16, 33};
  for (int i = 0; i < 4; i++)
    for (int scale = 0; scale < 3; scale++) {  // x ordinary, small against eps, large
      int d = widths[i];
      enum { N = 4 };
      double eps = (double)(real)1e-5;
      real *x = buffer_normal(N * d, scale == 0   ? 1
                                     : scale == 1 ? 1e-3
                                                  : 1e4),
           *w = buffer_normal(d, 1), *y = buffer(N * d), *rstd = buffer(N), *dy = buffer_normal(N * d, 1);
      rmsnorm_forward(y, rstd, x, w, N, d, eps);
      real *dx = buffer(N * d), *dx0, *dw = buffer_normal(d, 1), *dw0 = buffer_copy(dw, d);
      fill_normal(dx, N * d, 1e-5), dx0 = buffer_copy(dx, N * d);
      if (scale == 2) memset(dx, 0, N * d * sizeof(real)), memset(dx0, 0, N * d * sizeof(real));
      rmsnorm_backward(dx, dw, dy, x, rstd, w, N, d);
      NormSizes z = {N, 1, d, eps, 0, 0, 0};
      Reference r = {rmsnorm_formula, &z, N * d, 2, {"x", "weight"}, {x, w}, {N * d, d}, {dx, dw}, {dx0, dw0}};
      // with one channel and large x the norm leaves a sign: its gradient is a difference of equal terms
      if (d == 1 && scale != 1) r.dx[0] = NULL;
      reference_check("RMSNorm", &r, y, dy, 0);
      buffer_free(x), buffer_free(w), buffer_free(y), buffer_free(rstd), buffer_free(dy), buffer_free(dx);
      buffer_free(dx0), buffer_free(dw), buffer_free(dw0);
    }
}

// x: o [N,heads,V], gate [N,heads,V], weight [V]
static void output_norm_formula(cplx *y, cplx *const *x, const void *sizes) {
  const NormSizes *z = (const NormSizes *)sizes;
  int V = z->width;
  for (int64_t i = 0; i < z->N * z->heads; i++) {
    cplx mean = 0;
    for (int j = 0; j < V; j++) mean += x[0][i * V + j] * x[0][i * V + j] / V;
    for (int j = 0; j < V; j++) {
      cplx u = x[0][i * V + j];
      if (z->norm) u *= x[2][j] / csqrt(mean + z->eps);
      if (z->gate) u *= z->kind == OUTPUT_GATE_SIGMOID ? csigmoid(x[1][i * V + j]) : csilu(x[1][i * V + j]);
      y[i * V + j] = u;
    }
  }
}

static void test_output_norm(void) {
  enum { N = 5, HEADS = 3, V = 19, WIDTH = HEADS * V, LD = WIDTH + 4 };
  for (int norm = 0; norm < 2; norm++)
    for (int mode = 0; mode < 4; mode++) {  // 0 SiLU, 1 sigmoid, 2 no gate, 3 SiLU in a dense array
      char what[80];
      snprintf(what, sizeof what, "output norm, norm %d, gate %d", norm, mode);
      OutputGate act = mode == 1 ? OUTPUT_GATE_SIGMOID : mode == 2 ? OUTPUT_GATE_NONE : OUTPUT_GATE_SILU;
      int gated = mode != 2, ld = mode == 3 ? WIDTH : LD, first = mode == 3 ? 0 : 3;
      double eps = (double)(real)1e-5;
      real *o = buffer_normal(N * WIDTH, 1), *gate = buffer_normal(N * WIDTH, 2), *w = buffer_normal(V, 1);
      real *packed = buffer(N * ld), *dpacked = buffer(N * ld), *y = buffer(N * WIDTH), *d_o = buffer(N * WIDTH);
      real *dy = buffer_normal(N * WIDTH, 1), *dw = buffer_normal(V, 1), *dw0 = buffer_copy(dw, V);
      pack(packed, ld, first, gate, N, WIDTH);
      const real *g = gated ? packed + first : NULL, *weight = norm ? w : NULL;
      output_norm_forward(y, o, g, ld, weight, N, HEADS, V, act, eps);
      output_norm_backward(d_o, gated ? dpacked + first : NULL, norm ? dw : NULL, dy, o, g, ld, weight, N, HEADS, V,
                           act, eps);
      real *dgate = unpack(dpacked, ld, first, N, WIDTH);
      check(others_untouched(dpacked, ld, first, N, WIDTH), "%s: dgate written beside its columns", what);
      NormSizes z = {N, HEADS, V, eps, act, norm, gated};
      Reference r = {output_norm_formula,
                     &z,
                     N * WIDTH,
                     3,
                     {"o", "gate", "weight"},
                     {o, gate, w},
                     {N * WIDTH, N * WIDTH, V},
                     {d_o, gated ? dgate : NULL, norm ? dw : NULL},
                     {NULL, NULL, dw0}};
      reference_check(what, &r, y, dy, 0);
      real *in_place = buffer_copy(dy, N * WIDTH);  // d_o may be dy
      output_norm_backward(in_place, gated ? dpacked + first : NULL, norm ? dw : NULL, in_place, o, g, ld, weight, N,
                           HEADS, V, act, eps);
      real *again = unpack(dpacked, ld, first, N, WIDTH);
      check(same_bits(in_place, d_o, N * WIDTH) && (!gated || same_bits(again, dgate, N * WIDTH)),
            "%s: other bits in place", what);
      buffer_free(o), buffer_free(gate), buffer_free(w), buffer_free(packed), buffer_free(dpacked), buffer_free(y);
      buffer_free(d_o), buffer_free(dy), buffer_free(dw), buffer_free(dw0), buffer_free(dgate), buffer_free(in_place);
      buffer_free(again);
    }
}

// x: o [N,width], x [N,width], z [N,width], D [heads], weight [width]
static void mamba2_formula(cplx *y, cplx *const *x, const void *sizes) {
  const NormSizes *z = (const NormSizes *)sizes;
  int width = z->heads * z->width, n = width / z->norm;
  for (int64_t t = 0; t < z->N; t++)
    for (int j = 0; j < width; j++) {
      cplx mean = 0, own = 0;
      for (int i = j / n * n; i < j / n * n + n; i++) {
        int64_t at = t * width + i;
        cplx u = (x[0][at] + x[3][i / z->width] * x[1][at]) * csilu(x[2][at]);
        mean += u * u / n;
        if (i == j) own = u;
      }
      y[t * width + j] = own / csqrt(mean + z->eps) * x[4][j];
    }
}

static void test_mamba2_output(void) {
  static const int shapes[][3] = {{3, 4, 1}, {3, 4, 3}, {6, 3, 1}, {6, 3, 3}, {2, 9, 1}};  // heads, P, groups
  for (int i = 0; i < 5; i++) {
    enum { N = 4 };
    char what[80];
    int heads = shapes[i][0], P = shapes[i][1], groups = shapes[i][2], width = heads * P, ldx = width + 3,
        ldz = width + 5;
    snprintf(what, sizeof what, "Mamba2 output, %d heads of %d, %d groups", heads, P, groups);
    double eps = (double)(real)1e-5;
    real *o = buffer_normal(N * width, 1), *x = buffer_normal(N * width, 1), *z = buffer_normal(N * width, 2),
         *D = buffer_normal(heads, 1), *w = buffer_normal(width, 1);
    real *px = buffer(N * ldx), *pz = buffer(N * ldz), *dpx = buffer(N * ldx), *dpz = buffer(N * ldz);
    real *y = buffer(N * width), *dy = buffer_normal(N * width, 1), *d_o = buffer_copy(dy, N * width);
    real *dD = buffer_normal(heads, 1), *dD0 = buffer_copy(dD, heads), *dw = buffer_normal(width, 1),
         *dw0 = buffer_copy(dw, width);
    pack(px, ldx, 1, x, N, width), pack(pz, ldz, 2, z, N, width);
    mamba2_output_forward(y, o, px + 1, ldx, pz + 2, ldz, D, w, N, heads, P, groups, eps);
    mamba2_output_backward(d_o, dpx + 1, ldx, dpz + 2, dD, dw, d_o, o, px + 1, ldx, pz + 2, ldz, D, w, N, heads, P,
                           groups, eps);  // in place, as the model calls it
    real *dx = unpack(dpx, ldx, 1, N, width), *dz = unpack(dpz, ldz, 2, N, width);
    check(others_untouched(dpx, ldx, 1, N, width) && others_untouched(dpz, ldz, 2, N, width),
          "%s: written beside the columns", what);
    NormSizes s = {N, heads, P, eps, 0, groups, 0};
    Reference r = {mamba2_formula,
                   &s,
                   N * width,
                   5,
                   {"o", "x", "z", "D", "weight"},
                   {o, x, z, D, w},
                   {N * width, N * width, N * width, heads, width},
                   {d_o, dx, dz, dD, dw},
                   {NULL, NULL, NULL, dD0, dw0}};
    reference_check(what, &r, y, dy, 0);
    real *apart = buffer(N * width);
    mamba2_output_backward(apart, dpx + 1, ldx, dpz + 2, dD, dw, dy, o, px + 1, ldx, pz + 2, ldz, D, w, N, heads, P,
                           groups, eps);
    check(same_bits(apart, d_o, N * width), "%s: other bits in place", what);
    buffer_free(o), buffer_free(x), buffer_free(z), buffer_free(D), buffer_free(w), buffer_free(px), buffer_free(pz);
    buffer_free(dpx), buffer_free(dpz), buffer_free(y), buffer_free(dy), buffer_free(d_o), buffer_free(dD);
    buffer_free(dD0), buffer_free(dw), buffer_free(dw0), buffer_free(dx), buffer_free(dz), buffer_free(apart);
  }
}

static void qk_norm_formula(cplx *y, cplx *const *x, const void *sizes) {
  const NormSizes *z = (const NormSizes *)sizes;
  int K = z->width;
  for (int64_t i = 0; i < z->N * z->heads; i++) {
    cplx sum = 0;
    for (int j = 0; j < K; j++) {
      cplx u = x[0][i * K + j];
      sum += z->norm == NORM_L2 ? u * u : creal(u) < 0 ? -u : u;
    }
    for (int j = 0; j < K; j++)
      y[i * K + j] = x[0][i * K + j] / (z->norm == NORM_L2 ? csqrt(sum + z->eps) : sum + z->eps);
  }
}

static void test_qk_norm(void) {
  enum { N = 6, HEADS = 2, K = 9, WIDTH = HEADS * K, LD = WIDTH + 3 };
  for (int norm = NORM_L2; norm <= NORM_L1; norm++) {
    const char *what = norm == NORM_L2 ? "L2 norm" : "L1 norm";
    double eps = (double)(real)1e-6;
    real *x = buffer_normal(N * WIDTH, 1), *packed = buffer(N * LD), *dpacked = buffer(N * LD), *y = buffer(N * WIDTH),
         *dy = buffer_normal(N * WIDTH, 1);
    for (int j = 0; j < K; j++) x[WIDTH + j] = (real)(x[WIDTH + j] * 1e-3);  // |k| near the root of eps
    pack(packed, LD, 1, x, N, WIDTH);
    qk_norm_forward(y, packed + 1, LD, N, HEADS, K, (QKNorm)norm, eps);
    qk_norm_backward(dpacked + 1, dy, packed + 1, LD, N, HEADS, K, (QKNorm)norm, eps);
    real *dx = unpack(dpacked, LD, 1, N, WIDTH);
    check(others_untouched(dpacked, LD, 1, N, WIDTH), "%s: dx written beside its columns", what);
    NormSizes z = {N, HEADS, K, eps, 0, norm, 0};
    Reference r = {qk_norm_formula, &z, N * WIDTH, 1, {"x"}, {x}, {N * WIDTH}, {dx}, {NULL}};
    reference_check(what, &r, y, dy, 0);
    // a zero key and one of length 1e-8: zero, or nearly, forward; finite and bounded backward; the rest
    // of the batch keeps its bits
    for (int j = 0; j < K; j++) packed[2 * LD + 1 + j] = 0, packed[3 * LD + 1 + j] = (real)(j == 4 ? 1e-8 : 0);
    real *y2 = buffer(N * WIDTH);
    qk_norm_forward(y2, packed + 1, LD, N, HEADS, K, (QKNorm)norm, eps);
    qk_norm_backward(dpacked + 1, dy, packed + 1, LD, N, HEADS, K, (QKNorm)norm, eps);
    real *dx2 = unpack(dpacked, LD, 1, N, WIDTH);
    double bound = norm == NORM_L2 ? 1 / sqrt(eps) : 1 / eps;
    for (int t = 2; t < 4; t++) {
      double size = 0, upstream = 0;
      for (int j = 0; j < K; j++) {
        size += pow((double)dx2[t * WIDTH + j], 2), upstream += pow((double)dy[t * WIDTH + j], 2);
        check(t == 2 ? y2[t * WIDTH + j] == 0 : fabs((double)y2[t * WIDTH + j]) < 0.011, "%s: a vanishing key gives %g",
              what, (double)y2[t * WIDTH + j]);
      }
      check(size > 0 && sqrt(size) <= 1.000001 * bound * sqrt(upstream), "%s: gradient of a vanishing key is %g", what,
            sqrt(size));
    }
    for (int i = 0; i < N * WIDTH; i++) {
      int touched = (i / WIDTH == 2 || i / WIDTH == 3) && i % WIDTH < K;
      if (!touched && (memcmp(&y[i], &y2[i], sizeof(real)) || memcmp(&dx[i], &dx2[i], sizeof(real)))) {
        check(0, "%s: a zero key changes element %d of another", what, i);
        break;
      }
    }
    for (int i = 0; i < N * WIDTH; i++) x[i] = packed[i / WIDTH * LD + 1 + i % WIDTH];
    // |x| has no derivative at 0: there sign(0) = 0 is right, which the formula's one-sided step is not
    r.dx[0] = norm == NORM_L2 ? dx2 : NULL;
    reference_check("norm with vanishing keys", &r, y2, dy, 0);
    buffer_free(x), buffer_free(packed), buffer_free(dpacked), buffer_free(y), buffer_free(dy), buffer_free(dx);
    buffer_free(y2), buffer_free(dx2);
  }
}

// ----------------------------------------------------------------------------
// SwiGLU, embedding, cross-entropy

static void swiglu_formula(cplx *y, cplx *const *x, const void *sizes) {
  const NormSizes *z = (const NormSizes *)sizes;
  int ff = z->width;
  for (int64_t t = 0; t < z->N; t++)
    for (int j = 0; j < ff; j++) y[t * ff + j] = csilu(x[0][t * 2 * ff + j]) * x[0][t * 2 * ff + ff + j];
}

static void test_swiglu(void) {
  enum { N = 5, FF = 7 };
  real *gu = buffer_normal(N * 2 * FF, 3), *s = buffer(N * FF), *ds = buffer_normal(N * FF, 1),
       *dgu = buffer(N * 2 * FF);
  swiglu_forward(s, gu, N, FF);
  swiglu_backward(dgu, ds, gu, N, FF);
  NormSizes z = {N, 1, FF, 0, 0, 0, 0};
  Reference r = {swiglu_formula, &z, N * FF, 1, {"gate and up"}, {gu}, {N * 2 * FF}, {dgu}, {NULL}};
  reference_check("SwiGLU", &r, s, ds, 0);
  gu[0] = 1000, gu[1] = -1000;  // beyond exp's range
  swiglu_forward(s, gu, N, FF);
  swiglu_backward(dgu, ds, gu, N, FF);
  check(s[0] == 1000 * gu[FF] && s[1] == 0 && dgu[0] == ds[0] * gu[FF] && dgu[1] == 0,
        "SwiGLU at 1000 and -1000: %g %g, gradients %g %g", (double)s[0], (double)s[1], (double)dgu[0], (double)dgu[1]);
  buffer_free(gu), buffer_free(s), buffer_free(ds), buffer_free(dgu);
}

static void test_embedding(void) {
  enum { N = 9, VOCAB = 6, D = 21 };
  static const int32_t tokens[N] = {3, 0, 3, 5, 3, 1, 0, 5, 3};  // 2 and 4 do not occur
  real *table = buffer_normal(VOCAB * D, 1), *x = buffer(N * D), *dx = buffer_normal(N * D, 1),
       *grad_table = buffer_normal(VOCAB * D, 1);
  double *ref = as_double(grad_table, VOCAB * D), *rows = (double *)alloc_array(N * D, sizeof(double), "test");
  for (int i = 0; i < N * D; i++) {
    rows[i] = (double)table[tokens[i / D] * D + i % D];
    ref[tokens[i / D] * D + i % D] += (double)dx[i];
  }
  embedding_forward(x, tokens, table, N, D);
  embedding_backward(grad_table, dx, tokens, N, D);
  check_tensor("embedding", "x", x, rows, N * D, vanished, OUTPUT);
  check_tensor("embedding", "gradient of the table", grad_table, ref, VOCAB * D, vanished, GRADIENT);
  free(ref), free(rows), buffer_free(table), buffer_free(x), buffer_free(dx), buffer_free(grad_table);
}

typedef struct {
  int64_t N;
  int ld, vocab;
  const int32_t *targets;
} LossSizes;

static void loss_formula(cplx *y, cplx *const *x, const void *sizes) {
  const LossSizes *z = (const LossSizes *)sizes;
  for (int64_t t = 0; t < z->N; t++) {
    cplx sum = 0;
    double max = -INFINITY;
    for (int j = 0; j < z->vocab; j++) max = fmax(max, creal(x[0][t * z->ld + j]));
    for (int j = 0; j < z->vocab; j++) sum += cexp(x[0][t * z->ld + j] - max);
    y[t] = z->targets[t] < 0 ? 0 : max + clog(sum) - x[0][t * z->ld + z->targets[t]];
  }
}

static void test_cross_entropy(void) {
  enum { N = 7, VOCAB = 13, LD = 16 };
  static const int32_t targets[N] = {0, 12, -1, 5, 5, -1, 7};
  for (int mode = 0; mode < 3; mode++) {  // ordinary logits; far apart; far from 0
    real *logits = buffer_normal(N * LD, mode == 1 ? 30 : 2), *losses = buffer(N), *lse = buffer(N);
    for (int64_t i = 0; mode == 2 && i < N * LD; i++) logits[i] = (real)(5000 + floor(8 * (double)logits[i]) / 8);
    for (int t = 0; t < N; t++)
      for (int j = VOCAB; j < LD; j++) logits[t * LD + j] = 1e6;  // padding that would swallow the softmax
    real *grad = buffer_copy(logits, N * LD), scale = (real)0.125, dy[N];
    double sum = cross_entropy_forward(losses, lse, logits, LD, targets, N, VOCAB), expected = 0;
    cross_entropy_backward(grad, LD, lse, targets, N, VOCAB, scale);
    for (int t = 0; t < N; t++) dy[t] = scale, expected += (double)losses[t];
    LossSizes z = {N, LD, VOCAB, targets};
    Reference r = {loss_formula, &z, N, 1, {"logits"}, {logits}, {N * LD}, {grad}, {NULL}};
    // at 5000 a float's log-sum is good to 2e-4: within a gradient's limit, not within an output's
    reference_check("cross-entropy", &r, mode < 2 || sizeof(real) == 8 ? losses : NULL, dy, 0);
    check(fabs(sum - expected) <= 1e-12 * fabs(expected), "cross-entropy: sum %.17g, of losses %.17g", sum, expected);
    for (int t = 0; t < N; t++)
      for (int j = 0; j < LD; j++)
        if (j >= VOCAB || targets[t] < 0)
          check(grad[t * LD + j] == 0, "cross-entropy: gradient %g in padding or without a target",
                (double)grad[t * LD + j]);
        else
          check(isfinite(grad[t * LD + j]) && fabs((double)grad[t * LD + j]) <= 1.001 * (double)scale,
                "cross-entropy: gradient %g", (double)grad[t * LD + j]);
    buffer_free(logits), buffer_free(losses), buffer_free(lse), buffer_free(grad);
  }
}

// ----------------------------------------------------------------------------
// gates

// log(1 + e^x) and its derivative, the long way round
static double long_softplus(double x) { return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x)); }
static double complex_slope(double x) {  // of softplus, by the complex step
  return cimag(x > 0 ? x + 1e-30 * _Complex_I + clog(1 + cexp(-x - 1e-30 * _Complex_I))
                     : clog(1 + cexp(x + 1e-30 * _Complex_I))) /
         1e-30;
}

// One number against another, both possibly tiny: 1e-37 is where float ends.
static void check_number(const char *what, double a_log, double x, double found, double expected, double floor,
                         Role role) {
  double e = fabs(found - expected) <= 1e-37 ? 0 : fabs(found - expected) / fmax(fabs(expected), floor);
  double limit = role == OUTPUT ? limit_output : limit_gradient,
         *worst = role == OUTPUT ? &area.output : &area.gradient;
  if (e > *worst) *worst = e;
  check(isfinite(found) && e <= limit, "%s at A_log %g, x %g: %.9g, expected %.9g", what, a_log, x, found, expected);
}

static void test_decay_gate(void) {
  static const double a_logs[] = {-20, 0, 2.772588722239781, 20, 100},
                      xs[] = {-200, -30, 0, 19.9, 20.1, 30, 89, 200, -3, 1.5, 4};
  enum { HEADS = 5, PER = 3, GATES = HEADS * PER, LD = GATES + 2, POINTS = 11 };
  for (int bounded = 0; bounded < 2; bounded++) {
    double lb = bounded ? -5 : 0, largest = sizeof(real) == 4 ? FLT_MAX : DBL_MAX;
    const char *name = bounded ? "KDA's bounded decay" : "decay";
    real a_log[HEADS], bias[GATES], before[GATES];
    for (int h = 0; h < HEADS; h++) a_log[h] = (real)a_logs[h];
    for (int i = 0; i < GATES; i++) bias[i] = (real)(0.25 * (i % PER)), before[i] = (real)(0.5 * i);
    real *a = buffer(POINTS * LD), *g = buffer(POINTS * GATES), *dg = buffer_normal(POINTS * GATES, 1),
         *da = buffer(POINTS * LD), *da_log = buffer_copy(before, HEADS), *dbias = buffer_copy(before, GATES);
    for (int t = 0; t < POINTS; t++)
      for (int i = 0; i < GATES; i++) a[t * LD + 1 + i] = (real)(xs[t] - (double)bias[i]);
    decay_forward(g, a + 1, LD, a_log, bias, POINTS, GATES, PER, lb);
    decay_backward(da + 1, LD, da_log, dbias, dg, g, a + 1, LD, a_log, bias, POINTS, GATES, PER, lb);
    check(others_untouched(da, LD, 1, POINTS, GATES), "%s: da written beside its columns", name);
    for (int h = 0; h < HEADS; h++) {
      double sum_log = (double)before[h], A = exp((double)a_log[h]), size_log = 1;
      for (int i = h * PER; i < (h + 1) * PER; i++) {
        double sum_bias = (double)before[i], size_bias = 1;
        for (int t = 0; t < POINTS; t++) {
          double x = (double)a[t * LD + 1 + i] + (double)bias[i], d = (double)dg[t * GATES + i], value, slope,
                 slope_log;
          if (bounded) {  // y = sigmoid(A x); y (1 - y) by the smaller tail, so that neither side cancels
            double e = exp(-fabs(A * x)), y = A * x > 0 ? 1 / (1 + e) : e / (1 + e), yy = e / ((1 + e) * (1 + e));
            value = lb * y, slope = lb * yy * A, slope_log = lb * yy * A * x;
          } else {
            value = fmax(-A * long_softplus(x), -1e30);
            slope = value < GATE_FLOOR ? 0 : -A * complex_slope(x), slope_log = value < GATE_FLOOR ? 0 : value;
          }
          check_number(name, a_log[h], x, (double)g[t * GATES + i], value, 0, OUTPUT);
          check(g[t * GATES + i] <= 0, "%s is positive", name);
          double found = (double)da[t * LD + 1 + i];
          if (fabs(d * slope) > largest)  // a true gradient that float cannot hold
            check(isinf(found) && (found > 0) == (d * slope > 0), "%s: gradient %g, expected %g", name, found,
                  d * slope);
          else  // the bounded form is computed as y (1 - y): where y is near 1, the rounding of 1 - y is left
            check_number("its slope", a_log[h], x, found, d * slope,
                         bounded ? 4 * DBL_EPSILON * fabs(d * lb * A) / limit_gradient : 0, GRADIENT);
          sum_bias += d * slope, size_bias += fabs(d * slope);
          sum_log += d * slope_log, size_log += fabs(d * slope_log);
        }
        if (size_bias < largest)
          check(fabs((double)dbias[i] - sum_bias) <= limit_gradient * size_bias,
                "%s: gradient of dt_bias %g, expected %g", name, (double)dbias[i], sum_bias);
        check(!isnan(dbias[i]), "%s: gradient of dt_bias is NaN", name);
      }
      if (size_log < largest)
        check(fabs((double)da_log[h] - sum_log) <= limit_gradient * size_log, "%s: gradient of A_log %g, expected %g",
              name, (double)da_log[h], sum_log);
      check(!isnan(da_log[h]), "%s: gradient of A_log is NaN", name);
    }
    buffer_free(a), buffer_free(g), buffer_free(dg), buffer_free(da), buffer_free(da_log), buffer_free(dbias);
  }
}

static void gate_formula(cplx *y, cplx *const *x, const void *sizes) {  // kind: per head; norm: range
  const NormSizes *z = (const NormSizes *)sizes;
  int per = z->width;
  for (int64_t i = 0; i < z->N * z->heads; i++) {
    cplx mean = 0;
    for (int j = 0; j < per; j++) mean += z->norm * csigmoid(x[0][i * per + j]) / per;
    for (int j = 0; j < per; j++) y[i * per + j] = z->kind ? mean : z->norm * csigmoid(x[0][i * per + j]);
  }
}

static void test_beta_gate(void) {
  enum { N = 4, HEADS = 3, PER = 5, GATES = HEADS * PER, LD = GATES + 3 };
  for (int width = PER_CHANNEL; width <= PER_HEAD; width++)
    for (int range = 1; range <= 2; range++) {
      char what[60];
      snprintf(what, sizeof what, "gate %s, range %d", width == PER_HEAD ? "per head" : "per channel", range);
      real *x = buffer_normal(N * GATES, 2), *packed = buffer(N * LD), *dpacked = buffer(N * LD),
           *y = buffer(N * GATES), *dy = buffer_normal(N * GATES, 1);
      pack(packed, LD, 1, x, N, GATES);
      gate_forward(y, packed + 1, LD, N, GATES, PER, (GateWidth)width, range);
      gate_backward(dpacked + 1, dy, packed + 1, LD, N, GATES, PER, (GateWidth)width, range);
      real *dx = unpack(dpacked, LD, 1, N, GATES);
      check(others_untouched(dpacked, LD, 1, N, GATES), "%s: dx written beside its columns", what);
      NormSizes z = {N, HEADS, PER, 0, width == PER_HEAD, range, 0};
      Reference r = {gate_formula, &z, N * GATES, 1, {"x"}, {x}, {N * GATES}, {dx}, {NULL}};
      reference_check(what, &r, y, dy, 0);
      for (int i = 0; i < N * LD; i++) packed[i] = (real)(i % 2 ? 1e4 : -1e4);  // beyond exp's range
      gate_forward(y, packed + 1, LD, N, GATES, PER, (GateWidth)width, range);
      gate_backward(dpacked + 1, dy, packed + 1, LD, N, GATES, PER, (GateWidth)width, range);
      for (int i = 0; i < N * GATES; i++)
        check(y[i] >= 0 && y[i] <= range && dpacked[i / GATES * LD + 1 + i % GATES] == 0, "%s at 1e4: %g, gradient %g",
              what, (double)y[i], (double)dpacked[i / GATES * LD + 1 + i % GATES]);
      buffer_free(x), buffer_free(packed), buffer_free(dpacked), buffer_free(y), buffer_free(dy), buffer_free(dx);
    }
}

// ----------------------------------------------------------------------------
// rotary positions and attention

static void test_rope(void) {
  enum { B = 2, T = 5, HEADS = 3, D = 6, WIDTH = HEADS * D, N = B * T, LDX = WIDTH + 4, LDY = WIDTH + 2 };
  static const int64_t firsts[] = {0, 1, 1000, 123456};
  for (int i = 0; i < 4; i++) {
    double theta = 10000;
    real *x = buffer_normal(N * WIDTH, 1), *packed = buffer(N * LDX), *py = buffer(N * LDY), *back = buffer(N * LDX);
    pack(packed, LDX, 3, x, N, WIDTH);
    rope_rotate(py + 1, LDY, packed + 3, LDX, B, T, HEADS, D, theta, firsts[i], 1);
    real *y = unpack(py, LDY, 1, N, WIDTH);
    check(others_untouched(py, LDY, 1, N, WIDTH), "RoPE: written beside its columns");
    double ref[N * WIDTH];
    for (int n = 0; n < N; n++)
      for (int h = 0; h < HEADS; h++)
        for (int j = 0; j < D / 2; j++) {  // (x_j, x_{j + D/2}) as a complex number, turned
          int at = n * WIDTH + h * D + j;
          cplx turned = ((double)x[at] + (double)x[at + D / 2] * _Complex_I) *
                        cexp(_Complex_I * ((double)(firsts[i] + n % T) / pow(theta, 2.0 * j / D)));
          ref[at] = creal(turned), ref[at + D / 2] = cimag(turned);
        }
    check_tensor("RoPE", "y", y, ref, N * WIDTH, vanished, OUTPUT);
    if (i == 0)
      for (int b = 0; b < B; b++)
        check(same_bits(y + b * T * WIDTH, x + b * T * WIDTH, WIDTH), "RoPE: position 0 is turned");
    // a rotation is its own transposed inverse: the backward pass is the same with the other sign
    rope_rotate(back + 3, LDX, py + 1, LDY, B, T, HEADS, D, theta, firsts[i], -1);
    real *again = unpack(back, LDX, 3, N, WIDTH);
    double *want = as_double(x, N * WIDTH);
    check_tensor("RoPE", "turned back", again, want, N * WIDTH, vanished, OUTPUT);
    free(want), buffer_free(x), buffer_free(packed), buffer_free(py), buffer_free(back), buffer_free(y),
        buffer_free(again);
  }
}

typedef struct {
  AttentionShape s;
  const int32_t *start;
} AttentionSizes;

// x: q [N,H,D], k [B,past+T,HKV,D], v likewise. y: o [N,H,D]
static void attention_formula(cplx *y, cplx *const *x, const void *sizes) {
  const AttentionSizes *z = (const AttentionSizes *)sizes;
  const AttentionShape *s = &z->s;
  int D = s->D, total = s->past + s->T;
  cplx p[256];
  for (int b = 0; b < s->B; b++)
    for (int t = 0; t < s->T; t++)
      for (int h = 0; h < s->H; h++) {
        int64_t n = (int64_t)b * s->T + t;
        int hk = h * s->HKV / s->H;
        const cplx *q = x[0] + (n * s->H + h) * D;
        cplx sum = 0, *o = y + (n * s->H + h) * D;
        double max = -INFINITY;
        for (int u = 0; u < total; u++) {
          int seen = u - s->past <= t && u - s->past >= z->start[n] && (!s->window || t - (u - s->past) < s->window);
          p[u] = 0;
          if (!seen) continue;
          for (int j = 0; j < D; j++) p[u] += q[j] * x[1][(((int64_t)b * total + u) * s->HKV + hk) * D + j];
          p[u] /= sqrt((double)D);
          max = fmax(max, creal(p[u]));
        }
        for (int u = 0; u < total; u++) {
          int seen = u - s->past <= t && u - s->past >= z->start[n] && (!s->window || t - (u - s->past) < s->window);
          p[u] = seen ? cexp(p[u] - max) : 0;
          sum += p[u];
        }
        for (int j = 0; j < D; j++) {
          o[j] = 0;
          for (int u = 0; u < total; u++) o[j] += p[u] / sum * x[2][(((int64_t)b * total + u) * s->HKV + hk) * D + j];
        }
      }
}

typedef struct {
  AttentionShape s;
  int32_t *start;
  real *q, *k, *v, *o, *lse, *d_o, *dq, *dk, *dv;
  int64_t nq, nk;
} AttentionProblem;

static AttentionProblem attention_make(AttentionShape s) {
  AttentionProblem p;
  memset(&p, 0, sizeof p);
  int64_t N = (int64_t)s.B * s.T;
  p.s = s, p.nq = N * s.H * s.D, p.nk = (int64_t)s.B * (s.past + s.T) * s.HKV * s.D;
  p.start = (int32_t *)alloc_array(N, sizeof(int32_t), "test");
  for (int64_t i = 0; i < N; i++) p.start[i] = -1000;
  p.q = buffer_normal(p.nq, 1), p.k = buffer_normal(p.nk, 1), p.v = buffer_normal(p.nk, 1);
  p.d_o = buffer_normal(p.nq, 1), p.o = buffer(p.nq), p.lse = buffer(N * s.H);
  p.dq = buffer(p.nq), p.dk = buffer(p.nk), p.dv = buffer(p.nk);
  return p;
}
static void attention_run(AttentionProblem *p) {
  attention_forward(p->o, p->lse, p->q, p->k, p->v, p->start, &p->s);
  if (!p->s.past) attention_backward(p->dq, p->dk, p->dv, p->d_o, p->o, p->lse, p->q, p->k, p->v, p->start, &p->s);
}
static void attention_free(AttentionProblem *p) {
  free(p->start), buffer_free(p->q), buffer_free(p->k), buffer_free(p->v), buffer_free(p->o), buffer_free(p->lse);
  buffer_free(p->d_o), buffer_free(p->dq), buffer_free(p->dk), buffer_free(p->dv);
}
static void attention_compare(const char *what, AttentionProblem *p) {
  attention_run(p);
  AttentionSizes z = {p->s, p->start};
  int train = !p->s.past;
  Reference r = {attention_formula,
                 &z,
                 p->nq,
                 3,
                 {"q", "k", "v"},
                 {p->q, p->k, p->v},
                 {p->nq, p->nk, p->nk},
                 {train ? p->dq : NULL, train ? p->dk : NULL, train ? p->dv : NULL},
                 {NULL, NULL, NULL}};
  double terms = 0;
  // dq and dk are sums of p (dp - delta): with one key in sight both terms are equal and the rounding is left
  for (int64_t i = 0; i < p->nq; i++) terms += pow((double)p->d_o[i], 2);
  reference_check(what, &r, p->o, p->d_o, sqrt(terms));
}

static void test_attention_small(void) {
  AttentionShape s = {1, 9, 2, 1, 4, 0, 3};
  AttentionProblem p = attention_make(s);
  attention_compare("attention", &p);
  attention_free(&p);
}

static void test_attention(void) {
  static const int lengths[][2] = {{2, 3}, {3, 3}, {4, 3}, {9, 3}, {5, 1}, {1, 1}, {7, 0}, {17, 8}, {1, 0}};  // T, W
  static const int heads[][2] = {{2, 2}, {4, 2}, {3, 1}};
  for (int i = 0; i < 9; i++)
    for (int j = 0; j < 3; j++)
      for (int mode = 0; mode < 3; mode++) {  // 0: training, 1: carried keys, 2: documents
        char what[120];
        int T = lengths[i][0], W = lengths[i][1];
        AttentionShape s = {2, T, heads[j][0], heads[j][1], 4, mode == 1 ? 5 : 0, W};
        AttentionProblem p = attention_make(s);
        for (int n = 0; mode == 2 && n < 2 * T; n++)
          p.start[n] = n % T < 2 ? 0 : n % T < 3 ? 2 : 3;  // lengths 2, 1, rest
        snprintf(what, sizeof what, "attention T=%d W=%d H=%d HKV=%d, %s", T, W, s.H, s.HKV,
                 mode == 0   ? "one document"
                 : mode == 1 ? "carried keys"
                             : "documents");
        attention_compare(what, &p);
        attention_free(&p);
      }
  // a document that began among the carried keys: those before it are not seen
  AttentionShape s = {1, 4, 2, 1, 4, 5, 0};
  AttentionProblem p = attention_make(s);
  for (int t = 0; t < 4; t++) p.start[t] = -2;
  attention_compare("attention, document that began two keys ago", &p);
  attention_free(&p);
}

// The window's edge.
static void test_attention_window(void) {
  enum { T = 12, D = 16 };
  for (int W = 1; W <= 5; W++) {
    AttentionShape s = {1, T, 1, 1, D, 0, W};
    AttentionProblem p = attention_make(s);
    memset(p.q, 0, (size_t)p.nq * sizeof(real));  // every seen key has the same weight, values are unit vectors
    for (int t = 0; t < T; t++)
      for (int j = 0; j < D; j++) p.v[t * D + j] = j == t;
    attention_run(&p);
    for (int t = 0; t < T; t++) {
      int seen = 0, expected = t + 1 < W ? t + 1 : W;
      for (int u = 0; u < T; u++) seen += p.o[t * D + u] != 0;
      check(seen == expected && fabs((double)p.o[t * D + t] - 1.0 / expected) < 1e-6,
            "window %d: query %d sees %d keys, expected %d", W, t, seen, expected);
    }
    attention_free(&p);
    p = attention_make(s);
    for (int i = 0; i < T; i++) {
      memset(p.d_o, 0, (size_t)p.nq * sizeof(real));
      fill_normal(p.d_o + i * D, D, 1);
      attention_run(&p);
      for (int u = 0; u < T; u++) {
        double dk = 0, dv = 0;
        for (int j = 0; j < D; j++) dk += fabs((double)p.dk[u * D + j]), dv += fabs((double)p.dv[u * D + j]);
        int seen = u <= i && i - u < W, alone = W == 1 || i == 0;  // a single key's weight is 1 whatever it is
        check((dv != 0) == seen && (seen && !alone ? dk != 0 : seen || dk == 0),
              "window %d: query %d and key %d: dk %g, dv %g", W, i, u, dk, dv);
      }
    }
    attention_free(&p);
  }
  for (int W = T; W <= T + 3; W++) {  // T <= W is full causal attention, to the bit
    AttentionShape full = {2, T, 4, 2, D, 0, 0}, windowed = {2, T, 4, 2, D, 0, W};
    uint64_t seed = random_state;
    AttentionProblem a = attention_make(full);
    random_state = seed;
    AttentionProblem b = attention_make(windowed);
    attention_run(&a), attention_run(&b);
    check(same_bits(a.o, b.o, a.nq) && same_bits(a.dq, b.dq, a.nq) && same_bits(a.dk, b.dk, a.nk) &&
              same_bits(a.dv, b.dv, a.nk),
          "window %d over %d tokens is not full attention", W, T);
    attention_free(&a), attention_free(&b);
  }
}

// Positions count only by their differences; the tail of a sequence with its last W-1 keys carried is the whole
// sequence.
static void test_attention_positions(void) {
  enum { T = 13, D = 8, W = 5 };
  AttentionShape s = {1, T, 2, 1, D, 0, W};
  AttentionProblem p = attention_make(s), shifted = attention_make(s);
  real *q = buffer_copy(p.q, p.nq), *k = buffer_copy(p.k, p.nk);
  memcpy(shifted.v, p.v, (size_t)p.nk * sizeof(real));
  for (int which = 0; which < 2; which++) {
    AttentionProblem *x = which ? &shifted : &p;
    rope_rotate(x->q, 2 * D, q, 2 * D, 1, T, 2, D, 10000, which ? 777 : 0, 1);
    rope_rotate(x->k, D, k, D, 1, T, 1, D, 10000, which ? 777 : 0, 1);
    attention_forward(x->o, x->lse, x->q, x->k, x->v, x->start, &x->s);
  }
  double *a = as_double(shifted.o, p.nq), *b = as_double(p.o, p.nq);
  check_close(a, b, p.nq, sizeof(real) == 8 ? 1e-12 : 1e-5, "attention after a shift of all positions");
  free(a), free(b);
  for (int t0 = 1; t0 < T; t0++) {  // the rows from t0 on, with the keys that they still see
    int past = t0 < W - 1 ? t0 : W - 1;
    AttentionShape rest = {1, T - t0, 2, 1, D, past, W};
    AttentionProblem x = attention_make(rest);
    memcpy(x.q, p.q + t0 * 2 * D, (size_t)x.nq * sizeof(real));
    memcpy(x.k, p.k + (t0 - past) * D, (size_t)x.nk * sizeof(real));
    memcpy(x.v, p.v + (t0 - past) * D, (size_t)x.nk * sizeof(real));
    attention_run(&x);
    check(same_bits(x.o, p.o + t0 * 2 * D, x.nq), "attention: pieces from %d on differ from the whole", t0);
    attention_free(&x);
  }
  attention_free(&p), attention_free(&shifted), buffer_free(q), buffer_free(k);
}

// ----------------------------------------------------------------------------
// matrix products

// C = beta C + alpha A B by the definition; layout bits: 1 A transposed, 2 B transposed (matmul only)
static void matmul_check(int small, int m, int n, int k, double alpha, double beta, int layout) {
  int at = layout & 1, bt = layout >> 1 & 1;
  int64_t lda = (at ? m : k) + 3, ldb = (bt ? k : n) + 2, ldc = n + 5;
  real *a = buffer_normal((at ? k : m) * lda, 1), *b = buffer_normal((bt ? n : k) * ldb, 1), *c = buffer(m * ldc),
       *c0 = buffer_normal((int64_t)m * n, 1);
  if (beta != 0) pack(c, ldc, 2, c0, m, n);  // beta = 0 must overwrite what is not a number
  double *ref = (double *)alloc_array((int64_t)m * n, sizeof(double), "test");
  int64_t ars = at ? 1 : lda, acs = at ? lda : 1, brs = bt ? 1 : ldb, bcs = bt ? ldb : 1;
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      double sum = 0;
      for (int p = 0; p < k; p++) sum += (double)a[i * ars + p * acs] * (double)b[p * brs + j * bcs];
      ref[i * n + j] = alpha * sum + (beta != 0 ? beta * (double)c0[i * n + j] : 0);
    }
  char what[120];
  snprintf(what, sizeof what, "%s m=%d n=%d k=%d alpha=%g beta=%g layout %d", small ? "matmul_small" : "matmul", m, n,
           k, alpha, beta, layout);
  if (small)
    matmul_small(c + 2, ldc, a, ars, acs, b, ldb, m, n, k, (real)alpha, (real)beta);
  else
    matmul(c + 2, ldc, a, ars, acs, b, brs, bcs, m, n, k, (real)beta);
  real *dense = unpack(c, ldc, 2, m, n);
  check(others_untouched(c, ldc, 2, m, n), "%s: written beside its columns", what);
  check_tensor(what, "C", dense, ref, (int64_t)m * n, vanished, OUTPUT);
  free(ref), buffer_free(a), buffer_free(b), buffer_free(c), buffer_free(c0), buffer_free(dense);
}

static void test_matmul(void) {
  static const int ms[] = {1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 23, 24, 25, 48, 70},
                   ns[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70}, ks[] = {0, 1, 2, 3, 16, 37, 64};
  static const double betas[] = {0, 1, 0.5}, alphas[] = {1, -1, 0.25};
  int turn = 0;
  for (int i = 0; i < 15; i++)
    for (int j = 0; j < 15; j++)
      for (int l = 0; l < 7; l++, turn++) {
        matmul_check(1, ms[i], ns[j], ks[l], alphas[turn / 3 % 3], betas[turn % 3], turn / 2 % 2);
        matmul_check(0, ms[i], ns[j], ks[l], 1, betas[turn % 3], turn % 4);
      }
  // blocks: k beyond one block of 256, m beyond one block of rows, n beyond 64 panels
  static const int large[][3] = {{5, 9, 255},   {5, 9, 256},    {5, 9, 257},  {70, 33, 513},
                                 {251, 17, 40}, {500, 70, 300}, {13, 2100, 3}};
  for (int i = 0; i < 7; i++)
    for (int j = 0; j < 12; j++) matmul_check(0, large[i][0], large[i][1], large[i][2], 1, betas[j % 3], j / 3);
  // the same bits for any number of threads
  for (int i = 3; i < 7; i++) {
    int m = large[i][0], n = large[i][1], k = large[i][2];
    real *a = buffer_normal((int64_t)m * k, 1), *b = buffer_normal((int64_t)k * n, 1), *c[3];
    for (int threads = 1; threads <= 3; threads++) {
      omp_set_num_threads(threads);
      c[threads - 1] = buffer((int64_t)m * n);
      matmul(c[threads - 1], n, a, k, 1, b, n, 1, m, n, k, 0);
    }
    omp_set_num_threads(1);
    check(same_bits(c[0], c[1], (int64_t)m * n) && same_bits(c[0], c[2], (int64_t)m * n),
          "matmul %d x %d x %d: the bits depend on the number of threads", m, n, k);
    buffer_free(a), buffer_free(b), buffer_free(c[0]), buffer_free(c[1]), buffer_free(c[2]);
  }
}

// The three products of a linear layer on columns of packed buffers.
static void test_linear(void) {
  enum { N = 9, IN = 7, OUT = 11, LDX = IN + 2, LDY = OUT + 3 };
  real *x = buffer_normal(N * LDX, 1), *w = buffer_normal(OUT * IN, 1), *y = buffer_normal(N * LDY, 1),
       *dw = buffer_normal(OUT * IN, 1), *dx = buffer(N * LDX), *y1 = buffer_copy(y, N * LDY);
  double fy[N * OUT] = {0}, fdx[N * IN] = {0}, *fdw = as_double(dw, OUT * IN);
  for (int n = 0; n < N; n++)
    for (int o = 0; o < OUT; o++)
      for (int i = 0; i < IN; i++) {
        fy[n * OUT + o] += (double)w[o * IN + i] * (double)x[n * LDX + 1 + i];
        fdx[n * IN + i] += (double)w[o * IN + i] * (double)y[n * LDY + 2 + o];
        fdw[o * IN + i] += (double)y[n * LDY + 2 + o] * (double)x[n * LDX + 1 + i];
      }
  linear_backward_input(dx + 1, LDX, y + 2, LDY, w, N, IN, OUT, 0);
  linear_backward_weight(dw, y + 2, LDY, x + 1, LDX, N, IN, OUT);
  linear_forward(y1 + 2, LDY, x + 1, LDX, w, N, IN, OUT, 0);
  real *dense_dx = unpack(dx, LDX, 1, N, IN), *dense_y = unpack(y1, LDY, 2, N, OUT);
  check_tensor("linear", "y", dense_y, fy, N * OUT, vanished, OUTPUT);
  check_tensor("linear", "dx", dense_dx, fdx, N * IN, vanished, GRADIENT);
  check_tensor("linear", "dw", dw, fdw, OUT * IN, vanished, GRADIENT);
  linear_forward(y1 + 2, LDY, x + 1, LDX, w, N, IN, OUT, 1);  // accumulates: twice as much
  for (int i = 0; i < N * OUT; i++) fy[i] *= 2;
  buffer_free(dense_y), dense_y = unpack(y1, LDY, 2, N, OUT);
  check_tensor("linear", "y added to y", dense_y, fy, N * OUT, vanished, OUTPUT);
  free(fdw), buffer_free(x), buffer_free(w), buffer_free(y), buffer_free(dw), buffer_free(dx), buffer_free(y1);
  buffer_free(dense_dx), buffer_free(dense_y);
}

static void test_threads(void) {  // the loops that are shared out, on more threads than there are rows
  omp_set_num_threads(3);
  test_delta_small(), test_conv_small(), test_attention_small(), test_rmsnorm(), test_output_norm();
  test_mamba2_output(), test_qk_norm(), test_swiglu(), test_embedding(), test_cross_entropy(), test_decay_gate();
  test_beta_gate(), test_rope(), test_linear();
  omp_set_num_threads(1);
}

// ----------------------------------------------------------------------------
// planted faults: every wrong term must be noticed by the layer's own test

static void test_planted_faults(void) {
  static const struct {
    int fault;
    void (*test)(void);
  } plants[] = {{PLANT_P_WITHOUT_DECAY, test_delta_small}, {PLANT_SWAPPED_KV, test_delta_small},
                {PLANT_LAST_ROW_GATE, test_delta_small},   {PLANT_NO_DM, test_delta_small},
                {PLANT_STATE_DECAY, test_delta_small},     {PLANT_CONV_INDEX, test_conv_small},
                {PLANT_WINDOW, test_attention_small},      {PLANT_L2_PROJECTION, test_qk_norm},
                {PLANT_RMSNORM_PROJECTION, test_rmsnorm},  {PLANT_SILU_DERIVATIVE, test_swiglu},
                {PLANT_SOFTPLUS, test_decay_gate},         {PLANT_BETA_RANGE, test_beta_gate},
                {PLANT_D_SKIP, test_mamba2_output},        {PLANT_SOFTMAX_TARGET, test_cross_entropy}};
  // PLANT_ROPE_SIGN is in the model's call, not in a layer: test_gdn.c looks for it
  for (size_t i = 0; i < sizeof plants / sizeof *plants; i++) {
    int passed = checks_passed, failed = checks_failed;
    gdn_planted = plants[i].fault, checks_quiet = 1;
    plants[i].test();
    gdn_planted = 0, checks_quiet = 0;
    int noticed = checks_failed - failed;
    checks_passed = passed, checks_failed = failed;
    check(noticed > 0, "planted fault %d was not noticed", plants[i].fault);
  }
  area.output = area.gradient = 0;  // those of the faults say nothing
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    void (*test)(void);
  } tests[] = {{"recurrence", test_recurrence},
               {"hand-checked steps", test_hand_checked},
               {"delta rule lengths", test_delta_lengths},
               {"delta rule sizes", test_delta_sizes},
               {"delta rule groups", test_delta_groups},
               {"delta rule decay", test_delta_gates},
               {"delta rule wiped state", test_delta_wiped},
               {"delta rule beta", test_delta_beta},
               {"delta rule equal keys", test_delta_equal_keys},
               {"delta rule replaces", test_delta_replaces},
               {"delta rule paper's mask", test_delta_paper_mask},
               {"delta rule future", test_delta_future},
               {"delta rule rows, threads", test_delta_rows_threads},
               {"delta rule pieces", test_delta_pieces},
               {"delta rule documents", test_delta_documents},
               {"delta rule reductions", test_delta_reductions},
               {"short convolution", test_conv},
               {"RMSNorm", test_rmsnorm},
               {"output norm", test_output_norm},
               {"Mamba2 output", test_mamba2_output},
               {"q, k norm", test_qk_norm},
               {"SwiGLU", test_swiglu},
               {"embedding", test_embedding},
               {"cross-entropy", test_cross_entropy},
               {"decay gate", test_decay_gate},
               {"beta gate", test_beta_gate},
               {"RoPE", test_rope},
               {"attention", test_attention},
               {"attention window", test_attention_window},
               {"attention positions", test_attention_positions},
               {"matmul", test_matmul},
               {"linear", test_linear},
               {"three threads", test_threads},
               {"planted faults", test_planted_faults}};
  omp_set_num_threads(1);
  for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
    if (argc > 1 && !strstr(tests[i].name, argv[1])) continue;
    random_state = i + 1;  // each area draws its own numbers, whichever others run
    area_begin(tests[i].name);
    tests[i].test();
    area_end();
  }
  return report_end();
}
