// hf_config.h: Config to config.json of a Hugging Face folder and back.
//
// Models that fla has a class for are written in fla's keys (flash-linear-attention 0.6: gated_deltanet, kda,
// delta_net, transformer; hybrids through "attn"), so that from_pretrained builds them; all others get model_type
// "train_gdn" with the same tensor names, and "auto_map", by which from_pretrained(..., trust_remote_code=True) finds
// the classes of modeling_train_gdn.py, which a checkpoint has beside it (hf_modeling.h). Either way the file holds our
// complete Config under "train_gdn", from which it is read back exactly. A config.json without that key is fla's own:
// read for --init-from, and refused by the name of the setting when it asks for something this trainer does not have.
//
// defines: HF_MODELING_FILE, hf_model_type, hf_needs_modeling, hf_config_make, hf_config_parse, hf_config_read,
//          config_to_json, config_from_json, config_diff
#ifndef GDN_HF_CONFIG_H
#define GDN_HF_CONFIG_H

#include <limits.h>
#include <stddef.h>
#include "config.h"
#include "json.h"

// ----------------------------------------------------------------------------
// every field of Config by name

typedef enum { FIELD_INT, FIELD_REAL, FIELD_CHOICE } FieldKind;
typedef enum {
  FOR_ALL,
  FOR_DELTA,
  FOR_CONV,
  FOR_GDN2,
  FOR_KDA,
  FOR_ATTENTION,
  FOR_SWA,
  FOR_MAMBA2,
  FOR_RESET
} FieldUse;

typedef struct {
  const char *name;
  FieldKind kind;
  size_t offset;
  FieldUse use;         // which models it matters to
  const char *choices;  // names of an enum's values, in order, separated by spaces
} ConfigField;

// `model` and `pattern` are the only ones that are not in this table.
static const ConfigField config_fields[] = {
    {"vocab", FIELD_INT, offsetof(Config, vocab), FOR_ALL, NULL},
    {"width", FIELD_INT, offsetof(Config, width), FOR_ALL, NULL},
    {"layers", FIELD_INT, offsetof(Config, layers), FOR_ALL, NULL},
    {"ff", FIELD_INT, offsetof(Config, ff), FOR_ALL, NULL},
    {"tied", FIELD_INT, offsetof(Config, tied), FOR_ALL, NULL},
    {"heads", FIELD_INT, offsetof(Config, heads), FOR_DELTA, NULL},
    {"v_heads", FIELD_INT, offsetof(Config, v_heads), FOR_DELTA, NULL},
    {"head_k", FIELD_INT, offsetof(Config, head_k), FOR_DELTA, NULL},
    {"head_v", FIELD_INT, offsetof(Config, head_v), FOR_DELTA, NULL},
    {"attn_heads", FIELD_INT, offsetof(Config, attn_heads), FOR_ATTENTION, NULL},
    {"attn_kv_heads", FIELD_INT, offsetof(Config, attn_kv_heads), FOR_ATTENTION, NULL},
    {"attn_head_dim", FIELD_INT, offsetof(Config, attn_head_dim), FOR_ATTENTION, NULL},
    {"window", FIELD_INT, offsetof(Config, window), FOR_SWA, NULL},
    {"rope_theta", FIELD_REAL, offsetof(Config, rope_theta), FOR_ATTENTION, NULL},
    {"mamba_state", FIELD_INT, offsetof(Config, mamba_state), FOR_MAMBA2, NULL},
    {"mamba_head", FIELD_INT, offsetof(Config, mamba_head), FOR_MAMBA2, NULL},
    {"mamba_expand", FIELD_INT, offsetof(Config, mamba_expand), FOR_MAMBA2, NULL},
    {"mamba_groups", FIELD_INT, offsetof(Config, mamba_groups), FOR_MAMBA2, NULL},
    {"conv_size", FIELD_INT, offsetof(Config, conv_size), FOR_CONV, NULL},
    {"norm_eps", FIELD_REAL, offsetof(Config, norm_eps), FOR_ALL, NULL},
    {"l2_eps", FIELD_REAL, offsetof(Config, l2_eps), FOR_DELTA, NULL},
    {"beta_max", FIELD_INT, offsetof(Config, beta_max), FOR_DELTA, NULL},
    {"output_gate", FIELD_CHOICE, offsetof(Config, output_gate), FOR_DELTA, "auto silu sigmoid none"},
    {"output_norm", FIELD_INT, offsetof(Config, output_norm), FOR_DELTA, NULL},
    {"qk_norm", FIELD_CHOICE, offsetof(Config, qk_norm), FOR_DELTA, "l2 l1"},
    {"decay", FIELD_INT, offsetof(Config, decay), FOR_DELTA, NULL},
    {"erase", FIELD_CHOICE, offsetof(Config, erase), FOR_GDN2, "channel head"},
    {"write", FIELD_CHOICE, offsetof(Config, write), FOR_GDN2, "channel head"},
    {"kda_lower_bound", FIELD_REAL, offsetof(Config, kda_lower_bound), FOR_KDA, NULL},
    {"boundary_reset", FIELD_INT, offsetof(Config, boundary_reset), FOR_ALL, NULL},
    {"bos", FIELD_INT, offsetof(Config, bos), FOR_RESET, NULL},
};
enum { CONFIG_FIELDS = sizeof config_fields / sizeof *config_fields };

