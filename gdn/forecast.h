// forecast.h: what a run will need, before it is started: parameters, arithmetic, memory, time and disk (--dry-run).
//
// FLOPs per token, forward and backward, a multiplication and an addition counted as two:
//   matrix products  6 for every element of a matrix that multiplies the token: 2 forward, 4 backward (head included,
//                    embedding not; a tied head counts once)
//   delta rule       chunks of C = 64; forward H 4CK + HV (6KV + 4CV + 2C^2/3): QK', KK', three with the state,
//                    UA, UP, and the inverse; backward twice that without the inverse
//   Mamba2           the same without erase: groups 2CN + heads (4NP + 2CP); backward twice
//   attention        4 D heads for every key that a query sees, on average over the row; backward 2.5 times
// Convolutions, norms, gates and the softmaxes are left out, and so is what --recompute computes again: this is the
// numerator of the MFU. The forecast of the time does count it.
//
// Memory. Both engines keep fp32 gradients whole and the two moments for their own part of the arena (ZeRO-1); the CPU
// engine also the fp32 weights, of which the CUDA engine keeps its part, beside a whole copy in bf16. Activations are
// counted buffer by buffer as the engines allocate them (gpu_activations, cpu_activations), in fp32 on CPUs, in bf16 on
// GPUs. An engine knows exactly what it allocates (EngineApi.memory_bytes, memory_plan); this is an estimate that needs
// no engine, and tests hold it to 1% of the CUDA engine's own count.
//
// defines: Forecast, flops_per_token, layer_flops, cpu_activations, gpu_activations, forecast_make,
//          forecast_largest_batch, forecast_print
#ifndef GDN_FORECAST_H
#define GDN_FORECAST_H

#include <math.h>
#include "engine.h"  // MemoryKind, Recompute
#include "gpu_speed.h"
#include "options.h"

enum { FORECAST_CHUNK = 64, FORECAST_LOGIT_TOKENS = 8192 };

// GPUs that the forecast finds the largest micro-batch for, and what a run can use of them: what nvidia-smi calls
// total, less 1 GiB for CUDA and cuBLASLt.
enum { FORECAST_GPUS = 2 };
static const struct {
  const char *name;
  double gib;
} forecast_gpus[FORECAST_GPUS] MAYBE_UNUSED = {{"80 GB (H100)", 78.6}, {"141 GB (H200)", 139.4}};

// Assumed where --tokens-per-sec says nothing, and printed with the estimate.
#define FORECAST_CPU_FLOPS 15e9  // of one thread; tiny-gdn measured 18e9 with gcc -O3 -march=native

typedef struct {
  double flops_matmul, flops_mixer;  // a token, forward and backward
  int64_t params_mixer[MIX_COUNT], params_mlp, params_norms, params_embedding, params_head;
  int layers[MIX_COUNT];
  double mixer_flops[MIX_COUNT];  // a token and layer: the mixer's own products, forward and backward
  double cpu_bytes, gpu_bytes;    // of one rank
  double state_bytes, moment_bytes, gpu_master_bytes, gpu_weight_bytes, cpu_activations, gpu_activations;
  double attention_flops;  // a token, forward and backward: part of flops_mixer
  double gpu_kept;         // bytes that the layers of a micro-batch keep with nothing computed again
  StepTime gpu_step;
  double gpu_kinds[MEMORY_KINDS];  // gpu_activations by what they are for
  int64_t micro_batches;           // a step and rank
  double gpu_seconds, cpu_seconds;
  double checkpoint_bytes, disk_bytes, data_bytes;
  int64_t checkpoints;
} Forecast;

// A mixer's own products for one token of a row of T, forward plus backward.
static inline double layer_flops(const Config *c, Mixer m, int64_t T) {
  const double C = FORECAST_CHUNK;
  if (mixer_is_delta(m)) {
    double K = c->head_k, V = c->head_v, inverse = c->v_heads * 2 * C * C / 3;
    double products = c->heads * 4 * C * K + c->v_heads * (6 * K * V + 4 * C * V);
    return 3 * products + inverse;
  }
  if (m == MIX_MAMBA2) {
    double N = c->mamba_state, P = c->mamba_head, heads = (double)c->width * c->mamba_expand / P;
    return 3 * (c->mamba_groups * 2 * C * N + heads * (4 * N * P + 2 * C * P));
  }
  double W = m == MIX_SWA && c->window < T ? c->window : (double)T;
  double keys = (W * (W + 1) / 2 + ((double)T - W) * W) / (double)T;  // 1, 2, ... W, W, ..., W
  return 3.5 * 4 * keys * c->attn_heads * c->attn_head_dim;
}

