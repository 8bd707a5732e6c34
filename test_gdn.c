// test_gdn.c: is the model right? Runs the CPU reference in double against finite differences and against itself in
// other arrangements (pieces, rows, threads, reductions between mixers), in float against double, and, linked with the
// CUDA engine (make test_gdncu), every CUDA tensor and gradient against the CPU reference. The layers one by one,
// against token-by-token recurrences, are in dev/test/test_layers.c.
//
// Exit status 0 when everything passed; the last line counts passed, failed, skipped. --plant N runs the gradient
// checks with one wrong term planted in the backward pass and succeeds only if they notice. test_gdncu --only WORDS
// runs the cases whose names, as they are printed, hold the words: --only kda, --only "mamba2 gdn swa B=2 T=65".

#include <omp.h>
#include <pthread.h>
#include <unistd.h>
#include "dev/test/check_report.h"  // check, check_close, report_end
#include "gdn/forecast.h"           // gpu_activations
#include "gdn/engine.h"             // EngineApi, engine_cpu_f32, engine_cpu_f64
#include "gdn/init.h"               // init_tensor

int gdn_planted;  // read by the engines when built with -DGDN_PLANT; numbers as in train_gdn.c
enum { PLANT_FAULTS = 15 };

// ----------------------------------------------------------------------------
// models to test with

typedef struct {
  Config c;
  ParamTable t;
  double *params;  // the whole arena
} Model;

static Config small_config(const char *pattern) {
  Config c = config_default();
  c.vocab = 13, c.width = 12, c.ff = 20, c.tied = 0;
  c.heads = 2, c.v_heads = 2, c.head_k = 6, c.head_v = 10;
  c.attn_heads = 2, c.attn_kv_heads = 2, c.attn_head_dim = 6, c.window = 20;
  c.mamba_state = 5, c.mamba_head = 8, c.mamba_expand = 2, c.mamba_groups = 1;
  c.n_pattern = 0;
  char text[128], *word;
  snprintf(text, sizeof text, "%s", pattern);
  for (word = strtok(text, " "); word; word = strtok(NULL, " ")) c.pattern[c.n_pattern++] = mixer_from_name(word);
  c.layers = c.n_pattern;
  return c;
}

// Parameters as --init paper draws them, then moved off their special values (norms 1, biases 0, D 1) and with gates in
// a range where decay, erase and write all matter.
static Model model_make(Config c, uint64_t seed) {
  Error err;
  if (config_check(&c, &err)) fail_error(&err);
  Model m = {c, param_table_build(&c), NULL};
  m.params = (double *)alloc_zeroed(m.t.total, sizeof(double), "test");
  for (int i = 0; i < m.t.n; i++) {
    const ParamSpec *s = &m.t.specs[i];
    if (s->init == INIT_PAD) continue;
    for (int64_t j = 0; j < s->count; j++) {
      double x = init_value(s, INIT_RULE_PAPER, c.layers, seed, hash_name(s->name), j);
      double u = 2 * random_uniform(seed + 1, hash_name(s->name), (uint64_t)j) - 1;
      if (s->init == INIT_A_LOG_0_16 || s->init == INIT_A_LOG_1_16) x = u;
      if (s->init == INIT_ONES || s->init == INIT_ZEROS) x += 0.4 * u;
      if (s->init == INIT_DT_BIAS) x = u;
      if (s->init == INIT_XAVIER || s->init == INIT_EMBEDDING) x *= 8;
      if (s->init == INIT_LINEAR_SCALED) x *= 2;
      m.params[s->offset + j] = x;
    }
  }
  return m;
}
static void model_free(Model *m) {
  param_table_free(&m->t);
  free(m->params);
}

static Engine *engine_make(const EngineApi *api, const Model *m, int B, int T, int train, int max_state) {
  EngineSettings s;
  memset(&s, 0, sizeof s);
  s.max_rows = B, s.max_len = T, s.train = train, s.max_state = max_state;
  Error err;
  if (api->check(&m->c, &s, &err)) fail_error(&err);
  Engine *e = api->create(&m->c, &m->t, &s, &err);
  if (!e) fail_error(&err);
  api->write64(e, ARENA_PARAM, 0, m->t.total, m->params);
  return e;
}

static void random_tokens(int32_t *tokens, int32_t *targets, int64_t N, int vocab, uint64_t seed) {
  for (int64_t i = 0; i < N; i++) {
    tokens[i] = (int32_t)(random_bits(seed, 1, (uint64_t)i) % (uint64_t)vocab);
    if (targets)
      targets[i] =
          random_bits(seed, 2, (uint64_t)i) % 5 ? (int32_t)(random_bits(seed, 3, (uint64_t)i) % (uint64_t)vocab) : -1;
  }
}

// Loss, logits and gradients of one engine on one batch.
typedef struct {
  double loss, *logits, *grads;
  int64_t n_logits;
} Result;

static Result run_once(const EngineApi *api, const Model *m, const int32_t *tokens, const int32_t *targets, int B,
                       int T) {
  Engine *e = engine_make(api, m, B, T, 1, 0);
  Result r;
  r.n_logits = (int64_t)B * T * m->c.vocab;
  r.logits = (double *)alloc_array(r.n_logits, sizeof(double), "test");
  r.grads = (double *)alloc_array(m->t.total, sizeof(double), "test");
  r.loss = api->forward(e, tokens, targets, B, T, 0);
  api->activation(e, "logits", r.logits, r.n_logits);
  api->zero_grad(e);
  api->backward(e, 1.0 / (B * T));
  api->read64(e, ARENA_GRAD, 0, m->t.total, r.grads);
  api->destroy(e);
  return r;
}
static void result_free(Result *r) { free(r->logits), free(r->grads); }

// ----------------------------------------------------------------------------
// every parameter tensor against central finite differences, in double

// Five-point central difference of the mean loss along `direction` on tensor s.
static double difference(const EngineApi *api, Engine *e, const Model *m, const ParamSpec *s, const double *direction,
                         double h, const int32_t *tokens, const int32_t *targets, int B, int T) {
  double f[4], step[4] = {-2, -1, 1, 2};
  double *p = (double *)alloc_array(s->count, sizeof(double), "test");
  for (int k = 0; k < 4; k++) {
    for (int64_t i = 0; i < s->count; i++) p[i] = m->params[s->offset + i] + step[k] * h * direction[i];
    api->write64(e, ARENA_PARAM, s->offset, s->count, p);
    f[k] = api->forward(e, tokens, targets, B, T, 0) / (B * T);
  }
  api->write64(e, ARENA_PARAM, s->offset, s->count, m->params + s->offset);
  free(p);
  return (f[0] - 8 * f[1] + 8 * f[2] - f[3]) / (12 * h);
}

// A random direction over the whole tensor and `singles` single elements. Limit 1e-6 of the gradient's size: five-point
// differences with h = 2e-4 leave about 1e-8 of truncation (the L2 norm of small keys bends most) and 1e-15 / h of
// rounding.
static void test_gradients(const char *name, Config c, int T, int singles) {
  const EngineApi *api = &engine_cpu_f64;
  enum { B = 2 };
  Model m = model_make(c, 11);
  int32_t *tokens = (int32_t *)alloc_array(B * T, sizeof *tokens, "test"),
          *targets = (int32_t *)alloc_array(B * T, sizeof *tokens, "test");
  random_tokens(tokens, targets, B * T, c.vocab, 5);
  Result r = run_once(api, &m, tokens, targets, B, T);
  Engine *e = engine_make(api, &m, B, T, 0, 0);
  for (int i = 0; i < m.t.n; i++) {
    const ParamSpec *s = &m.t.specs[i];
    double *dir = (double *)alloc_zeroed(s->count, sizeof(double), "test"), worst = 0, norm = 0;
    for (int64_t j = 0; j < s->count; j++) norm += r.grads[s->offset + j] * r.grads[s->offset + j];
    norm = sqrt(norm);
    if (s->init == INIT_PAD) {
      check(norm == 0, "%s: padding after spec %d has a gradient", name, i);
      free(dir);
      continue;
    }
    double rms = norm / sqrt((double)s->count);
    for (int k = 0; k <= singles; k++) {
      double exact = 0, size = 0;
      memset(dir, 0, (size_t)s->count * sizeof(double));
      if (k == 0) {
        for (int64_t j = 0; j < s->count; j++)
          dir[j] = random_normal(77, hash_name(s->name), (uint64_t)j) / sqrt((double)s->count);
      } else {
        dir[random_bits(78, hash_name(s->name), (uint64_t)k) % (uint64_t)s->count] = 1;
      }
      for (int64_t j = 0; j < s->count; j++) exact += dir[j] * r.grads[s->offset + j], size += dir[j] * dir[j];
      double found = difference(api, e, &m, s, dir, 2e-4, tokens, targets, B, T);
      // a gradient that is exactly 0 (a decay that meets no state) must be 0 to the differences' own rounding
      double error = norm == 0 ? fabs(found) * 1e3 : fabs(found - exact) / (rms * sqrt(size) + fabs(exact));
      if (!(error <= worst)) worst = error;
    }
    check((norm > 0 || T == 1) && worst < 1e-6,
          "%s T=%d: gradient of %s differs from finite differences by %.3g of its size (norm %.3g)", name, T, s->name,
          worst, norm);
    free(dir);
  }
  api->destroy(e);
  result_free(&r), model_free(&m), free(tokens), free(targets);
}

