// train_gdn.cu: Gated DeltaNet models on an NVIDIA GPU: train_gdn.c section by section, each layer a few kernels.
//
// The model, its order and its names are those of train_gdn.c, which explains the mathematics; the kernels, one file an
// operation, lie in gdn/cuda/. Activations and matrix operands are bf16; master weights, gradients, AdamW's moments, the
// recurrent state, gates, norms and the loss are fp32. Every matrix product is cuBLASLt's. All sums have a fixed order: the
// same command gives the same bits on the same kind of GPU.
//
// Of several GPUs each holds the fp32 weights and moments of its own part of the arena, all bf16 weights and the few
// vectors that kernels read in fp32 (gdn/cuda/vectors.cuh); gradients and new weights travel beside the backward and the
// forward pass (gdn/cuda/ranks.cuh).
//
// A forward pass saves, for each layer: the residual and its norm, the packed projections, q, k, v behind the convolution,
// the mixer's output before and after norm and gate, the MLP's gate and up, and what the delta rule needs (its per-chunk
// matrices and states). SwiGLU's product is computed again in the backward pass; with --recompute norms also the outputs
// of the norms, with all everything but the residual that enters a layer, by the same kernels, hence to the same bits.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gdn/engine.h"  // EngineApi
#include "gdn/cuda/adamw.cuh"
#include "gdn/cuda/classifier.cuh"
#include "gdn/cuda/common.cuh"
#include "gdn/cuda/delta_rule.h"
#include "gdn/cuda/embedding.cuh"
#include "gdn/cuda/gated_rmsnorm.cuh"
#include "gdn/cuda/machine.h"
#include "gdn/cuda/matmul.cuh"
#include "gdn/cuda/ranks.cuh"
#include "gdn/cuda/rmsnorm.cuh"
#include "gdn/cuda/short_conv.cuh"
#include "gdn/cuda/skip.cuh"
#include "gdn/cuda/sliding_attention.h"
#include "gdn/cuda/swiglu.cuh"
#include "gdn/cuda/vectors.cuh"

enum { HEAD_ROWS = 8192 };  // tokens whose logits exist at a time

// ----------------------------------------------------------------------------
// the model

typedef struct {  // sizes of one layer's mixer
  int key, val, conv_cols, rows;
  int gates;  // columns of the low-rank decay's output (gdn2, kda)
  DeltaRuleShape delta;
  AttentionSize attention;
} MixerSizes;

typedef struct {  // what a layer's forward keeps for its backward; N tokens each
  bf16 *x, *h;         // residual in [d], its RMSNorm [d]
  float *rstd;         // [1]
  bf16 *packed;        // input product [in_rows]; attention: q and k rotated in place
  bf16 *y;             // behind convolution, SiLU and L2 norm [conv_cols]
  char *saved;         // of the delta rule
  bf16 *f, *gate;      // second factors of low-rank decay and output gate [gates], [val] (gdn2, kda)
  bf16 *o, *oy;        // mixer output before and after norm and gate [val]
  float *lse;          // attention [B,H,T]
  bf16 *x1, *h1;       // residual after the mixer, its RMSNorm [d]
  float *rstd1;
  bf16 *gu;            // MLP [2 ff]; its gradient after the backward pass
} LayerActs;

typedef struct {  // for cuda_read_behind, made by its first call
  int device;     // the engine's
  cudaStream_t stream;
  cudaEvent_t done[2];
  float *stage[2];  // page-locked, READ_BEHIND_PIECE each
} ReadBehind;

struct Engine {
  Config c;
  const ParamTable *table;
  EngineSettings set;
  cudaStream_t stream;
  Matmul *matmul;
  float *master, *grads, *m, *v;  // arenas; of master, m and v only the own shard
  bf16 *weights;                  // master in bf16, what the matrix products read
  Vectors vectors;                // master's norms, convolutions, gate parameters in fp32, what the other kernels read
  int weights_stale;              // master was written from outside
  uint32_t *decay_bits[2];        // which elements decay: by ParamSpec.decays, and all of them
  int64_t shard_first, shard_count;
  LayerActs *acts;
  bf16 *x_end, *h_end, *s;  // residual after the last layer, its norm; SwiGLU's product [ff]
  float *rstd_end, *losses;
  bf16 *logits;  // [head_rows, vocab_rows]
  int64_t head_rows;
  bf16 *dx, *dh, *dpacked, *dy, *d_o, *d_oy, *df, *dgate;
  char *delta_scratch;
  float *scratch;  // partial sums
  int32_t *ids, *targets, *sorted, *doc_start;
  float2 *rope;
  double *total;    // sums that the host reads
  char *memory;
  int64_t memory_bytes, own_bytes;
  int64_t memory_of[MEMORY_KINDS];  // parts of memory_bytes
  double hinted_scale;  // backward's scale, known before the forward: the head's backward is then done in the forward
  int head_done;        // of this forward
  int tuned;            // scratch of measuring matrix products was released
  int B, T, has_docs, has_targets;
  // several ranks
  GpuRanks ranks;
  int many;                // 1: there are several
  int batch_rows, batch_len;  // of the training batches, for which rank 0 chooses the algorithms of all
  int reducing, gathering; // under way: the gradients' sums, the weights of the others
  cudaEvent_t *bucket;     // [buckets] on its way: gradients final, or weights there
  cudaEvent_t *waited[2];  // [buckets + 1] before and after the main stream waited for a bucket, for the sums last
  int reduce_timed, gather_timed;
  // the carried sequence (ENGINE_CARRY): its tokens; a forward runs all of it again
  int32_t *history;
  int history_len, carry_new;
  int32_t *host_ids, *host_docs;
  ReadBehind behind;
};

static MixerSizes mixer_sizes(const Config *c, const LayerLayout *l, int B, int T) {
  MixerSizes m;
  memset(&m, 0, sizeof m);
  m.rows = l->in_rows, m.conv_cols = l->conv_cols;
  if (mixer_is_delta(l->mixer)) {
    m.key = c->heads * c->head_k, m.val = c->v_heads * c->head_v, m.conv_cols = 2 * m.key + m.val;
    m.delta.batch = B, m.delta.tokens = T, m.delta.key_heads = c->heads, m.delta.value_heads = c->v_heads;
    m.delta.key_dim = c->head_k, m.delta.value_dim = c->head_v;
    m.delta.gate = l->f_up >= 0 ? GATE_CHANNEL : l->a_log >= 0 ? GATE_SCALAR : GATE_NONE;
    m.delta.erase = l->mixer == MIX_GDN2 ? ERASE_CHANNEL : ERASE_SCALAR;
    m.delta.erase_mean = l->mixer == MIX_GDN2 && c->erase == PER_HEAD;
    m.delta.write_mean = l->mixer == MIX_GDN2 && c->write == PER_HEAD;
    if (l->mixer == MIX_KDA && l->f_up >= 0) m.delta.lower_bound = (float)c->kda_lower_bound;
    m.gates = l->f_up >= 0 ? (l->mixer == MIX_GDN2 ? c->heads : c->v_heads) * c->head_k : 0;
    m.delta.scale = 1 / sqrtf((float)c->head_k), m.delta.beta_scale = (float)c->beta_max;
  } else if (l->mixer == MIX_MAMBA2) {
    int di = c->width * c->mamba_expand;
    m.key = c->mamba_groups * c->mamba_state, m.val = di, m.conv_cols = di + 2 * m.key;
    m.delta.batch = B, m.delta.tokens = T, m.delta.key_heads = c->mamba_groups;
    m.delta.value_heads = di / c->mamba_head, m.delta.key_dim = c->mamba_state, m.delta.value_dim = c->mamba_head;
    m.delta.gate = GATE_SCALAR, m.delta.erase = ERASE_NONE, m.delta.scale = 1, m.delta.beta_scale = 1;
  } else {
    m.key = m.val = c->attn_heads * c->attn_head_dim;
    m.attention.B = B, m.attention.T = T, m.attention.Hq = c->attn_heads, m.attention.Hkv = c->attn_kv_heads;
    m.attention.D = c->attn_head_dim, m.attention.window = l->mixer == MIX_SWA ? c->window : 0;
    m.attention.qkv_stride = m.attention.dqkv_stride = l->in_rows, m.attention.path = ATTENTION_AUTO;
  }
  return m;
}

// The kernel has four taps; a convolution of two or three is widened at the start of the scratch memory, its gradient
// behind it. Floats of both.
static int64_t conv_wide_floats(const Config *c, int columns) {
  return c->conv_size == 2 || c->conv_size == 3 ? (int64_t)8 * columns : 0;
}

typedef struct {  // a piece of GPU memory that is being given out; base NULL: only counted
  char *base;
  int64_t used, bytes[MEMORY_KINDS];
} Room;