static inline int config_field_int(const Config *c, const ConfigField *f) {  // enums too: they have the size of an int
  int v;
  memcpy(&v, (const char *)c + f->offset, sizeof v);
  return v;
}

static inline double config_field_real(const Config *c, const ConfigField *f) {
  double v;
  memcpy(&v, (const char *)c + f->offset, sizeof v);
  return v;
}

// The n-th name of a list separated by spaces, copied; "?" past the end. Returns dst.
static inline const char *word_at(const char *list, int n, char *dst, size_t size) {
  for (; n > 0 && list; n--) list = strchr(list, ' ') ? strchr(list, ' ') + 1 : NULL;
  snprintf(dst, size, "%.*s", list && n == 0 ? (int)strcspn(list, " ") : 1, list && n == 0 ? list : "?");
  return dst;
}

static inline int word_index(const char *list, const char *name) {  // -1: not in the list
  char word[32];
  for (int n = 0;; n++) {
    if (!strcmp(word_at(list, n, word, sizeof word), "?")) return -1;
    if (!strcmp(word, name)) return n;
  }
}

// A new object with all fields.
static inline json_t *config_to_json(const Config *c) {
  json_t *j = json_object(), *pattern = json_array();
  char word[32];
  json_object_set_new(j, "model", json_string(c->model));
  for (int i = 0; i < CONFIG_FIELDS; i++) {
    const ConfigField *f = &config_fields[i];
    json_object_set_new(j, f->name,
                        f->kind == FIELD_REAL ? json_real(config_field_real(c, f))
                        : f->kind == FIELD_INT
                            ? json_integer(config_field_int(c, f))
                            : json_string(word_at(f->choices, config_field_int(c, f), word, sizeof word)));
  }
  for (int i = 0; i < c->n_pattern; i++) json_array_append_new(pattern, json_string(mixer_name(c->pattern[i])));
  json_object_set_new(j, "pattern", pattern);
  return j;
}

static inline int config_from_json(const json_t *j, Config *c, const char *path, Error *err) {
  *c = config_default();
  const char *model = json_get_text(j, "model", path, err);
  if (!model) return EXIT_CHECKPOINT;
  snprintf(c->model, sizeof c->model, "%s", model);
  for (int i = 0; i < CONFIG_FIELDS; i++) {
    const ConfigField *f = &config_fields[i];
    int64_t n = 0;
    double x = 0;
    if (f->kind == FIELD_REAL) {
      if (json_get_real(j, f->name, &x, path, err)) return EXIT_CHECKPOINT;
      memcpy((char *)c + f->offset, &x, sizeof x);
      continue;
    }
    if (f->kind == FIELD_INT) {
      if (json_get_int(j, f->name, -1, 1 << 24, &n, path, err)) return EXIT_CHECKPOINT;
    } else {
      const char *name = json_get_text(j, f->name, path, err);
      if (!name) return EXIT_CHECKPOINT;
      n = word_index(f->choices, name);
      if (n < 0)
        return error_set(err, EXIT_CHECKPOINT, "%s: \"%s\" is %.40s: needed one of %s", path, f->name, name,
                         f->choices);
    }
    int v = (int)n;
    memcpy((char *)c + f->offset, &v, sizeof v);
  }
  if (c->mamba_expand > 1024)  // its product with the width must fit an int
    return error_set(err, EXIT_CHECKPOINT, "%s: \"mamba_expand\" is %d: needed at most 16", path, c->mamba_expand);
  const json_t *pattern = json_object_get(j, "pattern");
  size_t n = json_array_size(pattern);
  if (n < 1 || n > MAX_PATTERN)
    return error_set(err, EXIT_CHECKPOINT, "%s: \"pattern\": needed 1 to %d mixers", path, MAX_PATTERN);
  c->n_pattern = (int)n;
  for (size_t i = 0; i < n; i++) {
    const char *name = json_string_value(json_array_get(pattern, i));
    c->pattern[i] = mixer_from_name(name ? name : "");
    if (c->pattern[i] == MIX_COUNT)
      return error_set(err, EXIT_CHECKPOINT, "%s: \"pattern\" holds %.40s, which is no mixer", path, name ? name : "?");
  }
  json_t *object = (json_t *)j;
  for (void *at = json_object_iter(object); at; at = json_object_iter_next(object, at)) {
    const char *key = json_object_iter_key(at);
    int known = !strcmp(key, "model") || !strcmp(key, "pattern");
    for (int i = 0; i < CONFIG_FIELDS && !known; i++) known = !strcmp(key, config_fields[i].name);
    if (!known) return error_set(err, EXIT_CHECKPOINT, "%s: unknown field \"%.80s\": of a newer version?", path, key);
  }
  return 0;
}