static inline int param_multiplies(const ParamTable *t, const ParamSpec *s) {
  if (s->init == INIT_PAD || s->ndim != 2) return 0;
  return s->offset != t->embedding || t->head == t->embedding;
}

// FLOPs for one token of a row of T, forward and backward.
static inline double flops_per_token(const Config *c, const ParamTable *t, int64_t T) {
  double sum = 0;
  for (int i = 0; i < t->n; i++)
    if (param_multiplies(t, &t->specs[i])) sum += 6.0 * (double)t->specs[i].count;
  for (int i = 0; i < c->layers; i++) sum += layer_flops(c, config_layer_mixer(c, i), T);
  return sum;
}

// Bytes of activations that the CUDA engine allocates for B rows of T tokens: their sum, and by kind. What layers keep
// for the backward pass is counted for each of them, what they share (engine.h: Recompute) for the largest.
static inline double gpu_activations(double bytes[MEMORY_KINDS], const Config *c, const ParamTable *t, int64_t B,
                                     int64_t T, int recompute) {
  const double C = FORECAST_CHUNK, d = c->width, ff = c->ff, N = (double)B * (double)T;
  const double chunks = (double)B * ceil((double)T / C);
  double packed = 0, conv = 0, values = 0, gates = 0, wide = 0, scratch = 0, rotary = 0, sum = 0;
  double partial = 4 * d * fmin(N, 396);  // sums over tokens, by the blocks of the kernels that leave most of them
  for (int k = 0; k < MEMORY_KINDS; k++) bytes[k] = 0;
  for (int i = 0; i < c->layers; i++) {
    const LayerLayout *l = &t->layers[i];
    double input = 2 * d * N, norms = (ff > 0 ? 4 : 2) * d * N, val, conv_cols = 0, gate_cols = 0, gate_out = 0;
    double states, output = 0;  // in bytes, of all tokens; output: behind norm and gate
    if (mixer_is_attention(l->mixer)) {
      val = (double)c->attn_heads * c->attn_head_dim, states = 4 * N * c->attn_heads;
      rotary = 8.0 * (double)T * (c->attn_head_dim / 2);
      partial = fmax(partial, 8.0 * (double)B * c->attn_heads * ceil((double)T / 128) * 128);
    } else {
      int mamba = l->mixer == MIX_MAMBA2, channel_gate = l->f_up >= 0;
      double K = mamba ? c->mamba_state : c->head_k, V = mamba ? c->mamba_head : c->head_v;
      double heads = mamba ? d * c->mamba_expand / V : c->v_heads, keys = (mamba ? c->mamba_groups : c->heads) * K;
      val = heads * V, conv_cols = 2 * keys + val, output = 2 * val * N;
      if (l->f_up >= 0) gate_cols = (l->mixer == MIX_GDN2 ? c->heads : c->v_heads) * K;
      if (l->g_up >= 0) gate_out = val;
      // A and P, decays, U, the state at the start of a chunk; E+, Q+ and K-
      states = chunks * heads * (4 * C * C + 16 * C + 2 * C * V + 2 * V * K + (channel_gate ? 6 * C * K : 0));
      scratch = fmax(scratch, chunks * heads *
                                  (2 * C * V + 2 * V * K + 8 * C * K / (fmod(K, 128) == 0 ? 128 : 64) +
                                   (channel_gate ? 12 * C * K + 8 * C * C + 8 * K + 4 : 0)));
      partial = fmax(partial, 4 * val * (mamba ? fmin(N, 528) : ceil(N / 256) * (1 + 1 / fmax(1, fmin(4, 256 / V)))));
    }
    double projections = 2 * N * (l->in_rows + conv_cols + gate_cols + gate_out), mixer = 2 * N * val + states;
    double residual = (ff > 0 ? 8 : 4) * N + 2 * N * d, mlp = 4 * ff * N;
    bytes[MEMORY_RESIDUAL] += input;
    double shared = norms + output;
    if (recompute == RECOMPUTE_NONE) bytes[MEMORY_RESIDUAL] += norms, bytes[MEMORY_MIXER] += output, shared = 0;
    if (recompute == RECOMPUTE_ALL)
      shared += residual + projections + mixer + mlp;
    else
      bytes[MEMORY_RESIDUAL] += residual, bytes[MEMORY_PROJECTIONS] += projections, bytes[MEMORY_MIXER] += mixer,
          bytes[MEMORY_MLP] += mlp;
    bytes[MEMORY_SHARED] = fmax(bytes[MEMORY_SHARED], shared);
    packed = fmax(packed, l->in_rows), conv = fmax(conv, conv_cols), values = fmax(values, val);
    gates = fmax(gates, gate_cols), wide = fmax(wide, gate_out);
  }
  bytes[MEMORY_LOGITS] = 2 * fmin(N, FORECAST_LOGIT_TOKENS) * t->vocab_rows;
  // the ends of the residual stream, SwiGLU's product, tokens; gradients of activations
  bytes[MEMORY_WORKSPACE] = N * (4 * d + 2 * ff + 24) + 4.0 * c->vocab + rotary + partial + scratch +
                            2 * N * (2 * d + packed + conv + 2 * values + gates + wide);
  for (int k = 0; k < MEMORY_KINDS; k++) sum += bytes[k];
  return sum;
}