static void test_all_gradients(int singles) {
  const char *patterns[] = {"gdn",     "gdn2",           "kda",      "deltanet",   "mamba2",  "swa", "attn",
                            "gdn swa", "mamba2 gdn swa", "gdn2 swa", "mamba2 swa", "kda attn"};
  for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
    test_gradients(patterns[i], small_config(patterns[i]), 67, singles);
  Config c = small_config("gdn");
  c.tied = 1, test_gradients("gdn tied", c, 17, singles);
  c = small_config("gdn swa"), c.ff = 0, test_gradients("gdn swa without MLP", c, 17, singles);
  c = small_config("gdn"), c.heads = 2, c.v_heads = 6, test_gradients("gdn grouped", c, 66, singles);
  c = small_config("gdn2"), c.heads = 2, c.v_heads = 4, test_gradients("gdn2 grouped", c, 66, singles);
  c = small_config("kda"), c.heads = 1, c.v_heads = 3, test_gradients("kda grouped", c, 66, singles);
  c = small_config("gdn"), c.beta_max = 2, test_gradients("gdn beta 2", c, 66, singles);
  c = small_config("gdn2"), c.beta_max = 2, c.output_gate = OUTPUT_GATE_SIGMOID,
  test_gradients("gdn2 b 2, sigmoid gate", c, 66, singles);
  c = small_config("gdn"), c.conv_size = 0, test_gradients("gdn no conv", c, 17, singles);
  c = small_config("mamba2"), c.conv_size = 0, test_gradients("mamba2 no conv", c, 17, singles);
  c = small_config("mamba2"), c.mamba_groups = 3, test_gradients("mamba2 3 groups", c, 66, singles);
  c = small_config("gdn"), c.output_gate = OUTPUT_GATE_NONE, test_gradients("gdn no output gate", c, 17, singles);
  c = small_config("kda"), c.output_gate = OUTPUT_GATE_NONE, test_gradients("kda no output gate", c, 17, singles);
  c = small_config("deltanet"), c.output_gate = OUTPUT_GATE_SILU, test_gradients("deltanet gated", c, 17, singles);
  c = small_config("gdn"), c.output_norm = 0, test_gradients("gdn no output norm", c, 17, singles);
  c = small_config("gdn"), c.output_norm = 0, c.output_gate = OUTPUT_GATE_NONE,
  test_gradients("gdn no norm, no gate", c, 17, singles);
  c = small_config("gdn"), c.qk_norm = NORM_L1, test_gradients("gdn L1", c, 17, singles);
  c = small_config("gdn"), c.decay = 0, test_gradients("gdn no decay", c, 66, singles);
  c = small_config("gdn2"), c.decay = 0, test_gradients("gdn2 no decay", c, 66, singles);
  c = small_config("gdn2"), c.erase = PER_HEAD, test_gradients("gdn2 erase per head", c, 66, singles);
  c = small_config("gdn2"), c.write = PER_HEAD, test_gradients("gdn2 write per head", c, 66, singles);
  c = small_config("kda"), c.kda_lower_bound = -2.5, test_gradients("kda lower bound", c, 66, singles);
  c = small_config("attn"), c.attn_heads = 4, c.attn_kv_heads = 2, test_gradients("attn grouped", c, 33, singles);
  c = small_config("mamba2 gdn swa"), c.boundary_reset = 1, c.bos = 1, test_gradients("h2 boundaries", c, 67, singles);
  c = small_config("gdn2 kda attn"), c.boundary_reset = 1, c.bos = 1,
  test_gradients("channel boundaries", c, 67, singles);
  c = small_config("gdn"), c.conv_size = 2, c.width = 11, test_gradients("gdn 2 taps, odd width", c, 17, singles);
  int lengths[] = {1, 2, 3, 5, 64, 65};
  for (int i = 0; i < 6; i++) test_gradients("h2", small_config("mamba2 gdn swa"), lengths[i], 2);
}

// ----------------------------------------------------------------------------
// reductions between mixers: GDN-2 with b = w = beta is KDA; KDA with equal decays is GDN; GDN without decay is
// DeltaNet

static double *tensor(Model *m, const char *name, int64_t *count) {
  char full[160];
  snprintf(full, sizeof full, "model.layers.0.%s", name);
  int i = param_find(&m->t, full);
  if (i < 0) i = param_find(&m->t, name);
  if (i < 0) fail(EXIT_INTERNAL, "test: no tensor %s", name);
  if (count) *count = m->t.specs[i].count;
  return m->params + m->t.specs[i].offset;
}

static void copy_common(Model *to, const Model *from) {  // tensors of the same name and size
  for (int i = 0; i < to->t.n; i++) {
    const ParamSpec *s = &to->t.specs[i];
    int j = s->name[0] ? param_find(&from->t, s->name) : -1;
    if (j >= 0 && from->t.specs[j].count == s->count)
      memcpy(to->params + s->offset, from->params + from->t.specs[j].offset, (size_t)s->count * sizeof(double));
  }
}

static void compare_models(const char *what, const Model *a, const Model *b, double limit) {
  enum { B = 2, T = 130 };
  int32_t tokens[B * T], targets[B * T];
  random_tokens(tokens, targets, B * T, a->c.vocab, 9);
  Result ra = run_once(&engine_cpu_f64, a, tokens, targets, B, T),
         rb = run_once(&engine_cpu_f64, b, tokens, targets, B, T);
  char text[200];
  snprintf(text, sizeof text, "%s: logits", what);
  check_close(ra.logits, rb.logits, ra.n_logits, limit, text);
  const char *shared[] = {"model.embeddings.weight", "attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight",
                          "attn.o_proj.weight"};
  for (int i = 0; i < 5; i++) {
    char full[96];
    snprintf(full, sizeof full, "%s%s", i ? "model.layers.0." : "", shared[i]);
    const ParamSpec *sa = &a->t.specs[param_find(&a->t, full)], *sb = &b->t.specs[param_find(&b->t, full)];
    snprintf(text, sizeof text, "%s: gradient of %s", what, full);
    check_close(ra.grads + sa->offset, rb.grads + sb->offset, sa->count, limit, text);
  }
  result_free(&ra), result_free(&rb);
}

static void test_reductions(void) {
  Config c = small_config("gdn2");
  c.output_gate = OUTPUT_GATE_SIGMOID;
  int d = c.width, K = c.head_k, V = c.head_v, H = c.heads;
  Model gdn2 = model_make(c, 3);
  c = small_config("kda");
  Model kda = model_make(c, 3);
  copy_common(&kda, &gdn2);
  double *b1 = tensor(&kda, "attn.b_proj.weight", NULL), *b2 = tensor(&gdn2, "attn.b_proj.weight", NULL),
         *w2 = tensor(&gdn2, "attn.w_proj.weight", NULL);
  for (int h = 0; h < H; h++)
    for (int j = 0; j < d; j++) {
      for (int i = 0; i < K; i++) b2[(h * K + i) * d + j] = b1[h * d + j];
      for (int i = 0; i < V; i++) w2[(h * V + i) * d + j] = b1[h * d + j];
    }
  compare_models("GDN-2 with b = w = beta is KDA", &gdn2, &kda, 1e-12);

  // KDA with f equal in all channels of a head, gate without bias: GDN with the products of the low-rank factors
  double *f1 = tensor(&kda, "attn.f_proj.1.weight", NULL), *f0 = tensor(&kda, "attn.f_proj.0.weight", NULL),
         *dt = tensor(&kda, "attn.dt_bias", NULL);
  double *g1 = tensor(&kda, "attn.g_proj.1.weight", NULL), *g0 = tensor(&kda, "attn.g_proj.0.weight", NULL),
         *bias = tensor(&kda, "attn.g_proj.1.bias", NULL);
  memset(bias, 0, (size_t)(H * V) * sizeof(double));
  for (int h = 0; h < H; h++)
    for (int i = 1; i < K; i++) {
      memcpy(f1 + (h * K + i) * V, f1 + h * K * V, (size_t)V * sizeof(double));
      dt[h * K + i] = dt[h * K];
    }
  c = small_config("gdn"), c.output_gate = OUTPUT_GATE_SIGMOID;
  Model gdn = model_make(c, 3);
  copy_common(&gdn, &kda);
  double *a = tensor(&gdn, "attn.a_proj.weight", NULL), *g = tensor(&gdn, "attn.g_proj.weight", NULL),
         *dt1 = tensor(&gdn, "attn.dt_bias", NULL);
  for (int h = 0; h < H; h++) dt1[h] = dt[h * K];
  for (int r = 0; r < H; r++)
    for (int j = 0; j < d; j++) {
      a[r * d + j] = 0;
      for (int x = 0; x < V; x++) a[r * d + j] += f1[r * K * V + x] * f0[x * d + j];
    }
  for (int r = 0; r < H * V; r++)
    for (int j = 0; j < d; j++) {
      g[r * d + j] = 0;
      for (int x = 0; x < V; x++) g[r * d + j] += g1[r * V + x] * g0[x * d + j];
    }
  compare_models("KDA with equal decays is GDN", &kda, &gdn, 1e-11);

  c = small_config("deltanet"), c.output_gate = OUTPUT_GATE_SIGMOID;
  Model delta = model_make(c, 3);
  copy_common(&delta, &gdn);
  double *a_log = tensor(&gdn, "attn.A_log", NULL);
  for (int h = 0; h < H; h++) a_log[h] = -80;  // exp(-80) softplus(.): no decay to the last bit
  compare_models("GDN without decay is DeltaNet", &gdn, &delta, 1e-12);
  c = small_config("gdn"), c.decay = 0, c.output_gate = OUTPUT_GATE_SIGMOID;
  Model nodecay = model_make(c, 3);
  copy_common(&nodecay, &delta);
  compare_models("--decay off is DeltaNet", &nodecay, &delta, 0);
  model_free(&gdn2), model_free(&kda), model_free(&gdn), model_free(&delta), model_free(&nodecay);
}

// ----------------------------------------------------------------------------
// arrangements that must not matter: float against double, pieces, rows, threads, what lies in the future

static const char *const all_patterns[] = {"gdn", "gdn2", "kda",     "deltanet",      "mamba2",
                                           "swa", "attn", "gdn swa", "mamba2 gdn swa"};
enum { ALL_PATTERNS = 9 };