static inline int config_field_used(const Config *c, FieldUse use) {
  int delta = 0;
  for (int m = 0; m < MIX_COUNT; m++) delta |= mixer_is_delta((Mixer)m) && config_has_mixer(c, (Mixer)m);
  switch (use) {
    case FOR_DELTA:
      return delta;
    case FOR_CONV:
      return delta || config_has_mixer(c, MIX_MAMBA2);
    case FOR_GDN2:
      return config_has_mixer(c, MIX_GDN2);
    case FOR_KDA:
      return config_has_mixer(c, MIX_KDA);
    case FOR_ATTENTION:
      return config_has_mixer(c, MIX_SWA) || config_has_mixer(c, MIX_ATTN);
    case FOR_SWA:
      return config_has_mixer(c, MIX_SWA);
    case FOR_MAMBA2:
      return config_has_mixer(c, MIX_MAMBA2);
    case FOR_RESET:
      return c->boundary_reset;
    default:
      return 1;
  }
}

// 1 when a and b are different models; `line` names the first field that differs, in the words "there" (a) and "here"
// (b). Fields that no layer of either uses do not count, nor does the preset's name.
static inline int config_diff(const Config *a, const Config *b, char *line, size_t size) {
  char x[32], y[32];
  for (int i = 0; i < CONFIG_FIELDS; i++) {
    const ConfigField *f = &config_fields[i];
    if (!config_field_used(a, f->use) && !config_field_used(b, f->use)) continue;
    if (f->kind == FIELD_REAL) {
      if (config_field_real(a, f) == config_field_real(b, f)) continue;
      snprintf(line, size, "%s %.17g there, %.17g here", f->name, config_field_real(a, f), config_field_real(b, f));
      return 1;
    }
    int p = config_field_int(a, f), q = config_field_int(b, f);
    if (f->offset == offsetof(Config, output_gate)) {  // compare what the layers really have
      int differs = 0;
      for (int m = 0; m <= MIX_DELTANET; m++)
        if (config_has_mixer(a, (Mixer)m))
          differs |= config_output_gate(a, (Mixer)m) != config_output_gate(b, (Mixer)m);
      if (!differs) continue;
    }
    if (p == q) continue;
    if (f->kind == FIELD_INT)
      snprintf(line, size, "%s %d there, %d here", f->name, p, q);
    else
      snprintf(line, size, "%s %s there, %s here", f->name, word_at(f->choices, p, x, sizeof x),
               word_at(f->choices, q, y, sizeof y));
    return 1;
  }
  for (int i = 0; i < a->layers; i++)
    if (config_layer_mixer(a, i) != config_layer_mixer(b, i)) {
      snprintf(line, size, "layer %d is %s there, %s here", i, mixer_name(config_layer_mixer(a, i)),
               mixer_name(config_layer_mixer(b, i)));
      return 1;
    }
  return 0;
}

// ----------------------------------------------------------------------------
// Config to fla's keys

// The delta-rule mixer that a stack of one kind and attention is made of; MIX_COUNT: attention alone; -1: other stacks.
static inline int hf_base_mixer(const Config *c) {
  int base = MIX_COUNT;
  for (int i = 0; i < c->layers; i++) {
    Mixer m = config_layer_mixer(c, i);
    if (mixer_is_attention(m) || (int)m == base) continue;
    if (base != MIX_COUNT || (m != MIX_GDN && m != MIX_KDA && m != MIX_DELTANET)) return -1;
    base = m;
  }
  return base;
}

