// config.h: what a model is (Config), and its parameter table, the one structure that everything loops over.
//
// A Config expands to an array of ParamSpec in arena order. Allocation, initialisation, AdamW, gradient norm, ZeRO
// shards, checkpoints, tests and the memory forecast all walk that array; the engines find their weights through
// LayerLayout, which holds arena offsets by name. Names and shapes are fla's, so that a checkpoint is a
// Hugging Face model folder.
//
// Tensors that one matrix product serves (q, k, v, gate, small gates) lie side by side in the arena: the packed product
// is a pointer to the first, and LayerLayout says in which columns of its output each part arrives. Pad specs (rows of
// zeros that are not parameters) keep the number of packed rows and of vocabulary rows a multiple of 8.
//
// defines: Mixer, Config, ParamSpec, LayerLayout, ParamTable, mixer_name, mixer_from_name, config_default,
// config_check,
//          config_layer_mixer, param_table_build, param_table_free, param_find
#ifndef GDN_CONFIG_H
#define GDN_CONFIG_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "check.h"

// ----------------------------------------------------------------------------
// the configuration

typedef enum { MIX_GDN, MIX_GDN2, MIX_KDA, MIX_DELTANET, MIX_MAMBA2, MIX_SWA, MIX_ATTN, MIX_COUNT } Mixer;
typedef enum {
  OUTPUT_GATE_AUTO,
  OUTPUT_GATE_SILU,
  OUTPUT_GATE_SIGMOID,
  OUTPUT_GATE_NONE
} OutputGate;  // auto: what the mixer's paper uses
typedef enum { NORM_L2, NORM_L1 } QKNorm;
typedef enum { PER_CHANNEL, PER_HEAD } GateWidth;  // GDN-2's erase and write gates; PER_HEAD: channel mean, broadcast

enum { MAX_PATTERN = 64, MAX_VOCAB = 1 << 24, MAX_LAYERS = 4096 };

typedef struct {
  char model[64];  // preset name, or "custom"
  int vocab;       // token ids are 0 .. vocab-1
  int width;       // d: size of the residual stream
  int layers;      // L
  int ff;          // hidden size of the SwiGLU MLP; 0: no MLP
  int tied;        // 1: the head is the embedding
  int n_pattern;   // layer i uses pattern[i % n_pattern]
  Mixer pattern[MAX_PATTERN];
  // delta-rule mixers (gdn gdn2 kda deltanet)
  int heads;    // H: key heads
  int v_heads;  // HV: value heads, a multiple of H (grouped value heads)
  int head_k;   // dk: key dim of a head
  int head_v;   // dv: value dim of a head
  // attention (swa attn)
  int attn_heads, attn_kv_heads, attn_head_dim;
  int window;         // swa: keys that a query sees, itself included
  double rope_theta;  // base of the rotary angles
  // mamba2
  int mamba_state, mamba_head, mamba_expand, mamba_groups;
  // details and the papers' ablations
  int conv_size;            // taps of the short convolution; 0: no short convolution
  double norm_eps, l2_eps;  // RMSNorm; inside the root of the L2 norm of q and k
  int beta_max;             // 1, or 2: beta (GDN-2: b) in (0, 2), negative eigenvalues allowed
  OutputGate output_gate;   // of the delta-rule mixers
  int output_norm;          // 0: no RMSNorm before the output projection
  QKNorm qk_norm;           // of q and k in the delta-rule mixers
  int decay;                // 0: no decay (the naive delta rule)
  GateWidth erase, write;   // GDN-2
  double kda_lower_bound;   // 0: log decay = -exp(A_log) softplus(.); else lower_bound * sigmoid(exp(A_log) (.))
  int boundary_reset;       // 1: state, conv and attention restart at BOS
  int bos;                  // id of BOS, -1: none (needed for boundary_reset)
} Config;

static const char *const mixer_names[MIX_COUNT] = {"gdn", "gdn2", "kda", "deltanet", "mamba2", "swa", "attn"};

static inline const char *mixer_name(Mixer m) { return mixer_names[m]; }

// Returns MIX_COUNT when there is no such mixer.
static inline Mixer mixer_from_name(const char *name) {
  for (int m = 0; m < MIX_COUNT; m++)
    if (!strcmp(name, mixer_names[m])) return (Mixer)m;
  return MIX_COUNT;
}

