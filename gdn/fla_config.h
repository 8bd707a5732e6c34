// fla_config.h: fla's own config.json (flash-linear-attention 0.6: gated_deltanet, kda, delta_net, transformer; hybrids
// through "attn") to Config, for --init-from. What asks for something that this trainer does not have is refused by the
// name of the setting.
//
// defines: hf_config_from_fla
#ifndef GDN_FLA_CONFIG_H
#define GDN_FLA_CONFIG_H

#include "config_json.h"

// Settings of fla's classes that do not change what the model computes, and those that hf_config_from_fla looks at.
static const char *const fla_neutral_keys[] = {"architectures",
                                               "model_type",
                                               "torch_dtype",
                                               "dtype",
                                               "transformers_version",
                                               "_name_or_path",
                                               "auto_map",
                                               "attn_mode",
                                               "use_cache",
                                               "initializer_range",
                                               "max_position_embeddings",
                                               "hidden_ratio",
                                               "bos_token_id",
                                               "eos_token_id",
                                               "pad_token_id",
                                               "fuse_norm",
                                               "fuse_swiglu",
                                               "fuse_cross_entropy",
                                               "fuse_linear_cross_entropy",
                                               "use_l2warp",
                                               "safe_gate",
                                               "rescale_prenorm_residual",
                                               "return_dict",
                                               "fla_version"};
static const char *const fla_known_keys[] = {"vocab_size",
                                             "hidden_size",
                                             "num_hidden_layers",
                                             "intermediate_size",
                                             "hidden_act",
                                             "norm_eps",
                                             "tie_word_embeddings",
                                             "num_heads",
                                             "num_v_heads",
                                             "head_dim",
                                             "expand_k",
                                             "expand_v",
                                             "use_gate",
                                             "output_gate_activation",
                                             "use_short_conv",
                                             "conv_size",
                                             "allow_neg_eigval",
                                             "attn",
                                             "lower_bound",
                                             "use_beta",
                                             "use_output_norm",
                                             "qk_norm",
                                             "qk_activation",
                                             "num_kv_heads",
                                             "qkv_bias",
                                             "window_size",
                                             "rope_theta",
                                             "elementwise_affine"};

typedef struct {
  const json_t *j;
  const char *path;
  Error *err;
  int rc;  // of the first value that is wrong
} FlaReader;

static inline const json_t *fla_value(FlaReader *r, const char *key) {  // NULL: not there or null
  const json_t *v = json_object_get(r->j, key);
  return json_is_null(v) ? NULL : v;
}

static inline int fla_int(FlaReader *r, const char *key, int otherwise) {
  int64_t n = otherwise;
  if (fla_value(r, key) && !r->rc) r->rc = json_get_int(r->j, key, 0, 1 << 24, &n, r->path, r->err);
  return (int)n;
}

static inline double fla_real(FlaReader *r, const char *key, double otherwise) {
  if (fla_value(r, key) && !r->rc) r->rc = json_get_real(r->j, key, &otherwise, r->path, r->err);
  return otherwise;
}

static inline int fla_bool(FlaReader *r, const char *key, int otherwise) {
  if (fla_value(r, key) && !r->rc) r->rc = json_get_bool(r->j, key, &otherwise, r->path, r->err);
  return otherwise;
}

// Refuses any value of `key` but those given (texts; other may be NULL); a key that is not there is fine.
static inline void fla_need_text(FlaReader *r, const char *key, const char *value, const char *other) {
  const json_t *v = fla_value(r, key);
  if (!v || r->rc) return;
  const char *s = json_is_string(v) ? json_string_value(v) : "no text";
  if (strcmp(s, value) && (!other || strcmp(s, other)))
    r->rc = error_set(r->err, EXIT_CHECKPOINT, "%s: \"%s\" is %.60s: only \"%s\" is supported", r->path, key, s, value);
}

static inline void fla_need_bool(FlaReader *r, const char *key, int value) {
  if (fla_bool(r, key, value) != value && !r->rc)
    r->rc =
        error_set(r->err, EXIT_CHECKPOINT, "%s: \"%s\" is %s: not supported", r->path, key, value ? "false" : "true");
}