template <typename Type>
static Type *take(Room *room, MemoryKind kind, int64_t n) {  // the next n elements
  Type *p = room->base ? (Type *)(room->base + room->used) : NULL;
  int64_t bytes = (n * (int64_t)sizeof(Type) + 255) / 256 * 256;
  room->used += bytes, room->bytes[kind] += bytes;
  return p;
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t longest_row(const Engine *e) { return larger(e->set.max_len, e->set.max_state); }  // also carried

// The buffers of layer i: from `own` what it keeps until its backward pass, from `shared` what every layer overwrites.
static void layer_bind(Engine *e, int i, Room *own, Room *shared) {
  const Config *c = &e->c;
  const LayerLayout *l = &e->table->layers[i];
  int B = e->set.max_rows, T = e->set.max_len, level = e->set.train ? e->set.recompute : RECOMPUTE_ALL;
  int64_t N = (int64_t)B * T, d = c->width, ff = c->ff;
  MixerSizes m = mixer_sizes(c, l, B, T);
  LayerActs *a = &e->acts[i];
  Room *input = e->set.train ? own : shared, *norms = level == RECOMPUTE_NONE ? own : shared,
       *rest = level == RECOMPUTE_ALL ? shared : own;
  memset(a, 0, sizeof *a);
  a->x = take<bf16>(input, MEMORY_RESIDUAL, N * d), a->h = take<bf16>(norms, MEMORY_RESIDUAL, N * d);
  a->rstd = take<float>(rest, MEMORY_RESIDUAL, N);
  a->packed = take<bf16>(rest, MEMORY_PROJECTIONS, N * m.rows), a->o = take<bf16>(rest, MEMORY_MIXER, N * m.val);
  if (mixer_is_attention(l->mixer)) {
    a->lse = take<float>(rest, MEMORY_MIXER, N * c->attn_heads), a->oy = a->o;
  } else {
    a->y = take<bf16>(rest, MEMORY_PROJECTIONS, N * m.conv_cols), a->oy = take<bf16>(norms, MEMORY_MIXER, N * m.val);
    a->saved = take<char>(rest, MEMORY_MIXER, (int64_t)delta_rule_saved_bytes(&m.delta));
    if (l->f_up >= 0) a->f = take<bf16>(rest, MEMORY_PROJECTIONS, N * m.gates);
    if (l->g_up >= 0) a->gate = take<bf16>(rest, MEMORY_PROJECTIONS, N * m.val);
  }
  a->x1 = take<bf16>(rest, MEMORY_RESIDUAL, N * d);
  if (ff) {
    a->h1 = take<bf16>(norms, MEMORY_RESIDUAL, N * d), a->rstd1 = take<float>(rest, MEMORY_RESIDUAL, N);
    a->gu = take<bf16>(rest, MEMORY_MLP, N * 2 * ff);
  }
}

// Everything of fixed size for the largest micro-batch: counted with base NULL, then bound. First what the layers
// share, then what each keeps, then the rest.
static int64_t engine_bind(Engine *e, char *base) {
  const Config *c = &e->c;
  int B = e->set.max_rows, T = e->set.max_len, train = e->set.train;
  int64_t N = (int64_t)B * T, d = c->width, ff = c->ff, packed = 0, conv = 0, val = 0, delta = 0, gates = 0, wide = 0;
  int64_t partial = larger(rmsnorm_backward_scratch(N, c->width), embedding_backward_scratch(N, c->width));
  int head_dim = 0;
  Room room;
  memset(&room, 0, sizeof room);
  for (int i = 0; i < c->layers; i++) {
    Room own, shared;
    memset(&own, 0, sizeof own), memset(&shared, 0, sizeof shared);
    layer_bind(e, i, &own, &shared);
    room.used = larger(room.used, shared.used);
  }
  room.base = base, room.bytes[MEMORY_SHARED] = room.used;
  for (int i = 0; i < c->layers; i++) {
    const LayerLayout *l = &e->table->layers[i];
    MixerSizes m = mixer_sizes(c, l, B, T);
    Room shared;
    memset(&shared, 0, sizeof shared), shared.base = base;
    layer_bind(e, i, &room, &shared);
    packed = larger(packed, m.rows), conv = larger(conv, m.conv_cols), val = larger(val, m.val);
    if (mixer_is_attention(l->mixer)) {
      head_dim = c->attn_head_dim;
      partial = larger(partial, sliding_attention_scratch_floats(&m.attention));
      continue;
    }
    gates = larger(gates, m.gates), wide = larger(wide, l->g_up >= 0 ? m.val : 0);
    delta = larger(delta, (int64_t)delta_rule_scratch_bytes(&m.delta));
    partial = larger(partial, conv_wide_floats(c, m.conv_cols) + short_conv_backward_scratch(B, T, m.conv_cols));
    if (l->mixer == MIX_MAMBA2)
      partial = larger(partial, larger(rmsnorm_gate_first_backward_scratch(N, m.val), skip_backward_scratch(N, m.val)));
    else
      partial = larger(partial, gated_rmsnorm_backward_scratch(N, c->v_heads, c->head_v));
  }
  const MemoryKind work = MEMORY_WORKSPACE;
  e->x_end = take<bf16>(&room, work, N * d), e->h_end = take<bf16>(&room, work, N * d);
  e->rstd_end = take<float>(&room, work, N), e->losses = take<float>(&room, work, N);
  e->s = take<bf16>(&room, work, N * ff);
  e->head_rows = N < HEAD_ROWS ? N : (int64_t)HEAD_ROWS;
  e->logits = take<bf16>(&room, MEMORY_LOGITS, e->head_rows * e->table->vocab_rows);
  e->ids = take<int32_t>(&room, work, N), e->targets = take<int32_t>(&room, work, N);
  e->doc_start = take<int32_t>(&room, work, N);
  e->rope = take<float2>(&room, work, longest_row(e) * (head_dim / 2));
  e->total = take<double>(&room, work, 4);
  e->scratch = take<float>(&room, work, larger(partial, gradient_sum_squares_scratch()));
  if (train) {
    e->sorted = take<int32_t>(&room, work, embedding_sort_scratch(N, c->vocab));
    e->dx = take<bf16>(&room, work, N * d), e->dh = take<bf16>(&room, work, N * d);
    e->dpacked = take<bf16>(&room, work, N * packed), e->dy = take<bf16>(&room, work, N * conv);
    e->d_o = take<bf16>(&room, work, N * val), e->d_oy = take<bf16>(&room, work, N * val);
    e->delta_scratch = take<char>(&room, work, delta);
    e->df = take<bf16>(&room, work, N * gates), e->dgate = take<bf16>(&room, work, N * wide);
  }
  memcpy(e->memory_of, room.bytes, sizeof e->memory_of);
  return room.used;
}

static const float *param(const Engine *e, int64_t offset) { return offset < 0 ? NULL : vectors_at(&e->vectors, offset); }
static const bf16 *weight(const Engine *e, int64_t offset) { return e->weights + offset; }
static float *grad(const Engine *e, int64_t offset) { return offset < 0 ? NULL : e->grads + offset; }
static const int32_t *documents(const Engine *e) { return e->has_docs ? e->doc_start : NULL; }

static GateActivation activation_of(const Config *c, Mixer m) {
  OutputGate g = config_output_gate(c, m);
  return g == OUTPUT_GATE_NONE ? ACT_NONE : g == OUTPUT_GATE_SILU ? ACT_SILU : ACT_SIGMOID;
}

static DeltaRuleInputs delta_inputs(const Engine *e, const LayerLayout *l, const LayerActs *a, const MixerSizes *m) {
  DeltaRuleInputs in;
  memset(&in, 0, sizeof in);
  int64_t ld = m->conv_cols;
  if (l->mixer == MIX_MAMBA2) {  // y = x | B | C
    in.v = {a->y, ld}, in.k = {a->y + m->val, ld}, in.q = {a->y + m->val + m->key, ld};
  } else {
    in.q = {a->y, ld}, in.k = {a->y + m->key, ld}, in.v = {a->y + 2 * m->key, ld};
    in.beta = {a->packed + l->b, m->rows};
  }
  if (l->a >= 0) in.a = {a->packed + l->a, m->rows};
  if (l->f_up >= 0) in.a = {a->f, m->gates};
  if (l->w >= 0) in.w = {a->packed + l->w, m->rows};
  in.A_log = param(e, l->a_log), in.dt_bias = param(e, l->dt_bias), in.doc_start = documents(e);
  return in;
}

static void delta_call(int code, const Error *err) {
  if (code) fail_error(err);
}

// The layer's taps as the kernels want them.
static const float *conv_taps(Engine *e, const LayerLayout *l, const MixerSizes *m) {
  if (l->conv < 0 || !conv_wide_floats(&e->c, m->conv_cols)) return param(e, l->conv);
  short_conv_widen(e->scratch, param(e, l->conv), e->c.conv_size, m->conv_cols, e->stream);
  return e->scratch;
}

static void mixer_output_forward(Engine *e, const LayerLayout *l, LayerActs *a, const MixerSizes *m) {  // oy from o
  const Config *c = &e->c;
  int64_t N = (int64_t)e->B * e->T;
  if (l->mixer == MIX_MAMBA2) {
    int cols = m->val / c->mamba_groups;  // a norm of its own for each group
    for (int j = 0; j < m->val; j += cols)
      rmsnorm_gate_first_forward(a->oy + j, m->val, a->o + j, m->val, a->packed + l->gate + j, m->rows,
                                 param(e, l->o_norm) + j, (float)c->norm_eps, N, cols, e->stream);
  } else {
    gated_rmsnorm_forward(a->oy, m->val, a->o, m->val, a->gate ? a->gate : l->gate >= 0 ? a->packed + l->gate : NULL,
                          a->gate ? m->val : m->rows, param(e, l->o_norm), param(e, l->g_up_bias),
                          activation_of(c, l->mixer), (float)c->norm_eps, N, c->v_heads, c->head_v, e->stream);
  }
}

static void recurrent_mixer_forward(Engine *e, const LayerLayout *l, LayerActs *a, const MixerSizes *m) {
  const Config *c = &e->c;
  int64_t N = (int64_t)e->B * e->T;
  int mamba = l->mixer == MIX_MAMBA2;
  short_conv_forward(a->y, m->conv_cols, a->packed + l->conv_first, m->rows, conv_taps(e, l, m), param(e, l->conv_bias),
                     documents(e), e->B, e->T, m->conv_cols, mamba ? 0 : 2 * m->key, m->delta.key_dim, e->stream,
                     !mamba && c->qk_norm == NORM_L1);
  int dv = c->head_v;
  if (l->f_up >= 0)
    matmul_forward(e->matmul, a->f, m->gates, a->packed + l->f, m->rows, weight(e, l->f_up), dv, NULL, 0, N, dv, m->gates,
                   e->stream);
  if (l->g_up >= 0)
    matmul_forward(e->matmul, a->gate, m->val, a->packed + l->gate, m->rows, weight(e, l->g_up), dv, NULL, 0, N, dv, m->val,
                   e->stream);
  DeltaRuleInputs in = delta_inputs(e, l, a, m);
  Error err;
  delta_call(delta_rule_forward({a->o, m->val}, a->saved, &in, &m->delta, e->stream, &err), &err);
  if (mamba)
    skip_forward(a->o, m->val, a->y, m->conv_cols, param(e, l->d_skip), N, m->delta.value_heads, m->delta.value_dim,
                 e->stream);
  mixer_output_forward(e, l, a, m);
}

static void recurrent_mixer_backward(Engine *e, const LayerLayout *l, const LayerActs *a, const MixerSizes *m) {
  const Config *c = &e->c;
  int64_t N = (int64_t)e->B * e->T;
  int mamba = l->mixer == MIX_MAMBA2;
  int cols = mamba ? m->val / c->mamba_groups : 0;
  for (int j = 0; mamba && j < m->val; j += cols)
    rmsnorm_gate_first_backward(e->d_o + j, m->val, e->dpacked + l->gate + j, m->rows, grad(e, l->o_norm) + j, e->scratch,
                                e->d_oy + j, m->val, a->o + j, m->val, a->packed + l->gate + j, m->rows,
                                param(e, l->o_norm) + j, (float)c->norm_eps, N, cols, e->stream);
  if (!mamba)
    gated_rmsnorm_backward(e->d_o, m->val, a->gate ? e->dgate : l->gate >= 0 ? e->dpacked + l->gate : NULL,
                           a->gate ? m->val : m->rows, grad(e, l->o_norm), grad(e, l->g_up_bias), e->scratch, e->d_oy,
                           m->val, a->o, m->val, a->gate ? a->gate : l->gate >= 0 ? a->packed + l->gate : NULL,
                           a->gate ? m->val : m->rows, param(e, l->o_norm), param(e, l->g_up_bias), activation_of(c, l->mixer), (float)c->norm_eps, N, c->v_heads,
                           c->head_v, e->stream);
  int dv = c->head_v;
  if (l->g_up >= 0) {
    matmul_wgrad(e->matmul, grad(e, l->g_up), dv, e->dgate, m->val, a->packed + l->gate, m->rows, N, dv, m->val, 1, e->stream);
    matmul_dgrad(e->matmul, e->dpacked + l->gate, m->rows, e->dgate, m->val, weight(e, l->g_up), dv, N, dv, m->val, 0,
                 e->stream);
  }
  DeltaRuleInputs in = delta_inputs(e, l, a, m);
  DeltaRuleGradients g;
  memset(&g, 0, sizeof g);
  int64_t ld = m->conv_cols;
  if (mamba) {
    g.dv = {e->dy, ld}, g.dk = {e->dy + m->val, ld}, g.dq = {e->dy + m->val + m->key, ld};
  } else {
    g.dq = {e->dy, ld}, g.dk = {e->dy + m->key, ld}, g.dv = {e->dy + 2 * m->key, ld};
    g.dbeta = {e->dpacked + l->b, m->rows};
  }
  if (l->a >= 0) g.da = {e->dpacked + l->a, m->rows};
  if (l->f_up >= 0) g.da = {e->df, m->gates};
  if (l->w >= 0) g.dw = {e->dpacked + l->w, m->rows};
  g.dA_log = grad(e, l->a_log), g.ddt_bias = grad(e, l->dt_bias);
  Error err;
  delta_call(delta_rule_backward(&g, e->delta_scratch, {e->d_o, m->val}, a->saved, &in, &m->delta, e->stream, &err), &err);
  if (l->f_up >= 0) {
    matmul_wgrad(e->matmul, grad(e, l->f_up), dv, e->df, m->gates, a->packed + l->f, m->rows, N, dv, m->gates, 1, e->stream);
    matmul_dgrad(e->matmul, e->dpacked + l->f, m->rows, e->df, m->gates, weight(e, l->f_up), dv, N, dv, m->gates, 0,
                 e->stream);
  }
  if (mamba)
    skip_backward(e->dy, m->conv_cols, grad(e, l->d_skip), e->scratch, e->d_o, m->val, a->y, m->conv_cols,
                  param(e, l->d_skip), N, m->delta.value_heads, m->delta.value_dim, e->stream);
  const float *taps = conv_taps(e, l, m);
  float *dtaps = grad(e, l->conv);
  if (taps == e->scratch) {
    dtaps = e->scratch + 4 * m->conv_cols;
    CUDA_CHECK(cudaMemsetAsync(dtaps, 0, (size_t)(4 * m->conv_cols) * sizeof(float), e->stream));
  }
  short_conv_backward(e->dpacked + l->conv_first, m->rows, dtaps, grad(e, l->conv_bias),
                      e->scratch + conv_wide_floats(c, m->conv_cols), e->dy, m->conv_cols, a->packed + l->conv_first,
                      m->rows, taps, param(e, l->conv_bias), documents(e), e->B, e->T, m->conv_cols,
                      mamba ? 0 : 2 * m->key, m->delta.key_dim, e->stream, !mamba && c->qk_norm == NORM_L1);
  if (taps == e->scratch) short_conv_narrow(grad(e, l->conv), dtaps, c->conv_size, m->conv_cols, e->stream);
}

static void attention_mixer_forward(Engine *e, const LayerLayout *l, LayerActs *a, const MixerSizes *m) {
  rope_forward(a->packed + l->q, a->packed + l->k, e->rope, &m->attention, e->stream);
  sliding_attention_forward(a->o, a->lse, e->scratch, a->packed + l->q, a->packed + l->k, a->packed + l->v, documents(e),
                            &m->attention, e->stream);
}

static void attention_mixer_backward(Engine *e, const LayerLayout *l, const LayerActs *a, const MixerSizes *m) {
  sliding_attention_backward(e->dpacked + l->q, e->dpacked + l->k, e->dpacked + l->v, e->scratch, e->d_oy, a->o, a->lse,
                             a->packed + l->q, a->packed + l->k, a->packed + l->v, e->rope, documents(e), &m->attention,
                             e->stream);
}

// x_out = x + mixer(RMSNorm(x));  x_out += MLP(RMSNorm(x_out)). x_out NULL: only what the layer's backward pass reads.
static void layer_forward(Engine *e, int i, bf16 *x_out) {
  const Config *c = &e->c;
  const LayerLayout *l = &e->table->layers[i];
  LayerActs *a = &e->acts[i];
  int d = c->width, ff = c->ff;
  int64_t N = (int64_t)e->B * e->T;
  MixerSizes m = mixer_sizes(c, l, e->B, e->T);
  rmsnorm_forward(a->h, a->rstd, a->x, param(e, l->attn_norm), (float)c->norm_eps, N, d, e->stream);
  matmul_forward(e->matmul, a->packed, m.rows, a->h, d, weight(e, l->in_proj), d, NULL, 0, N, d, m.rows, e->stream);
  if (mixer_is_attention(l->mixer))
    attention_mixer_forward(e, l, a, &m);
  else
    recurrent_mixer_forward(e, l, a, &m);
  bf16 *x1 = ff ? a->x1 : x_out;
  if (!x1) return;
  matmul_forward(e->matmul, x1, d, a->oy, m.val, weight(e, l->o_proj), m.val, a->x, d, N, m.val, d, e->stream);
  if (!ff) return;
  rmsnorm_forward(a->h1, a->rstd1, a->x1, param(e, l->mlp_norm), (float)c->norm_eps, N, d, e->stream);
  matmul_forward(e->matmul, a->gu, 2 * ff, a->h1, d, weight(e, l->gate_up), d, NULL, 0, N, d, 2 * ff, e->stream);
  if (!x_out) return;
  swiglu_forward(e->s, a->gu, N, ff, 2 * ff, e->stream);
  matmul_forward(e->matmul, x_out, d, e->s, ff, weight(e, l->down), ff, a->x1, d, N, ff, d, e->stream);
}

// e->dx: gradient of the layer's output on entry, of its input on return
static void layer_backward(Engine *e, int i) {
  const Config *c = &e->c;
  const LayerLayout *l = &e->table->layers[i];
  LayerActs *a = &e->acts[i];
  int d = c->width, ff = c->ff;
  int64_t N = (int64_t)e->B * e->T;
  MixerSizes m = mixer_sizes(c, l, e->B, e->T);
  int norms = e->set.recompute == RECOMPUTE_NORMS;
  // the last layer's activations still lie in the buffers that the layers share
  if (e->set.recompute == RECOMPUTE_ALL && i + 1 < c->layers) layer_forward(e, i, NULL);
  if (ff) {
    if (norms) rmsnorm_forward(a->h1, a->rstd1, a->x1, param(e, l->mlp_norm), (float)c->norm_eps, N, d, e->stream);
    matmul_dgrad(e->matmul, e->s, ff, e->dx, d, weight(e, l->down), ff, N, ff, d, 0, e->stream);
    swiglu_backward(a->gu, e->s, e->s, N, ff, 2 * ff, e->stream);  // gu: its gradient, s: the product again
    matmul_wgrad(e->matmul, grad(e, l->down), ff, e->dx, d, e->s, ff, N, ff, d, 1, e->stream);
    matmul_wgrad(e->matmul, grad(e, l->gate_up), d, a->gu, 2 * ff, a->h1, d, N, d, 2 * ff, 1, e->stream);
    matmul_dgrad(e->matmul, e->dh, d, a->gu, 2 * ff, weight(e, l->gate_up), d, N, d, 2 * ff, 0, e->stream);
    rmsnorm_backward(e->dx, grad(e, l->mlp_norm), e->scratch, e->dh, a->x1, param(e, l->mlp_norm), a->rstd1, N, d, 1,
                     e->stream);
  }
  if (norms && !mixer_is_attention(l->mixer)) mixer_output_forward(e, l, a, &m);
  matmul_wgrad(e->matmul, grad(e, l->o_proj), m.val, e->dx, d, a->oy, m.val, N, m.val, d, 1, e->stream);
  matmul_dgrad(e->matmul, e->d_oy, m.val, e->dx, d, weight(e, l->o_proj), m.val, N, m.val, d, 0, e->stream);
  int used = l->in_used;
  if (used < m.rows)  // padding columns have no gradient
    CUDA_CHECK(cudaMemset2DAsync(e->dpacked + used, (size_t)m.rows * sizeof(bf16), 0, (size_t)(m.rows - used) * sizeof(bf16),
                                 (size_t)N, e->stream));
  if (mixer_is_attention(l->mixer))
    attention_mixer_backward(e, l, a, &m);
  else
    recurrent_mixer_backward(e, l, a, &m);
  if (norms) rmsnorm_forward(a->h, a->rstd, a->x, param(e, l->attn_norm), (float)c->norm_eps, N, d, e->stream);
  matmul_wgrad(e->matmul, grad(e, l->in_proj), d, e->dpacked, m.rows, a->h, d, N, d, m.rows, 1, e->stream);
  matmul_dgrad(e->matmul, e->dh, d, e->dpacked, m.rows, weight(e, l->in_proj), d, N, d, m.rows, 0, e->stream);
  rmsnorm_backward(e->dx, grad(e, l->attn_norm), e->scratch, e->dh, a->x, param(e, l->attn_norm), a->rstd, N, d, 1,
                   e->stream);
}

// ----------------------------------------------------------------------------
// several ranks: gradients and weights travel bucket by bucket (gdn/cuda/ranks.cuh) beside the backward and forward pass

// Buckets in the arena's order: embedding, each layer, final norm and head.
static int bucket_count(const Engine *e) { return e->c.layers + 2; }
static int64_t bucket_first(const Engine *e, int b) {
  const ParamTable *t = e->table;
  return b == 0 ? 0 : b <= e->c.layers ? t->layers[b - 1].attn_norm : b == e->c.layers + 1 ? t->final_norm : t->total;
}

// Of two ranks one owns the lower buckets and one the upper: what goes to or from one owner uses one direction of the
// link. So a lower bucket travels together with the one that lies this many above it. 0: each alone (of more ranks all
// pass every bucket on).
static int bucket_distance(const Engine *e) { return e->ranks.ranks->size == 2 ? bucket_count(e) / 2 : 0; }
static int bucket_leads(const Engine *e, int b) { return b < bucket_count(e) - bucket_distance(e); }
static int bucket_partner(const Engine *e, int b) {  // that travels with leading bucket b, -1: none
  int u = b + bucket_distance(e);
  return u > b && !bucket_leads(e, u) ? u : -1;
}
static int64_t bucket_elements(const Engine *e, int b) { return bucket_first(e, b + 1) - bucket_first(e, b); }

// The gradients of bucket b are final: adds them up over the ranks.
static void reduce_bucket(Engine *e, int b) {
  if (!e->reducing || !bucket_leads(e, b)) return;
  int u = bucket_partner(e, b);
  CUDA_CHECK(cudaEventRecord(e->bucket[b], e->stream));
  CUDA_CHECK(cudaStreamWaitEvent(e->ranks.stream, e->bucket[b], 0));
  gpu_ranks_group(1);
  gpu_ranks_reduce(&e->ranks, e->grads, bucket_first(e, b), bucket_elements(e, b));
  if (u >= 0) gpu_ranks_reduce(&e->ranks, e->grads, bucket_first(e, u), bucket_elements(e, u));
  gpu_ranks_group(0);
}

// The main stream waits for what the exchange has done up to event `done`, and notes for how long.
static void wait_timed(Engine *e, int slot, cudaEvent_t done) {
  CUDA_CHECK(cudaEventRecord(e->waited[0][slot], e->stream));
  CUDA_CHECK(cudaStreamWaitEvent(e->stream, done, 0));
  CUDA_CHECK(cudaEventRecord(e->waited[1][slot], e->stream));
}

// The weights of bucket b are about to be read.
static void wait_for_weights(Engine *e, int b) {
  if (!e->gathering) return;
  wait_timed(e, b, e->bucket[b]);
  if (b == bucket_count(e) - 1) e->gathering = 0, e->gather_timed = 1;
}

static void cuda_reduce_begin(Engine *e) { e->reducing = e->many; }

static void cuda_reduce_end(Engine *e) {
  if (!e->many) return;
  if (e->reducing != 2) {  // no backward came: the others' sums need this rank's part all the same
    e->reducing = 1;
    for (int b = bucket_count(e) - 1; b >= 0; b--) reduce_bucket(e, b);
  }
  int last = bucket_count(e);
  CUDA_CHECK(cudaEventRecord(e->bucket[last], e->ranks.stream));
  wait_timed(e, last, e->bucket[last]);
  e->reducing = 0, e->reduce_timed = 1;
}

// Own master to what the kernels read.
static void refresh_weights(Engine *e) {
  if (!e->weights_stale) return;
  weights_to_bf16(e->weights + e->shard_first, e->master, e->shard_count, e->stream);
  vectors_fill(&e->vectors, e->master, e->shard_first, e->shard_count, e->stream);
  e->weights_stale = 0;
}

static void cuda_gather(Engine *e) {
  if (!e->many) return;
  refresh_weights(e);
  int last = bucket_count(e);
  CUDA_CHECK(cudaEventRecord(e->bucket[last], e->stream));
  CUDA_CHECK(cudaStreamWaitEvent(e->ranks.stream, e->bucket[last], 0));
  gpu_ranks_group(1);
  for (int r = 0; r < e->ranks.ranks->size; r++) {
    int64_t at, n = gpu_ranks_part(&e->ranks, r, 0, e->table->total, &at);
    int64_t begin = vectors_before(&e->vectors, at), end = vectors_before(&e->vectors, at + n);
    gpu_ranks_broadcast(&e->ranks, e->vectors.data + begin, (end - begin) * (int64_t)sizeof(float), r);
  }
  gpu_ranks_group(0);
  for (int b = 0; bucket_leads(e, b); b++) {
    int u = bucket_partner(e, b);
    gpu_ranks_group(1);
    gpu_ranks_share(&e->ranks, e->weights, bucket_first(e, b), bucket_elements(e, b));
    if (u >= 0) gpu_ranks_share(&e->ranks, e->weights, bucket_first(e, u), bucket_elements(e, u));
    gpu_ranks_group(0);
    CUDA_CHECK(cudaEventRecord(e->bucket[b], e->ranks.stream));
    if (u >= 0) CUDA_CHECK(cudaEventRecord(e->bucket[u], e->ranks.stream));
  }
  e->gathering = 1;
}

static void cuda_traffic(Engine *e, EngineTraffic *t) {
  memset(t, 0, sizeof *t);
  if (!e->many) return;
  CUDA_CHECK(cudaStreamSynchronize(e->stream));
  int last = bucket_count(e);
  float ms;
  for (int b = 0; b < last && e->gather_timed; b++) {
    CUDA_CHECK(cudaEventElapsedTime(&ms, e->waited[0][b], e->waited[1][b]));
    t->gather_ms += ms;
  }
  if (e->reduce_timed) {
    CUDA_CHECK(cudaEventElapsedTime(&ms, e->waited[0][last], e->waited[1][last]));
    t->reduce_ms = ms;
  }
  e->reduce_timed = e->gather_timed = 0;
  t->bytes = e->ranks.bytes, e->ranks.bytes = 0;
}

// ----------------------------------------------------------------------------
// the whole model

// First position, in its row, of each token's document.
static void document_starts(Engine *e, const int32_t *tokens) {
  e->has_docs = e->c.boundary_reset;
  if (!e->has_docs) return;
  for (int b = 0; b < e->B; b++)
    for (int t = 0, start = 0; t < e->T; t++) {
      int64_t n = (int64_t)b * e->T + t;
      if (tokens[n] == e->c.bos) start = t;
      e->host_docs[n] = start;
    }
  CUDA_CHECK(cudaMemcpyAsync(e->doc_start, e->host_docs, (size_t)e->B * e->T * sizeof(int32_t), cudaMemcpyHostToDevice,
                             e->stream));
}

// Logits of tokens [first, first+rows) into e->logits.
static void head_forward(Engine *e, int64_t first, int64_t rows) {
  int d = e->c.width, V = e->table->vocab_rows;
  matmul_forward(e->matmul, e->logits, V, e->h_end + first * d, d, weight(e, e->table->head), d, NULL, 0, rows, d, V,
                 e->stream);
}

// Loss of all tokens, by chunks; with gradients also dlogits' way into the head's weights and into e->dh.
static void head_pass(Engine *e, double scale, int gradients) {
  int d = e->c.width, V = e->table->vocab_rows;
  int64_t N = (int64_t)e->B * e->T;
  for (int64_t t = 0; t < N; t += e->head_rows) {
    int64_t rows = N - t < e->head_rows ? N - t : e->head_rows;
    head_forward(e, t, rows);
    if (!gradients) {
      classifier_loss(e->losses + t, e->logits, e->targets + t, rows, e->c.vocab, V, e->stream);
      continue;
    }
    classifier_backward(e->logits, e->losses + t, e->targets + t, (float)scale, rows, e->c.vocab, V, e->stream);
    matmul_wgrad(e->matmul, grad(e, e->table->head), d, e->logits, V, e->h_end + t * d, d, rows, d, V, 1, e->stream);
    matmul_dgrad(e->matmul, e->dh + t * d, d, e->logits, V, weight(e, e->table->head), d, rows, d, V, 0, e->stream);
  }
}

static double read_total(Engine *e) {
  double x;
  CUDA_CHECK(cudaMemcpyAsync(&x, e->total, sizeof x, cudaMemcpyDeviceToHost, e->stream));
  CUDA_CHECK(cudaStreamSynchronize(e->stream));
  return x;
}

static double model_forward(Engine *e, const int32_t *tokens, const int32_t *targets, int B, int T, int flags) {
  const Config *c = &e->c;
  int carry = flags & ENGINE_CARRY, limit = (int)longest_row(e);
  e->carry_new = 0;
  if (carry) {  // one row: its tokens so far, and the new ones behind them
    if (B != 1) fail(EXIT_INTERNAL, "the CUDA engine carries one sequence, not %d", B);
    if (e->history_len + T > limit)
      fail(EXIT_CONFIG, "a sequence of %d tokens wanted, room for %d; ask for fewer tokens", e->history_len + T, limit);
    memcpy(e->history + e->history_len, tokens, (size_t)T * sizeof(int32_t));
    e->history_len += T, e->carry_new = T;
    tokens = e->history, T = e->history_len;
  }
  int64_t N = (int64_t)B * T;
  if (B < 1 || T < 1 || N > (int64_t)e->set.max_rows * e->set.max_len || T > limit)
    fail(EXIT_INTERNAL, "forward of %d x %d tokens in an engine made for %d x %d", B, T, e->set.max_rows, e->set.max_len);
  for (int64_t n = 0; n < N; n++)
    if (tokens[n] < 0 || tokens[n] >= c->vocab || (targets && targets[n] >= c->vocab))
      fail(EXIT_DATA, "token id %d in a batch: the model's vocabulary has %d ids; change --train, --val or --vocab",
           tokens[n] < 0 || tokens[n] >= c->vocab ? tokens[n] : targets[n], c->vocab);
  e->B = B, e->T = T, e->has_targets = targets != NULL, e->head_done = 0;
  matmul_guess(e->matmul, carry);  // each token makes new shapes: measuring them all would take longer than the sample
  refresh_weights(e);
  memcpy(e->host_ids, tokens, (size_t)N * sizeof(int32_t));
  CUDA_CHECK(cudaMemcpyAsync(e->ids, e->host_ids, (size_t)N * sizeof(int32_t), cudaMemcpyHostToDevice, e->stream));
  document_starts(e, tokens);
  wait_for_weights(e, 0);
  embedding_forward(e->acts[0].x, weight(e, e->table->embedding), e->ids, N, c->width, e->stream);
  for (int i = 0; i < c->layers; i++) {
    // without gradients all layers share one set of buffers: a layer then hands its output over through x_end
    bf16 *out = i + 1 < c->layers && e->set.train ? e->acts[i + 1].x : e->x_end;
    wait_for_weights(e, i + 1);
    layer_forward(e, i, out);
    if (out == e->x_end && i + 1 < c->layers)
      CUDA_CHECK(cudaMemcpyAsync(e->acts[i + 1].x, out, (size_t)(N * c->width) * sizeof(bf16), cudaMemcpyDeviceToDevice,
                                 e->stream));
  }
  wait_for_weights(e, c->layers + 1);
  rmsnorm_forward(e->h_end, e->rstd_end, e->x_end, param(e, e->table->final_norm), (float)c->norm_eps, N, c->width,
                  e->stream);
  matmul_guess(e->matmul, 0);
  if (!targets) return 0;
  memcpy(e->host_ids + N, targets, (size_t)N * sizeof(int32_t));
  CUDA_CHECK(cudaMemcpyAsync(e->targets, e->host_ids + N, (size_t)N * sizeof(int32_t), cudaMemcpyHostToDevice, e->stream));
  e->head_done = e->set.train && e->hinted_scale != 0;
  head_pass(e, e->hinted_scale, e->head_done);
  loss_sum(e->total, e->losses, N, 0, e->stream);
  return read_total(e);
}

static void model_backward(Engine *e, double scale) {
  const Config *c = &e->c;
  const ParamTable *table = e->table;
  int64_t N = (int64_t)e->B * e->T;
  if (!e->set.train || !e->has_targets || e->carry_new)
    fail(EXIT_INTERNAL, "backward without a forward that kept what it needs");
  if (e->head_done && scale != e->hinted_scale)
    fail(EXIT_INTERNAL, "backward with scale %g, the forward was told %g", scale, e->hinted_scale);
  if (!e->head_done) head_pass(e, scale, 1);
  rmsnorm_backward(e->dx, grad(e, table->final_norm), e->scratch, e->dh, e->x_end, param(e, table->final_norm), e->rstd_end,
                   N, c->width, 0, e->stream);
  reduce_bucket(e, c->layers + 1);
  for (int i = c->layers - 1; i >= 0; i--) {
    layer_backward(e, i);
    reduce_bucket(e, i + 1);
  }
  embedding_sort(e->sorted, e->ids, N, c->vocab, e->stream);
  embedding_backward(grad(e, table->embedding), e->scratch, e->dx, e->ids, e->sorted, N, c->width, c->vocab, e->stream);
  reduce_bucket(e, 0);
  if (e->reducing) e->reducing = 2;  // all of it is on its way
  e->has_targets = 0;  // the MLP's activations are gradients now
  if (!e->tuned) {
    CUDA_CHECK(cudaStreamSynchronize(e->stream));
    matmul_release_scratch(e->matmul);
    matmul_keep(e->matmul);
    e->tuned = 1;
  }
}

// ----------------------------------------------------------------------------
// AdamW, on the own shard of the arena

static void model_update(Engine *e, const AdamW *a) {
  AdamWSettings s;
  s.lr = (float)a->lr, s.beta1 = (float)a->beta1, s.beta2 = (float)a->beta2, s.eps = (float)a->eps;
  s.weight_decay = (float)a->weight_decay, s.step = a->step;
  s.grad_scale = (float)a->grad_scale;
  int64_t at = e->shard_first;
  adamw_update(e->master, e->weights + at, e->m, e->v, e->grads + at, e->decay_bits[a->decay_all != 0], s,
               e->shard_count, e->stream);
  vectors_fill(&e->vectors, e->master, e->shard_first, e->shard_count, e->stream);
}

static double model_grad_sumsq(Engine *e, int64_t first, int64_t count) {
  gradient_sum_squares(e->total, e->scratch, e->grads + first, count, 0, e->stream);
  return read_total(e);
}

// ----------------------------------------------------------------------------
// the engine: this model behind the functions of gdn/engine.h

// What this engine cannot do, found before anything is allocated.
static int cuda_check_config(const Config *c, const EngineSettings *s, Error *err) {
  int code = config_check(c, err);
  if (code) return code;
  if (s->max_rows < 1 || s->max_len < 1)
    return error_set(err, EXIT_CONFIG, "a micro-batch of %d rows of %d tokens: needed at least 1 of each; change --batch or "
                     "--seq-len", s->max_rows, s->max_len);
#define NEED(cond, ...) \
  if (!(cond)) return error_set(err, EXIT_CONFIG, __VA_ARGS__)
  NEED(c->width % 8 == 0 && c->width <= RMSNORM_MAX_WIDTH, "width %d on the GPU: needed a multiple of 8 up to %d; change "
       "--width", c->width, RMSNORM_MAX_WIDTH);
  NEED(c->ff % 8 == 0, "MLP size %d on the GPU: needed a multiple of 8; change --ff", c->ff);
  NEED((c->vocab + 7) / 8 * 8 <= CLASSIFIER_MAX_VOCAB, "vocabulary of %d on the GPU: needed at most %d; change --vocab",
       c->vocab, CLASSIFIER_MAX_VOCAB);
  ParamTable t = param_table_build(c);
  for (int i = 0; i < c->layers && i < c->n_pattern && !code; i++) {
    const LayerLayout *l = &t.layers[i];
    MixerSizes m = mixer_sizes(c, l, s->max_rows, s->max_len);
    if (mixer_is_attention(l->mixer)) {
      code = sliding_attention_check(&m.attention, err);
    } else {
      if (c->conv_size > 4)
        code = error_set(err, EXIT_CONFIG, "--conv-size %d on the GPU: needed 2, 3, 4, or 0 for none", c->conv_size);
      else if (mixer_is_delta(l->mixer) && fabs(c->l2_eps - 1e-6) > 1e-12)
        code = error_set(err, EXIT_CONFIG, "a norm of q and k with eps %g: needed 1e-6 on the GPU", c->l2_eps);
      else if (l->mixer == MIX_MAMBA2 && m.val / c->mamba_groups % 8)
        code = error_set(err, EXIT_CONFIG, "--mamba-groups %d on the GPU: the %d channels of a group are not a multiple of "
                         "8", c->mamba_groups, m.val / c->mamba_groups);
      else
        code = delta_rule_check(&m.delta, err);
    }
  }
  param_table_free(&t);
#undef NEED
  return code;
}

static void read_behind_close(ReadBehind *b) {
  if (!b->stream) return;
  cudaStreamSynchronize(b->stream);
  for (int i = 0; i < 2; i++) cudaEventDestroy(b->done[i]), cudaFreeHost(b->stage[i]);
  cudaStreamDestroy(b->stream);
}

static void cuda_destroy(Engine *e) {
  if (!e) return;
  cudaStreamSynchronize(e->stream);
  for (int b = 0; e->bucket && b <= bucket_count(e); b++)
    cudaEventDestroy(e->bucket[b]), cudaEventDestroy(e->waited[0][b]), cudaEventDestroy(e->waited[1][b]);
  free(e->bucket), free(e->waited[0]), free(e->waited[1]);
  if (e->many) gpu_ranks_close(&e->ranks);
  vectors_close(&e->vectors);
  cudaFree(e->master), cudaFree(e->weights), cudaFree(e->grads), cudaFree(e->m), cudaFree(e->v), cudaFree(e->memory);
  cudaFree(e->decay_bits[0]), cudaFree(e->decay_bits[1]);
  if (e->matmul) matmul_close(e->matmul);
  cudaFreeHost(e->host_ids), cudaFreeHost(e->host_docs);
  read_behind_close(&e->behind);
  cudaStreamDestroy(e->stream);
  free(e->acts), free(e->history), free(e);
}

// A carried sequence runs whole: room for it, as one row. The rows of a batch still fit when each is counted in whole
// tiles, as the kernels do.
static void settings_for_carry(EngineSettings *s) {
  if (s->max_state <= (int64_t)s->max_rows * s->max_len) return;
  int64_t rows = (int64_t)s->max_rows * ceil_div(s->max_len, 256) * 256;
  s->max_len = (int)larger(s->max_state, rows), s->max_rows = 1;
}

static void *device_zeroed(Engine *e, int64_t count, size_t size, const char *what) {
  void *p = device_alloc(count, size, what);
  CUDA_CHECK(cudaMemsetAsync(p, 0, (size_t)count * size, e->stream));
  e->own_bytes += count * (int64_t)size;
  return p;
}

// Events of the exchange.
static void engine_open_buckets(Engine *e) {
  int n = bucket_count(e) + 1;
  e->bucket = (cudaEvent_t *)alloc_zeroed(n, sizeof(cudaEvent_t), "events");
  for (int w = 0; w < 2; w++) e->waited[w] = (cudaEvent_t *)alloc_zeroed(n, sizeof(cudaEvent_t), "events");
  for (int b = 0; b < n; b++) {
    CUDA_CHECK(cudaEventCreateWithFlags(&e->bucket[b], cudaEventDisableTiming));
    for (int w = 0; w < 2; w++) CUDA_CHECK(cudaEventCreate(&e->waited[w][b]));
  }
}

// Ranks must not choose different algorithms for their products, nor this run others than the last: rank 0 measures in a
// step on weights of zero, while the others wait, and tells them.
static void engine_share_algorithms(Engine *e) {
  Comm *comm = e->ranks.ranks;
  int64_t N = (int64_t)e->batch_rows * e->batch_len, bytes = 0;
  char *text = NULL;
  if (comm->rank == 0) {
    int32_t *zeros = (int32_t *)alloc_zeroed(N, sizeof(int32_t), "tokens");
    e->hinted_scale = 1;
    model_forward(e, zeros, zeros, e->batch_rows, e->batch_len, 0);
    model_backward(e, 1);
    e->hinted_scale = 0;
    free(zeros);
    text = matmul_text(e->matmul, 1), bytes = (int64_t)strlen(text) + 1;
  }
  comm_broadcast(comm, "the algorithms of matrix products", &bytes, sizeof bytes, 0);
  if (!text) text = (char *)alloc_array(bytes, 1, "matmul algorithm table");
  comm_broadcast(comm, "the algorithms of matrix products", text, (size_t)bytes, 0);
  if (comm->rank && matmul_parse(e->matmul, text, 1)) fail(EXIT_INTERNAL, "the algorithms of rank 0 arrived damaged");
  free(text);
}

// Is there a driver and a GPU that this program can run on, one for each rank? Leaves it the current device. 0, or
// EXIT_CONFIG and one line.
static int machine_check(const Comm *comm, int asked, int *chosen, Error *err) {
  int device = asked < 0 ? 0 : asked;
  GpuFacts f;
  cudaDeviceProp prop;
  cudaFuncAttributes code;
  memset(&f, 0, sizeof f);
  f.visible = getenv("CUDA_VISIBLE_DEVICES"), f.visible_set = f.visible != NULL;
  if (cudaDriverGetVersion(&f.driver) != cudaSuccess) f.driver = 0;
  if (cudaRuntimeGetVersion(&f.runtime) != cudaSuccess) f.runtime = CUDART_VERSION;
  cudaError_t e = f.driver ? cudaGetDeviceCount(&f.gpus) : cudaSuccess;
  if (e != cudaSuccess) f.gpus = 0, f.trouble = cudaGetErrorString(e);
  int refused = comm && f.gpus ? gpu_ranks_choose_device(comm, asked, f.gpus, &device, err) : 0;
  if (refused) return refused;
  f.device = *chosen = device;
  if (device >= f.gpus) return gpu_check(&f, err);
  CUDA_CHECK(cudaGetDeviceProperties(&prop, device));
  f.name = prop.name, f.major = prop.major, f.minor = prop.minor;
  if ((refused = gpu_check(&f, err))) return refused;
  CUDA_CHECK(cudaSetDevice(device));
  e = cudaFuncGetAttributes(&code, partial_reduce_kernel<8>);
  if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction || e == cudaErrorUnsupportedPtxVersion)
    f.code_trouble = cudaGetErrorString(e);
  else
    CUDA_CHECK(e);
  return gpu_check(&f, err);
}