static void test_float_against_double(void) {
  int lengths[] = {1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 129, 289};
  for (int p = 0; p < ALL_PATTERNS; p++) {
    Model m = model_make(small_config(all_patterns[p]), 21);
    for (int64_t i = 0; i < m.t.total; i++) m.params[i] = (double)(float)m.params[i];
    double worst_logits = 0, worst_grad = 0;
    for (int i = 0; i < 12; i++) {
      int T = lengths[i], B = 2;
      int32_t *tokens = (int32_t *)alloc_array(B * T, sizeof *tokens, "test"),
              *targets = (int32_t *)alloc_array(B * T, sizeof *tokens, "test");
      random_tokens(tokens, targets, B * T, m.c.vocab, (uint64_t)T);
      Result f = run_once(&engine_cpu_f32, &m, tokens, targets, B, T),
             d = run_once(&engine_cpu_f64, &m, tokens, targets, B, T);
      double e = relative_error(f.logits, d.logits, f.n_logits);
      if (!(e <= worst_logits)) worst_logits = e;
      for (int s = 0; s < m.t.n; s++) {
        double x = relative_error(f.grads + m.t.specs[s].offset, d.grads + m.t.specs[s].offset, m.t.specs[s].count);
        if (!(x <= worst_grad)) worst_grad = x;
      }
      result_free(&f), result_free(&d), free(tokens), free(targets);
    }
    // float has 6e-8 a rounding; sums of some hundred terms and the delta rule's solve make it 1e-6 to 1e-5
    check(worst_logits < 1e-4, "%s: float logits differ from double by %.3g", all_patterns[p], worst_logits);
    check(worst_grad < 1e-3, "%s: float gradients differ from double by %.3g", all_patterns[p], worst_grad);
    model_free(&m);
  }
}

static void test_pieces(void) {
  enum { T = 100 };
  for (int p = 0; p < ALL_PATTERNS; p++)
    for (int reset = 0; reset < 2; reset++)
      for (int wide = 0; wide < 2; wide++) {
        const EngineApi *api = wide ? &engine_cpu_f64 : &engine_cpu_f32;
        Config c = small_config(all_patterns[p]);
        c.boundary_reset = reset, c.bos = 1;
        Model m = model_make(c, 31);
        int V = c.vocab;
        int32_t tokens[2 * T], row[2 * T];
        random_tokens(tokens, NULL, 2 * T, V, 8);
        static double whole[2 * T * 13], part[2 * T * 13], piece[2 * T * 13];
        Engine *e = engine_make(api, &m, 2, T, 0, T);
        api->forward(e, tokens, NULL, 2, T, 0);
        api->activation(e, "logits", whole, 2 * T * V);
        for (int mode = 0; mode < 2; mode++) {
          int cuts[4] = {0, 1, 37, T}, n_pieces = mode ? T : 3;
          api->reset_state(e);
          for (int k = 0; k < n_pieces; k++) {
            int t0 = mode ? k : cuts[k], t1 = mode ? k + 1 : cuts[k + 1], n = t1 - t0;
            for (int b = 0; b < 2; b++) memcpy(row + b * n, tokens + b * T + t0, (size_t)n * sizeof *row);
            api->forward(e, row, NULL, 2, n, ENGINE_CARRY);
            api->activation(e, "logits", piece, 2 * n * V);
            for (int b = 0; b < 2; b++)
              memcpy(part + (b * T + t0) * V, piece + b * n * V, (size_t)(n * V) * sizeof *part);
          }
          char text[120];
          snprintf(text, sizeof text, "%s %s%s: whole sequence against %s", all_patterns[p], wide ? "double" : "float",
                   reset ? " reset" : "", mode ? "single steps" : "three pieces");
          check_close(part, whole, 2 * T * V, wide ? 1e-12 : 1e-4, text);
        }
        api->destroy(e), model_free(&m);
      }
}

static void test_rows_threads_future(void) {
  enum { T = 70 };
  const EngineApi *api = &engine_cpu_f32;
  for (int p = 0; p < ALL_PATTERNS; p++) {
    Model m = model_make(small_config(all_patterns[p]), 41);
    int V = m.c.vocab;
    int32_t tokens[2 * T], targets[2 * T];
    random_tokens(tokens, targets, 2 * T, V, 12);
    Result both = run_once(api, &m, tokens, targets, 2, T), r0 = run_once(api, &m, tokens, targets, 1, T),
           r1 = run_once(api, &m, tokens + T, targets + T, 1, T);
    check(!memcmp(both.logits, r0.logits, (size_t)(T * V) * sizeof(double)) &&
              !memcmp(both.logits + T * V, r1.logits, (size_t)(T * V) * sizeof(double)),
          "%s: a row of a batch depends on the other row", all_patterns[p]);
    for (int64_t i = 0; i < m.t.total; i++) r0.grads[i] = (r0.grads[i] + r1.grads[i]) / 2;
    char text[120];
    snprintf(text, sizeof text, "%s: gradient of two rows against the sum of each", all_patterns[p]);
    check_close(both.grads, r0.grads, m.t.total, 1e-5, text);
    omp_set_num_threads(1);
    Result one = run_once(api, &m, tokens, targets, 2, T);
    omp_set_num_threads(3);
    Result three = run_once(api, &m, tokens, targets, 2, T);
    omp_set_num_threads(omp_get_num_procs());
    check(!memcmp(one.grads, three.grads, (size_t)m.t.total * sizeof(double)) &&
              !memcmp(one.logits, three.logits, (size_t)one.n_logits * sizeof(double)) && one.loss == three.loss,
          "%s: the bits depend on the number of threads", all_patterns[p]);
    check(!memcmp(one.grads, both.grads, (size_t)m.t.total * sizeof(double)), "%s: the same run twice gives other bits",
          all_patterns[p]);
    tokens[40] = (tokens[40] + 1) % V;  // the future: earlier outputs keep their bits, this one moves
    Result later = run_once(api, &m, tokens, targets, 2, T);
    check(!memcmp(both.logits, later.logits, (size_t)(40 * V) * sizeof(double)),
          "%s: an output depends on a later token", all_patterns[p]);
    check(memcmp(both.logits + 40 * V, later.logits + 40 * V, (size_t)V * sizeof(double)) != 0,
          "%s: an output does not depend on its own token", all_patterns[p]);
    result_free(&both), result_free(&r0), result_free(&r1), result_free(&one), result_free(&three), result_free(&later),
        model_free(&m);
  }
}

// Documents of one row: lengths 37, 51, 40, one-token documents, two borders in a chunk, a border
// at 64.
static void test_documents(void) {
  enum { T = 128 };
  const int borders[][4] = {{0, 37, 88, T}, {0, 64, 65, T}, {0, 1, 2, T}, {0, 126, 127, T}};
  for (int p = 0; p < ALL_PATTERNS; p++)
    for (int k = 0; k < 4; k++) {
      Config c = small_config(all_patterns[p]);
      c.boundary_reset = 1, c.bos = 0;
      Model m = model_make(c, 51);
      int V = c.vocab;
      int32_t tokens[T], other[T];
      for (int t = 0; t < T; t++) tokens[t] = 1 + (int32_t)(random_bits(6, 0, (uint64_t)t) % (uint64_t)(V - 1));
      for (int i = 0; i < 3; i++) tokens[borders[k][i]] = 0;
      memcpy(other, tokens, sizeof tokens);
      for (int t = 0; t < borders[k][1]; t++)
        if (other[t]) other[t] = 1 + other[t] % (V - 1);
      static double a[T * 13], b[T * 13], alone[T * 13];
      Engine *e = engine_make(&engine_cpu_f32, &m, 1, T, 0, 0);
      engine_cpu_f32.forward(e, tokens, NULL, 1, T, 0);
      engine_cpu_f32.activation(e, "logits", a, T * V);
      engine_cpu_f32.forward(e, other, NULL, 1, T, 0);
      engine_cpu_f32.activation(e, "logits", b, T * V);
      check(!memcmp(a + borders[k][1] * V, b + borders[k][1] * V, (size_t)((T - borders[k][1]) * V) * sizeof(double)),
            "%s: document 1 reaches document 2 (border %d)", all_patterns[p], borders[k][1]);
      for (int i = 0; i < 3; i++) {
        int t0 = borders[k][i], n = borders[k][i + 1] - t0;
        engine_cpu_f32.forward(e, tokens + t0, NULL, 1, n, 0);
        engine_cpu_f32.activation(e, "logits", alone, n * V);
        char text[120];
        snprintf(text, sizeof text, "%s: document %d of a row against the document alone (borders %d %d)",
                 all_patterns[p], i, borders[k][1], borders[k][2]);
        check_close(a + t0 * V, alone, n * V, 1e-4, text);
      }
      engine_cpu_f32.destroy(e), model_free(&m);
    }
}