// fla's model_type, or "train_gdn" when fla has no class for this model.
static inline const char *hf_model_type(const Config *c) {
  int base = hf_base_mixer(c), swa = config_has_mixer(c, MIX_SWA), attn = config_has_mixer(c, MIX_ATTN);
  if (base < 0 || c->ff == 0) return "train_gdn";
  if ((swa || attn) && c->attn_head_dim * c->attn_heads != c->width) return "train_gdn";  // fla derives the head dim
  if (base == MIX_COUNT) return swa && attn ? "train_gdn" : "transformer";
  OutputGate gate = config_output_gate(c, (Mixer)base);
  if (!c->output_norm || c->qk_norm != NORM_L2 || c->l2_eps != 1e-6) return "train_gdn";
  if (base == MIX_DELTANET) return c->v_heads == c->heads && gate != OUTPUT_GATE_SIGMOID ? "delta_net" : "train_gdn";
  if (!c->decay) return "train_gdn";
  if (base == MIX_KDA) return gate == OUTPUT_GATE_SIGMOID ? "kda" : "train_gdn";
  return "gated_deltanet";
}

#define HF_MODELING_FILE "modeling_train_gdn.py"

// 1 when from_pretrained needs the classes of HF_MODELING_FILE.
static inline int hf_needs_modeling(const Config *c) { return !strcmp(hf_model_type(c), "train_gdn"); }

static inline json_t *json_id(int id) { return id >= 0 ? json_integer(id) : json_null(); }

// a / b such that fla, which computes (int)(b * ratio), gets a back.
static inline double hf_ratio(int a, int b) {
  double r = (double)a / b;
  while ((int)(b * r) < a) r = nextafter(r, 1e300);
  return r;
}

// One entry of "attn": the layers of one attention mixer.
static inline json_t *hf_attention(const Config *c, Mixer m) {
  json_t *layers = json_array();
  for (int i = 0; i < c->layers; i++)
    if (config_layer_mixer(c, i) == m) json_array_append_new(layers, json_integer(i));
  return json_pack("{s:o, s:i, s:i, s:b, s:o, s:f}", "layers", layers, "num_heads", c->attn_heads, "num_kv_heads",
                   c->attn_kv_heads, "qkv_bias", 0, "window_size", m == MIX_SWA ? json_integer(c->window) : json_null(),
                   "rope_theta", c->rope_theta);
}