// Bytes of activations for `rows` rows at a level of recomputing.
static int64_t activation_bytes(const Engine *e, int rows, int recompute) {
  Engine other = *e;
  other.set.max_rows = rows, other.set.recompute = recompute;
  other.acts = (LayerActs *)alloc_zeroed(e->c.layers, sizeof(LayerActs), "engine");
  int64_t bytes = engine_bind(&other, NULL);
  free(other.acts);
  return bytes;
}

// Most that measuring matrix products takes for a while: operands, residual and result of the widest product.
static int64_t measuring_bytes(const Engine *e, int rows) {
  int64_t N = (int64_t)rows * e->set.max_len, d = e->c.width, wide = larger(d, 2 * e->c.ff), V = e->table->vocab_rows;
  for (int i = 0; i < e->c.layers; i++) wide = larger(wide, e->table->layers[i].in_rows);
  int64_t operand = larger(N * wide, larger(V * d, (N < HEAD_ROWS ? N : (int64_t)HEAD_ROWS) * V));
  return 2 * (2 * operand + N * d) + larger(2 * operand, 4 * larger(V, wide) * d);
}

// Do the activations fit into what is free? 0, or EXIT_MEMORY and a line that says what would.
static int memory_check(const Engine *e, Error *err) {
  size_t free_bytes, total_bytes;
  const double GiB = 1 << 30;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  if ((uint64_t)e->memory_bytes <= free_bytes) return 0;
  char fits[160] = "", at[96] = "";
  for (int level = 0, n = 0; level < (e->set.train ? RECOMPUTE_COUNT : 1); level++) {
    int low = 0, high = e->set.max_rows;  // low rows fit
    if (level) high *= 64;
    while (high - low > 1) {
      int rows = low + (high - low) / 2;
      if ((uint64_t)(activation_bytes(e, rows, level) + measuring_bytes(e, rows)) <= free_bytes)
        low = rows;
      else
        high = rows;
    }
    n += snprintf(fits + n, sizeof fits - n, "%s%d%s%s", n ? ", " : "", low, e->set.train ? " with --recompute " : "",
                  e->set.train ? recompute_names[level] : "");
  }
  if (e->set.train)
    snprintf(at, sizeof at, ", %.1f with --recompute norms, %.1f with all",
             (double)activation_bytes(e, e->set.max_rows, RECOMPUTE_NORMS) / GiB,
             (double)activation_bytes(e, e->set.max_rows, RECOMPUTE_ALL) / GiB);
  return error_set(err, EXIT_MEMORY,
                   "activations of %d x %d tokens need %.1f GiB of GPU memory%s%s%s; %.1f are free (of %.1f, after %.1f "
                   "for weights and optimiser); largest --batch that fits: %s; or use a smaller --seq-len",
                   e->set.max_rows, e->set.max_len, (double)e->memory_bytes / GiB,
                   e->set.train ? " with --recompute " : "", e->set.train ? recompute_names[e->set.recompute] : "", at,
                   (double)free_bytes / GiB, (double)total_bytes / GiB, (double)e->own_bytes / GiB, fits);
}