static inline Mixer config_layer_mixer(const Config *c, int layer) { return c->pattern[layer % c->n_pattern]; }
static inline int mixer_is_delta(Mixer m) { return m <= MIX_DELTANET; }
static inline int mixer_is_attention(Mixer m) { return m == MIX_SWA || m == MIX_ATTN; }
static inline int mixer_channel_decay(Mixer m) { return m == MIX_GDN2 || m == MIX_KDA; }
static inline int config_has_mixer(const Config *c, Mixer m) {
  for (int i = 0; i < c->layers && i < c->n_pattern; i++)
    if (c->pattern[i] == m) return 1;
  return 0;
}

// The gate that a layer really has: fla's and the papers' defaults.
static inline OutputGate config_output_gate(const Config *c, Mixer m) {
  if (c->output_gate != OUTPUT_GATE_AUTO) return c->output_gate;
  if (m == MIX_DELTANET) return OUTPUT_GATE_NONE;
  return m == MIX_KDA ? OUTPUT_GATE_SIGMOID : OUTPUT_GATE_SILU;
}
static inline int config_has_decay(const Config *c, Mixer m) {
  return m == MIX_MAMBA2 || (m != MIX_DELTANET && c->decay);
}

static inline Config config_default(void) {
  Config c;
  memset(&c, 0, sizeof c);
  strcpy(c.model, "custom");
  c.vocab = 32000, c.width = 64, c.layers = 2, c.ff = 0, c.tied = 0;
  c.n_pattern = 1, c.pattern[0] = MIX_GDN;
  c.heads = 2, c.v_heads = 2, c.head_k = 32, c.head_v = 32;
  c.attn_heads = 2, c.attn_kv_heads = 2, c.attn_head_dim = 32, c.window = 2048, c.rope_theta = 10000.0;
  c.mamba_state = 128, c.mamba_head = 64, c.mamba_expand = 2, c.mamba_groups = 1;
  c.conv_size = 4, c.norm_eps = 1e-5, c.l2_eps = 1e-6;
  c.beta_max = 1, c.output_gate = OUTPUT_GATE_AUTO, c.output_norm = 1, c.qk_norm = NORM_L2, c.decay = 1;
  c.erase = PER_CHANNEL, c.write = PER_CHANNEL, c.kda_lower_bound = 0;
  c.boundary_reset = 0, c.bos = 1;
  return c;
}