// Attention settings (of "attn", of an entry of its list, or of a transformer) into c; every entry must agree.
static inline Mixer fla_attention(FlaReader *r, Config *c, int seen) {
  Config a = *c;
  a.attn_heads = fla_int(r, "num_heads", 32);
  a.attn_kv_heads = fla_int(r, "num_kv_heads", a.attn_heads);
  a.rope_theta = fla_real(r, "rope_theta", 10000.0);
  int window = fla_int(r, "window_size", 0);
  fla_need_bool(r, "qkv_bias", 0);
  if (r->rc) return MIX_ATTN;
  if (a.attn_heads < 1 || c->width % a.attn_heads) {
    r->rc = error_set(r->err, EXIT_CHECKPOINT, "%s: %d attention heads do not divide hidden_size %d", r->path,
                      a.attn_heads, c->width);
    return MIX_ATTN;
  }
  a.attn_head_dim = c->width / a.attn_heads;
  if (seen && (a.attn_heads != c->attn_heads || a.attn_kv_heads != c->attn_kv_heads || a.rope_theta != c->rope_theta ||
               (window && (seen & 2) && window != c->window)))
    r->rc =
        error_set(r->err, EXIT_CHECKPOINT,
                  "%s: \"attn\": entries with different heads, rope_theta or window_size are not supported", r->path);
  if (window) a.window = window;
  *c = a;
  return window ? MIX_SWA : MIX_ATTN;
}

// The layers of one entry of "attn".
static inline void fla_attention_layers(FlaReader *r, const json_t *spec, Config *c, Mixer *mixers, int *seen) {
  static const char *const known[] = {"layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta"};
  const json_t *layers = json_object_get(spec, "layers");
  if (!json_is_object(spec) || !json_is_array(layers) || !json_is_integer(json_object_get(spec, "num_heads"))) {
    r->rc = error_set(r->err, EXIT_CHECKPOINT, "%s: \"attn\": needed layers and num_heads", r->path);
    return;
  }
  const char *key;
  json_t *v;
  json_object_foreach((json_t *)spec, key, v) {
    int ok = json_is_null(v) || json_is_false(v);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) ok |= !strcmp(key, known[i]);
    if (!ok && !r->rc)
      r->rc = error_set(r->err, EXIT_CHECKPOINT, "%s: \"attn\": setting \"%.80s\" is not supported", r->path, key);
  }
  FlaReader sub = {spec, r->path, r->err, r->rc};
  Mixer m = fla_attention(&sub, c, *seen);
  r->rc = sub.rc;
  *seen |= m == MIX_SWA ? 3 : 1;
  for (size_t i = 0; i < json_array_size(layers) && !r->rc; i++) {
    const json_t *l = json_array_get(layers, i);
    json_int_t n = json_integer_value(l);
    if (!json_is_integer(l) || n < 0 || n >= c->layers || mixer_is_attention(mixers[n]))
      r->rc = error_set(r->err, EXIT_CHECKPOINT, "%s: \"attn\": layers: needed different numbers from 0 to %d", r->path,
                        c->layers - 1);
    else
      mixers[n] = m;
  }
}

// The shortest pattern that repeats to the given mixers.
static inline int config_set_layers(Config *c, const Mixer *mixers) {
  for (int p = 1; p <= c->layers && p <= MAX_PATTERN; p++) {
    int same = 1;
    for (int i = p; i < c->layers && same; i++) same = mixers[i] == mixers[i - p];
    if (!same) continue;
    c->n_pattern = p;
    memcpy(c->pattern, mixers, (size_t)p * sizeof *mixers);
    return 0;
  }
  return -1;
}