static Engine *cuda_create(const Config *c, const ParamTable *t, const EngineSettings *s, Error *err) {
  Comm *comm = s->comm && s->comm->size > 1 ? s->comm : NULL;
  int device = 0, code = machine_check(comm, s->device, &device, err);
  if (comm) code = comm_agree(comm, "which GPU each rank has", code, err);
  if (code) return NULL;
  Engine *e = (Engine *)alloc_zeroed(1, sizeof *e, "engine");
  e->c = *c, e->table = t, e->set = *s, e->many = comm != NULL;
  e->batch_rows = s->max_rows, e->batch_len = s->batch_len ? s->batch_len : s->max_len;
  settings_for_carry(&e->set);
  if (comm && gpu_ranks_open(&e->ranks, comm, device, t->total, err)) {
    free(e);
    return NULL;
  }
  e->shard_first = s->shard_count ? s->shard_first : 0, e->shard_count = s->shard_count ? s->shard_count : t->total;
  CUDA_CHECK(cudaStreamCreateWithFlags(&e->stream, cudaStreamNonBlocking));
  char path[1024];
  snprintf(path, sizeof path, "%s/cublaslt.txt", s->cache_dir ? s->cache_dir : "");
  int first = !comm || comm->rank == 0;  // the others take rank 0's choice of algorithms
  e->matmul = matmul_open(s->cache_dir && first ? path : NULL, first);
  e->acts = (LayerActs *)alloc_zeroed(c->layers, sizeof(LayerActs), "engine");
  e->master = (float *)device_zeroed(e, e->shard_count, sizeof(float), "master weights");
  e->own_bytes += vectors_open(&e->vectors, t);
  e->weights = (bf16 *)device_zeroed(e, t->total, sizeof(bf16), "weights");
  if (s->train) {
    e->grads = (float *)device_zeroed(e, t->total, sizeof(float), "gradients");
    e->m = (float *)device_zeroed(e, e->shard_count, sizeof(float), "AdamW's first moment");
    e->v = (float *)device_zeroed(e, e->shard_count, sizeof(float), "AdamW's second moment");
    int64_t words = adamw_decay_words(e->shard_count);
    uint32_t *bits = (uint32_t *)alloc_array(words, sizeof(uint32_t), "decay bits");
    for (int all = 0; all < 2; all++) {
      memset(bits, 0, (size_t)words * sizeof(uint32_t));
      for (int i = 0; i < t->n; i++) {
        const ParamSpec *p = &t->specs[i];
        int64_t lo = larger(p->offset, e->shard_first) - e->shard_first, hi = p->offset + p->count - e->shard_first;
        if (hi > e->shard_count) hi = e->shard_count;
        if (p->init != INIT_PAD && (all || p->decays) && lo < hi) adamw_decay_mark(bits, lo, hi);
      }
      e->decay_bits[all] = (uint32_t *)device_zeroed(e, words, sizeof(uint32_t), "decay bits");
      CUDA_CHECK(cudaMemcpyAsync(e->decay_bits[all], bits, (size_t)words * sizeof(uint32_t), cudaMemcpyHostToDevice,
                                 e->stream));
      CUDA_CHECK(cudaStreamSynchronize(e->stream));
    }
    free(bits);
  }
  e->memory_bytes = engine_bind(e, NULL);
  code = memory_check(e, err);
  if (comm) code = comm_agree(comm, "whether memory is enough", code, err);
  if (code) {
    cuda_destroy(e);
    return NULL;
  }
  e->memory = (char *)device_alloc(e->memory_bytes, 1, "activations");
  engine_bind(e, e->memory);
  int64_t N = (int64_t)e->set.max_rows * e->set.max_len;
  CUDA_CHECK(cudaMallocHost((void **)&e->host_ids, (size_t)(2 * N) * sizeof(int32_t)));
  CUDA_CHECK(cudaMallocHost((void **)&e->host_docs, (size_t)N * sizeof(int32_t)));
  e->behind.device = device;
  e->history = (int32_t *)alloc_array(longest_row(e), sizeof(int32_t), "carried tokens");
  if (comm && s->train) engine_open_buckets(e);
  if (comm && s->train) engine_share_algorithms(e);
  // all bits set is a NaN of every type: what is read before it is written shows
  CUDA_CHECK(cudaMemsetAsync(e->memory, 0xff, (size_t)e->memory_bytes, e->stream));
  if (config_has_mixer(c, MIX_SWA) || config_has_mixer(c, MIX_ATTN))
    rope_table_fill(e->rope, (int)longest_row(e), c->attn_head_dim, c->rope_theta, e->stream);
  CUDA_CHECK(cudaStreamSynchronize(e->stream));
  return e;
}