// Other tokens in the rest of a batch, in its row and in the other one, change no bit of a document's logits nor of the
// gradients of its loss, wherever in chunks and tiles it begins and ends; on the CPU and on the GPU. The borders: two
// in a chunk of 64; at the end of the first chunk and one token later; documents of one token, first in the row and
// later.
static void test_documents_apart(const EngineApi *api, const char *name, Config c) {
  enum { B = 2, T = 200, N = B * T, DOCUMENTS = 3 };
  static const int borders[][DOCUMENTS + 1] = {{0, 37, 88, T}, {0, 64, 65, T}, {0, 1, 2, T}, {0, 126, 127, T}};
  c.boundary_reset = 1, c.bos = 0;
  Model m = model_make(c, 52);
  const int V = c.vocab, half = V / 2;
  int32_t *tokens = (int32_t *)alloc_array(N, sizeof *tokens, "test"),
          *targets = (int32_t *)alloc_array(N, sizeof *tokens, "test");
  double *logits[2], *grads[2], loss[2];
  for (int r = 0; r < 2; r++)
    logits[r] = (double *)alloc_array((int64_t)N * V, sizeof(double), "test"),
    grads[r] = (double *)alloc_array(m.t.total, sizeof(double), "test");
  Engine *e = engine_make(api, &m, B, T, 1, 0);
  for (int k = 0; k < 4; k++)
    for (int d = 0; d < DOCUMENTS; d++) {
      const int begin = borders[k][d], end = borders[k][d + 1];
      // the document's ids lie above those of the rest, so that each row of the embedding's gradient is of one of them
      for (int n = 0; n < N; n++) {
        const int inside = n >= begin && n < end;
        uint64_t draw = random_bits(53, 0, (uint64_t)n);
        tokens[n] = inside ? half + (int32_t)(draw % (uint64_t)(V - half)) : 1 + (int32_t)(draw % (uint64_t)(half - 1));
        targets[n] = inside ? (int32_t)(random_bits(53, 1, (uint64_t)n) % (uint64_t)V) : -1;
      }
      for (int i = 0; i < DOCUMENTS; i++) tokens[borders[k][i]] = tokens[T + borders[k][i]] = c.bos;
      for (int r = 0; r < 2; r++) {
        // the rest backwards: other tokens at nearly every place, each as often as before, so that the sorted tokens,
        // by which the embedding's gradient is summed, lie as they did
        for (int i = 0, j = N - 1; r && i < j;) {
          if ((i >= begin && i < end) || tokens[i] == c.bos)
            i++;
          else if ((j >= begin && j < end) || tokens[j] == c.bos)
            j--;
          else {
            int32_t swap = tokens[i];
            tokens[i++] = tokens[j], tokens[j--] = swap;
          }
        }
        loss[r] = api->forward(e, tokens, targets, B, T, 0);
        api->activation(e, "logits", logits[r], (int64_t)N * V);
        api->zero_grad(e);
        api->backward(e, 1.0 / (end - begin));
        api->read64(e, ARENA_GRAD, 0, m.t.total, grads[r]);
      }
      int64_t differ = 0, changed = 0;
      double norm = 0;
      for (int64_t i = 0; i < (int64_t)N * V; i++)
        if (i >= (int64_t)begin * V && i < (int64_t)end * V)
          differ += !(logits[0][i] == logits[1][i]);
        else
          changed += logits[0][i] != logits[1][i];
      check(differ == 0 && loss[0] == loss[1],
            "%s: %lld of %d logits of the document at %d to %d depend on what lies outside it", name, (long long)differ,
            (end - begin) * V, begin, end);
      check(changed > (int64_t)(N - (end - begin)) * V / 2, "%s: the rest of the batch has kept its logits", name);
      for (int i = 0; i < m.t.n; i++) {
        const ParamSpec *s = &m.t.specs[i];
        differ = 0;
        // by value: a zero of another sign is the same gradient
        for (int64_t j = s->offset; j < s->offset + s->count; j++)
          differ += !(grads[0][j] == grads[1][j]), norm += grads[0][j] * grads[0][j];
        check(differ == 0,
              "%s: gradient of %s from the document at %d to %d: %lld of %lld depend on what lies outside it", name,
              s->name, begin, end, (long long)differ, (long long)s->count);
      }
      check(norm > 0 && isfinite(norm), "%s: the document at %d to %d has a gradient of %g", name, begin, end, norm);
    }
  api->destroy(e);
  for (int r = 0; r < 2; r++) free(logits[r]), free(grads[r]);
  free(tokens), free(targets), model_free(&m);
}

// ----------------------------------------------------------------------------
// AdamW, accumulation, padding

static void test_update(void) {
  Config c = small_config("gdn mamba2");
  Model m = model_make(c, 61);
  const EngineApi *api = &engine_cpu_f64;
  int64_t n = m.t.total;
  int32_t tokens[34], targets[34];
  random_tokens(tokens, targets, 34, c.vocab, 2);
  Engine *e = engine_make(api, &m, 2, 17, 1, 0);
  double *g = (double *)alloc_array(n, 8, "test"), *p = (double *)alloc_array(n, 8, "test"),
         *ref = (double *)alloc_array(n, 8, "test"), *M = (double *)alloc_zeroed(n, 8, "test"),
         *V = (double *)alloc_zeroed(n, 8, "test");
  memcpy(ref, m.params, (size_t)n * 8);
  AdamW a = {1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, 0, 0};
  for (int step = 1; step <= 3; step++) {
    api->zero_grad(e);
    api->forward(e, tokens, targets, 2, 17, 0);
    api->backward(e, 1.0);
    api->read64(e, ARENA_GRAD, 0, n, g);
    a.step = step;
    api->update(e, &a);
    for (int s = 0; s < m.t.n; s++)  // the formula as the paper prints it
      for (int64_t i = m.t.specs[s].offset; i < m.t.specs[s].offset + m.t.specs[s].count; i++) {
        double x = g[i] * a.grad_scale, wd = m.t.specs[s].decays ? a.weight_decay : 0;
        M[i] = a.beta1 * M[i] + (1 - a.beta1) * x, V[i] = a.beta2 * V[i] + (1 - a.beta2) * x * x;
        ref[i] -= a.lr * wd * ref[i];
        ref[i] -= a.lr * (M[i] / (1 - pow(a.beta1, step))) / (sqrt(V[i] / (1 - pow(a.beta2, step))) + a.eps);
      }
  }
  api->read64(e, ARENA_PARAM, 0, n, p);
  check_close(p, ref, n, 1e-13, "AdamW against its formula, three steps");
  double sumsq = 0;
  for (int64_t i = 0; i < n; i++) sumsq += g[i] * g[i];
  double found = api->grad_sumsq(e, 0, n);
  check(fabs(found - sumsq) < 1e-12 * sumsq, "gradient norm: %.17g, expected %.17g", found, sumsq);
  api->destroy(e);

  // zero gradients: what decays shrinks by (1 - lr wd)^10, everything else keeps its bits
  e = engine_make(api, &m, 2, 17, 1, 0);
  a.grad_scale = 1;
  for (a.step = 1; a.step <= 10; a.step++) api->update(e, &a);
  api->read64(e, ARENA_PARAM, 0, n, p);
  for (int s = 0; s < m.t.n; s++) {
    const ParamSpec *sp = &m.t.specs[s];
    int matrix = strstr(sp->name, "proj") || strstr(sp->name, "embed") || strstr(sp->name, "lm_head") ||
                 (strstr(sp->name, "conv1d") && !strstr(sp->name, "bias"));
    double worst = 0;
    for (int64_t i = sp->offset; i < sp->offset + sp->count; i++)
      worst = fmax(worst, fabs(p[i] - m.params[i] * (matrix ? pow(1 - 1e-3, 10) : 1)));
    check(worst <= (matrix ? 1e-15 : 0), "weight decay of %s: off by %g", sp->name, worst);
  }
  api->destroy(e);

  // ZeRO-1: two engines, each with half the moments, make the same step as one with all of them
  Engine *whole = engine_make(api, &m, 2, 17, 1, 0), *half[2];
  int64_t cut = n / 2 + 3;
  for (int k = 0; k < 2; k++) {
    EngineSettings s;
    Error err;
    memset(&s, 0, sizeof s);
    s.max_rows = 2, s.max_len = 17, s.train = 1, s.shard_first = k ? cut : 0, s.shard_count = k ? n - cut : cut;
    half[k] = api->create(&m.c, &m.t, &s, &err);
    api->write64(half[k], ARENA_PARAM, 0, n, m.params);
  }
  api->forward(whole, tokens, targets, 2, 17, 0), api->zero_grad(whole), api->backward(whole, 1);
  api->read64(whole, ARENA_GRAD, 0, n, g);
  a.step = 1;
  api->update(whole, &a);
  api->read64(whole, ARENA_PARAM, 0, n, ref);
  for (int k = 0; k < 2; k++) {
    api->write64(half[k], ARENA_GRAD, 0, n, g);
    api->update(half[k], &a);
    api->read64(half[k], ARENA_PARAM, k ? cut : 0, k ? n - cut : cut, p + (k ? cut : 0));
    api->destroy(half[k]);
  }
  check(!memcmp(p, ref, (size_t)n * 8), "two shards of AdamW differ from one");
  api->destroy(whole);

  // accumulation: the gradients of two micro-batches add up to those of the batch
  Engine *acc = engine_make(api, &m, 1, 17, 1, 0);
  api->zero_grad(acc);
  for (int k = 0; k < 2; k++) api->forward(acc, tokens + 17 * k, targets + 17 * k, 1, 17, 0), api->backward(acc, 1);
  api->read64(acc, ARENA_GRAD, 0, n, p);
  check_close(p, g, n, 1e-13, "two micro-batches against one batch");
  api->destroy(acc);

  // a vocabulary of 13 lies in 16 rows: the rows of padding neither count nor move
  for (int s = 0; s < m.t.n; s++)
    if (m.t.specs[s].init == INIT_PAD)
      for (int64_t i = 0; i < m.t.specs[s].count; i++) check(ref[m.t.specs[s].offset + i] == 0, "padding moved");
  free(g), free(p), free(ref), free(M), free(V), model_free(&m);
}

// Strong decay in training: 300 steps with gates down to -112 a token stay finite and learn.
static void test_training(const char *pattern, double a_log) {
  Config c = small_config(pattern);
  Model m = model_make(c, 71);
  int64_t count;
  for (int i = 0; i < c.layers; i++)
    if (strcmp(pattern, "deltanet")) {
      double *p = tensor(&m, "attn.A_log", &count);
      for (int64_t j = 0; j < count; j++) p[j] = j % 2 ? a_log : -3;
    }
  Engine *e = engine_make(&engine_cpu_f32, &m, 4, 64, 1, 0);
  int32_t tokens[256], targets[256];
  for (int i = 0; i < 256; i++)
    tokens[i] = (int32_t)((i / 64 + 1) * (i % 64) % 13), targets[i] = (int32_t)((i / 64 + 1) * (i % 64 + 1) % 13);
  double first = 0, last = 0;
  AdamW a = {1e-3, 0.9, 0.95, 1e-8, 0.1, 1, 0, 0};
  for (a.step = 1; a.step <= 300; a.step++) {
    a.lr = 1e-3 * (a.step < 100 ? a.step / 100.0 : 1);
    engine_cpu_f32.zero_grad(e);
    last = engine_cpu_f32.forward(e, tokens, targets, 4, 64, 0) / 256;
    if (a.step == 1) first = last;
    engine_cpu_f32.backward(e, 1.0 / 256);
    double norm = sqrt(engine_cpu_f32.grad_sumsq(e, 0, m.t.total));
    if (!check(isfinite(last) && isfinite(norm), "%s with A = exp(%g): step %d not finite", pattern, a_log,
               (int)a.step))
      break;
    a.grad_scale = norm > 1 ? 1 / norm : 1;
    engine_cpu_f32.update(e, &a);
  }
  check(last < 0.6 * first, "%s with A = exp(%g): loss %.3f after 300 steps from %.3f", pattern, a_log, last, first);
  engine_cpu_f32.destroy(e), model_free(&m);
}