static inline int hf_config_from_fla(const json_t *j, Config *c, const char *path, Error *err) {
  FlaReader r = {j, path, err, 0};
  const char *type = json_string_value(json_object_get(j, "model_type"));
  Mixer base = !type                             ? MIX_COUNT
               : !strcmp(type, "gated_deltanet") ? MIX_GDN
               : !strcmp(type, "kda")            ? MIX_KDA
               : !strcmp(type, "delta_net")      ? MIX_DELTANET
               : !strcmp(type, "transformer")    ? MIX_ATTN
                                                 : MIX_COUNT;
  if (base == MIX_COUNT)
    return error_set(err, EXIT_CHECKPOINT,
                     "%s: model_type %.60s: needed gated_deltanet, kda, delta_net, transformer or train_gdn", path,
                     type ? type : "is missing");
  const char *key;
  json_t *v;
  json_object_foreach((json_t *)j, key, v) {
    int ok = json_is_null(v) || json_is_false(v);
    for (size_t i = 0; i < sizeof fla_neutral_keys / sizeof *fla_neutral_keys; i++)
      ok |= !strcmp(key, fla_neutral_keys[i]);
    for (size_t i = 0; i < sizeof fla_known_keys / sizeof *fla_known_keys; i++) ok |= !strcmp(key, fla_known_keys[i]);
    if (!ok) return error_set(err, EXIT_CHECKPOINT, "%s: setting \"%.80s\" is not supported", path, key);
  }
  *c = config_default();
  c->vocab = fla_int(&r, "vocab_size", 32000);
  c->width = fla_int(&r, "hidden_size", 2048);
  c->layers = fla_int(&r, "num_hidden_layers", base == MIX_GDN ? 21 : 24);
  c->ff = fla_int(&r, "intermediate_size", 0);
  if (!c->ff) {  // fla's rule: 2/3 of hidden_ratio x width, up to a multiple of 256
    int64_t ff = ((int64_t)c->width * fla_int(&r, "hidden_ratio", 4) * 2 / 3 + 255) / 256 * 256;
    c->ff = ff < INT_MAX ? (int)ff : INT_MAX;
  }
  c->norm_eps = fla_real(&r, "norm_eps", 1e-6);
  c->tied = fla_bool(&r, "tie_word_embeddings", 0);
  c->bos = fla_int(&r, "bos_token_id", json_object_get(j, "bos_token_id") ? -1 : 1);
  c->beta_max = fla_bool(&r, "allow_neg_eigval", 0) ? 2 : 1;
  c->conv_size = fla_bool(&r, "use_short_conv", 1) ? fla_int(&r, "conv_size", 4) : 0;
  fla_need_text(&r, "hidden_act", "swish", "silu");
  fla_need_bool(&r, "elementwise_affine", 1);
  fla_need_bool(&r, "use_beta", 1);
  fla_need_bool(&r, "use_output_norm", 1);
  fla_need_text(&r, "qk_activation", "silu", NULL);
  if (r.rc) return r.rc;
  if (c->width < 1 || c->layers < 1 || c->layers > MAX_LAYERS)
    return error_set(err, EXIT_CHECKPOINT, "%s: hidden_size %d, num_hidden_layers %d", path, c->width, c->layers);

  Mixer *mixers = (Mixer *)alloc_array(c->layers, sizeof(Mixer), "config.json");
  for (int i = 0; i < c->layers; i++) mixers[i] = base;
  if (base == MIX_ATTN) {
    fla_need_bool(&r, "qk_norm", 0);
    Mixer m = fla_attention(&r, c, 0);
    for (int i = 0; i < c->layers; i++) mixers[i] = m;
  } else {
    c->heads = fla_int(&r, "num_heads", base == MIX_GDN ? 6 : 16);
    c->v_heads = fla_int(&r, "num_v_heads", c->heads);
    double expand_v = fla_real(&r, "expand_v", base == MIX_GDN ? 2.0 : 1.0), key = 0, value = 0;
    if (base == MIX_DELTANET) {
      fla_need_text(&r, "qk_norm", "l2", NULL);
      double expand_k = fla_real(&r, "expand_k", 1.0);
      if (c->heads > 0) key = c->width * expand_k / c->heads, value = c->width * expand_v / c->heads;
      c->output_gate = fla_bool(&r, "use_gate", 0) ? OUTPUT_GATE_SILU : OUTPUT_GATE_AUTO;
    } else {
      key = fla_int(&r, "head_dim", base == MIX_GDN ? 256 : 128), value = key * expand_v;
    }
    if (base == MIX_GDN) {
      const char *act = json_string_value(json_object_get(j, "output_gate_activation"));
      int sigmoid = act && !strcmp(act, "sigmoid");
      if (!sigmoid) fla_need_text(&r, "output_gate_activation", "swish", "silu");
      c->output_gate = !fla_bool(&r, "use_gate", 1) ? OUTPUT_GATE_NONE
                       : sigmoid                    ? OUTPUT_GATE_SIGMOID
                                                    : OUTPUT_GATE_AUTO;
    }
    if (base == MIX_KDA) c->kda_lower_bound = fla_real(&r, "lower_bound", 0.0);
    c->head_k = key >= 0 && key < 1e6 ? (int)(key + 0.5) : 0,
    c->head_v = value >= 0 && value < 1e6 ? (int)(value + 0.5) : 0;
    if (!r.rc && (fabs(c->head_k - key) > 1e-5 * key || fabs(c->head_v - value) > 1e-5 * value))
      r.rc = error_set(err, EXIT_CHECKPOINT, "%s: head dims of %g and %g: needed whole numbers", path, key, value);
    const json_t *attn = fla_value(&r, "attn");
    int seen = 0;
    if (json_is_array(attn))
      for (size_t i = 0; i < json_array_size(attn) && !r.rc; i++)
        fla_attention_layers(&r, json_array_get(attn, i), c, mixers, &seen);
    else if (attn && !r.rc)
      fla_attention_layers(&r, attn, c, mixers, &seen);
  }
  if (!r.rc && config_set_layers(c, mixers))
    r.rc = error_set(err, EXIT_CHECKPOINT, "%s: more than %d layers without a repeating pattern", path, MAX_PATTERN);
  free(mixers);
  return r.rc;
}

#endif  // GDN_FLA_CONFIG_H