// Numbers that the CPU engine keeps for B rows of T tokens: for every layer what it computes on the way down, once for
// all layers what comes back up.
static inline double cpu_activations(const Config *c, const ParamTable *t, int64_t B, int64_t T) {
  const double C = FORECAST_CHUNK, d = c->width, N = (double)B * (double)T;
  double n = 0, packed = 0, conv = 0, keys = 0, values = 0, gates = 0, betas = 0;  // a token
  for (int i = 0; i < c->layers; i++) {
    const LayerLayout *l = &t->layers[i];
    double key, val, gate_cols = 0, b_cols = c->v_heads, conv_cols = 0, states = 0;
    if (mixer_is_attention(l->mixer)) {
      key = val = (double)c->attn_heads * c->attn_head_dim;
      n += key + 2.0 * c->attn_kv_heads * c->attn_head_dim + c->attn_heads;
    } else {
      double chunks = ceil((double)T / C) / (double)T;
      if (l->mixer == MIX_MAMBA2) {
        key = (double)c->mamba_groups * c->mamba_state, val = d * c->mamba_expand, gate_cols = val / c->mamba_head;
        states = gate_cols * c->mamba_state * c->mamba_head;
        n += 2 * gate_cols;
      } else {
        int channel = mixer_channel_decay(l->mixer);
        key = (double)c->heads * c->head_k, val = (double)c->v_heads * c->head_v;
        gate_cols = (double)(l->mixer == MIX_GDN2 ? c->heads : c->v_heads) * (channel ? c->head_k : 1);
        if (l->mixer == MIX_GDN2) b_cols = key;
        states = (double)c->v_heads * c->head_k * c->head_v;
        n += 2 * key + b_cols + (l->f_up >= 0) * gate_cols + (l->a_log >= 0) * gate_cols;
        n += (l->w >= 0) * val + (l->g_up >= 0) * val;
      }
      conv_cols = 2 * key + val;
      n += 2 * conv_cols + val + states * chunks;
    }
    n += 3 * d + 1 + l->in_rows + val + (c->ff ? d + 1 + 3.0 * c->ff : 0);
    packed = fmax(packed, l->in_rows), conv = fmax(conv, conv_cols), keys = fmax(keys, key), values = fmax(values, val);
    gates = fmax(gates, gate_cols), betas = fmax(betas, b_cols);
  }
  n += 2 * d + 3;  // final norm, losses
  n += 2 * d + packed + conv + 2 * keys + 4 * values + 2 * gates + betas + fmax(values, gates) + 3.0 * c->ff;
  double logit_rows = fmin(N, fmax(1, floor((double)(1 << 26) / t->vocab_rows)));
  return N * n + logit_rows * t->vocab_rows;
}