static float *arena_at(Engine *e, Arena a, int64_t first) {
  switch (a) {
    case ARENA_PARAM:
      return e->master + first - e->shard_first;
    case ARENA_GRAD:
      return e->grads + first;
    case ARENA_M:
      return e->m + first - e->shard_first;
    default:
      return e->v + first - e->shard_first;
  }
}
static void cuda_read(Engine *e, Arena a, int64_t first, int64_t count, float *dst) {
  CUDA_CHECK(cudaMemcpyAsync(dst, arena_at(e, a, first), (size_t)count * sizeof(float), cudaMemcpyDeviceToHost, e->stream));
  CUDA_CHECK(cudaStreamSynchronize(e->stream));
}

enum { READ_BEHIND_PIECE = 1 << 20 };  // floats

static void read_behind_open(ReadBehind *b) {
  for (int i = 0; i < 2; i++) {
    CUDA_CHECK(cudaMallocHost((void **)&b->stage[i], READ_BEHIND_PIECE * sizeof(float)));
    CUDA_CHECK(cudaEventCreateWithFlags(&b->done[i], cudaEventDisableTiming | cudaEventBlockingSync));
  }
  CUDA_CHECK(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking));
}

// EngineApi.read_behind: on a stream of its own, so that it does not wait for the kernels of the engine's; the GPU fills
// one page-locked buffer while the thread empties the other.
static void cuda_read_behind(Engine *e, Arena a, int64_t first, int64_t count, float *dst) {
  ReadBehind *b = &e->behind;
  CUDA_CHECK(cudaSetDevice(b->device));  // each save has a new thread, which begins with GPU 0
  if (!b->stream) read_behind_open(b);
  const float *src = arena_at(e, a, first);
  int64_t pieces = ceil_div(count, READ_BEHIND_PIECE);
  for (int64_t i = 0; i <= pieces; i++) {
    int64_t at = i * READ_BEHIND_PIECE, before = at - READ_BEHIND_PIECE;
    if (i < pieces) {
      size_t n = (size_t)(count - at < READ_BEHIND_PIECE ? count - at : (int64_t)READ_BEHIND_PIECE);
      CUDA_CHECK(cudaMemcpyAsync(b->stage[i & 1], src + at, n * sizeof(float), cudaMemcpyDeviceToHost, b->stream));
      CUDA_CHECK(cudaEventRecord(b->done[i & 1], b->stream));
    }
    if (i > 0) {
      size_t n = (size_t)(count - before < READ_BEHIND_PIECE ? count - before : (int64_t)READ_BEHIND_PIECE);
      CUDA_CHECK(cudaEventSynchronize(b->done[(i - 1) & 1]));
      memcpy(dst + before, b->stage[(i - 1) & 1], n * sizeof(float));
    }
  }
}
// Of the weights and moments only the own shard is kept; gather brings the others'.
static void cuda_write(Engine *e, Arena a, int64_t first, int64_t count, const float *src) {
  if (a != ARENA_GRAD) {
    int64_t begin = larger(first, e->shard_first), end = first + count;
    if (end > e->shard_first + e->shard_count) end = e->shard_first + e->shard_count;
    if (begin >= end) return;
    src += begin - first, first = begin, count = end - begin;
  }
  CUDA_CHECK(cudaMemcpyAsync(arena_at(e, a, first), src, (size_t)count * sizeof(float), cudaMemcpyHostToDevice, e->stream));
  CUDA_CHECK(cudaStreamSynchronize(e->stream));
  if (a == ARENA_PARAM) e->weights_stale = 1;
}
static void cuda_read64(Engine *e, Arena a, int64_t first, int64_t count, double *dst) {
  float *f = (float *)alloc_array(count, sizeof(float), "copy");
  cuda_read(e, a, first, count, f);
  for (int64_t i = 0; i < count; i++) dst[i] = f[i];
  free(f);
}
static void cuda_write64(Engine *e, Arena a, int64_t first, int64_t count, const double *src) {
  float *f = (float *)alloc_array(count, sizeof(float), "copy");
  for (int64_t i = 0; i < count; i++) f[i] = (float)src[i];
  cuda_write(e, a, first, count, f);
  free(f);
}
static void *cuda_arena(Engine *e, Arena a) {
  return a == ARENA_PARAM ? e->master : a == ARENA_GRAD ? e->grads : a == ARENA_M ? e->m : e->v;
}
static void cuda_zero_grad(Engine *e) {
  CUDA_CHECK(cudaMemsetAsync(e->grads, 0, (size_t)e->table->total * sizeof(float), e->stream));
}
static void cuda_losses(Engine *e, float *dst) {
  CUDA_CHECK(cudaMemcpyAsync(dst, e->losses, (size_t)e->B * e->T * sizeof(float), cudaMemcpyDeviceToHost, e->stream));
  CUDA_CHECK(cudaStreamSynchronize(e->stream));
}
static void cuda_loss_scale(Engine *e, double scale) { e->hinted_scale = scale; }