// Exit code 3 with one line in err when the model cannot be built; 0 when it can.
static inline int config_check(const Config *c, Error *err) {
  const int max = 1 << 20;
#define NEED(cond, ...) \
  if (!(cond)) return error_set(err, EXIT_CONFIG, __VA_ARGS__)
  NEED(c->vocab >= 1 && c->vocab <= MAX_VOCAB, "vocabulary of %d: needed 1 to %d; change --vocab", c->vocab, MAX_VOCAB);
  NEED(c->width >= 1 && c->width <= max, "width %d: needed 1 to %d; change --width", c->width, max);
  NEED(c->layers >= 1 && c->layers <= MAX_LAYERS, "%d layers: needed 1 to %d; change --layers", c->layers, MAX_LAYERS);
  NEED(c->ff >= 0 && c->ff <= max, "MLP size %d: needed 0 (no MLP) to %d; change --ff", c->ff, max);
  NEED(c->n_pattern >= 1 && c->n_pattern <= MAX_PATTERN, "the pattern has %d mixers: needed 1 to %d; change --pattern",
       c->n_pattern, MAX_PATTERN);
  NEED(c->n_pattern <= c->layers, "the pattern names %d mixers but there are %d layers: change --pattern or --layers",
       c->n_pattern, c->layers);
  NEED(c->conv_size == 0 || (c->conv_size >= 2 && c->conv_size <= 16),
       "a short convolution of %d taps: needed 0 (none) or 2 to 16; change --conv-size", c->conv_size);
  NEED(c->beta_max == 1 || c->beta_max == 2, "beta up to %d: needed 1 or 2; change --beta-max", c->beta_max);
  NEED(c->norm_eps > 0 && c->l2_eps >= 0, "norm eps %g, L2 eps %g: needed above 0; change --norm-eps", c->norm_eps,
       c->l2_eps);
  NEED(!c->boundary_reset || (c->bos >= 0 && c->bos < c->vocab),
       "--boundary reset needs a BOS id inside the vocabulary of %d, found %d: change --bos or use --boundary ignore",
       c->vocab, c->bos);
  for (int i = 0; i < c->n_pattern; i++) {
    Mixer m = c->pattern[i];
    NEED((int)m >= 0 && m < MIX_COUNT, "the pattern holds a mixer that does not exist: change --pattern");
    if (mixer_is_delta(m)) {
      NEED(c->heads >= 1 && c->heads <= 4096, "%d heads: needed 1 to 4096; change --heads", c->heads);
      NEED(c->head_k >= 1 && c->head_k <= 8192, "key dim %d of a head: needed 1 to 8192; change --head-k", c->head_k);
      NEED(c->head_v >= 1 && c->head_v <= 8192, "value dim %d of a head: needed 1 to 8192; change --head-v", c->head_v);
      NEED(c->v_heads >= c->heads && c->v_heads % c->heads == 0 && c->v_heads <= 65536,
           "%d value heads over %d key heads: needed a multiple of the key heads; change --v-heads or --heads",
           c->v_heads, c->heads);
      NEED(c->kda_lower_bound == 0 || (c->kda_lower_bound >= -5 && c->kda_lower_bound < 0),
           "lower bound %g of KDA's log decay: needed -5 to below 0, or 0 for none; change --kda-lower-bound",
           c->kda_lower_bound);
    }
    if (mixer_is_attention(m)) {
      NEED(c->attn_heads >= 1 && c->attn_heads <= 4096, "%d attention heads: needed 1 to 4096; change --attn-heads",
           c->attn_heads);
      NEED(c->attn_kv_heads >= 1 && c->attn_heads % c->attn_kv_heads == 0,
           "%d key/value heads for %d attention heads: needed a divisor; change --attn-kv-heads", c->attn_kv_heads,
           c->attn_heads);
      NEED(c->attn_head_dim >= 2 && c->attn_head_dim % 2 == 0 && c->attn_head_dim <= 8192,
           "attention head dim %d: needed an even number from 2 to 8192 (rotary pairs); change --attn-head-dim",
           c->attn_head_dim);
      NEED(c->rope_theta > 1, "rotary base %g: needed above 1; change --rope-theta", c->rope_theta);
      NEED(m != MIX_SWA || c->window >= 1, "window %d: needed 1 or more; change --window", c->window);
    }
    if (m == MIX_MAMBA2) {
      NEED(c->mamba_state >= 1 && c->mamba_state <= 8192, "d_state %d: needed 1 to 8192; change --mamba-state",
           c->mamba_state);
      NEED(c->mamba_expand >= 1 && c->mamba_expand <= 16, "Mamba2 expand %d: needed 1 to 16; change --mamba-expand",
           c->mamba_expand);
      int inner = c->width * c->mamba_expand;
      NEED(c->mamba_head >= 1 && inner % c->mamba_head == 0,
           "Mamba2 head dim %d does not divide %d (expand x width): change --mamba-head or --width", c->mamba_head,
           inner);
      int heads = inner / c->mamba_head;
      NEED(c->mamba_groups >= 1 && heads % c->mamba_groups == 0,
           "%d Mamba2 groups do not divide %d heads: change --mamba-groups", c->mamba_groups, heads);
      NEED((int64_t)c->mamba_groups * c->mamba_state <= max,
           "%d Mamba2 groups of d_state %d: needed %d channels at most; "
           "change --mamba-groups or --mamba-state",
           c->mamba_groups, c->mamba_state, max);
    }
  }
#undef NEED
  return 0;
}

// ----------------------------------------------------------------------------
// the parameter table

// Where a tensor's first values come from; see init.h for the rules.
typedef enum {
  INIT_EMBEDDING,      // N(0, 0.02)
  INIT_LINEAR,         // U(+-1/sqrt(fan_in))
  INIT_LINEAR_SCALED,  // the same / sqrt(2 L): residual outputs of MLP, attention, Mamba2
  INIT_XAVIER,         // GDN-2's linears: U(+-2^-2.5 sqrt(6 / (fan_in + fan_out)))
  INIT_CONV,           // U(+-0.5)
  INIT_CONV_BIAS,      // U(+-0.5)
  INIT_ZEROS,
  INIT_ONES,
  INIT_A_LOG_0_16,  // log U(0,16)
  INIT_A_LOG_1_16,  // log U(1,16)
  INIT_DT_BIAS,     // inverse softplus of dt, dt log-uniform in [1e-3, 1e-1], at least 1e-4
  INIT_PAD          // rows of zeros that are not parameters
} InitKind;