// t is the table of o->config.
static inline Forecast forecast_make(const Options *o, const ParamTable *t) {
  Forecast f;
  const Config *c = &o->config;
  memset(&f, 0, sizeof f);
  for (int i = 0; i < t->n; i++) {
    const ParamSpec *s = &t->specs[i];
    if (s->init == INIT_PAD) continue;
    if (param_multiplies(t, s)) f.flops_matmul += 6.0 * (double)s->count;
    if (s->offset == t->embedding)
      f.params_embedding += s->count;
    else if (s->offset == t->head)
      f.params_head += s->count;
    else if (strstr(s->name, ".mlp."))
      f.params_mlp += s->count;
    else if (strstr(s->name, ".attn."))
      f.params_mixer[config_layer_mixer(c, s->layer)] += s->count;
    else
      f.params_norms += s->count;
  }
  for (int i = 0; i < c->layers; i++) {
    Mixer m = config_layer_mixer(c, i);
    f.layers[m]++;
    f.mixer_flops[m] = layer_flops(c, m, o->seq_len);
    f.flops_mixer += f.mixer_flops[m];
    if (mixer_is_attention(m)) f.attention_flops += f.mixer_flops[m];
  }
  double P = (double)t->total, kinds[MEMORY_KINDS], flops = f.flops_matmul + f.flops_mixer;
  f.micro_batches = o->total_batch / ((int64_t)o->batch * o->seq_len * o->ranks);
  f.state_bytes = 8 * P;
  f.moment_bytes = 8 * P / o->ranks;
  f.gpu_master_bytes = 4 * P / o->ranks;
  f.gpu_weight_bytes = 2 * P;
  f.gpu_activations = gpu_activations(f.gpu_kinds, c, t, o->batch, o->seq_len, o->recompute);
  f.cpu_activations = 4 * cpu_activations(c, t, o->batch, o->seq_len);
  f.gpu_bytes = f.state_bytes / 2 + f.gpu_master_bytes + f.moment_bytes + f.gpu_weight_bytes + f.gpu_activations;
  f.cpu_bytes = f.state_bytes + f.moment_bytes + f.cpu_activations;

  gpu_activations(kinds, c, t, o->batch, o->seq_len, RECOMPUTE_NONE);
  f.gpu_kept = kinds[MEMORY_RESIDUAL] + kinds[MEMORY_PROJECTIONS] + kinds[MEMORY_MIXER] + kinds[MEMORY_MLP];
  f.gpu_step = gpu_step_time(c, t, f.flops_matmul, f.attention_flops, f.gpu_kept, (double)o->total_batch / o->seq_len,
                             o->seq_len, o->batch, o->recompute, o->ranks, o->nodes);
  double all = (double)o->tokens, cpu_rate = FORECAST_CPU_FLOPS / flops, gpu_rate = f.gpu_step.tokens_per_s / o->ranks;
  if (o->threads > 1) cpu_rate *= o->threads;
  if (o->tokens_per_sec > 0) gpu_rate = cpu_rate = o->tokens_per_sec;
  f.gpu_seconds = all / (gpu_rate * o->ranks);
  f.cpu_seconds = all / (cpu_rate * o->ranks);

  f.checkpoint_bytes = 12.0 * (double)t->params;  // fp32 weights and two moments
  int64_t made = o->save_every ? (o->steps - 1) / o->save_every + 1 : 1;
  f.checkpoints = made;
  if (o->keep) {
    int64_t apart = o->keep_every ? o->steps / o->keep_every : 0;
    if (f.checkpoints > o->keep + apart) f.checkpoints = o->keep + apart;
  }
  f.disk_bytes = f.checkpoint_bytes *
                 (double)(f.checkpoints + (made > f.checkpoints));  // a new one is whole before an old one goes
  f.data_bytes = strncmp(o->train, "recall", 6) ? all * (c->vocab <= 65536 ? 2 : 4) : 0;
  return f;
}

// The most rows of a micro-batch, of those that divide a rank's rows of a step, whose run takes at most `bytes` of a
// GPU; 0: none. Room is left for what measuring matrix products takes for a while (operands and result of the widest).
static inline int forecast_largest_batch(const Options *o, const ParamTable *t, int recompute, double bytes) {
  const Config *c = &o->config;
  double kinds[MEMORY_KINDS], P = (double)t->total, wide = fmax(c->width, 2.0 * c->ff);
  int64_t rows = o->total_batch / ((int64_t)o->seq_len * o->ranks), best = 0;
  for (int i = 0; i < c->layers; i++) wide = fmax(wide, t->layers[i].in_rows);
  for (int64_t n = 1; n <= rows && n <= 1 << 20; n++) {
    if (rows % n) continue;
    double measuring = 6 * wide * (double)n * o->seq_len;
    if (6 * P + 12 * P / o->ranks + gpu_activations(kinds, c, t, n, o->seq_len, recompute) + measuring > bytes) break;
    best = n;
  }
  return (int)best;
}

static inline const char *size_text(char text[24], double bytes) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  int u = 0;
  for (; bytes >= 1024 && u < 5; u++) bytes /= 1024;
  snprintf(text, 24, u ? "%.1f %s" : "%.0f %s", bytes, units[u]);
  return text;
}