// bf16 columns [first, first+columns) of rows of ld elements, as float.
static void read_rows(Engine *e, float *dst, const bf16 *src, int64_t rows, int64_t ld, int64_t columns) {
  uint16_t *raw = (uint16_t *)alloc_array(rows * columns, sizeof(uint16_t), "copy");
  CUDA_CHECK(cudaMemcpy2DAsync(raw, (size_t)columns * 2, src, (size_t)ld * 2, (size_t)columns * 2, (size_t)rows,
                               cudaMemcpyDeviceToHost, e->stream));
  CUDA_CHECK(cudaStreamSynchronize(e->stream));
  for (int64_t i = 0; i < rows * columns; i++) {
    uint32_t bits = (uint32_t)raw[i] << 16;
    memcpy(&dst[i], &bits, 4);
  }
  free(raw);
}

static void cuda_logits(Engine *e, int64_t first, int64_t rows, float *dst) {
  if (e->carry_new) first += e->history_len - e->carry_new;  // rows of the new tokens
  for (int64_t r = 0; r < rows; r += e->head_rows) {
    int64_t n = rows - r < e->head_rows ? rows - r : e->head_rows;
    head_forward(e, first + r, n);
    read_rows(e, dst + r * e->c.vocab, e->logits, n, e->table->vocab_rows, e->c.vocab);
  }
}