// First loss: ln(vocab) + d sigma^2 / 2, sigma the standard deviation of the head's weights.
static void test_first_loss(void) {
  const char *names[] = {"gdn", "gdn2", "mamba2 gdn swa", "attn"};
  for (int p = 0; p < 4; p++)
    for (int fla = 0; fla < 2; fla++) {
      Config c = small_config(names[p]);
      c.vocab = 1000, c.width = 64, c.head_k = 16, c.head_v = 16, c.attn_head_dim = 32;
      ParamTable t = param_table_build(&c);
      Model m = {c, t, (double *)alloc_zeroed(t.total, sizeof(double), "test")};
      for (int i = 0; i < t.n; i++)
        for (int64_t j = 0; j < t.specs[i].count; j++)
          m.params[t.specs[i].offset + j] = init_value(&t.specs[i], fla ? INIT_RULE_FLA : INIT_RULE_PAPER, c.layers, 1,
                                                       hash_name(t.specs[i].name), j);
      int32_t tokens[512], targets[512];
      random_tokens(tokens, NULL, 512, c.vocab, 3), random_tokens(targets, NULL, 512, c.vocab, 4);
      Engine *e = engine_make(&engine_cpu_f32, &m, 4, 128, 0, 0);
      double loss = engine_cpu_f32.forward(e, tokens, targets, 4, 128, 0) / 512,
             sigma = fla ? 0.02 : 1 / sqrt(3.0 * c.width);
      double expected = log(1000) + c.width * sigma * sigma / 2;
      check(fabs(loss - expected) < 0.1, "%s --init %s: first loss %.4f, expected %.4f", names[p],
            fla ? "fla" : "paper", loss, expected);
      engine_cpu_f32.destroy(e), model_free(&m);
    }
}

// ----------------------------------------------------------------------------
// the CUDA engine against the CPU reference (make test_gdncu)

#ifdef WITH_CUDA

static const char *only;  // --only WORDS: the cases whose names hold them

static int wanted(const char *name) { return !only || strstr(name, only) != NULL; }

// The largest error of each kind of tensor (layers taken together) as a part of its limit, over all cases.
static struct {
  char kind[64], at[96];
  double worst;
  int compared;
} kinds[160];
static int n_kinds;

// at: the case. `model.layers.3.attn.q_proj.weight` and `layers.3.o` are of the kinds attn.q_proj.weight and o.
static void count_error(const char *tensor, double part_of_limit, const char *at) {
  const char *kind = tensor, *layer = strstr(tensor, "layers.");
  int k = 0;
  if (layer) {
    kind = layer + strlen("layers.");
    while (*kind && *kind != '.') kind++;
    kind += *kind == '.';
  }
  while (k < n_kinds && strcmp(kinds[k].kind, kind)) k++;
  if (k == n_kinds) {
    if (!check(n_kinds < (int)(sizeof kinds / sizeof *kinds), "more kinds of tensors than the table takes")) return;
    n_kinds++, snprintf(kinds[k].kind, sizeof kinds[k].kind, "%s", kind), kinds[k].worst = -1;
  }
  kinds[k].compared++;
  // a NaN counts as the largest, and stays
  if (!isnan(kinds[k].worst) && !(part_of_limit <= kinds[k].worst)) {
    kinds[k].worst = part_of_limit;
    snprintf(kinds[k].at, sizeof kinds[k].at, "%s", at);
  }
}

static void print_errors(void) {
  for (int k = 0; k < n_kinds; k++)
    printf("cuda tensor %-24s %4d compared  error / limit %.2f at %s\n", kinds[k].kind, kinds[k].compared,
           kinds[k].worst, kinds[k].at);
}

// Gates of a case: as model_make draws them, decays of 1 and e^-76 by turns of the heads, or (per channel) one channel
// of 64 at 1e-12 a token beside others at about 0.99.
typedef enum { GATES_DRAWN, GATES_EXTREME, GATES_SPIKE } Gates;

static Config cuda_config(const char *pattern, int heads, int v_heads, int head_k, int head_v) {
  Config c = small_config(pattern);
  c.vocab = 131, c.width = 128, c.ff = 192;
  c.heads = heads, c.v_heads = v_heads, c.head_k = head_k, c.head_v = head_v;
  c.attn_heads = c.attn_kv_heads = 2, c.attn_head_dim = 64, c.window = 100;
  c.mamba_state = 64, c.mamba_head = 64;
  return c;
}