static inline const char *time_text(char text[24], double s) {
  if (s < 60)
    snprintf(text, 24, "%.1f s", s);
  else if (s < 3600)
    snprintf(text, 24, "%.1f min", s / 60);
  else if (s < 48 * 3600)
    snprintf(text, 24, "%.1f h", s / 3600);
  else
    snprintf(text, 24, s < 1000 * 86400 ? "%.3g days" : "%.0f days", s / 86400);
  return text;
}

// GPU hours: three digits, all of them from a thousand on
static inline const char *hours_text(char text[24], double hours) {
  snprintf(text, 24, hours < 1000 ? "%.3g" : "%.0f", hours);
  return text;
}

static inline const char *count_text(char text[32], int64_t n) {  // 1,387,348,732
  char digits[24];
  int len = snprintf(digits, sizeof digits, "%lld", (long long)n), at = 0;
  for (int i = 0; i < len; i++) {
    if (i && (len - i) % 3 == 0) text[at++] = ',';
    text[at++] = digits[i];
  }
  text[at] = 0;
  return text;
}

// Prints the forecast for a person.
static inline void forecast_print(FILE *out, const Options *o, const ParamTable *t, const Forecast *f) {
  char a[32], b[32], d[24], e[24];
  double flops = f->flops_matmul + f->flops_mixer;
#define ROW(label, count, what)                                            \
  if (count)                                                               \
  fprintf(out, "  %-16s %16s  %5.1f%%  %s\n", label, count_text(a, count), \
          100.0 * (double)(count) / (double)t->params, what)
  fprintf(out, "Parameters of %s\n", o->config.model);
  ROW("embedding", f->params_embedding, o->config.tied ? "also the head" : "");
  for (int m = 0; m < MIX_COUNT; m++) {
    if (!f->layers[m]) continue;
    snprintf(b, sizeof b, "%s", mixer_name((Mixer)m));
    char what[96];
    snprintf(what, sizeof what, "%d layers; own products %.2f MFLOP a token and layer", f->layers[m],
             f->mixer_flops[m] / 1e6);
    ROW(b, f->params_mixer[m], what);
  }
  ROW("mlp", f->params_mlp, "");
  ROW("norms", f->params_norms, "");
  ROW("head", f->params_head, "");
  ROW("total", t->params, "");
#undef ROW
  fprintf(out, "FLOPs of a token  %.4g forward and backward (%.4g matrix products, %.4g mixers)\n", flops,
          f->flops_matmul, f->flops_mixer);

  fprintf(out, "Run\n");
  fprintf(out, "  steps            %s of %s tokens", count_text(a, o->steps), count_text(b, o->total_batch));
  fprintf(out, "; %s tokens in all\n", count_text(a, o->tokens));
  int divides = f->micro_batches * o->batch * o->seq_len * o->ranks == o->total_batch;
  if (divides)
    fprintf(out, "  micro-batches    %lld of %d x %d tokens a step and rank, %d rank%s on %d node%s\n",
            (long long)f->micro_batches, o->batch, o->seq_len, o->ranks, o->ranks > 1 ? "s" : "", o->nodes,
            o->nodes > 1 ? "s" : "");
  else
    fprintf(
        out,
        "  micro-batches    --total-batch %lld is not a multiple of batch x seq-len x ranks = %lld: it cannot be run "
        "like this\n",
        (long long)o->total_batch, (long long)o->batch * o->seq_len * o->ranks);
  if (o->ranks > 1)
    fprintf(out, "  network          %s sent and received by a rank and step (fp32 gradients, bf16 weights)\n",
            size_text(d, 6.0 * (double)t->total * (o->ranks - 1) / o->ranks));

  fprintf(out, "Memory of a rank    %12s %12s\n", "CPU engine", "CUDA engine");
#define ROW(label, cpu, gpu) fprintf(out, "  %-16s  %12s %12s\n", label, size_text(d, cpu), size_text(e, gpu))
  ROW("weights fp32", f->state_bytes / 2, f->gpu_master_bytes);
  ROW("gradients fp32", f->state_bytes / 2, f->state_bytes / 2);
  ROW("moments fp32", f->moment_bytes, f->moment_bytes);
  ROW("weights bf16", 0, f->gpu_weight_bytes);
  ROW("activations", f->cpu_activations, f->gpu_activations);
  ROW("sum", f->cpu_bytes, f->gpu_bytes);
#undef ROW
  fprintf(out, "  CUDA's own 0.5 to 1 GiB come on top, and for a while what measuring matrix products takes\n");
  fprintf(out, "Memory of a GPU with --recompute");
  for (int r = 0; r < RECOMPUTE_COUNT; r++) fprintf(out, " %11s", recompute_names[r]);
  for (int row = 0; row < 2; row++) {
    fprintf(out, "\n  %-30s", row ? "sum" : "activations");
    for (int r = 0; r < RECOMPUTE_COUNT; r++) {
      double kinds[MEMORY_KINDS], bytes = gpu_activations(kinds, &o->config, t, o->batch, o->seq_len, r);
      fprintf(out, " %11s", size_text(d, bytes + (row ? f->gpu_bytes - f->gpu_activations : 0)));
    }
  }
  for (int g = 0; g < FORECAST_GPUS; g++) {
    fprintf(out, "\n  largest --batch %-14s", forecast_gpus[g].name);
    for (int r = 0; r < RECOMPUTE_COUNT; r++) {
      int rows = forecast_largest_batch(o, t, r, forecast_gpus[g].gib * 1073741824.0);
      snprintf(d, sizeof d, "%d", rows);
      fprintf(out, " %11s", rows ? d : "none fits");
    }
  }
  fprintf(out, "\n");

  fprintf(out, "Time\n");
  double per_row = 0;
  const StepTime *s = &f->gpu_step;
  if (!divides)
    fprintf(out, "  none for a split that cannot be run; those below can\n");
  else if (o->tokens_per_sec > 0) {
    fprintf(out, "  %-16s at --tokens-per-sec %g a rank: %s GPU hours\n", time_text(d, f->gpu_seconds),
            o->tokens_per_sec, hours_text(e, f->gpu_seconds / 3600 * o->ranks));
    per_row = gpu_row_from_speed((double)t->total, o->tokens_per_sec, (double)(o->total_batch / o->seq_len), o->seq_len,
                                 o->ranks, o->nodes);
  } else {
    fprintf(out, "  %-16s on %d GPU%s like an H200: %s GPU hours\n", time_text(d, f->gpu_seconds), o->ranks,
            o->ranks > 1 ? "s" : "", hours_text(e, f->gpu_seconds / 3600 * o->ranks));
    fprintf(out,
            "  a step           %.0f ms: micro-batches of %.0f ms, update %.0f ms, exchange %.0f ms; %.0f tokens/s\n",
            1e3 * s->step, 1e3 * s->micro, 1e3 * s->update, 1e3 * s->exchange, s->tokens_per_s);
    fprintf(out, "  %-16s on a CPU at %.0f GFLOP/s a thread, with %d thread%s\n", time_text(d, f->cpu_seconds),
            FORECAST_CPU_FLOPS / 1e9, o->threads ? o->threads : 1, o->threads > 1 ? "s" : "");
  }
  if (divides && o->tokens_per_sec > 0 && per_row <= 0)
    fprintf(out,
            "  no other numbers of GPUs: at that speed a step of %.1f ms has no time beside the exchange of %.1f ms\n",
            1e3 * (double)o->total_batch / (o->tokens_per_sec * o->ranks),
            1e3 * gpu_exchange_time((double)t->total, o->ranks, o->nodes));
  else {
    fprintf(out,
            "Scaling to more GPUs%s, %d in a machine, %.0f GB/s within it and %.0f GB/s to another, nothing hidden\n",
            per_row > 0 ? " from that speed" : "", GPUS_A_MACHINE, GPU_LINK_INSIDE / 1e9, GPU_LINK_BETWEEN / 1e9);
    gpu_scaling_print(out, &o->config, t, f->flops_matmul, f->attention_flops, f->gpu_kept, o->total_batch / o->seq_len,
                      o->seq_len, o->batch, o->recompute, per_row);
  }
  fprintf(out, "Disk\n");
  fprintf(out, "  checkpoints      %s: %lld kept of %s each", size_text(d, f->disk_bytes), (long long)f->checkpoints,
          size_text(e, f->checkpoint_bytes));
  fprintf(out, "%s\n",
          f->disk_bytes > f->checkpoint_bytes * ((double)f->checkpoints + 0.5) ? ", one being written" : "");
  if (f->data_bytes > 0)
    fprintf(out, "  tokens           %s, if no token is seen twice\n", size_text(d, f->data_bytes));
}

#endif  // GDN_FORECAST_H