static void cuda_reset_state(Engine *e) { e->history_len = 0; }

// Names as in train_gdn.c, as far as this engine holds the same thing.
static int64_t cuda_activation(Engine *e, const char *name, double *dst, int64_t max) {
  int64_t N = (int64_t)e->B * e->T, d = e->c.width, columns = -1, ld = 0;
  const bf16 *p = NULL;
  int layer = -1, used = 0;
  if (!strcmp(name, "logits")) {
    int64_t rows = e->carry_new ? e->carry_new : N, count = rows * e->c.vocab;
    float *f = (float *)alloc_array(count, sizeof(float), "logits");
    cuda_logits(e, 0, rows, f);
    for (int64_t i = 0; i < count && i < max; i++) dst[i] = f[i];
    free(f);
    return count;
  }
  if (!strcmp(name, "losses")) {
    float *f = (float *)alloc_array(N, sizeof(float), "losses");
    cuda_losses(e, f);
    for (int64_t i = 0; i < N && i < max; i++) dst[i] = f[i];
    free(f);
    return N;
  }
  if (sscanf(name, "layers.%d.%n", &layer, &used) == 1 && used && layer >= 0 && layer < e->c.layers && e->set.train) {
    const LayerActs *a = &e->acts[layer];
    const LayerLayout *l = &e->table->layers[layer];
    MixerSizes m = mixer_sizes(&e->c, l, e->B, e->T);
    const char *n = name + used;
    int delta = mixer_is_delta(l->mixer), attention = mixer_is_attention(l->mixer), level = e->set.recompute;
    if (!strcmp(n, "x")) p = a->x, columns = ld = d;
    if (level == RECOMPUTE_NONE) {  // else another layer's lies there by now
      if (!strcmp(n, "h")) p = a->h, columns = ld = d;
      if (!strcmp(n, "h1") && e->c.ff) p = a->h1, columns = ld = d;
      if (!strcmp(n, "mixer") && !attention) p = a->oy, columns = ld = m.val;
    }
    if (level != RECOMPUTE_ALL) {
      if (!strcmp(n, "packed") && !attention) p = a->packed, columns = ld = m.rows;
      if (!strcmp(n, "q") && delta) p = a->y, columns = m.key, ld = m.conv_cols;
      if (!strcmp(n, "k") && delta) p = a->y + m.key, columns = m.key, ld = m.conv_cols;
      if (!strcmp(n, "q") && attention) p = a->packed + l->q, columns = m.key, ld = m.rows;
      if (!strcmp(n, "o") && l->mixer != MIX_MAMBA2) p = a->o, columns = ld = m.val;
      if (!strcmp(n, "mixer") && attention) p = a->oy, columns = ld = m.val;
      if (!strcmp(n, "x1") && e->c.ff) p = a->x1, columns = ld = d;
      if (!strcmp(n, "gu") && e->c.ff && e->has_targets) p = a->gu, columns = ld = 2 * e->c.ff;
    }
  }
  if (!strcmp(name, "x_end")) p = e->x_end, columns = ld = d;
  if (!strcmp(name, "h_end")) p = e->h_end, columns = ld = d;
  if (!p) return -1;
  float *f = (float *)alloc_array(N * columns, sizeof(float), "activation");
  read_rows(e, f, p, N, ld, columns);
  for (int64_t i = 0; i < N * columns && i < max; i++) dst[i] = f[i];
  free(f);
  return N * columns;
}