// Matrices whose values bf16 holds exactly, so that both engines multiply by the same numbers.
static void model_round_matrices(Model *m) {
  for (int i = 0; i < m->t.n; i++)
    for (int64_t j = m->t.specs[i].offset; j < m->t.specs[i].offset + m->t.specs[i].count; j++) {
      float f = (float)m->params[j];
      uint32_t bits;
      memcpy(&bits, &f, 4);
      if (m->t.specs[i].decays && m->t.specs[i].ndim == 2) bits = (bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u;
      memcpy(&f, &bits, 4);
      m->params[j] = f;
    }
}

// Every activation and gradient: at most twice the error that the CPU engine makes when it rounds to bf16 where the GPU
// does, plus one rounding of bf16 (2^-8) for what that engine happens to hit exactly.
static void test_cuda(const char *name, Config c, int B, int T, Gates gates) {
  char label[96];
  snprintf(label, sizeof label, "%s B=%d T=%d", name, B, T);
  if (!wanted(label)) return;
  const EngineApi *apis[3] = {&engine_cpu_f64, &engine_cpu_bf16, &engine_cuda};
  Model m = model_make(c, 91);
  for (int i = 0; i < m.t.n; i++) {
    const ParamSpec *s = &m.t.specs[i];
    double *x = m.params + s->offset;
    if (gates && strstr(s->name, "A_log"))
      for (int64_t j = 0; j < s->count; j++) x[j] = gates == GATES_SPIKE ? 0 : j % 2 ? 4.7 : -6;
    if (gates == GATES_SPIKE && strstr(s->name, "dt_bias"))
      for (int64_t j = 0; j < s->count; j++) x[j] = j % 64 == 5 ? 27.6 : -4.6;
    if (gates == GATES_SPIKE && strstr(s->name, "f_proj.1"))
      for (int64_t j = 0; j < s->count; j++) x[j] *= 0.1;
  }
  model_round_matrices(&m);
  int64_t N = (int64_t)B * T, most = N * (c.vocab > 2048 ? c.vocab : 2048);
  int32_t *tokens = (int32_t *)alloc_array(N, sizeof *tokens, "test"),
          *targets = (int32_t *)alloc_array(N, sizeof *tokens, "test");
  random_tokens(tokens, targets, N, c.vocab, (uint64_t)(T + 7));
  if (c.boundary_reset)
    for (int64_t n = 0; n < N; n++)
      tokens[n] = n % T == 37 || n % T == 64 || n % T == 65 ? c.bos : tokens[n] == c.bos ? c.bos + 1 : tokens[n];
  static const char *const layer_names[] = {"x", "h", "packed", "q", "k", "o", "mixer", "x1", "h1", "gu"};
  char names[64][64];
  int n_names = 0;
  for (int i = 0; i < c.layers && i < 3; i++)
    for (int k = 0; k < 10; k++) snprintf(names[n_names++], 64, "layers.%d.%s", i, layer_names[k]);
  snprintf(names[n_names++], 64, "h_end"), snprintf(names[n_names++], 64, "logits"),
      snprintf(names[n_names++], 64, "losses");
  double *act[3], *grads[3], loss[3];
  int64_t *counts = (int64_t *)alloc_array(3 * 64, sizeof *counts, "test");
  double *kept[3][64];
  for (int a = 0; a < 3; a++) {
    Engine *e = engine_make(apis[a], &m, B, T, 1, 0);
    act[a] = (double *)alloc_array(most, sizeof(double), "test"),
    grads[a] = (double *)alloc_array(m.t.total, sizeof(double), "test");
    apis[a]->zero_grad(e);
    loss[a] = apis[a]->forward(e, tokens, targets, B, T, 0);
    for (int k = 0; k < n_names; k++) {
      int64_t n = counts[a * 64 + k] = apis[a]->activation(e, names[k], act[a], most);
      kept[a][k] = n > 0 && n <= most
                       ? (double *)memcpy(alloc_array(n, sizeof(double), "test"), act[a], (size_t)n * sizeof(double))
                       : NULL;
    }
    apis[a]->backward(e, 1.0 / (double)N);
    apis[a]->read64(e, ARENA_GRAD, 0, m.t.total, grads[a]);
    if (a == 2) {  // the same step with the head's backward inside the forward, and again: the same bits
      double *again = (double *)alloc_array(m.t.total, sizeof(double), "test");
      for (int r = 0; r < 2; r++) {
        apis[a]->zero_grad(e);
        if (apis[a]->loss_scale) apis[a]->loss_scale(e, 1.0 / (double)N);
        double l = apis[a]->forward(e, tokens, targets, B, T, 0);
        apis[a]->backward(e, 1.0 / (double)N);
        apis[a]->read64(e, ARENA_GRAD, 0, m.t.total, again);
        check(l == loss[a] && !memcmp(again, grads[a], (size_t)m.t.total * sizeof(double)),
              "%s B=%d T=%d: run %d gives other bits", name, B, T, r + 2);
      }
      free(again);
    }
    apis[a]->destroy(e);
  }
  double worst = 0;
  const char *worst_name = "";
  for (int k = 0; k < n_names; k++) {
    if (!kept[2][k] || !kept[0][k]) continue;
    int64_t n = counts[k];
    if (!check(counts[2 * 64 + k] == n, "%s: %s has %lld elements, the reference %lld", name, names[k],
               (long long)counts[2 * 64 + k], (long long)n))
      continue;
    double emulated = relative_error(kept[1][k], kept[0][k], n), found = relative_error(kept[2][k], kept[0][k], n),
           limit = 2 * emulated + 0.004;
    check(found <= limit, "%s B=%d T=%d: activation %s off by %.3g, limit %.3g", name, B, T, names[k], found, limit);
    count_error(names[k], found / limit, label);
    if (found / limit > worst) worst = found / limit, worst_name = names[k];
  }
  for (int i = 0; i < m.t.n; i++) {
    const ParamSpec *s = &m.t.specs[i];
    if (s->init == INIT_PAD) {
      for (int64_t j = s->offset; j < s->offset + s->count; j++)
        check(grads[2][j] == 0, "%s: padding has a gradient", name);
      continue;
    }
    double emulated = relative_error(grads[1] + s->offset, grads[0] + s->offset, s->count),
           found = relative_error(grads[2] + s->offset, grads[0] + s->offset, s->count);
    // the emulation is one draw of the rounding errors: of n elements it tells their size to about 1 / sqrt(n)
    // two draws of an error, which few elements or few tokens average badly
    double limit = (2 + 4 / sqrt((double)s->count) + 2 / sqrt((double)B * T)) * emulated + 0.004;
    check(found <= limit, "%s B=%d T=%d: gradient of %s off by %.3g, limit %.3g", name, B, T, s->name, found, limit);
    count_error(s->name, found / limit, label);
    if (found / limit > worst) worst = found / limit, worst_name = s->name;
  }
  double loss_limit = 2 * fabs(loss[1] - loss[0]) + 1e-3 * fabs(loss[0]);
  check(fabs(loss[2] - loss[0]) <= loss_limit, "%s B=%d T=%d: loss %.6f, reference %.6f", name, B, T, loss[2], loss[0]);
  printf("cuda %-28s B=%d T=%-4d worst error / limit %.2f (%s)\n", name, B, T, worst, worst_name);
  for (int a = 0; a < 3; a++) {
    for (int k = 0; k < n_names; k++) free(kept[a][k]);
    free(act[a]), free(grads[a]);
  }
  free(counts), free(tokens), free(targets), model_free(&m);
}

// 20 steps of AdamW from the same weights: the losses of the GPU stay as near to the double reference as bf16 does.
static void test_cuda_steps(const char *name, Config c) {
  char label[96];
  snprintf(label, sizeof label, "%s 20 steps", name);
  if (!wanted(label)) return;
  const EngineApi *apis[3] = {&engine_cpu_f64, &engine_cpu_bf16, &engine_cuda};
  enum { B = 4, T = 130 };
  Model m = model_make(c, 95);
  model_round_matrices(&m);
  int32_t tokens[B * T], targets[B * T];
  for (int i = 0; i < B * T; i++)
    tokens[i] = (int32_t)((i / T + 1) * (i % T) % 131), targets[i] = (int32_t)((i / T + 1) * (i % T + 1) % 131);
  double losses[3][20];
  for (int a = 0; a < 3; a++) {
    Engine *e = engine_make(apis[a], &m, B, T, 1, 0);
    AdamW w = {1e-3, 0.9, 0.95, 1e-8, 0.1, 1, 0, 0};
    for (w.step = 1; w.step <= 20; w.step++) {
      apis[a]->zero_grad(e);
      losses[a][w.step - 1] = apis[a]->forward(e, tokens, targets, B, T, 0) / (B * T);
      apis[a]->backward(e, 1.0 / (B * T));
      double norm = sqrt(apis[a]->grad_sumsq(e, 0, m.t.total));
      w.grad_scale = norm > 1 ? 1 / norm : 1;
      apis[a]->update(e, &w);
    }
    apis[a]->destroy(e);
  }
  double worst = 0, bf16 = 0;
  for (int i = 0; i < 20; i++)
    worst = fmax(worst, fabs(losses[2][i] - losses[0][i])), bf16 = fmax(bf16, fabs(losses[1][i] - losses[0][i]));
  check(worst <= 2 * bf16 + 0.01 * losses[0][0] && losses[2][19] < 0.9 * losses[2][0],
        "%s: 20 steps, loss off by %.4f (bf16 on the CPU: %.4f), %.4f to %.4f", name, worst, bf16, losses[2][0],
        losses[2][19]);
  printf("cuda %-28s 20 steps: loss %.4f to %.4f, off by at most %.4f (bf16 on the CPU: %.4f)\n", name, losses[2][0],
         losses[2][19], worst, bf16);
  model_free(&m);
}

typedef struct {
  Engine *e;
  int64_t n;
  float *read[4];  // by Arena
} BehindJob;

static void *read_all_behind(void *arg) {
  BehindJob *j = (BehindJob *)arg;
  for (int a = 0; a < 4; a++)
    if (a != ARENA_GRAD) engine_cuda.read_behind(j->e, (Arena)a, 0, j->n, j->read[a]);
  return NULL;
}

// The copy for a save, taken by another thread while forward and backward run, holds the bits of after the update.
static void test_cuda_read_behind(void) {
  enum { B = 4, T = 256 };
  if (!wanted("read behind")) return;
  const EngineApi *api = &engine_cuda;
  Config c = cuda_config("gdn", 2, 2, 64, 64);
  c.ff = 8192;
  Model m = model_make(c, 96);
  int32_t tokens[B * T];
  for (int i = 0; i < B * T; i++) tokens[i] = i % 131;
  Engine *e = engine_make(api, &m, B, T, 1, 0);
  AdamW w = {1e-3, 0.9, 0.95, 1e-8, 0.1, 1, 1, 0};
  BehindJob job = {e, m.t.total, {NULL}};
  int64_t n = m.t.total;
  check(n > 5 << 19, "%lld elements: needed several pieces and a part of one", (long long)n);
  for (int save = 0; save < 3; save++, w.step++) {  // a thread for each, as a run has
    pthread_t thread;
    api->zero_grad(e);
    api->forward(e, tokens, tokens, B, T, 0);
    api->backward(e, 1.0 / (B * T));
    api->update(e, &w);
    api->synchronize(e);
    for (int a = 0; a < 4; a++) job.read[a] = (float *)alloc_zeroed(n, 4, "test");
    if (!check(!pthread_create(&thread, NULL, read_all_behind, &job), "no thread")) return;
    api->zero_grad(e);
    for (int i = 0; i < 10; i++) api->forward(e, tokens, tokens, B, T, 0), api->backward(e, 1.0 / (B * T));
    pthread_join(thread, NULL);
    float *want = (float *)alloc_array(n, 4, "test");
    for (int a = 0; a < 4; a++) {
      if (a != ARENA_GRAD) {
        api->read(e, (Arena)a, 0, n, want);
        check(!memcmp(want, job.read[a], (size_t)n * 4), "copy %d of arena %d behind the training differs", save, a);
      }
      free(job.read[a]);
    }
    free(want);
  }
  api->destroy(e);
  model_free(&m);
}

// Value heads in groups with decays per channel, the papers' ablations and the rarer options.
static void test_cuda_variants(const int *lengths) {
  Config c;
  for (int i = 0; i < 12; i++) {
    test_cuda("kda grouped 1/2", cuda_config("kda", 1, 2, 64, 64), 2, lengths[i], GATES_DRAWN);
    test_cuda("gdn2 grouped 1/2", cuda_config("gdn2", 1, 2, 64, 64), 2, lengths[i], GATES_DRAWN);
  }
  c = cuda_config("kda gdn2", 2, 6, 128, 64), c.beta_max = 2, c.boundary_reset = 1, c.bos = 0;
  test_cuda("kda gdn2 grouped 2/6 documents", c, 2, 129, GATES_DRAWN);
  c = cuda_config("gdn2", 2, 4, 128, 128), test_cuda("gdn2 grouped 2/4", c, 5, 129, GATES_DRAWN);
  static const char *const names[] = {"gdn2 erase scalar", "gdn2 write scalar", "gdn2 erase and write scalar"};
  for (int i = 0; i < 3; i++)
    for (int group = 1; group <= 2; group++) {
      c = cuda_config("gdn2", 2, 2 * group, group == 1 ? 128 : 64, 128);
      c.erase = i == 1 ? PER_CHANNEL : PER_HEAD, c.write = i == 0 ? PER_CHANNEL : PER_HEAD, c.beta_max = group;
      test_cuda(names[i], c, 2, 129, GATES_DRAWN);
      c.boundary_reset = 1, c.bos = 0, test_cuda(names[i], c, 1, 289, GATES_DRAWN);
      test_cuda(names[i], c, 3, 17, GATES_DRAWN);
    }
  c = cuda_config("kda", 2, 2, 128, 128), c.kda_lower_bound = -5, test_cuda("kda bounded", c, 2, 129, GATES_DRAWN);
  c.kda_lower_bound = -0.1, test_cuda("kda bounded", c, 1, 65, GATES_DRAWN);
  c = cuda_config("kda", 1, 2, 64, 64), c.kda_lower_bound = -5, c.boundary_reset = 1, c.bos = 0;
  test_cuda("kda bounded grouped documents", c, 2, 289, GATES_DRAWN);
  c = cuda_config("gdn2", 2, 2, 128, 128), c.decay = 0, test_cuda("gdn2 no decay", c, 2, 129, GATES_DRAWN);
  c = cuda_config("gdn2", 1, 3, 64, 64), c.decay = 0, test_cuda("gdn2 no decay grouped", c, 2, 65, GATES_DRAWN);
  c = cuda_config("kda", 1, 2, 64, 64), c.decay = 0, test_cuda("kda no decay grouped", c, 2, 65, GATES_DRAWN);
  test_cuda("gdn2 spike", cuda_config("gdn2", 2, 2, 128, 128), 2, 129, GATES_SPIKE);
  test_cuda("kda spike", cuda_config("kda", 2, 2, 64, 64), 2, 129, GATES_SPIKE);
  test_cuda("gdn2 kda spike grouped", cuda_config("gdn2 kda", 1, 2, 64, 64), 2, 129, GATES_SPIKE);
  test_cuda("gdn2 kda extreme grouped", cuda_config("gdn2 kda", 2, 4, 64, 64), 1, 289, GATES_EXTREME);
  static const int keys[] = {64, 128, 192, 256};
  for (int i = 0; i < 4; i++) {
    c = cuda_config("gdn", 2, 2, keys[i], 64), c.qk_norm = NORM_L1, test_cuda("gdn L1", c, 2, 67, GATES_DRAWN);
    c.boundary_reset = 1, c.bos = 0, test_cuda("gdn L1 documents", c, 2, 129, GATES_DRAWN);
  }
  c = cuda_config("kda deltanet", 2, 2, 64, 64), c.qk_norm = NORM_L1, c.conv_size = 0;
  test_cuda("kda deltanet L1 no conv", c, 2, 67, GATES_DRAWN);
  c = cuda_config("gdn", 2, 2, 64, 128), c.output_norm = 0, test_cuda("gdn no norm", c, 2, 300, GATES_DRAWN);
  c.output_gate = OUTPUT_GATE_NONE, test_cuda("gdn no norm, no gate", c, 2, 65, GATES_DRAWN);
  c = cuda_config("kda gdn2", 1, 2, 64, 64), c.output_norm = 0, test_cuda("kda gdn2 no norm", c, 2, 65, GATES_DRAWN);
  c = cuda_config("mamba2", 2, 2, 64, 64), c.mamba_groups = 2, test_cuda("mamba2 2 groups", c, 2, 129, GATES_DRAWN);
  c.mamba_groups = 4, c.boundary_reset = 1, c.bos = 0, test_cuda("mamba2 4 groups documents", c, 2, 129, GATES_DRAWN);
  for (int taps = 2; taps <= 3; taps++) {
    c = cuda_config("gdn2 mamba2", 2, 2, 64, 64), c.conv_size = taps, test_cuda("conv taps", c, 2, 129, GATES_DRAWN);
    c.boundary_reset = 1, c.bos = 0, test_cuda("conv taps documents", c, 2, 67, GATES_DRAWN);
  }
}

// --recompute norms and all: loss and gradients have the bits of none, twice in a row, with less memory. The engines
// read the choice of matrix product algorithms, which timing decides, from one file.
static void test_cuda_recompute(const char *pattern, int ff, int documents) {
  const EngineApi *api = &engine_cuda;
  enum { B = 2, T = 200, N = B * T };
  char label[96];
  snprintf(label, sizeof label, "%s recompute", pattern);
  if (!wanted(label)) return;
  Config c = cuda_config(pattern, 2, 2, 64, 64);
  c.ff = ff, c.boundary_reset = documents, c.bos = 0;
  Model m = model_make(c, 93);
  int32_t tokens[N], targets[N];
  random_tokens(tokens, targets, N, c.vocab, 17);
  for (int n = 0; n < N; n++)  // three documents a row
    tokens[n] = n % T == 37 || n % T == 64 ? c.bos : tokens[n] == c.bos ? 1 : tokens[n];
  char dir[] = "/tmp/test_gdn_XXXXXX", path[64];
  if (!check(mkdtemp(dir) != NULL, "no folder %s", dir)) return;
  int64_t total = m.t.total, memory[RECOMPUTE_COUNT];
  double *grads[RECOMPUTE_COUNT], loss[RECOMPUTE_COUNT];
  for (int r = 0; r < RECOMPUTE_COUNT; r++) {
    EngineSettings s;
    Error err;
    memset(&s, 0, sizeof s);
    s.max_rows = B, s.max_len = T, s.train = 1, s.recompute = r, s.cache_dir = dir;
    if (api->check(&m.c, &s, &err)) fail_error(&err);
    Engine *e = api->create(&m.c, &m.t, &s, &err);
    if (!e) fail_error(&err);
    api->write64(e, ARENA_PARAM, 0, total, m.params);
    memory[r] = api->memory_bytes(e);
    grads[r] = (double *)alloc_array(total, sizeof(double), "test");
    for (int pass = 0; pass < 2; pass++) {  // the second finds what the first left in the shared buffers
      api->zero_grad(e);
      if (pass) api->loss_scale(e, 1.0 / N);
      loss[r] = api->forward(e, tokens, targets, B, T, 0);
      api->backward(e, 1.0 / N);
      api->read64(e, ARENA_GRAD, 0, total, grads[r]);
      double norm = 0;
      for (int64_t i = 0; i < total; i++) norm += grads[r][i] * grads[r][i];
      check(norm > 0 && isfinite(norm), "%s --recompute %s: gradient norm %g", pattern, recompute_names[r], norm);
      for (int i = 0; i < m.t.n; i++)
        check(!memcmp(grads[r] + m.t.specs[i].offset, grads[0] + m.t.specs[i].offset,
                      (size_t)m.t.specs[i].count * sizeof(double)),
              "%s --recompute %s, pass %d: gradient of %s has other bits than with none", pattern, recompute_names[r],
              pass + 1, m.t.specs[i].name);
      check(loss[r] == loss[0], "%s --recompute %s, pass %d: loss %.17g, %.17g with none", pattern, recompute_names[r],
            pass + 1, loss[r], loss[0]);
    }
    api->destroy(e);
  }
  check(c.layers < 2 || (memory[2] < memory[1] && memory[1] < memory[0]), "%s: memory %lld, %lld, %lld", pattern,
        (long long)memory[0], (long long)memory[1], (long long)memory[2]);
  printf("cuda %-28s recompute: %.1f, %.1f, %.1f MiB\n", pattern, (double)memory[0] / (1 << 20),
         (double)memory[1] / (1 << 20), (double)memory[2] / (1 << 20));
  snprintf(path, sizeof path, "%s/cublaslt.txt", dir);
  remove(path), rmdir(dir);
  for (int r = 0; r < RECOMPUTE_COUNT; r++) free(grads[r]);
  model_free(&m);
}

// The engine's own count of its memory against what it allocates.
static void test_cuda_memory_bytes(void) {
  static const char *const patterns[] = {"gdn", "gdn2 swa", "mamba2 attn"};
  if (!wanted("memory bytes")) return;
  for (int p = 0; p < 3; p++)
    for (int train = 0; train < 2; train++)
      for (int r = 0; r < RECOMPUTE_COUNT; r++) {
        Model m = model_make(cuda_config(patterns[p], 2, 2, 64, 64), 3);
        EngineSettings s;
        Error err;
        int64_t bytes[MEMORY_KINDS], sum = 0;
        memset(&s, 0, sizeof s);
        s.max_rows = 3, s.max_len = 100, s.train = train, s.recompute = r, s.max_state = train ? 0 : 500;
        engine_cuda.memory_plan(&m.c, &m.t, &s, bytes);
        for (int k = 0; k < MEMORY_KINDS; k++) sum += bytes[k];
        Engine *e = engine_cuda.create(&m.c, &m.t, &s, &err);
        if (!e) fail_error(&err);
        check(engine_cuda.memory_bytes(e) == sum, "%s train %d recompute %d: %lld bytes planned, %lld allocated",
              patterns[p], train, r, (long long)sum, (long long)engine_cuda.memory_bytes(e));
        engine_cuda.destroy(e), model_free(&m);
      }
}

// The forecast of the activations, kind by kind, against the CUDA engine's own count: 1%, and 1 MiB for partial sums
// that the forecast leaves out and for arrays that end at multiples of 256 bytes. Needs no GPU.
static void test_cuda_forecast(void) {
  if (!wanted("forecast")) return;
  for (int p = 0; p < preset_count; p++)
    for (int r = 0; r < RECOMPUTE_COUNT; r++)
      for (int size = 0; size < 3; size++) {
        static const int rows[] = {8, 1, 3}, lengths[] = {4096, 2048, 1000};
        if (!strncmp(presets[p].name, "tiny-", 5)) continue;  // heads that the GPU's kernels do not take
        Config c = preset_config(&presets[p]);
        ParamTable t = param_table_build(&c);
        EngineSettings s;
        int64_t bytes[MEMORY_KINDS];
        double kinds[MEMORY_KINDS], sum = 0, forecast;
        memset(&s, 0, sizeof s);
        s.max_rows = rows[size], s.max_len = lengths[size], s.train = 1, s.recompute = r;
        engine_cuda.memory_plan(&c, &t, &s, bytes);
        forecast = gpu_activations(kinds, &c, &t, s.max_rows, s.max_len, r);
        for (int k = MEMORY_RESIDUAL; k < MEMORY_KINDS; k++) {
          double have = (double)bytes[k];
          sum += have;
          check(fabs(kinds[k] - have) <= 0.01 * have + (1 << 20),
                "%s %d x %d --recompute %s: %s %.1f MiB, forecast %.1f", presets[p].name, s.max_rows, s.max_len,
                recompute_names[r], memory_names[k], have / (1 << 20), kinds[k] / (1 << 20));
        }
        check(fabs(forecast - sum) <= 0.01 * sum, "%s %d x %d --recompute %s: %.1f MiB, forecast %.1f", presets[p].name,
              s.max_rows, s.max_len, recompute_names[r], sum / (1 << 20), forecast / (1 << 20));
        param_table_free(&t);
      }
}

static void test_cuda_all(int quick) {
  test_cuda_read_behind();
  static const int lengths[] = {1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 129, 289};
  static const int dims[][2] = {{64, 64}, {128, 128}, {128, 256}, {192, 384}, {256, 256}, {256, 512}};
  for (int i = 0; i < 12; i++) {
    test_cuda("gdn", cuda_config("gdn", 2, 2, 64, 64), 2, lengths[i], 0);
    if (quick) continue;
    test_cuda("mamba2 gdn swa", cuda_config("mamba2 gdn swa", 2, 2, 64, 128), 2, lengths[i], 0);
    // a window of less than a tile of 64 keys: lengths below, around and far above it
    static const char *const patterns[] = {"gdn swa", "mamba2", "mamba2 swa", "attn"};
    for (int p = 0; p < 4; p++) {
      Config c = cuda_config(patterns[p], 2, 2, 64, 64);
      c.window = 60, test_cuda(patterns[p], c, 2, lengths[i], 0);
    }
  }
  for (int i = 0; i < 6; i++) {
    char name[64];
    snprintf(name, sizeof name, "gdn (%d,%d)", dims[i][0], dims[i][1]);
    test_cuda(name, cuda_config("gdn", 2, 2, dims[i][0], dims[i][1]), 2, 129, 0);
    snprintf(name, sizeof name, "deltanet (%d,%d)", dims[i][0], dims[i][1]);
    test_cuda(name, cuda_config("deltanet", 1, 1, dims[i][0], dims[i][1]), 1, 65, 0);
  }
  Config c = cuda_config("gdn", 2, 4, 64, 128);
  test_cuda("gdn grouped 2/4", c, 5, 129, 0);
  c = cuda_config("gdn", 2, 6, 64, 64), test_cuda("gdn grouped 2/6", c, 1, 129, 0);
  c = cuda_config("gdn deltanet", 2, 2, 128, 128), c.beta_max = 2, test_cuda("gdn deltanet beta 2", c, 2, 129, 0);
  c = cuda_config("gdn", 2, 2, 64, 64), test_cuda("gdn extreme gates", c, 2, 289, 1);
  c = cuda_config("gdn", 3, 3, 64, 64), c.tied = 1, test_cuda("gdn tied, 3 heads", c, 2, 129, 0);
  c = cuda_config("gdn", 2, 2, 64, 64), c.output_gate = OUTPUT_GATE_NONE, test_cuda("gdn no output gate", c, 2, 65, 0);
  c = cuda_config("gdn", 2, 2, 64, 64), c.output_gate = OUTPUT_GATE_SIGMOID, test_cuda("gdn sigmoid gate", c, 2, 65, 0);
  c = cuda_config("deltanet", 2, 2, 64, 64), c.output_gate = OUTPUT_GATE_SILU, test_cuda("deltanet gated", c, 2, 65, 0);
  c = cuda_config("gdn", 2, 2, 64, 64), c.conv_size = 0, test_cuda("gdn no conv", c, 2, 65, 0);
  c = cuda_config("gdn", 2, 2, 64, 64), c.decay = 0, test_cuda("gdn no decay", c, 2, 129, 0);
  c = cuda_config("gdn swa", 2, 2, 64, 64), c.ff = 0, test_cuda("gdn swa no MLP", c, 2, 129, 0);
  c = cuda_config("mamba2", 2, 2, 64, 64), c.mamba_state = 128, test_cuda("mamba2 (128)", c, 2, 129, 0);
  c = cuda_config("attn", 2, 2, 64, 64), c.attn_heads = 4, c.attn_kv_heads = 2;
  test_cuda("attn grouped", c, 2, 129, 0);
  c = cuda_config("swa", 2, 2, 64, 64), c.attn_heads = c.attn_kv_heads = 1, c.attn_head_dim = 128;
  static const int windows[] = {1, 63, 129, 128, 60, 300};
  for (int i = 0; i < 6; i++) {
    char name[64];
    c.window = windows[i];
    snprintf(name, sizeof name, "swa window %d", windows[i]);
    test_cuda(name, c, 2, 129, 0);
  }
  for (int i = 0; i < 12; i++) {
    test_cuda("gdn2", cuda_config("gdn2", 2, 2, 128, 128), 2, lengths[i], 0);
    if (!quick) test_cuda("kda swa", cuda_config("kda swa", 2, 2, 64, 64), 2, lengths[i], 0);
  }
  test_cuda("kda", cuda_config("kda", 3, 3, 128, 128), 2, 129, 0);
  test_cuda("gdn2 (64,128)", cuda_config("gdn2", 2, 2, 64, 128), 5, 129, 0);
  c = cuda_config("gdn2 kda", 2, 2, 128, 128), c.beta_max = 2, test_cuda("gdn2 kda b 2", c, 2, 129, 0);
  c = cuda_config("gdn2", 2, 2, 128, 128), c.output_gate = OUTPUT_GATE_SIGMOID,
  test_cuda("gdn2 sigmoid gate", c, 2, 129, 0);
  c = cuda_config("gdn2", 2, 2, 128, 128), c.output_gate = OUTPUT_GATE_NONE, test_cuda("gdn2 no gate", c, 2, 129, 0);
  test_cuda("gdn2 extreme gates", cuda_config("gdn2", 2, 2, 128, 128), 2, 289, 1);
  test_cuda("kda extreme gates", cuda_config("kda", 2, 2, 64, 64), 2, 289, 1);
  c = cuda_config("gdn2 kda", 2, 2, 128, 128), c.boundary_reset = 1, c.bos = 0,
  test_cuda("gdn2 kda documents", c, 2, 129, 0);
  c = cuda_config("mamba2 gdn swa", 2, 2, 64, 64), c.boundary_reset = 1, c.bos = 0,
  test_cuda("h2 documents", c, 2, 129, 0);
  for (int p = 0; p < ALL_PATTERNS; p++) {
    char name[96];
    snprintf(name, sizeof name, "%s documents apart", all_patterns[p]);
    if (!wanted(name)) continue;
    c = cuda_config(all_patterns[p], 2, 2, 64, 64);
    test_documents_apart(&engine_cuda, name, c);
    c.head_k = c.head_v = 128, c.v_heads = 4, c.window = 60, test_documents_apart(&engine_cuda, name, c);
    printf("cuda %-28s compared\n", name);
  }
  test_cuda_variants(lengths);
  test_cuda_memory_bytes();
  static const char *const recomputed[] = {"gdn gdn",       "gdn2 gdn2", "kda deltanet",
                                           "mamba2 mamba2", "swa swa",   "mamba2 gdn swa"};
  for (int i = 0; i < 6; i++)
    for (int documents = 0; documents < 2; documents++) test_cuda_recompute(recomputed[i], 192, documents);
  test_cuda_recompute("gdn", 192, 1), test_cuda_recompute("gdn2 swa mamba2", 0, 1);
  if (!quick) {
    test_cuda("gdn 4096", cuda_config("gdn swa", 2, 2, 128, 256), 1, 4096, 0);
    test_cuda_steps("gdn", cuda_config("gdn", 2, 2, 64, 128));
    test_cuda_steps("deltanet", cuda_config("deltanet", 2, 2, 64, 64));
    test_cuda_steps("mamba2 gdn swa", cuda_config("mamba2 gdn swa", 2, 2, 64, 64));
    test_cuda_steps("gdn2 swa", cuda_config("gdn2 swa", 2, 2, 128, 128));
    test_cuda_steps("kda", cuda_config("kda", 2, 2, 64, 64));
    test_cuda_steps("attn", cuda_config("attn", 2, 2, 64, 64));
  }
}
#endif

// ----------------------------------------------------------------------------
// planted faults: each wrong term must turn the gradient checks red

static int gradients_notice(int fault) {
  int passed = checks_passed, failed = checks_failed;
  gdn_planted = fault, checks_quiet = 1;
  test_gradients("planted", small_config("mamba2 gdn swa"), 131, 0);
  if (checks_failed == failed) test_gradients("planted", small_config("gdn2 attn"), 131, 0);
  Config c = small_config("gdn");
  c.beta_max = 2;
  if (checks_failed == failed) test_gradients("planted", c, 131, 0);
  gdn_planted = 0, checks_quiet = 0;
  int noticed = checks_failed - failed;
  checks_passed = passed, checks_failed = failed;
  return noticed;
}

int main(int argc, char **argv) {
  if (argc == 3 && !strcmp(argv[1], "--plant")) {
    int noticed = gradients_notice(atoi(argv[2]));
    printf("planted fault %s: %d tensors differ\n", argv[2], noticed);
    return noticed ? 0 : 1;
  }
  int quick = argc > 1 && !strcmp(argv[1], "--quick");
#ifdef WITH_CUDA
  if (argc == 3 && !strcmp(argv[1], "--only")) only = argv[2];
  test_cuda_forecast();
  if (argc > 1 && !strcmp(argv[1], "--forecast")) return report_end();  // all that needs no GPU
  test_cuda_all(quick);
  print_errors();
  if (only) check(checks_passed + checks_failed > 0, "no case's name holds \"%s\"", only);
  return report_end();
#else
  check_skip("the CUDA engine is not linked in: make test_gdncu, on a machine with a GPU");
#endif
  test_all_gradients(quick ? 0 : 3);
  test_reductions();
  test_float_against_double();
  test_pieces();
  test_rows_threads_future();
  test_documents();
  for (int p = 0; p < ALL_PATTERNS; p++)
    test_documents_apart(&engine_cpu_f32, all_patterns[p], small_config(all_patterns[p]));
  test_update();
  test_training("gdn", 2.77), test_training("gdn2", 2.77), test_training("kda", 5), test_training("mamba2", 2.77);
  test_first_loss();
  for (int fault = 1; fault <= PLANT_FAULTS; fault++)
    check(gradients_notice(fault) > 0, "planted fault %d was not noticed", fault);
  return report_end();
}