typedef struct {
  char name[96];     // Hugging Face's; empty for padding
  int layer;         // -1: embedding, final norm, head
  int ndim;          // 1 to 3
  int64_t shape[3];  // row-major
  int64_t count;     // elements
  int64_t offset;    // elements from the start of the arena
  int fan_in;        // of a linear: its inputs
  InitKind init;
  int decays;  // 1: a matrix, embedding or convolution: weight decay by default
} ParamSpec;

// Arena offsets of one layer's tensors (-1: the layer has none), and the columns of the packed input product.
typedef struct {
  Mixer mixer;
  int64_t attn_norm, mlp_norm;  // [d]
  int64_t in_proj;              // [in_rows, d]: all projections of the mixer's input, packed
  int in_rows;                  // rows with padding: the leading dimension of the product's output
  int in_used;                  // rows without padding
  int q, k, v, gate, a, b, w,
      f;          // first column of each part, -1: absent. mamba2: gate = z, v = x, k = B, q = C, a = dt
  int conv_cols;  // channels of the short convolution, from column conv_first on
  int conv_first;
  int64_t conv, conv_bias;         // [conv_cols, taps], [conv_cols]
  int64_t a_log, dt_bias, d_skip;  // per head or channel
  int64_t f_up, g_up, g_up_bias;   // second factors of the low-rank decay and output gate
  int64_t o_norm, o_proj;          // [dv] (mamba2: [di]), [d, value width]
  int64_t gate_up, down;           // MLP: [2 ff, d] gate then up; [d, ff]
} LayerLayout;

typedef struct {
  ParamSpec *specs;
  int n;
  int64_t total;                        // elements of the arena, padding included: a multiple of 8
  int64_t params;                       // parameters, padding not counted
  int vocab_rows;                       // rows of embedding and head with padding
  int64_t embedding, final_norm, head;  // arena offsets; head == embedding when tied
  LayerLayout *layers;
  int n_layers;
} ParamTable;

static inline ParamSpec *param_add_spec(ParamTable *t, int layer, const char *name, InitKind init, int decays,
                                        int64_t d0, int64_t d1, int64_t d2) {
  t->specs = (ParamSpec *)realloc(t->specs, (size_t)(t->n + 1) * sizeof(ParamSpec));
  if (!t->specs) fail(EXIT_MEMORY, "parameter table: out of memory");
  ParamSpec *s = &t->specs[t->n++];
  memset(s, 0, sizeof *s);
  if (layer >= 0)
    snprintf(s->name, sizeof s->name, "model.layers.%d.%s", layer, name);
  else
    snprintf(s->name, sizeof s->name, "%s", name);
  if (init == INIT_PAD) s->name[0] = 0;
  s->layer = layer, s->init = init, s->decays = decays;
  s->shape[0] = d0, s->shape[1] = d1, s->shape[2] = d2;
  s->ndim = d2 ? 3 : d1 ? 2 : 1;
  s->count = d0 * (d1 ? d1 : 1) * (d2 ? d2 : 1);
  s->fan_in = d2 ? (int)d2 : d1 ? (int)d1 : 1;
  s->offset = t->total;
  t->total += s->count;
  if (init != INIT_PAD) t->params += s->count;
  return s;
}

static inline void param_align(ParamTable *t) {  // the next tensor starts at a multiple of 8 elements
  if (t->total % 8) param_add_spec(t, -1, "", INIT_PAD, 0, 8 - t->total % 8, 0, 0);
}

static inline int64_t param_add(ParamTable *t, int layer, const char *name, InitKind init, int decays, int64_t d0,
                                int64_t d1, int64_t d2) {
  param_align(t);
  return param_add_spec(t, layer, name, init, decays, d0, d1, d2)->offset;
}

// Adds one projection of the packed input product; returns its first column.
static inline int param_add_packed(ParamTable *t, LayerLayout *l, int layer, const char *name, InitKind init, int rows,
                                   int width) {
  if (l->in_proj < 0) {
    param_align(t);
    l->in_proj = t->total;
  }
  int col = l->in_rows;
  param_add_spec(t, layer, name, init, 1, rows, width, 0);
  l->in_rows += rows;
  return col;
}

static inline void param_close_packed(ParamTable *t, LayerLayout *l, int layer, int width) {
  int pad = (8 - l->in_rows % 8) % 8;
  l->in_used = l->in_rows;
  if (pad) param_add_spec(t, layer, "", INIT_PAD, 0, pad, width, 0);
  l->in_rows += pad;
}