static void cuda_synchronize(Engine *e) { CUDA_CHECK(cudaStreamSynchronize(e->stream)); }
static int64_t cuda_memory_bytes(const Engine *e) { return e->memory_bytes + e->own_bytes; }

static void cuda_memory_plan(const Config *c, const ParamTable *t, const EngineSettings *s, int64_t bytes[MEMORY_KINDS]) {
  Engine *e = (Engine *)alloc_zeroed(1, sizeof *e, "engine");
  e->c = *c, e->table = t, e->set = *s;
  settings_for_carry(&e->set);
  e->acts = (LayerActs *)alloc_zeroed(c->layers, sizeof(LayerActs), "engine");
  engine_bind(e, NULL);
  memcpy(bytes, e->memory_of, sizeof e->memory_of);
  int64_t P = t->total, own = s->shard_count ? s->shard_count : P;
  Vectors v;
  vectors_plan(&v, t);
  bytes[MEMORY_WEIGHTS] = own * (int64_t)sizeof(float) + P * (int64_t)sizeof(bf16) + vectors_bytes(&v);
  free(v.ranges);
  if (s->train) {
    bytes[MEMORY_GRADIENTS] = P * (int64_t)sizeof(float);
    bytes[MEMORY_MOMENTS] = 2 * own * (int64_t)sizeof(float) + 2 * adamw_decay_words(own) * (int64_t)sizeof(uint32_t);
  }
  free(e->acts), free(e);
}

extern "C" const EngineApi engine_cuda = {
    "cuda",           4,            1,               cuda_check_config, cuda_create,     cuda_destroy,
    cuda_read,        cuda_write,   cuda_read64,     cuda_write64,      cuda_arena,      model_forward,
    cuda_losses,      cuda_logits,  model_backward,  cuda_zero_grad,    model_grad_sumsq, model_update,
    cuda_reset_state, cuda_activation, cuda_synchronize, cuda_memory_bytes, cuda_loss_scale,
    cuda_reduce_begin, cuda_reduce_end, cuda_gather, cuda_traffic, cuda_read_behind, cuda_memory_plan};

// ----------------------------------------------------------------------------
// main: the program around the model is gdn/trainer.h, the same for both engines

#ifndef GDN_NO_MAIN
#include "gdn/trainer.h"  // trainer_main

int main(int argc, char **argv) {
  program_name = "train_gdncu";
  return trainer_main(argc, argv, &engine_cuda);
}
#endif