// config.json as a new object. seq_len: max_position_embeddings; eos, pad: token ids, -1: null.
static inline json_t *hf_config_make(const Config *c, int seq_len, int eos, int pad) {
  static const struct {
    const char *type, *architecture;
  } classes[] = {{"gated_deltanet", "GatedDeltaNetForCausalLM"},
                 {"kda", "KDAForCausalLM"},
                 {"delta_net", "DeltaNetForCausalLM"},
                 {"transformer", "TransformerForCausalLM"},
                 {"train_gdn", "TrainGdnForCausalLM"}};
  const char *type = hf_model_type(c), *architecture = "";
  for (size_t i = 0; i < sizeof classes / sizeof *classes; i++)
    if (!strcmp(type, classes[i].type)) architecture = classes[i].architecture;
  int base = hf_base_mixer(c);
  json_t *j =
      json_pack("{s:[s], s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:s, s:f, s:b, s:b, s:f, s:i, s:o, s:o, s:o}",
                "architectures", architecture, "model_type", type, "torch_dtype", "float32", "vocab_size", c->vocab,
                "hidden_size", c->width, "num_hidden_layers", c->layers, "hidden_ratio", 4, "intermediate_size", c->ff,
                "hidden_act", "swish", "norm_eps", c->norm_eps, "tie_word_embeddings", c->tied, "use_cache",
                !hf_needs_modeling(c), "initializer_range", 0.02, "max_position_embeddings", seq_len, "bos_token_id",
                json_id(c->bos), "eos_token_id", json_id(eos), "pad_token_id", json_id(pad));
  json_t *ours = config_to_json(c);
  if (hf_needs_modeling(c)) {
    json_object_set_new(j, "auto_map",
                        json_pack("{s:s, s:s}", "AutoConfig", "modeling_train_gdn.TrainGdnConfig",
                                  "AutoModelForCausalLM", "modeling_train_gdn.TrainGdnForCausalLM"));
  } else {
    json_object_set_new(j, "fuse_norm", json_true());
    json_object_set_new(j, "fuse_swiglu", json_true());
    json_object_set_new(j, "fuse_cross_entropy", json_true());
    json_object_set_new(j, "use_l2warp", json_false());
    if (base != MIX_KDA) json_object_set_new(j, "fuse_linear_cross_entropy", json_false());
    if (base == MIX_COUNT) {  // transformer
      json_t *a = hf_attention(c, config_layer_mixer(c, 0));
      json_object_del(a, "layers");
      json_object_update_missing(j, a);
      json_decref(a);
      json_object_set_new(j, "qk_norm", json_false());
      json_object_set_new(j, "elementwise_affine", json_true());
    } else {
      OutputGate gate = config_output_gate(c, (Mixer)base);
      json_object_set_new(j, "attn_mode", json_string("chunk"));
      json_object_set_new(j, "num_heads", json_integer(c->heads));
      json_object_set_new(j, "use_short_conv", json_boolean(c->conv_size > 0));
      json_object_set_new(j, "conv_size", json_integer(c->conv_size ? c->conv_size : 4));
      json_object_set_new(j, "allow_neg_eigval", json_boolean(c->beta_max == 2));
      if (base != MIX_KDA) json_object_set_new(j, "use_gate", json_boolean(gate != OUTPUT_GATE_NONE));
      if (base == MIX_DELTANET) {
        json_object_set_new(j, "expand_k", json_real((double)c->heads * c->head_k / c->width));
        json_object_set_new(j, "expand_v", json_real((double)c->heads * c->head_v / c->width));
        json_object_set_new(j, "use_beta", json_true());
        json_object_set_new(j, "use_output_norm", json_true());
        json_object_set_new(j, "qk_norm", json_string("l2"));
        json_object_set_new(j, "qk_activation", json_string("silu"));
      } else {
        json_object_set_new(j, "head_dim", json_integer(c->head_k));
        json_object_set_new(j, "num_v_heads", c->v_heads != c->heads ? json_integer(c->v_heads) : json_null());
        json_object_set_new(j, "expand_v", json_real(hf_ratio(c->head_v, c->head_k)));
      }
      if (base == MIX_GDN)
        json_object_set_new(j, "output_gate_activation",
                            json_string(gate == OUTPUT_GATE_SIGMOID ? "sigmoid" : "swish"));
      if (base == MIX_KDA) {
        json_object_set_new(j, "safe_gate", json_false());
        json_object_set_new(j, "lower_bound", c->kda_lower_bound ? json_real(c->kda_lower_bound) : json_null());
      }
      int swa = config_has_mixer(c, MIX_SWA), attn = config_has_mixer(c, MIX_ATTN);
      json_t *a = swa && attn ? json_pack("[o, o]", hf_attention(c, MIX_SWA), hf_attention(c, MIX_ATTN))
                  : swa       ? hf_attention(c, MIX_SWA)
                  : attn      ? hf_attention(c, MIX_ATTN)
                              : json_null();
      json_object_set_new(j, "attn", a);
    }
  }
  if (!j || !ours || json_object_set_new(j, "train_gdn", ours)) fail(EXIT_MEMORY, "config.json: out of memory");
  return j;
}

// ----------------------------------------------------------------------------
// fla's keys to Config

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

// Reads the text of a config.json: our Config as it was written, or fla's settings. Accepts any bytes without harm.
static inline int hf_config_parse(const char *text, size_t size, const char *path, Config *c, Error *err) {
  json_t *j = json_parse(text, size, path, EXIT_CHECKPOINT, err);
  if (!j) return EXIT_CHECKPOINT;
  const json_t *ours = json_object_get(j, "train_gdn");
  int rc = ours ? config_from_json(ours, c, path, err) : hf_config_from_fla(j, c, path, err);
  json_decref(j);
  Error why;
  if (!rc && config_check(c, &why)) rc = error_set(err, EXIT_CHECKPOINT, "%s: %.900s", path, why.text);
  return rc;
}

// The Config of the model in a folder (DIR/config.json). 0, or EXIT_CHECKPOINT with one line.
static inline int hf_config_read(const char *dir, Config *c, Error *err) {
  char path[PATH_SIZE];
  size_t size = 0;
  if (path_join(path, dir, "config.json", err)) return EXIT_CHECKPOINT;
  char *text = file_read(path, 16 << 20, &size, EXIT_CHECKPOINT, err);
  int rc = text ? hf_config_parse(text, size, path, c, err) : EXIT_CHECKPOINT;
  free(text);
  return rc;
}

#endif  // GDN_HF_CONFIG_H