static inline void param_add_delta(ParamTable *t, LayerLayout *l, const Config *c, int i) {
  Mixer m = l->mixer;
  int d = c->width, key = c->heads * c->head_k, val = c->v_heads * c->head_v;
  int channel = mixer_channel_decay(m), decay = config_has_decay(c, m),
      gated = config_output_gate(c, m) != OUTPUT_GATE_NONE;
  InitKind lin = m == MIX_GDN2 ? INIT_XAVIER : INIT_LINEAR;
  l->q = param_add_packed(t, l, i, "attn.q_proj.weight", lin, key, d);
  l->k = param_add_packed(t, l, i, "attn.k_proj.weight", lin, key, d);
  l->v = param_add_packed(t, l, i, "attn.v_proj.weight", lin, val, d);
  if (!channel) {
    if (gated) l->gate = param_add_packed(t, l, i, "attn.g_proj.weight", lin, val, d);
    if (decay) l->a = param_add_packed(t, l, i, "attn.a_proj.weight", lin, c->v_heads, d);
    l->b = param_add_packed(t, l, i, "attn.b_proj.weight", lin, c->v_heads, d);
  } else {
    if (m == MIX_GDN2) l->b = param_add_packed(t, l, i, "attn.b_proj.weight", lin, key, d);
    if (m == MIX_GDN2) l->w = param_add_packed(t, l, i, "attn.w_proj.weight", lin, val, d);
    if (decay) l->f = param_add_packed(t, l, i, "attn.f_proj.0.weight", lin, c->head_v, d);
    if (gated) l->gate = param_add_packed(t, l, i, "attn.g_proj.0.weight", lin, c->head_v, d);
    // the narrow one last: the parts before it then start at multiples of 8 columns
    if (m == MIX_KDA) l->b = param_add_packed(t, l, i, "attn.b_proj.weight", lin, c->v_heads, d);
  }
  param_close_packed(t, l, i, d);
  l->conv_first = 0;
  if (c->conv_size) {
    l->conv_cols = 2 * key + val;
    l->conv = param_add(t, i, "attn.q_conv1d.weight", INIT_CONV, 1, key, 1, c->conv_size);
    param_add_spec(t, i, "attn.k_conv1d.weight", INIT_CONV, 1, key, 1, c->conv_size);
    param_add_spec(t, i, "attn.v_conv1d.weight", INIT_CONV, 1, val, 1, c->conv_size);
  }
  if (decay) {
    int a_heads = m == MIX_GDN2 ? c->heads : c->v_heads;
    if (channel) l->f_up = param_add(t, i, "attn.f_proj.1.weight", lin, 1, (int64_t)a_heads * c->head_k, c->head_v, 0);
    l->a_log = param_add(t, i, "attn.A_log", channel ? INIT_A_LOG_1_16 : INIT_A_LOG_0_16, 0, a_heads, 0, 0);
    l->dt_bias = param_add(t, i, "attn.dt_bias", INIT_DT_BIAS, 0, (int64_t)a_heads * (channel ? c->head_k : 1), 0, 0);
  }
  if (channel && gated) {
    l->g_up = param_add(t, i, "attn.g_proj.1.weight", lin, 1, val, c->head_v, 0);
    l->g_up_bias = param_add(t, i, "attn.g_proj.1.bias", INIT_ZEROS, 0, val, 0, 0);
  }
  if (c->output_norm) l->o_norm = param_add(t, i, "attn.o_norm.weight", INIT_ONES, 0, c->head_v, 0, 0);
  l->o_proj = param_add(t, i, "attn.o_proj.weight", lin, 1, d, val, 0);
}

static inline void param_add_mamba2(ParamTable *t, LayerLayout *l, const Config *c, int i) {
  int d = c->width, di = d * c->mamba_expand, gn = c->mamba_groups * c->mamba_state, nh = di / c->mamba_head;
  param_add_packed(t, l, i, "attn.in_proj.weight", INIT_LINEAR, 2 * di + 2 * gn + nh, d);
  l->gate = 0, l->v = di, l->k = 2 * di, l->q = 2 * di + gn, l->a = 2 * di + 2 * gn;  // z x B C dt
  param_close_packed(t, l, i, d);
  l->conv_first = di;
  if (c->conv_size) {
    l->conv_cols = di + 2 * gn;
    l->conv = param_add(t, i, "attn.conv1d.weight", INIT_CONV, 1, l->conv_cols, 1, c->conv_size);
    l->conv_bias = param_add(t, i, "attn.conv1d.bias", INIT_CONV_BIAS, 0, l->conv_cols, 0, 0);
  }
  l->dt_bias = param_add(t, i, "attn.dt_bias", INIT_DT_BIAS, 0, nh, 0, 0);
  l->a_log = param_add(t, i, "attn.A_log", INIT_A_LOG_1_16, 0, nh, 0, 0);
  l->d_skip = param_add(t, i, "attn.D", INIT_ONES, 0, nh, 0, 0);
  l->o_norm = param_add(t, i, "attn.norm.weight", INIT_ONES, 0, di, 0, 0);
  l->o_proj = param_add(t, i, "attn.out_proj.weight", INIT_LINEAR_SCALED, 1, d, di, 0);
}

static inline void param_add_attention(ParamTable *t, LayerLayout *l, const Config *c, int i) {
  int d = c->width, n = c->attn_heads * c->attn_head_dim, kv = c->attn_kv_heads * c->attn_head_dim;
  l->q = param_add_packed(t, l, i, "attn.q_proj.weight", INIT_LINEAR, n, d);
  l->k = param_add_packed(t, l, i, "attn.k_proj.weight", INIT_LINEAR, kv, d);
  l->v = param_add_packed(t, l, i, "attn.v_proj.weight", INIT_LINEAR, kv, d);
  param_close_packed(t, l, i, d);
  l->o_proj = param_add(t, i, "attn.o_proj.weight", INIT_LINEAR_SCALED, 1, d, n, 0);
}

// Expands a Config that config_check accepts. Free with param_table_free.
static inline ParamTable param_table_build(const Config *c) {
  ParamTable t;
  memset(&t, 0, sizeof t);
  int d = c->width;
  t.n_layers = c->layers;
  t.layers = (LayerLayout *)alloc_zeroed(c->layers, sizeof(LayerLayout), "parameter table");
  t.vocab_rows = (c->vocab + 7) / 8 * 8;
  t.embedding = param_add(&t, -1, "model.embeddings.weight", INIT_EMBEDDING, 1, c->vocab, d, 0);
  if (t.vocab_rows > c->vocab) param_add_spec(&t, -1, "", INIT_PAD, 0, t.vocab_rows - c->vocab, d, 0);
  for (int i = 0; i < c->layers; i++) {
    LayerLayout *l = &t.layers[i];
    l->mixer = config_layer_mixer(c, i);
    l->q = l->k = l->v = l->gate = l->a = l->b = l->w = l->f = -1;
    l->in_proj = l->conv = l->conv_bias = l->a_log = l->dt_bias = l->d_skip = l->f_up = l->g_up = l->g_up_bias = -1;
    l->o_norm = l->o_proj = l->gate_up = l->down = l->mlp_norm = -1;
    l->attn_norm = param_add(&t, i, "attn_norm.weight", INIT_ONES, 0, d, 0, 0);
    if (mixer_is_delta(l->mixer))
      param_add_delta(&t, l, c, i);
    else if (l->mixer == MIX_MAMBA2)
      param_add_mamba2(&t, l, c, i);
    else
      param_add_attention(&t, l, c, i);
    if (c->ff) {
      l->mlp_norm = param_add(&t, i, "mlp_norm.weight", INIT_ONES, 0, d, 0, 0);
      l->gate_up = param_add(&t, i, "mlp.gate_proj.weight", INIT_LINEAR, 1, c->ff, d, 0);
      param_add_spec(&t, i, "mlp.up_proj.weight", INIT_LINEAR, 1, c->ff, d, 0);
      l->down = param_add(&t, i, "mlp.down_proj.weight", INIT_LINEAR_SCALED, 1, d, c->ff, 0);
    }
  }
  t.final_norm = param_add(&t, -1, "model.norm.weight", INIT_ONES, 0, d, 0, 0);
  if (c->tied) {
    t.head = t.embedding;
  } else {
    t.head = param_add(&t, -1, "lm_head.weight", INIT_LINEAR, 1, c->vocab, d, 0);
    if (t.vocab_rows > c->vocab) param_add_spec(&t, -1, "", INIT_PAD, 0, t.vocab_rows - c->vocab, d, 0);
  }
  param_align(&t);
  return t;
}

static inline void param_table_free(ParamTable *t) {
  free(t->specs);
  free(t->layers);
  memset(t, 0, sizeof *t);
}

// Index of a named tensor, -1 when the model has none.
static inline int param_find(const ParamTable *t, const char *name) {
  for (int i = 0; i < t->n; i++)
    if (t->specs[i].name[0] && !strcmp(t->specs[i].name, name)) return i;
  return -1;
}

#endif  // GDN_CONFIG_H
